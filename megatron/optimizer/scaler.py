# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for fp16: a state machine without tensors.

fp16 gradients underflow, so the loss is multiplied before the backward pass and gradients are divided after it. The
scale doubles after `window` good steps in a row and halves once `hysteresis` overflows have happened. Only a growth
resets the hysteresis, a good step does not (as in Megatron-LM).

    >>> scaler = LossScaler(scale=8.0, window=2, hysteresis=2, min_scale=1.0)
    >>> for found_inf in (True, True, True, False, False):
    ...     scaler = scaler.update(found_inf)
    ...     print(int(scaler.scale), end=";")
    8;4;2;2;4;
"""

from dataclasses import dataclass, replace
from typing import Optional

from megatron.settings.schema import Precision


@dataclass(frozen=True)
class LossScaler:
    """A loss scale and the counters for its next change. `window=None`: the scale is constant."""

    scale: float = 1.0
    window: Optional[int] = None
    hysteresis: int = 1
    min_scale: float = 1.0
    good_steps: int = 0  # in a row, since the last change
    overflows: int = 0  # since the last growth

    @classmethod
    def of(cls, precision: Precision) -> "LossScaler":
        """The scaler for a number format. fp16: dynamic, or constant with `--loss-scale`; fp32 and bf16: constant 1."""
        if precision.precision != "fp16":
            return cls()
        if precision.loss_scale is not None:
            return cls(scale=precision.loss_scale)
        return cls(
            precision.initial_loss_scale, precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale
        )

    @property
    def dynamic(self) -> bool:
        return self.window is not None

    def update(self, found_inf: bool) -> "LossScaler":
        """The scaler after a step. `found_inf`: a gradient on some rank was not finite, so the step was skipped."""
        if not self.dynamic:
            return self
        if found_inf:
            overflows = self.overflows + 1
            scale = max(self.scale / 2, self.min_scale) if overflows >= self.hysteresis else self.scale
            return replace(self, scale=scale, good_steps=0, overflows=overflows)
        if self.good_steps + 1 == self.window:
            return replace(self, scale=self.scale * 2, good_steps=0, overflows=0)
        return replace(self, good_steps=self.good_steps + 1)

    def state(self) -> dict:
        """The state to save in a checkpoint."""
        return dict(scale=self.scale, good_steps=self.good_steps, overflows=self.overflows)

    def restored(self, state: dict) -> "LossScaler":
        """This scaler with a checkpoint's state. A constant scale keeps the value of the settings."""
        if not self.dynamic:
            return self
        return replace(
            self,
            scale=max(float(state["scale"]), self.min_scale),
            good_steps=min(int(state["good_steps"]), self.window - 1),
            overflows=int(state["overflows"]),
        )
