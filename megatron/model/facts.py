# SPDX-License-Identifier: Apache-2.0
"""A static description of a model: weights, FLOPs, memory and messages, without building it. Needs no torch.

The planner, the preflight check, parameter counts, FLOP rates and the check that all ranks hold the whole model
use a model's `Facts`, and none of them depends on the type of model. A new kind of layer is a list of branches
(`model/branches.py`), or a module, a table of weights and a list of ops:

    class MyFacts(Facts):
        def layer_weights(self, kind, sequence_parallel): ...     # the table of a layer's weights
        def layer_ops(self, share, kind): ...                     # products, kernels, collectives: sizes on one rank

Memory, workspace, FLOPs, messages and time of a layer follow from its list, for any recomputation.

Legend: n tokens of a micro-batch (s x b), h hidden, v vocabulary, tp ranks that divide each matrix. With sequence
parallelism, activations between layers are divided by tp.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Optional

from megatron.errors import SettingsError
from megatron.model.branches import Branch, LayerKind, branch_ops, branch_weights
from megatron.model.kinds.mixer import Mixer
from megatron.model.layer_ops import (
    ATTENTION,
    LAYER,
    Collective,
    CoreAttention,
    Kernel,
    LayerOp,
    Product,
    RankSetup,
    Residual,
    cast_bytes,
)
from megatron.model.linear_kinds import WEIGHT, Chosen, chosen_of, linear_layers, with_own_weights
from megatron.model.lora import PAIR
from megatron.model.weights import Table, Unit, add_prefix, logical, norm, positions, replicated, vocab_embedding
from megatron.mpu.placement import EXPERT_AXES, Normal, Placement, elements
from megatron.mpu.selection import Selection
from megatron.settings.hashed_once import hashed_once
from megatron.settings.kernel_sizes import LossChunks
from megatron.settings.schema import Model, Parallel

Bytes = Counter  # kind -> bytes
PROJECTIONS = "hidden_projections"
AHEAD = "mtp"  # the units of multi-token prediction: `mtp.0`, ...
OUTPUT = "output"  # the output layer, in `RankSetup.frozen`


class LayerDesign(NamedTuple):
    """A group of identical layers. kind: `Facts.layer_kind`; products: `Facts.products`; in_fp8: its linear layers whose
    products are in fp8.
    """

    kind: LayerKind
    products: Chosen = ()
    in_fp8: tuple[str, ...] = ()

    def share(self, share: RankSetup) -> RankSetup:
        """`share`, for ops of such a layer."""
        if not (self.products or self.in_fp8):
            return share
        return replace(share, kinds=self.products, in_fp8=self.in_fp8)


@hashed_once
@dataclass(frozen=True)
class Facts:
    """The facts of a language model: embedding, layers, final norm, output layer and loss.

    settings: its shape. vocab_size: rows of the embedding before padding. in_fp8: the linear layers of each layer, and of
    each layer of a depth after them, whose products are in fp8 (--fp8-format), if there are any. gathered_in_fp8: the
    recipe in which ranks keep and gather the weights of these layers, if they do (--fp8-param-gather).
    A subclass defines `layer_weights` and `layer_ops`, and may override the other methods.
    """

    settings: Model
    vocab_size: int
    in_fp8: tuple[tuple[str, ...], ...] = field(default=(), kw_only=True)
    gathered_in_fp8: str = field(default="", kw_only=True)

    name = "language model"
    sequences = 1  # per sample
    encoder_layers = None  # of an encoder-decoder: so many of `num_layers` are the encoder's

    @property
    def recomputes(self) -> frozenset[str]:
        """The parts of a layer that can be recomputed alone (`layer_ops`)."""
        return frozenset()

    # ---- required methods: `branches`, or the other two ---------------------------------------------------------------

    def branches(self, layer: int) -> tuple[Branch, ...]:
        """The branches of a layer."""
        return ()

    def overrides(self, layer: int) -> tuple[tuple[str, Any], ...]:
        """The settings of a layer that differ from the model's."""
        return self.settings.overrides(layer)

    def layer_weights(self, kind: LayerKind, sequence_parallel: bool) -> Table:
        """The weights of a layer."""
        return branch_weights(self, kind, sequence_parallel)

    def layer_ops(self, share: RankSetup, kind: LayerKind) -> Sequence[LayerOp]:
        """The ops of a layer's forward pass, in order."""
        return branch_ops(self, share, kind)

    # ---- optional methods -------------------------------------------------------------------------------------------

    def residual(self, share: RankSetup, kind: LayerKind) -> Residual:
        """The hidden states between the branches of a layer."""
        return Residual(self.settings, share, self.settings.seq_length // share.cp * share.micro_batch_size)

    def layer_kind(self, layer: int) -> LayerKind:
        """The kind of a layer; layers of one kind have equal weights and ops."""
        if layer >= self.num_layers:  # all depths of multi-token prediction have the same layers
            layer = self.num_layers + (layer - self.num_layers) % len(self.settings.layers_ahead)
        return self._kinds_in_order[layer]

    @cached_property
    def _kinds_in_order(self) -> tuple[LayerKind, ...]:
        layers = range(self.settings.layers_ahead.stop)
        own = lambda layer: self.overrides(min(layer, self.num_layers - 1))
        return tuple(LayerKind(self.branches(layer), own(layer)) for layer in layers)

    @property
    def layer_kinds(self) -> frozenset[LayerKind]:
        """The kinds of all layers."""
        return _kinds(self)

    def divisible_by_tp(self) -> dict[str, int]:
        """The sizes that tensor parallelism divides: name -> number."""
        return {"ffn": self.settings.ffn_size}

    @property
    def has_shape(self) -> bool:
        """Whether the settings describe a valid shape; if not, rules report why, and other methods may fail."""
        return True

    def shrunk(self, num_layers: int, tp: int) -> Model:
        """The settings of the smallest model of the same kind, for `tp` tensor parallel ranks."""
        m, s = self.settings, 8 * max(2, tp)
        return replace(
            m,
            num_layers=num_layers,
            hidden_size=8 * 2 * max(2, tp),
            ffn_hidden_size=8 * 4 * max(2, tp) if m.ffn_hidden_size else None,
            seq_length=s,
            max_position_embeddings=s if m.max_position_embeddings else None,
            make_vocab_size_divisible_by=min(m.make_vocab_size_divisible_by, 8),
            model_name_or_path=None,
        )

    def shrunk_groups(self, extra: Mapping[str, Any], small: Model) -> dict[str, Any]:
        """The recipe's own groups of settings, `Config.extra`, for the `shrunk` model."""
        return dict(extra)

    def describe(self, count: str) -> str:
        """A line about the model for the log; count: its number of parameters in words."""
        m = self.settings
        return (
            f"{self.name} of {count} parameters: {m.num_layers} layers, hidden {m.hidden_size}, "
            f"sequence {m.seq_length}, vocabulary {self.vocab_size}"
        )

    def attention_kernel(self, share: RankSetup) -> Optional[str]:
        """The kernel of the first layer with attention; None: there is none."""
        ops = (op for layer in range(self.num_layers) for op in self.layer_ops(share, self.layer_kind(layer)))
        return next((op.kernel for op in ops if isinstance(op, CoreAttention)), None)

    def shares_heads(self, tp: int, cp: int) -> bool:
        """Whether context parallel ranks can exchange rows for heads in attention."""
        return False

    def message(self, share: RankSetup) -> tuple[int, ...]:
        """The shape of the hidden states that one pipeline stage sends to the next."""
        return (
            self._between(share, self.settings.seq_length // share.cp),
            share.micro_batch_size,
            self.settings.hidden_size,
        )

    def message_of(self, parallel: Parallel, micro_batch_size: int) -> tuple[int, ...]:
        """`message` for a number of samples, each of which may have several sequences."""
        return self.message(
            RankSetup(
                tp=parallel.tensor_model_parallel_size,
                cp=parallel.context_parallel_size,
                sp=parallel.sequence_parallel,
                micro_batch_size=micro_batch_size * self.sequences,
            )
        )

    def embedded_tokens(self, share: RankSetup) -> int:
        """Tokens of a micro-batch that the first stage embeds on each rank."""
        return self.loss_tokens(share)

    def loss_tokens(self, share: RankSetup) -> int:
        """Tokens of a micro-batch that reach the output layer and the loss on each rank."""
        return self.settings.seq_length // share.cp * share.micro_batch_size

    def score_sums(self, share: RankSetup) -> Optional[tuple[int, ...]]:
        """Bytes of each tensor parallel sum of a micro-batch, for a model with a few scores per sample.

        None: the output layer applies to all tokens and is divided by vocabulary.
        """
        return None

    # ---- weights ----------------------------------------------------------------------------------------------------

    def products(self, layer: int) -> Chosen:
        """The linear layers of a layer with another product (--linear), each with its kind."""
        if self.settings.linear is None:
            return ()
        return chosen_of(self.settings, layer, self.layer_weights(self.layer_kind(layer), False))

    def design_of(self, layer: int) -> LayerDesign:
        """The design of a layer: layers of one design have equal weights and equal ops."""
        return LayerDesign(self.layer_kind(layer), self.products(layer), self.in_fp8[layer] if self.in_fp8 else ())

    def design_weights(self, design: LayerDesign, sequence_parallel: bool) -> Table:
        """The weights of a layer of this design: those of its kind, and those added by kinds of linear layers."""
        return with_own_weights(self.settings, self.layer_weights(design.kind, sequence_parallel), design.products)

    def layer_table(self, layer: int, sequence_parallel: bool) -> Table:
        """All weights of a layer, by its index."""
        return self.design_weights(self.design_of(layer), sequence_parallel)

    @property
    def brought(self) -> set[str]:
        """The full names of the weights that kinds of linear layers and distillation add."""
        own = {f"{unit.name}.weight" for unit in self.projections(range(self.num_layers), False)}
        if self.settings.linear is None:
            return own
        return own | {
            f"blocks.{n}.{name}"
            for n, table in self.tables.items()
            for name in self.layer_table(n, False).keys() - table
        }

    @property
    def tables(self) -> dict[int, Table]:
        """The weights of each layer, without those that kinds of linear layers add."""
        return {n: self.layer_weights(self.layer_kind(n), False) for n in range(self.num_layers)}

    @property
    def tables_ahead(self) -> dict[int, Table]:
        """The same of each layer of a depth of multi-token prediction."""
        return {n: self.layer_weights(self.layer_kind(n), False) for n in self.settings.layers_ahead}

    def mixers_of(self, layers: Sequence[int]) -> Iterator[tuple[Model, Mixer]]:
        """The mixers of layers, in order, each with the settings of its layer."""
        for kind in map(self.layer_kind, layers):
            settings = kind.settings(self.settings)
            yield from ((settings, mixer) for branch in kind.branches for mixer in branch.mixers)

    def cached_numbers(self, layers: Sequence[int], tp: int) -> int:
        """The numbers of a token that a rank with these layers caches in generation."""
        return sum(mixer.cached(settings, tp) for settings, mixer in self.mixers_of(layers))

    def state_bytes(self, layers: Sequence[int], tp: int, element: int) -> int:
        """Bytes of a text's states that a rank with these layers keeps in generation. element: bytes of activations"""
        return sum(mixer.state(settings, tp, element) for settings, mixer in self.mixers_of(layers))

    @property
    def with_states(self) -> list[str]:
        """The names of kinds of layers that keep a state of each text in generation."""
        mixers = self.mixers_of(range(self.num_layers))
        return sorted({mixer.name for settings, mixer in mixers if mixer.state(settings, 1, 4)})

    @property
    def caches_heads(self) -> bool:
        """Whether what layers cache are a key and a value of each key-value head."""
        each = 2 * self.settings.query_groups * self.settings.head_dim
        return all(self.cached_numbers([layer], 1) == each for layer in range(self.num_layers))

    @property
    def num_layers(self) -> int:
        return self.settings.num_layers

    @property
    def seq_length(self) -> int:
        return self.settings.seq_length

    @property
    def sample_tokens(self) -> int:
        """Tokens of a sample."""
        return self.sequences * self.seq_length

    @property
    def tied(self) -> bool:
        """Whether the output layer shares the embedding's weight."""
        return not self.settings.untie_embeddings_and_output_weights

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage has the embedding, too: as its output layer, or for multi-token prediction."""
        return self.tied or self.settings.depths > 0

    def units(self, layers: Sequence[int], first: bool, last: bool, sequence_parallel: bool = False) -> list[Unit]:
        """The units of a pipeline stage, in the order in which its module registers them."""
        sp = sequence_parallel
        middle = [Unit(f"blocks.{n}", self.layer_table(n, sp), layer=n) for n in layers]
        held = lambda units: [unit for unit in units if unit.held_by(first, last)]
        return held(self.front_units(sp)) + middle + held(self.back_units(sp)) + self.projections(layers, sp)

    def front_units(self, sequence_parallel: bool) -> list[Unit]:
        """The units before the layers."""
        m, ends = self.settings, ("first", "last") if self.shares_embedding else ("first",)
        units = [Unit("embedding.word", vocab_embedding(m, self.vocab_size), ends=ends)]
        inside = self.embedding_weights(sequence_parallel)
        return [*units, Unit("embedding", inside, ends=("first",))] if inside else units

    def embedding_weights(self, sequence_parallel: bool) -> Table:
        """The weights of the embedding besides the words'."""
        learned = self.settings.position_embedding_type == "learned_absolute"
        return add_prefix("position", positions(self.settings, sequence_parallel)) if learned else {}

    def back_units(self, sequence_parallel: bool) -> list[Unit]:
        """The units after the layers."""
        m = self.settings
        units = [Unit("final_norm", norm(m, m.hidden_size, sequence_parallel), ends=("last",))]
        if not self.tied:
            units.append(Unit("output", vocab_embedding(m, self.vocab_size), ends=("last",)))
        depths = range(m.own_depths)
        return units + [
            Unit(f"{AHEAD}.{depth}", self.depth_weights(sequence_parallel), ends=("last",)) for depth in depths
        ]

    def depth_weights(self, sequence_parallel: bool) -> Table:
        """The weights of a depth of multi-token prediction: norms of what it reads, the matrix [h, 2 h] from both to hidden
        states, its layers, and their norm.
        """
        m, sp = self.settings, sequence_parallel
        of_norm = norm(m, m.hidden_size, sp)
        table = {**add_prefix("enorm", of_norm), **add_prefix("hnorm", of_norm)}
        table |= add_prefix(
            "eh_proj", replicated(2 * m.hidden_size, m.hidden_size, m.init_method_std, bias=False, sequence_parallel=sp)
        )
        for number, layer in enumerate(self.settings.layers_ahead):
            table |= add_prefix(f"layers.{number}", self.layer_weights(self.layer_kind(layer), sp))
        return table | add_prefix("final_norm", of_norm)

    def projections(self, layers: Sequence[int], sequence_parallel: bool) -> list[Unit]:
        """The matrices from these layers' outputs to a teacher's hidden size, [its h, h] (--kd-hidden-projections)."""
        pairs = (pair.split(":") for pair in (self.settings.kd_hidden_projections or "").split(",") if pair)
        sizes, partial = {int(layer): int(size) for layer, size in pairs}, ("tp",) if sequence_parallel else ()
        init = Normal(1 / math.sqrt(self.settings.hidden_size))
        placed = lambda n: Placement((sizes[n], self.settings.hidden_size), init, partial=partial)
        return [Unit(f"{PROJECTIONS}.{n}", {"weight": placed(n)}) for n in layers if n in sizes]

    @property
    def whole(self) -> list[Unit]:
        """All units of the model."""
        return self.units(range(self.num_layers), True, True)

    @property
    def weights(self) -> dict[str, Placement]:
        """All weights and buffers of the whole model by their full names: the tensors of a checkpoint."""
        return logical(self.whole)

    @property
    def output_name(self) -> str:
        """The name of the output layer's weight."""
        return "embedding.word.weight" if self.tied else "output.weight"

    @property
    def experts(self) -> dict[str, Placement]:
        """The weights of experts in its layers, each by its name in a layer."""
        tables = (self.layer_weights(kind, False) for kind in self.layer_kinds)
        return {name: placed for table in tables for name, placed in experts_in(table).items()}

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding."""
        return _parameters(self)

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def flops(self, seen: bool = False) -> float:
        """Model FLOPs per token of training: the forward pass, and twice that for the backward pass.

        Counts matrix products, two FLOPs per multiply-add. Attention counts over the whole sequence, causal or not, as in
        arXiv:2104.04473 (appendix) and in earlier versions of Megatron-LM. seen: of causal attention only pairs of a query
        and an earlier key count, half of them, as in Megatron-LM today.
        """
        layers = sum(self.layer_flops(layer, seen) for layer in range(self.num_layers))
        return 3.0 * (layers / self.seq_length + self.output_flops + self.settings.depths * self._depth_flops(seen))

    def _depth_flops(self, seen: bool) -> float:
        """FLOPs of a depth of multi-token prediction, per token, forward."""
        layers = sum(self.layer_flops(layer, seen) for layer in self.settings.layers_ahead)
        return layers / self.seq_length + 4.0 * self.settings.hidden_size**2 + self.output_flops

    def trained_flops(self, selection: Selection, seen: bool = False) -> float:
        """`flops` of a run with frozen weights, which have no products for gradients, and with the products of adapters."""
        adapted = selection or self.settings.lora_rank
        return self.flops(seen) - (_frozen_flops(self, selection) if adapted else 0.0)

    def fp8_share(self, recipe: str, wgrad: bool) -> float:
        """The share of the FLOPs of training that products in fp8 have (`in_fp8`). wgrad: those for weights have, too"""
        share, layers = RankSetup(fp8=recipe, fp8_wgrad=wgrad), range(self.num_layers)
        designs = Counter(self.design_of(layer) for layer in layers if self.in_fp8)
        designs.update(self.designs_ahead * self.settings.depths)
        flops = lambda design: sum(
            (2 + op.wgrad) * op.flops
            for op in self.layer_ops(design.share(share), design.kind)
            if isinstance(op, Product) and op.fp8
        )
        every = sum(count * flops(design) for design, count in designs.items())
        return every / (self.flops() * self.seq_length)

    def learned(self, selection: Selection) -> tuple[frozenset[str], tuple[tuple[str, int], ...]]:
        """(linear layers of blocks whose weight is frozen in all of them, and "output"; (linear layer, rows of A) of LoRA
        pairs), as in `RankSetup`.
        """
        return _learned(self, selection) if selection or self.settings.lora_rank else (frozenset(), ())

    def layer_flops(self, layer: int, seen: bool = False) -> float:
        """FLOPs of a layer's forward pass for a sequence. seen: as in `flops`."""
        return _layer_flops(self, self.layer_kind(layer), seen)

    @property
    def output_flops(self) -> float:
        """FLOPs after the final norm, per token, forward."""
        return 2.0 * self.settings.hidden_size * self.vocab_size

    # ---- memory -----------------------------------------------------------------------------------------------------

    def layer_saved_bytes(self, share: RankSetup, kind: LayerKind, modules: Sequence[str] = ()) -> Bytes:
        """Bytes that a layer's forward pass saves for the backward pass, with recomputation of these modules.

        share: of the layer's design (`LayerDesign.share`), as in the methods below
        """
        kept, inside, discarded = Bytes(), False, False
        whole = LAYER in modules or ATTENTION in modules
        for op in self.layer_ops(share, kind):
            if isinstance(op, Collective):
                continue
            again, given = op.runs_again(modules), op.given
            if not again:
                kept[op.name] += op.kept - op.input_kept * discarded
            elif not inside:  # the input of a run of recomputed ops
                kept["inputs of recomputed layers" if whole else op.name] += given
            inside, discarded = again, op.is_discarded(modules)
        return kept

    def ends_saved_bytes(self, share: RankSetup, first: bool, last: bool) -> Bytes:
        """Bytes that the embedding, and the final norm with output layer and loss, save for the backward pass."""
        kept = Bytes()
        if first:
            x = Residual(self.settings, share, self.embedded_tokens(share))
            kept["token numbers"] += 8 * x.tokens + (x.tokens if share.tp > 1 else 0)
            kept["dropout masks"] += x.add().kept
        if last:
            kept["norms"] += Residual(self.settings, share, self.loss_tokens(share)).norm().kept
            kept["output layer and loss"] += (1 + self.settings.depths) * self.loss_saved_bytes(share)
        return kept

    def depth_ops(self, share: RankSetup) -> tuple[LayerOp, ...]:
        """The ops of a depth of multi-token prediction besides those of its layers and of the output layer."""
        x, e = Residual(self.settings, share, self.loss_tokens(share)), share.element
        rows = x.elements // x.h
        joined = Product(
            "multi-token prediction", rows, 2 * x.h, x.h, kept=2 * rows * x.h * e, given=2 * rows * x.h * e
        )
        embedded = Kernel("token numbers", kept=8 * x.tokens + (x.tokens if share.tp > 1 else 0) + x.add().kept)
        return x.summed, embedded, x.norm(), x.norm(), joined, x.norm()

    @property
    def designs_ahead(self) -> list[LayerDesign]:
        """The designs of the layers of a depth of multi-token prediction, which --linear leaves as they are."""
        in_fp8 = self.in_fp8 or defaultdict(tuple)
        return [LayerDesign(self.layer_kind(layer), (), in_fp8[layer]) for layer in self.settings.layers_ahead]

    def layer_workspace(self, share: RankSetup, kind: LayerKind, modules: Sequence[str] = (), together: int = 1) -> int:
        """Peak bytes of a layer's backward pass in addition to saved ones; `together` layers are recomputed at a time."""
        ops = [op for op in self.layer_ops(share, kind) if not isinstance(op, Collective)]
        runs, inside, discarded = [0], False, False  # bytes of each run of recomputed ops
        for op in ops:
            if again := op.runs_again(modules):
                runs.append(op.kept + (runs.pop() if inside else 0))
            elif inside:  # with the dropout after attention, or with the output
                runs[-1] += op.kept if ATTENTION in modules else op.given * discarded
            inside, discarded = again, op.is_discarded(modules)
        return max(op.workspace for op in ops) + (together if LAYER in modules else 1) * max(runs)

    def deferred_saved_bytes(self, share: RankSetup, kind: LayerKind) -> int:
        """Bytes of a layer with deferred weight gradients (zero-bubble W): inputs and output gradients of products."""
        products = [op for op in self.layer_ops(share, kind) if isinstance(op, Product)]
        products = [op for op in products if op.pair or not op.frozen]
        gradient = lambda op: round(op.rows * op.outputs * op.times)
        waits = lambda op: (
            cast_bytes(op.fp8, op.outputs, gradient(op)) if op.fp8 and op.wgrad else gradient(op) * share.element
        )
        return sum(op.kept + waits(op) for op in products)

    def message_bytes(self, share: RankSetup) -> int:
        """Bytes of a message between pipeline stages."""
        return math.prod(self.message(share)) * share.element

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def vocabulary_rows(self, tp: int) -> int:
        """Rows of the embedding on each tensor parallel rank, with padding."""
        return _vocabulary_rows(self, tp)

    def loss_chunks(self, share: RankSetup) -> int:
        """The number of chunks of tokens in the loss of a micro-batch."""
        n, (chunk, block) = self.loss_tokens(share), self._chunks(share)
        return sum(-(-min(block, n - start) // chunk) for start in range(0, n, block))

    def loss_saved_bytes(self, share: RankSetup) -> int:
        """Bytes that the fused output layer and loss save: gradients of the input [n, h] and the weight [v/tp, h].

        If the product of the weight's gradient is deferred, its two factors are saved instead.
        """
        return self.loss_tokens(share) * self.settings.hidden_size * share.element + self.loss_freed_bytes(share)

    def loss_freed_bytes(self, share: RankSetup) -> int:
        """The part of `loss_saved_bytes` that is freed before layers' backward passes, unless the product is deferred."""
        if OUTPUT in share.frozen:
            return 0
        return self.loss_deferred(share) or self.vocabulary_rows(share.tp) * self.settings.hidden_size * share.element

    def loss_deferred(self, share: RankSetup) -> int:
        """Bytes of the factors of the output weight's gradient, if the backward pass computes it: input and logit gradients
        [n, h + v/tp]. 0: they are too large to keep, and the forward pass computes it; or the weight is frozen.
        """
        if OUTPUT in share.frozen:
            return 0
        n = self.loss_tokens(share)
        wanted = n * (self.settings.hidden_size + self.vocabulary_rows(share.tp)) * share.element
        return wanted if n <= self._chunks(share).block else 0

    def loss_workspace(self, share: RankSetup) -> int:
        """Peak bytes of logits and their gradients, in addition to saved ones."""
        n, rows, (chunk, block) = self.loss_tokens(share), self.vocabulary_rows(share.tp), self._chunks(share)
        # In fp32: the logits, their gradients, one for the ops in between, and the slopes of their caps.
        logits = (4 if self.settings.final_logit_softcapping else 3) * 4 * min(n, chunk) * rows
        if share.device == "cuda" and not share.plain_loss:
            logits = 0  # the kernel overwrites them with their gradients
        product = rows * self.settings.hidden_size
        if OUTPUT in share.frozen:
            return min(n, block) * rows * share.element + logits
        if n <= block:
            return max(logits, product * share.element, Residual(self.settings, share, n).in_blocks(rows))
        of_block = block * rows * share.element + logits  # weight gradients of blocks are summed in fp32
        if share.device == "cuda":  # by the product; the saved gradient replaces the block
            return 4 * product + max(0, of_block - product * share.element)
        return of_block + 2 * 4 * product

    def _chunks(self, share: RankSetup) -> LossChunks:
        rows, sizes = self.vocabulary_rows(share.tp), (share.element, share.device, share.chunk)
        if share.ordered:
            return LossChunks.ordered(self.loss_tokens(share), rows, share.tp, *sizes)
        return LossChunks.of(rows, *sizes)

    # ---- helpers ----------------------------------------------------------------------------------------------------

    def _between(self, share: RankSetup, tokens: int) -> int:
        """The number of these tokens that a rank holds between layers."""
        return tokens // (share.tp if share.sp else 1)


@lru_cache(maxsize=1024)
def _learned(facts: Facts, selection: Selection) -> tuple[frozenset[str], tuple[tuple[str, int], ...]]:
    trained, linear, pairs = set(), set(), {}
    for n in range(facts.num_layers):
        table = facts.layer_table(n, False)
        frozen = selection.frozen(table, f"blocks.{n}.")
        for layer in linear_layers(table):
            linear.add(layer)
            trained |= {layer} - {name.removesuffix(WEIGHT) for name in frozen}
            pair = table.get(f"{layer}.{PAIR[0]}")
            if pair and facts.settings.use_dora:  # a third product of the weight's size, and its input
                if layer + WEIGHT not in frozen:
                    raise SettingsError(
                        f"--use-dora: the weight of blocks.{n}.{layer} is trained, too",
                        "magnitudes are those of a frozen weight's rows",
                        "leave it out of --train-only, or its layer out of --lora-target",
                    )
                trained.add(layer)
            elif pair:
                pairs[layer] = max(pairs.get(layer, 0), pair.shape[-2])
    still = linear - trained
    if facts.score_sums(RankSetup()) is None and facts.output_name in selection.frozen(facts.weights):
        still.add(OUTPUT)
    return frozenset(still), tuple(sorted(pairs.items()))


@lru_cache(maxsize=1024)
def _frozen_flops(facts: Facts, selection: Selection) -> float:
    """FLOPs per token of the gradients of frozen matrices, less those of adapters."""
    frozen, pairs = facts.learned(selection)
    share, still = RankSetup(frozen=frozen, pairs=pairs), 0.0
    for layer in range(facts.num_layers):
        for op in facts.layer_ops(share, facts.layer_kind(layer)):
            if isinstance(op, Product):
                still += op.flops * op.frozen - 6.0 * op.rows * op.pair * (
                    op.inputs * op.stacks + op.outputs * op.times
                )
    return still / facts.seq_length + facts.output_flops * (OUTPUT in frozen)


def experts_in(table: Table) -> Table:
    """The weights of experts in a layer's table."""
    return {name: placed for name, placed in table.items() if placed.model_axes == EXPERT_AXES}


@lru_cache(maxsize=1024)
def _kinds(facts: Facts) -> frozenset[LayerKind]:
    return frozenset(map(facts.layer_kind, range(facts.num_layers)))


@lru_cache(maxsize=1024)
def _parameters(facts: Facts) -> int:
    return sum(elements(unit.weights) for unit in facts.whole)


@lru_cache(maxsize=1024)
def _vocabulary_rows(facts: Facts, tp: int) -> int:
    return vocab_embedding(facts.settings, facts.vocab_size)["weight"].local_shape({"tp": tp})[0]


@lru_cache(maxsize=1024)
def _layer_flops(facts: Facts, kind: LayerKind, seen: bool) -> float:
    ops = facts.layer_ops(RankSetup(), kind)
    named = sum(op.flops * (op.seen if seen and isinstance(op, CoreAttention) and op.causal else 1.0) for op in ops)
    # A variant may have matrices without an op: each multiplies every token.
    matrices = sum(math.prod(p.shape) for p in facts.layer_weights(kind, False).values() if p.decay and not p.buffer)
    matrices -= sum(op.inputs * op.outputs * op.times for op in ops if isinstance(op, Product))
    return named + 2.0 * max(0, matrices) * facts.seq_length
