# SPDX-License-Identifier: Apache-2.0
"""What a supervised job runs on, and how it is laid out again when it loses ranks or nodes. Needs no torch.

The global batch stays the same. If possible, tensor and pipeline parallel sizes are kept and only the data parallel size
shrinks. Otherwise they get smaller too: the planner chooses the layout with the most ranks that fits in memory, and among
these the one nearest to the previous layout. A checkpoint loads into any layout.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Optional

from megatron.errors import Failure, SettingsError, node_name
from megatron.guard import slurm
from megatron.guard.command import (
    MASTER,
    NODE_RANK,
    NODES,
    RANKS,
    config_of,
    in_place,
    is_srun,
    ranks_of,
    script_at,
    shape_of,
    value_of,
    with_flag,
    with_ranks,
    without,
)
from megatron.guard.nodes import Nodes
from megatron.planner.layout import Layout
from megatron.planner.memory import peaks
from megatron.planner.target import cluster_of, planned_job
from megatron.settings.schema import Config
from megatron.training.rules import check, resolve

TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SPLITS = (
    "--pipeline-schedule",
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--pipeline-stage-layers",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
)
QUEUED = "back in the queue"  # of SLURM: the outcome of a job that it starts again


class WhatIsLeft(NamedTuple):
    """What a job runs on after nodes were left out: `action` is spare, fewer, queue or none."""

    action: str
    change: str = ""  # how the next attempt differs
    outcome: Optional[str] = None  # why there is none


class JobPlacement:
    """The command of a job, its ranks and nodes, which shrink when nodes fail.

    least_ranks, least_nodes: with how few it may continue; None: with no fewer
    may_queue:                whether SLURM may start it again later

    With `least_nodes` or `spare_nodes` outside of SLURM, each node has its own supervisor, and they agree on places
    (`guard.node_agreement`): `is_one_of_several`.
    Raises SettingsError if the job has fewer ranks than `least_ranks`, or `spare_nodes` cannot be left.
    """

    def __init__(
        self,
        command: list[str],
        nodes: Nodes,
        least_ranks: Optional[int] = None,
        least_nodes: Optional[int] = None,
        spare_nodes: int = 0,
        may_queue: bool = False,
        log: Callable[[str], None] = print,
    ):
        self.command, self.nodes, self.log = command, nodes, log
        self.least_ranks, self.least_nodes, self.may_queue = least_ranks, least_nodes, may_queue
        self.ranks = ranks_of(command)
        if least_ranks and least_ranks > self.ranks:
            raise SettingsError(f"--min-world-size {least_ranks} is more than the job's {self.ranks} ranks")
        self.whole, self.is_one_of_several = command, False
        self.usable: dict[int, int] = {}  # nodes that are there -> those that the job can use
        if (spare_nodes or least_nodes) and not is_srun(command):
            self._check_place(spare_nodes)
        elif spare_nodes:
            self._leave(spare_nodes)

    def _leave(self, spares: int) -> None:
        """Use fewer nodes than the allocation has."""
        allocated, (nodes, each) = len(slurm.nodes()), shape_of(self.command)
        if not slurm.job():
            raise SettingsError(
                "--spare-nodes with srun leaves nodes of a SLURM allocation idle, and this is no SLURM job",
                do="supervise ... --spare-nodes N -- srun ... in a batch script (docs/survival.md)",
            )
        if not 0 < spares < allocated:
            raise SettingsError(f"--spare-nodes {spares}: the allocation has {allocated} nodes")
        if nodes > allocated - spares:
            self.ranks = (allocated - spares) * each
            self.command = with_ranks(self.command, self.ranks)

    def _check_place(self, spares: int) -> None:
        """Raise SettingsError if the command does not say which of several nodes this is."""
        words = self.command[: script_at(self.command)]
        given = {flags[0]: value_of(words, *flags) for flags in (NODES, NODE_RANK, MASTER)}
        if missing := [flag for flag, value in given.items() if value is None]:
            raise SettingsError(
                f"--spare-nodes and --min-nodes: the command has no {' and no '.join(missing)}",
                "without srun each node has a supervisor of its own, with the same command but for --node-rank",
                "supervise ... -- python -m megatron.tools.launch --nnodes N --node-rank R --master-addr HOST "
                "--nproc-per-node G ... (docs/survival.md)",
            )
        nodes, rank = given[NODES[0]], given[NODE_RANK[0]]
        for flag, value in ((NODES[0], nodes), (NODE_RANK[0], rank)):
            if not value.isdecimal():
                raise SettingsError(f"{flag} {value}: --spare-nodes and --min-nodes need a number")
        if int(rank) >= int(nodes) + spares:
            raise SettingsError(
                f"--node-rank {rank}: the job has {nodes} nodes and {spares} spare ones",
                do=f"--node-rank 0 to {int(nodes) + spares - 1}, a number for each node; --spare-nodes for more",
            )
        if self.least_nodes and self.least_nodes > int(nodes):
            raise SettingsError(f"--min-nodes {self.least_nodes} is more than --nnodes {nodes}")
        self.is_one_of_several = True

    def usable_nodes(self, available: int) -> int:
        """On how many of so many nodes the whole job, where it has more, can go on; 0: on none."""
        if available not in self.usable:
            self.usable[available] = self._usable_nodes(available)
        return self.usable[available]

    def _usable_nodes(self, available: int) -> int:
        nodes, each = shape_of(self.whole)
        if not self.least_nodes or available < self.least_nodes:
            return 0
        try:
            ranks, _ = fewer_ranks(self.whole, nodes * each, self.least_nodes * each, available * each, several=True)
        except Failure as failure:
            self.log(f"no fewer nodes: {failure}")
            return 0
        return ranks // each

    def take(self, rank: int, nodes: int, address: Optional[str]) -> None:
        """Take a place in the job: the command for it. nodes: in all; address: of the first one, None: as given"""
        wanted, each = shape_of(self.whole)
        self.ranks, words = nodes * each, self.whole
        if nodes < wanted:
            _, words = fewer_ranks(self.whole, wanted * each, nodes * each, nodes * each, several=True)
        self.command = in_place(words, nodes, rank, address)

    def words(self, command: list[str]) -> list[str]:
        """A command with the excluded nodes left out."""
        return self.nodes.placed(command)

    def failing(self, gpus: Optional[int] = None) -> dict[str, str]:
        """Node -> reason, for each that fails its check. gpus: of each node, if that is known"""
        return self.nodes.failing(self.command, gpus)

    def gpus_of_a_node(self) -> int:
        return shape_of(self.command)[1]

    def without(self, bad: dict[str, str]) -> WhatIsLeft:
        """Exclude nodes, and choose what the job runs on now. bad: node -> reason"""
        names, why = " ".join(bad), next(iter(bad.values()))
        self.log(f"nodes that fail the check: {names} ({why})")
        self.nodes.exclude(bad)
        if self.is_one_of_several:
            if node_name() in bad:
                return WhatIsLeft("none", outcome=f"given up on this node: {names} failed ({why})")
            return WhatIsLeft("spare", f"without {names}")
        left, on_srun, each = self.nodes.left(self.command), is_srun(self.command), self.gpus_of_a_node()
        least = self.least_ranks or (self.least_nodes or 0) * each
        if on_srun and self.nodes.suffice(self.command):
            return WhatIsLeft("spare", f"without {names}, on a spare node")
        if least and self.shrink(least, len(left) * each if on_srun else None):
            return WhatIsLeft("fewer", f"without {names}, on {self.ranks} ranks")
        if self.may_queue and self.requeue(self.nodes.all_excluded()):
            return WhatIsLeft("queue", outcome=f"{QUEUED}, without {names} ({why})")
        do = "--spare-nodes, --min-nodes, --on-preempt requeue" if on_srun else "--min-world-size"
        return WhatIsLeft("none", outcome=f"given up: {names} failed ({why}), and nothing is left to run on ({do})")

    def requeue(self, excluded: Sequence[str] = ()) -> bool:
        """Put the job back into SLURM's queue; False if that is impossible."""
        number = slurm.job()
        if number is None:
            self.log("--on-preempt requeue: this is no SLURM job")
        return number is not None and slurm.requeue(number, excluded)

    def shrink(self, least: int, most: Optional[int] = None) -> bool:
        """Change the layout to fewer ranks; False if that is impossible. most: ranks for which there are devices"""
        try:
            fewer, command = fewer_ranks(self.command, self.ranks, least, most)
        except Failure as failure:
            self.log(f"no fewer ranks: {failure}")
            return False
        then = config_of(command).parallel
        self.log(
            f"continuing with {fewer} ranks instead of {self.ranks}, at the same global batch: tp "
            f"{then.tensor_model_parallel_size} pp {then.pipeline_model_parallel_size}"
        )
        self.command, self.ranks = command, fewer
        return True


