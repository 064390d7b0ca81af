# SPDX-License-Identifier: Apache-2.0
"""The executor gives what one process gives, for every schedule, rank count and number of model chunks."""

import weakref

import pytest
import torch

from megatron.errors import SettingsError
from megatron.model.weights import column
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mesh import Axis, Mesh
from megatron.pipeline.execute import P2PCommunicator, execute
from megatron.pipeline.schedule import TRAINING, default_chunks, looped, make_schedule, stage_map
from megatron.pipeline.timeline import Timeline
from megatron.pipeline.wire import open_channels

WIDTH, ROWS = 8, 3
ALONE = Axis("tp", (0,))


class Stage(torch.nn.Module):
    """A linear layer, a gain and tanh; the last one also has the loss."""

    def __init__(self, number: int, stages: int):
        super().__init__()
        self.number, self.last = number, number == stages - 1
        torch.manual_seed(number)
        self.linear = ColumnParallelLinear(column(WIDTH, (WIDTH,), 0.3), ALONE)
        self.gain = torch.nn.Parameter(torch.randn(WIDTH))
        for parameter in self.linear.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, x, batch):
        inputs, targets = batch[0].requires_grad_(), batch[1]
        y = torch.tanh(self.linear(inputs if self.number == 0 else x) * self.gain)
        return (None, {"lm loss": ((y - targets) ** 2).sum(), "tokens": torch.tensor(float(ROWS))}) if self.last else y


def _batches(num_microbatches):
    generator = torch.Generator().manual_seed(99)
    return [tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in "xy") for _ in range(num_microbatches)]


def _objective(sums, batch):
    return sums["lm loss"] / sums["tokens"]


def _wire(mesh, stages=None, **more):
    return P2PCommunicator(mesh.pp, (ROWS, WIDTH), torch.float32, torch.device("cpu"), stages=stages, **more)


def _run(rank, name, pp, num_microbatches, chunks, steps=1, channels=False):
    mesh, places = Mesh(rank, pp=pp), stage_map(name, pp, chunks)
    stages = [Stage(places.index((rank, chunk)), pp * chunks) for chunk in range(chunks)]
    wire = _wire(mesh, places, groups=open_channels(mesh, places) if channels else None)
    for _ in range(steps):
        for stage in stages:
            stage.zero_grad()
        sums = execute(
            make_schedule(name, rank, pp, num_microbatches, chunks),
            stages,
            _batches(num_microbatches),
            wire,
            _objective,
        )
    return sums, {stage.number: [p.grad for p in stage.parameters()] for stage in stages}


def _reference(stages, num_microbatches):
    chain = [Stage(number, stages) for number in range(stages)]
    total = 0.0
    for batch in _batches(num_microbatches):
        x = None
        for stage in chain:
            x = stage(x, batch)
        total += x[1]["lm loss"].item()
        _objective(x[1], batch).backward()
    return total, {stage.number: [p.grad for p in stage.parameters()] for stage in chain}


def _compare(results, name, pp, num_microbatches, chunks):
    total, gradients = _reference(pp * chunks, num_microbatches)
    end = stage_map(name, pp, chunks)[-1][0]  # the rank of the last stage
    for rank, (sums, own) in enumerate(results):
        expected = [total, num_microbatches * ROWS] if rank == end else [0, 0]
        torch.testing.assert_close(sums, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)
        for number, tensors in own.items():
            torch.testing.assert_close(tensors, gradients[number])


