# SPDX-License-Identifier: Apache-2.0
"""The guards of the training loop: votes to stop, the ledger of samples, and the decision whether to apply an update.

totals = all_reduce(watch.with_votes(sums, batches))
*losses, tokens = watch.count(totals.tolist())               # records the votes and the ledger
verdict = watch.judge(iteration, recent, loss, norm, cause)  # UPDATE, SKIP, or ROLLBACK; or it raises

If the host must not wait for these numbers, the device decides with `watch.refuses` whether the update is applied, and
`judge` comes to the same verdict one step later.
"""

import enum
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.data.sampler import sum_hashes, to_hex
from megatron.errors import NumericsError
from megatron.guard.culprit import Finding, Observer
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.spikes import Recent, Spike
from megatron.guard.stopping import VOTES, Stop, StopRequests
from megatron.mpu.transfer import to_device
from megatron.settings import schema
from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import EventLog

IN_A_ROW = 10  # consecutive skipped steps after which skipping no longer helps


class StepVerdict(enum.Enum):
    """The decision on a step's update."""

    UPDATE = "update"
    SKIP = "skip"
    ROLLBACK = "rollback"


class Watch:
    """A rank's guards during training.

    events:    where skipped steps, spikes and values that are not finite are recorded
    all_gather_object:  value -> [value of every rank]
    counts:    whether this rank's samples count in the ledger: True on one of the ranks with the same micro-batches
    """

    def __init__(
        self,
        settings: schema.Guard,
        *,
        minutes: Optional[float] = None,
        heartbeat: Optional[Heartbeat] = None,
        rank: int = 0,
        events: Optional[EventLog] = None,
        all_gather_object: Callable[[Any], list] = lambda value: [value],
        counts: bool = True,
    ):
        self.settings, self.heartbeat, self.rank = settings, heartbeat or Heartbeat(), rank
        self.events, self.all_gather_object, self.counts = events or EventLog(), all_gather_object, counts
        self.requests = StopRequests(
            signals=settings.exit_signal_handler,
            kill_switch=settings.kill_switch_file,
            minutes=minutes,
            started=time.time(),
        )
        self.stop: Optional[Stop] = None  # agreed by all ranks at the last step
        self.ledger = ""  # of the last step
        self.spike: Optional[Spike] = None  # of the last step
        self.in_a_row = 0  # steps that were skipped because of a spike or a value that is not finite
        self.overflows = 0  # steps in a row that were skipped while the loss scale adjusts itself

    # ---- values in the step's all-reduce ---------------------------------------------------------------------------

    def with_votes(self, sums: torch.Tensor, batches: Sequence) -> torch.Tensor:
        """A rank's sums of the step, followed by its part of the ledger and its votes to stop; fp64."""
        halves = sum_hashes(batch.hash for batch in batches) if self.counts else (0, 0)
        return torch.cat([sums, to_device([*halves, *self.requests.votes()], sums.dtype, sums.device)])

    def count(self, totals: list[float]) -> list[float]:
        """Record the votes and the ledger of all ranks; return the totals of the sums given to `with_votes`."""
        *values, first, second = totals[:-VOTES]
        self.ledger = to_hex((first, second))
        self.stop = self.requests.agreed(totals[-VOTES:])
        return values

    # ---- numbers ---------------------------------------------------------------------------------------------------

    def judge(
        self,
        step: int,
        recent: Recent,
        loss: float,
        norm: float,
        explain: Callable[[], str],
        *,
        scaling: bool,
        rollbacks: int = 0,
    ) -> StepVerdict:
        """Decide whether to apply a step's update. All ranks have the same numbers and come to the same verdict.

        scaling: the loss scale is dynamic, so an overflow now and then is expected
        explain: describes where a non-finite value comes from; all ranks call it together
        Raises NumericsError if the settings demand a stop, or if continuing would not help.
        """
        self.spike = None
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return self._overflow(step, loss, norm) if scaling else self._not_finite(step, loss, norm, explain())
        self.overflows = 0
        self.spike = recent.spike(loss, norm, self.settings.spike_threshold)
        if self.spike is None or self.settings.on_spike == "continue":
            if self.spike:
                self._record_spike(step, f"iteration {step}: {self.spike}")
            self.in_a_row = 0
            return StepVerdict.UPDATE
        if self.settings.on_spike == "skip":
            self._record_spike(step, f"iteration {step} is skipped: {self.spike}")
            self._count_skip(step, str(self.spike))
            return StepVerdict.SKIP
        self._record_spike(step, f"iteration {step}: {self.spike}", logged=False)
        if rollbacks >= self.settings.max_rollbacks:
            raise NumericsError(
                f"iteration {step}: {self.spike}",
                f"{rollbacks} rollbacks have not helped (--max-rollbacks)",
                "lower --lr, or check the data that was left out",
            )
        return StepVerdict.ROLLBACK

    def suspicion(self, recent: Recent, loss: float, norm: float, *, scaling: bool) -> str:
        """Why the numbers of a step are not what a computation usually gives; "": they are."""
        if not math.isfinite(loss) or not (scaling or math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: not finite"
        return str(recent.spike(loss, norm, self.settings.spike_threshold) or "")

    def refuses(self, recent: Recent, figures: torch.Tensor) -> torch.Tensor:
        """A flag on the device: True where `judge` will return anything but UPDATE. figures: fp64 [loss, norm]"""
        refused = ~torch.isfinite(figures).all()
        if self.settings.on_spike != "continue":
            measures = [*zip(*recent.measures(), strict=True)]
            medians, deviations = to_device(sum(measures, ()), figures.dtype, figures.device).view(2, 2)
            refused |= ((figures - medians) / deviations > self.settings.spike_threshold).any()
        return refused

    def _record_spike(self, step: int, message: str, **more) -> None:
        spike, action = self.spike, self.settings.on_spike
        facts = dict(what=spike.what, value=spike.value, median=spike.median, score=spike.score, action=action)
        self.events.record("spike", message, iteration=step, **facts, **more)

    def _overflow(self, step: int, loss: float, norm: float) -> StepVerdict:
        """Skip a step of fp16: the loss scale falls. Warn if that cannot help, or does not for many steps."""
        self.overflows += 1
        why = f"loss {loss}, gradient norm {norm}"
        if not math.isfinite(loss):
            if self.overflows == 1:
                self._record_not_finite(step, f"iteration {step} is skipped: {why}: not finite", loss, norm, "skip")
            return StepVerdict.SKIP
        many = self.overflows == rule_of(self.events.rules, "skipped_step").threshold
        row = f", as are the {self.overflows - 1} steps before" * many
        self.events.record(
            "skipped_step",
            f"iteration {step} is skipped{row}: gradients overflow with the present loss scale ({why})",
            iteration=step,
            level="warning" if many else "info",
            why=why,
            in_a_row=self.overflows,
        )
        return StepVerdict.SKIP

    def _record_not_finite(self, step: int, message: str, loss: float, norm: float, action: str) -> None:
        stops = action == "stop"  # the error that ends the run is printed anyway
        facts = dict(loss=str(loss), grad_norm=str(norm), action=action)
        level = "error" if stops else "warning"
        self.events.record("not_finite", message, iteration=step, level=level, logged=not stops, **facts)

    def _not_finite(self, step: int, loss: float, norm: float, where: str) -> StepVerdict:
        what = f"iteration {step}: loss {loss}, gradient norm {norm}: not finite"
        if self.settings.on_nan == "skip":
            why = f"{what[what.index(':') + 2 :]}; {where}"
            self._record_not_finite(step, f"iteration {step} is skipped: {why}", loss, norm, "skip")
            self._count_skip(step, why)
            return StepVerdict.SKIP
        self._record_not_finite(step, f"{what}; {where}", loss, norm, "stop")
        raise NumericsError(
            what,
            where,
            "no update was made and the last checkpoint is untouched; lower --lr, raise "
            "--lr-warmup-iters, use --bf16 instead of --fp16, or --on-nan skip",
        )

    def _count_skip(self, step: int, why: str) -> None:
        self.in_a_row += 1
        if self.in_a_row >= IN_A_ROW:
            raise NumericsError(
                f"iteration {step}: {IN_A_ROW} steps in a row had to be skipped",
                why,
                "the weights are beyond repair by skipping: go back to an older checkpoint",
            )

    def find_culprit(self, stages, batches, replay: Callable[[Callable], Any], describe: Callable[[int], str]) -> str:
        """Repeat a step on all ranks with hooks on every module; describe the source of the first non-finite value.

        replay(on_op): runs the step's passes again, calling `on_op(op)` at each op of the schedule.
        describe(place): where a sample comes from.
        """
        self.heartbeat.beat("replay")
        observer = Observer(stages, batches, self.rank)
        with observer.watching():
            replay(observer.on_op)
        mine = observer.first
        answer = mine and (mine, [describe(place) for place in mine.samples])
        answers = sorted(filter(None, self.all_gather_object(answer)), key=lambda answer: answer[0])
        if not answers:
            return (
                "the same step, repeated, is finite: its arithmetic is not repeatable on this machine "
                "(memory, device, or a kernel that is not deterministic)"
            )
        first: Finding = answers[0][0]
        samples = "".join(f"\n    {text}" for text in answers[0][1][:8])
        others = len({finding.rank for finding, _ in answers if finding.kind == first.kind}) - 1
        also = f"; seen on {others} more ranks" if others > 1 else "; seen on another rank too" if others else ""
        return f"{first}{also}{samples}"

    def close(self) -> None:
        """Restore the signal handlers."""
        self.requests.close()
