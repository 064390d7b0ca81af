# SPDX-License-Identifier: Apache-2.0
"""Settings that a checkpoint gives: the shape of its model, and its tokenizer. Needs no torch.

--use-checkpoint-args asks for them, as in Megatron-LM; --finetune takes them where nobody has given a shape. What somebody
gives, on the command line or in a file, wins over the checkpoint's, and is compared with it when that is loaded.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Optional

from megatron.settings.schema import GROUPS, ON_RESUME
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.urls import location

# Of the model's settings those that are not its shape and arithmetic; which model it is, the command says.
OF_TRAINING = ("model_type", "model_name_or_path", "label_smoothing", "z_loss_coeff", "init_method_std")

FILES = ("vocab_file", "merge_file", "tokenizer_model")  # of a tokenizer


def saved_record(folder: str, step: Optional[int] = None) -> tuple[str, dict[str, Any]]:
    """(where, what state.json holds) of the checkpoint that --load would take: the tracker's, else the newest; or that of
    --ckpt-step. Raises Damaged where there is none that can be read, in words.
    """
    place = location(folder)
    if not (place / "index.json").exists():
        names = [path.name for path in place.iterdir()] if place.is_dir() else []
        found = {int(name[5:]): name for name in sorted(names) if re.fullmatch(r"iter_\d{7,}", name)}
        found = {number: name for number, name in found.items() if (place / name / "index.json").exists()}
        wanted = step if step is not None else _tracked(place)
        if wanted not in found and step is not None:
            raise Damaged(f"{folder} has no checkpoint of iteration {step}")
        if not found:
            raise Damaged(f"{folder} holds no checkpoint")
        place = place / found[wanted if wanted in found else max(found)]
    _, index = read_sealed(place / "index.json")
    _, record = read_sealed(place / str(index.get("state_file", "state.json")))
    if not isinstance(record.get("config"), dict) or not isinstance(record["config"].get("model"), dict):
        raise Damaged(f"{place} does not say what model it is")
    return str(place), record


def _tracked(place) -> Optional[int]:
    try:
        text = (place / "latest_checkpointed_iteration.txt").read_bytes()[:32].decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def settings_of_shape(groups: Mapping[str, type]) -> dict[str, str]:
    """Settings of a recipe's own that make its model another one -> the group that they are in."""
    return {
        field.name: name
        for name, group in groups.items()
        if name not in GROUPS
        for field in fields(group)
        if field.metadata.get("on_resume") == ON_RESUME[0]
    }


def _numbers(vocab_size: object) -> dict[str, Any]:
    """A vocabulary of numbers for a model whose checkpoint knows no tokenizer, as imported ones may: the last one ends
    documents.
    """
    if not isinstance(vocab_size, int) or vocab_size < 2:
        return {}
    return dict(tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1)


def shape_of(record: Mapping[str, Any], own: Mapping[str, str], given: set[str]) -> dict[str, Any]:
    """Setting -> value, of the settings that a checkpoint gives.

    own:   `settings_of_shape`
    given: settings that somebody gave. With one of the tokenizer's, none of the checkpoint's tokenizer is taken, unless it
           is where a file of that one lies now
    """
    config = record["config"]
    found = {name: value for name, value in config["model"].items() if name not in OF_TRAINING}
    extra = config.get("extra", {})
    found |= {name: extra[group][name] for name, group in own.items() if name in extra.get(group, {})}
    if found.get("encoder_num_layers"):
        del found["num_layers"]  # is those of encoder and decoder together, of which somebody may give one
    tokenizer = {name: value for name, value in config.get("tokenizer", {}).items() if value is not None}
    own_files = {name for name in FILES if tokenizer.get(name)}
    if given & set(config.get("tokenizer", {})) <= own_files:
        found |= tokenizer if any(tokenizer.values()) else _numbers(record.get("vocab_size"))
    return {name: value for name, value in found.items() if value is not None and name not in given}
