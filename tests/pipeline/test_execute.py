# SPDX-License-Identifier: Apache-2.0
"""The executor gives what one process gives, for every schedule, rank count and number of model chunks."""

import pytest
import torch

from megatron.mpu.mesh import Mesh
from megatron.pipeline.execute import Wire, execute
from megatron.pipeline.schedule import make_schedule

WIDTH, ROWS = 8, 3


class Stage(torch.nn.Module):
    """A linear layer with tanh; the last one also has the loss."""

    def __init__(self, number: int, stages: int):
        super().__init__()
        self.number, self.last = number, number == stages - 1
        torch.manual_seed(number)
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x, batch):
        inputs, targets = batch
        y = torch.tanh(self.linear(inputs if self.number == 0 else x))
        return (((y - targets) ** 2).sum(), torch.tensor(float(ROWS))) if self.last else y


def _batches(micros):
    generator = torch.Generator().manual_seed(99)
    return [tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in "xy") for _ in range(micros)]


def _objective(loss, tokens):
    return loss / tokens


def _run(rank, name, pp, micros, chunks):
    mesh = Mesh(rank, pp=pp)
    stages = [Stage(chunk * pp + rank, pp * chunks) for chunk in range(chunks)]
    wire = Wire(mesh.pp, (ROWS, WIDTH), torch.float32, torch.device("cpu"))
    sums = execute(make_schedule(name, rank, pp, micros, chunks), stages, _batches(micros), wire, _objective)
    return sums, {stage.number: [p.grad for p in stage.parameters()] for stage in stages}


def _reference(stages, micros):
    chain = [Stage(number, stages) for number in range(stages)]
    total = 0.0
    for batch in _batches(micros):
        x = None
        for stage in chain:
            x = stage(x, batch)
        total += x[0].item()
        _objective(*x).backward()
    return total, {stage.number: [p.grad for p in stage.parameters()] for stage in chain}


@pytest.mark.parametrize(
    "name, pp, micros, chunks",
    [
        ("1f1b", 1, 3, 1),
        ("gpipe", 2, 3, 1),
        ("1f1b", 2, 4, 1),
        ("1f1b", 2, 4, 2),
        ("gpipe", 2, 4, 2),
        ("1f1b", 4, 6, 1),
    ],
)
def test_equals_one_process(name, pp, micros, chunks, run_ranks):
    total, gradients = _reference(pp * chunks, micros)
    results = run_ranks(pp, _run, name, pp, micros, chunks)
    for rank, (sums, own) in enumerate(results):
        expected = [total, micros * ROWS] if rank == pp - 1 else [0, 0]
        torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
        for number, tensors in own.items():
            torch.testing.assert_close(tensors, gradients[number])


def test_forward_only_keeps_no_gradients(run_ranks):
    def body(rank):
        mesh = Mesh(rank, pp=2)
        stage = Stage(rank, 2)
        wire = Wire(mesh.pp, (ROWS, WIDTH), torch.float32, torch.device("cpu"))
        with torch.no_grad():
            sums = execute(make_schedule("forward-only", rank, 2, 3), [stage], _batches(3), wire)
        return sums, stage.linear.weight.grad

    (_, first), (sums, second) = run_ranks(2, body)
    assert first is None and second is None
    assert sums[0].item() == pytest.approx(_reference(2, 3)[0], rel=1e-6)


def test_a_wrong_shape_is_caught_before_the_wire(run_ranks):
    """gloo ends the process on a size mismatch, so it must not get that far."""

    def body(rank):
        wire = Wire(Mesh(rank, pp=2).pp, (ROWS, WIDTH + 1), torch.float32, torch.device("cpu"))
        if rank == 0:
            with pytest.raises(AssertionError, match="on the wire"):
                execute(make_schedule("1f1b", 0, 2, 1), [Stage(0, 2)], _batches(1), wire, _objective)
        return True

    assert run_ranks(2, body) == [True, True]
