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
from dataclasses import replace

from megatron.errors import SettingsError
from megatron.inference.beams import NEVER, BeamGroup
from megatron.inference.engine import Engine
from megatron.inference.requests import FoundText, Output, Request


class SearchingEngine(Engine):
    """An engine whose requests may have a beam search."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self._searches: dict[int, BeamSearch] = {}  # by the number of the search
        self._beams: dict[int, tuple[int, int]] = {}  # number of a request -> (number of its search, column)

    def add(self, request: Request, order=None) -> int:
        if request.search is None:
            return super().add(request, order)
        request.sampling.check()
        if request.search.num_beams > 1:
            request.search.check(request.sampling)
        if request.search.num_beam_groups > 1:
            raise SettingsError("groups of beams are in python -m megatron.tools.generate")
        search = BeamSearch(request, self.longest, self.vocab_size)
        number = super().add(search.requests()[0], order)  # all searches begin with one text
        self._searches[number], self._beams[number] = search, (number, 0)
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
            search = self._searches[number]
            if search.taken(column, output):
                outputs += self._advanced(number, search)
        return outputs

    def _advanced(self, number: int, search: "BeamSearch") -> list[Output]:
        """Begin the next step of a search; its output if there is none."""
        if found := search.advanced():
            del self._searches[number]
            return [Output(number, finish=found[0].finish, cached=search.cached, found=found)]
        for column, request in enumerate(search.requests()):
            self._beams[super().add(request, number)] = number, column
        return []


class BeamSearch:
    """A beam search while it runs. longest: context length of the model"""

    def __init__(self, request: Request, longest: int, vocab_size: int):
        self.request, self.ends = request, request.sampling.ends(request.end)
        self.steps = min(request.sampling.tokens_to_generate, longest - len(request.prompt))
        self.group = BeamGroup(request.search.num_beams, 0, request.search.length_penalty)
        self.count = min(2 * self.group.w, vocab_size)
        self.texts: list[tuple[int, ...]] = [()]  # the new tokens of each beam
        self.candidates: dict[int, Sequence[tuple[int, float]]] = {}  # beam -> its likeliest next tokens
        self.cached = 0

    def requests(self) -> list[Request]:
        """For each beam the request of its next token."""
        # Greedy, because the token itself is not used; what ends a text is decided here.
        sampling = replace(
            self.request.sampling, tokens_to_generate=1, greedy=True, ignore_eos=True, stop_token_ids=None
        )
        own = dict(logprobs=self.count, adjusted=True)
        return [Request((*self.request.prompt, *text), sampling, **own) for text in self.texts]

    def taken(self, column: int, output: Output) -> bool:
        """Take the answer for a beam; whether there is one for each now."""
        self.cached = self.cached if self.texts[0] else output.cached
        self.candidates[column] = output.new.top
        return len(self.candidates) == len(self.texts)

    def advanced(self) -> tuple[FoundText, ...]:
        """Continue each beam by one token. Returns the texts found, best first, if the search has ended."""
        group, step = self.group, len(self.texts[0]) + 1
        each = [
            (group.scores[column] + logprob, column, token)
            for column, candidates in sorted(self.candidates.items())
            for token, logprob in candidates
            if logprob > NEVER
        ]
        group.advance(sorted(each, key=lambda one: -one[0])[: self.count], step, self.ends, self.texts)
        group.live = [one for one in group.live if one[0] > NEVER]
        self.texts = [(*self.texts[column], token) for _, column, token in group.live]
        self.candidates = {}
        if step < self.steps and not group.done:
            return ()
        group.cut(self.steps, self.texts)
        finish = lambda text: "length" if len(text) == self.steps else "stop"
        return tuple(FoundText(score, tuple(text), finish(text)) for score, text in group.finished)
