# SPDX-License-Identifier: Apache-2.0
"""The base class of language models: embedding, layers, final norm, output layer and loss, or a pipeline stage of them.

Legend: s sequence, b micro-batch, h hidden, v vocabulary, tp ranks that divide each matrix. Activations are [s, b, h],
or [s/tp, b, h] between layers with sequence parallelism. With context parallelism, s is one rank's part of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import run_probes
from megatron.fused_kernels.autocast import Autocast, autocast_of
from megatron.fused_kernels.gpu.flash_version import use_flash_attention
from megatron.model.context import LayerSetup
from megatron.model.facts import AHEAD, PROJECTIONS, Facts
from megatron.model.graph_dump import dumping_backend
from megatron.model.layer import Layer, Sums, added
from megatron.model.linear_products import products_of
from megatron.model.mtp import PredictionDepth
from megatron.model.norms import NORMS
from megatron.model.positions import LearnedPositions
from megatron.model.recipe import KD_HIDDEN_LOSS, KD_LOSS, LM_LOSS, Z_LOSS, mtp_loss
from megatron.model.recompute import recompute as recomputed
from megatron.model.recompute_plan import last_modules, recompute_groups
from megatron.model.weights import Table, take_prefix
from megatron.mpu import mappings
from megatron.mpu.context_parallel import AttentionSharing, attention_sharing, own_rows
from megatron.mpu.cross_entropy import linear_cross_entropy, token_losses
from megatron.mpu.deferred_wgrad import WeightGradStore
from megatron.mpu.distillation_loss import DistillationLoss
from megatron.mpu.layers import VocabParallelEmbedding, create_parameters, linear
from megatron.mpu.linear_product import attach_products
from megatron.mpu.mesh import Mesh
from megatron.mpu.ordered_tokens import SampleSums
from megatron.mpu.random import Draws, Dropout
from megatron.settings.schema import Config, Kernels, Model, Recompute

LOSS, TOKENS = LM_LOSS, "tokens"  # names of the sums of a last stage
HiddenLosses = dict[int, Callable[[torch.Tensor], torch.Tensor]]


def sum_over_tokens(values: torch.Tensor, loss_mask: Optional[torch.Tensor], part: nn.Module) -> torch.Tensor:
    """The sum of a layer's per-token values over the tokens that count, for the sums that it returns with x.

    values:    [s, b], or [s/tp, b] with sequence parallelism; equal on all tp ranks otherwise
    loss_mask: [s, b], or None if every token counts (`ForwardContext.loss_mask`)
    part:      the layer; its `tp` and `sequence_parallel` select between the two
    """
    values, cut = values.float(), part.sequence_parallel and part.tp.size > 1
    if loss_mask is not None:
        values = values * (loss_mask.chunk(part.tp.size)[part.tp.rank] if cut else loss_mask)
    return mappings.reduce_from_tensor_model_parallel_region(values.sum(), part.tp) if cut else values.sum()


def choose_fusions(model: nn.Module, kernels: Kernels) -> None:
    """Enable or disable fused kernels: set `unfused` of each module that names a setting as its `fusion`."""
    for module in model.modules():
        if fusion := getattr(module, "fusion", None):
            module.unfused = not getattr(kernels, fusion)


class LanguageModel(nn.Module):
    """The layers `layers` (default: all) of a model, with the embedding if `first` and norm, output and loss if `last`.

    A subclass may have other layers (`layer_class`, `build_layer`), and an input that all share (`context`). Layers may
    return sums over tokens with x; those of one name are added up, and any stage returns them.

    Parameters are created empty, from the tables of `facts.units`: `mpu.random.init_parameter` fills them as
    `mpu.placement.placements(model)` specifies. They have logical, global names (`blocks.17.mlp.up.weight`), which are
    the same in every layout. A last stage that is not the first holds a copy of a tied `embedding.word.weight`.

    units: the weights of the stage. dtype: the format of weights and of messages between stages. autocast: other
    formats per op. cp_comm_type: how ranks of `mesh.cp` share attention, one value for all layers or one for each.
    """

    layer_class: type[Layer] = Layer
    # Of the output layer; set by `deferred_wgrad.attach_weight_grad_store`.
    weight_grad_store: Optional[WeightGradStore] = None
    ordered: Optional[SampleSums] = None  # sums have one order; set by `ordered.attach_ordered`
    # For evaluations that need each sample (`training.measures`): called on the last stage with the micro-batch and
    # the cross-entropy of each token, [s, b] fp32, unmasked.
    collect: Optional[Callable[[Any, torch.Tensor], None]] = None
    # For distillation (`training.distillation`): the last stage in training calls it with the micro-batch.
    teacher: Optional[Callable[[Any], DistillationLoss]] = None
    # Micro-batch -> number of a layer -> a loss of each token, [s or s/tp, b], on the layer's output; in training.
    hidden_teacher: Optional[Callable[[Any], HiddenLosses]] = None

    def __init__(
        self,
        facts: Facts,
        mesh: Mesh,
        *,
        layers: Optional[range] = None,
        first: bool = True,
        last: bool = True,
        sequence_parallel: bool = False,
        cp_comm_type: Sequence[str] = ("p2p",),
        kernels: Optional[Kernels] = None,
        recompute: Optional[Recompute] = None,
        autocast: Optional[Autocast] = None,
        seed: int = 1234,
        dtype: torch.dtype = torch.float32,
        device=None,
    ):
        super().__init__()
        model = facts.settings
        layers = range(model.num_layers) if layers is None else layers
        self.region = nullcontext if autocast is None else lambda: autocast  # around all layers
        self.facts, self.first, self.last, self.tp, self.vocab_size = facts, first, last, mesh.tp, facts.vocab_size
        self.cp, self.cp_comm_type, self.cp_levels = mesh.cp, tuple(cp_comm_type), (mesh.cp_inner, mesh.cp_outer)
        self.mesh, self.ep, self.etp = mesh, mesh.ep, mesh.etp
        self.dtype, self.kernels, self.label_smoothing = dtype, kernels or Kernels(), model.label_smoothing
        self.softcap, self.z_loss = model.final_logit_softcapping, model.z_loss_coeff
        self.sequence_parallel = sequence_parallel and mesh.tp.size > 1
        self.seed, self.factory_kwargs = seed, dict(dtype=dtype, device=device)
        self.units = facts.units(layers, first, last, self.sequence_parallel)
        tables = {unit.name: unit.weights for unit in self.units}
        if "embedding.word" in tables:
            self.embedding = self.build_embedding(mesh, tables)
        self.recompute_groups = recompute_groups(layers, recompute or Recompute())
        modules = {n: group.modules for group in self.recompute_groups for n in group.layers}
        self.blocks = nn.ModuleDict({str(n): self.build_layer(n, tables[f"blocks.{n}"], modules[n]) for n in layers})
        depths = range(model.own_depths if last else 0)
        again = last_modules(layers, recompute or Recompute())
        self.mtp = nn.ModuleList(self.build_depth(n, tables[f"{AHEAD}.{n}"], again) for n in depths)
        self.overlap = autocast is None  # as in `ColumnParallelLinear`, for the output layer
        for module in (*self.blocks.modules(), *self.mtp.modules()) if autocast else ():
            if hasattr(module, "overlap"):
                module.overlap = False
            if hasattr(module, "region"):
                module.region = self.region
        use_flash_attention(self.kernels.flash_attention_version)
        self.rank = mesh.rank
        if self.kernels.torch_compile is True:
            self.compile_layers()
        if last:
            self.final_norm = None  # for layers that end with a norm
            if "final_norm" in tables:
                kind = NORMS[model.normalization]
                self.final_norm = kind(tables["final_norm"], model.norm_epsilon, **self.factory_kwargs)
            self.output = None
            if "output" in tables:
                self.output = VocabParallelEmbedding(tables["output"], mesh.tp, **self.factory_kwargs)
            self.gather_input = (
                mappings.gather_from_sequence_parallel_region
                if self.sequence_parallel
                else mappings.copy_to_tensor_model_parallel_region
            )
        projected = {str(n): tables[name] for n in layers if (name := f"{PROJECTIONS}.{n}") in tables}
        self.hidden_projections = nn.ModuleDict(
            {n: Projection(table, **self.factory_kwargs) for n, table in projected.items()}
        )
        choose_fusions(self, self.kernels)
        draws = partial(Draws, seed, mesh.cp)
        compiled = bool(self.kernels.torch_compile)
        attach_products(self.blocks, model, products_of(model), facts.products, draws, compiled)

    @classmethod
    def of(cls, config: Config, mesh: Mesh, facts: Facts, **stage) -> "LanguageModel":
        """Build a stage from all settings of a run. stage: the keywords layers, first, last, dtype, device."""
        return cls(
            facts,
            mesh,
            sequence_parallel=config.parallel.sequence_parallel,
            cp_comm_type=config.parallel.cp_comm_types,
            kernels=config.kernels,
            recompute=config.recompute,
            autocast=autocast_of(config.precision),
            seed=config.logging.seed,
            **stage,
        )

    def compile_layers(self) -> None:
        """Compile the layers, each by itself. The compiler runs in the first pass."""
        run_probes("attention")
        folder = self.kernels.dump_graph
        more = {"backend": dumping_backend(folder, self.rank)} if folder else {}
        for block in self.blocks.values():
            block.compile(**more)

    # ---- methods for subclasses --------------------------------------------------------------------------------------

    def build_layer(self, layer: int, weights: Table, recompute: tuple[str, ...]) -> nn.Module:
        """Build layer number `layer`: a module whose forward takes (x, context) and returns x, or (x, {name: sum}).

        It keeps the shape of x. recompute: names of the parts that it recomputes, from `Facts.recomputes`. With ("full",)
        the caller recomputes the whole layer. By default it is a `layer_class`, of the branches in the facts.
        """
        setup = LayerSetup(
            self.facts,
            layer,
            self.mesh,
            self.seed,
            self.kernels,
            self.sequence_parallel,
            recompute=recompute,
            sharing=self.sharing(layer),
            **self.factory_kwargs,
        )
        return self.layer_class(weights, setup)

    def build_embedding(self, mesh: Mesh, tables: dict[str, Table]) -> nn.Module:
        """The module that embeds tokens. The output layer may share its `word`, on a last stage without other parts."""
        settings = self.facts.settings
        return Embedding(settings, mesh, tables, self.seed, self.sequence_parallel, **self.factory_kwargs)

    def build_depth(self, depth: int, weights: Table, recompute: tuple[str, ...]) -> nn.Module:
        """Build a depth of multi-token prediction, from 0."""
        return PredictionDepth(
            self.facts,
            depth,
            weights,
            lambda layer, table: self.build_layer(layer, table, recompute),
            tp=self.tp,
            cp=self.cp,
            seed=self.seed,
            sequence_parallel=self.sequence_parallel,
            modules=recompute,
            region=self.region,
            **self.factory_kwargs,
        )

    def context(self, batch) -> Any:
        """The input that all layers of a pass share, from the micro-batch."""
        return batch

    # ---- passes -----------------------------------------------------------------------------------------------------

    def forward(self, x: Optional[torch.Tensor], batch):
        """One micro-batch through these layers.

        x: None on the first stage, else the output of the previous stage, [s, b, h]. batch: a `MicroBatch`.
        Returns [s, b, h], or on the last stage (None, {"lm loss": sum of masked losses, "tokens": number that count}),
        fp32 scalars. With --z-loss-coeff there is also "z loss", and the gradient of "lm loss" includes that of the z
        loss. With a teacher there is "kd loss" in training, whose gradient includes those of both. Sums that layers
        return are added to these; an earlier stage returns (x, {name: sum}) then.
        """
        with self.region():
            x, sums = self._hidden(x, batch, gather=not self.overlap)
            if not self.last:
                return (x, sums) if sums else x
            if self.collect is not None and not self.training:
                return None, {**self._collected(x, batch), **sums}
            return None, {**self.losses(x, batch), **sums}

    def losses(self, x: torch.Tensor, batch) -> Sums:
        """The sums of the last stage, from the output layer's input: [s, b, h], or [s/tp, b, h] if that gathers it."""
        teacher = self.teacher(batch) if self.teacher is not None and self.training else None
        loss, z, *kd = self.cross_entropy(*self.counted(x, batch), teacher)
        more = ({Z_LOSS: z} if self.z_loss else {}) | ({KD_LOSS: kd[0]} if kd else {})
        return {LOSS: loss, TOKENS: batch.num_tokens, **more}

    def cross_entropy(
        self,
        rows: torch.Tensor,
        labels: torch.Tensor,
        mask: Optional[torch.Tensor],
        teacher: Optional[DistillationLoss] = None,
        z_loss: Optional[float] = None,
        weight: Optional[torch.Tensor] = None,
    ) -> tuple[torch.Tensor, ...]:
        """`linear_cross_entropy` of the output layer. z_loss: its coefficient (default: --z-loss-coeff); weight: another
        matrix
        """
        tp = self.tp if self.overlap and self.tp.size > 1 else None
        return linear_cross_entropy(
            rows,
            self.output_weight if weight is None else weight,
            labels,
            mask=mask,
            bias=self.output_bias,
            vocab_size=self.vocab_size,
            tp=self.tp,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            softcap=self.softcap,
            z_loss=self.z_loss if z_loss is None else z_loss,
            chunk=self.kernels.cross_entropy_chunk,
            deferred=self.weight_grad_store,
            unfused=not self.kernels.cross_entropy_loss_fusion,
            gather=tp if self.sequence_parallel else None,
            reduce=None if self.sequence_parallel else tp,
            teacher=teacher,
            ordered=self.ordered,
        )

    def counted(self, x: torch.Tensor, batch) -> tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
        """(hidden states [n, h], labels [n], weights in the loss [n] or None) from the output layer's input [s, b, h]."""
        mask = None if batch.loss_mask is None else batch.loss_mask.reshape(-1)
        return x.flatten(0, 1), batch.labels.reshape(-1), mask

    @torch.no_grad()
    def token_losses(self, x: Optional[torch.Tensor], batch) -> torch.Tensor:
        """Like `forward`, but the last stage returns the cross-entropy of each token, [s, b] fp32, unmasked."""
        with self.region():
            x, _ = self._hidden(x, batch)
            return self._token_losses(x, batch) if self.last else x

    def _token_losses(self, x: torch.Tensor, batch) -> torch.Tensor:
        losses = token_losses(
            x.flatten(0, 1),
            self.output_weight,
            batch.labels.reshape(-1),
            vocab_size=self.vocab_size,
            tp=self.tp,
            bias=self.output_bias,
            softcap=self.softcap,
            chunk=self.kernels.cross_entropy_chunk,
            unfused=not self.kernels.cross_entropy_loss_fusion,
            ordered=self.ordered,
        )
        return losses.view(batch.labels.shape)

    @torch.no_grad()
    def logits_of(self, batch) -> Callable[[slice], torch.Tensor]:
        """The logits of a whole model on this rank, for the tokens of `counted`: a function of their numbers.

        It returns [rows, v/tp] in the format of the weights, after the soft cap. Set evaluation mode before.
        """
        with self.region():
            x, _ = self._hidden(None, batch)
            rows, _, _ = self.counted(x, batch)

        @torch.no_grad()
        def logits(numbers: slice) -> torch.Tensor:
            with self.region():
                z = linear(rows[numbers], self.output_weight, self.output_bias)
                return z if self.softcap is None else (z.float() / self.softcap).tanh_() * self.softcap

        return logits

    def _collected(self, x: torch.Tensor, batch) -> Sums:
        """The sums of an evaluation with `collect`."""
        losses = self._token_losses(self.gather_input(x, self.tp) if self.overlap else x, batch)
        self.collect(batch, losses)
        counted = losses if batch.loss_mask is None else losses * batch.loss_mask
        zero = {Z_LOSS: losses.new_zeros(())} if self.z_loss else {}
        return {LOSS: counted.sum(), TOKENS: batch.num_tokens, **zero}

    def _hidden(self, x, batch, gather: bool = True) -> tuple[torch.Tensor, Sums]:
        """The micro-batch up to the output layer: [s, b, h], whole along s on the last stage; and sums of the layers.

        gather: False if the output layer itself gathers its input and reduces the gradient.
        """
        x, sums = self.trunk(x, batch)
        if not self.last:
            return x, sums
        sums = added(added(sums, self.depth_sums(x, batch)), self.head_sums(x, batch))
        x = self.word_states(x)
        return (self.gather_input(x, self.tp) if gather else x), sums

    def head_sums(self, x: torch.Tensor, batch) -> Sums:
        """Sums over tokens of heads other than the output layer, from the last stage's states [s or s/tp, b, h]."""
        return {}

    def depth_sums(self, x: torch.Tensor, batch) -> Sums:
        """The losses of multi-token prediction, from the last stage's states [s or s/tp, b, h], and sums of its layers."""
        if not self.mtp or batch.ahead is None:
            return {}
        context, places, total = self.context(batch), self.positions(len(batch.tokens), batch.position_ids), {}
        m, most = self.facts.settings, self.facts.settings.position_table - 1
        if m.mtp_detach_heads:
            x = x.detach().requires_grad_()  # recomputed parts need an input with a gradient
        for depth, (tokens, labels, weights) in enumerate(zip(*batch.ahead)):
            embedded = self.embedding.embed(tokens, (places + depth + 1).clamp(max=most))
            embedded = embedded.detach() if m.mtp_detach_heads else embedded
            x, sums = self.mtp[min(depth, len(self.mtp) - 1)](x, embedded, context)
            rows = (x if self.overlap else self.gather_input(x, self.tp)).flatten(0, 1)
            head = self.output_weight.detach() if m.mtp_detach_heads else None
            loss, *_ = self.cross_entropy(rows, labels.flatten(), weights.flatten(), z_loss=0.0, weight=head)
            total = added(total, {mtp_loss(depth): loss, **sums})
        return total

    def word_states(self, x: torch.Tensor) -> torch.Tensor:
        """The input of the output layer, from the last stage's hidden states."""
        return x

    def trunk(self, x: Optional[torch.Tensor], batch) -> tuple[torch.Tensor, Sums]:
        """Run the micro-batch through embedding, layers and final norm; returns the result and the sums of the layers.

        The result is the message to the next stage, or on the last stage the hidden states before any head, [s, b, h],
        or [s/tp, b, h] with sequence parallelism.
        """
        if self.first:
            positions = self.positions(len(batch.tokens), batch.position_ids)
            x = self.embedding(batch.tokens, positions, batch.samples)
        compared = self.hidden_teacher(batch) if self.hidden_teacher is not None and self.training else {}
        x, sums = self.run_layers(x, self.context(batch), compared, batch.loss_mask if compared else None)
        if not self.last:
            return x.to(self.dtype), sums
        return (x if self.final_norm is None else self.final_norm(x)), sums

    def positions(self, s: int, position_ids) -> torch.Tensor:
        """Position ids: as given, [s, b], or numbers from 0, [s, 1]: of its rows with context parallelism."""
        if position_ids is not None:
            return position_ids
        counted = torch.arange(s * self.cp.size, device=next(self.parameters()).device)
        return own_rows(counted, self.cp).unsqueeze(1)

    def sharing(self, layer: int) -> AttentionSharing:
        """How context parallel ranks share the attention of a layer."""
        comm_type = self.cp_comm_type[min(layer, len(self.cp_comm_type) - 1)]
        return attention_sharing(self.cp, comm_type, *self.cp_levels)

    def run_layers(
        self, x: torch.Tensor, context, compared: Optional[HiddenLosses] = None, mask: Optional[torch.Tensor] = None
    ) -> tuple[torch.Tensor, Sums]:
        """Run [s, b, h] through all layers, in groups that are recomputed together; returns it and the layers' sums.

        compared: losses on outputs of layers; mask: weights of tokens in them, [s, b], or None
        """
        sums, given = {}, (context, compared or {}, mask)
        for group in self.recompute_groups:
            if "full" in group.modules:
                x, sums = recomputed(
                    self._layers, group.layers, x, sums, *given, inside=self.region, of=self._blocks(group.layers)
                )
            else:
                x, sums = self._layers(group.layers, x, sums, *given)
        return x, sums

    def _blocks(self, layers: Sequence[int]) -> list[nn.Module]:
        return [self.blocks[str(n)] for n in layers]

    def _layers(self, layers, x: torch.Tensor, sums: Sums, context, compared, mask) -> tuple[torch.Tensor, Sums]:
        for n in layers:
            shape, x = x.shape, self.blocks[str(n)](x, context)
            if isinstance(x, tuple):
                x, own = x
                sums = added(sums, own)
            if getattr(x, "shape", None) != shape:
                raise _shape_error(n, x, shape)
            if n in compared:
                states = self.hidden_projections[str(n)](x) if str(n) in self.hidden_projections else x
                sums = added(sums, {KD_HIDDEN_LOSS: sum_over_tokens(compared[n](states), mask, self)})
        return x, sums

    @property
    def output_layer(self) -> VocabParallelEmbedding:
        return self.embedding.word if self.output is None else self.output

    @property
    def output_weight(self) -> torch.Tensor:
        """[v/tp, h]"""
        return self.output_layer.weight

    @property
    def output_bias(self) -> Optional[torch.Tensor]:
        """[v/tp], added to logits; None: no bias."""
        return None


