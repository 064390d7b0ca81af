# SPDX-License-Identifier: Apache-2.0
"""The vocabulary of token files, recorded in `<prefix>.stats.json` by preprocessing.

Only this file can show that ids belong to another vocabulary.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron.data.indexed import bare_prefix
from megatron.errors import DataError
from megatron.tokenizer.base import Tokenizer


def identity_of(prefix: str) -> dict | None:
    """The tokenizer of `<prefix>.bin`: type, vocab_size, eod, fingerprint. None if it is not recorded."""
    path = Path(f"{prefix}.stats.json")
    if not path.exists():
        return None
    try:
        identity = json.loads(path.read_text(encoding="utf-8"))["tokenizer"]
        if identity is None or all(isinstance(value, (str, int, type(None))) for value in identity.values()):
            return identity
        raise ValueError(identity)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path}: damaged", do="remove it: it is not needed, only checked") from None


def name_of(identity: dict) -> str:
    ids = f" with {identity['vocab_size']} ids" if identity.get("vocab_size") else ""
    return f"{identity.get('type') or 'a vocabulary'}{ids} ({str(identity.get('fingerprint'))[:8]})"


def tokenizer_identity(tokenizer: Tokenizer) -> dict:
    tokenizer = tokenizer.whole
    return dict(
        type=tokenizer.name, vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, fingerprint=tokenizer.fingerprint
    )


def learned_vocabulary(tokenizer: Tokenizer | None, before: str | None = None) -> dict:
    """The entries of a checkpoint on the vocabulary that its model has learned.

    before: fingerprint in the checkpoint that the run resumed. That of an earlier version of the suite stays: the model has
    learned ids of that version.
    """
    identity = None if tokenizer is None else tokenizer_identity(tokenizer)
    if identity and tokenizer.superseded.get(before):
        identity["fingerprint"] = before
    return dict(vocabulary=identity and identity["fingerprint"], tokenizer=identity)


def identity_learned(record: Mapping[str, Any]) -> dict | None:
    """The identity of the vocabulary in the record of a checkpoint or an export; None if it has none.

    Earlier versions recorded the fingerprint alone, and no type where the files imply it.
    """
    if (identity := record.get("tokenizer")) or not (fingerprint := record.get("vocabulary")):
        return identity
    return dict(type=record["config"].get("tokenizer", {}).get("tokenizer_type"), fingerprint=fingerprint)


def other_ids(tokenizer: Tokenizer, what: str, fingerprint: str | None) -> list[str]:
    """A note if an earlier version of this suite gave the tokenizer other ids, and `what` was made with those."""
    if not tokenizer.superseded.get(fingerprint):
        return []
    return [
        f"{what} was made with this tokenizer by an earlier version, which gave wrong ids: "
        f"{tokenizer.superseded[fingerprint]}; preprocess texts again, and train models of them again, if they have these"
    ]


def refuse_other_vocabulary(paths: Iterable[str], tokenizer: Tokenizer | None) -> list[str]:
    """Raise DataError for a dataset that is known to have another vocabulary than the tokenizer.

    Returns notes on datasets that were made by an earlier version, with other ids.
    """
    if tokenizer is None:
        return []
    own, notes = tokenizer_identity(tokenizer), []
    for path in paths:
        made = identity_of(bare_prefix(path)) or {}
        if found := other_ids(tokenizer, path, made.get("fingerprint")):
            notes += found
        else:
            refuse_another_identity([path], own)
    return notes


def refuse_another_identity(paths: Iterable[str], own: dict) -> None:
    """`refuse_other_vocabulary` for the identity of a tokenizer, whose files may be gone.

    paths: prefixes. Two types of tokenizer may store the same vocabulary in different files, so only their sizes and
    end-of-document tokens are compared. NullTokenizer matches any data. A type of None is unknown.
    """
    if own["type"] == "NullTokenizer":
        return
    for prefix in map(bare_prefix, paths):
        made = identity_of(prefix)
        if not made or made.get("type") == "NullTokenizer":
            continue
        compared = ("fingerprint",) if own["type"] in (None, made.get("type")) else ("vocab_size", "eod")
        if any(name in own and made.get(name) != own[name] for name in compared):
            raise DataError(
                f"{prefix} was made with another vocabulary",
                f"the data: {name_of(made)}; now: {name_of(own)}",
                "give the tokenizer that the data was preprocessed with, or preprocess it again; "
                f"{prefix}.stats.json says so: remove it if it is wrong",
            )
