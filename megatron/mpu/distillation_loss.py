# SPDX-License-Identifier: Apache-2.0
"""The loss of a student on a teacher's logits, over a vocabulary that is split along the tp axis (arXiv:1503.02531).

With p and q the softmax of the teacher's and of the student's logits / T, the loss of a token is

    forward_kl  KL(p || q)                                   gradient, x T: q - p
    reverse_kl  KL(q || p)                                                  q (log q/p - KL(q || p))
    js          (KL(p || m) + KL(q || m)) / 2, m = (p + q) / 2              q (log q/m - KL(q || m)) / 2

times T^2, so that its gradients have the same size at every temperature. Ranks of tp exchange numbers of each token twice:
the log sum exp of their parts, and their parts of the sums. `TeacherLoss` has all logits of the teacher, `TopKLoss` the
largest ones.

`linear_cross_entropy` calls `DistillationLoss.compare` for the logits of a chunk of tokens, in place of its own loss. The
gradient is that of alpha x this loss + (1 - alpha) x cross-entropy with the labels + the z-loss.

Legend: n tokens, c tokens of a chunk, v padded vocabulary, tp size of the axis.
"""

import math
from collections.abc import Callable
from typing import Optional

import torch

from megatron.fused_kernels.reference import VocabularyPart
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis

TINY = 1e-7  # probability of the rest of a vocabulary, at least
# (log p, log q), this rank's part of them, [c, v/tp] -> this rank's parts of some sums, [c, 1] each, and a function from
# the sums to the divergence, [c, 1], and its gradient for the logits / T, [c, v/tp].
Divergence = Callable[[torch.Tensor, torch.Tensor], tuple[tuple[torch.Tensor, ...], Callable]]


