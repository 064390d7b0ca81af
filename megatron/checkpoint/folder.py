# SPDX-License-Identifier: Apache-2.0
"""A folder of checkpoints: which one is newest, which one is good, how one more arrives, which ones go.

On a file system, and with other means to the same end in an object store (`storage.py` has both side by side):

    --save/
        iter_0000100/ iter_0000200/           complete checkpoints, by rename: there are no half ones
        latest_checkpointed_iteration.txt     "200", as in Megatron-LM
        .tmp-iter_0000300-5f0c/               being written; left over by a killed run until the next one saves
        .old-iter_0000200-91aa/               set aside for the moment in which iteration 200 is saved again

The ranks of a job act together through one function, `all_gather_object(value) -> [value of rank 0, value of rank 1, ...]`
(`torch.distributed.all_gather_object`, say). It carries every failure to every rank, so none is left waiting.
"""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Optional, Union

from megatron.checkpoint.reader import Reader, Strictness
from megatron.checkpoint.storage import TRACKER, CheckpointPath, storage_of
from megatron.checkpoint.store import Parts, Piece, at_once, commit, write_shard
from megatron.errors import CheckpointError, Failure, StorageError
from megatron.storage.durable import Damaged, storage_errors
from megatron.storage.urls import UrlPath, location

AllGatherObject = Callable[[Any], list]
RELEASE = "release"  # in the place of an iteration: Megatron-LM's name for weights that a converter has written
NEW_RUN = "check --load; a new run begins where --save and --load are the same new folder, or with --auto-resume"


def alone(value: Any) -> list:
    """The all_gather_object of a job with one rank."""
    return [value]


# ---------------------------------------------------------------------------------------------------- finding


def checkpoints(folder: CheckpointPath) -> dict[int, CheckpointPath]:
    """Iteration -> directory of every checkpoint, oldest first; one that was set aside counts while it has no successor."""
    return storage_of(folder).checkpoints(folder)


