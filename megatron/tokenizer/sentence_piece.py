# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models (`.model`). The end-of-document token is `<EOD>` or `<eod>` if the model has it, else `</s>`.

Llama2Tokenizer is Megatron-LM's: each document and prompt begins with `<s>`, and `</s>` is the end of document.

Most models put a space before a text. Text after a special token gets none, as in transformers (`legacy: false`).

GPTChineseTokenizer is PaddleNLP's tokenizer of the CPM models: jieba segments the text into words, spaces and newlines
become marks, and the model encodes the words joined by spaces.
"""

import functools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Optional

from megatron.errors import DataError, MissingPackage, no_such_file
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import SENTINEL, SPECIAL, Encode, Tokenizer, fingerprint
from megatron.tokenizer.segmenters import Segment, make_segmenter

MARKED = str.maketrans(" \n", "\u2582\u2583")
UNMARKED = str.maketrans("\u2582\u2583", " \n")
# Appended to a model, whose fields it replaces, as protocol buffers are merged: normalizer_spec.add_dummy_prefix = false
NO_SPACE_BEFORE = b"\x1a\x02\x18\x00"


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    path = Path(settings.tokenizer_model)
    if not path.is_file():
        raise DataError(f"--tokenizer-model {path}: {no_such_file(path)}", do="give the .model file of SentencePiece")
    data = path.read_bytes()
    try:
        model = _processor(data)
        size = model.GetPieceSize()
    except ImportError:
        raise MissingPackage(
            "SentencePiece models need the package sentencepiece", do="pip install sentencepiece"
        ) from None
    except Exception as error:
        raise DataError(f"--tokenizer-model {path}: not a SentencePiece model", str(error)) from None
    if size == 0:
        raise DataError(f"--tokenizer-model {path}: not a SentencePiece model", "it holds no pieces")
    ends = [id for id in map(model.PieceToId, ("<EOD>", "<eod>")) if id != model.unk_id()]
    of_llama = settings.tokenizer_type == "Llama2Tokenizer"
    end = ends[0] if ends and not of_llama else model.eos_id()
    if of_llama and model.bos_id() < 0:
        raise DataError(f"--tokenizer-model {path}: it has no token that begins texts", "Llama2Tokenizer puts it there")
    if settings.tokenizer_type == "GPTChineseTokenizer":
        segment = make_segmenter("jieba", "--tokenizer-type GPTChineseTokenizer")
        engines = {"sentencepiece": lambda: lambda text: model.EncodeAsIds(marked_words(text, segment))}
        decode = lambda ids: model.DecodeIds(ids).replace(" ", "").translate(UNMARKED)
    else:
        engines = {"gigatoken": lambda: _gigatoken(data), "sentencepiece": lambda: model.EncodeAsIds}
        decode = model.DecodeIds
    tokenizer = SentencePieceTokenizer(
        name=settings.tokenizer_type or "GPTSentencePieceTokenizer",
        vocab_size=size,
        eod=end if end >= 0 else None,
        fingerprint=fingerprint("sentencepiece", data, *["after <s>"] * of_llama),
        engines=engines,
        decode=decode,
        pieces=_special_pieces(model),
        special={name: id for name in ("pad", "bos", "eos", "unk") if (id := getattr(model, f"{name}_id")()) >= 0},
    )
    tokenizer.control = {model.IdToPiece(id): id for id in range(size) if model.IsControl(id) or model.IsUnknown(id)}
    if of_llama:
        tokenizer.prefix = tokenizer.before_documents = [model.bos_id()]
    if settings.tokenizer_type != "GPTChineseTokenizer":
        after = functools.cache(lambda: _processor(data + NO_SPACE_BEFORE))
        tokenizer.encode_after = lambda text: after().EncodeAsIds(text)
    return tokenizer


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model. control: name -> id of its control tokens and the unknown one.

    encode_after: encodes a text that follows a special token
    """

    encode_after: Optional[Encode] = None
    control: Mapping[str, int] = MappingProxyType({})

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        return {**self.control, **Tokenizer.special_tokens.func(self)}

    def _encode_after(self, text: str) -> Sequence[int]:
        return (self.encode_after or self.plain_encoder)(text)


def _processor(data: bytes):
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor()
    model.LoadFromSerializedProto(data)
    return model


def _special_pieces(model) -> dict[str, int]:
    """The special tokens and sentinels of the model, by name."""
    names = [token for tokens in SPECIAL.values() for token in tokens] + ["<EOD>", "<eod>"]
    special = {name: id for name in names if (id := model.PieceToId(name)) != model.unk_id()}
    sentinels = {}
    while (id := model.PieceToId(name := SENTINEL.format(len(sentinels)))) != model.unk_id():
        sentinels[name] = id
    return special | sentinels


def marked_words(text: str, segment: Segment) -> str:
    """The words of a text joined by spaces, with marks for its own spaces and newlines.

    >>> marked_words("ab c", lambda text: ["a", "b", " ", "c"])
    'a b \u2582 c'
    """
    return " ".join(word.translate(MARKED) for word in segment(text))


def _gigatoken(data: bytes) -> Encode:
    """gigatoken from a BPE model with byte fallback; it refuses others."""
    from gigatoken import Tokenizer as Gigatoken

    return Gigatoken.from_sentencepiece(data).encode
