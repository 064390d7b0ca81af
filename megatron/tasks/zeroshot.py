# SPDX-License-Identifier: Apache-2.0
"""Zero-shot evaluation: perplexity on held-out tokens or WikiText, or accuracy on LAMBADA.

Each evaluation returns records: the line that Megatron-LM prints, its figures, and the same without the items that are in
the training data.

WikiText's perplexity is per word of the original, pre-tokenized text, so that vocabularies can be compared. The
published files are split into words by spaces (`tokens , and 1 @.@ 5`). The model reads natural text, so the text is
detokenized first, with the substitutions that published results use. The token ratio converts the loss per token to a
loss per original word.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.blend import Blend, parse_blend
from megatron.data.contamination import Contained
from megatron.data.formats import datasets_of, open_tokens
from megatron.data.vocabulary import refuse_other_vocabulary
from megatron.errors import DataError, NumericsError, SettingsError
from megatron.inference.load import Loaded, open_tokenizer, refuse_other_tokens
from megatron.inference.scoring import score
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Axis
from megatron.tasks.contaminated import judge, judge_file, judge_lines, lines_of_tokens, training_contents
from megatron.tasks.lambada import find_correct, read_examples, read_valid_data
from megatron.tokenizer.base import Tokenizer


@dataclass(frozen=True)
class Evaluation:
    """The inputs of all evaluations of a command.

    options:   `tools.evaluate.EvaluateOptions`
    length:    tokens of a window
    axis:      ranks that share the work
    contained: n-grams of registered sets in the training data; None if unknown
    tokenizer: of the run; None if token files are scored and its vocabulary is gone
    progress:  unit of work -> a function (done, total)
    """

    options: Any
    loaded: Loaded
    length: int
    axis: Axis
    contained: Optional[Contained]
    tokenizer: Optional[Tokenizer]
    progress: Callable[[str], Callable[[int, int], None]]


def prepare(options, loaded: Loaded, given: Mapping[str, Any], axis: Axis, progress) -> tuple[Evaluation, list[str]]:
    """(an evaluation, notices for the user). given: tokenizer flags.

    Raises SettingsError and DataError for inputs that cannot be scored, before anything is computed.
    """
    if recipe_of(loaded.config).arrays is not None:
        raise SettingsError(
            f"{loaded.path} holds a model of type {loaded.config.model.model_type}, whose samples are no rows of tokens",
            "here texts are scored by the token that comes next",
            "its own training script evaluates it: --skip-train --load with --eval-iters or --full-validation",
        )
    length = loaded.window(options.seq_length)
    overlapping = options.overlapping_eval or 0
    clamped = [f"--overlapping-eval {overlapping} is longer than a window: {length} is taken"] * (overlapping > length)
    tokenizer, lost, notes = tokenizer_for(loaded, given, prefixes_of(options))
    contained, notices = training_contents(loaded.config.data, options.train_data)
    notices = [*notes, *notices]
    if contained and tokenizer is None:  # the words of items are needed
        contained, notices = None, [f"scores are of all items together: {lost}"]
    if _blend(options).weights:
        notices = ["the weights of --data-path have no effect: each dataset is evaluated on its own", *notices]
    return Evaluation(options, loaded, length, axis, contained, tokenizer, progress), [*clamped, *notices]


def prefixes_of(options) -> list[str]:
    """The prefixes of the token files to score."""
    return [prefix for word in _blend(options).prefixes for prefix in datasets_of(word)]


def _blend(options) -> Blend:
    return parse_blend(options.data_path, "--data-path", open_folders=False) if options.data_path else Blend([], None)


def evaluate(work: Evaluation) -> list[dict]:
    """A record of each dataset, or of the task."""
    if work.options.data_path:
        return [held_out(work, prefix) for prefix in prefixes_of(work.options)]
    return (lambada if work.options.task == "LAMBADA" else wikitext)(work)


def tokenizer_for(
    loaded: Loaded, given: Mapping[str, Any], prefixes: Sequence[str]
) -> tuple[Optional[Tokenizer], str, list]:
    """(the tokenizer of a run or None, why there is none, notes): token files can be scored without it.

    Raises DataError for token files with another vocabulary than the model's.
    """
    try:
        tokenizer = open_tokenizer(loaded, given)
    except (DataError, SettingsError) as error:
        if not prefixes or given:
            raise
        refuse_other_tokens(loaded, prefixes, "--data-path")
        return None, error.what, []
    notes = refuse_other_vocabulary(prefixes, tokenizer)
    if prefixes and tokenizer.prefix:
        first = tokenizer.decode(tokenizer.prefix)
        notes.append(
            f"texts of token files are scored as they are: without {first}, which the tokenizer puts before prompts"
        )
    return tokenizer, "", notes


def held_out(work: Evaluation, prefix: str) -> dict:
    """Perplexity of all tokens of an indexed dataset, with documents concatenated as in training."""
    dataset, options, loaded = open_tokens(prefix), work.options, work.loaded
    room, pieces = options.max_tokens or dataset.num_tokens, []
    for sequence in range(len(dataset)):
        pieces.append(dataset.get(sequence)[: max(0, room)])
        room -= len(pieces[-1])
        if room <= 0:
            break
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dataset.dtype)
    if len(tokens) < 2:
        raise DataError(f"{prefix} holds {len(tokens)} tokens: nothing to predict")
    if int(tokens.max()) >= loaded.vocab_size:
        if work.tokenizer:
            work.tokenizer.refuse(tokens, prefix)
        raise DataError(
            f"{prefix} holds token {int(tokens.max())}, the model knows ids below {loaded.vocab_size}",
            do="preprocess the text with the tokenizer that the model was trained with",
        )
    judged, clean = judged_documents(work, dataset, len(tokens)) if work.contained else (None, None)
    result = run_score(work, tokens, options.overlapping_eval or work.length, clean)

    def in_words(score) -> tuple[str, dict]:
        line = f"avg loss: {score.loss:.4E} | ppl: {score.perplexity():.4E} | tokens: {score.tokens} |"
        return line, dict(loss=score.loss, perplexity=score.perplexity(), tokens=score.tokens)

    line, numbers = in_words(result)
    return dict(name=prefix, line=line, data=prefix, **numbers) | without(
        judged, in_words(result.part) if result.part else None
    )


def judged_documents(work: Evaluation, dataset, count: int):
    """(judgement of the documents, whether each of the first `count` tokens belongs to a clean one)."""
    decode, eod = work.tokenizer.decode, work.tokenizer.eod
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
    """The results for items that are not in the training data. clean: line and figures of their score."""
    if judged is None:
        return {}
    record = judged.record()
    if record["not_registered"] == record["items"]:
        return dict(judged="its items were not looked for in the training data", contamination=record)
    if clean is None:
        return dict(judged="there is no score without what the training data holds", contamination=record)
    line, numbers = clean
    return dict(judged=str(judged), clean_line=line, contamination=record | dict(without=numbers))


def refuse_json_lines(path: str, text: str) -> None:
    """Raise DataError for a text whose first line is a JSON object, as in LAMBADA's file."""
    try:
        first = json.loads(text.lstrip("\ufeff \n").partition("\n")[0])
    except ValueError:
        return
    if isinstance(first, dict):
        why, do = (
            "WikiText is plain text",
            "--task LAMBADA (PaddleFleetX: -o Offline_Eval.cloze_eval=True) for its passages",
        )
        raise DataError(f"{path} is JSON lines", why, f"{do}; or give wiki.*.tokens")


