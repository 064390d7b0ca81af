# SPDX-License-Identifier: Apache-2.0
"""Runs of encoder-decoders and BERT: samples that are none are refused by name, checkpoints go on in another layout, and
tools that score next tokens say that they cannot.
"""

import json

import numpy as np
import pytest

from megatron.data.loader import MicroBatchLoader
from megatron.data.mock import MockMasked, MockPairs
from megatron.entry import start
from megatron.errors import DataError, SettingsError
from megatron.model.command_line import parse_any
from megatron.model.recipe import named_recipe
from megatron.settings.schema import Data
from megatron.tools import evaluate
from megatron.training.rules import resolve

SIZES = """--hidden-size 16 --num-attention-heads 2 --seq-length 12 --mock-data --vocab-size 40 --device cpu --num-workers 0
    --precision fp32 --lr 1e-2 --lr-decay-style constant --micro-batch-size 2 --global-batch-size 4 --eval-iters 0
    --log-interval 1"""
FLAGS = {
    "T5": f"{SIZES} --encoder-num-layers 2 --decoder-seq-length 8 --position-embedding-type relative",
    "BERT": f"{SIZES} --num-layers 4",
}


def pretrain(rank: int, kind: str, flags: str) -> None:
    start(f"{FLAGS[kind]} {flags}".split(), named_recipe(kind))


def losses(folder) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["lm loss"] for record in records if record["kind"] == "step"]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["T5", pytest.param("BERT", marks=pytest.mark.full)])
def test_a_checkpoint_goes_on_in_another_layout(tmp_path, kind, run_ranks):
    pretrain(0, kind, f"--train-iters 4 --save {tmp_path / 'whole'}")
    run_ranks(2, pretrain, kind, f"--train-iters 2 --pipeline-model-parallel-size 2 --save {tmp_path / 'part'}")
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --sharding-stage 1"
    more = f"--train-iters 4 --load {tmp_path / 'part'} --save {tmp_path / 'rest'} {layout}"
    run_ranks(2, pretrain, kind, more)
    parts = losses(tmp_path / "part") + losses(tmp_path / "rest")
    assert parts == pytest.approx(losses(tmp_path / "whole"), rel=1e-5) and len(parts) == 4


def test_a_tool_that_scores_next_tokens_says_that_it_cannot(tmp_path):
    pretrain(0, "BERT", f"--train-iters 1 --save {tmp_path}")
    with pytest.raises(SettingsError, match="type BERT, whose samples are no rows of tokens"):
        evaluate.main(["--load", str(tmp_path), "--data-path", "nowhere", "--device", "cpu"])


def loader_of(kind: str, change):
    """A loader of mock samples, each of which went through `change`."""
    config = resolve(parse_any(f"--model-type {kind} {FLAGS[kind]} --train-iters 1".split()), 1)
    recipe = named_recipe(kind)
    data = MockPairs(4, 12, 8, 40) if kind == "T5" else MockMasked(4, 12, 40)

    class Changed:
        def __len__(self):
            return len(data)

        def __getitem__(self, index):
            return change(dict(data[index]))

    more = dict(micro_batch_size=2, collate=recipe.collate, arrays=recipe.arrays(config, 40))
    return MicroBatchLoader(Changed(), Data(num_workers=0), **more)


WRONG = {
    "no labels": (lambda s: {k: v for k, v in s.items() if k != "labels"}, r"Changed\[0\] has no labels"),
    "no dict": (lambda s: list(s.values()), "is no sample: list"),
    "too long": (lambda s: s | dict(text_enc=np.zeros(13, int)), r"text_enc is int64 of shape \[13\]"),
    "beyond the vocabulary": (lambda s: s | dict(labels=np.full(8, 40)), "labels holds 40 at position 0"),
    "negative where it counts": (lambda s: s | dict(labels=np.full(8, -1)), "labels holds -1 at position 0"),
    "a mask that is none": (lambda s: s | dict(loss_mask=np.full(8, np.nan)), "loss_mask is no mask"),
    "fractions": (lambda s: s | dict(text_dec=np.full(8, 0.5)), "text_dec is float64"),
    "a mask of pairs": (lambda s: s | dict(enc_mask=np.ones((12, 12), int)), r"enc_mask is int64 of shape \[12, 12\]"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_sample_that_is_none_is_refused(what):
    change, match = WRONG[what]
    with pytest.raises(DataError, match=match):
        loader_of("T5", change).micro_batch(0, 0)


def test_what_a_micro_batch_holds():
    """Lengths stand for masks, and labels that do not count may be -1, as Megatron-LM's are."""
    plain = loader_of("T5", lambda s: s).micro_batch(0, 0)
    lengths = lambda s: s | dict(enc_mask=int(s["enc_mask"].sum()), dec_mask=int(s["dec_mask"].sum()))
    negative = lambda s: s | dict(labels=np.where(s["loss_mask"] > 0, s["labels"], -1))
    told = loader_of("T5", lengths).micro_batch(0, 0)
    assert all((plain.arrays[name] == told.arrays[name]).all() for name in plain.arrays) and plain.hash == told.hash
    marked = loader_of("T5", negative).micro_batch(0, 0)
    counts = plain.loss_mask > 0
    assert (marked.labels[counts] == plain.labels[counts]).all() and (marked.labels[~counts] == 0).all()
    data = MockPairs(4, 12, 8, 40)
    for row in range(2):
        assert (plain.arrays["text_enc"][:, row].numpy() == data[row]["text_enc"]).all()
    assert plain.num_tokens == sum(data[row]["loss_mask"].sum() for row in range(2))
    other = loader_of("T5", lambda s: s | dict(enc_mask=np.ones(12, int))).micro_batch(0, 0)
    assert other.hash != plain.hash, "the ledger sees each array"


def test_copies_at_the_end_of_a_whole_validation_do_not_count():
    loader = loader_of("BERT", lambda s: s)
    loader.whole = True
    last = loader.micro_batch(3, 0)
    assert last.loss_mask[:, 0].sum() > 0 and last.loss_mask[:, 1].sum() == 0
    assert last.arrays["is_random"].shape == (2,)
