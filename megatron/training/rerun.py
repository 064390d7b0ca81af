# SPDX-License-Identifier: Apache-2.0
"""--rerun-mode: compute a suspicious step, or each n-th one, again before its update: here, and on another rank.

While passes run, a `StepRecorder` takes a checksum of everything that this rank computes for others, sends and receives.
A step is a function of weights, buffers and samples (dropout is drawn by position), so the same step on the same rank has
the same checksums, and so has the same step on a data parallel rank that gets this one's samples. What differs says where:

| here, again | on another rank | verdict | what follows |
|---|---|---|---|
| other bits | | transient | a third computation; training goes on with what two of the three have |
| the same | other bits | this device | `SilentError` before the update |
| the same | the same | software or data | what --on-nan and --on-spike say |
| the same | there is none | not transient | not finite: exit code 16, the next launch judges (`guard.disputed`) |
| three results | | not repeatable | `SilentError` |

The optimizer, the loss scale, the schedules and the position in the data change after the verdict, so only buffers are put
back between two computations. The last one is always that of this rank's own samples: its gradients are the update's.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Optional

import torch

from megatron.errors import ResumeToDisambiguate, SettingsError, SilentError, node_name
from megatron.guard import disputed
from megatron.guard.disputed import DisputedStep
from megatron.guard.rerun import (
    MEMORY,
    RankDifference,
    StepDifference,
    StepRecord,
    TrafficEntry,
    blamed,
    first_difference,
    shift_of,
    suspects,
)
from megatron.mpu import collectives
from megatron.mpu.bits_sum import words_sum
from megatron.mpu.collectives import Traffic
from megatron.mpu.mesh import Axis, Mesh
from megatron.optimizer.zero import DistributedOptimizer
from megatron.settings import schema
from megatron.storage.urls import local_folder
from megatron.training.drill import Drill, drill_at, faulty

MOST_TRANSIENT = 3  # of one rank in a launch: then its device is not to be trusted
SAME_HERE = "computed again on the same ranks, it has the same bits"
AT_REST = "at rest"  # of an entry: what lay in memory
RELOAD = "no update was made; start again from the last checkpoint, which was read back when it was written"
REPLACE = (
    "no update was made; start again from the last checkpoint without this rank's node (megatron.tools.supervise does). "
    "Steps before may be wrong, too: verified are the multiples of --rerun-interval"
)
FIGURES = ("loss", "gradient norm")  # of report_stats
Again = Callable[[Optional[Sequence]], torch.Tensor]  # micro-batches (None: the step's own) -> totals


class StepRecorder:
    """Listens to the traffic of this rank (`mpu.collectives.Traffic`) and keeps checksums, on the device."""

    def __init__(self):
        self.entries: list[TrafficEntry] = []
        self.sums: list[torch.Tensor] = []

    def __call__(self, way: str, what: str, x: torch.Tensor, axis: Axis) -> None:
        self.entries.append(TrafficEntry(way, what, axis.name))
        self.sums.append(words_sum(x))

    def read(self) -> StepRecord:
        """The record, on the host: waits for the device."""
        by_device = torch.stack([one.to(self.sums[-1].device) for one in self.sums]) if self.sums else torch.empty(0)
        return StepRecord(self.entries, by_device.tolist())


class ComputedStep(NamedTuple):
    """One computation of a step. totals: of `reduce_grads`"""

    record: StepRecord
    totals: torch.Tensor


def build_rerun(config: schema.Config, mesh: Mesh, device: torch.device) -> Optional["Rerun"]:
    """The repetitions that --rerun-mode asks for; None: none. Raises SettingsError if steps do not repeat to the bit."""
    if config.guard.rerun_mode == "disabled":
        return None
    if (
        config.guard.rerun_mode == "validate_results"
        and device.type == "cuda"
        and not config.kernels.deterministic_mode
    ):
        raise SettingsError(
            "--rerun-mode validate_results compares bits, and steps on a GPU do not repeat to the bit by themselves",
            do="add --deterministic-mode; or --rerun-mode report_stats, which counts differences",
        )
    whole = "global_aux_loss" in config.model.balancing_kinds  # a loss that depends on all samples
    places = shift_of(mesh.dp.size, mesh.tp.size * mesh.cp.size, mesh.ep.size * mesh.etp.size)
    save = config.checkpoint.save
    return Rerun(config.guard, config.logging.seed, None if whole else places, local_folder(save) if save else None)


class Rerun:
    """The repetitions of steps of this rank.

    places: by how many places samples move along the data parallel axis (`guard.rerun.shift_of`); None: they cannot
    folder: where a step is kept that only other devices can judge; None: nowhere
    """

    def __init__(self, settings: schema.Guard, seed: int, places: Optional[int], folder: Optional[Path] = None):
        self.settings, self.places, self.seed, self.folder = settings, places, seed, folder
        self.recorder = StepRecorder()
        self.transient = Counter[int]()  # rank -> errors of this launch
        self.differences: dict[str, list[float]] = {}  # figure -> relative differences, for report_stats
        self.differing = Counter[int]()  # this rank -> its steps that had other bits, for report_stats
        self.drill: Optional[Drill] = None  # of the present step
        self.resting: Optional[RestingState] = None  # what lies in memory until the next update
        self.disputed: Optional[DisputedStep] = None  # of an earlier launch
        self.looked = False  # for that
        self.said = ""  # the verdict on the present step, if it is neither the device's nor transient

    @property
    def reports(self) -> bool:
        """Whether it only counts: no step is judged."""
        return self.settings.rerun_mode in ("report_stats", "report_determinism_stats")

    # ---- one computation -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def first(self, run, iteration: int) -> Iterator[None]:
        """A context around the first computation of a step."""
        self.said = ""
        if not self.looked and self.folder is not None and not self.reports:
            self.looked, self.disputed = True, run.context.all_gather_object(disputed.kept(self.folder))[0]
            if self.disputed and self.disputed.iteration < iteration:  # it has been passed
                self._forget(run)
        guard, world = self.settings, run.context.mesh.world_size
        self.drill = drill_at(iteration, guard.error_injection_rate, guard.error_injection_type, self.seed, world)
        if not self._is_due(iteration):
            self.resting = None
        elif self.resting is None or self.resting.before != iteration:  # not known since the last update
            self.resting = state_sums(run.optimizer, iteration)
        with self._recording(run, first=True):
            yield

    def after_update(self, run, iteration: int) -> None:
        """Note what lies in memory from now on, if the next step is to be computed again. All ranks call it."""
        self.resting = state_sums(run.optimizer, iteration + 1) if self._is_due(iteration + 1) else None

    @contextlib.contextmanager
    def _recording(self, run, first: bool = False) -> Iterator[None]:
        self.recorder = StepRecorder()
        with Traffic.heard_by(self.recorder), faulty(self.drill, run.stages, run.context.mesh.rank, first):
            yield

    def _repeat(self, run, again: Again, batches: Optional[Sequence] = None) -> ComputedStep:
        """Compute the step again from the state before it."""
        run.optimizer.buffers.rollback()
        with self._recording(run):
            totals = again(batches)
        return ComputedStep(self.recorder.read(), totals)

    # ---- the verdict -----------------------------------------------------------------------------------------------

    def validated(
        self,
        run,
        iteration: int,
        totals: torch.Tensor,
        again: Again,
        numbers: Callable[[torch.Tensor], Sequence[float]],
        of_rank: Callable[[int], Sequence],
    ) -> torch.Tensor:
        """The totals of a step with which training goes on. All ranks call it after the passes, before the update.

        numbers: totals -> loss and gradient norm; of_rank: the micro-batches of another rank of the data parallel axis
        Raises SilentError if a device computes wrongly, or nothing is repeatable.
        """
        why = self._reason(run, iteration, *numbers(totals))
        if not why:
            return totals
        first = ComputedStep(self.recorder.read(), totals)
        with run.phase("rerun"), run.metrics.paused("computing a step again"):
            if self.reports:
                second = self._repeat(run, again)
                self._count(run, first, second, numbers)
                return second.totals
            self._check_resting(run, iteration)
            moved = self._on_another(run, again, of_rank, 1) if self.places else None
            second = self._repeat(run, again)
            if self._differences(run, first.record, second.record):
                second = self._settle(run, iteration, first, second, again)
            if moved:
                second = self._compare_moved(run, iteration, moved, second, again, of_rank)
        still = self._suspicion(run, *numbers(second.totals))
        if still or self._is_disputed(iteration):
            earlier = self.disputed.numbers if self._is_disputed(iteration) else ()
            self._tell(run, iteration, still or f"an earlier launch had {', '.join(earlier)}", second, numbers)
        return second.totals

    def _suspicion(self, run, loss: float, norm: float) -> str:
        return run.watch.suspicion(run.state.recent, loss, norm, scaling=run.state.scaler.dynamic)

    def _reason(self, run, iteration: int, loss: float, norm: float) -> str:
        """Why a step is computed again; "": it is not."""
        if self.reports:
            return "--rerun-mode"
        if suspicion := self._suspicion(run, loss, norm):
            return suspicion
        if self.drill or self._is_disputed(iteration):
            return "--error-injection-rate" if self.drill else disputed.NAME
        return "--rerun-interval" if self._is_due(iteration) else ""

    # ---- report_stats ----------------------------------------------------------------------------------------------

    def _count(self, run, first: ComputedStep, second: ComputedStep, numbers: Callable) -> None:
        """Count a step that was computed twice. The numbers are the same on all ranks, the records are each rank's own."""
        for name, one, other in zip(FIGURES, numbers(first.totals), numbers(second.totals), strict=True):
            self.differences.setdefault(name, []).append(relative_difference(one, other))
        self.differing[run.context.mesh.rank] += first_difference(first.record, second.record) is not None

    def log(self, run, iteration: int) -> None:
        """Log what report_stats has counted since the start. All ranks call it."""
        steps = len(next(iter(self.differences.values()), ()))
        if not steps:
            return
        counted = Counter[int]()
        for one in run.context.all_gather_object(self.differing):
            counted.update(one)
        odd = ", ".join(f"rank {rank}: {number}" for rank, number in counted.most_common(8) if number)
        lines = [f"{name}: {distribution(values)}" for name, values in self.differences.items()]
        lines.append(f"steps in which something else was computed, sent or received: {odd or 'none'}")
        run.metrics.log(f"{steps} steps were computed twice (--rerun-mode)" + "".join(f"\n  {line}" for line in lines))
        run.metrics.note(
            "rerun",
            iteration,
            steps=steps,
            differing=dict(counted),
            largest={name: max(values) for name, values in self.differences.items()},
        )

    # ---- what a verdict needs --------------------------------------------------------------------------------------

    def _is_disputed(self, iteration: int) -> bool:
        return self.disputed is not None and self.disputed.iteration == iteration

    def _is_due(self, iteration: int) -> bool:
        return not self.reports and bool(self.settings.rerun_interval) and iteration % self.settings.rerun_interval == 0

    def _check_resting(self, run, iteration: int) -> None:
        """Compare the weights and the optimizer's state with what the last update left: passes do not change them."""
        if self.resting is None:
            return
        names, changed = self.resting.names, self.resting.sums != state_sums(run.optimizer, iteration).sums
        changed, self.resting = changed.nonzero().flatten().tolist(), None
        entry = changed and TrafficEntry(AT_REST, names[changed[0]], "")
        mine = entry and RankDifference(run.context.mesh.rank, node_name(), StepDifference(entry, changed[0]))
        found = list(filter(None, run.context.all_gather_object(mine)))
        if found:
            what = f"the memory of {' and '.join(one.name for one in found[:4])} {MEMORY}"
            self._fail(run, iteration, "memory", what, f"first in {found[0].difference.entry.what}", RELOAD, found)

    def _on_another(self, run, again: Again, of_rank: Callable, times: int) -> ComputedStep:
        axis = run.context.mesh.dp
        return self._repeat(run, again, of_rank((axis.rank + times * self.places) % axis.size))

    def _differences(self, run, one: StepRecord, other: StepRecord) -> list[RankDifference]:
        """On all ranks: where the records of each rank part."""
        found = first_difference(one, other)
        mine = found and RankDifference(run.context.mesh.rank, node_name(), found)
        return list(filter(None, run.context.all_gather_object(mine)))

    def _settle(self, run, iteration: int, first: ComputedStep, second: ComputedStep, again: Again) -> ComputedStep:
        """Two computations differ: a third one says which was wrong."""
        third = self._repeat(run, again)
        for odd, other in ((first, second), (second, first)):
            if not self._differences(run, other.record, third.record):
                self._record_transient(run, iteration, blamed(self._differences(run, odd.record, third.record)))
                return third
        found = blamed(self._differences(run, second.record, third.record))
        names = ", ".join(dict.fromkeys(one.name for one in found[:8]))
        self._fail(
            run,
            iteration,
            "not repeatable",
            f"three computations of one step gave three results, first different on {names}",
            f"first in {found[0].difference.entry}",
            "--deterministic-mode, if these are GPUs; otherwise see whether --rerun-mode report_stats finds one rank alone",
            found,
        )

    def _record_transient(self, run, iteration: int, found: Sequence[RankDifference]) -> None:
        one = found[0]
        names = " and ".join(dict.fromkeys(other.name for other in found[:4]))
        if one.difference.blames:
            what = f"{names} computed other bits once than twice afterwards, first in {one.difference.entry}"
        else:
            what = f"a message to {names} had other bits once than twice afterwards: {one.difference.entry}"
        self.transient.update(other.rank for other in found if not self.drill)
        if self.transient[one.rank] >= MOST_TRANSIENT and len(found) == 1:
            self._fail(
                run,
                iteration,
                "this device",
                f"{one.name} computes other bits now and then: {MOST_TRANSIENT} times in this launch",
                what,
                REPLACE,
                found,
            )
        record(
            run,
            iteration,
            "transient",
            f"{what}; training goes on with what it computed twice",
            rank=one.rank,
            rank_host=one.host,
            where=str(one.difference.entry),
            others=[other.rank for other in found[1:]],
        )

    def _compare_moved(
        self, run, iteration: int, moved: ComputedStep, own: ComputedStep, again: Again, of_rank: Callable
    ) -> ComputedStep:
        """Compare what this rank made of another one's samples with what that one made of them; returns its own step."""
        found = self._moved_differences(run, moved, own, 1)
        if not found:
            return own
        if not self._moved_differences(run, self._on_another(run, again, of_rank, 1), own, 1):
            self._record_transient(run, iteration, blamed(found))
            return self._repeat(run, again)  # its gradients are those of its own samples again
        axis, guilty = run.context.mesh.dp, blamed(found)
        names = suspects(guilty)
        if len(names) > 1 and axis.size // self.places > 2:  # a third rank's opinion
            further = self._moved_differences(run, self._on_another(run, again, of_rank, 2), own, 2)
            names = suspects([*guilty, *blamed(further)]) if further else names
        said = [f"rank {rank} on {host}" for rank, host in names]
        what = (
            f"{said[0]} computes other bits than other ranks do of the same samples"
            if len(said) == 1
            else f"{' and '.join(said[:4])} compute different bits of the same samples: one of them is wrong"
        )
        where = f"first in {guilty[0].difference.entry}; each does so again and again"
        self._fail(run, iteration, "this device", what, where, REPLACE, guilty, names)

    def _moved_differences(self, run, moved: ComputedStep, own: ComputedStep, times: int) -> list[RankDifference]:
        mesh = run.context.mesh
        records = collectives.all_gather_object((own.record, mesh.rank, node_name()), mesh.dp)
        theirs, rank, host = records[(mesh.dp.rank + times * self.places) % mesh.dp.size]
        found = first_difference(moved.record.local(), theirs.local())
        mine = found and RankDifference(mesh.rank, node_name(), found, rank, host)
        return list(filter(None, run.context.all_gather_object(mine)))

    def _fail(
        self,
        run,
        iteration: int,
        verdict: str,
        what: str,
        where: str,
        do: str,
        found: Sequence[RankDifference],
        names: Sequence[tuple[int, str]] = (),
    ) -> NoReturn:
        """Record the verdict and end the run, on all ranks."""
        (rank, host), *others = names or [(one.rank, one.host) for one in found]
        record(
            run,
            iteration,
            verdict,
            f"{what}; {where}",
            level="error",
            logged=False,
            rank=rank,
            rank_host=host,
            where=where,
            others=sorted({rank for rank, _ in others}),
        )
        raise SilentError(f"iteration {iteration}: {what}", where, do)

    def _tell(self, run, iteration: int, why: str, computed: ComputedStep, numbers: Callable) -> None:
        """Say that a suspicious step was computed as it should be, or let other devices say so."""
        verdict, level, hosts = disputed.SOFTWARE, "info", ""
        self.said = "computed again, here and on other ranks, it has the same bits: it is not the hardware"
        now = self._disputed_now(run, iteration, [float(number).hex() for number in numbers(computed.totals)])
        if self._is_disputed(iteration):
            verdict, self.said = disputed.judged(self.disputed, now)
            if verdict == disputed.EARLIER:
                level, hosts = "error", ", ".join(dict.fromkeys(self.disputed.places))
            self._forget(run)
        elif not self.places:
            if self.folder is not None and "not finite" in why and self.settings.on_nan == "stop":
                self._ask_others(run, iteration, why, now)
            verdict = disputed.OPEN
            self.said = f"{SAME_HERE}, and there are no others to compute it on"
        record(run, iteration, verdict, f"{why}; {self.said}", level=level, rank_host=hosts)
        if level == "info":  # others are logged by themselves
            run.metrics.log(f"iteration {iteration}: {why}; {self.said}")

    def _disputed_now(self, run, iteration: int, numbers: list[str]) -> DisputedStep:
        device = run.context.device
        place = node_name() if device.type == "cpu" else f"{node_name()} {device}"
        places, mesh = run.context.all_gather_object(place), run.context.mesh
        return DisputedStep(iteration, numbers, places, dict(mesh.logged_sizes), mesh.ordered)

    def _forget(self, run) -> None:
        self.disputed = None
        if run.context.is_rank_zero:
            disputed.forget(self.folder)

    def _ask_others(self, run, iteration: int, why: str, now: DisputedStep) -> NoReturn:
        """End the run, so that the next launch computes the step on other devices, if it gets some."""
        if run.context.is_rank_zero:
            disputed.keep(self.folder, now)
        said = f"{SAME_HERE}, and no other ranks of this job can compute it"
        record(run, iteration, disputed.OPEN, f"{why}; {said}", logged=False)
        raise ResumeToDisambiguate(
            f"iteration {iteration}: {why}",
            said,
            "no update was made; resume from the last checkpoint with --load, on other nodes or with ranks in another "
            "order: the step will be compared",
        )


