# SPDX-License-Identifier: Apache-2.0
"""The settings of the tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, dashed, declared, setting, shown_by

WORD_PIECE = ("BertWordPieceLowerCase", "BertWordPieceCase", "BertTokenizer", "ErnieTokenizer", "ElectraTokenizer")


def _by_files(s: SimpleNamespace) -> bool:
    """Whether flags give all files of a vocabulary that is not read from --tokenizer-model."""
    byte_level = s.tokenizer == "GPT2BPETokenizer" and s.vocab_file and s.merge_file
    return bool(byte_level or s.tokenizer in WORD_PIECE and s.vocab_file)


def _reads_files(s: SimpleNamespace, *kinds: str) -> bool:
    """Whether a vocabulary of one of these types may be read from --vocab-file and --merge-file."""
    return s.tokenizer in (None, *kinds) and (not s.tokenizer_model or _by_files(s))


BYTE_LEVEL = Needs("--tokenizer-type GPT2BPETokenizer", lambda s: _reads_files(s, "GPT2BPETokenizer"))

vocabulary = partial(setting, on_resume="refused")


@dataclass(frozen=True)
class TokenizerSettings:
    """The tokenizer and its files."""

    tokenizer_type: Optional[
        Literal[
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "GPTChineseTokenizer",
            "TikTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "BertTokenizer",
            "ErnieTokenizer",
            "ElectraTokenizer",
            "NullTokenizer",
        ]
    ] = shown_by("test_tokenizer_type_says_what_a_file_is")(
        "type of tokenizer (NullTokenizer: text is numbers)",
        None,
        "--tokenizer-name",
        also=dict(GPTTokenizer="GPT2BPETokenizer"),
        on_resume="refused",
    )
    vocab_file: Optional[str] = shown_by("test_a_vocabulary_and_its_merges_are_files")(
        "vocab.json of a byte-level BPE, or vocab.txt of WordPiece",
        None,
        needs=Needs(
            "--tokenizer-type GPT2BPETokenizer or one of WordPiece",
            lambda s: _reads_files(s, "GPT2BPETokenizer", *WORD_PIECE),
        ),
        on_resume="refused",
    )
    merge_file: Optional[str] = shown_by("test_a_vocabulary_and_its_merges_are_files")(
        "merges.txt of a byte-level BPE", None, needs=BYTE_LEVEL, on_resume="refused"
    )
    tokenizer_model: Optional[str] = vocabulary(
        "tokenizer.json, SentencePiece model or tiktoken ranks; or a vocabulary's folder, or its name in $MEGATRON_CACHE",
        None,
        "--tokenizer-name-or-path",
        needs=Needs(  # a run replaces a folder or name by its files
            "a --tokenizer-type that reads it",
            lambda s: s.tokenizer != "NullTokenizer" and not (s.tokenizer_model and _by_files(s)),
        ),
        shown="test_tiktoken_splits_by_its_pattern",
    )
    vocab_size: Optional[Count] = shown_by("test_vocabulary_is_as_large_as_said")(
        "size of the vocabulary, if there is no tokenizer", None, on_resume="refused"
    )
    vocab_extra_ids: Natural = shown_by("test_sentinels_stand_behind_the_vocabulary")(
        "number of sentinel tokens <extra_id_0> ... to add for T5's masked spans; also adds missing special tokens ([CLS], "
        "[SEP], [MASK], [PAD], [BOS], [EOS])",
        0,
        on_resume="refused",
    )
    tiktoken_pattern: Optional[str] = shown_by("test_tiktoken_splits_by_its_pattern")(
        "gpt2, cl100k, o200k, v1, v2 or a pattern (default: by the ranks)",
        None,
        needs=Needs(
            "--tokenizer-type TikTokenizer",
            lambda s: s.tokenizer == "TikTokenizer" or not s.tokenizer and str(s.tokenizer_model).endswith(".tiktoken"),
        ),
        on_resume="refused",
    )
    parse_special: bool = shown_by("test_names_in_documents_are_text_unless_they_are_parsed")(
        "names of special tokens in documents become these tokens (default: in prompts alone; elsewhere, and always in "
        "messages of chats, they are ordinary text)",
        False,
        needs=Needs("a tokenizer of texts", lambda s: s.tokenizer != "NullTokenizer"),
        on_resume="refused",
    )

    @property
    def of_texts(self) -> bool:
        """Whether they name a vocabulary of texts: not NullTokenizer's numbers, nor none at all."""
        files = self.vocab_file or self.merge_file or self.tokenizer_model
        return self.tokenizer_type != "NullTokenizer" and bool(self.tokenizer_type or files)

    def overridden(self, given: Mapping[str, Any]) -> "TokenizerSettings":
        """The tokenizer of a run, with what a user gives for a tool that loads it. given: setting -> value

        Files of another kind are another vocabulary, which replaces the run's own and its type: those of --tokenizer-model
        and those of --vocab-file and --merge-file.

        >>> run = TokenizerSettings("HuggingFaceTokenizer", tokenizer_model="runs/qwen/tokenizer")
        >>> other = run.overridden(dict(vocab_file="vocab.json", merge_file="merges.txt"))
        >>> other.tokenizer_type, other.tokenizer_model, run.overridden(dict(tokenizer_model="moved")).tokenizer_type
        (None, None, 'HuggingFaceTokenizer')
        """
        own, model, files = self, given.get("tokenizer_model"), given.get("vocab_file") or given.get("merge_file")
        if model:
            own = replace(own, vocab_file=None, merge_file=None)
        elif own.tokenizer_model and files:
            reads_files = own.tokenizer_type in ("GPT2BPETokenizer", *WORD_PIECE)
            own = replace(own, tokenizer_model=None, tokenizer_type=own.tokenizer_type if reads_files else None)
        if own.tokenizer_type == "NullTokenizer" and (files or model):  # words for a run of numbers
            own = replace(own, tokenizer_type=None)
        return replace(own, **given)


def idle_words(settings: TokenizerSettings, given: Mapping[str, Any]) -> list[str]:
    """A sentence for each of a user's settings (setting -> value) that the tokenizer of these settings does not use."""
    seen = SimpleNamespace(**vars(settings), tokenizer=settings.tokenizer_type)
    return [
        f"{dashed(name)} {given[name]} has no effect without {needs.words}"
        for name, needs in declared("needs", TokenizerSettings).items()
        if given.get(name) and not needs.met(seen)
    ]
