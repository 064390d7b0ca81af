# SPDX-License-Identifier: Apache-2.0
"""What a run's report says in words and tables: headline numbers, schedule, memory, ranks, experts, totals, settings.

Rows are (name, text). The curves are those of the dashboard's page (telemetry/dashboard).
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.errors import DataError
from megatron.settings.declare import dashed
from megatron.telemetry import heat_map
from megatron.telemetry.curves import LAST_STEPS, running_mean
from megatron.telemetry.directions import best_of
from megatron.telemetry.figures import count, duration, seconds, several, size
from megatron.telemetry.history import OWN_TIME, History
from megatron.telemetry.rank_times import PARTS
from megatron.telemetry.report_page import Grid
from megatron.telemetry.run_record import EXPERT_AXES, LOSS

Rows = list[tuple[str, str]]


# -- headline numbers ----------------------------------------------------------------------------------------------------


def subtitle(history: History) -> str:
    """The model, its layout and the time of the newest launch in one line."""
    run, model = history.run, history.group("model")
    words = []
    if run.get("parameters"):
        words.append(f"{count(run['parameters'])} parameters")
    if model.get("num_layers"):
        words.append(
            f"{model['num_layers']} layers of width {model.get('hidden_size')}, {model.get('seq_length')} tokens"
        )
    mesh = dict(run.get("mesh") or {})
    if mesh:
        mesh["dp"] = mesh.pop("replicate", 1) * mesh.pop("shard", 1) * mesh.get("dp", 1)
        sizes = {axis: f"{axis} {size}" for axis, size in mesh.items() if size > 1}
        words.append(" x ".join(sizes[axis] for axis in sizes if axis not in EXPERT_AXES) or "one process")
        words += [sizes[axis] for axis in EXPERT_AXES if axis in sizes]  # they divide the same ranks once more
    if history.interleaved:
        words.append("records of several runs, interleaved")
    return " \u00b7 ".join(word for word in [*words, str(run.get("time") or "")[:16].replace("T", " ")] if word)


def tiles(history: History, evaluation: Any = None, restarts: int = 0) -> list[tuple[str, str, str]]:
    """The numbers at the top of the page: (value, name, remark)."""
    steps, last = history.steps, history.steps[-1]
    rows, losses = [judged(history)] if history.figures else [], steps.known(history.loss)
    if len(losses):
        last_ones = min(LAST_STEPS, len(losses))
        mean = f"mean of the last {last_ones} steps" if last_ones > 1 else "of the last step"
        value = running_mean(losses, LAST_STEPS)[-1]
        rows.append((f"{value:.3f}", "training loss", f"{mean}; the first was {losses[0]:.3f}"))
    if held := perplexity(history, evaluation):
        rows.append((f"{held[0]:,.1f}", "perplexity", held[1]))
    rows.append(
        (f"{last['iteration']:,}", "iterations", several(restarts, "restart") if restarts else "without a restart")
    )
    if tokens := last["consumed_samples"] * history.sample_tokens:
        rows.append((count(tokens), "tokens trained on", f"{last['consumed_samples']:,} samples"))
    what = "the same with half of causal attention, as Megatron-LM counts today"
    for column, form, name, remark in (
        ("tokens_per_second", "{:,.0f}", "tokens per second", "of all ranks, median of the steps"),
        ("mfu", "{:.1%}", "MFU", mfu_of(history)),
        ("mfu_causal", "{:.1%}", "MFU, causal attention", what),
    ):
        if len(values := steps.known(column)[steps.known(column) != 0]):
            rows.append((form.format(np.median(values)), name, remark))
    return rows


def judged(history: History) -> tuple[str, str, str]:
    """The best value of the selection figure of a task, the name of the figure, and a remark; or its last value."""
    name = history.figures[0]
    curve, direction = history.evaluation(name), history.direction(name)
    points = list(zip(curve.x.astype(int).tolist(), curve.y.tolist(), strict=True))
    if not points:
        return "-", name, "of no validation"
    at, value = best_of(points, direction) if direction else points[-1]
    which = "best" if direction else "last"
    return f"{value:.4f}", name, f"{which} of {several(len(points), 'validation')}, at iteration {at:,}"


def task(history: History) -> Rows:
    """The last evaluation of a task on each set."""
    last = {e.get("split"): e for e in history.evals}
    return [
        (f"{name}, {split}", f"{e[name]:.4f} at iteration {e.get('weights_of', e['iteration']):,}")
        for split, e in last.items()
        for name in history.figures
        if e.get(name) is not None
    ]


def perplexity(history: History, evaluation: Any = None) -> Optional[tuple[float, str]]:
    """The perplexity of the page, and the data that it was measured on."""
    held_out = _find_perplexity(evaluation, "")
    if held_out:
        return held_out
    valid = history.evaluation(LOSS)  # as in the chart
    if not len(valid.x):
        return None
    return math.exp(min(20, valid.y[-1])), f"of validation during training, at iteration {int(valid.x[-1]):,}"


def _find_perplexity(record, name: str) -> Optional[tuple[float, str]]:
    if isinstance(record, list):
        return next(filter(None, (_find_perplexity(item, name) for item in record)), None)
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("perplexity"), (int, float)):
        what = str(record.get("data") or name or "held-out text").rpartition("/")[2]  # a tile is narrow
        tokens = f", {count(record['tokens'])} tokens" if record.get("tokens") else ""
        at = f", iteration {record['iteration']:,}" if isinstance(record.get("iteration"), int) else ""
        return float(record["perplexity"]), f"held out: {what}{tokens}{at}"
    return next(filter(None, (_find_perplexity(inner, part) for part, inner in record.items())), None)


def mfu_of(history: History) -> str:
    """Describe the peak that MFU is relative to, as the run has recorded it."""
    peak = history.run.get("peak") or {}
    if not peak.get("flops"):
        return "model FLOPs, as a share of the peak that the run compared with"
    return f"model FLOPs, as a share of {peak['flops'] / 1e12:,.3g} TFLOP/s a rank: {peak.get('of')}"


# -- schedule ----------------------------------------------------------------------------------------------------------


def schedule(history: History) -> Rows:
    """The schedules of learning rate and batch size."""
    optimizer, batch = history.group("optimizer"), history.group("batch")
    rows = [("learning rate", _learning_rate(optimizer, batch)), ("batch", _batch(history, batch))]
    return [(name, told) for name, told in rows if told]


def _learning_rate(o: dict, b: dict) -> str:
    if o.get("lr") is None:
        return ""
    unit = "samples" if o.get("lr_decay_samples") or b.get("train_samples") else "steps"
    over = o.get("lr_decay_samples") or o.get("lr_decay_iters") or b.get("train_iters") or b.get("train_samples")
    warm = o.get("lr_warmup_samples") or o.get("lr_warmup_iters")
    told = f"{o.get('lr_decay_style', 'decay')} from {o['lr']:g} to {o.get('min_lr') or 0:g}"
    told += f" over {over:,} {unit}" if over else ""
    if o.get("lr_warmup_fraction"):
        return f"{told}, warmed up over {o['lr_warmup_fraction']:.1%} of them"
    return f"{told}, warmed up over {warm:,}" if warm else told


def _batch(history: History, b: dict) -> str:
    """The batch sizes of the recorded steps, and the micro-batch size."""
    sizes = sorted({int(size) for size in history.steps.known("batch_size").tolist() if size})
    if not sizes:
        return ""
    grown = f"{sizes[0]:,} samples a step" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} samples a step"
    micro = b.get("micro_batch_size")
    return f"{grown}, {micro} at a time on each data parallel rank" if isinstance(micro, int) else grown


# -- memory, ranks, experts ----------------------------------------------------------------------------------------------


def memory(history: History) -> Rows:
    """The peak memory of the first rank."""
    used = history.memory["bytes"]
    if not history.memory.has("bytes") or not np.nanmax(used):
        return []
    device = history.run.get("device") or "cpu"
    of = "the whole process" if device == "cpu" else f"tensors on {device}"
    first = int(history.memory["iteration"][used >= 0.99 * np.nanmax(used)][0])
    return [
        ("peak on rank 0", f"{size(np.nanmax(used))}: {of}"),
        ("reached", f"all but 1 % of it by iteration {first:,}"),
        ("other ranks", "were not measured; --dry-run predicts each"),
    ]


def ranks(history: History) -> tuple[Rows, list[Grid]]:
    """Which rank is the slowest, and where the time of a step goes on each; empty for a single rank."""
    table = history.ranks.get(OWN_TIME)
    if table is None or not table.rows:
        return [], []
    excess = heat_map.against_peers(table.values.T, heat_map.stages_of(history.run, table.width))
    mean, own = excess.mean(1), table.values.mean(0)
    slowest = int(mean.argmax())
    told = f"rank {slowest}: {seconds(float(own[slowest]))} of own time a step, {mean[slowest]:+.0%} against its peers"
    parts = {
        part: history.ranks[part].values.mean(0)
        for part in PARTS
        if part in history.ranks and history.ranks[part].width == table.width and history.ranks[part].values.any()
    }
    shown = heat_map.shown_ranks(excess)
    rows = [[f"rank {rank}", *(f"{1000 * times[rank]:.1f} ms" for times in parts.values())] for rank in shown]
    some = f", {len(shown)} of {table.width:,} ranks: those that differ most from their peers"
    caption = f"Where the time of a step goes{some * (len(shown) < table.width)}"
    return [("slowest rank", told)], [Grid(caption, ["", *parts], rows)]


def experts(history: History) -> Rows:
    """The loads of experts; empty for a model without."""
    layers = {layer: table.values.T for layer, table in history.experts.items() if table.rows}
    found = [heat_map.imbalance(layer, loads) for layer, loads in layers.items()]
    if not found:
        return []
    worst, shown = max(found, key=lambda one: one.largest), heat_map.shown_layers(layers)
    some = f"{len(shown)} of {len(layers)} are shown: those with the largest loads"
    return [
        ("largest load at the end", f"{worst.largest:.2f} times the mean, in {worst.layer}"),
        ("smallest load at the end", f"{min(one.smallest for one in found):.2f} times the mean"),
        *((f"without tokens in {one.layer}", _experts_named(one.idle)) for one in found if one.idle),
        *[("layers", some)] * (len(shown) < len(layers)),
    ]


def _experts_named(numbers: list[int]) -> str:
    return f"expert{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:16]))}{', ...' * (len(numbers) > 16)}"


# -- supervisor --------------------------------------------------------------------------------------------------------


def supervision(recorded: Sequence[dict]) -> Rows:
    """The use of time in a supervised job: the sums of its supervisors' accounts in events.jsonl."""
    accounts = [event["account"] for event in recorded if event.get("account") and event["source"] == "supervisor"]
    killed = sum(event["event"] == "supervisor_lost" for event in recorded)
    lost_one = [("no account", f"of {several(killed, 'supervisor')} that {'were' if killed > 1 else 'was'} killed")]
    if not accounts:
        return lost_one * bool(killed)
    wall, productive = (sum(one[name] for one in accounts) for name in ("wall", "productive"))
    lost = Counter()
    for one in accounts:
        lost.update(one["lost"])
    share = lambda took: f"{seconds(took)}, {took / max(wall, 1e-9):.1%}"
    rows = [("supervised time", f"{seconds(wall)}{f', in {len(accounts)} parts' * (len(accounts) > 1)}")]
    rows.append(("steps that count", share(productive)))
    rows += [(cause, share(took)) for cause, took in lost.most_common() if took >= 0.05]
    for name in ("steps", "repeated_steps", "restarts", "checkpoints"):
        rows.append((name.replace("_", " "), f"{sum(one[name] for one in accounts):,}"))
    return rows + lost_one * bool(killed)


