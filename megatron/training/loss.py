# SPDX-License-Identifier: Apache-2.0
"""The minimised loss, built from the sums of the stages, and the averaging of gradients."""

from collections.abc import Mapping

import torch

from megatron.settings import schema


def make_loss_func(
    config: schema.Config,
    weights: Mapping[str, float],
    loss_scale: float | torch.Tensor,
    size: int,
    num_microbatches: int,
):
    """Build two functions: the loss of a micro-batch, and the factor that averages and un-scales gradients.

    The first maps ({name: sum} of a stage, micro-batch) to the scalar for backward, or None if the stage has no weighted
    sum. The second maps the number of all tokens (at least 1, fp64) to the factor, fp64.

    weights:    name of a sum -> its weight
    loss_scale: a number, or an fp64 scalar on the device

    `--loss-averaging token`: the mean over the unmasked tokens of the global batch. Their number is known only at the end
    of the step, so the loss is divided by the number of all tokens, and the factor corrects the gradients; without masks
    the correction is exactly 1. `micro-batch`: the mean over micro-batches of the mean over their tokens.
    """

    def total(sums):
        parts = [
            sums[name] if weight == 1.0 else sums[name] * weight
            for name, weight in weights.items()
            if weight and name in sums
        ]
        return sum(parts[1:], parts[0]) if parts else None

    def scaled(factor_of):
        def loss_func(sums, batch):
            whole = total(sums)
            return None if whole is None else whole * like(factor_of(batch), whole)

        return loss_func

    if config.optimizer.loss_averaging == "micro-batch":
        scale = loss_scale / num_microbatches

        def of_batch(batch):
            tokens = torch.clamp(batch.num_sample_tokens, min=1)
            return like(scale, tokens) / tokens

        return scaled(of_batch), lambda tokens: torch.ones_like(tokens) / loss_scale
    nominal = size * config.model.seq_length
    return (
        scaled(lambda batch: loss_scale / nominal),
        lambda tokens: torch.full_like(tokens, nominal) / tokens / loss_scale,
    )


def like(factor: float | torch.Tensor, x: torch.Tensor) -> float | torch.Tensor:
    """Convert a factor to the dtype of the scalar `x`, so that their product keeps that dtype."""
    return factor.to(x.dtype) if isinstance(factor, torch.Tensor) else factor
