# SPDX-License-Identifier: Apache-2.0
"""Packages stand on floors and import only from themselves and from lower floors; what needs no torch imports none.

README.md says what each package is for.
"""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (  # lowest first: a package imports from itself and from lower floors
    "errors",
    "storage",
    "settings",
    "telemetry",
    "fused_kernels tokenizer",
    "mpu",
    "pipeline",
    "model checkpoint",
    "data optimizer",
    "guard inference corpus",
    "convert",
    "training",
    "planner tasks serving",
    "entry",
    "tools",
    "pretrain_gpt pretrain_hybrid pretrain_t5 pretrain_bert finetune preprocess_data merge_datasets setup",
)
PURE = (  # what settings are checked and launches are planned with; others say "Needs no torch" in their docstring
    "errors settings.* storage.* telemetry.run_record telemetry.metrics telemetry.events telemetry.rank_logger "
    "telemetry.own_code mpu.placement model.recompute_plan model.gpt.facts model.gpt.gpt_rules "
    "model.t5.facts model.t5.settings model.bert.facts model.bert.settings "
    "model.kinds.experts.expert_rules model.t5.stages data.mock pipeline.pipeline_rules "
    "data.data_rules optimizer.optimizer_rules checkpoint.boxes pipeline.schedule pipeline.stages pipeline.simulate "
    "pipeline.custom_schedule pipeline.draw pipeline.timeline pipeline.check optimizer.lr_schedule optimizer.scaler "
    "inference.sampling inference.requests data.sampler data.batch_arrays data.index_maps data.json_input "
    "data.sentences data.workspace data.blend data.masked_settings data.sentence_samples data.masking data.manifest "
    "data.formats planner.layout planner.memory planner.cluster planner.speed planner.step_communication planner.search "
    "planner.traffic "
).split()
# Commands whose work needs no torch at all; all others import it only after their settings were found good.
WITHOUT_TORCH = (
    "preprocess_data merge_datasets tools.get_sample_data tools.train_tokenizer tools.flag_docs "
    "tools.report tools.supervise tools.status tools.dashboard tools.create_pretraining_data pipeline.check "
    "tools.openwebtext.cleanup_dataset tools.openwebtext.cleanup_fix_dataset corpus.filters"
).split()


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name.removeprefix("megatron.")


ENTRIES = FLOORS[-1].split()  # other files beside them are a user's own: scripts of models, which nobody imports
PATHS = {
    module_name(path): path
    for path in [*sorted(ROOT.glob("megatron/**/*.py")), *(ROOT / f"{name}.py" for name in ENTRIES)]
}


def package(name: str) -> str:
    return name.split(".")[0]


