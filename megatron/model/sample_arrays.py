# SPDX-License-Identifier: Apache-2.0
"""The arrays of a sample, for models whose samples are not one row of token ids. Needs no torch.

A recipe names the arrays (`Recipe.arrays`). Its datasets return dicts of them; the loader checks each and collects them in
`MicroBatch.arrays`, with the sequence dim first.
"""

from dataclasses import dataclass
from typing import Optional

LABELS, LOSS_MASK = "labels", "loss_mask"  # required in every such sample


@dataclass(frozen=True)
class SampleArray:
    """One array of a sample.

    length: number of elements; 0: a single number for the whole sample
    below:  integers from 0 to this number, exclusive
    mask:   instead, finite numbers from 0: the weight of each position in the loss
    """

    length: int
    below: Optional[int] = None
    mask: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,) if self.length else ()

    def words(self) -> str:
        """Its content in words, for messages."""
        what = "numbers from 0" if self.mask else f"whole numbers from 0 to {self.below - 1:,}"
        return f"{self.length} {what}" if self.length else f"one of the {what}"
