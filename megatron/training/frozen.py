# SPDX-License-Identifier: Apache-2.0
"""A second model next to the one that is trained: frozen, with the weights of a checkpoint of any layout.

It may have another size. It sees the micro-batches of the trained model's last stage, and gives its logits (a teacher's,
`training/distillation.py`) or its losses of tokens (a reference to compare with):

    frozen, notices = load_frozen("--teacher-load", folder, config, context, vocab_size, vocabulary, stages)
    if frozen is not None:  # this rank has the last stage
        losses = frozen.token_losses(batch)  # [s, b] fp32, unmasked; the log-probability of a label is minus this

The ranks of the last pipeline stage have all of its layers, which ranks of tp and cp divide as those of the trained
model. So no schedule, message or stage knows of it. Other ranks have nothing. No optimizer owns its weights, it is in
evaluation mode, and it records no gradients.

Legend: s sequence, b micro-batch, v vocabulary, tp ranks that divide each matrix.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch

from megatron.checkpoint.folder import restore
from megatron.data.loader import MicroBatch
from megatron.errors import CheckpointError, Failure, SettingsError, StorageError
from megatron.inference.load import Built, allocated, read_record, refuse_head, refuse_sizes
from megatron.model.recipe import config_of, recipe_of
from megatron.mpu.initialize import RankContext, weight_format
from megatron.settings import schema
from megatron.settings.from_checkpoint import located
from megatron.storage.urls import location


@dataclass(frozen=True)
class FrozenModel:
    """A model in evaluation mode, on a rank of the last stage. Its methods are called with the micro-batches of training.

    config: of its run, with the layout and the number formats of this one; weights: all of them, in one tensor
    """

    model: torch.nn.Module
    config: schema.Config
    weights: torch.Tensor

    @torch.no_grad()
    def token_losses(self, batch: MicroBatch) -> torch.Tensor:
        """The cross-entropy of each label, [s, b] fp32, unmasked. With context parallelism of this rank's rows."""
        return self.model.token_losses(None, batch)

    def logits(self, batch: MicroBatch) -> Callable[[slice], torch.Tensor]:
        """The logits of the tokens in the loss: a function from a range of them to [tokens, v/tp]; its padding is last."""
        return self.model.logits_of(batch)


def attach_frozen(
    config: schema.Config,
    context: RankContext,
    stages: Sequence[torch.nn.Module],
    vocab_size: int,
    vocabulary: Optional[str],
) -> list[str]:
    """Load the model of `Recipe.frozen`, and attach its losses of tokens to the last stage. Returns notices."""
    asked = recipe_of(config).frozen(config)
    if asked is None:
        return []
    frozen, notices = load_frozen(*asked, config, context, vocab_size, vocabulary, stages)
    for stage in stages:
        if stage.last:
            stage.frozen_losses = frozen.token_losses
    return notices


def load_frozen(
    flag: str,
    folder: str,
    config: schema.Config,
    context: RankContext,
    vocab_size: int,
    vocabulary: Optional[str],
    stages: Sequence[torch.nn.Module],
) -> tuple[Optional[FrozenModel], list[str]]:
    """Load a frozen model on the ranks of the last stage, and notices for the user. All ranks call it.

    flag: the setting that names `folder`, a folder of checkpoints or one of them, for messages
    config, vocab_size, vocabulary: of the run; vocabulary: its tokenizer's fingerprint, None for plain numbers
    stages: this rank's stages of the trained model
    Raises CheckpointError if there is no such model, SettingsError if it cannot see the tokens of this run.
    """
    record = _record_on_all_ranks(flag, folder, context)
    check_frozen(flag, folder, record, config, vocab_size, vocabulary)
    settings = frozen_settings(config_of(located(record)), config)
    holds = any(getattr(stage, "last", False) for stage in stages)
    built = build_frozen(settings, vocab_size, context) if holds else None
    restored = restore(
        location(folder),
        built.pieces if built else [],
        cast=True,
        rank=context.mesh.rank,
        all_gather_object=context.all_gather_object,
    )
    notices = [*restored.notices, f"{flag}: loaded {restored}"]
    if built is None:
        return None, notices
    model = built.model.eval().requires_grad_(False)
    return FrozenModel(model, settings, built.weights), notices


