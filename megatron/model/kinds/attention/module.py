# SPDX-License-Identifier: Apache-2.0
"""Causal self-attention with grouped queries, rotary positions, query-key norm, separate documents, sliding windows, soft
caps, sinks and a key-value cache. Ranks of context parallelism share sequences by a ring of keys and values, by gathering
them, or by exchanging rows for heads.

Legend: s new tokens, t all tokens (t = s without a cache), b micro-batch, h hidden, g key-value groups, q queries
per group, d channels per head, v of its values, often d, tp ranks that divide the groups, cp ranks that divide the tokens:
s is one rank's part of t = s cp.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar, Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import Case, choose_kernel, describe_document_kernel, reference
from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.explicit_attention import largest_scores
from megatron.model import ring_attention
from megatron.model.context import ForwardContext, LayerSetup
from megatron.model.facts import Facts
from megatron.model.layer_ops import ATTENTION, CORE, LAYER, RankSetup
from megatron.model.max_logits import MaxLogits
from megatron.model.norms import NORMS, RMSNormAcrossHeads
from megatron.model.positions import rotate
from megatron.model.recompute import recompute
from megatron.model.ring_attention import ring_steps
from megatron.model.weights import Table, take_prefix
from megatron.mpu.chunks import own_chunks
from megatron.mpu.context_parallel import (
    gather_from_context_parallel_region,
    gathered_again,
    heads_to_rows,
    own_rows,
    rows_to_heads,
)
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout
from megatron.settings.schema import Config, Kernels


def allowed_pairs(documents: torch.Tensor) -> torch.Tensor:
    """The keys that each query may see, [b, s, s] bool: those of its document that are not after it; from ids [s, b]."""
    ids = documents.t()
    return (ids.unsqueeze(2) == ids.unsqueeze(1)).tril()


def chunk_keys(chunk: tuple[int, int], window: Optional[int]) -> slice:
    """The keys for the queries of a chunk of rows: up to the end of the chunk, from at most a window before its start."""
    start, stop = chunk
    return slice(0 if window is None else max(0, start - window), stop)


def documents_of_chunks(starts: np.ndarray, rows: Axis, windows: set[Optional[int]], device) -> dict:
    """`ForwardContext.of_chunks` from the start positions [b, t] of documents in whole samples."""
    chunks = own_chunks(starts.shape[1], rows.rank, rows.size)
    return {
        window: tuple(
            Documents.of(starts, device, rows=chunk, first=chunk_keys(chunk, window).start) for chunk in chunks
        )
        for window in windows
    }


class Attention(nn.Module):
    """Self-attention, [s, b, h] -> [s, b, h]. weights: `kinds.attention.kind.attention(...)`."""

    causal = True  # no query sees a key after it
    inputs: ClassVar[tuple[str, ...]] = ("qkv",)  # names of the products before the core
    site = "attention"  # the name of its dropout

    def __init__(self, weights: Table, setup: LayerSetup):
        super().__init__()
        model, tp, kernels, sharing = setup.model, setup.tp, setup.kernels, setup.sharing
        self.layer, self.head_dim, self.value_dim = setup.layer, model.head_dim, model.head_dim
        self.scale = (model.query_pre_attn_scalar or self.head_dim) ** -0.5  # of scores
        self.groups = model.query_groups // tp.size
        self.queries, self.parts = model.num_attention_heads // model.query_groups, model.qkv_parts
        self.create_inputs(weights, setup)
        self.output = RowParallelLinear(take_prefix(weights, "output"), tp, **setup.linear)
        self.has_sinks = model.softmax_type != "vanilla"
        self.register_parameter("softmax_offset", None)
        if learned := {name: placed for name, placed in weights.items() if name == "softmax_offset"}:
            create_parameters(self, learned, tp, **setup.factory)
        self.sharing, self.recompute_core = sharing, CORE in setup.recompute
        # Gathered keys and values are gathered again in the backward pass instead of being kept.
        self.gather_again = not {CORE, ATTENTION, LAYER}.intersection(setup.recompute) and not kernels.torch_compile
        heads = tp if sharing.heads.size == 1 else _divided_by_both(tp, sharing.heads)
        drops = dict(batch_dim=0, cut=0, axis=heads)
        self.dropout = Dropout(model.attention_dropout, self.site, self.layer, setup.seed, **drops)
        # Megatron's scaling for fp16: scores are divided by the layer's number before, multiplied after, in fp32.
        self.score_divisor = float(self.layer + 1) if model.apply_query_key_layer_scaling else 1.0
        self.softmax_in_fp32 = model.attention_softmax_in_fp32 or model.apply_query_key_layer_scaling
        self.rotates = model.position_embedding_type == "rope"  # --no-rope-freq: not in all layers
        self.softcap, self.window = model.attn_logit_softcapping, model.window
        self.backend = kernels.attention_backend
        self.plain_softmax, self.plain_rope = not kernels.masked_softmax_fusion, not kernels.rope_fusion
        self.fuse_qkv = kernels.fuse_attn_qkv
        self.max_logits: Optional[MaxLogits] = None  # set by `watch_logits`
        self.core = self._usual_core = core_of(self.causal and not sharing.in_ring, kernels)

    def create_inputs(self, weights: Table, setup: LayerSetup) -> None:
        """Create the products before the core, and the norms between."""
        model, tp = setup.model, setup.tp
        for name in self.inputs:
            self.add_module(name, ColumnParallelLinear(take_prefix(weights, name), tp, **setup.linear))
        self.q_norm = self.k_norm = None
        if take_prefix(weights, "q_norm"):
            norm = partial(RMSNormAcrossHeads, tp) if model.qk_layernorm_across_heads else NORMS[model.normalization]
            self.q_norm, self.k_norm = (
                norm(take_prefix(weights, name), model.norm_epsilon, **setup.factory) for name in ("q_norm", "k_norm")
            )
            self.q_norm.groups = self.k_norm.groups = self.groups

    def forward(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        query, *gate, key, value = self._parts(x)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        angles = context.angles if context.local_angles is None or self.window is None else context.local_angles
        if angles is not None and self.rotates:
            query, key = (rotate(part, angles, self.plain_rope) for part in (query, key))
        key, value = key.squeeze(3), value.squeeze(3)  # [s, b, g/tp, d]
        if context.cache is not None:
            attended = context.cache.attend(self, query, key, value, context)
        else:
            attended = self.attended(query, key, value, context)
        if gate:
            attended = attended * gate[0].flatten(2).sigmoid()
        return self.project(attended, x)

    def attended(self, query, key, value, context: ForwardContext) -> torch.Tensor:
        """`core`, recomputed if it is to be."""
        if self.recompute_core:
            return recompute(self.core, query, key, value, self, context, inside=context.region, of=(self,))
        return self.core(query, key, value, self, context)

    def watch_logits(self, tp: int, compiled: bool) -> MaxLogits:
        """Keep the largest logit of each head in training. tp: ranks that divide the heads; compiled: the layer is."""
        self.max_logits = MaxLogits(self.groups, self.queries, tp)
        if compiled:  # buffers change outside of graphs
            self.core = torch.compiler.disable(self.core)
        return self.max_logits

    def see_logits(self, query: torch.Tensor, largest: Callable[..., torch.Tensor], *args, **more) -> None:
        """Keep the largest logits of a pass in training, `largest(query, ...)` -> [g, q]: of all groups, or of a part if
        ranks exchange rows for heads.
        """
        if self.max_logits is not None and self.training and not query.is_meta:
            self.max_logits.see(largest(query, *args, **more), self.sharing.heads.rank)

    def gathered(self, query, key, value, context: ForwardContext) -> tuple[tuple, AbstractContextManager]:
        """(query, key, value), the latter two with the rows of all ranks of context parallelism, [t, b, g/tp, d or v];
        and a context for what reads them.
        """
        own = torch.cat((key, value), -1)
        whole = gather_from_context_parallel_region(own, self.sharing.rows)
        reading = gathered_again(whole, own, self.sharing.rows) if self.gather_again else nullcontext()
        return (query, *whole.split((key.shape[-1], value.shape[-1]), -1)), reading

    def decode_kernel(self, like: torch.Tensor) -> Optional[Callable]:
        """A kernel that attends for the newest token of each of several texts (`reference.decode_attention`), in the format
        of `like`; None: the texts attend one after the other, by `core`.
        """
        if self.core is not self._usual_core or torch.is_grad_enabled():
            return None
        case = self.case(like, 1, 2, scaled_softmax=False)  # of one token at a time
        run = choose_kernel("decode_attention", case, self.backend).run
        if run is reference.decode_attention:
            return None
        sinks = self.sinks(self.groups) if self.has_sinks else None
        return partial(run, scale=self.scale, softcap=self.softcap, window=self.window, sinks=sinks)

    def case(self, like: torch.Tensor, queries: int, keys: int, **more) -> Case:
        """The case of a call with queries [any, any, g, q, d] `like` these, to choose its kernel. more: fields of `Case`"""
        more.setdefault("scaled_softmax", self.score_divisor != 1.0 and like.dtype == torch.float16)
        return Case(
            like.device.type,
            like.dtype,
            queries,
            keys,
            causal=self.causal,
            grouped=like.shape[3] > 1,
            softcap=self.softcap is not None,
            window=self.window,
            unfused=self.plain_softmax,
            head_dim=like.shape[-1],
            sinks=self.has_sinks,
            **more,
        )

    def sinks(self, groups: int) -> torch.Tensor:
        """The logits [groups, q] that take part in the softmax of heads and have no value.

        groups: those of this rank, which are fewer if ranks exchange rows for heads
        """
        if self.softmax_offset is None:  # --softmax-type off-by-one
            return torch.zeros(groups, self.queries, device=self.qkv.weight.device)
        return self.softmax_offset.narrow(0, self.sharing.heads.rank * groups, groups)

    def project(self, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Project the attention output [s, b, g/tp q d] to [s, b, h]. x: the layer's input, for variants."""
        return self.output(attended)

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[s, b, h] -> [s, b, g/tp, n, d] with n = q queries, their gates if they have some, 1 key, 1 value; by one product
        or one for each.
        """
        if not self.fuse_qkv:
            return self.qkv.parts(x, self.parts)
        qkv = self.qkv(x)
        s, b = qkv.shape[:2]
        # Split in the last dim: torch joins gradients there in one kernel, and in an inner dim in one for each.
        parts = [n * self.head_dim for n in self.parts]
        qkv = qkv.view(s, b, self.groups, sum(parts)).split(parts, 3)
        return tuple(part.unflatten(3, (-1, self.head_dim)) for part in qkv)


class BidirectionalAttention(Attention):
    """Every query sees every key that is a token."""

    causal = False


def describe_kernel(config: Config, facts: Facts, device: str) -> list[str]:
    """Log lines with the attention kernels of a run that packs documents into samples; else none."""
    model, precision = config.model, config.precision.precision
    if not (config.data.reset_attention_mask and facts.attention_kernel(RankSetup(device=device, precision=precision))):
        return []
    case = Case(
        device,
        dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)[precision],
        model.seq_length // config.parallel.context_parallel_size,
        model.seq_length,
        causal=True,
        dropout=model.attention_dropout > 0,
        grouped=model.query_groups < model.num_attention_heads,
        scaled_softmax=model.apply_query_key_layer_scaling and precision == "fp16",
        softcap=model.attn_logit_softcapping is not None,
        window=model.window,
        unfused=not config.kernels.masked_softmax_fusion,
        documents=True,
        head_dim=model.head_dim,
        sinks=model.softmax_type != "vanilla",
    )
    backend, parallel, lines = config.kernels.attention_backend, config.parallel, []
    kinds = set(parallel.cp_comm_types) if parallel.context_parallel_size > 1 else set()
    rings = kinds & {"p2p", "a2a+p2p"}
    if rings and device == "cuda":
        kernel = choose_kernel("partial_attention", replace(case, keys=case.queries), backend)
        lines += [f"kernels: attention of documents in a ring by {kernel.name}"]
    return lines if rings and kinds <= rings else lines + describe_document_kernel(case, backend)


def attention_core(query, key, value, layer: Attention, context: ForwardContext) -> torch.Tensor:
    """[s, b, g/tp, q, d] over keys [s, b, g/tp, d] and values [s, b, g/tp, v] (with a cache t) -> [s, b, g/tp q v]."""
    sharing = layer.sharing
    if sharing.size == 1:
        return scaled_dot_product_attention(query, key, value, layer, context)
    if context.bias is not None or context.allowed is not None or context.padding is not None:
        raise SettingsError(
            "attention with a bias or a mask of its own needs whole sequences on each rank",
            f"--context-parallel-size {sharing.size}",
            "leave --context-parallel-size at 1, and give the recipe shares_sequences=False",
        )
    if sharing.heads.size > 1:  # rows for heads (Ulysses, arXiv:2309.14509)
        q = query.shape[3]
        qkv = torch.cat((query.flatten(3), key, value), -1)  # [s, b, g/tp, q d + d + v]
        parts = (q * query.shape[-1], key.shape[-1], value.shape[-1])
        query, key, value = rows_to_heads(qkv, sharing.heads).split(parts, -1)  # [s heads, b, g/(tp heads), ...]
        query = query.unflatten(3, (q, -1))
    attend = scaled_dot_product_attention
    if sharing.rows.size > 1:
        attend = attention_in_a_ring if sharing.in_ring else attention_over_gathered_keys
    return heads_to_rows(attend(query, key, value, layer, context), sharing.heads)


def core_of(compiled: bool, kernels: Kernels) -> Callable:
    """`attention_core`; with torch.compile outside the graph if not `compiled`. So for non-causal layers: the samples of a
    batch may be packed into one row (`packed_rows`), and new lengths would trigger recompilation; and for rings, which have
    messages in flight, and steps that depend on documents.
    """
    return attention_core if compiled or not kernels.torch_compile else torch.compiler.disable(attention_core)


def attention_in_a_ring(query, key, value, layer: Attention, context: ForwardContext) -> torch.Tensor:
    """Context parallel attention with keys and values that travel round the ranks (`ring_attention`)."""
    ring, t = layer.sharing.rows, len(query) * layer.sharing.rows.size
    if context.of_ring is None:
        steps = ring_steps(t, ring.rank, ring.size, layer.window)
    else:
        steps = context.of_ring[ring.size, layer.window]
    dropout = weights_kept(layer, query, t, t, context)
    kept = dropout and dropout._replace(words=own_rows(dropout.words, ring, 2))
    return ring_attention.scaled_dot_product_attention(query, key, value, layer, steps, kept)


def attention_over_gathered_keys(query, key, value, layer: Attention, context: ForwardContext) -> torch.Tensor:
    """Context parallel attention with gathered keys and values: each of the rank's two chunks of queries attends to the
    keys up to its end, or to those in its window. The backward pass gathers them again, unless the whole layer is
    recomputed.
    """
    (query, key, value), reading = layer.gathered(query, key, value, context)
    rows_axis, t, c, attended = layer.sharing.rows, len(key), len(query) // 2, []
    dropout = weights_kept(layer, query, t, t, context)
    with reading:
        for number, (start, stop) in enumerate(own_chunks(t, rows_axis.rank, rows_axis.size)):
            rows = slice(number * c, number * c + c)
            keys = chunk_keys((start, stop), layer.window)
            documents = context.of_chunks and context.of_chunks[layer.window][number]
            kept = dropout and dropout._replace(words=dropout.words[:, :, start:stop, keys])
            part = replace(context, documents=documents)
            attended.append(scaled_dot_product_attention(query[rows], key[keys], value[keys], layer, part, kept))
    return torch.cat(attended)


def _divided_by_both(tp: Axis, cp: Axis) -> Axis:
    """The axis that divides heads over cp within each rank of tp."""
    return Axis("heads", tuple(range(tp.size * cp.size)), tp.rank * cp.size + cp.rank)


def weights_kept(layer: Attention, query, s: int, t: int, context: ForwardContext) -> Optional[DropoutMask]:
    """The dropout mask of attention weights [b, g/tp q, s, t] for queries [any, b, g/tp, q, d]; None: no dropout."""
    if not (layer.dropout.p > 0 and layer.training):
        return None
    _, b, g, q, _ = query.shape
    queries, keys = context.drawn or (s, t)
    kept = layer.dropout.keep((b, g * q, queries, keys), context.samples, query.device)
    if context.drawn is None:
        return kept
    return kept._replace(words=F.pad(kept.words, (0, t - keys, 0, s - queries)))


@op
def scaled_dot_product_attention(
    query, key, value, layer: Attention, context: ForwardContext, dropout: Optional[DropoutMask] = None
) -> torch.Tensor:
    """softmax(q k) v by the best kernel for the case: [s, b, g/tp, q, d] over [t, b, g/tp, d or v] -> [s, b, g/tp q v]. The
    queries are the last s of the t tokens. dropout: the weights to keep; default: drawn here.
    """
    packed = context.documents is not None and not layer.causal
    queries, keys = context.documents.longest if packed else (query.shape[0], key.shape[0])
    case = layer.case(
        query,
        queries,
        keys,
        masked=context.allowed is not None,
        dropout=layer.dropout.p > 0 and layer.training,
        documents=context.documents is not None and not packed,
        biased=context.bias is not None,
        padded=context.padding is not None,
        packed=packed,
    )
    layer.see_logits(
        query,
        largest_scores,
        key,
        scale=layer.scale,
        causal=case.causal,
        window=layer.window,
        allowed=context.allowed,
        documents=context.documents,
        padding=context.padding,
    )
    if dropout is None:
        dropout = weights_kept(layer, query, query.shape[0], key.shape[0], context)
    sinks = dict(sinks=layer.sinks(query.shape[2])) if layer.has_sinks else {}
    return choose_kernel("attention", case, layer.backend).run(
        query,
        key,
        value,
        scale=layer.scale,
        causal=case.causal,
        allowed=context.allowed,
        documents=context.documents,
        score_divisor=layer.score_divisor,
        softmax_in_fp32=layer.softmax_in_fp32,
        dropout=dropout,
        softcap=layer.softcap,
        window=layer.window,
        bias=context.bias,
        padding=context.padding,
        **sinks,
    )
