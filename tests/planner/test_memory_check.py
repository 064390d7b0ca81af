# SPDX-License-Identifier: Apache-2.0
"""What does not fit is refused before ranks join, with what would fit; what trains is not."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import finetune
import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.planner import memory_check
from megatron.planner.memory_check import Demand, check_room
from megatron.settings.rank_env import Ranks
from megatron.telemetry import host_memory
from megatron.training.rules import resolve
from tests.models import gpt_variant, plain_module

GPT = pretrain_gpt.recipe()
ROOT = Path(__file__).resolve().parents[2]
RUN = "--mock-data --vocab-size 1000 --lr 1e-3 --train-iters 2 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1"
SMALL = f"{RUN} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2"
LARGE = f"{RUN} --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 20000 --micro-batch-size 128"
LONG = f"{RUN} --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 --micro-batch-size 8"


def settings(flags: str, world: int = 1, recipe=None):
    recipe = recipe or GPT
    return resolve(parse_any(flags.split(), recipe=recipe), world)


def certain(flags: str, world: int = 1, recipe=None, ranks=None) -> int:
    """Bytes of this machine's memory that a job on it is certain to need."""
    recipe = recipe or GPT
    demand = Demand.of(settings(flags, world, recipe), recipe, "cpu", ranks or Ranks(0, world, 0, world))
    return demand.on_host(demand.layout)


BARE = 200e6  # what the interpreter and torch take at least, without any training
LONG_HEADS = "--hidden-size 64 --num-attention-heads 4 --seq-length 4096"


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "script, flags, near",  # near: at least this share of what the run has taken
    [
        (pretrain_gpt, f"--num-layers 2 {LONG_HEADS}", 0.4),
        (pretrain_gpt, "--num-layers 4 --hidden-size 768 --num-attention-heads 8 --seq-length 16 --bf16", 0.6),
        (pretrain_gpt, f"--num-layers 4 {LONG_HEADS} --reset-attention-mask --attention-dropout 0", 0.0),
        (pretrain_bert, "--num-layers 4 --hidden-size 128 --num-attention-heads 8 --seq-length 512", 0.4),
    ],
    ids=["activations", "state", "documents", "an encoder"],
)
def test_what_is_certain_is_less_than_what_runs_take(script, flags, near):
    """As the kernel counts the memory of a process."""
    flags = f"{RUN} --micro-batch-size 4 {flags}" if script is pretrain_bert else f"{RUN} {flags}"
    words = [sys.executable, f"{script.__name__}.py", "--log-memory-interval", "2", *flags.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    most = float(re.search(r"max resident: ([\d.]+)", done.stdout)[1]) * 2**20 - BARE
    assert near * most <= certain(flags, recipe=script.recipe()) <= most


def test_what_a_parent_held_is_not_what_a_run_takes():
    """A process that is started by a large one begins with its figure of getrusage, which is that of its parent."""
    large = bytearray(400 << 20)
    large[:: 1 << 12] = b"x" * len(large[:: 1 << 12])
    code = "from megatron.telemetry.memory import memory_use; print(memory_use('cpu').most)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert int(done.stdout) < 200 << 20 and len(large)


LAUNCHERS = {"": 3, "-m megatron.tools.launch": 3, "-m torch.distributed.run": 1}  # and how they end


@pytest.mark.sampled(10)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_it_is_said_once_and_before_torch_is_loaded(launcher):
    run = f"import pretrain_gpt, megatron.errors as e; e.run_main(pretrain_gpt.main, {LARGE.split()})"
    alone = ["-X", "importtime", "-c", run]
    words = [*launcher.split(), "--nproc-per-node", "2", "pretrain_gpt.py", *LARGE.split()] if launcher else alone
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100)
    said = re.findall(r"^error: training needs at least [\d.]+ GB of this machine's memory", done.stderr, re.M)
    assert (done.returncode, len(said)) == (LAUNCHERS[launcher], 1), done.stderr
    assert launcher or not re.search(r"\| +torch$", done.stderr, re.M)


@pytest.fixture
def free(monkeypatch):
    """`free(bytes)`: so much memory is free, of a machine that has `total` (default: no more)."""

    def set_free(size, total=None):
        monkeypatch.setattr(memory_check, "available_memory", lambda otherwise: size)
        monkeypatch.setattr(memory_check, "total_memory", lambda: total or size)

    return set_free


