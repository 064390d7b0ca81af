# SPDX-License-Identifier: Apache-2.0
"""Every ZeRO stage computes the same training, holds what it says it holds, and talks when it says it talks."""

from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, Placement, placements
from megatron.optimizer.flat import ALIGN
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.execute import P2PCommunicator, execute
from megatron.pipeline.schedule import Op, looped
from megatron.settings import schema

WIDTH, BLOCKS, ROWS = 12, 3, 16


class Linear(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, device="meta"))
        self.bias = torch.nn.Parameter(torch.empty(outputs, device="meta"))
        self.placements = dict(
            weight=Placement((outputs, inputs), Normal(0.3)), bias=Placement((outputs,), Constant(0.1), decay=False)
        )

    def forward(self, x):
        return x @ self.weight.t() + self.bias


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Linear(WIDTH, 2 * WIDTH), Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Chunk(torch.nn.Module):
    """A few blocks, with a table in front if `first` and the same table at the end if `last`."""

    def __init__(self, numbers, first=True, last=True, again=False):
        super().__init__()
        self.first, self.last, self.again = first, last, again
        if first or last:
            self.embedding = torch.nn.Module()
            self.embedding.word = Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleDict({str(n): Block() for n in numbers})
        if last:
            self.final_norm = Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.embedding.word(x) if self.first else x
        for block in self.blocks.values():
            x = checkpoint(block, x, use_reentrant=False) if self.again and torch.is_grad_enabled() else block(x)
        return self.embedding.word(torch.tanh(self.final_norm(x))).square().sum() if self.last else x


def _model(chunks=1, again=False):
    """All blocks in one chunk, or in two that share the table."""
    if chunks == 1:
        return [Chunk(range(BLOCKS), again=again)]
    front, back = Chunk(range(1), last=False, again=again), Chunk(range(1, BLOCKS), first=False, again=again)
    back.embedding.word = front.embedding.word
    return [front, back]


def _rows(step, mesh, part, num_microbatches):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x[slice(part * mesh.dp.size + mesh.dp.rank, None, num_microbatches * mesh.dp.size)]


def _passes(model, optimizer, inputs, one_by_one=True, training=True, kinds="B", more=None):
    """Run the passes of a step: F B F B or, not one by one, all F first. Returns the loss."""
    chunks, micros = range(len(model)), range(len(inputs))
    forward = [[Op("F", micro, chunk) for chunk in chunks] for micro in micros]
    backward = [[Op(kind, micro, chunk) for chunk in chunks[::-1] for kind in kinds] for micro in micros]
    visits = (
        [visit for pair in zip(forward, backward, strict=True) for visit in pair] if one_by_one else forward + backward
    )
    wire = P2PCommunicator(Mesh().pp, inputs[0].shape, inputs[0].dtype, inputs[0].device, stages=looped(1, len(model)))

    def stage(chunk):
        last = chunk is model[-1]
        total = lambda x: (None, {"lm loss": x, "tokens": torch.ones_like(x)})
        return lambda x, rows: (total if last else lambda y: y)(chunk(rows if x is None else x))

    sums = execute(
        optimizer.messages.plan([op for visit in (visits if training else forward) for op in visit]),
        [stage(chunk) for chunk in model],
        inputs,
        wire,
        (lambda sums, rows: sums["lm loss"]) if training else None,
        messages=optimizer.messages,
        **(more or {}),
    )
    return sums[0].item()


def _train(
    rank,
    sizes,
    steps=3,
    num_microbatches=2,
    dtype=torch.float32,
    chunks=1,
    again=False,
    one_by_one=True,
    offload=None,
    device="cpu",
    **parallel,
):
    """(loss and norm of each step, weights of each piece); an evaluation between any two steps."""
    mesh = Mesh(rank, **sizes)
    model = _model(chunks, again)
    settings = schema.Optimizer(lr=1e-2, **(offload or {}))
    optimizer = DistributedOptimizer(
        model, mesh, settings, schema.Parallel(**parallel), dtype=dtype, device=device, seed=1
    )

    seen = []
    for step in range(steps):
        inputs = [_rows(step, mesh, part, num_microbatches).to(device, dtype) for part in range(num_microbatches)]
        _passes(model, optimizer, inputs, one_by_one)
        _, norm = optimizer.finalize_grads(torch.zeros(1, dtype=torch.float64))
        optimizer.step(1e-2, 0.1, 1 / ROWS)
        with torch.no_grad():
            seen.append((_passes(model, optimizer, [torch.ones(2, WIDTH).to(device, dtype)], training=False), norm))
    with optimizer.weights.gathered_parameters():
        weights = {name: p.detach().clone() for name, (p, _) in placements(model).items()}
    return seen, weights


