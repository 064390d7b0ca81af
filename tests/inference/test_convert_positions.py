# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary positions through config.json of Hugging Face and back, and whole models with them."""

import pytest

from megatron.model.gpt.hf_names import our_settings, their_settings
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import LLAMA, assert_same, loaded, save

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


@pytest.mark.parametrize("scaling", [LLAMA3, YARN])
def test_whole_models_agree_in_both_directions(tmp_path, scaling, capsys):
    pytest.importorskip("transformers")
    weights = save(tmp_path / "ours", LLAMA | scaling)
    tool.main(["to-hf", str(tmp_path / "ours"), str(tmp_path / "theirs")])
    tool.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "back")])
    assert capsys.readouterr().out.count("both models agree") == 2
    assert_same(loaded(tmp_path / "back"), weights)
