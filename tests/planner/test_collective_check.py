# SPDX-License-Identifier: Apache-2.0
"""Wrong sums over ranks are named with their line or layer; right ones are not. Each planted mistake is a real run."""

import pytest
import torch

import pretrain_gpt
from megatron.model.command_line import parse_any
from megatron.mpu import collectives
from megatron.planner import collective_check, parity
from megatron.planner.collective_check import GRADIENT, OUTPUT, Boundary, SumCall, SumRecord, problems_of
from megatron.tools import verify_layout

WORDS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2
    --micro-batch-size 2 --global-batch-size 8 --eval-iters 0 --device cpu --train-iters 2 --hidden-dropout 0.1""".split()
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention --num-query-groups 2
    --untie-embeddings-and-output-weights --disable-bias-linear"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2"
ALONE = {}


def problems(layout, more=""):
    """What is found in the first of two steps of a layout."""
    recipe, tested = pretrain_gpt.recipe(), parity.parse_layout(layout)
    config = parse_any([*WORDS, *more.split()], description="", recipe=recipe)
    if more not in ALONE:
        ALONE[more] = parity.trace(parity.one_process(config), recipe, 1, 2, check_sums=True)
    alone = ALONE[more]
    laid_out = parity.laid_out(config, tested)
    return parity.trace(
        laid_out, recipe, tested.world_size, 2, replayed=alone.choices, check_sums=True, alone=alone
    ).problems


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout, more",
    [
        ("tp2", ""),
        ("tp2sp-dp2-zero1", LLAMA),
        ("pp2-dp2-zero2", ""),
        ("dp2-zero3", LLAMA),
        ("cp2", LLAMA),
        ("cp2a2a", ""),
        ("ep2-tp2", EXPERTS),
        ("zbh1-pp2", ""),
        ("tp2sp", f"{LLAMA} --bf16"),
        ("tp2-pp2", "--recompute-granularity full"),
    ],
)
def test_right_sums_are_not_named(layout, more):
    assert problems(layout, more) == ()


REAL = collectives.all_reduce, collectives.start_all_reduce, collectives._begin_scatter


def plant(monkeypatch, place, how):
    """Make the sum that a line asks for wrong: left out, made twice, or over another axis."""
    monkeypatch.setattr(collective_check, "PLUMBING", (*collective_check.PLUMBING, "test_collective_check.py"))
    all_reduce, start, scatter = REAL

    def is_here(axis):
        return axis.size > 1 and place in collective_check._place()

    def wrong_all_reduce(x, axis, op="sum"):
        if op == "sum" and is_here(axis):
            if how == "missing":
                return x
            all_reduce(x, axis)
        return all_reduce(x, axis, op)

    def wrong_start(x, axis):
        if is_here(axis):
            if how == "missing":
                return collectives.Done()
            all_reduce(x, axis)
        return start(x, axis)

    def wrong_scatter(piece, whole, axis):
        if is_here(axis):
            if how == "missing":
                piece.view(-1).copy_(whole.view(-1).chunk(axis.size)[axis.rank])
                return collectives.Done()
            all_reduce(whole, axis)
        return scatter(piece, whole, axis)

    for name, wrong in (
        ("all_reduce", wrong_all_reduce),
        ("start_all_reduce", wrong_start),
        ("_begin_scatter", wrong_scatter),
    ):
        monkeypatch.setattr(collectives, name, wrong)


# layout, settings, part of the place, how -> what is named
MISTAKES = [
    ("tp2", "", "in start_input_reduction", "missing", "the gradient of the output of blocks."),
    (
        "tp2",
        "",
        "in start_input_reduction",
        "twice",
        "in start_input_reduction: a sum over tp of what its 2 ranks hold",
    ),
    ("tp2sp", LLAMA, "in start_input_reduction", "missing", "the gradient of the output of blocks.1 has a mean square"),
    ("tp2sp", LLAMA, "in start_input_reduction", "twice", "in start_input_reduction: a sum over tp"),
    ("tp2", "", "mpu/layers.py", "missing", "the output of blocks.0 differs over tp"),
    ("tp2sp", "", "mpu/layers.py", "missing", "the output of blocks.0 has a mean square"),
    ("tp2", LLAMA, "mpu/layers.py", "twice", "mpu/layers.py"),
    ("tp2sp", "", "mpu/layers.py", "twice", "mpu/layers.py"),
    ("tp2", "", "mpu/cross_entropy.py", "twice", "in joined: a sum over tp"),
    ("dp2", "", "optimizer/gradients.py", "missing", "replicas differ"),
    ("dp2", "", "optimizer/gradients.py", "twice", "in sum_all: a sum over replicate"),
    ("dp2-zero1", LLAMA, "optimizer/gradients.py", "twice", "in start: a sum over shard"),
    ("dp2-zero2", "", "optimizer/gradients.py", "twice", "in start: a sum over shard"),
    ("dp2-zero3", "", "optimizer/gradients.py", "twice", "in start: a sum over shard"),
    ("tp2", "", "in reduce_grads", "missing", "replicas differ"),
    ("tp2", "", "in reduce_grads", "twice", "in reduce_grads: a sum over world"),
    ("tp2sp", "", "in _sum_partial", "missing", "replicas differ"),
    ("tp2sp", LLAMA, "in _sum_partial", "twice", "in _sum_partial: a sum over tp"),
    ("ep2-tp2", EXPERTS, "kinds/experts/layer.py", "missing", "the output of blocks.0"),
    ("ep2-tp2", EXPERTS, "kinds/experts/layer.py", "twice", "kinds/experts/layer.py"),
    ("pp2", "", "optimizer/zero.py", "twice", "a sum over"),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout, more, place, how, named", MISTAKES)
def test_planted_mistakes_are_named(layout, more, place, how, named, monkeypatch):
    problems("tp1", more)  # one process, before anything is wrong
    plant(monkeypatch, place, how)
    found = problems(layout, more)
    assert any(named in line for line in found), found


def test_the_command_names_them_and_fails(monkeypatch, capsys):
    plant(monkeypatch, "in start_input_reduction", "twice")
    with pytest.raises(SystemExit):
        verify_layout.main([*WORDS, "--layouts", "tp2", "--collectives", "--steps", "1"])
    said = capsys.readouterr().out
    assert (
        "FAIL" in said and "in start_input_reduction: a sum over tp of what its 2 ranks hold alike, so it is 2" in said
    )
    monkeypatch.undo()


# ---- without ranks ---------------------------------------------------------------------------------------------------


def record(*sums, boundaries=(), replicas=""):
    made = SumRecord()
    made.sums, made.boundaries, made.replicas = list(sums), list(boundaries), replicas
    return made


def call(bits, axis="tp", ranks=(0, 1), place="a.py:1 in f", elements=9, zero=False):
    return SumCall(axis, ranks, place, elements, bits, zero)


def test_sums_are_compared_call_by_call_in_each_group():
    first = record(call(1), call(2), call(3, "dp", (0, 2)))
    second = record(call(5), call(2))
    third = record(call(3, "dp", (0, 2)), call(7, ranks=(2, 3)))
    fourth = record(call(8, ranks=(2, 3)))
    assert problems_of([first, second, third, fourth]) == [
        "a.py:1 in f: a sum over dp of what its 2 ranks hold alike, so it is 2 times too large",
        "a.py:1 in f: a sum over tp of what its 2 ranks hold alike, so it is 2 times too large",
    ]
    zeros = record(call(0, zero=True))
    assert problems_of([zeros, zeros]) == []
    often = record(call(1), call(2), call(3, place="b.py:2 in g"))
    assert [line.rpartition(" (")[2] for line in problems_of([often, often]) if "a.py" in line] == ["2 times)"]


def test_squares_are_compared_with_those_of_one_process():
    ends = lambda a, b: [Boundary((), OUTPUT, "blocks.2", 1, a, 8), Boundary((), GRADIENT, "blocks.10", 1, b, 8)]
    alone = record(boundaries=ends(8.0, 4.0))
    half = lambda a, b: record(boundaries=[one._replace(squares=one.squares / 2, elements=4) for one in ends(a, b)])
    assert problems_of([half(7.0, 4.0), half(9.0, 4.0)], alone) == []
    [output, gradient] = problems_of([half(8.0, 4.0), half(8.001, 5.0)], alone)
    assert output.startswith("the output of blocks.2 has a mean square of 1") and "blocks.10" in gradient
    assert problems_of([half(8.0, 4.0), half(8.001, 4.0)], alone, "bf16") == []
    several = lambda size: record(
        boundaries=[
            Boundary((), what, f"blocks.{n}", 1, 8.0 if n in (3, 12) else size, 8)
            for what in (OUTPUT, GRADIENT)
            for n in (3, 9, 10, 12)
        ]
    )
    [output, gradient] = problems_of([several(2.0), several(2.0)], several(4.0))  # where a mistake is seen first
    assert output.startswith("the output of blocks.9 ") and "blocks.10 " in gradient
    nan = half(float("nan"), 4.0)
    assert "the output of blocks.2" in problems_of([nan, nan], alone, "bf16")[0]


def test_small_and_whole_numbers_are_not_recorded():
    made, axis = SumRecord(), type("A", (), dict(name="tp", ranks=(0, 1)))()
    for x in (torch.ones(7), torch.ones(99, dtype=torch.int64), torch.ones(8), torch.zeros(8)):
        made.heard("sent", "all-reduce", x, axis)
    assert [(one.elements, one.zero) for one in made.sums] == [(8, False), (8, True)]
