# SPDX-License-Identifier: Apache-2.0
"""Models and Adam's state of torch.distributed.checkpoint (DCP), in and out: torchtitan's, NeMo Automodel's, and of plain
loops with Hugging Face's names.

    torchtitan   step-100/{.metadata, __0_0.distcp, ...}                  everything in one folder, names of its own
    Automodel    epoch_0_step_100/{model/*.safetensors, optim/.metadata}  names of Hugging Face

Neither says what model it is: a config.json of Hugging Face does. Moments have the names and shapes of weights, so the
functions that turn weights into ours turn moments, too. They have to move elements only: see `_only_moves`.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert.dcp_files import DCPFolder, LaterTensor, ShardedFiles, write_dcp
from megatron.convert.families import Family, exported, imported, names_layers
from megatron.convert.fitted import fit_files
from megatron.convert.hf_files import read_json
from megatron.convert.huggingface import refuse_unknown, write_hf
from megatron.convert.imported import ModelImport, check_complete, refuse_differences
from megatron.convert.megatron_metadata import METADATA
from megatron.convert.megatron_optimizer import LEAVE_OUT, MOMENTS, PREFIX, state_notices, with_moments
from megatron.convert.merged import for_export
from megatron.convert.torchtitan_names import FORMS, form_of, in_torchtitan, of_optimizer
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import refuse_head
from megatron.inference.quantized import refuse_quantized
from megatron.model.gpt.facts import GPTFacts
from megatron.model.hf_match import Match
from megatron.model.recipe import config_of
from megatron.optimizer.lr_schedule import learning_rate, weight_decay
from megatron.optimizer.resumed_schedule import lengths_of
from megatron.settings.from_checkpoint import located
from megatron.storage.new_folder import new_folder

CONFIG = "config.json"
STEP = re.compile(r"(?:step-|epoch_\d+_step_)(\d+)")
_GROUP = 1 << 30  # bytes of tensors that are read at a time
_KEEP = "a config.json of another model, or a copy that lacks files"
_DECAY = "norms had weight decay {}: here they have none, so the next losses differ a little"


class DCPPlace(NamedTuple):
    """A checkpoint of DCP. model, state: folders of weights and of the optimizer's state, which are one in torchtitan"""

    model: Path
    state: Optional[Path]


def find_place(source: Path, step: Optional[int]) -> DCPPlace:
    """The checkpoint in a folder: the newest, or that of `step`. Raises CheckpointError if there is none."""
    found = {int(match[1]): path for path in source.glob("*") if (match := STEP.fullmatch(path.name))}
    if found and step not in (None, *found):
        raise CheckpointError(f"{source} has no checkpoint of step {step}; it has {sorted(found)[-8:]}")
    folder = found[max(found) if step is None else step] if found else source
    if (folder / METADATA).exists():
        return DCPPlace(folder, folder)
    model, state = folder / "model", folder / "optim"
    if (model / METADATA).exists() or any(model.glob("*.safetensors")) or any(model.glob("consolidated/*.safetensors")):
        return DCPPlace(model, state if (state / METADATA).exists() else None)
    raise CheckpointError(
        f"{source} holds no checkpoint of torch.distributed.checkpoint",
        f"no {METADATA} in it, in step-N, or in epoch_E_step_N/model",
    )


# ---- import ----------------------------------------------------------------------------------------------------------