def _record_on_all_ranks(flag: str, folder: str, context: RankContext) -> dict[str, Any]:
    """state.json of the checkpoint, which rank 0 reads."""
    answer: Any = None
    if context.is_rank_zero:
        try:
            answer = read_record(location(folder), None)
        except (CheckpointError, StorageError) as error:
            answer = type(error)(f"{flag} {folder}: {error.what}", error.why, error.do)
    answer = context.all_gather_object(answer)[0]
    if isinstance(answer, Failure):
        raise answer
    return answer


def check_frozen(
    flag: str,
    folder: str,
    record: Mapping[str, Any],
    config: schema.Config,
    vocab_size: Optional[int] = None,
    vocabulary: Optional[str] = None,
) -> None:
    """Raise SettingsError if the model of a checkpoint cannot see this run's micro-batches, or predicts other tokens.

    record: state.json of the checkpoint; vocab_size, vocabulary: of this run; None: not known
    """
    frozen, where = config_of(located(record)), f"{flag} {folder}"
    rows, theirs = record["vocab_size"], record.get("vocabulary")
    refuse_head(frozen, rows, folder)
    own, other = recipe_of(config), recipe_of(frozen)
    if own.arrays != other.arrays:
        raise SettingsError(
            f"{where}: the model is a {frozen.model.model_type}, and this run trains a {config.model.model_type}",
            "the two read different samples",
            "give a model of the same type",
        )
    if vocab_size not in (None, rows):
        raise SettingsError(
            f"{where}: the model has a vocabulary of {rows}, this run one of {vocab_size}",
            "both models predict the same tokens",
            "give a model with this run's vocabulary",
        )
    if None not in (vocabulary, theirs) and vocabulary != theirs:
        raise SettingsError(
            f"{where}: the model has learned another vocabulary than this run's: the same numbers mean other words",
            f"its files: {theirs[:8]}; this run's: {vocabulary[:8]} (fingerprints)",
            "give a model with this run's vocabulary",
        )
    longest = frozen.model.position_table
    if frozen.model.position_embedding_type == "learned_absolute" and longest < config.model.seq_length:
        raise SettingsError(
            f"{where}: the model has {longest} positions, and samples have {config.model.seq_length} tokens",
            do=f"give --seq-length {longest} at most, or a model for longer sequences",
        )


def frozen_settings(frozen: schema.Config, run: schema.Config) -> schema.Config:
    """The settings of a frozen model in a run: its own shape, and the run's layout, without stages, and number formats."""
    p = run.parallel
    parallel = schema.Parallel(
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        sequence_parallel=p.sequence_parallel,
        context_parallel_size=p.context_parallel_size,
        cp_comm_type=p.cp_comm_type if len(p.cp_comm_types) == 1 else None,
        hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes,
    )
    rows = run.model.make_vocab_size_divisible_by  # each rank has the same part of both vocabularies
    return replace(
        frozen,
        model=replace(frozen.model, make_vocab_size_divisible_by=rows),
        parallel=parallel,
        recompute=schema.Recompute(),
        precision=run.precision,
        kernels=run.kernels,
    )


def build_frozen(settings: schema.Config, vocab_size: int, context: RankContext) -> Built:
    """The model of `frozen_settings` on this rank, with memory for its weights."""
    recipe, mesh = recipe_of(settings), context.mesh.of_whole_model()
    refuse_sizes(settings, mesh, recipe.rules)
    dtype = weight_format(settings.precision)
    model = recipe.build_model(settings, mesh, vocab_size, dtype=dtype, device="meta")
    return allocated(model, [model], mesh, dtype=dtype, device=context.device)
