# SPDX-License-Identifier: Apache-2.0
"""Import GPTs from Megatron-LM's classic checkpoints: `iter_0000100/mp_rank_XX[_YYY]/model_optim_rng.pt`, any tp, pp and
chunks; with experts of any ep, `mp_rank_XX[_YYY][_ZZZ]`.

`megatron_pickle` reads each file in a separate process, one after another. A file holds a box of each logical tensor, so
nothing is merged: the boxes of one of their files become one of our files. `megatron_optimizer` has the optimizer's state.
"""

import contextlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from safetensors.torch import load_file

from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.store import Piece
from megatron.convert.imported import ModelImport, check_complete
from megatron.convert.megatron_arguments import first_layers, settings_of
from megatron.convert.megatron_names import WORDS, Dictionary, OurTensor, outside, place_of
from megatron.convert.megatron_optimizer import (
    ALIGNMENT,
    LEAVE_OUT,
    LocalParameter,
    from_buffer,
    from_groups,
    no_pieces,
    state_notices,
    with_moments,
)
from megatron.convert.megatron_pickle import EXPERTS, extract, extract_buffers
from megatron.convert.megatron_pieces import expert_piece, local_parts, with_ones, zero_counts
from megatron.errors import CheckpointError
from megatron.model.gpt.facts import GPTFacts
from megatron.mpu.placement import Placement

