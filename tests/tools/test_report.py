# SPDX-License-Identifier: Apache-2.0
import base64
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from megatron.errors import DataError, Interrupted
from megatron.pipeline.recorded import pipeline_of
from megatron.telemetry.curves import LAST_STEPS
from megatron.telemetry.events import EventLog
from megatron.telemetry.history import History, read_history
from megatron.telemetry.report_compare import tiles as compared
from megatron.telemetry.report_facts import perplexity, read_evaluation, tiles
from megatron.telemetry.run_record import JsonLines
from megatron.tools import report
from megatron.tools.report import build, main

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
        peak=dict(flops=312e12, of="the data sheet of an A100"),
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
            loss = {"lm loss": math.log(1000 / n), "lm loss ppl": 1000 / n}
            lines.write({"kind": "eval", "split": "validation", "iteration": n} | loss)
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
        if tag not in ("meta", "img", "link", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def kept(page):
    """The data inside a page."""
    return json.loads(re.search(r'<script type="application/json" id="kept">(.*?)</script>', page)[1])


def curves(page):
    """{title: {kind: curve}} of the first run of a page."""
    charts = kept(page)["charts"]
    return {one["title"]: {curve["kind"]: curve for curve in one["curves"] if curve["run"] == "0"} for one in charts}


def test_page_is_complete_and_self_contained(tmp_path):
    text = build(write_run(tmp_path, resumed_at=30), title="A & B")
    found = Wellformed(text)
    assert found.sources == [source for source in found.sources if source.startswith("data:")]
    assert not re.search(r'(?:src|href)="?https?:', text) and "url(http" not in text and "EventSource" in text
    assert "<title>A &amp; B</title>" in text and "&lt;here&gt;" in text and "<here>" not in text


def test_the_data_inside_the_page_are_the_steps(tmp_path):
    """All points of a short run; of a long one the extremes, and running means of all steps at their places."""
    page = build(write_run(tmp_path, steps=60, resumed_at=30))
    found = curves(page)
    assert found["Loss"]["steps"]["x"] == list(range(1, 7)) + list(range(8, 61))  # the loss of step 7 is not finite
    assert found["Loss"]["steps"]["y"] == pytest.approx([2 + 5 / n for n in range(1, 61) if n != 7], rel=1e-4)
    assert found["Loss"]["validation"]["y"] == pytest.approx([math.log(1000 / n) for n in (20, 40, 60)], rel=1e-4)
    assert [name for name in found if name != "Loss"] == [
        "Throughput of all ranks",
        "Gradient norm before clipping",
        "Learning rate",
        "Time of a step",
        "MFU",
    ]
    means = found["Loss"]["steps"]["means"]
    assert list(means) == ["4", "16", "64"]  # the last one covers all steps
    assert means["4"][20] == pytest.approx(sum(2 + 5 / n for n in range(19, 23)) / 4, rel=1e-4)  # up to step 22
    axes = kept(page)["axes"]["0"]
    assert (axes["samples"][:2], axes["tokens"][-1], axes["time"][-1]) == ([8, 16], 7680, 30)
    starts = [event["message"] for event in kept(page)["events"]]
    assert starts == ["training starts at iteration 0 on <here>", "training starts at iteration 30 on <here>"]
    (tmp_path / "long").mkdir()
    long = curves(build(write_run(tmp_path / "long", steps=5000, valid=False)))["Loss"]["steps"]
    assert len(long["x"]) <= 2000 and (long["x"][0], long["x"][-1]) == (1, 5000) and long["y"][0] == 7.0
    assert list(long["means"]) == ["4", "16", "64", "256", "1024", "4096"]


def test_numbers_of_the_run_are_there(tmp_path):
    text = re.sub(r"<[^>]+>", "|", build(write_run(tmp_path, resumed_at=30)))
    for shown in (
        "5.1 M parameters",
        "2 layers of width 64",
        "dp 2",
        "1 restart",
        "480 samples",
        "7,680",
        "|0:00:30|",
        "500.00 ms",
        "skipped steps (fp16 overflow)||1|",
        "steps without a finite loss||1|",
        "|16.7||perplexity||of validation during training, at iteration 60|",
        "|40.0%||MFU||model FLOPs, as a share of 312 TFLOP/s a rank: the data sheet of an A100|",
        "--lr||0.0006|",
        "torch 2.13.0",
        "started from iterations||0, 30|",
    ):
        assert shown in text, shown
    assert "--lr-decay-iters" not in text


def test_a_language_model_has_no_task(tmp_path):
    """Its page begins with the training loss, and its comparison with the validation's; perplexities are no figures."""
    write_run(tmp_path)
    history, page = read_history(tmp_path / "metrics.jsonl"), build(tmp_path)
    assert history.figures == [] and "The task" not in page
    value, name, _ = tiles(history)[0]
    assert name == "training loss" and float(value) == pytest.approx(
        2 + sum(5 / n for n in range(45, 61)) / 16, abs=6e-4
    )
    assert tiles(history)[1][:2] == ("16.7", "perplexity")
    assert [name for _, _, name in compared(dict(a=history, b=history))] == ["lm loss, validation at step 60"] * 2


@pytest.mark.parametrize("figure, best", [("accuracy dev", "0.9000"), ("mse dev", "0.2000")])
def test_the_first_number_of_a_task_is_its_best(figure, best, tmp_path):
    write_run(tmp_path, valid=False)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for n, value in ((20, 0.5), (40, 0.2), (60, 0.9)):
        lines.write({"kind": "eval", "split": "validation", "iteration": n, figure: value})
    lines.close()
    history = read_history(tmp_path / "metrics.jsonl")
    assert tiles(history)[0][:2] == (best, figure) and "The task" in build(tmp_path)


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
    assert curves(build(write_run(tmp_path, steps=1)))["Loss"]["steps"]["y"] == [7.0]
    other = tmp_path / "bare"
    other.mkdir()
    JsonLines(other / "metrics.jsonl").write(dict(kind="step", iteration=1, consumed_samples=8))
    assert "Loss" not in curves(build(other))


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(DataError, match="no metrics.jsonl in it"):
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
    assert done.returncode == 4 and "no metrics.jsonl in it" in done.stderr and "Traceback" not in done.stderr


def test_a_page_has_one_perplexity_and_says_whose(tmp_path):
    """That of the held-out evaluation, where there is one: validation is then told as a loss alone."""
    write_run(tmp_path)
    found = dict(iteration=60, data="held_out", loss=math.log(12.5), perplexity=12.5, tokens=100_000)
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(found) + "\n")
    page = re.sub(r"<[^>]+>", "|", build(tmp_path))
    assert "|12.5||perplexity||held out: held_out, 100.0 k tokens, iteration 60|" in page
    assert "16.7" not in page and "last validation loss||2.8134|" in page
    (tmp_path / "evaluation.jsonl").unlink()
    (tmp_path / "evaluation.json").write_text(json.dumps(dict(wikitext=found | dict(data=None))))
    history = read_history(tmp_path / "metrics.jsonl")
    assert perplexity(history, read_evaluation(tmp_path)) == (12.5, "held out: wikitext, 100.0 k tokens, iteration 60")


