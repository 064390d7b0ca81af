# SPDX-License-Identifier: Apache-2.0
"""The planner's commands as users give them: plan, --dry-run, --auto-parallel."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.errors import DataError, SettingsError, StorageError, UsageError
from megatron.model.gpt.facts import GPTFacts
from megatron.planner import calibrate, device, dry_run
from megatron.planner.cluster import Cluster
from megatron.planner.device import cpu, find
from megatron.planner.layout import Job, Layout
from megatron.planner.speed import step
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model
from megatron.tools import plan
from megatron.training.rules import resolve

pytestmark = pytest.mark.sampled(2)

GPT_22B = """--num-layers 48 --num-attention-heads 64 --hidden-size 6144 --seq-length 2048 --max-position-embeddings 2048
    --train-iters 100 --lr 2.0e-4 --min-lr 2.0e-4 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --bf16
    --data-path /mnt/data/enwiki_text_document --log-interval 10""".split()
TINY = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --train-iters 3 --eval-iters 1 --device cpu""".split()


@pytest.mark.sampled(10)
def test_the_advisors_command_line(capsys, tmp_path):
    script = tmp_path / "best.sh"
    plan.main(
        [
            *GPT_22B,
            "--task-type",
            "llmacc.megatron.GPT",
            "--world-size",
            "64",
            "--local-world-size",
            "8",
            "--max-global-batch-size",
            "64",
            "--device-memory-gb",
            "80",
            "--tokens",
            "300e9",
            "--emit",
            str(script),
        ]
    )
    told = " ".join(capsys.readouterr().out.split())
    for words in (
        "GPT of 22.1 B parameters",
        "tokens/s",
        "(assumed; error 2%, worst 8%)",
        "out of memory by",
        "300.0 B tokens: ",
        "optimizer moments",
        "torchrun --nnodes 8",
        "GPT-2's 50257 tokens are assumed",
        "note: attention with dropout (0.1) keeps its weights; with --attention-dropout 0",
    ):
        assert words in told
    text = script.read_text()
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0 and '"$@"' in text
    flags = text[text.index("pretrain_gpt.py") + 15 : text.index('"$@"')].replace("\\\n", " ").split()
    config = resolve(parse_pretrain(flags), 64)
    assert config.model.num_layers == 48 and config.data.data_path == ["/mnt/data/enwiki_text_document"]
    assert config.batch.global_batch_size <= 64


def test_defaults_that_are_dear_on_a_gpu_are_told(capsys):
    line = [*TINY[:-2], "--global-batch-size", "8", "--device-name", "a100-80"]
    plan.main(line)
    told = " ".join(capsys.readouterr().out.split())
    assert "note: fp32, the default: products are 16 times as fast with --bf16" in told
    plan.main([*line, "--bf16", "--attention-dropout", "0"])
    told = capsys.readouterr().out
    assert "with --bf16" not in told and "keeps its weights" not in told


def test_what_a_question_leaves_out_is_told(capsys):
    """The batch, the length of samples, and the number that a vocabulary of numbers has beside those given."""
    axes = "--world-size 8 --device-name H100 --bf16 --tp 8 --pp 1 --sharding-stage 1".split()
    plan.main(["--model-name-or-path", "llama-3.1-8b", *axes])
    told = capsys.readouterr()
    assert "4 M tokens a step are assumed, as for the Llamas (--global-batch-size 32)" in told.err  # 32 x 131072 = 2^22
    said = " ".join(told.out.split())
    assert "note: sequence 131072 is the context of llama-3.1-8b; --seq-length 8192 is a usual length" in said
    assert "--global-batch-size 32 " in said and "and the end of documents" not in said
    plan.main(["--model-name-or-path", "llama-3-8b", "--vocab-size", "1000", *axes])
    told = capsys.readouterr()
    assert "--global-batch-size 512)" in told.err and "is the context" not in told.out
    assert "note: vocabulary 1001: --vocab-size 1000, and the end of documents" in told.out
    plan.main(["--model-name-or-path", "llama-3-8b", *axes, "--global-batch-size", "16"])
    assert "tokens a step are assumed" not in capsys.readouterr().err


