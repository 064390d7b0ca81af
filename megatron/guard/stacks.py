# SPDX-License-Identifier: Apache-2.0
"""Explain why a job hangs, from the heartbeats and stacks of its ranks. Pure text; needs no torch.

rank 3 on n7: in the data loader for 74 s, step 17 (data/gpt_dataset.py:105 in __getitem__)
7 ranks (0-2, 4-7) wait in all_reduce of dp group 1 (optimizer/zero.py:147 in finalize_grads), step 17, op B micro 5
"""

import json
import linecache
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megatron.guard.beat_files import Beat

PHASES = dict(
    start="starting",
    join="joining the other ranks",
    model="building the model",
    load="loading the checkpoint",
    index="preparing the data",
    data="in the data loader",
    F="in a forward pass",
    B="in a backward pass",
    I="in a backward pass",
    W="in a backward pass (weights)",
    reduce="reducing gradients",
    update="in the optimizer's update",
    evaluate="evaluating",
    save="saving a checkpoint",
    rerun="computing a step again",
    replay="repeating a step to find a value that is not finite",
)
STATES = {
    "T": "is stopped by a signal (SIGSTOP)",
    "t": "is stopped by a debugger",
    "D": "sleeps in the kernel (disk or device)",
    "Z": "is dead",
    "": "is gone",
    "?": "does not answer: stopped, frozen, or its machine is cut off",
}
COLLECTIVES = """all_reduce all_gather all_gather_single all_gather_into_tensor all_gather_object reduce_scatter
    reduce_scatter_single reduce_scatter_tensor broadcast broadcast_object_list barrier recv send irecv isend gather scatter
    monitored_barrier new_group init_process_group""".split()
CALLERS = ("distributed_c10d.py", "mpu/collectives.py", "mpu/groups.py")  # files that define functions with these names
OUTERMOST = ("<module>", "_run_module_as_main")  # of the main thread of `python script.py`, and of `python -m module`
RECEIVE = "the receive of a message"
LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python3|^<")


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    @property
    def ours(self) -> bool:
        return not LIBRARY.search(self.file)

    def __str__(self) -> str:
        short = self.file.rpartition("/megatron/")[2] if "/megatron/" in self.file else self.file.rpartition("/")[2]
        return f"{short}:{self.line} in {self.function}"


@dataclass(frozen=True)
class Standstill:
    """The state of one rank that makes no progress."""

    beat: Beat
    silent: float  # seconds
    state: str = "S"  # of the process, as /proc has it; "": there is none
    stacks: tuple[tuple[Frame, ...], ...] = ()  # of its threads, main thread first, innermost frame first

    @property
    def waits_in(self) -> Optional[str]:
        """The collective, message or device work that the rank waits for; None if it waits for nothing."""
        if self.state in ("T", "t", "Z", "", "?"):
            return None
        for stack in self._at_work():
            for frame in stack:
                if frame.function in COLLECTIVES and frame.file.endswith(CALLERS):
                    return frame.function
                if frame.ours and not frame.file.endswith(("mpu/collectives.py", "mpu/mappings.py")):
                    break
            if stack[0].ours and (waiting := _waiting(stack[0])):
                return waiting
        return None

    @property
    def group(self) -> str:
        """The group of the collective that the rank waits in, from its heartbeat: " of dp group 1"."""
        return f" of {self.beat.group}" if self.waits_in and self.beat.group else ""

    def _at_work(self) -> list[tuple[Frame, ...]]:
        """Stacks of the main thread, and of the threads that run its backward pass on a GPU."""
        main, *others = self.stacks or ((),)
        in_backward = any(frame.function == "_engine_run_backward" for frame in main)
        passes = [stack for stack in others if any(frame.file.endswith("autograd/function.py") for frame in stack)]
        return [stack for stack in (main, *(passes if in_backward else ())) if stack]

    @property
    def place(self) -> Optional[Frame]:
        """The innermost line of this suite's code, except communication. A thread that loads data takes precedence."""
        stacks = self.stacks
        if self.beat.phase == "data":
            loading = [stack for stack in stacks if any(frame.function == "micro_batch" for frame in stack)]
            stacks = (*loading, *stacks)
        for stack in stacks:
            for frame in stack:
                if frame.ours and not frame.file.endswith(("mpu/collectives.py", "pipeline/wire.py")):
                    return frame
        return None


