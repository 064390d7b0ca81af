# SPDX-License-Identifier: Apache-2.0
"""The page of a corpus: its figures are those of a plain loop, its samples those of the smallest hashes."""

import html
import json
import re

import pytest
import xxhash

from megatron.corpus.driver import counts_by_phase
from megatron.corpus.filtering import KEPT
from megatron.corpus.report import funnel_of, make_page, read_samples

pytest.importorskip("matplotlib")


def test_the_funnel_is_that_of_a_plain_loop(small_corpus, tmp_path):
    more = ', {"tests.corpus.toy_stages:TooShort": {least: 20}}'
    plan = small_corpus.run(tmp_path / "out", more=more)
    funnel = funnel_of(plan, counts_by_phase(plan, tmp_path / "out"))
    texts = [text.upper() if text.startswith("change") else text for text in small_corpus.texts]
    first, second = [text for text in texts if len(text) >= 12], [text for text in texts if len(text) >= 20]
    kept = small_corpus.expected(20)
    assert [row["documents"] for row in funnel] == [len(texts), len(first), len(first), len(second), len(kept)]
    assert [row["bytes"] for row in funnel[:4]] == [sum(map(len, rows)) for rows in (texts, first, first, second)]
    rules = {rule: one["documents"] for row in funnel for rule, one in row["dropped"].items()}
    name = "tests.corpus.toy_stages:TooShort"
    wanted = {f"{name}.too_short": len(texts) - len(first), f"{name}-2.too_short": len(first) - len(second)}
    assert rules == wanted


def test_samples_are_those_with_the_smallest_hashes(small_corpus, tmp_path):
    small_corpus.texts = sorted(set(small_corpus.texts))
    plan = small_corpus.run(tmp_path / "out", head="samples: 3\n")
    found = read_samples(plan, tmp_path / "out")
    rank = lambda text: xxhash.xxh3_64_intdigest(text.encode())
    lines = [line for line in small_corpus.input.read_text().splitlines() if line and "broken" not in line]
    every = [json.loads(line)["text"] for line in lines]
    short = sorted({text for text in every if len(text) < 12}, key=rank)
    samples = [entry["text"] for entry in found["tests.corpus.toy_stages:TooShort.too_short"]]
    assert samples[0] == short[0] and len(samples) == 3 and all(len(text) < 12 for text in samples)
    assert len(found[KEPT]) == 3 and all(len(entry["text"]) >= 12 for entry in found[KEPT])


@pytest.mark.sampled(2)
def test_the_page_says_so(small_corpus, tmp_path):
    with open(small_corpus.input, "a") as file:
        file.write('{"text": "<script>alert(1)</script>", "url": "http://<b>.org/$x$"}\n')
    plan = small_corpus.run(tmp_path / "out", head="samples: 200\n")
    text = make_page(plan, tmp_path / "out")
    cells = [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", text, re.S)]
    assert f"{len(small_corpus.texts) + 1:,}" in cells and "not JSON" in cells
    assert "<script>" not in text and "http" not in re.sub(
        r"https?://", "", re.sub("<td>.*?</td>", "", text, flags=re.S)
    )
    for heading in ("Funnel", "By rule", "Kept documents", "Samples, dropped and kept"):
        assert f"<h2>{heading}</h2>" in text
    assert "Commonest domains" in text and "sizes" in text
    assert "complete" in text


def test_a_run_that_has_just_begun_has_a_page(small_corpus, tmp_path):
    plan = small_corpus.plan(tmp_path / "out")
    assert f"0 of {len(plan.tasks)} tasks are done" in make_page(plan, tmp_path / "out")
