# SPDX-License-Identifier: Apache-2.0
"""The tokenizer in a GGUF file: llama.cpp's byte-level BPE or its SentencePiece, as the run's tokenizer encodes prompts.

The tokenizer says which token begins prompts and ends texts, and which tokens are special (llama.cpp: control tokens); the
merges, the chat template and further special tokens are read by the package gguf.
"""

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.convert.hf_tokenizer import SENTENCE_PIECE_MODEL, ExportedTokenizer
from megatron.convert.sentence_piece import BPE, SPACE, UNIGRAM, read_model
from megatron.errors import SettingsError
from megatron.tokenizer.base import Tokenizer
from megatron.tokenizer.transformers_files import TOKENIZER

# Byte-level vocabularies that llama.cpp can cut texts for, by the pattern of their words.
PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": (
        "qwen2"
    ),
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens, of llama.cpp and of SentencePiece
NAMED = ("bos", "eos", "unk", "sep", "pad", "mask")  # special tokens of tokenizer_config.json that a file can name


class Entry(NamedTuple):
    """A token of llama.cpp. score: of SentencePiece's"""

    text: str
    type: int = NORMAL
    score: float = -1000.0


def add(writer, folder: Path, tokenizer: ExportedTokenizer, vocab_size: int) -> None:
    """Add the tokenizer whose files are in the folder. Raises SettingsError for one that llama.cpp does not have."""
    of_pieces = is_of_pieces(folder)
    added = _added_tokens(folder, tokenizer.own)
    entries = _sentence_piece(writer, folder, tokenizer.own) if of_pieces else _byte_level(writer, folder)
    for number, entry in added.items():
        known = entries.get(number, entry)
        entries[number] = known if known.type == UNKNOWN else known._replace(type=entry.type)
    ids = [entries.get(number, Entry(f"[PAD{number}]", UNUSED)) for number in range(vocab_size)]
    writer.add_token_list([entry.text for entry in ids])
    writer.add_token_types([int(entry.type) for entry in ids])
    if of_pieces:
        writer.add_token_scores([entry.score for entry in ids])
    _add_special(writer, folder, tokenizer, vocab_size, merges=not of_pieces)


def is_of_pieces(folder: Path) -> bool:
    """Whether the tokenizer in a folder is llama.cpp's SentencePiece, and not its byte-level BPE."""
    return (folder / SENTENCE_PIECE_MODEL).is_file()


def unexpressed(folder: Path) -> list[str]:
    """A notice on what the tokenizer does with texts, and llama.cpp does not."""
    steps = {
        f"it normalizes no texts ({_form(folder)})": _form(folder),
        "a text that begins with a space has another one before it": _keeps_a_space(folder),
    }
    if is_of_pieces(folder):
        proto = read_model((folder / SENTENCE_PIECE_MODEL).read_bytes())
        spec, of_bpe = proto.normalizer_spec, proto.trainer_spec.model_type == BPE
        symbols = any(piece.type == USER_DEFINED for piece in proto.pieces)
        steps |= {
            f"of BPE it normalizes no texts ({spec.name})": of_bpe and spec.precompiled_charsmap,
            "of BPE it removes no spaces (remove_extra_whitespaces)": of_bpe and spec.remove_extra_whitespaces,
            "of Unigram it has no bytes (byte_fallback)": not of_bpe and proto.trainer_spec.byte_fallback,
            "it puts a space after user-defined symbols (add_dummy_prefix)": spec.add_dummy_prefix and symbols,
        }
    found = ", and ".join(words for words, so in steps.items() if so)
    return [f"llama.cpp gives other ids for some texts: {found}"] if found else []


def is_expressed(folder: Path, text: str) -> bool:
    """Whether `unexpressed` does not concern a text."""
    form = _form(folder)
    normal = form is None or unicodedata.is_normalized(form, text)
    return normal and not (text.startswith((" ", SPACE)) and _keeps_a_space(folder))


def _form(folder: Path) -> str | None:
    """The normal form of Unicode that a tokenizer.json makes of texts, as NFC; None if it makes none."""
    kind = (_content(folder).get("normalizer") or {}).get("type")
    return kind if kind in ("NFC", "NFD", "NFKC", "NFKD") else None


def _keeps_a_space(folder: Path) -> bool:
    """Whether tokenizer.json puts no space before a text that begins with one, and llama.cpp does: its Unigram does not."""
    if is_of_pieces(folder) and read_model((folder / SENTENCE_PIECE_MODEL).read_bytes()).trainer_spec.model_type != BPE:
        return False
    steps = _content(folder).get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    spaced = (step for step in steps if step.get("type") == "Metaspace" and step.get("replacement") == SPACE)
    return any(step.get("prepend_scheme") != "never" for step in spaced)


