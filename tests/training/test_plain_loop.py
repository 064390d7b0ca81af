# SPDX-License-Identifier: Apache-2.0
"""Whole runs against `plain_loop.py`, which trains the same network on the same samples in plain PyTorch.

What each step logs, every evaluation, the final weights and Adam's moments are compared. Layouts are compared with each
other elsewhere; what is wrong in the same way in all of them shows here.
"""

import itertools
import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.optimizer.lr_schedule import Lengths, learning_rate, weight_decay
from megatron.settings.schema import Batch, Optimizer
from tests.ranks import on_ranks, trains
from tests.training.plain_loop import HEADS, HIDDEN, LAYERS, LENGTH, Job, Outcome, Scale, decay_of, rate_of, train

FLAGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --num-attention-heads {HEADS} --seq-length {LENGTH} --mock-data "
    "--vocab-size 100 --micro-batch-size 2 --device cpu --num-workers 0 --hidden-dropout 0 --attention-dropout 0 "
    "--peak-tflops 1"
)
SIZE = "--global-batch-size 8"
SIX = f"{SIZE} --train-iters 6 --eval-iters 0"
ADAM = "--lr 1e-2 --lr-decay-style constant --adam-eps 1e-4"  # a larger epsilon: rounding does not become a step
PLAIN = dict(
    batches=[8] * 6, rate=rate_of("constant", 1e-2, end=1), decay=decay_of("constant", 0, 0.01, total=1), eps=1e-4
)
HALF = ADAM.replace("1e-4", "1e-3")
PLAIN_HALF = PLAIN | dict(eps=1e-3)


pretrain = trains(pretrain_gpt, FLAGS)


def run(world: int, flags: str, folder: Path, stops: Sequence[int] = ()) -> None:
    """Train on so many data-parallel ranks (one is this process), stopping at `stops` and going on in a new job."""
    turns = [f"--exit-interval {stop}" for stop in stops] + [""]
    for number, turn in enumerate(turns):
        load = f"--load {folder}" if number else ""
        line = f"{flags} --save {folder} {load} {turn}"
        on_ranks(world, pretrain, line)


