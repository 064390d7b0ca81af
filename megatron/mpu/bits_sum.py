# SPDX-License-Identifier: Apache-2.0
"""64-bit checksums of a tensor's bits, computed where the tensor is: equal on every device."""

import torch

_ROW = 4096  # words of a row
_FACTOR = 0x5851F42D4C957F2D
_STEP = 1 << 26  # bytes that are summed at once


def bits_sum(values: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the tensor's device. Any change of one word changes it, and so do almost all others.

    The bits are words of 8 bytes in rows. Each row's sum and each column's sum count with a factor of their own, so that a
    word at (i, j) counts with an odd number: none of its bits is lost modulo 2**64.
    """
    raw = values.detach().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for number, part in enumerate(raw.split(_STEP)):
        total += _part_sum(part) * (2 * number + 1)
    return total


def words_sum(values: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the tensor's device: the sum of its words of 8 bytes, modulo 2**64, and of the bytes behind them.

    Any change of one word changes it, but not its place. It takes a third of the time of a copy (`bits_sum`: as long as
    one): for two computations that should be the same, not for bytes that may have been moved.

    >>> one = torch.ones(5)
    >>> words_sum(one).item() == words_sum(one.clone()).item() != words_sum(torch.nextafter(one, 2 * one)).item()
    True
    """
    raw = values.detach().reshape(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    total = _as_words(raw[:whole]).sum()
    return total if whole == raw.numel() else total + raw[whole:].sum(dtype=torch.int64)


def _part_sum(raw: torch.Tensor) -> torch.Tensor:
    whole = raw.numel() // 8 * 8
    words = _as_words(raw[:whole])
    rows = words.numel() // _ROW
    table, rest = words[: rows * _ROW].view(rows, _ROW), words[rows * _ROW :]
    total = (table.sum(1) * _factors(rows, raw.device)).sum()
    total += (table.sum(0) * (_factors(_ROW, raw.device) - 1)).sum()
    total += (rest * (_factors(rest.numel(), raw.device) + 2 * rows)).sum()
    return total + (raw[whole:].long() * (_factors(raw.numel() - whole, raw.device) + 2 * words.numel())).sum()


def _as_words(raw: torch.Tensor) -> torch.Tensor:
    """View bytes as int64; a copy where they do not lie at a multiple of 8 bytes."""
    return (raw if raw.storage_offset() % 8 == 0 and raw.data_ptr() % 8 == 0 else raw.clone()).view(torch.int64)


def _factors(count: int, device: torch.device) -> torch.Tensor:
    """Different odd numbers."""
    return torch.arange(count, device=device).mul_(_FACTOR).mul_(2).add_(1)
