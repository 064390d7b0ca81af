# SPDX-License-Identifier: Apache-2.0
"""Let a trained model write.

    python -m megatron.tools.generate --load runs/quickstart/checkpoints --prompt "The module" --top-p 0.9

Everything about the model and its vocabulary is read from the checkpoint. Prompts come from --prompt (one or several)
or from a file, one a line.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.inference.sampling import Sampling, Search
from megatron.mpu.cpu_threads import choose_waiting
from megatron.settings.parse import parse
from megatron.settings.schema import TokenizerSettings, setting


@dataclass(frozen=True)
class GenerateOptions:
    """Which model, which prompts, which form of answer."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    prompt: Optional[list[str]] = setting("texts to continue", None)
    prompt_file: Optional[str] = setting("file with one text a line; - is standard input", None, "--sample-input-file")
    num_samples: int = setting("continuations of each prompt", 1)
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting("default: as trained", None)
    use_cache: bool = setting("keep keys and values of earlier tokens; off: compute them again (slow, same text)", True)
    json: bool = setting("one JSON object a line: prompt, text, tokens", False)


COMMON = (
    "load",
    "prompt",
    "prompt_file",
    "num_samples",
    "tokens_to_generate",
    "greedy",
    "temperature",
    "top_k",
    "top_p",
    "repetition_penalty",
    "sampling_seed",
    "num_beams",
    "device",
    "json",
)


def main(argv: list[str]) -> None:
    groups = parse(
        argv,
        dict(generate=GenerateOptions, sampling=Sampling, search=Search, tokenizer=TokenizerSettings),
        prog="python -m megatron.tools.generate",
        description="Continue texts with a trained model.",
        common=COMMON,
    )
    settings, sampling, search = groups["generate"], groups["sampling"], groups["search"]
    sampling.check()
    search.check(sampling)
    if settings.num_samples < 1:
        raise SettingsError(f"--num-samples {settings.num_samples}: has to be at least 1")
    prompts = [prompt for prompt in read_prompts(settings) for _ in range(settings.num_samples)]

    choose_waiting()  # before torch is loaded
    from megatron.inference.generation import generate
    from megatron.inference.load import load_model, open_tokenizer
    from megatron.mpu.initialize import pick_device, use_threads

    device = pick_device(settings.device, 0)
    if device.type == "cpu":
        use_threads()
    loaded = load_model(settings.load, device=device, precision=settings.precision, step=settings.ckpt_step)
    pairs = hasattr(loaded.model, "decode")  # an encoder-decoder: prompts are sources
    if not (pairs or hasattr(loaded.model, "logits")) or hasattr(loaded.model, "follows"):
        raise SettingsError(
            f"{settings.load} holds a model of type {loaded.config.model.model_type}, which generates nothing",
            "its module has no method logits for the next token, as a GPT has",
        )
    if not pairs and search.num_beams > 1:
        raise SettingsError(
            f"--num-beams {search.num_beams}: beam search is there for encoder-decoders", do="leave it out"
        )
    tokenizer = open_tokenizer(loaded, groups["tokenizer"])
    for notice in loaded.notices:
        print(f"note: {notice}", file=sys.stderr)
    start, texts = time.perf_counter(), [tokenizer.encode(prompt) for prompt in prompts]
    if pairs:
        answers = targets_of(loaded, tokenizer, texts, sampling, search)
    else:
        more = dict(longest=loaded.longest, end=tokenizer.eod, use_cache=settings.use_cache)
        answers = generate(loaded.model, texts, sampling, **more)
    seconds = time.perf_counter() - start
    show(prompts, answers, tokenizer, as_json=settings.json, apart=" -> " if pairs else "")
    if not pairs and any(len(tokenizer.encode(p)) + sampling.tokens_to_generate > loaded.longest for p in prompts):
        print(f"note: the model ends at {loaded.longest} tokens, prompt included", file=sys.stderr)
    count = sum(map(len, answers))
    print(f"{loaded.path}: {count} tokens in {seconds:.2f} s = {count / seconds:.0f} tokens/s", file=sys.stderr)


def read_prompts(settings: GenerateOptions) -> list[str]:
    """The texts to continue. Raises UsageError when there are none, DataError when their file is missing."""
    if settings.prompt and settings.prompt_file:
        raise UsageError("--prompt and --prompt-file were both given", do="give one of them")
    prompts = settings.prompt or []
    if settings.prompt_file == "-":
        prompts = sys.stdin.read().splitlines()
    elif settings.prompt_file:
        try:
            prompts = Path(settings.prompt_file).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise DataError(f"--prompt-file {settings.prompt_file}: no such file") from None
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt-file {settings.prompt_file}: not a UTF-8 text file", str(error)) from None
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError("there is no text to continue", do='--prompt "Once upon a time", or --prompt-file FILE')
    return prompts


def targets_of(loaded, tokenizer, sources: list[list[int]], sampling: Sampling, search: Search) -> list[list[int]]:
    """What an encoder-decoder answers to each source."""
    from megatron.inference.sequences import generate_targets

    facts, start, end = loaded.model.facts, search.decoder_start_id, search.decoder_end_id
    start = _special(tokenizer, "bos", "cls") if start is None else start
    end = _special(tokenizer, "eos", "sep") if end is None else end
    end = tokenizer.eod if end is None else end
    for flag, token in (("--decoder-start-id", start), ("--decoder-end-id", end)):
        if token is not None and not 0 <= token < facts.vocab_size:
            raise SettingsError(f"{flag} {token}: the model knows ids from 0 to {facts.vocab_size - 1}")
    lengths = (facts.source, facts.target)
    return generate_targets(loaded.model, sources, sampling, search, longest=lengths, start=start or 0, end=end)


def _special(tokenizer, *names: str) -> Optional[int]:
    """The first of these special tokens that a tokenizer has, if it knows any by name."""
    known = getattr(tokenizer, "special", lambda name: None)
    return next((token for name in names if (token := known(name)) is not None), None)


def show(prompts: list[str], answers: list[list[int]], tokenizer, *, as_json: bool, apart: str = "") -> None:
    """Print prompts with their continuations. apart: what stands between both."""
    for number, (prompt, answer) in enumerate(zip(prompts, answers)):
        text = tokenizer.decode(answer)
        if as_json:
            print(json.dumps(dict(prompt=prompt, text=text, tokens=answer), ensure_ascii=False))
        else:
            print(("" if number == 0 else "-" * 40 + "\n") + prompt + apart + text)


if __name__ == "__main__":
    run_main(main)
