# SPDX-License-Identifier: Apache-2.0
"""A layer as a list of ops: matrix products, kernels between them, collectives. Needs no torch.

Each op has its sizes on one rank, for one micro-batch. The memory, messages, FLOPs and time of a layer
are sums over its list, for every model (`model/facts.py`, `planner`). An MLP with n tokens and width f:

    x.norm()                        Kernel      keeps its input
    *x.column("mlp", f / tp)        Collective  gathers the input (sequence parallelism), or sums the input's gradient
                                    Product     [n, h] x [h, f / tp]
    Kernel("mlp", kept=..., ...)    Kernel      GeLU
    *x.row("mlp", f / tp)           Product     [n, f / tp] x [f / tp, h]
                                    Collective  sums the output
    x.add()                         Kernel      dropout, and the sum with the norm's input

Examples with experts, latent attention and a scan: `tests/models/test_made_up_layers.py`.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Optional

from megatron.model.lora import KIND as LORA
from megatron.model.quantization import KIND as QUANTIZED
from megatron.model.quantization import OF_TOKENS
from megatron.model.sparsity import KIND as SPARSE
from megatron.settings.groups.kernels import BLOCKS
from megatron.settings.hashed_once import hashed_once
from megatron.settings.kernel_sizes import SCORE_BYTES
from megatron.settings.schema import Model


@hashed_once
@dataclass(frozen=True)
class RankSetup:
    """The sizes and formats of one rank's work: its part of layers and sequences, micro-batch, precision, kernels.

    micro_batch_size: sequences per pass, over all sequences of a sample (`Facts.sequences`).
    element: bytes of a weight and of an activation. chunk: --cross-entropy-chunk. backend: --attention-backend; "stored"
    is for comparisons: attention that stores all scores, as in other suites. plain_softmax:
    --no-masked-softmax-fusion; plain_loss and plain_activation: --no-cross-entropy-loss-fusion and
    --no-bias-swiglu-fusion. cp: ranks that share each sequence; cp_heads: those of them that exchange rows for heads
    (--cp-comm-type a2a: all of them); gathers: the others gather keys and values (allgather) instead of sending them round
    a ring. documents: they are packed into samples (--reset-attention-mask). ep, etp: ranks that hold different experts of
    a layer, and parts of each; ep_inner: those of ep on a node, if tokens go to experts in hops.
    frozen: linear layers of blocks ("attention.qkv") whose weight has no gradient in any block,
    and "output" for the output layer's. pairs: (linear layer, rows of A) of LoRA's; pairs_drop: with --lora-dropout.
    kinds: (linear layer, kind) of the present layer (`Facts.products`). in_fp8: its linear layers with products in fp8;
    fp8: --fp8-recipe of a run with such layers; fp8_wgrad: whether those for gradients of weights are; fp8_held: the
    weights are fp8 numbers (--fp8-param-gather). largest_scores: of each head are kept (--qk-clip,
    --log-max-attention-logit). busiest: rows of this rank's experts, as a multiple of the mean over ep
    (--moe-load-imbalance). ordered: sums have one order (--batch-invariant-mode).
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
    plain_loss: bool = False
    plain_activation: bool = False
    cp: int = 1
    cp_heads: int = 1
    gathers: bool = False
    documents: bool = False
    ep: int = 1
    etp: int = 1
    ep_inner: int = 0
    frozen: frozenset[str] = frozenset()
    pairs: tuple[tuple[str, int], ...] = ()
    pairs_drop: bool = False
    kinds: tuple[tuple[str, str], ...] = ()
    largest_scores: bool = False
    in_fp8: tuple[str, ...] = ()
    fp8: str = ""
    fp8_wgrad: bool = True
    fp8_held: bool = False
    busiest: float = 1.0
    ordered: bool = False

    def recipe_of(self, layer: str) -> str:
        """The fp8 recipe of a linear layer of the present layer, or none."""
        return self.fp8 if layer in self.in_fp8 else ""

    def keeps_input(self, layer: str) -> bool:
        """Whether the product of a linear layer saves its input."""
        return layer not in self.frozen or layer in dict(self.pairs)

    def keeps_whole_input(self, layer: str) -> bool:
        """Whether it saves its input as it is, so that another product of it need not."""
        return self.keeps_input(layer) and not (self.recipe_of(layer) and self.fp8_wgrad)

    def kinds_of(self, layer: str) -> list[str]:
        """The kinds of a linear layer of the present layer."""
        return dict(self.kinds).get(layer, "").split("+")

    def mask_bytes(self, layer: str, elements: int) -> int:
        """Bytes of the dropout mask of a pair's input."""
        return elements if self.pairs_drop and layer in dict(self.pairs) else 0

    @property
    def cp_rows(self) -> int:
        """Ranks with the same heads and other rows, which need each other's keys and values."""
        return self.cp // self.cp_heads

    @property
    def ring(self) -> bool:
        return self.cp_rows > 1 and not self.gathers

    def norm_bytes(self, model: Model, number: int, width: int, shared_input: bool = False) -> int:
        """Bytes that a norm of `number` elements saves: its input, unless another op saves it, and statistics per row."""
        rows, own = number // width, 0 if shared_input else number * self.element
        if model.normalization == "LayerNorm":
            return 2 * rows * (4 if self.device == "cuda" else self.element) + own
        return 4 * rows + own


