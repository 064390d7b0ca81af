# SPDX-License-Identifier: Apache-2.0
"""A second model next to the one that is trained: frozen, with the weights of a checkpoint of any layout.

It may have another size. It sees the micro-batches of the trained model's last stage, and gives its logits (a teacher's,
`training/distillation.py`) or its losses of tokens (a reference to compare with):

    frozen, notices = load_frozen("--teacher-load", folder, config, context, vocab_size, vocabulary, stages, events)
    if frozen is not None:  # this rank has the last stage
        losses = frozen.token_losses(batch)  # [s, b] fp32, unmasked; the log-probability of a label is minus this

The ranks of the last pipeline stage have all of its layers, which ranks of tp and cp divide as those of the trained
model. So no schedule, message or stage knows of it. Other ranks have nothing. No optimizer owns its weights, it is in
evaluation mode, and it records no gradients.

With ZeRO 3 a rank keeps a shard of each of its layers, as of the trained model's, and gathers a layer around each pass
through it. The embedding, the final norm and the output layer are whole: logits are computed in parts, during the loss.

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
from megatron.mpu.layers import place_buffers
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.placement import placed_buffers
from megatron.optimizer.buffers import buffer_pieces, fill_buffers
from megatron.optimizer.units import OwnedRange, flat_memory, flat_units_of, materialise, pieces_of
from megatron.optimizer.weights import ParameterBuffers
from megatron.settings import schema
from megatron.storage.urls import location
from megatron.telemetry.events import EventLog
from megatron.training.checkpointing import record_damage


@dataclass(frozen=True)
class FrozenModel:
    """A model in evaluation mode, on a rank of the last stage. Its methods are called with the micro-batches of training.

    config: of its run, with the layout and the number formats of this one; weights: this rank's, in one tensor
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
    events: EventLog,
) -> list[str]:
    """Load the model of `Recipe.frozen`, and attach its losses of tokens to the last stage. Returns notices."""
    asked = recipe_of(config).frozen(config)
    if asked is None:
        return []
    frozen, notices = load_frozen(*asked, config, context, vocab_size, vocabulary, stages, events)
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
    events: EventLog,
    first_layers: Callable[[schema.Config], int] = lambda settings: 0,
) -> tuple[Optional[FrozenModel], list[str]]:
    """Load a frozen model on the ranks of the last stage, and notices for the user. All ranks call it.

    flag: the setting that names `folder`, a folder of checkpoints or one of them, for messages
    config, vocab_size, vocabulary: of the run; vocabulary: its tokenizer's fingerprint, None for plain numbers
    stages: this rank's stages of the trained model
    events: get a damaged checkpoint that is passed over
    first_layers: settings of the frozen model -> how many of its first layers this rank needs, without the last stage
    Raises CheckpointError if there is no such model, SettingsError if it cannot see the tokens of this run.
    """
    record = context.from_rank_zero(lambda: frozen_record(flag, folder))
    settings = frozen_settings(flag, folder, record, config, vocab_size, vocabulary)
    whole, part = any(getattr(stage, "last", False) for stage in stages), first_layers(settings)
    built = None
    if whole or part:
        sharding = config.parallel.sharding_stage
        built = build_frozen(settings, vocab_size, context, None if whole else part, sharding)
    restored = restore(
        location(folder),
        built.pieces if built else [],
        cast=True,
        rank=context.mesh.rank,
        all_gather_object=context.all_gather_object,
    )
    record_damage(events, restored, restored.state["iteration"])
    notices = [*restored.notices, f"{flag}: loaded {restored}"]
    if built is None:
        return None, notices
    model = built.model.eval().requires_grad_(False)
    return FrozenModel(model, settings, built.weights), notices


def build_frozen(
    settings: schema.Config, vocab_size: int, context: RankContext, part: Optional[int], sharding: int
) -> Built:
    """The model of `frozen_settings` on this rank, with memory for its weights.

    part: only so many first layers; sharding: the ZeRO stage of the run
    """
    recipe, mesh, shard = recipe_of(settings), context.mesh.of_whole_model(), context.mesh.shard
    refuse_sizes(settings, mesh, recipe.rules)
    dtype = weight_format(settings.precision)
    layers = dict(layers=range(part), last=False) if part else {}
    model = recipe.build_model(settings, mesh, vocab_size, **layers, dtype=dtype, device="meta")
    if sharding == 3 and shard.size > 1:
        return with_sharded_layers(model, mesh, shard, dtype=dtype, device=context.device)
    return allocated(model, [model], mesh, dtype=dtype, device=context.device)


def with_sharded_layers(model: torch.nn.Module, mesh: Mesh, shard: Axis, *, dtype, device) -> Built:
    """Allocate this rank's shards of a model's layers, and its other weights whole. The layers' own memory is filled before
    each of their passes, and freed after it.
    """
    fill_buffers([model], mesh.coordinates)
    place_buffers(model, device)
    own, pieces, at = {}, [], 0
    for unit in flat_units_of(model, lambda name: shard):
        low, high = unit.shard(shard.rank, shard.size) if unit.layer else (0, unit.size)
        own[unit.name] = OwnedRange(unit, low, high, at)
        at += high - low
    sizes = [(one.unit, one.high - one.low) for one in own.values()]
    buffers, shards = flat_memory(sizes, dtype=dtype, device=device)
    for one in own.values():
        if not one.unit.layer:
            materialise(one.unit, shards[one.unit.name])
    layers = [one.unit for one in own.values() if one.unit.layer]
    piece_of = lambda unit: shards[unit.name]
    gathered = ParameterBuffers(layers, lambda name: shard, piece_of, dtype=dtype, device=device, keep=False)
    for number, block in model.blocks.items():
        gather_around(block, gathered, [unit.name for unit in layers if unit.part == f"blocks.{number}"])
    for one in own.values():
        pieces += pieces_of(one, one.part(shards[one.unit.name]), mesh.coordinates)
    for name, buffer in placed_buffers([model]).items():
        pieces += buffer_pieces(name, buffer, mesh.coordinates)
    return Built(model, buffers[dtype], pieces)


def gather_around(block: torch.nn.Module, gathered: ParameterBuffers, names: Sequence[str]) -> None:
    """Gather these units before each pass through a block, and free them after it."""
    held = [gathered.memory[name] for name in names]

    def gather(module, inputs) -> None:
        gathered.need(*held)

    def free(module, inputs, output) -> None:
        for memory in held:
            gathered.free(memory)

    block.register_forward_pre_hook(gather)
    block.register_forward_hook(free)
