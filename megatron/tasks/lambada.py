# SPDX-License-Identifier: Apache-2.0
"""LAMBADA (arXiv:1606.06031): does the model predict the last word of a passage?

strict:      the last word, all of its tokens, after the passage without it
non-strict:  the last token of the passage
A word counts when every one of its tokens is the likeliest one.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatron.errors import DataError

LOGITS_BYTES = 256e6  # logits that may exist at a time


class Example(NamedTuple):
    """A passage as tokens, of which the last `answer` are to be predicted."""

    tokens: list[int]
    answer: int


def read_examples(path, tokenizer, *, strict: bool) -> list[Example]:
    """The passages of a JSON-lines file ({"text": ...}). Raises DataError naming the line of a bad one."""
    examples = []
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}", do="check --valid-data") from None
    for number, line in enumerate(lines, 1):
        try:
            text = json.loads(line)["text"]
            head, word = split_last_word(text)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path}, line {number}: no passage", 'expected {"text": "at least two words"}') from None
        if strict:
            answer = tokenizer.encode(" " + word)
            examples.append(Example(tokenizer.encode(head) + answer, len(answer)))
        else:
            examples.append(Example(tokenizer.encode(text), 1))
    if not examples:
        raise DataError(f"{path} holds no passages")
    return examples


def split_last_word(text: str) -> tuple[str, str]:
    """The passage before its last word, without space at the ends, and the word.

    >>> split_last_word(" A cat sat on the mat ")
    ('A cat sat on the', 'mat')
    """
    word = text.split()[-1]
    head = text[: text.rfind(word)].strip()
    if not head:
        raise ValueError("only one word")
    return head, word


@torch.no_grad()
def count_correct(
    model,
    examples: Sequence[Example],
    *,
    longest: int,
    batch_size: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """How many examples the model gets right. Passages that are too long lose their beginning."""
    examples = [Example(tokens[-longest - 1 :], answer) for tokens, answer in examples]
    correct = done = 0
    for part in batches(sorted(examples, key=lambda example: len(example.tokens)), batch_size, model.vocab_size):
        correct += _correct(model, part)
        done += len(part)
        progress(done, len(examples))
    return correct


def batches(examples: list[Example], batch_size: int, vocab_size: int) -> Iterator[list[Example]]:
    """Examples side by side, no more than `batch_size` and no more than memory for logits allows."""
    part: list[Example] = []
    for example in examples:
        if part and (len(part) == batch_size or len(example.tokens) * (len(part) + 1) * vocab_size * 4 > LOGITS_BYTES):
            yield part
            part = []
        part.append(example)
    if part:
        yield part


def _correct(model, part: list[Example]) -> int:
    device = next(model.parameters()).device
    width = max(len(example.tokens) for example in part) - 1
    rows = [example.tokens[:-1] + [0] * (width - len(example.tokens) + 1) for example in part]  # padded at the end
    guesses = model.logits(torch.tensor(rows, device=device).t()).argmax(dim=-1).t().tolist()  # [b][s]
    right = 0
    for (tokens, answer), guess in zip(part, guesses):
        last = len(tokens) - 1
        right += guess[last - answer : last] == tokens[-answer:]
    return right