@pytest.mark.sampled(10)
@pytest.mark.parametrize("pp, num_microbatches", [(1, 3), (2, 1), (2, 4), (3, 5), (4, 6)])
@pytest.mark.parametrize("name", TRAINING)
def test_equals_one_process(name, pp, num_microbatches, run_ranks):
    chunks = default_chunks(name)
    if pp == 1 and name == "interleaved":
        pytest.skip("one rank has nobody to interleave with")
    _compare(run_ranks(pp, _run, name, pp, num_microbatches, chunks), name, pp, num_microbatches, chunks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, pp, num_microbatches, chunks", [("1f1b", 2, 4, 3), ("gpipe", 2, 4, 2), ("interleaved", 3, 4, 2)]
)
def test_equals_one_process_with_many_chunks(name, pp, num_microbatches, chunks, run_ranks):
    _compare(run_ranks(pp, _run, name, pp, num_microbatches, chunks), name, pp, num_microbatches, chunks)


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_steps_follow_each_other_with_a_group_for_each_channel(name, run_ranks):
    """As NCCL needs them."""
    chunks = default_chunks(name)
    _compare(run_ranks(2, _run, name, 2, 3, chunks, 3, True), name, 2, 3, chunks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v"])
def test_forward_only_keeps_no_gradients(name, run_ranks):
    chunks, places = default_chunks(name), stage_map(name, 2, default_chunks(name))

    def body(rank):
        mesh = Mesh(rank, pp=2)
        stages = [Stage(places.index((rank, chunk)), 2 * chunks) for chunk in range(chunks)]
        with torch.no_grad():
            ops = make_schedule("forward-only", rank, 2, 3, chunks)
            sums = execute(ops, stages, _batches(3), _wire(mesh, places))
        return sums, [stage.linear.weight.grad for stage in stages]

    results = run_ranks(2, body)
    assert all(gradient is None for _, gradients in results for gradient in gradients)
    end = places[-1][0]
    assert results[end][0][0].item() == pytest.approx(_reference(2 * chunks, 3)[0], rel=1e-6)
    assert results[1 - end][0].tolist() == [0, 0]


def test_a_wrong_shape_is_caught_before_the_wire(run_ranks):
    """gloo ends the process on a size mismatch, so it must not get that far."""

    def body(rank):
        wire = P2PCommunicator(Mesh(rank, pp=2).pp, (ROWS, WIDTH + 1), torch.float32, torch.device("cpu"))
        if rank == 0:
            with pytest.raises(SettingsError, match="and messages are"):
                execute(make_schedule("gpipe", 0, 2, 2), [Stage(0, 2)], _batches(2), wire, _objective)
        return True

    assert run_ranks(2, body) == [True, True]


def _alone(name, num_microbatches, chunks, **more):
    """A step of all stages on this one rank."""
    stages = [Stage(number, chunks) for number in range(chunks)]
    wire = _wire(Mesh(), looped(1, chunks))
    execute(
        make_schedule(name, 0, 1, num_microbatches, chunks),
        stages,
        _batches(num_microbatches),
        wire,
        _objective,
        **more,
    )
    return stages


def test_put_off_gradients_come_through_the_same_hooks():
    """The optimizer collects gradients with hooks; each parameter's is called once for each micro-batch."""
    stages, calls = [Stage(number, 2) for number in range(2)], {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, key=(stage.number, name): calls.__setitem__(key, calls.get(key, 0) + 1)
            )
    execute(make_schedule("zb-v", 0, 1, 4), stages, _batches(4), _wire(Mesh(), looped(1, 2)), _objective)
    assert set(calls.values()) == {4} and len(calls) == 6


def test_ops_are_timed_in_order():
    record = []
    _alone("zb-v", 2, 2, timeline=record)
    assert [op for op, _, _ in record] == make_schedule("zb-v", 0, 1, 2)
    moments = [moment for _, start, end in record for moment in (start, end)]
    assert moments == sorted(moments)


def test_passes_in_turns_are_timed_as_one():
    """And learn what passes one after the other do."""
    record = []
    stages, others = _alone("1f1b &", 3, 1, timeline=record), _alone("1f1b", 3, 1)
    timeline = Timeline("1f1b &", looped(1), [record])
    assert timeline.plan == [make_schedule("1f1b &", 0, 1, 3)]
    for one, other in zip(stages[0].parameters(), others[0].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_an_output_is_freed_once_it_is_sent(run_ranks):
    """What a rank keeps of a micro-batch is the graph; the data of its output goes with the message."""

    def body(rank):
        outputs = []

        class Watched(Stage):
            def forward(self, x, batch):
                y = super().forward(x, batch) + 0.0  # an op that keeps its output for nobody
                outputs.append(weakref.ref(y))
                return y

        stage = Watched(0, 2) if rank == 0 else Stage(1, 2)
        alive = []
        wire = _wire(Mesh(rank, pp=2))
        original = wire.receive

        def receive(source, kind, *rest):
            alive.append(sum(output() is not None for output in outputs))
            return original(source, kind, *rest)

        wire.receive = receive
        execute(make_schedule("gpipe", rank, 2, 4), [stage], _batches(4), wire, _objective)
        return alive

    alive, _ = run_ranks(2, body)
    assert alive == [0, 0, 0, 0]
