# SPDX-License-Identifier: Apache-2.0
"""Figures of evaluations in addition to mean losses, the best checkpoint, and early stopping.

A recipe builds its `Measures` from the settings of a run (`Recipe.measures`). In an evaluation the last pipeline stages
pass on values of each sample. All ranks gather these in the order of the split and compute the same figures, which appear
in the log, metrics.jsonl, trackers and hooks next to the losses.
"""

from dataclasses import replace
from typing import Any, Optional

import numpy as np
import torch

from megatron.checkpoint.backends import INDEX
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.manager import CheckpointManager
from megatron.data.requests import request_figures
from megatron.errors import Failure, SettingsError
from megatron.mpu.initialize import RankContext
from megatron.settings import schema
from megatron.storage.urls import location
from megatron.telemetry.directions import SMALLER, direction_of, is_better
from megatron.training.checkpointing import load

BEST = "best"  # the folder of the best checkpoint, in --save


class Collected:
    """The values of an evaluation's samples, collected on this rank and gathered from all ranks."""

    def __init__(self):
        self.places: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def take(self, samples: torch.Tensor, values: torch.Tensor) -> None:
        """Collect values [b, k] of the samples [b], positions in the order of the split."""
        self.places.append(samples.numpy())
        self.values.append(values.detach().cpu().double().numpy())

    def whole(self, context: RankContext, count: int) -> np.ndarray:
        """Gather the values of all samples in order, [count, k] fp64. All ranks call it.

        Copies that fill up the last batch are left out. Values of context parallel ranks, which have parts of a sample, are
        added.
        """
        mine = (self.places, self.values) if context.mesh.tp.rank == 0 else ([], [])  # other tp ranks have the same
        parts = context.all_gather_object((np.concatenate(mine[0]), np.concatenate(mine[1])) if mine[0] else None)
        parts = [part for part in parts if part is not None]
        sums = np.zeros((count, parts[0][1].shape[1]))
        times = np.zeros(count, np.int64)
        for places, values in parts:
            kept = places < count
            np.add.at(sums, places[kept], values[kept])
            np.add.at(times, places[kept], 1)
        assert (times == context.mesh.cp.size).all(), "each sample of an evaluation is seen once"
        return sums


class Measures:
    """The figures that a recipe computes in evaluations. Subclasses implement `values` and `figures`.

    best_by:    name of the figure by which evaluations are compared; None: they are not compared
    better:     SMALLER or LARGER, for a figure that is not in telemetry/directions.py
    keeps_best: whether to save the weights of the best evaluation
    of_choices: whether samples are possible continuations, for which a mean loss is meaningless
    folder:     where the final evaluations write predictions; None: nowhere
    patience:   end training after so many consecutive evaluations without a better one
    """

    best_by: Optional[str] = None
    better: Optional[str] = None
    keeps_best = True
    of_choices = False
    folder: Optional[str] = None
    patience: Optional[int] = None

    def __init__(self, config: schema.Config):
        self.config, self.collected = config, Collected()

    @property
    def criterion(self) -> dict[str, Any]:
        """The figure by which evaluations are compared, as it is written to the record of a run."""
        return dict(figure=self.best_by, smaller_is_better=self.direction and self.direction == SMALLER)

    @property
    def direction(self) -> Optional[str]:
        """Whether a smaller or a larger value of that figure is better; None: not known."""
        return self.better or (direction_of(self.best_by) if self.best_by else None)

    def values(self, batch, output: torch.Tensor) -> torch.Tensor:
        """Values [b, k] of a batch, from the output of the last stage (`LanguageModel.collect`)."""
        raise NotImplementedError

    def figures(self, values: np.ndarray, dataset: Any, split: str, final: bool, rank: int) -> dict[str, float]:
        """Name -> figure, from the values [n, k] of all samples of a dataset. All ranks call it; rank 0 writes files."""
        raise NotImplementedError

    def begin(self, stages) -> None:
        """Start to collect values, before an evaluation."""
        self.collected = Collected()
        for stage in stages:
            stage.collect = self._take

    def end(self, stages) -> None:
        for stage in stages:
            stage.collect = None

    def _take(self, batch, output: torch.Tensor) -> None:
        self.collected.take(batch.samples, self.values(batch, output))


class RequestMeasures(Measures):
    """The share of samples whose most probable continuation is correct. Values are log-likelihoods of samples [b, 1]."""

    of_choices = True

    def values(self, batch, output: torch.Tensor) -> torch.Tensor:
        return -(output * batch.loss_mask).sum(0, dtype=torch.float64).unsqueeze(-1)

    def figures(self, values: np.ndarray, dataset: Any, split: str, final: bool, rank: int) -> dict[str, float]:
        return request_figures(dataset, values[:, 0])


