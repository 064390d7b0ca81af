# SPDX-License-Identifier: Apache-2.0
"""Samples of one's own are checked as those of files are, and need no flag that says where they come from."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from megatron.data.loader import MicroBatchLoader
from megatron.errors import DataError, SettingsError
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Data
from megatron.training.build import build_run
from megatron.training.loop import pretrain
from megatron.training.rules import check, resolve
from tests.models import own_dataset

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 6 --vocab-size 20 --lr 1e-2 "
    "--micro-batch-size 2 --eval-iters 0 --device cpu --num-workers 0"
)


def config_of(flags, recipe=None):
    recipe = recipe or own_dataset.recipe()
    defaults = {"model_type": recipe.model_type, **recipe.defaults}
    return parse_pretrain(f"{TINY} {flags}".split(), recipe.groups, defaults=defaults)


def train(flags, recipe=None):
    pretrain(resolve(config_of(flags, recipe), 1), recipe or own_dataset.recipe())


def with_samples(sample):
    """The recipe, with `sample(index)` as its samples."""

    @dataclass
    class Own:
        size: int

        def __len__(self):
            return self.size

        def __getitem__(self, index):
            return sample(index)

    def build_datasets(config, tokenizer, vocab_size, sizes, log):
        return tuple(Own(size) if size else None for size in sizes)

    return replace(own_dataset.recipe(), build_datasets=build_datasets)


def test_a_recipe_with_samples_of_its_own_needs_no_flag_for_them():
    config = config_of("--train-iters 2")
    assert check(config, 1) == [] and not config.data.mock_data
    run = build_run(resolve(config, 1), own_dataset.recipe())
    [batch] = run.loaders.train.step(0, 1)
    run.close()
    rows = [run.loaders.train.dataset[index] for index in (0, 1)]
    assert (batch.tokens.T.numpy() == [row[:-1] for row in rows]).all()
    assert (np.diff(rows) % 21 == 1).all()  # 20 numbers and the end of document


def test_others_need_one():
    assert check(config_of("--train-iters 2 --model-type GPT"), 1)[0].startswith("no data is given")


def test_mock_data_stands_in():
    """What preflight and shrunk jobs do: their vocabulary is another one than the samples were made for."""
    recipe = with_samples(lambda index: np.full(7, 10**6))
    run = build_run(resolve(config_of("--train-iters 1 --mock-data", recipe), 1), recipe)
    assert run.loaders.train.step(0, 1)[0].tokens.max() < 20
    run.close()


@pytest.mark.parametrize("token", [122, 21, -1])
def test_an_id_outside_of_the_vocabulary_is_an_error_that_names_the_sample(token):
    """20 numbers and the end of document: 0 to 20. The embedding has 128 rows."""

    def sample(index):
        row = np.arange(7)
        row[4] = token if index == 5 else 20
        return row

    with pytest.raises(DataError, match=rf"Own\[5\] holds token {token} at position 4, outside of the") as found:
        train("--train-iters 4", with_samples(sample))
    assert found.value.code == 4


def test_the_last_label_is_checked_too():
    with pytest.raises(DataError, match="at position 6"):
        train("--train-iters 1", with_samples(lambda index: np.array([0, 1, 2, 3, 4, 5, 21])))


@pytest.mark.parametrize(
    "row, said",
    [
        (np.arange(6), r"int64 of shape \[6\]"),
        (np.arange(7.0), r"float64 of shape \[7\]"),
        (np.zeros((1, 7), np.int64), r"shape \[1, 7\]"),
    ],
)
def test_what_is_no_sample_is_said(row, said):
    with pytest.raises(DataError, match=rf"Own\[0\] is no sample: .*{said}"):
        train("--train-iters 1", with_samples(lambda index: row))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, list])
def test_whole_numbers_of_any_kind_are_ids(kind):
    class Few:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            row = [3, 1, 4, 1, 5]
            return row if kind is list else np.array(row, kind)

    with MicroBatchLoader(Few(), Data(num_workers=0), micro_batch_size=2, seq_length=4, vocab_size=6) as batches:
        [batch] = batches.step(0, 1)
    assert batch.tokens.T.tolist() == [[3, 1, 4, 1]] * 2 and batch.labels.T.tolist() == [[1, 4, 1, 5]] * 2
    assert str(batch.tokens.dtype) == str(batch.labels.dtype) == "torch.int64"


def test_settings_of_a_recipe_are_compared_on_resume(tmp_path, capsys):
    flags = f"--save {tmp_path} --load {tmp_path} --lr-decay-iters 9 --own-step"
    train(f"{flags} 3 --train-iters 2")
    with pytest.raises(SettingsError, match="--own-step: 3 in the checkpoint, 4 now") as refused:
        train(f"{flags} 4 --train-iters 3")
    assert refused.value.code == 3 and "--override own-step,data-order" in refused.value.do
    with pytest.raises(SettingsError, match="samples of this run's past steps differ"):
        train(f"{flags} 4 --train-iters 3 --override own-step")
    train(f"{flags} 3 --train-iters 3")
    capsys.readouterr()
    train(f"{flags} 4 --train-iters 4 --override own-step,data-order")
    assert "--own-step was 3 in the checkpoint, is 4 now (--override)" in capsys.readouterr().out
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in steps if record["kind"] == "step"] == [1, 2, 3, 4]
