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


@pytest.mark.parametrize("width", range(4, 60, 3))
def test_a_table_that_is_too_wide_leaves_out_what_is_spare_and_cuts_the_longest_texts(width):
    """In this order, and no more than is needed; numbers are whole, and at least seven characters of a text are kept."""
    head, left = ["name", "size", "a longer text", "time", "last"], (0, 2)
    row = ["abcdefghijkl", "12", "a text of twenty-six lette", "3.25 s", "-"]
    shown = figures.table([row], head, left=left, width=width, spare=("time", "absent", "size")).splitlines()
    whole = [max(map(len, pair)) for pair in zip(head, row, strict=True)]
    excess = lambda kept, widths: sum(widths[n] for n in kept) + 2 * (len(kept) - 1) - width
    kept = [0, 1, 2, 3, 4]
    for spare in (3, 1):
        if excess(kept, whole) > 0:
            kept.remove(spare)
    widths = list(whole)
    for n in (2, 0):  # the longest first
        while excess(kept, widths) > 0 and widths[n] > 7:
            widths[n] -= 1
    cut = lambda text, room: text if len(text) <= room else text[: room - 3].rstrip() + "..."
    for line, cells in zip(shown, (head, row), strict=True):
        words = [cut(cells[n], widths[n]).ljust(widths[n]) if n in left else cells[n].rjust(widths[n]) for n in kept]
        assert line == "  ".join(words).rstrip()


def test_words_with_hyphens_are_not_divided():
    """Flags are found by a search."""
    assert figures.sentence("aaa --flag-of-words", 18) == "aaa\n  --flag-of-words"
    assert figures.labelled("x", "aaa --flag-of-words", 26, 8) == "  x     aaa\n        --flag-of-words"


BORDERS = {  # the last number of a unit and the first of the next
    figures.seconds: [
        (7199, "120.0 min"),
        (7200, "2.0 h"),
        (359_999, "100.0 h"),
        (360_000, "4.2 days"),
        (999.995, "16.7 min"),
    ],
    figures.since: [
        (0, "0 s"),
        (119.9, "120 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (172_799, "48 h"),
        (172_800, "2 d"),
        (30 * 86400, "30 d"),
    ],
    figures.count: [(0, "0"), (9999, "9,999"), (9999.5, "10.0 k"), (10**15, "1,000.0 T")],
    figures.size: [
        (999, "999 B"),
        (999.5, "1.0 kB"),
        (999_950, "1.0 MB"),
        (0.999995e15, "1.00 PB"),
        (10**18, "1,000.00 PB"),
    ],
}


@pytest.mark.parametrize("say", BORDERS, ids=lambda say: say.__name__)
def test_numbers_at_the_border_of_a_unit(say):
    for number, words in BORDERS[say]:
        assert say(number) == words, number


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
