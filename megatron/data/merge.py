# SPDX-License-Identifier: Apache-2.0
"""Merge token files into one, as if their texts had been preprocessed together, in constant memory."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import contamination, origin
from megatron.data.formats import FORMATS, open_tokens, prefixes_of
from megatron.data.indexed import TokenFiles, bare_prefix
from megatron.data.manifest import manifest_path, verify
from megatron.data.preprocess_output import publish_dataset, replaced, write_stats
from megatron.data.vocabulary import identity_of, name_of
from megatron.data.workspace import Workspace, append_file, storage_error, write_at
from megatron.errors import DataError, SettingsError
from megatron.telemetry.figures import size

PIECE = 1 << 20  # numbers of an index that are in memory at a time


@dataclass
class Merged:
    """The inputs and the size of a merged dataset."""

    prefixes: list[str]
    documents: int
    sequences: int
    tokens: int
    bytes: int
    seconds: float


def merge(
    inputs: list[str],
    output_prefix: str,
    log: Callable[[str], None] = lambda line: None,
    output_format: str = "megatron",
    multimodal: bool = False,
) -> Merged:
    """Merge the datasets of `inputs` (folders, searched recursively, or prefixes), in any format, into one.

    One input in another format is converted: sequences, documents (empty ones too) and the dtype of ids stay.
    Prefixes are sorted as plain strings, as in Megatron-LM: `part_10` comes before `part_9`.
    multimodal: each sequence has a mode, in all datasets and in the result
    Raises DataError if there is nothing to merge, a file does not match its checksums, or datasets differ in dtype,
    vocabulary or the presence of modes; Locked; StorageError.
    """
    started = time.perf_counter()
    output_prefix = bare_prefix(output_prefix)
    prefixes = find_prefixes(inputs, output_prefix)
    named = [bare_prefix(one) for one in inputs if not os.path.isdir(one)]
    if named != [prefix for prefix in prefixes if prefix in named]:
        log("note: datasets are joined in the order of their names, each of them once")
    refuse_damage(prefixes, log)
    identity = common_identity(prefixes)
    dtype, sizes = common_dtype(prefixes)
    form = FORMATS[output_format]
    if words := replaced(output_prefix, form):
        log(f"note: {words}")
    kinds = [kind for kind in ("_document", "_sentence") if any(prefix.endswith(kind) for prefix in prefixes)]
    if len(kinds) > 1:
        log("note: files of whole documents (..._document) and of sentences (..._sentence) become one dataset")
    check_modes(prefixes, multimodal)
    if multimodal and form is not FORMATS["megatron"]:
        raise SettingsError("--multimodal: files of --output-format paddle hold no modes", do="leave out one of them")
    try:
        with Workspace(output_prefix) as workspace:
            tokens, index = (workspace.path(f"merged{ending}") for ending in form.endings)
            _join_tokens(prefixes, tokens, form.make_head(dtype, sizes["tokens"]), log)
            form.write_index(
                index,
                dtype,
                sizes["sequences"],
                sizes["documents"],
                lambda: _pieces(prefixes, lambda dataset: dataset.sequence_lengths),
                lambda: _counts(prefixes),
                *([lambda: _pieces(prefixes, _modes)] if multimodal else []),
            )
            notes = join_companions(prefixes, workspace, sizes)
            publish_dataset(workspace, "merged", output_prefix, form)
            for note in notes:
                log(note)
    except OSError as error:
        raise storage_error(error, output_prefix) from None
    write_stats(output_prefix, identity, sizes)
    size = sizes["tokens"] * dtype.itemsize
    return Merged(
        prefixes, sizes["documents"], sizes["sequences"], sizes["tokens"], size, time.perf_counter() - started
    )


def join_companions(prefixes: list[str], workspace: Workspace, sizes: dict[str, int]) -> list[str]:
    """Merge the origins and the contamination counts of the datasets into the workspace, if all datasets have them.

    Returns notes on what is left out.
    """
    notes = []
    origins = [origin.open_origins(prefix, open_tokens(prefix).num_documents, verify=True) for prefix in prefixes]
    known = sum(own is not None for own in origins)
    if known == len(prefixes):
        files, numbers = origin.joined_files(origins)
        rows = (rows for pair in zip(origins, numbers, strict=True) for rows in origin.renumbered(*pair))
        path = workspace.path(f"merged{origin.ENDING}")
        origin.write_origins(path, files, sizes["documents"], rows, sizes["tokens"])
    elif known:
        missing = next(prefix for prefix, own in zip(prefixes, origins, strict=True) if own is None)
        notes.append(
            f"note: {missing} has no {origin.ENDING}: where documents come from is not known of all, and left out"
        )
    contained, unknown = contamination.of_training_data(prefixes)
    if contained is not None and not unknown:
        contained.save(workspace.path(f"merged{contamination.ENDING}"))
    elif contained is not None:
        notes.append(f"note: {unknown[0]} has no {contamination.ENDING}: what is known of the others is left out")
    return notes


def find_prefixes(inputs: list[str], output_prefix: str) -> list[str]:
    """Prefixes of all datasets of the inputs, sorted, without the output. Raises DataError where one file is missing."""
    named = set()
    for given in inputs:
        if os.path.isdir(given):
            below = Path(given).rglob("*")
            # An unfinished run
            named.update(prefixes_of(path for path in below if ".partial" + os.sep not in str(path)))
        else:
            named.add(bare_prefix(given))  # opening it reports missing files
    output = os.path.abspath(output_prefix)
    prefixes = sorted(prefix for prefix in named if os.path.abspath(prefix) != output)
    if not prefixes:
        why = "it is the --output-prefix itself" if named else None
        do = "--input takes folders with .bin/.idx files, or prefixes"
        raise DataError(f"nothing to merge in {', '.join(inputs)}", why, do)
    return prefixes


def common_identity(prefixes: list[str]) -> dict | None:
    """The vocabulary of all datasets, from `<prefix>.stats.json`; None if no dataset has one. Raises DataError if they
    differ.
    """
    known = {prefix: identity for prefix in prefixes if (identity := identity_of(prefix))}
    prints = {tokenizer.get("fingerprint") for tokenizer in known.values()}
    if len(prints) > 1:
        first = next(iter(known))
        other = next(prefix for prefix in known if known[prefix].get("fingerprint") != known[first].get("fingerprint"))
        why = f"{first}: {name_of(known[first])}; {other}: {name_of(known[other])}"
        do = "preprocess them with the same tokenizer, and with one version: earlier ones gave some tokens other ids"
        raise DataError("the datasets were made with different vocabularies", why, do)
    return next(iter(known.values()), None)


def common_dtype(prefixes: list[str]) -> tuple[np.dtype, dict[str, int]]:
    """The dtype of all datasets, and the total of documents, sequences and tokens. Opens and checks each one."""
    dtypes, sizes = {}, dict(documents=0, sequences=0, tokens=0)
    for prefix in prefixes:
        dataset = open_tokens(prefix)
        dtypes.setdefault(dataset.dtype, prefix)
        sizes["documents"] += dataset.num_documents
        sizes["sequences"] += len(dataset)
        sizes["tokens"] += dataset.num_tokens
    if len(dtypes) > 1:
        why = "; ".join(f"{prefix}: {dtype.name}" for dtype, prefix in dtypes.items())
        raise DataError("the datasets hold tokens of different types", why, "preprocess them with one vocabulary")
    return next(iter(dtypes)), sizes


def check_modes(prefixes: list[str], multimodal: bool) -> None:
    """Raise DataError if a dataset has modes that would be lost, or lacks modes with --multimodal."""
    for prefix in prefixes:
        dataset = open_tokens(prefix)
        if dataset.sequence_modes is not None and not multimodal:
            do = "add --multimodal: without it the modes would be lost"
            raise DataError(f"{prefix}.idx holds a mode for each sequence: it is multimodal", do=do)
        if dataset.sequence_modes is None and multimodal and len(dataset):
            do = "leave --multimodal out, or leave out this dataset"
            raise DataError(f"--multimodal: {dataset.index_path} holds no modes of its {len(dataset)} sequences", do=do)


def refuse_damage(prefixes: list[str], log: Callable[[str], None]) -> None:
    """Raise DataError if a file does not match its checksums: new checksums of the result would hide the damage."""
    known = [prefix for prefix in prefixes if Path(manifest_path(prefix)).exists()]
    if others := [prefix for prefix in prefixes if prefix not in known]:
        log(f"note: without {manifest_path(others[0])} these bytes are taken as they are: {', '.join(others)}")
    damaged = {prefix: problems for prefix in known if (problems := verify(prefix))}
    if damaged:
        first = next(iter(damaged))
        what = "; ".join(problem for problems in damaged.values() for problem in problems[:3])
        why = f"so {manifest_path(first)} says; nothing was written"
        command = f"python -m megatron.tools.verify_data {first} --write"
        raise DataError(what, why, f"copy or preprocess it again; if it was changed on purpose: {command}")


def _modes(dataset: TokenFiles) -> np.ndarray:
    return np.empty(0, np.int8) if dataset.sequence_modes is None else dataset.sequence_modes


def _join_tokens(prefixes: list[str], path: str, head: bytes, log: Callable[[str], None]) -> None:
    target = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o644)
    try:
        write_at(target, head, 0)
        for prefix in prefixes:
            log(f"{prefix}: {size(_append_tokens(target, open_tokens(prefix)))}")
        os.fsync(target)
    finally:
        os.close(target)


def _append_tokens(target: int, dataset: TokenFiles) -> int:
    """Append all tokens of a dataset to a file. Returns their bytes."""
    if place := dataset.place():
        return append_file(target, *place)
    return write_at(target, dataset.tokens, os.lseek(target, 0, os.SEEK_END))


def _pieces(prefixes: list[str], numbers: Callable[[TokenFiles], np.ndarray]) -> Iterator[np.ndarray]:
    for prefix in prefixes:
        array = numbers(open_tokens(prefix))
        for at in range(0, len(array), PIECE):
            yield array[at : at + PIECE]


def _counts(prefixes: list[str]) -> Iterator[np.ndarray]:
    """Sequences of each document of all datasets."""
    for prefix in prefixes:
        boundaries = open_tokens(prefix).document_indices
        for at in range(0, len(boundaries) - 1, PIECE):
            counts = np.diff(boundaries[at : at + PIECE + 1])
            if counts.min() < 0:
                raise DataError(f"{prefix}: its documents run backwards", do="preprocess it again")
            yield counts
