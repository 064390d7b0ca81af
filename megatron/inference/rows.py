# SPDX-License-Identifier: Apache-2.0
"""Choose a token for each row. INTERIM."""

import torch

from megatron.inference.choices import allowed_to_end, kept, penalised, sample, uniform_draws


class RowState:
    def __init__(self, sampling, prompt=(), *, limit=None, end=None, index=0, new=()):
        self.sampling, self.prompt, self.index, self.end = sampling, prompt, index, end
        self.new = list(new)
        self.limit = limit or sampling.tokens_to_generate
        generator = torch.Generator().manual_seed(sampling.sampling_seed * 1_000_003 + index)
        self.draws = torch.rand(sampling.tokens_to_generate, generator=generator, dtype=torch.float64).tolist()

    def append(self, token):
        self.new.append(token)


def choose(logits, rows):
    chosen = []
    for one, row in zip(logits.split(1), rows, strict=True):
        s = row.sampling
        one = allowed_to_end(one, s, len(row.new), row.end)
        if s.repetition_penalty != 1:
            occurred = torch.zeros_like(one, dtype=torch.bool)
            occurred[0, [*row.prompt, *row.new]] = True
            one = penalised(one, occurred, s.repetition_penalty)
        if s.is_greedy:
            chosen.append(one.argmax(-1))
        else:
            draw = torch.tensor([row.draws[len(row.new)]], dtype=torch.float64)
            chosen.append(sample(kept(one / s.temperature, s.top_k, s.top_p), draw))
    return torch.cat(chosen)
