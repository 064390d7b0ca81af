# SPDX-License-Identifier: Apache-2.0
"""Train a vocabulary on JSON lines or text: GPT-2's byte-level BPE, BERT's word pieces, or SentencePiece's unigrams.

    python -m megatron.tools.train_tokenizer --input corpus.jsonl --vocab-size 8192 --output vocabulary/

writes vocab.json and merges.txt for `--tokenizer-type GPT2BPETokenizer --vocab-file --merge-file`. Ids have GPT-2's
layout: 256 bytes, one id per merge, `<|endoftext|>` last. `--kind word-piece` writes vocab.txt for
`--tokenizer-type BertWordPieceLowerCase --vocab-file` (`word-piece-cased`: BertWordPieceCase): [PAD], [UNK], [CLS],
[SEP], [MASK], characters, pieces. `--kind unigram` trains SentencePiece's unigram model, as T5's, and writes
tokenizer.model for `--tokenizer-type SentencePieceTokenizer --tokenizer-model`: <pad>, </s>, <unk>, <s>, [CLS], [SEP],
[MASK], pieces. Its Chinese pieces are words; those of `word-piece` are characters. The same input gives the same files.
"""

import io
import json
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from megatron.data.file_formats import SEPARATOR_HELP
from megatron.data.json_input import find_sources, read_texts
from megatron.errors import DataError, MissingPackage, SettingsError, run_main
from megatron.settings.declare import dashed
from megatron.settings.parse import parse_with_record
from megatron.settings.schema import setting
from megatron.storage.durable import whole_file
from megatron.tokenizer.byte_level import BYTE_TO_CHARACTER, END_OF_TEXT

SMALLEST = len(BYTE_TO_CHARACTER) + 2  # the bytes, one merge, end of text
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # BERT's first tokens
ENDS = dict(pad_id=0, eos_id=1, unk_id=2, bos_id=3, pad_piece="<pad>")  # of a unigram model; T5's ids
OF_UNIGRAMS = ("max_piece_length", "spaces_apart", "character_coverage")  # settings of --kind unigram only
FILES = {
    "byte-level": ("vocab.json", "merges.txt"),
    "word-piece": ("vocab.txt",),
    "word-piece-cased": ("vocab.txt",),
    "unigram": ("tokenizer.model",),
}
SPACE = "\u2581"  # SentencePiece's symbol


@dataclass(frozen=True)
class TrainTokenizerOptions:
    """The text to train on, and the size of the vocabulary."""

    input: list[str] = setting("JSON lines, or .txt: files, globs, folders, - for stdin; .gz .zst .bz2 .xz .tar too")
    output: str = setting("folder for vocab.json and merges.txt, or vocab.txt, or tokenizer.model", ".")
    kind: Literal["byte-level", "word-piece", "word-piece-cased", "unigram"] = setting(
        "byte-level: BPE as GPT-2's; word-piece: as BERT's, in lower case without accents, or cased; unigram: "
        "SentencePiece's, as T5's",
        "byte-level",
    )
    json_keys: list[str] = setting("keys that hold text (default: text)", None)
    document_separator: Optional[str] = setting(SEPARATOR_HELP, None)
    vocab_size: int = setting("tokens, end of text and the 256 bytes included", 8192)
    min_frequency: int = setting("a pair that occurs less often is not merged (not of unigram)", 2)
    max_piece_length: int = setting("characters of a piece, at most (of unigram); of Chinese words, 4", 16)
    spaces_apart: bool = setting(
        "a space is a piece of its own (of unigram): words have the same pieces after one and elsewhere, as Chinese needs",
        False,
    )
    character_coverage: float = setting("share of all characters that get a piece of their own (of unigram)", 0.9995)
    max_megabytes: float = setting("read no more text than this; a vocabulary does not get better with more", 200.0)


def main(argv: list[str]) -> None:
    groups, said = parse_with_record(
        argv,
        dict(training=TrainTokenizerOptions),
        prog="python -m megatron.tools.train_tokenizer",
        description="Train a vocabulary: byte-level BPE as GPT-2's, word pieces as BERT's, or SentencePiece's unigrams.",
        common=tuple(TrainTokenizerOptions.__dataclass_fields__),
    )
    settings = groups["training"]
    check(settings)
    for name in OF_UNIGRAMS if settings.kind != "unigram" else ("min_frequency",):
        if name in said and said[name].is_request:
            print(f"warning: {dashed(name)} has no effect with --kind {settings.kind}")
    there = [path for name in FILES[settings.kind] if (path := Path(settings.output) / name).exists()]
    start = time.perf_counter()
    train = {"byte-level": train_byte_level, "unigram": train_unigrams}.get(settings.kind, train_word_pieces)
    path, size = train(settings, texts_of(settings))
    if there:
        print(f"note: replaced {' and '.join(map(str, there))}")
    print(f"{path}: {size} tokens, {time.perf_counter() - start:.1f} s")
    if size < settings.vocab_size:
        print(f"note: the text holds no more pairs; --vocab-size {settings.vocab_size} was not reached")


def check(settings: TrainTokenizerOptions) -> None:
    """Raise SettingsError for numbers out of range."""
    if not 1 <= settings.max_piece_length <= 512:
        raise SettingsError(f"--max-piece-length {settings.max_piece_length} has to be from 1 to 512")
    if not 0.98 <= settings.character_coverage <= 1:
        raise SettingsError(f"--character-coverage {settings.character_coverage} has to be from 0.98 to 1")


