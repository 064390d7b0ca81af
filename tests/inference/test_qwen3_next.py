# SPDX-License-Identifier: Apache-2.0
"""Qwen3-Next against transformers' own, over more than two chunks of its delta rule: logits, gradients, each packed
document alone; what its files may say; the published shape. `test_families.py` has its short texts, and its tensors.
"""

import warnings
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from megatron.convert.families import imported
from megatron.data.loader import MicroBatch
from megatron.errors import CheckpointError
from megatron.fused_kernels.documents import starts_of
from megatron.inference.load import load_model
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_settings import our_settings
from megatron.settings.decoder_shapes import DECODERS
from megatron.tools import checkpoint as tool
from tests.fused_kernels.test_delta_rule import recurrence
from tests.inference.test_families import COMMON, QWEN3_NEXT, V, gradients_by_name

transformers = pytest.importorskip("transformers")
modeling_qwen3_next = import_module("transformers.models.qwen3_next.modeling_qwen3_next")

S, B = 151, 2  # chunks of 64: two and a part of one
BOUND = 2e-5  # of the largest value
BEGINS = [0, 1, 63, 64, 70, 128, 150]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(transformers' model, its folder, the checkpoint that we import)."""
    folder, generator = tmp_path_factory.mktemp("qwen3_next"), torch.Generator().manual_seed(7)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(
            "qwen3_next", **COMMON | QWEN3_NEXT | dict(max_position_embeddings=256)
        )
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.05 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    theirs.save_pretrained(folder / "theirs")
    tool.main(["from-hf", str(folder / "theirs"), str(folder / "ours")])
    return theirs, folder / "theirs", folder / "ours"


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(V, (S, B), generator=torch.Generator().manual_seed(seed))


def token_by_token(query, key, value, g, beta, **more):
    """Their rule as a recurrence in fp64."""
    first = lambda x: x.transpose(0, 1).double()  # [s, b, heads, ...]
    heads = lambda x: first(x).unflatten(2, (key.shape[2], -1))
    o, _ = recurrence(first(query), first(key), heads(value), heads(g), heads(beta))
    return o.flatten(2, 3).transpose(0, 1).to(value.dtype), None


def test_logits(pair):
    theirs, _, ours = pair
    with torch.no_grad():
        want = theirs(tokens(1).t()).logits.transpose(0, 1)
        assert (load_model(str(ours)).model.logits(tokens(1)) - want).abs().max() < BOUND * want.abs().max()


def test_gradients(pair, tmp_path, monkeypatch):
    """Of their network with its rule token by token in fp64: in their chunks, gradients of decay rates are sums that
    cancel, and lose up to 5 of 100 of themselves; ours are within 6e-6 of fp64.
    """
    theirs, _, ours = pair
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", token_by_token)
    model, inputs, labels = load_model(str(ours)).model.train(), tokens(1), tokens(2)
    theirs.zero_grad()
    want = theirs(inputs.t(), use_cache=False).logits.transpose(0, 1)
    F.cross_entropy(want.reshape(-1, V), labels.reshape(-1)).backward()
    sums = model(None, MicroBatch(inputs, labels, torch.arange(B)))[1]
    (sums["lm loss"] / sums["tokens"]).backward()
    found, wanted = dict(model.named_parameters()), gradients_by_name(theirs, tmp_path)
    matches = [match for match in imported(theirs.config.to_dict()).matches if match.ours in found]
    assert len(matches) == len(found)
    for match in matches:
        parts = [wanted.get(name).double() for name in match.theirs]  # 1 + weight has no digits of a small gradient
        want = match.to_ours(parts) - match.to_ours([torch.zeros_like(part) for part in parts])
        error = (found[match.ours].grad[: len(want)] - want).abs().max() / want.abs().max()
        assert error < BOUND, f"{match.ours}: {error:.1e}"


def test_each_document_alone(pair):
    """Documents of one token, around the edges of chunks: packed, they are what transformers computes of each alone."""
    theirs, _, ours = pair
    model, inputs = load_model(str(ours)).model, tokens(3)
    ids = torch.bucketize(torch.arange(S), torch.tensor(BEGINS), right=True).int().unsqueeze(1).expand(S, B)
    places = torch.arange(S) - torch.from_numpy(starts_of(ids))[0]
    named = dict(document_ids=ids.contiguous(), position_ids=places.unsqueeze(1).expand(S, B))
    batch = MicroBatch(inputs, inputs, torch.arange(B), **named)
    with torch.no_grad():
        alone = [theirs(part.t()).logits.transpose(0, 1) for part in inputs.tensor_split(BEGINS[1:])]
        got = model.logits_of(batch)(slice(0, S * B)).view(S, B, -1)[..., :V]
    want = torch.cat(alone)
    assert (got - want).abs().max() < BOUND * want.abs().max()


def test_decay_rates_are_fp32_in_bf16_files(pair, tmp_path):
    """A rate of 0.01 is log -4.6: bf16 would give 0.0099."""
    tool.main(["to-hf", str(pair[2]), str(tmp_path / "out")])
    from safetensors.torch import load_file

    files = load_file(tmp_path / "out" / "model.safetensors")
    own = pair[0].model.layers[0].linear_attn
    assert files["model.layers.0.linear_attn.in_proj_qkvz.weight"].dtype == torch.bfloat16
    assert torch.equal(files["model.layers.0.linear_attn.A_log"], own.A_log)
    assert torch.equal(files["model.layers.0.linear_attn.dt_bias"], own.dt_bias)


PUBLISHED = dict(  # Qwen3-Next-80B-A3B-Instruct, as published
    model_type="qwen3_next",
    attention_bias=False,
    attention_dropout=0.0,
    decoder_sparse_step=1,
    full_attention_interval=4,
    head_dim=256,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    mlp_only_layers=[],
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=512,
    num_experts_per_tok=10,
    num_hidden_layers=48,
    num_key_value_heads=2,
    partial_rotary_factor=0.25,
    rms_norm_eps=1e-06,
    rope_scaling=None,
    rope_theta=10000000,
    shared_expert_intermediate_size=512,
    tie_word_embeddings=False,
    vocab_size=151936,
)


def test_the_published_model():
    """80 billion parameters, 3 billion of which a token uses."""
    _, model, rows = our_settings(PUBLISHED)
    facts = GPTFacts(model, rows)
    assert 79e9 < facts.parameters < 80e9 and 3.5e9 < facts.active_parameters < 4e9
    assert [model.is_linear(n) for n in range(5)] == [True, True, True, False, True]
    shape = DECODERS["qwen3-next-80b-a3b"]
    assert {name: getattr(model, name) for name in shape} == shape


@pytest.mark.parametrize(
    "changed, message",
    [
        (
            dict(layer_types=["linear_attention"] * 3),
            "layer_types in config.json are linear_attention, .* of 48 layers",
        ),
        (dict(layer_types=["sliding_attention"] * 48), "layer_types in config.json are sliding_attention"),
        (dict(attention_bias=True), "attention_bias True in config.json cannot be expressed here"),
    ],
)
def test_other_files_are_refused(changed, message):
    with pytest.raises(CheckpointError, match=message):
        our_settings(PUBLISHED | changed)
