# SPDX-License-Identifier: Apache-2.0
"""What layers are built from (`LayerSetup`), and the inputs that all layers share in a pass (`ForwardContext`)."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional

import torch

from megatron.fused_kernels.documents import Documents
from megatron.model.cache import Cache
from megatron.model.facts import Facts
from megatron.model.kinds.mixer import Mixer
from megatron.model.ring_attention import Steps
from megatron.mpu.context_parallel import UNSHARED, AttentionSharing, scan_sharing
from megatron.mpu.mesh import Axis, Mesh
from megatron.settings.schema import Kernels, Model


@dataclass(frozen=True)
class LayerSetup:
    """What a layer and its parts are built from, apart from their weights.

    facts:     of the model
    layer:     its index in the whole network, from 0
    mesh:      the ranks that have parts of it
    recompute: the parts that are recomputed in the backward pass (`Facts.recomputes`); the caller handles "full"
    sharing:   how ranks of `mesh.cp` share a sequence: in attention, and in a mixer after `of`
    """

    facts: Facts
    layer: int
    mesh: Mesh
    seed: int = 1234
    kernels: Kernels = Kernels()
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    device: Any = None
    recompute: tuple[str, ...] = ()
    sharing: AttentionSharing = UNSHARED

    @cached_property
    def model(self) -> Model:
        """The settings of the layer."""
        return self.facts.layer_kind(self.layer).settings(self.facts.settings)

    def of(self, mixer: Mixer) -> "LayerSetup":
        """That of a mixer of the layer."""
        return replace(self, sharing=sharing_of(mixer, self.model, self.mesh, self.sharing))

    @property
    def tp(self) -> Axis:
        return self.mesh.tp

    @property
    def factory(self) -> dict[str, Any]:
        """The keywords of a module that creates parameters."""
        return dict(dtype=self.dtype, device=self.device)

    @property
    def linear(self) -> dict[str, Any]:
        """The keywords of a parallel linear layer."""
        return dict(sequence_parallel=self.sequence_parallel, **self.factory)


def sharing_of(mixer: Mixer, model: Model, mesh: Mesh, attention: AttentionSharing) -> AttentionSharing:
    """How a mixer's ranks share a sequence. model: settings of the layer; attention: how those of attention do"""
    if not mixer.scans or attention.size == 1:
        return attention
    return scan_sharing(mixer.heads(model) // mesh.tp.size, mesh.cp, mesh.cp_inner, mesh.cp_outer)


@dataclass(frozen=True)
class ForwardContext:
    """The inputs that all blocks share in one forward pass.

    batch     the `MicroBatch`; None in inference
    samples   [b] positions in the order of training samples, for dropout; None in inference
    angles    cos and sin of RoPE, or None
    local_angles  those of layers with a window, if they have another base (--rope-local-base-freq)
    documents the keys that each query sees if documents are packed into samples, for whole sequences, even if this rank
              has only some rows; None: plain causal attention. For non-causal layers: the sample of each row
              (`packed_rows`)
    of_chunks the same for the rank's two chunks of rows, by window: each chunk's queries over the keys sliced for it
    of_ring   the same for the steps of a ring, by its size and the window
    of_halves the documents of the rank's two chunks, each for itself, by the number of ranks that pass states on
    allowed   [b, s, s] bool: query may see key. In inference, if samples have several documents
    cache     keys and values of earlier tokens, or None
    region    returns the context manager for recomputation
    bias      [heads/tp, s, t], added to scores: relative positions; or None
    padding   [b, t] bool: True for keys that are tokens, at least one per sample; None: all
    routings  layer -> how its first run routed tokens to experts, which recomputation repeats
    weights   [s, b]: of tokens in the sums that layers return; None: the loss mask. For losses that are no sums over tokens
    drawn     (queries, keys) of a sample that dropout is drawn for, if padding rows follow them; None: all
    cross     what cross-attention reads: another sequence's states [t, b, h], and the context for them; None: nothing
    """

    samples: Optional[torch.Tensor] = None
    angles: Optional[tuple[torch.Tensor, torch.Tensor]] = None
    local_angles: Optional[tuple[torch.Tensor, torch.Tensor]] = None
    documents: Optional[Documents] = None
    of_chunks: Optional[dict[Optional[int], tuple[Documents, Documents]]] = None
    of_ring: Optional[dict[tuple[int, Optional[int]], Steps]] = None
    of_halves: Optional[dict[int, Documents]] = None
    allowed: Optional[torch.Tensor] = None
    cache: Optional[Cache] = None
    region: Callable = nullcontext
    batch: Any = None
    bias: Optional[torch.Tensor] = None
    padding: Optional[torch.Tensor] = None
    drawn: Optional[tuple[int, int]] = None
    cross: Optional[tuple[torch.Tensor, "ForwardContext"]] = None
    weights: Optional[torch.Tensor] = None
    routings: dict[int, Any] = field(default_factory=dict)

    @property
    def loss_mask(self) -> Optional[torch.Tensor]:
        """[s, b] float32: what each token counts in the sums of layers; None if all count 1, and in inference."""
        if self.weights is not None:
            return self.weights
        return None if self.batch is None else self.batch.loss_mask

    @cached_property
    def all_documents(self) -> Optional[Documents]:
        """`documents`, or those that `allowed` separates: of layers that need to know where documents start."""
        if self.allowed is None:
            return self.documents
        starts = self.allowed.byte().argmax(-1).to(torch.int32)  # the first token that each sees
        return Documents.of(starts.cpu().numpy(), starts.device)

    @cached_property
    def without_cache(self) -> "ForwardContext":
        """The context of attention over keys that a cache has returned."""
        return replace(self, cache=None)

    @property
    def num_tokens(self) -> Optional[torch.Tensor]:
        """Tokens of the micro-batch that count in the loss, an fp32 scalar; None in inference."""
        return None if self.batch is None else self.batch.num_tokens
