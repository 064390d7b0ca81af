# SPDX-License-Identifier: Apache-2.0
"""Beam search for the continuations with the greatest sum of log-probabilities, divided by a power of their length.

With several groups of beams, each group searches by itself, and a token costs it the diversity penalty for each beam of an
earlier group that has the same token at the same place (arXiv:1610.02424, section 4, with the Hamming distance).

Legend: n first tokens, t tokens so far, k beams, w beams of a group, v vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Optional, Protocol

import torch

from megatron.inference.choices import RowState, adjusted
from megatron.inference.sampling import Ends, Sampling, Search
from megatron.inference.stages import of_last_stage
from megatron.mpu.mesh import Axis

Found = tuple[float, int, int]  # score, column of the text that is continued, token
Finished = tuple[float, Sequence[int]]  # score, new tokens
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
    """Search for the best continuations of at most `steps` tokens; a step at each `next`, and a pause after it.

    Returns (score, text) of at most k, best first, the texts without the token that ends them.

    next_logits: tokens [t, b] so far -> scores of the next token, [b, v]; None on ranks without them
    first:       [n, b] the common prompt; b equal columns, 1, or k if `cache` has room for k from the start
    sampling:    its penalties (tokens from position `counted` on), minimum length and forced tokens; nothing is sampled
    pp:          ranks that share the model; all of them call this and return the same

    Each step keeps the w best continuations of a group that do not end; those among the w best of all that end are
    finished. A group stops when w finished ones are better than the best unfinished one is now: Megatron-LM's rule, and
    Hugging Face's early_stopping=False. (With a greater length, an unfinished one could still become better.)
    """
    n, tokens, ends = len(first), first, sampling.ends(end)
    w = search.num_beams // search.num_beam_groups
    common, shared = first[counted:, 0].tolist(), first.shape[1] == 1  # shared: all groups begin with the same column
    groups = [
        BeamGroup(w, 0 if shared else number * w, search.length_penalty) for number in range(search.num_beam_groups)
    ]
    for step in range(1, steps + 1):
        logits, chances, texts = next_logits(tokens), None, tokens[n:].t().tolist()
        if logits is not None:
            rows = [RowState(sampling, common, limit=steps, end=end, new=text) for text in texts]
            chances = adjusted(logits.double(), rows).log_softmax(-1)  # [b, v]
        earlier: Counter[int] = Counter()  # the new tokens of earlier groups
        for group in groups:
            if not group.done:  # the columns of others stay, and count no more
                found = _likeliest(chances, group, earlier, search, vocab_size, first.device, pp)
                group.advance(found, step, ends, texts)
                earlier.update(token for _, _, token in group.live)
        if all(group.done for group in groups):
            break
        live = [one for group in groups for one in group.live]
        order, chosen = (torch.tensor(column, device=first.device) for column in list(zip(*live))[1:])
        tokens = torch.cat((tokens[:, order], chosen.unsqueeze(0)))
        if cache is not None:
            cache.reorder(order)
        for number, group in enumerate(groups):
            group.start = number * w
        yield
    for group in groups:
        group.cut(steps, tokens[n:].t().tolist())
    finished = sorted((one for group in groups for one in group.finished), key=lambda one: -one[0])
    return finished[: search.num_beams]


def beam_search(*arguments, **keywords) -> list[list[int]]:
    """The texts of `beam_steps`."""
    return texts_of(beam_steps(*arguments, **keywords))


def texts_of(steps: Generator[None, None, list[Finished]]) -> list[list[int]]:
    """The texts that a search finds, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return [text for _, text in end.value]


def first_of(texts: list[list[int]], count: int) -> list[list[int]]:
    """The first `count` texts; if there are fewer, the last one repeatedly."""
    return (texts + texts[-1:] * count)[:count]


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
    def scores(self) -> list[float]:
        """The scores of its texts; at the start there is one, or equal ones, of which one counts."""
        return [score for score, _, _ in self.live] or [0.0]

    def score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty

    def advance(self, found: list[Found], step: int, ends: frozenset[int], texts: Sequence[Sequence[int]]) -> None:
        """Take the best continuations by one token, best first. texts: the new tokens of each column so far."""
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


def _likeliest(
    chances: Optional[torch.Tensor],
    group: BeamGroup,
    earlier: Counter[int],
    search: Search,
    vocab_size: int,
    device: torch.device,
    pp: Axis,
) -> list[Found]:
    """The 2w best continuations of a group's texts by one token, best first; fewer if others are impossible.

    chances: log-probabilities [b, v] of all columns; None on ranks without them
    """
    scores = group.scores
    count, best = min(2 * group.w, len(scores) * vocab_size), None
    if chances is not None:
        own = chances[group.start : group.start + len(scores)]
        if earlier:
            penalty = torch.zeros(own.shape[1], dtype=own.dtype, device=device)
            penalty[list(earlier)] = torch.tensor(list(earlier.values()), dtype=own.dtype, device=device)
            own = own - search.diversity_penalty * penalty
        sums = own + torch.tensor(scores, dtype=own.dtype, device=device).unsqueeze(1)
        values, places = sums.flatten().topk(count)
        v = own.shape[1]
        best = torch.stack((values, (places // v + group.start).double(), (places % v).double()))
    best = of_last_stage(best, (3, count), torch.float64, device, pp)
    return [(score, int(column), int(token)) for score, column, token in best.t().tolist() if score > NEVER]
