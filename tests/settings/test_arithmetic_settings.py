# SPDX-License-Identifier: Apache-2.0
"""Number formats, kernels and recomputation: which format, which kernel, what runs twice; and that results stay."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import DeviceLost, SettingsError
from megatron.fused_kernels import cpu_ops
from megatron.model import recompute
from megatron.model.gpt.module import GPT
from megatron.model.kinds.attention import module as attention
from megatron.mpu import initialize
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Kernels, Model

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


class Seen(TorchDispatchMode):
    """(name of the op, shape of its result) of all that torch does while it is on."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.ops.append((function.overloadpacket.__name__, tuple(getattr(result, "shape", ()))))
        return result


def step(run):
    """Loss and gradients of the first micro-batch."""
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    loss = model(None, micro)[1]["lm loss"]
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def same_bits(one, other):
    return torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


# ---- formats ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, weights, norms, products",
    [
        ("", FP32, FP32, FP32),
        ("--precision bf16", BF16, BF16, BF16),
        ("--precision fp16", FP16, FP16, FP16),
        ("--precision bf16 --amp-level O1", FP32, FP32, BF16),
        ("--precision fp16 --amp-level O1", FP32, FP32, FP16),
        ("--precision bf16 --amp-level O1 --amp-custom-black-list linear", FP32, FP32, FP32),
        ("--precision bf16 --amp-level O1 --amp-custom-white-list layer_norm", FP32, BF16, BF16),
    ],
)
def test_formats(flags, weights, norms, products, build):
    """Of the weights, of what a norm gives, and of what a product of matrices gives; optimizer state is in fp32."""
    run, seen = build(flags), {}
    model = run.stages[0]
    for name in ("blocks.0.mlp_norm", "blocks.0.mlp.up"):
        # A norm that adds first gives (sum, norm of it).
        note = lambda _, inputs, output, name=name: seen.update({name: output[-1].dtype})
        model.get_submodule(name).register_forward_hook(note)
    loss, _ = step(run)
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    assert list(seen.values()) == [norms, products] and loss.dtype == FP32
    assert {piece.tensor.dtype for piece in run.optimizer.pieces()} == {FP32}


@pytest.mark.parametrize(
    "formats, faster, chosen",
    [((FP32, BF16), BF16, "bf16"), ((FP32, BF16), FP32, "fp32"), ((FP32,), BF16, "fp32")],
    ids=["faster", "slower", "no instructions"],
)
def test_auto_precision_is_bf16_where_that_is_fast(formats, faster, chosen, build, monkeypatch):
    monkeypatch.setattr(cpu_ops, "FORMATS", frozenset(formats))
    monkeypatch.setattr(initialize, "measured_flops", lambda device, dtype: 2.0 if dtype == faster else 1.0)
    assert build("--precision auto").config.precision.precision == chosen


HUGE = 2.0**60  # times a gradient of this model, it is infinite in fp16
SCALES = [  # flags, the logged scale behind each of four steps
    ("--loss-scale 512", [512] * 4),
    ("--initial-loss-scale 256", [256] * 4),
    ("--initial-loss-scale 256 --loss-scale-window 2", [256, 512, 512, 1024]),
    (f"--initial-loss-scale {HUGE} --hysteresis 3", [HUGE, HUGE, HUGE / 2, HUGE / 4]),
    (
        f"--initial-loss-scale {HUGE} --hysteresis 1 --min-loss-scale {HUGE / 4}",
        [HUGE / 2, HUGE / 4, HUGE / 4, HUGE / 4],
    ),
]


