# SPDX-License-Identifier: Apache-2.0
"""BERT: the same weights in Hugging Face's give the same scores, losses and gradients, with more tokens than any block
of our kernels has and with padding; every layout trains the same model.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch
from megatron.model.bert.facts import BertFacts
from megatron.model.bert.hf_names import matches
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Mesh
from megatron.training.rules import resolve
from tests.models.in_layouts import check_bf16, check_layout

H, HEADS, FFN, V, LAYERS, S, B = 32, 4, 48, 99, 3, 150, 3
SIZES = f"""--model-type BERT --hidden-size {H} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} --seq-length {S}
    --num-layers {LAYERS} --mock-data --vocab-size {V} --make-vocab-size-divisible-by 1 --micro-batch-size {B} --lr 1e-3
    --train-iters 1 --device cpu --precision fp32 --hidden-dropout 0 --attention-dropout 0 --norm-epsilon 1e-6"""
CASES = {"erf": ("--no-bias-gelu-fusion", "gelu"), "tanh": ("", "gelu_new")}


def batch_of(padded: int = 17) -> tuple[MicroBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda below: torch.randint(below, (S, B), generator=generator)
    mask = torch.ones(S, B, dtype=torch.int64)
    mask[S - padded :, 1] = 0
    counts = (torch.rand(S, B, generator=generator) < 0.2).float() * mask
    text = draw(V - 1) + 1  # not 0: theirs has no gradient for what pads
    arrays = dict(text=text, types=draw(2), labels=draw(V), is_random=torch.tensor([0, 1, 1]), loss_mask=counts)
    arrays["padding_mask"] = mask
    return MicroBatch(arrays["text"], arrays["labels"], torch.arange(B), counts, arrays=arrays), mask


@pytest.mark.parametrize("case, padded", [("erf", 17), ("tanh", 17), ("tanh", 110)])  # 110: rows are left out
def test_scores_and_gradients_are_theirs(case, padded):
    transformers = pytest.importorskip("transformers")
    flags, activation = CASES[case]
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=H,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FFN,
        hidden_act=activation,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=S,
        layer_norm_eps=1e-6,
    )
    theirs = transformers.BertForPreTraining(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.15 if parameter.dim() > 1 else parameter + 0.1 * drawn)
    theirs.tie_weights()
    config = resolve(parse_any(f"{SIZES} --post-norm {flags}".split()), 1)
    ours = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu")
    pairs, (batch, mask) = matches(BertFacts.of(config, V)), batch_of(padded)
    parameters, named = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert {match.ours for match in pairs} == set(parameters)
    assert {name for match in pairs for name in match.theirs} == set(named)
    with torch.no_grad():
        for match in pairs:
            parameters[match.ours].copy_(match.to_ours([named[name].detach() for name in match.theirs]))
    text, types = batch.arrays["text"], batch.arrays["types"]
    want = theirs(input_ids=text.t(), attention_mask=mask.t(), token_type_ids=types.t())
    words, follows = ours.eval().logits(text, mask, types), ours.follows(text, mask, types)
    real = mask.t().bool()
    assert (
        ((words.transpose(0, 1) - want.prediction_logits)[real]).abs().max()
        <= 1e-5 * want.prediction_logits.abs().max()
    )
    assert (follows - want.seq_relationship_logits).abs().max() <= 1e-5

    counts = batch.loss_mask.t().reshape(-1)
    losses = F.cross_entropy(want.prediction_logits.flatten(0, 1), batch.labels.t().reshape(-1), reduction="none")
    expected = (losses * counts).sum() / counts.sum()
    second = F.cross_entropy(want.seq_relationship_logits, batch.arrays["is_random"], reduction="none")
    second = (second * batch.loss_mask.sum(0)).sum() / batch.loss_mask.sum()
    _, sums = ours.train()(None, batch)
    tokens = sums["tokens"]
    torch.testing.assert_close(sums["lm loss"] / tokens, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums["sop loss"] / tokens, second, rtol=1e-5, atol=1e-6)
    ((sums["lm loss"] + sums["sop loss"]) / tokens).backward()
    (expected + second).backward()
    for match in pairs:
        wanted = match.to_ours([named[name].grad for name in match.theirs])
        found, size = parameters[match.ours].grad, wanted.abs().max().item()
        assert (found - wanted).abs().max() <= 1e-5 * max(1.0, size), match.ours
        assert size > 1e-7, f"{match.ours}: nothing depends on it, so nothing was compared"


def test_norms_before_branches_are_a_plain_network():
    """Megatron-LM's form: no norm behind the embedding, one behind the last layer, no second head, no kinds of tokens."""
    flags = "--bert-no-binary-head --num-tokentypes 0 --num-layers 1"
    config = resolve(parse_any(f"{SIZES} {flags}".split()), 1)
    ours = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu").eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.dim() == 1))
    w, (batch, mask) = {name: p.detach().double() for name, p in ours.named_parameters()}, batch_of()
    norm = lambda name, x: F.layer_norm(x, (H,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-6)
    linear = lambda name, x: F.linear(x, w[f"{name}.weight"].reshape(-1, x.shape[-1]), w[f"{name}.bias"].reshape(-1))
    x = w["embedding.word.weight"][batch.tokens.t()] + w["embedding.position.weight"]
    q, k, v = linear("blocks.0.attention.qkv", norm("blocks.0.attention_norm", x)).view(B, S, HEADS, 3, -1).unbind(3)
    scores = torch.einsum("bshd,bthd->bhst", q, k) * (H // HEADS) ** -0.5
    scores = scores.masked_fill(~mask.t().bool()[:, None, None, :], -torch.inf)
    heads = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v).flatten(2)
    x = x + linear("blocks.0.attention.output", heads)
    x = x + linear(
        "blocks.0.mlp.down", F.gelu(linear("blocks.0.mlp.up", norm("blocks.0.mlp_norm", x)), approximate="tanh")
    )
    x = norm("head.norm", F.gelu(linear("head.dense", norm("final_norm", x)), approximate="tanh"))
    want = x @ w["embedding.word.weight"].T + w["head.output.bias"]
    got = ours.logits(batch.tokens, mask).transpose(0, 1).double()
    assert ((got - want)[mask.t().bool()]).abs().max() <= 1e-5 * want.abs().max()
    _, sums = ours(None, batch)
    assert set(sums) == {"lm loss", "tokens"}
    losses = F.cross_entropy(want.flatten(0, 1), batch.labels.t().reshape(-1), reduction="none")
    expected = (losses * batch.loss_mask.t().reshape(-1)).sum().item()
    assert sums["lm loss"].item() == pytest.approx(expected, rel=1e-5)


SMALL = """--model-type BERT --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --mock-data
    --vocab-size 90
    --make-vocab-size-divisible-by 8 --lr 1e-3 --global-batch-size 8 --train-iters 10 --eval-iters 0 --precision fp32"""
POST = "--post-norm --untie-embeddings-and-output-weights"
LAYOUTS = """
    tp2sp-pp2 post dropout cheap
    pp2-dp2-zero3-zbh1 full micro2
    pp2vp2 post micro2
""".strip().splitlines()
FULL = """
    tp2 dropout
    tp4sp post full_attn
    pp4 dropout
    pp2-zbv dropout post
    pp2-vhalf mlp
    pp2-gpipe dropout
    dp2-zero1 post
    dp4-zero3 dropout full
    tp2sp-pp2-dp2-zero2-zbh1 post micro2
    tp2-pp2vp2-dp2-zero1 dropout
""".strip().splitlines()
RECOMPUTE = {
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "cheap": "--recompute-granularity selective --recompute-modules core_attn layernorm mlp_act",
    "mlp": "--recompute-granularity selective --recompute-modules layernorm mlp",
    "full_attn": "--recompute-granularity full_attn --no-recompute-layers 0,3",
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case",
    [" ".join(case.split()) for case in LAYOUTS]
    + [pytest.param(" ".join(case.split()), marks=pytest.mark.full) for case in FULL],
)
def test_layout_trains_the_same_model(case):
    layout, *features = case.split()
    check_layout(layout, flags_of(features))


@pytest.mark.sampled(10)
def test_bf16_over_two_processes():
    check_bf16(flags_of(["post"]))


def flags_of(features):
    words = [SMALL, "--micro-batch-size", "2" if "micro2" in features else "1"]
    words += ["" if "dropout" in features else "--hidden-dropout 0 --attention-dropout 0"]
    words += [POST] * ("post" in features)
    return " ".join([*words, *(flags for name, flags in RECOMPUTE.items() if name in features)])
