# SPDX-License-Identifier: Apache-2.0
"""Compare a tokenizer with transformers' one: documents, prompts and conversations have to get the same ids."""

import random
import re
from collections.abc import Iterator
from typing import Any, Optional

from megatron.errors import CheckpointError
from megatron.tokenizer.base import PROBES, Tokenizer
from megatron.tokenizer.chat_template import ChatTemplate, RefusedMessages
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer

MOST = 40  # added tokens that are tried
TALK = [
    dict(role="user", content="What is 2+2, na\u00efve friend?"),
    dict(role="assistant", content="It is  4.\n\tSure."),
    dict(role="user", content="And 3+3? "),
]
DROPPED = "white space after special tokens is dropped there, and here spaces alone"
KEPT = "nothing was written; --unchecked writes it without a comparison"
PARSED = (
    "names of special tokens are recognised in prompts; elsewhere they are text (in documents without --parse-special)"
)


def same_ids(theirs: Any, ours: Tokenizer, template: Optional[ChatTemplate]) -> str:
    """A notice that both give the same ids. theirs: AutoTokenizer's. Raises CheckpointError if their ids differ."""
    count, drops = 0, _drops_white_space(theirs, ours)
    white = re.compile(rf"(?:{ours.special_names}) *[^\S ]").search if drops else lambda text: None
    for what, text, expected, found in _compared(theirs, ours):
        if white(text):
            continue
        count += 1
        if list(expected) != list(found):
            raise CheckpointError(
                f"the tokenizer gives other ids for the {what} {text!r} in transformers",
                f"{_first_difference(theirs, expected, found)}",
                KEPT,
            )
    talks = _compare_talks(theirs, template) if template is not None and theirs.chat_template else 0
    more = f" and {talks} conversations" if talks else ""
    words = "; ".join([PARSED, *[DROPPED] * drops])
    return f"the tokenizer gives the same ids in transformers, for {count} documents and prompts{more}; {words}"


def _drops_white_space(theirs: Any, ours: Tokenizer) -> bool:
    """Whether theirs drops all white space after a special token, and ours spaces alone: of a model of SentencePiece whose
    charsmap leaves line ends (`convert.sentence_piece`).
    """
    after = ours.encode_after if isinstance(ours, SentencePieceTokenizer) else None
    drops = any(token.special and token.rstrip for token in theirs.added_tokens_decoder.values())
    return drops and after is not None and len(after("\n")) > 0


def _compared(theirs: Any, ours: Tokenizer) -> Iterator[tuple[str, str, list[int], list[int]]]:
    """(kind of text, the text, their ids, our ids)."""
    plain = dict(add_special_tokens=False, split_special_tokens=True)
    special, names = list(ours.special_tokens), [str(token) for token in theirs.added_tokens_decoder.values()]
    some = random.Random(0).sample(names, min(MOST, len(names)))
    added = [text for name in some for text in (f"a{name}b", f"a  {name} \n{name}{name}b", name)]
    documents = [text for text in (*PROBES, *added) if not any(name in text for name in special)]
    for text in documents:
        yield "document", text, theirs(text, **plain)["input_ids"], ours.encode(text)
    for text in (*PROBES, *added, "The king", " two  spaces "):
        yield "prompt", text, theirs(text)["input_ids"], ours.encode_prompt(text)


def _compare_talks(theirs: Any, template: ChatTemplate) -> int:
    """The number of conversations that get the same ids. Raises CheckpointError for one that does not."""
    count = 0
    for stop in range(1, len(TALK) + 1, 2):
        try:
            found = template.encode(TALK[:stop])
            expected = theirs.apply_chat_template(TALK[:stop], add_generation_prompt=True, tokenize=True)
        except (RefusedMessages, Exception):  # noqa: BLE001  templates are programs: this one takes other messages
            continue
        expected = list(expected if isinstance(expected, list) else expected["input_ids"])
        if expected != found:
            raise CheckpointError(
                f"a conversation of {stop} messages has other ids in transformers",
                _first_difference(theirs, expected, found),
                KEPT,
            )
        count += 1
    return count


def _first_difference(theirs: Any, expected: list[int], found: list[int]) -> str:
    """Words for the first ids that differ."""
    places = (place for place, pair in enumerate(zip(expected, found)) if pair[0] != pair[1])
    place = next(places, min(len(expected), len(found)))
    there, here = (theirs.convert_ids_to_tokens(ids[place : place + 4]) for ids in (expected, found))
    return f"token {place}: transformers has {there}, here are {here}"
