# SPDX-License-Identifier: Apache-2.0
"""Experts in layers, over ranks that hold different ones (ep) and parts of each (etp): the network of `own_experts.py`
in all kinds of layouts against the same network in plain torch, in one process, in fp64.
"""

import contextlib
import math
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.mpu import collectives, mappings
from megatron.mpu.forked import RankFailed, run_ranks
from megatron.mpu.mesh import mesh_of
from megatron.mpu.placement import Placement
from megatron.mpu.random import seed_of
from megatron.optimizer import zero
from megatron.optimizer.units import FlatUnit
from megatron.optimizer.zero import DistributedOptimizer
from megatron.tools import checkpoint as tool
from megatron.training.build import build_run
from megatron.training.rules import resolve
from tests.models import mlp_language_model, own_experts
from tests.models.divisions import check_divisions, ranks_of
from tests.models.plain_state import HIDDEN, LAYERS, LENGTH, LINE, VOCABULARY, compare, freezing, train
from tests.ranks import trains

pytestmark = pytest.mark.sampled(10)

EXPERTS, CHOSEN, FFN = 8, 2, 4 * HIDDEN
EP2, ETP2 = "--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"
ETP1 = "--expert-tensor-parallel-size 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
EP4 = "--expert-model-parallel-size 4 --micro-batch-size 1"
LAYOUTS = {
    "one process": (1, ""),
    "each token to one expert": (1, "--experts-of-token 1"),
    "most experts get no token": (2, f"{EP2} --experts-of-token 1 --experts 32"),
    "dp2": (2, ""),
    "ep2": (2, EP2),
    "ep2, one expert a token": (2, f"{EP2} --experts-of-token 1"),
    "ep4, one sample at a time": (4, EP4),
    "etp2": (2, ETP2),
    "tp2, experts divided likewise": (2, TP2),
    "tp2, whole experts": (2, f"{TP2} {ETP1}"),
    "tp2, ep over its ranks": (2, f"{TP2} {ETP1} {EP2}"),
    "tp2 dp2, ep2 etp2": (4, f"{TP2} {EP2} {ETP2}"),
    "tp2 dp2, ep2 of whole experts": (4, f"{TP2} {EP2} {ETP1}"),
    "ep2 and copies": (4, f"{EP2} --micro-batch-size 1"),
    "ep2, zero1": (4, f"{EP2} --sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "ep2, zero2": (4, f"{EP2} --sharding-stage 2 --micro-batch-size 1 --overlap-grad-reduce"),
    "ep2, zero3": (4, f"{EP2} --sharding-stage 3 --overlap-param-gather"),
    "ep4, zero3, recomputation": (4, f"{EP4} --sharding-stage 3 --recompute-granularity full"),
    "tp2 ep2, zero3, two at a time": (
        4,
        f"{TP2} {EP2} {ETP1} --sharding-stage 3 --recompute-granularity full --recompute-num-layers 2",
    ),
    "ep2, zero1 with copies": (4, f"{EP2} --sharding-stage 1 --sharding-degree 2 --micro-batch-size 1"),
    "ep2, zero1, half of the state on the host": (
        2,
        f"{EP2} --sharding-stage 1 --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
    ),
    "ep2, fused accumulation": (2, f"{EP2} --gradient-accumulation-fusion --micro-batch-size 1"),
    "cp2, ep over its ranks": (2, f"--context-parallel-size 2 {EP2}"),
    "pp2 ep2": (4, f"{PP2} {EP2}"),
    "pp2 ep2, zb-h1": (4, f"{PP2} {EP2} --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "pp2 ep2, zb-h1, zero2": (4, f"{PP2} {EP2} --pipeline-schedule zb-h1 --sharding-stage 2"),
    "pp2 etp2, interleaved": (4, f"{PP2} {ETP2} --num-layers-per-virtual-pipeline-stage 1"),
    "pp2 ep2 in a V, zero3": (4, f"{PP2} {EP2} --pipeline-schedule zb-v --sharding-stage 3"),
}


pretrain = trains(own_experts, LINE)


# ---- in plain torch --------------------------------------------------------------------------------------------------


def initial_weights(number: int) -> dict[str, torch.Tensor]:
    small, weights = 0.05 / math.sqrt(2 * LAYERS), {}
    drawn = {
        "embedding.word.weight": ((VOCABULARY, HIDDEN), 0.05),
        "embedding.position.weight": ((LENGTH, HIDDEN), 0.05),
    }
    for n in range(LAYERS):
        for part, experts in (("", ()), ("experts.", (number,))):
            for name, shape, std in (("up", (FFN, HIDDEN), 0.05), ("down", (HIDDEN, FFN), small)):
                drawn[f"blocks.{n}.{part}{name}.weight"] = ((*experts, *shape), std)
                weights[f"blocks.{n}.{part}{name}.bias"] = torch.zeros(*experts, shape[0])
        drawn[f"blocks.{n}.router.weight"] = ((number, HIDDEN), 0.05)
    for norm in ["final_norm", *(f"blocks.{n}.{half}norm" for n in range(LAYERS) for half in ("", "experts_"))]:
        weights |= {f"{norm}.weight": torch.ones(HIDDEN), f"{norm}.bias": torch.zeros(HIDDEN)}
    for name, (shape, std) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def highest(chosen: int):
    """(layer, scores [b, s, experts]) -> the scores of the `chosen` highest, and 0 for the others."""
    return lambda n, scores: scores * (scores >= scores.topk(chosen, -1).values[..., -1:])


def logits(weights, tokens: torch.Tensor, route) -> torch.Tensor:
    """Tokens [b, s] -> [b, s, vocabulary]: every expert computes every token; `route` says how much each counts."""

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name, x):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    gelu = lambda x: F.gelu(x, approximate="tanh")
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][: tokens.shape[1]]
    for n in range(LAYERS):
        own = f"blocks.{n}."
        x = x + linear(own + "down", gelu(linear(own + "up", norm(own + "norm", x))))
        u = norm(own + "experts_norm", x)
        scores = (u @ weights[own + "router.weight"].T).softmax(-1)
        scores = route(n, scores)  # [b, s, experts]
        up, down = (weights[f"{own}experts.{name}.weight"] for name in ("up", "down"))
        inner = gelu(torch.einsum("bsh,efh->bsef", u, up) + weights[f"{own}experts.up.bias"])
        x = x + torch.einsum("bse,bsef,ehf->bsh", scores, inner, down) + scores @ weights[f"{own}experts.down.bias"]
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


