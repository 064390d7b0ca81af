# SPDX-License-Identifier: Apache-2.0
"""Groups that members make by themselves: who is in which, in what order, under what name; nobody waits for ever."""

import itertools
import random
from collections import Counter, deque

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.errors import PeerLost
from megatron.mpu import collectives, groups
from megatron.mpu.initialize import join_job
from megatron.mpu.mesh import JOINED, Mesh, ranks_along, ranks_of
from megatron.pipeline.channels import channels, opening_rounds
from megatron.pipeline.schedule import looped, v_shaped
from megatron.pipeline.wire import open_channels
from megatron.planner.startup import count
from megatron.settings.schema import Kernels, Parallel

EXPERT_AXES = ("ep", "etp", "expert_dp", "expert_replicate", "expert_shard")
LEVELS = ("ep_counts", "cp_inner", "cp_outer", "ep_inner", "ep_outer")
AXES = ("pp", "replicate", "shard", "cp", "tp", "dp", "dp_cp", "tied", *EXPERT_AXES, *LEVELS)


def layouts(world: int):
    """Every division of so many ranks: keywords of `Mesh`."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    for tp, cp, pp, replicate in itertools.product(divisors, repeat=4):
        shard, rest = divmod(world, tp * cp * pp * replicate)
        if rest or not shard:
            continue
        stage, block = world // pp, shard * cp * tp  # ranks of a stage, and those that divide optimizer state
        for ep, etp, over in itertools.product(divisors, (None, *divisors), {shard > 1, cp > 1} | {shard == cp == 1}):
            own = ep * (etp or tp)  # ranks that hold all experts
            if shard > 1 < cp and not over or stage % own or (over or shard > 1) and block % own and own % block:
                continue
            lay = dict(tp=tp, cp=cp, pp=pp, replicate=replicate, shard=shard, ep=ep, etp=etp, shard_over_cp=over)
            for inner in [None, *(n for n in divisors if 1 < n < cp and cp % n == 0)]:
                for node in [None, *(n for n in divisors if ep > 1 and ep % n == 0)]:
                    levels = dict(cp_levels=(inner, cp // inner)) if inner else {}
                    yield lay | levels | (dict(ep_levels=(node, ep // node)) if node else {})


def sample(world: int, number: int) -> list[dict]:
    found = list(layouts(world))
    return random.Random(world).sample(found, min(number, len(found)))


def maps_of_stages(pp: int):
    """The usual ones, and one that somebody could have drawn up: stages anywhere."""
    yield from (looped(pp), looped(pp, 2), v_shaped(pp))
    numbers = random.Random(pp)
    places = [(rank, chunk) for rank in range(pp) for chunk in range(3)]
    numbers.shuffle(places)
    yield tuple(places)


def members(rank: int, lay: dict) -> dict[str, frozenset]:
    """The ranks that share each axis with a rank, from coordinates and the definition of the axes, rank by rank."""
    tp, cp, pp, dp = lay["tp"], lay["cp"], lay["pp"], lay["replicate"] * lay["shard"]
    ep, etp, stage, block = lay.get("ep", 1), lay.get("etp") or tp, dp * cp * tp, lay["shard"] * cp * tp

    def place(r: int) -> dict[str, int]:
        at = r // (tp * cp) % dp
        return dict(
            tp=r % tp, cp=r // tp % cp, pp=r // (tp * cp * dp), shard=at % lay["shard"], replicate=at // lay["shard"]
        )

    def expert_place(r: int) -> dict[str, int]:
        return dict(etp=r % etp, ep=r // etp % ep, expert_dp=r % stage // (etp * ep), pp=r // stage)

    base = ("pp", "replicate", "shard", "cp", "tp")
    over = {name: {name} for name in base} | {"dp": {"replicate", "shard"}, "dp_cp": {"replicate", "shard", "cp"}}
    over["shard" if lay["shard_over_cp"] else "replicate"] |= {"cp"}
    own, found = place(rank), {}
    others = {other: place(other) for other in range(tp * cp * pp * dp)}
    for name, free in over.items():
        found[name] = frozenset(r for r, at in others.items() if all(at[n] == own[n] for n in base if n not in free))
    inner, outer = lay.get("cp_levels") or (1, 1)
    for name, level in (("cp_inner", lambda c: c // inner), ("cp_outer", lambda c: c % inner)):
        alike = [r for r in found["cp"] if level(others[r]["cp"]) == level(own["cp"])]
        found[name] = frozenset(alike if inner * outer > 1 else {rank})
    own, others = expert_place(rank), {other: expert_place(other) for other in others}
    for name in ("ep", "etp", "expert_dp"):
        found[name] = frozenset(r for r, at in others.items() if all(at[n] == own[n] for n in at if n != name))
    found["ep_counts"], (inner, outer) = found["ep"], lay.get("ep_levels") or (1, 1)
    for name, level in (("ep_inner", lambda e: e // inner), ("ep_outer", lambda e: e % inner)):
        alike = [r for r in found["ep"] if level(others[r]["ep"]) == level(own["ep"])]
        found[name] = frozenset(alike if inner * outer > 1 else {rank})

    def shards(r: int) -> list[int]:  # ranks that divide an expert's state: those in the block of dense weights' shards
        inside = [other for other in sorted(found["expert_dp"]) if other // block == r // block]
        return inside if lay["shard_over_cp"] or lay["shard"] > 1 else [r]

    found["expert_shard"] = frozenset(shards(rank))
    found["expert_replicate"] = frozenset(
        r for r in found["expert_dp"] if shards(r).index(r) == shards(rank).index(rank)
    )
    pipeline = sorted(found["pp"])
    ends = {pipeline[0], pipeline[-1]}
    found["tied"] = frozenset(ends if rank in ends else {rank})
    return found


def creations(mesh: Mesh, stages) -> list[tuple[tuple[int, ...], str]]:
    """What a rank makes, in order: (ranks, purpose) of its axes and then of its channels, as `open_channels` does."""
    found = [(ranks, getattr(mesh, names[0]).label) for ranks, names in mesh.own_groups()]
    for kind, source, target in itertools.chain.from_iterable(opening_rounds(stages)):
        ends = mesh.pp.ranks[source], mesh.pp.ranks[target]
        found += [(tuple(sorted(ends)), f"channel {kind} from {ends[0]} to {ends[1]}")] * (mesh.rank in ends)
    return found


def stuck(lists: dict[int, list], name=groups.free_name) -> list:
    """Ranks that wait for ever when each makes its groups in order, each of which waits for all members to be at the
    same one, under the same name; [] if none does.
    """
    left = {rank: deque(own) for rank, own in lists.items()}
    taken: dict[int, set[str]] = {rank: set() for rank in lists}
    ready = deque(rank for rank, own in left.items() if own)
    while ready:
        rank = ready.popleft()
        if not left[rank]:
            continue
        ranks, purpose = left[rank][0]
        found = {
            (left[r][0], name(ranks, purpose, taken[r])) if r in left and left[r] and r in ranks else None
            for r in ranks
        }
        if len(found) > 1 or None in found:
            continue  # the last of them to come looks again
        for r in ranks:
            left[r].popleft()
            taken[r].add(next(iter(found))[1])
            ready.append(r)
    return sorted(rank for rank, own in left.items() if own)


def all_lists(lay: dict, stages) -> dict[int, list]:
    world = lay["tp"] * lay["cp"] * lay["pp"] * lay["replicate"] * lay["shard"]
    return {rank: creations(Mesh(rank, create_groups=False, **lay), stages) for rank in range(world)}


def torchs_name(ranks, purpose, taken) -> str:
    """What `use_local_synchronization` of torch 2.11 to 2.13 makes of them."""
    return f"{ranks} {len(taken)}"


def check_layout(lay: dict) -> None:
    for rank in range(lay["tp"] * lay["cp"] * lay["pp"] * lay["replicate"] * lay["shard"]):
        mesh, expected = Mesh(rank, create_groups=False, **lay), members(rank, lay)
        for name in AXES:
            axis = getattr(mesh, name)
            assert set(axis.ranks) == expected[name] and list(axis.ranks) == sorted(axis.ranks), (lay, rank, name)
            assert axis.ranks[axis.rank] == rank
        made = Counter(name for _, names in mesh.own_groups() for name in names)
        inside = {name for name in AXES if 1 < len(expected[name]) < mesh.world_size}
        whole = {name for name in AXES if 1 < len(expected[name]) == mesh.world_size}
        assert inside <= set(made) <= inside | whole and set(made.values()) <= {1}, (lay, rank)
    for stages in maps_of_stages(lay["pp"]):
        lists = all_lists(lay, stages)
        for rank, own in lists.items():
            assert len(set(own)) == len(own) and all(rank in ranks for ranks, _ in own)
            assert all((ranks, purpose) in lists[other] for ranks, purpose in own for other in ranks)
        assert stuck(lists) == [], lay
        again = {
            rank: own + lists[rank] for rank, own in all_lists(lay | dict(ep=1, etp=None), looped(lay["pp"])).items()
        }
        assert stuck(again) == [], lay  # a second mesh in the same processes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("world, number", [(4, 40), (6, 12), (8, 30), (12, 12), (24, 6), (64, 3)])
def test_all_ranks_agree_and_none_waits_for_ever(world, number):
    for lay in sample(world, number):
        check_layout(lay)


@pytest.mark.full
@pytest.mark.parametrize("world", range(2, 65))
def test_every_layout_of_few_ranks(world):
    for lay in list(layouts(world)) if world < 12 else sample(world, 150 if world < 17 else 12):
        check_layout(lay)


@pytest.mark.full
@pytest.mark.parametrize("pp, cp", [(16, 1), (4, 2), (32, 2)])
def test_no_rank_of_512_waits_for_ever(pp, cp):
    lay = dict(tp=4, cp=cp, pp=pp, replicate=2, shard=64 // pp // cp, ep=4, etp=2, shard_over_cp=True)
    for stages in maps_of_stages(pp):
        assert stuck(all_lists(lay, stages)) == []


@pytest.mark.full
def test_no_rank_of_2048_waits_for_ever():
    """Two pipeline stages of 1,024 ranks, over which 64 hold different experts: ranks of tp, cp and dp."""
    lay = dict(tp=2, cp=2, pp=2, replicate=1, shard=256, ep=64, etp=1, shard_over_cp=True)
    assert stuck(all_lists(lay, looped(2))) == []


@pytest.mark.parametrize(
    "lay",
    [
        dict(tp=8, cp=2, pp=16, replicate=4, shard=16, ep=32, etp=2, shard_over_cp=True),
        dict(tp=2, cp=2, pp=16, replicate=1, shard=256, ep=64, etp=1, shard_over_cp=True),
    ],
)
def test_ranks_of_a_large_job_agree_with_their_partners(lay):
    for rank in random.Random(3).sample(range(16384), 6):
        mine = creations(Mesh(rank, create_groups=False, **lay), v_shaped(16))
        for ranks, purpose in mine:
            for other in {ranks[0], ranks[-1], ranks[len(ranks) // 2]}:
                theirs = creations(Mesh(other, create_groups=False, **lay), v_shaped(16))
                assert (ranks, purpose) in theirs
                common = [made for made in mine if other in made[0]]
                assert common == [made for made in theirs if rank in made[0]]  # in the same order


def test_the_simulation_finds_what_goes_wrong():
    """Torch's own names, two channels of a pair in another order on one rank, a group that one rank leaves out."""
    lay = dict(tp=2, cp=1, pp=3, replicate=1, shard=2)
    lists = all_lists(lay, looped(3))
    assert stuck(lists) == [] and stuck(lists, torchs_name) != []
    assert [ranks for ranks, _ in lists[0][-2:]] == [(0, 4), (0, 4)]  # the first stage and the next
    assert stuck(lists | {0: lists[0][:-2] + lists[0][:-3:-1]}) == list(range(12)[::4])
    assert stuck(lists | {4: lists[4][1:]}) != []