_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?(?:_(\d{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
BUFFERS = "distrib_optim.pt"  # of --use-distributed-optimizer, beside them


class RankFile(NamedTuple):
    """The file of one of their ranks."""

    tp: int
    pp: int
    path: Path
    ep: int = 0


def open_classic(
    source: Path,
    step: Optional[int],
    vocab_size: Optional[int],
    heads: Optional[int],
    optimizer: bool,
    log: Callable[[str], None],
) -> ModelImport:
    """Open a checkpoint for import, file by file.

    vocab_size: tokens without padding; heads: number of attention heads, if the saved arguments lack it
    optimizer: import the optimizer's state, if there is any
    Raises CheckpointError if a file is refused or a tensor is missing.
    """
    parts = find_parts(source, step)
    with _opened(parts[0], optimizer) as first:
        parts = _ranks_of_experts(parts, first.facts["args"])
        sizes = max(part.tp for part in parts) + 1, max(part.pp for part in parts) + 1
        model, vocab_size, notices = settings_of(first.facts, first.shapes, sizes, vocab_size, heads)
        facts = first.facts if first.has_state else None
    notices += state_notices(first.facts, optimizer, has_state=facts is not None)
    weights = GPTFacts(model, vocab_size).weights
    wanted = with_moments(weights) if facts else weights
    names = Dictionary(GPTFacts(model, vocab_size), float(first.facts["version"] or 0))

    experts = model.num_experts // (max(part.ep for part in parts) + 1) if model.mixture else 0  # of a file

    def shards() -> Iterator[list[Piece]]:
        if counts := zero_counts(weights):
            yield counts
        for part in parts:
            log(f"reading {part.path}")
            with _opened(part, facts is not None) as file:
                parameters = list(_parameters(file, names, weights, sizes, experts))
                if facts:
                    buffers = [one for one in parameters if one.is_buffer]
                    trained = [one for one in parameters if one not in buffers]
                    yield [*_weight_pieces(file, buffers), *_state_pieces(file, trained)]
                else:
                    yield list(_weight_pieces(file, parameters))

    origin = f"Megatron-LM in {parts[0].path.parent.parent.resolve()}"
    return ModelImport(model, vocab_size, origin, notices, lambda: check_complete(source, wanted, shards()), facts)


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
        parts.append(RankFile(int(match[1]), int(match[2] or 0), file, int(match[3] or 0)))
    found = {(part.tp, part.pp, part.ep) for part in parts}
    tp, pp, ep = (range(max((place[n] for place in found), default=-1) + 1) for n in (0, 1, 2))
    missing = set(product(tp, pp, ep)) - found
    if missing or not parts:
        places = sorted(missing)[:8] if len(ep) > 1 else sorted(place[:2] for place in missing)[:8]
        which = "(tensor, pipeline, expert rank)" if len(ep) > 1 else "(tensor, pipeline rank)"
        raise CheckpointError(
            f"{folder} is not a whole checkpoint", f"missing {which}: {places}" if parts else "no mp_rank_* in it"
        )
    return sorted(parts, key=lambda part: (part.pp, part.tp, part.ep))


def _ranks_of_experts(parts: list[RankFile], args: dict) -> list[RankFile]:
    """The files with their ranks of ep: without pp, the second number of a folder is that of ep."""
    ep, pp = args.get("expert_model_parallel_size") or 1, args.get("pipeline_model_parallel_size") or 1
    if ep > 1 and pp == 1 and not any(part.ep for part in parts):
        parts = [part._replace(pp=0, ep=part.pp) for part in parts]
    if (found := max(part.ep for part in parts) + 1) != ep:
        folder = parts[0].path.parent.parent
        raise CheckpointError(f"{folder} is missing files: {found} expert parallel ranks, of {ep} that the run had")
    return parts


class OpenFile(NamedTuple):
    """The content of a rank's file.

    shapes: of the model's weights by key, in the order of the module. get: the tensor of a key
    numbered: keys of the optimizer's state. buffers: the file with the distributed optimizer's state, or None
    """

    part: RankFile
    facts: dict
    shapes: dict[str, tuple[int, ...]]
    get: Callable[[str], torch.Tensor]
    numbered: list[str]
    buffers: Optional[Path]

    @property
    def has_state(self) -> bool:
        return bool(self.numbered) or self.buffers is not None


@contextlib.contextmanager
def _opened(part: RankFile, optimizer: bool) -> Iterator[OpenFile]:
    """One file, read by a child process. optimizer: also the optimizer's state"""
    from safetensors import safe_open

    buffers = part.path.with_name(BUFFERS)
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        extract(part.path, Path(name), optimizer)
        facts = json.loads((Path(name) / "facts.json").read_text())
        with safe_open(Path(name) / "tensors.safetensors", framework="pt") as file:
            shapes = {key: tuple(file.get_slice(key).get_shape()) for key in facts["keys"]}
            numbered = sorted(set(file.keys()) - set(shapes))
            found = buffers if optimizer and buffers.exists() else None
            yield OpenFile(part, facts, shapes, file.get_tensor, numbered, found)


def _parameters(
    file: OpenFile, names: Dictionary, wanted: dict[str, Placement], sizes: tuple[int, int], experts: int
) -> Iterator[LocalParameter]:
    """The parameters in one of their files, in the order of the module. experts: of each layer in it."""
    tp, pp = sizes
    part, chunks, model = file.part, max(1, file.facts["chunks"]), names.model
    starts = first_layers(file.facts["args"], model.num_layers, pp * chunks)
    for key, shape in file.shapes.items():
        chunk, _, theirs = key.partition("/")
        place = place_of(theirs)
        if place is None and not theirs.endswith(".weight"):
            continue  # state of fp8, a buffer
        stage = int(chunk) * pp + part.pp
        target = names.ours(theirs, starts[stage]) or OurTensor("output.weight")
        name = target.name
        matches = lambda values, key=key: torch.equal(values.to((own := file.get(key)).dtype), own)
        tied = not model.untie_embeddings_and_output_weights
        if name == "output.weight" and tied:
            _refuse_own_head(file, key)
        if name == "output.weight" and tied or name == WORDS and stage > 0:
            yield LocalParameter(key, shape, matches, no_pieces)  # the last stage's copy of the embedding
            continue
        if name not in wanted:
            raise CheckpointError(f"{part.path}: {key} would be {name}, which this model does not have")
        placed = wanted[name]
        of_expert = "ep" in placed.cut
        smaller = not of_expert and math.prod(shape) < math.prod(placed.shape)  # theirs is divided, ours is not
        copy = not ({"tp", "etp"} & set(placed.cut) or smaller) and part.tp > 0 or not of_expert and part.ep > 0
        pieces = _pieces_of(file, target, placed, tp)
        if target.number is not None:
            number = part.ep * experts + target.number
            if number >= model.num_experts:
                raise CheckpointError(f"{part.path}: {key} would be expert {number} of {model.num_experts}")
            pieces = _expert_pieces(file, name, placed, number)
        is_buffer = placed.buffer is not None
        yield LocalParameter(key, shape, matches, no_pieces if copy else pieces, of_expert, is_buffer)


def _refuse_own_head(file: OpenFile, head: str) -> None:
    """Raise CheckpointError if the copy of the embedding `head` differs from it. Both are there with one pipeline stage."""
    tables = (key for key in file.shapes if outside(key.partition("/")[2]) == WORDS)
    if any(not torch.equal(file.get(table), file.get(head)) for table in tables):
        raise CheckpointError(
            f"{file.part.path}: {head} differs from the embedding, and the saved arguments say that both are one",
            "they lack --untie-embeddings-and-output-weights",
        )


def _pieces_of(
    file: OpenFile, target: OurTensor, placed: Placement, tp: int
) -> Callable[[str, torch.Tensor], list[Piece]]:
    """The function that makes pieces of a parameter or its moments: (prefix of our name, their tensor) -> pieces."""
    centred = bool(file.facts["args"].get("apply_layernorm_1p"))

    def pieces(prefix: str, x: torch.Tensor) -> list[Piece]:
        x = with_ones(centred, placed, prefix, x)
        parts = local_parts(target, placed, x, file.part.tp, tp, str(file.part.path))
        return [Piece(prefix + target.name, placed.shape, box, part) for box, part in parts]

    return pieces


def _expert_pieces(file: OpenFile, name: str, placed: Placement, number: int):
    """As `_pieces_of`, for one expert."""
    where = str(file.part.path)
    return lambda prefix, x: [expert_piece(prefix + name, placed, x, number, file.part.tp, where)]


def _weight_pieces(file: OpenFile, parameters: list[LocalParameter]) -> Iterator[Piece]:
    for parameter in parameters:
        yield from parameter.pieces("", file.get(parameter.key).float())


def _state_pieces(file: OpenFile, parameters: list[LocalParameter]) -> Iterator[Piece]:
    """Main weights and moments in place of the model's weights."""
    if not file.has_state:
        raise CheckpointError(f"{file.part.path} has no optimizer state, unlike the first file", do=LEAVE_OUT)
    if file.buffers is None:
        numbered = {key: file.get(key) for key in file.numbered}
        own, names = [], dict(zip(("", EXPERTS), ("groups", "groups_of_experts")))
        for prefix, some in _by_optimizer(parameters, bool(file.facts["groups_of_experts"])).items():
            state = {
                key.removeprefix(prefix): x for key, x in numbered.items() if key.startswith(EXPERTS) == bool(prefix)
            }
            own += from_groups(str(file.part.path), some, file.facts[names[prefix]], state)
        names = {piece.name for piece in own}
        yield from own
        yield from (piece for piece in _weight_pieces(file, parameters) if piece.name not in names)  # of fp32 training
        return
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        extract_buffers(file.buffers, Path(name))
        buffers = load_file(Path(name) / "tensors.safetensors")
        facts = json.loads((Path(name) / "facts.json").read_text())
        coalesced, apart = facts["coalesced"], facts["apart"]
    slack = ALIGNMENT if coalesced else 128 * max(1, file.facts["args"].get("data_parallel_size") or 1)
    for chunk, (prefix, own) in product(range(file.facts["chunks"]), _by_optimizer(parameters, apart).items()):
        own = [parameter for parameter in own if parameter.key.startswith(f"{chunk}/")]
        start = f"{prefix}{chunk}/"
        buffer = {key.removeprefix(start): flat for key, flat in buffers.items() if key.startswith(start)}
        if own and (buffer or not _elsewhere(file, prefix)):
            yield from from_buffer(f"{file.buffers} ({start[:-1]})", [own], buffer, slack)


def _by_optimizer(parameters: list[LocalParameter], apart: bool) -> dict[str, list[LocalParameter]]:
    """The parameters of each of their optimizers: with ep, experts have a second one. apart: they have"""
    if not apart:
        return {"": parameters}
    of_experts = [one for one in parameters if one.of_expert]
    return {"": [one for one in parameters if one not in of_experts], EXPERTS: of_experts}


def _elsewhere(file: OpenFile, prefix: str) -> bool:
    """Whether another rank's file has an optimizer's buffers: data parallel ranks share those of dense weights."""
    return not prefix and file.part.ep > 0
