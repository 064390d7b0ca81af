# SPDX-License-Identifier: Apache-2.0
"""Headers and index files that lie: random mutations, checksums made right again, against everything that parses them.

What comes out is an error of the suite or a harmless answer: no other exception, no crash, no memory for sizes that nobody
has, no file opened outside of the folder. Mutations know the formats: they set lengths to 2^63, move offsets, exchange
values, point upwards, nest a thousand lists; and flip bytes.
"""

import contextlib
import copy
import json
import random
import re
import resource
import struct
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.checkpoint import survey
from megatron.checkpoint.folder import TRACKER, restore
from megatron.checkpoint.reader import Reader
from megatron.convert import huggingface
from megatron.data import manifest, verify
from megatron.data.indexed import IndexedDataset
from megatron.data.merge import common_identity
from megatron.errors import Failure
from megatron.guard import changes
from megatron.optimizer import resumed_schedule
from megatron.optimizer.scaler import LossScaler
from megatron.settings import schema
from megatron.storage.durable import checksum, read_sealed, seal
from megatron.training.state import State
from tests.chaos.case import Case, Got, surprise_of
from tests.chaos.damage import SHARD, Checkpoint, IndexCache, Tokens
from tests.chaos.samples import pieces_of

NONE = "surprises: 0"
MEMORY = 64 << 20  # bytes that the process may grow by
ROOM = 2 << 30  # bytes of addresses that it may take

NUMBERS = (
    -1,
    0,
    1,
    2,
    7,
    1 << 31,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    1 << 70,
    10**30,
    -(1 << 63),
    0.5,
    float("inf"),
    float("nan"),
    True,
)
WORDS = (
    "",
    "..",
    "../outside/shard_00000.safetensors",
    "/etc/passwd",
    "shard_00000.safetensors/../../outside/x",
    "a\0b",
    "shard_00001.safetensors",
    "shard_99999.safetensors",
    "x" * 10_000,
    "F64",
    "U8",
    "OBJECT",
    "|O",
    "<f8",
    "\ud800",
    "weight",
    "__metadata__",
    "(1,",
    "i4,i4",
)
OTHERS = (None, [], {}, [[]], [1 << 63] * 3, {"": {}}, [0] * 1000)