@pytest.mark.parametrize("pp", [2, 3, 5, 8, 16])
def test_channels_open_side_by_side(pp):
    """Every channel once, no rank twice in a round; and the rounds of a pipeline do not grow with its length."""
    for stages in maps_of_stages(pp):
        rounds = opening_rounds(stages)
        assert sorted(itertools.chain.from_iterable(rounds)) == channels(stages)
        for each in rounds:
            ends = [rank for _, source, target in each for rank in (source, target)]
            assert len(set(ends)) == len(ends)
        most = max(Counter(rank for _, a, b in channels(stages) for rank in (a, b)).values())
        assert len(rounds) <= 2 * most - 1
    assert len(opening_rounds(looped(pp))) <= 4


@pytest.mark.parametrize("sizes", [dict(pp=2, dp=3, cp=1, tp=2), dict(pp=4, dp=2, cp=2, tp=3)])
def test_the_list_of_a_rank_is_one_of_all_lists(sizes):
    for axes in (["tp"], ["pp"], ["dp", "cp"], list(sizes)):
        every = ranks_along(sizes, axes)
        for rank in range(len(every) * len(every[0])):
            number, ranks = ranks_of(sizes, axes, rank)
            assert every[number] == list(ranks) and rank in ranks


def test_what_shares_a_group_and_what_must_not():
    """Gradients and weights of the optimizer's share one; what is waited for inside a pass does not share it."""
    plain = [names for _, names in Mesh(0, tp=2, shard=4, create_groups=False).own_groups()]
    assert plain == [["shard", "dp", "dp_cp", "expert_shard", "expert_dp"], ["tp", "etp"]]
    for lay, ranks, apart in (
        (dict(tp=2, cp=4), (0, 2, 4, 6), ("cp", "replicate")),
        (dict(tp=2, pp=2), (0, 2), ("pp", "tied")),
        (dict(tp=2, shard=4, ep=4), (0, 2, 4, 6), ("ep", "shard")),
        (dict(tp=2, shard=4, ep=2, etp=1), (0, 1), ("ep", "tp")),
        (dict(tp=2, cp=2, replicate=2, ep=2), (0, 2), ("ep", "cp")),
        (dict(cp=2, replicate=2, etp=2), (0, 1), ("etp", "cp")),
    ):
        found = [names for list_, names in Mesh(0, create_groups=False, **lay).own_groups() if list_ == ranks]
        places = [next(i for i, names in enumerate(found) if name in names) for name in apart]
        assert len(set(places)) == 2, lay


