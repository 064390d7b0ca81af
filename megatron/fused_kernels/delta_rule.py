# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule in plain torch (arXiv:2412.06464, section 3).

Each value head has a state S [K, V]. Token t lets it decay, replaces a part of what it says about the key, and reads it:

    S <- exp(g_t) S        S <- S + beta_t k_t (v_t - S^T k_t)^T        o_t = S^T q_t

with keys and queries of length 1; queries are divided by sqrt(K). `delta_rule` computes a chunk of tokens at a time. With
the state S before the chunk, the decays D between its tokens, and `start` from the state to each of them, all tokens write

    N = (I + tril(beta k k^T D, -1))^-1 beta (v - start k S)        o = start q S + tril(q k^T D) N

The inverse is a triangular system with a unit diagonal. Everything is in fp32 (`scan.py`: decays).

Legend: s tokens, b samples, G key heads, each of r value heads; K and V channels of keys and values; c tokens of a chunk.
"""

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.scan import Decays, Passing, scan

CHUNK = 64  # both passes take 1.1 times as long on a CPU with 32 or 128 tokens
EPSILON = 1e-6  # in the length of queries and keys


@op
def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    documents: Optional[Documents] = None,
    state: Optional[torch.Tensor] = None,
    passing: Optional[Passing] = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o [s, b, G, r, V] in the format of v, and the state after the last token, [b, G, r, K, V] in fp32.

    q, k: [s, b, G, K] of any length; v: [s, b, G, r, V]; g: [s, b, G, r] <= 0, log decays; beta: [s, b, G, r] in 0..1
    documents: of the s tokens: each begins with a state of zeros
    state: [b, G, r, K, V], from which the first document goes on; None: zeros
    passing: it comes from other samples, of which these are the continuations (`fused_kernels.scan`)

    >>> ones = torch.ones(3, 1, 1, 1)
    >>> o, _ = delta_rule(ones, ones, 4 * ones.unsqueeze(-1), 0 * ones, 0.5 * ones)
    >>> o.flatten().mul(100).round().tolist()  # half of the way from what the state says to 4, each time
    [200.0, 300.0, 350.0]
    """
    before = None if state is None else state.float()
    return scan(_Chunk, (q, k, v, g, beta), before, documents, chunk, passing)


