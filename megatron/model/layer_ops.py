# SPDX-License-Identifier: Apache-2.0
"""A layer as the list of its ops: matrix products, kernels between them, collectives. Needs no torch.

Each op has its sizes on one rank, for one micro-batch. What a layer keeps and sends, how many FLOPs it has and how long it
takes are sums over its list, for every model (`model/facts.py`, `planner`). An MLP, of n tokens and a width of f:

    x.norm()                        Kernel      keeps its input
    *x.column("mlp", f / tp)        Collective  gathers the input (sequence parallelism), or sums the input's gradient
                                    Product     [n, h] x [h, f / tp]
    Kernel("mlp", kept=..., ...)    Kernel      GeLU
    *x.row("mlp", f / tp)           Product     [n, f / tp] x [f / tp, h]
                                    Collective  sums the output
    x.add()                         Kernel      dropout, and the sum with what the norm was given

Lists of layers with experts, with latent attention and with a scan: `tests/models/test_made_up_layers.py`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Optional

from megatron.settings.schema import Model


@dataclass(frozen=True)
class RankSetup:
    """How a rank works on the model: its part of each layer and of each sequence, the samples of a pass, number format,
    kernels.

    micro_batch_size: sequences of a pass, as many as its samples have (`Facts.sequences`).
    element: bytes of a weight and of an activation. chunk: --cross-entropy-chunk. backend: --attention-backend; "stored"
    is for comparisons: attention whose scores are whole, as other suites have it. plain_softmax:
    --no-masked-softmax-fusion. cp: ranks that share each sequence; by_heads: they exchange rows for heads (--cp-comm-type
    a2a), instead of gathering keys and values. documents: samples are packed of them (--reset-attention-mask).
    """

    tp: int = 1
    sp: bool = False
    micro_batch_size: int = 1
    device: str = "cuda"
    precision: str = "bf16"
    element: int = 2
    backend: str = "auto"
    chunk: Optional[int] = None
    plain_softmax: bool = False
    cp: int = 1
    by_heads: bool = False
    documents: bool = False

    def norm_bytes(self, model: Model, number: int, width: int, shared_input: bool = False) -> int:
        """Bytes that a norm of `number` elements keeps: its input, unless others keep it, and statistics of each row."""
        rows, own = number // width, 0 if shared_input else number * self.element
        if model.normalization == "LayerNorm":
            return 2 * rows * (4 if self.device == "cuda" else self.element) + own
        return 4 * rows + own


# --recompute-granularity, each with more ops than the one before it. Of the attention half, the sum that ends it is none.
_, CORE, ATTENTION, LAYER = GRANULARITIES = ("", "core_attn", "full_attn", "full")


@dataclass(frozen=True)
class LayerOp:
    """An op of a layer's forward pass.

    name:      of what it keeps, in the ledger of memory
    kept:      bytes for the backward pass
    given:     bytes of its input, kept instead where recomputation begins with it
    workspace: bytes that its backward pass needs beside what is kept
    again:     the least granularity of recomputation that repeats it; "": the backward pass always does
    """

    name: str
    _: KW_ONLY
    kept: int = 0
    given: int = 0
    workspace: int = 0
    again: str = LAYER

    flops = 0.0  # of the forward pass, as throughputs are counted

    def runs_again(self, granularity: str) -> bool:
        """Whether recomputation of this granularity repeats it."""
        return GRANULARITIES.index(self.again) <= GRANULARITIES.index(granularity)


@dataclass(frozen=True)
class Product(LayerOp):
    """A matrix product, [rows, inputs] x [inputs, outputs]; times: as many of them, such as those of experts."""

    rows: int
    inputs: int
    outputs: int
    times: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.times


@dataclass(frozen=True)
class Kernel(LayerOp):
    """What lies between products. moved: elements that it reads and writes; starts: kernels that it launches."""

    _: KW_ONLY
    moved: float = 0
    starts: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class CoreAttention(Kernel):
    """softmax(q k) v; `flops` are those of all pairs of query and key.

    kernel:  flash, block-causal, or reference, which stores scores
    pairs:   of query and key, of all heads; twice those that are computed where order or a window leaves out others
    widths:  channels of a head's keys, and of its values
    dropout: whether weights are dropped; causal: whether no query sees a key after it
    """

    kernel: str
    pairs: float
    widths: tuple[int, int]
    dropout: bool = False
    causal: bool = True
    again: str = field(default=CORE, kw_only=True)


@dataclass(frozen=True)
class Collective(LayerOp):
    """What the `ranks` of an axis send each other: `size` bytes of the whole tensor in each call.

    ahead, back: calls of the forward and of the backward pass (all_reduce, all_gather, reduce_scatter, all_to_all)
    beside:      those of the backward pass that run beside a product
    """

    axis: str
    ranks: int
    size: int
    ahead: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class Residual:
    """The hidden states between branches, [tokens, h], as a rank has them, and the ops that read them and add to them.

    tokens: that products see; under sequence parallelism a rank has 1 / tp of them between branches.
    """

    model: Model
    share: RankSetup
    tokens: int

    @property
    def h(self) -> int:
        return self.model.hidden_size

    @property
    def elements(self) -> int:
        """Elements between branches."""
        return self.tokens // (self.share.tp if self.share.sp else 1) * self.h

    @property
    def nbytes(self) -> int:
        return self.elements * self.share.element

    def norm(self, again: str = LAYER) -> Kernel:
        kept = self.share.norm_bytes(self.model, self.elements, self.h)
        return Kernel("norms", kept=kept, given=self.nbytes, moved=2 * self.elements, again=again)

    def column(self, name: str, outputs: int, times: int = 1, *, keeps: bool = True, again: str = LAYER):
        """A column-parallel product. keeps: its input, which no other op keeps."""
        kept = self.nbytes if keeps else 0
        product = Product(name, self.tokens, self.h, outputs, times, kept=kept, given=kept, again=again)
        return replace(self.copied, again=again), product

    def row(self, name: str, inputs: int, again: str = LAYER) -> tuple[Product, Collective]:
        """A row-parallel product."""
        kept = self.tokens * inputs * self.share.element
        return Product(name, self.tokens, inputs, self.h, kept=kept, given=kept, again=again), self.summed

    def add(self) -> Kernel:
        """x + dropout(...), with the starts of all kernels of its branch."""
        drops = self.model.hidden_dropout > 0
        return Kernel("dropout masks", kept=self.elements * drops, moved=self.elements * (3 + 0.5 * drops), starts=15)

    @property
    def copied(self) -> Collective:
        """To products that are divided over tp (`mpu.mappings`)."""
        calls = (("all_gather",), ("reduce_scatter",), ("all_gather",)) if self.share.sp else ((), ("all_reduce",))
        return self._sent(*calls)

    @property
    def summed(self) -> Collective:
        """From products that are divided over tp."""
        return self._sent(*((("reduce_scatter",), ("all_gather",)) if self.share.sp else (("all_reduce",),)))

    def _sent(self, *calls: tuple[str, ...]) -> Collective:
        return Collective("activations", "tp", self.share.tp, self.tokens * self.h * self.share.element, *calls)


def ops_again(ops: Sequence[LayerOp], granularity: str) -> list[LayerOp]:
    """Of the ops of layers that are recomputed together, those that run again: up to the last that keeps something."""
    found = [op for op in ops if op.runs_again(granularity)]
    while granularity == LAYER and found and not found[-1].kept:
        found.pop()
    return found
