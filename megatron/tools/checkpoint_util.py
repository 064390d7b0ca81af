# SPDX-License-Identifier: Apache-2.0
"""Rewrite a checkpoint for other tensor and pipeline parallel sizes, by the flags of Megatron-LM's tool of this name.

    python -m megatron.tools.checkpoint_util --load-dir A --save-dir B --target-tensor-parallel-size 2

Loading needs no such step here: any layout reads any checkpoint. `megatron.tools.checkpoint` does the work: `reshard` for
checkpoints of this suite, optimizer state included, and `from-megatron` for those of Megatron-LM.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import CheckpointError, SettingsError, run_main
from megatron.settings.positional import parse_one
from megatron.settings.schema import setting
from megatron.storage.urls import location


@dataclass(frozen=True)
class UtilOptions:
    """From where, to where, for which sizes."""

    load_dir: str = setting("folder of checkpoints to read")
    save_dir: str = setting("folder for the new one")
    target_tensor_parallel_size: int = setting(
        "tensor parallel ranks: a file for each", 1, "--target-tensor-model-parallel-size"
    )
    target_pipeline_parallel_size: int = setting(
        "pipeline stages: a file for each", 1, "--target-pipeline-model-parallel-size"
    )
    model_type: Optional[Literal["GPT", "BERT", "T5"]] = setting("the kind of model (default: the checkpoint's)", None)
    loader: Optional[str] = setting("megatron or mcore: which of them --load-dir has is recognised", None)
    saver: Optional[str] = setting("megatron or mcore: this suite's format is written in their place", None)
    megatron_path: Optional[str] = setting("accepted: no code from there is run", None)
    true_vocab_size: Optional[int] = setting("tokens without padding, of a checkpoint of Megatron-LM", None)
    max_queue_size: Optional[int] = setting("accepted: one process reads and writes", None)
    checking: bool = setting("off: accepted; every tensor is checked", True)


def main(argv: list[str]) -> None:
    """Translate the flags and let `megatron.tools.checkpoint` do it."""
    asked = parse_one(argv, UtilOptions, "python -m megatron.tools.checkpoint_util", __doc__)
    _check_formats(asked)
    from megatron.tools import checkpoint

    source = Path(asked.load_dir)
    theirs = ("mp_rank_*", "*/mp_rank_*", "*.distcp", "*/*.distcp")  # Megatron-LM's own formats
    foreign = any(next(source.glob(pattern), None) for pattern in theirs)
    if foreign and asked.model_type in (None, "GPT"):
        if max(asked.target_tensor_parallel_size, asked.target_pipeline_parallel_size) > 1:
            _note(
                "--target-*-parallel-size have no effect on what is read from Megatron-LM: any layout loads the result"
            )
        size = [] if asked.true_vocab_size is None else ["--vocab-size", str(asked.true_vocab_size)]
        return checkpoint.main(["from-megatron", asked.load_dir, asked.save_dir, *size])
    if foreign:
        raise SettingsError(
            f"--model-type {asked.model_type}: {source} is a checkpoint of Megatron-LM, of which GPTs are read",
            do="a T5 or BERT of Hugging Face transformers: python -m megatron.tools.checkpoint from-hf",
        )
    if asked.true_vocab_size is not None:
        _note("--true-vocab-size has no effect: the checkpoint knows the size of its vocabulary")
    if asked.model_type:
        with checkpoint.open_reader(location(asked.load_dir), checkpoint.WhichCheckpoint()) as reader:
            found = reader.state.get("config", {}).get("model", {}).get("model_type", "GPT")
        if found != asked.model_type:
            raise CheckpointError(f"--model-type {asked.model_type}: {source} holds a model of type {found}")
    sizes = f"--tp {asked.target_tensor_parallel_size} --pp {asked.target_pipeline_parallel_size}"
    checkpoint.main(["reshard", asked.load_dir, asked.save_dir, *sizes.split()])


def _check_formats(asked: UtilOptions) -> None:
    """Raise SettingsError for formats of other libraries; a note tells a --saver what is written in its place."""
    tool, folders = "python -m megatron.tools.checkpoint", f"{asked.load_dir} {asked.save_dir}"
    for flag, word, command in (("loader", asked.loader, "from-hf"), ("saver", asked.saver, "to-hf")):
        if word not in (None, "megatron", "mcore"):
            raise SettingsError(
                f"--{flag} {word}: it is megatron or mcore here",
                do=f"for a model of Hugging Face transformers: {tool} {command} {folders}",
            )
    if asked.saver:
        _note(f"--saver {asked.saver} writes this suite's format; Megatron-LM's: {tool} to-megatron {folders}")


def _note(sentence: str) -> None:
    print(f"note: {sentence}", file=sys.stderr)


if __name__ == "__main__":
    run_main(main)
