# SPDX-License-Identifier: Apache-2.0
"""Tokens that a library sends to their experts (--moe-flex-dispatcher-backend), with a stand-in for the package `deep_ep`
that does on CPUs what DeepEP and HybridEP document (`stand_in_deep_ep.py`). The real libraries need GPUs: `tests/gpu`.
"""

import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.fused_kernels import TABLE
from megatron.model.command_line import parse_any
from megatron.model.kinds.experts import dispatch, expert_rules, libraries
from megatron.model.kinds.experts.libraries import library_dispatcher, library_refusal
from megatron.mpu import collectives, expert_libraries
from megatron.mpu.expert_libraries import DEEPEP_RANKS, DispatchSizes, library_bytes, library_problem
from megatron.mpu.mesh import EP_LEVELS, Mesh
from megatron.planner.device import find
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import step_memory
from megatron.training import build
from megatron.training.rules import resolve
from tests.models import stand_in_deep_ep as stand_in
from tests.models.plain_state import read_all
from tests.models.test_expert_hops import drawn, factor
from tests.models.test_expert_layouts import EP4, FAMILIES, FULL, HOPS, check, pretrain
from tests.models.test_own_experts import EP2, PP2

BACKENDS = ["deepep", "hybridep"]
CPU = torch.device("cpu")


@pytest.fixture
def installed(monkeypatch):
    """The stand-in as the package `deep_ep`, with its counters at 0, and no refusal of CPUs."""
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in)
    monkeypatch.setattr(build, "library_refusal", lambda *_: None)
    for counter in (stand_in.calls, stand_in.sent):
        counter.clear()
    yield stand_in
    stand_in.Buffer.num_sms = 20


@pytest.fixture
def any_format(installed, monkeypatch):
    """Tokens in fp32, too, so that rounding hides nothing, and of 24 numbers."""
    monkeypatch.setattr(stand_in, "WIDTH", 8)
    monkeypatch.setitem(expert_libraries.MULTIPLES, "hybridep", 8)
    monkeypatch.setattr(stand_in, "FORMATS", {torch.bfloat16, torch.float32})
    for module in (libraries, expert_rules):
        monkeypatch.setattr(module, "FORMATS", ("bf16", "fp32"))


class Threads:
    """A group of ranks that are threads."""

    def __init__(self, ranks: int):
        self.ranks, self.own, self.values = ranks, threading.local(), [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own.rank

    def gathered(self, value) -> list:
        self.values[self.own.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def run(self, function) -> list:
        def one(rank):
            self.own.rank = rank
            return function(rank)

        with ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))


