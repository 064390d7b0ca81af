# SPDX-License-Identifier: Apache-2.0
"""Which tokens of which texts the next forward pass computes. Needs no torch.

Texts that have all but their newest token in the cache come first, with that token each. Then come prompts, oldest first,
in chunks of at most `chunk` tokens in all, so that a long prompt delays the others by one chunk at most. A text that waits
is admitted when there is room for all of its tokens. If the cache is full, the newest texts give their blocks back and
wait again, to be computed once more. Nobody takes blocks from an older text, so the oldest one goes on, and each text ends.

Chunks end at multiples of `chunk`: how a prompt is divided does not depend on its neighbours.

    >>> from megatron.inference.sampling import Sampling
    >>> scheduler = Scheduler(BlockPool(8, 4), longest=32, max_batch=2, chunk=8)
    >>> one = scheduler.add(Request((5, 6, 7), Sampling(2)))
    >>> other = scheduler.add(Request(tuple(range(10)), Sampling(9)))
    >>> [(row.text.number, row.start, row.stop, row.chooses) for row in scheduler.plan()]
    [(0, 0, 3, True)]
    >>> scheduler.chosen(one, 8)
    >>> [(row.text.number, row.start, row.stop, row.chooses) for row in scheduler.plan()]
    [(0, 3, 4, True), (1, 0, 8, False)]

Several passes may be under way, one for each stage of a pipeline: a text whose token is being chosen has no part in the
next one. Passes must be computed in the order in which they were planned: a block is shared, or given to another text, as
soon as the pass that fills it, or last reads it, is planned.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from megatron.inference.blocks import BlockPool, Table
from megatron.inference.requests import FinishReason, Request

NONE = -1  # in the place of a snapshot's number
SNAPSHOTS = 2  # of states, for each text that may run


@dataclass(eq=False)
class Text:
    """The state of a request.

    number    of the request
    limit     new tokens, at most
    tokens    the prompt and the new tokens
    computed  tokens whose keys and values the planned passes put into the cache
    scored    tokens of the prompt whose successors the planned passes score (`Request.prompt_logprobs`)
    cached    tokens of the prompt that were found in the cache; None before the text was admitted
    waits     a planned pass chooses its next token
    ends      tokens that end it
    finish    why it has ended; None while it goes on
    order     texts of lower ones go first; by default the number
    source    the snapshot of states from which it begins, before its first pass
    kept      the digest of its tokens at the last snapshot, if it has new ones there
    """

    number: int
    request: Request
    limit: int
    tokens: list[int]
    ends: frozenset[int]
    table: Table = field(default_factory=Table)
    computed: int = 0
    scored: int = 0
    cached: Optional[int] = None
    waits: bool = False
    finish: Optional[FinishReason] = None
    order: int = 0
    source: int = NONE
    kept: bytes = b""

    def __lt__(self, other: "Text") -> bool:
        return (self.order, self.number) < (other.order, other.number)

    @property
    def new(self) -> int:
        """The number of new tokens."""
        return len(self.tokens) - len(self.request.prompt)


class PlannedRow(NamedTuple):
    """The tokens of a text that a pass computes: from start to stop.

    runs:    blocks of the text, as (first, number) of consecutive ones
    chooses: the pass chooses the text's next token
    scores:  the tokens of the prompt whose successors the pass scores
    source:  the snapshot of states from which the text begins; NONE: zeros, or its own
    keep:    the number of the snapshot of its states after the pass; NONE: it keeps none
    """

    text: Text
    start: int
    stop: int
    runs: tuple[tuple[int, int], ...]
    chooses: bool
    scores: range
    source: int = NONE
    keep: int = NONE


class Snapshots:
    """Copies of the states of texts, by the digest of their tokens: a state is one of all tokens so far, so a text that
    begins with the blocks of another one begins with a copy of its state there, too.

    most: copies that are kept; the least recently used go first
    """

    def __init__(self, most: int):
        self.most, self._numbers, self._new, self._dropped = most, OrderedDict(), set(), []
        self._count = 0

    def begin_pass(self) -> None:
        """Copies of the passes before can be used from now on."""
        self._new.clear()

    def longest(self, digests: Sequence[bytes]) -> int:
        """How many of the blocks with these digests a text can begin with."""
        has = lambda digest: digest in self._numbers and digest not in self._new
        return next((n for n in range(len(digests), 0, -1) if has(digests[n - 1])), 0)

    def number(self, digest: bytes) -> int:
        """The number of a copy, which is used."""
        self._numbers.move_to_end(digest)
        return self._numbers[digest]

    def keep(self, digest: bytes, replaced: bytes = b"") -> int:
        """The number of a new copy, of the pass that is being planned; NONE: there is one of these tokens.

        replaced: the digest of a copy that is not needed any more
        """
        if replaced in self._numbers:
            self._dropped.append(self._numbers.pop(replaced))
            self._new.discard(replaced)
        if digest in self._numbers:
            self._numbers.move_to_end(digest)
            return NONE
        self._count += 1
        self._numbers[digest] = self._count
        self._new.add(digest)
        while len(self._numbers) > self.most:
            oldest, number = self._numbers.popitem(last=False)
            self._new.discard(oldest)
            self._dropped.append(number)
        return self._count

    def forget(self) -> None:
        """Drop all copies."""
        self._dropped += self._numbers.values()
        self._numbers.clear()
        self._new.clear()

    def dropped(self) -> tuple[int, ...]:
        """The numbers of copies that ranks may drop after the pass that was planned; each is named once."""
        numbers, self._dropped = tuple(self._dropped), []
        return numbers


class Scheduler:
    """longest: tokens of a text; max_batch: texts that run; chunk: tokens of prompts in a pass; stages: passes that may be
    under way at once; snapshots: of a model whose layers have states
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        longest: int,
        max_batch: int,
        chunk: int,
        stages: int = 1,
        snapshots: Optional[Snapshots] = None,
    ):
        assert pool.blocks * pool.size >= longest, f"{pool.blocks} blocks of {pool.size} tokens for texts of {longest}"
        self.pool, self.longest, self.max_batch, self.chunk, self.stages = pool, longest, max_batch, chunk, stages
        self.snapshots = snapshots
        self.running: list[Text] = []  # both oldest first
        self.waiting: list[Text] = []
        self.preemptions, self._count = 0, 0

    def add(self, request: Request, order: Optional[int] = None) -> Text:
        """Let a request wait for its turn. order: the number of the text with which it waits; default: after all."""
        limit = min(request.sampling.tokens_to_generate, self.longest - len(request.prompt))
        text = Text(self._count, request, limit, list(request.prompt), request.sampling.ends(request.end))
        text.order = text.number if order is None else order
        self._count += 1
        insort(self.waiting, text)
        return text

    @property
    def busy(self) -> bool:
        """Whether a text runs or waits."""
        return bool(self.running or self.waiting)

    def plan(self) -> list[PlannedRow]:
        """The next pass; empty if no text can be computed now."""
        rows: list[PlannedRow] = []
        if self.snapshots is not None:
            self.snapshots.begin_pass()
        most, left = self._most_rows(), self.chunk
        ready = [text for text in self.running if not text.waits]
        for text in ready:
            last = len(text.tokens)
            if text.computed == last - 1 and len(rows) < most and self._make_room(text, last, rows):
                rows.append(self._row(text, last))
        for text in ready:
            if text.computed >= len(text.tokens) - 1 or text not in self.running:
                continue
            stop = self._end_of_chunk(text, text.computed)
            if len(rows) == most or stop - text.computed > left or not self._make_room(text, stop, rows):
                return rows  # newer prompts do not overtake it
            left -= stop - text.computed
            rows.append(self._row(text, stop))
        while self.waiting and len(rows) < most and len(self.running) < self.max_batch:
            text = self.waiting[0]
            if text.waits or not self._admit(text, left):
                break
            stop = self._end_of_chunk(text, text.computed)
            left -= stop - text.computed
            fits = self._make_room(text, stop, rows)
            assert fits, "`_admit` has counted the blocks"
            rows.append(self._row(text, stop))
        return rows

    def chosen(self, text: Text, token: int) -> None:
        """A pass has chosen the next token of a text."""
        text.waits = False
        if text.finish:
            return
        if token in text.ends:
            text.finish = "stop"
        else:
            text.tokens.append(token)
            if text.new == text.limit:
                text.finish = "length"
        if text.finish:
            self._leave(text)

    def cancel(self, text: Text) -> None:
        """End a text now. A pass that is under way may still choose a token for it, which is ignored."""
        text.finish = "cancelled"
        self._leave(text)

    def _most_rows(self) -> int:
        """Texts in a pass: with several stages a part of all, so that each stage has some."""
        texts = min(len(self.running) + len(self.waiting), self.max_batch)
        return max(1, -(-texts // self.stages))

    def _end_of_chunk(self, text: Text, start: int) -> int:
        return min(len(text.tokens), (start // self.chunk + 1) * self.chunk)

    def _row(self, text: Text, stop: int) -> PlannedRow:
        """Plan the tokens of a text up to `stop`. From now on other texts may share its full blocks."""
        start, text.computed = text.computed, stop
        text.waits = chooses = stop == len(text.tokens)
        scores = range(0)
        if text.request.prompt_logprobs:
            scores = range(text.scored, max(text.scored, min(stop, len(text.request.prompt) - 1)))
            text.scored = scores.stop
        if stop // self.pool.size > len(text.table.digests):
            self.pool.remember(text.table, text.tokens[:stop])
        row = PlannedRow(text, start, stop, tuple(map(tuple, text.table.runs)), chooses, scores)
        if self.snapshots is None:
            return row
        source, text.source = text.source, NONE
        if stop % self.pool.size:
            return row._replace(source=source)
        digest, own = text.table.digests[-1], start >= len(text.request.prompt)
        keep = self.snapshots.keep(digest, text.kept)
        text.kept = digest if own and keep != NONE else b""  # of its new tokens, one copy: the last
        return row._replace(source=source, keep=keep)

    def _admit(self, text: Text, left: int) -> bool:
        """Let a text run, with the beginning that the cache has of it, if the rest fits into the cache and its first chunk
        into a pass with room for `left` tokens. The last token is always computed: its successor is chosen. So are those
        of the prompt that are to be scored.
        """
        most = len(text.tokens) - 1
        if text.request.prompt_logprobs:
            most = min(most, text.scored)
        most //= self.pool.size
        if self.snapshots is not None:
            most = self.snapshots.longest(self.pool.known(text.tokens, most))
        found, unused = self.pool.found(text.tokens, most)
        start, needed = found * self.pool.size, -(-len(text.tokens) // self.pool.size) - found
        if self._end_of_chunk(text, start) - start > left or needed > self.pool.free - unused:
            return False
        text.computed = self.pool.share(text.table, text.tokens, most)
        if self.snapshots is not None and most:
            text.source = self.snapshots.number(text.table.digests[-1])
        if text.cached is None:
            text.cached = text.computed
        self.waiting.remove(text)
        insort(self.running, text)
        return True

    def _make_room(self, text: Text, tokens: int, rows: list[PlannedRow]) -> bool:
        """Give a text blocks for this many tokens, if need be those of newer texts that have no row yet."""
        while not self.pool.grow(text.table, tokens, len(text.request.prompt) + text.limit - 1):
            newest = self.running[-1]
            if newest is text or any(row.text is newest for row in rows):
                return False
            self.running.pop()
            self.pool.release(newest.table)
            newest.computed, self.preemptions = 0, self.preemptions + 1
            insort(self.waiting, newest)
        return True

    def _leave(self, text: Text) -> None:
        for texts in (self.running, self.waiting):
            if text in texts:
                texts.remove(text)
        self.pool.release(text.table)
