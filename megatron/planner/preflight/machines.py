# SPDX-License-Identifier: Apache-2.0
"""The machines of a job that was started on them: are they alike, do they see the data, is one of them slow?

Every rank says what it is (`facts`), everybody hears it, and the odd ones are named: those whose versions, code, settings
or files are not those of most ranks, whose clock is ahead or behind, or that need more than 20 % longer than the median
for a product of matrices or for an all-reduce inside their node.
"""

import hashlib
import os
import platform
import shutil
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.mpu import collectives
from megatron.mpu.groups import new_group
from megatron.mpu.initialize import RankContext
from megatron.mpu.mesh import Axis
from megatron.planner.preflight.verdict import Check
from megatron.settings import schema
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.run_record import library_versions

CLOCKS = 1.0  # seconds that clocks may differ: logs, heartbeats and checkpoints of several nodes are compared by time
SLOW = 1.2  # times the median
ROOT = Path(__file__).resolve().parents[3]


class MachineFacts(NamedTuple):
    """What a rank says of itself; each dict is to be the same on all ranks.

    node:      (number of the node, name of its host)
    versions:  of Python, torch, CUDA, NCCL, driver and libraries, and the device's name
    files:     path -> bytes, None where there is no such file
    """

    node: tuple[str, str]
    versions: dict[str, str]
    code: dict[str, str]
    settings: dict[str, str]
    files: dict[str, int | None]
    free: int | None = None  # bytes on the disk of --save


def check_machines(config: schema.Config, context: RankContext, checkpoint_bytes: float) -> Iterator[Check]:
    """All ranks together, with the same result on each."""
    world, save = context.mesh.world, config.checkpoint.save
    own = MachineFacts(
        node_of(),
        versions(context.device),
        code_hashes(),
        settings_of(config),
        file_sizes(config),
        free_bytes(save) if save and not isinstance(location(save), UrlPath) else None,
    )
    ranks: list[MachineFacts] = collectives.all_gather_object(own, world)
    nodes = [facts.node for facts in ranks]
    yield Check(
        "ranks",
        f"{len(ranks)} ranks on {len(set(nodes))} node(s): "
        + ", ".join(f"{host} {number}" for (_, host), number in list(Counter(nodes).items())[:8]),
        uneven_nodes(nodes),
        "start the same number of processes on every node",
    )
    yield alike("versions", ranks, "versions", "install the same everywhere")
    yield alike("code", ranks, "code", "copy the same code to every node, or use one shared folder")
    yield alike("command", ranks, "settings", "start every rank with the same command line")
    yield check_files(ranks)
    if own.free is not None:
        least, needed = min(facts.free for facts in ranks) / 1e9, checkpoint_bytes / 1e9
        fault = f"--save {save} has {least:,.1f} GB free, and a checkpoint takes {needed:,.1f} GB"
        yield Check(
            "disk",
            f"{least:,.1f} GB free for checkpoints of {needed:,.1f} GB",
            fault if least < needed else "",
            "free some, or give another folder",
        )
    yield check_clocks(clock_offsets(context), nodes)
    seconds = gemm_seconds(context.device)
    yield compared(
        "gemm",
        gather_numbers(seconds, context),
        lambda odd: describe_ranks(odd, nodes),
        "products of matrices",
        "drain that node, or see what else runs on it",
    )
    yield check_all_reduce(context, nodes)


# ---- what a rank is --------------------------------------------------------------------------------------------------


def node_of() -> tuple[str, str]:
    """This rank's node as its launcher numbers it, and its name."""
    number = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK") or ""
    return number, os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def versions(device: torch.device) -> dict[str, str]:
    """Versions of everything that two ranks have to have in common."""
    found = dict(python=platform.python_version(), **{k: v for k, v in library_versions().items() if k != "python"})
    found["torch"] = torch.__version__
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["driver"] = driver()
    return found


