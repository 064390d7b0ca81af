# SPDX-License-Identifier: Apache-2.0
"""The settings of profiles."""

from dataclasses import dataclass
from typing import Optional

from megatron.settings.declare import Count, shown_by

# Tests that show effects
PROFILED = "test_profile_of_some_steps_with_shapes_or_without"

profiled = shown_by(PROFILED, needs="profile")


@dataclass(frozen=True)
class Profiling:
    """Profiling of some steps with torch.profiler: a Chrome trace and tables."""

    profile: bool = shown_by(PROFILED)("profile some steps on some ranks", False, "--use-pytorch-profiler")
    profile_step_start: Count = profiled("first iteration to profile", 10)
    profile_step_end: Count = profiled("iteration to stop profiling before", 12)
    profile_ranks: Optional[list[int]] = shown_by("test_chosen_steps_of_chosen_ranks")(
        "ranks to profile (default: 0)", None, needs="profile"
    )
    profile_dir: Optional[str] = profiled("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = profiled(
        "also record shapes: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )
