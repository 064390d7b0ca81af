# SPDX-License-Identifier: Apache-2.0
"""Curves for TensorBoard, VisualDL and Weights & Biases, under Megatron-LM's tags. prometheus.py serves current values.

A tracker has `scalars(values, iteration, consumed_samples)` and `close()`. The libraries are imported by the constructors.
"""

import importlib.util
import sys
import time
from typing import Optional

from megatron.errors import SettingsError
from megatron.settings.schema import Logging


def missing_tracker(logging: Logging) -> Optional[SettingsError]:
    """The error if the package of a tracker is not installed, otherwise None. Imports nothing."""
    for flag, wanted, package in (
        ("--tensorboard-dir", logging.tensorboard_dir, "tensorboard"),
        ("--visualdl-dir", logging.visualdl_dir, "visualdl"),
        ("--wandb-project", logging.wandb_project, "wandb"),
        ("--metrics-port", logging.metrics_port is not None, "prometheus-client"),
    ):
        module = package.replace("-", "_")
        if wanted and module not in sys.modules and importlib.util.find_spec(module) is None:
            return missing_package(flag, package, ModuleNotFoundError(f"No module named '{module}'"))
    return None


class TensorBoard:
    """Event files in a folder: each tag over iterations, and "tag vs samples" over consumed samples."""

    def __init__(self, folder: str):
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing_package("--tensorboard-dir", "tensorboard", error) from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self.writer = EventFileWriter(folder, flush_secs=20)

    def scalars(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
        self._add(values, iteration)
        self._add({f"{tag} vs samples": value for tag, value in values.items()}, consumed_samples)

    def _add(self, values: dict[str, float], at: int) -> None:
        points = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self.writer.add_event(self._event(wall_time=time.time(), step=at, summary=self._summary(value=points)))

    def close(self) -> None:
        self.writer.close()


class VisualDL:
    """PaddlePaddle's viewer: its files in a folder, each tag over iterations."""

    def __init__(self, folder: str):
        try:
            from visualdl import LogWriter
        except ImportError as error:
            raise missing_package("--visualdl-dir", "visualdl", error) from None
        self.writer = LogWriter(logdir=folder)

    def scalars(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
        for tag, value in values.items():
            self.writer.add_scalar(tag=tag, step=iteration, value=value)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A run at wandb.ai, or offline below `folder` with WANDB_MODE=offline."""

    def __init__(self, project: str, name: str | None, folder: str | None, settings: dict):
        try:
            import wandb
        except ImportError as error:
            raise missing_package("--wandb-project", "wandb", error) from None
        self.run = wandb.init(project=project, name=name or None, dir=folder, config=settings)

    def scalars(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
        self.run.log(values | {"consumed-samples": consumed_samples}, step=iteration)

    def close(self) -> None:
        self.run.finish()


def missing_package(flag: str, package: str, error: ImportError) -> SettingsError:
    return SettingsError(
        f"{flag} needs the package {package}", why=str(error), do=f"pip install {package}, or leave {flag} out"
    )
