# SPDX-License-Identifier: Apache-2.0
"""The generation engine: continues many texts at once, which come and go at any time.

    engine = Engine(model, longest=1024)
    number = engine.add(Request(prompt=(464, 2068, 7586), sampling=Sampling(20, greedy=True)))
    while engine.busy:
        for output in engine.step():
            print(output.request, output.new, output.finish)

A step is one forward pass. It packs the newest token of each running text, and chunks of new prompts, into one row of
tokens (`scheduler`). Their keys and values are in blocks of a common cache, and texts with a common beginning share its
blocks (`blocks`). A text does not depend on the others: see docs/design.md.

An engine is used from one thread. Legend: n tokens of a pass, w of them whose successors are wanted, v vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Optional

import torch

from megatron.errors import DataError, SettingsError
from megatron.inference.blocks import BlockPool
from megatron.inference.choices import RowState, choose
from megatron.inference.passes import PassRow
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.scheduler import Row, Scheduler, Text
from megatron.inference.scoring import ALONE
from megatron.inference.stages import of_last_stage
from megatron.model.cache import PagedCache

BLOCK_SIZE = 16  # tokens of a block
CHUNK = 512  # tokens of prompts in a pass


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine: texts that run and wait, blocks of its cache, and sums since its start.

    blocks_used: by running texts; others may still hold the beginnings of texts, for new ones
    prompt_tokens, cached_tokens: of admitted prompts, and those of them that were found in the cache
    """

    running: int
    waiting: int
    blocks: int
    blocks_used: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