def mutate(content: Any, dice: random.Random) -> Any:
    """JSON-like content with one word or one to three places changed; the original is left alone."""
    content = json.loads(json.dumps(content))
    if dice.random() < 0.15:
        return _renamed(content, dice)
    for _ in range(dice.randint(1, 3)):
        places = list(_places(content))
        if not places:
            return copy.deepcopy(dice.choice(OTHERS))
        holder, key = dice.choice(places)
        kind = dice.randrange(8)
        if kind < 4:
            holder[key] = copy.deepcopy(dice.choice(dice.choice((NUMBERS, NUMBERS, WORDS, OTHERS))))
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            other, name = dice.choice(places)
            holder[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(holder[key])
        elif kind == 6 and isinstance(holder, dict):
            holder[dice.choice(WORDS)] = holder.pop(key)
        elif isinstance(holder, list):
            holder.insert(key, holder[key])
        elif isinstance(holder[key], int):
            holder[key] += dice.choice((-1, 1, 4, -64, 1 << 20))
    return content


def _renamed(content: Any, dice: random.Random) -> Any:
    """A word changed wherever it stands, so that what belongs together still does."""
    text = json.dumps(content)
    words = sorted(set(re.findall(r'"(?:[^"\\]|\\.)*"', text)))
    return json.loads(text.replace(dice.choice(words), json.dumps(dice.choice(WORDS[1:6])))) if words else content


def _places(content: Any, depth: int = 12):
    for key in list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ():
        yield content, key
        if depth:
            yield from _places(content[key], depth - 1)


def mutate_bytes(raw: bytes, dice: random.Random, end: int = 1 << 30) -> bytes:
    """Some bytes before `end` changed: flipped, or replaced by a number that means something."""
    raw = bytearray(raw)
    for _ in range(dice.randint(1, 3)):
        at, kind = dice.randrange(max(1, min(len(raw), end))), dice.randrange(6)
        if kind == 0 and raw:
            raw[at] ^= 1 << dice.randrange(8)
        elif kind < 4:
            at -= at % dice.choice((1, 4, 8))
            number = int(dice.choice(NUMBERS[:16])) % (1 << 64)
            size = dice.choice((4, 8))
            raw[at : at + size] = (number % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 4:
            del raw[at : at + dice.choice((1, 8, 100))]
        else:
            raw[at:at] = dice.choice((b"[" * 5000, b"\0" * 8, b'"', b"{", dice.randbytes(9), b"9" * 5000))
    return bytes(raw)


# ---- what is forged, and who reads it --------------------------------------------------------------------------------

Forge = Callable[[random.Random], None]
Read = Callable[[], object]


def reseal(path: Path, content: dict) -> str:
    """Write sealed JSON; returns its checksum."""
    mark, raw = seal(content)
    path.write_bytes(raw)
    return mark


def checkpoint_files(folder: Path) -> tuple[Path, dict, Read]:
    """(directory of a checkpoint, its index, everything that reads it)"""
    subject = Checkpoint(folder)
    path = folder / "iter_0000002"

    def read() -> None:
        wanted = pieces_of(-1, 4000)
        for step in (None, 2):
            with contextlib.suppress(Failure):
                restore(folder, wanted, step=step)
        survey.verify(path)
        survey.overview(folder)
        with Reader(path) as reader:
            survey.describe(reader)
            for name, tensor in reader.tensors.items():
                if sum(tensor.shape) < 1 << 20:  # the reader allocates what its caller asks for
                    reader.read(name)

    assert subject.files
    return path, read_sealed(path / "index.json")[1], read


def shard_header(folder: Path) -> tuple[Forge, Read]:
    """The header of a safetensors file, with the index's checksum of it made right."""
    path, index, read = checkpoint_files(folder)
    shard = path / SHARD.format(0)
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def forge(dice: random.Random) -> None:
        if dice.random() < 0.7:
            text = json.dumps(mutate(header, dice)).encode()
            text = len(text).to_bytes(8, "little") + text
        else:
            text = mutate_bytes(raw[: 8 + length], dice)
        size = min(int.from_bytes(text[:8], "little"), len(text) - 8)
        shard.write_bytes(text + data)
        index["files"][shard.name] = dict(bytes=len(text + data), header=checksum((text + data)[: 8 + size]))
        reseal(path / "index.json", index)

    return forge, read


def index_json(folder: Path) -> tuple[Forge, Read]:
    """The index of a checkpoint."""
    path, index, read = checkpoint_files(folder)
    (folder / "outside").mkdir()
    (folder / "outside" / SHARD.format(0)).write_bytes((path / SHARD.format(0)).read_bytes())
    return lambda dice: _forge_sealed(path / "index.json", index, dice), read


def _forge_sealed(path: Path, content: dict, dice: random.Random) -> str:
    changed = mutate(content, dice)
    return reseal(path, changed if isinstance(changed, dict) else {"": changed})


def state_json(folder: Path) -> tuple[Forge, Read]:
    """What a checkpoint says of its run."""
    path, index, read = checkpoint_files(folder)
    fresh = State(LossScaler(scale=8.0, window=4))
    model = dict(num_layers=2, hidden_size=8, num_attention_heads=2)
    batch, checkpoint = dict(train_iters=10, global_batch_size=8), dict(resume_schedule="checkpoint")
    own = schema.from_record(dict(model=model, batch=batch, optimizer=dict(lr=0.1), checkpoint=checkpoint))
    content = dict(
        state=fresh.record(),
        lengths=dict(warmup=0, decay=80, anneal=None, total=80),
        optimizer_steps=3,
        config=asdict(own),
        vocab_size=99,
        mesh=dict(pp=1, tp=1),
        samples={"0": [1, 2]},
        iteration=2,
        version="1",
        commit="abc",
        libraries=dict(torch="2"),
    )

    def forge(dice: random.Random) -> None:
        names = [None, "state", "config", "lengths"]
        name = dice.choice(names)
        changed = mutate(content[name] if name else content, dice)
        changed = {**content, name: changed} if name else changed
        index["state"] = reseal(path / "state.json", changed if isinstance(changed, dict) else {"": changed})
        reseal(path / "index.json", index)

    def resume() -> None:
        read()
        with Reader(path) as reader:
            with contextlib.suppress(Failure):
                changes.refuse_another_run(own, reader.state.get("config", {}))
            changes.change_messages(own, reader.state.get("config", {}))
            resumed_schedule.drift(own, reader.state, 1)
            with contextlib.suppress(Failure):
                resumed_schedule.follow(own, reader.state, 1)
            fresh.restored(reader.state.get("state", {}))

    return forge, resume


def tracker(folder: Path) -> tuple[Forge, Read]:
    """The tracker."""
    _, _, read = checkpoint_files(folder)
    words = [str(number) for number in NUMBERS] + list(WORDS) + ["\u0663", "1_0", " 2 ", "+2", "2\n1"]

    def forge(dice: random.Random) -> None:
        text = dice.choice(words) * dice.choice((1, 1, 50)) if dice.random() < 0.7 else ""
        raw = text.encode(errors="surrogatepass") or mutate_bytes(b"2", dice)
        (folder / TRACKER).write_bytes(raw)

    return forge, read


def token_index(folder: Path) -> tuple[Forge, Read]:
    """An .idx without a manifest: header, lengths, offsets, documents."""
    subject = Tokens(folder)
    path, raw = folder / "a.idx", subject.files["a.idx"]
    data = IndexedDataset(subject.prefix)
    header, sequences = 34, len(data)
    del data

    def forge(dice: random.Random) -> None:
        if dice.random() < 0.5:
            path.write_bytes(mutate_bytes(raw, dice, header))
            return
        changed = bytearray(raw)
        for _ in range(dice.randint(1, 3)):
            number, which = int(dice.choice(NUMBERS[:16])) % (1 << 64), dice.randrange(3)
            if which == 0:
                struct.pack_into("<I", changed, header + 4 * dice.randrange(sequences), number % (1 << 32))
            elif which == 1:
                struct.pack_into("<Q", changed, header + 4 * sequences + 8 * dice.randrange(sequences), number)
            else:
                at = dice.randrange((len(raw) - header - 12 * sequences) // 8)
                struct.pack_into("<Q", changed, header + 12 * sequences + 8 * at, number)
        path.write_bytes(changed)

    def read() -> None:
        with contextlib.suppress(Failure):
            verify.contradictions(subject.prefix)
        data = IndexedDataset(subject.prefix)
        for number in range(len(data)):
            with contextlib.suppress(Failure):
                data.get(number)
        subject.samples()

    return forge, read


def token_manifest(folder: Path) -> tuple[Forge, Read]:
    """The manifest of token files."""
    subject = Tokens(folder)
    path = folder / "a.sums.json"
    _, content = read_sealed(path)
    return lambda dice: _forge_sealed(path, content, dice), lambda: manifest.verify(subject.prefix)


def token_statistics(folder: Path) -> tuple[Forge, Read]:
    """What tells the vocabulary of token files."""
    content = dict(tokenizer=dict(type="GPT2BPETokenizer", vocab_size=9, eod=8, fingerprint="ab"), documents=3)
    paths = [folder / f"{name}.stats.json" for name in "ab"]

    def forge(dice: random.Random) -> None:
        text = json.dumps(mutate(content, dice)).encode()
        paths[0].write_bytes(text if dice.random() < 0.6 else mutate_bytes(text, dice))
        paths[1].write_text(json.dumps(content))

    return forge, lambda: common_identity([str(folder / name) for name in "ab"])


def cache_files(folder: Path) -> tuple[Forge, Read]:
    """The index of a cache of index maps, and the headers of its arrays."""
    subject = IndexCache(folder)
    names = [name for name in subject.files if "-train-" in name]
    index = folder / next(name for name in names if name.endswith("index.json"))
    content = read_sealed(index)[1]

    def forge(dice: random.Random) -> None:
        subject.apply({name: subject.files[name] for name in names})
        if dice.random() < 0.7:
            _forge_sealed(index, content, dice)
        else:
            name = dice.choice(names)
            (folder / name).write_bytes(mutate_bytes(subject.files[name], dice, 128))

    return forge, subject.samples


def hugging_face(folder: Path) -> tuple[Forge, Read]:
    """config.json, the list of files and the header of a safetensors file of a Hugging Face folder."""
    from safetensors.numpy import save

    source, out = folder / "theirs", folder / "out"
    source.mkdir()
    settings = dict(
        model_type="gpt2",
        n_layer=1,
        n_embd=8,
        n_head=2,
        n_positions=8,
        vocab_size=10,
        n_inner=None,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
    )
    shapes = {"wte.weight": (10, 8), "wpe.weight": (8, 8), "ln_f.weight": (8,), "ln_f.bias": (8,)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    raw = save(tensors)
    length = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    names = {name: "model.safetensors" for name in shapes}

    def forge(dice: random.Random, what: Optional[int] = None) -> None:
        for path in source.iterdir():
            path.unlink()
        what = dice.randrange(4) if what is None else what
        (source / "config.json").write_text(json.dumps(mutate(settings, dice) if what == 0 else settings))
        text = json.dumps(mutate(header, dice) if what == 1 else header).encode()
        text = len(text).to_bytes(8, "little") + text + data
        (source / "model.safetensors").write_bytes(mutate_bytes(text, dice, 8 + length) if what == 2 else text)
        if what == 3:
            listed = json.dumps(mutate(dict(weight_map=names), dice))
            (source / "model.safetensors.index.json").write_text(listed)

    forge(random.Random(0), 4)
    return forge, lambda: huggingface.from_hf(source, out, {}, check=False)


# ---- the cases -------------------------------------------------------------------------------------------------------


def try_forgeries(make: Callable[[Path], tuple[Forge, Read]], count: int, part: int, folder: Path, seed: int) -> Got:
    """Forge and read `count` times in this process, whose memory is watched; other forgeries in each part."""
    place, outside, surprises = folder / "place", [], []
    place.mkdir()
    forge, read = make(place)

    def look(event: str, arguments: tuple) -> None:
        if event == "open" and isinstance(arguments[0], str):
            if arguments[0].startswith("/etc/passwd") or "outside" in arguments[0]:
                outside.append(arguments[0])

    with contextlib.suppress(Failure):
        read()  # imports what it needs
    sys.addaudithook(look)
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ROOM, taken + ROOM))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        forge(random.Random((seed * PARTS + part) * 1_000_003 + number))
        if surprise := surprise_of(read):
            surprises.append(f"number {number}: {surprise}")
        if outside:
            surprises.append(f"number {number}: opens {outside.pop()}")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MEMORY:
        surprises.append(f"the process grew by {grown:,} bytes")
    return Got("; ".join([f"surprises: {len(surprises)}", *surprises[:5]]), faults=count)


TARGETS: dict[str, tuple[Callable[[Path], tuple[Forge, Read]], int]] = {
    "safetensors-header": (shard_header, 2000),
    "index.json": (index_json, 2500),
    "state.json": (state_json, 1000),
    "tracker": (tracker, 300),
    "idx": (token_index, 2500),
    "sums.json": (token_manifest, 1000),
    "stats.json": (token_statistics, 500),
    "index-cache": (cache_files, 1000),
    "hugging-face": (hugging_face, 700),
}


PARTS = 20


def cases() -> list[Case]:
    """Some cases for each format, of which the first is short."""
    return [
        Case(
            f"forged/{name}/{part}",
            "forged headers and index files",
            NONE,
            partial(try_forgeries, make, count // PARTS, part),
            short=part == 0,
        )
        for name, (make, count) in TARGETS.items()
        for part in range(PARTS)
    ]
