# SPDX-License-Identifier: Apache-2.0
"""Conversations and tasks exactly at a limit, against plain loops over small numbers, so that borders are frequent."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.data.loader import DOCUMENTS, IDS, MASK
from megatron.errors import DataError
from megatron.tasks.chat_samples import EncodedTexts, TextEncoder, conversation_samples, end_of_turn, pack, pair_samples
from tests.data.test_stale_caches import Bytes, template_of

TEXT = st.lists(st.booleans(), min_size=1, max_size=7)  # which of its tokens are answers


def encoded(texts, stops=None) -> EncodedTexts:
    """Texts whose tokens have numbers of their own."""
    lengths = [len(text) for text in texts]
    return EncodedTexts(
        tokens=np.arange(100, 100 + sum(lengths), dtype=np.int32),
        answers=np.array([one for text in texts for one in text], np.uint8),
        ends=np.cumsum(lengths, dtype=np.int64),
        stops=np.array(stops or [7] * len(texts), np.int32),
        places=np.zeros(len(texts), np.int32),
        lines=np.arange(1, len(texts) + 1, dtype=np.int32),
        notes=np.frombuffer(b"[]", np.uint8),
    )


def learned(text, room: int) -> int:
    """Tokens of answers that something before them predicts, of the first `room`."""
    return sum(text[1:room])


def said(notes, words: str) -> int:
    """How many conversations a note is about."""
    return sum(int(note.split()[0]) for note in notes if words in note)


@given(st.lists(TEXT, min_size=1, max_size=8), st.integers(1, 7), st.booleans())
@example([[0, 1, 1], [1, 1, 0, 1]], 6, True)  # a text that begins with an answer, after another one
@example([[0, 1], [0, 0, 0, 1]], 5, True)  # they fill a sample
def test_samples_of_conversations(texts, seq_length, packing):
    room, data = seq_length + 1, encoded(texts)
    used = [number for number, text in enumerate(texts) if learned(text, room)]
    if not used:
        with pytest.raises(DataError, match="no conversation with an answer"):
            conversation_samples(data, ["a.jsonl"], seq_length, 0, packing)
        return
    samples, notes = conversation_samples(data, ["a.jsonl"], seq_length, 0, packing)
    assert sorted(number for row in samples.rows for number in row) == used
    assert said(notes, "have no answer, and") == sum(not learned(text, 99) for text in texts)
    assert said(notes, "lose their end") == sum(len(texts[number]) > room for number in used)
    lost = sum(bool(learned(text, 99)) and not learned(text, room) for text in texts)
    assert said(notes, "have no answer within") == lost
    for row, sample in zip(samples.rows, samples, strict=False):
        assert packing or len(row) == 1
        ids, mask, documents = [], [], []
        for place, number in enumerate(row):
            tokens, text = data.text(number)[0][:room].tolist(), texts[number][:room]
            ids += tokens
            mask += [0.0, *map(float, text[1:])]  # nothing predicts a text's first token
            documents += [place] * len(tokens)
        assert len(ids) <= room
        assert sample[IDS].tolist() == ids + [0] * (room - len(ids))
        assert sample[MASK].tolist() == mask + [0.0] * (room - len(ids))
        if packing:
            assert sample[DOCUMENTS][: len(ids)].tolist() == documents and len(set(sample[DOCUMENTS])) >= len(row)


def plain_pack(lengths, room: int) -> list[list[int]]:
    """The longest first, each into the fullest row where it fits; a row with less than two places is full."""
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        left = [room - sum(lengths[one] for one in row) for row in rows]
        fits = [(free, place) for place, free in enumerate(left) if free >= max(2, lengths[number])]
        if fits:
            rows[min(fits)[1]].append(number)
        else:
            rows.append([number])
    return rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 12))
def test_rows_are_packed_as_a_plain_loop_does(lengths, room):
    found = pack(np.array(lengths), room, list(range(len(lengths))))
    assert found == plain_pack(lengths, room)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.integers(3, 9))
@example([([1, 0], [1, 1, 1])], 7)  # the first token of an answer without a prompt is never learned
def test_samples_of_pairs(pairs, seq_length):
    """Each answer has a token that is learned, within the length; otherwise the pair is left out, and said."""
    data, room = encoded([text for pair in pairs for text in pair]), seq_length + 1
    try:
        samples, notes = pair_samples(data, ["a.jsonl"], seq_length, 0)
    except DataError:
        rows, kept = [], None
    else:
        rows, kept = samples.rows, samples.lengths
        for row, sample in zip(rows, samples, strict=False):
            there = sum(int(kept[number]) for number in row)
            assert there <= room and sample[MASK][there:].sum() == 0 and all(kept[number] >= 1 for number in row)
        assert said(notes, "lose the end") == sum(
            any(kept[number] < len(pairs[row[0] // 2][number % 2]) for number in row) for row in rows
        )
    whole = [number for number, pair in enumerate(pairs) if sum(map(len, pair)) <= room]  # none of them is cut
    for number in whole:
        assert ([2 * number, 2 * number + 1] in rows) == all(learned(text, room) for text in pairs[number])


@pytest.mark.parametrize(
    "stops, end", [([5, 5, 6], 5), ([5, 6], None), ([5, 5, 6, 6], None), ([-1, 5, -1], 5), ([-1], None)]
)
def test_more_than_half_of_the_answers_say_what_ends_them(stops, end):
    assert end_of_turn(encoded([[1]] * len(stops), stops)) == end


@pytest.mark.parametrize("weight, counts", [(None, True), (1, True), (0, False)])
def test_a_message_counts_unless_its_weight_is_0(weight, counts):
    answer = dict(role="assistant", content="yes") | ({} if weight is None else dict(weight=weight))
    messages = [dict(role="user", content="so?"), answer]
    ids, counted, _ = TextEncoder(Bytes(), template_of(Bytes()))._encoded("a, line 1", messages, None)
    assert any(counted) == counts and len(ids) == len(counted)


@pytest.mark.parametrize("answer, ends", [("b", 1), ("b\0", 1), ("", 1)])
def test_an_answer_ends_once(answer, ends):
    """Also one that has the end of document already."""
    eod = 0
    tokenizer = SimpleNamespace(
        eod=eod, encode_pair=lambda prompt, text: ([*map(ord, prompt + text)], len(prompt)), parse_special=False
    )
    pair = SimpleNamespace(where="a", prompt="q", chosen=answer, rejected="c", tools=None)
    (ids, counted, stop), _ = TextEncoder(tokenizer, None, pairs=True)._pair(pair)
    assert (ids.count(eod), ids[-1], stop) == (ends, eod, eod) and counted[0] == 0 and all(counted[1:])
