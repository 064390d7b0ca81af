# SPDX-License-Identifier: Apache-2.0
"""How good is a trained model? Perplexity of held-out tokens, of WikiText, or accuracy on LAMBADA.

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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.settings import rank_env
from megatron.settings.parse import parse
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.tools.job import check_shares, on_ranks


@dataclass(frozen=True)
class EvaluateOptions:
    """Which model, on what."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    data_path: Optional[list[str]] = setting("prefixes of token files, or folders: perplexity of all tokens", None)
    task: Optional[Literal["WIKITEXT103", "LAMBADA"]] = setting(
        "a task on text, from --valid-data", None, "--cloze-eval~=LAMBADA", also=dict(WIKITEXT2="WIKITEXT103")
    )
    valid_data: Optional[str] = setting("file of the task: wiki.*.tokens, or lambada_test.jsonl", None, "--eval-path")
    strict_lambada: bool = setting("LAMBADA: only the strict accuracy (default: both)", False)
    overlapping_eval: Optional[int] = setting(
        "new tokens of each window; smaller: more context, slower (default: 32 for WIKITEXT103, else the whole window)",
        None,
    )
    seq_length: Optional[int] = setting("tokens of a window (default: what the model can look at)", None)
    max_tokens: Optional[int] = setting("look at no more than this many tokens of each --data-path", None)
    micro_batch_size: int = setting("windows or passages side by side", 8, "--batch-size")
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting("default: as trained", None)
    output: Optional[str] = setting("file for the results, JSON lines", None)
    train_data: Optional[list[str]] = setting(
        "prefixes of the token files of training, where they have moved: their .contamination says which items they hold",
        None,
    )


