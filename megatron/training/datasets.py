# SPDX-License-Identifier: Apache-2.0
"""Builds the vocabulary, datasets and data loaders of a run."""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

from megatron.data import gpt_dataset, manifest
from megatron.data.blend import parse_blend
from megatron.data.indexed import bare_prefix
from megatron.data.loader import MicroBatchLoader
from megatron.data.remote import local_prefix
from megatron.data.requests import open_requests
from megatron.data.teacher_logits import LogitsStore
from megatron.errors import DataError, SettingsError
from megatron.model.recipe import Recipe
from megatron.mpu.initialize import RankContext
from megatron.settings import schema
from megatron.settings.batch import batch_size, total_iterations, total_samples
from megatron.settings.declare import dashed
from megatron.settings.statements import in_users_words
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.embedding_rows import RowsTokenizer, rows_of, rows_of_model, within
from megatron.training.state import State


def build_vocabulary(
    config: schema.Config, log, record: Optional[Mapping[str, Any]] = None
) -> tuple[Optional[Any], int]:
    """Build the tokenizer: (tokenizer or None, vocabulary size without padding).

    record: state.json of the checkpoint that the run begins with: its model's rows are the run's if this is its tokenizer
    """
    tokenizer = build_tokenizer(config.tokenizer, log)
    of_model = rows_of_model(config, tokenizer, record)
    rows, remark = rows_of(config.tokenizer, tokenizer.vocab_size, of_model, config.model.published_shape)
    tokenizer = within(tokenizer, rows)
    for note in (remark, tokenizer.note if isinstance(tokenizer, RowsTokenizer) else ""):
        if note:
            log(f"note: {in_users_words(note, config.statements)}")
    return tokenizer, rows


def verify_data(data: schema.Data, context: RankContext, log) -> None:
    """Verify the checksums of all token files, divided among the ranks. All ranks raise DataError together."""
    given = {
        dashed(name): getattr(data, name)
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    }
    blends = [parse_blend(words, flag) for flag, words in given.items() if words]
    prefixes = sorted({bare_prefix(prefix) for blend in blends for prefix in blend.prefixes})
    started, problems = time.perf_counter(), []
    try:
        for prefix in prefixes:
            problems += manifest.verify(local_prefix(prefix, data, log), context.mesh.rank, context.mesh.world_size)
    except DataError as missing:
        problems.append(str(missing))
    problems = sorted({problem for part in context.all_gather_object(problems) for problem in part})
    if problems:
        raise DataError(
            "token files differ from what was written", "\n  ".join(problems[:8]), "copy or preprocess them again"
        )
    log(f" > verified {len(prefixes)} dataset{'s' * (len(prefixes) > 1)} in {time.perf_counter() - started:.1f} s")


def dataset_sizes(
    batch: schema.Batch, dp: int, full_validation: bool = False, state: Optional[State] = None
) -> tuple[int, int, int]:
    """The numbers of samples for training, validation and testing, counted as in Megatron-LM.

    full_validation: the dataset decides its size; the number returned here is for synthetic data
    state:           the state of a resumed run, whose validations continue after the samples of earlier ones
    """
    iterations = total_iterations(batch, dp)
    evaluations = iterations // batch.eval_interval + 1 if batch.eval_interval else 1
    if batch.eval_epoch and batch.train_epochs:
        evaluations += batch.train_epochs // batch.eval_epoch
    each, test = (count * batch.global_batch_size for count in (batch.eval_iters, batch.tested_batches))
    valid = evaluations * each
    if state:
        done = state.iteration // batch.eval_interval if batch.eval_interval else 0
        upcoming = max(1, evaluations - done) + state.evaluation_due
        valid = max(valid, state.consumed_valid_samples + upcoming * each)
    if full_validation:
        return total_samples(batch, dp), each or batch.global_batch_size, test
    return total_samples(batch, dp), each if batch.eval_same_samples else valid, test


def build_datasets(
    config: schema.Config, recipe: Recipe, tokenizer, vocab_size: int, context: RankContext, log, state: State
):
    """Build the recipe's datasets (train, valid, test). `--mock-data` replaces a recipe's own samples by synthetic ones.

    state: the state at the start of this launch
    """
    sizes = dataset_sizes(config.batch, context.mesh.dp.size, config.data.full_validation, state)
    if folder := config.distillation.teacher_logits:
        order = LogitsStore(folder).settings  # students of one folder have its samples, in its order
        config, sizes = config.derive("--teacher-logits", seed=order.seed), (order.samples, *sizes[1:])
        check_stored(config, context.mesh.dp.size, order.samples)
    sizes = gpt_dataset.SampleCounts(sizes, valid_order=state.valid_order)
    if recipe.own_data and config.data.mock_data and recipe.arrays is None:
        eod = tokenizer.eod if tokenizer else None
        length, seed = config.model.seq_length, config.logging.seed
        return gpt_dataset.build_datasets(config.data, length, sizes, seed, eod=eod, vocab_size=vocab_size, log=log)
    datasets = recipe.build_datasets(config, tokenizer, vocab_size, sizes, log)
    check_datasets(config, recipe, datasets, sizes, state.consumed_valid_samples)
    if datasets[0] is None and total_iterations(config.batch, context.mesh.dp.size):
        if recipe.own_data:
            raise SettingsError("there is no training data", f"{recipe.model_type} gives none for {sizes[0]:,} samples")
        raise SettingsError("there is no training data", f"--split {config.data.split}", "give training a share")
    return datasets


