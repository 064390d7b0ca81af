# SPDX-License-Identifier: Apache-2.0
"""The order of samples of one token file: equal to Megatron-LM's, element for element, for the same seed.

Three index maps define the order. The sequences of a split are repeated for as many epochs as needed and shuffled
(document index); that stream of tokens is cut into samples, each sharing one token with the next (sample index); and
the samples are shuffled (shuffle index). The maps depend on an `EpochPlan` and the lengths of the sequences.
All functions are pure; none reads or writes files.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import numpy as np

from megatron.errors import SettingsError

BLOCK = 1 << 22  # documents that `build_sample_index` processes together: bounds its memory
SEPARATE_BELOW = 0.80  # share of the last epoch's samples below which that epoch is shuffled separately

SplitRange = tuple[float, float]


def parse_split(split: str) -> list[Optional[SplitRange]]:
    """Start and end of train, valid and test as shares of the sequences; None for a split of weight 0.

    >>> parse_split("8,2")
    [(0.0, 0.8), (0.8, 1.0), None]
    """
    try:
        weights = [float(word) for word in split.replace("/", ",").split(",")]
    except ValueError:
        weights = []
    if not (0 < len(weights) <= 3 and min(weights) >= 0 and 0 < sum(weights) < math.inf):
        raise SettingsError(
            f"--split {split}: not up to three numbers with a sum above zero", do="for example --split 969,30,1"
        )
    weights = np.array(weights + [0.0] * (3 - len(weights)))
    ends = [0.0]
    for weight in (weights / np.sum(weights)).tolist():
        ends.append(ends[-1] + weight)
    return [(start, end) if end > start else None for start, end in zip(ends, ends[1:])]


def sequences_of(share: SplitRange, total: int) -> range:
    """The sequences of a split out of `total` in the file: contiguous, before shuffling; halves round to even."""
    return range(*(int(round(bound * float(total))) for bound in share))


def suggest_split(lengths: np.ndarray, ends: tuple[int, int], wanted: list[bool]) -> Optional[tuple[int, int, int]]:
    """The --split nearest to one that ends train and valid at `ends`, with tokens in every `wanted` split, or None.

    >>> suggest_split(np.array([9, 9, 9, 0, 9]), ends=(5, 5), wanted=[True, True, True])
    (2, 2, 1)
    """
    full = np.flatnonzero(lengths).tolist()
    if len(full) < sum(wanted):
        return None
    latest_valid_end = full[-1] if wanted[2] else len(lengths)
    latest_train_end = max(i for i in full if i < latest_valid_end) if wanted[1] else latest_valid_end
    train = min(max(ends[0], full[0] + 1 if wanted[0] else 0), latest_train_end)
    earliest_valid_end = min(i for i in full if i >= train) + 1 if wanted[1] else train
    valid = min(max(ends[1], earliest_valid_end), latest_valid_end)
    return train, valid - train, len(lengths) - valid


@dataclass(frozen=True)
class EpochPlan:
    """The parameters of the index maps, in addition to the lengths of the sequences."""

    first: int  # sequences [first, last) of the file
    last: int
    tokens: int  # of one epoch
    seq_length: int
    seed: int
    epochs: int
    separate_last: bool  # shuffle the last epoch separately, because only part of it is used

    @property
    def num_samples(self) -> int:
        """Samples in all epochs: each takes seq_length tokens, and the last one needs the token after it."""
        return (self.epochs * self.tokens - 1) // self.seq_length

    @property
    def samples_before_last(self) -> int:
        """Samples in all epochs but the last."""
        return ((self.epochs - 1) * self.tokens - 1) // self.seq_length


def make_epoch_plan(
    sequences: range, lengths: np.ndarray, seq_length: int, seed: int, num_samples: Optional[int] = None
) -> EpochPlan:
    """The plan for `num_samples` samples (None: one epoch).

    `lengths`: tokens of every sequence of the file; those in `sequences` have at least one token.
    """
    tokens = int(lengths[sequences.start : sequences.stop].sum(dtype=np.int64))
    assert tokens > 0, f"no tokens in {sequences}"
    epochs = 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))
    plan = EpochPlan(sequences.start, sequences.stop, tokens, seq_length, seed, epochs, separate_last=False)
    if epochs == 1:
        return plan
    from_last = num_samples - plan.samples_before_last
    return replace(plan, separate_last=from_last < int(SEPARATE_BELOW * ((tokens - 1) // seq_length)))


class IndexMaps(NamedTuple):
    """The three index maps of a dataset.

    document   int32 [epochs x sequences]  the stream: sequence numbers in reading order
    sample     int32 [samples + 1, 2]      start of each sample: position in `document`, tokens to skip there
    shuffle    uint32 [samples]            the sample at each position
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


def build_index_maps(plan: EpochPlan, lengths: np.ndarray) -> IndexMaps:
    """Build the index maps of a plan. `lengths`: tokens of every sequence of the file."""
    state = np.random.RandomState(plan.seed % 2**32)
    sequences = np.arange(plan.first, plan.last, dtype=np.int32)
    epochs = (plan.epochs - 1, 1) if plan.separate_last else (plan.epochs,)
    document = _shuffled([np.tile(sequences, count) for count in epochs], state)
    total = plan.num_samples
    sample = build_sample_index(document, lengths, plan.seq_length, total)
    cut = plan.samples_before_last if plan.separate_last else total
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = _shuffled([np.arange(cut, dtype=dtype), np.arange(cut, total, dtype=dtype)], state)
    return IndexMaps(document, sample, shuffle)


def build_sample_index(document: np.ndarray, lengths: np.ndarray, seq_length: int, num_samples: int) -> np.ndarray:
    """(position, offset) of tokens 0, seq_length, 2 seq_length, ... of the stream: [num_samples + 1, 2].

    The position of a token is the first one where the running sum of lengths exceeds the token's index. So empty documents
    are skipped, except in the first row, which is always (0, 0).
    """
    small = max(len(document), int(lengths.max())) <= np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), np.int32 if small else np.int64)
    before = 0  # tokens in earlier blocks
    for start in range(0, len(document), BLOCK):
        own = lengths[document[start : start + BLOCK]]
        ends = np.cumsum(own, dtype=np.int64)
        after = before + int(ends[-1])
        rows = slice(-(-before // seq_length), min(num_samples, (after - 1) // seq_length) + 1)
        tokens = np.arange(rows.start, rows.stop, dtype=np.int64) * seq_length - before
        places = np.searchsorted(ends, tokens, side="right")
        index[rows, 0] = places + start
        index[rows, 1] = tokens - (ends[places] - own[places])
        before = after
    index[0] = 0
    return index


def _shuffled(pieces: list[np.ndarray], state: np.random.RandomState) -> np.ndarray:
    """Shuffle the pieces one after another with the same state, and concatenate them."""
    for piece in pieces:
        state.shuffle(piece)
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
