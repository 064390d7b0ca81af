# SPDX-License-Identifier: Apache-2.0
"""The HTML report of a corpus run: `python -m megatron.tools.corpus report --output FOLDER`.

Documents, bytes and tokens by stage and rule; lengths, languages, domains, duplicates; samples kept and dropped.
"""

import json
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, Optional

from megatron.corpus.driver import counts_by_phase
from megatron.corpus.filtering import KEPT, SAMPLES
from megatron.corpus.plan import TASKS, CorpusPlan
from megatron.data.tables import is_number
from megatron.telemetry.curves import data_url
from megatron.telemetry.drawing import BLUE, GREEN, INK, LINE, ORANGE, RED, new_figure, plain, svg_of
from megatron.telemetry.figures import size
from megatron.telemetry.report_page import Grid, Section, page

SHOWN = 400  # characters of a sample
PAIRS = 6  # samples of a rule
BARS = 20  # of domains and languages
HISTOGRAMS = 24


def make_page(plan: CorpusPlan, output: Path) -> str:
    """The report on the finished tasks, as HTML without further files."""
    counts = counts_by_phase(plan, output)
    funnel = funnel_of(plan, counts)
    tokens = tokens_of(plan, counts)
    rate = tokens / funnel[-1]["bytes"] if tokens and funnel[-1]["bytes"] else None
    samples = read_samples(plan, output)
    done = sum(totals["tasks"] for totals in counts.values())
    total = sum(len(folders) for folders in plan.phases.values())
    state = "complete" if done == total else f"{done} of {total} tasks are done"
    sections = [
        Section("Funnel", pictures=[("Documents and bytes after each stage", _funnel(funnel))], wide=True),
        Section("By stage", grids=[_stages(funnel, rate)]),
        Section("By rule", grids=[_rules(funnel, rate), _cuts(counts), _changes(counts)]),
        Section("Set aside", grids=[_set_aside(plan, counts)]),
        Section("Kept documents", pictures=_nature(counts)),
        Section("Figures of the filters", pictures=_figures(counts), folded=True),
        Section("Duplicates and other stages", pictures=_histograms(counts), grids=_examples(counts)),
        Section("Samples, dropped and kept", grids=_side_by_side(samples)),
        Section("Time", grids=[_times(counts, funnel[0]["bytes"])]),
    ]
    return page("Corpus", f"{output}, plan {plan.id}: {state}", _tiles(funnel, tokens, counts), sections)


# ---------------------------------------------------------------------------------------------------- numbers


def funnel_of(plan: CorpusPlan, counts: dict[str, dict]) -> list[dict[str, Any]]:
    """A row for each stage that writes documents: name, kept documents and bytes, and `dropped` by rule.

    lost: number of dropped documents; more: of additional ones by cutting; share: of the documents read, where pieces of
    one count once. Consecutive filters run in one pass, but have a row each by their rules.
    """
    rows: list[dict[str, Any]] = []
    for stage in plan.stages:
        last = counts[[*stage.phases][-1]]
        if stage.name == "filter":
            [(phase, folders)] = stage.phases.items()
            names = [name for name, *_ in plan.tasks[folders[0]].options["filters"]]
            rows += _filter_rows(phase, names, last)
        elif "documents" in last and "tokens" not in last:
            size = last.get("bytes", rows[-1]["bytes"] if rows else 0)
            rows.append(dict(name=stage.name, documents=last["documents"], bytes=size, dropped=last.get("dropped", {})))
    rows = rows or [dict(name="nothing yet", documents=0, bytes=0, dropped={})]
    before, share = rows[0]["documents"], 1.0
    for row in rows:
        lost = sum(one["documents"] for one in row["dropped"].values()) or max(0, before - row["documents"])
        share *= 1 - lost / before if before else 1
        row.update(lost=lost, more=row["documents"] - before + lost, share=share)
        before = row["documents"]
    return rows


def tokens_of(plan: CorpusPlan, counts: dict[str, dict]) -> Optional[int]:
    """Tokens of all shards; None until all are tokenized."""
    for name, phase_counts in counts.items():
        if name.endswith("tokenize.tokens") and phase_counts["tasks"] == len(plan.phases[name]):
            return phase_counts["tokens"]
    return None


