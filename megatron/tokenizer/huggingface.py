# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of Hugging Face, given as a tokenizer.json or its folder, with the ids of transformers' AutoTokenizer.

Names of special tokens are recognised in prompts, as in transformers. In documents and in messages of a conversation they
are ordinary text, unless --parse-special says otherwise. Added tokens that are not special (<think> of Qwen 3) are
recognised everywhere.
"""

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, no_such_file
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub
from megatron.tokenizer import engines
from megatron.tokenizer.base import SPECIAL, Encode, Part, PartIds, Tokenizer, fingerprint
from megatron.tokenizer.transformers_files import NAMED, SPLIT, TokenizerFiles, decodes_bytes, read_files

END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "[SEP]")
PROBED = 20  # special tokens whose names are in probes
MARKS = range(0xE000, 0xF900)  # Unicode's private characters


def build(settings: TokenizerSettings, notify=lambda message: None) -> Tokenizer:
    path = Path(settings.tokenizer_model)
    if not path.exists():
        do = hub.hint(path) or "give a tokenizer.json, or a folder with one"
        raise DataError(f"--tokenizer-model {path}: {no_such_file(path)}", do=do)
    return HuggingFaceTokenizer(read_files(path, notify), path)


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, files: TokenizerFiles, path: Path):
        description = files.description
        self._text, self._whole = files.text, _load(files.text, path)
        self._whole.encode_special_tokens = bool(files.config.get(SPLIT))
        vocab = self._whole.get_vocab(with_added_tokens=True)
        self._added, self._normalizes = description.get("added_tokens") or [], bool(description.get("normalizer"))
        self._special_names = {token["content"] for token in self._added if token.get("special")} | set(files.named)
        self._plain_added = [token for token in self._added if token["content"] not in self._special_names]
        self._marked = functools.lru_cache(maxsize=2)(self._with_mark)  # cached, so that forked workers share it
        fast = {"gigatoken": self._gigatoken} if description["model"]["type"] == "BPE" else {}
        own, earlier = _fingerprints(files, description, self._special_names)
        super().__init__(
            name="HuggingFaceTokenizer",
            vocab_size=max(vocab.values()) + 1,
            eod=_end_of_document(files, vocab),
            fingerprint=own,
            engines={**fast, "tokenizers": lambda: self._marked(chr(MARKS[0])).encode},
            decode=lambda ids: self._whole.decode(ids, skip_special_tokens=False),
            pieces=vocab,
            special={name: id for name in SPECIAL if (id := vocab.get(files.name(f"{name}_token"))) is not None},
            special_tokens={name: vocab[name] for name in self._special_names if name in vocab},
        )
        self.superseded = earlier
        self.token_names = {token: name for token in NAMED if (name := files.name(token))}
        self.prefix, self.suffix = self._around()
        named = [*(token["content"] for token in self._plain_added), *sorted(self._special_names)[:PROBED]]
        self.probes = tuple(text for name in named for text in _probes_of(name))

    # ---- encoding ----------------------------------------------------------------------------------------------------

    def encode_special(self, text: str) -> list[int]:
        return self._whole.encode(text, add_special_tokens=False).ids

    def encode_parts(self, parts: Sequence[Part]) -> PartIds:
        names = {id: name for name, id in self.special_tokens.items()}
        if self._whole.encode_special_tokens:  # the tokenizer itself takes all names as text
            return PartIds(list(self.plain_encoder("".join(_written(parts, names, "")))), [])
        texts = [part for part in parts if isinstance(part, str)]
        special = [part for part in parts if not isinstance(part, str)]
        if self.split_special("".join(_written(parts, names, ""))) == list(parts):  # no text contains a name
            ids = self.encode_special("".join(_written(parts, names, "")))
            places = [place for place, id in enumerate(ids) if id in names]
        else:
            mark = next(chr(code) for code in MARKS if not any(chr(code) in text for text in texts))
            ids, places = self._marked(mark).encode_with_places("".join(_written(parts, names, mark)))
        if [ids[place] for place in places] != special:  # some are not recognised where they stand
            places = []
        return PartIds(ids, places)

    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a prompt."""
        for text in chain(("a", "0"), self.pieces):  # some tokenizers have no letters
            whole, inner = self._whole.encode(text, add_special_tokens=True).ids, self.encode_special(text)
            places = [place for place in range(len(whole)) if whole[place : place + len(inner)] == inner]
            if inner and len(places) == 1:
                return whole[: places[0]], whole[places[0] + len(inner) :]
        return [], []

    # ---- libraries ---------------------------------------------------------------------------------------------------

    def _with_mark(self, mark: str) -> "MarkedNames":
        return MarkedNames(self._with_added, self._added, self._special_names, self._whole, mark)

    @cached_property
    def _others(self) -> str:
        """tokenizer.json without added tokens, and without pieces that are names of special tokens."""
        description = json.loads(self._text)
        description.pop("added_tokens", None)
        steps = dict(post_processor=None, truncation=None, padding=None)
        steps["model"] = _without_pieces(description["model"], self._special_names)
        return json.dumps(description | steps, ensure_ascii=False)

    def _with_added(self, tokens: Sequence[Mapping]) -> str:
        """The same with added tokens."""
        return f'{{"added_tokens": {json.dumps(tokens)}, {self._others[1:]}'

    def _gigatoken(self) -> Encode:
        """gigatoken without added tokens. A text that has one of their names is encoded by the reference."""
        exact = self._engines["tokenizers"]
        if any(token.get("normalized") for token in self._plain_added) and self._normalizes:
            raise ValueError("added tokens are searched for in normalized text")
        fast = engines.gigatoken_engine(self._with_added(()), exact)
        names, slow = [token["content"] for token in self._plain_added], functools.cache(exact)
        if not names:
            return fast
        has_name = re.compile("|".join(map(re.escape, names))).search
        return lambda text: slow()(text) if has_name(text) else fast(text)


