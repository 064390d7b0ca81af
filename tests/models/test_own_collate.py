# SPDX-License-Identifier: Apache-2.0
"""Samples that a recipe's own function puts together train as the same samples from a dataset that has them ready."""

import json
from dataclasses import dataclass, replace

import pytest

from megatron.entry import start
from megatron.errors import DataError, SettingsError
from tests.models import own_collate

TINY = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 99 --lr 1e-2 --device cpu "
    "--global-batch-size 8 --train-iters 6 --eval-iters 0 --hidden-dropout 0 --attention-dropout 0 "
)


@dataclass(frozen=True)
class Ready:
    """The samples, written out by hand."""

    pairs: own_collate.Pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, index):
        question, answer = self.pairs[index]
        ids = (question + answer + [0] * 17)[:17]
        mask = ([0.0] * len(question) + [1.0] * len(answer) + [0.0] * 17)[:17]
        return {"input_ids": ids, "loss_mask": mask}


def ready():
    def build_datasets(*given):
        return tuple(made and Ready(made) for made in own_collate.build_datasets(*given))

    return replace(own_collate.recipe(), build_datasets=build_datasets, collate=None)


def steps(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["lm loss"], line["ledger"]) for line in lines if line["kind"] == "step"]


def train(folder, flags="", recipe=None):
    start(f"{TINY} --micro-batch-size 2 {flags} --save {folder}".split(), recipe or own_collate.recipe())


def test_it_trains_as_samples_that_are_ready(tmp_path, run_ranks):
    train(tmp_path / "ready", recipe=ready())
    expected = steps(tmp_path / "ready")
    train(tmp_path / "own", "--num-workers 2")
    assert steps(tmp_path / "own") == expected and len(expected) == 6
    run_ranks(2, lambda rank: train(tmp_path / "two", "--micro-batch-size 4 --num-workers 0"))
    for (loss, ledger), (want, same) in zip(steps(tmp_path / "two"), expected, strict=True):
        assert loss == pytest.approx(want, rel=1e-5) and ledger == same


def test_a_flag_names_the_function(tmp_path):
    """--collate-fn is `Recipe.collate` by name."""
    train(tmp_path / "own")
    flag = "--collate-fn tests.models.own_collate:collate"
    train(tmp_path / "named", flag, replace(own_collate.recipe(), collate=None))
    assert steps(tmp_path / "named") == steps(tmp_path / "own")
    for name, words in (("collate", "it is a module and a function in it"), ("no_such:one", "No module named")):
        with pytest.raises(SettingsError, match=words):
            train(tmp_path / "wrong", f"--collate-fn {name}", replace(own_collate.recipe(), collate=None))


def test_it_goes_on_with_the_same_samples_or_not_at_all(tmp_path):
    train(tmp_path / "whole")
    train(tmp_path / "run", "--exit-interval 3")
    other = replace(
        own_collate.recipe(), collate=lambda given: [(ids + 1, mask) for ids, mask in own_collate.collate(given)]
    )
    with pytest.raises(SettingsError, match="sample"):
        train(tmp_path / "run", f"--load {tmp_path / 'run'}", other)
    train(tmp_path / "run", f"--load {tmp_path / 'run'}")
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")


@pytest.mark.parametrize(
    "collate, words",
    [
        (lambda given: own_collate.collate(given)[:1], "the recipe's collate made 1 samples of 2"),
        (
            lambda given: [ids[:9] for ids, _ in own_collate.collate(given)],
            r"Pairs\[0\] is no sample: int64 of shape \[9\]",
        ),
        (lambda given: [ids + 99 for ids, _ in own_collate.collate(given)], "outside of the vocabulary"),
    ],
)
def test_what_it_makes_is_checked(tmp_path, collate, words):
    with pytest.raises(DataError, match=words):
        train(tmp_path, "--num-workers 0", replace(own_collate.recipe(), collate=collate))
