# SPDX-License-Identifier: Apache-2.0
"""Measure generation: prompt and output lengths x batch sizes x precisions.

    python -m megatron.tools.benchmark_inference --load runs/quickstart/checkpoints --prompt-length 128 --output-length 8
    python -m megatron.tools.benchmark_inference --model-name-or-path 345M --batch-size 1 4 16 --precisions fp32 bf16
    python -m megatron.tools.launch --nproc-per-node 2 -m megatron.tools.benchmark_inference --load DIR --tp 2

The model comes from a checkpoint or an export, or has a shape and random weights. Prompts are random tokens, and no text
ends early. Each row is the median of --iterations batches that start together: milliseconds to the first token of a text
and between tokens, new tokens per second, and the memory of a rank.
"""

import json
import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Literal, Optional

from megatron.convert.given_model import load_one_model
from megatron.errors import SettingsError, UsageError, run_main
from megatron.guard.job import on_ranks
from megatron.model import quantization
from megatron.model.quantization import QuantizeOptions
from megatron.model.recipe import facts_of
from megatron.mpu.cpu_memory import bound_kernel_caches
from megatron.settings import rank_env
from megatron.settings.declare import Count, idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import GROUPS, Config, Model, Parallel, TokenizerSettings, setting
from megatron.settings.statements import Statement, words_of


@dataclass(frozen=True)
class BenchmarkOptions:
    """The model, the measurements and the output."""

    load: Optional[str] = setting(
        "folder of checkpoints, or an export (default: random weights of the shape)", None, "--model-dir"
    )
    prompt_length: list[Count] = setting("tokens of each prompt", (128,), "--seq-len", "--input-len")
    output_length: list[Count] = setting("new tokens of each text", (8,), "--output-len")
    batch_size: list[int] = setting("texts at the same time", (1, 2, 4, 8, 16))
    precisions: Optional[list[Literal["fp32", "bf16", "fp16"]]] = setting(
        "default: as trained; without a checkpoint: fp32 on a CPU, bf16 on CUDA", None, "--bf16=bf16", "--fp16=fp16"
    )
    iterations: int = setting("measured batches of each row", 10, "--iter")
    warmup: int = setting("batches before them", 2)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    markdown: bool = setting("the table in Markdown", False)
    json: bool = setting("one JSON object a row", False)
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: int = setting("ranks that share the layers", 1, "--pp")
    distributed_timeout_minutes: float = setting("a silent rank is given up after this long", 10.0)


COMMON = tuple(BenchmarkOptions.__dataclass_fields__)
SHAPE = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
VOCABULARY = 50257  # GPT-2's


@dataclass(frozen=True)
class Measured:
    """A row of the table. Times in milliseconds: medians over batches.

    first   from the start of a batch to the first token of a text (median of its texts)
    token   between the tokens of the text whose prompt came last, so that no other prompt is computed meanwhile
    whole   from the start to the end of a batch
    weights, cache, peak: megabytes of a rank: weights, blocks for keys and values, and all that torch allocated (on CUDA)
            or the whole process had (on a CPU) at a time
    """

    prompt: int
    output: int
    batch: int
    precision: str
    first: float
    token: Optional[float]
    whole: float
    tokens_per_second: float
    weights: float
    cache: float
    peak: float


HEADS = {
    "prompt": "prompt",
    "output": "output",
    "batch": "batch",
    "precision": "precision",
    "first": "first token ms",
    "token": "per token ms",
    "whole": "batch ms",
    "tokens_per_second": "tokens/s",
    "weights": "weights MB",
    "cache": "cache MB",
    "peak": "peak MB",
}


def main(argv: list[str]) -> None:
    rank_env.adopt_launcher()
    bound_kernel_caches()
    loads = any(word.partition("=")[0].replace("_", "-") in ("--load", "--model-dir") for word in argv)
    shape = {} if loads else dict(model=Model, tokenizer=TokenizerSettings)
    groups, given = parse_with_record(
        argv,
        dict(benchmark=BenchmarkOptions, quantize=QuantizeOptions) | shape,
        prog="python -m megatron.tools.benchmark_inference",
        description="Measure the speed and the memory of generation.",
        common=COMMON + SHAPE * (not loads),
    )
    settings = groups["benchmark"]
    with failing_in_users_words(given):
        check(settings, given)
        quantize = groups["quantize"]
        rank_env.print_notes(idle_flags(quantize, given))
        parallel = Parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
        )
        config = None if loads else config_of(groups["model"], groups["tokenizer"], settings, given)
        work = lambda context: run(settings, config, context, quantize)
        on_ranks(parallel, settings.device, work, settings.load if loads else None)


