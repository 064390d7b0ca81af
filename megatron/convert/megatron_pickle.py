# SPDX-License-Identifier: Apache-2.0
"""Read one of Megatron-LM's pickles in a separate process.

These are the only pickles that this suite opens, with torch's weights-only reader, which builds tensors and plain
containers. Classes of Megatron-LM and numpy are replaced by empty shells; a file with any other class is refused. The
process writes tensors.safetensors and facts.json, and ends, so that a malicious file can affect only this process.

    tensors.safetensors   CHUNK/NAME of the model's weights; KIND/NUMBER of the optimizer's state ("optimizer" below), or
                          BUFFER/KIND of a distributed optimizer's file
    facts.json            args, iteration, version, chunks, keys (of the weights, in the order of the module), schedule,
                          scale (of the loss), updates (different counts of the optimizer's updates), groups (numbers of
                          the optimizer's parameters), groups_of_experts
"""

import argparse
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron.errors import CheckpointError

_SHELLS = ("megatron.", "apex.", "transformer_engine.", "numpy.", "_codecs.encode", "signal.Signals")
_DEPTH = 8  # of nested dictionaries
EXPERTS = "experts/"  # before BUFFER/KIND of the optimizer that experts have by themselves


class Shell:
    """A placeholder for an object whose code is not run and whose content is not needed."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass


def extract(source: Path, folder: Path, optimizer: bool = False) -> None:
    """Extract `source` into `folder` in a child process. Raises CheckpointError with the reason if it is refused.

    optimizer: also the optimizer's state
    """

    def in_child() -> None:
        content = load(source)
        _write(content[0] if isinstance(content, list) and len(content) == 1 else content, folder, optimizer)

    refused_in_child(source, folder, in_child)


def extract_buffers(source: Path, folder: Path) -> None:
    """Extract the buffers of a `distrib_optim.pt`, as `extract` does: BUFFER/KIND -> flat tensor."""
    refused_in_child(source, folder, lambda: _write_buffers(load(source), folder))


def refused_in_child(source: Path, folder: Path, read: Callable[[], None]) -> None:
    """Call `read`, which opens `source`, in a child process; its error or crash becomes a CheckpointError.

    The child is forked, which saves seconds of start-up, and uses one thread, since a thread pool does not survive a fork.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            torch.set_num_threads(1)
            read()
            code = 0
        except BaseException as error:  # after any error, the file is not a valid checkpoint
            (folder / "refused").write_text(" ".join(str(error).split())[:500] or type(error).__name__)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        raise CheckpointError(f"{source} was refused: reading it ended with {signal.Signals(-status).name}")
    if status != 0:
        raise CheckpointError(f"{source} was refused: {(folder / 'refused').read_text()}")