def records(folder: Path, kind: str) -> list[dict]:
    """The records of one kind in metrics.jsonl."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def compare(folder: Path, expected: Outcome, *, rel: float = 2e-6, step: float = 1e-5) -> None:
    """Every step, every evaluation, and the checkpoint behind the last step.

    rel: for losses; ten times as much for norms, a hundred times for Adam's moments; step: for weights, absolute.
    """
    steps, evals = records(folder, "step"), records(folder, "eval")
    assert len(steps) == len(expected.steps) > 0 and len(evals) == len(expected.evals)
    for found, wanted in [*zip(steps, expected.steps, strict=True), *zip(evals, expected.evals, strict=True)]:
        within = {
            "lm loss": rel,
            "grad_norm": 10 * rel,
            "learning_rate": 1e-12,
            "kd loss": 5 * rel,
            "kd hidden loss": 5 * rel,
        }
        near = {
            name: pytest.approx(value, rel=within[name]) if name in within and value is not None else value
            for name, value in wanted.items()
        }
        assert {name: found.get(name) for name in wanted} == near
        assert "lm loss" in wanted or "lm loss" not in found
    with Reader(folder / f"iter_{len(steps):07d}") as reader:
        tensors, record = {name: reader.read(name) for name in reader.tensors}, reader.state
    assert set(tensors) == set(expected.tensors)
    for name, wanted in expected.tensors.items():
        bound = 100 * rel * wanted.abs().max().item() if name.startswith("optimizer.") else step
        difference = (tensors[name].double() - wanted).abs().max().item()
        assert difference <= bound, f"{name} is off by {difference}"
    state = record["state"]
    assert record["optimizer_steps"] == expected.updates
    assert (state["iteration"], state["consumed_samples"]) == (len(steps), expected.steps[-1]["consumed_samples"])
    assert (state["scheduled_samples"], state["consumed_valid_samples"]) == (expected.trained, expected.consumed_valid)
    assert state["skipped_iterations"] == sum(step["skipped"] for step in expected.steps)


RAMP = "--train-samples 60 --global-batch-size 12 --rampup-batch-size 4 4 24"
RAMPED = [4, 4, 4, 8, 8, 12, 12]  # 12 samples an increment, which the step that begins at 24 or later is past
CASES = {
    "everything but the defaults": (
        f"{SIZE} --train-iters 8 --eval-iters 0 --lr 2e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2 "
        "--lr-decay-iters 7 --lr-warmup-init 5e-3 --weight-decay-incr-style linear --start-weight-decay 0.1 "
        "--end-weight-decay 0.9 --adam-beta1 0.7 --adam-beta2 0.8 --adam-eps 1e-3 --clip-grad 0.3 --seed 77",
        dict(
            batches=[8] * 8,
            rate=rate_of("cosine", 2e-2, 1e-3, warmup=16, end=56, start=5e-3),
            decay=decay_of("linear", 0.1, 0.9, total=64),
            betas=(0.7, 0.8),
            eps=1e-3,
            clip=0.3,
            seed=77,
        ),
    ),
    "the defaults": (f"{SIX} --lr 1e-2 --adam-eps 1e-4", PLAIN | dict(rate=rate_of("linear", 1e-2, end=48))),
    "no clipping, one micro-batch a rank": (
        f"--train-iters 6 --eval-iters 0 {ADAM} --clip-grad 0 --weight-decay 0.3",
        PLAIN | dict(clip=0, decay=decay_of("constant", 0, 0.3, total=1)),
    ),
    "tokens that do not count": (
        f"{SIX} {ADAM} --eod-mask-loss --calculate-per-token-loss",
        PLAIN | dict(mask_eod=True),
    ),
    "a mean of means over tokens that do not count": (
        f"{SIX} {ADAM} --eod-mask-loss --loss-averaging micro-batch",
        PLAIN | dict(mask_eod=True, mean_of_means=True),
    ),
    "documents apart": (
        f"{SIX} {ADAM} --reset-position-ids --reset-attention-mask",
        PLAIN | dict(restart_positions=True, cut_attention=True),
    ),
    "batches that grow": (
        f"{RAMP} --eval-interval 3 --eval-iters 2 --eod-mask-loss --lr 2e-2 --min-lr 1e-3 --adam-eps 1e-4 "
        "--lr-warmup-samples 6 --lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 26 "
        "--lr-decay-samples 42 --weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.9",
        dict(
            batches=RAMPED,
            rate=rate_of("WSD minus_sqrt", 2e-2, 1e-3, warmup=6, end=42, anneal=26),
            decay=decay_of("cosine", 0.1, 0.9, total=60),
            eps=1e-4,
            mask_eod=True,
            eval_interval=3,
            eval_iters=2,
            eval_size=12,
        ),
    ),
    "label smoothing, which no evaluation knows": (
        f"{SIZE} --train-iters 6 {ADAM} --label-smoothing 0.2 --eval-interval 2 --eval-iters 3",
        PLAIN | dict(smoothing=0.2, eval_interval=2, eval_iters=3),
    ),
    "shuffled samples": (f"{SIX} {ADAM} --dataloader-type cyclic", PLAIN | dict(cyclic=48)),
    "steps that are left out, which batches grow past": (
        f"{RAMP} --eval-iters 0 --iterations-to-skip 2 5 --lr 1e-2 --lr-warmup-samples 8 --adam-eps 1e-4 "
        "--weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.9",
        dict(
            batches=RAMPED,
            rate=rate_of("linear", 1e-2, warmup=8, end=60),
            decay=decay_of("linear", 0.1, 0.9, total=60),
            eps=1e-4,
            left_out=[2, 5],
        ),
    ),
    "bf16": (f"{SIX} {HALF} --bf16", PLAIN_HALF | dict(weights_in=torch.bfloat16)),
    "fp16, constant scale": (
        f"{SIX} {HALF} --fp16 --loss-scale 4096 --clip-grad 0.05",
        PLAIN_HALF | dict(weights_in=torch.float16, scale=Scale(4096.0), clip=0.05),
    ),
    "fp16, constant scale that is too large": (
        f"{SIX} {HALF} --fp16 --loss-scale {2**19} --on-nan skip",
        PLAIN_HALF | dict(weights_in=torch.float16, scale=Scale(2.0**19)),
    ),
    "fp16, growing scale": (
        f"{SIX} --train-iters 12 --lr 1e-2 --adam-eps 1e-3 --clip-grad 0.05 --fp16 --initial-loss-scale {2**21} "
        "--loss-scale-window 2 --weight-decay-incr-style linear --start-weight-decay 0.1 --end-weight-decay 0.9",
        PLAIN_HALF
        | dict(
            batches=[8] * 12,
            rate=rate_of("linear", 1e-2, end=96),
            decay=decay_of("linear", 0.1, 0.9, total=96),
            clip=0.05,
            weights_in=torch.float16,
            scale=Scale(2.0**21, window=2),
        ),
    ),
    "fp16, a scale that may fall no further": (
        f"{SIX} {HALF} --fp16 --initial-loss-scale {2**23} --hysteresis 1 --min-loss-scale {2**21}",
        PLAIN_HALF | dict(weights_in=torch.float16, scale=Scale(2.0**23, window=1000, hysteresis=1, least=2.0**21)),
    ),
    "fp16, a mean of means, less patience, steps that are left out": (
        f"{SIX} --train-iters 14 {HALF} --clip-grad 0.05 --eod-mask-loss --loss-averaging micro-batch --fp16 "
        f"--initial-loss-scale {2**20} --loss-scale-window 3 --hysteresis 1 --min-loss-scale {2**18} "
        "--iterations-to-skip 2 7",
        PLAIN_HALF
        | dict(
            batches=[8] * 14,
            clip=0.05,
            mask_eod=True,
            mean_of_means=True,
            weights_in=torch.float16,
            scale=Scale(2.0**20, window=3, hysteresis=1, least=2.0**18),
            left_out=[2, 7],
        ),
    ),
}
LOOSE = {"bf16": dict(rel=1e-3, step=1e-2), "fp16": dict(rel=1e-4, step=1e-3)}


@cache
def expected(case: str) -> Outcome:
    return train(Job(**CASES[case][1]))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("world, stops", [(1, []), (2, []), (1, [3, 4])], ids=["one rank", "two ranks", "two resumes"])
@pytest.mark.parametrize("case", CASES)
def test_a_run_equals_the_plain_loop(case, world, stops, tmp_path):
    flags = CASES[case][0]
    if "one micro-batch" in case:
        flags += f" --micro-batch-size {8 // world}"
    run(world, flags, tmp_path, stops)
    compare(tmp_path, expected(case), **LOOSE.get(case[:4], {}))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way, ranks", [("p2p", 3), ("allgather", 2), ("a2a", 3)])
@pytest.mark.parametrize("case", ["everything but the defaults", "tokens that do not count", "documents apart"])
def test_ranks_that_share_sequences_equal_the_plain_loop(case, way, ranks, tmp_path):
    run(ranks, f"{CASES[case][0]} --context-parallel-size {ranks} --cp-comm-type {way}", tmp_path)
    compare(tmp_path, expected(case))


STYLES = {
    "constant": "--lr-warmup-iters 2",
    "linear": "--lr-warmup-fraction 0.4 --lr-decay-iters 5",
    "linear-from-start": "--lr-warmup-fraction 0.4 --lr-decay-iters 5",
    "cosine": "--lr-warmup-iters 2 --lr-decay-iters 5",
    "inverse-square-root": "--lr-warmup-iters 2 --lr-decay-iters 5",
    "WSD exponential": "--lr-warmup-samples 16 --lr-decay-samples 40 --lr-wsd-decay-samples 17",
    "WSD linear": "--lr-warmup-iters 2 --lr-decay-iters 5 --lr-wsd-decay-iters 2",
    "WSD cosine": "--lr-warmup-fraction 0.4 --lr-decay-samples 40 --lr-wsd-decay-samples 17",
    "WSD minus_sqrt": "--lr-warmup-samples 16 --lr-decay-samples 40 --lr-wsd-decay-samples 17",
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("style", STYLES)
def test_every_curve_of_the_learning_rate_in_a_run(style, tmp_path):
    name, _, anneal = style.partition(" ")
    in_samples = "samples" in STYLES[style]
    length = "--train-samples 55" if in_samples else "--train-iters 6"  # a seventh batch is not full
    pretrain(
        0,
        f"{SIZE} --eval-iters 0 {length} --lr 1e-2 --min-lr 1e-3 --adam-eps 1e-4 --lr-decay-style {name} {STYLES[style]} "
        + (f"--lr-wsd-decay-style {anneal} " if anneal else "")
        + f"--save {tmp_path}",
    )
    last = 16 if not anneal else 17 if in_samples else 16
    compare(tmp_path, train(Job(**PLAIN | dict(rate=rate_of(style, 1e-2, 1e-3, warmup=16, end=40, anneal=last)))))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("style", STYLES)
def test_curves_of_the_learning_rate_at_every_sample(style):
    """Warm-ups, decay lengths and annealing of all kinds, in iterations, samples and as a share."""
    name, _, anneal = style.partition(" ")
    by_iters, by_samples = Batch(global_batch_size=4, train_iters=15), Batch(global_batch_size=4, train_samples=60)
    lengths = itertools.product((0, 1, 5), (None, 7, 15, 30), (1, 2), ((1.0, 0.0, 0.0), (0.3, 0.1, 0.02)))
    for warmup, end, last, (highest, lowest, start) in lengths:
        common = dict(lr=highest, min_lr=lowest, lr_warmup_init=start, lr_decay_style=name)
        if anneal:
            common |= dict(lr_wsd_decay_style=anneal, lr_wsd_decay_iters=last, lr_wsd_decay_samples=4 * last)
        decay = end or 15
        expected = rate_of(style, highest, lowest, warmup=4 * warmup, end=4 * decay, start=start, anneal=4 * last)
        in_iters = Optimizer(lr_warmup_iters=warmup, lr_decay_iters=end, **common)
        in_samples = Optimizer(lr_warmup_samples=4 * warmup, lr_decay_samples=end and 4 * end, **common)
        as_share = Optimizer(lr_warmup_fraction=warmup / decay, lr_decay_iters=end, **common)
        for settings, batch in ((in_iters, by_iters), (in_samples, by_samples), (as_share, by_iters)):
            found = [learning_rate(settings, Lengths.of(settings, batch), samples) for samples in range(130)]
            assert found == pytest.approx([expected(samples) for samples in range(130)], rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_curves_of_weight_decay_at_every_sample(style):
    for batch in (Batch(global_batch_size=4, train_iters=15), Batch(global_batch_size=4, train_samples=60)):
        for start, end in ((0.0, 0.1), (0.01, 0.3), (0.2, 0.2)):
            ends = (
                dict(weight_decay=end) if style == "constant" else dict(start_weight_decay=start, end_weight_decay=end)
            )
            settings = Optimizer(lr=1.0, weight_decay_incr_style=style, lr_decay_iters=3, **ends)
            found = [weight_decay(settings, Lengths.of(settings, batch), samples) for samples in range(70)]
            expected = decay_of(style, start, end, total=60)
            assert found == pytest.approx([expected(samples) for samples in range(70)], rel=1e-12, abs=1e-15)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "world, words",
    [
        (1, "--train-iters 6 --gradient-accumulation-steps 4"),
        (2, "--train-iters 6 --gradient-accumulation-steps 2"),
        (2, "--train-iters 6 --local-batch-size 4"),
        (1, "--train-samples 48 --global-batch-size 8"),
        (2, "--train-samples 48 --micro-batch-size 4"),
    ],
)
def test_other_words_for_the_size_of_a_batch_and_the_length_of_a_run(world, words, tmp_path):
    run(world, f"{words} --lr 1e-2 --adam-eps 1e-4 --eval-iters 0", tmp_path)
    compare(tmp_path, train(Job(**PLAIN | dict(rate=rate_of("linear", 1e-2, end=48)))))


def test_evaluation_drops_nothing_out_and_training_goes_on_to(tmp_path):
    """At a rate of almost 0 the weights stay: evaluations are those without dropout, and no training loss is."""
    flags = f"{SIZE} --train-iters 6 --eval-interval 2 --eval-iters 2 {ADAM} --lr 1e-12 --hidden-dropout 0.5"
    pretrain(0, f"{flags} --save {tmp_path}")
    expected = train(Job(**PLAIN | dict(rate=lambda samples: 1e-12, eval_interval=2, eval_iters=2)))
    evals = [record["lm loss"] for record in records(tmp_path, "eval")]
    assert evals == pytest.approx([record["lm loss"] for record in expected.evals], rel=2e-6)
    steps = records(tmp_path, "step")
    assert len(steps) == len(expected.steps)
    for found, wanted in zip(steps, expected.steps, strict=True):
        assert abs(found["lm loss"] - wanted["lm loss"]) > 1e-4


def test_finetuning_starts_anew_from_weights(tmp_path):
    pretrain(0, f"{SIX} {ADAM} --save {tmp_path / 'first'}")
    pretrain(0, f"{SIX} --lr 1e-2 --adam-eps 1e-4 --load {tmp_path / 'first'} --finetune --save {tmp_path / 'second'}")
    first = train(Job(**PLAIN))
    second = PLAIN | dict(rate=rate_of("linear", 1e-2, end=48), start=first.tensors)
    compare(tmp_path / "second", train(Job(**second)))


def test_without_the_optimizers_state_the_run_goes_on_and_adam_starts_anew(tmp_path):
    flags = f"{SIX} --lr 1e-2 --adam-eps 1e-4 --save {tmp_path}"
    pretrain(0, f"{flags} --exit-interval 4 --no-save-optim")
    pretrain(0, f"{flags} --load {tmp_path} --no-load-optim")
    job = PLAIN | dict(rate=rate_of("linear", 1e-2, end=48), forget_moments_after=4)
    compare(tmp_path, train(Job(**job)))


def test_steps_that_stand_out_are_skipped(tmp_path):
    """They are no overflows, so the loss scale stays; and they are not among those that later ones are measured against."""
    threshold = 1.5
    flags = f"--train-iters 44 --global-batch-size 2 --eval-iters 0 --fp16 --initial-loss-scale {2**15} --hysteresis 1"
    spikes = f"--on-spike skip --spike-window 32 --spike-threshold {threshold}"
    pretrain(0, f"{flags} --lr 1e-3 --adam-eps 1e-3 {spikes} --save {tmp_path}")
    changes = dict(batches=[2] * 44, rate=rate_of("linear", 1e-3, end=88), spike_threshold=threshold)
    half = dict(weights_in=torch.float16, scale=Scale(2.0**15, window=1000, hysteresis=1))
    expected = train(Job(**PLAIN_HALF | changes | half))
    trained = [step for step in expected.steps if not step["skipped"]]
    assert 1 < len(expected.steps) - len(trained) < 10
    compare(tmp_path, expected, **LOOSE["fp16"])
    with Reader(tmp_path / "iter_0000044") as reader:
        recent = reader.state["state"]["recent"]
    assert recent["losses"] == pytest.approx([step["lm loss"] for step in trained[-32:]], rel=1e-4)
    assert recent["norms"] == pytest.approx([step["grad_norm"] for step in trained[-32:]], rel=1e-3)


def test_console_lines_say_what_the_plain_loop_does(tmp_path, capsys):
    """Means of losses over the steps since the last line that were not skipped; the rest is the last step's."""
    flags, job = CASES["fp16, growing scale"]
    pretrain(0, f"{flags} --eval-interval 5 --eval-iters 2 --log-interval 3 --save {tmp_path}")
    expected = train(Job(**job | dict(eval_interval=5, eval_iters=2)))
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if "consumed samples:" in line]
    assert len(lines) == 4
    for line, steps in zip(lines, zip(*[iter(expected.steps)] * 3, strict=True), strict=True):
        fields = dict(part.strip().split(": ") for part in line.split(" | ")[1:] if ": " in part)
        last, trained = steps[-1], [step["lm loss"] for step in steps if not step["skipped"]]
        assert f"iteration {last['iteration']:8d}/{12:8d}" in line
        assert int(fields["consumed samples"]) == last["consumed_samples"] and int(fields["global batch size"]) == 8
        assert float(fields["learning rate"]) == pytest.approx(last["learning_rate"], rel=1e-6)
        assert float(fields["loss scale"]) == last["loss_scale"]
        assert int(fields["number of skipped iterations"]) == 3 - len(trained)
        assert ("lm loss" in fields) == bool(trained)
        if trained:
            assert float(fields["lm loss"]) == pytest.approx(sum(trained) / len(trained), rel=1e-4)
        if not last["skipped"]:
            assert float(fields["grad norm"]) == pytest.approx(last["grad_norm"], rel=1e-3, abs=1e-3)
    where = r"validation loss at iteration (\d+)(| on validation set| on test set)"
    evaluations = re.findall(where + r" \| lm loss value: (\S+) \| lm loss PPL: (\S+)", printed)
    ends = ["", "", " on validation set", " on test set"]
    assert [(int(at), where) for at, where, _, _ in evaluations] == list(zip((5, 10, 12, 12), ends, strict=True))
    for (_, _, loss, perplexity), wanted in zip(evaluations, expected.evals, strict=True):
        assert float(loss) == pytest.approx(wanted["lm loss"], rel=1e-4)
        assert float(perplexity) == pytest.approx(math.exp(wanted["lm loss"]), rel=1e-3)
