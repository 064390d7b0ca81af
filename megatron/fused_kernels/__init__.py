# SPDX-License-Identifier: Apache-2.0
"""The table of ops with several implementations, with the requirements of each, and the choice between them.

`reference.py` defines every op in plain PyTorch. The table lists faster implementations, best first; `choose_kernel` takes
the first one that is available on this machine and covers the case. `python -m megatron.tools.doctor` prints the table.

    >>> choose_kernel("attention", Case(device="cpu", dtype=torch.bfloat16, queries=256, keys=256, causal=True)).name
    'block-causal'
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Optional

import torch

from megatron.fused_kernels import (
    activations,
    attention,
    cpu_ops,
    decode_attention,
    expert_rows,
    explicit_attention,
    fla,
    norms,
    partial_attention,
    reference,
    scaled_mm,
)
from megatron.fused_kernels.gpu.probe import kernel, probe


@dataclass(frozen=True)
class Case:
    """The properties of a call that decide which implementations can run it; device and dtype for ops other than attention.

    causal:  no query sees a later key; the queries are the last tokens
    masked:  there is a mask of all pairs; in a causal case it removes pairs in addition to the order
    documents: in a causal case: documents are packed into samples, and a query sees only keys of its own document
    grouped: several queries share a key and a value
    scaled_softmax: scores that fit fp16 only if they are divided before and multiplied after
    softcap: scores are capped by a tanh
    window:  number of keys before its own that a query sees; None: all
    unfused: only torch's ops, as a --no-*-fusion flag requests
    head_dim: channels of a head; 0: no more than any kernel supports
    biased:  a learned bias is added to scores, such as relative positions
    padded:  some keys are padding, the same ones for all queries of a sample
    packed:  in a non-causal case: samples of several lengths follow each other in one row; queries and keys are
             those of the longest
    sinks:   each head has a logit without a value in its softmax (--softmax-type)
    """

    device: str
    dtype: torch.dtype
    queries: int = 0
    keys: int = 0
    causal: bool = False
    masked: bool = False
    dropout: bool = False
    grouped: bool = False
    scaled_softmax: bool = False
    softcap: bool = False
    window: Optional[int] = None
    unfused: bool = False
    documents: bool = False
    head_dim: int = 0
    biased: bool = False
    padded: bool = False
    packed: bool = False
    sinks: bool = False

    @property
    def reach(self) -> int:
        """The largest number of keys that a query sees."""
        return self.keys if self.window is None else min(self.keys, self.window + 1)

    @property
    def features(self) -> frozenset[str]:
        """The features that an implementation must cover, as in `EVERYTHING`."""
        if self.causal:
            order = "causal" if self.queries == self.keys > 1 else "cached"
        else:
            order = "bidirectional" if self.queries == self.keys else "cross"
        extras = [extra for extra in EXTRAS if getattr(self, extra)]
        return frozenset([order, *extras, *(["window"] if self.window is not None else [])])


# Which queries see which keys: "causal": causal order over whole sequences; "cached": of the last tokens over all of them
# (new tokens over a cache, a chunk of a sequence under context parallelism); "bidirectional" and "cross": non-causal, with
# equal or different numbers of queries and keys. EXTRAS can be added to each.
EXTRAS = tuple("masked documents dropout grouped scaled_softmax softcap unfused biased padded packed sinks".split())
EVERYTHING = frozenset({*"causal cached bidirectional cross window".split(), *EXTRAS})
FUSED = EVERYTHING - {"unfused"}


@dataclass(frozen=True)
class Implementation:
    """An implementation of an op.

    run:      the function; its counterpart in `reference` documents the arguments
    worth:    its benefit, for `doctor`
    suits:    whether it runs, and is worth running, on a device, in a format and at a size
    lacking:  why it cannot run on this machine ("" if it can)
    probe:    the same, from a trial run; called last, if all else fits
    backend:  the value of --attention-backend that selects it
    covers:   the supported features of a case; results for others would be wrong
    """

    name: str
    run: Callable
    worth: str
    suits: Callable[[Case], bool] = lambda case: True
    lacking: str = ""
    backend: str = ""
    covers: frozenset[str] = EVERYTHING
    probe: Callable[[], str] = lambda: ""

    def fits(self, case: Case) -> bool:
        """Whether `choose_kernel` may select it."""
        if self.lacking or not self.suits(case):
            return False
        return (self.covers is EVERYTHING or case.features <= self.covers) and not self.probe()


def choose_kernel(op: str, case: Case, backend: str = "auto") -> Implementation:
    """The best implementation of `op` for `case`; a `backend` other than auto is preferred if it covers the case."""
    fitting = (entry for entry in TABLE[op] if entry.fits(case))
    if backend == "auto":
        return next(fitting)
    fitting = list(fitting)
    return next((entry for entry in fitting if entry.backend == backend), fitting[0])


def run_probes(op: str) -> None:
    """Run the probes of all kernels of an op, before layers that choose among them are compiled."""
    for entry in TABLE[op]:
        if not entry.lacking:
            entry.probe()


def _package(name: str, cuda: str, called: str = "") -> str:
    """Why a package cannot be used. called: its name on PyPI, if it is another one"""
    called = called or name.replace("_", "-")
    return cuda or ("" if importlib.util.find_spec(name) else f"the package {called} is not installed")


def _flash_attn(*orders: str) -> frozenset[str]:
    """The features of the flash-attn package, including these orders: windows since 2.3, soft caps since 2.6."""
    try:
        release = tuple(int(part) for part in version("flash_attn").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        release = (0, 0)
    newer = {"window": (2, 3), "softcap": (2, 6)}
    return frozenset({*orders, "grouped", "unfused"} | {ask for ask, of in newer.items() if release >= of})


def describe_kernels(device: str, dtype: torch.dtype, fp8_recipe: Optional[str] = None) -> list[str]:
    """The log line with the Triton kernels of a run and its products in fp8, and why others are not used; none on a CPU."""
    if device != "cuda":
        return []
    case, used, others = Case(device, dtype), {}, {}
    for op, entries in TABLE.items():
        if op.startswith("fp8_") and (not fp8_recipe or op not in OF_ANY_RECIPE and fp8_recipe not in op):
            continue
        for entry in entries:
            if entry.name in (TRITON, SCALED_MM):
                why = entry.lacking or ("" if entry.suits(case) else f"not for {dtype}") or entry.probe()
                (others.setdefault(why, []) if why else used.setdefault(entry.name, [])).append(op)
    words = [f"{', '.join(ops)} {'in' if name == TRITON else 'by'} {name}" for name, ops in used.items()]
    words += [f"{', '.join(ops)} by torch, because {why}" for why, ops in others.items()]
    return ["kernels: " + "; ".join(words)]


def describe_document_kernel(case: Case, backend: str) -> list[str]:
    """The log line with the attention kernel for documents, and why it is not a specialized one; none on a CPU."""
    if case.device != "cuda":
        return []
    chosen = choose_kernel("attention", case, backend)
    line = f"kernels: attention of documents by {chosen.name}"
    [varlen] = [entry for entry in TABLE["attention"] if entry.name == VARLEN]
    if chosen.name in (VARLEN, FLASH_VARLEN):
        return [line]
    lacks = ", ".join(sorted(case.features - varlen.covers))
    unsuited = "" if varlen.suits(case) else f"not for {case.dtype} with {case.head_dim} channels a head"
    why = (
        lacks and f"it has no {lacks}" or unsuited or varlen.lacking or varlen.probe() or "--attention-backend sets it"
    )
    pairs = ", with a mask of all pairs" if chosen is TABLE["attention"][-1] else ""
    return [f"{line}{pairs}, not by {varlen.name}: {why}"]


def _eager(case: Case, device: str = "cuda") -> bool:
    """On `device`, outside torch.compile, which makes its own kernels, and modes like `Autocast`, which need torch's."""
    formats = (torch.float32, torch.bfloat16, torch.float16)
    if case.device != device or case.dtype not in formats or torch.compiler.is_compiling():
        return False
    return not torch._C._is_torch_function_mode_enabled()


