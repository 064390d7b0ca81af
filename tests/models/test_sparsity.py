# SPDX-License-Identifier: Apache-2.0
"""Masks during training. Whole trainings are compared with the same network in plain torch, whose masks are those of
torch.nn.utils.prune, or found by looking at each group of inputs.
"""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch.nn.utils import prune

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.linear_kinds import chosen, with_own_weights
from megatron.model.lora_product import LoRAProduct
from megatron.model.quantization import QuantizeOptions, with_quantization
from megatron.model.recipe import facts_of
from megatron.model.sparse_product import SparseProduct, largest_of_all, largest_of_groups
from megatron.model.sparsity import with_sparsity
from megatron.model.weights import add_prefix, column, take_prefix
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.linear_product import LinearProduct, composed
from megatron.mpu.mesh import Mesh
from megatron.optimizer.buffers import BufferStore
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.tools import checkpoint
from megatron.training.rules import check, resolve
from tests.models.test_quantization import LAYOUTS, LINEAR, MICRO_BATCHES, PP2, TP3, Quantized, Round, scales_of
from tests.ranks import on_ranks
from tests.training.plain_loop import EOD, LAYERS, LENGTH, Job, plain_linear, rate_of, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, records

MASKED_AND_ROUNDED = composed(FakeQuantizeProduct, SparseProduct)
LINE = f"{FLAGS} {SIX} {ADAM}"
SHARES = {1: 0.2, 3: 0.2 + 0.5 * (1 - 0.5**3), 5: 0.7}  # at steps, by the cubic formula
WAYS = {
    "a growing share": (
        "--sparsity 0.7 --initial-sparsity 0.2 --sparsity-begin-step 1 --sparsity-end-step 5 --sparsity-frequency 2",
        SHARES,
        lambda name: True,
    ),
    "2:4": (
        "--sparsity 2:4 --sparsity-skip blocks.0.*,attention.output",
        {0: "2:4"},
        lambda name: "blocks.0" not in name and "attention.output" not in name,
    ),
}
ROUNDED = "--quantization --weight-bits 5 --activation-bits 5 --quantization-skip blocks.1.*"
WAYS["a growing share, rounded"] = (f"{WAYS['a growing share'][0]} {ROUNDED}", *WAYS["a growing share"][1:])
SOME = ["one process", "dp2", "zero3, recomputation", "pp2 dp2 zb-h1, zero2, fusion"]
CASES = [("a growing share", layout) for layout in LAYOUTS] + [("2:4", layout) for layout in SOME]
CASES += [("a growing share, rounded", layout) for layout in LAYOUTS]


def mask_of(weight: torch.Tensor, how) -> torch.Tensor:
    """The mask of a weight: a share of zeros, or 2:4."""
    if how == "2:4":
        mask = torch.zeros_like(weight)
        for group, kept in zip(weight.reshape(-1, 4), mask.view(-1, 4), strict=True):
            kept[sorted(range(4), key=lambda n: -abs(group[n]))[:2]] = 1
        return mask
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(weight.clone())
    prune.l1_unstructured(module, "weight", how)
    return module.weight_mask


class Masked:
    """A linear layer in plain torch. steps: the steps that have a new mask, and how it is found; linear: the layer of the
    masked weight.
    """

    def __init__(self, steps: dict, picks, linear=plain_linear):
        self.steps, self.picks, self.linear, self.masks, self.calls = steps, picks, linear, {}, {}

    def __call__(self, weights, name: str, x: torch.Tensor) -> torch.Tensor:
        if not self.picks(name):
            return self.linear(weights, name, x)
        weight = weights[f"{name}.weight"]
        step, self.calls[name] = self.calls.get(name, 0) / MICRO_BATCHES, self.calls.get(name, 0) + 1
        if step in self.steps:
            self.masks[name] = mask_of(weight.detach(), self.steps[step])
        mask = self.masks.get(name, torch.ones_like(weight))
        return self.linear({**weights, f"{name}.weight": weight * mask}, name, x)


