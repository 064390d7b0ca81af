# SPDX-License-Identifier: Apache-2.0
"""The model card (README.md) of an export: what the model is, what it was trained on, and how good it was."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.lineage import Ancestor, ancestors
from megatron.data.blend import parse_blend
from megatron.model.facts import Facts
from megatron.model.recipe import kind_of
from megatron.storage.urls import UrlPath
from megatron.telemetry.history import History, read_history
from megatron.telemetry.run_folder import find_metrics
from megatron.telemetry.run_record import OF_EVERY_EVALUATION

Rows = list[tuple[str, str]]
UNITS = {"lm loss": "nats per token"}


def model_card(
    name: str,
    record: Mapping[str, Any],
    facts: Facts,
    checkpoint: Path | UrlPath,
    how: Rows,
    use: str,
    tags: list[str],
    tokenizer: Optional[str],
) -> str:
    """README.md with YAML front matter, as model hubs read it.

    record: state.json of the checkpoint; how: rows about the export; use: a command or a few lines that run the model
    tokenizer: its type, None without one
    """
    history, base = _history(checkpoint), base_of(record)
    sections = [
        ("The model", _table(_model(record, facts, tokenizer))),
        ("Use", f"```\n{use}\n```"),
        ("Training", _table([*_beginning(record), *_data(record["config"]), *_training(record, history, facts)])),
        ("Evaluation", _evaluation(record, history, checkpoint)),
        ("This export", _table(how)),
        ("License", _license(base)),
    ]
    sets = data_sets(record["config"])
    head = [
        "---",
        *([f"license: {base.license}"] if base and base.license else []),
        *([f"base_model: {json.dumps(base.name)}"] if base else []),
        *(["datasets:", *(f"- {json.dumps(one)}" for one in sets)] if sets else []),
        *("tags:", *(f"- {tag}" for tag in tags)),
        "---",
    ]
    head = "\n".join(head)
    return "\n\n".join([head, f"# {name}", *(f"## {title}\n\n{text}" for title, text in sections)]) + "\n"


def base_of(record: Mapping[str, Any]) -> Optional[Ancestor]:
    """The model that a run or an import began with: the first one that another library has named, else the nearest."""
    found = list(ancestors(record))
    return next((one for one in found if one.imported), found[0] if found else None)


def _beginning(record: Mapping[str, Any]) -> Rows:
    names = " < ".join(f"`{one.name}`" for one in ancestors(record))
    imported = record.get("source") or record.get("origin")
    return [("imported" if imported else "started from", names)] if names else []


def _license(base: Optional[Ancestor]) -> str:
    if base and base.license:
        return (
            f"`{base.name}`, which this model comes from, states {base.license}. Check that it holds for this one, too."
        )
    return "The run does not state one: add it here and as `license:` above before you publish the model."


def _history(checkpoint: Path | UrlPath) -> Optional[History]:
    """The records of the run that wrote a checkpoint, if they are in its folder."""
    if isinstance(checkpoint, UrlPath):
        return None
    path = find_metrics(checkpoint.parent)
    return read_history(path) if path and path.is_file() else None


def _table(rows: Rows) -> str:
    clean = [(name, str(text).replace("|", "\\|").replace("\n", " ")) for name, text in rows]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in clean)])


def _model(record: Mapping[str, Any], facts: Facts, tokenizer: Optional[str]) -> Rows:
    model = facts.settings
    count = sum(math.prod(placed.shape) for placed in facts.weights.values())
    groups = f", {model.query_groups} key-value heads" if model.query_groups != model.num_attention_heads else ""
    return [
        ("type", kind_of(facts)),
        ("parameters", f"{count:,}"),
        ("layers", f"{model.num_layers} of width {model.hidden_size}"),
        ("attention heads", f"{model.num_attention_heads} of width {model.head_dim}{groups}"),
        ("positions", f"{model.position_embedding_type}, context of {model.position_table} tokens"),
        ("vocabulary", f"{record['vocab_size']:,} tokens, {tokenizer or 'without a tokenizer'}"),
    ]


def _data(config: Mapping[str, Any]) -> Rows:
    data, words = config.get("data") or {}, _blend_words(config)
    if not data_sets(config) and data.get("mock_data"):
        return [("data", "synthetic samples (`--mock-data`)")]
    named = [" ".join(Path(word).name if "/" in word else word for word in words)] if words else []
    named += [name for name in _task_files(config) if name not in named]
    split = [("split", str(data["split"]))] if words and data.get("split") else []
    return [("data", ", ".join(f"`{name}`" for name in named) or "not recorded"), *split]


def data_sets(config: Mapping[str, Any]) -> list[str]:
    """The names of the training data: prefixes of a blend, a task, and files of tasks and conversations."""
    words = _blend_words(config)
    prefixes = parse_blend(words, "--data-path", open_folders=False).prefixes if words else []
    return list(dict.fromkeys([*(Path(prefix).name for prefix in prefixes), *_task_files(config)]))


def _blend_words(config: Mapping[str, Any]) -> list[str]:
    data = config.get("data") or {}
    words = data.get("train_data_path") or data.get("data_path") or []
    return words.split() if isinstance(words, str) else list(map(str, words))


def _task_files(config: Mapping[str, Any]) -> list[str]:
    """Names from the recipe's own settings: of a task for a classifier, of files, and of a mixture NAME=WEIGHT:PATH."""
    names: list[str] = []
    for own in (config.get("extra") or {}).values():
        if "task_data" in own:
            names.append(Path(own["task"]).stem)
        mixed = [word.partition(":")[2] for word in own.get("task_mixture") or ()]
        names += [Path(path).name for path in (*(own.get("train_data") or ()), *mixed) if path]
    return names


