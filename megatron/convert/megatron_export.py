# SPDX-License-Identifier: Apache-2.0
"""Export the weights of GPTs to Megatron-LM's classic checkpoints: `release/mp_rank_XX[_YYY]/model_optim_rng.pt`.

`release` is Megatron-LM's name for weights without training state: it loads them without optimizer and random state and
starts at iteration 0. A file holds the part of one rank for the given tp and pp: boxes of the logical tensors, flattened
to Megatron-LM's matrices, with the names of one of its implementations. `megatron_lm` can read them.

The vocabulary is padded to a multiple of `make_vocab_size_divisible_by` x tp, and Megatron-LM's softmax counts the padding.
Padding rows are the mean of all rows, so their logit is the mean of the logits: p rows of padding in addition to v tokens
add at most log(1 + p/v) to any loss, and are never the likeliest.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import product
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.checkpoint.boxes import Box, find_flaw
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.reader import Reader
from megatron.convert.families import prompts_for
from megatron.convert.imported import refuse_differences
from megatron.convert.megatron_arguments import flags_to_give, their_arguments, unknown_settings
from megatron.convert.megatron_dist import open_distributed
from megatron.convert.megatron_lm import open_classic
from megatron.convert.megatron_names import WORDS, Dictionary
from megatron.convert.megatron_optimizer import with_moments
from megatron.convert.megatron_pieces import their_rows
from megatron.convert.merged import for_export
from megatron.errors import DataError, SettingsError
from megatron.inference.agreement import agreement
from megatron.inference.load import Loaded, load_model, tokenizer_settings, without_model
from megatron.inference.quantized import refuse_quantized
from megatron.model.gpt.facts import GPTFacts
from megatron.model.hybrid import kinds_of
from megatron.model.hybrid_names import in_turn, pairs_of
from megatron.model.megatron_form import Implementation
from megatron.model.recipe import SCRIPTS
from megatron.model.weights import add_prefix
from megatron.mpu.initialize import DTYPES
from megatron.mpu.placement import Placement
from megatron.settings import schema
from megatron.settings.from_checkpoint import located
from megatron.storage.durable import storage_errors
from megatron.storage.new_folder import new_folder

# On the last stage: without, with legacy models
COPY_OF_TABLE = ("output_layer.weight", "word_embeddings_for_head.weight")


@dataclass(frozen=True)
class Export:
    """A model to export, and the layout and names of the files. tp, pp, ep: sizes for the new files."""

    model: schema.Model
    vocab_size: int
    tp: int
    pp: int
    implementation: Implementation
    dtype: torch.dtype
    ep: int = 1

    @property
    def grouped(self) -> bool:
        """Whether experts are TEGroupedMLP (--moe-grouped-gemm)."""
        return self.implementation == "transformer_engine"

    @cached_property
    def facts(self) -> GPTFacts:
        return GPTFacts(self.model, self.vocab_size)

    @cached_property
    def names(self) -> Dictionary:
        return Dictionary(self.facts)

    @property
    def padded_vocab(self) -> int:
        multiple = self.model.make_vocab_size_divisible_by * self.tp
        return -(-self.vocab_size // multiple) * multiple


def to_megatron(
    path: Path,
    out: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    implementation: Implementation = "transformer_engine",
    dtype: torch.dtype = torch.float32,
    whole_run: Optional[Callable] = None,
    check: bool = True,
    log: Callable[[str], None] = print,
) -> list[str]:
    """Export a checkpoint directory to a folder that Megatron-LM can load; returns notices for the user.

    whole_run: writes a distributed checkpoint with Adam's state instead (`megatron_dist_export.write_distributed`)
    check: read the output back, as `from-megatron` does, and compare all settings and tensors before `out` appears.
    Raises SettingsError for an unsupported model or layout, CheckpointError if the comparison fails.
    """
    trained = path
    with for_export(path, out, "this form of Megatron-LM's", _is_hybrid) as path, Reader(path) as reader:
        refuse_quantized(reader, "to-megatron")
        reader.needed("config")
        config = schema.from_record(located(reader.state))
        export = Export(config.model, reader.needed("vocab_size"), tp, pp, implementation, dtype, ep)
        check_expressible(export)
        padding = _padding_rows(reader)
        with new_folder(out) as folder:
            vocabulary, lost = _vocabulary(without_model(config, reader.state, path))
            args = arguments(export, vocabulary, reader.state.get("iteration", 0))
            (whole_run or write_ranks)(export, reader, padding, args, folder, log)
            read = [compare(export, reader, folder, bool(whole_run)) + rounding(export, trained, path)] if check else []
            notices = [*lost, *read]
    if added := export.padded_vocab - export.vocab_size:
        notices.append(f"{added} rows of padding hold the mean of all rows: Megatron-LM's softmax counts them")
    layout = f"tensor parallel {tp} x pipeline parallel {pp}" + (f", expert parallel {ep}" if ep > 1 else "")
    flags = f"--load {out} --ckpt-format torch" + (" --use-legacy-models" if implementation == "legacy" else "")
    if whole_run:
        layout = f"the run at iteration {args.iteration} with Adam's state, for any layout"
        flags = f"--load {out} --ckpt-format torch_dist --use-distributed-optimizer --no-load-rng"
    flags += f" --use-checkpoint-args{flags_to_give(export.model)}"
    return [f"{out}: {layout}, names of {implementation}", *notices, f"in Megatron-LM: {flags}"]


def write_ranks(export: Export, reader: Reader, padding, args: argparse.Namespace, folder: Path, log) -> None:
    """Write a file for each of their ranks."""
    for pipeline, tensor, expert in product(range(export.pp), range(export.tp), range(export.ep)):
        name = f"mp_rank_{tensor:02d}" + (f"_{pipeline:03d}" if export.pp > 1 else "")
        name += f"_{expert:03d}" if export.ep > 1 else ""
        log(f"writing release/{name}")
        model = rank_tensors(export, reader, padding, tensor, pipeline, expert)
        content = dict(args=args, checkpoint_version=3.0, iteration=args.iteration)
        _write(folder / "release" / name / "model_optim_rng.pt", content | dict(model=model))
    (folder / TRACKER).write_text("release")


def _is_hybrid(config: schema.Config) -> bool:
    """Whether a model is a HybridModel there, and no GPT."""
    letters = config.model.letters
    return bool(letters) and (config.model.depths > 0 or not in_turn(letters, pairs_of(letters, kinds_of(config))))


def check_expressible(export: Export) -> None:
    """Raise SettingsError for a model that Megatron-LM or this export does not support, or an invalid layout."""
    model = export.model
    other = unknown_settings(model, export.implementation == "legacy")
    if model.model_type not in ("GPT", *SCRIPTS):
        other.append(f"model_type {model.model_type}")
    if any(len(branch.mixers) > 1 for kind in export.facts.layer_kinds for branch in kind.branches):
        other.append("mixers beside each other")
    if other:
        raise SettingsError(
            f"a model with {', '.join(other)} is not exported to Megatron-LM",
            do="it trains, evaluates and generates here; python -m megatron.tools.checkpoint to-hf writes it for "
            "transformers, if that has such a model",
        )
    if export.ep > 1 and not model.mixture:
        raise SettingsError(
            f"--target-expert-model-parallel-size {export.ep}: the model has no experts", do="leave it out"
        )
    if export.ep > 1 and model.num_experts % export.ep:
        raise SettingsError(
            f"{model.num_experts} experts cannot be divided by --target-expert-model-parallel-size {export.ep}"
        )
    for what, size in export.facts.divisible_by_tp().items():
        if size % export.tp:
            raise SettingsError(f"{size} ({what}) cannot be divided by --target-tensor-parallel-size {export.tp}")
    if model.num_layers % export.pp:
        raise SettingsError(
            f"{model.num_layers} layers cannot be divided by --target-pipeline-parallel-size {export.pp}"
        )


# ---- tensors ---------------------------------------------------------------------------------------------------------


def rank_tensors(
    export: Export, reader: Reader, padding, tensor: int, pipeline: int, expert: int = 0
) -> dict[str, Any]:
    """The tensors that one of their ranks saves under `model`."""
    first, last = pipeline == 0, pipeline == export.pp - 1
    a_stage = export.model.num_layers // export.pp
    layers = range(pipeline * a_stage, (pipeline + 1) * a_stage)
    names, flat = export.names, {}
    for unit in export.facts.units(layers, first, last):
        for name, placed in add_prefix(unit.name, unit.weights).items():
            if "ep" in placed.cut:
                for number, x in _experts(export, reader, name, placed, tensor, expert):
                    flat[names.their_expert(name, number, export.grouped, layers.start)] = x
                continue
            their = names.theirs(name, export.implementation, layers.start)
            if placed.buffer:
                if placed.buffer.combine == "same":  # fp32: rounded it would choose other experts
                    flat[their] = reader.read(name)
                continue  # counts are 0
            local = local_part(export, reader, padding, name, placed, tensor)
            copy = name == WORDS and not first  # of the last stage
            if not copy or export.model.depths:
                flat[their] = local
            if copy and export.facts.tied:
                flat[COPY_OF_TABLE[export.implementation == "legacy"]] = local
    # None: no fp8
    return _nested(flat) if export.implementation == "legacy" else flat | dict.fromkeys(extra_states(flat))


def local_part(
    export: Export, reader: Reader, padding, name: str, placed: Placement, tensor: int, prefix: Optional[str] = None
) -> torch.Tensor:
    """One rank's part of a tensor, as a matrix [rows, inputs] or a vector, with padding rows.

    prefix: of its main weights or moments, which are fp32
    """
    shape = placed.local_shape({"tp": export.tp})
    box = Box(*placed.box(shape, {"tp": tensor}))
    dtype = torch.float32 if placed.exact or prefix is not None else export.dtype
    name_there = (prefix or "") + name
    x = reader.read(name_there, box, dtype)
    if box.extent[0] < shape[0]:
        x = torch.cat([x, padding(name_there).to(dtype).expand(shape[0] - box.extent[0], -1)])
    x = their_rows(name, export.names.rows(name), x)
    return x.chunk(export.tp)[tensor] if export.names.divided(name, export.implementation) else x


def _experts(export: Export, reader: Reader, name: str, placed: Placement, tensor: int, expert: int):
    """(number on its rank, tensor) of the experts of one of their ranks, of one of our tensors."""
    count, sizes = export.model.num_experts // export.ep, {"ep": export.model.num_experts, "etp": export.tp}
    shape = placed.local_shape(sizes)
    for number in range(count):
        box = Box(*placed.box(shape, {"ep": expert * count + number, "etp": tensor}))
        x = reader.read(name, box, export.dtype)[0]
        yield number, x.flatten(0, -2) if name.endswith(".weight") and x.dim() > 1 else x.flatten()


def _padding_rows(reader: Reader, rows: int = 4096) -> Callable[[str], torch.Tensor]:
    """A function: name of a table [v, h] -> mean of its rows [h], read in blocks of `rows`."""

    @cache
    def mean(name: str) -> torch.Tensor:
        v, h = reader.tensors[name].shape
        boxes = (Box((at, 0), (min(rows, v - at), h)) for at in range(0, v, rows))
        return sum(reader.read(name, box, torch.float64).sum(0) for box in boxes) / v

    return mean


def extra_states(names: Iterable[str]) -> list[str]:
    """The names of the fp8 state that Megatron-Core's linear layers save with their weights."""
    linear = re.compile(r".*\.(linear_\w+|in_proj|out_proj|eh_proj)\.weight|output_layer\.weight")
    return [name.removesuffix("weight") + "_extra_state" for name in names if linear.fullmatch(name)]


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """The nested dictionaries of legacy models."""
    found: dict[str, Any] = {"language_model": {}}
    for name, x in flat.items():
        module, rest = name.split(".", 1)
        if module == "word_embeddings_for_head":
            found[module] = {rest: x}
        elif module == "embedding":
            table, kind = rest.split(".")
            found["language_model"].setdefault(module, {})[table] = {kind: x}
        else:
            found["language_model"].setdefault(module, {})[rest] = x
    return found


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True)
    with storage_errors(path), open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _vocabulary(loaded: Loaded) -> tuple[schema.TokenizerSettings, list[str]]:
    """The type and the files of the run's tokenizer, and a notice if they are not here: then they are as recorded."""
    own = loaded.config.tokenizer
    try:
        return (tokenizer_settings(loaded) if own.of_texts else own), []
    except DataError as error:
        return own, [f"the tokenizer's files are named as the run named them: {error.what}"]


