# SPDX-License-Identifier: Apache-2.0
"""Structured pruning against a decoder in plain torch with a gate for each head and each channel of an MLP: closed gates
for what was pruned, and the gradients of the gates for its importance.
"""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert.imported import imported_state
from megatron.data.indexed import write_index
from megatron.errors import DataError, SettingsError, UsageError
from megatron.inference import prune as networks
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.quantization import skipped_layers
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model
from megatron.tools import prune, sensitivity
from tests.training.test_plain_loop import FLAGS, SIX

HIDDEN, HEAD, FFN_SIZE, VOCABULARY, LENGTH = 24, 6, 20, 50, 10
GPT2 = Model(
    4, HIDDEN, 6, seq_length=LENGTH, ffn_hidden_size=FFN_SIZE, kv_channels=HEAD, make_vocab_size_divisible_by=1
)
LLAMA = replace(
    GPT2,
    num_query_groups=3,
    group_query_attention=True,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    untie_embeddings_and_output_weights=True,
)
GATED = replace(GPT2, swiglu=True, qk_layernorm=True)  # biases of a gated MLP
MODELS = dict(gpt2=GPT2, llama=LLAMA, gated=GATED)
TEXT = torch.randint(VOCABULARY, (2 * LENGTH + 1,), generator=torch.Generator().manual_seed(3))
SAMPLES = torch.stack([TEXT[: LENGTH + 1], TEXT[LENGTH:]])
TOKENS, TARGETS = SAMPLES[:, :-1], SAMPLES[:, 1:].flatten()


def weights_of(model: Model) -> dict[str, torch.Tensor]:
    """Values that depend on the name; no bias is 0, and units differ in size."""
    values = {}
    for name, placed in GPTFacts(model, VOCABULARY).weights.items():
        draw = torch.Generator().manual_seed(sum(map(ord, name)))
        values[name] = torch.randn(placed.shape, generator=draw) * 0.3 + (len(placed.shape) == 1 and "norm.w" in name)
    return values


def write(folder, model: Model, tensors: dict[str, torch.Tensor]) -> str:
    pieces = [Piece(name, tuple(one.shape), Box.whole(one.shape), one) for name, one in tensors.items()]
    with Saver(folder) as saver:
        saver.write(0, [pieces], imported_state(model, VOCABULARY, {}, "a test"))
    return str(folder)


class Plain:
    """A decoder: logits [b, s, v] of tokens [b, s], with gates of heads and channels, {layer: values}."""

    def __init__(self, model: Model, weights: dict[str, torch.Tensor]):
        self.model, self.weights = model, {name: one.double() for name, one in weights.items()}

    def norm(self, name: str, x):
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if self.model.normalization == "RMSNorm":
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    def linear(self, name: str, x, shape):
        """x times a fused weight, [..., *shape]."""
        y = torch.einsum("bsh,oh->bso", x, self.weights[f"{name}.weight"].flatten(0, -2))
        bias = self.weights.get(f"{name}.bias")
        return (y if bias is None else y + bias.flatten()).unflatten(-1, shape)

    def rotated(self, x):  # [b, s, heads, d]
        d, s = x.shape[-1], x.shape[1]
        angle = torch.arange(s)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)  # [s, d/2]
        first, second = x.double().chunk(2, -1)
        cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def logits(self, tokens, heads=None, channels=None, layers=None):
        m, w = self.model, self.weights
        x = w["embedding.word.weight"][tokens]
        if "embedding.position.weight" in w:
            x = x + w["embedding.position.weight"][: tokens.shape[1]]
        for n in range(m.num_layers) if layers is None else layers:
            x = x + self.attention(
                f"blocks.{n}.attention", self.norm(f"blocks.{n}.attention_norm", x), (heads or {}).get(n)
            )
            x = x + self.mlp(f"blocks.{n}.mlp", self.norm(f"blocks.{n}.mlp_norm", x), (channels or {}).get(n))
        table = w.get("output.weight", w["embedding.word.weight"])
        return self.norm("final_norm", x) @ table.T

    def attention(self, name: str, x, gates):  # gates [groups]
        m = self.model
        q = m.num_attention_heads // m.query_groups
        query, key, value = self.linear(f"{name}.qkv", x, (m.query_groups, q + 2, HEAD)).split([q, 1, 1], 3)
        if m.qk_layernorm:
            query, key = self.norm(f"{name}.q_norm", query), self.norm(f"{name}.k_norm", key)
        wide = lambda part: part.expand(-1, -1, -1, q, -1).flatten(2, 3)
        query, key, value = query.flatten(2, 3), wide(key), wide(value)  # [b, s, heads, d]
        if m.position_embedding_type == "rope":
            query, key = self.rotated(query), self.rotated(key)
        scores = torch.einsum("bshd,bthd->bhst", query, key) / HEAD**0.5
        s = scores.shape[-1]
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -torch.inf)
        attended = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value).unflatten(2, (m.query_groups, q))
        if gates is not None:
            attended = attended * gates[:, None, None]
        return self.linear(f"{name}.output", attended.flatten(2), (self.weights[f"{name}.output.weight"].shape[0],))

    def mlp(self, name: str, x, gates):
        m = self.model
        if m.gated:
            gate, up = self.linear(f"{name}.up", x, (2, -1)).unbind(2)
            y = F.silu(gate) * up
        else:
            y = F.gelu(self.linear(f"{name}.up", x, (-1,)), approximate="tanh")
        if gates is not None:
            y = y * gates
        return self.linear(f"{name}.down", y, (self.weights[f"{name}.down.weight"].shape[0],))


