# SPDX-License-Identifier: Apache-2.0
"""The generation engine: continues many texts at once, which come and go at any time.

    engine = Engine(model, longest=1024)
    number = engine.add(Request(prompt=(464, 2068, 7586), sampling=Sampling(20, greedy=True)))
    while engine.busy:
        for output in engine.step():
            print(output.request, output.new, output.finish)
    engine.close()

A step is one forward pass. It packs the newest token of each running text, and chunks of new prompts, into one row of
tokens (`scheduler`). Their keys and values are in blocks of a common cache, and texts with a common beginning share its
blocks (`blocks`). A text does not depend on the others: see docs/design.md.

If several ranks share the model, all create an engine. The first one is used as above, by one thread; the others call
`follow`, which returns when the first one closes.
Legend: n tokens of a pass, w of them whose successors are wanted, v vocabulary, h hidden.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional

import torch

from megatron.errors import DataError, SettingsError
from megatron.fused_kernels.explicit_attention import SAME_ROWS
from megatron.inference.batch_invariant import sample_length
from megatron.inference.blocks import BlockPool
from megatron.inference.choices import RowState, adjusted, choose
from megatron.inference.links import Link
from megatron.inference.passes import PassPlan, PassRow
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.scheduler import NONE, SNAPSHOTS, PlannedRow, Scheduler, Snapshots, Text
from megatron.inference.scoring import ALONE
from megatron.inference.stages import chunks_of
from megatron.model.cache import PagedCache, stored_dtype
from megatron.mpu.cross_entropy import ordered_log_sum
from megatron.mpu.layers import pack_weights
from megatron.telemetry.host_memory import available_memory

BLOCK_SIZE = 16  # tokens of a block
CHUNK = 512  # tokens of prompts in a pass
COMPUTE, CLOSE, WAIT, RENEW = 1, 2, 3, 4  # what the first rank tells the others
PATIENCE = 60.0  # seconds without a pass after which it tells them to go on waiting, before a receive times out


@dataclass(frozen=True)
class EngineStats:
    """The state of an engine: texts that run and wait, blocks of its cache, and sums since its start.

    blocks_used:   by running texts; others may still hold the beginnings of texts, for new ones
    cached_tokens: of the `prompt_tokens` those that were found in the cache
    preemptions:   texts that had to give their blocks back, and were computed again
    """

    running: int
    waiting: int
    blocks: int
    blocks_used: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int


class SharedEngine:
    """What the engines of all models have in common: ranks that share the model, of which the first one tells the others
    what to do, and requests that are cancelled. A subclass defines the methods that raise NotImplementedError.

    link: the messages of this rank
    """

    def __init__(self, model: torch.nn.Module):
        self.model, self.vocab_size, self.device = model, model.vocab_size, next(model.parameters()).device
        self.link = Link(getattr(chunks_of(model)[0], "tp", ALONE), getattr(model, "pp", ALONE), self.device)
        self._cancelled: list[int] = []
        self._told = time.monotonic()

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Compute one pass of what runs, and return what that brought; [] if there is nothing to do.

        With several stages, passes may be under way for all of them, and this returns what the oldest one brought. With
        several ranks, call this every few minutes even if there is nothing to do: the others wait for a message.
        """
        outputs = [Output(number, finish="cancelled") for number in self._cancelled]
        self._cancelled.clear()
        outputs += self._computed()
        if not self.link.alone and time.monotonic() - self._told > PATIENCE:
            self._tell(WAIT)
        return outputs

    def follow(self) -> None:
        """On all ranks but the first: take part in its passes until it closes."""
        with torch.inference_mode():
            while (message := self.link.received())[0] != CLOSE:
                self._obey(*message)
        self._end()

    def close(self) -> None:
        """End all texts, and the work of the other ranks."""
        self._drop_all()
        self._tell(CLOSE)
        self._end()

    def check(self, request: Request, tokens: Sequence[int]) -> None:
        """Raise DataError or SettingsError for a wrong request. tokens: all that the model would read"""
        request.sampling.check()
        v = self.vocab_size
        if wrong := [token for token in tokens if not 0 <= token < v]:
            raise DataError(f"{self.has_token.format(wrong[0])}; the model knows those from 0 to {v - 1}")
        if request.logprobs is not None and not 0 <= request.logprobs <= v:
            raise SettingsError(f"log-probabilities of {request.logprobs} tokens: has to be 0 to {v}")

    def _tell(self, kind: int, *message) -> None:
        self._told = time.monotonic()
        self.link.tell(kind, *message)

    def _computed(self) -> list[Output]:
        """Compute a pass of what runs."""
        raise NotImplementedError

    def _obey(self, kind: int, numbers: list[int], more: bytes) -> None:
        """Do on this rank what the first one has told."""
        raise NotImplementedError

    def _drop_all(self) -> None:
        """End all texts."""
        raise NotImplementedError

    def _end(self) -> None:
        self.link.finish()


