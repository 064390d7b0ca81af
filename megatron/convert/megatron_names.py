# SPDX-License-Identifier: Apache-2.0
"""Names of a model's tensors in Megatron-LM's checkpoints, in both directions. Those inside a layer are the kinds' own
(`model.megatron_form`).

    embedding.word_embeddings.weight, decoder.final_layernorm.weight (a HybridModel's: final_norm), output_layer.weight
    decoder.layers.7.mlp.linear_fc1.weight        the eighth layer of a file's stage
    mtp.layers.0.eh_proj.weight                   the first depth of multi-token prediction; of a GPT up to 0.16
    mtp.layers.0.transformer_layer.mlp...         its layer, of a newer one
    mtp.layers.0.mtp_model_layer.mlp...           this, and of a HybridModel
    mtp.layers.0.mtp_model_layer.layers.1.mlp...
"""

import re
from functools import cached_property
from itertools import product
from typing import NamedTuple, Optional

from megatron.errors import CheckpointError
from megatron.model.branches import LayerKind
from megatron.model.facts import AHEAD, Facts
from megatron.model.kinds.table import resolved
from megatron.model.megatron_form import AS_OURS, NORM, Implementation, Names, RowOrder
from megatron.mpu.placement import Constant, Placement

WORDS, PROJECTION = "embedding.word.weight", "eh_proj"
_OUTSIDE = {
    "embedding.word": Names("embedding.word_embeddings."),
    "embedding.position": Names("embedding.position_embeddings."),
    "final_norm": Names(
        "decoder.final_layernorm.",
        legacy="encoder.final_layernorm.",
        also=("transformer.final_layernorm.", "decoder.final_norm.", "encoder.final_norm.", "transformer.final_norm."),
    ),
    "output": Names("output_layer."),
}
_DEPTH = {  # of a depth of multi-token prediction, without its layers
    "enorm": Names("enorm."),
    "hnorm": Names("hnorm."),
    PROJECTION: Names("eh_proj."),
    "final_norm": Names("final_layernorm."),
}


def _ours_of(table: dict[str, Names]) -> dict[str, str]:
    """Each of their names in a table -> our module or tensor."""
    return {name: module for module, (*names, also) in table.items() for name in (*names, *also) if name}


_OURS_OUTSIDE, _OURS_DEPTH = _ours_of(_OUTSIDE), _ours_of(_DEPTH)
_KINDS = ("softmax_offset", "expert_bias", "weight", "bias")
_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")
_AHEAD = re.compile(
    r"mtp\.layers\.(\d+)\.(?:(?:(?:mtp_model_layer\.layers\.(\d+)|mtp_model_layer|transformer_layer))\.(.+)|(.+))"
)
_OUR_LAYER = re.compile(rf"blocks\.(\d+)\.(.+)|{AHEAD}\.(\d+)\.(?:layers\.(\d+)\.)?(.+)")
_NO_WEIGHTS = re.compile(r".*(_extra_state|inv_freq|local_tokens_per_expert)|word_embeddings(_for_head)?\.weight")


class Place(NamedTuple):
    """Where one of their tensors is. layer: of its stage, or of its depth; depth: of multi-token prediction; rest: its
    name from there on.
    """

    layer: Optional[int]
    depth: Optional[int]
    rest: str


class OurTensor(NamedTuple):
    """A tensor of ours. name: its full name. rows: of theirs; part: their name's end, if theirs is a part of it
    number: of the expert on its rank, if theirs is one of those
    """

    name: str
    rows: RowOrder = AS_OURS
    part: str = ""
    number: Optional[int] = None


def place_of(theirs: str) -> Optional[Place]:
    """Where a tensor is; None for tensors that are not weights.

    >>> place_of("decoder.layers.2.mlp.linear_fc1.weight"), place_of("mtp.layers.0.mtp_model_layer.layers.1.norm.weight")
    (Place(layer=2, depth=None, rest='mlp.linear_fc1.weight'), Place(layer=1, depth=0, rest='norm.weight'))
    """
    name = theirs
    for prefix in ("module.", "language_model."):
        name = name.removeprefix(prefix)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    if match := _LAYER.fullmatch(name):
        return Place(int(match[1]), None, match[2])
    if match := _AHEAD.fullmatch(name):
        layer = None if match[3] is None else int(match[2] or 0)
        return Place(layer, int(match[1]), match[3] or match[4])
    return Place(None, None, name)


