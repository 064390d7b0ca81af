# SPDX-License-Identifier: Apache-2.0
"""A dataset with one document per sample (`--dataset-type webtext`), as Colossal-AI's WebtextDataset.

Long documents are truncated. Short ones are padded with the end-of-document token; padding does not count in the loss. An
epoch has each document once, in an order that depends only on seed and epoch.
"""

from pathlib import Path
from typing import Optional

import numpy as np

from megatron.data.indexed import Origin, SamplePart, TokenFiles, refuse_unknown_tokens
from megatron.errors import SettingsError

LEAST = 2  # tokens of a document: one input, one label


def document_lengths(tokens: TokenFiles) -> np.ndarray:
    """Tokens of each document, int64 [documents]; 0 for documents with nothing to predict."""
    starts = np.zeros(len(tokens) + 1, np.int64)
    np.cumsum(tokens.sequence_lengths, out=starts[1:])
    lengths = np.diff(starts[tokens.document_indices])
    return np.where(lengths < LEAST, 0, lengths)


def epoch_orders(count: int, epochs: int, seed: int) -> np.ndarray:
    """The order of `count` documents in each epoch, end to end: int32 [epochs x count].

    The order of an epoch does not depend on the number of epochs, so a longer run continues the shorter one.
    """
    orders = [np.random.RandomState([seed % 2**32, epoch]).permutation(count) for epoch in range(epochs)]
    return np.concatenate(orders).astype(np.int32)


class DocumentDataset:
    """At least `num_samples` samples (None: one epoch) from documents of a token file.

    documents: indices of documents; pad: the end-of-document token; cached(key, build, names): arrays from the index cache
    """

    def __init__(
        self,
        tokens: TokenFiles,
        documents: np.ndarray,
        num_samples: Optional[int],
        *,
        seq_length: int,
        seed: int,
        pad: Optional[int],
        vocab_size: Optional[int],
        cached,
    ):
        if pad is None:
            raise SettingsError(
                "--dataset-type webtext: the tokenizer has no end-of-document token to fill up samples with",
                do="give a tokenizer that has one, or leave the flag out",
            )
        self.tokens, self.documents = tokens, documents
        self.seq_length, self.pad, self.vocab_size = seq_length, pad, vocab_size
        epochs = -(-max(1, num_samples or 1) // len(documents))
        key = dict(kind="documents", count=len(documents), epochs=epochs, seed=seed)
        self.order = cached(key, lambda: {"order": epoch_orders(len(documents), epochs, seed)}, ("order",))["order"]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(token ids [seq_length + 1] int64, loss mask [seq_length + 1] float32: 0 for padding).

        Raises DataError for a token outside of the vocabulary.
        """
        ids = np.full(self.seq_length + 1, self.pad, np.int64)
        at = 0
        for part in self.tokens.get_parts((sequence, 0, length) for sequence, length in self._sequences(index)):
            ids[at : at + len(part)] = part
            at += len(part)
        refuse_unknown_tokens(ids, index, self)
        return ids, (np.arange(len(ids)) < at).astype(np.float32)

    def origin(self, index: int) -> Origin:
        """Token file and sequences of a sample, without reading its tokens."""
        parts = [SamplePart(sequence, 0, length) for sequence, length in self._sequences(index)]
        return Origin(self.tokens.prefix, int(self.order[index]), parts)

    def _document(self, index: int) -> int:
        return int(self.documents[self.order[index]])

    def _sequences(self, index: int) -> list[tuple[int, int]]:
        """(sequence, tokens taken from it) of a sample: its document's sequences, as many as fit."""
        taken, room, document = [], self.seq_length + 1, self._document(index)
        for sequence in range(*self.tokens.document_indices[document : document + 2].tolist()):
            length = min(room, int(self.tokens.sequence_lengths[sequence]))
            if length:
                taken.append((sequence, length))
                room -= length
        return taken


def describe_documents(prefix: str, split: str, lengths: np.ndarray, seq_length: int) -> str:
    """A log line with the shares of padding and truncated text. Documents of length 0 are left out."""
    full = seq_length + 1
    used = lengths[lengths > 0]
    taken = np.minimum(used, full).sum(dtype=np.int64)
    left_out = (
        f", {len(lengths) - len(used):,} of less than {LEAST} tokens left out" if len(used) < len(lengths) else ""
    )
    return (
        f"{Path(prefix).name}-{split}: {len(used):,} documents are as many samples{left_out}; "
        f"{1 - taken / (len(used) * full):.1%} of their tokens are filled up, "
        f"{1 - taken / used.sum(dtype=np.int64):.1%} of the text is cut off"
    )
