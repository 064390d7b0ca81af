# SPDX-License-Identifier: Apache-2.0
"""Store a teacher's largest logits for the samples of a training, from which `--teacher-logits FOLDER` distils.

    python -m megatron.tools.teacher_logits --load teacher --data-path corpus_text_document --train-samples 16000 \\
        --top-k 64 --output logits
    torchrun --nproc-per-node 8 -m megatron.tools.teacher_logits ... --tensor-model-parallel-size 2

Seed and number of samples define their order, which students of this folder follow, whatever their seed, layout, batch
size and length. Groups of --tensor-model-parallel-size ranks share the files. The same command continues an interrupted
one.
"""

import time
from dataclasses import dataclass, replace
from typing import Literal, Optional

from megatron.errors import DataError, SettingsError, run_main
from megatron.guard.job import on_ranks
from megatron.settings import rank_env
from megatron.settings.declare import dashed
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Data, Parallel, TokenizerSettings, setting
from megatron.settings.statements import given_values
from megatron.storage.urls import location
from megatron.telemetry.figures import size as in_units


@dataclass(frozen=True)
class TeacherLogitsOptions:
    """The teacher, the samples, and what is stored."""

    load: str = setting("folder of the teacher's checkpoints, or one checkpoint")
    output: str = setting("folder for the logits")
    train_samples: int = setting("samples to store: as many as the students train on, or those of an epoch")
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    top_k: int = setting("largest logits of each token to store", 64, "--logits-save-top-k")
    kd_temperature: float = setting("temperature of the students", 1.0)
    seq_length: Optional[int] = setting("tokens of a sample (default: as the teacher was trained)", None)
    seed: int = setting("seed of the order of samples", 1234)
    micro_batch_size: int = setting("samples side by side", 8, "--batch-size")
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )


COMMON = (*TeacherLogitsOptions.__dataclass_fields__, "data_path", "train_data_path", "split", "mock_data")