def outside(theirs: str) -> Optional[str]:
    """The name of a tensor of ours that is in no layer; None: it is in a layer, or no weight."""
    place = place_of(theirs)
    found = place and place.layer is None and place.depth is None and _found(_OURS_OUTSIDE, place.rest)
    return found or None


def is_norm(placed: Placement) -> bool:
    """Whether a tensor is the weight of a norm, which --apply-layernorm-1p stores less 1: vectors that start at 1."""
    return placed.init == Constant(1.0) and len(placed.shape) == 1


class _LayerNames(NamedTuple):
    """theirs: our module or tensor of a layer -> their names, in the order of their modules. rows: our tensor -> its rows
    kinds: (its slot, `MegatronForm`) of each. divided: `KindNames.divided`
    orders: (whether norms are modules of their own, whether of Megatron-LM up to 0.16) -> the names of `theirs` in order
    ours: each of their names -> ours, as `_ours_of`
    """

    theirs: dict[str, Names]
    rows: dict[str, RowOrder]
    kinds: list
    divided: set[str]
    orders: dict[tuple[bool, bool], list[str]]
    ours: dict[str, str]

    @property
    def has_older(self) -> bool:
        """Whether Megatron-LM up to 0.16 had another order."""
        return any(self.orders[apart, True] != self.orders[apart, False] for apart in (True, False))


