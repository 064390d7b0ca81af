# SPDX-License-Identifier: Apache-2.0
"""Three layers that no model here has, with experts, latent attention and a scan: each a module and a list of ops, whose
figures are those of a real pass: bytes that autograd keeps, parameters, FLOPs, and what ranks send.

Legend: s tokens of a sequence, b sequences, n = s b, h hidden, f width of an MLP, e bytes of an element.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.model.facts import Facts
from megatron.model.layer_ops import ATTENTION, Collective, CoreAttention, Kernel, Product, RankSetup, Residual
from megatron.model.norms import LayerNorm
from megatron.model.recompute import recompute
from megatron.model.weights import add_prefix, column, norm, row, take_prefix
from megatron.mpu import collectives, mappings
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, create_parameters
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Normal, Placement
from megatron.planner import speed
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import memory_report
from megatron.planner.traffic import calls_of, transfers
from megatron.settings.schema import Model, Recompute

S, B, H, FFN = 12, 2, 16, 24
MODEL = Model(2, H, 4, S, hidden_dropout=0.0, ffn_hidden_size=FFN)


class Layer(nn.Module):
    """x + branch(norm(x)), [s, b, h] or [s/tp, b, h]. granularity: what is recomputed."""

    def __init__(self, facts, mesh, sp, granularity=""):
        super().__init__()
        self.facts, self.mesh, self.sp, self.granularity = facts, mesh, sp, granularity
        table, kind = facts.layer_weights("layer", sp), dict(dtype=torch.float32, device="cpu")
        self.norm = LayerNorm(take_prefix(table, "norm"), 1e-5, **kind)
        self.build(lambda name: take_prefix(table, name), dict(sequence_parallel=sp, **kind), kind)

    def forward(self, x):
        whole = lambda x: x + self.branch(self.norm(x))
        return recompute(whole, x) if self.granularity == "full" else whole(x)


class LayerFacts(Facts):
    def stream(self, share):
        return Residual(self.settings, share, self.settings.seq_length * share.micro_batch_size)


# ---- experts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertSetup(RankSetup):
    """ep: ranks that divide the experts, and have tokens of their own."""

    ep: int = 1


@dataclass(frozen=True)
class ExpertFacts(LayerFacts):
    """An expert takes at most one in `every` tokens of a rank."""

    experts: int = 4
    every: int = 6

    def layer_weights(self, kind, sequence_parallel):
        matrix = lambda *shape, **more: Placement(shape, Normal(0.02), **more)
        return {
            **add_prefix("norm", norm(self.settings, H, sequence_parallel)),
            "experts.router": matrix(self.experts, H),
            "experts.up": matrix(self.experts, H, FFN, cut={"ep": 0}),
            "experts.down": matrix(self.experts, FFN, H, cut={"ep": 0}),
        }

    def layer_ops(self, share, kind):
        x, e, ep = self.stream(share), share.element, getattr(share, "ep", 1)
        n, capacity = x.tokens, x.tokens // self.every
        slots = self.experts * capacity
        own = (ep * capacity, self.experts // ep)  # tokens of each expert here, experts
        swap = Collective("experts", "ep", ep, slots * H * e, ("all_to_all",), ("all_to_all",))
        return (
            x.norm(),
            Product("experts", n, H, self.experts, kept=n * H * e),
            # Probabilities; numbers of the best, of the token in each slot, of each token's slot.
            Kernel("routing", kept=n * self.experts * e + 8 * (n + slots + n), moved=2 * n * self.experts + slots * H),
            swap,
            Product("experts", own[0], H, FFN, own[1], kept=slots * H * e),
            Kernel("experts", kept=slots * FFN * e, moved=2 * slots * FFN),
            Product("experts", own[0], FFN, H, own[1], kept=slots * FFN * e),
            swap,
            Kernel("experts", kept=(n * H + n) * e, moved=3 * n * H),  # what arrived, and its weights
            x.add(),
        )


class ExpertLayer(Layer):
    def build(self, of, common, kind):
        self.experts = nn.Module()
        create_parameters(self.experts, of("experts"), self.mesh, **kind)

    def branch(self, u):
        rows, e, w = u.flatten(0, 1), self.facts.experts, self.experts
        c = len(rows) // self.facts.every
        weight, best = (rows @ w.router.t()).softmax(-1).max(-1)
        with torch.no_grad():
            place = F.one_hot(best, e).cumsum(0).gather(1, best[:, None])[:, 0] - 1  # among tokens of the same expert
            slot = torch.where(place < c, best * c + place, e * c)  # e c: none
            source = torch.full((e * c + 1,), len(rows)).scatter_(0, slot, torch.arange(len(rows)))[:-1].clone()
        none = rows.new_zeros(1, rows.shape[1])
        sent = self.swapped(torch.cat((rows, none))[source])
        mine = sent.unflatten(0, (self.mesh.size, -1, c)).transpose(0, 1).flatten(1, 2)  # [experts here, ep c, h]
        found = F.gelu(mine @ w.up) @ w.down
        back = self.swapped(found.unflatten(1, (self.mesh.size, c)).transpose(0, 1).reshape(e * c, -1))
        return (torch.cat((back, none))[slot] * weight[:, None]).view_as(u)

    def swapped(self, x):
        return mappings.all_to_all(x, self.mesh)


# ---- latent attention ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LatentFacts(LayerFacts):
    """Keys and values come from a latent of few channels. own: channels of a key that its head has by itself; shared:
    those that are the same in all heads; values: channels of a value.
    """

    latent: int = 6
    own: int = 5
    shared: int = 2
    values: int = 3

    def layer_weights(self, kind, sequence_parallel):
        m, heads = self.settings, self.settings.num_attention_heads
        part = ("tp",) if sequence_parallel else ()
        return {
            **add_prefix("norm", norm(m, H, sequence_parallel)),
            **add_prefix("q", column(H, (heads, self.own + self.shared), 0.02, bias=False)),
            "down.weight": Placement((self.latent + self.shared, H), Normal(0.02), partial=part),
            **add_prefix("latent_norm", norm(m, self.latent, sequence_parallel)),
            **add_prefix("up", column(self.latent, (heads, self.own + self.values), 0.02, bias=False)),
            **add_prefix("output", row(heads * self.values, H, 0.02, bias=False)),
        }

    def layer_ops(self, share, kind):
        x, e, heads, whole = self.stream(share), share.element, self.settings.num_attention_heads // share.tp, self.own
        n, held, keys, again = x.tokens, x.elements // H, self.own + self.shared, dict(again=(ATTENTION,))
        pairs = n * self.settings.seq_length * heads
        given = n * heads * (2 * keys + whole + self.values) * e  # queries, keys, and values beside the keys' own part
        narrow = lambda width: replace(x.copied, size=n * width * e, **again)
        core = CoreAttention(
            "attention core",
            "reference",
            pairs,
            (keys, self.values),
            kept=given + pairs * e,
            given=given,
            moved=n * heads * 2 * (keys + self.values),
            workspace=2 * pairs * e,
            flops=2.0 * pairs * (keys + self.values),
        )
        return (
            x.norm(ATTENTION),
            *x.column("attention", heads * keys, **again),
            Product("attention", held, H, self.latent + self.shared, **again),  # of the same input
            Kernel("norms", kept=held * ((self.latent + self.shared) * e + 8), moved=2 * held * self.latent, **again),
            narrow(self.latent),
            Product(
                "attention", n, self.latent, heads * (self.own + self.values), kept=held * self.latent * e, **again
            ),
            replace(narrow(self.shared), overlapped=()),
            core,
            *x.row("attention", heads * self.values, **again),
            x.add(),
        )


class LatentLayer(Layer):
    def build(self, of, common, kind):
        tp = self.mesh
        self.q, self.up = (ColumnParallelLinear(of(name), tp, **common) for name in ("q", "up"))
        self.down, self.latent_norm = nn.Module(), LayerNorm(of("latent_norm"), 1e-5, **kind)
        create_parameters(self.down, of("down"), None, **kind)
        self.output = RowParallelLinear(of("output"), tp, **common)

    def forward(self, x):
        if self.granularity == "full_attn":
            return x + recompute(lambda x: self.branch(self.norm(x)), x)
        return super().forward(x)

    def branch(self, u):
        f, heads = self.facts, self.facts.settings.num_attention_heads // self.mesh.size
        query = self.q(u).unflatten(-1, (heads, -1))
        latent, shared = F.linear(u, self.down.weight).split((f.latent, f.shared), -1)
        of_heads = self.up(self.latent_norm(latent)).unflatten(-1, (heads, -1))  # [s, b, heads/tp, own + values]
        if self.sp:
            shared = mappings.gather_from_sequence_parallel_region(shared, self.mesh)
        elif self.mesh.size > 1:
            shared = mappings.copy_to_tensor_model_parallel_region(shared, self.mesh)
        own, value = of_heads.split((f.own, f.values), -1)
        key = torch.cat((own, shared.unsqueeze(2).expand(-1, -1, heads, -1)), -1)
        attended = (
            recompute(self.core, query, key, value) if self.granularity == "core_attn" else self.core(query, key, value)
        )
        return self.output(attended)

    def core(self, query, key, value):
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))  # [b heads, s, d]
        scores = (query * key.shape[-1] ** -0.5) @ key.transpose(1, 2)
        hidden = torch.full((S, S), float("-inf")).triu(1)
        attended = (scores + hidden).softmax(-1) @ value
        return attended.transpose(0, 1).reshape(S, B, -1)


# ---- a scan ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScanFacts(LayerFacts):
    """A gated linear recurrence: state = gate(t) state + value(t), channel by channel."""

    def layer_weights(self, kind, sequence_parallel):
        return {
            **add_prefix("norm", norm(self.settings, H, sequence_parallel)),
            **add_prefix("up", column(H, (2, FFN), 0.02, cut=1, bias=False)),
            **add_prefix("output", row(FFN, H, 0.02, bias=False)),
        }

    def layer_ops(self, share, kind):
        x, f, s = self.stream(share), FFN // share.tp, self.settings.seq_length
        states = x.tokens * f
        # Gates and states before each token; by torch's ops two kernels for each.
        scan = Kernel("scan", kept=2 * states * share.element, moved=6 * states, starts=2 * s)
        return x.norm(), *x.column("scan", f, 2), scan, *x.row("scan", f), x.add()


class ScanLayer(Layer):
    def build(self, of, common, kind):
        self.up = ColumnParallelLinear(of("up"), self.mesh, **common)
        self.output = RowParallelLinear(of("output"), self.mesh, **common)

    def branch(self, u):
        value, gate = self.up(u).unflatten(-1, (2, -1)).unbind(2)
        gate, state, states = gate.sigmoid(), value.new_zeros(value.shape[1:]), []
        for t in range(len(value)):
            state = gate[t] * state + value[t]
            states.append(state)
        return self.output(torch.stack(states))


# ---- a real pass -----------------------------------------------------------------------------------------------------

LAYERS = {
    "experts": (ExpertFacts(MODEL, 40), ExpertLayer),
    "latent attention": (LatentFacts(MODEL, 40), LatentLayer),
    "scan": (ScanFacts(MODEL, 40), ScanLayer),
}
CASES = [(name, ranks, sp, again) for name in LAYERS for ranks, sp, again in [(1, False, ""), (1, False, "full")]]
CASES += [("experts", 2, False, ""), ("experts", 2, False, "full"), ("latent attention", 1, False, "core_attn")]
CASES += [("latent attention", 1, False, "full_attn")]
CASES += [
    (name, 2, sp, again) for name in ("latent attention", "scan") for sp in (False, True) for again in ("", "full")
]
CASES += [("latent attention", 2, True, "full_attn")]


# A product of which torch's counter does not know.
ONEDNN = {torch.ops.mkldnn._linear_pointwise: lambda x, weight, *more, **kwargs: 2 * math.prod(x) * weight[0]}


def axis_of(name):
    return "ep" if name == "experts" else "tp"


def share_of(name, ranks, sp):
    kind = dict(sp=sp, micro_batch_size=B, device="cpu", precision="fp32", element=4)
    return ExpertSetup(ep=ranks, **kind) if name == "experts" else RankSetup(tp=ranks, **kind)


def measured(rank, name, ranks, sp, again):
    """What a rank keeps, holds, computes and sends in a forward and a backward pass: bytes, parameters, FLOPs of both,
    {(axis, op): (bytes, calls)}.
    """
    facts, kind = LAYERS[name]
    mesh = Mesh(rank, replicate=ranks, ep=ranks) if name == "experts" else Mesh(rank, tp=ranks)
    layer = kind(facts, getattr(mesh, axis_of(name)), sp, again)
    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5)
    x = torch.randn(S // (ranks if sp else 1), B, H, requires_grad=True)
    weights, seen, sent = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}, Counter()

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes(), storage
        return tensor

    def counting(op, of):
        real = getattr(collectives, op)

        def counted(*args, **kwargs):
            axis = next(arg for arg in [*args, *kwargs.values()] if hasattr(arg, "ranks"))
            if axis.size > 1:
                call = axis.name, op.removeprefix("start_")
                sent[(*call, "bytes")] += of(axis.size, args)
                sent[(*call, "calls")] += 1
            return real(*args, **kwargs)

        return counted

    part = dict.fromkeys(("start_reduce_scatter", "start_all_to_all"), lambda n, args: args[1].nbytes)
    part["all_gather"] = lambda n, args: n * args[0].nbytes
    names = "all_reduce all_gather reduce_scatter all_to_all"
    names += " start_all_reduce start_all_gather start_reduce_scatter start_all_to_all"
    with pytest.MonkeyPatch.context() as patch:
        for op in names.split():
            patch.setattr(collectives, op, counting(op, part.get(op, lambda n, args: args[0].nbytes)))
        with FlopCounterMode(display=False, custom_mapping=ONEDNN) as ahead:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                y = layer(x)
        kept = sum(size for size, _ in seen.values())
        with FlopCounterMode(display=False, custom_mapping=ONEDNN) as back:
            y.sum().backward()
    held = sum(p.numel() for p in layer.parameters())
    return kept, held, (ahead.get_total_flops(), back.get_total_flops()), dict(sent)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)).strip())
def test_figures_are_those_of_a_real_pass(run_ranks, case):
    name, ranks, sp, again = case
    facts, share = LAYERS[name][0], share_of(name, ranks, sp)
    ops, modules = facts.layer_ops(share, "layer"), Recompute(again or None).modules
    found = run_ranks(ranks, measured, *case) if ranks > 1 else [measured(0, *case)]
    local = [placed.local_shape({axis_of(name): ranks}) for placed in facts.layer_weights("layer", sp).values()]
    sent = Counter()
    for op, call in calls_of(ops, modules):
        sent[op.axis, call, "bytes"] += op.size
        sent[op.axis, call, "calls"] += 1
    ahead = sum(op.flops for op in ops)
    for kept, held, flops, messages in found:
        assert facts.layer_saved_bytes(share, "layer", modules).total() == kept
        assert sum(map(math.prod, local)) == held
        assert messages == sent
        assert flops[0] == ahead and (again or flops[1] == 2 * ahead)
    if ranks == 1 and not again:  # of a token, with what stands behind the layers
        assert facts.flops() == pytest.approx(MODEL.num_layers * sum(flops) / (S * B) + 3 * 2 * H * 40)


def test_weight_gradients_that_wait_keep_inputs_and_output_gradients_of_products():
    deferred = lambda name: LAYERS[name][0].deferred_saved_bytes(share_of(name, 1, False), "layer") // 4
    n, slots = S * B, 4 * (S * B // 6)
    assert deferred("experts") == n * (H + 4) + 2 * slots * (H + FFN)
    assert deferred("latent attention") == n * (H + 4 * 7 + 8) + n * (6 + 4 * 8) + n * (4 * 3 + H)
    assert deferred("scan") == n * (H + 2 * FFN) + n * (FFN + H)


@pytest.mark.parametrize("name", LAYERS)
def test_time_is_the_sum_over_the_list(name):
    """On devices that do one thing in finite time: FLOPs, starts of kernels, reading and writing, sending."""
    facts = LAYERS[name][0]
    job = Job(facts, 4, "fp32", "cpu")

    def seconds(**given):
        kind = dict(flops={"fp32": math.inf}, attention={"fp32": math.inf}, bandwidth=math.inf, launch=0, latency=0)
        device = Device("one", "cpu", rows=0.0, **{**kind, "inner": math.inf, **given})
        return speed.layer_seconds(job, Cluster(device, 1, 1))

    assert seconds(flops={"fp32": 7.0}) == pytest.approx(facts.layer_flops(0) / 7)
    assert seconds(launch=1.0) == 15 + (2 * S if name == "scan" else 0)
    moved = {
        "experts": S * H * 5 + 2 * S * 4 + 8 * H + 2 * 8 * FFN + 3 * S * H,
        "latent attention": S * H * 5 + 2 * S * 6 + S * 4 * 2 * (7 + 3) + 4 * S * S * 4,  # and scores, in four passes
        "scan": S * H * 5 + 6 * S * FFN,
    }
    assert seconds(bandwidth=1.0) == 4 * moved[name]


class TwoRanks(Job):
    def rank_setup(self, *args, **kwargs):
        return replace(share_of("experts", 2, False), micro_batch_size=1)


def test_time_of_messages_is_that_of_their_bytes():
    """Two ranks, one byte a second: half of a tensor leaves a rank, and again where it is a sum."""
    device = Device("slow", "cpu", flops={"fp32": math.inf}, attention={"fp32": math.inf}, bandwidth=math.inf, launch=0)
    cluster = Cluster(replace(device, inner=1.0, latency=0.0), 2)
    facts = {name: facts for name, (facts, _) in LAYERS.items()}
    sent = lambda name, sp: speed.layer_costs(Job(facts[name], 4, "fp32", "cpu"), Layout(tp=2, sp=sp), cluster)[0]
    assert sent("scan", False) == S * (H + H) * 4  # a sum each way
    assert sent("scan", True) == S * (2 * H + 2 * H) * 4 / 2  # gathered and scattered each way
    assert sent("latent attention", False) == S * (H + 6 + 2 + H) * 4
    assert speed.layer_seconds(TwoRanks(facts["experts"], 4, "fp32", "cpu"), cluster) == 2 * (4 * 2) * H * 4 / 2


@pytest.mark.parametrize("again", [None, "full"])
@pytest.mark.parametrize("name", ["latent attention", "scan"])
def test_the_planner_knows_them_in_a_layout(name, again):
    layout = Layout(tp=2, sp=True, pp=2, dp=1, micro_batch_size=B, schedule="zb-h1", recompute=Recompute(again))
    job, device = (
        Job(LAYERS[name][0], 8, "fp32", "cpu"),
        Device("one", "cpu", flops={"fp32": 1e9}, attention={"fp32": 1e9}),
    )
    report = memory_report(job, layout, device, 0)
    inputs = report.activations.get("inputs of recomputed layers", 0)
    assert bool(inputs) == bool(again)
    assert speed.step(job, layout, Cluster(device, 4)).seconds > 0
    found = {(one.op, one.axis): one.calls for one in transfers(job, layout, 0) if one.what == "activations"}
    gathers, scatters = (6, 4) if name == "latent attention" else (3, 2)  # forward and backward pass of a layer
    repeated = (3, 0) if name == "latent attention" else (1, 0)
    wanted = [each + more * (again == "full") for each, more in zip((gathers, scatters), repeated, strict=True)]
    assert [found["all_gather", "tp"], found["reduce_scatter", "tp"]] == [4 * (1 + count) for count in wanted]
