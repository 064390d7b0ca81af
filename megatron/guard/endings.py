# SPDX-License-Identifier: Apache-2.0
"""How a rank ends: its heartbeat notes the exit code, and errors of the network become PeerLost."""

import contextlib
import os
import re
from collections.abc import Iterator

from megatron.errors import PeerLost, exit_code
from megatron.guard.heartbeat import Heartbeat
from megatron.guard.processes import die_with_parent
from megatron.mpu.collectives import GroupListener
from megatron.settings import rank_env
from megatron.settings.schema import Guard

NETWORK = re.compile(r"gloo|NCCL|nccl|Connection (closed|reset|refused)|Broken pipe|TCPStore|ProcessGroup|[Tt]imed out")


@contextlib.contextmanager
def guarded(settings: Guard) -> Iterator[Heartbeat]:
    """A rank's heartbeat, which ends with the exit code of whatever is raised inside.

    An error of the network between ranks becomes PeerLost: its cause is another rank, whose own words say more.
    """
    heartbeat = Heartbeat(settings.heartbeat_dir, rank_env.ranks().rank)
    heartbeat.listen()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a launcher that is killed leaves no ranks behind
        die_with_parent()
    try:
        with GroupListener.calling(heartbeat.enter_group):
            yield heartbeat
    except BaseException as error:
        told = peer_lost(error) or error
        heartbeat.close(told, exit_code(told))
        if told is error:
            raise
        raise told from error
    heartbeat.close()


def peer_lost(error: BaseException) -> PeerLost | None:
    """The error as a neighbour's loss, if that is what it is."""
    if type(error) is not RuntimeError and "Dist" not in type(error).__name__:
        return None
    text = str(error)
    if not NETWORK.search(text):
        return None
    return PeerLost(
        "another rank is gone or silent", text.splitlines()[0][:200], "see what the rank that ended first has said"
    )
