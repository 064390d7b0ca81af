# SPDX-License-Identifier: Apache-2.0
"""Pretrain a model whose layers a pattern lists, a character for each: docs/hybrid.md.

    python pretrain_hybrid.py --hybrid-layer-pattern "*-*-" --hidden-size 256 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 8192

The recipe is that of pretrain_gpt.py, which takes patterns, too; here one must be given.
"""

from dataclasses import replace

from megatron.entry import start
from megatron.errors import run_main
from megatron.model.hybrid import required_pattern
from megatron.model.recipe import named_recipe


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    about = "Pretrain a model whose layers a pattern lists."
    start(argv, replace(named_recipe("GPT"), normalize_config=required_pattern, about=about))


if __name__ == "__main__":
    run_main(main)
