# SPDX-License-Identifier: Apache-2.0
"""A layer as a list of branches: its weights, its ops, and with `layer.Layer` its module. Needs no torch.

A branch: norm -> mixers (one, or several, whose outputs are summed) -> norm -> dropout -> sum with its input -> norm. Each
norm may be missing: --norm-position selects the first, the second or both of those next to the mixers; with --post-norm
there is only the one after the sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Optional

from megatron.model.kinds.mixer import Mixer
from megatron.model.layer_ops import ATTENTION, NORM, CoreAttention, Kernel, LargestScores, LayerOp, RankSetup, Residual
from megatron.model.weights import Table, add_prefix, norm
from megatron.settings.hashed_once import hashed_once
from megatron.settings.schema import Model


@dataclass(frozen=True)
class Branch:
    """before, after, closing: names of the norms before and after the mixers, and after the sum; "": none.

    slot: the prefix of the names of its norms and of its dropout. site: the dropout's name, from which its masks are drawn
    """

    slot: str
    mixers: tuple[Mixer, ...]
    before: str = ""
    after: str = ""
    closing: str = ""
    site: str = ""

    @classmethod
    def at(cls, position: str, slot: str, *mixers: Mixer) -> "Branch":
        """A branch with norms at a `--norm-position`."""
        before, after = position != "post", position != "pre"
        return cls(slot, mixers, f"{slot}_norm" * before, f"post_{slot}_norm" * after)

    @property
    def norms(self) -> list[str]:
        """The names of its norms, in the order of its weights."""
        own = [name for name in (self.before, self.after, self.closing) if name]
        return sorted(own, key=f"{self.slot}_norm".__ne__)

    @property
    def dropout(self) -> str:
        return f"{self.slot}_dropout"

    @property
    def mixes_tokens(self) -> bool:
        return any(mixer.mixes_tokens for mixer in self.mixers)


@hashed_once
@dataclass(frozen=True)
class LayerKind:
    """Layers of one kind have equal weights and ops. overrides: `Model.overrides`, their settings besides the model's."""

    branches: tuple[Branch, ...]
    overrides: tuple[tuple[str, Any], ...] = ()

    def settings(self, model: Model) -> Model:
        return replace(model, **dict(self.overrides)) if self.overrides else model

    def __lt__(self, other: "LayerKind") -> bool:
        order = lambda kind: (str(kind), [branch.norms for branch in kind.branches])
        return order(self) < order(other)

    def __str__(self) -> str:
        names = [mixer.name for branch in self.branches for mixer in branch.mixers]
        return ", ".join([*names, *(f"{name} {value}" for name, value in self.overrides)])


def in_turn(branches: Sequence[Branch]) -> Iterator[tuple[Branch, Optional[Branch]]]:
    """Each branch with the one after it, which the last does not have."""
    return zip(branches, (*branches[1:], None), strict=True)


@lru_cache(maxsize=1024)
def branch_weights(facts, kind: LayerKind, sequence_parallel: bool) -> Table:
    """The weights of a layer of this kind."""
    model, table = kind.settings(facts.settings), {}
    of_norm = norm(model, model.hidden_size, sequence_parallel)
    for branch in kind.branches:
        names = branch.norms
        first = names[:1] if names[:1] == [f"{branch.slot}_norm"] else []
        for name in first:
            table |= add_prefix(name, of_norm)
        for mixer in branch.mixers:
            table |= add_prefix(mixer.slot, mixer.weights(facts, model, sequence_parallel))
        for name in names[len(first) :]:
            table |= add_prefix(name, of_norm)
    return table


def _mixer_ops(facts, x: Residual, mixer: Mixer) -> Sequence[LayerOp]:
    """The ops of a mixer, and if it keeps the largest scores of its heads, the product for them before each kernel."""
    ops = mixer.ops(facts, x)
    if not (x.share.largest_scores and mixer.clipped):
        return ops
    beside = lambda op: [LargestScores.beside(op, x.share), op] if isinstance(op, CoreAttention) else [op]
    return [one for op in ops for one in beside(op)]


@lru_cache(maxsize=65536)
def branch_ops(facts, share: RankSetup, kind: LayerKind) -> tuple[LayerOp, ...]:
    """The ops of a layer of this kind."""
    x, ops = replace(facts.residual(share, kind), model=kind.settings(facts.settings)), []
    if kind.overrides:  # what mixers read of the model is that of the layer
        facts = replace(facts, settings=x.model)
    for branch, then in in_turn(kind.branches):
        again = (ATTENTION,) * branch.mixes_tokens
        ops += [x.norm(NORM, *again)] * bool(branch.before)
        first, *others = (_mixer_ops(facts, replace(x, kept=n > 0), mixer) for n, mixer in enumerate(branch.mixers))
        ops += first
        for more in others:
            more = more if not again else [replace(op, again=(*op.again, *again)) for op in more]
            ops += [*more, Kernel("sums", moved=3 * x.elements)]
        ops += [x.norm(*again)] * bool(branch.after) + [x.add()]
        # What the next layer reads cannot be discarded.
        ops += [x.norm(*(NORM,) * (then is not None))] * bool(branch.closing)
    return tuple(ops)
