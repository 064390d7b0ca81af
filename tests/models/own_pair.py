# SPDX-License-Identifier: Apache-2.0
"""A GPT some of whose linear layers have a pair of small matrices: they multiply with W + factor x B A. (`--lora-rank` does
this without computing the sum, megatron/model/lora_product.py.)

    python -m tests.models.own_pair --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 \\
        --micro-batch-size 2 --train-iters 4 --lr 1e-2 --mock-data --vocab-size 100 --linear "attention.*=pair"
"""

from dataclasses import dataclass, replace

import pretrain_gpt
from megatron.entry import start
from megatron.errors import run_main
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.placement import Constant, Normal, beside_inputs, beside_rows
from megatron.settings.schema import setting


@dataclass(frozen=True)
class PairSettings:
    pair_rank: int = setting("rank of the pairs", 4, on_resume="another model")
    pair_factor: float = setting("the product of a pair is multiplied by this", 2.0, on_resume="refused")


class Pair(LinearProduct):
    group = PairSettings

    @classmethod
    def own_weights(cls, settings, weight):
        return {
            "pair_a": beside_inputs(weight, settings.pair_rank, Normal(settings.init_method_std)),
            "pair_b": beside_rows(weight, settings.pair_rank, Constant(0.0)),
        }

    def transform(self, weight, a, b):  # [rows..., i], [rank, i], [rows..., rank]
        return weight + self.settings.pair_factor * (b @ a)


def recipe():
    """What is trained."""
    return replace(
        pretrain_gpt.recipe(), model_type="tests.models.own_pair", linears={"pair": Pair}, starts_from=("GPT",)
    )


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
