# SPDX-License-Identifier: Apache-2.0
"""The tensors of a Hugging Face folder, each accounted for: it is in the model, a copy, a constant, or named in an error.

An output layer is tied or not as the tensors say: transformers 5 ties only an `lm_head.weight` that equals the embedding or
that the files lack, whatever config.json says.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron.convert import compressed_tensors
from megatron.convert.families import Family, imported
from megatron.convert.hf_blocks import FP8Files, MXFP4Files, is_fp8, is_mxfp4
from megatron.convert.hf_files import WHOLE, TensorFiles, refuse_other_formats
from megatron.errors import CheckpointError
from megatron.model.gpt import hf_ahead
from megatron.model.hf_match import Match
from megatron.telemetry.figures import several

TIED = "tie_word_embeddings"
ROWS = 4096  # of two tensors that are compared at a time


class Fitted(NamedTuple):
    """A model and the tensors of its files.

    names:   their name -> that in the files
    rounded: their names of the weights that are whole numbers there (compressed-tensors), and no tensors to `read`
    notices: for the user: what differs from config.json, or is not part of the model
    """

    family: Family
    files: TensorFiles | MXFP4Files | FP8Files
    names: Mapping[str, str]
    rounded: frozenset[str]
    notices: list[str]

    def read(self, match: Match) -> torch.Tensor:
        """A tensor of ours, in fp32. Raises CheckpointError for whole numbers, which are no weights without scales."""
        parts = [self.files.get(self.names[name]) for name in match.theirs]
        for name, part in zip(match.theirs, parts):
            if not part.is_floating_point():
                form = str(part.dtype).removeprefix("torch.")
                raise CheckpointError(
                    f"{self.names[name]} is in {form}: whole numbers, whose scales config.json does not name", do=WHOLE
                )
        return match.to_ours([part.float() for part in parts])

    def is_exact(self, match: Match, ours: torch.Tensor) -> bool:
        """Whether `ours`, which was read, has their numbers to the bit."""
        pairs = ((self.files.get(self.names[name]), x) for name, x in zip(match.theirs, match.to_theirs(ours)))
        parts = (part for own, x in pairs for part in zip(own.split(ROWS), x.split(ROWS)))  # one in memory at a time
        return all(torch.equal(*_in_one_format(own, x)) for own, x in parts)


def fit(folder: Path, settings: dict[str, Any], depths: int = 0) -> Fitted:
    """Match the tensors of a folder to the model of its config.json. settings: its content. depths: of multi-token
    prediction to read

    Raises CheckpointError, with names, for tensors that are missing or unknown, or have another shape.
    """
    family = imported(settings, depths=depths)  # whose errors say more than those of files
    refuse_other_formats(folder, settings)
    files = TensorFiles(folder)
    if family.facts.num_layers > len(files.shapes):
        raise CheckpointError(
            f"{folder} holds {len(files.shapes)} tensors, config.json says {family.facts.num_layers:,} layers", do=WHOLE
        )
    files = MXFP4Files(files) if is_mxfp4(settings) else FP8Files(files, settings) if is_fp8(settings) else files
    return fit_files(folder, files, family, partial(imported, settings, depths=depths))


def fit_files(folder: Path, files, family: Family, again: Callable[..., Family], do: str = WHOLE) -> Fitted:
    """Match tensors to a family; as `fit`.

    files: `shapes` by name, and `get`. again: makes the family, tied or not. do: what to do about other tensors
    """
    family, notices = _with_head_of(files, folder, again, family)
    wanted = [name for match in family.matches for name in match.theirs]
    names = {name: _name_in(files, family, name) for name in wanted}
    rounded = frozenset(name for name, own in names.items() if compressed_tensors.is_quantized(own, files.shapes))
    _check_copies(folder, files, family, names)
    notices += _check_complete(folder, files, family, names, rounded, do)
    _check_shapes(folder, files, family, names, rounded, do)
    return Fitted(family, files, names, rounded, [*family.unread_notices(folder / "config.json"), *notices])


def _with_head_of(files, folder: Path, again: Callable[..., Family], family: Family) -> tuple[Family, list[str]]:
    """The family of config.json, with an output layer that is tied or not as the files have it; and notices.

    again: makes the family, tied or not
    """
    head, table = family.head, family.table
    there = head in files.shapes and _name_in(files, family, table) in files.shapes
    own = there and not _same(files, head, _name_in(files, family, table))
    if family.tied and own:
        why = f"{TIED} is true in {folder / 'config.json'}, and {head} differs from {table}"
        return again(tied=False), [f"{why}: the model has its own output layer, as in transformers 5"]
    if family.kind == "t5" and not family.tied and not own:  # which transformers 5 ties, whatever config.json says
        return again(tied=True), []
    if not family.tied and head not in files.shapes:
        raise CheckpointError(
            f"{folder} has no {head}",
            f"{TIED} is not true in config.json, so the output layer is a tensor of its own",
            f"if the model shares its embedding, write {TIED}: true there",
        )
    return family, []


def _name_in(files, family: Family, name: str) -> str:
    """The name of a tensor in the files, which may lack a prefix, or have it under the name of a copy."""
    short = name.removeprefix("transformer.")
    copies = (copy for copy, original in family.copies.items() if original == name)
    return next((one for one in (name, short, *copies) if one in files.shapes), name)


def _check_copies(folder: Path, files, family: Family, names: Mapping[str, str]) -> None:
    """Raise CheckpointError if what should be a copy of a tensor differs from it: transformers computes with both."""
    for copy, original in (family.copies | family.optional).items():
        if copy in files.shapes and names[original] != copy and not _same(files, copy, names[original]):
            raise CheckpointError(
                f"{copy} in {folder} differs from {names[original]}, of which it is a copy in this model",
                do="load the model in transformers and save it again, which writes what it computes with",
            )


def _same(files, a: str, b: str) -> bool:
    x, y = files.get(a), files.get(b)
    parts = zip(x.split(ROWS), y.split(ROWS))
    return x.shape == y.shape and all(torch.equal(*_in_one_format(*part)) for part in parts)


def _in_one_format(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in fp32, which has all numbers of narrower formats, or in fp64."""
    wide = torch.float64 if torch.float64 in (x.dtype, y.dtype) else torch.float32
    return x.to(wide), y.to(wide)


