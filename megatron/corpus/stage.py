# SPDX-License-Identifier: Apache-2.0
"""The interfaces of a corpus recipe's stages: filters of single documents, and phases of tasks over files.

Documents are JSON objects, one a line, with the text under "text" and, where known, "url" and "id". A shard is a file of
them (`.jsonl`, or `.jsonl.zst`).

    class TooShort:                                   # a filter
        def __init__(self, least: int = 128): self.least = least
        def __call__(self, document):
            length = len(document["text"])
            return Verdict(document if length >= self.least else None, "too_short", {"length": length})

    StagePhase("sign", run=sign, split=lambda made: [[shard] for shard in made["documents"]])
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Optional, Protocol, TypeVar

Document = dict[str, Any]
Options = TypeVar("Options")


@dataclass(frozen=True)
class Verdict:
    """A filter's result for a document.

    document: the kept document, changed or not; None: dropped
    reason:   the rule that dropped or changed it, one word with underscores; it is counted under this name
    figures:  the values that the rule compared, by name: for `explain` and for histograms
    """

    document: Optional[Document]
    reason: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)


class Filter(Protocol):
    """A function of a single document, independent of earlier documents and of the machine.

    Constructed once per process from its options (keyword arguments with defaults); may load a model then.
    """

    def __call__(self, document: Document) -> Verdict: ...


Counts = Mapping[str, Any]  # counts of a task as JSON; numbers of the same name are added up over tasks
# Phase -> folder of each of its tasks; "documents" -> the shards that the stage reads
Made = Mapping[str, Sequence[Path]]
TaskInputs = Sequence[Path | Sequence[Path]]  # paths, and lists of them as a whole: `made["sign"]`


def flat(inputs: TaskInputs) -> list[Path]:
    """The paths that a task is called with.

    >>> flat(["shard", ["a", "b"], "c"])
    ['shard', 'a', 'b', 'c']
    """
    return [path for one in inputs for path in (one if isinstance(one, (list, tuple)) else [one])]


@dataclass(frozen=True)
class StagePhase:
    """Independent tasks of a stage that has to see many documents at the same time.

    run:   (inputs, output, options) -> counts. Reads the input paths, fills the empty folder `output` with files, and does
           nothing else. Pure: the same inputs always give the same bytes, in any process; a function of a module, so that
           other processes can import it. `options` is JSON.
    split: results of this stage's earlier phases -> the inputs of each task. Called before anything runs, with paths that
           need not exist yet: only their number counts. A task that reads all results of a phase has the list
           `made[phase]` as one of its inputs, not each path: the plan then holds the list once, and does not grow with
           the square of the number of shards. `run` gets all paths of the list.
    own:   options of each task in addition to the stage's, where they differ (a band, a partition): a mapping per task
    document_bytes: bytes of a task's memory per document of all shards, for memory that grows with the corpus. Used by
           `estimate`
    """

    name: str
    run: Callable[[list[Path], Path, Mapping[str, Any]], Counts]
    split: Callable[[Made], list[TaskInputs]]
    own: Callable[[Made], list[Mapping[str, Any]]] = lambda made: []
    document_bytes: int = 0


def of_each_shard(made: Made) -> list[TaskInputs]:
    """`StagePhase.split` of a phase with a task for each shard that the stage reads."""
    return [[shard] for shard in made["documents"]]


# Stages of phases: name in a recipe -> (options, number of shards, bytes of memory a task may take) -> phases. The last
# phase writes the shards for the next stage: files `*.jsonl.zst` (or token files, of the last stage).
#
# The engine (`plan.py`, `agenda.py`):
# - Inputs of `split` are folders of earlier tasks, files in them, or shards, or lists of these. They determine which tasks
#   have to be done before.
# - Each task of the last phase writes one shard: several files `*.jsonl.zst` of its folder are joined in the order of their
#   names, none is an empty shard. `documents.py` reads and writes shards.
# - A task is identified by its function, its options (texts that name files: with the files' bytes), its inputs, and the
#   version of its code: VERSION in its module, or the digest of the module's source where there is none.
# - Counts of the last phase by these names are the stage's line in the report: documents_in, bytes_in, documents, bytes (of
#   text), dropped: {rule: {"documents": n, "bytes": n}}. A dict whose keys are numbers is drawn as a histogram.
#   A stage that cuts texts also counts the documents (cut), the passages cut out of them (passages) and their bytes
#   (bytes_cut); where a document becomes several, their number (pieces).
# - Where the last phase has a task for each shard that the stage reads, it may write `dropped.jsonl` next to the documents:
#   one object per line with "row" (from 0, in the shard that was read), "reason", and figures. `explain` reads it.
# The module of a stage may also have
#   OPTIONS         a dataclass whose fields are the options: the engine checks a recipe's names and types against it before
#                   anything else; ranges are checked by its `__post_init__`
#   MAKES_TOKENS    True: the stage writes no documents and is the last one
#   explain         (made, shard, row, document, options) -> None for a document that was kept unchanged, else a dict with
#                   "reason" (a word) and "figures" (a dict), and with "document" where it was changed and not dropped.
#                   made: phase -> the folders of its tasks, all done, and "documents" -> the shards that the stage read;
#                   shard, row: position of the document in them, both from 0
StageOfPhases = Callable[[Mapping[str, Any], int, int], list[StagePhase]]


def options_of(kind: type[Options], options: Mapping[str, Any]) -> Options:
    """The options of a stage as its dataclass, from the options of a task, which may have others in addition."""
    return kind(**{one.name: options[one.name] for one in fields(kind) if one.name in options})
