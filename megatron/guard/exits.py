# SPDX-License-Identifier: Apache-2.0
"""Decide from the exit codes of a job's ranks what to do next: finish, stop, or retry. Pure; needs no torch.

>>> judge([7, 4, -15]).action, judge([7, -9]).cause
(<Action.STOP: 'stop'>, 'rank killed by SIGKILL')
"""

import enum
import re
import signal
from collections.abc import Iterable
from typing import NamedTuple, Optional

from megatron.errors import in_a_line


class Action(enum.Enum):
    """The next action of a supervisor."""

    DONE = "done"
    STOP = "stop"
    RETRY = "retry"
    PREEMPTED = "preempted"
    REPLACE = "replace"  # the node, and then retry


class JobVerdict(NamedTuple):
    """The verdict on an ended job."""

    action: Action
    cause: str
    code: int  # the exit code of the cause


MEANINGS = {
    0: (Action.DONE, "finished"),
    1: (Action.RETRY, "failed (exit 1)"),
    2: (Action.STOP, "command line not understood (exit 2)"),
    3: (Action.STOP, "settings cannot work (exit 3)"),
    4: (Action.STOP, "data missing or damaged (exit 4)"),
    5: (Action.STOP, "checkpoint missing or damaged (exit 5)"),
    6: (Action.RETRY, "storage full or failing (exit 6)"),
    7: (Action.RETRY, "peer lost (exit 7)"),
    8: (Action.STOP, "loss or gradient not finite, or a spike (exit 8)"),
    9: (Action.PREEMPTED, "preempted, checkpoint saved (exit 9)"),
    10: (Action.STOP, "output locked by another job (exit 10)"),
    11: (Action.REPLACE, "device lost (exit 11)"),
    130: (Action.PREEMPTED, "interrupted by Ctrl-C (exit 130)"),
}
# The rank that fails first brings down others: the most specific code is the cause.
PRIORITY = (11, 2, 3, 4, 5, 10, 8, 6, "killed", 130, 9, 1, 7, "ended", 0)
FOR_ANOTHER = "for another rank"  # in the message of the rank that gave up first; others only see broken connections
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)  # that a program causes itself
ENDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # the signals by which launchers end the other ranks


def judge(codes: Iterable[int], retry_numerics: bool = False) -> JobVerdict:
    """The verdict on a job whose ranks ended with these codes (negative: by a signal; 0: done)."""
    code = min(codes, key=lambda code: PRIORITY.index(_kind(code)), default=1)
    if code < 0:
        return JobVerdict(Action.RETRY, f"rank killed by {_name(-code)}", code)
    action, cause = MEANINGS.get(code, (Action.RETRY, f"failed (exit {code})"))
    if code == 8 and retry_numerics:
        action = Action.RETRY
    return JobVerdict(action, cause, code)


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
        effect = end.code == 7 or _kind(end.code) == "ended"
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


def codes_in_log(text: str) -> list[int]:
    """Exit codes of ranks in torchrun's report of a failed job.

    >>> codes_in_log("  rank      : 1 (local_rank: 1)\\\\n  exitcode  : -9 (pid: 4242)")
    [-9]
    """
    return [int(number) for number in re.findall(r"exitcode\s*:\s*(-?\d+)", text)]
