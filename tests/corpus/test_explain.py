# SPDX-License-Identifier: Apache-2.0
"""`explain` says of every document what the run has done with it."""

import json

import numpy as np
import pytest

from megatron.corpus.explain import explain
from megatron.corpus.plan import save_plan
from megatron.data.indexed import IndexedDataset
from megatron.errors import DataError
from megatron.tools import corpus
from tests.corpus import toy_stages

VOCABULARY = "{tokenizer-type: NullTokenizer, vocab-size: 999, append-eod: true}"


def test_every_document_is_explained_as_a_plain_loop_would(small_corpus, tmp_path):
    plan = small_corpus.run(tmp_path / "out")
    seen: set[str] = set()
    wanted, found = [], []
    for number, text in enumerate(small_corpus.texts):
        [history] = explain(plan, tmp_path / "out", f"https://www.site{number % 4}.org/{number}")
        assert history.document["text"] == text
        found.append((history.fate, history.said[-1].reason))
        after = text.upper() if text.startswith("change") else text
        if len(after) < 12:
            wanted.append(("dropped", "too_short"))
            assert history.said[-1].figures == {"length": len(text)}
        elif after in seen:
            wanted.append(("dropped", "duplicate"))
        else:
            wanted.append(("kept", ""))
            seen.add(after)
        changed = [said.fate for said in history.said if said.stage.endswith("Upper")]
        assert changed in ([], ["changed"] if text.startswith("change") else ["kept"])
    assert found == wanted
    assert {fate for fate, _ in wanted} == {"kept", "dropped"}


@pytest.mark.parametrize("notes, reason", [("true", "noted"), ("false", "")])
def test_a_stage_that_says_nothing_is_read(small_corpus, tmp_path, monkeypatch, notes, reason):
    """Its notes, else what it has made."""
    upper = "stages:\n  - filter: ['tests.corpus.toy_stages:Upper']\n"
    stages = upper + f"  - tests.corpus.toy_stages:phases: {{parts: 2, notes: {notes}}}\n"
    plan = small_corpus.run(tmp_path / "out", stages=stages)
    monkeypatch.delattr(toy_stages, "explain")
    first = {text: number for number, text in reversed([*enumerate(small_corpus.texts)])}
    for number, text in [*enumerate(small_corpus.texts)][::3]:
        [history] = explain(plan, tmp_path / "out", f"https://www.site{number % 4}.org/{number}")
        wanted = ("kept", "") if first[text] == number else ("dropped", reason)
        assert (history.fate, history.said[-1].reason) == wanted


def test_a_document_is_named_by_its_line_too(small_corpus, tmp_path, capsys):
    plan = small_corpus.run(tmp_path / "out")
    lines = small_corpus.input.read_text().split("\n")
    for number, line in enumerate(lines[:-1], 1):
        [history] = explain(plan, tmp_path / "out", f"in.jsonl:{number}")
        if not line:
            assert history.said[0].reason == "a blank line"
        elif "broken" in line:
            assert history.fate == "set aside" and "not JSON" in history.said[0].reason
        else:
            assert history.document == json.loads(line)
    with pytest.raises(DataError, match=f"has {len(lines) - 1} lines"):
        explain(plan, tmp_path / "out", f"{small_corpus.input}:{len(lines)}")
    with pytest.raises(DataError, match="no document has the url or id 'nobody'"):
        explain(plan, tmp_path / "out", "nobody")
    save_plan(plan, tmp_path / "out")
    corpus.main(["explain", "in.jsonl:3", "--output", str(tmp_path / "out")])
    assert "https://www.site2.org/2: kept" in capsys.readouterr().out
    corpus.main(["explain", "https://www.site2.org/2", "--json", "--output", str(tmp_path / "out")])
    assert json.loads(capsys.readouterr().out)[0]["fate"] == "kept"


def test_equal_documents_are_told_apart_by_their_lines(small_corpus, tmp_path):
    small_corpus.input.write_text('{"text": "the same text"}\n{"text": "short"}\n' * 3)
    plan = small_corpus.run(tmp_path / "out")
    fates = [explain(plan, tmp_path / "out", f"in.jsonl:{number}")[0].fate for number in range(1, 7)]
    assert fates == ["kept", "dropped"] + ["dropped"] * 4
    reasons = [explain(plan, tmp_path / "out", f"in.jsonl:{number}")[0].said[-1].reason for number in (3, 4, 5)]
    assert reasons == ["duplicate", "too_short", "duplicate"]


def test_the_place_in_the_token_files_is_right(small_corpus, tmp_path):
    small_corpus.texts = [f"{number} {number + 1}" for number in range(90)]
    with open(small_corpus.input, "w") as file:
        for number, text in enumerate(small_corpus.texts):
            file.write(json.dumps(dict(text=text, id=number)) + "\n")
    stages = f"stages:\n  - filter: ['tests.corpus.toy_stages:Upper']\n  - tokenize: {VOCABULARY}\n"
    small_corpus.shard_mb = 0.0005
    plan = small_corpus.run(tmp_path / "out", stages=stages)
    dataset = IndexedDataset(str(tmp_path / "out/final/text_document"))
    assert len(plan.phases["02-tokenize.tokens"]) > 3
    for number in (0, 17, 55, 89):
        [history] = explain(plan, tmp_path / "out", str(number))
        place = int(history.said[-1].place.split()[1].rstrip(","))
        assert np.array_equal(dataset.get(place)[:2], [number, number + 1])
