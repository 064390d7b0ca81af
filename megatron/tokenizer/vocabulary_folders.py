# SPDX-License-Identifier: Apache-2.0
"""Vocabularies by folder or by name: `--tokenizer-model DIR`, or a name that is a folder of $MEGATRON_CACHE.

    --tokenizer-type GPT2BPETokenizer --tokenizer-model gpt2-en

reads vocab.json and merges.txt of $MEGATRON_CACHE/gpt2-en (~/.cache/megatron/gpt2-en if the variable is not set).
A folder that `tools.checkpoint from-hf` wrote has a tokenizer in it, and hf://ORG/NAME is downloaded from the hub. Nothing
else is: an error names the missing files.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from megatron.errors import DataError
from megatron.settings.presets import cache_folder, cached, not_elsewhere, shared
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub
from megatron.tokenizer.transformers_files import CONFIG, MODEL_CONFIG, TOKENIZER, VOCABULARIES, tokenizer_config

Wanted = Mapping[str, tuple[str, ...]]  # setting -> possible names of its file, the usual one first

BYTE_LEVEL: Wanted = dict(
    vocab_file=("vocab.json", "gpt-en-vocab.json", "gpt2-vocab.json"),
    merge_file=("merges.txt", "gpt-en-merges.txt", "gpt2-merges.txt"),
)
WORD_PIECE: Wanted = dict(vocab_file=("vocab.txt", "*vocab.txt"))
SENTENCE_PIECE: Wanted = dict(tokenizer_model=("sentencepiece.model", "tokenizer.model", "spiece.model", "*.model"))
WANTED: dict[str, Wanted] = {
    "GPT2BPETokenizer": BYTE_LEVEL,
    "BertWordPieceLowerCase": WORD_PIECE,
    "BertWordPieceCase": WORD_PIECE,
    "BertTokenizer": WORD_PIECE,
    "ErnieTokenizer": WORD_PIECE,
    "ElectraTokenizer": WORD_PIECE,
    "SentencePieceTokenizer": SENTENCE_PIECE,
    "GPTSentencePieceTokenizer": SENTENCE_PIECE,
    "Llama2Tokenizer": SENTENCE_PIECE,
    "GPTChineseTokenizer": SENTENCE_PIECE,
    "HuggingFaceTokenizer": dict(tokenizer_model=("tokenizer.json",)),
    "TikTokenizer": dict(tokenizer_model=("*.tiktoken",)),
}
KINDS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "GPTSentencePieceTokenizer", "TikTokenizer")
TOKENIZER_FOLDER, TRACKER = "tokenizer", "latest_checkpointed_iteration.txt"  # in the folder of an import
_FILES = (".json", ".model", ".tiktoken", ".txt")


def here(settings: TokenizerSettings) -> TokenizerSettings:
    """The settings with a folder of this machine in the place of an import, or of a name on the hub."""
    given = settings.tokenizer_model
    if given and hub.is_hub(given):
        return replace(settings, tokenizer_model=_fetched(given))
    inside = Path(given or "", TOKENIZER_FOLDER)
    is_import = given and inside.is_dir() and (Path(given) / TRACKER).is_file()
    return replace(settings, tokenizer_model=str(inside)) if is_import else settings


@cache
def _fetched(name: str) -> str:
    return str(hub.fetched(name, hub.TOKENIZER_FILES))


def with_files(settings: TokenizerSettings, kind: str) -> TokenizerSettings:
    """Resolve a folder or name in --tokenizer-model to files; other settings are unchanged.

    kind: the type of tokenizer. Raises DataError for a name that is not in the cache, or a folder that lacks a file.
    """
    given, wanted = settings.tokenizer_model, WANTED.get(kind, {})
    others = [name for name in wanted if name != "tokenizer_model"]
    if not given or not wanted or others and all(getattr(settings, name) for name in others):
        return settings
    path = Path(given)
    if path.is_file():
        return replace(settings, tokenizer_model=None, **{others[0]: given}) if len(others) == 1 else settings
    if not path.is_dir() and (os.sep in given or given.endswith(_FILES)):
        return settings  # a missing file: opening it reports the error
    folder = path if path.is_dir() else _cached(given, wanted)
    if kind == "HuggingFaceTokenizer" and _is_of_transformers(folder, CONFIG, MODEL_CONFIG):
        return replace(settings, tokenizer_model=str(folder))  # transformers makes a tokenizer.json of it
    files = {name: _find(folder, names) for name, names in wanted.items()}
    lost = [" or ".join(names) for name, names in wanted.items() if files[name] is None]
    if lost:
        has = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        do = "--load with this folder takes the tokenizer of a run" if (folder / TRACKER).is_file() else None
        raise DataError(f"{folder} lacks {' and '.join(lost)} for {kind}", f"it has: {has}", do)
    return replace(settings, **(dict(tokenizer_model=None) | files))


def kind_of(given: str) -> str | None:
    """The type of tokenizer whose files a folder has, here or in the cache; else that of the model with this name."""
    of_model = {"gpt2": "GPT2BPETokenizer", "gpt-cpm": "GPTChineseTokenizer"}.get(shared(given))
    folder = Path(given) if Path(given).is_dir() else cached(given)
    if folder and _is_of_transformers(folder, CONFIG) and not _is_of_gpt2(folder):
        return "HuggingFaceTokenizer"
    kinds = [of_model, *KINDS] if of_model else KINDS
    there = (kind for kind in kinds if folder and all(_find(folder, names) for names in WANTED[kind].values()))
    return next(there, of_model)


def _is_of_transformers(folder: Path, *configs: str) -> bool:
    """Whether a folder has a tokenizer of transformers without tokenizer.json. configs: files that name its class."""
    there = lambda name: (folder / name).is_file()
    return any(map(there, configs)) and not there(TOKENIZER) and any(map(there, VOCABULARIES))


def _is_of_gpt2(folder: Path) -> bool:
    """Whether tokenizer_config.json says that vocab.json and merges.txt are GPT-2's."""
    kind = tokenizer_config(folder).get("tokenizer_class")
    return (folder / "merges.txt").is_file() and kind in (None, "GPT2Tokenizer", "GPT2TokenizerFast")


def _cached(name: str, wanted: Wanted) -> Path:
    if folder := cached(name):
        return folder
    cache = cache_folder()
    files = " and ".join(names[0] for names in wanted.values())
    raise DataError(
        f"there is no vocabulary {name!r}: neither a folder here nor one of {cache} (MEGATRON_CACHE){not_elsewhere(name)}",
        "nothing is downloaded",
        f"put {files} into {cache / name}, or give the folder that has them",
    )


def _find(folder: Path, names: tuple[str, ...]) -> str | None:
    """The first file of the folder with one of these names. A pattern must match exactly one file."""
    for name in names:
        matches = list(folder.glob(name))
        if len(matches) == 1:
            return str(matches[0])
    return None