def driver() -> str:
    """Version of NVIDIA's driver, as the kernel says it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def code_hashes() -> dict[str, str]:
    """File of this program -> hash of it."""
    paths = [*sorted((ROOT / "megatron").rglob("*.py")), *sorted(ROOT.glob("*.py"))]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def settings_of(config: schema.Config) -> dict[str, str]:
    """The settings that are not at their defaults."""
    return {
        f"--{f.name.replace('_', '-')}": str(value)
        for group in config.groups.values()
        for f in fields(group)
        if (value := getattr(group, f.name)) != f.default
    }


def file_sizes(config: schema.Config) -> dict[str, int | None]:
    """Bytes of each file that the settings name."""
    from megatron.planner.problems import named_files

    found = {}
    for _, path in named_files(config):
        try:
            found[path] = location(path).stat().st_size
        except OSError:
            found[path] = None
    return found


def free_bytes(folder: str) -> int:
    """Of the disk that a folder lies on, or will."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


# ---- comparing -------------------------------------------------------------------------------------------------------


def describe_ranks(ranks: Sequence[int], nodes: Sequence[tuple[str, str]]) -> str:
    """The ranks in words: by their nodes where all ranks of these are meant.

    >>> describe_ranks([2, 3], [("0", "a"), ("0", "a"), ("1", "b"), ("1", "b")]), describe_ranks([1], [("", "a")] * 2)
    ('node b (ranks 2, 3)', 'rank 1 on a')
    """
    words = []
    for node in dict.fromkeys(nodes[rank] for rank in ranks):
        mine = [rank for rank in ranks if nodes[rank] == node]
        told = f"rank{'s' * (len(mine) > 1)} " + ", ".join(map(str, mine[:4])) + ", ..." * (len(mine) > 4)
        whole = len(mine) == nodes.count(node) and len(set(nodes)) > 1
        words.append(f"node {node[1]} ({told})" if whole else f"{told} on {node[1]}")
    return "; ".join(words[:4]) + f" and {len(words) - 4} more nodes" * (len(words) > 4)


def uneven_nodes(nodes: Sequence[tuple[str, str]]) -> str:
    """Nodes that have another number of ranks than most."""
    counts = Counter(nodes)
    usual = Counter(counts.values()).most_common(1)[0][0]
    odd = [f"{host} has {n}" for (_, host), n in counts.items() if n != usual]
    return f"{'; '.join(odd[:4])} ranks, and other nodes {usual}" if odd else ""


def alike(name: str, ranks: Sequence[MachineFacts], attribute: str, do: str) -> Check:
    """Whether all ranks say the same, key by key."""
    nodes = [facts.node for facts in ranks]
    said = [getattr(facts, attribute) for facts in ranks]
    faults = []
    for key in sorted(set().union(*said)):
        values = [words.get(key) for words in said]
        usual = Counter(values).most_common(1)[0][0]
        for value in dict.fromkeys(value for value in values if value != usual):
            odd = [rank for rank, other in enumerate(values) if other == value]
            faults.append(
                f"{key} is {value or 'not there'} on {describe_ranks(odd, nodes)}, {usual or 'not there'} elsewhere"
            )
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    if attribute == "code":
        told = f"{len(said[0])} files, {hashlib.sha256(str(said[0]).encode()).hexdigest()[:12]}"
    else:
        told = ", ".join(f"{key} {value}" for key, value in list(said[0].items())[:6])
    return Check(name, told, "; ".join(faults[:3]) + more, do)


def check_files(ranks: Sequence[MachineFacts]) -> Check:
    """Whether every node sees the same data and vocabulary."""
    missing = [
        (path, [rank for rank, facts in enumerate(ranks) if facts.files.get(path) is None]) for path in ranks[0].files
    ]
    nodes = [facts.node for facts in ranks]
    lost = [f"{path} is not there on {describe_ranks(odd, nodes)}" for path, odd in missing if odd]
    if lost:
        return Check("data", "", "; ".join(lost[:3]), "put the data where every node sees it, under the same path")
    check = alike("data", ranks, "files", "copy the data again: every node must have the same")
    total = sum(size or 0 for size in ranks[0].files.values())
    told = f"{len(ranks[0].files)} files of {total / 1e9:.3f} GB on every node" if ranks[0].files else "no files"
    return check._replace(told=told)


