# SPDX-License-Identifier: Apache-2.0
"""Training with fp8 products (`--fp8-format`): whole runs against the same network in plain torch, with casts written from
the definition; layouts against one process; which layers, and what is refused.
"""

from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.fused_kernels.fp8 import ScaleTile, dequantize
from megatron.inference.load import load_model
from megatron.model import weights
from megatron.model.command_line import parse_any
from megatron.model.fp8 import Fp8Layers, fp8_layers, tables_of
from megatron.model.fp8_product import PRODUCTS, ExpertsProduct, attach_fp8
from megatron.model.kinds.experts.grouped import GroupedLinear, Rows
from megatron.model.recipe import recipe_of
from megatron.mpu import forked
from megatron.mpu.deferred_wgrad import WeightGradStore
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, linear_products
from megatron.mpu.mesh import Mesh
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.settings.schema import Precision
from megatron.training import rules
from megatron.training.build import build_run
from megatron.training.step import train_step
from tests.models.in_layouts import trained
from tests.training import plain_loop
from tests.training.plain_loop import LENGTH, Job, plain_linear, rate_of, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, records

LINE = f"{FLAGS} {SIX} {ADAM.replace('1e-2', '1e-4')} --hidden-size 128 --num-attention-heads 2"
TOKENS = 8 * LENGTH  # of a step: what is minimised is divided by them before its gradient goes through the layers
MICRO = 2  # samples of a micro-batch, which is cast by itself


# ---- the layers in plain torch ---------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """To fp8 and back, in tiles, by the power of two that brings the largest of a tile into range."""
    result = torch.empty_like(x)
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            tile = x[i : i + rows, j : j + columns]
            scale = 2.0 ** (tile.abs().max().clamp_min(2.0**-100) / torch.finfo(dtype).max).log2().ceil()
            result[i : i + rows, j : j + columns] = (tile / scale).float().to(dtype).to(x.dtype) * scale
    return result


ALL = 1 << 30
TILES = {  # recipe -> of rows and of weights
    "tensorwise": ((ALL, ALL), (ALL, ALL)),
    "blockwise": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
}


class InFp8(torch.autograd.Function):
    """y = x w^T of a micro-batch, and its gradients. Of x the rows are cast, and what they stand for is cast as columns."""

    @staticmethod
    def forward(ctx, x, weight, recipe, of_gradients, wgrad):
        rows, tiles = TILES[recipe]
        e4m3 = torch.float8_e4m3fn
        ctx.x, ctx.rows, ctx.of_gradients, ctx.wgrad = x, rows, of_gradients, wgrad
        ctx.cast, ctx.turned = rounded(x, *rows, e4m3), rounded(weight.T, *tiles, e4m3)
        return ctx.cast @ rounded(weight, *tiles, e4m3).T

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient / TOKENS
        dx = rounded(gradient, *ctx.rows, ctx.of_gradients) @ ctx.turned.T
        if ctx.wgrad:
            columns = rounded(gradient.T, *ctx.rows, ctx.of_gradients)
            dw = columns @ rounded(ctx.cast.T, *ctx.rows, torch.float8_e4m3fn).T
        else:
            dw = gradient.T @ ctx.x
        return TOKENS * dx, TOKENS * dw, None, None, None


def in_fp8(recipe: str, form: str, wgrad: bool = True, only=lambda name: True):
    of_gradients = torch.float8_e5m2 if form == "hybrid" else torch.float8_e4m3fn

    def linear(weights, name, x):
        if not only(name):
            return plain_linear(weights, name, x)
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        matrix = weight.reshape(-1, weight.shape[-1])
        parts = [InFp8.apply(one.flatten(0, 1), matrix, recipe, of_gradients, wgrad) for one in x.split(MICRO)]
        return torch.cat(parts).view(*x.shape[:-1], -1) + bias.reshape(-1)

    return linear