def open_dcp(
    source: Path,
    step: Optional[int],
    config: Optional[Path],
    batch: Optional[int],
    optimizer: bool,
    log: Callable[[str], None],
) -> ModelImport:
    """Open a checkpoint for import. Raises CheckpointError if it is refused, damaged or incomplete.

    config: of the model: a config.json of Hugging Face, or its folder; None: beside the checkpoint
    batch: samples of a step. optimizer: import the optimizer's state, if there is any
    """
    place = find_place(source, step)
    path = find_config(config, place, source)
    files, state = _opened(place, optimizer)
    form = form_of(files.shapes, state.state.get(MOMENTS[0], {}) if state else ())
    settings = read_json(path)

    def family_of(tied: Optional[bool] = None) -> Family:
        family = imported(settings, tied)
        return in_torchtitan(family, form) if form else family

    fitted = fit_files(place.model, files, family_of(), family_of, _KEEP)
    family = fitted.family
    if not isinstance(family.facts, GPTFacts):
        raise SettingsError(f"a {family.kind} of {source} is not imported", do="decoders are")
    model, weights = family.facts.settings, family.facts.weights
    state = state if optimizer and state is not None and state.state else None
    facts = None
    matches = of_optimizer(family.matches, model, form) if form else family.matches
    if state:
        matches = [match for match in matches if not weights[match.ours].buffer]
        steps = _check_state(state, matches, family, fitted.names)
        facts = _facts(state, steps, batch)
    notices = [f"{form_name(form)} in {place.model}, of the model in {path}", *fitted.notices]
    notices += state_notices(dict(iteration=facts["iteration"] if facts else 0), optimizer, facts is not None)
    notices += _of_norms(state, family) if state else []

    def shards() -> Iterator[list[Piece]]:
        for own in _in_groups(family.matches, weights):
            log(f"reading {own[0].ours} and {len(own) - 1} more of {place.model}")
            yield _pieces("", own, files.read({name: fitted.names[name] for name in _theirs(own)}), weights)
        for own in _in_groups(matches, weights) if state else ():
            log(f"reading the state of {own[0].ours} and {len(own) - 1} more of {place.state}")
            for kind in MOMENTS:
                stored = {name: state.state[kind][fitted.names.get(name, name)] for name in _theirs(own)}
                yield _pieces(PREFIX[kind], own, state.read_stored(stored), weights)

    wanted = with_moments(weights) if state else weights
    origin = f"{form_name(form)} in {place.model.resolve()}"
    return ModelImport(
        model, family.facts.vocab_size, origin, notices, lambda: check_complete(source, wanted, shards()), facts
    )


def form_name(form) -> str:
    """In words."""
    return "torchtitan" if form else "torch.distributed.checkpoint with names of Hugging Face"


def find_config(given: Optional[Path], place: DCPPlace, source: Path) -> Path:
    """The config.json of the model. Raises CheckpointError if there is none."""
    if given is not None:
        return given / CONFIG if given.is_dir() else given
    around = (place.model, place.model / ".hf_metadata", place.model / "consolidated", place.model.parent, source)
    for folder in around:
        if (folder / CONFIG).exists():
            return folder / CONFIG
    raise CheckpointError(
        f"{source} does not say how many heads its model has, nor its other settings",
        f"there is no {CONFIG} beside it",
        "--hf-config FOLDER: of the same model in Hugging Face's format, as torchtitan's hf_assets_path is",
    )


def _opened(place: DCPPlace, optimizer: bool) -> tuple[Any, Optional[DCPFolder]]:
    """(the weights' files, the folder of the optimizer's state)."""
    if place.model == place.state:
        both = DCPFolder(place.model)
        return both, both
    state = DCPFolder(place.state) if optimizer and place.state else None
    if (place.model / METADATA).exists():
        return DCPFolder(place.model), state
    shards = any(place.model.glob("*.safetensors"))
    return ShardedFiles(place.model if shards else place.model / "consolidated"), state


