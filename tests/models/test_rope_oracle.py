# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders with rotary positions, grouped queries, gated SiLU and RMSNorm, which none of Hugging Face's is, against
their definition in plain torch: each sample by itself without what fills it up, every head by itself, in float64.

Positions turn queries and keys of attention over the own half; attention over the source knows no positions.
Caps of scores hold for both, as in T5Gemma.
"""

import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch
from megatron.inference.generation import generate_targets
from megatron.inference.sampling import Sampling
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.model.t5.layers import DecoderCache
from megatron.mpu.mesh import Mesh
from megatron.training.rules import resolve

H, HEADS, GROUPS, D, FFN, V, ENCODER, DECODER, EPSILON = 32, 6, 2, 8, 40, 60, 2, 2, 1e-5
SOURCE, TARGET = 150, 140
LENGTHS = ((150, 140), (133, 140), (41, 129))  # tokens of a source and of a target; of the last, rows are left out
SIZES = f"""--model-type T5 --hidden-size {H} --num-attention-heads {HEADS} --kv-channels {D} --ffn-hidden-size {FFN}
    --seq-length {SOURCE} --decoder-seq-length {TARGET} --encoder-num-layers {ENCODER} --decoder-num-layers {DECODER}
    --mock-data --vocab-size {V} --make-vocab-size-divisible-by 1 --micro-batch-size {len(LENGTHS)} --train-iters 1
    --lr 1e-3 --device cpu --precision fp32 --hidden-dropout 0 --attention-dropout 0 --position-embedding-type rope
    --group-query-attention --num-query-groups {GROUPS} --swiglu --normalization RMSNorm --norm-epsilon {EPSILON}"""


CASES = {"plain": (None, None), "capped": (1.5, 4.0)}  # caps of scores and of logits


class Definition:
    """w: our weights by name, [g, parts, d, h] of attention, [2, ffn, h] (gate, value) of an MLP. caps: of `CASES`."""

    def __init__(self, w: dict[str, torch.Tensor], caps):
        self.w, (self.cap, self.final_cap) = w, caps

    def logits(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Of one sample: source [s], target [t] -> [t, V]."""
        x, y = self.w["embedding.word.weight"][source], self.w["embedding.word.weight"][target]
        for n in range(ENCODER):
            x = x + self.own_attention(f"blocks.{n}", x, causal=False)
            x = x + self.mlp(f"blocks.{n}", x)
        x = self.norm(f"blocks.{ENCODER - 1}.encoder_norm", x)
        for n in range(ENCODER, ENCODER + DECODER):
            y = y + self.own_attention(f"blocks.{n}", y, causal=True)
            y = y + self.attention_over(f"blocks.{n}", y, x)
            y = y + self.mlp(f"blocks.{n}", y)
        return capped(self.norm("final_norm", y) @ self.w["embedding.word.weight"].T, self.final_cap)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt()

    def projected(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("...h,th->t...", self.w[f"{name}.weight"], x) + self.w[f"{name}.bias"]

    def own_attention(self, block: str, x: torch.Tensor, causal: bool) -> torch.Tensor:
        parts, per = self.projected(f"{block}.attention.qkv", self.norm(f"{block}.attention_norm", x)), HEADS // GROUPS
        queries = [turned(parts[:, head // per, head % per]) for head in range(HEADS)]
        keys, values = ([parts[:, head // per, part] for head in range(HEADS)] for part in (per, per + 1))
        return self.attended(f"{block}.attention", queries, [turned(key) for key in keys], values, causal)

    def attention_over(self, block: str, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mine, per = self.projected(f"{block}.cross.q", self.norm(f"{block}.cross_norm", y)), HEADS // GROUPS
        theirs = self.projected(f"{block}.cross.kv", x)
        queries = [mine[:, head // per, head % per] for head in range(HEADS)]
        keys, values = ([theirs[:, head // per, part] for head in range(HEADS)] for part in (0, 1))
        return self.attended(f"{block}.cross", queries, keys, values, causal=False)

    def attended(self, name: str, queries, keys, values, causal: bool) -> torch.Tensor:
        found = []
        for query, key, value in zip(queries, keys, values, strict=True):
            scores = capped(query @ key.T / D**0.5, self.cap)
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            found.append(scores.softmax(-1) @ value)
        return torch.cat(found, -1) @ self.w[f"{name}.output.weight"].T + self.w[f"{name}.output.bias"]

    def mlp(self, block: str, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.projected(f"{block}.mlp.up", self.norm(f"{block}.mlp_norm", x)).unbind(1)
        return F.linear(F.silu(gate) * value, self.w[f"{block}.mlp.down.weight"], self.w[f"{block}.mlp.down.bias"])


def capped(x: torch.Tensor, cap) -> torch.Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def turned(x: torch.Tensor) -> torch.Tensor:
    """[s, d]: channels i and i + d/2 are one complex number, multiplied by exp(i m theta) at place m (RoFormer, eq. 34)."""
    thetas = 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    turns = torch.polar(torch.ones(len(x), D // 2).double(), torch.arange(len(x)).double().outer(thetas))
    z = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((z.real, z.imag), -1)


def pair(case: str):
    """Our model and the definition, with the same random weights that all matter."""
    caps = CASES[case]
    flags = "" if caps[0] is None else "--attn-logit-softcapping {} --final-logit-softcapping {}".format(*caps)
    config = resolve(parse_any(f"{SIZES} {flags}".split()), 1)
    ours = recipe_of(config).build_model(config, Mesh(), V, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in ours.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn * 0.25 if parameter.dim() > 1 else 0.3 * drawn + 1)
    w = {name: p.detach().double().requires_grad_() for name, p in ours.named_parameters()}
    return ours.eval(), Definition(w, caps)


def batch_of() -> MicroBatch:
    generator, b = torch.Generator().manual_seed(5), len(LENGTHS)
    draw = lambda length: torch.randint(V, (length, b), generator=generator)
    first = lambda length, own: (torch.arange(length).unsqueeze(1) < torch.tensor(own)).long()
    enc_mask, dec_mask = first(SOURCE, [s for s, _ in LENGTHS]), first(TARGET, [t for _, t in LENGTHS])
    arrays = dict(text_enc=draw(SOURCE), text_dec=draw(TARGET), labels=draw(TARGET), loss_mask=dec_mask.float())
    arrays |= dict(enc_mask=enc_mask, dec_mask=dec_mask)
    return MicroBatch(arrays["text_enc"], arrays["labels"], torch.arange(b), arrays["loss_mask"], arrays=arrays)


def within(found: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    size = max(1.0, wanted.abs().max().item())
    largest = (found.double() - wanted).abs().max().item()
    assert largest <= 1e-5 * size, f"{what}: {largest}"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_definition(case):
    (ours, definition), batch = pair(case), batch_of()
    source, target = batch.arrays["text_enc"], batch.arrays["text_dec"]
    got, losses = ours.logits(source, target, batch.arrays["enc_mask"]), []
    for row, (s, t) in enumerate(LENGTHS):
        want = definition.logits(source[:s, row], target[:t, row])
        within(got[:t, row], want, f"logits of sample {row}")
        losses.append(F.cross_entropy(want, batch.labels[:t, row], reduction="none"))
    expected = torch.cat(losses).mean()
    _, sums = ours.train()(None, batch)
    loss = sums["lm loss"] / sums["tokens"]
    within(loss, expected)
    loss.backward()
    expected.backward()
    for name, parameter in ours.named_parameters():
        wanted = definition.w[name].grad
        within(parameter.grad, wanted, name)
        assert wanted.abs().max() > 1e-6, f"{name}: nothing depends on it, so nothing was compared"


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_decoding_with_a_cache_is_the_definition_without(case):
    """Scores of given targets, in pieces; and of greedy ones each token is the best behind those before it."""
    (ours, definition), batch = pair(case), batch_of()
    sources = [batch.arrays["text_enc"][:s, row] for row, (s, _) in enumerate(LENGTHS)]
    wanted = lambda targets: torch.stack(list(map(definition.logits, sources, targets)))
    target, got = batch.arrays["text_dec"], []
    encoded, cache = ours.encode(batch.arrays["text_enc"], batch.arrays["enc_mask"]), DecoderCache(TARGET, len(sources))
    for piece in target.split([1, 6, 1, 124, *[1] * 8]):
        got.append(ours.decode(piece, encoded, cache))
        encoded.memory.fill_(torch.nan)  # its keys and values are kept: nobody looks at it again
    within(torch.cat(got).transpose(0, 1), wanted(target.t()))

    greedy, longest = Sampling(tokens_to_generate=TARGET, temperature=0.0), (SOURCE, TARGET)
    found = generate_targets(ours, [source.tolist() for source in sources], greedy, longest=longest, start=0)
    assert wanted(torch.tensor([[0, *tokens[:-1]] for tokens in found])).argmax(-1).tolist() == found
