# SPDX-License-Identifier: Apache-2.0
"""Beam search for the continuation with the greatest sum of log-probabilities, divided by a power of its length.

Legend: n first tokens, t tokens so far, k beams, v vocabulary.
"""

from collections.abc import Callable
from typing import Optional

import torch

from megatron.inference.choices import allowed_to_end, occurred, penalised
from megatron.inference.sampling import Sampling, Search
from megatron.inference.stages import of_last_stage
from megatron.model.cache import Cache
from megatron.mpu.mesh import Axis


def beam_search(
    next_logits: Callable[[torch.Tensor], Optional[torch.Tensor]],
    first: torch.Tensor,
    search: Search,
    sampling: Sampling,
    steps: int,
    *,
    vocab_size: int,
    cache: Optional[Cache],
    end: Optional[int],
    counted: int = 0,
    pp: Axis,
) -> list[int]:
    """The best continuation of at most `steps` tokens, without `end`.

    next_logits: tokens [t, b] so far -> scores of the next token, [b, v]; None on ranks without them
    first:       [n, b] the common prompt; b equal columns, 1, or k if `cache` has room for k from the start
    sampling:    its repetition penalty, for tokens from position `counted` on, and minimum length; nothing is sampled
    pp:          ranks that share the model; all of them call this and return the same

    Each step keeps the k best continuations that do not end; those among the k best of all that end are finished. The
    search stops when k finished ones are better than the best unfinished one is now: Megatron-LM's rule, and Hugging
    Face's early_stopping=False. (With a greater length, an unfinished one could still become better.)
    """
    k, n, tokens = search.num_beams, len(first), first
    scores = torch.full((first.shape[1],), float("-inf"), dtype=torch.float64, device=first.device)
    scores[0] = 0.0  # initially, all are the same
    of = lambda score, length: score / length**search.length_penalty
    finished: list[tuple[float, list[int]]] = []  # the k best, best first
    for step in range(1, steps + 1):
        logits = next_logits(tokens)
        likeliest = None
        if logits is not None:
            logits = allowed_to_end(logits, sampling, step - 1, end)
            likeliest = _likeliest(logits, tokens[counted:], scores, sampling.repetition_penalty, 2 * k)
        likeliest = of_last_stage(likeliest, (3, min(2 * k, len(scores) * vocab_size)), torch.float64, first.device, pp)
        found = [
            (score, int(beam), int(token)) for score, beam, token in likeliest.t().tolist() if score > float("-inf")
        ]
        finished += [(of(score, step), tokens[n:, beam].tolist()) for score, beam, token in found[:k] if token == end]
        finished = sorted(finished, key=lambda one: -one[0])[:k]
        live = [one for one in found if one[2] != end][:k]
        if not live or len(finished) == k and of(live[0][0], step) <= finished[-1][0]:
            return finished[0][1]
        tokens, scores, order = _longer(tokens, live, k)
        if cache is not None:
            cache.reorder(order)
    finished.append((of(scores[0].item(), steps), tokens[n:, 0].tolist()))
    return max(finished, key=lambda one: one[0])[1]


def _longer(
    tokens: torch.Tensor, live: list[tuple[float, int, int]], k: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(texts [t + 1, k], their scores [k], the text that each continues [k]).

    live: (score, text, token), at most k of them, best first; if there are fewer, texts with score -inf are added.
    """
    live = live + [(float("-inf"), *live[0][1:])] * (k - len(live))
    order, chosen = (torch.tensor(column, device=tokens.device) for column in list(zip(*live))[1:])
    scores = torch.tensor([score for score, _, _ in live], dtype=torch.float64, device=tokens.device)
    return torch.cat((tokens[:, order], chosen.unsqueeze(0))), scores, order


def _likeliest(
    logits: torch.Tensor, tokens: torch.Tensor, scores: torch.Tensor, penalty: float, count: int
) -> torch.Tensor:
    """The `count` best continuations of texts [t, b] by one token, best first: scores, texts and tokens, [3, count] fp64.

    logits [b, v]; scores [b] of the texts.
    """
    if penalty != 1:
        logits = penalised(logits, occurred(tokens, logits), penalty)
    b, v = logits.shape
    sums = (scores.unsqueeze(1) + logits.double().log_softmax(-1)).flatten()
    best = sums.topk(min(count, b * v))
    return torch.stack((best.values, (best.indices // v).double(), (best.indices % v).double()))
