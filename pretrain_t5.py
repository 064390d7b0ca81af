# SPDX-License-Identifier: Apache-2.0
"""Pretrain an encoder-decoder: T5, its relatives, or one of learned positions, through any pipeline.

    python pretrain_t5.py --encoder-num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 \\
        --decoder-seq-length 32 --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 512
    torchrun --nproc-per-node 4 pretrain_t5.py --pipeline-model-parallel-size 4 --pipeline-schedule zb-h1 ...
    python pretrain_t5.py --dry-run --world-size 64 ...

docs/encoder_decoder.md says what is where.
"""

from megatron.data.masked_settings import GROUP as MASKED
from megatron.data.masked_settings import MASKED_IDLE, MASKED_RULES, MaskedSettings
from megatron.entry import start
from megatron.errors import run_main
from megatron.model.recipe import Recipe
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.settings import GROUP, IDLE, RULES, T5Settings
from megatron.planner.stage_cut import normalize_config
from megatron.settings.declare import Needs
from megatron.settings.rules import word_piece


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    start(argv, recipe())


def recipe() -> Recipe:
    """The recipe of T5."""
    return Recipe(
        "T5",
        T5Facts.of,
        build_model,
        build_datasets,
        groups={GROUP: T5Settings, MASKED: MaskedSettings},
        defaults=dict(num_layers=0, tokenizer_type=word_piece),
        rules=(*RULES, *MASKED_RULES),
        idle={
            **IDLE,
            **MASKED_IDLE,
            "mask_strategy": Needs("pretrain_bert.py: a T5 reads a sentinel", lambda s: False),
        },
        normalize_config=normalize_config,
        arrays=arrays,
        collate=collate,
    )


def arrays(config, vocab_size) -> dict[str, SampleArray]:
    """The arrays of a sample. enc_mask, dec_mask: 1 for tokens, 0 for padding."""
    facts = T5Facts.of(config, vocab_size)
    source, target = facts.source, facts.target
    return {
        "text_enc": SampleArray(source, below=vocab_size),
        "text_dec": SampleArray(target, below=vocab_size),
        LABELS: SampleArray(target, below=vocab_size),
        LOSS_MASK: SampleArray(target, mask=True),
        "enc_mask": SampleArray(source, below=2),
        "dec_mask": SampleArray(target, below=2),
    }


def collate(samples: list) -> list:
    """A mask of a sample may be the number of its tokens, which come first; labels that do not count may be -1."""
    import numpy as np

    from megatron.data.batch_arrays import without_negative_labels

    def masked(sample):
        lengths = {name: len(sample[text]) for name, text in (("enc_mask", "text_enc"), ("dec_mask", "text_dec"))}
        whole = {name: np.arange(size) < sample[name] for name, size in lengths.items() if np.ndim(sample[name]) == 0}
        return {**sample, **whole}

    wanted = {"text_enc", "text_dec", "enc_mask", "dec_mask"}
    samples = [masked(sample) if isinstance(sample, dict) and wanted <= sample.keys() else sample for sample in samples]
    return list(map(without_negative_labels, samples))


def build_model(config, mesh, vocab_size, *, layers=None, first=True, last=True, dtype, device):
    """An encoder-decoder, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    from megatron.model.t5.module import T5

    stage = dict(layers=layers, first=first, last=last, dtype=dtype, device=device)
    return T5.of(config, mesh, T5Facts.of(config, vocab_size), **stage)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """Training, validation and test samples: dicts of `arrays`."""
    if config.data.mock_data and not config.extra[MASKED].task_mixture:
        from megatron.data.mock import MockPairs

        facts, seed = T5Facts.of(config, vocab_size), config.logging.seed
        lengths = facts.source, facts.target, vocab_size, seed
        return tuple(MockPairs(size, *lengths, split) if size else None for split, size in enumerate(sizes))
    from megatron.data.t5_dataset import build_datasets

    return build_datasets(config, tokenizer, vocab_size, sizes, log)


if __name__ == "__main__":
    run_main(main)