def check_clocks(offsets: Sequence[float], nodes: Sequence[tuple[str, str]]) -> Check:
    """offsets: seconds that each rank's clock is ahead of the median."""
    odd = [rank for rank, offset in enumerate(offsets) if abs(offset) > CLOCKS]
    fault = ""
    if odd:
        worst = max(odd, key=lambda rank: abs(offsets[rank]))
        direction = "ahead of" if offsets[worst] > 0 else "behind"
        fault = f"the clock of {describe_ranks(odd, nodes)} is {abs(offsets[worst]):.1f} s {direction} the others"
    spread = max(offsets) - min(offsets)
    return Check("clocks", f"at most {1000 * spread:.0f} ms apart", fault, "set it by NTP (timedatectl, chronyc)")


def compared(name: str, seconds: Sequence[float], words: Callable[[list[int]], str], what: str, do: str) -> Check:
    """Whether somebody needs more than 20 % longer than the median of all; `words` says who has these places."""
    median = statistics.median_low(seconds)
    odd = [rank for rank, took in enumerate(seconds) if took > SLOW * median]
    told = f"{what}: {1000 * min(seconds):.2f} to {1000 * max(seconds):.2f} ms, median {1000 * median:.2f} ms"
    fault = ""
    if odd:
        worst = max(seconds[rank] for rank in odd)
        fault = f"{words(odd)}: {what}: {worst / median - 1:.0%} slower than the median of {1000 * median:.2f} ms"
    return Check(name, told, fault, do)


# ---- measuring -------------------------------------------------------------------------------------------------------


def clock() -> float:
    """This machine's time of day, in seconds."""
    return time.time()


def clock_offsets(context: RankContext, rounds: int = 7) -> list[float]:
    """Seconds that each rank's clock is ahead of the median: the median over barriers that all ranks leave together."""
    seen = []
    for _ in range(rounds):
        collectives.barrier(context.mesh.world)
        times = gather_numbers(clock(), context)
        middle = statistics.median_low(times)
        seen.append([moment - middle for moment in times])
    return [statistics.median(offsets) for offsets in zip(*seen)]


def gather_numbers(value: float, context: RankContext) -> list[float]:
    """A number of every rank, on every rank."""
    own = torch.tensor([value], dtype=torch.float64, device=context.device)
    return collectives.all_gather(own, context.mesh.world).tolist()


def gemm_seconds(device: torch.device, tries: int = 12) -> float:
    """Of the fastest of a few products of matrices, in the format that the device is made for."""
    size, dtype, count = (8192, torch.bfloat16, 4) if device.type == "cuda" else (512, torch.float32, 1)
    a = torch.randn(size, size, device=device).to(dtype)

    def work() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return min_seconds(work, device, tries) / count


def min_seconds(work, device: torch.device, tries: int) -> float:
    """Seconds of the fastest of so many runs, after one to warm up."""
    times = []
    for _ in range(tries + 1):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_all_reduce(context: RankContext, nodes: Sequence[tuple[str, str]]) -> Check:
    """An all-reduce inside each node, all nodes at once, and one over all ranks."""
    groups = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
    usual = Counter(map(len, groups)).most_common(1)[0][0]
    own = next(group for group in groups if context.mesh.rank in group)
    mine = None
    if len(own) > 1:
        mine = Axis("node", tuple(own), group=new_group(own, "node group", context.mesh.timeout))
    inside = gather_numbers(all_reduce_seconds(mine, context.device) if mine else 0.0, context)
    everywhere = max(gather_numbers(all_reduce_seconds(context.mesh.world, context.device), context))
    whole = f"{_elements(context.device) * 4 / 2**20:.0f} MiB over all ranks in {1000 * everywhere:.2f} ms"
    like = [group for group in groups if len(group) == usual > 1]
    if not like:
        return Check("all-reduce", whole)
    slowest = [max(inside[rank] for rank in group) for group in like]
    check = compared(
        "all-reduce",
        slowest,
        lambda odd: describe_ranks([rank for at in odd for rank in like[at]], nodes),
        "the same inside a node",
        "see nvidia-smi topo -m and the links of that node",
    )
    return check._replace(told=f"{whole}; {check.told}")


def _elements(device: torch.device) -> int:
    return 2**26 if device.type == "cuda" else 2**18


def all_reduce_seconds(axis: Axis, device: torch.device, tries: int = 7) -> float:
    """Of the fastest of a few sums of fp32 numbers over an axis."""
    x = torch.zeros(_elements(device), device=device)
    return min_seconds(lambda: collectives.all_reduce(x, axis), device, tries)
