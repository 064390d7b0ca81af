# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, read-only or failing, and a process that may open no more files: loud, exit code 6, nothing lost.

A disk fails at every single change that the work makes to it (an error once), or takes so many bytes and no more, or takes
nothing; in a model (`disk.py`), and where the system lets us also on a small real file system. Afterwards everything that
was whole is whole, nothing else has a final name, and the work succeeds once the disk does.
"""

import contextlib
import ctypes
import errno
import io
import mmap
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Optional
from unittest import mock

from megatron.checkpoint.folder import restore
from megatron.errors import exit_code
from tests.chaos import crashes
from tests.chaos.case import Case, Got
from tests.chaos.crashes import Scene
from tests.chaos.disk import Change, watched
from tests.chaos.powerloss import record
from tests.chaos.samples import pieces_of, write_checkpoint

LOUD = "exit code 6 or done, nothing lost"
_CLEANING = ("unlink", "rmdir")  # of leftovers: the next run does it again


class Count:
    """A number that forked processes share."""

    def __init__(self):
        self._memory = mmap.mmap(-1, 8)

    def add(self, number: int) -> int:
        """What it was before."""
        before = int.from_bytes(self._memory[:8], "little")
        self._memory[:8] = (before + number).to_bytes(8, "little")
        return before


class FailsOnce:
    """An input/output error at the change of this number."""

    def __init__(self, number: int):
        self.number, self.count, self.failed = number, Count(), Count()

    def __call__(self, change: Change) -> None:
        if self.count.add(1) == self.number:
            self.failed.add(1 + (change.kind in _CLEANING))
            raise OSError(errno.EIO, os.strerror(errno.EIO), change.path)

    @property
    def tolerable(self) -> bool:
        """Whether the work may succeed nevertheless."""
        return self.failed.add(0) != 1


class TakesBytes:
    """A disk that is full after this many bytes; names cost some too."""

    tolerable, name_bytes = True, 64

    def __init__(self, room: int):
        self.room, self.used = room, Count()

    def __call__(self, change: Change) -> Optional[int]:
        size = len(change.data) if change.kind == "write" else self.name_bytes * (change.kind in ("create", "mkdir"))
        left = self.room - self.used.add(size)
        if size <= left or not size:
            return None
        if change.kind == "write" and left > 0:
            return left
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), change.path)


class TakesNothing:
    """A read-only disk."""

    tolerable = False

    def __call__(self, change: Change) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), change.path)


def attempt(scene: Scene, place: Path) -> Optional[BaseException]:
    """How the work ends in `place`."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            scene.work(place)
    except BaseException as error:
        return error
    return None


def judge(scene: Scene, place: Path, error: Optional[BaseException], tolerable: bool = True) -> Optional[str]:
    """What is wrong with how it ended and with what it left, None if nothing. Called when the disk works again."""
    if error is None and not tolerable:
        return "it succeeded, and something of it is not on the disk"
    if error is not None and exit_code(error) != 6:
        return f"exit code {exit_code(error)}: {type(error).__name__}: {error}"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        problem = scene.check(place, error is None)
        if problem is None and error is not None and scene.repeatable:
            scene.work(place)
            problem = scene.check(place, True)
        return problem


Fault = Callable[[int, int], Iterator]  # (changes, bytes) that the work makes without faults -> what stands in its way


def in_a_model(make: Callable[[], Scene], faults: Fault, folder: Path, seed: int) -> Got:
    """Run the work under each fault."""
    place, start, scene, wrong, count = folder / "place", folder / "start", make(), [], 0
    with mock.patch.object(os, "fsync", lambda handle: None):
        place.mkdir()
        scene.prepare(place)
        shutil.copytree(place, start)
        changes = record(place, partial(scene.work, place), folder / "changes")
        for count, broken in enumerate(faults(len(changes), sum(len(change.data) for change in changes)), 1):
            shutil.rmtree(place)
            shutil.copytree(start, place)
            with watched(place, broken):
                error = attempt(scene, place)
            problem = judge(scene, place, error, broken.tolerable)
            if problem:
                wrong.append(f"fault {count}: {problem}")
    return Got(f"{len(wrong)} of {count} faults: {wrong[0]}" if wrong else LOUD, faults=count)


def each_change(changes: int, size: int) -> Iterator[FailsOnce]:
    """An error at every change."""
    return map(FailsOnce, range(changes))


