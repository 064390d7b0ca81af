# SPDX-License-Identifier: Apache-2.0
"""The same weights in Hugging Face's T5 and Blenderbot give the same logits, loss and gradients; with sources and targets
longer than every block of our kernels, and sources that are filled up.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.hf_names import matches
from megatron.mpu.mesh import Mesh
from megatron.training.rules import resolve

transformers = pytest.importorskip("transformers")

H, HEADS, FFN, V, ENCODER, DECODER = 32, 4, 48, 99, 2, 3
SOURCE, TARGET, B = 150, 140, 2
SIZES = f"""--model-type T5 --hidden-size {H} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} --seq-length {SOURCE}
    --decoder-seq-length {TARGET} --encoder-num-layers {ENCODER} --decoder-num-layers {DECODER} --mock-data --vocab-size {V}
    --make-vocab-size-divisible-by 1 --micro-batch-size {B} --train-iters 1 --lr 1e-3 --device cpu --precision fp32
    --hidden-dropout 0 --attention-dropout 0"""
T5 = """--position-embedding-type relative --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
    --unscaled-attention"""
BLENDERBOT = f"--max-position-embeddings {SOURCE + 10}"
SHARED = dict(vocab_size=V, d_model=H, decoder_start_token_id=0, pad_token_id=1, eos_token_id=1)
THEIR_T5 = dict(SHARED, d_kv=H // HEADS, d_ff=FFN, num_layers=ENCODER, num_decoder_layers=DECODER, num_heads=HEADS)
THEIR_T5 |= dict(dropout_rate=0.0, relative_attention_num_buckets=16, relative_attention_max_distance=60)
BUCKETS = "--relative-attention-num-buckets 16 --relative-attention-max-distance 60"
CASES = {
    "T5 1.0": ("t5", f"{T5} {BUCKETS} --feed-forward-proj relu --scale-tied-output", {}),
    "T5 1.1": (
        "t5",
        f"{T5} {BUCKETS} --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights",
        dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    ),
    "Blenderbot": ("blenderbot", BLENDERBOT, {}),
}


def theirs_of(kind: str, more: dict):
    """A model of theirs with random weights that all matter: biases and norms too."""
    if kind == "t5":
        config = transformers.T5Config(**THEIR_T5, **more)
        # Transformers 5 ties them whatever it is told
        config.tie_word_embeddings = more.get("tie_word_embeddings", True)
        model = transformers.T5ForConditionalGeneration(config)
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    else:
        layers = dict(encoder_layers=ENCODER, decoder_layers=DECODER, encoder_ffn_dim=FFN, decoder_ffn_dim=FFN)
        heads = dict(encoder_attention_heads=HEADS, decoder_attention_heads=HEADS)
        rest = dict(activation_function="gelu_new", scale_embedding=False, max_position_embeddings=SOURCE + 10)
        drops = dict(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0)
        config = transformers.BlenderbotConfig(**SHARED, **layers, **heads, **rest, **drops)
        model = transformers.BlenderbotForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.15 if parameter.dim() > 1 else parameter + 0.1 * drawn)
    model.tie_weights()
    return model.eval()


def ours_of(flags: str):
    config = resolve(parse_any(f"{SIZES} {flags}".split()), 1)
    vocabulary = V
    model = recipe_of(config).build_model(config, Mesh(), vocabulary, dtype=torch.float32, device="cpu")
    return model, T5Facts.of(config, vocabulary)


def batch_of(padded: int = 17) -> tuple[MicroBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda length: torch.randint(2, V, (length, B), generator=generator)
    mask = torch.ones(SOURCE, B, dtype=torch.int64)
    mask[SOURCE - padded :, 1] = 0
    counts = torch.ones(TARGET, B)
    counts[TARGET - 9 :, 0] = 0
    arrays = dict(text_enc=draw(SOURCE), text_dec=draw(TARGET), labels=draw(TARGET), loss_mask=counts, enc_mask=mask)
    arrays["dec_mask"] = counts.long()
    batch = MicroBatch(arrays["text_enc"], arrays["labels"], torch.arange(B), counts, arrays=arrays)
    return batch, mask


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case, padded", [*((case, 17) for case in CASES), ("T5 1.1", 100)])  # 100: rows are left out
def test_logits_and_gradients_are_theirs(case, padded):
    kind, flags, more = CASES[case]
    theirs, (ours, facts), (batch, mask) = theirs_of(kind, more), ours_of(flags), batch_of(padded)
    parameters, named = dict(ours.named_parameters()), dict(theirs.named_parameters())
    pairs = matches(kind, facts)
    assert {match.ours for match in pairs} == set(parameters)
    assert {name for match in pairs for name in match.theirs} >= set(named)
    with torch.no_grad():
        for match in pairs:
            parameters[match.ours].copy_(match.to_ours([named[name].detach() for name in match.theirs]))
    source, target = batch.arrays["text_enc"], batch.arrays["text_dec"]
    want = theirs(input_ids=source.t(), attention_mask=mask.t(), decoder_input_ids=target.t()).logits
    got = ours.eval().logits(source, target, mask).transpose(0, 1)
    largest = want.abs().max().item()
    assert (got - want).abs().max() <= 1e-5 * max(1.0, largest), ((got - want).abs().max(), largest)

    losses = F.cross_entropy(want.flatten(0, 1), batch.labels.t().reshape(-1), reduction="none")
    counts = batch.loss_mask.t().reshape(-1)
    expected = (losses * counts).sum() / counts.sum()
    _, sums = ours.train()(None, batch)
    loss = sums["lm loss"] / sums["tokens"]
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    for match in pairs:
        wanted = match.to_ours([named[name].grad for name in match.theirs])
        found, size = parameters[match.ours].grad, wanted.abs().max().item()
        assert (found - wanted).abs().max() <= 1e-5 * max(1.0, size), match.ours
        assert size > 1e-6, f"{match.ours}: nothing depends on it, so nothing was compared"


@pytest.mark.parametrize("case", CASES)
def test_decoding_with_a_cache_is_decoding_without(case):
    kind, flags, more = CASES[case]
    (ours, _), (batch, mask) = ours_of(flags), batch_of()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.dim() == 1))
    from megatron.model.t5.layers import DecoderCache

    source, target = batch.arrays["text_enc"], batch.arrays["text_dec"][:20]
    with torch.no_grad():
        whole = ours.eval().logits(source, target, mask)
        encoded, cache = ours.encode(source, mask), DecoderCache(20, B)
        parts = [ours.decode(target[a:b], encoded, cache) for a, b in ((0, 1), (1, 7), (7, 8), (8, 20))]
    np.testing.assert_allclose(torch.cat(parts).numpy(), whole.numpy(), rtol=1e-4, atol=1e-5)
