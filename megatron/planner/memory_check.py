# SPDX-License-Identifier: Apache-2.0
"""Check, before ranks join, that memory suffices for the minimum that training needs. Otherwise the kernel or the device
would end the job in its first steps, without naming the setting that is too large.

The check uses a lower bound (`memory.certain`): conservative estimates would refuse jobs that train. Each rank decides from
the same settings, for all ranks of its node together, before any of them allocates memory. On one machine all ranks
come to the same result and stop. With several machines, one may have too little memory while the others wait for it to
join: then ranks join first, and `training.build` stops all of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from megatron.errors import SettingsError
from megatron.guard.beat_files import in_memory
from megatron.model.recipe import Recipe
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import certain
from megatron.planner.target import vocabulary_of
from megatron.settings import rank_env
from megatron.settings.schema import Checkpoint, Config
from megatron.telemetry.figures import several
from megatron.telemetry.host_memory import available_memory, total_memory

MANY_TOKENS = 300_000  # a large vocabulary; if this fits, vocabulary files need not be read
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # without any of these torch has no GPU
PATIENCE = 5  # seconds to wait until the memory of a job that has just ended is free
OVERCOMMIT = "--allow-memory-overcommit"


def check_room(config: Config, recipe: Recipe, log: Callable[[str], None] = print) -> Optional[SettingsError]:
    """The error if a memory is too small, with remedies, for all ranks to raise (`training.build`). If all ranks are on
    this machine, it is raised here. With --allow-memory-overcommit only a note is logged.
    """
    refusal, here = _refusal_of(config, recipe, log), rank_env.ranks()
    if refusal and here.world_size in (1, here.local_world_size):
        raise refusal
    return refusal


def _refusal_of(config: Config, recipe: Recipe, log: Callable[[str], None]) -> Optional[SettingsError]:
    if config.batch.skip_train or recipe.predicts(config) == "nothing":
        return None
    here = rank_env.ranks()
    device = "cuda" if _has_gpu(config.kernels.device) else "cpu"
    if device != config.kernels.device == "cuda":  # joining says that there is none
        return None
    if not _lacking(Demand.of(config, recipe, device, here, MANY_TOKENS)):
        return None
    demand, waited = Demand.of(config, recipe, device, here), 0
    while lacking := _lacking(demand):
        if config.planner.allow_memory_overcommit:
            return log(f"note: {lacking}; {OVERCOMMIT}") if here.local_rank == 0 else None
        if lacking.needed > lacking.total or waited == PATIENCE:
            return _refusal(demand, lacking)
        time.sleep(1)
        waited += 1
    return None


@dataclass(frozen=True)
class Demand:
    """The minimum that training needs of the memories of this rank. jobs: the possible jobs; state_alone: count only state,
    because the memory of a step depends on texts; snapshots: copies of the state that lie in the memory of the nodes.
    """

    jobs: tuple[Job, ...]
    layout: Layout
    here: rank_env.Ranks
    state_alone: bool = False
    snapshots: int = 0

    @classmethod
    def of(
        cls, config: Config, recipe: Recipe, device: str, here: rank_env.Ranks, tokens: Optional[int] = None
    ) -> Optional["Demand"]:
        """The demand of this rank; None if the facts cannot predict memory. tokens: vocabulary size (default: from its
        files)
        """
        try:
            layout = Layout.of(config, here.world_size)
            job = Job.of(config, recipe.facts(config, tokens or vocabulary_of(config)[0]), dp=layout.dp, device=device)
            open_ = config.precision.precision == "auto"  # chosen later by a measurement: bf16 if it is faster
            jobs = (job, replace(job, precision="bf16")) if open_ else (job,)
            demand = cls(jobs, layout, here, recipe.predicts(config) == "state", snapshots_of(config.checkpoint))
            demand.on_host(layout)
        except Exception:  # in a user's facts: the error is raised when they are used
            return None
        return demand

    def on_device(self, layout: Layout) -> int:
        """Bytes of this rank's GPU."""
        return self._least(lambda job: certain(job, layout, self._stage(self.here.rank), self.state_alone)[0])

    def on_host(self, layout: Layout) -> int:
        """Bytes of this machine's memory, of all its ranks."""
        first = self.here.rank - self.here.local_rank
        stages = [self._stage(first + local) for local in range(self.here.local_world_size or 1)]
        kinds = slice(1, 2) if self.jobs[0].device == "cuda" else slice(0, 2)
        own = self._least(lambda job: sum(sum(certain(job, layout, at, self.state_alone)[kinds]) for at in stages))
        return own + self.in_snapshots(len(stages))

    def in_snapshots(self, ranks: int) -> int:
        """Bytes of the snapshots that so many ranks keep in their node's memory: equal shares of weights and moments."""
        each = lambda job: job.facts.parameters * (4 + sum(job.moments)) / self.here.world_size
        return self.snapshots * int(ranks * self._least(each))

    def _stage(self, rank: int) -> int:
        """The pipeline rank of a rank; pp is the slowest axis."""
        return rank * self.layout.pp // self.here.world_size

    def _least(self, needed: Callable[[Job], int]) -> int:
        return min(map(needed, self.jobs))


