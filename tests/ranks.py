# SPDX-License-Identifier: Apache-2.0
"""Runs a function of a test on the ranks of a job: most often one that trains by the words of a command."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from megatron.entry import start
from megatron.mpu.forked import run_ranks


def trains(script: ModuleType, line: str = "") -> Callable[[int, str], None]:
    """A function of (rank, words) that runs a script, or trains a module's recipe, by this line and these words."""

    def train(rank: int, words: str = "") -> None:
        argv = f"{line} {words}".split()
        script.main(argv) if hasattr(script, "main") else start(argv, script.recipe())

    return train


def on_ranks(world: int, function: Callable[..., Any], *args) -> None:
    """Run `function(rank, *args)` on so many ranks; one is this process, where monkeypatches and caches of a test hold."""
    function(0, *args) if world == 1 else run_ranks(world, function, *args)
