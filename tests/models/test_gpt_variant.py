# SPDX-License-Identifier: Apache-2.0
"""A variant of GPT of one file against the same network in plain torch: its training in each layout, its logits."""

import json
from dataclasses import dataclass
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.model.context import ForwardContext
from megatron.model.gpt.facts import GPTFacts
from megatron.model.language_model import sum_over_tokens
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import seed_of
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import resolve
from tests.models import gpt_variant, plain_gpt
from tests.ranks import on_ranks, trains
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LAYERS, LENGTH, VOCABULARY, initial_weights
from tests.training.test_plain_loop import ADAM, FLAGS, records

STEPS, COEFF = 4, 0.5
LINE = (
    f"{FLAGS} --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1 "
    f"--added-loss-coeff {COEFF} --lr-decay-style constant"
)
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --recompute-granularity full_attn"),
    "zero3": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
}


def network(weights, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [b, s] -> (logits [b, s, vocabulary], sum over layers of the mean squares of what they add, [b, s])."""

    linear, norm = (partial(layer, weights) for layer in (plain_gpt.linear, plain_gpt.norm))
    b, s = tokens.shape
    x, sizes = weights["embedding.word.weight"][tokens] + weights["embedding.position.weight"][:s], 0
    for n in range(LAYERS):
        own = f"blocks.{n}."
        before = norm(own + "attention_norm", x)
        q, k, v = linear(own + "attention.qkv", before).view(b, s, HEADS, 3, -1).permute(3, 0, 2, 1, 4)
        scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(torch.ones(s, s).triu(1) > 0, -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2)  # [b, s, heads, width]
        heads = heads * (2 / (1 + torch.exp(-(before @ weights[own + "attention.gate.weight"].T))))[..., None]
        attended = linear(own + "attention.output", heads.reshape(b, s, -1))
        wide = F.gelu(linear(own + "mlp.up", norm(own + "mlp_norm", x)), approximate="tanh")
        added = attended + linear(own + "mlp.down", wide)
        x, sizes = x + added, sizes + added.square().mean(-1)
    return norm("final_norm", x) @ weights["embedding.word.weight"].T, sizes


def drawn() -> dict[str, torch.Tensor]:
    weights = initial_weights(1234)
    for name in (f"blocks.{n}.attention.gate.weight" for n in range(LAYERS)):
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(HEADS, HIDDEN).normal_(0.0, 0.02, generator=generator).double()
    return weights


@cache
def plain() -> tuple[list[dict], dict[str, torch.Tensor]]:
    """({lm loss, added, grad_norm} of each step, weights at the end) of the training of LINE."""

    def losses(weights, samples, counts):
        logits, sizes = network(weights, samples[:, :-1])
        each = plain_gpt.cross_entropies(logits, samples[:, 1:])
        return {"lm loss": each[counts].mean(), "added": sizes[counts].mean()}

    return plain_gpt.train(drawn(), losses, STEPS, COEFF)


pretrain = trains(gpt_variant)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{LINE} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    steps, weights = plain()
    found = [{name: step[name] for name in ("lm loss", "added", "grad_norm")} for step in records(tmp_path, "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    loaded = load_model(str(tmp_path))
    assert {name for name, _ in loaded.model.named_parameters()} == set(weights)
    for name, parameter in loaded.model.named_parameters():
        wanted = weights[name]
        assert (parameter[: len(wanted)].double() - wanted).abs().max() < 2e-5, name  # rows that pad the vocabulary


def test_its_logits_and_its_text_are_the_networks(tmp_path):
    """Generation has neither loss mask nor count, with a cache and without."""
    pretrain(0, f"{LINE} --save {tmp_path}")
    model = load_model(str(tmp_path)).model
    tokens = torch.randint(EOD, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    logits, _ = network(plain()[1], tokens)
    assert (model.logits(tokens.T).transpose(0, 1).double() - logits).abs().max() < 1e-3
    start, text = [5, 7], [5, 7]
    for _ in range(LENGTH - 2):
        text.append(network(plain()[1], torch.tensor([text]))[0][0, -1, :VOCABULARY].argmax().item())
    greedy = Sampling(tokens_to_generate=LENGTH - 2, greedy=True)
    assert {tuple(generate(model, [start], greedy, longest=LENGTH, use_cache=use)[0]) for use in (True, False)} == {
        tuple(text[2:])
    }


def test_what_a_layer_sees_of_the_batch(monkeypatch, tmp_path):
    """Positions that do not count are ends of documents."""
    seen = []
    forward = gpt_variant.VariantLayer.forward

    def watched(self, x, context):
        seen.append((context.loss_mask, context.num_tokens, context.batch))
        return forward(self, x, context)

    monkeypatch.setattr(gpt_variant.VariantLayer, "forward", watched)
    pretrain(0, f"{LINE} --train-iters 1")
    assert len(seen) == LAYERS * 4
    for mask, count, batch in seen:
        assert ((mask > 0) == (batch.tokens != EOD)).all() and count == (batch.tokens != EOD).sum()
    seen.clear()
    pretrain(0, f"{LINE.replace('--eod-mask-loss', '')} --train-iters 1")
    assert {(mask, count.item()) for mask, count, _ in seen} == {(None, 2.0 * LENGTH)}
    assert (ForwardContext().loss_mask, ForwardContext().num_tokens) == (None, None)


@dataclass(frozen=True)
class ScaledFacts(GPTFacts):
    coeff: float = 0.0

    @classmethod
    def of(cls, config, vocab_size):
        return cls(config.model, vocab_size, config.extra["variant"].added_loss_coeff)


class Scaled(gpt_variant.Variant):
    def build_layer(self, layer, weights, recompute):
        block = super().build_layer(layer, weights, recompute)
        block.coeff = self.facts.coeff
        return block


def test_settings_of_its_own_reach_its_layers():
    own = dict(facts=ScaledFacts, groups={"variant": gpt_variant.VariantSettings})
    recipe = pretrain_gpt.variant("tests.models.gpt_variant", Scaled, **own)
    config = resolve(parse_pretrain(LINE.split(), recipe.setting_groups), 1)
    model = recipe.build_model(config, Mesh(), 100, dtype=torch.float32, device="meta")
    assert [block.coeff for block in model.blocks.values()] == [COEFF] * LAYERS


@pytest.mark.parametrize("masked", [True, False])
def test_a_sum_over_tokens_is_the_whole_sum_on_each_rank(masked, run_ranks):
    values, mask = torch.rand(6, 2), (torch.rand(6, 2) > 0.5).float() if masked else None

    def body(rank):
        from megatron.mpu.initialize import join_job
        from megatron.settings.schema import Kernels, Parallel

        mesh = join_job(Parallel(tensor_model_parallel_size=2), Kernels(device="cpu")).mesh
        part = torch.nn.Module()
        part.tp, part.sequence_parallel = mesh.tp, True
        return sum_over_tokens(values.chunk(2)[rank], mask, part).item()

    wanted = (values * (1 if mask is None else mask)).sum().item()
    assert run_ranks(2, body) == [pytest.approx(wanted)] * 2


def test_the_weight_of_its_loss_belongs_to_the_checkpoint(tmp_path):
    from megatron.errors import SettingsError

    pretrain(0, f"{LINE} --train-iters 1 --save {tmp_path}")
    record = json.loads((tmp_path / "iter_0000001" / "state.json").read_text())
    assert record["config"]["extra"] == {"variant": {"added_loss_coeff": COEFF}}
    with pytest.raises(SettingsError, match=f"--added-loss-coeff: {COEFF} in the checkpoint, 0.25 now"):
        pretrain(0, f"{LINE} --load {tmp_path} --added-loss-coeff 0.25")
