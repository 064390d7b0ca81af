# SPDX-License-Identifier: Apache-2.0
"""A linear layer with a `LinearProduct` of its own, against the same written down in plain torch."""

from types import SimpleNamespace

import pytest
import torch

from megatron.errors import SettingsError
from megatron.fused_kernels import reference
from megatron.model import weights
from megatron.mpu import layers
from megatron.mpu.deferred_wgrad import WeightGradStore, run_deferred_wgrads
from megatron.mpu.layers import ColumnParallelLinear, OwnWgrad, RowParallelLinear
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Normal, beside_inputs, beside_rows

S, B, INPUTS, ROWS, RANK = 4, 2, 6, (3, 5), 2
SETTINGS = SimpleNamespace()


class Pair(LinearProduct):
    """W x gates of the rows + B A"""

    @classmethod
    def own_weights(cls, settings, weight):
        return {
            "a": beside_inputs(weight, RANK, Normal(1.0)),
            "b": beside_rows(weight, RANK, Normal(1.0)),
            "gates": beside_rows(weight, 1, Constant(1.0), decay=False),
        }

    def transform(self, weight, a, b, gates):
        return weight * gates + b @ a


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(kind=Pair, dtype=torch.float32, bias=True):
    """A column-parallel layer with this kind and drawn parameters."""
    table = weights.column(INPUTS, ROWS, 1.0, bias=bias)
    table |= kind.own_weights(SETTINGS, table["weight"])
    layer = ColumnParallelLinear(table, Mesh().tp, dtype=dtype)
    layer.product = kind(layer, "blocks.0.mlp.up", SETTINGS)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    return layer


def expected(layer, x: torch.Tensor, upstream: torch.Tensor):
    """(y, gradient of x, {parameter: gradient}) by autograd."""
    x = x.detach().clone().requires_grad_()
    own = {name: values.detach().clone().requires_grad_() for name, values in layer.named_parameters()}
    whole = own["weight"] * own["gates"] + torch.einsum("abr,ri->abi", own["b"], own["a"])
    y = torch.einsum("sbi,oi->sbo", x, whole.flatten(0, 1)) + own["bias"].flatten()
    y.backward(upstream)
    return y, x.grad, {name: values.grad for name, values in own.items()}


@pytest.mark.parametrize(
    "way", ["autograd", "deferred", "deferred, not collecting", "accumulated", "accumulated twice"]
)
@pytest.mark.parametrize("frozen", [(), ("weight",), ("weight", "b", "gates"), ("weight", "a", "b", "gates")])
def test_gradients_in_every_way(way, frozen):
    layer, x, upstream = made(), drawn(S, B, INPUTS, seed=8).requires_grad_(), drawn(S, B, 15, seed=9)
    y, d_x, gradients = expected(layer, x, upstream)
    store, totals = WeightGradStore(), {}
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if way.startswith("deferred"):
        layer.weight_grad_store = store
    if way.startswith("accumulated"):
        names = {parameter: name for name, parameter in layer.named_parameters()}

        def accumulate(weight):
            def take(product):
                name = names[weight]
                totals.setdefault(name, torch.full_like(weight, torch.nan))
                product.add_to(totals[name], overwrite=totals[name].isnan().all().item())

            return take

        layer.accumulate = accumulate
    torch.testing.assert_close(layer(x), y)
    if way == "deferred":
        out = layer(x)
        with store.collect() as products:
            out.backward(upstream)
        assert layer.bias.grad is not None and all(p.grad is None for n, p in layer.named_parameters() if n != "bias")
        assert len(products) == (frozen != ("weight", "a", "b", "gates"))
        with torch.no_grad():  # what was deferred does not read what may be gone
            kept = [parameter.clone() for parameter in layer.parameters()]
            for parameter in layer.parameters():
                parameter.data.fill_(torch.nan)
            run_deferred_wgrads(products)
            for parameter, values in zip(layer.parameters(), kept, strict=False):
                parameter.data.copy_(values)
    else:
        layer(x).backward(upstream)
    factor = 1
    if way == "accumulated twice":
        layer(x).backward(upstream)
        factor = 2
    torch.testing.assert_close(x.grad, factor * d_x)
    for name, parameter in layer.named_parameters():
        found = totals.get(name, parameter.grad)
        if name in frozen:
            assert found is None
        else:
            torch.testing.assert_close(found, factor * gradients[name], msg=name)


def test_without_a_gradient_of_the_input_autograd_gets_those_of_the_weights():
    layer, x, upstream = made(), drawn(S, B, INPUTS, seed=8), drawn(S, B, 15, seed=9)
    layer.weight_grad_store = WeightGradStore()
    layer(x).backward(upstream)
    for name, wanted in expected(layer, x, upstream)[2].items():
        torch.testing.assert_close(layer.get_parameter(name).grad, wanted)


