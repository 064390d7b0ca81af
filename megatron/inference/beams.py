# SPDX-License-Identifier: Apache-2.0
"""Beam search for the continuations with the greatest sum of log-probabilities, divided by a power of their length.

With several groups of beams, each group searches by itself, and a token costs it the diversity penalty for each beam of an
earlier group that has the same token at the same place (arXiv:1610.02424, section 4, with the Hamming distance).

Legend: n first tokens, t tokens so far, k beams, w beams of a group, v vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional, Protocol

import torch

from megatron.inference.choices import RowState, adjusted
from megatron.inference.sampling import Ends, Sampling, Search
from megatron.inference.stages import of_last_stage
from megatron.mpu.mesh import Axis

Found = tuple[float, int, int]  # score, column of the text that is continued, token
Finished = tuple[float, Sequence[int]]  # score, new tokens
Candidates = Sequence[tuple[int, float]]  # token, log-probability
NEVER = float("-inf")


class Reordered(Protocol):
    """A cache of the texts of a beam search."""

    def reorder(self, order: torch.Tensor) -> None:
        """Text n continues text order[n]."""


def beam_steps(
    next_logits: Callable[[torch.Tensor], Optional[torch.Tensor]],
    first: torch.Tensor,
    search: Search,
    sampling: Sampling,
    steps: int,
    *,
    vocab_size: int,
    cache: Optional[Reordered],
    end: Ends,
    counted: int = 0,
    pp: Axis,
) -> Generator[None, None, list[Finished]]:
    """Search for the best continuations of at most `steps` tokens; a step at each `next`, and a pause before the next one.

    Returns (score, text) of at most k, best first, the texts without the token that ends them.

    next_logits: tokens [t, b] so far -> scores of the next token, [b, v]; None on ranks without them
    first:       [n, b] the common prompt; b equal columns, 1, or k if `cache` has room for k from the start
    sampling:    its penalties (tokens from position `counted` on), minimum length and forced tokens; nothing is sampled
    pp:          ranks that share the model; all of them call this and return the same
    """
    tokens, run = first, BeamSearch(search, steps, sampling.ends(end), vocab_size, first.shape[1])
    common = first[counted:, 0].tolist()
    while True:
        logits, best = next_logits(tokens), None
        if logits is not None:
            rows = [RowState(sampling, common, limit=steps, end=end, new=text) for text in run.texts]
            best = torch.stack(adjusted(logits.double(), rows).log_softmax(-1).topk(run.count))  # [2, b, count]
        shape = 2, len(run.texts), run.count
        values, ids = of_last_stage(best, shape, torch.float64, first.device, pp).tolist()
        moves = run.advance([list(zip(map(int, own), values)) for own, values in zip(ids, values)])
        if not moves:
            return run.found
        order, chosen = (torch.tensor(column, device=first.device) for column in zip(*moves))
        tokens = torch.cat((tokens[:, order], chosen.unsqueeze(0)))
        if cache is not None:
            cache.reorder(order)
        yield


def beam_search(*arguments, **keywords) -> list[list[int]]:
    """The texts of `beam_steps`, without a pause."""
    steps = beam_steps(*arguments, **keywords)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return [list(text) for _, text in end.value]


def first_of(texts: list[list[int]], count: int) -> list[list[int]]:
    """The first `count` texts; if there are fewer, the last one repeatedly."""
    return (texts + texts[-1:] * count)[:count]


class BeamSearch:
    """A search while it runs, in columns: a text each, k of them from the second step on.

    Each step keeps the w best continuations of a group that do not end; those among the w best of all that end are
    finished. A group stops when w finished ones are better than the best unfinished one is now: Megatron-LM's rule, and
    Hugging Face's early_stopping=False. (With a greater length, an unfinished one could still become better.)

    steps:   new tokens, at most; ends: tokens that end a text
    columns: at the start: 1, or k equal ones, of which each group has w
    texts:   the new tokens of each column
    count:   how many likeliest next tokens of a column `advance` needs: of those with a penalty, others may be better
    """

    def __init__(self, search: Search, steps: int, ends: frozenset[int], vocab_size: int, columns: int = 1):
        self.steps, self.ends, self.penalty = steps, ends, search.diversity_penalty
        k, groups = search.num_beams, search.num_beam_groups
        self.k, w = k, k // groups
        self.groups = [BeamGroup(w, 0 if columns == 1 else n * w, search.length_penalty) for n in range(groups)]
        self.count = min(2 * w + k * (groups > 1), vocab_size)
        self.texts: list[tuple[int, ...]] = [()] * columns
        self.found: list[Finished] = []

    @property
    def open(self) -> list[int]:
        """The columns whose next tokens count."""
        return sorted({column for group in self.groups if not group.done for column, _ in group.columns})

    def advance(self, candidates: Sequence[Candidates] | Mapping[int, Candidates]) -> list[tuple[int, int]]:
        """Continue each text by one token. Returns for each new column the one that it continues, and its token; [] at the
        end of the search: then `found` has (score, text) of at most k, best first, without the tokens that end them.

        candidates: of each open column: its likeliest next tokens with their log-probabilities, best first
        """
        step, earlier = len(self.texts[0]) + 1, Counter()  # earlier: the new tokens of earlier groups
        for group in self.groups:
            if not group.done:  # the columns of others stay, and count no more
                found = group.likeliest(candidates, earlier, self.penalty)
                group.advance(found, step, self.ends, self.texts)
                earlier.update(token for _, _, token in group.live)
        moves = [(column, token) for group in self.groups for _, column, token in group.live]
        done = all(group.done for group in self.groups)
        if not done:
            self.texts = [(*self.texts[column], token) for column, token in moves]
            for number, group in enumerate(self.groups):
                group.start = number * group.w
        if not done and step < self.steps:
            return moves
        for group in self.groups:
            group.cut(self.steps, self.texts)
        finished = sorted((one for group in self.groups for one in group.finished), key=lambda one: -one[0])
        self.found = finished[: self.k]
        return []


@dataclass
class BeamGroup:
    """The beams of one group.

    w         their number
    start     the column of its first text
    live      its texts that have not ended, as their last step found them: always w, some of them with the score NEVER
    finished  (score, text) of the w best that have ended, best first
    """

    w: int
    start: int
    length_penalty: float
    live: list[Found] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    done: bool = False

    @property
    def columns(self) -> list[tuple[int, float]]:
        """(column, score) of its texts that go on; at the start there is one, or equal ones, of which one counts."""
        scores = [score for score, _, _ in self.live] or [0.0]
        return [(column, score) for column, score in enumerate(scores, self.start) if score > NEVER]

    def likeliest(self, candidates, earlier: Counter[int], penalty: float) -> list[Found]:
        """The 2w best continuations of its texts by one token, best first; fewer if others are impossible."""
        each = [
            (score + (logprob - penalty * earlier[token]), column, token)
            for column, score in self.columns
            for token, logprob in candidates[column]
            if logprob > NEVER
        ]
        return sorted(each, key=lambda one: -one[0])[: 2 * self.w]

    def score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty

    def advance(self, found: list[Found], step: int, ends: frozenset[int], texts: Sequence[Sequence[int]]) -> None:
        """Take the best continuations by one token, best first. texts: the new tokens of each column so far"""
        self.finished += [
            (self.score(score, step), texts[column]) for score, column, token in found[: self.w] if token in ends
        ]
        self.finished = sorted(self.finished, key=lambda one: -one[0])[: self.w]
        live = [one for one in found if one[2] not in ends][: self.w]
        full = len(self.finished) == self.w
        self.done = not live or full and self.score(live[0][0], step) <= self.finished[-1][0]
        any_text = (NEVER, *found[0][1:])
        self.live = live + [any_text] * (self.w - len(live))

    def cut(self, steps: int, texts: Sequence[Sequence[int]]) -> None:
        """Its texts that have not ended by the last step end there. texts: the new tokens of each column."""
        if not self.done:
            texts = texts[self.start : self.start + self.w]
            cut = [(self.score(score, steps), text) for (score, _, _), text in zip(self.live, texts, strict=True)]
            found = self.finished + [one for one in cut if one[0] > NEVER]
            self.finished = sorted(found, key=lambda one: -one[0])[: self.w]