def _content(folder: Path) -> dict[str, Any]:
    """The content of tokenizer.json; empty without one."""
    return json.loads((folder / TOKENIZER).read_text(encoding="utf-8")) if (folder / TOKENIZER).is_file() else {}


def _add_special(writer, folder: Path, exported: ExportedTokenizer, vocab_size: int, merges: bool) -> None:
    """The special tokens, what is put around prompts, and the chat template."""
    from gguf.vocab import SpecialVocab

    own = exported.own
    found = SpecialVocab(folder, load_merges=merges, n_vocab=vocab_size, special_token_types=NAMED)
    first, last = (_one(ids, where) for ids, where in ((own.prefix, "before"), (own.suffix, "after")))
    end = own.eod if last is None else last
    begin = own.special("bos") if first is None else first
    ends = [id for id in (exported.end_of_turn, own.eod) if id not in (None, end)]  # of an answer, other than the end
    begin = exported.imported.get("bos_token_id", end) if begin is None else begin
    ids = dict(bos=begin, eos=end, eot=ends[0] if ends else None, unk=own.special("unk"))
    found.special_token_ids |= {name: id for name, id in ids.items() if id is not None}
    found.add_special_token = dict(bos=first is not None, eos=last is not None)
    found.add_to_gguf(writer, quiet=True)


def _one(ids: Sequence[int], where: str) -> int | None:
    """The only id. Raises SettingsError for several."""
    if len(ids) > 1:
        raise SettingsError(
            f"--format gguf: the tokenizer puts {len(ids)} tokens {where} a prompt, and llama.cpp one",
            do="--format hf keeps it",
        )
    return ids[0] if ids else None


def _added_tokens(folder: Path, own: Tokenizer) -> dict[int, Entry]:
    """Id -> the tokens that are found in a text before others: special ones, and those of tokenizer.json."""
    content = _content(folder)
    names = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    plain = {id: Entry(name, USER_DEFINED) for name, id in names.items()}
    return plain | {id: Entry(name, CONTROL) for name, id in own.special_tokens.items()}


def _byte_level(writer, folder: Path) -> dict[int, Entry]:
    """The tokens of tokenizer.json."""
    content = _content(folder)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pattern_of(content))
    return {number: Entry(text) for text, number in content["model"]["vocab"].items()}


def _pattern_of(content: dict[str, Any]) -> str:
    """llama.cpp's name of the rule that cuts words. Raises SettingsError for a tokenizer that it does not have."""
    steps = content.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    if content["model"].get("type") == "BPE" and byte_level and not byte_level[0].get("add_prefix_space"):
        if byte_level[0].get("use_regex", True) and len(steps) == 1:
            return "gpt-2"
        patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
        if len(patterns) == 1 and patterns[0] in PATTERNS:
            return PATTERNS[patterns[0]]
    raise SettingsError(
        "--format gguf: llama.cpp has no tokenizer like that of tokenizer.json",
        f"byte-level BPE with the words of {', '.join(PATTERNS.values())} is exported, and SentencePiece's BPE",
        "--format hf keeps it",
    )


def _sentence_piece(writer, folder: Path, own: Tokenizer) -> dict[int, Entry]:
    """The pieces of tokenizer.model."""
    proto = read_model((folder / SENTENCE_PIECE_MODEL).read_bytes())
    kind, spec = proto.trainer_spec.model_type, proto.normalizer_spec
    if kind not in (BPE, UNIGRAM):
        raise SettingsError("--format gguf: llama.cpp has SentencePiece's BPE and Unigram alone", do="--format hf")
    if kind == BPE and not proto.trainer_spec.byte_fallback:
        raise SettingsError(
            "--format gguf: llama.cpp's SentencePiece ends at a character that is no piece, and this model has no bytes",
            do="--format hf keeps it; train a vocabulary with byte_fallback",
        )
    writer.add_tokenizer_model("llama" if kind == BPE else "t5")
    writer.add_tokenizer_pre("default")
    entries = {number: Entry(one.piece, one.type, one.score) for number, one in enumerate(proto.pieces)}
    first, *_ = own.encode("a")
    writer.add_add_space_prefix(entries[first].text.startswith(SPACE))
    if kind == UNIGRAM:
        writer.add_remove_extra_whitespaces(spec.remove_extra_whitespaces)
        if spec.precompiled_charsmap:
            writer.add_precompiled_charsmap(spec.precompiled_charsmap)
    return entries
