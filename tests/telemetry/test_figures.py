# SPDX-License-Identifier: Apache-2.0
"""Numbers in words mean the number, and tables fit: read back by their units, and measured."""

import doctest
import random

import pytest

from megatron.telemetry import drawing, figures

UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
TIMES = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "days": 86400.0}


def read_back(words, units):
    number, _, unit = words.partition(" ")
    return float(number.replace(",", "")) * units[unit]


def test_examples_of_the_docstrings():
    assert doctest.testmod(figures).failed == 0 == doctest.testmod(drawing).failed


@pytest.mark.parametrize(
    "say, units, low, high",
    [(figures.count, UNITS, 0, 14), (figures.size, UNITS, 3, 14), (figures.seconds, TIMES, -3, 7)],
)
def test_what_is_said_is_the_number(say, units, low, high):
    """To half a unit of the last digit shown; four digits before the point at most, so that a larger unit was due."""
    draw = random.Random(3)
    numbers = [10 ** draw.uniform(low, high) for _ in range(2000)]
    numbers += [10.0**power * (1 - part) for power in range(low + 1, high + 1) for part in (1e-3, 1e-5, 1e-7)]
    for number in numbers:
        words = say(number)
        shown, _, unit = words.partition(" ")
        step = units[unit] * 10.0 ** -len(shown.partition(".")[2])
        assert abs(read_back(words, units) - number) <= 0.5001 * step, (number, words)
        if unit not in ("T", "TB", "days"):
            assert len(shown.partition(".")[0].replace(",", "")) <= 4, (number, words)


def test_tables_and_sentences_fit_whatever_their_words():
    draw = random.Random(4)
    for _ in range(300):
        columns = draw.randint(2, 6)
        rows = [["x" * draw.randint(0, 50) for _ in range(columns)] for _ in range(3)]
        head = [f"h{n}" for n in range(columns)]
        lines = figures.table(rows, head, left=range(columns), width=60).splitlines()
        assert len(lines) == 4 and max(map(len, lines)) <= 60
        wide = figures.table(rows, head, left=range(columns), width=figures.WIDE)
        assert all(cell in wide for row in rows for cell in row)
        text = " ".join(f"{'y' * draw.randint(1, 30)}" for _ in range(20))
        for folded in (figures.sentence(f"  {text}", 60), figures.labelled("name", text, 60)):
            assert max(map(len, folded.splitlines())) <= 60 and folded.split()[-20:] == text.split()
