# SPDX-License-Identifier: Apache-2.0
"""Properties of the network: causality, documents, caches, dropout, parts of pipelines, tensor parallelism."""

import dataclasses

import pytest
import torch

from megatron.model.cache import PagedCache
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements

MODERN = dict(
    position_embedding_type="rope",
    num_query_groups=2,
    swiglu=True,
    normalization="RMSNorm",
    qk_layernorm=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
    rotary_percent=0.5,
)
WINDOWED = dict(MODERN, window_size="3,0", attn_logit_softcapping=2.0, final_logit_softcapping=9.0)
SOME_WINDOWED = dict(
    window_size="3,0", window_attn_skip_freq=2, squared_relu=True, untie_embeddings_and_output_weights=True
)
OLMO = dict(MODERN, norm_position="post", qk_layernorm_across_heads=True)
GEMMA = dict(
    SOME_WINDOWED,
    position_embedding_type="rope",
    rope_local_base_freq=30.0,
    normalization="RMSNorm",
    norm_position="sandwich",
    squared_relu=False,
    geglu=True,
    disable_bias_linear=True,
    add_qkv_bias=True,
    scale_embedding=True,
    query_pre_attn_scalar=3.0,
)
GPT_OSS = dict(
    position_embedding_type="rope",
    num_query_groups=2,
    normalization="RMSNorm",
    softmax_type="learnable",
    window_size="3,0",
    window_attn_skip_freq=2,
    quick_geglu=True,
    activation_func_clamp_value=0.5,
    glu_linear_offset=1.0,
    untie_embeddings_and_output_weights=True,
)
VARIANTS = pytest.mark.parametrize(
    "settings",
    [{}, MODERN, WINDOWED, SOME_WINDOWED, OLMO, GEMMA, GPT_OSS],
    ids=["gpt2", "modern", "windowed", "some windowed", "olmo", "gemma", "gpt-oss"],
)


@VARIANTS
def test_later_tokens_do_not_matter(tiny, batch, settings):
    model, tokens = tiny(scale=5.0, **settings), batch().tokens
    changed = tokens.clone()
    changed[9:] = (changed[9:] + 1) % 100
    before, after = model.logits(tokens), model.logits(changed)
    torch.testing.assert_close(before[:9], after[:9])
    assert (before[9:] - after[9:]).abs().max() > 1e-3
    assert before.shape == (16, 3, 100)


