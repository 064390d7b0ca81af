# SPDX-License-Identifier: Apache-2.0
"""What a run says once and in words, against the figures of its steps."""

import importlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.telemetry import progress
from megatron.telemetry.events import read_events
from megatron.training import start_log

VOCABULARY = 64
FLAGS = (
    f"--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size {VOCABULARY} "
    "--micro-batch-size 2 --global-batch-size 4 --device cpu --num-workers 0 --eval-iters 0 --hidden-dropout 0 --lr 1e-3"
)
RATE, GUESS = "note: the learning rate is 0", "warning: the lm loss of each of the last 10 steps was above"


def train(folder, flags, capsys):
    """(lines of the log, steps, records of notes) of all starts of a folder; the lines are those of the last one."""
    capsys.readouterr()
    pretrain_gpt.main(f"{FLAGS} --save {folder} --load {folder} {flags}".split())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kinds = {kind: [one for one in records if one["kind"] == kind] for kind in ("step", "note")}
    return capsys.readouterr().out.splitlines(), kinds["step"], kinds["note"]


def told(lines, words):
    return [line for line in lines if line.startswith(words)]


@pytest.mark.parametrize(
    "flags, first",
    [
        ("--lr-decay-iters 3", 4),
        ("--lr-decay-iters 3 --lr-decay-style cosine --lr-warmup-iters 1", 4),
        ("--lr-decay-iters 3 --min-lr 1e-5", None),
        ("--lr-decay-iters 3 --decoupled-lr 1e-3 --decoupled-min-lr 1e-5", None),
        ("--lr-warmup-fraction 0.1", None),  # the first step's rate is 0, that of no other
        ("", None),
    ],
)
def test_a_rate_of_0_for_the_rest_of_a_run(flags, first, tmp_path, capsys):
    lines, steps, notes = train(tmp_path, f"--train-iters 6 {flags}", capsys)
    if first is None:
        assert not told(lines, RATE) and not notes
        return
    rates = [step["learning_rate"] for step in steps]
    assert rates[first - 2] > 0 and rates[first - 1 :] == [0.0] * (7 - first)  # what is said is so
    [line] = told(lines, RATE)
    assert (
        f"from iteration {first} to the last one, 6" in line
        and "after 3 steps (--lr-decay-iters) at --min-lr 0" in line
    )
    assert [(note["iteration"], note["what"]) for note in notes] == [(first, "no learning rate")]


def test_a_run_that_goes_on_past_its_decay(tmp_path, capsys):
    train(tmp_path, "--train-iters 3", capsys)
    lines, _, notes = train(tmp_path, "--train-iters 6 --lr-decay-iters 3", capsys)
    assert len(told(lines, RATE)) == 1 and [note["iteration"] for note in notes] == [4, 6]


WARMUP = "at learning rate 0 (warm-up of {} steps begins at --lr-warmup-init 0"


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--train-iters 1 --lr-warmup-fraction 0.1", f"the only one was {WARMUP.format(0.1)}"),
        ("--train-samples 4 --lr-warmup-samples 1", "at learning rate 0 (warm-up of 1 samples"),
        ("--train-iters 2 --lr-warmup-iters 1", None),
        ("--train-iters 3 --fp16 --initial-loss-scale 1e30 --hysteresis 1", "all 3 were skipped (gradients overflow"),
        ("--train-iters 3 --fp16 --initial-loss-scale 8 --hysteresis 1", None),
        ("--train-iters 2 --iterations-to-skip 1 2", "all 2 were skipped"),
        ("--train-iters 2 --iterations-to-skip 2 --lr-warmup-iters 1", f"1 was {WARMUP.format(1)}"),
    ],
)
def test_a_run_that_changes_no_weight(flags, said, tmp_path, capsys):
    lines, steps, notes = train(tmp_path / "a", f"{flags} --log-params-norm --log-interval 1", capsys)
    found = told(lines, "warning: no step of this launch changed a weight: ")
    norms = {step["params_norm"] for step in steps if "params_norm" in step}
    assert (len(norms) > 1 and not found) if said is None else len(norms) < 2 and len(found) == 1 and said in found[0]
    if said:
        assert [note["what"] for note in notes] == ["unchanged weights"] and not told(lines, RATE)


