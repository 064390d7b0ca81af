# SPDX-License-Identifier: Apache-2.0
"""Learning rate and weight decay as functions of the number of trained samples.

Every length is measured in samples, so a ramp-up of the batch size stretches the curves and does not change their shape.
A step whose gradients overflowed (fp16) is not counted. Values equal Megatron-LM's: the first step trains with the
rate at 0 samples, the second with the rate at one batch, and so on.

    >>> settings = Optimizer(lr=1.0, min_lr=0.1, lr_decay_style="cosine", lr_warmup_iters=10)
    >>> lengths = Lengths.of(settings, Batch(global_batch_size=8, train_iters=100), dp=1)
    >>> [round(learning_rate(settings, lengths, 8 * step), 4) for step in (0, 5, 10, 55, 100, 101)]
    [0.0, 0.5, 1.0, 0.55, 0.1, 0.1]
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Optional, TypeAlias

from megatron.settings.declare import dashed
from megatron.settings.schema import Batch, Optimizer

Curve: TypeAlias = Callable[[float], float]


@dataclass(frozen=True)
class Lengths:
    """The lengths of the phases of a run, in samples. `warmup` may be fractional (a share of `decay`)."""

    warmup: float
    decay: int
    anneal: Optional[int]  # the last part of WSD
    total: int  # weight decay changes over it
    epoch: Optional[float] = None  # the rate changes only at its multiples (--lr-step-unit epoch)

    @classmethod
    def of(cls, settings: Optimizer, batch: Batch, dp: int = 1) -> "Lengths":
        """The lengths of a run. Flags count steps with --train-iters, samples with --train-samples, either with
        --train-epochs.
        """
        size = batch.full_size(dp)
        if batch.train_iters is not None:
            total = batch.train_iters * size
            decay = total if settings.lr_decay_iters is None else settings.lr_decay_iters * size
            warmup = settings.lr_warmup_iters * size
            anneal = None if settings.lr_wsd_decay_iters is None else settings.lr_wsd_decay_iters * size
        else:
            total = batch.train_samples
            in_samples = lambda steps, samples: steps * size if samples is None and steps is not None else samples
            decay = in_samples(settings.lr_decay_iters, settings.lr_decay_samples)
            decay = total if decay is None else decay
            warmup = settings.lr_warmup_samples or settings.lr_warmup_iters * size
            anneal = in_samples(settings.lr_wsd_decay_iters, settings.lr_wsd_decay_samples)
        if settings.lr_warmup_fraction is not None:
            warmup = settings.lr_warmup_fraction * decay
            if settings.lr_decay_style == "linear-from-start":  # PaddleFleetX warms up for whole steps
                warmup = math.floor(settings.lr_warmup_fraction * (decay / size)) * size
        by_epoch = settings.lr_step_unit == "epoch" and batch.train_epochs
        epoch = total / batch.train_epochs if by_epoch else None
        return cls(warmup, decay, anneal, total, epoch)


def learning_rate(settings: Optimizer, lengths: Lengths, samples: int) -> float:
    """The learning rate of the step that starts after `samples` samples."""
    highest, lowest = settings.lr, settings.min_lr
    if lengths.epoch:
        samples = math.floor(samples / lengths.epoch) * lengths.epoch
        if samples < lengths.warmup:  # the first of w warm-up epochs has 1/(w+1) of the rate, not 0
            share = (samples + lengths.epoch) / (lengths.warmup + lengths.epoch)
            return settings.lr_warmup_init + (highest - settings.lr_warmup_init) * share
    from_start = settings.lr_decay_style == "linear-from-start"
    if lengths.warmup > 0 and samples <= lengths.warmup and not (from_start and samples == lengths.warmup):
        return settings.lr_warmup_init + (highest - settings.lr_warmup_init) * samples / lengths.warmup
    if settings.lr_decay_style == "constant":
        return highest
    if samples > lengths.decay:
        return lowest
    if settings.lr_decay_style == "inverse-square-root":
        return max(lowest, highest * max(lengths.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    if from_start:  # PaddleFleetX's LinearDecayWithWarmup: after a warm-up of 10 % the rate is 90 %, and not 100 %
        share = CURVES["linear"](samples / lengths.decay)
    elif settings.lr_decay_style == "WSD":
        share = _annealed_share(curves_of(settings)[settings.lr_wsd_decay_style], lengths, samples)
    else:
        done = (samples - lengths.warmup) / (lengths.decay - lengths.warmup)
        share = curves_of(settings)[settings.lr_decay_style](done)
    return lowest + share * (highest - lowest)


def zero_to_the_end(settings: Optimizer, lengths: Lengths, samples: int) -> bool:
    """Whether the rate is 0 from `samples` samples to the end of the run. Checked at 32 points."""
    rest = range(samples, max(samples, lengths.total) + 1, max(1, (lengths.total - samples) // 32))
    return not any(learning_rate(settings, lengths, place) for place in rest)


def decoupled_learning_rate(settings: Optimizer, lengths: Lengths, samples: int) -> Optional[float]:
    """The rate of input and output embeddings: the same curve between its own bounds; None without --decoupled-lr."""
    if settings.decoupled_lr is None:
        return None
    lowest = settings.min_lr if settings.decoupled_min_lr is None else settings.decoupled_min_lr
    return learning_rate(replace(settings, lr=settings.decoupled_lr, min_lr=lowest), lengths, samples)


def _annealed_share(curve: Curve, lengths: Lengths, samples: int) -> float:
    """Warm-up, Stable, Decay (arXiv:2404.06395, section 4): flat until the annealing starts."""
    into = samples - (lengths.decay - lengths.anneal)
    return 1.0 if into <= 0 else curve(into / lengths.anneal)


# The remaining share of (highest - lowest) after a share x of the decay: from 1 at x = 0 to 0 at x = 1.
CURVES: dict[str, Curve] = {
    "linear": lambda x: 1.0 - x,
    "cosine": lambda x: 0.5 * (math.cos(math.pi * x) + 1.0),
    "exponential": lambda x: 2.0 * 0.5**x - 1.0,
    "minus_sqrt": lambda x: 1.0 - math.sqrt(x),
}


def curves_of(settings: Optimizer) -> dict[str, Curve]:
    """All curves that settings may name, including those of the recipe (`Recipe.schedules`)."""
    return {**CURVES, **settings.own_schedules}


# values of --lr-decay-style with a formula of their own
WITHOUT_CURVE = ("constant", "inverse-square-root", "WSD", "linear-from-start")


def weight_decay(settings: Optimizer, lengths: Lengths, samples: int) -> float:
    """The weight decay of the step that starts after `samples` samples."""
    start, end = _weight_decay_ends(settings)
    if settings.weight_decay_incr_style == "constant" or samples > lengths.total:
        return end
    return start + CURVES[settings.weight_decay_incr_style](1.0 - samples / lengths.total) * (end - start)


def _weight_decay_ends(settings: Optimizer) -> tuple[float, float]:
    given = (settings.start_weight_decay, settings.end_weight_decay)
    if settings.weight_decay_incr_style == "constant" or None in given:
        return settings.weight_decay, settings.weight_decay
    return given


def problems(settings: Optimizer, batch: Batch, dp: int = 1) -> list[str]:
    """The problems of these settings, one sentence each, naming the flags; empty if there are none."""
    messages = _unit_problems(settings, batch) + _rate_problems(settings) + _weight_decay_problems(settings)
    messages += _curve_problems(settings)
    if messages or not batch.has_length:
        return messages
    lengths = Lengths.of(settings, batch, dp)
    if lengths.warmup >= lengths.decay > 0:
        size, unit = (batch.full_size(dp), "iters") if batch.train_iters is not None else (1, "samples")
        messages.append(
            f"warm-up of {lengths.warmup / size:g} {unit} is not shorter than the decay length of "
            f"{lengths.decay // size} {unit}; lower --lr-warmup-{unit} or raise --lr-decay-{unit}"
        )
    if settings.lr_decay_style == "WSD" and not lengths.anneal:
        messages.append("--lr-decay-style WSD needs --lr-wsd-decay-iters (or --lr-wsd-decay-samples) above zero")
    return messages


def _curve_problems(settings: Optimizer) -> list[str]:
    """Names of schedules that have no curve: training would fail after the warm-up."""
    named = {
        "--lr-decay-style": (settings.lr_decay_style, WITHOUT_CURVE),
        "--lr-wsd-decay-style": (settings.lr_wsd_decay_style, ()),
        "--weight-decay-incr-style": (settings.weight_decay_incr_style, ("constant",)),
    }
    curves = curves_of(settings)
    missing = [
        f"{flag} {name} has no curve: CURVES in megatron/optimizer/lr_schedule.py has {', '.join(CURVES)}"
        for flag, (name, others) in named.items()
        if name not in (*curves, *others)
    ]
    own = {name for name, _ in named.values()} & set(settings.own_schedules)
    return missing + [words for name in sorted(own) for words in _own_problems(name, settings.own_schedules[name])]


def _own_problems(name: str, curve: Curve) -> list[str]:
    """The problems of a recipe's schedule at its start, middle and end."""
    for done in (0.0, 0.5, 1.0):
        try:
            share = float(curve(done))
        except Exception as error:
            return [f"Recipe.schedules[{name!r}]({done:g}) raised {type(error).__name__}: {error}"]
        if not (math.isfinite(share) and share >= 0):
            return [
                f"Recipe.schedules[{name!r}]({done:g}) is {share}: it must be the remaining share of the rate, 0 or more"
            ]
    return []


