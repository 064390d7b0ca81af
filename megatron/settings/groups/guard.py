# SPDX-License-Identifier: Apache-2.0
"""The settings of guards."""

from dataclasses import dataclass
from typing import Annotated, Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, Range, setting
from megatron.settings.groups.parallel import RANKS

ROLLBACK = Needs("--on-spike rollback", lambda s: s.on_spike == "rollback")


@dataclass(frozen=True)
class Guard:
    """Checks while a run trains, and the reactions to failures."""

    check_replicas_interval: Optional[Count] = setting(
        "number of steps between bitwise comparisons of parameters across replicas",
        None,
        "--check-weight-hash-across-dp-replicas-interval",
        needs=RANKS,
        shown="test_replicas_are_compared_at_their_interval",
    )
    exit_signal_handler: bool = setting(
        "on SIGTERM or SIGUSR1: save after the current step and exit with code 9",
        False,
        on_resume="irrelevant",
        shown="test_a_signal_to_one_rank_saves_once_on_all_at_the_same_step",
    )
    kill_switch_file: Optional[str] = setting(
        "save and exit when this file appears",
        None,
        "--kill-switch-path",
        on_resume="irrelevant",
        shown="test_the_kill_switch_stops_with_a_checkpoint_and_then_keeps_others_from_starting",
    )
    heartbeat_dir: Optional[str] = setting(
        "folder where each rank records its current state (megatron.tools.supervise sets and reads it)",
        None,
        on_resume="irrelevant",
        shown="test_a_heartbeat_says_what_a_rank_does_and_how_it_ended",
    )
    on_nan: Literal["stop", "skip"] = setting(
        "action on a loss or gradient that is not finite: stop before the update, or skip the step and count it",
        "stop",
        "--check-for-nan-in-loss-and-grad=stop/skip",
        "--no-check-for-nan-in-loss-and-grad=skip/stop",
        shown="test_steps_that_are_not_finite_can_be_skipped_and_are_counted",
    )
    on_spike: Literal["continue", "skip", "rollback"] = setting(
        "action on a spike of loss or gradient norm: log it, skip the update, or load an earlier checkpoint and skip "
        "the steps before the spike",
        "continue",
        shown="test_a_spike_is_told_or_skipped",
    )
    spike_window: Annotated[int, Range("at least 32", lambda value: value >= 32)] = setting(
        "number of previous steps to compare a step with, at least 32",
        128,
        shown="test_spike_window_is_how_many_steps_are_remembered",
    )
    spike_threshold: Positive = setting(
        "deviations above the window's median that count as a spike",
        10.0,
        shown="test_spike_threshold_is_in_deviations_above_the_median",
    )
    spike_skip_steps: Count = setting(
        "number of steps up to a spike that a rollback skips",
        8,
        needs=ROLLBACK,
        shown="test_a_spike_rolls_back_and_leaves_out_what_led_to_it",
    )
    max_rollbacks: Natural = setting(
        "maximum number of rollbacks; the next spike stops the run (0: the first one)",
        3,
        needs=ROLLBACK,
        shown="test_rollbacks_are_limited",
    )
    iterations_to_skip: Optional[list[int]] = setting(
        "steps to skip: their samples are not trained on", None, shown="test_iterations_to_skip_are_passed_over"
    )
    override: Optional[str] = setting(
        "settings (separated by commas) that may differ from the checkpoint although they change results",
        None,
        on_resume="irrelevant",
        shown="test_resuming_says_where_and_refuses_another_run",
    )
