# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: loading the one that `choose` names, saving another, and deleting old ones.

The layout on a file system (`backends.py` compares it with an object store):

    --save/
        iter_0000100/ iter_0000200/           complete checkpoints, which appear by rename
        latest_checkpointed_iteration.txt     "200", as in Megatron-LM
        .tmp-iter_0000300-5f0c/               being written; a killed run leaves it until the next save
        .old-iter_0000200-91aa/               set aside for a moment while iteration 200 is saved again

What the ranks of a job do together goes through `all_ranks`.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Optional, Protocol, Union

from megatron.checkpoint.all_ranks import AllGatherObject, alone, on_all_ranks
from megatron.checkpoint.backends import TRACKER, CheckpointPath, backend_of
from megatron.checkpoint.base_checkpoint import open_checkpoint
from megatron.checkpoint.choose import (
    Choice,
    checkpoints,
    choose,
    iteration_of,
    none_good,
    passed_over,
    read_tracker,
    rebuild_lost,
    rebuilt,
)
from megatron.checkpoint.index import ShardFile, differing_blocks
from megatron.checkpoint.parity import entries_of, write_range
from megatron.checkpoint.reader import Reader, Strictness
from megatron.checkpoint.store import (
    FAN,
    LiveSum,
    Parts,
    Piece,
    ShardRecord,
    commit,
    file_name,
    merge_group,
    single_part,
    write_shard,
)
from megatron.errors import CheckpointError, Failure, StorageError
from megatron.storage.durable import Damaged, storage_errors
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.figures import size as sized
from megatron.telemetry.progress import ProgressBar

# ---------------------------------------------------------------------------------------------------- loading


