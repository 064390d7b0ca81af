# SPDX-License-Identifier: Apache-2.0
"""The tables of a run's report: schedule, data, memory and events, as rows of (name, text)."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Optional

from megatron.errors import Failure
from megatron.pipeline.draw import svg
from megatron.pipeline.schedule import default_chunks, stage_map
from megatron.pipeline.simulate import bubble_of, make_rank_schedules, simulate
from megatron.telemetry import expert_map, heat_map
from megatron.telemetry.curves import data_url, validation_points
from megatron.telemetry.directions import best_of
from megatron.telemetry.figures import count, seconds, several, size
from megatron.telemetry.run_record import History

Rows = list[tuple[str, str]]
SHOWN = 40  # maximal number of events in the table: the last ones
WIDEST = 16  # maximal number of pipeline ranks that are drawn


def group(history: History, name: str) -> dict:
    """A group of the settings that the run was started with last; empty if there is none."""
    found = (history.run.get("config") or {}).get(name)
    return found if isinstance(found, dict) else {}


# -- task --------------------------------------------------------------------------------------------------------------


def judged(history: History) -> tuple[str, str, str]:
    """The best value of the selection figure of a task, the name of the figure, and a remark; or its last value."""
    name = history.figures[0]
    points, direction = validation_points(history.evals, name), history.direction(name)
    if not points:
        return "-", name, "of no validation"
    at, value = best_of(points, direction) if direction else points[-1]
    which = "best" if direction else "last"
    return f"{value:.4f}", name, f"{which} of {several(len(points), 'validation')}, at iteration {at:,}"


def task(history: History) -> Rows:
    """The last evaluation of a task on each set."""
    last = {e.get("split"): e for e in history.evals}
    return [
        (f"{name}, {split}", f"{e[name]:.4f} at iteration {e['iteration']:,}")
        for split, e in last.items()
        for name in history.figures
        if e.get(name) is not None
    ]


# -- schedule ----------------------------------------------------------------------------------------------------------


def schedule(history: History) -> Rows:
    """The schedules of learning rate and batch size, and the order of passes in a step."""
    optimizer, batch = group(history, "optimizer"), group(history, "batch")
    rows = [("learning rate", _learning_rate(optimizer, batch)), ("batch", _batch(history, batch))]
    pipeline = _pipeline(history)
    if pipeline:
        name, pp, num_microbatches, chunks = pipeline
        told = f"{name} over {pp} ranks{f' of {chunks} chunks' * (chunks > 1)}, {num_microbatches} micro-batches a step"
        rows.append(("pipeline", told))
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
    sizes = sorted({step["batch_size"] for step in history.steps if step.get("batch_size")})
    if not sizes:
        return ""
    grown = f"{sizes[0]:,} samples a step" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} samples a step"
    micro = b.get("micro_batch_size")
    return f"{grown}, {micro} at a time on each data parallel rank" if isinstance(micro, int) else grown


def _pipeline(history: History) -> Optional[tuple[str, int, int, int]]:
    """(schedule, ranks, micro-batches of a step, chunks) of a run with a pipeline."""
    p, b, mesh = group(history, "parallel"), group(history, "batch"), history.run.get("mesh") or {}
    pp, micro, whole = mesh.get("pp") or 1, b.get("micro_batch_size"), b.get("global_batch_size")
    if pp == 1 or not isinstance(micro, int) or not whole:
        return None
    dp = (mesh.get("replicate") or 1) * (mesh.get("shard") or 1)
    layers, each = group(history, "model").get("num_layers"), p.get("num_layers_per_virtual_pipeline_stage")
    chunks = p.get("num_virtual_stages_per_pipeline_rank") or (layers // (pp * each) if layers and each else None)
    name = p.get("pipeline_schedule") or "1f1b"
    name = "interleaved" if name == "1f1b" and (chunks or 1) > 1 else name
    return name, pp, whole // micro // dp, chunks or default_chunks(name)


def schedule_plot(history: History) -> list[tuple[str, str]]:
    """Draw the simulated passes of a step: (caption, picture). Empty without a pipeline, or for a schedule from a file."""
    pipeline = _pipeline(history)
    if not pipeline or pipeline[1] > WIDEST:
        return []
    name, pp, num_microbatches, chunks = pipeline
    drawn = max(1, min(num_microbatches, 2 * pp))
    try:
        times = simulate(make_rank_schedules(name, pp, drawn, chunks), stage_map(name, pp, chunks))
    except (Failure, ValueError, KeyError):
        return []
    short = {key: (start / chunks, end / chunks) for key, (start, end) in times.items()}
    of = (
        f"{drawn} of {num_microbatches} micro-batches"
        if drawn < num_microbatches
        else several(num_microbatches, "micro-batch", "micro-batches")
    )
    caption = f"A step as it was planned, {of}: {bubble_of(times, pp):.0%} waiting (simulated, not measured)"
    return [(caption, data_url(svg({name: short}, "time: 1 is the forward pass of a rank's layers")))]


# -- data --------------------------------------------------------------------------------------------------------------


def data(history: History) -> Rows:
    """The blend: for each dataset, its share of the samples trained on, according to its weight."""
    from megatron.data.blend import parse_blend

    d = group(history, "data")
    words = d.get("train_data_path") or d.get("data_path") or []
    samples = history.steps[-1]["consumed_samples"]
    tokens = samples * int(group(history, "model").get("seq_length") or 0)
    if not words:
        return [("synthetic", "samples that are made up, no files")] if d.get("mock_data") else []
    try:
        blend = parse_blend(words, "--data-path")
    except Failure:
        return [("files", " ".join(map(str, words)))]
    rows = []
    for place, prefix in enumerate(blend.prefixes):
        share = 1.0 if len(blend.prefixes) == 1 else blend.weights and blend.weights[place]
        had = f"{share:.1%} of the samples: about {count(share * samples)}, {count(share * tokens)} tokens"
        rows.append((prefix, had if share else "as large a part as it has of all tokens"))
    return rows + ([("split", str(d["split"]))] if d.get("split") else [])


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(history: History) -> Rows:
    """The peak memory of the first rank."""
    found = [record for record in history.memory if record.get("bytes")]
    if not found:
        return []
    most = max(found, key=lambda record: record["bytes"])
    device = history.run.get("device") or "cpu"
    of = "the whole process" if device == "cpu" else f"tensors on {device}"
    first = next(record["iteration"] for record in found if record["bytes"] >= 0.99 * most["bytes"])
    return [
        ("peak on rank 0", f"{size(most['bytes'])}: {of}"),
        ("reached", f"all but 1 % of it by iteration {first:,}"),
        ("other ranks", "were not measured; --dry-run predicts each"),
    ]


# -- ranks -------------------------------------------------------------------------------------------------------------


def ranks(history: History) -> tuple[list[tuple[str, str]], Rows]:
    """Pictures and rows about the times of the ranks; empty for a single rank."""
    records = heat_map.usable(history.ranks)
    count = len(records[-1]["seconds"]["data"]) if records else 0
    if count < 2:
        return [], []
    stages = heat_map.stages_of(history.run, count)
    values = heat_map.excess(records, stages)
    shown = heat_map.shown_ranks(values)
    peers = "the other ranks of its stage" if stages[-1] else "the other ranks"
    pictures = [
        (
            f"Own time of each rank against {peers} (red: longer, the others wait; blue: shorter)",
            data_url(heat_map.heat_map(records, stages)),
        ),
        ("Where the time of a step goes", data_url(heat_map.step_bars(records, shown))),
    ]
    mean = values.mean(1)
    slowest = int(mean.argmax())
    own = sum(heat_map.times_of(records, part) for part in heat_map.OWN).mean(1)
    rows = [
        (
            "slowest rank",
            f"rank {slowest}: {seconds(float(own[slowest]))} of own time a step, {mean[slowest]:+.0%} against its peers",
        )
    ]
    if len(shown) < count:
        rows.append(("ranks", f"{len(shown)} of {count:,} are drawn: those that differ most from their peers"))
    return pictures, rows


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(history: History) -> tuple[list[tuple[str, str]], Rows]:
    """Pictures and rows about the loads of experts; empty for a model without."""
    records = expert_map.usable(history.experts)
    if not records:
        return [], []
    layers, iterations = expert_map.layers_of(records), [record["iteration"] for record in records]
    shown = expert_map.shown_layers(layers)
    pictures = [
        (f"{layer}: tokens of each expert", data_url(expert_map.expert_map(iterations, layers[layer])))
        for layer in shown
    ]
    found = [expert_map.imbalance(layer, loads) for layer, loads in layers.items()]
    worst = max(found, key=lambda one: one.largest)
    rows = [
        (
            "colours",
            f"red: more than the mean, the strongest {expert_map.MOST:g} times; blue: fewer, the strongest none",
        ),
        ("largest load at the end", f"{worst.largest:.2f} times the mean, in {worst.layer}"),
        ("smallest load at the end", f"{min(one.smallest for one in found):.2f} times the mean"),
        *((f"without tokens in {one.layer}", _experts_named(one.idle)) for one in found if one.idle),
    ]
    if len(shown) < len(layers):
        rows.append(("layers", f"{len(shown)} of {len(layers)} are drawn: those with the largest loads"))
    return pictures, rows


def _experts_named(numbers: list[int]) -> str:
    return f"expert{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:16]))}{', ...' * (len(numbers) > 16)}"


# -- events ------------------------------------------------------------------------------------------------------------


def events(history: History, recorded: Sequence[dict] = ()) -> Rows:
    """The events in order, consecutive saves in one row; of a long run the last ones. recorded: events of events.jsonl"""
    rows = [*_events_of_metrics(history, until=recorded[0]["time"] if recorded else math.inf), *_recorded(recorded)]
    if history.interleaved:
        told = f"{several(history.interleaved, 'step')} of another run, which wrote to the same metrics file"
        rows.append(("interleaved records", told))
    left_out = len(rows) - SHOWN
    return [("before these", several(left_out, "event")), *rows[-SHOWN:]] if left_out > 0 else rows


def _recorded(events: Sequence[dict]) -> Rows:
    """The events of events.jsonl. Consecutive events of one kind share a row if they are only information."""
    rows = []
    for (kind, level), group_of in itertools.groupby(events, key=lambda event: (event["event"], event["level"])):
        row = list(group_of)
        if kind == "save":
            rows.append(_saved([dict(event, iteration=event["iteration"] or 0) for event in row]))
        elif level == "info" and len(row) > 1:
            rows.append((_at(row[-1]), f"{row[-1]['message']} ({len(row)} such events)"))
        else:
            urgency = "" if level == "info" else f"{level}: "
            rows += [(_at(event), f"{urgency}{event['message']}") for event in row]
    return rows


def _events_of_metrics(history: History, until: float) -> Rows:
    """Starts, saves, spikes and ends from the metrics, for the time before events.jsonl or for a run without it."""
    rows, saves = [], []
    launches, reached = 0, 0
    early = [event for event in _with_spikes(history) if until == math.inf or _seconds(event) < until]
    for event in [*early, {"kind": "the end of all"}]:
        if event["kind"] == "save":
            saves.append(event)
            continue
        if saves:
            rows.append(_saved(saves))
            saves = []
        if event["kind"] == "run":
            launches += 1
            rows.append((_at(event), _started(event, launches, reached)))
        elif event["kind"] == "spike":
            rows.append((_at(event), f"spike: {event.get('why', '')}"))
        elif event["kind"] == "rewind":
            rows.append((_at(event), "went back to here"))
        elif event["kind"] == "end":
            code = event.get("code")
            rows.append((_at(event), f"ended with exit code {code}" + f": {event['why']}" * bool(event.get("why"))))
        reached = max(reached, event.get("iteration", 0))
    return rows


def _seconds(event: dict) -> float:
    """The time of a record of metrics.jsonl in Unix seconds; infinity for a step, whose time is not recorded."""
    try:
        return datetime.fromisoformat(event["time"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return math.inf


def _with_spikes(history: History) -> list[dict]:
    """The events, with the spikes that caused no rollback inserted in order."""
    spikes = [
        dict(kind="spike", iteration=step["iteration"], why=f"{step['spike']:.1f} deviations above the median")
        for step in history.steps
        if step.get("spike")
    ]
    found = list(history.events)
    for spike in spikes:
        at = next((n for n, e in enumerate(found) if e["iteration"] >= spike["iteration"] and e["kind"] != "run"), None)
        found.insert(len(found) if at is None else at, spike)
    return found


def _at(event: dict) -> str:
    when = event.get("time") or ""
    when = datetime.fromtimestamp(when).isoformat() if isinstance(when, (int, float)) else str(when)
    clock, at = when[:16].replace("T", " "), event.get("iteration")
    return " \u00b7 ".join(filter(None, ["" if at is None else f"iteration {at:,}", clock]))


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


def _started(event: dict, launches: int, reached: int) -> str:
    if launches == 1:
        return f"started on {event.get('host') or 'this machine'}"
    lost = reached - event["iteration"]
    return "restarted" + (f"; the log had reached iteration {reached:,}" if lost > 0 else "")


def _saved(saves: list[dict]) -> tuple[str, str]:
    took = [event["seconds"] for event in saves if event.get("seconds") is not None]
    mean = f", {seconds(sum(took) / len(took))} each" if took else ""
    if len(saves) == 1:
        return _at(saves[0]), f"saved{mean.removesuffix(' each')}"
    return _at(saves[-1]), f"saved {len(saves)} times since iteration {saves[0]['iteration']:,}{mean}"
