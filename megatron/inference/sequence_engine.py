# SPDX-License-Identifier: Apache-2.0
"""The generation engine of encoder-decoders: answers many sources at once, which come and go at any time.

    engine = SequenceEngine(model)
    number = engine.add(Request(source, Sampling(20, greedy=True), start=0, end=1))
    while engine.busy:
        for output in engine.step(): ...

Sources that wait are taken together: they are a *cohort*, whose targets have the same length at all times, so that a pass
computes one token of each. A step is a pass of each cohort. New sources form a cohort as soon as a quarter of the places is
free, or room for all that wait: otherwise each would soon be one by itself. A beam search is a cohort of its own.

If several ranks share the model, the first one tells the others which cohorts begin, take a step and end.

Legend: s tokens of a source, b targets of a cohort, v vocabulary.
"""

import pickle
from collections import deque
from collections.abc import Generator, Sequence
from typing import Optional

import torch

from megatron.errors import DataError, SettingsError
from megatron.inference.beams import Finished, beam_steps
from megatron.inference.choices import RowState, choose
from megatron.inference.engine import EngineStats, SharedEngine, logprobs_of
from megatron.inference.links import Link
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.sampling import Ends, Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.searches import found_texts
from megatron.inference.stages import chunks_of, of_last_stage
from megatron.model.t5.layers import DecoderCache
from megatron.model.t5.module import EncodedSource
from megatron.mpu.mesh import Axis

BEGIN, STEP, END = 5, 6, 7  # what the first rank tells the others, beside those of all engines


