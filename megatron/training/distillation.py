# SPDX-License-Identifier: Apache-2.0
"""Distillation: the last stage of the trained model, the student, compares its logits with a teacher's (`frozen.py`)."""

from collections.abc import Sequence
from functools import partial
from typing import Optional

import torch

from megatron.data.loader import MicroBatch
from megatron.errors import SettingsError
from megatron.model.language_model import LanguageModel
from megatron.mpu.distillation_loss import DistillationLoss
from megatron.mpu.initialize import RankContext
from megatron.settings import schema
from megatron.training.frozen import FrozenModel, load_frozen


def attach_teacher(
    config: schema.Config,
    context: RankContext,
    stages: Sequence[torch.nn.Module],
    vocab_size: int,
    vocabulary: Optional[str],
) -> list[str]:
    """Load the teacher of --teacher-load, and attach it to the student's last stage. Returns notices. All ranks call it.

    vocabulary: the fingerprint of the run's tokenizer; None for plain numbers
    """
    settings = config.distillation
    if settings.teacher_load is None:
        return []
    if not all(isinstance(stage, LanguageModel) for stage in stages):
        raise SettingsError(
            f"{settings.source}: the model of --model-type {config.model.model_type} is no LanguageModel",
            "the loss on the teacher's logits is that of megatron.model.language_model",
            "leave it out",
        )
    run = config, context, vocab_size, vocabulary, stages
    teacher, notices = load_frozen("--teacher-load", settings.teacher_load, *run)
    for stage in stages:
        if stage.last:
            stage.teacher = partial(loss_of, teacher, settings, context)
    return notices


def loss_of(
    teacher: FrozenModel, settings: schema.Distillation, context: RankContext, batch: MicroBatch
) -> DistillationLoss:
    """The loss on the teacher's logits of a micro-batch."""
    return DistillationLoss(
        teacher.logits(batch),
        context.mesh.tp,
        kind=settings.kd_loss,
        temperature=settings.kd_temperature,
        alpha=settings.kd_alpha,
    )
