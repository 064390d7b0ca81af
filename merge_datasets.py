# SPDX-License-Identifier: Apache-2.0
"""Join token files into one.

    python merge_datasets.py --input parts/ --output-prefix corpus_text_document

takes every .bin/.idx pair below parts/ (or the prefixes given) in the order of their names and writes
corpus_text_document.bin and .idx, as if the texts had been preprocessed together. Files of PaddlePaddle (_ids.npy and
_idx.npz, or old _ids.npz) are read too, and written with --output-format paddle: with one input that is a conversion.
"""

import signal
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

from megatron.errors import run_main
from megatron.settings.schema import setting


@dataclass(frozen=True)
class MergeOptions:
    """The datasets to merge, and the output."""

    input: list[str] = setting("folders (searched below) or prefixes without .bin/.idx")
    output_prefix: str = setting("the result is <prefix>.bin and <prefix>.idx")
    output_format: Literal["megatron", "paddle"] = setting(
        "megatron: .bin and .idx; paddle: <prefix>_ids.npy and _idx.npz", "megatron"
    )
    multimodal: bool = setting("each sequence has a mode, which is kept (Megatron-LM's multimodal .idx)", False)
    debug: bool = setting("tracebacks with error messages", False)


def main(argv: list[str]) -> None:
    from megatron.settings.parse import parse

    description = __doc__.split("\n")[0]
    common = ("input", "output_prefix", "output_format", "multimodal")
    groups = dict(merge=MergeOptions)
    settings = parse(argv, groups, prog="merge_datasets.py", description=description, common=common)["merge"]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses

    from megatron.data.formats import FORMATS
    from megatron.data.merge import merge

    try:
        log = partial(print, flush=True)
        merged = merge(settings.input, settings.output_prefix, log, settings.output_format, settings.multimodal)
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        sys.exit(130)
    speed = merged.bytes / 1e6 / merged.seconds
    endings = " and ".join(FORMATS[settings.output_format].endings)
    print(f"{len(merged.prefixes)} datasets -> {settings.output_prefix}{endings}")
    print(f"{merged.documents} documents, {merged.sequences} sequences, {merged.tokens} tokens")
    print(f"{merged.bytes / 1e6:.1f} MB in {merged.seconds:.2f} s ({speed:.0f} MB/s)")


if __name__ == "__main__":
    run_main(main)
