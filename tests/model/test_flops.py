# SPDX-License-Identifier: Apache-2.0
import dataclasses

import pytest

from megatron.model.bert.facts import BertFacts
from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer_ops import CoreAttention, RankSetup
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.settings import T5Settings
from megatron.settings.schema import Model
from megatron.telemetry.peak_flops import peak_flops

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


def facts(name: str) -> GPTFacts:
    layers, hidden, heads, seq, vocab, _ = SHAPES[name]
    return GPTFacts(Model(num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=seq), vocab)


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_of_known_shapes(name):
    assert facts(name).parameters / 1e9 == pytest.approx(SHAPES[name][-1], abs=5e-5)


def test_parameters_of_llamas_are_the_published_counts():
    assert GPTFacts(LLAMA_7B, 32000).parameters == 6_738_415_616
    assert GPTFacts(LLAMA3_8B, 128256).parameters == 8_030_261_248


def test_parameters_counted_by_hand():
    model = Model(num_layers=1, hidden_size=4, num_attention_heads=2, seq_length=3, qk_layernorm=True)
    attention = 4 * 12 + 12 + 4 * 4 + 4 + 2 * 2 * 2
    mlp = 4 * 16 + 16 + 16 * 4 + 4
    norms = 3 * 2 * 4
    assert GPTFacts(model, 10).parameters == attention + mlp + norms + 10 * 4 + 3 * 4


@pytest.mark.parametrize("name", SHAPES)
def test_flops_equal_the_papers_formula(name):
    """72 B s l h^2 (1 + s / 6h + V / 12lh): arXiv:2104.04473 equation 3 without recomputation."""
    found = facts(name)
    L, h, s = found.num_layers, found.settings.hidden_size, found.seq_length
    assert found.flops() == pytest.approx(72 * L * h * h * (1 + s / (6 * h) + found.vocab_size / (12 * L * h)))


def test_flops_counted_by_hand_for_grouped_queries_and_gates():
    model = Model(1, 8, num_attention_heads=4, seq_length=7, num_query_groups=2, ffn_hidden_size=5, swiglu=True)
    linear = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 5)
    assert GPTFacts(model, 11).flops() == 3 * (linear + 2 * 2 * 7 * 8 + 2 * 8 * 11)
    model = dataclasses.replace(model, kv_channels=3)  # heads of 3 channels: 12 over all heads, while the model has 8
    linear = 2 * (8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 5)
    assert GPTFacts(model, 11).flops() == 3 * (linear + 2 * 2 * 7 * 12 + 2 * 8 * 11)


def test_flops_of_windows_counted_by_hand():
    """Of four layers the third sees everything; the others see their own key and four before it."""
    shape = dict(num_layers=4, hidden_size=8, num_attention_heads=4, window_size="4,0", window_attn_skip_freq=3)
    model = Model(**shape, seq_length=100)
    linear = 4 * 2 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 32)
    assert GPTFacts(model, 11).flops() == 3 * (linear + 2 * 2 * (3 * 5 + 100) * 8 + 2 * 8 * 11)
    assert GPTFacts(Model(**shape, seq_length=3), 11).flops() == 3 * (linear + 2 * 2 * (4 * 3) * 8 + 2 * 8 * 11)
    assert len(GPTFacts(dataclasses.replace(model, window_size="-1,0"), 11).layer_kinds) == 1
    kinds = [str(GPTFacts(model, 11).layer_kind(n)) for n in range(4)]
    assert kinds == ["attention, mlp", "attention, mlp", "attention, mlp, window_size None", "attention, mlp"]


def test_work_of_a_window_is_that_of_its_pairs():
    """The planner takes half of the work of a causal kernel: then it is that of each pair of query and key."""
    for s, left in ((1000, 99), (1000, 998), (64, 10)):
        model = Model(num_layers=1, hidden_size=8, num_attention_heads=2, seq_length=s, window_size=f"{left},0")
        pairs = sum(min(i + 1, left + 1) for i in range(s))
        for share in (RankSetup(micro_batch_size=3, device="cpu"), RankSetup(micro_batch_size=3, backend="flash")):
            ops = GPTFacts(model, 11).layer_ops(share, GPTFacts(model, 11).layer_kind(0))
            [core] = [op for op in ops if isinstance(op, CoreAttention)]
            assert core.pairs / 2 == pytest.approx(3 * pairs * 2, rel=0.01)


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


def test_half_of_causal_attention_counts_for_the_second_rate():
    """Llama 3 8B at 8,192 tokens: 2 FLOPs for each weight that multiplies a token, and 4 h for each key that it sees; all
    8,192, or half of them. A published ratio of both counts is 1.125.
    """
    layer = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 14336)
    linear = 2 * (32 * layer + 4096 * 128256)
    found = GPTFacts(LLAMA3_8B, 128256)
    assert found.flops() == 3 * (linear + 32 * 4 * 4096 * 8192)
    assert found.flops(seen=True) == 3 * (linear + 32 * 4 * 4096 * 8192 / 2)
    assert found.flops() / found.flops(seen=True) == pytest.approx(1.125, abs=5e-4)
    short = GPTFacts(dataclasses.replace(LLAMA3_8B, seq_length=128), 128256)
    assert 1 < short.flops() / short.flops(seen=True) < 1.003


def test_seen_keys_of_windows_are_those_of_a_mask():
    """Up to the half key of the diagonal that the formula leaves out."""
    shape = dict(num_layers=1, hidden_size=8, num_attention_heads=4, seq_length=100)
    linear = 3 * 2 * (3 * 8 * 8 + 8 * 8 + 2 * 8 * 32 + 8 * 11)
    for window in (0, 4, 49, 98, 99, 500):
        seen = sum(min(query + 1, window + 1) for query in range(100)) / 100
        found = GPTFacts(Model(**shape, window_size=f"{window},0"), 11)
        assert 0 <= seen - (found.flops(seen=True) - linear) / (3 * 4 * 8) <= 0.5 + 1e-9, window


def test_attention_in_both_directions_has_no_unseen_half():
    model = Model(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=32)
    assert BertFacts(model, 11).flops(seen=True) == BertFacts(model, 11).flops()


@pytest.mark.parametrize("source, target", [(48, 20), (20, 48), (64, 64)])
@pytest.mark.parametrize("encoder, decoder", [(3, 2), (1, 4)])
def test_flops_of_encoder_decoders_counted_by_hand(source, target, encoder, decoder):
    """Each matrix multiplies the tokens that pass it; those of keys and values between both halves, the source's."""
    h, f, vocabulary, heads = 16, 40, 101, 2
    model = Model(encoder + decoder, h, heads, source, ffn_hidden_size=f)
    own = T5Settings(encoder_num_layers=encoder, decoder_num_layers=decoder, decoder_seq_length=target)
    found = T5Facts(model, vocabulary, own)
    itself = lambda tokens, seen=1.0: 2 * tokens * 4 * h * h + seen * 4 * tokens * tokens * h
    mlp = lambda tokens: 2 * tokens * 2 * h * f
    across = 2 * (2 * target + 2 * source) * h * h + 4 * target * source * h
    count = lambda seen: (
        encoder * (itself(source) + mlp(source))
        + decoder * (itself(target, seen) + across + mlp(target))
        + 2 * target * h * vocabulary
    )
    tokens = source + target  # of a sample
    assert found.flops() * tokens == pytest.approx(3 * count(1.0))
    assert found.flops(seen=True) * tokens == pytest.approx(3 * count(0.5))
