# SPDX-License-Identifier: Apache-2.0
"""Generate text with a trained model.

    python -m megatron.tools.generate --load runs/quickstart/checkpoints --prompt "The module" --top-p 0.9
    python -m megatron.tools.launch --nproc-per-node 4 -m megatron.tools.generate --load runs/t5 --prompt "..." \\
        --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2

Everything about the model and its vocabulary is read from the checkpoint, whatever layout wrote it. Prompts come from
--prompt (one or several) or from a file, one a line. Ranks share the model, and the first one prints.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import DataError, SettingsError, UsageError, run_main
from megatron.guard.job import on_ranks
from megatron.inference.sampling import IDLE, Sampling, Search, cut_off
from megatron.model import quantization
from megatron.model.quantization import QuantizeOptions
from megatron.settings import rank_env
from megatron.settings.effects import idle_flags
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import Parallel, TokenizerSettings, setting
from megatron.settings.statements import Statement, failing_in_users_words, given_values, in_users_words, words_of


@dataclass(frozen=True)
class GenerateOptions:
    """The model, the prompts and the output."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    prompt: Optional[list[str]] = setting("texts to continue", None)
    prompt_file: Optional[str] = setting("file with one text a line; - is standard input", None, "--sample-input-file")
    output: Optional[str] = setting(
        "file for the texts, instead of standard output", None, "--sample-output-file", "--genfile"
    )
    num_samples: int = setting("continuations of each prompt", 1)
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    precision: Optional[Literal["fp32", "bf16", "fp16"]] = setting(
        "default: as trained", None, "--bf16=bf16", "--fp16=fp16"
    )
    use_cache: bool = setting(
        "keep keys and values of earlier tokens; off: compute them again (slow, same text)", True, "--recompute=false"
    )
    json: bool = setting("one JSON object a line: prompt, text, tokens", False)
    tensor_model_parallel_size: int = setting("ranks that divide each matrix", 1, "--tp")
    pipeline_model_parallel_size: Optional[int] = setting("ranks that share the layers (default: 1)", None, "--pp")
    encoder_pipeline_stages: Optional[int] = setting(
        "encoder-decoders: the first so many pipeline ranks have layers of the encoder (default: all)", None
    )
    decoder_pipeline_stages: Optional[int] = setting(
        "encoder-decoders: the last so many pipeline ranks have layers of the decoder (default: all)", None
    )
    distributed_timeout_minutes: float = setting("a silent rank is given up after this long", 10.0)
    save_inference_model_then_exist: bool = setting("PaddleNLP's export of a program: not supported", False)

    @property
    def halves(self) -> tuple[Optional[int], Optional[int]]:
        """Pipeline ranks with layers of the encoder, and of the decoder; None: all."""
        return self.encoder_pipeline_stages, self.decoder_pipeline_stages

    @property
    def pp(self) -> int:
        """Pipeline ranks; by default as many of this job's ranks as `halves` allow, which may overlap."""
        if self.pipeline_model_parallel_size is not None:
            return self.pipeline_model_parallel_size
        least, most = max(1, *(half or 1 for half in self.halves)), max(1, sum(half or 0 for half in self.halves))
        here = rank_env.ranks().world_size // max(1, self.tensor_model_parallel_size)
        return here if least <= here <= most else most


COMMON = tuple(
    """
    load prompt prompt_file output num_samples tokens_to_generate greedy temperature top_k top_p repetition_penalty
    sampling_seed num_beams device json tensor_model_parallel_size pipeline_model_parallel_size
    """.split()
)


def main(argv: list[str]) -> None:
    rank_env.adopt_launcher()
    groups, given = parse_with_record(
        argv,
        dict(
            generate=GenerateOptions,
            quantize=QuantizeOptions,
            sampling=Sampling,
            search=Search,
            tokenizer=TokenizerSettings,
        ),
        prog="python -m megatron.tools.generate",
        description="Continue texts with a trained model.",
        common=COMMON,
    )
    settings, sampling, search = groups["generate"], groups["sampling"], groups["search"]
    with failing_in_users_words(given):
        check(settings, given)
        sampling.check(given)
        sampling, notes = sampling.normalized()
        search.check(sampling, given)
        notes += idle_flags(sampling, given, IDLE, beams=search.num_beams)
        notes += idle_flags(groups["quantize"], given, quantization.IDLE)
        here = rank_env.ranks()
        for note in notes if here.rank == 0 else ():
            print(f"note: {note}", file=sys.stderr)
        piped = settings.prompt_file == "-" and here.rank > 0  # standard input is the first rank's
        prompts = None if piped else read_prompts(settings)

        parallel = Parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pp,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
        )

        def work(context) -> None:
            from megatron.mpu.collectives import broadcast_object

            texts = broadcast_object(prompts, context.mesh.world)
            write(settings, groups["quantize"], sampling, search, given, texts, context)

        on_ranks(parallel, settings.device, work)


