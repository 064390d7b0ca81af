# SPDX-License-Identifier: Apache-2.0
"""A table of the estimated cost of a recipe on a cluster.

python -m megatron.tools.corpus estimate recipe.yaml --rates runs/sample --input-tb 10 --nodes 64
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.corpus.estimate import CorpusNodes, EstimateFacts, PhaseRow, estimate, rates_of
from megatron.corpus.recipe import read_recipe
from megatron.errors import SettingsError
from megatron.settings.declare import dashed
from megatron.settings.schema import setting


@dataclass(frozen=True)
class EstimateOptions:
    """The corpus, and the machines. Sizes are 10^9 and 10^12 bytes."""

    rates: list[str] = setting(
        "output folders of finished runs of the recipe on a sample: its rates are taken from them"
    )
    input_tb: float = setting("JSON lines that the corpus has", 10.0)
    file_gb: float = setting("of one file of the input, plain", 1.0)
    nodes: int = setting("machines", 64)
    cores_per_node: int = setting("of each: tasks at a time, as far as there is memory", 64)
    node_memory_gb: float = setting("memory of each", 256.0)
    node_gb_per_second: float = setting("what a node and the file system move to each other", 5.0)
    task_gb_per_second: float = setting("of that, what a single task gets at most", 1.0)
    file_system_gb_per_second: float = setting("what the file system moves for all of them", 50.0)
    opens_per_second: float = setting("files that it opens for all of them", 50_000.0)
    open_ms: float = setting("that a task waits for a file to be opened", 0.5)
    hand_out_ms: float = setting("of the driver for each task", 1.0)
    json: bool = setting("print JSON", False)
    debug: bool = setting("tracebacks with error messages", False)


def tell(recipe_path: str, asked: EstimateOptions) -> None:
    """Print the estimate. Raises UsageError, SettingsError, DataError."""
    for name, value in asdict(asked).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < float("inf"):
            raise SettingsError(f"{dashed(name)} {value}: more than 0 is needed")
    recipe = read_recipe(recipe_path)
    rates = rates_of([Path(one) for one in asked.rates])
    cluster = CorpusNodes(
        asked.nodes,
        asked.cores_per_node,
        asked.node_memory_gb * 1e9,
        asked.file_system_gb_per_second * 1e9,
        asked.opens_per_second,
        asked.open_ms / 1e3,
        asked.hand_out_ms / 1e3,
        asked.node_gb_per_second * 1e9,
        asked.task_gb_per_second * 1e9,
    )
    rows, facts = estimate(recipe, rates, cluster, asked.input_tb * 1e12, asked.file_gb * 1e9)
    if asked.json:
        print(json.dumps(dict(facts=asdict(facts), phases=[asdict(row) for row in rows], rates=asdict(rates))))
        return
    print("\n".join(lines(rows, facts, asked)))


HEAD = ["phase", "tasks", "reads", "files", "opened", "GB read", "from all", "GB written", "core-h"]
HEAD += ["from s", "to s", "longest s", "GB memory"]


def lines(rows: list[PhaseRow], facts: EstimateFacts, asked: EstimateOptions) -> list[str]:
    """The estimate as text.

    reads: paths that a task is called with; from all: GB read of lists, of which each task takes a part
    """
    table = [HEAD] + [
        [
            row.name,
            f"{row.tasks:,}",
            f"{row.paths:,}",
            _short(row.files),
            _short(row.opened),
            f"{row.read / 1e9:,.0f}",
            f"{row.shuffled / 1e9:,.0f}",
            f"{row.written / 1e9:,.0f}",
            f"{row.core_seconds / 3600:,.1f}",
            f"{row.first:,.0f}",
            f"{row.last:,.0f}",
            f"{row.longest:,.1f}",
            f"{row.memory / 1e9:,.2f}",
        ]
        for row in rows
    ]
    widths = [max(len(row[at]) for row in table) for at in range(len(HEAD))]
    text = [
        f"{facts.text / 1e12:g} TB of JSON lines, {_short(facts.documents)} documents, {facts.shards:,} shards; "
        f"{asked.nodes} nodes, {facts.workers:,} tasks at a time",
        "",
    ]
    for row in table:
        text.append(
            "  ".join(cell.ljust(w) if not at else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        )
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("files", "opened", "shuffled", "written")}
    return [
        *text,
        "",
        f"time: {facts.seconds:,.0f} s ({facts.seconds / 3600:.2f} h), after {facts.digest_seconds:,.0f} s in which the "
        "driver reads the input for its digests",
        f"all together: {_short(sums['files'])} files, opened {_short(sums['opened'])} times; "
        f"{sums['written'] / 1e12:,.1f} TB written, {sums['shuffled'] / 1e12:,.1f} TB of them read across",
        f"the driver, measured here: {facts.tasks:,} tasks, {facts.plan_seconds:,.1f} s to plan, "
        f"{facts.driver_memory / 1e9:.2f} GB of memory, plan.json of {facts.plan_bytes / 1e6:,.0f} MB",
        "what breaks next, with shards of this size:",
        *(f"  at {size:,.3g} TB: {words}" for size, words in facts.breaks[:6]),
    ]


def _short(number: float) -> str:
    """A number with three digits.

    >>> _short(812), _short(1_234_567), _short(2.5e9)
    ('812', '1.23 M', '2.5 G')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{number / (1e3 if letter == 'k' else size):.3g} {letter}"
    return f"{number:,.0f}"
