# SPDX-License-Identifier: Apache-2.0
"""Conversations as training samples: their tokens, the loss on answers alone, and several of them in a sample.

All conversations are encoded once, and kept in the index cache beside the file, where the processes of a job find them.
Legend: s sequence length, n tokens.
"""

import hashlib
import json
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Optional

import numpy as np

from megatron.data.conversations import NAMED, Conversation, Message, Pair, read_conversations, read_pairs
from megatron.data.file_formats import CACHE
from megatron.data.index_cache import cached_arrays
from megatron.data.indexed import Origin, SamplePart
from megatron.data.labelled import pair_lengths
from megatron.data.loader import DOCUMENTS, IDS, MASK
from megatron.errors import DataError, missing_file
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.chat_template import ChatTemplate, RefusedMessages

WASTE = 4  # times the longest conversation: a note about padding
VERSION = 4  # of what the cache holds
NAMES = ("tokens", "answers", "ends", "stops", "places", "lines", "notes")


@dataclass(frozen=True)
class EncodedTexts:
    """The tokens of all conversations of a split.

    tokens   [n] int32, of all conversations, end to end
    answers  [n] uint8: 1 for tokens in the loss
    ends     [texts] int64: the end of each text in `tokens`
    stops    [texts] int32: the last token of its last answer; -1 without one
    places   [texts] int32: its file; lines: its line there
    notes    on what was read, for the log: JSON as bytes
    """

    tokens: np.ndarray
    answers: np.ndarray
    ends: np.ndarray
    stops: np.ndarray
    places: np.ndarray
    lines: np.ndarray
    notes: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    def text(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, answers) of a text."""
        start = int(self.ends[number - 1]) if number else 0
        return self.tokens[start : self.ends[number]], self.answers[start : self.ends[number]]

    def counted(self, longest: Optional[int] = None) -> np.ndarray:
        """Tokens in the loss of each text, of its first `longest` tokens. The first token of a text is never predicted."""
        sums = np.concatenate([[0], np.cumsum(self.answers, dtype=np.int64)])
        starts = np.concatenate([[0], self.ends[:-1]])
        stops = self.ends if longest is None else np.minimum(self.ends, starts + longest)
        return sums[stops] - sums[np.minimum(starts + 1, stops)]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


# ---- encoding --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextEncoder:
    """Encodes conversations, or pairs of answers.

    template: None for pairs of texts without one; on_prompt: the loss is on all tokens
    """

    tokenizer: Tokenizer
    template: Optional[ChatTemplate]
    pairs: bool = False
    on_prompt: bool = False

    def read(self, files: Sequence[str], cache: Optional[str], log: Callable[[str], None]) -> EncodedTexts:
        """The texts of these files. Raises DataError, and names file and line."""

        def build():
            texts, notes = (read_pairs if self.pairs else read_conversations)(files)
            said = np.frombuffer(json.dumps([*notes, *self._named_in(texts)]).encode(), np.uint8)
            return dict(self._arrays(texts, files), notes=said)

        folder = Path(cache) if cache else Path(files[0]).parent / CACHE
        key = dict(
            kind="pairs" if self.pairs else "conversations",
            files=[_digest(file) for file in files],
            vocabulary=self.tokenizer.fingerprint,
            template=self.template and [self.template.source, sorted(self.template.tokens.items())],
            special=self.template and sorted(self.template.special.items()),
            parse_special=self.tokenizer.parse_special,
            on_prompt=self.on_prompt,
            version=VERSION,
        )
        name = f"{Path(files[0]).stem}-{'dpo' if self.pairs else 'chat'}"
        arrays = cached_arrays(folder, name, key, build, log=log, required=bool(cache), names=NAMES)
        return EncodedTexts(*(arrays[name] for name in NAMES))

    def _named_in(self, texts: Sequence[Conversation | Pair]) -> list[str]:
        """A note on messages with names of special tokens, which the template writes as text."""
        names, places = set(), []
        for one in texts if self.template else ():
            parts = [one.messages] if isinstance(one, Conversation) else [one.prompt, one.chosen, one.rejected]
            said = (message["content"] for part in parts if not isinstance(part, str) for message in part)
            if there := re.findall(self.template.names, "\n".join(said)):
                names.update(there)
                places.append(one.where)
        if not places:
            return []
        named = "; ".join(places[:NAMED]) + ", ..." * (len(places) > NAMED)
        return [
            f"{len(places):,} of {len(texts):,} lines have {', '.join(sorted(names))} in a message, which is text there "
            f"({named}): leave it out, the template writes the special tokens of turns"
        ]

    def _arrays(self, texts: Sequence[Conversation | Pair], files: Sequence[str]) -> dict[str, np.ndarray]:
        tokens, answers, ends, stops, places, lines = [], [], [], [], [], []
        numbers = {str(file): number for number, file in enumerate(files)}
        for text in texts:
            file, _, line = text.where.rpartition(", ")
            for ids, counted, stop in self._pair(text) if self.pairs else [self._conversation(text)]:
                tokens.append(np.asarray(ids, np.int32))
                answers.append(np.ones(len(ids), np.uint8) if self.on_prompt else np.asarray(counted, np.uint8))
                ends.append(len(ids))
                stops.append(stop)
                places.append(numbers[file])
                lines.append(int(line.split()[-1]))
        return dict(
            tokens=np.concatenate(tokens),
            answers=np.concatenate(answers),
            ends=np.cumsum(ends, dtype=np.int64),
            stops=np.asarray(stops, np.int32),
            places=np.asarray(places, np.int32),
            lines=np.asarray(lines, np.int32),
        )

    def _conversation(self, one: Conversation):
        return self._encoded(one.where, one.messages, one.tools)

    def _pair(self, pair: Pair):
        """The chosen text and the rejected one; the loss is on what follows the prompt."""
        for answer in (pair.chosen, pair.rejected):
            if isinstance(answer, str):
                ids, start = self.tokenizer.encode_pair(pair.prompt, answer)
                ids += [] if self.tokenizer.eod in (None, *ids[-1:]) else [self.tokenizer.eod]
                yield ids, [0] * start + [1] * (len(ids) - start), ids[-1]
            else:
                yield self._encoded(pair.where, (*pair.prompt, *answer), pair.tools, len(pair.prompt))

    def _encoded(self, where: str, messages: Sequence[Message], tools, first: int = 0):
        if self.template is None:
            raise DataError(f"{where}: messages, and there is no chat template", do="--chat-template plain, or a file")
        plain = [{name: value for name, value in one.items() if name != "weight"} for one in messages]
        try:
            found = self.template.encode_answers(
                plain, tools, lambda number: number >= first and messages[number].get("weight", 1) != 0
            )
        except RefusedMessages as error:
            raise DataError(f"{where}: {error}", do=error.do) from None
        return found.ids, found.counted, found.ends[-1] if found.ends else -1


def _digest(file: str) -> str:
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except FileNotFoundError:
        raise missing_file(file) from None
    except OSError as error:
        raise DataError(f"{file}: {error.strerror or error}", do="give a file of JSON lines") from None


# ---- samples ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChatSamples:
    """Samples of conversations: {input_ids, loss_mask} of s + 1 tokens each, with document_ids if there are several texts.

    rows: the texts of each sample; lengths: tokens that each text has there, which are its first ones
    """

    texts: EncodedTexts
    files: Sequence[str]
    rows: Sequence[Sequence[int]]
    lengths: np.ndarray
    seq_length: int
    pad: int
    apart: bool  # texts of a sample do not see each other

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        size = self.seq_length + 1
        ids, mask = np.full(size, self.pad, np.int64), np.zeros(size, np.float32)
        documents, at = np.full(size, len(self.rows[index]), np.int32), 0
        for document, number in enumerate(self.rows[index]):
            tokens, answers = self.texts.text(number)
            there = slice(at, at + int(self.lengths[number]))
            kept = there.stop - there.start
            ids[there], mask[there], documents[there] = tokens[:kept], answers[:kept], document
            mask[at] = 0.0  # the text before it does not predict its first token
            at = there.stop
        return {IDS: ids, MASK: mask, **({DOCUMENTS: documents} if self.apart else {})}

    def origin(self, index: int) -> Origin:
        """File and lines of a sample."""
        row = self.rows[index]
        parts = [SamplePart(int(self.texts.lines[number]), 0, int(self.lengths[number])) for number in row]
        return Origin(str(self.files[self.texts.places[row[0]]]), index, parts)


def conversation_samples(
    texts: EncodedTexts, files: Sequence[str], seq_length: int, pad: int, packing: bool
) -> tuple[ChatSamples, list[str]]:
    """(samples, notes on conversations that are truncated or left out). Raises DataError if none is left."""
    room, lengths = seq_length + 1, texts.lengths
    kept = np.minimum(lengths, room)
    silent, cut = texts.counted() == 0, lengths > room
    lost = (texts.counted(room) == 0) & ~silent
    notes = _notes(
        texts,
        files,
        {
            "have no answer, and are left out": silent,
            f"are longer than --seq-length {seq_length}, and lose their end": cut & ~silent & ~lost,
            f"have no answer within --seq-length {seq_length}, and are left out": lost,
        },
    )
    used = np.flatnonzero(~silent & ~lost)
    if not packing and len(used) and seq_length > WASTE * (longest := int(kept[used].max())):
        notes.append(
            f"the longest conversation has {longest:,} tokens, and each is padded to --seq-length {seq_length}: "
            f"--seq-length {longest} trains the same in less time and memory; --packing fills samples"
        )
    if not len(used):
        longer = "give a longer --seq-length, or " * bool(lost.any())
        do = f"{longer}conversations with an answer of the assistant"
        raise DataError(f"{', '.join(map(str, files))}: no conversation with an answer", "; ".join(notes), do)
    rows = pack(kept[used], room, used) if packing else [[int(number)] for number in used]
    return ChatSamples(texts, files, rows, kept, seq_length, pad, apart=packing), notes


def pair_samples(texts: EncodedTexts, files: Sequence[str], seq_length: int, pad: int) -> tuple[ChatSamples, list[str]]:
    """(a sample of each pair: first the chosen text, then the rejected one; notes). Raises DataError if none is left."""
    room, lengths = seq_length + 1, texts.lengths.reshape(-1, 2)
    kept = np.array([pair_lengths(int(chosen), int(rejected), room) for chosen, rejected in lengths])
    equal = np.array([np.array_equal(texts.text(2 * n)[0], texts.text(2 * n + 1)[0]) for n in range(len(lengths))])
    flat = kept.reshape(-1)
    counted = np.array([int(texts.text(n)[1][1 : flat[n]].sum()) for n in range(len(flat))]).reshape(-1, 2)
    lost, cut = (counted == 0).any(1) & ~equal, (kept < lengths).any(1)
    notes = _notes(
        replace(texts, places=texts.places[::2], lines=texts.lines[::2]),
        files,
        {
            "have two equal answers, and are left out": equal,
            f"are longer than --seq-length {seq_length}, and lose the end of an answer": cut & ~lost & ~equal,
            f"have no answer within --seq-length {seq_length}, and are left out": lost,
        },
        "pairs",
    )
    rows = [[2 * int(pair), 2 * int(pair) + 1] for pair in np.flatnonzero(~equal & ~lost)]
    if not rows:
        raise DataError(f"{', '.join(map(str, files))}: no pair of answers", "; ".join(notes))
    return ChatSamples(texts, files, rows, flat, seq_length, pad, apart=True), notes


def pack(lengths: np.ndarray, room: int, numbers: Sequence[int]) -> list[list[int]]:
    """The numbers in rows whose lengths sum to at most `room`: the longest first, each into the fullest row where it fits.

    >>> pack(np.array([2, 5, 3, 4]), 7, [0, 1, 2, 3])
    [[1, 0], [3, 2]]
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room that is left, row), sorted
    for place in np.argsort(-lengths, kind="stable"):
        length = int(lengths[place])
        at = bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            left, row = open_rows.pop(at)
        else:
            left, row = room, len(rows)
            rows.append([])
        rows[row].append(int(numbers[place]))
        if left - length > 1:
            insort(open_rows, (left - length, row))
    return rows


def _notes(texts: EncodedTexts, files: Sequence[str], cases: dict[str, np.ndarray], what: str = "conversations"):
    """A note for each case with its number of texts, and the first of them."""
    notes = json.loads(texts.notes.tobytes())
    for words, which in cases.items():
        if places := np.flatnonzero(which).tolist():
            named = [f"{files[texts.places[n]]}, line {texts.lines[n]}" for n in places[:NAMED]]
            more = ", ..." * (len(places) > NAMED)
            notes.append(f"{len(places):,} of {len(which):,} {what} {words} ({'; '.join(named)}{more})")
    return notes


def end_of_turn(texts: EncodedTexts) -> Optional[int]:
    """The token that ends an answer: the last token of most of them; None if they do not agree."""
    [(token, count)] = Counter(texts.stops[texts.stops >= 0].tolist()).most_common(1) or [(None, 0)]
    return token if count * 2 > np.count_nonzero(texts.stops >= 0) else None
