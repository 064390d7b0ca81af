# SPDX-License-Identifier: Apache-2.0
"""What a terminal shows, read as a terminal does; and that files and pipes get Megatron-LM's lines.

`say` runs the code of a log in a process of its own, whose stdout is a terminal (a pty) or a pipe.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap

import pytest

from megatron.settings.schema import Logging
from megatron.telemetry.console import Console
from megatron.telemetry.metrics import Metrics, log_path
from megatron.telemetry.step_metrics import RunSizes, StepMetrics

# Two intervals of a run, an evaluation, a save, a library's warning, half a line, a skipped step; then a last word.
RUN = """
import warnings
from megatron.settings.schema import Logging
from megatron.telemetry import log_lines, metrics
from megatron.telemetry.console import Console

class Fixed:
    @staticmethod
    def now():
        return real(2026, 11, 22, 6, 54, 58)

clock = [0.0]
metrics.time.perf_counter = lambda: clock[0]
real, log_lines.datetime = log_lines.datetime, Fixed
logging = Logging(log_interval=2, {more})
sizes = metrics.RunSizes(4, 16, ranks=2, flops_per_token=1e9, peak_flops=1e12, device="cuda")
console = Console(logging.console, bar=logging.progress_bar)
console.log("a line from before there was a file, which is rather long: " + "word " * 15)
with metrics.Metrics(logging, sizes, console=console) as run:
    run.start(dict(imports=1.0))
    for iteration in range(1, 5):
        clock[0] += 0.5
        losses = {{"lm loss": 8.0 / iteration}}
        run.record(metrics.StepMetrics(iteration, 8 * iteration, 8, losses, 1e-4, 1.5, skipped=iteration == 4))
        if iteration == 2:
            with run.paused("evaluating"):
                run.record_eval(2, 16, {{"lm loss": 2.0}})
            run.log("  successfully saved checkpoint at iteration 2")
            warnings.warn("of a library")
            print("half a line", end="")
            print(" and the other half")
{at_two}
print("the end")
"""
LONG = [
    " [2026-11-22 06:54:58] iteration        2/       4 | consumed samples:           16 | "
    "elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-04 | global batch size:     8 | "
    "lm loss: 6.000000E+00 | loss scale: 1.0 | grad norm: 1.500 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 | tokens per second: 256.0 | throughput per GPU (TFLOP/s/GPU): 0.1 | MFU: 12.8% | "
    "ETA: 0:00:01 |",
    " [2026-11-22 06:54:58] iteration        4/       4 | consumed samples:           32 | "
    "elapsed time per iteration (ms): 500.0 | learning rate: 1.000000E-04 | global batch size:     8 | "
    "lm loss: 2.666667E+00 | loss scale: 1.0 | grad norm: 1.500 | number of skipped iterations:   1 | "
    "number of nan iterations:   0 | tokens per second: 256.0 | throughput per GPU (TFLOP/s/GPU): 0.1 | MFU: 12.8% | "
    "ETA: 0:00:00 |",
]
EVALUATION = " validation loss at iteration 2 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "


class Screen:
    """What a terminal of so many columns shows after these bytes: carriage returns overwrite, long lines wrap."""

    def __init__(self, said: str, columns: int):
        self.rows, self.at, self.columns = [[]], 0, columns
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", said, re.DOTALL):
            self.take(part)

    def take(self, part: str) -> None:
        if part == "\r":
            self.at = 0
        elif part == "\n":
            self.rows.append([])
            self.at = 0
        elif part.startswith("\x1b"):
            assert part == "\x1b[K", f"a terminal is asked for {part!r}"
            del self.rows[-1][self.at :]
        else:
            if self.at == self.columns:
                self.take("\r"), self.take("\n")
            row = self.rows[-1]
            row.extend(" " * (self.at + 1 - len(row)))
            row[self.at] = part
            self.at += 1

    @property
    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self.rows]


@pytest.fixture
def say(root, tmp_path):
    """`say(more, columns=None, at_two="")`: what RUN says with these settings, to a terminal or (None) to a pipe."""

    def run(more: str = "", columns=None, at_two: str = "", **env: str) -> str:
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        env = inherited | dict(PYTHONPATH=str(root), TERM="xterm", PYTHONIOENCODING="utf-8") | env
        command = [sys.executable, "-c", RUN.format(more=more, at_two=textwrap.indent(at_two, " " * 12))]
        if columns is None:
            done = subprocess.run(command, env=env, capture_output=True, cwd=tmp_path)
            assert done.returncode == 0, done.stderr.decode()
            return done.stdout.decode()
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        process = subprocess.Popen(command, env=env, stdout=theirs, stderr=theirs, cwd=tmp_path)
        os.close(theirs)
        said = b""
        while piece := _read(ours):
            said += piece
        os.close(ours)
        assert process.wait() == 0, said.decode()
        return said.decode()

    return run


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_a_pipe_and_the_file_get_megatrons_lines(say, tmp_path):
    lines = say(f"log_file={str(tmp_path / 'logs' / 'a.log')!r}").splitlines()
    assert [line for line in lines if "iteration  " in line] == LONG
    assert lines.count(EVALUATION) == 1
    assert not [line for line in lines if line.startswith("iter ") or "%|" in line or "\r" in line]
    kept = (tmp_path / "logs" / "a.log").read_text().splitlines()
    assert kept == [line for line in lines if line not in ("half a line and the other half", "the end")]


@pytest.mark.parametrize("columns", [60, 100, 180])
def test_a_terminal_gets_short_lines_with_the_bar_below_and_the_file_megatrons(say, tmp_path, columns):
    screen = Screen(say(f"log_file={str(tmp_path / 'a.log')!r}", columns), columns).lines
    assert max(map(len, screen)) <= min(columns, 100)
    first, second = [line for line in screen if line.startswith("iter ")]
    for part in ("2/4", "loss 6.0", "500 ms", "ETA 1s"):
        assert part in first
    assert "loss 2.6667" in second and "ETA 0s" in second
    if columns >= 100:
        assert "lr 1.00e-04" in first and "256 tok/s" in first and "MFU 13%" in first and "norm 1.50" in first
        assert "skipped 1" in second and "skipped" not in first
    events = [
        "validation at iteration 2: loss 2.0000 (perplexity 7.389)",
        "  successfully saved checkpoint at iteration 2",
        "half a line and the other half",
        "the end",
    ]
    rows = [screen.index(line) for line in (first, *events[:3], second)]
    assert rows == sorted(rows), screen
    assert any("UserWarning: of a library" in line for line in screen)
    # The bar is gone
    assert "the end" in screen[-2] and screen[-1] == "" and not any("/4 [" in line for line in screen)
    kept = (tmp_path / "a.log").read_text().splitlines()
    assert [line for line in kept if "iteration  " in line] == LONG and EVALUATION in kept
    assert kept[0].startswith("a line from before there was a file") and kept[0].rstrip().endswith("word word word")


def test_the_bar_stays_at_the_bottom(say):
    """As the screen is in the middle of the run, after every kind of line."""
    screen = Screen(say(columns=100, at_two="import os; os._exit(0)"), 100).lines
    assert " 50%" in screen[-1] and "2/4 [" in screen[-1] and len(screen[-1]) <= 99, screen
    assert not any("/4 [" in line for line in screen[:-1]), screen


def test_who_wants_it_otherwise(say):
    long = say('console="megatron", progress_bar=False', columns=400)
    assert [line for line in long.replace("\r\n", "\n").splitlines() if "iteration  " in line] == LONG
    short = say('console="short"').splitlines()
    assert len([line for line in short if line.startswith("iter ")]) == 2 and LONG[0] not in short
    assert "/4 [" in say(columns=100) and "/4 [" not in say("progress_bar=False", columns=100)
    assert [
        line for line in say(TERM="dumb", columns=400).replace("\r", "").splitlines() if "iteration  " in line
    ] == LONG


def test_the_log_is_kept_beside_the_checkpoints():
    assert log_path(Logging(), None) is None
    assert str(log_path(Logging(), "runs/a")) == "runs/a/train.log"
    assert str(log_path(Logging(log_file="x.log"), "runs/a")) == "x.log"


def test_a_file_goes_on_and_other_ranks_have_none(tmp_path, capsys):
    for word in ("first", "second"):
        with Metrics(Logging(), RunSizes(4, 16), save=str(tmp_path)) as metrics:
            metrics.log(word)
    silent = Console(active=False)
    silent.log("nothing")
    silent.keep(tmp_path / "other.log")
    assert (tmp_path / "train.log").read_text() == "first\nsecond\n" and not (tmp_path / "other.log").exists()
    assert capsys.readouterr().out == "first\nsecond\n"


def test_a_line_and_its_end_are_written_together(monkeypatch):
    """Ranks whose stdout is not buffered share a pipe: between two writes of one, another's would come."""
    writes = []
    monkeypatch.setattr(sys, "stdout", type("Raw", (io.StringIO,), {"write": lambda self, text: writes.append(text)})())
    Console("megatron", bar=False, prefix="[rank 1] ").log("two\nlines")
    assert [text for text in writes if text] == ["[rank 1] two\n[rank 1] lines\n"]


