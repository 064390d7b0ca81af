# SPDX-License-Identifier: Apache-2.0
"""Blocks of kernels keep to their bytes, whatever the model's width."""

import pytest

from megatron.settings.kernel_sizes import BLOCK_BYTES, CHUNK_BYTES, TILE, LossChunks


@pytest.mark.parametrize("rows", [501, 8192, 50304, 256000])
@pytest.mark.parametrize("element", [2, 4])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_chunks_and_blocks_fill_their_bytes(rows, element, device):
    chunk, block = LossChunks.of(rows, element, device)
    assert block % chunk == 0
    step = TILE if device == "cuda" else 1
    assert chunk == 16 or CHUNK_BYTES[device] - 4 * rows * step < 4 * rows * chunk <= CHUNK_BYTES[device]
    assert chunk == 16 or chunk % step == 0
    one_more = (block + chunk) * rows * element  # of the gradients' bytes
    assert one_more > BLOCK_BYTES and (block == chunk or block * rows * element <= BLOCK_BYTES)
