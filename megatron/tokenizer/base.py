# SPDX-License-Identifier: Apache-2.0
"""The interface of all tokenizers, and the choice of a faster library in place of the reference.

docs/tokenizers.md has the contract: which ids a text has as a document, as a prompt, after other tokens and as a message.

A tokenizer has a list of *engines*: libraries that encode a text. The last one is the reference and defines the ids. A
faster one is used only if it gives the same ids on probes and on documents of the input.
"""

import copy
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple, Optional, Union

import numpy as np

Encode = Callable[[str], Sequence[int]]
Part = Union[str, int]  # of a text with special tokens: text, or the id of a special token

# Texts on which byte-level BPE libraries are known to differ: contractions, runs of spaces, other scripts, joined
# emoji, combining marks, control characters, digits of other scripts, text that looks like a special token.
PROBES = (
    "I'm we'll they'd it's o'clock 'tis DON'T 'S 'LL she\u2019s",
    "a  b   c    \n\n d\t\te \r\n\r\n  f\u00a0g\u3000h\u2028i\x85j ",
    "trailing spaces   ",
    "x=1+22-333*4444/55555%666666 1,234.56 \u0661\u0662\u0663 \u00b2\u00bd \u2167",
    "caf\u00e9 cafe\u0301 na\u00efve \u0421\u043b\u043e\u0432\u043e \u4e2d\u6587\u5206\u8bcd",
    "\u65e5\u672c\u8a9e \u0939\u093f\u0928\u094d\u0926\u0940 \u0e20\u0e32\u0e29\u0e32",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \ufffd \x00\x01\x7f \ufeff",
    "<|endoftext|> text <|endoftext|><s></s>[SEP]<unk> <pad>",
    'snake_case CamelCase kebab-case http://example.org/a?b=c&d=%20 {"k": [1, 2.5e-3]} \\u0041 ~~~ ``` ----- ______',
)

# Names of special tokens in vocabularies, the most common one first. `cls` begins a sample of BERT, `sep` ends each of its
# segments, `bos` begins a decoder's input, `eos` ends its output.
SPECIAL = dict(
    cls=("[CLS]", "<CLS>", "<cls>"),
    sep=("[SEP]", "<SEP>", "<sep>"),
    mask=("[MASK]", "<MASK>", "<mask>"),
    pad=("[PAD]", "<PAD>", "<pad>"),
    bos=("[BOS]", "<BOS>", "<bos>", "<s>"),
    eos=("[EOS]", "<EOS>", "<eos>", "</s>"),
)
ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|endofdoc|>")  # names that say that a document ends
SENTINEL = "<extra_id_{}>"  # replaces a masked span, from 0 on, as in T5 and Megatron-LM
INNER = "##"  # prefix of a WordPiece token that continues a word


class PartIds(NamedTuple):
    """The ids of a text with special tokens. places: where the special tokens are; empty if that is not known."""

    ids: list[int]
    places: list[int]