def importance(model: Model, weights, power: int):
    """{layer: of each group}, {layer: of each channel}, by loops over units."""
    heads, channels, q = {}, {}, model.num_attention_heads // model.query_groups
    size = lambda *parts: sum(part.double().abs().pow(power).sum() for part in parts if part is not None) ** (1 / power)
    for n in range(model.num_layers):
        own = lambda name, n=n: weights.get(f"blocks.{n}.{name}")
        qkv, bias, out = own("attention.qkv.weight"), own("attention.qkv.bias"), own("attention.output.weight")
        wide = q * HEAD
        heads[n] = torch.stack(
            [
                size(qkv[g], None if bias is None else bias[g], out[:, g * wide : (g + 1) * wide])
                for g in range(len(qkv))
            ]
        )
        up, bias, down = own("mlp.up.weight"), own("mlp.up.bias"), own("mlp.down.weight")
        channels[n] = torch.stack(
            [size(up[..., c, :], None if bias is None else bias[..., c], down[:, c]) for c in range(FFN_SIZE)]
        )
    return heads, channels


def closed(values: torch.Tensor, count: int) -> torch.Tensor:
    """1 for the `count` largest values, 0 for the others."""
    return (values >= values.sort(descending=True).values[count - 1]).double()


def taylor_by_hand(plain: Plain, samples):
    """The same by the gradients of gates."""
    m = plain.model
    of_heads, of_channels = ({n: 0 for n in range(m.num_layers)} for _ in range(2))
    layers = torch.zeros(m.num_layers, dtype=torch.float64)
    for sample in samples:
        ones = lambda size: {n: torch.ones(size, dtype=torch.float64, requires_grad=True) for n in range(m.num_layers)}
        heads, channels = ones(m.query_groups), ones(FFN_SIZE)
        scores = plain.logits(sample[None, :-1], heads, channels)
        F.cross_entropy(scores[0], sample[1:]).backward()
        for n in range(m.num_layers):
            of_heads[n] += heads[n].grad ** 2
            of_channels[n] += channels[n].grad ** 2
            layers[n] += (heads[n].grad.sum() + channels[n].grad.sum()) ** 2
    return of_heads, of_channels, layers


def token_file(folder, text) -> str:
    prefix = str(folder / "calibration")
    tokens = np.asarray(text).astype(np.uint16)
    tokens.tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.uint16, np.array([len(tokens)]), np.array([0, 1]))
    return prefix


