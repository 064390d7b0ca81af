# SPDX-License-Identifier: Apache-2.0
"""What evaluations find out beside mean losses, sample by sample, and what follows: the best checkpoint, an early end.

A recipe makes its `Measures` from the settings of a run (`Recipe.measures`). In an evaluation the last stages hand over
what they found of each sample; all ranks then have all of it, in the order of the split, and compute the same figures. The
log, metrics.jsonl, trackers and hooks have these beside the losses.
"""

import math
from dataclasses import replace
from typing import Any, Optional

import numpy as np
import torch

from megatron.checkpoint.folder import checkpoints
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.storage import INDEX
from megatron.data.requests import request_figures
from megatron.errors import Failure
from megatron.mpu.initialize import RankContext
from megatron.settings import schema
from megatron.storage.urls import location
from megatron.training.checkpointing import load

BEST = "best"  # the folder of the best checkpoint, below --save


class Collected:
    """What was found of the samples of an evaluation on this rank, and then on all of them."""

    def __init__(self):
        self.places: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def take(self, samples: torch.Tensor, values: torch.Tensor) -> None:
        """samples [b]: places in the order of the split; values [b, k]."""
        self.places.append(samples.numpy())
        self.values.append(values.detach().cpu().double().numpy())

    def whole(self, context: RankContext, count: int) -> np.ndarray:
        """[count, k] fp64 of all samples in their order; all ranks together. Copies that fill up the last batch are left
        out, and what ranks of context parallelism found of parts of a sample is added up.
        """
        mine = (self.places, self.values) if context.mesh.tp.rank == 0 else ([], [])  # the others have found the same
        found = context.all_gather_object((np.concatenate(mine[0]), np.concatenate(mine[1])) if mine[0] else None)
        found = [part for part in found if part is not None]
        sums = np.zeros((count, found[0][1].shape[1]))
        times = np.zeros(count, np.int64)
        for places, values in found:
            kept = places < count
            np.add.at(sums, places[kept], values[kept])
            np.add.at(times, places[kept], 1)
        assert (times == context.mesh.cp.size).all(), "each sample of an evaluation is seen once"
        return sums


class Measures:
    """What a recipe finds out. A subclass says `values` and `figures`.

    best_by: name of the figure that the best evaluation has most of; None: they are not compared
    keeps_best: whether the weights of the best one are kept
    of_choices: whether samples are possible continuations, of which a mean loss says nothing; `figures` may have one
    patience: evaluations in a row without a better one at which training ends
    """

    best_by: Optional[str] = None
    keeps_best = True
    of_choices = False
    smaller_is_better = False
    patience: Optional[int] = None

    def __init__(self, config: schema.Config):
        self.config, self.collected = config, Collected()

    @property
    def criterion(self) -> dict[str, Any]:
        """For the record of a run: which figure is the one that counts."""
        return dict(figure=self.best_by, smaller_is_better=self.smaller_is_better)

    def values(self, batch, found: torch.Tensor) -> torch.Tensor:
        """[b, k] of what a last stage hands over (`LanguageModel.collect`)."""
        raise NotImplementedError

    def figures(self, values: np.ndarray, dataset: Any, split: str, final: bool, rank: int) -> dict[str, float]:
        """Name -> figure, from the values [n, k] of all samples of a dataset; on all ranks, the first of which writes."""
        raise NotImplementedError

    def begin(self, stages) -> None:
        """Ahead of an evaluation."""
        self.collected = Collected()
        for stage in stages:
            stage.collect = self._take

    def end(self, stages) -> None:
        for stage in stages:
            stage.collect = None

    def _take(self, batch, found: torch.Tensor) -> None:
        self.collected.take(batch.samples, self.values(batch, found))


class RequestMeasures(Measures):
    """How often a model's likeliest continuation is the right one; values are log-likelihoods of samples [b, 1]."""

    of_choices = True

    def values(self, batch, found: torch.Tensor) -> torch.Tensor:
        return -(found * batch.loss_mask).sum(0, dtype=torch.float64).unsqueeze(-1)

    def figures(self, values: np.ndarray, dataset: Any, split: str, final: bool, rank: int) -> dict[str, float]:
        return request_figures(dataset, values[:, 0])


def best_manager(config: schema.Config, measures: Optional[Measures], context: RankContext, log):
    """What writes the best checkpoint; None where none is kept."""
    settings = config.checkpoint
    if measures is None or measures.best_by is None or not measures.keeps_best or settings.save is None:
        return None
    if config.batch.skip_train:
        return None
    own = dict(save=best_folder(config), keep_last=1, save_retain_interval=None, save_mirror=None, save_copy=None)
    return CheckpointManager(
        replace(settings, async_save=False, save_interval=None, **own),
        rank=context.mesh.rank,
        all_gather_object=context.all_gather_object,
        log=log,
    )


