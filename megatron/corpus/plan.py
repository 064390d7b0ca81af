# SPDX-License-Identifier: Apache-2.0
"""Turn a recipe into a plan: a list of tasks, the same on every machine.

The id of a task is a hash of its function, the version of that code, its options, and its inputs: ids of the tasks that
write them, or digests of input files. So a finished task serves every recipe that contains it, and a changed option only
redoes the tasks that depend on it. Ids do not depend on paths, times and numbers of workers.

    <output>/tasks/02-filter/3f0c.../documents.jsonl.zst      a task's folder: its phase, its id
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from megatron.corpus import filtering, shards
from megatron.corpus.commit import Digests
from megatron.corpus.documents import SHARD
from megatron.corpus.recipe import CorpusRecipe, StageWanted
from megatron.corpus.registry import (
    code_of_options,
    code_version,
    filter_options,
    load,
    module_of,
    phase_options,
    stage_address,
)
from megatron.corpus.stage import StagePhase, TaskInputs
from megatron.data.json_input import Source, with_separator
from megatron.errors import DataError, Failure, SettingsError, UsageError
from megatron.storage.durable import replace_file

TASKS = "tasks"
LISTS = "lists"  # files of paths that many tasks read, by the name of the list
LIST = "@"  # prefix of such a name


@dataclass(frozen=True)
class CorpusTask:
    """A call of a function with paths and options, which writes files into a folder of its own.

    folder: <phase>/<id>; inputs: paths below `tasks/`, or absolute ones of input files, and lists of them by name; needs:
    folders of other tasks, and lists; joins: whether it writes documents, to be joined into one shard; about: a description
    of its input for messages
    """

    folder: str
    function: str
    inputs: tuple[str, ...]
    needs: tuple[str, ...]
    options: Mapping[str, Any]
    joins: bool = False
    about: str = ""

    @property
    def id(self) -> str:
        return self.folder.rpartition("/")[2]

    @property
    def phase(self) -> str:
        return self.folder.partition("/")[0]


@dataclass(frozen=True)
class PlannedStage:
    """A stage of the plan. phases: name in the plan -> folders of its tasks, in order (twice for equal inputs); reads,
    makes: shards, or the files of a last stage."""

    name: str
    phases: dict[str, list[str]]
    reads: list[str]
    makes: list[str]
    where: str = ""
    address: str = ""  # of its phases; "" for shards and filters
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CorpusPlan:
    """All tasks by folder, each after those that it needs."""

    tasks: dict[str, CorpusTask]
    stages: list[PlannedStage]
    set_aside: list[tuple[str, str]]  # input files that cannot be read, with the reason
    samples: int = 0
    lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by name: paths that many tasks read

    @property
    def id(self) -> str:
        return _hash([*self.tasks])

    @property
    def phases(self) -> dict[str, list[str]]:
        return {name: folders for stage in self.stages for name, folders in stage.phases.items()}

    @property
    def final(self) -> list[str]:
        """The final shards, or the folders of token files; paths below `tasks/`."""
        return self.stages[-1].makes

    def inputs_of(self, task: CorpusTask) -> list[str]:
        """All input paths of a task."""
        return [path for name in task.inputs for path in self.lists.get(name, (name,))]

    def needs_of(self, name: str) -> list[str]:
        """The folders and lists that a task needs, or the folders that a list needs."""
        if name in self.tasks:
            return [*self.tasks[name].needs]
        return [maker for maker in dict.fromkeys(map(_maker, self.lists[name])) if maker in self.tasks]

    def to_json(self) -> str:
        content = dict(
            tasks={name: vars(task) for name, task in self.tasks.items()}, stages=[vars(stage) for stage in self.stages]
        )
        return json.dumps(vars(self) | content, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "CorpusPlan":
        content = json.loads(text)
        tasks = {
            name: CorpusTask(**dict(task, inputs=tuple(task["inputs"]), needs=tuple(task["needs"])))
            for name, task in content["tasks"].items()
        }
        stages = [PlannedStage(**stage) for stage in content["stages"]]
        lists = {name: tuple(paths) for name, paths in content["lists"].items()}
        return CorpusPlan(tasks, stages, [tuple(one) for one in content["set_aside"]], content["samples"], lists)


def make_plan(recipe: CorpusRecipe, output: Path, log: Callable[[str], None] = lambda line: None) -> CorpusPlan:
    """The plan of a recipe. output: folder in which digests of the input are cached.

    Raises UsageError and SettingsError for errors in the recipe; DataError for missing input.
    """
    _rows(recipe)
    sources, refused = shards.sources_of(recipe.input, recipe.on_damaged)
    with_separator(sources, recipe.document_separator)
    with Digests(output, log) as digests:
        digests.ahead([source.path for source in sources])
        return plan_of(recipe, sources, digests, refused)


def plan_of(
    recipe: CorpusRecipe, sources: Sequence[Source], digests: Digests, refused: Sequence[tuple[str, str]] = ()
) -> CorpusPlan:
    """The plan of a recipe for input files, of which only sizes and digests are used."""
    builder = _Builder(recipe, digests)
    builder.add_shards(sources)
    for row in _rows(recipe):
        builder.add_filters(row) if row[0].is_filter else builder.add_phases(row[0])
    return CorpusPlan(builder.tasks, builder.stages, [*refused], recipe.samples, builder.lists)


def _rows(recipe: CorpusRecipe) -> list[list[StageWanted]]:
    """The stages, with consecutive filters in one row. Checks names and options before any input is read."""
    rows: list[list[StageWanted]] = []
    for stage in recipe.stages:
        filter_options(stage) if stage.is_filter else phase_options(stage)
        if stage.is_filter and rows and rows[-1][0].is_filter:
            rows[-1].append(stage)
        else:
            rows.append([stage])
    return rows


class _Builder:
    """Builds a plan stage by stage."""

    def __init__(self, recipe: CorpusRecipe, digests: Digests):
        self.recipe, self.digests = recipe, digests
        self.tasks: dict[str, CorpusTask] = {}
        self.lists: dict[str, tuple[str, ...]] = {}
        self.stages: list[PlannedStage] = []
        self.ended_by = ""
        self._known_lists: dict[int, tuple[Sequence[Path], str, str]] = {}

    def add_shards(self, sources) -> None:
        most = int(self.recipe.max_document_mb * 1e6)
        common = dict(text_key=self.recipe.text_key, most=most, on_damaged=self.recipe.on_damaged)
        if self.recipe.document_separator:
            common["separator"] = self.recipe.document_separator
        folders, made = [], []
        for pieces in shards.pieces_of(sources, int(self.recipe.shard_mb * 1e6)):
            paths = list(dict.fromkeys(piece.path for piece in pieces))
            options = common | dict(pieces=[[paths.index(p.path), p.start, p.stop, p.parts] for p in pieces])
            about = ", ".join(map(_describe, pieces[:3])) + f" and {len(pieces) - 3} more" * (len(pieces) > 3)
            version = [code_version("megatron.corpus.shards:cut")]
            if any(piece.start is None for piece in pieces):
                version.append(_python())  # the cuts of a compressed file depend on how its library reads
            folder = self._task(
                "shards", shards.cut, [Path(path).absolute() for path in paths], options, about, version
            )
            folders.append(folder)
            made += [f"{folder}/{name}" for name in shards.names_of(pieces)]
        self.stages.append(PlannedStage("shards", {self._phase("shards"): folders}, [], made))

    def add_filters(self, row: list[StageWanted]) -> None:
        self._refuse_after_the_end(row[0])
        wanted, version = [], [code_version("megatron.corpus.filtering:run_filters")]
        names: dict[str, int] = {}
        for stage in row:
            address, options = stage_address(stage), filter_options(stage)
            names[stage.name] = names.get(stage.name, 0) + 1
            name = stage.name if names[stage.name] == 1 else f"{stage.name}-{names[stage.name]}"
            wanted.append([name, address, _json(options, stage.where)])
            with _errors_at(stage):  # reports a missing file or package now, not in every task
                filtering.filters_of(wanted[-1:])
            version += [code_version(address), *code_of_options(options)]
        options = dict(filters=wanted, samples=self.recipe.samples)
        reads = self.stages[-1].makes
        folders = [
            self._task("filter", filtering.run_filters, [Path(shard)], options, f"shard {number}", version)
            for number, shard in enumerate(reads)
        ]
        makes = [f"{folder}/{SHARD}" for folder in folders]
        self.stages.append(PlannedStage("filter", {self._phase("filter"): folders}, reads, makes, row[0].where))

    def add_phases(self, stage: StageWanted) -> None:
        self._refuse_after_the_end(stage)
        address = stage_address(stage)
        options = _json(phase_options(stage), stage.where)
        reads = self.stages[-1].makes
        with _errors_at(stage):
            phases = load(address, stage.where)(options, len(reads), int(self.recipe.task_memory_gb * 1e9))
        made: dict[str, list[Path]] = {"documents": [Path(shard) for shard in reads]}
        ends = bool(getattr(module_of(address), "MAKES_TOKENS", False))
        named: dict[str, list[str]] = {}
        for phase in phases:
            if phase.name in made:
                raise AssertionError(f"{address}: two phases are called {phase.name}")
            last = phase is phases[-1]
            name = f"{stage.name.replace(':', '.')}.{phase.name}"
            folders = self._tasks_of_phase(phase, name, made, options, address, joins=last and not ends)
            made[phase.name] = [Path(folder) for folder in folders]
            named[self._phase(name)] = folders
        makes = folders if ends else [f"{folder}/{SHARD}" for folder in folders]
        self.stages.append(PlannedStage(stage.name, named, reads, makes, stage.where, address, options))
        self.ended_by = stage.name if ends else ""

    def _tasks_of_phase(self, phase: StagePhase, name: str, made, options, address: str, joins: bool) -> list[str]:
        inputs, own = phase.split(made), phase.own(made)
        if own and len(own) != len(inputs):
            raise AssertionError(
                f"{address}: phase {phase.name}: {len(inputs)} tasks and {len(own)} options of their own"
            )
        version = [code_version(address), code_version(_address(phase.run))]
        return [
            self._task(
                name,
                phase.run,
                paths,
                options | _json(own[number], address) if own else options,
                f"task {number} of {len(inputs)}",
                version,
                joins,
            )
            for number, paths in enumerate(inputs)
        ]

    def _refuse_after_the_end(self, stage: StageWanted) -> None:
        if self.ended_by:
            raise UsageError(
                f"{stage.where}: {stage.name} comes after {self.ended_by}, which makes tokens",
                do=f"put {self.ended_by} last",
            )

    def _phase(self, name: str) -> str:
        return f"{len(self.stages):02}-{name}"

    def _task(self, name, run, inputs: TaskInputs, options, about: str, version: list[str], joins=False) -> str:
        """Add a task unless an equal one exists; return its folder."""
        names, marks, needs = [], [], {}
        for one in inputs:
            if isinstance(one, (list, tuple)):
                path, mark = self._list(one)
                maker = path
            else:
                path = str(one)
                maker, mark = self._marked(path)
            names.append(path)
            marks.append(mark)
            needs |= {maker: True} if maker else {}
        files = self.digests.of_option_files(options)
        function = _address(run)
        what = _hash([function, version, options, files, marks, joins])
        folder = f"{self._phase(name)}/{what}"
        where = "tasks of " + name if not about else f"{name}, {about}"
        task = CorpusTask(folder, function, tuple(names), tuple(needs), options, joins, where)
        self.tasks.setdefault(folder, task)
        return folder

    def _marked(self, path: str) -> tuple[str, Any]:
        """(the task that writes a path, or ""; an identifier of its contents)."""
        maker = _maker(path)
        if maker in self.tasks:
            return maker, [maker.rpartition("/")[2], path[len(maker) :]]
        return "", self.digests.of(path)

    def _list(self, paths: Sequence[Path]) -> tuple[str, str]:
        """(name of a list of paths, an identifier of their contents), computed once per list."""
        if id(paths) not in self._known_lists:
            texts = tuple(map(str, paths))
            name = LIST + _hash(texts)
            self.lists[name] = texts
            self._known_lists[id(paths)] = paths, name, _hash([self._marked(path)[1] for path in texts])
        return self._known_lists[id(paths)][1:]


def _maker(path: str) -> str:
    """The folder of the task that writes a path below `tasks/`."""
    return "/".join(path.split("/", 2)[:2])


@contextmanager
def _errors_at(stage: StageWanted):
    """A context that adds the line of the recipe to errors of a stage or filter."""
    try:
        yield
    except Failure as error:
        raise type(error)(f"{stage.where}: {stage.name}: {error.what}", error.why, error.do) from None
    except Exception as error:
        raise SettingsError(f"{stage.where}: {stage.name}: {type(error).__name__}: {error}") from error


def _describe(piece: shards.InputPiece) -> str:
    if piece.start is None:
        return piece.path
    return f"{piece.path} (bytes {piece.start:,} to {piece.stop:,})"


def _address(function: Callable) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    assert "<" not in name and "." not in function.__qualname__, f"{name} is no function of a module"
    return name


def _json(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options converted to JSON and back, so that they are equal in all processes."""
    try:
        return json.loads(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{where}: options are numbers, texts, lists and mappings: {error}") from None


def _hash(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _python() -> str:
    import platform

    return "python " + ".".join(platform.python_version_tuple()[:2])


# ---------------------------------------------------------------------------------------------------- on the disk


def save_plan(plan: CorpusPlan, output: Path) -> Path:
    """Write the plan for workers in other processes."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / "plan.json"
    replace_file(path, plan.to_json().encode())
    return path


def save_lists(plan: CorpusPlan, output: Path) -> None:
    """Write the plan's lists for workers: a task that is sent to another machine only has their names."""
    (output / LISTS).mkdir(parents=True, exist_ok=True)
    for name, paths in plan.lists.items():
        path = output / LISTS / f"{name.removeprefix(LIST)}.json"
        if not path.exists():  # the name is the hash of the contents
            replace_file(path, json.dumps(paths).encode())


def paths_of(task: CorpusTask, output: Path) -> list[Path]:
    """The input paths of a task, for a worker."""
    base = output / TASKS
    paths: list[Path] = []
    for name in task.inputs:
        paths += _listed(name, output) if name.startswith(LIST) else [base / name]
    return paths


@lru_cache(maxsize=8)
def _listed(name: str, output: Path) -> list[Path]:
    path = output / LISTS / f"{name.removeprefix(LIST)}.json"
    try:
        return [output / TASKS / one for one in json.loads(path.read_text())]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read", str(error), "run the same command again: it writes it") from None


def load_plan(output: Path) -> Optional[CorpusPlan]:
    """The plan of the last run into this folder; None if there was none."""
    try:
        return CorpusPlan.from_json((output / "plan.json").read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None
