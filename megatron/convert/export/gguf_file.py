# SPDX-License-Identifier: Apache-2.0
"""Write a model as a GGUF file for llama.cpp, tensor by tensor (with the package gguf).

The names and shapes of Hugging Face are the start (`convert.families`), because gguf maps those names to llama.cpp's.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from megatron.checkpoint.reader import Reader
from megatron.convert.export import gguf_vocabulary
from megatron.convert.families import Family
from megatron.convert.hf_tokenizer import ExportedTokenizer
from megatron.errors import MissingPackage, SettingsError
from megatron.inference.quantize import Int4, Rounded
from megatron.model.bert.facts import BertFacts
from megatron.model.facts import Facts
from megatron.model.positions import scaled_frequencies
from megatron.model.t5.facts import T5Facts
from megatron.mpu.placement import Placement
from megatron.telemetry.progress import ProgressBar

Fix = Callable[[str, torch.Tensor, dict[str, Any]], torch.Tensor]
# --dtype -> (format of matrices, llama.cpp's word for the file)
TYPES = dict(
    fp32=("F32", "ALL_F32"),
    fp16=("F16", "MOSTLY_F16"),
    bf16=("BF16", "MOSTLY_BF16"),
    q8_0=("Q8_0", "MOSTLY_Q8_0"),
    q4_0=("Q4_0", "MOSTLY_Q4_0"),
    q4_1=("Q4_1", "MOSTLY_Q4_1"),
)
BLOCK = 32  # inputs with one scale in the formats of `BLOCKS`
BLOCKS = ("Q8_0", "Q4_0", "Q4_1")


class Architecture(NamedTuple):
    """A model of llama.cpp: its name in the package gguf, and what has to be changed in Hugging Face's tensors."""

    name: str
    fix: Fix = lambda name, x, config: x


