# SPDX-License-Identifier: Apache-2.0
"""Blends: several datasets mixed in given proportions, in Megatron-LM's order.

    --data-path 0.3 web_text_document 0.7 books_text_document

Each sample comes from the dataset that is furthest below its share. n: number of datasets.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np

from megatron.data.formats import is_folder, open_tokens, prefixes_in
from megatron.errors import DataError

CHUNKS = 2048  # walked in parallel by `interleave`
WARM_UP = 256  # steps that a chunk walks before its start, to converge to the true order


class Blend(NamedTuple):
    """Prefixes of datasets, and weights that sum to 1. Without weights, each dataset counts in proportion to its size."""

    prefixes: list[str]
    weights: Optional[list[float]]


def parse_blend(words: Sequence[str], flag: str, open_folders: bool = True) -> Blend:
    """Parse the arguments of `--data-path`. Raises DataError for weights that are not positive numbers.

    open_folders: expand folders; False accesses no files.

    An even number of words that alternate numbers and prefixes gives weights and prefixes. Anything else is a list of
    prefixes (Megatron-LM's rule). A folder means all datasets in it, each weighted by its number of tokens.

    >>> parse_blend(["30", "web", "10", "books"], "--data-path")
    Blend(prefixes=['web', 'books'], weights=[0.75, 0.25])
    """
    words = [word.strip() for word in words]
    if open_folders and any(map(is_folder, words)):
        words = without_folders(words)
    if not words:
        raise DataError(f"{flag} names no dataset", do=f"{flag} PREFIX, or {flag} WEIGHT PREFIX WEIGHT PREFIX ...")
    numbers = [number_in(word) for word in words]
    weights, prefixes = numbers[::2], words[1::2]
    are_weights = [number is not None for number in weights]
    if len(words) % 2 or not any(are_weights):
        if len(words) > 1 and any(number is not None for number in numbers):
            raise DataError(
                f"{flag} {' '.join(words)}: these are neither pairs of weight and prefix nor prefixes alone",
                do=f"{flag} WEIGHT PREFIX WEIGHT PREFIX ..., or prefixes without weights",
            )
        return Blend(words, None)
    if not all(are_weights):
        wrong = words[2 * are_weights.index(False)]
        raise DataError(f"{flag}: {wrong!r} stands where a weight should", do="weight and prefix alternate")
    for weight, prefix in zip(weights, prefixes):
        if not (weight > 0 and math.isfinite(weight)):
            raise DataError(
                f"{flag}: weight {weight:g} of {prefix}", do="weights are above zero; leave the dataset out instead"
            )
    return Blend(prefixes, normalized(weights))


def without_folders(words: list[str]) -> list[str]:
    """Replace folders by the datasets in them. Raises DataError for a folder without token files or with damaged ones.

    A single folder becomes `TOKENS PREFIX TOKENS PREFIX ...`, or one prefix if it holds one dataset. The weight of a
    folder is divided among its datasets by tokens. Among prefixes without weights it becomes prefixes without weights.
    """
    weighted = len(words) % 2 == 0 and all(number_in(word) is not None for word in words[::2])
    expanded = []
    for place, word in enumerate(words):
        if not is_folder(word) or weighted and place % 2 == 0:
            expanded.append(word)
            continue
        prefixes = prefixes_in(word)
        if len(prefixes) == 1 or not weighted and len(words) > 1:
            expanded += prefixes
            continue
        weight = float(expanded.pop()) if weighted else None
        tokens = [open_tokens(prefix).num_tokens for prefix in prefixes]
        for count, prefix in zip(tokens, prefixes):
            if count:  # an empty dataset has no share
                expanded += [str(count) if weight is None else repr(weight * count / sum(tokens)), prefix]
    return expanded


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum, in double precision."""
    weights = np.array(weights, np.float64)
    return (weights / np.sum(weights)).tolist()


def share_sizes(weights: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """(planned samples, built samples) of each dataset in a blend of `size`: built is 0.5% more than planned.

    >>> share_sizes([0.5, 0.5], 601)
    ([301, 301], [303, 303])
    """
    planned = [math.ceil(size * weight) for weight in weights]
    return planned, [math.ceil(count * (1 + 0.005)) for count in planned]


class BlendedDataset:
    """A blend of datasets: sample i is sample `dataset_sample_index[i]` of dataset `dataset_index[i]`."""

    def __init__(self, datasets: list, dataset_index: np.ndarray, dataset_sample_index: np.ndarray):
        self.datasets = datasets
        self.dataset_index, self.dataset_sample_index = dataset_index, dataset_sample_index

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids [seq_length + 1], int64."""
        return self.datasets[self.dataset_index[index]][int(self.dataset_sample_index[index])]

    def origin(self, index: int):
        """The origin of a sample, as its dataset's `origin` returns it."""
        return self.datasets[self.dataset_index[index]].origin(int(self.dataset_sample_index[index]))


class Repeated:
    """A dataset of `size` samples that repeats another dataset in the same order."""

    def __init__(self, dataset, size: int):
        self.dataset, self.size = dataset, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> np.ndarray:
        return self.dataset[index % len(self.dataset)]

    def origin(self, index: int):
        return self.dataset.origin(index % len(self.dataset))


def interleave(weights: Sequence[float], size: int, limits: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The dataset of each sample of a blend (int16 [size]), and the sample's index in that dataset (int64 [size]).

    `weights` sum to 1. Sample i comes from the dataset with the largest weight x max(i, 1) - samples taken so far; the
    first one wins a tie. `limits`: number of samples of each dataset; an exhausted one is skipped (Megatron-LM stops
    with an error).

    `walk` below defines the sequential rule. To be fast without compiled code, many chunks are walked in parallel, each
    from an estimate of the counts at its start. A chunk with a wrong estimate is walked again from the right start, until
    all ends match the next starts. The result is the same, element for element.
    """
    weights = np.array(weights)
    steps = size // CHUNKS
    if steps < 4 * WARM_UP:
        done, datasets, samples = 0, [np.empty(0, np.int16)], [np.empty(0, np.int64)]
    else:
        done, (datasets, samples) = steps * CHUNKS, map(lambda array: [array], _walk_chunks(weights, steps))
    limits = np.asarray(limits, np.int64)
    if done and (samples[0] >= limits[datasets[0]]).any():  # rare, and near the end: go back to where it happens first
        done = int(np.argmax(samples[0] >= limits[datasets[0]]))
        datasets, samples = [datasets[0][:done]], [samples[0][:done]]
    taken = np.bincount(datasets[0], minlength=len(weights)).tolist()
    rest = walk(weights.tolist(), done, size, taken, limits.tolist())
    return np.concatenate([*datasets, rest[0]]), np.concatenate([*samples, rest[1]])


def walk(weights: list[float], start: int, stop: int, taken: list[int], limits: list[int]):
    """Samples [start, stop) of a blend, one after another: the reference for `interleave`."""
    datasets, samples = np.empty(stop - start, np.int16), np.empty(stop - start, np.int64)
    taken, open_ones = list(taken), [d for d in range(len(weights)) if taken[d] < limits[d]]
    for i in range(start, stop):
        lowest, most = -1, -math.inf
        at = float(max(i, 1))
        for d in open_ones:
            deficit = weights[d] * at - taken[d]
            if deficit > most:
                lowest, most = d, deficit
        assert lowest >= 0, f"a blend of {stop} samples from datasets of {limits}"
        datasets[i - start], samples[i - start] = lowest, taken[lowest]
        taken[lowest] += 1
        if taken[lowest] == limits[lowest]:
            open_ones.remove(lowest)
    return datasets, samples


def _walk_chunks(weights: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The first CHUNKS x steps samples of a blend without limits."""
    begin = np.arange(CHUNKS, dtype=np.int64) * steps
    guess = _guess(weights, np.maximum(begin - WARM_UP, 0))
    starts = _advance(weights, np.maximum(begin - WARM_UP, 0), guess, WARM_UP, None)
    starts[:, 0] = 0
    datasets, samples = np.empty((CHUNKS, steps), np.int16), np.empty((CHUNKS, steps), np.int64)
    wrong = np.arange(CHUNKS)
    ends = np.empty_like(starts)
    while len(wrong):
        ends[:, wrong] = _advance(weights, begin[wrong], starts[:, wrong], steps, (wrong, datasets, samples))
        wrong = 1 + np.flatnonzero((starts[:, 1:] != ends[:, :-1]).any(axis=0))
        starts[:, wrong] = ends[:, wrong - 1]
    return datasets.reshape(-1), samples.reshape(-1)


def _guess(weights: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Estimate the samples taken from each dataset after `at` samples [chunks]: [n, chunks].

    All datasets but the heaviest start one sample low: a dataset below its share catches up within a few steps, while one
    above it stays there until its next turn. The heaviest dataset gets the rest.
    """
    taken = np.maximum(np.floor(weights[:, None] * at).astype(np.int64) - 1, 0)
    heaviest = int(np.argmax(weights))
    taken[heaviest] = 0
    taken[heaviest] = at - taken.sum(axis=0)
    return taken


def _advance(weights: np.ndarray, at: np.ndarray, taken: np.ndarray, steps: int, out) -> np.ndarray:
    """Walk `steps` samples of every chunk; returns the counts taken [n, chunks]. `out`: (rows, datasets, samples)."""
    taken, columns, block = taken.astype(np.float64), np.arange(len(at)), 256
    weights = weights[:, None]
    picks, counts = np.empty((block, len(at)), np.int16), np.empty((block, len(at)), np.int64)
    for first in range(0, steps, block):
        rows = min(block, steps - first)
        for step in range(rows):
            deficit = weights * np.maximum(at + (first + step), 1)
            deficit -= taken
            lowest = deficit.argmax(axis=0)
            picks[step] = lowest
            counts[step] = taken[lowest, columns]
            taken[lowest, columns] += 1
        if out is not None:
            chunks, datasets, samples = out
            datasets[chunks, first : first + rows] = picks[:rows].T
            samples[chunks, first : first + rows] = counts[:rows].T
    return taken.astype(np.int64)


def number_in(word: str) -> Optional[float]:
    """The number that a word is, or None."""
    try:
        return float(word)
    except ValueError:
        return None