@pytest.mark.parametrize("flags, scales", SCALES, ids=[flags for flags, _ in SCALES])
def test_loss_scales_of_fp16(flags, scales, train):
    steps = train(f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --fp16 --train-iters 4 {flags}").steps
    assert [one["loss_scale"] for one in steps] == scales
    assert [one["skipped"] for one in steps] == [scales[0] > 1e9] * 4


# ---- recomputation ---------------------------------------------------------------------------------------------------


SELECTIVE = "--recompute-granularity selective --recompute-modules"
RECOMPUTED = [  # flags; how often each of four layers' attention, their MLP, and softmax(q k) v run; regions that are kept
    ("", [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], 0),
    ("--recompute-granularity full", [2] * 4, [2] * 4, [2] * 4, 4),
    ("--recompute-granularity full_attn", [2] * 4, [1] * 4, [2] * 4, 4),
    ("--recompute-granularity core_attn", [1] * 4, [1] * 4, [2] * 4, 4),
    ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", [2] * 4, [2] * 4, [2] * 4, 2),
    (
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        [2, 2, 2, 1],
        [2, 2, 2, 1],
        [2, 2, 2, 1],
        3,
    ),
    ("--recompute-granularity full --no-recompute-layers 0,2", [1, 2, 1, 2], [1, 2, 1, 2], [1, 2, 1, 2], 2),
    ("--recompute-granularity core_attn --no-recompute-layers 3", [1] * 4, [1] * 4, [2, 2, 2, 1], 3),
    (f"{SELECTIVE} mlp", [1] * 4, [2] * 4, [1] * 4, 4),
    (f"{SELECTIVE} mlp_act", [1] * 4, [1] * 4, [1] * 4, 4),
    (f"{SELECTIVE} layernorm", [1] * 4, [1] * 4, [1] * 4, 8),
    (f"{SELECTIVE} core_attn layernorm mlp --no-recompute-layers 0", [1] * 4, [1, 2, 2, 2], [1, 2, 2, 2], 12),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "flags, attentions, mlps, cores, regions",
    RECOMPUTED,
    ids=[case[0].replace("--", "") or "none" for case in RECOMPUTED],
)
def test_what_is_computed_again(flags, attentions, mlps, cores, regions, build, monkeypatch):
    """Counted by hooks in a forward and a backward pass with dropout, whose gradients are the same bits.

    A module's pre-hook counts: the second run stops where everything is there again that was not kept.
    """
    more = "--num-layers 4 --hidden-dropout 0.2 --attention-dropout 0.3"
    want, counts, kept = step(build(more)), {}, []
    run = build(f"{more} {flags}")

    def count(kind, n):
        counts[kind, n] = counts.get((kind, n), 0) + 1

    for n, block in run.stages[0].blocks.items():
        for kind in ("attention", "mlp"):
            getattr(block, kind).register_forward_pre_hook(lambda *_, kind=kind, n=int(n): count(kind, n))
    core, checkpoint = attention.scaled_dot_product_attention, recompute.checkpoint

    def counted(query, key, value, layer, context):
        count("core", layer.layer)
        return core(query, key, value, layer, context)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counted)
    monkeypatch.setattr(recompute, "checkpoint", lambda *args, **more: kept.append(1) or checkpoint(*args, **more))
    assert same_bits(step(run), want)
    found = [[counts[kind, n] for n in range(4)] for kind in ("attention", "mlp", "core")]
    assert found == [attentions, mlps, cores] and len(kept) == regions


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "flags, fused",
    [
        ("", False),
        ("--attention-backend explicit", False),
        ("--attention-backend sdpa", True),
        ("--attention-backend flash", False),
    ],
)
def test_attention_backend(flags, fused, build):
    """On a CPU, sdpa is torch's fused op; flash is a package for GPUs, without which the default runs. Results stay."""
    want, run = step(build()), build(flags)
    with Seen() as seen:
        found = step(run)
    assert any("scaled_dot_product" in op for op, _ in seen.ops) is fused
    for one, other in zip([found[0], *found[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_flash_attention_version(monkeypatch):
    """On CUDA torch is told once, before a model is made; what it cannot do is an answer. A CPU has no flash attention."""
    build = lambda version: GPT(
        Model(num_layers=1, hidden_size=8, num_attention_heads=1, seq_length=8),
        Mesh(),
        10,
        kernels=Kernels(flash_attention_version=version),
        device="cpu",
    )
    active, told = [], []
    monkeypatch.setattr(
        torch.nn.attention, "activate_flash_attention_impl", lambda name: active.append(name) or told.append(name)
    )
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    build(3)
    assert told == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for version in (2, 3, 3, 4):
        build(version)
    assert told == ["FA3", "FA4"]
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SettingsError, match="--flash-attention-version 3: ModuleNotFoundError.*flash_attn_interface"):
        build(3)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("chunk", [5, 32])
def test_cross_entropy_chunk_is_the_rows_of_logits_at_a_time(chunk, build):
    more = "--make-vocab-size-divisible-by 104"  # so that nothing else has as many columns
    want, run = step(build(more)), build(f"{more} --cross-entropy-chunk {chunk}")
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    with Seen() as seen:
        model(None, micro)
    rows = [shape[0] for op, shape in seen.ops if op == "_softmax" and shape[-1] == 104]
    assert sum(rows) == micro.tokens.numel() == 32 and max(rows) == chunk
    found = step(run)
    for one, other in zip([found[0], *found[1]], [want[0], *want[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_torch_compile_compiles_each_layer(build, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *args, **more: compiled.append(self))
    build()
    assert compiled == []
    model = build("--torch-compile --num-layers 3").stages[0]
    assert compiled == list(model.blocks.values())


def test_device(build, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceLost, match="--device cuda: torch finds no CUDA device") as refused:
        build("--device cuda")
    assert refused.value.code == 11 and "--device cpu" in refused.value.do
    assert build("--device auto").context.device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert {parameter.device.type for parameter in build("--device cpu").stages[0].parameters()} == {"cpu"}
