# SPDX-License-Identifier: Apache-2.0
"""The recipe of fine-tuning: a trunk with a head or a pattern, the examples of a task, and its evaluation."""

from megatron.errors import DataError, SettingsError
from megatron.model.kinds.table import sums_of_kinds
from megatron.model.recipe import SCRIPTS, Recipe
from megatron.tasks.backbones import (
    BACKBONES,
    DEFAULT,
    HEAD,
    chooser_facts,
    classifier_facts,
    find_backbone,
    half_of,
    normalize_trunk_config,
    pattern_facts,
    trunk_idle,
    trunk_rules,
)
from megatron.tasks.finetune_rules import TASK_IDLE, TASK_RULES, backbone_of, finds_words, pooling_of
from megatron.tasks.finetune_start import MODEL_TYPE, defaults, groups
from megatron.tasks.settings import GROUP, LM_LOSS, LOSS, examples_of, open_task, said_in_full, task_settings


def recipe() -> Recipe:
    """The recipe of fine-tuning."""
    return Recipe(
        MODEL_TYPE,
        facts,
        build_model,
        build_datasets,
        about="Fine-tune a model on a task.",
        own_data=True,
        groups=groups(),
        defaults=defaults,
        rules=(*trunk_rules(backbone_of), *TASK_RULES),
        idle={**trunk_idle(backbone_of, pooling_of), **TASK_IDLE},
        sums=sums,
        perplexities=(LM_LOSS,),
        arrays=arrays,
        epoch_samples=epoch_samples,
        measures=measures,
        # A BERT has others in the unit of its head for words
        reinitialize=lambda name, stored: name == f"{HEAD}.weight",
        starts_from=(*BACKBONES, *SCRIPTS),
        part=part_of_trunk,
        normalize_config=normalize_task_config,
        # Encoders leave padding out
        predicts=lambda config: "all" if task_settings(config).backbone == DEFAULT else "state",
    )


def normalize_task_config(config):
    """`Recipe.normalize_config`; the rules report an unknown trunk. --data-path is the task's."""
    settings, data = task_settings(config), config.data
    if data.data_path:
        task_data = settings.task_data or " ".join(data.data_path)
        config = config.derive("--data-path", data_path=None, task_data=task_data)
    settings, name = task_settings(config), settings.backbone
    if name not in BACKBONES:
        return config
    config = said_in_full(config, BACKBONES[name].pooled)
    trained = config.optimizer.train_only or []
    if config.model.lora_rank is not None and settings.pet_pattern is None and f"{HEAD}.*" not in trained:
        config = config.derive("--lora-rank", train_only=[*trained, f"{HEAD}.*"])  # it is new
    return normalize_trunk_config(name, config, settings.pet_pattern is not None, settings.pooling)


def part_of_trunk(config, saved):
    """`Recipe.part`. A new head has this run's pooling, and a pattern is this run's own."""
    extra, settings = saved.get("extra", {}), task_settings(config)
    kept = {name: value for name, value in extra.get(GROUP, {}).items() if name not in ("pooling", "pet_pattern")}
    saved = {**saved, "extra": {**extra, GROUP: kept}}
    half = half_of(settings.backbone, settings.pooling)
    return half.of(saved) if half else saved


def facts(config, vocab_size: int):
    """The facts of the fine-tuned model."""
    settings = task_settings(config)
    if finds_words(settings):
        return pattern_facts(settings.backbone, config, vocab_size)
    task = open_task(settings).task
    if settings.pet_pattern is None:
        outputs, options = (1, task.outputs) if task.options else (task.outputs, 1)
        return classifier_facts(settings.backbone, config, vocab_size, outputs, options)
    tokens = find_backbone(settings.backbone).cloze_class().label_tokens
    return chooser_facts(settings.backbone, config, vocab_size, task.outputs, tokens)


def build_model(config, mesh, vocab_size, **stage):
    """Build this rank's part of the trunk with a head; with a pattern, of the pretrained model."""
    from megatron.tasks.classifier import classifier_of, label_chooser_of, span_finder_of

    settings = task_settings(config)
    backbone = find_backbone(settings.backbone)
    kind = backbone.module_class()
    if open_task(settings).task.spans:
        kind = span_finder_of(kind)
    elif settings.pet_pattern is None:
        kind = classifier_of(kind, settings.pooling or backbone.pooled, settings.word_dropout)
    elif not finds_words(settings):
        kind = label_chooser_of(kind, backbone.cloze_class().label_tokens)
    return kind.of(config, mesh, facts(config, vocab_size), **stage)


def sums(config) -> dict[str, float]:
    return {LM_LOSS if finds_words(task_settings(config)) else LOSS: 1.0, **sums_of_kinds(config.model)}


def epoch_samples(config) -> int:
    """Number of training examples."""
    settings = task_settings(config)
    examples = examples_of(settings, "train")
    if examples is None and config.batch.skip_train:
        return 1  # not trained
    if examples is None:
        raise DataError(
            f"--task {settings.task}: there is no training file", do="--data-path DIR, or --train-data FILE"
        )
    return len(examples.rows)