def main(argv: list[str]) -> None:
    """Parse, load the teacher, store what is missing."""
    rank_env.adopt_launcher()
    groups, given = parse_with_record(
        argv,
        dict(logits=TeacherLogitsOptions, data=Data, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.teacher_logits",
        description="Store a teacher's largest logits for the samples of a training.",
        common=COMMON,
    )
    options, data = groups["logits"], groups["data"]
    with failing_in_users_words(given):
        check(options, data)
        parallel = Parallel(tensor_model_parallel_size=options.tensor_model_parallel_size)
        tokenizer = given_values(TokenizerSettings, given)
        work = lambda context: store_logits(options, data, tokenizer, context)
        on_ranks(parallel, options.device, work, options.load)


def check(options: TeacherLogitsOptions, data: Data) -> None:
    """Raise SettingsError for numbers out of range, and without data."""
    for name in ("train_samples", "top_k", "micro_batch_size", "seq_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise SettingsError(f"{dashed(name)} {value} must be at least 1")
    if options.kd_temperature <= 0:
        raise SettingsError(f"--kd-temperature {options.kd_temperature} must be above 0")
    if not data.files and not data.mock_data:
        raise SettingsError("there are no samples", do="give --data-path, or --mock-data")


def store_logits(options: TeacherLogitsOptions, data: Data, tokenizer: dict, context) -> None:
    """Store the files that are missing, on the ranks of a job (`mpu.initialize.RankContext`)."""
    from megatron.checkpoint.choose import newest
    from megatron.inference.load import load_model

    def say(text: str) -> None:
        if context.is_rank_zero:
            print(text, flush=True)

    load = context.from_rank_zero(lambda: str(newest(location(options.load), options.ckpt_step)))
    loaded = load_model(load, device=context.device, precision=options.precision, mesh=context.mesh)
    settings = settings_of(options, data, loaded)
    store = create_store(options.output, settings, context)
    loader = samples_of(options, replace(data, dataloader_type="single"), tokenizer, loaded, settings.seq_length, say)
    missing, dp = context.all_gather_object(store.missing)[0], context.mesh.dp
    done, files = len(settings.starts) - len(missing), len(settings.starts)
    there = f", {done} of {files} files are there" if done else ""
    say(f" > {loaded.path}, iteration {loaded.iteration}: top {settings.top_k} of {loaded.vocab_size} logits{there}")
    began, tokens, covered = time.perf_counter(), 0, 0.0
    for start in missing[dp.rank :: dp.size]:
        samples = range(start, min(start + settings.samples_per_file, settings.samples))
        digests, predictions, mass = predicted(loaded.model, loader, samples, options, settings, context)
        if context.mesh.tp.rank == 0:
            store.write(start, digests, predictions)
        tokens, covered = tokens + predictions.log_sums.size, covered + mass
        rate = tokens / (time.perf_counter() - began)
        say(f" > samples {start} to {samples.stop - 1} ({rate:,.0f} tokens/s a model)")
    whole = [sum(each) for each in zip(*context.all_gather_object((tokens, covered)))]
    if whole[0]:
        say(f" > the stored logits have {whole[1] / whole[0]:.2%} of the teacher's probability")
    if context.is_rank_zero:
        size = sum(store.path(start).stat().st_size for start in settings.starts)
        say(f" > {options.output}: {settings.samples:,} samples of {settings.seq_length} tokens, {in_units(size)}")


def settings_of(options: TeacherLogitsOptions, data: Data, loaded):
    """The settings of the store. Raises SettingsError for a model that is no teacher for these samples."""
    from megatron.data.teacher_logits import StoredSettings, samples_of_file

    loaded.check_words()
    if not loaded.continues_texts:
        raise SettingsError(f"--load {loaded.path}: the model does not predict the next token of a text")
    length = options.seq_length or loaded.config.model.seq_length
    if length > loaded.longest and loaded.config.model.position_embedding_type == "learned_absolute":
        raise SettingsError(f"--seq-length {length}: {loaded.path} has {loaded.longest} positions")
    top_k = min(options.top_k, loaded.vocab_size)
    return StoredSettings(
        top_k,
        options.kd_temperature,
        options.train_samples,
        samples_of_file(top_k, length, loaded.vocab_size),
        length,
        options.seed,
        loaded.vocab_size,
        loaded.record.get("vocabulary"),
        data.reset_position_ids,
        data.reset_attention_mask,
        str(loaded.path),
        loaded.iteration,
    )


def create_store(folder: str, settings, context):
    """Begin or continue the store on rank 0; open it on all ranks."""
    from megatron.data.teacher_logits import LogitsStore

    context.from_rank_zero(lambda: LogitsStore.create(folder, settings).settings)
    return LogitsStore(folder)


def samples_of(options: TeacherLogitsOptions, data: Data, tokenizer: dict, loaded, length: int, say):
    """The loader of the samples, in the order of their dataset."""
    from megatron.data.gpt_dataset import build_datasets
    from megatron.data.loader import MicroBatchLoader
    from megatron.data.remote import all_paths
    from megatron.data.vocabulary import refuse_other_vocabulary
    from megatron.inference.load import open_tokenizer

    words = None
    if tokenizer or loaded.record.get("vocabulary") or data.reset_attention_mask or data.reset_position_ids:
        words = open_tokenizer(loaded, tokenizer)
        refuse_other_vocabulary(all_paths(data, say), words)
    eod = words.eod if words else None
    sizes = (options.train_samples, 0, 0)
    dataset = build_datasets(data, length, sizes, options.seed, eod=eod, vocab_size=loaded.vocab_size, log=say)[0]
    if dataset is None or len(dataset) < options.train_samples:
        raise DataError(f"there are {0 if dataset is None else len(dataset):,} samples, not {options.train_samples:,}")
    return MicroBatchLoader(
        dataset,
        replace(data, num_workers=0, eod_mask_loss=False),
        micro_batch_size=1,
        eod=eod,
        seq_length=length,
        vocab_size=loaded.vocab_size,
        refuse=words.refuse if words else lambda ids, where: None,
    )


def predicted(model, loader, samples: range, options: TeacherLogitsOptions, settings, context):
    """(digests of the samples, their predictions, the probability that these cover)."""
    import numpy as np

    from megatron.data.teacher_logits import Predictions, digest_of
    from megatron.mpu.top_k import top_k

    digests, parts, mass = [], [], 0.0
    for first in range(samples.start, samples.stop, options.micro_batch_size):
        loader.micro_batch_size = min(options.micro_batch_size, samples.stop - first)
        batch = loader.micro_batch(first, 0).to(context.device)
        digests += [digest_of(tokens) for tokens in batch.tokens.T.cpu().numpy()]
        found = top_k(
            model.logits_of(batch),
            batch.tokens.numel(),
            settings.top_k,
            vocab_size=settings.vocab_size,
            temperature=settings.temperature,
            tp=context.mesh.tp,
        )
        s, b = batch.tokens.shape
        ids, logits, log_sums = (each.cpu().unflatten(0, (s, b)).transpose(0, 1).numpy() for each in found)
        mass += float(np.exp(logits / settings.temperature - log_sums[..., None]).sum())
        parts.append((ids, logits, log_sums))
    return digests, Predictions(*(np.concatenate(each) for each in zip(*parts))), mass


if __name__ == "__main__":
    run_main(main)