def train_byte_level(settings: TrainTokenizerOptions, texts: Iterator[str]) -> tuple[Path, int]:
    """Train byte-level BPE; returns (vocab.json, its number of tokens). merges.txt is written next to it."""
    if settings.vocab_size < SMALLEST:
        raise SettingsError(
            f"--vocab-size {settings.vocab_size} is too small",
            "256 bytes, at least one merge and end of text have to fit",
            f"--vocab-size {SMALLEST}",
        )
    merges = learn_merges(texts, settings.vocab_size, settings.min_frequency)
    if not merges:
        raise DataError(
            f"no pair of bytes occurs {settings.min_frequency} times in {' '.join(settings.input)}",
            do="give more text, or a lower --min-frequency",
        )
    return Path(settings.output) / "vocab.json", write_vocabulary(Path(settings.output), merges)


def train_word_pieces(settings: TrainTokenizerOptions, texts: Iterator[str]) -> tuple[Path, int]:
    """Train word pieces; returns (vocab.txt, its number of tokens).

    The library numbers the characters inside words in the order of a hash table, and uses the numbers to choose between
    pairs of equal frequency. Passing the characters as special tokens fixes the order.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=settings.kind == "word-piece")
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts, counts = list(texts), Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text))
    alphabet, inside = characters_of(counts, settings.vocab_size // 2)
    first = [*SPECIAL, *alphabet, *(f"##{character}" for character in inside)]
    if len(first) >= settings.vocab_size:
        do = f"--vocab-size {8 * len(SPECIAL)} or more"
        raise SettingsError(f"--vocab-size {settings.vocab_size} has no room for pieces of words", do=do)
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=first,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokens = sorted(vocab := tokenizer.get_vocab(), key=vocab.__getitem__)
    if len(tokens) == len(first):
        raise DataError(
            f"no pair of characters occurs {settings.min_frequency} times in {' '.join(settings.input)}",
            do="give more text, or a lower --min-frequency",
        )
    path = Path(settings.output) / "vocab.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "".join(f"{token}\n" for token in tokens))
    return path, len(tokens)


def train_unigrams(settings: TrainTokenizerOptions, texts: Iterator[str]) -> tuple[Path, int]:
    """Train unigrams; returns (tokenizer.model, its number of tokens). In one thread: with several, sums would vary."""
    try:
        from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
    except ImportError:
        raise MissingPackage("--kind unigram needs the package sentencepiece", do="pip install sentencepiece") from None
    path, model = Path(settings.output) / "tokenizer.model", io.BytesIO()
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    if not lines:
        raise DataError(f"there is no text in {' '.join(settings.input)}")
    special = dict(control_symbols=["[CLS]", "[SEP]", "[MASK]"], **ENDS)
    if settings.spaces_apart:
        special |= dict(user_defined_symbols=[SPACE], add_dummy_prefix=False)
    sizes = dict(
        vocab_size=settings.vocab_size, hard_vocab_limit=False, max_sentencepiece_length=settings.max_piece_length
    )
    sizes |= dict(character_coverage=settings.character_coverage, max_sentence_length=1 << 16)
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            model_type="unigram",
            num_threads=1,
            minloglevel=2,
            **special,
            **sizes,
        )
    except (RuntimeError, OSError) as error:
        raise SettingsError(
            f"no unigrams of {' '.join(settings.input)} with --vocab-size {settings.vocab_size}",
            " ".join(str(error).split()),
            "give more text, or a size that holds all of its characters",
        ) from None
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(model.getvalue())
    return path, SentencePieceProcessor(model_proto=model.getvalue()).GetPieceSize()


def characters_of(counts: Mapping[str, int], room: int) -> tuple[list[str], list[str]]:
    """Choose characters: (those that get a token, those that get another one inside words), sorted. The most frequent
    ones are taken as long as there is room for their one or two tokens. Rarer ones are [UNK].

    >>> characters_of({"b": 9, "a": 8, ".": 7, " ": 9, "c": 1}, 5)
    (['.', 'a', 'b'], ['a', 'b'])
    """
    alphabet = []
    for character in sorted(counts, key=lambda character: (-counts[character], character)):
        if not character.isspace() and (room := room - 1 - _stands_in_words(character)) >= 0:
            alphabet.append(character)
    return sorted(alphabet), sorted(filter(_stands_in_words, alphabet))


def _stands_in_words(character: str) -> bool:
    """Whether a character can follow another in a word: BERT splits at punctuation and at Chinese characters."""
    if character.isascii():
        return character.isalnum()
    name = unicodedata.name(character, "")
    return unicodedata.category(character)[0] != "P" and not name.startswith("CJK ")


def texts_of(settings: TrainTokenizerOptions) -> Iterator[str]:
    """The texts of the input, up to --max-megabytes. Raises DataError naming file and line."""
    room = int(settings.max_megabytes * 1e6)
    sources = find_sources(settings.input, settings.document_separator, settings.json_keys)
    for text in read_texts(sources, settings.json_keys):
        yield text
        room -= len(text.encode())
        if room <= 0:
            return


def learn_merges(texts: Iterator[str], vocab_size: int, min_frequency: int) -> list[tuple[str, str]]:
    """The pairs to merge, most important first, enough for `vocab_size` tokens in all."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # without end of text
        min_frequency=min_frequency,
        initial_alphabet=list(BYTE_TO_CHARACTER),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def write_vocabulary(folder: Path, merges: list[tuple[str, str]]) -> int:
    """Write vocab.json and merges.txt, each complete or not at all. Returns the number of tokens."""
    tokens = dict.fromkeys([*sorted(BYTE_TO_CHARACTER), *(left + right for left, right in merges), END_OF_TEXT])
    vocab = {token: id for id, token in enumerate(tokens)}
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "merges.txt", "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in merges))
    _write(folder / "vocab.json", json.dumps(vocab, ensure_ascii=False, separators=(",", ":")))
    return len(vocab)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as file:
        file.write(text.encode("utf-8"))


if __name__ == "__main__":
    run_main(main)
