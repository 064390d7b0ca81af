# SPDX-License-Identifier: Apache-2.0
"""Small stages of each kind, for tests of what runs them."""

import json
import os
import signal
import time
from pathlib import Path

from megatron.corpus.documents import ShardWriter, encode, read_documents, write_documents
from megatron.corpus.stage import StagePhase, Verdict

VERSION = "1"


class TooShort:
    """Drops documents of fewer than `least` characters."""

    def __init__(self, least: int = 128, words: list[str] | None = None, path: str = ""):
        self.least = least

    def __call__(self, document):
        length = len(document["text"])
        return Verdict(document if length >= self.least else None, "too_short", {"length": length})


class Upper:
    """Changes those that begin with "change"."""

    def __call__(self, document):
        if document["text"].startswith("change"):
            return Verdict(dict(document, text=document["text"].upper()), "upper")
        return Verdict(document)


class Poison:
    """Fails, or kills its process, at a document that says so."""

    def __init__(self, word: str = "poison", kill: bool = False):
        self.word, self.kill = word, kill

    def __call__(self, document):
        if self.word in document["text"]:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"{self.word} in the text")
        return Verdict(document)


class Hog:
    """Holds so many MB for a second at a document that says so."""

    def __init__(self, megabytes: int = 0):
        self.megabytes = megabytes

    def __call__(self, document):
        if "text 53 " in document["text"]:
            held = b"x" * (self.megabytes << 20)
            time.sleep(1.5)
            del held
        return Verdict(document)


def phases(options, shards, memory):
    """Exact duplicates by their text: scattered by a hash, the smallest (shard, row) of each stays."""
    parts = options.get("parts", 2)
    return [
        StagePhase("scatter", scatter, lambda made: [[shard] for shard in made["documents"]]),
        StagePhase(
            "find",
            find,
            lambda made: [[folder / f"{part}.jsonl" for folder in made["scatter"]] for part in range(parts)],
            lambda made: [dict(part=part) for part in range(parts)],
        ),
        StagePhase("keep", keep, lambda made: [[shard, made["find"]] for shard in made["documents"]], _numbers),
    ]


def _numbers(made):
    return [dict(shard=number) for number in range(len(made["documents"]))]


def _part(text: str, parts: int) -> int:
    return sum(text.encode()) % parts


def scatter(inputs, output: Path, options):
    parts = options.get("parts", 2)
    files = [open(output / f"{part}.jsonl", "wb") for part in range(parts)]
    rows = 0
    for row, document in enumerate(read_documents(inputs[0])):
        rows += 1
        files[_part(document["text"], parts)].write(encode(dict(row=row, text=document["text"])) + b"\n")
    for file in files:
        file.close()
    return dict(rows=rows)


def find(inputs, output: Path, options):
    seen, gone = set(), []
    for shard, path in enumerate(inputs):
        for entry in read_documents(path):
            if entry["text"] in seen:
                gone.append([shard, entry["row"]])
            seen.add(entry["text"])
    (output / "gone.json").write_text(json.dumps(gone))
    return dict(removed=len(gone), sizes={"1": len(seen)})


def keep(inputs, output: Path, options):
    gone = {tuple(one) for folder in inputs[1:] for one in json.loads((folder / "gone.json").read_text())}
    kept = [d for row, d in enumerate(read_documents(inputs[0])) if (options["shard"], row) not in gone]
    if options.get("notes"):
        rows = sorted(row for shard, row in gone if shard == options["shard"])
        (output / "dropped.jsonl").write_text("".join(f'{{"row": {r}, "reason": "noted"}}\n' for r in rows))
    half = len(kept) // 2
    write_documents(output / "a.jsonl.zst", kept[:half])
    with ShardWriter(output / "b.jsonl.zst") as writer:
        for document in kept[half:]:
            writer.write(document)
    return dict(documents=len(kept))


def explain(made, shard, row, document, options):
    assert Path(made["documents"][shard]).exists()
    for folder in made["find"]:
        if [shard, row] in json.loads((folder / "gone.json").read_text()):
            return dict(reason="duplicate", figures=dict(text=document["text"][:20]))
    return None
