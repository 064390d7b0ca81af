# SPDX-License-Identifier: Apache-2.0
"""Selection of the weights to train: --freeze and --train-only. Needs no torch.

>>> selection = Selection(freeze=("embedding.*", "blocks.0.*"))
>>> selection.freezes("blocks.0.mlp.up.weight"), selection.freezes("blocks.10.mlp.up.weight")
(True, False)
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

from megatron.errors import SettingsError
from megatron.mpu.placement import Placement, Table, elements
from megatron.settings.schema import Optimizer

SHOWN = 4  # number of names in a message


@dataclass(frozen=True)
class Selection:
    """Shell-style patterns of parameter names: `*` any text, including dots, `?` a character, `[ab]` one of these.

    freeze:     parameters that are not trained
    train_only: the only parameters that are trained; empty: all
    """

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Optimizer) -> "Selection":
        """The selection of a run's settings."""
        return cls(tuple(settings.freeze or ()), tuple(settings.train_only or ()))

    def __bool__(self) -> bool:
        return bool(self.freeze or self.train_only)

    def freezes(self, name: str) -> bool:
        """Whether the parameter of this name is not trained."""
        return _any(name, self.freeze) or bool(self.train_only) and not _any(name, self.train_only)

    def frozen(self, table: Table, prefix: str = "") -> frozenset[str]:
        """The names of a table's frozen parameters, by a pattern or by their placement."""
        parameters = {name: placed for name, placed in table.items() if not placed.buffer}
        return frozenset(
            name for name, placed in parameters.items() if placed.frozen or self and self.freezes(prefix + name)
        )

    def marked(self, table: Table, prefix: str = "") -> dict[str, Placement]:
        """A copy of a table with `frozen` set in its placements. prefix: of the full names."""
        names = self.frozen(table, prefix) if self else ()
        return {name: replace(placed, frozen=True) if name in names else placed for name, placed in table.items()}

    def sizes(self, weights: Mapping[str, Placement]) -> tuple[int, int]:
        """(number of trained parameters, number of frozen parameters) of weights by their full names."""
        names = self.frozen(weights)
        frozen = elements({name: weights[name] for name in names})
        return elements(weights) - frozen, frozen

    def check(self, weights: Mapping[str, Placement]) -> None:
        """Raise SettingsError for a pattern that matches no parameter's name, and if all parameters are frozen.

        weights: full name -> placement, of the whole model
        """
        names = [name for name, placed in weights.items() if not placed.buffer]
        for flag, patterns in (("--freeze", self.freeze), ("--train-only", self.train_only)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise SettingsError(
                        f"{flag} {pattern}: no parameter's name matches",
                        f"similar names: {', '.join(near(pattern, names))}",
                        "a pattern has to match the whole name, * matches any text: "
                        "docs/finetuning.md#frozen-parameters",
                    )
        if names and len(self.frozen(weights)) == len(names):
            flags = [f"--freeze {' '.join(self.freeze)}"] * bool(self.freeze)
            flags += [f"--train-only {' '.join(self.train_only)}"] * bool(self.train_only)
            raise SettingsError(
                f"{' '.join(flags) or 'the model'}: all {len(names)} parameters are frozen, and there is nothing to train",
                do="freeze fewer; to evaluate a model without training it, use --skip-train",
            )


def near(pattern: str, names: Collection[str]) -> list[str]:
    """Suggestions for a pattern that matches none of the names.

    >>> near("embeding.*", ["embedding.word.weight", "blocks.0.mlp.up.weight"])
    ['embedding.word.weight']
    """
    text = pattern.replace("*", "")
    within = [name for name in names if text.strip(".") and text.strip(".") in name]
    parts = {".".join(name.split(".")[: pattern.count(".") + 1]): name for name in reversed(list(names))}
    parts |= {name.split(".")[0] + ".": name for name in reversed(list(names))}
    alike = [parts[part] for part in get_close_matches(text, parts, SHOWN, cutoff=0.5)]
    return (list(dict.fromkeys([*within, *alike])) or list(names))[:SHOWN]


def _any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


ALL = Selection()  # train everything, except placements with `frozen`
