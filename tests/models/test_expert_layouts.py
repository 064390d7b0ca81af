# SPDX-License-Identifier: Apache-2.0
"""GPTs with experts in all kinds of layouts, schedules and ZeRO stages against the same networks in plain torch, in one
process, in fp64 (`plain_experts.py`): losses, gradient norms and weights, and loads and biases exactly.
"""

from functools import cache, partial
from itertools import product

import pytest
import torch

import pretrain_gpt
from megatron.fused_kernels import TABLE
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.kinds.experts import dispatch, grouped, router
from megatron.mpu.forked import run_ranks
from megatron.mpu.layers import LinearOptions, linear
from megatron.mpu.mesh import Mesh
from megatron.telemetry.events import read_events
from megatron.training.rules import resolve
from tests.models import plain_experts as plain
from tests.models.divisions import check_divisions, ranks_of
from tests.models.plain_state import LAYERS, LINE, compare, read_all
from tests.models.test_own_experts import EP2, EP4, ETP1, ETP2, PP2
from tests.models.test_own_experts import TP2 as SP
from tests.ranks import trains
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

GATED = "--swiglu --disable-bias-linear --moe-ffn-hidden-size 16"
BOTH = plain.both(plain.sequence_balance(0.5, 2), plain.z_loss(0.05))
CAPACITY = "--moe-expert-capacity-factor 1.0"  # 2 x 12 tokens to 2 of 8 experts: 6 pairs each
FAMILIES = {
    # Mixtral's router; a dense first layer, and a shared expert with a gate.
    "gated": plain.Family(
        f"{GATED} --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.05",
        plain.softmax_of_chosen(2),
        BOTH,
        layers=(1, 2, 3),
        shared=12,
    ),
    # DeepSeek-V3's router, and GeLU with biases in every second layer.
    "plain": plain.Family(
        "--moe-layer-freq 2 --moe-router-score-function sigmoid --moe-router-topk 3 --moe-ffn-hidden-size 16 "
        f"--moe-router-topk-scaling-factor 1.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate {plain.RATE}",
        plain.sigmoid(3, 1.5),
        layers=(0, 2),
        gated=False,
        bias=True,
    ),
    "capacity": plain.Family(f"{GATED} {CAPACITY}", plain.softmax_of_chosen(2), capacity=6),
    "first come": plain.Family(
        f"{GATED} {CAPACITY} --moe-router-pre-softmax --moe-token-drop-policy position",
        plain.softmax_of_all(2),
        capacity=6,
        by_position=True,
    ),
    "aux loss": plain.Family(
        f"{GATED} --moe-aux-loss-coeff 0.5",
        plain.softmax_of_chosen(2),
        plain.batch_balance("load balancing loss", 0.5, rows=2),
    ),
    # The loss depends on the sequences of a micro-batch over all ranks: here two.
    "global loss": plain.Family(
        f"{GATED} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.5",
        plain.softmax_of_chosen(2),
        plain.batch_balance("global load balancing loss", 0.5, rows=2),
    ),
    "latent": plain.Family(
        f"{GATED} --moe-latent-size 10 --moe-shared-expert-intermediate-size 12 --moe-shared-expert-gate",
        plain.softmax_of_chosen(2),
        shared=12,
        latent=10,
    ),
    "latent, biases": plain.Family(
        "--moe-layer-freq 2 --moe-router-score-function sigmoid --moe-router-topk 3 --moe-ffn-hidden-size 16 "
        "--moe-router-topk-scaling-factor 1.5 --moe-latent-size 10",
        plain.sigmoid(3, 1.5),
        layers=(0, 2),
        gated=False,
        latent=10,
    ),
    "one expert": plain.Family(f"{GATED} --moe-router-pre-softmax --moe-router-topk 1", plain.softmax_of_all(1)),
}
PAD = "--moe-pad-expert-input-to-capacity"
TP = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
ZB = "--pipeline-schedule zb-h1 --micro-batch-size 1"
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
V = "--pipeline-schedule zb-v --micro-batch-size 1"
FULL = "--recompute-granularity full"
MODULES = "--recompute-granularity selective --recompute-modules"
LAYOUTS = {
    "one process": (1, "gated", ""),
    "one process, biases": (1, "plain", ""),
    "capacity": (1, "capacity", ""),
    "capacity, padded": (1, "capacity", PAD),
    "first come": (1, "first come", ""),
    "recomputed MLP": (1, "gated", f"{MODULES} mlp layernorm"),
    "recomputed activations": (1, "plain", f"{MODULES} mlp_act core_attn"),
    "recomputed layers": (1, "plain", f"{FULL} --recompute-num-layers 2"),
    "recomputed layers, losses": (1, "gated", FULL),
    "ep2": (2, "gated", EP2),
    "ep4, one sample at a time": (4, "plain", EP4),
    "ep2, capacity": (2, "capacity", EP2),
    "ep2, capacity, padded": (2, "first come", f"{EP2} {PAD}"),
    "etp2": (2, "gated", ETP2),
    "etp2, biases": (2, "plain", ETP2),
    "etp2, capacity, padded": (2, "capacity", f"{ETP2} {PAD}"),
    "tp2": (2, "gated", TP),
    "tp2, whole experts": (2, "plain", f"{TP} {ETP1}"),
    "tp2 with sequence parallelism": (2, "gated", SP),
    "tp2, ep over its ranks": (2, "plain", f"{SP} {ETP1} {EP2}"),
    "tp2 dp2, ep2 etp2": (4, "gated", f"{SP} {EP2} {ETP2}"),
    "tp2 dp2, ep4": (4, "plain", f"{TP} --expert-model-parallel-size 4 {ETP1}"),
    "cp2, ep over its ranks": (2, "gated", f"{CP2} {EP2}"),
    "cp2 tp2, ep4, recomputed": (4, "plain", f"{CP2} {SP} --expert-model-parallel-size 4 {ETP1} {FULL}"),
    "ep2, zero1": (4, "gated", f"{EP2} --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "ep2, zero2": (4, "plain", f"{EP2} --sharding-stage 2 --micro-batch-size 1 --overlap-grad-reduce"),
    "ep2, zero3": (4, "gated", f"{EP2} --sharding-stage 3 --overlap-param-gather"),
    "ep4, zero3, recomputed": (4, "plain", f"{EP4} --sharding-stage 3 {FULL}"),
    "ep2, fused accumulation": (2, "gated", f"{EP2} --gradient-accumulation-fusion --micro-batch-size 1"),
    "pp2 ep2": (4, "gated", f"{PP2} {EP2}"),
    "pp2 ep2, zb-h1": (4, "plain", f"{PP2} {EP2} {ZB}"),
    "pp2 ep2, zb-h1, zero2": (4, "gated", f"{PP2} {EP2} {ZB} --sharding-stage 2"),
    "pp2 etp2, interleaved": (4, "gated", f"{PP2} {ETP2} {INTERLEAVED}"),
    "pp2 ep2, interleaved, zero3": (4, "plain", f"{PP2} {EP2} {INTERLEAVED} --sharding-stage 3"),
    "pp2 ep2, zb-h1, capacity, padded": (4, "capacity", f"{PP2} {EP2} --pipeline-schedule zb-h1 {PAD}"),
    "ep2, zero3, capacity, recomputed": (2, "first come", f"{EP2} --sharding-stage 3 {FULL}"),
    "pp2 ep2 in a V, zero3": (4, "gated", f"{PP2} {EP2} {V} --sharding-stage 3"),
    "latent": (1, "latent", f"{MODULES} mlp layernorm"),
    "latent, biases": (1, "latent, biases", f"{MODULES} mlp_act core_attn"),
    "latent, ep2, zero3": (2, "latent, biases", f"{EP2} --sharding-stage 3 --overlap-param-gather"),
    "latent, etp2": (2, "latent, biases", ETP2),
    "latent, tp2": (2, "latent", TP),
    "latent, tp2, whole experts": (2, "latent, biases", f"{TP} {ETP1}"),
    "latent, tp2 dp2, ep2 etp2": (4, "latent", f"{SP} {EP2} {ETP2}"),
    "latent, tp2, ep over its ranks": (2, "latent", f"{SP} {ETP1} {EP2} {FULL}"),
    "latent, ep2, zero2": (4, "latent", f"{EP2} --sharding-stage 2 --micro-batch-size 1 --overlap-grad-reduce"),
    "latent, pp2 ep2, zb-h1": (4, "latent, biases", f"{PP2} {EP2} {ZB}"),
    "latent, cp2 ep2": (2, "latent", f"{CP2} {EP2}"),
    "aux loss": (1, "aux loss", ""),
    "cp2 ep2, aux loss, recomputed": (2, "aux loss", f"{CP2} {EP2} {FULL}"),
    "pp2 ep2, aux loss, interleaved": (4, "aux loss", f"{PP2} {EP2} {INTERLEAVED}"),
    "tp2, global loss": (2, "global loss", TP),
    "ep2, global loss, zero3": (2, "global loss", f"{EP2} --micro-batch-size 1 --sharding-stage 3"),
    "pp2 ep2 in a V, global loss, recomputed": (4, "global loss", f"{PP2} {EP2} {V} {FULL}"),
    "pp2 ep2 in a V, one expert": (4, "one expert", f"{PP2} {EP2} {V}"),
}
HOPS = "--moe-token-dispatcher-type flex --moe-ranks-per-node"
LAYOUTS |= {
    "ep4 in two hops": (4, "plain", f"{EP4} {HOPS} 2"),
    "ep2, nodes of one rank": (2, "gated", f"{EP2} {HOPS} 1"),
    "ep2 on one node, capacity, recomputed": (2, "capacity", f"{EP2} {HOPS} 8 {FULL}"),
    "tp2 dp2, ep4 in two hops": (4, "gated", f"{TP} --expert-model-parallel-size 4 {ETP1} {HOPS} 2"),
    "cp2 tp2, ep4 in two hops, recomputed": (
        4,
        "plain",
        f"{CP2} {SP} --expert-model-parallel-size 4 {ETP1} {FULL} {HOPS} 2",
    ),
    "tp2 dp2, ep2 etp2, nodes of two ranks": (4, "latent", f"{SP} {EP2} {ETP2} {HOPS} 2"),
    "pp2 ep2, zb-h1, nodes of one rank": (4, "plain", f"{PP2} {EP2} {ZB} {HOPS} 1"),
    "pp2 ep2 in a V, zero3, nodes of one rank": (4, "gated", f"{PP2} {EP2} {V} --sharding-stage 3 {HOPS} 1"),
}
LONG = {  # with --full: of four ranks, or like others
    "latent, tp2 dp2, ep2 etp2",
    "latent, ep2, zero2",
    "latent, cp2 ep2",
    "latent, etp2",
    "ep2, zero3, capacity, recomputed",
    "pp2 ep2, zb-h1, capacity, padded",
    "cp2 ep2, aux loss, recomputed",
    "pp2 ep2, aux loss, interleaved",
    "pp2 ep2 in a V, global loss, recomputed",
    *(name for name, (world, *_) in LAYOUTS.items() if "hops" in name or "nodes of" in name if world == 4),
}


pretrain = trains(pretrain_gpt, f"{LINE} --num-experts 8")


@cache
def trained(family: str):
    return FAMILIES[family].train()


def check(folder, family: str):
    """A run against the plain loop, which is in fp64. Returns the tensors of its checkpoint."""
    steps, wanted, loads = trained(family)
    assert [step["loads"] for step in records(folder, "experts")] == loads
    tensors = compare(folder, steps, wanted)
    assert max((tensors[name].double() - values).abs().max().item() for name, values in wanted.items()) < 1e-6
    return tensors


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, family, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{FAMILIES[family].flags} {words} --save {tmp_path} --check-replicas-interval 2")
    tensors = check(tmp_path, family)
    wanted = trained(family)[1]
    for name, values in wanted.items():
        if "expert_bias" in name:  # multiples of the rate
            steps = lambda bias: (bias.double() / plain.RATE).round()
            assert values.any() and torch.equal(steps(tensors[name]), steps(values)), name


@pytest.mark.sampled(10)
def test_half_precision_leaves_biases_exact(tmp_path):
    """Loads are whole numbers, and biases what the rule makes of them, in fp32."""
    pretrain(0, f"{FAMILIES['plain'].flags} --bf16 --save {tmp_path}")
    tensors, steps = read_all(tmp_path), [step["loads"] for step in records(tmp_path, "experts")]
    for n in FAMILIES["plain"].layers:
        bias = torch.zeros(8)
        for loads in (torch.tensor(step[f"blocks.{n}"]) for step in steps):
            assert loads.sum() == 8 * 12 * 3
            bias += plain.RATE * (36 - loads).sign()
        assert bias.any()
        torch.testing.assert_close(tensors[f"blocks.{n}.mlp.router.expert_bias"], bias, rtol=0, atol=0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout, kernel", [("one process, biases", 0), ("capacity", 0), ("ep2", -1), ("ep2, capacity", 0), ("etp2", -1)]
)
def test_rows_of_zeros_change_nothing(layout, kernel, tmp_path, monkeypatch):
    """With rows of zeros after those of each expert, which a run of few tokens has not; with the kernels of CPUs, and
    with those that define them."""
    monkeypatch.setattr(dispatch, "row_unit", lambda rows, device: 4)
    fitting = lambda op, case: [entry for entry in TABLE[op] if entry.fits(case)][kernel]
    monkeypatch.setattr(dispatch, "choose_kernel", fitting)
    test_any_layout_is_the_plain_loop(layout, tmp_path)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "names",
    [
        ("pp2 ep2, zb-h1", "ep4, zero3, recomputed", "tp2, whole experts"),
        ("tp2 dp2, ep4", "one process, biases", "ep2, zero2"),
    ],
    ids=" then ".join,
)
def test_a_run_goes_on_with_experts_divided_in_another_way(names, tmp_path):
    for name, stop in zip(names, (1, 3, 4), strict=True):
        world, family, words = LAYOUTS[name]
        folder = f"--save {tmp_path} --load {tmp_path} --auto-resume --exit-interval {stop}"
        run_ranks(world, pretrain, f"{FAMILIES[family].flags} {words} {folder}")
    check(tmp_path, "plain")