def _filter_rows(phase: str, names: list[str], last: dict) -> list[dict[str, Any]]:
    documents, size = last.get("documents_in", 0), last.get("bytes_in", 0)
    rows = []
    for name in names:
        dropped = {rule: one for rule, one in last.get("dropped", {}).items() if _of_filter(rule, name)}
        documents -= sum(one["documents"] for one in dropped.values())
        size -= sum(one["bytes"] for one in dropped.values())
        rows.append(dict(name=f"{phase}: {name}", documents=documents, bytes=size, dropped=dropped))
    if rows:
        rows[-1]["bytes"] = last.get("bytes", size)  # includes changes by filters
    return rows


def _of_filter(rule: str, name: str) -> bool:
    return rule == name or rule.startswith(f"{name}.") and not rule.startswith(f"{name}..")


def read_samples(plan: CorpusPlan, output: Path) -> dict[str, list[dict]]:
    """Rule -> its samples over all shards, those with the smallest hashes first."""
    samples: dict[str, list[dict]] = {}
    for phase, folders in plan.phases.items():
        for folder in dict.fromkeys(folders):
            path = output / TASKS / folder / SAMPLES
            if "-filter" in phase and path.exists():
                for line in path.read_bytes().splitlines():
                    entry = json.loads(line)
                    samples.setdefault(entry["rule"], []).append(entry)
    return {rule: sorted(rows, key=lambda one: one["rank"])[: plan.samples] for rule, rows in sorted(samples.items())}


def _tiles(funnel: list[dict], tokens: Optional[int], counts: dict) -> list[tuple[str, str, str]]:
    first, last = funnel[0], funnel[-1]
    more = sum(row["more"] for row in funnel)
    cut = f"; {more:,} of them made by cutting others" if more else ""
    seconds = sum(totals["seconds"] for totals in counts.values())
    tiles = [
        (f"{first['documents']:,}", "documents read", f"{size(first['bytes'])} of text"),
        (f"{last['documents']:,}", "documents in the corpus", f"{size(last['bytes'])} of text{cut}"),
        (f"{last['share']:.1%}", "of the documents kept", f"{last['bytes'] / max(1, first['bytes']):.1%} of the text"),
    ]
    if tokens is not None:
        tiles.append((f"{tokens:,}", "tokens", f"{last['bytes'] / max(1, tokens):.2f} bytes a token"))
    speed = first["bytes"] / 1e6 / seconds if seconds else 0
    return [*tiles, (f"{seconds:,.0f} s", "of one core", f"{speed:.1f} MB of input a second")]


# ---------------------------------------------------------------------------------------------------- tables


def _stages(funnel: list[dict], rate: Optional[float]) -> Grid:
    more = ["more, by cutting"] if any(row["more"] for row in funnel) else []
    head = ["stage", "dropped", *more, "documents", "of those read", "MB of text", *(["tokens, about"] if rate else [])]
    rows = []
    for row in funnel:
        cells = [row["name"], *(f"{row[name]:,}" for name in ("lost", *(["more"] if more else []), "documents"))]
        cells += [f"{row['share']:.1%}", f"{row['bytes'] / 1e6:,.2f}"]
        rows.append([*cells, *([f"{row['bytes'] * rate:,.0f}"] if rate else [])])
    return Grid("", head, rows)


def _times(counts: dict, read: int) -> Grid:
    rows = [
        [name, f"{totals['tasks']:,}", f"{totals['seconds']:,.1f}", f"{read / 1e6 / max(totals['seconds'], 1e-3):,.1f}"]
        for name, totals in counts.items()
    ]
    return Grid("", ["phase", "tasks done", "seconds of a core", "MB of input a second"], rows)


