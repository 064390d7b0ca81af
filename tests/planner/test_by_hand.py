# SPDX-License-Identifier: Apache-2.0
"""Times and sizes of parts of a plan, with numbers that are worked out here: each input has its own value."""

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import SettingsError
from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer_ops import LAYER, Collective, CoreAttention
from megatron.mpu.placement import DATA_PARALLEL, EXPERT_DATA_PARALLEL, Buffer, Constant, Placement
from megatron.optimizer.flat import WIDENED
from megatron.planner import (
    activations,
    calibrate,
    choose,
    command,
    dry_run,
    held_passes,
    memory,
    parameters,
    plan_json,
    problems,
    schedule_time,
    search,
    serving,
    speed,
    step_communication,
    text,
    traffic,
)
from megatron.planner import device as devices
from megatron.planner.arithmetic import CHECKPOINT, SHARDED, STATES, TRAINING, days, divisions, least_devices
from megatron.planner.cluster import Cluster
from megatron.planner.device import GIB, Device, find
from megatron.planner.held_passes import most_held
from megatron.planner.layout import Job, Layout
from megatron.planner.parameters import ParameterSize, Units, UnitSizes
from megatron.planner.reached_speed import Accuracy
from megatron.planner.startup import StartUp
from megatron.planner.target import cluster_of
from megatron.planner.traffic import once_a_step, transfers
from megatron.settings.kernel_sizes import LossChunks
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model, Recompute
from megatron.telemetry.figures import WIDTH

DEVICE = Device(
    "made up",
    memory_gb=50.0,
    flops=dict(bf16=100e12, fp32=10e12),
    attention=dict(bf16=30e12),
    rows=16.0,
    bandwidth=1e12,
    unfused=3.0,
    exposed=0.25,
    inner=200e9,
    outer=20e9,
    latency=0.0,
    launch=0.0,
    host=8e9,
)
MODEL = Model(6, 128, 4, 256, attention_dropout=0.0, hidden_dropout=0.0, untie_embeddings_and_output_weights=True)
FACTS = GPTFacts(MODEL, 1000)
JOB = Job(FACTS, 24)


def played(owned, *, counts=None):
    """The units of a rank, by the elements that it owns."""
    return SimpleNamespace(owned=lambda sizes: owned, counts=counts or {})


# ---- speeds ----------------------------------------------------------------------------------------------------------


def test_speeds_of_a_device_are_shares_of_its_data_sheet():
    h100 = find("H100")
    assert (h100.memory_bytes, h100.usable_bytes) == (80 * GIB, int(0.97 * 80 * GIB))
    assert h100.bandwidth == pytest.approx(0.8 * 3350e9) and h100.inner == pytest.approx(0.8 * 370e9)
    assert h100.outer == pytest.approx(0.9 * 42e9) and h100.flops["bf16"] == pytest.approx(0.737 * 989e12, rel=1e-3)


@pytest.mark.parametrize(
    "moments, offload, disk, nanoseconds",
    [
        # Main weight read and written, bf16 weight written (10), gradient (4), moments read and written: bytes at 1 TB/s.
        ((4, 4), 0.0, 0.0, 10 + 4 + 16),
        ((4,), 0.0, 0.0, 10 + 4 + 8),
        ((4, 2), 0.0, 0.0, 10 + 4 + 8 + 50),
        # 12 bytes and 4 for each moment pass the link of 8 GB/s, and the host's memory at 20 GB/s, for half of the state.
        ((4, 4), 0.5, 0.0, 30 + 20 * 0.5 * (1000 / 8 + 1000 / 20)),
        # 12 bytes are read and written, for a quarter of the state of 8 ranks, at 3 GB/s.
        ((4, 4), 0.0, 0.25, 30 + 24 * 0.25 * 8 * 1000 / 3),
    ],
)
def test_an_update_moves_weights_gradients_and_moments(moments, offload, disk, nanoseconds, monkeypatch):
    monkeypatch.setattr(step_communication, "rank_units", lambda job, layout, rank: played(1e6))
    layout = Layout(dp=16, offload=offload, disk=disk)
    took = step_communication._update(replace(JOB, moments=moments), layout, Cluster(DEVICE, 16), 0)
    assert took / 1e6 == pytest.approx(nanoseconds * 1e-12)
    beside = replace(DEVICE, kind="cpu")  # whose memory is the host's: nothing passes it twice
    less = step_communication._update(replace(JOB, moments=moments), layout, Cluster(beside, 16), 0)
    assert took - less == pytest.approx(1e6 * 20 * offload / 20e9, abs=1e-12)


def test_the_busiest_rank_orthogonalizes_the_largest_matrix():
    """Of 3 matrices on 4 ranks the largest counts; of 12, a fourth of all. 5 steps of 4 l r c + 2 l^3 FLOPs."""
    flops = lambda rows, columns: 4 * min(rows, columns) * rows * columns + 2 * min(rows, columns) ** 3
    seconds = lambda rows, columns: flops(rows, columns) / DEVICE.reached("bf16", min(rows, columns))
    unit = lambda matrices: type("Unit", (), dict(matrices=matrices, axes=DATA_PARALLEL, sharded="shard"))()
    job, layout = replace(JOB, ns_steps=5), Layout(tp=2, dp=2, zero=1, shard=2)
    few, many = [(64, 64), (64, 64), (512, 256)], [(64, 128)] * 12
    one = step_communication._orthogonalizing(played(0, counts={unit(few): 1}), job, layout, DEVICE)
    assert one == pytest.approx(5 * seconds(512, 256))
    two = step_communication._orthogonalizing(played(0, counts={unit(many): 3}), job, layout, DEVICE)
    assert two == pytest.approx(3 * 5 * 12 / 4 * seconds(64, 128))


@pytest.mark.parametrize("kind, waits", [("cpu", 0), ("cuda", 2)])
def test_work_is_measured_by_its_fastest_run(kind, waits, monkeypatch):
    """Seconds of one call; a GPU is waited for before and after ten of them."""
    clock, took, waited = [0.0], itertools.cycle((4.0, 2.0, 3.0) if kind == "cpu" else (2.0,)), []
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(calibrate.torch.cuda, "synchronize", lambda: waited.append(len(clock)))
    assert calibrate.seconds_of(lambda: clock.append(clock[-1] + next(took)), kind, 0.0) == 2.0
    assert len(waited) == 5 * waits and (len(clock) - 2) % 5 == 0


def test_the_ends_of_a_model():
    """Embedding: 4 moves each way. Output: two products forward (the second for the gradient of its input), one backward;
    the loss moves 16 bytes a logit. A teacher's logits cost 80 bytes more each, and its product.
    """
    share, cluster = Layout(micro_batch_size=3).rank_setup(JOB), Cluster(DEVICE, 1)
    n, h, rows = 3 * 256, 128, FACTS.vocabulary_rows(1)
    first, last = (
        speed._stage(JOB, share, speed.StageLayers(), *ends, cluster) for ends in ((True, False), (False, True))
    )
    assert first.forward == first.backward == pytest.approx(4 * n * h * 2 / 1e12)
    product = 2 * n * h * rows / (100e12 * 128 / (128 + 16))
    assert last.forward == pytest.approx(2 * product + 16 * n * rows * 3.0 / 1e12)
    assert last.backward == pytest.approx(product)
    teacher = replace(JOB, facts=GPTFacts(replace(MODEL, num_layers=0), 1000))
    taught = speed._stage(replace(JOB, teacher=teacher), share, speed.StageLayers(), False, True, cluster)
    assert taught.forward - last.forward == pytest.approx(product + 80 * n * rows * 3.0 / 1e12)


