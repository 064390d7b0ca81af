# SPDX-License-Identifier: Apache-2.0
"""Mapping between Hugging Face's T5 (versions 1.0 and 1.1) and Blenderbot and ours: names, shapes and settings.

| ours                        | T5                                       | Blenderbot                                     |
|-----------------------------|------------------------------------------|------------------------------------------------|
| blocks.N, encoder           | encoder.block.N.layer.0, .1              | model.encoder.layers.N                         |
| blocks.E+N, decoder         | decoder.block.N.layer.0, .1 (cross), .2  | model.decoder.layers.N                         |
| attention.qkv [g, 3, d, h]  | SelfAttention.q, .k, .v [g d, h]         | self_attn.q_proj ...                           |
| cross.q, cross.kv           | EncDecAttention.q, .k, .v                | encoder_attn.q_proj ...                        |
| mlp.up [2, ffn, h] or [ffn] | DenseReluDense.wi_0, wi_1, or wi         | fc1                                            |
| relative.encoder [n, heads] | encoder.block.0...relative_attention_bias| embedding.position: embed_positions            |
"""

from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.hf_match import Match, refuse_shape
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.settings import T5Settings
from megatron.settings.schema import Model

KINDS = ("t5", "blenderbot")


def matches(kind: str, facts: T5Facts) -> list[Match]:
    """The matches of all tensors of a model of `kind`."""
    return (_t5 if kind == "t5" else _blenderbot)(facts)


def exported(facts: T5Facts) -> list[Match]:
    """The matches for the export of a T5.

    Theirs divides hidden states by the root of the width exactly if the output layer is the embedding's table. A model that
    shares the table without dividing is exported with a copy of the table, which is no longer tied.
    """
    result = matches("t5", facts)
    if copies_table(facts):
        result[0] = Match(result[0].ours, (*result[0].theirs, "lm_head.weight"), to_theirs=lambda x: [x, x])
    return result


def copies_table(facts: T5Facts) -> bool:
    """Whether a tied output layer becomes a separate tensor in the export."""
    return facts.tied and not facts.own.scale_tied_output


def _fused(ours: str, theirs: tuple[str, ...], facts: T5Facts, bias: bool = False) -> Match:
    """Queries, keys and values in one tensor of ours, [g, parts, d, h]."""
    g, d = facts.settings.query_groups, facts.settings.head_dim
    if bias:
        return Match(
            ours,
            theirs,
            lambda t: torch.stack([part.view(g, d) for part in t], 1),
            lambda x: [part.reshape(-1) for part in x.unbind(1)],
        )
    return Match(
        ours,
        theirs,
        lambda t: torch.stack([part.view(g, d, -1) for part in t], 1),
        lambda x: [part.reshape(-1, x.shape[-1]) for part in x.unbind(1)],
    )


def _t5(facts: T5Facts) -> list[Match]:
    result, encoder = [Match("embedding.word.weight", ("shared.weight",))], facts.encoder_layers
    for half in ("encoder", "decoder"):
        name = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        result.append(Match(f"relative.{half}.weight", (name,)))
    for n in range(facts.num_layers):
        half, own = ("encoder", n) if n < encoder else ("decoder", n - encoder)
        ours, theirs = f"blocks.{n}.", f"{half}.block.{own}.layer."
        attention = f"{theirs}0.SelfAttention."
        result += [
            Match(f"{ours}attention_norm.weight", (f"{theirs}0.layer_norm.weight",)),
            _fused(f"{ours}attention.qkv.weight", tuple(f"{attention}{x}.weight" for x in "qkv"), facts),
            Match(f"{ours}attention.output.weight", (f"{attention}o.weight",)),
        ]
        last = 1
        if half == "decoder":
            last, cross = 2, f"{theirs}1.EncDecAttention."
            result += [
                Match(f"{ours}cross_norm.weight", (f"{theirs}1.layer_norm.weight",)),
                _fused(f"{ours}cross.q.weight", (f"{cross}q.weight",), facts),
                _fused(f"{ours}cross.kv.weight", (f"{cross}k.weight", f"{cross}v.weight"), facts),
                Match(f"{ours}cross.output.weight", (f"{cross}o.weight",)),
            ]
        mlp = f"{theirs}{last}.DenseReluDense."
        result.append(Match(f"{ours}mlp_norm.weight", (f"{theirs}{last}.layer_norm.weight",)))
        if facts.gated:
            gate = (f"{mlp}wi_0.weight", f"{mlp}wi_1.weight")
            result.append(Match(f"{ours}mlp.up.weight", gate, torch.stack, lambda x: list(x)))
        else:
            result.append(Match(f"{ours}mlp.up.weight", (f"{mlp}wi.weight",)))
        result.append(Match(f"{ours}mlp.down.weight", (f"{mlp}wo.weight",)))
    result.append(Match(f"blocks.{encoder - 1}.encoder_norm.weight", ("encoder.final_layer_norm.weight",)))
    result.append(Match("final_norm.weight", ("decoder.final_layer_norm.weight",)))
    return result + ([] if facts.tied else [Match("output.weight", ("lm_head.weight",))])