@pytest.mark.sampled(10)
def test_a_picture_of_the_plans(tmp_path, capsys):
    flags = [*GPT_22B, "--world-size", "16", "--max-global-batch-size", "32", "--device-name", "a100-80", "--top", "3"]
    flags += ["--tp", "4", "--pp", "4"]  # few layouts: it is not the search that is tested
    plan.main([*flags, "--picture", str(tmp_path / "plan.svg")])
    drawn = (tmp_path / "plan.svg").read_text()
    told = capsys.readouterr().out
    best = told.partition("\n1  ")[2].split()[0]
    assert "chosen as the simplest" in told  # so the first bar need not be the shortest
    for words in (
        "1 is chosen as the simplest, with most memory free, of ",
        f"1  {best}, micro ",
        "seconds of a step (speeds are assumed)",
        "optimizer moments",
        "tensor parallel",
        "16 ranks, global batch 32",
        "A100-80GB, 85.9 GB",
    ):
        assert words in drawn
    [width] = map(float, re.findall(r'viewBox="0 0 (\S+) ', drawn))
    texts = re.findall(r'<text style="font-size: (\S+)px[^>]*text-anchor: start[^>]* x="(\S+)"[^>]*>([^<]+)<', drawn)
    assert len(texts) > 8 and all(float(x) + 0.55 * float(size) * len(text) < width for size, x, text in texts)
    with pytest.raises(SettingsError, match="cannot be drawn"):
        plan.main([*flags, "--picture", str(tmp_path / "plan.txt")])
    with pytest.raises(StorageError, match="cannot write --picture"):
        plan.main([*flags, "--picture", str(tmp_path / "nowhere" / "plan.svg")])


@pytest.mark.sampled(10)
def test_a_colour_of_a_picture_has_one_meaning(tmp_path, capsys):
    """In the legends of one picture, and for every kind of bytes and seconds that plans have."""
    from megatron.planner.picture import COLOURS
    from megatron.telemetry.drawing import THEME

    assert len(set(COLOURS.values())) == len(COLOURS) and not set(COLOURS.values()) & set(THEME)
    kinds, flags = set(), [*TINY[:-2], "--world-size", "4", "--global-batch-size", "8", "--device-name", "a100-40"]
    for more in ("--bf16 --tp 2", "--zero-stage 2 --device cpu --device-name cpu", "--zero-stage 3", "--pp 2"):
        plan.main([*flags, "--top", "200", "--json", *more.split()])
        for one in json.loads(capsys.readouterr().out)["plans"]:
            kinds |= set(one["parts"]).union(*(rank["device"] for rank in one["memory"]))
    assert len(kinds) > 15 and kinds <= set(COLOURS)
    flags = [*GPT_22B, "--world-size", "16", "--max-global-batch-size", "32", "--device-name", "a100-80", "--top", "3"]
    plan.main([*flags, "--tp", "4", "--pp", "4", "--picture", str(tmp_path / "plan.svg")])
    drawn = (tmp_path / "plan.svg").read_text()
    legends = re.findall(r"fill: (#\w{6})[^>]*/>\s*</g>\s*<g id=\"text_\d+\">\s*<text[^>]*>([a-z ]+)<", drawn)
    assert len(legends) > 8 and {colour: words for colour, words in legends} == {
        COLOURS[words]: words for _, words in legends
    }


def test_json(capsys):
    flags = "--world-size 16 --max-global-batch-size 32 --device-name a100-80 --tp 4 --json".split()
    plan.main([*GPT_22B, *flags])
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] == 22_068_480_000 and found["plans"][0]["seconds"] > 0
    best = found["plans"][0]
    assert best["bytes"] == max(rank["total"] for rank in best["memory"])
    assert found["rejected"][0]["bytes_over"] > 0 and found["command"].startswith("torchrun")


def test_memory_from_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("DEVICE_MEMORY_GB", "31")
    plan.main(["--params", "100e9"])
    told = capsys.readouterr().out
    assert "372.5" in told and "devices of 31 GB" in told and " 39 " in told
    plan.main(["--params", "100e9", "--world-size", "2048"])
    assert "on 2,048 ranks: 0.586 GB (0.546 GiB) of a checkpoint from each" in capsys.readouterr().out
    plan.main(["--params", "100e9", "--world-size", "32"])
    told = " ".join(capsys.readouterr().out.split())
    assert "does not fit: fewest devices of 31 GB, by state alone: 39 (64 as" in told
    plan.main(["--params", "100e9", "--min-world-size"])
    assert " ".join(capsys.readouterr().out.split()).endswith(
        "39 (64 as a power of two) for weights and moments in fp32, "
        "52 (64 as a power of two) for training in fp32, "
        "59 (64 as a power of two) for training in bf16"
    )
    with pytest.raises(SettingsError, match="none of .* layouts fits 2 x 31 GB"):
        plan.main([*GPT_22B, "--world-size", "2", "--global-batch-size", "8", "--device-name", "a100"])


