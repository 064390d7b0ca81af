# SPDX-License-Identifier: Apache-2.0
"""Import GPTs from Megatron-LM's classic checkpoints: `iter_0000100/mp_rank_XX[_YYY]/model_optim_rng.pt`, any tp, pp and
chunks.

`megatron_pickle` reads each file in a separate process, one after another. A file holds a box of each logical tensor, so
nothing is merged: the boxes of one of their files become one of our files.

QKV is stored [g, q + 2, d, h] since format version 2, which is our order too; [3, heads, d, h] in version 0, and
[heads, d, 3, h] in version 1.
"""

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.convert.imported import ModelImport, check_complete
from megatron.inference.convert.megatron_pickle import extract
from megatron.model.gpt.facts import GPTFacts
from megatron.mpu.placement import Placement
from megatron.settings import schema

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(?:encoder|transformer|decoder)\.layers\.(\d+)\.(.+)")

IN_LAYER = {  # of legacy models, then of Megatron-Core
    "input_layernorm": "attention_norm",
    "input_norm": "attention_norm",
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "self_attention.query_key_value": "attention.qkv",
    "attention.query_key_value": "attention.qkv",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.dense": "attention.output",
    "attention.dense": "attention.output",
    "self_attention.linear_proj": "attention.output",
    "self_attention.q_layernorm": "attention.q_norm",
    "self_attention.k_layernorm": "attention.k_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.linear_fc1": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "mlp.linear_fc2": "mlp.down",
}
OUTSIDE = {
    "embedding.word_embeddings": "embedding.word",
    "embedding.position_embeddings": "embedding.position",
    "output_layer": "output",
    **{
        f"{stack}final_{kind}": "final_norm"
        for stack in ("encoder.", "transformer.", "decoder.")
        for kind in ("layernorm", "norm")
    },
}
_NO_WEIGHTS = re.compile(r".*(_extra_state|inv_freq)|word_embeddings(_for_head)?\.weight")
_SAME_NAME = (
    "rotary_percent",
    "normalization",
    "qk_layernorm",
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "kv_channels",
    "apply_query_key_layer_scaling",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "window_attn_skip_freq",
)  # settings with the same name and meaning in Megatron-LM
_REFUSED = (
    "num_experts",
    "multi_latent_attention",
    "apply_layernorm_1p",
    "rotary_interleaved",
    "add_qkv_bias",
    "apply_residual_connection_post_layernorm",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "heterogeneous_layers_config_path",
)


class RankFile(NamedTuple):
    """The file of one of their ranks."""

    tp: int
    pp: int
    path: Path


def open_classic(
    source: Path, step: Optional[int], vocab_size: Optional[int], heads: Optional[int], log: Callable[[str], None]
) -> ModelImport:
    """Open a checkpoint for import, file by file.

    vocab_size: tokens without padding; heads: number of attention heads, if the saved arguments lack it
    Raises CheckpointError if a file is refused or a tensor is missing.
    """
    parts = find_parts(source, step)
    sizes = max(part.tp for part in parts) + 1, max(part.pp for part in parts) + 1
    with _facts_and_tensors(parts[0]) as (facts, shapes, _):
        model, vocab_size, notices = settings_of(facts, shapes, sizes, vocab_size, heads)
    wanted = GPTFacts(model, vocab_size).weights

    def shards() -> Iterator[list[Piece]]:
        seen: set[str] = set()
        for part in parts:
            log(f"reading {part.path}")
            with _facts_and_tensors(part) as (facts, shapes, get):
                pieces = list(_pieces(part, facts, shapes, get, model, wanted, sizes))
                seen |= {piece.name for piece in pieces}
                yield pieces
        check_complete(source, wanted, seen)

    return ModelImport(model, vocab_size, f"Megatron-LM in {parts[0].path.parent.parent.resolve()}", notices, shards)


