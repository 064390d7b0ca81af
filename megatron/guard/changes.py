# SPDX-License-Identifier: Apache-2.0
"""What differs between the run that wrote a checkpoint and the run that goes on from it. Pure; needs no torch.

A change is *dangerous* when the run would go on as a different one without a word: another model, other data, another
order. Those are refused unless `--override` names them. Others (the layout, the learning rate, how often to save) are
wanted at times, and told.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.errors import SettingsError, UsageError
from megatron.settings.schema import Config

SHAPE = (  # another model altogether: also weights alone (--finetune) must agree on these
    "model_type",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "disable_bias_linear",
    "untie_embeddings_and_output_weights",
    "qk_layernorm",
)
DANGEROUS = dict(
    model=(
        *SHAPE,
        "seq_length",
        "max_position_embeddings",
        "rotary_base",
        "rotary_percent",
        "norm_epsilon",
        "bias_gelu_fusion",
    ),
    tokenizer=("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "vocab_size", "tiktoken_pattern"),
    data=(
        "data_path",
        "train_data_path",
        "split",
        "mock_data",
        "dataloader_type",
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
    ),
    logging=("seed",),
)
TOLD = ("model", "data", "batch", "optimizer", "precision", "guard")  # groups whose other changes are told
# What a recipe says of a setting of its own (`setting(..., on_resume=...)`); "refused" where it says nothing.
ON_RESUME = ("another model", "refused", "told")
ORDER = "data-order"  # what `--override` calls samples that are not those of the earlier run
IRRELEVANT = (
    "override",
    "heartbeat_dir",
    "num_workers",
    "data_cache_path",
    "exit_interval",
    "exit_duration_in_mins",
    "kill_switch_file",
    "exit_signal_handler",
)


class Change(NamedTuple):
    """A setting that is not what it was."""

    name: str
    was: Any
    now: Any
    dangerous: bool

    def __str__(self) -> str:
        return f"{_flag(self.name)} was {self.was} in the checkpoint, is {self.now} now"


def changes(config: Config, saved: dict[str, dict]) -> list[Change]:
    """All changes that may matter, dangerous ones first. Settings that either side does not know are no changes."""
    found, now, own = [], asdict(config), own_settings(config)
    for group in dict.fromkeys([*DANGEROUS, *TOLD]):
        for name, value in saved.get(group, {}).items():
            dangerous = name in DANGEROUS.get(group, ())
            if name in now.get(group, {}) and name not in IRRELEVANT and (dangerous or group in TOLD):
                if _plain(value) != _plain(now[group][name]):
                    found.append(Change(name, value, now[group][name], dangerous))
    for group, values in saved.get("extra", {}).items():
        for name, value in values.items():
            here = now["extra"].get(group, {})
            if name in here and _plain(value) != _plain(here[name]):
                found.append(Change(name, value, here[name], own[name] != "told"))
    return sorted(found, key=lambda change: not change.dangerous)


def own_settings(config: Config) -> dict[str, str]:
    """The settings that a recipe adds -> one of ON_RESUME."""
    found = {f.name: f.metadata.get("on_resume", "refused") for group in config.extra.values() for f in fields(group)}
    assert set(found.values()) <= set(ON_RESUME), found
    return found


def overridden(text: str | None, own: Mapping[str, str] = MappingProxyType({})) -> set[str]:
    """The names in `--override`. Raises UsageError for one that nothing dangerous has. own: `own_settings`.

    >>> sorted(overridden("--seed,data_path"))
    ['data_path', 'seed']
    """
    names = {word.strip().lstrip("-").replace("-", "_") for word in (text or "").split(",")} - {""}
    known = {name for group in DANGEROUS.values() for name in group} | {ORDER.replace("-", "_")}
    known |= {name for name, what in own.items() if what != "told"}
    for name in sorted(names - known):
        raise UsageError(
            f"--override {name}: this setting needs none, or there is none of that name",
            do="names: " + ", ".join(sorted(word.replace("_", "-") for word in known)),
        )
    return names


def refuse_another_model(config: Config, saved: dict[str, dict]) -> None:
    """Raise SettingsError when a checkpoint's weights are of another model than the settings describe."""
    own = own_settings(config)
    shape = {*SHAPE, *(name for name, what in own.items() if what == "another model")}
    allowed = overridden(config.guard.override, own)
    found = [change for change in changes(config, saved) if change.name in shape and change.name not in allowed]
    _refuse(
        found,
        "the checkpoint is of another model than the settings",
        "give the checkpoint's settings, or another --load",
    )


def refuse_another_run(config: Config, saved: dict[str, dict]) -> None:
    """Raise SettingsError for every dangerous change that `--override` does not name."""
    refuse_another_model(config, saved)
    allowed = overridden(config.guard.override, own_settings(config))
    found = [change for change in changes(config, saved) if change.dangerous and change.name not in allowed]
    names = ",".join([*(change.name.replace("_", "-") for change in found), *_with_other_samples(found)])
    _refuse(
        found,
        "the checkpoint is of a run whose results depend on other settings",
        f"give the checkpoint's settings, or --override {names} to go on with these",
    )


def _with_other_samples(found: list[Change]) -> list[str]:
    """What else a run has to be allowed when these have changed: their samples are others, too."""
    # Of files nobody can tell here: they may be the same under another name, so their samples are compared.
    deciding = ("seed", "seq_length", "split", "mock_data", "dataloader_type", "tokenizer_type", "vocab_size")
    return [ORDER] if any(change.name in deciding for change in found) else []


def told(config: Config, saved: dict[str, dict]) -> list[str]:
    """A sentence for each change that does not stop the run."""
    return [f"{change}{' (--override)' if change.dangerous else ''}" for change in changes(config, saved)]


def probe_places(consumed: int, count: int = 8) -> list[int]:
    """Places of the order of training, spread over what was consumed, whose samples identify a run's data."""
    return sorted({consumed * number // count for number in range(count)}) if consumed else []


def refuse_other_samples(config: Config, wrong: Collection[int]) -> Iterable[str]:
    """Raise SettingsError when samples at these places are not those of the earlier run, or tell if it is wanted so."""
    if not wrong:
        return []
    what = (
        f"the samples that this run would have had are others than the checkpoint's (at {', '.join(map(str, wrong))})"
    )
    if ORDER.replace("-", "_") in overridden(config.guard.override, own_settings(config)):
        return [f"{what} (--override)"]
    raise SettingsError(
        what,
        "same settings, and other data files; or a length of training that changes the number of epochs",
        f"restore the data and the length of training (--train-iters ...), or --override {ORDER}",
    )


def _refuse(found: list[Change], what: str, do: str) -> None:
    if found:
        lines = [f"{_flag(change.name)}: {change.was} in the checkpoint, {change.now} now" for change in found]
        raise SettingsError(what, "\n  ".join(lines), do)


def _plain(value: Any) -> Any:
    """As JSON has it, in which checkpoints keep settings."""
    return list(value) if isinstance(value, tuple) else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
