# SPDX-License-Identifier: Apache-2.0
"""Probes: check on a small case of each op, forward and backward, that a kernel gives the result of `reference.py`.

A probe runs when its op is first used on CUDA, once per process. It compiles the kernel, which takes about a second (or
no time if Triton's disk cache has it). Its result decides whether the kernel is used, and is reported by `doctor` and in
the first lines of a run.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from megatron.fused_kernels import attention, fla, fp8, reference, scaled_mm
from megatron.fused_kernels.decode_attention import Places
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.fp8 import BLOCKS, E4M3, E5M2, MX, ROWS, SQUARES, WHOLE

MODULES = dict(
    layer_norm="norms",
    rms_norm="norms",
    add_layer_norm="norms",
    add_rms_norm="norms",
    bias_gelu="activations",
    swiglu="activations",
    rotate="rotary",
    dropout_add="dropout",
    permute="expert_rows",
    unpermute="expert_rows",
    cross_entropy="cross_entropy",
    decode_attention="decode_attention",
    fp8_cast="fp8_casts",
    fp8_turn="fp8_casts",
)
SCALED = "fp8_tensorwise fp8_blockwise fp8_blockwise_square fp8_mxfp8 fp8_grouped".split()
OF_PACKAGES = {  # ops whose probe tries a kernel of torch or fla, which differs between releases and devices
    "delta_rule": fla.delta_rule,
    "attention": attention.varlen,
    **{op: getattr(scaled_mm, op) for op in SCALED},
}
TOLERANCE = 2e-2  # relative to the norm of a tensor: both sides round to bf16
NO_VALUES = "tensors have no values here"
RESULTS: dict[str, str] = {}  # of this process's probes, for layers that are compiled later


def kernel(op: str) -> Callable:
    """The Triton kernel of an op; its module, and triton, is imported at the first call."""

    def run(*args, **kwargs):
        return getattr(import_module(f"megatron.fused_kernels.gpu.{MODULES[op]}"), op)(*args, **kwargs)

    return run


def probe(op: str) -> str:
    """Why an op's kernel in Triton, or that of a package, cannot be used on the CUDA device; "" if it can."""
    if torch.compiler.is_compiling():
        return RESULTS.get(op, "it was not probed before it was compiled")  # tracing cannot run a probe
    if any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack()):
        return NO_VALUES  # in dry runs of a model; not cached
    RESULTS[op] = _probe(op)
    return RESULTS[op]


@cache
def _probe(op: str) -> str:
    # Hides its tensors from recomputation, which counts saved ones
    apart = saved_tensors_hooks(lambda x: x, lambda x: x)
    uncast = torch._C.DisableTorchFunction()  # disables `Autocast`
    try:
        with torch.inference_mode(False), torch.enable_grad(), apart, uncast:
            wrong = compare(op, OF_PACKAGES.get(op) or kernel(op), "cuda", torch.bfloat16)
    except Exception as error:  # of the compiler, the driver or the device: any of them selects torch's ops
        return f"the probe failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"the probe found {wrong}" if wrong else ""


def compare(op: str, run: Callable, device: str, dtype: torch.dtype, tolerance: float = TOLERANCE) -> str:
    """The differences of `run` from the reference in fp32 on a small case, values and gradients; "" if there are none."""
    inputs, call = CASES[op](device, dtype)
    mine = [x.detach().clone().requires_grad_() for x in inputs]
    exact = [x.detach().float().requires_grad_() for x in inputs]
    got, want = call(run, *mine), call(getattr(reference, op), *exact)
    upstream = [_drawn(x.shape, device, dtype, 90 + n) for n, x in enumerate(want)]
    if want[0].requires_grad:
        got = (*got, *torch.autograd.grad(got, mine, [x.to(y.dtype) for x, y in zip(upstream, got)]))
        want = (*want, *torch.autograd.grad(want, exact, [x.float() for x in upstream]))
    errors = [((x.float() - y).norm() / y.norm()).item() for x, y in zip(got, want)]
    return "" if all(error <= tolerance for error in errors) else f"relative errors {[f'{e:.1e}' for e in errors]}"


