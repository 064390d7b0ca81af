# SPDX-License-Identifier: Apache-2.0
"""Filter loose JSON lines: keep English texts of at least 128 tokens, and repair their characters.

    python -m megatron.tools.openwebtext.cleanup_dataset raw.jsonl clean.jsonl --workers 8 \\
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt

Megatron-LM's command: ftfy, language, then the token count of texts with fewer than 8 characters a token; binary junk is
dropped first. Input may be compressed, a tar archive, a folder, a glob, several of them, or `-`; the output is compressed
by its ending (.zst .gz .bz2 .xz). Lines that are no documents are set aside in <output>.rejected.jsonl. The output does
not depend on --workers; several machines process parts of the input with --shard 1/8 ... 8/8.
"""

import signal
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Optional

from megatron.errors import SettingsError, UsageError, run_main
from megatron.settings.declare import dashed
from megatron.settings.parse import parse
from megatron.settings.positional import divide, refuse_below
from megatron.settings.schema import TokenizerSettings, setting

PROG = "python -m megatron.tools.openwebtext.cleanup_dataset"


@dataclass(frozen=True)
class CleanupOptions:
    """The documents to keep, and how the work is divided."""

    min_tokens: int = setting(
        "documents with fewer tokens are dropped (counted where there are fewer than 8 x as many characters)", 128
    )
    lang: list[str] = setting("languages that stay, as ISO 639-1 codes", ("en",))
    min_lang_score: float = setting("how sure the detector has to be, from 0 to 1", 0.0)
    detector: Literal["eldc", "fasttext", "langdetect"] = setting(
        "language detector; langdetect: as Megatron-LM, 100 times slower; fasttext needs --lang-model", "eldc"
    )
    lang_model: Optional[str] = setting("lid.176.ftz or lid.176.bin of fastText", None)
    max_junk: float = setting(
        "documents with a larger share of U+FFFD and control characters are dropped; 1: none", 0.02
    )
    ftfy: bool = setting("repair characters with ftfy", True)
    workers: int = setting("processes; the output does not depend on it", 1)
    shard: Optional[str] = setting("i/n: the i-th of n parts of the input, from 1/n to n/n", None)
    dropped_output: Optional[str] = setting("file that gets the dropped documents, with reasons and figures", None)
    on_bad_line: Literal["skip", "stop"] = setting("stop: end with exit code 4 at a line that is no document", "skip")
    longest_line: int = setting("MB: a longer line is no document", 16)
    log_interval: int = setting("documents between progress lines", 10_000)
    debug: bool = setting("tracebacks with error messages", False)


COMMON = ("min_tokens", "lang", "detector", "workers", "shard", "dropped_output", "vocab_file", "merge_file")


def main(argv: list[str]) -> None:
    files, flags = divide(argv, CleanupOptions, TokenizerSettings)
    groups = dict(cleanup=CleanupOptions, tokenizer=TokenizerSettings)
    description = __doc__.split("\n")[0]
    parsed = parse(flags, groups, prog=f"{PROG} IN ... OUT", description=description, common=COMMON)
    options, vocabulary = parsed["cleanup"], parsed["tokenizer"]
    if len(files) < 2:
        raise UsageError(f"input and output are wanted, {len(files)} given", do=f"{PROG} raw.jsonl clean.jsonl")
    check(options)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses

    from megatron.corpus.line_files import LineCleaner, clean_files
    from megatron.data.json_input import find_sources

    *inputs, output = files
    print("building gpt2 dataset ...")
    print(f"will be reading {' '.join(inputs)}")
    print(f"and will write the results to {output}", flush=True)
    sources = find_sources(inputs)
    cleaner = LineCleaner(
        filters(options, vocabulary), "reason" if options.dropped_output else "nothing", options.longest_line << 20
    )
    print(f" > filtering {' '.join(inputs)}", flush=True)
    progress = CleanupProgress(options.log_interval)
    totals = clean_files(
        sources,
        cleaner,
        output,
        options.dropped_output,
        options.workers,
        shard_of(options.shard),
        progress,
        options.on_bad_line == "stop",
    )
    progress.end(totals)
    if totals["rejected"]:
        print(f"WARNING: {totals['rejected']} lines are no documents: see {output}.rejected.jsonl")


def check(options: CleanupOptions) -> None:
    """Raise SettingsError for numbers out of range."""
    refuse_below(options, dict(workers=1, longest_line=1, log_interval=1, min_tokens=0))
    for name in ("max_junk", "min_lang_score"):
        if not 0 <= getattr(options, name) <= 1:
            raise SettingsError(f"{dashed(name)} {getattr(options, name)} is not from 0 to 1")
    shard_of(options.shard)


def shard_of(text: Optional[str]) -> tuple[int, int]:
    """Parse --shard i/n into (number from 0, count). Raises SettingsError.

    >>> shard_of("2/8")
    (1, 8)
    """
    if text is None:
        return 0, 1
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise SettingsError(f"--shard {text}: no part of the input", do="give 1/8, 2/8 ... 8/8")
    return int(number) - 1, int(count)


def filters(options: CleanupOptions, vocabulary: TokenizerSettings) -> list:
    """Build the filters: [(name, filter)], in order."""
    from megatron.corpus.registry import build_filter

    chosen = []
    if options.max_junk < 1:
        chosen.append(("gate", build_filter("gate", max_share=options.max_junk)))
    if options.ftfy:
        chosen.append(("ftfy", build_filter("ftfy")))
    detector = dict(detector=options.detector, model=options.lang_model, min_score=options.min_lang_score)
    chosen.append(("language", build_filter("language", keep=options.lang, **detector)))
    if options.min_tokens:
        names = ("vocab_file", "merge_file", "tokenizer_type", "tokenizer_model")
        files = {name: getattr(vocabulary, name) for name in names}
        if not any(files.values()):
            print(
                "note: without --vocab-file and --merge-file, words and signs are counted for --min-tokens, not tokens"
            )
        chosen.append(("length", build_filter("megatron", min_tokens=options.min_tokens, **files)))
    return chosen


class CleanupProgress:
    """Prints Megatron-LM's lines of counters, every `interval` documents and at the end."""

    def __init__(self, interval: int):
        self.interval, self.next, self.seconds = interval, interval, 0.0

    def __call__(self, counts: Counter, seconds: float) -> None:
        self.seconds = seconds
        if counts["documents"] >= self.next:
            self.next = counts["documents"] // self.interval * self.interval + self.interval
            print(f"[PROGRESS] | {self.line(counts)}", flush=True)

    def end(self, counts: Counter) -> None:
        print(f"[FINAL] | {self.line(counts)}", flush=True)

    def line(self, counts: Counter) -> str:
        languages = [f"language.{name}_language" for name in ("no", "other", "unsure")]
        figures = {
            "elapsed time": f"{self.seconds:.2f}",
            "documents": counts["documents"],
            "fixed text": counts["ftfy.repaired"],
            "non-english": sum(counts[name] for name in languages),
            "non-english chars": sum(counts[f"{name}.characters"] for name in languages),
            "small docs": counts["length.too_few_tokens"],
            "small docs chars": counts["length.too_few_tokens.characters"],
            "binary docs": counts["gate.binary"],
            "binary docs chars": counts["gate.binary.characters"],
        }
        return " | ".join(f"{name}: {figure}" for name, figure in figures.items())


if __name__ == "__main__":
    run_main(main)
