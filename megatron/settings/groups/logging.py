# SPDX-License-Identifier: Apache-2.0
"""The settings of logs and of profiles."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, shown_by

TIMERS = Needs("--timing-log-level above 0", lambda s: s.timing_log_level)

# Tests that show effects
SLOWEST = "test_the_slowest_and_fastest_ranks_are_logged"


@dataclass(frozen=True)
class Logging:
    """Log output: its contents, and where it goes."""

    log_ranks: Optional[list[int]] = shown_by("test_ranks_that_speak")(
        "ranks that log to stdout, with their rank on each line (default: 0, without it); log files are those of rank 0",
        None,
        on_resume="irrelevant",
    )
    log_interval: Count = shown_by("test_log_lines_come_at_their_interval")(
        "steps between log lines; the last step is always logged", 100, "--logging-freq"
    )
    timing_log_level: Literal[0, 1, 2] = shown_by("test_timers_are_those_of_their_level")(
        "timers to log: 0: only the time of a step; 1: also its main parts; 2: also the parts of those", 0
    )
    timing_log_option: Literal["minmax", "max", "all"] = shown_by("test_parts_of_a_pipeline_on_all_ranks")(
        "times to log across ranks: minimum and maximum, maximum, or all ranks", "minmax", needs=TIMERS
    )
    barrier_with_level_1_timing: bool = shown_by("test_timers_let_ranks_begin_together")(
        "use a barrier before timers of level 1",
        True,
        needs=Needs("--timing-log-level above 0 and more than one rank", lambda s: s.timing_log_level and s.world > 1),
    )
    log_timers_to_tensorboard: bool = shown_by("test_timers_in_tensorboard")(
        "also write timers to TensorBoard and Weights & Biases",
        False,
        needs=Needs(
            "--timing-log-level above 0, and --tensorboard-dir or --wandb-project",
            lambda s: s.timing_log_level and (s.tensorboard_dir or s.wandb_project),
        ),
    )
    console: Literal["auto", "short", "megatron"] = shown_by("test_who_wants_it_otherwise")(
        "log lines on stdout: short, or Megatron-LM's; auto: short on a terminal", "auto"
    )
    log_file: Optional[str] = shown_by("test_a_pipe_and_the_file_get_megatrons_lines")(
        "file to append Megatron-LM's log lines to (default: train.log under --save)", None
    )
    progress_bar: bool = shown_by("test_who_wants_it_otherwise")("show a progress bar on a terminal", True)
    log_progress: bool = shown_by("test_progress_of_a_run_that_is_taken_up_again")(
        "write progress.txt under --save, as Megatron-LM does: starts and saves, with FLOPs and tokens",
        False,
        needs="save",
    )
    log_throughput: bool = shown_by("test_throughput_stands_where_megatron_has_it")(
        "log TFLOP/s per rank (where Megatron-LM's line has it), samples and steps per second, and tokens per second of a "
        "data parallel rank; at the end of training, their means",
        False,
    )
    throughput_ignore_steps: Natural = shown_by("test_the_mean_leaves_the_first_steps_of_a_start_out")(
        "--log-throughput: number of first steps to exclude from the mean throughput", 0, needs="log_throughput"
    )
    log_epoch: bool = shown_by("test_a_run_of_epochs")(
        "log the mean losses of each epoch at its end (--train-epochs)", False
    )
    log_memory_interval: Optional[Count] = shown_by("test_memory_is_told_beside_what_was_planned")(
        "number of steps between log lines of memory: current, peak and planned, of the rank that uses most", None
    )
    log_params_norm: bool = shown_by("test_figures_of_all_ranks_do_not_depend_on_the_layout")(
        "log the norm of all parameters every --log-interval steps", False
    )
    log_num_zeros_in_grad: bool = shown_by("test_figures_of_all_ranks_do_not_depend_on_the_layout")(
        "log the number of zeros in the gradient every --log-interval steps", False
    )
    log_max_attention_logit: bool = shown_by("test_qk_clip::test_any_layout_is_the_plain_loop")(
        "log the largest attention logit of each step over all heads, as --qk-clip does", False
    )
    straggler_detection: bool = shown_by("test_without_detection_nothing_is_measured")(
        "measure each rank's own time in the parts of a step; report slow ranks, data and stages", True
    )
    log_straggler: bool = shown_by(SLOWEST)(
        "every --log-interval steps, log the ranks with the least and the most own time (--straggler-minmax-count)",
        False,
        needs="straggler_detection",
    )
    straggler_minmax_count: Count = shown_by(SLOWEST)(
        "--log-straggler: number of ranks to log at each end", 1, needs="log_straggler"
    )
    metrics_file: Optional[str] = shown_by("test_metrics_file")(
        "JSON lines file of logged steps (default: metrics.jsonl under --save)", None
    )
    tensorboard_dir: Optional[str] = shown_by("test_tensorboard_has_megatrons_tags_over_iterations_and_samples")(
        "folder for TensorBoard logs", None
    )
    visualdl_dir: Optional[str] = shown_by("test_visualdl_gets_the_curves")(
        "folder for VisualDL logs (PaddlePaddle's TensorBoard)", None
    )
    wandb_project: Optional[str] = shown_by("test_weights_and_biases_gets_the_settings_and_the_curves")(
        "project name for Weights & Biases", None
    )
    wandb_exp_name: Optional[str] = shown_by("test_weights_and_biases_gets_the_settings_and_the_curves")(
        "run name for Weights & Biases", None
    )
    metrics_port: Optional[int] = shown_by("test_a_run_serves_its_current_values")(
        "port where rank 0 serves its current loss, speed, memory etc. to Prometheus, at /metrics; 0: a free one, which "
        "the log names (docs/watching.md)",
        None,
        on_resume="irrelevant",
    )
    metrics_host: str = shown_by("test_a_run_serves_its_current_values")(
        "address to listen on for --metrics-port; 0.0.0.0: all networks of the machine, without a password",
        "127.0.0.1",
        needs=Needs("--metrics-port", lambda s: s.metrics_port is not None),
        on_resume="irrelevant",
    )
    peak_tflops: Optional[Positive] = shown_by("test_mfu_is_a_share_of_the_peak")(
        "peak TFLOP/s of a rank's device, for MFU (default: of known GPUs; CPUs have no MFU)", None
    )
    hooks: Optional[list[str]] = shown_by("test_places_in_order")(
        "your own classes to call at named points of the training loop: MODULE:CLASS ... (docs/extending.md)",
        None,
        on_resume="irrelevant",
    )
    on_event: Optional[str] = shown_by("test_a_command_hears_of_the_end")(
        "shell command to run for events of --event-level: their JSON is on its stdin, EVENT, EVENT_LEVEL, EVENT_MESSAGE "
        "and others are in its environment (docs/events.md)",
        None,
        on_resume="irrelevant",
    )
    webhook: Optional[str] = shown_by("test_a_webhook_that_nobody_answers_does_not_hold_a_run_up")(
        "URL to which events of --event-level are sent as JSON (POST); @FILE: a file with the URL",
        None,
        on_resume="irrelevant",
    )
    event_level: Literal["info", "warning", "error"] = shown_by(
        "test_a_webhook_that_nobody_answers_does_not_hold_a_run_up"
    )(
        "least level of the events for --on-event and --webhook; the end of a run is always sent",
        "warning",
        needs=Needs("--on-event or --webhook", lambda s: s.on_event or s.webhook),
        on_resume="irrelevant",
    )
    event_rules: Optional[str] = shown_by("test_a_disk_that_is_nearly_full")(
        "YAML file of thresholds and levels of events, and of events that are off (docs/events.md)",
        None,
        on_resume="irrelevant",
    )
    seed: Natural = shown_by("test_seed_decides_weights_data_and_dropout")(
        "random seed of weights, data order and dropout, 0 or above", 1234, on_resume="refused"
    )
    debug: bool = shown_by("test_debug_shows_tracebacks")("print tracebacks of errors", False)


PROFILED = "test_profile_of_some_steps_with_shapes_or_without"

profiled = shown_by(PROFILED, needs="profile")


@dataclass(frozen=True)
class Profiling:
    """Profiling of some steps with torch.profiler: a Chrome trace and tables."""

    profile: bool = shown_by(PROFILED)("profile some steps on some ranks", False, "--use-pytorch-profiler")
    profile_step_start: Count = profiled("first iteration to profile", 10)
    profile_step_end: Count = profiled("iteration to stop profiling before", 12)
    profile_ranks: Optional[list[int]] = shown_by("test_chosen_steps_of_chosen_ranks")(
        "ranks to profile (default: 0)", None, needs="profile"
    )
    profile_dir: Optional[str] = profiled("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = profiled(
        "also record shapes: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )
