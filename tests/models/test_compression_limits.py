# SPDX-License-Identifier: Apache-2.0
"""Quantized, pruned and masked weights in rare states and exactly at a limit, against plain loops."""

import contextlib
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.convert.export.onnx_quantized import _blocks
from megatron.errors import SettingsError, UsageError
from megatron.inference import gptq as gptq_module
from megatron.inference.gptq import gptq
from megatron.inference.prune import most_important
from megatron.inference.quantize import in_format, multiply_int8, product_of, quantized_alone
from megatron.inference.quantized import cut_from
from megatron.model import fake_quantize
from megatron.model.fake_quantize import FakeQuantizeProduct, _RoundInput, levels, token_codes, token_grid
from megatron.model.pruning import PruningOptions, TargetSizes, target_sizes, untouched
from megatron.model.quantization import QuantizeOptions
from megatron.model.sparse_product import largest_of_all, mask_of
from megatron.model.sparsity import is_due, last_step, problems, share
from megatron.model.weights import column, row, take_prefix
from megatron.mpu.distillation_loss import TeacherLoss
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model
from megatron.training.distillation import COMPARISONS
from tests.models.test_rare_states import KINDS, X, layer_of, trained

MODEL = Model(num_layers=2, hidden_size=8, num_attention_heads=4)


def layer(inputs: int = 8, dtype=torch.float32) -> ColumnParallelLinear:
    table = take_prefix({f"up.{name}": one for name, one in column(inputs, (6,), 1.0).items()}, "up")
    made, draw = ColumnParallelLinear(table, Mesh().tp, dtype=dtype), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def quantized(made, **how):
    made.product = product_of(made, "blocks.0.mlp.up", MODEL, QuantizeOptions(**how))
    return made


@pytest.mark.parametrize(
    "how", [dict(quantize="int8"), dict(quantize="int8-dynamic"), dict(quantize="int4", quantize_group_size=4)]
)
@torch.no_grad()
def test_tokens_and_channels_of_zeros_and_of_one_sign(how):
    """Nothing is divided by 0, and 0 stays 0; groups with values above 0 alone, or below, have a zero of their own."""
    made = layer()
    made.weight[0], made.weight[1], made.weight[2] = 0.0, made.weight[1].abs() + 3, -made.weight[2].abs() - 3
    weight, bias = made.weight.clone(), made.bias.clone()
    x = X.clone()
    x[0, 0] = 0.0
    y = quantized(made, **how)(x)
    assert y.isfinite().all()
    torch.testing.assert_close(y[0, 0], bias)
    torch.testing.assert_close(y[..., 0], bias[0].expand(5, 2))
    exact = x @ weight.t() + bias
    levels = 15 if how["quantize"] == "int4" else 254
    error = weight.abs().amax() * 2 / levels / 2 * x.abs().sum(-1, keepdim=True) + 0.1
    assert ((y - exact).abs() <= error).all()


def test_scales_of_fp16_are_in_fp32():
    """Their least value is below the range of fp16."""
    for dtype, wanted in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
    ):
        assert in_format(torch.zeros(1), torch.zeros(1, dtype=dtype)).dtype == wanted
    assert in_format(torch.zeros(1), torch.zeros(1, dtype=torch.float16)).item() > 0


@pytest.mark.parametrize("inputs, size", [(8, 2), (8, 8), (12, 6), (9, 3), (8, 3), (8, 1), (8, 16)])
def test_groups_are_even_and_divide_the_inputs(inputs, size):
    how = dict(quantize="int4", quantize_group_size=size)
    if size % 2 == 0 and inputs % size == 0:
        assert quantized(layer(inputs), **how).product.group_size == size
    else:
        with pytest.raises(SettingsError, match="--quantize-group-size"):
            quantized(layer(inputs), **how)