class MarkedNames:
    """A tokenizer that recognises special tokens only with a mark before their names.

    Names without the mark are ordinary text. Nothing else changes: neither ids of other added tokens, nor where a text
    begins. A Unigram model would still match names as pieces, so these pieces are renamed, too.

    describe: added tokens -> tokenizer.json; added: those of the tokenizer
    """

    def __init__(
        self,
        describe: Callable[[Sequence[Mapping]], str],
        added: Sequence[Mapping],
        special: set[str],
        whole,
        mark: str,
    ):
        marked = [{**one, "content": mark * (one["content"] in special) + one["content"]} for one in added]
        self._library = library = _load(describe(marked), Path("tokenizer.json"))
        own = {one["content"]: library.token_to_id(new["content"]) for new, one in zip(marked, added, strict=True)}
        self._special = {own[name] for name in special if name in own}
        self._ids = {id: whole.token_to_id(name) for name, id in own.items()}
        self._moved = any(id != whole.token_to_id(name) for name, id in own.items() if name not in special)

    def encode(self, text: str) -> list[int]:
        """The ids of a text without marks."""
        ids = self._library.encode(text, add_special_tokens=False).ids
        return [self._ids.get(id, id) for id in ids] if self._moved else ids

    def encode_with_places(self, text: str) -> tuple[list[int], list[int]]:
        """(ids, places of special tokens among them)."""
        ids = self._library.encode(text, add_special_tokens=False).ids
        return [self._ids.get(id, id) for id in ids], [place for place, id in enumerate(ids) if id in self._special]


def _written(parts: Sequence[Part], names: Mapping[int, str], mark: str) -> list[str]:
    return [part if isinstance(part, str) else mark + names[part] for part in parts]


def _without_pieces(model: dict, special: set[str]) -> dict:
    """The model without the pieces of these names: they are renamed to what no text contains, and no merge makes them.

    The unknown token stays, which stands for what is not in the vocabulary.
    """
    vocab = model.get("vocab") or {}
    if model["type"] == "Unigram":
        pieces, unknown = enumerate(vocab), model.get("unk_id")
        hidden = lambda n, piece: f"\x00{n}\x00" if piece in special and n != unknown else piece
        return {**model, "vocab": [[hidden(n, piece), score] for n, (piece, score) in pieces]}
    names = {piece for piece in special if piece in vocab and piece != model.get("unk_token")}
    if not names:
        return model
    model = {**model, "vocab": {f"\x00{id}\x00" if piece in names else piece: id for piece, id in vocab.items()}}
    if model["type"] == "BPE":
        both = zip(model["merges"], _tokens_of_merges(model), strict=True)
        model["merges"] = [pair for pair, tokens in both if names.isdisjoint(tokens)]
    return model


