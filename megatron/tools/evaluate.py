# SPDX-License-Identifier: Apache-2.0
"""Evaluate a trained model: perplexity of held-out tokens or WikiText, or accuracy on LAMBADA.

    python -m megatron.tools.evaluate --load checkpoints --data-path held_out_text_document
    python -m megatron.tools.evaluate --load checkpoints --task WIKITEXT103 --valid-data wiki.valid.tokens
    python -m megatron.tools.evaluate --load checkpoints --task LAMBADA --valid-data lambada_test.jsonl
    torchrun --nproc-per-node 8 -m megatron.tools.evaluate --load checkpoints --data-path held_out_text_document

Sums are exact: every token and every passage counts once, the last ones included. The result lines are Megatron-LM's.
Tensor x pipeline ranks have a model together (default: each has a whole one), more ranks share the batches; the first one
prints.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.convert.given_model import BATCH_INVARIANT, EXPORTED, SAME_BITS, check_one_model, load_one_model
from megatron.errors import DataError, SettingsError, UsageError, no_such_file, run_main
from megatron.guard.job import check_shares, on_ranks
from megatron.model.quantization import QuantizeOptions
from megatron.model.recipe import MODEL_TYPES
from megatron.settings import rank_env
from megatron.settings.declare import Needs, idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.from_checkpoint import found_record
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.settings.statements import Statement, given_values, in_users_words, words_of
from megatron.storage.durable import check_output


@dataclass(frozen=True)
class EvaluateOptions:
    """The model, the data, and how it is evaluated."""

    load: Optional[str] = setting("folder of checkpoints, or one checkpoint", None)
    load_exported: Optional[str] = setting(EXPORTED, None)
    data_path: Optional[list[str]] = setting("prefixes of token files, or folders: perplexity of all tokens", None)
    task: Optional[Literal["WIKITEXT103", "WIKITEXT2", "LAMBADA"]] = setting(
        "a task on text, from --valid-data", None, "--cloze-eval~=LAMBADA"
    )
    valid_data: Optional[str] = setting(
        "file of the task: wiki.*.tokens, or lambada_test.jsonl", None, "--eval-path", needs="task"
    )
    strict_lambada: bool = setting(
        "LAMBADA: only the strict accuracy (default: both)",
        False,
        needs=Needs("--task LAMBADA", lambda s: s.task == "LAMBADA"),
    )
    overlapping_eval: Optional[int] = setting(
        "new tokens of each window; smaller: more context, slower (default: 32 for WikiText, else the whole window)",
        None,
        needs=Needs("--data-path or --task WIKITEXT103", lambda s: s.task != "LAMBADA"),
    )
    seq_length: Optional[int] = setting("tokens of a window (default: what the model can look at)", None)
    max_tokens: Optional[int] = setting(
        "look at no more than this many tokens of each --data-path", None, needs="data_path"
    )
    micro_batch_size: int = setting("windows or passages side by side", 8, "--batch-size")
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )
    batch_invariant_mode: bool = setting(SAME_BITS, False)
    output: Optional[str] = setting("file for the results, JSON lines", None)
    train_data: Optional[list[str]] = setting(
        "prefixes of the token files of training, where they have moved: their .contamination says which items they hold",
        None,
    )


def main(argv: list[str], serves_training: bool = False) -> None:
    """Evaluate. serves_training: name settings of training in a note, rather than refuse them."""
    rank_env.adopt_launcher()
    groups, given = parse_with_record(
        argv,
        dict(evaluate=EvaluateOptions, quantize=QuantizeOptions, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.evaluate",
        description="Evaluate a trained model.",
        common=tuple(EvaluateOptions.__dataclass_fields__),
        serves_training=serves_training,
    )
    settings, quantize = groups["evaluate"], groups["quantize"]
    with failing_in_users_words(given):
        check(settings, given)
        idle = [*idle_flags(settings, given), *idle_flags(quantize, given)]
        rank_env.print_notes(idle)
        tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
        sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        parallel = Parallel(**sizes, batch_invariant_mode=settings.batch_invariant_mode)
        work = lambda context: evaluate(settings, quantize, given, context)
        on_ranks(parallel, settings.device, work, settings.load)


def evaluate(settings: EvaluateOptions, quantize: QuantizeOptions, given: Mapping[str, Statement], context) -> None:
    """Evaluate on the ranks of a job (`mpu.initialize.RankContext`); the first of them prints and writes the results.

    given: setting -> who gave it
    """
    from megatron.tasks import zeroshot

    def say(text: str, file=None) -> None:
        if context.is_rank_zero:
            print(text, file=file, flush=True)

    if context.described:
        say(f" > {context.described}")
    how = dict(device=context.device, precision=settings.precision, step=settings.ckpt_step, mesh=context.mesh)
    how |= dict(batch_invariant=settings.batch_invariant_mode)
    loaded = load_one_model(settings.load, settings.load_exported, quantize=quantize, **how)
    progress = ProgressLine if context.mesh.dp.rank == 0 else lambda unit: lambda done, total: None
    tokenizer = given_values(TokenizerSettings, given)
    work, notices = zeroshot.prepare(settings, loaded, tokenizer, context.mesh.dp, progress)
    say(f" > {loaded.path}, iteration {loaded.iteration}")
    for notice in [*loaded.notices, *notices]:
        say(f"note: {in_users_words(notice, given)}", sys.stderr)
    results = zeroshot.evaluate(work)
    for result in results:
        name = result.pop("name")
        say(f" validation results on {name} | {result.pop('line')}")
        if "without" in result.get("contamination", {}):
            say(f" validation results on {name}, {result.pop('judged')} | {result.pop('clean_line')}")
        elif "judged" in result:
            say(f"note: {name}: {result.pop('judged')}", sys.stderr)
    if settings.output and context.is_rank_zero:
        path = Path(settings.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            say(f"note: replaces {path}", sys.stderr)
        path.write_text("".join(json.dumps(dict(iteration=loaded.iteration, **result)) + "\n" for result in results))


def check(settings: EvaluateOptions, given: Mapping[str, Statement]) -> None:
    """Raise UsageError unless exactly one kind of data is given, DataError when its file is missing, SettingsError for
    sizes and ranks that cannot be. given: setting -> who gave it.
    """
    check_one_model(settings, given)
    if settings.valid_data and not (settings.task or settings.data_path):
        named = words_of(given, "valid_data", settings.valid_data)
        do = of_its_own(settings.load, settings.valid_data)
        raise UsageError(f"{named} needs --task: WIKITEXT103 (perplexity), or LAMBADA (--cloze-eval)", do=do)
    if settings.data_path and settings.task:
        both = f"--data-path {' '.join(settings.data_path)} and --task {settings.task}"
        raise UsageError(f"{both}: one of them is evaluated", do="leave one out")
    if not settings.data_path and not settings.task:
        do = of_its_own(settings.load, "FILE")
        raise UsageError("what to evaluate on is not clear", "give --data-path, or --task with --valid-data", do)
    if settings.task and not settings.valid_data:
        raise UsageError(f"--task {settings.task} needs --valid-data")
    if settings.valid_data and not Path(settings.valid_data).is_file():
        raise DataError(f"{words_of(given, 'valid_data', settings.valid_data)}: {no_such_file(settings.valid_data)}")
    if settings.batch_invariant_mode and settings.task == "LAMBADA":
        what = f"{BATCH_INVARIANT} covers log-probabilities, and --task LAMBADA counts right words"
        raise SettingsError(what, do="leave it out")
    if settings.output:
        check_output("--output", settings.output)
    for name in ("micro_batch_size", "seq_length", "overlapping_eval"):
        size = getattr(settings, name)
        if size is not None and size < 1:
            raise SettingsError(f"{words_of(given, name, size)}: has to be at least 1")
    check_shares(settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size)


def of_its_own(load: Optional[str], data: str) -> str:
    """The command that evaluates a model on samples as its own training made them; "" for a model of token files."""
    config = (found_record(load) or {}).get("config", {})
    kind = config.get("model", {}).get("model_type", "GPT")
    if task := next((own["task"] for own in config.get("extra", {}).values() if own and own.get("task")), ""):
        return f"its task: finetune.py --task {task} --skip-train --load {load} --valid-data {data}"
    if kind in MODEL_TYPES:
        return ""
    return f"its own data: python -m {kind}, with the words of its training, --skip-train and --load {load}"


class ProgressLine:
    """A line on a terminal's stderr that says how far an evaluation is."""

    def __init__(self, unit: str):
        self.unit, self.start, self.shown = unit, time.perf_counter(), 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.perf_counter()
        if sys.stderr.isatty() and (now - self.shown > 0.2 or done == total):
            left = (now - self.start) * (total - done) / done
            end = "\r\033[K" if done == total else ""
            print(
                f"\r  {done:,} of {total:,} {self.unit}, {left:.0f} s left  {end}", end="", file=sys.stderr, flush=True
            )
            self.shown = now


if __name__ == "__main__":
    run_main(main)
