# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of the settings of fine-tuning (`settings.rules`), and what its settings need for an effect."""

from typing import Optional

from megatron.model.t5.settings import refused
from megatron.settings.declare import Needs, dashed
from megatron.settings.groups.kernels import CUDA
from megatron.settings.rules import Rule, of_the_checkpoint
from megatron.tasks.backbones import BACKBONES, DEFAULT, both
from megatron.tasks.settings import TaskSettings, open_task, task_settings

FILES = ("data_path", "task_data", "train_data", "valid_data", "test_data", "soft_labels")
LENGTHS = ("train_epochs", "train_iters", "train_samples")  # settings of the length of training; one of them is used


def no_token_files(words: str) -> tuple[Rule, ...]:
    """The rules that --train-data-path and its like, of pretraining, are not given. words: of what --train-data has"""
    return tuple(
        Rule(
            lambda s, name=name: name in s.paths,
            lambda s, name=name: (
                f"--{name}-data-path is for token files, as pretraining has them; {words} --{name}-data"
            ),
        )
        for name in ("train", "valid", "test")
    )


TASK_RULES = (
    Rule(  # --data-path is the task's by now, so the rule of pretraining does not see it
        lambda s: s.mock_data and given_files(s),
        lambda s: (
            f"--mock-data reads no files, and files are given ({', '.join(given_files(s))}); drop one or the other"
        ),
    ),
    Rule(lambda s: not_above(s, "patience", 0), lambda s: f"--patience {own(s).patience} must be at least 1"),
    Rule(
        lambda s: not_above(s, "examples_per_class", 0),
        lambda s: f"--examples-per-class {own(s).examples_per_class} must be at least 1",
    ),
    Rule(
        lambda s: bool(own(s).pet_pattern) != bool(own(s).pet_verbalizer),
        lambda s: "--pet-pattern and --pet-verbalizer belong together; give both, or neither",
    ),
    Rule(  # which rules.tokenizer_type has for data without files
        lambda s: s.tokenizer == "NullTokenizer" and not s.tokenizer_type,
        lambda s: (
            "the task is text, and no vocabulary is given; --vocab-file vocab.json --merge-file merges.txt, or "
            f"--tokenizer-model FILE{of_the_checkpoint(s)}"
        ),
    ),
    Rule(
        lambda s: own(s).backbone not in BACKBONES,
        lambda s: f"--backbone {own(s).backbone}: fine-tuning knows {', '.join(BACKBONES)}",
    ),
    Rule(
        lambda s: own(s).pooling and own(s).pet_pattern,
        lambda s: f"--pooling {own(s).pooling} is of a head, and --pet-pattern has none; leave one of the two out",
    ),
    Rule(
        lambda s: own(s).soft_labels and (finds_words(own(s)) or own(s).examples_per_class),
        lambda s: (
            "--soft-labels are probabilities of all training examples; leave out "
            + ("--pet-loss words" if finds_words(own(s)) else "--examples-per-class")
        ),
    ),
    Rule(
        lambda s: not 0 <= own(s).word_dropout < 1,
        lambda s: f"--word-dropout {own(s).word_dropout} must be at least 0 and less than 1",
    ),
    Rule(
        lambda s: own(s).word_dropout and own(s).pet_pattern,
        lambda s: (
            f"--word-dropout {own(s).word_dropout} hides words from a head, and --pet-pattern has none; leave one of "
            "the two out"
        ),
    ),
    Rule(
        lambda s: (
            own(s).pooling
            and own(s).backbone in BACKBONES
            and own(s).pooling not in BACKBONES[own(s).backbone].poolings
        ),
        lambda s: (
            f"--pooling {own(s).pooling}: the head of a {own(s).backbone} sees one of "
            f"{', '.join(BACKBONES[own(s).backbone].poolings)}; its first token knows no other, or is the only one"
        ),
    ),
    Rule(
        lambda s: not s.full_validation,
        lambda s: "--no-full-validation: metrics are over all examples of a validation file; leave it out",
    ),
    *(
        # Encoders have their own
        Rule(lambda s, rule=rule: own(s).backbone == DEFAULT and rule.broken(s), rule.message)
        for rule in refused("reset_position_ids reset_attention_mask eod_mask_loss", "a sample is one text, or a pair")
    ),
    *(
        Rule(
            lambda s, name=name: getattr(s, name) and not finds_words(own(s)),
            lambda s, name=name: (
                f"{dashed(name)} {getattr(s, name)}: it is of a loss over words, in pretraining and with "
                "--pet-loss words; leave it out"
            ),
        )
        for name in ("label_smoothing", "z_loss_coeff")
    ),
    Rule(
        lambda s: s.settings.distillation.distils,
        lambda s: (
            f"{s.settings.distillation.source}: a teacher's logits are learned in pretraining; a task learns what models "
            "have predicted from --soft-labels"
        ),
    ),
    *(
        Rule(
            lambda s, name=name: getattr(own(s), name) and finds_spans(s),
            lambda s, name=name: (
                f"{dashed(name)}: the answers of {own(s).task} are pieces of its texts, and no classes; leave it out"
            ),
        )
        for name in ("pet_pattern", "soft_labels", "examples_per_class", "word_dropout")
    ),
    Rule(
        lambda s: finds_spans(s) and own(s).backbone not in FINDERS,
        lambda s: (
            f"--task {own(s).task}: its answers are pieces of a text, which {' and '.join(FINDERS)} find; a "
            f"{own(s).backbone}'s last states are those of its decoder"
        ),
    ),
    Rule(
        lambda s: finds_spans(s) and s.seq_length < 8,
        lambda s: f"--seq-length {s.seq_length} must be at least 8: a question and a part of its text",
    ),
    *no_token_files("the task's file is"),
    Rule(
        lambda s: own(s).backbone != DEFAULT and s.seq_length < 4,
        lambda s: f"--seq-length {s.seq_length} must be at least 4: special tokens take part of it",
    ),
)
FINDERS = [name for name, row in BACKBONES.items() if row.token_states]
JUDGED = Needs(
    "a validation file, and evaluations ahead of the end (--eval-epoch, --eval-interval)",
    lambda s: open_task(own(s)).files["valid"] and s.settings.validates_early(s.dp),
)
PATTERN = Needs("--pet-pattern", lambda s: own(s).pet_pattern)
WORDS_LOSS = Needs("--pet-loss words", lambda s: finds_words(own(s)))
TOKEN_FILES = Needs("token files, as pretraining has them: those of a task are read whole", lambda s: False)
ALL_EXAMPLES = Needs("batches to count: all examples of a file are evaluated", lambda s: False)
TASK_IDLE = {
    "pet_loss": PATTERN,
    "final_logit_softcapping": PATTERN,
    "untie_embeddings_and_output_weights": PATTERN._replace(
        words="--pet-pattern, or a checkpoint to compare it with", met=lambda s: own(s).pet_pattern or s.load
    ),
    "cross_entropy_chunk": WORDS_LOSS,
    "cross_entropy_loss_fusion": both(CUDA, WORDS_LOSS),
    **dict.fromkeys(("split", "dataset_type", "data_cache_path", "verify_data"), TOKEN_FILES),
    **dict.fromkeys(("object_storage_cache_path", "mmap_bin_files"), TOKEN_FILES),
    **dict.fromkeys(("eval_iters", "test_iters", "eval_same_samples"), ALL_EXAMPLES),
    "pooling": Needs("a head on one state of a text; answers have scores at each token", lambda s: not finds_spans(s)),
    "patience": JUDGED,
    "stop_at_loss": JUDGED,
}


def own(s) -> TaskSettings:
    """The task's settings from the argument of a rule."""
    return task_settings(s.settings)


def given_files(s) -> list[str]:
    """The given files of the task, as the user wrote them."""
    return [given.words for name in FILES if (given := s.settings.given(name)) and given.is_request]


def backbone_of(s) -> str:
    """The kind of trunk from the argument of a rule."""
    return own(s).backbone


def pooling_of(s) -> Optional[str]:
    """--pooling or None, from the argument of a rule."""
    return own(s).pooling


def finds_spans(s) -> bool:
    """Whether the task's answers are pieces of a text, from the argument of a rule."""
    return open_task(own(s)).task.spans


def not_above(s, name: str, least: int) -> bool:
    value = getattr(own(s), name)
    return value is not None and value <= least


def finds_words(settings: TaskSettings) -> bool:
    """Whether the words of labels are trained and scored as in pretraining."""
    return settings.pet_pattern is not None and settings.pet_loss == "words"
