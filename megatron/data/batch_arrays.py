# SPDX-License-Identifier: Apache-2.0
"""The arrays of a batch: samples as dicts of arrays are checked, and texts of several documents get masks and positions.

>>> arrays = {"text": SampleArray(3, below=10), "loss_mask": SampleArray(3, mask=True)}
>>> checked({"text": [1, 2, 3], "loss_mask": [0, 1, 1]}, arrays, "sample 0")["loss_mask"]
array([0., 1., 1.], dtype=float32)

Loss mask, position ids and document ids follow from the end-of-document tokens, each of which belongs to the document that
it ends, unless samples name their documents themselves. b: batch, s: sequence.

>>> tokens = np.array([[5, 6, 0, 7, 8]])  # 0 ends a document
>>> documents = document_ids(tokens, eod=0)
>>> documents, position_ids(documents), loss_mask(tokens, eod=0)
(array([[0, 0, 0, 1, 1]], dtype=int32), array([[0, 1, 2, 0, 1]]), array([[1., 1., 0., 1., 1.]], dtype=float32))"""

from collections.abc import Callable, Iterable, Mapping
from typing import Optional

import numpy as np

from megatron.errors import DataError
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray

Refuse = Callable[[Iterable[int], str], None]
DOCUMENTED = "docs/encoder_decoder.md#samples"


def checked(
    sample, arrays: Mapping[str, SampleArray], where: str, refuse: Refuse = lambda ids, where: None
) -> dict[str, np.ndarray]:
    """The sample with each array as int64, or float32 for masks. Raises DataError for an invalid sample.

    refuse: for ids that are too large, in better words: see `MicroBatchLoader`
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{where} is no sample: {type(sample).__name__}",
            f"this model is given dicts of arrays: {', '.join(arrays)}",
            f"mend the dataset ({DOCUMENTED})",
        )
    if missing := [name for name in arrays if name not in sample]:
        raise DataError(
            f"{where} has no {', '.join(missing)}",
            f"a sample has {', '.join(arrays)}; here are {', '.join(map(str, sample)) or 'none'}",
            f"mend the dataset ({DOCUMENTED})",
        )
    named = {name: f"{where}, {name}" for name in arrays}
    return {name: _checked(np.asarray(sample[name]), array, named[name], refuse) for name, array in arrays.items()}


def _checked(given: np.ndarray, array: SampleArray, where: str, refuse: Refuse) -> np.ndarray:
    kinds = "biuf" if array.mask else "biu"
    if given.shape != array.shape or given.dtype.kind not in kinds:
        raise DataError(
            f"{where} is {given.dtype} of shape {list(given.shape)}",
            f"wanted: {array.words()}",
            f"mend the dataset ({DOCUMENTED})",
        )
    if array.mask:
        if not (np.isfinite(given).all() and given.min(initial=0) >= 0):
            raise DataError(f"{where} is no mask", f"wanted: {array.words()}", f"mend the dataset ({DOCUMENTED})")
        return given.astype(np.float32, copy=False)
    flat = given.reshape(-1)
    if not 0 <= flat.min() <= flat.max() < array.below:
        refuse(flat, where)
        at = int(np.argmax((flat < 0) | (flat >= array.below)))
        raise DataError(
            f"{where} holds {flat[at]} at position {at}",
            f"wanted: {array.words()}",
            "give a --vocab-size above the largest id, or mend the dataset",
        )
    return given.astype(np.int64, copy=False)


def hashed(sample: Mapping[str, np.ndarray]) -> np.ndarray:
    """The part of a sample that the ledger hashes: the numbers of all its arrays, int64."""
    return np.concatenate(
        [
            array.reshape(-1).view(np.int32).astype(np.int64) if array.dtype == np.float32 else array.reshape(-1)
            for array in sample.values()
        ]
    )


def without_negative_labels(sample):
    """Replace negative labels by 0 where the loss mask is 0 (Megatron-LM's samples have -1 there)."""
    if not isinstance(sample, Mapping) or LABELS not in sample or LOSS_MASK not in sample:
        return sample
    labels, counts = np.asarray(sample[LABELS]), np.asarray(sample[LOSS_MASK])
    if labels.shape != counts.shape or labels.dtype.kind != "i":
        return sample
    return {**sample, LABELS: np.where((labels < 0) & (counts == 0), 0, labels)}


def document_ids(tokens: np.ndarray, eod: int) -> np.ndarray:
    """Index of each token's document, from 0 in every row: [b, s] -> [b, s] int32."""
    ids = np.zeros(tokens.shape, np.int32)
    np.cumsum(tokens[:, :-1] == eod, axis=1, out=ids[:, 1:])
    return ids


def document_starts(documents: np.ndarray) -> np.ndarray:
    """Position of the first token of each token's document, from `document_ids`: [b, s] -> [b, s] int32."""
    starts = np.zeros(documents.shape, np.int32)
    begins = documents[:, 1:] != documents[:, :-1]
    starts[:, 1:] = np.where(begins, np.arange(1, documents.shape[1], dtype=np.int32), 0)
    return np.maximum.accumulate(starts, axis=1)


def position_ids(documents: np.ndarray) -> np.ndarray:
    """Positions that restart at 0 in each document, from `document_ids`: [b, s] -> [b, s] int64."""
    return np.arange(documents.shape[1]) - document_starts(documents)


def loss_mask(tokens: np.ndarray, eod: int) -> np.ndarray:
    """0 where the input is the end of a document, else 1: [b, s] -> [b, s] float32.

    The end of a document is predicted; the first token of the next document is not.
    """
    return (tokens != eod).astype(np.float32)


def ahead(
    rows: np.ndarray, depths: int, mask: Optional[np.ndarray], documents: Optional[np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What multi-token prediction needs of samples: (tokens, labels, weights of their losses), [depths, b, s] each.

    Depth k (from 1) has at a position the token k places later, and as its label the token after that. Both are of the same
    document, or the loss does not count. The weights of a sample's tokens have the sum that `mask` has for it, so that each
    depth has the mean of its own tokens, and none depends on how samples are grouped.

    rows: [b, s + 1] ids; mask: [b, s], or None if all tokens count; documents: [b, s], or None for one document

    >>> tokens, labels, weights = ahead(np.array([[5, 6, 7, 8]]), 1, None, None)
    >>> tokens.tolist(), labels.tolist(), weights.tolist()
    ([[[6, 7, 0]]], [[[7, 8, 0]]], [[[1.5, 1.5, 0.0]]])
    """
    b, s = rows.shape[0], rows.shape[1] - 1
    counted = np.ones((b, s), np.float32) if mask is None else mask
    documents = np.zeros((b, s), np.int32) if documents is None else documents
    tokens, labels = (np.zeros((depths, b, s), np.int64) for _ in range(2))
    weights = np.zeros((depths, b, s), np.float32)
    for k in range(1, min(depths, s - 1) + 1):
        same = documents[:, k:] == documents[:, :-k]
        tokens[k - 1, :, :-k] = np.where(same, rows[:, k:-1], 0)
        labels[k - 1, :, :-k] = np.where(same, rows[:, k + 1 :], 0)
        own = np.where(same, counted[:, k:], 0)
        total = own.sum(1, keepdims=True)
        weights[k - 1, :, :-k] = own * np.divide(counted.sum(1, keepdims=True), total, where=total > 0, out=total * 0)
    return tokens, labels, weights
