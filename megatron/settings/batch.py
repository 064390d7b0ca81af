# SPDX-License-Identifier: Apache-2.0
"""Batch sizes and the number of steps, as functions of the consumed samples.

These functions keep no state, so a resumed run needs none. With `--rampup-batch-size 16 16 1000 --global-batch-size 64`
the batch is 16, 32, 48 for a third of 1000 samples each, then 64:

    >>> batch = Batch(micro_batch_size=4, global_batch_size=64, rampup_batch_size=[16, 16, 1000], train_samples=2000)
    >>> [batch_size(batch, 2, consumed) for consumed in (0, 333, 334, 999, 1001)]
    [(16, 2), (16, 2), (32, 4), (48, 6), (64, 8)]
    >>> total_iterations(batch, 2)
    54
"""

from megatron.settings.rules import out_of_range
from megatron.settings.schema import Batch


def batch_size(batch: Batch, dp: int, consumed: int) -> tuple[int, int]:
    """(global batch size, micro-batches per rank) of the next step, after `consumed` samples.

    dp: data parallel size. The settings must pass `problems`. The values equal those of Megatron-LM's calculators.
    """
    size = _ramped_size(batch, batch.full_size(dp), consumed)
    return size, size // (batch.micro_batch_size * dp)


def _ramped_size(batch: Batch, full: int, consumed: int) -> int:
    if not batch.rampup_batch_size:
        return full
    start, increment, samples = batch.rampup_batch_size
    # A ramp-up that starts at the full size has no increments (Megatron-LM divides by zero here).
    if start == full or consumed > samples:
        return full
    samples_per_increment = samples / ((full - start) // increment)
    return start + increment * int(consumed / samples_per_increment)


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
    full = batch.full_size(dp)
    if batch.train_iters is not None:
        return batch.train_iters, batch.train_iters * full
    if batch.train_samples is None:
        raise ValueError("neither --train-iters nor --train-samples is given")
    steps = 0
    if batch.rampup_batch_size:
        while consumed <= min(batch.rampup_batch_size[2], batch.train_samples):
            consumed += batch_size(batch, dp, consumed)[0]
            steps += 1
    rest = max(0, batch.train_samples - consumed) // full
    return steps + rest, consumed + rest * full


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
    errors += _rampup_problems(batch, dp, step)
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


def _not_multiple(what: str, value: int, step: int, micro: int, dp: int | None) -> list[str]:
    if value % step == 0:
        return []
    near = [str(n) for n in (value // step * step, value // step * step + step) if n]
    return [
        f"{what} {value} is not a multiple of --micro-batch-size {micro}"
        f"{f' x data parallel size {dp} = {step}' if dp else ''}; nearest: {', '.join(near)}"
    ]