@pytest.mark.parametrize(
    "words, error",
    [
        ("--task-type BERT", UsageError),
        ("--device-name abacus", UsageError),
        ("--rampup-batch-size 8 8 100", SettingsError),
        ("--step-batch-size-schedule 0:8", SettingsError),
    ],
)
def test_what_cannot_be_planned(words, error):
    batch = [] if not words else ["--max-global-batch-size", "32"]
    with pytest.raises(error):
        plan.main([*GPT_22B, "--world-size", "16", *batch, *words.split()])


@pytest.mark.parametrize(
    "words, said",
    [
        ("--params 0 --tokens -1", ["--params 0.0 must be above 0", "--tokens -1.0 must be above 0"]),
        ("--params 1e9 --device-memory-gb -1", ["--device-memory-gb -1.0 must be above 0"]),
        ("--world-size 0 --num-attention-heads 0", ["--world-size 0 must be", "--num-attention-heads 0 must be"]),
        ("--seq-length 0 --vocab-size -5", ["--seq-length 0 must be at least 1", "--vocab-size -5 must be"]),
        ("--global-batch-size -4 --micro-batch-size auto", ["--global-batch-size -4 must be at least 1"]),
        ("--top 0", ["--top 0 must be at least 1"]),
    ],
)
def test_numbers_that_describe_nothing_are_refused_before_a_search(words, said, capsys):
    model = [] if "--params" in words else [*TINY, "--global-batch-size", "8"]
    with pytest.raises(SettingsError) as caught:
        plan.main([*model, *words.split()])
    assert all(sentence in str(caught.value) for sentence in said)
    assert "layouts searched" not in capsys.readouterr().out


@pytest.mark.parametrize("memory", ["abc", "-5", "0", "nan", "inf"])
@pytest.mark.parametrize("words", [["--params", "1e9"], [*TINY, "--global-batch-size", "8"]])
def test_a_memory_in_the_environment_that_is_none(words, memory, monkeypatch):
    monkeypatch.setenv("DEVICE_MEMORY_GB", memory)
    with pytest.raises(UsageError, match=f"DEVICE_MEMORY_GB={memory} in the environment is not a number above 0"):
        plan.main(words)


@pytest.mark.parametrize(
    "found, why",
    [
        (dict(flops={}), "flops of any precision is None"),
        (dict(flops=3), "'int' object has no attribute 'items'"),
        (dict(flops=dict(bf16=0)), "flops of bf16 is 0, which must be a number above 0"),
        (dict(memory_gb="80"), "memory_gb is '80'"),
        (dict(inner=float("nan")), "inner is nan"),
        (dict(rows=-1), "rows is -1, which must be a number at least 0"),
        (dict(kind="tpu"), "kind is 'tpu'"),
    ],
)
def test_a_calibration_that_was_not_measured(found, why, tmp_path):
    file, measured = tmp_path / "measured.json", dict(name="x", flops=dict(bf16=1e12), attention=dict(bf16=1e12))
    file.write_text(json.dumps(dict(device=measured | found)))
    with pytest.raises(DataError, match=f"(?s)is not a calibration file.*{why}"):
        device.read(str(file))
    file.write_text(json.dumps(dict(device=measured)))
    assert device.read(str(file)).reached("bf16", 1e9) == pytest.approx(1e12, rel=1e-3)


@pytest.mark.parametrize("found, words", [(cpu(), "--device-name h100"), (find("h100"), "--device cpu")])
def test_a_calibration_of_another_kind_of_device(found, words, tmp_path):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(dict(device=vars(found))))
    line = [*TINY[:-2], "--global-batch-size", "8", "--world-size", "2", "--calibration", str(file)]
    with pytest.raises(SettingsError, match=f"was measured on .*, and {words} is another"):
        plan.main([*line, *words.split()])
    plan.main(line)


