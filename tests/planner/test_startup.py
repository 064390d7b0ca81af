# SPDX-License-Identifier: Apache-2.0
"""Groups of a job as the planner counts them, against the groups of every rank; and what is said of its start."""

import re
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.mpu.mesh import Mesh
from megatron.pipeline.channels import opening_rounds
from megatron.pipeline.schedule import looped, v_shaped
from megatron.planner import startup
from megatron.planner.layout import Layout
from megatron.planner.startup import count, groups_of, start_up
from megatron.settings.parse import parse_pretrain
from megatron.tools.plan import main as plan

OWN = ((0, 0), (2, 0), (1, 0), (0, 1), (1, 1), (2, 1))  # as in a schedule of one's own


@pytest.mark.parametrize(
    "sizes, stages",
    [
        (dict(tp=2, pp=4, shard=3), looped(4)),
        (dict(tp=2, pp=3, cp=2, replicate=2, shard=2, shard_over_cp=True), looped(3, 2)),
        (dict(pp=3, replicate=4, ep=2), OWN),
        (dict(tp=2, pp=2, shard=2, ep=2), v_shaped(2)),
        (dict(tp=2, pp=2, replicate=2, shard=4, ep=2, etp=1), looped(2)),
        (dict(tp=2, cp=2, replicate=2, ep=2, etp=2), ()),
        (dict(cp=2, pp=2, replicate=2, ep=4), looped(2)),
        (dict(tp=8), ()),
        (dict(cp=4, tp=2), ()),
        (dict(pp=6), looped(6)),
    ],
)
def test_counts_are_those_of_all_ranks(sizes, stages):
    """Every rank is asked what it makes; a channel is a group of its own, also between the same two ranks."""
    first = Mesh(create_groups=False, **sizes)
    made, of_rank = set(), []
    for rank in range(first.world_size):
        mesh = Mesh(rank, create_groups=False, **sizes)
        own = [(names[0], ranks) for ranks, names in mesh.own_groups()]
        for channel in chain.from_iterable(opening_rounds(stages)):
            ends = mesh.pp.ranks[channel[1]], mesh.pp.ranks[channel[2]]
            own += [(channel, ends)] * (rank in ends)
        made |= set(own)
        of_rank.append((mesh.pp.rank, len(own)))
    found = count(first, stages)
    assert found.in_job == len(made) and found.most == max(number for _, number in of_rank)
    assert all(found.of_rank(stage) == number for stage, number in of_rank)
    without = count(first, stages, nccl=False)
    assert without.in_job == len([name for name, _ in made if isinstance(name, str)])


def test_a_job_of_16384_ranks():
    """tp 8, pp 16, dp 128: 2,048 + 128 + 1,024 + 1,024 groups of axes, and 1,024 pipelines of 15 hops there and back."""
    found = groups_of(Layout(tp=8, pp=16, dp=128, zero=1, shard=128), 96, nccl=True)
    assert found.axes == dict(pp=(1024, 16), shard=(128, 128), tp=(2048, 8), tied=(1024, 2))
    assert found.in_job == 2048 + 128 + 1024 + 1024 + 1024 * 30
    assert found.channels == (2, *[4] * 14, 2) and found.most == 7
    # The middle of a pipeline: all ranks, shards, tensors, four channels; nothing goes over pp itself.
    assert sorted(found.communicators(7)) == [2, 2, 2, 2, 8, 128, 16384]


def test_a_job_of_16384_ranks_with_experts():
    """ep 64 adds 256 groups of it, as many for the numbers of rows, and 1,024 of the 16 ranks that shard an expert's state:
    three for a rank.
    """
    dense = groups_of(Layout(tp=8, pp=16, dp=128, zero=1, shard=128), 96, nccl=True)
    found = groups_of(Layout(tp=8, pp=16, dp=128, zero=1, shard=128, ep=64, etp=1), 96, nccl=True)
    assert found.axes == dense.axes | dict(ep=(256, 64), ep_counts=(256, 64), expert_shard=(1024, 16))
    assert found.in_job == dense.in_job + 2 * 256 + 1024 and found.most == dense.most + 3 == 10
    assert sorted(found.communicators(7)) == sorted([*dense.communicators(7), 16, 64, 64])
    start, with_experts = start_up(dense, "cuda").total, start_up(found, "cuda").total
    assert start < with_experts < 1.2 * start


