# SPDX-License-Identifier: Apache-2.0
"""Runs of fine-tuning of BERT and T5 that go on in another layout, and the evaluation of their best weights."""

import pytest

from tests.tasks.classification import Toy
from tests.tasks.test_backbones import WORDS
from tests.tasks.test_finetune import TUNE, tune, weights_of
from tests.training.test_plain_loop import records

SHAPES = {
    "T5": "--encoder-num-layers 2 --decoder-num-layers 2 --position-embedding-type relative --normalization RMSNorm",
    "BERT": "--num-layers 2",
}
SHARED = "--tensor-model-parallel-size 2 --sequence-parallel"


SIZE = """--hidden-size 16 --num-attention-heads 2 --seq-length 16 --hidden-dropout 0 --attention-dropout 0
    --make-vocab-size-divisible-by 8 --sharding-stage 1"""


def line_of(kind: str, toy: Toy, folder) -> str:
    line = f"--task {toy.yaml} --data-path {toy.folder} --backbone {kind} {SHAPES[kind]} {SIZE} {WORDS} {TUNE}"
    return f"{line} --save {folder}"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["T5", pytest.param("BERT", marks=pytest.mark.full)])
@pytest.mark.parametrize("before, after", [("", SHARED), pytest.param(SHARED, "", marks=pytest.mark.full)])
def test_a_run_goes_on_in_another_layout(kind, before, after, tmp_path, run_ranks):
    toy, ranks = Toy(tmp_path / "toy", pairs=True), lambda words: 2 if words else 1
    whole, parts = line_of(kind, toy, tmp_path / "whole"), line_of(kind, toy, tmp_path / "parts")
    run_ranks(1, tune, whole)
    run_ranks(ranks(before), tune, f"{parts} --exit-interval 3 {before}")
    run_ranks(ranks(after), tune, f"{parts} --load {tmp_path / 'parts'} {after}")
    names = ("iteration", "loss", "grad_norm")
    found, wanted = (
        [[one[n] for n in names] for one in records(tmp_path / folder, "step")] for folder in ("parts", "whole")
    )
    assert [one[0] for one in found] == [1, 2, 3, 4, 5]
    assert found == [pytest.approx(one, rel=5e-5) for one in wanted]
    ours, theirs = weights_of(tmp_path / "parts"), weights_of(tmp_path / "whole")
    assert all((ours[name] - theirs[name]).abs().max() < 5e-5 for name in theirs) and ours.keys() == theirs.keys()


@pytest.mark.full
@pytest.mark.parametrize("words", [SHARED, ""])
def test_the_best_weights_are_evaluated_alone(words, tmp_path, run_ranks):
    """Their checkpoint has no state of the optimizer, and nobody has to say so."""
    toy = Toy(tmp_path / "toy")
    run_ranks(1, tune, line_of("T5", toy, tmp_path / "run"))
    again = line_of("T5", toy, tmp_path / "again") + f" --skip-train --load {tmp_path / 'run' / 'best'} {words}"
    run_ranks(2 if words else 1, tune, again)
    final = lambda folder: [one for one in records(tmp_path / folder, "eval") if one["final"]]
    wanted, found = final("run"), final("again")
    assert [one["split"] for one in found] == ["validation", "test"] and not records(tmp_path / "again", "step")
    for one, other in zip(found, wanted, strict=True):
        assert one.get("loss") == (None if one["split"] == "test" else pytest.approx(other["loss"], rel=1e-5))
        assert one.get("accuracy") == other.get("accuracy")