def _rules(funnel: list[dict], rate: Optional[float]) -> Grid:
    head = ["rule", "documents dropped", "of those read", "MB of text", *(["tokens, about"] if rate else [])]
    total = max(1, funnel[0]["documents"])
    rules = [(row["name"], rule, one) for row in funnel for rule, one in row["dropped"].items() if one.get("documents")]
    rows = []
    for name, rule, one in rules:
        label = rule if rule.startswith(name.rpartition(": ")[2]) else f"{name}: {rule}"
        cells = [label, f"{one['documents']:,}", f"{one['documents'] / total:.2%}", f"{one['bytes'] / 1e6:,.2f}"]
        rows.append([*cells, *([f"{one['bytes'] * rate:,.0f}"] if rate else [])])
    return Grid("Dropped", head, rows)


def _cuts(counts: dict) -> Grid:
    cut = [(name, totals) for name, totals in counts.items() if totals.get("cut")]
    names = ("cut", "passages", "bytes_cut", "pieces")
    rows = [[name, *(f"{totals[n]:,}" if n in totals else "" for n in names)] for name, totals in cut]
    return Grid("Cut", ["stage", "documents", "passages", "bytes", "resulting documents"], rows)


def _changes(counts: dict) -> Grid:
    rows = [[rule, f"{n:,}"] for totals in counts.values() for rule, n in totals.get("changed", {}).items()]
    return Grid("Changed, and kept", ["rule", "documents"], rows)


def _set_aside(plan: CorpusPlan, counts: dict) -> Grid:
    first = next(iter(counts.values()))
    rows = [["lines", reason, f"{n:,}"] for reason, n in first.get("rejected", {}).items()]
    rows += [[path, reason, "file"] for path, reason in first.get("damaged", {}).items()]
    rows += [[path, reason, "file"] for path, reason in plan.set_aside]
    return Grid("Input that is no documents", ["where", "why", "how many"], rows)


def _examples(counts: dict) -> list[Grid]:
    """Examples in the counts of stages: lists of objects."""
    grids = []
    for name, totals in counts.items():
        rows = totals.get("examples")
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            head = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[_short(row.get(key, "")) for key in head] for row in rows[:20]]
            grids.append(Grid(f"{name}: examples", head, cells))
    return grids


def _side_by_side(samples: dict[str, list[dict]]) -> list[Grid]:
    kept = samples.get(KEPT, [])
    grids = []
    for number, (rule, rows) in enumerate((r, rows) for r, rows in samples.items() if r != KEPT):
        begin = number * PAIRS % max(1, len(kept))
        others = (kept[begin:] + kept[:begin])[:PAIRS]
        cells = [[_cell(a), _cell(b)] for a, b in zip_longest(rows[:PAIRS], others[: len(rows)])]
        grids.append(Grid(rule, ["dropped", "kept, for comparison"], cells))
    return grids or [Grid("", ["kept"], [[_cell(one)] for one in kept[:PAIRS]])]


def _cell(entry: Optional[dict]) -> str:
    """A sample in a cell: its name and figures on the first line, the beginning of its text on the second."""
    if entry is None:
        return ""
    figures = "" if entry["rule"] == KEPT else ", ".join(f"{k} {_short(v)}" for k, v in entry["figures"].items())
    name = entry.get("url") or entry.get("id") or ""
    head = " | ".join(filter(None, (str(name)[:100], f"{entry['characters']:,} characters", figures)))
    text = " ".join(entry["text"].split())[:SHOWN]
    return f"{head}\n{text}" + " ..." * (entry["characters"] > SHOWN)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:SHOWN]


# ---------------------------------------------------------------------------------------------------- pictures


def _picture(draw: Callable, width: float = 5.4, height: float = 3.1) -> str:
    figure = new_figure(width, height, "the report")
    axes = figure.add_subplot()
    draw(axes)
    axes.set_axisbelow(True)
    plain(axes)
    return data_url(svg_of(figure))


def _funnel(funnel: list[dict]) -> str:
    def draw(axes):
        names = [row["name"] for row in funnel]
        for key, shift, colour in (("documents", -0.2, BLUE), ("bytes", 0.2, ORANGE)):
            total = max(1, funnel[0][key])
            shares = [100 * (row["share"] if key == "documents" else row[key] / total) for row in funnel]
            axes.barh([at + shift for at in range(len(names))], shares, 0.36, color=colour, label=key)
            for at, share in enumerate(shares):
                axes.text(share + 0.6, at + shift, f"{share:.1f} %", va="center", fontsize=8, color=INK)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, 112)
        axes.set_xlabel("per cent of what was read")
        axes.legend(frameon=False, fontsize=9, labelcolor=INK, loc="lower right")

    return _picture(draw, 11.0, 1.2 + 0.55 * len(funnel))