def test_files_of_a_part_of_their_own_are_not_split():
    of = lambda **data: SimpleNamespace(
        group=lambda name: data | dict(split="969,30,1"), steps=[dict(consumed_samples=4)], sample_tokens=8
    )
    assert [name for name, _ in report.data(of(train_data_path=["a"]))] == ["a"]
    assert [name for name, _ in report.data(of(data_path=["a"]))] == ["a", "split"]


def test_schedule_data_memory_and_events_are_told(tmp_path):
    config = dict(
        model=dict(num_layers=8, seq_length=100),
        optimizer=dict(lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_decay_iters=60, lr_warmup_iters=6),
        batch=dict(micro_batch_size=2, global_batch_size=16, train_iters=60),
        parallel=dict(pipeline_schedule="1f1b"),
        data=dict(data_path=["30", "web", "10", "books"], split="95,5,0"),
    )
    lines, at = JsonLines(tmp_path / "metrics.jsonl"), "2026-11-21T06:22:23+00:00"
    launch = dict(
        kind="run", host="node-7", device="cpu", config=config, time=at, mesh=dict(pp=4, replicate=1, shard=1)
    )
    step = {"kind": "step", "batch_size": 16, "seconds": 1.0, "lm loss": 2.0}
    records = [launch | dict(iteration=0)]
    records += [step | dict(iteration=n, consumed_samples=16 * n) for n in range(1, 26)]
    records += [dict(kind="save", iteration=n, time=at, seconds=0.5) for n in (10, 20)]
    records += [dict(kind="memory", iteration=n, time=at, bytes=size) for n, size in ((10, 1.5e9), (20, 2.0e9))]
    records += [
        dict(kind="spike", iteration=26, time=at, why="loss 9 is far"),
        dict(kind="rewind", iteration=20, time=at),
    ]
    records += [launch | dict(iteration=20)]
    records += [step | dict(iteration=n, consumed_samples=16 * n) for n in range(21, 31)]
    records += [step | dict(iteration=31, consumed_samples=16 * 31, spike=7.25)]
    records += [dict(kind="end", iteration=31, time=at, code=9, why="asked to stop")]
    for record in records:
        lines.write(record)
    lines.close()
    page = build(tmp_path)
    text = re.sub(r"<[^>]+>", "|", page)
    for shown in (
        "cosine from 0.001 to 0.0001 over 60 steps, warmed up over 6|",
        "16 samples a step, 2 at a time on each data parallel rank|",
        "1f1b over 4 ranks, 8 micro-batches a step|",
        "web||75.0% of the samples: about 372, 37.2 k tokens|",
        "books||25.0% of the samples: about 124, 12.4 k tokens|",
        "peak on rank 0||2.00 GB: the whole process|",
        "checkpoints saved||2, 500.00 ms each|",
    ):
        assert shown in text, shown
    data = kept(page)
    # Newest first, but all are of the same second
    assert [(event["event"], event["iteration"], event["message"]) for event in data["events"]] == [
        ("start", 0, "training starts at iteration 0 on node-7"),
        ("save", 10, "checkpoint of iteration 10 was written"),
        ("save", 20, "checkpoint of iteration 20 was written"),
        ("spike", 26, "loss 9 is far"),
        ("rollback", 20, "training went back to iteration 20"),
        ("start", 20, "training starts at iteration 20 on node-7; the log had reached iteration 26"),
        ("spike", 31, "7.2 deviations above the median"),
        ("end", 31, "ended after iteration 31 with exit code 9: asked to stop"),
    ]
    [picture] = data["pictures"]["0"]
    schedule = base64.b64decode(picture["url"].partition(",")[2]).decode()
    assert "27% waiting (simulated, not measured)" in picture["caption"]  # 3 / (8 + 3)
    assert schedule.count("<title>") == 4 * 8 * 2
    assert curves(page)["Peak memory of rank 0"]["steps"]["y"] == [1.5e9, 2e9]


