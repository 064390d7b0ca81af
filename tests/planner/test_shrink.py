# SPDX-License-Identifier: Apache-2.0
"""The shrunk job of a training: small, valid, and with every parallel feature of the original; and it trains."""

import json
import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import SettingsError, run_main
from megatron.model.command_line import parse_any
from megatron.pipeline.stages import Pipeline
from megatron.planner.shrink import RANKS, _like, _recompute, original, reduced, shrunk_job_of, shrunk_jobs_of
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import GROUPS, Recompute
from megatron.tools import shrink as tool
from megatron.training.rules import check, resolve

BIG = """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 --mock-data
    --train-iters 1000 --lr 6e-5 --global-batch-size 1536 --eval-iters 1"""


def made(line: str, world: int, steps: int = 3):
    """(original, shrunk job) of BIG with more flags; the shrunk job is proved valid."""
    config, ranks = original(parse_pretrain(f"{BIG} --world-size {world} {line}".split()), print)
    found = shrunk_job_of(config, ranks, steps)
    assert check(found.config, found.world_size) == []
    assert found.world_size <= RANKS
    return config, found


KEPT = [  # flags, ranks, ranks of the shrunk job, what of the shrunk job is as it should be
    (
        "--tp 8 --pp 16 --sequence-parallel",
        128,
        4,
        lambda p, c: (
            (p.tensor_model_parallel_size == 2 == p.pipeline_model_parallel_size)
            and p.sequence_parallel
            and c.batch.global_batch_size == 4
        ),
    ),
    ("--tp 8 --pp 16", 512, 8, lambda p, c: not p.sequence_parallel and c.batch.global_batch_size == 8),
    ("--pp 48", 48, 2, lambda p, c: c.batch.global_batch_size == 4),
    ("--pp 12 --global-batch-size 12", 12, 2, lambda p, c: c.batch.global_batch_size == 2),  # as many as stages
    ("--pp 12 --global-batch-size 5", 12, 2, lambda p, c: c.batch.global_batch_size == 1),  # fewer
    ("--pp 12 --global-batch-size 150", 12, 2, lambda p, c: c.batch.global_batch_size == 3),  # an odd round
    (
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        16,
        2,
        lambda p, c: (
            p.sharding_stage == 1 and p.overlap_grad_reduce and p.overlap_param_gather and p.sharding_degree is None
        ),
    ),
    (
        "--sharding-stage 3 --sharding-degree 4 --param-cpu-offload",
        16,
        4,
        lambda p, c: (p.sharding_stage, p.sharding_degree) == (3, 2) and c.optimizer.param_cpu_offload,
    ),
    ("--tp 2 --pp 2 --sharding-stage 2 --sharding-degree 4", 32, 8, lambda p, c: p.sharding_degree is None),
    (
        "--pp 8 --num-layers-per-virtual-pipeline-stage 3",
        8,
        2,
        lambda p, c: Pipeline.of(p, c.model.num_layers).chunks == 2 and p.num_layers_per_virtual_pipeline_stage == 2,
    ),
    (
        "--pp 8 --num-virtual-stages-per-pipeline-rank 12",
        8,
        2,
        lambda p, c: Pipeline.of(p, c.model.num_layers).chunks == 2 and c.model.num_layers == 4,
    ),
    ("--pp 8 --pipeline-schedule zb-v", 8, 2, lambda p, c: p.pipeline_schedule == "zb-v" and c.model.num_layers == 8),
    ("--pp 4 --pipeline-stage-layers 20,26,26,24", 4, 2, lambda p, c: p.pipeline_stage_layers == "1,2"),
    ("--pp 4 --pipeline-stage-layers 0,32,32,32", 4, 2, lambda p, c: p.pipeline_stage_layers == "0,2"),
    (
        "--pp 4 --decoder-first-pipeline-num-layers 21",
        4,
        2,
        lambda p, c: p.decoder_first_pipeline_num_layers == 1 and c.model.num_layers == 3,
    ),
    (
        "--num-layers 94 --pp 8 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
        8,
        2,
        lambda p, c: c.model.num_layers == 2 and p.account_for_loss_in_pipeline_split,
    ),
    (
        "--recompute-granularity full --recompute-num-layers 4 --no-recompute-layers 0,7",
        1,
        1,
        lambda p, c: (c.recompute.recompute_num_layers, c.recompute.no_recompute_layers) == (2, "0"),
    ),
    (
        "--pp 8 --recompute-granularity full --recompute-method block --recompute-num-layers 5",
        8,
        2,
        lambda p, c: c.recompute.recompute_num_layers == 1,
    ),
    (
        "--num-query-groups 8 --tp 8 --swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope",
        8,
        2,
        lambda p, c: (c.model.num_attention_heads, c.model.num_query_groups, c.model.swiglu) == (4, 2, True),
    ),
    ("--num-query-groups 1", 1, 1, lambda p, c: c.model.num_query_groups == 1),
    (
        "--kv-channels 64 --tp 4",
        4,
        2,
        lambda p, c: c.model.kv_channels * c.model.num_attention_heads != c.model.hidden_size,
    ),
    ("--position-embedding-type rope --rotary-percent 0.25", 1, 1, lambda p, c: c.model.rotary_percent == 0.25),
    ("--max-position-embeddings 4096", 1, 1, lambda p, c: c.model.max_position_embeddings > c.model.seq_length),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5 --untie-embeddings-and-output-weights",
        4,
        2,
        lambda p, c: c.optimizer.optimizer_offload_fraction == 0.5 and c.model.untie_embeddings_and_output_weights,
    ),
    (
        "--fp16 --hidden-dropout 0.2 --attention-dropout 0 --loss-averaging micro-batch",
        1,
        1,
        lambda p, c: (
            c.precision.precision == "fp16" and c.model.hidden_dropout == 0.2 and c.precision.initial_loss_scale == 256
        ),
    ),
    (
        "--lr-warmup-fraction 0.1 --lr-decay-style WSD --lr-wsd-decay-iters 100",
        1,
        1,
        lambda p, c: (c.optimizer.lr_warmup_iters, c.optimizer.lr_wsd_decay_iters) == (1, 1),
    ),
    ("--check-weight-hash-across-dp-replicas-interval 50", 2, 2, lambda p, c: c.guard.check_replicas_interval == 1),
    ("--reset-position-ids --reset-attention-mask --eod-mask-loss", 1, 1, lambda p, c: c.data.reset_attention_mask),
]


