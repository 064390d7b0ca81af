# SPDX-License-Identifier: Apache-2.0
"""How many samples a step sees, as a function of how many were seen before.

Nothing is counted here: whoever asks says how many samples are consumed, so a resumed run needs no state. With
`--rampup-batch-size 16 16 1000 --global-batch-size 64` the batch is 16, 32, 48 for a third of 1000 samples each,
then 64:

    >>> batch = Batch(micro_batch_size=4, global_batch_size=64, rampup_batch_size=[16, 16, 1000], train_samples=2000)
    >>> [batch_size(batch, 2, consumed) for consumed in (0, 333, 334, 999, 1001)]
    [(16, 2), (16, 2), (32, 4), (48, 6), (64, 8)]
    >>> total_iterations(batch, 2)
    54
"""

from dataclasses import replace

from megatron.settings.schema import AUTO, Batch


def batch_size(batch: Batch, dp: int, consumed: int) -> tuple[int, int]:
    """(samples of the next step over all ranks, micro-batches of it on each rank), after `consumed` samples.

    dp: data-parallel ranks. The settings must pass `problems`; equal to Megatron-LM's calculators.
    """
    size = _ramped_size(batch, full_size(batch, dp), consumed)
    return size, size // (batch.micro_batch_size * dp)


def smallest(batch: Batch) -> Batch:
    """The batch with micro-batches of 1, and no number of them, where `--micro-batch-size auto` leaves their size open."""
    if batch.micro_batch_size != AUTO:
        return batch
    return replace(batch, micro_batch_size=1, gradient_accumulation_steps=None)


def full_size(batch: Batch, dp: int) -> int:
    """Samples of a step once the ramp-up is over.

    `--global-batch-size`, else what its share of a rank or the number of micro-batches says, else one micro-batch a rank.
    """
    if batch.global_batch_size:
        return batch.global_batch_size
    return (batch.local_batch_size or batch.micro_batch_size * (batch.gradient_accumulation_steps or 1)) * dp