@pytest.mark.parametrize("module, warned", [("own_update", 0), ("own_mixture", 0), ("own_pair", 1)])
def test_a_variant_warns_of_random_weights_if_it_starts_from_others(module, warned):
    recipe = importlib.import_module(f"tests.models.{module}").recipe()
    nothing = dict(batch=SimpleNamespace(skip_train=False), checkpoint=SimpleNamespace(load=None))
    notes, warnings = start_log.random_weights(SimpleNamespace(given=lambda name: None, **nothing), recipe)
    assert not notes and len(warnings) == warned


def test_a_shape_of_a_published_name_has_random_weights(tmp_path, capsys):
    """Trainer's users mean its weights by --model-name-or-path, and not by --preset."""
    what = "gpt2 is a shape, and its weights are random; published ones: python -m megatron.tools.checkpoint from-hf"
    flags = dict(a="--model-name-or-path gpt2", b="--model_name_or_path gpt2", c="--preset gpt2")
    for folder, named in flags.items():
        lines, *_ = train(tmp_path / folder, f"{named} --train-iters 1", capsys)
        assert len([line for line in lines if line.startswith("note: ") and what in line]) == (folder != "c")
    lines, *_ = train(tmp_path / "a", f"{flags['a']} --train-iters 2", capsys)
    assert not any(what in line for line in lines)  # it goes on from a checkpoint


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "flags, said",
    [
        ("--train-iters 14 --lr 5 --clip-grad 0", 10),
        ("--train-iters 14 --lr 5 --clip-grad 0 --lr-warmup-iters 6 --lr-decay-iters 99", None),  # 8 steps behind it
        ("--train-iters 24 --lr 1e-2", None),
    ],
)
def test_a_loss_above_that_of_a_guess(flags, said, tmp_path, capsys):
    lines, steps, notes = train(tmp_path, flags, capsys)
    above = [step["lm loss"] > math.log(VOCABULARY + 1) for step in steps]  # and the end of a document
    events = [event for event in read_events(tmp_path) if event["event"] not in ("start", "save", "end")]
    assert len(told(lines, GUESS)) == len(events) == (said is not None) and not notes
    if said:
        assert all(above[said - 10 : said]) and "above 4.174, which is ln(65)" in told(lines, GUESS)[0]
        assert events[0]["iteration"] == said and events[0]["event"] == "loss_above_guess"


@pytest.mark.parametrize(
    "nodes, quota, words",
    [
        ([("a", {0, 1})] * 3, None, "3 ranks of a node share 2 cores"),
        ([("a", {0, 1})] * 2 + [("b", {0, 1})] * 2, None, None),
        ([("a", {0}), ("a", {1}), ("a", {2})], None, None),  # each is bound to a core of its own
        ([("a", {0, 1, 2, 3})] * 2, 1.5, "2 ranks of a node share 1.5 cores"),
    ],
)
def test_more_ranks_than_cores(nodes, quota, words, monkeypatch):
    monkeypatch.setattr(start_log, "quota", lambda: quota)
    found = start_log.crowded(SimpleNamespace(device=torch.device("cpu"), all_gather_object=lambda own: nodes))
    assert len(found) == (words is not None) and all(words in line for line in found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("schedule", ["", "--pipeline-schedule gpipe"])
def test_a_long_first_step_and_a_long_evaluation_say_how_far_they_are(schedule, tmp_path, capsys, monkeypatch):
    """By a clock that makes each pass, and each batch of an evaluation, take 7 seconds."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now.append(now[-1] + 7) or now[-1]))
    flags = f"--train-iters 2 --global-batch-size 32 --eval-iters 9 --split 90,10,0 {schedule}"
    lines, *_ = train(tmp_path, flags, capsys)
    shown = [line for line in lines if "micro-batch " in line and " after 0:" in line]
    assert shown and all(line.startswith(" > step 1: micro-batch ") for line in shown)  # 16 micro-batches of 2 passes
    numbers = [int(line.split("micro-batch ")[1].split()[0]) for line in shown]
    assert numbers == sorted(numbers) and 1 <= numbers[0] < numbers[-1] <= 16 and len(shown) == 5
    assert all(line.split("micro-batch ")[1].split()[2] == "16" for line in shown)
    validated = [line for line in lines if line.startswith(" > validation: batch ")]
    assert [line.split()[3] for line in validated] == ["2", "4", "8"]
    assert "of 9 after 0:00:14, of about 0:02:06" in validated[0]
