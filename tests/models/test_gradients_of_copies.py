# SPDX-License-Identifier: Apache-2.0
"""Parameters of linear layers of which tensor parallel ranks have copies, such as PACT's bound: with the sums over ranks
that their placements ask for, gradients are those of one process. Asked of every kind of layer, divided in every way.
"""

import pytest
import torch

from megatron.model.command_line import parse_any
from megatron.model.linear_kinds import chosen, with_own_weights
from megatron.model.weights import add_prefix, column, replicated, row, take_prefix
from megatron.mpu import collectives
from megatron.mpu.layers import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megatron.mpu.mesh import Mesh
from tests.models.test_rare_states import KINDS
from tests.training.test_plain_loop import FLAGS, SIX

S, B, INPUTS, OUTPUTS, RANKS = 6, 2, 8, 12, 2
DIVIDED = {
    "column": (ColumnParallelLinear, column(INPUTS, (OUTPUTS,), 1.0), False),
    "column, sequence parallel": (ColumnParallelLinear, column(INPUTS, (OUTPUTS,), 1.0), True),
    "row": (RowParallelLinear, row(INPUTS, OUTPUTS, 1.0), False),
    "row, sequence parallel": (RowParallelLinear, row(INPUTS, OUTPUTS, 1.0, sequence_parallel=True), True),
    "replicated": (ReplicatedLinear, replicated(INPUTS, OUTPUTS, 1.0), False),
    "replicated, sequence parallel": (ReplicatedLinear, replicated(INPUTS, OUTPUTS, 1.0, sequence_parallel=True), True),
}


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, UPSTREAM = drawn(S, B, INPUTS, seed=3), drawn(S, B, OUTPUTS, seed=4)


def gradients(kind: str, way: str, tp) -> dict[str, torch.Tensor]:
    """The gradient of each parameter on this rank, summed over the ranks that its placement names."""
    layer_type, table, sequence_parallel = DIVIDED[way]
    flags, product = KINDS[kind]
    settings = parse_any(f"{FLAGS} {SIX} {flags}".split()).model
    own = with_own_weights(settings, add_prefix("up", table), chosen(settings.linear, 0, ["up"]))
    layer = layer_type(take_prefix(own, "up"), tp, sequence_parallel=sequence_parallel)
    piece = {}
    for name, placement in layer.placements.items():
        offset, extent = placement.box(placement.local_shape({"tp": tp.size}), {"tp": tp.rank})
        piece[name] = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(layer.named_parameters())):
            whole = drawn(*layer.placements[name].shape, seed=10 + number)
            parameter.copy_(torch.full_like(whole, 0.8) if name == "pact_alpha" else whole[piece[name]])
        for name, buffer in layer.named_buffers():
            buffer.copy_(torch.tensor([2.0, 1.0])) if name == "input_average" else buffer.fill_("mask" in name)
    layer.weight.requires_grad_("lora" not in settings.linear)
    layer.product = product(layer, "blocks.0.mlp.up", settings)
    by_rows = lambda x: x.chunk(tp.size)[tp.rank] if sequence_parallel else x
    by_columns = lambda x: x.chunk(tp.size, -1)[tp.rank]
    y = layer(by_columns(X) if layer_type is RowParallelLinear else by_rows(X))
    upstream = by_columns(UPSTREAM) if layer_type is ColumnParallelLinear else by_rows(UPSTREAM)
    (y[0] if isinstance(y, tuple) else y).backward(upstream)
    found = {}
    for name, parameter in sorted(layer.named_parameters()):
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad.clone()
        if "tp" in layer.placements[name].partial and tp.size > 1:
            collectives.all_reduce(gradient, tp)
        found[name] = gradient, piece[name]
    return found


def all_of_them(rank: int) -> dict:
    tp = Mesh(rank, tp=RANKS).tp
    return {(kind, way): gradients(kind, way, tp) for kind in KINDS for way in DIVIDED}


@pytest.mark.sampled(5)
def test_gradients_are_those_of_one_process(run_ranks):
    parts = run_ranks(RANKS, all_of_them)
    for (kind, way), found in parts[0].items():
        wanted = gradients(kind, way, Mesh().tp)
        assert found.keys() == wanted.keys()
        for part in parts:
            for name, (gradient, place) in part[kind, way].items():
                whole, _ = wanted[name]
                assert whole.any() or name in ("lora_a", "lora_b"), (kind, way, name)
                said = f"{name} of {kind}, {way}"
                torch.testing.assert_close(gradient, whole[place], msg=lambda text, said=said: f"{said}: {text}")
