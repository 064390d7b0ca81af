# SPDX-License-Identifier: Apache-2.0
"""Targets from an encoder-decoder: greedy, sampled or by beam search. The encoder runs once; keys and values of its result
and of the target so far are kept.

A source's target depends on the model, the source, the settings and its own number, never on the sources beside it.
Legend: s tokens of a source, t of a target so far, b sources, k beams of each, v vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from megatron.errors import DataError
from megatron.inference.generation import kept, penalised, sample, uniform_draws
from megatron.inference.sampling import Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.stages import of_last_stage
from megatron.model.t5.module import DecoderCache, EncodedSource
from megatron.mpu.mesh import Axis

GREEDY = Search()  # or sampling: no beams


@torch.no_grad()
def generate_targets(
    model,
    sources: Sequence[Sequence[int]],
    sampling: Sampling,
    beams: Search = GREEDY,
    *,
    longest: tuple[int, int],
    start: int = 0,
    end: Optional[int] = None,
    on_token: Callable[[list[int]], None] = lambda tokens: None,
    pp: Axis = ALONE,
) -> list[list[int]]:
    """The target of each source, as token ids without `start` and `end`.

    longest:  tokens of a source and of a target that the model can look at
    start:    the token that targets begin with; end: the one that ends them
    on_token: hears the new token of every target, -1 for those that have ended; not with beams
    pp:       ranks that share the model (`inference.stages`), all of which call this and return the same
    Raises DataError for an empty source or one that is too long.
    """
    sampling.check()
    beams.check(sampling)
    for number, source in enumerate(sources, 1):
        if not 0 < len(source) <= longest[0]:
            what = f"source {number} has {len(source)} tokens; the encoder can look at {longest[0]}"
            raise DataError(what, do="give a shorter text" if source else "give a text that is not empty")
    device, steps = next(model.parameters()).device, min(sampling.tokens_to_generate, longest[1])
    encoded = model.encode(*padded(sources, device))
    if beams.num_beams > 1:
        return [
            _beam_search(model, _row(encoded, row), beams, steps, sampling.repetition_penalty, start, end, pp)
            for row in range(len(sources))
        ]
    draws = uniform_draws(sampling.sampling_seed, len(sources), steps)
    cache, new, running = DecoderCache(steps, len(sources)), [[] for _ in sources], [True] * len(sources)
    tokens = torch.full((1, len(sources)), start, dtype=torch.int64, device=device)
    for step in range(steps):
        logits = model.decode(tokens[-1:], encoded, cache)  # [1, b, v]; None: the last stage has them
        chosen = None if logits is None else _chosen(logits[-1], tokens, sampling, draws[:, step])
        chosen = of_last_stage(chosen, (len(sources),), torch.int64, device, pp)
        tokens = torch.cat((tokens, chosen.unsqueeze(0)))
        told = chosen.tolist()
        for row, token in enumerate(told):
            running[row] &= token != end
            if running[row]:
                new[row].append(token)
            else:
                told[row] = -1
        on_token(told)
        if not any(running):
            break
    return new


def padded(sources: Sequence[Sequence[int]], device) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    """(sources side by side [s, b], their mask [s, b], or None where all are of one length)."""
    longest = max(map(len, sources))
    rows = torch.tensor([[*source, *[0] * (longest - len(source))] for source in sources], device=device)
    lengths = torch.tensor([len(source) for source in sources], device=device)
    if (lengths == longest).all():
        return rows.t().contiguous(), None
    return rows.t().contiguous(), (torch.arange(longest, device=device).unsqueeze(1) < lengths).long()


def _chosen(logits: torch.Tensor, tokens: torch.Tensor, sampling: Sampling, draws: torch.Tensor) -> torch.Tensor:
    """The next token of each target: logits [b, v], tokens [t, b] -> [b]."""
    if sampling.repetition_penalty != 1:
        logits = penalised(logits, _occurred(tokens[1:], logits), sampling.repetition_penalty)
    if sampling.is_greedy:
        return logits.argmax(dim=-1)
    return sample(kept(logits / sampling.temperature, sampling.top_k, sampling.top_p), draws)


def _occurred(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[b, v] bool: which tokens a target [t, b] holds."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, tokens.t(), True)


def _row(encoded: EncodedSource, row: int) -> EncodedSource:
    """Of one source, without what fills it up."""
    memory = encoded.memory[:, row : row + 1]
    return EncodedSource(memory if encoded.padding is None else memory[encoded.padding[row]], None)


def _likeliest(logits: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, penalty: float) -> torch.Tensor:
    """The 2 k best continuations by one token of k targets [t, k], best first: their scores, targets and tokens, [3, 2 k]
    fp64. logits [k, v]; scores [k] of the targets.
    """
    if penalty != 1:
        logits = penalised(logits, _occurred(tokens[1:], logits), penalty)
    k, v = logits.shape
    sums = (scores.unsqueeze(1) + logits.double().log_softmax(-1)).flatten()
    best = sums.topk(min(2 * k, k * v))
    return torch.stack((best.values, (best.indices // v).double(), (best.indices % v).double()))


def _beam_search(
    model, encoded: EncodedSource, beams: Search, steps: int, penalty: float, start: int, end: Optional[int], pp: Axis
) -> list[int]:
    """The target whose sum of log probabilities over its length (`--length-penalty`) is the greatest that was found.

    Each step goes on with the k best continuations that do not end; those that end among the 2 k best are finished. It is
    over when no continuation can be better than the worst of k finished ones.
    """
    k, device = beams.num_beams, encoded.memory.device
    repeated = EncodedSource(encoded.memory.expand(-1, k, -1), None)
    cache = DecoderCache(steps, k)
    tokens = torch.full((1, k), start, dtype=torch.int64, device=device)
    scores = torch.full((k,), float("-inf"), dtype=torch.float64, device=device)
    scores[0] = 0.0  # all are the same to begin with
    finished: list[tuple[float, list[int]]] = []
    of = lambda score, length: score / max(1, length) ** beams.length_penalty
    for step in range(1, steps + 1):
        logits = model.decode(tokens[-1:], repeated, cache)
        best = None if logits is None else _likeliest(logits[-1], tokens, scores, penalty)
        best = of_last_stage(best, (3, min(2 * k, k * model.vocab_size)), torch.float64, device, pp)
        live: list[tuple[float, int, int]] = []
        for rank, (score, beam, token) in enumerate(best.t().tolist()):
            beam, token = int(beam), int(token)
            if score == float("-inf"):
                continue
            if token != end:
                live.append((score, beam, token))
            elif rank < k:
                finished.append((of(score, step), tokens[1:, beam].tolist()))
        live = live[:k]
        finished = sorted(finished, key=lambda one: -one[0])[:k]
        if not live or len(finished) == k and of(live[0][0], step) <= finished[-1][0]:
            break
        live += [(float("-inf"), live[0][1], live[0][2])] * (k - len(live))
        order = torch.tensor([beam for _, beam, _ in live], device=device)
        chosen = torch.tensor([[token for _, _, token in live]], device=device)
        tokens = torch.cat((tokens[:, order], chosen))
        scores = torch.tensor([score for score, _, _ in live], dtype=torch.float64, device=device)
        cache.reorder(order)
    else:
        finished += [
            (of(score, steps), tokens[1:, beam].tolist())
            for beam, score in enumerate(scores.tolist())
            if score > float("-inf")
        ]
    return max(finished, key=lambda one: one[0])[1]
