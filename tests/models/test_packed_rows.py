# SPDX-License-Identifier: Apache-2.0
"""Rows of padding that layers leave out: a padded micro-batch has the loss and the gradients of its samples one by one,
each as long as its tokens; by the kernel and by the reference; and layouts train the same model with them.
"""

import multiprocessing

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import TABLE, Case, choose_kernel, explicit_attention, reference
from megatron.model import packed_rows
from megatron.model.command_line import parse_any
from megatron.model.kinds.attention.module import attention_core
from megatron.model.packed_rows import PackedRows
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Mesh
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.training.rules import resolve

pytestmark = pytest.mark.sampled(10)

V, S, T, LENGTHS = 50, 200, 20, (200, 70, 64, 1)
B = len(LENGTHS)
SHARED = f"""--hidden-size 16 --num-attention-heads 4 --seq-length {S} --mock-data --vocab-size {V} --train-iters 1
    --lr 1e-3 --make-vocab-size-divisible-by 1 --micro-batch-size {B} --device cpu --precision fp32 --hidden-dropout 0
    --attention-dropout 0"""
CASES = {
    "T5 relative": f"""--model-type T5 --encoder-num-layers 2 --decoder-num-layers 1 --decoder-seq-length {T}
        --position-embedding-type relative --feed-forward-proj gated-gelu""",
    "T5 rope, grouped": f"""--model-type T5 --encoder-num-layers 2 --decoder-num-layers 1 --decoder-seq-length {T}
        --position-embedding-type rope --group-query-attention --num-query-groups 2""",
    "BERT": "--model-type BERT --num-layers 2",
    "BERT published, rope": "--model-type BERT --num-layers 2 --post-norm --position-embedding-type rope",
}


def model_of(flags: str) -> torch.nn.Module:
    config = resolve(parse_any(f"{SHARED} {flags}".split()), 1)
    model = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu").train()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (parameter.dim() == 1))
    return model


def arrays_of(model: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda length: torch.randint(1, V, (length, B), generator=generator)
    mask = (torch.arange(S).unsqueeze(1) < torch.tensor(LENGTHS)).long()
    if model == "T5":
        counts = torch.rand(T, B, generator=generator).round()
        own = dict(text_enc=draw(S), text_dec=draw(T), labels=draw(T), enc_mask=mask, dec_mask=torch.ones(T, B).long())
        return own | dict(loss_mask=counts)
    counts = mask * torch.rand(S, B, generator=generator).round()
    counts[0] = 1.0
    own = dict(text=draw(S), types=draw(S) % 2, labels=draw(S), padding_mask=mask, is_random=torch.arange(B) % 2)
    return own | dict(loss_mask=counts)


def batch_of(arrays) -> MicroBatch:
    tokens = arrays["text_enc" if "text_enc" in arrays else "text"]
    samples = torch.arange(tokens.shape[1])
    return MicroBatch(tokens, arrays["labels"], samples, arrays["loss_mask"], arrays=arrays)


def one_sample(arrays, sample: int) -> MicroBatch:
    """The sample as far as it has tokens; its target whole."""
    own = {name: array[..., sample : sample + 1] for name, array in arrays.items()}
    sources = (
        ("text_enc", "enc_mask") if "text_enc" in own else ("text", "types", "labels", "padding_mask", "loss_mask")
    )
    return batch_of(own | {name: own[name][: LENGTHS[sample]] for name in sources})


def gradients(model, batches) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    total = 0.0
    for batch in batches:
        sums = model(None, batch)[1]
        loss = sums["lm loss"] + sums.get("sop loss", 0.0)
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kernel", ["block-full", "blocks of 48 rows", "reference"])
@pytest.mark.parametrize("case", CASES)
def test_a_padded_batch_is_its_samples(case, kernel, monkeypatch):
    if kernel == "reference":
        monkeypatch.setitem(TABLE, "attention", TABLE["attention"][-1:])
    if kernel == "blocks of 48 rows":
        monkeypatch.setattr(explicit_attention, "NONCAUSAL_ROWS", 48)
    model, arrays = model_of(CASES[case]), arrays_of(case.split()[0])
    rows = []
    model.blocks["0"].mlp.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[:2]))
    loss, found = gradients(model, [batch_of(arrays)])
    assert rows == [(200 + 128 + 64 + 64, 1)]
    wanted_loss, wanted = gradients(model, [one_sample(arrays, sample) for sample in range(B)])
    assert all(shape[1] == 1 and shape[0] == length for shape, length in zip(rows[1:], LENGTHS, strict=True))
    assert abs(loss - wanted_loss) <= 1e-5 * wanted_loss
    for name, want in wanted.items():
        assert (found[name] - want).norm() <= 2e-5 * want.norm(), name


