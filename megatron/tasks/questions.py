# SPDX-License-Identifier: Apache-2.0
"""Readers of published question-answering files: a row -> a row for each of its questions, with options and answer.

Needs no torch.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron.data.published import texts_of
from megatron.data.tables import json_in
from megatron.errors import DataError


def race(row: Mapping[str, Any], path: Path, labelled: bool) -> Iterator[dict[str, Any]]:
    """RACE: an article, and questions about it."""
    asked, all_options = texts_of(row, "questions"), row["options"]
    answers = row["answers"] if labelled else row.get("answers", [""] * len(asked))
    if not (isinstance(all_options, list) and isinstance(answers, list)):
        raise ValueError("options and answers are no lists, with something for each question")
    questions = zip(asked, all_options, answers, strict=True)
    for number, (question, options, answer) in enumerate(questions):
        yield dict(
            id=f"{row['id']}-{number}", passage=row["article"], question=question, options=options, answer=answer
        )


def c3(row: Mapping[int, Any], path: Path, labelled: bool) -> Iterator[dict[str, Any]]:
    """C3: [[paragraphs, or turns of a dialogue], [questions], id]."""
    passage = "\n".join(texts_of(row, 0))
    for question in row[1]:
        options, answer = texts_of(question, "choice"), question["answer"] if labelled else question.get("answer", "")
        question_row = dict(passage=passage, question=question["question"], options=options)
        if labelled and answer not in options:
            raise ValueError(f"the answer {answer!r} is none of the options")
        question_row["answer"] = str(options.index(answer)) if labelled or answer in options else ""
        yield question_row | ({"id": question["id"]} if "id" in question else {})


GAP = re.compile("#idiom[0-9]+#")
AROUND = 48  # characters of a passage on either side of a gap


def chid(row: Mapping[str, Any], path: Path, labelled: bool) -> Iterator[dict[str, Any]]:
    """CHID: passages with gaps for idioms. The answers are in a separate file next to that of the passages."""
    answers = _answers(path.with_name(f"{path.stem}_answer.json"), labelled)
    for passage in texts_of(row, "content"):
        for gap in GAP.finditer(passage):
            before, after = (GAP.sub("...", part) for part in (passage[: gap.start()], passage[gap.end() :]))
            question = dict(
                id=gap[0], question=f"{before[-AROUND:]}_{after[:AROUND]}", options=texts_of(row, "candidates")
            )
            yield question | {"answer": str(answers[gap[0]] if labelled else answers.get(gap[0], ""))}


@lru_cache(maxsize=8)
def _answers(path: Path, labelled: bool) -> dict[str, int]:
    try:
        answers = json_in(path.read_text(encoding="utf-8"), str(path), "give an object: a gap's name, and its answer")
    except FileNotFoundError:
        if not labelled:
            return {}
        raise DataError(f"{path}: no such file, with the answers to the questions of the file next to it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} holds no answers: {error}") from None
    if not isinstance(answers, dict):
        raise DataError(f"{path} holds no answers: it is no object of the names of gaps")
    return answers
