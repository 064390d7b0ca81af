# SPDX-License-Identifier: Apache-2.0
"""Clean documents of JSON files by tasks: X.json -> X_cleaned.json and X_filtered.json.

    python -m megatron.tools.openwebtext.cleanup_fix_dataset --input-files a.json b.json --output-path cleaned \\
        --tasks remove_512 ftfy_fix_text general_cleaning --workers 8

Megatron-LM's command. The tasks run on each document in the given order: remove_512, remove_256_javascript and
remove_512_non_english move it, unchanged, to X_filtered; ftfy_fix_text, general_cleaning, stories, realnews and
gutenberg change its text. Lines without a document are set aside in X_cleaned.json.rejected.jsonl. The output does
not depend on --workers.
"""

import os
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import UsageError, run_main
from megatron.settings.positional import parse_one, refuse_below
from megatron.settings.schema import setting

PROG = "python -m megatron.tools.openwebtext.cleanup_fix_dataset"
PACKED = (".gz", ".bz2", ".xz", ".zst")
ORIGINAL = ("remove_512", "remove_256_javascript", "remove_512_non_english", "ftfy_fix_text", "general_cleaning")


@dataclass(frozen=True)
class CleanupFixOptions:
    """The files, the tasks, and how the work is divided."""

    input_files: list[str] = setting("JSON lines: files, globs in quotes, folders; .gz .zst .bz2 .xz .tar too")
    tasks: list[str] = setting(
        "in their order: remove_512, remove_256_javascript, remove_512_non_english (fewer characters than that), "
        "ftfy_fix_text, general_cleaning, stories, realnews, gutenberg"
    )
    output_path: str = setting("folder for X_cleaned and X_filtered of each input X", ".")
    log_interval: int = setting("documents between progress lines", 100)
    workers: int = setting("processes; the output does not depend on it", 1)
    detector: Literal["eldc", "fasttext", "langdetect"] = setting(
        "detector of English; langdetect: as Megatron-LM, 100 times slower; fasttext needs --lang-model", "eldc"
    )
    lang_model: Optional[str] = setting("lid.176.ftz or lid.176.bin of fastText", None)
    on_bad_line: Literal["skip", "stop"] = setting("stop: end with exit code 4 at a line that is no document", "skip")
    longest_line: int = setting("MB: a longer line is no document", 16)
    debug: bool = setting("tracebacks with error messages", False)


def main(argv: list[str]) -> None:
    print("parsing the arguments ...", flush=True)
    options = parse_one(argv, CleanupFixOptions, PROG, __doc__)
    refuse_below(options, dict(workers=1, longest_line=1, log_interval=1))
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses

    from megatron.corpus.filters.tasks import CleaningTasks
    from megatron.corpus.line_files import LineCleaner, clean_files, packer
    from megatron.data.json_input import find_sources

    detector = dict(detector=options.detector, model=options.lang_model)
    CleaningTasks(tuple(options.tasks))  # refuses unknown and duplicate names
    tasks = [(task, CleaningTasks((task,), **detector)) for task in options.tasks]
    sources = find_sources(options.input_files)
    outputs = [output_names(source.path, options.output_path) for source in sources]
    if len(set(outputs)) < len(outputs):
        twice = next(names for names in outputs if outputs.count(names) > 1)
        raise UsageError(f"two inputs would be written to {twice[0]}", do="clean them into folders of their own")
    for cleaned, _ in outputs:
        packer(cleaned)
    os.makedirs(options.output_path, exist_ok=True)
    print("cleanup dataset ...")
    for source, (cleaned, filtered) in zip(sources, outputs):
        print(f" > working on {source.path} ...", flush=True)
        cleaner = LineCleaner(tasks, "document", options.longest_line << 20)
        report = CleanupInterval(options.log_interval)
        stop = options.on_bad_line == "stop"
        totals = clean_files([source], cleaner, cleaned, filtered, options.workers, (0, 1), report, stop)
        print(summary(totals, options.tasks), flush=True)
        if totals["rejected"]:
            print(f"WARNING: {totals['rejected']} lines are no documents: see {cleaned}.rejected.jsonl")
    print("done :-)", flush=True)


def output_names(path: str, folder: str) -> tuple[str, str]:
    """The paths of X_cleaned and X_filtered, with the suffixes of X.

    >>> output_names("raw/a.jsonl.zst", "out")
    ('out/a_cleaned.jsonl.zst', 'out/a_filtered.jsonl.zst')
    """
    name = "stdin.jsonl" if path == "-" else Path(path).name
    packed = next((suffix for suffix in PACKED if name.lower().endswith(suffix)), "")
    stem, suffix = os.path.splitext(name[: len(name) - len(packed)])
    suffix += name[len(name) - len(packed) :]
    if suffix.lower().startswith((".tar", ".tgz", ".tzst", ".tbz2", ".txz")):
        suffix = ".jsonl"  # lines out of an archive
    return tuple(os.path.join(folder, f"{stem}_{kind}{suffix}") for kind in ("cleaned", "filtered"))


class CleanupInterval:
    """Prints a line every `interval` documents."""

    def __init__(self, interval: int):
        self.interval, self.next = interval, interval

    def __call__(self, counts: Counter, seconds: float) -> None:
        while counts["documents"] >= self.next:
            print(f"    processed {self.next:9d} documents in {seconds:.2f} seconds ...", flush=True)
            self.next += self.interval


def summary(counts: Counter, tasks: list[str]) -> str:
    """The number of documents that each task removed or received; a second line has the numbers that it changed.

    Megatron-LM's tasks are always listed.
    """
    left, numbers, changed = counts["documents"], {}, []
    for task in tasks:
        if task.startswith("remove_"):
            numbers[task] = counts[f"{task}.{task}"]
            left -= numbers[task]
        else:
            numbers[task] = left
            changed.append(f"{task} {counts[f'{task}.changed']}")
    words = [f"{name} {numbers.get(name, 0)}" for name in dict.fromkeys([*ORIGINAL, *tasks])]
    lines = [f"  >> total docs: {counts['documents']} {' '.join(words)}"]
    return "\n".join(lines + [f"  >> changed docs: {' '.join(changed)}"] * bool(changed))


if __name__ == "__main__":
    run_main(main)
