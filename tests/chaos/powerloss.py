# SPDX-License-Identifier: Apache-2.0
"""What a disk may hold after a crash at any moment: a model of files, names, and what fsync promises.

Changes are noted while code runs once (`record`) and played on a `Disk`, which knows for every file what was written and
what was synced, and for every folder which names there are and which were there when the folder was synced. At any point
it is laid out as a folder, as one of four kinds of crash leaves it:

    kill     the process ends: everything that was written is there, a write may be cut in half
    synced   power fails: of each file and each folder what was synced last, and nothing of what came after
    names    power fails: all names, renames included, but of each file only what was synced (delayed allocation)
    torn     power fails: of each folder's unsynced changes the first few; of each file's unsynced bytes some pages

A rename within a folder is one change; names of a folder change in order, as on file systems with a journal.
Needs no torch.
"""

import marshal
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Optional, Union

from tests.chaos.disk import Change, watched

KILL, SYNCED, NAMES, TORN = "kill", "synced", "names", "torn"
PAGE = 4096


def record(folder: Path, work: Callable[[], None], notes: Path) -> list[Change]:
    """All changes that `work()` makes below `folder`, in order, those of processes that it forks included.

    notes: a file to keep them in meanwhile, elsewhere.
    """
    handle = os.open(notes, os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_WRONLY, 0o600)

    def note(change: Change) -> None:
        os.write(handle, marshal.dumps(tuple(change)))

    try:
        with watched(folder, note):
            work()
    finally:
        os.close(handle)
    changes = []
    with open(notes, "rb") as file:
        while file.peek(1):
            changes.append(Change(*marshal.load(file)))
    return changes


class File:
    """content: what was written. synced: what a disk that lost its power still has."""

    def __init__(self, content: bytes = b"", synced: bytes = b""):
        self.content, self.synced = bytearray(content), synced

    def after(self, kind: str, dice: random.Random) -> bytes:
        """What is in the file after a crash."""
        content = bytes(self.content)
        if kind == KILL or content == self.synced:
            return content
        if kind in (SYNCED, NAMES):
            return self.synced
        old = self.synced[: len(content)].ljust(len(content), b"\0")
        pages = [dice.choice((old, content))[at : at + PAGE] for at in range(0, len(content), PAGE)]
        cut = content[: dice.randrange(len(content) + 1)]
        return dice.choice([self.synced, b"".join(pages), bytes(len(content)), cut])


class Folder:
    """entries: the names as they are. durable: as they were when the folder was synced. pending: changes since then."""

    def __init__(self):
        self.entries: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.pending: list[dict[str, Optional[Node]]] = []

    def put(self, change: dict[str, Optional["Node"]]) -> None:
        """Set names, or take them away (None), all or none of them."""
        _set(self.entries, change)
        self.pending.append(change)

    def sync(self) -> None:
        """What there is now is there for good."""
        self.durable, self.pending = dict(self.entries), []

    def after(self, kind: str, dice: random.Random) -> dict[str, "Node"]:
        """The names after a crash."""
        if kind in (KILL, NAMES):
            return self.entries
        names = dict(self.durable)
        for change in self.pending[: dice.randrange(len(self.pending) + 1)] if kind == TORN else ():
            _set(names, change)
        return names


def _set(names: dict, change: dict) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


Node = Union[File, Folder]


class Disk:
    """A folder's content as a model. Starts with what is there, all of it durable."""

    def __init__(self, start: Path):
        self.root = self._read(start)

    def _read(self, path: Path) -> Node:
        if not path.is_dir():
            content = path.read_bytes()
            return File(content, content)
        folder = Folder()
        folder.entries = {child.name: self._read(child) for child in path.iterdir()}
        folder.sync()
        return folder

    def _folder(self, path: str) -> Folder:
        node = self.root
        for word in Path(path).parts:
            node = node.entries[word]
        return node

    def _place(self, path: str) -> tuple[Folder, str]:
        parent, _, name = path.rpartition("/")
        return self._folder(parent), name

    def apply(self, change: Change) -> None:
        """Make a change."""
        kind, path, target, at, data = change
        if path == ".":
            self.root.sync()  # nothing else happens to the folder itself
            return
        parent, name = self._place(path)
        node = parent.entries.get(name)
        if kind in ("create", "mkdir"):
            parent.put({name: File() if kind == "create" else Folder()})
        elif kind in ("unlink", "rmdir"):
            parent.put({name: None})
        elif kind == "rename":
            other, new = self._place(target)
            if other is parent:
                parent.put({name: None, new: node})
            else:
                parent.put({name: None})
                other.put({new: node})
        elif kind == "truncate":
            node.content[at:] = bytes(max(0, at - len(node.content)))
        elif kind == "write":
            node.content.extend(bytes(max(0, at - len(node.content))))
            node.content[at : at + len(data)] = data
        elif kind == "fsync" and isinstance(node, Folder):
            node.sync()
        elif kind == "fsync":
            node.synced = bytes(node.content)

    def after(self, kind: str, seed: int = 0) -> dict[str, Optional[bytes]]:
        """What a crash leaves: path -> content of each file, None for a folder; parents before their children."""
        found: dict[str, Optional[bytes]] = {}
        dice = random.Random(seed)

        def walk(node: Node, path: str) -> None:
            if isinstance(node, File):
                found[path] = node.after(kind, dice)
                return
            found[path] = None
            for name, child in sorted(node.after(kind, dice).items()):
                walk(child, f"{path}/{name}" if path else name)

        walk(self.root, "")
        return found


def lay_out(files: dict[str, Optional[bytes]], folder: Path) -> None:
    """Make `folder` what `Disk.after` says."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
