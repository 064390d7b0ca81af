# SPDX-License-Identifier: Apache-2.0
"""Snapshots of a run in the memory of its nodes (--non-persistent-save-interval), from which it goes on after a failure.

    snapshots = MemorySnapshots(settings, world=mesh.world, device=device, all_gather_object=..., log=log, events=events)
    restore(folder, pieces, snapshot=snapshots.find())  # at the start: the newest whole one, or a checkpoint
    snapshots.save(40, pieces, state)                   # in training: each rank's part, and copies of it elsewhere
    snapshots.close(iteration=60)                       # at the end of the run

Files outlive the ranks that wrote them, in a folder of each node's memory:

    /dev/shm/megatron-snapshots-5f0c91aa3b7e/iter_0000040-91aa3b7e/...      (`memory_parts`)
    --save/memory_snapshots.json          the name of that folder, and which snapshots have started the run how often

A new folder of checkpoints has a new name, so snapshots of another run are never taken for those of this one.
The way back has no circle: a part without its checksums is deleted where it is found, a snapshot of which a part is
missing is deleted as a whole, and one that has started the run `STARTS` times is passed over. Each start leaves fewer, and
the checkpoints on the disk come last.
"""

import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.checkpoint.all_ranks import AllGatherObject, attempt_on_all_ranks
from megatron.checkpoint.backends import CheckpointPath, backend_of
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.folder import Restored
from megatron.checkpoint.memory_parts import LOADED, MemoryPart, SaveId, assemble, parts_in, remove_save, saves_in
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.replication import exchange_files, replica_ranks
from megatron.checkpoint.store import Piece, file_name, live_sums
from megatron.errors import Failure, StorageError
from megatron.mpu.mesh import Axis
from megatron.settings import schema
from megatron.storage.durable import Damaged, read_sealed, seal, storage_errors
from megatron.storage.processes import shared_memory
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.events import EventLog
from megatron.telemetry.run_folder import SNAPSHOT_FOLDER, SNAPSHOTS

STARTS = 2  # of a run from one snapshot: the third time an older one, or the disk, has its turn
_OWNER, _NODE = "owner.json", "node"


@dataclass(frozen=True)
class FoundSnapshot:
    """A snapshot with a whole copy of each part.

    path:    this node's folder of it, as a checkpoint; files of other nodes come with `begin`
    records: file -> record of the part
    sources: file -> the rank that has it, for those of other nodes
    """

    snapshots: "MemorySnapshots"
    save: SaveId
    path: Path
    records: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, int]

    @property
    def iteration(self) -> int:
        return self.save.iteration

    def begin(self, pieces: Iterable[Piece]) -> None:
        """Record that the run starts from it, and get what this rank needs of other nodes. Raises Damaged on all ranks."""
        self.snapshots.count_start(self.save)
        self.snapshots.fetch(self, pieces)


