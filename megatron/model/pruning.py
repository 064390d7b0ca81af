# SPDX-License-Identifier: Apache-2.0
"""Smaller models: which dims of which weights belong to heads, channels of MLPs, experts, or the hidden size. No torch.

A smaller model is the same network with smaller settings, and nothing else: `smaller` computes them. Where its weights are
smaller follows from the tables of weights (`Facts.weights`), so this module names no weight:

    >>> from megatron.model.kinds.attention.kind import attention
    >>> model = Model(num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2)
    >>> for name, cut in cuts(lambda model: attention(model, False), model, HEADS).items():
    ...     print(name, cut)
    qkv.weight Cut(dim=0, block=1)
    qkv.bias Cut(dim=0, block=1)
    output.weight Cut(dim=1, block=4)

A *unit* is what goes or stays as a whole: a key-value group with all of its queries (a head, without grouped queries), a
channel of an MLP, an expert with its row of the router, a channel of the hidden states, a layer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean
from megatron.model.weights import Table
from megatron.settings.declare import Needs
from megatron.settings.schema import Model, setting

HEADS, FFN, HIDDEN, EXPERTS = "heads", "ffn", "hidden", "experts"
KINDS = (HEADS, FFN)  # that --prune-ratio is about
Criterion = Literal["l1_norm", "l2_norm", "taylor"]
ON_TEXT = ("taylor", "load")  # criteria that read a calibration text


@dataclass(frozen=True)
class PruningOptions:
    """What goes, and how its importance is measured."""

    prune_criterion: Literal["l1_norm", "l2_norm", "taylor", "load"] = setting(
        "importance: the sum of absolute weights, the root of the sum of their squares, how much the loss of a calibration "
        "text would change (taylor), or, of experts, how many of its tokens they get (load)",
        "l1_norm",
    )
    prune_ratio: Optional[float] = setting(
        "fraction of the heads (or key-value groups) and of the MLP channels of each layer that goes", None
    )
    prune_skip: Optional[str] = setting(
        "what --prune-ratio leaves alone: heads or ffn, or the file of tools.sensitivity --output",
        None,
        needs=Needs("--prune-ratio", lambda s: s.prune_ratio is not None),
    )


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of the smaller model, instead of a ratio."""

    target_num_attention_heads: Optional[int] = setting("heads of the smaller model", None)
    target_num_query_groups: Optional[int] = setting("key-value groups of the smaller model", None)
    target_ffn_hidden_size: Optional[int] = setting("width of the smaller model's MLPs", None)
    target_num_experts: Optional[int] = setting("experts of the smaller model's layers", None)
    target_hidden_size: Optional[int] = setting("hidden size of the smaller model", None)
    target_num_layers: Optional[int] = setting("layers of the smaller model: the least important ones go", None)
    prune_layers: Optional[list[int]] = setting("layers that go, counted from 0 as in blocks.0", None)


def check_text(criterion: str, calibration_data: Optional[list[str]]) -> None:
    """Raise UsageError if a criterion reads a text, and none is given."""
    if criterion in ON_TEXT and not calibration_data:
        raise UsageError(f"--prune-criterion {criterion} needs --calibration-data: the text that is read")


class Cut(NamedTuple):
    """Where the units of a weight lie: along `dim`, `block` consecutive elements each."""

    dim: int
    block: int


