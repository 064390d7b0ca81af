# SPDX-License-Identifier: Apache-2.0
"""The objects of a pretraining job (`Run`), what it is built from, and its counters, which checkpoints save (`State`)."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional

import torch

from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.memory_snapshots import MemorySnapshots
from megatron.checkpoint.store import Piece
from megatron.data.loader import MicroBatchLoader
from megatron.errors import CheckpointError, PeerLost, Preempted, exit_code
from megatron.guard.alarm import Alarm
from megatron.guard.changes import probe_places
from megatron.guard.endings import peer_lost
from megatron.guard.replicas import check_buffers
from megatron.guard.spikes import Recent
from megatron.guard.watch import StepVerdict, Watch
from megatron.model.facts import Facts
from megatron.model.recipe import KD_HIDDEN_LOSS, KD_LOSS
from megatron.mpu.initialize import RankContext, leave_job
from megatron.mpu.selection import Selection
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.execute import P2PCommunicator
from megatron.pipeline.stage_outputs import StageOutputs
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline_recorder import Recorder
from megatron.settings import schema
from megatron.settings.batch import ended_epoch, total_iterations
from megatron.telemetry.events import EventLog
from megatron.telemetry.memory import MemoryInUse, memory_in_use, memory_use
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.phases import phase
from megatron.telemetry.profiler import Profiler
from megatron.training.compile_trial import CompileTrial
from megatron.training.events import first_line, record_end, record_shortage
from megatron.training.hooks import Hooks, SaveFacts
from megatron.training.outcome import Outcome
from megatron.training.rank_watch import RankWatch
from megatron.training.rerun import Rerun
from megatron.training.resume import ResumeChanges
from megatron.training.step_notes import StepNotes

LAST_SAVE = 30.0  # seconds that a failing run waits for a checkpoint to be written
# The same if a rank is lost: its part may never come. Launchers kill a rank that does not end, and its reason is lost.
LAST_SAVE_WITHOUT_PEER = 5.0


@dataclass(frozen=True)
class State:
    """The progress of a run: everything that a step depends on besides settings and weights. Saved in checkpoints."""

    scaler: LossScaler
    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0  # samples of steps that were not skipped: learning rate and weight decay count these
    consumed_valid_samples: int = 0
    valid_order: int = 0  # number of validation samples of the first launch, which defines their order; 0: not known
    skipped_iterations: int = 0
    recent: Recent = Recent()  # the reference for spikes
    left_out: tuple[int, ...] = ()  # iterations whose samples are skipped
    rollbacks: int = 0
    # For recipes with measures (`training.measures`): figure and step of the best validation, and the number of later ones.
    # The loss of the last validation is also recorded for --stop-at-loss.
    best: Optional[float] = None
    best_iteration: int = 0
    evaluations_since_best: int = 0
    valid_loss: Optional[float] = None
    evaluation_due: int = 0  # 1 if the state was saved before the evaluation after its step

    def advanced(self, samples: int) -> "State":
        """The state after a step of this many samples. `judged` adds its outcome."""
        consumed = self.consumed_samples + samples
        return replace(self, iteration=self.iteration + 1, consumed_samples=consumed, evaluation_due=0)

    def judged(
        self, samples: int, verdict: StepVerdict, loss: float = 0.0, norm: float = 0.0, window: int = 0
    ) -> "State":
        """The state with the outcome of the last step: whether its samples were trained on or skipped."""
        skipped = verdict is StepVerdict.SKIP
        return replace(
            self,
            scaler=self.scaler.update(not math.isfinite(norm)),
            recent=self.recent if skipped else self.recent.after(loss, norm, window),
            scheduled_samples=self.scheduled_samples + (0 if skipped else samples),
            skipped_iterations=self.skipped_iterations + skipped,
        )

    def train_iters(self, batch: schema.Batch, dp: int) -> int:
        """The number of steps of the whole run."""
        return total_iterations(batch, dp, self.iteration, self.consumed_samples)

    def record(self) -> dict[str, Any]:
        """The state as saved in a checkpoint."""
        return {**asdict(self), "scaler": self.scaler.state()}

    def restored(self, record: dict[str, Any]) -> "State":
        """This state with a checkpoint's counters. Raises CheckpointError if they are invalid."""
        try:
            known = {**record, "scaler": self.scaler.restored(record["scaler"])}
            if "recent" in record:  # missing in checkpoints of earlier versions
                known["recent"] = Recent.of(record["recent"])
            left_out = tuple(sorted({*self.left_out, *record.get("left_out", ())}))
            state = replace(self, **{**known, "left_out": left_out})
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"state.json has no valid state of its run: {error!r}") from None
        for name, value in vars(state).items():
            if isinstance(getattr(self, name), int) and not (type(value) is int and 0 <= value < 1 << 63):
                raise CheckpointError(f"state.json has no valid state of its run: {name} {value!r}")
        return state


