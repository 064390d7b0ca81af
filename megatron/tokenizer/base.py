# SPDX-License-Identifier: Apache-2.0
"""The interface of all tokenizers, and the choice of a faster library in place of the reference.

A tokenizer has a list of *engines*: libraries that encode a text. The last one is the reference and defines the ids. A
faster one is used only if it gives the same ids on probes and on documents of the input.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

Encode = Callable[[str], Sequence[int]]

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
SENTINEL = "<extra_id_{}>"  # replaces a masked span, from 0 on, as in T5 and Megatron-LM
INNER = "##"  # prefix of a WordPiece token that continues a word


class Tokenizer:
    """Encodes text to ids, and decodes ids to text.

    `vocab_size` counts ids without padding. `eod` is the id of the end-of-document token, or None.
    `fingerprint` identifies the vocabulary: equal fingerprints give equal ids. `engine` names the library in use.
    `pieces`: token -> id, at least of special tokens, and of all tokens if some continue words (INNER).
    """

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
    ):
        """`engines`: fastest first, the reference last; each value builds the engine on demand. `special`: ids by the names
        of SPECIAL, if the vocabulary defines them; otherwise they are looked up in `pieces`.
        """
        self.name, self.vocab_size, self.eod, self.fingerprint = name, vocab_size, eod, fingerprint
        self.engine = list(engines)[-1]
        self._engines, self._decode = engines, decode
        self._encode: Encode | None = None
        self.pieces, self._special = pieces, special

    def special(self, name: str) -> int | None:
        """The id of a special token by its name in SPECIAL; None if the vocabulary has none."""
        if name in self._special:
            return self._special[name]
        return next((self.pieces[token] for token in SPECIAL[name] if token in self.pieces), None)

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

    def encode(self, text: str) -> list[int]:
        """Encode a text. Names of special tokens in it are ordinary text."""
        return np.asarray(self.encoder(text)).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids. Invalid UTF-8, for example half a character, becomes U+FFFD."""
        return self._decode([int(id) for id in ids])

    @property
    def encoder(self) -> Encode:
        """The engine's function: text -> ids, as a list or an integer array."""
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
        texts = [*PROBES, *sample]
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
