# SPDX-License-Identifier: Apache-2.0
"""Choose the next token from a model's scores. Legend: t tokens so far, b texts, v vocabulary."""

from typing import Optional

import torch

from megatron.inference.sampling import Sampling


def allowed_to_end(logits: torch.Tensor, sampling: Sampling, made: int, end: Optional[int]) -> torch.Tensor:
    """Mask the score of `end` in [b, v] if there are fewer than --min-tokens-to-generate new tokens (`made`)."""
    if end is None or made >= sampling.min_tokens_to_generate:
        return logits
    logits = logits.clone()
    logits[:, end] = float("-inf")
    return logits


def uniform_draws(seed: int, rows: int, steps: int) -> torch.Tensor:
    """Random numbers in [0, 1), float64 [rows, steps]; a row depends only on the seed and its index."""
    generators = (torch.Generator().manual_seed(seed * 1_000_003 + row) for row in range(rows))
    return torch.stack([torch.rand(steps, generator=generator, dtype=torch.float64) for generator in generators])


def penalised(logits: torch.Tensor, occurred: torch.Tensor, penalty: float) -> torch.Tensor:
    """Lower the scores of tokens that occurred by the factor `penalty` (arXiv:1909.05858, section 4.1)."""
    return torch.where(occurred, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 0.0) -> torch.Tensor:
    """Logits with -inf for all but the `top_k` likeliest and, of those, the nucleus of probability `top_p`.

    The nucleus (arXiv:1904.09751, section 3.1) is the shortest run of likeliest tokens that reaches `top_p`; the
    likeliest one is always in it.
    """
    vocab_size = logits.shape[-1]
    if 0 < top_k < vocab_size:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if 0 < top_p < 1:
        values, order = logits.sort(dim=-1, descending=True, stable=True)
        before = values.softmax(dim=-1).cumsum(dim=-1) - values.softmax(dim=-1)  # total probability of likelier tokens
        logits = logits.masked_fill(
            torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p), float("-inf")
        )
    return logits


def sample(logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Sample a token by inverse transform of the draws: [b, v], [b] -> [b]."""
    shares = logits.double().softmax(dim=-1).cumsum(dim=-1)
    shares = shares / shares[:, -1:]  # the last one is exactly 1, above any draw
    return torch.searchsorted(shares, draws.to(shares.device).unsqueeze(1).contiguous(), right=True).squeeze(1)


def occurred(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[b, v] bool: the tokens that occur in each text [t, b]."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, tokens.t(), True)
