# SPDX-License-Identifier: Apache-2.0
"""Validations over the same samples each time, and over a whole set, against means that are taken by brute force.

At a rate of almost 0 the weights stay, so every evaluation over the same samples has the same loss.
"""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.data import manifest
from megatron.data.gpt_dataset import GPTDataset, build_datasets
from megatron.data.indexed import write_index
from megatron.data.mock import MockDataset
from megatron.entry import start
from megatron.errors import DataError
from megatron.settings.schema import Data
from megatron.tools import trace
from pretrain_gpt import recipe
from tests.models import own_dataset
from tests.ranks import on_ranks
from tests.training.plain_loop import EOD, LENGTH, Job, initial_weights, token_losses
from tests.training.test_plain_loop import FLAGS, PLAIN, pretrain, records

pytestmark = pytest.mark.sampled(10)

STILL = "--lr 1e-12 --lr-decay-style constant --global-batch-size 8 --train-iters 4 --eval-interval 2"


@pytest.fixture
def document(tmp_path):
    """`document(name, samples, seed)`: prefix and tokens of a file of one document, which no shuffle can change."""

    def write(name, samples, seed):
        tokens = np.random.default_rng(seed).integers(0, EOD, samples * LENGTH + 3).astype(np.uint16)
        tokens[::5] = EOD  # what the loss leaves out
        prefix = str(tmp_path / name)
        tokens.tofile(f"{prefix}.bin")
        write_index(f"{prefix}.idx", np.uint16, np.array([len(tokens)], np.int32), np.array([0, 1]))
        manifest.write_manifest(prefix)
        return prefix, tokens

    return write


def loss_of(*files) -> float:
    """The mean over all tokens that count of all samples of these token files, each once."""
    samples = [
        tokens[start : start + LENGTH + 1] for tokens in files for start in range(0, len(tokens) - LENGTH, LENGTH)
    ]
    rows = torch.from_numpy(np.stack(samples).astype(np.int64))
    job = Job(**PLAIN, mask_eod=True)
    losses, counts = token_losses(initial_weights(job.seed), rows, job)
    return losses[counts].mean().item()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "samples, world, layout",
    [
        (11, 1, "--num-workers 2"),
        (16, 1, ""),
        (11, 1, "--dataloader-type cyclic --micro-batch-size 4"),
        (11, 2, ""),
        (11, 2, "--pipeline-model-parallel-size 2 --micro-batch-size 1"),
        (11, 3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    ],
)
def test_a_whole_set_is_each_sample_once_in_any_layout(samples, world, layout, document, tmp_path):
    """11 samples fill a batch of 8 and a part of the next one, 16 two whole ones."""
    prefix, tokens = document("held", samples, seed=1)
    flags = f"{STILL} --full-validation --eval-iters 1 --train-data-path {prefix} --valid-data-path {prefix} {layout}"
    flags += f" --mock-data false --tokenizer-type NullTokenizer --eod-mask-loss --save {tmp_path / 'run'}"
    on_ranks(world, pretrain, flags)
    evals = records(tmp_path / "run", "eval")
    assert [(one["iteration"], one["final"]) for one in evals] == [(2, False), (4, True)]
    for one in evals:
        assert (one["first_sample"], one["samples"]) == (0, samples)
        assert one["lm loss"] == pytest.approx(loss_of(tokens), rel=2e-6)


def test_a_whole_set_is_all_files_of_a_blend(document, tmp_path):
    """Whatever they weigh, and however often one is named."""
    (one, first), (other, second) = document("one", 3, seed=1), document("other", 6, seed=2)
    flags = (
        f"{STILL} --full-validation --eval-iters 0 --train-data-path {one} --valid-data-path 9 {one} 1 {other} 5 {one}"
    )
    flags += f" --mock-data false --tokenizer-type NullTokenizer --eod-mask-loss --save {tmp_path / 'run'}"
    pretrain(0, flags)
    evals = records(tmp_path / "run", "eval")
    assert [one["samples"] for one in evals] == [9, 9]
    assert evals[0]["lm loss"] == pytest.approx(loss_of(first, second), rel=2e-6)


