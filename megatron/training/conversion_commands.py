# SPDX-License-Identifier: Apache-2.0
"""The commands of megatron.tools.checkpoint that exchange models with other libraries."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional, get_type_hints

from megatron.errors import UsageError
from megatron.model.kinds.experts.settings import ExpertSettings
from megatron.model.quantization import QuantizeOptions
from megatron.settings.schema import setting


@dataclass(frozen=True)
class ToHFOptions:
    """Options of the export to Hugging Face."""

    dtype: Literal["fp32", "bf16", "fp16"] = setting("format of the weights", "bf16")
    max_shard_size: str = setting("most bytes of a file of weights, as 5GB or 500MB", "5GB")
    unchecked: bool = setting("do not run both models first (for models larger than memory)", False)


@dataclass(frozen=True)
class FromHFOptions:
    """Options of the import from Hugging Face."""

    mtp_num_layers: int = setting(
        "depths of multi-token prediction to import, of files that have some; 0: none, as transformers reads them", 0
    )
    unchecked: bool = setting("do not run both models first (for models larger than memory)", False)


@dataclass(frozen=True)
class FromMegatronOptions:
    """Values that Megatron-LM's files may lack."""

    vocab_size: Optional[int] = setting("tokens without padding (default: what the arguments say, or all rows)", None)
    num_attention_heads: Optional[int] = setting("where the saved arguments lack it", None)
    no_load_optim: bool = setting("import the weights alone, without the optimizer state", False)


