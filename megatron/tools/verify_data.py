# SPDX-License-Identifier: Apache-2.0
"""Verify token files: every byte against their manifest, and the numbers of the index against each other.

    python -m megatron.tools.verify_data corpus_text_document other_text_document
    python -m megatron.tools.verify_data corpus_text_document --write     make the manifest of files that have none

Exit code 4: a file is damaged; each problem is a line. Training checks the manifest with --verify-data.
"""

import sys
import time
from dataclasses import dataclass

from megatron.errors import DataError, UsageError, run_main
from megatron.settings.positional import divide, parse_one
from megatron.settings.schema import setting
from megatron.telemetry.figures import size as in_units

PIECE = 1 << 20  # sequences checked at a time


@dataclass(frozen=True)
class VerifyDataOptions:
    """Options in addition to reading."""

    write: bool = setting("take the files as they are now, if their numbers agree, and write their manifest", False)


def main(argv: list[str]) -> None:
    """Verify the prefixes before the flags."""
    prefixes, flags = divide(argv, VerifyDataOptions)
    settings = parse_one(flags, VerifyDataOptions, "python -m megatron.tools.verify_data PREFIX ...", __doc__)
    if not prefixes:
        raise UsageError("there is nothing to verify", do="python -m megatron.tools.verify_data corpus_text_document")

    from megatron.data.indexed import bare_prefix

    damaged = 0
    for prefix in map(bare_prefix, prefixes):
        start = time.perf_counter()
        problems, size = examine(prefix, settings.write)
        seconds = time.perf_counter() - start
        print(
            f"{prefix}: {in_units(size)} in {seconds:.2f} s: "
            + (f"{len(problems)} PROBLEM{'S' * (len(problems) > 1)}" if problems else "good")
        )
        for problem in problems:
            print(f"  {problem}", flush=True)
        damaged += bool(problems)
    if damaged:
        raise DataError(
            f"{damaged} of {len(prefixes)} dataset{'s' * (len(prefixes) > 1)} {'is' if damaged == 1 else 'are'} damaged",
            do="copy them again, or preprocess again",
        )


def examine(prefix: str, write: bool) -> tuple[list[str], int]:
    """(problems, bytes) of one dataset; writes its manifest if asked to and there are no problems."""
    import os

    from megatron.data import manifest
    from megatron.data.formats import endings_of

    problems = [] if write else manifest.verify(prefix)
    try:
        problems += contradictions(prefix) + companion_problems(prefix)
    except DataError as problem:
        problems.append(problem.what)
    if write and not problems:
        manifest.write_manifest(prefix)
        print(f"{prefix}: wrote {manifest.manifest_path(prefix)}", file=sys.stderr)
    return problems, sum(os.path.getsize(prefix + s) for s in endings_of(prefix) if os.path.exists(prefix + s))


def companion_problems(prefix: str) -> list[str]:
    """Problems of `<prefix>.origin` and `<prefix>.contamination`, if they exist."""
    import os

    from megatron.data import contamination, origin
    from megatron.data.formats import open_tokens

    data, problems = open_tokens(prefix), []
    problems += origin.problems_of(prefix, data.num_documents, data.num_tokens)
    path = prefix + contamination.ENDING
    if os.path.exists(path):
        try:
            documents = contamination.Contained.open(path).about.get("documents")
            if documents != data.num_documents:
                problems.append(f"{path} is of {documents} documents, {prefix} has {data.num_documents}")
        except DataError as error:
            problems.append(f"{error.what}: {error.why}")
    return problems


def contradictions(prefix: str) -> list[str]:
    """Numbers of an index that contradict each other, in bounded memory. Raises DataError as `open_tokens` does."""
    import numpy as np

    from megatron.data.formats import open_tokens

    data, problems, at = open_tokens(prefix), [], 0
    for start in range(0, len(data), PIECE):
        lengths = data.sequence_lengths[start : start + PIECE].astype(np.int64)
        wanted = at + np.cumsum(lengths) - lengths
        wrong = np.flatnonzero(data.sequence_pointers[start : start + PIECE] != wanted * data.pointer_unit)
        if len(wrong):
            problems.append(
                f"{data.index_path}: the offset of sequence {start + wrong[0]} is not where the one before it ends"
            )
            break
        at += int(lengths.sum())
    for start in range(0, data.num_documents, PIECE):
        boundaries = data.document_indices[start : start + PIECE + 1]
        if (boundaries[1:] < boundaries[:-1]).any():
            problems.append(f"{data.index_path}: documents run backwards after document {start}")
            break
    return problems


if __name__ == "__main__":
    run_main(main)