# -- the whole run -------------------------------------------------------------------------------------------------------


def totals(history: History, events: Sequence[dict] = ()) -> dict[str, str]:
    """Sums over all steps that count. events: `run_events`"""
    steps, loss = history.steps, history.loss
    took = np.nan_to_num(steps["seconds"])
    samples, saves = steps[-1]["consumed_samples"], [event for event in events if event["event"] == "save"]
    saving = [event["seconds"] for event in saves if event.get("seconds") is not None]
    rows = {
        "iterations": f"{steps[-1]['iteration']:,}",
        "samples": f"{samples:,}",
        "tokens": f"{samples * history.sample_tokens:,}" if samples * history.sample_tokens else "",
        "time in training steps": duration(took.sum()),
        "time in evaluation": duration(sum(e.get("seconds") or 0.0 for e in history.evals)),
        "median time of a step": seconds(float(np.median(took))),
        "checkpoints saved": f"{len(saves):,}" + (f", {seconds(statistics.fmean(saving))} each" if saving else ""),
        "skipped steps (fp16 overflow)": str(np.count_nonzero(np.nan_to_num(steps["skipped"]))),
        "steps without a finite loss": str(np.isnan(steps[loss]).sum() if loss in steps.names else 0),
        "steps of another run": f"{history.interleaved:,}, which wrote to the same file" * bool(history.interleaved),
    }
    for evaluation in {e.get("split"): e for e in history.evals if e.get(loss) is not None}.values():
        rows[f"{'final' if evaluation.get('final') else 'last'} {evaluation['split']} loss"] = f"{evaluation[loss]:.4f}"
    return {name: value for name, value in rows.items() if value}


