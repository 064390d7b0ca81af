# SPDX-License-Identifier: Apache-2.0
"""The settings of layout and planner: what a rank holds and talks to. That layouts train alike is tests/layouts' part."""

import contextlib
import json

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.errors import Failure, SettingsError
from megatron.mpu import collectives, initialize
from megatron.mpu.mesh import mesh_of
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline import read_timeline
from megatron.planner import target, tuning
from megatron.planner.choose import automatic, search_layouts
from megatron.planner.device import cpu
from megatron.settings.parse import parse_pretrain
from megatron.training.build import build_run
from megatron.training.rules import check, resolve


def built(command, flags, world):
    return build_run(resolve(parse_pretrain(command(flags)), world), pretrain_gpt.recipe())


def shapes(run):
    return {name: tuple(p.shape) for stage in run.stages for name, p in stage.named_parameters()}


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_tensor_parallel_ranks_hold_a_half_of_each_matrix(command, run_ranks):
    """And a half of the rows of a vocabulary of 101, padded to a multiple of 2 x 24; norms are whole."""

    def body(rank):
        run = built(command, "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 24", 2)
        return shapes(run)

    for found in run_ranks(2, body):
        assert found["embedding.word.weight"] == (144 // 2, 32)
        assert found["blocks.1.attention.qkv.weight"] == (4 // 2, 3, 8, 32)
        assert found["blocks.1.attention.output.weight"] == (32, 32 // 2)
        assert found["blocks.1.mlp.up.weight"] == (128 // 2, 32) and found["blocks.1.mlp.down.weight"] == (32, 128 // 2)
        assert found["blocks.1.mlp_norm.weight"] == (32,)


def test_sequence_parallel_ranks_hold_a_half_of_the_sequence(command, run_ranks):
    """At norms and dropouts; inside of attention the sequence is whole."""

    def body(rank, flags):
        run, seen = built(command, f"--tp 2 --hidden-dropout 0.1 {flags}", 2), []
        block = run.stages[0].blocks["0"]
        for norm in (block.attention_norm, block.mlp_norm):
            norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
        for dropout in (block.attention_dropout, block.mlp_dropout):
            dropout.keep = lambda shape, *more, keep=dropout.keep: seen.append(shape[0]) or keep(shape, *more)
        run.stages[0](None, run.loaders.train.step(0, 1)[0])
        return seen

    assert run_ranks(2, body, "") == [[16] * 4] * 2
    assert run_ranks(2, body, "--sequence-parallel") == [[8] * 4] * 2


def test_pipeline_ranks_hold_their_layers(command, run_ranks):
    flags = "--pipeline-model-parallel-size 2 --num-layers 4 --untie-embeddings-and-output-weights"

    def body(rank):
        names = shapes(built(command, flags, 2))
        return {name.split(".")[1] if name.startswith("blocks") else name for name in names}

    first, last = run_ranks(2, body)
    assert first == {"0", "1", "embedding.word.weight", "embedding.position.weight"}
    assert last == {"2", "3", "final_norm.weight", "final_norm.bias", "output.weight"}


def test_sharding_degree_is_the_ranks_that_share_the_state(command, run_ranks):
    def body(rank):
        sizes = []
        for flags in ("", "--sharding-degree 2", "--sharding-degree 1"):
            run = built(command, f"--sharding-stage 1 --micro-batch-size 1 --global-batch-size 4 {flags}", 4)
            sizes.append((run.context.mesh.shard.size, run.optimizer.memory()["state"]))
        return sizes

    for sizes in run_ranks(4, body):
        assert [size for size, _ in sizes] == [4, 2, 1]
        assert [state / sizes[0][1] for _, state in sizes] == pytest.approx([1, 2, 4], rel=0.1)


def test_home_of_the_shards(build):
    """Where they lie beside a GPU, of which this machine need not have one."""
    for more, home in (("", "cuda"), ("--param-cpu-offload", "cpu")):
        optimizer = build(f"--sharding-stage 3 {more}").optimizer
        optimizer.device = torch.device("cuda")
        assert optimizer._shard_device.type == home


@pytest.mark.gpu
def test_param_cpu_offload_keeps_shards_on_the_host(build):
    flags = "--device cuda --sharding-stage 3 --precision bf16"
    for more, device in (("", "cuda"), ("--param-cpu-offload", "cpu")):
        assert {shard.device.type for shard in build(f"{flags} {more}").optimizer.shards} == {device}


def test_data_parallel_size_is_asserted(command):
    assert check(parse_pretrain(command("--data-parallel-size 2 --micro-batch-size 2 --global-batch-size 4")), 2) == []
    [said] = check(parse_pretrain(command("--data-parallel-size 3")), 2)
    assert "--data-parallel-size 3 is not what there is" in said


def test_context_parallel_ranks_hold_two_chunks_of_the_sequence(command, run_ranks):
    """The first and the last quarter, or those between, of the same samples; weights are whole."""

    def body(rank):
        run = built(command, "--context-parallel-size 2", 2)
        batch, seen = run.loaders.train.step(0, 2)[0], []
        run.stages[0].blocks["0"].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0]))
        run.stages[0](None, batch)
        return batch.tokens, batch.labels, batch.samples.tolist(), seen, shapes(run)

    run = built(command, "", 1)
    whole = run.loaders.train.step(0, 2)[0]
    for rank, (tokens, labels, samples, seen, found) in enumerate(run_ranks(2, body)):
        rows = [*range(4 * rank, 4 * rank + 4), *range(12 - 4 * rank, 16 - 4 * rank)]
        assert tokens.equal(whole.tokens[rows]) and labels.equal(whole.labels[rows])
        assert samples == whole.samples.tolist() and seen == [8] and found == shapes(run)


@pytest.mark.sampled(5)
def test_cp_comm_type_is_what_ranks_send_in_each_layer(command, run_ranks):
    def body(rank, flags):
        run, sent = built(command, f"--context-parallel-size 2 {flags}", 2), []
        for name in ("all_gather", "reduce_scatter", "all_to_all", "start_shift"):
            real = getattr(collectives, name)
            note = lambda x, axis, *more, name=name, real=real: sent.append(name) or real(x, axis, *more)
            setattr(collectives, name, note)
        loss = run.stages[0](None, run.loaders.train.step(0, 2)[0])[1]["lm loss"]
        loss.backward()
        return sent

    gathers, exchanges = ["all_gather"] * 2 + ["reduce_scatter"] * 2, ["all_to_all"] * 8
    ring = ["start_shift"] * (2 * 1 + 2 * 3)  # of two layers; back with gradients, which have one way more
    ways = {"": ring, "p2p": ring, "allgather": gathers, "a2a": exchanges}
    ways["a2a p2p"] = ["all_to_all"] * 2 + ["start_shift"] * 4 + ["all_to_all"] * 2
    ways["a2a allgather"] = ["all_to_all"] * 2 + ["all_gather", "reduce_scatter"] + ["all_to_all"] * 2
    for words, expected in ways.items():
        assert run_ranks(2, body, f"--cp-comm-type {words}" if words else "") == [expected] * 2, words


def test_hierarchical_context_parallel_sizes_are_those_of_two_levels(command):
    """Consecutive ranks of cp exchange rows for heads; a ring goes over the groups. Counted with tp 2."""
    flags = "--tp 2 --context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
    parallel = parse_pretrain(command(flags)).parallel
    found = [mesh_of(parallel, rank, 8, create_groups=False) for rank in range(8)]
    assert [mesh.cp_inner.ranks for mesh in found] == [(0, 2), (1, 3)] * 2 + [(4, 6), (5, 7)] * 2
    assert [mesh.cp_outer.ranks for mesh in found] == [(rank % 4, rank % 4 + 4) for rank in range(8)]
    assert "cp_inner: [0,2] [1,3] [4,6] [5,7]" in found[0].topology()
    assert "cp_outer: [0,4] [1,5] [2,6] [3,7]" in found[0].topology()
    plain = mesh_of(parse_pretrain(command("--tp 2 --context-parallel-size 4")).parallel, 0, 8, create_groups=False)
    assert plain.cp_inner.size == plain.cp_outer.size == 1 and "inner" not in plain.topology()


def test_ranks_of_a_node_are_those_of_the_inner_hop(command):
    """Consecutive ranks of ep; with two parts of each expert on a node of four, two. Numbers of rows go over ep."""
    flags = "--tp 2 --expert-model-parallel-size 4 --num-experts 8 --moe-token-dispatcher-type flex"
    parallel = parse_pretrain(command(f"{flags} --moe-ranks-per-node 4")).parallel
    found = [mesh_of(parallel, rank, 8, create_groups=False) for rank in range(8)]
    assert [mesh.ep_inner.ranks for mesh in found] == [(0, 2), (1, 3)] * 2 + [(4, 6), (5, 7)] * 2
    assert [mesh.ep_outer.ranks for mesh in found] == [(rank % 4, rank % 4 + 4) for rank in range(8)]
    assert "ep_inner: [0,2] [1,3] [4,6] [5,7]" in found[0].topology()
    assert [names for ranks, names in found[0].own_groups() if "ep_counts" in names] == [["ep", "ep_counts"]]
    whole = mesh_of(parse_pretrain(command(f"{flags} --etp 1")).parallel, 0, 8, local_size=2, create_groups=False)
    assert (whole.ep_inner.ranks, whole.ep_outer.ranks) == ((0, 1), (0, 2))
    plain = mesh_of(parse_pretrain(command("--ep 4 --num-experts 8")).parallel, 0, 8, create_groups=False)
    assert plain.ep_inner.size == plain.ep_outer.size == 1 and "inner" not in plain.topology()
    assert [names for _, names in plain.own_groups() if "ep_counts" in names] == [["ep_counts"]]


@pytest.mark.parametrize(
    "name, ops",
    [
        ("gpipe", "F0 F1 F2 B0 B1 B2"),
        ("1f1b", "F0 F1 B0 F2 B1 B2"),
        ("zb-h1", "F0 F1 I0 W0 F2 I1 W1 I2 W2"),
        ("FILE", "F0 F1 F2 B2 B1 B0"),
    ],
)
def test_pipeline_schedule_is_the_order_of_passes(name, ops, command, tmp_path):
    """Of the first of two ranks with three micro-batches."""
    if name == "FILE":
        name = str(tmp_path / "own.txt")
        (tmp_path / "own.txt").write_text(f"{ops}\n" * 2)
    parallel = parse_pretrain(command(f"--pp 2 --pipeline-schedule {name}")).parallel
    found = " ".join(map(str, Pipeline.of(parallel, 2, 3).ops(0, 3)))
    assert found == ops


def test_a_timeline_is_written_where_it_is_wanted(train, tmp_path):
    train(f"--train-iters 4 --pipeline-timeline {tmp_path / 'step.json'}")
    assert " ".join(map(str, read_timeline(str(tmp_path / "step.json")).plan[0])) == "F0 B0 F1 B1"


def test_print_topology_prints_the_groups_and_stops(command, capsys):
    pretrain_gpt.main(command("--tp 2 --world-size 4 --print-topology"))
    said = capsys.readouterr().out
    assert " tp: [0,1] [2,3]" in said and " dp: [0,2] [1,3]" in said and "iteration" not in said


# ---- the process group -----------------------------------------------------------------------------------------------


class Joined(Exception):
    """Instead of a process group: what it was asked for with."""


@pytest.fixture
def joining(command, monkeypatch):
    """`joining(flags)`: (backend, seconds) of the process group that a job of two ranks is started with."""

    def refuse(backend, *, timeout, **_):
        asked.append((backend, timeout.total_seconds()))
        raise Joined

    asked = []
    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")

    def join(flags):
        with contextlib.suppress(Joined):
            pretrain_gpt.main(command(flags))
        return asked.pop()

    return join


def test_backend_and_timeout_of_the_process_group(joining, monkeypatch):
    assert joining("") == ("gloo", 600)
    assert joining("--distributed-backend gloo --distributed-timeout-minutes 3") == ("gloo", 180)
    monkeypatch.setattr(initialize, "pick_device", lambda wanted, local: torch.device("cuda"))
    assert joining("--device cuda")[0] == "nccl"
    assert joining("--device cuda --distributed-backend gloo")[0] == "gloo"


@pytest.mark.parametrize(
    "flags",
    ["--auto-parallel --max-global-batch-size 4 --micro-batch-size 1", "--micro-batch-size auto --global-batch-size 4"],
)
def test_a_search_joins_with_the_same_timeout(flags, joining):
    """The ranks of a search and of the training behind it are one process group."""
    assert joining(f"{flags} --distributed-timeout-minutes 3") == ("gloo", 180)


# ---- planner ---------------------------------------------------------------------------------------------------------


GPT_1B = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --bf16 --device auto
    --micro-batch-size 1"""


def test_what_is_planned_for(command, tmp_path):
    """World size, ranks of a node, device, its memory, and a calibration are the cluster's."""
    cluster = lambda flags: target.cluster_of(parse_pretrain(command(flags)), {})[0]
    found = cluster("--device auto --world-size 32 --local-world-size 4 --device-name H100-80GB --device-memory-gb 50")
    assert (found.world_size, found.local_size, found.device.name, found.device.memory_gb) == (32, 4, "H100-80GB", 50)
    assert {world: cluster(f"--device auto --world-size {world}").local_size for world in (6, 7, 8, 16, 32)} == {
        6: 6,
        7: 7,
        8: 8,
        16: 8,
        32: 8,
    }
    asked = parse_pretrain(command(f"{GPT_1B} --auto-parallel --world-size 12 --global-batch-size 24"))
    with pytest.raises(SettingsError, match="12: how many ranks does a node have(.|\n)*--local-world-size 6"):
        automatic(asked, lambda text: None)
    said = lambda flags: target.cluster_of(parse_pretrain(command(flags)), {})[1]
    assert "8 a node assumed" in said("--world-size 16") and "assumed:" not in said(
        "--world-size 16 --local-world-size 8"
    )
    (tmp_path / "measured.json").write_text(json.dumps(dict(device=vars(cpu()) | dict(flops=dict(fp32=123e9)))))
    assert cluster(f"--calibration {tmp_path / 'measured.json'}").device.flops == dict(fp32=123e9)
    assert cluster("").device.flops != dict(fp32=123e9)


def test_a_margin_of_memory(command):
    """8 % of a device stay free in a search, 3 % beside a given layout; --memory-margin sets both."""
    job = f"{GPT_1B} --world-size 8 --device-name A100-80GB --global-batch-size 8"
    searched = lambda flags: search_layouts(parse_pretrain(command(f"{job} --auto-parallel {flags}")))
    given = lambda flags: target.cluster_of(parse_pretrain(command(f"{job} {flags}")), {})[0].device
    for flags, free, beside in (("", 0.08, 0.03), ("--memory-margin 0.5", 0.5, 0.5)):
        found, device = searched(flags), given(flags)
        assert device.usable_bytes == int((1 - beside) * device.memory_bytes)
        assert found.cluster.device.usable_bytes == int((1 - free) * device.memory_bytes)
        assert all(plan.bytes <= found.cluster.device.usable_bytes for plan in found.searched.plans)
    with pytest.raises(SettingsError, match="--memory-margin 1.0 must be at least 0 and below 1"):
        searched("--memory-margin 1.0")


@pytest.mark.sampled(2)
def test_max_global_batch_size_bounds_what_the_search_takes(command):
    """Larger steps are never slower by the sample, so the largest is taken."""
    chosen = {}
    for most in (8, 32):
        words = command(
            f"{GPT_1B} --auto-parallel --world-size 8 --device-name A100-80GB --max-global-batch-size {most}"
        )
        config, plans, _ = automatic(parse_pretrain(words), lambda text: None)
        assert max(plan.job.global_batch for plan in plans) <= most
        chosen[most] = config.batch.global_batch_size
    assert chosen == {8: 8, 32: 32}


def test_dry_run_trains_nothing(command, capsys, tmp_path):
    pretrain_gpt.main(command(f"--dry-run --save {tmp_path / 'never'}"))
    said = capsys.readouterr().out
    assert "memory of a rank" in said and "iteration        " not in said and not (tmp_path / "never").exists()


def test_preflight_checks_and_trains_nothing(command, capsys, tmp_path):
    pretrain_gpt.main(command(f"--preflight --save {tmp_path / 'never'}"))
    said = capsys.readouterr().out
    assert "PASS  shapes" in said and "checks passed" in said and not (tmp_path / "never").exists()
    with pytest.raises((SettingsError, Failure)):
        pretrain_gpt.main(command("--preflight --num-attention-heads 5"))


@pytest.mark.sampled(5)
def test_tune_steps_times_as_many_steps_of_the_best_three(command, monkeypatch, capsys):
    steps, train_step = [], tuning.train_step
    monkeypatch.setattr(
        tuning, "train_step", lambda run: steps.append(run.config.batch.micro_batch_size) or train_step(run)
    )
    pretrain_gpt.main(command("--micro-batch-size auto --global-batch-size 4 --tune-steps 3"))
    few = {size: steps.count(size) for size in steps}
    steps.clear()
    pretrain_gpt.main(command("--micro-batch-size auto --global-batch-size 4 --tune-steps 5"))
    assert set(few) == {1, 2, 4} and {size: steps.count(size) - few[size] for size in few} == dict.fromkeys(few, 2)
    assert "measuring the best 3" in capsys.readouterr().out
    steps.clear()
    pretrain_gpt.main(command("--micro-batch-size auto --global-batch-size 4"))
    assert not steps
