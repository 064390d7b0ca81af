# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a dataset of a user's own is said in words: its length before the first step."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch, MicroBatchLoader
from megatron.entry import start
from megatron.errors import DataError, SettingsError
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Data
from megatron.training.rules import resolve
from tests.models import own_dataset

FLAGS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 6 --vocab-size 20 --lr 1e-2 --eval-iters 0 "
    "--micro-batch-size 2 --global-batch-size 4 --device cpu --num-workers 0 --log-interval 1 "
    "--hidden-dropout 0 --attention-dropout 0"
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


@pytest.mark.sampled(5)
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


# ---- samples ---------------------------------------------------------------------------------------------------------


def test_a_dict_of_other_things_is_told_by_its_names():
    data = Sums(8, lambda index: {"tokens": np.arange(7), "labels": np.arange(7)})
    with pytest.raises(DataError, match=r"Sums\[0\] is a dict with 'tokens', 'labels'") as found:
        train((data, None, None), "--train-iters 1")
    assert "input_ids and loss_mask" in found.value.why and found.value.code == 4


def test_an_error_inside_a_dataset_says_in_which_sample():
    def sample(index):
        return {3: 1}[index] if index == 5 else np.arange(7)

    with pytest.raises(KeyError) as found:
        train((Sums(8, sample), None, None), "--train-iters 2")
    assert getattr(found.value, "__notes__", ["in sample 5 of Sums"]) == ["in sample 5 of Sums"]


def test_the_token_that_is_added_is_told(capsys):
    train((Sums(4), None, None), "--train-iters 1")
    assert (
        "note: the vocabulary has 21 tokens: --vocab-size, and 20 for the end of a document" in capsys.readouterr().out
    )


# ---- loss masks ------------------------------------------------------------------------------------------------------

IDS = np.random.default_rng(0).integers(20, size=(40, 7))
ANSWER = np.random.default_rng(1).integers(2, size=(40, 7))


def masked(form, answer=ANSWER):
    """Samples with a mask beside their ids; every fifth has none."""

    def sample(index):
        return IDS[index] if index % 5 == 4 else form(IDS[index], answer[index])

    return Sums(40, sample)


FORMS = {
    "tuple": lambda ids, mask: (ids, mask),
    "dict": lambda ids, mask: {"input_ids": ids.tolist(), "loss_mask": mask.astype(bool)},
    "tensors": lambda ids, mask: {"input_ids": torch.from_numpy(ids), "loss_mask": torch.from_numpy(mask).float()},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("eod", [None, 3])
def test_a_samples_mask_is_that_of_its_labels(form, eod):
    """The mask of an id says whether the loss of predicting it counts; --eod-mask-loss takes more away."""
    with MicroBatchLoader(
        masked(FORMS[form]),
        Data(num_workers=0, eod_mask_loss=eod is not None),
        micro_batch_size=8,
        eod=eod,
        seq_length=6,
    ) as batches:
        [batch] = batches.step(0, 1)
    for index in range(8):
        for at in range(6):
            counts = index % 5 == 4 or ANSWER[index][at + 1] == 1
            counts = counts and not (eod is not None and IDS[index][at] == eod)
            assert batch.loss_mask[at, index] == float(counts) and batch.labels[at, index] == IDS[index][at + 1]


def test_without_masks_there_is_none():
    with MicroBatchLoader(Sums(8), Data(num_workers=0), micro_batch_size=8, seq_length=6) as batches:
        assert batches.step(0, 1)[0].loss_mask is None


def test_the_loss_is_the_mean_over_what_counts(tmp_path):
    """Against torch's cross-entropy of the model's own scores; ids that do not count may be anything."""
    found = []
    for folder, data in (("one", masked(FORMS["tuple"])), ("other", masked(lambda ids, mask: (ids, 0.5 * mask)))):
        train((data, None, None), f"--train-iters 1 --save {tmp_path / folder}")
        steps = map(json.loads, (tmp_path / folder / "metrics.jsonl").read_text().splitlines())
        found += [step["lm loss"] for step in steps if step["kind"] == "step"]
    model = plain_scores()
    losses = torch.stack(
        [F.cross_entropy(model(IDS[n][:-1]), torch.from_numpy(IDS[n][1:]), reduction="none") for n in range(4)]
    )
    weights = torch.from_numpy(ANSWER[:4, 1:]).double()
    assert found[0] == pytest.approx(((losses * weights).sum() / weights.sum()).item(), rel=1e-5)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def plain_scores():
    """ids [s] -> scores [s, vocabulary] in fp64 of the model that `train` starts with."""
    recipe = own_dataset.recipe()
    config = resolve(
        parse_pretrain(f"{FLAGS} --train-iters 1".split(), recipe.groups, defaults={"model_type": recipe.model_type}), 1
    )
    model = recipe.build_model(config, Mesh(), 21, dtype=torch.float32, device="cpu")
    for name, (parameter, placement) in placements(model).items():
        init_parameter(name, parameter.data, placement, Mesh().coordinates, 1234)

    def scores(ids):
        tokens = torch.from_numpy(ids)[:, None]
        hidden, _ = model._hidden(None, MicroBatch(tokens, tokens, torch.arange(1)))
        return (hidden @ model.output_weight.T)[:, 0, :21].double()

    return scores


def test_another_mask_is_noticed_when_a_run_goes_on(tmp_path):
    flags = f"--train-iters 4 --save {tmp_path} --load {tmp_path}"
    train((masked(FORMS["tuple"]), None, None), f"{flags} --exit-interval 2")
    with pytest.raises(SettingsError, match="samples of this run's past steps differ"):
        train((masked(FORMS["tuple"], 1 - ANSWER), None, None), flags)
    train((masked(FORMS["dict"]), None, None), flags)


@pytest.mark.parametrize("mask", [np.ones(6), np.full(7, np.nan), -np.ones(7), np.array(["x"] * 7)])
def test_a_mask_that_is_none(mask):
    with pytest.raises(DataError, match=r"Sums\[0\] has a loss mask that is none"):
        train((Sums(8, lambda index: (np.arange(7), mask)), None, None), "--train-iters 1")
