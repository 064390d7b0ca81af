# SPDX-License-Identifier: Apache-2.0
"""What a rank computes, sends and waits for while steps are profiled: the bars of a timeline, in lanes.

    recording = Recording("cuda")
    with Recording.of(recording):
        ...                                   # collectives, pipeline messages and phases note themselves
    bars = recording.bars()

A message is launched, is under way, and is waited for: what lies before the wait is hidden behind other work, the wait is
*exposed*. On a CPU both are times of the host. On CUDA they are events on the stream that computes, which the host reads
when the steps are over; between launch and wait that stream computes, in the wait it stands still.

When a message has arrived is not known where nobody waits: a wait that finds it there is short.
"""

import contextlib
import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Optional

COMPUTE, TP, CP, GATHER, REDUCE = "compute", "tensor parallel", "context parallel", "gathers", "reductions"
RECEIVE, SEND, OTHER = "receives", "sends", "other messages"
LANES = (COMPUTE, TP, CP, GATHER, REDUCE, RECEIVE, SEND, OTHER)  # from top to bottom
DATA_PARALLEL = ("replicate", "shard", "dp", "dp_cp", "expert_dp")  # axes of a mesh


class Bar(NamedTuple):
    """A span of a lane. Times in seconds since the recording began."""

    lane: str
    name: str
    start: float  # it was launched
    wait: float  # from here on it was waited for; `end` where nobody had to, or for what is no message
    end: float

    @property
    def exposed(self) -> float:
        """Seconds in which the rank waited for it."""
        return self.end - self.wait


class Recording:
    """The bars of one rank. `active` is the one that everything is noted in; None costs nothing."""

    active: Optional["Recording"] = None

    def __init__(self, device: str):
        self.clock = _DeviceClock() if device == "cuda" else _HostClock()
        self.began = time.time_ns()  # when `bars` have their 0
        self._spans: list[_Span] = []

    @classmethod
    @contextlib.contextmanager
    def of(cls, recording: "Recording"):
        """Inside, `recording` is active."""
        before, cls.active = cls.active, recording
        try:
            yield
        finally:
            cls.active = before

    def launch(self, lane: str, name: str) -> "_Span":
        """Something begins now."""
        span = _Span(self.clock, lane, name)
        self._spans.append(span)
        return span

    def bars(self) -> list[Bar]:
        """All that was noted, in the order in which it began. What nobody has waited for yet ends with the recording."""
        last = self.clock.now()
        self.clock.finish()
        found = []
        for span in self._spans:
            end = span.end or last
            marks = span.start, span.wait or end, end
            found.append(Bar(span.lane, span.name, *map(self.clock.seconds, marks)))
        return found


class _Span:
    """A bar that is being made. As a context manager: something that is done at once, a pass or a message."""

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


class _Noted:
    """A message under way whose wait is noted."""

    def __init__(self, work, span: _Span):
        self.work, self.span = work, span

    def wait(self) -> None:
        self.span.begin_wait()
        self.work.wait()
        self.span.end_wait()

    def is_completed(self) -> bool:
        return self.work.is_completed()


class _HostClock:
    """Marks are seconds."""

    def __init__(self):
        self.base = time.perf_counter()
        self.now = time.perf_counter

    def seconds(self, mark: float) -> float:
        return mark - self.base

    def finish(self) -> None:
        pass


class _DeviceClock:
    """Marks are events on the current stream: nobody waits for one before `finish`."""

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


# ---- what notes itself ---------------------------------------------------------------------------------------------------


def note(lane: str, name: str, work: Any) -> Any:
    """A message that has just been launched: `work`, or what notes its wait."""
    recording = Recording.active
    return work if recording is None else _Noted(work, recording.launch(lane, name))


def span(lane: str, name: str) -> Optional[AbstractContextManager]:
    """Around a pass, or around a message that is waited for at once. None while nothing is recorded."""
    recording = Recording.active
    return None if recording is None else recording.launch(lane, name)


def lane_of(axis: str, kind: str) -> str:
    """Where a collective over an axis of the mesh belongs.

    >>> lane_of("tp", "all-gather"), lane_of("shard", "all-gather"), lane_of("world", "all-reduce")
    ('tensor parallel', 'gathers', 'other messages')
    """
    if axis in DATA_PARALLEL:
        return GATHER if kind == "all-gather" else REDUCE
    return {"tp": TP, "cp": CP}.get(axis, OTHER)


# ---- what comes of it ----------------------------------------------------------------------------------------------------


def exposed(bars: list[Bar]) -> dict[str, float]:
    """Seconds in waits, of each lane of messages that has any."""
    sums = dict.fromkeys(LANES, 0.0)
    for bar in bars:
        sums[bar.lane] += bar.exposed
    used = {bar.lane for bar in bars}
    return {lane: seconds for lane, seconds in sums.items() if lane in used and lane != COMPUTE}


def exposed_line(bars: list[Bar]) -> str:
    """How long a rank waited for messages of which kind, in a sentence.

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
