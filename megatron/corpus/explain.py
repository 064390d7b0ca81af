# SPDX-License-Identifier: Apache-2.0
"""Explain why a document was kept or dropped: the stage, the rule and its figures.

A document is named by its url, its id, or its line in the input (`books.jsonl:1207`, from 1). It is searched in the shards
of the first stage and followed through the others: filters run again, since they are deterministic; for a stage of phases
the `explain` of its module is called, or its notes are read, or its output is searched. Of several equal documents in a
shard, the k-th input is assumed to be the k-th output.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megatron.corpus.commit import read_receipt
from megatron.corpus.documents import DROPPED, decode, encode, note_of, read_lines
from megatron.corpus.filtering import filters_of, judged
from megatron.corpus.plan import TASKS, CorpusPlan, PlannedStage
from megatron.corpus.registry import load, module_of
from megatron.corpus.shards import InputPiece, document_of, lines_of
from megatron.corpus.stage import Document
from megatron.data.json_input import BadLine
from megatron.errors import DataError

MOST = 5  # documents of one name that are followed


@dataclass(frozen=True)
class StageResult:
    """The result of a stage, or of one of its filters, for a document.

    fate: kept, changed, dropped, set aside, or unknown
    """

    stage: str
    fate: str
    reason: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    place: str = ""


@dataclass(frozen=True)
class DocumentHistory:
    """A document with the results of all stages."""

    document: Optional[Document]
    place: str
    said: list[StageResult]  # a key of `explain --json`

    @property
    def fate(self) -> str:
        return self.said[-1].fate if self.said else "unknown"


@dataclass(frozen=True)
class _At:
    """The position of a document in the shards between two stages, from 0."""

    shard: int
    row: int
    document: Document


def explain(plan: CorpusPlan, output: Path, name: str) -> list[DocumentHistory]:
    """The histories of the documents with this name. Raises DataError if there is none."""
    base = output / TASKS
    at_line = _line_of(plan, name)
    if at_line:
        return [_of_line(plan, base, *at_line)]
    histories = []
    for at in _named(plan, base, name):
        histories.append(follow(plan, base, at))
        if len(histories) == MOST:
            break
    histories = histories or list(_rejected(plan, base, name))
    if not histories:
        raise DataError(
            f"no document has the url or id {name!r}",
            do="give it exactly as in the document, or the line of an input file: FILE:NUMBER",
        )
    return histories


def follow(plan: CorpusPlan, base: Path, at: _At, place: str = "") -> DocumentHistory:
    """The results of all stages for a document of the first stage's shards, up to the one that dropped it."""
    history = DocumentHistory(at.document, place or f"shard {at.shard}, document {at.row}", [])
    now: Optional[_At] = at
    for stage in plan.stages[1:]:
        if stage.name == "filter":
            now = _through_filters(plan, base, stage, now, history.said)
        elif getattr(module_of_stage(stage), "MAKES_TOKENS", False):
            history.said.append(_in_tokens(plan, base, stage, now))
        else:
            now = _through_phases(plan, base, stage, now, history.said)
        if now is None:
            break
    return history


# ---------------------------------------------------------------------------------------------------- finding


def _named(plan: CorpusPlan, base: Path, name: str) -> Iterator[_At]:
    mark = encode(name)[1:-1]
    for number, shard in enumerate(plan.stages[0].makes):
        if not (base / shard).exists():
            continue
        for row, line in enumerate(read_lines(base / shard)):
            if mark in line or name.isdigit() and name.encode() in line:
                document = decode(line)
                if name in (document.get("url"), str(document.get("id"))):
                    yield _At(number, row, document)


def _rejected(plan: CorpusPlan, base: Path, name: str) -> Iterator[DocumentHistory]:
    [folders] = plan.stages[0].phases.values()
    for folder in dict.fromkeys(folders):
        path = base / folder / "rejected.jsonl"
        for line in read_lines(path) if path.exists() else ():
            entry = decode(line)
            if name in entry["begins"]:
                result = StageResult("shards", "set aside", entry["reason"], dict(bytes=entry["bytes"]))
                yield DocumentHistory(None, plan.tasks[folder].inputs[entry["input"]], [result])


