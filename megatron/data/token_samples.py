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


class UnknownToken(DataError):
    """A sample has a token outside of the vocabulary. token: its id; where: its file and sample"""

    def __init__(self, token: int, size: int, file: str, sample: str):
        self.token, self.where = token, f"{file}, {sample},"
        do = "train with the tokenizer that the data was preprocessed with"
        super().__init__(f"{file} holds token {token}, outside of the vocabulary of {size}", f"in {sample}", do)


def refuse_unknown_tokens(ids: np.ndarray, index: int, dataset) -> None:
    """Raise UnknownToken if sample `index` of a dataset has an id outside of its `vocab_size` (None: unknown)."""
    size = dataset.vocab_size
    if size is not None and (ids.max() >= size or ids.min() < 0):
        wrong = int(ids[(ids >= size) | (ids < 0)][0])
        document = dataset.origin(index).parts[0].document
        sample = f"sample {index}, which starts in document {document}"
        raise UnknownToken(wrong, size, str(dataset.tokens.tokens_path), sample)
