# SPDX-License-Identifier: Apache-2.0
"""Structured pruning: a checkpoint of a smaller model, which has the most important heads, channels and layers of another.

    l1_norm, l2_norm   sum of |w|, or root of the sum of w^2, over all weights of a unit (`model.pruning`)
    taylor             with a gate m = 1 on what a unit adds to the model: the mean over samples of (dL/dm)^2, the change of
                       the loss when the unit goes (arXiv:1906.10771, section 3.1; gates of heads as in arXiv:1905.10650)
    load               of experts alone: the tokens of a text that choose each

The smaller model is the larger one with zeros in place of what goes, to the bit up to the order of sums. Only experts and
the hidden size differ: tokens choose among the experts that are left, and norms are over the channels that are left, so a
fine-tuning has to follow.

For weights, dL/dm of a unit is the sum of w dL/dw over its columns in the product that reads it, so no gates are built.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from megatron.checkpoint.index import Tensor
from megatron.checkpoint.reader import QUANTIZED, Reader
from megatron.checkpoint.reshard import Rewritten, rewrite
from megatron.data.loader import MicroBatch
from megatron.errors import SettingsError
from megatron.inference.load import Loaded
from megatron.model.facts import Facts
from megatron.model.kinds.experts.router import Router
from megatron.model.kinds.experts.routing import count_experts
from megatron.model.language_model import LOSS
from megatron.model.layer_rules import refuse
from megatron.model.pruning import EXPERTS, FFN, HEADS, HIDDEN, KINDS, Cut, ModelSizes, cuts, owner, unit_words
from megatron.model.recipe import config_of, recipe_of
from megatron.model.weights import add_prefix
from megatron.mpu.placement import Table
from megatron.settings.schema import Config, Model

NORMS = dict(l1_norm=1, l2_norm=2)
UNITS = (HEADS, FFN, EXPERTS, HIDDEN)
OUTPUTS = ".experts.down."  # the part of an expert that a gate on what it adds multiplies


class SmallerModel(NamedTuple):
    """What a smaller model consists of.

    model:  its settings
    cuts:   kind of unit -> name of a weight -> where its units lie, for the kinds of which some go
    kept:   (kind, `owner`) -> the units that stay, in their order
    layers: new number of a layer -> its old one
    """

    model: Model
    cuts: Mapping[str, Mapping[str, Cut]]
    kept: Mapping[tuple[str, str], torch.Tensor]
    layers: Mapping[int, int]


class Importance(NamedTuple):
    """units: (kind, owner) -> a number for each unit, fp64; layers: a number for each layer."""

    units: Mapping[tuple[str, str], torch.Tensor]
    layers: torch.Tensor


class Network:
    """The weights of a model, and where its units lie in them. Raises SettingsError for a model that cannot be pruned."""

    def __init__(self, config: Config, vocab_size: int):
        self.config, self.vocab_size = config, vocab_size
        self.recipe = recipe_of(config)
        self.facts: Facts = self.recipe.facts(config, vocab_size)
        self.model = config.model
        self.table = self.facts.weights
        self.layer_of = {name: unit.layer for unit in self.facts.whole for name in add_prefix(unit.name, unit.weights)}
        self.cuts = {
            kind: cuts(self.tables, self.model, kind) for kind in UNITS if kind != EXPERTS or self.model.mixture
        }
        self.layer_of_owner = {
            owner(name, kind): self.layer_of[name] for kind in self.cuts if kind != HIDDEN for name in self.cuts[kind]
        }

    def tables(self, model: Model) -> Table:
        """The weights of a model of this type with other settings."""
        return self.with_model(model).weights

    def with_model(self, model: Model) -> Facts:
        """The facts of a model of this type with other settings."""
        return self.recipe.facts(replace(self.config, model=model), self.vocab_size)

    def readers(self, kind: str) -> dict[str, tuple[str, Cut]]:
        """Owner -> (the weight whose columns multiply the outputs of its units, where they lie in it)."""
        found = {}
        for name, cut in self.cuts[kind].items():
            if self.table[name].matrices is not None and cut.dim == len(self.table[name].shape) - 1:
                found[owner(name, kind)] = name, cut
        return found

    def place_of(self, own: str) -> str:
        """The name of the layer that an owner belongs to: `blocks.3`."""
        return next(unit.name for unit in self.facts.whole if unit.layer == self.layer_of_owner[own])

    def check(self, sizes: ModelSizes, tp: Optional[int] = None) -> None:
        """Raise SettingsError if this model cannot have these sizes.

        tp: the ranks that divide them (default: those of its training)
        """
        refuse(self.model, "pruning")
        before = ModelSizes.of(self.model)
        kinds = changed_units(before, sizes)
        if self.model.depths:
            raise SettingsError(
                f"the model has depths of multi-token prediction, --mtp-num-layers {self.model.depths}",
                "they would keep their sizes",
                "prune a model that was trained without them",
            )
        if self.model.linear is not None:
            raise SettingsError(
                f"the model has special linear layers, --linear {self.model.linear}",
                "their own weights and scales belong to the matrices of today",
                "prune first; LoRA adapters can be merged (tools.checkpoint merge-lora)",
            )
        if self.facts.encoder_layers is not None and (sizes.layers != before.layers or kinds != [FFN]):
            raise SettingsError(
                "of an encoder-decoder only MLP channels can be pruned",
                "its layers share one bias of positions for each head, and are of two kinds",
                "give --target-ffn-hidden-size, or --prune-ratio with --prune-skip heads",
            )
        if HIDDEN in kinds and self.model.scale_embedding:
            raise SettingsError(
                "--target-hidden-size does not work with --scale-embedding",
                "embeddings are multiplied by the root of the hidden size, so all of them would change",
            )
        words = unit_words(self.model)
        for kind in kinds:
            if not self.cuts[kind]:
                raise SettingsError(
                    f"no weight of --model-type {self.model.model_type} depends on the number of {words[kind]}",
                    do="give --prune-skip ffn: all MLPs are experts of another width" if self.model.mixture else "",
                )
        self._check_ranks(sizes, tp)

    def _check_ranks(self, sizes: ModelSizes, tp: Optional[int]) -> None:
        facts = self.with_model(sizes.settings(self.model))
        ranks = tp or self.config.parallel.tensor_model_parallel_size
        for name, size in facts.divisible_by_tp().items() if ranks > 1 else ():
            if size % ranks:
                where = "" if tp else ", the size of its training,"
                raise SettingsError(
                    f"the smaller model would have {size} {name}; --tensor-model-parallel-size {ranks}{where} does not "
                    "divide it",
                    do=f"choose multiples of {ranks} with --target-... sizes, or give --tensor-model-parallel-size 1",
                )


# What is important ----------------------------------------------------------------------------------------------------


def changed_units(before: ModelSizes, after: ModelSizes) -> list[str]:
    """The kinds of units within layers whose numbers differ."""
    return [kind for kind in UNITS if getattr(after, kind) != getattr(before, kind)]


def norms(network: Network, read: Callable[[str], torch.Tensor], criterion: str) -> Importance:
    """Importance by the weights alone. read: name -> whole weight."""
    power = NORMS[criterion]
    sums: dict[tuple[str, str], torch.Tensor] = {}
    for name in network.table:
        trained = network.table[name].buffer is None
        kinds = [kind for kind in network.cuts if trained and name in network.cuts[kind]]
        values = read(name).double().abs().pow(power) if kinds else None
        for kind in kinds:
            own = _by_unit(values, network.cuts[kind][name])
            key = kind, owner(name, kind)
            sums[key] = sums[key] + own if key in sums else own
    layers = _of_layers(network, {key: values.sum() for key, values in sums.items()})
    return Importance({key: values.pow(1 / power) for key, values in sums.items()}, layers.pow(1 / power))


def taylor(network: Network, loaded: Loaded, samples: np.ndarray) -> Importance:
    """Importance by the gradient of the loss. samples: token ids, [n, length + 1]."""
    model, device = loaded.model, next(loaded.model.parameters()).device
    weights = dict(model.named_parameters())
    squares: dict[tuple[str, str], torch.Tensor] = {}
    layers = torch.zeros(network.facts.num_layers, dtype=torch.float64)
    for sample in torch.from_numpy(samples):
        column = sample.unsqueeze(1).to(device)  # [s + 1, 1]
        _, sums = model(None, MicroBatch(column[:-1], column[1:], torch.arange(1)))
        gradients = torch.autograd.grad(sums[LOSS] / (len(sample) - 1), list(weights.values()), allow_unused=True)
        products = {
            name: (weight.detach().double() * gradient.double()).cpu()
            for (name, weight), gradient in zip(weights.items(), gradients)
            if gradient is not None
        }
        gates = _gates(network, products)
        for key, gate in gates.items():
            squares[key] = squares.get(key, torch.zeros_like(gate)) + gate.square() / len(samples)
        layers += _of_layers(network, {key: gate.sum() for key, gate in gates.items()}).square() / len(samples)
    hidden = [values for (kind, _), values in squares.items() if kind == HIDDEN]
    units = {key: values for key, values in squares.items() if key[0] != HIDDEN}
    return Importance(units | {(HIDDEN, ""): torch.stack(hidden).sum(0)}, layers)


def loads(network: Network, loaded: Loaded, samples: np.ndarray) -> Importance:
    """Importance of experts by the tokens that choose them. samples: token ids, [n, length + 1]."""
    model, device = loaded.model, next(loaded.model.parameters()).device
    counts: dict[tuple[str, str], torch.Tensor] = {}

    def count(router, inputs, routing) -> None:
        own = count_experts(routing.memo.experts, network.model.num_experts).cpu().double()
        key = EXPERTS, f"blocks.{router.layer}"
        counts[key] = counts.get(key, 0) + own

    hooks = [module.register_forward_hook(count) for module in model.modules() if isinstance(module, Router)]
    try:
        with torch.no_grad():
            for sample in torch.from_numpy(samples):
                model.logits(sample[:-1].unsqueeze(1).to(device), last_only=True)
    finally:
        for hook in hooks:
            hook.remove()
    return Importance(counts, torch.zeros(network.facts.num_layers, dtype=torch.float64))


def _gates(network: Network, products: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
    """(kind, owner) -> dL/dm of each unit, from w dL/dw of each weight. Channels of the hidden states have a gate for each
    norm that they go through, with the norm's name as owner.
    """
    found = {
        (kind, own): _by_unit(products[name], cut)
        for kind in KINDS
        for own, (name, cut) in network.readers(kind).items()
    }
    for name, cut in network.cuts.get(EXPERTS, {}).items():
        if OUTPUTS in name and name in products:
            key, gates = (EXPERTS, owner(name, EXPERTS)), _by_unit(products[name], cut)
            found[key] = found[key] + gates if key in found else gates
    for name, cut in network.cuts[HIDDEN].items():
        of = name.rpartition(".")[0]
        if len(network.table[f"{of}.weight"].shape) == 1 and name in products:
            gates = _by_unit(products[name], cut)
            found[HIDDEN, of] = found[HIDDEN, of] + gates if (HIDDEN, of) in found else gates
    return found


def _by_unit(values: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The sum over everything but the units, [units]."""
    return values.unflatten(cut.dim, (-1, cut.block)).movedim(cut.dim, 0).flatten(1).sum(1)