STAGES = {
    "stage 0": (dict(replicate=2), dict()),
    "stage 0, overlapped": (dict(replicate=2), dict(overlap_grad_reduce=True)),
    "stage 1": (dict(shard=2), dict(sharding_stage=1)),
    "stage 1, overlapped": (dict(shard=2), dict(sharding_stage=1, overlap_grad_reduce=True, overlap_param_gather=True)),
    "stage 2": (dict(shard=2), dict(sharding_stage=2)),
    "stage 2, overlapped": (dict(shard=2), dict(sharding_stage=2, overlap_grad_reduce=True, overlap_param_gather=True)),
    "stage 3": (dict(shard=2), dict(sharding_stage=3)),
    "stage 3, overlapped": (dict(shard=2), dict(sharding_stage=3, overlap_grad_reduce=True, overlap_param_gather=True)),
    "stage 3, in flight": (dict(shard=2), dict(sharding_stage=3, one_by_one=False, overlap_param_gather=True)),
    "stage 3, computed again": (dict(shard=2), dict(sharding_stage=3, again=True, overlap_param_gather=True)),
    "stage 2, replicated": (dict(replicate=2, shard=2), dict(sharding_stage=2, overlap_grad_reduce=True)),
    "stage 3, replicated": (dict(replicate=2, shard=2), dict(sharding_stage=3)),
    "stage 1, chunks": (dict(shard=2), dict(sharding_stage=1, chunks=2, overlap_grad_reduce=True)),
    "stage 3, chunks": (dict(shard=2), dict(sharding_stage=3, chunks=2, one_by_one=False, again=True)),
    "stage 1, offload": (dict(shard=2), dict(sharding_stage=1, offload=dict(optimizer_cpu_offload=True))),
    "stage 3, half offload": (
        dict(shard=2),
        dict(
            sharding_stage=3,
            offload=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5, param_cpu_offload=True),
        ),
    ),
}


@cache
def _reference():
    """One process. Layers are computed again here, so that what this imports is there before ranks are forked."""
    return _train(0, {}, again=True)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_trains_the_same_model(name, run_ranks):
    sizes, settings = STAGES[name]
    expected, expected_weights = _reference()
    for seen, weights in run_ranks(
        sizes.get("replicate", 1) * sizes.get("shard", 1), lambda r: _train(r, sizes, **settings)
    ):
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=2e-5, atol=1e-6)
        for key, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_process_may_shard(stage, dtype):
    """And gets the very same bits."""
    expected, found = _train(0, {}, dtype=dtype), _train(0, {}, dtype=dtype, sharding_stage=stage)
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_on_a_gpu_with_state_on_the_host(stage, fraction):
    offload = dict(optimizer_cpu_offload=True, optimizer_offload_fraction=fraction, param_cpu_offload=stage == 3)
    seen, weights = _train(0, {}, device="cuda", sharding_stage=stage, offload=offload, overlap_param_gather=True)
    expected, expected_weights = _reference()
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-3, atol=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(weight.cpu(), expected_weights[name], rtol=1e-3, atol=1e-4)


# ---- memory ------------------------------------------------------------------------------------------------------------


def _optimizer(rank, sizes, offload=None, model=None, **parallel):
    model = model or _model()
    optimizer = DistributedOptimizer(
        model,
        Mesh(rank, **sizes),
        schema.Optimizer(**(offload or {})),
        schema.Parallel(**parallel),
        dtype=torch.bfloat16,
        device="cpu",
        seed=1,
    )
    return model, optimizer


INPUT = torch.ones(1, WIDTH, dtype=torch.bfloat16)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_each_stage(stage, run_ranks):
    """Parameters bf16, the rest fp32; n is the number of elements, each parameter padded to 64, each unit to 64 x ranks."""
    ranks = 4

    def body(rank):
        model, optimizer = _optimizer(rank, {"shard" if stage else "replicate": ranks}, sharding_stage=stage)
        seen = [optimizer.memory()]
        _passes(model, optimizer, [INPUT], more=dict(on_op=lambda op: seen.append(optimizer.memory())))
        del seen[1]  # of F
        seen.append(optimizer.memory())
        optimizer.finalize_grads(torch.zeros(1))
        optimizer.step(1e-3, 0.0, 1.0)
        assert optimizer.memory() == seen[0]
        return {unit.name: unit.size for unit in optimizer.units}, seen

    for units, (idle, behind_forward, behind_backward) in run_ranks(ranks, body):
        n, real = sum(units.values()), sum(parameter.numel() for parameter in _model()[0].parameters())
        assert real <= n <= real + len(units) * ALIGN * ((ranks if stage else 1) + 4)  # at most four parameters a unit
        shard = n // ranks
        assert idle["state"] == 12 * (shard if stage else n)
        assert idle["gradients"] == {0: 4 * n, 1: 4 * n + 4 * shard, 2: 4 * shard, 3: 4 * shard}[stage]
        assert behind_backward["gradients"] == idle["gradients"]
        assert idle["parameters"] == (0 if stage == 3 else 2 * n)
        assert idle["shards"] == (2 * shard if stage == 3 else 0)
        roots = sum(size for name, size in units.items() if not name.startswith("blocks."))
        assert behind_forward["parameters"] == (2 * roots if stage == 3 else 2 * n)
        assert behind_backward["parameters"] == idle["parameters"]