@cache
def plain(number: int = EXPERTS, chosen: int = CHOSEN):
    network = lambda weights, tokens, buffers: logits(weights, tokens, highest(chosen))
    return train(initial_weights(number), lambda name: True, network=network)


def check(folder, words: str) -> None:
    number, chosen = (
        int(found[1]) if (found := re.search(rf"{flag} (\d+)", words)) else default
        for flag, default in (("--experts", EXPERTS), ("--experts-of-token", CHOSEN))
    )
    compare(folder, *plain(number, chosen))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --save {tmp_path} --check-replicas-interval 2")
    check(tmp_path, words)


def test_experts_without_tokens_are_among_them():
    """Of 32 experts, in a step of 96 tokens that go to one each; such an expert moves by weight decay alone."""
    first, (_, last) = initial_weights(32), plain(32, 1)
    name = "blocks.0.experts.up.weight"
    decayed = first[name] * (1 - 1e-2 * 0.01) ** 4
    idle = (last[name] - decayed).abs().amax((1, 2)) < 1e-12
    assert 0 < idle.sum() < 32


@pytest.mark.parametrize("layout", ["ep2, zero3", "pp2 ep2, zb-h1"])
def test_ranks_without_tokens(layout, tmp_path, monkeypatch):
    """All tokens go to the first experts: other ranks have none, forward and backward, and all of them go on together."""

    def first(self, x):
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)
        return scores[:, : self.k].to(x.dtype), torch.arange(self.k).expand(len(x), -1)

    monkeypatch.setattr(own_experts.Router, "forward", first)
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --save {tmp_path}", timeout=60)
    route = lambda n, scores: scores * (torch.arange(EXPERTS) < CHOSEN)
    network = lambda weights, tokens, buffers: logits(weights, tokens, route)
    compare(tmp_path, *train(initial_weights(EXPERTS), lambda name: True, network=network))


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "names",
    [
        ("pp2 ep2, zb-h1", "ep4, zero3, recomputation", "tp2, whole experts"),
        ("tp2 dp2, ep2 etp2", "one process", "ep2, zero1"),
    ],
    ids=" then ".join,
)
def test_a_run_goes_on_with_experts_divided_in_another_way(names, tmp_path):
    for name, stop in zip(names, (1, 3, 4), strict=True):
        world, words = LAYOUTS[name]
        run_ranks(world, pretrain, f"{words} --save {tmp_path} --load {tmp_path} --auto-resume --exit-interval {stop}")
    check(tmp_path, "")


@pytest.mark.sampled(10)
def test_any_division_of_experts_reads_any_other_to_the_bit(tmp_path):
    names, layouts = ["one process", "ep4, zero3, recomputation", "tp2 dp2, ep2 etp2", "pp2 ep2 in a V, zero3"], {}
    for name in names:
        world, words = LAYOUTS[name]
        config = resolve(parse_any(f"{LINE} {words}".split(), recipe=own_experts.recipe()), world)
        layouts[name] = ranks_of(config, world, own_experts.build_model)
    check_divisions(layouts, tmp_path)


