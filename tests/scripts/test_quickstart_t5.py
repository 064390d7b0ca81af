# SPDX-License-Identifier: Apache-2.0
"""The encoder-decoder's quickstart, as a newcomer runs it, with four steps of pretraining."""

import json
import re

import pytest

pytestmark = pytest.mark.full


def test_from_corpus_to_a_task(copy, bash):
    said = bash("scripts/quickstart_t5.sh", "--train-iters", "4", "--log-interval", "2").stdout
    run = copy / "runs" / "quickstart_t5"
    assert re.search(r"iteration +4/ +4 \|.* lm loss: ", said)
    guess, tokens = re.search(r"how often each token comes: ([\d.]+), (\d+) tokens", said).groups()
    assert 3 < float(guess) < 7 and 20 < int(tokens) < 1124
    filled = [json.loads(line) for line in (run / "filled.jsonl").read_text().splitlines()]
    assert len(filled) == 200 and all(line["prompt"].count("<extra_id_0>") == 1 for line in filled)
    assert re.search(r"the very word in \d+% of 200 gaps; 'the' everywhere: \d+%", said)
    right, one = re.search(r"right: ([\d.]+)% of \d+ passages; ([\d.]+)% are of one package", said).groups()
    counted = re.search(r"naive Bayes\): ([\d.]+)%", said)[1]
    assert "Look at runs/quickstart_t5/report.html and runs/quickstart_t5/task.html" in said
    page, of_task = ((run / name).read_text() for name in ("report.html", "task.html"))
    assert '"title":"Loss"' in page and "____" in page
    assert re.search(r'<div class="tile"><b>[\d.]+</b><span>([^<]*)', of_task)[1] == "accuracy and macro_f1"
    accuracy = float(re.search(r"<td>accuracy, validation</td><td>([\d.]+) at", of_task)[1])
    assert accuracy == pytest.approx(float(right) / 100, abs=6e-4) and "Confusion matrix" in of_task
    assert 0 <= float(right) <= 100 and float(counted) > 2 * float(one)
