# SPDX-License-Identifier: Apache-2.0
"""Modules stand on floors and import only from their own floor and those below; what needs no torch imports none.

docs/design.md says what each floor is for. A new module takes the floor of the first pattern that fits.
"""

import ast
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (
    # Settings and plain arithmetic.
    (
        "errors setting optimizing planning profiling reporting config layer_groups flags flag_* spelling presets rules "
        "batch flops launched records timers",
        0,
    ),
    ("optimizer.schedule optimizer.scaler checkpoint.boxes checkpoint.durable mpu.placement fused_kernels.cpu", 0),
    ("pipeline.wire pipeline.execute pipeline.build pipeline.record", 4),
    ("pipeline.* inference.sampling", 0),
    ("data.sampler data.masks data.mock data.index_maps data.json_input data.sentences data.workspace", 0),
    ("data.blend data.manifest", 0),
    ("mpu.mesh mpu.forked", 1),  # the first that may know torch.distributed
    ("mpu.collectives mpu.mappings mpu.random mpu.deferred fused_kernels* tokenizer* metrics trackers phases", 2),
    ("mpu.* checkpoint.store checkpoint.index checkpoint.reader", 3),
    ("data.indexed data.index_cache data.preprocess* data.merge data.vocabulary", 3),
    ("model.* optimizer.* checkpoint.* data.* inference.* tasks.* guard.* planner.* corpus.* compress.*", 4),
    ("preflight.ranks preflight.machines preflight.verdict", 4),
    ("profiler run startup detours training tuning parity preflight.*", 5),  # where everything meets
    ("tools.* chaos.* pretrain pretrain_* preprocess_data merge_datasets setup", 6),  # commands
    (
        "megatron mpu optimizer checkpoint data model pipeline inference tasks tools guard planner corpus compress chaos "
        "preflight",
        0,
    ),  # empty packages, the version
)
# Commands whose work needs no torch at all; all others import it only after their settings were found good.
WITHOUT_TORCH = (
    "preprocess_data merge_datasets tools.get_sample_data tools.train_tokenizer tools.flag_docs "
    "tools.report tools.supervise tools.status pipeline.check"
).split()


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("megatron.")


PATHS = {module_name(path): path for path in [*sorted(ROOT.glob("megatron/**/*.py")), *sorted(ROOT.glob("*.py"))]}


def floor(name: str) -> int:
    for patterns, number in FLOORS:
        if any(fnmatch(name, pattern) for pattern in patterns.split()):
            return number
    raise AssertionError(f"{PATHS[name]} has no floor: add it to FLOORS in {__file__}")


@cache
def imports(name: str, at_start_only: bool = False) -> frozenset[str]:
    """What a module imports: our modules by name, others by their first word."""
    tree = ast.parse(PATHS[name].read_text(encoding="utf-8"))
    found = set()
    for node in _outside_functions(tree) if at_start_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {_known(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{PATHS[name]}:{node.lineno}: relative import"
            found |= {_known(f"{node.module}.{alias.name}", node.module) for alias in node.names}
    return frozenset(found)


def _outside_functions(node: ast.AST):
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from _outside_functions(child)


def _known(*candidates: str) -> str:
    for candidate in candidates:
        if candidate.split(".")[0] == "megatron" or candidate in PATHS:
            short = candidate.removeprefix("megatron.")
            if short in PATHS:
                return short
    return candidates[-1].split(".")[0] if "distributed" not in candidates[-1] else candidates[-1]


def reached(name: str, at_start_only: bool) -> set[str]:
    """Everything that importing a module imports in the end."""
    seen, todo = set(), [name]
    while todo:
        for other in imports(todo.pop(), at_start_only):
            if other not in seen:
                seen.add(other)
                if other in PATHS:
                    todo.append(other)
    return seen


def has_torch(names) -> bool:
    return any(name.split(".")[0] == "torch" for name in names)


@pytest.mark.parametrize("name", PATHS)
def test_imports_only_from_this_floor_or_below(name):
    wrong = [f"{name} (floor {floor(name)}) imports {other} (floor {floor(other)})"
             for other in imports(name) if other in PATHS and floor(other) > floor(name)]  # fmt: skip
    assert not wrong, "\n".join(wrong)


def test_no_circles():
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(imports(name) & PATHS.keys()):
                visit(other, [*path, name])
            done.add(name)

    for name in PATHS:
        visit(name, [])


def test_the_lowest_floor_knows_no_torch():
    assert [name for name in PATHS if floor(name) == 0 and has_torch(imports(name))] == []


def test_commands_answer_before_torch_is_imported():
    commands = [name for name in PATHS if floor(name) == 6 and "run_main(main)" in PATHS[name].read_text()]
    assert len(commands) >= 8
    assert [name for name in commands if has_torch(reached(name, at_start_only=True))] == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_some_commands_never_import_torch(name):
    assert not has_torch(reached(name, at_start_only=False))


@pytest.mark.parametrize(
    "command, code", [("--help", 0), ("--train-iters 5", 2), ("--num-layers 2 --hidden-size 7 --no-such-flag 3", 2)]
)
def test_answers_without_torch_and_quickly(command, code, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    done = subprocess.run([sys.executable, ROOT / "pretrain_gpt.py", *command.split()], capture_output=True, text=True,
                          env=dict(PYTHONPATH=f"{tmp_path}:{ROOT}", PATH=""), timeout=200)  # fmt: skip
    assert done.returncode == code, done.stderr
    assert "torch was imported" not in done.stderr