@pytest.mark.parametrize("gigabytes", [4.0, 2.0, 1.0])
def test_what_is_said_to_fit_does(free, gigabytes):
    free(gigabytes * 1e9)
    with pytest.raises(SettingsError) as refused:
        check_room(settings(LONG), GPT)
    changes = re.findall(r"(--[a-z][^()]*) \([\d.]+ GB\)", refused.value.do)
    assert changes and any("--seq-length" in change for change in changes)
    for change in changes:
        check_room(settings(f"{LONG} {change}"), GPT)


def test_ranks_of_a_node_share_its_memory(free):
    one, four = certain(SMALL), certain(f"{SMALL} --global-batch-size 8", 4)
    assert four == 4 * one and certain(f"{SMALL} --global-batch-size 8", 4, ranks=Ranks(2, 4, 0, 2)) == 2 * one
    stages = [certain(f"{SMALL} --pipeline-model-parallel-size 2", 2, ranks=Ranks(at, 2, 0, 1)) for at in (0, 1)]
    assert certain(f"{SMALL} --pipeline-model-parallel-size 2", 2) == sum(stages) and stages[0] != stages[1]
    free(3 * one)
    check_room(settings(SMALL), GPT)
    free(one)  # exactly enough
    check_room(settings(SMALL), GPT)
    free(one - 1)
    with pytest.raises(SettingsError, match="training needs at least"):
        check_room(settings(SMALL), GPT)


@pytest.mark.parametrize("more, copies", [("", 2), ("--replication", 4), ("--replication --replication-factor 3", 6)])
def test_snapshots_in_memory_count(more, copies, free, tmp_path):
    """Two of them are there at the end of each, with weights and both moments of Adam in fp32, on so many nodes."""
    words = f"{SMALL} --global-batch-size 8 --save x --non-persistent-save-interval 5 {more}"
    plain, weights = certain(f"{SMALL} --global-batch-size 8", 4), 2 * 12 * 32 * 33 + 32 * 20 + 32 * (1000 + 16)
    snapshots = certain(words, 4) - plain
    assert snapshots == pytest.approx(copies * 12 * weights, rel=0.05)
    on_one_of_two = certain(words, 4, ranks=Ranks(2, 4, 0, 2)) - plain // 2
    assert on_one_of_two == pytest.approx(snapshots / 2, rel=1e-6)
    assert certain(f"{words} --non-persistent-local-ckpt-dir {tmp_path}", 4) == plain  # a disk
    free(certain(SMALL))
    check_room(settings(SMALL), GPT)
    with pytest.raises(SettingsError) as refused:
        check_room(settings(f"{SMALL} --save x --non-persistent-save-interval 5"), GPT)
    assert "GB of it are snapshots in memory (--non-persistent-save-interval)" in str(refused.value)


def test_overcommitted_it_trains(free, capsys):
    free(1e5)
    with pytest.raises(SettingsError, match="training needs at least"):
        pretrain_gpt.main(SMALL.split())
    pretrain_gpt.main([*SMALL.split(), "--allow-memory-overcommit"])
    said = capsys.readouterr().out
    assert "are free; --allow-memory-overcommit\n" in said and "iteration        2/       2" in said


def test_memory_that_comes_back_is_waited_for(monkeypatch, free):
    slept = []
    free(1e5, 1e12)
    monkeypatch.setattr(
        memory_check.time, "sleep", lambda seconds: slept.append(seconds) or (len(slept) == 2 and free(1e12))
    )
    check_room(settings(SMALL), GPT)
    assert slept == [1, 1]
    free(1e5, 1e12)
    with pytest.raises(SettingsError):
        check_room(settings(SMALL), GPT)


def start_on_two_machines(rank: int) -> str:
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    memory_check.available_memory = lambda otherwise: 1e5 if rank else 1e12
    memory_check.total_memory = lambda: 1e5 if rank else 1e12
    with pytest.raises(SettingsError) as refused:
        pretrain_gpt.main(SMALL.split())
    return str(refused.value)


