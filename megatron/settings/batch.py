# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and the number of steps, as functions of the consumed samples.

These functions keep no state, so a resumed run needs none. With `--rampup-batch-size 16 16 1000 --global-batch-size 64`
the batch is 16, 32, 48 for a third of 1000 samples each, then 64:

    >>> batch = Batch(micro_batch_size=4, global_batch_size=64, rampup_batch_size=[16, 16, 1000], train_samples=2000)
    >>> [batch_size(batch, 2, consumed) for consumed in (0, 333, 334, 999, 1001)]
    [(16, 2), (16, 2), (32, 4), (48, 6), (64, 8)]
    >>> total_iterations(batch, 2)
    54

`--step-batch-size-schedule "0:16 1M:32"` gives the size from each number of tokens on; `in_samples` turns it into samples.
"""

from bisect import bisect_right
from functools import cache
from typing import NamedTuple, Optional

from megatron.errors import SettingsError
from megatron.settings.rules import out_of_range
from megatron.settings.schema import Batch, Config, Derivation
from megatron.settings.statements import in_users_words

SUFFIXES = dict(K=10**3, M=10**6, B=10**9, T=10**12)


class BatchPhase(NamedTuple):
    """Steps of one size. start: the first number of consumed samples; size: samples of a step"""

    start: int
    size: int


def batch_size(batch: Batch, dp: int, consumed: int) -> tuple[int, int]:
    """(global batch size, micro-batches per rank) of the next step, after `consumed` samples.

    dp: data parallel size. The settings must pass `problems`. The values equal those of Megatron-LM's calculators.
    """
    phases = phases_of(batch, dp)
    size = phases[bisect_right(phases, consumed, key=lambda phase: phase.start) - 1].size
    return size, size // (batch.micro_batch_size * dp)


def phases_of(batch: Batch, dp: int) -> tuple[BatchPhase, ...]:
    """The global batch sizes of a run, in order; the first phase starts at 0, the last has no end."""
    return _phases(batch.full_size(dp), tuple(batch.rampup_batch_size or ()), batch.step_batch_size_schedule)


@cache
def _phases(full: int, ramp: tuple[int, ...], schedule: Optional[str]) -> tuple[BatchPhase, ...]:
    if schedule:
        return schedule_phases(schedule)
    # A ramp-up that starts at the full size has no increments (Megatron-LM divides by zero here).
    if not ramp or ramp[0] == full:
        return (BatchPhase(0, full),)
    start, increment, samples = ramp
    increments = (full - start) // increment
    per_increment = samples / increments  # Megatron-LM's arithmetic, in floating point
    phases = []
    for number in range(increments + 1):
        first = int(number * per_increment)
        while int(first / per_increment) < number:
            first += 1
        phases.append(BatchPhase(first, start + number * increment))
    last = BatchPhase(samples + 1, full)  # the ramp-up ends with the first step that begins after its samples
    return (*(phase for phase in phases if phase.start < last.start), last)


def schedule_phases(text: str, seq_length: Optional[int] = None) -> tuple[BatchPhase, ...]:
    """The phases of --step-batch-size-schedule: entries THRESHOLD:SIZE, as in Megatron-LM.

    seq_length: tokens of a sample; without it, thresholds are those of `in_samples`. Raises ValueError with the problem.

    >>> schedule_phases("0:16, 1.5K:32", seq_length=100)
    (BatchPhase(start=0, size=16), BatchPhase(start=15, size=32))
    """
    phases = []
    for entry in text.replace(",", " ").split():
        threshold, colon, size = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry} is not THRESHOLD:SIZE")
        in_samples = threshold.endswith("samples")
        start = _count(threshold.removesuffix("samples"), entry)
        if not in_samples and start:
            if seq_length is None:
                raise ValueError(f"{entry}: tokens, and no --seq-length")
            start //= seq_length
        phases.append(BatchPhase(start, _count(size, entry)))
    phases.sort()
    if not phases or phases[0].start:
        raise ValueError("the first threshold has to be 0")
    if any(phase.size < 1 for phase in phases):
        raise ValueError("sizes have to be at least 1")
    for before, after in zip(phases, phases[1:]):
        if before.start == after.start:
            raise ValueError(f"two sizes, {before.size} and {after.size}, from sample {after.start} on")
    return tuple(phases)


def _count(text: str, entry: str) -> int:
    """A number with a suffix of SUFFIXES. entry: what it is part of, for the message"""
    unit = text[-1:].upper()
    try:
        count = int(float(text[:-1] if unit in SUFFIXES else text) * SUFFIXES.get(unit, 1))
    except (ValueError, OverflowError):
        count = -1
    if count < 0:
        raise ValueError(f"{entry}: {text!r} is not a number, such as 0, 250000 or 1.5B")
    return count


def _schedule_in_samples(config: Config) -> Config:
    """The settings with thresholds of --step-batch-size-schedule in samples, and its last size as the global batch."""
    text = config.batch.step_batch_size_schedule
    try:
        phases = schedule_phases(text, config.model.seq_length)
    except ValueError as problem:
        raise SettingsError(in_users_words(_no_schedule(text, problem), config.statements)) from None
    in_samples = " ".join(f"{phase.start}samples:{phase.size}" for phase in phases)
    size = config.batch.global_batch_size or phases[-1].size
    flag = "--step-batch-size-schedule"
    return config.derive(flag, step_batch_size_schedule=in_samples, global_batch_size=size)


SCHEDULE_IN_SAMPLES = Derivation(
    "step_batch_size_schedule seq_length global_batch_size",
    "step_batch_size_schedule global_batch_size",
    _schedule_in_samples,
    cause="step_batch_size_schedule",
)


def total_iterations(batch: Batch, dp: int, iteration: int = 0, consumed: int = 0) -> int:
    """Steps of the whole run: `--train-iters`, or those that fit into `--train-samples`.

    iteration, consumed: completed steps, and their samples, with any batch sizes. A run that resumes with another batch
    size makes as many steps as its batches fit into the remaining samples.
    A last, partial batch is dropped, except that a ramp-up continues to its end, as in Megatron-LM.
    Raises ValueError if neither length is set.

    >>> total_iterations(Batch(micro_batch_size=4, global_batch_size=16, train_samples=160), 1, iteration=10, consumed=80)
    15
    """
    if batch.train_iters is not None:
        return batch.train_iters
    return iteration + _totals(batch, dp, consumed)[0]


def total_samples(batch: Batch, dp: int) -> int:
    """Number of samples that the whole run trains on: the required size of the training dataset."""
    return max(batch.train_samples or 0, _totals(batch, dp)[1])


def samples_left_out(batch: Batch, dp: int, consumed: int) -> int:
    """Remaining samples of `--train-samples` that do not fill a batch, after `consumed` samples.

    >>> samples_left_out(Batch(global_batch_size=8, train_samples=30), 1, 8)
    6
    """
    return max(0, batch.train_samples - _totals(batch, dp, consumed)[1])


def ended_epoch(batch: Batch, before: int, after: int, last: bool) -> int:
    """The number of the epoch, from 1, that ended in a step from `before` to `after` consumed samples; 0: none did.

    Requires `--train-epochs`. last: this is the last step, which ends the last epoch even if samples are left over.

    >>> batch = Batch(global_batch_size=8, train_samples=30, train_epochs=3)
    >>> [ended_epoch(batch, consumed, consumed + 8, consumed == 16) for consumed in (0, 8, 16)]
    [0, 1, 3]
    """
    done = batch.train_epochs if last else after * batch.train_epochs // batch.train_samples
    return done if done > before * batch.train_epochs // batch.train_samples else 0


def _totals(batch: Batch, dp: int, consumed: int = 0) -> tuple[int, int]:
    """(remaining steps after `consumed` samples, samples consumed after the last of them)."""
    if batch.train_iters is not None:
        return batch.train_iters, batch.train_iters * batch.full_size(dp)
    if batch.train_samples is None:
        raise ValueError("neither --train-iters nor --train-samples is given")
    steps, phases = 0, phases_of(batch, dp)
    for phase, following in zip(phases, (*phases[1:], None)):
        rest = batch.train_samples - consumed
        count = most = max(0, rest) // phase.size
        if following:
            if batch.rampup_batch_size and rest >= 0:
                most += 1
            count = min(most, max(0, -(-(following.start - consumed) // phase.size)))
        steps, consumed = steps + count, consumed + count * phase.size
        if following and consumed < following.start:
            break
    return steps, consumed


def problems(batch: Batch, dp: int) -> list[str]:
    """The problems of these settings on `dp` data parallel ranks, one sentence each; empty if they are valid.

    >>> problems(Batch(micro_batch_size=4, global_batch_size=30), 2)
    ['--global-batch-size 30 is not a multiple of --micro-batch-size 4 x data parallel size 2 = 8; nearest: 24, 32']
    """
    errors = list(out_of_range(batch).values())
    if batch.train_iters is not None and batch.train_samples is not None:
        errors.append(f"--train-iters {batch.train_iters} and --train-samples {batch.train_samples}: give one of them")
    if batch.train_epochs is not None and batch.train_iters is not None:
        errors.append(f"--train-iters {batch.train_iters} and --train-epochs {batch.train_epochs}: give one of them")
    if errors:
        return errors
    step = batch.micro_batch_size * dp
    full = batch.full_size(dp)
    if batch.local_batch_size and not batch.global_batch_size:
        micro = batch.micro_batch_size
        errors += _not_multiple("--local-batch-size", batch.local_batch_size, micro, micro, None)
    else:
        errors += _not_multiple("--global-batch-size", full, step, batch.micro_batch_size, dp)
    for flag, asserted, unit, each in (
        ("--local-batch-size", batch.local_batch_size, dp, f"{dp} data parallel ranks"),
        (
            "--gradient-accumulation-steps",
            batch.gradient_accumulation_steps,
            step,
            f"--micro-batch-size {batch.micro_batch_size} x data parallel size {dp}",
        ),
    ):
        if asserted and asserted * unit != full:
            errors.append(f"{flag} {asserted} is not {full} samples / ({each}) = {full / unit:g}; leave it out")
    errors += _rampup_problems(batch, dp, step) + _schedule_problems(batch, dp, step)
    if not (errors or batch.skip_train) and batch.train_samples is not None and not total_iterations(batch, dp):
        of = f" (of --train-epochs {batch.train_epochs})" if batch.train_epochs else ""
        errors.append(
            f"{batch.train_samples} training samples{of} do not fill a batch of --global-batch-size {full}: there would "
            "be no step; lower it, or train on more"
        )
    return errors


def _rampup_problems(batch: Batch, dp: int, step: int) -> list[str]:
    if batch.rampup_batch_size is None:
        return []
    values = batch.rampup_batch_size
    flag = "--rampup-batch-size " + " ".join(map(str, values))
    if len(values) != 3 or values[0] < 1 or values[1] < 1 or values[2] < 0:
        return [f"{flag}: expected START INCREMENT SAMPLES, three numbers above zero, such as 16 16 100000"]
    start, increment, samples = values
    full = batch.full_size(dp)
    errors = []
    if batch.train_samples is None:
        errors.append(f"{flag} needs --train-samples instead of --train-iters: steps have no fixed number of samples")
    if start > full:
        errors.append(f"{flag}: start {start} is above --global-batch-size {full}")
    elif (full - start) % increment:
        good = [n for n in range(1, full - start + 1) if (full - start) % n == 0 and n % step == 0]
        near = min(good, key=lambda n: abs(n - increment), default=full - start)
        errors.append(
            f"{flag}: increments of {increment} do not lead from {start} to --global-batch-size {full}; "
            f"an increment of {near} would"
        )
    errors += _not_multiple(f"{flag}: start", start, step, batch.micro_batch_size, dp)
    if start < full:
        errors += _not_multiple(f"{flag}: increment", increment, step, batch.micro_batch_size, dp)
        if samples == 0:
            errors.append(f"{flag}: a ramp-up over 0 samples; leave the flag out")
    return errors


def _schedule_problems(batch: Batch, dp: int, step: int) -> list[str]:
    flag, text = "--step-batch-size-schedule", batch.step_batch_size_schedule
    if text is None:
        return []
    if batch.rampup_batch_size:
        return [f"{flag} and --rampup-batch-size: give one of them"]
    try:
        phases = schedule_phases(text)
    except ValueError as problem:
        return [_no_schedule(text, problem)]
    errors = []
    if batch.train_samples is None:
        errors.append(f"{flag} needs --train-samples instead of --train-iters: steps have no fixed number of samples")
    if batch.global_batch_size and batch.global_batch_size != phases[-1].size:
        given = f"--global-batch-size {batch.global_batch_size}"
        errors.append(f"{flag} ends with {phases[-1].size}, not {given}; leave that out")
    for phase in phases:
        what = f"{flag}: from sample {phase.start} on, size"
        errors += [
            f"{one}; a run that has passed this entry can leave it out"
            for one in _not_multiple(what, phase.size, step, batch.micro_batch_size, dp)
        ]
    return errors


def _no_schedule(text: str, problem: ValueError) -> str:
    return (
        f'--step-batch-size-schedule "{text}": {problem}; expected entries THRESHOLD:SIZE, thresholds in tokens, such as '
        '"0:768 250B:1536"'
    )


def _not_multiple(what: str, value: int, step: int, micro: int, dp: int | None) -> list[str]:
    if value % step == 0:
        return []
    near = [str(n) for n in (value // step * step, value // step * step + step) if n]
    return [
        f"{what} {value} is not a multiple of --micro-batch-size {micro}"
        f"{f' x data parallel size {dp} = {step}' if dp else ''}; nearest: {', '.join(near)}"
    ]