def _drawn(shape, device: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _tuple(function: Callable) -> Callable:
    return lambda run, *inputs: (function(run, *inputs),)


def _norm_case(branches: int, parameters: int) -> Callable:
    def case(device, dtype):
        shapes = [(6, 5, 96)] * (1 + branches) + [(96,)] * parameters
        call = lambda run, *inputs: run(*inputs, 1e-5)
        return [_drawn(x, device, dtype, n) for n, x in enumerate(shapes)], call if branches else _tuple(call)

    return case


def _rotate_case(device, dtype):
    angles = torch.arange(6.0, device=device).view(6, 1, 1, 1, 1) * torch.rand(8, device=device)
    angles = torch.cat((angles, angles), -1)
    call = lambda run, x: run(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype))
    return [_drawn((6, 2, 3, 2, 20), device, dtype, 0)], _tuple(call)


def _dropout_case(device, dtype):
    words = torch.arange(-32768, 32768, 109).short().to(device)[:600].view(2, 3, 100).movedim(0, 1)
    call = lambda run, x, residual: run(x, DropoutMask(words, -20000, 1.25), residual)
    return [_drawn((3, 2, 100), device, dtype, n) for n in range(2)], _tuple(call)


def _documents_case(device, dtype):
    """Queries that begin within a document and after one, with a window."""
    starts = np.array([[0] * 5 + [5] * 15, [0] * 12 + [12] * 7 + [19]])
    documents = Documents.of(starts, device, rows=(8, 20))
    call = lambda run, *inputs: run(*inputs, scale=0.3, causal=True, documents=documents, window=6)
    shapes = (12, 2, 2, 2, 16), (20, 2, 2, 16), (20, 2, 2, 16)
    return [_drawn(shape, device, dtype, n) for n, shape in enumerate(shapes)], _tuple(call)


