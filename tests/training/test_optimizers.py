# SPDX-License-Identifier: Apache-2.0
"""Whole runs with each `--optimizer`, and with `--decoupled-lr`, against `plain_loop.py`, in one process and in layouts."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.mpu.placement import Normal, Placement
from megatron.planner import layout as layouts
from megatron.planner.memory import whole_matrices
from megatron.planner.parameters import rank_units
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Optimizer
from megatron.training.build import build_run, refuse_idle
from megatron.training.rules import resolve
from tests.training.plain_loop import HEADS, HIDDEN, LENGTH, Job, rate_of, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, pretrain, records, run

pytestmark = pytest.mark.sampled(10)

LAYOUTS = {
    "one rank": (1, ""),
    "tp3": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "zero1": (2, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2"),
    "zero3": (2, "--sharding-stage 3"),
}
CONSTANT = "--lr-decay-style constant"


def run_in(layout: str, flags: str, folder) -> None:
    world, words = LAYOUTS[layout]
    run(world, f"{SIX} {flags} {words}", folder)


# ---- SGD -------------------------------------------------------------------------------------------------------------


@cache
def plain_sgd(momentum: float):
    job = PLAIN | dict(rate=rate_of("constant", 0.3, end=1), moments=("momentum_buffer",) if momentum else ())
    return train(Job(**job, optimizer=lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=momentum)))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sgd_is_torchs(layout, tmp_path):
    run_in(layout, f"--optimizer sgd --sgd-momentum 0.8 --lr 0.3 {CONSTANT}", tmp_path)
    compare(tmp_path, plain_sgd(0.8))


@pytest.mark.parametrize("layout", ["one rank", "zero3"])
def test_sgd_without_momentum_keeps_no_state(layout, tmp_path):
    run_in(layout, f"--optimizer sgd --sgd-momentum 0 --lr 0.3 {CONSTANT}", tmp_path)
    compare(tmp_path, plain_sgd(0.0))


# ---- Lion ------------------------------------------------------------------------------------------------------------


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of arXiv:2302.06675 as it is written there."""

    def __init__(self, groups, beta1, beta2):
        super().__init__(groups, dict(lr=1.0, weight_decay=0.0))
        self.betas = beta1, beta2

    @torch.no_grad()
    def step(self):
        beta1, beta2 = self.betas
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].get("exp_avg", torch.zeros_like(weight))
                direction = torch.sign(beta1 * mean + (1 - beta1) * weight.grad)
                weight -= group["lr"] * (direction + group["weight_decay"] * weight)
                self.state[weight]["exp_avg"] = beta2 * mean + (1 - beta2) * weight.grad


@cache
def plain_lion():
    job = PLAIN | dict(rate=rate_of("constant", 1e-3, end=1), decay=lambda samples: 0.5, moments=("exp_avg",))
    return train(Job(**job, optimizer=lambda groups: PlainLion(groups, 0.7, 0.9)))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lion_is_the_published_formula(layout, tmp_path):
    """A sign is a full step however small its argument is: of a hundred elements one may have gone the other way. Of
    biases of keys all may, whose gradients are rounding.
    """
    flags = f"--optimizer lion --lion-beta1 0.7 --lion-beta2 0.9 --lr 1e-3 --weight-decay 0.5 {CONSTANT}"
    run_in(layout, flags, tmp_path)
    expected = plain_lion()
    losses = [record["lm loss"] for record in records(tmp_path, "step")]
    assert losses == pytest.approx([step["lm loss"] for step in expected.steps], rel=1e-4)
    with Reader(tmp_path / "iter_0000006") as reader:
        assert set(reader.tensors) == set(expected.tensors)
        for name, wanted in expected.tensors.items():
            found = reader.read(name).double()
            if name.endswith("qkv.bias"):
                found, wanted = found[:, ::2], wanted[:, ::2]
            near = 1e-3 * wanted.abs().max() if name.startswith("optimizer.") else 1e-6
            odd = ((found - wanted).abs() > near).double().mean().item()
            assert odd <= 0.01, f"{name}: {odd:.1%} of its elements are off"


# ---- Muon ------------------------------------------------------------------------------------------------------------

