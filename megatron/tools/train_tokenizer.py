# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level BPE vocabulary of GPT-2's kind on loose JSON lines.

    python -m megatron.tools.train_tokenizer --input corpus.jsonl --vocab-size 8192 --output vocabulary/

writes vocab.json and merges.txt, which `--tokenizer-type GPT2BPETokenizer --vocab-file --merge-file` reads. Ids are laid
out as GPT-2's: 256 bytes, one id per merge, `<|endoftext|>` last. The same input gives the same files.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import DataError, SettingsError, run_main
from megatron.settings.parse import parse
from megatron.settings.schema import setting
from megatron.tokenizer.byte_level import BYTE_TO_CHARACTER, END_OF_TEXT

SMALLEST = len(BYTE_TO_CHARACTER) + 2  # the bytes, one merge, end of text


@dataclass(frozen=True)
class TrainTokenizerOptions:
    """What to train on, and how large the vocabulary shall be."""

    input: list[str] = setting("files of JSON lines")
    output: str = setting("folder for vocab.json and merges.txt", ".")
    json_keys: list[str] = setting("keys that hold text (default: text)", None)
    vocab_size: int = setting("tokens, end of text and the 256 bytes included", 8192)
    min_frequency: int = setting("a pair that occurs less often is not merged", 2)
    max_megabytes: float = setting("read no more text than this; a vocabulary does not get better with more", 200.0)


def main(argv: list[str]) -> None:
    settings = parse(
        argv,
        dict(training=TrainTokenizerOptions),
        prog="python -m megatron.tools.train_tokenizer",
        description="Train a byte-level BPE vocabulary of GPT-2's kind.",
        common=tuple(TrainTokenizerOptions.__dataclass_fields__),
    )["training"]
    if settings.vocab_size < SMALLEST:
        raise SettingsError(
            f"--vocab-size {settings.vocab_size} is too small",
            "256 bytes, at least one merge and end of text have to fit",
            f"--vocab-size {SMALLEST}",
        )
    start = time.perf_counter()
    texts = read_texts(settings.input, settings.json_keys or ["text"], int(settings.max_megabytes * 1e6))
    merges = learn_merges(texts, settings.vocab_size, settings.min_frequency)
    if not merges:
        raise DataError(
            f"no pair of bytes occurs {settings.min_frequency} times in {' '.join(settings.input)}",
            do="give more text, or a lower --min-frequency",
        )
    size = write_vocabulary(Path(settings.output), merges)
    print(f"{Path(settings.output) / 'vocab.json'}: {size} tokens, {time.perf_counter() - start:.1f} s")
    if size < settings.vocab_size:
        print(f"note: the text holds no more pairs; --vocab-size {settings.vocab_size} was not reached")


def read_texts(paths: list[str], keys: list[str], room: int) -> Iterator[str]:
    """The texts under `keys` of JSON lines, up to `room` bytes. Raises DataError naming file and line."""
    for path in paths:
        try:
            lines = Path(path).open("rb")
        except FileNotFoundError:
            raise DataError(f"{path}: no such file", do="check --input") from None
        with lines:
            for number, line in enumerate(lines, 1):
                try:
                    document = json.loads(line)
                    texts = [document[key] for key in keys]
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(
                        f"{path}, line {number}: {_complaint(error)}",
                        do="every line has to be a JSON object; --json-keys names its texts",
                    ) from None
                for text in texts:
                    if not isinstance(text, str):
                        raise DataError(f"{path}, line {number}: the value is no text but {type(text).__name__}")
                    yield text
                    room -= len(text.encode("utf-8", "surrogatepass"))
                if room <= 0:
                    return


def _complaint(error: Exception) -> str:
    return f"there is no key {error}" if isinstance(error, KeyError) else f"not a JSON object ({error})"


def learn_merges(texts: Iterator[str], vocab_size: int, min_frequency: int) -> list[tuple[str, str]]:
    """The pairs to merge, most important first, enough for `vocab_size` tokens in all."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # end of text comes on top
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
    aside = path.with_name(path.name + ".partial")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    run_main(main)
