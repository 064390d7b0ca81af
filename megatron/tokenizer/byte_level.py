# SPDX-License-Identifier: Apache-2.0
"""GPT-2's byte-level BPE from `vocab.json` (token -> id) and `merges.txt` (pairs, most important first).

Tokens are written with one printable character per byte (0x20 as U+0120). Ids need not follow the order of the merges:
vocabularies of the `tokenizers` library sort their first 256 ids differently from GPT-2's.
"""

import functools
import json
import os
from pathlib import Path

import numpy as np

from megatron.errors import DataError, no_such_file
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import engines
from megatron.tokenizer.base import Tokenizer, fingerprint
from megatron.tokenizer.engines import in_pieces

END_OF_TEXT = "<|endoftext|>"


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    vocab_text = read_text(settings.vocab_file, "--vocab-file")
    vocab = parse_vocab(vocab_text, settings.vocab_file)
    merges = parse_merges(read_text(settings.merge_file, "--merge-file"), settings.merge_file)
    strangers = [token for token in map(joined, merges) if token not in vocab]
    if strangers:
        raise DataError(
            f"{settings.merge_file} does not belong to {settings.vocab_file}",
            f"{len(strangers)} of {len(merges)} merged tokens are not in the vocabulary, for example {strangers[0]!r}",
            "give the --vocab-file and --merge-file of the same tokenizer",
        )
    description = functools.cache(lambda: describe(vocab_text, merges))
    tokens = {id: token for token, id in vocab.items()}
    # Cached, so that forked workers share it.
    reference = functools.cache(lambda: in_pieces(engines.tokenizers_engine(description())))
    return Tokenizer(
        name="GPT2BPETokenizer",
        vocab_size=max(tokens) + 1,
        eod=vocab.get(END_OF_TEXT),
        fingerprint=fingerprint("byte-level", *_canonical(vocab), "\n".join(merges)),
        engines={
            "gigatoken": lambda: in_pieces(engines.gigatoken_engine(description(), reference, may_cut=True)),
            "tiktoken": lambda: in_pieces(engines.tiktoken_engine(*ranks(vocab, merges), reference)),
            "tokenizers": reference,
        },
        decode=lambda ids: (
            "".join(tokens.get(id, "") for id in ids)
            .translate(CHARACTER_TO_BYTE)
            .encode("latin-1", "replace")
            .decode("utf-8", "replace")
        ),
    )


def read_text(path: str, flag: str) -> str:
    """The UTF-8 text of a vocabulary file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{flag} {path}: {no_such_file(path)}", f"the working directory is {os.getcwd()}") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise DataError(f"{flag} {path}: not a UTF-8 text file", str(error)) from None


def parse_vocab(text: str, path: str) -> dict[str, int]:
    try:
        vocab = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"--vocab-file {path}: not JSON", str(error), "give the vocab.json of a byte-level BPE"
        ) from None
    if not isinstance(vocab, dict) or not vocab or not all(type(id) is int and id >= 0 for id in vocab.values()):
        do = "a tokenizer.json goes to --tokenizer-type HuggingFaceTokenizer --tokenizer-model"
        raise DataError(f"--vocab-file {path}: not a vocabulary (an object of token: id)", do=do)
    if len(set(vocab.values())) != len(vocab):
        raise DataError(f"--vocab-file {path}: two tokens share an id")
    return vocab


def parse_merges(text: str, path: str) -> list[str]:
    """Pairs `left right`, in order of priority. A first line `#version: ...` is skipped."""
    lines = text.replace("\r\n", "\n").split("\n")
    skipped = lines[0].startswith("#version")
    merges = [line for line in lines[skipped:] if line]
    bad = next((line for line in merges if line.count(" ") != 1 or line[0] == " " or line[-1] == " "), None)
    if bad or not merges:
        at = f"line {lines.index(bad) + 1} is {bad[:60]!r}, not two tokens with a space between them" if bad else None
        why = at or "it is empty"
        raise DataError(f"--merge-file {path}: not a list of merges", why, "give the merges.txt of a byte-level BPE")
    return merges


def joined(merge: str) -> str:
    """The token of a merge. Byte-level tokens contain no space: it is written as U+0120."""
    return merge.replace(" ", "")


def _canonical(vocab: dict[str, int]) -> tuple[str, bytes]:
    """The vocabulary, independent of the order and layout of its file: tokens by id, and the ids."""
    tokens = sorted(vocab, key=vocab.__getitem__)
    return "\n".join(tokens), np.array([vocab[token] for token in tokens], np.int64).tobytes()


def describe(vocab_text: str, merges: list[str]) -> str:
    """The tokenizer as a tokenizer.json, without special tokens, so that their names are ordinary text."""
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    model = dict(
        type="BPE",
        dropout=None,
        unk_token=None,
        continuing_subword_prefix="",
        end_of_word_suffix="",
        fuse_unk=False,
        byte_fallback=False,
        ignore_merges=False,
        vocab={},
        merges=merges,
    )
    whole = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=[],
        normalizer=None,
        pre_tokenizer=byte_level,
        post_processor=None,
        decoder=byte_level,
        model=model,
    )
    return json.dumps(whole, ensure_ascii=False).replace('"vocab": {}', f'"vocab": {vocab_text}', 1)


def ranks(vocab: dict[str, int], merges: list[str]) -> tuple[dict[bytes, int], str, np.ndarray | None]:
    """Arguments for tiktoken: bytes -> rank, the splitting pattern, and ids by rank (None if they are the ranks).

    tiktoken merges the adjacent pair whose joined bytes have the lowest rank, so ranks must follow the merges. Ids that
    increase along the merges can be used as ranks.
    """
    made = [joined(merge) for merge in merges]
    if len(set(made)) != len(made):
        raise ValueError("two merges make the same token, which ranks cannot express")
    order = [*BYTE_TO_CHARACTER, *made]
    missing = [token for token in order if token not in vocab]
    if missing:
        raise ValueError(f"{len(missing)} bytes are not in the vocabulary")
    ids = np.array([vocab[token] for token in order], np.uint32)
    keys = [token.translate(CHARACTER_TO_BYTE).encode("latin-1") for token in order]
    merged = ids[len(BYTE_TO_CHARACTER) :].astype(np.int64)
    if (np.diff(merged) > 0).all():
        return dict(zip(keys, ids.tolist())), engines.PATTERNS["gpt2"], None
    return dict(zip(keys, range(len(keys)))), engines.PATTERNS["gpt2"], ids


def _byte_characters() -> list[str]:
    """The printable character for each byte: the byte itself if printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in range(256)]


BYTE_TO_CHARACTER = _byte_characters()
CHARACTER_TO_BYTE = {ord(character): byte for byte, character in enumerate(BYTE_TO_CHARACTER)}
