# SPDX-License-Identifier: Apache-2.0
"""How a checkpoint gets into a folder and out of it again, on a file system and in an object store.

                         file system (`Local`)                         object store (`Objects`)
    a save writes into   .tmp-iter_0000300-5f0c/                       iter_0000300/, each name with the save's token
    a file is whole      after its fsync                               after its upload: all of it is there, or nothing
    the checkpoint       when the directory is renamed, in one step    when index.json is put, in one step, after the
    appears                                                            sizes of all files were compared
    a save over it       sets the old one aside for a moment           replaces index.json; the old one's files go then
    deletion             by a rename first                             of index.json first
    killed saves leave   .tmp-*, not seen by readers                   files without an index.json, not seen by readers
    the tracker          is renamed into place                         is put
    one writer           by the kernel's lock                          by a lease (`storage/lease.py`)

Readers need none of this: they take what `checkpoints` finds. `storage_of(path)` says which of the two a path needs.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Optional, Protocol, Union

from megatron.errors import StorageError
from megatron.storage.durable import (
    Damaged,
    WriterLock,
    read_sealed,
    replace_file,
    require_space,
    storage_errors,
    sync_folder,
    write_synced,
)
from megatron.storage.lease import Lease
from megatron.storage.urls import Draft, UrlPath, remove_all

INDEX = "index.json"
TRACKER = "latest_checkpointed_iteration.txt"  # the iteration that was saved last, as in Megatron-LM
_FINAL = re.compile(r"iter_(\d{7,})")
_NAME = re.compile(r"iter_(\d{7,})|\.old-(iter_(\d{7,}))-[0-9a-f]+")

CheckpointPath = Union[Path, UrlPath]
Say = Callable[[str], None]


class Storage(Protocol):
    """What writing checkpoints needs of a kind of storage. Failures are StorageErrors, or OSErrors that become such."""

    def checkpoints(self, folder: CheckpointPath) -> dict[int, CheckpointPath]:
        """Iteration -> where it is, of every checkpoint that a reader may see, oldest first."""

    def lock(self, folder: CheckpointPath, log: Say) -> Any:
        """The right to write into a folder that is there: `check()`, `release()`. Raises Locked."""

    def claim(self, folder: CheckpointPath, log: Say) -> Any:
        """Make the folder, lock it, and remove what killed saves have left."""

    def begin(self, final: CheckpointPath) -> CheckpointPath:
        """Where the files of one save go, all writers' alike."""

    def create(self, path: CheckpointPath, size: int) -> contextlib.AbstractContextManager:
        """A file to write `size` bytes to, which is durable when the context ends."""

    def write(self, path: CheckpointPath, content: bytes) -> None:
        """A small file, durably."""

    def publish(
        self,
        draft: CheckpointPath,
        final: CheckpointPath,
        index: bytes,
        sizes: dict[str, int],
        parts: list[CheckpointPath],
    ) -> None:
        """Let a complete draft appear as `final`. sizes: of its files by name; parts: files that nobody needs now."""

    def replace(self, path: CheckpointPath, content: bytes) -> None:
        """A small file with its old content or the new, at any moment."""

    def discard(self, folder: CheckpointPath, draft: Optional[CheckpointPath]) -> None:
        """Remove a draft that will not be published. Never fails."""

    def clean(self, folder: CheckpointPath, final: Optional[CheckpointPath] = None) -> None:
        """Remove what killed saves left behind (of one checkpoint). Only for the holder of the lock."""

    def remove(self, path: CheckpointPath) -> None:
        """Delete a checkpoint so that no half of it is ever seen."""


def storage_of(path: CheckpointPath) -> Storage:
    """The storage that a path lies in."""
    return OBJECTS if isinstance(path, UrlPath) else LOCAL