class Counted(LinearProduct):
    """Counts what it does, and keeps halves of what comes in."""

    def __init__(self, *args):
        super().__init__(*args)
        self.weights, self.updates = [], 0

    def prepare_weight(self, weight):
        self.weights.append(weight.clone())
        return (weight,)

    def prepare_input(self, x):
        return (x.half(),)

    def forward(self, multiply, x, weight, bias):
        return multiply(x[0].float(), weight[0], bias)

    def grad_weight(self, multiply, gradient, x):
        return gradient[0].t() @ x[0].float()

    def after_update(self):
        self.updates += 1


class Once(Counted):
    once_a_step = True


@pytest.mark.parametrize("kind, times", [(Counted, 6), (Once, 1)])
def test_weights_are_prepared_for_each_pass_or_once_a_step(kind, times):
    layer, x = made(kind), drawn(S, B, INPUTS, seed=8).requires_grad_()
    for _ in range(3):
        layer(x).sum().backward()
    assert len(layer.product.weights) == times
    with torch.no_grad():
        layer.weight.add_(1.0)
    layer.product.weights_changed()
    y = layer(x)
    assert layer.product.updates == 1
    torch.testing.assert_close(layer.product.weights[-1], layer.weight.flatten(0, 1))
    torch.testing.assert_close(
        y, torch.einsum("sbi,oi->sbo", x, layer.weight.flatten(0, 1)) + layer.bias.flatten(), atol=2e-2, rtol=1e-2
    )


def test_what_is_prepared_of_the_input_is_all_that_is_kept():
    layer, x, kept = made(Counted), drawn(S, B, INPUTS, seed=8).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    assert [(t.dtype, t.numel()) for t in kept if t.data_ptr() not in own] == [(torch.float16, x.numel())]


def test_a_transform_that_no_gradient_goes_through_is_said():
    class Rounded(LinearProduct):
        def transform(self, weight):
            return weight.detach().round()

    layer = made(Rounded)
    y = layer(drawn(S, B, INPUTS, seed=8).requires_grad_())
    with pytest.raises(SettingsError, match=r"Rounded.transform of blocks.0.mlp.up: no gradient goes through it"):
        y.sum().backward()


def test_a_transform_in_another_format_multiplies_in_that_of_the_weights():
    class Halved(LinearProduct):
        def transform(self, weight):
            return weight * torch.full((), 0.5, dtype=torch.float32)[None]  # promotes bf16

    layer, x = made(Halved, torch.bfloat16), drawn(S, B, INPUTS, seed=8).bfloat16().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.dtype == layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("row", [False, True])
def test_where_weights_beside_lie(row):
    """What is cut as the weight is has whole gradients; what each rank has whole, parts of them."""
    table = weights.row(INPUTS, 8, 1.0) if row else weights.column(INPUTS, ROWS, 1.0)
    a, b = (
        (table["weight"].cut, beside_inputs(table["weight"], 2, Normal(1.0))),
        beside_rows(table["weight"], 2, Constant(0)),
    )
    found = {name: (placed.shape, placed.cut, placed.partial) for name, placed in dict(a=a[1], b=b).items()}
    if row:
        assert found == {"a": ((2, INPUTS), {"tp": 1}, ()), "b": ((8, 2), {}, ("tp",))}
    else:
        assert found == {"a": ((2, INPUTS), {}, ("tp",)), "b": ((*ROWS, 2), {"tp": 0}, ())}


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pieces_of_a_tensor_are_those_of_the_weight(kind, sequence_parallel, run_ranks):
    """Each rank's piece of the weight, given as a tensor of its shape, is the piece of the weight that it holds."""
    table = weights.column(INPUTS, (4, 3), 1.0) if kind is ColumnParallelLinear else weights.row(INPUTS, 8, 1.0)
    shape = table["weight"].shape
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for rank in range(2):
        layer = kind(table, Mesh(rank, tp=2).tp, sequence_parallel=sequence_parallel)
        piece = LinearProduct(layer, "x", SETTINGS).piece(whole)
        dim = table["weight"].cut["tp"]
        assert torch.equal(piece, whole.chunk(2, dim)[rank]) and piece.shape == layer.weight.shape


def test_products_are_found():
    with_one, without = made(), ColumnParallelLinear(weights.column(2, (2,), 1.0), Mesh().tp)
    assert layers.linear_products([torch.nn.ModuleList([with_one, without])]) == [with_one.product]


def test_a_product_starts_to_gather_when_it_is_told():
    operand = SimpleNamespace(started=0)
    operand.start = lambda: setattr(operand, "started", operand.started + 1)
    OwnWgrad(None, reference.matmul, (), operand).start()
    assert operand.started == 1
