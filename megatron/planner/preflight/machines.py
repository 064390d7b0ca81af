# SPDX-License-Identifier: Apache-2.0
"""Check the machines of a started job: whether they are alike, see the data, and are equally fast.

Every rank collects its `MachineFacts`, and the checks name outliers: ranks with other versions, code, settings
or files than most ranks, with a clock that is off, or that need more than 20 % longer than the median
for a matrix product or for an all-reduce inside their node.
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
from megatron.settings.declare import dashed
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.run_record import library_versions

CLOCKS = 1.0  # seconds that clocks may differ: logs, heartbeats and checkpoints of nodes are compared by time
SLOW = 1.2  # limit, times the median
ROOT = Path(__file__).resolve().parents[3]


class MachineFacts(NamedTuple):
    """The properties of a rank's machine; each dict should be equal on all ranks.

    node:      (number of the node, host name)
    versions:  of Python, torch, CUDA, NCCL, driver and libraries, and the device's name
    files:     path -> bytes, None if there is no such file
    """

    node: tuple[str, str]
    versions: dict[str, str]
    code: dict[str, str]
    settings: dict[str, str]
    files: dict[str, int | None]
    free: int | None = None  # bytes on the disk of --save


def check_machines(config: schema.Config, context: RankContext, checkpoint_bytes: float) -> Iterator[Check]:
    """Check all machines; called by all ranks together, with the same result on each."""
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
    yield alike("code", ranks, "code", "copy the same code to every node, or use a shared folder")
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
        "drain that node, or check what else runs on it",
    )
    yield check_all_reduce(context, nodes)


# ---- properties of a rank --------------------------------------------------------------------------------------------


def node_of() -> tuple[str, str]:
    """This rank's node: its number from the launcher, and its name."""
    number = os.environ.get("SLURM_NODEID") or os.environ.get("GROUP_RANK") or ""
    return number, os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def versions(device: torch.device) -> dict[str, str]:
    """The versions that must be equal on all ranks."""
    result = dict(python=platform.python_version(), **{k: v for k, v in library_versions().items() if k != "python"})
    result["torch"] = torch.__version__
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
        result["CUDA"] = str(torch.version.cuda)
        result["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        result["driver"] = driver()
    return result


def driver() -> str:
    """The version of NVIDIA's driver, from the kernel."""
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
        dashed(f.name): str(value)
        for group in config.groups.values()
        for f in fields(group)
        if (value := getattr(group, f.name)) != f.default
    }


def file_sizes(config: schema.Config) -> dict[str, int | None]:
    """The size of each file in the settings, bytes."""
    from megatron.planner.problems import named_files

    sizes = {}
    for _, path in named_files(config):
        try:
            sizes[path] = location(path).stat().st_size
        except OSError:
            sizes[path] = None
    return sizes


def free_bytes(folder: str) -> int:
    """Free bytes on the disk of a folder that may not exist yet."""
    path = Path(folder).absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


# ---- comparing -------------------------------------------------------------------------------------------------------


def describe_ranks(ranks: Sequence[int], nodes: Sequence[tuple[str, str]]) -> str:
    """Name ranks in a message: by node, if all ranks of a node are meant.

    >>> describe_ranks([2, 3], [("0", "a"), ("0", "a"), ("1", "b"), ("1", "b")]), describe_ranks([1], [("", "a")] * 2)
    ('node b (ranks 2, 3)', 'rank 1 on a')
    """
    words = []
    for node in dict.fromkeys(nodes[rank] for rank in ranks):
        mine = [rank for rank in ranks if nodes[rank] == node]
        numbers = f"rank{'s' * (len(mine) > 1)} " + ", ".join(map(str, mine[:4])) + ", ..." * (len(mine) > 4)
        whole = len(mine) == nodes.count(node) and len(set(nodes)) > 1
        words.append(f"node {node[1]} ({numbers})" if whole else f"{numbers} on {node[1]}")
    return "; ".join(words[:4]) + f" and {len(words) - 4} more nodes" * (len(words) > 4)


def uneven_nodes(nodes: Sequence[tuple[str, str]]) -> str:
    """The nodes with another number of ranks than most."""
    counts = Counter(nodes)
    usual = Counter(counts.values()).most_common(1)[0][0]
    odd = [f"{host} has {n}" for (_, host), n in counts.items() if n != usual]
    return f"{'; '.join(odd[:4])} ranks, and other nodes {usual}" if odd else ""