def _waiting(frame: Frame) -> Optional[str]:
    """The thing that a line of this suite's code waits for, judged by its source text; None if it does not wait."""
    line = linecache.getline(frame.file, frame.line)
    if frame.file.endswith("pipeline/wire.py") and frame.function in ("wait", "arrived"):
        return "the end of a send" if "work.wait()" in line.replace("_work", "") or "sent[" in line else RECEIVE
    if re.search(r"\b(work|message|exchange)\.wait\(\)", line):
        return "the end of a collective"
    if re.search(r"\.(item|tolist|synchronize)\(", line):
        return "work on the device"
    return None


def parse_spied(text: str) -> tuple[tuple[Frame, ...], ...]:
    """Stacks from `py-spy dump --json`: main thread first. Raises ValueError for anything else."""
    threads = json.loads(text)
    try:
        stacks = [
            (
                thread["os_thread_id"] != thread["pid"],
                tuple(Frame(frame["filename"], int(frame["line"]), frame["name"]) for frame in thread["frames"]),
            )
            for thread in threads
        ]
    except (TypeError, KeyError) as error:
        raise ValueError(f"not the output of py-spy: {error!r}") from None
    return tuple(stack for _, stack in sorted(stacks, key=lambda entry: entry[0]) if stack)


def parse(text: str) -> tuple[tuple[Frame, ...], ...]:
    """Stacks from the last dump in `faulthandler`'s output: main thread first."""
    stacks: list[list[Frame]] = []
    for line in text.splitlines():
        if re.match(r"(Current thread|Thread) 0x", line):
            stacks.append([])
        frame = re.match(r'\s+File "(.+)", line (\d+) in (.+)', line)
        if frame and stacks:
            stacks[-1].append(Frame(frame[1], int(frame[2]), frame[3]))
    main = [stack for stack in stacks if stack and stack[-1].function in OUTERMOST][-1:]
    return tuple(tuple(stack) for stack in (*main, *(stack for stack in stacks if stack not in main)) if stack)


def explain(ranks: Sequence[Standstill]) -> list[str]:
    """A line for each group of ranks in the same state. Those that do not wait come first: they are the cause."""
    groups: dict[tuple, list[Standstill]] = defaultdict(list)
    for rank in ranks:
        stopped = rank.state if rank.state in STATES else ""
        where = str(rank.place or "")
        if rank.waits_in:
            key = (1, rank.waits_in + rank.group, where, rank.beat.step, rank.beat.op)
        else:
            key = (0, stopped or rank.beat.phase, where, rank.beat.step, rank.beat.op)
        groups[key].append(rank)
    lines = [_sentence(waiting, group) for (waiting, *_), group in sorted(groups.items(), key=_culprits_first)]
    if all(waiting for waiting, *_ in groups):
        several = len({(key[1].partition(" of ")[0], key[2]) for key in groups}) > 1
        lines.append(
            "every rank waits for another"
            + (
                ", in different places: they have diverged"
                if several
                else ": the network between them, or a rank of another machine"
            )
        )
    return lines


def _culprits_first(item) -> tuple:
    (waiting, *_), group = item
    return waiting, len(group), group[0].beat.rank


def _sentence(waiting: int, group: list[Standstill]) -> str:
    one = group[0]
    silent = max(rank.silent for rank in group)
    hosts = sorted({rank.beat.host for rank in group})
    ranks = [rank.beat.rank for rank in group]
    who = f"rank {ranks[0]} on {hosts[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({spans(ranks)})"
    verb = "s" if len(ranks) == 1 else ""
    at = f" ({one.place})" if one.place else ""
    op = f", op {describe_op(one.beat.op)}" if one.beat.op else ""
    step = f", step {one.beat.step}{op}"
    if waiting:
        return f"{who} wait{verb} in {one.waits_in}{one.group}{at}{step}"
    phase = PHASES.get(one.beat.phase, one.beat.phase)
    if one.state in STATES:
        pid = f", pid {one.beat.pid}" if len(ranks) == 1 else ""
        return f"{who}{pid}: {STATES[one.state]}, {phase} for {silent:.0f} s{step}{at}"
    return f"{who}: {phase} for {silent:.0f} s{step}{at}"


def describe_op(op: str) -> str:
    """An op of the schedule in words.

    >>> describe_op("B5"), describe_op("F12.1")
    ('B micro 5', 'F micro 12 chunk 1')
    """
    match = re.fullmatch(r"([A-Z])(\d+)(?:\.(\d+))?", op)
    if not match:
        return op
    return f"{match[1]} micro {match[2]}" + (f" chunk {match[3]}" if match[3] else "")


def spans(numbers: Sequence[int]) -> str:
    """Numbers as a list of ranges.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges)
