# SPDX-License-Identifier: Apache-2.0
"""The nodes of a job find each other before their ranks start, and say which of them is missing.

torch's launcher waits in silence, for minutes, when the address of the first node is wrong, a node does not come, or two
of them have the same number. Here each node registers in the store of the first one, at the address and port that the
launcher uses afterwards.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional

from megatron.errors import PeerLost, SettingsError
from megatron.telemetry.figures import several

FIRST_NOTE, NOTES = 5.0, 30.0  # seconds until the first note on what is waited for, and between two
NAME_PATIENCE = 60.0  # seconds for a name that is not known: clusters register the names of hosts late
LINGER = 5.0
POLL = 0.2
KEY = "megatron/nodes"


class NodeRendezvous:
    """A node of `count` that looks for the others. address, port: of the store of node 0

    patience: seconds to wait for them. note: gets a line about what is missing, from time to time.
    """

    def __init__(self, address: str, port: int, rank: int, count: int, patience: float, note: Callable[[str], None]):
        self.address, self.port, self.rank, self.count, self.note = address, port, rank, count, note
        began = time.strftime("%H:%M:%S")
        self.own = f"{socket.gethostname()}, process {os.getpid()}, since {began}|{uuid.uuid4()}"
        # Node 0 ends after the others, which ask its store who is missing.
        self.patience, self.until = patience, time.monotonic() + patience + (LINGER if rank == 0 else 0.0)
        self.next_note, self.is_there_already = time.monotonic() + FIRST_NOTE, False

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"

    def join(self) -> Any:
        """Wait for all nodes. Returns the store (torch's TCPStore), which node 0 has to keep as long as the job runs.

        Raises PeerLost if not all have come, SettingsError if they disagree on how many there are.
        """
        while True:
            self._resolve()
            store = self._store()
            try:
                if self._register(store):
                    self._wait_for_all(store)
                    return store
            except _lost():  # node 0 has gone, and may come back
                if not self.rank:
                    raise
                self._wait("", f"node 0 at {self.place} has ended while this node waited for others")

    def _resolve(self) -> None:
        """Wait until the name of node 0 is known here."""
        until = min(self.until, time.monotonic() + NAME_PATIENCE)
        while True:
            try:
                socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
                return
            except OSError as error:
                why = f"{self.address} is not known on {socket.gethostname()}: {error.strerror or error}"
                do = "--master-addr: the name or address of node 0, as the other nodes reach it"
                self._wait(why, f"--master-addr {why}", do, until)

    def _store(self) -> Any:
        from torch.distributed import TCPStore

        while self.rank:
            try:
                socket.create_connection((self.address, self.port), timeout=3.0).close()
                break
            except OSError as error:
                why = f"node 0 does not answer at {self.place} ({(error.strerror or str(error)).lower()})"
                do = "is it running, with --node-rank 0 on that host? is the port open there (--master-port)?"
                self._wait(why, why, do)
        # One that was there and is not any more is not waited for: torch tries several times for as long as this.
        seconds = LINGER if self.is_there_already else 30.0
        return TCPStore(self.address, self.port, None, not self.rank, timedelta(seconds=seconds), False, True)

    def _register(self, store) -> bool:
        """Whether this node has its number; False if another process has it for now. Raises SettingsError."""
        if not self.rank:  # both in one message: another node may read it before node 0 has its number
            store.set(f"{KEY}/count", f"{self.count}|{self.own}")
        count, _, first = store.get(f"{KEY}/count").decode().partition("|")  # another node that is faster waits for it
        if int(count) != self.count:
            raise SettingsError(
                f"--nnodes {self.count} on {socket.gethostname()}, and {count} on {_name(first)}",
                do="start the same command on every node; or another job has this --master-port",
            )
        holder = store.compare_set(f"{KEY}/{self.rank}", "", self.own).decode()
        if holder == self.own:
            return True
        if not self.is_there_already:
            self.next_note, self.is_there_already = time.monotonic(), True
        why = f"node {self.rank} of the job at {self.place} is there already ({_name(holder)})"
        self._wait(
            why, why, f"give each node its own --node-rank, and each job its own --master-port (here {self.port})"
        )
        return False

    def _wait_for_all(self, store) -> None:
        while not store.check([f"{KEY}/{n}" for n in range(self.count)]):
            if time.monotonic() < min(self.next_note, self.until):  # who is missing is asked for when it is said
                time.sleep(POLL)
                continue
            missing = [n for n in range(self.count) if not store.check([f"{KEY}/{n}"])]
            here = [n for n in range(self.count) if n not in missing]
            names = ", ".join(f"{n} ({_name(store.get(f'{KEY}/{n}').decode())})" for n in here[:4])
            which = f"{', '.join(map(str, missing[:8]))}{', ...' * (len(missing) > 8)}"
            lacking = f"{several(len(missing), 'node')} of {self.count} (--node-rank {which})"
            came = f"here: {names}{', ...' * (len(here) > 4)}"
            self._wait(
                f"waiting for {lacking}; {came}",
                f"{lacking} did not come within {self.patience:.0f} s",
                f"{came}; start the same command on the others, with --master-addr {self.address} "
                f"--master-port {self.port}",
            )

    def _wait(self, why: str, problem: str, do: Optional[str] = None, until: Optional[float] = None) -> None:
        """Wait a moment, and from time to time say why. Raises PeerLost(problem) when there is no time left."""
        now = time.monotonic()
        if now >= (until or self.until):
            raise PeerLost(problem, None, do)
        if why and now >= self.next_note:
            self.note(f"{why}; waiting for at most {(until or self.until) - now:.0f} s more")
            self.next_note = now + NOTES
        time.sleep(POLL)


def _name(registered: str) -> str:
    return registered.partition("|")[0]


def _lost() -> type[BaseException]:
    from torch.distributed import DistError

    return DistError
