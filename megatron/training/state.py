# SPDX-License-Identifier: Apache-2.0
"""`Run` holds the objects of a pretraining job; `State` is what changes from step to step, and what checkpoints keep."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Optional

import torch

from megatron.checkpoint.manager import CheckpointManager
from megatron.data.loader import MicroBatchLoader
from megatron.errors import CheckpointError, Preempted, exit_code
from megatron.guard.changes import probe_places
from megatron.guard.endings import peer_lost
from megatron.guard.replicas import check_buffers
from megatron.guard.spikes import Recent
from megatron.guard.watch import StepVerdict, Watch
from megatron.mpu.initialize import RankContext, leave_job
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.scaler import LossScaler
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.execute import P2PCommunicator
from megatron.pipeline.stage_outputs import StageOutputs
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline_recorder import Recorder
from megatron.settings import schema
from megatron.settings.batch import ended_epoch, total_iterations
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.phases import phase
from megatron.telemetry.profiler import Profiler
from megatron.training.hooks import Hooks, SaveFacts
from megatron.training.outcome import Outcome
from megatron.training.step_notes import StepNotes

LAST_SAVE = 30.0  # seconds that a failing run waits for a checkpoint that is being written


@dataclass(frozen=True)
class State:
    """Where a run is. Everything a step depends on besides settings and weights; saved in every checkpoint."""

    scaler: LossScaler
    iteration: int = 0
    consumed_samples: int = 0
    scheduled_samples: int = 0  # those whose step was not skipped: what learning rate and weight decay count
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    recent: Recent = Recent()  # what spikes are measured against
    left_out: tuple[int, ...] = ()  # iterations whose samples are passed over
    rollbacks: int = 0
    # Of a recipe with measures (`training.measures`): the best validation's figure, where it was, how many were no better
    # since; and the loss of the last one, also where --stop-at-loss asks for it.
    best: Optional[float] = None
    best_iteration: int = 0
    evaluations_since_best: int = 0
    valid_loss: Optional[float] = None
    evaluation_due: int = 0  # 1 in what is saved ahead of an evaluation that is judged: it is still to come

    def behind(self, samples: int) -> "State":
        """The state behind a step of this many samples; what came of it is for `judged` to say."""
        consumed = self.consumed_samples + samples
        return replace(self, iteration=self.iteration + 1, consumed_samples=consumed, evaluation_due=0)

    def judged(
        self, samples: int, verdict: StepVerdict, loss: float = 0.0, norm: float = 0.0, window: int = 0
    ) -> "State":
        """The state once it is known that the last step's samples were trained on, or skipped."""
        skipped = verdict is StepVerdict.SKIP
        return replace(
            self,
            scaler=self.scaler.update(not math.isfinite(norm)),
            recent=self.recent if skipped else self.recent.after(loss, norm, window),
            scheduled_samples=self.scheduled_samples + (0 if skipped else samples),
            skipped_iterations=self.skipped_iterations + skipped,
        )

    def train_iters(self, batch: schema.Batch, dp: int) -> int:
        """Steps of the whole run that is here now."""
        return total_iterations(batch, dp, self.iteration, self.consumed_samples)

    def record(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {**asdict(self), "scaler": self.scaler.state()}

    def restored(self, record: dict[str, Any]) -> "State":
        """This state's settings with a checkpoint's counts. Raises CheckpointError where they are none."""
        try:
            known = {**record, "scaler": self.scaler.restored(record["scaler"])}
            if "recent" in record:  # checkpoints of earlier versions have none
                known["recent"] = Recent.of(record["recent"])
            left_out = tuple(sorted({*self.left_out, *record.get("left_out", ())}))
            found = replace(self, **{**known, "left_out": left_out})
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointError(f"state.json does not say where its run was: {error!r}") from None
        for name, value in vars(found).items():
            if isinstance(getattr(self, name), int) and not (type(value) is int and 0 <= value < 1 << 63):
                raise CheckpointError(f"state.json does not say where its run was: {name} {value!r}")
        return found


def due(interval: Optional[int], iteration: int) -> bool:
    """Whether something that happens every `interval` steps happens behind this one."""
    return bool(interval) and iteration % interval == 0


@dataclass
class Run:
    """A job in progress: what was built once, and `state`, which moves."""

    config: schema.Config  # resolved
    context: RankContext
    vocab_size: int  # without padding
    sums: dict[str, float]  # what stages return: name -> weight in what is minimised
    stages: list[torch.nn.Module]  # this rank's model chunks
    pipeline: Pipeline
    wire: P2PCommunicator  # to the neighbouring pipeline stages
    optimizer: DistributedOptimizer
    lengths: Lengths
    train_loader: MicroBatchLoader
    valid_loader: Optional[MicroBatchLoader]
    test_loader: Optional[MicroBatchLoader]
    checkpoint_manager: Optional[CheckpointManager]
    metrics: Metrics
    watch: Watch
    state: State
    recorder: Optional[Recorder]
    profiler: Profiler
    origin: dict[str, Any]  # what checkpoints say of the code, libraries, vocabulary and folder of their run
    request_loader: Optional[MicroBatchLoader] = None  # --eval-requests
    requests_at: int = -1  # the step behind which they were evaluated last
    measures: Any = None  # training.measures.Measures, of a recipe that has some
    best_manager: Optional[CheckpointManager] = None
    reads_late: bool = False  # the host reads the numbers of a step in the next one, where nothing needs them before
    unread: Optional[Outcome] = None  # the last step's numbers, which the host has not read
    notes: StepNotes = field(default_factory=StepNotes)
    validated: tuple[int, range] = (0, range(0))  # iteration and samples of the last validation of this start
    hooks: Hooks = field(default_factory=Hooks)
    saved_hooks: Optional[Mapping[str, Any]] = None  # what the checkpoint keeps of hooks that this run goes on from
    needs_gradient: Optional[list[bool]] = None  # of each chunk, whether anything before it is trained
    counts: Mapping[str, str] = field(
        default_factory=dict
    )  # what else than tokens some sums are divided by for the log
    returned: Optional[StageOutputs] = field(init=False)  # what stages return, until all ranks have compared it

    def __post_init__(self):
        self.returned = StageOutputs(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """What stages return sums of: losses, and the tokens that count."""
        return (*self.sums, "tokens")

    @property
    def dp(self) -> int:
        return self.context.mesh.dp.size

    @property
    def train_iters(self) -> int:
        return self.state.train_iters(self.config.batch, self.dp)

    @property
    def done(self) -> int:
        """Steps of which it is known what came of them."""
        return self.state.iteration - (self.unread is not None)

    def ended_epoch(self, iteration: int, before: int, after: int) -> int:
        """The number of the epoch that this step ends, from `before` to `after` consumed samples, or 0."""
        if not self.config.batch.train_epochs:  # a ramp-up is walked to its end to know the last step
            return 0
        return ended_epoch(self.config.batch, before, after, last=iteration >= self.train_iters)

    def save_is_due(self, iteration: int, epoch: int) -> bool:
        """Whether a checkpoint is asked for behind this step, which has ended an epoch (0: none). To be asked of each."""
        if self.checkpoint_manager is None:
            return False
        return self.checkpoint_manager.due(iteration) or bool(epoch and due(self.config.checkpoint.save_epoch, epoch))

    def num_zeros_in_grad(self, iteration: int) -> Optional[int]:
        """Of the gradients of a step, where the log wants it (--log-num-zeros-in-grad); all ranks together."""
        logging = self.config.logging
        wanted = logging.log_num_zeros_in_grad and due(logging.log_interval, iteration)
        return self.optimizer.num_zeros_in_grad() if wanted else None

    def params_norm(self, iteration: int) -> Optional[float]:
        """Behind a step, where the log wants it (--log-params-norm); all ranks together."""
        logging = self.config.logging
        wanted = logging.log_params_norm and due(logging.log_interval, iteration)
        return self.optimizer.params_norm() if wanted else None

    def phase(self, name: str, step: Optional[int] = None) -> AbstractContextManager:
        """Announce a part of the run to all who listen, the heartbeat first: `with run.phase("update"):`."""
        self.watch.heartbeat.beat(name, step)
        return phase(name)

    def save(self) -> None:
        """Write a checkpoint of the present state, or begin to; all ranks together. Raises what the manager does."""
        started = time.perf_counter()
        with self.phase("save"):
            self._save()
        self.metrics.note("save", self.state.iteration, seconds=round(time.perf_counter() - started, 3))
        self.metrics.record_save(self.state.iteration, self.state.consumed_samples, self.config.checkpoint.async_save)
        self.metrics.record_event("save-checkpoint", self.state.iteration, self.state.consumed_samples)
        settings = self.config.checkpoint
        self.hooks.call("after_save", self, lambda: SaveFacts(self.state.iteration, settings.save, settings.async_save))

    def save_best(self) -> None:
        """Write the weights as they are to where the best ones are kept; all ranks together."""
        with self.phase("save"):
            pieces = self.optimizer.pieces(False, unique=True, shared=True)
            self.best_manager.save(self.state.iteration, pieces, self._record(moments=False))

    def _save(self) -> None:
        check_buffers(self.optimizer, self.state.iteration)
        moments = not self.config.checkpoint.no_save_optim
        pieces = self.optimizer.pieces(moments, unique=True, stable=self.config.checkpoint.async_save, shared=True)
        self.checkpoint_manager.save(self.state.iteration, pieces, self._record(moments))

    def _record(self, moments: bool) -> dict[str, Any]:
        assert self.unread is None, "whether the last step's update was made is not known"
        return dict(
            state=self.state.record(),
            optimizer_steps=self.optimizer.step_count if moments else None,
            config=self.config.to_record(),
            lengths=asdict(self.lengths),
            vocab_size=self.vocab_size,
            mesh=self.context.mesh.sizes,
            samples=self._samples(),
            hooks=self.hooks.state(),
            **self.origin,
        )

    def _samples(self) -> dict[str, list[int]]:
        """Hashes of a few samples that this run has had: whoever goes on from here can tell whether it would have too."""
        places = probe_places(self.state.consumed_samples) if self.context.is_rank_zero else []
        return {str(place): list(self.train_loader.sample_hash(place)) for place in places}

    def close(self, error: Optional[BaseException] = None) -> None:
        """Stop helpers, close files, part from the other ranks; after a failure without waiting for them."""
        error = peer_lost(error, self.watch.heartbeat, self.config) or error
        orderly = error is None or isinstance(error, Preempted)
        if orderly:
            self.profiler.end(self.state.iteration)
        if self.checkpoint_manager:
            patience = 0.0 if isinstance(error, KeyboardInterrupt) else LAST_SAVE
            self.checkpoint_manager.close(None if orderly else patience, copies=error is not None)
        if self.best_manager:
            self.best_manager.close(None if orderly else 0.0)
        for batches in (self.train_loader, self.valid_loader, self.test_loader, self.request_loader):
            if batches:
                batches.close()
        stop = self.watch.stop.why if self.watch.stop else ""
        why = stop if error is None else (str(error).splitlines() or [type(error).__name__])[0]
        self.metrics.end(self.done, 0 if error is None else exit_code(error), why)
        self.metrics.close()
        self.watch.close()
        if orderly:
            leave_job(self.context)
        if (
            self.checkpoint_manager and error is None
        ):  # once the process group is closed: the other ranks must not wait for the copies
            self.checkpoint_manager.close_copies(lambda: self.watch.heartbeat.beat("save"))
