# SPDX-License-Identifier: Apache-2.0
"""The best plans as a picture: what fills a device, and what fills a step."""

from collections.abc import Sequence

from megatron.errors import SettingsError, StorageError
from megatron.planner.memory import ledger
from megatron.planner.search import Plan
from megatron.planner.speed import Cluster
from megatron.planner.text import recomputed

SMALL = 0.02  # kinds that are nowhere more than this share of the longest bar are drawn as one: "other"
BAR, PANEL = 0.34, 7.5  # inches: height of a bar, width of a panel


def draw(plans: Sequence[Plan], cluster: Cluster, path: str) -> None:
    """Write a picture of the plans, in the format that the name of the file ends with (.svg, .png, .pdf).

    On the left the memory of each plan's fullest rank by kind, beside what the device has; on the right a step's seconds.
    Raises SettingsError without matplotlib or for a format that it does not know, StorageError where writing fails.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SettingsError("--picture needs the package matplotlib", str(error), "pip install matplotlib") from None
    names = [
        f"{number}  {plan.layout.short()}, micro {plan.layout.micro}, recompute {recomputed(plan)}"
        for number, plan in enumerate(plans, 1)
    ]
    filled = [ledger(plan.job, plan.layout, cluster.device, plan.rank).device for plan in plans]
    figure = Figure(figsize=(2 * PANEL, 1.6 + BAR * (len(plans) + 3)), layout="constrained")
    memory, time = figure.subplots(1, 2, sharey=True)
    _bars(memory, [{kind: size / 1e9 for kind, size in kinds.items()} for kinds in filled], names)
    memory.axvline(cluster.device.memory_bytes / 1e9, color="black", linestyle="--", linewidth=1)
    memory.set_xlabel(f"GB on the fullest rank; dashed: {cluster.device.name}, {cluster.device.memory_gb:.1f} GB")
    _bars(time, [plan.step.parts for plan in plans], names)
    time.set_xlabel("seconds of a step")
    figure.suptitle(f"{cluster.world_size} ranks, global batch {plans[0].job.global_batch}")
    try:
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}):  # text stays text; the same bytes every time
            figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    except ValueError as error:
        raise SettingsError(f"--picture {path}: this format cannot be drawn", str(error), "say .svg or .png") from None
    except OSError as error:
        raise StorageError(f"cannot write --picture {path}", error.strerror) from error


def _bars(axes, rows: Sequence[dict[str, float]], names: Sequence[str]) -> None:
    """Stacked horizontal bars, the first row on top; kinds in the order of their largest share."""
    longest = max(sum(row.values()) for row in rows)
    largest = {kind: max(row.get(kind, 0.0) for row in rows) for row in rows for kind in row}
    kinds = [kind for kind in sorted(largest, key=largest.get, reverse=True) if largest[kind] > SMALL * longest]
    drawn = [{kind: row.get(kind, 0.0) for kind in kinds} for row in rows]
    for row, whole in zip(drawn, rows):
        row["other"] = sum(whole.values()) - sum(row.values())
    left = [0.0] * len(rows)
    for kind in [*kinds, "other"]:
        widths = [row[kind] for row in drawn]
        axes.barh(names, widths, left=left, label=kind)
        left = [start + width for start, width in zip(left, widths)]
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.5 / len(rows)), ncols=4, frameon=False, fontsize="small"
    )
    axes.spines[["top", "right"]].set_visible(False)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