def fewer_ranks(
    words: list[str], now: int, least: int, most: Optional[int] = None, several: bool = False
) -> tuple[int, list[str]]:
    """The largest number of ranks below `now` for the job with the same global batch, and the command for it.

    most: ranks for which there are devices. several: the supervisors of several nodes have agreed on whole nodes
    Raises SettingsError if no number down to `least` works, with the reasons for the largest.
    """
    config = config_of(words)
    if config is None:
        raise SettingsError("the settings of the job cannot be read, so it cannot be laid out again")
    nodes, each = shape_of(words)
    if nodes > 1 and not is_srun(words) and not several:
        raise SettingsError(
            f"this is one of {nodes} machines, and a supervisor on each cannot agree on fewer",
            do="--min-nodes, with which they do; or one supervisor: supervise ... -- srun ... torchrun ...",
        )
    size = _resolved(config, now).batch.global_batch_size
    if config.planner.parallel_plan:  # it is for the previous number of ranks
        words = [*without(words, "--parallel-plan"), *Layout.of(_resolved(config, now), now).flags()]
        config = config_of(words)
    asserted = ("--data-parallel-size", "--local-batch-size", "--gradient-accumulation-steps")
    words = with_flag(without(words, *asserted), "--global-batch-size", str(size))
    divisible = value_of(words, *RANKS) is not None  # the ranks are on one machine
    most = now - 1 if most is None else min(now - 1, most)
    numbers = [ranks for ranks in range(most, least - 1, -1) if ranks % each == 0 or ranks < each and divisible]
    why: list[str] = []
    for ranks in numbers:
        problems = check(config_of(words), ranks)
        if not problems:
            return ranks, with_ranks(words, ranks)
        why = why or problems
    need = needed(config, now)
    for ranks in numbers:
        for changed in _layouts(words, config, ranks):
            then = config_of(changed)
            if then is None or check(then, ranks):
                continue
            if fits(then, ranks, need):
                return ranks, with_ranks(changed, ranks)
            p = then.parallel
            why.append(
                f"tp {p.tensor_model_parallel_size} pp {p.pipeline_model_parallel_size} on {ranks} ranks would need "
                f"{needed(then, ranks) / 1e9:.0f} GB of each"
            )
    raise SettingsError(
        f"no layout on {least} to {most} ranks keeps the global batch of {size}",
        "; ".join(why[:4]),
        "see --min-world-size, --global-batch-size and --micro-batch-size",
    )