TRITON = "Triton"
SCALED_MM = "scaled_mm"
OF_ANY_RECIPE = ("fp8_cast", "fp8_turn", "fp8_grouped")
VARLEN, FLASH_VARLEN = "varlen (CUDA)", "flash-attn varlen"  # specialized for documents


def _in_triton(op: str, worth: str) -> Implementation:
    """The row of a kernel in `gpu/`. `worth` counts passes over memory; docs/proof/gpus.md has measured times."""
    lacking = _package("triton", NO_CUDA)
    suits = lambda case: _eager(case) and case.head_dim <= 256  # only of attention
    return Implementation(TRITON, kernel(op), worth, suits, lacking, covers=FUSED, probe=partial(probe, op))


def _on(device: str, *dtypes: torch.dtype) -> Callable[[Case], bool]:
    return lambda case: case.device == device and (not dtypes or case.dtype in dtypes)


def _scaled_mm(op: str, worth: str) -> list[Implementation]:
    """The rows of a product of fp8 numbers."""
    lacking = NO_CUDA or scaled_mm.LACKING
    fast = Implementation(SCALED_MM, getattr(scaled_mm, op), worth, _eager, lacking, probe=partial(probe, op))
    return [fast, Implementation("torch", getattr(reference, op), "the same sums, of numbers turned into fp32")]