def each_size(changes: int, size: int) -> Iterator[TakesBytes]:
    """Disks that are full after so many bytes, up to one that is large enough."""
    whole = size + changes * TakesBytes.name_bytes
    return map(TakesBytes, range(0, whole, max(1, whole // 40)))


def nothing(changes: int, size: int) -> Iterator[TakesNothing]:
    """A read-only disk."""
    return iter([TakesNothing()])


# ---- real file systems -----------------------------------------------------------------------------------------------

_NEWNS, _NEWUSER, _RDONLY, _REMOUNT, _REC, _PRIVATE = 0x20000, 0x10000000, 1, 32, 16384, 1 << 18


def own_mounts() -> bool:
    """Let this process mount file systems that nobody else sees and that go when it ends; False where it may not."""
    libc, user, group = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    if not hasattr(libc, "unshare") or libc.unshare(_NEWNS | (_NEWUSER if user else 0)) != 0:
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return libc.mount(b"none", b"/", None, _REC | _PRIVATE, None) == 0


def mount(place: Path, flags: int = 0, size: Optional[int] = None) -> None:
    """Mount, or remount, a file system in memory. size: bytes, rounded up to pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={size}".encode() if size else None
    if libc.mount(b"none", bytes(place), b"tmpfs", flags, options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(place))


def can_mount() -> bool:
    """Whether `own_mounts` would work, tried by a process that ends."""
    child = os.fork()
    if child == 0:
        os._exit(0 if own_mounts() else 1)
    return os.waitpid(child, 0)[1] == 0


def on_a_small_disk(make: Callable[[], Scene], folder: Path, seed: int) -> Got:
    """Run the work on real disks with 0, 1, 2 ... pages left, until it succeeds; then on a read-only one."""
    assert own_mounts()
    place, wrong, count, done = folder / "place", [], 0, 0
    place.mkdir()
    while done < 2:
        scene = make()
        mount(place)
        scene.prepare(place)
        disk = os.statvfs(place)
        full, used = count < 100, (disk.f_blocks - disk.f_bfree) * disk.f_frsize
        read_only = done == 1
        mount(place, _REMOUNT | _RDONLY if read_only else _REMOUNT, used + (count + 1) * disk.f_frsize)
        error = attempt(scene, place)
        mount(place, _REMOUNT, 1 << 28)
        problem = judge(scene, place, error, not read_only)
        if problem or not full:
            wrong.append(f"disk {count}: {problem or 'never large enough'}")
        done += error is None or read_only or not full
        count += 1
        ctypes.CDLL(None).umount2(bytes(place), 2)
    return Got(f"{len(wrong)} of {count} disks: {wrong[0]}" if wrong else LOUD, faults=count)


# ---- handles ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_left(number: int) -> Iterator[None]:
    """Let this process, and those that it starts, open only so many more files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = []
    while not fillers or fillers[-1] < highest:  # no gaps below
        fillers.append(os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for handle in fillers:
            os.close(handle)


def without_handles(make: Callable[[], Scene], folder: Path, seed: int) -> Got:
    """Run the work with 0, 1, 2 ... files that it may open, until it succeeds."""
    place, scene, wrong, count, error = folder / "place", make(), [], 0, OSError()
    with mock.patch.object(os, "fsync", lambda handle: None):
        place.mkdir()
        scene.prepare(place)
        start = shutil.copytree(place, folder / "start")
        scene.work(place)  # imports what it needs
        while error is not None and count < 64:
            shutil.rmtree(place)
            shutil.copytree(start, place)
            with files_left(count):
                error = attempt(scene, place)
            problem = judge(scene, place, error)
            if problem:
                wrong.append(f"{count} files: {problem}")
            count += 1
    return Got(f"{len(wrong)} of {count} limits: {wrong[0]}" if wrong else LOUD, faults=count)


def resuming_scene() -> Scene:
    """A run that loads its newest checkpoint: that one, or none."""

    def load(place: Path) -> None:
        wanted = pieces_of(-1)
        found = restore(place, wanted)
        if found.state["iteration"] != 2 or any((piece.tensor != 2).any() for piece in wanted):
            raise AssertionError(f"went back to iteration {found.state['iteration']}")

    def prepare(place: Path) -> None:
        for iteration in (1, 2):
            write_checkpoint(place, iteration, iteration, shards=3)

    return Scene(prepare, load, lambda place, ended: None)


# ---- the cases -------------------------------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Every work of `crashes.py` under every shortage."""
    model = {
        "io-error": ("an I/O error at each change", each_change),
        "full": ("disk full", each_size),
        "read-only": ("read-only folder", nothing),
    }
    works, found, real = crashes.scenes(), [], can_mount()
    for name, make in works.items():
        for fault, (group, faults) in model.items():
            found.append(
                Case(f"{fault}/{name}", group, LOUD, partial(in_a_model, make, faults), short="over" not in name)
            )
        if real:
            group = "disk full and read-only: a real file system"
            found.append(
                Case(f"small-disk/{name}", group, LOUD, partial(on_a_small_disk, make), short=name == "save/new")
            )
    for name, make in {**works, "resume": resuming_scene}.items():
        group = "no file handles left"
        found.append(Case(f"no-handles/{name}", group, LOUD, partial(without_handles, make), short="over" not in name))
    return found