def snapshots_of(settings: Checkpoint) -> int:
    """How often the state lies in memory at the end of a snapshot: the last two of them, with their copies.

    >>> snapshots_of(Checkpoint(non_persistent_save_interval=5, replication=True)), snapshots_of(Checkpoint())
    (4, 0)
    """
    folder = settings.non_persistent_local_ckpt_dir
    if settings.non_persistent_save_interval is None or folder and not in_memory(Path(folder)):
        return 0
    return 2 * (settings.replication_factor if settings.replication else 1)


@dataclass(frozen=True)
class Lack:
    """A memory that is too small. of: its name; by: layout -> needed bytes; free: bytes now; total: all bytes."""

    of: str
    needed: int
    by: Callable[[Layout], int]
    free: float
    total: float

    def __str__(self) -> str:
        return f"training needs at least {self.needed / 1e9:.1f} GB of {self.of}, and {self.free / 1e9:.1f} GB are free"


def _lacking(demand: Optional[Demand]) -> Optional[Lack]:
    """The memory that is too small; None if all suffice, or it is unknown."""
    if demand is None:
        return None
    memories = []
    if demand.jobs[0].device == "cuda":
        import torch

        at = demand.here.local_rank
        if at < torch.cuda.device_count():  # otherwise joining reports the problem
            memories.append((f"GPU {at}", demand.on_device, *torch.cuda.mem_get_info(at)))
    memories.append(("this machine's memory", demand.on_host, available_memory(None), total_memory()))
    for of, by, free, total in memories:
        if free is not None and (needed := by(demand.layout)) > free:
            return Lack(of, needed, by, free, total or free)
    return None


def _refusal(demand: Demand, lack: Lack) -> SettingsError:
    job, layout, ranks = demand.jobs[0], demand.layout, demand.here.local_world_size or 1
    who = "this rank" if "GPU" in lack.of else several(ranks, "rank")
    why = f"predicted for weights, gradients, optimizer state and activations of {who}; a run needs more than that"
    if demand.snapshots and "GPU" not in lack.of:
        size = demand.in_snapshots(ranks) / 1e9
        why += f"; {size:.1f} GB of it are snapshots in memory (--non-persistent-save-interval)"
    error = SettingsError(str(lack), why, f"{_what_fits(demand, lack, job, layout)}; {OVERCOMMIT} starts it anyway")
    error.about = "too little memory"  # free bytes differ between ranks
    return error


def _what_fits(demand: Demand, lack: Lack, job: Job, layout: Layout) -> str:
    """Changes of a setting after which it fits."""
    from megatron.planner.problems import remedies  # imports readers of checkpoints

    length = job.facts.settings.seq_length
    while (length := length // 2) >= 64:
        facts = replace(job.facts, settings=replace(job.facts.settings, seq_length=length))
        shorter = replace(demand, jobs=tuple(replace(one, facts=facts) for one in demand.jobs))
        by = shorter.on_device if "GPU" in lack.of else shorter.on_host
        if by(layout) <= lack.free:
            return remedies(job, layout, lack.by, lack.free, (f"--seq-length {length} ({by(layout) / 1e9:.1f} GB)",))
    return remedies(job, layout, lack.by, lack.free)


def has_driver(wanted: str) -> bool:
    """Whether training may run on a GPU. Needs no torch. wanted: --device"""
    return wanted != "cpu" and any(Path(driver).exists() for driver in DRIVERS)


def _has_gpu(wanted: str) -> bool:
    """Whether training will run on a GPU; imports torch only if there is a driver."""
    if not has_driver(wanted):
        return False
    import torch

    return torch.cuda.is_available()
