# SPDX-License-Identifier: Apache-2.0
"""Read a layout from a plan file: `--parallel-plan plan.json`.

`python -m megatron.tools.plan --emit plan.json` writes it, and `--json` prints the same. Its first plan is used:
`settings` has every setting of a layout, including defaults, and `model` has the shape of the model it was planned for.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.errors import SettingsError, UsageError
from megatron.settings.declare import ON_RESUME
from megatron.settings.schema import Config, Model, Parallel, Recompute

NOT_OF_A_LAYOUT = ("distributed_backend", "distributed_timeout_minutes", "print_topology", "pipeline_timeline")
LAYOUT = frozenset(f.name for f in (*fields(Parallel), *fields(Recompute)) if f.name not in NOT_OF_A_LAYOUT) | {
    "micro_batch_size",
    "global_batch_size",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "nvme_offload_fraction",
    "param_cpu_offload",
}
DERIVED = dict(ffn_hidden_size="ffn_size", num_query_groups="query_groups", kv_channels="head_dim")  # may be left out
WRITE = "python -m megatron.tools.plan with the flags of the training, --world-size N and --emit PLAN.json writes one"


@dataclass(frozen=True)
class GivenPlan:
    """The contents of a plan file."""

    path: str
    settings: dict[str, object]  # of LAYOUT, name -> value
    model: dict[str, object]  # `shape` of the model


def layout_settings(config: Config) -> dict[str, object]:
    """The settings of a layout, name -> value."""
    groups = (config.parallel, config.batch, config.recompute, config.optimizer)
    return {f.name: getattr(group, f.name) for group in groups for f in fields(group) if f.name in LAYOUT}


def shape(model: Model) -> dict[str, object]:
    """The settings of a model that a layout depends on, name -> value."""
    return _plain(model) | {name: getattr(model, derived) for name, derived in DERIVED.items()}


def _plain(model: Model) -> dict[str, object]:
    names = (f.name for f in fields(model) if f.metadata.get("on_resume") == ON_RESUME[0] and f.name not in DERIVED)
    return {name: getattr(model, name) for name in (*names, "seq_length")}


def read_plan(path: str) -> GivenPlan:
    """Read a plan file. Raises UsageError if it is missing or not a plan."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--parallel-plan {path}: {error.strerror or error}", do=WRITE) from None
    except ValueError:
        raise UsageError(f"--parallel-plan {path}: not JSON", do=WRITE) from None
    try:
        settings, model = dict(record["plans"][0]["settings"]), dict(record["model"])
    except (LookupError, TypeError, ValueError):
        raise UsageError(f"--parallel-plan {path}: it contains no plan", do=WRITE) from None
    if odd := sorted(set(settings) - LAYOUT):
        raise UsageError(f"--parallel-plan {path}: {', '.join(odd)} is no setting of a layout", do=WRITE)
    return GivenPlan(path, settings, model)


def refuse_another_model(plan: GivenPlan, model: Model) -> None:
    """Raise SettingsError if a plan was made for another model."""
    differences = _different(plan, _plain(model)) or _different(plan, shape(model))  # `shape` fails for 0 heads
    if differences:
        raise SettingsError(
            f"--parallel-plan {plan.path} is for another model: {'; '.join(differences)}",
            do=f"give the flags of that model, or plan this one: {WRITE}",
        )


def _different(plan: GivenPlan, here: dict[str, object]) -> list[str]:
    return [
        f"{name} is {plan.model[name]} there, {value} here"
        for name, value in here.items()
        if name in plan.model and plan.model[name] != value
    ]
