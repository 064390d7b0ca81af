# SPDX-License-Identifier: Apache-2.0
"""The settings of a model and the arguments that Megatron-LM saves with it, in both directions. Those of kinds of layers
are in their `MegatronForm`.
"""

from dataclasses import fields
from typing import Any, Optional

from megatron.convert.megatron_names import WORDS, outside, place_of
from megatron.errors import CheckpointError, SettingsError
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.attention.settings import window_numbers
from megatron.model.kinds.table import KINDS, resolved
from megatron.model.megatron_form import MegatronForm, same_settings
from megatron.settings import schema
from megatron.settings.hybrid_pattern import AHEAD, CUT, LayerPattern, read_pattern

SAME = (
    "rotary_percent normalization qk_layernorm swiglu squared_relu add_qkv_bias untie_embeddings_and_output_weights "
    "apply_query_key_layer_scaling hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by "
    "use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor window_attn_skip_freq"
).split()  # settings with the same name and meaning in Megatron-LM
# The same, but not of legacy models
OF_CORE = "softmax_type quick_geglu activation_func_clamp_value glu_linear_offset".split()
COMPARED = [  # what makes a model: properties of `schema.Model`
    *"num_layers hidden_size num_attention_heads seq_length ffn_size head_dim query_groups position_table".split(),
    *"position_embedding_type norm_epsilon disable_bias_linear rotary_base bias_gelu_fusion window".split(),
    *SAME,
    *OF_CORE,
]
_SIZES = (  # behind properties of COMPARED
    "ffn_hidden_size kv_channels num_query_groups group_query_attention max_position_embeddings window_size".split()
)
# Not of the weights
_OF_TRAINING = "label_smoothing z_loss_coeff attention_softmax_in_fp32 model_type model_name_or_path".split()
_AHEAD = ("mtp_num_layers", "mtp_loss_scaling_factor", "mtp_use_repeated_layer", "mtp_detach_heads")
_OF_PATTERN = ("hybrid_layer_pattern", "no_rope_freq", *_AHEAD)
# Arguments that --use-checkpoint-args does not read, beside those of kinds whose `MegatronForm.flags` says so
_GIVEN = ("attention_output_gate",)
_REFUSED = (
    "rotary_interleaved",
    "apply_residual_connection_post_layernorm",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "heterogeneous_layers_config_path",
)


def unknown_settings(model: schema.Model, legacy: bool) -> list[str]:
    """Names of settings that their arguments do not have. legacy: the arguments of --use-legacy-models"""
    known = {*COMPARED, *_SIZES, *_OF_TRAINING, *_OF_PATTERN}
    newer = {"qk_layernorm", *OF_CORE, *_OF_PATTERN}
    for form in _forms().values():
        known |= {*form.same, *form.other}
        newer |= {*form.same, *form.other}
    given = [f.name for f in fields(model) if getattr(model, f.name) != f.default]
    not_legacy = [name for name in given if name in newer]
    return [name for name in given if name not in known] + [
        f"{name} (with --use-legacy-models)" for name in not_legacy if legacy
    ]


def _forms() -> dict[str, MegatronForm]:
    """Of each kind that has one, by its name."""
    return {name: resolved(kind.in_megatron) for name, kind in KINDS.items() if kind.in_megatron}


def their_arguments(m: schema.Model, legacy: bool, stages: int = 1) -> dict[str, Any]:
    """The arguments of a Megatron-LM run that describe the model. legacy: with --use-legacy-models; stages: of the pipeline

    Raises SettingsError if Megatron-LM computes such layers otherwise.
    """
    of_kinds = {}
    branches = (branch for kind in GPTFacts(m, 1).layer_kinds for branch in kind.branches)
    present = {mixer.name for branch in branches for mixer in branch.mixers}
    for kind, form in _forms().items():
        of_kinds |= {name: getattr(m, name) for name in form.same if kind in present} | form.theirs(m)
    return _of_all_models(m, legacy) | of_kinds | _of_pattern(m, stages)


def flags_to_give(m: schema.Model) -> str:
    """The flags of a run that --use-checkpoint-args does not read from the file, each with a blank before it."""
    plain = their_arguments(schema.Model(num_layers=m.num_layers, hidden_size=8, num_attention_heads=1), False)
    names = {name for form in _forms().values() if form.flags for name in (*form.same, *form.theirs(m))} | {*_GIVEN}
    own = their_arguments(m, False)
    changed = [name for name in own if name in names and own[name] != plain.get(name)]
    words = {name: own[name] for name in changed}
    text = lambda value: "" if value is True else " " + str(value).replace(" ", "")
    return "".join(f" --{name.replace('_', '-')}{text(value)}" for name, value in words.items())


