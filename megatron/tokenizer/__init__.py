# SPDX-License-Identifier: Apache-2.0
"""Tokenizers, all with the interface of `megatron.tokenizer.base.Tokenizer`.

tokenizer = build_tokenizer(settings)
tokenizer.encode("Hello world"), tokenizer.eod, tokenizer.vocab_size  # ([15496, 995], 50256, 50257) for GPT-2's files
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

from megatron.errors import DataError, SettingsError, did_you_mean
from megatron.settings.declare import dashed
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import SENTINEL, SPECIAL, Tokenizer
from megatron.tokenizer.vocabulary_folders import here, kind_of, with_files

TYPES = {  # --tokenizer-type -> module with `build`, required settings
    "GPT2BPETokenizer": ("byte_level", ("vocab_file", "merge_file")),
    "HuggingFaceTokenizer": ("huggingface", ("tokenizer_model",)),
    "SentencePieceTokenizer": ("sentence_piece", ("tokenizer_model",)),
    "GPTSentencePieceTokenizer": ("sentence_piece", ("tokenizer_model",)),
    "Llama2Tokenizer": ("sentence_piece", ("tokenizer_model",)),
    "GPTChineseTokenizer": ("sentence_piece", ("tokenizer_model",)),
    "TikTokenizer": ("ranks", ("tokenizer_model",)),
    "BertWordPieceLowerCase": ("word_piece", ("vocab_file",)),
    "BertWordPieceCase": ("word_piece", ("vocab_file",)),
    "BertTokenizer": ("word_piece", ("vocab_file",)),
    "ErnieTokenizer": ("word_piece", ("vocab_file",)),
    "ElectraTokenizer": ("word_piece", ("vocab_file",)),
    "NullTokenizer": ("null", ("vocab_size",)),
}

READS = {  # module -> the file that its --tokenizer-model is
    "huggingface": "a tokenizer.json of Hugging Face",
    "sentence_piece": "a .model file of SentencePiece",
    "ranks": "a .tiktoken file, or Megatron-LM's JSON ranks",
}


def build_tokenizer(settings: TokenizerSettings, notify=lambda message: None):
    """Build the `base.Tokenizer` of `--tokenizer-type` and the vocabulary flags.

    `notify` receives one-line notes. Raises SettingsError for missing flags, DataError for missing or invalid vocabulary
    files.
    """
    settings = resolved(settings)
    kind = settings.tokenizer_type
    if kind not in TYPES:
        near = did_you_mean(kind, TYPES)
        raise SettingsError(f"--tokenizer-type {kind} is unknown{near}", do=f"known: {', '.join(TYPES)}")
    module, flags = TYPES[kind]
    missing = [dashed(flag) for flag in flags if getattr(settings, flag) is None]
    if missing:
        do = "or --tokenizer-model with the folder that has them, or its name in $MEGATRON_CACHE"
        raise SettingsError(f"--tokenizer-type {kind} needs {' and '.join(missing)}", do=do)
    try:
        tokenizer = import_module(f"megatron.tokenizer.{module}").build(settings, notify)
    except DataError as error:
        if error.do or module not in READS:
            raise
        do = f"{kind} reads {READS[module]}; vocab.json and merges.txt are --vocab-file and --merge-file (GPT2BPETokenizer)"
        raise DataError(error.what, error.why, do) from error
    tokenizer.parse_special = settings.parse_special
    return with_extra_ids(tokenizer, settings.vocab_extra_ids) if settings.vocab_extra_ids else tokenizer


def resolved(settings: TokenizerSettings) -> TokenizerSettings:
    """The settings with the type of tokenizer, and the files of a folder or name: what `build_tokenizer` opens.

    Raises SettingsError if no tokenizer is given, DataError for a name that is not in the cache.
    """
    settings = here(settings)
    kind = tokenizer_type(settings)
    return with_files(replace(settings, tokenizer_type=kind), kind)


def with_extra_ids(tokenizer: Tokenizer, count: int) -> Tokenizer:
    """Add missing special tokens to a tokenizer, and sentinels <extra_id_0> ... up to `count`.

    The ids equal Megatron-LM's: those of <CLS>, <SEP>, <EOD>, <MASK>, <PAD>, <BOS>, <EOS> that are missing, then the
    sentinels. Sentinels of the vocabulary count.
    """
    lacks = {name: f"<{name.upper()}>" for name in SPECIAL if tokenizer.special(name) is None}
    pieces = tokenizer.name in ("SentencePieceTokenizer", "GPTSentencePieceTokenizer")
    if tokenizer.eod is None or pieces and "<EOD>" not in tokenizer.pieces:
        lacks["eod"] = "<EOD>"
    special = [lacks[name] for name in ("cls", "sep", "eod", "mask", "pad", "bos", "eos") if name in lacks]
    more = tokenizer.with_tokens(special + [SENTINEL.format(i) for i in range(len(tokenizer.sentinels), count)])
    if more.eod is None:
        more.eod = more.pieces["<EOD>"]
    return more


def padded_vocab_size(vocab_size: int, divisible_by: int = 128, tp: int = 1) -> int:
    """Number of rows of the embedding: the vocabulary rounded up to a multiple of `divisible_by` x `tp`.

    >>> padded_vocab_size(50257, 128, tp=2)
    50432
    """
    multiple = divisible_by * tp
    return -(-vocab_size // multiple) * multiple


def tokenizer_type(settings: TokenizerSettings) -> str:
    """The --tokenizer-type, or the type that the given vocabulary files imply."""
    settings = here(settings)
    if settings.tokenizer_type:
        return settings.tokenizer_type
    if settings.vocab_file and settings.merge_file:
        return "GPT2BPETokenizer"
    if settings.tokenizer_model:
        by_suffix = {".model": "GPTSentencePieceTokenizer", ".tiktoken": "TikTokenizer"}
        path = Path(settings.tokenizer_model)
        return by_suffix.get(path.suffix) or (not path.is_file() and kind_of(str(path))) or "HuggingFaceTokenizer"
    raise SettingsError(
        "no tokenizer is given",
        do="--tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt, or "
        "--tokenizer-model tokenizer.json, or --tokenizer-type NullTokenizer --vocab-size N",
    )