def test_a_failed_end_is_in_the_file(tmp_path):
    with Metrics(Logging(), RunSizes(4, 16), save=str(tmp_path)) as metrics:
        metrics.end(3, 8, "loss is not finite")
    assert "iteration 3 with exit code 8: loss is not finite" in (tmp_path / "train.log").read_text()


def test_a_full_disk_stops_the_file_and_not_the_run(capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with Metrics(Logging(log_file="/dev/full", log_interval=1), RunSizes(4, 16)) as metrics:
        for iteration in (1, 2):
            metrics.record(StepMetrics(iteration, iteration, 1, {"lm loss": 1.0}, learning_rate=1e-3))
    out = capsys.readouterr().out
    assert out.count("/dev/full is no longer written") == 1 and out.count("lm loss") == 2


CLOSED = """
import os, sys, time
from megatron.telemetry.console import Console
console = Console()
console.keep(__import__("pathlib").Path({path!r}))
{bar}
console.log("before")
while os.path.exists({window!r}):
    time.sleep(0.01)
for number in range(3):
    time.sleep(0.12)  # or the bar is not drawn
    console.advance({{"loss": "7.2"}})
    console.log(f"behind {{number}}")
print("printed by others")
console.log("the end")
console.close()
"""


@pytest.mark.parametrize("bar", ["", "console.begin(9, 0)"])
def test_a_run_outlives_its_terminal(bar, tmp_path):
    """The window is closed (and the signal of that ignored, as nohup does): the log goes on in the file."""
    window, path = tmp_path / "window", tmp_path / "train.log"
    window.touch()
    master, slave = pty.openpty()
    code = CLOSED.format(path=str(path), window=str(window), bar=bar)
    run = subprocess.Popen([sys.executable, "-c", code], stdout=slave, stderr=slave, stdin=subprocess.DEVNULL)
    os.close(slave)
    shown = b""
    while b"before" not in shown:
        shown += os.read(master, 1000)
    os.close(master)
    window.unlink()
    assert run.wait(60) == 0
    lines = path.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "the end" and "behind 2" in lines
    assert sum("the terminal is gone" in line for line in lines) == 1
