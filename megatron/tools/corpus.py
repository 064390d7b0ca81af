# SPDX-License-Identifier: Apache-2.0
"""Process raw text to token files by a recipe, on a laptop, a Ray cluster or a SLURM array, with the same result.

    python -m megatron.tools.corpus run recipe.yaml --output runs/corpus --workers 8 --memory-gb 16
    python -m megatron.tools.corpus plan recipe.yaml --output runs/corpus      # lists its tasks, runs nothing
    python -m megatron.tools.corpus estimate recipe.yaml --rates runs/sample --input-tb 10 --nodes 64
    python -m megatron.tools.corpus status --output runs/corpus                # progress of a run
    python -m megatron.tools.corpus check --output runs/corpus                 # missing and damaged files
    python -m megatron.tools.corpus explain URL --output runs/corpus           # why a document was kept or dropped
    python -m megatron.tools.corpus report --output runs/corpus                # a page: texts kept and dropped

`run` resumes after a kill at any moment. docs/corpus.md has the recipes.
"""

import contextlib
import json
import shutil
import signal
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import DataError, SettingsError, UsageError, did_you_mean, run_main
from megatron.settings.declare import dashed
from megatron.settings.positional import parse_one
from megatron.settings.schema import setting
from megatron.telemetry.figures import WIDE, table
from megatron.telemetry.figures import size as in_units

PROG = "python -m megatron.tools.corpus"


@dataclass(frozen=True)
class CorpusOptions:
    """The folder, the runner and its resources."""

    output: str = setting("folder of the tasks' files, and of the corpus in the end (final/)")
    runner: Literal["local", "ray", "slurm"] = setting("who runs the tasks", "local")
    workers: Optional[int] = setting("tasks at a time (default: one per core); of slurm: tasks of the array", None)
    memory_gb: Optional[float] = setting("memory that all tasks of this machine may take together", None)
    verify: bool = setting("read finished files, and repeat tasks whose files differ from their receipts", False)
    quick: bool = setting("check: compare sizes alone, not every byte", False)
    wait: bool = setting("slurm: wait for the jobs, and submit again what they lost", True)
    sbatch_flags: str = setting("slurm: further flags of sbatch, as one text", "")
    html: str = setting("report, status: where the page goes (report's default: report.html in the output folder)", "")
    status_page: str = setting(
        "run: a page of how far it is, kept up to date, that a browser loads again by itself", ""
    )
    json: bool = setting("print JSON", False)
    phase: str = setting("work: the phase whose tasks are done", "")
    part: int = setting("work: the part of the phase, from 0", 0)
    parts: int = setting("work: how many parts it has", 1)
    debug: bool = setting("tracebacks with error messages", False)


COMMON = ("output", "runner", "workers", "memory_gb", "verify")


