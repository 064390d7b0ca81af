# SPDX-License-Identifier: Apache-2.0
"""Settings that differ between a checkpoint and the run that resumes from it. Pure; needs no torch.

A change is *dangerous* when it would silently make a different run: another model, other data, another order. Those are
refused unless `--override` names them. Others (the layout, the learning rate, the interval between checkpoints) may be
intended, and are logged.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Optional

from megatron.errors import SettingsError, UsageError, did_you_mean
from megatron.model.recipe import facts_of, recipe_of
from megatron.optimizer.resumed_schedule import FOLLOWING, SCHEDULE
from megatron.settings.declare import ON_RESUME, dashed
from megatron.settings.dialects.hints import as_overrides
from megatron.settings.schema import GROUPS, Config, Optimizer

# The meaning of a changed setting if its field has no `on_resume`. Settings of other groups are irrelevant.
BY_GROUP = dict.fromkeys(("model", "data", "batch", "optimizer", "precision", "guard", "distillation"), "logged")
MODEL, REFUSED, REFUSED_IN_TRAINING, LOGGED, _ = ON_RESUME
DANGEROUS = (MODEL, REFUSED)
DATA_PATHS = {"data_path", "train_data_path", "valid_data_path", "test_data_path"}
VOCABULARY = {"vocab_file", "merge_file", "tokenizer_model"}  # paths: the same file may lie elsewhere
ANOTHER_MODEL = (
    "the checkpoint is of another model than the settings",
    "give the checkpoint's settings, or another --load",
)
# Settings that --finetune changes on purpose: lengths, linear layers of other kinds (which have notes of their own), and
# those that matter in training alone.
INTENDED = re.compile(
    "seq_length|max_position|linear|kd_|model_name|init_method|moe_(aux|z_loss|input_jitter|router_(load|bias|force))|"
    ".*([ld]ora|quantiz|_bits|preprocess|sparsity|dropout|smoothing|_loss)"
)
ORDER = "data-order"  # the name in `--override` for samples other than those of the earlier run


class Change(NamedTuple):
    """A setting whose value changed."""

    name: str
    was: Any
    now: Any
    what: str  # one of ON_RESUME

    @property
    def dangerous(self) -> bool:
        return self.what in DANGEROUS

    def __str__(self) -> str:
        return f"{dashed(self.name)} was {self.was} in the checkpoint, is {self.now} now"


def changes(config: Config, saved: dict[str, dict]) -> list[Change]:
    """All changes that may matter, dangerous ones first.

    A setting that the checkpoint does not know had its default then; those of groups that only one side has are ignored.
    """
    result, now = [], config.to_record()
    before = {**saved, **saved.get("extra", {})}
    here = {**now, **now["extra"]}
    idle = ("optimizer",) if config.batch.skip_train else ()  # groups that have no effect here
    for group, name, what, default in meanings(config):
        if what != "irrelevant" and group not in idle and group in before:
            value = here[group][name]
            # Of a recipe's own settings, as of those whose default is derived (None), it is not known.
            unknown = group in config.extra or default in (MISSING, None)
            was = before[group].get(name, value if unknown else default)
            if name == "tokenizer_type" and was is None:  # earlier versions did not record what the files imply
                continue
            if what == REFUSED_IN_TRAINING:
                what = LOGGED if config.batch.skip_train else REFUSED
            if _plain(was) != _plain(value) and not (name in DATA_PATHS and _places(was) == _places(value)):
                result.append(Change(name, was, value, what))
    return sorted(result, key=lambda change: not change.dangerous)


def meanings(config: Config) -> Iterator[tuple[str, str, str, Any]]:
    """List what a change of each setting means: (group, setting, one of ON_RESUME, default), including the recipe's own
    groups.
    """
    groups = {name: (getattr(config, name), BY_GROUP.get(name, "irrelevant")) for name in GROUPS}
    groups |= {name: (group, "refused") for name, group in config.extra.items()}
    for name, (group, default) in groups.items():
        for field in fields(group):
            what = field.metadata.get("on_resume", default)
            assert what in ON_RESUME, f"{field.name}: on_resume {what}"
            yield name, field.name, what, field.default


def overridden(config: Config) -> set[str]:
    """The names in `--override`. Raises UsageError for a name that is not a dangerous setting."""
    words = (config.guard.override or "").split(",")
    names = {word.strip().lstrip("-").replace("-", "_") for word in words} - {""}
    known = {name for _, name, what, _ in meanings(config) if what in (*DANGEROUS, REFUSED_IN_TRAINING)} | {
        ORDER.replace("-", "_")
    }
    for name in sorted(names - known):
        raise UsageError(
            f"--override {name}: this setting needs no override, or does not exist{did_you_mean(name, known)}",
            do="names: " + ", ".join(sorted(word.replace("_", "-") for word in known)),
        )
    return names


def same_vocabulary(record: Mapping[str, Any], vocabulary: Sequence[str]) -> bool:
    """Whether a checkpoint has the vocabulary of one of these fingerprints. None of them: tokens are plain numbers."""
    return record.get("vocabulary") in vocabulary


def refuse_another_model(config: Config, saved: dict[str, dict]) -> None:
    """Raise SettingsError if a checkpoint's weights belong to another model than the settings describe."""
    allowed = overridden(config)
    other = [change for change in changes(config, saved) if change.what == MODEL and change.name not in allowed]
    what, do = ANOTHER_MODEL
    if any(change.name == "num_experts" and (change.was or 1) < 2 <= (change.now or 1) for change in other):
        do += "; to make experts of a dense model, add --moe-use-upcycling --finetune"
    _refuse(config, other, what, do)