def provenance(history: History) -> dict[str, str]:
    """Host, device, command and versions of the run."""
    run = history.run
    rows = {name: run.get(name) for name in ("time", "host", "machine", "device", "commit", "parameters")}
    rows["parameters"] = f"{run['parameters']:,}" if run.get("parameters") else ""
    rows["command"] = " ".join(map(str, run.get("command") or []))
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in (run.get("versions") or {}).items())
    rows["ranks"] = ", ".join(f"{axis} {size}" for axis, size in (run.get("mesh") or {}).items())
    rows["started from iterations"] = ", ".join(map(str, history.starts))
    if history.damaged_lines:
        rows["unreadable lines in metrics.jsonl"] = history.damaged_lines
    return {name: str(value) for name, value in rows.items() if value not in (None, "")}


def settings(history: History) -> dict[str, dict[str, str]]:
    """Map group -> flag -> value, without settings that have no value."""
    groups = dict(history.run.get("config") or {})
    groups = {**(groups.pop("extra", None) or {}), **groups}  # a recipe's own settings first
    groups.pop("given", None)
    shown = {}
    for group, fields in groups.items():
        if isinstance(fields, dict):
            rows = {dashed(name): _words(value) for name, value in fields.items() if value is not None}
            shown.update({group: rows} if rows else {})
    return shown


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- other files of the run ----------------------------------------------------------------------------------------------


