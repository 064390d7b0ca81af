# SPDX-License-Identifier: Apache-2.0
"""The weights of multi-latent attention. Needs no torch.

Legend: h hidden, g heads, of a head's keys ro rotated and no other channels, v of its values; latents of q_lora and kv.
"""

from megatron.model.weights import add_prefix, column, norm, output_std, replicated, row
from megatron.mpu.placement import Placement
from megatron.settings.schema import Model


def latent_attention(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """`q` is [g, ro + no, h], or after a latent `q_down` [q_lora, h] and `q_up` [g, ro + no, q_lora]; `kv_down` is
    [kv + ro, h], the latent before the rotary key of all heads, and `kv_up` [g, no + v, kv], a head's key before its value.

    Rotated channels come first in queries and keys: they are those that `rotate` turns. Latents are normalized with
    --qk-layernorm, as in Megatron-LM.
    """
    m, g, std, sp = model, model.num_attention_heads, model.init_method_std, sequence_parallel
    no, ro, v, keys = m.qk_head_dim, m.qk_pos_emb_head_dim, m.v_head_dim, m.latent_key_dim
    down = lambda outputs, parts=None: replicated(
        m.hidden_size, outputs, std, bias=False, sequence_parallel=sp, parts=parts
    )
    table: dict[str, Placement] = {}
    if m.q_lora_rank is None:
        table |= add_prefix("q", column(m.hidden_size, (g, keys), std, bias=False, matrices=(1, (keys,))))
    else:
        table |= add_prefix("q_down", down(m.q_lora_rank))
        if m.qk_layernorm:
            table |= add_prefix("q_norm", norm(m, m.q_lora_rank, sp))
        table |= add_prefix("q_up", column(m.q_lora_rank, (g, keys), std, bias=False, matrices=(1, (keys,))))
    table |= add_prefix("kv_down", down(m.kv_lora_rank + ro, (m.kv_lora_rank, ro)))
    if m.qk_layernorm:
        table |= add_prefix("kv_norm", norm(m, m.kv_lora_rank, sp))
    table |= add_prefix("kv_up", column(m.kv_lora_rank, (g, no + v), std, bias=False, matrices=(1, (no, v))))
    bias = not m.disable_bias_linear
    return table | add_prefix("output", row(g * v, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sp))