@cache
def plain(way: str):
    rounded = Quantized(5, picks=lambda name: "blocks.1" not in name)
    own = Masked(*WAYS[way][1:], *([rounded] if "rounded" in way else []))
    outcome = train(Job(**PLAIN, linear=own))
    outcome.tensors |= scales_of(rounded)
    for name, mask in own.masks.items():
        outcome.tensors[f"{name}.sparsity_mask"] = mask.double()
        outcome.tensors[f"{name}.sparsity_step"] = torch.tensor(6.0)
    return outcome


def pretrain(rank: int, way: str, flags: str) -> None:
    pretrain_gpt.main(f"{LINE} {WAYS[way][0]} {flags}".split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way, layout", CASES)
def test_any_layout_is_the_plain_loop(way, layout, tmp_path):
    """Losses, norms, weights, masks."""
    world, words = LAYOUTS[layout]
    line = f"{words} --save {tmp_path}"
    on_ranks(world, pretrain, way, line)
    compare(tmp_path, plain(way), rel=1e-6)


def tensors(folder) -> dict[str, torch.Tensor]:
    with Reader(folder / "iter_0000006") as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", ["a growing share", "a growing share, rounded"])
@pytest.mark.parametrize("stop", [2, 3])
def test_a_resumed_run_is_the_same_to_the_bit(stop, way, tmp_path):
    """Between two masks, and just before a new one."""
    pretrain(0, way, f"--save {tmp_path / 'whole'}")
    part = f"--save {tmp_path / 'part'}"
    pretrain(0, way, f"{part} --exit-interval {stop}")
    pretrain(0, way, f"{part} --load {tmp_path / 'part'}")
    whole, resumed = (tensors(tmp_path / name) for name in ("whole", "part"))
    assert whole.keys() == resumed.keys()
    assert [name for name, values in whole.items() if not torch.equal(values, resumed[name])] == []
    zeros = {name: 1 - mask.double().mean().item() for name, mask in whole.items() if name.endswith("sparsity_mask")}
    assert len(zeros) == len(LINEAR) * LAYERS and all(abs(share - 0.7) < 1e-3 for share in zeros.values())
    with pytest.raises(SettingsError, match="--sparsity: 0.7 in the checkpoint, 0.6 now"):
        pretrain(0, way, f"--load {tmp_path / 'part'} --sparsity 0.6")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("way", ["a growing share", "a growing share, rounded"])
def test_a_run_goes_on_in_another_layout(way, run_ranks, tmp_path):
    line = f"--save {tmp_path}"
    run_ranks(2, pretrain, way, f"{PP2} --sharding-stage 3 {line} --exit-interval 3")
    run_ranks(3, pretrain, way, f"{TP3} --sequence-parallel {line} --load {tmp_path}")
    compare(tmp_path, plain(way), rel=1e-6)


def test_a_plain_run_goes_on_with_masks_which_are_applied_at_the_end(tmp_path, capsys):
    """--finetune takes the weights; the model computes with masks, and equals the ordinary one with zeros."""
    base, own, zeros = (tmp_path / name for name in ("base", "own", "zeros"))
    pretrain_gpt.main(f"{LINE} --save {base} --train-iters 2".split())
    pretrain(0, "2:4", f"--finetune --load {base} --save {own} --use-checkpoint-args")
    assert "new, and not out of the checkpoint: blocks.1.attention.qkv.sparsity_mask" in capsys.readouterr().out
    with Reader(base / "iter_0000002") as reader:
        start = {name: reader.read(name).double() for name in reader.tensors}
    outcome = train(Job(**PLAIN, linear=Masked(*WAYS["2:4"][1:]), start=start))
    [first, *_] = records(own, "step")
    assert first["lm loss"] == pytest.approx(outcome.steps[0]["lm loss"], rel=1e-6)
    checkpoint.main(["apply-masks", str(own), str(zeros)])
    masked, ordinary = load_model(str(own)), load_model(str(zeros))
    assert ordinary.config.model.linear is None and ordinary.config.model.sparsity is None
    assert {name for name, _ in ordinary.model.named_buffers()} == set()
    tokens = torch.randint(EOD, (LENGTH, 2), generator=torch.Generator().manual_seed(1))
    assert torch.equal(masked.model.logits(tokens), ordinary.model.logits(tokens))
    weight = ordinary.model.blocks["1"].mlp.up.weight
    assert ((weight.unflatten(-1, (-1, 4)) != 0).sum(-1) == 2).all()
    with pytest.raises(SettingsError, match="has no masks of --sparsity"):
        checkpoint.main(["apply-masks", str(base), str(tmp_path / "none")])


@pytest.mark.sampled(10)
def test_a_masked_model_is_trained_for_few_bits(tmp_path, capsys):
    """--finetune of a run with masks, with --quantization, keeps them. With zeros applied the model computes the same."""
    base, own, zeros = (tmp_path / name for name in ("base", "own", "zeros"))
    pretrain(0, "2:4", f"--save {base}")
    before = tensors(base)
    more = f"{LINE} --finetune --load {base} --save {own} --use-checkpoint-args --quantization --lr 1e-3"
    pretrain_gpt.main(more.split())
    said = capsys.readouterr().out
    assert "new, and not out of the checkpoint: blocks.0.attention.output.input_absmax" in said
    after = tensors(own)
    masks = {name for name in after if name.endswith("sparsity_mask")}
    assert len(masks) == 3 and all(torch.equal(after[name], before[name]) for name in masks)
    own_masks = Masked({}, lambda name: f"{name}.sparsity_mask" in masks, Quantized(8))
    own_masks.masks = {name.removesuffix(".sparsity_mask"): before[name].double() for name in masks}
    start = {name: value.double() for name, value in before.items() if "sparsity" not in name}
    outcome = train(Job(**{**PLAIN, "rate": rate_of("constant", 1e-3, end=1)}, linear=own_masks, start=start))
    for n, (found, wanted) in enumerate(zip(records(own, "step"), outcome.steps, strict=True)):
        assert found["lm loss"] == pytest.approx(wanted["lm loss"], rel=1e-4 if n else 1e-5)
    checkpoint.main(["apply-masks", str(own), str(zeros)])
    masked, ordinary = load_model(str(own)), load_model(str(zeros))
    assert ordinary.config.model.linear == "*=fake_quantize" and ordinary.config.model.sparsity is None
    tokens = torch.randint(EOD, (LENGTH, 2), generator=torch.Generator().manual_seed(1))
    wanted = masked.model.logits(tokens)
    assert torch.equal(ordinary.model.logits(tokens), wanted)
    for folder in (own, zeros):
        integers = load_model(str(folder), quantize=QuantizeOptions("int8")).model.logits(tokens)
        torch.testing.assert_close(integers, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.sampled(10)
def test_a_masked_model_is_quantized_with_its_zeros(tmp_path):
    pretrain(0, "2:4", f"--save {tmp_path} --train-iters 2")
    model = load_model(str(tmp_path), quantize=QuantizeOptions("int8")).model
    values = model.blocks["1"].mlp.up.product.codes().values
    assert ((values.unflatten(-1, (-1, 4)) != 0).sum(-1) <= 2).all()


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--sparsity 1", "--sparsity 1 has to be a pattern such as 2:4, or a share of zeros below 1"),
        ("--sparsity half", "--sparsity half has to be a pattern"),
        ("--sparsity 0.3 --initial-sparsity 0.4", "at least --initial-sparsity 0.4"),
        ("--sparsity 4:4", "--sparsity 4:4 has to keep some weights of each group, and not all"),
        ("--sparsity 2:5", "--sparsity 2:5: blocks.0.attention.qkv has 24 inputs on a rank, which groups of 5"),
        (
            "--sparsity 4:16 --sparsity-layers mlp.down",
            "--sparsity 4:16: blocks.0.mlp.down has 24 inputs on a rank, which",
        ),
        ("--sparsity 0.3 --sparsity-frequency 0", "--sparsity-frequency 0 must be at least 1"),
        ("--sparsity 0.3 --sparsity-begin-step 3 --sparsity-end-step 2", "2 is before --sparsity-begin-step 3"),
        ("--sparsity 2:4 --lora-rank 2", "--sparsity 2:4 has no layer left: the last kind of --linear"),
        ("--quantization --lora-rank 2", "--quantization has no layer left: the last kind of --linear"),
        (
            "--sparsity 2:4 --lora-rank 2 --linear mlp.*=lora,mlp.up=+sparse",
            "blocks.0.mlp.up cannot be lora and sparse at once; fake_quantize and sparse can",
        ),
        ("--sparsity 2:4 --linear mlp.*=+gate", "'gate' is no kind of linear layer"),
        ("--sparsity 0.3 --sparsity-skip gate", "--sparsity-skip gate: 'gate' is no linear layer of this model"),
        ("--sparsity 0.3 --sparsity-layers gate", "--sparsity-layers gate: 'gate' is no linear layer of this"),
        ("--linear mlp.*=sparse", "--linear PATTERN=sparse needs --sparsity"),
    ],
)
def test_what_cannot_be_is_said(flags, said):
    [problem] = check(parse_any(f"{LINE} --tensor-model-parallel-size 3 --ffn-hidden-size 72 {flags}".split()), 3)
    assert said in problem


