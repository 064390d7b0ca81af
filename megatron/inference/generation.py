# SPDX-License-Identifier: Apache-2.0
"""Generate text: greedy, sampled or with beam search, for batches of prompts, with a cache of keys and values.

A prompt's continuation depends on the model, the prompt, the settings and its own index, not on the other prompts of the
batch or on the use of the cache. Legend: s tokens so far, b prompts, v vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Optional

import torch

from megatron.errors import DataError
from megatron.inference.beams import beam_search
from megatron.inference.choices import RowState, choose
from megatron.inference.sampling import GREEDY, Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.stages import of_last_stage
from megatron.model.cache import Cache
from megatron.mpu.mesh import Axis


@torch.no_grad()
def generate(
    model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    beams: Search = GREEDY,
    *,
    longest: int,
    end: Optional[int] = None,
    use_cache: bool = True,
    on_token: Callable[[list[int]], None] = lambda tokens: None,
    pp: Axis = ALONE,
) -> list[list[int]]:
    """The continuation of each prompt, as token ids without the prompt and without `end`.

    longest:   context length of the model; a text that reaches it ends there
    end:       the token that ends a text
    on_token:  receives the new token of every prompt, -1 for those that have ended; not with beams
    pp:        ranks that share the model (`inference.stages`); all of them call this and return the same
    Raises DataError for an empty prompt or one that leaves no room.
    """
    sampling.check()
    beams.check(sampling)
    for number, prompt in enumerate(prompts, 1):
        if not 0 < len(prompt) < longest:
            what = f"prompt {number} has {len(prompt)} tokens; the model can look at {longest}"
            raise DataError(what, do="give a shorter prompt" if prompt else "give a prompt that is not empty")
    if beams.num_beams > 1:
        return [_best_of_beams(model, prompt, sampling, beams, longest, end, use_cache, pp) for prompt in prompts]
    texts = Texts(prompts, longest, next(model.parameters()).device)
    steps = min(sampling.tokens_to_generate, longest - min(map(len, prompts)))
    rows = [
        RowState(sampling, prompt, limit=min(steps, longest - len(prompt)), end=end, index=index)
        for index, prompt in enumerate(prompts)
    ]
    cache = Cache(capacity=texts.width + steps, batch=len(prompts)) if use_cache else None
    running = [True] * len(prompts)
    for _ in range(steps):
        logits = model.logits(texts.unseen(cache), cache=cache, **texts.places(cache), last_only=True)  # [1, b, v]
        chosen = None
        if logits is not None:
            chosen = choose(logits[-1], rows)
        chosen = of_last_stage(chosen, (len(prompts),), torch.int64, texts.tokens.device, pp)
        for row, token in enumerate(chosen.tolist()):
            running[row] &= token not in rows[row].ends and len(prompts[row]) + len(rows[row].new) < longest
            if running[row]:
                rows[row].append(token)
                running[row] = len(rows[row].new) < steps
            else:
                chosen[row] = -1
        on_token(chosen.tolist())
        if not any(running):
            break
        texts.append(chosen.clamp(min=0))
    return [row.new for row in rows]


def _best_of_beams(
    model, prompt, sampling: Sampling, beams: Search, longest: int, end: Optional[int], use_cache: bool, pp: Axis
) -> list[int]:
    """Beam search for one prompt; the prompt is computed once."""
    steps = min(sampling.tokens_to_generate, longest - len(prompt))
    first = torch.tensor(prompt, dtype=torch.int64, device=next(model.parameters()).device).unsqueeze(1)  # [n, 1]
    cache = Cache(capacity=len(prompt) + steps, batch=1) if use_cache else None

    def next_logits(tokens: torch.Tensor) -> Optional[torch.Tensor]:
        logits = model.logits(tokens[0 if cache is None else cache.length :], cache=cache, last_only=True)
        return None if logits is None else logits[-1]

    sizes = dict(vocab_size=model.vocab_size, cache=cache)
    return beam_search(next_logits, first, beams, sampling, steps, **sizes, end=end, pp=pp)[0]


class Texts:
    """A batch of prompts of different lengths, padded on the left, with their generated tokens.

    Padding is a separate document, so that no text attends to it; positions start at 0 where a text starts.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], longest: int, device: torch.device):
        self.longest, self.width = longest, max(map(len, prompts))
        self.padding = torch.tensor([self.width - len(prompt) for prompt in prompts], device=device)  # [b]
        rows = [[0] * (self.width - len(prompt)) + list(prompt) for prompt in prompts]
        self.tokens = torch.tensor(rows, dtype=torch.int64, device=device).t().contiguous()  # [s, b]

    def append(self, tokens: torch.Tensor) -> None:
        """Append one token to each text: [b]."""
        self.tokens = torch.cat([self.tokens, tokens.unsqueeze(0)])

    def unseen(self, cache: Optional[Cache]) -> torch.Tensor:
        """The tokens that are not in the cache yet, [new, b]."""
        return self.tokens[0 if cache is None else cache.length :]

    def places(self, cache: Optional[Cache]) -> dict[str, Optional[torch.Tensor]]:
        """Position ids and document ids of the unseen tokens; None for prompts of equal length."""
        if not self.padding.any():
            return dict(position_ids=None, document_ids=None)
        positions = torch.arange(len(self.tokens), device=self.tokens.device).unsqueeze(1) - self.padding  # [s, b]
        positions = positions[0 if cache is None else cache.length :]
        # A text that reached the last position waits there for the others.
        return dict(position_ids=positions.clamp(0, self.longest - 1), document_ids=(positions < 0).int())