def _of_layers(network: Network, sums: Mapping[tuple[str, str], torch.Tensor]) -> torch.Tensor:
    """The sum over the heads and MLP channels, or experts, of each layer."""
    layers = torch.zeros(network.facts.num_layers, dtype=torch.float64)
    for (kind, own), value in sums.items():
        twice = kind == FFN and own.endswith(".experts")  # their channels are parts of experts
        if kind != HIDDEN and not twice and (layer := network.layer_of_owner[own]) is not None:
            layers[layer] += value
    return layers


# The smaller model ----------------------------------------------------------------------------------------------------


def plan(
    network: Network, sizes: ModelSizes, importance: Importance, layers_to_go: Optional[Sequence[int]] = None
) -> SmallerModel:
    """The smaller model of these sizes. layers_to_go: instead of the least important ones."""
    before = ModelSizes.of(network.model)
    kinds = changed_units(before, sizes)
    kept = {
        (kind, own): most_important(values, getattr(sizes, kind))
        for (kind, own), values in importance.units.items()
        if kind in kinds
    }
    if layers_to_go is None:
        layers = most_important(importance.layers, sizes.layers).tolist()
    else:
        layers = [layer for layer in range(before.layers) if layer not in set(layers_to_go)]
    model, order = sizes.settings(network.model), dict(enumerate(layers))
    if letters := network.model.letters:
        model = replace(model, hybrid_layer_pattern="".join(letters[old] for old in layers))
    facts = network.with_model(model)
    for new, old in order.items():
        was, now = network.facts.layer_kind(old), facts.layer_kind(new)
        if was != now:
            raise SettingsError(
                f"layer {old} would become layer {new}, and that is another kind of layer: {now}, not {was}",
                "which layers have a window, or experts, follows from their numbers",
                "choose layers with --prune-layers so that the pattern stays",
            )
    return SmallerModel(model, {kind: network.cuts[kind] for kind in kinds}, kept, order)