def _decode_case(device, dtype):
    """Texts of 1 to 600 tokens in 16 blocks each or fewer, in any order, with a cap and a window."""
    draw, lengths = torch.Generator().manual_seed(3), (600, 1, 37, 300)
    blocks = iter(torch.randperm(80, generator=draw).tolist())
    of_texts = []
    for length in lengths:
        starts = [16 * next(blocks) for _ in range(-(-length // 16))]
        of_texts.append(tuple(slice(start, start + min(16, length - 16 * k)) for k, start in enumerate(starts)))
    places = Places(of_texts, 16, torch.device(device))
    call = lambda run, *x: run(*(one.detach() for one in x), places, scale=0.3, softcap=4.0, window=320)
    shapes = (4, 2, 3, 24), (1280, 2, 24), (1280, 2, 24)
    return [_drawn(shape, device, dtype, n) for n, shape in enumerate(shapes)], _tuple(call)


def experts_order(n: int, k: int, rows: int, dropped: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(order, place) of `reference.permute` for the pairs of n tokens, some of them dropped, in any of `rows` rows."""
    draw = torch.Generator().manual_seed(n)
    place = torch.randperm(rows, generator=draw)[: n * k]
    place = torch.nn.functional.pad(place, (0, n * k - len(place)), value=rows)  # more pairs than rows
    place[torch.randperm(n * k, generator=draw)[:dropped]] = rows
    order = torch.full((rows + 1,), n * k).scatter_(0, place, torch.arange(n * k))[:-1]
    return order.to(device), place.to(device)


def _permute_case(device, dtype):
    order, place = experts_order(9, 3, 30, 4, device)
    return [_drawn((9, 100), device, dtype, 0)], _tuple(lambda run, x: run(x, order, place, 3, False))


def _unpermute_case(device, dtype):
    order, place = experts_order(9, 3, 30, 4, device)
    return [_drawn((30, 100), device, dtype, 0)], _tuple(lambda run, y: run(y, order, place, 3, False))


def _cross_entropy_case(device, dtype):
    part, labels = reference.VocabularyPart(100, 290, 0.9, 1e-3, 30.0, 1e-3), torch.arange(95, 400, 61, device=device)

    def call(run, logits):
        gradient = torch.empty_like(logits)
        losses = run(logits.detach().clone(), labels, part, None, torch.ones(len(labels), device=device), gradient)
        return *losses, gradient

    return [_drawn((len(labels), 300), device, dtype, 0)], call


def _delta_case(device, dtype):
    """Keys of 64 and of 128 channels, documents, two value heads for a key."""
    starts = np.array([[0] * 40 + [40] * 60, [0] * 99 + [99]], np.int32)
    documents = Documents.of(starts, device)

    def call(run, *x):
        found = []
        for at, edges in ((0, None), (5, documents)):
            q, k, v, g, beta = x[at : at + 5]
            found.append(run(q, k, v, -g.float().exp(), beta.float().sigmoid(), documents=edges)[0])
        return tuple(found)

    rows = 100, 2, 1
    shapes = [(*rows, *own) for n in (64, 128) for own in ((n,), (n,), (2, n), (2,), (2,))]
    return [_drawn(shape, device, dtype, n) for n, shape in enumerate(shapes)], call


def _cast_case(device, dtype):
    """Rows and columns of blocks of 1 x 128 and 1 x 32, squares, and whole tensors, with a tile of zeros; a transpose."""

    def call(run, x):
        x = x.detach()
        x[3, :128] = 0
        tiles = (BLOCKS, E4M3), (MX, E5M2), (SQUARES, E4M3), (WHOLE, E4M3)
        found = [run(x, tile, kind, fp8.amax_of(x), columns=True) for tile, kind in tiles[3:]]
        found += [run(x, tile, kind, columns=True) for tile, kind in tiles[:3]] + [run(x, ROWS, E4M3)]
        return tuple(one.float() for cast in found for one in cast)

    return [_drawn((150, 256), device, dtype, 0)], call


def _turn_case(device, dtype):
    def call(run, x):
        casts = [(fp8.quantize(x.detach(), tile, E4M3), tile) for tile in (BLOCKS, MX, WHOLE)]
        return tuple(one.float() for cast in casts for one in run(*cast))

    return [_drawn((150, 256), device, dtype, 0)], call


def _product_case(tile: fp8.ScaleTile, of_b: fp8.ScaleTile) -> Callable:
    def call(run, a, b):
        casts = fp8.quantize(a.detach(), tile, E4M3), fp8.quantize(b.detach(), of_b, E4M3)
        return tuple(run(*casts, kind).float() for kind in (torch.bfloat16, torch.float32))

    return lambda device, dtype: ([_drawn((144, 640), device, dtype, 0), _drawn((256, 640), device, dtype, 1)], call)


def _grouped_case(device, dtype):
    """Three groups, of which one is empty."""

    def call(run, x, w):
        matrices = w.detach().view(3, -1, w.shape[1])
        rows, (values, scales) = fp8.quantize(x.detach(), ROWS, E4M3), fp8.quantize(matrices.flatten(0, 1), ROWS, E4M3)
        ends = torch.tensor([40, 40, len(x)], dtype=torch.int32, device=x.device)
        each = lambda x, w, _: torch.cat([a @ b.t() for a, b in zip(x.split([40, 0, len(x) - 40]), w, strict=True)])
        matrices = values.view(matrices.shape), scales.view(3, -1, 1)
        return (run(rows, matrices, ends, torch.bfloat16, each).float(),)

    return [_drawn((144, 256), device, dtype, 0), _drawn((3 * 128, 256), device, dtype, 1)], call


CASES = dict(
    delta_rule=_delta_case,
    fp8_cast=_cast_case,
    fp8_turn=_turn_case,
    fp8_tensorwise=_product_case(WHOLE, WHOLE),
    fp8_blockwise=_product_case(BLOCKS, BLOCKS),
    fp8_blockwise_square=_product_case(BLOCKS, SQUARES),
    fp8_mxfp8=_product_case(MX, MX),
    fp8_grouped=_grouped_case,
    layer_norm=_norm_case(0, 2),
    rms_norm=_norm_case(0, 1),
    add_layer_norm=_norm_case(1, 2),
    add_rms_norm=_norm_case(1, 1),
    bias_gelu=lambda device, dtype: (
        [_drawn((7, 3, 100), device, dtype, 0), _drawn((100,), device, dtype, 1)],
        _tuple(lambda run, x, bias: run(x, bias)),
    ),
    swiglu=lambda device, dtype: ([_drawn((7, 3, 200), device, dtype, 0)], _tuple(lambda run, x: run(x))),
    rotate=_rotate_case,
    dropout_add=_dropout_case,
    permute=_permute_case,
    unpermute=_unpermute_case,
    cross_entropy=_cross_entropy_case,
    attention=_documents_case,
    decode_attention=_decode_case,
)