@pytest.mark.parametrize("tp", [1, 3])
def test_shapes_are_checked_and_memory_is_counted(tp):
    """A preflight, in which nothing has memory; masks are in the planner's bytes."""
    config = resolve(parse_any(f"{LINE} --sparsity 0.5 --tensor-model-parallel-size {tp}".split()), tp)
    facts = facts_of(config, 101)
    checks = check_ranks(Design(config, tp, facts, pretrain_gpt.recipe().build_model))
    assert [check.fault for check in checks if check.name == "shapes"] == [""]
    assert facts.parameters == 17208  # buffers are none


def product_of(flags: str, kind=SparseProduct) -> tuple[ColumnParallelLinear, BufferStore]:
    settings = parse_any(f"{LINE} {flags}".split()).model
    own = with_own_weights(settings, add_prefix("up", column(8, (6,), 1.0)), chosen(settings.linear, 0, ["up"]))
    layer = ColumnParallelLinear(take_prefix(own, "up"), Mesh().tp)
    with torch.no_grad():
        for buffer in layer.buffers():
            buffer.zero_()
        layer.weight.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(5)))
        layer.bias.zero_()
        layer.sparsity_mask.fill_(True)
    layer.product = kind(layer, "blocks.0.mlp.up", settings)
    store = BufferStore([layer], Mesh(), torch.device("cpu"))
    store.commit()
    return layer, store


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "more, kind", [("", SparseProduct), ("--quantization --activation-quantize-type none", MASKED_AND_ROUNDED)]
)
def test_a_skipped_step_keeps_the_mask_and_does_not_count(more, kind, late):
    """The host decides before the update, or the device in it: then the host learns it later."""
    steps = f"--sparsity-begin-step 1 --sparsity-end-step 3 --sparsity-frequency 2 {more}"
    layer, store = product_of(f"--sparsity 0.5 --initial-sparsity 0.25 {steps}", kind)
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(6))
    zeros = lambda: (~layer.sparsity_mask).sum().item()

    def step(skip: bool = False) -> torch.Tensor:
        y = layer(x)
        if skip and not late:
            store.rollback()
        else:
            store.combine()
            store.commit(torch.tensor(skip) if late else None)
            if not skip:
                layer.weight.data.mul_(-1.0)
            layer.product.weights_changed()
        return y.detach().abs()

    first = step()
    assert (zeros(), layer.sparsity_step.item()) == (0, 1)
    skipped = step(skip=True)
    assert (zeros(), layer.sparsity_step.item()) == (0, 1) and not torch.allclose(first, skipped)
    torch.testing.assert_close(step(), skipped)
    assert (zeros(), layer.sparsity_step.item()) == (12, 2)
    for _ in range(3):
        step()
    layer.eval()
    layer(x)
    assert (zeros(), layer.sparsity_step.item()) == (24, 5)


