# SPDX-License-Identifier: Apache-2.0
"""How a rank ends: its heartbeat notes the exit code, and errors of the network become PeerLost."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from typing import Optional

from megatron.errors import PeerLost, exit_code
from megatron.guard.command import last_checkpoint, of_this_job
from megatron.guard.exits import FOR_ANOTHER
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.processes import die_with_parent
from megatron.guard.stacks import COLLECTIVES, PHASES
from megatron.mpu.groups import GroupListener
from megatron.settings import rank_env
from megatron.settings.schema import Config, Guard

NETWORK = re.compile(
    r"gloo|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|TCPStore|ProcessGroup|[Tt]imed out|caused pair closure"
)
# gloo: "Timed out waiting 18000ms for recv operation", "Application timeout caused pair closure" in the rank whose
# thread has noticed it first. NCCL: "Watchdog caught collective operation timeout: WorkNCCL(..., Timeout(ms)=600000)".
TIMEOUT = re.compile(r"[Tt]imed out waiting (\d+) ?ms|Timeout\(ms\)=(\d+)|timed out in|Application timeout")


@contextlib.contextmanager
def guarded(settings: Guard, config: Optional[Config] = None) -> Iterator[Heartbeat]:
    """A rank's heartbeat, which ends with the exit code of whatever is raised inside.

    An error of the network between ranks becomes PeerLost: its cause is another rank, whose own words say more.
    config: of a training run, whose timeout and last checkpoint are named then.
    """
    heartbeat = Heartbeat(settings.heartbeat_dir, rank_env.ranks().rank)
    heartbeat.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that is killed leaves no ranks behind
        die_with_parent()
    try:
        with GroupListener.calling(heartbeat.enter_group):
            yield heartbeat
    except BaseException as error:
        told = peer_lost(error, heartbeat, config) or error
        heartbeat.close(told, exit_code(told))
        if told is error:
            raise
        raise told from error
    heartbeat.close()


def peer_lost(
    error: Optional[BaseException], heartbeat: Optional[Heartbeat] = None, config: Optional[Config] = None
) -> Optional[PeerLost]:
    """The error as a neighbour's loss, if that is what it is: a timeout of a collective, or a connection that broke.

    Whatever waits for another rank ends here: in gloo and NCCL, on the way to `guarded`.
    """
    if type(error) is not RuntimeError and "Dist" not in type(error).__name__:
        return None
    text = str(error)
    if not NETWORK.search(text):
        return None
    where, line = waited_in(error, heartbeat), re.sub(r"^\[\S*\] ", "", text.splitlines()[0])[:200]
    found = TIMEOUT.search(text)
    if not found:
        return PeerLost("another rank is gone or silent", _joined(where, line), _what_remains(config))
    minutes = config.parallel.distributed_timeout_minutes if config else None
    milliseconds = next(filter(None, found.groups()), minutes and minutes * 60_000)
    seconds = f" {float(milliseconds) / 1000:.3g} s" if milliseconds else ""
    flag = "" if minutes is None else f" (--distributed-timeout-minutes {minutes:g})"
    what = f"rank {rank_env.ranks().rank} waited{seconds} {FOR_ANOTHER}{flag}"
    return PeerLost(what, _joined(where, line), _what_remains(config))


def waited_in(error: BaseException, heartbeat: Optional[Heartbeat]) -> str:
    """What a rank waited for, as far as known: "in all_reduce of dp group 0, step 17, reducing gradients"."""
    calls = [frame.name for frame in traceback.extract_tb(error.__traceback__) if frame.name in COLLECTIVES]
    parts = [f"in {calls[-1]}" if calls else ""]
    if heartbeat and heartbeat.group:
        parts[0] = f"{parts[0]} of {heartbeat.group}" if calls else f"in {heartbeat.group}"
    if heartbeat and heartbeat.step:
        parts.append(f"step {heartbeat.step}")
    if heartbeat:
        parts.append(PHASES.get(heartbeat.phase, heartbeat.phase))
    return ", ".join(filter(None, parts))


def _joined(where: str, line: str) -> str:
    return f"{where}: {line}" if where else line


def _what_remains(config: Optional[Config]) -> str:
    """What to do about a lost rank."""
    saved = config and last_checkpoint(config.checkpoint)
    last = f"the last checkpoint is {saved}; " if saved else ""
    if "megatron.tools.supervise" in of_this_job():
        return f"{last}the supervisor says what the other ranks were doing"
    return f"{last}under python -m megatron.tools.supervise the rank to blame and its stack are named"
