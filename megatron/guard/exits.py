# SPDX-License-Identifier: Apache-2.0
"""Decide from the ends of a job's ranks what to do next: finish, stop, or start again. Pure; needs no torch.

>>> judge([7, 4, -15]).action, judge([7, -9]).cause
(<Action.STOP: 'stop'>, 'rank killed by SIGKILL')
>>> judge([1], Evidence("torch.OutOfMemoryError: CUDA out of memory", has_trained=False)).action
<Action.STOP: 'stop'>
"""

import enum
import re
import signal
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional

from megatron.errors import CheckpointError, PeerLost, ResumeToDisambiguate, SilentError, in_a_line
from megatron.guard.failure_kinds import NO_WORD, FailureKind, kind_of_end, kind_of_text


class Action(enum.Enum):
    """The next action of a supervisor."""

    DONE = "done"
    STOP = "stop"
    RESTART = "restart"
    PREEMPTED = "preempted"
    REPLACE = "replace"  # the node, and then retry


class JobVerdict(NamedTuple):
    """The verdict on an ended job."""

    action: Action
    cause: str
    code: int  # the exit code of the cause
    kind: Optional[FailureKind] = None  # None: it has not failed


class Evidence(NamedTuple):
    """What is known about the end of an attempt besides exit codes."""

    why: str = ""  # the message of the rank that failed first
    output: str = ""  # of the job
    oom_kills: int = 0  # processes that the kernel of this machine has killed meanwhile to free memory
    has_trained: bool = True  # the job, in this attempt or before it
    hang: Optional[FailureKind] = None  # the job was ended because it did not go on
    lost_node: bool = False  # it was ended because a node of it is gone


# What to do about each kind: --on-failure changes it.
DECISIONS = {
    FailureKind.COMMAND: Action.STOP,
    FailureKind.DATA: Action.STOP,
    FailureKind.MEMORY: Action.RESTART,
    FailureKind.DEVICE: Action.REPLACE,
    FailureKind.NETWORK: Action.RESTART,
    FailureKind.DISK: Action.RESTART,
    FailureKind.CODE: Action.RESTART,
    FailureKind.NUMERICS: Action.STOP,
    FailureKind.SILENT_ERROR: Action.STOP,  # the last checkpoint may hold it
    FailureKind.HOST: Action.RESTART,
}
UNKNOWN = Evidence()
AT_ONCE = (FailureKind.MEMORY, FailureKind.CODE)  # in a job that never made a step, they come again


MEANINGS = {
    0: "finished",
    1: "failed (exit 1)",
    2: "command line not understood (exit 2)",
    3: "settings cannot work (exit 3)",
    4: "data missing or damaged (exit 4)",
    5: "checkpoint missing or damaged (exit 5)",
    6: "storage full or failing (exit 6)",
    7: "peer lost (exit 7)",
    8: "loss or gradient not finite, or a spike (exit 8)",
    9: "preempted, checkpoint saved (exit 9)",
    10: "output locked by another job (exit 10)",
    11: "device lost (exit 11)",
    16: "a suspicious step is to be computed elsewhere (exit 16)",
    17: "computed wrongly (exit 17)",
    130: "interrupted by Ctrl-C (exit 130)",
}
ENDS = {0: Action.DONE, 9: Action.PREEMPTED, 130: Action.PREEMPTED}  # that are no failures
# The rank that fails first brings down others: the most specific code is the cause.
PRIORITY = (11, 17, 16, 2, 3, 4, 5, 10, 8, 6, "killed", 130, 9, 1, 7, "ended", 0)
FOR_ANOTHER = "for another rank"  # in the message of the rank that gave up first; others only see broken connections
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # that a program causes itself
ENDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # the signals by which launchers end the other ranks


def judge(codes: Iterable[int], evidence: Evidence = UNKNOWN, rules: Mapping[FailureKind, Action] = {}) -> JobVerdict:
    """The verdict on a job whose ranks ended with these codes (negative: by a signal; 0: done).

    rules: what to do about a kind of failure, where that is not the one of `DECISIONS`
    """
    code = min(codes, key=lambda code: PRIORITY.index(_kind(code)), default=1)
    cause = MEANINGS.get(code, f"failed (exit {code})") if code >= 0 else f"rank killed by {_name(-code)}"
    if evidence.hang:
        code, kind = PeerLost.code, evidence.hang
        cause = MEANINGS[code] if evidence.lost_node else "hung"
    elif code in ENDS:
        return JobVerdict(ENDS[code], cause, code)
    else:
        kind = kind_of_end(code, evidence.why, evidence.output, evidence.oom_kills, evidence.has_trained)
    action = DECISIONS[kind]
    if kind in AT_ONCE and not evidence.has_trained and kind_of_text(evidence.why) is kind:
        action = Action.STOP
    if code == ResumeToDisambiguate.code:
        action = Action.RESTART
    if code == SilentError.code:  # the rank is named, and its node is left out
        action = Action.REPLACE
    if code == CheckpointError.code:  # what cannot be read now cannot be read later
        action = Action.STOP
    return JobVerdict(rules.get(kind, action), cause, code, kind)