def test_a_whole_set_of_less_than_a_sample_is_refused(document):
    prefix, _ = document("held", 0, seed=1)
    files = f"--train-data-path {document('train', 40, seed=2)[0]} --valid-data-path {prefix} --mock-data false"
    with pytest.raises(DataError, match="less than one sample"):
        pretrain(0, f"{STILL} --full-validation {files} --tokenizer-type NullTokenizer")


def test_the_same_samples_each_time(tmp_path, capsys):
    """Without the setting each evaluation goes on behind the one before, and the last step has two: over other samples."""
    pretrain(0, f"{STILL} --eval-iters 2 --save {tmp_path / 'other'}")
    found = [(e["iteration"], e["final"], e["first_sample"]) for e in records(tmp_path / "other", "eval")]
    assert found == [(2, False, 0), (4, False, 16), (4, True, 32), (4, True, 0)]  # the last one is the test
    assert len({e["lm loss"] for e in records(tmp_path / "other", "eval")}) == 4
    capsys.readouterr()
    pretrain(0, f"{STILL} --eval-iters 2 --eval-same-samples --save {tmp_path / 'same'}")
    found = [(e["split"], e["iteration"], e["final"], e["first_sample"]) for e in records(tmp_path / "same", "eval")]
    assert found == [("validation", 2, False, 0), ("validation", 4, True, 0), ("test", 4, True, 0)]
    first, last, _ = records(tmp_path / "same", "eval")
    assert first["lm loss"] == last["lm loss"] == records(tmp_path / "other", "eval")[0]["lm loss"]
    lines = re.findall("validation loss at iteration (.*?) \\|", capsys.readouterr().out)
    assert lines == ["2", "4 on validation set", "4 on test set"]


@pytest.mark.parametrize("interval, before", [(2, (4, "16 to 31")), (3, (3, "0 to 15"))])
def test_two_losses_of_the_end_have_a_reason(interval, before, tmp_path, capsys):
    """The weights hardly move, so other samples are all that differs: which ones, a line says."""
    pretrain(0, f"{STILL} --eval-interval {interval} --eval-iters 2 --save {tmp_path / 'run'}")
    evals = [one for one in records(tmp_path / "run", "eval") if one["split"] == "validation"]
    [line] = [line for line in capsys.readouterr().out.splitlines() if "the final validation is over" in line]
    first = evals[-1]["first_sample"]
    assert f"samples {first} to {first + 15} of" in line and f"of iteration {before[0]} over {before[1]}:" in line
    assert "--eval-same-samples" in line and evals[-2]["iteration"] == before[0]
    pretrain(0, f"{STILL} --eval-interval {interval} --eval-iters 2 --eval-same-samples --save {tmp_path / 'same'}")
    assert "the final validation is over" not in capsys.readouterr().out
    losses = {one["lm loss"] for one in records(tmp_path / "same", "eval") if one["split"] == "validation"}
    assert len(losses) == 1


def test_batches_that_were_asked_for_and_have_no_samples_are_said(capsys):
    """A recipe may give no test data, and a small file none to the last part of --split."""

    def datasets(config, tokenizer, vocab_size, sizes, log):
        return tuple(MockDataset(32, LENGTH, vocab_size, EOD, 1234, n) if n < 2 else None for n in range(3))

    mine = replace(own_dataset.recipe(), build_datasets=datasets)
    start(f"{FLAGS} {STILL} --train-iters 2 --eval-iters 1 --test-iters 2 --mock-data false".split(), mine)
    assert "warning: --test-iters 2 has no effect: there are no test samples" in capsys.readouterr().out
    start(f"{FLAGS} {STILL} --train-iters 2 --eval-iters 1 --mock-data false".split(), mine)
    assert "has no effect" not in capsys.readouterr().out


def test_what_is_left_to_do_at_the_end_is_done(tmp_path):
    """The last step is no multiple of the interval; and a launch behind it trains nothing but evaluates."""
    flags = f"{STILL} --train-iters 3 --eval-iters 1 --eval-same-samples --save {tmp_path} --load {tmp_path}"
    pretrain(0, flags)
    pretrain(0, flags)
    found = [(e["iteration"], e["final"]) for e in records(tmp_path, "eval") if e["split"] == "validation"]
    assert found == [(2, False), (3, True), (3, True)]


def test_each_evaluation_has_a_key_of_its_own(tmp_path):
    """What pandas is to pivot on: split, iteration and whether it is the final one."""
    pretrain(0, f"{STILL} --eval-iters 1 --save {tmp_path}")
    keys = [(e["split"], e["iteration"], e["final"]) for e in records(tmp_path, "eval")]
    assert len(keys) == len(set(keys)) == 4


