# SPDX-License-Identifier: Apache-2.0
"""The settings of GLUE's tasks that PaddleFleetX published (its guide to fine-tuning on one device), written out here by
hand, against what `finetune.py --task NAME` trains with where nobody says anything else.
"""

import pytest

from megatron.data.epochs import in_samples
from megatron.model.command_line import parse_any
from megatron.optimizer.lr_schedule import Lengths, learning_rate
from megatron.tasks import finetune
from megatron.tasks.settings import open_task, task_settings

PAIR, ONE, TWO = "sentence1\tsentence2\tlabel", "a text\tanother\t{}", "a text\t{}"
# task: epochs, outputs of the head, metrics, sets of validation, the training file's header and rows, two labels
PUBLISHED = {
    "CoLA": (3, 2, {"matthews"}, 1, None, "s\t{}\t*\ta text", "0 1"),
    "SST2": (3, 2, {"accuracy"}, 1, "sentence\tlabel", TWO, "0 1"),
    "MRPC": (5, 2, {"accuracy", "f1"}, 1, "Quality\t#1 String\t#2 String", "{}\ta text\tanother", "0 1"),
    "QQP": (3, 2, {"accuracy", "f1"}, 1, "question1\tquestion2\tis_duplicate", ONE, "0 1"),
    "STSB": (3, 1, {"pearson", "spearman"}, 1, "sentence1\tsentence2\tscore", ONE, "3.25 1"),
    "MNLI": (3, 3, {"accuracy"}, 2, "sentence1\tsentence2\tgold_label", ONE, "neutral entailment"),
    "QNLI": (3, 2, {"accuracy"}, 1, "question\tsentence\tlabel", ONE, "entailment not_entailment"),
    "RTE": (3, 2, {"accuracy"}, 1, PAIR, ONE, "entailment not_entailment"),
    "WNLI": (5, 2, {"accuracy"}, 1, PAIR, ONE, "0 1"),
}
BATCH, EXAMPLES = 32, 100 * 32


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_task_is_trained_as_published(name, tmp_path):
    epochs, outputs, metrics, sets, header, row, labels = PUBLISHED[name]
    rows = [row.format(label) for label in labels.split()] * (EXAMPLES // 2)
    (tmp_path / "train.tsv").write_text("\n".join([*([header] if header else []), *rows]))
    shape = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --tokenizer-type GPT2BPETokenizer"
    recipe = finetune.recipe()
    config = parse_any(f"--task {name} --train-data {tmp_path}/train.tsv {shape}".split(), recipe=recipe)
    task = open_task(task_settings(config)).task
    assert (task.outputs, set(task.metrics), len(task.valid)) == (outputs, metrics, sets)
    assert (config.model.seq_length, config.batch.global_batch_size, config.batch.train_epochs) == (128, BATCH, epochs)
    by = config.optimizer
    assert (by.optimizer, by.lr, by.adam_eps, by.adam_beta1, by.adam_beta2) == ("adam", 2e-5, 1e-6, 0.9, 0.999)
    assert (by.lr_decay_style, by.lr_warmup_fraction, by.min_lr, by.weight_decay) == ("linear", 0.1, 0.0, 0.0)

    config = in_samples(config, recipe.own_data, recipe.epoch_samples)
    lengths, steps = Lengths.of(config.optimizer, config.batch), epochs * EXAMPLES // BATCH
    rate = lambda step: learning_rate(config.optimizer, lengths, step * BATCH)
    for step in range(0, steps + 1, 10):  # a tenth of all steps from 0 to the rate, the others back to 0
        published = 2e-5 * min(step / (0.1 * steps), (steps - step) / (0.9 * steps))
        assert rate(step) == pytest.approx(published, abs=1e-12), step


def test_what_is_said_otherwise_takes_the_defaults_place(tmp_path):
    """Of the batch and of the warm-up: PaddleFleetX's files say a rank's share, and steps."""
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "a text\t0\na text\t1\n" * 64)
    line = f"--task SST2 --train-data {tmp_path}/train.tsv --num-layers 1 --hidden-size 8 --num-attention-heads 1"
    given = "--tokenizer-type GPT2BPETokenizer --local-batch-size 4 --micro-batch-size 2 --lr-warmup-iters 3"
    recipe = finetune.recipe()
    config = in_samples(parse_any([*line.split(), *given.split()], recipe=recipe), True, recipe.epoch_samples)
    assert config.batch.global_batch_size is None and config.optimizer.lr_warmup_fraction is None
    assert Lengths.of(config.optimizer, config.batch, dp=2).warmup == 3 * 4 * 2
