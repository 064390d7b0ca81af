# SPDX-License-Identifier: Apache-2.0
"""LoRA (arXiv:2106.09685): train a pair of small matrices beside each linear layer, and nothing else. Needs no torch.

    y = x W^T + alpha / rank x dropout(x) A^T B^T         W [rows..., i] frozen, A [rank, i], B [rows..., rank]

Each expert has a pair of its own: A [E, rank, i], B [E, rows..., rank].

`--lora-rank R` selects it. The pairs are a kind of linear layer: `--lora-target PATTERN` is `--linear PATTERN=lora`, and
the base is frozen by `--train-only`. B starts at 0, so the first loss is the base's. The products: `model/lora_product.py`.

With `--lora-split-fused` the parts of a fused matrix (queries, keys and values; the two of a gated MLP) have pairs of
their own, as separate layers would: A [parts x rank, i], and a row of B multiplies with the part of A that is its own.

With `--use-dora` (arXiv:2402.09353) a pair gives the directions of the weight's rows alone, and M [rows..., 1] their norms:

    y = c (x W^T + alpha / rank x dropout(x) A^T B^T)     c = (|W| + M) / |W + alpha / rank x B A|, a number for each row

M starts at 0: PEFT's magnitude is |W| + M. As there, c's denominator has no gradient.
"""

import math
from collections.abc import Mapping, Sequence

from megatron.mpu.placement import Constant, Normal, Placement, beside_inputs, beside_rows
from megatron.settings.declare import dashed
from megatron.settings.schema import Config, Model

KIND = "lora"
PAIR = ("lora_a", "lora_b")
MAGNITUDE = "lora_magnitude"
OWN = (*PAIR, MAGNITUDE)


def own_weights(settings: Model, weight: Placement) -> Mapping[str, Placement]:
    """A and B of a layer with this weight, and M. A has the variance of the original code and of PEFT, 1 / (3 inputs)."""
    rank = settings.lora_rank or 1  # without --lora-rank the settings are refused
    std = 1 / math.sqrt(3 * weight.shape[-1])
    parts = len(parts_of(settings, weight)[1])
    own = dict(lora_a=beside_inputs(weight, parts * rank, Normal(std)), lora_b=beside_rows(weight, rank, Constant(0.0)))
    return own | ({MAGNITUDE: beside_rows(weight, 1, Constant(0.0), decay=False)} if settings.use_dora else {})


def trained(settings: Model) -> list[str]:
    """The patterns of --train-only that adapters imply."""
    return [f"*.{name}" for name in (OWN if settings.use_dora else PAIR)]


def parts_of(settings: Model, weight: Placement) -> tuple[int, tuple[int, ...]]:
    """(dim, sizes along it) of the parts of a weight's rows that have pairs of their own.

    >>> qkv = Placement((4, 3, 8, 32), Normal(0.02), matrices=(1, (1, 1, 1)))
    >>> model = Model(num_layers=1, hidden_size=32, num_attention_heads=4, lora_rank=2)
    >>> parts_of(model, qkv)
    (0, (4,))
    """
    first = weight.stacked
    if first and settings.lora_split_fused and weight.fused > 1:
        return first, (1,) * weight.fused
    if not first and settings.lora_split_fused and weight.matrices and len(weight.matrices[1]) > 1:
        return weight.matrices
    return first, weight.shape[first : first + 1]


def scale_of(settings: Model) -> float:
    """The factor of the product of a pair: alpha / rank, or alpha / sqrt(rank) (arXiv:2312.03732)."""
    alpha = settings.lora_rank if settings.lora_alpha is None else settings.lora_alpha
    return alpha / (math.sqrt(settings.lora_rank) if settings.use_rslora else settings.lora_rank)


def with_adapters(config: Config) -> Config:
    """The settings with what --lora-rank implies: pairs in the layers of --lora-target (default: all), the base frozen.

    Layers may also be given as `--linear PATTERN=lora`. With --train-only, those parameters are trained, too.
    """
    model = config.model
    named = [part for part in (model.linear or "").replace(",", " ").split() if part.endswith(f"={KIND}")]
    given = (model.lora_target or ("" if named else "*")).replace(",", " ").split()
    targets = ["*" if target == "all-linear" else target for target in given]  # PEFT's word
    added = [f"{target}={KIND}" for target in targets if f"{target}={KIND}" not in named]
    linear = ",".join([*filter(None, [model.linear]), *added])
    kept = config.optimizer.train_only or []
    train_only = [*kept, *(pattern for pattern in trained(model) if pattern not in kept)]
    return config.derive("--lora-rank", linear=linear, train_only=train_only)


def problems_of_experts(settings: Model, names: Sequence[str]) -> list[str]:
    """The problem of what is not for pairs of experts, as a message. names: of experts with a pair."""
    flags = dict(lora_dropout=f"--lora-dropout {settings.lora_dropout:g}", use_dora="--use-dora")
    found = [flag for name, flag in flags.items() if names and getattr(settings, name)]
    return [
        f"{flag} does not reach experts, such as {names[0]}: leave it out, or choose other layers with --lora-target, such "
        "as attention.*"
        for flag in found[:1]
    ]


def problems(settings: Model, patterns: Sequence[str]) -> list[str]:
    """The problems of the flags of LoRA, as messages. patterns: of the layers that --linear gives pairs."""
    if settings.lora_rank is not None:
        return []
    own = dict(lora_alpha=None, lora_target=None, lora_dropout=0.0, lora_split_fused=False, use_rslora=False)
    own["use_dora"] = False
    given = [dashed(name) for name, value in own.items() if getattr(settings, name) != value]
    if KIND not in settings.own_linears:
        given += [f"--linear {pattern}={KIND}" for pattern in patterns]
    return [f"{', '.join(given)}: there are no adapters without --lora-rank"] if given else []
