# SPDX-License-Identifier: Apache-2.0
"""Timeline of a rank's profiled steps: its passes, messages and waits as bars in lanes.

    recording = Recording("cuda")
    with Recording.of(recording):
        ...                                   # collectives, pipeline messages and phases record themselves
    bars = recording.bars()

A message is launched, travels, and is waited for: the time before the wait overlaps other work, the wait is *exposed*. On a
CPU both are times of the host. On CUDA they are events on the compute stream, which the host reads after the steps. The
stream computes between launch and wait, and is idle during the wait.

The arrival of a message is not recorded: a wait for one that has arrived is short.
"""

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional

COMPUTE, TP, CP, EP = "compute", "tensor parallel", "context parallel", "expert parallel"
GATHER, REDUCE, RECEIVE, SEND, OTHER = "gathers", "reductions", "receives", "sends", "other messages"
LANES = (COMPUTE, TP, CP, EP, GATHER, REDUCE, RECEIVE, SEND, OTHER)  # from top to bottom
DATA_PARALLEL = ("replicate", "shard", "dp", "dp_cp", "expert_replicate", "expert_shard", "expert_dp")  # axes of a mesh


class Bar(NamedTuple):
    """A span of a lane. Times in seconds since the recording began."""

    lane: str
    name: str
    start: float  # launch
    wait: float  # begin of the wait; `end` without a wait, and for a pass
    end: float

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for the message."""
        return self.end - self.wait


class Recording:
    """The bars of one rank. Everything is recorded in the `active` one; None costs nothing."""

    active: Optional["Recording"] = None

    def __init__(self, device: str):
        self.clock = _DeviceClock() if device == "cuda" else _HostClock()
        self.began = time.time_ns()  # time 0 of `bars`
        self._spans: list[_Span] = []

    @classmethod
    @contextlib.contextmanager
    def of(cls, recording: "Recording"):
        """A context in which `recording` is active."""
        before, cls.active = cls.active, recording
        try:
            yield
        finally:
            cls.active = before

    def launch(self, lane: str, name: str) -> "_Span":
        """Start a span now."""
        span = _Span(self.clock, lane, name)
        self._spans.append(span)
        return span

    def bars(self) -> list[Bar]:
        """All bars in the order of their start. Messages without a wait yet end with the recording."""
        last = self.clock.now()
        self.clock.finish()
        bars = []
        for span in self._spans:
            end = span.end or last
            marks = span.start, span.wait or end, end
            bars.append(Bar(span.lane, span.name, *map(self.clock.seconds, marks)))
        return bars


class _Span:
    """An unfinished bar. As a context manager: a pass, or a message that is waited for immediately."""

    def __init__(self, clock, lane: str, name: str):
        self.clock, self.lane, self.name = clock, lane, name
        self.start, self.wait, self.end = clock.now(), None, None

    def begin_wait(self) -> None:
        self.wait = self.clock.now()

    def end_wait(self) -> None:
        self.end = self.clock.now()

    def __enter__(self) -> "_Span":
        if self.lane != COMPUTE:
            self.wait = self.start
        return self

    def __exit__(self, *_) -> None:
        self.end_wait()


class _RecordedWork:
    """A message in flight that records its wait."""

    def __init__(self, work, span: _Span):
        self.work, self.span = work, span

    def wait(self) -> None:
        self.span.begin_wait()
        self.work.wait()
        self.span.end_wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


class _HostClock:
    """The clock of the host. Its marks are seconds."""

    def __init__(self):
        self.base = time.perf_counter()
        self.now = time.perf_counter

    def seconds(self, mark: float) -> float:
        return mark - self.base

    def finish(self) -> None:
        pass


class _DeviceClock:
    """The clock of a CUDA device. Its marks are events on the current stream; the host waits for them only in `finish`."""

    def __init__(self):
        import torch

        self.cuda = torch.cuda
        self.cuda.synchronize()  # 0 of the device is 0 of the host
        self.base = self.now()

    def now(self):
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark) -> float:
        return self.base.elapsed_time(mark) / 1000

    def finish(self) -> None:
        self.cuda.synchronize()


# ---- recording -----------------------------------------------------------------------------------------------------------


def note(lane: str, name: str, work: Any) -> Any:
    """Record a message that has just been launched. Returns `work`, or a wrapper that records its wait."""
    recording = Recording.active
    return work if recording is None else _RecordedWork(work, recording.launch(lane, name))


def span(lane: str, name: str) -> Optional[AbstractContextManager]:
    """A context around a pass, or around a message that is waited for immediately. None while nothing is recorded."""
    recording = Recording.active
    return None if recording is None else recording.launch(lane, name)


def lane_of(axis: str, kind: str) -> str:
    """The lane of a collective over an axis of the mesh.

    >>> lane_of("tp", "all-gather"), lane_of("shard", "all-gather"), lane_of("world", "all-reduce")
    ('tensor parallel', 'gathers', 'other messages')
    """
    if axis in DATA_PARALLEL:
        return GATHER if kind == "all-gather" else REDUCE
    return {"tp": TP, "etp": TP, "cp": CP, "cp_inner": CP, "cp_outer": CP, "ep": EP}.get(axis, OTHER)


# ---- sums ----------------------------------------------------------------------------------------------------------------


def exposed(bars: list[Bar]) -> dict[str, float]:
    """Seconds in waits, of each lane of messages in use."""
    sums = dict.fromkeys(LANES, 0.0)
    for bar in bars:
        sums[bar.lane] += bar.exposed
    used = {bar.lane for bar in bars}
    return {lane: seconds for lane, seconds in sums.items() if lane in used and lane != COMPUTE}


def exposed_line(bars: list[Bar]) -> str:
    """A sentence with the time a rank waited for messages of each kind.

    >>> exposed_line([Bar("compute", "F0", 0, 1, 1), Bar("gathers", "all-gather", 0, 0.75, 1), Bar("sends", "F0", 0, 1, 1)])
    'Exposed communication (time in waits): 250.0 ms of 1000.0 ms: gathers 250.0 ms, sends 0.0 ms'
    """
    sums, whole = (
        exposed(bars),
        max((bar.end for bar in bars), default=0.0) - min((bar.start for bar in bars), default=0.0),
    )
    parts = ", ".join(f"{lane} {1000 * seconds:.1f} ms" for lane, seconds in sums.items())
    return (
        f"Exposed communication (time in waits): {1000 * sum(sums.values()):.1f} ms of {1000 * whole:.1f} ms"
        f"{': ' if parts else ''}{parts}"
    )