def floor(name: str) -> int:
    """The floor of a module's package; the package `megatron` itself, which imports nothing of ours, is on the lowest."""
    found = [number for number, row in enumerate(FLOORS) if name in row.split() or package(name) in row.split()]
    assert found or name == "megatron", f"{PATHS[name]} has no floor: add it to FLOORS in {__file__}"
    return found[-1] if found else 0


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
def test_imports_come_from_lower_floors(name):
    wrong = [
        f"{name} imports {other}"
        for other in imports(name) & PATHS.keys()
        if package(other) != package(name) and floor(other) >= floor(name) and other != "megatron"
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_few_rooms():
    beside = [path.name for path in (ROOT / "megatron").iterdir() if path.is_file() and path.suffix == ".py"]
    assert sorted(beside) == ["__init__.py", "entry.py", "errors.py"]
    rooms = [path.name for path in (ROOT / "megatron").iterdir() if (path / "__init__.py").exists()]
    assert set(rooms) <= set(" ".join(FLOORS).split()) and len(rooms) <= 20


def test_entry_scripts_are_those_that_are_installed():
    """So that one which is added to the suite is not taken for a user's own."""
    [modules] = re.findall(r"^py-modules = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.M)
    assert {*re.findall(r'"(\w+)"', modules), "setup"} == set(ENTRIES)


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


def says_no_torch(name: str) -> bool:
    docstring = ast.get_docstring(ast.parse(PATHS[name].read_text(encoding="utf-8"))) or ""
    return "needs no torch" in " ".join(docstring.lower().split())


SAID = [name for name in PATHS if says_no_torch(name)]
LISTED = {pattern: [name for name in PATHS if fnmatch(name, pattern)] for pattern in PURE}


def test_the_list_names_modules_that_are_there_and_do_not_say_so_themselves():
    assert [pattern for pattern, found in LISTED.items() if not found or set(found) <= set(SAID)] == []
    assert len(SAID) > 50


@pytest.mark.parametrize("name", sorted({*SAID, *(name for found in LISTED.values() for name in found)}))
def test_pure_modules_reach_no_torch(name):
    assert not has_torch(reached(name, at_start_only=True))


@pytest.mark.sampled(5)
def test_training_starts_without_torchs_compiler():
    """It takes a second and a half to import, in each rank, and some modules of torch bring it along."""
    modules = "pretrain_gpt, megatron.training.loop, megatron.model.kinds.mamba.module"
    code = f"import sys, {modules}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_commands_answer_before_torch_is_imported():
    commands = [name for name in PATHS if floor(name) >= floor("tools") and "run_main(main)" in PATHS[name].read_text()]
    assert len(commands) >= 8
    assert [name for name in commands if has_torch(reached(name, at_start_only=True))] == []


def test_every_module_of_tools_is_a_command():
    """`python -m` of one never ends in silence; what several commands share is in the package that owns it."""
    modules = [name for name in PATHS if package(name) == "tools" and PATHS[name].name != "__init__.py"]
    assert len(modules) > 25
    assert [name for name in modules if 'if __name__ == "__main__":' not in PATHS[name].read_text()] == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_some_commands_never_import_torch(name):
    assert not has_torch(reached(name, at_start_only=False))


def training_words() -> None:
    from megatron.model.command_line import parse_any

    words = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 1e-3 --train-iters 3 --mock-data --vocab-size 9"
    )
    parse_any(words.split())


def evaluation_words() -> None:
    from megatron.tools import evaluate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "on_ranks", lambda *args: None)
        evaluate.main("--load checkpoints --data-path held_out".split())


@pytest.mark.parametrize("read, most_climbs", [(training_words, 4), (evaluation_words, 8)])
def test_a_command_line_passes_few_files(read, most_climbs):
    """From the words to the settings of a run: the files of the called functions, in order, and climbs between floors."""
    read()  # what is computed once for all command lines
    places = []

    def record(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and module_name(path) in PATHS:
            places.append(module_name(path))

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        read()
    finally:
        sys.setprofile(before)
    climbs = sum(floor(after) > floor(place) for place, after in pairwise(places))
    assert len(set(places)) <= 20 and climbs <= most_climbs, (sorted(set(places)), climbs)


@pytest.mark.parametrize(
    "command, code", [("--help", 0), ("--train-iters 5", 2), ("--num-layers 2 --hidden-size 7 --no-such-flag 3", 2)]
)
def test_answers_without_torch_and_quickly(command, code, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    done = subprocess.run(
        [sys.executable, ROOT / "pretrain_gpt.py", *command.split()],
        capture_output=True,
        text=True,
        env=dict(PYTHONPATH=f"{tmp_path}:{ROOT}", PATH=""),
        timeout=200,
    )
    assert done.returncode == code, done.stderr
    assert "torch was imported" not in done.stderr


@pytest.mark.sampled(2)
def test_each_module_of_a_kind_is_imported_alone():
    """A kind is found by its folder; no module of it may need that the others were imported before."""
    of_kinds = (name for name in PATHS if name.startswith("model.kinds."))
    names = [f"megatron.{name}" for name in of_kinds if not has_torch(reached(name, at_start_only=True))]
    code = f"""
import importlib, sys
for name in {names}:
    for known in [known for known in sys.modules if known.startswith("megatron")]:
        del sys.modules[known]
    importlib.import_module(name)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
