# SPDX-License-Identifier: Apache-2.0
"""plan, --dry-run, doctor and status: the answer comes first, lines fit 80 columns, and a time says what it rests on."""

import json
import re

import pytest

import pretrain_gpt
from megatron.errors import DataError, SettingsError
from megatron.planner.device import cpu
from megatron.tools import doctor, plan, status

pytestmark = pytest.mark.sampled(5)

TINY = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --train-iters 3 --device-name A100-40GB --bf16"""
LARGE = """--model-name-or-path 175B --vocab-size 51200 --mock-data --bf16 --train-iters 1000 --lr 1e-4
    --device-name H100 --world-size 128 --tp 8 --pp 16 --global-batch-size 1536"""
MIDDLE = """--model-name-or-path 1.3B --vocab-size 50304 --mock-data --bf16 --train-iters 10 --lr 1e-4
    --device-name A100-40GB --world-size 8 --global-batch-size 512"""
PLANS = {
    f"{TINY.replace('--bf16', '')} --world-size 4 --global-batch-size 8": "the best of",
    f"{TINY} --world-size 16 --max-global-batch-size 32 --tokens 3e11 --top 20": "the best of",
    f"{MIDDLE} --tp 2 --rejected 20 --device-memory-gb 14": "the best of",
    f"{MIDDLE} --device-memory-gb 2 --tp 2 --pp 2": "nothing fits: ",
    "--params 100e9 --device-memory-gb 31 --world-size 64 --tokens 1e12": "100.0 B parameters: 59 devices of 31 GB hold",
    "--params 3e12 --device-memory-gb 16 --min-world-size": "fewest devices of 16 GB",
}
RUNS = {
    f"{LARGE} --num-virtual-stages-per-pipeline-rank 6 --sequence-parallel --recompute-activations": "no problems found",
    f"{LARGE} --micro-batch-size 4": "1 problem, listed",
    f"{LARGE} --save {chr(121) * 100} --save-interval 10 --data-path {chr(120) * 100}": "2 problems, listed at the end",
    f"{MIDDLE} --micro-batch-size auto --recompute-activations --use-distributed-optimizer": "no problems found",
    f"{MIDDLE} --pp 4 --pipeline-schedule zb-v --sharding-stage 1 --nvme-offload-fraction 0.5 --nvme-offload-dir /x": None,
    f"{TINY} --world-size 4 --auto-parallel --max-global-batch-size 8": "no problems found",
    f"{TINY} --world-size 1 --global-batch-size 8": "no problems found",
}
FIGURE = re.compile(r"\d (ms|s|min|h|days|tokens/s|TFLOP/s|device hours)(?!\w)| tokens a day|times as fast")
OWN = re.compile(r"layouts searched in|do not fit; in|^ *speeds\)")  # how long the search itself took


def told_by(main, line: str, capsys) -> list[str]:
    try:
        main(line.split())
    except (SettingsError, DataError):
        pass
    return capsys.readouterr().out.splitlines()


def too_wide(lines: list[str]) -> list[str]:
    """A word of a command stays whole, however long it is."""
    return [line for line in lines if len(line) > 80 and len(line.strip(" \\").split()) > 1]


def without_their_basis(lines: list[str], basis: str) -> list[str]:
    return [line for line in lines if FIGURE.search(line) and not OWN.search(line) and basis not in line]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", PLANS)
def test_plan(line, capsys):
    lines = told_by(plan.main, line, capsys)
    assert lines[0].startswith(PLANS[line])
    assert too_wide(lines) == [] and without_their_basis(lines, "assumed") == []


@pytest.mark.sampled(10)
@pytest.mark.parametrize("line", RUNS)
def test_dry_run(line, capsys):
    lines = told_by(pretrain_gpt.main, f"{line} --dry-run", capsys)
    assert lines[0].startswith(f"dry run: {RUNS[line] or ''}")
    assert too_wide(lines) == [] and without_their_basis(lines, "assumed") == []
    assert any(FIGURE.search(text) for text in lines)


def test_wide_cuts_nothing(capsys):
    line = f"{MIDDLE} --tp 2 --device-memory-gb 14 --rejected 20"
    narrow, wide = (told_by(plan.main, f"{line}{more}", capsys) for more in ("", " --wide"))
    heads = [next(text for text in lines if text.split()[:2] == ["layout", "micro"]) for lines in (narrow, wide)]
    assert too_wide(wide) and "TFLOP/s" in heads[1] and "TFLOP/s" not in heads[0]
    assert [text for text in wide if text.endswith("...")] == []
    lines = told_by(pretrain_gpt.main, f"{LARGE} --dry-run --wide", capsys)
    assert any("hidden_size=12288" in text and "model_name_or_path=175B" in text for text in lines)


def test_measured_speeds_are_said_to_be_measured(tmp_path, capsys):
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(dict(device=vars(cpu()) | dict(assumed=False))))
    line = TINY.replace("--device-name A100-40GB --bf16", f"--calibration {file} --world-size 2 --global-batch-size 8")
    for main, more in ((plan.main, ""), (pretrain_gpt.main, " --dry-run")):
        lines = told_by(main, line + more, capsys)
        assert without_their_basis(lines, "measured") == [] and "assumed" not in "".join(lines)


def test_the_script_that_a_plan_writes(tmp_path, capsys):
    path = tmp_path / "train.sh"
    lines = told_by(plan.main, f"{TINY} --world-size 16 --global-batch-size 32 --emit {path}", capsys)
    assert f"written: {path}" in lines
    text = path.read_text().splitlines()
    assert without_their_basis(text, "assumed") == [] and any(FIGURE.search(line) for line in text)


def test_doctor(capsys, monkeypatch):
    message = f"[enforce fail at /a/{'b/' * 60}device.cc:84] ifa != nullptr. Unable to find address for: nowhere0"
    for gloo, verdict in ((message, "doctor: 1 problem"), ("", "doctor: no problems")):
        monkeypatch.setattr(doctor, "_collective", lambda *kind, m=gloo: f"FAILS: {m}" if m else "a rank sums")
        lines = told_by(doctor.main, "", capsys)
        assert lines[0].startswith(verdict) and [line for line in lines if len(line) > 80] == []
        assert message not in "\n".join(lines)
        assert ("Unable to find address for: nowhere0" in lines[1]) == bool(gloo)
        assert (message in "\n".join(told_by(doctor.main, "--wide", capsys))) == bool(gloo)


def test_doctor_of_a_gpu_that_computes_wrong(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_gpus", lambda: ["NVIDIA X, 80.00 GB; COMPUTES WRONG, 79.00 GB free"])
    lines = told_by(doctor.main, "", capsys)
    assert lines[:2] == ["doctor: 1 problem", f"  1. GPU 0: {doctor._gpus()[0]}"]


def test_status(tmp_path, capsys):
    config = dict(model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=2048))
    config |= dict(guard=dict(heartbeat_dir=None), batch=dict(train_iters=500_000, global_batch_size=1024))
    for number, name in enumerate(("a", "a-name-that-is-long/and-a-folder-in-it-too", "b")):
        folder = tmp_path / name
        (folder / "iter_0120000").mkdir(parents=True)
        (folder / "iter_0120000" / "index.json").touch()
        records = [dict(kind="run", iteration=0, config=config, mesh=dict(replicate=1, shard=8))] * (1 + number)
        step = dict(kind="step", batch_size=1024, seconds=2.5, **{"lm loss": 2.5})
        records += [step | dict(iteration=n) for n in range(120_000, 120_060)]
        records += [dict(kind="end", iteration=120_060, code=6, why="no space left on device " * 20)] * (number == 1)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    names = [str(path.parent) for path in sorted(tmp_path.rglob("metrics.jsonl"))]
    for line in (names[0], " ".join(names), f"{' '.join(names)} {tmp_path / 'nowhere'}"):
        lines = told_by(status.main, line, capsys)
        assert re.match(r"\d runs?: ", lines[0]) and [text for text in lines if len(text) > 80] == []
    assert lines[0] == "4 runs: 1 failed, 1 unreadable, 2 running"