@dataclass(frozen=True)
class ToMegatronOptions:
    """Options of the export to Megatron-LM."""

    target_tensor_parallel_size: int = setting(
        "tensor parallel ranks: files of each stage", 1, "--target-tensor-model-parallel-size", "--tp"
    )
    target_pipeline_parallel_size: int = setting(
        "pipeline stages of equally many layers", 1, "--target-pipeline-model-parallel-size", "--pp"
    )
    target_expert_model_parallel_size: int = setting(
        "expert parallel ranks: files of each tensor parallel rank", 1, "--target-expert-parallel-size", "--ep"
    )
    transformer_impl: Literal["transformer_engine", "local", "legacy"] = setting(
        "whose names the tensors have: Megatron-Core's with Transformer Engine or without, or those before Megatron-Core",
        "transformer_engine",
        "--use-legacy-models=legacy",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = setting("format of the weights", "fp32")
    with_optimizer: bool = setting("the run with Adam's state, as a distributed checkpoint (torch_dist)", False)
    unchecked: bool = setting("do not read and compare what was written", False)


@dataclass(frozen=True)
class FromDCPOptions:
    """What the files of torch.distributed.checkpoint do not say."""

    hf_config: Optional[str] = setting("config.json of the model in Hugging Face's format, or its folder", None)
    global_batch_size: Optional[int] = setting("samples of a step, of a checkpoint with optimizer state", None)
    no_load_optim: bool = setting("import the weights alone, without the optimizer state", False)


@dataclass(frozen=True)
class ToDCPOptions:
    """Options of the export to torch.distributed.checkpoint."""

    names: Literal["torchtitan", "torchtitan-0.2", "automodel"] = setting(
        "whose names and folders: torchtitan's of today or until April 2026, or NeMo Automodel's (Hugging Face's names)",
        "torchtitan",
    )
    dtype: Literal["fp32", "bf16", "fp16"] = setting("format of the weights", "fp32")
    weights_only: bool = setting("leave optimizer state out", False)
    unchecked: bool = setting("do not read and compare what was written", False)


@dataclass(frozen=True)
class UpcycleOptions:
    """Options of `upcycle`."""

    seed: int = setting("of the routers' initial weights", 1234)
    writers: int = setting("files of equal size", 1)
    unchecked: bool = setting("do not compare the logits of both models (for models larger than memory)", False)


def _of_experts() -> type:
    """The settings of `Model` for experts, as options of a command."""
    hints, own = get_type_hints(ExpertSettings), fields(ExpertSettings)
    options = [(f.name, hints[f.name], field(default=f.default, metadata=f.metadata)) for f in own]
    return make_dataclass("ExpertOptions", options, frozen=True)


ExpertOptions = _of_experts()


@dataclass(frozen=True)
class MergeOptions:
    """Options of the merge of adapters or masks."""

    writers: int = setting("files of equal size", 1)


@dataclass(frozen=True)
class ToPeftOptions:
    """Options of the export to PEFT."""

    base_model: Optional[str] = setting("Hugging Face model of the adapters, for adapter_config.json", None)


@dataclass(frozen=True)
class FromPeftOptions:
    """Options of the import from PEFT."""

    base: Optional[str] = setting("checkpoint of the model that they belong to (from-hf writes it)", None)
    unchecked: bool = setting("do not compare --base with the model that adapter_config.json names", False)


def to_hf(path: Path, out: Path, which, how: ToHFOptions, given: Mapping[str, Any]) -> None:
    """Export a decoder, T5 or BERT for Hugging Face transformers; nothing is written if both models do not agree."""
    from megatron.checkpoint.choose import newest
    from megatron.convert import hf_files, huggingface
    from megatron.mpu.initialize import DTYPES

    file_bytes, source = hf_files.bytes_of(how.max_shard_size), newest(path, which.ckpt_step)
    options = dict(check=not how.unchecked, file_bytes=file_bytes)
    notes = huggingface.to_hf(source, out, DTYPES[how.dtype], given, **options)
    print("\n  ".join(notes))


def to_megatron(path: Path, out: Path, which, how: ToMegatronOptions) -> None:
    """Export a GPT to Megatron-LM: files of ranks, or torch_dist with Adam's state; nothing if it reads back changed."""
    tp, pp = how.target_tensor_parallel_size, how.target_pipeline_parallel_size
    ep = how.target_expert_model_parallel_size
    if min(tp, pp, ep) < 1 or tp > 100 or max(pp, ep) > 1000:
        raise UsageError(
            f"{tp} x {pp} x {ep} files cannot be written",
            do="sizes are 1 to 100 (tensor) and 1 to 1000 (pipeline, experts)",
        )

    from megatron.checkpoint.choose import newest
    from megatron.convert import megatron_dist_export, megatron_export
    from megatron.mpu.initialize import DTYPES

    source = newest(path, which.ckpt_step)
    notes = megatron_export.to_megatron(
        source,
        out,
        tp=tp,
        pp=pp,
        ep=ep,
        implementation=how.transformer_impl,
        dtype=DTYPES[how.dtype],
        whole_run=megatron_dist_export.write_distributed if how.with_optimizer else None,
        check=not how.unchecked,
        log=lambda text: print(text, file=sys.stderr),
    )
    print("\n  ".join(notes))


def from_hf(path: Path, out: Path, which, how: FromHFOptions) -> None:
    """Import a decoder, T5 or BERT of Hugging Face transformers; nothing is written if both models do not agree."""
    from megatron.convert import huggingface

    if how.mtp_num_layers < 0:
        raise UsageError(f"--mtp-num-layers {how.mtp_num_layers}: a number from 0")
    notes = huggingface.from_hf(path, out, fresh_state(), check=not how.unchecked, depths=how.mtp_num_layers)
    print("\n  ".join([*notes, f"train on with --load {out} --finetune"]))


def from_megatron(path: Path, out: Path, which, how: FromMegatronOptions) -> None:
    """Import a GPT of Megatron-LM, with its optimizer state: classic or distributed checkpoints. Runs no pickled code."""
    from megatron.convert import megatron_dist, megatron_lm
    from megatron.convert.imported import write_import

    distributed = megatron_dist.is_distributed(path, which.ckpt_step)
    open_model = megatron_dist.open_distributed if distributed else megatron_lm.open_classic
    log = lambda text: print(text, file=sys.stderr)
    asked = (which.ckpt_step, how.vocab_size, how.num_attention_heads, not how.no_load_optim)
    notes = write_import(partial(open_model, path, *asked, log), out, fresh_state())
    print("\n  ".join(notes))


def from_dcp(path: Path, out: Path, which, how: FromDCPOptions) -> None:
    """Import a decoder of torch.distributed.checkpoint (torchtitan, NeMo Automodel), with Adam's state."""
    from megatron.convert.dcp import open_dcp
    from megatron.convert.imported import write_import

    config = None if how.hf_config is None else Path(how.hf_config)
    asked = (which.ckpt_step, config, how.global_batch_size, not how.no_load_optim)
    log = lambda text: print(text, file=sys.stderr)
    print("\n  ".join(write_import(partial(open_dcp, path, *asked, log), out, fresh_state())))


def to_dcp(path: Path, out: Path, which, how: ToDCPOptions, given: Mapping[str, Any]) -> None:
    """Export a decoder with Adam's state for torchtitan or NeMo Automodel; nothing is written if it reads back changed."""
    from megatron.checkpoint.choose import newest
    from megatron.convert import dcp
    from megatron.mpu.initialize import DTYPES

    source = newest(path, which.ckpt_step)
    more = dict(optimizer=not how.weights_only, check=not how.unchecked)
    notes = dcp.to_dcp(source, out, how.names, DTYPES[how.dtype], given, **more)
    print("\n  ".join(notes))


def merge_lora(path: Path, out: Path, which, how: MergeOptions) -> None:
    """Merge LoRA adapters into the weights of their base: a checkpoint of an ordinary model, without optimizer state."""
    from megatron.convert.merged import merge

    notices: list[str] = []
    _merge(partial(merge, log=notices.append), path, out, which, how, notices)


def apply_masks(path: Path, out: Path, which, how: MergeOptions) -> None:
    """Apply the masks of --sparsity: a checkpoint of an ordinary model with zeros, without optimizer state."""
    from megatron.convert.merged import apply_masks

    _merge(apply_masks, path, out, which, how)


def check_writers(count: int) -> None:
    """Raise UsageError for a number of files that no checkpoint has."""
    if not 1 <= count <= 99999:
        raise UsageError(f"{count} files cannot be written", do="give a number from 1 to 99999")


def _merge(merge: Callable[..., Path], path: Path, out: Path, which, how: MergeOptions, notices=()) -> None:
    from megatron.checkpoint.choose import newest

    check_writers(how.writers)
    source = newest(path, which.ckpt_step)
    made = merge(source, out, how.writers)
    print("\n  ".join([f"{made}: merged, to be loaded with --load {out}", *notices]))


def upcycle(path: Path, out: Path, which, how: UpcycleOptions, given: Mapping[str, Any]) -> None:
    """Make a mixture of experts from a dense GPT that computes the same function: --num-experts, and --moe- flags."""
    from megatron.checkpoint.choose import newest
    from megatron.convert.upcycled import upcycle as write

    check_writers(how.writers)
    source = newest(path, which.ckpt_step)
    more = dict(seed=how.seed, writers=how.writers, check=not how.unchecked)
    print("\n  ".join(write(source, out, given, **more)))


def quantize(path: Path, out: Path, which, how: QuantizeOptions) -> None:
    """Quantize a model: a checkpoint for generation, evaluation, the server and exports, without optimizer state."""
    from megatron.checkpoint.choose import newest
    from megatron.checkpoint.reshard import rewrite
    from megatron.convert.merged import merged_first
    from megatron.inference.load import load_model
    from megatron.inference.quantized import quantized
    from megatron.storage.new_folder import check_free

    if how.quantize is None:
        raise UsageError("missing: --quantize", do="--quantize int8, int8-dynamic or int4")
    check_free(out)
    source = newest(path, which.ckpt_step)
    with merged_first(source, out) as merged:
        loaded = load_model(str(merged), quantize=how)
        written = rewrite(merged, out, lambda reader: quantized(loaded, how))
    print("\n  ".join([f"{written}: {how.quantize}, to be loaded with --load {out}", *loaded.notices]))


def to_peft(path: Path, out: Path, which, how: ToPeftOptions, given: Mapping[str, Any]) -> None:
    """Export LoRA adapters as a folder of PEFT, Hugging Face's library: adapter_config.json, adapter_model.safetensors."""
    from megatron.checkpoint.choose import newest
    from megatron.convert import peft

    source = newest(path, which.ckpt_step)
    print("\n  ".join(peft.to_peft(source, out, how.base_model, given)))


def from_peft(path: Path, out: Path, which, how: FromPeftOptions) -> None:
    """Import LoRA adapters of PEFT as a checkpoint of adapters on --base, a checkpoint of the model they belong to."""
    from megatron.checkpoint.choose import newest
    from megatron.convert import peft
    from megatron.storage.new_folder import check_free
    from megatron.storage.urls import location

    if how.base is None:
        raise UsageError("from-peft needs the model of the adapters", do="--base DIR, which from-hf writes")
    check_free(out)
    base = newest(location(how.base), which.ckpt_step)
    notes = peft.from_peft(path, out, base, fresh_state(), check=not how.unchecked)
    print("\n  ".join([*notes, f"train on with --load {out} --finetune"]))


def fresh_state() -> dict:
    """The position of a run that has not begun, as checkpoints record it."""
    from megatron.optimizer.scaler import LossScaler
    from megatron.settings.schema import Precision
    from megatron.training.state import State

    return State(LossScaler.of(Precision())).record()