def _blenderbot(facts: T5Facts) -> list[Match]:
    encoder = facts.encoder_layers
    result = [
        Match("embedding.word.weight", ("model.shared.weight",)),
        Match("embedding.position.weight", ("model.encoder.embed_positions.weight",)),
        Match("embedding.decoder_position.weight", ("model.decoder.embed_positions.weight",)),
    ]
    for n in range(facts.num_layers):
        half, own = ("encoder", n) if n < encoder else ("decoder", n - encoder)
        ours, theirs = f"blocks.{n}.", f"model.{half}.layers.{own}."
        pairs = [("attention_norm", "self_attn_layer_norm"), ("attention.output", "self_attn.out_proj")]
        pairs += [("mlp_norm", "final_layer_norm"), ("mlp.up", "fc1"), ("mlp.down", "fc2")]
        fused = [("attention.qkv", "self_attn", "qkv")]
        if half == "decoder":
            pairs += [("cross_norm", "encoder_attn_layer_norm"), ("cross.output", "encoder_attn.out_proj")]
            fused += [("cross.q", "encoder_attn", "q"), ("cross.kv", "encoder_attn", "kv")]
        for kind in ("weight", "bias"):
            result += [Match(f"{ours}{mine}.{kind}", (f"{theirs}{name}.{kind}",)) for mine, name in pairs]
            for mine, name, parts in fused:
                names = tuple(f"{theirs}{name}.{x}_proj.{kind}" for x in parts)
                result.append(_fused(f"{ours}{mine}.{kind}", names, facts, bias=kind == "bias"))
    for kind in ("weight", "bias"):
        result.append(Match(f"blocks.{encoder - 1}.encoder_norm.{kind}", (f"model.encoder.layer_norm.{kind}",)))
        result.append(Match(f"final_norm.{kind}", (f"model.decoder.layer_norm.{kind}",)))
    return result


# ---- settings --------------------------------------------------------------------------------------------------------


def refuse_other(facts: T5Facts) -> None:
    """Raise SettingsError, with the reasons, if a model is not Hugging Face's T5."""
    m, own = facts.settings, facts.own
    against = {
        f"--position-embedding-type {m.position_embedding_type}": m.position_embedding_type != "relative",
        f"--normalization {m.normalization}": m.normalization != "RMSNorm",
        "no --disable-bias-linear": not m.disable_bias_linear,
        "no --unscaled-attention": not own.unscaled_attention,
        f"--num-query-groups {m.query_groups}": m.query_groups != m.num_attention_heads,
        "--swiglu": m.swiglu,
        "--squared-relu": m.squared_relu,
        "--final-logit-softcapping": m.final_logit_softcapping is not None,
        "--attn-logit-softcapping": m.attn_logit_softcapping is not None,
    }
    refuse_shape("T5", against)