@pytest.mark.sampled(10)
def test_experts_over_64_ranks_are_planned(capsys):
    """ep takes ranks of tp, cp and dp."""
    layout = "--tp 2 --cp 2 --pp 16 --sequence-parallel --ep 64 --etp 1 --use-distributed-optimizer"
    flags = (
        "--model-name-or-path qwen3-30b-a3b --bf16 --vocab-size 151936 --micro-batch-size 1 --global-batch-size 4096"
    )
    words = f"{flags} {layout} --seq-length 4096 --mock-data --lr 1e-4 --train-iters 10 --device-name H100 --dry-run"
    pretrain_gpt.main([*words.split(), "--world-size", "16384"])
    told = " ".join(capsys.readouterr().out.split())
    assert (
        "ep: 256 groups of 64, the first: 0, 1, 2, ..., 63 expert_dp: 1024 groups of 16, the first: 0, 64, 128" in told
    )
    assert "groups: 12 per rank in addition to that of all ranks, 50,784 in the job" in told
    assert "groups are ready after about 76 s" in told


def test_channels_of_a_rank():
    """Four where a rank has two neighbours, eight where activations pass each of them twice."""
    layout = Layout(tp=8, pp=4, dp=2)
    most = {
        name: max(groups_of(replace(layout, schedule=name, chunks=chunks), 96, nccl=True).channels)
        for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2))
    }
    assert most == {"1f1b": 4, "interleaved": 4, "zb-h1": 4, "zb-v": 8}


def test_the_model_of_the_start_grows_with_the_job():
    jobs = [groups_of(Layout(tp=8, pp=16, dp=dp, zero=1, shard=dp), 96, nccl=True) for dp in (1, 8, 64, 128)]
    for part in ("rendezvous", "groups"):
        times = [start_up(groups, "cuda").parts[part] for groups in jobs]
        assert times == sorted(times) and len(set(times)) == 4
    alone = start_up(groups_of(Layout(), 4, nccl=False), "cpu")
    assert alone.total == alone.parts["processes"]


FLAGS = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --bf16 --vocab-size 51200"
LARGE = f"{FLAGS} --micro-batch-size 1 --global-batch-size 2048 --mock-data --lr 1e-4 --train-iters 10"


def test_a_timeout_that_is_too_short_is_told():
    layout = Layout(tp=8, pp=16, dp=128, zero=1, shard=128)
    waited = start_up(groups_of(layout, 96, nccl=True), "cuda").waited
    said = []
    for minutes in (waited / 60 - 0.01, waited / 60 + 0.01, 10):
        config = parse_pretrain(f"{LARGE} --distributed-timeout-minutes {minutes}".split())
        said.append(startup.slow_start(config, layout, "cuda"))
    assert "--distributed-timeout-minutes" in said[0] and said[1:] == ["", ""]
    least = float(said[0].split()[-1])
    assert 60 * least >= waited > 60 * (least - 0.5)


@pytest.mark.parametrize("waited, raised", [(599.9, None), (600.0, None), (600.1, 10.5), (630.0, 10.5), (630.1, 11)])
def test_a_timeout_has_to_be_as_long_as_the_wait(waited, raised, monkeypatch):
    """And is rounded up to half minutes."""
    config = parse_pretrain(f"{LARGE} --distributed-timeout-minutes 10".split())
    monkeypatch.setattr(startup, "start_up", lambda groups, kind: SimpleNamespace(waited=waited))
    said = startup.slow_start(config, Layout(tp=8, pp=16, dp=8), "cuda")
    assert said.endswith(f"raise it to {raised}") if raised else said == ""


@pytest.mark.sampled(10)
def test_the_planner_says_groups_and_start(capsys):
    layout = "--tp 8 --pp 16 --use-distributed-optimizer --world-size 16384 --device-name H100"
    for asked in (plan, pretrain_gpt.main):
        words = (
            f"{LARGE} {layout} --dry-run"
            if asked is pretrain_gpt.main
            else f"{FLAGS} --global-batch-size 2048 {layout}"
        )
        asked(words.split())
        told = " ".join(capsys.readouterr().out.split())
        assert re.search(
            r"groups: \d+ per rank in addition to that of all ranks, \d\d,\d{3} in the job, including [48] channels per",
            told,
        )
        assert "start-up: groups are ready after about" in told and "(a model, assumed)" in told
    # Of the very layout that was asked for
    assert "groups: 7 per rank in addition to that of all ranks, 34,944 in the job, " in told
