# SPDX-License-Identifier: Apache-2.0
"""A kind of mixers from outside the suite (`own_kind.py`): trained, planned, decoded and exported."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.entry import start
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import elements
from megatron.planner.layout import Layout
from megatron.settings.declare import setting
from megatron.settings.own_choices import model_group
from megatron.settings.schema import Recompute
from megatron.tools import checkpoint as checkpoint_tool
from megatron.tools import export, generate
from tests.models import own_kind
from tests.models.in_layouts import check_layout
from tests.planner.test_activations import measured, predicted

FLAGS = """--model-type tests.models.own_kind --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --mock-data --vocab-size 100
    --device cpu --precision fp32 --maxout-pieces 3 --maxout-from-layer 1 --hidden-dropout 0 --attention-dropout 0"""
PIECES, LENGTH, HEADS = 3, 16, 2


def settings(**more):
    sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=HEADS, seq_length=LENGTH, maxout_pieces=PIECES)
    plain = dict(hidden_dropout=0.0, attention_dropout=0.0)
    return model_group({}, None, {"maxout": own_kind.MAXOUT})(**sizes, **plain, maxout_from_layer=1, **more)


def plain_scores(weights, ids):
    """[s, b] -> [s, b, v], in plain torch: attention and an MLP, attention and maxout."""
    at = lambda name: weights[name]
    linear = lambda name, x: F.linear(x, at(f"{name}.weight").flatten(0, -2), at(f"{name}.bias").flatten())
    norm = lambda name, x: F.layer_norm(x, x.shape[-1:], at(f"{name}.weight"), at(f"{name}.bias"), 1e-5)
    x = at("embedding.word.weight")[ids] + at("embedding.position.weight")[: len(ids), None]
    for n in range(2):
        qkv = linear(f"blocks.{n}.attention.qkv", norm(f"blocks.{n}.attention_norm", x)).unflatten(-1, (HEADS, 3, -1))
        q, k, v = (one.permute(1, 2, 0, 3) for one in qkv.unbind(3))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        x = x + linear(f"blocks.{n}.attention.output", mixed)
        if n < 1:
            hidden = F.gelu(linear(f"blocks.{n}.mlp.up", norm(f"blocks.{n}.mlp_norm", x)), approximate="tanh")
            x = x + linear(f"blocks.{n}.mlp.down", hidden)
        else:
            wide = linear(f"blocks.{n}.maxout.up", norm(f"blocks.{n}.maxout_norm", x))
            x = x + linear(f"blocks.{n}.maxout.down", wide.unflatten(-1, (PIECES, -1)).max(-2).values)
    return norm("final_norm", x) @ at("embedding.word.weight").T


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_kind")
    start([*FLAGS.split(), "--save", str(folder), "--train-iters", "4"], own_kind.recipe())
    return folder


def test_the_trained_model_computes_its_formula(trained):
    model = load_model(trained).model
    ids = torch.randint(0, 100, (LENGTH, 3), generator=torch.Generator().manual_seed(0))
    weights = {name: values.detach() for name, values in model.named_parameters()}
    assert {name for name in weights if "maxout" in name} >= {
        "blocks.1.maxout.up.weight",
        "blocks.1.maxout_norm.weight",
    }
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(ids), plain_scores(weights, ids)[..., : model.vocab_size], rtol=1e-4, atol=1e-5
        )


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["tp2sp", "pp2-zbh1", "dp2-zero3", "tp2-dp2-zero1", "cp2"])
@pytest.mark.parametrize("again", ["", "--recompute-granularity selective --recompute-modules mlp"])
def test_any_layout_is_one_process(layout, again):
    check_layout(layout, f"{FLAGS} {again}")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["tp2sp", "pp2-zbh1", "dp2-zero3", "cp2"])
def test_a_pattern_lists_it(layout):
    """In layers of its own, before attention and after it; its own settings that choose layers are not asked."""
    flags = FLAGS.replace("--num-layers 2", "--hybrid-layer-pattern X*-X").replace("--maxout-from-layer 1", "")
    check_layout(layout, flags)
    facts = recipe_of(parse_any(flags.split())).facts(parse_any(flags.split()), 101)
    kinds = [mixer.name for n in range(4) for branch in facts.branches(n) for mixer in branch.mixers]
    assert kinds == ["maxout", "attention", "mlp", "maxout"]


def test_it_is_planned(capsys):
    m = settings()
    facts = GPTFacts(m, 96)
    up, down = PIECES * m.ffn_size * 33, m.ffn_size * 32 + 32
    assert elements(facts.layer_table(1, False)) - elements(facts.layer_table(0, False)) == up + down - (
        m.ffn_size * 33 + down
    )
    for recompute in (Recompute(), Recompute("selective", recompute_modules=("mlp",))):
        layout = Layout(micro_batch_size=2, recompute=recompute)
        assert predicted(m, layout) == pytest.approx(measured(m, layout, Mesh()), rel=0.05)
    start([*FLAGS.split(), "--dry-run", "--world-size", "2"], own_kind.recipe())
    assert "no problems found" in capsys.readouterr().out


def test_it_is_decoded(trained, capsys):
    words = ["--load", str(trained), "--prompt", "1 2 3 4", "--max-new-tokens", "8", "--greedy", "--device", "cpu"]
    generate.main(words)
    cached = capsys.readouterr().out
    generate.main([*words, "--no-use-cache"])
    last = lambda said: re.findall(r"^[\d ]+$", said, re.M)
    assert last(cached) == last(capsys.readouterr().out) != []


@pytest.mark.sampled(5)
def test_its_program_is_exported_and_other_libraries_have_no_such_model(trained, tmp_path):
    export.main(["--load", str(trained), "--output", str(tmp_path / "out"), "--format", "torch-export"])
    ids = torch.randint(0, 100, (2, 7), generator=torch.Generator().manual_seed(1))
    program = torch.export.load(tmp_path / "out" / "model.pt2").module()
    with torch.no_grad():
        ours = load_model(trained).model.logits(ids.t()).transpose(0, 1)
    np.testing.assert_allclose(program(input_ids=ids).detach(), ours, atol=1e-5)
    with pytest.raises(SettingsError, match="other libraries have no such model"):
        checkpoint_tool.main(["to-hf", str(trained), str(tmp_path / "hf")])


def test_wrong_uses(capsys):
    with pytest.raises(SettingsError, match="--maxout-pieces 1: the largest of one is linear"):
        start([*FLAGS.replace("pieces 3", "pieces 1").split()], own_kind.recipe())
    with pytest.raises(SettingsError, match="give a megatron.model.kinds.mixer.Mixer with the name 'maxout'"):
        model_group({}, None, {"maxout": print})

    @dataclass(frozen=True)
    class Taken:
        swiglu: bool = setting("another", False)

    with pytest.raises(SettingsError, match="the suite has settings of these names: swiglu"):
        model_group({}, None, {"maxout": replace(own_kind.MAXOUT, settings=Taken)})
    start([*FLAGS.replace("--maxout-pieces 3", "").split(), "--train-iters", "1"], own_kind.recipe())
    assert "--maxout-from-layer 1 has no effect without --maxout-pieces" in capsys.readouterr().out