def _line_of(plan: CorpusPlan, name: str) -> Optional[tuple[str, int]]:
    """(path of an input file, number of the line from 0) where a name is FILE:NUMBER."""
    file, _, number = name.rpartition(":")
    if not file or not number.isdigit():
        return None
    [folders] = plan.stages[0].phases.values()
    inputs = dict.fromkeys(path for folder in folders for path in plan.tasks[folder].inputs)
    wanted = str(Path(file).absolute())
    paths = [path for path in inputs if path == wanted] or [path for path in inputs if path.endswith(f"/{file}")]
    if not paths:
        return None
    if len(paths) > 1:
        raise DataError(
            f"{file} matches {len(paths)} input files: {paths[0]}, {paths[1]} ...", do="give the whole path"
        )
    if int(number) < 1:
        raise DataError(f"{name}: lines are counted from 1")
    return paths[0], int(number) - 1


def _of_line(plan: CorpusPlan, base: Path, path: str, wanted: int) -> DocumentHistory:
    """Read the pieces of the file again up to the line."""
    [folders] = plan.stages[0].phases.values()
    makes = plan.stages[0].makes
    before = 0
    for folder in dict.fromkeys(folders):
        task, documents = plan.tasks[folder], 0
        if path not in task.inputs:
            continue
        for piece in _pieces(base / folder, task.options["pieces"]):
            here = task.inputs[piece["input"]] == path
            if not here or wanted >= before + piece["lines"]:
                before += piece["lines"] * here
                documents += piece["documents"]
                continue
            shards = [number for number, shard in enumerate(makes) if shard.startswith(f"{folder}/")]
            return _of_row(plan, base, task, piece, wanted - before, documents, shards)
    raise DataError(f"{path}: it has {before} lines that were read", do="lines are counted from 1")


def _pieces(folder: Path, wanted: Sequence) -> list[dict]:
    try:
        records = json.loads((folder / "pieces.json").read_text())
    except (OSError, ValueError):
        raise DataError(f"{folder}: the shards do not exist yet", do="run the recipe first") from None
    return [dict(one, piece=piece) for one, piece in zip(records, wanted, strict=True)]


def _of_row(plan, base: Path, task, piece: dict, row: int, documents: int, shards: list[int]) -> DocumentHistory:
    which, start, stop, parts = piece["piece"]
    path = task.inputs[which]
    options = task.options
    for line in lines_of(InputPiece(path, start, stop, parts), options["most"], options.get("separator")):
        place = f"{path}, line {row + 1} of its piece"
        blank = not line.data or line.data.isspace()
        try:
            document = None if blank else document_of(line, options["text_key"])
        except BadLine as error:
            document = None
            if line.row == row:
                result = StageResult("shards", "set aside", str(error), dict(bytes=line.size))
                return DocumentHistory(None, place, [result])
        if line.row < row:
            documents += document is not None
        elif document is None:
            return DocumentHistory(None, place, [StageResult("shards", "set aside", "a blank line")])
        else:
            break
    for number in shards:  # the shards of a task hold its documents in order
        here = sum(1 for _ in read_lines(base / plan.stages[0].makes[number]))
        if documents < here:
            return follow(plan, base, _At(number, documents, document), place)
        documents -= here
    raise DataError(f"{path}: its shards do not have the line", do="run the same command again")


# ---------------------------------------------------------------------------------------------------- following


def _through_filters(
    plan: CorpusPlan, base: Path, stage: PlannedStage, at: _At, results: list[StageResult]
) -> Optional[_At]:
    [(phase, folders)] = stage.phases.items()
    options = plan.tasks[folders[at.shard]].options
    after: Optional[Document] = copy.deepcopy(at.document)
    for step in judged(filters_of(options["filters"]), after):
        after = step.verdict.document
        fate = "dropped" if after is None else "changed" if step.changed else "kept"
        reason = step.verdict.reason if fate != "kept" else ""
        results.append(StageResult(f"{phase}: {step.name}", fate, reason, dict(step.verdict.figures)))
    if after is None:
        return None
    before = sum(row < at.row for row in _rows_of(base / stage.reads[at.shard], encode(at.document)))
    rows = _rows_of(base / stage.makes[at.shard], encode(after))
    return _At(at.shard, rows[min(before, len(rows) - 1)] if rows else -1, after)


