# SPDX-License-Identifier: Apache-2.0
"""What docs/extending.md adds to a GPT, ALiBi and a second head, against the same networks in plain torch."""

from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.reader import Reader
from megatron.entry import start
from megatron.errors import SettingsError
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.mpu.random import seed_of
from tests.models import alibi, own_head, plain_gpt
from tests.ranks import on_ranks
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, initial_weights
from tests.training.test_plain_loop import ADAM, FLAGS, records

STEPS, COEFF = 4, 0.5
LINE = f"{FLAGS} --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1"
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "tp3": (3, "--tensor-model-parallel-size 3 --recompute-granularity core_attn"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "zero3": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
}
PARTS = {"alibi": (alibi, ""), "head": (own_head, f"--ahead-loss-coeff {COEFF}")}


def states(part: str, weights, tokens: torch.Tensor) -> torch.Tensor:
    """Tokens [b, s] -> hidden states [b, s, h] behind the final norm."""

    linear, norm = (partial(layer, weights) for layer in (plain_gpt.linear, plain_gpt.norm))
    b, s = tokens.shape
    x, bias = weights["embedding.word.weight"][tokens], torch.zeros(HEADS, s, s).double()
    if part == "alibi":  # the paper's figure 3: of head i of n -2^(-8 i/n) for each step back
        for head in range(HEADS):
            for i in range(s):
                bias[head, i, : i + 1] = -(2 ** (-8 * (head + 1) / HEADS)) * torch.arange(i, -1, -1)
    else:
        x = x + weights["embedding.position.weight"][:s]
    hidden = torch.ones(s, s).triu(1) > 0
    for n in range(LAYERS):
        own = f"blocks.{n}."
        qkv = linear(own + "attention.qkv", norm(own + "attention_norm", x)).view(b, s, HEADS, 3, -1)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).masked_fill(hidden, -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2)  # [b, s, heads, width]
        x = x + linear(own + "attention.output", heads.reshape(b, s, -1))
        wide = F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh")
        x = x + linear(own + "mlp.down", wide)
    return norm("final_norm", x)


@cache
def plain(part: str) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """({its losses, grad_norm} of each step, weights at the end) of the training of LINE."""
    weights = initial_weights(1234)
    if part == "alibi":
        del weights["embedding.position.weight"]
    else:
        generator = torch.Generator().manual_seed(seed_of(1234, "ahead.weight", 0))
        drawn = torch.empty(HIDDEN, HIDDEN).normal_(0.0, 0.02, generator=generator)
        weights["ahead.weight"] = drawn.double()

    def losses(weights, samples, counts):
        def mean(x, labels, counts_there):
            each = plain_gpt.cross_entropies(x @ weights["embedding.word.weight"].T, labels)
            return each[counts_there].sum() / counts.sum()

        x = states(part, weights, samples[:, :-1])
        found = {"lm loss": mean(x, samples[:, 1:], counts)}
        if part == "head":
            ahead = x + x @ weights["ahead.weight"].T
            found["ahead loss"] = mean(ahead[:, :-1], samples[:, 2:], counts[:, 1:])
        return found

    return plain_gpt.train(weights, losses, STEPS, COEFF)


def pretrain(rank: int, part: str, flags: str) -> None:
    module, own = PARTS[part]
    start(f"{LINE} {own} {flags}".split(), module.recipe())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", PARTS)
def test_any_layout_is_the_plain_loop(part, layout, tmp_path):
    world, words = LAYOUTS[layout]
    flags = f"{words} --save {tmp_path}"
    on_ranks(world, pretrain, part, flags)
    steps, weights = plain(part)
    found = [{name: step[name] for name in steps[0]} for step in records(tmp_path, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    with Reader(tmp_path / f"iter_{STEPS:07d}") as reader:
        assert {name for name in reader.tensors if not name.startswith("optimizer.")} == set(weights)
        for name, wanted in weights.items():
            assert (reader.read(name).double() - wanted).abs().max() < 2e-5, name


@pytest.mark.parametrize("part", PARTS)
def test_its_logits_and_its_text_are_the_networks(part, tmp_path):
    """With a cache, where queries are the last of the keys, and without."""
    pretrain(0, part, f"--save {tmp_path}")
    model, weights = load_model(str(tmp_path)).model, plain(part)[1]
    scores = lambda tokens: states(part, weights, tokens) @ weights["embedding.word.weight"].T
    tokens = torch.randint(EOD, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    assert (model.logits(tokens.T).transpose(0, 1).double() - scores(tokens)).abs().max() < 1e-3
    text = [5, 7]
    for _ in range(LENGTH - 2):
        text.append(scores(torch.tensor([text]))[0, -1, :VOCABULARY].argmax().item())
    greedy = Sampling(tokens_to_generate=LENGTH - 2, greedy=True)
    for use in (True, False):
        assert generate(model, [[5, 7]], greedy, longest=LENGTH, use_cache=use)[0] == text[2:]


@pytest.mark.parametrize("part", PARTS)
def test_sequences_are_not_shared(part):
    with pytest.raises(SettingsError, match="--context-parallel-size"):
        pretrain(0, part, "--context-parallel-size 2 --world-size 2 --dry-run")
