# SPDX-License-Identifier: Apache-2.0
"""The scan of Mamba-2, state space duality, in plain torch (arXiv:2405.21060, section 6).

Each head has a state h [P, N]. Token t changes it and reads it:

    h <- exp(A dt_t) h + dt_t x_t B_t^T        y_t = h C_t + D x_t

`ssd` computes a chunk of tokens at a time: what tokens of the chunk give each other is a product of C B^T, weighted with
the decays between them, and x, as in attention; what earlier chunks give them comes from the state at its start. All of it
is in fp32 (`scan.py`: decays).

It keeps its inputs. The backward pass computes the states at the starts of chunks again, and goes back through the chunks.

Legend: s tokens, b samples, G groups of r heads of P channels, which share B and C; N channels of the state; c tokens of a
chunk.
"""

from typing import NamedTuple, Optional

import torch

from megatron.fused_kernels.autocast import op
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.scan import Decays, chunks

CHUNK = 128  # of 32 tokens, both passes take 1.11 times as long on a CPU, of 64 as long, of 256 2.2 times


@torch.compiler.disable  # a compiler would unroll the chunks
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
    chunk: int = CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """y [s, b, G, r, P] in the format of x, and the state after the last token, [b, G, r, P, N] in fp32.

    x: [s, b, G, r, P]; dt: [s, b, G, r] > 0; A: [G, r] < 0; B, C: [s, b, G, N]; D: [G, r]
    documents: of the s tokens: each begins with a state of zeros
    state: [b, G, r, P, N], from which the first document goes on; None: zeros

    >>> ones = torch.ones(3, 1, 1, 1, 1)
    >>> y, state = ssd(ones, ones[..., 0], -torch.ones(1, 1), ones[..., 0], ones[..., 0], torch.zeros(1, 1))
    >>> y.flatten().mul(100).round().tolist(), round(state.item(), 2)  # 1, 1 + 1/e, 1 + 1/e + 1/e^2
    ([100.0, 137.0, 150.0], 1.5)
    """
    starts = None if documents is None else documents.starts
    # [b, G, r P, N]: the heads of a group share B and C, so they are one product.
    before = None if state is None else state.float().flatten(2, 3)
    y, state = _SSD.apply(x, dt, A, B, C, D, before, starts, chunk)
    return y, state.unflatten(2, (-1, x.shape[-1]))


class _SSD(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dt, A, B, C, D, state, starts, chunk):
        ctx.save_for_backward(x, dt, A, B, C, D, state, starts)
        ctx.chunk = chunk
        state = _zeros(x, B) if state is None else state
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for rows in chunks(len(x), chunk):
            part = _Chunk.of(x, dt, A, B, C, starts, rows)
            y[rows] = part.read(state).addcmul_(D.float().unsqueeze(-1), x[rows].float())
            state = part.after(state)
        return y, state

    @staticmethod
    def backward(ctx, d_y, d_state):
        x, dt, A, B, C, D, before, starts = ctx.saved_tensors
        state = _zeros(x, B) if before is None else before
        d_x, d_dt, d_B, d_C = (torch.empty_like(t) for t in (x, dt, B, C))
        d_A, d_D = (torch.zeros_like(t, dtype=torch.float32) for t in (A, D))
        parts, states = [], []
        for rows in chunks(len(x), ctx.chunk):
            parts.append(rows)
            states.append(state)
            state = _Chunk.of(x, dt, A, B, C, starts, rows).after(state) if rows.stop < len(x) else state
        for rows, state in zip(reversed(parts), reversed(states), strict=True):
            part = _Chunk.of(x, dt, A, B, C, starts, rows)
            of_inputs, of_decays, d_B[rows], d_C[rows], d_state = part.gradients(state, d_y[rows].float(), d_state)
            wide, steps = x[rows].float(), dt[rows].float()
            d_x[rows] = (of_inputs * steps.unsqueeze(-1)).addcmul_(d_y[rows].float(), D.float().unsqueeze(-1))
            d_dt[rows] = (of_inputs * wide).sum(-1).addcmul_(of_decays, A.float())
            d_A += (of_decays * steps).sum((0, 1))
            d_D += (d_y[rows].float() * wide).sum((0, 1, 4))
        d_state = None if before is None else d_state
        return d_x, d_dt, d_A.to(A.dtype), d_B, d_C, d_D.to(D.dtype), d_state, None, None


