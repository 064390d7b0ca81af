# SPDX-License-Identifier: Apache-2.0
"""From a command line to training: `start` is what pretrain_gpt.py and its like do. As a command of its own this is
pretraining whose layout nobody has to choose: the planner's search, then the training in what it found.

    torchrun --nproc-per-node gpu -m megatron.pretrain --task-type GPT --max-global-batch-size 16 --num-layers 48 ...
    python -m megatron.pretrain --task-type GPT --world-size 64 --local-world-size 8 --max-global-batch-size 16 ...

On the ranks of a job it is `pretrain_gpt.py --auto-parallel`. With --world-size, outside of a job, it prints the layouts
that such a cluster could have, as `python -m megatron.tools.plan` does, and trains nothing.
"""

import os
from collections.abc import Mapping

from megatron.errors import UsageError, debugging, run_main
from megatron.model.recipe import Recipe, module_of, named_recipe
from megatron.mpu.cpu_threads import choose_waiting
from megatron.settings import rank_env
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Config
from megatron.telemetry.own_code import refuse_another_module
from megatron.telemetry.trackers import missing_tracker
from megatron.training.rules import layout_is_open, resolve

TASKS = ("GPT",)


def main(argv: list[str], env: Mapping[str, str] = os.environ) -> None:
    """Train, or plan. The command line is that of pretrain_gpt.py and of megatron.tools.plan, and --task-type."""
    rank_env.adopt_slurm()
    task, flags = split_task(argv)
    if task.rpartition(".")[2].upper() not in TASKS:
        raise UsageError(f"--task-type {task}: there is {', '.join(TASKS)}", do="leave it out, or say --task-type GPT")
    names = {word.partition("=")[0].replace("_", "-") for word in flags}
    in_job = "RANK" in env and "WORLD_SIZE" in env
    if names & {"--world-size", "--num-gpus"} and not in_job and not names & {"--dry-run", "--preflight"}:
        from megatron.tools import plan

        return plan.main(flags)
    start(["--auto-parallel", *flags], named_recipe("GPT"))


def start(argv: list[str], recipe: Recipe) -> None:
    """Check the settings of a recipe, which needs no torch; then look ahead, search what they leave open, or train."""
    rank_env.adopt_slurm()
    rank_env.ranks()  # numbers of ranks that are none are told first
    refuse_another_module(recipe.model_type, module_of(recipe.model_type))
    defaults = {"model_type": recipe.model_type, **recipe.defaults}
    config = parse_pretrain(argv, recipe.setting_groups, f"Pretrain a model of type {recipe.model_type}.", defaults)
    config = recipe.settled(config)
    if config.model.model_type != recipe.model_type:
        raise UsageError(
            f"--model-type {config.model.model_type}: this command trains {recipe.model_type}",
            do="leave it out, or run the script of that model",
        )
    with debugging(config.logging.debug):
        if config.batch.train_epochs is not None:
            from megatron.data.epochs import in_samples

            config = in_samples(config, recipe.own_data, recipe.epoch_samples)
        _start(config, recipe)


def _start(config: Config, recipe: Recipe) -> None:
    if config.planner.dry_run:
        from megatron.planner.dry_run import dry_run

        return dry_run(config)
    if missing := missing_tracker(config.logging):
        raise missing
    choose_waiting(rank_env.ranks().local_world_size or 1)  # before torch is loaded
    if config.planner.preflight:
        from megatron.planner.preflight.run import preflight

        return preflight(config, recipe)
    if not layout_is_open(config):
        return train(config, recipe)
    from megatron.planner.tuning import tuned

    with tuned(config, recipe) as config:
        train(config, recipe)


def train(config: Config, recipe: Recipe) -> None:
    """Train with these settings on the ranks that there are."""
    config = resolve(config, world_size=world_size(config))
    if config.parallel.print_topology:
        return print_topology(config)
    from megatron.planner.room import check_room

    check_room(config, recipe)
    from megatron.training.loop import pretrain

    pretrain(config, recipe, planned_memory(config) if config.logging.log_memory_interval else ())


def planned_memory(config: Config) -> list[int]:
    """Bytes on the device of each pipeline rank, as the planner expects them; none where it cannot."""
    from megatron.planner import target
    from megatron.planner.layout import Layout
    from megatron.planner.memory import memory_report

    cluster, _ = target.cluster_of(config)
    layout = Layout.of(config, cluster.world_size)
    job, _ = target.job_of(config, cluster, layout.dp)
    return [memory_report(job, layout, cluster.device, rank).total for rank in range(layout.pp)]


def print_topology(config: Config) -> None:
    """Every group of ranks, said once."""
    from megatron.mpu.mesh import mesh_of

    if rank_env.ranks().rank == 0:
        print(mesh_of(config.parallel, 0, world_size(config), create_groups=False).topology())


def world_size(config: Config) -> int:
    """Ranks that this job was started with; for a look at a topology, ranks that it would have."""
    asked = config.planner.world_size if config.parallel.print_topology else None
    return asked or rank_env.ranks().world_size


def split_task(argv: list[str]) -> tuple[str, list[str]]:
    """(the value of --task-type, the other words).

    >>> split_task(["--task-type", "megatron.GPT", "--num-layers", "4"])
    ('megatron.GPT', ['--num-layers', '4'])
    """
    task, rest, words = TASKS[0], [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name.replace("_", "-") != "--task-type":
            rest.append(word)
        elif not equals and (value := next(words, "")) == "":
            raise UsageError("--task-type needs a value", do="--task-type GPT")
        else:
            task = value
    return task, rest


if __name__ == "__main__":
    run_main(main)
