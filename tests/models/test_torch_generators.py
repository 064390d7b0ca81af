# SPDX-License-Identifier: Apache-2.0
"""What a user's module draws from torch's generators is a function of --seed and of the samples: two runs, a resumed one
and one that computes activations again agree bit for bit.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.entry import start
from megatron.model.plain import plain_recipe
from megatron.mpu.forked import run_ranks
from tests.models import mlp_language_model as mlp
from tests.models import plain_module
from tests.models.test_mlp_language_model import AGAIN, FLAGS, PP, TP, ZERO3, tensors_of

pytestmark = pytest.mark.sampled(10)


def noisy(drawn=None):
    """The recipe of the MLP with noise in each layer; `drawn` gets (layer, a number that was drawn) of each pass."""

    def build_model(*args, **kwargs):
        model = mlp.build_model(*args, **kwargs)
        for number, block in model.blocks.items():

            def noise(module, args, output, number=number):
                added = 0.1 * torch.randn_like(output[0])
                if drawn is not None and module.training:
                    drawn.append((number, added.flatten()[0].item()))
                return F.dropout(output[0] + added, 0.2, module.training), output[1]

            block.register_forward_hook(noise)
        return model

    return replace(mlp.recipe(), build_model=build_model)


class Dropping(plain_module.PlainModule):
    def __init__(self, config, vocab_size):
        super().__init__(config.model.hidden_size, vocab_size)
        self.blocks.insert(1, torch.nn.Dropout(0.3))


def dropping():
    return plain_recipe("tests.models.plain_module", Dropping, pretrain_gpt.build_datasets)


def train(folder, recipe, flags, world, ambient=0, load=None):
    """The tensors of the last checkpoint of a run in a process whose generator is at another place."""
    words = f"{FLAGS} {flags} --save {folder}" + (f" --load {load}" if load else "")
    words = words.replace("--mlp-window 3", "") if recipe.model_type == plain_module.__name__ else words
    words = words.replace("--num-layers 4", "") if recipe.model_type == plain_module.__name__ else words

    def body(rank):
        torch.manual_seed(17 * ambient + rank)
        start(words.split(), recipe)

    run_ranks(world, body)


def same(one, other):
    one, other = tensors_of(one), tensors_of(other)
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "make, flags, world",
    [
        (noisy, "--eval-iters 1 --eval-interval 1", 1),
        (noisy, f"{PP} --pipeline-schedule zb-v", 2),
        (dropping, ZERO3, 2),
    ],
)
def test_two_runs_and_a_resumed_one_agree(tmp_path, make, flags, world):
    one, two, half = (tmp_path / name for name in ("one", "two", "half"))
    train(one, make(), flags, world, ambient=1)
    train(two, make(), flags, world, ambient=2)
    train(half, make(), f"{flags} --exit-interval 2", world, ambient=3)
    train(half, make(), flags, world, ambient=4, load=half)
    assert same(one, two) and same(one, half)


def test_recomputation_draws_the_same_again(tmp_path):
    train(tmp_path / "kept", noisy(), "", 1)
    train(tmp_path / "again", noisy(), f"{AGAIN} --recompute-num-layers 2", 1)
    assert same(tmp_path / "kept", tmp_path / "again")


@pytest.mark.parametrize("flags, world, alike", [("", 2, False), (TP, 2, True)])
def test_data_parallel_ranks_draw_others_and_tensor_parallel_ranks_the_same(flags, world, alike):
    """x is the same on tensor parallel ranks, and must stay so; layers and micro-batches have numbers of their own."""

    def body(rank):
        drawn = []
        start(f"{FLAGS} {flags} --train-iters 2".split(), noisy(drawn))
        return drawn

    one, other = run_ranks(world, body)
    assert len(one) == len(other) == 2 * 4 * (4 if alike else 2) and len({number for _, number in one}) == len(one)
    assert (one == other) if alike else not {number for _, number in one} & {number for _, number in other}
