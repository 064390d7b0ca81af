# SPDX-License-Identifier: Apache-2.0
"""Runs whose length is a number of epochs: samples counted by hand, Colossal-AI's rates, means of what the file says."""

import re

import numpy as np
import pytest

import pretrain_gpt
from megatron.data import manifest
from megatron.data.indexed import write_index
from megatron.errors import SettingsError
from tests.training.plain_loop import EOD, LENGTH
from tests.training.test_plain_loop import FLAGS, records

TOKENS = 7 * LENGTH + 3  # of training: an epoch is 7 samples and a bit
STEPS = "--global-batch-size 2 --log-interval 100 --eval-iters 0 --split 100,0,0 --tokenizer-type NullTokenizer"


@pytest.fixture
def prefix(tmp_path):
    return token_file(tmp_path / "tokens", TOKENS)


def pretrain(flags):
    pretrain_gpt.main(f"{FLAGS.replace('--mock-data', '')} {STEPS} {flags}".split())


def token_file(path, count):
    tokens = np.random.default_rng(0).integers(0, EOD, count).astype(np.uint16)
    tokens.tofile(f"{path}.bin")
    write_index(f"{path}.idx", np.uint16, np.array([count], np.int32), np.array([0, 1]))
    manifest.write_manifest(str(path))
    return str(path)


def saved(folder):
    return sorted(int(path.name[5:]) for path in folder.glob("iter_*"))


@pytest.mark.parametrize(
    "flags, rest, samples",
    [
        ("--train-samples 7", 1, 7),  # three steps of two
        ("--train-samples 8", 0, 8),
        ("--train-samples 11 --global-batch-size 4 --micro-batch-size 2 --rampup-batch-size 2 2 4", 3, 11),  # 2 + 2 + 4
    ],
)
def test_samples_that_fill_no_batch_are_named(prefix, flags, rest, samples, capsys):
    pretrain(f"--data-path {prefix} --lr 1e-2 {flags}")
    told = capsys.readouterr()
    note = f"note: the last {rest} of {samples} samples fill no batch, and are left out"
    assert (note in told.out + told.err) == bool(rest) and ("fill no batch" in told.out + told.err) == bool(rest)


def test_a_run_of_epochs(prefix, tmp_path, capsys):
    """Five epochs of 7 samples and 3 tokens are 36 samples, as is written out here; two make a step."""
    samples = len(range(0, 5 * TOKENS - LENGTH, LENGTH))
    assert samples == 36
    save = tmp_path / "run"
    flags = f"--data-path {prefix} --lr 1e-2 --train-epochs 5 --save {save}"
    pretrain(f"{flags} --save-epoch 2 --log-epoch")
    steps = records(save, "step")
    assert [step["iteration"] for step in steps] == [*range(1, 19)]
    # Epoch k ends with the step that has its last sample: at 36 k / 5 samples.
    ends = [4, 8, 11, 15, 18]
    assert saved(save) == [ends[1], ends[3], ends[4]]  # every second one, and the end
    epochs = records(save, "epoch")
    assert [(one["epoch"], one["iteration"], one["steps"]) for one in epochs] == [
        (number, end, end - start) for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1)
    ]
    printed = capsys.readouterr().out
    assert [step["epoch"] for step in steps] == pytest.approx([step * 2 * 5 / 36 for step in range(1, 19)], abs=1e-6)
    assert re.search(r"iteration +18/ +18 \| consumed samples: +36 \| epoch: 5\.000 \| ", printed)
    lines = re.findall(r"\[Epoch (\d) / Train\]: lm loss = (\S+) \| Throughput = (\S+) sample/s", printed)
    for one, (number, loss, rate), start in zip(epochs, lines, [0, *ends], strict=False):
        own = [step["lm loss"] for step in steps[start : one["iteration"]]]
        assert int(number) == one["epoch"] and float(rate) > 0
        assert float(loss) == pytest.approx(np.mean(own), rel=1e-6) and one["lm loss"] == pytest.approx(np.mean(own))
    assert len(lines) == 5
    # And it is the run of so many samples.
    other = tmp_path / "other"
    pretrain(f"--data-path {prefix} --lr 1e-2 --train-samples 36 --save {other}")
    assert [step["lm loss"] for step in records(other, "step")] == [step["lm loss"] for step in steps]
    assert not any("epoch" in step for step in records(other, "step"))


