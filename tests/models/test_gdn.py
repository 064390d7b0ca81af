# SPDX-License-Identifier: Apache-2.0
"""What a gated delta net keeps, computes and costs, against autograd and by hand; bf16 runs; each wrong use."""

import pytest
import torch

import pretrain_gpt
import pretrain_hybrid
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.gpt.facts import GPTFacts
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import elements
from megatron.planner.layout import Layout
from megatron.settings.schema import Model, Recompute
from tests.planner.test_activations import measured, predicted

G, R, K, V, TAPS, HIDDEN, FFN = 4, 2, 16, 24, 4, 64, 256
SIZES = dict(linear_num_key_heads=G, linear_num_value_heads=G * R, linear_key_head_dim=K, linear_value_head_dim=V)
PLAIN = dict(num_layers=3, hidden_size=HIDDEN, num_attention_heads=4, seq_length=128, hidden_dropout=0.0)
VARIANT = dict(experimental_attention_variant="gated_delta_net", linear_attention_freq="3")
MODEL = Model(**PLAIN, **SIZES, **VARIANT, attention_dropout=0.0, position_embedding_type="rope")
CORE = Recompute("selective", recompute_modules=("core_attn",))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", [Recompute(), CORE, Recompute("full_attn"), Recompute("full")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_that_autograd_keeps(recompute, dtype):
    """Three layers, of which one has softmax attention."""
    layout = Layout(micro_batch_size=2, recompute=recompute)
    found = measured(MODEL, layout, Mesh(), dtype=dtype)
    assert predicted(MODEL, layout, **({} if dtype == torch.float32 else dict(precision="bf16"))) == pytest.approx(
        found, rel=0.01
    )


def test_weights_and_flops_by_hand():
    """Keys and values of different widths: a state is K x V, neither V^2 nor K^2."""
    facts = GPTFacts(MODEL, 96)
    table = facts.layer_table(0, False)
    inner, rows = G * R * V, G * (2 * K + 2 * R * V + 2 * R)
    own = {name: placed for name, placed in table.items() if name.startswith("gdn.")}
    mixed = G * (2 * K + R * V)
    assert elements(own) == rows * HIDDEN + mixed * TAPS + 2 * G * R + V + inner * HIDDEN
    less = rows * HIDDEN + mixed * TAPS + inner * HIDDEN - 4 * HIDDEN**2  # matrices, and taps of the convolution
    attention = 4 * MODEL.seq_length * HIDDEN  # all pairs, as throughput counts them
    scan = 6 * G * R * K * V
    layers = [GPTFacts(Model(**{**PLAIN, "num_layers": n}, **SIZES, **VARIANT), 96) for n in (2, 3)]
    added = layers[1].flops() - layers[0].flops()  # of a layer with softmax attention
    whole = GPTFacts(Model(**{**PLAIN, "num_layers": 1}, **SIZES, **VARIANT), 96)
    first = layers[0].flops() - whole.flops()  # of a gated delta net
    assert first - added == pytest.approx(3 * (2 * less + scan - attention), rel=1e-6)


FLAGS = """--hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --micro-batch-size 2
    --global-batch-size 4 --train-iters 3 --eval-iters 0 --lr 1e-2 --device cpu --hidden-dropout 0 --attention-dropout 0
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"""
GPT = "--num-layers 2 --experimental-attention-variant gdn --linear-attention-freq 2"


def test_a_bf16_run_keeps_decay_rates_in_fp32(tmp_path):
    """Rates that train in fp32, and that no rounding of the model touches; the model that is loaded computes with them."""
    pretrain_gpt.main([*FLAGS.split(), *GPT.split(), "--bf16", "--save", str(tmp_path)])
    weights = dict(load_model(str(tmp_path)).model.named_parameters())
    rates = weights["blocks.0.gdn.A_log"]
    assert weights["blocks.0.gdn.in_proj.weight"].dtype == torch.bfloat16
    assert rates.dtype == weights["blocks.0.gdn.dt_bias"].dtype == torch.float32
    assert not torch.equal(rates, rates.bfloat16().float()) and (rates > 0).all()


WRONG = {
    "--num-layers 2 --experimental-attention-variant gdn": "needs --linear-attention-freq: N for all layers but every",
    f"{GPT} --linear-attention-freq [1,0,1]": r"--linear-attention-freq \[1,0,1\] for --num-layers 2: it is for 3 layers",
    f"{GPT} --linear-attention-freq often": "--linear-attention-freq often for --num-layers 2: no list of 0 and 1",
    f"{GPT} --linear-num-value-heads 3": "--linear-num-value-heads 3 is not a multiple of --linear-num-key-heads 2",
    f"{GPT} --linear-num-key-heads 1 --tp 2": "--linear-num-key-heads 1 cannot be divided by --tp 2",
    f"{GPT} --cp 4 --micro-batch-size 1": r"the 2 key heads of each tensor parallel rank \(--linear-num-key-heads\) are",
    f"{GPT} --hybrid-layer-pattern G-": "--hybrid-layer-pattern lists the gated delta nets",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_uses(words):
    program = pretrain_hybrid if "pattern" in words else pretrain_gpt
    line = words.replace("--num-layers 2", "") if "pattern" in words else words
    world = "4" if "--cp" in words else "2"
    with pytest.raises(SettingsError, match=WRONG[words]):
        program.main([*FLAGS.split(), *line.split(), "--dry-run", "--world-size", world])


def test_settings_without_effect_are_said(capsys):
    sizes = FLAGS.split("--linear-num")[0]
    pretrain_gpt.main([*sizes.split(), "--num-layers", "1", "--linear-key-head-dim", "7", "--train-iters", "1"])
    assert "--linear-key-head-dim 7 has no effect without gated delta nets" in capsys.readouterr().out