# ---- settings --------------------------------------------------------------------------------------------------------


def arguments(export: Export, tokenizer: schema.TokenizerSettings, iteration: int) -> argparse.Namespace:
    """The arguments of a Megatron-LM run with this model."""
    m, legacy = export.model, export.implementation == "legacy"
    named = {f.name: getattr(tokenizer, f.name) for f in fields(tokenizer)}
    files = {name: named.get(name) for name in ("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model")}
    return argparse.Namespace(
        **their_arguments(m, legacy, export.pp),
        **(_of_experts(export) if m.mixture else {}),
        vocab_size=export.vocab_size,
        padded_vocab_size=export.padded_vocab,
        tensor_model_parallel_size=export.tp,
        pipeline_model_parallel_size=export.pp,
        virtual_pipeline_model_parallel_size=None,
        world_size=export.tp * export.pp,
        params_dtype=export.dtype,
        fp16=export.dtype == torch.float16,
        bf16=export.dtype == torch.bfloat16,
        transformer_impl="local" if legacy else export.implementation,
        use_legacy_models=legacy,
        ckpt_format="torch",
        data_parallel_random_init=False,
        iteration=iteration,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        no_save_optim=True,
        no_save_rng=True,
        **files,
    )


def _of_experts(export: Export) -> dict[str, Any]:
    """The arguments of how experts are divided."""
    sizes = dict(expert_model_parallel_size=export.ep, expert_tensor_parallel_size=export.tp)
    return sizes | dict(moe_grouped_gemm=export.grouped)


# ---- verification ----------------------------------------------------------------------------------------------------


def compare(export: Export, reader: Reader, folder: Path, optimizer: bool = False) -> str:
    """Read the export as `from-megatron` does; returns a notice. Raises CheckpointError if it is another model."""
    open_model = open_distributed if optimizer else open_classic
    found = open_model(folder, None, None, None, optimizer=optimizer, log=lambda text: None)
    ours, theirs = (their_arguments(model, legacy=False) for model in (export.model, found.model))
    differ = [f"{name} {theirs.get(name)}" for name in ours if ours[name] != theirs.get(name)]
    if found.vocab_size != export.vocab_size:
        differ.append(f"vocabulary {found.vocab_size}")
    names = with_moments(export.facts.weights) if optimizer else export.facts.weights
    boxes: dict[str, list[Box]] = {name: [] for name in names}
    for piece in _pieces(found.shards()):
        boxes[piece.name].append(piece.box)
        placed = export.facts.weights.get(piece.name)
        dtype = torch.float32 if optimizer or placed.buffer or placed.exact else export.dtype
        if not torch.equal(reader.read(piece.name, piece.box, dtype).float(), piece.tensor.float()):
            differ.append(piece.name)
    shapes = {name: reader.tensors[name].shape for name in names}
    differ += [f"{name}: {flaw}" for name, found in boxes.items() if (flaw := find_flaw(shapes[name], found))]
    refuse_differences(differ)
    return f"read back: the same settings, and {len(boxes)} tensors equal to the bit"


@torch.no_grad()
def rounding(export: Export, trained: Path, path: Path) -> str:
    """How far the files are from the checkpoint `trained`, in words; empty if they are not. path: with adapters merged"""
    if path == trained and export.dtype == torch.float32:
        return ""
    prompts, dtype = prompts_for(export.facts), next(name for name, one in DTYPES.items() if one == export.dtype)
    loaded = load_model(str(trained), precision="fp32")
    checkpoint = loaded.model.logits(prompts)
    loaded = loaded if path == trained else load_model(str(path), precision="fp32")
    for parameter in loaded.model.parameters():
        parameter.copy_(parameter.to(export.dtype).float())
    ours = loaded.model.logits(prompts)
    found = agreement("hf", dtype, "the files", ours, ours, checkpoint=checkpoint)
    return f"; {found.sentence}" if found.rounded else ""


def _pieces(shards) -> Iterator:
    return (piece for shard in shards for piece in shard)