SIMPLE, STEPS = (3.4445, -4.7750, 2.0315), 4
MUON = (
    f"--optimizer muon --muon-momentum 0.8 --muon-nesterov --muon-scale-mode unit_rms_norm --muon-num-ns-steps {STEPS} "
    "--muon-extra-scale-factor 0.5 --muon-coefficient-type simple --muon-fp32-matmul-prec highest "
    f"--lr 1e-2 --adam-eps 1e-4 {CONSTANT}"
)


class PlainMuon(torch.optim.Optimizer):
    """As its author describes it (kellerjordan.github.io/posts/muon), by singular values instead of products; for
    queries, keys and values apart. Other weights: Adam's algorithm with decoupled decay, as arXiv:1711.05101 has it.
    """

    def __init__(self, groups):
        super().__init__(groups, dict(lr=1.0, weight_decay=0.0))
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        *_, (table,) = (group["params"] for group in self.param_groups)
        for group in self.param_groups:
            for weight in group["params"]:
                linear = weight.dim() > 1 and weight.shape[-1] != LENGTH and weight is not table
                linear = linear and weight.shape not in ((LENGTH, HIDDEN), (HEADS, 3, HIDDEN // HEADS))
                weight *= 1 - group["lr"] * group["weight_decay"]
                weight -= group["lr"] * (self.direction if linear else self.adams)(weight, self.state[weight])

    def adams(self, weight, state):
        for name, value, beta in (("exp_avg", weight.grad, 0.9), ("exp_avg_sq", weight.grad**2, 0.999)):
            state[name] = beta * state.get(name, 0.0) + (1 - beta) * value
        first, second = state["exp_avg"] / (1 - 0.9**self.steps), state["exp_avg_sq"] / (1 - 0.999**self.steps)
        return first / (second.sqrt() + 1e-4)

    def direction(self, weight, state):
        state["momentum_buffer"] = 0.8 * state.get("momentum_buffer", 0.0) + 0.2 * weight.grad
        ahead = 0.8 * state["momentum_buffer"] + 0.2 * weight.grad
        parts = ahead.unbind(1) if weight.dim() == 4 else [ahead]
        found = [self.orthogonal(part.reshape(-1, part.shape[-1])).view(part.shape) for part in parts]
        return torch.stack(found, 1) if weight.dim() == 4 else found[0]

    def orthogonal(self, matrix):
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        values = values / values.norm()
        a, b, c = SIMPLE
        for _ in range(STEPS):
            values = a * values + b * values**3 + c * values**5
        rows, columns = matrix.shape
        return 0.5 * (rows / columns) ** 0.5 * (left * values) @ right


@cache
def plain_muon():
    names = ("momentum_buffer", "exp_avg", "exp_avg_sq")
    outcome = train(Job(**PLAIN | dict(decay=lambda samples: 0.1, moments=names), optimizer=PlainMuon))
    linear = [f"{part}.weight" for part in ("qkv", "attention.output", "up", "down")]

    def kept(name):
        """Matrices of linear layers have momentum, other weights Adam's moments."""
        return not name.startswith("optimizer.") or any(map(name.endswith, linear)) == ("momentum" in name)

    return replace(outcome, tensors={name: tensor for name, tensor in outcome.tensors.items() if kept(name)})


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_is_its_description(layout, tmp_path):
    run_in(layout, f"{MUON} --weight-decay 0.1", tmp_path)
    compare(tmp_path, plain_muon(), rel=1e-5, step=5e-5)


def test_an_update_with_muon_takes_the_memory_that_is_planned(most_allocated):
    torch.set_num_threads(1)
    flags = f"{FLAGS} {SIX} {MUON} --hidden-size 96 --ffn-hidden-size 512"
    config = resolve(parse_pretrain(flags.split()), 1)
    run = build_run(config, pretrain_gpt.recipe())
    run.optimizer.finalize_grads(torch.zeros(1))
    found = most_allocated(lambda: run.optimizer.step(1e-3, 0.1, 0.5))
    job = layouts.Job.of(config, pretrain_gpt.recipe().facts(config, 101), dp=1, device="cpu")
    layout = layouts.Layout.of(config, 1)
    assert 0.5 < found / whole_matrices(rank_units(job, layout, 0), job, layout) < 1
    run.close()


@pytest.mark.parametrize(
    "settings, weight, words",
    [
        (dict(optimizer="muon"), dict(embedding_or_output=True), "--optimizer muon: no weight of this model"),
        (dict(decoupled_lr=1e-3), dict(matrices=(0, (8,))), "--decoupled-lr 0.001: no weight of this model"),
    ],
)
def test_settings_for_weights_that_a_model_has_not_are_refused(settings, weight, words):
    facts = SimpleNamespace(weights={"w": Placement((8, 4), Normal(0.1), **weight)})
    with pytest.raises(SettingsError, match=words):
        refuse_idle(Optimizer(**settings), facts)
    refuse_idle(Optimizer(), facts)


def test_muon_goes_on_in_another_layout(run_ranks, tmp_path):
    flags = f"{SIX} {MUON} --weight-decay 0.1 --save {tmp_path}"
    run_ranks(3, pretrain, f"{flags} {LAYOUTS['tp3'][1]} --exit-interval 2")
    run_ranks(2, pretrain, f"{flags} {LAYOUTS['zero3'][1]} --load {tmp_path} --async-save")
    compare(tmp_path, plain_muon(), rel=1e-5, step=5e-5)


# ---- learning rates of embeddings ------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["one rank", "tp3", "pp2", "zero3"])
def test_embeddings_have_a_learning_rate_of_their_own(layout, tmp_path):
    """That of words, which is the output layer's too; positions have the common one."""
    flags = "--lr 1e-2 --min-lr 1e-3 --decoupled-lr 3e-2 --decoupled-min-lr 2e-2 --lr-warmup-iters 2 --adam-eps 1e-4"
    run_in(layout, f"{flags} --lr-decay-style cosine", tmp_path)
    rates = [rate_of("cosine", *ends, warmup=16, end=48) for ends in ((1e-2, 1e-3), (3e-2, 2e-2))]
    compare(tmp_path, train(Job(**PLAIN | dict(rate=rates[0], word_rate=rates[1]))))
    logged = [record["decoupled_learning_rate"] for record in records(tmp_path, "step")]
    assert logged == pytest.approx([rates[1](8 * step) for step in range(6)], rel=1e-12)


def test_the_lowest_rate_of_embeddings_is_that_of_all_where_none_is_given(tmp_path):
    pretrain(0, f"{SIX} --lr 1e-2 --min-lr 1e-3 --decoupled-lr 3e-2 --adam-eps 1e-4 --save {tmp_path}")
    rates = [rate_of("linear", highest, 1e-3, end=48) for highest in (1e-2, 3e-2)]
    compare(tmp_path, train(Job(**PLAIN | dict(rate=rates[0], word_rate=rates[1]))))


# ---- going on --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_in_another_layout_with_state_of_its_own(run_ranks, tmp_path):
    flags = f"{SIX} --optimizer sgd --sgd-momentum 0.8 --lr 0.3 {CONSTANT} --save {tmp_path}"
    run_ranks(3, pretrain, f"{flags} {LAYOUTS['tp3'][1]} --exit-interval 2")
    run_ranks(2, pretrain, f"{flags} {LAYOUTS['zero3'][1]} --exit-interval 4 --load {tmp_path} --async-save")
    pretrain(0, f"{flags} --optimizer-cpu-offload --optimizer-offload-fraction 0.4 --load {tmp_path}")
    compare(tmp_path, plain_sgd(0.8))


def test_state_in_files_and_on_the_host(tmp_path):
    flags = f"--optimizer sgd --sgd-momentum 0.8 --lr 0.3 {CONSTANT} --nvme-offload-dir {tmp_path}"
    shares = "--nvme-offload-fraction 0.4 --optimizer-cpu-offload --optimizer-offload-fraction 0.3"
    pretrain(0, f"{SIX} {flags} {shares} --save {tmp_path}")
    compare(tmp_path, plain_sgd(0.8))


def test_another_optimizer_is_refused_on_resume(tmp_path):
    pretrain(0, f"{SIX} {ADAM} --exit-interval 4 --save {tmp_path}")
    other = f"{SIX} --optimizer sgd --sgd-momentum 0.8 --lr 0.3 {CONSTANT} --load {tmp_path}"
    with pytest.raises(SettingsError) as refused:
        pretrain(0, other)
    for words in ("--optimizer sgd cannot resume from the state of adam", "give --optimizer adam", "--no-load-optim"):
        assert words in str(refused.value)
    pretrain(0, f"{other} --no-load-optim --save {tmp_path}")
    with Reader(tmp_path / "iter_0000006") as reader:
        assert {name.split(".")[1] for name in reader.tensors if name.startswith("optimizer.")} == {"momentum_buffer"}
