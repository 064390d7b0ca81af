# SPDX-License-Identifier: Apache-2.0
"""The last step of preprocessing: join the workers' files into `<prefix>_<key>_document.{bin,idx}`, or another format.

Then what a command prints: progress lines, and totals at the end."""

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import contamination, origin
from megatron.data.contamination import Screen
from megatron.data.formats import MEGATRON, Format, endings_of, open_tokens
from megatron.data.indexed import LENGTH_TYPE
from megatron.data.json_input import STDIN, Source, to_lines
from megatron.data.preprocess_encode import SpecialNames
from megatron.data.preprocess_worker import KINDS, Shared
from megatron.data.vocabulary import tokenizer_identity
from megatron.data.workspace import Workspace, append_file, publish, write_at
from megatron.errors import DataError
from megatron.storage.durable import replace_file
from megatron.telemetry.figures import duration, size
from megatron.tokenizer.base import Tokenizer

NAMES = 4  # of special tokens in a note
COMPANIONS = (origin.ENDING, contamination.ENDING)  # optional files next to token files


@dataclass
class Totals:
    """The results of a run: `outputs` maps each key to its prefix and numbers of documents, sequences, tokens."""

    outputs: dict[str, dict]
    rejected: int
    rejected_path: str | None
    first_reason: str
    lines: int
    text_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    contamination: str = ""  # summary of the search for evaluation sets; "" without one


@dataclass
class Written:
    """The workers' results in the workspace, the number of partitions, and the output format."""

    shared: Shared
    partitions: int
    workspace: Workspace
    form: Format = MEGATRON
    screen: Screen | None = None
    sources: list[Source] | None = None  # not None: write the origins of documents


def finish(settings, tokenizer: Tokenizer, dtype: np.dtype, written: Written, seconds: float) -> Totals:
    """Join the lanes, write the indices, and rename all files to their final names."""
    shared, partitions, workspace = written.shared, written.partitions, written.workspace
    lines = int(shared.lines.sum())
    rejected_path = _publish_list(settings.output_prefix, written, "rejected")
    rejected = int(shared.progress[:, 4].sum())
    reason = first_reason(rejected_path)
    if not shared.totals[:, :, 0].any():
        why = f"{lines} lines, {rejected} rejected{reason}"
        if shared.screened[:, 0].any():
            why += f", {int(shared.screened[:, 0].sum())} texts with n-grams of evaluation sets"
        do = "check --input and --json-keys" + (f"; all of them: {rejected_path}" if rejected else "")
        if "not JSON" in reason:
            text = "plain text is read from a file whose name ends in .txt"
            do = f"a document is a line of JSON; {to_lines(settings.input[0]) if settings.lines_only else text}"
        if "a list instead of an object" in reason:
            do = f"one array? jq -c '.[]' {settings.input[0]} > lines.jsonl writes a line for each of its objects"
        if re.search(r"\(keys: [^)]*\b(messages|conversations)\b", reason):
            do = "conversations are learned as they are: finetune.py --task chat --train-data FILE; --json-keys names texts"
        raise DataError(f"no text in {', '.join(settings.input)}", why, do)
    outputs = {}
    for index, (key, prefix) in enumerate(
        zip(settings.json_keys, output_prefixes(settings, written.form), strict=True)
    ):
        parts = [(lane, index * partitions + residue) for lane, residue in _order(shared.lines, partitions)]
        parts = [part for part in parts if shared.totals[part][2]]
        if not parts:  # where empty documents do not count
            raise DataError(f"no text under the key {key!r} in {', '.join(settings.input)}", do="check --json-keys")
        sizes = np.sum([shared.totals[part] for part in parts], axis=0).tolist()
        _join(written, parts, str(index), dtype, sizes)
        _write_companions(written, index, parts, sizes)
        outputs[key] = dict(prefix=prefix, documents=sizes[2], sequences=sizes[1], tokens=sizes[0])
    for index, output in enumerate(outputs.values()):
        publish_dataset(workspace, str(index), output["prefix"], written.form)
        write_stats(output["prefix"], tokenizer_identity(tokenizer), output)
    contaminated = _publish_list(settings.output_prefix, written, "contaminated")
    summary = describe_contamination(written.screen, shared, contaminated) if written.screen else ""
    text_bytes = int(shared.progress[:, 1].sum())
    notes = tuple(notes_of(settings, tokenizer, shared))
    return Totals(outputs, rejected, rejected_path, reason, lines, text_bytes, seconds, notes, summary)


