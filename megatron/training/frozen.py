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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from megatron.checkpoint.folder import restore
from megatron.data.loader import MicroBatch
from megatron.inference.load import Built, allocated, refuse_sizes
from megatron.model.frozen_settings import frozen_record, frozen_settings
from megatron.model.recipe import recipe_of
from megatron.mpu.initialize import RankContext, weight_format
from megatron.settings import schema
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

    @torch.no_grad()
    def states(self, batch: MicroBatch, layers: Collection[int]) -> tuple[dict[int, torch.Tensor], Optional[Callable]]:
        """(outputs of layers, [s or s/tp, b, h], by number; the result of `logits` if the model is whole), in one pass."""
        found, blocks = {}, self.model.blocks

        def keep(n):
            return lambda module, inputs, output: found.update({n: output[0] if isinstance(output, tuple) else output})

        hooks = [blocks[str(n)].register_forward_hook(keep(n)) for n in layers]
        try:
            logits = self.logits(batch) if self.model.last else None
            if logits is None:
                with self.model.region():
                    self.model.trunk(None, batch)
        finally:
            for hook in hooks:
                hook.remove()
        return found, logits

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
    first_layers: Callable[[schema.Config], int] = lambda settings: 0,
) -> tuple[Optional[FrozenModel], list[str]]:
    """Load a frozen model on the ranks of the last stage, and notices for the user. All ranks call it.

    flag: the setting that names `folder`, a folder of checkpoints or one of them, for messages
    config, vocab_size, vocabulary: of the run; vocabulary: its tokenizer's fingerprint, None for plain numbers
    stages: this rank's stages of the trained model
    first_layers: settings of the frozen model -> how many of its first layers this rank needs, without the last stage
    Raises CheckpointError if there is no such model, SettingsError if it cannot see the tokens of this run.
    """
    record = context.from_rank_zero(lambda: frozen_record(flag, folder))
    settings = frozen_settings(flag, folder, record, config, vocab_size, vocabulary)
    whole, part = any(getattr(stage, "last", False) for stage in stages), first_layers(settings)
    built = build_frozen(settings, vocab_size, context, None if whole else part) if whole or part else None
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


def build_frozen(settings: schema.Config, vocab_size: int, context: RankContext, part: Optional[int] = None) -> Built:
    """The model of `frozen_settings` on this rank, with memory for its weights. part: only so many first layers."""
    recipe, mesh = recipe_of(settings), context.mesh.of_whole_model()
    refuse_sizes(settings, mesh, recipe.rules)
    dtype = weight_format(settings.precision)
    layers = dict(layers=range(part), last=False) if part else {}
    model = recipe.build_model(settings, mesh, vocab_size, **layers, dtype=dtype, device="meta")
    return allocated(model, [model], mesh, dtype=dtype, device=context.device)
