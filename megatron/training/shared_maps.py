# SPDX-License-Identifier: Apache-2.0
"""Index maps of datasets are hashed and built once for a job: the first rank builds its datasets, then the others theirs.

What a rank lacks (its cache is a folder of its own node, or it can write none) it receives. Building takes minutes for
large corpora; meanwhile the others ask the job's store, because collectives time out.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
import torch.distributed as dist

from megatron.data.index_cache import Arrays, JobMaps, UsedEntry, cached_arrays, entry_path
from megatron.errors import Failure, PeerLost, node_name
from megatron.model.recipe import MODEL_TYPES
from megatron.mpu import collectives
from megatron.mpu.initialize import RankContext
from megatron.telemetry.figures import several

BLOCK = 1 << 26  # bytes that are sent at a time
SIGN = 5.0  # seconds between two signs of a first rank that builds


def is_of_suite(build: Callable) -> bool:
    """Whether a function is this suite's, in its packages or one of its scripts. A user's own may wait for other ranks."""
    code, root = getattr(build, "__code__", None), Path(__file__).resolve().parents[2]
    place = Path(code.co_filename).resolve() if code else Path()
    return root / "megatron" in place.parents or place.parent == root and place.stem in MODEL_TYPES.values()


def build_once(
    context: RankContext, build: Callable[[], Any], cache: Optional[str], log: Callable[[str], None], timeout: float
) -> Any:
    """What `build()` returns, on every rank: index maps of datasets that it makes are built by the first one alone.

    cache:   --data-cache-path of this rank
    timeout: seconds without a sign of the first rank after which it is lost
    A Failure of the first rank is that of all.
    """
    if context.mesh.world_size == 1:
        return build()
    store, maps, result = _store(), JobMaps(context.is_rank_zero, cache), None
    answer: Any = None
    if context.is_rank_zero:
        with _signs(store):
            try:
                with maps.at_work():
                    result = build()
                answer = [replace(entry, arrays=None) for entry in maps.entries]
            except Failure as error:
                answer = error
    else:
        _wait(store, timeout)
    answer = collectives.broadcast_object(answer, context.mesh.world)
    if isinstance(answer, Failure):
        raise answer
    if context.is_rank_zero:
        store.delete_key("built")
    else:
        maps.entries = answer
    _share(context, maps, log)
    if context.is_rank_zero:
        return result
    with maps.at_work():
        return build()


# ---- waiting ---------------------------------------------------------------------------------------------------------


def _store() -> dist.Store:
    return dist.PrefixStore("datasets", dist.distributed_c10d._get_default_store())


class _signs:
    """A context in which the others see that this rank is at work."""

    def __init__(self, store: dist.Store):
        self.store, self.over = store, threading.Event()
        self.thread = threading.Thread(target=self._work, name="datasets", daemon=True)

    def _work(self) -> None:
        while not self.over.wait(SIGN):
            self.store.add("signs", 1)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *error) -> None:
        self.over.set()
        self.thread.join()
        self.store.delete_key("signs")
        self.store.set("built", "1")


def _wait(store: dist.Store, timeout: float) -> None:
    """Wait until the first rank has built its datasets."""
    pause, signs, since = 0.01, b"", time.monotonic()
    while not store.check(["built"]):
        time.sleep(pause)
        pause = min(1.5 * pause, 2.0)
        now = store.get("signs") if store.check(["signs"]) else signs
        if now != signs:
            signs, since = now, time.monotonic()
        if time.monotonic() - since > timeout:
            raise PeerLost(f"rank 0 was to build index maps, and gave no sign for {timeout:.0f} s")


# ---- what is lacking -------------------------------------------------------------------------------------------------


def _share(context: RankContext, maps: JobMaps, log: Callable[[str], None]) -> None:
    """Send each entry that a rank lacks: first to one rank of each node, which keeps it for the others, then to all."""
    for one_of_a_node in (True, False):
        own = [n for n, entry in enumerate(maps.entries) if not _is_here(maps, entry)]
        lacking = context.all_gather_object((node_name(), own))
        for number in sorted({number for _, numbers in lacking for number in numbers}):
            nodes = [node if number in numbers else "" for node, numbers in lacking]
            keepers = [r for r, node in enumerate(nodes) if node and not (one_of_a_node and node in nodes[:r])]
            entry = maps.entries[number]
            log(f"index maps of {entry.name} are sent to {several(len(keepers), 'rank')}")
            arrays = _broadcast(context, entry.arrays, context.mesh.rank in keepers)
            if context.mesh.rank in keepers:
                _keep(maps, entry, arrays, log)
        if not any(numbers for _, numbers in lacking):
            return
        collectives.barrier(context.mesh.world)  # what was kept is on the disk before others of the node look


def _is_here(maps: JobMaps, entry: UsedEntry) -> bool:
    path = entry_path(maps.folder_of(entry), entry.name, entry.key)
    return maps.records or entry.arrays is not None or (path / "index.json").exists()


def _keep(maps: JobMaps, entry: UsedEntry, arrays: Arrays, log: Callable[[str], None]) -> None:
    """Put an entry into the cache of this node; where that cannot be written, its arrays stay in memory."""
    entry.arrays = cached_arrays(maps.folder_of(entry), entry.name, entry.key, lambda: arrays, log=log)


def _broadcast(context: RankContext, arrays: Optional[Arrays], keeps: bool) -> Arrays:
    """Arrays of the first rank, on the ranks that keep them."""
    facts = {name: (array.dtype.str, array.shape) for name, array in (arrays or {}).items()}
    received = {}
    for name, (dtype, shape) in collectives.broadcast_object(facts, context.mesh.world).items():
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        whole = np.empty(size if keeps else 0, np.uint8)
        mine = np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8) if context.is_rank_zero else None
        for start in range(0, size, BLOCK):
            stop = min(start + BLOCK, size)
            block = torch.empty(stop - start, dtype=torch.uint8)
            if mine is not None:
                block.numpy()[:] = mine[start:stop]
            block = collectives.broadcast(block.to(context.device), context.mesh.world)
            if keeps:
                whole[start:stop] = block.cpu().numpy()
        received[name] = whole.view(dtype).reshape(shape) if keeps else whole
    return received