def best_manager(config: schema.Config, measures: Optional[Measures], context: RankContext, log):
    """The manager that writes the best checkpoint; None if none is kept."""
    settings = config.checkpoint
    if measures is None or measures.best_by is None or not measures.keeps_best or settings.save is None:
        return None
    if config.batch.skip_train:
        return None
    nowhere_else = dict(save_mirror=None, save_copy=None, save_hf=None)
    own = dict(save=best_folder(config), keep_last=1, save_retain_interval=None, **nowhere_else)
    return CheckpointManager(
        replace(settings, async_save=False, save_interval=None, **own),
        rank=context.mesh.rank,
        all_gather_object=context.all_gather_object,
        log=log,
        quiet=True,  # `judge` logs them
    )


def best_folder(config: schema.Config) -> str:
    """The folder of the best checkpoint."""
    return f"{config.checkpoint.save.rstrip('/')}/{BEST}"


def judge(run, means: dict[str, float]) -> None:
    """Record the result of a validation in the state, and save the weights if it is the best. NaN is never the best.

    run: `training.state.Run`
    """
    measures, state = run.losses.measures, run.state
    if not judges(run):
        return
    run.state = state = replace(state, valid_loss=next(iter(means.values())))
    if measures is None or measures.best_by is None:
        return
    value = means[measures.best_by]
    if not is_better(value, state.best, measures.direction):
        run.state = replace(state, evaluations_since_best=state.evaluations_since_best + 1)
        return
    run.state = replace(state, best=value, best_iteration=state.iteration, evaluations_since_best=0)
    if run.checkpoints.best is not None:
        run.save_best()
        run.metrics.log(f"  best {measures.best_by} so far: {value:.6g}; its weights are in {best_folder(run.config)}")


def judges(run) -> bool:
    """Whether a validation changes the state."""
    return run.losses.measures is not None or run.config.batch.stop_at_loss is not None


def early_end_reason(run) -> Optional[str]:
    """The reason to end training early, or None. It depends only on the state, so a resumed run ends too."""
    measures, state, wanted = run.losses.measures, run.state, run.config.batch.stop_at_loss
    if wanted is not None and state.valid_loss is not None and state.valid_loss <= wanted:
        return f"--stop-at-loss {wanted:g}: the last evaluation had {state.valid_loss:.6g}"
    if measures is None:
        return None
    if measures.patience is not None and state.evaluations_since_best >= measures.patience:
        if state.best is None:
            return f"--patience {measures.patience}: no evaluation had a {measures.best_by} that is a number"
        return (
            f"--patience {measures.patience}: no evaluation after iteration {state.best_iteration} was better than its "
            f"{measures.best_by} of {state.best:.6g}"
        )
    return None


def copy_best(run) -> None:
    """Copy the best checkpoint into this run's folder if the run resumes from another one: later runs resume from here."""
    step = run.state.best_iteration
    if run.checkpoints.best is None or not step:
        return
    folder = folder_with_best(run)
    if folder not in (None, best_folder(run.config)):
        with run.phase("save"):
            run.checkpoints.best.copy(checkpoints(location(folder))[step])


def restore_best(run) -> Optional[int]:
    """Load the weights of the best evaluation for the final ones, unless they are the present weights: their iteration."""
    manager, state = run.checkpoints.best, run.state
    if manager is None or state.best_iteration in (0, state.iteration):
        return None
    step = state.best_iteration
    folder = folder_with_best(run)
    if folder is None:
        run.metrics.log(
            f"WARNING: {best_folder(run.config)} has lost the weights of iteration {step}, whose "
            f"{run.losses.measures.best_by} was best: evaluating the last weights instead"
        )
        return None
    checkpoint = replace(run.config.checkpoint, load=folder, ckpt_step=step, finetune=False, no_load_optim=True)
    config = replace(run.config, checkpoint=replace(checkpoint, save_mirror=None, save_copy=None, save_hf=None))
    try:
        load(config, run.context, run.optimizer, state, events=run.events)
    except Failure as problem:
        raise type(problem)(f"the best checkpoint cannot be read: {problem.what}", problem.why, problem.do) from problem
    run.metrics.log(f" > the weights of iteration {step}, whose {run.losses.measures.best_by} was best")
    return step


def folder_with_best(run) -> Optional[str]:
    """The folder with the weights of the best evaluation, as seen by rank 0.

    If an earlier launch made that evaluation, they may be in the folder from which this run resumed.
    """
    folders, settings, step = [best_folder(run.config)], run.config.checkpoint, run.state.best_iteration
    if settings.load is not None and not settings.finetune:
        folder = settings.load.rstrip("/")
        if (location(folder) / INDEX).exists():  # one of the checkpoints in a folder
            folder = folder.rpartition("/")[0] or "."
        folders += [f"{folder}/{BEST}", folder]
    present = next((folder for folder in folders if step in checkpoints(location(folder))), None)
    return run.context.all_gather_object(present)[0]


def measures_of(recipe, config: schema.Config) -> Optional[Measures]:
    """The measures of a run's recipe, or None. Raises SettingsError if they compare by a figure of no known direction."""
    measures = None if recipe.measures is None else recipe.measures(config)
    if measures and measures.best_by and measures.direction is None:
        raise SettingsError(
            f"{measures.best_by} chooses the best weights, and nothing says whether a smaller or a larger value is better",
            do=f"{type(measures).__name__}.better = SMALLER or LARGER, of megatron.telemetry.directions",
        )
    return measures