@pytest.mark.parametrize(
    "lay, own",
    [
        (dict(shard=8), []),
        (dict(tp=8), []),
        (dict(pp=2), []),  # nothing goes over pp itself
        (dict(cp=8), [["cp"]]),
        (dict(shard=8, ep=8), [["ep"], ["ep_counts"]]),
        (dict(shard=8, ep=8, ep_levels=(2, 4)), [["ep", "ep_counts"]]),
        (dict(tp=8, ep=8, etp=1), [["ep"], ["ep_counts"]]),
        (dict(replicate=8, etp=8), [["etp"]]),
    ],
)
def test_all_ranks_are_a_group_for_one_purpose(lay, own):
    """A message that a pass waits for does not stand in line behind a reduction among all ranks."""
    mesh = Mesh(create_groups=False, **lay)
    assert [names for _, names in mesh.own_groups() if not {*names} <= {"ep_inner", "ep_outer"}] == own
    assert all(ranks == mesh.world.ranks for ranks, names in mesh.own_groups() if names in own)


@pytest.mark.parametrize(
    "lay, more",
    [
        (dict(tp=8, pp=16, replicate=16, shard=8), []),
        (dict(tp=8, pp=16, replicate=16, shard=8, ep=8), [["ep"]]),  # expert_dp is replicate
        (dict(tp=8, pp=16, replicate=16, shard=8, ep=64, etp=1), [["ep"]]),
        (dict(tp=8, pp=16, replicate=16, shard=8, ep=4, etp=2), [["ep"], ["etp"]]),  # as many ranks as tp
        (dict(tp=8, pp=16, shard=128, ep=16, etp=2), [["expert_shard", "expert_dp"], ["ep"], ["etp"]]),
        # Copies of experts lie where those of dense weights do; nothing is sent along expert_dp.
        (dict(tp=8, pp=16, replicate=16, shard=8, ep=8, etp=2), [["expert_shard"], ["ep"], ["etp"], ["expert_dp"]]),
    ],
)
def test_groups_that_experts_add(lay, more):
    mesh = Mesh(9999, create_groups=False, **lay)
    dense = [names for _, names in mesh.own_groups() if not {*names} <= {*EXPERT_AXES, "ep_counts"}]
    assert [names for _, names in mesh.own_groups()] == dense + more + [["ep_counts"]] * ("ep" in lay)
    assert [names for names in more if not mesh.carries(names)] == [["expert_dp"]] * (["expert_dp"] in more)


