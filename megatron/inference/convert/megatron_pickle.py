# SPDX-License-Identifier: Apache-2.0
"""Read one of Megatron-LM's pickles in a separate process.

These are the only pickles that this suite opens, with torch's weights-only reader, which builds tensors and plain
containers. Classes of Megatron-LM and numpy are replaced by empty shells; a file with any other class is refused. The
process writes tensors.safetensors and facts.json, and ends, so that a malicious file can affect only this process.
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


class Shell:
    """A placeholder for an object whose code is not run and whose content is not needed."""

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, _):
        pass


def extract(source: Path, folder: Path) -> None:
    """Extract `source` into `folder` in a child process. Raises CheckpointError with the reason if it is refused."""
    refused_in_child(source, folder, lambda: _write(_load(source), folder))


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


def _load(source: Path) -> dict[str, Any]:
    """The content of a pickle, limited to tensors, containers, numbers and strings."""
    unknown = torch.serialization.get_unsafe_globals_in_checkpoint(source)
    bad = [name for name in unknown if name != "argparse.Namespace" and not name.startswith(_SHELLS)]
    if bad:
        raise ValueError(f"it asks for {', '.join(sorted(bad)[:5])}, which no checkpoint needs")
    allowed = [argparse.Namespace, *((Shell, name) for name in unknown if name != "argparse.Namespace")]
    with torch.serialization.safe_globals(allowed):
        content = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict):
        raise ValueError("it holds no dictionary")
    return content


def _write(content: dict[str, Any], folder: Path) -> None:
    tensors = {}
    chunks = [key for key in content if key == "model" or (str(key).startswith("model") and str(key)[5:].isdigit())]
    for number, key in enumerate(sorted(chunks, key=lambda key: int(key[5:] or 0))):
        for name, tensor in _flat(content[key], "", _DEPTH):
            tensors[f"{number}/{name}"] = tensor.detach().clone().contiguous()
    save_file(tensors, folder / "tensors.safetensors")
    args = content.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args if isinstance(args, dict) else {}
    simple = (int, float, str, bool, type(None))
    facts = dict(iteration=content.get("iteration"), version=content.get("checkpoint_version"))
    facts = {key: value if isinstance(value, simple) else None for key, value in facts.items()}
    plain = lambda value: isinstance(value, simple)
    kept = lambda value: plain(value) or (isinstance(value, (list, tuple)) and all(map(plain, value)))
    facts["args"] = {str(name): value for name, value in args.items() if kept(value)}
    (folder / "facts.json").write_text(json.dumps(facts | dict(chunks=len(chunks))))


def _flat(content: Any, prefix: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of all tensors in nested dictionaries."""
    for key, value in content.items() if isinstance(content, dict) and depth else ():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, torch.Tensor):
            yield name, value
        else:
            yield from _flat(value, name, depth - 1)