def _zeros(x: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A state [b, G, r P, N]."""
    _, b, groups, r, width = x.shape
    return x.new_zeros(b, groups, r * width, B.shape[-1], dtype=torch.float32)


class _Chunk(NamedTuple):
    """The tokens of a chunk, group by group.

    x:      [b, G, r, c, P], dt x. B, C: [b, G, c, N]
    decays: of the chunk, exp of A dt at each token
    """

    x: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    decays: Decays

    @classmethod
    def of(cls, x, dt, A, B, C, starts, rows: slice) -> "_Chunk":
        steps = dt[rows].float()
        by_group = lambda t: t.movedim(0, 3)  # [c, b, G, r, ...] -> [b, G, r, c, ...]
        inputs = by_group(x[rows].float() * steps.unsqueeze(-1)).contiguous()
        B, C = (t[rows].float().permute(1, 2, 0, 3) for t in (B, C))
        return cls(inputs, B, C, Decays.of(steps * A.float(), starts, rows))

    def read(self, state: torch.Tensor) -> torch.Tensor:
        """What the tokens read, from a state before the chunk [b, G, r P, N]: [c, b, G, r, P]."""
        weights = self.decays.between().mul_((self.C @ self.B.mT).unsqueeze(2))
        return _by_token(
            (weights @ self.x).addcmul_(self.decays.start.unsqueeze(-1), self._of_heads(self.C @ state.mT))
        )

    def after(self, state: torch.Tensor) -> torch.Tensor:
        """The state after the chunk, from that before it."""
        return (self.x * self.decays.end.unsqueeze(-1)).transpose(3, 4).flatten(2, 3) @ self.B + self._decayed(state)

    def gradients(self, state, d_y, d_after) -> tuple[torch.Tensor, ...]:
        """The gradients of dt x [c, b, G, r, P], of A dt [c, b, G, r], of B and C [c, b, G, N], and of the state before.

        state: before the chunk; d_y: [c, b, G, r, P]; d_after: of the state after it
        """
        d_y = d_y.movedim(0, 3).contiguous()  # [b, G, r, c, P]
        scores, of_weights = (self.C @ self.B.mT).unsqueeze(2), d_y @ self.x.mT
        start, end, decays = self.decays.start.unsqueeze(-1), self.decays.end.unsqueeze(-1), self.decays.between()
        of_scores = (of_weights * decays).sum(2)  # [b, G, c, c]
        weights = decays.mul_(scores)
        of_between = of_weights.mul_(weights)  # of the logarithms of decays
        from_start, to_end = d_y * start, self.x * end
        of_read, of_kept = self._of_heads(self.C @ state.mT), self._of_heads(self.B @ d_after.mT)  # [b, G, r, c, P]
        d_inputs = (weights.mT @ d_y).addcmul_(of_kept, end)
        d_C = of_scores @ self.B + _rows(from_start) @ state
        d_B = of_scores.mT @ self.C + _rows(to_end) @ d_after
        d_before = from_start.transpose(3, 4).flatten(2, 3) @ self.C + self._decayed(d_after)
        whole = self._decayed(state).mul_(d_after).unflatten(2, (self.x.shape[2], -1)).sum((-1, -2))  # [b, G, r]
        of_start, of_end = (from_start * of_read).sum(-1), (to_end * of_kept).sum(-1)
        d_decays = Decays.gradients(of_between, of_start, of_end, whole)
        tokens_first = lambda t: t.permute(2, 0, 1, 3)
        return (_by_token(d_inputs), d_decays, tokens_first(d_B), tokens_first(d_C), d_before)

    def _of_heads(self, product: torch.Tensor) -> torch.Tensor:
        """[b, G, c, r P] -> [b, G, r, c, P]."""
        return product.unflatten(-1, (self.x.shape[2], -1)).transpose(2, 3)

    def _decayed(self, state: torch.Tensor) -> torch.Tensor:
        return (state.unflatten(2, (self.x.shape[2], -1)) * self.decays.whole[..., None, None]).flatten(2, 3)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """[b, G, r, c, P] -> [b, G, c, r P]."""
    return heads.transpose(2, 3).flatten(3)


def _by_token(heads: torch.Tensor) -> torch.Tensor:
    """[b, G, r, c, P] -> [c, b, G, r, P]."""
    return heads.movedim(3, 0)