class Engine(SharedEngine):
    """longest:    context length of the model; a text that reaches it ends there
    max_batch:  texts that are continued at once; more wait for their turn
    memory:     bytes for the cache, on each rank; default: enough for `max_batch` texts of the greatest length
    blocks:     the same as a number of blocks
    chunk:      tokens of prompts that one step computes at most, beside the new tokens of texts
    packed:     keep a second copy of the weights, on a CPU, in the order that products read (`mpu.layers.pack_weights`);
                default: if it fits into half of the memory that is left
    Raises SettingsError if the cache is too small for one text.
    """

    has_token = "the prompt has the token {}"

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
        packed: Optional[bool] = None,
    ):
        super().__init__(model)
        self.longest = longest
        one = -(-longest // block_size)
        if memory is not None:
            states = (1 + SNAPSHOTS) * max_batch * bytes_of_a_state(model)
            blocks = (memory - states) // (block_size * max(1, bytes_of_a_token(model)))
        blocks = max_batch * one if blocks is None else blocks
        if blocks < one:
            raise SettingsError(
                f"the cache has room for {blocks * block_size} tokens, and a text may have {longest}",
                do="give it more memory",
            )
        cache = PagedCache(blocks, block_size, sample_length(chunks_of(model)[0]))
        self.stage = Stage(model, cache, self.link, self.device, packed)
        self.pool = BlockPool(blocks, block_size)
        sizes = dict(longest=longest, max_batch=max_batch, chunk=chunk, stages=self.link.under_way)
        if bytes_of_a_state(model):
            sizes |= dict(snapshots=Snapshots(SNAPSHOTS * max_batch))
        self._scheduler = Scheduler(self.pool, **sizes)
        self._texts: dict[int, Text] = {}
        self._known: set[int] = set()  # texts that the last stage has a state of
        self._ended: list[int] = []  # those of them that it may forget
        self._scores: dict[int, list[TokenScore]] = {}  # of prompts, so far
        self._under_way: deque[Planned] = deque()
        self._sums = dict(prompt_tokens=0, cached_tokens=0, generated_tokens=0)

    def add(self, request: Request, order: Optional[int] = None) -> int:
        """Take a request; returns the number that its outputs have. Raises DataError or SettingsError for a wrong one.

        order: the number of an earlier request, if it goes before those that came after that one
        """
        length = len(request.prompt)
        if not 0 < length < self.longest:
            raise DataError(
                f"the prompt has {length} tokens; the model can look at {self.longest}",
                do="give a shorter prompt" if length else "give a prompt that is not empty",
            )
        self.check(request, request.prompt)
        text = self._scheduler.add(request, order)
        self._texts[text.number] = text
        return text.number

    def cancel(self, number: int) -> None:
        """End a text: the next step reports it as cancelled. No effect if it has ended, or is unknown."""
        text = self._texts.get(number)
        if text is not None:
            self._scheduler.cancel(text)
            self._forget(text)
            self._cancelled.append(number)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._texts or self._cancelled or self._under_way)

    def _computed(self) -> list[Output]:
        while len(self._under_way) < self.link.under_way and (rows := self._scheduler.plan()):
            self._under_way.append(self._begun(rows))
        return self._brought(*self._under_way.popleft()) if self._under_way else []

    def _obey(self, kind: int, numbers: list[int], more: bytes) -> None:
        if kind == COMPUTE:
            self.stage.compute(PassPlan.decoded(numbers, more))
        if kind == RENEW:
            self.stage.renew()

    def _drop_all(self) -> None:
        while self._under_way:
            self._brought(*self._under_way.popleft())
        for number in list(self._texts):
            self.cancel(number)

    def _end(self) -> None:
        self.stage.unpack()
        super()._end()

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

    def weights_changed(self) -> None:
        """Call this after a change of the model's weights on all ranks: later requests do not use what the cache holds."""
        self.pool.forget()
        if self._scheduler.snapshots is not None:
            self._scheduler.snapshots.forget()
        self._tell(RENEW)
        self.stage.renew()

    def _begun(self, rows: list[PlannedRow]) -> "Planned":
        """Tell the other ranks of a pass, and compute this rank's part of it."""
        texts = [row.text for row in rows if row.text.number not in self._known]
        self._known.update(text.number for text in texts)
        new = tuple((text.number, text.request, text.limit) for text in texts)
        snapshots = self._scheduler.snapshots
        dropped = () if snapshots is None else snapshots.dropped()
        planned = PassPlan(tuple(map(PassRow.of, rows)), new, tuple(self._ended), dropped)
        self._ended.clear()
        if not self.link.alone:
            self._tell(COMPUTE, *planned.encoded())
        size = sum(row.answer_size(text.request) for row, (text, *_) in zip(planned.rows, rows, strict=True))
        return Planned(rows, size, self.stage.compute(planned))

    def _brought(self, rows: Sequence[PlannedRow], size: int, answer: Optional[Sequence[float]]) -> list[Output]:
        """What a pass brought for its texts."""
        numbers, outputs = iter(self.link.receive_answer(size) if answer is None else answer), []
        for row in rows:
            text, request = row.text, row.text.request
            token = int(next(numbers)) if row.chooses else None
            if row.scores:
                scores = self._scores.setdefault(text.number, [TokenScore(request.prompt[0])])
                scores += [_score(numbers, request.prompt[place + 1], request) for place in row.scores]
            if not row.chooses:
                continue
            score = TokenScore(token) if request.logprobs is None else _score(numbers, token, request)
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
            self._forget(text)
        return output

    def _forget(self, text: Text) -> None:
        del self._texts[text.number]
        self._scores.pop(text.number, None)
        if text.number in self._known:
            self._known.remove(text.number)
            self._ended.append(text.number)