class Local:
    """A file system: everything rests on rename, fsync and the kernel's locks."""

    def checkpoints(self, folder: Path) -> dict[int, Path]:
        found: dict[int, Path] = {}
        if folder.is_dir():
            for path in sorted(folder.iterdir()):  # ".old-..." sorts before "iter_...", which takes its place
                match = _NAME.fullmatch(path.name)
                if match and path.is_dir():
                    found[int(match[1] or match[3])] = path
        return dict(sorted(found.items()))

    def lock(self, folder: Path, log: Say) -> WriterLock:
        return WriterLock(folder)

    def claim(self, folder: Path, log: Say) -> WriterLock:
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
        lock = WriterLock(folder)
        self.clean(folder)
        return lock

    def begin(self, final: Path) -> Path:
        temporary = final.with_name(f".tmp-{final.name}-{secrets.token_hex(4)}")
        temporary.mkdir()
        return temporary

    @contextlib.contextmanager
    def create(self, path: Path, size: int):
        require_space(path.parent, size)
        with storage_errors(path, size), open(path, "wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())

    def write(self, path: Path, content: bytes) -> None:
        write_synced(path, content)

    def publish(self, draft: Path, final: Path, index: bytes, sizes: dict[str, int], parts: list[Path]) -> None:
        write_synced(draft / INDEX, index)
        for path in parts:
            os.unlink(path)
        sync_folder(draft)
        appear(draft, final)

    def replace(self, path: Path, content: bytes) -> None:
        replace_file(path, content)

    def discard(self, folder: Path, draft: Optional[Path]) -> None:
        for path in folder.glob(".tmp-*"):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def clean(self, folder: Path, final: Optional[Path] = None) -> None:
        for path in folder.glob(".old-*"):
            match = _NAME.fullmatch(path.name)
            if match and (folder / match[2]).exists():
                self.remove(path)
            elif match:
                path.rename(folder / match[2])  # killed between setting it aside and its successor's arrival
        self.discard(folder, None)

    def remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-gone-{path.name.lstrip('.')}-{secrets.token_hex(4)}")
        path.rename(doomed)
        sync_folder(path.parent)
        shutil.rmtree(doomed, ignore_errors=True)


def appear(folder: Path, final: Path) -> None:
    """Give a complete checkpoint that is on the disk its name; one of that name is set aside as `.old-<name>-...`."""
    if final.exists():
        os.rename(final, final.with_name(f".old-{final.name}-{secrets.token_hex(4)}"))
    os.rename(folder, final)
    sync_folder(final.parent)


class Objects:
    """An object store: everything rests on index.json, which is put last and deleted first."""

    def checkpoints(self, folder: UrlPath) -> dict[int, UrlPath]:
        found = {int(match[1]): path for path in folder.glob("iter_*") if (match := _FINAL.fullmatch(path.name))}
        return {iteration: path for iteration, path in sorted(found.items()) if (path / INDEX).exists()}

    def lock(self, folder: UrlPath, log: Say) -> Lease:
        return Lease(folder, log)

    def claim(self, folder: UrlPath, log: Say) -> Lease:
        lease = Lease(folder, log)
        try:
            self.clean(folder)
        except BaseException:
            lease.release()
            raise
        return lease

    def begin(self, final: UrlPath) -> Draft:
        return Draft(final.url)

    def create(self, path: UrlPath, size: int):
        return path.writer(size)

    def write(self, path: UrlPath, content: bytes) -> None:
        path.write_bytes(content)

    def publish(self, draft: Draft, final: UrlPath, index: bytes, sizes: dict[str, int], parts: list[UrlPath]) -> None:
        remove_all(parts)
        found = final.sizes()
        wrong = [
            f"{name}: {found.get(name, 'no')} bytes instead of {size}"
            for name, size in sizes.items()
            if found.get(name) != size
        ]
        if wrong:
            raise StorageError(
                f"{final}: the object store did not keep what it was given",
                "\n  ".join(wrong[:8]),
                "the save is tried again (--save-retries)",
            )
        (final / INDEX).write_bytes(index)

    def replace(self, path: UrlPath, content: bytes) -> None:
        path.write_bytes(content)

    def discard(self, folder: UrlPath, draft: Optional[Draft]) -> None:
        with contextlib.suppress(StorageError):
            if (
                draft is not None and _index_of(draft)[1] != draft.token
            ):  # else it was published, and what failed came later
                remove_all([path for path in draft.glob("*") if draft.has(path.name)])

    def clean(self, folder: UrlPath, final: Optional[UrlPath] = None) -> None:
        each = [final] if final is not None else [path for path in folder.glob("iter_*") if _FINAL.fullmatch(path.name)]
        for path in each:
            known, _ = _index_of(path)
            if known is not None:
                remove_all([found for found in path.glob("*") if found.name not in known])

    def remove(self, path: UrlPath) -> None:
        (path / INDEX).unlink()
        remove_all(path.glob("*"))


def _index_of(path: UrlPath) -> tuple[Optional[Collection[str]], Optional[str]]:
    """(names of the files of the checkpoint at `path`, token of the save that wrote it).

    No names where there is no index.json; None for an index that is damaged: nobody knows then what belongs to it.
    """
    index = UrlPath(path.url) / INDEX
    if not index.exists():
        return (), None
    try:
        _, content = read_sealed(index)
        return {INDEX, content.get("state_file", "state.json"), *content["files"]}, content.get("token")
    except (Damaged, KeyError, TypeError):
        return None, None


LOCAL, OBJECTS = Local(), Objects()