def test_perplexities_are_those_of_language_model_losses(tmp_path, capsys):
    """A z-loss, or a model's own sum, is no likelihood; a recipe may name another that is."""
    pretrain(0, f"{STILL} --train-iters 2 --eval-iters 1 --z-loss-coeff 1e-3 --save {tmp_path}")
    evals = records(tmp_path, "eval")
    assert all("z loss" in e and "lm loss ppl" in e and "z loss ppl" not in e for e in evals)
    printed = capsys.readouterr().out
    assert "z loss value:" in printed and "lm loss PPL:" in printed and "z loss PPL:" not in printed
    mine = replace(recipe(), perplexities=("z loss",))
    start(f"{FLAGS} {STILL} --train-iters 2 --eval-iters 1 --z-loss-coeff 1e-3".split(), mine)
    printed = capsys.readouterr().out
    assert "lm loss PPL:" not in printed and "z loss PPL:" in printed


def test_a_recipes_set_that_ends_before_the_run_does_is_refused_at_the_start(tmp_path):
    """4 steps take three validations of 8 samples, 24; it failed behind the last step."""

    def datasets(config, tokenizer, vocab_size, sizes, log):
        train, valid, _ = (MockDataset(size, LENGTH, vocab_size, EOD, 1234, n) for n, size in enumerate((32, held, 1)))
        return train, valid, None

    mine = replace(own_dataset.recipe(), build_datasets=datasets)
    flags = f"{FLAGS} {STILL} --eval-iters 1 --mock-data false".split()
    for held, more, wanted in ((23, "", 24), (7, "--eval-same-samples", 8)):
        with pytest.raises(DataError, match=f"has {held} samples for validation, {wanted} are needed"):
            start([*flags, *more.split(), "--save", str(tmp_path / "refused")], mine)
    for number, (held, more) in enumerate(((24, ""), (8, "--eval-same-samples"), (5, "--full-validation"))):
        start([*flags, *more.split(), "--save", str(tmp_path / f"{number}")], mine)
        assert records(tmp_path / f"{number}", "eval")[-1]["samples"] == min(held, 8)


def test_a_longer_validation_after_a_resume_has_its_samples(document, tmp_path):
    """4 validations and the final one of 3 x 8 samples, the last of them after the save: 96. Then one of 9 x 8 samples,
    where a launch of its own would ask for 72 in all.
    """
    files = f"--train-data-path {document('a', 99, 1)[0]} --valid-data-path {document('b', 30, 2)[0]} --mock-data false"
    line = f"{STILL} {files} --tokenizer-type NullTokenizer --save {tmp_path / 'run'} --load {tmp_path / 'run'}"
    pretrain(0, f"{line} --eval-interval 1 --eval-iters 3")
    pretrain(0, f"{line} --train-iters 5 --eval-interval 100 --eval-iters 9 --override data-order")
    last = records(tmp_path / "run", "eval")[-1]
    assert (last["iteration"], last["first_sample"], last["samples"]) == (5, 96, 72)


