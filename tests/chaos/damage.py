# SPDX-License-Identifier: Apache-2.0
"""Damaged files: is any of them used as if nothing had happened?

Each file of a checkpoint, of token files and of an index cache is damaged in every way that disks, networks and people
know, one damage at a time, and then loaded as training loads it. *Silently used* is what comes out different from the truth
without an error and without a word.
"""

import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Optional
from unittest import mock

import numpy as np

from megatron.checkpoint import survey
from megatron.checkpoint.folder import TRACKER, restore
from megatron.data import manifest, verify
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import IndexedDataset
from megatron.errors import Failure
from megatron.settings.schema import Data
from tests.chaos.case import Case, Got
from tests.chaos.samples import pieces_of, token_files, write_checkpoint

NONE = "silently used: 0, surprises: 0"
PAGE = 4096
SIZE = 4000  # elements of the checkpoint's tensors: shards of several pages

Edits = dict[str, Optional[bytes]]  # name -> new content, None for a file that is gone


class Subject:
    """Files that belong together, and somebody who loads them.

    files:    name -> content as it should be, for the files that get damaged
    siblings: name -> other files of the same kind: of another rank, another iteration, another dataset
    older:    name -> what it was at an earlier time
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, bytes] = {}
        self.siblings: dict[str, list[str]] = {}
        self.older: dict[str, bytes] = {}

    def remember(self, names: list[str]) -> dict[str, bytes]:
        """The content of files."""
        return {name: (self.folder / name).read_bytes() for name in names}

    def use(self, name: str) -> Optional[str]:
        """Load with the file `name` damaged: what was used silently, None if nothing. Failures of the suite may rise."""
        raise NotImplementedError

    def apply(self, edits: Edits) -> None:
        """Make the damage, or undo it."""
        for name, content in edits.items():
            path = self.folder / name
            if content is None:
                path.unlink(missing_ok=True)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


FLIPS, OTHERS, PARTS = 12, 4, 10  # damages of one part: single bits, each other random kind; parts of a file's cases


def damages(subject: Subject, name: str, seed: int, part: int) -> Iterator[tuple[str, Edits]]:
    """(kind, edits): random ones, others in each part, and in part 0 those of which there is one."""
    raw, dice = subject.files[name], random.Random(seed * PARTS + part)
    for _ in range(FLIPS):
        at = dice.randrange(len(raw))
        yield "flipped bit", {name: raw[:at] + bytes([raw[at] ^ 1 << dice.randrange(8)]) + raw[at + 1 :]}
    for _ in range(OTHERS):
        at, size = dice.randrange(len(raw)), dice.choice([1, 8, 64, 512, PAGE])
        page = at // PAGE * PAGE
        yield "zeroed page", {name: raw[:page] + bytes(len(raw[page : page + PAGE])) + raw[page + PAGE :]}
        yield "cut", {name: raw[:at]}
        yield "grown", {name: raw + dice.choice([bytes(size), dice.randbytes(size), raw[:size]])}
        yield "overwritten", {name: (raw[:at] + dice.randbytes(size) + raw[at + size :])[: len(raw)]}
        yield "lost piece", {name: raw[:at] + raw[at + size :]}
    if part == 0:
        yield "empty", {name: b""}
        yield "deleted", {name: None}
        if name in subject.older:
            yield "stale", {name: subject.older[name]}
        for sibling in subject.siblings.get(name, ()):
            yield f"copied from {sibling}", {name: subject.files[sibling]}
            yield f"swapped with {sibling}", {name: subject.files[sibling], sibling: raw}


def damage(make: Callable[[Path], Subject], file: str, part: int, folder: Path, seed: int) -> Got:
    """Damage one file in many ways, and count what is used silently. `file`: the end of its name."""
    with mock.patch.object(os, "fsync", lambda handle: None):  # no power fails here
        return _damage(make(folder), file, part, seed)


def _damage(subject: Subject, file: str, part: int, seed: int) -> Got:
    name = next(name for name in subject.files if name.endswith(file))
    silent, surprises, count = [], [], 0
    for kind, edits in damages(subject, name, seed, part):
        if all(subject.files[each] == content for each, content in edits.items()):
            continue
        subject.apply(edits)
        try:
            used = subject.use(name)
        except Failure:
            used = None
        except Exception as error:
            used = None
            surprises.append(f"{name}, {kind}: {type(error).__name__}: {error}")
        if used:
            silent.append(f"{name}, {kind}: {used}")
        count += 1
        subject.apply({each: subject.files[each] for each in edits})
    text = f"silently used: {len(silent)}, surprises: {len(surprises)}"
    return Got("; ".join([text, *silent[:3], *surprises[:3]]), faults=count)


# ---- checkpoints -----------------------------------------------------------------------------------------------------

SHARD = "shard_0000{}.safetensors"


class Checkpoint(Subject):
    """Iterations 1 and 2, each of two files; 2 was saved twice. Damaged is 2."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        names = ["index.json", "state.json", SHARD.format(0), SHARD.format(1)]
        for iteration, value in ((1, 1), (2, 21), (2, 2)):
            path = write_checkpoint(folder, iteration, value, shards=2, size=SIZE)
            if value == 21:
                self.older = self.remember([f"{path.name}/{name}" for name in names])
        self.files = self.remember([TRACKER, *(f"iter_000000{i}/{name}" for i in (2, 1) for name in names)])
        for name in names:
            self.siblings[f"iter_0000002/{name}"] = [f"iter_0000001/{name}"]
        self.siblings[f"iter_0000002/{names[2]}"].append(f"iter_0000002/{names[3]}")
        self.siblings[f"iter_0000002/{names[0]}"].append(f"iter_0000002/{names[1]}")
        self.older[TRACKER] = b"1"

    def use(self, name: str) -> Optional[str]:
        """As a run that resumes, as one that wants iteration 2, and as `tools.checkpoint verify`."""
        problem = self.resume(None) or (None if name == TRACKER else self.found_good())
        return problem or self.resume(2)

    def found_good(self) -> Optional[str]:
        _, problems = survey.verify(self.folder / "iter_0000002")
        return None if problems else "verify finds nothing"

    def resume(self, step: Optional[int]) -> Optional[str]:
        """Values other than the iteration's, or an older iteration without a word."""
        wanted = pieces_of(-1, SIZE)
        found = restore(self.folder, wanted, step=step)
        iteration = found.state["iteration"]
        values = {float(value) for piece in wanted for value in np.unique(piece.tensor.numpy())}
        if values != {float(iteration)} or found.state["value"] != iteration:
            return f"iteration {iteration} has the values {sorted(values)[:3]}"
        told = iteration == 2 or found.notices or found.damaged
        return None if told else f"iteration {iteration} is taken without a word"


