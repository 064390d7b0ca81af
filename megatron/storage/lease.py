# SPDX-License-Identifier: Apache-2.0
"""A lease: the lock of one writer in an object store, as an object that names the writer and is renewed.

A kernel drops a lock when its holder dies; an object stays. So a lease is valid for `LASTS` seconds, and a thread of the
holder renews it. Another job takes over a lease

- immediately, when its holder was a process of this machine that has ended (a job that was killed and started again),
- else after it was not renewed for `LASTS` seconds of this process's own clock: clocks of machines are not compared.

This is no guarantee: a holder that is stopped or disconnected for longer than `LASTS` seconds only notices the loss at the
next `check`. It checks before each commit, and never overwrites files of another save (`urls.Draft`).
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Optional

from megatron.errors import Failure, Locked
from megatron.storage.processes import exists
from megatron.storage.urls import UrlPath

NAME = ".lock"
LASTS, RENEWED, LOOKED, PAUSE = 60.0, 15.0, 1.0, 1.0  # seconds


class Lease:
    """The right to write below a URL, while this object is open and this process can reach the store."""

    def __init__(self, folder: UrlPath, log: Callable[[str], None] = lambda text: None):
        """log: called when there is a wait for the lease of a job that may have ended.

        Raises Locked when a living job holds the lease.
        """
        self.folder, self._path = folder, folder / NAME
        self._token, self._renewals = secrets.token_hex(8), 0
        self._end = threading.Event()
        while not self._path.create(self._content()):
            self._outlive(log)
        self.check()  # in a store without If-None-Match the last writer wins
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise Locked unless the lease is still this object's."""
        lease = _read(self._path)
        if lease is None or lease.get("token") != self._token:
            what = f"{self.folder} was taken over by another job"
            raise Locked(
                what,
                f"held by {_holder(lease)}; this one did not renew its lease in time",
                "end one of the two, or use another --save",
            )

    def release(self) -> None:
        """Give up the lease. May be called again."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            try:
                self.check()
                self._path.unlink()
            except Failure:
                pass  # it belongs to another job now, or will expire

    def _content(self) -> bytes:
        content = dict(
            owner=f"process {os.getpid()} on {socket.gethostname()}",
            token=self._token,
            pid=os.getpid(),
            machine=_machine(),
            renewals=self._renewals,
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            lasts=LASTS,
        )
        return json.dumps(content).encode()

    def _renew(self) -> None:
        while not self._end.wait(RENEWED):
            try:
                self.check()
                self._renewals += 1
                self._path.write_bytes(self._content())
            except Locked:
                return  # the next `check` raises
            except Failure:
                continue  # the store cannot be reached: try again later

    def _outlive(self, log: Callable[[str], None]) -> None:
        """Wait for the end of the present lease. Raises Locked when its holder is alive."""
        lease, since, logged = _read(self._path), time.monotonic(), False
        while lease is not None and not _has_ended(lease):
            if time.monotonic() - since > LASTS:
                break
            if not logged:
                logged = True
                log(
                    f"{self.folder} was being written by {_holder(lease)}: waiting up to {LASTS:.0f} s whether it still is"
                )
            time.sleep(LOOKED)
            now = _read(self._path)
            if now is not None and now != lease:
                raise Locked(
                    f"{self.folder} is being written by another job",
                    f"held by {_holder(now)}",
                    "use another --save, or end that job first",
                )
            lease = now
        if lease is not None and _read(self._path) == lease:
            self._path.unlink()
            time.sleep(PAUSE)  # other waiting jobs delete the same lease meanwhile; then one of them creates the next


def _read(path: UrlPath) -> Optional[dict[str, Any]]:
    """The content of a lease; None if there is none, {} if the object is not a lease."""
    try:
        lease = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return lease if isinstance(lease, dict) else {}


def _holder(lease: Optional[dict]) -> str:
    return str((lease or {}).get("owner") or "an unknown process")


def _machine() -> str:
    """Id of this boot of this machine and of the pid namespace; "" where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(lease: dict) -> bool:
    """Whether a lease's holder is known to be gone."""
    pid = lease.get("pid")
    if not (lease.get("machine") and lease["machine"] == _machine() and type(pid) is int and pid > 0):
        return False
    return not exists(pid)
