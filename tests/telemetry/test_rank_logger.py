# SPDX-License-Identifier: Apache-2.0
"""The logger for own code: which ranks write, and what is in a line."""

import logging
import re
import sys

import pytest

from megatron.telemetry.rank_logger import NAME, get_logger


@pytest.fixture(autouse=True)
def no_handlers():
    before = logging.getLogger(NAME).handlers[:]
    logging.getLogger(NAME).handlers.clear()
    yield
    logging.getLogger(NAME).handlers[:] = before


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_line_is_written_by_its_ranks(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "3")
    every, first = get_logger(), get_logger("mine", ranks=[0])
    every.info("of all %s", 7)
    every.info("of one and two", ranks=[1, 2])
    first.warning("of the first")
    first.error("of rank 2", ranks=[2])
    first.debug("not shown")
    written = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert written == [
        "of all 7",
        *["of one and two"] * (rank > 0),
        *["of the first"] * (rank == 0),
        *["of rank 2"] * (rank == 2),
    ]


def test_a_line_has_its_place_and_follows_standard_output(capsys, monkeypatch, tmp_path):
    log = get_logger("mine")
    line = sys._getframe().f_lineno + 1
    log.warning("look")
    where = re.escape(f"WARNING {NAME}.mine test_rank_logger.py:{line}: look")
    assert re.fullmatch(rf" \[\d{{4}}-\d\d-\d\d [\d:]+\] rank 0 {where}\n", capsys.readouterr().out)
    with open(tmp_path / "out", "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        get_logger("mine").info("elsewhere", ranks=[0])
    assert (tmp_path / "out").read_text().endswith(": elsewhere\n")