def check_stored(config: schema.Config, dp: int, stored: int) -> None:
    """Raise DataError if a run without repetitions needs more samples than there are stored logits for."""
    needed = total_samples(config.batch, dp)
    if config.data.dataloader_type != "cyclic" and needed > stored:
        raise DataError(
            f"{config.distillation.source} has the logits of {stored:,} samples, and this run trains on {needed:,}",
            do="store more (--train-samples), train less, or repeat them with --dataloader-type cyclic",
        )


def check_datasets(
    config: schema.Config, recipe: Recipe, datasets, sizes: tuple[int, int, int], validated: int = 0
) -> None:
    """Raise DataError unless a recipe returns three datasets, each None or long enough for the whole run.

    validated: samples of validations before this launch
    """
    if not isinstance(datasets, (tuple, list)) or len(datasets) != 3:
        value = f"{len(datasets)} of them" if isinstance(datasets, (tuple, list)) else type(datasets).__name__
        raise DataError(
            f"build_datasets of {recipe.model_type} returned {value}",
            "it must return (train, valid, test), each a dataset or None",
            "return None for a missing one: docs/extending.md#a-dataset",
        )
    batch, cyclic = config.batch, config.data.dataloader_type == "cyclic"
    size = batch.global_batch_size
    count = f"--train-samples {batch.train_samples}" if batch.train_samples else f"--train-iters {batch.train_iters}"
    if not batch.train_samples and not batch.size_flag:
        count += f" x --global-batch-size {size}"
    once = f"--eval-iters {batch.eval_iters} x --global-batch-size {size}"
    test = once if batch.test_iters is None else f"--test-iters {batch.test_iters} x --global-batch-size {size}"
    evaluations = (sizes[1] - validated) // max(batch.eval_iters * size, 1)
    valid = f"{evaluations} evaluations x {once}" if evaluations > 1 else once
    needs = count, f"{validated:,} before the checkpoint, then {valid}" if validated else valid, test
    fewer = "a shorter run", "--eval-same-samples or fewer of --eval-iters", f"fewer of {test.split()[0]}"
    for dataset, split, wanted, need, do in zip(datasets, ("training", "validation", "testing"), sizes, needs, fewer):
        if dataset is None or wanted == 0 or (split == "validation" and config.data.full_validation):
            continue
        if split == "testing" and getattr(dataset, "whole", False):
            continue
        name = type(dataset).__name__
        if not hasattr(dataset, "__len__"):
            raise DataError(f"{name}, the dataset for {split}, has no length", do="give it a __len__")
        if len(dataset) < (1 if cyclic else wanted):
            raise DataError(
                f"{name} has {len(dataset):,} samples for {split}, {wanted:,} are needed ({need})",
                do=f"give it more samples, ask for {do}, or repeat them with --dataloader-type cyclic",
            )


def build_batches(
    config: schema.Config, recipe: Recipe, context: RankContext, datasets, tokenizer, vocab_size: int
) -> list[Optional[MicroBatchLoader]]:
    """Build a loader for each dataset that is not None.

    All ranks of a tensor or pipeline group get the same micro-batches. Context parallel ranks get rows of the same samples.
    """
    dp, cp = context.mesh.dp, context.mesh.cp
    batch = config.batch

    def constant(consumed: int) -> tuple[int, int]:
        return batch.global_batch_size, batch.global_batch_size // batch.micro_batch_size // dp.size

    def ramped(consumed: int) -> tuple[int, int]:
        return batch_size(batch, dp.size, consumed)

    return [
        dataset
        and MicroBatchLoader(
            dataset,
            config.data,
            micro_batch_size=batch.micro_batch_size,
            eod=tokenizer.eod if tokenizer else None,
            dp_rank=dp.rank,
            dp_size=dp.size,
            cp_rank=cp.rank,
            cp_size=cp.size,
            next_step=sizes,
            seq_length=config.model.seq_length,
            vocab_size=vocab_size,
            pin_memory=context.device.type == "cuda",
            whole=whole,
            collate=recipe.collate,
            arrays=recipe.arrays and recipe.arrays(config, vocab_size),
            refuse=tokenizer.refuse if tokenizer else lambda ids, where: None,
            depths=config.model.depths,
        )
        for dataset, sizes, whole in zip(
            datasets,
            (ramped, constant, constant),
            (False, config.data.full_validation, getattr(datasets[2], "whole", False)),
            strict=True,
        )
    ]


def build_requests(
    config: schema.Config, recipe: Recipe, context: RankContext, tokenizer, vocab_size: int, log
) -> Optional[MicroBatchLoader]:
    """Build the loader of --eval-requests; None without it. Raises SettingsError for a model that cannot score tokens."""
    path = config.batch.eval_requests
    if path is None:
        return None
    if recipe.arrays and recipe.arrays(config, vocab_size):
        raise SettingsError(
            f"--eval-requests {path}: a model of type {recipe.model_type} does not continue texts",
            do="leave the flag out",
        )
    requests = open_requests(path, tokenizer, config.model.seq_length, log)
    # A text without context starts after an end-of-document token: the tokens after it count.
    plain = replace(config, data=replace(config.data, eod_mask_loss=False, collate_fn=None))
    datasets = (None, None, requests)
    return build_batches(plain, replace(recipe, collate=None), context, datasets, tokenizer, vocab_size)[2]