@pytest.mark.sampled(2)
def test_stage_3_has_two_layers_at_most(run_ranks):
    """Beside table and norm: the layer in use, and the one that is gathered overlap."""

    def body(rank, overlap):
        model, optimizer = _optimizer(rank, dict(shard=2), sharding_stage=3, overlap_param_gather=overlap)
        seen = []
        for block in model[0].blocks.values():
            block.up.register_forward_hook(lambda *_: seen.append(optimizer.weights.nbytes))
            block.up.weight.register_hook(lambda _: seen.append(optimizer.weights.nbytes))
        _passes(model, optimizer, [INPUT])
        sizes = {unit.name: unit.size for unit in optimizer.units}
        block = sizes["blocks.0"]
        return max(seen), 2 * (sum(sizes.values()) - BLOCKS * block), 2 * block

    for overlap in (False, True):
        for most, roots, block in run_ranks(2, body, overlap):
            assert most == roots + (2 if overlap else 1) * block


def test_offload_divides_the_state():
    _, optimizer = _optimizer(0, {}, offload=dict(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5))
    host, device = optimizer.states
    assert host.offload and not device.offload
    assert len(host.owned) + len(device.owned) == len(optimizer.units)
    assert 0.3 < host.nbytes / optimizer.memory()["state"] < 0.8


@pytest.mark.sampled(5)
@pytest.mark.parametrize("stage", [2, 3])
def test_a_sharded_model_is_never_whole_while_it_is_built(stage, run_ranks):
    """The largest memory that exists at any time is a shard of the optimizer's, or stage 2's bf16 parameters."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type == "cpu":
                self.bytes = max(self.bytes, result.untyped_storage().nbytes())
            return result

    def body(rank):
        with Largest() as largest:
            _, optimizer = _optimizer(rank, dict(shard=4), model=[Chunk(range(12))], sharding_stage=stage)
        return largest.bytes, sum(unit.size for unit in optimizer.units)

    for largest, n in run_ranks(4, body):
        assert largest == (4 * n // 4 if stage == 3 else 2 * n)


# ---- the order of events -----------------------------------------------------------------------------------------------


class Log(list):
    """What happens in which order: collectives are started and waited for, layers run."""

    def watch(self, patch):
        for name in ("reduce_scatter", "all_gather", "all_reduce"):
            patch.setattr(collectives, f"start_{name}", self._logged(name, getattr(collectives, f"start_{name}")))

    def _logged(self, name, start):
        def logged(*args):
            work, number = start(*args), sum(entry.startswith(f"start {name}") for entry in self)
            self.append(f"start {name} {number}")
            return SimpleNamespace(wait=lambda: (work.wait(), self.append(f"wait {name} {number}")))

        return logged

    def layers(self, model):
        for name, block in model[0].blocks.items():
            block.register_forward_hook(lambda *_, name=name: self.append(f"forward {name}"))
            block.up.weight.register_hook(lambda *_, name=name: self.append(f"backward {name}"))


def _own_loop(model, optimizer, inputs, training=True):
    """What `_passes` does, in a loop of one's own."""
    for x in inputs:
        y = model[0](x)
        if training:
            y.backward()


def _events(rank, num_microbatches, loop=_passes, **parallel):
    """Events of a step and of the forward pass behind it."""
    log = Log()
    with pytest.MonkeyPatch.context() as patch:
        log.watch(patch)
        model, optimizer = _optimizer(rank, {"shard" if "sharding_stage" in parallel else "replicate": 2}, **parallel)
        log.clear()  # of how initial weights were gathered
        log.layers(model)
        loop(model, optimizer, [INPUT] * num_microbatches)
        log.append("totals")
        optimizer.finalize_grads(torch.zeros(1))
        optimizer.step(1e-3, 0.0, 1.0)
        log.append("updated")
        loop(model, optimizer, [INPUT], training=False)
    return list(log)


