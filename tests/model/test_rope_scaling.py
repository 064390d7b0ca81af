# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary positions are Hugging Face's: frequencies and stretches at full size, and whole small models."""

import pytest
import torch

from megatron.model.positions import Rotary, scaled_frequencies
from megatron.settings.schema import Model
from tests.model.test_huggingface import FFN, HEADS, LAYERS, D, H, S, V, assert_same_model, llama_in_our_names

transformers = pytest.importorskip("transformers")

THEIRS = {  # their name of each setting
    "linear": {"rotary_seq_len_interpolation_factor": "factor"},
    "llama3": {
        "rope_scaling_factor": "factor",
        "rope_scaling_low_freq_factor": "low_freq_factor",
        "rope_scaling_high_freq_factor": "high_freq_factor",
        "rope_scaling_original_max_position_embeddings": "original_max_position_embeddings",
    },
    "yarn": {
        "rotary_scaling_factor": "factor",
        "yarn_original_max_position_embeddings": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
        "yarn_correction_range_round_to_int": "truncate",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
ASKED = {"linear": {}, "llama3": dict(use_rope_scaling=True), "yarn": dict(rope_type="yarn")}
USUAL = {"linear": dict(rotary_seq_len_interpolation_factor=2.0), "llama3": {}, "yarn": dict(rotary_scaling_factor=4.0)}
CHANGES = [
    *(("linear", dict(rotary_seq_len_interpolation_factor=n)) for n in (2.0, 7.5)),
    ("llama3", {}),
    ("llama3", dict(rope_scaling_factor=32.0)),
    ("llama3", dict(rope_scaling_low_freq_factor=0.5)),
    ("llama3", dict(rope_scaling_high_freq_factor=9.0)),
    ("llama3", dict(rope_scaling_original_max_position_embeddings=2048)),
    ("yarn", {}),
    ("yarn", dict(rotary_scaling_factor=40.0)),
    ("yarn", dict(yarn_original_max_position_embeddings=32768)),
    ("yarn", dict(yarn_beta_fast=20.0)),
    ("yarn", dict(yarn_beta_slow=2.0)),
    ("yarn", dict(yarn_correction_range_round_to_int=False)),
    ("yarn", dict(mscale=0.7, mscale_all_dim=0.4)),
    ("yarn", dict(mscale=1.0, mscale_all_dim=1.0)),
]


def ours(kind: str, changed: dict, **sizes) -> Model:
    return Model(position_embedding_type="rope", **{**sizes, **ASKED[kind], **USUAL[kind], **changed})


def theirs(kind: str, model: Model, changed: dict, **sizes):
    """Their configuration. Of what was not changed they get our default, which so must be theirs, too."""
    names = {**USUAL[kind], **changed, **({} if kind == "yarn" else dict.fromkeys(THEIRS[kind]))}
    if kind == "yarn":
        names["yarn_original_max_position_embeddings"] = None
    rope = {THEIRS[kind][name]: getattr(model, name) for name in names}
    parameters = dict(rope_type=kind, rope_theta=model.rotary_base, **rope)
    return transformers.LlamaConfig(max_position_embeddings=1 << 17, rope_parameters=parameters, **sizes)


@pytest.mark.parametrize("kind, changed", CHANGES)
def test_frequencies_and_stretch(kind, changed):
    def found(changed):
        model = ours(kind, changed, num_layers=1, hidden_size=1024, num_attention_heads=8, rotary_base=5e5)
        plain = model.rotary_base ** -(torch.arange(0, 128, 2, dtype=torch.float32) / 128)
        return model, scaled_frequencies(plain, model), Rotary(model).stretch, plain

    model, frequencies, stretch, plain = found(changed)
    config = theirs(kind, model, changed, hidden_size=1024, num_attention_heads=8)
    want, attention_factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    torch.testing.assert_close(frequencies, want, rtol=2e-6, atol=0)
    assert stretch == pytest.approx(attention_factor, rel=1e-12)
    assert not torch.allclose(frequencies, plain)
    if changed != USUAL[kind] and changed:  # what was changed matters
        _, usual, usual_stretch, _ = found({})
        assert not torch.allclose(frequencies, usual) or stretch != usual_stretch


SMALL = {  # at which 16 positions of 4 frequencies show everything
    "linear": dict(rotary_seq_len_interpolation_factor=3.0),
    "llama3": dict(
        rope_scaling_factor=4.0,
        rope_scaling_low_freq_factor=0.2,
        rope_scaling_high_freq_factor=1.0,
        rope_scaling_original_max_position_embeddings=8,
    ),
    "yarn": dict(
        rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=16, yarn_beta_fast=2.0, yarn_beta_slow=0.1
    ),
}


@pytest.mark.parametrize("kind", SMALL)
def test_models(tiny, batch, kind):
    """Logits, loss and the gradient of every weight."""
    changed = SMALL[kind]
    sizes = dict(num_layers=LAYERS, hidden_size=H, num_attention_heads=HEADS)
    model = ours(kind, changed, rotary_base=100.0, **sizes)
    frequencies = model.rotary_base ** -(torch.arange(0, D, 2, dtype=torch.float32) / D)
    scaled = scaled_frequencies(frequencies, model) / frequencies
    assert kind == "linear" or (scaled.max() == 1 and ((scaled > 0.26) & (scaled < 0.99)).any())  # kept, and in between
    config = theirs(
        kind,
        model,
        changed,
        vocab_size=V,
        hidden_size=H,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    network = tiny(
        position_embedding_type="rope",
        rotary_base=100.0,
        normalization="RMSNorm",
        swiglu=True,
        ffn_hidden_size=FFN,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=True,
        num_query_groups=2,
        **ASKED[kind],
        **changed,
    )
    their_model = transformers.LlamaForCausalLM(config).eval()
    assert_same_model(network, their_model, lambda names: llama_in_our_names(names, 2), batch)
    tokens = batch(S, 3).tokens
    network.rotary = Rotary(Model(position_embedding_type="rope", rotary_base=100.0, **sizes))
    assert (network.logits(tokens) - their_model(tokens.t()).logits.transpose(0, 1)).abs().max() > 1e-2  # unscaled
