# SPDX-License-Identifier: Apache-2.0
"""Loose JSON lines or plain text -> token files for training.

    python preprocess_data.py --input corpus.jsonl --output-prefix my-gpt2 --append-eod \\
        --tokenizer-type GPT2BPETokenizer --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt

makes my-gpt2_text_document.bin and .idx, byte for byte as Megatron-LM does. Input may be compressed, a folder, a glob
or `-` for stdin; lines that are no documents are set aside in my-gpt2.rejected.jsonl and counted. A .txt is a document.
"""

import signal
import sys
import time
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Optional

from megatron.data.file_formats import SEPARATOR_HELP
from megatron.errors import SettingsError, run_main
from megatron.settings.declare import dashed
from megatron.settings.positional import refuse_below
from megatron.settings.schema import TokenizerSettings, setting


@dataclass(frozen=True)
class PreprocessOptions:
    """The input, how it is read, and the output."""

    input: list[str] = setting(
        "JSON lines, or .txt: files, globs, folders, - for stdin; .gz .zst .bz2 .xz .tar too; Parquet and Arrow (pyarrow), "
        "folders of Hugging Face datasets, hf://datasets/ORG/NAME"
    )
    output_prefix: str = setting("files are named <prefix>_<key>_document.bin and .idx")
    load: Optional[str] = setting("folder of checkpoints (an import, or a run) whose tokenizer is taken", None)
    json_keys: Optional[list[str]] = setting(
        "keys whose texts are taken, each into files of its own (default: text)", None
    )
    document_separator: Optional[str] = setting(SEPARATOR_HELP, None)
    output_format: Literal["megatron", "paddle"] = setting(
        "megatron: .bin and .idx; paddle: <prefix>_ids.npy and _idx.npz, as PaddleNLP writes them", "megatron"
    )
    append_eod: bool = setting("put the end-of-document token after each document", False)
    split_sentences: bool = setting("one sequence per sentence (files are named ..._sentence)", False)
    sentence_splitter: Literal["auto", "nltk", "sentencex"] = setting(
        "nltk: Megatron-LM's sentences, needs its punkt data; auto: nltk where they are, else sentencex", "auto"
    )
    lang: str = setting("language of --split-sentences", "english")
    keep_newlines: bool = setting("keep white space between sentences", False)
    workers: Optional[int] = setting("processes (default: one per core); the output does not depend on it", None)
    partitions: int = setting("order documents as Megatron-LM does with this many partitions", 1)
    keep_sequential_samples: bool = setting("keep input order whatever --partitions says", False)
    on_bad_line: Literal["skip", "stop"] = setting("stop: end with exit code 4 at a line that is no document", "skip")
    origin: bool = setting("write <prefix>.origin: from which file and byte each document comes", True)
    contamination: Optional[str] = setting(
        "index of evaluation sets (python -m megatron.tools.contamination) that are looked for in the text", None
    )
    on_contamination: Literal["count", "cut", "drop"] = setting(
        "with --contamination: count what is found; cut out its n-grams and 200 characters on each side; drop the document",
        "count",
    )
    log_interval: int = setting("documents between progress lines", 1000)
    make_vocab_size_divisible_by: int = setting("as in training, to show the padded vocabulary", 128)
    tensor_model_parallel_size: int = setting("as in training, to show the padded vocabulary", 1)
    dataset_impl: Literal["mmap", "lazy", "cached"] = setting("accepted; the one format is mmap", "mmap")
    chunk_size: Optional[int] = setting("accepted, no effect: blocks are cut by bytes", None)
    debug: bool = setting("tracebacks with error messages", False)

    lines_only: ClassVar[bool] = False  # plain text is read, too


COMMON = (
    "input",
    "output_prefix",
    "load",
    "json_keys",
    "document_separator",
    "append_eod",
    "workers",
    "tokenizer_type",
    "vocab_file",
    "merge_file",
    "tokenizer_model",
    "split_sentences",
    "on_bad_line",
    "contamination",
    "on_contamination",
)


def main(argv: list[str]) -> None:
    start = time.perf_counter()
    from megatron.settings.declare import idle_flags
    from megatron.settings.from_checkpoint import tokenizer_of_checkpoint
    from megatron.settings.parse import parse_with_record
    from megatron.settings.statements import given_values

    groups = dict(preprocess=PreprocessOptions, tokenizer=TokenizerSettings)
    parsed, said = parse_with_record(
        argv, groups, prog="preprocess_data.py", description=__doc__.split("\n")[0], common=COMMON
    )
    settings = check(parsed["preprocess"])
    for name in () if settings.split_sentences else ("lang", "keep_newlines", "sentence_splitter"):
        if name in said and said[name].is_request:
            print(f"warning: {dashed(name)} has no effect without --split-sentences")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave by the `finally` clauses

    from megatron.data.json_input import find_sources
    from megatron.data.preprocess import preprocess_and_report
    from megatron.tokenizer import build_tokenizer, padded_vocab_size, tokenizer_type

    find_sources(settings.input)  # what is not there is told before a vocabulary is read
    for name in settings.input:
        print(f"Opening {name}")
    words = parsed["tokenizer"]
    if settings.load:
        words = tokenizer_of_checkpoint(settings.load, given_values(TokenizerSettings, said))
    kind = tokenizer_type(words)
    for sentence in idle_flags(words, said, tokenizer=kind):
        print(f"warning: {sentence}")
    print(f"> building {kind} tokenizer ...")
    tokenizer = build_tokenizer(words, print)
    size = tokenizer.vocab_size
    padded = padded_vocab_size(size, settings.make_vocab_size_divisible_by, settings.tensor_model_parallel_size)
    print(f" > padded vocab (size: {size}) with {padded - size} dummy tokens (new size: {padded})")
    print(f"Vocab size: {size}")
    print(f"Output prefix: {settings.output_prefix}", flush=True)
    preprocess_and_report(settings, tokenizer, start)


def check(settings: PreprocessOptions) -> PreprocessOptions:
    """Settings with the default key filled in. Raises SettingsError for numbers that cannot work."""
    numbers = "workers partitions log_interval make_vocab_size_divisible_by tensor_model_parallel_size chunk_size"
    refuse_below(settings, dict.fromkeys(numbers.split(), 1))
    if settings.on_contamination != "count" and not settings.contamination:
        raise SettingsError(f"--on-contamination {settings.on_contamination} needs --contamination INDEX")
    keys = list(dict.fromkeys(settings.json_keys or ["text"]))
    if settings.dataset_impl != "mmap":
        print(f"--dataset-impl {settings.dataset_impl}: files are written in the mmap format, which is the only one")
    return replace(settings, json_keys=keys)


if __name__ == "__main__":
    run_main(main)