def load(source: Path) -> Any:
    """The content of a pickle, limited to tensors, containers, numbers and strings."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    bad = [name for name in unknown if name != "argparse.Namespace" and not name.startswith(_SHELLS)]
    if bad:
        raise ValueError(f"it asks for {', '.join(sorted(bad)[:5])}, which no checkpoint needs")
    allowed = [argparse.Namespace, *((Shell, name) for name in unknown if name != "argparse.Namespace")]
    with torch.serialization.safe_globals(allowed):
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, (dict, list)):
        raise ValueError("it holds no dictionary")
    return content


def _write(content: dict[str, Any], folder: Path, optimizer: bool) -> None:
    tensors, keys = {}, []
    chunks = [key for key in content if key == "model" or (str(key).startswith("model") and str(key)[5:].isdigit())]
    for number, key in enumerate(sorted(chunks, key=lambda key: int(key[5:] or 0))):
        for name, tensor in _flat(content[key], "", _DEPTH):
            tensors[f"{number}/{name}"] = tensor.detach().clone().contiguous()
            keys.append(f"{number}/{name}")
    facts = facts_of(content) | dict(chunks=len(chunks), keys=keys, groups=[])
    if optimizer:
        state = _numbered_state(content.get("optimizer"), facts)
        tensors |= state
    save_file(tensors, folder / "tensors.safetensors")
    (folder / "facts.json").write_text(json.dumps(facts))


def facts_of(content: dict[str, Any]) -> dict[str, Any]:
    """The numbers and strings of a checkpoint that describe its run."""
    args = content.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    kept = lambda value: _plain(value) or (isinstance(value, (list, tuple)) and all(map(_plain, value)))
    facts: dict[str, Any] = dict(iteration=content.get("iteration"), version=content.get("checkpoint_version"))
    facts = {key: value if _plain(value) else None for key, value in facts.items()}
    facts["args"] = {str(name): value for name, value in args.items() if kept(value)}
    facts["schedule"] = _numbers(content.get("opt_param_scheduler") or content.get("lr_scheduler"))
    facts["scale"] = _numbers(next(_values(content.get("optimizer"), {"grad_scaler"}), None))
    steps = {_number(step) for step in _values(content.get("optimizer"), {"step", "common_step"})}
    return facts | dict(updates=sorted(steps - {None}))


def _write_buffers(content: Any, folder: Path) -> None:
    tensors = {}
    # Of dense weights, and of experts if ep is above 1
    optimizers = content if isinstance(content, list) else [content]
    if len(optimizers) > 2:
        raise ValueError(f"it holds the state of {len(optimizers)} optimizers")
    for prefix, own in zip(("", EXPERTS), optimizers):
        for number, formats in own.items() if own else ():  # None: another rank has it
            if not isinstance(number, int):
                continue
            if len(formats) != 1:
                raise ValueError("it holds parameters of several number formats, or none")
            for kind, values in next(iter(formats.values())).items():
                parts = values if isinstance(values, list) else [values]  # before February 2024, a list of buckets
                if all(isinstance(part, torch.Tensor) for part in parts):
                    tensors[f"{prefix}{number}/{kind}"] = torch.cat([part.detach().flatten() for part in parts])
    save_file(tensors, folder / "tensors.safetensors")
    facts = dict(coalesced=any(own.get("buckets_coalesced") for own in optimizers if own), apart=len(optimizers) > 1)
    (folder / "facts.json").write_text(json.dumps(facts))


def _numbered_state(optimizer: Any, facts: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state of an optimizer, KIND/NUMBER -> tensor, or of two, of which experts have the second one: then with
    `EXPERTS` in front. Adds the numbers in their groups to the facts.
    """
    both = [*optimizer, None][:2] if isinstance(optimizer, list) else [optimizer, None]
    (facts["groups"], state), (facts["groups_of_experts"], of_experts) = map(_numbered, both)
    return state | {f"{EXPERTS}{name}": tensor for name, tensor in of_experts.items()}


def _numbered(optimizer: Any) -> tuple[list[list[int]], dict[str, torch.Tensor]]:
    """(numbers of the parameters of each group, KIND/NUMBER -> tensor) of an optimizer's state; both empty without one."""
    inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else {}
    if not inner.get("state"):
        return [], {}
    groups = [list(group["params"]) for group in inner["param_groups"]]
    tensors = {}
    for number, kinds in inner["state"].items():
        for kind, tensor in kinds.items() if isinstance(kinds, dict) else ():
            if isinstance(tensor, torch.Tensor) and kind != "step":
                tensors[f"{kind}/{number}"] = tensor.detach().clone().contiguous()
    mains = optimizer.get("fp32_from_fp16_params") or optimizer.get("fp32_from_fp16") or [[] for _ in groups]
    for group, own in zip(groups, mains):
        for number, tensor in zip(group, own):
            tensors[f"param/{number}"] = tensor.detach().clone().contiguous()
    return groups, tensors


def _values(content: Any, names: set[str]) -> Iterator[Any]:
    """The values of all keys of these names in nested containers."""
    for key, value in content.items() if isinstance(content, dict) else ():
        if key in names:
            yield value
        else:
            yield from _values(value, names)
    for value in content if isinstance(content, (list, tuple)) else ():
        yield from _values(value, names)


def _numbers(content: Any) -> dict[str, Any]:
    items = content.items() if isinstance(content, dict) else ()
    return {str(name): number for name, value in items if (number := _number(value)) is not None}


def _number(value: Any) -> Any:
    """An int or float, also out of a tensor of one element; None for anything else."""
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool, type(None)))


def _flat(content: Any, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of all tensors in nested dictionaries."""
    for key, value in content.items() if isinstance(content, dict) and depth else ():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _flat(value, name, depth - 1)
