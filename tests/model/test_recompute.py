# SPDX-License-Identifier: Apache-2.0
"""Recomputation changes what is kept and nothing else: the same bits in loss and gradients, fewer bytes saved."""

import gc
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import SettingsError
from megatron.fused_kernels import reference
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.mlp import module as mlp
from megatron.model.kinds.mlp.module import MLP
from megatron.model.kinds.table import KINDS
from megatron.model.recompute_plan import recompute_groups
from megatron.model.t5.layers import FeedForward
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Recompute

MODERN = dict(
    position_embedding_type="rope",
    num_query_groups=2,
    swiglu=True,
    normalization="RMSNorm",
    qk_layernorm=True,
    disable_bias_linear=True,
)
DROPOUT = dict(hidden_dropout=0.2, attention_dropout=0.2)
FOUR = dict(num_layers=4, **DROPOUT)
SETTINGS = {
    "core_attn": Recompute("core_attn"),
    "full_attn": Recompute("full_attn"),
    "full": Recompute("full"),
    "groups of 2": Recompute("full", "uniform", 2),
    "first 3": Recompute("full", "block", 3),
    "not 1": Recompute("full", no_recompute_layers="1"),
}
MODULES = ("core_attn", "layernorm", "mlp_act", "mlp")
COMBINED = [names for n in range(1, 5) for names in itertools.combinations(MODULES, n)]


def modules(*names) -> Recompute:
    return Recompute("core_attn", recompute_modules=list(names))


def gradients(model, *batches) -> list[torch.Tensor]:
    """Losses and gradients with all micro-batches in flight at once, the last one's backward pass first."""
    losses = [model(None, batch)[1]["lm loss"] for batch in batches]
    for loss in reversed(losses):
        loss.backward()
    return [torch.stack(losses).detach(), *(p.grad for p in model.parameters())]


