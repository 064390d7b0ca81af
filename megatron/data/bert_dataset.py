# SPDX-License-Identifier: Apache-2.0
"""Samples for BERT: masked tokens and next-sentence prediction.

    train, valid, test = build_datasets(config, tokenizer, vocab_size, sizes, log)
    train[0]["text"]  # int64 [seq_length]: [CLS] first piece [SEP] second piece [SEP] padding

Samples equal Megatron-LM's, element for element, with two exceptions: `labels` of unmasked tokens are 0, not -1, and a
random token that happens to be [PAD] is not treated as padding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.labelled import pair_lengths
from megatron.data.masked_dataset import (
    MaskedSamples,
    build_masked_datasets,
    masked_settings,
    model_setting,
    special_tokens,
)
from megatron.data.masking import Masking, Replacement
from megatron.settings.schema import Config

MAX_NGRAM = 3
SPECIAL_POSITIONS = 3  # [CLS] and two [SEP]


def build_datasets(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    sizes: Sequence[int],
    log: Callable[[str], None] = lambda text: None,
    *,
    binary_head: Optional[bool] = None,
    heads: bool = False,
) -> tuple:
    """(train, valid, test), each None or with at least `sizes` samples.

    binary_head: whether to predict the next sentence (default: the recipe's setting `bert_binary_head`, else True)
    heads: the model has a head for each labelled task of --task-mixture (`mixture.tasks_of`). Samples then also have
    `task`, the index of their task, and `class_label`

    Raises SettingsError for a vocabulary without [CLS], [SEP] or [MASK], DataError for missing or insufficient data.
    """
    if binary_head is None:
        binary_head = model_setting(config, "bert_binary_head", True)
    samples, text = bert_samples(config, tokenizer, vocab_size, binary_head)
    if masked_settings(config).task_mixture:
        from megatron.data.mixture import build_mixture

        return build_mixture(config, tokenizer, vocab_size, sizes, log, samples, text, heads)
    return build_masked_datasets(config, vocab_size, sizes, log, samples, text)


def bert_samples(config: Config, tokenizer: Any, vocab_size: int, binary_head: bool) -> tuple["BertSamples", int]:
    """(factory of the samples, number of ids that text uses)."""
    settings, mock = masked_settings(config), config.data.mock_data
    special = special_tokens(tokenizer, vocab_size, ("cls", "sep", "mask"), False, mock)
    cls, sep, mask = special.ids["cls"], special.ids["sep"], special.ids["mask"]
    spans = settings.mask_spans or "ngrams"
    known = tokenizer.vocab_size if tokenizer is not None else vocab_size
    masking = Masking(
        settings.mask_prob,
        spans,
        settings.mask_max_ngram or MAX_NGRAM,
        special.inner,
        apart=(cls, sep),
        replace=Replacement(settings.mask_strategy, mask, known),
    )
    length = config.model.seq_length
    least = 2 if binary_head else 1
    kinds = model_setting(config, "num_tokentypes", 2)
    samples = BertSamples(settings, masking, length - SPECIAL_POSITIONS, least, length, cls, sep, binary_head, kinds)
    return samples, min(special.ids.values())


@dataclass(frozen=True)
class BertSamples(MaskedSamples):
    """Makes the samples of BERT, as `MaskedSamples` defines.

    seq_length: length of a sample with special tokens and padding; kinds: number of token types (--num-tokentypes)
    """

    seq_length: int
    cls: int
    sep: int
    binary_head: bool
    kinds: int = 2

    def make(self, sentences: list[np.ndarray], target: int, state: np.random.RandomState) -> dict[str, np.ndarray]:
        """Arrays of one sample; s: seq_length, padded at the end.

        text          int64 [s]: with masked tokens
        types         int64 [s]: 0 for [CLS], the first piece and its [SEP], 1 for the second, 0 for padding
        labels        int64 [s]: the token that was there, where it is masked; 0 elsewhere
        loss_mask     float32 [s]: 1 where masked
        padding_mask  int64 [s]: 0 for padding, else 1
        is_random     int64: 1 if the two pieces are swapped
        truncated     int64: 1 if tokens were cut off at the ends
        """
        first, second, is_random = self._pieces(sentences, state)
        first, second, truncated = cut_pair(first, second, target, state)
        tokens, types = join_pair(first, second, self.cls, self.sep)
        _, replaced = self.masking.choose(tokens, target, state)
        text, labels, loss_mask = tokens.copy(), np.zeros_like(tokens), np.zeros(len(tokens), np.float32)
        places = list(replaced)
        labels[places], loss_mask[places], text[places] = tokens[places], 1.0, list(replaced.values())
        filled = [padded(array, self.seq_length) for array in (text, types, labels, loss_mask, np.ones_like(tokens))]
        names = ("text", "types", "labels", "loss_mask", "padding_mask")
        flags = dict(is_random=np.array(int(is_random)), truncated=np.array(int(truncated)))
        return dict(zip(names, filled)) | flags

    def labelled(self, first: np.ndarray, second: Optional[np.ndarray], label: np.ndarray) -> dict[str, np.ndarray]:
        """The sample of a labelled text, without masks or label: [CLS] first [SEP], or [CLS] first [SEP] second [SEP].

        With a single token type, only [SEP] separates the texts of a pair.
        """
        pieces = fitted(first, second, self.longest)
        tokens, types = join_pair(*pieces, self.cls, self.sep)
        types = np.zeros_like(types) if self.kinds == 1 else types
        filled = [padded(array, self.seq_length) for array in (tokens, types, np.ones_like(tokens))]
        nothing = np.zeros(self.seq_length, np.int64)
        truncated = sum(map(len, pieces)) < len(first) + len(pieces[1] if second is None else second)
        return dict(
            zip(("text", "types", "padding_mask"), filled),
            labels=nothing,
            loss_mask=nothing.astype(np.float32),
            is_random=np.array(0),
            truncated=np.array(int(truncated)),
        )

    def _pieces(self, sentences: list[np.ndarray], state) -> tuple[np.ndarray, np.ndarray, bool]:
        """Split the sentences before a random one: (first piece, second piece, whether they are swapped)."""
        pivot, exchanged = len(sentences), False
        if self.binary_head:
            pivot = int(state.randint(1, len(sentences))) if len(sentences) >= 3 else 1
            exchanged = state.random_sample() < 0.5
        pieces = [_joined(sentences[:pivot]), _joined(sentences[pivot:])]
        return (*(pieces[::-1] if exchanged else pieces), exchanged)


def cut_pair(first: np.ndarray, second: np.ndarray, most: int, state) -> tuple[np.ndarray, np.ndarray, bool]:
    """Truncate a pair to `most` tokens in total; the third value says whether tokens were cut off.

    Each token is cut from the longer piece, at a random end.
    """
    over = len(first) + len(second) - most
    if over <= 0:
        return first, second, False
    ends = [[0, len(first)], [0, len(second)]]
    for at_start in (state.random_sample(over) < 0.5).tolist():
        (start_a, end_a), (start_b, end_b) = ends
        longer = ends[0] if end_a - start_a > end_b - start_b else ends[1]
        longer[0 if at_start else 1] += 1 if at_start else -1
    return first[slice(*ends[0])], second[slice(*ends[1])], True


def join_pair(first: np.ndarray, second: np.ndarray, cls: int, sep: int) -> tuple[np.ndarray, np.ndarray]:
    """([CLS] first [SEP] second [SEP], the type of each token), int64; without a second piece, one [SEP]."""
    tokens, count = [[cls], first, [sep]], len(first) + 2
    if len(second):
        tokens += [second, [sep]]
    tokens = np.concatenate(tokens).astype(np.int64)
    types = (np.arange(len(tokens)) >= count).astype(np.int64)
    return tokens, types


def fitted(first: np.ndarray, second: Optional[np.ndarray], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Truncate two texts at their ends to `most` tokens in total. A missing second text becomes an empty one."""
    second = first[:0] if second is None else second
    of_first, of_second = pair_lengths(len(first), len(second), most)
    return first[:of_first], second[:of_second]


def padded(array: np.ndarray, length: int) -> np.ndarray:
    """Pad an array with zeros to `length`. Masks mark the padding."""
    assert len(array) <= length, f"{len(array)} tokens in a sample of {length}"
    whole = np.zeros(length, array.dtype)
    whole[: len(array)] = array
    return whole


def _joined(sentences: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(sentences).astype(np.int64) if sentences else np.empty(0, np.int64)
