# SPDX-License-Identifier: Apache-2.0
"""Export a run to Megatron-LM's distributed checkpoints, with Adam's state: `iter_0000100/` of `--ckpt-format torch_dist`.

    decoder.layers.mlp.linear_fc1.weight                            [layers, rows, inputs], in boxes of one layer
    optimizer.state.{param,exp_avg,exp_avg_sq}.decoder.layers...    main weights and moments of the same shapes
    common.pt                                                       arguments, schedule, settings of groups, position

It is the form "fully_reshardable" of Megatron-Core's distributed optimizer (--dist-ckpt-optim-fully-reshardable), which is
read in any layout. The names are those of Transformer Engine's modules, which the local ones give to theirs, too.
"""

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import OPTIMIZER
from megatron.convert.dcp_files import LaterTensor, write_dcp
from megatron.convert.megatron_dist import COMMON
from megatron.convert.megatron_export import Export, extra_states, local_part
from megatron.convert.megatron_optimizer import PREFIX, with_moments
from megatron.convert.megatron_pieces import their_rows
from megatron.errors import SettingsError
from megatron.model.weights import add_prefix
from megatron.mpu.placement import Placement
from megatron.optimizer.lr_schedule import Lengths, learning_rate, weight_decay
from megatron.optimizer.resumed_schedule import lengths_of
from megatron.settings import schema

FORM = "fully_reshardable"
_KINDS = ("param", "exp_avg", "exp_avg_sq")
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")


def write_distributed(
    export: Export, reader: Reader, padding, args: argparse.Namespace, folder: Path, log: Callable[[str], None]
) -> None:
    """Write the run. Raises SettingsError for a model whose layers differ, or without the state of Adam."""
    check_writable(export, reader)
    position = reader.state["state"]
    args.iteration, args.consumed_train_samples = position["iteration"], position["consumed_samples"]
    args.consumed_valid_samples = position["consumed_valid_samples"]
    args.ckpt_format, args.use_distributed_optimizer, args.no_save_optim = "torch_dist", True, False
    target = folder / f"iter_{args.iteration:07d}"
    log(f"writing {target.name}")
    weights = stacked(export, reader, padding)
    write_dcp(target, weights | _no_fp8(export, weights))
    config = schema.from_record(reader.state["config"])
    torch.save(_common(config, reader, args), target / COMMON)
    versions = dict(sharded_backend="torch_dist", sharded_backend_version=1)
    versions |= dict(common_backend="torch", common_backend_version=1)
    (target / "metadata.json").write_text(json.dumps(versions))
    (folder / TRACKER).write_text(str(args.iteration))


def check_writable(export: Export, reader: Reader) -> None:
    """Raise SettingsError for what this export does not write."""
    model = export.model
    if export.implementation == "legacy" or (export.tp, export.pp, export.ep) != (1, 1, 1):
        raise SettingsError(
            "--with-optimizer writes a distributed checkpoint, which has no layout and Megatron-Core's names",
            do="leave out --use-legacy-models and the --target- sizes; Megatron-LM loads it in any layout",
        )
    if model.mixture or model.letters or model.depths or len(set(export.facts.layer_kinds)) > 1:
        raise SettingsError(
            "--with-optimizer exports GPTs whose layers are alike: no experts, patterns or multi-token prediction",
            do="without it the weights are exported",
        )
    state = {name for name in reader.tensors if name.startswith(OPTIMIZER)}
    wanted = set(with_moments(export.facts.weights)) - set(export.facts.weights)
    if wanted != state:
        what = f"another optimizer ({min(wanted ^ state)})" if state else "no optimizer"
        raise SettingsError(f"{reader.folder} has the state of {what}, not of Adam", do="leave out --with-optimizer")


