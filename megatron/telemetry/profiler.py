# SPDX-License-Identifier: Apache-2.0
"""Profile time and memory of some steps with torch.profiler on chosen ranks (`--profile`).

Each rank writes `rank_N.trace.json.gz`, for chrome://tracing or ui.perfetto.dev, and `rank_N.txt` with an overview (time of
computing, of communicating, of both, of neither) and tables: phases of the step, operators, communication, memory. The
overview and the first ten operators are logged.

At the same time passes and messages are recorded (`telemetry/lanes.py`): the trace includes their lanes, `timeline.svg`
draws those of all chosen ranks, and a line of the log gives the time in waits for each kind of message.
"""

import gzip
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Optional

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile

from megatron.errors import StorageError
from megatron.settings import schema
from megatron.storage.urls import local_folder
from megatron.telemetry import lanes, lanes_drawing
from megatron.telemetry.figures import size
from megatron.telemetry.phases import PHASES

COMMUNICATION = ("gloo:", "nccl:", "c10d::", "nccldevkernel", "ncclkernel")  # prefixes of names of collectives
PHASE_WORDS = {phase.words for phase in PHASES.values()}
ROWS, PRINTED, WIDTH = 40, 10, 60  # rows of a table in the file; in the log; characters of a name


class Profiler:
    """Profiles the iterations from --profile-step-start to --profile-step-end on this rank, if it is a chosen one.

    log: prints a line of the log, once for all ranks.
    all_threads: whether passes also run outside of the main thread (`mpu/two_passes.py`).
    barrier: waits for all ranks. Starting a profile takes seconds, which must not appear as waits in the timeline.
    """

    def __init__(
        self,
        config: schema.Config,
        rank: int,
        device: torch.device,
        log: Callable[[str], None],
        barrier: Callable[[], None] = lambda: None,
        all_threads: bool = False,
    ):
        self.barrier, self.all_threads = barrier, all_threads
        self.settings, self.rank, self.device, self.log = config.profiling, rank, device, log
        self.folder = Path(self.settings.profile_dir or local_folder(config.checkpoint.save or ".") / "profile")
        self.ranks = self.settings.profile_ranks or [0]
        self.chosen = self.settings.profile and self.rank in self.ranks
        self.running: Optional[profile] = None
        lanes.Recording.active = None  # may be left from another run of this process

    def before(self, iteration: int) -> None:
        """Start the profile if `iteration`, which is about to begin, is the first one to profile."""
        if self.chosen and not self.running and iteration == self.settings.profile_step_start:
            # No call stacks: with them torch 2.13 returns names that are not text (in half of the runs on this code).
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
            self.running = profile(
                activities=activities,
                record_shapes=self.settings.profile_detailed,
                profile_memory=True,
                experimental_config=_ExperimentalConfig(profile_all_threads=self.all_threads),
            )
            self.running.start()
            self.first = iteration
        if self.settings.profile and iteration == self.settings.profile_step_start:
            self.barrier()
            if self.running and lanes.Recording.active is None:
                lanes.Recording.active = lanes.Recording(self.device.type)

    def ends(self, iteration: int) -> bool:
        """Whether `iteration`, which is done, was the last one to profile."""
        return self.running is not None and iteration + 1 >= self.settings.profile_step_end

    def end(self, iteration: int) -> None:
        """Stop a running profile after `iteration`, and write its files."""
        if not self.running:
            return
        done, self.running = self.running, None
        recording, lanes.Recording.active = lanes.Recording.active, None
        own = lanes_drawing.RankLanes(self.rank, (self.first, iteration), recording.began, recording.bars())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        done.stop()
        averages = done.key_averages()
        trace, text = (self.folder / f"rank_{self.rank}.{kind}" for kind in ("trace.json.gz", "txt"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(str(trace))
            _add_lanes(trace, own)
            own.write(self.folder / f"rank_{self.rank}.lanes.json")
            picture = lanes_drawing.draw_profiled(self.folder, own, self.ranks)
            whole, *busy = _busy(done.events(), self.device.type)
            summary, elapsed = f"{overview(whole, *busy)}\n{lanes.exposed_line(own.bars)}", whole[1] - whole[0]
            text.write_text(
                f"iterations {self.first} to {iteration} of rank {self.rank}\n\n{summary}\n\n"
                + self._tables(averages, elapsed)
            )
        except OSError as error:
            raise StorageError(f"cannot write the profile to {self.folder}", error.strerror) from error
        self.log(
            f"profile of iterations {self.first} to {iteration}: {trace} (open it in ui.perfetto.dev), {picture} "
            f"(overlap of passes and messages) and {text}"
        )
        for line in summary.splitlines():
            self.log(line)
        self.log(_table(_without_phases(averages), self._sort(), PRINTED, elapsed))

    def _sort(self) -> str:
        return "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"

    def _tables(self, averages: EventList, elapsed: float) -> str:
        # A GPU has rows of the phases, too, whose times the rows of the host hold.
        phases = [event for event in averages if event.key in PHASE_WORDS and event.device_type == DeviceType.CPU]
        operators = _without_phases(averages)
        sent = [event for event in operators if event.key.lower().startswith(COMMUNICATION)]
        memory = "self_device_memory_usage" if self.device.type == "cuda" else "self_cpu_memory_usage"
        holders = [event for event in operators if getattr(event, memory)]
        tables = {
            "Phases of a step (recomputation and hooks lie in the backward pass)": (phases, "cpu_time_total", False),
            "Operators": (operators, self._sort(), True),
            "Communication (including waits for other ranks)": (sent, "cpu_time_total", True),
            "Memory (allocated minus freed, by the operator itself)": (holders, memory, True),
        }
        return f"Percentages are of the {elapsed / 1e3:.1f} ms that were profiled.\n\n" + "\n".join(
            f"{title}\n{_table(events, sort, ROWS, elapsed, own)}\n"
            for title, (events, sort, own) in tables.items()
            if events
        )


def _add_lanes(trace: Path, own: lanes_drawing.RankLanes) -> None:
    """Add the lanes to a trace that torch has written."""
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        text = file.read()
    with gzip.open(trace, "wt", encoding="utf-8", compresslevel=4) as file:
        file.write(lanes_drawing.with_lanes(text, own))


Interval = tuple[float, float]  # from, to, in microseconds


def _busy(events: EventList, device: str) -> tuple[Interval, list[Interval], list[Interval]]:
    """Intervals of (the steps, computing, communicating): kernels of a GPU, or operators of a CPU that call no others."""
    cuda = [event for event in events if event.device_type == DeviceType.CUDA] if device == "cuda" else []
    leaves = cuda or [event for event in events if not event.cpu_children and event.name not in PHASE_WORDS]
    sent, computed = [], []
    for event in leaves:
        kind = sent if event.name.lower().startswith(COMMUNICATION) else computed
        kind.append((event.time_range.start, event.time_range.end))
    ranges = [event.time_range for event in events]
    whole = min(each.start for each in ranges), max(each.end for each in ranges)
    return whole, computed, sent


def overview(whole: Interval, computing: Iterable[Interval], communicating: Iterable[Interval]) -> str:
    """A sentence with the shares of time that were spent in computing and communicating.

    >>> overview((0, 1000), [(0, 600), (500, 700)], [(600, 900)])
    'Overview: 1.0 ms: computing 70.0%, communicating 30.0% (33.3% of it overlapped by computing), neither 10.0%'
    """
    computed, sent = _length(computing), _length(communicating)
    both = computed + sent - (either := _length([*computing, *communicating]))
    total = max(whole[1] - whole[0], 1e-9)
    overlapped = f" ({both / sent:.1%} of it overlapped by computing)" if sent else ""
    return (
        f"Overview: {total / 1e3:.1f} ms: computing {computed / total:.1%}, communicating {sent / total:.1%}"
        f"{overlapped}, neither {1 - either / total:.1%}"
    )


def _length(intervals: Iterable[Interval]) -> float:
    """Length of the union of the intervals."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _without_phases(averages: EventList) -> list[FunctionEventAvg]:
    return [event for event in averages if event.key not in PHASE_WORDS]


def _table(events: Sequence[FunctionEventAvg], sort: str, rows: int, elapsed: float, own: bool = True) -> str:
    """The largest events by a field, with torch's columns. torch's own table takes percentages of the sum over its rows.

    elapsed: the microseconds that are 100 %; own: with the time and memory of an event without the operators that it calls
    """
    shown = sorted(events, key=lambda event: getattr(event, sort), reverse=True)[:rows]
    columns = {"Name": [event.key if len(event.key) <= WIDTH else f"{event.key[: WIDTH - 3]}..." for event in shown]}

    def add(title: str, name: str) -> None:
        times = [getattr(event, name) for event in shown]
        columns[f"{title} %"] = [f"{time / max(elapsed, 1e-9):.2%}" for time in times]
        columns[title] = [f"{time / 1e3:,.3f} ms" for time in times]

    for device, kind in (("CPU", "cpu"), ("CUDA", "device")):
        if kind == "cpu" or any(event.device_time_total for event in shown):
            if own:
                add(f"Self {device}", f"self_{kind}_time_total")
            add(f"{device} total", f"{kind}_time_total")
        used = [getattr(event, f"self_{kind}_memory_usage") for event in shown]
        if own and any(used):
            columns[f"Self {device} Mem"] = [f"{'-' * (held < 0)}{size(abs(held))}" for held in used]
    columns["# of Calls"] = [f"{event.count:,}" for event in shown]
    widths = {title: max(map(len, (title, *cells))) for title, cells in columns.items()}
    lines = [columns, *(dict(zip(columns, row)) for row in zip(*columns.values()))]
    aligned = lambda title, cell: cell.ljust(widths[title]) if title == "Name" else cell.rjust(widths[title])
    return "\n".join(
        "  ".join(aligned(title, line[title] if line is not columns else title) for title in columns) for line in lines
    )