@pytest.mark.parametrize("bandwidth", [2e9, 2e12])
def test_a_ring_hides_its_messages_beside_attention(bandwidth):
    """Of 4 ranks, 3 steps of attention have a message beside them; a quarter of each message is exposed at least."""
    layout = Layout(cp=4, micro_batch_size=1)
    share, device = layout.rank_setup(JOB), replace(DEVICE, inner=bandwidth)
    cluster = Cluster(device, 4)
    ops = FACTS.layer_ops(share, FACTS.layer_kind(0))
    [ahead] = [op for op in ops if isinstance(op, Collective) and op.in_ring and op.ahead]
    core = sum(speed._core(JOB, op, device) for op in ops if isinstance(op, CoreAttention))
    sent = sum(cluster.seconds(call, ahead.size, 1, 4, 1) for call in ahead.ahead)
    alone, shared = (
        speed._layer(JOB, one.rank_setup(JOB), FACTS.layer_kind(0), (), cluster) for one in (Layout(), layout)
    )
    returned = sum(
        cluster.seconds(call, op.size, 1, 4, 1)
        for op in ops
        if isinstance(op, Collective) and op.in_ring
        for call in op.back
    )
    exposed = max(sent - 0.75 * core, 0.25 * sent) + max(returned - 0.75 * 2 * core, 0.25 * returned)
    assert alone.sharing == 0 and shared.sharing == pytest.approx(exposed)
    again = speed._layer(JOB, layout.rank_setup(JOB), FACTS.layer_kind(0), (LAYER,), cluster)
    assert again.sharing - shared.sharing == pytest.approx(max(sent - 0.75 * core, 0.25 * sent))  # once more


def test_messages_of_a_pipeline_take_as_long_as_those_between_nodes():
    """Of 4 stages on 2 nodes only one message in three leaves a node, and the others wait for it."""
    apart = lambda pp, tp, local: speed._message(JOB, Layout(tp=tp, pp=pp), Cluster(DEVICE, tp * pp, local))
    size = FACTS.message_bytes(Layout().rank_setup(JOB))
    assert size == 256 * 128 * 2
    assert apart(4, 4, 8) == apart(2, 4, 4) == pytest.approx(size / 20e9)
    assert apart(2, 4, 8) == apart(8, 1, 8) == pytest.approx(size / 200e9)


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero, reductions", [(1, 1), (2, 4), (3, 4)])
def test_stages_of_zero_reduce_once_a_step_or_once_a_micro_batch(zero, reductions):
    layout = Layout(dp=3, micro_batch_size=2, zero=zero, shard=3)
    sent = {one.op: one for one in once_a_step(JOB, layout)}
    units = 6 + 4  # layers; embeddings, final norm, output
    assert sent["reduce_scatter"].bytes == pytest.approx(reductions * 4 * FACTS.parameters, rel=0.01)
    assert sent["reduce_scatter"].calls == reductions * units
    if zero < 3:
        assert sent["all_gather"].bytes == pytest.approx(2 * FACTS.parameters, rel=0.01)
    else:  # layers before each pass
        layers = FACTS.parameters - (2 * 1000 + 256 + 2) * 128
        assert sent["all_gather"].bytes >= 4 * 2 * 2 * layers


def test_the_loss_sums_two_numbers_a_token_over_tensor_parallel_ranks():
    layout = Layout(tp=2, dp=2, micro_batch_size=3)
    found = {(one.op, one.what): one.bytes for one in transfers(JOB, layout) if one.what == "loss"}
    tokens = 24 // 2 * 256
    assert found == {("all_gather", "loss"): 4 * tokens * 2, ("all_reduce", "loss"): 4 * tokens}


@pytest.mark.parametrize("axis", ["tp", "ep", "etp", "tied"])
def test_partial_gradients_are_summed_over_any_axis(axis, monkeypatch):
    """Those of PACT's bounds of experts, which no other test has, over ranks with other experts."""
    axes = EXPERT_DATA_PARALLEL if axis in ("ep", "etp") else DATA_PARALLEL
    unit = UnitSizes("u", (ParameterSize(100, partial=(axis,)), ParameterSize(30)), axes=axes)
    monkeypatch.setattr(traffic, "rank_units", lambda *_: Units([unit, unit]))
    found = {one.axis: (one.op, one.bytes) for one in once_a_step(JOB, Layout(tp=2, pp=2, dp=2, ep=2, etp=2))}
    assert found[axis] == ("all_reduce", 4 * 2 * 100)


def test_sizes_of_units_are_those_of_the_axes_that_shard_them():
    """The same units in several layouts, whose shards of dense weights or of experts are as many."""
    dense, expert = (
        UnitSizes("u", (ParameterSize(size),), axes=axes, frozen=(ParameterSize(50 * size),))
        for size, axes in ((5000, DATA_PARALLEL), (700_000, EXPERT_DATA_PARALLEL))
    )
    units = Units([dense, expert, expert])
    for shard, experts in ((1, 1), (1, 2), (4, 2), (4, 8), (2, 8)):
        sizes = dict(shard=shard, expert_shard=experts, replicate=1, expert_replicate=1)
        for of in ("padded", "owned", "padded_frozen"):
            each = [getattr(unit, of)(sizes) for unit in (dense, expert, expert)]
            assert getattr(units, of)(sizes) == sum(each)
        assert units.owned(sizes) == pytest.approx(5000 / shard + 2 * 700_000 / experts, rel=0.01)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_layout_is_of_the_job_that_it_is_asked_about():
    """One after another, as a search asks: nothing of the job before is kept."""
    layout, whole = Layout(tp=2, micro_batch_size=3), replace(JOB, precision="fp32", backend="sdpa")
    for job, element in ((JOB, 2), (whole, 4), (JOB, 2), (replace(JOB, precision="fp32"), 4)):
        setup = layout.rank_setup(job)
        assert (setup.element, setup.precision, setup.backend) == (element, job.precision, job.backend)


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("offload", [False, True])
def test_shards_of_weights_are_in_the_memory_of_the_host_only_beside_a_gpu(kind, offload):
    """ZeRO 3 with --param-cpu-offload: two bytes of each weight of half of the model."""
    layout = Layout(dp=2, zero=3, shard=2, param_offload=offload)
    device, host = memory.state(replace(JOB, device=kind), layout, 0)
    where, other = (host, device) if offload and kind == "cuda" else (device, host)
    assert where["weights"] == pytest.approx(2 * FACTS.parameters / 2, rel=0.01) and not other.get("weights")


@pytest.mark.parametrize(
    "fraction, elements", [(0, 0), (0.05, 10), (0.1, 10), (0.101, 30), (0.3, 30), (0.6, 60), (0.61, 100), (1.0, 100)]
)
def test_the_first_units_that_are_a_fraction_of_a_shard(fraction, elements):
    """Whole ones, and no more than it takes."""
    units = [SimpleNamespace(owned=lambda sizes, own=own: own) for own in (10, 20, 30, 40)]
    whole = type("Whole", (list,), dict(owned=lambda self, sizes: 100))(units)
    assert memory._first_units(whole, {}, fraction) == elements