def read_tracker(folder: CheckpointPath) -> Optional[int]:
    """The iteration that the tracker names; None when it is missing or torn."""
    try:
        text = (folder / TRACKER).read_bytes()[:32].decode("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True)
class Choice:
    """Checkpoints to try, best first, and what the user should hear about how they were chosen."""

    paths: tuple[CheckpointPath, ...]
    notices: tuple[str, ...] = ()


def choose(
    folder: CheckpointPath, *, step: Optional[int] = None, allow_empty: Union[bool, None, Callable[[], bool]] = None
) -> Choice:
    """Which checkpoints of a folder to try, in order: the tracker's, then older ones from new to old, then newer ones.

    step:         only this iteration (`--ckpt-step`)
    allow_empty:  nothing there is an answer, not an error (`--auto-resume`; None where there is no such flag); or a
                  function that is asked where nothing is there, and may raise
    A directory that is itself a checkpoint is chosen as it is. Those before the first one without visible damage (nothing
    is read but the index and the sizes) are named in the notices and left out; what lies behind it is not looked at.
    Raises CheckpointError when nothing is left.
    """
    if (folder / "index.json").exists():
        return Choice((folder,))
    found = checkpoints(folder)
    if step is not None:
        if step not in found:
            listed = ", ".join(map(str, found)) or "none"
            raise CheckpointError(
                f"{folder} has no checkpoint of iteration {step}", f"it has: {listed}", "see --ckpt-step"
            )
        return Choice((found[step],))
    if not found:
        if problem := of_megatron(folder):
            raise CheckpointError(problem)
        if allow_empty() if callable(allow_empty) else allow_empty:
            return Choice(())
        if (folder / "config.json").exists():
            raise CheckpointError(
                f"{folder} is a model of Hugging Face transformers, not a folder of checkpoints",
                do=f"python -m megatron.tools.checkpoint from-hf {folder} OUT",
            )
        why = None if folder.is_dir() else "there is no such folder"
        do = "check the path" if allow_empty is None else NEW_RUN
        raise CheckpointError(f"{folder} holds no checkpoint", why, do)
    named, notices = read_tracker(folder), []
    order = sorted(found, reverse=True)
    if named in found:
        newer = [iteration for iteration in order if iteration > named]
        order = [iteration for iteration in order if iteration <= named] + newer[::-1]
        if newer:
            notices.append(f"{folder / TRACKER} names iteration {named}; newer ones are there too: {newer[::-1]}")
    else:
        torn = f"names iteration {named}, which is not there" if named is not None else "is missing or torn"
        notices.append(f"{folder / TRACKER} {torn}; taking the newest checkpoint, iteration {order[0]}")
    for place, iteration in enumerate(order):
        problem = _visible_damage(found[iteration])
        if not problem:
            return Choice(tuple(found[number] for number in order[place:]), tuple(notices))
        notices.append(problem)
    raise CheckpointError(f"{folder} holds no valid checkpoint", "\n  ".join(notices[:8]), "check --load")


def of_megatron(folder: CheckpointPath) -> Optional[str]:
    """What to do with a folder whose only checkpoint is a `release` of Megatron-LM's, or that is one itself."""
    return next(filter(None, map(_foreign, (folder / RELEASE, folder))), None)


def _foreign(path: CheckpointPath) -> Optional[str]:
    """What to do with one checkpoint of Megatron-LM's own two formats; None: it is none."""
    if (path / "index.json").exists():
        return None
    if any(path.glob("mp_rank_*")):
        return (
            f"{path} is in Megatron-LM's own format; make one of this with python -m megatron.tools.checkpoint "
            f"from-megatron {path.parent} OUT"
        )
    if any(path.glob("*.distcp")):
        return (
            f"{path} is in torch's distributed format; if it is Megatron-LM's, make one of this with python -m "
            f"megatron.tools.checkpoint from-megatron {path.parent} OUT"
        )
    return None


def _visible_damage(path: CheckpointPath) -> Optional[str]:
    if foreign := _foreign(path):
        return foreign
    try:
        with Reader(path) as reader:
            reader.check_files()
    except Damaged as problem:
        return str(problem)
    return None


# ---------------------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Restored:
    """What a run was restored from; `notices` are for the user. anew: tensors of all ranks that were not; bytes_read: of
    each rank; size: of all files.
    """

    path: CheckpointPath
    state: dict[str, Any]
    notices: tuple[str, ...]
    anew: tuple[str, ...]
    bytes_read: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        least, most = min(self.bytes_read) / 1e6, max(self.bytes_read) / 1e6
        each = f"{most:,.1f}" if f"{least:,.1f}" == f"{most:,.1f}" else f"{least:,.1f} to {most:,.1f}"
        return f"{self.path} (a rank read {each} of {self.size / 1e6:,.1f} MB)"


def restore(
    folder: CheckpointPath,
    pieces: Iterable[Piece],
    *,
    step: Optional[int] = None,
    allow_empty: Union[bool, Callable[[], bool]] = False,
    names: Optional[Collection[str]] = None,
    cast: Union[bool, Collection[str]] = False,
    strictness: Strictness = "strict",
    anew: Callable[[str, bool], bool] = lambda name, stored: False,
    check: Callable[[dict[str, Any]], None] = lambda state: None,
    rank: int = 0,
    all_gather_object: AllGatherObject = alone,
) -> Optional[Restored]:
    """Fill the pieces of all ranks from the newest checkpoint whose every byte is good; None when allowed and empty.

    All ranks call it; rank 0 chooses (`choose`). A checkpoint that turns out damaged on any rank is named in a notice and
    the next one is tried, unless `step` asked for it. One that belongs to another model is an error at once. `names`,
    `cast` and `strictness` as in `Reader.load`; `check` sees the state before anything is read and may raise. anew: (name
    of a piece, whether the checkpoint has it) -> whether it keeps its first values.
    """
    folder, pieces = location(folder), list(pieces)
    choice = _together(
        lambda: choose(folder, step=step, allow_empty=allow_empty) if rank == 0 else None, all_gather_object
    )[0]
    notices = list(choice.notices)
    for path in choice.paths:
        try:
            loaded = _together(
                lambda path=path: _load(path, pieces, names, cast, strictness, anew, check, rank), all_gather_object
            )
        except Damaged as problem:
            if step is not None or len(choice.paths) == 1:
                raise
            notices.append(str(problem))
        else:
            told = [f"{path}: {notice}" for _, found, *_ in loaded for notice in found]
            new = sorted(set().union(*(found for _, _, found, *_ in loaded)))
            read = tuple(count for *_, count, _ in loaded)
            return Restored(path, loaded[0][0], tuple(dict.fromkeys(notices + told)), tuple(new), read, loaded[0][-1])
    if not choice.paths:
        return None
    raise CheckpointError(f"{folder} holds no valid checkpoint", "\n  ".join(notices[:8]), "check --load")


def _load(
    path: CheckpointPath, pieces: list[Piece], names, cast, strictness, anew, check, rank: int
) -> tuple[Any, list[str], set[str], int, int]:
    """(state on rank 0, notices, names of what begins anew, bytes that were read, bytes of all files)"""
    with Reader(path) as reader:
        check(reader.state)
        new = {piece.name for piece in pieces if anew(piece.name, piece.name in reader.tensors)}
        wanted = [piece for piece in pieces if piece.name not in new]
        notices = reader.load(wanted, names=names, cast=cast, strictness=strictness)
        size = sum(size for size, _ in reader.index.files.values())
        return reader.state if rank == 0 else None, notices, new, reader.bytes_read, size


def _together(action: Callable[[], Any], all_gather_object: AllGatherObject) -> list:
    """Results of `action` on all ranks. When it fails on any it raises on all; damaged files are told last: for them there
    is an older checkpoint.
    """
    try:
        result, failure = action(), None
    except (Failure, OSError) as error:
        result, failure = None, error
    told = failure if isinstance(failure, (Failure, type(None))) else StorageError(str(failure))
    answers = all_gather_object((result, told and (type(told), told.what, told.why, told.do)))
    failures = [(rank, *problem) for rank, (_, problem) in enumerate(answers) if problem]
    if not failures:
        return [value for value, _ in answers]
    rank, kind, what, why, do = min(failures, key=lambda item: issubclass(item[1], Damaged))
    raise kind(what if len(answers) == 1 else f"{what} (rank {rank})", why, do) from failure


# ---------------------------------------------------------------------------------------------------- saving


class Saver:
    """The right to write checkpoints into a folder, held by one job for as long as this object is open.

    All ranks create it, call `save` and `close` together. At any moment, kill -9 and power loss included, every
    checkpoint that was complete before a save can be loaded after it, unless `keep_last` and `retain_interval` (see
    `prune`) let it go: after the new one was read back and found good.
    """

    def __init__(
        self,
        folder: CheckpointPath,
        *,
        keep_last: Optional[int] = None,
        retain_interval: Optional[int] = None,
        rank: int = 0,
        all_gather_object: AllGatherObject = alone,
        in_use: Callable[[], Optional[CheckpointPath]] = lambda: None,
        log: Callable[[str], None] = lambda text: None,
    ):
        """in_use: a checkpoint that somebody reads at the moment, which therefore stays until the next save.

        log: told of a wait for another job's end.

        Raises StorageError when the folder cannot be written, Locked when another job writes into it.
        """
        self.folder, self.rank, self.all_gather_object = location(folder), rank, all_gather_object
        self.keep_last, self.retain_interval, self.in_use, self.log = keep_last, retain_interval, in_use, log
        self._storage, self._lock = storage_of(self.folder), None
        _together(self._claim, all_gather_object)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Let other jobs write."""
        if self._lock:
            self._lock.release()

    def _claim(self) -> None:
        if self.rank == 0:
            with storage_errors(self.folder):
                self._lock = self._storage.claim(self.folder, self.log)

    def save(self, iteration: int, pieces: Iterable[Piece], state: dict[str, Any]) -> CheckpointPath:
        """Write a checkpoint of all ranks' pieces; returns its directory when it is durable.

        state: of rank 0; a dict that JSON can hold, `iteration` is added. A checkpoint of the same iteration is replaced.
        Raises, on all ranks, StorageError when the disk is full or failing (what was there before stays), and
        CheckpointError when the pieces do not make whole tensors.
        """
        final, temporary = self.folder / f"iter_{iteration:07d}", None
        try:
            temporary = _together(lambda: self._begin(final), self.all_gather_object)[0]
            sizes = _together(lambda: write_shard(temporary, self.rank, pieces), self.all_gather_object)
            doomed = _together(
                lambda: self._finish(temporary, final, len(sizes), iteration, state), self.all_gather_object
            )[0]
            if doomed:
                _together(lambda: read_back(final, self.rank), self.all_gather_object)
                _together(lambda: self._forget(doomed), self.all_gather_object)
        except Failure:
            if self.rank == 0:
                self._storage.discard(self.folder, temporary)
            raise
        return final

    def write(
        self, iteration: int, shards: Iterable[Iterable[Piece]], state: dict[str, Any], *, parts: Parts = at_once
    ) -> CheckpointPath:
        """Write a checkpoint of several files from this process alone, one after the other; for tools.

        shards: the pieces of each file; `parts` as in `store.write_shard`.
        """
        final, temporary = self.folder / f"iter_{iteration:07d}", None
        try:
            temporary, count = self._begin(final), 0
            for count, pieces in enumerate(shards, 1):
                write_shard(temporary, count - 1, pieces, parts=parts)
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

    def _finish(
        self, temporary: CheckpointPath, final: CheckpointPath, writers: int, iteration: int, state: dict
    ) -> list[CheckpointPath]:
        """Let the checkpoint appear. Returns the ones that may go now; rank 0 does it all."""
        if self.rank != 0:
            return []
        with storage_errors(final):
            self._lock.check()
            commit(temporary, final, writers, {**state, "iteration": iteration})
            self._storage.replace(self.folder / TRACKER, str(iteration).encode())
            self._storage.clean(self.folder, final)
        used = self.in_use()
        return [path for path in surplus(self.folder, self.keep_last, self.retain_interval) if path != used]

    def _forget(self, doomed: list[CheckpointPath]) -> None:
        if self.rank == 0:
            remove(doomed)


def read_back(path: CheckpointPath, writer: int) -> None:
    """Read a file that this process has just written, from the disk and not from memory where the system lets us.

    Raises StorageError when a byte differs: what the disk kept is not what it was given.
    """
    try:
        with Reader(path) as reader:
            own = f"shard_{writer:05d}"
            names = [name for name in reader.index.files if name.partition(".")[0].partition("-")[0] == own]
            for name in names:
                _forget_cached(path / name)
            problems = reader.verify(names)
    except (OSError, Damaged) as problem:
        problems = [str(problem)]
    if problems:
        raise StorageError(
            f"{path} was written and reads back differently",
            "\n  ".join(problems[:8]),
            "check the disk; older checkpoints were kept",
        )


def _forget_cached(path: CheckpointPath) -> None:
    """Have the system read a file from the disk when it is read next."""
    if not isinstance(path, UrlPath) and hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def clean(folder: CheckpointPath) -> None:
    """Remove what killed saves left behind. Only for the holder of the lock."""
    storage_of(folder).clean(folder)


def prune(
    folder: CheckpointPath, keep_last: Optional[int] = None, retain_interval: Optional[int] = None
) -> list[CheckpointPath]:
    """Delete the checkpoints that are `surplus`; returns what is gone. Only for the holder of the lock."""
    gone = surplus(folder, keep_last, retain_interval)
    remove(gone)
    return gone


def surplus(
    folder: CheckpointPath, keep_last: Optional[int] = None, retain_interval: Optional[int] = None
) -> list[CheckpointPath]:
    """Checkpoints that need not be kept: neither among the `keep_last` newest nor at a multiple of `retain_interval`.

    With `retain_interval` alone the newest stays too; with neither, all stay. Checkpoints newer than the tracker's stay:
    somebody went back to an older one, and may change their mind.
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
            storage_of(path).remove(path)
