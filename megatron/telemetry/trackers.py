# SPDX-License-Identifier: Apache-2.0
"""Curves for TensorBoard, VisualDL and Weights & Biases, under Megatron-LM's tags. prometheus.py serves current values.

A tracker has `scalars(values, iteration, consumed_samples)` and `close()`. The libraries are imported by the constructors.
"""

import importlib.util
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from megatron.errors import MissingPackage, SettingsError
from megatron.settings.schema import Logging

WANDB_RUN = "wandb_run"  # entry of state.json: id of the training's run at Weights & Biases; NAME.txt in --save


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
    """The run of a training at wandb.ai, or offline below `folder` with WANDB_MODE=offline. Has a row for each iteration.

    run_id: all launches of a training have the same, so that their curves are one
    """

    def __init__(self, project: str, name: str | None, folder: Path | None, settings: dict, run_id: str):
        try:
            import wandb
        except ImportError as error:
            raise missing_package("--wandb-project", "wandb", error) from None
        where = dict(project=project, name=name or None, dir=folder and str(folder))
        self.run = wandb.init(**where, **_continued(run_id, os.environ), config=settings)
        # W&B's own steps only grow: it drops what a launch from an earlier checkpoint logs again at `step=iteration`.
        if define := getattr(self.run, "define_metric", None):  # stand-ins of wandb have none
            define("iteration")
            define("*", step_metric="iteration")
        self._row: dict[str, float] = {}

    def scalars(self, values: dict[str, float], iteration: int, consumed_samples: int) -> None:
        if self._row.get("iteration") != iteration:
            self._send()
        self._row |= values | {"iteration": iteration, "consumed-samples": consumed_samples}

    def _send(self) -> None:
        if self._row:
            self.run.log(self._row)
        self._row = {}

    def close(self) -> None:
        self._send()
        self.run.finish()


def _continued(run_id: str, env: Mapping[str, str]) -> dict[str, str]:
    """The arguments of `wandb.init` about the run that it continues. Variables of the user come first.

    >>> _continued("a1", {}), _continued("a1", {"WANDB_RESUME": "must"}), _continued("a1", {"WANDB_RESUME": "never"})
    ({'id': 'a1', 'resume': 'allow'}, {'id': 'a1'}, {})
    """
    if env.get("WANDB_RESUME") == "never" or env.get("WANDB_RESUME_FROM") or env.get("WANDB_FORK_FROM"):
        return {}  # wandb chooses the id
    return dict(id=run_id) if env.get("WANDB_RESUME") else dict(id=run_id, resume="allow")


def wandb_run(known: Optional[str], env: Mapping[str, str] = os.environ) -> str:
    """The id of a training's run at Weights & Biases: the user's (WANDB_RUN_ID), that of earlier launches, or a new one."""
    return env.get("WANDB_RUN_ID") or known or secrets.token_hex(4)


def kept_wandb_run(folder: Path) -> Optional[str]:
    """The id that a launch has written into its folder, also before its first checkpoint; None without one."""
    path = folder / f"{WANDB_RUN}.txt"
    return path.read_text(encoding="utf-8", errors="replace").strip() or None if path.is_file() else None


def keep_wandb_run(folder: Path, run_id: str) -> None:
    """Write the id into the folder of a run. Raises OSError."""
    if kept_wandb_run(folder) != run_id:
        folder.mkdir(parents=True, exist_ok=True)
        from megatron.storage.durable import replace_file  # which needs a package

        replace_file(folder / f"{WANDB_RUN}.txt", f"{run_id}\n".encode())


def missing_package(flag: str, package: str, error: ImportError) -> SettingsError:
    return MissingPackage(
        f"{flag} needs the package {package}", why=str(error), do=f"pip install {package}, or leave {flag} out"
    )