def test_buffers_of_a_rank():
    """0.4 GiB for each axis of more than one rank; 5 % of what a step allocates; three messages and one for each chunk."""
    layout = Layout(tp=2, pp=3, dp=2, micro_batch_size=2, chunks=2, schedule="interleaved")
    entries, kept = memory.step_memory(JOB, layout, DEVICE, 1)
    assert entries["communication buffers"] == 3 * int(0.4 * GIB) and entries["device context"] == int(1.2 * GIB)
    assert entries["pipeline buffers"] == 5 * 2 * 256 * 128 * 2
    allocated = ("activations", "logits", "teacher's passes", "workspace", "pipeline buffers")
    assert entries["fragmentation"] == int(0.05 * sum(entries[name] for name in allocated))
    assert entries["activations"] == sum(kept.values())
    assert memory.step_memory(JOB, Layout(), DEVICE, 0)[0]["communication buffers"] == 0


@pytest.mark.parametrize(
    "precision, zero, shard, main",
    [
        ("fp32", 0, 1, False),
        ("fp32", 1, 2, True),
        ("fp32", 2, 2, True),
        ("fp32", 3, 2, False),
        ("bf16", 3, 2, True),
        ("bf16", 0, 1, True),
    ],
)
def test_files_have_main_weights_that_are_not_in_memory(precision, zero, shard, main):
    """In fp32 they are the weights, or with ZeRO 3 the shards of them."""
    job, layout = replace(JOB, precision=precision, moments=(4, 2)), Layout(dp=2, zero=zero, shard=shard)
    planes = memory._planes(memory.rank_units(job, layout, 0), job, layout)
    assert planes == ((4, 4, 2) if main else (4, 2))


def test_buffers_that_training_changes_are_there_twice():
    """As they are, and from before the step; of a rank's part."""
    table = dict(
        whole=Placement((10,), Constant(0.0), decay=False, buffer=Buffer("same")),
        cut=Placement((8, 3), Constant(0.0), cut=dict(tp=0), decay=False, buffer=Buffer("same")),
        weight=Placement((100,), Constant(0.0)),
    )
    [sizes] = parameters._sizes("u", table, frozenset(), Layout(tp=2).cuts)
    assert not sizes.layer and sizes.buffers == 2 * 4 * (10 + 4 * 3) and [slot.size for slot in sizes.slots] == [100]


@pytest.mark.parametrize("beside, teachers", [((300, 0), 300), ((300, 290), 300), ((0, 700), 700), ((300, 700), 700)])
def test_a_teachers_passes_count_as_far_as_they_exceed_the_students_loss(beside, teachers, monkeypatch):
    """Its layers compute before that loss, whose memory is free then; its logits are there beside the student's."""
    alone, taught = JOB, replace(JOB, teacher=JOB)
    loss, device = memory.step_entries(alone, Layout(), DEVICE, 0)["logits"], replace(DEVICE, context_gb=0.0)
    comparing, more = beside
    monkeypatch.setattr(memory, "teacher_pass", lambda teacher, layout: (loss + more, comparing))
    entries = memory.step_entries(taught, Layout(), device, 0)
    assert loss > 10_000 and (entries["logits"], entries["teacher's passes"]) == (loss, teachers)


@pytest.mark.parametrize(
    "overlap, turns, layers", [(False, False, 1), (True, False, 2), (False, True, 2), (True, True, 4)]
)
def test_gathered_layers_of_zero_3(overlap, turns, layers):
    """The next layer beside it with overlap, and those of the other pass. Sizes are bytes."""
    size = SimpleNamespace(total=lambda of: 1000)
    units = SimpleNamespace(others=size, largest_layer=lambda of: 70)
    layout = SimpleNamespace(zero=3, overlap=overlap, turns=turns, data_sizes={})
    assert memory._gathered(units, JOB, layout) == 1000 + layers * 70


@pytest.mark.parametrize(
    "moments, gradients, numbers",
    [((4, 4), 4, 0), ((4, 4), 2, 1), ((2, 4), 4, 1 + 2), ((2, 2), 4, 2 + 2), ((2, 2), 2, 1 + 2 + 2)],
)
def test_an_update_widens_what_is_narrow(moments, gradients, numbers):
    """Gradients and moments in fp32, four bytes each, and two random numbers for moments, of a part of a shard at most."""
    job = replace(JOB, moments=moments, gradients=gradients, main_gradients=gradients)
    for owned in (1000, WIDENED["cuda"] - 1, WIDENED["cuda"] + 1):
        took = memory.of_update(played(owned), job, Layout(dp=2, zero=1, shard=2))
        assert took == 4 * numbers * min(owned, WIDENED["cuda"])


def test_shards_of_a_mesh_with_context_parallelism():
    parsed = pytest.importorskip("megatron.settings.parse").parse_pretrain
    from megatron.training.rules import resolve

    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data --vocab-size 64 --lr 1 "
    line += "--train-iters 1 --cp 2 --sharding-stage 1 --micro-batch-size 1 --global-batch-size 12"
    whole = Layout.of(resolve(parsed(line.split()), 12), 12)
    part = Layout.of(resolve(parsed(f"{line} --sharding-degree 3".split()), 12), 12)
    assert (whole.dp, whole.shard, part.shard) == (6, 12, 6)


def test_state_of_a_number_of_parameters():
    each = dict(STATES)
    assert each["checkpoint: weights, moments"] == 4 + 8 == CHECKPOINT
    assert each["all of training in fp32"] == 4 + 4 + 8 and each["all of training in bf16"] == 2 + 4 + 4 + 8 == TRAINING
    assert SHARDED == {0: 0, 1: 4 + 8, 2: 4 + 4 + 8, 3: 2 + 4 + 4 + 8}


# ---- choices ---------------------------------------------------------------------------------------------------------


def test_memory_that_a_search_leaves_free():
    config = lambda share: SimpleNamespace(planner=SimpleNamespace(memory_margin=share))
    cluster = Cluster(DEVICE, 8)
    assert choose.with_margin(config(None), cluster).device.usable_bytes == int(0.92 * 50e9)
    assert choose.with_margin(config(0.1), cluster) is cluster and cluster.device.usable_bytes == int(0.97 * 50e9)


