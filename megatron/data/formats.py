# SPDX-License-Identifier: Apache-2.0
"""The formats of token files: detection, opening, names, writing, and the datasets in a folder.

tokens = open_tokens("corpus_text_document")  # .bin/.idx of Megatron-LM, or _ids.npy/_idx.npz of PaddlePaddle
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.data import paddle
from megatron.data.indexed import ENDINGS, IndexedDataset, TokenFiles, bare_prefix, stream_index, token_dtype
from megatron.errors import DataError


@dataclass(frozen=True)
class Format:
    """A format of token files.

    `endings`: of the token file and of the index. `dtype`: vocabulary size -> dtype of an id. `head`: bytes before the
    tokens; `make_head`: (dtype, tokens) -> these bytes. `write_index`: (path, dtype, sequences, documents, lengths,
    per_document) as `indexed.stream_index`. `keeps_empty`: whether a document without tokens counts.
    """

    name: str
    endings: tuple[str, str]
    open: Callable[[str], TokenFiles]
    dtype: Callable[[int | None], np.dtype]
    head: int
    make_head: Callable[[np.dtype, int], bytes]
    write_index: Callable[..., None]
    keeps_empty: bool


MEGATRON = Format(
    "megatron", (".bin", ".idx"), IndexedDataset, token_dtype, 0, lambda dtype, count: b"", stream_index, True
)
PADDLE = Format(
    "paddle",
    (paddle.IDS, paddle.INDEX),
    paddle.PaddleDataset,
    paddle.paddle_dtype,
    paddle.HEAD,
    paddle.npy_head,
    lambda path, dtype, *rest: paddle.stream_npz(path, *rest),
    False,
)
FORMATS = {form.name: form for form in (MEGATRON, PADDLE)}
LAYOUTS = (MEGATRON.endings, PADDLE.endings, (paddle.OLD,))  # endings of the files of one dataset


def open_tokens(prefix: str | os.PathLike) -> TokenFiles:
    """Open the token files of a prefix, in any format. Raises DataError for missing or damaged files, or two formats."""
    kind = MEGATRON if endings_of(prefix) == MEGATRON.endings else PADDLE
    return kind.open(prefix)


def endings_of(prefix: str | os.PathLike) -> tuple[str, ...]:
    """The endings of a prefix's files: those of the format that exists, else of .bin/.idx.

    Raises DataError for files of two formats: companion files (checksums, vocabulary) could belong to either.
    """
    prefix = bare_prefix(prefix)
    there = [endings for endings in LAYOUTS if os.path.exists(prefix + endings[-1])]
    there = there or [endings for endings in LAYOUTS if os.path.exists(prefix + endings[0])]
    if len(there) > 1:
        names = " and ".join(prefix + endings[-1] for endings in there)
        raise DataError(f"{names} both exist", do="one name must be one dataset: rename or remove one of them")
    return there[0] if there else MEGATRON.endings


def is_folder(word: str) -> bool:
    """Whether a word names a folder, and no token files with the same prefix exist."""
    return os.path.isdir(word) and not any(os.path.exists(word + ending) for ending in ENDINGS)


def datasets_of(word: str) -> list[str]:
    """The prefixes of a word: the word itself, or all prefixes in the folder that it names."""
    return prefixes_in(word) if is_folder(word) else [word]


def prefixes_in(folder: str | os.PathLike) -> list[str]:
    """The prefixes of all token files in a folder, sorted; sub-folders are not searched.

    Raises DataError for a folder without token files, or if one file of a pair is missing.
    """
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
    stems = set()
    for endings in LAYOUTS:
        for name in names:
            ending = next((ending for ending in endings if name.endswith(ending)), None)
            if ending is None or name.startswith("."):
                continue
            stem = name.removesuffix(ending)
            lost = [stem + other for other in endings if stem + other not in names]
            if lost:
                do = "copy both, or remove it from the folder"
                raise DataError(f"{Path(folder, name)} has no {lost[0]} next to it", do=do)
            stems.add(stem)
    if not stems:
        why = "token files are *.bin with *.idx, *_ids.npy with *_idx.npz, or *_ids.npz; sub-folders are not searched"
        raise DataError(f"there are no token files in the folder {folder}", why, "give a prefix or another folder")
    return [str(Path(folder, stem)) for stem in sorted(stems)]