@pytest.mark.sampled(10)
def test_tools_know_experts(tmp_path, capsys):
    """A model for use out of a checkpoint; files for tensor parallel ranks, each with its part of every expert."""
    run_ranks(4, pretrain, f"{LAYOUTS['tp2 dp2, ep2 etp2'][1]} --save {tmp_path} --train-iters 4")
    for name, held in load_model(str(tmp_path), precision="fp32").model.named_parameters():
        wanted = plain()[1][name]
        assert (held.detach()[: len(wanted)].double() - wanted).abs().max() < 2e-5, name
    tool.main(["reshard", str(tmp_path), str(tmp_path / "new"), "--tp", "2"])
    with Reader(tmp_path / "new" / "iter_0000004") as reader:
        for name, shape in (("up.weight", (8, 48, 24)), ("down.weight", (8, 24, 48)), ("up.bias", (8, 48))):
            assert {one.box.extent for one in reader.tensors[f"blocks.3.experts.{name}"].stored} == {shape}
    tool.main(["diff", str(tmp_path), str(tmp_path / "new")])
    assert "tensors are equal to the bit" in capsys.readouterr().out
    pretrain(0, f"--load {tmp_path / 'new'} --train-iters 5 --lr-decay-iters 4")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("frozen", ["embedding.*", "blocks.1.experts.* blocks.2.up.*", "*router* *experts*"])
@pytest.mark.parametrize("layout", ["ep2, zero3", "tp2 ep2, zero3, two at a time"])
def test_what_is_frozen_beside_experts(frozen, layout, tmp_path):
    """In the first case the first layer's input has no gradient, which would otherwise end that layer's part in a pass."""
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --freeze {frozen} --save {tmp_path} --check-replicas-interval 2")
    network = lambda weights, tokens, buffers: logits(weights, tokens, highest(CHOSEN))
    compare(tmp_path, *train(initial_weights(EXPERTS), freezing(*frozen.split()), network=network))


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
def test_ranks_hold_their_part_of_the_experts():
    """--expert-model-parallel-size and --expert-tensor-parallel-size; without the latter experts are divided as tp is."""

    def held(rank, words):
        config = resolve(parse_any(f"{LINE} {words}".split(), recipe=own_experts.recipe()), 4)
        run = build_run(config, own_experts.recipe())
        shapes = {name: tuple(p.shape) for name, p in run.stages[0].named_parameters()}
        assert shapes["blocks.0.router.weight"] == (8, 24)
        mesh = run.context.mesh
        return mesh.ep.ranks, mesh.etp.ranks, shapes["blocks.0.experts.up.weight"], shapes["blocks.0.up.weight"]

    assert run_ranks(4, held, EP4)[1] == ((0, 1, 2, 3), (1,), (2, 96, 24), (96, 24))
    assert run_ranks(4, held, f"{EP2} {ETP2} --micro-batch-size 1")[1] == ((1, 3), (0, 1), (4, 48, 24), (96, 24))
    assert run_ranks(4, held, TP2)[1] == ((1,), (0, 1), (8, 48, 24), (48, 24))
    assert run_ranks(4, held, f"{TP2} {ETP1} {EP2}")[1] == ((0, 1), (1,), (4, 96, 24), (48, 24))