def run(capsys, *words: str) -> str:
    prune.main(list(map(str, words)))
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "kind, criterion", [("gpt2", "l1_norm"), ("gated", "l2_norm"), *((kind, "taylor") for kind in MODELS)]
)
def test_the_smaller_model_is_the_larger_one_with_closed_gates(kind, criterion, tmp_path, capsys):
    model, weights = MODELS[kind], weights_of(MODELS[kind])
    plain, folder, more = Plain(model, weights), write(tmp_path / "large", model, weights), []
    if criterion == "taylor":
        heads, channels, _ = taylor_by_hand(plain, SAMPLES)
        more = ["--calibration-data", token_file(tmp_path, TEXT), "--seq-length", LENGTH, "--calib-size", 2]
    else:
        heads, channels = importance(model, weights, 1 if criterion == "l1_norm" else 2)
    said = run(
        capsys,
        "--load",
        folder,
        "--save",
        tmp_path / "small",
        "--prune-ratio",
        0.3,
        "--prune-criterion",
        criterion,
        *more,
    )
    groups, width = (4, 14) if model.query_groups == 6 else (2, 14)
    found = load_model(str(tmp_path / "small"))
    small = found.config.model
    assert (small.query_groups, small.ffn_size, small.head_dim, small.hidden_size) == (groups, width, HEAD, HIDDEN)
    assert small.num_attention_heads == groups * model.num_attention_heads // model.query_groups
    gates = [{n: closed(values[n], count) for n in values} for values, count in ((heads, groups), (channels, width))]
    wanted = plain.logits(TOKENS, *gates)
    logits = found.model.logits(TOKENS.T).transpose(0, 1).double()
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-4)
    assert (plain.logits(TOKENS) - wanted).abs().max() > 0.1
    count = sum(parameter.numel() for parameter in found.model.parameters())
    assert f"-> {count:,} parameters" in said