def _check_state(state: DCPFolder, matches: list[Match], family: Family, names: Mapping[str, str]) -> int:
    """The number of updates. Raises CheckpointError for a state that is not Adam's, or lacks a parameter."""
    kinds = set(state.state)
    if not set(MOMENTS) <= kinds or kinds - {*MOMENTS, "step"}:
        raise CheckpointError(f"{state.folder} holds {', '.join(sorted(kinds))}, not the state of Adam", do=LEAVE_OUT)
    shapes, changed = family.facts.weights, []
    for match in matches:
        whole = torch.empty(shapes[match.ours].shape, device="meta")
        for name, expected in zip(match.theirs, match.to_theirs(whole)):
            for kind in MOMENTS:
                stored = state.state[kind].get(names.get(name, name))
                if stored is None or stored.shape != tuple(expected.shape):
                    what = "nothing" if stored is None else f"{stored.shape} in the place of {tuple(expected.shape)}"
                    raise CheckpointError(f"{state.folder} has {what} for {kind} of {name}", do=LEAVE_OUT)
        changed += [] if _only_moves(match, shapes[match.ours].shape) else [match.ours]
    if changed:
        raise CheckpointError(
            f"the weights of a {family.kind} are other numbers here ({changed[0]}): its moments are not imported",
            do=LEAVE_OUT,
        )
    known = {names.get(name, name) for match in matches for name in match.theirs}
    if unknown := sorted(set(state.state[MOMENTS[0]]) - known):
        raise CheckpointError(
            f"{state.folder} has a state of {unknown[0]}, which the model does not have", do=LEAVE_OUT
        )
    steps = {float(x) for x in state.read_stored(state.state.get("step", {})).values()}
    if len(steps) != 1:
        why = f"its parameters have {sorted(steps)[:4]}" if steps else "it has no `step`"
        raise CheckpointError(f"{state.folder} does not say how many updates its optimizer made", why, LEAVE_OUT)
    return int(steps.pop())


def _only_moves(match: Match, shape: tuple[int, ...]) -> bool:
    """Whether a match keeps all numbers, and changes places alone: then moments are turned as weights are.

    A match that adds 1 (norms of Gemma) or multiplies does neither keep zeros nor ones.
    """
    return all(
        bool((part == value).all())
        for value in (0.0, 1.0)
        for part in match.to_theirs(torch.full((), value).expand(shape))
    )


def _facts(state: DCPFolder, steps: int, batch: Optional[int]) -> dict[str, Any]:
    """The position and the settings of the run, as `megatron_optimizer.position_of` reads them."""
    if batch is None or batch < 1:
        raise CheckpointError(
            f"{state.folder} has the state of step {steps}, and does not say how many samples a step has",
            "learning rates and the order of samples count samples here",
            f"--global-batch-size N; or {LEAVE_OUT}",
        )
    args: dict[str, Any] = dict(global_batch_size=batch, consumed_train_samples=steps * batch)
    common = {name: _common(state, name) for name in ("initial_lr", "lr", "eps", "betas", "weight_decay")}
    if common["betas"]:
        args["adam_beta1"], args["adam_beta2"] = common["betas"]
    rate = common["initial_lr"] or common["lr"]
    decay = max((group.get("weight_decay", 0.0) for group in state.groups.values()), default=None)
    given = dict(lr=rate, adam_eps=common["eps"], weight_decay=decay)
    args |= {name: value for name, value in given.items() if value is not None}
    return dict(args=args, iteration=steps, schedule={}, scale={}, updates=[steps])


def _common(state: DCPFolder, what: str) -> Any:
    """The value that all groups of parameters have; None if there are several or none."""
    found = {
        tuple(value) if isinstance(value, list) else value for value in (g.get(what) for g in state.groups.values())
    }
    return found.pop() if len(found) == 1 else None


def _of_norms(state: DCPFolder, family: Family) -> list[str]:
    """A notice if vectors have weight decay there."""
    plain = [match.theirs[0] for match in family.matches if not family.facts.weights[match.ours].decay]
    decays = {state.groups.get(name, {}).get("weight_decay") or 0.0 for name in plain}
    return [_DECAY.format(max(decays))] if any(decays) else []