def best_folder(config: schema.Config) -> str:
    return f"{config.checkpoint.save.rstrip('/')}/{BEST}"


def judge(run, means: dict[str, float]) -> None:
    """Note how good a validation was where that is asked for, and keep the weights of the best one. A figure that is no
    number is not good.

    run: `training.state.Run`.
    """
    measures, state = run.measures, run.state
    if not judges(run):
        return
    run.state = state = replace(state, valid_loss=next(iter(means.values())))
    if measures is None or measures.best_by is None:
        return
    value = means[measures.best_by]
    better = state.best is None or (value < state.best if measures.smaller_is_better else value > state.best)
    if not (better and math.isfinite(value)):
        run.state = replace(state, evaluations_since_best=state.evaluations_since_best + 1)
        return
    run.state = replace(state, best=value, best_iteration=state.iteration, evaluations_since_best=0)
    if run.best_manager is not None:
        run.save_best()
        run.metrics.log(f"  best {measures.best_by} so far: {value:.6g}; its weights are in {best_folder(run.config)}")


def judges(run) -> bool:
    """Whether a validation leaves something in the state."""
    return run.measures is not None or run.config.batch.stop_at_loss is not None


def enough(run) -> Optional[str]:
    """Why training need not go on, in words; None: it does. A function of the state, so a resumed run knows it too."""
    measures, state, wanted = run.measures, run.state, run.config.batch.stop_at_loss
    if wanted is not None and state.valid_loss is not None and state.valid_loss <= wanted:
        return f"--stop-at-loss {wanted:g}: the last evaluation had {state.valid_loss:.6g}"
    if measures is None:
        return None
    if measures.patience is not None and state.evaluations_since_best >= measures.patience:
        if state.best is None:
            return f"--patience {measures.patience}: no evaluation had a {measures.best_by} that is a number"
        return (
            f"--patience {measures.patience}: no evaluation behind iteration {state.best_iteration} was better than its "
            f"{measures.best_by} of {state.best:.6g}"
        )
    return None


def bring_best(run) -> None:
    """Have the best weights in this run's own folder where it goes on from one that saved elsewhere: whoever goes on from
    here looks for them here.
    """
    step = run.state.best_iteration
    if run.best_manager is None or not step:
        return
    folder = folder_with_best(run)
    if folder not in (None, best_folder(run.config)):
        with run.phase("save"):
            run.best_manager.copy(checkpoints(location(folder))[step])


def restore_best(run) -> None:
    """Bring back the weights of the best evaluation for those at the end, unless they are there."""
    manager, state = run.best_manager, run.state
    if manager is None or state.best_iteration in (0, state.iteration):
        return
    step = state.best_iteration
    folder = folder_with_best(run)
    if folder is None:
        run.metrics.log(
            f"WARNING: {best_folder(run.config)} has lost the weights of iteration {step}, whose {run.measures.best_by} "
            "was best: the last ones are evaluated"
        )
        return
    checkpoint = replace(run.config.checkpoint, load=folder, ckpt_step=step, finetune=False, no_load_optim=True)
    config = replace(run.config, checkpoint=replace(checkpoint, save_mirror=None, save_copy=None))
    try:
        load(config, run.context, run.optimizer, state)
    except Failure as problem:
        raise type(problem)(f"the best checkpoint cannot be read: {problem.what}", problem.why, problem.do) from problem
    run.metrics.log(f" > the weights of iteration {step}, whose {run.measures.best_by} was best")


def folder_with_best(run) -> Optional[str]:
    """Where the weights of the best evaluation are, as the first rank finds them. Those that were best ahead of this run's
    beginning lie with the checkpoints that it went on from.
    """
    folders, settings, step = [best_folder(run.config)], run.config.checkpoint, run.state.best_iteration
    if settings.load is not None and not settings.finetune:
        folder = settings.load.rstrip("/")
        if (location(folder) / INDEX).exists():  # one of the checkpoints in a folder
            folder = folder.rpartition("/")[0] or "."
        folders += [f"{folder}/{BEST}", folder]
    found = next((folder for folder in folders if step in checkpoints(location(folder))), None)
    return run.context.all_gather_object(found)[0]


def measures_of(recipe, config: schema.Config) -> Optional[Measures]:
    """What the recipe of a run finds out in evaluations."""
    return None if recipe.measures is None else recipe.measures(config)
