# SPDX-License-Identifier: Apache-2.0
"""The scan of Mamba-2, state space duality, in plain torch (arXiv:2405.21060, section 6).

Each head has a state h [P, N]. Token t changes it and reads it:

    h <- exp(A dt_t) h + dt_t x_t B_t^T        y_t = h C_t + D x_t

`ssd` computes a chunk of tokens at a time: what tokens of the chunk give each other is a product of C B^T, weighted with
the decays between them, and x, as in attention; what earlier chunks give them comes from the state at its start. All of it
is in fp32 (`scan.py`: decays).

Legend: s tokens, b samples, G groups of r heads of P channels, which share B and C; N channels of the state; c tokens of a
chunk.
"""

from typing import NamedTuple, Optional

import torch

from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.scan import Decays, Passing, scan

CHUNK = 128  # of 32 tokens, both passes take 1.11 times as long on a CPU, of 64 as long, of 256 2.2 times


@op
def ssd(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    documents: Optional[Documents] = None,
    state: Optional[torch.Tensor] = None,
    passing: Optional[Passing] = None,
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [s, b, G, r, P] in the format of x, and the state after the last token, [b, G, r, P, N] in fp32.

    x: [s, b, G, r, P]; dt: [s, b, G, r] > 0; A: [G, r] < 0; B, C: [s, b, G, N]; D: [G, r]
    documents: of the s tokens: each begins with a state of zeros
    state: [b, G, r, P, N], from which the first document goes on; None: zeros
    passing: it comes from other samples, of which these are the continuations (`fused_kernels.scan`)

    >>> ones = torch.ones(3, 1, 1, 1, 1)
    >>> y, state = ssd(ones, ones[..., 0], -torch.ones(1, 1), ones[..., 0], ones[..., 0], torch.zeros(1, 1))
    >>> y.flatten().mul(100).round().tolist(), round(state.item(), 2)  # 1, 1 + 1/e, 1 + 1/e + 1/e^2
    ([100.0, 137.0, 150.0], 1.5)
    """
    # [b, G, r P, N]: the heads of a group share B and C, so they are one product.
    before = None if state is None else state.float().flatten(2, 3)
    y, state = scan(_Chunk, (x, dt, B, C, A, D), before, documents, chunk, passing)
    return y, state.unflatten(2, (-1, x.shape[-1]))


class _Chunk(NamedTuple):
    """The tokens of a chunk, group by group: a `ScanRule`, whose maps are the decays of states, [b, G, r].

    inputs: [b, G, r, c, P], dt x. B, C: [b, G, c, N]
    decays: of the chunk, exp of A dt at each token
    x, dt, A, D: as given, in fp32
    """

    inputs: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    decays: Decays
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    D: torch.Tensor

    TOKENS = 4

    @classmethod
    def of(cls, inputs, starts, rows: slice) -> "_Chunk":
        (x, dt, B, C), (A, D) = (t[rows].float() for t in inputs[:4]), (t.float() for t in inputs[4:])
        written = (x * dt.unsqueeze(-1)).movedim(0, 3).contiguous()
        B, C = (t.permute(1, 2, 0, 3) for t in (B, C))
        return cls(written, B, C, Decays.of(dt * A, starts, rows), x, dt, A, D)

    @staticmethod
    def like(inputs) -> torch.Tensor:
        return inputs[0]

    @staticmethod
    def zeros(inputs) -> tuple[torch.Tensor, torch.Tensor]:
        x, _, B, *_ = inputs
        _, b, groups, r, width = x.shape
        made = dict(dtype=torch.float32)
        return x.new_zeros(b, groups, r * width, B.shape[-1], **made), x.new_ones(b, groups, r, **made)

    @staticmethod
    def mapped(maps, states, transposed: bool = False) -> torch.Tensor:
        return (states.unflatten(2, (maps.shape[2], -1)) * maps[..., None, None]).flatten(2, 3)

    def visit(self, state: torch.Tensor) -> tuple[torch.Tensor]:
        return (state,)

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """What the tokens read, from a state before the chunk [b, G, r P, N]: [c, b, G, r, P]."""
        weights = self.decays.between().mul_((self.C @ self.B.mT).unsqueeze(2))
        y = (weights @ self.inputs).addcmul_(self.decays.start.unsqueeze(-1), self._of_heads(self.C @ state.mT))
        return _by_token(y).addcmul_(self.D.unsqueeze(-1), self.x)

    def after(self, state: torch.Tensor) -> torch.Tensor:
        """The state after the chunk, from that before it."""
        written = (self.inputs * self.decays.end.unsqueeze(-1)).transpose(3, 4).flatten(2, 3)
        return written @ self.B + self.mapped(self.decays.whole, state)

    def joined(self, state, maps) -> tuple[torch.Tensor, torch.Tensor]:
        return self.after(state), maps * self.decays.whole

    def of_state(self, d_y, d_after) -> torch.Tensor:
        return self._of_state(d_y.movedim(0, 3) * self.decays.start.unsqueeze(-1), d_after)

    def _of_state(self, from_start, d_after) -> torch.Tensor:
        return from_start.transpose(3, 4).flatten(2, 3) @ self.C + self.mapped(self.decays.whole, d_after)

    def gradients(self, state, d_y, d_after) -> tuple[torch.Tensor, ...]:
        """The gradients of x, dt, B, C, A, D, and of the state before.

        state: before the chunk; d_y: [c, b, G, r, P]; d_after: of the state after it
        """
        given, d_y = d_y, d_y.movedim(0, 3).contiguous()  # [b, G, r, c, P]
        scores, of_weights = (self.C @ self.B.mT).unsqueeze(2), d_y @ self.inputs.mT
        start, end, decays = self.decays.start.unsqueeze(-1), self.decays.end.unsqueeze(-1), self.decays.between()
        of_scores = (of_weights * decays).sum(2)  # [b, G, c, c]
        weights = decays.mul_(scores)
        of_between = of_weights.mul_(weights)  # of the logarithms of decays
        from_start, to_end = d_y * start, self.inputs * end
        of_read, of_kept = self._of_heads(self.C @ state.mT), self._of_heads(self.B @ d_after.mT)  # [b, G, r, c, P]
        of_inputs = _by_token((weights.mT @ d_y).addcmul_(of_kept, end))
        d_C = of_scores @ self.B + _rows(from_start) @ state
        d_B = of_scores.mT @ self.C + _rows(to_end) @ d_after
        before = self._of_state(from_start, d_after)
        whole = self.mapped(self.decays.whole, state).mul_(d_after)
        whole = whole.unflatten(2, (self.inputs.shape[2], -1)).sum((-1, -2))  # [b, G, r]
        of_start, of_end = (from_start * of_read).sum(-1), (to_end * of_kept).sum(-1)
        of_decays = Decays.gradients(of_between, of_start, of_end, whole)
        d_x = (of_inputs * self.dt.unsqueeze(-1)).addcmul_(given, self.D.unsqueeze(-1))
        d_dt = (of_inputs * self.x).sum(-1).addcmul_(of_decays, self.A)
        d_B, d_C = (t.permute(2, 0, 1, 3) for t in (d_B, d_C))
        d_A, d_D = (of_decays * self.dt).sum((0, 1)), (given * self.x).sum((0, 1, 4))
        return d_x, d_dt, d_B, d_C, d_A, d_D, before

    def _of_heads(self, product: torch.Tensor) -> torch.Tensor:
        """[b, G, c, r P] -> [b, G, r, c, P]."""
        return product.unflatten(-1, (self.inputs.shape[2], -1)).transpose(2, 3)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[b, G, r, c, P] -> [b, G, c, r P]."""
    return heads.transpose(2, 3).flatten(3)


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """[b, G, r, c, P] -> [c, b, G, r, P]."""
    return heads.movedim(3, 0)
