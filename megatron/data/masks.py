# SPDX-License-Identifier: Apache-2.0
"""Loss mask, position ids and document ids of samples with several documents. b: batch, s: sequence.

They follow from the end-of-document tokens, each of which belongs to the document that it ends, unless samples name
their documents themselves:

    >>> tokens = np.array([[5, 6, 0, 7, 8]])  # 0 ends a document
    >>> documents = document_ids(tokens, eod=0)
    >>> documents, position_ids(documents), loss_mask(tokens, eod=0)
    (array([[0, 0, 0, 1, 1]], dtype=int32), array([[0, 1, 2, 0, 1]]), array([[1., 1., 0., 1., 1.]], dtype=float32))
"""

import numpy as np


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
