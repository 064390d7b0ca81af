# SPDX-License-Identifier: Apache-2.0
"""Layouts in short form, the settings of a run in one of them, and differences between two runs, without any training."""

import math
import random
from dataclasses import replace

import pytest
import torch

from megatron.planner import parity
from megatron.planner.parity import Trace, compare, laid_out, layout_of, one_batch, parse_layout
from megatron.settings.parse import parse_pretrain

TINY = """--num-layers 8 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --train-iters 3 --micro-batch-size 2""".split()
SCHEDULES = {"1f1b": "1f1b", "gpipe": "gpipe", "zbh1": "zb-h1", "zbv": "zb-v", "vhalf": "v-half"}


def test_a_layout_is_the_sum_of_its_tokens():
    """In any order, with hyphens or without them; what is not named has its default."""
    for seed in range(150):
        draw, fields, tokens = random.Random(seed), {}, []
        for name in ("tp", "cp", "pp", "vp", "dp", "zero"):
            if draw.random() < 0.4:
                fields[name] = draw.randrange(4) if name == "zero" else draw.choice([1, 2, 3, 12])
                tokens.append(f"{name}{fields[name]}")
        for name in ("sp", "gather"):
            if draw.random() < 0.3:
                fields[name] = True
                tokens.append(name)
        if draw.random() < 0.3:
            own = draw.choice([None, 2, 4])
            fields["a2a"] = fields.get("cp", 1) if own is None else own  # all ranks of cp
            tokens.append("a2a" if own is None else f"a2a{own}")
        if draw.random() < 0.4:
            word = draw.choice(list(SCHEDULES))
            fields["schedule"] = SCHEDULES[word]
            tokens.append(word)
        draw.shuffle(tokens)
        text = "-".join(tokens) if draw.random() < 0.8 else "--".join(tokens) + "-"
        found = parse_layout(text)
        assert vars(found) == vars(parity.TestedLayout(text, **fields)), text
        sizes = [fields.get(name, 1) for name in ("tp", "cp", "pp", "dp")]
        assert found.world_size == math.prod(sizes)
        folded = found.schedule in ("zb-v", "v-half")
        assert found.stages == fields.get("pp", 1) * (2 if folded else fields.get("vp", 1))


@pytest.mark.parametrize("text, dp", [("ep4", 4), ("tp2-ep4", 4), ("tp2-ep4-etp1", 2), ("cp2-ep2", 1), ("ep4-dp2", 2)])
def test_experts_have_the_ranks_that_they_need(text, dp):
    """Of tp x cp x dp, ep x etp has to divide them; a size that is given stays."""
    assert parse_layout(text).dp == dp


@pytest.mark.parametrize(
    "text, words",
    [
        ("tp2-tp4", "has tp twice"),
        ("1f1b-gpipe", "has schedule twice"),
        ("zero4", "zero4 .*: the stages are 0, 1, 2, 3"),
        ("tp2x", "'x' in layout 'tp2x'"),
        ("tp", "'tp' in"),
    ],
)
def test_what_is_no_layout_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        parse_layout(text)


