# SPDX-License-Identifier: Apache-2.0
"""The end of a rank: its heartbeat records the exit code, and network errors become PeerLost."""

import contextlib
import os
import re
import traceback
from collections.abc import Iterator
from functools import partial
from typing import Optional

from megatron.errors import DEVICE_ERROR, PeerLost, exit_code
from megatron.guard import flight_recorder
from megatron.guard.exits import FOR_ANOTHER
from megatron.guard.failure_kinds import NETWORK_ERROR
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.resume_command import job_command, last_checkpoint
from megatron.guard.stacks import COLLECTIVES, PHASES
from megatron.mpu.groups import GroupListener
from megatron.settings import rank_env
from megatron.settings.schema import Config, Guard
from megatron.storage.processes import die_with_parent

NETWORK = re.compile(NETWORK_ERROR)
# gloo: "Timed out waiting 18000ms for recv operation"; "Application timeout caused pair closure" in the rank that notices
# first. NCCL: "Watchdog caught collective operation timeout: WorkNCCL(..., Timeout(ms)=600000)".
TIMEOUT = re.compile(r"[Tt]imed out waiting (\d+) ?ms|Timeout\(ms\)=(\d+)|timed out in|Application timeout")


@contextlib.contextmanager
def guarded(settings: Guard, config: Optional[Config] = None) -> Iterator[Heartbeat]:
    """A context with the rank's heartbeat, which records the exit code of any exception raised inside.

    A network error between ranks becomes PeerLost: the cause is another rank, whose own message says more.
    config: the training run's; its timeout and last checkpoint go into the message.
    """
    heartbeat = Heartbeat(settings.heartbeat_dir, rank_env.ranks().rank)
    if flight_recorder.switch_on(settings):
        heartbeat.record_trace(partial(flight_recorder.dump, settings.flight_recorder_dump_path, rank_env.ranks().rank))
    heartbeat.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # no rank outlives a launcher that was killed
        die_with_parent()
    try:
        with GroupListener.calling(heartbeat.enter_group):
            yield heartbeat
    except BaseException as error:
        reported = peer_lost(error, heartbeat, config) or error
        heartbeat.close(reported, exit_code(reported))
        if reported is error:
            raise
        raise reported from error
    heartbeat.close()


def peer_lost(
    error: Optional[BaseException], heartbeat: Optional[Heartbeat] = None, config: Optional[Config] = None
) -> Optional[PeerLost]:
    """Convert an error to PeerLost if a collective timed out or a connection broke. None for other errors."""
    if type(error) is not RuntimeError and "Dist" not in type(error).__name__:
        return None
    text = str(error)
    if not NETWORK.search(text) or DEVICE_ERROR.search(text):  # a broken device breaks connections, too
        return None
    where, line = waited_in(error, heartbeat), re.sub(r"^\[\S*\] ", "", text.splitlines()[0])[:200]
    timeout = TIMEOUT.search(text)
    if not timeout:
        return PeerLost("another rank is gone or silent", _joined(where, line), _advice(config))
    minutes = config.parallel.distributed_timeout_minutes if config else None
    milliseconds = next(filter(None, timeout.groups()), minutes and minutes * 60_000)
    seconds = f" {float(milliseconds) / 1000:.3g} s" if milliseconds else ""
    flag = "" if minutes is None else f" (--distributed-timeout-minutes {minutes:g})"
    what = f"rank {rank_env.ranks().rank} waited{seconds} {FOR_ANOTHER}{flag}"
    return PeerLost(what, _joined(where, line), _advice(config))


def waited_in(error: BaseException, heartbeat: Optional[Heartbeat]) -> str:
    """The collective, step and phase in which a rank waited: "in all_reduce of dp group 0, step 17, reducing gradients"."""
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


def _advice(config: Optional[Config]) -> str:
    """What to do about a lost rank."""
    saved = config and last_checkpoint(config.checkpoint)
    last = f"the last checkpoint is {saved}; " if saved else ""
    if "megatron.tools.supervise" in job_command():
        return f"{last}the supervisor reports what the other ranks were doing"
    return f"{last}under python -m megatron.tools.supervise the rank to blame and its stack are named"
