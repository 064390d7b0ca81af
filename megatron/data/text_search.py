# SPDX-License-Identifier: Apache-2.0
"""Search the documents of token files for a text: a scan of all tokens for hashed n-grams of the text's tokens.

Inside of another text, the first and last tokens may be different ones, so the search uses n-grams of the inner tokens. A
document with the text has nearly all of them; one with a part of the text has some.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.contamination import NgramIndex
from megatron.data.indexed import TokenFiles
from megatron.data.ngrams import all_ngram_hashes, spread, words_of
from megatron.errors import DataError

LONGEST = 13  # tokens of an n-gram
BLOCK = 1 << 19  # tokens processed together
EDGE = 2  # tokens at each end of a text that may differ inside of a document


class Holder(NamedTuple):
    """A document, and the share of the text's n-grams in it."""

    document: int
    share: float


def search(tokens: TokenFiles, variants: Iterable[Sequence[int]]) -> list[Holder]:
    """Documents with parts of a text, sorted by share, largest first.

    variants: tokens of the text as it may occur in a document: at the beginning, after a space
    """
    wanted = [ngrams_of(np.asarray(ids, np.int64)) for ids in variants if len(ids)]
    if not wanted:
        raise DataError("the text has no tokens")
    matches: dict[int, set[int]] = {}
    for n in {n for n, _ in wanted}:
        hashes = np.unique(np.concatenate([own for size, own in wanted if size == n]))
        for document, number in _places(tokens, n, hashes):
            matches.setdefault(document, set()).add(int(hashes[number]))
    holders = []
    for document, own in matches.items():
        share = max(len(own.intersection(hashes.tolist())) / len(set(hashes.tolist())) for _, hashes in wanted)
        holders.append(Holder(document, share))
    return sorted(holders, key=lambda holder: (-holder.share, holder.document))


def search_words(documents: Iterable[tuple[int, str]], text: str) -> list[Holder]:
    """Documents with sequences of a text's words, with any punctuation, sorted by share, largest first.

    documents: (number, text) of each
    """
    count = len(words_of(text).hashes)
    if not count:
        raise DataError("the text has no words")
    n = min(LONGEST, (count + 1) // 2)
    index = NgramIndex.empty(n, n).with_set("text", [[text]])
    holders = []
    for number, own in documents:
        shared = len(np.unique(index.find([own]).ngrams))
        if shared:
            holders.append(Holder(number, shared / len(index.hashes)))
    return sorted(holders, key=lambda holder: (-holder.share, holder.document))


def ngrams_of(ids: np.ndarray) -> tuple[int, np.ndarray]:
    """(n, hashes of the n-grams) of a text's inner tokens, or of all tokens of a short text."""
    inner = ids[EDGE:-EDGE] if len(ids) > 4 * EDGE else ids[1:-1] if len(ids) > 2 else ids
    n = min(LONGEST, (len(inner) + 1) // 2)  # several n-grams, to match parts of a text
    return n, next(iter(all_ngram_hashes(spread(inner), [n])))


def variants_of(text: str, encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """The encodings of a text as it may occur in a document."""
    variants = [list(map(int, encode(before + text))) for before in ("", " ", "\n")]
    return [ids for number, ids in enumerate(variants) if ids not in variants[:number]]


def _places(tokens: TokenFiles, n: int, hashes: np.ndarray) -> Iterable[tuple[int, int]]:
    """(document, index of the hash) of each match within a document."""
    index = NgramIndex(hashes, np.zeros(len(hashes) + 1, np.int64), np.empty(0, np.uint32), (), (n,))
    starts = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens.sequence_lengths, out=starts[1:])
    bounds = starts[tokens.document_indices]
    for at in range(0, max(1, tokens.num_tokens - n + 1), BLOCK):
        piece = tokens.tokens[at : at + BLOCK + n - 1]
        places, numbers = index.lookup(next(iter(all_ngram_hashes(spread(piece), [n]))))
        first = np.searchsorted(bounds, places + at, "right") - 1
        last = np.searchsorted(bounds, places + at + n - 1, "right") - 1
        own = first == last
        yield from sorted(set(zip(first[own].tolist(), numbers[own].tolist(), strict=True)))