class MemorySnapshot(Protocol):
    """A snapshot in memory, from which a run can start as from a checkpoint (`memory_snapshots`)."""

    iteration: int
    path: Path  # on this rank

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Called on all ranks before it is loaded. Raises Damaged, on all ranks."""


def _with_snapshot(folder: CheckpointPath, iteration: int, path: Path) -> Choice:
    """The choice among the checkpoints of a folder, and a snapshot before those that are not newer."""
    try:
        choice = choose(folder, allow_empty=True, repairs=True)
    except CheckpointError as problem:  # all are damaged
        choice = Choice((), (str(problem),))
    newer = [one for one in choice.paths if iteration_of(one) > iteration]
    older = [one for one in choice.paths if one not in newer]
    return replace(choice, paths=(*newer, path, *older))


@dataclass(frozen=True)
class Restored:
    """The result of restoring a run.

    notices:        messages for the user
    damaged:        (path, what is wrong) of checkpoints that were passed over
    repaired:       (path, names of files) of checkpoints whose files were rebuilt
    reinitialized:  names of the tensors, over all ranks, that keep their initial values
    bytes_read:     by each rank
    size:           bytes of all files
    """

    path: CheckpointPath
    state: dict[str, Any]
    notices: tuple[str, ...]
    reinitialized: tuple[str, ...]
    bytes_read: tuple[int, ...]
    size: int
    damaged: tuple[tuple[CheckpointPath, str], ...] = ()
    repaired: tuple[tuple[CheckpointPath, str], ...] = ()

    @property
    def warnings(self) -> list[str]:
        """What was passed over and rebuilt, in words."""
        iteration = self.state["iteration"]
        return [*(rebuilt(*one) for one in self.repaired), *(passed_over(*one, iteration) for one in self.damaged)]

    def __str__(self) -> str:
        least, most = sized(min(self.bytes_read)), sized(max(self.bytes_read))
        each = most if least == most else f"{least} to {most}"
        return f"{self.path} (a rank read {each} of {sized(self.size)})"


def restore(
    folder: CheckpointPath,
    pieces: Iterable[Piece],
    *,
    step: Optional[int] = None,
    allow_empty: Union[bool, Callable[[], bool]] = False,
    names: Optional[Collection[str]] = None,
    cast: Union[bool, Collection[str]] = False,
    strictness: Strictness = "strict",
    reinitialize: Callable[[str, bool], bool] = lambda name, stored: False,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
    view: Callable[[Reader], None] = lambda reader: None,
    snapshot: Optional[MemorySnapshot] = None,
    rank: int = 0,
    all_gather_object: AllGatherObject = alone,
) -> Optional[Restored]:
    """Fill the pieces of all ranks from the newest undamaged checkpoint. Returns None if the folder may be empty and is.

    All ranks call it; rank 0 chooses (`choose`). If a checkpoint proves damaged on any rank, a notice names it and the next
    one is tried, unless `step` selected it. A checkpoint of another model is an error.

    names, cast, strictness:  as in `Reader.load`
    reinitialize:             (name of a piece, whether the checkpoint has it) -> whether it keeps its initial values
    view:                     may give the reader's tensors other names, and it another state, before anything else
    check:                    gets the state before any tensor is read, and may raise
    snapshot:                 is tried like a checkpoint of its iteration
    """
    folder, pieces = location(folder), list(pieces)
    if snapshot is not None:
        choosing = partial(_with_snapshot, folder, snapshot.iteration, snapshot.path)
    else:
        choosing = partial(choose, folder, step=step, allow_empty=allow_empty, repairs=True)
    choice, in_memory = on_all_ranks(
        lambda: (choosing(), snapshot and snapshot.path) if rank == 0 else None, all_gather_object
    )[0]
    notices, damaged, repaired = list(choice.notices), list(choice.damaged), list(choice.repaired)
    waiting = list(choice.paths)
    while waiting:
        path = waiting.pop(0)
        is_snapshot = path == in_memory
        path = snapshot.path if is_snapshot else path
        try:
            if is_snapshot:
                snapshot.begin(pieces)
            loaded = on_all_ranks(
                lambda path=path: _load(path, pieces, names, cast, strictness, reinitialize, check, view, rank),
                all_gather_object,
            )
        except Damaged as problem:
            if is_snapshot and len(choice.paths) == 1:  # a kind of failure after which the job is started again
                raise StorageError(f"{path} was damaged while it was read: {problem}") from None
            if not is_snapshot and path not in dict(repaired):  # once
                mend = lambda path=path: rebuild_lost(path) if rank == 0 else ""
                if rebuilt := on_all_ranks(mend, all_gather_object)[0]:
                    repaired.append((path, rebuilt))
                    waiting.insert(0, path)
                    continue
            if step is not None or len(choice.paths) == 1:
                raise
            damaged.append((path, str(problem)))
        else:
            notices += [f"{path}: {notice}" for _, some, *_ in loaded for notice in some]
            new = sorted(set().union(*(some for _, _, some, *_ in loaded)))
            read = tuple(count for *_, count, _ in loaded)
            notices, size = tuple(dict.fromkeys(notices)), loaded[0][-1]
            return Restored(path, loaded[0][0], notices, tuple(new), read, size, tuple(damaged), tuple(repaired))
    if not choice.paths:
        return None
    raise none_good(folder, notices, damaged)


def _load(
    path: CheckpointPath, pieces: list[Piece], names, cast, strictness, reinitialize, check, view, rank: int
) -> tuple[Any, list[str], set[str], int, int]:
    """Load a rank's pieces: (state on rank 0, notices, names of reinitialized tensors, bytes read, bytes of all files)."""
    with open_checkpoint(path) as reader:
        view(reader)
        check(reader.state)
        new = {piece.name for piece in pieces if reinitialize(piece.name, piece.name in reader.tensors)}
        wanted = [piece for piece in pieces if piece.name not in new]
        notices = reader.load(wanted, names=names, cast=cast, strictness=strictness)
        return reader.state if rank == 0 else None, notices, new, reader.bytes_read, reader.num_bytes


# ---------------------------------------------------------------------------------------------------- saving


def _counted(parts: Iterable, done: ProgressBar) -> Iterable:
    for part in parts:
        yield part
        done(part.nbytes)


