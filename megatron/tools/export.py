# SPDX-License-Identifier: Apache-2.0
"""Export a trained model for other programs: Hugging Face, llama.cpp, ONNX, or a program of torch's own.

    python -m megatron.tools.export --load runs/gpt --output exports/gpt
    python -m megatron.tools.export --load runs/gpt --output exports/gpt-gguf --format gguf --dtype q8_0
    python -m megatron.tools.export --load runs/gpt --output exports/gpt-onnx --format onnx --kind generation
    python -m megatron.tools.export --load runs/gpt --output exports/gpt-mp2 --format torch-export \\
        --tensor-model-parallel-size 2

The checkpoint may be of any layout. Before the folder appears, the program that will run it (transformers, llama.cpp,
onnxruntime, torch) and this suite compute the same tokens: the largest difference is printed, and an export that differs
too much is not written (exit code 5). On CPU. Flags of sampling and beam search (--top-p 0.9) go to
generation_config.json, whose settings the programs take that read the folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

from megatron.errors import SettingsError, UsageError, run_main
from megatron.inference.sampling import Sampling, Search
from megatron.model.quantization import QuantizeOptions
from megatron.settings import rank_env
from megatron.settings.declare import idle_flags
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import TokenizerSettings, setting
from megatron.settings.statements import Statement, given_values, in_users_words, words_of
from megatron.storage.urls import UrlPath, location


@dataclass(frozen=True)
class ExportOptions:
    """The model, and what it becomes."""

    load: str = setting("folder of checkpoints, or one checkpoint")
    output: str = setting("new folder for the export")
    format: Literal["hf", "gguf", "onnx", "torch-export"] = setting(
        "hf: safetensors for transformers, vLLM and others; gguf: for llama.cpp; onnx, torch-export: a program", "hf"
    )
    dtype: Optional[Literal["fp32", "bf16", "fp16", "q8_0", "q4_0", "q4_1"]] = setting(
        "format of the weights (default: as trained); q8_0, q4_0, q4_1: blocks of 8 or 4 bits of gguf",
        None,
        "--bf16=bf16",
        "--fp16=fp16",
    )
    kind: Literal["lm", "generation"] = setting(
        "of a program: lm gives scores at every position, generation those of the next token, with a cache", "lm"
    )
    tensor_model_parallel_size: int = setting(
        "ranks that will share the model; torch-export: a program each", 1, "--tp"
    )
    check: bool = setting("compare with the program that will run it; --no-check: write without comparing", True)
    ckpt_step: Optional[int] = setting("checkpoint of this step instead of the newest", None)
    num_samples: Optional[int] = setting(
        "continuations of each prompt, for generation_config.json as the flags of sampling and beam search",
        None,
        "--num-return-sequences",
    )


def main(argv: list[str]) -> None:
    """Export, and print what was written and how well both sides agree."""
    groups, given = parse_with_record(
        argv,
        dict(
            export=ExportOptions,
            quantize=QuantizeOptions,
            sampling=Sampling,
            search=Search,
            tokenizer=TokenizerSettings,
        ),
        prog="python -m megatron.tools.export",
        description="Export a trained model for other programs.",
        common=tuple(ExportOptions.__dataclass_fields__),
    )
    settings = groups["export"]
    rank_env.print_notes(idle_flags(groups["quantize"], given))
    with failing_in_users_words(given):
        if settings.tensor_model_parallel_size < 1:
            size = words_of(given, "tensor_model_parallel_size", settings.tensor_model_parallel_size)
            raise SettingsError(f"{size}: has to be at least 1")
        if isinstance(location(settings.output), UrlPath):
            raise UsageError(f"--output {settings.output} is a URL", do="export to a folder, and copy that")

        from megatron.convert.export.source import Wanted
        from megatron.convert.export.write import export
        from megatron.storage.new_folder import check_free

        out = Path(settings.output)
        check_free(out, words_of(given, "output", out))
        wanted = Wanted(
            settings.format,
            settings.dtype,
            settings.kind,
            settings.tensor_model_parallel_size,
            settings.check,
            groups["quantize"],
            recommended(groups, given),
        )
        tokenizer = given_values(TokenizerSettings, given)
        notes = export(settings.load, out, wanted, step=settings.ckpt_step, given=tokenizer)
        print("\n  ".join(in_users_words(note, given) for note in notes))


def recommended(groups: Mapping[str, Any], given: Mapping[str, Statement]) -> dict[str, Any]:
    """The given settings of generation, which generation_config.json recommends to the programs that read the export."""
    sampling: Sampling = groups["sampling"]
    sampling.check(given)
    groups["search"].check(sampling, given)
    sampling, notes = sampling.normalized()
    rank_env.print_notes(notes)
    found = given_values(Sampling, given) | given_values(Search, given)
    found = {name: getattr(sampling, name, value) for name, value in found.items() if name != "decoding_strategy"}
    return found | ({} if groups["export"].num_samples is None else dict(num_samples=groups["export"].num_samples))


if __name__ == "__main__":
    run_main(main)
