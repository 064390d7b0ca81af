# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint to go back to after a spike."""

from pathlib import Path

from megatron.checkpoint.state import checkpoints
from megatron.errors import NumericsError


def checkpoint_before(folder: str, first: int, spike: int) -> int:
    """The iteration of the newest checkpoint before step `first`, where the trouble is taken to begin; else of the oldest
    one before the spike. Raises NumericsError when there is none.
    """
    found = [iteration for iteration in checkpoints(Path(folder)) if iteration < spike]
    if not found:
        raise NumericsError(f"iteration {spike} is a spike, and there is no checkpoint before it to go back to",
                            f"looked in {folder}", "save more often (--save-interval)")  # fmt: skip
    return max([iteration for iteration in found if iteration < first], default=min(found))
