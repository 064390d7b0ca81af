# SPDX-License-Identifier: Apache-2.0
"""Convert decoders, T5 and BERT to and from Hugging Face transformers, tensor by tensor on CPU, and verify the result.

Before the output appears, both models run on fixed prompts in fp32. If their logits differ by more than `agreement.LIMITS`
allows, the conversion fails and writes nothing. One tensor is in memory at a time; the comparison needs memory for
one whole model (and can be skipped for models larger than memory).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.lineage import source_config
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import OPTIMIZER
from megatron.checkpoint.store import Piece
from megatron.convert import compressed_tensors, hf_files
from megatron.convert.families import Family, exported, knows_layers, prompts_for
from megatron.convert.fitted import fit
from megatron.convert.hf_tokenizer import ExportedTokenizer, own_template, write_tokenizer
from megatron.convert.imported import imported_state, untrained_of
from megatron.convert.merged import for_export
from megatron.convert.same_ids import same_ids
from megatron.data.vocabulary import learned_vocabulary
from megatron.errors import CheckpointError, DataError, Failure, MissingPackage, SettingsError
from megatron.inference.agreement import agreement
from megatron.inference.load import Loaded, load_model, refuse_head, without_model
from megatron.inference.quantize import Rounded
from megatron.inference.quantized import STORED_OF_LAYER, refuse_quantized
from megatron.model.facts import AHEAD, PROJECTIONS
from megatron.model.hf_match import Match
from megatron.model.recipe import config_of
from megatron.mpu.initialize import DTYPES
from megatron.mpu.placement import Placement
from megatron.settings.from_checkpoint import FILES, located, own_format
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub
from megatron.storage.new_folder import new_folder
from megatron.telemetry import progress
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.embedding_rows import RowsTokenizer, within
from megatron.tokenizer.transformers_files import auto_tokenizer

CLIENT = "transformers"
RUNNING = "running both models on fixed prompts"
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
    with for_export(path, out, "Hugging Face", knows_layers) as path, Reader(path) as reader, new_folder(out) as folder:
        family, files, tokenizer = write_hf(reader, folder, dtype, given, trained, file_bytes)
        notices = list(tokenizer.notices)
        if check and tokenizer.by_transformers:
            notices.append(compare_ids(folder, tokenizer.own.whole))
        words = next(name for name, one in DTYPES.items() if one == dtype)
        if check and family.run is None:
            notices.append(f"{ALONE.format(family.kind)}: the models were not compared")
        elif check:
            notices.append(_compare_export(family, trained, path, folder, words))
        return [f"{out}: {family.kind} in {', '.join(files)} ({words})", *family.notices, *notices]


class WrittenFolder(NamedTuple):
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
) -> WrittenFolder:
    """Write the checkpoint of `reader` into a folder, without a comparison. Its adapters are merged.

    given: tokenizer flags. trained: the checkpoint that the run wrote. products: layer -> its quantized weight, which takes
    the place of the checkpoint's. Raises SettingsError for an unsupported model.
    """
    path = reader.folder
    reader.needed("config")
    if not products:
        refuse_quantized(reader, "to-hf")
    config, vocab_size = config_of(located(reader.state)), reader.needed("vocab_size")
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
    settings = tokenizer.with_ids(theirs(tokenizer.end))
    if products:
        settings["quantization_config"] = compressed_tensors.quantization_config(family, products)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    return WrittenFolder(family, files, tokenizer)


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
        name
        for name in reader.tensors
        if name not in known and not name.startswith((OPTIMIZER, f"{PROJECTIONS}.", f"{AHEAD}."))
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
    return same_ids(theirs, tokenizer, own_template([folder], tokenizer))


# ---- import ----------------------------------------------------------------------------------------------------------


def from_hf(source: Path, out: Path, state: dict[str, Any], check: bool = True, depths: int = 0) -> list[str]:
    """Import a Hugging Face folder as a checkpoint of iteration 0, for loading with --finetune.

    state: a run's position as saved (`run.State.record`). depths: of multi-token prediction to import
    Raises CheckpointError for an unsupported model, missing or unknown tensors, or if our model gives other results.
    """
    _refuse_other_paths(source)
    settings = hf_files.read_json(source / "config.json")
    fitted = fit(source, settings, depths)
    family = fitted.family
    if fitted.rounded:
        raise CheckpointError(
            f"{source} holds weights in whole numbers ({sorted(fitted.rounded)[0]}), which are not imported",
            do=f"use them as they are: --load-exported {source}; or import the model that they were made from",
        )
    kind, model, vocab_size = family.kind, family.facts.settings, family.facts.vocab_size
    wanted, placements = {match.ours: match for match in family.matches}, family.facts.weights

    inexact: list[str] = []

    def parts(piece: Piece) -> Iterator[torch.Tensor]:
        whole = fitted.read(wanted[piece.name])
        if check and not whole.isfinite().all():
            match = wanted[piece.name]
            pairs = zip(match.theirs, match.to_theirs(whole))
            names = ", ".join(name for name, tensor in pairs if not tensor.isfinite().all())
            raise CheckpointError(
                f"{source}: NaN or infinity in {names}: the model cannot compute", do=f"damaged? {hf_files.WHOLE}"
            )
        if not fitted.is_exact(wanted[piece.name], whole):
            inexact.append(piece.name)
        yield whole

    with new_folder(out) as folder:
        tokenizer = hf_files.import_tokenizer(source, folder / "tokenizer", kind == "gpt2")
        of_generation = hf_files.import_generation_config(source, folder, settings, vocab_size)
        words, of_words = _imported_vocabulary(source, tokenizer, vocab_size, check)
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
        content |= learned_vocabulary(words) | dict(untrained=untrained_of(placements))
        content["source"] = hf_files.about(source, settings) | source_config(settings, content["vocabulary"])
        with Saver(folder) as saver:
            saver.write(0, [pieces], content, parts=parts)
        (folder / ".lock").unlink(missing_ok=True)
        size = sum(math.prod(placed.shape) for placed in placements.values() if placed.buffer is None)
        notices = [f"{out}: {kind} of {size:,} parameters"]
        notices.append(f"its tokenizer is in {out / 'tokenizer'}" if tokenizer else hf_files.without_tokenizer(source))
        notices.append(_said_of_numbers(len(wanted), inexact))
        notices += [*family.notices, *fitted.notices, *of_generation, *of_words]
        if check and family.run is None:
            notices.append(f"{ALONE.format(kind)}: the models were not compared")
        elif check:
            progress.say(RUNNING)
            ours = _outputs(family, load_model(folder, precision="fp32"))
            agreed = agreement(family.form, "fp32", CLIENT, ours, _outputs_of_transformers(family, source))
            notices.append(f"both models agree: {agreed.sentence}")
        return notices


FOLDER = "give the folder with config.json and model.safetensors"


def _refuse_other_paths(source: Path) -> None:
    """Raise CheckpointError for a path that is no folder of a model."""
    if source.is_file():
        raise CheckpointError(f"{source}: not a model's folder, but a file", do=FOLDER)
    if source.is_dir() and not (source / "config.json").exists():
        adapters = (source / "adapter_config.json").exists()
        do = "from-peft imports adapters" if adapters else own_format(source) or FOLDER
        raise CheckpointError(f"{source}: not a model's folder: no config.json", do=do)


def _imported_vocabulary(
    source: Path, settings: Optional[TokenizerSettings], rows: int, check: bool
) -> tuple[Optional[Tokenizer], list[str]]:
    """(the tokenizer of an import, notices for the user); none without files, or if nobody checks and it cannot be read."""
    if settings is None:
        return None, []
    try:
        tokenizer = build_tokenizer(settings, lambda text: None)
    except (DataError, SettingsError) as error:
        if check:
            raise
        return None, [f"its tokenizer cannot be read here: {error.what}"]
    notices = [compare_ids(source, tokenizer)] if check else []
    narrow = within(tokenizer, rows)
    return tokenizer, notices + ([narrow.note] if isinstance(narrow, RowsTokenizer) else [])


def _said_of_numbers(count: int, inexact: list[str]) -> str:
    """A notice on the numbers of an import. inexact: names of tensors of ours that were rounded to fp32"""
    if not inexact:
        return f"all {count} tensors have the numbers of the files, in fp32"
    rounded = ", ".join(sorted(inexact)[:3]) + f" and {len(inexact) - 3} more" * (len(inexact) > 3)
    return f"{count - len(inexact)} tensors have the numbers of the files, in fp32; {rounded} were rounded to it"


def _dtype_of(placed: Placement) -> torch.dtype:
    """The format of a tensor in our checkpoint: fp32 for weights."""
    return torch.float32 if placed.buffer is None else getattr(torch, placed.buffer.dtype)


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


def _compare_export(family: Family, trained: Path, path: Path, folder: Path, dtype: str) -> str:
    """A notice on the files in `folder` and the checkpoint `trained`, whose adapters are merged in `path`."""
    progress.say(RUNNING)
    loaded = load_model(trained, precision="fp32")
    checkpoint = _outputs(family, loaded)
    loaded = loaded if path == trained else load_model(path, precision="fp32")
    _round(loaded.model, family, DTYPES[dtype])
    ours, theirs = _outputs(family, loaded), _outputs_of_transformers(family, folder)
    agreed = agreement(family.form, dtype, CLIENT, ours, theirs, checkpoint=checkpoint)
    return ("checked: " if agreed.rounded else "both models agree: ") + agreed.sentence


@torch.no_grad()
def _outputs(family: Family, loaded: Loaded) -> torch.Tensor:
    return family.ours(loaded.model, prompts_for(family.facts))


@torch.no_grad()
def _outputs_of_transformers(family: Family, folder: Path) -> torch.Tensor:
    """In fp32, with the weights of the files."""
    transformers = _transformers()
    try:
        return family.run(transformers, folder, prompts_for(family.facts)).float()
    except Failure:
        raise
    except Exception as error:  # of any of its parts
        why = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        do = "repair the folder; --unchecked converts without a comparison"
        raise CheckpointError(f"{folder}: transformers cannot run this model", why, do) from error


def _transformers():
    hub.stay_offline()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        import transformers
    except ImportError:
        raise MissingPackage(
            "both models are compared before anything is written, which needs transformers",
            do="pip install transformers, or convert with --unchecked",
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
