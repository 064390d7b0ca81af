# SPDX-License-Identifier: Apache-2.0
"""What a pipeline rank does once a step: all-gathers and reductions of units, other sums, and the update; in seconds."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from megatron.mpu.placement import DATA_PARALLEL, EXPERT_DATA_PARALLEL
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import Units, rank_units
from megatron.planner.schedule_time import ShardingTimes
from megatron.planner.traffic import Transfer, once_a_step

# Constants, each with its source.
DISK = 3e9  # bytes/s of a node's drive, reads and writes together: assumed
HOST_MEMORY = 20e9  # bytes/s of the host's memory in an offloaded update: assumed
UPDATE_BYTES = 10  # per parameter: main weight read and written, bf16 weight written: counted
ROUNDED_BYTES = 50  # per bf16 moment: widened, random words, rounded; for torch's ops one by one: counted
OFFLOAD_BYTES, OFFLOAD_MOMENT_BYTES = 12, 4  # per parameter and per moment in an offloaded update: estimated


class StepCommunication(NamedTuple):
    """The communication and update of a pipeline rank once per step."""

    sharding: ShardingTimes  # all-gathers and reductions of a chunk, and the update
    after_reductions: float  # seconds after the last reduction: the update, and sums that wait for all gradients


def step_communication(job: Job, layout: Layout, cluster: Cluster) -> StepCommunication:
    """The communication of the first or the last pipeline rank, whichever takes longer."""
    num_microbatches = layout.num_microbatches(job)
    ends = (_once(job, layout, cluster, rank) for rank in sorted({0, layout.pp - 1}))
    return max(ends, key=lambda own: own.after_reductions + layout.chunks * _sent(own.sharding, num_microbatches))


def _sent(sharding: ShardingTimes, num_microbatches: int) -> float:
    """Seconds of a chunk's all-gathers and reductions in a step."""
    gathers = {0: 0, 3: 2 * num_microbatches}.get(sharding.zero, 1)
    return sharding.gather * gathers + sharding.reduce * (num_microbatches if sharding.zero >= 2 else 1)


def _once(job: Job, layout: Layout, cluster: Cluster, rank: int) -> StepCommunication:
    away = layout.offload or layout.disk or layout.param_offload
    here = replace(layout, offload=0.0, disk=0.0, param_offload=False) if away else layout
    sums = _sums_once(job, here, cluster, rank)
    gathers = layout.chunks * (2 * layout.num_microbatches(job) if layout.zero == 3 else 1)
    reductions = layout.chunks * (layout.num_microbatches(job) if job.reducing(layout.zero) >= 2 else 1)
    gather_ahead = layout.parallel.overlap_param_gather if layout.parallel else layout.overlap
    update = _update(job, layout, cluster, rank)
    sharding = ShardingTimes(
        job.reducing(layout.zero),
        sums["gather"] / gathers,
        sums["reduce"] / reductions,
        (1 - cluster.device.exposed) * gather_ahead,
        (1 - cluster.device.exposed) * layout.overlap,
        update,
    )
    return StepCommunication(sharding, sums["later"] + update)


@lru_cache(maxsize=4096)
def _sums_once(job: Job, layout: Layout, cluster: Cluster, rank: int) -> dict[str, float]:
    """Seconds of all messages once a step, by `_place`; the same wherever the state is."""
    sums = dict.fromkeys(("gather", "reduce", "later"), 0.0)
    for transfer in once_a_step(job, layout, rank):
        sums[_place(transfer, layout)] += _seconds(transfer, layout, cluster)
    return sums


def _place(transfer: Transfer, layout: Layout) -> str:
    """Classify a message: it gathers parameters or reduces gradients, unit by unit, or is sent after all of these."""
    replicates, shards = zip(DATA_PARALLEL, EXPERT_DATA_PARALLEL)
    if transfer.axis in shards and transfer.what != "matrices":
        return "gather" if transfer.op == "all_gather" else "reduce"
    in_place = all(layout.data_sizes[axis] == 1 for axis in shards)
    return "reduce" if transfer.axis in replicates and in_place else "later"


def _update(job: Job, layout: Layout, cluster: Cluster, rank: int) -> float:
    units, device = rank_units(job, layout, rank), cluster.device
    own = units.owned(layout.data_sizes)
    moved = UPDATE_BYTES + job.shard_gradients(layout.zero)
    moved += sum(2 * size if size == 4 else ROUNDED_BYTES for size in job.moments)
    away = OFFLOAD_BYTES + OFFLOAD_MOMENT_BYTES * sum(job.moments) / 4
    update = moved * own / (device.update_bandwidth or device.bandwidth) + away * own * layout.offload / device.host
    update += away * own * layout.offload * (device.kind == "cuda") / HOST_MEMORY
    filed = 2 * (4 + sum(job.moments)) * own * layout.disk  # read and written
    update += _orthogonalizing(units, job, layout, device)
    return update + filed * min(cluster.local_size, cluster.world_size) / DISK


def _orthogonalizing(units: Units, job: Job, layout: Layout, device: Device) -> float:
    """Seconds of the busiest rank: the matrices of a unit are divided among ranks of tp and of shards."""
    total = 0.0
    for unit, count in units.counts.items() if job.ns_steps else ():
        each = []
        for rows, columns in unit.matrices:
            low = min(rows, columns)
            each.append((4 * low * rows * columns + 2 * low**3) / device.reached(job.precision, low))
        ranks = layout.tp if unit.axes == DATA_PARALLEL else layout.cuts.ep * layout.cuts.etp
        ranks *= layout.data_sizes[unit.sharded]
        total += count * job.ns_steps * max(sum(each) / ranks, max(each, default=0.0))
    return total


def _seconds(transfer: Transfer, layout: Layout, cluster: Cluster) -> float:
    sizes, experts = layout.data_sizes | layout.cuts._asdict() | dict(tied=2), layout.cuts.ep * layout.cuts.etp
    stride = dict(tp=1, shard=layout.tp, replicate=layout.tp * layout.shard, etp=1, ep=layout.cuts.etp)
    stride |= dict(expert_shard=experts, expert_replicate=experts * sizes["expert_shard"])
    stride |= dict(tied=layout.tp * layout.weight_ranks * (layout.pp - 1))
    axis = transfer.axis
    return cluster.seconds(transfer.op, transfer.bytes, transfer.calls, sizes[axis], stride[axis])
