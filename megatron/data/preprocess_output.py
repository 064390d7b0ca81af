# SPDX-License-Identifier: Apache-2.0
"""The last step of preprocessing: the workers' files become `<prefix>_<key>_document.{bin,idx}`, or another format's."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data.formats import MEGATRON, Format, endings_of, open_tokens
from megatron.data.indexed import LENGTH_TYPE
from megatron.data.preprocess_worker import KINDS, Shared
from megatron.data.workspace import Workspace, append_file, publish, write_at
from megatron.errors import DataError
from megatron.storage.durable import replace_file
from megatron.tokenizer.base import Tokenizer

PLAIN_TEXT = """python -c 'import json, sys; print(json.dumps({"text": sys.stdin.read()}))' < x.txt > x.jsonl"""


@dataclass
class Totals:
    """What one run wrote: `outputs` maps each key to its prefix and numbers of documents, sequences, tokens."""

    outputs: dict[str, dict]
    rejected: int
    rejected_path: str | None
    first_reason: str
    lines: int
    text_bytes: int
    seconds: float


@dataclass
class Written:
    """What the workers left in the workspace, how many partitions it is cut into, and the format that it gets."""

    shared: Shared
    partitions: int
    workspace: Workspace
    form: Format = MEGATRON


def finish(settings, tokenizer: Tokenizer, dtype: np.dtype, written: Written, seconds: float) -> Totals:
    """Join the lanes, write the indices, give everything its final name."""
    shared, partitions, workspace = written.shared, written.partitions, written.workspace
    lines = int(shared.lines.sum())
    rejected, rejected_path = _publish_rejected(settings.output_prefix, written)
    reason = first_reason(rejected_path)
    if not shared.totals[:, :, 0].any():
        why = f"{lines} lines, {rejected} rejected{reason}"
        do = "check --input and --json-keys" + (f"; all of them: {rejected_path}" if rejected else "")
        if rejected == lines and "not JSON" in reason:
            do = f"a document is a line of JSON; for a file of plain text: {PLAIN_TEXT}"
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
        outputs[key] = dict(prefix=prefix, documents=sizes[2], sequences=sizes[1], tokens=sizes[0])
    for index, output in enumerate(outputs.values()):
        publish(workspace, str(index), output["prefix"], written.form.endings)
        write_stats(output["prefix"], tokenizer_identity(tokenizer), output)
    return Totals(outputs, rejected, rejected_path, reason, lines, int(shared.progress[:, 1].sum()), seconds)


def output_prefixes(settings, form: Format = MEGATRON) -> list[str]:
    """What is written, for each key, without .bin and .idx or their like."""
    if form is not MEGATRON:
        several = len(settings.json_keys) > 1
        return [f"{settings.output_prefix}_{key}" if several else settings.output_prefix for key in settings.json_keys]
    level = "sentence" if settings.split_sentences else "document"
    return [f"{settings.output_prefix}_{key}_{level}" for key in settings.json_keys]


def replaced(prefix: str, form: Format = MEGATRON) -> str:
    """What new token files of this name take the place of, in words; "" where there are none.

    Raises DataError where files of another format have the name.
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

    Megatron-LM deals lines out to its partitions in turn. A lane counted from its own first line.
    """
    starts = np.cumsum(lines) - lines
    for partition in range(partitions):
        for lane, start in enumerate(starts.tolist()):
            yield lane, (partition - start) % partitions


def _join(written: Written, parts: list[tuple[int, int]], name: str, dtype: np.dtype, sizes: list[int]) -> None:
    """Make the token file and the index of parts in order. The first part grows, the others go as they are copied."""
    workspace, form = written.workspace, written.form
    stems = [workspace.path(f"{lane}-{target}") for lane, target in parts]
    tokens, lengths, counts = KINDS
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


def read_numbers(path: str) -> Iterator[np.ndarray]:
    """The int32 numbers of a file, a piece at a time."""
    with open(path, "rb") as file:
        while len(piece := np.fromfile(file, LENGTH_TYPE, 1 << 20)):
            yield piece


def _publish_rejected(prefix: str, written: Written) -> tuple[int, str | None]:
    """Bad lines of all lanes in order as `<prefix>.rejected.jsonl`; a list of an earlier run goes."""
    final = Path(f"{prefix}.rejected.jsonl")
    final.unlink(missing_ok=True)
    lists = [written.workspace.path(f"{lane}.rejected") for lane in range(len(written.shared.lines))]
    lists = [path for path in lists if os.path.exists(path)]
    if not lists:
        return 0, None
    with open(written.workspace.path("rejected"), "wb") as file:
        for path in lists:
            append_file(file.fileno(), path)
        os.fsync(file.fileno())
    os.replace(written.workspace.path("rejected"), final)
    return int(written.shared.progress[:, 4].sum()), str(final)


def first_reason(rejected_path: str | None) -> str:
    """Where and why the first line was set aside, to be added to their number; all lines often share the reason."""
    if rejected_path is None:
        return ""
    with open(rejected_path, encoding="utf-8", errors="replace") as file:
        first = json.loads(file.readline())
    return f"; the first: {first['file']}, line {first['line']}: {first['reason']}"


def tokenizer_identity(tokenizer: Tokenizer) -> dict:
    return dict(
        type=tokenizer.name, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, fingerprint=tokenizer.fingerprint
    )


def write_stats(prefix: str, tokenizer: dict | None, numbers: dict) -> None:
    """`<prefix>.stats.json`: which vocabulary made the ids, and how much there is. Checked by merge_datasets.py."""
    counts = {name: value for name, value in numbers.items() if name != "prefix"}
    text = json.dumps(dict(tokenizer=tokenizer, **counts), indent=1) + "\n"
    replace_file(Path(f"{prefix}.stats.json"), text.encode())
