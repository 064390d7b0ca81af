# SPDX-License-Identifier: Apache-2.0
"""What moves gradients and weights between ranks on a CPU: our collectives over gloo against gloo's own.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/collectives.py
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 benchmarks/collectives.py --mb 84

A buffer of fp32 numbers in five messages, as a model of six units has them, each started at once; contenders take turns in
every round. Ratios are medians over rounds of (time of the peer / time of ours).
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh

UNITS = (4, 2, 2, 2, 2)  # twelfths of the buffer: a table, and layers
PAIRS = [
    ("reduce-scatter", "gloo reduce-scatter"),
    ("reduce-scatter", "gloo all-to-all and sum"),
    ("all-gather", "gloo all-gather"),
    ("both of ours", "gloo all-reduce"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=21.0, help="megabytes of the buffer")
    parser.add_argument("--rounds", type=int, default=40)
    asked = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    axis = Mesh(dist.get_rank(), shard=ranks).shard
    twelfth = int(asked.mb * 1e6 / 4 / 12) // ranks * ranks
    whole = torch.randn(12 * twelfth)
    units = whole.split([twelfth * share for share in UNITS])
    pieces = torch.zeros(12 * twelfth // ranks).split([twelfth * share // ranks for share in UNITS])
    parts = [torch.empty_like(unit) for unit in units]

    def all_to_all():
        works = [dist.all_to_all_single(part, unit, async_op=True) for part, unit in zip(parts, units)]
        for work, part, piece in zip(works, parts, pieces):
            work.wait()
            torch.sum(part.view(ranks, -1), 0, out=piece)

    def each(start, pairs):
        for work in [start(target, source) for target, source in pairs]:
            work.wait()

    ours = dict(
        scatter=lambda: each(lambda x, y: collectives.start_reduce_scatter(x, y, axis), zip(pieces, units)),
        gather=lambda: each(lambda x, y: collectives.start_all_gather(x, y, axis), zip(units, pieces)),
    )
    contenders = {
        "reduce-scatter": ours["scatter"],
        "gloo reduce-scatter": lambda: each(lambda x, y: collectives._scatter(x, y, async_op=True), zip(pieces, units)),
        "gloo all-to-all and sum": all_to_all,
        "all-gather": ours["gather"],
        "gloo all-gather": lambda: each(lambda x, y: collectives._gather(x, y, async_op=True), zip(units, pieces)),
        "both of ours": lambda: (ours["scatter"](), ours["gather"]()),
        "gloo all-reduce": lambda: dist.all_reduce(whole),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(-3, asked.rounds):
        for name, run in contenders.items():
            whole.normal_()
            dist.barrier()
            start = time.perf_counter()
            run()
            if number >= 0:
                times[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(f"{whole.nbytes / 1e6:.0f} MB between {ranks} ranks, {asked.rounds} rounds")
        for name, seconds in times.items():
            print(f"{name:24} {statistics.median(seconds) * 1e3:7.1f} ms (best {min(seconds) * 1e3:.1f})")
        for mine, peer in PAIRS:
            ratio = statistics.median(theirs / own for own, theirs in zip(times[mine], times[peer]))
            print(f"{mine:16} is {ratio:.2f} x as fast as {peer}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
