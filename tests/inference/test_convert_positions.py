# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary positions and windows through config.json of Hugging Face and back, and whole models with them."""

import pytest

from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, SettingsError
from megatron.model.gpt.hf_settings import our_settings, their_settings
from megatron.settings import schema
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import GPT2, LLAMA, assert_same, loaded, megatron_files, save

V = 50
LLAMA3 = dict(
    use_rope_scaling=True,
    rope_scaling_factor=4.0,
    rope_scaling_low_freq_factor=0.2,
    rope_scaling_high_freq_factor=1.0,
    rope_scaling_original_max_position_embeddings=8,
)
YARN = dict(
    rope_type="yarn",
    rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=16,
    yarn_beta_fast=2.0,
    yarn_beta_slow=0.1,
    mscale=0.7,
)
LINEAR = dict(rotary_seq_len_interpolation_factor=3.0)
UNROUNDED = dict(YARN, yarn_correction_range_round_to_int=False)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR, UNROUNDED, dict(YARN, mscale=1.0, mscale_all_dim=0.5)])
def test_settings_come_back(scaling):
    model = Model(**LLAMA, **scaling)
    _, back, _ = our_settings(their_settings(model, V, None, "float32"))
    assert back.yarn_stretch == pytest.approx(model.yarn_stretch, rel=1e-12)
    names = set(scaling) - {"mscale", "mscale_all_dim"}
    assert {name: getattr(back, name) for name in names} == {name: scaling[name] for name in names}


@pytest.mark.parametrize(
    "rope, want",
    [  # as published: Llama 3.1's file, Qwen's YaRN of old, DeepSeek's pair, a linear one of old
        (
            dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            dict(use_rope_scaling=True, rope_scaling_factor=8.0, rope_scaling_original_max_position_embeddings=8192),
        ),
        (
            dict(type="yarn", factor=4.0, original_max_position_embeddings=32768),
            dict(rope_type="yarn", rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=32768, mscale=1.0),
        ),
        (
            dict(type="yarn", factor=40, mscale=0.7, mscale_all_dim=0.5, beta_fast=24, beta_slow=2),
            dict(mscale=0.7, mscale_all_dim=0.5, yarn_beta_fast=24.0, yarn_beta_slow=2.0),
        ),
        (dict(type="linear", factor=2.0), dict(rotary_seq_len_interpolation_factor=2.0, use_rope_scaling=False)),
    ],
)
def test_settings_of_older_files(rope, want):
    theirs = their_settings(Model(**LLAMA), V, None, "float32") | dict(rope_scaling=rope)
    theirs.pop("rope_parameters")
    _, model, _ = our_settings(theirs)
    assert {name: getattr(model, name) for name in want} == want


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, dict(window_size="4,0")])
def test_whole_models_agree_in_both_directions(tmp_path, scaling, capsys):
    pytest.importorskip("transformers")
    weights = save(tmp_path / "ours", LLAMA | scaling)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--dtype", "fp32"])
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert capsys.readouterr().out.count("both models agree") == 2
    assert_same(loaded(tmp_path / "back"), weights)


def test_a_window_makes_a_llama_a_mistral():
    """Theirs counts a token's own key."""
    theirs = their_settings(Model(**LLAMA, window_size="4,0"), V, None, "float32")
    assert (theirs["model_type"], theirs["architectures"], theirs["sliding_window"]) == (
        "mistral",
        ["MistralForCausalLM"],
        5,
    )
    for window, ours in ((5, "4,0"), (1, "0,0"), (None, None)):
        kind, model, _ = our_settings(theirs | dict(sliding_window=window))
        assert (kind, model.window_size) == ("mistral", ours)
    theirs.pop("sliding_window")  # transformers has a default
    assert our_settings(theirs)[1].window_size == "4095,0"
    assert their_settings(Model(**LLAMA, window_size="-1,0"), V, None, "float32")["model_type"] == "llama"
    with pytest.raises(CheckpointError, match="sliding_window 0"):
        our_settings(theirs | dict(sliding_window=0))


@pytest.mark.parametrize(
    "settings, why",
    [
        (LLAMA | dict(window_size="4,0", window_attn_skip_freq=2), "not Mistral: --window-attn-skip-freq 2"),
        (LLAMA | dict(attn_logit_softcapping=50.0), "not Llama: --attn-logit-softcapping"),
        (GPT2 | dict(final_logit_softcapping=30.0), "not GPT-2: --final-logit-softcapping"),
        (GPT2 | dict(window_size="4,0"), "not GPT-2: --window-size 4,0"),
    ],
)
def test_what_hugging_face_cannot_express_is_named(settings, why):
    with pytest.raises(SettingsError, match=why):
        their_settings(Model(**settings), V, None, "float32")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "args, settings",
    [
        (dict(squared_relu=True), dict(squared_relu=True)),
        (dict(window_size=(4, 0), window_attn_skip_freq=2), dict(window_size="4,0", window_attn_skip_freq=2)),
        (
            dict(position_embedding_type="rope", use_rope_scaling=True, rope_scaling_factor=4.0),
            dict(use_rope_scaling=True, rope_scaling_factor=4.0),
        ),
        (dict(rotary_seq_len_interpolation_factor=2), dict(rotary_seq_len_interpolation_factor=2)),
    ],
)
def test_flags_of_megatron_lm_are_ours(tmp_path, args, settings):
    base = LLAMA if "position_embedding_type" in args else GPT2
    megatron_files(tmp_path / "theirs", base, 1, 1, **args)
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--vocab-size", str(V)])
    with Reader(tmp_path / "ours" / "iter_0000000") as reader:
        saved = schema.from_record(reader.state["config"]).model
    assert {name: getattr(saved, name) for name in settings} == settings


@pytest.mark.parametrize(
    "args, name",
    [
        (dict(position_embedding_type="yarn"), "position_embedding_type yarn"),
        (dict(window_size=(4, 0), window_attn_skip_freq=[1, 0]), "window_attn_skip_freq"),
    ],
)
def test_what_of_megatron_lm_cannot_be_expressed_is_named(tmp_path, args, name):
    megatron_files(tmp_path / "theirs", GPT2, 1, 1, **args)
    with pytest.raises(CheckpointError, match=name):
        tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
