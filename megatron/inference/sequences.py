# SPDX-License-Identifier: Apache-2.0
"""Generate targets with an encoder-decoder: greedy, sampled or with beam search. The encoder runs once; keys and values
of its output and of the target so far are cached.

A source's target depends on the model, the source, the settings and its own index, not on the other sources of the batch.
Legend: s tokens of a source, t of a target so far, b sources, v vocabulary.
"""

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Optional

import torch

from megatron.errors import DataError
from megatron.inference.beams import Finished, beam_steps, first_of, texts_of
from megatron.inference.choices import RowState, choose
from megatron.inference.engine import logprobs_of
from megatron.inference.sampling import GREEDY, Ends, Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.stages import of_last_stage
from megatron.model.t5.layers import DecoderCache
from megatron.model.t5.module import EncodedSource
from megatron.mpu.mesh import Axis


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
    pp: Axis = ALONE,
) -> list[list[int]]:
    """The targets of each source, as token ids without `start` and `end`: one, or `best` of them, those of one source after
    each other.

    longest:  the model's context lengths for a source and for a target
    start:    the token that begins targets; end: the token that ends them
    best, draws: as in `generation.generate`
    on_token: receives the new token of every target, -1 for those that have ended; not with beams
    pp:       ranks that share the model (`inference.stages`); all of them call this and return the same
    Raises DataError for an empty source or one that is too long.
    """
    sampling.check()
    beams.check(sampling)
    for number, source in enumerate(sources, 1):
        if not 0 < len(source) <= longest[0]:
            what = f"source {number} has {len(source)} tokens; the encoder can look at {longest[0]}"
            raise DataError(what, do="give a shorter text" if source else "give a text that is not empty")
    device, steps = next(model.parameters()).device, min(sampling.tokens_to_generate, longest[1])
    if beams.num_beams > 1:
        encoded = model.encode(*padded(sources, device))
        each = (_row(encoded, row) for row in range(len(sources)))
        found = (texts_of(target_search(model, own, beams, sampling, steps, start, end, pp)) for own in each)
        return [target for targets in found for target in first_of(targets, best)]
    sources = [source for source in sources for _ in range(best)]
    draws = draws or [(sampling, index) for index in range(len(sources))]
    rows = [RowState(own, limit=steps, end=end, index=index) for own, index in draws]
    decoding = Decoding(model, sources, rows, [start] * len(sources), pp)
    while decoding.busy:
        on_token(decoding.step().tokens)
    return [row.new for row in rows]


class DecodingStep(NamedTuple):
    """The new token of each target, -1 for those without one, and the log-probabilities of the tokens that were chosen.

    scores: for each target those of its token and of the likeliest ones, as `engine.logprobs_of` has them; None: not asked
    """

    tokens: list[int]
    scores: Optional[list[list[float]]]


class Decoding:
    """Targets of some sources while they are generated, one token of each at a step.

    rows: the state of each target; row.limit is its greatest length. starts: the token that each begins with
    """

    def __init__(
        self, model, sources: Sequence[Sequence[int]], rows: Sequence[RowState], starts: Sequence[int], pp: Axis
    ):
        self.model, self.rows, self.pp, self.device = model, rows, pp, next(model.parameters()).device
        self.encoded = model.encode(*padded(sources, self.device))
        self.cache = DecoderCache(max(row.limit for row in rows), len(rows))
        self.running = [row.limit > 0 for row in rows]
        self._last = torch.tensor([starts], dtype=torch.int64, device=self.device)  # [1, b]

    @property
    def busy(self) -> bool:
        return any(self.running)

    def step(self, top: Optional[int] = None) -> DecodingStep:
        """Add a token to each target that has not ended. top: report so many likeliest tokens, too; None: no scores."""
        b = len(self.rows)
        logits = self.model.decode(self._last, self.encoded, self.cache)  # [1, b, v]; None: the last stage has them
        chosen = None if logits is None else choose(logits[-1], self.rows)
        chosen = of_last_stage(chosen, (b,), torch.int64, self.device, self.pp)
        numbers, scores = chosen.tolist(), None
        if top is not None:
            if logits is not None:
                scores = torch.tensor(logprobs_of(logits[-1].float(), numbers, top), dtype=torch.float64)
                scores = scores.view(b, -1).to(self.device)
            scores = of_last_stage(scores, (b, 1 + 2 * top), torch.float64, self.device, self.pp).tolist()
        self._last = chosen.unsqueeze(0)
        for place, (row, token) in enumerate(zip(self.rows, numbers, strict=True)):
            self.running[place] &= token not in row.ends
            if self.running[place]:
                row.append(token)
                self.running[place] = len(row.new) < row.limit
            else:
                numbers[place] = -1
        return DecodingStep(numbers, scores)


def padded(sources: Sequence[Sequence[int]], device) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(padded batch of sources [s, b], their mask [s, b], or None if all have the same length)."""
    longest = max(map(len, sources))
    rows = torch.tensor([[*source, *[0] * (longest - len(source))] for source in sources], device=device)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    if (lengths == longest).all():
        return rows.t().contiguous(), None
    return rows.t().contiguous(), (torch.arange(longest, device=device).unsqueeze(1) < lengths).long()


def _row(encoded: EncodedSource, row: int) -> EncodedSource:
    """The encoder's output for one source, without padding."""
    memory = encoded.memory[:, row : row + 1]
    return EncodedSource(memory if encoded.padding is None else memory[encoded.padding[row]], None)


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