def most_important(values: torch.Tensor, count: int) -> torch.Tensor:
    """The numbers of the `count` largest values, in their order; of equal ones the first."""
    return values.sort(descending=True, stable=True).indices[:count].sort().values


def old_names(network: Network, plan: SmallerModel) -> Iterator[tuple[str, str]]:
    """(name of a weight in the smaller model, its name in the larger one): layers have other numbers."""
    layers = {unit.layer: unit.name for unit in network.facts.whole if unit.layer is not None}
    for unit in network.with_model(plan.model).whole:
        old = unit.name if unit.layer is None else layers[plan.layers[unit.layer]]
        yield from zip(add_prefix(unit.name, unit.weights), add_prefix(old, unit.weights))


def pruned(reader: Reader, network: Network, plan: SmallerModel) -> Rewritten:
    """The smaller model."""

    def chosen(name: str) -> Iterator[tuple[Cut, torch.Tensor]]:
        """(where the units of a weight lie, those that stay), by its old name."""
        for kind, of_kind in plan.cuts.items():
            if name in of_kind:
                yield of_kind[name], plan.kept[kind, owner(name, kind)]

    def entry(name: str) -> Tensor:
        dtype, shape = reader.tensors[name].dtype, list(reader.tensors[name].shape)
        for cut, units in chosen(name):
            shape[cut.dim] = len(units) * cut.block
        return Tensor(dtype, tuple(shape), [])

    def compute(name: str) -> torch.Tensor:
        weight = reader.read(names[name])
        for cut, units in chosen(names[name]):
            weight = chosen_units(weight, cut, units)
        return weight

    names = dict(old_names(network, plan))
    tensors = {new: entry(old) for new, old in names.items()}
    return Rewritten(tensors, compute, pruned_state(reader.state, plan.model))


