# SPDX-License-Identifier: Apache-2.0
"""A stage that looks for n-grams of registered evaluation sets: counts them, cuts them out, or drops the documents.

    - stage: decontaminate
      index: evaluation.ngrams     # python -m megatron.tools.contamination register ...
      action: cut                  # or count, drop

A document that is cut goes on as several: the pieces of Megatron-LM's filter_ngrams (`data.contamination.cut`), with a
number behind their "id". For documents one at a time there is `Decontaminate`, a filter that drops or only tells.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron.corpus.stage import Document, StagePhase, Verdict
from megatron.data.contamination import NgramIndex
from megatron.data.json_input import find_sources, read_blocks
from megatron.data.preprocess_screen import Cutting, Screen
from megatron.errors import DataError, SettingsError

DEFAULTS = dict(action="cut", side=200, least=200, most_pieces=10)
OUTPUT = "documents.jsonl.zst"
BLOCK = 1 << 20  # bytes of lines that are looked at together


class Decontaminate:
    """Drops documents with n-grams of an index, or lets them pass and tells how many they have."""

    def __init__(self, index: str = "evaluation.ngrams", action: Literal["count", "drop"] = "drop"):
        if action not in ("count", "drop"):
            raise SettingsError(f"action {action}: a filter can count or drop", do="take the stage for cutting")
        self.index, self.action = NgramIndex.open(index), action

    def __call__(self, document: Document) -> Verdict:
        hits = self.index.find([document["text"]])
        figures = dict(contaminating_ngrams=len(hits.ngrams))
        if not len(hits.ngrams):
            return Verdict(document, figures=figures)
        figures["evaluation_sets"] = ", ".join(self.index.sets_of(hits.ngrams))
        return Verdict(None if self.action == "drop" else document, "contaminated", figures)


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """One task a shard. Memory: the index, and a block of lines."""
    check(options)
    return [StagePhase("decontaminate", run=run, split=lambda made: [[shard] for shard in made["documents"]])]


def check(options: Mapping[str, Any]) -> None:
    """Raise SettingsError for options that cannot work, DataError for an index that is none."""
    unknown = set(options) - {"index", *DEFAULTS}
    if unknown:
        raise SettingsError(
            f"decontaminate has no option {', '.join(sorted(unknown))}", do=f"index, {', '.join(DEFAULTS)}"
        )
    if not options.get("index"):
        raise SettingsError("decontaminate needs an index", do="python -m megatron.tools.contamination register ...")
    if options.get("action", DEFAULTS["action"]) not in ("count", "cut", "drop"):
        raise SettingsError(f"decontaminate: action {options['action']}", do="count, cut or drop")
    NgramIndex.open(options["index"])


def run(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Clean a shard. Counts documents that came, that have any n-gram, and that go on; and items found of each set."""
    import numpy as np

    options = {**DEFAULTS, **options}
    cutting = Cutting(options["side"], options["least"], options["most_pieces"])
    screen = Screen(NgramIndex.open(options["index"]), options["action"], cutting)
    counts = dict(documents=0, contaminated=0, kept=0, dropped=0, pieces=0)
    found = []
    with _writer(output / OUTPUT) as file:
        for documents in _batches(inputs):
            screening = screen((number, [document["text"]]) for number, document in enumerate(documents))
            found += [ngrams for ngrams, _ in screening.ngrams.values()]
            counts["documents"] += len(documents)
            counts["contaminated"] += len(screening.found)
            for number, document in enumerate(documents):
                left = _pieces(document, screening.parts.get(number))
                counts["kept"] += len(left)
                counts["dropped"] += not left
                counts["pieces"] += len(left) if number in screening.parts else 0
                for one in left:
                    file.write(json.dumps(one, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
    items = screen.index.sets_of(np.concatenate(found)) if found else {}
    return counts | {f"items_of_{name}": count for name, count in items.items()}


def _pieces(document: Document, parts) -> list[Document]:
    """What goes on of a document. parts: of `Screening`; None where it is kept whole."""
    if parts is None:
        return [document]
    found = []
    for _, number, text in parts:
        own = {**document, "text": text}
        if "id" in document:
            own["id"] = f"{document['id']}-{number}"
        found.append(own)
    return found


def _batches(inputs: list[Path]) -> Iterator[list[Document]]:
    for path in inputs:
        for source in find_sources([str(path)]):
            for block, _ in read_blocks(source, BLOCK):
                yield [_document(line, path) for line in block.split(b"\n") if line.strip()]


def _document(line: bytes, path: Path) -> Document:
    try:
        document = json.loads(line)
        if isinstance(document, dict) and isinstance(document.get("text"), str):
            return document
    except (ValueError, RecursionError):
        pass
    raise DataError(f"{path}: a line is no document with a text", do="run the stages before this one again")


def _writer(path: Path):
    try:
        import zstandard
    except ImportError:
        raise DataError(f"{path}: zstd files need the package zstandard", do="pip install zstandard") from None
    return zstandard.open(path, "wb", cctx=zstandard.ZstdCompressor(level=3, write_checksum=True))
