# SPDX-License-Identifier: Apache-2.0
"""Check the outputs of stages: a tensor for the next stage, and sums by name.

A sum that no stage returns would be logged as 0, and a loss without its number of tokens as a sum. So the names of all
ranks are compared after the first step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.errors import SettingsError, did_you_mean

FORM = 'the last stage returns (None, {"lm loss": sum over tokens, "tokens": how many}): docs/extending.md#a-model'
SUMS = "the recipe's `sums`: docs/extending.md#a-model"


class StageOutputs:
    """Collects the outputs of one rank's stages, and their first error.

    names: of the recipe's sums, its loss first, and the number of tokens last
    """

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.seen: set[str] = set()  # names of returned sums
        self.fault: Optional[tuple[str, ...]] = None  # the first error: arguments of its SettingsError

    def take(self, output: Any) -> tuple[Any, dict[str, torch.Tensor]]:
        """Split a stage's output into (output for the next stage, sums); no sums after an error."""
        x, sums = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
        if isinstance(output, tuple) and len(output) != 2 or not isinstance(sums, dict):
            self._note(f"a stage returned {_form(output)}", "it returns its output, or (output, {name: sum})", FORM)
            return x, {}
        for name in sums.keys() - set(self.names):
            self._note(
                f'a stage returned the sum "{name}", which the recipe does not name{did_you_mean(str(name), self.names)}',
                f"it names {', '.join(self.names)}",
                f'give it a weight in the recipe: sums={{..., "{name}": 0.0}}; with 0 it is only logged',
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
        """Raise SettingsError on all ranks for a wrong output, or for a sum that no stage returned."""
        answers = all_gather_object((self.fault, self.seen))
        for fault, _ in answers:
            if fault:
                raise SettingsError(*fault)
        seen = set().union(*(names for _, names in answers))
        if missing := [name for name in self.names if name not in seen]:
            returned = ", ".join(name for name in self.names if name in seen) or "none"
            words = ", ".join(f'"{name}"' for name in missing)
            do = FORM if {self.names[0], self.names[-1]} & set(missing) else f"return it, or take it out of {SUMS}"
            raise SettingsError(f"no stage returned {words} (returned sums: {returned})", do=do)

    def raise_fault(self) -> None:
        """Raise SettingsError for a wrong output, without other ranks: for passes after the first step."""
        if self.fault:
            raise SettingsError(*self.fault)

    def _note(self, *words: str) -> None:
        self.fault = self.fault or words


def _form(output: Any) -> str:
    """An output as the names of its types.

    >>> _form((None, 3.0))
    '(NoneType, float)'
    """
    parts = [type(part).__name__ for part in output] if isinstance(output, tuple) else [type(output).__name__]
    return f"({', '.join(parts)})"
