# SPDX-License-Identifier: Apache-2.0
"""The settings of profiles."""

from dataclasses import dataclass
from functools import partial
from typing import Optional

from megatron.settings.declare import Count, setting

# Tests that show effects
PROFILED = "test_profile_of_some_steps_with_shapes_or_without"

profiled = partial(setting, needs="profile", shown=PROFILED)


@dataclass(frozen=True)
class Profiling:
    """Profiling of some steps with torch.profiler: a Chrome trace and tables."""

    profile: bool = setting("profile some steps on some ranks", False, "--use-pytorch-profiler", shown=PROFILED)
    profile_step_start: Count = profiled("first iteration to profile", 10)
    profile_step_end: Count = profiled("iteration to stop profiling before", 12)
    profile_ranks: Optional[list[int]] = setting(
        "ranks to profile (default: 0)", None, needs="profile", shown="test_chosen_steps_of_chosen_ranks"
    )
    profile_dir: Optional[str] = profiled("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = profiled(
        "also record shapes: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )
