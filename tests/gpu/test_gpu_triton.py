# SPDX-License-Identifier: Apache-2.0
"""On a GPU: each Triton kernel equals the reference in fp64 in the formats that training uses, at its sizes; a network with
them gives the losses and gradients of one without.
"""

import numpy as np
import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import TABLE, TRITON, Case, choose_kernel, describe_kernels, reference
from megatron.fused_kernels.decode_attention import Places
from megatron.fused_kernels.dropout import DropoutMask
from megatron.fused_kernels.gpu import probe
from megatron.fused_kernels.reference import VocabularyPart
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.mpu.random import init_parameter, random_words
from megatron.settings.schema import Kernels, Model
from tests.fused_kernels.interpret_kernels import philox

pytestmark = pytest.mark.gpu
OPS = [op for op, entries in TABLE.items() if entries[0].name == TRITON]
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # of the norm of a tensor: one rounding


@pytest.fixture(autouse=True)
def there():
    if lacking := TABLE["rms_norm"][0].lacking:
        pytest.skip(lacking)


def drawn(*shape, dtype, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def assert_equal(op: str, inputs: list[torch.Tensor], call, dtype) -> None:
    mine, exact = [x.requires_grad_() for x in inputs], [x.detach().double().requires_grad_() for x in inputs]
    got, want = call(probe.kernel(op), *mine), call(getattr(reference, op), *exact)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    upstream = [drawn(*x.shape, dtype=dtype, seed=70 + n) for n, x in enumerate(want)]
    found = [*got, *torch.autograd.grad(got, mine, upstream)]
    wanted = [*want, *torch.autograd.grad(want, exact, [x.double() for x in upstream])]
    for x, y in zip(found, wanted, strict=True):
        assert x.shape == y.shape and x.dtype == dtype
        error = ((x.double() - y).norm() / y.norm()).item()
        assert error < TOLERANCE[dtype], f"{op}: {error:.1e}"


@pytest.mark.parametrize("op", OPS)
def test_the_probe_passes_and_the_kernel_is_chosen(op):
    assert probe.probe(op) == ""
    assert choose_kernel(op, Case("cuda", torch.bfloat16)).name == TRITON
    assert choose_kernel(op, Case("cuda", torch.bfloat16, unfused=True)).name != TRITON
    assert op in describe_kernels("cuda", torch.bfloat16, "blockwise")[0]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("h", [64, 100, 768, 4096, 8192, 12288, 25600])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_norms(op, h, dtype):
    inputs = [drawn(300, 3, h, dtype=dtype, seed=n) + 0.5 for n in range(1 + op.startswith("add"))]
    inputs += [drawn(h, dtype=dtype, seed=5 + n) * 0.2 + 1.0 for n in range(1 + op.endswith("layer_norm"))]
    assert_equal(op, [x.detach() for x in inputs], lambda run, *x: run(*x, 1e-5), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_activations(dtype):
    for f in (100, 3072, 14336):
        call = lambda run, *x: run(*x)
        assert_equal("bias_gelu", [drawn(257, 2, f, dtype=dtype), drawn(f, dtype=dtype, seed=1)], call, dtype)
        assert_equal("swiglu", [drawn(257, 2, 2 * f, dtype=dtype)], call, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("d, width", [(128, 128), (128, 64), (80, 80), (64, 20)])
def test_rotate(d, width, dtype):
    x = drawn(300, 2, 4, 6, d, dtype=dtype)[:, :, :, :4].detach()
    angles = torch.arange(300.0, device="cuda").view(-1, 1, 1, 1, 1) * torch.rand(width // 2, device="cuda")
    angles = torch.cat((angles, angles), -1).to(dtype)
    assert_equal("rotate", [x], lambda run, x: run(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "g, q, d, more",
    [(8, 4, 128, {}), (12, 1, 64, dict(window=300)), (2, 8, 256, dict(softcap=5.0)), (8, 8, 64, dict(sinks=1.5))],
)
def test_decode_attention(g, q, d, more, dtype):
    """Texts of 1 to 3000 tokens, in blocks of a cache in random order."""
    lengths = (1, 16, 250, 257, 3000)
    blocks, of_texts = iter(torch.randperm(300, generator=torch.Generator().manual_seed(1)).tolist()), []
    for length in lengths:
        starts = [16 * next(blocks) for _ in range(-(-length // 16))]
        of_texts.append(tuple(slice(start, start + min(16, length - 16 * k)) for k, start in enumerate(starts)))
    places = Places(of_texts, 16, torch.device("cuda"))
    shapes = (len(lengths), g, q, d), (4800, g, d), (4800, g, d)
    inputs = [drawn(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    if "sinks" in more:
        more = dict(sinks=torch.linspace(-1, more["sinks"], g * q, device="cuda").view(g, q))
    found = probe.kernel("decode_attention")(*inputs, places, scale=d**-0.5, **more)
    wanted = reference.decode_attention(*(x.double() for x in inputs), places, scale=d**-0.5, **more)
    assert ((found.double() - wanted).norm() / wanted.norm()).item() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("h", [100, 4096, 12288])
def test_dropout_add(h, dtype):
    words = torch.randint(-32768, 32768, (2, 300, h), device="cuda").short().movedim(0, 1)
    call = lambda run, x, residual: run(x, DropoutMask(words, -26214, 1 / 0.9), residual)
    assert_equal("dropout_add", [drawn(300, 2, h, dtype=dtype, seed=n) for n in range(2)], call, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("v, real, more", [(50304, 50257, {}), (262144, 262144, {}), (1000, 400, dict(softcap=30.0))])
def test_cross_entropy(v, real, more, dtype):
    more = more and dict(more, label=0.9, everywhere=0.1 / real, z_loss=1e-2)
    logits, labels = drawn(70, v, dtype=dtype) * 4, torch.arange(70, device="cuda") * (real // 70)
    part, scale = VocabularyPart(0, real, **more), torch.rand(70, device="cuda")
    gradient, exact = torch.empty_like(logits), torch.empty(70, v, dtype=torch.float32, device="cuda")
    want = reference.cross_entropy(logits.float().clone(), labels, part, None, scale, exact)
    found = probe.kernel("cross_entropy")(logits, labels, part, None, scale, gradient)
    for x, y in zip((*found, gradient), (*want, exact), strict=True):
        assert (x.float() - y).norm() < TOLERANCE[dtype] * y.norm()


def test_more_than_two_to_the_31_logits():
    rows, v = 42800, 50304
    logits, part = torch.zeros(rows, v, dtype=torch.bfloat16, device="cuda"), VocabularyPart(0, 50257)
    labels = torch.full((rows,), 7, device="cuda")
    losses, _ = probe.kernel("cross_entropy")(logits, labels, part, None, None, logits)  # in place
    torch.testing.assert_close(losses, torch.full_like(losses, 50257.0).log())
    assert (logits[-1, 50257:] == 0).all() and (logits[:, 7] == -1.0).all() and logits[-1, 8] > 0


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    "settings",
    [dict(), dict(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True)],
    ids=["GPT", "Llama"],
)
def test_a_network(settings, dropout):
    """Loss and gradients with all kernels and with none, in fp32, and dropout by the same words."""
    sizes = dict(num_layers=2, hidden_size=256, num_attention_heads=4, seq_length=128, attention_dropout=0.0)
    tokens = torch.randint(0, 500, (129, 2))
    batch = MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2)).to("cuda")
    off = "bias_dropout_fusion bias_swiglu_fusion rope_fusion persist_layer_norm cross_entropy_loss_fusion".split()
    found = []
    for kernels in (Kernels(), Kernels(**dict.fromkeys(off, False))):
        model = GPT(Model(**sizes, **settings, hidden_dropout=dropout), Mesh(), 500, device="cuda", kernels=kernels)
        for name, (parameter, placement) in placements(model).items():
            init_parameter(name, parameter, placement, Mesh().coordinates, seed=1)
        loss, count = model(None, batch)[1].values()
        (loss / count).backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm()


@pytest.mark.parametrize("count", [1000, 8192, 1024 * 768 + 3])
def test_random_words(count):
    """Those of Philox, computed with numpy."""
    seeds = [3, 2**62 + 5]
    found = random_words((count,), seeds, torch.device("cuda")).cpu().numpy()
    for words, seed in zip(found, seeds, strict=True):
        assert (words == philox(seed, -(-count // 8)).view(np.int16)[:count]).all()
