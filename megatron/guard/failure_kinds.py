# SPDX-License-Identifier: Apache-2.0
"""What kind of failure ended a rank or a job: of the network, a device, memory, ... Pure; needs no torch.

>>> kind_of_text("RuntimeError: NCCL error: unhandled system error\\nncclSystemError: Call to ibv_modify_qp failed").value
'network'
>>> kind_of_end(-9, "", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0").value
'memory'
"""

import enum
import re
from collections.abc import Sequence
from typing import Optional

from megatron.errors import DEVICE_ERROR, NumericsError, PeerLost
from megatron.guard.stacks import Standstill

# The messages by which NCCL, gloo and sockets say that a connection does not work.
NETWORK_ERROR = (
    r"gloo|NCCL|nccl|Connection (?:closed|reset|refused|timed out)|Broken pipe|TCPStore|ProcessGroup|[Tt]imed out|"
    r"caused pair closure|No route to host|Network is (?:unreachable|down)|vendor err|\bibv_\w+|NET/(?:IB|OFI|Socket)|"
    r"Name or service not known|name resolution|another rank is gone"
)
NO_WORD = "no word from"  # a node whose ranks lived when it sent its last message


class FailureKind(enum.Enum):
    """What a failure is due to."""

    COMMAND = "command"  # flags, settings, paths: they fail again
    DATA = "data"
    MEMORY = "memory"  # of a device or a host
    DEVICE = "device"
    NETWORK = "network"
    DISK = "disk"
    CODE = "code"
    NUMERICS = "numerics"  # loss or gradient not finite, or spikes
    SILENT_ERROR = "silent error"  # replicas differ, or a value that a second computation does not have
    HOST = "host"  # it is gone, or something on it ended a rank


# The most specific first: NCCL wraps the errors of devices and memory in its own, and the first line that matches counts.
SIGNS = tuple(
    (kind, re.compile(what))
    for kind, what in (
        (
            FailureKind.MEMORY,
            r"out of memory|OutOfMemory|can't allocate memory|Cannot allocate memory|MemoryError|oom[-_ ]?kill|"
            r"OOM Killed|OUT_OF_MEMORY|_STATUS_ALLOC_FAILED|insufficient shared memory|creating shared memory segment",
        ),
        (FailureKind.DEVICE, rf"{DEVICE_ERROR.pattern}|\bXid\b|GPU of rank \d+ .* failed|no CUDA device of its own"),
        (FailureKind.SILENT_ERROR, r"hold different bits|is not what training held|the same step, repeated, is finite"),
        (FailureKind.HOST, r"[Nn]ode failure|NODE FAILURE|NODE_FAIL|does not answer: stopped, frozen"),
        (
            FailureKind.DISK,
            r"No space left|quota exceeded|Stale file handle|Input/output error|Read-only file system|"
            r"Too many open files|Transport endpoint is not connected|Remote I/O error",
        ),
        (
            FailureKind.CODE,
            r"device-side assert|illegal memory access|misaligned address|unspecified launch failure|"
            r"no kernel image|_STATUS_EXECUTION_FAILED|_STATUS_INVALID_VALUE|ncclInvalid(?:Usage|Argument)|"
            r"invalid usage|invalid argument|[Mm]ismatch between collective|have diverged|calls differ|"
            r"\b(?:Type|Key|Attribute|Index|Name|Assertion|Syntax|Indentation|ZeroDivision|UnboundLocal|"
            r"NotImplemented|Recursion|Value)Error\b",
        ),
        (FailureKind.COMMAND, r"^the package \S+ is missing|(?:Import|ModuleNotFound)Error"),
        (FailureKind.NETWORK, NETWORK_ERROR),
    )
)
PATHS = re.compile(r"Permission denied|No such file|File exists|Not a directory|Is a directory|not permitted")
# Lines of a job's output by others than our ranks: SLURM, NCCL, C++ exceptions, the kernel.
BY_OTHERS = re.compile(r"^.*(?:slurmstepd|srun: error|NCCL WARN|what\(\):|Xid|oom[-_ ]kill).*$", re.MULTILINE)
OF_CODE = {  # exit code -> kind, where no message says more
    2: FailureKind.COMMAND,
    3: FailureKind.COMMAND,
    4: FailureKind.DATA,
    5: FailureKind.DISK,
    6: FailureKind.DISK,
    7: FailureKind.NETWORK,
    8: FailureKind.NUMERICS,
    10: FailureKind.COMMAND,
    11: FailureKind.DEVICE,
    16: FailureKind.SILENT_ERROR,
    17: FailureKind.SILENT_ERROR,
    126: FailureKind.COMMAND,
    127: FailureKind.COMMAND,
    -7: FailureKind.DISK,  # SIGBUS: a page of a mapped file cannot be read
    -9: FailureKind.HOST,
    -15: FailureKind.HOST,
    -1: FailureKind.HOST,
}
SPOKEN = (1, 6, 7, 8)  # codes whose message says more than the code


def kind_of_text(text: str) -> Optional[FailureKind]:
    """The kind that a message names; None if it names none."""
    return next((kind for kind, sign in SIGNS if sign.search(text)), None)


def kind_of_end(code: int, why: str, output: str = "", oom_kills: int = 0, has_trained: bool = False) -> FailureKind:
    """The kind of a failure.

    code:        exit code of the rank that failed first (negative: by a signal)
    why:         its message
    output:      of the job; asked where code and message leave it open
    oom_kills:   how many processes the kernel has killed meanwhile to free memory
    has_trained: whether the job has made steps: then its paths were good, and what fails is the disk
    """
    if why.startswith(NO_WORD):
        return FailureKind.HOST
    if code == 6 and not has_trained and PATHS.search(why):
        return FailureKind.COMMAND
    spoken = kind_of_text(why) if code in SPOKEN or code not in OF_CODE else None
    if spoken and not (code == PeerLost.code or spoken is FailureKind.NETWORK):  # those are often effects of others
        return spoken
    if code == -9 and oom_kills:
        return FailureKind.MEMORY
    if code == NumericsError.code and kind_of_text(output) is FailureKind.SILENT_ERROR:  # `why` is its first line only
        return FailureKind.SILENT_ERROR
    if spoken or code < 0 or not why:
        said = {kind_of_text(line) for line in BY_OTHERS.findall(output)}
        if named := [kind for kind, _ in SIGNS if kind in said]:
            return named[0]
    return spoken or OF_CODE.get(code, FailureKind.CODE)


def kind_of_hang(ranks: Sequence[Standstill], lines: Sequence[str] = ()) -> FailureKind:
    """The kind of a hang. lines: its explanation, from stacks and from the flight recorder's dumps"""
    if not ranks:
        return FailureKind.HOST  # no rank has come to life
    first = min(ranks, key=lambda rank: (rank.waits_in not in (None, "work on the device"), rank.state not in "TtZ?D"))
    if first.state in ("T", "t", "Z", "", "?"):
        return FailureKind.HOST
    on_disk = first.beat.phase in ("data", "index", "load", "save", "evaluate")
    if first.state == "D":
        return FailureKind.DISK if on_disk else FailureKind.DEVICE
    if first.waits_in == "work on the device":
        return FailureKind.DEVICE
    if first.waits_in is None:
        return FailureKind.DISK if on_disk else FailureKind.CODE
    return next(
        (FailureKind.CODE for line in lines if re.search("calls differ|have diverged", line)), FailureKind.NETWORK
    )