def wikitext(work: Evaluation) -> list[dict]:
    """Perplexity per token, and adjusted: per word of the original text."""
    options, tokenizer = work.options, work.tokenizer
    original = read_valid_data(options.valid_data)
    refuse_json_lines(options.valid_data, original)
    tokens = np.array(tokenizer.encode(detokenize(original)), np.int64)
    words = count_words(original)
    if len(tokens) < 2 or words < 2:
        raise DataError(f"{options.valid_data} holds fewer than two words: nothing to predict")
    ratio = token_ratio(len(tokens), words)
    judged, clean = judged_tokens(work, original, tokens, tokenizer) if work.contained else (None, None)
    result = run_score(work, tokens, options.overlapping_eval or 32, clean, tokenizer.prefix)

    def in_words(score) -> tuple[str, dict]:
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

    line, numbers = in_words(result)
    found = dict(name=options.task, line=line, data=options.valid_data, **numbers)
    return [found | without(judged, in_words(result.part) if result.part else None)]


def judged_tokens(work: Evaluation, original: str, tokens, tokenizer):
    """(judgement of the lines of WikiText, whether each token belongs to a clean one)."""
    text = detokenize(original)
    judged, clean = judge_lines(work.contained, original, text)
    lines = lines_of_tokens(tokens, tokenizer.decode, text.count("\n"))
    return judged, None if lines is None else clean[lines]


