# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for GPUs that are not here, exactly as training would launch them.

    python tests/fused_kernels/compile_kernels.py < cases.json      # a line of JSON for each kernel that a case launches

A case is {arch: 90, dtype: "bfloat16", op: "rms_norm", shapes: [[8192, 1, 4096], ...]}. The code that launches runs on
meta tensors, and each launch is a compilation of what Triton would have specialised on: formats, alignment of pointers,
integers that are multiples of 16. The tools of the wheel then tell what became of it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from megatron.fused_kernels import fp8
from megatron.fused_kernels.decode_attention import Places
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.gpu import probe
from megatron.fused_kernels.reference import VocabularyPart

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FOUND: list[dict] = []  # of the case that runs


class Absent:
    """A driver for a GPU of this architecture, which is never asked to launch anything."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cuda


def compiled(kernel: JITFunction, grid):
    """In place of `kernel[grid]`: what would launch compiles."""

    def warmup(*args, **kwargs):
        started = time.process_time()
        binary = kernel.warmup(*args, grid=grid, **kwargs)
        name = f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"
        FOUND.append(dict(kernel=name, seconds=round(time.process_time() - started, 2), **looked_at(binary)))

    return warmup


def looked_at(binary) -> dict:
    """Registers, bytes of stack and shared memory, and how often instructions occur."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        told = [
            subprocess.run([str(TOOLS / tool), *flags, file.name], capture_output=True, text=True, check=True).stdout
            for tool, *flags in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        ]
    registers, stack, shared = map(int, re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", told[0]).groups())
    count = lambda word: len(re.findall(rf"\b{re.escape(word)}\b", told[1]))
    return dict(
        target=re.search(r"\.target (\S+)", binary.asm["ptx"]).group(1).rstrip(","),
        warps=binary.metadata.num_warps,
        registers=registers,
        stack=stack,
        shared=max(shared, binary.metadata.shared),
        spills=count("LDL") + count("STL"),
        wide=len(re.findall(r"\bLDG(?:STS)?\.E[.\w]*\.128\b", told[1])),  # LDGSTS: into shared memory
        wide_stores=len(re.findall(r"\bSTG\.E[.\w]*\.128\b", told[1])),
        loads=len(re.findall(r"\bLDG\.", told[1])),
    )


def launch(op: str, dtype: torch.dtype, shapes: list[list[int]], part: dict | None = None) -> None:
    """Forward and, of ops with gradients, backward on meta tensors."""
    run = probe.kernel(op)
    inputs = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in shapes]
    if op == "cross_entropy":
        logits, labels = inputs[0].detach(), torch.empty(len(inputs[0]), dtype=torch.int64, device="meta")
        part = dict(part or {})
        join = (lambda *x: x) if part.pop("shards", 1) > 1 else None
        run(logits, labels, VocabularyPart(**{"first": 0, "real": logits.shape[1], **part}), join, None, logits)
        return
    if op == "decode_attention":  # texts of as many tokens as the cache has for each
        n, places = shapes[0][0], shapes[1][0]
        places = Places([(slice(k * places // n, (k + 1) * places // n),) for k in range(n)], 16, torch.device("meta"))
        sinks = torch.empty(shapes[0][1:3], dtype=dtype, device="meta") if part else None
        run(*(x.detach() for x in inputs), places, scale=0.1, sinks=sinks)
        return
    if op.startswith("fp8_"):  # part: the name of a tile, and which sides are written
        part, x = dict(part or {}), inputs[0].detach()
        tile = getattr(fp8, part.pop("tile"))
        if op == "fp8_turn":
            run(probe.reference.fp8_cast(x, tile, fp8.E4M3), tile)
        else:
            run(x, tile, fp8.E5M2 if part.get("columns") else fp8.E4M3, fp8.amax_of(x), **part)
        return
    if op == "rotate":  # queries as a part of the fused product, as attention has them
        s, b, g, q, d = shapes[0]
        x = torch.empty((s, b, g, q + 2, d), dtype=dtype, device="meta")[..., :q, :].detach().requires_grad_()
        angles = torch.empty((s, 1, 1, 1, shapes[1][0]), dtype=dtype, device="meta")
        found = run(x, angles, angles)
    elif op in ("permute", "unpermute"):  # rows [m, h], and pairs [n, k]; without a row for some pairs
        (m, h), (n, k) = shapes
        order, place = (torch.empty(size, dtype=torch.int64, device="meta") for size in (m, n * k))
        x = inputs[0].new_empty((n, h)).requires_grad_() if op == "permute" else inputs[0]
        found = run(x, order, place, k, False)
    elif op == "dropout_add":
        s, b, h = shapes[0]
        words = torch.empty((b, s, h), dtype=torch.int16, device="meta").movedim(0, 1)
        found = run(inputs[0], DropoutMask(words, 0, 1.25), inputs[1])
    else:
        found = run(*inputs, *((1e-5,) if "norm" in op else ()))
    found = found if isinstance(found, tuple) else (found,)
    torch.autograd.backward(found, [torch.empty_like(x) for x in found])


def main() -> None:
    JITFunction.__getitem__ = compiled
    for case in json.load(sys.stdin):
        driver.set_active(Absent(case["arch"]))
        FOUND.clear()
        launch(case["op"], getattr(torch, case["dtype"]), case["shapes"], case.get("part"))
        for found in FOUND:
            print(json.dumps(dict(case=case, **found)), flush=True)
        for name in set(probe.MODULES.values()):  # kernels of one architecture are no kernels of another
            for kernel in vars(sys.modules.get(f"megatron.fused_kernels.gpu.{name}", os)).values():
                if isinstance(kernel, JITFunction):
                    kernel.device_caches.clear()


if __name__ == "__main__":
    main()
