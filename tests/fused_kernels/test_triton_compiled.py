# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels, compiled for GPUs that are not here, fit them: nothing spills from registers, and memory is read and
written 16 bytes at a time. Sizes are those that training launches. Times are not seen, nor whether a kernel is right:
the latter is test_triton_interpreted.py, and on a GPU tests/gpu.

A few in the ordinary tests; with --full every size, for A100 (sm_80), H100 (sm_90a) and B200 (sm_100a), and by each triton
that TRITON_PATHS names (folders with a colon between them, beside the one that is installed).
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("triton"), reason="the package triton is not installed: pip install '.[dev]'"
)
TOKENS, SHARED = 4096, 232448  # bytes of shared memory that a program of an H100 may have
TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
# Of rows, of weights
NORMS = {"layer_norm": (1, 2), "rms_norm": (1, 1), "add_layer_norm": (2, 2), "add_rms_norm": (2, 1)}


def norm(op: str, width: int) -> dict:
    rows, weights = NORMS[op]
    return dict(op=op, shapes=[[TOKENS, 2, width]] * rows + [[width]] * weights)


def decode(n: int, g: int, q: int, d: int, tokens: int = 1024, **part) -> dict:
    shapes = [[n, g, q, d], [n * tokens, g, d], [n * tokens, g, d]]
    return dict(op="decode_attention", shapes=shapes, **(dict(part=part) if part else {}))


def experts(op: str, k: int, width: int) -> dict:
    return dict(op=op, shapes=[[TOKENS * k, width], [TOKENS, k]])


def casts(tile: str, **part) -> dict:
    return dict(op="fp8_cast", shapes=[[TOKENS, 4096]], part=dict(tile=tile, **part))


def turned(tile: str) -> dict:
    return dict(op="fp8_turn", shapes=[[TOKENS, 4096]], part=dict(tile=tile))


FEW = [
    norm("add_layer_norm", 12288),  # blocks of rows
    dict(op="swiglu", shapes=[[TOKENS, 2, 28672 // 8 * 2]]),
    dict(op="rotate", shapes=[[TOKENS, 2, 8, 4, 128], [128]]),
    dict(op="dropout_add", shapes=[[TOKENS, 2, 4096]] * 2),
    dict(op="cross_entropy", shapes=[[2668, 50304]]),
    decode(16, 8, 4, 128),
    *[experts(op, 8, 2048) for op in ("permute", "unpermute")],
]
OF_FP8 = [  # in bf16, for GPUs that have fp8
    casts("BLOCKS"),
    casts("BLOCKS", columns=True),
    casts("SQUARES", columns=True),
    casts("WHOLE"),
    casts("ROWS"),
    turned("BLOCKS"),
]
MORE_OF_FP8 = [casts("WHOLE", columns=True), casts("MX"), casts("MX", columns=True), turned("MX"), turned("WHOLE")]
MORE = [
    *[decode(n, g, q, d) for n, g, q, d in ((1, 12, 1, 64), (16, 32, 1, 128), (4, 2, 8, 96), (64, 8, 8, 256))],
    decode(16, 8, 8, 64, sinks=True),
    *[
        experts(op, k, width)
        for op in ("permute", "unpermute")
        for k, width in ((1, 4096), (2, 6144), (6, 5120), (32, 1024))
    ],
    *[norm(op, width) for op in NORMS for width in (768, 4096, 12288, 25600)],
    *[dict(op="rms_norm", shapes=[[TOKENS, 2, 8, 4, head], [head]]) for head in (64, 128)],  # of queries
    *[dict(op="bias_gelu", shapes=[[TOKENS, 2, width], [width]]) for width in (3072, 16384, 49152 // 8)],
    *[dict(op="swiglu", shapes=[[TOKENS, 2, 2 * width]]) for width in (14336, 14336 // 8)],
    *[dict(op="rotate", shapes=[[TOKENS, 1, g, q, d], [n]]) for g, q, d, n in ((1, 8, 128, 64), (32, 1, 80, 80))],
    *[dict(op="dropout_add", shapes=[[TOKENS, 2, width]] * 2) for width in (1024, 12288)],
    *[
        dict(op="cross_entropy", shapes=[[2048, rows]], part=part)
        for rows in (50304, 128256 // 8, 262144)
        for part in (
            dict(),
            dict(shards=8, real=rows - 48),
            dict(shards=2, real=rows - 48, everywhere=1e-6, label=0.9, softcap=30.0, z_loss=1e-4),
        )
    ],
]


def compiled(cases: list[dict], folder: Path, path: str = "") -> list[dict]:
    """What became of the kernels that these cases launch."""
    command = [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))]
    paths = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "TRITON_CACHE_DIR": str(folder), "PYTHONPATH": paths}
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def wrong(found: dict) -> list[str]:
    """What a kernel has that it must not have, or the other way round."""
    told = []
    if found["spills"] or found["stack"]:
        told.append(f"{found['spills']} instructions for spilled registers, {found['stack']} bytes of stack")
    if found["shared"] > SHARED:
        told.append(f"{found['shared']} bytes of shared memory")
    narrow = found["kernel"] == "decode_attention.join_kernel"  # a row has less than 16 bytes for each thread
    if not narrow and (not found["wide"] or not found["wide_stores"] and found["kernel"] != "cross_entropy.kernel"):
        told.append("memory is not read and written 16 bytes at a time")
    if found["target"] != TARGETS[found["case"]["arch"]]:
        told.append(f"made for {found['target']}")
    return told


def check(found: list[dict]) -> None:
    bad = {f"{one['kernel']} of {one['case']}": wrong(one) for one in found if wrong(one)}
    assert not bad, json.dumps(bad, indent=1)


@pytest.mark.sampled(10)
def test_kernels_fit_an_h100(tmp_path):
    found = compiled([dict(case, arch=90, dtype="bfloat16") for case in [*FEW, *OF_FP8]], tmp_path)
    assert len(found) == 2 * len(FEW) - 1 + len(OF_FP8)  # forward and backward, or two steps; one of the loss
    check(found)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", ["", *filter(None, os.environ.get("TRITON_PATHS", "").split(":"))])
@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_fit_every_gpu(tmp_path, arch, path):
    cases = [
        dict(case, arch=arch, dtype=dtype)
        for case in [*FEW, *MORE]
        for dtype in ("bfloat16", *(["float16", "float32"] if case in FEW else []))
    ]
    if arch >= 90:
        cases += [dict(case, arch=arch, dtype="bfloat16") for case in OF_FP8 + MORE_OF_FP8]
    check(compiled(cases, tmp_path, path))
