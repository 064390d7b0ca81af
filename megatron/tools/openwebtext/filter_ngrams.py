# SPDX-License-Identifier: Apache-2.0
"""Cut the n-grams of evaluation sets out of JSON lines: Megatron-LM's filter_ngrams with its flags.

    python -m megatron.tools.openwebtext.filter_ngrams --tasks lambada --lambada-path lambada_test.jsonl \\
        --dedup-dataset clean.jsonl text --output decontaminated.jsonl

Two passes over the data. The first counts the documents of each n-gram: an n-gram in --key-threshold documents or more
is a common phrase and is kept. The second cuts n-grams with --remove-char-each-side characters on each side, to the end
of a sentence; it also drops pieces of up to --filter-text-char-len characters, and documents of more than --splits-count
pieces.

Megatron-LM downloads sets other than LAMBADA; here they are files: --tasks lambada squad --task-files squad=dev.jsonl.
As there, the questions are used. An index of megatron.tools.contamination works too: --load-dictionary INDEX.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from megatron.data.contamination import Hits, NgramIndex, cut
from megatron.data.evaluation_sets import read_items
from megatron.data.json_input import find_sources, read_blocks
from megatron.errors import DataError, Failure, SettingsError, UsageError, run_main
from megatron.settings.positional import parse_one, refuse_below
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file

KEYS = dict(  # task -> key of its texts; LAMBADA's is "text"
    squad="question",
    natural_questions="question",
    triviaqa="question",
    webqa="question",
    race="question",
    drop="question",
    coqa="questions",
    piqa="goal",
)
BLOCK = 1 << 20  # bytes of lines that a process gets at a time


@dataclass(frozen=True)
class FilterOptions:
    """Megatron-LM's names and defaults; --num-threads is one for each core by default."""

    dedup_dataset: list[str] = setting("FILE KEY [FILE KEY ...]: JSON lines, and the key of their text")
    output: str = setting("file for the documents that are left, in the order of the input")
    tasks: Optional[list[str]] = setting(f"evaluation sets: lambada, {', '.join(KEYS)}, or names of --task-files", None)
    lambada_path: Optional[str] = setting("LAMBADA's test set, JSON lines", None)
    task_files: Optional[list[str]] = setting("NAME=FILE of each other task: JSON lines or plain text", None)
    num_threads: Optional[int] = setting("processes (default: one for each core)", None)
    max_ngram_size: int = setting("words of an n-gram", 13)
    min_ngram_size: int = setting("an item of fewer words is not looked for", 8)
    filter_text_char_len: int = setting("pieces of no more characters are left out", 200)
    key_threshold: int = setting("n-grams that are in as many documents stay", 10)
    save_dictionary: Optional[str] = setting("keep the n-grams that are cut out, an index", None)
    load_dictionary: Optional[str] = setting("cut out the n-grams of this index; nothing is counted", None)
    splits_count: int = setting("documents of more pieces are left out", 10)
    remove_char_each_side: int = setting("characters that go on each side of an n-gram", 200)


class FilterWork(NamedTuple):
    """What all processes work with."""

    index: NgramIndex
    options: FilterOptions


def main(argv: list[str]) -> None:
    """Count, cut, print the totals."""
    options = parse_one(argv, FilterOptions, "python -m megatron.tools.openwebtext.filter_ngrams", __doc__)
    pairs = check(options)
    if options.load_dictionary:
        index = NgramIndex.open(options.load_dictionary)
    else:
        index = below_threshold(read_tasks(options), pairs, options)
    if options.save_dictionary:
        index.save(options.save_dictionary)
    clean(index, pairs, options)


def check(options: FilterOptions) -> list[tuple[str, str]]:
    """Check the options; returns the pairs of file and key. Raises SettingsError and UsageError."""
    words = options.dedup_dataset
    if len(words) % 2 or not words:
        raise UsageError(
            f"--dedup-dataset {' '.join(words)}: not pairs of file and key", do="--dedup-dataset cc.jsonl text"
        )
    if not options.load_dictionary and not options.tasks:
        raise UsageError(
            "what to look for is not clear", do="--tasks lambada --lambada-path FILE, or --load-dictionary INDEX"
        )
    if not 1 <= options.min_ngram_size <= options.max_ngram_size:
        raise SettingsError(f"--min-ngram-size {options.min_ngram_size} --max-ngram-size {options.max_ngram_size}")
    least = dict(num_threads=1, key_threshold=1, splits_count=0, filter_text_char_len=0, remove_char_each_side=0)
    refuse_below(options, least)
    pairs = list(zip(words[::2], words[1::2]))
    for path, _ in pairs:
        source = find_sources([path])[0]
        if source.path == "-" or source.compression == "pipe":
            raise DataError(f"--dedup-dataset {path}: it is read twice, so it has to be a file")
        if os.path.exists(options.output) and os.path.samefile(path, options.output):
            raise SettingsError(f"--output {options.output} is the input", do="give another name")
    return pairs


def read_tasks(options: FilterOptions) -> NgramIndex:
    """Read the n-grams of all tasks."""
    files = {}
    for word in options.task_files or ():
        name, equals, path = word.partition("=")
        if not equals:
            raise UsageError(f"--task-files {word}: NAME=FILE is wanted")
        files[name] = path
    if options.lambada_path:
        files["lambada"] = options.lambada_path
    index = NgramIndex.empty(options.max_ngram_size, options.min_ngram_size)
    for task in options.tasks or ():
        if task not in files:
            flag = "--lambada-path FILE" if task == "lambada" else f"--task-files {task}=FILE"
            raise UsageError(f"--tasks {task}: where is it?", do=flag)
        keys = [KEYS[task]] if task in KEYS else None
        index = index.with_set(task, read_items(files[task], keys), [files[task]])
        print(f" After task {task} entities in ngrams {len(index.hashes)}", flush=True)
    return index


