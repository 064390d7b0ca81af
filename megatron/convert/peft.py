# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in the files of PEFT, Hugging Face's library: adapter_config.json and adapter_model.safetensors.

| ours                                | PEFT's                                                                   |
|-------------------------------------|--------------------------------------------------------------------------|
| lora_a [r, i], lora_b [rows..., r]  | lora_A [r, i], lora_B [o, r] of the module with this weight              |
| of a fused matrix                   | the same lora_A for q_proj, k_proj, v_proj (or gate_proj, up_proj)       |
| with --lora-split-fused, [parts r, i] | a lora_A for each of them                                              |
| |W| + lora_magnitude [rows..., 1]   | lora_magnitude_vector [o] (DoRA)                                         |

Rows are in another order there, as those of the weights are (`model/gpt/hf_names.py`). A pair that PEFT does not have
(adapters of q_proj and v_proj alone) is 0 in A and in B here: it adds nothing, and has no gradient.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import Any, Optional

import torch

from megatron.checkpoint.base_checkpoint import BASE, ReaderWithBase, base_record, open_checkpoint
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.lineage import ENTRIES, ancestors, lineage
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert import hf_files
from megatron.convert.families import adapted
from megatron.convert.hf_tokenizer import write_tokenizer
from megatron.convert.merged import delta, has_adapters, magnitude
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import refuse_head, without_model
from megatron.model.hf_match import Match
from megatron.model.linear_kinds import WEIGHT, linear_layers
from megatron.model.lora import KIND, MAGNITUDE, OWN, PAIR, parts_of, trained
from megatron.model.recipe import config_of, facts_of
from megatron.mpu.placement import Placement
from megatron.settings.from_checkpoint import located
from megatron.settings.schema import Model
from megatron.storage.new_folder import new_folder

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NAMELESS = f"{CONFIG} names no base: no record says which Hugging Face model it is; --base-model NAME_OR_FOLDER does"
MERGE_THERE = "merge the adapters into the model with PEFT (merge_and_unload), and import that: from-hf"
# Entries of adapter_config.json that are read, or that change nothing.
READ = {"peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "init_lora_weights"}
VECTOR = "lora_magnitude_vector"
IRRELEVANT = """task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules
    exclude_modules fan_in_fan_out layers_to_transform layers_pattern megatron_core qalora_group_size runtime_config
    ensure_weight_tying eva_config""".split()
PLAIN_START = (True, False, None, "gaussian", "eva", "orthogonal")  # others change the base's weights


class PeftPair:
    """A pair of PEFT's, of one of their modules. norms: of DoRA; moved: whether training has changed anything."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, norms: Optional[torch.Tensor] = None, moved: bool = False):
        self.a, self.b, self.norms, self.moved = a, b, norms, moved or bool(a.any() or b.any())


# ---- writing ---------------------------------------------------------------------------------------------------------


def to_peft(
    path: Path, out: Path, base_model: Optional[str] = None, given: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Write the adapters of a checkpoint as a folder that `peft.PeftModel.from_pretrained` loads; returns notices.
    The tokenizer's files are beside them.

    base_model: name or path of the Hugging Face model that they belong to, for adapter_config.json
    given: tokenizer flags, if the files of the training run have moved
    Raises SettingsError if the model, or what was trained, has no counterpart there.
    """
    with open_checkpoint(path) as reader, new_folder(out) as folder:
        if not has_adapters(reader):
            raise SettingsError(f"{path} has no LoRA adapters", do="to-hf exports a model without adapters")
        config, vocab_size = config_of(located(reader.state)), reader.state["vocab_size"]
        refuse_head(config, vocab_size, path)
        _refuse_other_weights(path, reader)
        family, weights = adapted(config, vocab_size), facts_of(config, vocab_size).weights
        pairs: dict[str, PeftPair] = {}
        linear, modules = set(linear_layers(weights)), []  # of theirs
        for match in family.matches:
            layer = match.ours.removesuffix(WEIGHT)
            modules += [name.removesuffix(WEIGHT) for name in match.theirs if layer in linear]
            if f"{layer}.{PAIR[0]}" in reader.tensors:
                a, b = (reader.read(f"{layer}.{one}", dtype=torch.float32) for one in PAIR)
                own = _to_theirs(match, weights[match.ours], config.model, a, b, family.kind == "gpt2")
                if config.model.use_dora:
                    own = _with_norms(reader, match, own, family.kind == "gpt2")
                pairs |= own
        moved = {name: pair for name, pair in pairs.items() if pair.moved} or pairs
        notices = []
        if base_model is None:
            base_model = _base_of(reader)
            notices = [
                NAMELESS if base_model is None else f"{CONFIG} names {base_model}, which the base was imported from"
            ]
        _write_tensors(folder, moved)
        theirs = _their_config(config.model, moved, modules, family.kind, base_model)
        (folder / CONFIG).write_text(json.dumps(theirs, indent=2, sort_keys=True))
        run = without_model(config, reader.state, path)
        tokenizer = write_tokenizer(folder, run, given, path, partial(family.theirs, dtype="float32"))
        pairs_of = f"{len(moved)} pairs of rank {config.model.lora_rank}"
        return [f"{out}: {pairs_of} for {', '.join(theirs['target_modules'])}", *notices, *tokenizer.notices]


def _base_of(reader: Reader) -> Optional[str]:
    """The name on the hub, or the folder, that the base of adapters was imported from.

    None if the base is no import as it was, or if neither is known.
    """
    base = reader.base.state if isinstance(reader, ReaderWithBase) else {}
    source = base.get("source") or {}
    if "config" not in source or base["iteration"] or base.get("started_from"):
        return None
    name, folder = source["name"], Path(str(base.get("origin")).partition(" in ")[2])
    return name if "/" in name else str(folder) if (folder / "config.json").is_file() else None


def _refuse_other_weights(path: Path, reader: Reader) -> None:
    """Raise SettingsError if other weights than pairs were trained."""
    frozen = set((reader.state.get("untrained") or {}).get("frozen") or ())
    names = [name for name in reader.tensors if not name.startswith("optimizer.")]
    if others := sorted(name for name in names if name not in frozen and not name.endswith(OWN)):
        named = ", ".join(others[:4]) + f" and {len(others) - 4} more" * (len(others) > 4)
        raise SettingsError(
            f"{path} has trained other weights beside its adapters: {named}",
            "PEFT would have them as modules_to_save, which is not written here",
            "python -m megatron.tools.checkpoint merge-lora, then to-hf",
        )


def _to_theirs(
    match: Match, weight: Placement, model: Model, a: torch.Tensor, b: torch.Tensor, transposed: bool
) -> dict[str, PeftPair]:
    """The pairs of their modules from a pair of ours. transposed: their weights are [i, o]."""
    count, r, inputs = len(match.theirs), b.shape[-1], weight.shape[-1]
    parts = len(parts_of(model, weight)[1])
    rows = [_in_columns(b, inputs, match, transposed)] if r <= inputs else []
    if not rows:
        raise SettingsError(
            f"{match.ours}: --lora-rank {r} is larger than its {inputs} inputs, which is not written here"
        )
    if parts > 1 and count != parts:
        raise SettingsError(
            f"{match.ours}: --lora-split-fused gives its {parts} parts a pair each, and {match.theirs[0]} has one",
            do="python -m megatron.tools.checkpoint merge-lora, then to-hf",
        )
    own = a.split(r) if parts > 1 else [a] * count
    pairs = {name.removesuffix(WEIGHT): PeftPair(x, y[:, :r]) for name, x, y in zip(match.theirs, own, rows[0])}
    # The whole product, by the way that weights take.
    wanted = [x.t() if transposed else x for x in match.to_theirs(delta(model, weight, a, b))]
    one = delta(model, Placement((1, 1), weight.init), torch.ones(r, 1), torch.ones(1, r)).item() / r
    for pair, whole in zip(pairs.values(), wanted):
        torch.testing.assert_close(one * pair.b @ pair.a, whole, rtol=1e-4, atol=1e-6)
    return pairs


def _with_norms(reader: Reader, match: Match, pairs: Mapping[str, PeftPair], transposed: bool) -> dict[str, PeftPair]:
    """Pairs of their modules with the norms of rows, which are those of our weight and what training has added."""
    weight, m = (
        reader.read(f"{match.ours.removesuffix(WEIGHT)}{name}", dtype=torch.float32)
        for name in (WEIGHT, f".{MAGNITUDE}")
    )
    whole, added = (_in_columns(x, weight.shape[-1], match, transposed) for x in (magnitude(weight, m), m))
    return {
        name: PeftPair(pair.a, pair.b, norms[:, 0], bool(more.any()))
        for (name, pair), norms, more in zip(pairs.items(), whole, added)
    }


def _in_columns(b: torch.Tensor, inputs: int, match: Match, transposed: bool) -> list[torch.Tensor]:
    """B with its rows in their order, for each of their modules: as the first columns of a weight."""
    wide = torch.nn.functional.pad(b, (0, inputs - b.shape[-1]))
    return [x.t() if transposed else x for x in match.to_theirs(wide)]


def _write_tensors(folder: Path, pairs: Mapping[str, PeftPair]) -> None:
    from safetensors.torch import save_file

    tensors = {f"{PREFIX}{name}.lora_A.weight": pair.a for name, pair in pairs.items()}
    tensors |= {f"{PREFIX}{name}.lora_B.weight": pair.b for name, pair in pairs.items()}
    tensors |= {f"{PREFIX}{name}.{VECTOR}": pair.norms for name, pair in pairs.items() if pair.norms is not None}
    save_file({name: x.clone().contiguous() for name, x in tensors.items()}, folder / TENSORS, {"format": "pt"})


def _their_config(
    model: Model, names: Mapping[str, PeftPair], modules: Sequence[str], kind: str, base_model: Optional[str]
) -> dict[str, Any]:
    """modules: all linear layers of their model"""
    return dict(
        peft_type="LORA",
        task_type={"t5": "SEQ_2_SEQ_LM", "bert": None}.get(kind, "CAUSAL_LM"),
        base_model_name_or_path=base_model,
        inference_mode=True,
        r=model.lora_rank,
        lora_alpha=model.lora_rank if model.lora_alpha is None else model.lora_alpha,
        lora_dropout=model.lora_dropout,
        use_rslora=model.use_rslora,
        use_dora=model.use_dora,
        fan_in_fan_out=kind == "gpt2",
        bias="none",
        target_modules=_shortened(list(names), modules),
    )


def _shortened(names: list[str], modules: Sequence[str]) -> list[str]:
    """Names of modules without their layers, if no others of `modules`, which are all of the model, end in the same way:
    PEFT compares the ends of names, and so does --lora-target.

    >>> _shortened(["h.0.attn", "h.1.attn"], ["h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp"])
    ['attn']
    >>> _shortened(["h.0.attn", "h.1.attn"], ["h.0.attn", "h.1.attn", "h.2.attn"])
    ['h.0.attn', 'h.1.attn']
    """
    ends = sorted({_after_number(name) for name in names})
    meant = {name for name in modules if any(f".{name}".endswith(f".{end}") for end in ends)}
    return ends if meant == set(names) else names


def _after_number(name: str) -> str:
    """The name of a module inside its layer: attn.c_attn of transformer.h.3.attn.c_attn."""
    words = name.split(".")
    at = next(n for n, word in enumerate(words) if word.isdecimal())
    return ".".join(words[at + 1 :])


# ---- reading ---------------------------------------------------------------------------------------------------------


def from_peft(source: Path, out: Path, base: Path, state: dict[str, Any], check: bool = True) -> list[str]:
    """Write a folder of PEFT as a checkpoint of adapters on `base`, a checkpoint of ours; returns notices.

    state: a run's position, as saved. check: compare the base with the model that adapter_config.json names. Raises
    CheckpointError for what cannot be expressed, by name, and for another base.
    """
    if (source / "config.json").exists() and not (source / CONFIG).exists():
        raise CheckpointError(f"{source} holds a whole model, and no adapters: no {CONFIG}", do="from-hf imports it")
    theirs = hf_files.read_json(source / CONFIG)
    refuse_others(theirs)
    pairs = _read_pairs(source, int(theirs["r"]), bool(theirs.get("use_dora")))
    with Reader(base) as reader:
        saved = reader.state
        if saved.get(BASE) or saved["config"]["model"].get("linear"):
            raise SettingsError(
                f"{base} is no plain model: it has special linear layers", do="merge its adapters first"
            )
        config = config_of(saved["config"])
        family, weights = adapted(config, saved["vocab_size"]), facts_of(config, saved["vocab_size"]).weights
        known = set(reader.tensors)
    found = _by_layer(source, pairs, family.matches, set(linear_layers(weights)))
    split = not all(_shares_a(match, own) for match, own in found.values())
    model = dict(
        lora_rank=int(theirs["r"]),
        lora_alpha=float(theirs["lora_alpha"]),
        lora_dropout=float(theirs.get("lora_dropout") or 0.0),
        use_rslora=bool(theirs.get("use_rslora")),
        use_dora=bool(theirs.get("use_dora")),
        lora_split_fused=split,
        lora_target=",".join(_shortened(list(found), linear_layers(weights))),
    )
    model["linear"] = ",".join(f"{target}={KIND}" for target in model["lora_target"].split(","))
    shaped = replace(config.model, **model)
    tensors = {}
    with Reader(base) as reader:
        named = theirs.get("base_model_name_or_path")
        unchecked = f"{base} was not compared with {named or 'the model of the adapters'} (--unchecked)"
        notices = _other_base(named, reader, found) if check else [unchecked]
        for layer, (match, own) in found.items():
            a, b = _to_ours(source, match, weights[match.ours], shaped, own, family.kind == "gpt2")
            tensors |= {f"{layer}.{PAIR[0]}": a, f"{layer}.{PAIR[1]}": b}
            if shaped.use_dora:
                tensors[f"{layer}.{MAGNITUDE}"] = _magnitudes(reader, match, own, family.kind == "gpt2")
    record = {
        **saved,
        "config": _adapted(saved["config"], model, trained(shaped)),
        "state": state,
        "optimizer_steps": None,
    }
    frozen = sorted(name for name in known if not name.startswith("optimizer."))
    record |= dict(untrained={**(saved.get("untrained") or {}), "frozen": frozen}, mesh={})
    of_base = f" (of the base {named})" if named else ""
    origin = dict(origin=f"PEFT{of_base} in {source.resolve()}", source=hf_files.about(source, theirs))
    record = {name: value for name, value in record.items() if name not in ENTRIES} | lineage(saved, str(base)) | origin
    record[BASE] = base_record(base, str(out))
    with Saver(out) as saver:
        pieces = [Piece(name, tuple(x.shape), Box.whole(x.shape), x) for name, x in tensors.items()]
        saver.write(0, [pieces], record)
    return [f"{out}: {len(found)} pairs of rank {theirs['r']} for {model['lora_target']}, on {base}", *notices]


def _other_base(named: Optional[str], reader: Reader, found: Mapping[str, "Found"]) -> list[str]:
    """A note unless the base is the model that adapter_config.json names. named: a folder, whose weights are compared with
    those of the base, or a name on the hub. Raises CheckpointError for other weights.
    """
    if not named:
        return [f"{CONFIG} names no base: that {reader.folder} is the model of the adapters is not checked"]
    advice = "--base has to be the model that the adapters were trained on"
    if (Path(named) / "config.json").is_file():
        files = hf_files.TensorFiles(Path(named))
        for match, _ in found.values():
            for name, ours in zip(match.theirs, match.to_theirs(reader.read(match.ours, dtype=torch.float32))):
                theirs = files.get(name) if name in files.shapes else ours
                if theirs.shape != ours.shape or not torch.equal(ours.to(theirs.dtype), theirs):
                    raise CheckpointError(
                        f"{CONFIG} names {named}, whose {name} differs from that of {reader.folder}",
                        "on other weights the adapters are another model",
                        f"give the model of the adapters as --base: from-hf {named} DIR; or --unchecked",
                    )
        return []
    here = next((one.name for one in ancestors(reader.state) if one.imported), "no import")
    if PurePath(here).name != PurePath(hf_files.about(Path(named), {})["name"]).name:
        return [f"{CONFIG} names {named}, and {reader.folder} is of another model ({here}): {advice}"]
    if reader.state["iteration"] or reader.state.get("started_from"):
        return [f"{CONFIG} names {named}, and {reader.folder} was trained further: {advice}"]
    return []


def refuse_others(theirs: Mapping[str, Any]) -> None:
    """Raise CheckpointError for entries of adapter_config.json that have no counterpart here."""
    if theirs.get("peft_type") != "LORA":
        raise CheckpointError(f"{CONFIG} is of {theirs.get('peft_type')}; LORA is what can be read", do=MERGE_THERE)
    odd = {name: value for name, value in theirs.items() if name not in READ and name not in IRRELEVANT and value}
    odd = {name: value for name, value in odd.items() if (name, value) != ("bias", "none")}
    if theirs.get("init_lora_weights") not in PLAIN_START:
        odd["init_lora_weights"] = theirs["init_lora_weights"]
    if odd:
        raise CheckpointError(
            f"{CONFIG} has {', '.join(f'{name}: {json.dumps(value)}' for name, value in odd.items())}",
            "no adapters of ours do the same",
            MERGE_THERE,
        )
    wrong = [name for name in ("r", "lora_alpha") if not isinstance(theirs.get(name), (int, float))]
    if wrong or theirs["r"] < 1:
        raise CheckpointError(f"{CONFIG} has no valid {' and '.join(wrong) or 'r'}", do=hf_files.WHOLE)


def _read_pairs(source: Path, rank: int, dora: bool) -> dict[str, PeftPair]:
    """Their module -> its pair, with norms if `dora`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(source / TENSORS)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{source / TENSORS} cannot be read: {error}", do=hf_files.WHOLE) from None
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, x in tensors.items():
        module, _, kind = name.removeprefix(PREFIX).replace(".default.", ".").removesuffix(WEIGHT).rpartition(".")
        if kind == VECTOR and not dora:
            raise CheckpointError(
                f"{source / TENSORS} has norms of DoRA ({name}), and {CONFIG} has no use_dora",
                "the same pairs would give other outputs",
                "give the two files of one adapter",
            )
        norms = kind == VECTOR and x.dim() == 1
        if not norms and (kind not in ("lora_A", "lora_B") or x.dim() != 2 or x.shape[kind == "lora_B"] != rank):
            raise CheckpointError(
                f"{source / TENSORS}: {name} {list(x.shape)} is no half of a pair of rank {rank}, the r of {CONFIG}",
                do=MERGE_THERE,
            )
        if not (x.is_floating_point() and x.isfinite().all()):
            raise CheckpointError(
                f"{source / TENSORS}: {name} has numbers that no adapter has: NaN, infinity or whole numbers",
                do=f"damaged? {hf_files.WHOLE}",
            )
        halves.setdefault(module, {})[kind] = x.float()
    if alone := sorted(name for name, pair in halves.items() if len(pair) < 2 + dora):
        half = f"half of a pair{' or no norms' * dora}"
        raise CheckpointError(f"{source / TENSORS} has {half}: {', '.join(alone[:6])}", do=hf_files.WHOLE)
    return {name: PeftPair(pair["lora_A"], pair["lora_B"], pair.get(VECTOR)) for name, pair in halves.items()}


Found = tuple[Match, list[Optional[PeftPair]]]  # a weight, and the pair of each of their modules


def _by_layer(source: Path, pairs: Mapping[str, PeftPair], matches: list[Match], linear: set[str]) -> dict[str, Found]:
    """Our layer -> what there is of it. Raises CheckpointError for modules that have no counterpart."""
    left, found = dict(pairs), {}
    for match in matches:
        layer = match.ours.removesuffix(WEIGHT)
        if layer not in linear:
            continue
        modules = [name.removesuffix(WEIGHT) for name in match.theirs]
        # Their module may be that below the one with the output layer.
        own = [left.pop(name, None) or left.pop(name.partition(".")[2], None) for name in modules]
        if any(own):
            found[layer] = match, own
    if left or not found:
        raise CheckpointError(
            f"{source / TENSORS} has pairs of modules that this model does not have: {', '.join(sorted(left)[:6])}"
            if left
            else f"{source / TENSORS} has no pairs",
            "pairs belong to the linear layers of blocks, not to embeddings and the output layer",
            f"give the model of the adapters as --base; or {MERGE_THERE}",
        )
    return found


def _shares_a(match: Match, own: list[Optional[PeftPair]]) -> bool:
    """Whether all parts of a weight have the same A, so that they are one pair of the whole."""
    return all(pair is not None and torch.equal(pair.a, own[0].a) for pair in own) if own[0] else False


def _to_ours(
    source: Path, match: Match, weight: Placement, model: Model, own: list[Optional[PeftPair]], transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of ours. Raises CheckpointError for other shapes than the weight's."""
    r, inputs = model.lora_rank, weight.shape[-1]
    shapes = [tuple(x.shape) for x in match.to_theirs(torch.empty(weight.shape, device="meta"))]
    shapes = [shape[::-1] if transposed else shape for shape in shapes]
    for name, pair, (rows, columns) in zip(match.theirs, own, shapes):
        if pair is not None and (pair.a.shape[1], pair.b.shape[0]) != (columns, rows):
            raise CheckpointError(
                f"{source / TENSORS}: the pair of {name.removesuffix(WEIGHT)} is of a weight "
                f"{[pair.b.shape[0], pair.a.shape[1]]}, the base has {[rows, columns]}",
                do="give the model of the adapters as --base",
            )
    if r > inputs:
        raise CheckpointError(f"{match.ours}: rank {r} is larger than its {inputs} inputs", do=MERGE_THERE)
    padded = [
        torch.nn.functional.pad(torch.zeros(rows, r) if pair is None else pair.b, (0, inputs - r))
        for pair, (rows, _) in zip(own, shapes)
    ]
    b = match.to_ours([x.t() if transposed else x for x in padded])[..., :r].contiguous()
    parts = len(parts_of(model, weight)[1])
    each = [torch.zeros(r, inputs) if pair is None else pair.a for pair in own]
    return (torch.cat(each) if parts > 1 else each[0]), b.view(*weight.shape[:-1], r)


def _magnitudes(reader: Reader, match: Match, own: list[Optional[PeftPair]], transposed: bool) -> torch.Tensor:
    """What their norms add to those of our weight's rows, [rows..., 1]; 0 for modules without a pair."""
    weight = reader.read(match.ours, dtype=torch.float32)
    present = _in_columns(magnitude(weight, torch.zeros(1)), weight.shape[-1], match, transposed)
    norms = [old if pair is None else _filled(old, pair.norms) for pair, old in zip(own, present)]
    ours = match.to_ours([x.t() if transposed else x for x in norms]).view(weight.shape)[..., :1]
    return (ours - magnitude(weight, torch.zeros(1))).contiguous()


def _filled(wide: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
    """The matrix with these numbers as its first column."""
    return torch.cat([norms.unsqueeze(1), torch.zeros_like(wide[:, 1:])], 1)


def _adapted(config: Mapping[str, Any], model: Mapping[str, Any], patterns: list[str]) -> dict[str, Any]:
    """The settings in the base's record, with those of the adapters. patterns: of what is trained"""
    return {
        **config,
        "model": {**config["model"], **model},
        "optimizer": {**config.get("optimizer", {}), "train_only": patterns, "freeze": None},
    }
