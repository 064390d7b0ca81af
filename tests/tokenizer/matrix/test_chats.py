# SPDX-License-Identifier: Apache-2.0
"""Conversations: prompts, training with masks, and pairs of answers, compared with transformers' apply_chat_template.

Names of special tokens in messages are text here, and special tokens there. Such conversations are compared with the pieces
of the text between the template's special tokens, each encoded by transformers with names as text (`by_pieces`).
"""

import json
import re

import numpy as np
import pytest

from megatron.tasks.chat_samples import TextEncoder
from megatron.tokenizer.chat_template import RefusedMessages, find_template
from tests.tokenizer.matrix.differences import assert_equal
from tests.tokenizer.matrix.layouts import FAMILIES, VARIANTS
from tests.tokenizer.matrix.templates import blocks

TALKING = [name for name, (family, _) in VARIANTS.items() if FAMILIES[family].template and not name.endswith("alone")]
every_variant = pytest.mark.parametrize("variant", TALKING)
MARK = "\uf123"  # stands in names that are text; no message has it


class Chats:
    """Conversations as transformers encodes them, with names in messages as text."""

    def __init__(self, matrix, variant: str, template=None):
        self.theirs, self.template = matrix.theirs(variant), template
        self.names = {token.content: token for token in self.theirs.added_tokens_decoder.values() if token.special}
        self.any = "|".join(map(re.escape, sorted(self.names, key=len, reverse=True))) or "(?!)"
        self.legacy = matrix.prepends_always(variant)

    def text(self, messages, prompt: bool) -> str:
        """The template's text, with a mark in names of messages. Raises whatever the template raises."""
        broken = [dict(one, content=re.sub(self.any, self._broken, one["content"])) for one in messages]
        more = dict(add_generation_prompt=prompt, tokenize=False, chat_template=self.template)
        return self.theirs.apply_chat_template(broken, **more)

    @staticmethod
    def _broken(found) -> str:
        return found[0][0] + MARK + found[0][1:]

    def ids(self, messages, prompt: bool = False) -> list[int]:
        """transformers' ids if no message has a name, else those of pieces."""
        text = self.text(messages, prompt)
        if MARK in text:
            return self.by_pieces(text)
        more = dict(add_generation_prompt=prompt, chat_template=self.template)
        expected = self.theirs.apply_chat_template(messages, **more)["input_ids"]
        assert self.by_pieces(text) == expected, "the pieces are not the whole"
        return expected

    def by_pieces(self, text: str) -> list[int]:
        if self.theirs.split_special_tokens:
            return self._plain(text.replace(MARK, ""))
        ids, pieces = [], re.split(f"({self.any})", text)
        flags = [self.names.get(piece) for piece in pieces]
        for before, piece, after in zip([None, *flags[:-1]], pieces, [*flags[1:], None], strict=True):
            if piece in self.names:
                ids.append(self.theirs.convert_tokens_to_ids(piece))
                continue
            piece = piece.lstrip() if before and before.rstrip else piece
            piece = piece.rstrip() if after and after.lstrip else piece
            ids += self._piece(piece, first=not ids) if piece else []
        return ids

    def _piece(self, piece: str, first: bool) -> list[int]:
        piece = piece.replace(MARK, "")
        if first or self.legacy:
            return self._plain(piece)
        newline, ids = self._plain("\n"), self._plain("\n" + piece)  # no space before a text that is not the beginning
        return ids[len(newline) :] if ids[: len(newline)] == newline else self._plain(piece)

    def _plain(self, text: str) -> list[int]:
        return self.theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] if text else []


def talks_of(matrix, variant: str):
    """Conversations. Where merges make special tokens of text, transformers has no ids of names that are text."""
    return matrix.talks(variant, named=not variant.endswith("merged")).items()


@pytest.mark.sampled(10)
@every_variant
def test_prompts(matrix, variant):
    chats, template = Chats(matrix, variant), find_template([matrix.folder(variant)], matrix.ours(variant))

    def rows():
        for title, messages in talks_of(matrix, variant):
            for stop in range(1, len(messages)):
                if messages[stop - 1]["role"] != "user":
                    continue
                try:
                    expected = chats.ids(messages[:stop], prompt=True)
                except AssertionError:
                    raise
                except Exception:  # a template is a program: this one refuses the messages
                    with pytest.raises(RefusedMessages):
                        template.encode(messages[:stop])
                    continue
                yield title, str(messages[:stop]), expected, template.encode(messages[:stop])

    assert_equal(f"{variant}, prompts of chats", chats.theirs, rows())


def answers_of(chats: Chats, messages) -> tuple[list[int], list[int], list[int]] | None:
    """(the ids of a conversation, 1 for those of answers, the last token of each answer); None if a prompt is no beginning.

    An answer is what follows its prompt, up to its last special token if white space alone follows that.
    """
    whole, special = chats.ids(messages), set(map(chats.theirs.convert_tokens_to_ids, chats.names))
    counted, ends = [0] * len(whole), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = chats.ids(messages[:number], prompt=True), chats.ids(messages[: number + 1])
        if number == len(messages) - 1:
            through = whole
        stop = max([n + 1 for n in range(len(before), len(through)) if through[n] in special], default=len(through))
        stop = len(through) if chats.theirs.decode(through[stop:]).strip() else stop
        if whole[: len(before)] != before or whole[:stop] != through[:stop] or len(before) >= stop:
            return None
        counted[len(before) : stop] = [1] * (stop - len(before))
        ends.append(whole[stop - 1])
    return whole, counted, ends


