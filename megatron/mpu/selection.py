# SPDX-License-Identifier: Apache-2.0
"""Which weights are trained: --freeze and --train-only. Needs no torch.

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

SHOWN = 4  # names that a message lists


@dataclass(frozen=True)
class Selection:
    """Patterns of names, as a shell has them: `*` any text, dots too, `?` a character, `[ab]` one of these.

    freeze:     these are not trained
    train_only: no others are; none: all
    """

    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Optimizer) -> "Selection":
        """What a run's settings say."""
        return cls(tuple(settings.freeze or ()), tuple(settings.train_only or ()))

    def __bool__(self) -> bool:
        return bool(self.freeze or self.train_only)

    def freezes(self, name: str) -> bool:
        """Whether the parameter of this name is not trained."""
        return _any(name, self.freeze) or bool(self.train_only) and not _any(name, self.train_only)

    def frozen(self, table: Table, prefix: str = "") -> frozenset[str]:
        """The names of a table's parameters that are not trained: by a pattern, or because their placement says so."""
        parameters = {name: placed for name, placed in table.items() if not placed.buffer}
        return frozenset(
            name for name, placed in parameters.items() if placed.frozen or self and self.freezes(prefix + name)
        )

    def marked(self, table: Table, prefix: str = "") -> dict[str, Placement]:
        """A table whose placements say which parameters are frozen. prefix: of their full names."""
        names = self.frozen(table, prefix) if self else ()
        return {name: replace(placed, frozen=True) if name in names else placed for name, placed in table.items()}

    def sizes(self, weights: Mapping[str, Placement]) -> tuple[int, int]:
        """(parameters that are trained, parameters that are frozen) of weights by their full names."""
        names = self.frozen(weights)
        frozen = elements({name: weights[name] for name in names})
        return elements(weights) - frozen, frozen

    def check(self, weights: Mapping[str, Placement]) -> None:
        """Raise SettingsError for a pattern that no parameter's name matches, and where nothing is left to train.

        weights: full name -> placement, of the whole model
        """
        names = [name for name, placed in weights.items() if not placed.buffer]
        for flag, patterns in (("--freeze", self.freeze), ("--train-only", self.train_only)):
            for pattern in patterns:
                if not any(fnmatchcase(name, pattern) for name in names):
                    raise SettingsError(
                        f"{flag} {pattern}: no parameter has such a name",
                        f"names near it: {', '.join(near(pattern, names))}",
                        "a pattern is compared with the whole name, * stands for any text: "
                        "docs/finetuning.md#frozen-parameters",
                    )
        if names and len(self.frozen(weights)) == len(names):
            flags = [f"--freeze {' '.join(self.freeze)}"] * bool(self.freeze)
            flags += [f"--train-only {' '.join(self.train_only)}"] * bool(self.train_only)
            raise SettingsError(
                f"{' '.join(flags) or 'the model'}: all {len(names)} parameters are frozen, and nothing is left to train",
                do="leave some out; to evaluate a model without training it, --skip-train",
            )


def near(pattern: str, names: Collection[str]) -> list[str]:
    """Some of the names that somebody may have meant by a pattern which matches none.

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


ALL = Selection()  # everything is trained but what says of itself that it is not