def refuse_another_run(config: Config, saved: dict[str, dict], same_words: bool = False) -> None:
    """Raise SettingsError for every dangerous change that `--override` does not name.

    same_words: the vocabulary files have the same contents, whatever their paths
    """
    refuse_another_model(config, saved)
    dangerous = [change for change in changes(config, saved) if change.dangerous]
    _refuse(config, [change for change in dangerous if _reshapes(config, change)], *ANOTHER_MODEL)
    allowed = overridden(config) | (VOCABULARY if same_words else set())
    refused = [change for change in dangerous if change.name not in allowed]
    names = ",".join([*(change.name.replace("_", "-") for change in refused), *_with_other_samples(config, refused)])
    anew = "--finetune, which begins a new run with the weights"
    do = f"give the checkpoint's settings, or --override {names} to continue with these, or {anew}"
    if any(change.name == "kd_hidden_projections" for change in refused):  # other weights: --override is not enough
        do = f"give --teacher-load and --kd-hidden-layers as before; or {anew}"
    data = saved.get("data", {})
    if "data_path" in names.replace("-", "_") and not any(data.get(name) for name in (*DATA_PATHS, "mock_data")):
        do = "--finetune: the checkpoint holds a model alone, as from-hf writes it, and --finetune begins a run with it"
    _refuse(config, refused, "the checkpoint is of a run with other settings, on which the results depend", do)


def _reshapes(config: Config, change: Change) -> bool:
    """Whether a change alters the shape of weights, so that --override cannot make them fit."""
    if change.what == MODEL or not hasattr(config.model, change.name):
        return False
    try:
        before, now = (facts_of(one, 1).weights for one in (config.derive("", **{change.name: change.was}), config))
    except (TypeError, ValueError, ArithmeticError, AttributeError):  # the record has no value of this setting
        return False
    return any(name in now and now[name].shape != weight.shape for name, weight in before.items())


def refuse_other_rows(config: Config, was: Optional[int], now: int) -> None:
    """Raise SettingsError if a checkpoint's embedding has another number of rows than this run's."""
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
    """Raise SettingsError if a checkpoint's optimizer state belongs to another update rule."""
    was, now = (Optimizer(optimizer=name).rule for name in (_optimizer(saved), config.optimizer.optimizer))
    if was != now:
        raise SettingsError(
            f"--optimizer {now} cannot resume from the state of {was} in the checkpoint",
            "the two keep different state for each weight",
            f"give --optimizer {was}; or --no-load-optim, which loads the weights and reinitializes the optimizer state",
        )


