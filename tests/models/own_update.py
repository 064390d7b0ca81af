# SPDX-License-Identifier: Apache-2.0
"""A GPT with an optimizer and a learning-rate schedule of one's own: both are names that its command knows.

    python -m tests.models.own_update --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --optimizer adagrad \\
        --lr-decay-style quadratic
"""

from dataclasses import dataclass, replace

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.optimizer.kinds import Kind
from megatron.optimizer.update import UpdateRule
from megatron.settings.schema import setting


@dataclass(frozen=True)
class AdagradSettings:
    """Settings that only this optimizer has."""

    adagrad_eps: float = setting("epsilon of --optimizer adagrad", 1e-10)


class Adagrad(UpdateRule):
    """As torch.optim.Adagrad: a learning rate for each element, which falls with the squares of its gradients."""

    def update(self, weights, gradients, states, step, lr, decay):
        for weight, gradient, total in zip(weights, gradients, states[0], strict=True):  # flat stretches, fp32
            gradient.add_(weight, alpha=decay)
            total.addcmul_(gradient, gradient)
            weight.addcdiv_(gradient, total.sqrt().add_(self.settings.adagrad_eps), value=-lr)


def quadratic(done: float) -> float:
    """What is left of the learning rate when this share of the decay is done."""
    return (1 - done) ** 2


def recipe():
    """What is trained: a GPT, but for how."""
    return replace(
        pretrain_gpt.recipe(),
        model_type="tests.models.own_update",
        schedules={"quadratic": quadratic},
        optimizers={"adagrad": Kind(state=lambda settings: ("sum",), update=Adagrad, group=AdagradSettings)},
    )


def main(argv: list[str]) -> None:
    start(argv, recipe())


if __name__ == "__main__":
    run_main(main)