def _in_fla(case: Case) -> bool:
    """Of keys that its kernels were made for."""
    return _eager(case) and _HALF_ON_CUDA(case) and case.head_dim in (64, 128, 256)


def _many(case: Case) -> bool:
    """False for the single new token of generation with a cache, where the reference is as fast."""
    return "cached" not in case.features or case.queries > 1


def _documents_on_cuda(case: Case) -> bool:
    """In a format and width that flash attention supports."""
    return case.documents and _HALF_ON_CUDA(case) and case.head_dim <= 256


_HALF_ON_CUDA = _on("cuda", torch.bfloat16, torch.float16)
NO_CUDA = "" if torch.cuda.is_available() else "no CUDA device"
EXPLICIT_KEYS = 4096  # with more keys the stored weights of explicit attention cost more memory than they save time

TABLE: dict[str, list[Implementation]] = {
    "attention": [
        Implementation(
            "one query",
            attention.one_query,
            "for a new token in generation on CPUs, in fp32, 1.3 x as fast as the reference",
            lambda case: case.queries == 1 and _on("cpu", torch.float32)(case) and not torch.is_grad_enabled(),
            covers=frozenset({"cached", "grouped", "window"}),
        ),
        Implementation(
            "flash-attn",
            attention.flash_attn,
            "the fastest attention on many NVIDIA GPUs",
            lambda case: _HALF_ON_CUDA(case) and not torch.are_deterministic_algorithms_enabled(),  # backward: atomics
            _package("flash_attn", NO_CUDA),
            "flash",
            _flash_attn("causal", "bidirectional", "cross"),
        ),
        Implementation(
            FLASH_VARLEN,
            attention.flash_attn_varlen,
            "the same for documents: work and memory only within each",
            lambda case: _documents_on_cuda(case) and not torch.are_deterministic_algorithms_enabled(),
            _package("flash_attn", NO_CUDA),
            "flash",
            _flash_attn("causal", "cached", "documents"),
        ),
        Implementation(
            VARLEN,
            attention.varlen,
            "torch's flash attention of documents: work and memory only within each",
            _documents_on_cuda,
            NO_CUDA
            or ("" if importlib.util.find_spec("torch.nn.attention.varlen") else "this torch has no varlen_attn"),
            "sdpa",
            frozenset({"causal", "cached", "documents", "grouped", "scaled_softmax", "window", "unfused"}),
            partial(probe, "attention"),
        ),
        Implementation(  # keeps scores in fp32, as flash-attn does and scaled_softmax needs
            "sdpa (CUDA)",
            attention.sdpa,
            "torch's flash, cuDNN or memory-efficient attention: no stored scores; a call for each document",
            _on("cuda"),
            NO_CUDA,
            "sdpa",
            EVERYTHING - {"dropout", "softcap", "packed", "sinks"},
        ),
        Implementation(
            "flash with sinks (CUDA)",
            partial_attention.flash_with_sinks,
            "torch's flash attention, whose results are scaled by the share of the keys in the softmax",
            lambda case: case.sinks and _HALF_ON_CUDA(case) and case.head_dim <= 256,
            NO_CUDA,
            "sdpa",
            frozenset({"causal", "cached", "documents", "grouped", "scaled_softmax", "window", "unfused", "sinks"}),
        ),
        Implementation(
            "block-causal",
            explicit_attention.in_blocks,
            "on CPUs 2.7 x as fast as sdpa in bf16, 1.2 x in fp32; covers dropout and caps; skips keys outside the window "
            "and documents before a block's",
            lambda case: (
                _many(case) and (case.device != "cpu" or case.dropout or case.softcap or case.reach <= EXPLICIT_KEYS)
            ),
            "",
            "explicit",
            EVERYTHING - {"bidirectional", "cross", "scaled_softmax", "unfused", "packed"},
        ),
        Implementation(
            "block-full",
            explicit_attention.in_blocks,
            "non-causal attention, of one sequence or over another: as fast as block-causal on CPUs; covers dropout, caps, "
            "and samples of several lengths in one row",
            lambda case: (
                _many(case) and (case.device != "cpu" or case.dropout or case.softcap or case.keys <= EXPLICIT_KEYS)
            ),
            "",
            "explicit",
            EVERYTHING - {"causal", "cached", "documents", "window", "scaled_softmax", "unfused", "sinks"},
        ),
        Implementation(
            "sdpa (CPU)",
            attention.sdpa,
            "long sequences without stored scores, a call for each document; non-causal attention",
            lambda case: _on("cpu")(case) and _many(case),
            "",
            "sdpa",
            EVERYTHING - {"dropout", "scaled_softmax", "softcap", "packed", "sinks"},
        ),
        Implementation(
            "flash with sinks (CPU)",
            partial_attention.flash_with_sinks,
            "the same on CPUs; windows and documents are masks",
            lambda case: case.sinks and _on("cpu")(case) and _many(case),
            "",
            "sdpa",
            frozenset({"causal", "cached", "documents", "grouped", "window", "unfused", "sinks"}),
        ),
        Implementation(
            "reference",
            reference.attention,
            "covers everything: caches, scaled scores in fp16; stores all scores, documents by a mask of all pairs",
            backend="explicit",
        ),
    ],
    "decode_attention": [
        _in_triton("decode_attention", "a call for all texts, over blocks in any order; copies no keys"),
        Implementation(
            "pairs",
            decode_attention.on_cpu,
            "the newest tokens of all texts in one call, on CPUs: up to 1.4 x as fast as text by text",
            lambda case: _on("cpu", torch.float32)(case) and _eager(case, "cpu"),
            covers=frozenset({"cached", "grouped", "softcap", "window", "sinks"}),
        ),
        Implementation("reference", reference.decode_attention, "text by text, as prompts", backend="explicit"),
    ],
    "partial_attention": [  # classes with the passes of a part
        Implementation(
            "flash (CUDA)",
            partial_attention.FlashOnCUDA,
            "torch's flash attention of a part of the keys, for rings of ranks",
            lambda case: _HALF_ON_CUDA(case) and case.head_dim <= 256,
            NO_CUDA,
            "sdpa",
            frozenset({"causal", "documents", "grouped", "scaled_softmax", "window", "unfused", "sinks"}),
        ),
        Implementation(
            "flash (CPU)",
            partial_attention.FlashOnCPU,
            "the same on CPUs; windows and documents are masks",
            _on("cpu"),
            "",
            "sdpa",
            frozenset({"causal", "documents", "grouped", "window", "unfused", "sinks"}),
        ),
        Implementation(
            "explicit",
            reference.partial_attention,
            "covers everything, such as dropout and caps; stores the scores of a block of queries",
            backend="explicit",
        ),
    ],
    "matmul": [
        Implementation(
            "oneDNN in fp32",
            cpu_ops.onednn,
            "about 2 x as fast as MKL on AMD CPUs",
            lambda case: _on("cpu", torch.float32)(case) and not torch.compiler.is_compiling(),  # its own products
            "" if torch.float32 in cpu_ops.FORMATS else "this build of torch has no oneDNN linear op",
        ),
        Implementation(
            "widened to fp32",
            cpu_ops.widened,
            "for formats without instructions of this CPU, 4 to 70 x as fast as torch's loops",
            lambda case: cpu_ops.widens(case.device, case.dtype),
        ),
        Implementation("torch", reference.matmul, "cuBLAS on GPUs; on CPUs oneDNN in bf16, MKL in fp32"),
    ],
    "layer_norm": [
        _in_triton("layer_norm", "statistics and result in one pass; the backward pass in one, with the weights' sums"),
        Implementation("apex", norms.apex_layer_norm, "a fused backward pass", _on("cuda"), _package("apex", NO_CUDA)),
        Implementation(
            "sums as products",
            norms.exact_layer_norm,
            "gradients of weights that are exact in bf16, too",
            lambda case: case.device == "cpu" and case.dtype != torch.float32 and not torch.compiler.is_compiling(),
        ),
        Implementation("torch", reference.layer_norm, "torch's own kernel"),
    ],
    "rms_norm": [
        _in_triton("rms_norm", "statistics and result in one pass; the backward pass in one, with the weight's sum"),
        Implementation(
            "sums as products",
            norms.rms_norm,
            "a backward pass on CPUs 2.5 x as fast as torch's",
            lambda case: case.device == "cpu" and not torch.compiler.is_compiling(),
        ),
        Implementation("torch", reference.rms_norm, "torch's own kernel"),
    ],
    "add_layer_norm": [
        _in_triton("add_layer_norm", "the sum is not read again; its gradients are added in the norm's backward pass"),
        Implementation("torch", reference.add_layer_norm, "the addition, then the best layer_norm"),
    ],
    "add_rms_norm": [
        _in_triton("add_rms_norm", "the sum is not read again; its gradients are added in the norm's backward pass"),
        Implementation("torch", reference.add_rms_norm, "the addition, then the best rms_norm"),
    ],
    "dropout_add": [
        _in_triton("dropout_add", "words, mask, scale and addition in one pass"),
        Implementation("torch", reference.dropout_add, "a mask from the words, the product, the addition"),
    ],
    "bias_gelu": [
        _in_triton("bias_gelu", "one pass; the bias's gradient comes with that of the input"),
        Implementation("torch", reference.bias_gelu, "the product adds the bias by itself, then torch's GELU"),
    ],
    "gelu": [
        Implementation(
            "sigmoid",
            cpu_ops.gelu,
            "on CPUs the tanh form is 1.8 x as fast as torch's",
            lambda case: _eager(case, "cpu"),
        ),
        Implementation("torch", reference.gelu, "torch's GELU"),
    ],
    "swiglu": [
        _in_triton("swiglu", "one pass, and a third less kept for the backward pass"),
        Implementation("torch", reference.swiglu, "torch's SiLU, then the product with the values"),
    ],
    "geglu": [
        Implementation(
            "one buffer",
            cpu_ops.geglu,
            "on CPUs gradients of gates and values are written where the product needs them",
            lambda case: case.device == "cpu" and not torch.compiler.is_compiling(),
            covers=FUSED,
        ),
        Implementation("torch", reference.geglu, "torch's GELU, then the product with the values"),
    ],
    "sigmoid_glu": [
        Implementation(
            "one buffer",
            activations.sigmoid_glu,
            "keeps its input alone for the backward pass",
            lambda case: not torch.compiler.is_compiling(),
            covers=FUSED,
        ),
        Implementation("torch", reference.sigmoid_glu, "sigmoid, clamps and products, one after the other"),
    ],
    "rotate": [
        _in_triton("rotate", "one pass, from where the product left queries and keys"),
        Implementation("torch", reference.rotate, "halves, products and a sum, one after the other"),
    ],
    "permute": [
        _in_triton("permute", "a token is read once for all of its experts, and its gradient is written once"),
        Implementation("bags", cpu_ops.permute, "the gradient is one op", _on("cpu")),
        Implementation("gathers", expert_rows.permute, "gathers in the backward pass, too: no atomic additions"),
        Implementation("torch", reference.permute, "indexing, whose backward pass adds row by row"),
    ],
    "unpermute": [
        _in_triton("unpermute", "a row is read once, and no rows in fp32"),
        Implementation("bags", cpu_ops.unpermute, "one op", _on("cpu")),
        Implementation("gathers", expert_rows.unpermute, "a gather and an addition for each expert of a token"),
        Implementation("torch", reference.unpermute, "all rows of a token at once, then their sum"),
    ],
    "cross_entropy": [
        _in_triton("cross_entropy", "logits are read twice and gradients written once, none of them in fp32"),
        Implementation("torch", reference.cross_entropy, "torch's softmax, in fp32, a chunk of tokens at a time"),
    ],
    "delta_rule": [
        Implementation(
            "fla",
            fla.delta_rule,
            "a chunk's products and its triangular system in Triton",
            _in_fla,
            _package("fla", NO_CUDA, "fla-core"),
            probe=partial(probe, "delta_rule"),
        ),
        Implementation("torch", reference.delta_rule, "a chunk of tokens at a time, in fp32"),
    ],
    "fp8_cast": [
        _in_triton("fp8_cast", "numbers are read once, for rows, columns and scales"),
        Implementation("torch", reference.fp8_cast, "largest numbers, division and cast, one after the other"),
    ],
    "fp8_turn": [
        _in_triton("fp8_turn", "bytes are read and written, no numbers of fp32"),
        Implementation("torch", reference.fp8_turn, "numbers turned into fp32, and cast again"),
    ],
    "fp8_tensorwise": _scaled_mm("fp8_tensorwise", "tensor cores of sm_89 and later ones"),
    "fp8_blockwise": _scaled_mm("fp8_blockwise", "tensor cores of sm_90, with cuBLASLt 12.9"),
    "fp8_blockwise_square": _scaled_mm("fp8_blockwise_square", "the same, times a weight"),
    "fp8_mxfp8": _scaled_mm("fp8_mxfp8", "tensor cores of sm_100"),
    "fp8_grouped": _scaled_mm(
        "fp8_grouped", "tensor cores of sm_90 and sm_100: of rows, times the matrices of experts"
    ),
}