IN_ROWS = "rows"  # fp8 of experts, in every recipe


def cast_bytes(recipe: str, width: int, elements: int) -> int:
    """Bytes of fp8 numbers in rows of this width, and of their scales."""
    tiles = elements // {"tensorwise": width, "blockwise": 128, "mxfp8": 32}[recipe]
    return elements + 4 * tiles


# The parts of a layer that can be recomputed (`Recompute.modules`): those of --recompute-modules, then the attention half
# (without the sum after it) and whole layers, as --recompute-granularity names them.
CORE, NORM, ACTIVATION, MLP, UP = MODULES = ("core_attn", "layernorm", "mlp_act", "mlp", "mla_up_proj")
ATTENTION, LAYER = "full_attn", "full"
DISCARDING = {NORM, ACTIVATION, UP}  # the op that reads such a module's output does not save it either
ALWAYS = "backward pass"  # not a module: the backward pass always repeats the op
ONCE = "first pass"  # not a module: recomputation has the op's result


@dataclass(frozen=True)
class LayerOp:
    """An op of a layer's forward pass.

    name:      of its saved tensors, in memory reports
    kept:      bytes saved for the backward pass
    given:     bytes of its input, saved instead if recomputation begins here
    reads:     whether `kept` has the input, if it is not 0; or how many of its bytes
    workspace: bytes that its backward pass needs in addition to saved ones
    again:     the modules with the op, in addition to the whole layer: their recomputation repeats it
    """

    name: str
    _: KW_ONLY
    kept: int = 0
    given: int = 0
    reads: int = True
    workspace: int = 0
    again: tuple[str, ...] = ()

    flops = 0.0  # of the forward pass, as throughput counts them

    @property
    def input_kept(self) -> int:
        """The bytes of `kept` that are its input."""
        return self.given if self.reads is True else int(self.reads)

    def runs_again(self, modules: Sequence[str]) -> bool:
        """Whether recomputation of these modules repeats the op."""
        if ONCE in self.again:
            return False
        return LAYER in modules or ALWAYS in self.again or not set(self.again).isdisjoint(modules)

    def is_discarded(self, modules: Sequence[str]) -> bool:
        """Whether nothing keeps the op's output if these modules are recomputed."""
        return LAYER not in modules and not DISCARDING.intersection(self.again).isdisjoint(modules)


