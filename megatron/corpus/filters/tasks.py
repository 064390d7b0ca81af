# SPDX-License-Identifier: Apache-2.0
"""The tasks of Megatron-LM's `cleanup_fix_dataset.py`, run in the given order.

remove_* drop a document, the others change its text. In the original, ftfy_fix_text is the last task on a document, so that
general_cleaning never runs with it.

`ShortDocuments` is the length rule of its `cleanup_dataset.py`: documents with fewer than 128 tokens are dropped. Only
short texts are tokenized: a text of 1,024 characters has enough tokens even with 8 characters per token.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Optional

from megatron.corpus.stage import Document, Verdict
from megatron.errors import SettingsError, did_you_mean

Task = Callable[[str], Optional[str]]  # text -> text, or None to drop the document


class CleaningTasks:
    """Runs tasks by name.

    tasks: names of TASKS, each at most once
    keep, detector, model: as in the filter `language`, for remove_512_non_english
    """

    def __init__(
        self,
        tasks: Sequence[str] = ("remove_512",),
        keep: Sequence[str] = ("en",),
        detector: str = "eldc",
        model: Optional[str] = None,
    ):
        for name in tasks:
            if name not in TASKS:
                raise SettingsError(
                    f"--tasks {name}: unknown{did_you_mean(name, TASKS)}", do=f"known: {', '.join(TASKS)}"
                )
            if list(tasks).count(name) > 1:
                raise SettingsError(f"--tasks names {name} twice")
        if not tasks:
            raise SettingsError("--tasks names none", do=f"known: {', '.join(TASKS)}")
        self._language = dict(keep=keep, detector=detector, model=model)
        self.tasks = [(name, getattr(self, f"_{name}", None) or TASKS[name]) for name in tasks]
        if "remove_512_non_english" in tasks:
            from megatron.corpus.filters.language import LanguageFilter

            self._is_kept = LanguageFilter(**self._language)
        if "ftfy_fix_text" in tasks:
            from megatron.corpus.filters.repair import rules_of_ftfy

            self._ftfy = rules_of_ftfy()

    def __call__(self, document: Document) -> Verdict:
        """Run the tasks. `figures` of a kept document has the names of the tasks that changed it, each with 1."""
        text, changed = document["text"], {}
        for name, task in self.tasks:
            after = task(text)
            if after is None:
                return Verdict(None, name, {**changed, "characters": len(text)})
            if after != text:
                changed[name] = 1
            text = after
        if not changed:
            return Verdict(document)
        return Verdict({**document, "text": text}, "changed", changed)

    def _remove_512_non_english(self, text: str) -> Optional[str]:
        if len(text) < 512 and self._is_kept({"text": text}).document is None:
            return None
        return text

    def _ftfy_fix_text(self, text: str) -> str:
        return self._ftfy.fix(text)


def remove_512(text: str) -> Optional[str]:
    """Drop texts with fewer than 512 characters."""
    return None if len(text) < 512 else text


def remove_256_javascript(text: str) -> Optional[str]:
    """Drop texts with fewer than 256 characters that mention Javascript, such as notices that it is disabled."""
    return None if len(text) < 256 and "javascript" in text.lower() else text


_SPACES = re.compile(r"  +|\b\n+ |\b\n+")


def general_cleaning(text: str) -> str:
    """Replace several spaces, and line breaks after a word, by one space."""
    return _SPACES.sub(" ", text)


# The corpus Stories has spaces before punctuation and around hyphens and at signs.
_STORIES = ((" '", "'"), (" !", "!"), (" .", "."), (" ?", "?"), (" - ", "-"), (" @ ", "@"))


def stories(text: str) -> str:
    """Remove the spaces that tokenization left in the corpus Stories.

    >>> stories("It 's well - known , is it ?")
    "It's well-known , is it?"
    """
    for tokenised, plain in _STORIES:
        text = text.replace(tokenised, plain)
    return text


def realnews(text: str) -> str:
    """Add a blank line after each line of a RealNews document, which is a paragraph.

    >>> realnews("One.\\nTwo.")
    'One.\\n\\nTwo.'
    """
    return text.replace("\n", "\n\n")


_BLANK_LINES = re.compile(r"\n\n+")


def gutenberg(text: str) -> str:
    """Replace several blank lines of a Gutenberg book by one.

    >>> gutenberg("CHAPTER I\\n\\n\\n\\nIt was")
    'CHAPTER I\\n\\nIt was'
    """
    return _BLANK_LINES.sub("\n\n", text)


TASKS: dict[str, Optional[Task]] = {
    "remove_512": remove_512,
    "remove_256_javascript": remove_256_javascript,
    "remove_512_non_english": None,  # methods of the class: they need a detector, or ftfy
    "ftfy_fix_text": None,
    "general_cleaning": general_cleaning,
    "stories": stories,
    "realnews": realnews,
    "gutenberg": gutenberg,
}


CHARACTERS_A_TOKEN = 8  # an upper bound: on average they are 5 in English


class ShortDocuments:
    """Drops documents with fewer than `min_tokens` tokens.

    vocab_file, merge_file, tokenizer_type, tokenizer_model: the vocabulary, as in preprocessing. Without one, the pieces of
    a byte-level BPE's pretokenizer are counted: their number is at most that of tokens
    """

    def __init__(
        self,
        min_tokens: int = 128,
        vocab_file: Optional[str] = None,
        merge_file: Optional[str] = None,
        tokenizer_type: Optional[str] = None,
        tokenizer_model: Optional[str] = None,
    ):
        self.min_tokens = min_tokens
        files = (vocab_file, merge_file, tokenizer_type, tokenizer_model)
        self.count = _token_counter(*files) if any(files) else count_pieces

    def __call__(self, document: Document) -> Verdict:
        text = document["text"]
        figures = {"characters": len(text)}
        if len(text) >= CHARACTERS_A_TOKEN * self.min_tokens:
            return Verdict(document, "", figures)
        figures["tokens"] = tokens = self.count(text)
        return Verdict(None, "too_few_tokens", figures) if tokens < self.min_tokens else Verdict(document, "", figures)


# Contractions, words, numbers and signs with the space before them, and white space: the pattern of the first byte-level
# BPE in the syntax of `re` ([^\W\d_] are letters).
_PIECE = re.compile(r"'(?:[sdmt]|ll|ve|re)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")


def count_pieces(text: str) -> int:
    """Number of words, numbers, signs and runs of white space.

    >>> count_pieces("It's 3 o'clock.")
    7
    """
    return sum(1 for _ in _PIECE.finditer(text))


@cache
def _token_counter(
    vocab_file: Optional[str], merge_file: Optional[str], tokenizer_type: Optional[str], tokenizer_model: Optional[str]
) -> Callable[[str], int]:
    from megatron.settings.schema import TokenizerSettings
    from megatron.tokenizer import build_tokenizer

    settings = TokenizerSettings(
        tokenizer_type=tokenizer_type, vocab_file=vocab_file, merge_file=merge_file, tokenizer_model=tokenizer_model
    )
    encode = build_tokenizer(settings).encode
    return lambda text: len(encode(text))
