# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT: this file is the whole recipe, and `megatron.training.loop` the story of a run.

    python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 8192
    torchrun --nproc-per-node 2 pretrain_gpt.py ...
    torchrun --nproc-per-node 8 pretrain_gpt.py --auto-parallel --max-global-batch-size 64 ...
    srun --ntasks-per-node 8 --gpus-per-task 1 python pretrain_gpt.py ...
    python pretrain_gpt.py --dry-run --world-size 128 ...    (or --preflight)
"""

from dataclasses import replace
from typing import Optional

from megatron.entry import start
from megatron.errors import run_main
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.gpt_rules import IDLE, NO_RELATIVE, RULES
from megatron.model.hybrid import RULES as OF_PATTERNS
from megatron.model.hybrid import with_pattern
from megatron.model.kinds.table import KINDS, rules_of, sums_of_kinds
from megatron.model.recipe import Recipe
from megatron.settings.hybrid_pattern import number_of_layers


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    start(argv, recipe())


def recipe() -> Recipe:
    """The recipe of GPT."""
    return Recipe(
        "GPT",
        facts,
        build_model,
        build_datasets,
        defaults=dict(num_layers=number_of_layers),
        rules=(*RULES, NO_RELATIVE, *OF_PATTERNS, *rules_of(*KINDS)),
        idle=IDLE,
        sums=lambda config: {"lm loss": 1.0, **sums_of_kinds(config.model)},
        shares_sequences=True,
        batch_invariant=True,
        starts_from=("megatron.tasks.chat",),  # a GPT after instruction tuning
        normalize_config=with_pattern,
    )


def variant(model_type: str, module: Optional[type] = None, *, facts: type[GPTFacts] = GPTFacts, **more) -> Recipe:
    """The recipe of a variant of GPT (docs/extending.md).

    module: a subclass of `megatron.model.gpt.module.GPT` (default: itself); facts: the class of its facts
    more:   further fields of the `Recipe`: groups, sums, ...
    """

    def build_model(config, mesh, vocab_size, **stage):
        from megatron.model.gpt.module import GPT

        return (module or GPT).of(config, mesh, facts.of(config, vocab_size), **stage)

    plain = module is None and facts is GPTFacts  # only its data or its training differ
    own = {} if plain else dict(facts=facts.of, build_model=build_model)
    return replace(recipe(), **dict(model_type=model_type, starts_from=(), batch_invariant=False) | own | more)


def facts(config, vocab_size) -> GPTFacts:
    """The facts of a GPT: weights, arithmetic, memory."""
    return GPTFacts.of(config, vocab_size)


def build_model(config, mesh, vocab_size, *, layers=None, first=True, last=True, dtype, device):
    """A GPT, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    from megatron.model.gpt.module import GPT

    stage = dict(layers=layers, first=first, last=last, dtype=dtype, device=device)
    return GPT.of(config, mesh, facts(config, vocab_size), **stage)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """Training, validation and test samples of seq_length + 1 tokens each."""
    from megatron.data.gpt_dataset import build_datasets

    return build_datasets(
        config.data,
        config.model.seq_length,
        sizes,
        config.logging.seed,
        eod=tokenizer.eod if tokenizer else None,
        vocab_size=vocab_size,
        log=log,
    )


if __name__ == "__main__":
    run_main(main)
