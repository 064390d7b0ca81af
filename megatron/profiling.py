# SPDX-License-Identifier: Apache-2.0
"""The settings of the profiler: one group of `config.py`, which knows them all."""

from dataclasses import dataclass
from typing import Optional

from megatron.setting import setting


@dataclass(frozen=True)
class Profiling:
    """Where the time and memory of some steps go: a Chrome trace and tables, by torch.profiler."""

    profile: bool = setting("profile some steps on some ranks", False, "--use-pytorch-profiler")
    profile_step_start: int = setting("first iteration to profile", 10)
    profile_step_end: int = setting("iteration before which profiling ends", 12)
    profile_ranks: Optional[list[int]] = setting("ranks that profile (default: 0)", None)
    profile_dir: Optional[str] = setting("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = setting(
        "record shapes, too: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )
