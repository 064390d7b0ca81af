# SPDX-License-Identifier: Apache-2.0
"""Convert decoders, T5 and BERT to and from Hugging Face transformers, tensor by tensor on CPU, and verify the result.

Before the output appears, both models run on fixed prompts in fp32. If their logits differ by more than `BOUND` x the
largest logit, the conversion fails and writes nothing. One tensor is in memory at a time; the comparison needs memory for
one whole model (and can be skipped for models larger than memory).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import OPTIMIZER
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError, DataError, SettingsError
from megatron.inference.convert import compressed_tensors, hf_files
from megatron.inference.convert.arriving import arriving, needed
from megatron.inference.convert.families import Family, exported, imported, prompts_for
from megatron.inference.convert.hf_tokenizer import ExportedTokenizer, write_tokenizer
from megatron.inference.convert.imported import imported_state
from megatron.inference.convert.merged import merged_first
from megatron.inference.convert.mxfp4 import MXFP4Files, is_mxfp4
from megatron.inference.convert.same_ids import same_ids
from megatron.inference.load import Loaded, load_model, refuse_head, without_model
from megatron.inference.quantize import Rounded
from megatron.inference.quantized import STORED_OF_LAYER, refuse_quantized
from megatron.model.facts import PROJECTIONS
from megatron.model.gpt.hf_names import Match
from megatron.model.recipe import config_of
from megatron.mpu.initialize import DTYPES
from megatron.mpu.placement import Placement
from megatron.settings.from_checkpoint import FILES, located
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import find_template
from megatron.tokenizer.transformers_files import auto_tokenizer

BOUND = 2e-5  # two fp32 implementations are within 1e-6; tanh GeLU instead of erf gives more than 5e-5
ALONE = "transformers has no {} without code from the hub"
PROBES = (
    "The quick brown fox jumps over 13 lazy dogs.\n\tIt's  done; caf\u00e9 \u4e2d\u6587.",
    "def f(x): return x ** 2",
)


# ---- export ----------------------------------------------------------------------------------------------------------


def to_hf(
    path: Path,
    out: Path,
    dtype: torch.dtype,
    given: Mapping[str, Any],
    check: bool = True,
    file_bytes: int = hf_files.FILE_BYTES,
) -> list[str]:
    """Export a checkpoint directory to a folder that `transformers` can load; returns notices for the user.
    Adapters are merged.

    given: tokenizer flags, if the files of the training run have moved. file_bytes: the most bytes of a file of tensors.
    Raises SettingsError for an unsupported model, CheckpointError if the exported model gives other results.
    """
    trained = path
    with merged_first(path, out) as path, Reader(path) as reader, arriving(out) as folder:
        family, files, tokenizer = write_hf(reader, folder, dtype, given, trained, file_bytes)
        notices = list(tokenizer.notices)
        if check and tokenizer.by_transformers:
            notices.append(compare_ids(folder, tokenizer.own))
        if check and family.run is None:
            notices.append(f"{ALONE.format(family.kind)}: the models were not compared")
        elif check:
            loaded = load_model(path, precision="fp32")
            _round(loaded.model, family, dtype)
            notices.append(_compared(family, loaded, folder))
        words = next(name for name, one in DTYPES.items() if one == dtype)
        return [f"{out}: {family.kind} in {', '.join(files)} ({words})", *family.notices, *notices]


class HuggingFaceFolder(NamedTuple):
    """What is in a folder of Hugging Face. files: of tensors"""

    family: Family
    files: list[str]
    tokenizer: ExportedTokenizer


def write_hf(
    reader: Reader,
    folder: Path,
    dtype: torch.dtype,
    given: Mapping[str, Any],
    trained: Path,
    file_bytes: int = hf_files.FILE_BYTES,
    products: Mapping[str, Rounded] = MappingProxyType({}),
) -> HuggingFaceFolder:
    """Write the checkpoint of `reader` into a folder, without a comparison. Its adapters are merged.

    given: tokenizer flags. trained: the checkpoint that the run wrote. products: layer -> its quantized weight, which takes
    the place of the checkpoint's. Raises SettingsError for an unsupported model.
    """
    path = reader.folder
    needed(reader, "config")
    if not products:
        refuse_quantized(reader, "to-hf")
    config, vocab_size = config_of(located(reader.state)), needed(reader, "vocab_size")
    refuse_head(config, vocab_size, path)
    if config.model.linear is not None and not products:
        raise SettingsError(
            f"{path} was trained with --linear {config.model.linear}, which Hugging Face does not have",
            "its layers would multiply with other weights there",
            "python -m megatron.tools.export --format torch-export writes a program of it",
        )
    family = exported(config, vocab_size)
    if products:
        compressed_tensors.refuse_other(family.kind, products)
    refuse_unknown(reader, family, products)
    plan = [_tensors(reader, match, products) for match in family.matches]
    files = hf_files.write_tensors(folder, plan, dtype, file_bytes)
    theirs = partial(family.theirs, dtype=str(dtype).removeprefix("torch."))
    tokenizer = write_tokenizer(folder, without_model(config, reader.state, path), given, trained, theirs)
    settings = tokenizer.with_beginning(theirs(tokenizer.end))
    if products:
        settings["quantization_config"] = compressed_tensors.quantization_config(family, products)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return HuggingFaceFolder(family, files, tokenizer)


def _tensors(reader: Reader, match: Match, products: Mapping[str, Rounded]) -> hf_files.TensorGroup:
    """Their tensors in the place of one of ours."""
    if product := products.get(match.ours.removesuffix(".weight")):
        return compressed_tensors.tensors_of(match, product)
    stored = reader.tensors.get(match.ours)
    if stored is None:
        raise CheckpointError(f"{reader.folder} has no tensor {match.ours}")
    shapes = tuple(tuple(x.shape) for x in match.to_theirs(torch.empty(stored.shape, device="meta")))
    dtypes = (torch.float32,) * len(shapes) if match.exact else ()
    return hf_files.TensorGroup(match.theirs, shapes, lambda: match.to_theirs(reader.read(match.ours)), dtypes)


def refuse_unknown(reader: Reader, family: Family, products: Mapping[str, Rounded] = MappingProxyType({})) -> None:
    """Raise SettingsError for weights that a family does not have: the export would lose them, even if the comparison did
    not show it.
    """
    known = {match.ours for match in family.matches}
    known |= {f"{layer}.{part}" for layer in products for part in STORED_OF_LAYER}
    unknown = sorted(
        name for name in reader.tensors if name not in known and not name.startswith((OPTIMIZER, f"{PROJECTIONS}."))
    )
    if unknown:
        named = ", ".join(unknown[:6]) + f" and {len(unknown) - 6} more" * (len(unknown) > 6)
        raise SettingsError(
            f"{family.kind} of Hugging Face has no {named}", "the model would lose them", "nothing was written"
        )


def compare_ids(folder: Path, tokenizer) -> str:
    """Compare the tokenizer in a folder of transformers with ours. Raises CheckpointError if their ids differ."""
    _transformers()
    try:
        theirs = auto_tokenizer(folder)
    except DataError as error:
        return f"the tokenizer could not be tried in transformers: {error.why}"
    return same_ids(theirs, tokenizer, find_template([folder], tokenizer))


# ---- import ----------------------------------------------------------------------------------------------------------


def from_hf(source: Path, out: Path, state: dict[str, Any], check: bool = True) -> list[str]:
    """Import a Hugging Face folder as a checkpoint of iteration 0, for loading with --finetune.

    state: a run's position as saved (`run.State.record`). Raises CheckpointError for an unsupported model, missing or
    unknown tensors, or if our model gives other results.
    """
    settings = hf_files.read_json(source / "config.json")
    family = imported(settings)
    kind, model, vocab_size = family.kind, family.facts.settings, family.facts.vocab_size
    files = hf_files.TensorFiles(source)
    if is_mxfp4(settings):
        files = MXFP4Files(files)
    if model.num_layers > len(files.shapes):  # before allocating anything per layer
        raise CheckpointError(
            f"{source} holds {len(files.shapes)} tensors, config.json says {model.num_layers:,} layers"
        )
    wanted = {match.ours: match for match in family.matches}
    names = _fitting_names(source, files, family)
    placements = family.facts.weights
    shapes = {name: placed.shape for name, placed in placements.items()}
    assert set(shapes) == set(wanted), set(shapes) ^ set(wanted)
    _check_shapes(source, files, names, wanted, shapes)

    def parts(piece: Piece) -> Iterator[torch.Tensor]:
        match = wanted[piece.name]
        yield match.to_ours([files.get(names[theirs]).float() for theirs in match.theirs])

    with arriving(out) as folder:
        tokenizer = hf_files.import_tokenizer(source, folder / "tokenizer", kind == "gpt2")
        hf_files.import_generation_config(source, folder, settings)
        same_ids = [compare_ids(source, build_tokenizer(tokenizer, lambda text: None))] if tokenizer and check else []
        if tokenizer:
            paths = {name: getattr(tokenizer, name) for name in FILES}
            moved = {name: str(out.resolve() / "tokenizer" / Path(path).name) for name, path in paths.items() if path}
            tokenizer = replace(tokenizer, **moved)
        empty = lambda placed: torch.empty(placed.shape, dtype=_dtype_of(placed), device="meta")
        pieces = [
            Piece(name, placed.shape, Box.whole(placed.shape), empty(placed)) for name, placed in placements.items()
        ]
        origin = f"Hugging Face {kind} in {source.resolve()}"
        content = imported_state(model, vocab_size, state, origin, tokenizer, family.extra)
        content["source"] = hf_files.about(source, settings)
        with Saver(folder) as saver:
            saver.write(0, [pieces], content, parts=parts)
        (folder / ".lock").unlink(missing_ok=True)
        notices = [f"{out}: {kind} of {sum(map(torch.Size.numel, map(torch.Size, shapes.values()))):,} parameters"]
        notices.append(f"its tokenizer is in {out / 'tokenizer'}" if tokenizer else f"{source} holds no tokenizer")
        notices += [*family.unread_notices(source / "config.json"), *same_ids]
        if check and family.run is None:
            notices.append(f"{ALONE.format(kind)}: the models were not compared")
        elif check:
            loaded = load_model(folder, precision="fp32")
            notices.append(_compared(family, loaded, source))
        return notices


def _check_shapes(
    source: Path,
    files: hf_files.TensorFiles,
    names: Mapping[str, str],
    wanted: Mapping[str, Match],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raise CheckpointError for a tensor whose shape is not that of config.json. names: theirs -> that in the files."""
    for ours, match in wanted.items():
        for theirs, expected in zip(match.theirs, match.to_theirs(torch.empty(shapes[ours], device="meta"))):
            found = files.shapes[names[theirs]]
            if found != tuple(expected.shape):
                raise CheckpointError(
                    f"{names[theirs]} in {source} is {found}, config.json says {tuple(expected.shape)}"
                )


