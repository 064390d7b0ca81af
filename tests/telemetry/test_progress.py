# SPDX-License-Identifier: Apache-2.0
"""Bars of commands that take long: on a terminal, with the whole, and nothing elsewhere."""

import io
import re
import sys

import torch

from megatron.checkpoint import survey
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.store import Piece
from megatron.convert.hf_files import TensorGroup, write_tensors
from megatron.telemetry import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch) -> Terminal:
    """The stderr of a test from here on. (Between a fixture and its test pytest sets its own.)"""
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def pieces():
    tensors = {name: torch.arange(250_000, dtype=torch.float32) + at for at, name in enumerate("abcd")}
    return [Piece(name, x.shape, Box.whole(tuple(x.shape)), x) for name, x in tensors.items()]


def write(folder):
    with Saver(folder) as saver:
        return saver.write(0, [pieces()[:2], pieces()[2:]], {})


def test_a_bar_counts_the_bytes_and_goes_away(tmp_path, monkeypatch):
    shows = terminal(monkeypatch)
    monkeypatch.setattr("tqdm.std.time", lambda: next(clock))  # each look is a second later: every step is drawn
    clock = iter(range(10_000))
    written = write(tmp_path)
    shown = shows.getvalue()
    assert re.findall(r"writing: +(\d+)%", shown) == ["0", "25", "50", "75", "100"] and "4.00M/4.00M" in shown
    assert shown.endswith("\r") and "\n" not in shown
    shows.truncate(0)
    assert survey.verify(written)[1] == []
    assert re.findall(r"reading: +(\d+)%", shows.getvalue())[:2] == ["0", "25"]
    shows.truncate(0)
    x = torch.ones(1000, 1000)
    write_tensors(tmp_path, [TensorGroup((name,), ((1000, 1000),), lambda: [x]) for name in "ab"], torch.bfloat16)
    assert re.findall(r"writing: +(\d+)%", shows.getvalue()) == ["0", "50", "100"]


def test_a_quick_command_shows_none_and_a_log_gets_none(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stderr", Terminal())
    write(tmp_path / "quick")
    progress.say("comparing")
    assert sys.stderr.getvalue() == "comparing ...\n"
    monkeypatch.undo()
    monkeypatch.setattr(progress, "DELAY", 0)
    write(tmp_path / "log")
    progress.say("comparing")
    assert list(progress.followed("ab", "quantizing", 2, "layers")) == ["a", "b"]
    assert capsys.readouterr() == ("", "")


def test_lines_of_something_long(monkeypatch):
    """After 10 seconds, and each time after twice as long; nothing before the first part is over."""
    now, said = [100.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    lines = progress.ProgressLines(said.append)
    for second in range(101):
        now[0] = 100.0 + second
        lines(f"part {second}", max(0, second - 12), 400)
    numbers = [re.fullmatch(r" > part (\d+) after 0:\d\d:(\d\d), of about (\S+)", line).groups() for line in said]
    assert [int(part) for part, _, _ in numbers] == [13, 26, 52]
    assert [when for *_, when in numbers] == ["1:26:40", "0:12:23", "0:08:40"]  # 13 x 400, 26 / 14 x 400, 52 / 40 x 400
