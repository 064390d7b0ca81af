# SPDX-License-Identifier: Apache-2.0
"""Multiple-choice requests: a context and several continuations, one of them right. Each continuation is a sample.

A file has one JSON object per line. Context and continuation are joined without anything in between:

    {"context": "The capital of France is", "continuations": [" Paris", " Rome"], "gold": 0, "task": "capitals"}
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

import numpy as np

from megatron.data.tables import json_in, refuse_half_letters, text_of_file
from megatron.errors import DataError, SettingsError

FORM = '{"context": "...", "continuations": ["...", "..."], "gold": 0}'


class ScoringRequest(NamedTuple):
    """A multiple-choice request. gold: index of the right continuation. task: a name for the figures, or ""."""

    context: str
    continuations: tuple[str, ...]
    gold: int
    task: str = ""


class Scored(NamedTuple):
    """Tokens of a context and a continuation; tokens from `start` on are scored."""

    ids: list[int]
    start: int


def read_requests(path: str) -> list[ScoringRequest]:
    """Read the requests of a file. Raises DataError for an invalid line, and names it."""
    lines = text_of_file(path, f"--eval-requests {path}").split("\n")
    requests = [_request(f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise DataError(f"--eval-requests {path} holds no requests", do=f"lines of the form {FORM}")
    return requests


def _request(where: str, line: str) -> ScoringRequest:
    row = json_in(line, where, f"lines of the form {FORM}")
    try:
        context, continuations, gold = row["context"], row["continuations"], row["gold"]
    except (KeyError, TypeError) as error:
        reason = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{where} is no request: {reason}", do=f"lines of the form {FORM}") from None
    texts = isinstance(continuations, list) and all(isinstance(text, str) and text for text in continuations)
    if not isinstance(context, str) or not texts or len(continuations) < 2:
        raise DataError(
            f"{where} is no request: a text and at least two continuations that are not empty",
            do=f"lines of the form {FORM}",
        )
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(continuations):
        raise DataError(f"{where}: gold is {gold!r}, and the continuations have numbers 0 to {len(continuations) - 1}")
    task = str(row.get("task", ""))
    for text in (context, *continuations, task):
        refuse_half_letters(text, where)
    return ScoringRequest(context, tuple(continuations), gold, task)


def encode_pair(tokenizer, context: str, continuation: str) -> Scored:
    """Encode both texts together, as a prompt and its continuation; tokens of the continuation are scored.

    White space at the end of the context moves to the continuation, as in lm-evaluation-harness. Without a context, the
    continuation follows what the tokenizer puts before a prompt, or the end-of-document token.
    """
    stripped = context.rstrip()
    continuation, context = context[len(stripped) :] + continuation, stripped
    whole, start = tokenizer.encode_pair(context, continuation)
    if len(whole) > len(tokenizer.prefix):  # a token is scored, if there is one
        start = min(start, len(whole) - 1)
    if start:
        return Scored(whole, start)
    if tokenizer.begin is None:
        raise SettingsError("a request without context needs a tokenizer with an end-of-document token")
    return Scored([tokenizer.begin, *whole], 1)


def sample_of(scored: Scored, seq_length: int, fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(ids, loss mask), [seq_length + 1] each. Long samples are truncated at the beginning."""
    ids, start = scored.ids[-seq_length - 1 :], scored.start - max(0, len(scored.ids) - seq_length - 1)
    row, mask = np.full(seq_length + 1, fill, np.int64), np.zeros(seq_length + 1, np.float32)
    row[: len(ids)] = ids
    mask[max(start, 1) : len(ids)] = 1.0  # nothing predicts the first token
    return row, mask


@dataclass(frozen=True)
class RequestSamples:
    """A dataset with a sample for each continuation. choices: number of continuations per request; whole: evaluate all."""

    scored: Sequence[Scored]
    choices: Sequence[int]
    seq_length: int
    fill: int = 0
    requests: Sequence[ScoringRequest] = ()
    whole: bool = field(default=True)

    @classmethod
    def of(cls, requests: Sequence[ScoringRequest], tokenizer, seq_length: int) -> "RequestSamples":
        pairs = [encode_pair(tokenizer, one.context, text) for one in requests for text in one.continuations]
        return cls(pairs, [len(one.continuations) for one in requests], seq_length, tokenizer.eod or 0, requests)

    def __len__(self) -> int:
        return len(self.scored)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return sample_of(self.scored[index], self.seq_length, self.fill)

    @property
    def cut(self) -> int:
        """Number of samples that are truncated at the beginning."""
        return sum(len(one.ids) > self.seq_length + 1 for one in self.scored)


def request_figures(dataset: RequestSamples, scores: np.ndarray) -> dict[str, float]:
    """Accuracy of the likeliest continuation, and of the likeliest per character, over all requests and for each task.

    scores: log-likelihood of each sample [n], in nats
    """
    right: dict[str, list[tuple[bool, bool]]] = {}
    start = 0
    for request, count in zip(dataset.requests, dataset.choices):
        own = scores[start : start + count]
        lengths = np.array([max(1, len(text.strip())) for text in request.continuations])
        hits = int(own.argmax()) == request.gold, int((own / lengths).argmax()) == request.gold
        for name in {"", request.task}:
            right.setdefault(name, []).append(hits)
        start += count
    figures = {}
    for name in sorted(right):
        plain, normalised = np.mean(right[name], axis=0)
        figures |= {f"accuracy {name}".strip(): float(plain), f"normalised accuracy {name}".strip(): float(normalised)}
    return figures


def open_requests(path: Optional[str], tokenizer, seq_length: int, log) -> Optional[RequestSamples]:
    """The samples of --eval-requests; None without it."""
    if path is None:
        return None
    if tokenizer is None:
        raise SettingsError(
            f"--eval-requests {path}: texts need a tokenizer", do="--vocab-file and --merge-file, or --tokenizer-model"
        )
    samples = RequestSamples.of(read_requests(path), tokenizer, seq_length)
    note = f"; {samples.cut} are longer than --seq-length {seq_length} and lose their beginning" if samples.cut else ""
    log(f" > {len(samples.requests):,} requests with {len(samples):,} continuations in {path}{note}")
    return samples
