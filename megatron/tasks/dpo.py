# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimization (arXiv:2305.18290): the chosen of two answers becomes more likely than the rejected one,
compared with a frozen reference.

With log p and log r the log-probabilities of an answer by the model and by the reference, the reward of an answer is
beta (log p - log r), and the loss of a pair is -log sigmoid(reward of the chosen answer - that of the rejected one).

A sample has the two texts of a pair one after the other, as documents that do not see each other. So a pair is in one row
on every rank, whatever divides model or sequence. Legend: s sequence, b micro-batch (pairs), h hidden.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional

import torch
import torch.nn.functional as F

from megatron.model.context import ForwardContext
from megatron.model.gpt.module import GPT
from megatron.model.language_model import TOKENS, Sums
from megatron.mpu import collectives
from megatron.mpu.context_parallel import own_rows
from megatron.tasks.chat_settings import DPO_LOSS, REWARDS, chat_settings


class PairComparison(GPT):
    """A GPT whose last stage compares the answers of pairs with a reference.

    frozen_losses: the reference's cross-entropy of each token of a micro-batch, [s, b]
    """

    frozen_losses: Optional[Callable[[Any], torch.Tensor]] = None

    @classmethod
    def of(cls, config, mesh, facts, **stage) -> "PairComparison":
        made, settings = super().of(config, mesh, facts, **stage), chat_settings(config)
        made.beta, made.smoothing = settings.dpo_beta, settings.dpo_label_smoothing
        return made

    def context(self, batch) -> ForwardContext:
        """With experts, the tokens of both answers together count as much as the pair in the losses that balance them."""
        context = super().context(batch)
        if not self.facts.settings.mixture:
            return context
        counted = self._sides(batch)[0].abs()
        return replace(context, weights=counted / self._summed(counted).clamp_min(1))

    def losses(self, x: torch.Tensor, batch) -> Sums:
        """The loss and the rewards, summed over pairs.

        The gradient of a pair's loss is that of a sum of its tokens' cross-entropies, each times the slope of the loss in
        the log-probability of its answer. So the loss is computed from losses of tokens without gradients, and the
        gradient by the fused cross-entropy with the slopes as its mask.
        """
        sides, counts = self._sides(batch)  # [s, b]: 1 for tokens of the chosen answer, -1 for the rejected; [b]
        whole = self.gather_input(x, self.tp) if self.overlap else x
        with torch.no_grad():
            gaps = self._token_losses(whole, batch) - self._reference(batch, sides)  # [s, b]: log r - log p
            chosen, rejected = (
                -self.beta * self._summed(gaps * (sides == side))  # [b]: rewards
                for side in (1, -1)
            )
            margin = chosen - rejected
            e = self.smoothing
            losses = -(1 - e) * F.logsigmoid(margin) - e * F.logsigmoid(-margin)
            slope = self.beta * ((1 - e) * torch.sigmoid(-margin) - e * torch.sigmoid(margin))
        rows, labels, _ = self.counted(x, batch)
        weighted, *_ = self.cross_entropy(rows, labels, (sides * slope * counts).reshape(-1))
        share = 1.0 / self.cp.size  # ranks with other rows of the same pairs add the same numbers
        values = (chosen, rejected, (margin > 0).float(), margin)
        return {
            DPO_LOSS: (losses * counts).sum() * share + (weighted - weighted.detach()),
            **{name: (value * counts).sum() * share for name, value in zip(REWARDS, values, strict=True)},
            TOKENS: counts.sum() * share,
        }

    def _sides(self, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(1 for tokens of chosen answers, -1 for those of rejected ones, else 0: [s, b]; 1 for pairs that count: [b])."""
        if batch.document_ids is None:  # synthetic samples: the halves of a text
            s = batch.labels.shape[0] * self.cp.size
            documents = torch.arange(s, device=batch.labels.device).unsqueeze(1) * 2 // s
        else:
            documents = batch.document_ids
        sides = (1 - 2 * own_rows(documents, self.cp)).clamp(-1) * (own_rows(documents, self.cp) < 2)
        mask = torch.ones_like(batch.labels) if batch.loss_mask is None else batch.loss_mask
        sides = sides * mask
        return sides.float(), (self._summed(sides.float().abs()) > 0).float()

    def _reference(self, batch, sides: torch.Tensor) -> torch.Tensor:
        if self.frozen_losses is None:  # synthetic samples: with numbers that keep rewards away from 0
            return (sides < 0).float()
        return self.frozen_losses(batch)

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the tokens of all rows, [b]."""
        total = values.sum(0)
        return total if self.cp.size == 1 else collectives.all_reduce(total, self.cp)