def notes_of(settings, tokenizer: Tokenizer, shared: Shared) -> Iterator[str]:
    """What a user may not have meant in texts that became tokens as they are."""
    if crlf := int(shared.progress[:, 5].sum()):
        yield (
            rf"{crlf:,} line ends inside texts are those of Windows (\r\n), which become other tokens than \n: dos2unix "
            "changes a .txt; in JSON, replace them before it is written"
        )
    searched, named, *counts = shared.named.sum(axis=0).tolist()
    if named:
        found = sorted(zip(counts, SpecialNames(tokenizer).names), key=lambda one: -one[0])
        names = [name for count, name in found if count]
        more = f" and {len(names) - NAMES} more" * (len(names) > NAMES)
        sample = "" if searched == shared.progress[:, 0].sum() else " that were searched"
        yield (
            f"{named:,} of {searched:,} documents{sample} have {', '.join(names[:NAMES])}{more}, which are text here; "
            "--parse-special makes them tokens"
        )
    if not settings.append_eod and not settings.split_sentences and tokenizer.eod is not None:
        yield (
            "without --append-eod nothing marks where a document ends: a model trained on them reads the next one as its "
            "continuation, and does not learn to stop"
        )


def describe_contamination(screen: Screen, shared: Shared, path: str | None) -> str:
    """A line with the n-grams of evaluation sets that were found, and the action taken."""
    names = ", ".join(f"{one.name} ({one.items:,} items)" for one in screen.index.sets)
    texts, left = shared.screened.sum(axis=0).tolist()
    if not texts:
        return f"no text holds an n-gram of {names}"
    items = screen.index.sets_of(np.flatnonzero(shared.ngrams.any(axis=0)))
    matches = ", ".join(
        f"{items[one.name]:,} of {one.items:,} items of {one.name}" for one in screen.index.sets if one.name in items
    )
    done = dict(count="kept as they are", drop="dropped", cut=f"cut into {left:,} pieces without them")[screen.action]
    return f"{texts:,} text{'s share' if texts > 1 else ' shares'} n-grams with {matches}: {done}; see {path}"


def _write_companions(written: Written, index: int, parts: list[tuple[int, int]], sizes: list[int]) -> None:
    """Write the origins and the contamination counts of a key's documents into the workspace."""
    workspace, shared = written.workspace, written.shared
    if written.sources is not None:
        paths = [workspace.path(f"{lane}-{target}{KINDS[3]}") for lane, target in parts]
        files = [
            dict(path=os.path.abspath(one.path) if one.path != STDIN else "stdin", bytes=one.size)
            | (dict(separator=one.separator) if one.separator else {})
            | (dict(columns=list(one.columns)) if one.columns else {})
            for one in written.sources
        ]
        rows = (piece for path in paths for piece in read_numbers(path, origin.ROW))
        origin.write_origins(workspace.path(f"{index}{origin.ENDING}"), files, sizes[2], rows, sizes[0])
    if written.screen:
        screen, before = written.screen, np.array(shared.ngrams[index])
        counts = before if screen.action == "count" else np.zeros_like(before)
        texts, left = shared.screened[index].tolist()
        about = dict(
            sets=[[one.name, one.items] for one in screen.index.sets],
            items=screen.index.sets_of(np.flatnonzero(before)),
            action=screen.action,
            longest=screen.index.longest,
            shortest=screen.index.shortest,
            documents=sizes[2],
            contaminated=texts,
            removed=texts - left if screen.action == "drop" else 0,
        )
        path = workspace.path(f"{index}{contamination.ENDING}")
        contamination.Contained(screen.index.hashes, counts, before, about).save(path)


def publish_dataset(workspace: Workspace, name: str, final: str, form: Format) -> None:
    """Rename token files and their companions to their final names."""
    for ending in COMPANIONS:  # before publishing: no companion of an older run may stay next to the new files
        Path(final + ending).unlink(missing_ok=True)
    publish(workspace, name, final, form.endings)
    for ending in COMPANIONS:
        if os.path.exists(workspace.path(name + ending)):
            os.replace(workspace.path(name + ending), final + ending)


def output_prefixes(settings, form: Format = MEGATRON) -> list[str]:
    """The output prefix of each key, without .bin and .idx or other endings."""
    if form is not MEGATRON:
        several = len(settings.json_keys) > 1
        return [f"{settings.output_prefix}_{key}" if several else settings.output_prefix for key in settings.json_keys]
    level = "sentence" if settings.split_sentences else "document"
    return [f"{settings.output_prefix}_{key}_{level}" for key in settings.json_keys]


def replaced(prefix: str, form: Format = MEGATRON) -> str:
    """A note on existing token files that will be replaced; "" if there are none.

    Raises DataError if files of another format have the prefix.
    """
    there = endings_of(prefix)
    files = [path for path in (Path(prefix + ending) for ending in there) if path.exists()]
    if not files:
        return ""
    if there != form.endings:
        do = f"give another --output-prefix than {prefix}, or remove {' and '.join(map(str, files))}"
        raise DataError(f"{files[-1]} is there, and would share the name with {prefix}{form.endings[-1]}", do=do)
    try:
        return f"replaces {prefix} ({open_tokens(prefix).num_tokens:,} tokens)"
    except (DataError, OSError):
        return f"replaces {' and '.join(map(str, files))}"


def _order(lines: np.ndarray, partitions: int) -> Iterator[tuple[int, int]]:
    """(lane, residue) in the order of the output: all of partition 0, then all of partition 1, ...

    Megatron-LM deals lines out to its partitions in turn. Each lane counts from its own first line.
    """
    starts = np.cumsum(lines) - lines
    for partition in range(partitions):
        for lane, start in enumerate(starts.tolist()):
            yield lane, (partition - start) % partitions


