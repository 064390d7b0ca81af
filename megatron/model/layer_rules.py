# SPDX-License-Identifier: Apache-2.0
"""The rules of --layer-settings, and the files of Megatron-LM that become these (--heterogeneous-layers-config-path). Needs
no torch.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Optional

from megatron.errors import SettingsError, did_you_mean
from megatron.model.facts import Facts
from megatron.settings.general_rules import violations
from megatron.settings.hybrid_pattern import FLAG as PATTERN
from megatron.settings.layer_settings import FLAG, NO_OP, PARTS, numbers, read_layer_settings, written
from megatron.settings.rules import Rule
from megatron.settings.schema import Config, Model
from megatron.storage.urls import location

FILE, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"


# ---- rules -----------------------------------------------------------------------------------------------------------


def problem_of(m: Model) -> str:
    """What is wrong with the words of --layer-settings, whatever the layers are; "" if nothing is."""
    if not m.layer_settings:
        return ""
    try:
        found = read_layer_settings(m.layer_settings)
    except ValueError as error:
        return f"{error}; write LAYERS: NAME=VALUE NAME=VALUE; ... as in 3,7-9: ffn_hidden_size=1024"
    if max(found) >= m.num_layers:
        return f"there is no layer {max(found)}; layers are 0 to {m.num_layers - 1}"
    return next((said for layer, own in found.items() if (said := _problem_of_layer(m, layer, own))), "")


def _problem_of_layer(m: Model, layer: int, own: Mapping[str, str]) -> str:
    known = (*m.by_layer, NO_OP)
    for name, value in own.items():
        if name not in known:
            there = {one.name for one in fields(m)}
            why = "is one for all layers" if name in there else f"is no setting{did_you_mean(name, known)}"
            return f"{name} {why}; those of single layers are {', '.join(known)}"
        if name == NO_OP and value not in PARTS:
            return f"{NO_OP}={value} of layer {layer} is neither {' nor '.join(PARTS)}"
        if name == NO_OP and m.letters:
            return f"{NO_OP} of layer {layer}: leave its character out of {PATTERN} {m.letters}"
        try:
            m.by_layer.get(name, str)(value)
        except ValueError:
            return f"{name}={value} of layer {layer} is no whole number"
    return ""


RULES = (
    Rule(
        lambda s: problem_of(s.settings.model), lambda s: f"{FLAG} {s.layer_settings!r}: {problem_of(s.settings.model)}"
    ),
)


def layer_problems(settings: Config, facts: Facts, world: int, rules: Iterable[Rule]) -> list[str]:
    """The problems of layers with settings of their own, in a model whose settings otherwise work.

    rules: of the kinds of layers, which each such layer has to obey
    """
    m, found = settings.model, []
    alike: dict[tuple, list[int]] = {}
    for layer in sorted(read_layer_settings(m.layer_settings)) if m.layer_settings else ():
        own, mixers = m.settings_of_layer(layer), [mixer for _, mixer in facts.mixers_of([layer])]
        read = {one.name for mixer in mixers if mixer.settings for one in fields(mixer.settings)}
        read |= {name for mixer in mixers for name in mixer.reads}
        names = " and ".join(mixer.name for mixer in mixers)
        found += [f"{FLAG}: layer {layer}, of {names}, has no {name}; leave it out" for name in own if name not in read]
        alike.setdefault(tuple(own.items()), []).append(layer)
    for own, layers in alike.items():
        of_layer = replace(settings, model=replace(m, layer_settings=None, **dict(own)))
        those = violations(of_layer, world, rules)[0] if own else []
        found += [f"{FLAG}, layer{'s' * (len(layers) > 1)} {numbers(layers)}: {one}" for one in those]
    return found


# ---- Megatron-LM's files ---------------------------------------------------------------------------------------------


def with_blocks(config: Config) -> Config:
    """The settings of layers that a file of blocks lists. Raises SettingsError."""
    m = config.model
    path, text = m.heterogeneous_layers_config_path, m.heterogeneous_layers_config_encoded_json
    said = FILE if path else TEXT
    if path and text:
        raise SettingsError(f"{FILE} and {TEXT} both list the blocks", do="give one of them")
    if m.letters:
        raise SettingsError(f"{said} and {PATTERN} both list the layers", do="give one of them")
    if config.given("layer_settings") and m.layer_settings:
        raise SettingsError(f"{said} and {FLAG} both have the settings of layers", do="give one of them")
    layers = written(_blocks(_content(path, text, said), m, said)) or None
    files = dict(heterogeneous_layers_config_path=None, heterogeneous_layers_config_encoded_json=None)
    return config.derive(said, layer_settings=layers, **files)


def _content(path: Optional[str], text: Optional[str], said: str) -> dict[str, Any]:
    where = f"{said} {path}" if path else said
    try:
        content = json.loads(location(path).read_text() if path else text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise SettingsError(f"{where}: {why}", do="give a JSON object with block_configs") from None
    if not isinstance(content, dict) or not isinstance(content.get("block_configs"), list):
        raise SettingsError(f"{where} has no list block_configs", do="give a config.json of such a model")
    return content


def _blocks(content: Mapping[str, Any], m: Model, said: str) -> dict[int, dict[str, object]]:
    """Layer -> its settings."""
    blocks = content["block_configs"]
    for key, flag, own in (
        ("num_hidden_layers", "--num-layers", m.num_layers),
        ("hidden_size", "--hidden-size", m.hidden_size),
        ("num_attention_heads", "--num-attention-heads", m.num_attention_heads),
    ):
        if content.get(key, own) != own:
            raise SettingsError(f"{said} has {key} {content[key]}, and {flag} is {own}", do=f"{flag} {content[key]}")
    if content.get("hidden_act", "silu") != "silu":
        raise SettingsError(f"{said} has hidden_act {content['hidden_act']}", "Megatron-LM takes silu alone")
    if len(blocks) != m.num_layers:
        raise SettingsError(
            f"{said} has {len(blocks)} blocks, and --num-layers is {m.num_layers}", do=f"--num-layers {len(blocks)}"
        )
    return {n: _of_block(block, m, f"{said}, block {n}") for n, block in enumerate(blocks)}


# What else the files of Llama-Nemotron say of a part -> the values with which it does nothing.
IDLE = dict(sparsify=(None,), num_sink_tokens=(None, 0), unshifted_sink=(False, None), window_length=(None,))
IDLE |= dict(use_prefill_window_in_sink_attention=(False, None))


def _of_block(block: Mapping[str, Any], m: Model, where: str) -> dict[str, object]:
    """The settings of a layer that differ from the model's."""
    if not isinstance(block, dict):
        raise SettingsError(f"{where}: {block!r} is no object", do='give one, as {"attention": {...}, "ffn": {...}}')
    for key in ("attention", "ffn", "mlp"):
        if block.get(key) and not isinstance(block[key], dict):
            raise SettingsError(f"{where}: {key} {block[key]!r} is no object", do=f'give one, as {{"{NO_OP}": false}}')
    parallel = block.get("parallel_blocks")
    if unknown := sorted({*block} - {"attention", "ffn", "mlp", "parallel_blocks"}) + ["parallel_blocks"] * bool(
        parallel
    ):
        raise SettingsError(f"{where}: {unknown[0]} is not supported", do="leave it out")
    parts = dict(attention=dict(block.get("attention") or {}), mlp=dict(block.get("ffn") or block.get("mlp") or {}))
    gone = [name for name, part in parts.items() if _is_gone(part, f"of {name}", where)]
    if len(gone) == len(parts):
        raise SettingsError(f"{where} has neither attention nor an MLP", do="leave it out, and lower --num-layers")
    sizes = dict(num_query_groups=_groups(parts["attention"], m, where), ffn_hidden_size=_width(parts["mlp"], m, where))
    for name, part in parts.items():
        if part:
            raise SettingsError(f"{where}: {next(iter(part))} of {name} is not supported", do="leave it out")
    usual = dict(num_query_groups=(m.query_groups, "attention"), ffn_hidden_size=(m.ffn_size, "mlp"))
    own = {
        name: size for name, size in sizes.items() if size not in (None, usual[name][0]) and usual[name][1] not in gone
    }
    return own | ({NO_OP: gone[0]} if gone else {})


