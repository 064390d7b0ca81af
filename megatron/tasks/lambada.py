# SPDX-License-Identifier: Apache-2.0
"""LAMBADA (arXiv:1606.06031): does the model predict the last word of a passage?

strict:      the last word, all of its tokens, after the passage without it
non-strict:  the last token of the passage
A word is correct if each of its tokens is the likeliest one.
"""

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatron.data.tables import refuse_half_letters, text_of_file
from megatron.errors import DataError
from megatron.inference.scoring import ALONE
from megatron.inference.stages import summed
from megatron.mpu.mesh import Axis


class Example(NamedTuple):
    """A passage as tokens, the last `answer` of which are to be predicted."""

    tokens: list[int]
    answer: int


def read_examples(path, tokenizer, *, strict: bool) -> list[Example]:
    """Read the passages of a JSON-lines file ({"text": ...}). Raises DataError for an invalid line, and names it."""
    examples = []
    lines = read_valid_data(path).split("\n")  # JSON may contain other line separators
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            head, word = split_last_word(text)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DataError(f"{path}, line {number}: no passage", 'expected {"text": "at least two words"}') from None
        refuse_half_letters(text, f"{path}, line {number}")
        if strict:
            tokens, start = tokenizer.encode_pair(head, f" {word}")
            examples.append(Example(tokens, len(tokens) - start))
        else:
            examples.append(Example([*tokenizer.prefix, *tokenizer.encode_special(text)], 1))
    if not examples:
        raise DataError(f"{path} holds no passages")
    return examples


def read_valid_data(path) -> str:
    """The text of --valid-data. Raises DataError for a file that is not UTF-8."""
    return text_of_file(path, str(path), do="check --valid-data")


def split_last_word(text: str) -> tuple[str, str]:
    """(passage before its last word, stripped; the word).

    >>> split_last_word(" A cat sat on the mat ")
    ('A cat sat on the', 'mat')
    """
    word = text.split()[-1]
    head = text[: text.rfind(word)].strip()
    if not head:
        raise ValueError("only one word")
    return head, word


@torch.no_grad()
def find_correct(
    model,
    examples: Sequence[Example],
    *,
    longest: int,
    batch_size: int,
    axis: Axis = ALONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> np.ndarray:
    """Whether the model gets each example right, bool. Long passages are truncated at the beginning.

    The ranks of `axis` take turns at the batches; each returns all results. `progress` receives (done so far, total).
    """
    examples = [Example(tokens[-longest - 1 :], answer) for tokens, answer in examples]
    # Sorted by length, so that there is little padding, and ranks have equal work.
    order = sorted(range(len(examples)), key=lambda number: len(examples[number].tokens))
    correct = torch.zeros(len(examples), dtype=torch.long, device=next(model.parameters()).device)
    for at in range(axis.rank * batch_size, len(examples), axis.size * batch_size):
        part = order[at : at + batch_size]
        correct[part] = _correct(model, [examples[number] for number in part]).long()
        progress(min(len(examples), at + (axis.size - axis.rank) * batch_size), len(examples))
    return summed(correct, model, axis).bool().cpu().numpy()


def _correct(model, part: list[Example]) -> torch.Tensor:
    """Whether the model gets each of these right, bool; False on ranks that are not the last pipeline stage."""
    width = max(len(example.tokens) for example in part) - 1
    rows = [example.tokens + [0] * (width + 1 - len(example.tokens)) for example in part]  # padded at the end
    tokens = torch.tensor(rows, device=next(model.parameters()).device).t()  # [s + 1, b]
    places = torch.arange(width).unsqueeze(1)  # [s, 1]
    lasts = torch.tensor([len(example.tokens) - 1 for example in part])  # [b]
    answers = torch.tensor([example.answer for example in part])
    wanted = ((places >= lasts - answers) & (places < lasts)).to(tokens.device)  # [s, b]
    scores = model.logits(tokens[:-1], wanted=wanted)
    if scores is None:
        return torch.zeros(len(part), dtype=torch.bool)
    misses = scores.argmax(dim=-1) != tokens[1:][wanted]
    columns = wanted.nonzero()[:, 1]
    return torch.zeros(len(part), device=tokens.device).index_add_(0, columns, misses.float()) == 0
