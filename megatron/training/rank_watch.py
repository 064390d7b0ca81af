# SPDX-License-Identifier: Apache-2.0
"""Compares the times of all ranks every few steps, and reports a slow rank, slow data, or a slow stage.

Each rank measures itself (`telemetry/rank_times.py`). Every `WINDOW` steps the ranks gather a few numbers each, without
waiting: the first rank reads them a step later, or two on a GPU, and decides (`telemetry/stragglers.py`).
"""

import socket
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType
from typing import Optional

import numpy as np
import torch

from megatron.mpu import collectives
from megatron.mpu.initialize import RankContext
from megatron.mpu.transfer import Arriving, to_device
from megatron.settings.schema import Logging
from megatron.telemetry.event_rules import Rules, rule_of
from megatron.telemetry.rank_times import COLUMNS, OWN, PARTS, DeviceTimes, HostTimes, RankTimes
from megatron.telemetry.stragglers import StragglerDetector, StragglerFinding

WINDOW = 5  # steps between two gathers
RANKS_A_RECORD = 16  # a record of metrics.jsonl for so many ranks covers one window, for twice as many ranks two


class RankWatch:
    """Measures this rank, and on the first rank watches all of them.

    rules: thresholds of the events `slow_rank` and `slow_data`
    """

    def __init__(self, context: RankContext, settings: Logging, rules: Rules = MappingProxyType({})):
        self.context, self.settings, self.world = context, settings, context.mesh.world
        self.enabled = settings.straggler_detection
        self.times: Optional[RankTimes] = None
        self.steps = 0  # of this launch
        self.gather, self.whole, self.arriving = None, None, None
        self.iteration = 0  # of the last gather
        self.records = _Sums(-(-self.world.size // RANKS_A_RECORD))
        self.logged = _Sums(1)
        if not self.enabled:
            return
        mesh = context.mesh
        place = mesh.pp.rank, socket.gethostname(), dict(mesh.coordinates)
        stages, self.hosts, places = zip(*context.all_gather_object(place), strict=True)
        names = [rank_name(*one) for one in enumerate(zip(self.hosts, places, strict=True))]
        self.detector = StragglerDetector(
            stages,
            names,
            context.device.type,
            share=rule_of(rules, "slow_rank").threshold - 1,
            data_share=rule_of(rules, "slow_data").threshold,
        )

    def measuring(self) -> AbstractContextManager:
        """A context in which this rank's times are measured."""
        if self.enabled:
            on_device = self.context.device.type == "cuda"
            event = partial(torch.cuda.Event, enable_timing=True)
            self.times = DeviceTimes(event) if on_device else HostTimes(waits=self.world.size > 1)
        return RankTimes.measuring(self.times)

    def after_step(self, run) -> None:
        """Count a step. All ranks call it. run: `training.state.Run`."""
        if self.times is None:
            return
        self.times.end_step()
        self._receive(run)
        self.steps += 1
        if self.steps % WINDOW == 0:
            self._send(list(self.times.take().values()), run.done)

    def _send(self, numbers: list[float], iteration: int) -> None:
        """Start to gather the numbers of all ranks. Those of the first window, which include compilation, do not count."""
        if self.steps == WINDOW:
            return
        mine = to_device(numbers, torch.float64, self.context.device)
        self.whole, self.iteration = mine.new_empty(len(numbers) * self.world.size), iteration
        self.gather = collectives.start_all_gather(self.whole, mine, self.world)

    def _receive(self, run) -> None:
        """Read the numbers that were gathered, once they are there."""
        if self.arriving is not None:
            self._decide(run)
        if self.gather is None:
            return
        self.gather.wait()
        self.gather = None
        if self.context.is_rank_zero:
            self.arriving = Arriving(self.whole)
            if self.context.device.type == "cpu":
                self._decide(run)

    def _decide(self, run) -> None:
        numbers, self.arriving = self.arriving.read(), None
        rows, iteration = np.array(numbers).reshape(-1, len(COLUMNS)), self.iteration
        for finding in self.detector.observe(rows, WINDOW):
            report(run, finding, iteration, self.hosts)
        if self.records.add(rows):
            steps, means = self.records.take(WINDOW)
            seconds = {part: [float(f"{value:.4g}") for value in means[:, n]] for n, part in enumerate(PARTS)}
            run.metrics.note("ranks", iteration, steps=steps, seconds=seconds)
        self.logged.add(rows)

    def log(self, run) -> None:
        """Log the fastest and the slowest ranks since the last call (--log-straggler)."""
        if self.settings.log_straggler and self.logged.count:
            steps, means = self.logged.take(WINDOW)
            run.metrics.log(straggler_lines(means, steps, self.settings.straggler_minmax_count, flops_of(run)))

    def finish(self) -> None:
        """Wait for a gather that was started. All ranks call it at an orderly end."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None


class _Sums:
    """Sums of the rows of several windows."""

    def __init__(self, windows: int):
        self.windows, self.count, self.rows = windows, 0, None

    def add(self, rows: np.ndarray) -> bool:
        """Add the rows of a window. Returns whether there are enough windows now."""
        self.rows = rows if self.rows is None else self.rows + rows
        self.count += 1
        return self.count >= self.windows

    def take(self, steps_each: int) -> tuple[int, np.ndarray]:
        """Return the number of steps and the mean seconds of a step [ranks, COLUMNS], and start again."""
        steps, rows = self.count * steps_each, self.rows
        self.count, self.rows = 0, None
        return steps, rows / steps


def report(run, finding: StragglerFinding, iteration: int, hosts) -> None:
    """Log a finding and record it as an event, unless the rules switch its kind off."""
    if rule_of(run.events.rules, finding.fields.get("what", finding.kind)).off:
        return
    if finding.kind == "unequal_stages":
        run.metrics.log(f"note: {finding.message}")
        run.metrics.note("note", iteration, what="unequal stages", words=finding.message)
        return
    fields = dict(finding.fields)
    if finding.rank is not None and finding.kind in ("slow_rank", "slow_data"):
        fields["rank_host"] = hosts[finding.rank]
    if finding.kind == "recovered":
        run.metrics.log(f"note: {finding.message}")
    run.events.record(finding.kind, finding.message, iteration=iteration, rank=finding.rank, **fields)


def rank_name(rank: int, host_and_place: tuple[str, dict[str, int]]) -> str:
    """The name of a rank in messages.

    >>> rank_name(3, ("node7", {"tp": 1, "pp": 0, "shard": 0}))
    'rank 3 (node7: tp 1)'
    """
    host, place = host_and_place
    words = ", ".join(f"{axis} {place[axis]}" for axis in ("dp", "pp", "cp", "tp") if place.get(axis))
    return f"rank {rank} ({host}{f': {words}' if words else ''})"


def flops_of(run) -> float:
    """Model FLOPs of a rank in a step."""
    sizes, batch = run.metrics.run, run.config.batch
    return sizes.flops_per_token * sizes.sample_tokens * (batch.global_batch_size or 0) / sizes.ranks


def straggler_lines(means: np.ndarray, steps: int, count: int, flops: float) -> str:
    """The `count` slowest and fastest ranks, by their own time of a step, with the throughput that it allows.

    >>> times = np.zeros((2, len(COLUMNS)))
    >>> times[:, 1], times[:, 6] = [0.1, 0.3], [0.2, 0.0]
    >>> print(straggler_lines(times, 10, 1, 3e12))
    own time of a step by rank, mean of 10 steps (ms):
        slowest: rank 1 300.0 (10.0 TFLOP/s): forward 300.0; waiting 0.0
        fastest: rank 0 100.0 (30.0 TFLOP/s): forward 100.0; waiting 200.0
    """
    own = means[:, : len(OWN)].sum(1)
    order = [int(rank) for rank in np.argsort(own, kind="stable")]
    rows = [("slowest", rank) for rank in order[::-1][:count]] + [("fastest", rank) for rank in order[:count]]
    lines = [f"own time of a step by rank, mean of {steps} steps (ms):"]
    for which, rank in rows:
        parts = ", ".join(f"{part} {1000 * s:.1f}" for part, s in zip(OWN, means[rank]) if s >= 0.00005)
        rate = f"{flops / max(own[rank], 1e-9) / 1e12:.1f} TFLOP/s"
        waits = f"waiting {1000 * means[rank, len(OWN)]:.1f}"
        lines.append(f"    {which}: rank {rank} {1000 * own[rank]:.1f} ({rate}): {parts}; {waits}")
    return "\n".join(lines)
