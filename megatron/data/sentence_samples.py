# SPDX-License-Identifier: Apache-2.0
"""The order of samples built from sentences: equal to Megatron-LM's for BERT and T5, element for element.

A sample consists of consecutive sentences of one document, up to its target length. The target is the longest length that
fits, except for a share of samples (--short-seq-prob) with a random target. Documents are visited in order, epoch after
epoch, until there are enough samples. Then all samples are shuffled together.

A document gives no sample, and is counted in `Dropped`, if
- it has no sentence;
- it has several sentences, and one of more than 512 tokens;
- it has fewer sentences than a sample needs: two for BERT with next-sentence prediction, else one.

All functions are pure; none reads or writes files.

Megatron-LM draws from C++'s std::mt19937 and std::mt19937_64:

>>> mt19937_64(5489, 10000)[-1]  # the C++ standard gives this value, [rand.predef]
np.uint64(9981545732273789042)
"""

import array
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple, Optional

import numpy as np

from megatron.errors import SettingsError

LONG_SENTENCE = 512  # tokens; Megatron-LM's constant, independent of --seq-length


class Dropped(NamedTuple):
    """Number of documents of one epoch that give no sample, by rule."""

    empty: int
    long_sentence: int
    few_sentences: int

    def describe(self, total: int, least: int) -> str:
        """A log line, "" if none is dropped; total: number of documents; least: fewest sentences of a sample."""
        rules = (
            (self.empty, "without a sentence"),
            (self.long_sentence, f"of several sentences with one of more than {LONG_SENTENCE} tokens"),
            (self.few_sentences, f"with fewer than {least} sentences"),
        )
        parts = [f"{count:,} {words}" for count, words in rules if count]
        return f"{sum(self):,} of {total:,} documents are dropped: {', '.join(parts)}" if parts else ""


def kept_documents(documents: np.ndarray, lengths: np.ndarray, least: int) -> tuple[np.ndarray, Dropped]:
    """(bool [documents], True for documents with samples; counts of the others by rule).

    documents: int64 [documents + 1], the first sentence of each; lengths: tokens of each sentence of the file.
    """
    first, last = int(documents[0]), int(documents[-1])
    long_before = np.zeros(last - first + 1, np.int64)
    np.cumsum(lengths[first:last] > LONG_SENTENCE, out=long_before[1:])
    has_long = np.diff(long_before[documents - first]) > 0
    counts = np.diff(documents)
    long = (counts > 1) & has_long
    few = ~long & (counts > 0) & (counts < least)
    empty = counts == 0
    return ~(long | few | empty), Dropped(*(int(rule.sum()) for rule in (empty, long, few)))


def build_sentence_samples(
    documents: np.ndarray,
    lengths: np.ndarray,
    num_samples: Optional[int],
    *,
    longest: int,
    least: int,
    short_seq_prob: float,
    seed: int,
) -> np.ndarray:
    """Build the sample index: [samples, 3] of (first sentence, last + 1, target length), in the order of training.

    It covers as many epochs as `num_samples` need (None: one). uint32, or uint64 for files of more than 2**32 sentences.
    documents: int64 [documents + 1], the first sentence of each; lengths: tokens of each sentence of the file;
    longest: most tokens of a sample's sentences; least: fewest sentences of a sample.
    Empty if no document gives a sample. Raises SettingsError for an invalid length or probability.
    """
    if longest < 2:
        raise SettingsError(
            f"--seq-length leaves {longest} tokens of text in a sample; 2 are the least", do="--seq-length 8, or more"
        )
    if not 0 <= short_seq_prob <= 1:
        raise SettingsError(f"--short-seq-prob {short_seq_prob} must be from 0 to 1")
    kept, _ = kept_documents(documents, lengths, least)
    bounds = np.stack([documents[:-1], documents[1:]], axis=1)[kept].tolist()
    dtype = np.uint32 if len(lengths) <= np.iinfo(np.uint32).max else np.uint64
    if not bounds:
        return np.empty((0, 3), dtype)
    ends, targets = _running_sums(lengths, bounds[-1][1]), _targets(seed, short_seq_prob, longest)
    firsts, lasts, wanted = [], [], []
    for epoch in itertools.count():
        if epoch and (num_samples is None or len(firsts) >= num_samples):
            break
        _walk(bounds, ends, targets, least, firsts, lasts, wanted)
    samples = np.array([firsts, lasts, wanted], dtype).T
    return np.ascontiguousarray(samples[shuffled_order(len(samples), seed + 1)])