def _in_groups(matches: list[Match], weights) -> Iterator[list[Match]]:
    """Consecutive matches, of about 1 GiB."""
    group, size = [], 0
    for match in matches:
        own = math.prod(weights[match.ours].shape) * 4
        if group and size + own > _GROUP:
            yield group
            group, size = [], 0
        group.append(match)
        size += own
    yield group


def _theirs(matches: list[Match]) -> list[str]:
    return [name for match in matches for name in match.theirs]


def _pieces(prefix: str, matches: list[Match], found: Mapping[str, torch.Tensor], weights) -> list[Piece]:
    """The pieces of some of our tensors, from theirs."""
    pieces = []
    for match in matches:
        shape = weights[match.ours].shape
        x = match.to_ours([found[name].float() for name in match.theirs])
        pieces.append(Piece(prefix + match.ours, shape, Box.whole(shape), x.reshape(shape).contiguous()))
    return pieces


# ---- export ----------------------------------------------------------------------------------------------------------


def to_dcp(
    path: Path,
    out: Path,
    names: str,
    dtype: torch.dtype,
    given: Mapping[str, Any],
    optimizer: bool = True,
    check: bool = True,
) -> list[str]:
    """Export a checkpoint directory as DCP; returns notices for the user. Adapters are merged.

    names: "torchtitan", "torchtitan-0.2" or "automodel". given: tokenizer flags, of Automodel's folder
    check: read the output back, as `from-dcp` does, and compare all tensors before `out` appears
    Raises SettingsError for an unsupported model, CheckpointError if the comparison fails.
    """
    trained, with_state = path, False
    with for_export(path, out, "Hugging Face", names_layers) as path, Reader(path) as reader, new_folder(out) as folder:
        reader.needed("config")
        refuse_quantized(reader, "to-dcp")
        config, vocab_size = config_of(located(reader.state)), reader.needed("vocab_size")
        refuse_head(config, vocab_size, path)
        family = exported(config, vocab_size)
        if not isinstance(family.facts, GPTFacts):
            raise SettingsError(f"a {family.kind} is not exported", do="decoders are")
        refuse_unknown(reader, family)
        with_state = optimizer and _has_adam(reader, family)
        step = reader.state.get("state", {}).get("iteration", 0)
        notices = []
        if names == "automodel":
            target = folder / f"epoch_0_step_{step}"
            (target / "model").mkdir(parents=True)
            notices += write_hf(reader, target / "model", dtype, given, trained).tokenizer.notices
            if with_state:
                write_dcp(target / "optim", dict(optim=_optimizer(reader, family, family.matches, config, "automodel")))
            torch.save(dict(step=step, epoch=0), target / "step_scheduler.pt")
            notices.append("Automodel's files of the data loader and of random numbers, by rank, are not written")
        else:
            titan = in_torchtitan(family, FORMS[names])
            content = {name: one for match in titan.matches for name, one in _later(reader, match, "", dtype)}
            content |= {copy: content[own] for copy, own in titan.copies.items()}
            if with_state:
                matches = of_optimizer(titan.matches, config.model, FORMS[names])
                content["optimizer"] = _optimizer(reader, titan, matches, config, names)
                content["lr_scheduler"] = dict(last_epoch=step)
                content["train_state"] = dict(step=step, ntokens_seen=_tokens(reader))
            write_dcp(folder / f"step-{step}", content)
            (folder / CONFIG).write_text(json.dumps(family.theirs(None, str(dtype).removeprefix("torch.")), indent=2))
            notices.append('in torchtitan: --checkpoint.exclude_from_loading "dataloader"')
        read = [_compare(reader, folder, family, dtype, with_state)] if check else []
    state = "weights and Adam's state" if with_state else "weights"
    return [f"{out}: {state} of iteration {step}, names of {names}", *notices, *read]