def record(run, iteration: int, verdict: str, text: str, *, rank_host="", where="", others=(), **more) -> None:
    """Record the event of a verdict. more: see `EventLog.record`"""
    said = f"iteration {iteration}: {text}"
    facts = dict(verdict=verdict, rank_host=rank_host, where=where, others=list(others))
    run.events.record("rerun", said, iteration=iteration, **facts, **more)


def relative_difference(one: float, other: float) -> float:
    """|a - b| over their mean; 0 for equal values, infinite ones and NaN included; infinite if only one is finite.

    >>> relative_difference(1.0, 3.0), relative_difference(math.nan, math.nan), relative_difference(1.0, math.inf)
    (1.0, 0.0, inf)
    """
    if one == other or math.isnan(one) and math.isnan(other):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)) or one + other == 0.0:
        return math.inf
    return abs((one - other) / (one + other) * 2)


def distribution(values: Sequence[float]) -> str:
    """How often values are 0, and otherwise their mean and upper percentiles.

    >>> distribution([0.0, 0.0]), distribution([0.0, 1e-6, 3e-6, 4e-6])
    ('2 of 2 identical', '1 of 4 identical; mean 2.0E-06, p50 1.0E-06, p90 4.0E-06, p99 4.0E-06, largest 4.0E-06')
    """
    ordered = sorted(values)
    said = f"{ordered.count(0.0)} of {len(ordered)} identical"
    if ordered[-1] == 0.0:
        return said
    shares = {f"p{share}": ordered[math.ceil(share / 100 * len(ordered)) - 1] for share in (50, 90, 99)}
    numbers = {"mean": sum(ordered) / len(ordered), **shares, "largest": ordered[-1]}
    return f"{said}; " + ", ".join(f"{name} {value:.1E}" for name, value in numbers.items())


class RestingState(NamedTuple):
    """What lies in memory between two updates. before: the step whose update is the next one; sums [n]: checksums"""

    before: int
    names: list[str]
    sums: torch.Tensor


def state_sums(optimizer: DistributedOptimizer, before: int) -> RestingState:
    """The state of the optimizer that only updates change: main weights and moments, and the model's weights if a rank
    keeps all of them. All ranks call it, because weights may be under way."""
    kept = optimizer.gathered_parameters() if optimizer.weights.keep else contextlib.nullcontext()
    named: list[tuple[str, torch.Tensor]] = []
    for state in optimizer.everything:
        for slot, where, _ in state.places:
            named.append((f"{slot.name} (main weights)", state.main[where]))
            for name, moment in state.moments.items():
                place = state.where(name, where)
                named += [] if place is None else [(f"{slot.name} ({name})", moment[place])]
    with torch.no_grad(), kept:
        for unit in optimizer.units if optimizer.weights.keep else ():
            named += [(slot.name, slot.parameter) for slot in unit.slots]
        sums = [words_sum(values).to(optimizer.device) for _, values in named]
    return RestingState(before, [name for name, _ in named], torch.stack(sums))