def _unit_problems(settings: Optimizer, batch: Batch) -> list[str]:
    """Lengths in another unit than the run's, steps or samples. With epochs, each length may have either."""
    names, messages = ("lr-decay", "lr-warmup", "lr-wsd-decay"), []
    given = lambda name, unit: getattr(settings, f"{name.replace('-', '_')}_{unit}")
    if batch.train_epochs is not None:
        both = [name for name in names if given(name, "iters") and given(name, "samples")]
        messages = [f"--{name}-iters and --{name}-samples: give one" for name in both]
    elif batch.has_length:
        right, wrong = ("samples", "iters") if batch.train_iters is None else ("iters", "samples")
        messages = [
            f"--{name}-{wrong} does not go with --train-{right}: use --{name}-{right}"
            for name in names
            if given(name, wrong)
        ]
    for name in ("lr_warmup_iters", "lr_warmup_samples"):
        if settings.lr_warmup_fraction is not None and getattr(settings, name):
            messages.append(f"--lr-warmup-fraction and {dashed(name)} both set the warm-up: give one")
    return messages


def _rate_problems(settings: Optimizer) -> list[str]:
    messages = []
    if settings.lr is None:
        messages.append("--lr is missing: the highest learning rate, such as 3e-4")
        return messages
    ends = [("--lr", settings.lr, "--min-lr", settings.min_lr)]
    if settings.decoupled_lr is not None:
        own = settings.decoupled_min_lr
        low = ("--min-lr", settings.min_lr) if own is None else ("--decoupled-min-lr", own)
        ends.append(("--decoupled-lr", settings.decoupled_lr, *low))
    for flag, highest, low_flag, lowest in ends:
        for name, value in ((low_flag, lowest), ("--lr-warmup-init", settings.lr_warmup_init)):
            if not 0 <= value <= highest:
                messages.append(f"{name} {value:g} must lie between 0 and {flag} {highest:g}")
    return messages


def _weight_decay_problems(settings: Optimizer) -> list[str]:
    start, end = settings.start_weight_decay, settings.end_weight_decay
    style = f"--weight-decay-incr-style {settings.weight_decay_incr_style}"
    if settings.weight_decay_incr_style == "constant":
        if start is not None or end is not None:
            return [f"--start-weight-decay and --end-weight-decay have no effect with {style}: use --weight-decay"]
        return []
    if start is None or end is None:
        return [f"{style} needs both --start-weight-decay and --end-weight-decay"]
    if not 0 <= start <= end:
        return [f"--start-weight-decay {start:g} must lie between 0 and --end-weight-decay {end:g}"]
    return []