@torch.no_grad()
def test_the_scale_of_inputs_is_that_of_training_after_any_number_of_steps():
    for steps in (1, 2, 5):
        made = trained(layer_of("fake_quantize", 1), steps).eval()
        wanted = made(X)
        total, count = made.input_average
        product = quantized(made, quantize="int8").product
        torch.testing.assert_close(product.input_scale, total / count / 7)
        torch.testing.assert_close(made(X), wanted, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_scale_of_inputs_is_a_moving_average_of_their_largest_values():
    """Of all passes of a step; a step without tokens changes nothing (PaddleSlim's average)."""
    made, a, n = layer_of("fake_quantize", 1), 0.0, 0.0
    for passes in ([1.0], [4.0, 2.0], [], [0.5, 3.0], [7.0]):
        for largest in passes:
            made(torch.tensor([[[-largest] + [0.1 * largest] * 7]]))
        made.product.update_buffers()
        if passes:
            a, n = 0.9 * a + max(passes), 0.9 * n + 1
        torch.testing.assert_close(made.input_average, torch.tensor([a, n]))


@torch.no_grad()
@pytest.mark.parametrize("symmetric", [False, True])
def test_numbers_of_4_bits_and_their_scales(symmetric):
    """Symmetric: 15 steps around 8, by the largest; else from the least to the largest value, with a 0 among them."""
    made = layer()
    made.weight[0], made.weight[1] = made.weight[0].abs() + 1, -made.weight[1].abs() - 1
    groups = made.weight.view(6, 2, 4)
    product = quantized(made, quantize="int4", quantize_group_size=4, quantize_symmetric=symmetric).product
    codes = product.codes()
    low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
    scale = 2 * groups.abs().amax(-1) / 15 if symmetric else (high - low) / 15
    zero = torch.full_like(scale, 8.0) if symmetric else (-low / scale).round()
    torch.testing.assert_close(codes.scale, scale)
    assert torch.equal(codes.zero.float(), zero)
    wanted = (groups / scale.unsqueeze(-1) + zero.unsqueeze(-1)).round().clamp(0, 15)
    assert torch.equal(codes.values.float(), wanted.view(6, 8))


def row_layer(tp, inputs: int = 8) -> RowParallelLinear:
    """A part of one layer: each rank has some of its inputs."""
    table = take_prefix({f"down.{name}": one for name, one in row(inputs, 6, 1.0).items()}, "down")
    made, draw = RowParallelLinear(table, tp), torch.Generator().manual_seed(2)
    with torch.no_grad():
        made.weight.copy_(torch.randn((6, inputs), generator=draw).chunk(tp.size, 1)[tp.rank])
        made.bias.copy_(torch.randn(6, generator=draw))
    return made


@torch.no_grad()
def divided(rank: int, ranks: int):
    """(outputs of int8 and int8-dynamic, the numbers of GPTQ) of this rank's part of a layer."""
    tp, x = Mesh(rank, tp=ranks).tp, X.clone()
    x[..., 1] *= 9.0  # the largest of each token is the first rank's
    own, found = x.chunk(ranks, -1)[rank], []
    for how in ("int8", "int8-dynamic"):
        found.append(quantized(row_layer(tp), quantize=how)(own))
    made = quantized(row_layer(tp), quantize="int4", quantize_group_size=4)
    with gptq_module._observed({"a": made}) as sums:
        made(own)
        made(2 * own)
    whole = quantized(row_layer(tp), quantize="int8")  # a scale of each output
    codes = [gptq_module._quantized(one, one.product, sums["a"]) for one in (made, whole)]
    stored = quantized(row_layer(Mesh(0).tp), quantize="int4", quantize_group_size=4).product  # of one process
    cut_from(stored, made.product, {"tp": rank})
    return found, sums["a"], codes, made.product.codes()


def test_ranks_with_parts_of_inputs_round_as_one_does(run_ranks):
    """By the largest value of whole channels and tokens; GPTQ sums over all inputs, also of several passes."""
    outputs, hessian, codes, stored = divided(0, 1)
    x = X.clone().view(-1, 8)
    x[:, 1] *= 9.0
    torch.testing.assert_close(hessian, 5 * x.t() @ x)
    both = run_ranks(2, divided, 2)
    for found, sums, *_ in both:
        torch.testing.assert_close(found, outputs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sums, hessian)
    for number, of_one in enumerate((codes[0], codes[1], stored)):
        first, second = ([*one[2], one[3]][number] for one in both)
        for whole, *parts in zip(of_one, first, second, strict=True):
            torch.testing.assert_close(torch.cat(parts, 1) if whole.shape[1] > 1 else parts[0], whole)


@torch.no_grad()
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_whole_numbers_of_tokens_are_those_of_training(bits, monkeypatch):
    """Also with 8 bits, of which both ends are codes: the largest value of each token is one of them."""
    flags = f"--quantization --activation-quantize-type token_wise_min_max --activation-bits {bits}"
    monkeypatch.setitem(KINDS, "tokens", (flags, FakeQuantizeProduct))
    made = layer_of("tokens", 1).eval()
    x = torch.cat([X, X.abs(), -X.abs(), 0 * X])
    wanted = made(x)
    torch.testing.assert_close(quantized(made, quantize="int8")(x), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gradients_of_inputs_around_the_largest_value(bits):
    """Values that round to it have a gradient, as in torch's own rounding, and those that are clipped have none."""
    largest, step = levels(bits), 0.25
    x = torch.cat([torch.tensor([-0.6, -0.4, 0.4, 0.6]) + place for place in (-largest, 0, largest)]) * step
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = _RoundInput.apply(own, torch.tensor(largest * step), torch.tensor(True), largest)
    wanted = torch.fake_quantize_per_tensor_affine(other, step, 0, -largest, largest)
    y.sum().backward(), wanted.sum().backward()
    torch.testing.assert_close(y, wanted)
    assert own.grad.tolist() == other.grad.tolist() and set(own.grad.tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("part, cut, copies", [(True, False, 1), (False, True, 1), (False, False, 3)])
def test_ranks_without_parts_of_tokens_or_channels_have_the_same_input(part, cut, copies, monkeypatch):
    monkeypatch.setattr(fake_quantize, "has_part", lambda layer: part)
    made = layer_of("fake_quantize", 1)
    made.tp, made.row_axis = SimpleNamespace(size=3, name="tp"), "tp" if cut else None
    assert FakeQuantizeProduct(made, "up", made.product.settings).copies == copies


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_ranks_with_the_same_input_share_the_gradient_of_a_bound(copies):
    """Those of all ranks add up to that of one: what is clipped above less what is clipped below."""
    product, x = FakeQuantizeProduct.__new__(FakeQuantizeProduct), torch.tensor([2.0, 3.0, 0.5, -2.0])
    alpha = torch.nn.Parameter(torch.tensor([1.0]))
    product.copies, product.layer = copies, SimpleNamespace(pact_alpha=alpha)
    found = product.clip(x)
    assert found.tolist() == [1.0, 1.0, 0.5, -1.0]
    (found * torch.tensor([1.0, 2.0, 3.0, 8.0])).sum().backward()
    assert alpha.grad.item() * copies == 1.0 + 2.0 - 8.0


@torch.no_grad()
@pytest.mark.parametrize("kind", ["sparse", "both"])
def test_weights_that_a_mask_leaves_out_stay_out(kind):
    made = trained(layer_of(kind, 1), 5).eval()
    wanted, mask = made(X), made.sparsity_mask.clone()
    made = quantized(made, quantize="int8")
    assert not mask.all() and not made.weight[~mask].any()
    torch.testing.assert_close(made(X), wanted, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_layer_that_is_quantized_alone_is_itself_again(error):
    """Also after an error in its evaluation."""
    made = layer()
    wanted, before = made(X), made.product
    with contextlib.suppress(ValueError), quantized_alone(made, "blocks.0.mlp.up", MODEL, QuantizeOptions("int8")):
        assert not torch.equal(made(X), wanted)
        if error:
            raise error
    assert made.product is before and torch.equal(made(X), wanted)
    with quantized_alone(None, "blocks.0.mlp.up", MODEL, QuantizeOptions("int8")):  # on another rank
        pass


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    device = torch.device("cuda")


@pytest.mark.parametrize("rows", [1, 16, 17, 25])
@pytest.mark.parametrize("inputs, outputs", [(8, 8), (5, 8), (8, 6), (13, 3), (16, 9)])
def test_whole_numbers_are_padded_as_cublas_needs_it(rows, inputs, outputs, monkeypatch):
    """More than 16 rows, and multiples of 8 of the other sizes (torch's `_int_mm` on CUDA)."""

    def product(a, b):
        assert len(a) > 16 and not any(size % 8 for size in b.shape) and a.dtype == b.dtype == torch.int8
        return (a.as_subclass(torch.Tensor).long() @ b.as_subclass(torch.Tensor).long()).int()

    monkeypatch.setattr(torch, "_int_mm", product)
    draw = torch.Generator().manual_seed(7)
    x, weight = (torch.randint(-127, 128, (n, inputs), dtype=torch.int8, generator=draw) for n in (rows, outputs))
    found = multiply_int8(x.as_subclass(OnGpu), weight.as_subclass(OnGpu))
    assert found.tolist() == (x.long() @ weight.long().t()).tolist()


@pytest.mark.parametrize("groups", [1, 2, 3, 5])
def test_blocks_of_onnx_are_the_numbers_of_groups(groups):
    """As onnxruntime's MatMulNBits reads them: each byte of zeros has two, and each output begins with a new one."""
    made = quantized(layer(16 * groups), quantize="int4", quantize_group_size=16)
    operand, wanted = made.product.weight_operand(made.weight), made.product.codes().weight()
    numbers, scales, zeros = _blocks(*operand, 16)
    assert numbers.shape == (6, groups, 8) and len(scales) == 6 * groups and len(zeros) == 6 * -(-groups // 2)
    for o, g, n in itertools.product(range(6), range(groups), range(16)):
        value = int(numbers[o, g, n // 2]) >> 4 * (n % 2) & 15
        zero = int(zeros[o * -(-groups // 2) + g // 2]) >> 4 * (g % 2) & 15
        assert (value - zero) * scales[o * groups + g].item() == pytest.approx(wanted[o, 16 * g + n].item())


# ---- GPTQ ---------------------------------------------------------------------------------------------------------------


def grid(rows):
    scale = rows.abs().amax(1, keepdim=True).clamp_min(1e-6) / 7
    return scale, torch.zeros_like(scale)


def plain_gptq(weight, hessian, size):
    """One column after another; the error of each moves all later ones at once."""
    left, columns = weight.double().clone(), weight.shape[1]
    h = hessian.double().clone()
    h.diagonal()[h.diagonal() == 0] = 1.0
    h += gptq_module.DAMPING * h.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    u = torch.linalg.cholesky(torch.linalg.inv(h), upper=True)
    codes, scale = torch.empty_like(left), None
    for n in range(columns):
        if n % (size or columns) == 0:
            kept = weight[:, n : n + (size or columns)] != 0
            scale, _ = grid((left[:, n : n + (size or columns)] * kept).float())
        now = left[:, n : n + 1]
        codes[:, n : n + 1] = (now * (weight[:, n : n + 1] != 0) / scale).round().clamp(-7, 7)
        error = (now - codes[:, n : n + 1] * scale) / u[n, n]
        left[:, n:] -= error * u[n, n:]
    return codes


@pytest.mark.parametrize("size", [None, 2, 12, 24])
@pytest.mark.parametrize("kind", ["all inputs", "an input of zeros", "zeros in the weight", "no token"])
def test_gptq_is_that_of_a_plain_loop(kind, size, monkeypatch):
    """Whatever the number of columns that are corrected together, also if groups do not divide it."""
    monkeypatch.setattr(gptq_module, "COLUMNS", 16)
    draw = torch.Generator().manual_seed(4)
    x, weight = torch.randn(60, 48, generator=draw), torch.randn(3, 48, generator=draw)
    x[:, 1:] += x[:, :-1]  # correlated, as inputs are
    if kind == "an input of zeros":
        x[:, [5, 17]] = 0.0
    if kind == "zeros in the weight":
        weight[:, ::3] = 0.0
    if kind == "no token":  # an expert that none was sent to
        x.zero_()
    found = gptq(weight, x.t() @ x, grid, -7, 7, size)
    wanted = plain_gptq(weight, x.t() @ x, size)
    assert found.values.isfinite().all() and (found.values != wanted).float().mean() < 0.03  # ties round either way
    assert not found.values[weight == 0].any()


# ---- masks and sizes ----------------------------------------------------------------------------------------------------


def test_masks_are_new_at_the_first_step_each_few_steps_and_at_the_last():
    """Also where the last one is no multiple: from step 1 to 4 every 2 steps are 1, 3 and 4."""
    for begin, length, frequency in itertools.product(range(3), range(6), range(1, 5)):
        settings = Model(
            1, 8, 1, sparsity="0.8", initial_sparsity=0.2, sparsity_begin_step=begin,
            sparsity_end_step=begin + length, sparsity_frequency=frequency,
        )  # fmt: skip
        due = {*range(begin, begin + length + 1, frequency), begin + length}
        assert {step for step in range(20) if is_due(settings, step)} == due
        assert last_step(settings) == begin + length and problems(settings, [], 1) == []
        assert share(settings, begin + length) == 0.8
        assert share(settings, begin) == pytest.approx(0.2 if length else 0.8)
        if length:
            middle = 0.8 + (0.2 - 0.8) * (1 - 1 / length) ** 3  # Zhu & Gupta, one step in
            assert share(settings, begin + 1) == pytest.approx(middle)
    ends = Model(1, 8, 1, sparsity="0.8", sparsity_begin_step=3, sparsity_end_step=2)
    assert "--sparsity-end-step 2 is before" in problems(ends, [], 1)[0]


@pytest.mark.parametrize(
    "pattern, good", [("1:2", 1), ("3:4", 1), ("0:4", 0), ("4:4", 0), ("0.999", 1), ("1.0", 0), ("0", 1)]
)
def test_patterns_and_shares_at_their_limits(good, pattern):
    assert (problems(Model(1, 8, 1, sparsity=pattern), [], 1) == []) == bool(good)


@pytest.mark.parametrize("size, good", [(0, 0), (1, 1), (3, 1), (4, 0), (5, 0)])
def test_as_many_heads_stay_as_there_are_or_fewer(size, good):
    """4 of 4 would take nothing."""
    of = lambda: target_sizes(
        MODEL, PruningOptions(), TargetSizes(target_num_attention_heads=size, target_ffn_hidden_size=32)
    )
    if good:
        assert of().heads == size and of().ffn == 32
    else:
        with pytest.raises(Exception, match="would leave|nothing is to go"):
            of()


@pytest.mark.parametrize("longest", [5, 2048, 4096])
def test_windows_of_gptq_have_2048_tokens_at_most(longest, monkeypatch):
    asked, model = [], torch.nn.Linear(1, 1)
    model.logits = model.blocks = None
    windows = lambda words, length, count, vocab: (
        asked.append((words, length, count, vocab)) or torch.zeros(3, 1).numpy()
    )
    monkeypatch.setattr(gptq_module, "calibration_windows", windows)
    for name in ("attach", "free_weights", "_calibrate"):
        monkeypatch.setattr(gptq_module, name, lambda *given: {})
    how = QuantizeOptions("int8", quantize_method="gptq", calibration_data=["a"], calibration_samples=4)
    notice = gptq_module.quantize_model(model, SimpleNamespace(settings=MODEL, vocab_size=9), how, longest)
    length = min(longest, 2048)
    assert asked == [(["a"], length, 4, 9)]
    assert notice == f"calibrated on 3 windows of {length} tokens (--calibration-samples 4: there are no more)"


@pytest.mark.parametrize("begin, end, last", [(0, 0, 0), (3, 0, 3), (0, 7, 7), (3, 7, 7), (3, 3, 3)])
def test_masks_are_computed_until_their_last_step(begin, end, last):
    """Without an end, at the first one alone."""
    model = Model(1, 8, 1, sparsity="0.5", sparsity_begin_step=begin, sparsity_end_step=end, sparsity_frequency=100)
    assert last_step(model) == last and is_due(model, begin) and is_due(model, last) and not is_due(model, last + 1)
    assert share(model, last) == 0.5


@pytest.mark.parametrize("kept", range(9))
def test_the_largest_weights_are_those_of_a_sort(kept):
    """Equal ones stay together; of experts each has its own share."""
    below = torch.nextafter(torch.tensor(2.0), torch.tensor(0.0)).item()  # the next smaller number
    weight = torch.tensor([[0.0, -3.0, 1e-40, 3.0], [2.0, -0.0, 3.4e38, -below]])
    sizes = weight.abs().flatten()
    least = sizes.sort(descending=True).values[kept - 1] if kept else math.inf
    assert torch.equal(largest_of_all(weight, kept, Mesh().tp), weight.abs() >= least)
    both = mask_of(torch.stack([weight, -weight.flip(0)]), 1 - kept / 8, 8, Mesh().tp, stacked=1)
    assert torch.equal(both[0], weight.abs() >= least) and torch.equal(both[1], weight.flip(0).abs() >= least)


@pytest.mark.parametrize(
    "low, high, levels", [(-1.0, 2.0, 15), (-1.0, 2.2, 15), (0.5, 3.0, 7), (-3.0, -1.0, 7), (-1.0, 1.0, 255)]
)
def test_the_grid_of_a_token_reaches_from_its_least_to_its_largest_value(low, high, levels):
    """Or to 0, which has the whole number that is nearest to it."""
    x, made = torch.tensor([[low, (low + high) / 2, high] + [high] * 5]), layer()
    step, zero = token_grid(made, x, levels)
    least, most = min(low, 0.0), max(high, 0.0)
    assert step.item() == pytest.approx((most - least) / levels) and zero.item() == round(-least / step.item())
    wanted = [round(value / step.item()) + zero.item() for value in x[0].tolist()]
    assert token_codes(x, step, zero, levels)[0].tolist() == [min(levels, max(0.0, one)) for one in wanted]


def test_logits_of_a_teacher_are_computed_once_for_each_block():
    """Blocks of 6 tokens, of which chunks of 2 are asked for; the last one is shorter."""
    asked, logits = [], torch.arange(20.0).view(10, 2)
    made = TeacherLoss(lambda rows: asked.append((rows.start, rows.stop)) or logits[rows], Mesh().tp, kind="forward_kl",
                       temperature=1.0, alpha=0.5)  # fmt: skip
    made.begin(10, 6, None)
    for start in range(0, 10, 2):
        assert torch.equal(made.chunk(slice(start, start + 2)), logits[start : start + 2])
    assert asked == [(0, 6), (6, 10)]


def test_hidden_states_are_compared_by_squares_or_by_angles():
    one, other = torch.tensor([[[1.0, 0.0], [2.0, 2.0]]]), torch.tensor([[[0.0, 3.0], [4.0, 4.0]]])
    assert COMPARISONS["mse"](one, other).tolist() == [[(1 + 9) / 2, 4.0]]
    assert COMPARISONS["cosine"](one, other).tolist() == [[1.0, pytest.approx(0.0, abs=1e-6)]]


def test_layers_that_are_named_twice_go_once():
    assert target_sizes(MODEL, PruningOptions(), TargetSizes(prune_layers=[1, 1])).layers == 1
    with pytest.raises(SettingsError, match="there is no layer 2"):
        target_sizes(MODEL, PruningOptions(), TargetSizes(prune_layers=[2]))
    with pytest.raises(SettingsError, match="--prune-layers leaves 1 layers, and --target-num-layers says 2"):
        target_sizes(MODEL, PruningOptions(), TargetSizes(prune_layers=[1], target_num_layers=2))


@pytest.mark.parametrize(
    "own", [{}, *({"target_num_attention_heads": n} for n in (3, 4)), {"target_ffn_hidden_size": 31}]
)
def test_what_a_small_ratio_leaves_whole_is_said_unless_it_has_a_size_of_its_own(own):
    """A tenth of 4 heads is none, and of 32 channels it is three."""
    said = untouched(MODEL, PruningOptions(prune_ratio=0.1), TargetSizes(**own))
    heads = "--prune-ratio 0.1 takes nothing from 4 heads: all of them stay"
    assert said == [heads] * ("target_num_attention_heads" not in own)
    with pytest.raises(SettingsError, match="takes nothing from 4 heads and 32 MLP channels"):
        target_sizes(MODEL, PruningOptions(prune_ratio=0.01), TargetSizes())
    with pytest.raises(UsageError, match="nothing is to go"):
        target_sizes(MODEL, PruningOptions(), TargetSizes())


@pytest.mark.parametrize("ratio, good", [(0.0, 0), (0.5, 1), (0.999, 0), (1.0, 0)])
def test_a_ratio_takes_something_and_leaves_something(ratio, good):
    if good:
        assert target_sizes(MODEL, PruningOptions(prune_ratio=ratio), TargetSizes()).heads == 2
    else:
        with pytest.raises(SettingsError):
            target_sizes(MODEL, PruningOptions(prune_ratio=ratio), TargetSizes())


def test_experts_that_stay_are_at_least_those_of_a_token():
    mixture = Model(2, 8, 4, num_experts=8, moe_router_topk=3)
    assert target_sizes(mixture, PruningOptions(), TargetSizes(target_num_experts=3)).experts == 3
    with pytest.raises(SettingsError, match="leave at least 3"):
        target_sizes(mixture, PruningOptions(), TargetSizes(target_num_experts=2))
    one_each = replace(mixture, moe_router_topk=1)  # a mixture has two
    assert target_sizes(one_each, PruningOptions(), TargetSizes(target_num_experts=2)).experts == 2
    with pytest.raises(SettingsError, match="leave at least 2"):
        target_sizes(one_each, PruningOptions(), TargetSizes(target_num_experts=1))


def test_groups_of_experts_stay_whole():
    grouped = Model(2, 8, 4, num_experts=8, moe_router_topk=2, moe_router_num_groups=2, moe_router_group_topk=1)
    assert target_sizes(grouped, PruningOptions(), TargetSizes(target_num_experts=8, prune_layers=[1])).experts == 8
    with pytest.raises(SettingsError, match="the router has 2 groups of experts"):
        target_sizes(grouped, PruningOptions(), TargetSizes(target_num_experts=7))


def test_of_equally_important_units_the_first_stay():
    values = torch.tensor([1.0] * 40 + [2.0] + [1.0] * 40)
    for count in (1, 2, 30, 81):
        assert most_important(values, count).tolist() == sorted([40, *[n for n in range(81) if n != 40][: count - 1]])