def check(settings: BenchmarkOptions, given: Mapping[str, Statement]) -> None:
    """Raise SettingsError for sizes that cannot be measured, UsageError for two kinds of output."""
    for name in ("prompt_length", "output_length", "batch_size", "iterations", "warmup"):
        value, least = getattr(settings, name), 0 if name == "warmup" else 1
        values = value if isinstance(value, (list, tuple)) else [value]
        if min(values) < least:
            raise SettingsError(f"{words_of(given, name, ' '.join(map(str, values)))}: has to be {least} or more")
    if settings.markdown and settings.json:
        raise UsageError("--markdown and --json were both given", do="give one of them")
    rank_env.refuse_other_ranks(*_ranks(settings))


def _ranks(settings: BenchmarkOptions) -> tuple[int, int]:
    return settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size


def config_of(
    model: Model, tokenizer: TokenizerSettings, settings: BenchmarkOptions, given: Mapping[str, Statement]
) -> Config:
    """The settings of a model with random weights. Its context is as long as the longest text, unless it is given."""
    longest = max(settings.prompt_length) + max(settings.output_length)
    if "seq_length" not in given:
        model = replace(model, seq_length=max(model.seq_length, longest))
    vocabulary = replace(tokenizer, vocab_size=tokenizer.vocab_size or VOCABULARY)
    groups = {name: group() for name, group in GROUPS.items() if name not in ("model", "tokenizer")}
    return Config(model=model, tokenizer=vocabulary, **groups)


def run(
    settings: BenchmarkOptions, config: Optional[Config], context, quantize: QuantizeOptions = quantization.PLAIN
) -> None:
    """Measure all rows on the ranks of a job; the first one prints."""
    rows, precisions = [], settings.precisions or [None]
    for precision in precisions:
        loaded = _model(settings, config, precision, context, quantize)
        for prompt, output, batch in product(settings.prompt_length, settings.output_length, settings.batch_size):
            if prompt + output > loaded.longest:
                raise SettingsError(
                    f"a prompt of {prompt} and {output} new tokens are more than the model's {loaded.longest} positions"
                )
            rows.append(measure(loaded, prompt, output, batch, settings.iterations, settings.warmup))
            if rows[-1] is None:  # another rank has it
                continue
            if context.is_rank_zero and settings.json:
                print(json.dumps(asdict(rows[-1])), flush=True)
            elif context.is_rank_zero and sys.stderr.isatty():
                print(f"measured {len(rows)} rows", file=sys.stderr, end="\r")
        del loaded
    if context.is_rank_zero and not settings.json:
        print(shown(rows, markdown=settings.markdown))


@dataclass
class Target:
    """The model to measure, of a checkpoint or an export, or one with random weights."""

    model: object
    longest: int
    vocab_size: int
    precision: str


def _model(
    settings: BenchmarkOptions, config: Optional[Config], precision: Optional[str], context, quantize: QuantizeOptions
) -> Target:
    from megatron.inference.load import build_model
    from megatron.inference.quantize import quantize_layers
    from megatron.inference.stages import chunks_of

    if config is None:
        common = dict(device=context.device, mesh=context.mesh, quantize=quantize)
        loaded = load_one_model(settings.load, None, precision=precision, **common)
        loaded.check_words()
        if getattr(loaded.model, "is_program", False):
            return Target(loaded.model, loaded.longest, loaded.vocab_size, loaded.model.dtype)
        model, longest, vocabulary = loaded.model, loaded.longest, loaded.vocab_size
    else:
        precision = precision or ("fp32" if context.device.type == "cpu" else "bf16")
        vocabulary, m = config.tokenizer.vocab_size, config.model
        built = build_model(config, vocabulary, device=context.device, precision=precision, mesh=context.mesh)
        built.weights.normal_(std=m.init_method_std)
        if quantize.quantize and quantize.quantize_method == "gptq":
            raise SettingsError("--quantize-method gptq: random weights are not calibrated", do="give --load")
        if quantize.quantize:
            quantize_layers(chunks_of(built.model), facts_of(config, vocabulary), quantize)
        model = built.model.eval()
        longest = m.context_length
    if hasattr(model, "decode") or not hasattr(model, "logits"):
        raise SettingsError("only models that continue texts are measured")
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    name = dict(float32="fp32", bfloat16="bf16", float16="fp16")[dtype]
    return Target(model, longest, vocabulary, f"{name} {quantize.quantize}" if quantize.quantize else name)


