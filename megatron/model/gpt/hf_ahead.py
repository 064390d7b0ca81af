# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction in the files of Hugging Face: `model.layers.61.*` of DeepSeek-V3, `mtp.*` of Qwen3-Next and
Nemotron-H. transformers leaves these tensors out; vLLM and SGLang read them.

| ours             | DeepSeek-V3: model.layers.L+k. | Qwen3-Next: mtp.          | Nemotron-H: mtp.layers.    |
|------------------|--------------------------------|---------------------------|----------------------------|
| enorm            | enorm                          | pre_fc_norm_embedding     | FIRST.enorm                |
| hnorm            | hnorm                          | pre_fc_norm_hidden        | FIRST.hnorm                |
| eh_proj [h, 2 h] | eh_proj                        | fc                        | FIRST.eh_proj              |
| layers           | self_attn, mlp ...             | layers.0                  | FIRST to LAST: norm, mixer |
| final_norm       | shared_head.norm               | norm                      | LAST.final_layernorm       |
| embedding.word   | embed_tokens, a copy           |                           |                            |
| output           | shared_head.head, a copy       |                           |                            |

The embedding's half is the first one of eh_proj in all of them, as in ours.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from megatron.errors import CheckpointError
from megatron.model.facts import AHEAD
from megatron.model.hf_match import Match
from megatron.settings.hybrid_pattern import AHEAD as CUT
from megatron.settings.schema import Model

FLAG = "--mtp-num-layers"


class DepthNames(NamedTuple):
    """Their names of a depth, up to `.weight`. layers: the prefix of each of its layers"""

    enorm: str
    hnorm: str
    eh_proj: str
    layers: list[str]
    final_norm: str
    table: str = ""  # a copy of the embedding
    head: str = ""  # a copy of the output layer


def _deepseek(m: Model, depth: int) -> DepthNames:
    at = f"model.layers.{m.num_layers + depth}."
    copies = f"{at}embed_tokens", f"{at}shared_head.head"
    return DepthNames(f"{at}enorm", f"{at}hnorm", f"{at}eh_proj", [at], f"{at}shared_head.norm", *copies)


def _qwen(m: Model, depth: int) -> DepthNames:
    norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
    return DepthNames(*norms, "mtp.fc", ["mtp.layers.0."], "mtp.norm")


def _nemotron(m: Model, depth: int) -> DepthNames:
    each = len(m.letters_ahead)
    layers = [f"mtp.layers.{n}." for n in range(depth * each, (depth + 1) * each)]
    first, last = layers[0], layers[-1]
    return DepthNames(f"{first}enorm", f"{first}hnorm", f"{first}eh_proj", layers, f"{last}final_layernorm")


class AheadFamily(NamedTuple):
    """names: (settings, depth) -> `DepthNames`. most: depths. unused: (settings) -> pattern of all of its tensors"""

    names: Callable[[Model, int], DepthNames]
    unused: Callable[[Model], str]
    most: int = 64


FAMILIES = {
    "deepseek_v3": AheadFamily(_deepseek, lambda m: rf"model\.layers\.{m.num_layers}\..*"),
    "qwen3_next": AheadFamily(_qwen, lambda m: r"mtp\..*", most=1),  # several would share matrix and norms
    "nemotron_h": AheadFamily(_nemotron, lambda m: r"mtp\..*"),
}


def reason(kind: str, m: Model) -> str:
    """Why the depths of a model are not those of a family, in words; "": they are."""
    if kind not in FAMILIES:
        return "no file of its family has them"
    if m.own_depths > FAMILIES[kind].most:
        return f"its family has at most {FAMILIES[kind].most}"
    if not m.letters and m.is_linear(m.num_layers - 1):
        return "their layer has softmax attention there"
    return ""


def with_depths(kind: str, m: Model, depths: int, letters: str) -> Model:
    """The settings of an imported model with depths. letters: of a depth of a model with a pattern

    Raises CheckpointError if its family has none.
    """
    if not depths:
        return m
    pattern = m.hybrid_layer_pattern and CUT.join([m.letters, *[letters] * depths])
    model = replace(m, mtp_num_layers=depths, hybrid_layer_pattern=pattern)
    if why := reason(kind, model):
        raise CheckpointError(f"{FLAG} {depths} of a {kind}: {why}", do=f"leave {FLAG} out, or give another number")
    return model


def unused(kind: str, m: Model) -> re.Pattern[str]:
    """The names of tensors of depths that a model leaves out."""
    names = FAMILIES[kind].unused(m) if kind in FAMILIES else r"(?!)"
    return re.compile(names)


def matches(kind: str, m: Model, norm: Callable[[str, str], Match], layer: Callable[..., list[Match]]) -> list[Match]:
    """The matches of all depths. layer: (number as `Facts` count them, our prefix, theirs) -> the matches of a layer"""
    if reason(kind, m):
        return []
    found = []
    for depth in range(m.own_depths):
        names, ours = FAMILIES[kind].names(m, depth), f"{AHEAD}.{depth}."
        found += [norm(f"{ours}{name}", getattr(names, name)) for name in ("enorm", "hnorm", "final_norm")]
        found.append(Match(f"{ours}eh_proj.weight", (f"{names.eh_proj}.weight",)))
        for number, (n, theirs) in enumerate(zip(m.layers_ahead, names.layers, strict=True)):
            found += layer(n, f"{ours}layers.{number}.", theirs)
    return found


def copies(kind: str, m: Model) -> dict[str, str]:
    """Their copies of the embedding and the output layer -> the name of our tensor."""
    names = [FAMILIES[kind].names(m, depth) for depth in range(m.own_depths)] if not reason(kind, m) else []
    head = "output.weight" if m.untie_embeddings_and_output_weights else "embedding.word.weight"
    tables = {f"{one.table}.weight": "embedding.word.weight" for one in names if one.table}
    return tables | {f"{one.head}.weight": head for one in names if one.head}