@pytest.mark.sampled(10)
@every_variant
def test_training(matrix, variant):
    """Which tokens are answers: those that follow prompts. What no prompt begins is refused."""
    chats, template = Chats(matrix, variant), find_template([matrix.folder(variant)], matrix.ours(variant))
    refused, wrong = [], []

    def rows():
        for title, messages in talks_of(matrix, variant):
            try:
                expected = answers_of(chats, messages)
            except AssertionError:
                raise
            except Exception:  # the template refuses them
                expected = None
            try:
                found = template.encode_answers(messages)
            except RefusedMessages as error:
                refused.append((title, str(error), expected))
                continue
            if expected is None:
                wrong.append(f"{title}: {messages} are not refused")
                continue
            yield title, str(messages), expected[0], found.ids
            if (list(map(int, found.counted)), found.ends) != expected[1:]:
                wrong.append(f"{title}: {list(map(int, found.counted))} of {found.ids}, not {expected[1]}")

    assert_equal(f"{variant}, training", chats.theirs, rows())
    assert not wrong, "\n".join([variant, *wrong[:3]])
    assert not [one for one in refused if one[2]], f"{variant}: {[one for one in refused if one[2]][:3]}"


@pytest.mark.sampled(10)
@every_variant
def test_training_with_blocks(matrix, variant, tmp_path):
    """Answers that the template marks, beside transformers' mask of the assistant's tokens."""
    source = blocks(matrix.family(variant).template)
    (tmp_path / "chat.jinja").write_text(source)
    template = find_template([matrix.folder(variant)], matrix.ours(variant), str(tmp_path / "chat.jinja"))
    theirs, wrong, count = matrix.theirs(variant), [], 0
    for title, messages in matrix.talks(variant, named=False).items():
        try:
            found = template.encode_answers(messages)
        except RefusedMessages:
            continue
        more = dict(return_assistant_tokens_mask=True, chat_template=source)
        expected = theirs.apply_chat_template(messages, **more)
        count += 1
        if (found.ids, list(map(int, found.counted))) != (expected["input_ids"], expected["assistant_masks"]):
            wrong.append(
                f"{title}: {list(map(int, found.counted))} and not {expected['assistant_masks']} of {found.ids}"
            )
    assert not wrong and count, "\n".join([f"{variant}, blocks: {len(wrong)} of {count}", *wrong[:3]])


@pytest.mark.sampled(10)
@every_variant
def test_pairs(matrix, variant, tmp_path):
    """Pairs of texts, and of conversations, as samples for DPO."""
    chats, ours = Chats(matrix, variant), matrix.ours(variant)
    template = find_template([matrix.folder(variant)], ours)
    lines, expected = [], []
    texts = [text for text in matrix.texts(variant).values() if len(text.split()) > 2]
    for text in texts:
        prompt, answers = text[: len(text) // 3], (text[len(text) // 3 :], " no")
        if prompt.strip():
            lines.append(dict(prompt=prompt, chosen=answers[0], rejected=answers[1]))
            expected += [_with_end(ours.eod, *matrix.pair(variant, prompt, answer)) for answer in answers]
    assert _read(ours, None, tmp_path / "texts.jsonl", lines) == expected, variant
    lines, expected = [], []
    for _, messages in talks_of(matrix, variant):
        pair = [*messages[:-1], messages[-1]], [*messages[:-1], dict(messages[-1], content="No.")]
        try:
            found = [answers_of(chats, one) for one in pair]
        except AssertionError:
            raise
        except Exception:
            continue
        if all(found):
            lines.append(dict(prompt=messages[:-1], chosen=messages[-1:], rejected=pair[1][-1:]))
            expected += [_last_answer(chats, *one, messages[:-1]) for one in found]
    assert _read(ours, template, tmp_path / "talks.jsonl", lines) == expected, variant


def _with_end(end, ids, start) -> tuple[list[int], list[int]]:
    ids = [*ids, end] if end is not None and ids[-1] != end else [*ids]
    return ids, [0] * start + [1] * (len(ids) - start)


def _last_answer(chats, ids, counted, ends, prompt) -> tuple[list[int], list[int]]:
    before = len(chats.ids(prompt, prompt=True))
    return ids, [0] * before + counted[before:]


def _read(tokenizer, template, path, lines) -> list[tuple[list[int], list[int]]]:
    """The texts of a file as the task reads them: (ids, 1 for those in the loss)."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = TextEncoder(tokenizer, template, pairs=True).read([str(path)], None, lambda text: None)
    both = (found.text(number) for number in range(len(found)))
    return [tuple(np.asarray(part).tolist() for part in one) for one in both]