class End(NamedTuple):
    """The end of a rank. at: Unix seconds, by the clock of its node"""

    at: float
    rank: int
    host: str
    code: int
    why: str = ""


def first_failure(ends: Iterable[End]) -> Optional[End]:
    """The rank that failed first. Those that only lost another rank, or were ended with it, count if there is no other.

    >>> first_failure([End(3.0, 0, "a", 7), End(2.0, 1, "b", 3), End(1.0, 2, "b", 1), End(0.0, 3, "a", 0)]).rank
    2
    """

    def order(end: End) -> tuple:
        effect = end.code == 7 or _kind(end.code) == "ended" or kind_of_text(end.why) is FailureKind.NETWORK
        effect = effect and not end.why.startswith(NO_WORD)
        return (
            effect,
            FOR_ANOTHER not in end.why if effect else False,
            end.at,
            PRIORITY.index(_kind(end.code)),
            end.rank,
        )

    return min((end for end in ends if end.code), key=order, default=None)


def _kind(code: int):
    if code < 0:
        return "ended" if -code in ENDED else "killed"
    return code if code in MEANINGS else 1


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def from_shell(code: int) -> int:
    """Convert an exit code of a shell or of `megatron.tools.launch`, where a signal is 128 + n, to -n.

    >>> from_shell(137), from_shell(5), from_shell(130)
    (-9, 5, 130)
    """
    return 128 - code if 128 < code < 192 and code not in MEANINGS else code


def to_shell(code: int) -> int:
    """Convert an exit code to that of a shell: 128 + n for an end by signal n.

    >>> to_shell(-9), to_shell(5)
    (137, 5)
    """
    return code if code >= 0 else 128 - code


# In the output of a job, behind "[rank0]: " if torchrun wrote it: our own message; Python's; that of a C++ exception.
MESSAGES = tuple(
    re.compile(rf"^(?:\[[^\]]*\]:?[ \t]*)*(?:{what})", re.MULTILINE)
    for what in (
        r"error: (?!rank \d+ (?:raised an exception|was ended|ended))(?P<why>.+(?:(?<=:)\n.+)?)",
        r"(?P<why>(?!\S*ChildFailedError)(?:[\w.]+\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b: .+)",
        r"[ \t]*what\(\): +(?P<why>.+)|(?P<why2>.*CUDA error: .+)",
    )
)


def reason_in_log(text: str, code: int) -> str:
    """The reason of a job's end in a line, from its output; "" if there is none. code: the exit code of the cause

    A rank that ends before its heartbeat, or in compiled code, leaves its reason only there.

    >>> reason_in_log("loading\\nerror: --tp 3: 4 heads\\n  -> --tp 2\\nChildFailedError: failed", 3)
    '--tp 3: 4 heads'
    >>> reason_in_log("[rank1]: what():  CUDA error: an illegal memory access\\n", -6)
    'CUDA error: an illegal memory access'
    """
    if code < 0 and -code not in CRASHES:  # what the other ranks say is its effect
        return ""
    for pattern in MESSAGES if code >= 0 else MESSAGES[-1:]:
        if found := pattern.search(text):
            return in_a_line(next(filter(None, found.groups())))
    return ""


def codes_in_log(text: str) -> dict[int, int]:
    """Process number -> exit code of the ranks in torchrun's report of a failed job.

    >>> codes_in_log("  rank      : 1 (local_rank: 1)\\n  exitcode  : -9 (pid: 4242)")
    {4242: -9}
    """
    return {int(pid): int(code) for code, pid in re.findall(r"exitcode\s*:\s*(-?\d+) \(pid: (\d+)\)", text)}


def signals_in_log(text: str) -> dict[int, int]:
    """Rank -> exit code of the ranks that our launcher says were ended by a signal.

    >>> signals_in_log("error: rank 3 was ended by SIGSEGV")
    {3: -11}
    """
    found = re.findall(r"^error: rank (\d+) was ended by (SIG[A-Z0-9]+)", text, re.MULTILINE)
    return {int(rank): -signal.Signals[name] for rank, name in found if name in signal.Signals.__members__}
