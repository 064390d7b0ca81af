# SPDX-License-Identifier: Apache-2.0
"""Distillation: the last stage of the trained model, the student, compares its logits with a teacher's.

The teacher is a frozen model (`frozen.py`), or its logits were stored before (`data/teacher_logits.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Optional

import numpy as np
import torch

from megatron.data.loader import MicroBatch, MicroBatchLoader
from megatron.data.teacher_logits import LogitsStore
from megatron.errors import SettingsError
from megatron.model.frozen_settings import layer_pairs
from megatron.model.language_model import HiddenLosses, LanguageModel
from megatron.model.recipe import recipe_of
from megatron.mpu.chunks import row_numbers
from megatron.mpu.distillation_loss import DistillationLoss, TeacherLoss, TopKLoss
from megatron.mpu.initialize import RankContext
from megatron.settings import schema
from megatron.telemetry.events import EventLog
from megatron.training.frozen_model import FrozenModel, load_frozen


def attach_teacher(
    config: schema.Config,
    context: RankContext,
    stages: Sequence[torch.nn.Module],
    vocab_size: int,
    vocabulary: Optional[str],
    train: Optional[MicroBatchLoader],
    events: EventLog,
) -> list[str]:
    """Attach the teacher, or its stored logits, to the student's last stage. Returns notices. All ranks call it.

    vocabulary: the fingerprint of the run's tokenizer; None for plain numbers. train: the training data
    """
    settings = config.distillation
    if not settings.distils or config.batch.skip_train:
        return []
    if not all(isinstance(stage, LanguageModel) for stage in stages):
        raise SettingsError(
            f"{settings.source}: the model of --model-type {config.model.model_type} is no LanguageModel",
            "the loss on the teacher's logits is that of megatron.model.language_model",
            "leave it out",
        )
    if settings.teacher_load:
        return attach_model(config, context, stages, vocab_size, vocabulary, events)
    store = open_store(config, vocab_size, vocabulary)
    for stage in stages:
        if stage.last:
            stage.teacher = partial(stored_loss, store, settings, context, train)
    return []


def attach_model(
    config: schema.Config,
    context: RankContext,
    stages: Sequence[LanguageModel],
    vocab_size: int,
    vocabulary: Optional[str],
    events: EventLog,
) -> list[str]:
    """Load the teacher of --teacher-load on the ranks that compare something with it. Returns notices."""
    held = [int(n) for stage in stages for n in stage.blocks]

    def own_pairs(settings: schema.Config) -> dict[int, int]:
        return {n: of for n, of in layer_pairs(config, settings).items() if n in held}

    teacher, notices = load_frozen(
        "--teacher-load",
        config.distillation.teacher_load,
        config,
        context,
        vocab_size,
        vocabulary,
        stages,
        events,
        lambda settings: 1 + max(own_pairs(settings).values(), default=-1),
    )
    if teacher is None:
        return notices
    attached = Teacher(teacher, config.distillation, context, own_pairs(teacher.config))
    for stage in stages:
        if stage.last:
            stage.teacher = attached.loss
        if attached.pairs.keys() & {int(n) for n in stage.blocks}:
            stage.hidden_teacher = attached.hidden_losses
    return notices


def open_store(config: schema.Config, vocab_size: int, vocabulary: Optional[str]) -> LogitsStore:
    """The logits of --teacher-logits. Raises SettingsError if they are not for this run's samples and tokens."""
    settings, data = config.distillation, config.data
    store = LogitsStore(settings.teacher_logits)
    now = dict(
        seq_length=config.model.seq_length,
        vocab_size=vocab_size,
        vocabulary=vocabulary,
        temperature=settings.kd_temperature,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    was = {name: getattr(store.settings, name) for name in now}
    unknown = {"vocabulary"} if None in (was["vocabulary"], vocabulary) else set()
    if other := [f"{name} {was[name]}, here {now[name]}" for name in now.keys() - unknown if was[name] != now[name]]:
        raise SettingsError(
            f"{settings.source}: the logits are for other settings: {'; '.join(sorted(other))}",
            do="give the same settings, or store the teacher's logits for these",
        )
    if recipe_of(config).arrays is not None:
        raise SettingsError(
            f"{settings.source}: --model-type {config.model.model_type} has samples of other kinds than token files",
            do="use --teacher-load",
        )
    return store


class Teacher:
    """A teacher on a rank, and the pass of its present micro-batch. pairs: layer of the student -> layer of the teacher."""

    def __init__(
        self, frozen: FrozenModel, settings: schema.Distillation, context: RankContext, pairs: Mapping[int, int]
    ):
        self.frozen, self.settings, self.tp, self.pairs = frozen, settings, context.mesh.tp, pairs
        self._logits: tuple[Optional[MicroBatch], Optional[Callable]] = None, None

    def loss(self, batch: MicroBatch) -> DistillationLoss:
        """The loss on the teacher's logits of a micro-batch."""
        (of, logits), self._logits = self._logits, (None, None)
        if of is not batch:
            logits = self.frozen.logits(batch)
        s = self.settings
        return TeacherLoss(logits, self.tp, kind=s.kd_loss, temperature=s.kd_temperature, alpha=s.kd_alpha)

    def hidden_losses(self, batch: MicroBatch) -> HiddenLosses:
        """The losses on the outputs of layers, whose sum is logged and minimized."""
        states, logits = self.frozen.states(batch, set(self.pairs.values()))
        self._logits = batch, logits  # the last stage compares these after its layers
        compare = COMPARISONS[self.settings.kd_hidden_loss]
        return {n: partial(compare, states[of]) for n, of in self.pairs.items()}


def mean_square(teacher: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The mean of the squares of differences, [s, b], of hidden states [s, b, h]."""
    return (x.float() - teacher.float()).square().mean(-1)


def cosine(teacher: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """1 - the cosine between hidden states [s, b, h], [s, b]."""
    return 1.0 - torch.cosine_similarity(x.float(), teacher.float(), dim=-1)


COMPARISONS = dict(mse=mean_square, cosine=cosine)


def stored_loss(
    store: LogitsStore, settings: schema.Distillation, context: RankContext, train: MicroBatchLoader, batch: MicroBatch
) -> DistillationLoss:
    """The loss on the stored logits for a micro-batch of the training data."""
    places, cp = batch.samples.tolist(), context.mesh.cp
    tokens = [sample.ids[:-1] for sample in train.samples(places)]
    found = [store.read(train.number(place), ids) for place, ids in zip(places, tokens)]
    rows = row_numbers(store.settings.seq_length, cp.rank, cp.size) if cp.size > 1 else slice(None)
    device = batch.labels.device
    ids, logits, log_sums = (
        torch.from_numpy(np.stack([each[rows] for each in part], 1)).flatten(0, 1).to(device) for part in zip(*found)
    )
    return TopKLoss(
        ids,
        logits,
        log_sums,
        store.settings.complete,
        context.mesh.tp,
        kind=settings.kd_loss,
        temperature=settings.kd_temperature,
        alpha=settings.kd_alpha,
    )