def _training(record: Mapping[str, Any], history: Optional[History], facts: Facts) -> Rows:
    config, position = record["config"], record.get("state") or {}
    batch, optimizer = config.get("batch") or {}, config.get("optimizer") or {}
    step = record.get("iteration", position.get("iteration"))
    samples = position.get("consumed_samples")
    length = (config.get("model") or {}).get("seq_length")
    rows = [("steps", f"{step:,}")] if isinstance(step, int) else []
    if samples:
        full = facts.settings.model_type == "GPT"  # samples of others are padded
        count = f", {samples * length:,} tokens" if full else f" of at most {length:,} tokens"
        rows.append(("samples", f"{samples:,}{count if length else ''}"))
    if samples and batch.get("global_batch_size"):
        rows.append(("batch", f"{batch['global_batch_size']} samples"))
    if samples and optimizer.get("lr"):
        rows.append(("optimizer", f"{optimizer.get('optimizer', 'adam')}, learning rate {optimizer['lr']:g}"))
    if samples:
        rows.append(("precision", str((config.get("precision") or {}).get("precision", "fp32"))))
    losses = [s for s in history.steps if s["iteration"] <= step and s.get(history.loss) is not None] if history else []
    if losses:
        rows.append(("last training loss", f"{losses[-1][history.loss]:.4f} at step {losses[-1]['iteration']}"))
    return rows


def _evaluation(record: Mapping[str, Any], history: Optional[History], checkpoint: Path | UrlPath) -> str:
    step = record.get("iteration", (record.get("state") or {}).get("iteration", 0))
    rows: Rows = []
    done = [one for one in history.evals if one["iteration"] <= step] if history else []
    for split in dict.fromkeys(one.get("split") for one in done):
        last = [one for one in done if one.get("split") == split][-1]
        figures = {key: x for key, x in last.items() if key not in OF_EVERY_EVALUATION or key in UNITS}
        for key, value in figures.items():
            if isinstance(value, (int, float)):
                perplexity = f", perplexity {math.exp(min(20.0, value)):.2f}" if key == "lm loss" else ""
                rows.append((f"{split} {key}", f"{value:.4f}{perplexity} at step {last['iteration']}"))
    rows += [] if isinstance(checkpoint, UrlPath) else _evaluations_of_tools(checkpoint.parent, step)
    return _table(rows) if rows else "None is recorded."


def _evaluations_of_tools(folder: Path, step: int) -> Rows:
    """What tools.evaluate --output wrote into the run's folder or the one around it, of this step."""
    rows: Rows = []
    for place in (folder, folder.parent):
        for name in ("evaluation.jsonl", "evaluation.json"):
            path = place / name
            for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and found.get("iteration") == step:
                    rows += [
                        (f"{Path(str(found.get('data', 'held-out text'))).name}, {key}", f"{value:,.6g}")
                        for key, value in found.items()
                        if key != "iteration" and isinstance(value, (int, float)) and not isinstance(value, bool)
                    ]
    return rows
