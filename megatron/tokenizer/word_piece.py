# SPDX-License-Identifier: Apache-2.0
"""WordPiece of BERT, ERNIE and ELECTRA from `vocab.txt` (one token per line, ids are line numbers), with `tokenizers`.

Megatron-LM's BertWordPieceLowerCase and BertWordPieceCase have two additional ids, [BOS] and [EOS], after those of the
file. PaddleNLP's BertTokenizer, ErnieTokenizer and ElectraTokenizer do not, and have no end-of-document token.
"""

import functools
import json
import os
import re
from pathlib import Path

import numpy as np

from megatron.errors import DataError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import Encode, Tokenizer, fingerprint
from megatron.tokenizer.byte_level import read_text
from megatron.tokenizer.segmenters import Segment

UNKNOWN = "[UNK]"
LOWER = {"BertWordPieceLowerCase": True, "BertWordPieceCase": False}  # for other types, files decide
ENDS = ("[BOS]", "[EOS]")  # of Megatron-LM
LONGEST_WORD = 4  # tokens of a word in whole-word masking, as in PaddleNLP
CHINESE = re.compile("[\u4e00-\u9fa5]")


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    vocab = read_vocab(settings.vocab_file)
    if settings.tokenizer_type in LOWER:
        for token in ENDS:
            vocab.setdefault(token, max(vocab.values()) + 1)
    lower = lower_cased(settings)
    load = functools.cache(lambda: _load(vocab, lower))
    return _tokenizer(settings, vocab, lower, load, lambda: _encode(load()))


def build_whole_words(settings: TokenizerSettings, segment: Segment) -> Tokenizer:
    """A tokenizer for whole-word masking of Chinese: each character x of a word but the first becomes "##x".

    `segment` finds the words. Marked characters that are not in the vocabulary (ERNIE's has none) get ids after its own,
    in the order of the characters.
    """
    vocab = read_vocab(settings.vocab_file)
    marked = with_marked_characters(vocab)
    lower = lower_cased(settings)
    load = functools.cache(lambda: _load(vocab, lower))
    return _tokenizer(settings, marked, lower, load, lambda: _mark_words(_encode(load()), marked, segment))


def _tokenizer(settings: TokenizerSettings, vocab: dict[str, int], lower: bool, load, engine) -> Tokenizer:
    tokens = {id: token for token, id in vocab.items()}

    def decode(ids: list[int]) -> str:
        return load().decoder.decode([tokens.get(id, UNKNOWN) for id in ids])

    return Tokenizer(
        name=settings.tokenizer_type,
        vocab_size=max(vocab.values()) + 1,
        eod=vocab["[EOS]"] if settings.tokenizer_type in LOWER else None,
        fingerprint=fingerprint("word piece", str(lower), "\n".join(sorted(vocab, key=vocab.__getitem__))),
        engines={"tokenizers": engine},
        decode=decode,
        pieces=vocab,
    )


def read_vocab(path: str) -> dict[str, int]:
    """Token -> id. A duplicate token has its last id. ERNIE's files have lines `token TAB id`."""
    lines = read_text(path, "--vocab-file").split("\n")
    if not lines[-1]:
        lines.pop()
    vocab = {}
    for number, line in enumerate(lines):
        token, tab, id = line.removesuffix("\r").partition("\t")
        if tab and id != str(number):
            why = f"line {number + 1} is {line[:60]!r}"
            raise DataError(f"--vocab-file {path}: not a vocabulary with a token a line", why)
        vocab[token] = number
    if UNKNOWN not in vocab:
        why = f"it has no {UNKNOWN}, and {len(vocab)} lines"
        do = "give the vocab.txt of a BERT, ERNIE or ELECTRA model"
        raise DataError(f"--vocab-file {path}: not a WordPiece vocabulary", why, do)
    return vocab


def lower_cased(settings: TokenizerSettings) -> bool:
    """Whether text is lower-cased: by type, by tokenizer_config.json next to the file, or by a name with "cased"."""
    if settings.tokenizer_type in LOWER:
        return LOWER[settings.tokenizer_type]
    path = Path(settings.vocab_file).absolute()
    config = path.with_name("tokenizer_config.json")
    if config.exists():
        try:
            lower = json.loads(config.read_text(encoding="utf-8")).get("do_lower_case")
        except (ValueError, AttributeError):
            raise DataError(f"{config}: not JSON settings of a tokenizer", do="repair or remove it") from None
        if lower is not None:
            return bool(lower)
    name = f"{path.parent.name} {path.name}"
    return "cased" not in name or "uncased" in name


def _load(vocab: dict[str, int], lower: bool):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as HuggingFace
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = HuggingFace(models.WordPiece(vocab, unk_token=UNKNOWN, max_input_chars_per_word=100))
    model.normalizer = normalizers.BertNormalizer(lowercase=lower)
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    return model


def _encode(model) -> Encode:
    return lambda text: model.encode(text, add_special_tokens=False).ids


# Whole words ----------------------------------------------------------------------------------------------------------


def with_marked_characters(vocab: dict[str, int]) -> dict[str, int]:
    """Add "##x" to the vocabulary for each of its Chinese characters x."""
    characters = [token for token in sorted(vocab, key=vocab.__getitem__) if len(token) == 1 and CHINESE.match(token)]
    lacking = [f"##{token}" for token in characters if f"##{token}" not in vocab]
    return vocab | {token: id for id, token in enumerate(lacking, max(vocab.values()) + 1)}


def _mark_words(encode: Encode, vocab: dict[str, int], segment: Segment) -> Encode:
    """Replace the ids of Chinese characters inside of words by those of the marked tokens.

    As in PaddleNLP: from each Chinese token on, the longest run of up to LONGEST_WORD tokens that forms a word of the text
    is one word; other tokens are unchanged.
    """
    tokens = {id: token for token, id in vocab.items()}
    unknown = vocab[UNKNOWN]

    def encode_words(text: str) -> np.ndarray:
        words = segment(text)
        ids = np.array(encode("".join(words)), np.int64)
        pieces, known, at = [tokens[id] for id in ids.tolist()], set(words), 0
        while at < len(pieces):
            length = _word_at(pieces, at, known) if CHINESE.search(pieces[at]) else 1
            for inside in range(at + 1, at + length):
                ids[inside] = vocab.get(f"##{pieces[inside]}", unknown)
            at += length
        return ids

    return encode_words


def _word_at(pieces: list[str], at: int, words: set[str]) -> int:
    """Length of the longest word that starts at a token; 1 if there is none."""
    for length in range(min(LONGEST_WORD, len(pieces) - at), 1, -1):
        if "".join(pieces[at : at + length]) in words:
            return length
    return 1