@dataclass(frozen=True)
class Product(LayerOp):
    """A matrix product, [rows, inputs] x [inputs, outputs]; times: number of such products, for example of experts, whose
    mean number of rows may be a fraction. moved, starts: of its casts, as of a kernel.

    frozen: the backward pass computes no gradient of its weight; pair: rows of A of a LoRA pair beside it; stacks: experts,
    which have a pair each; fp8: the recipe of its numbers, of experts IN_ROWS; wgrad: whether those for the weight's
    gradient have it, too; held: the weight is kept in fp8, by rows, and turned in the backward pass
    """

    rows: float
    inputs: int
    outputs: int
    times: int = 1
    _: KW_ONLY
    frozen: bool = False
    pair: int = 0
    stacks: int = 1
    fp8: str = ""
    wgrad: bool = True
    held: bool = False
    moved: float = 0
    starts: int = 0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.times

    @property
    def weight_in_fp8(self) -> int:
        """Bytes of the weight's rows and columns in fp8, with their scales, beside the weight."""
        number = self.inputs * self.outputs * self.times
        if self.fp8 == IN_ROWS:  # a scale for each row and column of an expert
            return 2 * number + 4 * (self.times * self.outputs + self.stacks * self.inputs)
        if self.held:
            return 0
        tile = {"": 0, "tensorwise": number, "blockwise": 128 * 128, "mxfp8": 32}[self.fp8]
        return 2 * (number + 4 * (number // tile)) if tile else 0


@dataclass(frozen=True)
class Kernel(LayerOp):
    """An op between products. moved: elements that it reads and writes; starts: kernels that it launches."""

    _: KW_ONLY
    moved: float = 0
    starts: int = 0
    flops: float = 0.0


@dataclass(frozen=True)
class CoreAttention(Kernel):
    """softmax(q k) v; `flops` count all pairs of query and key within its window.

    kernel:  flash, block-causal, or reference, which stores scores
    pairs:   pairs of query and key, of all heads; twice the computed ones if causal order or a window skips some
    widths:  channels of a head's keys, and of its values
    dropout: whether weights are dropped; causal: whether no query sees a later key
    seen:    if so, the share of `flops` for pairs of a query and an earlier key
    """

    kernel: str
    pairs: float
    widths: tuple[int, int]
    dropout: bool = False
    causal: bool = True
    seen: float = 0.5
    again: tuple[str, ...] = field(default=(CORE, ATTENTION), kw_only=True)


@dataclass(frozen=True)
class Scan(Kernel):
    """A scan over tokens with a state for each head, computed in chunks; `flops` are those of the recurrence.

    products: FLOPs of the matrix products of the chunks, in the forward pass
    smallest: the smallest dim of these products
    """

    products: float
    smallest: int
    again: tuple[str, ...] = field(default=(CORE, ATTENTION), kw_only=True)


@dataclass(frozen=True)
class LargestScores(Kernel):
    """The product of queries and keys beside an attention kernel, of which only the largest scores are kept (--qk-clip). It
    has no gradient.

    products: its FLOPs. smallest: the smallest dim of the product
    """

    products: float
    smallest: int
    again: tuple[str, ...] = field(default=(CORE, ATTENTION), kw_only=True)

    @classmethod
    def beside(cls, core: CoreAttention, share: RankSetup) -> "LargestScores":
        """That of an attention kernel."""
        keys, values = core.widths
        products = core.flops * (core.seen if core.causal else 1.0) * keys / (keys + values)
        scores = products / (2 * keys)  # fp32, written and read
        most = min(4 * int(scores), SCORE_BYTES[share.device])
        return cls("largest scores", products=products, smallest=keys, moved=scores * 8 / share.element, workspace=most)


@dataclass(frozen=True)
class Collective(LayerOp):
    """Communication between the `ranks` of an axis: each call covers `size` bytes of the whole tensor.

    ahead, back: calls of the forward and of the backward pass (all_reduce, all_gather, reduce_scatter, all_to_all, shift: a
                 message to the next rank)
    overlapped:  those of the backward pass that overlap with a product
    in_ring:     all calls overlap with the layer's attention
    """

    axis: str
    ranks: int
    size: int
    ahead: tuple[str, ...] = ()
    back: tuple[str, ...] = ()
    overlapped: tuple[str, ...] = ()
    in_ring: bool = False


@dataclass(frozen=True)
class Residual:
    """The hidden states between branches, [tokens, h], on one rank, and the ops that read them and add to them.

    tokens: inputs of products; with sequence parallelism a rank has 1 / tp of them between branches.
    kept: whether an earlier op of the branch saves the normalized states
    width: of other states of these tokens, such as a latent; None: the hidden size
    """

    model: Model
    share: RankSetup
    tokens: int
    kept: bool = False
    width: Optional[int] = None

    @property
    def h(self) -> int:
        return self.width or self.model.hidden_size

    @property
    def elements(self) -> int:
        """Elements between branches."""
        return self.tokens // (self.share.tp if self.share.sp else 1) * self.h

    @property
    def nbytes(self) -> int:
        return self.elements * self.share.element

    def norm(self, *again: str) -> Kernel:
        """A norm. again: the modules with it, such as `NORM` if its output can be discarded."""
        kept = self.share.norm_bytes(self.model, self.elements, self.h)
        return Kernel("norms", kept=kept, given=self.nbytes, moved=2 * self.elements, again=again)

    def column(
        self,
        name: str,
        outputs: int,
        times: int = 1,
        *,
        keeps: bool = True,
        again: tuple[str, ...] = (),
        layer: str = "",
    ):
        """A column-parallel product. keeps: whether it saves its input (no other op does); layer: its name in the block."""
        given, learns = self.nbytes if keeps and not self.kept else 0, self.share.keeps_input(layer)
        rounding = self._rounding(name, self.elements, given, again, layer)
        product = Product(
            name,
            self.tokens,
            self.h,
            outputs,
            times,
            kept=(self.nbytes if rounding else given) * learns + self.share.mask_bytes(layer, self.elements),
            given=given,
            reads=learns,
            workspace=self._weight_workspace(layer, self.h * outputs * times) + self.in_blocks(outputs * times),
            again=again,
            **self._learned(layer),
        )
        copied = self.copied if learns else replace(self.copied, overlapped=())  # the input is not gathered again
        exchanged = self.over_tokens(outputs * times, self.h) if learns else ()
        ops = *rounding, replace(copied, again=again), self._in_fp8(product, layer, self.elements), *exchanged
        masks = self.share.mask_bytes(layer, self.tokens * self.h) if self.share.sp else 0
        if not masks:
            return ops
        gather = ("all_gather",)  # of a pair's mask, with the input, and for the gradient of the input
        return Collective("activations", "tp", self.share.tp, masks, gather, 2 * gather, again=again), *ops

    def whole(
        self, name: str, outputs: int, *, keeps: bool = True, again: tuple[str, ...] = (), layer: str = ""
    ) -> tuple[LayerOp, ...]:
        """The product of a layer that each rank has whole, with its own tokens. See `column`."""
        given, learns = self.nbytes if keeps and not self.kept else 0, self.share.keeps_input(layer)
        rounding = self._rounding(name, self.elements, given, again, layer)
        product = Product(
            name,
            self.elements // self.h,
            self.h,
            outputs,
            kept=(self.nbytes if rounding else given) * learns + self.share.mask_bytes(layer, self.elements),
            given=given,
            reads=learns,
            workspace=self._weight_workspace(layer, self.h * outputs),
            again=again,
            **self._learned(layer),
        )
        return *rounding, self._in_fp8(product, layer, self.elements)

    def row(self, name: str, inputs: int, again: tuple[str, ...] = (), layer: str = "") -> tuple[LayerOp, ...]:
        """A row-parallel product."""
        elements, learns = self.tokens * inputs, self.share.keeps_input(layer)
        given = elements * self.share.element
        product = Product(
            name,
            self.tokens,
            inputs,
            self.h,
            kept=given * learns + self.share.mask_bytes(layer, elements),
            given=given,
            reads=learns,
            workspace=self._weight_workspace(layer, inputs * self.h) + self.in_blocks(inputs),
            again=again,
            **self._learned(layer),
        )
        rounding, exchanged = self._rounding(name, elements, given, again, layer), self.over_tokens(inputs, self.h)
        return *rounding, self._in_fp8(product, layer, elements), *(exchanged if learns else ()), self.summed

    def product_of_experts(
        self, layer: str, rows: int, each: float, inputs: int, outputs: int, times: int, again: tuple[str, ...] = ()
    ) -> tuple[LayerOp, ...]:
        """The product of a rank's experts. rows: of all of them; each: rows of one expert; times: matrices of all"""
        learns, given = self.share.keeps_input(layer), rows * inputs * self.share.element
        product = Product(
            "experts",
            each,
            inputs,
            outputs,
            times,
            kept=given * learns,
            given=given,
            reads=learns,
            workspace=self._weight_workspace(layer, inputs * outputs * times),
            again=again,
            stacks=self.model.num_experts // self.share.ep,
            **self._learned(layer),
        )
        if self.share.recipe_of(layer):
            product = self._rows_in_fp8(product, rows * inputs)
        return *self._rounding("experts", rows * inputs, given, again, layer), product

    def _rows_in_fp8(self, p: Product, inputs: int) -> Product:
        """A product of experts in fp8, except that for the weight's gradient: casts read these elements of the input, and
        those of the gradient, twice.
        """
        outputs, e = int(p.rows * p.outputs * p.times), self.share.element
        moved = (inputs + outputs) * (2 * e + 1) / e / 3
        return replace(p, workspace=p.workspace + outputs, fp8=IN_ROWS, wgrad=False, moved=moved, starts=2)

    def _in_fp8(self, product: Product, layer: str, elements: int) -> Product:
        """The product as it is, or in fp8: then a byte for each of these elements of the input is saved, and the backward
        pass has columns of the input beside rows and columns of the gradient, and columns of a weight that is kept in fp8.
        """
        if not (recipe := self.share.recipe_of(layer)):
            return product
        p, wgrad, e = product, self.share.fp8_wgrad and not product.frozen, self.share.element
        inputs, outputs = int(p.rows) * p.inputs, int(p.rows) * p.outputs * p.times
        weight = p.inputs * p.outputs * (self.share.fp8_held and not p.frozen)  # that is turned
        largest = recipe == "tensorwise"  # of a tensor: it is read once more
        # Bytes that casts read and write in both directions; a third of them, as kernels count.
        moved = (
            inputs * (e + 1 + e * largest) + outputs * (e + 1 + wgrad + e * largest) + 2 * inputs * wgrad + 2 * weight
        )
        kept = cast_bytes(recipe, p.inputs, elements) if wgrad else p.kept
        return replace(
            p,
            kept=kept,
            reads=0 if wgrad else p.reads,
            workspace=p.workspace + outputs * (1 + wgrad) + inputs * wgrad + weight,
            fp8=recipe,
            wgrad=wgrad,
            held=weight > 0,
            moved=moved / e / 3,
            starts=3,
        )

    def _rounding(self, name: str, elements: int, given: int, again: tuple[str, ...], layer: str) -> tuple[Kernel, ...]:
        """Rounds the input of a product in quantization aware training: none, or an op that keeps a byte for each element,
        unless nothing is clipped; PACT's clipping keeps the input. The product then keeps the rounded input.

        given: bytes that only they would keep
        """
        m = self.model
        if m.activation_quantize_type == "none" or QUANTIZED not in self.share.kinds_of(layer):
            return ()
        clips = m.activation_preprocess_type == "PACT"
        # Forward and backward, 14 elements are read or written, by 13 kernels: a third of them.
        sizes = dict(given=given, workspace=elements * self.share.element, moved=5 * elements, starts=4)
        kept = elements * (m.activation_quantize_type != OF_TOKENS) + given * clips
        return (Kernel(name, kept=kept, reads=clips, again=again, **sizes),)

    def over_tokens(self, cut: int, whole: int) -> tuple[Collective, ...]:
        """What context parallel ranks send for a weight's gradient (`mpu/ordered_tokens.py`): columns of one factor,
        and the other factor.
        """
        if not self.share.ordered or self.share.cp == 1:
            return ()
        e, cp = self.share.element * self.tokens, self.share.cp
        name = "sums over tokens"
        return (
            Collective(name, "cp", cp, e * cut, back=("all_to_all",)),
            Collective(name, "cp", cp, e * cp * whole, back=("all_gather",)),
        )

    def in_blocks(self, inner: int) -> int:
        """Bytes of a product [tokens, h] as a sum over blocks of an inner dim (--batch-invariant-mode): the products of
        blocks, and the blocks of both factors.
        """
        if not self.share.ordered or self.share.tp >= BLOCKS:
            return 0
        products = BLOCKS // self.share.tp * self.tokens * self.h
        exchanged = 2 * self.tokens * (self.share.cp * self.h + inner) * (self.share.cp > 1)  # arrived, and in order
        return self.share.element * (products + inner * (self.tokens + self.h) + exchanged)

    def _weight_workspace(self, layer: str, elements: int) -> int:
        """Bytes of the masked, and of the rounded weight in the backward pass, and of torch's mask of what it clips; of two
        weights in fp32 whose rows have norms (DoRA).
        """
        kinds, e = self.share.kinds_of(layer), self.share.element
        if LORA in kinds and self.model.use_dora:
            return 8 * elements
        return elements * (e * (SPARSE in kinds) + (e + 1) * (QUANTIZED in kinds))

    def _learned(self, layer: str) -> dict:
        return dict(frozen=layer in self.share.frozen, pair=dict(self.share.pairs).get(layer, 0))

    def add(self) -> Kernel:
        """x + dropout(...), with the kernel launches of the whole branch."""
        drops = self.model.hidden_dropout > 0
        return Kernel("dropout masks", kept=self.elements * drops, moved=self.elements * (3 + 0.5 * drops), starts=15)

    @property
    def copied(self) -> Collective:
        """The collective before products that are divided over tp (`mpu.mappings`)."""
        calls = (("all_gather",), ("reduce_scatter",), ("all_gather",)) if self.share.sp else ((), ("all_reduce",))
        return self._sent(*calls)

    @property
    def summed(self) -> Collective:
        """The collective after products that are divided over tp."""
        return self._sent(*((("reduce_scatter",), ("all_gather",)) if self.share.sp else (("all_reduce",),)))

    def _sent(self, *calls: tuple[str, ...]) -> Collective:
        return Collective("activations", "tp", self.share.tp, self.tokens * self.h * self.share.element, *calls)


def rows_for_heads(name: str, axis: str, ranks: int, into: int, back: int, *ops: LayerOp) -> tuple[LayerOp, ...]:
    """Ops of all rows of some heads, the last of them a kernel, with the exchanges of context parallel ranks around them.

    into, back: bytes of what ranks exchange before and after them
    """
    if ranks == 1:
        return ops
    *before, last = ops
    both = (("all_to_all",), ("all_to_all",))
    first = Collective(name, axis, ranks, into, *both, again=last.again)
    last = replace(last, workspace=last.workspace + 2 * into)  # gradients in flight
    return first, *before, last, Collective(name, axis, ranks, back, *both, again=(ATTENTION,))


def ops_again(ops: Sequence[LayerOp], modules: Sequence[str]) -> list[LayerOp]:
    """The ops of jointly recomputed layers that run again: up to the last one that saves something."""
    again = [op for op in ops if op.runs_again(modules)]
    while LAYER in modules and again and not again[-1].kept:
        again.pop()
    return again