class Planned(NamedTuple):
    """A pass under way: its rows, how many numbers answer it, and the answer if this rank has it."""

    rows: list[PlannedRow]
    size: int
    answer: Optional[list[float]]


class Stage:
    """One rank's part of the passes: the layers of its pipeline stage; the last stage also chooses tokens."""

    def __init__(
        self, model: torch.nn.Module, cache: PagedCache, link: Link, device: torch.device, packed: Optional[bool]
    ):
        self.model, self.cache, self.link, self.device = model, cache, link, device
        [self.chunk] = chunks_of(model)
        self.states: dict[int, tuple[Request, RowState]] = {}
        size = sum(weight.numel() * weight.element_size() for weight in model.parameters())
        self._packs, self._packed = size < available_memory() / 2 if packed is None else packed, []
        self.renew()

    def renew(self) -> None:
        """Take the weights as they are now."""
        self.unpack()
        if self._packs:
            self._packed = pack_weights(
                self.chunk, getattr(self.chunk, "output_layer", None) if self.chunk.last else None
            )

    def unpack(self) -> None:
        for layer in self._packed:
            layer.packed = None
        self._packed = []

    def compute(self, planned: PassPlan) -> Optional[list[float]]:
        """Compute a pass. Returns the answer to the first rank if this is the first rank, too; others send it."""
        rows, link = planned.rows, self.link
        self.cache.forget(planned.ended)
        texts, starts = [(row.stop, row.runs) for row in rows], [row.start for row in rows]
        self.cache.begin(texts, starts, [row.number for row in rows], [row.source for row in rows])
        wanted, padding = planned.wanted, self.cache.padding
        more = 0 if self.cache.sample is None else -len(wanted) % SAME_ROWS
        tokens = torch.tensor(planned.tokens + [0] * padding, device=self.device).unsqueeze(1)  # [n, 1]
        places = torch.tensor(wanted + [0] * more, dtype=torch.int64, device=self.device)
        logits = self.model.logits(tokens, cache=self.cache, wanted=places)  # of the last stage
        logits = None if logits is None else logits[: len(wanted)]
        self.cache.keep({row.keep: row.number for row in rows if row.keep != NONE}, planned.dropped)
        if link.answers:
            answer = self._answered(logits, planned)
            if link.is_first:
                return answer
            link.send_answer(answer)
        return None

    def _answered(self, logits: torch.Tensor, planned: PassPlan) -> list[float]:
        """For each row, in order: the log-probabilities of its scored tokens, and its new token. logits [w, v]."""
        for number in planned.ended:
            self.states.pop(number, None)
        for number, request, limit in planned.new:
            state = RowState(request.sampling, request.prompt, limit=limit, end=request.end, index=request.index)
            self.states[number] = request, state
        tokens = iter(self._chosen(logits, planned.rows))
        answer, first = [], 0
        for row in planned.rows:
            request, _ = self.states[row.number]
            scored = list(request.prompt[row.scores.start + 1 : row.scores.stop + 1])
            stop = first + len(scored) + row.chooses
            if row.chooses:
                answer.append(next(tokens))
                scored += answer[-1:] if request.logprobs is not None else []
            if scored:
                scores = logits[first : first + len(scored)]
                if request.adjusted:
                    scores = adjusted(scores.double(), [RowState(request.sampling, request.prompt)])
                answer += logprobs_of(scores, scored, request.logprobs or 0, self._log_sum(scores))
            first = stop
        return answer

    def _log_sum(self, logits: torch.Tensor) -> Optional[torch.Tensor]:
        """That of training with --batch-invariant-mode; None: any."""
        if self.cache.sample is None or logits.dtype != torch.float32:  # others are adjusted
            return None
        return ordered_log_sum(logits, len(self.chunk.output_weight) * self.chunk.tp.size)

    def _chosen(self, logits: torch.Tensor, rows: Sequence[PassRow]) -> list[int]:
        """The new tokens of the rows that choose one."""
        places, states, first = [], [], 0
        for row in rows:
            first += len(row.scores) + row.chooses
            if row.chooses:
                places.append(first - 1)
                states.append(self.states[row.number][1])
        if not states:
            return []
        chosen = choose(logits if len(places) == len(logits) else logits[places], states).tolist()
        for state, token in zip(states, chosen, strict=True):
            state.append(token)
        return chosen


