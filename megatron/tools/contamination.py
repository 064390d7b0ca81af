# SPDX-License-Identifier: Apache-2.0
"""Find the text of evaluation sets in training data: register the sets once, then scan data for them.

    python -m megatron.tools.contamination register LAMBADA lambada_test.jsonl --index evaluation.ngrams
    python -m megatron.tools.contamination register WIKITEXT wiki.test.tokens --index evaluation.ngrams
    python -m megatron.tools.contamination show evaluation.ngrams corpus_text_document
    python -m megatron.tools.contamination scan crawl/*.jsonl --index evaluation.ngrams
    python -m megatron.tools.contamination ignore corpus_text_document --index evaluation.ngrams --above 10

register  add a set to an index (a new one if it does not exist); a set of the same name is replaced. A file is JSON
          (one object a line, or a list of them), or plain text with an item on each line
show      print the contents of an index, or the matches in a token file that was preprocessed with --contamination
scan      search files of text: which documents hold which sets; as JSON lines with --output
ignore    remove n-grams from an index that a token file has more than --above times: phrases, not evaluation items
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.telemetry.figures import size as in_units

COMMANDS = ("register", "show", "scan", "ignore")
SCANNED_TOGETHER = 1 << 20  # bytes of lines


@dataclass(frozen=True)
class ContaminationOptions:
    """Options of all commands."""

    index: Optional[str] = setting("file of n-grams of evaluation sets", None)
    json_keys: Optional[list[str]] = setting(
        "keys whose texts are taken of JSON objects (register: text, or all texts; scan: text)", None
    )
    ngram_size: int = setting("register, for a new index: words of an n-gram", 13)
    min_ngram_size: int = setting("register, for a new index: a shorter item with this many words is one n-gram", 8)
    above: int = setting("ignore: how often a phrase is there", 10)
    output: Optional[str] = setting("scan: file for the matches, JSON lines", None)


def main(argv: list[str]) -> None:
    """Run one of the commands."""
    words, flags = divide(argv, ContaminationOptions)
    prog = "python -m megatron.tools.contamination register NAME FILES ... | show | scan FILES ... | ignore PREFIX"
    options = parse_one(flags, ContaminationOptions, prog, __doc__)
    command = words[0] if words else ""
    if command not in COMMANDS:
        raise UsageError(f"{command or 'no command'}: known are {', '.join(COMMANDS)}", do="see --help")
    globals()[command](words[1:], options)


def register(words: list[str], options: ContaminationOptions) -> None:
    """Add a set to an index."""
    from megatron.data.contamination import NgramIndex
    from megatron.data.evaluation_sets import read_items

    if len(words) < 2:
        raise UsageError(
            "register needs a name and files", do="contamination register LAMBADA lambada_test.jsonl --index I"
        )
    path = _index_path(options)
    if not 1 <= options.min_ngram_size <= options.ngram_size:
        raise SettingsError(
            f"--min-ngram-size {options.min_ngram_size} is not within 1 and --ngram-size {options.ngram_size}"
        )
    index = NgramIndex.open(path) if path.exists() else NgramIndex.empty(options.ngram_size, options.min_ngram_size)
    name, files = words[0], words[1:]
    started = time.perf_counter()
    index = index.with_set(name, (item for file in files for item in read_items(file, options.json_keys)), files)
    index.save(path)
    one = index.sets[-1]
    short = (
        f", {one.too_short:,} of them of less than {index.shortest} words, which are not looked for"
        if one.too_short
        else ""
    )
    print(f"{name}: {one.items:,} items{short}; {index.ngrams_of(one):,} n-grams")
    size, seconds = in_units(path.stat().st_size), time.perf_counter() - started
    print(f"{path}: {len(index.sets)} sets, {len(index.hashes):,} n-grams, {size}, {seconds:.1f} s")


def show(words: list[str], options: ContaminationOptions) -> None:
    """Print the contents of indexes and the matches in token files."""
    from megatron.data.contamination import ENDING, NgramIndex
    from megatron.data.indexed import bare_prefix

    if not words and options.index:
        words = [options.index]
    if not words:
        raise UsageError("show needs an index, or the prefix of token files")
    for word in words:
        prefix = bare_prefix(word).removesuffix(ENDING)
        if Path(prefix + ENDING).exists():
            _show_contained(prefix)
            continue
        index = NgramIndex.open(word)
        print(
            f"{word}: {len(index.hashes):,} n-grams of {index.longest} words (of shorter items: from {index.shortest})"
        )
        for one in index.sets:
            print(f"  {one.name}: {one.items:,} items, {one.too_short:,} too short; from {', '.join(one.files)}")


def _show_contained(prefix: str) -> None:
    from megatron.data.contamination import ENDING, Contained

    contained = Contained.open(prefix + ENDING)
    about, words = contained.about, int((contained.before > 0).sum())
    print(f"{prefix}: {about['documents']:,} documents; of {len(contained.hashes):,} n-grams {words:,} were found")
    for name, items in about["sets"]:
        print(f"  {name}: {about['items'].get(name, 0):,} of {items:,} items share an n-gram with the text")
    done = dict(count="they are there", cut="they were cut out", drop="they were dropped")
    print(f"  {about['contaminated']:,} texts hold any: {done.get(about['action'], about['action'])}")


def scan(words: list[str], options: ContaminationOptions) -> None:
    """Search files of text."""
    from megatron.data.contamination import NgramIndex
    from megatron.data.json_input import BadLine, find_sources, parse_line, read_blocks

    if not words:
        raise UsageError("scan needs files of JSON lines")
    index, keys = NgramIndex.open(_index_path(options)), options.json_keys or ["text"]
    output = open(options.output, "w", encoding="utf-8") if options.output else None
    started, size, documents, bad, found, seen = time.perf_counter(), 0, 0, 0, 0, []
    for source in find_sources(words):
        line = 0
        for block, _ in read_blocks(source, SCANNED_TOGETHER):
            texts, lines = [], []
            for number, text in enumerate(block.split(b"\n"), line + 1):
                try:
                    values = parse_line(text, keys) or []
                except BadLine:
                    bad += 1
                    continue
                texts += ["\n".join(value) if isinstance(value, list) else value for value in values]
                lines += [number] * len(values)
            line += block.count(b"\n")
            size, documents = size + len(block), documents + len(texts)
            hits = index.find(texts)
            for number in sorted(set(hits.texts.tolist())):
                mine = hits.texts == number
                ngrams = hits.ngrams[mine]
                first = texts[number][int(hits.starts[mine][0]) : int(hits.ends[mine][0])]
                row = dict(
                    file=source.path, line=lines[number], ngrams=len(ngrams), sets=index.sets_of(ngrams), first=first
                )
                seen.append(ngrams)
                found += 1
                if output:
                    output.write(json.dumps(row, ensure_ascii=False) + "\n")
                elif found <= 20:
                    print(json.dumps(row, ensure_ascii=False))
    if output:
        output.close()
    import numpy as np

    items = index.sets_of(np.concatenate(seen)) if seen else {}
    for one in index.sets:
        print(f"{one.name}: {items.get(one.name, 0):,} of {one.items:,} items share an n-gram with {len(words)} files")
    more = f", {bad:,} lines that are none" if bad else ""
    seconds = time.perf_counter() - started
    print(f"{found:,} of {documents:,} texts hold any{more}; {in_units(size)} in {seconds:.1f} s")


def ignore(words: list[str], options: ContaminationOptions) -> None:
    """Remove phrases from an index."""
    import numpy as np

    from megatron.data.contamination import NgramIndex, of_training_data
    from megatron.data.indexed import bare_prefix

    path, prefixes = _index_path(options), list(map(bare_prefix, words))
    index = NgramIndex.open(path)
    contained, unknown = of_training_data(prefixes)
    if contained is None or unknown:
        what = f"{unknown[0]} has no record of what it holds" if unknown else "ignore needs prefixes of token files"
        raise DataError(what, do="preprocess it with --contamination INDEX")
    common = contained.hashes[contained.before > options.above]
    numbers = np.flatnonzero(np.isin(index.hashes, common))
    index.without(numbers).save(path)
    print(f"{path}: {len(numbers):,} n-grams left out that are there more than {options.above} times")


def _index_path(options: ContaminationOptions) -> Path:
    if not options.index:
        raise UsageError("which index?", do="--index evaluation.ngrams")
    return Path(options.index)


if __name__ == "__main__":
    run_main(main)
