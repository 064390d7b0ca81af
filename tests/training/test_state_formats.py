# SPDX-License-Identifier: Apache-2.0
"""Whole runs with moments and gradients in bf16: against `plain_loop.py`, in layouts, on resume and in checkpoints."""

from functools import cache

import pytest
import torch

from megatron.checkpoint.reader import Reader
from megatron.errors import SettingsError
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import resolve
from tests.training.plain_loop import Job, train
from tests.training.test_optimizers import LAYOUTS, run_in
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, pretrain, records

MOMENTS = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
GRADIENTS = "--grad-reduce-in-bf16"


def tensors_of(folder, step=6):
    with Reader(folder / f"iter_{step:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def losses_of(folder):
    return [record["lm loss"] for record in records(folder, "step")]


def apart(found, expected) -> tuple[float, float]:
    """(share of elements of moments that differ, largest difference of a weight)."""
    moments = [name for name in expected if name.startswith("optimizer.")]
    assert set(found) == set(expected) and all(found[name].dtype == torch.bfloat16 for name in moments)
    different = sum((found[name] != expected[name].bfloat16()).sum().item() for name in moments)
    weights = [(found[name] - expected[name]).abs().max().item() for name in set(expected) - set(moments)]
    return different / sum(expected[name].numel() for name in moments), max(weights)


class RoundedAdam(torch.optim.Optimizer):
    """AdamW as it is published, with moments that bf16 holds: each step rounds them to the nearest number."""

    def __init__(self, groups, eps):
        super().__init__(groups, dict(lr=1.0, weight_decay=0.0))
        self.eps = eps

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state, gradient = self.state[weight], weight.grad
                state["step"] = state.get("step", 0) + 1
                mean = 0.9 * state.get("exp_avg", torch.zeros_like(weight)) + 0.1 * gradient
                square = 0.999 * state.get("exp_avg_sq", torch.zeros_like(weight)) + 0.001 * gradient**2
                root = (square / (1 - 0.999 ** state["step"])).sqrt() + self.eps
                weight *= 1 - group["lr"] * group["weight_decay"]
                weight -= group["lr"] * mean / (1 - 0.9 ** state["step"]) / root
                state |= dict(exp_avg=mean.bfloat16().to(weight), exp_avg_sq=square.bfloat16().to(weight))


@cache
def plain():
    return train(Job(**PLAIN, optimizer=lambda groups: RoundedAdam(groups, PLAIN["eps"])))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moments_in_bf16_are_adams_rounded(layout, tmp_path):
    """fp32 and fp64 sums lie on two sides of the middle between two numbers of bf16 now and then: in up to 2 % of the
    elements after six steps, and the weights have moved by another part of a step.
    """
    run_in(layout, f"{ADAM} {MOMENTS} --no-stochastic-rounding", tmp_path)
    expected = plain()
    assert losses_of(tmp_path) == pytest.approx([step["lm loss"] for step in expected.steps], rel=2e-6)
    moments, weights = apart(tensors_of(tmp_path), expected.tensors)
    assert moments < 0.04 and weights < 3e-4


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    pretrain(0, f"{SIX} {ADAM} {MOMENTS} --save {folder}")
    return folder


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["tp3", "pp2", "zero3"])
def test_layouts_round_at_random_alike(layout, alone, tmp_path):
    """With other random words nearly half of the elements would differ."""
    run_in(layout, f"{ADAM} {MOMENTS}", tmp_path)
    assert losses_of(tmp_path) == pytest.approx(losses_of(alone), rel=1e-6)
    moments, weights = apart(tensors_of(tmp_path), tensors_of(alone))
    assert moments < 0.04 and weights < 3e-4


def test_a_run_goes_on_to_the_bit(tmp_path):
    flags = f"{SIX} {ADAM} {MOMENTS} {GRADIENTS} --bf16"
    pretrain(0, f"{flags} --save {tmp_path / 'straight'}")
    for more in ("--exit-interval 3", f"--load {tmp_path / 'parts'}"):
        pretrain(0, f"{flags} --save {tmp_path / 'parts'} {more}")
    found, expected = tensors_of(tmp_path / "parts"), tensors_of(tmp_path / "straight")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "straight")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("before, after", [("", MOMENTS), (MOMENTS, "")], ids=["to bf16", "to fp32"])
def test_a_checkpoint_changes_its_format_with_a_note(before, after, tmp_path, capsys, run_ranks):
    """Saved by one process and loaded by two that share the state; the loss goes on."""
    pretrain(0, f"{SIX} {ADAM} {before} --save {tmp_path} --exit-interval 3")
    old = tensors_of(tmp_path, 3)
    capsys.readouterr()
    pretrain(0, f"{SIX} {ADAM} {after} --save {tmp_path} --load {tmp_path} --exit-interval 4")
    said = capsys.readouterr().out
    assert "tensors are converted: optimizer.exp_avg.embedding.word.weight" in said
    assert "note: --exp-avg-dtype was" in said
    new = tensors_of(tmp_path, 4)
    kinds = [{tensor.dtype for name, tensor in one.items() if name.startswith("optimizer.")} for one in (old, new)]
    wide, narrow = {torch.float32}, {torch.bfloat16}
    assert kinds == ([narrow, wide] if before else [wide, narrow])
    name = "optimizer.exp_avg_sq.blocks.1.mlp.up.weight"
    ratio = new[name].float().norm() / old[name].float().norm()
    assert 1.0 < ratio < 1.4  # a fourth gradient has come to three
    run_in("zero3", f"{ADAM} {after} --load {tmp_path}", tmp_path)
    reference = tmp_path / "reference"
    pretrain(0, f"{SIX} {ADAM} --save {reference}")
    assert losses_of(tmp_path)[-2:] == pytest.approx(losses_of(reference)[-2:], rel=1e-4)


def test_formats_that_contradict_each_other():
    line = f"{FLAGS} {SIX} {ADAM} --accumulate-allreduce-grads-in-fp32"
    resolve(parse_pretrain(f"{line} {GRADIENTS}".split()), 1)  # the more specific flag counts, as in Megatron-LM
    with pytest.raises(SettingsError, match="--main-grads-dtype bf16 and --accumulate-allreduce-grads-in-fp32 contra"):
        resolve(parse_pretrain(f"{line} --main-grads-dtype bf16".split()), 1)
