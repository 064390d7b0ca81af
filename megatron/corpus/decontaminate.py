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
from typing import Any, Literal, NamedTuple, Optional

from megatron.corpus.counts import text_bytes
from megatron.corpus.documents import CUT, DROPPED, SHARD, ShardWriter, names_of, read_documents
from megatron.corpus.stage import Counts, Document, Made, StagePhase, Verdict, of_each_shard, options_of
from megatron.data.contamination import Cutting, NgramIndex, Screen, Screening
from megatron.errors import DataError, SettingsError

VERSION = "2"  # of what the tasks of this stage write
REASON = "contaminated"
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
    return [StagePhase("decontaminate", run=run, split=of_each_shard)]


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
            decided, of_block = decide(screen, documents)
            ngrams += [matches for matches, _ in of_block.ngrams.values()]
            counts["contaminated"] += len(of_block.matches)
            for row, (document, (left, note)) in enumerate(zip(documents, decided, strict=True), first):
                size, stays = text_bytes(document["text"]), sum(text_bytes(one["text"]) for one in left)
                counts["documents_in"] += 1
                counts["bytes_in"] += size
                counts["documents"] += len(left)
                counts["bytes"] += stays
                for one in left:
                    write.write(one)
                if not left:
                    gone["documents"] += 1
                    gone["bytes"] += size
                    dropped.write(dict(row=row, **note.facts, **names_of(document)))
                elif note:
                    counts["cut"] += 1
                    counts["pieces"] += len(left)
                    counts["passages"] += note.passages
                    counts["bytes_cut"] += size - stays
                    cut.write(dict(row=row, **note.facts, **names_of(document)))
            first += len(documents)
    items = screen.index.sets_of(np.concatenate(ngrams)) if ngrams else {}
    return counts | {"dropped": {REASON: gone}} | {f"items_of_{name}": count for name, count in items.items()}


def explain(
    made: Made, shard: int, row: int, document: Document, options: Mapping[str, Any]
) -> Optional[dict[str, Any]]:
    """The fate of a document: dropped, or its first piece; None if it was kept whole."""
    [(left, note)], _ = decide(screen_of(options), [document])
    if note is None:
        return None
    figures = {key: value for key, value in note.facts.items() if key != "reason"}
    return dict(document=left[0] if left else None, reason=REASON, figures=figures)


class ChangeNote(NamedTuple):
    """Why a document is dropped or cut: facts for its note, and how many passages have n-grams."""

    facts: dict[str, Any]
    passages: int


def decide(
    screen: Screen, documents: Sequence[Document]
) -> tuple[list[tuple[list[Document], Optional[ChangeNote]]], Screening]:
    """([(pieces that stay, the note or None) of each document], the screening of their texts)."""
    screening = screen((number, [document["text"]]) for number, document in enumerate(documents))
    matches = {row["line"]: row for row in screening.matches}

    def decided(number: int, document: Document) -> tuple[list[Document], Optional[ChangeNote]]:
        if number not in screening.parts:
            return [document], None
        match = matches[number]
        facts = dict(reason=REASON, ngrams=match["ngrams"], sets=", ".join(match["sets"]), first=match["first"])
        note = ChangeNote(facts | dict(pieces=match["pieces"]), match["passages"])
        return _pieces(document, screening.parts[number]), note

    return [decided(*one) for one in enumerate(documents)], screening


def screen_of(options: Mapping[str, Any]) -> Screen:
    asked = options_of(OPTIONS, options)
    return Screen(NgramIndex.open(asked.index), asked.action, Cutting(asked.side, asked.least, asked.most_pieces))


def _pieces(document: Document, parts) -> list[Document]:
    """The kept pieces of a document. parts: of `Screening`"""
    pieces = []
    for _, number, text in parts:
        own = {**document, "text": text}
        if "id" in document:
            own["id"] = f"{document['id']}-{number}"
        pieces.append(own)
    return pieces


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
