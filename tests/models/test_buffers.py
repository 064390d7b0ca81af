# SPDX-License-Identifier: Apache-2.0
"""Buffers of a user's modules: constants are moved to where the model is; what would not be saved is refused."""

from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.plain import plain_recipe
from megatron.mpu.forked import run_ranks
from megatron.training.entry import start
from tests.models import mlp_language_model as mlp
from tests.models import plain_module
from tests.models.test_mlp_language_model import FLAGS, HIDDEN, PP, ZERO3, tensors_of
from tests.models.test_plain_module import FLAGS as PLAIN

GAIN = torch.linspace(0.5, 1.5, HIDDEN)


def scaled(gain_of, prepare=lambda block: None):
    """The recipe of the MLP, of which each layer's output is multiplied by gain_of(block)."""

    def build_model(*args, **kwargs):
        model = mlp.build_model(*args, **kwargs)
        for block in model.blocks.values():
            prepare(block)
            block.register_forward_hook(lambda block, args, output: (output[0] * gain_of(block), output[1]))
        return model

    return replace(mlp.recipe(), build_model=build_model)


def with_buffer(**how):
    return scaled(
        lambda block: block.gain, lambda block: block.register_buffer("gain", GAIN.to(how.pop("device", "cpu")), **how)
    )


@pytest.mark.parametrize("flags, world", [("", 1), (ZERO3, 2)])
def test_a_constant_of_a_layer(tmp_path, monkeypatch, flags, world):
    """As a buffer, against a tensor that the module knows nothing of; trained, and loaded again."""

    def train(rank, name, recipe):
        start(f"{FLAGS} {flags} --train-iters 2 --save {tmp_path / name}".split(), recipe)

    recipes = {"buffer": with_buffer(persistent=False), "constant": scaled(lambda block: GAIN)}
    for name, recipe in recipes.items():
        run_ranks(world, train, name, recipe)
    ours, theirs = (tensors_of(tmp_path / name, 2) for name in recipes)
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items()) and ours.keys() == theirs.keys()
    monkeypatch.setattr(mlp, "recipe", lambda: recipes["buffer"])
    model = load_model(str(tmp_path / "buffer")).model
    assert torch.equal(model.blocks["3"].gain, GAIN)


def test_a_buffer_on_the_meta_device_is_told_by_name():
    recipe = scaled(
        lambda block: block.gain,
        lambda block: block.register_buffer(
            "gain", torch.ones(HIDDEN, device=block.up.weight.device), persistent=False
        ),
    )
    with pytest.raises(SettingsError, match="no values: blocks.0.gain, blocks.1.gain") as found:
        start(FLAGS.split(), recipe)
    assert found.value.code == 3 and 'device="cpu"' in found.value.do


@pytest.mark.parametrize("more", ["", f"--preflight --world-size 2 {PP}"])
def test_a_buffer_that_would_have_to_be_saved_is_refused(more):
    with pytest.raises(SettingsError, match="would not be saved: blocks.0.gain, blocks.1.gain") as found:
        start(f"{FLAGS} {more}".split(), with_buffer())
    assert found.value.code == 3 and "persistent=False" in found.value.do


@pytest.mark.parametrize("init", ["module", "suite"])
def test_a_plain_module(init, tmp_path):
    """BatchNorm's statistics are refused; a constant that the module computes for itself is kept where values are."""

    def recipe(part, **how):
        def build(config, vocab_size):
            module = plain_module.build(config, vocab_size)
            module.blocks.insert(0, part(**how))
            return module

        return plain_recipe("tests.models.plain_module", build, pretrain_gpt.build_datasets, init=init)

    class Gain(torch.nn.Module):
        def __init__(self, device=None, dtype=torch.float32):
            super().__init__()
            self.register_buffer("gain", torch.linspace(0.5, 1.5, HIDDEN, device=device, dtype=dtype), persistent=False)

        def forward(self, x):
            assert self.gain.is_cpu and self.gain[0] == 0.5
            return x * self.gain

    class Norm(torch.nn.BatchNorm1d):
        def __init__(self):
            super().__init__(HIDDEN, device="cpu")

    with pytest.raises(SettingsError, match="not be saved: blocks.0.running_mean, blocks.0.running_var"):
        start(PLAIN.split(), recipe(Norm))
    start(f"{PLAIN} --train-iters 1".split(), recipe(Gain, device="cpu"))
    if init == "module":
        return start(f"{PLAIN} --train-iters 1".split(), recipe(Gain))
    with pytest.raises(SettingsError, match="no values: blocks.0.gain"):
        start(PLAIN.split(), recipe(Gain, device="meta"))