def test_validations_beyond_one_epoch_have_megatrons_order_also_after_a_longer_resume(tmp_path, capsys):
    """80 samples from 40 documents of 10 tokens: the order is that of 4 validations and the final one, of 16 samples."""
    for name, seed in (("a", 1), ("b", 2)):
        tokens = np.random.default_rng(seed).integers(0, EOD, 400).astype(np.uint16)
        tokens.tofile(tmp_path / f"{name}.bin")
        write_index(tmp_path / f"{name}.idx", np.uint16, np.full(40, 10, np.int32), np.arange(41))
    files = dict(train_data_path=[f"{tmp_path}/a"], valid_data_path=[f"{tmp_path}/b"])
    flags = f"{STILL} --train-data-path {tmp_path}/a --valid-data-path {tmp_path}/b --mock-data false"
    flags += " --tokenizer-type NullTokenizer --eval-interval 1 --eval-iters 2 --seed 1234"
    pretrain(0, f"{flags} --save {tmp_path / 'straight'}")
    resumed = f"{flags} --save {tmp_path / 'resumed'} --load {tmp_path / 'resumed'}"
    pretrain(0, f"{resumed} --exit-interval 2")
    pretrain(0, f"{resumed} --train-iters 7 --override data-order")
    found, later = (
        [one["lm loss"] for one in records(tmp_path / name, "eval") if not one["final"]]
        for name in ("straight", "resumed")
    )
    valid = build_datasets(Data(**files, data_cache_path=f"{tmp_path}/cache"), LENGTH, (0, 80, 0), 1234)[1]
    assert isinstance(valid, GPTDataset) and valid.plan.epochs > 1
    job = Job(**PLAIN)
    rows = torch.from_numpy(np.stack([valid[place] for place in range(80)]))
    losses, counts = token_losses(initial_weights(job.seed), rows, job)
    expected = [losses[at : at + 16][counts[at : at + 16]].mean().item() for at in range(0, 80, 16)]
    assert found == pytest.approx(expected[:4], rel=2e-6)
    assert later[:5] == pytest.approx(expected, rel=2e-6) and len(later) == 7
    capsys.readouterr()
    trace.main(["--load", str(tmp_path / "resumed"), "--iter", "4", "--of", "valid", "--json"])
    _, *traced = map(json.loads, capsys.readouterr().out.splitlines())
    assert [(row["sample"], row["parts"]) for row in traced] == [
        (place, [[*part] for part in valid.origin(place).parts]) for place in range(48, 64)
    ]


def test_a_set_too_short_for_validations_after_a_resume_is_refused_before_training(tmp_path):
    def datasets(config, tokenizer, vocab_size, sizes, log):
        train, valid, _ = (MockDataset(size, LENGTH, vocab_size, EOD, 1234, n) for n, size in enumerate((80, 48, 1)))
        return train, valid, None

    mine = replace(own_dataset.recipe(), build_datasets=datasets)
    line = f"{FLAGS} {STILL} --mock-data false --save {tmp_path} --load {tmp_path}"
    start(f"{line} --eval-interval 1 --eval-iters 1".split(), mine)  # 32, and 8 after the save
    wanted = r"48 samples for validation, 56 are needed \(32 before the checkpoint, then --eval-iters 3 x"
    with pytest.raises(DataError, match=wanted):
        start(f"{line} --train-iters 5 --eval-interval 100 --eval-iters 3".split(), mine)
    assert records(tmp_path, "step")[-1]["iteration"] == 4
    start(f"{line} --train-iters 5 --eval-interval 100 --eval-iters 2".split(), mine)


def test_a_loss_that_is_reached_ends_training(tmp_path, capsys):
    """The run is that without the flag, up to the first validation that is good enough; a run that goes on knows it."""
    flags = "--lr 3e-3 --lr-decay-style constant --global-batch-size 8 --eval-interval 2 --eval-iters 2 --test-iters 0"
    flags += " --eval-same-samples"
    reached = lambda folder: [(one["iteration"], one["lm loss"]) for one in records(tmp_path / folder, "eval")]
    steps = lambda folder: [one["iteration"] for one in records(tmp_path / folder, "step")]
    pretrain(0, f"{flags} --train-iters 10 --save {tmp_path / 'whole'}")
    whole = reached("whole")
    losses = [loss for _, loss in whole]
    assert losses == sorted(losses, reverse=True) and [at for at, _ in whole] == [2, 4, 6, 8, 10]

    wanted = f"--stop-at-loss {(losses[1] + losses[2]) / 2:.6f}"  # that of step 4 is above it
    for folder, words in (("early", "--train-iters 10"), ("last", "--train-iters 6")):
        line = f"{flags} {wanted} --save {tmp_path / folder}"
        pretrain(0, f"{line} {words}")
        assert reached(folder)[:3] == whole[:3] and {at for at, _ in reached(folder)[3:]} <= {6}
        capsys.readouterr()
        pretrain(0, f"{line} --train-iters 10 --load {tmp_path / folder}")
        assert "training ends at iteration 6 of 10: --stop-at-loss" in capsys.readouterr().out
        assert steps(folder) == [1, 2, 3, 4, 5, 6]
    pretrain(0, f"{flags} --stop-at-loss 0.001 --train-iters 8 --save {tmp_path / 'last'} --load {tmp_path / 'last'}")
    assert steps("last") == [1, 2, 3, 4, 5, 6, 7, 8]
