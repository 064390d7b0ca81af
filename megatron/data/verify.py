# SPDX-License-Identifier: Apache-2.0
"""Verify token files: their bytes against the manifest, the numbers of their index against each other."""

import os
import sys

import numpy as np

from megatron.data import contamination, manifest, origin
from megatron.data.formats import endings_of, open_tokens
from megatron.errors import DataError

PIECE = 1 << 20  # sequences checked at a time


def examine(prefix: str, write: bool) -> tuple[list[str], int]:
    """(problems, bytes) of one dataset; writes its manifest if asked to and there are no problems."""
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
