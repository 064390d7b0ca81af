# SPDX-License-Identifier: Apache-2.0
"""The last stage: tokenize shards into `.bin` and `.idx` files, one task per shard, then merge them.

The result equals that of `preprocess_data.py` on the shards in their order.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional

from megatron.corpus.documents import read_lines
from megatron.corpus.stage import Made, StagePhase, of_each_shard
from megatron.data.formats import FORMATS
from megatron.errors import SettingsError
from megatron.settings.schema import TokenizerSettings

VERSION = "1"
MAKES_TOKENS = True  # this stage writes no documents: it is the last
NAME = "tokens"


@dataclass(frozen=True)
class TokenizeOptions:
    """The flags of `preprocess_data.py` that a recipe may have, and the number of datasets."""

    tokenizer_type: Optional[str] = None
    vocab_file: Optional[str] = None
    merge_file: Optional[str] = None
    tokenizer_model: Optional[str] = None
    vocab_size: Optional[int] = None
    tiktoken_pattern: Optional[str] = None
    parse_special: bool = False
    append_eod: bool = False
    split_sentences: bool = False
    sentence_splitter: Literal["auto", "nltk", "sentencex"] = "auto"
    lang: str = "english"
    keep_newlines: bool = False
    output_format: Literal["megatron", "paddle"] = "megatron"
    origin: bool = True  # write <prefix>.origin: shard and byte of each document, for `megatron.tools.trace`
    datasets: int = 1  # of about the same number of shards each, for a blend or for files of moderate size


OPTIONS = TokenizeOptions
_OF_TOKENIZER = tuple(
    "tokenizer_type vocab_file merge_file tokenizer_model vocab_size tiktoken_pattern parse_special".split()
)


def phases(options: Mapping[str, Any], shards: int, memory: int) -> list[StagePhase]:
    """One task per shard, then one per dataset. Raises SettingsError for a tokenizer that cannot be built."""
    options = asdict(TokenizeOptions(**options)) | dict(options)
    datasets = options["datasets"]
    if not 1 <= datasets <= shards:
        raise SettingsError(f"datasets {datasets}: from 1 to the number of shards, {shards}")
    _tokenizer(tuple(options[name] for name in _OF_TOKENIZER))
    size = math.ceil(shards / datasets)

    def rows(made: Made) -> list[list[Path]]:
        folders = list(made["tokens"])
        return [folders[at : at + size] for at in range(0, len(folders), size)]

    return [StagePhase("tokens", run=tokenize, split=of_each_shard), StagePhase("merge", run=join, split=rows)]


def tokenize(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Tokenize a shard; write nothing for an empty one."""
    from megatron.data.preprocess import preprocess

    if next(read_lines(inputs[0]), None) is None:
        return dict(documents=0, sequences=0, tokens=0)
    wanted = TokenizeOptions(**options)
    tokenizer = _tokenizer(tuple(getattr(wanted, name) for name in _OF_TOKENIZER))
    totals = preprocess(preprocess_settings(wanted, inputs[0], output / NAME), tokenizer)
    [made] = totals.outputs.values()
    return {name: made[name] for name in ("documents", "sequences", "tokens")} | dict(rejected=totals.rejected)


def preprocess_settings(wanted: TokenizeOptions, shard: Path, prefix: Path) -> SimpleNamespace:
    """The settings of `preprocess`: the fields of `preprocess_data.PreprocessOptions`."""
    given = {name: value for name, value in asdict(wanted).items() if name not in (*_OF_TOKENIZER, "datasets")}
    return SimpleNamespace(
        **given,
        input=[str(shard)],
        output_prefix=str(prefix),
        json_keys=["text"],
        workers=1,
        partitions=1,
        keep_sequential_samples=True,
        on_bad_line="stop",
        contamination=None,
        on_contamination="count",
        document_separator=None,
        lines_only=False,
        log_interval=1000,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        dataset_impl="mmap",
        chunk_size=None,
        load=None,
        debug=False,
    )


@lru_cache(maxsize=2)
def _tokenizer(given: tuple):
    from megatron.tokenizer import build_tokenizer

    return build_tokenizer(TokenizerSettings(**dict(zip(_OF_TOKENIZER, given, strict=True))))


def join(inputs: list[Path], output: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the token files of shards into one dataset, in the order of the shards."""
    from megatron.data.merge import merge

    wanted = TokenizeOptions(**options)
    level = "sentence" if wanted.split_sentences else "document"
    form = FORMATS[wanted.output_format]
    made = f"{NAME}_text_{level}" if wanted.output_format == "megatron" else NAME
    links = output / "links"
    links.mkdir()
    count = 0
    for folder in inputs:
        if (folder / (made + form.endings[-1])).exists():  # missing for an empty shard
            for path in folder.glob(f"{made}*"):  # the merge sorts by name
                ending = path.name.removeprefix(made)
                os.symlink(path.absolute(), links / f"{count:06}{ending}")
            count += 1
    if not count:
        links.rmdir()
        return dict(documents=0, sequences=0, tokens=0)
    merged = merge([str(links)], str(output / f"text_{level}"), output_format=wanted.output_format)
    for path in links.iterdir():
        path.unlink()
    links.rmdir()
    return dict(documents=merged.documents, sequences=merged.sequences, tokens=merged.tokens)