@pytest.mark.parametrize("flags, world, ranks, kept", KEPT)
def test_features_stay_and_sizes_go(flags, world, ranks, kept):
    config, shrunk = made(flags, world)
    small = shrunk.config
    assert shrunk.world_size == ranks
    assert kept(small.parallel, small)
    assert (small.model.hidden_size, small.model.seq_length, small.batch.train_iters) == (32, 16, 3)
    assert (small.checkpoint.save, small.data.mock_data, small.kernels.device) == (None, True, "cpu")
    told = " ".join(reduced(config, small))
    changed = [
        f.name
        for group, kind in GROUPS.items()
        for f in fields(kind)
        if group != "planner" and getattr(getattr(config, group), f.name) != getattr(getattr(small, group), f.name)
    ]
    assert all(f"{name} " in told for name in changed) and "hidden_size 12288 -> 32" in told


@pytest.mark.parametrize("method", ["block", "uniform", None])
@pytest.mark.parametrize("number", [None, 1, 3, 5, 6, 7])
def test_some_or_all_layers_of_a_stage_are_recomputed_as_before(method, number):
    """Of stages of six layers, that become two."""
    found = _recompute(Recompute("full", method, number), 6, 8, 2).recompute_num_layers
    some, whole = (1, 2) if method == "block" else (min(2, number or 0), 2)
    assert found == (None if number is None else whole if number >= 6 else some)


