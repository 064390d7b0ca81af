# SPDX-License-Identifier: Apache-2.0
"""The recipe of instruction tuning: a GPT that learns the answers of conversations, or which of two answers is better.

    python finetune.py --task chat --train-data talks.jsonl --load checkpoints/345M --chat-template plain --save runs/chat
    python finetune.py --task dpo --train-data pairs.jsonl --load runs/chat --save runs/dpo

docs/chat.md has more. The model is a GPT: all that reads GPTs reads its checkpoints.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.backends import backend_of
from megatron.data.file_formats import dataset_files
from megatron.data.gpt_dataset import note_repeats
from megatron.data.json_input import expand
from megatron.errors import CheckpointError, DataError, SettingsError
from megatron.inference import generation_config
from megatron.model.recipe import LM_LOSS, Recipe, named_recipe
from megatron.model.t5.settings import refused
from megatron.settings.declare import Needs, dashed
from megatron.settings.from_checkpoint import saved_record, settings_of_shape, shape_of
from megatron.settings.rules import Rule, of_the_checkpoint
from megatron.settings.schema import GROUPS, Config
from megatron.settings.statements import Statement
from megatron.storage.hub import is_hub
from megatron.storage.urls import location
from megatron.tasks import finetune_start
from megatron.tasks.chat_samples import EncodedTexts, TextEncoder, conversation_samples, end_of_turn, pair_samples
from megatron.tasks.chat_settings import DPO_LOSS, GROUP, REWARDS, ChatSettings, chat_settings
from megatron.tasks.finetune_rules import LENGTHS, no_token_files
from megatron.tasks.finetune_start import beginning, drop_said_otherwise
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.chat_template import ChatTemplate, find_template, template_folders
from megatron.training.hooks import Hook

MODEL_TYPE = "megatron.tasks.chat"
SPLITS = ("train", "valid", "test")
DEFAULTS = dict(
    finetune_start.DEFAULTS,
    lr=2e-5,
    min_lr=0.0,
    lr_decay_style="cosine",
    lr_warmup_fraction=0.03,
    weight_decay=0.0,
    global_batch_size=32,
)
DPO_DEFAULTS = dict(lr=1e-6, lr_warmup_fraction=0.1)
EPOCHS = dict(chat=3, dpo=1)
DROPOUTS = ("hidden_dropout", "attention_dropout")


def recipe() -> Recipe:
    """The recipe of instruction tuning."""
    gpt = named_recipe("GPT")
    return replace(
        gpt,
        model_type=MODEL_TYPE,
        about="Fine-tune a model on conversations.",
        build_datasets=build_datasets,
        own_data=True,
        groups={GROUP: ChatSettings},
        defaults=defaults,
        rules=(*gpt.rules, *CHAT_RULES),
        idle={**gpt.idle, **CHAT_IDLE},
        build_model=build_model,
        sums=sums,
        frozen=reference,
        epoch_samples=epoch_samples,
        starts_from=(gpt.model_type,),
        hooks=(SavesTemplate,),
        normalize_config=normalize_chat_config,
    )


# ---- settings --------------------------------------------------------------------------------------------------------


def own(s) -> ChatSettings:
    """The settings of instruction tuning from the argument of a rule."""
    return chat_settings(s.settings)


def is_dpo(s) -> bool:
    return own(s).task == "dpo"


CHAT_RULES = (
    Rule(
        lambda s: s.mock_data and s.settings.given("train_data"),
        lambda s: f"--mock-data reads no files, and files are given ({own(s).train_data[0]}); drop one or the other",
    ),
    Rule(
        lambda s: not s.mock_data and not own(s).train_data and not s.skip_train,
        lambda s: "there are no conversations to learn: --train-data FILE, or --data-path FILE or FOLDER",
    ),
    Rule(
        lambda s: s.tokenizer == "NullTokenizer" and not s.tokenizer_type and not s.mock_data,
        lambda s: (
            "conversations are text, and no vocabulary is given; --vocab-file vocab.json --merge-file merges.txt, or "
            f"--tokenizer-model FILE{of_the_checkpoint(s)}"
        ),
    ),
    *(
        Rule(
            lambda s, name=name: is_dpo(s) and getattr(s, name),
            lambda s, name=name: (
                f"{dashed(name)} {getattr(s, name):g} is of a loss over words, and --task dpo compares "
                "answers; leave it out"
            ),
        )
        for name in ("label_smoothing", "z_loss_coeff")
    ),
    Rule(
        lambda s: is_dpo(s) and s.loss_averaging != "token",
        lambda s: f"--loss-averaging {s.loss_averaging}: the loss of --task dpo is the mean over pairs; leave it out",
    ),
    Rule(
        lambda s: is_dpo(s) and not own(s).reference_load and not s.mock_data,
        lambda s: "--task dpo compares with a reference, and there is none: --load CHECKPOINTS, or --reference-load",
    ),
    Rule(
        lambda s: own(s).packing and is_dpo(s),
        lambda s: "--packing is of --task chat: a sample of --task dpo is a pair already; leave it out",
    ),
    Rule(
        lambda s: own(s).train_on_prompt and is_dpo(s),
        lambda s: "--train-on-prompt is of --task chat: both answers of a pair have the same prompt; leave it out",
    ),
    Rule(lambda s: not own(s).dpo_beta > 0, lambda s: f"--dpo-beta {own(s).dpo_beta:g} must be above 0"),
    Rule(
        lambda s: not 0 <= own(s).dpo_label_smoothing < 0.5,
        lambda s: f"--dpo-label-smoothing {own(s).dpo_label_smoothing:g} must be at least 0 and below 0.5",
    ),
    Rule(
        lambda s: not s.full_validation,
        lambda s: "--no-full-validation: all conversations of a validation file are evaluated; leave it out",
    ),
    *refused(
        "reset_position_ids reset_attention_mask eod_mask_loss", "conversations are kept apart by --packing itself"
    ),
    *no_token_files("conversations are"),
)
TOKEN_FILES = Needs("token files, as pretraining has them: those of conversations are read whole", lambda s: False)
ALL_TALKS = Needs("batches to count: all conversations of a file are evaluated", lambda s: False)
DPO = Needs("--task dpo", is_dpo)
CHAT_IDLE = {
    **dict.fromkeys(("split", "dataset_type", "verify_data"), TOKEN_FILES),
    **dict.fromkeys(("object_storage_cache_path", "mmap_bin_files"), TOKEN_FILES),
    "data_cache_path": Needs("--train-data", lambda s: own(s).train_data),
    **dict.fromkeys(("eval_iters", "test_iters", "eval_same_samples"), ALL_TALKS),
    **dict.fromkeys(("dpo_beta", "dpo_label_smoothing", "reference_load"), DPO),
}


def defaults(statements: Mapping[str, Statement]) -> dict[str, Any]:
    """`Recipe.defaults`: those of the task, and the shape and tokenizer of the checkpoint that a run begins with."""
    values = {name: one.value for name, one in statements.items()}
    task = str(values.get("task", "chat")).lower()
    chosen = {**DEFAULTS, **(DPO_DEFAULTS if task == "dpo" else {})}
    record, more = beginning(values.get, lambda record: _is_same_task(record, task))
    chosen |= more
    if record is not None:
        kind = record["config"]["model"].get("model_type", "GPT")
        if kind not in ("GPT", MODEL_TYPE):
            raise CheckpointError(
                f"--load {values.get('load')} holds a model of type {kind}, and a GPT answers in conversations",
                do="give the checkpoint of a GPT",
            )
        chosen |= shape_of(record, settings_of_shape(GROUPS), set(values))
        if task == "dpo":  # the reference has no dropout, and differences would be noise
            chosen |= {name: 0.0 for name in DROPOUTS if name not in values}
        if task == "dpo" and "reference_load" not in values:
            chosen["reference_load"] = _reference(record, values, str(more.get("load", values.get("load"))))
    if not set(LENGTHS) & set(values):
        chosen["train_epochs"] = EPOCHS.get(task, 1)
    if chosen.get("train_epochs") or values.get("train_epochs"):
        chosen["eval_epoch"] = 1
    drop_said_otherwise(chosen, values)
    return chosen


def _reference(record: Mapping[str, Any], values: Mapping[str, Any], load: str) -> Optional[str]:
    """The default of --reference-load: the checkpoint that the run begins with, or has begun with."""
    if _is_same_task(record, "dpo") and not values.get("finetune"):
        return record["config"]["extra"][GROUP].get("reference_load")
    return saved_record(load, values.get("ckpt_step"))[0]


def _is_same_task(record: Mapping[str, Any], task: str) -> bool:
    """Whether a checkpoint is of a run of this task, which is resumed."""
    config = record["config"]
    mine = config["model"].get("model_type") == MODEL_TYPE
    return mine and config.get("extra", {}).get(GROUP, {}).get("task") == task


def normalize_chat_config(config: Config) -> Config:
    """`Recipe.normalize_config`: --data-path is a file of conversations, or a folder with train.jsonl."""
    settings, paths = chat_settings(config), config.data.data_path
    if paths:
        files = _files_of(paths, settings)
        config = config.derive("--data-path", data_path=None, **files)
    return config


def _files_of(paths: list[str], settings: ChatSettings) -> dict[str, list[str]]:
    """The files that --data-path names, by setting."""
    if len(paths) > 1 or not Path(paths[0]).is_dir():
        if settings.train_data:
            raise SettingsError(
                f"--data-path {paths[0]} and --train-data {settings.train_data[0]} both name what is learned",
                do="leave one of them out",
            )
        return dict(train_data=list(paths))
    there = {f"{split}_data": Path(paths[0]) / f"{split}.jsonl" for split in SPLITS}
    found = {name: [str(file)] for name, file in there.items() if file.exists() and not getattr(settings, name)}
    if "train_data" not in found and not settings.train_data:
        if not dataset_files(paths[0])[0]:
            do = "give the file, or a folder with train.jsonl or Parquet files"
            raise DataError(f"--data-path {paths[0]} has no train.jsonl", do=do)
        found["train_data"] = list(paths)
    return found


# ---- the model -------------------------------------------------------------------------------------------------------


def build_model(config: Config, mesh, vocab_size: int, **stage):
    """A GPT, or what a rank has of it; with --task dpo one whose last stage compares two answers."""
    gpt = named_recipe("GPT")
    if chat_settings(config).task != "dpo":
        return gpt.build_model(config, mesh, vocab_size, **stage)
    from megatron.tasks.dpo import PairComparison

    return PairComparison.of(config, mesh, gpt.facts(config, vocab_size), **stage)


def sums(config: Config) -> dict[str, float]:
    """`Recipe.sums`: those of a GPT; with --task dpo other ones in the place of its loss."""
    weights = dict(named_recipe("GPT").sums(config))
    if chat_settings(config).task != "dpo":
        return weights
    del weights[LM_LOSS]
    return {DPO_LOSS: 1.0, **dict.fromkeys(REWARDS, 0.0), **weights}


def reference(config: Config) -> Optional[tuple[str, str]]:
    """`Recipe.frozen`."""
    settings = chat_settings(config)
    if settings.task != "dpo" or not settings.reference_load or config.data.mock_data:
        return None  # synthetic samples have a vocabulary of their own
    return "--reference-load", settings.reference_load


# ---- samples ---------------------------------------------------------------------------------------------------------


def epoch_samples(config: Config) -> int:
    """Number of training samples."""
    tokenizer = build_tokenizer(config.tokenizer, _silent)
    samples, _ = samples_of(config, tokenizer, "train", _silent)
    return len(samples) if samples else 1


def build_datasets(config: Config, tokenizer, vocab_size: int, sizes, log):
    """(train, valid, test) samples."""
    if tokenizer is None:
        raise SettingsError(
            "there is no tokenizer for conversations", do="--vocab-file and --merge-file, or --tokenizer-model"
        )
    template, made = template_of(config, tokenizer), []
    if template is not None and template.missing:
        words = ", ".join(template.missing)
        log(f"note: the chat template writes {words}, no special tokens of the vocabulary: they are ordinary text")
    for split in SPLITS:
        samples, notes = samples_of(config, tokenizer, split, log)
        made.append(samples)
        if samples is not None:
            texts = sum(map(len, samples.rows))
            what = "pairs" if chat_settings(config).task == "dpo" else f"conversations in {len(samples):,} samples"
            texts = texts // 2 if what == "pairs" else texts
            log(f" > {split}: {texts:,} {what} ({', '.join(samples.files)})")
            note_repeats(", ".join(samples.files), split, -(-(sizes[0] or 0) // len(samples)), log)
        for note in notes:
            log(f"note: {note}")
    if template is not None and made[0] is not None and (note := ends_note(made[0].texts, template)):
        log(f"note: {note}")
    return tuple(made)


def ends_note(texts: EncodedTexts, template: ChatTemplate) -> Optional[str]:
    """A note that answers do not end with a special token, so that the model does not learn where they end."""
    end = end_of_turn(texts)
    if end in template.special.values():
        return None
    last = "no token in common" if end is None else f"{template.tokenizer.decode([end])!r}, which is text"
    return (
        f"answers end with {last}: the model learns no token that ends an answer, and a server will not know when one "
        "ends; let the template write eos_token after each of the assistant's messages"
    )


def samples_of(config: Config, tokenizer, split: str, log):
    """(samples of a split, notes); None without files."""
    settings, files = chat_settings(config), files_of(config, split)
    if not files:
        return None, []
    texts = encoded_texts(config, tokenizer, split, log)
    pad, length = 0 if tokenizer.eod is None else tokenizer.eod, config.model.seq_length
    if settings.task == "dpo":
        return pair_samples(texts, files, length, pad)
    return conversation_samples(texts, files, length, pad, settings.packing)


def encoded_texts(config: Config, tokenizer, split: str, log):
    """The tokens of a split's files."""
    settings = chat_settings(config)
    dpo = settings.task == "dpo"
    encoder = TextEncoder(tokenizer, template_of(config, tokenizer), dpo, settings.train_on_prompt)
    return encoder.read(files_of(config, split), config.data.data_cache_path, log)