def _layouts(words: list[str], config: Config, ranks: int) -> Iterator[list[str]]:
    """The command with smaller tensor and pipeline parallel sizes that divide this many ranks, the largest first."""
    p = config.parallel
    pairs = [
        (tp, pp)
        for tp in range(1, p.tensor_model_parallel_size + 1)
        for pp in range(1, p.pipeline_model_parallel_size + 1)
        if ranks % (tp * pp * p.context_parallel_size) == 0
    ]
    for tp, pp in sorted(pairs, key=lambda pair: (-pair[0] * pair[1], -pair[0])):
        changed = words if pp == p.pipeline_model_parallel_size else without(words, *SPLITS)
        yield with_flag(with_flag(changed, TP, str(tp)), PP, str(pp))


def fits(config: Config, ranks: int, enough: float) -> bool:
    """Whether a rank's memory suffices: the device's, or the memory that the job needed before (`enough`), if larger."""
    cluster, _ = cluster_of(_on(config, ranks))
    return needed(config, ranks) <= max(enough, cluster.device.usable_bytes)


def needed(config: Config, ranks: int) -> float:
    """Bytes of the fullest rank; 0 if the planner has no estimate for such settings."""
    try:
        config = _resolved(config, ranks)
        cluster, _ = cluster_of(_on(config, ranks))
        job, layout = planned_job(config, cluster)
        return max(peaks(job, layout, cluster.device))
    except (Failure, ValueError):
        return 0.0


def _resolved(config: Config, ranks: int) -> Config:
    """The settings on this many ranks, with the smallest micro-batch if the job chooses it itself."""
    return resolve(replace(config, batch=config.batch.smallest()), ranks)


def _on(config: Config, ranks: int) -> Config:
    return replace(config, planner=replace(config.planner, world_size=ranks, local_world_size=None))
