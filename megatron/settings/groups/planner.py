# SPDX-License-Identifier: Apache-2.0
"""The settings of the planner."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Optional

from megatron.settings.declare import Count, Fraction, Natural, Needs, Positive, setting
from megatron.settings.groups.batch import AUTO


def layout_was_open(s: SimpleNamespace) -> bool:
    """Whether the planner chooses part of the layout, or has chosen it (the micro-batch size is a number then)."""
    given = s.settings.given("micro_batch_size")
    chosen = given is not None and given.value == AUTO
    return s.auto_parallel or s.micro_batch_size == AUTO or chosen


def planned(s: SimpleNamespace) -> bool:
    return s.dry_run or s.preflight or layout_was_open(s)


OPEN_LAYOUT = Needs("--auto-parallel or --micro-batch-size auto", layout_was_open)
PLANNED = Needs("--dry-run, --preflight or --auto-parallel", planned)

# Tests that show effects
CLUSTER = "test_what_is_planned_for"

cluster = partial(setting, needs=PLANNED, shown=CLUSTER)


@dataclass(frozen=True)
class Planner:
    """The planner: search for a layout, or check a run without training."""

    auto_parallel: bool = setting(
        "search for the best layout for this job's ranks, and train in it", False, shown="test_auto_parallel_trains"
    )
    max_global_batch_size: Optional[Count] = setting(
        "let --auto-parallel choose the global batch size, up to this",
        None,
        needs=OPEN_LAYOUT,
        shown="test_max_global_batch_size_bounds_what_the_search_takes",
    )
    tune_steps: Natural = setting(
        "with --auto-parallel or --micro-batch-size auto: measure the best three layouts for this many steps each",
        0,
        needs=OPEN_LAYOUT,
        shown="test_tune_steps_times_as_many_steps_of_the_best_three",
    )
    parallel_plan: Optional[str] = setting(
        "train in the best layout of this file, from megatron.tools.plan --emit PLAN.json",
        None,
        shown="test_a_plan_of_a_file_is_the_layout_that_its_flags_ask_for",
    )
    dry_run: bool = setting(
        "print settings, layout, memory, time and all problems, and exit; uses no device",
        False,
        shown="test_dry_run_trains_nothing",
    )
    wide: bool = setting(
        "do not wrap the output of plan and --dry-run at 80 columns",
        False,
        needs=PLANNED,
        shown="test_wide_cuts_nothing",
    )
    preflight: bool = setting(
        "check settings, every rank's shapes, a small copy of the job and the machines, and exit",
        False,
        shown="test_preflight_checks_and_trains_nothing",
    )
    allow_memory_overcommit: bool = setting(
        "train even if less memory is free than predicted", False, shown="test_overcommitted_it_trains"
    )
    world_size: Optional[Count] = setting(
        "number of ranks to plan for (default: those of this job)",
        None,
        "--num-gpus",
        needs=PLANNED._replace(met=lambda s: planned(s) or s.print_topology),
        shown=CLUSTER,
    )
    local_world_size: Optional[Count] = cluster(
        "number of ranks per node (default: this job's, else at most 8)", None, "--gpus-per-node"
    )
    device_name: Optional[str] = cluster("device to plan for, such as A100-80GB (default: this machine's)", None)
    device_memory_gb: Optional[Positive] = cluster(
        "memory of a device in GB, 10^9 bytes (default: DEVICE_MEMORY_GB, or the device's own)", None
    )
    memory_margin: Optional[Fraction] = setting(
        "share of a device's memory to leave free (default: 0.08 in a search, 0.03 beside a given layout)",
        None,
        needs=PLANNED,
        shown="test_a_margin_of_memory",
    )
    mtbf: Optional[Positive] = setting(
        "mean hours between failures of a node: plan and --dry-run then show the best save interval and the goodput",
        None,
        needs=PLANNED,
        shown="test_mtbf_is_that_of_a_node",
    )
    calibration: Optional[str] = cluster("file of measured speeds, written by megatron.tools.plan --calibrate", None)
