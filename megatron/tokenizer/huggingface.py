# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from a `tokenizer.json` of Hugging Face, given as the file or its folder."""

import functools
import json
import os
from pathlib import Path

from megatron.errors import DataError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer import engines
from megatron.tokenizer.base import SPECIAL, Tokenizer, fingerprint
from megatron.tokenizer.byte_level import read_text

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "[SEP]")


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    path = Path(settings.tokenizer_model)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        do = "give a tokenizer.json or a folder with one (hub names are not looked up: download the tokenizer first)"
        raise DataError(f"--tokenizer-model {path}: no such file", do=do)
    text = read_text(str(path), "--tokenizer-model")
    try:
        description = json.loads(text)
        model = description["model"]["type"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise DataError(f"--tokenizer-model {path}: not a tokenizer.json") from None
    plain = json.dumps(without_special_tokens(description), ensure_ascii=False)
    whole = _load(text, path)
    vocab = whole.get_vocab(with_added_tokens=True)
    reference = functools.cache(lambda: engines.tokenizers_engine(plain))
    candidates = {"gigatoken": lambda: engines.gigatoken_engine(plain, reference)} if model == "BPE" else {}
    return Tokenizer(
        name="HuggingFaceTokenizer",
        vocab_size=max(vocab.values()) + 1,
        eod=_end_of_document(path, vocab),
        fingerprint=fingerprint("tokenizer.json", json.dumps(description, sort_keys=True)),
        engines={**candidates, "tokenizers": reference},
        decode=lambda ids: whole.decode(ids, skip_special_tokens=False),
        pieces=vocab,
        special={name: id for name in SPECIAL if (id := vocab.get(_configured(path, f"{name}_token"))) is not None},
    )


def without_special_tokens(description: dict) -> dict:
    """The description of the tokenizer without special tokens, so that their names in a text are ordinary text.

    Their entries among the added tokens are removed. A Unigram model would still match them as pieces, so its pieces are
    renamed to strings that do not occur in texts.
    """
    added = description.get("added_tokens") or []
    special = {token["content"]: token["id"] for token in added if token.get("special")}
    model = dict(description["model"])
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
        model["vocab"] = [
            [f"\x00{index}\x00", score] if piece in special and index != unknown else [piece, score]
            for index, (piece, score) in enumerate(model["vocab"])
        ]
    kept = [token for token in added if not token.get("special")]
    return {
        **description,
        "added_tokens": kept,
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "model": model,
    }


def _load(text: str, path: Path):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as HuggingFace

    try:
        return HuggingFace.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"--tokenizer-model {path}: `tokenizers` cannot read it", str(error)) from None


def _end_of_document(path: Path, vocab: dict[str, int]) -> int | None:
    """The id of `eos_token` (or `sep_token`) in tokenizer_config.json next to the file, else of a common name."""
    names = [_configured(path, "eos_token"), _configured(path, "sep_token"), *END_TOKENS]
    return next((vocab[name] for name in names if name in vocab), None)


def _configured(path: Path, key: str) -> str | None:
    """The special token under this key in tokenizer_config.json next to the file; None if there is none."""
    config = path.with_name("tokenizer_config.json")
    if not config.exists():
        return None
    token = json.loads(config.read_text(encoding="utf-8")).get(key)
    return token.get("content") if isinstance(token, dict) else token
