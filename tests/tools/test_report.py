# SPDX-License-Identifier: Apache-2.0
import base64
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from megatron.errors import DataError
from megatron.telemetry.run_record import JsonLines
from megatron.tools.report import build, main, short
from megatron.tools.report_plots import smooth

CONFIG = dict(model=dict(num_layers=2, hidden_size=64, seq_length=16), optimizer=dict(lr=0.0006, lr_decay_iters=None))


def write_run(folder, steps=60, resumed_at=None, valid=True):
    lines = JsonLines(folder / "metrics.jsonl")
    header = dict(
        kind="run",
        time="2026-11-21T06:22:23+00:00",
        host="<here>",
        command=["pretrain_gpt.py", "--lr", "1"],
        versions={"torch": "2.13.0"},
        mesh=dict(pp=1, replicate=2, shard=1, cp=1, tp=1),
        config=CONFIG,
        parameters=5_123_456,
    )
    lines.write(header | dict(iteration=0))
    for n in range(1, steps + 1):
        if n - 1 == resumed_at:
            lines.write(header | dict(iteration=resumed_at))
        lines.write(
            {
                "kind": "step",
                "iteration": n,
                "consumed_samples": 8 * n,
                "batch_size": 8,
                "lm loss": math.nan if n == 7 else 2 + 5 / n,
                "learning_rate": 1e-3 / n,
                "grad_norm": 3.0 / n,
                "skipped": n == 7,
                "seconds": 0.5,
                "tokens_per_second": 256.0,
                "mfu": 0.4,
            }
        )
        if valid and n % 20 == 0:
            lines.write({"kind": "eval", "split": "validation", "iteration": n, "lm loss": math.log(1000 / n)})
    lines.close()
    return folder


class Wellformed(HTMLParser):
    """Fails on tags that do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.sources = [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_page_is_complete_and_self_contained(tmp_path):
    text = build(write_run(tmp_path, resumed_at=30), title="A & B")
    found = Wellformed(text)
    assert len(found.sources) == 4 and all(source.startswith("data:image/svg+xml;base64,") for source in found.sources)
    assert all(b"<svg" in base64.b64decode(source.partition(",")[2]) for source in found.sources)
    assert not re.search(r'(?:src|href)="?https?:', text) and "url(http" not in text
    assert "<title>A &amp; B</title>" in text and "&lt;here&gt;" in text and "<here>" not in text


def test_numbers_of_the_run_are_there(tmp_path):
    text = re.sub(r"<[^>]+>", "|", build(write_run(tmp_path, resumed_at=30)))
    for shown in (
        "5.12 M parameters",
        "2 layers of width 64",
        "dp 2",
        "in 2 launches",
        "480 samples",
        "7,680",
        "|0:00:30|",
        "500.0 ms",
        "skipped steps (fp16 overflow)||1|",
        "steps without a finite loss||1|",
        "|16.7|",
        "from 50.0",
        "MFU 40.0%",
        "--lr||0.0006|",
        "torch 2.13.0",
        "started from iterations||0, 30|",
    ):
        assert shown in text, shown
    assert "--lr-decay-iters" not in text


def test_samples_and_evaluation_are_shown_when_there(tmp_path):
    write_run(tmp_path)
    (tmp_path / "samples.txt").write_text("Once <upon> a time")
    assert "Once &lt;upon&gt; a time" in build(tmp_path)
    lines = [dict(prompt="One", text="One two"), dict(prompt="Three", completion=" four"), ["no record"]]
    (tmp_path / "generations.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{torn")
    (tmp_path / "evaluation.json").write_text(
        '{"wikitext": {"perplexity": 12.5, "window": [1, 2]}, "files": [{"n": 1}]}'
    )
    text = build(tmp_path)
    assert "<mark>One</mark> two" in text and "<mark>Three</mark> four" in text and "Once" not in text
    assert "wikitext / perplexity</td><td>12.5<" in text and "window</td><td>1 2<" in text and "files / 1 / n" in text


def test_sections_without_content_are_left_out(tmp_path):
    text = build(write_run(tmp_path, valid=False))
    assert "What the model writes" not in text and "Evaluation" not in text and "perplexity" not in text


def test_a_short_run_and_one_without_numbers_are_no_problem(tmp_path):
    text = build(write_run(tmp_path, steps=1))
    assert "<img" in text
    other = tmp_path / "bare"
    other.mkdir()
    JsonLines(other / "metrics.jsonl").write(dict(kind="step", iteration=1, consumed_samples=8))
    assert "<img" not in build(other)


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(DataError, match="metrics.jsonl: no such file"):
        build(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"kind": "run", "iteration": 0}\n')
    with pytest.raises(DataError, match="no training step"):
        build(tmp_path)
    write_run(tmp_path)
    (tmp_path / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="evaluation.json: not valid JSON"):
        build(tmp_path)


def test_command_writes_the_page(tmp_path, capsys):
    write_run(tmp_path)
    main([str(tmp_path)])
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    main([str(tmp_path / "metrics.jsonl"), "--output", str(tmp_path / "new" / "page.html"), "--title", "Mine"])
    assert "<h1>Mine</h1>" in (tmp_path / "new" / "page.html").read_text()


def test_command_of_a_missing_run_ends_with_the_data_code(tmp_path):
    command = [sys.executable, "-m", "megatron.tools.report", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 4 and "no such file" in done.stderr and "Traceback" not in done.stderr


def test_smoothing_keeps_lines_and_lengths():
    line = [(n, 2.0 * n) for n in range(200)]
    assert [at for at, _ in smooth(line)] == list(range(200))
    assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])
    assert smooth([]) == [] and smooth([(1, 3.0)]) == [(1, 3.0)]


def test_short_counts():
    assert [short(n) for n in (0, 9999, 12_345, 1.5e6, 174.6e9, 2e12)] == [
        "0",
        "9,999",
        "12.3 k",
        "1.50 M",
        "174.60 B",
        "2.00 T",
    ]
