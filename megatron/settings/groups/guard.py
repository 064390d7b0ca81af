# SPDX-License-Identifier: Apache-2.0
"""The settings of guards."""

from dataclasses import dataclass
from typing import Annotated, Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, Range, shown_by
from megatron.settings.groups.parallel import RANKS

ROLLBACK = Needs("--on-spike rollback", lambda s: s.on_spike == "rollback")
VALIDATES = Needs("--rerun-mode validate_results", lambda s: s.rerun_mode == "validate_results")


@dataclass(frozen=True)
class Guard:
    """Checks while a run trains, and the reactions to failures."""

    check_replicas_interval: Optional[Count] = shown_by("test_replicas_are_compared_at_their_interval")(
        "number of steps between bitwise comparisons of parameters across replicas",
        None,
        "--check-weight-hash-across-dp-replicas-interval",
        needs=RANKS,
    )
    exit_signal_handler: bool = shown_by("test_a_signal_to_one_rank_saves_once_on_all_at_the_same_step")(
        "on SIGTERM or SIGUSR1: save after the current step and exit with code 9", False, on_resume="irrelevant"
    )
    kill_switch_file: Optional[str] = shown_by(
        "test_the_kill_switch_stops_with_a_checkpoint_and_then_keeps_others_from_starting"
    )("save and exit when this file appears", None, "--kill-switch-path", on_resume="irrelevant")
    heartbeat_dir: Optional[str] = shown_by("test_a_heartbeat_says_what_a_rank_does_and_how_it_ended")(
        "folder where each rank records its current state (megatron.tools.supervise sets and reads it)",
        None,
        on_resume="irrelevant",
    )
    flight_recorder_dump_path: Optional[str] = shown_by(
        "test_ranks_that_hang_name_the_collective_and_who_has_not_come"
    )(
        "folder where each rank writes its last collectives (torch's flight recorder) when it hangs; tools.supervise "
        "sets and reads it",
        None,
        on_resume="irrelevant",
    )
    flight_recorder_trace_buffer_size: Count = shown_by("test_the_recorder_remembers_as_many_calls_as_asked")(
        "number of collectives and messages that it remembers",
        2000,
        needs=Needs("--flight-recorder-dump-path", lambda s: s.flight_recorder_dump_path is not None),
        on_resume="irrelevant",
    )
    on_nan: Literal["stop", "skip"] = shown_by("test_steps_that_are_not_finite_can_be_skipped_and_are_counted")(
        "action on a loss or gradient that is not finite: stop before the update, or skip the step and count it",
        "stop",
        "--check-for-nan-in-loss-and-grad=stop/skip",
        "--no-check-for-nan-in-loss-and-grad=skip/stop",
    )
    on_spike: Literal["continue", "skip", "rollback"] = shown_by("test_a_spike_is_told_or_skipped")(
        "action on a spike of loss or gradient norm: log it, skip the update, or load an earlier checkpoint and skip "
        "the steps before the spike",
        "continue",
    )
    spike_window: Annotated[int, Range("at least 32", lambda value: value >= 32)] = shown_by(
        "test_spike_window_is_how_many_steps_are_remembered"
    )("number of previous steps to compare a step with, at least 32", 128)
    spike_threshold: Positive = shown_by("test_spike_threshold_is_in_deviations_above_the_median")(
        "deviations above the window's median that count as a spike", 10.0
    )
    spike_skip_steps: Count = shown_by("test_a_spike_rolls_back_and_leaves_out_what_led_to_it")(
        "number of steps up to a spike that a rollback skips", 8, needs=ROLLBACK
    )
    max_rollbacks: Natural = shown_by("test_rollbacks_are_limited")(
        "maximum number of rollbacks; the next spike stops the run (0: the first one)", 3, needs=ROLLBACK
    )
    rerun_mode: Literal["disabled", "validate_results", "report_stats", "report_determinism_stats"] = shown_by(
        "test_a_transient_error_is_named_and_leaves_no_trace"
    )(
        "compute a step again before its update: where it is suspicious (not finite, a spike), here and on another rank, "
        "to find devices that compute wrongly; or each step, to count differences",
        "disabled",
        on_resume="irrelevant",
    )
    rerun_interval: Optional[Count] = shown_by("test_every_nth_step_finds_a_device_that_computes_otherwise")(
        "also compute each step at a multiple of N again, and compare the weights and the optimizer's state with what the "
        "last update left",
        None,
        needs=VALIDATES,
        on_resume="irrelevant",
    )
    error_injection_rate: Natural = shown_by("test_a_transient_error_is_named_and_leaves_no_trace")(
        "flip a bit on purpose in one of so many steps, before its update; 0: never",
        0,
        needs=VALIDATES,
        on_resume="irrelevant",
    )
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = shown_by(
        "test_a_persistent_error_ends_the_run_with_its_rank"
    )(
        "of what kind it is: none, in the first computation of a step, or in each of one rank",
        "transient_error",
        needs=Needs("--error-injection-rate N", lambda s: s.error_injection_rate > 0),
        on_resume="irrelevant",
    )
    iterations_to_skip: Optional[list[int]] = shown_by("test_iterations_to_skip_are_passed_over")(
        "steps to skip: their samples are not trained on", None
    )
    override: Optional[str] = shown_by("test_resuming_says_where_and_refuses_another_run")(
        "settings (separated by commas) that may differ from the checkpoint although they change results",
        None,
        on_resume="irrelevant",
    )