def _is_gone(part: dict[str, Any], of: str, where: str) -> bool:
    """Whether a block does not have a part. Takes what all parts have in common out of it."""
    if part.pop("replace_with_linear", False):
        raise SettingsError(
            f"{where}: replace_with_linear {of} is not supported",
            do="say no_op, or keep the layer; a mixer of your own is in docs/extending.md",
        )
    for key in IDLE.keys() & part.keys():
        if part[key] not in IDLE[key]:
            raise SettingsError(f"{where}: {key} {part[key]} {of} is not supported", do="leave it out")
        del part[key]
    return bool(part.pop(NO_OP, False))


def _number(part: dict[str, Any], key: str, where: str, kind: type | tuple = int) -> Any:
    """Take a size above zero out of a part; None: it has none."""
    value = part.pop(key, None)
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < float("inf")):
        raise SettingsError(f"{where}: {key} {value!r} is no number above zero", do="give one, or leave it out")
    return value


def _groups(attention: dict[str, Any], m: Model, where: str) -> Optional[int]:
    groups, shared = (_number(attention, key, where) for key in ("num_query_groups", "n_heads_in_group"))
    if groups is None and shared is not None:
        if m.num_attention_heads % shared:
            raise SettingsError(f"{where}: n_heads_in_group {shared} does not divide {m.num_attention_heads} heads")
        groups = m.num_attention_heads // shared
    return groups


def _width(mlp: dict[str, Any], m: Model, where: str) -> Optional[int]:
    """As Megatron-LM has it: two thirds of `ffn_mult` hidden sizes, up to a multiple of 256."""
    width, times = (_number(mlp, key, where, (int, float)) for key in ("ffn_hidden_size", "ffn_mult"))
    if width is None and times is not None:
        width = -(-int(2 * times * m.hidden_size / 3) // 256) * 256
    return None if width is None else int(width)


def refuse(m: Model, what: str) -> None:
    """Raise SettingsError for what knows layers of one size alone."""
    if m.layer_settings:
        raise SettingsError(
            f"{what} knows layers of one size, and this model has {FLAG} {m.layer_settings!r}",
            do="it trains, evaluates and generates in this suite",
        )