# ---- token files -----------------------------------------------------------------------------------------------------


class Tokens(Subject):
    """Two datasets of the same size; damaged is the first, which was preprocessed twice."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.prefix = str(folder / "a")
        names = [f"a{suffix}" for suffix in (".bin", ".idx", ".sums.json")]
        token_files(folder / "a", seed=3)
        self.older = self.remember(names)
        token_files(folder / "a", seed=1)
        token_files(folder / "b", seed=2)
        self.files = self.remember([*names, *(name.replace("a", "b", 1) for name in names)])
        self.siblings = {name: [name.replace("a", "b", 1)] for name in names}
        self.truth = self.content()

    def content(self) -> list[bytes]:
        """Everything that a reader can be told."""
        data = IndexedDataset(self.prefix)
        tokens = np.concatenate([data.get(i) for i in range(len(data))])
        return [array.tobytes() for array in (tokens, data.sequence_lengths, data.document_indices)]

    def use(self, name: str) -> Optional[str]:
        """As training with --verify-data does, and as `tools.verify_data`."""
        problems, told = manifest.verify(self.prefix), verify.examine(self.prefix, False)[0]
        if bool(problems) > bool(told):
            return "tools.verify_data finds nothing"
        return "other tokens, found good" if not problems and self.content() != self.truth else None

    def samples(self) -> list[bytes]:
        """Samples of it, as training has them."""
        said: list[str] = []
        data = Data(data_path=[self.prefix], split="8,2,0", data_cache_path=str(self.folder / "cache"))
        train, valid, _ = build_datasets(data, 16, (300, 30, 0), 7, vocab_size=99, log=said.append)
        self.said = said
        return [split[i].tobytes() for split in (train, valid) for i in range(0, len(split), 7)]


# ---- index caches ----------------------------------------------------------------------------------------------------


class IndexCache(Tokens):
    """The index maps of training and validation data. Damaged are those of training."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.truth = self.samples()
        names = sorted(str(path.relative_to(folder)) for path in folder.glob("cache/*/*"))
        train = [name for name in names if "-train-" in name]
        self.files = self.remember(train + [name for name in names if name not in train])
        for name in train:
            file = name.rpartition("/")[2]
            self.siblings[name] = [other for other in names if other not in train and other.endswith(file)]
        self.siblings[train[0]].append(train[2])
        self.siblings[train[2]].append(train[3])

    def use(self, name: str) -> Optional[str]:
        """As training does: a damaged cache is built again, and said."""
        missing = not (self.folder / name).exists()
        if self.samples() != self.truth:
            return "other samples"
        return "built again without a word" if missing and not self.said else None


# ---- the cases -------------------------------------------------------------------------------------------------------

FILES: dict[str, tuple[Callable[[Path], Subject], tuple[str, ...]]] = {
    "checkpoint": (
        Checkpoint,
        (TRACKER, *("iter_0000002/" + name for name in ("index.json", "state.json", SHARD.format(0), SHARD.format(1)))),
    ),
    "token files": (Tokens, ("a.bin", "a.idx", "a.sums.json")),
    "index cache": (IndexCache, ("/index.json", "/document.npy", "/sample.npy", "/shuffle.npy")),
}


def cases() -> list[Case]:
    """Some cases for each file, of which the first is short."""
    return [
        Case(
            f"damage/{what.replace(' ', '-')}/{file.rpartition('/')[2]}/{part}",
            f"damaged files: {what}",
            NONE,
            partial(damage, make, file, part),
            short=part == 0,
        )
        for what, (make, names) in FILES.items()
        for file in names
        for part in range(PARTS)
    ]