@pytest.mark.parametrize("steps, last", [(15, 14), (60, 16)])
def test_a_figure_that_a_page_shows_twice_is_one_figure(steps, last, tmp_path):
    """The card of the loss and the end of its curve, the perplexity and the last point of validation: of a run that was
    stopped by Ctrl-C, resumed, and validated twice at its end.
    """
    write_run(tmp_path, steps=steps, valid=False)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    for loss, final in ((6.9214, False), (6.9455, True)):
        record = {"kind": "eval", "split": "validation", "iteration": steps, "lm loss": loss}
        lines.write(record | ({"final": True} if final else {}))
    lines.close()
    log = EventLog(tmp_path / "events.jsonl")
    log.record("start", "training starts at iteration 0", iteration=0)
    log.record("end", "interrupted", iteration=8, code=Interrupted.code, level="info")
    log.record("start", "training starts at iteration 8", iteration=8)
    page = build(tmp_path)
    text, loss = re.sub(r"<[^>]+>", "|", page), curves(page)["Loss"]
    losses = [2 + 5 / n for n in range(1, steps + 1) if n != 7]  # which is not finite
    mean = sum(losses[-last:]) / last
    assert loss["steps"]["means"]["16"][-1] == pytest.approx(mean, rel=1e-4)
    at_first = re.search(r"SMOOTHING = (\d+)", page)  # of the mean that the page draws, as a power of 2
    assert 2 ** int(at_first[1]) == LAST_STEPS == 16
    assert f"|{mean:.3f}||training loss||mean of the last {last} steps; " in text
    assert loss["validation"]["y"] == pytest.approx([6.9214])
    assert "|1,013.7||perplexity||of validation during training, at iteration" in text  # exp(6.9214)
    assert "final validation loss||6.9455|" in text and "last validation loss" not in text
    assert f"|{steps}||iterations||without a restart|" in text and kept(page)["runs"][0]["restarts"] == 0