LAYOUTS = [
    dict(tp=2, pp=2, shard=2),
    dict(tp=2, pp=2, cp=2),
    dict(pp=2, replicate=2, shard=2, ep=2),
    dict(pp=4, shard=2),
    dict(cp=2, pp=2, replicate=2, shard_over_cp=False),
    dict(tp=2, pp=2, shard=2, ep=2, etp=1),
    dict(tp=2, cp=2, pp=2, ep=2, etp=2, shard_over_cp=True),
    dict(pp=2, replicate=2, shard=2, ep=1, etp=2),
    dict(shard=8, ep=8),
]


def _sums(rank):
    """Sums of ranks over every axis, after each of several meshes in one process; how many groups it took."""
    made, helper = [], distributed_c10d._new_process_group_helper
    distributed_c10d._new_process_group_helper = lambda *args, **more: made.append(args[2]) or helper(*args, **more)
    found = []
    for lay in LAYOUTS:
        made.clear()
        mesh = Mesh(rank, **lay)
        stages = looped(mesh.pp.size, 2) if mesh.pp.size > 1 else ()
        wire = open_channels(mesh, stages)
        sums = {name: collectives.all_reduce(torch.tensor(rank), getattr(mesh, name)).item() for name in AXES}
        back = {}
        for (kind, source, target), group in wire.items():
            x = torch.tensor([rank])
            there = mesh.pp.ranks[target], mesh.pp.ranks[source]
            (dist.send if rank == there[1] else dist.recv)(x, there[0] if rank == there[1] else there[1], group=group)
            back[kind, source, target] = x.item() == there[1]
        planned = count(Mesh(create_groups=False, **lay), stages, nccl=True)
        found.append((sums, all(back.values()), len(back), len(made), planned.of_rank(mesh.pp.rank)))
    return found


