# SPDX-License-Identifier: Apache-2.0
"""A SentencePiece model as a tokenizer.json of Hugging Face, with the model's ids.

transformers converts models of certain families, and treats spaces as those do. Here each step is that of the model:

    charsmap -> remove_extra_whitespaces -> add_dummy_prefix -> pieces by BPE or Unigram, characters without one as bytes

What differs: names of control tokens in a text are special tokens, as everywhere in transformers; with Unigram a name like
<0x0A> is the byte, and of two segmentations that are equally likely `tokenizers` may choose the other one; and after a
character that the charsmap replaces, `tokenizers` drops a combining mark, and it composes no more than five bytes. Where
the model removes extra spaces, it drops all white space after a special token.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

SPACE = "\u2581"  # stands for a space in pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE = 1, 2  # types of models


def read_model(data: bytes):
    """The content of a .model file, a `ModelProto`."""
    from sentencepiece import sentencepiece_model_pb2

    return sentencepiece_model_pb2.ModelProto.FromString(data)


def tokenizer_json(proto, special: Mapping[str, int], prefix: Sequence[int] = ()) -> dict[str, Any]:
    """The content of tokenizer.json. special: name -> id of special tokens, which may come after those of the model.
    prefix: the special tokens that begin a prompt

    Raises ValueError for a model that `tokenizers` does not express.
    """
    kind, spec = proto.trainer_spec.model_type, proto.normalizer_spec
    if kind not in (UNIGRAM, BPE):
        raise ValueError("it is a model of words or of characters")
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise ValueError("it has the spaces after the words")
    if any(piece.type == UNUSED for piece in proto.pieces):
        raise ValueError("it has unused pieces")
    for name in _symbols(proto):
        if _mapped(spec, name) != name.replace(SPACE, _mapped(spec, SPACE)):
            raise ValueError(f"its charsmap changes its user-defined symbol {name!r}")
        if kind == UNIGRAM and not name.strip(SPACE) and not spec.remove_extra_whitespaces:
            raise ValueError(f"its user-defined symbol {name!r} may stand at several places of a run of spaces")
    return dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added_tokens(special, rstrip=_keeps_first(spec)),
        normalizer=dict(type="Sequence", normalizers=list(_normalizers(spec))),
        pre_tokenizer=dict(type="Sequence", pretokenizers=list(_pre_tokenizers(proto))),
        post_processor=_beginning({id: name for name, id in special.items()}, prefix),
        decoder=dict(type="Sequence", decoders=list(_decoders(spec))),
        model=_unigram(proto) if kind == UNIGRAM else _bpe(proto),
    )


def _beginning(names: Mapping[int, str], prefix: Sequence[int]) -> Optional[dict[str, Any]]:
    """The part of a tokenizer.json that puts tokens before a text; None without any. names: of special tokens"""
    if not prefix:
        return None
    begin = [dict(SpecialToken=dict(id=names[id], type_id=0)) for id in prefix]
    texts = [dict(Sequence=dict(id=name, type_id=at)) for at, name in enumerate("AB")]
    tokens = {names[id]: dict(id=names[id], ids=[id], tokens=[names[id]]) for id in prefix}
    return dict(type="TemplateProcessing", single=[*begin, texts[0]], pair=[*begin, *texts], special_tokens=tokens)


def added_tokens(special: Mapping[str, int], rstrip: bool = False) -> list[dict[str, Any]]:
    """`added_tokens` of a tokenizer.json, from name -> id. rstrip: whether spaces after special tokens are dropped"""
    rule = dict(single_word=False, lstrip=False, rstrip=rstrip, normalized=False, special=True)
    return [dict(id=id, content=name, **rule) for name, id in sorted(special.items(), key=lambda one: one[1])]


# ---- texts -----------------------------------------------------------------------------------------------------------


def _normalizers(spec) -> Iterator[dict[str, Any]]:
    """Steps for each piece of a text between special tokens."""

    def replace(pattern: str, content: str) -> dict[str, Any]:
        return dict(type="Replace", pattern=dict(Regex=pattern), content=content)

    if spec.precompiled_charsmap:
        if _mapped(spec, "\r") == " ":  # `tokenizers` takes \r\n for one character
            yield replace("\r", " ")
        yield dict(type="Precompiled", precompiled_charsmap=base64.b64encode(spec.precompiled_charsmap).decode())
    if spec.remove_extra_whitespaces:
        yield replace(f"[ {SPACE}]+\\z", "")
        yield replace(" {2,}", " ")
    if spec.remove_extra_whitespaces and not _keeps_first(spec):
        yield replace(r"\A ", "")
    if not _keeps_first(spec):
        yield dict(type="Replace", pattern=dict(String=" "), content=SPACE)


def _keeps_first(spec) -> bool:
    """Whether the space that begins a text is that of add_dummy_prefix. Where the first character is removed, `Metaspace`
    would not see the beginning of the text.
    """
    return spec.remove_extra_whitespaces and spec.add_dummy_prefix


def _mapped(spec, text: str) -> str:
    """The text after the charsmap."""
    from tokenizers import normalizers

    charsmap = spec.precompiled_charsmap
    return normalizers.Precompiled(charsmap).normalize_str(text) if charsmap else text


def _pre_tokenizers(proto) -> Iterator[dict[str, Any]]:
    """A space before the text, but not after a special token; and cuts around symbols."""
    if proto.normalizer_spec.add_dummy_prefix:
        for character, where in ((" ", "first"), (SPACE, "never")):  # adds one where there is none; replaces all
            yield dict(type="Metaspace", replacement=character, prepend_scheme=where, split=False)
    if names := _cut_out(proto):
        pattern = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        yield dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)


def _symbols(proto) -> list[str]:
    """The user-defined symbols that occur: where they are looked for, a text has no spaces any more."""
    return [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED and " " not in piece.piece]


def _cut_out(proto) -> list[str]:
    """The symbols that are cut out before a text is divided. Unigram chooses them by their scores."""
    return _symbols(proto) if proto.trainer_spec.model_type == BPE else []


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
        ignore_merges=bool(_cut_out(proto)),  # a symbol is whole
        vocab=ids,
        merges=[[left, right] for _, _, left, right in sorted(merges)],
    )