def _join(written: Written, parts: list[tuple[int, int]], name: str, dtype: np.dtype, sizes: list[int]) -> None:
    """Join parts in order into a token file and its index: append to the first part, delete each other after its copy."""
    workspace, form = written.workspace, written.form
    stems = [workspace.path(f"{lane}-{target}") for lane, target in parts]
    tokens, lengths, counts, _ = KINDS
    final = workspace.path(name + form.endings[0])
    os.rename(stems[0] + tokens, final)
    number = os.open(final, os.O_RDWR)
    try:
        write_at(number, form.make_head(dtype, sizes[0]), 0)
        for stem in stems[1:]:
            append_file(number, stem + tokens, form.head)
            os.unlink(stem + tokens)
        os.fsync(number)
    finally:
        os.close(number)
    stream = lambda kind: (piece for stem in stems for piece in read_numbers(stem + kind))
    index = workspace.path(name + form.endings[-1])
    form.write_index(index, dtype, sizes[1], sizes[2], lambda: stream(lengths), lambda: stream(counts))


def read_numbers(path: str, dtype: np.dtype = LENGTH_TYPE) -> Iterator[np.ndarray]:
    """The numbers of a file, piece by piece."""
    with open(path, "rb") as file:
        while len(piece := np.fromfile(file, dtype, 1 << 20)):
            yield piece


def _publish_list(prefix: str, written: Written, name: str) -> str | None:
    """Join the lists of all lanes into `<prefix>.<name>.jsonl`, replacing that of an earlier run; None if it is empty."""
    final = Path(f"{prefix}.{name}.jsonl")
    final.unlink(missing_ok=True)
    lists = [written.workspace.path(f"{lane}.{name}") for lane in range(len(written.shared.lines))]
    lists = [path for path in lists if os.path.exists(path)]
    if not lists:
        return None
    with open(written.workspace.path(name), "wb") as file:
        for path in lists:
            append_file(file.fileno(), path)
        os.fsync(file.fileno())
    os.replace(written.workspace.path(name), final)
    return str(final)


def first_reason(rejected_path: str | None) -> str:
    """A note on the first rejected line and its reason, which often applies to all of them."""
    if rejected_path is None:
        return ""
    with open(rejected_path, encoding="utf-8", errors="replace") as file:
        first = json.loads(file.readline())
    return f"; the first: {first['file']}, line {first['line']}: {first['reason']}"


def write_stats(prefix: str, tokenizer: dict | None, numbers: dict) -> None:
    """Write `<prefix>.stats.json`: the vocabulary of the ids, and numbers of documents, sequences and tokens."""
    counts = {name: value for name, value in numbers.items() if name != "prefix"}
    text = json.dumps(dict(tokenizer=tokenizer, **counts), indent=1) + "\n"
    replace_file(Path(f"{prefix}.stats.json"), text.encode())


class Reporter:
    """Prints Megatron-LM's progress lines, with tokens/s and the time left; on a terminal, updates a single line."""

    def __init__(self, interval: int):
        self.interval, self.next, self.last = interval, interval, -1.0
        self.terminal = sys.stderr.isatty()

    def __call__(self, progress) -> None:
        complete = 0 < progress.total_input <= progress.input_bytes
        if progress.documents < self.next or (progress.seconds - self.last < 0.1 and not complete):
            return
        self.next = progress.documents // self.interval * self.interval + self.interval
        self.last = seconds = progress.seconds
        line = f"Processed {progress.documents} documents ({progress.documents / seconds:.1f} docs/s, "
        line += f"{size(progress.text_bytes / seconds)}/s). {progress.tokens / seconds / 1e6:.2f} M tokens/s"
        if progress.total_input and progress.input_bytes:
            share = min(1.0, progress.input_bytes / progress.total_input)
            line += f", {share:.0%}, ETA {duration(seconds / share - seconds)}"
        print(
            f"\r{line}\033[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal and self.last >= 0:
            print(file=sys.stderr)


def print_totals(totals, seconds: float) -> None:
    for key, output in totals.outputs.items():
        documents, sequences, tokens = output["documents"], output["sequences"], output["tokens"]
        print(f"{output['prefix']}{' and '.join(endings_of(output['prefix']))} (key {key!r}):")
        print(f"  Total documents num: {documents}")
        print(f"  Total sentences num: {sequences}")
        print(f"  Total tokens num: {tokens}")
        print(f"  Average tokens per document: {tokens / documents:.2f}")
        print(f"  Average tokens per sentence: {tokens / sequences:.2f}")
    if totals.rejected:
        print(
            f"WARNING: {totals.rejected} of {totals.lines} lines are no documents: see {totals.rejected_path}"
            f"{totals.first_reason}"
        )
    for words in totals.notes:
        print(f"note: {words}")
    if totals.contamination:
        print(totals.contamination)
    print(f"{size(totals.text_bytes)} in {seconds:.2f} s ({size(totals.text_bytes / seconds)}/s)")
