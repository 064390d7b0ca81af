# SPDX-License-Identifier: Apache-2.0
"""One table of the ops that have several implementations, what each needs, and how one is picked.

`reference.py` defines every op in plain PyTorch. The table lists its faster twins, best first; `choose` takes the first
one that this machine has and that covers the case at hand, and `explain` says for each why it is or is not in use
(`python -m megatron.tools.doctor` prints that).

    >>> choose("attention", Case(device="cpu", dtype="bfloat16", queries=256, keys=256)).name
    'block-causal'
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Case:
    """What decides whether an implementation can do it. `dtype` as in `str(torch.float32)`, without `torch.`."""

    device: str
    dtype: str
    queries: int = 0
    keys: int = 0
    masked: bool = False
    dropout: bool = False
    scaled_softmax: bool = False  # softmax in fp32, or scores divided before and multiplied after

    @property
    def half(self) -> bool:
        return self.dtype in ("bfloat16", "float16")


@dataclass(frozen=True)
class Implementation:
    """One way to compute an op.

    place:    "module:function" under `megatron.fused_kernels`
    backend:  the value of --attention-backend that asks for it
    needs:    why it cannot run on this machine ("" where it can)
    covers:   whether it can do a case
    worth:    what it brings, for `doctor`
    """

    op: str
    name: str
    place: str
    backend: str
    needs: Callable[[], str]
    covers: Callable[[Case], bool]
    worth: str

    def load(self) -> Callable:
        return _load(self.place)


def choose(op: str, case: Case, backend: str = "auto") -> Implementation:
    """The best implementation of `op` for `case`; `backend` other than auto narrows it down where it covers the case."""
    fitting = [entry for entry in TABLE[op] if not entry.needs() and entry.covers(case)]
    asked = [entry for entry in fitting if entry.backend == backend]
    return (asked or fitting)[0]


def explain(op: str) -> list[tuple[Implementation, str]]:
    """Each implementation of `op` with why this machine cannot run it, "" where it can."""
    return [(entry, entry.needs()) for entry in TABLE[op]]


@cache
def _load(place: str) -> Callable:
    module, function = place.split(":")
    return getattr(importlib.import_module(f"megatron.fused_kernels.{module}"), function)


@cache
def _cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "no CUDA device"


@cache
def _flash_attn() -> str:
    return _cuda() or ("" if importlib.util.find_spec("flash_attn") else "package flash-attn is not installed")


@cache
def _apex() -> str:
    return _cuda() or ("" if importlib.util.find_spec("apex") else "package apex is not installed")


@cache
def _onednn() -> str:
    import torch

    if not torch.backends.mkldnn.is_available():
        return "this build of torch has no oneDNN"
    return "" if hasattr(torch.ops.mkldnn, "_linear_pointwise") else "this version of torch has no oneDNN linear op"


def _here() -> str:
    return ""


def _plain(case: Case) -> bool:
    """Causal self-attention over whole sequences, nothing else."""
    return not (case.masked or case.dropout or case.scaled_softmax) and case.queries == case.keys > 1


EXPLICIT_KEYS = 4096  # beyond this the stored weights of explicit attention cost more memory than they save time

TABLE: dict[str, list[Implementation]] = {
    "attention": [
        Implementation(
            "attention", "flash-attn", "attention:flash_attn", "flash", _flash_attn,
            lambda case: case.device == "cuda" and case.half and _plain(case),
            "fastest attention on many NVIDIA GPUs",
        ),
        Implementation(
            "attention", "torch-sdpa", "attention:sdpa", "sdpa", _cuda,
            lambda case: case.device == "cuda" and not (case.dropout or case.scaled_softmax),
            "flash or cuDNN attention from torch itself: no stored scores",
        ),
        Implementation(
            "attention", "block-causal", "attention:block_causal", "explicit", _here,
            lambda case: case.device == "cpu" and _plain(case) and case.keys <= EXPLICIT_KEYS,
            "on CPUs 1.5 to 3 x as fast as torch's own attention",
        ),
        Implementation(
            "attention", "torch-sdpa", "attention:sdpa", "sdpa", _here,
            lambda case: case.device == "cpu" and _plain(case),
            "long sequences on CPUs without stored scores",
        ),
        Implementation(
            "attention", "reference", "reference:attention", "explicit", _here, lambda case: True,
            "does everything: dropout, document masks, caches, fp32 softmax",
        ),
    ],
    "matmul": [
        Implementation(
            "matmul", "oneDNN fp32", "matmul:onednn", "", _onednn,
            lambda case: case.device == "cpu" and case.dtype == "float32",
            "about 2 x as fast as MKL in fp32 on AMD CPUs",
        ),
        Implementation(
            "matmul", "torch", "reference:matmul", "", _here, lambda case: True,
            "cuBLAS on GPUs, oneDNN in bf16 on CPUs, MKL in fp32",
        ),
    ],
    "layer_norm": [
        Implementation(
            "layer_norm", "apex", "norms:apex_layer_norm", "", _apex,
            lambda case: case.device == "cuda",
            "a fused backward pass for LayerNorm",
        ),
        Implementation(
            "layer_norm", "torch", "reference:layer_norm", "", _here, lambda case: True, "torch's own kernel",
        ),
    ],
}  # fmt: skip