def test_a_measured_update_takes_its_own_time():
    """30 bytes a parameter: the gradient and two moments in fp32, the main weight, and the weight in bf16."""
    job, layout = Job(GPTFacts(Model(12, 768, 12, 1024), 50304), 8), Layout()
    found = [
        step(job, layout, Cluster(replace(find("H100-80GB"), update_bandwidth=speed), 1)).parts["update"]
        for speed in (0.0, 1e12)
    ]
    moved = 30 * job.facts.parameters
    assert found == pytest.approx([moved / find("H100-80GB").bandwidth, moved / 1e12], rel=1e-3)
    assert 1e9 < calibrate._update_bandwidth("cpu", 1 << 20) < 1e13


def test_a_calibration_that_cannot_be_written_is_not_measured_first(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.planner.calibrate.measure", lambda log: pytest.fail("it was measured"))
    with pytest.raises(StorageError, match="cannot write --calibrate"):
        plan.main(["--calibrate", str(tmp_path / "nowhere" / "x.json")])


@pytest.mark.parametrize(
    "tp, pp, more",
    [
        (1, 1, ""),
        (2, 2, "--sequence-parallel"),
        (1, 4, "--pipeline-schedule zb-v"),
        (2, 2, "--num-virtual-stages-per-pipeline-rank 2 --sharding-stage 2"),
        (1, 2, "--recompute-granularity full --no-recompute-layers 0,2"),
    ],
)
def test_a_layout_is_what_its_flags_say(tp, pp, more):
    line = [*TINY, "--num-layers", "8", "--tp", str(tp), "--pp", str(pp), "--global-batch-size", "8", *more.split()]
    layout = Layout.of(resolve(parse_pretrain(line), 8), 8)
    again = Layout.of(
        resolve(parse_pretrain([*TINY, "--num-layers", "8", "--global-batch-size", "8", *layout.flags()]), 8), 8
    )
    assert (again.short(), again.recompute, again.stage_layers) == (
        layout.short(),
        layout.recompute,
        layout.stage_layers,
    )


def test_dry_run_tells_everything(capsys, tmp_path):
    pretrain_gpt.main(
        [
            *TINY,
            "--dry-run",
            "--world-size",
            "8",
            "--tp",
            "2",
            "--pp",
            "2",
            "--global-batch-size",
            "16",
            "--save",
            str(tmp_path),
            "--save-interval",
            "1",
        ]
    )
    told = capsys.readouterr().out
    for words in (
        "8 ranks on 1 node = pipeline 2 x data 2",
        "tp: 4 groups of 2",
        "embedding",
        "optimizer moments",
        "schedule 1f1b, 8 micro-batches",
        "rank  1 |",
        "all_reduce",
        "3 steps, 48 samples",
        "a checkpoint:",
        "expected:",
        "no problems found",
    ):
        assert words in told
    assert list(tmp_path.iterdir()) == []


def test_epochs_of_the_data_are_before_a_split_only_where_there_is_one(monkeypatch):
    monkeypatch.setattr(dry_run, "_tokens", lambda prefix: 10)
    job = SimpleNamespace(facts=SimpleNamespace(sample_tokens=1000))
    line = [*(word for word in TINY if word != "--mock-data"), "--global-batch-size", "4", "--train-iters", "5"]
    for flag, split in (("--data-path", ", before --split"), ("--train-data-path", "")):
        told = list(dry_run._data(parse_pretrain([*line, flag, "d"]), job, SimpleNamespace(dp=1)))
        assert told[-1].strip() == f"2,000.00 epochs of all of it{split}"


def test_dry_run_tells_of_tensor_parallelism_over_machines(capsys):
    line = [*TINY, "--dry-run", "--world-size", "8", "--tp", "4"]
    for size, told in (("2", True), ("4", False)):
        pretrain_gpt.main([*line, "--local-world-size", size])
        assert ("spans machines of 2 ranks" in capsys.readouterr().out) is told


def test_dry_run_tells_every_problem_at_once(capsys):
    with pytest.raises(SettingsError) as caught:
        pretrain_gpt.main(
            [
                *GPT_22B,
                "--dry-run",
                "--world-size",
                "12",
                "--tp",
                "4",
                "--global-batch-size",
                "13",
                "--device-name",
                "a100-40",
                "--wandb-exp-name",
                "x",
            ]
        )
    for words in (
        "not a multiple of --micro-batch-size",
        "there is no /mnt/data/enwiki_text_document.idx",
        "--vocab-file: there is no gpt2-vocab.json",
        "--wandb-project",
    ):
        assert words in str(caught.value)
    with pytest.raises(SettingsError, match=r"out of memory by [\d.]+ [GM]B on pipeline rank 0"):
        pretrain_gpt.main([*TINY, "--dry-run", "--world-size", "1", "--device-memory-gb", "0.001"])
    assert "memory of a rank" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="is not a multiple of 4, as --cp 2"):
        pretrain_gpt.main([*TINY, "--dry-run", "--world-size", "2", "--cp", "2", "--seq-length", "30"])


