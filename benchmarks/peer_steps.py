# SPDX-License-Identifier: Apache-2.0
"""Steps of other libraries' models with torch's fused AdamW, and times of steps: for benchmarks of whole steps on a CPU."""

import resource
from collections.abc import Callable
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Of the steps of a contender, in rounds: seconds by the clock, and CPU seconds of all threads."""

    wall: list[float]
    cpu: list[float]


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def adamw_step(module: torch.nn.Module, half: bool, autocast: bool, loss_of: Callable) -> Callable[..., float]:
    """A step of a model: forward, backward, clipping, AdamW. It returns the loss.

    half: weights are bf16, and the optimizer has fp32 ones; autocast: products are bf16; loss_of: arguments -> the loss
    """
    weights = list((module.bfloat16() if half else module).parameters())
    main = [weight.detach().float().requires_grad_() for weight in weights] if half else weights
    optimizer = torch.optim.AdamW(main, lr=3e-4, weight_decay=0.1, fused=True)

    def step(*arguments) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = loss_of(*arguments)
        loss.backward()
        if half:
            for weight, own in zip(weights, main):
                own.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(main, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if half:
            with torch.no_grad():
                torch._foreach_copy_(weights, main)
        return loss.item()

    return step
