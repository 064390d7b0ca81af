# SPDX-License-Identifier: Apache-2.0
"""A GPT some of whose linear layers have a LoRA pair (arXiv:2106.09685): they multiply with W + alpha / rank x B A.

    python -m tests.models.own_lora --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --linear "attention.*=lora"
"""

from dataclasses import dataclass, replace

import pretrain_gpt
from megatron.errors import run_main
from megatron.mpu.linear_product import LinearProduct, beside_inputs, beside_rows
from megatron.mpu.placement import Constant, Normal
from megatron.settings.schema import setting
from megatron.training.entry import start


@dataclass(frozen=True)
class LoRASettings:
    lora_rank: int = setting("rank of the pairs", 4, on_resume="another model")
    lora_alpha: float = setting("the product of a pair is multiplied by this / --lora-rank", 8.0, on_resume="refused")


class LoRA(LinearProduct):
    group = LoRASettings

    @classmethod
    def own_weights(cls, settings, weight):
        return {
            "lora_a": beside_inputs(weight, settings.lora_rank, Normal(settings.init_method_std)),
            "lora_b": beside_rows(weight, settings.lora_rank, Constant(0.0)),
        }

    def transform(self, weight, a, b):  # [rows..., i], [rank, i], [rows..., rank]
        return weight + self.settings.lora_alpha / self.settings.lora_rank * (b @ a)


def recipe():
    """What is trained."""
    return replace(
        pretrain_gpt.recipe(), model_type="tests.models.own_lora", linears={"lora": LoRA}, starts_from=("GPT",)
    )


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