def test_validation_behind_every_second_epoch(prefix, tmp_path):
    """Epochs of 36 samples over 5 end as above; the last step ends the fifth one, and the validation there is the run's."""
    words = STEPS.replace("--eval-iters 0 --split 100,0,0", "--eval-iters 1 --eval-same-samples --eval-interval 1000")
    flags = f"--train-data-path {prefix} --valid-data-path {prefix} --lr 1e-2 --train-epochs 5 --eval-epoch 2"
    pretrain_gpt.main(f"{FLAGS.replace('--mock-data', '')} {words} {flags} --save {tmp_path}".split())
    evals = [(one["iteration"], one["final"]) for one in records(tmp_path, "eval")]
    assert evals == [(8, False), (15, False), (18, True)]


def test_it_goes_on_in_the_middle_of_an_epoch(prefix, tmp_path):
    flags = f"--data-path {prefix} --lr 1e-2 --train-epochs 3 --save-epoch 1"
    pretrain(f"{flags} --save {tmp_path / 'whole'}")
    pretrain(f"{flags} --save {tmp_path / 'parts'} --exit-interval 5")
    pretrain(f"{flags} --save {tmp_path / 'parts'} --load {tmp_path / 'parts'}")
    assert saved(tmp_path / "parts") == sorted({*saved(tmp_path / "whole"), 5})
    whole, parts = ([one["lm loss"] for one in records(tmp_path / name, "step")] for name in ("whole", "parts"))
    assert whole == parts


@pytest.mark.parametrize("warmup", [0, 2])
def test_rates_that_change_with_the_epoch(prefix, tmp_path, warmup):
    """Colossal-AI's LinearWarmupLR, stepped once an epoch: lr (e + 1) / (w + 1), then down to 0 over the rest."""
    flags = f"--lr 1e-2 --min-lr 0 --lr-decay-style linear --lr-warmup-fraction {warmup / 5} --lr-step-unit epoch"
    pretrain(f"--data-path {prefix} --train-epochs 5 {flags} --save {tmp_path / 'run'}")
    found = {step["iteration"]: step["learning_rate"] for step in records(tmp_path / "run", "step")}
    for iteration, rate in found.items():
        epoch = (iteration - 1) * 2 * 5 // 36
        expected = (epoch + 1) / (warmup + 1) if epoch < warmup else 1 - (epoch - warmup) / (5 - warmup)
        assert rate == pytest.approx(1e-2 * expected), iteration
    assert sum(found[i] != found[i + 1] for i in range(1, 18)) == 4


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--train-epochs 2 --train-samples 8", "give one of them"),
        ("--train-epochs 2 --train-iters 8", "give one of them"),
        ("--train-epochs 0", "--train-epochs 0 must be at least 1"),
        ("--train-epochs 2 --seq-length 400", "less than one sample of --seq-length 400"),
        ("--train-samples 4 --save-epoch 1 --log-epoch", "--save-epoch 1, --log-epoch: an epoch is known with"),
        ("--train-iters 4 --lr-step-unit epoch", "--lr-step-unit epoch: an epoch is known with --train-epochs alone"),
        (
            "--train-epochs 2 --lr-warmup-iters 3 --lr-warmup-samples 4",
            "--lr-warmup-iters and --lr-warmup-samples: give one",
        ),
    ],
)
def test_what_cannot_be(prefix, flags, words):
    with pytest.raises(SettingsError) as caught:
        pretrain(f"--data-path {prefix} --lr 1e-2 {flags}")
    assert words in str(caught.value) and "settings cannot work" not in str(caught.value)


def test_data_without_epochs(prefix, tmp_path):
    other = token_file(tmp_path / "more", 3 * LENGTH + 2)
    flags = "--lr 1e-2"
    for words, data in {
        "prefixes with weights end at different times": f"--train-epochs 1 --data-path 0.5 {prefix} 0.5 {other}",
        "without weights, once is all there is": f"--train-epochs 2 --data-path {prefix} {other}",
        "--mock-data makes as many samples as are asked for": "--train-epochs 2 --mock-data",
    }.items():
        with pytest.raises(SettingsError, match=words):
            pretrain(f"{flags} {data}")
    # Without weights, once through both: 7 and 3 samples.
    pretrain(f"{flags} --train-epochs 1 --data-path {prefix} {other} --save {tmp_path / 'both'}")
    assert records(tmp_path / "both", "step")[-1]["consumed_samples"] == 10
