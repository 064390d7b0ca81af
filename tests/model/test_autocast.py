# SPDX-License-Identifier: Apache-2.0
"""--amp-level O1: which op computes in which format, lists that change it, and models that train in it."""

import pytest
import torch
import torch.nn.functional as F

from megatron.errors import SettingsError
from megatron.fused_kernels.autocast import Autocast, autocast_of, op
from megatron.mpu.layers import linear
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Precision, Recompute

FULL, HALF = torch.float32, torch.bfloat16
MODERN = dict(
    position_embedding_type="rope", num_query_groups=2, swiglu=True, normalization="RMSNorm", qk_layernorm=True
)


@op
def ours(x, also):
    """An op of ours that nobody lists."""
    return x


CALLS = {
    "linear": lambda x, w: linear(x, w),
    "torch's linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w,
    "bmm": lambda x, w: torch.bmm(x[None], w[None]),
    "softmax": lambda x, w: x.softmax(-1),
    "layer_norm": lambda x, w: F.layer_norm(x, (8,)),
    "sum": lambda x, w: x.sum(),
    "div": lambda x, w: x / w,
    "rdiv": lambda x, w: 2.0 / x,
    "mul": lambda x, w: x * w,
    "gelu": lambda x, w: F.gelu(x),
    "embedding": lambda x, w: F.embedding(torch.tensor([1]), w),
    "cat": lambda x, w: torch.cat((x, w)),
    "view": lambda x, w: x.view(-1),
    "ours": lambda x, w: ours(x, w),
}


def formats(region, x=FULL, w=FULL) -> dict[str, torch.dtype]:
    x, w = torch.ones(8, 8, dtype=x), torch.nn.Parameter(torch.ones(8, 8, dtype=w))
    with region:
        return {name: call(x, w).dtype for name, call in CALLS.items()}


def test_formats_of_ops():
    """Products in half precision, sums in fp32, the rest as it comes; mixtures in fp32."""
    products = {"linear", "torch's linear", "matmul", "bmm"}
    assert formats(Autocast(HALF)) == {name: HALF if name in products else FULL for name in CALLS}
    from_half = formats(Autocast(HALF), x=HALF)
    assert {name for name, dtype in from_half.items() if dtype == FULL} == {
        "softmax",
        "layer_norm",
        "sum",
        "div",
        "mul",
        "embedding",
        "cat",
    }


@pytest.mark.parametrize(
    "black, white, changed",
    [
        (["linear"], [], {"linear": FULL, "torch's linear": FULL}),
        (
            ["reduce_sum,c_softmax_with_cross_entropy,elementwise_div"],
            ["lookup_table", "lookup_table_v2"],
            {"embedding": HALF},
        ),
        (["matmul_v2"], [], {"linear": FULL, "torch's linear": FULL, "matmul": FULL}),
        ([], ["layer_norm", "softmax"], {"layer_norm": HALF, "softmax": HALF}),
        ([], ["elementwise_div", "cat"], {"div": HALF, "rdiv": HALF, "cat": HALF}),
    ],
)
def test_lists(black, white, changed):
    assert formats(Autocast(HALF, black, white)) == {**formats(Autocast(HALF)), **changed}


def test_black_list_on_half_inputs():
    found = formats(Autocast(HALF, ["div", "gelu"]), x=HALF, w=HALF)
    assert found["div"] == found["rdiv"] == found["gelu"] == FULL and found["mul"] == HALF


def test_wrong_lists():
    with pytest.raises(SettingsError, match="no op 'linaer'; did you mean linear"):
        Autocast(HALF, ["linaer"])
    with pytest.raises(SettingsError, match="embedding: in --amp-custom-black-list and in"):
        Autocast(HALF, ["embedding"], ["lookup_table"])


def test_settings():
    assert autocast_of(Precision("bf16")) is None and autocast_of(Precision("fp32", "O1")) is None
    region = autocast_of(Precision("fp16", "O1", ["sum"], ["embedding"]))
    assert region.formats["linear"] == region.formats["embedding"] == torch.float16


def run(model, micro):
    loss, count = model(None, micro)[1].values()
    (loss / count).backward()
    return (loss / count).detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("shape", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize(
    "lists", [{}, dict(black=["cross_entropy", "gelu", "mul"], white=["embedding", "add"])], ids=str
)
def test_model(tiny, batch, shape, lists):
    """Weights and gradients in fp32, results near those of fp32 and different from them; recomputed, the same bits."""
    shape = dict(shape, scale=3.0, hidden_dropout=0.1, attention_dropout=0.1)
    exact, wanted = run(tiny(**shape), batch())
    want, gradients = run(tiny(autocast=Autocast(HALF, **lists), **shape), batch())
    assert want.dtype == FULL and 0 < abs(want - exact) < 0.02 * exact
    assert {gradient.dtype for gradient in gradients} == {FULL}
    total, error = torch.stack(
        [torch.stack((w.norm(), (g - w).norm())) for g, w in zip(gradients, wanted, strict=True)]
    ).norm(dim=0)
    assert error < 0.05 * total
    settings = [*map(Recompute, ("core_attn", "full_attn", "full"))]
    settings += [Recompute("core_attn", recompute_modules=names) for names in (["layernorm", "mlp_act"], ["mlp"])]
    for one in settings:
        again, found = run(tiny(autocast=Autocast(HALF, **lists), recompute=one, **shape), batch())
        assert torch.equal(again, want) and all(map(torch.equal, found, gradients))


def test_stages_speak_fp32(tiny, batch):
    region = Autocast(HALF, white=["embedding", "add"])
    stages = [tiny(layers=range(n, n + 1), first=n == 0, last=n == 1, autocast=region) for n in (0, 1)]
    x = stages[0](None, batch())
    assert x.dtype == FULL
    loss = stages[1](x, batch())[0]
    torch.testing.assert_close(loss, tiny(autocast=region)(None, batch())[0], rtol=1e-2, atol=0)
    assert tiny(autocast=region).eval().logits(batch().tokens).dtype == FULL
    assert tiny(autocast=region).token_losses(None, batch()).dtype == FULL


def test_two_ranks(tiny, batch, run_ranks):
    whole, gradients = run(tiny(autocast=Autocast(HALF), hidden_dropout=0.1), batch())

    def body(rank):
        model = tiny(Mesh(rank, tp=2), sequence_parallel=True, autocast=Autocast(HALF), hidden_dropout=0.1)
        return run(model, batch())[0].item()

    for loss in run_ranks(2, body):
        assert loss == pytest.approx(whole.item(), rel=1e-3)