def check(settings: GenerateOptions, given: Mapping[str, Statement]) -> None:
    """Raise SettingsError for an impossible number of ranks, before torch is loaded. given: setting -> its source."""
    if settings.save_inference_model_then_exist:
        raise SettingsError(
            "--save-inference-model-then-exist: models are saved as weights, not as programs",
            do="leave it out to generate from the checkpoint; python -m megatron.tools.checkpoint to-hf exports weights",
        )
    tp, pp, world = settings.tensor_model_parallel_size, settings.pp, rank_env.ranks().world_size
    sizes = dict(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, num_samples=settings.num_samples)
    for name, size in sizes.items():
        if size < 1:
            raise SettingsError(f"{words_of(given, name, size)}: has to be at least 1")
    if not settings.distributed_timeout_minutes > 0:
        minutes = words_of(given, "distributed_timeout_minutes", settings.distributed_timeout_minutes)
        raise SettingsError(f"{minutes}: has to be above 0")
    if tp * pp != world:
        raise SettingsError(
            f"the model is shared by tensor {tp} x pipeline {pp} = {tp * pp} ranks, and this job has {world}",
            do=f"{rank_env.launch_command(tp * pp)}, or give --tensor-model-parallel-size and "
            "--pipeline-model-parallel-size whose product is the number of ranks",
        )


def write(
    settings: GenerateOptions,
    quantize: QuantizeOptions,
    sampling: Sampling,
    search: Search,
    given: Mapping[str, Statement],
    texts: list[str],
    context,
) -> None:
    """Continue texts on the ranks of a job (`mpu.initialize.RankContext`); the first of them prints.

    given: setting -> who gave it
    """
    from megatron.inference.generation import generate
    from megatron.inference.load import load_model, open_tokenizer
    from megatron.inference.prompts import no_sentinels, source_of, targets_of

    prompts = [text for text in texts for _ in range(settings.num_samples)]
    loaded = load_model(
        settings.load,
        device=context.device,
        precision=settings.precision,
        step=settings.ckpt_step,
        mesh=context.mesh,
        halves=settings.halves,
        quantize=quantize,
    )
    loaded.check_words()
    pairs = hasattr(loaded.model, "decode")  # an encoder-decoder: prompts are sources
    if not (pairs or loaded.continues_texts):
        raise SettingsError(
            f"{settings.load} holds a model of type {loaded.config.model.model_type}, which generates nothing",
            "its module has no method logits for the next token, as a GPT has",
        )
    for flag, value in (("start", search.decoder_start_id), ("end", search.decoder_end_id)):
        if value is not None and not pairs:
            raise SettingsError(
                f"--decoder-{flag}-id {value} is of encoder-decoders, and {settings.load} holds none", do="leave it out"
            )
    tokenizer = open_tokenizer(loaded, given_values(TokenizerSettings, given))
    notes, pp = list(loaded.notices), context.mesh.pp
    if sampling.top_k > tokenizer.vocab_size:
        notes.append(
            f"--top-k {sampling.top_k} is more than the {tokenizer.vocab_size} tokens that there are: all count"
        )
    if pairs:
        sources = [source_of(tokenizer, prompt, number) for number, prompt in enumerate(prompts, 1)]
        notes += no_sentinels(tokenizer, sources)
        start = time.perf_counter()
        answers = targets_of(loaded, tokenizer, sources, sampling, search, pp)
        rooms = [loaded.model.facts.target for _ in sources]
    else:
        more = dict(longest=loaded.longest, end=tokenizer.eod, use_cache=settings.use_cache, pp=pp)
        encoded, start = [tokenizer.encode(prompt) for prompt in prompts], time.perf_counter()
        answers = generate(loaded.model, encoded, sampling, search, **more)
        rooms = [loaded.longest - len(tokens) for tokens in encoded]
    if not context.is_rank_zero:
        return
    seconds = time.perf_counter() - start
    for note in [*notes, *cut_off(rooms, answers, sampling)]:
        print(f"note: {in_users_words(note, given)}", file=sys.stderr)
    texts = shown(prompts, answers, tokenizer, as_json=settings.json, apart=" -> " if pairs else "")
    if settings.output:
        write_output(Path(settings.output), texts)
    else:
        print(texts, end="")
    count = sum(map(len, answers))
    print(f"{loaded.path}: {count} tokens in {seconds:.2f} s = {count / seconds:.0f} tokens/s", file=sys.stderr)


def read_prompts(settings: GenerateOptions) -> list[str]:
    """The texts to continue. Raises UsageError when there are none, DataError when their file is missing."""
    if settings.prompt and settings.prompt_file:
        raise UsageError("--prompt and --prompt-file were both given", do="give one of them")
    prompts = settings.prompt or []
    if settings.prompt_file == "-":
        prompts = sys.stdin.read().split("\n")
    elif settings.prompt_file:
        try:
            prompts = Path(settings.prompt_file).read_text(encoding="utf-8").split("\n")
        except FileNotFoundError:
            raise DataError(f"--prompt-file {settings.prompt_file}: no such file") from None
        except (IsADirectoryError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt-file {settings.prompt_file}: not a UTF-8 text file", str(error)) from None
    prompts = [prompt for prompt in prompts if prompt]
    if not prompts:
        raise UsageError("there is no text to continue", do='--prompt "Once upon a time", or --prompt-file FILE')
    return prompts


def shown(prompts: list[str], answers: list[list[int]], tokenizer, *, as_json: bool, apart: str = "") -> str:
    """The prompts with their continuations. apart: the text between both."""
    texts = map(tokenizer.decode, answers)
    if as_json:
        records = (dict(prompt=p, text=text, tokens=answer) for p, text, answer in zip(prompts, texts, answers))
        return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    return ("-" * 40 + "\n").join(f"{prompt}{apart}{text}\n" for prompt, text in zip(prompts, texts))


def write_output(path: Path, texts: str) -> None:
    """Write or replace a file of texts. Raises StorageError if it cannot be written."""
    from megatron.storage.durable import replace_file, storage_errors

    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            print(f"note: replaces {path}", file=sys.stderr)
        replace_file(path, texts.encode())


if __name__ == "__main__":
    run_main(main)
