# SPDX-License-Identifier: Apache-2.0
"""The tasks of GLUE and CLUE as published: columns of texts and labels, and the labels of each task.

Files of questions about a text have a reader each: a row -> a row for each of its questions, with options and answer.
Needs no torch.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Optional

from megatron.data.labelled import LabelledTask
from megatron.data.tables import json_in
from megatron.errors import DataError

Columns = Mapping[str, Any]


def _marked(row: Columns) -> Columns:
    """CLUEWSC2020: the text with _the pronoun_ and [the noun] marked. Do they refer to the same thing?"""
    text, target = row["text"], row["target"]
    spans = [(target["span1_index"], target["span1_text"], "[]"), (target["span2_index"], target["span2_text"], "__")]
    for start, words, marks in sorted(spans, reverse=True):
        end = start + len(words)
        if not 0 <= start < end <= len(row["text"]):
            raise ValueError(f"{words!r} cannot stand at {start} of its text")
        text = text[:start] + marks[0] + text[start:end] + marks[1] + text[end:]
    return {**row, "text": text}


def _joined_keywords(row: Columns) -> Columns:
    """CSL: are these the keywords of the abstract?"""
    return {**row, "keywords": " ".join(texts_of(row, "keyword"))}


def texts_of(row: Mapping[Any, Any], name: Any) -> list[str]:
    """A list of texts. Raises ValueError for a single text, which Python would iterate letter by letter."""
    texts = row[name]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is no list of texts")
    return texts


def _task(name: str, labels: str, **more) -> LabelledTask:
    return LabelledTask(name, labels=tuple(labels.split()), **more)


PAIR = dict(text="sentence1", text_pair="sentence2")
BINARY, ENTAILMENT, INFERENCE = "0 1", "entailment not_entailment", "contradiction entailment neutral"
GLUE = (
    _task("CoLA", BINARY, columns=("source", "label", "star", "sentence")),
    _task("SST2", BINARY),
    _task("MRPC", BINARY, text="#1 String", text_pair="#2 String", label="Quality"),
    _task("QQP", BINARY, text="question1", text_pair="question2", label="is_duplicate"),
    _task("STSB", "", label="score", **PAIR),
    _task("MNLI", INFERENCE, label="gold_label", skip=("-",), **PAIR),
    _task("QNLI", ENTAILMENT, text="question", text_pair="sentence"),
    _task("RTE", ENTAILMENT, **PAIR),
    _task("WNLI", BINARY, **PAIR),
)
CLUE = (
    _task("AFQMC", BINARY, **PAIR),
    _task("TNEWS", " ".join(str(code) for code in range(100, 117) if code not in (105, 111))),
    _task("IFLYTEK", " ".join(map(str, range(119)))),
    _task("CMNLI", INFERENCE, skip=("-",), **PAIR),
    _task("CLUEWSC", "false true", text="text", prepare=_marked),
    _task("CSL", BINARY, text="keywords", text_pair="abst", prepare=_joined_keywords),
    _task("OCNLI", INFERENCE, skip=("-",), **PAIR),
)
PUBLISHED = {task.name: task for task in (*GLUE, *CLUE)}
_OTHER_NAMES = {"wsc": "cluewsc", "cluewsc2020": "cluewsc", "qqpairs": "qqp", "cmrc": "cmrc2018"}


def plain_name(name: str) -> str:
    """The canonical spelling of a task's name: SST-2 and sst2 are sst2, CLUE-TNEWS is tnews."""
    plain = name.lower().replace("-", "").replace("_", "")
    plain = plain[4:] if plain.startswith(("clue", "glue")) and not plain.startswith("cluewsc") else plain
    return _OTHER_NAMES.get(plain, plain)


def published_task(name: str) -> Optional[LabelledTask]:
    """The task of GLUE or CLUE with this name, in any spelling; None if there is none."""
    return next((task for known, task in PUBLISHED.items() if plain_name(name) == known.lower()), None)


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
