# SPDX-License-Identifier: Apache-2.0
"""Use an export in place of a checkpoint: `loaded = load_exported("exports/gpt")`.

Weights of Hugging Face become a model of this suite, on any number of ranks. Programs (torch.export, ONNX) are run as they
are: they score texts, and continue them one by one, so that a text does not depend on others.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.missing import EXPORT
from megatron.convert import compressed_tensors, hf_files
from megatron.convert.export import programs
from megatron.convert.export.write import RECORD, empty_past
from megatron.convert.fitted import fit
from megatron.convert.hf_tokenizer import tokenizer_in
from megatron.convert.imported import imported_state
from megatron.errors import CheckpointError, SettingsError, no_folder
from megatron.inference.load import Loaded, build_model, refuse_broken
from megatron.inference.quantize import attach, free_weights, linear_layers
from megatron.inference.stages import Halves, chunks_of
from megatron.model.facts import Facts
from megatron.model.quantization import QuantizeOptions
from megatron.model.recipe import config_of, facts_of
from megatron.mpu.initialize import DTYPES
from megatron.mpu.mesh import Mesh
from megatron.settings.from_checkpoint import foreign_format, own_format
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub


def is_export(place: Path) -> bool:
    """Whether a folder holds an export, and no checkpoints."""
    if not place.is_dir() or checkpoints(place) or (place / "index.json").is_file():
        return False
    return any((place / name).is_file() for name in EXPORT)


def load_exported(
    folder: str,
    *,
    device="cpu",
    precision: Optional[str] = None,
    mesh: Optional[Mesh] = None,
    halves: Halves = (None, None),
) -> Loaded:
    """Load what tools.export wrote, or a folder of Hugging Face. Arguments as of `load_model`.

    Raises CheckpointError for a folder that holds no export, SettingsError for one that cannot be used here.
    """
    place, mesh = hub.fetched(folder, hub.MODEL_FILES) if hub.is_hub(folder) else Path(folder), mesh or Mesh()
    record = hf_files.read_json(place / RECORD) if (place / RECORD).is_file() else {}
    form = record.get("format", "hf" if (place / "config.json").is_file() else None)
    if form is None and any(place.glob("*.gguf")) or form == "gguf":
        raise SettingsError(
            f"--load-exported {folder}: a GGUF file is run by llama.cpp, not here",
            do=f"llama-cli -m {folder}/model.gguf, or --load-exported of another format",
        )
    if form is None and (problem := foreign_format(place)):
        raise CheckpointError(f"--load-exported {folder} holds no export", problem)
    if form is None:
        there = no_folder(place) or f"it has neither {RECORD} nor config.json"
        do = hub.hint(folder) or own_format(place) or "python -m megatron.tools.export"
        raise CheckpointError(f"--load-exported {folder} holds no export", there, do)
    if form == "hf":
        return _load_hf(place, record, device, precision, mesh, halves)
    _check(place / RECORD, record)
    return _load_program(place, record, device, precision, mesh)


def _check(path: Path, record: dict[str, Any]) -> None:
    """Raise CheckpointError for a record that tools.export did not write."""
    kinds = dict(kind=str, dtype=str, ranks=int, vocab_size=int, iteration=int, files=list, config=dict)
    wrong = [name for name, kind in kinds.items() if not isinstance(record.get(name), kind)]
    known = dict(format=("onnx", "torch-export"), kind=("lm", "generation"), dtype=tuple(DTYPES))
    wrong += [name for name, values in known.items() if record.get(name) not in values and name not in wrong]
    if wrong:
        found = ", ".join(f"{name}: {record.get(name)!r:.60}" for name in wrong)
        raise CheckpointError(f"{path} is not what tools.export writes", found, "export the model again")


# ---- weights ---------------------------------------------------------------------------------------------------------


def _load_hf(place: Path, record: dict[str, Any], device, precision, mesh: Mesh, halves: Halves) -> Loaded:
    settings = hf_files.read_json(place / "config.json")
    quantization = settings.get("quantization_config") or {}
    if quantization.get("quant_method") == compressed_tensors.METHOD:
        settings = {name: value for name, value in settings.items() if name != "quantization_config"}
    fitted = fit(place, settings)
    family, rounded = fitted.family, fitted.rounded
    origin, own = f"Hugging Face {family.kind} in {place.resolve()}", _tokenizer(place, record, family.kind)
    content = imported_state(family.facts.settings, family.facts.vocab_size, {}, origin, own, family.extra)
    content |= {name: record[name] for name in ("vocabulary", "tokenizer") if record.get(name)}
    config, vocab_size = config_of(content["config"]), content["vocab_size"]
    precision = precision or _precision(settings)
    if precision == "fp16" and torch.device(device).type == "cpu":
        precision = "fp32"
    built = build_model(config, vocab_size, device=device, precision=precision, mesh=mesh, halves=halves)
    matches = {match.ours: match for match in family.matches}

    @lru_cache(maxsize=1)  # pieces of a tensor follow each other
    def whole(name: str) -> torch.Tensor:
        return fitted.read(matches[name])

    with torch.no_grad():
        for piece in built.pieces:
            if not rounded.intersection(matches[piece.name].theirs):
                piece.tensor.copy_(whole(piece.name)[piece.box.slices()])
        refuse_broken(built.pieces, place)
        if rounded:
            how = compressed_tensors.options_of(quantization, place)
            _hold_rounded(built.model, family.facts, how, rounded, matches, fitted.files, mesh)
    iteration, notices = int(record.get("iteration", 0)), tuple(fitted.notices)
    return Loaded(built.model.eval(), config, content, vocab_size, iteration, place, notices)


def _hold_rounded(model: nn.Module, facts: Facts, how: QuantizeOptions, rounded, matches, files, mesh: Mesh) -> None:
    """Give layers the whole numbers of a folder, and free their weights."""
    chunks = chunks_of(model)
    plain = [name.removesuffix(".weight") for name, match in matches.items() if not rounded.intersection(match.theirs)]
    layers = [name for name, _ in linear_layers(chunks)]
    skip = ",".join(name for name in layers if name in plain)
    chosen = attach(chunks, facts, replace(how, quantize_skip=skip or None))
    for name, layer in chosen.items():
        compressed_tensors.hold(layer.product, matches[f"{name}.weight"], files.get, mesh.coordinates)
    free_weights(chunks, chosen)


def _precision(settings: dict[str, Any]) -> str:
    """The precision of a folder's weights, from config.json."""
    words = dict(float32="fp32", bfloat16="bf16", float16="fp16")
    return words.get(str(settings.get("dtype") or settings.get("torch_dtype") or "float32"), "fp32")