def below_threshold(index: NgramIndex, pairs: list[tuple[str, str]], options: FilterOptions) -> NgramIndex:
    """Remove n-grams that are in too many documents of the data."""
    counts = np.zeros(len(index.hashes), np.int64)
    for ngrams in over_blocks(count_block, pairs, FilterWork(index, options)):
        np.add.at(counts, ngrams, 1)
    common = np.flatnonzero(counts >= options.key_threshold)
    print(f" Ngrams below threshold {len(counts) - len(common)}", flush=True)
    return index.without(common) if len(common) else index


def clean(index: NgramIndex, pairs: list[tuple[str, str]], options: FilterOptions) -> None:
    """Write the cleaned data; the file appears when it is complete."""
    Path(options.output).parent.mkdir(parents=True, exist_ok=True)
    prefix, sums = "-".join(options.tasks or ["index"]), np.zeros(6, np.int64)
    with whole_file(options.output) as file:
        for rows, counted in over_blocks(clean_block, pairs, FilterWork(index, options)):
            for number, row in rows:
                for piece, record in enumerate(row):
                    own = f"{prefix}-{sums[0] + number:010d}-{piece:04d}"
                    record["split_id"] = f"{record['split_id']}-{own}" if "split_id" in record else own
                    file.write(json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            sums += counted
    docs, split, ignored, many, trimmed, bad = sums.tolist()
    more = f" bad lines {bad}" if bad else ""
    print(f" Total docs {docs} splitted {split} ignored {ignored} splits > theshold {many} trimmed {trimmed}{more}")


# -- in the processes --------------------------------------------------------------------------------------------------


def count_block(work: FilterWork, block: bytes, key: str) -> np.ndarray:
    """The n-grams of a block, each once per text that has it. Of overlapping n-grams the first counts."""
    texts = [record[key] for record in records_of(block, key) if record is not None]
    hits = work.index.find(texts)
    ngrams = []
    for mine in by_text(hits).values():
        end, own = 0, set()
        for start, stop, ngram in preferred(work.index, hits, mine):
            if start >= end:
                own.add(ngram)
                end = stop
        ngrams += sorted(own)
    return np.array(ngrams, np.int64)


def clean_block(work: FilterWork, block: bytes, key: str) -> tuple[list[tuple[int, list[dict]]], np.ndarray]:
    """([(number of a line from 1, its remaining records)], sums: lines, split, ignored, too many pieces, trimmed, bad)."""
    options, records = work.options, list(records_of(block, key))
    good = [(number, record) for number, record in enumerate(records, 1) if record is not None]
    hits = work.index.find([record[key] for _, record in good])
    places, rows, sums = by_text(hits), [], np.zeros(6, np.int64)
    sums[[0, 5]] = len(records), len(records) - len(good)
    for at, (number, record) in enumerate(good):
        text, pieces = record[key], [record[key]]
        if at in places:
            spans = [(start, stop) for start, stop, _ in preferred(work.index, hits, places[at])]
            kept = cut(text, spans, options.remove_char_each_side, options.filter_text_char_len, len(text) + 1)
            pieces = [text[start:stop] for start, stop in kept]
        many = len(pieces) > options.splits_count
        sums[1:5] += len(pieces) > 1, not pieces, many, len(pieces) == 1 and len(pieces[0]) < len(text)
        rows.append((number, [] if many else [{**record, key: piece} for piece in pieces]))
    return rows, sums


def by_text(hits: Hits) -> dict[int, slice]:
    """Map the number of each text to its hits."""
    bounds = np.flatnonzero(np.diff(hits.texts, prepend=-1, append=-1)).tolist()
    return {int(hits.texts[start]): slice(start, stop) for start, stop in zip(bounds, bounds[1:])}


def preferred(index: NgramIndex, hits: Hits, mine: slice) -> list[tuple[int, int, int]]:
    """(start, end, n-gram) of a text's hits in order; of those with the same start, the longest comes first."""
    rows = zip(hits.starts[mine].tolist(), hits.ends[mine].tolist(), hits.ngrams[mine].tolist())
    return sorted(rows, key=lambda row: (row[0], -row[1]))


def records_of(block: bytes, key: str) -> Iterator[Optional[dict[str, Any]]]:
    """The object of each line that is not blank; None if it has no text under the key."""
    for line in block.split(b"\n"):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            yield None
            continue
        yield record if isinstance(record, dict) and isinstance(record.get(key), str) else None


def over_blocks(task: Callable, pairs: list[tuple[str, str]], work: FilterWork) -> Iterator[Any]:
    """Run `task(work, block, key)` on each block of the data in several processes; yields results in order."""
    from megatron.corpus.processes import in_order
    from megatron.mpu.cpu_threads import cores

    blocks = (
        (block, key)
        for path, key in pairs
        for source in find_sources([path])
        for block, _ in read_blocks(source, BLOCK)
    )
    do = "if memory ran out, give fewer --num-threads"
    killed = Failure("a process was killed", "nothing was written", do)
    return in_order(partial(task, work), blocks, work.options.num_threads or cores(), killed)


if __name__ == "__main__":
    run_main(main)
