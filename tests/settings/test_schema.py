# SPDX-License-Identifier: Apache-2.0
"""The settings themselves: derived widths, defaults that users' runs depend on, tests of effects, and named shapes."""

import ast
from collections import defaultdict
from dataclasses import FrozenInstanceError, fields

import pytest

from megatron.settings import schema
from megatron.settings.declare import dashed, negated
from megatron.settings.presets import SHAPES, preset
from megatron.settings.schema import GROUPS, Config, Model
from megatron.settings.spelling import settings_of, spellings_of


def test_widths_follow_from_the_shape():
    model = Model(num_layers=2, hidden_size=1024, num_attention_heads=16)
    assert (model.ffn_size, model.head_dim, model.query_groups, model.position_table) == (4096, 64, 16, 1024)
    given = Model(2, 1024, 16, ffn_hidden_size=100, kv_channels=32, num_query_groups=4, max_position_embeddings=2048)
    assert (given.ffn_size, given.head_dim, given.query_groups, given.position_table) == (100, 32, 4, 2048)


@pytest.mark.parametrize("hidden, width", [(4096, 10880), (5120, 13632), (768, 2048), (8, 64)])
def test_swiglu_rounds_its_width_down_to_64_as_megatron_does(hidden, width):
    assert Model(1, hidden, 1, swiglu=True).ffn_size == width


def test_defaults_that_scripts_rely_on():
    found = {s.name: s.default for s in settings_of(GROUPS)}
    expected = dict(
        hidden_dropout=0.1,
        attention_dropout=0.1,
        weight_decay=0.01,
        clip_grad=1.0,
        adam_beta2=0.999,
        adam_eps=1e-8,
        lr_decay_style="linear",
        min_lr=0.0,
        seed=1234,
        eval_iters=100,
        eval_interval=1000,
        split="969,30,1",
        make_vocab_size_divisible_by=128,
        initial_loss_scale=2.0**32,
        loss_scale_window=1000,
        hysteresis=2,
        init_method_std=0.02,
        log_interval=100,
        position_embedding_type="learned_absolute",
    )
    assert {name: found[name] for name in expected} == expected


def test_groups_are_frozen_and_complete():
    assert list(GROUPS) == [f.name for f in fields(Config) if f.name not in ("extra", "statements")]
    with pytest.raises(FrozenInstanceError):
        schema.Data().split = "1,1,1"


def test_every_setting_says_what_it_is_and_every_flag_means_one_thing():
    settings = settings_of(GROUPS)
    assert len({s.name for s in settings}) == len(settings)
    assert all(s.help for s in settings)
    spellings = spellings_of(GROUPS)  # asserts that no flag is claimed twice
    assert all(flag == flag.lower() and "_" not in flag for flag in spellings)


def test_each_setting_names_the_test_that_shows_its_effect(root):
    """`shown` is the name of one function of the tests, whose file mentions the setting."""
    files = defaultdict(dict)  # function -> file -> its text
    for path in (root / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                files[node.name][path.stem] = text
    for setting in [setting for kind in GROUPS.values() for setting in fields(kind)]:
        file, _, function = setting.metadata["shown"].rpartition("::")
        places = [text for stem, text in files[function].items() if file in ("", stem)]
        assert len(places) == 1, f"{setting.name}: {len(places)} tests are called {function}"
        others = [word.partition("=")[0].rstrip("~") for word in setting.metadata["alias"]]
        words = [setting.name, dashed(setting.name), negated(setting.name), *others]
        assert any(word in places[0] for word in words), f"{setting.name}: the file of {function} does not mention it"


def parameters(name: str) -> float:
    """Billions of parameters of a GPT of this shape with GPT-2's vocabulary, padded."""
    shape = preset(name)
    layers, hidden = shape["num_layers"], shape["hidden_size"]
    block = 12 * hidden**2 + 13 * hidden
    return (layers * block + 2 * hidden + hidden * (50304 + shape["max_position_embeddings"])) / 1e9


@pytest.mark.parametrize(
    "name, billions",
    [
        ("gpt2", 0.1245),
        ("345M", 0.355),
        ("1.3B", 1.314),
        ("6.7B", 6.654),
        ("13B", 12.865),
        ("22B", 22.07),
        ("175B", 174.6),
    ],
)
def test_shapes_have_the_size_in_their_name(name, billions):
    assert parameters(name) == pytest.approx(billions, rel=5e-4)


def test_shapes_go_by_several_names():
    assert preset("gpt2-medium") == preset("GPT3-345M-en") == preset("gpt-345m")
    assert preset("gpt2") == preset("gpt2-en") == preset("125M")
    assert preset("gpt5") is None
    assert all(hidden % heads == 0 for _, hidden, heads, _ in SHAPES.values())