CASES = {
    "tensorwise, hybrid": ("--fp8-format hybrid", in_fp8("tensorwise", "hybrid")),
    "tensorwise, e4m3": ("--fp8-format e4m3 --fp8-recipe delayed", in_fp8("tensorwise", "e4m3")),
    "blockwise, e4m3": ("--fp8-format e4m3 --fp8-recipe blockwise", in_fp8("blockwise", "e4m3")),
    "blockwise, hybrid, no wgrad": (
        "--fp8-format hybrid --fp8-recipe blockwise --no-fp8-wgrad",
        in_fp8("blockwise", "hybrid", wgrad=False),
    ),
    "tensorwise, no wgrad": ("--fp8-format e4m3 --no-fp8-wgrad", in_fp8("tensorwise", "e4m3", wgrad=False)),
    "mxfp8": ("--fp8-format e4m3 --fp8-recipe mxfp8", in_fp8("mxfp8", "e4m3")),
    "some layers": (
        "--fp8-format hybrid --fp8-layers mlp.* --fp8-skip blocks.1.mlp.down",
        in_fp8("tensorwise", "hybrid", only=lambda name: ".mlp." in name and name != "blocks.1.mlp.down"),
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_plain_loops(case, monkeypatch, tmp_path):
    """Fp32 here, fp64 in the plain loop: a number in the middle of two of fp8 may be cast to the other one, which changes
    a loss by 3e-4. The products by themselves are compared below.
    """
    monkeypatch.setattr(plain_loop, "HIDDEN", 128)
    monkeypatch.setattr(plain_loop, "HEADS", 2)
    flags, linear = CASES[case]
    pretrain_gpt.main(f"{LINE} {flags} --train-iters 3 --save {tmp_path}".split())
    job = Job(**PLAIN | dict(batches=[8] * 3, rate=rate_of("constant", 1e-4, end=1)), linear=linear)
    found, wanted = records(tmp_path, "step"), train(job).steps
    for name, near in {"lm loss": 6e-4, "grad_norm": 5e-3}.items():
        assert [one[name] for one in found] == pytest.approx([one[name] for one in wanted], rel=near)


# ---- the products of one layer ---------------------------------------------------------------------------------------


def drawn(*shape: int, seed: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return (values * torch.exp(torch.randn(shape, generator=generator))).to(dtype)


def made(recipe: str, dtype=torch.bfloat16, tp=None, row=False, sequence=False, outputs=384, inputs=256, **settings):
    """A layer and its product."""
    settings = Precision(fp8_format="hybrid", fp8_recipe=recipe, **settings)
    table = weights.row(inputs, outputs, 1.0) if row else weights.column(inputs, (outputs,), 1.0)
    kind, axis = RowParallelLinear if row else ColumnParallelLinear, tp or Mesh().tp
    layer = kind(table, axis, sequence_parallel=sequence, dtype=dtype)
    layer.product = PRODUCTS[recipe](layer, "blocks.0.mlp.up", settings)
    with torch.no_grad():
        layer.weight.copy_(drawn(*layer.weight.shape, seed=1))
        layer.bias.copy_(drawn(*layer.bias.shape, seed=2))
    return layer


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype, tokens", [("float32", 150), ("bfloat16", 150), ("bfloat16", 1), ("bfloat16", 0)])
@pytest.mark.parametrize("wgrad", [True, False])
@pytest.mark.parametrize("recipe", TILES)
def test_three_products_of_a_layer(recipe, wgrad, dtype, tokens):
    """To the error of fp32 sums, with gradients into an fp32 buffer as training has it; in bf16 to its last bit. Gradients
    are small beside inputs: their scales are others.
    """
    dtype = getattr(torch, dtype)
    layer = made(recipe, dtype, fp8_wgrad=wgrad)
    x, dy = drawn(tokens, 256, seed=3, dtype=dtype).requires_grad_(), 2.0**-24 * drawn(tokens, 384, seed=4, dtype=dtype)
    total = torch.zeros(384, 256)
    layer.accumulate = lambda weight: lambda product: product.add_to(total, overwrite=True)
    y = layer(x)
    y.backward(dy)
    exact = x.detach().double().requires_grad_(), layer.weight.detach().double().requires_grad_()
    wanted = InFp8.apply(*exact, recipe, torch.float8_e5m2, wgrad)
    wanted.backward(dy.double() * TOKENS)
    wanted = wanted.detach() + layer.bias.detach().double()
    sums, last_bit = 3e-7 * 256**0.5, 2**-8 if dtype == torch.bfloat16 else 0.0
    dx, dw = (one.grad / TOKENS for one in exact)
    for found, one, rounded_by in ((y, wanted, last_bit), (x.grad, dx, last_bit), (total, dw, 0.0)):
        size = one.abs().max().item() if one.numel() else 0.0
        torch.testing.assert_close(found.double(), one, rtol=rounded_by, atol=sums * size)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_columns_are_cast_from_the_numbers_themselves(recipe):
    """Not from the rows: of numbers that far apart these have lost some. And sums of 128 are added up."""
    layer = made(recipe, torch.float32, inputs=512)
    wide = lambda *shape, seed: drawn(*shape, seed=seed, dtype=torch.float32) ** 9
    dy, weight = wide(150, 384, seed=4), wide(384, 512, seed=5)
    rows, tiles = TILES[recipe]
    tile = ScaleTile(*rows)
    for operand, cast in ((layer.product.prepare_gradient(dy), dy), (layer.product.prepare_weight(weight), weight)):
        kind = torch.float8_e5m2 if cast is dy else torch.float8_e4m3fn
        if cast is dy or recipe == "mxfp8":
            assert torch.equal(dequantize(operand[:2], tile).double(), rounded(cast.double(), *rows, kind))
            columns = dequantize(operand[2:], tile).double()[:, : len(cast)]
            assert torch.equal(columns, rounded(cast.T.double(), *rows, kind))
    x, weight = drawn(150, 512, seed=3, dtype=torch.float32), layer.weight.detach()
    with torch.no_grad():
        layer.bias.zero_()
        kind, step = torch.float8_e4m3fn, 128 if recipe == "blockwise" else 512
        cast_x, cast_w = rounded(x.double(), *rows, kind).float(), rounded(weight.double(), *tiles, kind).float()
        sums = [a @ b.T for a, b in zip(cast_x.split(step, 1), cast_w.split(step, 1), strict=True)]
        assert torch.equal(layer(x), sum(sums[1:], sums[0]))


def halved(recipe: str, kind: str, mesh: Mesh):
    """(y, gradients of x and of the weight) of a rank; its numbers are 64 times those of the rank before."""
    row, sequence = kind == "row", kind == "column, sp"
    whole = 64.0 ** (torch.arange(256) // 128)
    x, dy = drawn(256, 256, seed=3, dtype=torch.float32), drawn(256, 512, seed=4, dtype=torch.float32)
    weight = drawn(512, 256, seed=1, dtype=torch.float32)
    x, weight = (
        (x, weight * whole) if row else (x * whole[:, None], weight * 64.0 ** (torch.arange(512) // 256)[:, None])
    )
    layer = made(recipe, torch.float32, mesh.tp, row, sequence, outputs=512)
    cut = lambda one, dim: one.chunk(mesh.tp.size, dim)[mesh.tp.rank].contiguous()
    with torch.no_grad():
        layer.weight.copy_(cut(weight, int(row)).view(layer.weight.shape))
        bias = 50 * drawn(512, seed=2, dtype=torch.float32)
        layer.bias.copy_((bias if row else cut(bias, 0)).view(layer.bias.shape))
    x = (cut(x, 1) if row else cut(x, 0) if sequence else x).requires_grad_()
    y = layer(x)
    y.backward(dy if row else cut(dy, 1))
    return y.detach(), x.grad, layer.weight.grad.flatten(0, -2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["column", "column, sp", "row"])
@pytest.mark.parametrize("recipe", TILES)
def test_two_ranks_multiply_as_one_process(recipe, kind, run_ranks):
    """Halves of very different size: a scale of a half alone would be another one."""
    whole = halved(recipe, kind, Mesh())
    ranks = run_ranks(2, lambda rank: halved(recipe, kind, Mesh(rank, tp=2)))
    y, dx, dw = zip(*ranks, strict=True)
    joined = {
        "column": (torch.cat(y, 1), dx[0], torch.cat(dw)),
        "column, sp": (torch.cat(y, 1), torch.cat(dx), torch.cat(dw)),
        "row": (y[0], torch.cat(dx, 1), torch.cat(dw, 1)),
    }[kind]
    # Inputs of a row layer are parts, which have scales of their own with tensorwise: few small numbers differ.
    near = 8e-5 if (recipe, kind) == ("tensorwise", "row") else 1e-6
    for found, exact in zip(joined, whole, strict=True):
        assert ((found - exact).abs() / exact.abs().amax(-1, keepdim=True)).max() < near


@pytest.mark.parametrize("recipe, scales", [("tensorwise", 256), ("blockwise", 256 * 2), ("mxfp8", 256 * 8)])
def test_what_is_saved_of_an_input_is_a_byte_a_number(recipe, scales):
    saved, layer = [], made(recipe)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        layer(drawn(256, 256, seed=3).requires_grad_())
    assert sum(one.nbytes for one in saved if one is not layer.weight) == 256 * 256 + 4 * scales


def test_a_gradients_rows_are_freed_before_the_product_for_the_weight():
    """The W pass of zero-bubble schedules keeps columns alone."""
    for recipe in TILES:
        layer, store = made(recipe), WeightGradStore()
        layer.weight_grad_store = store
        with store.collect() as products:
            layer(drawn(256, 256, seed=3).requires_grad_()).backward(drawn(256, 384, seed=4))
        [(_, wgrad)] = products
        assert sum(one.nbytes for one in wgrad.gradient if one.element_size() == 1) == 256 * 384


def test_weights_are_cast_once_a_step():
    for recipe in TILES:
        layer, x = made(recipe), drawn(8, 256, seed=3)
        before = layer(x)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.equal(layer(x), before)
        layer.product.weights_changed()
        bias = layer.bias.flatten().float()
        torch.testing.assert_close(layer(x).float() - bias, 2 * (before.float() - bias), rtol=1e-2, atol=1.0)


def test_infinite_numbers_reach_the_loss():
    for recipe in TILES:
        for bad in (float("inf"), float("nan")):
            x = drawn(8, 256, seed=3)
            x[3, 7] = bad
            assert made(recipe)(x)[3].isnan().all()


# ---- layouts ---------------------------------------------------------------------------------------------------------

SHAPE = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--ffn-hidden-size 512 --seq-length 64 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --lr 1e-3 "
    "--mock-data --vocab-size 100 --bf16 --fp8-format hybrid"
)
LAYOUTS = "tp2 tp2sp tp2-dp2-zero2 pp2-zbh1 pp2-zbv pp2-tp2sp-zbh1 dp2 dp2-zero1 dp2-zero3 cp2 tp2sp-cp2 pp2vp2".split()
MORE = {
    "recomputation": "--recompute-granularity full --recompute-method uniform",
    "recomputed parts": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act",
    "fusion": "--gradient-accumulation-fusion",
}


def first_casts(rank: int, config, recipe) -> dict:
    """A step in a layout: layer -> (this rank's box of its weight, the first values of fp8, and what they stand for)."""
    found, run = {}, build_run(config, recipe)
    for product in linear_products(run.stages):
        placement, axes = product.layer.placements["weight"], product.layer.axes
        local = placement.local_shape({axis.name: axis.size for axis in axes})
        box = placement.box(local, {axis.name: axis.rank for axis in axes})

        def noted(weight, own=product.prepare_weight, product=product, box=box, local=local):
            operand = own(weight)
            values, scales = operand[:2]
            stacked = product.stacked  # experts, whose rows have scales
            numbers = values.float() * scales if stacked else dequantize((values, scales), product.weights)
            whole = values.view(torch.uint8), numbers
            found.setdefault(product.name, (box, *(one.reshape(local) for one in whole)))
            return operand

        product.prepare_weight = noted
    for stage in run.stages:
        stage.train()
    train_step(run)
    run.close()
    return found


def casts(layout: str, flags: str) -> list[dict]:
    config, layout = parse_any(f"{SHAPE} {flags}".split()), parse_layout(layout)
    config = laid_out(config, layout)
    return forked.run_ranks(layout.world_size, first_casts, config, recipe_of(config), timeout=300)


@cache
def whole_casts(recipe: str) -> dict:
    [found] = casts("", f"--fp8-recipe {recipe}")
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", TILES)
def test_weights_have_the_same_fp8_numbers_in_every_layout(recipe, layout):
    """To the bit: each rank's values, and the numbers that they stand for, are pieces of those of one process."""
    whole, seen = whole_casts(recipe), set()
    for rank in casts(layout, f"--fp8-recipe {recipe}"):
        for name, ((offset, extent), values, numbers) in rank.items():
            place = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
            _, whole_values, whole_numbers = whole[name]
            assert torch.equal(whole_values[place], values) and torch.equal(whole_numbers[place], numbers), name
            seen.add(name)
    assert seen == whole.keys() and len(seen) == 16


EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 128"
EXPERT_LAYOUTS = "ep2 tp2sp tp2-ep2 ep2-zero3 pp2-ep2-zbh1".split()


@cache
def whole_experts() -> dict:
    [found] = casts("", EXPERTS)
    return found


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_have_the_same_fp8_numbers_in_every_layout(layout):
    whole, seen = whole_experts(), set()
    for rank in casts(layout, EXPERTS):
        for name, ((offset, extent), *found) in rank.items():
            place = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
            assert all(torch.equal(a[place], b) for a, b in zip(whole[name][1:], found, strict=True)), name
            seen.add(name)
    assert seen == whole.keys() and sum("experts" in name for name in seen) == 8


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_experts_train_alike(layout):
    one = one_process(EXPERTS)
    config, tested = parse_any(f"{SHAPE} {EXPERTS}".split()), parse_layout(layout)
    other = trace(laid_out(config, tested), recipe_of(config), tested.world_size, 2, replayed=one.choices)
    difference = compare(one, other)
    assert difference.passes("fp8"), difference


COUNTS = [5, 0, 3]


@pytest.mark.parametrize("form", ["hybrid", "e4m3"])
def test_an_expert_is_a_layer_by_itself(form):
    """Rows of 16, in plain torch; one expert has no token, and one layer has none. Gradients are e4m3 in either format."""
    table = weights.column(16, (2, 24), 1.0, cut=1, bias=False, experts=3)
    layer = GroupedLinear(table, (Mesh().ep, Mesh().etp), dtype=torch.float32, device=None)
    layer.product = ExpertsProduct(layer, "blocks.0.mlp.experts.up", Precision(fp8_format=form))
    with torch.no_grad():
        layer.weight.copy_(drawn(*layer.weight.shape, seed=1))
    cast = lambda one: rounded(one.double(), 1, ALL, torch.float8_e4m3fn)
    for counts in (COUNTS, [0, 0, 0]):
        x = drawn(sum(counts), 16, seed=3, dtype=torch.float32).requires_grad_()
        dy = drawn(sum(counts), 48, seed=4, dtype=torch.float32)
        y = layer(x, Rows(torch.tensor(counts), sum(counts)))
        layer.weight.grad = None
        y.backward(dy)
        matrices = [one.flatten(0, 1) for one in layer.weight.detach()]
        parts = list(zip(x.detach().split(counts), dy.split(counts), matrices, strict=True))
        wanted = [cast(rows) @ cast(matrix).T for rows, _, matrix in parts]
        dx = [cast(gradient) @ cast(matrix.T).T for _, gradient, matrix in parts]
        dw = [gradient.double().T @ rows.double() for rows, gradient, _ in parts]
        for found, exact in ((y, torch.cat(wanted)), (x.grad, torch.cat(dx)), (layer.weight.grad, torch.stack(dw))):
            torch.testing.assert_close(found.double().view(exact.shape), exact, rtol=1e-5, atol=1e-4)


@cache
def one_process(flags: str):
    return trained("", f"{SHAPE} {flags}")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", TILES)
def test_layouts_train_alike(recipe, layout):
    flags = f"--fp8-recipe {recipe}"
    difference = compare(one_process(flags), trained(layout, f"{SHAPE} {flags}"))
    assert difference.passes("fp8"), difference


@pytest.mark.sampled(10)
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("recipe", TILES)
def test_what_is_recomputed_and_added_is_the_same(recipe, more):
    """Equal losses and weights: a pass that is made again casts the same numbers to the same."""
    flags = f"--fp8-recipe {recipe}"
    same = compare(one_process(flags), trained("", f"{SHAPE} {flags} {MORE[more]}"))
    exact = 0.0 if more != "fusion" else 1e-2  # gradients are added to fp32 without a rounding to bf16
    assert max(same.loss, same.norm, same.weight) <= exact, same


# ---- which layers, and what is refused -------------------------------------------------------------------------------


def settings(flags: str, world: int = 1):
    return parse_any(f"{SHAPE} {flags}".split()), world


def layers_of(flags: str) -> Fp8Layers:
    config, _ = settings(flags)
    return fp8_layers(config, tables_of(recipe_of(config).facts(config, 1)))


EACH = ["attention.qkv", "attention.output", "mlp.up", "mlp.down"]
OF_EXPERTS = [*EACH[:2], "mlp.experts.up", "mlp.experts.down"]


@pytest.mark.parametrize(
    "flags, blocks, inside",
    [
        ("", range(4), EACH),
        ("--fp8-layers mlp.*", range(4), EACH[2:]),
        ("--fp8-skip attention.*,blocks.[01].mlp.down", range(2, 4), EACH[2:]),
        ("--first-last-layers-bf16", range(1, 3), EACH),
        ("--first-last-layers-bf16 --num-layers-at-start-in-bf16 0 --num-layers-at-end-in-bf16 3", range(1), EACH),
        ("--fp8-recipe blockwise --ffn-hidden-size 448", range(4), [*EACH[:2], "mlp.up"]),
        ("--fp8-recipe blockwise --ffn-hidden-size 96", range(4), EACH[:2]),
        ("--linear mlp.*=fake_quantize", range(4), EACH[:2]),
        ("--num-experts 4", range(4), OF_EXPERTS),
        ("--num-experts 4 --fp8-skip *.experts.*", range(4), EACH[:2]),
        ("--mtp-num-layers 2 --fp8-skip mtp.*.up --first-last-layers-bf16", range(1, 3), EACH),
        ("--num-experts 4 --fp8-recipe mxfp8 --ffn-hidden-size 208", range(4), OF_EXPERTS),
    ],
)
def test_which_layers_have_fp8_products(flags, blocks, inside):
    """By the choice, and attached to the modules: a layer of each choice has its product, all others have none."""
    found = layers_of(flags)
    wanted = {f"blocks.{n}.{name}" for n in blocks for name in inside}
    more = {"blocks.0.mlp.up", "blocks.1.mlp.up"} if "skip attention" in flags else set()
    ahead = [name for name in EACH if name != "mlp.up"] if "mtp" in flags else []
    assert set(found.fp8) == wanted | more | {f"mtp.layers.0.{name}" for name in ahead}
    config = rules.resolve(*settings(flags))
    model = pretrain_gpt.recipe().build_model(config, Mesh(), 101, dtype=torch.bfloat16, device="meta")
    before = {id(product) for product in linear_products([model])}
    attach_fp8([model], config, tables_of(recipe_of(config).facts(config, 1)))
    attached = {one.name for one in linear_products([model]) if id(one) not in before}
    depths = {f"mtp.{depth}.layers.0.{name}" for depth in range(2) for name in ahead}
    assert attached == wanted | more | depths


REFUSED = {
    "--amp-level O1": (1, "autocast casts the operands of each op itself"),
    "--no-fuse-attn-qkv": (1, "--no-fuse-attn-qkv makes three of queries, keys and values"),
    "--bf16 false --fp16": (1, "with --fp16: products of fp8 numbers have the range of bf16"),
    "--first-last-layers-bf16 --num-layers-at-start-in-bf16 3": (
        1,
        "leave none of the 4 layers for --fp8-format hybrid",
    ),
    "--num-layers-at-start-in-bf16 -1": (1, "--num-layers-at-start-in-bf16 -1 must be at least 0"),
    "--fp8-skip mlp.gate": (1, "--fp8-skip: 'mlp.gate' is no linear layer of this model; each block has attention.qkv"),
    "--fp8-layers q_proj": (1, "--fp8-layers: 'q_proj' is no linear layer of this model; here it is attention.qkv"),
    "--fp8-layers mlp.* --fp8-skip mlp.*": (
        1,
        "has no layer left (--fp8-layers: attention.qkv, attention.output; --fp8-",
    ),
    "--hidden-size 64 --ffn-hidden-size 96": (
        1,
        "128 x 64: both have to be multiples of 16, at least 128: attention.qkv",
    ),
    "--fp8-recipe blockwise --tensor-model-parallel-size 4 --num-query-groups 4": (
        4,
        "of a weight: 192 of attention.qkv, 64 of attention.output; --fp8-recipe blockwise casts 128 at a time: give "
        "--tensor-model-parallel-size 1 or 2, or --fp8-recipe tensorwise or mxfp8, or --fp8-skip attention.qkv,attention.o",
    ),
    "--fp8-recipe mxfp8 --ffn-hidden-size 448 --tensor-model-parallel-size 4 --num-query-groups 4": (
        4,
        "112 of mlp.up and mlp.down; --fp8-recipe mxfp8 casts 32 at a time: give --tensor-model-parallel-size 1 or 2, or",
    ),
    "--fp8-param-gather --bf16 false": (1, "with --precision fp32: weights in fp32 are the optimizer's own"),
    "--fp8-param-gather --sharding-stage 1 --nvme-offload-fraction 0.5 --nvme-offload-dir .": (
        2,
        "--fp8-param-gather with --nvme-offload-fraction 0.5: an update reads its file once, and scales have to be known "
        "before weights are cast; use --optimizer-cpu-offload, or --sharding-stage 3",
    ),
    "--lora-rank 4": (1, "has no layer left (--linear lora: attention.qkv, attention.output, mlp.up, mlp.down)"),
}


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_is_refused(flags):
    world, said = REFUSED[flags]
    [problem] = rules.check(*settings(flags, world))
    assert said in problem, problem


def test_other_recipes_and_idle_flags_are_named(capsys):
    config, _ = settings("--fp8-recipe delayed --fp8-margin 1 --keep-fp8-transpose-cache --first-last-layers-bf16")
    assert config.precision.fp8_recipe == "tensorwise"
    told = capsys.readouterr().err
    assert (
        "--fp8-margin has no effect: scales" in told and "--keep-fp8-transpose-cache has no effect: transposes" in told
    )
    remarks = " ".join(rules.remarks(config, 1))
    assert "8 of 16 linear layers multiply in fp8 (tensorwise); 8 without, attention.qkv" in remarks
    assert "--fp8-recipe delayed is tensorwise here" in remarks and "kernels for H100 and later GPUs" in remarks
    config = parse_any(SHAPE.replace("--fp8-format hybrid", "--fp8-recipe blockwise --fp8-skip mlp.*").split())
    assert [name for name in rules.idle(config, 1) if "fp8" in name] == ["fp8_recipe", "fp8_skip"]
    [idle] = rules.idle(settings("--fp8-recipe mxfp8 --fp8-param-gather")[0], 1)
    assert idle == "fp8_param_gather"
    config = rules.resolve(*settings("--fp8-param-gather --num-experts 4"))
    assert (
        "weights of 8 of them are kept and gathered as fp8 numbers (--fp8-param-gather); those of experts in bf16"
        in (" ".join(rules.remarks(config, 1)))
    )
    with pytest.raises(SettingsError, match="--fp8-format e4m3: this model is a plain torch.nn.Module"):
        line = f"{LINE} --fp8-format e4m3 --model-type tests.models.plain_module"
        rules.resolve(parse_any(line.split()), 1)


# ---- checkpoints, and whole trainings --------------------------------------------------------------------------------

FP8 = "--fp8-format hybrid --fp8-recipe blockwise"


def tensors(folder) -> dict[str, torch.Tensor]:
    with Reader(folder) as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.sampled(2)
def test_a_run_goes_on_to_the_bit_and_either_format_takes_the_others_checkpoint(tmp_path, capsys):
    """Checkpoints have no fp8 numbers, and no scales."""
    run = lambda flags: pretrain_gpt.main(f"{LINE} --train-iters 4 {flags}".split())
    run(f"{FP8} --save {tmp_path / 'whole'}")
    run(f"{FP8} --save {tmp_path / 'parts'} --exit-interval 2")
    run(f"--save {tmp_path / 'plain'} --exit-interval 2")
    run(f"{FP8} --save {tmp_path / 'parts'} --load {tmp_path / 'parts'}")
    whole, parts = (tensors(tmp_path / name / "iter_0000004") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys() == tensors(tmp_path / "plain" / "iter_0000002").keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    for folder, flags, names in (("plain", FP8, "fp8-format,fp8-recipe"), ("parts", "", "fp8-format,fp8-recipe")):
        load = f"{flags} --load {tmp_path / folder} --train-iters 6 --save {tmp_path / folder / 'on'}"
        with pytest.raises(SettingsError, match=f"--override {names}"):
            run(load)
        run(f"{load} --override {names}")
    assert load_model(str(tmp_path / "whole")).model is not None
    assert linear_products([load_model(str(tmp_path / "whole")).model]) == []  # texts are written with the weights


@pytest.mark.sampled(10)
@pytest.mark.parametrize("recipe", TILES)
def test_training_is_near_that_of_bf16(recipe, tmp_path):
    """Forty steps. A loss that falls proves little of products: those are compared above."""
    losses = {}
    for name, flags in (("bf16", ""), (recipe, f"--fp8-format hybrid --fp8-recipe {recipe}")):
        line = f"{LINE} --train-iters 40 --lr 2e-3 --bf16 {flags} --save {tmp_path / name}"
        pretrain_gpt.main(line.split())
        losses[name] = [step["lm loss"] for step in records(tmp_path / name, "step")]
    far = [abs(a - b) for a, b in zip(losses["bf16"], losses[recipe], strict=True)]
    assert losses[recipe][-1] < losses[recipe][0] - 1
    assert 0 < sum(far) / len(far) < 0.03, far
