# SPDX-License-Identifier: Apache-2.0
"""Pictures of the ranks of a run: a heat map of their own times over the run, and bars with the parts of their steps.

The data are the records of kind `ranks` in metrics.jsonl. A cell of the heat map compares the own time of a rank with the
median of the other ranks of its pipeline stage: red is longer, so the others wait for it. A rank alone on its stage is
compared with its own median over the run. Needs no torch.
"""

from collections.abc import Sequence

import numpy as np

from megatron.telemetry.drawing import BLUE, GREEN, INK, LINE, ORANGE, RED, SOFT, VIOLET, new_figure, plain, svg_of
from megatron.telemetry.rank_times import BACKWARD, DATA, FORWARD, OTHER, OWN, PARTS, STOPPED, UPDATE, WAITING
from megatron.telemetry.stragglers import median_of_others

HEIGHT, EACH = 1.3, 0.24  # inches: height without ranks, height of a rank
COLUMNS, ROWS = 64, 32  # maximal number of cells; of more ranks, those that differ most are drawn
COLOURS = {DATA: ORANGE, FORWARD: BLUE, BACKWARD: GREEN, UPDATE: VIOLET, OTHER: SOFT, STOPPED: RED, WAITING: LINE}
LONGEST = 1.0  # excess, as a share of the peers' time, of the strongest red; of the strongest blue it is half as much


def times_of(records: Sequence[dict], part: str) -> np.ndarray:
    """Seconds of a step in a part, [ranks, records]."""
    return np.array([record["seconds"][part] for record in records], dtype=float).T


def usable(records: Sequence[dict]) -> list[dict]:
    """The records with all parts and as many ranks as the last record: a run may resume on another number of ranks."""
    whole = [r for r in records if isinstance(r.get("seconds"), dict) and set(PARTS) <= r["seconds"].keys()]
    count = len(whole[-1]["seconds"][DATA]) if whole else 0
    return [record for record in whole if all(len(record["seconds"][part]) == count for part in PARTS)]


def excess(records: Sequence[dict], stages: Sequence[int]) -> np.ndarray:
    """The own time of each rank above that of its peers, as a share of the peers' time: [ranks, records]."""
    return against_peers(sum(times_of(records, part) for part in OWN), stages)


def against_peers(times: np.ndarray, stages: Sequence[int]) -> np.ndarray:
    """The time of each rank above that of its peers, as a share of the peers' time. times: seconds [ranks, records]"""
    usual, stages = np.empty_like(times), np.asarray(stages)
    for stage in np.unique(stages):
        ranks = np.flatnonzero(stages == stage)
        if len(ranks) == 1:
            usual[ranks] = np.median(times[ranks])
        else:
            usual[ranks] = np.array([median_of_others(column) for column in times[ranks].T]).T
    return times / np.maximum(usual, 1e-9) - 1


def stages_of(run: dict, ranks: int) -> list[int]:
    """The pipeline stage of each rank of a run, from its record: the axis pp is the slowest one."""
    pp = int((run.get("mesh") or {}).get("pp") or 1)
    return [rank * pp // ranks for rank in range(ranks)]


def heat_map(records: Sequence[dict], stages: Sequence[int]) -> str:
    """An SVG of ranks (from top to bottom) and iterations (from left to right)."""
    values = excess(records, stages)
    edges = [0 if n == 0 else records[n - 1]["iteration"] for n in range(len(records))] + [records[-1]["iteration"]]
    edges[0] = max(0, records[0]["iteration"] - records[0]["steps"])
    each = -(-len(records) // COLUMNS)
    values = np.array([values[:, at : at + each].mean(1) for at in range(0, len(records), each)]).T
    edges = [*edges[:-1:each], edges[-1]]
    ranks = shown_ranks(values)
    figure = new_figure(5.4, HEIGHT + EACH * len(ranks), "the report")
    axes = figure.add_subplot()
    for row, rank in enumerate(ranks):
        axes.axhline(row, color=LINE, linewidth=0.5, alpha=0.5, zorder=0)
        for column, value in enumerate(values[rank]):
            strength = min(1.0, value / LONGEST if value > 0 else -value / (LONGEST / 2))
            if strength >= 0.1:
                start, width = edges[column], edges[column + 1] - edges[column]
                colour = RED if value > 0 else BLUE
                axes.broken_barh([(start, width)], (row - 0.42, 0.84), facecolor=colour, alpha=0.85 * strength)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("iteration")
    axes.ticklabel_format(axis="x", style="plain")
    plain(axes)
    return svg_of(figure)


def shown_ranks(values: np.ndarray) -> list[int]:
    """The ranks to draw, in order: all, or those with the largest excess in any column."""
    if len(values) <= ROWS:
        return list(range(len(values)))
    return sorted(int(rank) for rank in np.argsort(-values.max(1), kind="stable")[:ROWS])


def step_bars(records: Sequence[dict], ranks: Sequence[int]) -> str:
    """An SVG with a bar for each rank: the mean time of a step, divided into its parts."""
    weights = np.array([record["steps"] for record in records], dtype=float)
    figure = new_figure(5.4, HEIGHT + EACH * len(ranks), "the report")
    axes = figure.add_subplot()
    left = np.zeros(len(ranks))
    for part in PARTS:
        mean = 1000 * (times_of(records, part) @ weights / weights.sum())[list(ranks)]
        if mean.max() > 0:
            axes.barh(range(len(ranks)), mean, left=left, height=0.7, color=COLOURS[part], label=part)
        left += mean
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlabel("ms of a step, mean over the run")
    axes.legend(
        frameon=False, fontsize=9, labelcolor=INK, ncols=4, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0
    )
    plain(axes)
    return svg_of(figure)
