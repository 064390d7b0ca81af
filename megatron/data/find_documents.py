# SPDX-License-Identifier: Apache-2.0
"""Search the documents of token files for a text, and find documents in the order of training.

    places = find_places(train, "corpus_text_document", [7])   # indices of samples with tokens of sequence 7, sorted
    [train.origin(place) for place in places]

Documents are found in the order of training by inverse look-up in the index maps of `gpt_dataset.py`, the same arrays as in
training, in some milliseconds for ten million documents. A document of a token file is one sequence, or one sequence per
sentence.

A text is searched for by a scan of all tokens for hashed n-grams of its tokens. Inside of another text, its first and last
tokens may be different ones, so the search uses n-grams of the inner tokens. A document with the text has nearly all of
them; one with a part of the text has some.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron.data.blend import BlendedDataset, Repeated
from megatron.data.contamination import NgramIndex
from megatron.data.document_dataset import DocumentDataset
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.indexed import TokenFiles
from megatron.data.masked_dataset import MaskedDataset
from megatron.data.ngrams import all_ngram_hashes, spread, words_of
from megatron.errors import DataError


def find_places(dataset, prefix: str, sequences: Collection[int]) -> np.ndarray:
    """Indices of a dataset's samples with any token of these sequences of a token file: int64, sorted.

    Raises DataError for a dataset that is not built from token files.
    """
    if isinstance(dataset, Repeated):
        inner = find_places(dataset.dataset, prefix, sequences)
        starts = np.arange(0, len(dataset), len(dataset.dataset))
        places = (starts[:, None] + inner[None, :]).reshape(-1)
        return places[places < len(dataset)]
    if isinstance(dataset, BlendedDataset):
        places_of_parts = [np.empty(0, np.int64)]
        for number, part in enumerate(dataset.datasets):
            mine = np.flatnonzero(dataset.dataset_index == number)
            wanted = np.zeros(max(len(part), 1), bool)
            wanted[find_places(part, prefix, sequences)] = True
            places_of_parts.append(mine[wanted[dataset.dataset_sample_index[mine]]])
        return np.sort(np.concatenate(places_of_parts))
    if isinstance(dataset, GPTDataset):
        return _of_samples(dataset, sequences) if dataset.tokens.prefix == prefix else np.empty(0, np.int64)
    if isinstance(dataset, DocumentDataset):
        return _of_documents(dataset, sequences) if dataset.tokens.prefix == prefix else np.empty(0, np.int64)
    if isinstance(dataset, MaskedDataset):
        return _of_sentences(dataset, sequences) if dataset.tokens.prefix == prefix else np.empty(0, np.int64)
    raise DataError(f"{type(dataset).__name__} does not say where its samples come from")


def _of_sentences(dataset: MaskedDataset, sequences: Collection[int]) -> np.ndarray:
    """`find_places` for samples of consecutive sentences."""
    wanted = np.zeros(len(dataset.tokens.sequence_lengths) + 1, np.int64)
    wanted[np.asarray(list(sequences), np.int64) + 1] = 1
    before = np.cumsum(wanted)  # number of wanted sentences before each sentence
    first, last = dataset.sample_index[:, 0].astype(np.int64), dataset.sample_index[:, 1].astype(np.int64)
    return np.flatnonzero(before[last] > before[first])


def _of_samples(dataset: GPTDataset, sequences: Collection[int]) -> np.ndarray:
    """`find_places` for GPT samples. A sample includes the first token of the next one, the label of its last position."""
    lengths = dataset.tokens.sequence_lengths
    wanted = np.zeros(len(lengths), bool)
    wanted[np.asarray(list(sequences), np.int64)] = True
    wanted &= lengths > 0
    at = np.flatnonzero(wanted[dataset.document_index])  # in the stream of all epochs
    first = np.ascontiguousarray(dataset.sample_index[:, 0])
    start = np.maximum(np.searchsorted(first, at, "left") - 1, 0)
    stop = np.minimum(np.searchsorted(first, at, "right"), len(dataset))
    holding = np.zeros(len(dataset) + 1, np.int32)  # +1 where a run of samples starts, -1 after its end
    some = start < stop
    np.add.at(holding, start[some], 1)
    np.add.at(holding, stop[some], -1)
    samples = np.cumsum(holding[:-1]) > 0
    return np.flatnonzero(samples[dataset.shuffle_index])


def _of_documents(dataset: DocumentDataset, sequences: Collection[int]) -> np.ndarray:
    """`find_places` for one document per sample. Sequences that do not fit are in no sample."""
    indices = dataset.tokens.document_indices
    wanted = np.zeros(len(indices), bool)
    documents = np.searchsorted(indices, np.asarray(list(sequences), np.int64), "right") - 1
    wanted[documents] = True
    places = np.flatnonzero(wanted[dataset.documents[dataset.order]])
    chosen = set(sequences)
    held = [any(part.document in chosen for part in dataset.origin(int(place)).parts) for place in places]
    return places[np.array(held, bool)]


def document_of(tokens: TokenFiles, sequence: int) -> int:
    """The document of a sequence."""
    return int(np.searchsorted(tokens.document_indices, sequence, "right")) - 1


def sequences_of_document(tokens: TokenFiles, document: int) -> range:
    """The sequences of a document. Raises DataError if there is no such document."""
    if not 0 <= document < tokens.num_documents:
        raise DataError(f"{tokens.prefix} has documents 0 to {tokens.num_documents - 1:,}, and no {document:,}")
    return range(*tokens.document_indices[document : document + 2].tolist())


def files_of(dataset) -> dict[str, TokenFiles]:
    """The token files of a dataset: prefix -> files."""
    return {tokens.prefix: tokens for tokens in _files_in(dataset)}


def epoch_length(dataset, prefix: str) -> int:
    """Approximate number of samples of a dataset per pass over a token file; 0 if the dataset does not use the file."""
    if isinstance(dataset, Repeated):
        return epoch_length(dataset.dataset, prefix)
    if isinstance(dataset, BlendedDataset):
        for number, part in enumerate(dataset.datasets):
            if own := epoch_length(part, prefix):
                taken = int(np.count_nonzero(dataset.dataset_index == number))
                return max(1, round(own * len(dataset) / max(taken, 1)))
        return 0
    if dataset.tokens.prefix != prefix:
        return 0
    if isinstance(dataset, DocumentDataset):
        return len(dataset.documents)
    if isinstance(dataset, MaskedDataset):
        return 0  # all epochs are shuffled together
    return max(1, dataset.plan.tokens // dataset.plan.seq_length)


def _files_in(dataset) -> Iterator[TokenFiles]:
    if isinstance(dataset, Repeated):
        yield from _files_in(dataset.dataset)
    elif isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from _files_in(part)
    elif hasattr(dataset, "tokens"):
        yield dataset.tokens
    else:
        raise DataError(f"{type(dataset).__name__} does not say where its samples come from")


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