def find_parts(source: Path, step: Optional[int]) -> list[RankFile]:
    """The files of a checkpoint folder (the tracker's iteration, or `step`) or of one iteration's directory, in order."""
    folder = source
    if not any(source.glob("mp_rank_*")):
        try:
            text = (source / TRACKER).read_bytes()[:32] if step is None else str(step).encode()
        except OSError as error:
            raise CheckpointError(f"{source} holds no mp_rank_* and no {TRACKER}: {error.strerror}") from None
        folder = source / (f"iter_{int(text):07d}" if text.strip().isdigit() else "release")
    parts = []
    for path in sorted(folder.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        file = next((path / name for name in _FILES if (path / name).is_file()), None)
        if not match or file is None:
            raise CheckpointError(f"{path} is not understood", "experts, or a file other than " + ", ".join(_FILES))
        parts.append(RankFile(int(match[1]), int(match[2] or 0), file))
    found = {(part.tp, part.pp) for part in parts}
    tp, pp = (max((place[n] for place in found), default=-1) + 1 for n in (0, 1))
    missing = {(t, p) for t in range(tp) for p in range(pp)} - found
    if missing or not parts:
        why = f"missing (tensor, pipeline rank): {sorted(missing)[:8]}" if parts else "no mp_rank_* in it"
        raise CheckpointError(f"{folder} is not a whole checkpoint", why)
    return sorted(parts, key=lambda part: (part.pp, part.tp))


@contextlib.contextmanager
def _facts_and_tensors(
    part: RankFile,
) -> Iterator[tuple[dict, dict[str, tuple[int, ...]], Callable[[str], torch.Tensor]]]:
    """(facts, name -> shape, get(name)) of one file, read by a child process."""
    from safetensors import safe_open

    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        extract(part.path, Path(name))
        facts = json.loads((Path(name) / "facts.json").read_text())
        with safe_open(Path(name) / "tensors.safetensors", framework="pt") as file:
            yield facts, {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}, file.get_tensor


def our_name(theirs: str) -> Optional[tuple[Optional[int], str]]:
    """(layer within its chunk, our name after `blocks.N.`), or (None, our name); None for tensors that are not weights."""
    name = theirs
    for prefix in ("module.", "language_model."):
        name = name.removeprefix(prefix)
    if _NO_WEIGHTS.fullmatch(name):
        return None
    match = _LAYER.fullmatch(name)
    table, rest = (IN_LAYER, match[2]) if match else (OUTSIDE, name)
    for kind in ("weight", "bias"):
        for end in (f".{kind}", f"_{kind}"):  # linear_qkv.layer_norm_weight
            if rest.endswith(end) and rest.removesuffix(end) in table:
                return (int(match[1]) if match else None), f"{table[rest.removesuffix(end)]}.{kind}"
    raise CheckpointError(f"tensor {theirs} is not known")


def _pieces(
    part: RankFile, facts: dict, shapes, get, model: schema.Model, wanted: dict[str, Placement], sizes: tuple[int, int]
) -> Iterator[Piece]:
    """The pieces of our tensors in one of their files."""
    tp, pp = sizes
    chunks = max(1, facts["chunks"])
    if model.num_layers % (pp * chunks):
        raise CheckpointError(f"{model.num_layers} layers on {pp} x {chunks} pipeline stages of unknown sizes")
    a_stage = model.num_layers // (pp * chunks)
    for key in shapes:
        found = our_name(key.partition("/")[2])
        if found is None:
            continue
        layer, name = found
        if layer is not None:
            stage = int(key.partition("/")[0]) * pp + part.pp
            name = f"blocks.{stage * a_stage + layer}.{name}"
        elif name == "output.weight" and not model.untie_embeddings_and_output_weights:
            continue  # the last stage's copy of the embedding
        if name not in wanted:
            raise CheckpointError(f"{part.path}: {key} would be {name}, which this model does not have")
        placed = wanted[name]
        if "tp" not in placed.cut and part.tp > 0:
            continue  # each rank has a copy
        local = _reshaped(name, get(key).float(), model, placed, tp, float(facts["version"] or 0))
        box = Box(*placed.box(tuple(local.shape), {"tp": part.tp}))
        if any(n != full for d, (n, full) in enumerate(zip(local.shape, placed.shape)) if d != placed.cut.get("tp")):
            raise CheckpointError(f"{part.path}: {key} has shape {tuple(local.shape)}, expected {placed.shape}")
        yield Piece(name, placed.shape, box, local[Box.whole(box.extent).slices()].contiguous())


def _reshaped(
    name: str, x: torch.Tensor, model: schema.Model, placed: Placement, tp: int, version: float
) -> torch.Tensor:
    """Their local tensor in our shape."""
    try:
        if ".attention.qkv." in name:
            d, tail = model.head_dim, x.shape[1:]
            if version >= 2:
                return x.view(-1, model.num_attention_heads // model.query_groups + 2, d, *tail)
            heads = model.num_attention_heads // tp
            order = (
                x.view(3, heads, d, *tail).transpose(0, 1)
                if version < 1
                else x.view(heads, d, 3, *tail).transpose(1, 2)
            )
            return order.contiguous()
        if ".mlp.up." in name and model.swiglu:
            return x.view(2, -1, *x.shape[1:])
        return x.view(-1, *placed.shape[1:]) if x.dim() == len(placed.shape) and placed.cut.get("tp") == 0 else x
    except RuntimeError:
        raise CheckpointError(f"{name} has shape {tuple(x.shape)}, which does not fit {placed.shape}") from None


def settings_of(
    facts: dict,
    shapes: dict[str, tuple[int, ...]],
    sizes: tuple[int, int],
    vocab_size: Optional[int],
    heads: Optional[int],
) -> tuple[schema.Model, int, list[str]]:
    """(model, vocabulary size without padding, notices) from the saved arguments, or else from shapes."""
    args = facts["args"]
    _refuse_unknown(args)
    named = {our_name(key.partition("/")[2]): shape for key, shape in shapes.items()}
    words, heads = named.get((None, "embedding.word.weight")), heads or args.get("num_attention_heads")
    if words is None:
        raise CheckpointError("the first file has no word embedding")
    if not heads:
        raise CheckpointError("the number of attention heads was not saved", do="give --num-attention-heads N")
    keys = [key.partition("/") for key in shapes]
    layers = {(file, found[0]) for file, _, name in keys if (found := our_name(name)) and found[0] is not None}
    model = _model_of(
        args,
        num_layers=args.get("num_layers") or len(layers) * sizes[1],
        hidden=words[1],
        heads=heads,
        positions=named.get((None, "embedding.position.weight")),
    )
    vocab_size, notices = _vocabulary_of(args, words[0] * sizes[0], vocab_size)
    notices.append(f"weights of iteration {facts['iteration']}; optimizer state is not converted")
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
    groups = args.get("num_query_groups") if args.get("group_query_attention") else None
    return schema.Model(
        num_layers=num_layers,
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
        swiglu=bool(args.get("swiglu")),
        squared_relu=bool(args.get("squared_relu")),
        window_size=",".join(map(str, args["window_size"])) if args.get("window_size") else None,
        bias_gelu_fusion=bool(args.get("bias_gelu_fusion", True) or args.get("openai_gelu")),
        disable_bias_linear=args.get("add_bias_linear") is False,
        untie_embeddings_and_output_weights=bool(args.get("untie_embeddings_and_output_weights")),
        **{name: args[name] for name in _SAME_NAME if args.get(name) is not None},
    )


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
