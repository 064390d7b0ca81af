# SPDX-License-Identifier: Apache-2.0
"""Which collective a job hangs in, and which ranks have not come to it, from the dumps of torch's flight recorder.

torch keeps the last collectives and messages of each rank in a ring. A rank dumps it (a pickle of numbers and texts) when a
timeout of NCCL expires, and when the supervisor asks for it: to DIR/nccl_trace_rank_N, which torch's own
`python -m torch.distributed.flight_recorder.fr_trace DIR` reads too. Here the pickles are read without running anything.

    for line in explain_dumps(read_dumps(Path("runs/a/supervise/flight_recorder"))): print(line)
    all_reduce 52 of dp group 1: ranks 0-2 wait, rank 3 has not come (its last one there was all_gather 51)
"""

import io
import json
import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.guard.stacks import spans
from megatron.settings.schema import Guard

PREFIX = "nccl_trace_rank_"  # of torch's dumps
FEW = 12  # lines of an explanation


class RecordedCall(NamedTuple):
    """A collective, or a message, that a rank has started. number: of its kind, in its group; purpose: of the group"""

    group: str
    purpose: str
    number: int
    name: str  # all_reduce, or "recv 1<-0"
    is_message: bool
    waits: bool  # it has not ended
    sizes: str


class Dump(NamedTuple):
    """What a rank's recorder remembers. groups: name -> (description, global ranks)"""

    calls: list[RecordedCall]
    groups: dict[str, tuple[str, tuple[int, ...]]]


# ---- on a rank -------------------------------------------------------------------------------------------------------


def switch_on(settings: Guard) -> bool:
    """Set torch's variables for `--flight-recorder-dump-path`, where the user has not; before the ranks join."""
    if settings.flight_recorder_dump_path is None:
        return False
    size, prefix = settings.flight_recorder_trace_buffer_size, Path(settings.flight_recorder_dump_path) / PREFIX
    prefix.parent.mkdir(parents=True, exist_ok=True)
    for name, earlier, value in (  # torch warns of earlier names
        ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", size),
        ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", prefix),
    ):
        if earlier not in os.environ:
            os.environ.setdefault(name, str(value))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    return True


def dump(folder: str, rank: int) -> Optional[Path]:
    """Write what this rank's recorder remembers; None if torch was not loaded yet, or has none."""
    c10d = sys.modules.get("torch._C._distributed_c10d")  # not imported: supervisors read dumps without torch
    if c10d is None:
        return None
    path = Path(folder) / f"{PREFIX}{rank}"
    of_torch = c10d._dump_nccl_trace if hasattr(c10d, "_dump_nccl_trace") else c10d._dump_fr_trace
    recorded = of_torch(True, False, False)  # without stacks: their symbols take seconds, and ranks write them apart
    aside = path.with_name(f".{path.name}")
    aside.write_bytes(recorded)
    os.replace(aside, path)
    return path


# ---- reading ---------------------------------------------------------------------------------------------------------


