# SPDX-License-Identifier: Apache-2.0
"""Run the Triton kernels in Triton's interpreter, on the CPU in fp32, against `reference.py` in fp64.

    TRITON_INTERPRET=1 python tests/fused_kernels/interpret_kernels.py [CASE ...]      # {case: [relative errors]} as JSON

A process of its own, because the variable is read when a kernel is decorated. The interpreter rounds bf16 its own way, and
sees neither races nor reads out of bounds: formats are looked at on a GPU alone (tests/gpu).
"""

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import TABLE, TRITON, fp8, reference
from megatron.fused_kernels.decode_attention import Places
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.gpu import probe
from megatron.fused_kernels.reference import VocabularyPart
from megatron.inference.engine import Engine
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.model.fp8_product import PRODUCTS
from megatron.model.gpt.module import GPT
from megatron.mpu.layers import linear_products
from megatron.mpu.linear_product import attach_products
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter
from megatron.settings.schema import Model, Precision

FAR = 2**30  # elements between rows


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors(found, wanted) -> list[float]:
    """Relative errors in the norm over a tensor; where all is 0, that of the other."""
    pairs = [(x.double(), y.double()) for x, y in zip(found, wanted, strict=True)]
    assert all(x.shape == y.shape and y.isfinite().all() for x, y in pairs)
    return [((x - y).norm() / (y.norm() or 1.0)).item() for x, y in pairs]


def compared(op: str, inputs: list[torch.Tensor], call: Callable = lambda run, *x: run(*x)) -> list[float]:
    """Errors of values and of all gradients."""
    mine, exact = [x.detach().requires_grad_() for x in inputs], [x.detach().double().requires_grad_() for x in inputs]
    got, want = call(probe.kernel(op), *mine), call(getattr(reference, op), *exact)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    upstream = [drawn(*x.shape, seed=70 + n) for n, x in enumerate(want)]
    found = [*got, *torch.autograd.grad(got, mine, upstream)]
    return errors(found, [*want, *torch.autograd.grad(want, exact, [x.double() for x in upstream])])


def norm(op: str, *shape: int, size: float = 1.0, mean: float = 0.5, epsilon: float = 1e-5) -> list[float]:
    rows = [(drawn(*shape, seed=n) + mean) * size for n in range(1 + op.startswith("add"))]
    weights = [drawn(shape[-1], seed=5 + n) * 0.2 + 1.0 for n in range(1 + op.endswith("layer_norm"))]
    return compared(op, rows + weights, lambda run, *x: run(*x, epsilon))


def parts_of_rows() -> list[float]:
    """Heads cut out of a fused tensor, as the norms of queries and keys get them."""
    x = drawn(5, 2, 3, 4, 24)[..., 8:16]
    return compared("rms_norm", [x, drawn(8, seed=1)], lambda run, *x: run(*x, 1e-5))


def rotate(d: int, width: int, b: int = 2, own: bool = False) -> list[float]:
    """Queries of a fused tensor, and angles for all samples or for each."""
    x = drawn(5, b, 3, 6, d)[:, :, :, :4]
    angles = drawn(5, b if own else 1, 1, 1, width // 2, seed=1)
    angles = torch.cat((angles, angles), -1)
    return compared("rotate", [x], lambda run, x: run(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)))


def dropout_add(h: int, threshold: int) -> list[float]:
    words = torch.randint(-32768, 32768, (3, 10, h), generator=torch.Generator().manual_seed(2), dtype=torch.int16)
    words = words.chunk(2, 1)[1].movedim(0, 1)  # the second half of a sequence
    factor = 65536 / (32768 - threshold)
    call = lambda run, x, residual: run(x, DropoutMask(words, threshold, factor), residual)
    return compared("dropout_add", [drawn(5, 3, h), drawn(5, 3, h, seed=1)], call)