def measure(target: Target, prompt: int, output: int, batch: int, iterations: int, warmup: int) -> Optional[Measured]:
    """One row, on the first of the ranks that share the model."""
    import torch

    if getattr(target.model, "is_program", False):
        return _measure_program(target, prompt, output, batch, iterations, warmup)

    from megatron.inference.engine import BLOCK_SIZE, Engine, bytes_of_a_token
    from megatron.inference.quantize import weight_bytes
    from megatron.inference.requests import Request
    from megatron.inference.sampling import Sampling

    device = next(target.model.parameters()).device
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(target.model, longest=prompt + output, max_batch=batch)
    if not engine.link.is_first:
        return engine.follow()
    draw, sampling, found = torch.Generator().manual_seed(1), Sampling(output, greedy=True), []
    for _ in range(warmup + iterations):
        prompts = torch.randint(target.vocab_size, (batch, prompt), generator=draw).tolist()
        found.append(_batch(engine, [Request(tuple(tokens), sampling) for tokens in prompts], cuda))
    engine.close()
    cache = engine.stats().blocks * BLOCK_SIZE * bytes_of_a_token(target.model)
    sizes = weight_bytes(target.model), cache, _peak(device)
    return _row((prompt, output, batch, target.precision), found[warmup:], sizes)


def _row(what: tuple[int, int, int, str], found: list[tuple[float, Optional[float], float]], sizes) -> Measured:
    """The medians of batches. found: of `_batch`; sizes: bytes of weights, cache and peak"""
    first, token, whole = (
        statistics.median(times) if (times := [one[place] for one in found if one[place] is not None]) else None
        for place in range(3)
    )
    _, output, batch, _ = what
    times = (1e3 * first, token and 1e3 * token, 1e3 * whole, batch * output / whole)
    return Measured(*what, *times, *(size / 1e6 for size in sizes))


def _measure_program(
    target: Target, prompt: int, output: int, batch: int, iterations: int, warmup: int
) -> Optional[Measured]:
    """As `measure`, of an exported program: all texts of a batch at once. Its ranks compute the same tokens."""
    import torch

    model, draw, found = target.model, torch.Generator().manual_seed(1), []
    for _ in range(warmup + iterations):
        tokens = torch.randint(target.vocab_size, (prompt, batch), generator=draw)
        times = [time.perf_counter()]
        for _ in range(output):
            new = model.logits(tokens, last_only=True).argmax(-1).cpu()  # [1, b]
            tokens = torch.cat((tokens, new))
            times.append(time.perf_counter())
        token = (times[-1] - times[1]) / (output - 1) if output > 1 else None
        found.append((times[1] - times[0], token, times[-1] - times[0]))
    if model.rank > 0:
        return None
    cache = sum(part.nbytes for part in model.past)
    return _row(
        (prompt, output, batch, target.precision), found[warmup:], (model.file_bytes, cache, _peak(model.at.device))
    )


def _batch(engine, requests, cuda: bool) -> tuple[float, Optional[float], float]:
    """Seconds of a batch: to the first token (median of its texts), between tokens, to the end."""
    import torch

    for request in requests:
        engine.add(request)
    firsts, lasts, start = {}, {}, time.perf_counter()
    while engine.busy:
        outputs = engine.step()
        if cuda:
            torch.cuda.synchronize()
        now = time.perf_counter() - start
        for one in outputs:
            firsts.setdefault(one.request, now)
            lasts[one.request] = now
    late = max(firsts, key=firsts.__getitem__)  # from its first token on, no prompt is computed
    token = (lasts[late] - firsts[late]) / (requests[0].sampling.tokens_to_generate - 1 or math.nan)
    return statistics.median(firsts.values()), None if math.isnan(token) else token, max(lasts.values())


def _peak(device) -> int:
    """The most memory so far, in bytes."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def shown(rows: list[Measured], *, markdown: bool) -> str:
    """The table, for a terminal or in Markdown."""
    from megatron.telemetry.figures import WIDE, table

    cells = [[_cell(name, value) for name, value in asdict(row).items()] for row in rows]
    heads = list(HEADS.values())
    if not markdown:
        return table(cells, heads, left=(), width=WIDE)
    lines = [heads, ["---:"] * len(heads), *cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(name: str, value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if name in ("weights", "cache", "peak") else f"{value:,.1f}"
    return str(value)


if __name__ == "__main__":
    run_main(main)
