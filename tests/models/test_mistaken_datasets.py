# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a dataset of a user's own is said in words: its length before the first step."""

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron.errors import DataError
from megatron.tools.pretrain import start
from tests.models import own_dataset

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 6 --vocab-size 20 --lr 1e-2 --eval-iters 0 "
    "--micro-batch-size 2 --global-batch-size 4 --device cpu --num-workers 0 --log-interval 1"
)


class Sums:
    """Samples by `sample`, a function of the index."""

    def __init__(self, size, sample=lambda index: np.arange(7)):
        self.size, self.sample = size, sample

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.sample(index)


def train(datasets, flags):
    """Train on (train, valid, test), or on what else `datasets` is."""
    recipe = replace(own_dataset.recipe(), build_datasets=lambda *args: datasets, groups={})
    start(f"{FLAGS} {flags}".split(), recipe)


EVALUATED = "--eval-iters 2 --eval-interval 3"


@pytest.mark.parametrize(
    "sizes, flags, said",
    [
        (
            (39, 0, 0),
            "--train-iters 10",
            "39 samples for training, 40 are needed (--train-iters 10 x --global-batch-size 4)",
        ),
        ((39, 0, 0), "--train-samples 40", "39 samples for training, 40 are needed (--train-samples 40)"),
        (
            (40, 31, 8),
            f"--train-iters 10 {EVALUATED}",
            "31 samples for validation, 32 are needed (4 evaluations x --eval-iters 2 x --global-batch-size 4)",
        ),
        (
            (40, 32, 7),
            f"--train-iters 10 {EVALUATED}",
            "7 samples for testing, 8 are needed (--eval-iters 2 x --global-batch-size 4)",
        ),
        ((0, 0, 0), "--train-iters 10 --dataloader-type cyclic", "0 samples for training, 40 are needed"),
    ],
)
def test_a_dataset_that_is_too_short_is_told_at_the_start(sizes, flags, said, capsys):
    with pytest.raises(DataError) as found:
        train(tuple(map(Sums, sizes)), flags)
    assert found.value.what.startswith(f"Sums has {said}") and "cyclic" in found.value.do and found.value.code == 4
    assert "iteration " not in capsys.readouterr().out


@pytest.mark.parametrize("sizes, more", [((40, 32, 8), ""), ((4, 1, 1), "--dataloader-type cyclic")])
def test_one_that_is_just_long_enough_is_used_up(sizes, more, tmp_path):
    train(tuple(map(Sums, sizes)), f"--train-iters 10 {EVALUATED} {more} --save {tmp_path}")
    assert (tmp_path / "iter_0000010").is_dir()


@pytest.mark.parametrize(
    "datasets, told", [((Sums(40), None), "2 of them"), (Sums(40), "Sums"), ((1, 2, 3, 4), "4 of them")]
)
def test_three_datasets_are_wanted(datasets, told):
    with pytest.raises(DataError, match=rf"build_datasets of tests.models.own_dataset returned {told}"):
        train(datasets, "--train-iters 10")


def test_without_a_length():
    with pytest.raises(DataError, match="generator, the dataset for training, has no length"):
        train(((x for x in ()), None, None), "--train-iters 10")


@pytest.mark.parametrize("interval", [3, 10])
def test_an_evaluation_that_fails_does_not_cost_the_run(interval, tmp_path):
    """The last one, in the loop or behind it; the state that is kept is that of a run whose evaluation goes well."""

    def failing(index):
        if index >= (12 if interval == 3 else 0):  # of the final evaluation's samples
            raise DataError("unreadable")
        return np.arange(7)

    def flags(folder):
        return f"--train-iters 10 --eval-iters 1 --eval-interval {interval} --save {folder}"

    with pytest.raises(DataError, match="unreadable"):
        train((Sums(40), Sums(40, failing), None), flags(tmp_path / "failed"))
    train((Sums(40), Sums(40), None), flags(tmp_path / "good"))
    [failed, good] = (sorted((tmp_path / name).glob("iter_*/state.json")) for name in ("failed", "good"))
    assert len(failed) == len(good) == 1
    assert json.loads(failed[0].read_text())["state"] == json.loads(good[0].read_text())["state"]