def lambada(work: Evaluation) -> list[dict]:
    """Accuracy of the last word: strict (all of its tokens) and non-strict (the passage's last token)."""
    results, options = [], work.options
    judged = judge_file(work.contained, options.valid_data) if work.contained else None
    for strict in [True] if options.strict_lambada else [True, False]:
        examples = read_examples(options.valid_data, work.tokenizer, strict=strict)
        right = find_correct(
            work.loaded.model,
            examples,
            longest=work.length,
            batch_size=options.micro_batch_size,
            axis=work.axis,
            progress=work.progress("passages"),
        )
        mode = "strict" if strict else "non-strict"
        line, numbers = told_of_answers(right)
        found = dict(name=f"LAMBADA ({mode})", line=line, data=options.valid_data, mode=mode, **numbers)
        clean = right[judged.clean] if judged else ()
        results.append(found | without(judged, told_of_answers(clean) if len(clean) else None))
    return results


def told_of_answers(right) -> tuple[str, dict]:
    """(line, figures) of the accuracy over passages."""
    correct, examples = int(right.sum()), len(right)
    accuracy = correct / examples
    line = f"number correct: {correct} | total examples: {examples} | avg accuracy: {accuracy:.4E}"
    return line, dict(correct=correct, examples=examples, accuracy=accuracy)


def run_score(work: Evaluation, tokens, stride: int, part=None, prefix=()):
    """The score of a text. Raises NumericsError, on all ranks, if it is no number."""
    found = score(
        work.loaded.model,
        tokens,
        length=work.length,
        stride=min(stride, work.length),
        batch_size=work.options.micro_batch_size,
        axis=work.axis,
        progress=work.progress("tokens"),
        part=part,
        prefix=prefix,
    )
    if not math.isfinite(found.loss_sum):
        raise NumericsError(
            f"{work.loaded.path}: the loss of {found.tokens:,} tokens is {found.loss_sum}: passes overflow",
            do="--precision fp32, or bf16 in the place of fp16",
        )
    return found


# In this order: split text -> original text.
SUBSTITUTIONS = (
    (r"s '", "s'"),  # plural genitive
    (r" @([-,.])@ ", r"\1"),  # inside numbers and compounds
    (r" ([:;.!?,]) ", r"\1 "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"\{\s*([^\}]*?)\s*\}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def detokenize(text: str) -> str:
    """Convert WikiText's words to natural text.

    >>> detokenize("It cost 1 @.@ 5 million ( in 1999 ) , they say .")
    'It cost 1.5 million (in 1999), they say .'
    """
    for pattern, replacement in SUBSTITUTIONS:
        text = re.sub(pattern, replacement, text)
    return text


def count_words(text: str) -> int:
    """Number of words of the original text, as published perplexities count them: pieces between single spaces."""
    return len(text.strip().split(" "))


def token_ratio(tokens: int, words: int) -> float:
    """Predicted tokens per predicted word."""
    return (tokens - 1) / (words - 1)