def test_kinds_that_a_checkpoint_names_already_are_not_implied_twice():
    flags = f"{FLAGS} {SIX} --quantization --quantization-layers *.mlp.* --sparsity 2:4 --sparsity-skip blocks.0.*"
    once = parse_any(flags.split())
    assert once.model.linear == "*.mlp.*=fake_quantize,*=+sparse,blocks.0.*=-sparse"
    assert with_quantization(with_sparsity(once)).model.linear == once.model.linear
    before = parse_any(f"{FLAGS} {SIX} --sparsity 2:4 --sparsity-skip blocks.0.*".split())
    assert before.model.linear == "*=sparse,blocks.0.*=plain"
    later = replace(once, model=replace(once.model, linear=before.model.linear))
    assert with_quantization(with_sparsity(later)).model.linear == once.model.linear


def test_scales_are_those_of_the_weights_that_a_new_mask_keeps():
    """An evaluation before has found those of the mask before."""
    steps = "--sparsity-begin-step 1 --sparsity-end-step 3 --sparsity-frequency 2 --quantization --weight-bits 4"
    layer, _ = product_of(f"--sparsity 0.5 --initial-sparsity 0.25 {steps}", MASKED_AND_ROUNDED)
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        layer.sparsity_mask.copy_(layer.weight.abs() < 0.5)  # all large ones are gone, and come back
        layer.sparsity_step.fill_(1)
        layer.eval()
        layer(x)
        layer.train()
        found = layer(x)
        weight = layer.weight * mask_of(layer.weight, 0.25)
        wanted = Round.apply(weight, weight.abs().amax(-1, keepdim=True), 7)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, wanted))


