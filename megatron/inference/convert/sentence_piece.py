# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model as a tokenizer.json of Hugging Face, with the model's ids.

transformers converts models of certain families, and treats spaces as those do. Here each step is that of the model:

    charsmap -> remove_extra_whitespaces -> add_dummy_prefix -> pieces by BPE or Unigram, characters without one as bytes

What differs: names of control tokens in a text are special tokens, as everywhere in transformers; with Unigram a name like
<0x0A> is the byte, and of two segmentations that are equally likely `tokenizers` may choose the other one; and after a
character that the charsmap replaces, `tokenizers` drops a combining mark.
"""

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

SPACE = "\u2581"  # stands for a space in pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models


def read_model(data: bytes):
    """The content of a .model file, a `ModelProto`."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(data)


def tokenizer_json(proto) -> dict[str, Any]:
    """The content of tokenizer.json. Raises ValueError for a model that `tokenizers` does not express."""
    kind, normalizer = proto.trainer_spec.model_type, dict(type="Sequence", normalizers=list(_normalizers(proto)))
    if kind not in (UNIGRAM, BPE):
        raise ValueError("it is a model of words or of characters")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError("it has the spaces after the words")
    if any(piece.type == UNUSED for piece in proto.pieces):
        raise ValueError("it has unused pieces")
    if lost := _lost_symbols(proto, normalizer):
        raise ValueError(f"`tokenizers` would not find its user-defined symbol {lost[0]!r}")
    found = _found_first(proto)
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[
            added_token(id, piece.piece, special=piece.type != USER_DEFINED)
            for id, piece in enumerate(proto.pieces)
            if piece.type in (UNKNOWN, CONTROL) or piece.piece in found
        ],
        normalizer=normalizer,
        pre_tokenizer=None,
        post_processor=None,
        decoder=dict(type="Sequence", decoders=list(_decoders(proto.normalizer_spec))),
        model=_unigram(proto) if kind == UNIGRAM else _bpe(proto),
    )


def added_token(id: int, content: str, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens`: special ones are found before a text is normalized, others after it."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return dict(id=id, content=content, **plain, normalized=not special, special=special)


# ---- symbols ---------------------------------------------------------------------------------------------------------


def _symbols(proto) -> list[str]:
    """The user-defined symbols that occur: where they are looked for, a text has no spaces any more."""
    return [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and " " not in piece.piece]


def _found_first(proto) -> list[str]:
    """The symbols that are found before a text is cut into other pieces. Unigram chooses them by their scores."""
    return _symbols(proto) if proto.trainer_spec.model_type == BPE else []


def _lost_symbols(proto, normalizer: dict[str, Any]) -> list[str]:
    """The symbols that `tokenizers` would not find. It normalizes a symbol like a text, and SentencePiece does not; and of
    several places in a run of spaces, Unigram would choose another one there.
    """
    from tokenizers import Tokenizer

    plain = dict(type="BPE", vocab={}, merges=[])
    normal = Tokenizer.from_str(json.dumps(dict(added_tokens=[], normalizer=normalizer, model=plain))).normalizer
    prefixed = SPACE if proto.normalizer_spec.add_dummy_prefix and not _found_first(proto) else ""
    lost = [name for name in _symbols(proto) if normal.normalize_str(name) != prefixed + name]
    return lost or [name for name in _symbols(proto) if not _found_first(proto) and not name.strip(SPACE)]


# ---- texts -----------------------------------------------------------------------------------------------------------


def _normalizers(proto) -> Iterator[dict[str, Any]]:
    def replace(pattern: str, content: str) -> dict[str, Any]:
        return dict(type="Replace", pattern=dict(Regex=pattern), content=content)

    from tokenizers import normalizers

    spec = proto.normalizer_spec
    if spec.precompiled_charsmap:
        if normalizers.Precompiled(spec.precompiled_charsmap).normalize_str("\n") == " ":
            yield replace("\r\n", "  ")  # which `tokenizers` takes for one character
        yield dict(type="Precompiled", precompiled_charsmap=base64.b64encode(spec.precompiled_charsmap).decode())
    if spec.remove_extra_whitespaces:
        yield replace(r"\A +", "")
        yield replace(f"[ {SPACE}]+\\z", "")
        yield replace(" {2,}", " ")
    if spec.add_dummy_prefix:
        names = "|".join([r"\z", *(rf"{re.escape(name)}\z" for name in _found_first(proto))])  # see `_lost_symbols`
        yield replace(rf"\A(?!{names})", " ")
    yield dict(type="Replace", pattern=dict(String=" "), content=SPACE)


def _decoders(spec) -> Iterator[dict[str, Any]]:
    yield dict(type="Replace", pattern=dict(String=SPACE), content=" ")
    yield dict(type="ByteFallback")
    yield dict(type="Fuse")
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        yield dict(type="Strip", content=" ", start=1, stop=0)


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _unigram(proto) -> dict[str, Any]:
    most = max([0.0, *(piece.score for piece in proto.pieces if piece.type == NORMAL)])

    def score(piece) -> float:  # symbols: that of SentencePiece, which prefers them
        return len(piece.piece.encode()) * most - 0.1 if piece.type == USER_DEFINED else piece.score

    return dict(
        type="Unigram",
        unk_id=proto.trainer_spec.unk_id,
        vocab=[[piece.piece, score(piece)] for piece in proto.pieces],
        byte_fallback=proto.trainer_spec.byte_fallback,
    )


def _bpe(proto) -> dict[str, Any]:
    ids = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    parts = {piece.piece for piece in proto.pieces if piece.type == NORMAL}
    merges = []
    for piece in proto.pieces:
        cuts = ((piece.piece[:at], piece.piece[at:]) for at in range(1, len(piece.piece)) if piece.type == NORMAL)
        merges += [(-piece.score, len(left), left, right) for left, right in cuts if {left, right} <= parts]
    return dict(
        type="BPE",
        dropout=None,
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        continuing_subword_prefix=None,
        end_of_word_suffix=None,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
        ignore_merges=False,
        vocab=ids,
        merges=[[left, right] for _, _, left, right in sorted(merges)],
    )
