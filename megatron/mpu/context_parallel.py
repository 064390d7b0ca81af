# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a rank's rows of a sequence (`mpu.chunks`), and the mappings that exchange rows and heads.

| mapping                                | forward                           | backward                              |
|----------------------------------------|-----------------------------------|---------------------------------------|
| `gather_from_context_parallel_region`  | all-gather of rows                | reduce-scatter of rows                |
| `rows_to_heads` (arXiv:2309.14509)     | all-to-all: all rows, some heads  | all-to-all: own rows, all heads       |
| `heads_to_rows`                        | all-to-all: own rows, all heads   | all-to-all: all rows, some heads      |

Gathered sequences are in their original order; over an axis of size 1 each mapping is the identity.

Legend: s tokens, cp ranks, c = s / (2 cp) tokens per chunk.
"""

from dataclasses import dataclass
from functools import partial

import torch

from megatron.mpu import collectives
from megatron.mpu.chunks import exchanging, own_chunks
from megatron.mpu.discarded import Discarded
from megatron.mpu.mappings import conjugate
from megatron.mpu.mesh import Axis


@dataclass(frozen=True)
class AttentionSharing:
    """How the ranks of context parallelism share a layer's attention (--cp-comm-type), or its scan.

    heads: ranks that exchange rows for heads (a2a); the rows of them all are zigzag chunks of a sequence, too
    rows:  ranks that have the same heads and other rows, and need each other's keys and values, or states
    ring:  keys and values travel round a ring of these ranks (p2p); False: they are gathered (allgather)

    Both axes together have all ranks. Four ranks with a2a+p2p in groups of two: ranks 0 and 1 exchange rows for heads, and
    afterwards ranks 0 and 2 are a ring.
    """

    heads: Axis
    rows: Axis
    ring: bool = True

    @property
    def size(self) -> int:
        """Ranks that share a sequence."""
        return self.heads.size * self.rows.size

    @property
    def in_ring(self) -> bool:
        """Whether keys and values travel."""
        return self.ring and self.rows.size > 1


def attention_sharing(cp: Axis, comm_type: str, inner: Axis, outer: Axis) -> AttentionSharing:
    """The ranks of a layer with this --cp-comm-type. inner, outer: the two levels of a2a+p2p (`Mesh.cp_inner`)."""
    if comm_type == "a2a":
        return AttentionSharing(cp, cp.alone)
    if comm_type == "a2a+p2p":
        assert inner.size * outer.size == cp.size, "a2a+p2p needs Mesh(cp_levels=...)"
        return AttentionSharing(inner, outer)
    return AttentionSharing(cp.alone, cp, ring=comm_type == "p2p")


def scan_sharing(groups: int, cp: Axis, inner: Axis, outer: Axis) -> AttentionSharing:
    """The ranks of a scan with so many groups of heads on this rank, whatever --cp-comm-type says: see `exchanging`."""
    heads = {cp.size: (cp, cp.alone), inner.size: (inner, outer), 1: (cp.alone, cp)}
    return AttentionSharing(*heads[exchanging(groups, cp.size, inner.size)], ring=False)


UNSHARED = AttentionSharing(Axis("cp", (0,)), Axis("cp", (0,)))  # one rank has whole sequences


def own_rows(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """This rank's rows of a whole sequence along `dim`."""
    if axis.size == 1:
        return x
    chunks = own_chunks(x.shape[dim], axis.rank, axis.size)
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in chunks], dim)


def in_order(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder [s, ...] from rank order to sequence order."""
    pairs = x.unflatten(0, (size, 2, -1))  # [cp, 2, c, ...]
    return torch.cat((pairs[:, 0], pairs[:, 1].flip(0))).flatten(0, 1)


def by_rank(x: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder [s, ...] from sequence order to rank order."""
    early, late = x.unflatten(0, (2, size, -1))  # [cp, c, ...] each
    return torch.stack((early, late.flip(0)), 1).flatten(0, 2)


def _gathered(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return in_order(collectives.all_gather(x, axis), axis.size)


def gather_rows(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows of all ranks, in the order of the sequence: [s/cp, ...] -> [s, ...]. Not differentiable."""
    return x if axis.size == 1 else _gathered(x, axis)


def rows_for_columns(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Exchange rows of a matrix for columns: [s/cp, n] -> [s, n/cp], in the order of the sequence. Not differentiable."""
    return x if axis.size == 1 else _to_heads(x.unsqueeze(1), axis).squeeze(1)


def _own_rows_of_total(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    return collectives.reduce_scatter(by_rank(x, axis.size), axis)


def _to_heads(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[s/cp, b, heads, ...] -> [s, b, heads/cp, ...]."""
    parts = torch.cat(x.chunk(axis.size, 2))  # all rows for each rank, with its heads
    return in_order(collectives.all_to_all(parts, axis), axis.size)


def _to_rows(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """[s, b, heads/cp, ...] -> [s/cp, b, heads, ...]."""
    parts = collectives.all_to_all(by_rank(x, axis.size), axis)  # own rows, with the heads of each rank
    return torch.cat(parts.chunk(axis.size), 2)


def gathered_again(whole: torch.Tensor, own: torch.Tensor, axis: Axis) -> Discarded:
    """A context for the ops that read `whole`, the gathered `own` rows of all ranks: the backward pass gathers it again."""
    return Discarded(whole, partial(_gathered, own.detach(), axis))


gather_from_context_parallel_region = conjugate(_gathered, _own_rows_of_total)
rows_to_heads = conjugate(_to_heads, _to_rows)
heads_to_rows = conjugate(_to_rows, _to_heads)