@pytest.mark.parametrize(
    "words, world, text",
    [
        ("", 1, "one process"),
        ("--tp 2 --sequence-parallel", 4, "tp2-dp2-sp"),
        ("--pp 2 --num-virtual-stages-per-pipeline-rank 2", 2, "pp2-vp2"),
        ("--cp 4 --cp-comm-type a2a", 4, "cp4-a2a"),
        ("--cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4, "cp4-a2a2"),
        ("--cp 2 --cp-comm-type allgather --sharding-stage 1", 6, "cp2-dp3-gather-zero1"),
    ],
)
def test_the_layout_of_a_command_is_named_by_its_tokens(words, world, text):
    found = layout_of(parse_pretrain([*TINY, *words.split()]), world)
    assert found.text == text and found.own and found.world_size == world
    if text != "one process":
        again = parse_layout(text)
        assert vars(replace(found, own=False, schedule="")) == vars(again)


@pytest.mark.parametrize("layout, offloaded", [("dp2-zero3", True), ("dp2-zero2", False), ("", False)])
def test_a_layout_that_cannot_keep_weights_on_the_host_does_not(layout, offloaded):
    """Only ZeRO 3 can; the reference runs without it."""
    config = parse_pretrain([*TINY, *"--param-cpu-offload --sharding-stage 3 --global-batch-size 8".split()])
    assert laid_out(config, parse_layout(layout)).optimizer.param_cpu_offload is offloaded


@pytest.mark.parametrize("precision, exact", [("", True), ("--bf16", False)])
def test_sums_are_exact_where_layouts_have_to_agree_to_the_digit(precision, exact):
    narrow = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --grad-reduce-in-bf16 --use-precision-aware-optimizer"
    own = [*TINY, *precision.split(), *narrow.split(), *"--global-batch-size 8 --sharding-stage 1".split()]
    o = laid_out(parse_pretrain(own), parse_layout("dp2-zero1")).optimizer
    assert (o.exp_avg_dtype == o.exp_avg_sq_dtype == "fp32") is exact and o.grad_reduce_in_bf16 is not exact


def test_one_batch_suits_all_layouts():
    """Two samples of each rank; one that is given stays."""
    layouts = [parse_layout(text) for text in ("dp4", "dp6", "tp2")]
    assert one_batch(parse_pretrain(TINY), layouts).batch.global_batch_size == 2 * 12
    given = one_batch(parse_pretrain([*TINY, "--gradient-accumulation-steps", "5"]), layouts[:1]).batch
    assert (given.global_batch_size, given.gradient_accumulation_steps) == (2 * 4 * 5, None)
    assert one_batch(parse_pretrain([*TINY, "--global-batch-size", "48"]), layouts).batch.global_batch_size == 48


# ---- differences -----------------------------------------------------------------------------------------------------


def run(loss=(4.0, 2.0), norm=(1.0,), **weights) -> Trace:
    return Trace(list(loss), list(norm), {name: torch.tensor(values) for name, values in weights.items()}, 0.0)


def test_differences_are_relative_to_the_reference():
    """A weight's error is one of its own size, or of all weights' if that is larger."""
    reference = run(large=[3.0, -4.0], small=[0.0, 0.5])
    found = compare(reference, run((4.0, 2.5), (0.75,), large=[3.0, -4.5], small=[0.25, 0.5]))
    everything = math.sqrt((9 + 16 + 0.25) / 4)
    assert (found.loss, found.norm) == (0.25, 0.25)
    assert found.worst == "large" and found.weight == pytest.approx(0.5 / math.sqrt(2) / math.sqrt(12.5))
    found = compare(reference, run(large=[3.0, -4.0], small=[0.25, 0.5]))
    assert found.worst == "small" and found.weight == pytest.approx(0.25 / math.sqrt(2) / everything)
    assert (found.loss, found.norm) == (0.0, 0.0)


@pytest.mark.parametrize("other", [dict(loss=(4.0, math.nan)), dict(norm=(math.nan,)), dict(w=[math.nan, 1.0])])
def test_what_is_no_number_never_passes(other):
    found = compare(run(w=[1.0, 1.0]), run(**dict(w=[1.0, 1.0]) | other))
    assert not found.passes("bf16") and compare(run(w=[1.0, 1.0]), run(w=[1.0, 1.0])).passes("fp32")


@pytest.mark.parametrize("precision", parity.TOLERANCE)
@pytest.mark.parametrize("what", ["loss", "norm", "weight", "choices"])
def test_each_difference_has_its_own_limit(precision, what):
    limits = parity.TOLERANCE[precision]
    exactly = parity.LayoutDifference(**limits, worst="w")
    assert exactly.passes(precision) and not replace(exactly, **{what: limits[what] * 1.001}).passes(precision)
    assert replace(exactly, **{what: 0.0}).passes(precision)


def test_a_router_that_chooses_otherwise_in_a_layout_does_not_pass():
    """Though the layout replays the choices of one process, and so trains the same weights."""
    one = run(w=[1.0, 1.0])
    passes = lambda share: compare(one, replace(one, changed=share)).passes("fp32")
    assert passes(0.001) and not passes(0.125)