@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("case", CASES)
def test_compiled_layers_leave_padding_out(case, backend, monkeypatch):
    """Batches of other lengths, too, and with the losses and gradients of layers that are not compiled."""
    compile, packed = torch.nn.Module.compile, []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile(self, backend=backend))
    monkeypatch.setattr(
        PackedRows, "pack", lambda self, x, pack=PackedRows.pack: packed.append(len(x)) or pack(self, x)
    )
    torch.compiler.reset()
    models = [model_of(f"{CASES[case]} {flags}") for flags in ("", "--torch-compile")]
    arrays = arrays_of(case.split()[0])
    for samples in (slice(0, B), slice(1, B), slice(0, 2)):
        batch = batch_of({name: array[..., samples].contiguous() for name, array in arrays.items()})
        wanted_loss, wanted = gradients(models[0], [batch])
        plain = len(packed)
        loss, found = gradients(models[1], [batch])
        assert len(packed) == 2 * plain > 0
        packed.clear()
        assert abs(loss - wanted_loss) <= 1e-5 * wanted_loss
        for name, want in wanted.items():
            assert (found[name] - want).norm() <= 2e-5 * want.norm(), name
    attended = [module for module in models[1].modules() if hasattr(module, "core")]
    assert all((module.core is attention_core) == module.causal for module in attended)


def test_what_is_packed():
    order = torch.arange(256)
    of = lambda *lengths: PackedRows.of(order < torch.tensor(lengths).unsqueeze(1))
    assert of(256, 256) is None and of(256, 250) is None  # nothing to win
    assert PackedRows.of(None) is None
    assert PackedRows.of((order >= 200).expand(2, 256)) is None  # padding before tokens
    rows = of(256, 3, 128)
    assert rows.index.tolist() == [n * 3 for n in range(256)] + [n * 3 + 1 for n in range(64)] + [
        n * 3 + 2 for n in range(128)
    ]
    x = torch.randn(256, 3, 5)
    back = rows.unpack(rows.pack(x))
    assert torch.equal(back[:, 0], x[:, 0]) and torch.equal(back[:64, 1], x[:64, 1]) and not back[64:, 1].any()


@pytest.mark.parametrize("flags", ["--hidden-dropout 0.1", "--attention-dropout 0.1", "--attention-backend sdpa"])
def test_what_is_not_packed(flags):
    config = resolve(parse_any(f"{SHARED} {CASES['BERT']} {flags}".split()), 1)
    model = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu").train()
    assert not model.packs
    assert model.eval().packs == ("sdpa" not in flags)


def test_which_kernels_take_packed_rows():
    fitting = [entry for entry in TABLE["attention"] if entry.fits(Case("cpu", torch.float32, 64, 64, packed=True))]
    assert [entry.name for entry in fitting] == ["block-full", "reference"]
    case = Case("cpu", torch.float32, 64, 64, packed=True, unfused=True)
    assert choose_kernel("attention", case).run is reference.attention


SMALL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --mock-data --vocab-size 90 --lr 1e-3
    --make-vocab-size-divisible-by 8 --global-batch-size 8 --train-iters 10 --eval-iters 0 --precision fp32
    --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4"""
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout, flags",
    [
        ("pp2", f"--model-type T5 --decoder-seq-length 12 --position-embedding-type relative {RECOMPUTED}"),
        ("tp2-pp2", "--model-type BERT"),
    ],
)
def test_layouts_train_the_same_model(layout, flags, monkeypatch):
    """One process with all rows, and a layout whose ranks leave some out."""
    config, layout, packed = parse_any(f"{SMALL} {flags}".split()), parse_layout(layout), multiprocessing.Value("i")
    recipe = recipe_of(config)
    alone = trace(laid_out(config, parse_layout("")), recipe, 1, 2)

    def counting(self, x, pack=PackedRows.pack):
        with packed:
            packed.value += 1
        return pack(self, x)

    monkeypatch.setattr(packed_rows, "ROUND", 2)
    monkeypatch.setattr(packed_rows, "WORTH", 1.0)
    monkeypatch.setattr(PackedRows, "pack", counting)
    difference = compare(alone, trace(laid_out(config, layout), recipe, layout.world_size, 2))
    assert packed.value >= 2 * 2 * layout.world_size, packed.value  # in each of two steps of two micro-batches
    assert difference.passes("fp32"), difference
