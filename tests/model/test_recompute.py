# SPDX-License-Identifier: Apache-2.0
"""Recomputation changes what is kept and nothing else: the same bits in loss and gradients, fewer bytes saved."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.recompute_plan import recompute_groups
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


def gradients(model, *batches) -> list[torch.Tensor]:
    """Losses and gradients with all micro-batches in flight at once, the last one's backward pass first."""
    losses = [model(None, batch)[1]["lm loss"] for batch in batches]
    for loss in reversed(losses):
        loss.backward()
    return [torch.stack(losses).detach(), *(p.grad for p in model.parameters())]


def assert_same_bits(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("shape", [{}, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_same_bits_with_dropout(tiny, batch, settings, shape, dtype):
    shape = dict(FOUR, dtype=dtype, **shape)
    micros = [batch(seed=n) for n in range(2)]
    want = gradients(tiny(**shape), *micros)
    assert want[0].isfinite().all()
    assert_same_bits(gradients(tiny(recompute=settings, **shape), *micros), want)


@pytest.mark.parametrize("granularity", ["core_attn", "full_attn", "full"])
def test_same_bits_without_dropout_and_with_documents(tiny, batch, granularity):
    """Without dropout another attention kernel runs, and recomputation may stop early."""
    documents = batch(document_ids=(torch.arange(16) > 5).int().unsqueeze(1).expand(16, 3))
    for micro in (batch(), documents):
        assert_same_bits(gradients(tiny(recompute=Recompute(granularity)), micro), gradients(tiny(), micro))


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
def test_same_bits_on_two_ranks(tiny, batch, run_ranks, sequence_parallel):
    def body(rank):
        make = lambda settings, dtype: tiny(  # noqa: E731
            Mesh(rank, tp=2), sequence_parallel=sequence_parallel, recompute=settings, dtype=dtype, **DROPOUT
        )
        for dtype in (torch.float32, torch.bfloat16):
            want = gradients(make(None, dtype), batch())
            for granularity in ("core_attn", "full_attn", "full"):
                assert_same_bits(gradients(make(Recompute(granularity), dtype), batch()), want)

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
        layer
        for group in recompute_groups(layers, Recompute(**settings))
        if group.granularity
        for layer in group.layers
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
        assert group.granularity in ("", granularity)
        if group.granularity:
            assert not exempt & set(group.layers)
            assert len(group.layers) <= (size if granularity == "full" and method != "block" else 1)
    bare = replace(settings, recompute_granularity=None)
    assert not any(group.granularity for group in recompute_groups(range(first, first + count), bare))
