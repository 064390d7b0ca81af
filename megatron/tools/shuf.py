# SPDX-License-Identifier: Apache-2.0
"""Shuffle the lines of files, as `shuf` does, in bounded memory and in the same order for the same --seed.

    python -m megatron.tools.shuf dedup.json -o train_data.json --seed 1

IN is one or several files, compressed or not (.gz .zst .bz2 .xz), or `-` for stdin; all their lines, including blank ones,
are shuffled together. OUT is plain text and may be IN; without it lines go to stdout. Lines that exceed --memory-gb go
through a folder next to OUT, which takes about as much space as the text compressed by zstd.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, SettingsError, no_such_file, run_main
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting

PROG = "python -m megatron.tools.shuf"


@dataclass(frozen=True)
class ShufOptions:
    """The output, and the order of lines."""

    output: Optional[str] = setting("where the lines go (-o; default: stdout)", None)
    seed: int = setting("another number, another order", 1234)
    head_count: Optional[int] = setting("at most so many lines (-n)", None)
    memory_gb: float = setting("memory for lines", 1.0)


def main(argv: list[str]) -> None:
    """IN ... -o OUT: shuffle."""
    files, flags = divide(argv, ShufOptions, letters={"-o": "--output", "-n": "--head-count"})
    options = parse_one(flags, ShufOptions, f"{PROG} IN ...", __doc__)
    if options.memory_gb < 0.01 or (options.head_count or 0) < 0:
        raise SettingsError("--memory-gb starts at 0.01, --head-count at 0")
    files = files or ["-"]
    for file in files:
        if file != "-" and (not os.path.exists(file) or os.path.isdir(file)):
            raise DataError(f"{file}: {no_such_file(file)}", do=f"{PROG} IN ... -o OUT")
    memory = int(options.memory_gb * 1e9)
    from megatron.corpus.shuffle import shuffle_files

    shuffle_files(files, options.output and Path(options.output), options.seed, memory, options.head_count)


if __name__ == "__main__":
    run_main(main)