class SequenceEngine(SharedEngine):
    """max_batch: targets that are generated at once; more sources wait for their turn
    memory:    bytes for keys and values, on each rank: lowers max_batch
    Raises SettingsError if the memory is too small for one target.
    """

    has_token = "there is no token {}"

    def __init__(self, model: torch.nn.Module, *, max_batch: int = 16, memory: Optional[int] = None):
        super().__init__(model)
        self.facts = model.facts
        if memory is not None:
            max_batch = min(max_batch, memory // bytes_of_a_target(model))
            if max_batch < 1:
                mib = bytes_of_a_target(model) / (1 << 20)
                raise SettingsError(f"a source and its target need {mib:.1f} MiB of cache", do="give it more memory")
        self.max_batch = max_batch
        self._waiting: deque[tuple[int, Request]] = deque()
        self._cohorts: dict[int, Cohort | SearchCohort] = {}  # by the number of their first request
        self._count = self._prompt_tokens = self._generated = 0

    def add(self, request: Request) -> int:
        """Take a request; returns the number that its outputs have. Raises DataError or SettingsError for a wrong one."""
        length = len(request.prompt)
        if not 0 < length <= self.facts.source:
            raise DataError(
                f"the source has {length} tokens; the encoder can look at {self.facts.source}",
                do="give a shorter text" if length else "give a text that is not empty",
            )
        self.check(request, (*request.prompt, request.start))
        if request.prompt_logprobs:
            raise SettingsError("a source has no log-probabilities: the encoder reads all of it at once")
        if request.search and request.search.num_beams > 1:
            request.search.check(request.sampling)
        number, self._count = self._count, self._count + 1
        self._waiting.append((number, request))
        return number

    def cancel(self, number: int) -> None:
        """End a target: the next step reports it as cancelled. No effect if it has ended, or is unknown."""
        waiting = [one for one in self._waiting if one[0] != number]
        cohort = next((one for one in self._cohorts.values() if number in one.running), None)
        if cohort is None and len(waiting) == len(self._waiting):
            return
        self._waiting = deque(waiting)
        self._cancelled.append(number)
        if cohort is not None:
            cohort.running.remove(number)
            self._end_if_done(cohort)

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do or to report."""
        return bool(self._waiting or self._cohorts or self._cancelled)

    def _computed(self) -> list[Output]:
        """A token of each target that runs."""
        outputs = []
        self._admit()
        for cohort in list(self._cohorts.values()):
            self._tell(STEP, [cohort.number])
            running = set(cohort.running)
            found = [output for output in cohort.step() if output.request in running]
            self._generated += sum(output.new is not None for output in found)
            outputs += found
            self._end_if_done(cohort)
        return outputs

    def _obey(self, kind: int, numbers: list[int], more: bytes) -> None:
        if kind == BEGIN:
            self._begin(numbers, pickle.loads(more))
        if kind == STEP:
            self._cohorts[numbers[0]].step()
        if kind == END:
            del self._cohorts[numbers[0]]

    def _drop_all(self) -> None:
        self._waiting.clear()
        self._cohorts.clear()

    def stats(self) -> EngineStats:
        """The current state and sums, for metrics; there are no blocks."""
        sums = dict(prompt_tokens=self._prompt_tokens, cached_tokens=0, generated_tokens=self._generated, preemptions=0)
        return EngineStats(self._texts, len(self._waiting), blocks=0, blocks_used=0, **sums)

    @property
    def _texts(self) -> int:
        return sum(cohort.texts for cohort in self._cohorts.values())

    def _admit(self) -> None:
        """Begin the cohorts of sources that wait, if there is room for enough of them."""
        free, ready = self.max_batch - self._texts, []
        for number, request in self._waiting:
            alone = not (self._cohorts or ready)  # a search may have more beams than there are places
            if request.texts > free and not alone:
                break
            free -= request.texts
            ready.append((number, request))
        enough = sum(request.texts for _, request in ready) >= self.max_batch / 4
        if not (enough or len(ready) == len(self._waiting) or not self._cohorts):
            return
        for _ in ready:
            self._waiting.popleft()
        each = [[one] for one in ready if one[1].search]
        for cohort in [*each, [one for one in ready if not one[1].search]]:
            if cohort:
                numbers, requests = zip(*cohort)
                self._tell(BEGIN, numbers, pickle.dumps(requests))
                self._begin(numbers, requests)
                self._prompt_tokens += sum(len(request.prompt) for request in requests)

    def _begin(self, numbers: Sequence[int], requests: Sequence[Request]) -> None:
        kind = SearchCohort if requests[0].search else Cohort
        self._cohorts[numbers[0]] = kind(self.model, numbers, requests, self.link)

    def _end_if_done(self, cohort) -> None:
        if not cohort.running:
            del self._cohorts[cohort.number]
            self._tell(END, [cohort.number])


class Cohort:
    """Targets that began together, one token of each at a step. running: the numbers of those that have not ended.

    The encoder runs once; keys and values of its output and of the targets so far are cached.
    """

    def __init__(self, model, numbers: Sequence[int], requests: Sequence[Request], link: Link):
        self.model, self.link, self.numbers, self.requests, self.number = model, link, numbers, requests, numbers[0]
        self.running, self.texts = set(numbers), len(numbers)
        asked = [request.logprobs for request in requests if request.logprobs is not None]
        self.top = max(asked) if asked else None
        self.rows = [
            RowState(
                request.sampling,
                limit=min(request.sampling.tokens_to_generate, model.facts.target),
                end=request.end,
                index=request.index,
            )
            for request in requests
        ]
        self.encoded = model.encode(*padded([request.prompt for request in requests], link.device))
        self.cache = DecoderCache(max(row.limit for row in self.rows), len(self.rows))
        starts = [request.start for request in requests]
        self._last = torch.tensor([starts], dtype=torch.int64, device=link.device)  # [1, b]
        self._open = set(numbers)  # whose end has not been reported, also on ranks that do not know of cancelled ones

    def step(self) -> list[Output]:
        """The outputs of a token for each."""
        logits = self.model.decode(self._last, self.encoded, self.cache)  # [1, b, v]; None: the last stage has them
        chosen = None if logits is None else choose(logits[-1], self.rows)
        chosen = self._shared(chosen, (len(self.rows),), torch.int64)
        tokens, outputs, self._last = chosen.tolist(), [], chosen.unsqueeze(0)
        scores = self._scores(logits, tokens)
        for number, row, request, token, score in zip(self.numbers, self.rows, self.requests, tokens, scores):
            if number not in self._open:
                continue
            new, finish = None, "stop"
            if token not in row.ends:
                row.append(token)
                new = TokenScore(token) if request.logprobs is None else _score(token, score, request.logprobs)
                finish = "length" if len(row.new) == row.limit else None
            outputs.append(Output(number, new, finish))
            if finish:
                self._open.discard(number)
                self.running.discard(number)
        return outputs

    def _scores(self, logits: Optional[torch.Tensor], tokens: list[int]) -> list[list[float]]:
        """For each target the log-probabilities of its token and of the likeliest ones (`engine.logprobs_of`), if asked."""
        b = len(tokens)
        if self.top is None:
            return [[]] * b
        found = None
        if logits is not None:
            found = torch.tensor(logprobs_of(logits[-1].float(), tokens, self.top), dtype=torch.float64)
            found = found.view(b, -1).to(self.link.device)
        return self._shared(found, (b, 1 + 2 * self.top), torch.float64).tolist()

    def _shared(self, found: Optional[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return of_last_stage(found, shape, dtype, self.link.device, self.link.pp)


class SearchCohort:
    """A beam search for one source."""

    def __init__(self, model, numbers: Sequence[int], requests: Sequence[Request], link: Link):
        [self.number], [self.request] = numbers, requests
        request = self.request
        self.running, self.texts = {self.number}, request.texts
        self.limit = min(request.sampling.tokens_to_generate, model.facts.target)
        encoded = model.encode(*padded([request.prompt], link.device))
        search = (request.search, request.sampling, self.limit, request.start, request.end, link.pp)
        self.search = target_search(model, encoded, *search)

    def step(self) -> list[Output]:
        """The output with all targets, at the end; before it none."""
        try:
            next(self.search)
            return []
        except StopIteration as end:
            found = found_texts(end.value, self.limit)
        self.running.clear()
        return [Output(self.number, finish=found[0].finish, found=found)]


def padded(sources: Sequence[Sequence[int]], device) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(padded batch of sources [s, b], their mask [s, b], or None if all have the same length)."""
    longest = max(map(len, sources))
    rows = torch.tensor([[*source, *[0] * (longest - len(source))] for source in sources], device=device)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    if (lengths == longest).all():
        return rows.t().contiguous(), None
    return rows.t().contiguous(), (torch.arange(longest, device=device).unsqueeze(1) < lengths).long()


def target_search(
    model, encoded: EncodedSource, beams: Search, sampling: Sampling, steps: int, start: int, end: Ends, pp: Axis
) -> Generator[None, None, list[Finished]]:
    """Beam search for the targets of one source: see `beams.beam_steps`."""
    k, device = beams.num_beams, encoded.memory.device
    repeated, cache = EncodedSource(encoded.memory.expand(-1, k, -1), None), DecoderCache(steps, k)

    def next_logits(tokens: torch.Tensor) -> Optional[torch.Tensor]:
        logits = model.decode(tokens[-1:], repeated, cache)
        return None if logits is None else logits[-1]

    first = torch.full((1, k), start, dtype=torch.int64, device=device)
    sizes = dict(vocab_size=model.vocab_size, cache=cache)
    return beam_steps(next_logits, first, beams, sampling, steps, **sizes, end=end, counted=1, pp=pp)


def _score(token: int, numbers: Sequence[float], count: int) -> TokenScore:
    own, *pairs = numbers
    return TokenScore(token, own, tuple(zip(map(int, pairs[0 : 2 * count : 2]), pairs[1 : 2 * count : 2])))


def bytes_of_a_target(model: torch.nn.Module) -> int:
    """The memory of the keys and values of the longest source and target, in this rank's part of the layers."""
    facts, settings = model.facts, model.facts.settings
    layers = facts.num_layers - facts.encoder_layers
    tp = chunks_of(model)[0].tp
    pp = getattr(model, "pp", ALONE)
    each = 2 * (settings.query_groups // tp.size) * settings.head_dim * next(model.parameters()).element_size()
    return -(-layers // pp.size) * (facts.source + facts.target) * each
