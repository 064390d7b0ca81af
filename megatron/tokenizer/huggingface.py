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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from megatron.errors import DataError, no_such_file
from megatron.settings.schema import TokenizerSettings
from megatron.storage import hub
from megatron.tokenizer import engines
from megatron.tokenizer.base import SPECIAL, Encode, Part, PartIds, Tokenizer, fingerprint
from megatron.tokenizer.transformers_files import NAMED, SPLIT, TokenizerFiles, read_files

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
        description = json.loads(files.text)
        self._text, self._whole = files.text, _load(files.text, path)
        self._whole.encode_special_tokens = bool(files.config.get(SPLIT))
        vocab = self._whole.get_vocab(with_added_tokens=True)
        added = description.get("added_tokens") or []
        self._special_names = {token["content"] for token in added if token.get("special")} | set(files.named)
        self._plain_added = [token for token in added if token["content"] not in self._special_names]
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
        for text in ("a", "0", *self._whole.get_vocab(with_added_tokens=True)):  # some tokenizers have no letters
            whole, inner = self._whole.encode(text, add_special_tokens=True).ids, self.encode_special(text)
            places = [place for place in range(len(whole)) if whole[place : place + len(inner)] == inner]
            if inner and len(places) == 1:
                return whole[: places[0]], whole[places[0] + len(inner) :]
        return [], []

    # ---- libraries ---------------------------------------------------------------------------------------------------

    def _with_mark(self, mark: str) -> "MarkedNames":
        return MarkedNames(json.loads(self._text), self._special_names, self._whole, mark)

    def _gigatoken(self) -> Encode:
        """gigatoken without added tokens. A text that has one of their names is encoded by the reference."""
        description, exact = json.loads(self._text), self._engines["tokenizers"]
        if any(token.get("normalized") for token in self._plain_added) and description.get("normalizer"):
            raise ValueError("added tokens are searched for in normalized text")
        more = dict(added_tokens=[], post_processor=None, truncation=None, padding=None)
        more["model"] = _without_pieces(description["model"], self._special_names)
        fast = engines.gigatoken_engine(json.dumps({**description, **more}, ensure_ascii=False), exact)
        names, slow = [token["content"] for token in self._plain_added], functools.cache(exact)
        if not names:
            return fast
        has_name = re.compile("|".join(map(re.escape, names))).search
        return lambda text: slow()(text) if has_name(text) else fast(text)


class MarkedNames:
    """A tokenizer that recognises special tokens only with a mark before their names.

    Names without the mark are ordinary text. Nothing else changes: neither ids of other added tokens, nor where a text
    begins. A Unigram model would still match names as pieces, so these pieces are renamed, too.
    """

    def __init__(self, description: dict, special: set[str], whole, mark: str):
        added = description.get("added_tokens") or []
        marked = [{**one, "content": mark * (one["content"] in special) + one["content"]} for one in added]
        model = _without_pieces(description["model"], special)
        steps = dict(added_tokens=marked, model=model, post_processor=None, truncation=None, padding=None)
        self._library = library = _load(
            json.dumps({**description, **steps}, ensure_ascii=False), Path("tokenizer.json")
        )
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
        model["merges"] = [pair for pair in model["merges"] if names.isdisjoint(_tokens_of(pair, model))]
    return model


def _made_of_text(model: dict, special: set[str]) -> list[str]:
    """Special tokens that a BPE model would make of text."""
    names = special.intersection(model["vocab"]) if model["type"] == "BPE" else ()
    made = {_tokens_of(pair, model)[-1] for pair in model["merges"]} if names else set()
    return sorted(made.intersection(names) - {model.get("unk_token")})


def _tokens_of(pair: Union[str, Sequence[str]], model: dict) -> tuple[str, str, str]:
    """The tokens of a merge of a BPE model: those that it joins, and the one that it makes."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    return left, right, left + right.removeprefix(model.get("continuing_subword_prefix") or "")


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
    """(the fingerprint, those of earlier versions of this suite that gave other ids -> what is different).

    Earlier versions removed special tokens from the file, so that added tokens after them got lower ids, left merges that
    make special tokens of text, and read tokenizer.json alone.
    """
    of = lambda text, version="": fingerprint(f"tokenizer.json{version}", json.dumps(json.loads(text), sort_keys=True))
    pieces = description["model"].get("vocab") or ()
    pieces = pieces if isinstance(pieces, dict) else {piece for piece, _ in pieces}
    outside = [token["content"] for token in description.get("added_tokens") or [] if token["content"] not in pieces]
    first = next((place for place, name in enumerate(outside) if name in special), len(outside))
    moved = [name for name in outside[first:] if name not in special]
    moved += _made_of_text(description["model"], special)
    own = of(files.text, " 2" if moved else "")
    earlier = {}
    if moved:
        named = f"{', '.join(moved[:4])}{' ...' * (len(moved) > 4)}"
        earlier[of(files.text)] = f"the ids of {named} were those of other tokens"
    if files.replaced and set(files.changed) - {"post_processor", "decoder"}:
        what = f"{' and '.join(files.changed)} of tokenizer.json were not what transformers makes of them"
        earlier[of(files.replaced)] = what
    elif files.replaced:
        own = of(files.replaced, " 2" if moved else "")
    return own, earlier
