# SPDX-License-Identifier: Apache-2.0
"""Search all layouts of a job on a cluster: which of them fit, their speed, and why the others do not fit.

The search covers the full grid: tp, pp, model chunks, schedule, sequence parallel, micro-batch, recomputation, ZeRO stage,
sharding degree, offload. It begins with the layouts that have the least work, and ends where the work alone takes longer
than the best plans: of 2.5 million layouts of a mixture an eighth is evaluated. Figures that do not depend on inner
choices are computed outside their loops. The best plans are then refined: layers without recomputation, uneven stages.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Optional

from megatron.model.facts import Facts
from megatron.model.layer_ops import ACTIVATION, ATTENTION, CORE, LAYER, NORM, CoreAttention, RankSetup
from megatron.mpu.axis_sizes import ranks_together
from megatron.mpu.expert_libraries import DispatchSizes, library_problem
from megatron.mpu.placement import Table
from megatron.pipeline.schedule import SCHEDULES, TRAINING, v_shaped
from megatron.planner import memory, speed
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.planner.plans import (
    MOST_STATE_FEATURES,
    Fastest,
    Plan,
    Rejected,
    SearchedPlans,
    Shortlist,
    best_first,
    different_plans,
    features,
    simplest,
    state_features,
)
from megatron.planner.speed import split_even
from megatron.planner.stage_cut import fastest, in_stages
from megatron.planner.step_communication import StepCommunication, step_communication
from megatron.settings.hashed_once import hashed_once
from megatron.settings.schema import Recompute
from megatron.telemetry.progress import followed

NOT_OFFLOADED = (0.0, 0.0, False)
REFINED = 40  # number of best plans to refine


@hashed_once
@dataclass(frozen=True)
class Space:
    """The search space. A value fixes an axis; None leaves it free.

    cp_comm, cp_levels: --cp-comm-type of all layers, and the sizes of the levels of a2a+p2p
    replicas: copies of each shard, as in --dp-degree; chunk_layers: layers of a model chunk
    offload: (fraction of optimizer state in host memory, fraction on disk, whether parameter shards are in host memory)
    overlap: whether data parallel communication overlaps with computation
    library: of --moe-flex-dispatcher-backend, and the width of tokens: it serves some sizes of ep
    ranks_per_node: between which links are fast, if experts' tokens are sent in hops; 0: they are not
    tolerance: plans are equally fast if their times differ by less than this share
    refusal: why a layout's sizes of tp, cp, pp, ep and etp cannot train this job, or ""; None: all can
    """

    global_batch: Optional[int] = None
    max_global_batch: Optional[int] = None
    tp: Optional[int] = None
    cp: Optional[int] = None
    cp_comm: Optional[str] = None
    cp_levels: Optional[tuple[int, ...]] = None
    pp: Optional[int] = None
    micro_batch_size: Optional[int] = None
    zero: Optional[int] = None
    dp: Optional[int] = None
    replicas: Optional[int] = None
    sp: Optional[bool] = None
    shard: Optional[int] = None
    schedule: Optional[str] = None
    chunks: Optional[int] = None
    chunk_layers: Optional[int] = None
    stage_layers: Optional[str] = None
    recompute: Optional[Recompute] = None
    offload: Optional[tuple[float, float, bool]] = None
    overlap: Optional[bool] = None
    ep: Optional[int] = None
    etp: Optional[int] = None
    ranks_per_node: int = 0
    library: tuple[Optional[str], int] = (None, 0)
    only: tuple[Layout, ...] = ()  # these layouts, instead of the grid
    host_bytes: Optional[int] = None  # host memory per rank
    tolerance: float = 0.0
    refusal: Optional[Callable[[Layout], str]] = None


def search(job: Job, cluster: Cluster, space: Space, keep: int = 200) -> SearchedPlans:
    """All plans of `job` (with the global batch of `space`) on `cluster`; returns the `keep` best and closest ones."""
    if space.only:
        return _of(job, cluster, space)
    result = SearchedPlans()
    good, close = Fastest(keep, space.tolerance), Shortlist(keep)
    bases = list(_bases(job, cluster, space, result))
    least = [speed.least_seconds(sized, base, cluster) / sized.global_batch for base, sized in bases]
    result.num_layouts = sum(_number_of_choices(base.dp, base.cp, space) for base, _ in bases)
    in_order = sorted(range(len(bases)), key=least.__getitem__)
    for index in followed(in_order, "searching layouts", len(bases), "groups"):
        if least[index] > good.worst:
            break
        _try_shardings(*bases[index], cluster, space, result, good, close)
    best = best_first(_plan(*entry, cluster) for entry in good.entries())
    refined = [better for plan in best[:REFINED] for better in _refined(plan, cluster, space)]
    plans = best_first(best + refined)
    if plans:
        chosen, result.alike = simplest(plans, space.tolerance) if space.tolerance else (plans[0], 1)
        result.fastest, result.plans = plans[0], different_plans([chosen, *plans])
    result.rejected = [Rejected(*entry) for entry in close.entries()]
    return result


def _of(job: Job, cluster: Cluster, space: Space) -> SearchedPlans:
    """Evaluate the layouts in `space.only`."""
    count = len(space.only)
    result, most = SearchedPlans(num_layouts=count, evaluated=count), space.global_batch or space.max_global_batch
    for layout in space.only:
        sized = replace(
            job, global_batch=most // (layout.micro_batch_size * layout.dp) * layout.micro_batch_size * layout.dp
        )
        plan, lacking = evaluate(sized, layout, cluster)
        result.plans += [plan] if plan else []
        result.rejected += [lacking] if lacking else []
    result.too_large = len(result.rejected)
    result.plans = best_first(result.plans)
    result.fastest = result.plans[0] if result.plans else None
    result.rejected.sort(key=lambda one: one.over)
    return result


# The grid -------------------------------------------------------------------------------------------------------------


def _bases(job: Job, cluster: Cluster, space: Space, result: SearchedPlans) -> Iterator[tuple[Layout, Job]]:
    """Layouts without sharding, each with the job at its global batch."""
    world, experts = cluster.world_size, job.facts.experts
    for tp in _tensor_sizes(job, cluster, space, result):
        for cp, cp_heads, gathers in _context_sizes(job, tp, world // tp, space):
            for pp in _pipeline_sizes(job, world // (tp * cp), space, result):
                dp = world // (tp * cp * pp)
                if space.dp not in (None, dp):
                    continue
                grids = _grids(experts, Layout(tp, pp, dp, cp=cp, cp_heads=cp_heads, gathers=gathers), space, result)
                for micro, batch in _batches(job, dp, space, result):
                    sized = replace(job, global_batch=batch)
                    for schedule, chunks, layers in _arrangements(job, pp, batch // (micro * dp), space):
                        for sp in (False, True) if tp > 1 and job.facts.seq_length // cp % tp == 0 else (False,):
                            if tp > 1 and space.sp not in (None, sp):
                                continue
                            base = dict(sp=sp, stage_layers=layers, cp=cp, cp_heads=cp_heads, gathers=gathers)
                            one = partial(Layout, tp, pp, dp, micro, chunks, schedule, **base)
                            for own in grids:
                                share = one(**own).rank_setup(job)
                                for recompute in _recomputations(share, job.facts, space.recompute):
                                    yield one(recompute=recompute, **own), sized


def _grids(experts: Table, layout: Layout, space: Space, result: SearchedPlans) -> list[dict[str, Optional[int]]]:
    """`_expert_sizes` that can train the job."""
    grids = _expert_sizes(experts, layout, space)
    if not grids:
        sizes = f"tp {layout.tp} cp {layout.cp} pp {layout.pp}"
        result.impossible.append(f"{sizes}: ep x etp does not divide its experts or ranks")
    if space.refusal is None:
        return grids
    layouts = [replace(layout, **own) for own in grids]
    refused = [space.refusal(one) for one in layouts]
    result.impossible += dict.fromkeys(f"{one.short()}: {why}" for one, why in zip(layouts, refused) if why)
    return [own for own, why in zip(grids, refused) if not why]


def _expert_sizes(experts: Table, layout: Layout, space: Space) -> list[dict[str, Optional[int]]]:
    """The sizes of ep and etp for a layout of dense weights: ep that divides ranks and experts, with whole experts; without
    ep also as many parts of each as of dense weights.
    """
    if not experts:
        return [{}]
    number = math.gcd(*(one.shape[one.cut["ep"]] for one in experts.values() if "ep" in one.cut))
    ranks = layout.dp * layout.cp * layout.tp
    several = [space.ep] if space.ep else divisors(math.gcd(number, ranks))
    whole = 1 if layout.tp > 1 else None  # None: as many parts as of dense weights
    parts = lambda ep: [space.etp] if space.etp else list(dict.fromkeys([None, whole] if ep == 1 else [whole]))
    inner = lambda ep, etp: ranks_together(ep, etp or layout.tp, space.ranks_per_node) if ep > 1 else 0
    hops = inner if space.ranks_per_node else lambda *sizes: 0
    grids = [dict(ep=ep, etp=etp, ep_inner=hops(ep, etp)) for ep in several for etp in parts(ep)]
    backend, width = space.library
    serves = lambda ep, inner: not library_problem(backend, DispatchSizes(ep, inner, number // ep, width))
    grids = [grid for grid in grids if serves(grid["ep"], grid["ep_inner"])]
    return [grid for grid in grids if _divides(experts, replace(layout, **grid))]


def _divides(experts: Table, layout: Layout) -> bool:
    """Whether ep and etp divide the ranks of a stage, and these experts."""
    parts = lambda axes: math.prod(getattr(layout.cuts, axis) for axis in axes)
    even = (one.shape[dim] % parts(axes) == 0 for one in experts.values() for dim, axes in one.cut_dims)
    return layout.possible and all(even)


SHARED_TOKENS = 4096  # a search uses context parallelism only if each rank has at least this many tokens of a sequence


def _context_sizes(job: Job, tp: int, ranks: int, space: Space) -> list[tuple[int, int, bool]]:
    """(cp, cp_heads, gathers) of layouts: all for long sequences, else one rank."""
    s, options = job.facts.seq_length, []
    for cp in [space.cp] if space.cp else divisors(ranks):
        if ranks % cp:
            continue
        if cp > 1 and (s % (2 * cp) or not space.cp and s // cp < SHARED_TOKENS):
            continue
        options += [(cp, *way) for way in _sharing_ways(job, tp, cp, space)] if cp > 1 else [(1, 1, False)]
    return options


def _sharing_ways(job: Job, tp: int, cp: int, space: Space) -> list[tuple[int, bool]]:
    """(cp_heads, gathers): a ring, and an exchange of rows for heads, among as many ranks as the heads allow. A gather
    holds the keys and values of all ranks and hides no messages: it is only planned if the settings say so.
    """
    able = [n for n in divisors(cp) if n > 1 and job.facts.shares_heads(tp, n)]
    if space.cp_levels:
        able = [n for n in able if space.cp_levels == (n, cp // n)]
    exchanges = {"a2a": [n for n in able if n == cp], "a2a+p2p": [n for n in able if n < cp]}
    ways = {"p2p": [(1, False)], "allgather": [(1, True)]} | {
        name: [(n, False) for n in sizes if n == max(sizes)] for name, sizes in exchanges.items()
    }
    if space.cp_comm is not None:
        return ways[space.cp_comm]
    return ways["p2p"] + (ways["a2a"] or ways["a2a+p2p"])


@lru_cache(maxsize=65536)
def _recomputations(share: RankSetup, facts: Facts, given: Optional[Recompute]) -> list[Recompute]:
    """The choices of recomputation: attention if the model has some, softmax(q k) v if its kernel stores scores, and norms
    and activations, which cost hardly any time.
    """
    if given is not None:
        return [given]
    ops = (op for kind in facts.layer_kinds for op in facts.layer_ops(share, kind))
    cores = [op for op in ops if isinstance(op, CoreAttention)]
    useful = set(facts.recomputes) | {LAYER}
    useful -= {CORE} if all(core.kernel == "flash" for core in cores) else set()
    useful -= set() if cores else {ATTENTION}
    cheap = [module for module in (CORE, NORM, ACTIVATION) if module in useful]
    choices = [Recompute(), *map(Recompute, (CORE, ATTENTION, LAYER))]
    choices += [Recompute(CORE, recompute_modules=cheap)] if ACTIVATION in useful else []
    return [one for one in choices if useful.issuperset(one.modules)]


def _tensor_sizes(job: Job, cluster: Cluster, space: Space, result: SearchedPlans) -> list[int]:
    sizes = []
    for tp in [space.tp] if space.tp else divisors(cluster.world_size):
        if tp > cluster.local_size and not space.tp:
            result.impossible.append(f"tp {tp} and more: beyond the {cluster.local_size} ranks of a node")
            break
        bad = [f"{value} {name}" for name, value in job.facts.divisible_by_tp().items() if value % tp]
        if bad or cluster.world_size % tp:
            result.impossible.append(
                f"tp {tp}: {' and '.join(bad) or f'{cluster.world_size} ranks'} cannot be divided by it"
            )
        else:
            sizes.append(tp)
    return sizes


def _pipeline_sizes(job: Job, ranks: int, space: Space, result: SearchedPlans) -> Iterator[int]:
    for pp in [space.pp] if space.pp else divisors(ranks):
        if ranks % pp:
            continue
        if pp > job.facts.num_layers:
            reason = f"pp {pp} and more: there are {job.facts.num_layers} layers"
            result.impossible += [reason] * (reason not in result.impossible)
            return
        yield pp


def _batches(job: Job, dp: int, space: Space, result: SearchedPlans) -> Iterator[tuple[int, int]]:
    """(micro-batch, global batch) that are possible on `dp` data parallel ranks."""
    most = space.global_batch or space.max_global_batch
    if dp > most or (space.global_batch and most % dp):
        reason = f"dp {dp}: a global batch of {most} cannot be divided by it"
        result.impossible += [reason] * (reason not in result.impossible)
        return
    for micro in [space.micro_batch_size] if space.micro_batch_size else _powers(most // dp):
        batch = most if space.global_batch else most // (micro * dp) * micro * dp
        if batch and batch % (micro * dp) == 0:
            yield micro, batch


def _arrangements(job: Job, pp: int, num_microbatches: int, space: Space) -> Iterator[tuple[str, int, Optional[str]]]:
    """(schedule, chunks, layers of each stage or None for even)."""
    layers = job.facts.num_layers
    if pp == 1:
        if space.chunks in (None, 1) and space.stage_layers in (None, str(layers)):
            yield "1f1b", 1, None
        return
    if space.stage_layers:
        yield from _with_stages(space.stage_layers, pp, space)
        return
    for name in [space.schedule] if space.schedule else TRAINING:
        low, high = SCHEDULES[name].chunks
        if name in ("1f1b", "gpipe"):
            high = 1
        for chunks in range(low, (high or min(8, layers // pp)) + 1):
            if space.chunks not in (None, chunks) or space.chunk_layers not in (None, layers / (pp * chunks)):
                continue
            if layers % (pp * chunks) == 0:
                if chunks == 1 or name != "interleaved" or num_microbatches >= pp:
                    yield name, chunks, None
            elif chunks == 1 and name in ("1f1b", "zb-h1"):
                yield name, 1, _even_stages(pp, layers)


@lru_cache(maxsize=4096)
def _even_stages(pp: int, layers: int) -> str:
    return ",".join(map(str, split_even([0.0] * pp, layers)))


def _with_stages(layers: str, pp: int, space: Space) -> Iterator[tuple[str, int, str]]:
    """`_arrangements` with the given stages."""
    stages = layers.count(",") + 1
    if stages % pp == 0 and space.chunks in (None, stages // pp):
        for name in [space.schedule] if space.schedule else ["1f1b", "zb-h1"] if stages == pp else ["interleaved"]:
            yield name, stages // pp, layers


def _try_shardings(base: Layout, job: Job, cluster: Cluster, space: Space, result: SearchedPlans, good, close) -> None:
    """Evaluate the base with each way to shard or offload its state, unless its passes alone are too slow."""
    work, num_microbatches, count = speed.passes(job, base, cluster), base.num_microbatches(job), features(base)
    if work.length / job.global_batch >= good.limit(*range(count, count + MOST_STATE_FEATURES + 1)):
        return
    device, ranks = cluster.device, _fullest(base, job)
    room: list[int] = []
    for rank in ranks:
        room.append(device.usable_bytes - sum(memory.step_entries(job.at_fullest, base, device, rank).values()))
        if -room[-1] >= close.limit:  # too large by the passes alone
            choices = _number_of_choices(base.dp, base.cp, space)
            result.evaluated, result.too_large = result.evaluated + choices, result.too_large + choices
            return
    for (zero, shard, offload), held, host, communication in _options(base, job, cluster, space, tuple(ranks)):
        result.evaluated += 1
        over, rank = max((own - free, rank) for own, free, rank in zip(held, room, ranks))
        away = host - space.host_bytes if space.host_bytes else 0
        if over > 0 or away > 0:
            result.too_large += 1
            if max(over, away) < close.limit:
                close.offer(
                    max(over, away),
                    _shared(base, zero, shard, offload, space, device),
                    max(over, away),
                    rank,
                    away > over,
                )
            continue
        own = count + state_features(zero, shard, base.weight_ranks, offload)
        limit = good.limit(own)
        if work.length / job.global_batch >= limit:
            continue
        once = communication()
        if (work.length + once.after_reductions) / job.global_batch >= limit:
            continue
        cost = speed.seconds(work, base, num_microbatches, once) / job.global_batch
        if cost < limit:
            good.offer(
                own, cost, _shared(base, zero, shard, offload, space, device), job, over + device.usable_bytes, rank
            )


def _options(base: Layout, job: Job, cluster: Cluster, space: Space, ranks: tuple[int, ...]) -> list[tuple]:
    """For each sharding of the state: (choice, bytes of each rank, most bytes on the host, function for the communication
    once per step).
    """
    number, one = base.num_microbatches(job), replace(base, micro_batch_size=1, recompute=Recompute())
    return _options_of(one, replace(job, global_batch=number * base.dp), cluster, space, ranks)


@lru_cache(maxsize=4096)
def _options_of(base: Layout, job: Job, cluster: Cluster, space: Space, ranks: tuple[int, ...]) -> list[tuple]:
    state, single, options = _only_state(base), replace(job, global_batch=base.dp), []
    if job.ordered:  # gradients of passes wait for each other
        state, single = base, job
    for (zero, shard, offload), *held in _held(state, single, cluster.device, space, ranks):
        # The number of micro-batches counts from ZeRO 2 on, and the order of the passes with ZeRO 3.
        layout = _shared(base if zero == 3 else state, zero, shard, offload, space, cluster.device)
        communication = partial(_communication, layout, job if zero >= 2 else single, cluster)
        options.append(((zero, shard, offload), *held, communication))
    return options


def _only_state(base: Layout) -> Layout:
    """The layout with the same state on each rank, for caches: without what the passes alone depend on."""
    if SCHEDULES[base.schedule].stages is v_shaped:
        schedule = "zb-v"
    else:
        schedule = "interleaved" if base.chunks > 1 else "1f1b"
    return replace(base, schedule=schedule, cp_heads=1, gathers=False, ep_inner=0)


@lru_cache(maxsize=4096)
def _held(base: Layout, job: Job, device: Device, space: Space, ranks: tuple[int, ...]) -> list[tuple]:
    """For each sharding of the state that is possible: (choice, bytes of each rank, most bytes on the host)."""
    options = []
    for choice in _state_choices(base, space):
        layout = _shared(base, *choice, space, device)
        if layout.possible:
            held = [memory.static_memory(job, layout, rank) for rank in ranks]
            most = max(sum(away.values()) for _, away in held)
            options.append((choice, [sum(own.values()) for own, _ in held], most))
    return options


@lru_cache(maxsize=65536)
def _communication(layout: Layout, job: Job, cluster: Cluster) -> StepCommunication:
    return step_communication(job, layout, cluster)


def _shared(base: Layout, zero: int, shard: int, offload: float, space: Space, device) -> Layout:
    overlap = base.weight_ranks > 1 and device.kind == "cuda" if space.overlap is None else space.overlap
    _, disk, parameters = space.offload or NOT_OFFLOADED
    return replace(base, zero=zero, shard=shard, offload=offload, disk=disk, param_offload=parameters, overlap=overlap)


def _plan(layout: Layout, job: Job, size: int, rank: int, cluster: Cluster) -> Plan:
    return Plan(layout, job, speed.step(job, layout, cluster), size, rank)


@lru_cache(maxsize=4096)
def _number_of_choices(dp: int, cp: int, space: Space) -> int:
    return len(list(_state_choices(Layout(dp=dp, cp=cp), space)))


def _state_choices(base: Layout, space: Space) -> Iterator[tuple[int, int, float]]:
    shards = [n for n in divisors(base.dp) if space.shard in (None, n)]
    for zero in [space.zero] if space.zero is not None else range(4):
        # On one rank, a requested ZeRO stage has nothing to divide.
        alone = base.weight_ranks == 1 and (space.zero or space.shard)
        for n in [1] if zero == 0 and space.shard in (None, 1) else shards if zero else []:
            shard = 1 if zero == 0 else n * base.cp
            if zero and shard == 1 and not alone or space.replicas not in (None, base.dp // n):
                continue
            if space.offload is None:
                yield zero, shard, 0.0
                yield zero, shard, 1.0
            elif zero == 3 or not space.offload[2]:
                yield zero, shard, space.offload[0]


def _fullest(layout: Layout, job: Job) -> list[int]:
    """Candidates for the fullest pipeline rank: the first has most micro-batches, the last the loss, others more layers."""
    pipeline = layout.pipeline(job.facts.num_layers)
    sizes = [len(layers) for layers in pipeline.layers]
    heaviest = pipeline.stages[max(range(len(sizes)), key=sizes.__getitem__)][0]
    return sorted({0, layout.pp - 1, heaviest, min(1, layout.pp - 1)})


# Refinement -----------------------------------------------------------------------------------------------------------


def evaluate(job: Job, layout: Layout, cluster: Cluster) -> tuple[Optional[Plan], Optional[Rejected]]:
    """Evaluate one layout: its plan, or why it does not fit."""
    totals = memory.peaks(job, layout, cluster.device)
    worst = max(range(layout.pp), key=totals.__getitem__)
    over = totals[worst] - cluster.device.usable_bytes
    plan = Plan(layout, job, speed.step(job, layout, cluster), totals[worst], worst)
    return (None, Rejected(layout, over, worst)) if over > 0 else (plan, None)


def _refined(plan: Plan, cluster: Cluster, space: Space) -> Iterator[Plan]:
    """Better variants of a plan: with layers spared from recomputation, or stages balanced by work."""
    spared = _spared(plan, cluster) if space.recompute is None else None
    balanced = _balanced(plan, cluster) if space.stage_layers is None and space.chunk_layers is None else None
    for better in (spared, balanced):
        if better and better.per_sample < plan.per_sample * 0.999:
            yield better


def _spared(plan: Plan, cluster: Cluster) -> Optional[Plan]:
    """The plan with the largest number of layers per stage spared from recomputation that fits in memory."""
    layout = plan.layout
    if layout.recompute.recompute_granularity is None:
        return None
    stages = layout.pipeline(plan.job.facts.num_layers).layers
    low, high, best = 0, max(map(len, stages)) - 1, None  # with all layers spared it is another plan
    while low < high:
        count = (low + high + 1) // 2
        exempt = ",".join(str(n) for layers in stages for n in layers[:count])
        spared, _ = evaluate(
            plan.job, replace(layout, recompute=replace(layout.recompute, no_recompute_layers=exempt)), cluster
        )
        if spared:
            low, best = count, spared
        else:
            high = count - 1
    return best


def _balanced(plan: Plan, cluster: Cluster) -> Optional[Plan]:
    """The plan with fewer layers on the stages of the embedding and the loss."""
    layout, job = plan.layout, plan.job
    if layout.pp == 1 or layout.recompute.no_recompute_layers:
        return None
    if len(job.facts.layer_kinds) > 1:  # layers with unequal work
        layers = fastest(job, layout, cluster)
        return evaluate(job, in_stages(layout, layers), cluster)[0] if layers != layout.stage_layers else None
    if layout.chunks > 1:
        return None
    one, first, last = (
        speed.stage_seconds(job, layout, cluster, *ends) for ends in ((False, False), (True, False), (False, True))
    )
    costs = [0.0] * layout.pp
    costs[0], costs[-1] = first / one - 1, last / one - 1
    layers = ",".join(map(str, split_even(costs, job.facts.num_layers)))
    return evaluate(job, replace(layout, stage_layers=layers), cluster)[0] if layers != layout.stage_layers else None


def divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _powers(most: int) -> list[int]:
    return [2**k for k in range(0, 7) if 2**k <= most]