def _tokenizer(place: Path, record: dict[str, Any], kind: Optional[str] = None) -> Optional[TokenizerSettings]:
    """The settings of the tokenizer in a folder; None without one. kind: of the model, if there is no record of the run."""
    own = (record.get("config") or {}).get("tokenizer") or {}
    return tokenizer_in(place, own, of_gpt2=kind == "gpt2")


# ---- programs --------------------------------------------------------------------------------------------------------


def _load_program(place: Path, record: dict[str, Any], device, precision, mesh: Mesh) -> Loaded:
    form, ranks = record["format"], record["ranks"]
    what = f"--load-exported {place}: a program"
    if (mesh.tp.size, mesh.pp.size) != (ranks, 1):
        raise SettingsError(
            f"{what} for tensor {ranks} x pipeline 1 ranks; here are {mesh.tp.size} x {mesh.pp.size}",
            do=f"--tensor-model-parallel-size {ranks} on so many ranks, or export again for {mesh.tp.size}",
        )
    if precision not in (None, record["dtype"]):
        raise SettingsError(f"{what} that computes in {record['dtype']}", f"--precision {precision}", "leave it out")
    config = config_of(record["config"])
    if own := _tokenizer(place, record):
        config = replace(config, tokenizer=own)
    facts = facts_of(config, record["vocab_size"])
    if config.model.model_type in ("T5", "BERT"):
        raise SettingsError(
            f"{what} of a {config.model.model_type}, and those of GPTs are run here",
            do="--format hf exports it in a form that is",
        )
    path = place / programs.file_name(form, mesh.tp.rank, ranks)
    if not path.is_file():
        raise CheckpointError(f"{place} has no {path.name}", f"{RECORD} names {', '.join(record['files'])}")
    run = programs.opened(form, path, device, mesh.tp)
    model = ExportedProgram(run, facts, record, device, path.stat().st_size, mesh.tp.rank)
    return Loaded(model.eval(), config, record, record["vocab_size"], record["iteration"], place, ())


class ExportedProgram(nn.Module):
    """A program in the place of a GPT: it has scores and losses.

    kind: `lm` (scores at every position) or `generation` (of the next token, with a cache, which is kept for one batch of
    texts that grow together)
    file_bytes: size of the program of this rank
    """

    is_program = True

    def __init__(self, run: programs.Run, facts: Facts, record: dict[str, Any], device, file_bytes: int, rank: int):
        super().__init__()
        self.file_bytes, self.rank = file_bytes, rank
        self.run, self.facts, self.vocab_size = run, facts, record["vocab_size"]
        self.kind, self.dtype, self.ranks = record["kind"], record["dtype"], record["ranks"]
        self.at = nn.Parameter(torch.empty(0, device=device), requires_grad=False)  # says where the model is
        self.seen, self.past = torch.empty(0, 1, dtype=torch.int64), empty_past(facts, 1, self.dtype, self.ranks)

    def logits(self, tokens: torch.Tensor, *, wanted=None, last_only: bool = False) -> torch.Tensor:
        """As of `model.gpt.module.GPT`."""
        if self.kind == "generation" and last_only:
            return self._next(tokens.cpu()).unsqueeze(0).to(self.at.device)
        if self.kind == "generation":
            raise SettingsError(
                "this program has scores of the next token only (--kind generation), and all positions are requested",
                do="export with --kind lm",
            )
        [scores] = self.run(input_ids=tokens.t().contiguous())
        scores = scores.float().transpose(0, 1).to(self.at.device)
        if wanted is not None:
            return scores.flatten(0, 1)[wanted.flatten()]
        return scores[-1:] if last_only else scores

    def _next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores [b, v] after texts [t, b]. If they continue the one of the last call, only what is new is computed."""
        known = len(self.seen)
        if not (known < len(tokens) and torch.equal(tokens[:known], self.seen)):
            known, self.past = 0, empty_past(self.facts, tokens.shape[1], self.dtype, self.ranks)
        new = tokens[known:].t().contiguous()
        scores, *self.past = self.run(input_ids=new, past_keys=self.past[0], past_values=self.past[1])
        self.seen = tokens.clone()
        return scores.float()

    def token_losses(self, x: None, batch) -> torch.Tensor:
        """The cross-entropy of each token, [s, b]."""
        scores = self.logits(batch.tokens)
        return F.cross_entropy(scores.flatten(0, 1), batch.labels.flatten(), reduction="none").view_as(batch.labels)