def _check_complete(
    folder: Path, files, family: Family, names: Mapping[str, str], rounded: frozenset, do: str
) -> list[str]:
    """Raise CheckpointError for missing or unknown tensors. Returns a notice on those that transformers leaves out, too."""
    missing = [name for name, own in names.items() if own not in files.shapes and name not in rounded]
    parts = {part for name in rounded for part in compressed_tensors.names_of(names[name])}
    left = sorted(set(files.shapes) - set(names.values()) - {*family.copies, *family.optional} - parts)
    left = [name for name in left if not family.constants.fullmatch(name)]
    unknown = [name for name in left if not family.unused.fullmatch(name)]
    if missing or unknown:
        lines, counts = [], []
        for what, names in (("missing", missing), ("unknown", unknown)):
            lines += [f"{name}: {what}" for name in names[:6]] + [f"{len(names) - 6} more: {what}"] * (len(names) > 6)
            counts += [f"{several(len(names), 'tensor')} {'is' if len(names) == 1 else 'are'} {what}"] * bool(names)
        raise CheckpointError(
            f"{folder} does not hold the {family.kind} of its config.json: {', '.join(counts)}",
            "\n  ".join(lines),
            "a config.json of another model, or an incomplete download: " + do,
        )
    more = f" and {len(left) - 12} more" if len(left) > 12 else ""
    notice = f"no part of this model, and left out as in transformers: {', '.join(left[:12])}{more}"
    if any(map(hf_ahead.unused(family.kind, family.facts.settings).fullmatch, left)):
        notice += f"; from-hf {hf_ahead.FLAG} 1 imports depths of multi-token prediction"
    return [notice] if left else []


def _check_shapes(folder: Path, files, family: Family, names: Mapping[str, str], rounded: frozenset, do: str) -> None:
    """Raise CheckpointError for a tensor whose shape is not that of config.json."""
    placements = family.facts.weights
    ours = {match.ours for match in family.matches}
    assert set(placements) == ours, set(placements) ^ ours
    for match in family.matches:
        shapes = match.to_theirs(torch.empty(placements[match.ours].shape, device="meta"))
        for name, expected in zip(match.theirs, shapes):
            if name not in rounded and files.shapes[names[name]] != tuple(expected.shape):
                raise CheckpointError(
                    f"{names[name]} in {folder} is {files.shapes[names[name]]}, config.json says {tuple(expected.shape)}",
                    do="a config.json of another model? " + do,
                )
