# SPDX-License-Identifier: Apache-2.0
"""One table of the ops that have several implementations, what each needs, and how one is picked.

`reference.py` defines every op in plain PyTorch. The table lists faster implementations, best first; `choose_kernel` takes
the first one that this machine has and that covers the case at hand. `python -m megatron.tools.doctor` prints the table.

    >>> choose_kernel("attention", Case(device="cpu", dtype=torch.bfloat16, queries=256, keys=256, causal=True)).name
    'block-causal'
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Optional

import torch

from megatron.fused_kernels import attention, matmul, norms, reference


@dataclass(frozen=True)
class Case:
    """What decides whether an implementation can do it. Of ops other than attention, device and dtype alone.

    causal:  no query sees a key after it, the queries being the last of the tokens
    masked:  a mask comes besides; of a causal case it takes pairs away within that order, as documents do
    grouped: several queries share a key and a value
    scaled_softmax: scores that only fit fp16 when they are divided before and multiplied after
    softcap: scores are capped by a tanh
    window:  keys before its own that a query sees; None: all
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

    @property
    def reach(self) -> int:
        """Most keys that a query sees."""
        return self.keys if self.window is None else min(self.keys, self.window + 1)

    @property
    def asks(self) -> frozenset[str]:
        """What an implementation has to cover, in the words of `EVERYTHING`."""
        if self.causal:
            order = "causal" if self.queries == self.keys > 1 else "cached"
        else:
            order = "bidirectional" if self.queries == self.keys else "cross"
        extras = [
            extra for extra in ("masked", "dropout", "grouped", "scaled_softmax", "softcap") if getattr(self, extra)
        ]
        return frozenset([order, *extras, *(["window"] if self.window is not None else [])])


# Which queries see which keys: causal order over whole sequences, causal order of the last tokens over all of them,
# or no order, with as many queries as keys or not. Then what a case may have besides.
EVERYTHING = frozenset("causal cached bidirectional cross masked dropout grouped scaled_softmax softcap window".split())


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    run:      the function; its counterpart in `reference` documents the arguments
    worth:    what it brings, for `doctor`
    suits:    whether it runs, and is worth running, on a device, in a format and at a size
    lacking:  why it cannot run on this machine ("" where it can)
    backend:  the value of --attention-backend that asks for it
    covers:   what a case may ask for; results of others would be wrong
    """

    name: str
    run: Callable
    worth: str
    suits: Callable[[Case], bool] = lambda case: True
    lacking: str = ""
    backend: str = ""
    covers: frozenset[str] = EVERYTHING

    def fits(self, case: Case) -> bool:
        """Whether `choose_kernel` may take it."""
        return not self.lacking and case.asks <= self.covers and self.suits(case)


def choose_kernel(op: str, case: Case, backend: str = "auto") -> Implementation:
    """The best implementation of `op` for `case`; a `backend` other than auto narrows it down if it covers the case."""
    fitting = [entry for entry in TABLE[op] if entry.fits(case)]
    asked = [entry for entry in fitting if entry.backend == backend]
    return (asked or fitting)[0]


def _package(name: str, cuda: str) -> str:
    return cuda or ("" if importlib.util.find_spec(name) else f"the package {name.replace('_', '-')} is not installed")


def _flash_attn() -> frozenset[str]:
    """What the flash-attn package covers: windows since 2.3, caps since 2.6."""
    try:
        release = tuple(int(part) for part in version("flash_attn").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        release = (0, 0)
    newer = {"window": (2, 3), "softcap": (2, 6)}
    return frozenset(
        {"causal", "bidirectional", "cross", "grouped"} | {ask for ask, of in newer.items() if release >= of}
    )


def _onednn() -> str:
    has = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return "" if has else "this build of torch has no oneDNN linear op"


def _on(device: str, *dtypes: torch.dtype) -> Callable[[Case], bool]:
    return lambda case: case.device == device and (not dtypes or case.dtype in dtypes)


_HALF_ON_CUDA = _on("cuda", torch.bfloat16, torch.float16)
NO_CUDA = "" if torch.cuda.is_available() else "no CUDA device"
EXPLICIT_KEYS = 4096  # beyond this the stored weights of explicit attention cost more memory than they save time

TABLE: dict[str, list[Implementation]] = {
    "attention": [
        Implementation(
            "flash-attn",
            attention.flash_attn,
            "the fastest attention on many NVIDIA GPUs",
            lambda case: _HALF_ON_CUDA(case) and not torch.are_deterministic_algorithms_enabled(),  # backward: atomics
            _package("flash_attn", NO_CUDA),
            "flash",
            _flash_attn(),
        ),
        Implementation(  # like flash-attn it keeps scores in fp32, which scaled_softmax asks for
            "sdpa (CUDA)",
            attention.sdpa,
            "torch's flash, cuDNN or memory-efficient attention: no stored scores",
            _on("cuda"),
            NO_CUDA,
            "sdpa",
            EVERYTHING - {"dropout", "softcap"},
        ),
        Implementation(
            "block-causal",
            attention.block_causal,
            "on CPUs 2.7 x as fast as sdpa in bf16, 1.2 x in fp32; covers dropout and caps; skips keys out of a window",
            lambda case: case.device != "cpu" or case.dropout or case.softcap or case.reach <= EXPLICIT_KEYS,
            "",
            "explicit",
            frozenset({"causal", "masked", "dropout", "grouped", "softcap", "window"}),
        ),
        Implementation(  # for a few new tokens over cached keys the reference is as good
            "sdpa (CPU)",
            attention.sdpa,
            "long sequences without stored scores; attention without causal order",
            _on("cpu"),
            "",
            "sdpa",
            EVERYTHING - {"dropout", "scaled_softmax", "cached", "softcap"},
        ),
        Implementation(
            "reference", reference.attention, "covers everything: caches, scaled scores in fp16", backend="explicit"
        ),
    ],
    "matmul": [
        Implementation(
            "oneDNN in fp32",
            matmul.onednn,
            "about 2 x as fast as MKL on AMD CPUs",
            lambda case: _on("cpu", torch.float32)(case) and not torch.compiler.is_compiling(),  # its own products
            _onednn(),
        ),
        Implementation("torch", reference.matmul, "cuBLAS on GPUs; on CPUs oneDNN in bf16, MKL in fp32"),
    ],
    "layer_norm": [
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
        Implementation(
            "sums as products",
            norms.rms_norm,
            "a backward pass on CPUs 2.5 x as fast as torch's",
            lambda case: case.device == "cpu" and not torch.compiler.is_compiling(),
        ),
        Implementation("torch", reference.rms_norm, "torch's own kernel"),
    ],
}
