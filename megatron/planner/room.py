# SPDX-License-Identifier: Apache-2.0
"""Before ranks join: is there room for what this training is certain to need? Otherwise the kernel, or the device, ends it
in its first steps, without a word about which setting is too large.

What counts is a lower bound (`memory.certain`): estimates on the safe side would refuse what trains. Each rank decides from
the same settings, those of a node about all of them together, and before any of them takes memory. All ranks of one machine
come to the same, and end there. On several machines one may have too little while the others wait for it to join: then
ranks join first, and `training.build` ends all of them.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

from megatron.errors import SettingsError
from megatron.model.recipe import Recipe
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import certain
from megatron.planner.target import vocabulary_of
from megatron.settings import rank_env
from megatron.settings.schema import Config
from megatron.telemetry.figures import several
from megatron.telemetry.host_memory import available_memory, total_memory

MANY_TOKENS = 300_000  # a vocabulary whose files need not be read where even this one fits
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")  # without one of these torch sees no GPU
PATIENCE = 5  # seconds that the memory of a job which has just ended may take to come back
OVERCOMMIT = "--allow-memory-overcommit"


def check_room(config: Config, recipe: Recipe, log: Callable[[str], None] = print) -> Optional[SettingsError]:
    """Why a memory of this rank is too small, with what would fit: for all ranks to raise (`training.build`). Raised here
    where this machine has all of them. A note where too little is allowed.
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
    """What training is certain to need of the memories that this rank uses. jobs: those that it may be; state_alone: what a
    step adds follows from texts, not from settings.
    """

    jobs: tuple[Job, ...]
    layout: Layout
    here: rank_env.Ranks
    state_alone: bool = False

    @classmethod
    def of(
        cls, config: Config, recipe: Recipe, device: str, here: rank_env.Ranks, tokens: Optional[int] = None
    ) -> Optional["Demand"]:
        """tokens: of the vocabulary (default: those of its files). None where the model's facts cannot say."""
        try:
            layout = Layout.of(config, here.world_size)
            job = Job.of(config, recipe.facts(config, tokens or vocabulary_of(config)[0]), dp=layout.dp, device=device)
            open_ = config.precision.precision == "auto"  # measured later: bf16 may be what is faster
            jobs = (job, replace(job, precision="bf16")) if open_ else (job,)
            found = cls(jobs, layout, here, recipe.predicts(config) == "state")
            found.on_host(layout)
        except Exception:  # of facts of a user's own: an error is raised where they are needed
            return None
        return found

    def on_device(self, layout: Layout) -> int:
        """Bytes of this rank's GPU."""
        return self._least(lambda job: certain(job, layout, self._stage(self.here.rank), self.state_alone)[0])

    def on_host(self, layout: Layout) -> int:
        """Bytes of this machine's memory, of all its ranks."""
        first = self.here.rank - self.here.local_rank
        stages = [self._stage(first + local) for local in range(self.here.local_world_size or 1)]
        kinds = slice(1, 2) if self.jobs[0].device == "cuda" else slice(0, 2)
        return self._least(lambda job: sum(sum(certain(job, layout, at, self.state_alone)[kinds]) for at in stages))

    def _stage(self, rank: int) -> int:
        """The pipeline rank of a rank: its slowest axis."""
        return rank * self.layout.pp // self.here.world_size

    def _least(self, needed: Callable[[Job], int]) -> int:
        return min(map(needed, self.jobs))


@dataclass(frozen=True)
class Lack:
    """A memory that is too small. of: its name; by: layout -> bytes that it needs; free: bytes now; total: of all."""

    of: str
    needed: int
    by: Callable[[Layout], int]
    free: float
    total: float

    def __str__(self) -> str:
        return f"training needs at least {self.needed / 1e9:.1f} GB of {self.of}, and {self.free / 1e9:.1f} GB are free"


def _lacking(demand: Optional[Demand]) -> Optional[Lack]:
    """The memory that is too small; None where all suffice, or nobody can say."""
    if demand is None:
        return None
    found = []
    if demand.jobs[0].device == "cuda":
        import torch

        at = demand.here.local_rank
        if at < torch.cuda.device_count():  # otherwise joining says what is wrong
            found.append((f"GPU {at}", demand.on_device, *torch.cuda.mem_get_info(at)))
    found.append(("this machine's memory", demand.on_host, available_memory(None), total_memory()))
    for of, by, free, total in found:
        if free is not None and (needed := by(demand.layout)) > free:
            return Lack(of, needed, by, free, total or free)
    return None


def _refusal(demand: Demand, lack: Lack) -> SettingsError:
    job, layout, ranks = demand.jobs[0], demand.layout, demand.here.local_world_size or 1
    who = "this rank" if "GPU" in lack.of else several(ranks, "rank")
    said = f"predicted for weights, gradients, optimizer state and activations of {who}; a run takes more than that"
    error = SettingsError(str(lack), said, f"{_what_fits(demand, lack, job, layout)}; {OVERCOMMIT} starts all the same")
    error.about = "too little memory"  # free bytes are others on each rank
    return error


def _what_fits(demand: Demand, lack: Lack, job: Job, layout: Layout) -> str:
    """Changes of a setting after which it fits."""
    from megatron.planner.problems import remedies  # it imports what reads checkpoints

    length = job.facts.settings.seq_length
    while (length := length // 2) >= 64:
        facts = replace(job.facts, settings=replace(job.facts.settings, seq_length=length))
        shorter = replace(demand, jobs=tuple(replace(one, facts=facts) for one in demand.jobs))
        by = shorter.on_device if "GPU" in lack.of else shorter.on_host
        if by(layout) <= lack.free:
            return remedies(job, layout, lack.by, lack.free, (f"--seq-length {length} ({by(layout) / 1e9:.1f} GB)",))
    return remedies(job, layout, lack.by, lack.free)


def _has_gpu(wanted: str) -> bool:
    """Whether training will be on a GPU; torch is asked where it may see one."""
    if wanted == "cpu" or not any(Path(driver).exists() for driver in DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()
