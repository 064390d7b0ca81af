# SPDX-License-Identifier: Apache-2.0
"""What a model says of itself without being built: weights, arithmetic, memory, messages. Needs no torch.

The planner, the check before a launch, parameter counts, FLOP rates and the proof that all ranks hold the whole model
ask a model's `Facts`, and none of them knows which model it is. A new kind of layer is a module, and here a table of
weights and a tuple of branches:

    class MyFacts(Facts):
        def layer_weights(self, kind, sequence_parallel): ...     # the table of a layer's weights
        def branches(self, share, kind): ...                      # attention, then MLP: sizes on one rank

Legend: n tokens of a micro-batch (s x b), h hidden, v vocabulary, tp ranks that divide each matrix. Under sequence
parallelism what lies between layers is cut by tp.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from megatron.model.linear_kinds import Chosen, chosen_of, with_own_weights
from megatron.model.weights import Table, Unit, add_prefix, elements, logical, norm, positions, vocab_embedding
from megatron.mpu.placement import Placement
from megatron.settings.kernel_sizes import LossChunks
from megatron.settings.schema import Model, Parallel

Bytes = Counter  # kind -> bytes


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


class CoreAttention(NamedTuple):
    """Attention between its two linear layers. kept: bytes for the backward pass; recomputed: bytes if it is recomputed.

    kernel: flash, block-causal, or reference, which stores scores. work: FLOPs over all pairs of query and key, of which
    causal order computes half. scores: elements of softmax(q k), likewise. width: channels of a head. dropout: whether the
    weights are dropped.
    """

    kernel: str
    work: float
    scores: int
    width: int
    dropout: bool
    kept: int
    recomputed: int


class Exchange(NamedTuple):
    """What ranks that share sequences (context parallelism) send for the attention of one micro-batch, in bytes.

    rows:     keys and values of all their tokens, which are gathered, and whose gradients are reduced; 0 without that
    again:    they are gathered in the backward pass, too, where a kernel would keep them as they are
    into:     queries, keys and values of a rank, which are sent for other heads of other rows, and back as gradients
    out_of:   what they attend to, the same
    """

    rows: int = 0
    into: int = 0
    out_of: int = 0
    again: bool = False

    def calls(self, granularity: str) -> list[tuple[str, int, int]]:
        """(op, bytes of a call, calls) of a forward and a backward pass with `granularity` of the layer recomputed."""
        again = bool(granularity)
        whole = granularity in ("full", "full_attn")  # what follows attention keeps what comes out
        found = [("all_gather", self.rows, 1 + (again or self.again)), ("reduce_scatter", self.rows, 1)]
        found += [("all_to_all", self.into, 2 + again), ("all_to_all", self.out_of, 2 + whole)]
        return [call for call in found if call[1]]


class Branch(NamedTuple):
    """A branch of a layer: x + dropout(row(between(column(norm(x))))), a column- and a row-parallel product. Its sizes on
    one rank, for one micro-batch.

    outputs:   columns of the products with the branch's input; inputs: rows of the product with its output
    moved:     elements that what lies between reads and writes
    kept:      bytes that what lies between keeps, but for attention
    workspace: bytes that the backward pass needs beside what is kept
    exchange:  what ranks that share sequences send
    tokens:    of the micro-batch that go through it; None: as many as the model's `_tokens`
    memory:    of a branch that looks at another sequence: (tokens of it, columns of its product)
    """

    name: str
    outputs: tuple[int, ...]
    inputs: int
    moved: int
    kept: int
    workspace: int
    core: Optional[CoreAttention] = None
    exchange: Optional[Exchange] = None
    tokens: Optional[int] = None
    memory: Optional[tuple[int, int]] = None


class LayerDesign(NamedTuple):
    """What layers that are alike have in common. kind: `Facts.layer_kind`; products: `Facts.products`."""

    kind: str
    products: Chosen = ()


@dataclass(frozen=True)
class Facts:
    """Of a language model: embedding, layers of branches, final norm, output layer and loss.

    settings: its shape. vocab_size: rows of the embedding before padding.
    A subclass says `layer_weights` and `branches`; whatever else differs may be overridden.
    """

    settings: Model
    vocab_size: int

    name = "language model"
    sequences = 1  # that each sample has

    # ---- what a model has to say ------------------------------------------------------------------------------------

    def layer_weights(self, kind: str, sequence_parallel: bool) -> Table:
        """The weights of a layer."""
        raise NotImplementedError

    def branches(self, share: RankSetup, kind: str) -> tuple[Branch, ...]:
        """The branches of a layer, in order."""
        raise NotImplementedError

    # ---- what it may say otherwise ----------------------------------------------------------------------------------

    def layer_kind(self, layer: int) -> str:
        """Layers of one kind are alike."""
        return "layer"

    @property
    def layer_kinds(self) -> frozenset[str]:
        """The kinds of its layers."""
        return _kinds(self)

    def divisible_by_tp(self) -> dict[str, int]:
        """What tensor parallelism divides: words -> number."""
        return {"ffn": self.settings.ffn_size}

    @property
    def has_shape(self) -> bool:
        """Whether its settings describe a model at all: rules say what is wrong, and others need not divide by zero."""
        return True

    def shrunk(self, num_layers: int, tp: int) -> Model:
        """Settings of the same kind of model, as small as can be, for `tp` tensor parallel ranks."""
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
        """The model in a line, for the log; count: its parameters in words."""
        m = self.settings
        return (
            f"{self.name} of {count} parameters: {m.num_layers} layers, hidden {m.hidden_size}, "
            f"sequence {m.seq_length}, vocabulary {self.vocab_size}"
        )

    def attention_flops(self, context: int) -> float:
        """FLOPs of all layers' attention for one token that sees `context` tokens, forward."""
        return 0.0

    def shares_heads(self, tp: int, cp: int) -> bool:
        """Whether ranks that share sequences may exchange rows for heads."""
        return False

    def message(self, share: RankSetup) -> tuple[int, ...]:
        """Shape of what goes from stage to stage: the hidden states."""
        return (
            self._between(share, self.settings.seq_length // share.cp),
            share.micro_batch_size,
            self.settings.hidden_size,
        )

    def message_of(self, parallel: Parallel, micro_batch_size: int) -> tuple[int, ...]:
        """The same of so many samples, whatever each of them has of sequences."""
        return self.message(
            RankSetup(
                tp=parallel.tensor_model_parallel_size,
                cp=parallel.context_parallel_size,
                sp=parallel.sequence_parallel,
                micro_batch_size=micro_batch_size * self.sequences,
            )
        )

    def keeps_last_sum(self, kind: str) -> bool:
        """Whether something behind a layer's last sum over tensor parallel ranks keeps what is made of it."""
        return self.settings.hidden_dropout > 0

    def embedded_tokens(self, share: RankSetup) -> int:
        """Tokens of a micro-batch that the first stage embeds, as many as a rank has of them."""
        return self.loss_tokens(share)

    def loss_tokens(self, share: RankSetup) -> int:
        """Tokens of a micro-batch that the output layer and the loss see, as many as a rank has of them."""
        return self._tokens(share)

    def score_sums(self, share: RankSetup) -> Optional[tuple[int, ...]]:
        """Of a model that gives each sample a few scores: bytes of each sum over tensor parallel ranks that a micro-batch's
        need, forward and backward. None: its output layer looks at all tokens, and is divided by vocabulary among them.
        """
        return None

    # ---- weights ----------------------------------------------------------------------------------------------------

    def products(self, layer: int) -> Chosen:
        """Its linear layers whose products are not made plainly (--linear), each with its kind."""
        if self.settings.linear is None:
            return ()
        return chosen_of(self.settings, layer, self.layer_weights(self.layer_kind(layer), False))

    def design_of(self, layer: int) -> LayerDesign:
        """What it is: layers of one design have the same weights and do the same."""
        return LayerDesign(self.layer_kind(layer), self.products(layer))

    def design_weights(self, design: LayerDesign, sequence_parallel: bool) -> Table:
        """The weights of a layer of this design: those of its kind, and those that kinds of linear layers bring."""
        return with_own_weights(self.settings, self.layer_weights(design.kind, sequence_parallel), design.products)

    def layer_table(self, layer: int, sequence_parallel: bool) -> Table:
        """All weights of a layer, by its number."""
        return self.design_weights(self.design_of(layer), sequence_parallel)

    @property
    def brought(self) -> set[str]:
        """The full names of the weights that kinds of linear layers bring."""
        if self.settings.linear is None:
            return set()
        tables = {n: self.layer_weights(self.layer_kind(n), False) for n in range(self.num_layers)}
        return {
            f"blocks.{n}.{name}" for n, table in tables.items() for name in self.layer_table(n, False).keys() - table
        }

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
        """Whether the output layer's weight is the embedding's."""
        return not self.settings.untie_embeddings_and_output_weights

    def units(self, layers: Sequence[int], first: bool, last: bool, sequence_parallel: bool = False) -> list[Unit]:
        """The units of a pipeline stage, in the order in which its module registers them."""
        m, sp = self.settings, sequence_parallel
        table = vocab_embedding(m, self.vocab_size)
        front = [Unit("embedding.word", table, ends=("first", "last") if self.tied else ("first",))]
        if m.position_embedding_type == "learned_absolute":
            front.append(Unit("embedding", add_prefix("position", positions(m, sp)), ends=("first",)))
        back = [Unit("final_norm", norm(m, m.hidden_size, sp), ends=("last",))]
        if not self.tied:
            back.append(Unit("output", table, ends=("last",)))
        middle = [Unit(f"blocks.{n}", self.layer_table(n, sp), layer=n) for n in layers]
        held = lambda units: [unit for unit in units if unit.held_by(first, last)]
        return held(front) + middle + held(back)

    @property
    def whole(self) -> list[Unit]:
        """All units."""
        return self.units(range(self.num_layers), True, True)

    @property
    def weights(self) -> dict[str, Placement]:
        """All weights of the whole model by their full names: what a checkpoint holds."""
        return logical(self.whole)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, without padding."""
        return _parameters(self)

    # ---- arithmetic -------------------------------------------------------------------------------------------------

    def flops(self, context: Optional[int] = None) -> float:
        """Model FLOPs of one token of training: forward, and twice that backward.

        Those of matrix products, two per multiply-add, as in arXiv:2104.04473 (appendix) and Megatron-LM's own
        throughput: attention over the full `context` (default: the sequence), causal or not.
        """
        return 3.0 * (self.attention_flops(context or self.seq_length) + 2.0 * _matrices(self) + self.output_flops)

    @property
    def output_flops(self) -> float:
        """FLOPs of what stands behind the final norm, for one token, forward."""
        return 2.0 * self.settings.hidden_size * self.vocab_size

    # ---- memory -----------------------------------------------------------------------------------------------------

    def layer_saved_bytes(self, share: RankSetup, kind: str, granularity: str = "") -> Bytes:
        """Bytes that the forward pass of a layer keeps for the backward pass, with `granularity` of it recomputed."""
        branches = self.branches(share, kind)
        if granularity == "full":  # its input, nothing else
            return Bytes({"inputs of recomputed layers": self._input_bytes(share, branches[0])})
        kept = Bytes()
        for branch in branches:
            attention = branch.core is not None
            if attention and granularity == "full_attn":
                kept["inputs of recomputed layers"] += self._input_bytes(share, branch)
                kept["dropout masks"] += self._mask(share, branch)
                continue
            kept.update(self.branch_saved_bytes(share, branch))
            if attention and granularity == "core_attn":
                kept["attention core"] += branch.core.recomputed - branch.core.kept
        return kept

    def branch_saved_bytes(self, share: RankSetup, branch: Branch) -> Bytes:
        """Bytes that a branch keeps with nothing recomputed."""
        n = self.tokens_of(share, branch)
        rest, h, e = self._between(share, n), self.settings.hidden_size, share.element
        kept = Bytes({"norms": self.norm_saved_bytes(share, rest * h, h), "dropout masks": self._mask(share, branch)})
        kept[branch.name] += (rest * h + n * branch.inputs) * e + branch.kept  # inputs of both products
        if branch.core:
            kept["attention core"] += branch.core.kept
        return kept

    def norm_saved_bytes(self, share: RankSetup, number: int, width: int, shared_input: bool = False) -> int:
        """Bytes that a norm of `number` elements keeps: its input, unless others keep it, and statistics of each row."""
        rows, own = number // width, 0 if shared_input else number * share.element
        if self.settings.normalization == "LayerNorm":
            return 2 * rows * (4 if share.device == "cuda" else share.element) + own
        return 4 * rows + own

    def ends_saved_bytes(self, share: RankSetup, first: bool, last: bool) -> Bytes:
        """Bytes that embedding, and final norm with output layer and loss keep."""
        n, kept = self._tokens(share), Bytes()
        if first:
            kept["token numbers"] += 8 * n + (n if share.tp > 1 else 0)
            kept["dropout masks"] += self._mask(share)
        if last:
            rest, h = self._between(share, n), self.settings.hidden_size
            kept["norms"] += self.norm_saved_bytes(share, rest * h, h)
            kept["output layer and loss"] += self.loss_saved_bytes(share)
        return kept

    def layer_workspace(self, share: RankSetup, kind: str, granularity: str = "", together: int = 1) -> int:
        """Most bytes that a layer's backward pass needs beside what is kept; `together` layers are recomputed at a time."""
        branches = self.branches(share, kind)
        most = max(branch.workspace for branch in branches)
        if granularity == "full":
            return most + together * self.layer_saved_bytes(share, kind).total()
        for branch in branches if granularity else ():
            if branch.core:
                core = (
                    branch.core.kept if granularity == "core_attn" else self.branch_saved_bytes(share, branch).total()
                )
                return most + core
        return most

    def deferred_saved_bytes(self, share: RankSetup, kind: str) -> int:
        """Bytes of a layer whose products for weights' gradients are deferred (zero-bubble W): the inputs of its linear
        layers, and the gradients of their outputs.
        """
        h, kept = self.settings.hidden_size, 0
        for branch in self.branches(share, kind):
            n, (other, columns) = self.tokens_of(share, branch), branch.memory or (0, 0)
            kept += (n + self._between(share, n)) * h + n * (sum(branch.outputs) + branch.inputs) + other * columns
        return kept * share.element

    def message_bytes(self, share: RankSetup) -> int:
        """Bytes of what goes from stage to stage."""
        return math.prod(self.message(share)) * share.element

    # ---- the loss ---------------------------------------------------------------------------------------------------

    def vocabulary_rows(self, tp: int) -> int:
        """Rows of the embedding on each tensor parallel rank, padding included."""
        return vocab_embedding(self.settings, self.vocab_size)["weight"].local_shape({"tp": tp})[0]

    def loss_chunks(self, share: RankSetup) -> int:
        """Chunks of tokens that the loss of a micro-batch is computed in."""
        n, (chunk, block) = self._tokens(share), self._chunks(share)
        return sum(-(-min(block, n - start) // chunk) for start in range(0, n, block))

    def loss_saved_bytes(self, share: RankSetup) -> int:
        """What the fused output layer and loss keep: gradients of its input [n, h] and its weight [v/tp, h]; in place of
        the latter, while its product waits, the two that are multiplied.
        """
        n, row = self._tokens(share), self.settings.hidden_size * share.element
        return n * row + (self.loss_deferred(share) or self.vocabulary_rows(share.tp) * row)

    def loss_deferred(self, share: RankSetup) -> int:
        """Bytes from which the output weight's gradient is made in the backward pass, or later: the input and the
        gradients of all logits, [n, h + v/tp]. 0: they are too many to be kept, and it is made in the forward pass.
        """
        n = self._tokens(share)
        wanted = n * (self.settings.hidden_size + self.vocabulary_rows(share.tp)) * share.element
        return wanted if n <= self._chunks(share).block else 0

    def loss_workspace(self, share: RankSetup) -> int:
        """Most bytes of logits and their gradients at a time, beside what is kept."""
        n, rows, (chunk, block) = self._tokens(share), self.vocabulary_rows(share.tp), self._chunks(share)
        # In fp32: the logits, their gradients, one for the ops in between, and the slopes of their caps.
        logits = (4 if self.settings.final_logit_softcapping else 3) * 4 * min(n, chunk) * rows
        product = rows * self.settings.hidden_size
        if n <= block:
            return max(logits, product * share.element)
        return block * rows * share.element + logits + 2 * 4 * product  # weight gradients of blocks are summed in fp32

    def _chunks(self, share: RankSetup) -> LossChunks:
        return LossChunks.of(self.vocabulary_rows(share.tp), share.element, share.device, share.chunk)

    # ---- words for these --------------------------------------------------------------------------------------------

    def _tokens(self, share: RankSetup) -> int:
        """Tokens of a micro-batch, as many as a rank has of them."""
        return self.settings.seq_length // share.cp * share.micro_batch_size

    def _between(self, share: RankSetup, tokens: int) -> int:
        """Of these tokens, those that a rank holds between layers."""
        return tokens // (share.tp if share.sp else 1)

    def tokens_of(self, share: RankSetup, branch: Optional[Branch]) -> int:
        """Tokens of a micro-batch that go through a branch."""
        return self._tokens(share) if branch is None or branch.tokens is None else branch.tokens

    def _input_bytes(self, share: RankSetup, branch: Branch) -> int:
        """Bytes of the hidden states that a branch is given."""
        if branch.tokens is None:
            return self.message_bytes(share)
        return self._between(share, branch.tokens) * self.settings.hidden_size * share.element

    def _mask(self, share: RankSetup, branch: Optional[Branch] = None) -> int:
        """Bytes of what a dropout of hidden states keeps."""
        whole = self._between(share, self.tokens_of(share, branch)) * self.settings.hidden_size
        return whole if self.settings.hidden_dropout > 0 else 0


@lru_cache(maxsize=1024)
def _kinds(facts: Facts) -> frozenset[str]:
    return frozenset(map(facts.layer_kind, range(facts.num_layers)))


@lru_cache(maxsize=1024)
def _parameters(facts: Facts) -> int:
    return sum(elements(unit.weights) for unit in facts.whole)


@lru_cache(maxsize=1024)
def _matrices(facts: Facts) -> int:
    """Elements of the matrices of all layers, which a token is multiplied with."""
    tables = logical(unit for unit in facts.whole if unit.layer is not None)
    brought = facts.brought
    return sum(math.prod(placed.shape) for name, placed in tables.items() if placed.decay and name not in brought)
