# SPDX-License-Identifier: Apache-2.0
"""Pretrain BERT: an encoder that finds masked words, and says whether a second sentence follows the first.

    python pretrain_bert.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 \\
        --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 512
    torchrun --nproc-per-node 4 pretrain_bert.py --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 ...
    python pretrain_bert.py --dry-run --world-size 64 ...

docs/encoder_decoder.md says what is where.
"""

from megatron.data.masked_settings import GROUP as MASKED
from megatron.data.masked_settings import MASKED_RULES, MaskedSettings
from megatron.errors import run_main
from megatron.model.bert.facts import BertFacts
from megatron.model.bert.rules import IDLE, RULES
from megatron.model.bert.settings import GROUP, BertSettings, own_settings
from megatron.model.recipe import Recipe
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.tools.pretrain import start


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    start(argv, recipe())


def recipe() -> Recipe:
    """What is trained."""
    return Recipe(
        "BERT",
        BertFacts.of,
        build_model,
        build_datasets,
        groups={GROUP: BertSettings, MASKED: MaskedSettings},
        rules=(*RULES, *MASKED_RULES),
        idle=IDLE,
        sums=sums,
        arrays=arrays,
        collate=collate,
    )


def sums(config) -> dict[str, float]:
    """What is minimised: the loss of masked words, and that of whether sentences follow."""
    return {"lm loss": 1.0, **({"sop loss": 1.0} if own_settings(config).bert_binary_head else {})}


def arrays(config, vocab_size) -> dict[str, SampleArray]:
    """What a sample consists of. types: the sentence that a token is in; padding_mask: 0 for what fills up."""
    length, own = config.model.seq_length, own_settings(config)
    return {
        "text": SampleArray(length, below=vocab_size),
        "types": SampleArray(length, below=max(2, own.num_tokentypes)),
        LABELS: SampleArray(length, below=vocab_size),
        "is_random": SampleArray(0, below=2),
        LOSS_MASK: SampleArray(length, mask=True),
        "padding_mask": SampleArray(length, below=2),
    }


def collate(samples: list) -> list:
    """Labels of words that were not masked may be -1."""
    from megatron.data.named_arrays import without_negative_labels

    return list(map(without_negative_labels, samples))


def build_model(config, mesh, vocab_size, *, layers=None, first=True, last=True, dtype, device):
    """A BERT, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    from megatron.model.bert.module import Bert

    stage = dict(layers=layers, first=first, last=last, dtype=dtype, device=device)
    return Bert.of(config, mesh, BertFacts.of(config, vocab_size), **stage)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """Training, validation and test samples: dicts of `arrays`."""
    if config.data.mock_data:
        from megatron.data.mock_masked import MockMasked

        lengths = config.model.seq_length, vocab_size, config.logging.seed
        return tuple(MockMasked(size, *lengths, split) if size else None for split, size in enumerate(sizes))
    from megatron.data.bert_dataset import build_datasets

    return build_datasets(config, tokenizer, vocab_size, sizes, log)


if __name__ == "__main__":
    run_main(main)
