# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a CPU forgives and a GPU does not, planted one at a time."""

import dataclasses

import torch

from megatron.data import loader
from megatron.model import layer, positions
from megatron.model.kinds.experts import layer as experts
from megatron.optimizer import state, zero
from megatron.pipeline import wire
from megatron.telemetry import rank_times
from megatron.training import step


def instead(owner, name: str, made) -> None:
    """Put `made(the real one)` in its place."""
    setattr(owner, name, made(getattr(owner, name)))


def a_table_on_the_cpu() -> None:
    def made(real):
        def angles(*args):
            cos, sin = real(*args)
            return torch.zeros(cos.shape), sin

        return angles

    instead(positions.Rotary, "angles", made)


def a_message_in_another_format() -> None:
    instead(wire.P2PCommunicator, "send", lambda real: lambda self, x, *args: real(self, x.float(), *args))


def memory_that_is_not_pinned() -> None:
    instead(loader.MicroBatch, "pinned", lambda real: lambda batch: batch)


def documents_read_from_the_device() -> None:
    def made(real):
        return lambda loader, *args: dataclasses.replace(real(loader, *args), document_starts=None)

    instead(loader.MicroBatchLoader, "micro_batch", made)


def a_copy_that_waits() -> None:
    def made(real):
        return lambda batch, device: batch.pinned()._map(lambda tensor: tensor.to(device))

    instead(loader.MicroBatch, "to", made)


def a_step_count_made_on_the_host() -> None:
    def made(real):
        return lambda flats, *args: (torch.tensor(1.0, device=flats[0].device), real(flats, *args))

    instead(state, "update", made)


def a_loss_read_for_the_log() -> None:
    instead(step, "zero_unless_first_tp_rank", lambda real: lambda run, sums: (sums[0].item(), real(run, sums))[1])


def a_branch_on_a_value() -> None:
    def made(real):
        return lambda optimizer: real(optimizer) if optimizer.reduced.sum() > 0 else None

    instead(zero.DistributedOptimizer, "_squared_norm", made)


def a_norm_of_numpy() -> None:
    def made(real):
        return lambda layer, branch, x, *args: (x.detach().float().cpu().numpy(), real(layer, branch, x, *args))[1]

    instead(layer.Layer, "_mixed_norm", made)


def samples_sent_to_the_device() -> None:
    """Their numbers seed dropout on the host, which then has to read them back."""

    def made(real):
        def to(batch, device):
            moved = real(batch, device)
            return dataclasses.replace(moved, samples=moved.samples.to(device, non_blocking=True))

        return to

    instead(loader.MicroBatch, "to", made)


def a_sum_of_two_devices() -> None:
    instead(step, "zero_unless_first_tp_rank", lambda real: lambda run, sums: real(run, sums) + torch.zeros(len(sums)))


def a_weight_of_an_expert_read() -> None:
    def made(real):
        return lambda self, x, routing, sender: real(self, x, routing, sender) if routing.weights.sum().item() else x

    instead(experts.Experts, "forward", made)


def times_that_are_read_too_early():
    rank_times.READ_AFTER = 0