class Tokenizer:
    """Encodes text to ids, and decodes ids to text.

    `vocab_size` counts ids without padding. `eod` is the id of the end-of-document token, or None.
    `fingerprint` identifies the vocabulary: equal fingerprints give equal ids. `engine` names the library in use.
    `pieces`: token -> id, at least of special tokens, and of all tokens if some continue words (INNER).
    `special_tokens`: name -> id of the special tokens that a prompt or a chat template may contain.
    `token_names`: bos_token, eos_token ... -> name of that special token, for chat templates.
    `prefix`, `suffix`: the ids that the tokenizer puts before and after a prompt.
    `before_documents`: the ids that begin each document of a token file.
    `parse_special`: whether names of special tokens are recognised in all texts, not in prompts alone.
    `superseded`: fingerprint of this tokenizer in an earlier version of the suite -> which of its ids were wrong, or "".
    `probes`: further texts on which engines are compared.
    """

    token_names: Mapping[str, str] = MappingProxyType({})
    prefix: Sequence[int] = ()
    suffix: Sequence[int] = ()
    before_documents: Sequence[int] = ()
    parse_special: bool = False
    superseded: Mapping[str, str] = MappingProxyType({})
    probes: Sequence[str] = ()

    def __init__(
        self,
        name: str,
        vocab_size: int,
        eod: int | None,
        fingerprint: str,
        engines: dict[str, Callable[[], Encode]],
        decode: Callable[[list[int]], str],
        pieces: Mapping[str, int] = MappingProxyType({}),
        special: Mapping[str, int] = MappingProxyType({}),
        special_tokens: Optional[Mapping[str, int]] = None,
    ):
        """`engines`: fastest first, the reference last; each value builds the engine on demand. `special`: ids by the names
        of SPECIAL, if the vocabulary defines them; otherwise they are looked up in `pieces`. `special_tokens`: if they are
        not the names of SPECIAL and the end of document.
        """
        self.name, self.vocab_size, self.eod, self.fingerprint = name, vocab_size, eod, fingerprint
        self.engine = list(engines)[-1]
        self._engines, self._decode = engines, decode
        self._encode: Encode | None = None
        self.pieces, self._special, self._special_tokens = pieces, special, special_tokens

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        if self._special_tokens is not None:
            return self._special_tokens
        found = {name: self.pieces[name] for names in SPECIAL.values() for name in names if name in self.pieces}
        found |= {SENTINEL.format(number): id for number, id in enumerate(self.sentinels)}
        if self.eod is not None and len(name := self.decode([self.eod]).strip()) > 1:
            found.setdefault(name, self.eod)
        return found

    def special(self, name: str) -> int | None:
        """The id of a special token by its name in SPECIAL, or unk; None if the vocabulary has none."""
        if name in self._special:
            return self._special[name]
        return next((self.pieces[token] for token in SPECIAL.get(name, ()) if token in self.pieces), None)

    @property
    def whole(self) -> "Tokenizer":
        """The tokenizer with all of its tokens, whatever a model has (`embedding_rows.RowsTokenizer`)."""
        return self

    def refuse(self, ids: Iterable[int], where: str = "the text") -> None:
        """Raise DataError for an id that the model has no row for (`embedding_rows.RowsTokenizer`): here there is none."""

    @property
    def begin(self) -> Optional[int]:
        """The token before a text without context: the last one of `prefix`, or the end of document."""
        return self.prefix[-1] if self.prefix else self.eod

    @property
    def sentinels(self) -> list[int]:
        """Ids of the sentinels <extra_id_0>, <extra_id_1> ..."""
        ids = []
        while (token := SENTINEL.format(len(ids))) in self.pieces:
            ids.append(self.pieces[token])
        return ids

    def inner(self) -> np.ndarray:
        """Whether each token continues a word: bool [vocab_size]."""
        ids = [id for token, id in self.pieces.items() if token.startswith(INNER)]
        marks = np.zeros(self.vocab_size, bool)
        marks[ids] = True
        return marks

    def with_tokens(self, added: Sequence[str]) -> "Tokenizer":
        """A copy with additional tokens that do not occur in texts. Their ids follow the last one."""
        more = copy.copy(self)
        names = dict(enumerate(added, self.vocab_size))
        more.pieces = {**self.pieces, **{token: id for id, token in names.items()}}
        more.vocab_size = self.vocab_size + len(added)
        more._decode = lambda ids: _decode_runs(ids, names, self._decode)
        return more

    # ---- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """The ids of a document, without anything before or after it. Names of special tokens in it are ordinary text,
        unless `parse_special` is set.
        """
        return np.asarray(self.encoder(text)).tolist()

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text for a model to continue: with `prefix` and `suffix`, and with special tokens where their names
        stand.
        """
        return [*self.prefix, *self.encode_special(text), *self.suffix]

    def encode_special(self, text: str) -> list[int]:
        """The ids of a text, with special tokens where their names stand, and nothing before or after it."""
        return self.encode_parts(self.split_special(text)).ids

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """(the ids of a prompt and its continuation, encoded together; the number of ids of the prompt).

        A token of both texts belongs to the continuation.
        """
        before, whole = (self.encode_special(text) for text in (context, context + continuation))
        prefix = [] if self.prefix and before[: len(self.prefix)] == list(self.prefix) else self.prefix
        common = next(
            (n for n, pair in enumerate(zip(before, whole)) if pair[0] != pair[1]), min(len(before), len(whole))
        )
        return [*prefix, *whole], len(prefix) + common

    def encode_parts(self, parts: Sequence[Part]) -> PartIds:
        """The ids of a text with special tokens in it. Names of special tokens in its pieces of text are ordinary text."""
        ids: list[int] = []
        places = []
        for part in parts:
            if not isinstance(part, str):
                places.append(len(ids))
                ids.append(part)
            elif part:
                ids += np.asarray(self._encode_after(part) if ids else self.plain_encoder(part)).tolist()
        return PartIds(ids, places)

    def _encode_after(self, text: str) -> Sequence[int]:
        """The ids of a text that follows a special token."""
        return self.plain_encoder(text)

    def split_special(self, text: str) -> list[Part]:
        """The text cut at the names of special tokens: pieces of text, and ids."""
        names = self.special_tokens
        parts = re.split(f"({self.special_names})", text) if names else [text]
        return [names.get(part, part) for part in parts if part]

    @cached_property
    def special_names(self) -> str:
        """A regular expression of the names of special tokens."""
        return "|".join(map(re.escape, sorted(self.special_tokens, key=len, reverse=True))) or "(?!)"

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Invalid UTF-8, for example half a character, becomes U+FFFD."""
        return self._decode([int(id) for id in ids])

    @property
    def encoder(self) -> Encode:
        """The function of `encode`: text -> ids, as a list or an integer array."""
        if not self.parse_special:
            return self.plain_encoder
        named = re.compile(self.special_names).search
        return lambda text: self.encode_parts(self.split_special(text)).ids if named(text) else self.plain_encoder(text)

    @property
    def document_encoder(self) -> Encode:
        """The function for documents of a token file: text -> ids, with `before_documents`."""
        encode, before = self.encoder, np.asarray(self.before_documents, np.int64)
        return (lambda text: np.concatenate((before, np.asarray(encode(text))))) if len(before) else encode

    @property
    def plain_encoder(self) -> Encode:
        """The engine's function: text -> ids, as a list or an integer array. It recognises no special tokens."""
        if self._encode is None:
            self._encode = self._engines[self.engine]()
        return self._encode

    def renew(self) -> None:
        """Rebuild the engine, to empty its cache of words."""
        self._encode = None
        self._encode = self._engines[self.engine]()

    def use_fastest(self, sample: Sequence[str], notify: Callable[[str], None] = lambda message: None) -> str:
        """Switch to the fastest engine with the reference's ids on PROBES and `sample`; returns its name.

        `notify` receives a line for each engine that is missing or gives other ids.
        """
        *candidates, reference_name = self._engines
        if not candidates:
            return self.engine
        texts = [*PROBES, *self.probes, *sample]
        reference = self._engines[reference_name]()
        expected = [np.asarray(reference(text), np.int64) for text in texts]
        for name in candidates:
            reason, encode = self._try(name, texts, expected)
            if reason is None:
                self.engine, self._encode = name, encode
                return name
            notify(f"tokenizer engine {name} is not used: {reason}")
        self.engine, self._encode = reference_name, reference
        return reference_name

    def _try(self, name: str, texts: list[str], expected: list[np.ndarray]) -> tuple[str | None, Encode | None]:
        """(why an engine cannot be used, or None; the engine)."""
        try:
            encode = self._engines[name]()
            for text, ids in zip(texts, expected):
                if not np.array_equal(np.asarray(encode(text), np.int64), ids):
                    return f"its ids differ from the reference's on {text[:60]!r}", None
        except ImportError:
            return "it is not installed", None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in a Rust library is no Exception
            return f"{type(error).__name__}: {error}", None
        return None, encode


def _decode_runs(ids: list[int], names: Mapping[int, str], decode: Callable[[list[int]], str]) -> str:
    """Decode ids: those in `names` to their names, runs of others with `decode`."""
    words, run = [], []
    for id in ids:
        if id in names:
            words += [decode(run)] * bool(run) + [names[id]]
            run = []
        else:
            run.append(id)
    return " ".join(words + [decode(run)] * bool(run))


def fingerprint(*pieces: bytes | str) -> str:
    """A hash of a vocabulary, 32 hex digits."""
    digest = hashlib.sha256()
    for piece in pieces:
        data = piece.encode() if isinstance(piece, str) else piece
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]