def _in_order(events, *wanted):
    """Whether some of the events are these, in this order."""
    rest = iter(events)
    return all(any(event == wish for event in rest) for wish in wanted)


@pytest.mark.parametrize("stage, kind", [({}, "all_reduce"), (dict(sharding_stage=1), "reduce_scatter")])
def test_reductions_of_kept_gradients_overlap_the_last_backward_pass(stage, kind, run_ranks):
    for events in run_ranks(2, lambda rank: _events(rank, 2, overlap_grad_reduce=True, **stage)):
        passes, rest = events[: events.index("totals")], events[events.index("totals") :]
        first = passes.index("backward 0")
        assert not any(kind in event for event in passes[:first])  # not in the first micro-batch
        assert [event.split()[0] for event in passes[first:] if kind in event] == ["start"] * 5
        last = [f"start {kind} 0", "backward 2", f"start {kind} 1", "backward 1", f"start {kind} 2"]
        assert _in_order(passes[first:], *last)
        assert [event for event in rest if kind in event] == [f"wait {kind} {n}" for n in range(5)]


def test_kept_gradients_are_reduced_behind_the_passes_otherwise(run_ranks):
    for events in run_ranks(2, lambda rank: _events(rank, 2, sharding_stage=1)):
        assert not any("reduce_scatter" in event for event in events[: events.index("totals")])
        started = [f"start reduce_scatter {number}" for number in range(5)]
        assert _in_order(events, *started, "wait reduce_scatter 0")  # one is summed while the next are on their way


@pytest.mark.parametrize("loop", [_passes, _own_loop])
@pytest.mark.parametrize("overlap", [False, True])
def test_stage_2_reduces_each_micro_batch(overlap, loop, run_ranks):
    for events in run_ranks(2, lambda rank: _events(rank, 2, loop, sharding_stage=2, overlap_grad_reduce=overlap)):
        passes = events[: events.index("totals")]
        assert sum(event.startswith("start reduce_scatter") for event in passes) == 2 * 5
        layer = ["start reduce_scatter 1", "wait reduce_scatter 1", "backward 1", "start reduce_scatter 2"]
        assert _in_order(passes, *layer) is not overlap
        if overlap:
            assert _in_order(passes, layer[0], layer[2], layer[3], layer[1])


@pytest.mark.parametrize("loop", [_passes, _own_loop])
def test_stage_1_gathers_all_units_ahead_and_waits_at_their_use(loop, run_ranks):
    for events in run_ranks(2, lambda rank: _events(rank, 1, loop, sharding_stage=1, overlap_param_gather=True)):
        update, behind = events[: events.index("updated")], events[events.index("updated") :]
        assert [event for event in update if "all_gather" in event] == [f"start all_gather {n}" for n in range(5)]
        # Table and norm are 0 and 1, the layers 2 to 4. NCCL gathers in the order of the starts: a wait out of that order
        # would be one for all that were started before.
        assert [event for event in behind[1:] if "start" not in event] == [
            "wait all_gather 0",
            "wait all_gather 1",
            "wait all_gather 2",
            "forward 0",
            "wait all_gather 3",
            "forward 1",
            "wait all_gather 4",
            "forward 2",
        ]


@pytest.mark.parametrize("loop", [_passes, _own_loop])
def test_stage_3_gathers_the_next_layer_ahead_in_both_directions(loop, run_ranks):
    for events in run_ranks(2, lambda rank: _events(rank, 1, loop, sharding_stage=3, overlap_param_gather=True)):
        passes = [event for event in events[: events.index("totals")] if "reduce_scatter" not in event]
        assert [event.replace("all_gather ", "") for event in passes] == [
            "start 0",
            "start 1",
            "start 2",
            "wait 0",
            "wait 1",  # table and norm
            "wait 2",
            "start 3",
            "forward 0",
            "wait 3",
            "start 4",
            "forward 1",
            "wait 4",
            "forward 2",
            "start 5",
            "wait 5",
            "start 6",
            "backward 2",
            "wait 6",
            "start 7",
            "backward 1",
            "wait 7",
            "backward 0",
        ]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_forget_drops_passes(stage):
    model, optimizer = _optimizer(0, {}, sharding_stage=stage)
    norms = []
    for spoil in (False, True):
        if spoil:
            model[0](9 * INPUT).backward()
            optimizer.zero_grad()
        model[0](INPUT).backward()
        norms.append(optimizer.finalize_grads(torch.zeros(1))[1])
    assert norms[0] == norms[1] > 0