@pytest.mark.sampled(10)
def test_any_division_of_experts_reads_any_other_to_the_bit(tmp_path):
    names, layouts = ["one process", "ep4, zero3, recomputed", "tp2 dp2, ep2 etp2", "pp2 ep2 in a V, zero3"], {}
    eight = 8, "plain", "--expert-model-parallel-size 8 --micro-batch-size 1 --sharding-stage 1"
    for name, (world, _, words) in {**{name: LAYOUTS[name] for name in names}, "ep8": eight}.items():
        line = f"{LINE} --num-experts 8 {FAMILIES['plain'].flags} {words}"
        config = resolve(parse_any(line.split(), recipe=pretrain_gpt.recipe()), world)
        layouts[name] = ranks_of(config, world, pretrain_gpt.build_model)
    check_divisions(layouts, tmp_path)
    assert sum("expert_bias" in one for one in layouts["one process"].names) == 2


# ---- parts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["ep2, zero3", "pp2 ep2, zb-h1"])
def test_ranks_without_tokens(layout, tmp_path, monkeypatch):
    """All tokens go to the first experts: other ranks have none, forward and backward, and all of them go on together."""
    first = lambda logits, rule, bias=None: torch.arange(rule.topk).expand(len(logits), -1)
    monkeypatch.setattr(router, "choose", first)
    world, _, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{GATED} {words} --save {tmp_path}", timeout=100)
    chosen = lambda logits, bias: logits.masked_fill(torch.arange(8) >= 2, -torch.inf).softmax(-1)
    steps, wanted, loads = plain.Family(GATED, chosen).train()
    assert [step["loads"] for step in records(tmp_path, "experts")] == loads
    tensors = compare(tmp_path, steps, wanted)
    moments = tensors["optimizer.exp_avg.blocks.0.mlp.experts.up.weight"]
    assert moments[:2].any() and not moments[2:].any()  # no gradient; weight decay all the same
    notes = [note["words"] for note in records(tmp_path, "note") if "idle experts" in note["what"]]
    assert [words.split(" got ")[0] for words in notes] == [f"blocks.{n}: 6 of 8 experts" for n in range(LAYERS)]
    events = [event for event in read_events(tmp_path) if event["event"] == "idle_experts"]
    assert [(event["layer"], event["experts"]) for event in events] == [
        (f"blocks.{n}", list(range(2, 8))) for n in range(LAYERS)
    ]