def files_of(config: Config, split: str) -> list[str]:
    """The files of a split: those that are named, or lie in a named folder or dataset of the Hugging Face hub."""
    names = getattr(chat_settings(config), f"{split}_data") or ()
    return [file for name in names for file in _inside(name, f"--{split}-data")]


@cache
def _inside(name: str, flag: str) -> Sequence[str]:
    return expand(name, flag) if is_hub(name) or Path(name).is_dir() else [name]


def template_of(config: Config, tokenizer) -> Optional[ChatTemplate]:
    """The chat template of a run. Raises SettingsError if conversations have none; pairs of texts need none."""
    settings, load = chat_settings(config), config.checkpoint.load
    folders = template_folders([load] if load else [], config.tokenizer)
    found = find_template(folders, tokenizer, settings.chat_template)
    if found is None and settings.task == "chat":
        raise SettingsError(
            "there is no chat template",
            f"none of {', '.join(map(str, folders)) or 'no folder'} has chat_template.jinja, or a "
            "chat_template in tokenizer_config.json",
            "--chat-template plain for a model that knows no turns yet; or chatml, or a Jinja file",
        )
    return found


def _silent(text: str) -> None:
    pass


class SavesTemplate(Hook):
    """Writes the chat template beside the checkpoints, so that whoever serves or exports them has it."""

    def before_training(self, run) -> None:
        save = self.config.checkpoint.save
        if run.rank != 0 or save is None or self.config.data.mock_data or not chat_settings(self.config).train_data:
            return
        tokenizer = build_tokenizer(self.config.tokenizer, _silent)
        template = template_of(self.config, tokenizer)
        if template is None:
            return
        end = end_of_turn(encoded_texts(self.config, tokenizer, "train", _silent))
        folder = location(save)
        files = template.files(end)
        if end in template.special.values():
            files |= generation_config.with_end(folder, end)
        for name, content in files.items():
            backend_of(folder).replace(folder / name, content.encode())
