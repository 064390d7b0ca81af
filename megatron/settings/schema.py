# SPDX-License-Identifier: Apache-2.0
"""All groups of settings, and `Config`, a run's values of all of them with a record of who gave them.

A group is a frozen dataclass in `groups/`, whose fields are settings (`declare.py`). Names, defaults and meanings are
Megatron-LM's wherever Megatron-LM has the setting.

    >>> Model(num_layers=2, hidden_size=8, num_attention_heads=2).ffn_size
    32

The settings need no torch, and do not read the command line or the environment: `parse.py` does.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from megatron.settings.declare import setting
from megatron.settings.groups.batch import AUTO, Batch
from megatron.settings.groups.checkpoint import Checkpoint
from megatron.settings.groups.data import Data
from megatron.settings.groups.distillation import Distillation
from megatron.settings.groups.guard import Guard
from megatron.settings.groups.kernels import Kernels
from megatron.settings.groups.logging import Logging, Profiling
from megatron.settings.groups.model import Model
from megatron.settings.groups.optimizer import Optimizer
from megatron.settings.groups.parallel import Parallel
from megatron.settings.groups.planner import Planner
from megatron.settings.groups.precision import Precision
from megatron.settings.groups.recompute import Recompute
from megatron.settings.groups.tokenizer import TokenizerSettings
from megatron.settings.statements import SaidBy, Statement

__all__ = ["AUTO", "GROUPS", "Config", "from_record", "setting"]  # and the groups

GROUPS = dict(
    model=Model,
    parallel=Parallel,
    tokenizer=TokenizerSettings,
    data=Data,
    batch=Batch,
    optimizer=Optimizer,
    recompute=Recompute,
    precision=Precision,
    kernels=Kernels,
    checkpoint=Checkpoint,
    guard=Guard,
    logging=Logging,
    distillation=Distillation,
    planner=Planner,
    profiling=Profiling,
)


@lru_cache
def _names(group: type) -> frozenset[str]:
    """The settings of a group."""
    return frozenset(one.name for one in fields(group))


@dataclass(frozen=True)
class Config:
    """All groups of a pretraining run."""

    model: Model
    parallel: Parallel
    tokenizer: TokenizerSettings
    data: Data
    batch: Batch
    optimizer: Optimizer
    recompute: Recompute
    precision: Precision
    kernels: Kernels
    checkpoint: Checkpoint
    guard: Guard
    logging: Logging
    distillation: Distillation = Distillation()
    planner: Planner = Planner()
    profiling: Profiling = Profiling()
    extra: dict = field(default_factory=dict, hash=False)  # a recipe's own groups, by name
    # Setting -> its source, except for defaults: the record that `said` reads.
    statements: Mapping[str, Statement] = field(default_factory=dict, hash=False, compare=False)

    @property
    def groups(self) -> dict[str, object]:
        """All groups by name; a recipe's own come last."""
        return {name: getattr(self, name) for name in GROUPS} | self.extra

    @property
    def validates(self) -> bool:
        """Whether the run validates, and has data for it."""
        return bool((self.batch.eval_iters or self.data.full_validation) and self.data.has("valid"))

    def validates_early(self, dp: int) -> bool:
        """Whether the run validates before its end, as far as its length is known."""
        b = self.batch
        by_epochs = b.eval_epoch and b.eval_epoch < (b.train_epochs or math.inf)
        return self.validates and bool(by_epochs or 0 < b.eval_interval < (b.steps(dp) or math.inf))

    def value(self, name: str) -> Any:
        """The value of a setting, of whichever group."""
        return next(getattr(group, name) for group in self.groups.values() if hasattr(group, name))

    def said(self, name: str) -> Optional[Statement]:
        """The statement that gave a setting its value; None if it has its default because nothing set it.

        >>> shape = Model(num_layers=2, hidden_size=8, num_attention_heads=2)
        >>> config = from_record(dict(model=vars(shape))).derive("--auto-parallel", micro_batch_size=4)
        >>> config.said("micro_batch_size").words, config.said("seed")
        ('--auto-parallel', None)
        """
        return self.statements.get(name)

    def given(self, name: str) -> Optional[Statement]:
        """The user's statement of a setting, on the command line or in a file, even if a derived value replaced it."""
        statement = self.said(name)
        return statement and statement.by_user

    @property
    def given_words(self) -> dict[str, str]:
        """Setting -> the words that the user gave it with: `--max-steps 0`."""
        return {name: one.words for name in self.statements if (one := self.given(name))}

    def derive(self, by: str, **values) -> "Config":
        """A copy with these values, and a record of their source. by: the flag or feature that derives them."""
        statements, groups = dict(self.statements), {}
        for name, group in self.groups.items():
            own = _names(type(group))
            changed = {key: value for key, value in values.items() if key in own and value != getattr(group, key)}
            if changed:
                groups[name] = replace(group, **changed)
            for key, value in changed.items():
                statements[key] = Statement(key, value, SaidBy.DERIVED, words=by, earlier=statements.get(key))
        extra = {name: groups.pop(name, group) for name, group in self.extra.items()}
        return replace(self, **groups, extra=extra, statements=statements)

    def to_record(self) -> dict[str, Any]:
        """All settings as JSON values, for checkpoints and logs; `given`: the words that the user gave them with."""
        groups = {name: asdict(group) for name, group in self.groups.items() if name not in self.extra}
        return groups | dict(extra={name: asdict(group) for name, group in self.extra.items()}, given=self.given_words)


def from_record(record: dict, own_groups: Mapping[str, type] = MappingProxyType({})) -> Config:
    """The settings in the record of a checkpoint. Settings that it does not have keep their defaults.

    own_groups: the recipe's groups (see `model.recipe.config_of`).

    >>> from_record(dict(model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, gone=1))).model.num_layers
    2
    """

    def made(group: type, values: dict):
        known = {f.name for f in fields(group)}
        return group(**{key: value for key, value in values.items() if key in known})

    extra = record.get("extra", {})
    return Config(
        **{name: made(own_groups.get(name, group), record.get(name, {})) for name, group in GROUPS.items()},
        extra={name: made(group, extra.get(name, {})) for name, group in own_groups.items() if name not in GROUPS},
    )


# Values that follow from other settings. A list of derivations is in the order in which they are filled in:
#   a command line is read:     `model.command_line.derivations`, by the recipe's model and what --lora-rank, ... imply
#   a training starts:          `data.epochs.in_samples`, the length of --train-epochs
#                               `planner.tuning.tuned`, a layout, if it is open
#   its settings are checked:   `training.rules.DEFAULTS`, the defaults that other settings decide


class Derivation(NamedTuple):
    """reads, writes: names of settings; derive: (config, inputs of the list) -> config, by `Config.derive`; cause: the
    setting without which nothing follows
    """

    reads: str
    writes: str
    derive: Callable[..., Config]
    cause: Optional[str] = None


def default(reads: str, name: str, value: Callable[..., Any]) -> Derivation:
    """The derivation of one setting. value: (config, inputs of the list) -> its value"""
    return Derivation(
        reads, name, lambda config, *inputs: config.derive("other settings", **{name: value(config, *inputs)})
    )


def derived(config: Config, derivations: Iterable[Derivation], *inputs: Any) -> Config:
    """The settings with all values that follow from others."""
    for one in derivations:
        if one.cause is None or config.value(one.cause):
            config = one.derive(config, *inputs)
    return config
