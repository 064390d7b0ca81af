# SPDX-License-Identifier: Apache-2.0
"""Import GPTs from Megatron-LM's distributed checkpoints (`--ckpt-format torch_dist`) of any layout.

    iter_0000100/
        .metadata         a pickle: shape, chunks and their locations of every tensor (torch.distributed.checkpoint)
        __0_0.distcp      concatenated chunks, each a file of torch.save; `__RANK_NUMBER.distcp`
        common.pt         the arguments of the run and other non-tensor values; newer ones have these as an object
                          `common_state` among the chunks
        metadata.json     the name of the format

No pickled code is executed (`megatron_metadata`).

A chunk is a box of a tensor in Megatron-LM's shape: [rows, inputs], or [layers, rows, inputs] if all layers are one
tensor (`decoder.layers.mlp.linear_fc1.weight`, else `decoder.layers.0.mlp...`). It becomes boxes of our tensors.

Optimizer state (`megatron_optimizer`) has the shapes of weights (`optimizer.state.exp_avg.decoder...`), whole or as
flattened ranges, or lies in buffers, which depend on their layout (`optimizer.distributed.dp_group_idx_0...`).
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, product
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.store import Piece
from megatron.convert.imported import ModelImport, check_complete
from megatron.convert.megatron_arguments import first_layers, settings_of
from megatron.convert.megatron_metadata import (
    EXPERTS,
    METADATA,
    Chunk,
    Metadata,
    by_file,
    copy_object,
    read_chunks,
    read_metadata,
    read_objects,
)
from megatron.convert.megatron_names import WORDS, Dictionary, OurTensor
from megatron.convert.megatron_optimizer import (
    LEAVE_OUT,
    PREFIX,
    LocalParameter,
    from_buffer,
    no_pieces,
    state_notices,
    with_moments,
)
from megatron.convert.megatron_pickle import extract
from megatron.convert.megatron_pieces import boxes_of_rows, our_rows, split_shape, with_ones, zero_counts
from megatron.errors import CheckpointError
from megatron.model.facts import AHEAD
from megatron.model.gpt.facts import GPTFacts
from megatron.mpu.placement import Placement
from megatron.settings import schema

COMMON = "common.pt"
_KINDS = ("softmax_offset", "weight", "bias")
_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")  # of all layers: no number after `layers`


def is_distributed(source: Path, step: Optional[int]) -> bool:
    """Whether the folder's checkpoint (the tracker's, or that of `step`) has torch's distributed format."""
    return find_folder(source, step) is not None


def find_folder(source: Path, step: Optional[int]) -> Optional[Path]:
    """The directory with `.metadata`; None if there is none."""
    if (source / METADATA).exists():
        return source
    try:
        text = (source / TRACKER).read_text()[:32].strip() if step is None else str(step)
    except (OSError, UnicodeDecodeError):
        return None
    folder = source / (f"iter_{int(text):07d}" if text.isdecimal() else "release")
    return folder if (folder / METADATA).exists() or any(folder.glob("*.distcp")) else None


def open_distributed(
    source: Path,
    step: Optional[int],
    vocab_size: Optional[int],
    heads: Optional[int],
    optimizer: bool,
    log: Callable[[str], None],
) -> ModelImport:
    """Open a checkpoint for import. Raises CheckpointError if it is refused, damaged or incomplete.

    optimizer: import the optimizer's state, if there is any
    """
    folder = find_folder(source, step)
    if folder is None:
        raise CheckpointError(f"{source} holds no {METADATA}")
    with tempfile.TemporaryDirectory(prefix="megatron-") as name:
        content = read_metadata(folder, Path(name))
        common = folder / COMMON
        if not common.is_file() and not content.common:
            raise CheckpointError(f"{folder} has no {COMMON}", "it holds the arguments of the run that saved it")
        extract(common if common.is_file() else copy_object(folder, content.common, Path(name)), Path(name))
        facts = json.loads((Path(name) / "facts.json").read_text())
        if optimizer and content.objects:
            facts |= read_objects(folder, content.objects, Path(name), facts)
    shapes = {f"0/{name}": shape for chunk in content.weights for name, shape in _by_layer(chunk)}
    model, vocab_size, notices = settings_of(facts, shapes, (1, 1), vocab_size, heads)
    facts_of_model = GPTFacts(model, vocab_size)
    weights = facts_of_model.weights
    reading = Reading(Dictionary(facts_of_model), weights, bool(facts["args"].get("apply_layernorm_1p")))
    has_state = optimizer and bool(content.state or content.buffers)
    if optimizer and content.unknown and not has_state:
        why = f"it holds {content.unknown}"
        raise CheckpointError(f"the optimizer state of {folder} has a form that is not read", why, LEAVE_OUT)
    notices += state_notices(facts, optimizer, has_state)
    wanted = with_moments(weights) if has_state else weights

    def shards() -> Iterator[list[Piece]]:
        whole = chain(
            filter(None, [zero_counts(weights)]),
            _shards(folder, _without_main(content, reading) if has_state else content.weights, reading, log),
            _buffer_shards(folder, content, facts["args"], reading, log) if has_state else (),
        )
        return check_complete(source, wanted, whole)

    origin = f"Megatron-LM in {folder.parent.resolve()}"
    return ModelImport(model, vocab_size, origin, notices, shards, facts if has_state else None)