def _gpt2(name: str, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """GPT-2 has its matrices transposed."""
    turned = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    return x.t() if name.endswith(turned) else x


def _llama(name: str, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """llama.cpp rotates neighbours in this architecture, channels 2i and 2i + 1, and Hugging Face i and i + d/2."""
    heads = dict(q_proj=config["num_attention_heads"], k_proj=config["num_key_value_heads"])
    for part, count in heads.items():
        if name.endswith((f"{part}.weight", f"{part}.bias")):
            return x.view(count, 2, -1, *x.shape[1:]).transpose(1, 2).reshape(x.shape)
    return x


def _gemma(name: str, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Gemma's norms multiply by 1 + weight."""
    return x + 1 if name.endswith("norm.weight") else x


ARCHITECTURES = dict(
    gpt2=Architecture("GPT2", _gpt2),
    llama=Architecture("LLAMA", _llama),
    mistral=Architecture("LLAMA", _llama),
    qwen2=Architecture("QWEN2"),
    qwen3=Architecture("QWEN3"),
    gemma=Architecture("GEMMA", _gemma),
    gemma2=Architecture("GEMMA2", _gemma),
    gemma3_text=Architecture("GEMMA3", _gemma),
    phi3=Architecture("PHI3"),
    olmo2=Architecture("OLMO2"),
)


def refuse_kind(facts: Facts) -> None:
    """Raise SettingsError for a model that llama.cpp cannot be compared on."""
    if isinstance(facts, (T5Facts, BertFacts)):
        of_t5, kind = isinstance(facts, T5Facts), facts.settings.model_type
        why = "its server runs no encoder-decoder" if of_t5 else "it has this model as an embedding, without its words"
        raise SettingsError(
            f"--format gguf: a {kind} is not exported for llama.cpp", why, "--format hf, onnx or torch-export"
        )


def refuse_other(family: Family) -> Architecture:
    """The architecture of a family. Raises SettingsError if llama.cpp does not run it, or runs it differently."""
    if family.kind not in ARCHITECTURES:
        others = "--format hf" if getattr(family.facts.settings, "mixture", False) else "--format hf or onnx"
        why = f"it is exported for {', '.join(ARCHITECTURES)}"
        raise SettingsError(f"--format gguf: {family.kind} is not exported for llama.cpp", why, others)
    config = family.theirs(None, "float32")
    longest, window = config.get("max_position_embeddings"), config.get("sliding_window")
    activation, scalar = config.get("activation_function", "gelu_new"), config.get("query_pre_attn_scalar")
    different = {
        f"activation {activation}": activation != "gelu_new",
        f"--window-size {window}": window is not None and window < longest and not family.kind.startswith("gemma"),
        f"--query-pre-attn-scalar {scalar}": scalar is not None and scalar != config.get("head_dim"),
    }
    if any(different.values()):
        named = ", ".join(what for what, so in different.items() if so)
        raise SettingsError(
            f"--format gguf: llama.cpp computes {family.kind} without {named}", do="--format hf or onnx"
        )
    return ARCHITECTURES[family.kind]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write(
    path: Path,
    reader: Reader,
    family: Family,
    dtype: str,
    tokenizer: ExportedTokenizer,
    name: str,
    products: Mapping[str, Rounded] = MappingProxyType({}),
) -> None:
    """Write a GGUF file. dtype: a row of `TYPES`. tokenizer: its files are beside `path`. products: layer -> quantized
    weight.

    Matrices have this dtype; vectors and positions stay in fp32, as llama.cpp expects. With 4 bits, embeddings and output
    layer have 8.
    """
    gguf = library()
    architecture = refuse_other(family)
    kind, config = getattr(gguf.MODEL_ARCH, architecture.name), family.theirs(tokenizer.end, "float32")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    _describe(writer, config, name)
    wanted, file_type = TYPES[dtype]
    writer.add_file_type(gguf.LlamaFileType[file_type])
    gguf_vocabulary.add(writer, path.parent, tokenizer, config["vocab_size"])
    kinds, names = gguf.GGMLQuantizationType, gguf.get_tensor_name_map(kind, family.facts.num_layers)

    def tensors(meta: bool) -> Iterator[tuple[str, str, Sequence[torch.Tensor]]]:
        """(their name, format, values) of every tensor; of shapes alone if `meta`.

        The values of a quantized layer in blocks are its whole numbers, scales and zeros, each at all inputs.
        """
        for match in family.matches:
            parts = _parts(match, reader, products.get(match.ours.removesuffix(".weight")), wanted, meta)
            for theirs, *xs in zip(match.theirs, *(match.to_theirs(part) for part in parts)):
                called = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
                if called is None:
                    raise SettingsError(f"--format gguf: {architecture.name} of llama.cpp has no {theirs}")
                xs = [architecture.fix(theirs, x, config) for x in xs]
                yield called, _format_of(called, family.facts.weights[match.ours], xs[0].shape, wanted), xs
        for called, x in _extra_tensors(family):
            yield called, "F32", [x]

    shapes = list(tensors(meta=True))
    for called, made, [x, *_] in shapes:
        _add_info(writer, called, tuple(x.shape), kinds[made])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with ProgressBar("writing", len(shapes), "tensors") as done:
        for _, made, [x, *beside] in tensors(meta=False):
            if beside:
                writer.write_tensor_data(_blocks(made, x, *beside))
            else:
                writer.write_tensor_data(gguf.quantize(x.float().contiguous().numpy(), kinds[made]))
            done()
    writer.close()


def _add_info(writer, called: str, shape: tuple[int, ...], kind) -> None:
    """Announce a tensor of a format (`gguf.GGMLQuantizationType`), before its values are written."""
    if plain := {"F32": np.float32, "F16": np.float16}.get(kind.name):
        writer.add_tensor_info(called, shape, np.dtype(plain), math.prod(shape) * np.dtype(plain).itemsize, kind)
        return
    shape = library().quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(called, shape, np.dtype(np.uint8), math.prod(shape), kind)


def _parts(match, reader: Reader, product: Optional[Rounded], wanted: str, meta: bool) -> list[torch.Tensor]:
    """The values of one of our tensors; of a quantized layer in blocks its whole numbers, scales and zeros."""
    if product is None:
        stored = reader.tensors[match.ours]
        return [torch.empty(stored.shape, device="meta") if meta else reader.read(match.ours, dtype=torch.float32)]
    codes, shape = product.codes(), product.layer.placements["weight"].shape
    if wanted not in BLOCKS:
        return [codes.weight().view(shape)]
    return [x.float().repeat_interleave(shape[-1] // x.shape[1], 1).view(shape) for x in codes]


def _format_of(called: str, ours: Placement, shape: Sequence[int], wanted: str) -> str:
    """The format of a tensor in a file of `wanted`."""
    if len(shape) < 2 or called.startswith("position_embd"):
        return "F32"
    made = "Q8_0" if wanted in ("Q4_0", "Q4_1") and ours.embedding_or_output else wanted
    return "F16" if made in BLOCKS and shape[-1] % BLOCK else made  # rows of other sizes have no blocks


def _blocks(made: str, values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> np.ndarray:
    """Whole numbers as blocks of 32 with a scale in fp16, [o, bytes]. Inputs of a block have the same scale and zero.

    Q8_0: d, 32 x int8. Q4_0: d, numbers - 8 of w = d q. Q4_1: d, m of w = d q + m. Number n of 16 is in the lower half of
    byte n, and number n + 16 in the upper.
    """
    blocks = [x.contiguous().unflatten(1, (-1, BLOCK)) for x in (values, scale, zero)]  # [o, g, 32]
    values, scale, zero = blocks[0], *(x[:, :, :1] for x in blocks[1:])
    as_bytes = lambda x: x.contiguous().view(torch.uint8)
    parts = [as_bytes(scale.half())]
    if made == "Q4_1":
        parts.append(as_bytes((-zero * scale).half()))
    if made == "Q8_0":
        parts.append(as_bytes(values.to(torch.int8)))
    else:
        whole = values.to(torch.uint8)
        parts.append(whole[:, :, : BLOCK // 2] | whole[:, :, BLOCK // 2 :] << 4)
    return torch.cat(parts, 2).flatten(1).numpy()


def rounded(weight: torch.Tensor, dtype: str) -> torch.Tensor:
    """A matrix [..., i] with the values that it has in a file of `dtype`, in fp32."""
    gguf, made = library(), TYPES[dtype][0]
    if made not in BLOCKS or weight.shape[-1] % BLOCK:
        return weight
    kind = gguf.GGMLQuantizationType[made]
    values = gguf.dequantize(gguf.quantize(weight.float().flatten(0, -2).numpy(), kind), kind)
    return torch.from_numpy(values).view(weight.shape)


def format_for(product: Rounded) -> str:
    """The format of blocks that holds the whole numbers of a layer. Raises SettingsError if there is none."""
    if not isinstance(product, Int4):
        return "q8_0"
    if product.group_size % BLOCK:
        raise SettingsError(
            f"--format gguf: groups of {product.group_size} inputs are no blocks of llama.cpp's",
            do=f"--quantize-group-size {BLOCK}, or a multiple of it",
        )
    return "q4_0" if product.symmetric else "q4_1"


def _describe(writer, config: dict[str, Any], name: str) -> None:
    """The sizes of a model, from its config.json."""

    def of(*names: str):
        return next((config[name] for name in names if config.get(name) is not None), None)

    heads = of("num_attention_heads", "n_head")
    writer.add_name(name)
    writer.add_block_count(of("num_hidden_layers", "n_layer"))
    writer.add_context_length(of("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(of("hidden_size", "n_embd"))
    writer.add_feed_forward_length(of("intermediate_size", "n_inner") or 4 * of("n_embd"))
    writer.add_head_count(heads)
    writer.add_head_count_kv(of("num_key_value_heads") or heads)
    writer.add_vocab_size(config["vocab_size"])
    if "rms_norm_eps" not in config:
        writer.add_layer_norm_eps(of("layer_norm_epsilon"))
        return
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    width = of("head_dim") or of("hidden_size") // heads
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    if config.get("sliding_window") and config["model_type"].startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    _describe_rope(writer, config)


def _describe_rope(writer, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:  # Gemma 3: other frequencies in layers with a window
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    rope = rope.get("full_attention", rope)
    kind, scalings = rope.get("rope_type", "default"), library().RopeScalingType
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(scalings.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        if not rope.get("truncate", True):
            raise SettingsError("--format gguf: llama.cpp rounds the borders of YaRN", do="--format hf or onnx")
        usual = 0.1 * np.log(rope["factor"]) + 1.0
        writer.add_rope_scaling_type(scalings.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_attn_factors(rope["attention_factor"] / usual)


def _extra_tensors(family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """Llama 3's divisors of rotary frequencies."""
    model = family.facts.settings
    if getattr(model, "use_rope_scaling", False):
        plain = model.rotary_base ** -(torch.arange(0, model.head_dim, 2).float() / model.head_dim)
        yield "rope_freqs.weight", plain / scaled_frequencies(plain, model)


def library():
    """The package gguf. Raises SettingsError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise MissingPackage("--format gguf needs the package gguf", do="pip install gguf") from None
    return gguf
