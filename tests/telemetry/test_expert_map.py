# SPDX-License-Identifier: Apache-2.0
"""The heat maps of experts on a report: colours of cells, which layers are drawn, and runs that go back."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image

from megatron.telemetry import expert_map
from megatron.telemetry.expert_map import ALPHA, BLUE, COLUMNS, LAYERS, RED
from megatron.telemetry.run_record import JsonLines, read_history
from megatron.training import report_facts


def record(iteration, **layers):
    return dict(kind="experts", iteration=iteration, loads=layers)


def pixels(svg):
    """The cells of a map: RGBA of [experts, columns]."""
    [data] = re.findall(r'data:image/png;base64,([^"]+)', svg.replace("\n", ""))
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA"))


def colour(name, strength):
    return [*(int(name[at : at + 2], 16) for at in (1, 3, 5)), round(255 * ALPHA * strength)]


def test_cells_show_the_load_in_means():
    loads = np.array([[40, 10], [8, 30], [16, 0], [0, 0]])  # means 16 and 10
    cells = pixels(expert_map.expert_map([10, 20], loads))
    assert cells.shape == (4, 2, 4)
    assert cells[0, 0].tolist() == colour(RED, (40 / 16 - 1) / 2) and cells[1, 1].tolist() == colour(RED, 1)
    assert cells[1, 0].tolist() == colour(BLUE, 0.5) and cells[3, 0].tolist() == colour(BLUE, 1)
    assert cells[0, 1, 3] == 0  # the mean: the page shows through


@pytest.mark.parametrize("count", [1, 2, 7, 200, 1000])
def test_columns_are_sums_over_their_records(count):
    """Against a loop over records. They are not at equal distances: a run may resume with another --log-interval."""
    draw = np.random.default_rng(count)
    iterations = np.cumsum(draw.integers(1, 5, count) * np.where(np.arange(count) > count / 2, 10, 1)).tolist()
    loads = draw.integers(0, 50, (6, count)).astype(float)
    found = expert_map.columns(iterations, loads)
    number = min(COLUMNS, count)
    assert found.shape == (6, number) and (found.mean(0) == pytest.approx(1))
    width = (iterations[-1] - iterations[0]) / number
    for column in range(number):
        start = iterations[0] + column * width
        inside = [n for n, at in enumerate(iterations) if start <= at and (at < start + width or column == number - 1)]
        inside = inside or [next(n for n, at in enumerate(iterations) if at >= start)]
        total = sum(loads[:, n] for n in inside)
        assert found[:, column] == pytest.approx(total / total.mean()), column


def test_of_many_layers_the_most_unequal_are_drawn(tmp_path):
    """Records after the step that a launch resumed from do not count, nor those of other experts."""
    even, worst = [10, 10, 10, 10], [40, 0, 0, 0]
    layers = {f"blocks.{n}": worst if n in (3, 8) else even for n in range(9)}
    lines = JsonLines(tmp_path / "metrics.jsonl")
    run = dict(kind="run", iteration=0)
    for one in [run, record(5, **{"blocks.0": even}), record(10, **layers), record(15, **{"blocks.0": worst})]:
        lines.write(one)
    for one in [dict(run, iteration=12), record(15, **layers), record(20, **layers)]:
        lines.write(one)
    lines.close()
    history = read_history(tmp_path / "metrics.jsonl")
    assert [one["iteration"] for one in expert_map.usable(history.experts)] == [10, 15, 20]
    pictures, rows = report_facts.experts(history)
    drawn = [caption.split(":")[0] for caption, _ in pictures]
    assert len(drawn) == LAYERS and {"blocks.3", "blocks.8"} <= set(drawn) and drawn == sorted(drawn)
    assert rows[0][0] == "colours" and rows[1:] == [
        ("largest load at the end", "4.00 times the mean, in blocks.3"),
        ("smallest load at the end", "0.00 times the mean"),
        ("without tokens in blocks.3", "experts 1, 2, 3"),
        ("without tokens in blocks.8", "experts 1, 2, 3"),
        ("layers", "6 of 9 are drawn: those with the largest loads"),
    ]
    history.experts.clear()
    assert report_facts.experts(history) == ([], [])