class Saver:
    """Writes checkpoints into a folder, which one job locks while this object is open.

    All ranks create it and call `save` and `close` together. After a crash at any moment, including kill -9 and power loss,
    every earlier checkpoint can be loaded. `keep_last` and `retain_interval` (see `prune`) delete old ones only after the
    new one was read back and verified.
    """

    def __init__(
        self,
        folder: CheckpointPath,
        *,
        keep_last: Optional[int] = None,
        retain_interval: Optional[int] = None,
        rank: int = 0,
        all_gather_object: AllGatherObject = alone,
        in_use: Callable[[], Collection[Optional[CheckpointPath]]] = list,
        log: Callable[[str], None] = lambda text: None,
        verified: float = 1.0,
        parity: Optional[int] = None,
    ):
        """verified: the share of its file that each rank reads back before older checkpoints are deleted.
        parity: the number of files for each parity file, on a file system.
        in_use: returns checkpoints that are being read, which stay until the next save.
        log: gets a message while this waits for another job to end.

        Raises StorageError when the folder cannot be written, Locked when another job writes into it.
        """
        self.folder, self.rank, self.all_gather_object = location(folder), rank, all_gather_object
        self.keep_last, self.retain_interval, self.in_use, self.log = keep_last, retain_interval, in_use, log
        self._storage, self._lock = backend_of(self.folder), None
        self.verified, self._saves = verified, 0
        self.parity = None if isinstance(self.folder, UrlPath) else parity
        self._written: Optional[tuple[int, ShardRecord]] = None  # by the last save: iteration, this rank's file
        self.unchanged: list[str] = []  # kinds of state that are those of the save before, on all ranks
        self.last_write = (0, 0.0)  # bytes of all ranks, and seconds until the checkpoint was durable, of the last save
        on_all_ranks(self._claim, all_gather_object)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder for other jobs."""
        if self._lock:
            self._lock.release()

    def _claim(self) -> None:
        if self.rank == 0:
            with storage_errors(self.folder):
                self._lock = self._storage.claim(self.folder, self.log)

    def save(
        self,
        iteration: int,
        pieces: Iterable[Piece],
        state: dict[str, Any],
        live: Mapping[str, LiveSum] = MappingProxyType({}),
    ) -> CheckpointPath:
        """Write a checkpoint of all ranks' pieces. Returns its directory when it is durable.

        state: rank 0's state, a dict for JSON; `iteration` is added. A checkpoint of the same iteration is replaced.
        live:  `live_sums` of this rank's pieces from before they were copied, if they were
        Raises, on all ranks, StorageError when the disk is full or fails (earlier checkpoints stay), and CheckpointError
        when the pieces do not form whole tensors.
        """
        final, temporary = self.folder / f"iter_{iteration:07d}", None
        try:
            temporary = on_all_ranks(lambda: self._begin(final), self.all_gather_object)[0]
            started = time.perf_counter()
            answers = on_all_ranks(lambda: self._write(temporary, iteration, pieces, live), self.all_gather_object)
            sizes, changes = zip(*answers)
            self.unchanged = sorted(kind for kind in set().union(*changes) if not any(c.get(kind) for c in changes))
            writers, in_groups = len(sizes), len(sizes) > FAN
            if in_groups:
                on_all_ranks(lambda: merge_group(temporary, self.rank, writers), self.all_gather_object)
            parity = self._write_parity(temporary, sizes) if self.parity else {}
            doomed = on_all_ranks(
                lambda: self._finish(temporary, final, writers, iteration, state, in_groups, parity),
                self.all_gather_object,
            )[0]
            self.last_write = sum(sizes), time.perf_counter() - started
            if doomed:
                on_all_ranks(lambda: self._read_back(final), self.all_gather_object)
                on_all_ranks(lambda: self._forget(doomed), self.all_gather_object)
        except Failure:
            if self.rank == 0:
                self._storage.discard(self.folder, temporary)
            raise
        return final

    def write(
        self, iteration: int, shards: Iterable[Iterable[Piece]], state: dict[str, Any], *, parts: Parts = single_part
    ) -> CheckpointPath:
        """Write a checkpoint of several files, one after the other, from this process alone. For tools.

        shards: the pieces of each file; `parts` as in `store.write_shard`.
        """
        final, temporary = self.folder / f"iter_{iteration:07d}", None
        try:
            temporary, count = self._begin(final), 0
            known = isinstance(shards, list) and all(isinstance(pieces, list) for pieces in shards)
            total = sum(piece.tensor.nbytes for pieces in shards for piece in pieces) if known else None
            with ProgressBar("writing", total) as done:
                for count, pieces in enumerate(shards, 1):
                    write_shard(temporary, count - 1, pieces, parts=lambda piece: _counted(parts(piece), done))
            self._finish(temporary, final, count, iteration, state)
        except BaseException:
            self._storage.discard(self.folder, temporary)
            raise
        return final

    def _begin(self, final: CheckpointPath) -> Optional[CheckpointPath]:
        if self.rank != 0:
            return None
        with storage_errors(final):
            self._lock.check()
            self._storage.clean(self.folder, final)
            return self._storage.begin(final)

    def _write(
        self, temporary: CheckpointPath, iteration: int, pieces: Iterable[Piece], live: Mapping[str, LiveSum]
    ) -> tuple[int, dict[str, bool]]:
        """(bytes, kind of state -> whether it differs from the last save of an earlier iteration) of this rank."""
        written = write_shard(temporary, self.rank, pieces, live=live)
        then, before = self._written or (iteration, None)
        changes = changed_kinds(before, written) if before and then < iteration else {}
        self._written = iteration, written
        return written.size, changes

    def _write_parity(self, temporary: CheckpointPath, sizes: Sequence[int]) -> dict[str, dict]:
        """Write the parity files, each rank a part of one; the entries of all."""
        files = [(file_name(writer), size) for writer, size in enumerate(sizes)]
        ranges = on_all_ranks(lambda: write_range(temporary, files, self.rank, self.parity), self.all_gather_object)
        return entries_of(ranges, files, self.parity)

    def _read_back(self, final: CheckpointPath) -> None:
        """Compare `verified` of this rank's file with what it wrote, the next blocks at each save."""
        if self.verified:
            every = max(1, round(1 / self.verified))
            read_back(final, self._written[1], every, self._saves % every)
        self._saves += 1

    def _finish(
        self,
        temporary: CheckpointPath,
        final: CheckpointPath,
        writers: int,
        iteration: int,
        state: dict,
        in_groups: bool = False,
        parity: Mapping[str, dict] = MappingProxyType({}),
    ) -> list[CheckpointPath]:
        """Publish the checkpoint, on rank 0. Returns the checkpoints to delete."""
        if self.rank != 0:
            return []
        with storage_errors(final):
            self._lock.check()
            commit(temporary, final, writers, {**state, "iteration": iteration}, in_groups, parity)
            self._storage.replace(self.folder / TRACKER, str(iteration).encode())
            self._storage.clean(self.folder, final)
        used = self.in_use()
        return [path for path in surplus(self.folder, self.keep_last, self.retain_interval) if path not in used]

    def _forget(self, doomed: list[CheckpointPath]) -> None:
        if self.rank == 0:
            remove(doomed)