def chosen_units(weight: torch.Tensor, cut: Cut, units: torch.Tensor) -> torch.Tensor:
    """The weight with these units alone."""
    return weight.unflatten(cut.dim, (-1, cut.block)).index_select(cut.dim, units).flatten(cut.dim, cut.dim + 1)


class Pruned(NamedTuple):
    """A checkpoint that was written, and what it consists of."""

    path: Path
    before: Network
    plan: SmallerModel


def prune(path: Path, out: Path, choose: Callable[[Network, Reader], SmallerModel], writers: int = 1) -> Pruned:
    """Write the smaller model of the checkpoint at `path` to the folder `out`.

    Weights keep their format, optimizer state is left out. choose: returns the plan.
    """
    made: list[Any] = []

    def smaller(reader: Reader) -> Rewritten:
        if reader.state.get(QUANTIZED):
            raise SettingsError(
                f"{path} is quantized, and pruning needs the weights themselves",
                do="prune the checkpoint that it was made from, then quantize",
            )
        network = Network(config_of(reader.state["config"]), reader.state["vocab_size"])
        made[:] = network, choose(network, reader)
        return pruned(reader, *made)

    return Pruned(rewrite(path, out, smaller, writers), *made)


def pruned_state(state: dict[str, Any], model: Model) -> dict[str, Any]:
    """The content of state.json of the smaller model."""
    return {**state, "config": {**state["config"], "model": asdict(model)}}
