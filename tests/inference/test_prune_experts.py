# SPDX-License-Identifier: Apache-2.0
"""Pruning of whole experts against a decoder in plain torch, from which the same experts are taken: by weights, by the
gradients of a gate on each expert's output, and by the tokens that choose it.
"""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import weights_alone
from megatron.errors import SettingsError, UsageError
from megatron.inference import prune as pruning
from megatron.inference.load import load_model
from megatron.inference.prune import Network, loads
from megatron.model.gpt.facts import GPTFacts
from megatron.model.recipe import config_of
from megatron.settings.schema import Model
from megatron.tools import prune
from tests.inference.test_prune import LENGTH, SAMPLES, TEXT, VOCABULARY, run, token_file, write
from tests.tasks.classification import CHOSEN, HEADS, HIDDEN, LAYERS, hidden

EXPERTS, LEFT = 6, 4
MIXTURE = Model(
    LAYERS,
    HIDDEN,
    HEADS,
    seq_length=LENGTH,
    num_experts=EXPERTS,
    moe_router_topk=CHOSEN,
    moe_ffn_hidden_size=10,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="softmax",
    make_vocab_size_divisible_by=1,
)


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """Values that depend on the name. The expert bias is one that chooses nothing else; loads are no weights."""
    values = {}
    for name, placed in GPTFacts(model, VOCABULARY).weights.items():
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        values[name] = torch.randn(placed.shape, generator=draw) * 0.3 + (len(placed.shape) == 1 and "norm.w" in name)
        if placed.buffer is not None:
            values[name] = torch.zeros(placed.shape, dtype=getattr(torch, placed.buffer.dtype or "float32"))
        if name.endswith("router.load"):
            values[name] = torch.randint(1000, placed.shape, generator=draw)
    return values


def logits(weights, text, gates=None, routed=None) -> torch.Tensor:
    """Of each token, [n, v]. gates: by layer, [E], on the outputs of experts"""
    weights = {name: values.double() for name, values in weights.items()}
    for n, gate in (gates or {}).items():
        for part, dims in (("weight", (-1, 1, 1)), ("bias", (-1, 1))):
            name = f"blocks.{n}.mlp.experts.down.{part}"
            weights[name] = weights[name] * gate.view(dims)
    return hidden(weights, list(text), LAYERS, routed) @ weights["embedding.word.weight"].T


def importance(weights, criterion: str) -> dict[int, torch.Tensor]:
    """Of each expert, by layer."""
    found = {n: torch.zeros(EXPERTS, dtype=torch.float64) for n in range(LAYERS)}
    if criterion.endswith("norm"):
        power = 1 if criterion == "l1_norm" else 2
        for n in found:
            names = [f"mlp.experts.{matrix}.{part}" for matrix in ("up", "down") for part in ("weight", "bias")]
            for name in ["mlp.router.weight", "mlp.router.bias", *names]:
                found[n] += weights[f"blocks.{n}.{name}"].double().abs().pow(power).view(EXPERTS, -1).sum(1)
        return found
    for sample in SAMPLES.tolist():
        gates = {n: torch.ones(EXPERTS, dtype=torch.float64, requires_grad=True) for n in found}
        routed = []
        scores = logits(weights, sample[:-1], gates, routed)
        F.cross_entropy(scores, torch.tensor(sample[1:])).backward()
        for n in found:
            counts = torch.bincount(routed[n].topk(CHOSEN, -1).indices.flatten(), minlength=EXPERTS)
            found[n] += counts if criterion == "load" else gates[n].grad ** 2
    return found