@pytest.mark.sampled(10)
def test_generation_divides_experts_over_tensor_parallel_ranks(tmp_path):
    """Scores of a checkpoint in one process, and of ranks that hold different experts, also for fewer tokens than ranks."""
    pretrain(0, f"{FAMILIES['gated'].flags} --save {tmp_path} --exit-interval 1")
    tokens = torch.arange(7).view(7, 1) * 5

    def scores(rank, **sizes):
        model = load_model(str(tmp_path), precision="fp32", mesh=Mesh(rank, **sizes)).model
        with torch.inference_mode():
            return [model.logits(tokens[:n]) for n in (7, 1)]

    alone = scores(0)
    for sizes in (dict(tp=2, ep=2, etp=1), dict(tp=2), dict(tp=4, ep=2, etp=2)):
        for found in run_ranks(sizes["tp"], partial(scores, **sizes)):
            torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.sampled(1)
def test_products_of_groups_are_one_product_for_each():
    """Also where an expert has no rows, where rows do not begin at multiples of 16 bytes, and where there are many."""
    sizes = [(9, 8, 4), (9, 6, 3), (0, 8, 4), (300, 8, 4)]
    for (m, a, b), dtype in product(sizes, [torch.float32, torch.bfloat16, torch.float64]):
        lengths = [0, m // 3, 0, m - m // 3]
        x, w, g = (torch.randn(shape).to(dtype) for shape in ((m, a), (4, b, a), (m, b)))
        weight, x_ = w.clone().requires_grad_(), x.clone().requires_grad_()
        rows = grouped.Rows(torch.tensor(lengths), m)
        y = linear(x_, weight, None, LinearOptions(multiply=grouped.MultiplyByExpert(rows)))
        y.backward(g)
        parts = list(zip(x.split(lengths), g.split(lengths), w, strict=True))
        torch.testing.assert_close(y, torch.cat([rows @ own.t() for rows, _, own in parts]))
        torch.testing.assert_close(x_.grad, torch.cat([gradient @ own for _, gradient, own in parts]))
        torch.testing.assert_close(weight.grad, torch.stack([gradient.t() @ rows for rows, gradient, _ in parts]))
        assert not weight.grad[0].any() and not weight.grad[2].any()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("unit", [1, 4])
def test_rows_of_experts_are_those_of_their_tokens(unit, drops, monkeypatch):
    """Each expert's in the order of tokens, then rows of zeros up to a multiple of the unit."""
    monkeypatch.setattr(dispatch, "row_unit", lambda rows, device: unit)
    n, number = 10, 5
    experts = torch.tensor([[t % 4, (t % 4 + 1) % 4] for t in range(n)])  # expert 4 has none
    if drops:
        experts[2, 0] = experts[7, 1] = number
    x = torch.arange(1.0, n + 1).unsqueeze(1)
    dispatcher = dispatch.Dispatcher(experts, number, Mesh().ep, drops)
    (rows, weights), lengths = dispatcher.dispatch(x, 0.5 * x.expand(n, 2)), dispatcher.rows.lengths
    assert torch.equal(weights, 0.5 * rows)
    assert len(rows) == dispatcher.rows.total == sum(lengths)
    for expert, own in enumerate(rows.split(lengths)):
        tokens = [token + 1.0 for token in range(n) if expert in experts[token]]
        assert own.flatten().tolist() == tokens + [0.0] * (-len(tokens) % unit)


@pytest.mark.sampled(1)
def test_few_numbers_of_rows_occur():
    """A sixteenth of an expert's mean load, as a power of two up to 64."""
    units = {8: 1, 31: 1, 32: 2, 256: 16, 1000: 32, 1024: 64, 10**6: 64}
    for mean, unit in units.items():
        rows = grouped.Rows(torch.full((8,), mean), 8 * mean)
        assert (grouped.row_unit(rows, "cpu"), grouped.row_unit(rows, "cuda")) == (unit, 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("padded", [False, True])
def test_dispatch_is_a_sum_over_the_experts_of_each_token(padded):
    """Dropped pairs add nothing and get no gradient."""
    n, h, k, number = 6, 4, 2, 3
    experts = torch.stack([torch.randperm(number)[:k] for _ in range(n)])
    experts[1, 0] = experts[4, 1] = number  # dropped
    x, weights = torch.randn(n, h, dtype=torch.float64, requires_grad=True), torch.rand(n, k, dtype=torch.float64)
    weights.requires_grad_()
    scale = torch.arange(1.0, number + 1, dtype=torch.float64)  # what an expert multiplies its rows with
    if padded:
        dispatcher = dispatch.PaddedDispatcher(experts, number, Mesh().ep, n)
    else:
        dispatcher = dispatch.Dispatcher(experts, number, Mesh().ep, True)
    y, own = dispatcher.dispatch(x, weights)
    result = dispatcher.combine(y * own * dispatcher.rows.each(scale.unsqueeze(1)))
    factors = torch.cat((scale, scale.new_zeros(1)))[experts] * weights
    expected = factors.sum(1, keepdim=True) * x
    torch.testing.assert_close(result, expected)
    gradient = torch.randn(n, h, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(out, (x, weights), gradient) for out in (result, expected))
    torch.testing.assert_close(found, wanted)
