# SPDX-License-Identifier: Apache-2.0
"""One writer at a time where there are no locks: an object that says who writes, renewed as long as that is so.

A kernel drops a lock when its holder dies; an object stays. So it holds for `LASTS` seconds, and the holder renews it in
a thread. Whoever finds one takes it over

- at once, when its holder was a process of this very machine that has ended (a job that was killed and started again),
- else after it was not renewed for `LASTS` seconds of this process's own clock: clocks of machines are not compared.

It is no proof: a holder that is stopped or cut off for longer than `LASTS` seconds does not know that it has lost the
lease until it looks. It looks before each commit (`check`), and writes over no other save's files (`urls.Draft`).
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
from megatron.storage.urls import UrlPath

NAME = ".lock"
LASTS, RENEWED, LOOKED, SETTLE = 60.0, 15.0, 1.0, 1.0  # seconds


class Lease:
    """The right to write below a URL, for as long as this object is open and this process can reach the store."""

    def __init__(self, folder: UrlPath, log: Callable[[str], None] = lambda text: None):
        """say: told when there is a wait for the lease of a job that may have ended.

        Raises Locked when another job holds it and is alive.
        """
        self.folder, self._path = folder, folder / NAME
        self._token, self._renewals = secrets.token_hex(8), 0
        self._end = threading.Event()
        while not self._path.create(self._content()):
            self._outlive(log)
        self.check()  # a store that knows no If-None-Match lets the last writer win
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise Locked unless the lease is still this object's."""
        found = _read(self._path)
        if found is None or found.get("token") != self._token:
            what = f"{self.folder} was taken over by another job"
            raise Locked(
                what,
                f"held by {_holder(found)}; this one did not renew its lease in time",
                "end one of the two, or use another --save",
            )

    def release(self) -> None:
        """Let others write. Harmless when repeated."""
        if not self._end.is_set():
            self._end.set()
            self._thread.join()
            try:
                self.check()
                self._path.unlink()
            except Failure:
                pass  # it is another's by now, or it will lapse

    def _content(self) -> bytes:
        said = dict(
            owner=f"process {os.getpid()} on {socket.gethostname()}",
            token=self._token,
            pid=os.getpid(),
            machine=_machine(),
            renewals=self._renewals,
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            lasts=LASTS,
        )
        return json.dumps(said).encode()

    def _renew(self) -> None:
        while not self._end.wait(RENEWED):
            try:
                self.check()
                self._renewals += 1
                self._path.write_bytes(self._content())
            except Locked:
                return  # `check` will say so when it matters
            except Failure:
                continue  # the store is away: once more in a while

    def _outlive(self, log: Callable[[str], None]) -> None:
        """Return when the lease that is there is gone. Raises Locked when its holder is alive."""
        found, since, told = _read(self._path), time.monotonic(), False
        while found is not None and not _has_ended(found):
            if time.monotonic() - since > LASTS:
                break
            if not told:
                told = True
                log(
                    f"{self.folder} was being written by {_holder(found)}: waiting up to {LASTS:.0f} s whether it still is"
                )
            time.sleep(LOOKED)
            now = _read(self._path)
            if now is not None and now != found:
                raise Locked(
                    f"{self.folder} is being written by another job",
                    f"held by {_holder(now)}",
                    "use another --save, or end that job first",
                )
            found = now
        if found is not None and _read(self._path) == found:
            self._path.unlink()
            time.sleep(SETTLE)  # whoever waited, too, has deleted the same lease by then; one of them creates the next


def _read(path: UrlPath) -> Optional[dict[str, Any]]:
    """What a lease says; None where there is none, {} for what is no lease."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _holder(found: Optional[dict]) -> str:
    return str((found or {}).get("owner") or "an unknown process")


def _machine() -> str:
    """This start of this machine and this space of process numbers; "" where that cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(found: dict) -> bool:
    """Whether a lease's holder is known to be gone."""
    pid = found.get("pid")
    if not (found.get("machine") and found["machine"] == _machine() and type(pid) is int and pid > 0):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