def words(count: int) -> list[float]:
    """The share of random words that are not those of Philox 4x32-10 (Salmon et al., 2011), computed with numpy."""
    from megatron.fused_kernels.gpu import dropout

    seeds = [0, 5, 2**62 + 12345]
    found = dropout.words(count, seeds, torch.device("cpu")).numpy()
    wanted = np.stack([philox(seed, -(-count // 8)).view(np.int16)[:count] for seed in seeds])
    return [(found != wanted).mean().item()]


def philox(seed: int, count: int) -> np.ndarray:
    """[4 count] uint32: the four words of counter 0 to count - 1, word by word."""
    half = np.uint64(0xFFFFFFFF)
    c = [np.arange(count, dtype=np.uint64), *np.zeros((3, count), np.uint64)]
    k = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]),
            b & half,
            (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]),
            a & half,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.concatenate(c).astype(np.uint32)


def cross_entropy(rows: int, v: int, shards: int, real: int, in_place: bool = False, **more) -> list[float]:
    """A vocabulary of `real` rows padded to v, cut into shards, each of which sees its logits alone; against the whole."""
    logits, scale = drawn(rows, v) * 3.0, drawn(rows, seed=2).abs()
    labels = torch.randint(0, real, (rows,), generator=torch.Generator().manual_seed(3))
    labels[:2] = torch.tensor([0, real - 1])
    want_gradient = torch.empty(rows, v, dtype=torch.float64)
    whole = VocabularyPart(0, real, **more)
    want = _exactly(logits, labels, whole, scale, want_gradient)
    run, width = probe.kernel("cross_entropy"), v // shards
    pieces = [logits[:, n * width : (n + 1) * width].clone() for n in range(shards)]
    parts = [whole._replace(first=n * width, real=max(0, min(width, real - n * width))) for n in range(shards)]
    told = []  # statistics of the shards, as messages bring them
    for piece, part in zip(pieces, parts, strict=True):
        run(piece, labels, part, lambda *own: told.append(own) or own)
    log_sum = torch.logsumexp(torch.stack([own[0] for own in told]), 0)
    joined = (log_sum, torch.stack([own[1] for own in told]).sum(0))
    join = (lambda *own: joined) if shards > 1 else None
    gradient = torch.empty(rows, v)
    for n, (piece, part) in enumerate(zip(pieces, parts, strict=True)):
        out = piece if in_place else gradient[:, n * width : (n + 1) * width]
        found = run(piece, labels, part, join, scale, out)
        gradient[:, n * width : (n + 1) * width] = out
    return errors([*found, gradient], [*want, want_gradient])


def permute(n: int, k: int, h: int, rows: int = 0, dropped: int = 0) -> list[float]:
    """rows: 0: as many as pairs."""
    order, place = probe.experts_order(n, k, rows or n * k, dropped, "cpu")
    return compared("permute", [drawn(n, h)], lambda run, x: run(x, order, place, k, not (rows or dropped)))


def unpermute(n: int, k: int, h: int, rows: int = 0, dropped: int = 0) -> list[float]:
    order, place = probe.experts_order(n, k, rows or n * k, dropped, "cpu")
    call = lambda run, y: run(y, order, place, k, not (rows or dropped))
    return compared("unpermute", [drawn(rows or n * k, h)], call)


def unequal_bits(h: int, dtype: torch.dtype, rows: int = 0, dropped: int = 0) -> list[float]:
    """Which results differ from those of torch's gathers in fp32: rows of experts, those in another order, sums of two
    experts, and gradients. The interpreter may cut off what bf16 has no bits for, instead of rounding.
    """
    n, k, found = 7, 2, []
    order, place = probe.experts_order(n, k, rows or n * k, dropped, "cpu")
    back, whole = torch.arange(len(order)).flip(0), not (rows or dropped)
    values = drawn(n, h).to(dtype), drawn(len(order), h, seed=1).to(dtype)
    for of, into in ((probe.kernel, dtype), (lambda op: TABLE[op][-1].run, torch.float32)):
        x, y = (value.to(into).requires_grad_() for value in values)
        there = of("permute")(x, order, place, k, whole)
        turned, sums = of("permute")(there, back, back, 1, True), of("unpermute")(y, order, place, k, whole)
        upstream = drawn(len(order), h, seed=3).to(dtype).to(into), drawn(n, h, seed=4).to(dtype).to(into)
        found.append([there, turned, sums, *torch.autograd.grad((turned, sums), (x, y), upstream)])
    cut_off = lambda x: (x.detach().contiguous().view(torch.int32) >> 16 << 16).view(torch.float32).to(dtype)
    alike = lambda x, exact: x.equal(exact.to(dtype)) or dtype == torch.bfloat16 and x.equal(cut_off(exact))
    return [float(not alike(x, exact)) for x, exact in zip(*found, strict=True)]


def after_the_rows() -> list[float]:
    """The share of values after the last row that pairs without a row change."""
    from megatron.fused_kernels.gpu import expert_rows

    (n, k, h), (_, place) = (7, 3, 100), probe.experts_order(7, 3, 15, 3, "cpu")
    rows = torch.full((16, h), 5.0)
    expert_rows.permute_kernel[n, 1](drawn(n, h), place, rows, 15, H=h, K=k, BLOCK=128)
    return [(rows[15] != 5.0).float().mean().item()]


def _exactly(logits, labels, part: VocabularyPart, scale, out) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and log sum exp in fp64 from the formula, and by autograd the gradient of loss and z-loss."""
    logits = logits.double().requires_grad_()
    real = logits[:, : part.real]
    real = real if part.softcap is None else part.softcap * (real / part.softcap).tanh()
    log_sum = real.logsumexp(1)
    loss = log_sum - part.label * real.gather(1, labels[:, None])[:, 0] - part.everywhere * real.sum(1)
    ((loss + part.z_loss * log_sum.square()) * scale).sum().backward()
    out.copy_(logits.grad)
    return loss.detach(), log_sum.detach()


def far_rows() -> list[float]:
    """Rows that begin 2^31 elements behind the first one; [] where there are not even addresses."""
    v = 50
    if (logits := _far(v)) is None:
        return []
    values = drawn(3, v).half()
    logits.copy_(values)
    labels, part, out = torch.tensor([1, 2, 3]), VocabularyPart(0, v), torch.empty(3, v, dtype=torch.float32)
    found = probe.kernel("cross_entropy")(logits, labels, part, None, None, out)
    gradient = torch.empty(3, v, dtype=torch.float64)
    want = _exactly(values, labels, part, torch.ones(3), gradient)
    return errors([*found, out], [*want, gradient])


def _far(width: int) -> Optional[torch.Tensor]:
    """[3, width] fp16, uninitialized, whose rows are 2^30 elements apart: memory that nobody touches costs nothing."""
    try:
        return torch.empty(2 * FAR + 64, dtype=torch.float16).as_strided((3, width), (FAR, 1))
    except RuntimeError:
        return None


def far_tokens() -> list[float]:
    """Tokens of which the third begins 2^31 elements behind the first one: it is read into a row, and written from one."""
    from megatron.fused_kernels.gpu import expert_rows

    h, place, rows = 16, torch.tensor([1, 1, 0]), torch.zeros(1, 16)
    if (tokens := _far(h)) is None:
        return []
    tokens.copy_(values := drawn(3, h).half())
    expert_rows.permute_kernel[3, 1](tokens, place, rows, 1, H=FAR, K=1, BLOCK=h)
    found = [rows[0].clone()]
    expert_rows.unpermute_kernel[3, 1](rows, place, tokens, 1, H=FAR, K=1, BLOCK=h)
    return errors([*found, tokens], [values[2].double(), torch.stack([0 * values[2], 0 * values[2], values[2]])])


def decode(n: int, g: int, q: int, d: int, size: int, longest: int, **more) -> list[float]:
    """Texts of random lengths, in blocks of a cache in random order; what is in no text is not a number."""
    draw = random.Random(n)
    blocks, of_texts = draw.sample(range(2 * n * longest // size), n * -(-longest // size)), []
    for length in (longest, 1, *(draw.randint(1, longest) for _ in range(n - 2))):
        own = [size * blocks.pop() for _ in range(-(-length // size))]
        of_texts.append(tuple(slice(start, start + min(size, length - size * k)) for k, start in enumerate(own)))
    used = torch.tensor([place for slices in of_texts for one in slices for place in range(one.start, one.stop)])
    stored = torch.full((2, 2 * n * longest, g, d), float("nan"))
    stored[:, used] = drawn(2, len(used), g, d)
    inputs = drawn(n, g, q, d, seed=1), *stored.unbind()
    places = Places(of_texts, size, torch.device("cpu"))
    found = probe.kernel("decode_attention")(*inputs, places, scale=0.4, **more)
    return errors([found], [reference.decode_attention(*(x.double() for x in inputs), places, scale=0.4, **more)])


def generation(**settings) -> list[float]:
    """Log-probabilities of texts that an engine continues together: by the kernel, and by the reference."""
    sizes = dict(num_layers=2, hidden_size=24, num_attention_heads=2, seq_length=40, hidden_dropout=0.0)
    model = GPT(Model(**{**sizes, "attention_dropout": 0.0, **settings}), Mesh(), 60).eval()
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        with torch.no_grad():  # large, so that scores differ
            parameter.mul_(8.0 if parameter.dim() > 1 else 1.0)
    found = []
    for run in (noted("decode_attention"), reference.decode_attention):
        used = TABLE["decode_attention"]
        TABLE["decode_attention"] = [replace(used[-1], run=run, backend="")]
        engine, scores = Engine(model, longest=40, block_size=4), []
        for length in (1, 20, 9):
            engine.add(Request(tuple(range(5, 5 + length)), Sampling(6), logprobs=0))
        while engine.busy:
            scores += [output.new.logprob for output in engine.step()]
        found.append(torch.tensor(scores))
        TABLE["decode_attention"] = used
    return errors([found[0]], [found[1]])


def casts(n: int, k: int, dtype: torch.dtype, tile: fp8.ScaleTile, kind: torch.dtype) -> list[float]:
    """Shares of fp8 numbers and scales that are not the reference's to the bit: rows, columns, both, and turned rows; with
    numbers of forty powers of two, a tile of zeros, inf, NaN and subnormal ones.
    """
    x = drawn(n, k) * torch.logspace(-6, 3, n)[:, None]
    x[0, :128] = 0
    if n > 64 and tile != fp8.WHOLE:
        x[5, 3], x[n - 9, k - 1], x[9, 9], x[10] = math.inf, math.nan, 1e30, 1e-38
    x = x.to(dtype)
    amax = None if tile != fp8.WHOLE else 2 * fp8.amax_of(x)
    pairs = [
        (of(x, tile, kind, amax, rows, columns) for of in (probe.kernel("fp8_cast"), fp8.fp8_cast))
        for rows, columns in ((True, False), (False, True), (True, True))[: 1 if tile == fp8.ROWS else 3]
    ]
    if tile.rows <= 1 and tile != fp8.ROWS:  # weights are not turned
        rows = fp8.fp8_cast(x, tile, kind, amax)
        pairs.append(of(rows, tile) for of in (probe.kernel("fp8_turn"), fp8.fp8_turn))
    return [unequal(*both) for pair in pairs for both in zip(*pair, strict=True)]


def unequal(found: torch.Tensor, wanted: torch.Tensor) -> float:
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    either = found.float().isnan() & wanted.float().isnan()
    bits = [one.contiguous().view(torch.uint8 if one.itemsize == 1 else torch.int32) for one in (found, wanted)]
    return ((bits[0] != bits[1]) & ~either).float().mean().item()


def in_fp8(recipe: str) -> Callable[[GPT], None]:
    """Attaches products in fp8 to the linear layers of a network."""
    names = [(f"{name}", "fp8") for name in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")]
    settings = Precision(fp8_format="hybrid", fp8_recipe=recipe)
    return lambda model: attach_products(model.blocks, settings, dict(fp8=PRODUCTS[recipe]), lambda layer: names)


def network(attach: Callable[[GPT], None] = lambda model: None, **settings) -> list[float]:
    """Loss and all gradients of a network: by the kernels, and by the reference."""
    sizes = dict(num_layers=2, hidden_size=24, num_attention_heads=2, seq_length=10, hidden_dropout=0.2)
    tokens = torch.randint(0, 60, (11, 2), generator=torch.Generator().manual_seed(4))
    batch = MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2))
    model = GPT(Model(**{**sizes, "attention_dropout": 0.0, **settings}), Mesh(), 60)
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        with torch.no_grad():  # no bias is 0
            parameter.add_(0.05 * drawn(*parameter.shape, seed=len(name)))
    attach(model)
    found = []
    for lacking in ("left out", ""):
        used = {op: [*entries] for op, entries in TABLE.items()}
        for op, entries in TABLE.items():
            if entries[0].name == TRITON:
                here = replace(entries[0], lacking=lacking, suits=lambda case: True, probe=lambda: "", run=noted(op))
                TABLE[op] = [here, *entries[1:]]
        for product in linear_products([model]):
            product.weights_changed()  # weights are cast anew
        loss = model(None, batch)[1]["lm loss"]
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        TABLE.update(used)
    return errors(found[1], found[0])


USED: set[str] = set()


def noted(op: str) -> Callable:
    run = probe.kernel(op)
    return lambda *args, **kwargs: USED.add(op) or run(*args, **kwargs)


LLAMA = dict(
    hidden_dropout=0.0, swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True
)
EXPERTS = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16)
CASES = {
    **{f"{op} {h}": lambda op=op, h=h: norm(op, 5, 3, h) for op in ("layer_norm", "rms_norm") for h in (64, 100)},
    **{f"{op} of wide rows": lambda op=op: norm(op, 7, 1, 8200) for op in ("add_layer_norm", "add_rms_norm")},
    **{f"{op} 33": lambda op=op: norm(op, 70, 2, 33) for op in ("add_layer_norm", "add_rms_norm")},
    "layer_norm, epsilon as large as the variance": lambda: norm("layer_norm", 6, 40, size=0.1, epsilon=1e-2),
    "rms_norm, epsilon as large as the mean": lambda: norm("rms_norm", 6, 40, size=0.1, epsilon=1e-2),
    "rms_norm of parts of rows": parts_of_rows,
    "bias_gelu": lambda: compared("bias_gelu", [drawn(23, 3, 1100) * 2, drawn(1100, seed=1)]),
    "swiglu": lambda: compared("swiglu", [drawn(7, 3, 2 * 1030) * 2]),
    "rotate all channels": lambda: rotate(24, 24),
    "rotate some channels": lambda: rotate(20, 6, b=3),
    "rotate by positions of each sample": lambda: rotate(16, 8, own=True),
    "words": lambda: words(8200),
    "words, not a multiple of 8": lambda: words(1001),
    "dropout_add": lambda: dropout_add(100, -20000),
    "dropout_add of wide rows": lambda: dropout_add(4500, 20000),
    "cross_entropy": lambda: cross_entropy(5, 50, 1, 50),
    "cross_entropy of a padded vocabulary": lambda: cross_entropy(5, 50, 1, 33),
    "cross_entropy of wide rows, in place": lambda: cross_entropy(3, 20000, 1, 16500, in_place=True),
    "cross_entropy in 2 shards": lambda: cross_entropy(5, 64, 2, 60, in_place=True),
    "cross_entropy in 4 shards, one of them padding": lambda: cross_entropy(5, 64, 4, 45),
    "cross_entropy, smoothed, capped, with z-loss, in 4 shards": lambda: cross_entropy(
        5, 64, 4, 45, label=0.9, everywhere=0.1 / 45, softcap=4.0, z_loss=0.1
    ),
    "cross_entropy of far rows": far_rows,
    "permute and unpermute of far tokens": far_tokens,
    **{
        f"fp8 {name}, {n} x {k}": lambda tile=tile, n=n, k=k, of=of, kind=kind: casts(n, k, of, tile, kind)
        for name, tile, kind in (
            ("blocks", fp8.BLOCKS, fp8.E4M3),
            ("gradients in blocks", fp8.BLOCKS, fp8.E5M2),
            ("mx", fp8.MX, fp8.E4M3),
            ("tensors", fp8.WHOLE, fp8.E5M2),
            ("rows", fp8.ROWS, fp8.E4M3),
        )
        for n, k, of in ((150, 256, torch.bfloat16), (1, 128, torch.float32), (257, 128, torch.float32))
    },
    "fp8 squares": lambda: casts(256, 384, torch.bfloat16, fp8.SQUARES, fp8.E4M3),
    "fp8 mx, odd blocks": lambda: casts(40, 160, torch.bfloat16, fp8.MX, fp8.E4M3),
    "fp8 tensors, odd blocks": lambda: casts(40, 144, torch.float32, fp8.WHOLE, fp8.E4M3),
    **{
        f"GPT in fp8, {recipe}": lambda recipe=recipe: network(
            in_fp8(recipe), hidden_size=128, num_layers=1, hidden_dropout=0.0
        )
        for recipe in PRODUCTS
    },
    "permute": lambda: permute(9, 3, 100),
    "permute, dropped pairs and empty rows": lambda: permute(9, 3, 33, rows=40, dropped=5),
    "permute of wide rows, of one expert": lambda: permute(5, 1, 2100),
    "permute of nothing": lambda: permute(0, 1, 16),
    "permute, no row": lambda: permute(3, 2, 16, rows=0, dropped=6),
    "permute of pairs without a row": after_the_rows,
    "unpermute": lambda: unpermute(9, 3, 100),
    "unpermute, dropped pairs and empty rows": lambda: unpermute(9, 3, 33, rows=40, dropped=5),
    "unpermute of wide rows, of one expert": lambda: unpermute(5, 1, 2100),
    "unpermute of nothing": lambda: unpermute(0, 2, 16),
    "permute and unpermute, to the bit": lambda: unequal_bits(100, torch.float32),
    "permute and unpermute, with drops, to the bit": lambda: unequal_bits(70, torch.float32, 20, 3),
    "permute and unpermute in bf16, to the bit": lambda: unequal_bits(100, torch.bfloat16, 20, 3),
    "decode_attention": lambda: decode(3, 2, 1, 64, 16, 150),
    "decode_attention in parts": lambda: decode(4, 2, 3, 20, 16, 600),
    "decode_attention in a window": lambda: decode(3, 1, 2, 16, 8, 700, window=300),
    "decode_attention with sinks": lambda: decode(3, 2, 3, 20, 16, 600, sinks=drawn(2, 3, seed=2)),
    "decode_attention with sinks, in a window": lambda: decode(
        3, 1, 2, 16, 8, 700, window=100, sinks=3 * drawn(1, 2, seed=2)
    ),
    "decode_attention, capped, many queries": lambda: decode(3, 2, 17, 24, 4, 90, softcap=0.5, window=6),
    "generation": lambda: generation(num_query_groups=1, group_query_attention=True),
    "GPT": lambda: network(),
    "GPT without dropout": lambda: network(hidden_dropout=0.0),
    "Llama": lambda: network(**LLAMA),
    "mixture": lambda: network(**EXPERTS),
    "mixture with padded experts": lambda: network(
        **EXPERTS, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
    ),
}


def main() -> None:
    torch.set_num_threads(1)
    found = {name: CASES[name]() for name in sys.argv[1:] or CASES}
    found = {name: [x if math.isfinite(x) else 1e9 for x in told] for name, told in found.items()}
    print(json.dumps(dict(errors=found, used=sorted(USED))))


if __name__ == "__main__":
    main()