class Doubled(LinearProduct):
    """The weight times 2."""

    together = True

    def transform(self, weight, *own):
        return 2 * super().transform(weight, *own)


def test_a_kind_of_ones_own_goes_with_others():
    """Its product is of the masked weight times 2, and so is the weight's gradient; a kind with weights goes with none."""
    kind = composed(SparseProduct, Doubled)
    layer, _ = product_of("--sparsity 2:4", kind)
    x = torch.randn(3, 1, 8, generator=torch.Generator().manual_seed(6))
    y = layer(x)
    weight = layer.weight.detach().requires_grad_()
    kept = weight.detach().abs().view(6, 2, 4)
    mask = (kept >= kept.topk(2).values[..., -1:]).view(6, 8)
    plain = torch.nn.functional.linear(x, 2 * weight * mask)
    torch.testing.assert_close(y, plain)
    y.sum().backward(), plain.sum().backward()
    torch.testing.assert_close(layer.weight.grad, weight.grad)
    with pytest.raises(SettingsError, match="LoRAProduct has weights of its own"):
        composed(SparseProduct, LoRAProduct)


def test_which_weights_stay():
    weight = torch.tensor([[1.0, -4.0, 2.0, 3.0, 0.0, -0.0, 5.0, 5.0]])
    assert largest_of_groups(weight, 2, 4).tolist() == [[False, True, False, True, False, False, True, True]]
    equal = torch.tensor([[1.0, -1.0, 1.0, 1.0]])
    assert largest_of_groups(equal, 2, 4).tolist() == [[True, True, False, False]]
    for kept, found in ((8, 8), (5, 5), (3, 3), (2, 2), (1, 2)):  # those that are equal to the threshold stay
        assert largest_of_all(weight, kept, Mesh().tp).sum() == found
    many = torch.randn(1000, 7, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16):
        own = many.to(dtype)
        threshold = own.abs().flatten().kthvalue(7000 - 2100 + 1).values
        assert torch.equal(largest_of_all(own, 2100, Mesh().tp), own.abs() >= threshold)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --amp-level O1"])
def test_half_precision_is_near_to_it(flags, tmp_path):
    pretrain(0, "2:4", f"{flags} --save {tmp_path}")
    for found, wanted in zip(records(tmp_path, "step"), plain("2:4").steps, strict=True):
        assert found["lm loss"] == pytest.approx(wanted["lm loss"], rel=2e-2)