def _shape_error(layer: int, returned: Any, shape: torch.Size) -> SettingsError:
    """The error for a layer that did not keep the shape of x: training would use fewer tokens."""
    got = list(returned.shape) if isinstance(returned, torch.Tensor) else type(returned).__name__
    return SettingsError(
        f"blocks.{layer} returned {got} for {list(shape)}",
        "a layer must keep the shape of x: each token has its place in it, and so has its label",
        "return x with the shape of the input, or (x, {name: sum}): docs/extending.md#a-model",
    )


class Projection(nn.Module):
    """[s, b, h] -> [s, b, the teacher's h]. weights: of `Facts.projections`; each tensor parallel rank has all of it."""

    def __init__(self, weights: Table, *, dtype=None, device=None):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Module):
    """Tokens and positions -> [s, b, h] (or [s/tp, b, h]). A last stage with a tied output has only the word table."""

    def __init__(
        self, model: Model, mesh: Mesh, tables: dict[str, Table], seed: int, sequence_parallel: bool, **factory_kwargs
    ):
        super().__init__()
        self.word = VocabParallelEmbedding(
            tables["embedding.word"], mesh.tp, sequence_parallel=sequence_parallel, **factory_kwargs
        )
        self.position = None
        if "embedding" in tables:
            self.position = LearnedPositions(take_prefix(tables["embedding"], "position"), **factory_kwargs)
        self.tp, self.sequence_parallel = mesh.tp, sequence_parallel
        self.scale = None
        if model.scale_embedding:  # in the format of the weights, as Gemma was trained
            self.scale = torch.tensor(math.sqrt(model.hidden_size), dtype=factory_kwargs["dtype"]).item()
        self.dropout = Dropout(
            model.hidden_dropout, "embedding", -1, seed, axis=mesh.tp if sequence_parallel else None, cp=mesh.cp
        )

    def forward(self, tokens: torch.Tensor, position_ids: torch.Tensor, samples) -> torch.Tensor:
        """tokens [s, b], position_ids [s, b or 1]."""
        return self.dropout(self.embed(tokens, position_ids), samples)

    def embed(self, tokens: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """`forward` without dropout."""
        x = self.word(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.position is not None:
            if self.sequence_parallel:
                position_ids = position_ids.chunk(self.tp.size)[self.tp.rank]
            x = x + self.position(position_ids)
        return x
