# SPDX-License-Identifier: Apache-2.0
"""The decontamination stage: searches n-grams of registered evaluation sets, and counts, cuts or drops.

    - decontaminate:
        index: evaluation.ngrams     # python -m megatron.tools.contamination register ...
        action: cut                  # or count, drop

A cut document becomes several: the pieces of Megatron-LM's filter_ngrams (`data.contamination.cut`), with a number after
their "id". Notes on the matches are next to the shard: `dropped.jsonl` and `cut.jsonl`. `Decontaminate` is a filter for
single documents, which drops or only counts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.corpus.documents import SHARD, ShardWriter, decode, read_documents, read_lines
from megatron.corpus.figures import text_bytes
from megatron.corpus.stage import Counts, Document, Made, StagePhase, Verdict, options_of
from megatron.data.contamination import Cutting, NgramIndex, Screen, Screening
from megatron.errors import DataError, SettingsError

VERSION = "2"  # of what the tasks of this stage write
REASON = "contaminated"
DROPPED, CUT = "dropped.jsonl", "cut.jsonl"  # notes of a task
BLOCK = 1 << 20  # characters of text that are searched together


@dataclass(frozen=True)
class DecontaminateOptions:
    """Options of the stage: an index, and how much to cut with an n-gram (`data.contamination.cut`)."""

    index: str = ""
    action: Literal["count", "cut", "drop"] = "cut"
    side: int = Cutting.side
    least: int = Cutting.least
    most_pieces: int = Cutting.most_pieces

    def __post_init__(self):
        if not self.index:
            raise SettingsError("an index is needed", do="python -m megatron.tools.contamination register ...")
        if min(self.side, self.least, self.most_pieces) < 0:
            raise SettingsError("side, least and most_pieces start at 0")


OPTIONS = DecontaminateOptions


class Decontaminate:
    """A filter that drops documents with n-grams of an index, or keeps them and reports the number of n-grams."""

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
        return Verdict(None if self.action == "drop" else document, REASON, figures)


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """One task per shard. Memory: the index, and a block of lines."""
    screen_of(options)  # raises now for a wrong index, not in a worker
    return [StagePhase("decontaminate", run=run, split=lambda made: [[shard] for shard in made["documents"]])]


def run(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> Counts:
    """Clean a shard.

    Counts in addition to those of every stage: documents with any n-gram; passages and bytes cut, the number of cut
    documents and of their pieces; and matching items of each set. The latter are per shard: sums count some repeatedly.
    """
    import numpy as np

    [shard] = inputs
    screen = screen_of(options)
    counts = dict(documents_in=0, bytes_in=0, documents=0, bytes=0, contaminated=0, cut=0, pieces=0)
    counts |= dict(passages=0, bytes_cut=0)
    gone, ngrams, first = dict(documents=0, bytes=0), [], 0
    with (
        ShardWriter(output / SHARD) as write,
        ShardWriter(output / DROPPED) as dropped,
        ShardWriter(output / CUT) as cut,
    ):
        for documents in _blocks(shard):
            screening = _screened(screen, documents)
            notes = {row["line"]: row for row in screening.matches}
            ngrams += [matches for matches, _ in screening.ngrams.values()]
            for number, document in enumerate(documents):
                left, size = _pieces(document, screening.parts.get(number)), text_bytes(document["text"])
                counts["documents_in"] += 1
                counts["bytes_in"] += size
                counts["documents"] += len(left)
                counts["bytes"] += sum(text_bytes(one["text"]) for one in left)
                for one in left:
                    write.write(one)
                if not left:
                    gone["documents"] += 1
                    gone["bytes"] += size
                    dropped.write(_note(first + number, document, notes[number]))
                elif number in screening.parts:
                    counts["cut"] += 1
                    counts["pieces"] += len(left)
                    counts["passages"] += notes[number]["passages"]
                    counts["bytes_cut"] += size - sum(text_bytes(one["text"]) for one in left)
                    cut.write(_note(first + number, document, notes[number]))
            counts["contaminated"] += len(screening.matches)
            first += len(documents)
    items = screen.index.sets_of(np.concatenate(ngrams)) if ngrams else {}
    return counts | {"dropped": {REASON: gone}} | {f"items_of_{name}": count for name, count in items.items()}


def explain(
    made: Made, shard: int, row: int, document: Document, options: Mapping[str, Any]
) -> Optional[dict[str, Any]]:
    """The fate of a document: dropped, or its first piece; None if it was kept whole."""
    for name in (DROPPED, CUT):
        for line in read_lines(made["decontaminate"][shard] / name):
            note = decode(line)
            if note["row"] == row:
                parts = _screened(screen_of(options), [document]).parts.get(0)
                left = _pieces(document, parts)
                figures = {key: note[key] for key in ("ngrams", "sets", "first", "pieces")}
                return dict(document=left[0] if left else None, reason=REASON, figures=figures)
    return None


def screen_of(options: Mapping[str, Any]) -> Screen:
    asked = options_of(OPTIONS, options)
    return Screen(NgramIndex.open(asked.index), asked.action, Cutting(asked.side, asked.least, asked.most_pieces))


def _screened(screen: Screen, documents: Sequence[Document]) -> Screening:
    return screen((number, [document["text"]]) for number, document in enumerate(documents))


def _pieces(document: Document, parts) -> list[Document]:
    """The kept pieces of a document. parts: of `Screening`; None if it is kept whole"""
    if parts is None:
        return [document]
    pieces = []
    for _, number, text in parts:
        own = {**document, "text": text}
        if "id" in document:
            own["id"] = f"{document['id']}-{number}"
        pieces.append(own)
    return pieces


def _note(row: int, document: Document, match: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: document[key] for key in ("id", "url") if key in document}
    facts = dict(ngrams=match["ngrams"], sets=", ".join(match["sets"]), first=match["first"], pieces=match["pieces"])
    return dict(row=row, reason=REASON, **facts, **known)


def _blocks(shard: Path) -> Iterator[list[Document]]:
    held, size = [], 0
    for document in read_documents(shard):
        if not (isinstance(document, dict) and isinstance(document.get("text"), str)):
            raise DataError(f"{shard}: a line is no document with a text", do="run the stages before this one again")
        held.append(document)
        size += len(document["text"])
        if size >= BLOCK:
            yield held
            held, size = [], 0
    if held:
        yield held