class Dictionary:
    """The names of a model's tensors. version: of the checkpoint's format"""

    def __init__(self, facts: Facts, version: float = 3.0):
        self.facts, self.model, self.version = facts, facts.settings, version
        self._layers: dict[LayerKind, _LayerNames] = {}

    def ours(self, theirs: str, first: int = 0) -> Optional[OurTensor]:
        """The tensor of ours that one of theirs is, or is a part of; None for tensors that are not weights.

        first: number of the first layer of its stage. Raises CheckpointError for an unknown one.
        """
        place = place_of(theirs)
        if place is None:
            return None
        if place.layer is None:
            prefix, table = "", _OURS_OUTSIDE
            if place.depth is not None:
                prefix, table = f"{AHEAD}.{place.depth}.", _OURS_DEPTH
            if found := _found(table, place.rest):
                return OurTensor(prefix + found)
            raise CheckpointError(f"tensor {theirs} is not known")
        n, ahead = first + place.layer, self.model.layers_ahead
        prefix = f"blocks.{n}."
        if place.depth is not None:
            n, prefix = self.model.num_layers + place.layer, f"{AHEAD}.{place.depth}.layers.{place.layer}."
        if n not in (range(self.model.num_layers) if place.depth is None else ahead):
            raise CheckpointError(f"{theirs} would be {prefix[:-1]}, which this model does not have")
        target = self._in_layer(self._layer(n), place.rest)
        if target is None:
            raise CheckpointError(f"tensor {theirs} is not known: {prefix[:-1]} is {self.facts.layer_kind(n)}")
        return target._replace(name=prefix + target.name)

    def theirs(self, ours: str, implementation: Implementation = "transformer_engine", first: int = 0) -> str:
        """Their name of a tensor. first: number of the first layer of its stage"""
        match = _OUR_LAYER.fullmatch(ours)
        if not match:
            return self._name_of(self._outside, ours, implementation)
        if match[1] is not None:
            stack, n = "encoder" if implementation == "legacy" else "decoder", int(match[1])
            inside = self._name_of(self._layer(n).theirs, match[2], implementation)
            return f"{stack}.layers.{n - first}.{inside}"
        depth, layer, rest = match.group(3, 4, 5)
        if layer is None:
            return f"mtp.layers.{depth}.{self._name_of(_DEPTH, rest, implementation)}"
        inside = self._name_of(self._layer(self.model.num_layers + int(layer)).theirs, rest, implementation)
        own = f"mtp_model_layer.layers.{layer}" if self.model.letters else "mtp_model_layer"
        return f"mtp.layers.{depth}.{own}.{inside}"

    def rows(self, ours: str) -> RowOrder:
        """The rows of a tensor of theirs."""
        n, rest = self._place(ours)
        return AS_OURS if n is None else self._layer(n).rows.get(rest, AS_OURS)

    def divided(self, ours: str, implementation: Implementation) -> bool:
        """Whether their tensor parallel ranks have rows of a tensor that ours have whole."""
        n, rest = self._place(ours)
        if n is None:
            return rest.endswith(f".{PROJECTION}.weight")
        return implementation != "transformer_engine" and rest in self._layer(n).divided

    def their_expert(self, ours: str, number: int, grouped: bool, first: int = 0) -> str:
        """Their name of an expert's tensor. number: on its rank; grouped: its layer's experts are one module"""
        n, rest = self._place(ours)
        whole = self.theirs(ours, "local", first)
        for slot, form in self._layer(n).kinds:
            if form.their_expert and rest.startswith(f"{slot}."):
                inside = self._name_of(self._layer(n).theirs, rest, "local")
                return whole.removesuffix(inside) + form.their_expert(rest.removeprefix(f"{slot}."), number, grouped)
        raise AssertionError(f"{ours} is no expert's")

    def in_order(self, prefix: str, n: int, apart: bool, older: bool = False) -> list[str]:
        """Our modules and tensors of layer n in the order of their modules. apart: norms are modules of their own"""
        return [prefix + name for name in self._layer(n).orders[apart, older]]

    @property
    def has_older(self) -> bool:
        """Whether modules of some layer had another order in Megatron-LM up to 0.16."""
        return any(self._layer(n).has_older for n in range(self.model.layers_ahead.stop))

    @cached_property
    def _outside(self) -> dict[str, Names]:
        if not self.model.letters:
            return _OUTSIDE
        return _OUTSIDE | {"final_norm": Names("decoder.final_norm.")}

    def _place(self, ours: str) -> tuple[Optional[int], str]:
        """(layer as `Facts` count them, the rest of the name) of a tensor; (None, its name) outside of layers."""
        match = _OUR_LAYER.fullmatch(ours)
        if not match or (match[1] is None and match[4] is None):
            return None, ours
        return (int(match[1]), match[2]) if match[1] else (self.model.num_layers + int(match[4]), match[5])

    def _layer(self, n: int) -> _LayerNames:
        kind = self.facts.layer_kind(n)
        if kind not in self._layers:
            self._layers[kind] = self._layer_names(kind)
        return self._layers[kind]

    def _layer_names(self, kind: LayerKind) -> _LayerNames:
        model, found = kind.settings(self.model), _LayerNames({}, {}, [], set(), {}, {})
        for branch in kind.branches:
            for mixer in branch.mixers:
                if not mixer.in_megatron:
                    raise CheckpointError(f"Megatron-LM's checkpoints have no layers of {mixer.name}")
                form = resolved(mixer.in_megatron)
                names = form.names(model, self.version)
                named = lambda name, mixer=mixer, branch=branch: (
                    branch.before if name == NORM else f"{mixer.slot}.{name}" if name else mixer.slot
                )
                found.theirs.update({named(name): own for name, own in names.modules.items()})
                for order in product((True, False), repeat=2):
                    found.orders.setdefault(order, []).extend(map(named, names.in_order(*order)))
                found.rows.update({f"{mixer.slot}.{name}": rows for name, rows in names.rows.items()})
                found.kinds.append((mixer.slot, form))
                found.divided.update(f"{mixer.slot}.{name}" for name in names.divided)
        found.ours.update(_ours_of(found.theirs))
        return found

    def _in_layer(self, layer: _LayerNames, rest: str) -> Optional[OurTensor]:
        """The tensor of a layer, without the layer in its name."""
        for slot, form in layer.kinds:
            if expert := form.one_of_experts(rest):
                name = f"{slot}.{expert[0]}"
                return OurTensor(name, layer.rows.get(name, AS_OURS), number=expert[1])
        if found := _found(layer.ours, rest):
            return OurTensor(found, layer.rows.get(found, AS_OURS))
        for part in {part for rows in layer.rows.values() for part in rows.parts}:
            found = rest.endswith(part) and _found(layer.ours, rest.removesuffix(part))
            if found and part in layer.rows.get(found, AS_OURS).parts:
                return OurTensor(found, layer.rows[found], part)
        return None

    def _name_of(self, table: dict[str, Names], ours: str, implementation: Implementation) -> str:
        if ours in table:
            return table[ours].of(implementation)
        module, _, kind = ours.rpartition(".")
        return table[module].of(implementation) + kind


def _found(table: dict[str, str], theirs: str) -> Optional[str]:
    """The tensor of ours in a table of `_ours_of`, which has modules, too; None: it has none."""
    if theirs in table:
        return table[theirs]
    kind = next((kind for kind in _KINDS if theirs.endswith(kind)), "")
    module = table.get(theirs.removesuffix(kind))
    return f"{module}.{kind}" if kind and module is not None else None
