# SPDX-License-Identifier: Apache-2.0
"""The samples of each past and future step of a run, over all its launches, from `metrics.jsonl` and checkpoints.

A launch is a range of steps with one set of settings, from one start of the run to the next. Steps that a later launch or
a rollback replaced are left out: they have no effect on the weights. A step's samples depend only on the samples consumed
before it (`settings/batch.py`), so those of future steps are known too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from megatron.errors import DataError
from megatron.model.recipe import config_of
from megatron.settings.batch import batch_size, phases_of, total_iterations
from megatron.settings.from_checkpoint import located, saved_record
from megatron.settings.schema import Batch, Config
from megatron.storage.durable import Damaged
from megatron.telemetry.history import History, read_history
from megatron.telemetry.run_folder import find_metrics


class TrainingStep(NamedTuple):
    """A step: its samples [first, first + size) in the order of training, and whether it updated the weights."""

    iteration: int
    first: int
    size: int
    done: bool
    skipped: bool = False
    ledger: str = ""


class EvaluationPass(NamedTuple):
    """An evaluation after an iteration, and its samples [first, first + size) in the order of the split."""

    iteration: int
    first: int
    size: int
    done: bool


@dataclass(frozen=True)
class RunLaunch:
    """A launch with the steps first + 1 to last. consumed: samples before them. dp: data parallel ranks."""

    config: Config
    dp: int
    first: int
    last: int
    consumed: int
    mesh: Mapping[str, int] = field(default_factory=dict)

    def bounds(self) -> np.ndarray:
        """Samples consumed before each step, and after the last: int64 [last - first + 1]."""
        return consumed_bounds(self.config.batch, self.dp, self.consumed, self.last - self.first)


@dataclass(frozen=True)
class RunHistory:
    """The launches of a run in order. Together they contain each step once; the last one includes future steps.

    recorded  iteration -> its record in metrics.jsonl
    done      number of finished steps
    left_out  past and future iterations whose samples are skipped
    record    settings and folder of the newest launch or of the checkpoint
    """

    launches: list[RunLaunch]
    recorded: Mapping[int, dict] = field(default_factory=dict)
    done: int = 0
    left_out: frozenset[int] = frozenset()
    evaluations: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The last step of the newest launch."""
        return self.launches[-1].last

    def launch_of(self, iteration: int) -> RunLaunch:
        """The launch that contains a step. Raises DataError if there is none."""
        for launch in self.launches:
            if launch.first < iteration <= launch.last:
                return launch
        raise DataError(f"there is no iteration {iteration}: the run has 1 to {self.last:,}")

    def step(self, launch: RunLaunch, iteration: int, bounds: Optional[np.ndarray] = None) -> TrainingStep:
        """The samples of a step of a launch. bounds: `launch.bounds()`, if known."""
        bounds = launch.bounds() if bounds is None else bounds
        first, end = bounds[iteration - launch.first - 1 : iteration - launch.first + 1].tolist()
        record = self.recorded.get(iteration, {})
        skipped = bool(record.get("skipped")) or iteration in self.left_out
        ledger = str(record.get("ledger") or "")
        return TrainingStep(iteration, first, end - first, iteration <= self.done, skipped, ledger)

    def steps_with(self, launch: RunLaunch, places: np.ndarray) -> list[tuple[TrainingStep, int]]:
        """Find (step, position) for each position in the order of training that a launch reads."""
        bounds = launch.bounds()
        places = places[(places >= bounds[0]) & (places < bounds[-1])]
        numbers = np.searchsorted(bounds, places, "right") + launch.first
        steps = {number: self.step(launch, number, bounds) for number in np.unique(numbers).tolist()}
        return [(steps[number], place) for number, place in zip(numbers.tolist(), places.tolist(), strict=True)]

    def passes(self, split: str) -> list[EvaluationPass]:
        """The evaluations of a split: those on record, and the future ones of the last launch."""
        passes = [
            EvaluationPass(record["iteration"], record["first_sample"], record["samples"], True)
            for record in self.evaluations
            if record.get("split") == ("validation" if split == "valid" else split) and "first_sample" in record
        ]
        batch, full = self.launches[-1].config.batch, self.launches[-1].config.data.full_validation
        size = batch.eval_iters * batch.global_batch_size
        if split == "test":
            done = any(one.iteration == self.last for one in passes)
            test = batch.tested_batches * batch.global_batch_size
            return passes if done or not test else [*passes, EvaluationPass(self.last, 0, test, False)]
        same = batch.eval_same_samples or full
        consumed = 0 if same else max((one.first + one.size for one in passes), default=0)
        later = max([self.done, *(one.iteration for one in passes)])
        if not size:
            return passes
        interval = batch.eval_interval or self.last + 1  # 0: at the end alone
        for iteration in range((later // interval + 1) * interval, self.last + 1, interval):
            passes.append(EvaluationPass(iteration, consumed, size, False))
            consumed += 0 if same else size
        ends = same and self.last % interval == 0
        if not ends and not any(one.iteration == self.last and one.done for one in passes):
            passes.append(EvaluationPass(self.last, consumed, size, False))
        return passes


def consumed_bounds(batch: Batch, dp: int, consumed: int, steps: int) -> np.ndarray:
    """Samples consumed before each of `steps` steps, and after the last: int64 [steps + 1].

    >>> batch = Batch(micro_batch_size=4, global_batch_size=64, rampup_batch_size=[16, 16, 1000], train_samples=2000)
    >>> consumed_bounds(batch, 2, 960, 3).tolist()
    [960, 1008, 1072, 1136]
    """
    bounds, last = [consumed], phases_of(batch, dp)[-1]
    while len(bounds) <= steps and bounds[-1] < last.start:
        bounds.append(bounds[-1] + batch_size(batch, dp, bounds[-1])[0])
    left = steps + 1 - len(bounds)
    if left <= 0:
        return np.array(bounds[: steps + 1], np.int64)
    rest = bounds[-1] + last.size * np.arange(1, left + 1, dtype=np.int64)
    return np.concatenate([np.array(bounds, np.int64), rest])


def planned(config: Config, dp: int) -> RunHistory:
    """A run that has not started. config: settings with their derived values; dp: data parallel ranks."""
    skipped = frozenset(config.guard.iterations_to_skip or ())
    return RunHistory([RunLaunch(config, dp, 0, total_iterations(config.batch, dp), 0)], left_out=skipped)


def read_run(folder: str) -> RunHistory:
    """Read the run of a folder of checkpoints, from its metrics.jsonl or only from the newest checkpoint.

    Raises DataError if there is neither.
    """
    record, why = None, ""
    try:
        _, record = saved_record(folder)
    except (Damaged, OSError, ValueError) as error:
        why = str(error).splitlines()[0]
    place = Path(folder)
    for one in (place, place.parent):
        metrics = find_metrics(one) if one.is_dir() and (one == place or place.name.startswith("iter_")) else None
        if metrics:
            history = read_history(metrics)
            if history.run.get("config"):
                return _of_history(history, record, str(metrics))
    if record is None:
        raise DataError(
            f"{folder}: there is no run here", why, "--load a folder of checkpoints or one with metrics.jsonl"
        )
    return _of_checkpoint(record)


def data_ranks(mesh: Mapping[str, Any]) -> int:
    """The number of data parallel ranks in a mesh."""
    return int(mesh.get("replicate") or 1) * int(mesh.get("shard") or 1)


def _of_history(history: History, checkpoint: Optional[dict], path: str) -> RunHistory:
    steps = {record["iteration"]: record for record in history.steps}
    records = [event for event in history.events if event["kind"] == "run" and event.get("config")]
    launches, notes, bound = [], [], None
    for record in reversed(records):
        config, dp, first = config_of(located(record)), data_ranks(record.get("mesh") or {}), int(record["iteration"])
        last = bound or first  # of the newest launch, it is computed below from the remaining samples
        if bound is not None and first >= bound:
            continue  # later launches replaced all of its steps
        bound = first
        launches.append(RunLaunch(config, dp, first, max(last, first), 0, record.get("mesh") or {}))
    launches.reverse()
    consumed, known = 0, []
    if launches[0].first:
        notes.append(f"{path} begins at iteration {launches[0].first}: earlier steps are unknown")
    for launch in launches:
        before = steps.get(launch.first, {}).get("consumed_samples")
        after = steps.get(launch.first + 1)
        if before is not None:
            consumed = before
        elif after is not None:
            consumed = after["consumed_samples"] - after["batch_size"]
        elif launch.first == 0:
            consumed = 0
        elif checkpoint and checkpoint.get("iteration") == launch.first:
            consumed = checkpoint["state"]["consumed_samples"]
        launch = replace(launch, consumed=consumed)
        if launch.first == launches[-1].first:
            launch = replace(launch, last=_end(launch))
        known.append(launch)
        consumed = int(launch.bounds()[-1])
    done = max(steps, default=0)
    run = RunHistory(
        known, steps, max(done, known[-1].first), _left_out(known, checkpoint), history.evals, notes, records[-1]
    )
    _compare(run)
    return run


def _end(launch: RunLaunch) -> int:
    """The last step of the newest launch, from the samples that remained at its start."""
    batch, first = launch.config.batch, launch.first
    return first if batch.skip_train else max(total_iterations(batch, launch.dp, first, launch.consumed), first)


def _of_checkpoint(record: dict) -> RunHistory:
    """A run with only a checkpoint. Its settings are assumed for the whole run if they agree with its samples."""
    config, state = config_of(located(record)), record.get("state") or {}
    dp = data_ranks(record.get("mesh") or {})
    iteration, consumed = int(state.get("iteration", 0)), int(state.get("consumed_samples", 0))
    last = max(total_iterations(config.batch, dp, iteration, consumed), iteration)
    launch = RunLaunch(config, dp, 0, last, 0, record.get("mesh") or {})
    notes = ["there is no metrics.jsonl: the checkpoint's settings are assumed for all steps"]
    bounds = launch.bounds()
    if int(bounds[iteration]) != consumed:
        launch = RunLaunch(config, dp, iteration, last, consumed, record.get("mesh") or {})
        notes = [
            f"there is no metrics.jsonl, and the checkpoint's settings do not give its {consumed:,} samples at "
            f"iteration {iteration}: the steps up to there are unknown"
        ]
    return RunHistory([launch], {}, iteration, _left_out([launch], record), notes=notes, record=record)


def _left_out(launches: list[RunLaunch], checkpoint: Optional[dict]) -> frozenset[int]:
    iterations = set(launches[-1].config.guard.iterations_to_skip or ())
    if checkpoint:
        iterations |= set((checkpoint.get("state") or {}).get("left_out") or ())
    return frozenset(iterations)


def _compare(run: RunHistory) -> None:
    """Add a note for each launch with a recorded step that contradicts its settings."""
    for launch in run.launches:
        bounds = launch.bounds()
        for iteration in range(launch.first + 1, min(launch.last, run.done) + 1):
            record = run.recorded.get(iteration)
            if record and record.get("consumed_samples") != int(bounds[iteration - launch.first]):
                run.notes.append(
                    f"step {iteration} had consumed {record.get('consumed_samples'):,} samples; its settings give "
                    f"{int(bounds[iteration - launch.first]):,}: the samples of this launch may be wrong"
                )
                break
