# SPDX-License-Identifier: Apache-2.0
"""QK-clip (MuonClip, arXiv:2507.20534, section 2.1): after an update, scale down the weights of queries and keys of heads
whose largest logit of the step was above a threshold.

    eta = min(threshold / largest logit, 1)        of a group of heads, by its greatest one
    queries' rows *= eta ** alpha                  keys' rows *= eta ** (1 - alpha)

Which rows have which power, a kind of mixers says (`Mixer.clipped`). Main weights are scaled, whole or in shards, before
they are copied to the model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional

import torch

from megatron.errors import SettingsError
from megatron.model.max_logits import WatchedHeads
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis
from megatron.optimizer.state import OwnedState, Targets
from megatron.settings.schema import Optimizer


class QKClip:
    """heads: of this rank's stages. frozen: names of weights that no step changes.

    Raises SettingsError if heads have one of these, and for a model whose heads nobody watches (None).
    """

    def __init__(self, heads: Optional[Sequence[WatchedHeads]], settings: Optimizer, frozen: Iterable[str] = ()):
        if heads is None:
            raise SettingsError(
                "--qk-clip: this model's largest attention logits are not kept",
                do="give the optimizer the result of model.max_logits.watch_heads, or leave it out",
            )
        self.threshold = settings.qk_clip_threshold
        self.heads = [(one, one.clipped(settings.qk_clip_alpha)) for one in heads]
        scaled = {f"{one.name}.{weight}" for one, clipped in self.heads for weight in clipped}
        if still := sorted(scaled.intersection(frozen)):
            raise SettingsError(
                f"--qk-clip scales the weights of queries and keys, and {', '.join(still[:3])} "
                f"{'is' if len(still) == 1 else 'are'} frozen",
                do="leave out --qk-clip, --freeze of these or LoRA; --log-max-attention-logit works with frozen weights",
            )

    def scale(
        self,
        states: Sequence[OwnedState],
        targets_of: Callable[[OwnedState], Targets],
        skip: Optional[torch.Tensor] = None,
    ) -> None:
        """Scale this rank's main weights, and copies that the update has made of them (`targets_of`).

        skip: a flag on the device; if it is set, nothing changes
        """
        factors = dict(self._factors(skip))
        for state in states:
            for slot, where, first in state.places:
                rows = factors.get(slot.name)
                if rows is not None:
                    main = state.main
                    width = slot.parameter.numel() // len(rows)
                    scale_rows(main[where], first, rows.to(main.device), width)
                    copy_range(main, where, targets_of(state) if state.direct else ())

    def _factors(self, skip: Optional[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name of a weight [g, rows, ...], a factor for each of its g x rows)."""
        for heads, clipped in self.heads:
            eta = balancing_eta(heads.logits.last, self.threshold)
            if skip is not None:
                eta = torch.where(skip, 1.0, eta)
            for weight, parts in clipped.items():
                powers = [eta.pow(power).unsqueeze(1).expand(-1, rows) for rows, power in parts]
                yield f"{heads.name}.{weight}", torch.cat(powers, 1).flatten()


def balancing_eta(largest: torch.Tensor, threshold: float) -> torch.Tensor:
    """[g], from the largest logits [g, queries]: 1 for those that are not positive or not finite.

    >>> balancing_eta(torch.tensor([[5.0, 200.0], [-2.0, -1.0], [3.0, torch.inf]]), 100.0).tolist()
    [0.5, 1.0, 1.0]
    """
    most = largest.amax(1)
    eta = (threshold / most).clamp(max=1.0)
    return torch.where((most > 0) & torch.isfinite(most), eta, 1.0)


def scale_rows(values: torch.Tensor, first: int, factors: torch.Tensor, width: int) -> None:
    """Multiply a range of a matrix with rows of `width`, whose elements from `first` on are `values`, by a factor for each
    row. The range may begin and end inside a row.

    >>> part = torch.ones(5)
    >>> scale_rows(part, 2, torch.tensor([2.0, 3.0, 4.0]), 3)
    >>> part.tolist()
    [2.0, 3.0, 3.0, 3.0, 4.0]
    """
    row, skipped = divmod(first, width)
    start = min(-skipped % width, len(values))
    values[:start] *= factors[row]
    row += skipped > 0
    stop = start + (len(values) - start) // width * width
    whole = values[start:stop].view(-1, width)
    whole *= factors[row : row + len(whole)].unsqueeze(1)
    if stop < len(values):
        values[stop:] *= factors[row + len(whole)]


def copy_range(main: torch.Tensor, where: slice, targets: Targets) -> None:
    """Copy a range of main weights to the memory that has copies of parts of them."""
    for part, target in targets:
        start, stop = max(part.start, where.start), min(part.stop, where.stop)
        if start < stop:
            target[start - part.start : stop - part.start].copy_(main[start:stop])


@torch.no_grad()
def largest_logit(heads: Sequence[WatchedHeads], world: Axis, device: torch.device) -> torch.Tensor:
    """The largest logit of the last step over all heads of all ranks, at least 0: [1] fp32. All ranks call it."""
    own = [one.logits.last.amax() for one in heads]
    largest = torch.stack(own).amax() if own else torch.zeros((), device=device)
    return collectives.all_reduce(largest.reshape(1), world, "max")
