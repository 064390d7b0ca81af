# SPDX-License-Identifier: Apache-2.0
"""Linear layers in rare states: a checkpoint that is loaded after a first pass, and a step in which no token comes. Asked
of every kind of layer, with a fresh layer of the same weights as the reference.
"""

import copy

import pytest
import torch

from megatron.model.command_line import parse_any
from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.linear_kinds import chosen, with_own_weights
from megatron.model.linear_products import products_of
from megatron.model.lora_product import DoRAProduct, LoRAProduct
from megatron.model.sparse_product import SparseProduct
from megatron.model.weights import add_prefix, column, take_prefix
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.linear_product import composed
from megatron.mpu.mesh import Mesh
from tests.training.test_plain_loop import FLAGS, SIX

ROUNDED = "--quantization --weight-bits 4 --activation-bits 4"
MASKED = "--sparsity 0.5 --initial-sparsity 0.25 --sparsity-begin-step 1 --sparsity-end-step 4 --sparsity-frequency 2"
KINDS = {
    "fake_quantize": (ROUNDED, FakeQuantizeProduct),
    "fake_quantize of a tensor": (f"{ROUNDED} --weight-quantize-type abs_max", FakeQuantizeProduct),
    "fake_quantize of tokens": (f"{ROUNDED} --activation-quantize-type token_wise_min_max", FakeQuantizeProduct),
    "fake_quantize with PACT": (f"{ROUNDED} --activation-preprocess-type PACT", FakeQuantizeProduct),
    "sparse": (MASKED, SparseProduct),
    "2:4": ("--sparsity 2:4", SparseProduct),
    "both": (f"{ROUNDED} {MASKED}", composed(FakeQuantizeProduct, SparseProduct)),
    "lora": ("--lora-rank 2", LoRAProduct),
    "dora": ("--lora-rank 2 --use-dora", DoRAProduct),
}
X = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(6))


def layer_of(kind: str, seed: int) -> ColumnParallelLinear:
    """A layer with random weights, and the buffers of a layer that has not trained."""
    flags, product = KINDS[kind]
    settings = parse_any(f"{FLAGS} {SIX} {flags}".split()).model
    own = with_own_weights(settings, add_prefix("up", column(8, (6,), 1.0)), chosen(settings.linear, 0, ["up"]))
    layer, draw = ColumnParallelLinear(take_prefix(own, "up"), Mesh().tp), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        for name, buffer in layer.named_buffers():
            buffer.fill_(name == "sparsity_mask")
    layer.product = product(layer, "blocks.0.mlp.up", settings)
    return layer


def trained(layer: ColumnParallelLinear, steps: int, x: torch.Tensor = X) -> ColumnParallelLinear:
    """The layer after so many steps, each of which changes its weights."""
    for _ in range(steps):
        layer(x)
        getattr(layer, "update_buffers", lambda: None)()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(-1.1)
        layer.product.weights_changed()
    return layer


def test_every_kind_of_the_suite_is_asked():
    found = set()
    for flags in ("", "--use-dora"):
        found |= set(products_of(parse_any(f"{FLAGS} {SIX} --lora-rank 2 {flags}".split()).model).values())
    assert found == {product for name, (_, product) in KINDS.items() if name != "both"}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_load_after_passes_is_a_fresh_layer(kind, steps, training):
    """Whatever the layer has computed and kept before: in steps, and in an evaluation after the last of them."""
    wanted = trained(layer_of(kind, 2), 2)
    layer = trained(layer_of(kind, 1), steps)
    layer.eval()(X)
    layer.train(training), wanted.train(training)
    with torch.no_grad():
        layer.load_state_dict(copy.deepcopy(wanted.state_dict()))
    layer.product.weights_changed(loaded=True)
    fresh = layer_of(kind, 2)
    fresh.load_state_dict(copy.deepcopy(wanted.state_dict()))
    fresh.train(training)
    for _ in range(3):  # and the steps that follow
        torch.testing.assert_close(layer(X), fresh(X), rtol=0, atol=0)
        for one in (layer, fresh):
            trained(one, 1)
    for name, buffer in fresh.named_buffers():
        assert torch.equal(buffer, dict(layer.named_buffers())[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_token_changes_no_scale(kind):
    """As of an expert's layer: its buffers are those of a layer that had no step, but for the number of its steps."""
    layer = trained(layer_of(kind, 1), 2)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    getattr(layer, "update_buffers", lambda: None)()
    layer.product.weights_changed()
    for name, buffer in layer.named_buffers():
        wanted = before[name] + 1 if name == "sparsity_step" else before[name]
        assert torch.equal(buffer, wanted), name