@pytest.mark.parametrize(
    "world, words, said",
    [
        (3, EP2, "--expert-model-parallel-size 2 x --expert-tensor-parallel-size 1 does not divide the 3 ranks"),
        (3, "--ep 3", "--ep 3 does not divide dim 0 of experts.up.weight, which is 8 x 96 x 24; nearest: 2 or 4"),
        (5, "--etp 5", "--etp 5 does not divide dim 1 of experts.up.weight, which is 8 x 96 x 24; nearest: 4 or 6"),
        (6, f"{EP2} --sharding-stage 1 --sharding-degree 3", "3 ranks shard optimizer state: one of the two has to"),
        (2, "--tensor-model-parallel-size 2", "would send the same tokens to experts; add --sequence-parallel"),
        (2, "--ep 0", "--ep 0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_go_together(world, words, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        line = f"{LINE} --micro-batch-size 1 --global-batch-size {world} {words}"
        resolve(parse_any(line.split(), recipe=own_experts.recipe()), world)


@pytest.mark.parametrize("recipe", [pretrain_gpt, mlp_language_model, pretrain_t5, pretrain_bert])
def test_a_model_without_experts_refuses_ranks_for_them(recipe):
    shape = f"{LINE} --decoder-seq-length 12" * (recipe is pretrain_t5) or LINE
    read = lambda words: parse_any(f"{shape} {words}".split(), recipe=recipe.recipe())
    for words in (EP2, "--etp 2", "--ep 2 --expert-tensor-parallel-size 2"):
        with pytest.raises(SettingsError, match=f"^{words.replace('2 --', '2 and --')}: .* has no experts here; leave"):
            resolve(read(words), 2)
    config = resolve(read("--ep 1 --etp 1 --tensor-model-parallel-size 2"), 2)  # ask for nothing
    assert not mesh_of(config.parallel, 0, 2, create_groups=False).folded


def test_what_is_logged(tmp_path, capfd):
    run_ranks(2, pretrain, f"{EP2} --save {tmp_path} --exit-interval 1")
    pretrain(0, f"--load {tmp_path} --exit-interval 2")
    said = capfd.readouterr().out
    assert "pipeline-model-parallel size: 1, expert-model-parallel size: 2, expert-tensor-parallel size: 1\n" in said
    assert "layout tp 1 pp 1 cp 1 dp 2 ep 2 etp 1 then and tp 1 pp 1 cp 1 dp 1 now" in said


# ---- mistakes that others made ---------------------------------------------------------------------------------------


def reduced_as_dense(patch):
    patch.setattr(FlatUnit, "replicate", "replicate")
    patch.setattr(FlatUnit, "sharded", "shard")


def times_ep(patch):
    real = own_experts.GroupedWgrad.__call__
    patch.setattr(own_experts.GroupedWgrad, "__call__", lambda self: 2 * real(self))


def router_of_one_rank(patch):
    real = own_experts.ExpertFacts.layer_weights

    def table(self, kind, sequence_parallel):
        found = real(self, kind, sequence_parallel)
        return found | {"router.weight": replace(found["router.weight"], partial=())}

    patch.setattr(own_experts.ExpertFacts, "layer_weights", table)


def piece_of_gradient(patch):
    whole, piece = (lambda x, axis: collectives.all_gather(x, axis)), (lambda x, axis: x.chunk(axis.size)[axis.rank])
    patch.setattr(mappings, "gather_from_sequence_parallel_region", mappings.conjugate(whole, piece))


def bias_of_one_rank(patch):
    patch.setattr(zero, "PARTIAL", tuple(axis for axis in zero.PARTIAL if axis != "etp"))


def counting(wanted):
    real = Placement.is_primary
    return lambda patch: patch.setattr(
        Placement, "is_primary", lambda self, place: real(self, place) and ("ep" not in self.cut or wanted(place))
    )


def copies_counted(patch):
    real = DistributedOptimizer._squared_norm

    def norm(self):
        units, dense = self.owned, [own for own in self.owned if own.unit.replicate == "replicate"]
        self.owned = dense
        first = real(self)
        self.owned = units
        return first + (real(self) - first) * self.mesh.expert_replicate.size

    patch.setattr(DistributedOptimizer, "_squared_norm", norm)


def same_names(patch):
    real = Placement.box
    patch.setattr(Placement, "box", lambda self, shape, ranks: real(self, shape, {**ranks, "ep": 0, "ep_etp": 0}))


MISTAKES = {  # who makes it, in which layout, and what the run says (None: nothing, and figures differ)
    "experts are reduced as dense weights": (reduced_as_dense, "ep2", None),
    "whole experts of tp ranks are reduced as dense weights": (reduced_as_dense, "tp2, whole experts", None),
    "gradients of experts times ep": (times_ep, "ep2", None),
    "the router is not summed over tp": (router_of_one_rank, "tp2, whole experts", "hold different bits"),
    "the gradient of what experts read is not summed": (piece_of_gradient, "etp2", None),
    "biases of experts are not summed over etp": (bias_of_one_rank, "etp2", "hold different bits"),
    "the norm leaves experts out": (counting(lambda place: False), "ep2", None),
    "the norm has the experts of one rank": (counting(lambda place: place["ep"] == 0), "ep2", None),
    "the norm counts copies of experts": (copies_counted, "ep2 and copies", None),
    "ranks give their experts the same names": (same_names, "ep2", "do not hold the model that the settings describe"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_others_made_are_seen(mistake, tmp_path, monkeypatch):
    """Each is made here; then the run says so, or differs from the plain loop."""
    (plant, layout, said), wanted = MISTAKES[mistake], plain()
    plant(monkeypatch)
    world, words = LAYOUTS[layout]
    train = lambda: run_ranks(world, pretrain, f"{words} --save {tmp_path} --check-replicas-interval 2")
    if said:
        with pytest.raises(RankFailed, match=said):
            train()
        return
    with contextlib.suppress(RankFailed):  # a checkpoint may lack what nobody counted
        train()
    with pytest.raises(AssertionError):
        compare(tmp_path, *wanted)