class _Plain(pickle.Unpickler):
    """Reads numbers, texts and containers, and refuses everything that would call a function."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name} in a dump")


def read_dumps(folder: Path) -> dict[int, Dump]:
    """Rank -> its dump, for all that can be read."""
    found = {}
    for path in sorted(Path(folder).glob(f"{PREFIX}*")):
        rank = path.name.removeprefix(PREFIX)
        if rank.isdecimal() and (read := read_dump(path)) is not None:
            found[int(rank)] = read
    return found


def read_dump(path: Path) -> Optional[Dump]:
    """A rank's dump, in torch's pickle or as JSON; None if it is neither."""
    try:
        raw = path.read_bytes()
        content = json.loads(raw) if raw[:1] == b"{" else _Plain(io.BytesIO(raw)).load()
        groups = {str(name): _group(config) for name, config in content.get("pg_config", {}).items()}
        return Dump([_call(entry) for entry in content.get("entries", ())], groups)
    except (OSError, pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, EOFError):
        return None


def _group(config: Mapping) -> tuple[str, tuple[int, ...]]:
    ranks = config.get("ranks", "")
    numbers = re.findall(r"\d+", ranks) if isinstance(ranks, str) else ranks
    return str(config.get("desc") or ""), tuple(map(int, numbers))


def _call(entry: Mapping) -> RecordedCall:
    group, message = entry["process_group"], bool(entry.get("is_p2p"))
    number = entry.get("p2p_seq_id" if message else "collective_seq_id", entry.get("seq_id", 0))
    ended = bool(entry.get("retired")) or entry.get("state") == "completed"
    name = str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])
    return RecordedCall(
        str(group[0]), str(group[1]), int(number), name, message, not ended, str(entry.get("input_sizes", ""))
    )


# ---- the explanation -------------------------------------------------------------------------------------------------


def explain_dumps(dumps: Mapping[int, Dump]) -> list[str]:
    """A line for each call that ranks wait in: who waits, who has not come, whose calls differ."""
    # The first call of each group with each number.
    waiting: dict[tuple[str, int], dict[int, RecordedCall]] = defaultdict(dict)
    messages: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, one in dumps.items():
        for call in one.calls:
            if call.waits and call.is_message:
                messages[call.group, call.name].add(rank)
            elif call.waits:
                waiting[call.group, call.number].setdefault(rank, call)
    first: dict[str, int] = {}
    for group, number in waiting:
        first[group] = min(first.get(group, number), number)
    lines = [_collective(group, number, waiting[group, number], dumps) for group, number in sorted(first.items())]
    lines.sort(key=lambda line: " has not come" not in line and " have not come" not in line and "differ" not in line)
    lines += [
        f"{_those(ranks)} in {name} of {_name_of(group, dumps)}" for (group, name), ranks in sorted(messages.items())
    ]
    idle = [rank for rank, one in sorted(dumps.items()) if not any(call.waits for call in one.calls)]
    if lines and idle:
        lines.insert(0, f"{_ranks(idle)} {'waits' if len(idle) == 1 else 'wait'} in no collective")
    return [*lines[:FEW], *[f"... and {len(lines) - FEW} more"] * (len(lines) > FEW)]


def _collective(group: str, number: int, waiting: Mapping[int, RecordedCall], dumps: Mapping[int, Dump]) -> str:
    members = _members(group, dumps) or tuple(waiting)
    absent = [rank for rank in members if rank not in waiting and not _has_called(dumps.get(rank), group, number)]
    calls = sorted({(call.name, call.sizes) for call in waiting.values()})
    what = " or ".join(dict.fromkeys(name for name, _ in calls))
    line = f"{what} {number} of {_name_of(group, dumps)}: {_those(waiting)}"
    if absent:
        verb = "has" if len(absent) == 1 else "have"
        line += f", {_ranks(absent)} {verb} not come{_last_call(absent, group, dumps)}"
    if len(calls) > 1:
        ranks = defaultdict(list)
        for rank, call in sorted(waiting.items()):
            ranks[f"{call.name} {call.sizes}"].append(rank)
        line += f"; their calls differ: {', '.join(f'{words} on {_ranks(own)}' for words, own in ranks.items())}"
    return line


def _has_called(one: Optional[Dump], group: str, number: int) -> bool:
    """Whether a rank has made a call of a group with this number, or a later one."""
    return one is not None and any(c.group == group and not c.is_message and c.number >= number for c in one.calls)


def _last_call(absent: list[int], group: str, dumps: Mapping[int, Dump]) -> str:
    if len(absent) > 1:
        return ""
    if absent[0] not in dumps:
        return " (it has left no dump)"
    calls = [call for call in dumps[absent[0]].calls if call.group == group and not call.is_message]
    return f" (its last one there was {calls[-1].name} {calls[-1].number})" if calls else " (it made none there)"


def _members(group: str, dumps: Mapping[int, Dump]) -> tuple[int, ...]:
    """The ranks of a group; gloo records none, but all of its ranks have met when they created it."""
    known = max((one.groups.get(group, ("", ()))[1] for one in dumps.values()), key=len, default=())
    return known or tuple(rank for rank, one in dumps.items() if any(call.group == group for call in one.calls))


def _name_of(group: str, dumps: Mapping[int, Dump]) -> str:
    names = [one.groups[group][0] for one in dumps.values() if group in one.groups]
    names += [call.purpose for one in dumps.values() for call in one.calls if call.group == group]
    name = next((name for name in names if name not in ("", "undefined", "default_pg")), "")
    members = _members(group, dumps)
    return name or (f"the group of {_ranks(members)}" if members else f"group {group}")


def _ranks(ranks: Iterable[int]) -> str:
    ranks = sorted(ranks)
    return f"rank{'s' * (len(ranks) != 1)} {spans(ranks)}"


def _those(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return f"{_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"
