# SPDX-License-Identifier: Apache-2.0
"""The largest logits of tokens, over a vocabulary that is split along the tp axis."""

from collections.abc import Callable

import torch

from megatron.mpu import collectives
from megatron.mpu.mesh import Axis

TOKENS = 1024  # whose logits exist at a time


@torch.no_grad()
def top_k(
    logits: Callable[[slice], torch.Tensor], n: int, k: int, *, vocab_size: int, temperature: float, tp: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids [n, k] int64, logits [n, k] fp32, largest first; log sum exp of all logits / temperature, [n] fp32).

    logits: numbers of tokens -> [tokens, v/tp], this rank's rows of the padded vocabulary. All ranks of tp get the result.
    """
    blocks = [slice(at, min(at + TOKENS, n)) for at in range(0, n, TOKENS)]
    found = [_top_k(logits(rows), k, vocab_size, temperature, tp) for rows in blocks]
    return tuple(torch.cat(each) for each in zip(*found))


def _top_k(logits: torch.Tensor, k: int, vocab_size: int, temperature: float, tp: Axis):
    first = tp.rank * logits.shape[1]
    logits = logits[:, : max(0, min(logits.shape[1], vocab_size - first))].float()
    log_sums = torch.logsumexp(logits / temperature, 1, keepdim=True)
    values, ids = logits.topk(min(k, logits.shape[1]), 1)
    if tp.size > 1:
        lacking = min(k, vocab_size) - values.shape[1]  # messages of all ranks are equally long
        values, ids = (
            torch.nn.functional.pad(x, (0, lacking), value=fill) for x, fill in ((values, -torch.inf), (ids, 0))
        )
        log_sums = torch.logsumexp(collectives.all_gather(log_sums, tp, dim=1), 1, keepdim=True)
        values, ids = (collectives.all_gather(x, tp, dim=1) for x in (values, ids + first))
        values, places = values.topk(k, 1)
        ids = ids.gather(1, places)
    return ids, values, log_sums.squeeze(1)