class MemorySnapshots:
    """The snapshots of a run. All ranks call each method together."""

    def __init__(
        self,
        settings: schema.Checkpoint,
        *,
        world: Axis,
        device: torch.device,
        all_gather_object: AllGatherObject,
        resumes: bool = True,
        log: Callable[[str], None] = print,
        events: Optional[EventLog] = None,
    ):
        """resumes: the run goes on from what is newest in --save; else earlier snapshots are no longer found

        Raises StorageError if the folder in memory, or the record in --save, cannot be written on any rank.
        """
        self.settings, self.world, self.rank, self.device = settings, world, world.rank, device
        self.all_gather_object, self.log = all_gather_object, log
        self.events = events or EventLog(active=False)
        self.place, self.starts = self._agree(lambda: None if self.rank else self._open_record(resumes))[0]
        self.memory = Path(settings.non_persistent_local_ckpt_dir or shared_memory()) / f"{SNAPSHOT_FOLDER}{self.place}"
        self.nodes: list[str] = self._agree(self._open_memory)
        # The ranks that hold copies of each rank's part
        self.holders: list[list[int]] = [[] for _ in self.nodes]
        if settings.replication:
            self.holders = replica_ranks(self.nodes, settings.replication_factor, settings.replication_jump)
        self.notices: list[str] = []  # of `find`, about what was passed over
        self._said = False

    def due(self, iteration: int) -> bool:
        """Whether a snapshot is due after this step."""
        return iteration % self.settings.non_persistent_save_interval == 0

    # ---- in training -----------------------------------------------------------------------------------------------

    def save(self, iteration: int, pieces: Iterable[Piece], state: Mapping[str, Any]) -> bool:
        """Write each rank's part into its node's memory and copies of it into others'; older snapshots are then removed.

        state: rank 0's. If a part or a copy is not whole on any rank, the snapshot is given up, and the one before stays.
        """
        started = time.perf_counter()
        number = secrets.token_hex(4)
        number, state = self.all_gather_object(None if self.rank else (number, dict(state)))[0]
        save = SaveId(iteration, number)
        own = MemoryPart(self.memory, save, self.rank, self.rank)
        problems = self._together(lambda: self._write(own, pieces, state))
        if not problems and any(self.holders):
            problems = self._together(lambda: self._send_copies(save))
        if problems:
            remove_save(self.memory, save)
            self._record_failure(iteration, problems)
            return False
        for other in saves_in(self.memory) if self._is_first_of_node else ():
            if other != save:
                remove_save(self.memory, other)
        self._say(iteration, time.perf_counter() - started)
        return True

    def _write(self, part: MemoryPart, pieces: Iterable[Piece], state: Mapping[str, Any]) -> None:
        pieces = list(pieces)
        live = live_sums(pieces, on_cpu=False)  # before any copy
        with storage_errors(part.file):
            part.write(pieces, self.world.size, state, live)

    def _send_copies(self, save: SaveId) -> None:
        """Send this rank's part to its holders, receive those that it holds, and read them as they will be read.

        Raises Damaged if a copy does not have the checksums that its writer took of the live state.
        """
        own = MemoryPart(self.memory, save, self.rank, self.rank)
        sizes = self.all_gather_object([path.stat().st_size for path in (own.file, own.record_file)])
        held = [
            MemoryPart(self.memory, save, w, self.rank) for w, ranks in enumerate(self.holders) if self.rank in ranks
        ]
        files = lambda part: zip((part.file, part.record_file), sizes[part.writer])
        outgoing = [(to, path, size) for to in self.holders[self.rank] for path, size in files(own)]
        incoming = [(part.writer, path, size) for part in held for path, size in files(part)]
        problems = []
        for part in held:
            try:
                part.file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problems.append(str(error))
        problems += exchange_files(outgoing, incoming, self.world, self.device)
        if problems:
            raise StorageError(f"copies in the memory of other ranks: {problems[0]}")
        for part in held:
            part.verify()

    def _record_failure(self, iteration: int, problems: list[str]) -> None:
        self.log(f"WARNING: no snapshot of iteration {iteration} in memory, the one before is kept: {problems[0]}")
        self.events.record(
            "snapshot_failed",
            f"no snapshot of iteration {iteration} in memory: {problems[0]}",
            iteration=iteration,
            why=problems[0],
        )

    def _say(self, iteration: int, seconds: float) -> None:
        """Log the first snapshot of a launch: the others are like it."""
        if self._said:
            return
        self._said, copies = True, len(self.holders[self.rank])
        elsewhere = any(self.nodes[other] != self.nodes[self.rank] for other in self.holders[self.rank])
        where = f", and {copies} on {'other nodes' if elsewhere else 'the same node'}" if copies else ""
        self.log(
            f"  first snapshot in memory at iteration {iteration:7d}: {self.memory} ({seconds * 1e3:.0f} ms; a copy of "
            f"each rank's part{where})"
        )

    # ---- at a start ------------------------------------------------------------------------------------------------

    def find(self) -> Optional[FoundSnapshot]:
        """The newest snapshot with a whole copy of each part; None: there is none.

        Every byte of its parts was read. What is not whole is deleted, and a sentence of `notices`.
        """
        listed = (
            [(part.save, part.writer, part.holder) for part in parts_in(self.memory)] if self._is_first_of_node else []
        )
        lists = self.all_gather_object(listed)
        here = lists[self._first_of_node]
        for save in sorted({save for parts in lists for save, *_ in parts}, reverse=True):
            if self.starts.get(save.number, 0) >= STARTS:
                self.notices.append(f"{save} in memory has started this run {STARTS} times: it is passed over")
                continue
            copies = [MemoryPart(self.memory, save, writer, holder) for one, writer, holder in here if one == save]
            if found := self._judge(save, copies):
                return found
            remove_save(self.memory, save)
        return None

    def _judge(self, save: SaveId, copies: list[MemoryPart]) -> Optional[FoundSnapshot]:
        """The snapshot if it is whole. copies: those on this node"""
        neighbours = [rank for rank in range(self.world.size) if self._is_near(rank)]
        answers = self.all_gather_object(verified(copies[neighbours.index(self.rank) :: len(neighbours)]))
        records: dict[int, Mapping[str, Any]] = {}
        holders: dict[int, int] = {}  # writer -> a rank whose node has a whole copy
        for rank, (whole, problems) in enumerate(answers):
            self.notices += problems
            for part, record in whole:
                records.setdefault(part.writer, record)
                holders.setdefault(part.writer, rank)
        world = next((record["world"] for record in records.values()), 1)
        if set(records) != set(range(world)):
            missing = sorted(set(range(world)) - set(records))
            self.notices.append(
                f"{save} in memory is passed over: parts {missing[:8]} of {world} are missing or damaged"
            )
            return None
        here = [part for rank, (whole, _) in enumerate(answers) for part, _ in whole if self._is_near(rank)]
        problems = self._together(lambda: assemble(self.memory, save, records.values(), here), self._is_first_of_node)
        if problems:
            self.notices.append(problems[0])
            return None
        near, names = {part.writer for part in here}, {writer: file_name(writer) for writer in records}
        sources = {names[writer]: rank for writer, rank in holders.items() if writer not in near}
        by_file = {names[writer]: record for writer, record in records.items()}
        return FoundSnapshot(self, save, save.folder(self.memory) / LOADED, by_file, sources)

    def count_start(self, save: SaveId) -> None:
        """Record that the run starts from a snapshot, before it does: if it fails, the next start knows."""
        self.starts = {**self.starts, save.number: self.starts.get(save.number, 0) + 1}
        self._agree(lambda: None if self.rank else self._write_record(self.place, self.starts))

    def fetch(self, found: FoundSnapshot, pieces: Iterable[Piece]) -> None:
        """Get the files of other nodes that hold something of this node's pieces. Raises Damaged, on all ranks."""
        wanted = self.all_gather_object(sorted(self._needed(found, pieces)))
        first = {node: rank for rank, node in reversed(list(enumerate(self.nodes)))}
        plan = sorted({(name, first[self.nodes[rank]]) for rank, names in enumerate(wanted) for name in names})
        sources = self.all_gather_object(dict(found.sources))
        routes = [(name, sources[to][name], to) for name, to in plan]
        size = lambda name: found.records[name]["size"]
        outgoing = [(to, found.path / name, size(name)) for name, source, to in routes if source == self.rank]
        incoming = [(source, found.path / name, size(name)) for name, source, to in routes if to == self.rank]

        def receive() -> None:
            for _, path, _ in incoming:
                path.unlink(missing_ok=True)
            if problems := exchange_files(outgoing, incoming, self.world, self.device):
                raise StorageError(problems[0])
            with Reader(found.path) as reader:
                if damaged := reader.verify([path.name for _, path, _ in incoming]):
                    raise Damaged(damaged[0])

        if routes and (problems := self._together(receive)):
            raise Damaged(f"{found.save}: {problems[0]}")

    def _needed(self, found: FoundSnapshot, pieces: Iterable[Piece]) -> set[str]:
        with Reader(found.path) as reader:
            return {
                stored.file
                for piece in pieces
                if piece.name in reader.tensors
                for stored in reader.tensors[piece.name].stored
                if stored.file in found.sources and stored.box.intersection(piece.box)
            }

    def record_start(self, found: Optional[FoundSnapshot], restored: Optional[Restored]) -> None:
        """Record what was passed over in memory, and whether the run goes on from there. restored: what was loaded"""
        iteration = restored.state["iteration"] if restored and self.rank == 0 else 0
        for notice in self.notices:
            self.events.record(
                "damaged_checkpoint",
                f"{notice}; iteration {iteration} loaded",
                iteration=iteration,
                checkpoint=str(self.memory),
                why=notice,
                loaded=iteration,
            )
        if found and restored and restored.path == found.path:
            self.events.record(
                "snapshot_loaded",
                f"the run goes on from {found.save} in memory",
                iteration=iteration,
                parts=len(found.records),
                fetched=len(found.sources),
            )
        self.notices = []

    def close(self, iteration: int) -> None:
        """At an end in order after this iteration: remove the snapshots, unless the disk has none of it."""
        newest = max(checkpoints(location(self.settings.save)), default=-1) if self.rank == 0 else None
        if self.all_gather_object(newest)[0] >= iteration:
            shutil.rmtree(self.memory, ignore_errors=True)
            if self.rank == 0:
                forget_snapshots(location(self.settings.save))

    def drop(self) -> None:
        """Remove all snapshots: the run goes on from an earlier checkpoint, by its user's choice or after a spike."""
        for save in saves_in(self.memory) if self._is_first_of_node else ():
            remove_save(self.memory, save)

    # ---- inside ----------------------------------------------------------------------------------------------------

    @property
    def _first_of_node(self) -> int:
        return self.nodes.index(self.nodes[self.rank])

    @property
    def _is_first_of_node(self) -> bool:
        return self._first_of_node == self.rank

    def _is_near(self, rank: int) -> bool:
        """Whether a rank shares this one's memory."""
        return self.nodes[rank] == self.nodes[self.rank]

    def _together(self, action: Callable[[], Any], takes_part: bool = True) -> list[str]:
        """Do something on all ranks, or those that take part; the problems of all, each with its rank."""
        own_part = action if takes_part else lambda: None
        errors = Failure, OSError, MemoryError
        _, failures, _ = attempt_on_all_ranks(own_part, self.all_gather_object, errors)
        return [f"{str(failure).splitlines()[0]} (rank {rank})" for rank, failure in failures]

    def _agree(self, action: Callable[[], Any]) -> list:
        """Do something on all ranks and gather the results. Raises StorageError if it fails on any."""
        results, failures, _ = attempt_on_all_ranks(action, self.all_gather_object)
        for rank, failure in failures:
            raise StorageError(
                f"snapshots in memory cannot be kept: {failure} (rank {rank})",
                do="give another --non-persistent-local-ckpt-dir, or leave out --non-persistent-save-interval",
            )
        return results

    def _open_record(self, resumes: bool) -> tuple[str, dict[str, int]]:
        """The name of the folder in memory, and how often each snapshot has started the run."""
        record = read_record(location(self.settings.save)) if resumes else None
        if record is None:
            record = secrets.token_hex(6), {}
            self._write_record(*record)
        return record

    def _write_record(self, place: str, starts: Mapping[str, int]) -> None:
        folder = location(self.settings.save)
        with storage_errors(folder):
            if not isinstance(folder, UrlPath):
                folder.mkdir(parents=True, exist_ok=True)
            backend_of(folder).replace(folder / SNAPSHOTS, seal(dict(memory=place, starts=dict(starts)))[1])

    def _open_memory(self) -> str:
        """Create the folder in memory. Returns the number of its node, which all ranks that see this folder read."""
        remove_orphans(self.memory.parent)
        self.memory.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = self.memory / _OWNER
        if not isinstance(location(self.settings.save), UrlPath) and not owner.exists():
            owner.write_text(json.dumps(dict(save=os.path.realpath(self.settings.save))) + "\n")
        mine = self.memory / f".{_NODE}-{self.rank}-{secrets.token_hex(4)}"
        mine.write_text(secrets.token_hex(8))
        try:
            os.link(mine, self.memory / _NODE)
        except FileExistsError:
            pass
        finally:
            mine.unlink()
        return (self.memory / _NODE).read_text()