def _later(reader: Reader, match: Match, prefix: str, dtype: torch.dtype) -> Iterator[tuple[str, LaterTensor]]:
    """Their tensors of one of ours, read when they are written."""
    shapes = match.to_theirs(torch.empty(reader.tensors[match.ours].shape, device="meta"))
    own = torch.float32 if match.exact else dtype
    for number, (name, shape) in enumerate(zip(match.theirs, shapes)):
        make = lambda box, number=number: match.to_theirs(reader.read(prefix + match.ours))[number]
        yield name, LaterTensor(tuple(shape.shape), make, own)


def _has_adam(reader: Reader, family: Family) -> bool:
    """Whether a checkpoint has the state of Adam. Raises SettingsError for that of another optimizer."""
    trained = [name for name, placed in family.facts.weights.items() if not placed.buffer]
    prefixes = [PREFIX[kind] for kind in MOMENTS]
    state = [name for name in reader.tensors if name.startswith("optimizer.")]
    if not state:
        return False
    if set(state) != {prefix + name for prefix in prefixes for name in trained}:
        raise SettingsError(
            f"{reader.folder} has the state of an optimizer that is not Adam alone",
            do="--weights-only exports the weights",
        )
    changed = next((m.ours for m in family.matches if not _only_moves(m, family.facts.weights[m.ours].shape)), None)
    if changed:
        raise SettingsError(
            f"the weights of a {family.kind} are other numbers there ({changed}): moments are not exported",
            do="--weights-only exports the weights",
        )
    return True


def _optimizer(reader: Reader, family: Family, matches: list[Match], config, names: str) -> dict[str, Any]:
    """The content of `optimizer`: a flattened state of AdamW, with all values of a group that torch has."""
    settings, lengths = config.optimizer, lengths_of(reader.state)
    samples = reader.state["state"]["scheduled_samples"]
    known = lengths is not None and bool(lengths.decay)  # not of an import that was not trained on
    rate = learning_rate(settings, lengths, samples) if known else settings.lr
    decay = weight_decay(settings, lengths, samples) if known else settings.weight_decay
    group = {name: one.default for name, one in inspect.signature(torch.optim.AdamW).parameters.items()}
    group |= dict(decoupled_weight_decay=True, lr=rate, initial_lr=settings.lr, eps=settings.adam_eps)
    del group["params"]
    group |= dict(betas=(settings.adam_beta1, settings.adam_beta2))
    found: dict[str, Any] = {}
    for match in matches:
        placed = family.facts.weights[match.ours]
        if placed.buffer:
            continue
        for kind in MOMENTS:
            for name, later in _later(reader, match, PREFIX[kind], torch.float32):
                found[f"state.{name}.{kind}"] = later
        own = group | dict(weight_decay=decay if placed.decay else 0.0)
        for name in match.theirs:
            found[f"state.{name}.step"] = torch.tensor(float(reader.needed("optimizer_steps")))
            found |= {f"param_groups.{name}.{key}": value for key, value in own.items()}
    return found


def _tokens(reader: Reader) -> int:
    """The tokens of the run up to now, without padding."""
    model = reader.state["config"].get("model", {})
    return reader.state["state"]["consumed_samples"] * (model.get("seq_length") or 0)


def _compare(reader: Reader, folder: Path, family: Family, dtype: torch.dtype, with_state: bool) -> str:
    """Read an export as `from-dcp` does; returns a notice. Raises CheckpointError if it is another model."""
    found = open_dcp(folder, None, None, 1, with_state, lambda text: None)
    matches, count, differ = {match.ours: match for match in family.matches}, 0, []
    for piece in (piece for pieces in found.shards() for piece in pieces):
        ours = reader.read(piece.name).float()
        if match := matches.get(piece.name):  # as the files round it
            own = torch.float32 if match.exact else dtype
            ours = match.to_ours([x.to(own).float() for x in match.to_theirs(ours)])
        differ += [] if torch.equal(ours, piece.tensor) else [piece.name]
        count += 1
    refuse_differences(differ)
    return f"read back: {count} tensors equal to the bit"
