# SPDX-License-Identifier: Apache-2.0
"""Train the shrunk job of a command: all its parallel features on, so small that a few steps take seconds on this CPU.

    python -m megatron.tools.shrink <flags of the training> --world-size 128 [--steps 3] [--shrunk-dir DIR]

It is what `SHRINK=1 bash scripts/...` runs. Ranks are processes of this machine that talk through gloo. Says what was made
smaller, then what any training says; the exit code is that of the training.
"""

import os
from dataclasses import dataclass, replace
from typing import Optional

from megatron.errors import run_main
from megatron.model.arguments import parse_with_options
from megatron.model.recipe import command_of
from megatron.settings.schema import Checkpoint, Config, setting


@dataclass(frozen=True)
class ShrunkRunOptions:
    """How the shrunk job is trained."""

    steps: int = setting("optimizer steps to train", 3)
    shrunk_dir: Optional[str] = setting("folder to save into and go on from (default: nothing is saved)", None)


def main(argv: list[str]) -> None:
    """Say what shrinks, then train. Raises what the training raises, and SettingsError where the original cannot work."""
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
    """Checkpoints in a folder of the shrunk job's own, in the way of the real ones."""
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
    """Train resolved settings on forked ranks. Raises the failure of the rank that fails first."""
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