@pytest.mark.sampled(2)
def test_eight_ranks_make_what_is_counted_and_reach_the_right_ones(run_ranks):
    for rank, found in enumerate(run_ranks(8, _sums)):
        for lay, (sums, told, channels_, made, planned) in zip(LAYOUTS, found, strict=True):
            whole = dict(tp=1, cp=1, pp=1, replicate=1, shard=1, ep=1, shard_over_cp=False) | lay
            assert sums == {name: sum(ranks) for name, ranks in members(rank, whole).items()}, lay
            assert told and made == planned and channels_ == 4 * (whole["pp"] > 1), lay


def _without_one(rank):
    if rank == 3:
        return "was not there"
    try:
        join_job(Parallel(tensor_model_parallel_size=2, distributed_timeout_minutes=0.02), Kernels(device="cpu"))
    except PeerLost as lost:
        return lost.code, lost.what, lost.do
    return "went on"


def test_a_rank_that_does_not_come_is_told(run_ranks):
    """Rank 1 waits for it among its data parallel ranks, rank 2 among its tensor parallel ones, and rank 0 for rank 1."""
    *found, _ = run_ranks(4, _without_one)
    where = ("tp group 0 (ranks 0, 1)", "dp group 1 (ranks 1, 3)", "tp group 1 (ranks 2, 3)")
    for (code, what, do), group in zip(found, where, strict=True):
        assert code == 7 and group in what and what.endswith("not all of them joined within 1.2 s")
        assert "--distributed-timeout-minutes" in do


def test_axes_of_the_mesh_are_those_of_this_test():
    assert {*AXES, "world", "ep_etp"} == set(Mesh().coordinates) and set(JOINED) < set(Mesh().coordinates)