def assert_same_bits(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_with_dropout(tiny, batch, settings, shape, dtype):
    shape = dict(FOUR, dtype=dtype, **shape)
    micros = [batch(seed=n) for n in range(2)]
    want = gradients(tiny(**shape), *micros)
    assert want[0].isfinite().all()
    assert_same_bits(gradients(tiny(recompute=settings, **shape), *micros), want)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "shape", [{}, dict(MODERN, **DROPOUT), dict(squared_relu=True)], ids=["gpt2", "modern", "relu"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_with_any_modules(tiny, batch, shape, dtype):
    micros, make = [batch(seed=n) for n in range(2)], lambda settings: tiny(recompute=settings, dtype=dtype, **shape)
    want = gradients(make(None), *micros)
    for names in COMBINED:
        assert_same_bits(gradients(make(modules(*names)), *micros), want)


def test_a_kernel_that_adds_the_bias_is_recomputed(tiny, batch, monkeypatch):
    """As on CUDA, where one kernel adds the bias and applies GeLU."""
    calls, choose = [], mlp.choose_kernel

    def fused(x, bias):
        calls.append(1)
        return reference.bias_gelu(x, bias)

    monkeypatch.setattr(
        mlp, "choose_kernel", lambda op, *case: SimpleNamespace(run=fused) if op == "bias_gelu" else choose
    )
    want = gradients(tiny(), batch())
    assert len(calls) == 2
    for name in ("mlp_act", "mlp"):
        assert_same_bits(gradients(tiny(recompute=modules(name)), batch()), want)
    assert len(calls) == 2 + 2 * 4
    others = FeedForward.__new__(FeedForward)
    for proj in ("relu", "gated-gelu"):
        others.proj = proj
        assert others._bias_gelu(torch.ones(1)) is None


@pytest.mark.parametrize("granularity", ["core_attn", "full_attn", "full"])
def test_same_bits_without_dropout_and_with_documents(tiny, batch, granularity):
    """Without dropout another attention kernel runs, and recomputation may stop early."""
    documents = batch(document_ids=(torch.arange(16) > 5).int().unsqueeze(1).expand(16, 3))
    for micro in (batch(), documents):
        assert_same_bits(gradients(tiny(recompute=Recompute(granularity)), micro), gradients(tiny(), micro))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_same_bits_on_two_ranks(tiny, batch, run_ranks, sequence_parallel):
    def body(rank):
        make = lambda settings, dtype: tiny(  # noqa: E731
            Mesh(rank, tp=2), sequence_parallel=sequence_parallel, recompute=settings, dtype=dtype, **DROPOUT
        )
        for dtype in (torch.float32, torch.bfloat16):
            want = gradients(make(None, dtype), batch())
            for again in (
                *map(Recompute, ("core_attn", "full_attn", "full")),
                *(modules(*names) for names in COMBINED),
            ):
                assert_same_bits(gradients(make(again, dtype), batch()), want)

    run_ranks(2, body)


def saved_bytes(model, batch) -> int:
    """Memory that the backward pass holds on to, without the parameters; each piece of memory once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other gets its place
        return tensor.detach()  # with its node, which holds what it keeps: nothing of it would ever be freed

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(None, batch)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("shape", [{}, MODERN, DROPOUT], ids=["gpt2", "modern", "dropout"])
def test_saved_bytes(tiny, batch, shape):
    micro = batch(64)
    make = lambda settings: tiny(**{"num_layers": 4, "seq_length": 64, **shape}, recompute=settings)  # noqa: E731
    names = ("full", "full_attn", "core_attn", None)
    full, attention, core, everything = (saved_bytes(make(Recompute(name)), micro) for name in names)
    assert full < attention < core < everything
    assert saved_bytes(make(Recompute("full", "uniform", 2)), micro) < full
    one_more = saved_bytes(make(Recompute("full", no_recompute_layers="2")), micro)
    three_of_four = saved_bytes(make(Recompute("full", "block", 3)), micro)
    assert full < one_more == three_of_four < everything


@pytest.mark.sampled(10)
@pytest.mark.parametrize("shape", [{}, MODERN, dict(squared_relu=True)], ids=["gpt2", "modern", "relu"])
def test_modules_save_what_their_shapes_say(tiny, batch, most_allocated, shape):
    """To the byte, at the end of a forward pass."""
    s, b, layers = 64, 3, 4
    micro, settings = batch(s), dict(num_layers=layers, seq_length=s, **shape)
    model = tiny(**settings).facts.settings
    rows, h, ffn = s * b, model.hidden_size, model.ffn_size
    up, statistics = (2, 1) if shape == MODERN else (1, 2)  # widths of the MLP; numbers per row of a norm
    inner = {"gpt2": 0, "modern": 1, "relu": 0}["modern" if shape == MODERN else "gpt2"]  # silu(gate)
    saved = {
        "layernorm": 4 * layers * 2 * (rows * h + rows * statistics),
        "mlp_act": 4 * layers * rows * ffn * (1 + inner),
        "mlp": 4 * layers * rows * ffn * (up + inner + 1) - layers * torch.get_rng_state().nbytes,
    }

    def most(*names) -> int:
        made = tiny(recompute=modules(*names) if names else None, **settings)
        gc.collect()  # what tests before have left is not freed meanwhile
        return most_allocated(lambda: (made(None, micro), torch.empty(1 << 22)))  # the most is in use at the end

    everything, core = most(), most("core_attn")
    saved["core_attn"] = everything - core
    assert saved["core_attn"] > 0
    for names in COMBINED:
        counted = set(names) - ({"mlp_act"} if "mlp" in names else set())
        assert everything - most(*names) == sum(map(saved.get, counted)), names


def test_an_mlp_with_a_forward_of_its_own_is_not_ignored(tiny, batch, monkeypatch):
    class Own(MLP):
        def forward(self, x, context):
            return super().forward(x) * 2

    monkeypatch.setattr(GPTFacts, "mixers", KINDS | {"mlp": replace(KINDS["mlp"], module=Own)})
    with pytest.raises(SettingsError, match="mlp_act: Own has its own forward function"):
        tiny(recompute=modules("mlp_act"))
    assert_same_bits(gradients(tiny(recompute=modules("mlp", "mlp_act")), batch()), gradients(tiny(), batch()))


def test_nothing_is_kept_for_inference(tiny, batch):
    model = tiny(recompute=Recompute("full"))
    with torch.no_grad():
        assert not model(None, batch())[1]["lm loss"].requires_grad
    plain = tiny()
    assert torch.equal(model.eval().logits(batch().tokens), plain.eval().logits(batch().tokens))


def test_a_layer_runs_again_with_its_hooks_inside_the_backward_pass(tiny, batch):
    """What ZeRO 3 relies on: gathering in a forward pre-hook of a block."""
    model, seen = tiny(recompute=Recompute("full", no_recompute_layers="0")), []
    for n, block in model.blocks.items():
        block.register_forward_pre_hook(lambda *_, n=n: seen.append(n))
    loss, _ = model(None, batch())[1].values()
    assert seen == ["0", "1"]
    loss.backward()
    assert seen == ["0", "1", "1"]


# Which layers ---------------------------------------------------------------------------------------------------------


def chosen(layers, **settings) -> list:
    return [
        layer for group in recompute_groups(layers, Recompute(**settings)) if group.modules for layer in group.layers
    ]


@pytest.mark.parametrize("granularity", ["core_attn", "full_attn", "full"])
def test_exempt_layers_on_every_stage(granularity):
    settings = dict(recompute_granularity=granularity, no_recompute_layers="0,1,5")
    assert chosen(range(0, 4), **settings) == [2, 3]
    assert chosen(range(4, 8), **settings) == [4, 6, 7]


def test_blocks_count_in_each_stage():
    settings = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)
    assert [chosen(range(n, n + 3), **settings) for n in (0, 3)] == [[0, 1], [3, 4]]
    assert chosen(range(3), **settings, no_recompute_layers="0") == [1]


@given(
    st.integers(0, 5),
    st.integers(0, 12),
    st.sampled_from([None, "core_attn", "full_attn", "full"]),
    st.sampled_from([None, "uniform", "block"]),
    st.integers(1, 5),
    st.sets(st.integers(0, 20)),
)
def test_every_layer_has_its_place(first, count, granularity, method, size, exempt):
    settings = Recompute(granularity, method, size, ",".join(map(str, exempt)))
    groups = recompute_groups(range(first, first + count), settings)
    assert [layer for group in groups for layer in group.layers] == list(range(first, first + count))
    for group in groups:
        assert group.modules in ((), (granularity,))
        if group.modules:
            assert not exempt & set(group.layers)
            assert len(group.layers) <= (size if granularity == "full" and method != "block" else 1)
    bare = replace(settings, recompute_granularity=None)
    assert not any(group.modules for group in recompute_groups(range(first, first + count), bare))
