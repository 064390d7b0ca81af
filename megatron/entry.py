# SPDX-License-Identifier: Apache-2.0
"""The entry point of training scripts: `start` goes from a command line to training."""

import contextlib
from collections.abc import Callable

from megatron.errors import Failure, UsageError, debugging, explain
from megatron.model.command_line import parse_any
from megatron.model.recipe import Recipe, module_of
from megatron.mpu.cpu_threads import choose_waiting
from megatron.settings import rank_env
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.from_checkpoint import refuse_foreign
from megatron.settings.schema import Config
from megatron.telemetry.notify import event_problem
from megatron.telemetry.own_code import refuse_another_module
from megatron.telemetry.prometheus import refused_port
from megatron.telemetry.trackers import missing_tracker
from megatron.training.rules import layout_is_open, resolve


def start(argv: list[str], recipe: Recipe | Callable[[list[str]], Recipe]) -> None:
    """Check the settings of a recipe without torch; then plan (--dry-run, --preflight), tune open settings, or train.

    recipe: or what finds it in the command line, if its module loads torch.
    """
    argv = rank_env.adopt(argv)
    here = rank_env.ranks()  # wrong numbers of ranks are reported first
    choose_waiting(here.local_world_size or 1)  # before torch is loaded
    if not isinstance(recipe, Recipe):
        recipe = recipe(argv)
    refuse_another_module(recipe.model_type, module_of(recipe.model_type))
    about = recipe.about or f"Pretrain a model of type {recipe.model_type}."
    try:
        config = parse_any(argv, description=about, recipe=recipe)
    except UsageError as refused:
        with contextlib.suppress(ImportError):  # it needs packages that a wrong Python lacks
            from megatron.training.events import record_refused_words

            record_refused_words(argv, refused)
        raise
    if config.model.model_type != recipe.model_type:
        raise UsageError(
            f"--model-type {config.model.model_type}: this command trains {recipe.model_type}",
            do="leave it out, or run the script of that model",
        )
    with debugging(config.logging.debug), failing_in_users_words(config.statements):
        if config.batch.train_epochs is not None:
            from megatron.data.epochs import in_samples

            config = in_samples(config, recipe.own_data, recipe.epoch_samples)
        _start(config, recipe)


def _start(config: Config, recipe: Recipe) -> None:
    refuse_foreign(config.checkpoint)  # before a refusal is recorded there
    if config.planner.dry_run:
        here = rank_env.ranks()
        if here.rank and here.local_world_size:  # the first of the ranks that a launcher has started reports for all
            return
        from megatron.planner.dry_run import dry_run

        return dry_run(config)
    if problem := missing_tracker(config.logging) or event_problem(config.logging):
        raise problem
    if config.planner.preflight:
        from megatron.planner.preflight.run import preflight

        return preflight(config, recipe)
    if not layout_is_open(config):
        return train(config, recipe)
    from megatron.planner.tuning import tuned

    with tuned(config, recipe) as config:
        train(config, recipe)


def train(config: Config, recipe: Recipe) -> None:
    """Train with these settings on the ranks of this job."""
    from megatron.training.events import recorded_refusal  # needs packages that a wrong Python lacks

    with recorded_refusal(config):
        config = resolve(config, world_size=world_size(config))
    if config.parallel.print_topology:
        return print_topology(config)
    from megatron.planner.memory_check import check_room, has_driver

    if has_driver(config.kernels.device):  # else no memory of a device is looked at, and nothing before needs torch
        from megatron.mpu.initialize import prepare_device

        prepare_device(config.parallel, config.kernels, rank_env.ranks().rank, world_size(config))
    refusal = check_room(config, recipe) or refused_port(config.logging)
    from megatron.training.loop import pretrain

    planned = planned_memory(config) if config.logging.log_memory_interval else ()
    pretrain(config, recipe, planned, refusal, _explain_memory)


def _explain_memory(error: BaseException, config: Config, use) -> Failure:
    """What was planned and what was in use when a rank ran out of memory."""
    from megatron.planner.out_of_memory import explained

    with contextlib.suppress(Failure, ValueError):  # the planner has no estimate for such settings
        return explained(error, config, use)
    return explain(error)


def planned_memory(config: Config) -> list[int]:
    """The planner's prediction of bytes on the device, for each pipeline rank."""
    from megatron.planner.memory import peaks
    from megatron.planner.target import cluster_of, planned_job

    cluster, _ = cluster_of(config)
    return peaks(*planned_job(config, cluster), cluster.device)


def print_topology(config: Config) -> None:
    """Print all groups of ranks, on rank 0."""
    from megatron.mpu.mesh import mesh_of

    if rank_env.ranks().rank == 0:
        print(mesh_of(config.parallel, 0, world_size(config), create_groups=False).topology())


def world_size(config: Config) -> int:
    """The number of ranks of this job; for --print-topology, the number of ranks of the planned job."""
    asked = config.planner.world_size if config.parallel.print_topology else None
    return asked or rank_env.ranks().world_size
