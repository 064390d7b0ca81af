# SPDX-License-Identifier: Apache-2.0
"""Settings that a checkpoint gives: the shape of its model, and its tokenizer. Needs no torch.

--use-checkpoint-args asks for them, as in Megatron-LM; --finetune takes them where nobody has given a shape. What somebody
gives, on the command line or in a file, wins over the checkpoint's, and is compared with it when that is loaded.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Optional

from megatron.errors import DataError
from megatron.settings.schema import GROUPS, ON_RESUME
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.urls import location

# Of the model's settings those that are not its shape and arithmetic; which model it is, the command says.
OF_TRAINING = ("model_type", "model_name_or_path", "label_smoothing", "z_loss_coeff", "init_method_std")

FILES = ("vocab_file", "merge_file", "tokenizer_model")  # of a tokenizer
PATHS = dict(tokenizer=FILES, data=("data_path", "train_data_path", "valid_data_path", "test_data_path"))
ENDINGS = ("", ".idx", "_idx.npz", "_ids.npz")  # a path is there if one of these files is


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


def located(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a record of a run. Relative paths of its vocabulary and data that lead nowhere from here are taken
    from the folder that the run was started in, which records of earlier versions do not name.
    """

    def found(word: Any) -> Any:
        if isinstance(word, list):
            return list(map(found, word))
        there = os.path.join(record.get("folder") or "", str(word))
        return there if isinstance(word, str) and not _exists(word) and _exists(there) else word

    config = dict(record["config"])
    for group, names in PATHS.items():
        values = config.get(group, {})
        config[group] = {name: found(value) if name in names else value for name, value in values.items()}
    return config


def _exists(path: str) -> bool:
    return any(os.path.exists(f"{path}{ending}") for ending in ENDINGS)


def refuse_lost(record: Mapping[str, Any], group: str, given: set[str]) -> None:
    """Raise DataError where a path in a group of a run's settings leads nowhere. given: settings that somebody gave."""
    values = located(record).get(group, {})
    for name in PATHS[group]:
        words = [] if name in given else values.get(name) or []
        for word in [words] if isinstance(words, str) else words:
            # Others are weights of a blend, names of vocabularies, or URLs.
            if os.sep in word and "://" not in word and not _exists(word):
                raise DataError(
                    f"{word}: no such file",
                    f"the path comes from the checkpoint{_from(record, word)}",
                    f"say where it is now: --{name.replace('_', '-')}",
                )


def _from(record: Mapping[str, Any], word: str) -> str:
    """Where a relative path of a record begins."""
    if os.path.isabs(word):
        return ""
    return f", whose run was started in {record.get('folder') or 'a folder that it does not name'}"


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
    config = located(record)
    found = {name: value for name, value in config["model"].items() if name not in OF_TRAINING}
    extra = config.get("extra", {})
    found |= {name: extra[group][name] for name, group in own.items() if name in extra.get(group, {})}
    if found.get("encoder_num_layers"):
        del found["num_layers"]  # is those of encoder and decoder together, of which somebody may give one
    tokenizer = {name: value for name, value in config.get("tokenizer", {}).items() if value is not None}
    own_files = {name for name in FILES if tokenizer.get(name)}
    if given & set(config.get("tokenizer", {})) <= own_files:
        refuse_lost(record, "tokenizer", given)
        found |= tokenizer if any(tokenizer.values()) else _numbers(record.get("vocab_size"))
    return {name: value for name, value in found.items() if value is not None and name not in given}