def _of_pattern(m: schema.Model, stages: int) -> dict[str, Any]:
    """The arguments of layers that a pattern lists, and of multi-token prediction."""
    ahead = {name: getattr(m, name) for name in _AHEAD} if m.depths else dict(mtp_num_layers=None)
    if m.no_rope_freq and m.position_embedding_type == "rope":
        ahead |= dict(no_rope_freq=[int(not m.rotates(n)) for n in range(m.num_layers)])
    if not m.letters:
        return ahead
    each, layers = len(m.letters) // stages, m.letters
    cut = CUT.join(layers[n * each : (n + 1) * each] for n in range(stages))
    pattern = AHEAD.join([cut, *[m.letters_ahead] * m.depths])
    return ahead | dict(hybrid_layer_pattern=pattern, is_hybrid_model=True)


def _of_all_models(m: schema.Model, legacy: bool) -> dict[str, Any]:
    tanh_without_bias = m.bias_gelu_fusion and m.disable_bias_linear  # its fused GeLU needs a bias
    learned = m.position_embedding_type == "learned_absolute"
    return {name: getattr(m, name) for name in (*SAME, *OF_CORE)} | dict(
        num_layers=m.num_layers,
        encoder_num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        ffn_hidden_size=m.ffn_size,
        num_attention_heads=m.num_attention_heads,
        kv_channels=m.head_dim,
        group_query_attention=m.query_groups != m.num_attention_heads,
        num_query_groups=m.query_groups,
        seq_length=m.seq_length,
        encoder_seq_length=m.seq_length,
        max_position_embeddings=m.position_table,
        position_embedding_type=m.position_embedding_type,
        add_position_embedding=learned or not legacy,
        use_rotary_position_embeddings=m.position_embedding_type == "rope",
        rotary_base=int(m.rotary_base) if float(m.rotary_base).is_integer() else m.rotary_base,
        window_size=None if m.window_size is None else window_numbers(m.window_size),
        norm_epsilon=m.norm_epsilon,
        layernorm_epsilon=m.norm_epsilon,
        bias_gelu_fusion=m.bias_gelu_fusion and not tanh_without_bias,
        openai_gelu=tanh_without_bias,
        add_bias_linear=not m.disable_bias_linear,
        attention_softmax_in_fp32=m.attention_softmax_in_fp32,
        rotary_interleaved=False,
        apply_layernorm_1p=False,
        apply_residual_connection_post_layernorm=False,
    )


def _in_new_words(args: dict) -> dict:
    """The arguments with a pattern as newer runs have it: with what is after a /, and under its present name."""
    text = args.get("hybrid_layer_pattern") or args.get("hybrid_override_pattern")
    if not text:
        return args
    if own := args.get("mtp_hybrid_override_pattern"):
        text = AHEAD.join([str(text), *[str(own)] * int(args.get("mtp_num_layers") or 0)])
    return args | dict(hybrid_layer_pattern=str(text))


def pattern_of(args: dict) -> Optional[LayerPattern]:
    """The layers of a HybridModel or MambaModel. Raises CheckpointError for those that are not read here."""
    text = _in_new_words(args).get("hybrid_layer_pattern")
    if not text:
        return None
    try:
        return read_pattern(text, {kind.symbol: kind.name for kind in KINDS.values() if kind.symbol})
    except SettingsError as error:
        raise CheckpointError(f"the checkpoint's layers are not read here: {error.what}", error.why) from None


