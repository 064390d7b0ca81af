# SPDX-License-Identifier: Apache-2.0
"""What a sample of a model consists of, where that is not one row of token numbers. Needs no torch.

A recipe names the arrays (`Recipe.arrays`); its datasets give dicts of them, the loader checks each and makes a micro-batch
of them: `MicroBatch.arrays`, with the sequence first.
"""

from dataclasses import dataclass
from typing import Optional

LABELS, LOSS_MASK = "labels", "loss_mask"  # what every such sample has


@dataclass(frozen=True)
class SampleArray:
    """One array of a sample.

    length: how many numbers; 0: one number, which stands for the whole sample
    below:  whole numbers from 0 to below this
    mask:   finite numbers from 0 instead: what each place counts
    """

    length: int
    below: Optional[int] = None
    mask: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,) if self.length else ()

    def words(self) -> str:
        """What it holds, for messages."""
        what = "numbers from 0" if self.mask else f"whole numbers from 0 to {self.below - 1:,}"
        return f"{self.length} {what}" if self.length else f"one of the {what}"
