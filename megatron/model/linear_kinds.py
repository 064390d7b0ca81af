# SPDX-License-Identifier: Apache-2.0
"""Select linear layers with another kind of product: `--linear PATTERN=KIND`. Needs no torch.

A shell pattern is compared with the layer's full name, `blocks.3.mlp.up`, and with every suffix after a dot: `mlp.*`
matches `mlp.up` and `mlp.down` of all blocks, `blocks.[01].*` all layers of two blocks. If several match,
the last one applies. A kind is a row of `KINDS` or `Recipe.linears`, or `plain`. `+KIND` is added to the kind of the
patterns before, and `-KIND` is taken away: a layer can be of the kinds in `TOGETHER` at once, and of own kinds that are
`together`.

    >>> chosen("mlp.*=mask, blocks.0.*=plain", 1, ["attention.qkv", "mlp.up", "mlp.down"])
    (('mlp.up', 'mask'), ('mlp.down', 'mask'))
    >>> chosen("mlp.*=mask, blocks.0.*=plain", 0, ["attention.qkv", "mlp.up", "mlp.down"])
    ()
    >>> chosen("*=fake_quantize, mlp.*=+sparse", 0, ["attention.qkv", "mlp.up"])
    (('attention.qkv', 'fake_quantize'), ('mlp.up', 'fake_quantize+sparse'))
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from megatron.errors import SettingsError, did_you_mean
from megatron.model import lora, quantization, sparsity
from megatron.model.weights import Table, add_prefix
from megatron.mpu.placement import Placement
from megatron.settings.declare import Needs, dashed
from megatron.settings.schema import Model

PLAIN = "plain"
WEIGHT = ".weight"
# Of every model: name -> module with `own_weights`
KINDS: Mapping[str, Any] = {lora.KIND: lora, quantization.KIND: quantization, sparsity.KIND: sparsity}

TOGETHER = frozenset({quantization.KIND, sparsity.KIND})

Chosen = tuple[tuple[str, str], ...]  # (linear layer of a block, kind)


class LinearChoice(NamedTuple):
    """One PATTERN=KIND of --linear."""

    pattern: str
    kind: str

    @property
    def names(self) -> list[str]:
        """The kinds that it names."""
        return self.kind.lstrip("+-").split("+")

    def without(self, name: str) -> str:
        """The kind without one of its names; "": nothing is left to choose."""
        sign = self.kind[0] if self.kind[0] in "+-" else ""
        rest = [one for one in self.names if one != name]
        return sign + "+".join(rest) if rest else "" if sign else PLAIN

    def after(self, present: str) -> str:
        """The kind of a layer that it matches; present: by the choices before."""
        names, before = set(self.names), set(present.split("+")) - {PLAIN}
        if self.kind[0] in "+-":
            names = before | names if self.kind[0] == "+" else before - names
        return "+".join(sorted(names)) or PLAIN

    def matches(self, name: str) -> bool:
        """Whether the pattern matches a layer's full name, such as `blocks.3.mlp.up`."""
        parts = name.split(".")
        return any(fnmatchcase(".".join(parts[start:]), self.pattern) for start in range(len(parts)))


@lru_cache(maxsize=64)
def choices(text: str) -> tuple[LinearChoice, ...]:
    """Parse --linear. Raises SettingsError for a part without pattern or kind."""
    result = []
    for part in text.replace(",", " ").split():
        pattern, _, kind = part.rpartition("=")
        if not pattern or not kind:
            raise SettingsError(f"--linear {text}: '{part}' is not PATTERN=KIND, such as mlp.*=mask")
        result.append(LinearChoice(pattern, kind))
    return tuple(result)


def kinds_of(settings: Model) -> dict[str, Any]:
    """The kinds of linear layers of a model: name -> what has its `own_weights`. Those of its recipe come first."""
    return {**KINDS, **settings.own_linears}


def chosen(text: str | None, layer: int, names: Iterable[str]) -> Chosen:
    """(name, kind) of a block's linear layers `names` that --linear selects; text: its value."""
    return _chosen(text, layer, tuple(names)) if text else ()


@lru_cache(maxsize=4096)
def _chosen(text: str, layer: int, names: tuple[str, ...]) -> Chosen:
    pairs = []
    for name in names:
        kind = PLAIN
        for choice in choices(text):
            kind = choice.after(kind) if choice.matches(f"blocks.{layer}.{name}") else kind
        if kind != PLAIN:
            pairs.append((name, kind))
    return tuple(pairs)


# Names of linear layers in transformers and PEFT, without the layers around them -> ours.
THEIR_NAMES = (
    dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "c_attn", "query_key_value", "W_pack"), "attention.qkv")
    | dict.fromkeys(("o_proj", "out_proj"), "attention.output")
    | dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "c_fc", "fc1", "dense_h_to_4h"), "mlp.up")
    | dict.fromkeys(("down_proj", "fc2", "dense_4h_to_h"), "mlp.down")
    | {"all-linear": "*"}
)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of these, names of parts of one layer here


