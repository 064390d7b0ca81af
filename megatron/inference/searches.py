# SPDX-License-Identifier: Apache-2.0
"""Beam searches in the generation engine, among texts that are drawn, with the same cache and the same limits.

    engine = SearchingEngine(model, longest=1024)
    number = engine.add(Request(prompt, Sampling(20), search=Search(num_beams=4)))
    ...                                     # the one output of this number has the texts found

Each step of a search is a request of one token for each of its beams, which reports the likeliest tokens. The cache has
all whole blocks of a beam, since its last step computed them or its neighbour's did. So a step computes a block's tokens
for each beam at most, and beams need no copies of blocks and no messages between ranks of their own. The requests have the
place in the queue of the search, so that later texts do not overtake it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

from megatron.inference.beams import BeamSearch, Candidates, Finished
from megatron.inference.engine import Engine
from megatron.inference.requests import FoundText, Output, Request


class SearchingEngine(Engine):
    """An engine whose requests may have a beam search."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._searches: dict[int, RunningSearch] = {}  # by the number of the search
        self._beams: dict[int, tuple[int, int]] = {}  # number of a request -> (number of its search, column)

    def add(self, request: Request, order=None) -> int:
        if request.search is None:
            return super().add(request, order)
        request.sampling.check()
        if request.search.num_beams > 1:
            request.search.check(request.sampling)
        steps = min(request.sampling.tokens_to_generate, self.longest - len(request.prompt))
        ends = request.sampling.ends(request.end)
        running = RunningSearch(request, BeamSearch(request.search, steps, ends, self.vocab_size), {})
        number = super().add(running.beam(0), order)
        self._searches[number], self._beams[number] = running, (number, 0)
        return number

    def cancel(self, number: int) -> None:
        if self._searches.pop(number, None) is None:
            super().cancel(number)
            return
        before = len(self._cancelled)
        for one in [one for one, (search, _) in self._beams.items() if search == number]:
            del self._beams[one]
            super().cancel(one)
        self._cancelled[before:] = [number]  # reported once

    def step(self) -> list[Output]:
        outputs = []
        for output in super().step():
            if output.request not in self._beams:
                outputs.append(output)
                continue
            number, column = self._beams.pop(output.request)
            running = self._searches[number]
            running.cached = output.cached if running.cached is None else running.cached
            running.candidates[column] = output.new.top
            if len(running.candidates) == len(running.search.open):
                outputs += self._advanced(number, running)
        return outputs

    def _advanced(self, number: int, running: "RunningSearch") -> list[Output]:
        """Begin the next step of a search; its output if there is none."""
        search = running.search
        if not search.advance(running.candidates):
            del self._searches[number]
            found = found_texts(search.found, search.steps)
            return [Output(number, finish=found[0].finish, cached=running.cached or 0, found=found)]
        running.candidates = {}
        for column in search.open:
            self._beams[super().add(running.beam(column), number)] = number, column
        return []


@dataclass
class RunningSearch:
    """A search in the engine. candidates: of the columns that this step has answered; cached: of the prompt"""

    request: Request
    search: BeamSearch
    candidates: dict[int, Candidates]
    cached: Optional[int] = None

    def beam(self, column: int) -> Request:
        """The request of the next token of a column."""
        # Greedy, because the token itself is not used; what ends a text is decided here.
        sampling = replace(
            self.request.sampling, tokens_to_generate=1, greedy=True, ignore_eos=True, stop_token_ids=None
        )
        own = dict(logprobs=self.search.count, adjusted=True)
        return Request((*self.request.prompt, *self.search.texts[column]), sampling, **own)


def found_texts(finished: Sequence[Finished], steps: int) -> tuple[FoundText, ...]:
    """The texts of a search of at most `steps` tokens, as outputs have them."""
    finish = lambda text: "length" if len(text) == steps else "stop"
    return tuple(FoundText(score, tuple(text), finish(text)) for score, text in finished)
