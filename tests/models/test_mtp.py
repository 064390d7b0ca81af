# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction (--mtp-num-layers) against the same network and its losses in plain torch, in every layout."""

import re
from functools import cache, partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.data import batch_arrays
from megatron.data.loader import MicroBatch
from megatron.entry import start
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import seed_of
from megatron.settings.schema import Model
from tests.models import own_head, plain_gpt
from tests.models.in_layouts import check_layout
from tests.ranks import on_ranks, trains
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, Job, documents, initial_weights
from tests.training.test_plain_loop import ADAM, FLAGS, records

STEPS, FACTOR, DEPTHS = 4, 0.6, 2
LINE = (
    f"{FLAGS} --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --log-interval 1 "
    f"--mtp-num-layers {DEPTHS} --mtp-loss-scaling-factor {FACTOR}"
)
APART = "--eod-mask-loss --reset-position-ids --reset-attention-mask"
AGAIN, DETACHED = "--mtp-use-repeated-layer", "--mtp-detach-heads"
LAYOUTS = {
    "one process": (1, ""),
    "documents": (1, APART),
    "untied": (1, "--untie-embeddings-and-output-weights"),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform"),
    "tp3": (3, f"--tensor-model-parallel-size 3 {APART}"),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "cp2": (2, f"--context-parallel-size 2 {APART}"),
    "dp2, micro-batches of 1": (2, f"--micro-batch-size 1 {APART}"),
    "zero3": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
    "repeated": (1, f"{AGAIN} {APART}"),
    "repeated, tp3 with sequence parallelism": (3, f"{AGAIN} --tensor-model-parallel-size 3 --sequence-parallel"),
    "repeated, zero3": (2, f"{AGAIN} --sharding-stage 3"),
    "repeated, zero2, overlapped": (2, f"{AGAIN} --sharding-stage 2 --overlap-grad-reduce --overlap-param-gather"),
    "detached, recomputed": (1, f"{DETACHED} --recompute-granularity full --recompute-method uniform"),
    "detached, untied, zero3": (2, f"{DETACHED} --untie-embeddings-and-output-weights --sharding-stage 3"),
    "detached and repeated, cp2": (2, f"{DETACHED} {AGAIN} --context-parallel-size 2"),
}
STAGED = {  # positions are learned on the first stage alone
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2 zero-bubble": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "pp2 v, untied": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --untie-embeddings-and-output-weights --num-layers 4",
    ),
}
STAGED |= {
    "repeated, pp2 zero-bubble": (2, f"{AGAIN} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "detached, pp2": (2, f"{DETACHED} --pipeline-model-parallel-size 2"),
    "detached, pp2, untied": (2, f"{DETACHED} --pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
}
ROPE = "--position-embedding-type rope"


def first_weights(untied: bool, rope: bool, layers: int, depths: int) -> dict[str, torch.Tensor]:
    weights = initial_weights(1234)
    small = 0.02 / (2 * layers) ** 0.5
    new = {"output.weight": ((VOCABULARY, HIDDEN), 0.02)} if untied else {}
    norms = []
    for own in [*(f"blocks.{n}." for n in range(layers)), *(f"mtp.{k}.layers.0." for k in range(depths))]:
        new |= {
            f"{own}attention.qkv.weight": ((HEADS, 3, HIDDEN // HEADS, HIDDEN), 0.02),
            f"{own}attention.output.weight": ((HIDDEN, HIDDEN), small),
            f"{own}mlp.up.weight": ((4 * HIDDEN, HIDDEN), 0.02),
            f"{own}mlp.down.weight": ((HIDDEN, 4 * HIDDEN), small),
        }
        norms += [f"{own}attention_norm", f"{own}mlp_norm"]
    for k in range(depths):
        new[f"mtp.{k}.eh_proj.weight"] = ((HIDDEN, 2 * HIDDEN), 0.02)
        norms += [f"mtp.{k}.{name}" for name in ("enorm", "hnorm", "final_norm")]
    for name, (shape, std) in new.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator).double()
        if ".attention" in name or ".mlp" in name:
            weights[name.replace("weight", "bias")] = torch.zeros(shape[:-1], dtype=torch.float64)
    for name in norms:
        weights[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.float64)
        weights[f"{name}.bias"] = torch.zeros(HIDDEN, dtype=torch.float64)
    if rope:
        del weights["embedding.position.weight"]
    return weights


def rotated(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[b, heads, s, d] at positions [b, s]: channel i with channel i + d/2."""
    half = x.shape[-1] // 2
    angles = places[:, None, :, None] * 10000.0 ** (-torch.arange(half).double() / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)


def layer(weights, own: str, x: torch.Tensor, places: torch.Tensor, allowed: torch.Tensor, rope: bool) -> torch.Tensor:
    linear, norm = (partial(function, weights) for function in (plain_gpt.linear, plain_gpt.norm))
    b, s, _ = x.shape
    qkv = linear(own + "attention.qkv", norm(own + "attention_norm", x)).view(b, s, HEADS, 3, -1)
    q, k, v = qkv.permute(3, 0, 2, 1, 4)
    q, k = (rotated(one, places) for one in (q, k)) if rope else (q, k)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~allowed[:, None], -torch.inf)
    x = x + linear(own + "attention.output", (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, -1))
    wide = F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh")
    return x + linear(own + "mlp.down", wide)


@cache
def plain(
    apart: bool = False,
    untied: bool = False,
    rope: bool = False,
    layers: int = LAYERS,
    again: bool = False,
    detached: bool = False,
):
    """({its losses, grad_norm} of each step, weights at the end) of the training of LINE, token by token.

    again: all depths have the weights of the first. detached: their losses train themselves alone
    """
    alone = torch.Tensor.detach if detached else lambda x: x
    job = Job([], None, None, restart_positions=apart, cut_attention=apart)

    def embedded(weights, tokens, places):
        x = weights["embedding.word.weight"][tokens]
        return x if rope else x + weights["embedding.position.weight"][places.clamp(max=LENGTH - 1)]

    def losses(weights, samples, counts):
        tokens, norm = samples[:, :-1], partial(plain_gpt.norm, weights)
        counts = counts if apart else torch.ones_like(counts)
        head = weights["output.weight" if untied else "embedding.word.weight"].T
        places, allowed = documents(tokens, job)
        x = embedded(weights, tokens, places)
        for n in range(layers):
            x = layer(weights, f"blocks.{n}.", x, places, allowed, rope)
        x = norm("final_norm", x)
        found = {"lm loss": plain_gpt.cross_entropies(x @ head, samples[:, 1:])[counts].mean()}
        x, scores = alone(x), alone(head)
        for k in range(DEPTHS):
            own = f"mtp.{0 if again else k}."
            new = torch.zeros_like(tokens)  # of the token k + 1 places later, in the same document
            wanted = torch.zeros_like(tokens)
            mask = torch.zeros(tokens.shape, dtype=torch.bool)
            for b, i in np.ndindex(*tokens.shape):
                j = i + k + 1
                if j < LENGTH and not (apart and (tokens[b, i:j] == EOD).any()):
                    new[b, i], wanted[b, i], mask[b, i] = samples[b, j], samples[b, j + 1], counts[b, j]
            both = torch.cat(
                (norm(f"{own}enorm", alone(embedded(weights, new, places + k + 1))), norm(f"{own}hnorm", x)), -1
            )
            x = layer(weights, f"{own}layers.0.", both @ weights[f"{own}eh_proj.weight"].T, places, allowed, rope)
            x = norm(f"{own}final_norm", x)
            each = plain_gpt.cross_entropies(x @ scores, wanted) * mask
            # The mean of each sample, weighted by the tokens that count in its first loss.
            means = each.sum(1) / mask.sum(1).clamp(min=1)
            found[f"mtp_{k + 1} loss"] = (means * counts.sum(1)).sum() / counts.sum()
        return found

    return plain_gpt.train(first_weights(untied, rope, layers, 1 if again else DEPTHS), losses, STEPS, FACTOR / DEPTHS)


pretrain = trains(pretrain_gpt, LINE)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [*LAYOUTS, *STAGED])
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = (LAYOUTS | STAGED)[layout]
    rope = layout in STAGED
    flags = f"{words} --save {tmp_path} {ROPE * rope}"
    on_ranks(world, pretrain, flags)
    layers = 4 if "--num-layers 4" in words else LAYERS
    steps, weights = plain(APART in words, "--untie" in words, rope, layers, AGAIN in words, DETACHED in words)
    found = [{name: step[name] for name in steps[0]} for step in records(tmp_path, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    with Reader(tmp_path / f"iter_{STEPS:07d}") as reader:
        assert {name for name in reader.tensors if not name.startswith("optimizer.")} == set(weights)
        for name, wanted in weights.items():
            assert (reader.read(name).double() - wanted).abs().max() < 2e-5, name


def test_a_recipe_with_a_head_of_its_own_has_the_depths(tmp_path):
    """With a weight of 0 its loss changes nothing; it is logged beside those of the depths, which train as without it."""
    start(f"{LINE} --ahead-loss-coeff 0 --save {tmp_path}".split(), own_head.recipe())
    steps, _ = plain()
    found = records(tmp_path, "step")
    assert [{name: step[name] for name in steps[0]} for step in found] == [
        pytest.approx(step, rel=2e-5) for step in steps
    ]
    assert {"mtp_1 loss", "mtp_2 loss"} < set(steps[0]) and all(step["ahead loss"] > 1 for step in found)


def test_tokens_ahead_are_those_of_the_same_document():
    rows = np.array([[1, 2, EOD, 3, 4, 5, 6], [7, 8, 9, 7, 8, 9, 7]])
    documents = np.array([[0, 0, 0, 1, 1, 1], [0] * 6], np.int32)
    mask = np.array([[1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]], np.float32)
    tokens, labels, weights = batch_arrays.ahead(rows, 2, mask, documents)
    assert tokens[0].tolist() == [[2, EOD, 0, 4, 5, 0], [8, 9, 7, 8, 9, 0]]
    assert labels[0].tolist() == [[EOD, 3, 0, 5, 6, 0], [9, 7, 8, 9, 7, 0]]
    np.testing.assert_allclose(weights[0], [[5 / 3, 0, 0, 5 / 3, 5 / 3, 0], [0, 0, 0, 0, 1, 0]])
    assert tokens[1].tolist() == [[EOD, 0, 0, 5, 0, 0], [9, 7, 8, 9, 0, 0]]
    np.testing.assert_allclose(weights[1], [[0, 0, 0, 5, 0, 0], [0, 0, 0, 1, 0, 0]])
    long, _, none = batch_arrays.ahead(rows[:, :3], 4, None, None)  # a depth that reaches over the end has no loss
    assert long.shape == (4, 2, 2) and not none[1:].any() and none[0].tolist() == [[2, 0], [2, 0]]


def test_generation_is_that_of_the_network_alone(tmp_path):
    pretrain(0, f"--save {tmp_path}")
    model, weights = load_model(str(tmp_path)).model, plain()[1]
    tokens = torch.randint(EOD, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    places, allowed = documents(tokens, Job([], None, None))
    x = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][places]
    for n in range(LAYERS):
        x = layer(weights, f"blocks.{n}.", x, places, allowed, False)
    scores = plain_gpt.norm(weights, "final_norm", x) @ weights["embedding.word.weight"].T
    assert (model.logits(tokens.T).transpose(0, 1).double() - scores).abs().max() < 1e-3


WRONG = [
    ("--pipeline-model-parallel-size 2 --world-size 2 --dry-run", "--position-embedding-type rope"),
    ("--mtp-num-layers 12 --dry-run", "--seq-length 12"),
]


@pytest.mark.parametrize("flags, said", WRONG)
def test_a_wrong_use_has_one_message(flags, said):
    with pytest.raises(SettingsError, match="--mtp-num-layers") as refused:
        pretrain(0, flags)
    assert said in str(refused.value)


MIXED = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2
    --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-2 --mock-data --vocab-size 100 --device cpu
    --precision fp32 --mtp-num-layers 2
    --position-embedding-type rope --num-experts 4 --moe-ffn-hidden-size 16 --moe-aux-loss-coeff 0.1
    --moe-router-enable-expert-bias --moe-router-score-function sigmoid --qk-layernorm"""


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["ep2", "tp2sp", "tp2-ep2", "ep2-zero3", "pp2-zbh1", "cp2", "ep2-zero3 repeated"])
def test_depths_have_experts_and_dropout_in_any_layout(layout):
    layout, _, repeated = layout.partition(" ")
    check_layout(layout, f"{MIXED} {AGAIN if repeated else ''}")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["ep2", "tp2sp", "pp2-zbh1", "dp2-zero3"])
def test_depths_of_a_pattern_have_its_letters_in_any_layout(layout):
    check_layout(
        layout,
        f"{MIXED.replace('--num-layers 2', '').replace('--mtp-num-layers 2', '')} --hybrid-layer-pattern *E*-/*E/*E",
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("pattern", ["M-/*-/*-", "*-/M-/M-"])
def test_depths_know_documents_that_the_network_has_in_another_form(pattern):
    """A ring cuts documents in other ways than a scan whose states are passed on."""
    words = MIXED.split("--num-experts")[0].replace("--num-layers 2", "").replace("--mtp-num-layers 2", "")
    groups = "--mamba-num-groups 1 --mamba-head-dim 16 --mamba-state-dim 4"
    check_layout("cp2", f"{words} {groups} --hybrid-layer-pattern {pattern} --reset-attention-mask")


def test_a_pattern_of_pairs_is_the_network_of_layers():
    """With the same weights: the layer of a depth is two letters after the /."""
    shape = dict(hidden_size=32, num_attention_heads=2, seq_length=16, hidden_dropout=0.0, attention_dropout=0.0)
    shape |= dict(position_embedding_type="rope", mtp_num_layers=2)
    paired = GPT(Model(num_layers=2, **shape), Mesh(), 64)
    lettered = GPT(Model(num_layers=4, hybrid_layer_pattern="*-*-/*-/*-", **shape), Mesh(), 64)
    mine, theirs = dict(paired.named_parameters()), dict(lettered.named_parameters())
    numbers = lambda match: f"{match[1]}{2 * int(match[2]) + match[3].startswith('mlp')}.{match[3]}"
    for name, values in mine.items():
        values.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
        theirs.pop(re.sub(r"(blocks\.|layers\.)(\d+)\.(\w+)", numbers, name)).data.copy_(values)
    assert not theirs
    rows = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(0))
    ahead = batch_arrays.ahead(rows.numpy(), 2, None, None)
    batch = MicroBatch(
        *(rows[:, at : at + 16].T for at in (0, 1)),
        torch.arange(2),
        ahead=tuple(torch.from_numpy(one).mT for one in ahead),
    )
    (_, one), (_, other) = paired(None, batch), lettered(None, batch)
    assert one.keys() == other.keys() >= {"lm loss", "mtp_1 loss", "mtp_2 loss"}
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-6, atol=0)
