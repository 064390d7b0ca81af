# SPDX-License-Identifier: Apache-2.0
"""Folders of small tokenizers, each as transformers and this suite read it."""

import functools
import json
import os
from pathlib import Path

import pytest

from tests.tokenizer.matrix.differences import first_difference
from tests.tokenizer.matrix.layouts import FAMILIES, VARIANTS, files_of, write
from tests.tokenizer.matrix.texts import conversations_of, texts_of


class Matrix:
    """Tokenizers by the names of variants. All is made once in a process."""

    def __init__(self, root: Path):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        cached = functools.cache
        self.root, self.folder, self.theirs, self.ours = (
            root,
            cached(self._folder),
            cached(self._theirs),
            cached(self._ours),
        )
        self.ids, self.end, self.names = cached(self._ids), cached(self._end), cached(self._names)

    def _folder(self, variant: str) -> Path:
        folder = self.root / variant
        write(files_of(variant), folder)
        return folder

    def _theirs(self, variant: str):
        """What transformers reads."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder(variant))

    def settings(self, variant: str):
        from megatron.convert.hf_files import tokenizer_of

        return tokenizer_of(self.folder(variant), of_gpt2=VARIANTS[variant][0] == "gpt2")

    def _ours(self, variant: str):
        from megatron.tokenizer import build_tokenizer

        return build_tokenizer(self.settings(variant), lambda text: None)

    def prepends_always(self, variant: str) -> bool:
        """Whether each piece of a text between special tokens is encoded like a text of its own."""
        steps = json.dumps(json.loads(self.theirs(variant).backend_tokenizer.to_str())["pre_tokenizer"])
        return '"prepend_scheme": "first"' not in steps

    def family(self, variant: str):
        return FAMILIES[VARIANTS[variant][0]]

    def _ids(self, variant: str, text: str, add: bool = True) -> tuple[int, ...]:
        """transformers' ids of a prompt; add: with what the tokenizer puts around it."""
        return tuple(self.theirs(variant)(text, add_special_tokens=add)["input_ids"])

    def _end(self, variant: str) -> int:
        """How many tokens the tokenizer puts after a prompt."""
        whole, inner = (self.ids(variant, "<unk>", add) for add in (True, False))
        before = next(n for n in range(len(whole)) if whole[n : n + len(inner)] == inner)
        return len(whole) - len(inner) - before

    def beginning(self, variant: str, text: str, add: bool = True) -> tuple[int, ...]:
        """transformers' ids of a text to continue: without what it puts at its end."""
        ids = self.ids(variant, text, add)
        return ids[: len(ids) - self.end(variant)] if add else ids

    def begins_by_itself(self, variant: str, text: str) -> bool:
        """Whether a text has what would be put before it already."""
        inner, whole = self.ids(variant, text, False), self.beginning(variant, text)
        before = whole[: len(whole) - len(inner)]
        return bool(before) and inner[: len(before)] == before

    def pair(self, variant: str, context: str, continuation: str) -> tuple[tuple[int, ...], int]:
        """(the ids of both texts together, how many of them the context has, too)."""
        add = not self.begins_by_itself(variant, context)
        whole, before = (self.beginning(variant, text, add) for text in (context + continuation, context))
        return whole, first_difference(whole, before)

    def _names(self, variant: str) -> list[str]:
        """Names of some added tokens: special ones and others, the first and the last."""
        added = list(self.theirs(variant).added_tokens_decoder.values())
        special = [one.content for one in added if one.special]
        others = [one.content for one in added if not one.special]
        return list(dict.fromkeys([*special[:2], *special[-3:], *others[:1], *others[-4:]]))

    def texts(self, variant: str) -> dict[str, str]:
        return texts_of(self.names(variant))

    def talks(self, variant: str, named: bool = True) -> dict[str, list[dict]]:
        return conversations_of(self.names(variant)[:4] if named else ())


@pytest.fixture(scope="session")
def matrix(tmp_path_factory):
    return Matrix(tmp_path_factory.mktemp("matrix"))
