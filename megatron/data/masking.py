# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a sample are masked: Megatron-LM's choice for the same random numbers, draw for draw.

Words are gone through in a random order. Of each, a number n is drawn, and it is masked together with the n - 1 words
that follow, or with fewer where that would be too many tokens; not at all where one of them is masked already. It ends
with the --mask-prob share of the sample's tokens.

A word of WordPiece is a piece with those marked "##" behind it; where no pieces are marked, each token is a word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np

GEOMETRIC = 0.2  # of SpanBERT, section 3.1 (arXiv:1907.10529)


class Span(NamedTuple):
    """Positions in the sample that are masked together, and the tokens that were there."""

    positions: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Masking:
    """How to mask, for all samples of a dataset.

    prob: share of tokens (of words with `spans` "words"); spans: see `MaskedSettings.mask_spans`; max_ngram: words of a
    span at most; inner: bool [vocab], the token goes on a word; apart: tokens that are never masked (cls, sep);
    replace: what stands for a masked token that is random (`mask_80_10_10`), or None where that is decided without
    random numbers.
    """

    prob: float
    spans: str
    max_ngram: int
    inner: np.ndarray
    apart: tuple[int, ...] = ()
    replace: Optional["Replacement"] = None

    def most(self, length: int) -> int:
        """Tokens (words, by words) that are masked in a sample of a length at most."""
        return max(1, round(length * self.prob))

    def choose(
        self, tokens: np.ndarray, target: int, state: np.random.RandomState
    ) -> tuple[list[Span], dict[int, int]]:
        """(masked spans in the order of their positions, position -> replacement of each masked token).

        tokens: int64 [length]; target: the length that the sample was meant to have. Replacements are empty where
        `replace` is None.
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
        """Positions of each word, those that are `apart` left out: a piece behind one goes on the word before it."""
        free = np.flatnonzero(~np.isin(tokens, self.apart)) if self.apart else np.arange(len(tokens))
        starts = ~self.inner[tokens[free]]
        starts[:1] = True
        positions, bounds = free.tolist(), np.flatnonzero(starts).tolist() + [len(free)]
        return [positions[start:end] for start, end in zip(bounds, bounds[1:])]

    def limit(self, length: int, words: int, target: int) -> float:
        """Tokens (words, by words) to mask. A sample that was meant to be very short may have none."""
        if self.spans == "words":
            return self.most(words)
        return min(self.prob * target, self.most(length))

    def _sizes(self, state: np.random.RandomState):
        """Draws how many words are masked together."""
        if self.spans == "words":
            return lambda: 1
        if self.spans == "geometric":
            return lambda: min(state.geometric(GEOMETRIC), self.max_ngram)
        shares = 1.0 / (np.arange(self.max_ngram, dtype=np.int64) + 1)
        shares = shares / shares.sum()
        shares = shares / shares.sum()
        sums = shares.cumsum()  # what RandomState.choice does, without its checks
        sums /= sums[-1]
        return lambda: int(sums.searchsorted(state.random_sample(), side="right")) + 1

    def _span(self, words: Sequence[list[int]], first: int, size: int, room: float) -> Optional[list[int]]:
        """Positions of up to `size` words from the first on that have at most `room` tokens; None where one has more."""
        if self.spans == "words":
            return words[first]
        for count in range(size, 0, -1):
            positions = [position for word in words[first : first + count] for position in word]
            if len(positions) <= room:
                return positions
        return None


@dataclass(frozen=True)
class Replacement:
    """What BERT reads in the place of a masked token. strategy: see `MaskedSettings.mask_strategy`; vocab_size: ids that
    a random token is drawn from.
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
