# SPDX-License-Identifier: Apache-2.0
"""Pickles that run a program when they are opened, put in place of every file that the suite reads.

Each payload makes a file, by another way into the interpreter. Executed is what has made it. The loaders are those that
commands and training use; they end in an error of the suite, or pass over the file.
"""

import builtins
import io
import json
import operator
import os
import pickle
import runpy
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron.checkpoint.folder import TRACKER
from megatron.convert import huggingface, megatron_lm
from megatron.convert.imported import write_import
from megatron.data.json_input import find_sources, read_blocks
from megatron.data.vocabulary import identity_of
from megatron.settings.parse import parse
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import build_tokenizer
from tests.chaos.case import Case, Got, surprise_of
from tests.chaos.damage import Checkpoint, IndexCache, Subject, Tokens

NONE = "executed: 0, surprises: 0"


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def _by_name(module: str, name: str, argument: str) -> bytes:
    """A call of a function that is named by words, with dots in them, and not looked up here."""
    words = [b"X" + len(word).to_bytes(4, "little") + word.encode() for word in (module, name, argument)]
    return b"\x80\x04" + words[0] + words[1] + b"\x93(" + words[2] + b"tR."


def _array(content, save: Callable) -> bytes:
    array, file = np.empty(1, object), io.BytesIO()
    array[0] = content
    save(file, array)
    return file.getvalue()


def _torch_file(content, **options) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def payloads(marker: Path) -> dict[str, bytes]:
    """Name -> file content; each makes `marker` when a careless reader opens it."""
    touch, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    system = Calls(os.system, touch)
    checkpoint = dict(args=system, model=dict(word=torch.ones(2)), iteration=1)
    return {
        "os.system": pickle.dumps(system),
        "subprocess": pickle.dumps(Calls(subprocess.call, ["touch", str(marker)])),
        "exec": pickle.dumps(Calls(builtins.exec, code)),
        "eval": pickle.dumps(Calls(builtins.eval, code), protocol=2),
        "open": pickle.dumps(Calls(builtins.open, str(marker), "w")),
        "methodcaller": pickle.dumps(dict(a=Calls(operator.methodcaller("touch"), marker))),
        "runpy": pickle.dumps(Calls(runpy._run_code, code, {})),
        "GLOBAL": b"cposix\nsystem\n(S'" + touch.encode() + b"'\ntR.",
        "INST": b"(S'" + touch.encode() + b"'\niposix\nsystem\n.",
        "OBJ": b"(cposix\nsystem\nS'" + touch.encode() + b"'\no.",
        "through a module of ours": _by_name("megatron.storage.durable", "os.system", touch),
        "torch, zip": _torch_file(checkpoint),
        "torch, old format": _torch_file(checkpoint, _use_new_zipfile_serialization=False),
        "numpy array of objects": _array(system, np.save),
        "numpy archive of objects": _array(system, np.savez),
    }


class Place(NamedTuple):
    """A file that the suite reads, and how."""

    path: Path
    load: Callable[[], object]


def of_subject(make: Callable[[Path], Subject], folder: Path) -> list[Place]:
    """The files of a checkpoint, of token files, of index caches, as in `damage.py`."""
    subject = make(folder)
    return [Place(folder / name, partial(subject.use, name)) for name in subject.files]


def megatron_format_problem(folder: Path) -> list[Place]:
    """Megatron-LM's classic checkpoints."""
    theirs = folder / "theirs" / "iter_0000300" / "mp_rank_00" / "model_optim_rng.pt"
    theirs.parent.mkdir(parents=True)
    tracker = folder / "theirs" / TRACKER
    tracker.write_text("300")
    opened = partial(megatron_lm.open_classic, folder / "theirs", None, None, None, True, lambda text: None)
    convert = partial(write_import, opened, folder / "out", {})
    return [Place(theirs, convert), Place(tracker, convert)]


def of_hugging_face(folder: Path) -> list[Place]:
    """Folders of Hugging Face models."""
    settings = dict(model_type="gpt2", n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=10)
    found = []
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        source = folder / name.replace(".", "-")
        source.mkdir()
        (source / "config.json").write_text(json.dumps(settings))
        found.append(Place(source / name, partial(huggingface.from_hf, source, folder / "out", {}, check=False)))
    return found


def of_text(folder: Path) -> list[Place]:
    """Vocabularies, settings, text to preprocess, and what lies beside token files."""
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "vocab.json").write_text("{}")
    tokenizers = {
        "other.json": TokenizerSettings("GPT2BPETokenizer", str(folder / "other.json"), str(folder / "merges.txt")),
        "other.txt": TokenizerSettings("GPT2BPETokenizer", str(folder / "vocab.json"), str(folder / "other.txt")),
        "tokenizer.json": TokenizerSettings("HuggingFaceTokenizer", tokenizer_model=str(folder / "tokenizer.json")),
        "ranks.tiktoken": TokenizerSettings("TikTokenizer", tokenizer_model=str(folder / "ranks.tiktoken")),
        "pieces.model": TokenizerSettings("SentencePieceTokenizer", tokenizer_model=str(folder / "pieces.model")),
    }
    found = [Place(folder / name, partial(build_tokenizer, settings)) for name, settings in tokenizers.items()]
    found.append(Place(folder / "run.yaml", lambda: parse(["--config", str(folder / "run.yaml")])))
    for name in ("text.jsonl", "text.jsonl.gz"):
        found.append(
            Place(folder / name, lambda name=name: list(read_blocks(find_sources([str(folder / name)])[0], 999)))
        )
    return [*found, Place(folder / "a.stats.json", lambda: identity_of(str(folder / "a")))]


def try_all(places: Callable[[Path], list[Place]], folder: Path, seed: int) -> Got:
    """Put every payload in every place, load, and look whether it ran."""
    marker, executed, surprises, count = folder / "executed", [], [], 0
    for path, load in places(folder):
        whole = path.read_bytes() if path.exists() else None
        for name, payload in payloads(marker).items():
            path.write_bytes(payload)
            if surprise := surprise_of(load):
                surprises.append(f"{path.name}, {name}: {surprise}")
            count += 1
            if marker.exists():
                executed.append(f"{path.name}, {name}")
                marker.unlink()
        if whole is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(whole)
    text = f"executed: {len(executed)}, surprises: {len(surprises)}"
    return Got("; ".join([text, *executed[:3], *surprises[:3]]), faults=count)


PLACES: dict[str, Callable[[Path], list[Place]]] = {
    "checkpoint": partial(of_subject, Checkpoint),
    "token-files": partial(of_subject, Tokens),
    "index-cache": partial(of_subject, IndexCache),
    "from-megatron": megatron_format_problem,
    "from-hf": of_hugging_face,
    "vocabulary-settings-text": of_text,
}


def cases() -> list[Case]:
    """A case for each kind of loader."""
    group = "malicious pickles against every loader"
    return [
        Case(f"pickles/{name}", group, NONE, partial(try_all, places), short=True) for name, places in PLACES.items()
    ]
