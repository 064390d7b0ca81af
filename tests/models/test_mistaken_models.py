# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a model of a user's own is said in words, on every rank, before it has trained on nonsense."""

from dataclasses import replace

import pytest
import torch

from megatron.errors import SettingsError
from megatron.mpu.cross_entropy import linear_cross_entropy
from megatron.mpu.forked import RankFailed, run_ranks
from megatron.mpu.mesh import Mesh
from megatron.tools.pretrain import start
from tests.models import mlp_language_model as mlp
from tests.models.test_mlp_language_model import AGAIN, FLAGS, PP, SP, TP, ZERO3

ONE = "--train-iters 1"


def with_layers(change, **more):
    """The recipe of the MLP, whose layers return change(layer, x, sums) for the x and sums that they would return."""

    def build_model(*args, **kwargs):
        model = mlp.build_model(*args, **kwargs)
        for number, block in model.blocks.items():
            block.register_forward_hook(lambda module, args, output, layer=int(number): change(layer, *output))
        return model

    return replace(mlp.recipe(), build_model=build_model, **more)


def train(recipe, flags="", world=1):
    """Train it; raises what its ranks raise, of several ranks the one that failed first."""
    words = f"{FLAGS} {ONE} {flags}".split()
    if world == 1:
        return start(words, recipe)
    try:
        return run_ranks(world, lambda rank: start(words, recipe), timeout=30)
    except RankFailed as failed:
        raise failed.failure or failed from None


# ---- shapes ----------------------------------------------------------------------------------------------------------


def cut(layer, x, sums):
    """Layer 2 drops the last token."""
    return (x[:-1] if layer == 2 else x), sums


@pytest.mark.parametrize(
    "world, flags, said",
    [
        (1, "", "[15, 2, 24] for [16, 2, 24]"),
        (1, AGAIN, "[15, 2, 24] for [16, 2, 24]"),
        (2, PP, "[15, 2, 24] for [16, 2, 24]"),
        (2, f"{TP} {SP}", "[7, 2, 24] for [8, 2, 24]"),
        (2, ZERO3, "[15, 2, 24] for [16, 2, 24]"),
    ],
)
def test_a_layer_that_loses_tokens(world, flags, said):
    with pytest.raises(SettingsError) as found:
        train(with_layers(cut), flags.replace("--eod-mask-loss", ""), world)
    assert found.value.what == f"blocks.2 returned {said}" and "docs/extending.md#a-model" in found.value.do


def test_a_layer_that_returns_nothing():
    with pytest.raises(SettingsError, match="blocks.1 returned NoneType for"):
        train(with_layers(lambda layer, x, sums: (None if layer == 1 else x, {})))


def test_as_many_hidden_states_as_labels():
    mesh, labels = Mesh(0, create_groups=False), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(SettingsError, match="7 tokens have come to the output layer, and there are 8 labels"):
        linear_cross_entropy(torch.zeros(7, 4), torch.zeros(5, 4), labels, vocab_size=5, tp=mesh.tp)


@pytest.mark.parametrize("layer", [0, 3])
def test_preflight_looks_at_every_layer(layer, capsys):
    """The third layer of a kind, and those of a pipeline rank that is like another, are not left out."""
    words = f"{FLAGS} --preflight --world-size 2 {PP}".split()
    with pytest.raises(
        SettingsError, match=rf"shapes: rank \d: blocks.{layer} returned \[16, 2, 23\] for \[16, 2, 24\]"
    ):
        start(words, with_layers(lambda n, x, sums: (x[..., 1:] if n == layer else x, sums)))