def stacked(export: Export, reader: Reader, padding) -> dict[str, LaterTensor]:
    """Their tensors of the model and of the optimizer's state, layers in one."""
    layers = export.model.num_layers
    found: dict[str, LaterTensor] = {}
    parts: dict[str, dict[int, tuple[str, Placement]]] = {}
    for unit in export.facts.units(range(layers), True, True):
        for name, placed in add_prefix(unit.name, unit.weights).items():
            theirs = export.names.theirs(name, export.implementation)
            layer = _LAYER.fullmatch(theirs)
            key, number = (f"{layer[1]}.{layer[3]}", int(layer[2])) if layer else (theirs, -1)
            parts.setdefault(key, {})[number] = name, placed
    for key, own in parts.items():
        shapes = {_shape(export, name, placed) for name, placed in own.values()}
        if len(shapes) > 1 or (-1 not in own and sorted(own) != list(range(layers))):
            raise SettingsError(f"--with-optimizer exports GPTs whose layers are alike, and {key} differs in some")
        shape = shapes.pop()
        for kind in (None, *_KINDS):
            prefix = None if kind is None else PREFIX.get(kind, "")
            make = partial(_part, export, reader, padding, own, prefix)
            there = key if kind is None else f"optimizer.state.{kind}.{key}"
            dtype = export.dtype if kind is None else torch.float32
            boxes = tuple(Box((n, *(0,) * len(shape)), (1, *shape)) for n in range(layers)) if -1 not in own else ()
            found[there] = LaterTensor((layers, *shape) if boxes else shape, make, dtype, boxes)
    return found


def _part(export: Export, reader: Reader, padding, own: dict, prefix, box: Box) -> torch.Tensor:
    """A box of their tensor: a layer, or all of one that is outside of layers."""
    name, placed = own[-1] if -1 in own else own[box.offset[0]]
    return local_part(export, reader, padding, name, placed, 0, prefix).view(box.extent)


def _shape(export: Export, name: str, placed: Placement) -> tuple[int, ...]:
    shape = placed.local_shape({"tp": 1})
    return tuple(their_rows(name, export.names.rows(name), torch.empty(shape, device="meta")).shape)


def _no_fp8(export: Export, weights: dict[str, Any]) -> dict[str, Any]:
    """The state of fp8 of each layer's linear modules, which is none."""
    layers = export.model.num_layers
    names = extra_states(name for name in weights if name.startswith("decoder."))
    return {f"{name}/shard_{n}_{layers}": [None] for name in names for n in range(layers)}


def _common(config: schema.Config, reader: Reader, args: argparse.Namespace) -> dict[str, Any]:
    """The content of common.pt: what is no tensor."""
    settings, samples = config.optimizer, reader.state["state"]["scheduled_samples"]
    lengths = lengths_of(reader.state)
    if lengths is None or not lengths.decay:  # an import that was not trained on
        lengths = Lengths(0, max(1, samples), None, max(1, samples))
    for name in ("global_batch_size", "micro_batch_size"):
        setattr(args, name, getattr(config.batch, name))
    for name in ("lr", "min_lr", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps"):
        setattr(args, name, getattr(settings, name))
    args.seed = config.logging.seed
    wd = weight_decay(settings, lengths, samples)
    ends = [weight_decay(settings, lengths, place) for place in (0, lengths.total)]
    schedule = dict(
        max_lr=settings.lr,
        lr_warmup_steps=lengths.warmup,
        num_steps=samples,
        lr_decay_style=settings.lr_decay_style,
        lr_decay_steps=lengths.decay,
        min_lr=settings.min_lr,
        start_wd=ends[0],
        end_wd=ends[1],
        wd_incr_style=settings.weight_decay_incr_style,
        wd_incr_steps=lengths.total,
    )
    rate = learning_rate(settings, lengths, samples)
    groups = [_group(settings, rate, wd * mult, mult, reader.needed("optimizer_steps")) for mult in (1.0, 0.0)]
    scaler = reader.state["state"]["scaler"]
    optimizer: dict[str, Any] = dict(optimizer=dict(param_groups=groups), param_state_sharding_type=FORM)
    if args.fp16:
        scale = dict(scale=scaler["scale"], growth_tracker=scaler["good_steps"], hysteresis_tracker=2)
        optimizer["grad_scaler"] = scale
    return dict(
        args=args,
        checkpoint_version=3.0,
        iteration=args.iteration,
        opt_param_scheduler=schedule,
        optimizer=optimizer,
        content_metadata=dict(distrib_optim_sharding_type=FORM),
    )


def _group(settings: schema.Optimizer, rate: float, wd: float, mult: float, steps: int) -> dict[str, Any]:
    """The settings of parameters with weight decay (mult 1) or without (0), as Megatron-Core compares and loads them."""
    return dict(
        is_expert_parallel=False,
        default_config=True,
        wd_mult=mult,
        lr_mult=1.0,
        is_decoupled_lr=False,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr=rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=wd,
        bias_correction=True,
        step=steps,
    )