def _running_sums(lengths: np.ndarray, stop: int) -> array.array:
    """Tokens before each sentence, and before the one at `stop`."""
    sums = np.zeros(stop + 1, np.int64)
    np.cumsum(lengths[:stop], out=sums[1:])
    return array.array("q", sums.tobytes())  # `bisect` is three times as fast on it as on numpy's


def _targets(seed: int, short_seq_prob: float, longest: int) -> Callable[[], int]:
    """A function that returns the target length of each sample in turn."""
    ratio = int(1 / short_seq_prob + 0.5) if short_seq_prob else 0  # C++'s round(): halves round up
    if not ratio:
        return lambda: longest

    def drawn():
        for block in mt19937(seed):
            short = 2 + block % np.uint32(longest - 1)
            yield from np.where(block % np.uint32(ratio) == 0, short, longest).tolist()

    return drawn().__next__


def _walk(bounds, ends, next_target, least: int, firsts: list, lasts: list, targets: list) -> None:
    """Append the samples of one epoch. Draws a target for each, and one more at the end of each document.

    A sample ends with the sentence that reaches its target, if it has `least` sentences by then and at least two remain
    for the next one; otherwise it takes all that remain.
    """
    for first, last in bounds:
        target = next_target()
        while True:
            end = bisect_left(ends, ends[first] + target, first + least, last - 1)
            if end >= last - 1:
                break
            firsts.append(first)
            lasts.append(end)
            targets.append(target)
            first, target = end, next_target()
        firsts.append(first)
        lasts.append(last)
        targets.append(target)
        next_target()


def shuffled_order(count: int, seed: int) -> np.ndarray:
    """A permutation of `count` indices, int64 [count]: Fisher-Yates from the end with numbers of std::mt19937_64."""
    places = np.arange(count - 1, 0, -1)
    others = (mt19937_64(seed, len(places)) % (places + 1).astype(np.uint64)).tolist()
    order = list(range(count))
    for place, other in zip(places.tolist(), others):
        order[place], order[other] = order[other], order[place]
    return np.array(order, np.int64)


# Constants of mt19937_64, in the names of Matsumoto and Nishimura, "Mersenne Twister" (1998) and [rand.eng.mers].
N, M = 312, 156
SEED_MULTIPLIER = 6364136223846793005
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
A = np.uint64(0xB5026F5AA96619E9)
TEMPERING = (  # shift to the right (positive) or left, mask
    (29, np.uint64(0x5555555555555555)),
    (-17, np.uint64(0x71D67FFFEDA60000)),
    (-37, np.uint64(0xFFF7EEE000000000)),
    (43, np.uint64(0xFFFFFFFFFFFFFFFF)),
)
ONE = np.uint64(1)


def mt19937(seed: int, block: int = 1 << 16) -> Iterator[np.ndarray]:
    """Blocks of the 32-bit stream, uint32 [block]: numpy's legacy generator has the seeding of the C++ standard."""
    state = np.random.RandomState(seed % 2**32)
    while True:
        yield state.randint(0, 2**32, block, np.uint32)  # the whole range: the generator's raw numbers


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of the 64-bit stream, uint64 [count]. numpy has no such generator."""
    state = np.array(_seeded(seed % 2**64), np.uint64)
    out = np.empty(-(-count // N) * N, np.uint64)
    for start in range(0, len(out), N):
        state = _next_state(state)
        out[start : start + N] = _tempered(state)
    return out[:count]


def _seeded(seed: int) -> list[int]:
    state = [seed]
    for i in range(1, N):
        last = state[-1]
        state.append((SEED_MULTIPLIER * (last ^ (last >> 62)) + i) % 2**64)
    return state


def _next_state(old: np.ndarray) -> np.ndarray:
    """The N words of the next state. A word needs the one M positions on, which for later words is already new."""
    new = np.empty_like(old)
    new[: N - M] = _twist(old[: N - M], old[1 : N - M + 1], old[M:])
    new[N - M : -1] = _twist(old[N - M : -1], old[N - M + 1 :], new[: M - 1])
    new[-1:] = _twist(old[-1:], new[:1], new[M - 1 : M])
    return new


def _twist(upper: np.ndarray, lower: np.ndarray, far: np.ndarray) -> np.ndarray:
    y = (upper & UPPER) | (lower & LOWER)
    return far ^ (y >> ONE) ^ ((y & ONE) * A)


def _tempered(x: np.ndarray) -> np.ndarray:
    for shift, mask in TEMPERING:
        x = x ^ ((x >> np.uint64(shift) if shift > 0 else x << np.uint64(-shift)) & mask)
    return x
