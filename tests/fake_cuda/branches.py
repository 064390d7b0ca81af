# SPDX-License-Identifier: Apache-2.0
"""The branches of the code that a CPU never takes: those of an `if` on the kind of a device, and which of them a run has
reached. Needs no torch.
"""

import ast
import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ASKED = ("'cuda'", "'cpu'", "is_cuda", "cuda.is_initialized")  # in the test of an `if`
OFF_DEVICE = tuple(  # pure, or Triton's
    f"megatron/{part}"
    for part in "planner settings tools model/facts model/layer_ops fused_kernels/gpu model/kinds/mlp/kind "
    "model/kinds/attention/kind model/kinds/attention/full".split()
)


# file: function -> where its branch for a device is asked: "runs", by the training runs of test_fake_cuda.py (checked with
# --full), or another test. Those that no run takes are called in fake_calls.py, and are not listed.
REACHED = {
    **dict.fromkeys(
        (
            "data/loader.py: pinned",
            "data/loader.py: to",
            "fused_kernels/__init__.py: describe_document_kernel",
            "fused_kernels/__init__.py: describe_kernels",
            "fused_kernels/explicit_attention.py: _product",
            "fused_kernels/explicit_attention.py: mask_padding",
            "fused_kernels/documents.py: _sent",
            "fused_kernels/dropout.py: _masked",
            "model/fp8_product.py: product_in_fp32",
            "model/kinds/experts/dispatch.py: __init__",
            "model/kinds/experts/grouped.py: row_unit",
            "model/t5/module.py: attended",
            "mpu/collectives.py: _start_gather",
            "mpu/collectives.py: _start_scatter",
            "mpu/cross_entropy.py: _sizes",
            "mpu/cross_entropy.py: _scaled",
            "mpu/initialize.py: join_job",
            "mpu/initialize.py: pick_device",
            "mpu/transfer.py: __init__",
            "mpu/transfer.py: to_device",
            "mpu/two_passes.py: __init__",
            "optimizer/rounding.py: norms",
            "optimizer/rounding.py: parts_of",
            "pipeline/wire.py: finish",
            "training/instruments.py: build_metrics",
            "training/instruments.py: peak_of",
            "training/instruments.py: peak_source",
            "training/build.py: pick_precision",
            "training/rank_watch.py: _receive",
            "training/start_log.py: crowded",
            "training/start_log.py: kernel_instead",
        ),
        "runs",
    ),
    "fused_kernels/partial_attention.py: forward": "tests/gpu/test_gpu_triton.py",
    "convert/export/load_exported.py: _load_hf": "tests/inference/test_export.py",  # an error on a CPU alone
    "convert/export/programs.py: _with_torch": "tests/inference/test_export.py",
    "inference/batch_invariant.py: refuse_uncovered": "tests/inference/test_batch_invariant.py",  # an error
    "training/rerun.py: build_rerun": "tests/training/test_rerun.py",
    "training/rerun.py: _disputed_now": "tests/training/test_rerun.py",
    "inference/load.py: load_model": "tests/inference/test_generation.py",  # an error on a CPU alone
    "model/kinds/attention/module.py: describe_kernel": "tests/model/test_attention_choice.py",
    "model/kinds/experts/grouped.py: lacking_grouped": "tests/gpu/test_gpu_experts.py",  # a trial run
    "model/kinds/experts/grouped.py: _refusing_waits": "tests/gpu/test_gpu_experts.py",
    "model/kinds/experts/libraries.py: library_refusal": "tests/models/test_expert_libraries.py",
    "mpu/initialize.py: join_job": "tests/gpu/test_gpu_training.py",
    "mpu/initialize.py: prepare_device": "tests/mpu/test_device_variables.py",
    "mpu/random.py: random_words": "tests/gpu/test_gpu_triton.py",  # Triton's
    "mpu/two_passes.py: _random_states": "tests/gpu/test_gpu_training.py",
    "telemetry/log_lines.py: console_line": "tests/telemetry/test_console.py",
    "telemetry/profiler.py: _busy": "tests/gpu/test_gpu_training.py",
    "telemetry/profiler.py: end": "tests/gpu/test_gpu_training.py",
    "telemetry/profiler.py: _sort": "tests/gpu/test_gpu_training.py",
    "telemetry/profiler.py: _table": "tests/gpu/test_gpu_training.py",
    "telemetry/profiler.py: _tables": "tests/gpu/test_gpu_training.py",
    "telemetry/stragglers.py: _cause": "tests/telemetry/test_stragglers.py",
}


def place_of(branch: str) -> str:
    """file: function of a branch, as in `REACHED`."""
    return ": ".join(branch.split(": ")[:2]).removeprefix("megatron/")


def branches() -> dict[str, tuple[str, int]]:
    """file: function: test -> (file, line that only a device reaches)."""
    found = {}
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if not name.startswith(OFF_DEVICE) and ("cuda" in text or "cpu" in text):
            for function, node in _conditions(ast.parse(text)):
                found[f"{name}: {function}: {ast.unparse(node.test)}"] = name, _line(node)
    return found


def _conditions(tree: ast.Module) -> Iterator[tuple[str, ast.If | ast.IfExp]]:
    """(name of the function, condition) of each `if` that asks for a kind of device."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                test = ast.unparse(node.test) if isinstance(node, (ast.If, ast.IfExp)) else ""
                if any(word in test for word in ASKED) and "controllers" not in test:  # those of Linux's cgroups
                    yield function.name, node


def _line(node: ast.If | ast.IfExp) -> int:
    """The first line of its branch for a device: of an `if` on a device the body, otherwise the condition itself."""
    test = ast.unparse(node.test)
    on_device = "'cpu'" not in test and not test.startswith("not ") and "!= 'cuda'" not in test
    return node.body[0].lineno if isinstance(node, ast.If) and on_device else node.lineno


@contextlib.contextmanager
def reached() -> Iterator[set[str]]:
    """A context that collects the branches that this thread, and those that it starts, reach."""
    places = {(str(ROOT / file), line): name for name, (file, line) in branches().items()}
    files, found = {file for file, _ in places}, set()

    def lines(frame, event, arg):
        if (place := (frame.f_code.co_filename, frame.f_lineno)) in places:
            found.add(places[place])
        return lines

    def calls(frame, event, arg):
        return lines if frame.f_code.co_filename in files else None

    threading.settrace(calls)
    sys.settrace(calls)
    try:
        yield found
    finally:
        sys.settrace(None)
        threading.settrace(None)