class ModelSizes(NamedTuple):
    """The numbers of units of a model."""

    heads: int  # key-value groups
    ffn: int
    hidden: int
    layers: int
    experts: int = 0  # of a layer; 0: the model has none

    @classmethod
    def of(cls, model: Model) -> "ModelSizes":
        experts = model.num_experts if model.mixture else 0
        return cls(model.query_groups, model.ffn_size, model.hidden_size, model.num_layers, experts)

    def settings(self, model: Model) -> Model:
        """The settings of the same network with these sizes; sizes that follow from others are written out."""
        return replace(
            model,
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads * (model.num_attention_heads // model.query_groups),
            num_query_groups=self.heads,
            kv_channels=model.head_dim,
            ffn_hidden_size=self.ffn,
            max_position_embeddings=model.position_table,
            model_name_or_path=None,
            num_experts=self.experts or model.num_experts,
        )


def cuts(tables: Callable[[Model], Table], model: Model, kind: str) -> dict[str, Cut]:
    """Name of a weight -> where the units of a kind lie in it, of all weights that have some.

    tables: settings -> the weights of a model, by their full names
    """
    sizes = ModelSizes.of(model)
    before = tables(sizes.settings(model))
    after = tables(sizes._replace(**{kind: getattr(sizes, kind) + 1}).settings(model))
    found = {}
    for name, placement in before.items():
        pairs = enumerate(zip(placement.shape, after[name].shape))
        for dim, (old, new) in pairs:
            if old != new:
                found[name] = Cut(dim, new - old)
    return found


def owner(name: str, kind: str) -> str:
    """What chooses the units of a weight: its attention or MLP, its layer for experts, or the whole model for channels of
    the hidden states.

    >>> owner("blocks.3.mlp.up.weight", FFN), owner("blocks.3.mlp.router.weight", EXPERTS)
    ('blocks.3.mlp', 'blocks.3')
    >>> owner("blocks.3.attention.softmax_offset", HEADS)
    'blocks.3.attention'
    """
    if kind == EXPERTS:
        return ".".join(name.split(".")[:2])
    of_linear_layer = name.endswith((".weight", ".bias"))
    return "" if kind == HIDDEN else name.rsplit(".", 2 if of_linear_layer else 1)[0]


def target_sizes(model: Model, options: PruningOptions, targets: TargetSizes) -> ModelSizes:
    """The sizes of the smaller model. Raises UsageError if nothing is to go, SettingsError for sizes that cannot be."""
    sizes, ratio, own = ModelSizes.of(model), options.prune_ratio, targets
    if ratio is not None and not 0 < ratio < 1:
        raise SettingsError(
            f"--prune-ratio {ratio:g} has to be above 0 and below 1",
            "it is the fraction of heads and MLP channels that goes",
        )
    new = sizes
    for kind in _kinds_of_ratio(options):
        size = getattr(sizes, kind)
        new = new._replace(**{kind: size - round(size * ratio)})
    new = new._replace(
        heads=_groups(model, own, new.heads),
        ffn=own.target_ffn_hidden_size if own.target_ffn_hidden_size is not None else new.ffn,
        hidden=own.target_hidden_size if own.target_hidden_size is not None else new.hidden,
        layers=_layers(model, own),
        experts=_experts(model, own),
    )
    _refuse_nothing(model, sizes, new, options, targets)
    return new


def untouched(model: Model, options: PruningOptions, targets: TargetSizes) -> list[str]:
    """Sentences about what --prune-ratio leaves whole, because a ratio of it is less than one half.

    >>> untouched(Model(1, 8, 4), PruningOptions(prune_ratio=0.1), TargetSizes())
    ['--prune-ratio 0.1 takes nothing from 4 heads: all of them stay']
    """
    sizes, new, words = ModelSizes.of(model), target_sizes(model, options, targets), unit_words(model)
    own = dict(
        heads=(targets.target_num_attention_heads, targets.target_num_query_groups),
        ffn=(targets.target_ffn_hidden_size,),
    )
    return [
        f"--prune-ratio {options.prune_ratio:g} takes nothing from {getattr(sizes, kind)} {words[kind]}: all of them stay"
        for kind in _kinds_of_ratio(options)
        if getattr(new, kind) == getattr(sizes, kind) and not any(own[kind])
    ]


def _kinds_of_ratio(options: PruningOptions) -> list[str]:
    """The kinds that --prune-ratio is about, without those of --prune-skip."""
    skip = skipped_kinds(options.prune_skip)
    return [kind for kind in KINDS if options.prune_ratio is not None and kind not in skip]


def _refuse_nothing(model: Model, old: ModelSizes, new: ModelSizes, options: PruningOptions, own: TargetSizes) -> None:
    """Raise an error for sizes that would leave nothing, or take nothing."""
    ratio, words = options.prune_ratio, unit_words(model)
    flags = dict(heads="--target-num-attention-heads", ffn="--target-ffn-hidden-size", hidden="--target-hidden-size")
    flags |= dict(layers="--target-num-layers" if own.prune_layers is None else "--prune-layers")
    flags |= dict(experts="--target-num-experts") if model.mixture else {}
    for kind, flag in flags.items():
        before, after = getattr(old, kind), getattr(new, kind)
        if not 0 < after <= before:
            by_ratio = ratio is not None and after == before - round(before * ratio)
            said = f"--prune-ratio {ratio:g}" if by_ratio else flag
            raise SettingsError(
                f"{said} would leave {after} of the {before} {words[kind]}", do=f"leave between 1 and {before}"
            )
    if new == old and ratio is None:
        raise UsageError("nothing is to go", do="give --prune-ratio, a --target-... size, or --prune-layers")
    if new == old:
        raise SettingsError(
            f"--prune-ratio {ratio:g} takes nothing from {old.heads} {words['heads']} and {old.ffn} {words['ffn']}",
            do="give a larger ratio, or a --target-... size",
        )


def unit_words(model: Model) -> dict[str, str]:
    """Field of `ModelSizes` -> what it counts, in words."""
    queries = model.num_attention_heads // model.query_groups
    heads = "heads" if queries == 1 else f"key-value groups of {queries} heads"
    more = dict(experts="experts") if model.mixture else {}
    return dict(heads=heads, ffn="MLP channels", hidden="hidden channels", layers="layers", **more)


def _groups(model: Model, own: TargetSizes, present: int) -> int:
    """The key-value groups of the smaller model."""
    queries = model.num_attention_heads // model.query_groups
    heads, groups = own.target_num_attention_heads, own.target_num_query_groups
    if heads is not None and heads % queries:
        raise SettingsError(
            f"--target-num-attention-heads {heads} is no multiple of the {queries} heads that share keys and values",
            "a key-value group goes with all of its heads",
            "choose a multiple",
        )
    if heads is not None and groups is not None and heads != groups * queries:
        raise SettingsError(
            f"--target-num-attention-heads {heads} and --target-num-query-groups {groups}: each group has {queries} heads",
            do="give one of the two",
        )
    if heads is not None:
        return heads // queries
    return present if groups is None else groups


def _experts(model: Model, own: TargetSizes) -> int:
    """The experts of a layer of the smaller model; 0: it has none."""
    wanted, least = own.target_num_experts, max(2, model.moe_router_topk)
    if wanted is None:
        return model.num_experts if model.mixture else 0
    if not model.mixture:
        raise SettingsError(f"--target-num-experts {wanted}: the model has no experts", do="leave it out")
    if wanted < least:
        raise SettingsError(
            f"--target-num-experts {wanted}: each token goes to {model.moe_router_topk} experts",
            do=f"leave at least {least}",
        )
    if model.moe_router_num_groups and wanted < model.num_experts:
        raise SettingsError(
            f"--target-num-experts {wanted}: the router has {model.moe_router_num_groups} groups of experts",
            "those that are left would belong to other groups",
        )
    return wanted


def _layers(model: Model, own: TargetSizes) -> int:
    """The number of layers of the smaller model."""
    if own.prune_layers is None:
        return model.num_layers if own.target_num_layers is None else own.target_num_layers
    unknown = [layer for layer in own.prune_layers if not 0 <= layer < model.num_layers]
    if unknown:
        raise SettingsError(
            f"--prune-layers: there is no layer {unknown[0]}", do=f"layers are 0 to {model.num_layers - 1}"
        )
    left = model.num_layers - len(set(own.prune_layers))
    if own.target_num_layers not in (None, left):
        raise SettingsError(
            f"--prune-layers leaves {left} layers, and --target-num-layers says {own.target_num_layers}",
            do="give one of the two",
        )
    return left


def skipped_kinds(text: Optional[str]) -> list[str]:
    """The kinds of --prune-skip: words, or those that `tools.sensitivity` recommends in a .json file."""
    from megatron.model.quantization import skipped_layers

    words = skipped_layers(text, "--prune-skip")
    for word in words:
        if word not in KINDS:
            raise SettingsError(
                f"--prune-skip: '{word}' is neither heads nor ffn{did_you_mean(word, KINDS)}",
                do="give those, or the file of python -m megatron.tools.sensitivity --prune-ratio --output",
            )
    return words