def main(argv: list[str]) -> None:
    rank_env.adopt_slurm()
    groups = parse(
        argv,
        dict(evaluate=EvaluateOptions, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.evaluate",
        description="Evaluate a trained model.",
        common=tuple(EvaluateOptions.__dataclass_fields__),
    )
    settings = groups["evaluate"]
    check(settings)
    tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    on_ranks(parallel, settings.device, lambda context: evaluate(settings, groups["tokenizer"], context))


def _refuse_other_samples(folder: str, config) -> None:
    """Raise SettingsError for a model that does not tell the token that comes next."""
    from megatron.model.recipe import recipe_of

    if recipe_of(config).arrays is not None:
        raise SettingsError(
            f"{folder} holds a model of type {config.model.model_type}, whose samples are no rows of tokens",
            "here texts are scored by the token that comes next",
            "its own training script evaluates it: --skip-train --load with --eval-iters or --full-validation",
        )


def evaluate(settings: EvaluateOptions, tokenizer: TokenizerSettings, context) -> None:
    """Evaluate on the ranks of a job (`mpu.initialize.RankContext`); the first of them prints and writes the results."""
    from megatron.inference.load import load_model, open_tokenizer

    def say(text: str, file=None) -> None:
        if context.is_rank_zero:
            print(text, file=file, flush=True)

    if context.threads:
        say(f" > {context.threads}")
    loaded = load_model(
        settings.load, device=context.device, precision=settings.precision, step=settings.ckpt_step, mesh=context.mesh
    )
    _refuse_other_samples(settings.load, loaded.config)
    for notice in loaded.notices:
        say(f"note: {notice}", sys.stderr)
    say(f" > {loaded.path}, iteration {loaded.iteration}")
    length = settings.seq_length or loaded.longest
    if length > loaded.longest:
        raise SettingsError(f"--seq-length {length}: the model can look at {loaded.longest} tokens")
    contained, notices = training_data(settings, loaded, tokenizer)
    for notice in notices:
        say(f"note: {notice}", sys.stderr)
    work = Evaluation(settings, loaded, length, context.mesh.dp, contained, partial(open_tokenizer, loaded, tokenizer))
    if settings.data_path:
        from megatron.data.formats import datasets_of

        results = [held_out(work, prefix) for word in settings.data_path for prefix in datasets_of(word)]
    else:
        results = (wikitext if settings.task == "WIKITEXT103" else lambada)(work, work.tokenizer())
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
        path.write_text("".join(json.dumps(dict(iteration=loaded.iteration, **result)) + "\n" for result in results))


def training_data(settings: EvaluateOptions, loaded, given: TokenizerSettings) -> tuple[Any, list[str]]:
    """(what the training data holds of registered sets, or None; what the user should hear)."""
    from megatron.inference.load import open_tokenizer
    from megatron.tasks.contaminated import training_contents

    contained, notices = training_contents(loaded.config.data, settings.train_data)
    if contained and settings.data_path:  # whose items are tokens: their words are needed
        try:
            open_tokenizer(loaded, given)
        except (DataError, SettingsError) as error:
            return None, [f"scores are told with all items alone: {error.what}"]
    return contained, notices


@dataclass(frozen=True)
class Evaluation:
    """What all evaluations of a command have in common. length: tokens of a window; axis: ranks that share the work."""

    settings: EvaluateOptions
    loaded: Any  # inference.load.Loaded
    length: int
    axis: Any  # mpu.mesh.Axis
    contained: Any  # data.contamination.Contained: what the training data holds; None where it is not known
    tokenizer: Any  # () -> the tokenizer of the run

    def progress(self, unit: str):
        """The first rank's line on the terminal."""
        return ProgressLine(unit) if self.axis.rank == 0 else lambda done, total: None


def check(settings: EvaluateOptions) -> None:
    """Raise UsageError unless exactly one kind of data is given, DataError when its file is missing, SettingsError for
    sizes and ranks that cannot be.
    """
    if bool(settings.data_path) == bool(settings.task):
        raise UsageError("what to evaluate on is not clear", "give --data-path, or --task with --valid-data")
    if settings.task and not settings.valid_data:
        raise UsageError(f"--task {settings.task} needs --valid-data")
    if settings.valid_data and not Path(settings.valid_data).is_file():
        raise DataError(f"--valid-data {settings.valid_data}: no such file")
    if settings.micro_batch_size < 1 or (settings.seq_length or 1) < 1 or (settings.overlapping_eval or 1) < 1:
        raise SettingsError("--micro-batch-size, --seq-length and --overlapping-eval have to be at least 1")
    check_shares(settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size)


def held_out(work: Evaluation, prefix: str) -> dict:
    """Perplexity of all tokens of an indexed dataset, documents one after the other as in training."""
    import numpy as np

    from megatron.data.formats import open_tokens

    dataset, settings, loaded = open_tokens(prefix), work.settings, work.loaded
    room, pieces = settings.max_tokens or dataset.num_tokens, []
    for sequence in range(len(dataset)):
        pieces.append(dataset.get(sequence)[: max(0, room)])
        room -= len(pieces[-1])
        if room <= 0:
            break
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dataset.dtype)
    if len(tokens) < 2:
        raise DataError(f"{prefix} holds {len(tokens)} tokens: nothing to predict")
    if int(tokens.max()) >= loaded.vocab_size:
        raise DataError(
            f"{prefix} holds token {int(tokens.max())}, the model knows ids below {loaded.vocab_size}",
            do="preprocess the text with the tokenizer that the model was trained with",
        )
    judged, clean = judged_documents(work, dataset, len(tokens)) if work.contained else (None, None)
    result = run_score(work, tokens, settings.overlapping_eval or work.length, clean)

    def told(score) -> tuple[str, dict]:
        line = f"avg loss: {score.loss:.4E} | ppl: {score.perplexity():.4E} | tokens: {score.tokens} |"
        return line, dict(loss=score.loss, perplexity=score.perplexity(), tokens=score.tokens)

    line, numbers = told(result)
    return dict(name=prefix, line=line, data=prefix, **numbers) | without(
        judged, told(result.part) if result.part else None
    )


def judged_documents(work: Evaluation, dataset, count: int):
    """(judgement of the documents, whether each of the first `count` tokens is of a clean one)."""
    import numpy as np

    from megatron.tasks.contaminated import judge

    decode, eod = work.tokenizer().decode, work.tokenizer().eod
    starts = np.zeros(len(dataset) + 1, np.int64)
    np.cumsum(dataset.sequence_lengths, out=starts[1:])
    bounds = starts[dataset.document_indices]
    bounds = bounds[: int(np.searchsorted(bounds, count, "left")) + 1]
    texts = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
        ids = dataset.tokens[start:stop]
        texts.append([decode(ids[:-1] if len(ids) and ids[-1] == eod else ids)])
    judged = judge(work.contained, texts)
    return judged, np.repeat(judged.clean, np.diff(bounds))[:count]