def test_all_machines_end_where_one_has_too_little(run_ranks):
    """The other one would wait for it until --distributed-timeout-minutes."""
    other, own = run_ranks(2, start_on_two_machines, timeout=60)
    assert own.startswith("training needs at least 0.0 GB of this machine's memory")
    assert other == f"rank 1, on its machine: {own}"


class Wrong(GPTFacts):
    def layer_ops(self, share, kind):
        return 1 / 0


def never(config, vocab_size):
    raise AssertionError("this builds the module")


def test_where_nobody_can_say_there_is_no_check(free, monkeypatch):
    free(1e5)
    check_room(settings(LARGE), replace(plain_module.recipe(), facts=never))
    own = dict(facts=Wrong, groups={"variant": gpt_variant.VariantSettings})
    check_room(settings(LARGE), pretrain_gpt.variant("tests.models.gpt_variant", gpt_variant.Variant, **own))
    with pytest.raises(SettingsError):
        check_room(settings(LARGE), GPT)
    check_room(settings(f"{LARGE} --skip-train"), GPT)
    free(None)
    check_room(settings(LARGE), GPT)


def test_a_gpu_is_asked_itself(monkeypatch, free):
    monkeypatch.setattr(memory_check, "DRIVERS", ("/",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(2e9), int(2e9)))
    config = settings(LONG.replace("--device cpu", "--device auto"))
    with pytest.raises(SettingsError, match="GB of GPU 0, and 2.0 GB are free"):
        check_room(config, GPT)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(2e12), int(2e12)))
    free(1e5)
    check_room(config, GPT)
    offloaded = settings(f"{LONG.replace('--device cpu', '--device auto')} --optimizer-cpu-offload --bf16")
    with pytest.raises(SettingsError, match="GB of this machine's memory"):
        check_room(offloaded, GPT)


def test_fine_tuned_encoders_count_their_state_alone():
    """Their texts are as long as they are: on CPUs no padding is computed."""
    words = (
        f"{RUN} --num-layers 2 --hidden-size 32 --num-attention-heads 4 --micro-batch-size 32 --task SST2 "
        "--tokenizer-type NullTokenizer --backbone"
    )
    for backbone in ("BERT", "GPT"):
        flags, recipe = [*words.split(), backbone], finetune.recipe()
        short, long = (certain(" ".join(flags) + f" --seq-length {n}", recipe=recipe) for n in (64, 128))
        assert (long < 1.5 * short) == (backbone == "BERT"), (short, long)
    assert pretrain_t5.recipe().predicts(None) == pretrain_bert.recipe().predicts(None) == "all"


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container_counts(version, tmp_path, monkeypatch):
    """Files as Linux has them; a limit of the group above holds, too, and cached files can be given back."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        if version == 1
        else ("memory.max", "memory.current", "inactive_file")
    )
    top = tmp_path / "cgroup" / ("memory" if version == 1 else "")
    for folder, limit in (
        ("", None),
        ("jobs", "300000000"),
        ("jobs/mine", "9223372036854771712" if version == 1 else "max"),
    ):
        (top / folder).mkdir(parents=True, exist_ok=True)
        if limit:
            (top / folder / names[0]).write_text(f"{limit}\n")
            (top / folder / names[1]).write_text("120000000\n")
            (top / folder / "memory.stat").write_text(f"cache 77\n{names[2]} 20000000\n")
    (tmp_path / "mine").write_text("5:cpu:/x\n4:memory:/jobs/mine\n" if version == 1 else "0::/jobs/mine\n")
    monkeypatch.setattr(host_memory._groups, "__defaults__", (tmp_path / "mine", tmp_path / "cgroup"))
    assert host_memory.available_memory() == 200_000_000 and host_memory.total_memory() == 300_000_000


def test_a_missing_device_is_reported_before_the_memory(monkeypatch):
    """The memory of this machine says nothing about a run that is to be on a GPU: `pick_device` refuses it."""
    monkeypatch.setattr(memory_check, "_has_gpu", lambda wanted: False)
    monkeypatch.setattr(memory_check, "available_memory", lambda what: 1e6)
    assert check_room(settings(f"{SMALL} --device cuda"), GPT) is None
    for device in ("auto", "cpu"):
        with pytest.raises(SettingsError, match="training needs at least"):
            check_room(settings(f"{SMALL} --device {device}"), GPT)
