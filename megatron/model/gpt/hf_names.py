# SPDX-License-Identifier: Apache-2.0
"""Mapping between the tensors of Hugging Face's decoders and ours: names and shapes. `hf_settings` has their settings.

| ours                      | GPT-2                              | others                                        |
|---------------------------|------------------------------------|-----------------------------------------------|
| qkv.weight [g, q+2, d, h] | c_attn.weight [h, 3 g d], q = 1    | q_proj [g q d, h], k_proj, v_proj [g d, h]    |
| up.weight [ffn, h]        | c_fc.weight [h, ffn]               | gate_proj, up_proj [ffn, h]; ours [2, ffn, h] |
| output.weight [h, g q d]  | c_proj.weight [g q d, h]           | o_proj.weight, the same                       |

Legend: h hidden, g key-value groups, q queries per group, d channels per head. GPT-2 stores its matrices transposed. Phi-3
stores q_proj, k_proj and v_proj as one qkv_proj, gate_proj and up_proj as one gate_up_proj. Norms of Gemma multiply by
1 + weight, ours by the weight: conversions add 1 and subtract it, in fp32.
"""

from megatron.model.gpt import hf_ahead
from megatron.model.hf_match import BESIDE, MIXERS, Match
from megatron.model.kinds.mixer import PLACES
from megatron.model.kinds.table import KINDS, chosen, letters_of, resolved
from megatron.settings.schema import Model

CENTRED = ("gemma", "gemma2", "gemma3_text", "qwen3_next")  # their norms multiply by 1 + weight


def matches(kind: str, model: Model) -> list[Match]:
    """The matches of all tensors of a model of `kind`, a `model_type` of transformers."""
    if kind in MIXERS:
        return _mixers(kind, model)
    if kind in BESIDE:
        return _beside(kind, model)
    return _gpt2(model) if kind == "gpt2" else _decoder(kind, model)


def _transposed(ours: str, theirs: str) -> Match:
    return Match(ours, (theirs,), lambda t: t[0].t(), lambda x: [x.t()])


def _gpt2(model: Model) -> list[Match]:
    h, g, d = model.hidden_size, model.query_groups, model.head_dim
    result = [
        Match("embedding.word.weight", ("transformer.wte.weight",)),
        Match("embedding.position.weight", ("transformer.wpe.weight",)),
    ]
    for n in range(model.num_layers):
        ours, theirs = f"blocks.{n}.", f"transformer.h.{n}."
        for mine, name in (("attention_norm", "ln_1"), ("mlp_norm", "ln_2")):
            result += [Match(f"{ours}{mine}.{kind}", (f"{theirs}{name}.{kind}",)) for kind in ("weight", "bias")]
        result.append(
            Match(
                f"{ours}attention.qkv.weight",
                (f"{theirs}attn.c_attn.weight",),
                lambda t: t[0].view(h, 3, g, d).permute(2, 1, 3, 0),  # [h, q k v, g, d] -> [g, q k v, d, h]
                lambda x: [x.permute(3, 1, 0, 2).reshape(h, 3 * g * d)],
            )
        )
        result.append(
            Match(
                f"{ours}attention.qkv.bias",
                (f"{theirs}attn.c_attn.bias",),
                lambda t: t[0].view(3, g, d).transpose(0, 1),
                lambda x: [x.transpose(0, 1).reshape(3 * g * d)],
            )
        )
        linears = (("attention.output", "attn.c_proj"), ("mlp.up", "mlp.c_fc"), ("mlp.down", "mlp.c_proj"))
        for mine, name in linears:
            result.append(_transposed(f"{ours}{mine}.weight", f"{theirs}{name}.weight"))
            result.append(Match(f"{ours}{mine}.bias", (f"{theirs}{name}.bias",)))
    result += [Match(f"final_norm.{kind}", (f"transformer.ln_f.{kind}",)) for kind in ("weight", "bias")]
    return result + _output(model)


