# SPDX-License-Identifier: Apache-2.0
"""Evaluate a trained model with lm-evaluation-harness (extra `eval`).

    python -m megatron.tools.lm_eval --load runs/quickstart/checkpoints --tasks lambada_openai hellaswag
    python -m megatron.tools.lm_eval --load CKPT --tasks my_task.yaml --offline        (docs/finetuning.md)
    torchrun --nproc-per-node 4 -m megatron.tools.lm_eval --load CKPT --tasks my_task.yaml --tensor-model-parallel-size 2

Tasks are names that the harness knows, or YAML files in its format; their data may be local files. Tensor x pipeline ranks
hold one model; further ranks divide the batches.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.errors import DataError, MissingPackage, SettingsError, did_you_mean, missing_file, run_main
from megatron.guard.job import check_shares, on_ranks
from megatron.model import quantization
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.cpu_memory import bound_kernel_caches
from megatron.settings import rank_env
from megatron.settings.declare import dashed, idle_flags
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.settings.statements import given_values


@dataclass(frozen=True)
class HarnessOptions:
    """The model, the tasks, and how they are evaluated."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    tasks: list[str] = setting("names of tasks, or YAML files in the harness's form")
    include_path: Optional[str] = setting("folder with further tasks' YAML files", None)
    num_fewshot: Optional[int] = setting("examples before each question (default: the task's)", None)
    limit: Optional[int] = setting("only the first so many documents of each task", None)
    offline: bool = setting("fetch nothing: data are local files, or were fetched before", False)
    seq_length: Optional[int] = setting("tokens of context (default: the model's longest)", None)
    micro_batch_size: int = setting("texts side by side", 8, "--batch-size")
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting("default: as trained", None)
    output: Optional[str] = setting("file for the results, JSON", None)


def main(argv: list[str]) -> None:
    rank_env.adopt_launcher()
    bound_kernel_caches()
    groups, said = parse_with_record(
        argv,
        dict(lm_eval=HarnessOptions, quantize=QuantizeOptions, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.lm_eval",
        description="Evaluate a trained model with lm-evaluation-harness.",
        common=tuple(HarnessOptions.__dataclass_fields__),
    )
    options = groups["lm_eval"]
    options = replace(options, tasks=[name for word in options.tasks for name in names_in(word)])
    check(options)
    quantize, given = groups["quantize"], given_values(TokenizerSettings, said)
    rank_env.print_notes(idle_flags(quantize, said))
    tp, pp = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    on_ranks(parallel, options.device, lambda context: evaluate(options, given, context, quantize), options.load)


def names_in(word: str) -> list[str]:
    """Split a word of --tasks into names, separated by commas as in the harness.

    >>> names_in("lambada_openai,hellaswag")
    ['lambada_openai', 'hellaswag']
    """
    return [word] if Path(word).is_file() else word.split(",")


def check(options: HarnessOptions) -> None:
    """Raise SettingsError or DataError for bad options, before torch is loaded."""
    check_shares(options.tensor_model_parallel_size, options.pipeline_model_parallel_size)
    for name, least in dict(micro_batch_size=1, seq_length=1, limit=1, num_fewshot=0).items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise SettingsError(f"{dashed(name)} {value} has to be at least {least}")
    for name in options.tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise missing_file(name, "--tasks")
    if options.include_path and not Path(options.include_path).is_dir():
        raise missing_file(options.include_path, "--include-path", "folder")
    if options.offline:  # read when the packages are imported
        os.environ |= dict(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def evaluate(
    options: HarnessOptions, given: Mapping[str, Any], context, quantize: QuantizeOptions = quantization.PLAIN
) -> dict:
    """Evaluate on the ranks of a job; all return the results, and the first rank prints and writes them."""
    try:
        import lm_eval
    except ImportError as error:
        raise MissingPackage("lm-evaluation-harness is not installed", str(error), "pip install '.[eval]'") from None
    from megatron.inference.load import load_model, open_tokenizer

    loaded = load_model(
        options.load,
        device=context.device,
        precision=options.precision,
        step=options.ckpt_step,
        mesh=context.mesh,
        quantize=quantize,
    )
    loaded.check_words()
    if not loaded.continues_texts:
        raise SettingsError(
            f"{loaded.path} is a model of type {loaded.config.model.model_type}, which does not continue texts",
            do="the harness asks for the tokens that follow a text: load a GPT",
        )
    length = loaded.window(options.seq_length)
    from megatron.tasks.harness import HarnessModel

    model = HarnessModel(
        loaded.model, open_tokenizer(loaded, given), context, longest=length, batch_size=options.micro_batch_size
    )
    tasks, manager = find_tasks(options)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=False,
    )
    if context.is_rank_zero:
        report(options, results, loaded)
    return results


def find_tasks(options: HarnessOptions):
    """(the tasks, the harness's manager that knows them). Raises SettingsError for an unknown name, DataError for a file
    that describes no task.
    """
    from lm_eval.tasks import TaskManager

    class Tasks(TaskManager):
        """Reports errors of reading a task's file, of any kind, in one line."""

        def load(self, *given):
            try:
                return super().load(*given)
            except Exception as error:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise DataError(f"--tasks {' '.join(options.tasks)} cannot be loaded", reason) from error

    files = [name for name in options.tasks if name.endswith((".yaml", ".yml"))]
    names = [name for name in options.tasks if name not in files]
    for path in files:
        if not re.search(r"^(task|group):", Path(path).read_text(encoding="utf-8"), re.MULTILINE):
            raise DataError(f"--tasks {path} has no name", do="task: my_task")
    manager = Tasks(include_path=options.include_path, include_defaults=bool(names))
    for name in names:
        if name not in manager.all_tasks:
            raise SettingsError(
                f"--tasks {name}: the harness has no such task{did_you_mean(name, manager.all_tasks)}",
                do="a name of its own (python -m lm_eval ls tasks), or a YAML file",
            )
    return [*names, *(str(Path(path).resolve()) for path in files)], manager


def report(options: HarnessOptions, results: dict, loaded) -> None:
    """Print the harness's table, and write the results as JSON."""
    from lm_eval.utils import make_table

    print(f" > {loaded.path}, iteration {loaded.iteration}")
    print(make_table(results), flush=True)
    if options.output:
        record = dict(checkpoint=str(loaded.path), iteration=loaded.iteration, results=results["results"])
        path = Path(options.output)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, default=str) + "\n")


if __name__ == "__main__":
    run_main(main)
