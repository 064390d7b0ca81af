# SPDX-License-Identifier: Apache-2.0
"""What differs between the run that wrote a checkpoint and the run that goes on from it. Pure; needs no torch.

A change is *dangerous* when the run would go on as a different one without a word: another model, other data, another
order. Those are refused unless `--override` names them. Others (the layout, the learning rate, how often to save) are
wanted at times, and told.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean
from megatron.model.recipe import facts_of, recipe_of
from megatron.optimizer.resumed_schedule import FOLLOWING, SCHEDULE
from megatron.settings.schema import GROUPS, ON_RESUME, Config, Optimizer

# What a changed setting means where it does not say so itself (`on_resume` of `setting`); others are irrelevant.
BY_GROUP = dict.fromkeys(("model", "data", "batch", "optimizer", "precision", "guard"), "told")
MODEL, REFUSED, REFUSED_IN_TRAINING, TOLD, _ = ON_RESUME
DANGEROUS = (MODEL, REFUSED)
VOCABULARY = {"vocab_file", "merge_file", "tokenizer_model"}  # where it lies, whatever it is
ANOTHER_MODEL = (
    "the checkpoint is of another model than the settings",
    "give the checkpoint's settings, or another --load",
)
ORDER = "data-order"  # what `--override` calls samples that are not those of the earlier run


class Change(NamedTuple):
    """A setting that is not what it was."""

    name: str
    was: Any
    now: Any
    what: str  # one of ON_RESUME

    @property
    def dangerous(self) -> bool:
        return self.what in DANGEROUS

    def __str__(self) -> str:
        return f"{_flag(self.name)} was {self.was} in the checkpoint, is {self.now} now"


def changes(config: Config, saved: dict[str, dict]) -> list[Change]:
    """All changes that may matter, dangerous ones first. Settings that either side does not know are no changes."""
    found, now = [], config.to_record()
    before = {**saved, **saved.get("extra", {})}
    here = {**now, **now["extra"]}
    idle = ("optimizer",) if config.batch.skip_train else ()  # groups that decide about nothing here
    for group, name, what in meanings(config):
        if what != "irrelevant" and group not in idle and name in before.get(group, {}):
            was, value = before[group][name], here[group][name]
            if what == REFUSED_IN_TRAINING:
                what = TOLD if config.batch.skip_train else REFUSED
            if _plain(was) != _plain(value):
                found.append(Change(name, was, value, what))
    return sorted(found, key=lambda change: not change.dangerous)


def meanings(config: Config) -> Iterator[tuple[str, str, str]]:
    """(group, setting, one of ON_RESUME) of every setting, those of the recipe's own groups with them."""
    groups = {name: (getattr(config, name), BY_GROUP.get(name, "irrelevant")) for name in GROUPS}
    groups |= {name: (group, "refused") for name, group in config.extra.items()}
    for name, (group, default) in groups.items():
        for field in fields(group):
            what = field.metadata.get("on_resume", default)
            assert what in ON_RESUME, f"{field.name}: on_resume {what}"
            yield name, field.name, what


def overridden(config: Config) -> set[str]:
    """The names in `--override`. Raises UsageError for one that nothing dangerous has."""
    words = (config.guard.override or "").split(",")
    names = {word.strip().lstrip("-").replace("-", "_") for word in words} - {""}
    known = {name for _, name, what in meanings(config) if what in (*DANGEROUS, REFUSED_IN_TRAINING)} | {
        ORDER.replace("-", "_")
    }
    for name in sorted(names - known):
        raise UsageError(
            f"--override {name}: this setting needs none, or there is none of that name{did_you_mean(name, known)}",
            do="names: " + ", ".join(sorted(word.replace("_", "-") for word in known)),
        )
    return names


def same_vocabulary(record: Mapping[str, Any], vocabulary: Optional[str]) -> bool:
    """Whether a checkpoint's run had the vocabulary of this fingerprint; None: this run has numbers alone."""
    return vocabulary is not None and record.get("vocabulary") == vocabulary


def refuse_another_model(config: Config, saved: dict[str, dict]) -> None:
    """Raise SettingsError when a checkpoint's weights are of another model than the settings describe."""
    allowed = overridden(config)
    found = [change for change in changes(config, saved) if change.what == MODEL and change.name not in allowed]
    _refuse(config, found, *ANOTHER_MODEL)


def refuse_another_run(config: Config, saved: dict[str, dict], same_words: bool = False) -> None:
    """Raise SettingsError for every dangerous change that `--override` does not name. same_words: the vocabulary
    has other files, and is the same.
    """
    refuse_another_model(config, saved)
    dangerous = [change for change in changes(config, saved) if change.dangerous]
    _refuse(config, [change for change in dangerous if _reshapes(config, change)], *ANOTHER_MODEL)
    allowed = overridden(config) | (VOCABULARY if same_words else set())
    found = [change for change in dangerous if change.name not in allowed]
    names = ",".join([*(change.name.replace("_", "-") for change in found), *_with_other_samples(config, found)])
    _refuse(
        config,
        found,
        "the checkpoint is of a run whose results depend on other settings",
        f"give the checkpoint's settings, or --override {names} to go on with these",
    )


