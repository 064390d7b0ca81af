# SPDX-License-Identifier: Apache-2.0
"""Products in fp8: whose numbers share a scale, which sums may be fast, when weights are cast, which stages have them."""

import pytest
import torch

import pretrain_gpt
from megatron.model import fp8_product
from megatron.model.fp8 import tables_of
from megatron.model.fp8_product import attach_fp8
from megatron.mpu.layers import linear_products
from megatron.mpu.mesh import Mesh
from megatron.planner.parity import compare, laid_out, parse_layout
from megatron.training import rules
from megatron.training.build import build_run
from tests.models.in_layouts import one_process, trained
from tests.models.test_fp8 import SHAPE, TILES, drawn, made, settings


def passes(recipe: str, size: int, mesh: Mesh) -> list[torch.Tensor]:
    """(y, dx, dw) of numbers of about 2^size."""
    layer, numbers = made(recipe, tp=mesh.tp), 2.0**size
    x = (drawn(40, 256, seed=3) * numbers).requires_grad_()
    y = layer(x)
    y.backward(drawn(40, 384, seed=4) * numbers)
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("recipe", TILES)
def test_other_micro_batches_share_no_scale(recipe, run_ranks):
    """Of data parallel ranks: each computes what it would by itself, to the bit."""
    ranks = run_ranks(2, lambda rank: passes(recipe, 30 * rank - 15, Mesh(rank, shard=2)))
    for rank, found in enumerate(ranks):
        assert all(map(torch.equal, found, passes(recipe, 30 * rank - 15, Mesh())))


def test_only_the_forward_pass_of_one_scale_adds_up_fast(monkeypatch):
    """H100's fast sums have 14 bits: gradients would lose by them, and blocks are there to avoid them."""
    seen, kernel = [], fp8_product.kernel

    def noted(op, x):
        run = kernel(op, x)
        if op not in ("fp8_tensorwise", "fp8_blockwise", "fp8_blockwise_square", "fp8_mxfp8"):
            return run
        return lambda a, b, dtype, bias=None, fast=False: seen.append((op, fast)) or run(a, b, dtype, bias, fast)

    monkeypatch.setattr(fp8_product, "kernel", noted)
    for recipe in TILES:
        made(recipe)(drawn(8, 256, seed=3).requires_grad_()).backward(drawn(8, 384, seed=4))
    assert len(seen) == 9 and [one for one in seen if one[1]] == [("fp8_tensorwise", True)] and seen[0][1]


@pytest.mark.parametrize("more", ["", "--fp8-param-gather"])
def test_weights_that_are_loaded_are_cast_again(more):
    """Between two passes, without an update: as a run that goes back to a checkpoint does."""
    config = parse_and_lay_out(f"--num-layers 1 {more}")
    run = build_run(config, pretrain_gpt.recipe())
    optimizer, products = run.optimizer, linear_products(run.stages)
    optimizer.weights.need(*optimizer.weights.memory.values())
    before = [product.weight_operand(product.layer.weight)[1].clone() for product in products]
    for piece in optimizer.pieces(moments=False):
        piece.tensor.mul_(4)
    optimizer.copy_main_params_to_model_params()
    optimizer.weights.need(*optimizer.weights.memory.values())
    after = [product.weight_operand(product.layer.weight)[1] for product in products]
    assert len(products) == 4 and all(torch.equal(new, 4 * old) for old, new in zip(before, after, strict=True))
    run.close()


def parse_and_lay_out(flags: str):
    return laid_out(settings(flags)[0], parse_layout(""))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["tp2sp-dp2-zero1", "pp2-zbh1", "dp2-zero3"])
def test_depths_of_multi_token_prediction_train_alike(layout):
    """The layers of depths multiply in fp8, too: their losses are not those of a run that skips them."""
    flags = f"{SHAPE} --num-layers 2 --mtp-num-layers 2 --position-embedding-type rope --fp8-recipe blockwise"
    one, gathers = one_process(flags), "--fp8-param-gather" * ("zero" in layout)
    difference = compare(one, trained(layout, f"{flags} {gathers}"))
    assert difference.passes("fp8"), difference
    apart = compare(one, one_process(f"{flags} --fp8-skip mtp.*"))
    assert 1e-6 < apart.loss < 1e-2, apart


def test_the_first_and_last_layers_are_those_of_the_model():
    """Not those of a stage."""
    config = rules.resolve(*settings("--first-last-layers-bf16"))
    facts = pretrain_gpt.facts(config, 101)
    for layers, inside in ((range(2), {1}), (range(2, 4), {2})):
        ends = dict(first=0 in layers, last=3 in layers)
        stage = pretrain_gpt.build_model(
            config, Mesh(), 101, layers=layers, dtype=torch.bfloat16, device="meta", **ends
        )
        attach_fp8([stage], config, tables_of(facts))
        assert {int(product.name.split(".")[1]) for product in linear_products([stage])} == inside
