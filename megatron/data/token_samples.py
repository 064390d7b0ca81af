# SPDX-License-Identifier: Apache-2.0
"""Shared parts of datasets on token files: the origin of samples, and the check of their token ids."""

from typing import NamedTuple

import numpy as np

from megatron.errors import DataError


class SamplePart(NamedTuple):
    """A piece of a sample: tokens [offset, offset + length) of a sequence ("document") of a token file."""

    document: int
    offset: int
    length: int


class Origin(NamedTuple):
    """The origin of a sample: token file, index of the sample before the shuffle, and its pieces in order."""

    prefix: str
    number: int
    parts: list[SamplePart]


def refuse_unknown_tokens(ids: np.ndarray, index: int, dataset) -> None:
    """Raise DataError if sample `index` of a dataset has an id outside of its `vocab_size` (None: unknown)."""
    size = dataset.vocab_size
    if size is not None and (ids.max() >= size or ids.min() < 0):
        raise DataError(
            f"{dataset.tokens.tokens_path} holds token {ids[(ids >= size) | (ids < 0)][0]}, outside of the vocabulary of "
            f"{size}",
            f"in sample {index}, which starts in document {dataset.origin(index).parts[0].document}",
            "train with the tokenizer that the data was preprocessed with",
        )
