# SPDX-License-Identifier: Apache-2.0
"""What `.origin` costs preprocessing: CPU time of encoding with and without it, alternating in one process.

    python benchmarks/origin.py --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt

The text is cut into documents of 1 kB and of 13 kB. Whole runs differ by more than this costs, so one block is encoded
again and again, the tokenizer's cache of words full; the least time of each kind counts.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.data.json_input import find_sources, read_blocks  # noqa: E402
from megatron.data.preprocess import choose_engine, divide  # noqa: E402
from megatron.data.preprocess_encode import BlockEncoder  # noqa: E402
from megatron.settings.schema import TokenizerSettings  # noqa: E402
from megatron.tokenizer import build_tokenizer  # noqa: E402

SIZES = (1_000, 13_000)  # characters of a document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--input", "--vocab-file", "--merge-file"):
        parser.add_argument(name, required=True)
    parser.add_argument("--megabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=60)
    asked = parser.parse_args()
    text = text_of(asked.input, int(asked.megabytes * 1e6))
    vocabulary = TokenizerSettings(vocab_file=asked.vocab_file, merge_file=asked.merge_file)
    for size in SIZES:
        lines = [json.dumps(dict(text=text[at : at + size])) for at in range(0, len(text), size)]
        without, with_it = measure("\n".join(lines).encode() + b"\n", vocabulary, asked.repeats)
        each = (with_it - without) / len(lines) * 1e6
        told = f"{without * 1e3:.2f} ms without, {with_it * 1e3:.2f} with: {each:.2f} us a document"
        print(f"{len(lines):5} documents of {size:6,} characters: {told}, {with_it / without - 1:.1%} of encoding")


def text_of(path: str, characters: int) -> str:
    """The beginning of the texts of JSON lines, without those that hold what could not be decoded."""
    texts, held = [], 0
    for source in find_sources([path]):
        for block, _ in read_blocks(source, 1 << 20):
            found = [json.loads(line)["text"] for line in block.split(b"\n") if line]
            found = [text for text in found if "\ufffd" not in text]
            texts += found
            held += sum(map(len, found))
            if held >= characters:
                return "".join(texts)[:characters]
    return "".join(texts)


def measure(block: bytes, vocabulary: TokenizerSettings, repeats: int) -> tuple[float, float]:
    """The least CPU seconds of encoding a block, without origins and with them."""
    tokenizer = build_tokenizer(vocabulary)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(block)
        file.flush()
        choose_engine(tokenizer, divide(find_sources([file.name]), 1, 1 << 20), ["text"], lambda line: None)
    encoders = [BlockEncoder(tokenizer, ["text"], np.dtype(np.uint16), True, origins=kind) for kind in (False, True)]
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for encode, own in zip(encoders, times):
            start = time.process_time()
            encode(block)
            own.append(time.process_time() - start)
    return min(times[0]), min(times[1])


if __name__ == "__main__":
    main()
