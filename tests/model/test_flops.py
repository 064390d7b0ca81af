# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from megatron.model.flops import hardware_flops, inference_flops, model_flops, parameters, peak_flops
from megatron.settings.schema import Model

SHAPES = {  # layers, hidden, heads, sequence, vocabulary -> billions of parameters
    "345M": (24, 1024, 16, 1024, 50304, 0.3549),
    "1.3B": (24, 2048, 16, 1024, 50304, 1.3137),
    "6.7B": (32, 4096, 32, 1024, 50304, 6.6544),
    "13B": (40, 5120, 40, 2048, 51200, 12.8582),
    "22B": (48, 6144, 64, 2048, 51200, 22.0743),
    "175B": (96, 12288, 96, 2048, 51200, 174.6158),
}
LLAMA_7B = Model(
    num_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=2048,
    ffn_hidden_size=11008,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
LLAMA3_8B = dataclasses.replace(
    LLAMA_7B, ffn_hidden_size=14336, group_query_attention=True, num_query_groups=8, seq_length=8192
)


def shape(name: str) -> tuple[Model, int]:
    layers, hidden, heads, seq, vocab, _ = SHAPES[name]
    return Model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq), vocab


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_known_shapes(name):
    assert parameters(*shape(name)) / 1e9 == pytest.approx(SHAPES[name][-1], abs=5e-5)


def test_parameters_of_llamas_are_the_published_counts():
    assert parameters(LLAMA_7B, 32000) == 6_738_415_616
    assert parameters(LLAMA3_8B, 128256) == 8_030_261_248


def test_parameters_counted_by_hand():
    model = Model(num_layers=1, hidden_size=4, num_attention_heads=2, seq_length=3, qk_layernorm=True)
    attention = 4 * 12 + 12 + 4 * 4 + 4 + 2 * 2 * 2
    mlp = 4 * 16 + 16 + 16 * 4 + 4
    norms = 3 * 2 * 4
    assert parameters(model, 10) == attention + mlp + norms + 10 * 4 + 3 * 4


@pytest.mark.parametrize("name", SHAPES)
def test_flops_with_full_recompute_equal_the_papers_formula(name):
    """96 B s l h^2 (1 + s / 6h + V / 16lh), arXiv:2104.04473 equation 3."""
    model, vocab = shape(name)
    L, h, s = model.num_layers, model.hidden_size, model.seq_length
    paper = 96 * L * h * h * (1 + s / (6 * h) + vocab / (16 * L * h))
    assert hardware_flops(model, vocab, "full") == pytest.approx(paper)
    assert model_flops(model, vocab) == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + vocab / (12 * L * h)))
    assert hardware_flops(model, vocab) == model_flops(model, vocab)


def test_selective_recompute_repeats_the_attention_core_alone():
    model, vocab = shape("175B")
    more = hardware_flops(model, vocab, "selective") - model_flops(model, vocab)
    assert more == 4 * 96 * 2048 * 12288
    assert more / model_flops(model, vocab) < 0.01


def test_flops_counted_by_hand_for_grouped_queries_and_gates():
    model = Model(
        num_layers=1, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=5, swiglu=True
    )
    linear = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 5)
    assert inference_flops(model, 11, context=7) == linear + 2 * 2 * 7 * 8 + 2 * 8 * 11
    assert model_flops(model, 11, seq_length=7) == 3 * inference_flops(model, 11, context=7)


@pytest.mark.parametrize(
    "device, precision, tera",
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
    ],
)
def test_peak_of_known_devices(device, precision, tera):
    assert peak_flops(device, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "device, precision", [("cpu", "fp32"), ("Tesla V100-SXM2-32GB", "bf16"), ("NVIDIA A1000", "bf16")]
)
def test_unknown_devices_have_no_peak(device, precision):
    assert peak_flops(device, precision) is None
