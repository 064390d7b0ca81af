# SPDX-License-Identifier: Apache-2.0
"""Compare two computations of one training step, and say which rank computed something else. Pure; needs no torch.

A `StepRecord` has a checksum of everything that a rank computed for others, sent to them and received from them in a step,
in its order. Where two records of a rank part is where its fault shows:

    >>> gradient, arrived = TrafficEntry("computed", "blocks.0", ""), TrafficEntry("received", "all-reduce", "tp")
    >>> first = StepRecord([arrived, gradient], [5, 7])
    >>> first_difference(first, StepRecord([arrived, gradient], [5, 8])).entry.what    # the same came in: it is this rank
    'blocks.0'
    >>> first_difference(first, StepRecord([arrived, gradient], [6, 8])).blames        # something else came in
    False

In a step that is repeated on the same rank all entries are compared. If another rank of the data parallel axis repeats it,
those that depend on further samples are left out: what data parallel ranks receive, and what follows the reductions.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional

COMPUTED, SENT, RECEIVED = "computed", "sent", "received"
LOSSES = "losses"  # the entry between the passes of a step and the reductions that follow them
# Axes whose ranks have other samples.
DATA_AXES = ("replicate", "shard", "dp", "dp_cp", "expert_replicate", "expert_shard", "expert_dp", "world")
MEMORY = "changed while nothing wrote to it"  # of a rank whose memory is not what it was: its node has to do so again
WORDS = {"F": "activations", "B": "gradients of activations"}  # of messages between pipeline stages


class TrafficEntry(NamedTuple):
    """What a checksum is of. way: computed, sent, received; what: a name, or a kind of message; axis: of the mesh"""

    way: str
    what: str
    axis: str

    def __str__(self) -> str:
        what = WORDS.get(self.what, self.what)
        if self.way == COMPUTED:
            return what if what in (LOSSES, "samples", "gradients") else f"gradients of {what}"
        between = "stages" if self.what in WORDS else self.axis
        return f"{what} {'from' if self.way == RECEIVED else 'to'} other {'ranks of ' * (between != 'stages')}{between}"


class StepDifference(NamedTuple):
    """The first entry in which two records of a step differ. at: its number"""

    entry: TrafficEntry
    at: int
    alike: bool = True  # whether both have the same entries up to here

    @property
    def blames(self) -> bool:
        """Whether the rank computed or sent something else although all that it received was the same."""
        return self.entry.way != RECEIVED


class StepRecord(NamedTuple):
    """The checksums of a step on one rank."""

    entries: Sequence[TrafficEntry]
    sums: Sequence[int]

    def local(self) -> "StepRecord":
        """Those that depend on this rank's samples, and not on those of data parallel ranks."""
        chosen, reducing = [], False
        for entry, checksum in zip(self.entries, self.sums, strict=True):
            reducing |= entry.what == LOSSES
            if entry.way == COMPUTED or not reducing and entry.axis not in DATA_AXES:
                chosen.append((entry, checksum))
        return StepRecord([entry for entry, _ in chosen], [checksum for _, checksum in chosen])


def first_difference(one: StepRecord, other: StepRecord) -> Optional[StepDifference]:
    """Where two records of the same work part; None if they are equal."""
    for at, (a, b) in enumerate(zip(zip(*one), zip(*other))):
        if a != b:
            return StepDifference(a[0], at, a[0] == b[0])
    if len(one.entries) == len(other.entries):
        return None
    longer = max(one.entries, other.entries, key=len)
    at = min(len(one.entries), len(other.entries))
    return StepDifference(longer[at], at, False)


class RankDifference(NamedTuple):
    """A difference between what a rank computed and what it, or another one, computed of the same samples."""

    rank: int
    host: str
    difference: StepDifference
    other: Optional[int] = None  # the rank that computed the same; None: this one, again
    other_host: str = ""

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {self.host}"


def blamed(found: Iterable[RankDifference]) -> list[RankDifference]:
    """Those of ranks that computed something else; if there are none, the first to whom a message came otherwise.

    Ranks hand on what came to them: the others have heard it later, as their records have it.
    """
    found = list(found)
    first = min((one.difference.at for one in found), default=0)
    return [one for one in found if one.difference.blames] or [one for one in found if one.difference.at == first]


def suspects(found: Sequence[RankDifference]) -> list[tuple[int, str]]:
    """(rank, host) of the ranks of which one computes wrongly, if pairs of ranks disagree about the same samples.

    A rank that is part of each pair is the one; with two ranks it stays open which.

    >>> found = StepDifference(TrafficEntry("sent", "F", "pp"), 3)
    >>> suspects([RankDifference(0, "a", found, 2, "b"), RankDifference(4, "c", found, 0, "a")])
    [(0, 'a')]
    >>> suspects([RankDifference(0, "a", found, 2, "b"), RankDifference(2, "b", found, 0, "a")])
    [(0, 'a'), (2, 'b')]
    """
    pairs = [{(one.rank, one.host), (one.other, one.other_host)} for one in found]
    common = set.intersection(*pairs)
    return sorted(common or set.union(*pairs))


def shift_of(dp: int, dense: int, experts: int) -> Optional[int]:
    """By how many places samples move along the data parallel axis so that another rank has them, and ranks that exchange
    activations still have those of each other; None: no other ranks can have them.

    dense, experts: numbers of neighbouring ranks that share samples (tp x cp), and that exchange tokens of experts (ep x
    etp), which may have several data parallel ranks

    >>> shift_of(2, 1, 1), shift_of(4, 2, 4), shift_of(2, 1, 2)
    (1, 2, None)
    """
    if max(dense, experts) % min(dense, experts):
        return None
    places = max(1, experts // dense)
    return places if dp % places == 0 and dp > places else None


def named_ranks(text: str) -> list[tuple[int, str]]:
    """The (rank, host) pairs that the message of a `SilentError` blames.

    >>> named_ranks("iteration 3: rank 5 on n2 computes other bits than other ranks do")
    [(5, 'n2')]
    """
    return [(int(rank), host.rstrip(",:;")) for rank, host in re.findall(r"\brank (\d+) on (\S+)", text)]