def here_it_is(pattern: str) -> str:
    """The name here of a layer that a pattern calls by the name of another library, as the end of a sentence.

    >>> here_it_is("*.q_proj"), here_it_is("mlp.up")
    ('; here it is attention.qkv, which --lora-split-fused gives a pair for each of q_proj, k_proj, v_proj', '')
    """
    name = pattern.rpartition(".")[2]
    parts = next((parts for parts in FUSED if name in parts), ())
    split = f", which --lora-split-fused gives a pair for each of {', '.join(parts)}" if parts else ""
    return f"; here it is {THEIR_NAMES[name]}{split}" if name in THEIR_NAMES else ""


def no_layers(flag: str, patterns: Sequence[str], each: str) -> str:
    """The problem of patterns that match no layer. flag: with its value, if that is known; each: the layers that there are

    >>> no_layers("--lora-target q_proj,v_proj", ["q_proj", "v_proj"], "each block has mlp.up").partition("; here")[0]
    "--lora-target q_proj,v_proj: 'q_proj', 'v_proj' are no linear layers of this model"
    """
    what = f"{', '.join(map(repr, patterns))} {'is no linear layer' if len(patterns) == 1 else 'are no linear layers'}"
    here = "".join(dict.fromkeys(map(here_it_is, patterns)))
    return f"{flag}: {what} of this model{here}; {each}{_in_our_names(flag, patterns)}"


def _in_our_names(flag: str, patterns: Sequence[str]) -> str:
    """A flag with the names that layers have here, as the end of a sentence; "" if some have none."""
    name, _, value = flag.partition(" ")
    names = {pattern: THEIR_NAMES.get(pattern.rpartition(".")[2]) for pattern in patterns}
    if not value or not all(names.values()):
        return ""
    items = [item.partition("=") for item in value.replace(",", " ").split()]
    ours = dict.fromkeys(f"{names.get(item, item)}{equals}{kind}" for item, equals, kind in items)
    split = any(pattern.rpartition(".")[2] in part for pattern in patterns for part in FUSED)
    return f"; say {name} {','.join(ours)}{' --lora-split-fused' * (split and name == '--lora-target')}"


def linear_layers(table: Table) -> list[str]:
    """The linear layers in a block's table of weights."""
    return [name.removesuffix(WEIGHT) for name, placed in table.items() if name.endswith(WEIGHT) and placed.matrices]


def chosen_layers(facts: Any, how: quantization.QuantizeOptions) -> list[str]:
    """The names of the linear layers of a model (`model.facts.Facts`), on all ranks, without those to skip.

    Raises SettingsError for a pattern that is no layer.
    """
    names = {f"blocks.{layer}.{name}": name for layer, table in facts.tables.items() for name in linear_layers(table)}
    skip = [LinearChoice(pattern, "") for pattern in quantization.skipped_layers(how.quantize_skip, "--quantize-skip")]
    if unknown := [choice.pattern for choice in skip if not any(map(choice.matches, names))]:
        each = f"each block has {', '.join(dict.fromkeys(names.values()))}"
        raise SettingsError(no_layers(f"--quantize-skip {how.quantize_skip}", unknown, each))
    return [name for name in names if not any(one.matches(name) for one in skip)]