class DistillationLoss:
    """The loss on a teacher's predictions for a micro-batch. Subclasses have the predictions.

    kind: forward_kl, reverse_kl or js; temperature: T; alpha: the share of this loss in what is minimized
    """

    def __init__(self, tp: Axis, *, kind: str, temperature: float, alpha: float):
        self.tp, self.temperature, self.alpha = tp, temperature, alpha
        self.divergence: Divergence = dict(forward_kl=forward_kl, reverse_kl=reverse_kl, js=jensen_shannon)[kind]
        self.losses: Optional[torch.Tensor] = None  # [n] fp32, not weighted

    def begin(self, n: int, block: int, device) -> None:
        """Prepare for n tokens, of whose logits `block` exist at a time."""
        self.losses = torch.empty(n, dtype=torch.float32, device=device)
        self.block = block

    def distributions(
        self, rows: slice, z: torch.Tensor, tempered: torch.Tensor, part: VocabularyPart
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log sum exp of z, [c, 1]; log q and log p, [c, v/tp] without padding) for z and z / T of the tokens `rows`."""
        raise NotImplementedError

    def compare(
        self,
        rows: slice,
        logits: torch.Tensor,
        labels: torch.Tensor,
        part: VocabularyPart,
        scale: Optional[torch.Tensor] = None,
        out: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `fused_kernels.reference.cross_entropy`; rows: the tokens of the chunk.

        Returns cross-entropy and log sum exp, and puts the loss on the teacher's logits into `losses`. Gradients are
        those of both, weighted.
        """
        z, slope = logits[:, : part.real].float(), None
        if part.softcap is not None:
            tanh = (z / part.softcap).tanh_()
            z, slope = tanh * part.softcap, 1.0 - tanh.square()
        tempered = z if self.temperature == 1.0 else z / self.temperature
        log_sum, log_q, log_p = self.distributions(rows, z, tempered, part)
        local = labels - part.first
        elsewhere = (local < 0) | (local >= part.real)
        local = local.masked_fill(elsewhere, 0).unsqueeze(1)
        own = (~elsewhere).float().unsqueeze(1)
        target = _at(z, local) * own * part.label
        if part.everywhere:
            target = target + z.sum(1, keepdim=True) * part.everywhere
        values, gradient_of = self.divergence(log_p, log_q)
        target, *values = self._summed(target, *values)
        loss, gradient = gradient_of(*values)
        self.losses[rows] = loss.squeeze(1) * self.temperature**2
        if out is not None:
            rest = 1.0 - self.alpha
            hard = (z - log_sum).exp_().mul_(rest + 2.0 * part.z_loss * log_sum)
            if part.everywhere:
                hard -= rest * part.everywhere
            if part.real:
                hard.scatter_add_(1, local, own * (-rest * part.label))
            total = gradient.mul_(self.temperature * self.alpha).add_(hard)
            for factor in (slope, None if scale is None else scale.unsqueeze(1)):
                total = total if factor is None else total.mul_(factor)
            out[:, : part.real] = total
            out[:, part.real :] = 0.0
        return (log_sum - target).squeeze(1), log_sum.squeeze(1)

    def _log_sums(self, *logits: torch.Tensor) -> torch.Tensor:
        """The log sum exp of each, [c, 1], over the whole vocabulary."""
        own = torch.stack([torch.logsumexp(each, 1, keepdim=True) for each in logits])
        if self.tp.size == 1:
            return own
        return torch.logsumexp(collectives.all_gather(own.unsqueeze(0), self.tp), 0)

    def _summed(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The sums of these over the parts of the vocabulary."""
        return values if self.tp.size == 1 else collectives.all_reduce(torch.stack(values), self.tp).unbind(0)


class TeacherLoss(DistillationLoss):
    """The loss on all logits of a teacher. logits: numbers of tokens -> [tokens, v/tp], of any format, after a soft cap."""

    def __init__(self, logits: Callable[[slice], torch.Tensor], tp: Axis, **how):
        super().__init__(tp, **how)
        self.logits, self._first, self._block = logits, -1, None

    def distributions(self, rows, z, tempered, part):
        teacher = self.chunk(rows)[:, : part.real].float()
        if self.temperature != 1.0:
            teacher = teacher / self.temperature
        log_sums = self._log_sums(z, tempered, teacher)  # [3, c, 1]
        return log_sums[0], tempered - log_sums[1], teacher - log_sums[2]

    def chunk(self, rows: slice) -> torch.Tensor:
        """The logits of the tokens of a chunk, which blocks contain whole."""
        first = rows.start // self.block * self.block
        if first != self._first:
            self._block = None  # free the last block first
            self._first, self._block = first, self.logits(slice(first, min(first + self.block, len(self.losses))))
        return self._block[rows.start - first : rows.stop - first]


class TopKLoss(DistillationLoss):
    """The loss on the largest logits of a teacher, with the rest of the vocabulary as one more event.

    The teacher's probability of the rest is what the largest ones leave. Each kind of loss between distributions over these
    k + 1 events equals the one over the vocabulary in which the teacher divides the rest as the student does.

    ids [n, k], logits [n, k] fp32: the largest ones; log_sums [n] fp32: log sum exp of all logits / T; complete: k is the
    whole vocabulary, and there is no rest
    """

    def __init__(
        self, ids: torch.Tensor, logits: torch.Tensor, log_sums: torch.Tensor, complete: bool, tp: Axis, **how
    ):
        super().__init__(tp, **how)
        self.ids, self.complete = ids, complete
        self.log_p = logits / self.temperature - log_sums.unsqueeze(1)  # [n, k]

    def distributions(self, rows, z, tempered, part):
        log_sums = self._log_sums(z, tempered)  # [2, c, 1]
        log_q, known, local = tempered - log_sums[1], self.log_p[rows], self.ids[rows] - part.first
        local = torch.where((local < 0) | (local >= part.real), part.real, local)  # others': a column that is dropped
        log_p = torch.cat((log_q, log_q.new_full((len(log_q), 1), -math.inf)), 1)  # [c, v/tp + 1]
        if not self.complete:
            [of_student] = self._summed(log_p.gather(1, local).exp().sum(1, keepdim=True))
            of_teacher = known.exp().sum(1, keepdim=True)
            log_p += (1.0 - of_teacher).clamp(min=TINY).log() - (1.0 - of_student).clamp(min=TINY).log()
        log_p.scatter_(1, local, known)
        return log_sums[0], log_q, log_p[:, :-1]


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor):
    """KL(p || q): see `Divergence`."""
    p = log_p.exp()
    value = (p * (log_p - log_q)).sum(1, keepdim=True)
    return (value,), lambda value: (value, log_q.exp().sub_(p))


def reverse_kl(log_p: torch.Tensor, log_q: torch.Tensor):
    """KL(q || p): see `Divergence`."""
    q, ratio = log_q.exp(), log_q - log_p
    return ((q * ratio).sum(1, keepdim=True),), lambda value: (value, q * (ratio - value))


def jensen_shannon(log_p: torch.Tensor, log_q: torch.Tensor):
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2: see `Divergence`."""
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    q, ratio = log_q.exp(), log_q - log_m
    values = (log_p.exp() * (log_p - log_m)).sum(1, keepdim=True), (q * ratio).sum(1, keepdim=True)
    return values, lambda of_p, of_q: ((of_p + of_q) / 2, q * (ratio - of_q) / 2)


def _at(z: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The values of z [c, v/tp] at local [c, 1]; zeros if this rank has only padding."""
    return z.gather(1, local) if z.shape[1] else z.new_zeros(local.shape)
