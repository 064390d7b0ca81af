# SPDX-License-Identifier: Apache-2.0
"""Choose the tokens of a sample to mask: equal to Megatron-LM's choice, draw for draw.

Words are visited in random order. For each, a number n is drawn, and the word is masked together with the n - 1 words that
follow, or with fewer if these have too many tokens. It is skipped if one of them is already masked. Masking ends at the
--mask-prob share of the sample's tokens.

A word of WordPiece is a piece and the following pieces marked "##"; in vocabularies without marks, each token is a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np

GEOMETRIC = 0.2  # of SpanBERT, section 3.1 (arXiv:1907.10529)


class Span(NamedTuple):
    """Positions that are masked together, and their original tokens."""

    positions: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Masking:
    """Masks the samples of a dataset.

    prob: share of tokens (of words with `spans` "words"); spans: see `MaskedSettings.mask_spans`; max_ngram: most words of
    a span; inner: bool [vocab], whether the token continues a word; apart: tokens that are never masked (cls, sep);
    replace: draws the replacement of a masked token, or None if replacements need no random numbers.
    """

    prob: float
    spans: str
    max_ngram: int
    inner: np.ndarray
    apart: tuple[int, ...] = ()
    replace: Optional["Replacement"] = None

    def most(self, length: int) -> int:
        """The most tokens (words, if `spans` is "words") to mask in a sample of a given length."""
        return max(1, round(length * self.prob))

    def choose(
        self, tokens: np.ndarray, target: int, state: np.random.RandomState
    ) -> tuple[list[Span], dict[int, int]]:
        """(masked spans in the order of their positions, position -> replacement of each masked token).

        tokens: int64 [length]; target: the target length of the sample. Without `replace`, there are no replacements.
        """
        words = self.words(tokens)
        order = np.arange(len(words))
        state.shuffle(order)
        ids, masked, spans, replaced = tokens.tolist(), set(), [], {}
        limit = self.limit(len(ids), len(words), target)
        draw = self._sizes(state)
        for first in order.tolist():
            if (len(spans) if self.spans == "words" else len(masked)) >= limit:
                break
            positions = self._span(words, first, draw(), limit - len(masked))
            if positions is None or not masked.isdisjoint(positions):
                continue
            masked.update(positions)
            if self.replace is not None:
                replaced.update((position, self.replace(ids[position], state)) for position in positions)
            spans.append(Span(positions, [ids[position] for position in positions]))
        spans.sort(key=lambda span: span.positions[0])
        return spans, replaced

    def words(self, tokens: np.ndarray) -> list[list[int]]:
        """Positions of each word, without tokens in `apart`; a piece after such a token continues the word before it."""
        free = np.flatnonzero(~np.isin(tokens, self.apart)) if self.apart else np.arange(len(tokens))
        starts = ~self.inner[tokens[free]]
        starts[:1] = True
        positions, bounds = free.tolist(), np.flatnonzero(starts).tolist() + [len(free)]
        return [positions[start:end] for start, end in zip(bounds, bounds[1:])]

    def limit(self, length: int, words: int, target: int) -> float:
        """Tokens (words, if `spans` is "words") to mask; may be below 1 for a very short target length."""
        if self.spans == "words":
            return self.most(words)
        return min(self.prob * target, self.most(length))

    def _sizes(self, state: np.random.RandomState):
        """A function that draws the number of words to mask together."""
        if self.spans == "words":
            return lambda: 1
        if self.spans == "geometric":
            return lambda: min(state.geometric(GEOMETRIC), self.max_ngram)
        shares = 1.0 / (np.arange(self.max_ngram, dtype=np.int64) + 1)
        shares = shares / shares.sum()
        shares = shares / shares.sum()
        sums = shares.cumsum()  # as RandomState.choice, without its checks
        sums /= sums[-1]
        return lambda: int(sums.searchsorted(state.random_sample(), side="right")) + 1

    def _span(self, words: Sequence[list[int]], first: int, size: int, room: float) -> Optional[list[int]]:
        """Positions of up to `size` words from `first` on, at most `room` tokens; None if the first word has more."""
        if self.spans == "words":
            return words[first]
        for count in range(size, 0, -1):
            positions = [position for word in words[first : first + count] for position in word]
            if len(positions) <= room:
                return positions
        return None


@dataclass(frozen=True)
class Replacement:
    """Draws the token that BERT reads in place of a masked one.

    strategy: see `MaskedSettings.mask_strategy`; vocab_size: random tokens are drawn from these ids
    """

    strategy: str
    mask: int
    vocab_size: int

    def __call__(self, token: int, state: np.random.RandomState) -> int:
        if self.strategy == "all-mask" or state.random_sample() < 0.8:
            return self.mask
        if state.random_sample() >= 0.5:
            return int(state.randint(0, self.vocab_size))
        return token