class Reading(NamedTuple):
    """What a chunk is read with. centred: norms are stored less 1 (--apply-layernorm-1p)"""

    names: Dictionary
    weights: dict[str, Placement]
    centred: bool

    @property
    def model(self) -> schema.Model:
        return self.names.model


def _shards(folder: Path, chunks: list[Chunk], reading: Reading, log: Callable[[str], None]) -> Iterator[list[Piece]]:
    """The pieces in each file of a checkpoint."""
    for file, own in by_file(chunks).items():
        log(f"reading {folder / file}")
        yield [piece for chunk, x in read_chunks(folder, own) for piece in pieces_of(chunk, x, reading)]


def _without_main(content: Metadata, reading: Reading) -> list[Chunk]:
    """The chunks of weights and of state without the weights that the state has as main weights in fp32."""
    if content.buffers:  # which have no biases of experts
        biases = {name for name, placed in reading.weights.items() if placed.buffer}
        target = lambda chunk: reading.names.ours(next(_by_layer(chunk))[0])
        return [chunk for chunk in content.weights if (one := target(chunk)) and one.name in biases] + content.state
    main = {chunk.name for chunk in content.state if not PREFIX[chunk.kind]}
    return [chunk for chunk in content.weights if chunk.name not in main] + content.state


def _buffer_shards(
    folder: Path, content: Metadata, args: dict, reading: Reading, log: Callable[[str], None]
) -> Iterator[list[Piece]]:
    """The pieces in the buffers of each tensor and pipeline parallel rank."""
    if not content.buffers:
        return
    tp, pp, vp = (args.get(f"{name}_model_parallel_size") or 1 for name in ("tensor", "pipeline", "virtual_pipeline"))
    model = reading.model
    layers, ranks = model.num_layers, {chunk.name.split("/")[0] for chunk in content.buffers}
    ep = (args.get("expert_model_parallel_size") or 1) if model.mixture else 1
    numbers = {str(number) for number in range(tp * pp)} | {f"{n}{EXPERTS}" for n in range(tp * ep * pp) if ep > 1}
    first = first_layers(args, layers, pp * vp)
    if ranks != numbers or first != [layers // (pp * vp) * stage for stage in range(pp * vp)]:
        raise CheckpointError(
            f"{folder} has buffers of {len(ranks)} ranks for {layers} layers on {tp} x {pp} x {vp} parallel parts"
            + f" and {ep} parts of experts" * (ep > 1),
            do=LEAVE_OUT,
        )
    rows = next(chunk.shape[0] for chunk in content.weights if chunk.name == "embedding.word_embeddings.weight")
    for name in sorted(ranks):
        log(f"reading the optimizer state of rank {name} of {len(ranks)} in {folder}")
        number, pieces = int(name.removesuffix(EXPERTS)), []
        (pipeline, within) = divmod(number, tp * ep if name.endswith(EXPERTS) else tp)
        for part in range(vp):
            place = within % tp, tp, part * pp + pipeline, pp * vp, rows // tp
            experts = None if ep == 1 else name.endswith(EXPERTS)
            stage = RankStage(*place, experts, within // tp, ep)
            parts = _read_buffers(folder, [c for c in content.buffers if c.name.startswith(f"{name}/{part}/")])
            orders = _orders(folder, content.weights, stage, reading)
            if parts or any(orders):
                pieces += from_buffer(f"{folder} (rank {name}, part {part})", orders, parts)
        yield pieces


class RankStage(NamedTuple):
    """The part of the model in one of their buffers.

    rows: of the embedding on this rank, padding included. experts: whether it has only experts, or none; None: all
    """

    tp_rank: int
    tp: int
    stage: int
    stages: int
    rows: int
    experts: Optional[bool] = None
    ep_rank: int = 0
    ep: int = 1


def _orders(folder: Path, chunks: list[Chunk], stage: RankStage, reading: Reading) -> list[list[LocalParameter]]:
    """The parameters of a stage in the orders of Megatron-Core's modules, without and with Transformer Engine."""
    model, weights = reading.model, reading.weights
    older = (False, True) if reading.names.has_older else (False,)
    kinds = product((True, False), range(3) if model.mixture else (0,), older)
    names = [_module_order(reading, stage, *kind) for kind in kinds]
    boxes = {}
    for name in {name.partition("@")[0] for name in names[0]}:
        placed = weights[_tied(name, model)]
        sizes = {"tp": stage.tp, "etp": stage.tp, "ep": stage.ep}
        local = list(placed.local_shape(sizes))
        if name in (WORDS, "output.weight"):
            local[0] = stage.rows
        ranks = {"tp": stage.tp_rank, "etp": stage.tp_rank, "ep": stage.ep_rank}
        boxes[name] = tuple(local), Box(*placed.box(tuple(local), ranks))
    values = _read_boxes(folder, chunks, {_tied(name, model): box for name, (_, box) in boxes.items()}, reading)

    def parameter(name: str) -> LocalParameter:
        whole, _, number = name.partition("@")
        (local, box), source = boxes[whole], _tied(whole, model)
        own, placed = values[source], weights[source]
        if number:  # of an expert
            box = Box((box.offset[0] + int(number), *box.offset[1:]), (1, *box.extent[1:]))
            local, own = (1, *local[1:]), own[int(number)].unsqueeze(0)
        real = Box.whole(box.extent).slices()
        embedded = whole == WORDS and stage.stage > 0
        copy = embedded or source != whole or not {"tp", "etp"} & set(placed.cut) and stage.tp_rank > 0
        ours = lambda x: _in_our_order(reading, whole, x)
        ones = lambda prefix, x: with_ones(reading.centred, placed, prefix, x)
        make = lambda prefix, x: [Piece(prefix + whole, placed.shape, box, ones(prefix, ours(x)[real]).contiguous())]
        matches = lambda x: torch.equal(ones("", ours(x)[real]).to(own.dtype), own)
        return LocalParameter(name, local, matches, no_pieces if copy else make)

    return [[parameter(name) for name in order] for order in names]


def _in_our_order(reading: Reading, name: str, x: torch.Tensor) -> torch.Tensor:
    """Values of one of their tensors, in the shape of ours, with their rows in our order."""
    of_experts = "ep" in reading.weights[_tied(name, reading.model)].cut
    return x if of_experts else our_rows(name, reading.names.rows(name), x, tuple(x.shape))


def _tied(name: str, model: schema.Model) -> str:
    """The weight that a parameter is a copy of, or itself."""
    tied = name == "output.weight" and not model.untie_embeddings_and_output_weights
    return WORDS if tied else name


def _module_order(
    reading: Reading, stage: RankStage, norms_apart: bool, experts: int, older: bool = False
) -> list[str]:
    """Our names of a stage's parameters in the order of Megatron-Core's modules.

    norms_apart: norms are modules before the linear layers, otherwise parts of them (Transformer Engine)
    experts: how they are ordered (`_expert_order`). older: as in Megatron-LM up to 0.16
    """
    model, weights = reading.model, reading.weights
    each = model.num_layers // stage.stages
    first, last = stage.stage == 0, stage.stage == stage.stages - 1
    names = ["embedding.word", *["embedding.position"] * first] if first or (last and model.depths) else []
    for n in range(each * stage.stage, each * (stage.stage + 1)):
        names += reading.names.in_order(f"blocks.{n}.", n, norms_apart, older)
    names += ["final_norm"] if last else []
    for depth in range(model.own_depths if last else 0):
        names += [f"{AHEAD}.{depth}.{name}" for name in ("enorm", "hnorm", "eh_proj")]
        for number, n in enumerate(model.layers_ahead):
            names += reading.names.in_order(f"{AHEAD}.{depth}.layers.{number}.", n, norms_apart, older)
        names.append(f"{AHEAD}.{depth}.final_norm")
    of_experts = {name.rpartition(".")[0].rpartition(".")[0] for name, placed in weights.items() if "ep" in placed.cut}
    found, done = [], set()
    for name in names:
        if (module := name.rpartition(".")[0]) in of_experts:
            found += [] if module in done else _expert_order(module, experts, model.num_experts // stage.ep, weights)
            done.add(module)
        else:
            found += [name] * (name in weights)
            found += [full for kind in _KINDS if (full := f"{name}.{kind}") in weights and not weights[full].buffer]
    own_output = "output.weight" in weights or stage.stages > 1
    found += ["output.weight"] * (last and own_output)
    return found if stage.experts is None else [name for name in found if ("@" in name) == stage.experts]


def _expert_order(name: str, kind: int, count: int, weights: dict[str, Placement]) -> list[str]:
    """The names of a layer's experts, as `blocks.1.mlp.experts.up.weight@3`.

    kind: 0: one expert after the other (SequentialMLP); one matrix after the other (TEGroupedMLP), 1: each with its bias,
    2: all weights, then all biases
    """
    of = lambda parts, numbers: [f"{name}.{part}@{n}" for n in numbers for part in parts if f"{name}.{part}" in weights]
    kinds, numbers = ("weight", "bias"), range(count)
    if kind == 0:
        return of([f"{matrix}.{one}" for matrix in ("up", "down") for one in kinds], numbers)
    if kind == 1:
        return [full for matrix in ("up", "down") for full in of([f"{matrix}.{one}" for one in kinds], numbers)]
    return [full for matrix in ("up", "down") for one in kinds for full in of([f"{matrix}.{one}"], numbers)]


def _read_boxes(folder: Path, chunks: list[Chunk], boxes: dict[str, Box], reading: Reading) -> dict[str, torch.Tensor]:
    """Boxes of our tensors, by name, in the checkpoint's number format. Raises CheckpointError if a part is missing."""
    there = lambda piece: piece.name in boxes and piece.box.intersection(boxes[piece.name])
    needed = [
        chunk
        for chunk in chunks
        if any(map(there, pieces_of(chunk, torch.empty(chunk.box.extent, device="meta"), reading)))
    ]
    found: dict[str, torch.Tensor] = {}
    filled = dict.fromkeys(boxes, 0)
    for own_chunks in by_file(needed).values():
        for chunk, x in read_chunks(folder, own_chunks):
            for piece in filter(there, pieces_of(chunk, x, reading)):
                box = boxes[piece.name]
                own = found.setdefault(piece.name, torch.empty(box.extent, dtype=x.dtype))
                common = piece.box.intersection(box)
                own[common.relative_to(box).slices()] = piece.tensor[common.relative_to(piece.box).slices()]
                filled[piece.name] += common.size
    lacking = [name for name, box in boxes.items() if filled[name] != box.size]
    if lacking:
        raise CheckpointError(f"{folder} lacks parts of {', '.join(sorted(lacking)[:8])}")
    return found


def _read_buffers(folder: Path, chunks: list[Chunk]) -> dict[str, torch.Tensor]:
    """The buffers of a rank: kind -> its buckets, one after another."""
    number = lambda chunk: int(chunk.name.rpartition("/")[2])
    sizes = {number(chunk): chunk.shape[0] for chunk in chunks}
    starts = dict(zip(sorted(sizes), accumulate((sizes[bucket] for bucket in sorted(sizes)), initial=0)))
    buffers = {kind: torch.zeros(sum(sizes.values())) for kind in {chunk.kind for chunk in chunks}}
    for own in by_file(chunks).values():
        for chunk, x in read_chunks(folder, own):
            start = starts[number(chunk)] + chunk.box.offset[0]
            buffers[chunk.kind][start : start + chunk.box.size] = x
    return buffers


# ---- names and shapes ------------------------------------------------------------------------------------------------


def _by_layer(chunk: Chunk) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors in a chunk, with stacked layers separated."""
    match = _STACKED.fullmatch(chunk.name)
    if not match:
        yield chunk.name, chunk.shape
        return
    for layer in range(chunk.box.offset[0], chunk.box.offset[0] + chunk.box.extent[0]):
        yield f"{match[1]}.{layer}.{match[2]}", chunk.shape[1:]


def pieces_of(chunk: Chunk, tensor: torch.Tensor, reading: Reading) -> Iterator[Piece]:
    """The pieces of our tensors in a chunk. Raises CheckpointError if it does not fit the model."""
    prefix = PREFIX[chunk.kind] if chunk.kind else ""
    for part, x in chunk.parts(tensor):
        if _STACKED.fullmatch(part.name):
            inner = Box(part.box.offset[1:], part.box.extent[1:])
            boxes = [(name, shape, inner, x[number]) for number, (name, shape) in enumerate(_by_layer(part))]
        else:
            boxes = [(part.name, part.shape, part.box, x)]
        for name, shape, box, values in boxes:
            for piece in _in_tensor(name, shape, box, values, reading):
                values = with_ones(reading.centred, reading.weights[piece.name], prefix, piece.tensor)
                yield piece._replace(name=prefix + piece.name, tensor=values)


def _in_tensor(theirs: str, shape: tuple[int, ...], box: Box, x: torch.Tensor, reading: Reading) -> Iterator[Piece]:
    """The boxes of our tensor in a box [rows, inputs] or [rows] of theirs."""
    target = reading.names.ours(theirs)
    if target is None:
        return
    name = target.name
    if name == "output.weight" and not reading.model.untie_embeddings_and_output_weights:
        raise CheckpointError(  # a tied one is stored once, by the name of the embedding
            f"{theirs}: the saved arguments say that the output layer is the embedding, and here is one of its own",
            "they lack --untie-embeddings-and-output-weights",
        )
    if name not in reading.weights:
        raise CheckpointError(f"{theirs} would be {name}, which this model does not have")
    ours = reading.weights[name].shape
    if target.rows.taps and len(shape) == 3:  # [rows, 1, taps]
        shape, x = (shape[0], shape[2]), x.squeeze(1)
        box = Box((box.offset[0], box.offset[2]), (box.extent[0], box.extent[2]))
    if "ep" not in reading.weights[name].cut:
        yield from (Piece(name, ours, own, part) for own, part in _in_matrix(theirs, target, ours, shape, box, x))
        return
    for number in range(box.extent[0]):  # of all experts: [E, rows, inputs] or [E, rows]
        expert, inner = box.offset[0] + number, Box(box.offset[1:], box.extent[1:])
        for own, part in _in_matrix(theirs, target, ours[1:], shape[1:], inner, x[number]):
            yield Piece(name, ours, Box((expert, *own.offset), (1, *own.extent)), part.unsqueeze(0))


def _in_matrix(
    theirs: str, target: OurTensor, ours: tuple[int, ...], shape: tuple[int, ...], box: Box, x: torch.Tensor
) -> Iterator[tuple[Box, torch.Tensor]]:
    """(box, values) in our tensor of shape `ours`, for a box [rows, inputs] or [rows] of theirs."""
    lead, columns = split_shape(target.name, target.rows, ours)
    numbers = target.rows.numbers(lead, target.part)
    rows, padded = len(numbers), target.name in (WORDS, "output.weight")
    if shape[1:] != columns or (shape[0] < rows if padded else shape[0] != rows):
        raise CheckpointError(f"{theirs} has shape {shape}, expected {(rows, *columns)}")
    start = box.offset[0]
    own = numbers[start : min(start + box.extent[0], rows)]
    for found, part in boxes_of_rows(lead, own, x[: len(own)]):
        where = Box((*found.offset, *box.offset[1:]), (*found.extent, *box.extent[1:]))
        yield where, part.float().contiguous()
