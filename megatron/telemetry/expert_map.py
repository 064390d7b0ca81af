# SPDX-License-Identifier: Apache-2.0
"""Heat maps of the loads of experts: a picture for each layer, with the load of each expert over the run.

The data are the records of kind `experts` in metrics.jsonl. A cell is the tokens of an expert, divided by the mean over the
experts of its layer: red is more, blue is fewer, and the strongest blue is none. Needs no torch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.telemetry.drawing import BLUE, RED, new_figure, plain, svg_of

COLUMNS, LAYERS = 64, 6  # most columns of a picture; most layers that are drawn
MOST, ALPHA = 3.0, 0.9  # the load of the strongest red, in means; opacity of the strongest colour
HEIGHT, EACH, ROOM = 0.9, 0.2, 2.4  # inches: height without experts, of one of few experts, of many experts together


class Imbalance(NamedTuple):
    """The loads of a layer's experts in its last records, in means. idle: experts without tokens in all of them"""

    layer: str
    largest: float
    smallest: float
    idle: list[int]


def usable(records: Sequence[dict]) -> list[dict]:
    """The records with the layers and numbers of experts of the last one."""
    sizes = [{layer: len(own) for layer, own in record["loads"].items()} for record in records]
    return [record for record, own in zip(records, sizes, strict=True) if own == sizes[-1]]


def layers_of(records: Sequence[dict]) -> dict[str, np.ndarray]:
    """Layer -> tokens of its experts, [experts, records], from `usable` records."""
    layers = records[-1]["loads"] if records else {}
    return {layer: np.array([record["loads"][layer] for record in records], dtype=float).T for layer in layers}


def relative(loads: np.ndarray) -> np.ndarray:
    """Loads [experts, records] in means over experts; 1 where no expert has tokens."""
    mean = loads.mean(0)
    return np.where(mean > 0, loads / np.maximum(mean, 1e-9), 1.0)


def imbalance(layer: str, loads: np.ndarray) -> Imbalance:
    """How unequal the loads of a layer are in the last tenth of its records."""
    last = loads[:, -max(1, loads.shape[1] // 10) :]
    means = relative(last.sum(1, keepdims=True))[:, 0]
    return Imbalance(layer, float(means.max()), float(means.min()), np.flatnonzero(last.sum(1) == 0).tolist())


def shown_layers(layers: dict[str, np.ndarray]) -> list[str]:
    """The layers to draw, in order: all, or of many those whose loads are the most unequal at the end."""
    found = [imbalance(layer, loads) for layer, loads in layers.items()]
    worst = sorted(found, key=lambda one: -one.largest)[:LAYERS]
    return [one.layer for one in found if one in worst]


def columns(iterations: Sequence[int], loads: np.ndarray) -> np.ndarray:
    """Relative loads at equal distances over the iterations, [experts, columns]: of the records in a column, their sum; of
    a column without one, the next record.
    """
    count = min(COLUMNS, len(iterations))
    edges = np.linspace(iterations[0], iterations[-1], count + 1) if len(iterations) > 1 else np.array([0.0, 1.0])
    first = np.searchsorted(iterations, edges[:-1])
    last = np.maximum(np.append(first[1:], len(iterations)), first + 1)
    sums = [loads[:, start:end].sum(1) for start, end in zip(first, last, strict=True)]
    return relative(np.array(sums).T)


def expert_map(iterations: Sequence[int], loads: np.ndarray) -> str:
    """An SVG of experts (from top to bottom) and iterations (from left to right). loads: [experts, records]"""
    values, number = columns(iterations, loads), len(loads)
    figure = new_figure(5.4, HEIGHT + min(EACH * number, ROOM), "the report")
    axes = figure.add_subplot()
    start, end = iterations[0], max(iterations[-1], iterations[0] + 1)
    axes.imshow(
        coloured(values), aspect="auto", interpolation="none", extent=(start, end, number - 0.5, -0.5), origin="upper"
    )
    every = -(-number // 12)
    axes.set_yticks(range(0, number, every), [f"expert {n}" if n == 0 else str(n) for n in range(0, number, every)])
    axes.set_xlabel("iteration")
    axes.ticklabel_format(axis="x", style="plain")
    plain(axes)
    return svg_of(figure)


def coloured(values: np.ndarray) -> np.ndarray:
    """Relative loads -> RGBA from 0 to 255, [..., 4]. The page shows through where loads are equal, light or dark."""
    more, fewer = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in (RED, BLUE))
    strength = np.where(values > 1, (values - 1) / (MOST - 1), 1 - values).clip(0, 1)
    colours = np.where((values > 1)[..., None], more, fewer)
    return np.concatenate([colours, 255 * ALPHA * strength[..., None]], -1).round().astype(np.uint8)