def logprobs_of(
    logits: torch.Tensor, tokens: Sequence[int], count: int, total: Optional[torch.Tensor] = None
) -> list[float]:
    """For each row of [w, v] and its token: the log-probability, then the `count` likeliest tokens with theirs.

    total: [w, 1], the log sum exp (default: computed here)
    """
    total = logits.logsumexp(-1, keepdim=True) if total is None else total
    own = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1)) - total
    best = logits.topk(count, -1)
    pairs = torch.stack((best.indices.double(), (best.values - total).double()), -1).flatten(1)
    return torch.cat((own.double(), pairs), 1).flatten().tolist()


def _score(numbers, token: int, request: Request) -> TokenScore:
    """The log-probabilities of a token, from an answer."""
    logprob, count = next(numbers), request.logprobs or 0
    return TokenScore(token, logprob, tuple((int(next(numbers)), next(numbers)) for _ in range(count)))


def bytes_of_a_token(model: torch.nn.Module) -> int:
    """The memory of a token's keys and values on the rank with most of them."""
    return _most(model, model.facts.cached_numbers) * stored_dtype(next(model.parameters())).itemsize


def bytes_of_a_state(model: torch.nn.Module) -> int:
    """The memory of a text's states on the rank with most of them."""
    element = next(model.parameters()).element_size()
    return _most(model, lambda layers, tp: model.facts.state_bytes(layers, tp, element))


def _most(model: torch.nn.Module, of: Callable[[Sequence[int], int], int]) -> int:
    pipeline = getattr(model, "pipeline", None)
    stages = [range(model.facts.num_layers)] if pipeline is None else pipeline.layers
    tp = (model if pipeline is None else model.chunks[0]).tp
    return max(of(layers, tp.size) for layers in stages)
