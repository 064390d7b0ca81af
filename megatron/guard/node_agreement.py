# SPDX-License-Identifier: Apache-2.0
"""Supervisors of several nodes agree on which of them takes part in the next attempt of a job. Needs no torch.

    agreement = NodeAgreement(folder, number=3, wanted=4, usable=lambda count: 0, timeout=60, patience=1800)
    place = agreement.meet()       # NodePlace(rank=3, nodes=4, address="10.0.0.5", ...), when the nodes are there
    agreement.lost()               # during the attempt: "" or why it cannot go on
    agreement.leave("finished", 0)

Each keeps a file in a folder that all see, and rewrites its time every `LOOK` seconds. Those who wait are the nodes of the
next attempt, or its spares; the one with the lowest number writes down who has which place, and the first such file of a
number counts (a link is made once). So any node may die, the first one too.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import PeerLost, node_name
from megatron.guard.beat_files import LOOK, seconds_since_written
from megatron.telemetry.figures import several

POLL = 0.2
FORGOTTEN = 3600.0  # seconds after which the file of a supervisor that has ended is removed, at least
FIRST_NOTE, NOTES = 5.0, 30.0  # seconds until the first line about what is waited for, and between two


@dataclass(frozen=True)
class Member:
    """The supervisor of a node, as its file says.

    number:   the node's --node-rank: an order, no more
    waits:    for the agreement of this number; None: it takes part in an attempt
    excluded: names of nodes that it knows to be bad
    left:     how it ended; `code` is its exit code, `alone` whether the others go on
    """

    id: str
    name: str
    number: int
    address: str
    began: float  # Unix seconds
    waits: Optional[int] = None
    excluded: tuple[str, ...] = ()
    left: str = ""
    code: int = 0
    alone: bool = False


@dataclass(frozen=True)
class AttemptNodes:
    """Who takes part in an attempt: (id, name, address, number) of its nodes, by node rank."""

    number: int = 0
    nodes: tuple[tuple[str, str, str, int], ...] = ()
    why: str = ""  # what is otherwise than in the one before
    gone: tuple[str, ...] = ()  # names of nodes that were in the one before

    def place_of(self, member: Member) -> Optional[int]:
        """The place of a supervisor, or of the one before it on the same node."""
        ids, names = [node[0] for node in self.nodes], [node[1] for node in self.nodes]
        return ids.index(member.id) if member.id in ids else names.index(member.name) if member.name in names else None


class NodePlace(NamedTuple):
    """A node's place in an attempt."""

    rank: int
    nodes: int
    address: str  # of the first node
    is_first: bool  # the address is that of the node with the number 0
    change: str
    gone: tuple[str, ...]


def decide(
    ready: Sequence[Member],
    before: AttemptNodes,
    wanted: int,
    usable: Callable[[int], int] = lambda count: 0,
    may_shrink: bool = False,
) -> Optional[list[Member]]:
    """The nodes of the next attempt by node rank; None if there are too few.

    ready:      those that wait for it, without bad ones
    usable:     count of nodes -> how many of them the job can run on; 0: it cannot
    may_shrink: whether it may be fewer than `wanted`

    Who was there keeps its place, and others fill the gaps, the lowest numbers first.

    >>> a, b, c, d = (Member(name, name, number, name, 0.0) for number, name in enumerate("abcd"))
    >>> before = AttemptNodes(1, (("a", "a", "a", 0), ("b", "b", "b", 1), ("c", "c", "c", 2)))
    >>> [node.name for node in decide([d, c, a], before, 3)]
    ['a', 'd', 'c']
    >>> [node.name for node in decide([c, a], before, 3, lambda count: count, may_shrink=True)]
    ['a', 'c']
    """
    nodes = wanted if len(ready) >= wanted else usable(len(ready)) if may_shrink else 0
    if not nodes:
        return None
    ready = sorted(ready, key=lambda member: (member.number, member.began, member.id))
    places: dict[int, Member] = {}
    for member in sorted(ready, key=lambda member: -member.began):  # of two of one node the later one
        place = before.place_of(member)
        if place is not None and place not in places:
            places[place] = member
    kept = {place: member for place, member in places.items() if place < nodes} if len(before.nodes) == nodes else {}
    known = [member for _, member in sorted(places.items()) if member not in kept.values()]
    others = iter([*known, *(member for member in ready if member not in places.values())])
    return [kept.get(place) or next(others) for place in range(nodes)]