# ---- decoders with the names of Llama --------------------------------------------------------------------------------


def _decoder(kind: str, model: Model) -> list[Match]:
    norm = _centred_norm if kind in CENTRED else _norm
    result = [Match("embedding.word.weight", ("model.embed_tokens.weight",))]

    def layer(n: int, ours: str, theirs: str) -> list[Match]:
        mixers = [chosen(KINDS, place, model, min(n, model.num_layers - 1)) for place in PLACES]
        found = [norm(f"{ours}{mine}", f"{theirs}{name}") for mine, name in _norm_names(model, mixers[0].slot)]
        for mixer in mixers:
            found += resolved(mixer.hf_matches)(kind, model, f"{ours}{mixer.slot}.", theirs, norm)
        return found

    for n in range(model.num_layers):
        result += layer(n, f"blocks.{n}.", f"model.layers.{n}.")
    ahead = hf_ahead.matches(kind, model, norm, layer)
    return result + [norm("final_norm", "model.norm")] + _output(model) + ahead


def _mixers(kind: str, model: Model) -> list[Match]:
    """Of models whose layers are a norm and a mixer each."""
    result = [Match("embedding.word.weight", ("backbone.embeddings.weight",))]

    def layer(n: int, ours: str, theirs: str) -> list[Match]:
        (mixer,) = letters_of(KINDS)[model.all_letters[n]]
        found = [_norm(f"{ours}{mixer.slot}_norm", f"{theirs}norm")]
        return found + resolved(mixer.hf_matches)(kind, model, f"{ours}{mixer.slot}.", theirs, _norm)

    for n in range(len(model.letters)):
        result += layer(n, f"blocks.{n}.", f"backbone.layers.{n}.")
    ahead = hf_ahead.matches(kind, model, _norm, layer)
    return result + [_norm("final_norm", "backbone.norm_f")] + _output(model) + ahead


def _beside(kind: str, model: Model) -> list[Match]:
    """Of models whose layers are two of ours: mixers beside each other after one norm, and an MLP."""
    result = [Match("embedding.word.weight", ("model.embed_tokens.weight",))]
    for n, letter in enumerate(model.letters):
        ours, theirs, mixers = f"blocks.{n}.", f"model.layers.{n // 2}.", letters_of(KINDS)[letter]
        norm = ("input_layernorm", "pre_ff_layernorm")[n % 2]
        result.append(_norm(f"{ours}{mixers[0].slot}_norm", f"{theirs}{norm}"))
        for mixer in mixers:
            result += resolved(mixer.hf_matches)(kind, model, f"{ours}{mixer.slot}.", theirs, _norm)
    return result + [_norm("final_norm", "model.final_layernorm")] + _output(model)


def _norm_names(model: Model, slot: str) -> list[tuple[str, str]]:
    """The norms of a layer, ours and theirs: theirs after attention is before the sum, but in a Llama before the MLP.

    slot: of its attention
    """
    before, after = (f"{slot}_norm", "input_layernorm"), (f"post_{slot}_norm", "post_attention_layernorm")
    last = ("post_mlp_norm", "post_feedforward_layernorm")
    if model.norm_position == "pre":
        return [before, ("mlp_norm", "post_attention_layernorm")]
    return (
        [after, last]
        if model.norm_position == "post"
        else [before, after, ("mlp_norm", "pre_feedforward_layernorm"), last]
    )


def _norm(ours: str, theirs: str) -> Match:
    return Match(f"{ours}.weight", (f"{theirs}.weight",))


def _centred_norm(ours: str, theirs: str) -> Match:
    return _norm(ours, theirs)._replace(to_ours=lambda t: t[0] + 1, to_theirs=lambda x: [x - 1])


def _output(model: Model) -> list[Match]:
    return [Match("output.weight", ("lm_head.weight",))] if model.untie_embeddings_and_output_weights else []
