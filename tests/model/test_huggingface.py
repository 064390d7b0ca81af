# SPDX-License-Identifier: Apache-2.0
"""The same weights in Hugging Face's GPT-2 and Llama give the same logits, loss and gradients."""

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

H, HEADS, LAYERS, S, V, FFN = 32, 4, 2, 16, 100, 96
D = H // HEADS


def gpt2_in_our_names(theirs: dict) -> dict:
    """Parameters (or their gradients) of GPT2LMHeadModel under our names and in our shapes."""
    ours = {
        "embedding.word.weight": theirs["transformer.wte.weight"],
        "embedding.position.weight": theirs["transformer.wpe.weight"],
        "final_norm.weight": theirs["transformer.ln_f.weight"],
        "final_norm.bias": theirs["transformer.ln_f.bias"],
    }
    pieces = dict(attention_norm="ln_1", mlp_norm="ln_2")
    linears = {"attention.output": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    for n in range(LAYERS):
        get = lambda name, kind, n=n: theirs[f"transformer.h.{n}.{name}.{kind}"]
        for kind in ("weight", "bias"):
            for mine, name in pieces.items():
                ours[f"blocks.{n}.{mine}.{kind}"] = get(name, kind)
            for mine, name in linears.items():
                ours[f"blocks.{n}.{mine}.{kind}"] = get(name, kind).t() if kind == "weight" else get(name, kind)
        qkv = get("attn.c_attn", "weight").view(H, 3, HEADS, D)  # ours is [heads, q k v, d, h]
        ours[f"blocks.{n}.attention.qkv.weight"] = qkv.permute(2, 1, 3, 0)
        ours[f"blocks.{n}.attention.qkv.bias"] = get("attn.c_attn", "bias").view(3, HEADS, D).transpose(0, 1)
    return ours


def llama_in_our_names(theirs: dict, groups: int) -> dict:
    """Parameters (or their gradients) of LlamaForCausalLM under our names and in our shapes."""
    ours = {
        "embedding.word.weight": theirs["model.embed_tokens.weight"],
        "final_norm.weight": theirs["model.norm.weight"],
        "output.weight": theirs["lm_head.weight"],
    }
    for n in range(LAYERS):
        get = lambda name, n=n: theirs[f"model.layers.{n}.{name}.weight"]
        ours[f"blocks.{n}.attention_norm.weight"] = get("input_layernorm")
        ours[f"blocks.{n}.mlp_norm.weight"] = get("post_attention_layernorm")
        q, k, v = (get(f"self_attn.{x}_proj").view(groups, -1, D, H) for x in "qkv")
        ours[f"blocks.{n}.attention.qkv.weight"] = torch.cat((q, k, v), 1)
        ours[f"blocks.{n}.attention.output.weight"] = get("self_attn.o_proj")
        ours[f"blocks.{n}.mlp.up.weight"] = torch.stack((get("mlp.gate_proj"), get("mlp.up_proj")))
        ours[f"blocks.{n}.mlp.down.weight"] = get("mlp.down_proj")
    return ours


def assert_same_model(ours, theirs, renamed, batch):
    """Fill `ours` from `theirs`; compare logits, loss and the gradient of every parameter."""
    generator = torch.Generator().manual_seed(3)
    for parameter in theirs.parameters():  # biases and norms that matter, too
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    parameters = dict(ours.named_parameters())
    weights = renamed({name: p.detach() for name, p in theirs.named_parameters()})
    assert set(parameters) == set(weights)
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name][tuple(slice(n) for n in weight.shape)] = weight
    micro = batch(S, 3)
    want = theirs(micro.tokens.t()).logits
    torch.testing.assert_close(ours.logits(micro.tokens), want.transpose(0, 1), rtol=1e-4, atol=1e-4)
    loss, count = ours(None, micro)[1].values()
    expected = F.cross_entropy(want.reshape(-1, V), micro.labels.t().reshape(-1))
    torch.testing.assert_close(loss / count, expected, rtol=1e-5, atol=1e-6)
    (loss / count).backward()
    expected.backward()
    for name, gradient in renamed({name: p.grad for name, p in theirs.named_parameters()}).items():
        got = parameters[name].grad
        torch.testing.assert_close(
            got[tuple(slice(n) for n in gradient.shape)], gradient, rtol=1e-3, atol=1e-5, msg=name
        )
        assert got[gradient.shape[0] :].abs().sum() == 0, f"{name}: padding has a gradient"


def test_gpt2(tiny, batch):
    config = transformers.GPT2Config(vocab_size=V, n_positions=S, n_embd=H, n_layer=LAYERS, n_head=HEADS)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    assert_same_model(tiny(), theirs, gpt2_in_our_names, batch)


LLAMA = dict(
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=FFN,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
THEIR_LLAMA = dict(
    vocab_size=V,
    hidden_size=H,
    intermediate_size=FFN,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_llama(tiny, batch, groups):
    config = transformers.LlamaConfig(**THEIR_LLAMA, num_key_value_heads=groups, max_position_embeddings=S)
    theirs = transformers.LlamaForCausalLM(config).eval()
    ours = tiny(**LLAMA, num_query_groups=groups)
    assert_same_model(ours, theirs, lambda names: llama_in_our_names(names, groups), batch)


@pytest.mark.parametrize("window", [1, 5, 16])
def test_mistral(tiny, batch, window):
    """A window of theirs counts a token's own key. Then a sequence that is longer than every block of our kernels."""
    config = transformers.MistralConfig(
        **THEIR_LLAMA, num_key_value_heads=2, head_dim=D, max_position_embeddings=1024, sliding_window=window
    )
    theirs = transformers.MistralForCausalLM(config).eval()
    ours = tiny(**LLAMA, num_query_groups=2, window_size=f"{window - 1},0")
    assert_same_model(ours, theirs, lambda names: llama_in_our_names(names, 2), batch)
    tokens = batch(600, 1).tokens
    want = theirs(tokens.t()).logits.transpose(0, 1)
    torch.testing.assert_close(ours.logits(tokens), want, rtol=1e-4, atol=1e-4)
