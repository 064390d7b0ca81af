# SPDX-License-Identifier: Apache-2.0
"""Activation memory of a stage: bytes that its forward pass saves for the backward pass, by kind, from the model's facts.

Tests compare with `torch.autograd.graph.saved_tensors_hooks`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from megatron.model.facts import Bytes, Facts, LayerDesign
from megatron.model.layer_ops import LAYER, RankSetup, Residual
from megatron.model.recompute_plan import last_modules, recompute_groups
from megatron.planner.layout import Job, Layout
from megatron.settings.schema import Recompute


class SavedBytes(NamedTuple):
    """Bytes that a pass saves: by kind, and their sum."""

    kinds: Mapping[str, int]
    total: int

    def plus(self, kind: str, size: int) -> "SavedBytes":
        return SavedBytes(Bytes({**self.kinds, kind: size}), self.total + size)


def stage_saved_bytes(job: Job, layout: Layout, layers: Sequence[int], first: bool, last: bool) -> Bytes:
    """Bytes saved in one pass of a micro-batch through the layers of a stage (by their index in the whole network)."""
    return Bytes(stage_saved(job, layout, layers, first, last).kinds)


def stage_saved(job: Job, layout: Layout, layers: Sequence[int], first: bool, last: bool) -> SavedBytes:
    """`stage_saved_bytes`, with their sum."""
    return _stage_saved(job.facts, layout.rank_setup(job), layout.recompute, layers, first, last)


@lru_cache(maxsize=65536)
def _stage_saved(
    facts: Facts, share: RankSetup, settings: Recompute, layers: Sequence[int], first: bool, last: bool
) -> SavedBytes:
    kept = Bytes()
    for (design, modules), count in repeated(facts, settings, layers, together=True).items():
        for name, size in _layer_saved_bytes(facts, share, design, modules).items():
            kept[name] += count * size
    kept.update(facts.ends_saved_bytes(share, first, last))
    if last and facts.settings.depths:
        for name, size in _depth_saved_bytes(facts, share, last_modules(layers, settings)).items():
            kept[name] += facts.settings.depths * size
    return SavedBytes(kept, sum(kept.values()))


def _depth_saved_bytes(facts: Facts, share: RankSetup, modules: tuple[str, ...]) -> Bytes:
    """Bytes that a depth of multi-token prediction saves, besides its loss."""
    kept = Bytes()
    if LAYER in modules:  # it is recomputed whole, from two inputs, of which one went through dropout
        kept["inputs of recomputed layers"] += 2 * Residual(facts.settings, share, facts.loss_tokens(share)).nbytes
        kept["token numbers"] += sum(op.kept for op in facts.depth_ops(share) if op.name == "token numbers")
        return kept
    for design in facts.designs_ahead:
        kept.update(_layer_saved_bytes(facts, share, design, modules))
    for op in facts.depth_ops(share):
        kept[op.name] += op.kept
    return +kept  # without those of 0 bytes


@lru_cache(maxsize=65536)
def _layer_saved_bytes(facts: Facts, share: RankSetup, design: LayerDesign, modules: tuple[str, ...]) -> Bytes:
    return facts.layer_saved_bytes(design.share(share), design.kind, modules)


def largest_layer(job: Job, layout: Layout, layers: Sequence[int]) -> int:
    """The most bytes that the forward pass of one of these layers saves for a micro-batch."""
    share = layout.rank_setup(job)
    each = (
        sum(_layer_saved_bytes(job.facts, share, design, modules).values())
        for design, modules in repeated(job.facts, layout.recompute, tuple(layers), together=True)
    )
    return max(each, default=0)


@lru_cache(maxsize=65536)
def repeated(facts: Facts, settings: Recompute, layers: Sequence[int], together: bool = False) -> Counter:
    """Count layers by (design, recomputed modules). together: count a group that is recomputed together once."""
    counts = Counter()
    for group in recompute_groups(layers, settings):
        members = group.layers[:1] if together and "full" in group.modules else group.layers
        counts.update((facts.design_of(layer), group.modules) for layer in members)
    return counts


def deferred(job: Job, layout: Layout, layers: Sequence[int]) -> int:
    """Bytes of the inputs and output gradients of these layers' deferred products (zero-bubble W)."""
    return _deferred(job.facts, layout.rank_setup(job), layers)


@lru_cache(maxsize=65536)
def _deferred(facts: Facts, share: RankSetup, layers: Sequence[int]) -> int:
    designs = repeated(facts, Recompute(), layers).items()
    return sum(count * _layer_deferred(facts, share, one) for (one, _), count in designs)


@lru_cache(maxsize=65536)
def _layer_deferred(facts: Facts, share: RankSetup, design: LayerDesign) -> int:
    return facts.deferred_saved_bytes(design.share(share), design.kind)


def workspace(job: Job, layout: Layout, layers: Sequence[int]) -> int:
    """Peak bytes that the backward pass of one of these layers needs in addition to saved ones."""
    return _workspace(job.facts, layout.rank_setup(job), layout.recompute, tuple(layers))


@lru_cache(maxsize=65536)
def _workspace(facts: Facts, share: RankSetup, settings: Recompute, layers: tuple[int, ...]) -> int:
    together = (settings.recompute_num_layers or 1) if settings.recompute_method != "block" else 1
    designs = {design for design, _ in repeated(facts, Recompute(), layers)}
    return max((_layer_workspace(facts, share, one, settings.modules, together) for one in designs), default=0)


@lru_cache(maxsize=65536)
def _layer_workspace(
    facts: Facts, share: RankSetup, design: LayerDesign, modules: tuple[str, ...], together: int
) -> int:
    return facts.layer_workspace(design.share(share), design.kind, modules, together)