@pytest.mark.parametrize("element, each", [(2, 18), (4, 16)])
@pytest.mark.parametrize("world", [1, 3, 5, 100])
def test_devices_that_would_hold_a_model(element, each, world):
    """19.8 bytes (17.6 in fp32) for each of 10e9 parameters, in 85 % of 50 GB; more than those that do not."""
    outcome = SimpleNamespace(
        searched=SimpleNamespace(
            num_layouts=7, rejected=[SimpleNamespace(layout=Layout(), why=lambda: "out of memory")], impossible=[]
        ),
        cluster=Cluster(DEVICE, world),
        kept=[],
        job=SimpleNamespace(element=element),
        parameters=10e9,
    )
    needed = int(-(-each * 1.1 * 10e9 // (0.85 * 50e9)))
    told, least, power = str(choose.nothing_fits(outcome)), max(needed, world + 1), max(8, 2 * world)
    assert f"state alone, {each} bytes a parameter, needs about {least} such devices ({power} as" in told


@pytest.mark.parametrize("runs, share", [(9, 0.1), (10, 0.2), (11, 0.2)])
def test_errors_of_ten_runs_are_a_tolerance(runs, share):
    """The largest of the medians; of fewer runs none, and a tenth is assumed."""
    errors = {"one": Accuracy(0.2, 0.5, runs), "other": Accuracy(0.3, 0.5, 3)}
    device = SimpleNamespace(assumed=True, accuracies=errors)
    assert choose.tolerance(SimpleNamespace(device=device)) == share


def test_sequences_are_shared_while_each_rank_has_4096_tokens():
    job = lambda s: Job(GPTFacts(replace(MODEL, seq_length=s), 1000), 8)
    sizes = lambda s, **space: {cp for cp, *_ in search._context_sizes(job(s), 1, 16, search.Space(**space))}
    assert sizes(16384) == {1, 2, 4} and sizes(8191) == {1} and sizes(8192) == {1, 2} and sizes(1024, cp=8) == {8}


def test_plans_that_need_more_of_the_host_than_it_has_are_left_out():
    model = Model(4, 1024, 8, 512, attention_dropout=0.0, hidden_dropout=0.0)
    job, cluster = Job(GPTFacts(model, 32000), 8), Cluster(replace(DEVICE, memory_gb=4.0), 1)
    own = dict(
        global_batch=8, tp=1, pp=1, micro_batch_size=1, recompute=Recompute("full"), zero=0, offload=(1.0, 0.0, False)
    )
    state = 16 * job.facts.parameters  # main weights, arriving gradients, moments
    for host, fits in ((int(1.02 * state), True), (int(0.98 * state), False), (None, True)):
        found = search.search(job, cluster, search.Space(**own, host_bytes=host))
        assert bool(found.plans) is fits and bool(found.rejected) is not fits, host


def test_what_fills_a_memory_exactly_fits():
    """The device's, and the host's; a byte less is too little."""
    model = Model(4, 512, 8, 512, attention_dropout=0.0, hidden_dropout=0.0)
    job = Job(GPTFacts(model, 32000), 8)
    own = dict(global_batch=8, tp=1, pp=1, micro_batch_size=1, recompute=Recompute("full"), zero=0)
    cluster = lambda size: Cluster(replace(DEVICE, memory_gb=(size + 0.5) / 1e9, margin=0.0), 1)
    for offload in ((0.0, 0.0, False), (1.0, 0.0, False)):
        space = search.Space(**own, offload=offload)
        [plan] = search.search(job, cluster(50e9), space).plans
        host = sum(memory.memory_report(job, plan.layout, DEVICE).host.values())
        less = [(-1, 0), *[(0, -1)] * bool(host)]
        for device, away in ((0, 0), *less):
            found = search.search(job, cluster(plan.bytes + device), replace(space, host_bytes=host + away))
            assert bool(found.plans) is not bool(found.rejected) is bool(device or away), (offload, device, away)
    # Of two memories that are too small the one that lacks more is told
    for device, away in ((-500, -20), (-20, -500)):
        found = search.search(job, cluster(plan.bytes + device), replace(space, host_bytes=host + away))
        assert [(one.over, one.host) for one in found.rejected] == [(500, away < device)]


# ---- arithmetic of a number of parameters ----------------------------------------------------------------------------


@pytest.mark.parametrize("parameters, world", [(1e9, 8), (7e9, 12), (100e9, 64)])
def test_divisions_of_a_state_are_those_that_fit(parameters, world):
    """18 bytes a parameter in bf16; of them 0, 12, 16 or 18 are divided among all ranks, the others over the model's."""
    each = lambda model, stage: parameters * ((18 - (0, 12, 16, 18)[stage]) / model + (0, 12, 16, 18)[stage] / world)
    models = [model for model in (1, 2, 4, 8, 16, 32, 64) if world % model == 0]
    sizes = sorted({each(model, stage) for model in models for stage in range(4)})
    for memory_size in [size + more for size in sizes for more in (0, -1)]:  # exactly enough, and a byte less
        lowest = {model: next((n for n in range(4) if each(model, n) <= memory_size), None) for model in models}
        fitting = [(model, stage) for model, stage in lowest.items() if stage is not None]
        wanted = [(model, world // model, stage, each(model, stage)) for model, stage in fitting]
        assert divisions(parameters, memory_size, world) == sorted(wanted, key=lambda one: (one[2], one[0]))


@pytest.mark.parametrize("devices", [1, 16])
def test_days_of_a_training(devices):
    """1e9 parameters and 20e9 tokens are 1.2e20 FLOPs: 100 devices at 40 % of 100e12 take half a minute for 1 %."""
    assert days(1e9, 20e9, 100e12, 0.4, devices) * 86400 == pytest.approx(1.2e20 / 40e12 / devices)


@pytest.mark.parametrize("size, least, power", [(10.0, 1, 1), (10.1, 2, 2), (0.0, 1, 1), (40.0, 4, 4), (41.0, 5, 8)])
def test_devices_that_hold_a_size(size, least, power):
    assert least_devices(size, 10.0) == (least, power)


# ---- measured speeds -------------------------------------------------------------------------------------------------


def test_measured_speeds_are_work_over_seconds(monkeypatch):
    """A device of 100 GFLOP/s, half of it at 40 rows, and of half a second for anything else."""

    def took(work, kind, *least):
        a, b = (work.__defaults__ or (None, None, None))[:2]
        return 0.5 if a is None else 2 * a.shape[0] * a.shape[1] * b.shape[0] * (1 + 40 / a.shape[0]) / 100e9

    monkeypatch.setattr(calibrate, "seconds_of", took)
    monkeypatch.setattr(calibrate, "SIZES", dict(cpu=(16, 32, 2048)))
    monkeypatch.setattr(calibrate, "SHAPE", dict(cpu=(32, 64, 2)))
    assert calibrate._products("cpu", torch.float32) == (pytest.approx(100e9, rel=0.01), pytest.approx(40, rel=0.05))
    # A causal kernel computes half of 2 x 2 x s^2 h, and on a CPU a fifth more, of its blocks.
    assert calibrate._attention("cpu", torch.float32) == pytest.approx(4 * 32 * 32 * 64 / 2 * 1.2 / 0.5)
    assert calibrate._bandwidth("cpu") == 2 * 4 * (1 << 24) / 0.5  # read and written
    assert calibrate._update_bandwidth("cpu", 1000) == 7 * 4 * 1000 / 0.5  # 4 numbers read, 3 written


# ---- checkpoints and files -------------------------------------------------------------------------------------------


def saving(**own):
    """A training of 100 steps that saves. own: settings of checkpoints"""
    chosen = dict(no_save_optim=False, save="out", save_interval=10, keep_last=None, async_save=False) | own
    length = SimpleNamespace(has_length=True)
    return SimpleNamespace(
        checkpoint=SimpleNamespace(**chosen), batch=length, optimizer=SimpleNamespace(nvme_offload_dir="disk")
    )


@pytest.mark.parametrize(
    "own, each, said",
    [
        (dict(), 12, "10 checkpoints are written, 10 stay: 160.00 GB on the disk of out"),
        (dict(keep_last=3), 12, "10 checkpoints are written, 3 stay: 48.00 GB"),
        (dict(keep_last=30), 12, "10 checkpoints are written, 10 stay: 160.00 GB"),
        (dict(save_interval=30), 12, "3 checkpoints are written, 3 stay: 48.00 GB"),
        (dict(no_save_optim=True), 4, "10 checkpoints are written, 10 stay: 80.00 GB"),
        (dict(save=None), 12, None),
        (dict(save_interval=0), 12, None),
    ],
)
def test_sizes_of_checkpoints_are_told(own, each, said, monkeypatch):
    """1e9 trained parameters of 12 bytes, or 4 without optimizer state, and 2e9 frozen ones of 2 bytes; 8 ranks."""
    monkeypatch.setattr(dry_run.batch, "total_iterations", lambda batch, dp: 100)
    selection = SimpleNamespace(sizes=lambda weights: (1e9, 2e9))
    job = SimpleNamespace(selection=selection, facts=SimpleNamespace(weights=None), element=2)
    first, *more = dry_run._checkpoints(saving(**own), job, Cluster(DEVICE, 8), Layout(dp=8))
    assert first == f"a checkpoint: {each + 4}.00 GB, {(each + 4) / 8:.2f} GB from each rank"
    assert len(more) == (said is not None) and (said or "") in "".join(more)


@pytest.mark.parametrize("own, copies", [(dict(), 1), (dict(async_save=True), 2)])
@pytest.mark.parametrize("world, ranks", [(4, 4), (16, 8)])
def test_sizes_of_files_of_optimizer_state_are_told(own, copies, world, ranks, monkeypatch):
    """Those of the rank with most, on each rank of a node of 8."""
    monkeypatch.setattr(dry_run, "on_disk", lambda job, layout, rank, copies: (3 - rank) * copies * 1e9)
    told = dry_run._files(saving(**own), JOB, Layout(pp=2), Cluster(DEVICE, world))
    assert f"at most {3 * copies}.00 GB of a rank, {3 * copies * ranks}.00 GB of a node, in disk" in told
    assert ("twice because of --async-save" in told) == (copies == 2)


# ---- activations -----------------------------------------------------------------------------------------------------


def test_a_depth_that_is_recomputed_whole_keeps_its_two_inputs():
    """Of 2 x 256 tokens and 128 channels, in bf16."""
    share = Layout(micro_batch_size=2).rank_setup(JOB)
    kept = activations._depth_saved_bytes(GPTFacts(replace(MODEL, mtp_num_layers=1), 1000), share, (LAYER,))
    assert kept["inputs of recomputed layers"] == 2 * (2 * 256 * 128 * 2)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half"])
@pytest.mark.parametrize("pp", [20, 32])
@pytest.mark.parametrize("number", [4, 20, 200])
def test_large_pipelines_hold_what_their_schedules_say(schedule, pp, number):
    """Of more than 16 ranks it is extrapolated from those of 16; passes that wait for W are few."""
    for rank in (0, pp // 2, pp - 1):
        whole = held_passes._most_held(schedule, pp, min(number, 4 * pp), 2, rank, False)
        for at, near in ((0, dict(rel=0.1, abs=2)), (1, dict(rel=0.4, abs=3))):
            found, wanted = (
                max(sum(held[at]) for held in of) for of in (most_held(schedule, pp, number, 2, rank), whole)
            )
            assert found == pytest.approx(wanted, **near), rank


# ---- a plan as JSON --------------------------------------------------------------------------------------------------


def test_a_plan_as_json_has_each_figure_under_its_name(monkeypatch):
    """6e12 FLOPs, half of them with causal attention's seen pairs, in 2 s on 8 ranks of a device with 989 TFLOP/s."""
    layout = Layout(tp=2, pp=2, dp=2, micro_batch_size=3)
    took = speed.StepTime(2.0, dict(compute=1.5, bubble=0.5), 0.25, 6e12, 3e12)
    cluster = Cluster(replace(find("H100"), memory_gb=50.0), 8)
    monkeypatch.setattr(Layout, "applied", lambda *_: None)
    monkeypatch.setattr(plan_json, "layout_settings", lambda config: dict(sharding_stage=0))
    found = plan_json._plan(None, search.Plan(layout, JOB, took, 7, 1), SimpleNamespace(cluster=cluster))
    assert (found["layout"], found["global_batch"], found["bytes"]) == ("tp2-pp2-dp2", 24, 7)
    assert found["settings"] == dict(sharding_stage=0, data_parallel_size=2) and found["flags"] == layout.flags()
    assert (found["seconds"], found["parts"], found["bubble"]) == (2.0, dict(compute=1.5, bubble=0.5), 0.25)
    assert found["tokens_per_second"] == 24 * 256 / 2 and found["speeds"] == "assumed"
    for name, flops in (("", 6e12), ("_causal", 3e12)):
        assert found[f"tflops_per_rank{name}"] == pytest.approx(flops / 2 / 8 / 1e12)
        assert found[f"mfu{name}"] == pytest.approx(flops / 2 / 8 / 989e12, rel=1e-3)
    for rank, one in enumerate(found["memory"]):
        assert one["rank"] == rank and one["total"] == sum(one["device"].values()) > 0
    sent = {one["what"] for one in found["traffic"] if one["axis"] == "pp"}
    assert len(found["memory"]) == 2 and sent == {"activations"}  # of the first rank, which sends nothing back
    assert found["groups"]["axes"]["tp"] == dict(groups=4, ranks=2) and found["groups"]["most_of_a_rank"] > 2
    assert found["error"] is None  # no published run has these features on this GPU


# ---- commands and reports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "world, local, start",
    [
        (1, 8, "python"),
        (1, 1, "python"),
        (4, 4, "torchrun --nproc-per-node 4"),
        (8, 8, "torchrun --nproc-per-node 8"),
        (8, 4, "torchrun --nnodes 2 --nproc-per-node 4 --node-rank"),
        (16, 1, "torchrun --nnodes 16 --nproc-per-node 1 --node-rank"),
    ],
)
def test_a_command_starts_the_ranks_of_each_node(world, local, start):
    assert " ".join(command.launcher(Cluster(DEVICE, world, local))).startswith(start)
    assert ("$MASTER_ADDR" in command.launcher(Cluster(DEVICE, world, local))) == ("--nnodes" in start)


@pytest.mark.parametrize("seed", range(8))
def test_lines_of_a_command_are_as_full_as_they_may_be(seed, monkeypatch):
    """A flag stays with its values, unless these alone are longer than a line; no line is longer than the terminal."""
    draw, flags = random.Random(seed), []
    for n in range(25):
        flags.append(
            [f"--{n}{'f' * draw.randrange(18)}", *("v" * draw.randrange(1, 20) for _ in range(draw.randrange(3)))]
        )
    flags.append(["--long", *["v" * 30] * 4])
    monkeypatch.setattr(command, "planned_flags", lambda *_: [word for flag in flags for word in flag])
    config = SimpleNamespace(model=SimpleNamespace(model_type="GPT"))
    text = command.command_line(config, None, Cluster(DEVICE, 1))
    lines = [line.strip() for line in text.split(" \\\n    ")]
    assert " ".join(lines).split()[2:] == [word for flag in flags for word in flag]
    assert max(map(len, text.split("\n"))) <= WIDTH
    whole = [" ".join(flag) for flag in flags if flag[0] != "--long"]
    for line, following in itertools.pairwise(lines):
        first = next((one for one in whole if (following + " ").startswith(one + " ")), following.split()[0])
        assert len(line) + 1 + len(first) > command.ROOM, "it would have fit"
    assert all(any(one in line for line in lines) for one in whole)


@pytest.mark.parametrize("pp, shown", [(1, [0]), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (8, [0, 2, 7])])
def test_ranks_whose_memory_is_reported(pp, shown, monkeypatch):
    """All of up to four stages; of more the first, the fullest and the last."""
    tables = []
    monkeypatch.setattr(
        dry_run.text, "memory_tables", lambda reports, *_: tables.append([one.rank for one in reports]) or ""
    )
    for name in ("_changed", "_data", "_checkpoints", "_time"):
        monkeypatch.setattr(dry_run, name, lambda *_: [])
    for name in ("_topology", "_stages", "_schedule"):
        monkeypatch.setattr(dry_run, name, lambda *_: "")
    job = replace(JOB, facts=GPTFacts(replace(MODEL, num_layers=40), 1000))
    layout, config = Layout(pp=pp), SimpleNamespace(planner=SimpleNamespace(mtbf=None))
    reports = [memory.MemoryReport(rank, dict(weights=9 if rank == min(2, pp - 1) else 1)) for rank in range(pp)]
    plan = SimpleNamespace(job=job, layout=layout, rank=min(2, pp - 1))
    list(dry_run._sections(config, plan, reports, Cluster(DEVICE, pp), "", 80))
    assert tables == [shown]


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_are_gathered_beside_passes_where_they_are_sharded(zero, overlap):
    flags = Layout(dp=4, zero=zero, shard=4 if zero else 1, overlap=overlap).flags()
    assert ("--overlap-grad-reduce" in flags) == overlap
    assert ("--overlap-param-gather" in flags) == (overlap and zero > 0)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("widens", [False, True])
def test_a_measured_device_has_each_speed_in_its_place(kind, widens, monkeypatch):
    """fp16 is as fast as bf16 on a GPU, and as fp32 on a CPU; bf16 that a CPU widens is as fast as fp32."""
    own = dict(fp32=1e9, bf16=2e9)
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    monkeypatch.setattr(calibrate.torch.cuda, "is_available", lambda: kind == "cuda")
    monkeypatch.setattr(calibrate.target, "installed_gpu", lambda: replace(DEVICE, host=7e9))
    monkeypatch.setattr(
        calibrate.target, "this_cpu", lambda memory, ranks: replace(DEVICE, kind="cpu", memory_gb=9.0 / ranks)
    )
    monkeypatch.setattr(calibrate, "run_ranks", lambda ranks, work: [dict(bandwidth=5e9, latency=6e-6)] * ranks)
    monkeypatch.setattr(calibrate, "choose_threads", lambda ranks: SimpleNamespace(count=torch.get_num_threads()))
    monkeypatch.setattr(calibrate, "keep_memory", lambda: None)
    monkeypatch.setattr(
        calibrate.cpu_ops, "widens", lambda kind, dtype: widens and kind == "cpu" and names[dtype] == "bf16"
    )
    monkeypatch.setattr(calibrate, "_bandwidth", lambda kind: 3e9)
    monkeypatch.setattr(calibrate, "_update_bandwidth", lambda kind, size: 4e9)
    monkeypatch.setattr(calibrate, "_products", lambda kind, dtype: (own[names[dtype]], 11.0))
    monkeypatch.setattr(calibrate, "_attention", lambda kind, dtype: own[names[dtype]] / 10)
    monkeypatch.setattr(calibrate, "_ops", lambda kind, figures: dict(launch=8e-6, unfused=1.5))
    found = calibrate.measure(lambda line: None, 3)
    half = "bf16" if kind == "cuda" else "fp32"
    speeds = dict(fp32=1e9, bf16=1e9 if widens and kind == "cpu" else 2e9, fp16=own[half])
    assert found.flops == speeds and found.attention == {name: speed / 10 for name, speed in speeds.items()}
    assert (found.kind, found.assumed, found.bandwidth, found.rows) == (kind, False, 3e9, 11.0)
    assert (found.launch, found.unfused) == (8e-6, 1.5)
    if kind == "cuda":
        assert (found.update_bandwidth, found.attention_tokens, found.attention_backward) == (4e9, 0.0, 2.5)
        assert (found.inner, found.outer, found.host) == (DEVICE.inner, DEVICE.outer, 7e9)
    else:
        assert (found.inner, found.outer, found.latency, found.memory_gb) == (5e9, 5e9, 6e-6, 3.0)
        assert found.update_bandwidth == 0.0


@pytest.mark.parametrize(
    "method, number, together", [("block", 3, 1), ("uniform", 3, 3), (None, None, 1), ("uniform", 1, 1)]
)
def test_layers_that_are_recomputed_together_are_in_memory_together(method, number, together, monkeypatch):
    """Groups of them, with "uniform"; of "block" each is one by itself."""
    asked = []
    monkeypatch.setattr(activations, "repeated", lambda *_: {("design", ()): 4})
    monkeypatch.setattr(activations, "_layer_workspace", lambda *own: asked.append(own[-1]) or 5)
    settings = Recompute("full", recompute_method=method, recompute_num_layers=number)
    assert activations._workspace.__wrapped__(None, None, settings, (0, 1)) == 5 and asked == [together]


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("fitting", range(9))
def test_as_many_layers_as_fit_are_spared_from_recomputation(layers, fitting, monkeypatch):
    """Of each stage the first ones, but not all: that is another plan."""
    job = replace(JOB, facts=GPTFacts(replace(MODEL, num_layers=2 * layers), 1000))

    def evaluate(job, layout, cluster):
        own = layout.recompute.exempt_layers
        assert sorted(own) == [*range(len(own) // 2), *range(layers, layers + len(own) // 2)]
        return (len(own) // 2 if len(own) // 2 <= fitting else None), None

    monkeypatch.setattr(search, "evaluate", evaluate)
    plan = SimpleNamespace(job=job, layout=Layout(pp=2, recompute=Recompute("full")))
    assert search._spared(plan, None) == (min(fitting, layers - 1) or None)


def test_ranks_wait_for_each_other_until_groups_are_there():
    """Channels are opened later, between two ranks."""
    parts = dict(processes=20.0, rendezvous=7.0, groups=3.0, channels=100.0)
    assert StartUp(parts).waited == 30.0 and StartUp(parts).total == 130.0


@pytest.mark.parametrize("seen, told", [(0.0, False), (2e12, True), (4e12, False)])
def test_half_of_causal_attention_is_told_where_it_is_less(seen, told):
    plan = search.Plan(Layout(), JOB, speed.StepTime(2.0, {}, 0.0, 4e12, seen), 10**9, 0)
    lines = text.verdict(plan, Cluster(DEVICE, 1)).splitlines()
    assert len(lines) == 2 + told and ("1 TFLOP/s" in lines[-1]) == told


@pytest.mark.parametrize(
    "flags, local", [("--world-size 4 --local-world-size 8", 4), ("--world-size 16", 8), ("--world-size 3", 3)]
)
def test_a_node_has_no_more_ranks_than_the_job(flags, local):
    config = parse_pretrain(
        [*"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64".split(), *flags.split()]
    )
    assert cluster_of(config, {})[0].local_size == local


@pytest.mark.parametrize(
    "schedule, pp, chunks, ranks",
    [("zb-v", 2, 2, {0}), ("v-half", 4, 2, {0}), ("1f1b", 2, 1, set()), ("interleaved", 2, 2, set())],
)
def test_two_chunks_of_a_rank_share_a_table(schedule, pp, chunks, ranks):
    """Where the first and the last stage are on one rank; on one stage there is nothing to share."""
    tied = replace(JOB, facts=GPTFacts(replace(MODEL, num_layers=16, untie_embeddings_and_output_weights=False), 1000))
    layout = Layout(pp=pp, chunks=chunks, schedule=schedule)
    assert {rank for rank in range(pp) if traffic.shares_table(tied, layout, rank)} == ranks
    whole = replace(JOB, facts=GPTFacts(replace(MODEL, num_layers=16), 1000))
    assert not any(traffic.shares_table(whole, layout, rank) for rank in range(pp))
    assert not traffic.shares_table(tied, Layout(), 0)


# ---- borders of a search ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dp, space, found",
    [
        (8, dict(global_batch=8), [(1, 8)]),
        (4, dict(global_batch=8), [(1, 8), (2, 8)]),
        (3, dict(global_batch=8), []),
        (9, dict(global_batch=8), []),
        (1, dict(global_batch=96), [(2**k, 96) for k in range(6)]),
        (1, dict(global_batch=64), [(2**k, 64) for k in range(7)]),
        (1, dict(global_batch=256), [(2**k, 256) for k in range(7)]),
        (3, dict(max_global_batch=8), [(1, 6), (2, 6)]),
        (8, dict(max_global_batch=8), [(1, 8)]),
        (2, dict(max_global_batch=9, micro_batch_size=3), [(3, 6)]),
        (2, dict(global_batch=8, micro_batch_size=3), []),
    ],
)
def test_batches_of_a_search(dp, space, found):
    """Micro-batches are powers of two up to 64; the largest batch that is not more than the greatest one."""
    result = search.SearchedPlans()
    assert list(search._batches(JOB, dp, search.Space(**space), result)) == found
    most = space.get("global_batch") or space["max_global_batch"]
    assert bool(result.impossible) == (dp > most or "global_batch" in space and most % dp > 0)


@pytest.mark.parametrize(
    "layout, number",
    [
        (dict(dp=8), 0),
        (dict(tp=2), 1),
        (dict(cp=4), 1),
        (dict(cp=4, cp_heads=2), 2),  # of two levels
        (dict(pp=2), 1),
        (dict(pp=2, schedule="zb-h1"), 2),
        (dict(pp=2, stage_layers="3,3"), 1),
        (dict(pp=2, stage_layers="4,2"), 2),
        (dict(dp=4, zero=1, shard=4), 1),
        (dict(dp=4, zero=3, shard=4), 2),
        (dict(dp=4, zero=3, shard=2), 3),
        (dict(dp=4, offload=0.5), 2),
        (dict(recompute=Recompute("core_attn")), 1),
        (dict(recompute=Recompute("full", no_recompute_layers="0,1")), 2),
    ],
)
def test_features_that_plain_data_parallelism_does_not_need(layout, number):
    assert search.features(Layout(**layout)) == number


@pytest.mark.parametrize(
    "kinds, kind", [(["a2a"], "a2a"), (["p2p", "allgather"], "allgather"), (["p2p", "a2a"], "p2p")]
)
def test_layers_that_share_attention_in_different_ways(kinds, kind):
    """All gather if one does; else all are rings."""
    assert choose._comm_type(SimpleNamespace(cp_comm_types=kinds)) == kind


@pytest.mark.parametrize("length, fits", [(63, True), (64, True), (65, False)])
def test_texts_fill_a_table_of_positions_exactly(length, fits):
    facts = GPTFacts(replace(MODEL, seq_length=64), 1000)
    if fits:
        serving.check(facts, serving.Requests(40, length - 40))
    else:
        with pytest.raises(SettingsError, match="are more than the 64 positions"):
            serving.check(facts, serving.Requests(40, length - 40))


@pytest.mark.parametrize("schedule", ["zb-v", "v-half"])
@pytest.mark.parametrize("number", [40, 64, 200])
def test_large_pipelines_begin_as_often_as_their_schedules_say(schedule, number):
    """Of more than 16 ranks they are extrapolated from those of 16."""
    pp = 20
    for rank in (0, pp // 2, pp - 1):
        held = count = 0
        for op in held_passes.ops_of(schedule, pp, number, 2, rank):
            if op.kind != "W":
                count += op.kind == "F" and held == 0
                held += 1 if op.kind == "F" else -1
        assert held_passes.starts(schedule, pp, number, 2, rank, (0, 1)) == count


def test_distances_of_axes_between_ranks(monkeypatch):
    """tp is the nearest, then etp and ep of experts, shards, replicas; the ends of a pipeline are furthest apart."""
    layout = Layout(tp=2, pp=3, dp=12, zero=1, shard=4, ep=2, etp=1)
    asked = []
    monkeypatch.setattr(
        Cluster, "seconds", lambda self, op, size, calls, ranks, stride: asked.append((ranks, stride)) or 0.0
    )
    axes = ["tp", "shard", "replicate", "etp", "ep", "expert_shard", "expert_replicate", "tied"]
    for axis in axes:
        step_communication._seconds(traffic.Transfer("x", "all_reduce", axis, 9, 1), layout, Cluster(DEVICE, 72))
    sizes = layout.data_sizes
    assert dict(zip(axes, asked, strict=True)) == {
        "tp": (2, 1),
        "shard": (4, 2),
        "replicate": (3, 8),
        "etp": (1, 1),
        "ep": (2, 1),
        "expert_shard": (sizes["expert_shard"], 2),
        "expert_replicate": (sizes["expert_replicate"], 2 * sizes["expert_shard"]),
        "tied": (2, 24 * 2),
    }
    assert sizes["expert_shard"] * sizes["expert_replicate"] * 2 == 24 and sizes["expert_shard"] > 1


@pytest.mark.parametrize("number, stages", [(32, 16), (17, 16), (40, 4), (16, 16)])
def test_a_sample_of_stages_has_both_ends_and_is_even(number, stages):
    found = schedule_time._sample(tuple(range(number)), stages)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert (found[0], found[-1], len(found)) == (0, number - 1, stages) and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("ranks, shown", [(8, "0, 1, 2, 3, 4, 5, 6, 7"), (16, "0, 1, 2, ..., 15")])
def test_ranks_of_a_group_are_told_if_they_are_few(ranks, shown):
    told = dry_run._topology(Layout(tp=ranks), Cluster(DEVICE, ranks, 8), 80)
    assert f"tp: 1 groups of {ranks}, the first: {shown}" in told.replace("\n", " ")


def test_links_are_measured_by_what_a_large_message_takes_more(monkeypatch):
    """A small one takes 2 ms and a large one of 8 MiB 10 ms: the difference is the transfer."""
    clock = [0.0]

    def all_reduce(x, axis):
        clock[0] += 0.002 if x.numel() < 100 else 0.010

    monkeypatch.setattr(calibrate.collectives, "all_reduce", all_reduce)
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: clock[0])
    found = calibrate._links(0)
    assert found["latency"] == pytest.approx(0.002) and found["bandwidth"] == pytest.approx(4 * (1 << 21) / 0.008)


@pytest.mark.parametrize("offload, asked", [(0.0, 1.0), (0.25, 0.25), (1.0, 1.0)])
def test_a_layout_without_offload_asks_for_no_share_of_it(offload, asked):
    """A share of 0 would be one that somebody gave."""
    layout = Layout(dp=2, offload=offload)
    found = layout.settings()
    assert (found["optimizer_cpu_offload"], found["optimizer_offload_fraction"]) == (offload > 0, asked)
    assert ("--optimizer-offload-fraction" in layout.flags()) == (asked < 1)


@pytest.mark.parametrize("chunk", [64, 10_000])
def test_a_teachers_loss_has_fp32_logits_of_a_chunk(chunk):
    """Nine tensors of them, beside hidden states of all tokens and a block of logits in bf16."""
    teacher, layout = replace(JOB, chunk=chunk), Layout(micro_batch_size=3)
    tokens, rows = 3 * 256, FACTS.vocabulary_rows(1)
    block = LossChunks.of(rows, 2, "cuda", chunk).block
    _, comparing = memory.teacher_pass(teacher, layout)
    logits = 2 * min(tokens, block) * rows
    assert comparing == 2 * tokens * 128 + logits + 9 * 4 * min(tokens, chunk) * rows


def test_weights_of_experts_stay_as_they_are_where_others_are_kept_in_fp8():
    """Stacked ones, and those that are not trained; a scale is of a whole weight, or of a tile."""
    table = {f"{name}.weight": SimpleNamespace(stacked=name == "experts") for name in ("up", "down", "experts")}
    design = SimpleNamespace(in_fp8=("up", "down", "experts"))
    kept = lambda recipe: parameters._cast(
        SimpleNamespace(gathered_in_fp8=recipe), [design], table, frozenset({"down.weight"}), ""
    )
    assert (kept("tensorwise"), kept("blockwise"), kept("")) == ({"up.weight": 0}, {"up.weight": 128 * 128}, {})


@pytest.mark.parametrize(
    "length, cp, shapeless", [(64, 2, False), (66, 2, True), (66, 1, False), (64, 4, False), (60, 4, True)]
)
def test_ranks_of_cp_have_two_pieces_of_a_sequence_each(length, cp, shapeless):
    words = (
        f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {length} --cp {cp} --micro-batch-size 1"
    )
    assert problems._shapeless(parse_pretrain(words.split()), cp) is shapeless
    assert problems._shapeless(parse_pretrain(words.split()), cp + 1) is (cp > 1 or shapeless)


def test_scores_of_a_head_are_summed_for_each_micro_batch(monkeypatch):
    """Of a head of a task, which has no vocabulary: two sums, of 10 and 20 bytes; on the last stage alone."""
    monkeypatch.setattr(Layout, "rank_setup", lambda *_: None)
    facts = SimpleNamespace(num_layers=2, score_sums=lambda share: [10, 20])
    job, layout = SimpleNamespace(global_batch=12, facts=facts), Layout(tp=2, pp=2, dp=2, micro_batch_size=2)
    [found] = traffic._of_loss(job, layout, 1)
    assert (found.op, found.axis, found.bytes, found.calls) == ("all_reduce", "tp", 3 * 30, 3 * 2)
    assert traffic._of_loss(job, layout, 0) == []


@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
@pytest.mark.parametrize("pp", [1, 2, 3, 5])
@pytest.mark.parametrize("exact", [False, True])
def test_stages_before_the_first_backward_pass_wait(schedule, chunks, pp, exact):
    """Each chunk's passes take 3.5, and the gap is one for each other stage."""
    number = 4 * pp
    assert (
        schedule_time.span(schedule, pp, number, chunks, backward=2.5, exact=exact) == (number * chunks + pp - 1) * 3.5
    )


@pytest.mark.parametrize("layout, batch, told", [(2, 8, False), (4, 8, True), (2, 16, True)])
def test_a_choice_of_a_slower_plan_is_explained(layout, batch, told):
    """One that differs from the fastest in its layout, or in its batch."""
    plan = lambda size, batch, took: search.Plan(
        Layout(dp=2, micro_batch_size=size), replace(JOB, global_batch=batch), speed.StepTime(took, {}, 0.0, 1.0), 1, 0
    )
    best, fastest = plan(layout, batch, 1.1 * batch / 8 * (1 if told else 1 / 1.1)), plan(2, 8, 1.0)
    found = search.SearchedPlans(plans=[best], fastest=fastest, alike=7)
    words = text.choice(found, 0.2)
    assert bool(words) is told
    if told:
        assert "of 7 plans within 20% of the fastest" in words and "predicted to be 10.0% faster" in words


def test_the_layer_that_saves_most_counts(monkeypatch):
    """Of kinds of layers, however many there are of each; without layers nothing."""
    sizes = dict(small=dict(a=3, b=4), large=dict(a=9))
    monkeypatch.setattr(activations, "_layer_saved_bytes", lambda facts, share, design, modules: sizes[design])
    for designs, most in ((["small"], 7), (["small", "large"], 9), (["large", "small"], 9), ([], 0)):
        monkeypatch.setattr(activations, "repeated", lambda *_, own=designs, **__: {(one, ()): 5 for one in own})
        assert activations.largest_layer(JOB, Layout(), (0, 1)) == most


POSITIVE = ("memory_gb", "bandwidth", "unfused", "inner", "outer", "host", "attention_backward")
NOT_NEGATIVE = "attention_tokens exposed rows latency launch context_gb communication_gb update_bandwidth".split()


@pytest.mark.parametrize("name", [*POSITIVE, *NOT_NEGATIVE, "flops", "attention"])
def test_figures_of_a_device_are_numbers_that_can_be_measured(name):
    """Nothing is divided by 0; a time may be too short to be seen."""
    of = lambda value: replace(DEVICE, **{name: dict(bf16=value) if name in ("flops", "attention") else value})
    wrong = [-1.0, float("inf"), float("nan"), "1", None, *([] if name in NOT_NEGATIVE else [0, 0.0])]
    for value in wrong:
        with pytest.raises(ValueError, match=name.split()[0]):
            devices._check(of(value))
    for value in (1e-9, 1, *([0] if name in NOT_NEGATIVE else [])):
        devices._check(of(value))


def test_flops_of_a_step_are_of_whole_sequences_unless_half_is_asked_for():
    whole, half = FACTS.trained_flops(JOB.selection, False), FACTS.trained_flops(JOB.selection, True)
    assert half < whole and speed.useful_flops(JOB) == whole * 24 * 256
    assert speed.useful_flops(JOB, seen=True) == half * 24 * 256
    took = speed.step(JOB, Layout(), Cluster(DEVICE, 1))
    assert (took.flops, took.seen_flops) == (whole * 24 * 256, half * 24 * 256)


def test_experts_tokens_go_in_hops_where_it_is_asked_for():
    assert Layout(ep=4).ep_levels is None and Layout(ep=8, ep_inner=4).ep_levels == (4, 2)
