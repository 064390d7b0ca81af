# SPDX-License-Identifier: Apache-2.0
"""Storage backends for checkpoints: a file system and an object store.

                         file system (`LocalBackend`)                  object store (`ObjectStoreBackend`)
    a save writes to     .tmp-iter_0000300-5f0c/                       iter_0000300/, each name with the save's token
    a file is durable    after its fsync                               after its upload, which is atomic
    the checkpoint       when the directory is renamed (atomic)        when index.json is put (atomic), after the sizes of
    appears                                                            all files were compared
    saving it again      sets the old one aside for a moment           replaces index.json, then removes the old files
    deletion             renames the directory first                   deletes index.json first
    killed saves leave   .tmp-*, invisible to readers                  files without an index.json, invisible to readers
    the tracker          is renamed into place                         is put
    single writer        by the kernel's lock                          by a lease (`storage/lease.py`)

Readers need none of this: they read what `checkpoints` lists. `backend_of(path)` selects the backend of a path.
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
TRACKER = "latest_checkpointed_iteration.txt"  # the last saved iteration, as in Megatron-LM
_FINAL = re.compile(r"iter_(\d{7,})")
_NAME = re.compile(r"iter_(\d{7,})|\.old-(iter_(\d{7,}))-[0-9a-f]+")

CheckpointPath = Union[Path, UrlPath]
Log = Callable[[str], None]


class Backend(Protocol):
    """The storage operations for writing checkpoints. They raise StorageError, or OSError, which callers convert."""

    def checkpoints(self, folder: CheckpointPath) -> dict[int, CheckpointPath]:
        """Iteration -> path of every complete checkpoint, oldest first."""

    def lock(self, folder: CheckpointPath, log: Log) -> Any:
        """Lock an existing folder for writing. The result has `check()` and `release()`. Raises Locked."""

    def claim(self, folder: CheckpointPath, log: Log) -> Any:
        """Create and lock the folder, and remove leftovers of killed saves."""

    def begin(self, final: CheckpointPath) -> CheckpointPath:
        """Start a save. Returns the draft, the folder for the files of all writers."""

    def create(self, path: CheckpointPath, size: int) -> contextlib.AbstractContextManager:
        """Open a file to write `size` bytes. It is durable when the context ends."""

    def write(self, path: CheckpointPath, content: bytes) -> None:
        """Write a small file durably."""

    def publish(
        self,
        draft: CheckpointPath,
        final: CheckpointPath,
        index: bytes,
        sizes: dict[str, int],
        parts: list[CheckpointPath],
    ) -> None:
        """Publish a complete draft as `final`. sizes: file name -> bytes; parts: files of the draft to delete."""

    def replace(self, path: CheckpointPath, content: bytes) -> None:
        """Replace a small file atomically."""

    def discard(self, folder: CheckpointPath, draft: Optional[CheckpointPath]) -> None:
        """Remove a draft that will not be published. Never fails."""

    def clean(self, folder: CheckpointPath, final: Optional[CheckpointPath] = None) -> None:
        """Remove leftovers of killed saves (of one checkpoint). Only for the holder of the lock."""

    def remove(self, path: CheckpointPath) -> None:
        """Delete a checkpoint. Readers never see a part of it."""


def backend_of(path: CheckpointPath) -> Backend:
    """The backend for a path."""
    return OBJECTS if isinstance(path, UrlPath) else LOCAL


class LocalBackend:
    """The backend for a file system, built on rename, fsync and the kernel's locks."""

    def checkpoints(self, folder: Path) -> dict[int, Path]:
        paths: dict[int, Path] = {}
        if folder.is_dir():
            for path in sorted(folder.iterdir()):  # ".old-..." sorts before "iter_...", which takes its place
                match = _NAME.fullmatch(path.name)
                if match and path.is_dir():
                    paths[int(match[1] or match[3])] = path
        return dict(sorted(paths.items()))

    def lock(self, folder: Path, log: Log) -> WriterLock:
        return WriterLock(folder)

    def claim(self, folder: Path, log: Log) -> WriterLock:
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
                path.rename(folder / match[2])  # killed after it was set aside, before its successor appeared
        self.discard(folder, None)

    def remove(self, path: Path) -> None:
        doomed = path.with_name(f".tmp-gone-{path.name.lstrip('.')}-{secrets.token_hex(4)}")
        path.rename(doomed)
        sync_folder(path.parent)
        shutil.rmtree(doomed, ignore_errors=True)


def appear(folder: Path, final: Path) -> None:
    """Rename a complete, durable checkpoint to `final`. An existing one is set aside as `.old-<name>-...`."""
    if final.exists():
        os.rename(final, final.with_name(f".old-{final.name}-{secrets.token_hex(4)}"))
    os.rename(folder, final)
    sync_folder(final.parent)


class ObjectStoreBackend:
    """The backend for an object store, built on index.json, which is put last and deleted first."""

    def checkpoints(self, folder: UrlPath) -> dict[int, UrlPath]:
        paths = {int(match[1]): path for path in folder.glob("iter_*") if (match := _FINAL.fullmatch(path.name))}
        return {iteration: path for iteration, path in sorted(paths.items()) if (path / INDEX).exists()}

    def lock(self, folder: UrlPath, log: Log) -> Lease:
        return Lease(folder, log)

    def claim(self, folder: UrlPath, log: Log) -> Lease:
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
        stored = final.sizes()
        wrong = [
            f"{name}: {stored.get(name, 'no')} bytes instead of {size}"
            for name, size in sizes.items()
            if stored.get(name) != size
        ]
        if wrong:
            raise StorageError(
                f"{final}: the object store has files of wrong sizes",
                "\n  ".join(wrong[:8]),
                "the save is retried (--save-retries)",
            )
        (final / INDEX).write_bytes(index)

    def replace(self, path: UrlPath, content: bytes) -> None:
        path.write_bytes(content)

    def discard(self, folder: UrlPath, draft: Optional[Draft]) -> None:
        with contextlib.suppress(StorageError):
            if draft is not None and _index_of(draft)[1] != draft.token:  # not published
                remove_all([path for path in draft.glob("*") if draft.has(path.name)])

    def clean(self, folder: UrlPath, final: Optional[UrlPath] = None) -> None:
        each = [final] if final is not None else [path for path in folder.glob("iter_*") if _FINAL.fullmatch(path.name)]
        for path in each:
            known, _ = _index_of(path)
            if known is not None:
                remove_all([file for file in path.glob("*") if file.name not in known])

    def remove(self, path: UrlPath) -> None:
        (path / INDEX).unlink()
        remove_all(path.glob("*"))


def _index_of(path: UrlPath) -> tuple[Optional[Collection[str]], Optional[str]]:
    """(names of the files of the checkpoint at `path`, token of the save that wrote it).

    Without an index.json there are no names. For a damaged index they are None: its files are unknown.
    """
    index = UrlPath(path.url) / INDEX
    if not index.exists():
        return (), None
    try:
        _, content = read_sealed(index)
        known = {INDEX, content.get("state_file", "state.json"), *content["files"], *content.get("tables", ())}
        return known, content.get("token")
    except (Damaged, KeyError, TypeError):
        return None, None


LOCAL, OBJECTS = LocalBackend(), ObjectStoreBackend()
