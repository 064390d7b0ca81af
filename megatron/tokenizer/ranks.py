# SPDX-License-Identifier: Apache-2.0
"""tiktoken vocabularies from a local file: each token's bytes with its rank.

Two formats: OpenAI's `.tiktoken` (lines of base64 of the bytes, a space, the rank; ids are ranks) and Megatron-LM's
JSON list of `{"rank", "token_bytes", "token_str"}` (ids are ranks + 1000; special tokens are below).
"""

import base64
import binascii
import functools
import json
from pathlib import Path

from megatron.errors import DataError, SettingsError, no_such_file
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import engines
from megatron.tokenizer.base import Tokenizer, fingerprint

# Number of ranks of the published files -> splitting pattern, id of <|endoftext|>, number of ids.
PUBLISHED = {50256: ("gpt2", 50256, 50257), 100256: ("cl100k", 100257, 100277), 199998: ("o200k", 199999, 200019)}
MEGATRON_SPECIAL_TOKENS, MEGATRON_END, MEGATRON_VOCAB = 1000, 2, 2**17


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    path = Path(settings.tokenizer_model)
    if not path.is_file():
        raise DataError(
            f"--tokenizer-model {path}: {no_such_file(path)}", do="give a .tiktoken file or Megatron-LM's JSON ranks"
        )
    data = path.read_bytes()
    if path.suffix == ".json":
        pattern, end = settings.tiktoken_pattern or "v2", MEGATRON_END
        size = settings.vocab_size or MEGATRON_VOCAB
        ranks = _megatron_ranks(data, path, size)
        size = min(size, len(ranks) + MEGATRON_SPECIAL_TOKENS)
    else:
        ranks = _tiktoken_ranks(data, path)
        top = max(ranks.values()) + 1
        pattern, end, size = PUBLISHED.get(len(ranks), (None, top, top + 1))
        pattern = settings.tiktoken_pattern or pattern
    if pattern is None:
        do = f"--tiktoken-pattern {', '.join(engines.PATTERNS)}, or the pattern itself"
        raise SettingsError(
            f"{path} does not say how to split text, and {len(ranks)} ranks are no published file", do=do
        )
    regex = engines.PATTERNS.get(pattern, pattern)
    by_id = {rank: token for token, rank in ranks.items()}
    may_cut = pattern in engines.PATTERNS
    cut = engines.in_pieces if may_cut else lambda encode: encode
    reference = functools.cache(lambda: cut(_tiktoken(ranks, regex, pattern)))
    fast = {"gigatoken": lambda: cut(engines.gigatoken_ranks_engine(str(path), pattern, reference, may_cut))}
    known_to_gigatoken = path.suffix != ".json" and pattern in ("gpt2", "cl100k", "o200k")
    return Tokenizer(
        name="TikTokenizer",
        vocab_size=size,
        eod=end,
        fingerprint=fingerprint("ranks", regex, data),
        engines={**(fast if known_to_gigatoken else {}), "tiktoken": reference},
        decode=lambda ids: b"".join(by_id.get(id, b"") for id in ids).decode("utf-8", "replace"),
    )


def _tiktoken(ranks, regex: str, pattern: str):
    try:
        return engines.tiktoken_engine(ranks, regex)
    except ValueError as error:
        raise SettingsError(f"--tiktoken-pattern {pattern}: not a pattern", str(error)) from None


def _tiktoken_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    try:
        pairs = (line.split() for line in data.splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise DataError(
            f"--tokenizer-model {path}: not a .tiktoken file", "a line is base64, a space, a rank"
        ) from None
    return _checked(ranks, path)


def _megatron_ranks(data: bytes, path: Path, vocab_size: int) -> dict[bytes, int]:
    try:
        entries = json.loads(data)[: vocab_size - MEGATRON_SPECIAL_TOKENS]
        ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] + MEGATRON_SPECIAL_TOKENS for entry in entries}
    except (ValueError, KeyError, TypeError):
        why = 'expected a list of {"rank": 0, "token_bytes": base64, "token_str": text}'
        raise DataError(f"--tokenizer-model {path}: not Megatron-LM's JSON ranks", why) from None
    return _checked(ranks, path)


def _checked(ranks: dict[bytes, int], path: Path) -> dict[bytes, int]:
    """Check that all 256 bytes are there and no rank is used twice; otherwise some texts could not be encoded."""
    missing = sum(bytes([byte]) not in ranks for byte in range(256))
    if missing or len(set(ranks.values())) != len(ranks):
        raise DataError(f"--tokenizer-model {path}: {missing} single bytes are missing, or ranks repeat")
    return ranks
