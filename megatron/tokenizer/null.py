# SPDX-License-Identifier: Apache-2.0
"""NullTokenizer: texts of numbers ("3 1 4"), for benchmarks and checks. Ids are below `--vocab-size`, which is the EOD."""

from megatron.errors import DataError
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import Tokenizer, fingerprint


def build(settings: TokenizerSettings, notify=None) -> Tokenizer:
    size = settings.vocab_size

    def encode(text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise DataError(
                "NullTokenizer: the text is not numbers",
                str(error),
                "--vocab-size N alone is for texts of numbers; give the tokenizer of this text: --tokenizer-model, or "
                "--vocab-file and --merge-file",
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) <= size:
            raise DataError(f"NullTokenizer: ids {min(ids)}..{max(ids)} are outside of 0..{size} (--vocab-size {size})")
        return ids

    return Tokenizer(
        name="NullTokenizer",
        vocab_size=size + 1,
        eod=size,
        fingerprint=fingerprint("null", str(size)),
        engines={"null": lambda: encode},
        decode=lambda ids: " ".join(map(str, ids)),
    )
