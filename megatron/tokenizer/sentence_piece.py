# SPDX-License-Identifier: Apache-2.0
"""SentencePiece models (`.model`). End of document is the piece `<EOD>` where the model has one, else its `</s>`."""

from pathlib import Path

from megatron.errors import DataError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import Encode, Tokenizer, fingerprint


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    path = Path(settings.tokenizer_model)
    if not path.is_file():
        raise DataError(f"--tokenizer-model {path}: no such file", do="give the .model file of SentencePiece")
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise DataError("SentencePiece models need the package sentencepiece", do="pip install sentencepiece") from None
    data = path.read_bytes()
    model = SentencePieceProcessor()
    try:
        model.LoadFromSerializedProto(data)
        size = model.GetPieceSize()
    except Exception as error:
        raise DataError(f"--tokenizer-model {path}: not a SentencePiece model", str(error)) from None
    if size == 0:
        raise DataError(f"--tokenizer-model {path}: not a SentencePiece model", "it holds no pieces")
    end = model.PieceToId("<EOD>")
    end = model.eos_id() if end == model.unk_id() else end
    return Tokenizer(
        name=settings.tokenizer_type or "GPTSentencePieceTokenizer",
        vocab_size=size,
        eod=end if end >= 0 else None,
        fingerprint=fingerprint("sentencepiece", data),
        engines={"gigatoken": lambda: _gigatoken(data), "sentencepiece": lambda: model.EncodeAsIds},
        decode=model.DecodeIds,
    )


def _gigatoken(data: bytes) -> Encode:
    """gigatoken reads BPE models with byte fallback and refuses others."""
    from gigatoken import Tokenizer as Gigatoken

    return Gigatoken.from_sentencepiece(data).encode
