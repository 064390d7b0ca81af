# SPDX-License-Identifier: Apache-2.0
"""Pretrain a GPT: this file is the whole recipe, and `megatron.training.loop` the story of a run.

    python pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 \\
        --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 8192
    torchrun --nproc-per-node 2 pretrain_gpt.py ...
    torchrun --nproc-per-node 8 pretrain_gpt.py --auto-parallel --max-global-batch-size 64 ...
    srun --ntasks-per-node 8 --gpus-per-task 1 python pretrain_gpt.py ...
    python pretrain_gpt.py --dry-run --world-size 128 ...    (or --preflight)
"""

from megatron.errors import debugging, run_main
from megatron.settings import rank_env
from megatron.settings.parse import parse_pretrain
from megatron.settings.rules import layout_is_open, resolve


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    rank_env.adopt_slurm()
    rank_env.ranks()  # numbers of ranks that are none are told first
    config = parse_pretrain(argv)
    with debugging(config.logging.debug):
        start(config)


def start(config) -> None:
    """Look ahead, or search what the settings leave open, or train."""
    if config.planner.dry_run:
        from megatron.planner.dry_run import dry_run

        return dry_run(config)
    if config.planner.preflight:
        from megatron.planner.preflight.run import preflight

        return preflight(config, recipe)
    if not layout_is_open(config):
        return train(config)
    from megatron.planner.tuning import tuned

    with tuned(config, recipe()) as config:
        train(config)


def train(config) -> None:
    """Train with these settings on the ranks that there are."""
    config = resolve(config, world_size=world_size(config))
    if config.parallel.print_topology:
        return print_topology(config)

    from megatron.training.loop import pretrain

    pretrain(config, recipe())


def print_topology(config) -> None:
    """Every group of ranks, said once."""
    from megatron.mpu.mesh import Mesh, sizes_of

    if rank_env.ranks().rank == 0:
        print(Mesh(0, **sizes_of(config.parallel, world_size(config)), create_groups=False).topology())


def world_size(config) -> int:
    """Ranks that this job was started with; for a look at a topology, ranks that it would have."""
    asked = config.planner.world_size if config.parallel.print_topology else None
    return asked or rank_env.ranks().world_size


def recipe():
    """What is trained."""
    from megatron.model.gpt.facts import GPTFacts
    from megatron.model.recipe import Recipe

    return Recipe("GPT", lambda config, vocab_size: GPTFacts(config.model, vocab_size), build_model, build_datasets)


def build_model(config, mesh, vocab_size, *, layers=None, first=True, last=True, dtype, device):
    """A GPT, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    from megatron.fused_kernels.autocast import autocast_of
    from megatron.model.gpt.module import GPT

    return GPT(
        config.model,
        mesh,
        vocab_size,
        layers=layers,
        first=first,
        last=last,
        sequence_parallel=config.parallel.sequence_parallel,
        kernels=config.kernels,
        recompute=config.recompute,
        autocast=autocast_of(config.precision),
        seed=config.logging.seed,
        dtype=dtype,
        device=device,
    )


def build_datasets(config, tokenizer, vocab_size, sizes, say):
    """Training, validation and test samples of seq_length + 1 tokens each."""
    from megatron.data.gpt_dataset import build_datasets

    return build_datasets(
        config.data,
        config.model.seq_length,
        sizes,
        config.logging.seed,
        eod=tokenizer.eod if tokenizer else None,
        vocab_size=vocab_size,
        say=say,
    )


if __name__ == "__main__":
    run_main(main)
