# SPDX-License-Identifier: Apache-2.0
"""Train the shrunk job of a command: with all its parallel features, and so small that steps take seconds on this CPU.

    python -m megatron.tools.shrink <flags of the training> --world-size 128 [--steps 3] [--shrunk-dir DIR]

`SHRINK=1 bash scripts/...` runs this. Ranks are processes of this machine that communicate through gloo. It prints what
was reduced, then the log of the training; the exit code is that of the training.
"""

import os
from dataclasses import dataclass, replace
from typing import Optional

from megatron.errors import run_main
from megatron.model.command_line import parse_with_options
from megatron.model.recipe import command_of
from megatron.settings.schema import Checkpoint, Config, setting


@dataclass(frozen=True)
class ShrunkRunOptions:
    """Options of the shrunk job."""

    steps: int = setting("optimizer steps to train", 3)
    shrunk_dir: Optional[str] = setting("folder to save into and resume from (default: nothing is saved)", None)


def main(argv: list[str]) -> None:
    """Print what shrinks, then train. Raises the training's errors, and SettingsError if the original cannot work."""
    config, asked = parse_with_options(argv, ShrunkRunOptions, __doc__.splitlines()[0])
    from megatron.planner.command import training_flags
    from megatron.planner.shrink import original, reduced, shrunk_job_of
    from megatron.training.rules import resolve

    config, world_size = original(config, print)
    shrunk = shrunk_job_of(config, world_size, max(1, asked.steps))
    small = with_checkpoints(shrunk.config, config.checkpoint, asked.shrunk_dir)
    resolved = resolve(small, shrunk.world_size)
    print(f"the shrunk job of {world_size} ranks, on {shrunk.world_size}:")
    for line in reduced(config, small):
        print(f"  {line}")
    for words in shrunk.lost:
        print(f"note: not part of the shrunk job: {words}")
    command = f"{command_of(small.model.model_type)} {' '.join(training_flags(small))}"
    print(f"torchrun --nproc-per-node {shrunk.world_size} {command}", flush=True)
    train(resolved, shrunk.world_size)


def with_checkpoints(config: Config, real: Checkpoint, folder: Optional[str]) -> Config:
    """Replace the checkpoint settings: a folder for the shrunk job, with the real job's options."""
    if folder is None:
        return config
    interval = max(1, (config.batch.train_iters or 2) - 1)
    own = replace(
        Checkpoint(),
        save=folder,
        load=folder,
        auto_resume=True,
        save_interval=interval,
        async_save=real.async_save,
        no_save_optim=real.no_save_optim,
        no_load_optim=real.no_load_optim,
    )
    return replace(config, checkpoint=own)


def train(config: Config, world_size: int) -> None:
    """Train resolved settings on forked ranks. Raises the failure of the first rank that fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron.model.recipe import recipe_of
    from megatron.mpu.forked import RankFailed, run_ranks
    from megatron.planner.parity import preload
    from megatron.training.loop import pretrain

    preload(config)

    def body(rank: int) -> None:
        pretrain(config, recipe_of(config))

    try:
        run_ranks(world_size, body, timeout=60 * config.parallel.distributed_timeout_minutes)
    except RankFailed as failed:
        if failed.failure is None or config.logging.debug:
            raise
        raise failed.failure from None


if __name__ == "__main__":
    run_main(main)
