# SPDX-License-Identifier: Apache-2.0
"""How much arithmetic a model is: parameters, FLOPs of a token, and what a device could do at best.

FLOPs are those of the matrix multiplications, two per multiply-add, as in arXiv:2104.04473 (appendix) and Megatron-LM's
own throughput: attention scores are counted over the full sequence, causal or not, so figures compare with published
ones. *Model* FLOPs are what the mathematics needs (MFU); *hardware* FLOPs add what recomputation repeats (HFU).

    >>> gpt_175b = Model(num_layers=96, hidden_size=12288, num_attention_heads=96, seq_length=2048)
    >>> f"{parameters(gpt_175b, 51200) / 1e9:.1f} B, {model_flops(gpt_175b, 51200) / 1e12:.3f} TFLOP a token"
    '174.6 B, 1.076 TFLOP a token'
"""

from typing import Literal, Optional

from megatron.settings.schema import Model

Recompute = Literal["none", "selective", "full"]


def parameters(model: Model, vocab_size: int) -> int:
    """Parameters of the whole GPT with `vocab_size` rows in its embedding (padded or not, as you ask)."""
    h, bias = model.hidden_size, 0 if model.disable_bias_linear else 1
    norm = h * (1 if model.normalization == "RMSNorm" else 2)
    queries, keys_values = _attention_widths(model)
    attention = (h + bias) * (queries + keys_values) + (queries + bias) * h
    if model.qk_layernorm:
        attention += 2 * model.head_dim * (norm // h)
    up = model.ffn_size * (2 if model.swiglu else 1)
    mlp = (h + bias) * up + (model.ffn_size + bias) * h
    layers = model.num_layers * (attention + mlp + 2 * norm)
    positions = model.position_table * h if model.position_embedding_type == "learned_absolute" else 0
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return layers + norm + positions + tables * vocab_size * h


def model_flops(model: Model, vocab_size: int, seq_length: Optional[int] = None) -> float:
    """Model FLOPs of one token of training: forward, and twice that backward."""
    core, linear, output = _forward_flops(model, vocab_size, seq_length or model.seq_length)
    return 3.0 * (core + linear + output)


def hardware_flops(
    model: Model, vocab_size: int, recompute: Recompute = "none", seq_length: Optional[int] = None
) -> float:
    """FLOPs of one token that the device executes. `recompute`: "full" repeats the forward pass of every layer,
    "selective" that of the attention core (arXiv:2205.05198, section 5)."""
    core, linear, output = _forward_flops(model, vocab_size, seq_length or model.seq_length)
    again = dict(none=0.0, selective=core, full=core + linear)[recompute]
    return 3.0 * (core + linear + output) + again


def inference_flops(model: Model, vocab_size: int, context: int) -> float:
    """FLOPs of one token's forward pass that attends to `context` tokens."""
    return float(sum(_forward_flops(model, vocab_size, context)))


def _forward_flops(model: Model, vocab_size: int, context: int) -> tuple[float, float, float]:
    """Of one token's forward pass: (attention core, linear layers of all blocks, output layer)."""
    h = model.hidden_size
    queries, keys_values = _attention_widths(model)
    core = 2 * 2 * context * queries  # scores, and their mean of values
    mlp = h * model.ffn_size * (3 if model.swiglu else 2)
    linear = 2 * (h * (queries + keys_values) + queries * h + mlp)
    return model.num_layers * core, model.num_layers * linear, 2 * h * vocab_size


def _attention_widths(model: Model) -> tuple[int, int]:
    """Columns of the query projection, and of keys and values together."""
    return model.num_attention_heads * model.head_dim, 2 * model.query_groups * model.head_dim


# Dense peak TFLOP/s from the vendors' data sheets, without sparsity: name in the device's string -> by number format.
# fp32: with TF32 off. The first name that matches counts, so longer names come first.
PEAK_TFLOPS = {
    "GB200": dict(bf16=2500, fp16=2500, fp32=80),
    "B200": dict(bf16=2250, fp16=2250, fp32=75),
    "GH200": dict(bf16=989.4, fp16=989.4, fp32=66.9),
    "H200": dict(bf16=989.4, fp16=989.4, fp32=66.9),
    "H100 PCIe": dict(bf16=756.5, fp16=756.5, fp32=51.2),
    "H100 NVL": dict(bf16=835.5, fp16=835.5, fp32=60),
    "H100": dict(bf16=989.4, fp16=989.4, fp32=66.9),
    "H800": dict(bf16=989.4, fp16=989.4, fp32=66.9),
    "H20": dict(bf16=148, fp16=148, fp32=44),
    "A100": dict(bf16=312, fp16=312, fp32=19.5),
    "A800": dict(bf16=312, fp16=312, fp32=19.5),
    "A40": dict(bf16=149.7, fp16=149.7, fp32=37.4),
    "A30": dict(bf16=165, fp16=165, fp32=10.3),
    "A10": dict(bf16=125, fp16=125, fp32=31.2),
    "RTX A6000": dict(bf16=154.8, fp16=154.8, fp32=38.7),
    "L40S": dict(bf16=362, fp16=362, fp32=91.6),
    "L40": dict(bf16=181, fp16=181, fp32=90.5),
    "L4": dict(bf16=121, fp16=121, fp32=30.3),
    "V100": dict(fp16=125, fp32=15.7),
    "T4": dict(fp16=65, fp32=8.1),
    "RTX 5090": dict(bf16=209.5, fp16=209.5, fp32=104.8),
    "RTX 4090": dict(bf16=165.2, fp16=165.2, fp32=82.6),
    "RTX 3090": dict(bf16=71, fp16=71, fp32=35.6),
    "MI300X": dict(bf16=1307.4, fp16=1307.4, fp32=163.4),
}


def peak_flops(device_name: str, precision: str) -> Optional[float]:
    """Dense peak FLOP/s of a device by the name its driver gives; None when the table does not know it.

    >>> peak_flops("NVIDIA A100-SXM4-80GB", "bf16"), peak_flops("NVIDIA H100 PCIe", "fp16"), peak_flops("Abacus", "fp32")
    (312000000000000.0, 756500000000000.0, None)
    """
    words = device_name.upper().replace("-", " ").split()
    for name, peaks in PEAK_TFLOPS.items():
        wanted = name.upper().split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))) and precision in peaks:
            return peaks[precision] * 1e12
    return None
