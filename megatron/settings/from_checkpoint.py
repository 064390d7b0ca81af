# SPDX-License-Identifier: Apache-2.0
"""Read settings from a checkpoint: the shape of its model, and its tokenizer. Needs no torch.

--use-checkpoint-args does this, as in Megatron-LM, and so do --finetune and --pretrained-checkpoint if no shape is given.
Settings given on the command line or in a file override the checkpoint's, and are compared with them when it is loaded.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Optional

from megatron.errors import CheckpointError, DataError, SettingsError, no_folder, no_such_file
from megatron.settings.declare import ON_RESUME, dashed
from megatron.settings.dialects.hints import as_overrides
from megatron.settings.dialects.table import Compressed
from megatron.settings.presets import published_rows
from megatron.settings.schema import GROUPS, Checkpoint, Config, TokenizerSettings, from_record
from megatron.settings.statements import Statement
from megatron.storage.durable import Damaged, read_sealed
from megatron.storage.urls import UrlPath, location

# Settings of the model that are not its shape or arithmetic; the command sets the model type.
OF_TRAINING = ("model_type", "model_name_or_path", "label_smoothing", "z_loss_coeff", "init_method_std")

RELEASE = "release"  # Megatron-LM's directory name for weights from a converter, in place of an iteration

# Settings that others give if they are not given -> the property with their value
FILLED_BY = dict(ffn_hidden_size="ffn_size", kv_channels="head_dim", num_query_groups="query_groups")
FILLED_BY |= dict(max_position_embeddings="position_table")

FILES = ("vocab_file", "merge_file", "tokenizer_model")  # of a tokenizer
PATHS = dict(tokenizer=FILES, data=("data_path", "train_data_path", "valid_data_path", "test_data_path"))
ENDINGS = ("", ".idx", "_idx.npz", "_ids.npz")  # a path exists if one of these files does


def saved_record(folder: str, step: Optional[int] = None) -> tuple[str, dict[str, Any]]:
    """Read (path, contents of state.json) of the checkpoint that --load would load.

    It is the tracker's, else the newest; or that of --ckpt-step. Raises Damaged, with a reason, if none can be read.
    """
    place = location(folder)
    if not (place / "index.json").exists():
        names = [path.name for path in place.iterdir()] if place.is_dir() else []
        saved = {int(name[5:]): name for name in sorted(names) if re.fullmatch(r"iter_\d{7,}", name)}
        saved = {number: name for number, name in saved.items() if (place / name / "index.json").exists()}
        wanted = step if step is not None else _tracked(place)
        if wanted not in saved and step is not None:
            raise Damaged(f"{folder} has no checkpoint of iteration {step}")
        if not saved:
            others = (place / name for name in names if name.startswith("iter_"))
            problems = (megatron_format_problem(place), *map(foreign_format, others))
            raise Damaged(next(filter(None, problems), f"{folder} holds no checkpoint"))
        place = place / saved[wanted if wanted in saved else max(saved)]
    _, index = read_sealed(place / "index.json")
    _, record = read_sealed(place / str(index.get("state_file", "state.json")))
    if not isinstance(record.get("config"), dict) or not isinstance(record["config"].get("model"), dict):
        raise Damaged(f"{place} does not say what model it is")
    return str(place), record


def found_record(folder: Optional[str], step: Optional[int] = None) -> Optional[dict[str, Any]]:
    """The record of the checkpoint that --load would load; None if there is none, or none that can be read."""
    try:
        return saved_record(folder, step)[1] if folder else None
    except (Damaged, OSError):
        return None


def checkpoint_record(folder: Optional[str], step: Optional[int] = None) -> Optional[dict[str, Any]]:
    """`found_record`. Raises CheckpointError for a model of another format, and says how to convert it."""
    record = found_record(folder, step)
    place = None if record or folder is None else location(str(folder))
    if place and (place / "config.json").exists() and not (place / "index.json").exists():
        raise of_transformers(folder)
    if place and (problem := foreign_format(place)):
        raise CheckpointError(problem)
    return record


def of_transformers(folder: object) -> CheckpointError:
    """The error of a folder that holds a model of Hugging Face in the place of checkpoints."""
    return CheckpointError(
        f"{folder} is a model of Hugging Face transformers, not a folder of checkpoints",
        do=f"python -m megatron.tools.checkpoint from-hf {folder} OUT",
    )


def pretrained_record(start: str, save: Optional[str]) -> dict[str, Any]:
    """The record of `--pretrained-checkpoint`. Raises CheckpointError if there is none, SettingsError if it is `--save`."""
    record = checkpoint_record(start)
    if record is None:
        found = no_folder(location(start))
        do = "files of Paddle (.pdparams) are not read: give a folder that a training saved, or from-hf wrote"
        raise CheckpointError(f"--pretrained-checkpoint {start} holds no checkpoint", found, do)
    refuse_same(start, save)
    return record


def refuse_same(start: Optional[str], save: Optional[str]) -> None:
    """Raise SettingsError if a run would save into the folder of the pretrained model."""
    if save is not None and os.path.realpath(str(save)) == os.path.realpath(str(start)):
        raise SettingsError(
            f"--save {save} holds the model that the run begins with",
            "its checkpoints would stand among those of this run, and --load would find the newest",
            "give the run a folder of its own",
        )


def refuse_foreign(settings: Checkpoint) -> None:
    """Raise CheckpointError if a folder that the run would save into holds a model of other programs, whose files would be
    replaced (a chat template, tokenizer_config.json, Megatron-LM's tracker).
    """
    for name in ("save", "save_mirror", "save_copy"):
        folder = getattr(settings, name)
        place = location(str(folder)) if folder else None
        what = _others_model(place) if place else None
        if what:
            raise CheckpointError(
                f"{dashed(name)} {folder} holds {what}",
                "checkpoints would stand among its files, and replace some of them",
                "give the run a folder of its own",
            )


def _others_model(place: Path | UrlPath) -> Optional[str]:
    """What another program has written into a folder where no run of this suite has saved yet; None for nothing."""
    newest = _tracked(place)
    if newest is None and (place / "export.json").exists():
        return "an export"
    if newest is None and (place / "config.json").exists():
        try:
            if "model_type" in json.loads((place / "config.json").read_bytes()):
                return "a model of Hugging Face transformers"
        except (ValueError, TypeError):
            pass  # a file of another purpose, such as --config
    if newest is None and (place / "adapter_config.json").exists():
        return "adapters of PEFT"
    saved = place / (RELEASE if newest is None else f"iter_{newest:07d}")
    return "checkpoints of Megatron-LM" if foreign_format(saved) else None


def from_pretrained(config: Config) -> Config:
    """The settings with --pretrained-checkpoint as --load, while there is no checkpoint to resume from.

    Raises as `pretrained_record` does.
    """
    settings = config.checkpoint
    if settings.load is not None and found_record(settings.load, settings.ckpt_step) is not None:
        return config
    pretrained_record(settings.pretrained_checkpoint, settings.save)
    return config.derive("--pretrained-checkpoint", load=settings.pretrained_checkpoint)


def megatron_format_problem(folder: Path | UrlPath) -> Optional[str]:
    """How to convert a checkpoint in Megatron-LM's format: the folder's `release`, or the folder itself; else None."""
    return next(filter(None, map(foreign_format, (folder / RELEASE, folder))), None)


def foreign_format(path: Path | UrlPath) -> Optional[str]:
    """How to convert a checkpoint in one of Megatron-LM's two formats, Hugging Face's or PEFT's; None for any other."""
    if (path / "index.json").exists():
        return None
    if any(path.glob("mp_rank_*")):
        return (
            f"{path} is in Megatron-LM's own format; convert it with python -m megatron.tools.checkpoint "
            f"from-megatron {path.parent} OUT"
        )
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return f"{path} is in Hugging Face's format; convert it with python -m megatron.tools.checkpoint from-hf {path} OUT"
    if (path / "adapter_config.json").exists():
        return (
            f"{path} holds adapters of PEFT; put them on the model they belong to with python -m megatron.tools.checkpoint "
            f"from-peft {path} OUT --base CHECKPOINTS"
        )
    if any(path.glob("*.distcp")):
        return (
            f"{path} is in torch's distributed format; if it is Megatron-LM's, convert it with python -m "
            f"megatron.tools.checkpoint from-megatron {path.parent} OUT"
        )
    return None


def own_format(path: Path | UrlPath) -> Optional[str]:
    """How to read a folder of checkpoints of this suite, or one of them; None for any other."""
    if _tracked(path) is None and not (path / "index.json").exists():
        return None
    return f"it holds a checkpoint of this suite: --load {path}"


def _tracked(place) -> Optional[int]:
    try:
        text = (place / "latest_checkpointed_iteration.txt").read_bytes()[:32].decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def located(record: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the record of a run. Relative paths of vocabulary and data that do not exist here are resolved from
    the folder that the run was started in, which records of earlier versions do not have.
    """

    def resolved(word: Any) -> Any:
        if isinstance(word, list):
            return list(map(resolved, word))
        there = os.path.join(record.get("folder") or "", str(word))
        return there if isinstance(word, str) and not _exists(word) and _exists(there) else word

    config = dict(record["config"])
    for group, names in PATHS.items():
        values = config.get(group, {})
        config[group] = {name: resolved(value) if name in names else value for name, value in values.items()}
    return config


def _exists(path: str) -> bool:
    return any(os.path.exists(f"{path}{ending}") for ending in ENDINGS)


def refuse_lost(record: Mapping[str, Any], group: str, given: set[str]) -> None:
    """Raise DataError if a path in a group of a run's settings does not exist. given: names of settings the user gave."""
    values = located(record).get(group, {})
    for name in PATHS[group]:
        words = [] if name in given else values.get(name) or []
        for word in [words] if isinstance(words, str) else words:
            # Other words are weights of a blend, names of vocabularies, or URLs.
            if os.sep in word and "://" not in word and not _exists(word):
                raise DataError(
                    f"{word}: {no_such_file(word)}",
                    f"the path comes from the checkpoint{_from(record, word)}",
                    f"give its new path: {dashed(name)}",
                )


def _from(record: Mapping[str, Any], word: str) -> str:
    """The folder that a relative path of a record starts from, in words."""
    if os.path.isabs(word):
        return ""
    return f", whose run was started in {record.get('folder') or 'an unknown folder'}"


def _to_load(chosen: Mapping[str, Statement]) -> Optional[tuple[str, dict[str, Any]]]:
    """`saved_record` of the checkpoint that --load and --ckpt-step name; None if it cannot be read."""
    step = chosen["ckpt_step"].value if "ckpt_step" in chosen else None
    try:
        return saved_record(str(chosen["load"].value), step)
    except (Damaged, OSError):
        return None


def refuse_another_shape(shape: Mapping[str, Statement], chosen: Mapping[str, Statement]) -> None:
    """Raise SettingsError if a setting of the model differs from that of the checkpoint to load.

    A checkpoint that cannot be read is reported when it is loaded.
    """
    if (found := _to_load(chosen)) is None:
        return
    place, record = found
    model = from_record(record["config"]).model
    saved = {name: getattr(model, FILLED_BY.get(name, name)) for name in shape}
    # Of an encoder-decoder, --num-layers gives those of the encoder
    for own in record["config"].get("extra", {}).values():
        saved["num_layers"] = own.get("encoder_num_layers") or saved.get("num_layers")
    plain = lambda value: re.sub(r"[\s()\[\]]", "", value) if isinstance(value, str) else value  # (127, 0) is 127,0
    other = {one.words: (one, saved[name]) for name, one in shape.items() if plain(one.value) != plain(saved[name])}
    if wrong := [f"{words}: {value} in the checkpoint" for words, (_, value) in other.items()]:
        own = as_overrides(other.values())
        hint = f"say {own}, or " * bool(own)
        hint += "leave settings of the model out: they come from the checkpoint"
        raise SettingsError(f"{place} holds another model", "\n  ".join(wrong), hint)


def refuse_uncompressed(expected: Iterable[Compressed], chosen: Mapping[str, Statement]) -> None:
    """Raise SettingsError if a file expects a quantized or a pruned model, and the checkpoint to load is none.

    A checkpoint that cannot be read is reported when it is loaded.
    """
    if (found := _to_load(chosen)) is None:
        return
    place, record = found
    model = from_record(record["config"]).model
    for one in expected:
        if one.what == "quantized":
            plain = not (model.quantization or record.get("quantized"))
            why, do = "it has no scales, and would be used in full precision", "one that was trained with this section"
        else:
            plain = bool(one.sizes) and all(getattr(model, name) == size for name, size in one.sizes.items())
            why, do = "it has the sizes of the file's whole model", "one that tools.prune wrote, or was trained from it"
        if plain:
            raise SettingsError(
                f"{place} is not {one.what}, and {one.where} is on", why, f"--load {do}; or -o {one.switch}=False"
            )


def tokenizer_of_checkpoint(folder: str, given: Mapping[str, Any]) -> TokenizerSettings:
    """The tokenizer of the newest checkpoint of a folder. given: settings of the command line, which come first

    Raises CheckpointError if there is none, SettingsError for a run of numbers, DataError if its files are gone.
    """
    try:
        _, record = saved_record(folder)
    except (Damaged, OSError) as error:
        exported = Path(folder, "config.json").is_file()
        do = f"--tokenizer-model {folder} reads the tokenizer of such a folder" if exported else None
        raise CheckpointError(f"--load {folder}: {error}", do=do) from None
    refuse_lost(record, "tokenizer", set(given))
    own = {name: value for name, value in located(record).get("tokenizer", {}).items() if value is not None}
    if not any(own.get(name) for name in FILES) and not given:
        raise SettingsError(
            f"--load {folder}: the run had no tokenizer", do="give one: --tokenizer-model, --vocab-file"
        )
    return TokenizerSettings(**own).overridden(given)


def settings_of_shape(groups: Mapping[str, type]) -> dict[str, str]:
    """A recipe's own settings that change its model's shape -> their group."""
    return {
        field.name: name
        for name, group in groups.items()
        if name not in GROUPS
        for field in fields(group)
        if field.metadata.get("on_resume") == ON_RESUME[0]
    }


def _numbers(vocab_size: object) -> dict[str, Any]:
    """A NullTokenizer for a checkpoint without tokenizer, such as an imported one; the last id ends documents."""
    if not isinstance(vocab_size, int) or vocab_size < 2:
        return {}
    return dict(tokenizer_type="NullTokenizer", vocab_size=vocab_size - 1)


def shape_of(record: Mapping[str, Any], own: Mapping[str, str], given: set[str]) -> dict[str, Any]:
    """The settings to take from a checkpoint: name -> value.

    own:   `settings_of_shape`
    given: names of settings that the user gave. If one is of the tokenizer, the checkpoint's tokenizer is not used, unless
           it only gives the new path of one of its files, or beside files the number of rows
    """
    config = located(record)
    shape = {name: value for name, value in config["model"].items() if name not in OF_TRAINING}
    if published_rows(named := config["model"].get("model_name_or_path")):
        shape["model_name_or_path"] = named  # beside its tokenizer, the embedding has the rows of this model
    extra = config.get("extra", {})
    shape |= {name: extra[group][name] for name, group in own.items() if name in extra.get(group, {})}
    if shape.get("encoder_num_layers"):
        del shape["num_layers"]  # the sum of encoder and decoder layers, of which the user may give one
    tokenizer = {name: value for name, value in config.get("tokenizer", {}).items() if value is not None}
    own_files = {name for name in FILES if tokenizer.get(name)}
    if given & set(config.get("tokenizer", {})) <= own_files | ({"vocab_size"} if own_files else set()):
        refuse_lost(record, "tokenizer", given)
        shape |= tokenizer if any(tokenizer.values()) else _numbers(record.get("vocab_size"))
    return {name: value for name, value in shape.items() if value is not None and name not in given}