def test_a_dry_run_of_175b_needs_neither_torch_nor_time(tmp_path, root):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    words = f"""{root}/pretrain_gpt.py --dry-run --world-size 128 --num-layers 96 --hidden-size 12288 --seq-length 2048
        --num-attention-heads 96 --tp 8 --pp 16 --sequence-parallel --recompute-granularity selective --bf16 --mock-data
        --vocab-size 51200 --micro-batch-size 1 --global-batch-size 1536 --train-iters 10 --lr 1e-4""".split()
    import os

    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | dict(PYTHONPATH=f"{tmp_path}:{root}"),
    )
    assert done.returncode == 0, done.stderr
    assert "174.6 B" in done.stdout and "16 x data 1" in done.stdout


def test_auto_parallel_trains(capfd, run_ranks):
    def body(rank):
        pretrain_gpt.main(
            [
                *TINY,
                "--auto-parallel",
                "--max-global-batch-size",
                "8",
                "--tune-steps",
                "1",
                "--local-world-size",
                "2",
                "--world-size",
                "2",
                "--log-interval",
                "1",
            ]
        )
        return True

    assert run_ranks(2, body, timeout=250) == [True, True]
    told = capfd.readouterr().out
    for words in ("--auto-parallel:", "measuring the best 3", "chosen on 2 ranks:", "iteration        3/       3"):
        assert words in told


@pytest.mark.sampled(10)
def test_the_commands_of_the_guide_run(root, tmp_path, monkeypatch, capsys):
    text = (root / "docs" / "planning.md").read_text(encoding="utf-8")
    lines = "".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ").splitlines()
    assert len(lines) >= 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron.planner.target.installed_gpu", lambda: None)  # as on the laptop of the guide
    for words in map(shlex.split, lines):
        if "--calibrate" in words:
            calibration = dict(device=vars(cpu()) | dict(assumed=False))
            (tmp_path / "this_machine.json").write_text(json.dumps(calibration))
        elif words[1:3] == ["-m", "megatron.tools.plan"] and "1024" not in words:
            plan.main(words[3:])
        elif "--dry-run" in words:
            pretrain_gpt.main(words[2:])
    told = capsys.readouterr().out
    assert "22.1 B" in told and " 39 " in told and "174.6 B" in told and "measured: this_machine.json" in told
    blocks = [
        block for block in text.split("```")[1::2] if block.startswith("\n") and not re.search("PASS|shrunk", block)
    ]
    shown = [line for block in blocks for line in block.splitlines()]
    shown = [line for line in shown if not re.search(r"\.\.\.|searched in", line)]  # cut, or a time
    told = [" ".join(line.split()) for line in told.splitlines()]
    assert len(shown) > 20 and not [line for line in shown if " ".join(line.split()) not in told]


@pytest.mark.parametrize(
    "more", ["--micro-batch-size 1 --global-batch-size 16", "--auto-parallel --max-global-batch-size 16"]
)
@pytest.mark.parametrize("length", ["", "--save here --save-interval 5"])
def test_a_dry_run_without_the_length_of_training_says_so(more, length, capsys, monkeypatch, tmp_path):
    """The rest of the report is there, and the end is the one problem."""
    monkeypatch.chdir(tmp_path)
    line = (
        f"--dry-run {more} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --mock-data {length}"
    )
    with pytest.raises(SettingsError, match="^the length of training is missing; .*--train-samples N"):
        pretrain_gpt.main(f"{line} --vocab-size 512 --lr 1e-3 --device cpu --world-size 2".split())
    told = capsys.readouterr().out
    assert told.startswith("dry run: 1 problem, listed at the end") and "data: for a training of unknown length" in told
    assert "a checkpoint: " in told and "expected: " in told