def their_settings(facts: T5Facts, ids: dict[str, int], dtype: str) -> dict[str, Any]:
    """The content of config.json. ids: of padding, end of text and start of targets."""
    m, own, proj = facts.settings, facts.own, facts.own.feed_forward_proj
    if proj != "relu" and m.bias_gelu_fusion:  # the tanh form
        proj = "gated-gelu" if proj == "gated-gelu" else "gelu_new"
    return dict(
        model_type="t5",
        architectures=["T5ForConditionalGeneration"],
        is_encoder_decoder=True,
        vocab_size=facts.vocab_size,
        d_model=m.hidden_size,
        d_kv=m.head_dim,
        d_ff=m.ffn_size,
        num_layers=facts.encoder_layers,
        num_decoder_layers=facts.num_layers - facts.encoder_layers,
        num_heads=m.num_attention_heads,
        relative_attention_num_buckets=own.relative_attention_num_buckets,
        relative_attention_max_distance=own.relative_attention_max_distance,
        dropout_rate=m.hidden_dropout,
        layer_norm_epsilon=m.norm_epsilon,
        feed_forward_proj=proj,
        tie_word_embeddings=facts.tied and not copies_table(facts),
        n_positions=facts.source,
        dtype=dtype,
        use_cache=True,
        **ids,
    )


def with_scaled_head(matches: list[Match], model: Model) -> list[Match]:
    """The matches of a model whose output layer is its own, and divides by the root of the width in transformers."""
    scaled = lambda theirs: theirs[0] * model.hidden_size**-0.5
    return [match._replace(to_ours=scaled) if match.ours == "output.weight" else match for match in matches]


def our_settings(theirs: dict[str, Any], tied: bool | None = None) -> tuple[Model, T5Settings, int, bool]:
    """(model, its own settings, vocabulary, whether an output layer of its own divides by the root of the width) from the
    content of config.json. tied: in the place of its own word. Raises CheckpointError if unsupported.
    """
    try:
        return _from_t5(theirs, tied)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"config.json is not complete: {error!r}") from None


def _from_t5(c: dict[str, Any], tied: bool | None) -> tuple[Model, T5Settings, int, bool]:
    proj = c.get("feed_forward_proj", "relu")
    known = {"relu": "relu", "gated-gelu": "gated-gelu", "gelu_new": "gelu", "gelu": "gelu"}
    if proj not in known:
        raise CheckpointError(
            f"feed_forward_proj {proj!r} in config.json cannot be expressed here", f"known: {', '.join(known)}"
        )
    encoder, said = int(c["num_layers"]), bool(c.get("tie_word_embeddings", True))
    scaled = bool(c.get("scale_decoder_outputs", said))  # the first in files of transformers 5, which all say tied
    tied = said if tied is None else tied
    decoder = int(c.get("num_decoder_layers") or encoder)
    length = int(c.get("n_positions") or 512)
    model = Model(
        model_type="T5",
        num_layers=encoder + decoder,
        hidden_size=int(c["d_model"]),
        num_attention_heads=int(c["num_heads"]),
        kv_channels=int(c["d_kv"]),
        ffn_hidden_size=int(c["d_ff"]),
        seq_length=length,
        position_embedding_type="relative",
        normalization="RMSNorm",
        norm_epsilon=float(c.get("layer_norm_epsilon", 1e-6)),
        disable_bias_linear=True,
        bias_gelu_fusion=proj != "gelu",
        untie_embeddings_and_output_weights=not tied,
        hidden_dropout=float(c.get("dropout_rate", 0.1)),
        attention_dropout=float(c.get("dropout_rate", 0.1)),
    )
    own = T5Settings(
        encoder_num_layers=encoder,
        decoder_num_layers=decoder,
        decoder_seq_length=min(128, length),
        feed_forward_proj=known[proj],
        relative_attention_num_buckets=int(c.get("relative_attention_num_buckets", 32)),
        relative_attention_max_distance=int(c.get("relative_attention_max_distance", 128)),
        unscaled_attention=True,
        scale_tied_output=tied and scaled,
    )
    sizes = (
        encoder,
        decoder,
        model.hidden_size,
        model.num_attention_heads,
        int(c["vocab_size"]),
        model.ffn_hidden_size,
    )
    if not all(0 < size < 1 << 31 for size in sizes):
        raise CheckpointError(f"config.json describes no model: sizes {', '.join(map(str, sizes))}")
    return model, own, int(c["vocab_size"]), scaled and not tied