@pytest.mark.parametrize("criterion", ["l1_norm", "l2_norm", "taylor"])
def test_importance_is_that_of_loops_over_units_and_layers(criterion, tmp_path):
    """Their numbers, not only their order; a layer's is that of all its heads and channels together."""
    weights, power = weights_of(LLAMA), dict(l1_norm=1, l2_norm=2).get(criterion)
    network = networks.Network(replace(parse_any(f"{FLAGS} {SIX}".split()), model=LLAMA), VOCABULARY)
    if power:
        found, (heads, channels) = networks.norms(network, weights.get, criterion), importance(LLAMA, weights, power)
        both = zip(heads.values(), channels.values(), strict=True)
        layers = [torch.cat(one).pow(power).sum() ** (1 / power) for one in both]
    else:
        loaded = load_model(write(tmp_path / "large", LLAMA, weights))
        found = networks.taylor(network, loaded, SAMPLES.numpy())
        mean = lambda one: {n: values / len(SAMPLES) for n, values in one.items()}
        heads, channels, layers = taylor_by_hand(Plain(LLAMA, weights), SAMPLES)
        heads, channels, layers = mean(heads), mean(channels), layers / len(SAMPLES)
    for n in range(4):
        torch.testing.assert_close(found.units["heads", f"blocks.{n}.attention"], heads[n], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(found.units["ffn", f"blocks.{n}.mlp"], channels[n], rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(found.layers, torch.as_tensor(layers), rtol=1e-4, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize("power", [1, 2])
def test_channels_of_experts_count_once_in_their_layer(power):
    """A layer's importance is that of heads and experts; MLP channels of experts are parts of these."""
    model = replace(GPT2, num_layers=2, num_experts=4, moe_ffn_hidden_size=8)
    network = networks.Network(replace(parse_any(f"{FLAGS} {SIX}".split()), model=model), VOCABULARY)
    draw = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(one.shape, generator=draw) for name, one in network.table.items()}
    found = networks.norms(network, weights.get, f"l{power}_norm")
    for n in range(2):
        parts = [
            values for (kind, own), values in found.units.items() if own.startswith(f"blocks.{n}") and kind != "ffn"
        ]
        assert sorted(map(len, parts)) == [4, 6]
        assert found.layers[n].item() == pytest.approx(torch.cat(parts).pow(power).sum().item() ** (1 / power))
        experts = [x.flatten(1) for name, x in weights.items() if name.startswith(f"blocks.{n}.mlp.experts.")]
        router = [weights[f"blocks.{n}.mlp.router.{one}"].view(4, -1) for one in ("weight", "bias")]
        of_each = torch.cat([*experts, *router], 1).double().abs().pow(power).sum(1) ** (1 / power)
        torch.testing.assert_close(found.units["experts", f"blocks.{n}"], of_each)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("criterion", ["l2_norm", "taylor"])
def test_layers_go_by_importance_or_as_listed(criterion, tmp_path, capsys):
    weights = weights_of(LLAMA)
    plain, folder = Plain(LLAMA, weights), write(tmp_path / "large", LLAMA, weights)
    more = []
    if criterion == "taylor":
        layers = taylor_by_hand(plain, SAMPLES)[2]
        more = ["--data-path", token_file(tmp_path, TEXT), "--seq-length", LENGTH]
    else:
        layers = torch.tensor(
            [sum((values[n] ** 2).sum() for values in importance(LLAMA, weights, 2)) for n in range(4)]
        )
    stay = sorted(layers.sort(descending=True).indices[:3].tolist())
    words = ["--load", folder, "--prune-criterion", criterion, *more]
    said = run(capsys, *words, "--save", tmp_path / "three", "--target-num-layers", 3)
    assert f"layers that went: {({0, 1, 2, 3} - set(stay)).pop()}\n" in said
    run(capsys, *words, "--save", tmp_path / "two", "--prune-layers", 2, 0, "--target-ffn-hidden-size", 12)
    for name, kept in dict(three=stay, two=[1, 3]).items():
        found = load_model(str(tmp_path / name))
        logits = found.model.logits(TOKENS.T).transpose(0, 1).double()
        assert found.config.model.num_layers == len(kept)
        if name == "three":
            torch.testing.assert_close(logits, plain.logits(TOKENS, layers=kept), atol=1e-5, rtol=1e-4)


def test_hidden_channels_go_everywhere(tmp_path, capsys):
    """In the tables, in norms, and on the side of each matrix that reads or writes the hidden states."""
    weights = weights_of(GPT2)
    folder = write(tmp_path / "large", GPT2, weights)
    run(capsys, "--load", folder, "--save", tmp_path / "small", "--target-hidden-size", 16)
    dims = {
        "embedding.word.weight": 1,
        "embedding.position.weight": 1,
        "qkv.weight": 3,
        "output.weight": 0,
        "output.bias": 0,
    }
    dims |= {"up.weight": 1, "down.weight": 0, "down.bias": 0, "norm.weight": 0, "norm.bias": 0}
    touched = {name: dim for name in weights for end, dim in dims.items() if name.endswith(end)}
    sizes = sum(
        weights[name].double().abs().movedim(dim, 0).reshape(HIDDEN, -1).sum(1) for name, dim in touched.items()
    )
    kept = sizes.sort(descending=True).indices[:16].sort().values
    cut = {name: one.index_select(touched[name], kept) if name in touched else one for name, one in weights.items()}
    with Reader(tmp_path / "small" / "iter_0000000") as reader:
        assert {name: reader.tensors[name].shape for name in cut} == {
            name: tuple(one.shape) for name, one in cut.items()
        }
        assert all(torch.equal(reader.read(name), one) for name, one in cut.items())
    found = load_model(str(tmp_path / "small"))
    logits = found.model.logits(TOKENS.T).transpose(0, 1).double()
    torch.testing.assert_close(logits, Plain(GPT2, cut).logits(TOKENS), atol=1e-5, rtol=1e-4)


REFUSED = {
    "--prune-ratio 1": "--prune-ratio 1 has to be above 0 and below 1",
    "--prune-ratio 0.95": "--prune-ratio 0.95 would leave 0 of the 3 key-value groups of 2 heads",
    "--prune-ratio 0.02": "--prune-ratio 0.02 takes nothing from 3 key-value groups of 2 heads and 20 MLP channels",
    "--target-num-layers 5": "--target-num-layers would leave 5 of the 4 layers",
    "--target-num-layers 2 --prune-layers 1": "--prune-layers leaves 3 layers, and --target-num-layers says 2",
    "--prune-layers 4": "--prune-layers: there is no layer 4",
    "--prune-layers 0 1 2 3": "--prune-layers would leave 0 of the 4 layers",
    "--target-num-attention-heads 3": "--target-num-attention-heads 3 is no multiple of the 2 heads that share keys",
    "--target-num-attention-heads 2 --target-num-query-groups 2": "--target-num-query-groups 2: each group has 2 heads",
    "--prune-ratio 0.25 --tp 2": "15 ffn; --tensor-model-parallel-size 2 does not divide it",
    "--prune-ratio 0.3 --prune-skip hedas": "--prune-skip: 'hedas' is neither heads nor ffn; did you mean heads?",
}


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path):
    folder, out = write(tmp_path / "large", LLAMA, weights_of(LLAMA)), tmp_path / "small"
    for words, said in REFUSED.items():
        with pytest.raises(SettingsError) as error:
            prune.main(f"--load {folder} --save {out} {words}".split())
        assert said in str(error.value)
    with pytest.raises(UsageError, match="nothing is to go"):
        prune.main(f"--load {folder} --save {out}".split())
    with pytest.raises(UsageError, match="needs --calibration-data"):
        prune.main(f"--load {folder} --save {out} --prune-ratio 0.3 --prune-criterion taylor".split())
    with pytest.raises(SettingsError, match="large is there already"):
        prune.main(f"--load {folder} --save {folder} --prune-ratio 0.3".split())
    assert not out.exists()
    windows = replace(LLAMA, window_size="4,0", window_attn_skip_freq=2)
    write(tmp_path / "windows", windows, weights_of(windows))
    with pytest.raises(SettingsError, match="layer 2 would become layer 1, and that is another kind of layer"):
        prune.main(f"--load {tmp_path / 'windows'} --save {out} --prune-layers 1".split())
    prune.main(f"--load {tmp_path / 'windows'} --save {out} --prune-layers 0 1".split())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, kinds",
    [
        ("--prune-ratio 0.3", ["heads", "ffn"]),
        ("--prune-ratio 0.3 --prune-criterion taylor --calibration-samples 2", ["heads", "ffn"]),
        ("--drop-layers", ["layer"]),
        ("--sparsity 0.5", ["attention.output"]),
    ],
)
def test_sensitivity_is_the_loss_of_gates_closed_in_one_place(flags, kinds, tmp_path):
    weights = weights_of(LLAMA)
    folder, text = write(tmp_path / "large", LLAMA, weights), token_file(tmp_path, TEXT)
    words = f"--load {folder} --data-path {text} --device cpu --output {tmp_path / 'found.json'} {flags}"
    sensitivity.main(words.split())
    found = json.loads((tmp_path / "found.json").read_text())
    plain, values = Plain(LLAMA, weights), importance(LLAMA, weights, 1)
    if "taylor" in flags:
        values = taylor_by_hand(plain, SAMPLES)[:2]
    loss = lambda plain, *gates, **more: F.cross_entropy(
        plain.logits(TOKENS, *gates, **more).flatten(0, 1), TARGETS
    ).item()
    wanted = {}
    for n in range(LLAMA.num_layers):
        wanted[f"blocks.{n}.heads"] = loss(plain, {n: closed(values[0][n], 2)})
        wanted[f"blocks.{n}.ffn"] = loss(plain, None, {n: closed(values[1][n], 14)})
        wanted[f"blocks.{n}.layer"] = loss(plain, layers=[other for other in range(LLAMA.num_layers) if other != n])
        own = weights[f"blocks.{n}.attention.output.weight"]
        zeros = own * (own.abs() > own.abs().flatten().kthvalue(own.numel() // 2).values)
        masked = Plain(LLAMA, {**weights, f"blocks.{n}.attention.output.weight": zeros})
        wanted[f"blocks.{n}.attention.output"] = loss(masked)
    assert found["loss"] == pytest.approx(loss(plain), abs=1e-5)
    names = [f"blocks.{n}.{kind}" for kind in kinds for n in range(LLAMA.num_layers)]
    for name in names:
        assert found["increase"][name] == pytest.approx(wanted[name] - loss(plain), abs=2e-5), name
    if "--prune-ratio" in flags:
        assert set(found["increase"]) == {*names} and set(found["skip"]) <= {"heads", "ffn"}


@pytest.mark.parametrize("length", [0, 1, LENGTH + 1])
def test_samples_are_as_long_as_the_model_can_look(length, tmp_path):
    folder, text = write(tmp_path / "large", LLAMA, weights_of(LLAMA)), token_file(tmp_path, TEXT)
    words = f"--load {folder} --save {tmp_path / 'small'} --prune-ratio 0.3 --prune-criterion taylor"
    words += f" --calibration-data {text} --seq-length {length}"
    if length:
        with pytest.raises(SettingsError, match=f"--seq-length {length}: the model can look at {LENGTH} tokens"):
            prune.main(words.split())
    else:
        prune.main(words.split())  # as if it were not given


def test_as_few_layers_as_possible_are_skipped():
    """Of all subsets; what makes a layer better does not pay for others. Sums of 0.1, 0.2 and 0.7 are not exact."""
    dyadic = itertools.product((0.0, 0.125, 0.25, 0.5, 4.0), *[(-0.5, 0.0, 0.125, 0.25)] * 3)
    decimal = itertools.product((0.0, 0.15, 0.35), *[(-0.5, 0.0, 0.1, 0.2, 0.7)] * 3)
    for budget, *growths in itertools.chain(dyadic, decimal):
        layers = dict(zip("abc", growths, strict=True))
        left = lambda skip, layers=layers: sum(max(0.0, one) for name, one in layers.items() if name not in skip)
        subsets = [subset for size in range(4) for subset in itertools.combinations(layers, size)]
        found = sensitivity.Sensitivity("int4", 3.0, layers).skip(budget)
        assert left(found) <= budget and len(found) == min(len(one) for one in subsets if left(one) <= budget)


def test_what_is_too_little_for_the_ratio_is_named(tmp_path, capsys):
    folder = write(tmp_path / "large", LLAMA, weights_of(LLAMA))
    words = f"--load {folder} --save {tmp_path / 'small'} --prune-ratio 0.1".split()
    prune.main(words)
    assert "takes nothing from 3 key-value groups of 2 heads: all of them stay" in capsys.readouterr().err
    with pytest.raises(UsageError, match="missing: --save"):
        prune.main([*words[:2], *words[4:]])


def test_what_is_printed_fine_tunes_with_the_file_of_the_larger_model(tmp_path, capsys):
    """PaddleFleetX's file has the sizes of the larger model: the words that are printed change them, and the rest."""
    folder = write(tmp_path / "large", GPT2, weights_of(GPT2))
    keys = dict(num_layers="num_layers", hidden_size="hidden_size", num_attention_heads="num_attention_heads")
    sizes = ", ".join(f"{key}: {getattr(GPT2, name)}" for key, name in keys.items())
    (tmp_path / "run.yaml").write_text(f"Model: {{{sizes}, ffn_hidden_size: {GPT2.ffn_size}}}\n")
    words = f"-c {tmp_path / 'run.yaml'} --load {folder} --save {tmp_path / 'small'} --prune-ratio 0.5".split()
    prune.main(words)
    said = capsys.readouterr().out.strip().splitlines()[-1]
    assert said.startswith("fine-tune it with the same -c, --load") and "-o Model.ffn_hidden_size=" in said
    saved = load_model(str(tmp_path / "small"), device=torch.device("cpu")).config.model
    own = parse_pretrain([*words[:2], *said.partition("sizes: ")[2].split()]).model
    for name in "num_layers hidden_size num_attention_heads kv_channels ffn_hidden_size".split():
        assert getattr(own, name) == getattr(saved, name), name


def test_a_file_of_the_sensitivity_tool_is_about_the_right_parts(tmp_path):
    files = {}
    for number, harm in enumerate(("int4", "--sparsity 2:4", "--prune-ratio 0.25", "--drop-layers")):
        files[harm] = str(tmp_path / f"{number}.json")
        Path(files[harm]).write_text(json.dumps(dict(skip=[], format=harm)))
    for flag, fitting in {
        "--prune-skip": ["--prune-ratio 0.25"],
        "--sparsity-skip": ["int4", "--sparsity 2:4"],
    }.items():
        for harm, file in files.items():
            if harm in fitting:
                assert skipped_layers(file, flag) == []
                continue
            with pytest.raises(DataError, match=f"{flag} .*json: tools.sensitivity has measured other parts"):
                skipped_layers(file, flag)


def test_kinds_that_the_sensitivity_tool_recommends_to_leave_alone(tmp_path):
    folder = write(tmp_path / "large", LLAMA, weights_of(LLAMA))
    (tmp_path / "found.json").write_text('{"skip": ["heads"]}')
    words = f"--load {folder} --save {tmp_path / 'small'} --prune-ratio 0.3 --prune-skip {tmp_path / 'found.json'}"
    prune.main(words.split())
    small = load_model(str(tmp_path / "small")).config.model
    assert (small.num_attention_heads, small.ffn_hidden_size) == (6, 14)
