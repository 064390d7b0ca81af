# SPDX-License-Identifier: Apache-2.0
"""Runs a function of a test on the ranks of a job."""

from collections.abc import Callable
from typing import Any

from megatron.mpu.forked import run_ranks


def on_ranks(world: int, function: Callable[..., Any], *args) -> None:
    """Run `function(rank, *args)` on so many ranks; one is this process, where monkeypatches and caches of a test hold."""
    function(0, *args) if world == 1 else run_ranks(world, function, *args)