class Engine:
    """longest:    context length of the model; a text that reaches it ends there
    max_batch:  texts that are continued at once; more wait for their turn
    memory:     bytes for the cache, on each rank; default: enough for `max_batch` texts of the greatest length
    blocks:     the same as a number of blocks
    chunk:      tokens of prompts that one step computes at most, beside the new tokens of texts
    Raises SettingsError if the cache is too small for one text.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        longest: int,
        max_batch: int = 16,
        memory: Optional[int] = None,
        blocks: Optional[int] = None,
        block_size: int = BLOCK_SIZE,
        chunk: int = CHUNK,
    ):
        self.model, self.longest = model, longest
        self.device = next(model.parameters()).device
        self.pp = getattr(model, "pp", ALONE)
        one = -(-longest // block_size)
        if memory is not None:
            blocks = memory // (block_size * bytes_of_a_token(model))
        blocks = max_batch * one if blocks is None else blocks
        if blocks < one:
            raise SettingsError(
                f"the cache has room for {blocks * block_size} tokens, and a text may have {longest}",
                do="give it more memory",
            )
        self.pool, self.cache = BlockPool(blocks, block_size), PagedCache(blocks, block_size)
        self._scheduler = Scheduler(self.pool, longest=longest, max_batch=max_batch, chunk=chunk)
        self._texts: dict[int, Text] = {}
        self._states: dict[int, RowState] = {}  # of texts on the last stage
        self._cancelled: list[int] = []
        self._scores: dict[int, list[TokenScore]] = {}  # of prompts, so far
        self._sums = dict(prompt_tokens=0, cached_tokens=0, generated_tokens=0)

    def add(self, request: Request) -> int:
        """Take a request; returns the number that its outputs have. Raises DataError or SettingsError for a wrong one."""
        request.sampling.check()
        length, v = len(request.prompt), self.model.vocab_size
        if not 0 < length < self.longest:
            raise DataError(
                f"the prompt has {length} tokens; the model can look at {self.longest}",
                do="give a shorter prompt" if length else "give a prompt that is not empty",
            )
        if wrong := [token for token in request.prompt if not 0 <= token < v]:
            raise DataError(f"the prompt has the token {wrong[0]}; the model knows those from 0 to {v - 1}")
        if request.logprobs is not None and not 0 <= request.logprobs <= v:
            raise SettingsError(f"log-probabilities of {request.logprobs} tokens: has to be 0 to {v}")
        text = self._scheduler.add(request)
        self._texts[text.number] = text
        return text.number

    def cancel(self, number: int) -> None:
        """End a text: the next step reports it as cancelled. No effect if it has ended, or is unknown."""
        text = self._texts.pop(number, None)
        if text is not None:
            self._scheduler.cancel(text)
            self._states.pop(number, None)
            self._cancelled.append(number)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._texts or self._cancelled)

    @torch.no_grad()
    def step(self) -> list[Output]:
        """Compute one forward pass, and return what it brought; [] if there is nothing to do."""
        outputs = [Output(number, finish="cancelled") for number in self._cancelled]
        self._cancelled.clear()
        rows = self._scheduler.plan()
        if rows:
            outputs += self._outputs(rows, self._computed([PassRow.of(row) for row in rows]))
        return outputs

    def stats(self) -> EngineStats:
        """The current state and sums, for metrics."""
        scheduler, pool = self._scheduler, self.pool
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=pool.blocks,
            blocks_used=pool.blocks - pool.free,
            preemptions=scheduler.preemptions,
            **self._sums,
        )

    def forget_prefixes(self) -> None:
        """Do not use what the cache holds for later requests: call this after a change of the model's weights."""
        self.pool.forget()

    def _computed(self, rows: list[PassRow]) -> list[float]:
        """The answer of the last stage to a pass."""
        self.cache.begin([(row.stop, row.runs) for row in rows], [row.start for row in rows])
        tokens = torch.tensor([token for row in rows for token in row.tokens], device=self.device).unsqueeze(1)
        wanted, first = [], 0
        for row in rows:
            wanted += [first + place for place in row.wanted()]
            first += len(row.tokens)
        places = torch.tensor(wanted, dtype=torch.int64, device=self.device)
        logits = self.model.logits(tokens, cache=self.cache, wanted=places)  # [w, v]; None: the last stage has them
        found = None if logits is None else torch.tensor(self._answered(logits, rows), dtype=torch.float64)
        size = sum(self._size(row) for row in rows)
        return of_last_stage(found, (size,), torch.float64, self.device, self.pp).tolist()

    def _size(self, row: PassRow) -> int:
        """Numbers in the answer to a row."""
        request = self._texts[row.number].request
        score = 1 + 2 * (request.logprobs or 0)
        return len(row.scores) * score + row.chooses * (1 + (0 if request.logprobs is None else score))

    def _answered(self, logits: torch.Tensor, rows: list[PassRow]) -> list[float]:
        """Tokens and log-probabilities: for each row, in order, those of its scored tokens and of its new one."""
        places, states, first = [], [], 0
        for row in rows:
            first += len(row.scores) + row.chooses
            if row.chooses:
                places.append(first - 1)
                states.append(self._state(row.number))
        chosen = iter(
            choose(logits if len(places) == len(logits) else logits[places], states).tolist() if states else ()
        )
        answer, first = [], 0
        for row in rows:
            request, successors = self._texts[row.number].request, []
            if row.scores:
                successors = list(request.prompt[row.scores.start + 1 : row.scores.stop + 1])
            count = len(successors)
            if row.chooses:
                token = next(chosen)
                self._states[row.number].append(token)
                answer.append(token)
                successors += [token] if request.logprobs is not None else []
            if successors:
                answer += logprobs_of(logits[first : first + len(successors)], successors, request.logprobs or 0)
            first += count + row.chooses
        return answer

    def _state(self, number: int) -> RowState:
        if number not in self._states:
            request, limit = self._texts[number].request, self._texts[number].limit
            more = dict(limit=limit, end=request.end, index=request.index)
            self._states[number] = RowState(request.sampling, request.prompt, **more)
        return self._states[number]

    def _outputs(self, rows: Sequence[Row], answer: Sequence[float]) -> list[Output]:
        """What a pass brought for its texts."""
        numbers, outputs = iter(answer), []
        for row in rows:
            text, request = row.text, row.text.request
            token = int(next(numbers)) if row.chooses else None
            if row.scores:
                scores = self._scores.setdefault(text.number, [TokenScore(request.prompt[0])])
                scores += [self._score(numbers, request.prompt[place + 1], request) for place in row.scores]
            if not row.chooses:
                continue
            score = TokenScore(token)
            if request.logprobs is not None:
                score = self._score(numbers, token, request)
            if text.finish is None:  # not cancelled meanwhile
                outputs.append(self._output(text, score))
        return outputs

    def _output(self, text: Text, score: TokenScore) -> Output:
        first, request = text.new == 0, text.request
        self._scheduler.chosen(text, score.token)
        output = Output(text.number, None if text.finish == "stop" else score, text.finish)
        if first:
            prompt = self._scores.pop(text.number, [TokenScore(request.prompt[0])] if request.prompt_logprobs else ())
            output = replace(output, prompt=tuple(prompt), cached=text.cached)
            self._sums["prompt_tokens"] += len(request.prompt)
            self._sums["cached_tokens"] += text.cached
        self._sums["generated_tokens"] += output.new is not None
        if text.finish:
            del self._texts[text.number]
            self._states.pop(text.number, None)
        return output

    @staticmethod
    def _score(numbers, token: int, request: Request) -> TokenScore:
        logprob, count = next(numbers), request.logprobs or 0
        return TokenScore(token, logprob, tuple((int(next(numbers)), next(numbers)) for _ in range(count)))


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[float]:
    """For each row of [w, v] and its token: the log-probability, then the `count` likeliest tokens with theirs."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - total
    best = logits.topk(count, -1)
    pairs = torch.stack((best.indices.double(), (best.values - total).double()), -1).flatten(1)
    return torch.cat((own.double(), pairs), 1).flatten().tolist()


def bytes_of_a_token(model: torch.nn.Module) -> int:
    """The memory of a token's keys and values on the rank with most layers."""
    settings, own = model.facts.settings, next(model.parameters())
    pipeline = getattr(model, "pipeline", None)
    layers = settings.num_layers if pipeline is None else max(map(len, pipeline.layers))
    tp = (model if pipeline is None else model.chunks[0]).tp
    return 2 * layers * (settings.query_groups // tp.size) * settings.head_dim * own.element_size()