def _ramped_size(batch: Batch, full: int, consumed: int) -> int:
    if not batch.rampup_batch_size:
        return full
    start, increment, samples = batch.rampup_batch_size
    # Starting at the full size means there is nothing to ramp (Megatron-LM divides by zero here).
    if start == full or consumed > samples:
        return full
    samples_per_increment = samples / ((full - start) // increment)
    return start + increment * int(consumed / samples_per_increment)


def total_iterations(batch: Batch, dp: int, iteration: int = 0, consumed: int = 0) -> int:
    """Steps of the whole run: `--train-iters`, or those that fit into `--train-samples`.

    iteration, consumed: steps that are done, and their samples, whatever batches they had: a run that goes on with another
    batch size makes as many steps as its own batches fit into the samples that are left.
    A last, partial batch is thrown away, except that a ramp-up is walked to its end, as in Megatron-LM.
    Raises ValueError when neither length is set.

    >>> total_iterations(Batch(micro_batch_size=4, global_batch_size=16, train_samples=160), 1, iteration=10, consumed=80)
    15
    """
    if batch.train_iters is not None:
        return batch.train_iters
    return iteration + _totals(batch, dp, consumed)[0]


def total_samples(batch: Batch, dp: int) -> int:
    """Samples that the whole run trains on: what the training dataset has to hold."""
    return max(batch.train_samples or 0, _totals(batch, dp)[1])


def samples_left_out(batch: Batch, dp: int, consumed: int) -> int:
    """Samples of `--train-samples` that fill no batch behind so many that are consumed.

    >>> samples_left_out(Batch(global_batch_size=8, train_samples=30), 1, 8)
    6
    """
    return max(0, batch.train_samples - _totals(batch, dp, consumed)[1])


def ended_epoch(batch: Batch, before: int, after: int, last: bool) -> int:
    """The number of the epoch, from 1, that ended in a step from `before` to `after` consumed samples; 0: none did. The
    settings have `--train-epochs`.

    last: the step is the run's, and ends its last epoch: samples that fill no batch are left out there.

    >>> batch = Batch(global_batch_size=8, train_samples=30, train_epochs=3)
    >>> [ended_epoch(batch, consumed, consumed + 8, consumed == 16) for consumed in (0, 8, 16)]
    [0, 1, 3]
    """
    done = batch.train_epochs if last else after * batch.train_epochs // batch.train_samples
    return done if done > before * batch.train_epochs // batch.train_samples else 0


def _totals(batch: Batch, dp: int, consumed: int = 0) -> tuple[int, int]:
    """(steps that are left behind so many samples, samples consumed behind the last of them)."""
    full = full_size(batch, dp)
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
    """What is wrong with these settings on `dp` data-parallel ranks: one sentence each; empty when all is well.

    >>> problems(Batch(micro_batch_size=4, global_batch_size=30), 2)
    ['--global-batch-size 30 is not a multiple of --micro-batch-size 4 x data parallel size 2 = 8; nearest: 24, 32']
    """
    positive = dict(
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        train_iters=batch.train_iters,
        train_samples=batch.train_samples,
        local_batch_size=batch.local_batch_size,
        gradient_accumulation_steps=batch.gradient_accumulation_steps,
    )
    found = [
        f"--{name.replace('_', '-')} {value} must be at least {least}"
        for name, value in positive.items()
        for least in [0 if name == "train_iters" else 1]
        if value is not None and value < least
    ]
    if batch.train_iters is not None and batch.train_samples is not None:
        found.append(f"--train-iters {batch.train_iters} and --train-samples {batch.train_samples}: give one of them")
    if batch.train_epochs is not None and batch.train_iters is not None:
        found.append(f"--train-iters {batch.train_iters} and --train-epochs {batch.train_epochs}: give one of them")
    if found:
        return found
    step = batch.micro_batch_size * dp
    full = full_size(batch, dp)
    if batch.local_batch_size and not batch.global_batch_size:
        micro = batch.micro_batch_size
        found += _not_multiple("--local-batch-size", batch.local_batch_size, micro, micro, None)
    else:
        found += _not_multiple("--global-batch-size", full, step, batch.micro_batch_size, dp)
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
            found.append(f"{flag} {asserted} is not {full} samples / ({each}) = {full / unit:g}; leave it out")
    found += _rampup_problems(batch, dp, step)
    if not (found or batch.skip_train) and batch.train_samples is not None and not total_iterations(batch, dp):
        of = f" (of --train-epochs {batch.train_epochs})" if batch.train_epochs else ""
        found.append(
            f"{batch.train_samples} samples of training{of} do not fill a batch of --global-batch-size {full}: no step "
            "would be made; lower it, or train on more"
        )
    return found


def _rampup_problems(batch: Batch, dp: int, step: int) -> list[str]:
    if batch.rampup_batch_size is None:
        return []
    values = batch.rampup_batch_size
    flag = "--rampup-batch-size " + " ".join(map(str, values))
    if len(values) != 3 or values[0] < 1 or values[1] < 1 or values[2] < 0:
        return [f"{flag}: expected START INCREMENT SAMPLES, three numbers above zero, such as 16 16 100000"]
    start, increment, samples = values
    full = full_size(batch, dp)
    found = []
    if batch.train_samples is None:
        found.append(f"{flag} needs --train-samples instead of --train-iters: steps have no fixed number of samples")
    if start > full:
        found.append(f"{flag}: start {start} is above --global-batch-size {full}")
    elif (full - start) % increment:
        good = [n for n in range(1, full - start + 1) if (full - start) % n == 0 and n % step == 0]
        near = min(good, key=lambda n: abs(n - increment), default=full - start)
        found.append(
            f"{flag}: increments of {increment} do not lead from {start} to --global-batch-size {full}; "
            f"an increment of {near} would"
        )
    found += _not_multiple(f"{flag}: start", start, step, batch.micro_batch_size, dp)
    if start < full:
        found += _not_multiple(f"{flag}: increment", increment, step, batch.micro_batch_size, dp)
        if samples == 0:
            found.append(f"{flag}: a ramp-up over 0 samples; leave the flag out")
    return found


def _not_multiple(what: str, value: int, step: int, micro: int, dp: int | None) -> list[str]:
    if value % step == 0:
        return []
    near = [str(n) for n in (value // step * step, value // step * step + step) if n]
    return [
        f"{what} {value} is not a multiple of --micro-batch-size {micro}"
        f"{f' x data parallel size {dp} = {step}' if dp else ''}; nearest: {', '.join(near)}"
    ]
