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
OFF_DEVICE = (
    "megatron/planner",
    "megatron/settings",
    "megatron/tools",
    "megatron/model/facts",
    "megatron/model/gpt/facts",
)
OFF_DEVICE += ("megatron/model/t5/facts", "megatron/model/layer_ops", "megatron/fused_kernels/gpu")  # pure, or Triton's


def branches() -> dict[str, tuple[str, int]]:
    """file: function: test -> (file, line that only a device reaches)."""
    found = {}
    for path in sorted((ROOT / "megatron").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(OFF_DEVICE):
            for function, node in _conditions(ast.parse(path.read_text(encoding="utf-8"))):
                found[f"{name}: {function}: {ast.unparse(node.test)}"] = name, _line(node)
    return found


def _conditions(tree: ast.Module) -> Iterator[tuple[str, ast.If | ast.IfExp]]:
    """(name of the function, condition) of each `if` that asks for a kind of device."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, (ast.If, ast.IfExp)) and any(word in ast.unparse(node.test) for word in ASKED):
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
