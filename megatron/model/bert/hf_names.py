# SPDX-License-Identifier: Apache-2.0
"""Mapping between Hugging Face's BERT (`BertForPreTraining`, or `BertForMaskedLM` without the second head) and ours: names,
shapes and settings.

| ours                      | BERT                                                       |
|---------------------------|------------------------------------------------------------|
| qkv.weight [heads, 3, d, h] | attention.self.query, .key, .value [heads d, h]          |
| attention_norm, mlp_norm  | attention.output.LayerNorm, output.LayerNorm: after each   |
| head                      | cls.predictions.transform, and its bias                    |
| binary                    | bert.pooler, cls.seq_relationship                          |
"""

from typing import Any

import torch

from megatron.errors import CheckpointError
from megatron.model.bert.facts import BertFacts
from megatron.model.bert.settings import BertSettings
from megatron.model.hf_match import Match, refuse_shape
from megatron.settings.schema import Model


def matches(facts: BertFacts) -> list[Match]:
    """The matches of all tensors of a model."""
    g, d = facts.settings.num_attention_heads, facts.settings.head_dim
    pairs = {
        "embedding.word.weight": "bert.embeddings.word_embeddings.weight",
        "embedding.position.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype.weight": "bert.embeddings.token_type_embeddings.weight",
        "head.output.bias": bias_of_words(facts),
    }
    both = {
        "embedding.norm": "bert.embeddings.LayerNorm",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
    }
    if facts.own.bert_binary_head:
        both |= {"binary.pooler": "bert.pooler.dense", "binary.scores": "cls.seq_relationship"}
    result = []
    for n in range(facts.num_layers):
        ours, theirs = f"blocks.{n}.", f"bert.encoder.layer.{n}."
        both |= {
            f"{ours}attention.output": f"{theirs}attention.output.dense",
            f"{ours}attention_norm": f"{theirs}attention.output.LayerNorm",
            f"{ours}mlp.up": f"{theirs}intermediate.dense",
            f"{ours}mlp.down": f"{theirs}output.dense",
            f"{ours}mlp_norm": f"{theirs}output.LayerNorm",
        }
        for kind, rest in (("weight", (-1,)), ("bias", ())):
            result.append(
                Match(
                    f"{ours}attention.qkv.{kind}",
                    tuple(f"{theirs}attention.self.{name}.{kind}" for name in ("query", "key", "value")),
                    lambda t, rest=rest: torch.stack([part.view(g, d, *rest) for part in t], 1),
                    lambda x, rest=rest: [part.reshape(g * d, *rest) for part in x.unbind(1)],
                )
            )
    pairs |= {f"{mine}.{kind}": f"{name}.{kind}" for mine, name in both.items() for kind in ("weight", "bias")}
    result += [Match(mine, (name,)) for mine, name in pairs.items()]
    return result + ([] if facts.tied else [Match("output.weight", ("cls.predictions.decoder.weight",))])


def bias_of_words(facts: BertFacts) -> str:
    """The bias of their output layer. Files of a tied one may have a copy; transformers computes with the other's name."""
    return "cls.predictions.bias" if facts.tied else "cls.predictions.decoder.bias"


def refuse_other(facts: BertFacts) -> None:
    """Raise SettingsError, with the reasons, if a model is not Hugging Face's BERT."""
    m, own = facts.settings, facts.own
    against = {
        "no --post-norm": not own.post_norm,
        f"--position-embedding-type {m.position_embedding_type}": m.position_embedding_type != "learned_absolute",
        f"--num-tokentypes {own.num_tokentypes}": own.num_tokentypes < 1,
        f"--normalization {m.normalization}": m.normalization != "LayerNorm",
        "--swiglu": m.swiglu,
        "--squared-relu": m.squared_relu,
        "--disable-bias-linear": m.disable_bias_linear,
        f"--num-query-groups {m.query_groups}": m.query_groups != m.num_attention_heads,
        f"--kv-channels {m.head_dim}": m.head_dim * m.num_attention_heads != m.hidden_size,
        "--final-logit-softcapping": m.final_logit_softcapping is not None,
        "--attn-logit-softcapping": m.attn_logit_softcapping is not None,
    }
    refuse_shape("BERT", against)


def their_settings(facts: BertFacts, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    m = facts.settings
    return dict(
        model_type="bert",
        architectures=["BertForPreTraining" if facts.own.bert_binary_head else "BertForMaskedLM"],
        vocab_size=facts.vocab_size,
        hidden_size=m.hidden_size,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        intermediate_size=m.ffn_size,
        hidden_act="gelu_new" if m.bias_gelu_fusion else "gelu",
        hidden_dropout_prob=m.hidden_dropout,
        attention_probs_dropout_prob=m.attention_dropout,
        max_position_embeddings=m.position_table,
        type_vocab_size=facts.own.num_tokentypes,
        initializer_range=m.init_method_std,
        layer_norm_eps=m.norm_epsilon,
        tie_word_embeddings=facts.tied,
        dtype=dtype,
    )


def our_settings(theirs: dict[str, Any]) -> tuple[Model, BertSettings, int]:
    """(model, its own settings, vocabulary) from the content of config.json. Raises CheckpointError if unsupported."""
    try:
        return _from_bert(theirs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"config.json is not complete: {error!r}") from None


def _from_bert(c: dict[str, Any]) -> tuple[Model, BertSettings, int]:
    kinds = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
    for name, known in (
        ("hidden_act", tuple(kinds)),
        ("position_embedding_type", ("absolute",)),
        ("is_decoder", (False,)),
    ):
        if name in c and c[name] not in known:
            raise CheckpointError(
                f"{name} {c[name]!r} in config.json cannot be expressed here", f"known: {', '.join(map(repr, known))}"
            )
    length, heads = int(c["max_position_embeddings"]), int(c["num_attention_heads"])
    model = Model(
        model_type="BERT",
        num_layers=int(c["num_hidden_layers"]),
        hidden_size=int(c["hidden_size"]),
        num_attention_heads=heads,
        seq_length=length,
        max_position_embeddings=length,
        ffn_hidden_size=int(c["intermediate_size"]),
        norm_epsilon=float(c.get("layer_norm_eps", 1e-12)),
        bias_gelu_fusion=kinds[c.get("hidden_act", "gelu")],
        hidden_dropout=float(c.get("hidden_dropout_prob", 0.1)),
        attention_dropout=float(c.get("attention_probs_dropout_prob", 0.1)),
        init_method_std=float(c.get("initializer_range", 0.02)),
        untie_embeddings_and_output_weights=not c.get("tie_word_embeddings", True),
    )
    second = "BertForPreTraining" in (c.get("architectures") or ["BertForPreTraining"])
    own = BertSettings(bert_binary_head=second, num_tokentypes=int(c.get("type_vocab_size", 2)), post_norm=True)
    sizes = (model.num_layers, model.hidden_size, heads, length, model.ffn_hidden_size, int(c["vocab_size"]))
    if not all(0 < size < 1 << 31 for size in sizes):
        raise CheckpointError(f"config.json describes no model: sizes {', '.join(map(str, sizes))}")
    return model, own, int(c["vocab_size"])
