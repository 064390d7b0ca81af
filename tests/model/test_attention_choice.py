# SPDX-License-Identifier: Apache-2.0
"""A layer asks for a kernel that can do what it needs, and a model's facts name the same one."""

import itertools
from dataclasses import replace

import pytest
import torch

import pretrain_gpt
from megatron.data.loader import MicroBatch
from megatron.errors import run_main
from megatron.fused_kernels import TABLE, Case, choose_kernel
from megatron.model.facts import RankSetup
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.kinds.attention import module as attention
from megatron.model.kinds.attention.kind import causal_kernel
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Kernels, Model
from megatron.training.rules import check
from tests.settings.test_rules import BASE, config

NAMES = {"sdpa (CPU)": "flash", "block-causal": "block-causal", "reference": "reference"}
NAMES |= {"flash with sinks (CPU)": "flash", "flash with sinks (CUDA)": "flash"}
SINKS = dict(softmax_type="learnable")
SHAPE = dict(num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.0, seq_length=64)


def causal_case(model: Model, device: str, dtype: torch.dtype, tokens: int, **more) -> Case:
    """The case of a layer of `model` over whole sequences of `tokens`."""
    return Case(
        device,
        dtype,
        tokens,
        tokens,
        causal=True,
        dropout=model.attention_dropout > 0,
        softcap=model.attn_logit_softcapping is not None,
        window=model.window,
        scaled_softmax=model.apply_query_key_layer_scaling and dtype == torch.float16,
        head_dim=model.head_dim,
        **more,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["auto", "explicit", "sdpa"])
@pytest.mark.parametrize(
    "settings, packed",
    [
        (dict(), False),
        (dict(window_size="9,0"), False),
        (dict(window_size="9,0", window_attn_skip_freq=2), True),
        (dict(attn_logit_softcapping=5.0), False),
        (dict(attn_logit_softcapping=5.0, window_size="9,0"), True),
        (dict(attn_logit_softcapping=5.0, attention_dropout=0.1, window_size="9,0"), False),
        (dict(SINKS, window_size="9,0", window_attn_skip_freq=2), True),
    ],
)
def test_layers_ask_for_what_they_need(monkeypatch, backend, settings, packed):
    asked = []
    note = lambda op, case, backend: asked.append((case, choose_kernel(op, case, backend))) or asked[-1][1]
    monkeypatch.setattr(attention, "choose_kernel", note)
    model = Model(**{**SHAPE, "attention_dropout": 0.0, **settings})
    network = GPT(model, Mesh(), 50, kernels=Kernels(attention_backend=backend))
    tokens = torch.zeros(64, 1, dtype=torch.long)
    documents = torch.zeros(64, 1, dtype=torch.int) if packed else None
    batch = MicroBatch(tokens, tokens, torch.arange(1), document_ids=documents)
    x, context = torch.randn(64, 1, 16), network.context(batch)
    for layer, block in enumerate(network.blocks.values()):
        block.attention(x, context)
        case, chosen = asked[-1]
        assert case.window == (None if layer == 1 and "window_attn_skip_freq" in settings else model.window)
        assert case.sinks == (model.softmax_type == "learnable")
        assert (case.softcap, case.documents) == (model.attn_logit_softcapping is not None, packed) and not case.masked
        share = RankSetup(device="cpu", precision="fp32", element=4, backend=backend)
        assert causal_kernel(model, share, case.window) == NAMES[chosen.name]
    assert len(asked) == 2


@pytest.mark.parametrize("window", [None, 500, 4200])
def test_facts_of_long_sequences_name_the_kernel_that_the_table_gives(window):
    size = None if window is None else f"{window},0"
    long = dict(SHAPE, seq_length=9000, window_size=size, attention_dropout=0.0)
    for capped, sinks in ((None, {}), (5.0, {}), (None, SINKS), (5.0, SINKS)):
        marks = dict(softcap=capped is not None, sinks=bool(sinks))
        case = Case("cpu", torch.float32, 9000, 9000, causal=True, window=window, **marks)
        model = Model(**long, attn_logit_softcapping=capped, **sinks)
        for backend in ("auto", "explicit", "sdpa"):
            chosen = choose_kernel("attention", case, backend).name
            assert causal_kernel(model, RankSetup(device="cpu", backend=backend), window) == NAMES[chosen]


