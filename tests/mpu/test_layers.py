# SPDX-License-Identifier: Apache-2.0
"""Linear layers over two ranks against one plain product; what runs beside what in their backward pass."""

import weakref
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.fused_kernels import reference
from megatron.model import weights
from megatron.mpu import collectives, layers
from megatron.mpu.deferred_wgrad import WeightGradStore, run_deferred_wgrads
from megatron.mpu.layers import (
    ColumnParallelLinear,
    LinearOptions,
    ReplicatedLinear,
    RowParallelLinear,
    WgradGemm,
    linear,
    pack_weights,
)
from megatron.mpu.mesh import Axis, Mesh

S, B, H, OUT = 6, 2, 5, 8
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 3 --eval-iters 0 --device cpu --num-workers 0"
)


def drawn(*shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHT, BIAS, INPUT, UPSTREAM = (
    drawn(OUT, H, seed=1),
    drawn(OUT, seed=2),
    drawn(S, B, H, seed=3),
    drawn(S, B, OUT, seed=4),
)


def column(tp, sequence_parallel: bool) -> ColumnParallelLinear:
    layer = ColumnParallelLinear(weights.column(H, (OUT,), 1.0), tp, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT.chunk(tp.size)[tp.rank])
        layer.bias.copy_(BIAS.chunk(tp.size)[tp.rank])
    return layer


class Events(list):
    """What is started, waited for and multiplied, in order; a product by the shape of its result."""

    def listen(self) -> None:
        def watched(name, start):
            def started(*args):
                work = start(*args)
                self.append(f"start {name}")
                return Work(self, name, work)

            return started

        for name in ("all_reduce", "all_gather", "reduce_scatter"):
            setattr(collectives, f"start_{name}", watched(name, getattr(collectives, f"start_{name}")))

        def multiply(x, weight, bias=None):
            result = reference.matmul(x, weight, bias)
            self.append(f"product {list(result.shape)}")
            return result

        layers.matmul = lambda x: multiply


class Work:
    def __init__(self, events, name, work):
        self.events, self.name, self.work = events, name, work

    def wait(self):
        self.work.wait()
        self.events.append(f"wait {self.name}")


def pieces(x, mesh, sequence_parallel):
    return x.chunk(mesh.tp.size)[mesh.tp.rank] if sequence_parallel else x


def _backward(rank, sequence_parallel, overlap=True):
    """Events of the backward pass of a column layer on two ranks, and its results."""
    mesh, events = Mesh(rank, tp=2), Events()
    layer = column(mesh.tp, sequence_parallel)
    layer.overlap = overlap
    events.listen()
    x = pieces(INPUT, mesh, sequence_parallel).clone().requires_grad_()
    y = layer(x)
    events.clear()
    y.backward(UPSTREAM.chunk(2, -1)[rank])
    return list(events), y.detach(), x.grad, layer.weight.grad, layer.bias.grad


def whole() -> tuple[torch.Tensor, ...]:
    x, weight, bias = (tensor.clone().requires_grad_() for tensor in (INPUT, WEIGHT, BIAS))
    y = x @ weight.t() + bias
    y.backward(UPSTREAM)
    return y.detach(), x.grad, weight.grad, bias.grad


INPUT_GRADIENT, WEIGHT_GRADIENT = f"product {[S * B, H]}", f"product {[OUT // 2, H]}"
ORDER = {
    False: [INPUT_GRADIENT, "start all_reduce", WEIGHT_GRADIENT, "wait all_reduce"],
    True: [
        "start all_gather",
        INPUT_GRADIENT,
        "start reduce_scatter",
        "wait all_gather",
        WEIGHT_GRADIENT,
        "wait reduce_scatter",
    ],
}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_messages_of_a_backward_pass_run_beside_the_other_product(sequence_parallel, run_ranks):
    y, x, weight, bias = whole()
    for rank, (events, *found) in enumerate(run_ranks(2, _backward, sequence_parallel)):
        assert events == ORDER[sequence_parallel]
        piece = x.chunk(2)[rank] if sequence_parallel else x
        for got, want in zip(
            found, (y.chunk(2, -1)[rank], piece, weight.chunk(2)[rank], bias.chunk(2)[rank]), strict=True
        ):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_a_product_that_is_taken_at_once_has_its_messages_in_the_same_places(sequence_parallel, run_ranks):
    """As that which adds to the optimizer's gradients."""

    def body(rank):
        mesh, events = Mesh(rank, tp=2), Events()
        layer = column(mesh.tp, sequence_parallel)
        layer.accumulate = lambda weight: lambda product: product()
        events.listen()
        y = layer(pieces(INPUT, mesh, sequence_parallel).clone().requires_grad_())
        events.clear()
        y.backward(UPSTREAM.chunk(2, -1)[rank])
        return list(events)

    for events in run_ranks(2, body):
        assert events == ORDER[sequence_parallel]


def test_products_that_wait_gather_one_ahead(run_ranks):
    def body(rank):
        mesh, events, deferred = Mesh(rank, tp=2), Events(), WeightGradStore()
        columns = [column(mesh.tp, True) for _ in range(3)]
        events.listen()
        for layer in columns:
            layer.weight_grad_store = deferred
        x = pieces(INPUT, mesh, True).clone().requires_grad_()
        y = sum(layer(x) for layer in columns)
        events.clear()
        with deferred.collect() as products:
            y.backward(UPSTREAM.chunk(2, -1)[rank])
        assert "start all_gather" not in events  # not before pass W
        events.clear()
        run_deferred_wgrads(products)
        return list(events)

    for events in run_ranks(2, body):
        gather, product = "start all_gather", ["wait all_gather", WEIGHT_GRADIENT]
        assert events == [gather, gather, *product, gather, *product, *product]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_what_a_message_reads_and_fills_is_kept_until_its_wait(sequence_parallel, fused, monkeypatch):
    """Against messages that keep nothing themselves: a device's allocator would give the memory to the next product."""
    waited = []

    def launch(*args):
        kept = [weakref.ref(tensor) for tensor in args[:-1]]
        return SimpleNamespace(wait=lambda: waited.append([tensor() is not None for tensor in kept]))

    for name in ("start_all_reduce", "start_all_gather", "start_reduce_scatter"):
        monkeypatch.setattr(collectives, name, launch)
    monkeypatch.setattr(collectives, "all_gather", lambda x, axis: torch.cat([x, x]))
    layer = column(Axis("tp", (0, 1)), sequence_parallel)
    if fused:
        layer.accumulate = lambda weight: lambda product: product()
    layer(INPUT[: S // 2 if sequence_parallel else S].clone().requires_grad_()).backward(UPSTREAM.chunk(2, -1)[0])
    assert waited == ([[True, True]] * 2 if sequence_parallel else [[True]])


def test_overlapped_or_apart_the_bits_are_the_same(run_ranks):
    """Apart is for inputs that are cast on their way into the product: their gradients are summed as they were."""
    beside, apart = run_ranks(2, _backward, False), run_ranks(2, _backward, False, False)
    for (_, *one), (events, *other) in zip(beside, apart, strict=True):
        assert "start all_reduce" not in events
        assert all(map(torch.equal, one, other))


def test_on_one_rank_nothing_is_reduced():
    events, mesh = Events(), Mesh()
    before = layers.matmul, {name: getattr(collectives, name) for name in vars(collectives) if "start_" in name}
    try:
        events.listen()
        column(mesh.tp, False)(INPUT.clone().requires_grad_()).backward(UPSTREAM)
    finally:
        layers.matmul = before[0]
        for name, function in before[1].items():
            setattr(collectives, name, function)
    assert events and not any("start" in event for event in events)


# ---- weight gradients that add to a buffer ---------------------------------------------------------------------------


def test_a_product_adds_to_a_buffer_of_fp32():
    rows, x = drawn(12, OUT, seed=5), drawn(12, H, seed=6)
    product = WgradGemm(rows, x.t, reference.matmul)
    want = rows.double().t() @ x.double()
    total = torch.full((OUT, H), torch.nan)
    product.add_to(total, overwrite=True)  # whatever was there before
    torch.testing.assert_close(total.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(total, product())
    product.add_to(total, overwrite=False)
    torch.testing.assert_close(total.double(), 2 * want, rtol=1e-5, atol=1e-5)


def test_half_precision_on_a_cpu_adds_the_rounded_product():
    rows, x = drawn(12, OUT, seed=5).bfloat16(), drawn(12, H, seed=6).bfloat16()
    product, total = WgradGemm(rows, x.t, reference.matmul), torch.full((OUT, H), torch.nan)
    product.add_to(total, overwrite=True)
    product.add_to(total, overwrite=False)
    assert torch.equal(total, 2 * (rows.t() @ x).float())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="products that sum in fp32 from bf16 are CUDA's")
def test_half_precision_on_cuda_adds_what_is_not_rounded():
    rows, x = drawn(12, OUT, seed=5).bfloat16().cuda(), drawn(12, H, seed=6).bfloat16().cuda()
    product, total = WgradGemm(rows, x.t, reference.matmul), torch.full((OUT, H), torch.nan, device="cuda")
    product.add_to(total, overwrite=True)
    product.add_to(total, overwrite=False)
    torch.testing.assert_close(total.double(), 2 * rows.double().t() @ x.double(), rtol=1e-5, atol=1e-5)


def test_autograd_never_sees_a_weight_whose_product_is_taken():
    taken, weight = [], WEIGHT.clone().requires_grad_()
    x = INPUT.clone().requires_grad_()
    options = LinearOptions(accumulate=lambda asked: taken.append if asked is weight else None)
    linear(x, weight, None, options).backward(UPSTREAM)
    assert weight.grad is None and len(taken) == 1
    torch.testing.assert_close(taken[0](), whole()[2])
    linear(x, weight.clone(), None, options).backward(UPSTREAM)  # a copy is none of those whose gradients are kept
    assert weight.grad is not None and len(taken) == 1


def _train(rank, flags):
    torch.set_num_threads(1)
    pretrain_gpt.main(f"{TINY} {flags}".split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "world, flags",
    [
        (1, ""),
        (2, "--tp 2"),
        (2, "--tp 2 --sequence-parallel"),
        (2, "--sharding-stage 2"),
        (2, "--sharding-stage 3 --overlap-grad-reduce"),
        (1, "--recompute-granularity full"),
    ],
)
def test_gradient_accumulation_fusion_trains_to_the_same_weights(world, flags, run_ranks, tmp_path):
    """Sums of two products may round otherwise than a product that is added: the weights agree to fp32's precision."""
    found = []
    for name, fused in (("apart", ""), ("fused", "--gradient-accumulation-fusion")):
        run_ranks(world, _train, f"{flags} {fused} --save {tmp_path / name}")
        with Reader(tmp_path / name / "iter_0000003") as reader:
            found.append({key: reader.read(key) for key in reader.tensors})
    apart, fused = found
    assert apart.keys() == fused.keys()
    for key in apart:
        torch.testing.assert_close(fused[key], apart[key], rtol=1e-4, atol=1e-6, msg=key)


def test_row_layers_take_part():
    layer, taken = RowParallelLinear(weights.row(H, OUT, 1.0), Mesh().tp), []
    layers.attach_wgrad_accumulator([layer], lambda weight: taken.append)
    layer(drawn(S, B, H, seed=7).requires_grad_()).sum().backward()
    assert layer.weight.grad is None and len(taken) == 1


@pytest.mark.parametrize("accumulate", [None, lambda weight: pytest.fail], ids=["", "and accumulated otherwise"])
def test_a_product_that_is_deferred_comes_in_pass_w_by_autograd(accumulate):
    deferred, weight = WeightGradStore(), WEIGHT.clone().requires_grad_()
    options = LinearOptions(deferred=deferred, accumulate=accumulate)
    y = linear(INPUT.clone().requires_grad_(), weight, None, options)
    with deferred.collect() as products:
        y.backward(UPSTREAM)
    assert weight.grad is None and len(products) == 1
    run_deferred_wgrads(products)
    torch.testing.assert_close(weight.grad, whole()[2])


def test_autograd_does_not_copy_what_pass_w_computes():
    weights, places = [torch.zeros(4, 3, requires_grad=True), torch.zeros(2, 2, requires_grad=True)], []

    def product():
        gradients = [torch.full((12,), 2.0), torch.full((2, 2), 3.0)]
        places.extend(gradient.data_ptr() for gradient in gradients)
        return gradients

    run_deferred_wgrads([(weights, product)])
    assert [weight.grad.data_ptr() for weight in weights] == places
    assert weights[0].grad.tolist() == [[2.0] * 3] * 4 and weights[1].grad.tolist() == [[3.0] * 2] * 2


# ---- layers that each rank has whole -----------------------------------------------------------------------------------


def replicated(tp, sequence_parallel: bool) -> ReplicatedLinear:
    table = weights.replicated(H, OUT, 1.0, sequence_parallel=sequence_parallel)
    layer = ReplicatedLinear(table, tp, sequence_parallel=sequence_parallel)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
        layer.bias.copy_(BIAS)
    return layer


@pytest.mark.parametrize("waits", [False, True], ids=["", "deferred"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
def test_a_replicated_layer_sends_nothing_and_its_gradients_are_parts_of_sums(sequence_parallel, waits, run_ranks):
    def body(rank):
        mesh, events = Mesh(rank, tp=2), Events()
        layer, mine = replicated(mesh.tp, sequence_parallel), lambda x: pieces(x, mesh, sequence_parallel)
        layer.weight_grad_store = WeightGradStore() if waits else None
        events.listen()
        x = mine(INPUT).clone().requires_grad_()
        y = layer(x)
        if waits:
            with layer.weight_grad_store.collect() as products:
                y.backward(mine(UPSTREAM))
            assert layer.weight.grad is None and len(products) == 1
            run_deferred_wgrads(products)
        else:
            y.backward(mine(UPSTREAM))
        assert not any("start" in event for event in events)
        partial = ["tp" in layer.placements[name].partial for name in ("weight", "bias")]
        return y.detach(), x.grad, layer.weight.grad, layer.bias.grad, partial

    y, x, weight, bias = whole()
    found = run_ranks(2, body)
    for rank, (*own, partial) in enumerate(found):
        assert partial == [sequence_parallel] * 2
        piece = lambda tensor, rank=rank: tensor.chunk(2)[rank] if sequence_parallel else tensor
        torch.testing.assert_close(own[:2], [piece(y), piece(x)])
    for number, wanted in ((2, weight), (3, bias)):
        parts = [one[number] for one in found]
        for total in [sum(parts)] if sequence_parallel else parts:
            torch.testing.assert_close(total, wanted)


def test_packed_weights_of_a_replicated_layer():
    layer = replicated(Mesh().tp, False)
    if not pack_weights(torch.nn.ModuleList([layer])):
        pytest.skip("this torch packs no weights")
    with torch.inference_mode():
        torch.testing.assert_close(layer(INPUT), INPUT @ WEIGHT.t() + BIAS)