def test_events_and_the_supervisors_account_are_told(tmp_path):
    write_run(tmp_path)
    log, supervisor = (EventLog(tmp_path / "events.jsonl", source=source) for source in ("run", "supervisor"))
    log.record("start", "training starts at iteration 0", iteration=0)
    for iteration in (10, 20):
        log.record("save", f"the checkpoint of iteration {iteration} was written", iteration=iteration, seconds=0.5)
    log.record("spike", "loss 9 is far", iteration=26)
    supervisor.record("restart", "restart 1 of 10: rank killed by SIGKILL", iteration=26)
    log.record("start", "training starts at iteration 20", iteration=20)
    lost = {"starting": 20.0, "saving checkpoints": 5.0, "evaluating": 0.0, "the supervisor itself": 0.01}
    account = dict(wall=100.0, productive=75.0, lost=lost, steps=31, repeated_steps=6, restarts=1, checkpoints=2)
    supervisor.record("end", "finished", iteration=31, account=account)
    page = build(tmp_path)
    text = re.sub(r"<[^>]+>", "|", page)
    for shown in (
        "checkpoints saved||2, 500.00 ms each|",
        "supervised time||100.00 s|",
        "steps that count||75.00 s, 75.0%|",
        "starting||20.00 s, 20.0%|",
        "repeated steps||6|",
        "1 restart|",
    ):
        assert shown in text, shown
    told = {event["message"]: event["level"] for event in kept(page)["events"]}
    assert told["loss 9 is far"] == told["restart 1 of 10: rank killed by SIGKILL"] == "warning" and len(told) == 8
    supervisor.record("end", "finished", iteration=31, account=account)
    supervisor.record("supervisor_lost", "killed")
    text = re.sub(r"<[^>]+>", "|", build(tmp_path))
    assert "supervised time||200.00 s, in 2 parts|" in text and "of 1 supervisor that was killed|" in text


def test_runs_that_write_to_one_file_are_called_interleaved(tmp_path):
    write_run(tmp_path)
    assert "interleaved" not in build(tmp_path)
    last = read_history(tmp_path / "metrics.jsonl").steps[-1]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        for iteration in (5, last["iteration"] + 1, 6):
            file.write(json.dumps(last | dict(kind="step", iteration=iteration)) + "\n")
    page = build(tmp_path)
    assert "records of several runs, interleaved" in page and "2, which wrote to the same file" in page


def test_an_interleaved_pipeline_is_called_so(tmp_path):
    config = dict(
        model=dict(num_layers=8, seq_length=100),
        batch=dict(micro_batch_size=2, global_batch_size=16),
        parallel=dict(pipeline_schedule="1f1b", num_virtual_stages_per_pipeline_rank=2),
    )
    history = History(run=dict(config=config, mesh=dict(pp=2, replicate=1, shard=1)))
    assert str(pipeline_of(history)) == "interleaved over 2 ranks of 2 chunks, 8 micro-batches a step"
