# SPDX-License-Identifier: Apache-2.0
"""Convert plain texts with blank lines between documents to JSON lines: PaddleNLP's command with its flags.

    python -m megatron.tools.raw_trans_to_json --input_path ./raw --output_path corpus_ids --workers 8

Each file under --input_path is read, compressed ones too. A document ends at a line that equals --doc_spliter, blanks
around it ignored. A document of --min_doc_length characters or fewer is left out. Documents of all files, in the order of
their names, become one shuffled file, <output_path>.jsonl; with --no-merge a folder of that name has a file for each input.
Nothing is written next to the inputs. Documents that are not UTF-8, or longer than --max_doc_mb, are skipped and counted.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.corpus.processes import in_order
from megatron.errors import DataError, Failure, SettingsError, missing_file, run_main
from megatron.settings.positional import parse_one
from megatron.settings.schema import setting
from megatron.storage.durable import storage_errors, sync_folder, whole_file
from megatron.telemetry.figures import size

PROG = "python -m megatron.tools.raw_trans_to_json"


@dataclass(frozen=True)
class RawTextOptions:
    """The texts, how they are split, and the output."""

    input_path: str = setting("a text, or a folder of texts, searched below")
    output_path: str = setting("the JSON lines: <output_path>.jsonl; with --no-merge a folder")
    json_key: str = setting("key of the text", "text")
    doc_spliter: str = setting("the line between documents, without blanks around it (default: a blank line)", "")
    min_doc_length: int = setting("documents of so many characters or fewer are left out", 10)
    workers: int = setting("processes, a file at a time each; the output does not depend on it", 1)
    log_interval: int = setting("files between progress lines", 1)
    no_merge: bool = setting("a file of documents for each input, unshuffled", False)
    no_shuffle: bool = setting("documents of the one file stay in the order of the inputs", False)
    seed: int = setting("seed of the shuffle", 1234)
    memory_gb: float = setting("memory of the shuffle", 1.0)
    max_doc_mb: float = setting("longer documents are set aside", 256.0)


def main(argv: list[str]) -> None:
    """Convert, merge, shuffle."""
    options = parse_one(_without_blank_splitter(argv), RawTextOptions, PROG, __doc__)
    if min(options.workers, options.log_interval) < 1 or options.min_doc_length < 0:
        raise SettingsError("--workers and --log_interval start at 1, --min_doc_length at 0")
    if options.max_doc_mb <= 0 or options.memory_gb < 0.01:
        raise SettingsError("--max_doc_mb starts above 0, --memory-gb at 0.01")
    convert(options)


def _without_blank_splitter(argv: list[str]) -> list[str]:
    """Drop `--doc_spliter ""`, which is the default; the parser refuses empty words."""
    kept = []
    for at, word in enumerate(argv):
        if word == "" and kept and kept[-1] in ("--doc_spliter", "--doc-spliter"):
            kept.pop()
        elif word not in ("--doc_spliter=", "--doc-spliter="):
            kept.append(argv[at])
    return kept


def convert(options: RawTextOptions) -> Counter:
    """Write the documents of all inputs. Returns counts. Raises DataError if there is nothing to read."""
    source = Path(options.input_path)
    files = find_texts(source)
    target = Path(options.output_path)
    if not options.no_merge and target.suffix != ".jsonl":
        target = target.with_name(f"{target.name}.jsonl")
    print(f"Needed to convert {len(files)} text file{'s' * (len(files) > 1)}", flush=True)
    with _workspace(target) as folder:
        parts = [folder / f"{number}.jsonl" for number in range(len(files))]
        totals = Counter(dict.fromkeys(("documents", "bytes"), 0))
        start = time.perf_counter()
        for done, counts in enumerate(_convert_all(files, parts, options), 1):
            totals.update(counts)
            if done % options.log_interval == 0:
                seconds = time.perf_counter() - start
                print(f"{done} files, {size(totals['bytes'])}, {size(totals['bytes'] / seconds)}/s")
        with storage_errors(target):
            if options.no_merge:
                _keep_apart(source, files, parts, target)
            else:
                _merge(parts, target, options)
    left_out = {name: count for name, count in totals.items() if name not in ("documents", "bytes")}
    reasons = "".join(f"; {count:,} {name}" for name, count in sorted(left_out.items()))
    print(f"{totals['documents']:,} documents in {target}{reasons}")
    return totals


def find_texts(source: Path) -> list[str]:
    """The file, or all files of the folder, sorted. Links to folders are not followed, to avoid cycles."""
    if source.is_file():
        return [str(source)]
    if not source.is_dir():
        raise missing_file(source, "--input_path", "file or folder")
    paths = sorted(
        os.path.join(folder, name) for folder, _, names in os.walk(source) for name in names if not name.startswith(".")
    )
    paths = [path for path in paths if os.path.isfile(path)]
    if not paths:
        raise DataError(f"--input_path {source}: the folder is empty")
    return paths


def _convert_all(files: list[str], parts: list[Path], options: RawTextOptions) -> Iterator[Counter]:
    """Convert all files; yields the counts of each, in order."""
    work = partial(convert_file, options=options)
    killed = Failure("a worker was killed, and nothing was written", do="lower --workers if memory ran out")
    return in_order(work, zip(files, parts), min(options.workers, len(files)), killed)


def convert_file(path: str, part: Path, options: RawTextOptions) -> Counter:
    """Write the documents of a text as JSON lines. Returns counts of documents, bytes read, and documents set aside."""
    counts = Counter(bytes=os.path.getsize(path))
    with open(part, "w", encoding="utf-8") as out:
        for document, reason in documents(path, options.doc_spliter, int(options.max_doc_mb * 1e6)):
            if reason or len(document) <= options.min_doc_length:
                counts[reason or "left out as too short"] += bool(reason or document)
                continue
            out.write(json.dumps({options.json_key: document}, ensure_ascii=False) + "\n")
            counts["documents"] += 1
    return counts


def documents(path: str, splitter: str, most: int) -> Iterator[tuple[str, str]]:
    """Split a text into (document, "") or ("", reason for setting it aside), in order; documents may be empty.

    Lines end as in Python's text files: LF, CR LF or CR. most: bytes of a document.
    """
    from megatron.corpus.lines import blocks, split

    pieces, size, reason = [], 0, ""
    with_ends = lambda line: (line + b"\n").splitlines()  # a lone CR ends a line too
    for line in (piece for whole in split(blocks(path), most) for piece in with_ends(whole)):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            reason, text = reason or "set aside as not UTF-8", "?"
        if text.strip() == splitter:
            yield ("" if reason else "".join(pieces)), reason
            pieces, size, reason = [], 0, ""
        elif size + len(line) > most:
            reason, pieces = reason or "set aside as too long", []
        elif not reason:
            pieces += (text, "\n")
            size += len(line) + 1
    yield ("" if reason else "".join(pieces)), reason


@contextmanager
def _workspace(target: Path) -> Iterator[Path]:
    """A temporary folder next to the target, for incomplete files."""
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _merge(parts: list[Path], target: Path, options: RawTextOptions) -> None:
    """Join all parts to one file, shuffled or not, which appears when it is complete."""
    from megatron.corpus.shuffle import shuffle_files

    print(f"Merging files into {target}", flush=True)
    if not options.no_shuffle:
        print("Shuffling the file...", flush=True)
        shuffle_files([str(part) for part in parts], target, options.seed, int(options.memory_gb * 1e9))
        return
    with whole_file(target) as out:
        for part in parts:
            with open(part, "rb") as file:
                shutil.copyfileobj(file, out, 1 << 20)
            part.unlink()


def _keep_apart(source: Path, files: list[str], parts: list[Path], target: Path) -> None:
    """Keep a file of documents for each input, under the input's path in the folder of inputs."""
    for path, part in zip(files, parts):
        name = os.path.relpath(path, source) if source.is_dir() else os.path.basename(path)
        kept = target / f"{name}.jsonl"
        kept.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, kept)
        sync_folder(kept.parent)


if __name__ == "__main__":
    run_main(main, sys.argv[1:])