def build_datasets(config, tokenizer, vocab_size, sizes, log):
    """(train, valid, test) samples of the task."""
    from megatron.tasks.samples import TaskSamples, longest_cut

    backbone = find_backbone(task_settings(config).backbone)
    settings, length, task = task_settings(config), config.model.seq_length, open_task(task_settings(config)).task
    if config.data.mock_data:
        return mock_datasets(config, tokenizer, vocab_size, sizes, log)
    if tokenizer is None:
        raise SettingsError(
            "there is no tokenizer for the task's texts", do="--vocab-file and --merge-file, or --tokenizer-model"
        )
    examples_by_split = {split: examples_of(settings, split) for split in ("train", "valid", "test")}
    for split, examples in examples_by_split.items():
        log_examples(log, open_task(settings), split, examples)
    if settings.pet_pattern is not None:
        from megatron.tasks.pet import pet_datasets

        return pet_datasets(settings, examples_by_split, tokenizer, cloze_of(config, tokenizer, vocab_size), log)
    reader = backbone.reader_class().of(config, tokenizer, vocab_size)
    if task.spans:
        return span_datasets(examples_by_split, tokenizer, reader, log)
    hidden, soft = reader.hidden_word(tokenizer) if settings.word_dropout > 0 else None, bool(settings.soft_labels)
    made = [
        examples and TaskSamples(examples, task, tokenizer, reader, whole=split != "train", hidden=hidden, soft=soft)
        for split, examples in examples_by_split.items()
    ]
    if made[0] and (cut := longest_cut(made[0])):
        looked = min(2000, len(made[0]))
        log(f" > {cut} of {looked} training examples are longer than --seq-length {length} and lose their end")
    return tuple(made)


def span_datasets(examples_by_split, tokenizer, reader, log):
    """(train, valid, test) samples of a task whose answers are pieces of a text."""
    from megatron.tasks.spans import SpanSamples

    made = [
        examples and SpanSamples(examples, tokenizer, reader, whole=split != "train")
        for split, examples in examples_by_split.items()
    ]
    looked = 2000
    for split, samples in zip(examples_by_split, made):
        if samples and (cut := samples.questions_cut(looked)):
            count, most = min(looked, len(samples.examples.rows)), samples.longest_question
            log(f" > {split}: {cut} of {count} questions are longer than {most} tokens and lose their end")
    if made[1] and len(made[1]) > len(made[1].examples.rows):
        questions, found = len(made[1].examples.rows), len(made[1])
        log(f" > {questions:,} questions of validation have {found:,} windows of {reader.length} tokens")
    return tuple(made)


def cloze_of(config, tokenizer, vocab_size):
    """The pattern reader for a run's trunk."""
    backbone = find_backbone(task_settings(config).backbone)
    return backbone.cloze_class().of(backbone.divisible(config), tokenizer, vocab_size)


def mock_datasets(config, tokenizer, vocab_size, sizes, log):
    """Mock samples with the same arrays."""
    settings = task_settings(config)
    task, soft = open_task(settings).task, bool(settings.soft_labels)

    def made(kind: type, *own, **more) -> tuple:
        common = (*own, vocab_size, config.logging.seed)
        return tuple(kind(size, *common, split, **more) if size else None for split, size in enumerate(sizes))

    if settings.pet_pattern is not None:
        from megatron.tasks.pet import MockPatterns

        chosen = None if finds_words(settings) else task
        return made(MockPatterns, cloze_of(config, None, vocab_size), task=chosen, soft=soft)
    from megatron.tasks.samples import MockTaskSamples
    from megatron.tasks.spans import MockSpanSamples

    reader = find_backbone(settings.backbone).reader_class().of(config, None, vocab_size)
    if task.spans:
        return made(MockSpanSamples, reader)
    hidden = reader.hidden_word(None) if settings.word_dropout > 0 else None
    return made(MockTaskSamples, task, reader, hidden=hidden, soft=soft)


def arrays(config, vocab_size):
    """The arrays of a sample."""
    settings = task_settings(config)
    backbone, soft = find_backbone(settings.backbone), bool(settings.soft_labels)
    if settings.pet_pattern is not None:
        cloze, own = backbone.cloze_class(), backbone.divisible(config)
        if finds_words(settings):
            return cloze.arrays(own, vocab_size)
        return cloze.choice_arrays(own, vocab_size, open_task(settings).task, soft)
    from megatron.tasks.samples import sample_arrays

    text = backbone.reader_class().arrays(config, vocab_size)
    if open_task(settings).task.spans:
        from megatron.tasks.spans import span_arrays

        return span_arrays(text, config.model.seq_length)
    return sample_arrays(open_task(settings).task, text, settings.word_dropout > 0, soft)


def log_examples(log, opened, split: str, examples) -> None:
    """Log the number of examples, and notes on those left out."""
    if examples is None:
        return
    files = ", ".join(str(file) for _, file in opened.files[split])
    log(f" > {split}: {len(examples.rows):,} examples of {opened.task.name} ({files})")
    for note in examples.notes:
        log(f"note: {note}")


def measures(config):
    """The measures of evaluations: the task's metrics."""
    from megatron.tasks.evaluation import refuse_folder

    refuse_folder(task_settings(config).predictions)
    if finds_words(task_settings(config)):
        from megatron.tasks.pet import PetMeasures

        return PetMeasures(config)
    from megatron.tasks.evaluation import SpanMeasures, TaskMeasures

    return (SpanMeasures if open_task(task_settings(config)).task.spans else TaskMeasures)(config)


# ---- settings that follow from the task and from the checkpoint ------------------------------------------------------
