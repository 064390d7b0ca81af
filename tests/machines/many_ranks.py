# SPDX-License-Identifier: Apache-2.0
"""Dozens of ranks on a few cores: one process loads torch and the suite, and forks the ranks.

    python -m tests.machines.many_ranks FOLDER WORLD_SIZE KILL FLAGS...

Rank r is local rank r % 8 of node r // 8. KILL is "none", or "NODE ITERATION": the ranks of this node get SIGKILL once
metrics.jsonl in FOLDER/run has the iteration. Exits with the highest code of the others. Each rank leaves
FOLDER/counts_RANK.json, what it has asked of the machine:

    read, written     bytes of its system calls, with those of its messages
    PHASE read, PHASE written
                      the same while it wrote its file of a checkpoint ("save"), merged parts of the index ("merge"),
                      published it ("publish"), and read one ("load"): it sends no messages then
    opened            files that it opened, by place: "run" (FOLDER/run), "beats" (FOLDER/beats), "memory" (of the node:
                      /proc, /sys, heartbeats), "elsewhere" (modules)
    seconds           from the first to the last count
    groups            process groups that it created
    keys              rank 0: keys of the store, which ranks wrote to meet
    gathered          calls of all_gather_object

Memory that the first process has loaded is shared: a rank takes tens of MB of its own.
"""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

NODE = 8  # ranks
PHASES = dict(save="write_shard", merge="merge_group", publish="commit", load="_load")  # of checkpoint.folder


def rank_of_job(rank: int, world: int, port: int, folder: Path, flags: list[str]) -> int:
    """Run one rank, and write what it counted. Returns its exit code."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import pretrain_gpt
    from megatron.checkpoint import folder as saving
    from megatron.entry import start
    from megatron.errors import exit_code
    from megatron.mpu import collectives

    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % NODE),
        LOCAL_WORLD_SIZE=str(NODE),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    counts, places = Counter(), {str(folder / name): name for name in ("run", "beats")}
    places |= {"/proc/": "memory", "/sys/": "memory", "/heartbeats-of-": "memory"}

    def opened(event: str, what: tuple) -> None:
        if event == "open":
            path = os.fsdecode(what[0]) if isinstance(what[0], (str, bytes)) else str(what[0])
            counts[f"opened {next((name for place, name in places.items() if place in path), 'elsewhere')}"] += 1

    def counted(name: str, module, attribute: str) -> None:
        real = getattr(module, attribute)

        def call(*args, **more):
            counts[name] += 1
            return real(*args, **more)

        setattr(module, attribute, call)

    def leave(*args, real=dist.destroy_process_group) -> None:
        counts["keys"] = c10d._world.pg_map[dist.group.WORLD][1].num_keys() if rank == 0 else 0
        real(*args)

    before, began = io_of_this_process(), time.monotonic()
    sys.addaudithook(opened)
    counted("groups", c10d, "_new_process_group_helper")
    counted("gathered", dist, "all_gather_object")
    for phase, function in PHASES.items():
        measured(counts, phase, saving, function)
    dist.destroy_process_group = leave
    assert collectives.dist is dist
    code = 0
    try:
        start(flags, pretrain_gpt.recipe())
    except BaseException as error:
        traceback.print_exc()
        code = exit_code(error) if isinstance(error, Exception) else 1
    after = io_of_this_process()
    record = dict(read=after["rchar"] - before["rchar"], written=after["wchar"] - before["wchar"], **counts)
    record["seconds"] = time.monotonic() - began
    (folder / f"counts_{rank:05d}.json").write_text(json.dumps(record))
    return code


def measured(counts: Counter, phase: str, module, attribute: str) -> None:
    """Count the bytes that a function of a module reads and writes."""
    real = getattr(module, attribute)

    def call(*args, **more):
        before = io_of_this_process()
        try:
            return real(*args, **more)
        finally:
            after = io_of_this_process()
            counts[f"{phase} read"] += after["rchar"] - before["rchar"]
            counts[f"{phase} written"] += after["wchar"] - before["wchar"]

    setattr(module, attribute, call)


def io_of_this_process() -> dict[str, int]:
    return {name: int(value) for name, value in (line.split(": ") for line in open("/proc/self/io"))}


def fork_ranks(world: int, folder: Path, flags: list[str]) -> dict[int, int]:
    """Rank -> process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = {}
    for rank in range(world):
        child = os.fork()
        if child == 0:
            launcher = processes.get(rank - rank % NODE, os.getpid())
            os.getppid = lambda launcher=launcher: (
                launcher
            )  # a node's ranks share a launcher: its heartbeats are one file
            log = os.open(folder / f"log_{rank:05d}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 1
            try:
                code = rank_of_job(rank, world, port, folder, flags)
            finally:
                sys.stdout.flush()
                os._exit(code)
        processes[rank] = child
    return processes


def reached(metrics: Path, iteration: int) -> bool:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return any(json.loads(line).get("iteration", 0) >= iteration for line in lines if line.endswith("}"))


def main(argv: list[str]) -> int:
    folder, world, kill, flags = Path(argv[0]), int(argv[1]), argv[2], argv[3:]
    import torch

    import pretrain_gpt  # noqa: F401

    torch.set_num_threads(1)
    processes, left = fork_ranks(world, folder, flags), {}
    victims = range(0)
    if kill != "none":
        node, iteration = map(int, kill.split())
        victims = range(NODE * node, NODE * node + NODE)
        while not reached(folder / "run/metrics.jsonl", iteration):
            time.sleep(0.2)
        for rank in victims:
            os.kill(processes[rank], signal.SIGKILL)
    for rank, process in processes.items():
        left[rank] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(json.dumps(left))
    assert all(left[rank] == -signal.SIGKILL for rank in victims)
    return max(left[rank] for rank in processes if rank not in victims)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
