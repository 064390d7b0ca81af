# SPDX-License-Identifier: Apache-2.0
"""Pretrain BERT: an encoder that finds masked words, and says whether a second sentence follows the first.

    python pretrain_bert.py --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 64 \\
        --micro-batch-size 8 --train-iters 100 --lr 1e-3 --mock-data --vocab-size 512
    torchrun --nproc-per-node 4 pretrain_bert.py --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 ...
    python pretrain_bert.py --dry-run --world-size 64 ...

docs/encoder_decoder.md says what is where.
"""

from megatron.data.masked_settings import GROUP as MASKED
from megatron.data.masked_settings import MASKED_IDLE, MASKED_RULES, MaskedSettings
from megatron.entry import start
from megatron.errors import SettingsError, run_main
from megatron.model.bert.facts import TAKEN, TASKS, BertFacts, TaskFacts, TaskHead
from megatron.model.bert.settings import GROUP, IDLE, RULES, BertSettings, own_settings
from megatron.model.recipe import Recipe
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.settings.rules import word_piece


def main(argv: list[str]) -> None:
    """Check the settings, which needs no torch; then train."""
    start(argv, recipe())


def recipe() -> Recipe:
    """The recipe of BERT."""
    return Recipe(
        "BERT",
        facts,
        build_model,
        build_datasets,
        defaults=dict(tokenizer_type=word_piece),
        groups={GROUP: BertSettings, MASKED: MaskedSettings},
        rules=(*RULES, *MASKED_RULES),
        idle={**IDLE, **MASKED_IDLE},
        sums=sums,
        counts=counts,
        reinitialize=lambda name, stored: name.startswith(TASKS) and not stored,
        arrays=arrays,
        collate=collate,
    )


def facts(config, vocab_size) -> BertFacts:
    """The facts of a BERT; with --task-mixture, of one with a head for each task of labelled texts."""
    heads, own = task_heads(config), own_settings(config)
    return TaskFacts(config.model, vocab_size, own, heads) if heads else BertFacts(config.model, vocab_size, own)


def task_heads(config) -> tuple[TaskHead, ...]:
    """The heads that --task-mixture asks for. Raises SettingsError if one has the name of a sum of the model."""
    masked = config.extra.get(MASKED, MaskedSettings())
    if not masked.task_mixture:
        return ()
    from megatron.data.mixture import tasks_of

    tokens = max(1, round(config.model.seq_length * masked.mask_prob))
    heads = tuple(
        TaskHead(task.name, number, len(task.labels), float(tokens))
        for number, task in enumerate(tasks_of(masked.task_mixture))
        if task.labels
    )
    if taken := next((head.name for head in heads if head.name in TAKEN), None):
        raise SettingsError(
            f"--task-mixture: a task of labelled texts cannot be called {taken!r}",
            f"'{taken} loss' is a loss of the model itself",
            "give it another name",
        )
    return heads


def sums(config) -> dict[str, float]:
    """The weights of the losses: masked words, next-sentence prediction, and a mixture's other tasks."""
    found = {"lm loss": 1.0, **({"sop loss": 1.0} if own_settings(config).bert_binary_head else {})}
    for head in task_heads(config):
        found |= {f"{head.name} loss": 1.0, f"{head.name} accuracy": 0.0, f"{head.name} samples": 0.0}
    return found


def counts(config) -> dict[str, str]:
    """Losses of a mixture's other tasks are logged as the mean of their samples."""
    return {f"{h.name} {name}": f"{h.name} samples" for h in task_heads(config) for name in ("loss", "accuracy")}


def arrays(config, vocab_size) -> dict[str, SampleArray]:
    """The arrays of a sample. types: the sentence of each token; padding_mask: 0 for padding."""
    length, own = config.model.seq_length, own_settings(config)
    heads = task_heads(config)
    of_tasks = {}
    if heads:
        classes, tasks = max(head.classes for head in heads), len(config.extra[MASKED].task_mixture)
        of_tasks = dict(task=SampleArray(0, below=tasks), class_label=SampleArray(0, below=classes))
    return {
        "text": SampleArray(length, below=vocab_size),
        "types": SampleArray(length, below=max(2, own.num_tokentypes)),
        LABELS: SampleArray(length, below=vocab_size),
        "is_random": SampleArray(0, below=2),
        LOSS_MASK: SampleArray(length, mask=True),
        "padding_mask": SampleArray(length, below=2),
        **of_tasks,
    }


def collate(samples: list) -> list:
    """Labels of words that were not masked may be -1."""
    from megatron.data.batch_arrays import without_negative_labels

    return list(map(without_negative_labels, samples))


def build_model(config, mesh, vocab_size, *, layers=None, first=True, last=True, dtype, device):
    """A BERT, or what a rank of the mesh holds of it: the layers of a pipeline stage (default: all)."""
    from megatron.model.bert.module import Bert
    from megatron.model.bert.task_module import TaskBert

    stage, own = dict(layers=layers, first=first, last=last, dtype=dtype, device=device), facts(config, vocab_size)
    return (TaskBert if task_heads(config) else Bert).of(config, mesh, own, **stage)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """Training, validation and test samples: dicts of `arrays`."""
    if config.data.mock_data and not config.extra[MASKED].task_mixture:
        from megatron.data.mock import MockMasked

        lengths = config.model.seq_length, vocab_size, config.logging.seed
        return tuple(MockMasked(size, *lengths, split) if size else None for split, size in enumerate(sizes))
    from megatron.data.bert_dataset import build_datasets

    return build_datasets(config, tokenizer, vocab_size, sizes, log, heads=True)


if __name__ == "__main__":
    run_main(main)