def _optimizer(saved: dict[str, dict]) -> str:
    return saved.get("optimizer", {}).get("optimizer", "adam")


def _with_other_samples(config: Config, refused: list[Change]) -> list[str]:
    """[ORDER] if these changes also change the samples: then `--override` must name it too."""
    # Not the paths of data files: another path may hold the same data, so their samples are compared later.
    deciding = {"seed", "seq_length", "split", "mock_data", "dataset_type", "dataloader_type", "tokenizer_type"}
    deciding |= {"vocab_size"}
    if recipe_of(config).own_data:
        deciding |= {field.name for group in config.extra.values() for field in fields(group)}
    return [ORDER] if any(change.name in deciding for change in refused) else []


def change_messages(config: Config, saved: dict[str, dict], same_words: bool = False) -> list[str]:
    """A sentence for each change that does not stop the run.

    Changed defaults of the schedule are not listed here: `resumed_schedule.drift` reports their effect.
    """
    logged = [change for change in changes(config, saved) if config.given(change.name) or change.name not in FOLLOWING]
    return [f"{change}{_because(config, change, same_words)}" for change in logged]


def other_arithmetic(config: Config, saved: dict[str, dict]) -> list[str]:
    """A sentence for each setting with which a run that takes only a checkpoint's weights computes something else.

    Such a run (--finetune) may change them, as it does for longer sequences; or its command left one out by mistake.
    """
    computed = [one for one in changes(config, saved) if one.what == REFUSED and hasattr(config.model, one.name)]
    return [f"{one}: loaded weights compute something else" for one in computed if not INTENDED.match(one.name)]


def _because(config: Config, change: Change, same_words: bool) -> str:
    if same_words and change.name in VOCABULARY:
        return ": the same vocabulary"
    if config.checkpoint.resume_schedule == "checkpoint" and change.name in SCHEDULE:
        return ": the checkpoint's is followed (--resume-schedule)"
    return " (--override)" if change.dangerous else ""


def probe_places(consumed: int, count: int = 8) -> list[int]:
    """Places in the order of training, spread over the consumed samples. The samples there identify a run's data."""
    return sorted({consumed * number // count for number in range(count)}) if consumed else []


def refuse_other_samples(config: Config, wrong: Collection[int], lengths: str = "") -> Iterable[str]:
    """Raise SettingsError if the samples at these places differ from the earlier run's.

    Returns a warning instead if `--override` allows it, or if nothing is trained (--skip-train).
    lengths: the lengths of training that keep the samples, such as `--train-iters 20 to 31`, if this length does not
    """
    if not wrong:
        return []
    what = f"the samples of this run's past steps differ from the checkpoint's (at {', '.join(map(str, wrong))})"
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


def _refuse(config: Config, refused: list[Change], what: str, do: str) -> None:
    if refused:
        lines = [
            f"{dashed(one.name)}: {one.was} in the checkpoint, {one.now} now{_whence(config, one)}" for one in refused
        ]
        own = as_overrides((config.given(one.name), one.was) for one in refused)
        raise SettingsError(what, "\n  ".join(lines), f"say {own}; or {do}" if own else do)


def _whence(config: Config, change: Change) -> str:
    """The flag to change if the setting itself was not given."""
    length = config.given("seq_length")
    if change.name != "max_position_embeddings" or config.given(change.name) or not length:
        return ""
    return f", as {length.words} is given alone; to keep the positions, add {dashed(change.name)} {change.was}"


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON: checkpoints contain settings as JSON."""
    return list(value) if isinstance(value, tuple) else value


def _places(value: Any) -> Any:
    """Paths of data, of this folder or whole, however they are written: data and ./data are one."""
    if isinstance(value, (list, tuple)):
        return [_places(one) for one in value]
    return os.path.abspath(value) if isinstance(value, str) and "://" not in value else value