def without(judged, clean: Optional[tuple[str, dict]]) -> dict:
    """What is told of the items that the training data does not hold. clean: line and figures of their score."""
    if judged is None:
        return {}
    record = judged.record()
    if record["not_registered"] == record["items"]:
        return dict(judged="its items were not looked for in the training data", contamination=record)
    if clean is None:
        return dict(judged="there is no score without what the training data holds", contamination=record)
    line, numbers = clean
    return dict(judged=str(judged), clean_line=line, contamination=record | dict(without=numbers))


def wikitext(work: Evaluation, tokenizer) -> list[dict]:
    """Perplexity per token, and adjusted: per word of the original text."""
    import numpy as np

    from megatron.tasks.wikitext import count_words, detokenize, token_ratio

    settings = work.settings
    original = Path(settings.valid_data).read_text(encoding="utf-8")
    tokens = np.array(tokenizer.encode(detokenize(original)), np.int64)
    words = count_words(original)
    if len(tokens) < 2 or words < 2:
        raise DataError(f"{settings.valid_data} holds {words} words: nothing to predict")
    ratio = token_ratio(len(tokens), words)
    judged, clean = judged_tokens(work, original, tokens, tokenizer) if work.contained else (None, None)
    result = run_score(work, tokens, settings.overlapping_eval or 32, clean)

    def told(score) -> tuple[str, dict]:
        line = (
            f"avg loss: {score.loss:.4E} | ppl: {score.perplexity():.4E} | "
            f"adjusted ppl: {score.perplexity(ratio):.4E} | token ratio: {ratio} |"
        )
        numbers = dict(
            loss=score.loss,
            tokens=score.tokens,
            token_ratio=ratio,
            perplexity=score.perplexity(),
            adjusted_perplexity=score.perplexity(ratio),
        )
        return line, numbers

    line, numbers = told(result)
    found = dict(name=settings.task, line=line, data=settings.valid_data, **numbers)
    return [found | without(judged, told(result.part) if result.part else None)]


def judged_tokens(work: Evaluation, original: str, tokens, tokenizer):
    """(judgement of the lines of WikiText, whether each token is of a clean one)."""
    from megatron.tasks.contaminated import judge_lines, lines_of_tokens
    from megatron.tasks.wikitext import detokenize

    text = detokenize(original)
    judged, clean = judge_lines(work.contained, original, text)
    lines = lines_of_tokens(tokens, tokenizer.decode, text.count("\n"))
    return judged, None if lines is None else clean[lines]


def lambada(work: Evaluation, tokenizer) -> list[dict]:
    """Accuracy of the last word: strict (all of its tokens) and non-strict (the passage's last token)."""
    from megatron.tasks.contaminated import judge_file
    from megatron.tasks.lambada import find_correct, read_examples

    results, settings = [], work.settings
    judged = judge_file(work.contained, settings.valid_data) if work.contained else None
    for strict in [True] if settings.strict_lambada else [True, False]:
        examples = read_examples(settings.valid_data, tokenizer, strict=strict)
        right = find_correct(
            work.loaded.model,
            examples,
            longest=work.length,
            batch_size=settings.micro_batch_size,
            axis=work.axis,
            progress=work.progress("passages"),
        )
        mode = "strict" if strict else "non-strict"
        line, numbers = told_of_answers(right)
        found = dict(name=f"LAMBADA ({mode})", line=line, data=settings.valid_data, mode=mode, **numbers)
        clean = right[judged.clean] if judged else ()
        results.append(found | without(judged, told_of_answers(clean) if len(clean) else None))
    return results


def told_of_answers(right) -> tuple[str, dict]:
    """(line, figures) of whether each passage was answered right."""
    correct, examples = int(right.sum()), len(right)
    accuracy = correct / examples
    line = f"number correct: {correct:.4E} | total examples: {examples:.4E} | avg accuracy: {accuracy:.4E}"
    return line, dict(correct=correct, examples=examples, accuracy=accuracy)


def run_score(work: Evaluation, tokens, stride: int, part=None):
    from megatron.inference.scoring import score

    return score(
        work.loaded.model,
        tokens,
        length=work.length,
        stride=min(stride, work.length),
        batch_size=work.settings.micro_batch_size,
        axis=work.axis,
        progress=work.progress("tokens"),
        part=part,
    )


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
