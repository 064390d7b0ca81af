# SPDX-License-Identifier: Apache-2.0
"""Prompts for an encoder-decoder, with sentinels for the spans to generate, and its answers."""

import re
from typing import Optional

from megatron.errors import DataError, SettingsError
from megatron.inference.sampling import GREEDY, Search
from megatron.tokenizer.base import SENTINEL


def source_of(tokenizer, prompt: str, number: Optional[int] = None) -> list[int]:
    """Encode a text for the encoder; <extra_id_0> ... in it are sentinels for the spans to generate. number: for errors

    A tokenizer that puts a token after prompts, as Hugging Face's of T5 does, encodes the text as any other prompt. For
    others there is no white space before a sentinel.

    Raises DataError for a sentinel that is not in the vocabulary.
    """
    first, *rest = re.split(f"{SENTINEL.format('([0-9]+)')}", prompt)
    if tokenizer.suffix and all(int(n) < len(tokenizer.sentinels) for n in rest[::2]):
        return tokenizer.encode_prompt(prompt)
    if not rest:
        return tokenizer.encode(first)
    ids, sentinels = tokenizer.encode(first.rstrip()) if first.strip() else [], tokenizer.sentinels
    for place, (sentinel, text) in enumerate(zip(map(int, rest[::2]), rest[1::2], strict=True), 1):
        if sentinel >= len(sentinels):
            there = f"<extra_id_0> to <extra_id_{len(sentinels) - 1}>" if sentinels else "none"
            which = "the prompt" if number is None else f"prompt {number}"
            raise DataError(
                f"{which} has <extra_id_{sentinel}>; of sentinels the vocabulary has {there}",
                do="name those that it has; --vocab-extra-ids in pretraining adds them",
            )
        text = text.rstrip() if 2 * place < len(rest) else text
        ids += [sentinels[sentinel], *(tokenizer.encode(text) if text.strip() else [])]
    return ids


def no_sentinels(tokenizer, sources: list[list[int]]) -> list[str]:
    """Notices on sources without a sentinel, if the vocabulary has sentinels: the model may need one."""
    marks = set(tokenizer.sentinels)
    lacking = [number for number, source in enumerate(sources, 1) if marks and not marks & set(source)]
    if not lacking:
        return []
    some = f"prompt {lacking[0]} has" if len(lacking) == 1 else f"{len(lacking)} prompts have"
    return [
        f"{some} no <extra_id_0>: a model that was pretrained on masked spans, and nothing else, fills in those alone"
    ]


def boundaries(tokenizer, facts, search: Search = GREEDY) -> tuple[int, Optional[int]]:
    """(the token that targets begin with, the token that ends them). Raises SettingsError for those of `search`."""
    start, end = search.decoder_start_id, search.decoder_end_id
    start = _special(tokenizer, "bos", "cls") if start is None else start
    end = _special(tokenizer, "eos", "sep") if end is None else end
    end = tokenizer.eod if end is None else end
    for flag, token in (("--decoder-start-id", start), ("--decoder-end-id", end)):
        if token is not None and not 0 <= token < facts.vocab_size:
            raise SettingsError(f"{flag} {token}: the model knows ids from 0 to {facts.vocab_size - 1}")
    return start or 0, end


def _special(tokenizer, *names: str) -> Optional[int]:
    """The first of these special tokens that the tokenizer has; None if there is none."""
    known = getattr(tokenizer, "special", lambda name: None)
    return next((token for name in names if (token := known(name)) is not None), None)
