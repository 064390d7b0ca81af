# SPDX-License-Identifier: Apache-2.0
"""Summaries of a checkpoint's content from its index and state. No tensor is read."""

from math import prod
from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.base_checkpoint import BASE
from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.parity import parity_problem
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.reshard import OPTIMIZER
from megatron.storage.durable import Damaged
from megatron.telemetry.progress import ProgressBar

FROZEN = "frozen"


def summary(reader: Reader) -> dict[str, Any]:
    """A summary of a checkpoint as a dict for JSON, which `inspect` prints and scripts can use."""
    state, kinds = reader.state, kinds_of(reader.state.get("untrained"))
    parameters = {name: prod(t.shape) for name, t in reader.tensors.items() if not name.startswith(OPTIMIZER)}
    parameters = {name: size for name, size in parameters.items() if kinds.get(name, FROZEN) == FROZEN}
    return dict(
        path=str(reader.folder),
        iteration=state.get("iteration"),
        consumed_samples=state.get("state", {}).get("consumed_samples"),
        parameters=sum(parameters.values()),
        frozen=sum(size for name, size in parameters.items() if name in kinds),
        buffers=sum(kind != FROZEN and name in reader.tensors for name, kind in kinds.items()),
        bytes=sum(size for size, _ in reader.index.files.values()),
        files={name: size for name, (size, _) in reader.index.files.items()},
        layout=state.get("mesh"),
        base=state.get(BASE),
        vocab_size=state.get("vocab_size"),
        written_by={name: state[name] for name in ("version", "commit", "libraries", "origin") if name in state}
        | code_of(state.get("code")),
        config=state.get("config", {}),
        tensors={
            name: dict(
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=list(tensor.shape),
                boxes=len(tensor.stored),
                **({"kind": kinds[name]} if name in kinds else {}),
            )
            for name, tensor in reader.tensors.items()
        },
    )


def kinds_of(untrained: object) -> dict[str, str]:
    """Name -> kind of the tensors that are not trained parameters, from a checkpoint's state."""
    saved = untrained if isinstance(untrained, dict) else {}
    frozen, buffers = saved.get("frozen"), saved.get("buffers")
    kinds = dict.fromkeys(map(str, frozen), FROZEN) if isinstance(frozen, list) else {}
    return kinds | {name: f"buffer, {rule}" for name, rule in (buffers.items() if isinstance(buffers, dict) else ())}


def code_of(code: object) -> dict[str, Any]:
    """The record of the run's own code in a checkpoint: checksums of files and of uncommitted changes."""
    if not isinstance(code, dict):
        return {}
    return {name: code[key] for name, key in (("code", "files"), ("uncommitted changes", "diff")) if code.get(key)}


def describe(reader: Reader, changed: Optional[dict[str, Any]] = None) -> str:
    """The summary as text. changed: the settings to show, group -> {name: value} (default: all that are saved)."""
    info = summary(reader)
    moments = sorted({name.split(".", 2)[1] for name in info["tensors"] if name.startswith(OPTIMIZER)})
    layout = info["layout"] or {}
    frozen = f", {info['frozen']:,} of them frozen" if info["frozen"] else ""
    buffers = f", {info['buffers']} buffers" if info["buffers"] else ""
    lines = [
        info["path"],
        f"  iteration {info['iteration']}, consumed samples {info['consumed_samples']}",
        f"  {info['parameters']:,} parameters{frozen}{buffers}, optimizer state: {', '.join(moments) or 'none'}",
        f"  {info['bytes']:,} bytes in {len(info['files'])} files",
        *([f"  trained on {info['base']['path']} (fingerprint {info['base']['fingerprint']})"] if info["base"] else []),
        "  saved by " + (" x ".join(f"{axis} {size}" for axis, size in layout.items()) or "an unknown layout"),
    ]
    for name, value in info["written_by"].items():
        text = ", ".join(f"{key} {version}" for key, version in value.items()) if isinstance(value, dict) else value
        lines.append(f"  {name}: {text}")
    lines.append("settings:")
    for group, values in (info["config"] if changed is None else changed).items():
        if isinstance(values, dict) and values:
            lines.append(f"  {group}: " + ", ".join(f"{name} {value}" for name, value in values.items()))
    lines.append("tensors (dtype, shape, boxes):")
    width = max(map(len, info["tensors"]), default=0)
    for name, tensor in info["tensors"].items():
        kind = f"  {tensor['kind']}" if "kind" in tensor else ""
        lines.append(f"  {name:<{width}}  {tensor['dtype']:<8} {tensor['shape']} {tensor['boxes']}{kind}")
    return "\n".join(lines)


def overview(folder: Path) -> list[str]:
    """A line for each checkpoint of a folder: iteration, size or damage, and a mark at the tracker's."""
    lines, named = [], read_tracker(folder)
    for iteration, path in checkpoints(folder).items():
        try:
            with Reader(path) as reader:
                reader.check_files()
                what = f"{sum(size for size, _ in reader.index.files.values()):,} bytes"
        except Damaged as problem:
            what = f"DAMAGED: {problem}"
        lines.append(f"{path.name}: {what}{'  <- ' + TRACKER if iteration == named else ''}")
    return lines


def foreign_files(folder: Path, reader: Optional[Reader]) -> list[str]:
    """Files in a checkpoint's directory that do not belong to it, one sentence each."""
    known = reader.index.names if reader else {"index.json", "state.json"}
    return [f"{path} does not belong to the checkpoint" for path in sorted(folder.iterdir()) if path.name not in known]


def verify(folder: Path) -> tuple[int, list[str]]:
    """Read every byte of a checkpoint directory. Returns (bytes, problems): damaged, missing and foreign files."""
    try:
        with Reader(folder) as reader:
            size = sum(size for size, _ in reader.index.files.values())
            with ProgressBar("reading", size) as done:
                parity = [parity_problem(folder, *item) for item in reader.index.parity.items()]
                return size, reader.verify(done=done) + [*filter(None, parity)] + foreign_files(folder, reader)
    except Damaged as problem:
        return 0, [str(problem)]