def _reshapes(config: Config, change: Change) -> bool:
    """Whether weights have another shape by a change, so that --override cannot make them fit."""
    if change.what == MODEL or not hasattr(config.model, change.name):
        return False
    before, now = (facts_of(one, 1).weights for one in (config.derive("", **{change.name: change.was}), config))
    return any(name in now and now[name].shape != weight.shape for name, weight in before.items())


def refuse_other_rows(config: Config, was: Optional[int], now: int) -> None:
    """Raise SettingsError where the embedding of a checkpoint has another number of rows than this run's."""
    if was in (None, now) or all(
        weight.shape == facts_of(config, now).weights[name].shape
        for name, weight in facts_of(config, was).weights.items()
    ):
        return
    tokenizer = config.tokenizer
    numbers = tokenizer.tokenizer_type == "NullTokenizer"
    if numbers or tokenizer.tokenizer_type is None or was > now:
        do = f"give --vocab-size {was - numbers}"
    else:
        do = "give the tokenizer of its run, and its --vocab-size and --vocab-extra-ids"
    raise SettingsError(
        f"the checkpoint has a vocabulary of {was}, this run one of {now}",
        f"NullTokenizer has the numbers below --vocab-size {tokenizer.vocab_size}, and one more that ends documents"
        if numbers
        else "",
        do,
    )


def refuse_another_optimizer(config: Config, saved: dict[str, dict]) -> None:
    """Raise SettingsError when a checkpoint's optimizer state is that of another update rule."""
    was, now = (Optimizer(optimizer=name).rule for name in (_optimizer(saved), config.optimizer.optimizer))
    if was != now:
        raise SettingsError(
            f"--optimizer {now} cannot go on with the state of {was}, which the checkpoint holds",
            "the two keep different numbers of each weight",
            f"give --optimizer {was}; or --no-load-optim, which goes on with the weights and state that starts anew",
        )


def _optimizer(saved: dict[str, dict]) -> str:
    return saved.get("optimizer", {}).get("optimizer", "adam")


def _with_other_samples(config: Config, found: list[Change]) -> list[str]:
    """What else a run has to be allowed when these have changed: their samples are others, too."""
    # Of files nobody can tell here: they may be the same under another name, so their samples are compared.
    deciding = {"seed", "seq_length", "split", "mock_data", "dataset_type", "dataloader_type", "tokenizer_type"}
    deciding |= {"vocab_size"}
    if recipe_of(config).own_data:
        deciding |= {field.name for group in config.extra.values() for field in fields(group)}
    return [ORDER] if any(change.name in deciding for change in found) else []


def told(config: Config, saved: dict[str, dict], same_words: bool = False) -> list[str]:
    """A sentence for each change that does not stop the run. Values that nobody gave are told by what they change:
    `resumed_schedule.drift`.
    """
    found = [change for change in changes(config, saved) if config.given(change.name) or change.name not in FOLLOWING]
    return [f"{change}{_because(config, change, same_words)}" for change in found]


def _because(config: Config, change: Change, same_words: bool) -> str:
    if same_words and change.name in VOCABULARY:
        return ": the same vocabulary"
    if config.checkpoint.resume_schedule == "checkpoint" and change.name in SCHEDULE:
        return ": the checkpoint's is followed (--resume-schedule)"
    return " (--override)" if change.dangerous else ""


def probe_places(consumed: int, count: int = 8) -> list[int]:
    """Places of the order of training, spread over what was consumed, whose samples identify a run's data."""
    return sorted({consumed * number // count for number in range(count)}) if consumed else []


def refuse_other_samples(config: Config, wrong: Collection[int], lengths: str = "") -> Iterable[str]:
    """Raise SettingsError when samples at these places are not those of the earlier run; or tell, if it is wanted so, or if
    nothing is trained on them. lengths: of training that keep them, as `--train-iters 20 to 31`, where this one's does not.
    """
    if not wrong:
        return []
    what = (
        f"the samples that this run would have had are others than the checkpoint's (at {', '.join(map(str, wrong))})"
    )
    if ORDER.replace("-", "_") in overridden(config):
        return [f"{what} (--override)"]
    if config.batch.skip_train:
        return [f"{what} (--skip-train: none is trained on)"]
    if lengths:
        why = "a training of another length goes through the data in other epochs, whose samples are shuffled together"
        raise SettingsError(
            what, why, f"give {lengths}: the order is the checkpoint's with these; or --override {ORDER}"
        )
    raise SettingsError(
        what,
        "same settings, and other data files; or a length of training that changes the number of epochs",
        f"restore the data and the length of training (--train-iters ...), or --override {ORDER}",
    )


def _refuse(config: Config, found: list[Change], what: str, do: str) -> None:
    if found:
        lines = [
            f"{_flag(one.name)}: {one.was} in the checkpoint, {one.now} now{_whence(config, one)}" for one in found
        ]
        raise SettingsError(what, "\n  ".join(lines), do)


def _whence(config: Config, change: Change) -> str:
    """Which flag to change where nobody gave the setting itself."""
    length = config.given("seq_length")
    if change.name != "max_position_embeddings" or config.given(change.name) or not length:
        return ""
    return f", as {length.words} is given alone; to keep the positions, add {_flag(change.name)} {change.was}"


def _plain(value: Any) -> Any:
    """As JSON has it, in which checkpoints keep settings."""
    return list(value) if isinstance(value, tuple) else value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