def _through_phases(
    plan: CorpusPlan, base: Path, stage: PlannedStage, at: _At, results: list[StageResult]
) -> Optional[_At]:
    answer = _explained(base, stage, at)
    if answer is not None and answer.get("document") is None:
        results.append(StageResult(stage.name, "dropped", answer.get("reason", ""), dict(answer.get("figures", {}))))
        return None
    document = at.document if answer is None else answer["document"]
    after = _search(base, stage, at.shard, document)
    if after is None:
        reason = "" if _complete(base, stage) else "it has not been through this stage yet"
        results.append(StageResult(stage.name, "dropped" if not reason else "unknown", reason))
        return None
    fate = "kept" if answer is None and encode(after.document) == encode(at.document) else "changed"
    more = answer or {}
    place = f"shard {after.shard}, document {after.row}"
    results.append(StageResult(stage.name, fate, more.get("reason", ""), dict(more.get("figures", {})), place))
    return after


def module_of_stage(stage: PlannedStage):
    load(stage.address, stage.where)
    return module_of(stage.address)


def _explained(base: Path, stage: PlannedStage, at: _At) -> Optional[dict]:
    """The result of the stage's own `explain`, or its note, where its tasks are done."""
    if at.row < 0 or not _complete(base, stage):
        return None
    hook = getattr(module_of_stage(stage), "explain", None)
    if hook is None and len(stage.makes) != len(stage.reads):
        return None
    if hook is None:
        note = note_of((base / stage.makes[at.shard]).parent, at.row, [DROPPED])
        more = {key: value for key, value in (note or {}).items() if key not in ("row", "reason", "id", "url")}
        return note and dict(reason=note.get("reason", ""), figures=more)
    made = {name.rpartition(".")[2]: [base / folder for folder in folders] for name, folders in stage.phases.items()}
    made["documents"] = [base / shard for shard in stage.reads]
    return hook(made, at.shard, at.row, copy.deepcopy(at.document), dict(stage.options))


def _complete(base: Path, stage: PlannedStage) -> bool:
    return all(read_receipt(base / folder) for folders in stage.phases.values() for folder in folders)


def _search(base: Path, stage: PlannedStage, first: int, document: Document) -> Optional[_At]:
    """The document in the output shards of a stage: the same line, else one with the same url or id."""
    numbers = sorted(range(len(stage.makes)), key=lambda number: number != first)
    line = encode(document)
    names = [(key, document[key]) for key in ("id", "url") if document.get(key)]
    near: Optional[_At] = None
    for number in numbers:
        path = base / stage.makes[number]
        for row, other in enumerate(read_lines(path) if path.exists() else ()):
            if other == line:
                return _At(number, row, document)
            if near is None and names and encode(names[0][1]) in other:
                candidate = decode(other)
                if all(candidate.get(key) == value for key, value in names):
                    near = _At(number, row, candidate)
    return near


def _in_tokens(plan: CorpusPlan, base: Path, stage: PlannedStage, at: _At) -> StageResult:
    """The number of the document in the token files."""
    first = next(iter(stage.phases.values()))
    receipts = [read_receipt(base / folder) for folder in first]
    if at.row < 0 or not all(receipts) or not all(read_receipt(base / folder) for folder in stage.makes):
        return StageResult(stage.name, "unknown", "the token files are not complete")
    rows = [receipt["counts"]["documents"] for receipt in receipts]
    size = -(-len(first) // len(stage.makes))
    begin = at.shard // size * size
    dataset = f" of dataset {at.shard // size}" * (len(stage.makes) > 1)
    return StageResult(stage.name, "kept", place=f"document {sum(rows[begin : at.shard]) + at.row}{dataset}, from 0")


def _rows_of(path: Path, line: bytes) -> list[int]:
    """The rows of a shard that equal this line."""
    return [row for row, other in enumerate(read_lines(path) if path.exists() else ()) if other == line]


def history_lines(history: DocumentHistory) -> list[str]:
    """A history as lines of text."""
    document = history.document or {}
    name = document.get("url") or document.get("id") or history.place
    lines = [f"{name}: {FATES[history.fate]}"]
    if document:
        lines.append(f"  {history.place}, {len(document['text']):,} characters: {document['text'][:80]!r}")
    for result in history.said:
        figures = ", ".join(f"{key} {_short(value)}" for key, value in result.figures.items())
        line = f"  {result.stage}: {result.fate}" + f" ({result.reason})" * bool(result.reason)
        lines.append(line + f": {figures}" * bool(figures) + f" -> {result.place}" * bool(result.place))
    return lines


FATES = {"set aside": "set aside: not a document", "unknown": "not known yet", "kept": "kept", "changed": "kept"}
FATES["dropped"] = "dropped"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:80]
