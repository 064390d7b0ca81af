# SPDX-License-Identifier: Apache-2.0
"""Generate text: greedy, sampled or with beam search, for batches of prompts, with a cache of keys and values.

A prompt's continuation depends on the model, the prompt, the settings and its own index, not on the other prompts of the
batch or on the use of the cache. Legend: t tokens so far, b texts, v vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Optional

import torch

from megatron.errors import DataError
from megatron.inference.beams import beam_search, first_of
from megatron.inference.blocks import BlockPool, Table
from megatron.inference.choices import RowState, choose
from megatron.inference.engine import BLOCK_SIZE, Engine, SharedEngine
from megatron.inference.requests import Request
from megatron.inference.sampling import GREEDY, Ends, Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.sequence_engine import SequenceEngine
from megatron.inference.stages import of_last_stage
from megatron.model.cache import PagedCache
from megatron.mpu.mesh import Axis

BATCH = 64  # texts that are continued at once


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    beams: Search = GREEDY,
    *,
    longest: int,
    end: Ends = None,
    use_cache: bool = True,
    best: int = 1,
    draws: Optional[Sequence[tuple[Sampling, int]]] = None,
    on_token: Callable[[list[int]], None] = lambda tokens: None,
    pp: Axis = ALONE,
) -> list[list[int]]:
    """The continuations of each prompt, as token ids without the prompt and without `end`: one, or `best` of them, those
    of one prompt after each other.

    longest:   context length of the model; a text that reaches it ends there
    end:       the token that ends a text
    best:      continuations of each prompt: drawn ones, or the best ones of beam search
    draws:     the settings of each continuation and its number among those with the same seed; default: `sampling`, and
               its number among all
    use_cache: False computes all tokens again at each step, of one text after the other
    on_token:  receives the new token of every prompt, -1 for those without one, after each step; not with beams. Only
               that of the first rank is called
    pp:        ranks that share the model (`inference.stages`); all of them call this and return the same
    Raises DataError for an empty prompt or one that leaves no room.
    """
    sampling.check()
    beams.check(sampling)
    check_prompts(prompts, longest)
    if beams.num_beams > 1:
        found = (_best_of_beams(model, prompt, sampling, beams, longest, end, use_cache, pp) for prompt in prompts)
        return [text for texts in found for text in first_of(texts, best)]
    prompts = [prompt for prompt in prompts for _ in range(best)]
    draws = draws or [(sampling, index) for index in range(len(prompts))]
    if not use_cache:
        options = dict(longest=longest, end=end, on_token=on_token, count=len(prompts), pp=pp)
        each = enumerate(zip(prompts, draws, strict=True))
        return [_recomputed(model, prompt, *draw, place=place, **options) for place, (prompt, draw) in each]
    requests = [
        Request(tuple(prompt), own, index=index, end=end) for prompt, (own, index) in zip(prompts, draws, strict=True)
    ]
    return texts_of(Engine(model, longest=longest, max_batch=min(len(prompts), BATCH) or 1), requests, on_token)


@torch.no_grad()
def generate_targets(
    model,
    sources: Sequence[Sequence[int]],
    sampling: Sampling,
    beams: Search = GREEDY,
    *,
    longest: tuple[int, int],
    start: int = 0,
    end: Ends = None,
    best: int = 1,
    draws: Optional[Sequence[tuple[Sampling, int]]] = None,
    on_token: Callable[[list[int]], None] = lambda tokens: None,
) -> list[list[int]]:
    """The targets of each source by an encoder-decoder, as token ids without `start` and `end`: one, or `best` of them,
    those of one source after each other. All ranks that share the model call this, and return the same.

    longest:  the model's context lengths for a source and for a target
    start:    the token that begins targets; end: the token that ends them
    best, draws, on_token: as in `generate`
    Raises DataError for an empty source or one that is too long.
    """
    sampling.check()
    beams.check(sampling)
    for number, source in enumerate(sources, 1):
        if not 0 < len(source) <= longest[0]:
            what = f"source {number} has {len(source)} tokens; the encoder can look at {longest[0]}"
            raise DataError(what, do="give a shorter text" if source else "give a text that is not empty")
    cut = lambda own: replace(own, tokens_to_generate=min(own.tokens_to_generate, longest[1]))
    more = dict(start=start, end=end)
    if beams.num_beams > 1:
        requests = [Request(tuple(source), cut(sampling), search=beams, **more) for source in sources]
    else:
        sources = [source for source in sources for _ in range(best)]
        draws = draws or [(sampling, index) for index in range(len(sources))]
        pairs = zip(sources, draws, strict=True)
        requests = [Request(tuple(source), cut(own), index=index, **more) for source, (own, index) in pairs]
    engine = SequenceEngine(model, max_batch=max(1, sum(request.texts for request in requests)))
    return texts_of(engine, requests, on_token, best)


def texts_of(
    engine: SharedEngine,
    requests: Sequence[Request],
    on_token: Callable[[list[int]], None] = lambda tokens: None,
    best: int = 1,
) -> list[list[int]]:
    """The answers of a new engine to these requests alone, on all ranks that share it: a text for each, or the `best` ones
    of each search. on_token: as in `generate`
    """
    if not engine.link.is_first:
        engine.follow()
        return engine.link.shared(None)
    numbers = [engine.add(request) for request in requests]
    texts = {number: [[]] for number in numbers}
    while engine.busy:
        tokens = dict.fromkeys(numbers, -1)
        for output in engine.step():
            if output.new:
                tokens[output.request] = output.new.token
                texts[output.request][0].append(output.new.token)
            if output.found:
                texts[output.request] = first_of([list(one.tokens) for one in output.found], best)
        on_token(list(tokens.values()))
    engine.close()
    return engine.link.shared([text for number in numbers for text in texts[number]])


def check_prompts(prompts: Sequence[Sequence[int]], longest: int) -> None:
    """Raise DataError for an empty prompt or one that leaves no room."""
    for number, prompt in enumerate(prompts, 1):
        if not 0 < len(prompt) < longest:
            what = f"prompt {number} has {len(prompt)} tokens; the model can look at {longest}"
            raise DataError(what, do="give a shorter prompt" if prompt else "give a prompt that is not empty")


def _recomputed(
    model,
    prompt: Sequence[int],
    sampling: Sampling,
    index: int,
    *,
    place: int,
    longest: int,
    end: Ends,
    on_token,
    count: int,
    pp: Axis,
) -> list[int]:
    """The continuation of prompt number `place` of `count`, without a cache."""
    device, steps = next(model.parameters()).device, min(sampling.tokens_to_generate, longest - len(prompt))
    row, token = RowState(sampling, prompt, limit=steps, end=end, index=index), None
    while len(row.new) < steps:
        tokens = torch.tensor([*prompt, *row.new], device=device).unsqueeze(1)
        logits = model.logits(tokens, last_only=True)  # [1, 1, v]
        chosen = None if logits is None else choose(logits[-1], [row])
        token = of_last_stage(chosen, (1,), torch.int64, device, pp).item()
        if token in row.ends:
            break
        row.append(token)
        on_token([token if number == place else -1 for number in range(count)])
    return row.new


def _best_of_beams(
    model, prompt, sampling: Sampling, beams: Search, longest: int, end: Ends, use_cache: bool, pp: Axis
) -> list[list[int]]:
    """Beam search for one prompt, best first; the prompt is computed once."""
    steps = min(sampling.tokens_to_generate, longest - len(prompt))
    first = torch.tensor(prompt, dtype=torch.int64, device=next(model.parameters()).device).unsqueeze(1)  # [n, 1]
    cache = BeamCache(len(prompt), steps, beams.num_beams) if use_cache else None

    def next_logits(tokens: torch.Tensor) -> Optional[torch.Tensor]:
        if cache is None:
            logits = model.logits(tokens, last_only=True)
            return None if logits is None else logits[-1]
        new = tokens[cache.begin(len(tokens)) :].t()  # [b, new]
        last = torch.arange(1, len(new) + 1, device=new.device) * new.shape[1] - 1
        return model.logits(new.reshape(-1, 1), cache=cache.paged, wanted=last)

    sizes = dict(vocab_size=model.vocab_size, cache=cache)
    return beam_search(next_logits, first, beams, sampling, steps, **sizes, end=end, pp=pp)


class BeamCache:
    """The keys and values of the texts of a beam search. Texts share the blocks of what they have in common."""

    def __init__(self, prompt: int, steps: int, beams: int):
        self.longest, common = prompt + steps, prompt // BLOCK_SIZE
        blocks = common + beams * (-(-self.longest // BLOCK_SIZE) - common)
        self.pool, self.paged = BlockPool(blocks, BLOCK_SIZE), PagedCache(blocks, BLOCK_SIZE)
        self.tables, self.length = [Table()], 0

    def begin(self, length: int) -> int:
        """Give each text room for `length` tokens, and describe the pass over the new ones; returns the tokens so far."""
        before, self.length = self.length, length
        for table in self.tables:
            if before:
                self.paged.copy(self.pool.own(table, before, self.longest))
            self.pool.grow(table, length, self.longest)
        self.paged.begin([(length, table.runs) for table in self.tables], [before] * len(self.tables))
        return before

    def reorder(self, order: torch.Tensor) -> None:
        """Text n continues text order[n]."""
        self.paged.reorder(order.tolist())
        before, self.tables = self.tables, [self.pool.fork(self.tables[text]) for text in order.tolist()]
        for table in before:
            self.pool.release(table)
