# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets beside attention and MLPs in all kinds of layouts, against the same layers in plain torch, in one
process, in fp64, whose rule goes token by token; as letters of a pattern, and as the attention of transformer layers.
"""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
import pretrain_hybrid
from megatron.inference.load import load_model
from megatron.mpu.random import seed_of
from tests.models import plain_gpt
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LENGTH, VOCABULARY
from tests.training.test_plain_loop import ADAM, FLAGS, records

STEPS = 3
G, R, K, V, TAPS = 6, 2, 4, 5, 3
PARTS = (K, K, R * V, R * V, R, R)  # query, key, values, gates, write strengths, decays of a key head
MIXED = sum(PARTS[:3])
SIZES = (
    f"--linear-num-key-heads {G} --linear-num-value-heads {G * R} --linear-key-head-dim {K} --linear-value-head-dim {V} "
    f"--linear-conv-kernel-dim {TAPS}"
)
COMMON = (
    f" --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1 "
    f"--lr-decay-style constant {SIZES}"
)
PACKED = "--reset-attention-mask"
PP, TP, CP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--context-parallel-size"
MODULES = "--recompute-granularity selective --recompute-modules"
ONE = "--micro-batch-size 1"
GPT = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2"
# (prefix, kind) of each branch: of letters, and of a GPT whose second layer keeps its attention
LETTERS = tuple((f"blocks.{n}.", letter) for n, letter in enumerate("G-*G"))
PAIRS = (("blocks.0.", "G"), ("blocks.0.", "-"), ("blocks.1.", "*"), ("blocks.1.", "-"))
LAYOUTS = {
    "one process": (1, "G-*G", ""),
    "documents": (1, "G-*G", PACKED),
    "recomputed core": (1, "G-*G", f"{MODULES} core_attn layernorm {PACKED}"),
    "recomputed layers": (1, "G-*G", f"--recompute-granularity full_attn {PACKED}"),
    "tp3": (3, "G-*G", f"{TP} 3"),
    "tp3 with sequence parallelism": (3, "G-*G", f"{TP} 3 --sequence-parallel {PACKED}"),
    "cp2, attention in a ring": (2, "G-*G", f"{CP} 2 {ONE}"),
    "cp2, documents, a core recomputed": (2, "G-*G", f"{CP} 2 {ONE} {PACKED} {MODULES} core_attn"),
    "cp3, all exchange rows": (3, "G-*G", f"{CP} 3 --cp-comm-type a2a {ONE} {PACKED}"),
    "tp3 cp2": (6, "G-*G", f"{TP} 3 --sequence-parallel {CP} 2 {ONE} {PACKED}"),
    "pp2": (2, "G-|*G", f"{PP} 2 {PACKED}"),
    "pp2, interleaved": (2, "G|-|*|G", f"{PP} 2 {ONE}"),
    "pp2, zb-h1": (2, "G-|*G", f"{PP} 2 --pipeline-schedule zb-h1 {ONE} {PACKED}"),
    "zero1": (2, "G-*G", "--sharding-stage 1"),
    "zero3": (2, "G-*G", f"--sharding-stage 3 {PACKED}"),
    "GPT": (1, "", f"{GPT} {PACKED}"),
    "GPT, a list of layers, tp3": (3, "", f"{GPT[:-1]} [1]+[0] {TP} 3 --sequence-parallel {PACKED}"),
    "GPT, pp2, full recomputation": (2, "", f"{GPT} {PP} 2 {ONE} --recompute-granularity full"),
    "GPT, zero3": (2, "", f"{GPT} --sharding-stage 3 --recompute-granularity full"),
}
LONG = {"tp3 cp2", "zero1", "pp2", "recomputed layers", "cp3, all exchange rows", "pp2, interleaved", "GPT, zero3"}


# ---- the same in plain torch -----------------------------------------------------------------------------------------


def uniform(name: str, shape: tuple[int, ...], low: float, high: float) -> torch.Tensor:
    return torch.empty(shape).uniform_(low, high, generator=torch.Generator().manual_seed(seed_of(1234, name, 0)))


def initial_weights(branches) -> dict[str, torch.Tensor]:
    """Output products start with the standard deviation divided by the root of the number of branches; rates with the
    logarithms of 1 to 16, taps within 1 / sqrt(taps).
    """
    std, small = 0.02, 0.02 / len(branches) ** 0.5
    of_kind = {
        "G": {"gdn.in_proj": ((G, sum(PARTS), HIDDEN), std), "gdn.out_proj": ((HIDDEN, G * R * V), small)},
        "*": {
            "attention.qkv": ((HEADS, 3, HIDDEN // HEADS, HIDDEN), std),
            "attention.output": ((HIDDEN, HIDDEN), small),
        },
        "-": {"mlp.up": ((4 * HIDDEN, HIDDEN), std), "mlp.down": ((HIDDEN, 4 * HIDDEN), small)},
    }
    drawn = {"embedding.word.weight": ((VOCABULARY, HIDDEN), std), "embedding.position.weight": ((LENGTH, HIDDEN), std)}
    weights, norms = {}, ["final_norm"]
    for prefix, kind in branches:
        drawn |= {f"{prefix}{name}.weight": how for name, how in of_kind[kind].items()}
        if kind == "G":
            own, most = f"{prefix}gdn.", TAPS**-0.5
            weights |= {
                own + "conv_weight": uniform(own + "conv_weight", (G, MIXED, TAPS), -most, most),
                own + "dt_bias": torch.ones(G, R),
                own + "A_log": uniform(own + "A_log", (G, R), 1, 16).log(),
                own + "norm_weight": torch.ones(V),
            }
        else:
            weights |= {f"{prefix}{name}.bias": torch.zeros(how[0][:-1]) for name, how in of_kind[kind].items()}
        norms.append(f"{prefix}{ {'*': 'attention', '-': 'mlp', 'G': 'gdn'}[kind] }_norm")
    for name in norms:
        weights |= {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}
    for name, (shape, scale) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, scale, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def delta_net(weights, own: str, u: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """A gated delta net of [b, s, h], token by token; ids [b, s] of documents."""
    projected = torch.einsum("bsh,gph->bsgp", u, weights[own + "in_proj.weight"])
    mixed, gate, strength, a = projected.split((MIXED, *PARTS[3:]), -1)
    sums = torch.zeros_like(mixed)
    for back in range(TAPS):
        shifted = F.pad(mixed, (0, 0, 0, 0, back, 0))[:, : mixed.shape[1]]
        same = F.pad(ids, (back, 0), value=-1)[:, : ids.shape[1]] == ids
        sums = sums + shifted * same[..., None, None] * weights[own + "conv_weight"][..., TAPS - 1 - back]
    q, k, v = (sums / (1 + (-sums).exp())).split((K, K, R * V), -1)
    length = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v, gate = length(q) / K**0.5, length(k), v.unflatten(-1, (R, V)), gate.unflatten(-1, (R, V))
    decay = (-weights[own + "A_log"].exp() * (1 + (a + weights[own + "dt_bias"]).exp()).log()).exp()
    state, found = u.new_zeros(len(u), G, R, K, V), []
    for t in range(u.shape[1]):
        if t:
            state = state * (ids[:, t] == ids[:, t - 1]).view(-1, 1, 1, 1, 1)
        state = state * decay[:, t, :, :, None, None]
        said = torch.einsum("bgrkv,bgk->bgrv", state, k[:, t])
        change = strength[:, t].sigmoid().unsqueeze(-1) * (v[:, t] - said)
        state = state + torch.einsum("bgk,bgrv->bgrkv", k[:, t], change)
        found.append(torch.einsum("bgrkv,bgk->bgrv", state, q[:, t]))
    o = torch.stack(found, 1)
    normal = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[own + "norm_weight"]
    return (normal * gate / (1 + (-gate).exp())).flatten(2) @ weights[own + "out_proj.weight"].T


def network(weights, branches, tokens: torch.Tensor, packed: bool) -> torch.Tensor:
    """Tokens [b, s] -> logits [b, s, vocabulary]. packed: a document begins after each end of one."""
    linear, norm = (partial(layer, weights) for layer in (plain_gpt.linear, plain_gpt.norm))
    b, s = tokens.shape
    ids = F.pad((tokens == EOD).long().cumsum(1), (1, 0))[:, :-1] * packed
    hidden = (ids[:, None, :, None] != ids[:, None, None, :]) | (torch.ones(s, s).triu(1) > 0)
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s]
    for own, kind in branches:
        if kind == "G":
            x = x + delta_net(weights, own + "gdn.", norm(own + "gdn_norm", x), ids)
        elif kind == "*":
            qkv = linear(own + "attention.qkv", norm(own + "attention_norm", x)).view(b, s, HEADS, 3, -1)
            q, k, v = qkv.permute(3, 0, 2, 1, 4)
            scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf)
            x = x + linear(own + "attention.output", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))
        else:
            wide = F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh")
            x = x + linear(own + "mlp.down", wide)
    return norm("final_norm", x) @ weights["embedding.word.weight"].T


@cache
def plain(branches, packed: bool) -> tuple[list[dict], dict[str, torch.Tensor]]:
    def losses(weights, samples, counts):
        scores = network(weights, branches, samples[:, :-1], packed)
        return {"lm loss": plain_gpt.cross_entropies(scores, samples[:, 1:])[counts].mean()}

    return plain_gpt.train(initial_weights(branches), losses, STEPS, 0.0)


def pretrain(rank: int, program, flags: str) -> None:
    program.main(flags.split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, run_ranks, tmp_path):
    world, pattern, words = LAYOUTS[layout]
    flags = FLAGS.replace("--num-layers 2", "") + f" --hybrid-layer-pattern {pattern}" if pattern else FLAGS
    run = pretrain_hybrid if pattern else pretrain_gpt, f"{flags} {COMMON} {words} --save {tmp_path}"
    pretrain(0, *run) if world == 1 else run_ranks(world, pretrain, *run)
    steps, weights = plain(LETTERS if pattern else PAIRS, PACKED in words)
    found = [{name: step[name] for name in ("lm loss", "grad_norm")} for step in records(tmp_path, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    loaded = load_model(str(tmp_path))
    assert {name for name, _ in loaded.model.named_parameters()} == set(weights)
    for name, parameter in loaded.model.named_parameters():
        wanted = weights[name]
        assert (parameter[: len(wanted)].double() - wanted).abs().max() < 2e-5, name  # rows that pad the vocabulary
