# SPDX-License-Identifier: Apache-2.0
"""Windows of a calibration text, beside slices of its files."""

import numpy as np
import pytest

from megatron.data.indexed import write_index
from megatron.errors import DataError
from megatron.inference.calibration import calibration_windows


@pytest.fixture
def files(tmp_path) -> list[str]:
    """Prefixes of three files, of 10, 3 and 21 tokens: 0 to 9, 100 to 102, 200 to 220."""
    prefixes = []
    for number, length in enumerate((10, 3, 21)):
        prefix = str(tmp_path / f"text{number}")
        (100 * number + np.arange(length)).astype(np.uint16).tofile(f"{prefix}.bin")
        write_index(f"{prefix}.idx", np.uint16, np.array([length]), np.array([0, 1]))
        prefixes.append(prefix)
    return prefixes


def test_windows_lie_in_one_file_and_are_evenly_spaced(files):
    starts = [0, 5, 200, 205, 210, 215]
    assert calibration_windows(files, 5, 99, 500).tolist() == [list(range(n, n + 5)) for n in starts]
    assert calibration_windows(files, 5, 3, 500)[:, 0].tolist() == [starts[0], starts[2], starts[5]]
    weighted = ["0.3", files[0], "0.7", files[2]]
    assert calibration_windows(weighted, 5, 2, 500)[:, 0].tolist() == [0, 215]


def test_windows_with_the_label_of_their_last_token(files):
    found = calibration_windows(files, 5, 99, 500, labels=1)  # 10 tokens have one window with its label, 21 have four
    assert found.tolist() == [list(range(n, n + 6)) for n in (0, 200, 205, 210, 215)]


def test_a_text_that_does_not_suit_the_model(files):
    with pytest.raises(DataError, match="(?s)has no window of 4 tokens.*the files have 3 tokens"):
        calibration_windows(files[1:2], 4, 1, 500)
    for vocab_size in (200, 219):
        with pytest.raises(DataError, match=f"has token 219, the model has ids below {vocab_size}"):
            calibration_windows(files, 5, 99, vocab_size)
    calibration_windows(files, 5, 99, 220)