def main(argv: list[str]) -> None:
    """Run the command in the first word; its argument is the second."""
    command, words, flags = _split(argv)
    if command == "estimate":
        estimate(words, flags)
        return
    asked = parse_one(flags, CorpusOptions, f"{PROG} {command}", __doc__, COMMON)
    for name in ("workers", "memory_gb", "parts"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            raise SettingsError(f"{dashed(name)} {value}: more than 0 is needed")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses
    COMMANDS[command](words, asked)


def _split(argv: list[str]) -> tuple[str, list[str], list[str]]:
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        if argv:
            return "run", [], argv
        raise UsageError("which command?", do=f"{PROG} {' | '.join(COMMANDS)}")
    command, words, rest = argv[0], [], argv[1:]
    if command not in COMMANDS:
        raise UsageError(
            f"unknown command {command}{did_you_mean(command, COMMANDS)}", do=f"known: {', '.join(COMMANDS)}"
        )
    while rest and not rest[0].startswith("-"):
        words.append(rest.pop(0))
    while len(rest) > 2 and not words and not rest[-1].startswith("-") and rest[-1].endswith((".yaml", ".yml")):
        words.append(rest.pop())  # a recipe after the flags
    return command, words, rest


def _one(words: list[str], what: str) -> str:
    if len(words) != 1:
        got = f"got {len(words)}: {' '.join(words)}" if words else "got none"
        raise UsageError(f"one {what} is wanted, {got}", do=f"{PROG} COMMAND {what.upper()} --output FOLDER")
    return words[0]


def _planned(words: list[str], asked: CorpusOptions):
    """Read a recipe and plan it: (recipe, plan)."""
    from megatron.corpus.plan import make_plan
    from megatron.corpus.recipe import read_recipe

    recipe = read_recipe(_one(words, "recipe"))
    return recipe, make_plan(recipe, Path(asked.output), partial(print, flush=True))


def _last_plan(asked: CorpusOptions):
    """The plan of the last run into the folder."""
    from megatron.corpus.plan import load_plan

    plan = load_plan(Path(asked.output))
    if plan is None:
        raise DataError(f"{asked.output}: no run was started there", do=f"{PROG} run RECIPE --output {asked.output}")
    return plan


# ---------------------------------------------------------------------------------------------------- run


def run(words: list[str], asked: CorpusOptions) -> None:
    from megatron.corpus.counts import summary
    from megatron.corpus.driver import FINAL, counts_by_phase
    from megatron.corpus.driver import run as drive
    from megatron.corpus.plan import save_plan
    from megatron.corpus.runners.local import run_local, workers_for

    recipe, plan = _planned(words, asked)
    output = Path(asked.output)
    save_plan(plan, output)
    with contextlib.suppress(shutil.SameFileError):
        shutil.copyfile(recipe.path, output / "recipe.yaml")
    for line in _set_aside(plan)[:20]:
        print(line, file=sys.stderr)
    if len(plan.set_aside) > 20:
        print(f"set aside: {len(plan.set_aside) - 20} more input files", file=sys.stderr)
    print(f"{len(plan.tasks)} tasks in {len(plan.phases)} phases: {', '.join(plan.phases)}", flush=True)
    memory = asked.memory_gb and int(asked.memory_gb * 1e9)
    if asked.runner == "local":
        workers = workers_for(asked.workers, asked.memory_gb, recipe.task_memory_gb)
        runner = partial(run_local, workers=workers, memory=memory)
    elif asked.runner == "ray":
        from megatron.corpus.runners.ray_tasks import run_ray

        runner = partial(run_ray, workers=asked.workers, task_memory=int(recipe.task_memory_gb * 1e9))
    else:
        from megatron.corpus.runners.slurm_array import run_slurm

        runner = partial(
            run_slurm,
            arrays=asked.workers or 8,
            flags=asked.sbatch_flags.split(),
            memory_gb=asked.memory_gb or 0,
            wait=asked.wait,
        )
    started = time.perf_counter()
    with _Bar() as bar:
        displays = [bar]
        if asked.status_page:
            from megatron.corpus.status import StatusPage

            displays.append(StatusPage(Path(asked.status_page), asked.output))
        drive(plan, output, runner, lambda progress: [show(progress) for show in displays], whole=asked.verify)
    print(f"done in {time.perf_counter() - started:.1f} s: {output / FINAL}")
    print("\n".join(summary(counts_by_phase(plan, output))))


def _set_aside(plan) -> list[str]:
    return [f"set aside: {reason if path in reason else f'{path}: {reason}'}" for path, reason in plan.set_aside]


class _Bar:
    """A progress bar on a terminal, else a line per phase."""

    def __init__(self):
        self.bar, self.printed = None, set()

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()

    def __call__(self, progress) -> None:
        open_phases = [name for name, (done, total) in progress.phases.items() if done < total]
        if sys.stderr.isatty():
            from tqdm import tqdm

            if self.bar is None:
                tqdm.monitor_interval = 0  # no thread: workers are forked
                self.bar = tqdm(total=progress.total, initial=progress.done, unit="task")
            self.bar.set_description(open_phases[0] if open_phases else "done", refresh=False)
            self.bar.update(progress.done - self.bar.n)
            return
        for name, (done, total) in progress.phases.items():
            if done == total and name not in self.printed:
                self.printed.add(name)
                print(f"{name}: {total} of {total} tasks, after {progress.seconds:.1f} s", flush=True)


def plan(words: list[str], asked: CorpusOptions) -> None:
    from megatron.corpus.driver import check as look

    _, planned = _planned(words, asked)
    if asked.json:
        print(planned.to_json())
        return
    missing = set(look(planned, Path(asked.output), whole=False).missing)
    print(f"plan {planned.id}: {len(planned.tasks)} tasks")
    for name, folders in planned.phases.items():
        done = sum(folder not in missing for folder in set(folders))
        print(f"  {name}: {len(set(folders))} tasks" + (f", {done} of them done" if done else ""))
    for line in _set_aside(planned):
        print(f"  {line}")


def work(words: list[str], asked: CorpusOptions) -> None:
    """Run a part of a phase, as a task of a SLURM array."""
    from megatron.corpus.runners.local import workers_for
    from megatron.corpus.runners.slurm_array import work_on

    workers = workers_for(asked.workers, None, 1.0)
    memory = asked.memory_gb and int(asked.memory_gb * 1e9)
    work_on(_last_plan(asked), Path(asked.output), asked.phase, asked.part, asked.parts, workers, memory or None)


# ---------------------------------------------------------------------------------------------------- looking


def check(words: list[str], asked: CorpusOptions) -> None:
    from megatron.corpus.driver import check as look

    output = Path(asked.output)
    planned = _planned(words, asked)[1] if words else _last_plan(asked)
    result = look(planned, output, whole=not asked.quick)
    if asked.json:
        print(json.dumps(vars(result)))
    else:
        for kind, folders in (("missing", result.missing), ("damaged", result.damaged)):
            for folder in folders:
                print(f"{kind}: {folder} ({planned.tasks[folder].about})")
        for folder, reason in result.quarantined.items():
            print(f"set aside: {folder} ({planned.tasks[folder].about}): {reason}")
    if result.missing or result.damaged:
        number = len(result.missing) + len(result.damaged)
        do = "run the same command again" + (" with --verify" if result.damaged else "")
        raise DataError(f"{output}: {number} of {len(planned.tasks)} tasks are missing or damaged", do=do)
    if not asked.json:
        print(f"{len(planned.tasks)} tasks: every file matches its receipt")


def status(words: list[str], asked: CorpusOptions) -> None:
    from megatron.corpus.commit import is_gone
    from megatron.corpus.driver import STATUS
    from megatron.corpus.driver import check as look

    output = Path(asked.output)
    planned = _last_plan(asked)
    missing = set(look(planned, output, whole=False).missing)
    try:
        record = json.loads((output / STATUS).read_text())
    except (OSError, ValueError):
        record = {}
    phases = {n: [len(set(f) - missing), len(set(f))] for n, f in planned.phases.items()}
    age = time.time() - record.get("at", 0)
    state = record.get("state", "unknown")
    if state == "running":
        lost = is_gone(*record["driver"])
        state = "killed: the same command resumes it" if lost else "running, or killed" if age > 60 else state
    if asked.html:
        from megatron.corpus.status import status_page, write_page

        write_page(Path(asked.html), status_page(dict(record, phases=phases, state=state), asked.output))
        print(f"written: {asked.html}", file=sys.stderr)
    if asked.json:
        print(json.dumps(dict(record, phases=phases)))
        return
    left = record.get("seconds_left")
    print(f"{state}, {age:.0f} s ago" + (f", about {left:.0f} s left" if left and state == "running" else ""))
    for name, (done, total) in phases.items():
        bar = "#" * (20 * done // total) if total else ""
        print(f"  {name:<40} [{bar:<20}] {done:>6} of {total}")
    for about, reason in record.get("quarantined", {}).items():
        print(f"  set aside: {about}: {reason}")


def explain(words: list[str], asked: CorpusOptions) -> None:
    """Print why a document was kept or dropped."""
    from megatron.corpus.explain import explain as follow
    from megatron.corpus.explain import history_lines

    histories = follow(_last_plan(asked), Path(asked.output), _one(words, "document"))
    if asked.json:
        print(json.dumps([asdict(history) | dict(fate=history.fate) for history in histories]))
        return
    for history in histories:
        print("\n".join(history_lines(history)))


def report(words: list[str], asked: CorpusOptions) -> None:
    """Write a page about the texts that were kept and dropped."""
    from megatron.corpus.report import make_page

    path = Path(asked.html or Path(asked.output) / "report.html")
    path.write_text(make_page(_last_plan(asked), Path(asked.output)), encoding="utf-8")
    print(f"written: {path}")


def clean(words: list[str], asked: CorpusOptions) -> None:
    from megatron.corpus.driver import clean as remove

    folders, size = remove(_last_plan(asked), Path(asked.output))
    print(f"{folders} folders of other recipes and dead attempts removed, {in_units(size)}")


# ---------------------------------------------------------------------------------------------------- estimates


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


def estimate(words: list[str], flags: list[str]) -> None:
    """Estimate time and disk space of the recipe on other machines; has its own options."""
    from megatron.corpus import estimate as simulated
    from megatron.corpus.recipe import read_recipe

    recipe_path = _one(words, "recipe")
    asked = parse_one(flags, EstimateOptions, f"{PROG} estimate", estimate.__doc__)
    for name, value in asdict(asked).items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and not 0 < value < float("inf"):
            raise SettingsError(f"{dashed(name)} {value}: more than 0 is needed")
    recipe = read_recipe(recipe_path)
    rates = simulated.rates_of([Path(one) for one in asked.rates])
    cluster = simulated.CorpusNodes(
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
    rows, facts = simulated.estimate(recipe, rates, cluster, asked.input_tb * 1e12, asked.file_gb * 1e9)
    if asked.json:
        print(json.dumps(dict(facts=asdict(facts), phases=[asdict(row) for row in rows], rates=asdict(rates))))
        return
    print("\n".join(_estimate_lines(rows, facts, asked)))


_HEAD = ["phase", "tasks", "reads", "files", "opened", "GB read", "from all", "GB written", "core-h"]
_HEAD += ["from s", "to s", "longest s", "GB memory"]


def _estimate_lines(rows, facts, asked: EstimateOptions) -> list[str]:
    """The estimate as text.

    reads: paths that a task is called with; from all: GB read of lists, of which each task takes a part
    """
    cells = [
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
    sums = {name: sum(getattr(row, name) for row in rows) for name in ("files", "opened", "shuffled", "written")}
    return [
        f"{facts.text / 1e12:g} TB of JSON lines, {_short(facts.documents)} documents, {facts.shards:,} shards; "
        f"{asked.nodes} nodes, {facts.workers:,} tasks at a time",
        "",
        table(cells, _HEAD, width=WIDE),
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


COMMANDS = dict(run=run, resume=run, plan=plan, estimate=estimate, check=check, status=status)
COMMANDS |= dict(explain=explain, report=report, clean=clean, work=work)


if __name__ == "__main__":
    run_main(main)
