# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformer layers, attention and MLP, as the layers that a pattern lists; and the other way round.

The i-th attention of a pattern is that of layer i, and so is the i-th MLP, whatever is between them (as in Megatron-LM):

    blocks.1.attention.qkv.weight  <->  blocks.2.attention.qkv.weight     of *-*-, and of optimizer state likewise
    blocks.1.mlp_norm.weight       <->  blocks.3.mlp_norm.weight
    mtp.0.layers.0.mlp.up.weight   <->  mtp.0.layers.1.mlp.up.weight       of *-*-/*-

No number changes: a reader gives its tensors other names. Needs no torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, Optional

from megatron.errors import SettingsError
from megatron.model.branches import Branch
from megatron.model.facts import AHEAD, Facts
from megatron.model.hybrid import kinds_of
from megatron.model.kinds.mixer import PLACES, Mixer
from megatron.model.kinds.table import letters_of as kinds_of_letters
from megatron.model.kinds.table import listed
from megatron.model.layer_rules import refuse
from megatron.model.recipe import config_of, facts_of
from megatron.settings.hybrid_pattern import FLAG, letters_of
from megatron.settings.schema import Config

Rename = Callable[[str], str]
Pairs = tuple[tuple[int, int], ...]  # of each transformer layer: the layers of a pattern that are its two branches
COUNTING = ("no_rope_freq", "window_attn_skip_freq")  # settings of `Model.overrides` that count layers
# A layer, and one of its modules; and of a depth of multi-token prediction, whose layers have numbers of their own
PART = re.compile(rf"\b(blocks|{AHEAD}\.\d+\.layers)\.(\d+)\.(\w+)")


def pairs_of(letters: str, kinds: Mapping[str, Mixer]) -> Pairs:
    """The layers of a pattern that are attention and MLP of the same transformer layer; (): they are not as many."""
    known = kinds_of_letters(kinds)
    places = [known[letter][0].place if len(known[letter]) == 1 else "" for letter in letters]
    found = [[n for n, own in enumerate(places) if own == place] for place in PLACES]
    return tuple(zip(*found)) if len(set(map(len, found))) == 1 else ()


def in_turn(letters: str, pairs: Pairs) -> bool:
    """Whether the layers of a pattern are transformer layers, one after the other."""
    return pairs == tuple((n, n + 1) for n in range(0, len(letters), 2))


def seen_as(config: Config, state: Mapping[str, Any]) -> Optional[tuple[Rename, dict[str, Any]]]:
    """(the names of a checkpoint's tensors in a run with these settings, its state with the run's layers), if the one
    has transformer layers and the other those of a pattern, and these are the same ones; None: it is read as it is.

    With --finetune the layers of a pattern may be in another order, and others between them start from new values.
    """
    saved = state.get("config", {}).get("model", {})
    theirs = letters_of(str(saved.get("hybrid_layer_pattern") or ""))
    letters = config.model.letters or theirs
    if bool(theirs) == bool(config.model.letters) or saved.get("model_type") != config.model.model_type:
        return None
    if config.model.lora_rank or saved.get("lora_rank"):  # the base of adapters keeps its names
        return None
    if config.model.depths != (saved.get("mtp_num_layers") or 0):
        return None
    if config.model.layer_settings or saved.get("layer_settings"):
        return None
    pairs = pairs_of(letters, kinds_of(config))
    if not pairs or not in_turn(letters, pairs) and not (config.model.letters and config.checkpoint.finetune):
        return None
    layers = saved["num_layers"] if not theirs else config.model.num_layers
    if len(pairs) != layers:
        return None
    pairs = dict(enumerate(pairs))
    other = facts_of(replace(config_of(state["config"]), extra=config.extra), 1)
    mine = facts_of(config, 1)
    paired, lettered = (mine, other) if theirs else (other, mine)
    tables = []
    for all_pairs in (pairs, _ahead(paired, lettered)):
        names = _names(paired, lettered, all_pairs)
        if names is None:
            return None
        to_letters = {(n, part): all_pairs[n][place] for (n, part), place in names.items()}
        tables.append({(n, part): layer for (layer, part), n in to_letters.items()} if theirs else to_letters)
    blocks, ahead = tables
    first = [facts.num_layers for facts in ((lettered, paired) if theirs else (paired, lettered))]
    ahead = {(n - first[0], part): layer - first[1] for (n, part), layer in ahead.items()}
    return _renaming(blocks, ahead), _with_layers(state, config)


def _ahead(paired: Facts, lettered: Facts) -> dict[int, tuple[int, int]]:
    """The layer of a depth of multi-token prediction -> its two layers in a pattern, by the numbers of `Facts`."""
    m = lettered.settings
    own = pairs_of(m.letters_ahead, lettered.mixers) if m.depths else ()
    return {paired.num_layers: tuple(m.num_layers + n for n in own[0])} if own else {}


def _names(
    paired: Facts, lettered: Facts, pairs: Mapping[int, tuple[int, int]]
) -> Optional[dict[tuple[int, str], int]]:
    """(transformer layer, name of a module) -> which of its two branches has it; None: the layers are not the same."""
    found = {}
    for layer, both in pairs.items():
        products = {}
        for place, (branch, n) in enumerate(zip(paired.branches(layer), both)):
            (own,) = lettered.branches(n)
            kinds = paired.layer_kind(layer), lettered.layer_kind(n)
            other = branch.mixes_tokens and dict(kinds[0].overrides) != dict(kinds[1].overrides)
            if branch != own or other:
                return None
            products |= dict(lettered.products(n)) if n < lettered.num_layers else {}
            found |= dict.fromkeys(((layer, part) for part in _parts(branch)), place)
        if products != (dict(paired.products(layer)) if layer < paired.num_layers else {}):
            return None
    return found


def _parts(branch: Branch) -> list[str]:
    return [*branch.norms, *(mixer.slot for mixer in branch.mixers)]


def _renaming(blocks: Mapping[tuple[int, str], int], ahead: Mapping[tuple[int, str], int]) -> Rename:
    """ahead: of a depth of multi-token prediction"""

    def renamed(match: re.Match) -> str:
        layer, part = int(match[2]), match[3]
        return f"{match[1]}.{(blocks if match[1] == 'blocks' else ahead).get((layer, part), layer)}.{part}"

    return lambda name: PART.sub(renamed, name)


def _with_layers(state: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The state of a checkpoint, with the settings of a run that say which layer is what, and of kinds that are new."""
    of_kinds = (kind.chooses((True,)) for kind in kinds_of(config).values())
    names = ["num_layers", "hybrid_layer_pattern", *COUNTING, *(name for settings in of_kinds for name in settings)]
    new = {config.model.letters[n] for n in fresh_layers(config)}
    groups = (kind.settings for kind in listed(kinds_of(config), "".join(new)) if kind.settings)
    names += [one.name for group in groups for one in fields(group)]
    own = {name: getattr(config.model, name) for name in names}
    record = state["config"]
    return {**state, "config": {**record, "model": {**record["model"], **own}}}


def fresh_layers(config: Config) -> frozenset[int]:
    """The layers of a pattern that no transformer layer has."""
    letters = config.model.letters
    pairs = pairs_of(letters, kinds_of(config))
    return frozenset(range(len(letters)) if pairs else ()) - {n for both in pairs for n in both}


def is_transformer(config: Config) -> bool:
    """Whether a pattern lists layers of attention and MLP in turn."""
    kinds = kinds_of(config)
    return in_turn(config.model.letters, pairs_of(config.model.letters, kinds))


def as_transformer(state: Mapping[str, Any], what: str) -> Optional[tuple[Rename, dict[str, Any]]]:
    """`seen_as`, for a program that knows transformer layers alone; None: the checkpoint has no pattern.

    what: the program, in words. Raises SettingsError if the pattern is no sequence of them.
    """
    config = config_of(state["config"])
    refuse(config.model, what)
    letters, kinds = config.model.letters, kinds_of(config)
    if not letters:
        return None
    pairs = pairs_of(letters, kinds)
    if not in_turn(letters, pairs):
        raise SettingsError(
            f"{FLAG} {letters}: {what} knows layers of attention and MLP, in turn",
            "the layers of this checkpoint are others",
            "it trains, evaluates and generates in this suite",
        )
    chosen = {}
    for kind in kinds.values():
        chosen |= kind.chooses(tuple(kind.symbol in (letters[first], letters[second]) for first, second in pairs))
    layers = dict(num_layers=len(pairs), hybrid_layer_pattern=None, **chosen)
    paired = replace(config, model=replace(config.model, **layers))
    found = seen_as(paired, state)
    if found is None:
        raise SettingsError(
            f"{FLAG} {letters}: the settings of its layers have no form for {what}",
            "one of them counts layers, as --window-attn-skip-freq does",
        )
    return found
