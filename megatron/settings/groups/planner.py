# SPDX-License-Identifier: Apache-2.0
"""The settings of the planner."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Optional

from megatron.settings.declare import Count, Fraction, FromOne, Natural, Needs, Positive, shown_by
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

cluster = shown_by(CLUSTER, needs=PLANNED)
uneven = shown_by("test_the_busiest_rank_of_experts_is_planned_for", needs="num_experts")


@dataclass(frozen=True)
class Planner:
    """The planner: search for a layout, or check a run without training."""

    auto_parallel: bool = shown_by("test_auto_parallel_trains")(
        "search for the best layout for this job's ranks, and train in it", False
    )
    max_global_batch_size: Optional[Count] = shown_by("test_max_global_batch_size_bounds_what_the_search_takes")(
        "let --auto-parallel choose the global batch size, up to this", None, needs=OPEN_LAYOUT
    )
    tune_steps: Natural = shown_by("test_tune_steps_times_as_many_steps_of_the_best_three")(
        "with --auto-parallel or --micro-batch-size auto: measure the best three layouts for this many steps each",
        0,
        needs=OPEN_LAYOUT,
    )
    parallel_plan: Optional[str] = shown_by("test_a_plan_of_a_file_is_the_layout_that_its_flags_ask_for")(
        "train in the best layout of this file, from megatron.tools.plan --emit PLAN.json", None
    )
    dry_run: bool = shown_by("test_dry_run_trains_nothing")(
        "print settings, layout, memory, time and all problems, and exit; uses no device", False
    )
    wide: bool = shown_by("test_wide_cuts_nothing")(
        "do not wrap the output of plan and --dry-run at 80 columns", False, needs=PLANNED
    )
    preflight: bool = shown_by("test_preflight_checks_and_trains_nothing")(
        "check settings, every rank's shapes, a small copy of the job and the machines, and exit", False
    )
    allow_memory_overcommit: bool = shown_by("test_overcommitted_it_trains")(
        "train even if less memory is free than predicted", False
    )
    world_size: Optional[Count] = shown_by(CLUSTER)(
        "number of ranks to plan for (default: those of this job)",
        None,
        "--num-gpus",
        needs=PLANNED._replace(met=lambda s: planned(s) or s.print_topology),
    )
    local_world_size: Optional[Count] = cluster(
        "number of ranks per node (default: this job's, else at most 8)", None, "--gpus-per-node"
    )
    device_name: Optional[str] = cluster("device to plan for, such as A100-80GB (default: this machine's)", None)
    device_memory_gb: Optional[Positive] = cluster(
        "memory of a device in GB, 10^9 bytes (default: DEVICE_MEMORY_GB, or the device's own)", None
    )
    memory_margin: Optional[Fraction] = shown_by("test_a_margin_of_memory")(
        "share of a device's memory to leave free (default: 0.08 in a search, 0.03 beside a given layout)",
        None,
        needs=PLANNED,
    )
    moe_load_imbalance: FromOne = uneven(
        "predicted times: rows of the busiest rank of experts, as a multiple of the mean over "
        "--expert-model-parallel-size; 1: loads are even",
        1.0,
    )
    moe_memory_imbalance: Optional[FromOne] = uneven(
        "predicted memory: the same where it is largest (default: --moe-load-imbalance)", None
    )
    mtbf: Optional[Positive] = shown_by("test_mtbf_is_that_of_a_node")(
        "mean hours between failures of a node: plan and --dry-run then show the best save interval and the goodput",
        None,
        needs=PLANNED,
    )
    calibration: Optional[str] = cluster("file of measured speeds, written by megatron.tools.plan --calibrate", None)
