# SPDX-License-Identifier: Apache-2.0
"""What stages return: what goes on, and sums by name. A sum that nobody returns would be logged as 0, and a loss without
the number of its tokens as a sum: the names of all ranks are compared behind the first step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.errors import SettingsError, did_you_mean

FORM = 'the last stage returns (None, {"lm loss": sum over tokens, "tokens": how many}): docs/extending.md#a-model'
SUMS = "the recipe's `sums`: docs/extending.md#a-model"


class Returned:
    """What the stages of one rank have returned.

    names: of the sums that the recipe names, its loss first, and the number of tokens last
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.seen: set[str] = set()  # names that came
        self.fault: Optional[tuple[str, ...]] = None  # the first thing that cannot be: the words of its SettingsError

    def take(self, output: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """(what goes on, those of the sums that can be added up) of what a stage returned."""
        x, sums = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
        if isinstance(output, tuple) and len(output) != 2 or not isinstance(sums, dict):
            self._note(f"a stage returned {_form(output)}", "it returns what goes on, or (that, {name: sum})", FORM)
            return x, {}
        for name in sums.keys() - set(self.names):
            self._note(
                f'a stage returned the sum "{name}", which the recipe does not name{did_you_mean(str(name), self.names)}',
                f"it names {', '.join(self.names)}",
                f'give it a weight in the recipe: sums={{..., "{name}": 0.0}}, where 0 is to be logged alone',
            )
        for name, value in sums.items():
            if not isinstance(value, torch.Tensor) or value.dim():
                what = (
                    f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"type {type(value).__name__}"
                )
                self._note(
                    f'a stage returned "{name}" of {what}', "a sum is a tensor without dims", "add up over tokens"
                )
        self.seen |= sums.keys()
        return x, {} if self.fault else sums

    def check(self, all_gather_object: Callable[[Any], list] = lambda value: [value]) -> None:
        """Raise SettingsError, on all ranks alike, where something cannot be, or nobody has returned a sum."""
        answers = all_gather_object((self.fault, self.seen))
        for fault, _ in answers:
            if fault:
                raise SettingsError(*fault)
        came = set().union(*(seen for _, seen in answers))
        if missing := [name for name in self.names if name not in came]:
            told = ", ".join(name for name in self.names if name in came) or "none"
            words = ", ".join(f'"{name}"' for name in missing)
            do = FORM if {self.names[0], self.names[-1]} & set(missing) else f"return it, or take it out of {SUMS}"
            raise SettingsError(f"nothing returned {words} (the sums that came: {told})", do=do)

    def raise_fault(self) -> None:
        """Raise SettingsError where something cannot be: for passes behind the first step."""
        if self.fault:
            raise SettingsError(*self.fault)

    def _note(self, *words: str) -> None:
        self.fault = self.fault or words


def _form(output: Any) -> str:
    """What was returned, by its types.

    >>> _form((None, 3.0))
    '(NoneType, float)'
    """
    parts = [type(part).__name__ for part in output] if isinstance(output, tuple) else [type(output).__name__]
    return f"({', '.join(parts)})"
