# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a model of a user's own is said in words, on every rank, before it has trained on nonsense."""

from dataclasses import dataclass, replace

import pytest
import torch

from megatron.entry import start
from megatron.errors import SettingsError
from megatron.mpu.cross_entropy import linear_cross_entropy
from megatron.mpu.forked import RankFailed, run_ranks
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Placement
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
        return run_ranks(world, lambda rank: start(words, recipe))
    except RankFailed as failed:
        raise failed.failure or failed from None


# ---- shapes ----------------------------------------------------------------------------------------------------------


def cut(layer, x, sums):
    """Layer 2 drops the last token."""
    return (x[:-1] if layer == 2 else x), sums


@pytest.mark.sampled(5)
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
    with pytest.raises(SettingsError, match="the output layer has 7 tokens, and there are 8 labels"):
        linear_cross_entropy(torch.zeros(7, 4), torch.zeros(5, 4), labels, vocab_size=5, tp=mesh.tp)


@pytest.mark.parametrize("layer", [0, 3])
def test_preflight_looks_at_every_layer(layer, capsys):
    """The third layer of a kind, and those of a pipeline rank that is like another, are not left out."""
    words = f"{FLAGS} --preflight --world-size 2 {PP}".split()
    with pytest.raises(
        SettingsError, match=rf"shapes: rank \d: blocks.{layer} returned \[16, 2, 23\] for \[16, 2, 24\]"
    ):
        start(words, with_layers(lambda n, x, sums: (x[..., 1:] if n == layer else x, sums)))


# ---- sums ------------------------------------------------------------------------------------------------------------


def with_sums(change, sums=None):
    """The recipe of the MLP, whose stages return change(x, sums) for what they would return."""

    def build_model(*args, last=True, **kwargs):
        model = mlp.build_model(*args, last=last, **kwargs)
        if last:
            model.register_forward_hook(lambda module, args, output: change(*output))
        return model

    return replace(mlp.recipe(), build_model=build_model, sums=sums or {"lm loss": 1.0, "activity": 0.0})


def without(name):
    return lambda x, sums: (x, {key: value for key, value in sums.items() if key != name})


def renamed(layer, x, sums):
    return x, ({"activty": sums["activity"]} if layer == 0 else sums)


RETURNED = {
    "a bare tensor": (
        with_sums(lambda x, sums: sums["lm loss"]),
        r'no stage returned "lm loss", ("activity", )?"tokens" \(returned sums: (none|activity)\)',
    ),
    "no tokens": (with_sums(without("tokens")), r'no stage returned "tokens" \(returned sums: lm loss, activity\)'),
    "a sum that never comes": (
        with_sums(lambda x, sums: (x, sums), {"lm loss": 1.0, "activity": 0.0, "never": 1.0}),
        r'no stage returned "never" \(returned sums: lm loss, activity, tokens\)',
    ),
    "a misspelt sum": (
        with_layers(renamed),
        r'a stage returned the sum "activty", which the recipe does not name; did you mean activity\?',
    ),
    "a sum for each token": (
        with_sums(lambda x, sums: (x, sums | {"tokens": torch.ones(4)})),
        r'a stage returned "tokens" of shape \[4\]',
    ),
    "a number": (with_sums(lambda x, sums: (x, sums | {"tokens": 32})), r'a stage returned "tokens" of type int'),
    "three things": (with_sums(lambda x, sums: (x, sums, 1)), r"a stage returned \(NoneType, dict, int\)"),
    "no dict": (with_sums(lambda x, sums: (x, sums["lm loss"])), r"a stage returned \(NoneType, Tensor\)"),
}
EVERY = {"one": (1, ""), "pp": (2, PP), "tp sp": (2, f"{TP} {SP}"), "zero 3": (2, f"{ZERO3} {AGAIN}")}
SOME = [(name, "pp") for name in RETURNED] + [(name, "one") for name in RETURNED]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name, layout", [*SOME, ("no tokens", "tp sp"), ("no tokens", "zero 3")])
def test_what_a_stage_returns_is_compared_on_all_ranks(name, layout):
    """Every rank raises the same: the first stage learns what the last one has not returned, and the reverse."""
    recipe, said = RETURNED[name]
    world, flags = EVERY[layout]

    def body(rank):
        with pytest.raises(SettingsError, match=said) as found:
            start(f"{FLAGS} {ONE} {flags}".split(), recipe)
        return str(found.value), found.value.code

    answers = set(run_ranks(world, body) if world > 1 else [body(0)])
    assert len(answers) == 1 and answers.pop()[1] == 3


def test_a_stage_of_a_pipeline_that_returns_another_format():
    """Of layers that keep shapes: what is between them and the next stage."""

    def build_model(*args, last=True, **kwargs):
        model = mlp.build_model(*args, last=last, **kwargs)
        if not last:
            model.register_forward_hook(lambda module, args, output: (output[0].double(), output[1]))
        return model

    with pytest.raises(SettingsError, match=r"returned \[16, 2, 24\] torch.float64, and messages are .*float32"):
        train(replace(mlp.recipe(), build_model=build_model), PP, 2)


def test_what_evaluation_returns_is_looked_at_too():
    """What comes first behind the first step has no other ranks to ask."""

    def build_model(*args, **kwargs):
        model = mlp.build_model(*args, **kwargs)
        other = lambda module, args, output: output if module.training else (None, {"lm los": output[1]["lm loss"]})
        model.register_forward_hook(other)
        return model

    with pytest.raises(SettingsError, match='the sum "lm los", which .* did you mean lm loss'):
        train(replace(mlp.recipe(), build_model=build_model), "--eval-iters 1")


# ---- tables of weights -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Haunted(mlp.MLPFacts):
    """Lists a weight that no module creates."""

    def layer_weights(self, kind, sequence_parallel):
        return super().layer_weights(kind, sequence_parallel) | {"ghost.weight": Placement((3,), Constant(1.0))}


@pytest.mark.parametrize("more", ["", f"--preflight --world-size 2 {PP}"])
def test_a_weight_that_no_module_creates(more, monkeypatch):
    facts = lambda config, vocab_size: Haunted(config.model, vocab_size, config.extra["mlp"].mlp_window)
    haunted = replace(mlp.recipe(), facts=facts)
    monkeypatch.setattr(mlp, "recipe", lambda: haunted)
    with pytest.raises(SettingsError, match=r"blocks\.0\.ghost\.weight.* no module creates") as found:
        train(haunted, more)
    assert "please report" not in str(found.value)