def without(weights, kept: dict[int, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without the experts that go."""
    of_layer = {f"blocks.{n}.mlp.": experts for n, experts in kept.items()}
    cut = {name: experts for name in weights for layer, experts in of_layer.items() if name.startswith(layer)}
    return {name: values[cut[name]] if name in cut else values for name, values in weights.items()}


@pytest.mark.parametrize("criterion", ["l1_norm", "l2_norm", "taylor", "load"])
def test_the_smaller_model_has_the_most_important_experts(criterion, tmp_path, capsys):
    weights = weights_of(MIXTURE)
    folder, more = write(tmp_path / "large", MIXTURE, weights), []
    if criterion in ("taylor", "load"):
        more = ["--calibration-data", token_file(tmp_path, TEXT), "--seq-length", LENGTH, "--calib-size", 2]
    words = [
        "--load",
        folder,
        "--save",
        tmp_path / "small",
        "--target-num-experts",
        LEFT,
        "--prune-criterion",
        criterion,
    ]
    said = run(capsys, *words, *more)
    assert f"experts {EXPERTS} -> {LEFT}" in said and f"--num-experts {LEFT}" in said
    values = importance(weights, criterion)
    kept = {n: own.sort(descending=True, stable=True).indices[:LEFT].sort().values for n, own in values.items()}
    found = load_model(str(tmp_path / "small"))
    assert found.config.model.num_experts == LEFT
    for sample in SAMPLES[:, :-1]:
        wanted = logits(without(weights, kept), sample.tolist())
        torch.testing.assert_close(found.model.logits(sample[:, None])[:, 0].double(), wanted, atol=1e-5, rtol=1e-4)
    other = {n: torch.arange(EXPERTS - LEFT, EXPERTS) for n in kept}
    assert (wanted - logits(without(weights, other), sample.tolist())).abs().max() > 0.01


def test_channels_go_in_all_experts_and_layers_by_the_sum_of_their_units(tmp_path, capsys):
    """Experts of the MLP's width: the same channels of each."""
    model = replace(MIXTURE, moe_ffn_hidden_size=None, ffn_hidden_size=10)
    weights = weights_of(model)
    folder = write(tmp_path / "large", model, weights)
    run(capsys, "--load", folder, "--save", tmp_path / "small", "--target-ffn-hidden-size", 7)
    cut = dict(weights)
    for n in range(LAYERS):
        own = {name: weights[f"blocks.{n}.mlp.experts.{name}"] for name in ("up.weight", "up.bias", "down.weight")}
        dims = {"up.weight": 1, "up.bias": 1, "down.weight": 2}
        sizes = sum(values.double().abs().movedim(dims[name], 0).flatten(1).sum(1) for name, values in own.items())
        kept = sizes.sort(descending=True).indices[:7].sort().values
        cut |= {f"blocks.{n}.mlp.experts.{name}": one.index_select(dims[name], kept) for name, one in own.items()}
    sample = SAMPLES[0, :-1]
    found = load_model(str(tmp_path / "small")).model.logits(sample[:, None])[:, 0].double()
    torch.testing.assert_close(found, logits(cut, sample.tolist()), atol=1e-5, rtol=1e-4)
    run(capsys, "--load", folder, "--save", tmp_path / "one", "--target-num-layers", 1, "--prune-criterion", "l2_norm")
    squares = [0.0] * LAYERS
    for name, values in weights.items():
        part = name.partition(".")[2].partition(".")[2]
        if part.startswith(("attention.", "mlp.")) and part not in ("attention.output.bias", "mlp.router.load"):
            squares[int(name.split(".")[1])] += values.double().square().sum().item()
    left = squares.index(max(squares))
    with Reader(tmp_path / "one" / "iter_0000000") as reader:
        name = "mlp.router.weight"
        assert torch.equal(reader.read(f"blocks.0.{name}"), weights[f"blocks.{left}.{name}"])
    with Reader(tmp_path / "large" / "iter_0000000") as reader:
        network = pruning.Network(config_of(reader.state["config"]), VOCABULARY)
        found = pruning.norms(network, reader.read, "l2_norm").layers
    assert found.square().tolist() == pytest.approx(squares)


def test_loads_are_of_all_samples(tmp_path):
    weights = weights_of(MIXTURE)
    loaded = load_model(write(tmp_path / "large", MIXTURE, weights))
    found = pruning.loads(pruning.Network(loaded.config, VOCABULARY), loaded, SAMPLES.numpy()).units
    wanted = importance(weights, "load")
    assert {owner: own.tolist() for (_, owner), own in found.items()} == {
        f"blocks.{n}": own.tolist() for n, own in wanted.items()
    }


def test_a_pruned_checkpoint_needs_no_base():
    """The weights of its frozen layers are its own."""
    state = dict(config=dict(model=asdict(MIXTURE), seed=3), base="elsewhere", iteration=7, optimizer_steps=5)
    smaller = replace(MIXTURE, num_experts=LEFT)
    wanted = dict(config=dict(model=asdict(smaller), seed=3), iteration=7, optimizer_steps=None)
    assert weights_alone(pruning.pruned_state(state, smaller)) == wanted


@pytest.mark.sampled(2)
def test_gates_are_on_the_outputs_of_experts(tmp_path):
    weights = weights_of(MIXTURE)
    loaded = load_model(write(tmp_path / "large", MIXTURE, weights))
    found = pruning.taylor(pruning.Network(loaded.config, VOCABULARY), loaded, SAMPLES.numpy()).units
    for n, wanted in importance(weights, "taylor").items():
        torch.testing.assert_close(found["experts", f"blocks.{n}"], wanted / len(SAMPLES), rtol=1e-3, atol=1e-9)


REFUSED = {
    "--target-num-experts 7": "--target-num-experts would leave 7 of the 6 experts",
    "--target-num-experts 1": "--target-num-experts 1: each token goes to 2 experts",
    "--prune-ratio 0.5": "give --prune-skip ffn: all MLPs are experts of another width",
    "--target-num-experts 4 --target-num-layers 1 --prune-criterion load --calibration-data {text}": "of experts alone",
}


def test_what_cannot_be_is_said(tmp_path):
    folder, text = write(tmp_path / "large", MIXTURE, weights_of(MIXTURE)), token_file(tmp_path, TEXT)
    for words, said in REFUSED.items():
        with pytest.raises(SettingsError) as error:
            prune.main(f"--load {folder} --save {tmp_path / 'small'} {words.format(text=text)}".split())
        assert said in str(error.value)
    with pytest.raises(UsageError, match="load needs --calibration-data"):
        prune.main(f"--load {folder} --save {tmp_path / 'small'} --target-num-experts 4 --prune-criterion load".split())
    dense = replace(MIXTURE, num_experts=None)
    dense_folder = write(tmp_path / "dense", dense, weights_of(dense))
    with pytest.raises(SettingsError, match="--target-num-experts 4: the model has no experts"):
        prune.main(f"--load {dense_folder} --save {tmp_path / 'small'} --target-num-experts 4".split())
    assert not (tmp_path / "small").exists()


def test_a_failed_pass_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    loaded = load_model(write(tmp_path / "large", MIXTURE, weights_of(MIXTURE)))
    hooks = lambda: [module for module in loaded.model.modules() if module._forward_hooks]
    before, found = hooks(), []
    monkeypatch.setattr(loaded.model, "logits", lambda *_, **__: found.extend(hooks()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loads(Network(loaded.config, loaded.vocab_size), loaded, SAMPLES.numpy())
    assert hooks() == before and len(found) == len(before) + LAYERS