def _dtype_of(placed: Placement) -> torch.dtype:
    """The format of a tensor in our checkpoint: fp32 for weights."""
    return torch.float32 if placed.buffer is None else getattr(torch, placed.buffer.dtype)


def _fitting_names(source: Path, files: hf_files.TensorFiles, family: Family) -> dict[str, str]:
    """Their name -> name in the files, which may lack the prefix. Raises CheckpointError for missing or unknown ones."""
    wanted = [name for match in family.matches for name in match.theirs]
    names = {name: name if name in files.shapes else name.removeprefix("transformer.") for name in wanted}
    missing = [name for name, found in names.items() if found not in files.shapes]
    ignored = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")  # constants that old versions saved
    unknown = set(files.shapes) - set(names.values()) - set(family.beside)
    extra = [name for name in unknown if not name.endswith(ignored)]
    if missing or extra:
        lines = [*(f"{name}: missing" for name in missing[:6]), *(f"{name}: unknown" for name in sorted(extra)[:6])]
        raise CheckpointError(
            f"{source} does not hold the {family.kind} of its config.json: {len(missing)} tensors are missing, "
            f"{len(extra)} are unknown",
            "\n  ".join(lines),
        )
    return names


# ---- both ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _round(model, family: Family, dtype: torch.dtype) -> None:
    """Round the weights of our model as an export in `dtype` does, which may hold differences from them."""
    parameters = dict(model.named_parameters())
    for match in family.matches:
        if match.exact or not match.theirs:
            continue
        whole = family.facts.weights[match.ours].shape
        weight = parameters[match.ours].data[: whole[0]]  # without padding
        weight.copy_(match.to_ours([part.to(dtype).float() for part in match.to_theirs(weight)]))


@torch.no_grad()
def _compared(family: Family, loaded: Loaded, folder: Path) -> str:
    """Compare our model with a Hugging Face folder's in fp32; returns a notice. Raises CheckpointError if they differ."""
    prompts = prompts_for(family.facts)
    return _agree(family.ours(loaded.model, prompts), family.run(_transformers(), folder, prompts).float())


def _agree(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """A notice on the difference of logits. Raises CheckpointError if it is too large."""
    largest = theirs.abs().max().item()
    difference = (ours - theirs).abs().max().item() if ours.shape == theirs.shape else float("nan")
    summary = f"logits differ by at most {difference:.2e} of {largest:.3g} (allowed: {BOUND * largest:.2e})"
    if not difference <= BOUND * largest:
        raise CheckpointError(f"the converted model computes something else: {summary}", do="nothing was written")
    return f"both models agree: {summary}"


def _transformers():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # use local files only
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise SettingsError(
            "both models are compared before anything is written, which needs transformers",
            do="pip install transformers, or convert with --unchecked",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
