# SPDX-License-Identifier: Apache-2.0
"""What a run says of itself, and where: one group of `config.py`."""

from dataclasses import dataclass
from typing import Optional

from megatron.setting import setting


@dataclass(frozen=True)
class Logging:
    """What is said, and where."""

    log_interval: int = setting("steps between log lines", 100, "--logging-freq")
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