def _bars(counts: dict[str, int], colour: str, label: str) -> str:
    rows = sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:BARS]

    def draw(axes):
        axes.barh(range(len(rows)), [number for _, number in rows], 0.7, color=colour)
        axes.set_yticks(range(len(rows)), [_label(name) for name, _ in rows], fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_major_locator(_few_ticks())

    return _picture(draw, height=max(2.2, 0.7 + 0.2 * len(rows)))


def _few_ticks():
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4, integer=True)


def _label(name: str) -> str:
    return name.replace("$", r"\$")[:36]


def _columns(series: dict[str, tuple[dict[str, int], str]], label: str) -> str:
    """Histograms of {bucket: count} side by side: label -> (counts, colour)."""
    buckets = sorted({float(bucket) for counts, _ in series.values() for bucket in counts})
    places = {bucket: at for at, bucket in enumerate(buckets)}

    def draw(axes):
        for number, (name, (counts, colour)) in enumerate(series.items()):
            width = 0.84 / len(series)
            shift = (number - (len(series) - 1) / 2) * width
            at = [places[float(bucket)] + shift for bucket in counts]
            axes.bar(at, list(counts.values()), width, color=colour, label=name)
        every = -(-len(buckets) // 9)
        axes.set_xticks(range(0, len(buckets), every), [f"{b:,.6g}" for b in buckets[::every]])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel(label)
        axes.set_ylabel("documents")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.yaxis.set_major_locator(_few_ticks())
        axes.grid(axis="y", color=LINE, alpha=0.5, linewidth=0.7)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=9, labelcolor=INK)

    return _picture(draw)


def _nature(counts: dict) -> list[tuple[str, str]]:
    """Lengths, languages and domains of the documents after the last filters."""
    filtered = [totals for totals in counts.values() if totals.get("lengths")]
    pictures = []
    if filtered:
        lengths = _columns({"documents": (filtered[-1]["lengths"], BLUE)}, "characters of a document, at least")
        pictures.append(("Lengths of documents after the last filters", lengths))
        if filtered[-1].get("domains"):
            pictures.append(("Commonest domains", _bars(filtered[-1]["domains"], GREEN, "documents")))
    for totals in counts.values():
        for name, fates in totals.get("figures", {}).items():
            if name.rpartition(".")[2] in ("language", "lang"):
                together: dict[str, int] = {}
                for one in fates.values():
                    for language, number in one.items():
                        together[language] = together.get(language, 0) + number
                pictures.append(("Languages before the filter", _bars(together, ORANGE, "documents")))
    return pictures


def _figures(counts: dict) -> list[tuple[str, str]]:
    """Histograms of the filters' figures, for kept and dropped documents."""
    pictures = []
    for totals in counts.values():
        for name, fates in totals.get("figures", {}).items():
            if all(is_number(bucket) for one in fates.values() for bucket in one) and len(pictures) < HISTOGRAMS:
                series = {
                    fate: (fates[fate], colour) for fate, colour in ((KEPT, BLUE), ("dropped", RED)) if fate in fates
                }
                if sum(len(one) for one, _ in series.values()) > 1:
                    pictures.append((name, _columns(series, name.rpartition(".")[2] + ", at least")))
    return pictures


def _histograms(counts: dict) -> list[tuple[str, str]]:
    """Histograms of other stages: similarities, sizes of groups."""
    pictures = []
    for phase, totals in counts.items():
        for name, entry in totals.items():
            if name in ("lengths", "figures", "dropped", "changed", "domains", "rejected", "damaged"):
                continue
            if isinstance(entry, dict) and any(entry.values()) and all(is_number(bucket) for bucket in entry):
                pictures.append((f"{phase}: {name}", _columns({name: (entry, BLUE)}, name)))
    return pictures
