# SPDX-License-Identifier: Apache-2.0
"""What a gated delta net keeps, computes and costs, against autograd and by hand; bf16 runs; each wrong use."""

from dataclasses import replace

import pytest
import torch

import pretrain_gpt
import pretrain_hybrid
from megatron.errors import SettingsError
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer_ops import RankSetup
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import elements
from megatron.planner.layout import Layout
from megatron.settings.schema import Model, Recompute
from megatron.tools import export
from tests.planner.test_activations import measured, predicted, saved_by_layer

G, R, K, V, TAPS, HIDDEN, S, B = 4, 2, 16, 24, 4, 64, 128, 2
SIZES = dict(linear_num_key_heads=G, linear_num_value_heads=G * R, linear_key_head_dim=K, linear_value_head_dim=V)
PLAIN = dict(num_layers=3, hidden_size=HIDDEN, num_attention_heads=4, seq_length=S, hidden_dropout=0.0)
VARIANT = dict(experimental_attention_variant="gated_delta_net", linear_attention_freq="3")
MODEL = Model(
    **PLAIN, **SIZES, **VARIANT, attention_dropout=0.0, position_embedding_type="rope", attention_output_gate=True
)
CORE = Recompute("selective", recompute_modules=("core_attn",))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("words", [(), ("core_attn",), ("full_attn",)], ids=lambda words: " ".join(words) or "all kept")
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
def test_kept_bytes_are_those_of_autograd(precision, words, packed):
    """Of a layer, to the byte."""
    facts = GPTFacts(replace(MODEL, hybrid_layer_pattern="G*-", experimental_attention_variant=None), 40)
    element = dict(fp32=4, bf16=2)[precision]
    share = RankSetup(device="cpu", micro_batch_size=B, documents=packed, precision=precision, element=element)
    found = saved_by_layer(facts, share, words, 50 if packed else None)
    assert found == facts.layer_saved_bytes(share, facts.layer_kind(0), words).total()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recompute", [Recompute(), CORE, Recompute("full")], ids=["nothing", "core", "layers"])
def test_it_is_planned(recompute):
    """Bytes of a step of three layers, of which the last has softmax attention with an output gate."""
    layout = Layout(micro_batch_size=B, recompute=recompute)
    assert predicted(MODEL, layout) == pytest.approx(measured(MODEL, layout, Mesh()), rel=0.02)


def test_weights_and_flops_by_hand():
    """Keys and values of different widths: a state is K x V, neither V^2 nor K^2."""
    facts = GPTFacts(MODEL, 96)
    table = facts.layer_table(0, False)
    inner, rows = G * R * V, G * (2 * K + 2 * R * V + 2 * R)
    own = {name: placed for name, placed in table.items() if name.startswith("gdn.")}
    mixed = G * (2 * K + R * V)
    assert elements(own) == rows * HIDDEN + mixed * TAPS + 2 * G * R + V + inner * HIDDEN
    less = rows * HIDDEN + mixed * TAPS + inner * HIDDEN - 5 * HIDDEN**2  # matrices, and taps of the convolution
    attention = 4 * MODEL.seq_length * HIDDEN  # all pairs, as throughput counts them
    scan = 6 * G * R * K * V
    one, two, three = (GPTFacts(replace(MODEL, num_layers=n), 96).flops() for n in (1, 2, 3))
    first, added = two - one, three - two  # of a gated delta net, and of a layer with softmax attention
    assert first - added == pytest.approx(3 * (2 * less + scan - attention), rel=1e-6)


FLAGS = """--hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --micro-batch-size 2
    --global-batch-size 4 --train-iters 3 --eval-iters 0 --lr 1e-2 --device cpu --hidden-dropout 0 --attention-dropout 0
    --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"""
GPT = "--num-layers 2 --experimental-attention-variant gdn --linear-attention-freq 2"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A bf16 run of two layers, the second with softmax attention."""
    folder = tmp_path_factory.mktemp("gdn")
    pretrain_gpt.main([*FLAGS.split(), *GPT.split(), "--bf16", "--save", str(folder)])
    return str(folder)


def test_a_bf16_run_keeps_decay_rates_in_fp32(trained):
    """Rates that train in fp32, and that no rounding of the model touches; the model that is loaded computes with them."""
    weights = dict(load_model(trained).model.named_parameters())
    rates = weights["blocks.0.gdn.A_log"]
    assert weights["blocks.0.gdn.in_proj.weight"].dtype == torch.bfloat16
    assert rates.dtype == weights["blocks.0.gdn.dt_bias"].dtype == torch.float32
    assert not torch.equal(rates, rates.bfloat16().float()) and (rates > 0).all()


def test_texts_with_a_cache_and_without_one(trained):
    model, text = load_model(trained, precision="fp32").model, [5, 7]
    for _ in range(6):
        text.append(model.logits(torch.tensor(text)[:, None])[-1, 0].argmax().item())
    greedy = Sampling(tokens_to_generate=6, greedy=True)
    for use_cache in (True, False):
        assert generate(model, [[5, 7]], greedy, longest=12, use_cache=use_cache)[0] == text[2:]


@pytest.mark.parametrize("words", ["--format torch-export", "--format onnx"])
def test_a_program_is_refused_by_name(trained, tmp_path, words):
    with pytest.raises(SettingsError, match="layers of gdn have no program for texts of any length"):
        export.main(["--load", trained, "--output", str(tmp_path / "out"), *words.split()])
    assert not (tmp_path / "out").exists()


WRONG = {
    "--num-layers 2 --experimental-attention-variant gdn": "needs --linear-attention-freq: N for all layers but every",
    f"{GPT} --linear-attention-freq [1,0,1]": r"--linear-attention-freq \[1,0,1\] for --num-layers 2: it is for 3 layers",
    f"{GPT} --linear-attention-freq often": "--linear-attention-freq often for --num-layers 2: no list of 0 and 1",
    f"{GPT} --linear-num-value-heads 3": "--linear-num-value-heads 3 is not a multiple of --linear-num-key-heads 2",
    f"{GPT} --linear-num-key-heads 1 --tp 2": "--linear-num-key-heads 1 cannot be divided by --tp 2",
    f"{GPT} --linear-attention-freq 1": "--linear-attention-freq 1 for --num-layers 2: no layer has linear attention then",
    f"{GPT} --linear-key-head-dim 0": "--linear-key-head-dim 0 must be at least 1$",
    f"{GPT} --linear-conv-kernel-dim 0": "--linear-conv-kernel-dim 0 must be at least 1$",
    f"{GPT} --hybrid-layer-pattern G-": "--hybrid-layer-pattern lists the gated delta nets",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_uses(words):
    program = pretrain_hybrid if "pattern" in words else pretrain_gpt
    line = words.replace("--num-layers 2", "") if "pattern" in words else words
    with pytest.raises(SettingsError, match=WRONG[words]):
        program.main([*FLAGS.split(), *line.split(), "--dry-run", "--world-size", "2"])


def test_settings_without_effect_are_said(capsys):
    sizes = FLAGS.split("--linear-num")[0]
    pretrain_gpt.main([*sizes.split(), "--num-layers", "1", "--linear-key-head-dim", "7", "--train-iters", "1"])
    assert "--linear-key-head-dim 7 has no effect without gated delta nets" in capsys.readouterr().out