@pytest.mark.parametrize(
    "dtype, precision", [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
def test_facts_name_the_kernel_of_sinks_on_a_gpu(dtype, precision, monkeypatch):
    torch_alone = lambda entry: "flash-attn" not in entry.name
    monkeypatch.setitem(
        TABLE, "attention", [replace(e, lacking="", probe=lambda: "") for e in TABLE["attention"] if torch_alone(e)]
    )
    more = dict(), dict(attention_dropout=0.1), dict(attn_logit_softcapping=5.0), dict(window_size="9,0")
    for settings in (*more, dict(apply_query_key_layer_scaling=True), dict(kv_channels=512)):
        model = Model(**{**SHAPE, "attention_dropout": 0.0, **SINKS, **settings})
        for backend, unfused in itertools.product(("auto", "explicit", "sdpa", "flash"), (False, True)):
            case = causal_case(model, "cuda", dtype, 64, sinks=True, unfused=unfused)
            share = RankSetup(device="cuda", precision=precision, backend=backend, plain_softmax=unfused)
            chosen = choose_kernel("attention", case, backend).name
            assert causal_kernel(model, share, model.window) == NAMES[chosen], (settings, case, backend)


@pytest.mark.parametrize(
    "dtype, precision", [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_facts_name_the_kernel_of_a_ring(device, dtype, precision, monkeypatch):
    rows = [replace(entry, lacking="") for entry in TABLE["partial_attention"]]
    monkeypatch.setitem(TABLE, "partial_attention", rows)
    names = {"flash (CUDA)": "flash", "flash (CPU)": "flash", "explicit": "block-causal"}
    models = [dict(), dict(attention_dropout=0.1), dict(attn_logit_softcapping=5.0), dict(window_size="9,0")]
    models += [dict(apply_query_key_layer_scaling=True), dict(kv_channels=512), SINKS]
    for settings in models:
        model = Model(**{**SHAPE, "attention_dropout": 0.0, **settings})
        for backend in ("auto", "explicit", "sdpa", "flash"):
            case = causal_case(model, device, dtype, 32, sinks=settings == SINKS)
            share = RankSetup(device=device, precision=precision, backend=backend, cp=2)
            chosen = choose_kernel("partial_attention", case, backend).name
            assert causal_kernel(model, share) == names[chosen], (settings, backend)


def test_the_log_names_the_kernel_of_documents_in_a_ring(monkeypatch):
    """And that of other layers, if there are some."""
    rows = [replace(entry, lacking="") for entry in TABLE["partial_attention"]]
    monkeypatch.setitem(TABLE, "partial_attention", rows)
    flags = "--bf16 --reset-attention-mask --attention-dropout 0 --num-layers 2"
    said = lambda more: attention.describe_kernel(config(f"{flags} {more}"), GPTFacts(Model(**SHAPE), 50), "cuda")
    ring = "kernels: attention of documents in a ring by flash (CUDA)"
    assert said("--cp 2") == [ring] and said("--cp 2 --attn-logit-softcapping 5") == [
        ring.replace("flash (CUDA)", "explicit")
    ]
    first, second = said("--cp 2 --cp-comm-type p2p allgather")
    assert first == ring and second.startswith("kernels: attention of documents by")
    assert not any("ring" in line for line in said("") + said("--cp 2 --cp-comm-type a2a"))


def test_torchs_kernels_share_one_mask_of_a_window(tiny, batch):
    """Of all layers and micro-batches: it is as large as the scores of one head."""
    network = tiny(window_size="5,0", num_layers=3)
    for block in network.blocks.values():
        block.attention.backend = "sdpa"
    kept = {}
    # without its node, which holds what it keeps: nothing of it would ever be freed
    keep = lambda x: kept.update({x.untyped_storage().data_ptr(): x.detach()}) or x.detach()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        first, second = network(None, batch(16, 2))[1], network(None, batch(16, 2, seed=1))[1]
    assert first["lm loss"] != second["lm loss"]
    assert sum(tuple(x.shape[-2:]) == (16, 16) for x in kept.values()) == 1


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--window-size 3", "--window-size 3 must be the keys before and after its own that a token sees"),
        ("--window-size 3,0 --window-attn-skip-freq 0", "--window-attn-skip-freq 0 must be at least 1"),
    ],
)
def test_a_window_that_is_none_is_answered_and_no_more(flags, words, capsys):
    """By a dry run, too, which asks facts for all that it can."""
    assert [said[: len(words)] for said in check(config(flags), 1)] == [words]
    with pytest.raises(SystemExit) as done:
        run_main(pretrain_gpt.main, f"{BASE} {flags} --dry-run --world-size 2".split())
    told = capsys.readouterr()
    assert done.value.code == 3 and words in told.out + told.err