def read_record(save: CheckpointPath) -> Optional[tuple[str, dict[str, int]]]:
    """(name of the folder in memory, number of a save -> starts from it) of a run; None if it has no snapshots."""
    try:
        _, record = read_sealed(save / SNAPSHOTS)
        place, starts = record["memory"], record["starts"]
    except (Damaged, OSError, KeyError):
        return None
    good = isinstance(place, str) and place.isalnum() and isinstance(starts, dict)
    return (place, {str(number): int(count) for number, count in starts.items()}) if good else None


def verified(parts: Iterable[MemoryPart]) -> tuple[list[tuple[MemoryPart, dict]], list[str]]:
    """The parts that are whole, with their records, and what is wrong with the others. Damaged ones are deleted."""
    whole, problems = [], []
    for part in parts:
        try:
            whole.append((part, part.verify()))
        except (Failure, OSError) as problem:
            problems.append(str(problem))
            if isinstance(problem, Damaged):  # and not a lack of handles or memory
                with contextlib.suppress(OSError):
                    part.remove()
    return whole, problems


def forget_snapshots(save: CheckpointPath) -> None:
    """Let later launches of a run find none of its snapshots: this one goes on without."""
    with contextlib.suppress(Failure, OSError):
        if (save / SNAPSHOTS).exists():
            (save / SNAPSHOTS).unlink()


def remove_orphans(memory: Path) -> None:
    """Remove folders in this node's memory whose run has a folder of another name by now, or none."""
    for folder in memory.glob(f"{SNAPSHOT_FOLDER}*"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            save = Path(json.loads((folder / _OWNER).read_text())["save"])
            record = read_record(save)
            gone = save.parent.is_dir() and not (save / SNAPSHOTS).exists()
            if gone or record and folder.name != SNAPSHOT_FOLDER + record[0]:
                shutil.rmtree(folder, ignore_errors=True)
