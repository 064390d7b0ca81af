# SPDX-License-Identifier: Apache-2.0
"""The values of a step, their sums over steps, and their form in metrics.jsonl and trackers."""

import math
from dataclasses import dataclass, field
from typing import Optional


@dataclass(frozen=True)
class RunSizes:
    """Sizes of a run that turn steps into rates. flops_per_token: model FLOPs, forward and backward (`Facts.flops`);
    seen_flops_per_token: the same with only the seen pairs of causal attention, about half; 0: not known
    """

    train_iters: int
    sample_tokens: int
    ranks: int = 1
    data_ranks: int = 1  # data parallel size
    flops_per_token: float = 0.0
    seen_flops_per_token: float = 0.0
    peak_flops: Optional[float] = None  # FLOP/s of one rank's device; None: unknown, no MFU is given
    plain_peak_flops: Optional[float] = None  # without products in fp8
    device: str = "cpu"
    perplexities: tuple[str, ...] = ("lm loss",)  # losses for which an evaluation also gives exp(loss)
    epoch_samples: Optional[float] = None  # samples of an epoch (--train-epochs)

    def epoch(self, consumed_samples: int) -> dict[str, float]:
        """Completed epochs, with a fraction, after so many samples, as an entry of a record; empty without epochs.

        >>> RunSizes(9, 16, epoch_samples=7.2).epoch(9)
        {'epoch': 1.25}
        """
        return {"epoch": round(consumed_samples / self.epoch_samples, 6)} if self.epoch_samples else {}


@dataclass(frozen=True)
class StepMetrics:
    """The values of a step. Numbers may be 0-d tensors. `iteration` counts from 1; `consumed_samples` includes it."""

    iteration: int
    consumed_samples: int
    batch_size: int
    losses: dict[str, float]
    learning_rate: float  # the rate that was used
    grad_norm: Optional[float] = None  # before clipping
    loss_scale: float = 1.0
    skipped: bool = False  # gradients overflowed (fp16): no update happened
    ledger: str = ""  # hash of the samples of the step
    num_zeros: Optional[int] = None  # elements of the gradient (--log-num-zeros-in-grad)
    params_norm: Optional[float] = None  # after the update (--log-params-norm)
    max_attention_logit: Optional[float] = None  # of all heads (--log-max-attention-logit)
    extra: dict[str, float] = field(default_factory=dict)  # written to files, not to the console

    @property
    def optional_values(self) -> dict[str, float]:
        """Values that only some steps have, by their names in files."""
        values = dict(
            num_zeros=self.num_zeros, params_norm=self.params_norm, max_attention_logit=self.max_attention_logit
        )
        return {name: float(value) for name, value in values.items() if value is not None}


@dataclass
class Interval:
    """Sums over steps: since the last console line, or of an epoch."""

    seconds: float = 0.0
    samples: int = 0
    advanced: int = 0
    skipped: int = 0
    nan: int = 0
    losses: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # steps with this loss

    def add(self, step: StepMetrics, losses: dict[str, float], seconds: float) -> None:
        """Add a step. A skipped one does not count in the mean loss; it is a NaN step when its loss was not finite."""
        self.seconds += seconds
        self.samples += step.batch_size
        if step.skipped:
            self.skipped += 1
            self.nan += not all(math.isfinite(value) for value in losses.values())
            return
        self.advanced += 1
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + value
            self.counts[name] = self.counts.get(name, 0) + 1

    @property
    def means(self) -> dict[str, float]:
        """Mean of each loss over the steps that have it."""
        return {name: total / self.counts[name] for name, total in self.losses.items()}

    @property
    def steps(self) -> int:
        return self.advanced + self.skipped


def step_record(step: StepMetrics, losses: dict[str, float], seconds: float, rates: dict[str, float]) -> dict:
    return (
        dict(kind="step", iteration=step.iteration, consumed_samples=step.consumed_samples, batch_size=step.batch_size)
        | losses
        | dict(learning_rate=step.learning_rate, grad_norm=None if step.grad_norm is None else float(step.grad_norm))
        | dict(loss_scale=float(step.loss_scale), skipped=bool(step.skipped), seconds=round(seconds, 6))
        | ({"ledger": step.ledger} if step.ledger else {})
        | {name: float(f"{value:.5g}") for name, value in rates.items()}
        | step.optional_values
        | {name: float(value) for name, value in step.extra.items()}
    )


def step_tags(step: StepMetrics, losses: dict[str, float]) -> dict[str, float]:
    tags = {"learning-rate": step.learning_rate, "batch-size": step.batch_size, "loss-scale": float(step.loss_scale)}
    if step.grad_norm is not None:
        tags["grad-norm"] = float(step.grad_norm)
    same = ("max_attention_logit",)  # Megatron-LM's tag
    tags |= {name if name in same else name.replace("_", "-"): value for name, value in step.optional_values.items()}
    return tags | losses | {name: float(value) for name, value in step.extra.items()}


def load_ends(loads: list[int]) -> dict[str, float]:
    """The largest and the smallest load of a layer's experts, in means over them.

    >>> load_ends([6, 2, 4, 0])
    {'largest': 2.0, 'smallest': 0.0}
    """
    mean = sum(loads) / len(loads) or 1
    return dict(largest=max(loads) / mean, smallest=min(loads) / mean)