def alike(name: str, ranks: Sequence[MachineFacts], attribute: str, do: str) -> Check:
    """Check that an attribute is equal on all ranks, key by key."""
    nodes = [facts.node for facts in ranks]
    values_of = [getattr(facts, attribute) for facts in ranks]
    faults = []
    for key in sorted(set().union(*values_of)):
        values = [words.get(key) for words in values_of]
        usual = Counter(values).most_common(1)[0][0]
        for value in dict.fromkeys(value for value in values if value != usual):
            odd = [rank for rank, other in enumerate(values) if other == value]
            faults.append(
                f"{key} is {value or 'missing'} on {describe_ranks(odd, nodes)}, {usual or 'missing'} elsewhere"
            )
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    if attribute == "code":
        summary = f"{len(values_of[0])} files, {hashlib.sha256(str(values_of[0]).encode()).hexdigest()[:12]}"
    else:
        summary = ", ".join(f"{key} {value}" for key, value in list(values_of[0].items())[:6])
    return Check(name, summary, "; ".join(faults[:3]) + more, do)


def check_files(ranks: Sequence[MachineFacts]) -> Check:
    """Check that every node sees the same data and vocabulary."""
    missing = [
        (path, [rank for rank, facts in enumerate(ranks) if facts.files.get(path) is None]) for path in ranks[0].files
    ]
    nodes = [facts.node for facts in ranks]
    lost = [f"{path} is missing on {describe_ranks(odd, nodes)}" for path, odd in missing if odd]
    if lost:
        return Check("data", "", "; ".join(lost[:3]), "put the data on every node, under the same path")
    check = alike("data", ranks, "files", "copy the data again: every node must have the same")
    total = sum(size or 0 for size in ranks[0].files.values())
    summary = f"{len(ranks[0].files)} files of {total / 1e9:.3f} GB on every node" if ranks[0].files else "no files"
    return check._replace(summary=summary)


def check_clocks(offsets: Sequence[float], nodes: Sequence[tuple[str, str]]) -> Check:
    """Check that clocks agree. offsets: seconds that each rank's clock is ahead of the median."""
    odd = [rank for rank, offset in enumerate(offsets) if abs(offset) > CLOCKS]
    fault = ""
    if odd:
        worst = max(odd, key=lambda rank: abs(offsets[rank]))
        direction = "ahead of" if offsets[worst] > 0 else "behind"
        fault = f"the clock of {describe_ranks(odd, nodes)} is {abs(offsets[worst]):.1f} s {direction} the others"
    spread = max(offsets) - min(offsets)
    return Check("clocks", f"at most {1000 * spread:.0f} ms apart", fault, "set it by NTP (timedatectl, chronyc)")


def compared(name: str, seconds: Sequence[float], words: Callable[[list[int]], str], what: str, do: str) -> Check:
    """Check that nothing takes more than 20 % longer than the median; `words` names the ranks of outliers."""
    median = statistics.median_low(seconds)
    odd = [rank for rank, took in enumerate(seconds) if took > SLOW * median]
    summary = f"{what}: {1000 * min(seconds):.2f} to {1000 * max(seconds):.2f} ms, median {1000 * median:.2f} ms"
    fault = ""
    if odd:
        worst = max(seconds[rank] for rank in odd)
        fault = f"{words(odd)}: {what}: {worst / median - 1:.0%} slower than the median of {1000 * median:.2f} ms"
    return Check(name, summary, fault, do)


# ---- measurements ----------------------------------------------------------------------------------------------------


def clock() -> float:
    """This machine's time of day, in seconds."""
    return time.time()


def clock_offsets(context: RankContext, rounds: int = 7) -> list[float]:
    """Seconds that each rank's clock is ahead of the median: the median over barriers that all ranks leave together."""
    rows = []
    for _ in range(rounds):
        collectives.barrier(context.mesh.world)
        times = gather_numbers(clock(), context)
        middle = statistics.median_low(times)
        rows.append([moment - middle for moment in times])
    return [statistics.median(offsets) for offsets in zip(*rows)]


def gather_numbers(value: float, context: RankContext) -> list[float]:
    """Gather one number from every rank."""
    own = torch.tensor([value], dtype=torch.float64, device=context.device)
    return collectives.all_gather(own, context.mesh.world).tolist()


def gemm_seconds(device: torch.device, tries: int = 12) -> float:
    """Seconds of the fastest of a few matrix products, in the device's usual format."""
    size, dtype, count = (8192, torch.bfloat16, 4) if device.type == "cuda" else (512, torch.float32, 1)
    a = torch.randn(size, size, device=device).to(dtype)

    def work() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return min_seconds(work, device, tries) / count


def min_seconds(work, device: torch.device, tries: int) -> float:
    """Seconds of the fastest of `tries` runs, after one to warm up."""
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
    """Check an all-reduce inside each node, all nodes together, and time one over all ranks."""
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
        "check nvidia-smi topo -m and the links of that node",
    )
    return check._replace(summary=f"{whole}; {check.summary}")


def _elements(device: torch.device) -> int:
    return 2**26 if device.type == "cuda" else 2**18


def all_reduce_seconds(axis: Axis, device: torch.device, tries: int = 7) -> float:
    """Seconds of the fastest of a few sums of fp32 numbers over an axis."""
    x = torch.zeros(_elements(device), device=device)
    return min_seconds(lambda: collectives.all_reduce(x, axis), device, tries)
