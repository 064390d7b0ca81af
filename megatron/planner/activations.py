# SPDX-License-Identifier: Apache-2.0
"""What the forward pass keeps for the backward pass: bytes by kind, op by op as the model's code keeps them.

Legend: n tokens of a micro-batch (s x b), h hidden, e bytes of an element, tp ranks that divide each matrix. Under
sequence parallelism what lies between layers is cut by tp. Tests compare with `torch.autograd.graph.saved_tensors_hooks`.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from megatron.model.recompute_plan import plan
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import padded_vocabulary

Bytes = Counter  # kind -> bytes

CHUNK_BYTES = dict(cpu=8 << 20, cuda=512 << 20)  # mpu/cross_entropy.py: one chunk's logits in fp32
BLOCK_BYTES = 128 << 20  # mpu/cross_entropy.py: gradients of logits that wait for their product


def layer_kept(job: Job, layout: Layout) -> Bytes:
    """Of one layer and micro-batch, with nothing computed again."""
    return _layer(job, layout.tp, layout.sp, layout.micro)


def stage_kept(job: Job, layout: Layout, layers: Sequence[int], first: bool, last: bool) -> Bytes:
    """Of one pass of a micro-batch through the layers of a stage (their numbers in the whole network)."""
    kept = Bytes()
    for group in plan(layers, layout.recompute):
        if group.again == "full":  # the input of the first layer of the group, nothing else
            kept["inputs of recomputed layers"] += passage(job, layout)
        else:
            for kind, size in _layer_again(job, layout.tp, layout.sp, layout.micro, group.again).items():
                kept[kind] += group.size * size
    if first:
        kept.update(_embedding(job, layout))
    if last:
        norm = _norm(job, passage(job, layout) // job.element, job.model.hidden_size)
        kept["norms"] += norm
        kept["output layer and loss"] += loss_kept(job, layout)
    return kept


def loss_kept(job: Job, layout: Layout) -> int:
    """What the fused output layer and loss keep: gradients of its input [n, h] and its weight [v/tp, h]; in place of the
    latter, while its product waits, the two that are multiplied.
    """
    (rows, n), row = _loss_shape(job, layout), job.model.hidden_size * job.element
    return n * row + (loss_waits(job, layout) or rows * row)


def loss_waits(job: Job, layout: Layout) -> int:
    """Bytes from which the output weight's gradient is made in the backward pass, or later: the input and the gradients of
    all logits, [n, h + v/tp]. 0: these are too many to be kept, and it is made going forward, a block at a time.
    """
    (rows, n), block = _loss_shape(job, layout), _loss_block(job, layout)[1]
    return n * (job.model.hidden_size + rows) * job.element if n <= block else 0


def loss_workspace(job: Job, layout: Layout) -> int:
    """Most bytes of logits and their gradients at a time, beside what is kept."""
    rows, n = _loss_shape(job, layout)
    chunk, block = _loss_block(job, layout)
    logits, product = 3 * 4 * min(n, chunk) * rows, rows * job.model.hidden_size
    if n <= block:
        return max(logits, product * job.element)
    return block * rows * job.element + logits + 2 * 4 * product  # weight gradients of blocks are summed in fp32


def loss_chunks(job: Job, layout: Layout) -> int:
    """Chunks of tokens that the loss of a micro-batch is computed in."""
    n, (chunk, block) = _tokens(job, layout), _loss_block(job, layout)
    return sum(-(-min(block, n - start) // chunk) for start in range(0, n, block))


def _loss_shape(job: Job, layout: Layout) -> tuple[int, int]:
    """(rows of the vocabulary on a rank, tokens of a micro-batch)."""
    return padded_vocabulary(job.model, job.vocab_size, layout.tp) // layout.tp, _tokens(job, layout)


def _loss_block(job: Job, layout: Layout) -> tuple[int, int]:
    """Tokens of a chunk, whose logits exist in fp32 at a time, and of a block, whose gradients wait for their products."""
    rows, _ = _loss_shape(job, layout)
    chunk = max(128, CHUNK_BYTES[job.device] // (4 * rows))
    return chunk, max(chunk, BLOCK_BYTES // (job.element * rows) // chunk * chunk)


def workspace(job: Job, layout: Layout) -> int:
    """Most bytes that one layer's backward pass needs beside what is kept, with the layer recomputed if need be."""
    m, e, n = job.model, job.element, _tokens(job, layout)
    again = layout.recompute.recompute_granularity
    up = m.ffn_size // layout.tp * (2 if m.swiglu else 1)
    mlp = (
        n * (m.ffn_size // layout.tp + up + m.hidden_size * (2 if layout.sp else 1)) * e
    )  # sp: with the input, gathered
    attention = 0
    if job.attention_kernel != "flash":
        attention = 2 * layout.micro * m.num_attention_heads // layout.tp * m.seq_length**2 * e
    whole = sum(layer_kept(job, layout).values())
    parts = dict(
        full=whole * (layout.recompute.recompute_num_layers or 1)
        if layout.recompute.recompute_method != "block"
        else whole,
        full_attn=whole - _mlp_half(job, layout),
        core_attn=_core(job, layout.tp, layout.micro)[0],
    )
    return max(mlp, attention) + (parts[again] if again else 0)


def deferred(job: Job, layout: Layout) -> int:
    """Of one layer whose products for weights' gradients wait (passes W): inputs of its linear layers, and gradients of
    their outputs.
    """
    m, n = job.model, _tokens(job, layout)
    width, ffn = m.num_attention_heads * m.head_dim // layout.tp, m.ffn_size // layout.tp
    qkv = width + 2 * m.query_groups * m.head_dim // layout.tp
    between = 2 * (n + _cut(job, layout.tp, layout.sp, layout.micro)) * m.hidden_size
    return (between + n * (width + qkv + ffn * (3 if m.swiglu else 2))) * job.element


def passage(job: Job, layout: Layout) -> int:
    """Bytes of the hidden states between two layers."""
    return _cut(job, layout.tp, layout.sp, layout.micro) * job.model.hidden_size * job.element


# One layer ------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def _layer_again(job: Job, tp: int, sp: bool, micro: int, again: str) -> Bytes:
    kept = Bytes(_layer(job, tp, sp, micro))
    if again == "core_attn":
        kept["attention core"] = _core(job, tp, micro)[1]
    elif again == "full_attn":
        for kind in ("attention", "attention core"):
            del kept[kind]
        kept["norms"] -= _half_norm(job, tp, sp, micro)
        kept["inputs of recomputed layers"] = _cut(job, tp, sp, micro) * job.model.hidden_size * job.element
    return kept


@lru_cache(maxsize=65536)
def _layer(job: Job, tp: int, sp: bool, micro: int) -> Bytes:
    m, e, n = job.model, job.element, job.model.seq_length * micro
    h, rest = m.hidden_size, _cut(job, tp, sp, micro)
    width, ffn = m.num_attention_heads * m.head_dim // tp, m.ffn_size // tp
    norms = 2 * _half_norm(job, tp, sp, micro)
    masks = 2 * rest * h if m.hidden_dropout > 0 else 0
    return Bytes(
        {
            "norms": norms,
            "attention": (rest * h + n * width) * e,  # inputs of its two linear layers
            "attention core": _core(job, tp, micro)[0],
            "mlp": (rest * h + n * ffn * (4 if m.swiglu else 2)) * e,  # those, and that of GeLU
            "dropout masks": masks,
        }
    )


def _mlp_half(job: Job, layout: Layout) -> int:
    kept = layer_kept(job, layout)
    return kept["mlp"] + (kept["norms"] + kept["dropout masks"]) // 2


def _half_norm(job: Job, tp: int, sp: bool, micro: int) -> int:
    return _norm(job, _cut(job, tp, sp, micro) * job.model.hidden_size, job.model.hidden_size)


def _norm(job: Job, elements: int, width: int, shared_input: bool = False) -> int:
    """What a norm over `elements` keeps: its input (the residual stream, which nobody else keeps), and statistics."""
    rows = elements // width
    if job.model.normalization == "LayerNorm":
        stats = 2 * rows * (4 if job.device == "cuda" else job.element)
        return stats + (0 if shared_input else elements * job.element)
    return 4 * rows + (0 if shared_input else elements * job.element)


def _core(job: Job, tp: int, micro: int) -> tuple[int, int]:
    """Attention between its two linear layers: (bytes kept, bytes kept if softmax(q k) v is computed again)."""
    m, e, n = job.model, job.element, job.model.seq_length * micro
    heads, groups_, d = m.num_attention_heads // tp, m.query_groups // tp, m.head_dim
    q, kv = n * heads * d * e, n * groups_ * d * e
    fused, turned = q + 2 * kv, 0
    own = m.position_embedding_type == "rope" or m.qk_layernorm  # queries and keys are tensors of their own
    if m.qk_layernorm:
        turned += fused
        turned += _norm(job, n * heads * d, d, shared_input=True) + _norm(job, n * groups_ * d, d, shared_input=True)
    views = q + kv + (0 if m.qk_layernorm else fused) if own else fused  # q, k, and v as a part of the fused output
    again = turned + views
    grouped = m.num_attention_heads > m.query_groups
    weights = n * heads * e
    s = m.seq_length
    if job.attention_kernel == "flash":
        queries = q if grouped and not own else 0  # a copy, in place of queries that nobody else keeps
        return again + queries + 4 * n * heads, again
    if job.attention_kernel == "block-causal":
        rows = q if own or grouped else fused
        pairs = n * heads * _causal_pairs(s, m.num_attention_heads // m.query_groups) // s
        return turned + rows + 2 * kv + pairs * (
            e + (m.attention_dropout > 0)
        ), again  # weights, and what dropout keeps
    wide = weights * s // e * (4 if m.attention_softmax_in_fp32 or m.apply_query_key_layer_scaling else e)
    dropped = (
        (weights * s + weights * s // e) if m.attention_dropout > 0 else (weights * s if wide != weights * s else 0)
    )
    keys = fused if not own else kv + (0 if m.qk_layernorm else fused)
    return turned + keys + q + wide + dropped, again


def _causal_pairs(s: int, q: int) -> int:
    """Pairs of query and key whose weights the block-causal kernel keeps; q queries share a key."""
    size = max(1, (128 if s <= 512 else 256) // q)
    return sum((min(start + size, s) - start) * min(start + size, s) for start in range(0, s, size))


# The rest -------------------------------------------------------------------------------------------------------------


def _embedding(job: Job, layout: Layout) -> Bytes:
    n = _tokens(job, layout)
    kept = Bytes({"token numbers": 8 * n + (n if layout.tp > 1 else 0)})
    if job.model.hidden_dropout > 0:
        kept["dropout masks"] += _cut(job, layout.tp, layout.sp, layout.micro) * job.model.hidden_size
    return kept


def _tokens(job: Job, layout: Layout) -> int:
    return job.model.seq_length * layout.micro


def _cut(job: Job, tp: int, sp: bool, micro: int) -> int:
    """Tokens of the hidden states between layers."""
    return job.model.seq_length * micro // (tp if sp else 1)
