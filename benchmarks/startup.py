# SPDX-License-Identifier: Apache-2.0
"""How long a job takes to find itself: rendezvous and groups over a TCP store, by number of ranks; and the store's speed.

    python benchmarks/startup.py [--ranks 2,4,8,16,32]

Ranks are forked processes of this machine over gloo, so many more than cores where it has few. The planner's model of
start-up (megatron/planner/startup.py) has its figures from here.
"""

import argparse
import os
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Pipe
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from megatron.mpu.mesh import Mesh
from megatron.pipeline.schedule import looped
from megatron.pipeline.wire import open_channels

PATIENCE = timedelta(seconds=120)


def forked(number: int, body) -> list:
    """What `body(rank, port)` returns on so many processes, which share a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ends = []
    for rank in range(number):
        receive, send = Pipe(duplex=False)
        if os.fork() == 0:
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            try:
                send.send(body(rank, port))
            finally:
                os._exit(0)
        send.close()
        ends.append(receive)
    answers = [end.recv() for end in ends]
    for _ in ends:
        os.wait()
    return answers


def start_up(rank: int, port: int, world: int) -> dict[str, float]:
    """Seconds of each part of the start of a job of tensor, pipeline and data parallelism, as far as ranks are enough."""
    took, before = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal before
        now = time.perf_counter()
        took[name], before = now - before, now

    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=PATIENCE)
    lap("store")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    lap("all ranks")
    pp = min(world, 4)
    tp = 2 if world >= 8 else 1
    mesh = Mesh(rank, pp=pp, tp=tp, shard=world // pp // tp, timeout=PATIENCE)
    lap("groups")
    channels = open_channels(mesh, looped(pp))
    lap("channels")
    took["made"] = len(mesh.own_groups()) + len(channels)
    leave_after(store, rank, world)
    return took


def leave_after(store: dist.TCPStore, rank: int, world: int) -> None:
    """The rank that serves the store leaves last."""
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:
        time.sleep(0.01)


def store_rate(clients: int, seconds: float = 2.0) -> float:
    """Operations a second of a TCP store that so many processes ask at once."""

    def ask(rank: int, port: int) -> float:
        store = dist.TCPStore("127.0.0.1", port, clients, is_master=rank == 0, timeout=PATIENCE)
        store.set(f"{rank}", b"x" * 128)  # a unique id of NCCL's has this size
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            store.get(f"{rank}")
            done += 1
        leave_after(store, rank, clients)
        return done / seconds

    return sum(forked(clients, ask))


def connections(clients: int = 50) -> list[float]:
    """Seconds of each of so many connections to one store, one after the other, in ascending order."""
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    held, took = [], []
    for _ in range(clients):
        start = time.perf_counter()
        held.append(dist.TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False))
        took.append(time.perf_counter() - start)
    return sorted(took)


def main() -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8,16,32")
    sizes = [int(word) for word in parser.parse_args().ranks.split(",")]
    print(f"{os.cpu_count()} cores, torch {torch.__version__}; seconds of the slowest rank, the best of three")
    print("ranks    store  all ranks   groups  channels  made by a rank  store ops/s")
    for world in sizes:
        tries = [forked(world, lambda rank, port, world=world: start_up(rank, port, world)) for _ in range(3)]
        best = {name: min(max(each[name] for each in one) for one in tries) for name in tries[0][0]}
        print(
            f"{world:>5} {best['store']:>8.3f} {best['all ranks']:>10.3f} {best['groups']:>8.3f} {best['channels']:>9.3f} "
            f"{best['made']:>15.0f} {store_rate(world):>12,.0f}",
            flush=True,
        )
    took = connections()
    late = sum(one > 1 for one in took)  # torch tries again after five seconds
    print(
        f"a connection to the store: {1000 * took[len(took) // 2]:.2f} ms; {late} of {len(took)} took {took[-1]:.1f} s"
    )


if __name__ == "__main__":
    main()
