# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay of a run that resumes from a checkpoint. Needs no torch.

Some lengths of the schedule depend on other settings unless flags set them. The decay ends with the training, a warm-up by
--lr-warmup-fraction is a share of the decay, weight decay grows over the whole training, and the batch grows with the
ranks. So a command that only extends the training changes all upcoming learning rates. `drift` reports such changes, and
`follow` uses the checkpoint's schedule if --resume-schedule asks for it.

    trained 10 steps, then --train-iters 20:   command      warm-up and decay of 20 steps, from step 11 on
                                               checkpoint   the rest of the decay of 10 steps: --min-lr
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, Optional

from megatron.errors import SettingsError
from megatron.optimizer.lr_schedule import Lengths
from megatron.settings.declare import dashed
from megatron.settings.schema import Batch, Config, Optimizer
from megatron.settings.spelling import Setting, settings_of

# What Megatron-LM's --use-checkpoint-opt_param-scheduler takes from the checkpoint, under this suite's names.
SCHEDULE = (
    "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction "
    "lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay start_weight_decay "
    "end_weight_decay weight_decay_incr_style lr_step_unit"
).split()
FOLLOWING = ("lr_decay_iters", "lr_decay_samples", "global_batch_size")  # they get values even if no flag sets them


class Drift(NamedTuple):
    """A length that differs from the checkpoint's, in words. flag: the flag that restores the checkpoint's, or empty."""

    what: str
    flag: str
    of_schedule: bool = True

    def __str__(self) -> str:
        return f"{self.what}{self.flag and f' ({self.flag})'}"


def follow(config: Config, record: Mapping[str, Any], dp: int) -> tuple[Config, Lengths]:
    """The settings with the schedule of the resumed run, and its lengths. record: a checkpoint's state.

    Raises SettingsError if --resume-schedule asks for the checkpoint's schedule and it has none.
    """
    now = Lengths.of(config.optimizer, config.batch, dp)
    if config.checkpoint.resume_schedule != "checkpoint":
        return config, now
    then, saved = lengths_of(record), _saved(record, "optimizer")
    own = {name: saved[name] for name in SCHEDULE if name in saved}
    kinds = {setting.name: setting for setting in settings_of({"optimizer": type(config.optimizer)})}
    if then is None or own.get("lr") is None or not all(is_value(kinds[name], value) for name, value in own.items()):
        raise SettingsError(
            "--resume-schedule checkpoint: the checkpoint has no schedule",
            do="leave it out to use the schedule of the command",
        )
    return config.derive("--resume-schedule checkpoint", **own), then


def lengths_of(record: Mapping[str, Any]) -> Optional[Lengths]:
    """The lengths of the schedule that a checkpoint was trained with; None if it does not contain them."""
    try:
        if "lengths" in record:
            lengths = Lengths(**record["lengths"])
        else:  # of an earlier version
            optimizer, batch = _group(Optimizer, record), _group(Batch, record)
            lengths = Lengths.of(optimizer, batch)
        numbers = (lengths.warmup, lengths.decay, lengths.total, lengths.anneal or 0, lengths.epoch or 0)
        return lengths if all(type(n) in (int, float) and 0 <= n < 1 << 63 for n in numbers) else None
    except (TypeError, ValueError, AttributeError, LookupError, OverflowError):
        return None  # settings of a run that was never trained, or damage


def drift(config: Config, record: Mapping[str, Any], dp: int) -> list[Drift]:
    """The lengths of schedule and batch that changed although no flag set them.

    Lengths without effect on a curve are left out. Lengths that a flag changed are left out too: they are reported one by
    one, like all changed settings.
    """
    then, now, o = lengths_of(record), Lengths.of(config.optimizer, config.batch, dp), config.optimizer
    if then is None:
        return []
    drifts, size = [], config.batch.full_size(dp)
    size_then = _saved(record, "batch").get("global_batch_size")
    size_then = size_then if type(size_then) is int and size_then > 0 else size
    if size != size_then and not config.given("global_batch_size"):
        words = f"a step has {size} samples, {size_then} in the checkpoint"
        drifts.append(Drift(words, f"--global-batch-size {size_then}", of_schedule=False))
    else:
        size_then = size  # lengths in steps are compared in samples, on which learning rates depend
    iters = config.batch.train_iters is not None
    unit, each, each_then = ("iters", size, size_then) if iters else ("samples", 1, 1)

    def compare(what: str, length: str, setting: Optional[str]) -> None:
        was, is_now = (getattr(then, length) or 0) / each_then, (getattr(now, length) or 0) / each
        if was == is_now or setting and _changed(config, record, setting):
            return
        flag = f"{dashed(setting)} {was:.0f}" if setting and was == int(was) else ""
        words = f"{what} {_plain(is_now)} {'steps' if iters else 'samples'}, {_plain(was)} in the checkpoint"
        drifts.append(Drift(words, flag))

    fraction, falls = o.lr_warmup_fraction is not None, o.lr_decay_style != "constant"
    if falls or fraction:
        what = "the learning rate falls over" if falls else "the warm-up is a share of"
        compare(what, "decay", f"lr_decay_{unit}")
    if not fraction:
        compare("the learning rate warms up over", "warmup", f"lr_warmup_{unit}")
    if o.lr_decay_style == "WSD":
        compare("WSD anneals over", "anneal", f"lr_wsd_decay_{unit}")
    if o.weight_decay_incr_style != "constant" and o.start_weight_decay != o.end_weight_decay:
        compare("the weight decay grows over", "total", None)
    return drifts


def drift_message(drifts: list[Drift], chosen: Optional[str]) -> str:
    """One message for all drifts. chosen: --resume-schedule."""
    words = "not as in the resumed run: "
    if not any(one.of_schedule for one in drifts) or chosen:
        return words + "; ".join(map(str, drifts))
    flags = " ".join(one.flag for one in drifts if one.flag)
    return (
        f"{words}{'; '.join(one.what for one in drifts)}. This run follows the command (if that is intended: "
        f"--resume-schedule command). To continue as before: {flags + ', or ' if flags else ''}--resume-schedule checkpoint"
    )


def _changed(config: Config, record: Mapping[str, Any], name: str) -> bool:
    """Whether the user gave this setting another value than the checkpoint's."""
    return config.given(name) is not None and getattr(config.optimizer, name) != _saved(record, "optimizer").get(name)


def _plain(length: float) -> str:
    return f"{length:.0f}" if length == int(length) else f"{length:.2f}"


def is_value(setting: Setting, value: object) -> bool:
    """Whether a setting may have this value: a damaged checkpoint may contain anything."""
    if value is None:
        return setting.optional
    if isinstance(setting.kind, tuple):
        return value in setting.kind
    return type(value) in (int, float) and 0 <= value < math.inf


def _saved(record: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    groups = record.get("config")
    saved = groups.get(group) if isinstance(groups, Mapping) else None
    return saved if isinstance(saved, Mapping) else {}


def _group(kind: type, record: Mapping[str, Any]):
    known = {field.name for field in fields(kind)}
    name = kind.__name__.lower()
    return kind(**{key: value for key, value in _saved(record, name).items() if key in known})