def _made_of_text(model: dict, special: set[str]) -> list[str]:
    """Special tokens that a BPE model would make of text."""
    names = special.intersection(model["vocab"]) if model["type"] == "BPE" else ()
    made = {tokens[-1] for tokens in _tokens_of_merges(model)} if names else set()
    return sorted(made.intersection(names) - {model.get("unk_token")})


def _tokens_of_merges(model: dict) -> list[tuple[str, str, str]]:
    """The tokens of each merge of a BPE model: those that it joins, and the one that it makes."""
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    if prefix := model.get("continuing_subword_prefix"):
        return [(left, right, left + right.removeprefix(prefix)) for left, right in pairs]
    return [(left, right, left + right) for left, right in pairs]


def _load(text: str, path: Path):
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(text)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"--tokenizer-model {path}: `tokenizers` cannot read it", str(error)) from None
    library.no_truncation()
    library.no_padding()
    return library


def _end_of_document(files: TokenizerFiles, vocab: Mapping[str, int]) -> Optional[int]:
    """The id of `eos_token` (or `sep_token`) in tokenizer_config.json, else of a common name."""
    names = [files.name("eos_token"), files.name("sep_token"), *END_TOKENS]
    return next((vocab[name] for name in names if name in vocab), None)


def _probes_of(name: str) -> tuple[str, ...]:
    """Texts that show the properties of an added token: alone, in a word, among spaces, twice, in another case."""
    return f"{name}", f"a{name}b", f"a  {name}  b", f"{name}{name}\n{name}", f"x {name.swapcase()} y {name[:-1]}"


def _fingerprints(files: TokenizerFiles, description: dict, special: set[str]) -> tuple[str, dict[str, str]]:
    """(the fingerprint, those of earlier versions of this suite -> which ids they gave otherwise, "" for none).

    Earlier versions removed special tokens from the file, so that added tokens after them got lower ids, left merges that
    make special tokens of text, and read tokenizer.json alone. They hashed the form of the file, too.
    """
    written = lambda content: json.dumps(content, sort_keys=True)
    hashed = lambda text, version="": fingerprint(f"tokenizer.json{version}", text)
    pieces = description["model"].get("vocab") or ()
    pieces = pieces if isinstance(pieces, dict) else {piece for piece, _ in pieces}
    outside = [token["content"] for token in description.get("added_tokens") or [] if token["content"] not in pieces]
    first = next((place for place, name in enumerate(outside) if name in special), len(outside))
    moved = [name for name in outside[first:] if name not in special]
    moved += _made_of_text(description["model"], special)
    version, earlier = " 2" if moved else "", {}
    contents = [description, *([json.loads(files.replaced)] if files.replaced else [])]
    texts = list(map(written, contents))
    if moved:
        named = f"{', '.join(moved[:4])}{' ...' * (len(moved) > 4)}"
        earlier[hashed(texts[0])] = f"the ids of {named} were those of other tokens"
    other = set(files.changed) - {"post_processor", "decoder"}
    if other:
        what = f"it read tokenizer.json alone, and transformers changes its {' and '.join(files.changed)}"
        earlier[hashed(texts[1])] = what
    place = 0 if other else -1
    form = _in_one_form(contents[place])
    whole = texts[place] if form == contents[place] else written(form)
    if whole != texts[place]:
        earlier = {hashed(text, version): "" for text in texts} | earlier
    decoder = description.get("decoder")
    # Imports had the decoder of transformers' class, with these ids
    if decodes_bytes(decoder) and decoder != AS_IMPORTED:
        own, other = (written(dict(decoder=one))[1:-1] for one in (decoder, AS_IMPORTED))
        earlier.setdefault(hashed(whole.replace(own, other, 1), version), "")
    return hashed(whole, version), earlier


AS_IMPORTED = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)
BPE = dict(dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False)
BPE |= dict(byte_fallback=False, ignore_merges=False)  # what a file says that leaves them out


def _in_one_form(description: dict) -> dict:
    """A tokenizer.json in the form of tokenizers 0.20 and later: earlier ones wrote merges as text and left keys out.

    Whether texts are cut or padded is left out: this suite does neither.
    """
    model = description["model"]
    if model.get("type") == "BPE":
        merges = [one.split(" ") if isinstance(one, str) else one for one in model.get("merges") or ()]
        model = BPE | model | dict(merges=merges)
    return description | dict(model=model, truncation=None, padding=None)
