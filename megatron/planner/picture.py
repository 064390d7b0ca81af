# SPDX-License-Identifier: Apache-2.0
"""A chart of the best plans: the memory of a device and the time of a step, by kind."""

import textwrap
from collections.abc import Sequence

from megatron.errors import SettingsError, StorageError
from megatron.planner.cluster import Cluster
from megatron.planner.memory import memory_report
from megatron.planner.plans import Plan
from megatron.planner.text import recomputed, speeds_note
from megatron.telemetry.drawing import INK, SOFT, new_figure, plain, svg_of

SMALL = 0.02  # kinds that never exceed this fraction of the longest bar are drawn as one: "other"
BAR, WIDTH = 0.42, 8.0  # inches: height of a bar, width of the picture
TITLE = 95  # characters of a line of the title

# Each colour is one kind of memory or time: blues are state, greens activations, violets buffers, browns fixed
# costs; time is red to yellow. Each is readable on light and on dark backgrounds.
COLOURS = {
    "weights": "#1e40af",
    "gradients": "#3b82f6",
    "main weights": "#0891b2",
    "optimizer moments": "#93c5fd",
    "teacher": "#1e3a5f",
    "teacher's passes": "#65a30d",
    "offloaded optimizer state": "#155e75",
    "buffers of state on disk": "#67e8f9",
    "activations": "#15803d",
    "logits": "#4ade80",
    "workspace": "#a3e635",
    "gathered weights": "#6d28d9",
    "gradient buffers": "#8b5cf6",
    "pipeline buffers": "#c084fc",
    "communication buffers": "#e9a8fd",
    "fragmentation": "#a8763e",
    "device context": "#d4b483",
    "compute": "#b91c1c",
    "tensor parallel": "#f97316",
    "context parallel": "#fb923c",
    "expert parallel": "#fdba74",
    "data parallel": "#fbbf24",
    "pipeline messages": "#fde047",
    "update": "#be185d",
    "bubble": "#fda4af",
    "other": "#9ca3af",
}


def draw(plans: Sequence[Plan], cluster: Cluster, path: str, why: str = "") -> None:
    """Draw a chart of the plans, in the format of the file's extension (.svg, .png, .pdf).

    why: the reason for the first one, if it is not the fastest

    Above, the memory of each plan's fullest rank by kind, with the device's memory; below, a step's seconds.
    Raises SettingsError without matplotlib or for an unknown format, StorageError if writing fails.
    """
    lines = textwrap.wrap(f"1 is {why}", TITLE) if why else []
    figure = new_figure(WIDTH, 3.2 + 2 * BAR * (len(plans) + 1) + 0.2 * len(lines), "--picture")
    halves = figure.subfigures(2, 1)
    memory, time = (half.subplots() for half in halves)
    names = [
        f"{number}  {plan.layout.short()}, micro {plan.layout.micro_batch_size}\nrecompute {recomputed(plan)}"
        for number, plan in enumerate(plans, 1)
    ]
    filled = [memory_report(plan.job, plan.layout, cluster.device, plan.rank).device for plan in plans]
    _bars(halves[0], memory, [{kind: size / 1e9 for kind, size in kinds.items()} for kinds in filled], names)
    memory.axvline(cluster.device.memory_bytes / 1e9, color=INK, linestyle="--", linewidth=1)
    memory.set_xlabel(f"GB on the fullest rank; dashed: {cluster.device.name}, {cluster.device.memory_gb:.1f} GB")
    _bars(halves[1], time, [plan.step.parts for plan in plans], names)
    time.set_xlabel(f"seconds of a step {speeds_note(cluster)}")
    head = f"{cluster.world_size} ranks, global batch {plans[0].job.global_batch}"
    figure.suptitle("\n".join([head, *lines]), color=INK, **(dict(fontsize="medium") if lines else {}))
    try:
        if path.endswith(".svg"):
            with open(path, "w", encoding="utf-8") as file:
                file.write(svg_of(figure))
        else:
            figure.savefig(path)
    except ValueError as error:
        raise SettingsError(f"--picture {path}: this format cannot be drawn", str(error), "use .svg or .png") from None
    except OSError as error:
        raise StorageError(f"cannot write --picture {path}", error.strerror) from error


def _bars(half, axes, rows: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    """Stacked horizontal bars, the first row on top; kinds in the order of their largest share.

    half: the part of the figure with the axes; the legend stands at its end, as wide as the figure
    """
    longest = max(sum(row.values()) for row in rows)
    largest = {kind: max(row.get(kind, 0.0) for row in rows) for row in rows for kind in row}
    kinds = [kind for kind in sorted(largest, key=largest.get, reverse=True) if largest[kind] > SMALL * longest]
    kinds = [kind for kind in kinds if kind in COLOURS]
    drawn = [{kind: row.get(kind, 0.0) for kind in kinds} for row in rows]
    for row, whole in zip(drawn, rows):
        row["other"] = sum(whole.values()) - sum(row.values())
    left = [0.0] * len(rows)
    for kind in [*kinds, "other"]:
        widths = [row[kind] for row in drawn]
        axes.barh(names, widths, left=left, label=kind, color=COLOURS[kind], height=0.62)
        left = [start + width for start, width in zip(left, widths)]
    half.legend(
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize="small",
        labelcolor=INK,
        handlelength=1,
        columnspacing=1.2,
    )
    axes.tick_params(axis="y", labelsize="small")
    plain(axes)
    axes.grid(axis="x", color=SOFT, alpha=0.3, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.invert_yaxis()