@VARIANTS
def test_documents_do_not_see_each_other(tiny, batch, settings):
    """Two documents in one sample, with positions that start again, equal the two documents alone."""
    model, tokens = tiny(scale=5.0, **settings), batch().tokens
    document_ids = (torch.arange(16) >= 6).int().unsqueeze(1).expand(16, 3)
    position_ids = torch.cat((torch.arange(6), torch.arange(10))).unsqueeze(1).expand(16, 3)
    together = model.logits(tokens, position_ids=position_ids, document_ids=document_ids)
    torch.testing.assert_close(together[:6], model.logits(tokens[:6]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(together[6:], model.logits(tokens[6:]), rtol=1e-4, atol=1e-5)


@VARIANTS
def test_cache_equals_no_cache(tiny, batch, settings):
    """Three texts in blocks of 4 tokens, some of them apart, some in another order; a pass has new tokens of some texts."""
    model, tokens = tiny(scale=5.0, **settings), batch().tokens
    want = model.logits(tokens)
    runs = [[(0, 4)], [(9, 2), (4, 1), (6, 1)], [(11, 1), (8, 1), (7, 1), (5, 1)]]
    cache, done, found = PagedCache(blocks=12, block_size=4), [0, 0, 0], [[], [], []]
    for stops in ({0: 5, 1: 1}, {0: 6, 1: 2, 2: 7}, {1: 9}, {0: 7, 1: 10, 2: 8}, {0: 12, 1: 11}, {0: 16, 1: 16, 2: 16}):
        cache.begin([(stop, runs[text]) for text, stop in stops.items()], [done[text] for text in stops])
        logits = model.logits(
            torch.cat([tokens[done[text] : stop, text] for text, stop in stops.items()]).unsqueeze(1), cache=cache
        )
        parts = logits[:, 0].split([stop - done[text] for text, stop in stops.items()])
        for (text, stop), part in zip(stops.items(), parts, strict=True):
            found[text].append(part)
            done[text] = stop
    torch.testing.assert_close(torch.stack([torch.cat(parts) for parts in found], 1), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.logits(tokens, last_only=True), want[-1:], rtol=1e-4, atol=1e-5)
    wanted = torch.zeros(16, 3, dtype=torch.bool)
    wanted[3, 2] = wanted[5, 0] = True
    torch.testing.assert_close(model.logits(tokens, wanted=wanted), want[wanted], rtol=1e-4, atol=1e-5)
    rows = torch.tensor([15, 3 * 3 + 2])
    torch.testing.assert_close(model.logits(tokens, wanted=rows), want.flatten(0, 1)[rows], rtol=1e-4, atol=1e-5)


@VARIANTS
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_different_lengths(tiny, batch, settings, side):
    """Padded together, each prompt gets the logits that it gets alone."""
    model, tokens = tiny(scale=5.0, **settings), batch().tokens
    lengths, longest = [7, 4, 2], 7
    prompts = torch.zeros(longest, 3, dtype=torch.long)
    padding = torch.ones(longest, 3, dtype=torch.int32)
    positions = torch.zeros(longest, 3, dtype=torch.long)
    for i, n in enumerate(lengths):
        rows = slice(longest - n, longest) if side == "left" else slice(0, n)
        prompts[rows, i], padding[rows, i], positions[rows, i] = tokens[:n, i], 0, torch.arange(n)
    logits = model.logits(prompts, position_ids=positions, document_ids=padding)
    for i, n in enumerate(lengths):
        at = longest - 1 if side == "left" else n - 1
        torch.testing.assert_close(logits[at, i], model.logits(tokens[:n, i : i + 1])[-1, 0], rtol=1e-4, atol=1e-5)


def test_masked_tokens_have_no_part_in_the_loss(tiny, batch):
    model = tiny()
    mask = torch.zeros(16, 3)
    mask[2:5] = 1.0
    whole, masked = batch(), batch(loss_mask=mask)
    loss, count = model(None, masked)[1].values()
    assert count.item() == 9
    torch.testing.assert_close(loss, model.token_losses(None, whole)[2:5].sum())
    loss, count = model(None, whole)[1].values()
    assert count.item() == 48
    torch.testing.assert_close(loss, model.token_losses(None, whole).sum())


def test_labels_are_smoothed_in_training_alone(tiny, batch):
    plain, smooth = tiny(scale=5.0), tiny(scale=5.0, label_smoothing=0.1)
    want = plain(None, batch())[1]["lm loss"]
    assert abs(smooth(None, batch())[1]["lm loss"] - want) > 0.1
    assert torch.equal(smooth.eval()(None, batch())[1]["lm loss"], want)


def test_dropout_depends_on_the_sample_alone(tiny, batch):
    """The loss of a sample is the same in any micro-batch, again and again, and another sample's mask differs."""
    model, micro = tiny(hidden_dropout=0.3, attention_dropout=0.3), batch()
    losses = model.token_losses(None, micro)
    assert torch.equal(losses, model.token_losses(None, micro))
    alone = dataclasses.replace(
        micro, tokens=micro.tokens[:, 1:2], labels=micro.labels[:, 1:2], samples=micro.samples[1:2]
    )
    torch.testing.assert_close(model.token_losses(None, alone), losses[:, 1:2])
    other = dataclasses.replace(alone, samples=torch.tensor([9]))
    assert (model.token_losses(None, other) - losses[:, 1:2]).abs().max() > 1e-3
    model.eval()
    assert (model.token_losses(None, alone) - losses[:, 1:2]).abs().max() > 1e-3


@VARIANTS
def test_stages_of_a_pipeline_equal_the_whole(tiny, batch, settings):
    whole, micro = tiny(**settings), batch()
    stages = [tiny(layers=range(n, n + 1), first=n == 0, last=n == 1, **settings) for n in (0, 1)]
    names = [set(dict(stage.named_parameters())) for stage in stages]
    assert names[0] | names[1] == set(dict(whole.named_parameters()))
    assert names[0] & names[1] == (set() if settings else {"embedding.word.weight"})
    want = whole(None, micro)[1]["lm loss"]
    got = stages[1](stages[0](None, micro), micro)[1]["lm loss"]
    torch.testing.assert_close(got, want)
    want.backward()
    got.backward()
    for name, parameter in whole.named_parameters():
        gradients = [
            dict(stage.named_parameters())[name].grad for stage in stages if name in dict(stage.named_parameters())
        ]
        torch.testing.assert_close(sum(gradients), parameter.grad, msg=name)


def test_settings_for_fp16_change_nothing_in_fp32(tiny, batch):
    plain, scaled = tiny(scale=5.0), tiny(scale=5.0, apply_query_key_layer_scaling=True)
    torch.testing.assert_close(plain.logits(batch().tokens), scaled.logits(batch().tokens), rtol=1e-4, atol=1e-5)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "tp+sp"])
@VARIANTS
def test_tensor_parallel_equals_one_rank(tiny, batch, run_ranks, settings, sequence_parallel):
    settings = dict(settings, hidden_dropout=0.1, attention_dropout=0.1)
    whole, micro = tiny(**settings), batch()
    whole(None, micro)[1]["lm loss"].backward()
    want = {name: p.grad.numpy() for name, p in whole.named_parameters()}
    loss = whole(None, micro)[1]["lm loss"].item()

    def body(rank):
        mesh = Mesh(rank, tp=2)
        model = tiny(mesh, sequence_parallel=sequence_parallel, **settings)
        value = model(None, micro)[1]["lm loss"]
        value.backward()
        found = {}
        for name, (parameter, placement) in placements(model).items():
            offset, extent = placement.box(parameter.shape, mesh.coordinates)
            found[name] = offset, placement.partial, parameter.grad[tuple(slice(n) for n in extent)].numpy()
        return value.item(), found

    results = run_ranks(2, body)
    for value, _ in results:
        assert value == pytest.approx(loss, rel=1e-5)
    for name, gradient in want.items():
        boxes = [found[name] for _, found in results]
        if boxes[0][1]:
            boxes = [(boxes[0][0], (), sum(b[2] for b in boxes))]
        for offset, _, got in boxes:
            part = gradient[tuple(slice(at, at + n) for at, n in zip(offset, got.shape, strict=True))]
            torch.testing.assert_close(
                torch.from_numpy(got), torch.from_numpy(part.copy()), rtol=1e-3, atol=1e-4, msg=name
            )
