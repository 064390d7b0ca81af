# SPDX-License-Identifier: Apache-2.0
"""Find the items of an evaluation that are in the training data, to report the score without them.

Preprocessing with --contamination INDEX counts the n-grams of registered sets in the token files
(`data/contamination.py`). An item (a passage, a line, a document) that shares one is contaminated. An item whose n-grams
were not searched for is unknown. An item that is too short for an n-gram counts as clean.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

from megatron.data.blend import parse_blend
from megatron.data.contamination import ENDING, LONGEST, SHORTEST, Contained, item_ngrams, of_training_data
from megatron.data.formats import datasets_of
from megatron.data.indexed import bare_prefix
from megatron.data.ngrams import words_of
from megatron.errors import DataError
from megatron.settings.schema import Data


@dataclass(frozen=True)
class Judged:
    """For each item: whether it is known (its n-grams were searched for, or it has none), and whether contaminated."""

    known: np.ndarray
    contaminated: np.ndarray

    @property
    def clean(self) -> np.ndarray:
        return self.known & ~self.contaminated

    def record(self) -> dict[str, int]:
        """For the file of results."""
        return dict(
            items=len(self.known), contaminated=int(self.contaminated.sum()), not_registered=int((~self.known).sum())
        )

    def __str__(self) -> str:
        """
        >>> print(Judged(np.array([True, True, False]), np.array([True, False, False])))
        without 1 of 3 items that the training data holds, and 1 that was not looked for
        """
        counts = self.record()
        more = counts["not_registered"]
        unknown = f", and {more:,} that {'was' if more == 1 else 'were'} not looked for" if more else ""
        return f"without {counts['contaminated']:,} of {counts['items']:,} items that the training data holds{unknown}"


def training_contents(data: Data, given: Optional[Sequence[str]]) -> tuple[Optional[Contained], list[str]]:
    """(n-grams of registered sets in a run's token files, or None if unknown; notes for the user).

    given: token files that replace those of the run's settings
    """
    words = list(given or data.data_path or data.train_data_path or ())
    if not words:
        return None, []
    try:
        blend = parse_blend(words, "--train-data" if given else "--data-path", open_folders=False)
        prefixes = [bare_prefix(prefix) for word in blend.prefixes for prefix in datasets_of(word)]
    except (DataError, OSError) as error:
        return None, [f"what the training data holds of evaluation sets is not known: {error}"] if given else []
    contained, unknown = of_training_data(prefixes)
    if contained is None:
        why = "preprocess it with --contamination INDEX"
        return None, [f"{unknown[0]} has no {ENDING} next to it ({why})"] if given else []
    if unknown:
        several = f"{len(unknown)} of {len(prefixes)} token files of training"
        return None, [f"{several} have no {ENDING}, among them {unknown[0]}: only scores with all items are reported"]
    return contained, []


def judge(contained: Contained, items: Iterable[Sequence[str]]) -> Judged:
    """Judge items, each a list of texts."""
    longest, shortest = (
        contained.about.get(name, least) for name, least in (("longest", LONGEST), ("shortest", SHORTEST))
    )
    verdicts = []
    for texts in items:
        ngrams, _ = item_ngrams(texts, longest, shortest)
        verdicts.append(contained.look_up(ngrams) if len(ngrams) else (True, False))
    known, contaminated = np.array(verdicts, bool).reshape(-1, 2).T
    return Judged(known, contaminated)


def judge_file(contained: Contained, path: str) -> Judged:
    """Judge the passages of a JSON-lines file."""
    from megatron.data.evaluation_sets import read_items

    return judge(contained, read_items(str(Path(path)), ["text"]))


def judge_lines(contained: Contained, original: str, text: str) -> tuple[Judged, np.ndarray]:
    """(judgement of the non-blank lines of `original`, whether each line of `text` is clean).

    text: the same words as evaluated; lines may be joined. Raises DataError if the words differ.
    """
    lines = [line for line in original.split("\n") if line.strip()]
    judged = judge(contained, [[line] for line in lines])
    counts = [len(words_of(line).hashes) for line in lines]
    words = words_of(text)
    if sum(counts) != len(words.hashes):
        raise DataError(f"the text has {len(words.hashes):,} words, its original {sum(counts):,}")
    bad = np.repeat(~judged.clean, counts)  # for each word
    ends = np.array([place for place, mark in enumerate(text) if mark == "\n"], np.int64)
    of_word = np.searchsorted(ends, words.starts)  # the line that a word is in
    clean = np.ones(len(ends) + 1, bool)
    clean[of_word[bad]] = False
    return judged, clean


def lines_of_tokens(tokens: np.ndarray, decode: Callable[[list[int]], str], total: int) -> Optional[np.ndarray]:
    """The line in which each token begins; None if the tokenizer does not keep the `total` ends of lines."""
    known, places = np.unique(tokens, return_inverse=True)
    ends = np.array([decode([int(token)]).count("\n") for token in known], np.int64)[places]
    after = np.cumsum(ends)
    return after - ends if len(after) and after[-1] == total else None
