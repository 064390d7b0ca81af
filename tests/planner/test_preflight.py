# SPDX-License-Identifier: Apache-2.0
"""`--preflight`: what is right passes in seconds, every planted fault is found and named; `--dry-run` refuses as much."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import pretrain_gpt
from megatron.data.indexed import write_index
from megatron.errors import SettingsError
from megatron.model.facts import Facts
from megatron.model.recipe import facts_of
from megatron.mpu import initialize
from megatron.mpu.placement import Placement
from megatron.optimizer.units import FlatUnit
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.stages import Pipeline
from megatron.planner.preflight import machines, ranks, run
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.planner.preflight.shrunk_job import check_shrunk_job
from megatron.planner.problems import inspect
from megatron.planner.target import cluster_of
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import resolve

pytestmark = pytest.mark.sampled(10)

SHAPE = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --bf16"
GPT_175B = f"""{SHAPE} --tokenizer-type NullTokenizer --vocab-size 51200 --tp 8 --pp 16
    --sequence-parallel --recompute-granularity selective
    --micro-batch-size 1 --global-batch-size 1536 --train-iters 10000 --lr 6e-5 --lr-warmup-iters 100 --world-size 128
    --device-name A100-80GB"""


@pytest.mark.sampled(10)
def test_175b_passes_in_seconds(capsys, root):
    """The command of docs/planning.md."""
    commands = re.findall(r"```bash\n(.*?)```", (root / "docs" / "planning.md").read_text(encoding="utf-8"), re.S)
    [words] = [text.replace("\\\n", " ").split() for text in commands if "--preflight" in text]
    pretrain_gpt.main(words[2:])
    lines, _, end = capsys.readouterr().out.partition("preflight: all 12 checks passed\n")
    lines = lines.splitlines()
    assert [line.split()[1] for line in lines] == [
        "settings",
        "files",
        "memory",
        "start-up",
        "groups",
        "schedule",
        "layers",
        "parameters",
        "shards",
        "shapes",
        "shrunk",
        "shrunk",
    ]
    assert all(line.startswith("PASS  ") for line in lines)
    told = "\n".join(lines)
    for words in (
        "174.6 B",
        "6 groups per rank, 272 in the job",
        "128 ranks: 16 tp of 8",
        "128 distinct rank(s), 16 x 8",
        "174,615,859,200 in 1,156 tensors",
        "tp2-pp2-sp on 4 rank(s)",
        "largest relative difference in loss",
    ):
        assert words in told
    unchecked = " ".join(end.split())
    for words in (
        "not checked: how fast a step is, real memory,",
        "the machines of the 128 ranks",
        "NCCL",
        "the loss falls",
    ):
        assert words in unchecked


@pytest.mark.parametrize(
    "words, started, there, not_there",
    [
        ("--device cpu --world-size 8", 1, ["how fast", "real memory", "machines of the 8 ranks"], ["NCCL", "GPU"]),
        ("--device cpu --world-size 8", 8, ["how fast", "real memory"], ["machines", "NCCL", "GPU"]),
        ("--world-size 8", 1, ["how fast", "real memory", "machines", "NCCL", "kernels that a GPU takes"], []),
        ("--world-size 8", 8, ["how fast", "real memory", "kernels that a GPU takes"], ["machines", "NCCL"]),
        ("--world-size 1", 1, ["how fast", "kernels that a GPU takes"], ["machines", "NCCL"]),
    ],
)
def test_what_was_not_checked_is_said(words, started, there, not_there):
    device = "" if "cpu" in words else "--device-name A100"
    line = f"{SHAPE} --mock-data --lr 1 --train-iters 1 {words} {device}"
    told = ", ".join(run.unchecked(cluster_of(parse_pretrain(line.split()))[0], started))
    assert [part for part in there if part not in told] == [part for part in not_there if part in told] == []


# ---- mistakes --------------------------------------------------------------------------------------------------------

MISTAKES = {  # flags -> what the user reads
    "--num-attention-heads 90": "--hidden-size 12288 is not a multiple of --num-attention-heads 90; nearest: 12240",
    "--num-attention-heads 12": "--num-attention-heads 12 is not a multiple of --tp 8; nearest: 8",
    "--num-layers 95": "--num-layers 95 cannot be cut into 16 even stages (--pp 16); nearest: 80",
    "--micro-batch-size 5": "--global-batch-size 1536 is not a multiple of --micro-batch-size 5 x data parallel size 1",
    "--device-name V100-32GB": " GB on pipeline rank 0 (and on|--recompute-granularity full|would fit",
    "--tp 1 --world-size 16 --device-memory-gb 999": "--sequence-parallel has no effect without --tensor-model-parallel",
    "--data-path nowhere": "--data-path: there is no nowhere.idx and no nowhere.bin; preprocess_data.py writes them",
    "--data-path text.jsonl": "--data-path: text.jsonl is a file|--input text.jsonl --output-prefix text ",
    "--data-path cut": "--data-path: cut.bin holds 20 tokens, its .idx describes 400",
    "--world-size 100 --local-world-size 4": "100 ranks cannot be divided by tensor x pipeline x context|run on 128",
    "--data-parallel-size 4": "--data-parallel-size 4 is not what there is|run on 512 ranks",
    "--num-layers-per-virtual-pipeline-stage 4": "--num-layers-per-virtual-pipeline-stage 4 does not cut 96 layers|1 or 2",
    "--pipeline-schedule zb-v --virtual-pp-degree 3": "schedule zb-v has 2 model chunks a rank, not 3",
    "--pipeline-stage-layers 48,48": "--pipeline-stage-layers 48,48 is for 2 stages, and there are 16|would work",
    "--sharding-stage 1 --sharding-degree 3": "--sharding-degree 3 does not divide the data parallel size 1; nearest: 1",
    "--param-cpu-offload": "--param-cpu-offload needs --sharding-stage 3",
    "--tokenizer-type GPT2BPETokenizer --vocab-file gone.json --merge-file gone.txt": "--vocab-file: there is no gone.json",
    "--tokenizer-type GPT2BPETokenizer": "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
    "--seq-length 2052": "--seq-length 2052 cannot be divided by --tp 8, as --sequence-par",
    "--num-query-groups 12": "--num-query-groups 12 cannot be divided by --tp 8; nearest: 8 or 16",
    "--max-position-embeddings 1024": "--seq-length 2048 is longer than --max-position-embeddings 1024; lower the one",
    "--cp 2 --world-size 256 --seq-length 2056": "--seq-length 2056 is not a multiple of 16, as --cp 2",
    "--cp 4 --world-size 512 --cp-comm-type a2a --num-attention-heads 48": "a2a divides the 6 key-value heads of each",
    "--lr-warmup-iters 20000": "warm-up of 20000 iters is not shorter than the decay length of 10000",
    "--recompute-method block": "--recompute-method block: goes with --recompute-granularity full alone",
    "--save-interval 100": "--save-interval needs --save",
    "--load nowhere": "--load nowhere holds no checkpoint; check the path; a new run has --save of the same folder",
    "--save cut.bin/ck": "--save cut.bin/ck: cut.bin is a file; give a folder",
}
IDLE = ("--tp 1 --world-size 16 --device-memory-gb 999",)  # it would run: --dry-run says it as a note


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token files, whole and cut short."""
    made = tmp_path_factory.mktemp("tokens")
    for name in ("tokens", "cut"):
        (np.arange(400) % 290).astype(np.uint16).tofile(made / f"{name}.bin")
        write_index(made / f"{name}.idx", np.uint16, np.full(10, 40), np.arange(11))
    os.truncate(made / "cut.bin", 40)
    (made / "text.jsonl").write_text('{"text": "a"}')
    return made


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_refused_with_the_fix(flags, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(run, "check_design", lambda *args: None)  # shown above
    line = f"{GPT_175B} --data-path tokens {flags}".split()
    with pytest.raises(SettingsError) as refused:
        pretrain_gpt.main([*line, "--preflight"])
    assert refused.value.code == 3
    assert [words for words in MISTAKES[flags].split("|") if words not in str(refused.value)] == [], refused.value
    config = parse_pretrain(line)
    dry = inspect(config, cluster_of(config)[0]).problems  # what --dry-run refuses
    assert bool(dry) == (flags not in IDLE)
    assert not dry or all(words in "\n".join(dry) for words in MISTAKES[flags].split("|"))


def test_a_right_command_is_not_refused(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    pretrain_gpt.main([*GPT_175B.split(), "--data-path", "tokens", "--dry-run"])
    assert "no problems found" in capsys.readouterr().out
    monkeypatch.setattr(run, "check_design", lambda *args: None)
    pretrain_gpt.main([*GPT_175B.split(), "--data-path", "tokens", "--preflight"])
    with pytest.raises(SettingsError, match="--world-size 128 is not this job: it has 64 ranks"):
        of_a_job = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="64")
        run.preflight(parse_pretrain([*GPT_175B.split(), "--mock-data"]), None, env=of_a_job)


# ---- every rank ------------------------------------------------------------------------------------------------------

SMALL = """--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 101 --tp 2
    --pp 2 --sequence-parallel --use-distributed-optimizer --global-batch-size 16 --micro-batch-size 2 --train-iters 4
    --lr 1e-3 --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full --no-recompute-layers 0,1
    --eval-iters 0"""


def checks(line: str = "", world: int = 8) -> dict:
    """Name -> check of every rank of SMALL."""
    config = resolve(parse_pretrain(f"{SMALL} {line}".split()), world)
    return {
        check.name: check
        for check in check_ranks(Design(config, world, facts_of(config, 102), pretrain_gpt.build_model))
    }


@pytest.mark.parametrize(
    "line, world",
    [
        ("", 8),
        ("--sharding-stage 3 --sharding-degree 2", 16),
        ("--untie-embeddings-and-output-weights --swiglu", 8),
        ("--pipeline-schedule zb-v", 4),
        ("--num-query-groups 2 --position-embedding-type rope --qk-layernorm", 8),
        ("--amp-level O1 --bf16 --normalization RMSNorm", 4),
    ],
)
def test_right_ranks_pass(line, world):
    found = checks(line, world)
    assert [check.line for check in found.values() if check.fault] == []
    assert list(found) == ["groups", "schedule", "layers", "parameters", "shards", "shapes"]


def _all_of_it(self, local_shape, ranks):
    return (0,) * len(self.shape), tuple(self.shape)


def _too_much(self, rank, pieces):
    low = self.size // pieces * rank
    return low, min(self.size, low + self.size // pieces + 64)


@pytest.mark.parametrize(
    "where, name, bug, found",
    [
        (Placement, "box", _all_of_it, {"shards": "overlap"}),  # every tensor parallel rank says it holds everything
        (FlatUnit, "shard", _too_much, {"shards": "overlap"}),
        (Facts, "parameters", property(lambda facts: 7), {"parameters": "but the formula gives 7"}),
        (
            Pipeline,
            "layers_of",
            lambda self, rank: [range(2 * n, 2 * n + 2) for n in range(2)],
            {"layers": "of rank 4 holds"},
        ),
        (ranks, "ranks_along", lambda sizes, axes: [[0, 1], [1, 2]], {"groups": "do not contain every rank once"}),
        (
            ranks,
            "make_rank_schedules",
            lambda name, pp, num_microbatches, chunks: [[] for _ in range(pp)],
            {"schedule": ""},
        ),
        (
            ranks,
            "rank_units",
            lambda *args: type("Units", (), dict(padded=lambda self, n: 5, padded_frozen=lambda self, n: 0))(),
            {"parameters": "counts 5"},
        ),
    ],
)
def test_a_planted_bug_is_found(where, name, bug, found, monkeypatch):
    monkeypatch.setattr(where, name, bug)
    failed = {check.name: check.fault for check in checks().values() if check.fault}
    assert set(failed) == set(found), failed
    assert all(words in failed[key] for key, words in found.items()), failed


def test_a_wrong_shape_is_found(monkeypatch):
    from megatron.mpu import layers

    # Layers forget to cut their output
    monkeypatch.setattr(layers.mappings, "reduce_scatter_to_sequence_parallel_region", lambda x, axis: x)
    assert checks()["shapes"].fault.startswith("rank 0: ")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [RuntimeError, AssertionError, TypeError, SettingsError])
def test_whatever_a_stage_raises_is_a_fault(error, monkeypatch):
    """A model of a user's own may take other arguments. The other kinds of ranks are checked, too."""
    asked = []

    def fails(design, mesh, stage):
        asked.append(mesh.rank)
        raise error("it  fails\nhere")

    monkeypatch.setattr(ranks, "_check_stage_shapes", fails)
    monkeypatch.setattr(Design, "stages", lambda design, mesh, pipeline: [None])
    config = resolve(parse_pretrain(SMALL.split()), 8)
    found = ranks.check_shapes(Design(config, 8, facts_of(config, 102), pretrain_gpt.build_model))
    assert found.fault.startswith("rank 0: it") and "fails" in found.fault and len(asked) == len(set(asked)) > 1


def test_a_broken_shrunk_job_is_found(monkeypatch):
    # Gradients of norms stay partial sums
    monkeypatch.setattr(DistributedOptimizer, "_sum_partial", lambda self, axis: None)
    config = resolve(parse_pretrain(f"{SMALL} --pp 1 --num-virtual-stages-per-pipeline-rank 1".split()), 2)
    [check] = check_shrunk_job(config, 2, pretrain_gpt.recipe(), 3)
    assert check.line.startswith("FAIL  shrunk fp32 tp2-sp-zero1 on 2 rank(s)") and "worst: " in check.fault


# ---- the machines ----------------------------------------------------------------------------------------------------


def compared(rank: int, plant) -> list[str]:
    """What rank 0 says of four ranks on two nodes; `plant(rank)` makes some odd."""
    os.environ.update(GROUP_RANK=str(rank // 2))
    machines.gemm_seconds = lambda device: 0.010
    machines.all_reduce_seconds = lambda axis, device: 0.002
    machines.clock = lambda: 1000.0
    plant(rank)
    config = parse_pretrain(f"{SMALL} --device cpu --save /tmp --vocab-file pretrain_gpt.py".split())
    place = initialize.join_job(resolve(config, 4).parallel, config.kernels)
    return [check.line for check in machines.check_machines(config, place, 1e3)]


def test_like_machines_pass(run_ranks, root, monkeypatch):
    monkeypatch.chdir(root)
    lines = run_ranks(4, compared, lambda rank: None)[0]
    assert [line for line in lines if not line.startswith("PASS")] == []
    assert [line.split()[1] for line in lines] == [
        "ranks",
        "versions",
        "code",
        "command",
        "data",
        "disk",
        "clocks",
        "gemm",
        "all-reduce",
    ]


def test_the_odd_ones_are_named(run_ranks, root, monkeypatch):
    def plant(rank: int) -> None:
        if rank == 1:
            sizes = machines.file_sizes
            machines.file_sizes = lambda config: {path: None for path in sizes(config)}
            machines.clock = lambda: 1005.0
        if rank == 2:
            machines.gemm_seconds = lambda device: 0.015
            versions = machines.versions
            machines.versions = lambda device: versions(device) | dict(torch="1.0", driver="550")
        if rank >= 2:
            machines.all_reduce_seconds = lambda axis, device: 0.003
            hashes = machines.code_hashes()
            machines.code_hashes = lambda: hashes | {"pretrain_gpt.py": "other"}
        if rank == 3:
            settings = machines.settings_of
            machines.settings_of = lambda config: settings(config) | {"--lr": "0.1"}
            machines.free_bytes = lambda folder: 10

    monkeypatch.chdir(root)
    host = machines.node_of()[1]
    everywhere = run_ranks(4, compared, plant)
    assert everywhere == [everywhere[0]] * 4  # every rank knows
    found = {line.split()[1]: line for line in everywhere[0] if line.startswith("FAIL")}
    assert f"pretrain_gpt.py is missing on rank 1 on {host}" in found["data"]
    assert f"the clock of rank 1 on {host} is 5.0 s ahead" in found["clocks"]
    assert f"rank 2 on {host}: products of matrices: 50% slower than the median of 10.00 ms" in found["gemm"]
    assert f"driver is 550 on rank 2 on {host}, missing elsewhere; torch is 1.0 on rank 2" in found["versions"]
    assert f"pretrain_gpt.py is other on node {host} (ranks 2, 3)" in found["code"]
    assert f"node {host} (ranks 2, 3): the same inside a node: 50% slower" in found["all-reduce"]
    assert f"--lr is 0.1 on rank 3 on {host}, 0.001 elsewhere" in found["command"]
    assert "--save /tmp has 0.0 GB free" in found["disk"]
    assert set(found) == {"data", "clocks", "gemm", "versions", "code", "all-reduce", "command", "disk"}


@pytest.mark.full
def test_a_started_job_looks_at_its_machines(root):
    words = f"{SMALL} --pp 1 --num-virtual-stages-per-pipeline-rank 1 --preflight --device cpu".split()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, root / "pretrain_gpt.py", *words],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | dict(PYTHONPATH=str(root), OMP_NUM_THREADS="1"),
    )
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert names[-8:] == ["ranks", "versions", "code", "command", "data", "clocks", "gemm", "all-reduce"], done.stderr
    failed = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAIL")}
    assert failed <= {"gemm", "all-reduce"}, done.stdout  # a busy machine may be told as slow
    assert done.returncode == (1 if failed else 0)  # torchrun's own code for a rank's 3
