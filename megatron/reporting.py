# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself, and where: one group of `config.py`."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.setting import setting


@dataclass(frozen=True)
class Logging:
    """What is said, and where."""

    log_interval: int = setting("steps between log lines", 100, "--logging-freq")
    timing_log_level: Literal[0, 1, 2] = setting(
        "timers in the log: 0 none but the time of a step, 1 its main parts, 2 what is in them, too", 0
    )
    timing_log_option: Literal["minmax", "max", "all"] = setting(
        "what is said of the ranks' times: the least and greatest, the greatest, or every rank's", "minmax"
    )
    barrier_with_level_1_timing: bool = setting("timers of level 1 let all ranks begin together", True)
    log_timers_to_tensorboard: bool = setting("timers go to TensorBoard and Weights & Biases, too", False)
    log_progress: bool = setting("a live progress line on a terminal", False)
    metrics_file: Optional[str] = setting("JSON lines, one per logged step (default: metrics.jsonl under --save)", None)
    tensorboard_dir: Optional[str] = setting("folder for TensorBoard", None)
    wandb_project: Optional[str] = setting("project name for Weights & Biases", None)
    wandb_exp_name: Optional[str] = setting("run name for Weights & Biases", None)
    peak_tflops: Optional[float] = setting(
        "peak TFLOP/s of one rank's device for MFU (default: table, or measured on CPU)", None
    )
    seed: int = setting("seed of weights, data order and dropout", 1234)
    debug: bool = setting("tracebacks with error messages", False)