@pytest.mark.parametrize(
    "counts, small", [([4, 0, 3, 4], [2, 1]), ([4, 0, 4, 4], [2, 0]), ([4, 3, 5, 4], [2, 1]), ([4, 5, 5, 4], [1, 2])]
)
def test_uneven_stages_stay_uneven(counts, small):
    """Of stages with layers, while there are other than those at the ends."""
    assert _like(counts, 2) == small


def test_what_a_shrunk_job_cannot_keep_is_said():
    config, shrunk = made("--tp 2 --pp 2 --sharding-stage 2 --sharding-degree 4", 32)
    assert shrunk.lost == (
        "copies of sets of shards (--sharding-degree below the data parallel size): the shrunk job would need "
        "more than 8 ranks",
    )
    one, other = shrunk_jobs_of(config, 32)
    p = other.config.parallel
    assert one.config == shrunk.config and not (one.lost or other.lost) and check(other.config, other.world_size) == []
    assert (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.sharding_degree) == (1, 2, 2)
    assert other.world_size == 8 and len(shrunk_jobs_of(made("--tp 2", 4)[0], 4)) == 1


def test_a_ramp_and_samples_stay():
    line = (
        BIG.replace("--train-iters 1000", "--train-samples 100000") + " --rampup-batch-size 32 32 10000 --world-size 8"
    )
    config, world = original(parse_pretrain(line.split()), print)
    shrunk = shrunk_job_of(config, world, steps=4)
    batch = resolve(shrunk.config, shrunk.world_size).batch
    assert (batch.rampup_batch_size, batch.global_batch_size, batch.train_samples) == ([2, 2, 2], 4, 14)


def test_layers_that_are_not_quantized_stay_in_the_blocks_that_are_left():
    skip = "--quantization-skip blocks.0.mlp.up,blocks.3.mlp.down,blocks.5.mlp.down"
    argv = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data --lr 1"
    config = parse_any(f"{argv} --train-iters 9 --quantization {skip}".split())
    model = shrunk_job_of(config, 1).config.model
    assert (model.num_layers, model.quantization_skip) == (2, "blocks.0.mlp.up,blocks.1.mlp.down")
    assert model.linear == "*=fake_quantize,blocks.0.mlp.up=plain,blocks.1.mlp.down=plain"


@pytest.mark.parametrize("rate, shrunk", [("6e-5", 1e-3), ("1e-3", 1e-3), ("0.01", 0.01), (None, None)])
def test_rates_are_large_enough_to_move_weights_in_a_few_steps(rate, shrunk):
    """A thousandth at least; one that is not given is not made up."""
    line = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --vocab-size 60 --mock-data"
    config = parse_pretrain([*line.split(), *(["--lr", rate] if rate else []), "--micro-batch-size", "1"])
    assert shrunk_job_of(config, 1).config.optimizer.lr == shrunk


def test_what_counts_ranks_or_their_batch_goes():
    _, shrunk = made("--tp 2 --local-batch-size 24 --gradient-accumulation-steps 24 --profile --profile-ranks 63", 128)
    assert check(shrunk.config, shrunk.world_size) == []


def test_an_own_schedule_keeps_its_ranks_and_micro_batches(tmp_path):
    path = tmp_path / "own.txt"
    lines = ["F0 F1 F2 B0 B1 B2", "F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    path.write_text("\n".join(lines) + "\n")
    _, shrunk = made(f"--pp 3 --pipeline-schedule {path} --global-batch-size 3", 3)
    assert (shrunk.world_size, shrunk.config.batch.global_batch_size, shrunk.config.model.num_layers) == (3, 3, 6)


def test_resolved_settings_have_the_same_shrunk_job():
    flags = "--tp 4 --pp 4 --num-query-groups 8 --swiglu --sharding-stage 2 --lr-warmup-iters 10"
    config, shrunk = made(flags, 64)
    assert shrunk_job_of(resolve(config, 64), 64) == shrunk


CHOICES = dict(
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 3, 16]),
    dp=st.sampled_from([1, 2, 6]),
    zero=st.sampled_from(["", "--sharding-stage 1", "--sharding-stage 2 --sharding-degree 2", "--sharding-stage 3"]),
    schedule=st.sampled_from(["1f1b", "gpipe", "zb-h1", "zb-v", "v-half", "interleaved"]),
    recompute=st.sampled_from(
        ["", "selective", "full --recompute-num-layers 3", "full_attn --no-recompute-layers 1,2"]
    ),
    batch=st.sampled_from([36, 96, 1536 * 6]),
    micro=st.sampled_from([1, 3]),
    sp=st.booleans(),
)