def due(interval: Optional[int], iteration: int) -> bool:
    """Whether an action that runs every `interval` steps is due after this iteration."""
    return bool(interval) and iteration % interval == 0


@dataclass
class Loaders:
    """The micro-batches of the splits, and those of --eval-requests."""

    train: MicroBatchLoader
    valid: Optional[MicroBatchLoader]
    test: Optional[MicroBatchLoader]
    requests: Optional[MicroBatchLoader] = None

    def close(self) -> None:
        """Stop their threads."""
        for batches in (self.train, self.valid, self.test, self.requests):
            if batches:
                batches.close()


@dataclass
class Losses:
    """The sums that stages return, and the figures that are computed from them."""

    sums: dict[str, float]  # name -> weight in the minimised loss
    counts: Mapping[str, str] = field(default_factory=dict)  # sum -> its divisor for the log, if not tokens
    measures: Any = None  # training.measures.Measures, if the recipe has them

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sums that stages return: losses, and tokens with a loss."""
        return (*self.sums, "tokens")

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Those that stages also return in evaluations, which need no teacher."""
        return tuple(name for name in self.names if name not in (KD_LOSS, KD_HIDDEN_LOSS))


@dataclass
class Passes:
    """The schedule of forward and backward passes, and the messages between stages."""

    pipeline: Pipeline
    wire: P2PCommunicator  # to the neighbouring pipeline stages
    needs_gradient: list[bool]  # for each chunk, whether any parameter before it is trained
    recorder: Optional[Recorder]
    returned: Optional[StageOutputs]  # names of sums from stages, until all ranks have compared them


@dataclass
class Checkpoints:
    """The managers of the folder of --save, and of the best checkpoint, and the snapshots in memory."""

    manager: Optional[CheckpointManager]
    best: Optional[CheckpointManager] = None
    snapshots: Optional[MemorySnapshots] = None


@dataclass
class Pending:
    """The numbers of the last step, which the host may read during the next one, unless they are needed earlier."""

    defers_host_sync: bool  # whether the host reads them during the next step
    outcome: Optional[Outcome] = None  # outcome of the last step, until the host has read it


@dataclass
class Evaluated:
    """The last evaluation of this launch."""

    requests_at: int = -1  # the step after which --eval-requests were
    validation: tuple[int, range] = (0, range(0))  # iteration and samples of the last validation