def changed_kinds(before: ShardRecord, now: ShardRecord) -> dict[str, bool]:
    """Kind of state (weights, or a moment such as optimizer.exp_avg) -> whether a tensor of it has changed."""
    old = {key: sums for entry in before.tensors.values() for *_, key, sums in entry["boxes"]}
    changed: dict[str, bool] = {}
    for name, entry in now.tensors.items():
        kind = ".".join(name.split(".")[:2]) if name.startswith("optimizer.") else "weights"
        for *_, key, sums in entry["boxes"]:
            changed[kind] = changed.get(kind, False) or old.get(key) != sums
    return changed


def read_back(path: CheckpointPath, written: ShardRecord, every: int = 1, turn: int = 0) -> None:
    """Read back a file that this process has just written, from the disk and not from the page cache if possible.

    every, turn: only every so many blocks, from block `turn` on
    Raises StorageError when a byte differs from what was written.
    """
    try:
        ((name, entry),) = written.files.items()
        _forget_cached(path / name)
        file = ShardFile(path / name, entry["bytes"], entry["header"])
        boxes = [box for tensor in written.tensors.values() for box in tensor["boxes"]]
        problems = list(differing_blocks(file, written.block, {key: sums for *_, key, sums in boxes}, every, turn))
    except (OSError, Damaged) as problem:
        problems = [str(problem)]
    if problems:
        raise StorageError(
            f"{path} was written and reads back differently",
            "\n  ".join(problems[:8]),
            "check the disk; older checkpoints were kept",
        )


def _forget_cached(path: CheckpointPath) -> None:
    """Drop a file from the page cache, so that the next read comes from the disk."""
    if not isinstance(path, UrlPath) and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clean(folder: CheckpointPath) -> None:
    """Remove leftovers of killed saves. Only for the holder of the lock."""
    backend_of(folder).clean(folder)


def prune(
    folder: CheckpointPath, keep_last: Optional[int] = None, retain_interval: Optional[int] = None
) -> list[CheckpointPath]:
    """Delete the checkpoints that are `surplus` and return their paths. Only for the holder of the lock."""
    gone = surplus(folder, keep_last, retain_interval)
    remove(gone)
    return gone


def surplus(
    folder: CheckpointPath, keep_last: Optional[int] = None, retain_interval: Optional[int] = None
) -> list[CheckpointPath]:
    """Checkpoints to delete: neither among the `keep_last` newest nor at a multiple of `retain_interval`.

    With `retain_interval` alone the newest stays too; with neither, all stay. Checkpoints newer than the tracker's stay:
    the user went back to an older one and may want them again.
    """
    if not (keep_last or retain_interval):
        return []
    newest = read_tracker(folder)
    old = {n: path for n, path in checkpoints(folder).items() if newest is not None and n <= newest}
    among = list(old)[: max(0, len(old) - max(keep_last or 0, 1))]
    return [old[n] for n in among if not (retain_interval and n % retain_interval == 0)]


def remove(paths: Iterable[CheckpointPath]) -> None:
    """Delete checkpoints, oldest first. Raises StorageError when one cannot be deleted."""
    for path in paths:
        with storage_errors(path):
            backend_of(path).remove(path)