@pytest.mark.sampled(2)
@settings(max_examples=60, deadline=None)
@given(**CHOICES)
def test_whatever_can_run_has_a_shrunk_job_that_can(tp, pp, dp, zero, schedule, recompute, batch, micro, sp):
    line = f"--tp {tp} --pp {pp} {zero} --global-batch-size {batch} --micro-batch-size {micro}"
    line += f" --pipeline-schedule {schedule if pp > 1 else '1f1b'}" + " --sequence-parallel" * sp
    line += " --num-virtual-stages-per-pipeline-rank 2" * (schedule == "interleaved" and pp > 1)
    line += f" --recompute-granularity {recompute}" * bool(recompute)
    try:
        _, shrunk = made(line, tp * pp * dp)
    except SettingsError:
        return
    assert shrunk.config.parallel.sharding_stage == (int(zero.split()[1]) if zero else 0)


# ---- it trains -------------------------------------------------------------------------------------------------------

MANY = f"""{BIG} --tp 8 --pp 12 --sequence-parallel --use-distributed-optimizer --num-virtual-stages-per-pipeline-rank 2
    --recompute-granularity selective --num-query-groups 8 --swiglu --position-embedding-type rope --overlap-grad-reduce
    --world-size 384 --eval-iters 0"""


@pytest.mark.sampled(10)
def test_the_tool_trains_with_everything_on(capfd):
    tool.main(f"{MANY} --data-path /nowhere/text --steps 2".replace("--mock-data", "").split())
    told = capfd.readouterr().out
    for words in (
        "the shrunk job of 384 ranks, on 8:",
        "num_layers 96 -> 8",
        "tensor_model_parallel_size 8 -> 2",
        "data_path /nowhere/text -> none",
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 8",
        "using world size: 8, data-parallel size: 2",
        "iteration        2/       2",
        "lm loss: 4.",
    ):
        assert words in told


@pytest.mark.sampled(5)
def test_the_command_of_the_guide_runs(capfd, root):
    commands = re.findall(r"```bash\n(.*?)```", (root / "docs" / "planning.md").read_text(encoding="utf-8"), re.S)
    [words] = [text.replace("\\\n", " ").split() for text in commands if "megatron.tools.shrink" in text]
    tool.main(words[3:])
    told = capfd.readouterr().out
    assert "the shrunk job of 128 ranks, on 4:" in told and "iteration        3/       3" in told


def test_checkpoints_of_its_own_are_gone_on_from(capfd, tmp_path):
    line = f"{BIG} --save /nowhere/real --save-interval 7 --eval-iters 0 --shrunk-dir {tmp_path}"
    tool.main(f"{line} --steps 2".split())
    tool.main(f"{line} --steps 3".split())
    told = capfd.readouterr().out
    assert "resuming at iteration 2" in told and "iteration        3/       3" in told
    record = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert record["config"]["checkpoint"]["save"] == str(tmp_path)


@pytest.mark.parametrize(
    "line, code, words",
    [
        ("--num-attention-heads 90", 3, "--hidden-size 12288 is not a multiple of --num-attention-heads 90"),
        ("--shrunk-dir {file} --steps 1", 6, "file: cannot be written"),
    ],
)
def test_it_ends_as_a_training_does(line, code, words, tmp_path, capfd):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as left:
        run_main(tool.main, f"{BIG} {line.format(file=tmp_path / 'file')}".split())
    said = capfd.readouterr().err
    assert (left.value.code, words in said) == (code, True), said
