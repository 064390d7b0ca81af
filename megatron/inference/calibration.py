# SPDX-License-Identifier: Apache-2.0
"""Read the calibration text: windows of tokens on which a loaded model is measured before it is quantized or pruned."""

from collections.abc import Sequence

import numpy as np

from megatron.data.blend import parse_blend
from megatron.data.formats import datasets_of, open_tokens
from megatron.errors import DataError


def calibration_windows(
    words: Sequence[str], length: int, count: int, vocab_size: int, *, labels: int = 0, flag: str = "--calibration-data"
) -> np.ndarray:
    """Token ids of windows, evenly spaced over token files: [count or fewer, length + labels].

    words: prefixes of token files, or folders; weights between them are ignored
    labels: 1 for the token after each window as well
    Raises DataError if no file has a window, or if the model does not know their tokens.
    """
    prefixes = [prefix for word in parse_blend(words, flag).prefixes for prefix in datasets_of(word)]
    files = [open_tokens(prefix).tokens for prefix in prefixes]
    ends = np.cumsum([max(0, len(tokens) - labels) // length for tokens in files])  # windows up to the end of each file
    if not ends[-1]:
        raise DataError(
            f"{flag} {' '.join(words)} has no window of {length + labels} tokens",
            do=f"give a longer text: the files have {', '.join(f'{len(tokens):,}' for tokens in files)} tokens",
        )
    windows = []
    for number in np.linspace(0, ends[-1] - 1, min(count, ends[-1])).astype(np.int64):
        file = np.searchsorted(ends, number, "right")
        start = (number - (ends[file - 1] if file else 0)) * length
        windows.append(np.asarray(files[file][start : start + length + labels], np.int64))
    largest = max(int(window.max()) for window in windows)
    if largest >= vocab_size:
        raise DataError(
            f"{flag} {' '.join(words)} has token {largest}, the model has ids below {vocab_size}",
            do="preprocess the text with the tokenizer that the model was trained with, and leave out tokens without a row",
        )
    return np.stack(windows)