@dataclass
class Run:
    """A job in progress: the objects that were built at its start, and its `state`."""

    config: schema.Config  # resolved
    context: RankContext
    vocab_size: int  # without padding
    stages: list[torch.nn.Module]  # this rank's model chunks
    losses: Losses
    passes: Passes
    optimizer: DistributedOptimizer
    lengths: Lengths
    loaders: Loaders
    checkpoints: Checkpoints
    metrics: Metrics
    events: EventLog
    alarm: Optional[Alarm]  # on the first rank
    watch: Watch
    ranks: RankWatch
    state: State
    profiler: Profiler
    origin: dict[str, Any]  # code, libraries, vocabulary and folder of the run, for checkpoints
    in_base: frozenset[str]  # tensors that the base of adapters has: frozen ones of them are not saved
    pending: Pending
    compiling: CompileTrial
    rerun: Optional[Rerun] = None  # --rerun-mode
    evaluated: Evaluated = field(default_factory=Evaluated)
    notes: StepNotes = field(default_factory=StepNotes)
    hooks: Hooks = field(default_factory=Hooks)
    state_bytes: list[int] = field(default_factory=list)  # memory before and after the first step of this launch
    saved_hooks: Optional[Mapping[str, Any]] = None  # state of hooks from the loaded checkpoint

    @property
    def dp(self) -> int:
        return self.context.mesh.dp.size

    @property
    def train_iters(self) -> int:
        return self.state.train_iters(self.config.batch, self.dp)

    @property
    def done(self) -> int:
        """The number of steps with a known outcome."""
        return self.state.iteration - (self.pending.outcome is not None)

    def ended_epoch(self, iteration: int, before: int, after: int) -> int:
        """The number of the epoch that this step ends, from `before` to `after` consumed samples, or 0."""
        if not self.config.batch.train_epochs:  # avoids computing the last step, which is slow with a ramp-up
            return 0
        return ended_epoch(self.config.batch, before, after, last=iteration >= self.train_iters)

    def save_is_due(self, iteration: int, epoch: int) -> bool:
        """Whether a checkpoint is due after this step. Call it for each step. epoch: number of an epoch that it ended, or
        0.
        """
        if self.checkpoints.manager is None:
            return False
        return self.checkpoints.manager.due(iteration) or bool(epoch and due(self.config.checkpoint.save_epoch, epoch))

    def num_zeros_in_grad(self, iteration: int) -> Optional[int]:
        """The number of zeros in the gradients of a step, if it is logged (--log-num-zeros-in-grad). All ranks call it."""
        logging = self.config.logging
        wanted = logging.log_num_zeros_in_grad and due(logging.log_interval, iteration)
        return self.optimizer.num_zeros_in_grad() if wanted else None

    def params_norm(self, iteration: int) -> Optional[float]:
        """The norm of the parameters after a step, if it is logged (--log-params-norm). All ranks call it."""
        logging = self.config.logging
        wanted = logging.log_params_norm and due(logging.log_interval, iteration)
        return self.optimizer.params_norm() if wanted else None

    def note_memory(self) -> None:
        """Remember the memory that this rank needs between two steps, at the first two calls."""
        if len(self.state_bytes) < 2:
            self.state_bytes.append(memory_use(self.context.device.type).now)

    def memory_in_use(self) -> MemoryInUse:
        """This rank's memory when it ran out."""
        mesh = self.context.mesh
        return memory_in_use(self.context.device.type, mesh.rank, mesh.pp.rank, max(self.state_bytes, default=0))

    def phase(self, name: str, step: Optional[int] = None) -> AbstractContextManager:
        """Mark a phase of the run for the heartbeat, timers and profiler: `with run.phase("update"):`."""
        self.watch.heartbeat.beat(name, step)
        return phase(name)

    def save(self) -> None:
        """Write a checkpoint of the present state, or start a background save. All ranks call it. Raises the manager's
        errors.
        """
        started = time.perf_counter()
        with self.phase("save"):
            self._save()
        seconds, settings = round(time.perf_counter() - started, 3), self.config.checkpoint
        self.metrics.note("save", self.state.iteration, seconds=seconds)
        record_shortage(self.events, settings, self.state.iteration)
        self.metrics.record_save(self.state.iteration, self.state.consumed_samples, self.config.checkpoint.async_save)
        self.metrics.record_event("save-checkpoint", self.state.iteration, self.state.consumed_samples)
        self.hooks.call("after_save", self, lambda: SaveFacts(self.state.iteration, settings.save, settings.async_save))

    def save_snapshot(self) -> None:
        """Keep the present state in memory, from which the run goes on if ranks are lost. All ranks call it."""
        with self.phase("save"):
            check_buffers(self.optimizer, self.state.iteration)
            moments = not self.config.checkpoint.no_save_optim
            self.checkpoints.snapshots.save(self.state.iteration, self._pieces(moments), self._record(moments))

    def save_best(self) -> None:
        """Write the present weights to the folder of the best checkpoint. All ranks call it."""
        with self.phase("save"):
            pieces = self._pieces(False)
            self.checkpoints.best.save(self.state.iteration, pieces, self._record(moments=False))

    def _save(self) -> None:
        check_buffers(self.optimizer, self.state.iteration)
        moments = not self.config.checkpoint.no_save_optim
        pieces = self._pieces(moments, stable=self.config.checkpoint.async_save)
        self.checkpoints.manager.save(self.state.iteration, pieces, self._record(moments))

    def _pieces(self, moments: bool, stable: bool = False) -> list[Piece]:
        """This rank's part of what a checkpoint holds; its base has the other weights."""
        left_out = self.in_base & set(self.origin["untrained"]["frozen"])
        pieces = self.optimizer.pieces(moments, unique=True, stable=stable, shared=True)
        return [piece for piece in pieces if piece.name not in left_out]

    def _record(self, moments: bool) -> dict[str, Any]:
        assert self.pending.outcome is None, "the outcome of the last step has not been read"
        return dict(
            state=self.state.record(),
            optimizer_steps=self.optimizer.step_count if moments else None,
            config=self.config.to_record(),
            lengths=asdict(self.lengths),
            vocab_size=self.vocab_size,
            mesh=self.context.mesh.logged_sizes,
            samples=self._samples(),
            hooks=self.hooks.state(),
            **self.origin,
        )

    def _samples(self) -> dict[str, list[int]]:
        """Hashes of a few samples of this run, by which a resumed run checks that it reads the same ones."""
        places = probe_places(self.state.consumed_samples) if self.context.is_rank_zero else []
        return {str(place): list(self.loaders.train.sample_hash(place)) for place in places}

    def close(self, error: Optional[BaseException] = None) -> None:
        """Stop threads, close files and leave the job; after a failure, without waiting for other ranks."""
        error = peer_lost(error, self.watch.heartbeat, self.config) or error
        orderly = error is None or isinstance(error, Preempted)
        if orderly:
            self.profiler.end(self.state.iteration)
        if self.checkpoints.manager:
            patience = LAST_SAVE_WITHOUT_PEER if isinstance(error, PeerLost) else LAST_SAVE
            patience = 0.0 if isinstance(error, KeyboardInterrupt) else patience
            self.checkpoints.manager.close(None if orderly else patience, copies=error is not None)
        if self.checkpoints.best:
            self.checkpoints.best.close(None if orderly else 0.0)
        self.loaders.close()
        stop = self.watch.stop.why if self.watch.stop else ""
        why = stop if error is None else first_line(error)
        code = 0 if error is None else exit_code(error)
        self.metrics.end(self.done, code, why)
        if self.alarm:
            self.alarm.close()
        record_end(self.events, code, why, self.done, self.train_iters)
        self.metrics.close()
        self.watch.close()
        if orderly:
            if self.checkpoints.snapshots:
                self.checkpoints.snapshots.close(self.state.iteration)
            self.ranks.finish()
            leave_job(self.context)
        if self.checkpoints.manager and error is None:  # without process group: other ranks must not wait for copies
            self.checkpoints.manager.close_copies(lambda: self.watch.heartbeat.beat("save"))


@dataclass(frozen=True)
class BuiltModel:
    """The model chunks of a rank, with their vocabulary and optimizer."""

    tokenizer: Any  # None for a vocabulary without text
    vocab_size: int
    dtype: torch.dtype  # number format of the weights
    facts: Facts
    selection: Selection  # the trained parameters
    pipeline: Pipeline
    stages: list[torch.nn.Module]
    optimizer: DistributedOptimizer

    @property
    def vocabulary(self) -> Optional[str]:
        return self.tokenizer and self.tokenizer.fingerprint

    @property
    def fingerprints(self) -> Sequence[str]:
        """The fingerprint of the vocabulary, and those that earlier versions of the suite gave it."""
        return (self.tokenizer.fingerprint, *self.tokenizer.superseded) if self.tokenizer else ()


@dataclass(frozen=True)
class Start:
    """The state in which a run starts, fresh or from a checkpoint, and the messages about it."""

    state: State
    record: Optional[dict[str, Any]]  # the checkpoint's record; None without a checkpoint
    code: dict[str, Any]  # the record of this run's code, on rank 0
    lengths: Lengths
    notices: list[str]
    warnings: list[str]
    changed: Optional[ResumeChanges] = None  # from the checkpoint's settings, if this run resumes (not with --finetune)