def first_layers(args: dict, num_layers: int, stages: int) -> list[int]:
    """The number of the first layer of each stage. Raises CheckpointError if the stages' sizes are not known."""
    pattern = pattern_of(args)
    if pattern and len(pattern.stages) > 1:
        counts = list(map(len, pattern.stages))
    elif num_layers % stages == 0:
        counts = [num_layers // stages] * stages
    else:
        counts = []
    if len(counts) != stages:
        raise CheckpointError(f"{num_layers} layers on {stages} pipeline stages of unknown sizes")
    return [sum(counts[:stage]) for stage in range(stages)]


def settings_of(
    facts: dict,
    shapes: dict[str, tuple[int, ...]],
    sizes: tuple[int, int],
    vocab_size: Optional[int],
    heads: Optional[int],
) -> tuple[schema.Model, int, list[str]]:
    """(model, vocabulary size without padding, notices) from the saved arguments, or else from shapes."""
    args = _in_new_words(facts["args"])
    _refuse_unknown(args)
    named = {outside(key.partition("/")[2]): shape for key, shape in shapes.items()}
    words, heads = named.get(WORDS), heads or args.get("num_attention_heads")
    if words is None:
        raise CheckpointError("the first file has no word embedding")
    if not heads:
        raise CheckpointError("the number of attention heads was not saved", do="give --num-attention-heads N")
    keys = [key.partition("/") for key in shapes]
    places = ((file, place_of(name)) for file, _, name in keys)
    layers = {(file, at.layer) for file, at in places if at and at.layer is not None and at.depth is None}
    pattern = pattern_of(args)
    model = _model_of(
        args,
        num_layers=len(pattern.letters) if pattern else args.get("num_layers") or len(layers) * sizes[1],
        hidden=words[1],
        heads=heads,
        positions=named.get("embedding.position.weight"),
    )
    vocab_size, notices = _vocabulary_of(args, words[0] * sizes[0], vocab_size)
    return model, vocab_size, notices


def _refuse_unknown(args: dict) -> None:
    """Raise CheckpointError for arguments of unsupported models."""
    refused = [name for name in _REFUSED if args.get(name)]
    if refused:
        raise CheckpointError(f"the checkpoint uses {', '.join(refused)}, which cannot be expressed here")
    for name, unknown in (
        ("position_embedding_type", lambda value: value in ("yarn", "mrope", "relative")),
        ("window_attn_skip_freq", lambda value: not isinstance(value, int)),
    ):
        if args.get(name) is not None and unknown(args[name]):
            raise CheckpointError(f"the checkpoint uses {name} {args[name]}, which cannot be expressed here")


def _model_of(
    args: dict, *, num_layers: int, hidden: int, heads: int, positions: Optional[tuple[int, ...]]
) -> schema.Model:
    """The settings of the model. positions: shape of the table of learned positions, or None."""
    rope = args.get("position_embedding_type") == "rope" or bool(args.get("use_rotary_position_embeddings"))
    pattern, plain = pattern_of(args), args.get("no_rope_freq")
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    known = dict(
        num_layers=num_layers,
        hybrid_layer_pattern=pattern and pattern.uncut,
        no_rope_freq=str(plain).replace(" ", "") if plain and rope else None,
        hidden_size=hidden,
        num_attention_heads=heads,
        seq_length=args.get("seq_length") or (positions or (1024,))[0],
        max_position_embeddings=positions[0] if positions else args.get("max_position_embeddings"),
        ffn_hidden_size=args.get("ffn_hidden_size") or 4 * hidden,
        group_query_attention=groups is not None,
        num_query_groups=groups,
        position_embedding_type="rope" if rope else "learned_absolute" if positions else "none",
        rotary_base=float(args.get("rotary_base") or 10000.0),
        norm_epsilon=float(args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5),
        window_size=",".join(map(str, args["window_size"])) if args.get("window_size") else None,
        bias_gelu_fusion=bool(args.get("bias_gelu_fusion", True) or args.get("openai_gelu")),
        disable_bias_linear=args.get("add_bias_linear") is False,
    )
    known |= same_settings((*SAME, *OF_CORE, *_AHEAD, "kv_channels"), args)
    if pattern:
        known |= dict(mtp_num_layers=pattern.depths or None)
    letters = pattern.letters + pattern.ahead if pattern else ""
    for name, form in _forms().items():
        if KINDS[name].symbol in letters if letters else form.asked(args):
            known |= same_settings(form.same, args) | form.ours(args, num_layers)
            known |= dict(KINDS[name].listed) if letters else {}
    return schema.Model(**known)


def _vocabulary_of(args: dict, rows: int, vocab_size: Optional[int]) -> tuple[int, list[str]]:
    """(tokens without padding, notices) for an embedding table of `rows` rows. vocab_size: --vocab-size or None."""
    notices = []
    if vocab_size is None:
        vocab_size = args.get("vocab_size") or rows
        if vocab_size == rows:
            notices.append(f"all {rows} rows of the embedding were taken; give --vocab-size if some are padding")
    if not 0 < vocab_size <= rows:
        raise SettingsError(f"--vocab-size {vocab_size} does not fit the {rows} rows of the embedding")
    return vocab_size, notices