@dataclass
class Sight:
    """When a member's file was written, and when that was seen (monotonic)."""

    written: int
    at: float


@dataclass
class NodeAgreement:
    """The supervisor of this node among those of the others.

    folder:   of the job, which all nodes see
    number:   --node-rank of this node
    wanted:   nodes of the job; usable: count of nodes -> how many of them it can run on, where there are fewer
    timeout:  seconds without a sign of a supervisor after which its node is lost
    patience: seconds to wait for enough nodes
    """

    folder: Path
    number: int
    wanted: int
    usable: Callable[[int], int]
    timeout: float
    patience: float
    log: Callable[[str], None] = print
    name: str = field(default_factory=node_name)
    address: Callable[[], str] = socket.gethostname
    agreed: AttemptNodes = field(default_factory=AttemptNodes)  # the last one known here
    excluded: tuple[str, ...] = ()
    outcome: tuple[str, int] = ("", 0)  # of the job, if others have ended it

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.own = Member(str(uuid.uuid4()), self.name, self.number, self.address(), time.time())
        self.path = self._path_of(self.own.id)
        self.seen: dict[str, Sight] = {}
        self.over, self.said, self.next_note, self.next_look = threading.Event(), "", 0.0, 0.0
        self.agreed = self._newest()
        members = self._members()
        self.former = {member.id for member in members if member.left}
        for member in members:
            if self._silence(member) > max(FORGOTTEN, 10 * self.timeout):
                self._path_of(member.id).unlink(missing_ok=True)
        self.thread: Optional[threading.Thread] = None

    # ---- the whole job ---------------------------------------------------------------------------------------------

    def meet(self, stopped: Callable[[], object] = lambda: None) -> Optional[NodePlace]:
        """Wait until the nodes of an attempt are there, this one among them.

        Returns None if the job has ended meanwhile (`outcome`), or `stopped` says so. Raises PeerLost if too few come.
        """
        began, self.said, self.next_note = time.monotonic(), "", time.monotonic() + FIRST_NOTE
        self._show(waits=self.agreed.number + 1)
        while not stopped():
            if (place := self._place_in(self._newest())) is not None:
                return place
            members = self._members()
            if self._has_ended(members):
                return None
            waited = time.monotonic() - began
            ready, runs = self._ready(members), self._runs(members)
            chooses = bool(ready) and ready[0].id == self.own.id
            if chooses and not runs and (chosen := self._choice(ready, waited)) is not None:
                self._write(chosen)
                continue
            self._note(ready, runs)
            # The one who chooses may take fewer nodes just now, so the others give up later.
            if waited > self.patience + self.timeout * (not chooses) and not runs:
                here = ", ".join(member.name for member in ready)
                raise PeerLost(
                    f"{several(self.wanted, 'node')} wanted, and after {self.patience:.0f} s there are: {here}",
                    None,
                    "start the same command on the others, with the same --heartbeat-dir; --min-nodes goes on with fewer",
                )
            time.sleep(POLL * (1 + len(members) / 8))
        return None

    def lost(self) -> str:
        """Why the present attempt cannot go on, "" if it can: a node of it has no supervisor any more, or another one.

        Looks at most four times within `timeout`: all nodes look at the files of all.
        """
        if time.monotonic() < self.next_look:
            return ""
        self.next_look = time.monotonic() + self.timeout / 4
        if self._newest().number > self.agreed.number:
            return "the others gave this node up, and went on without it"
        members = {member.id: member for member in self._members()}
        for rank, (one, name, _, _) in enumerate(self.agreed.nodes):
            member = members.get(one)
            if member is None or one == self.own.id or member.left:
                continue
            if self._is_silent(member):
                return f"node {rank} ({name}): its supervisor gave no sign for {self._silence(member):.0f} s"
            if self._is_followed(member, members.values()):
                return f"node {rank} ({name}): it was started again"
        return ""

    def leave(self, outcome: str, code: int, alone: bool = False) -> None:
        """Tell the others how this supervisor ends. alone: they go on without its node"""
        self.over.set()
        if self.thread is not None:
            self.thread.join(LOOK)
            self._show(left=outcome, code=code, alone=alone)

    # ---- who is there ----------------------------------------------------------------------------------------------

    def _members(self) -> list[Member]:
        found = []
        for path in sorted(self.folder.glob("supervisor_*.json")):
            with suppress(OSError, ValueError, TypeError):
                with path.open("rb") as file:
                    written, record = os.fstat(file.fileno()).st_mtime_ns, json.load(file)
                member = Member(**record | dict(excluded=tuple(record["excluded"])))
                if member.id not in self.seen:
                    self.seen[member.id] = Sight(written, time.monotonic() - seconds_since_written(path))
                elif self.seen[member.id].written != written:
                    self.seen[member.id] = Sight(written, time.monotonic())
                found.append(member)
        return found

    def _silence(self, member: Member) -> float:
        return time.monotonic() - self.seen[member.id].at

    def _is_silent(self, member: Member) -> bool:
        return member.id != self.own.id and self._silence(member) > self.timeout

    def _is_followed(self, member: Member, members) -> bool:
        """Whether a later supervisor of the same node is there."""
        later = [one for one in members if one.name == member.name and one.began > member.began and not one.left]
        return any(not self._is_silent(one) for one in later)

    def _alive(self, members: Sequence[Member]) -> list[Member]:
        present = [member for member in members if not member.left and not self._is_silent(member)]
        return [member for member in present if not self._is_followed(member, members)]

    def _ready(self, members: Sequence[Member]) -> list[Member]:
        """Those who wait for the next agreement."""
        alive = self._alive(members)
        bad = {name for member in alive for name in member.excluded}
        ready = [member for member in alive if member.waits == self.agreed.number + 1 and member.name not in bad]
        return sorted(ready, key=lambda member: (member.number, member.id))

    def _runs(self, members: Sequence[Member]) -> list[str]:
        """Names of the nodes of the last agreement whose supervisors have not come out of its attempt yet."""
        alive = {member.id: member for member in self._alive(members)}
        ids = [node[0] for node in self.agreed.nodes]
        return [alive[one].name for one in ids if one in alive and alive[one].waits != self.agreed.number + 1]

    def _has_ended(self, members: Sequence[Member]) -> bool:
        """Whether a node of the last agreement has ended the job."""
        ids = [node[0] for node in self.agreed.nodes]
        for member in members:
            if member.left and member.id in ids and member.id not in self.former and not member.alone:
                self.outcome = f"{member.name}: {member.left}", member.code
                return True
        return False

    # ---- agreements ------------------------------------------------------------------------------------------------

    def _choice(self, ready: Sequence[Member], waited: float) -> Optional[list[Member]]:
        """The nodes of the next attempt, which this one chooses from those that are ready, if there are enough.

        waited: seconds
        """
        goes_on = self._continues(ready)
        all_first = {member.number for member in ready}.issuperset(range(self.wanted))
        if not goes_on and not all_first and waited < self.timeout:  # spares may be faster
            return None
        before = self.agreed if goes_on else AttemptNodes()  # what lies there may be of another job
        return decide(ready, before, self.wanted, self.usable, goes_on or waited > self.patience)

    def _write(self, chosen: list[Member]) -> None:
        """Write the next agreement, unless another node was faster."""
        before, number = self.agreed, self.agreed.number + 1
        names = [node[1] for node in before.nodes]
        new = [member.name for member in chosen if member.name not in names]
        gone = [name for name in names if name not in {member.name for member in chosen}]
        gone = gone if self._continues(chosen) else []
        change = [f"without {', '.join(gone)}"] * bool(gone)
        change += [f"with {', '.join(new)}"] * bool(new and change)
        change += [f"on {several(len(chosen), 'node')}"] * (len(chosen) != len(names) and bool(change))
        nodes = [(member.id, member.name, member.address, member.number) for member in chosen]
        text = json.dumps(dict(number=number, nodes=nodes, why=", ".join(change), gone=gone))
        aside = self.folder / f".agreement.{self.own.id}"
        aside.write_text(text + "\n", encoding="utf-8")
        with suppress(FileExistsError):
            os.link(aside, self.folder / f"agreement_{number:06d}.json")
        aside.unlink()
        for path in sorted(self.folder.glob("agreement_*.json"))[:-2]:
            path.unlink(missing_ok=True)

    def _continues(self, chosen: Sequence[Member]) -> bool:
        ids = {node[0] for node in self.agreed.nodes}
        return any(member.id in ids for member in chosen)

    def _newest(self) -> AttemptNodes:
        """The last agreement in the folder."""
        for path in sorted(self.folder.glob("agreement_*.json"), reverse=True):
            with suppress(OSError, ValueError, TypeError):
                record = json.loads(path.read_bytes())
                return AttemptNodes(
                    **record | dict(nodes=tuple(map(tuple, record["nodes"])), gone=tuple(record["gone"]))
                )
        return AttemptNodes()

    def _place_in(self, newest: AttemptNodes) -> Optional[NodePlace]:
        """This node's place in a new agreement; waits for the next one without one."""
        if newest.number <= self.agreed.number:
            return None
        self.agreed = newest
        ids = [node[0] for node in newest.nodes]
        if self.own.id not in ids:
            self._show(waits=newest.number + 1)
            return None
        self._show(waits=None)
        _, _, address, number = newest.nodes[0]
        return NodePlace(ids.index(self.own.id), len(ids), address, number == 0, newest.why, newest.gone)

    # ---- this node's file ------------------------------------------------------------------------------------------

    def _path_of(self, one: str) -> Path:
        return self.folder / f"supervisor_{one}.json"

    def _show(self, **changes) -> None:
        """Write this node's file in one piece."""
        self.own = replace(self.own, address=self.address(), excluded=tuple(self.excluded), **changes)
        aside = self.folder / f".supervisor.{self.own.id}"
        aside.write_text(json.dumps(asdict(self.own)) + "\n", encoding="utf-8")
        os.replace(aside, self.path)
        if self.thread is None:
            self.thread = threading.Thread(target=self._refresh, name="agreement", daemon=True)
            self.thread.start()

    def _refresh(self) -> None:
        while not self.over.wait(LOOK):
            with suppress(OSError):  # the folder does not answer: the others wait for `timeout`
                os.utime(self.path)

    def _note(self, ready: Sequence[Member], runs: Sequence[str]) -> None:
        """From time to time, say what is waited for. runs: names of the nodes that are at work"""
        if time.monotonic() < self.next_note:
            return
        self.next_note = time.monotonic() + NOTES
        text = f"waiting for {several(self.wanted - len(ready), 'node')} of {self.wanted}"
        if runs:
            ids = [node[0] for node in self.agreed.nodes]
            role = "waiting" if self.own.id in ids else "waiting as a spare"
            text = f"{role}: {', '.join(runs[:4])}{', ...' * (len(runs) > 4)} are at work"
        if text != self.said:
            self.log(f"{text}; here: {', '.join(member.name for member in ready[:8])}")
            self.said = text


def own_address(other: str, port: int = 1) -> str:
    """The address of this machine as one that reaches `other` sees it; its name if that is not known here."""
    with suppress(OSError):
        kind, _, _, _, place = socket.getaddrinfo(other, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as asked:
            asked.connect(place)
            return asked.getsockname()[0]
    return socket.gethostname()