class _Chunk(NamedTuple):
    """The tokens of a chunk, in fp32, head by head; q and k are those of all value heads of a key head. A `ScanRule`, whose
    maps are matrices, [b, G, r, K, K].

    q, k:    [b, G, 1, c, K], of length K^-1/2 and 1; lengths: [2, b, G, 1, c, 1], what q and k were divided by
    v:       [b, G, r, c, V]; beta: [b, G, r, c, 1]
    decays:  of the chunk
    between: [b, G, r, c, c], `decays.between()`
    """

    q: torch.Tensor
    k: torch.Tensor
    lengths: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    decays: Decays
    between: torch.Tensor

    TOKENS = 5

    @classmethod
    def of(cls, inputs, starts, rows: slice) -> "_Chunk":
        q, k, v, g, beta = inputs
        both = torch.stack((q[rows], k[rows])).float().permute(0, 2, 3, 1, 4).unsqueeze(3)
        lengths = (both.square().sum(-1, keepdim=True) + EPSILON).sqrt()
        q, k = both / lengths
        v, beta = (t[rows].float().movedim(0, 3) for t in (v, beta))
        decays = Decays.of(g[rows].float(), starts, rows)
        return cls(q * q.shape[-1] ** -0.5, k, lengths, v, beta.unsqueeze(-1), decays, decays.between())

    @staticmethod
    def like(inputs) -> torch.Tensor:
        return inputs[2]

    @staticmethod
    def zeros(inputs) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v, *_ = inputs
        heads, width = v.shape[1:4], k.shape[-1]
        same = torch.eye(width, dtype=torch.float32, device=v.device).expand(*heads, width, width)
        return v.new_zeros(*heads, width, v.shape[-1], dtype=torch.float32), same

    @staticmethod
    def mapped(maps, states, transposed: bool = False) -> torch.Tensor:
        return (maps.mT if transposed else maps) @ states

    @property
    def start(self) -> torch.Tensor:
        return self.decays.start.unsqueeze(-1)

    @property
    def end(self) -> torch.Tensor:
        return self.decays.end.unsqueeze(-1)

    def corrections(self) -> torch.Tensor:
        """[b, G, r, c, c]: how much of what the token of a column writes that of a row takes back."""
        return ((self.k @ self.k.mT) * self.between * self.beta).tril(-1)

    def seen(self) -> torch.Tensor:
        """[b, G, r, c, c]: how much of what the token of a column writes that of a row reads."""
        return (self.q @ self.k.mT) * self.between

    def missing(self, state: torch.Tensor) -> torch.Tensor:
        """The values minus what the state before the chunk says about their keys, [b, G, r, c, V]."""
        return self.v - self.start * (self.k @ state)

    def visit(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state, and N: what the tokens add to it along their keys, [b, G, r, c, V]."""
        return state, _solve(self.corrections(), self.beta * self.missing(state))

    def read(self, state: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """What the tokens read, [c, b, G, r, V]."""
        return (self.seen() @ written).addcmul_(self.start, self.q @ state).movedim(3, 0)

    def after(self, state: torch.Tensor, written: torch.Tensor) -> torch.Tensor:
        """The state after the chunk."""
        return self.k.mT @ (self.end * written) + self._decayed(state)

    def joined(self, state, maps) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of a map are states, of tokens that have values of 0."""
        wide, sizes = torch.cat((state, maps), -1), (state.shape[-1], maps.shape[-1])
        part = self._replace(v=F.pad(self.v, (0, sizes[1])))
        return part.after(*part.visit(wide)).split(sizes, -1)

    def of_state(self, d_y, d_after) -> torch.Tensor:
        d_o = d_y.movedim(0, 3)
        _, right = self._of_written(self.corrections(), self.seen(), d_o, d_after)
        return self._of_state(self.start * d_o, self.start * self.beta * right, d_after)

    def _of_written(self, corrections, seen, d_o, d_after) -> tuple[torch.Tensor, torch.Tensor]:
        """What the gradient of the state after the chunk says about keys, and that of beta times the missing values."""
        kept = self.k @ d_after  # [b, G, r, c, V]
        return kept, _solve(corrections, seen.mT @ d_o + self.end * kept, transposed=True)

    def _of_state(self, from_start, from_missing, d_after) -> torch.Tensor:
        return self.q.mT @ from_start - self.k.mT @ from_missing + self._decayed(d_after)

    def gradients(self, state, written, d_y, d_after) -> tuple[torch.Tensor, ...]:
        """The gradients of q, k [c, b, G, K], v [c, b, G, r, V], g, beta [c, b, G, r], and of the state before."""
        d_o, corrections, seen = d_y.movedim(0, 3), self.corrections(), self.seen()  # d_o: [b, G, r, c, V]
        kept, right = self._of_written(corrections, seen, d_o, d_after)
        d_v = self.beta * right
        of_seen, of_corrections = d_o @ written.mT, (right @ written.mT).neg_().tril_(-1)
        from_start, from_missing = self.start * d_o, self.start * d_v
        said, asked, to_end = self.k @ state, self.q @ state, self.end * written
        # between keys and queries, and between keys, for all value heads of a key head
        of_qk = (of_seen * self.between).sum(2, keepdim=True)
        of_kk = (of_corrections * self.between * self.beta).sum(2, keepdim=True)
        per_key = lambda t: t.sum(2, keepdim=True)
        d_q = of_qk @ self.k + per_key(from_start @ state.mT)
        d_k = of_qk.mT @ self.q + (of_kk + of_kk.mT) @ self.k
        d_k += per_key(to_end @ d_after.mT - from_missing @ state.mT)
        d_before = self._of_state(from_start, from_missing, d_after)
        d_beta = (right * self.missing(state)).sum(-1) + (of_corrections * (self.k @ self.k.mT) * self.between).sum(-1)
        d_g = Decays.gradients(
            of_seen.mul_(seen).add_(of_corrections.mul_(corrections)),
            (from_start * asked - from_missing * said).sum(-1),
            (to_end * kept).sum(-1),
            (self._decayed(state) * d_after).sum((-1, -2)),
        )
        d_q, d_k = self._unscaled(torch.stack((d_q * self.q.shape[-1] ** -0.5, d_k)))
        return d_q, d_k, d_v.movedim(3, 0), d_g, d_beta.movedim(3, 0), d_before

    def _unscaled(self, gradients: torch.Tensor) -> torch.Tensor:
        """[2, c, b, G, K]: the gradients before q and k were divided by their lengths; [2, b, G, 1, c, K]: after it."""
        units = torch.stack((self.q * self.q.shape[-1] ** 0.5, self.k))
        found = (gradients - units * (units * gradients).sum(-1, keepdim=True)) / self.lengths
        return found.squeeze(3).permute(0, 3, 1, 2, 4)

    def _decayed(self, state: torch.Tensor) -> torch.Tensor:
        return self.decays.whole[..., None, None] * state


def _solve(lower: torch.Tensor, right: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """x of (I + lower) x = right, or of its transpose; lower: [..., c, c] below the diagonal."""
    matrix = lower.mT if transposed else lower
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)