def exchanged(backend, choose, *, world, number, n, h, monkeypatch, turn=lambda kind: kind):
    """Of each rank: the rows of its experts, outputs, gradients and what a loop over tokens makes of the same."""
    group = Threads(world)
    monkeypatch.setattr(collectives, "all_gather_object", lambda value, axis: group.gathered(value))

    def rank(at):
        mesh = Mesh(at, replicate=world, ep=world, create_groups=False, ep_library=(backend, None))
        mesh.ep = replace(mesh.ep, group=group)
        draw = torch.Generator().manual_seed(at)
        experts = choose(draw)
        x, weights, upstream = (torch.rand(n, width, generator=draw) for width in (h, experts.shape[1], h))
        x, weights = x.requires_grad_(), weights.requires_grad_()
        dispatcher = library_dispatcher(mesh, None)(experts, number, mesh.ep, True)
        rows, own = dispatcher.dispatch(x, weights)
        first = mesh.ep.rank * number // world
        each = dispatcher.rows.each(factor(torch.arange(first, first + number // world)).unsqueeze(1))
        y = dispatcher.combine(rows.sin() * own * each)
        found = y, *torch.autograd.grad(y, (x, weights), upstream)
        scale = torch.cat((factor(torch.arange(number)), torch.zeros(1)))[experts]
        want = x.sin() * (scale * weights).sum(1, keepdim=True)
        wanted = want, *torch.autograd.grad(want, (x, weights), upstream)
        return dispatcher.rows.counts, dispatcher.rows.lengths, found, wanted, experts

    return group.run(rank)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "world, number, k, drops",
    [
        (4, 16, 3, 0),
        (2, 8, 2, 5),  # dropped pairs
        (4, 4, 1, 0),
        (8, 8, 8, 0),  # all experts
        (4, 8, 2, 18),  # all pairs are dropped
    ],
)
def test_a_library_is_the_loop_over_tokens(backend, world, number, k, drops, any_format, monkeypatch):
    """Outputs and gradients within 1e-6, and the rows of each expert exactly."""
    case = dict(world=world, number=number, n=9, h=16, monkeypatch=monkeypatch)
    ranks = exchanged(backend, drawn(number, k, 9, drops), **case)
    for _, _, found, wanted, _ in ranks:
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    chosen = torch.cat([experts.flatten() for *_, experts in ranks])
    counted = torch.bincount(chosen, minlength=number)[:number]
    # On CPUs rows of zeros may follow, up to a multiple of the unit; so few rows have none.
    assert torch.equal(torch.cat([counts for counts, *_ in ranks]), counted)
    assert sum((lengths for _, lengths, *_ in ranks), []) == counted.tolist()
    assert stand_in.calls["dispatch"] == stand_in.calls["dispatch, again"] == world
    assert stand_in.calls["combine"] == 2 * world


def test_a_token_is_sent_to_a_rank_once(any_format, monkeypatch):
    """3 of 16 experts on 4 ranks: one row for each rank with some of a token's experts, not one for each expert."""
    ranks = exchanged("deepep", drawn(16, 3, 9), world=4, number=16, n=9, h=8, monkeypatch=monkeypatch)
    reached = sum(len(set(token)) for *_, experts in ranks for token in (experts // 4).tolist())
    assert stand_in.sent["tokens"] == reached < 4 * 9 * 3


def test_ranks_with_other_numbers_of_tokens_are_refused(any_format, monkeypatch):
    """HybridEP gathers the routing of all ranks as equal parts. DeepEP sends what there is."""
    group = Threads(2)
    monkeypatch.setattr(collectives, "all_gather_object", lambda value, axis: group.gathered(value))

    def rank(at, backend):
        mesh = Mesh(at, replicate=2, ep=2, create_groups=False, ep_library=(backend, None))
        mesh.ep, n = replace(mesh.ep, group=group), 3 + at
        make = library_dispatcher(mesh, None)
        dispatcher = make(torch.arange(n).unsqueeze(1) % 4, 4, mesh.ep, False)
        rows, weights = dispatcher.dispatch(torch.ones(n, 16), torch.ones(n, 1))
        return dispatcher.combine(rows * weights)

    assert [len(y) for y in group.run(lambda at: rank(at, "deepep"))] == [3, 4]
    with pytest.raises(SettingsError, match="there are 3 and 4"):
        group.run(lambda at: rank(at, "hybridep"))


# ---- training

LIBRARY = f"{HOPS} 4 --moe-flex-dispatcher-backend"
TURNS = "--overlap-moe-expert-parallel-comm --micro-batch-size 1"
RUNS = {
    "deepep, ep4": (4, "plain", f"{EP4} {LIBRARY} deepep"),
    "hybridep, ep4": (4, "plain", f"{EP4} {LIBRARY} hybridep"),
    "deepep, ep2, turns": (2, "gated", f"{EP2} {LIBRARY} deepep {TURNS}"),
    "hybridep, ep2, capacity": (2, "capacity", f"{EP2} {LIBRARY} hybridep"),
    "deepep, ep2, recomputed": (2, "capacity", f"{EP2} {LIBRARY} deepep {FULL}"),
    "hybridep, ep2, recomputed, zero3": (2, "gated", f"{EP2} {LIBRARY} hybridep {FULL} --sharding-stage 3"),
    "deepep, pp2 ep2, zb-h1": (
        4,
        "plain",
        f"{PP2} {EP2} {LIBRARY} deepep --pipeline-schedule zb-h1 --micro-batch-size 1",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.full] * (RUNS[one][0] == 4)) for one in RUNS])
def test_a_library_trains_as_the_plain_loop(name, any_format, tmp_path, run_ranks):
    """Losses, norms and weights within 1e-6, and loads exactly (`test_expert_layouts`)."""
    world, family, words = RUNS[name]
    run_ranks(world, pretrain, f"{FAMILIES[family].flags} {words} --save {tmp_path}")
    check(tmp_path, family)


@pytest.mark.sampled(5)
def test_a_library_trains_as_hops_do(installed, tmp_path, run_ranks, monkeypatch):
    """In bf16, which the libraries send: DeepEP's sums are those of one hop to the bit, with the kernel that rounds halves
    to even, as torch's sums do; that of CPUs does not."""
    last = lambda op, case: [entry for entry in TABLE[op] if entry.fits(case)][-1]
    monkeypatch.setattr(dispatch, "choose_kernel", last)
    flags = f"{FAMILIES['plain'].flags} {EP2} {HOPS} 2 --bf16"
    found = []
    for more in ("", "--moe-flex-dispatcher-backend deepep"):
        folder = tmp_path / (more or "hops").split()[-1]
        run_ranks(2, pretrain, f"{flags} {more} --save {folder}")
        found.append(read_all(folder))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


# ---- what is refused


def settings(words: str, world: int = 8):
    line = f"""--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100
        --lr 1e-2 --train-iters 2 --micro-batch-size 1 --num-experts 48 --expert-model-parallel-size 8 --bf16
        --moe-token-dispatcher-type flex {words}"""
    return resolve(parse_any(line.split(), recipe=pretrain_gpt.recipe()), world)


def test_multiprocessors_are_those_of_the_flag(any_format, monkeypatch):
    """Of Megatron-LM's words, the older one too."""
    parallel = settings("--moe-enable-deepep --moe-deepep-num-sms 24").parallel
    assert (parallel.moe_flex_dispatcher_backend, parallel.moe_deepep_num_sms) == ("deepep", 24)
    group = Threads(4)
    monkeypatch.setattr(collectives, "all_gather_object", lambda value, axis: group.gathered(value))
    buffers = [{} for _ in range(4)]

    def rank(at):
        ep = replace(Mesh(at, replicate=4, ep=4, create_groups=False).ep, group=group)
        first = libraries._deepep_buffer(buffers[at], ep, 64, 24)
        assert libraries._deepep_buffer(buffers[at], ep, 64, 24) is first  # one for all layers
        hybrid = libraries._hybridep_buffer({}, ep, (9, 64), 2, 16)
        return first.sizes, hybrid.sms

    assert group.run(rank) == [((1000 * 128 * 4, 0), (16, 16))] * 4
    assert stand_in.Buffer.num_sms == 24


def test_megatrons_words_of_both_libraries():
    parallel = settings("--moe-flex-dispatcher-backend hybridep --moe-hybridep-num-sms 16").parallel
    assert (parallel.moe_flex_dispatcher_backend, parallel.moe_hybridep_num_sms) == ("hybridep", 16)
    assert settings("").parallel.moe_flex_dispatcher_backend is None


@pytest.mark.parametrize(
    "words, world, said",
    [
        ("--moe-flex-dispatcher-backend deepep --amp-level O1", 8, "tokens are sent in bf16; --bf16"),
        ("--moe-flex-dispatcher-backend deepep --expert-model-parallel-size 6", 6, "not for 6"),
        (
            "--moe-flex-dispatcher-backend deepep --expert-model-parallel-size 48 --moe-ranks-per-node 4",
            48,
            "4 are on a",
        ),
        (
            "--moe-flex-dispatcher-backend deepep --expert-model-parallel-size 16 --expert-tensor-parallel-size 2 "
            "--tensor-model-parallel-size 2",
            32,
            "--expert-tensor-parallel-size 1",
        ),
        ("--moe-flex-dispatcher-backend deepep --moe-latent-size 12", 8, "not of 12"),
        ("--moe-flex-dispatcher-backend hybridep --moe-latent-size 24", 8, "multiple of 16 numbers, not of 24"),
        (
            "--moe-flex-dispatcher-backend hybridep --num-experts 6 --expert-model-parallel-size 2",
            2,
            "a multiple of 4 experts on a node, not 2 x 3",
        ),
        ("--moe-flex-dispatcher-backend deepep --moe-deepep-num-sms 21", 8, "even numbers"),
    ],
)
def test_layouts_that_a_library_does_not_serve(words, world, said):
    with pytest.raises(SettingsError) as refused:
        settings(words, world)
    assert said in str(refused.value)


def test_deepep_serves_what_its_tables_have():
    """Every number of ranks on nodes of 8; etp 2 halves those of a node."""
    served = [ep for ep in range(2, 200) if not library_problem("deepep", DispatchSizes(ep, min(ep, 8), 1, 64))]
    assert served == list(DEEPEP_RANKS)
    assert library_problem("deepep", DispatchSizes(8, 4, 1, 64))


def test_the_memory_of_their_buffers():
    """DeepEP's on 8 ranks: 10 channels, 8 ranks, 256 tokens of 7,168 numbers of 2 bytes, with places for 128 experts. The
    library rounds up to 128 bytes. HybridEP's: 4,096 tokens of each of 8 ranks, and weights of the 256 experts of a node.
    """
    v3 = DispatchSizes(8, 8, 32, 7168)
    assert library_bytes("deepep", None, v3, 4096) == 10 * 8 * (256 * (14336 + 8 + 2048) + 4 * 5) == 335_709_760
    assert library_bytes("deepep", 10, v3, 4096) == 335_709_760 // 2
    assert library_bytes("hybridep", None, v3, 4096) == 32768 * (14336 + 4 * 256 + 4 * 56) == 510_656_512
    far = DispatchSizes(64, 8, 4, 7168)
    between = 2 * 10 * 8 * (128 * (14336 + 8 + 2048 + 16) + 4 * 18)
    assert library_bytes("deepep", None, far, 1) == 10 * 8 * (288 * 16392 + 4 * 19) + between


def test_a_plan_counts_the_buffer():
    found = []
    for words in ("", "--moe-flex-dispatcher-backend deepep"):
        config = settings(f"--dry-run --world-size 8 {words}")
        layout, facts = Layout.of(config, 8), pretrain_gpt.facts(config, 128)
        job = Job.of(config, facts, dp=8, device="cuda")
        found.append(step_memory(job, layout, find("H100-80GB"), 0)[0]["communication buffers"])
    # One group less: of the ranks of a node, which is that of ep.
    assert found[1] - found[0] == library_bytes("deepep", None, DispatchSizes(8, 8, 6, 64), 16)


def test_a_library_that_is_not_installed(monkeypatch):
    """One message each: what to install, and what to do without it."""
    assert library_refusal(None, CPU) is None
    assert "needs GPUs" in str(library_refusal(("deepep", None), CPU))
    cuda = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    refused = library_refusal(("deepep", None), cuda)
    for words in ("cannot be imported", "install DeepEP (github.com/deepseek-ai/DeepEP)", "leave --moe-flex"):
        assert words in f"{refused} {refused.why} {refused.do}"
    old = ModuleType("deep_ep")
    old.Buffer = stand_in.Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    assert library_refusal(("deepep", None), cuda) is None
    refused = library_refusal(("hybridep", None), cuda)
    assert "has no HybridEPBuffer" in str(refused.why) and "branch hybrid-ep" in str(refused.do)


def test_tokens_in_another_format_are_refused(installed):
    mesh = Mesh(0, replicate=2, ep=2, create_groups=False, ep_library=("deepep", None))
    dispatcher = library_dispatcher(mesh, None)(torch.zeros(3, 1, dtype=torch.int64), 4, mesh.ep, False)
    with pytest.raises(SettingsError, match="those of this run are fp32"):
        dispatcher.dispatch(torch.ones(3, 16), torch.ones(3, 1))


def test_groups_of_levels_are_not_connected():
    """The library has its own connections; torch's groups between nodes and inside them carry nothing."""
    sizes = dict(replicate=8, ep=8, ep_levels=(4, 2), create_groups=False)
    with_library, alone = (Mesh(0, ep_library=library, **sizes) for library in (("deepep", None), None))
    levels = lambda mesh: [names for _, names in mesh.own_groups() if names[0] in EP_LEVELS]
    carried = lambda mesh: Counter(mesh.carries(names) for names in levels(mesh))
    assert carried(alone) == {True: 2} and carried(with_library) == {False: 2}