def quantized_bytes(how: quantization.QuantizeOptions, weight: Placement, tp: int, element: int) -> int:
    """Bytes of a quantized weight on each of `tp` ranks. element: bytes of its scales.

    >>> weight = Placement((64, 32), None, cut={"tp": 0})
    >>> int4 = quantization.QuantizeOptions("int4", quantize_group_size=16)
    >>> quantized_bytes(quantization.QuantizeOptions("int8"), weight, 2, 2), quantized_bytes(int4, weight, 1, 4)
    (1088, 1664)
    """
    *rows, inputs = weight.local_shape({"tp": tp})
    outputs = math.prod(rows)
    if how.quantize != "int4":
        return outputs * (inputs + element)
    return outputs * (inputs // 2 + inputs // how.quantize_group_size * (element + 1))


def chosen_of(settings: Model, layer: int, table: Table) -> Chosen:
    """`chosen` for a block with this table."""
    return chosen(settings.linear, layer, linear_layers(table))


def with_own_weights(settings: Model, table: Table, picked: Chosen) -> Table:
    """A block's table with the weights that kinds of linear layers add, each next to its layer's."""
    for name, kinds in picked:
        for kind in kinds.split("+"):
            own = kinds_of(settings)[kind].own_weights(settings, table[name + WEIGHT])
            table = {**table, **add_prefix(name, own)}
    return table


def problems(settings: Model, tables: Callable[[], Mapping[int, Table]], tp: int = 1) -> list[str]:
    """The problems of --linear and of its kinds, as messages. tables: returns the weights of each block, by its index; tp:
    the ranks that divide them.
    """
    if settings.linear is None:
        return lora.problems(settings, ())
    try:
        parts = choices(settings.linear)
    except SettingsError as error:
        return [error.what]
    kinds = list(dict.fromkeys([PLAIN, *kinds_of(settings)]))
    unknown = dict.fromkeys(name for choice in parts for name in choice.names if name not in kinds)
    if unknown or not parts:
        return [
            f"--linear {settings.linear}: '{name}' is no kind of linear layer{did_you_mean(name, kinds)}; "
            f"--model-type {settings.model_type} has {', '.join(kinds)} (Recipe.linears: docs/extending.md)"
            for name in unknown or [""]
        ]
    blocks = tables()
    names = {f"blocks.{layer}.{name}": name for layer, table in blocks.items() for name in linear_layers(table)}
    adapted = [choice.pattern for choice in parts if lora.KIND in choice.names]
    missing = [choice.pattern for choice in parts if not any(map(choice.matches, names))]
    found = lora.problems(settings, adapted) + _no_layers(settings, missing, names)
    kinds = {
        f"blocks.{layer}.{name}": (kind.split("+"), table[name + WEIGHT])
        for layer, table in blocks.items()
        for name, kind in chosen_of(settings, layer, table)
    }
    sparse = [
        (name, weight)
        for name, (own, weight) in kinds.items()
        if sparsity.KIND in own and sparsity.KIND not in settings.own_linears
    ]
    used = [own for own, _ in kinds.values()]
    experts = [name for name, (own, weight) in kinds.items() if lora.KIND in own and weight.stacked]
    found = found or _apart(settings, kinds) or _unused(settings, used) or lora.problems_of_experts(settings, experts)
    return found + sparsity.problems(settings, sparse, tp)


def _apart(settings: Model, kinds: Mapping[str, tuple[list[str], Placement]]) -> list[str]:
    """The problem of a layer with kinds that do not go together."""
    own_kinds = settings.own_linears
    allowed = TOGETHER - own_kinds.keys() | {name for name, kind in own_kinds.items() if kind.together}
    wrong = [(name, own) for name, (own, _) in kinds.items() if len(own) > 1 and not allowed.issuperset(own)]
    return [
        f"--linear {settings.linear}: {name} cannot be {' and '.join(own)} at once; {' and '.join(sorted(allowed))} can"
        for name, own in wrong[:1]
    ]


def _no_layers(settings: Model, missing: Iterable[str], names: Mapping[str, str]) -> list[str]:
    """The problems of patterns that match no layer, those of absent blocks together. names: of layers -> within a block"""
    each = f"each block has {', '.join(dict.fromkeys(names.values()))}"
    unknown: dict[str, list[str]] = {}  # flag -> patterns
    absent: dict[str, list[str]] = {}
    for pattern in missing:
        flag, block = _flag_of(settings, pattern), re.match(r"blocks\.(\d+)\.", pattern)
        if block and int(block[1]) >= settings.num_layers:
            absent.setdefault(flag, []).append(pattern)
        else:
            unknown.setdefault(flag, []).append(pattern)
    found = [no_layers(flag, patterns, each) for flag, patterns in unknown.items()]
    blocks = f"its blocks are 0 to {settings.num_layers - 1}"
    return found + [f"{flag}: the model has no {', '.join(patterns)}; {blocks}" for flag, patterns in absent.items()]


def _flag_of(settings: Model, pattern: str) -> str:
    """The flag that a pattern of --linear comes from, and its value."""
    names = ("quantization_layers", "quantization_skip", "sparsity_layers", "sparsity_skip", "lora_target", "linear")
    values = {name: getattr(settings, name) or "" for name in names}
    name = next(
        name for name, value in values.items() if pattern in value.replace(",", " ").split() or name == "linear"
    )
    return f"{dashed(name)} {values[name]}"


def _unused(settings: Model, layers: Iterable[list[str]]) -> list[str]:
    """The problem of a flag whose kind no layer has. layers: the kinds of each"""
    used = {kind for own in layers for kind in own}
    flags = {
        quantization.KIND: ("--quantization", settings.quantization),
        sparsity.KIND: (f"--sparsity {settings.sparsity}", settings.sparsity),
        lora.KIND: (f"--lora-rank {settings.lora_rank}", settings.lora_rank),
    }
    return [
        f"{flag} has no layer left: the last kind of --linear {settings.linear} applies, and LoRA's goes with no other; "
        "choose the layers of each kind with --quantization-layers, --sparsity-layers and --lora-target"
        for kind, (flag, given) in flags.items()
        if given and kind not in used
    ]


def idle_of(settings: Model) -> dict[str, Needs]:
    """Setting of a recipe's kind -> its condition for having an effect: --linear must name the kind."""
    users: dict[str, list[str]] = {}
    for kind, product in settings.own_linears.items():
        for one in fields(product.group) if product.group else ():
            users.setdefault(one.name, []).append(kind)
    named = {name for choice in choices(settings.linear or "") for name in choice.names}
    return {
        name: Needs(f"--linear PATTERN={' or PATTERN='.join(kinds)}", lambda s, kinds=kinds: named & set(kinds))
        for name, kinds in users.items()
    }