def read_samples(folder: Path) -> list[tuple[str, str]]:
    """(prompt, continuation) of generations.jsonl, or the whole of samples.txt as one continuation."""
    lines = folder / "generations.jsonl"
    if lines.is_file():
        samples = []
        for line in lines.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                prompt = str(record.get("prompt", ""))
            except (ValueError, AttributeError):
                continue
            text = str(record.get("completion", record.get("text", "")))
            samples.append((prompt, text.removeprefix(prompt)))
        return samples
    plain = folder / "samples.txt"
    return [("", plain.read_text(encoding="utf-8", errors="replace").strip())] if plain.is_file() else []


def read_evaluation(folder: Path):
    """Read evaluation.jsonl or evaluation.json, of any shape; None without them. Raises DataError."""
    lines, whole = folder / "evaluation.jsonl", folder / "evaluation.json"
    path = lines if lines.is_file() else whole
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        if path == whole:
            return json.loads(text)
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
        return records[0] if len(records) == 1 else records
    except ValueError as error:
        raise DataError(
            f"{path}: not valid JSON", why=str(error), do="run the evaluation again, or remove the file"
        ) from None


def _number(value: float, name: str) -> str:
    if isinstance(value, int):
        return str(value) if isinstance(value, bool) else f"{value:,}"
    return f"{value:,.1f}" if name.endswith("perplexity") else f"{value:.6g}"


def rows_of(value: Any, name: str = "") -> dict[str, str]:
    """An evaluation of any shape as rows: nested names are joined."""
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        parts = enumerate(value, 1)
    else:
        return {name or "result": _number(value, name) if isinstance(value, (int, float)) else _words(value)}
    return {
        key: row
        for part, inner in parts
        for key, row in rows_of(inner, f"{name} / {part}" if name else str(part)).items()
    }
