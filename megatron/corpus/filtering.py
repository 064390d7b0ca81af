# SPDX-License-Identifier: Apache-2.0
"""Run consecutive filters over a shard in one task, which writes the result once.

Counts documents and bytes of text by rule, histograms of figures for kept and dropped documents, and lengths, languages and
domains of kept ones. For each rule a few documents are kept as samples: those with the smallest hashes, so that every
attempt chooses the same.
"""

import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as counter
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlsplit

import xxhash

from megatron.corpus.counts import bucket, text_bytes
from megatron.corpus.documents import SHARD, ShardWriter, encode, read_documents
from megatron.corpus.registry import load
from megatron.corpus.stage import Document, Verdict
from megatron.errors import DataError, Failure

VERSION = "1"
SAMPLES = "samples.jsonl"
SAMPLE_TEXT = 2000  # characters of a sample
DOMAINS = 200  # the most frequent of a shard: in a sum over shards, only the head of the list is accurate
KEPT = "kept"


@dataclass(frozen=True)
class Step:
    """The result of one filter for a document."""

    name: str
    verdict: Verdict
    changed: bool = False  # kept with another text

    @property
    def rule(self) -> str:
        return f"{self.name}.{self.verdict.reason}" if self.verdict.reason else self.name


def run_filters(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Task [shard] -> the filtered shard. options: filters as [name, address, options], samples"""
    chain = filters_of(options["filters"])
    tally = Tally(options["samples"])
    with ShardWriter(output / SHARD) as writer:
        for row, document in enumerate(read_documents(inputs[0])):
            size = text_bytes(document["text"])
            try:
                steps = list(judged(chain, document))
            except Failure:
                raise
            except Exception as error:
                name = document.get("url") or document.get("id") or ""
                raise DataError(
                    f"document {row} of the shard{f' ({name})'[:200] if name else ''}: {type(error).__name__}: {error}"
                ) from error
            after = steps[-1].verdict.document
            line = None if after is None else encode(after)
            if line is not None:
                writer.write_line(line)
            tally.take(document, size, steps, after)
    tally.write_samples(output / SAMPLES)
    return tally.counts()


def filters_of(wanted: list) -> list[tuple[str, Any]]:
    """(name, filter) of each, constructed once per process."""
    return [(name, _filter_of(address, json.dumps(options, sort_keys=True))) for name, address, options in wanted]


@lru_cache(maxsize=64)
def _filter_of(address: str, options: str) -> Any:
    return load(address)(**json.loads(options))


def judged(chain: list[tuple[str, Any]], document: Document) -> Iterator[Step]:
    """The result of each filter, up to the first that drops the document."""
    at: Optional[Document] = document
    for name, judge in chain:
        text = at["text"]
        verdict = judge(at)
        at = verdict.document
        yield Step(name, verdict, at is not None and at["text"] != text)
        if at is None:
            return


class Tally:
    """Counts the kept, changed and dropped documents of a shard."""

    def __init__(self, samples: int):
        self.samples = samples
        self.sums: Counter = Counter()
        self.dropped: dict[str, Counter] = defaultdict(Counter)
        self.changed: Counter = Counter()
        self.figures: dict[str, dict[str, Counter]] = defaultdict(lambda: defaultdict(Counter))
        self.lengths: Counter = Counter()
        self.domains: Counter = Counter()
        self.kept_samples: dict[str, list] = defaultdict(list)
        self.number = counter()

    def take(self, document: Document, size: int, steps: list[Step], after: Optional[Document]) -> None:
        """Count a document. size: bytes of its text before the filters"""
        last = steps[-1]
        self.sums["documents_in"] += 1
        self.sums["bytes_in"] += size
        for step in steps:
            fate = KEPT if step.verdict.document is not None else "dropped"
            if step.changed:
                self.changed[step.rule] += 1
            for name, value in step.verdict.figures.items():
                word = bucket(value) if isinstance(value, (int, float)) else str(value)[:40]
                self.figures[f"{step.name}.{name}"][fate][word] += 1
        if after is None:
            self.dropped[last.rule]["documents"] += 1
            self.dropped[last.rule]["bytes"] += size
            self._sample(last.rule, document, last)
            return
        self.sums["documents"] += 1
        self.sums["bytes"] += text_bytes(after["text"])
        self.lengths[bucket(len(after["text"]))] += 1
        if isinstance(url := after.get("url"), str) and url:
            self.domains[domain_of(url)] += 1
        self._sample(KEPT, after, last)

    def _sample(self, rule: str, document: Document, step: Step) -> None:
        if not self.samples:
            return
        rank = -xxhash.xxh3_64_intdigest(document["text"].encode("utf-8", "surrogatepass"))
        heap = self.kept_samples[rule]
        if len(heap) == self.samples and rank < heap[0][0]:
            return
        text = document["text"][:SAMPLE_TEXT]
        known = {name: document[name] for name in ("id", "url") if isinstance(document.get(name), (str, int))}
        entry = dict(rule=rule, rank=-rank, **known, figures=dict(step.verdict.figures), text=text)
        entry["characters"] = len(document["text"])
        (heapq.heappush if len(heap) < self.samples else heapq.heappushpop)(heap, (rank, next(self.number), entry))

    def write_samples(self, path: Path) -> None:
        with open(path, "wb") as file:
            for rule in sorted(self.kept_samples):
                for _, _, entry in sorted(self.kept_samples[rule], key=lambda one: (-one[0], one[1])):
                    file.write(encode(entry) + b"\n")

    def counts(self) -> dict[str, Any]:
        names = ("documents_in", "bytes_in", "documents", "bytes")
        return {name: self.sums[name] for name in names} | dict(
            dropped={rule: dict(count) for rule, count in sorted(self.dropped.items())},
            changed=dict(sorted(self.changed.items())),
            figures={
                name: {fate: dict(sorted(c.items())) for fate, c in sorted(f.items())}
                for name, f in self.figures.items()
            },
            lengths=dict(self.lengths),
            domains=dict(self.domains.most_common(DOMAINS)),
        )


def domain_of(url: str) -> str:
    """The host of an address, without www.

    >>> domain_of("https://www.Example.org:8080/a"), domain_of("http://[bad")
    ('example.org', 'no address')
    """
    try:
        return (urlsplit(url).hostname or "no address").removeprefix("www.")[:100]
    except ValueError:
        return "no address"
