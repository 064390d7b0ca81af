# SPDX-License-Identifier: Apache-2.0
"""Score a text: the exact sum of the losses of all its tokens, including the last ones.

A text longer than the model's context is cut into windows. Every token but the first is predicted exactly once; with a
stride below the window's length, it has at least `length - stride` tokens of context.

Several ranks take turns at the batches and all get the sum. The batches are the same as with one process, and the sum does
not depend on their order, so it is bitwise equal if the ranks round equally.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Optional

import numpy as np
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch
from megatron.inference.batch_invariant import sample_length
from megatron.inference.stages import chunks_of, summed
from megatron.mpu.mesh import Axis

ALONE = Axis("alone", (0,))  # one process


class Window(NamedTuple):
    """Inputs [start, start + length) of a text; only the last `counted` predictions are new."""

    start: int
    length: int
    counted: int


@dataclass(frozen=True)
class Score:
    """The sum of the cross-entropies of `tokens` predicted tokens, in nats. part: the same for a subset, or None."""

    loss_sum: float
    tokens: int
    part: Optional["Score"] = None

    @property
    def loss(self) -> float:
        return self.loss_sum / self.tokens

    def perplexity(self, ratio: float = 1.0) -> float:
        """exp of the loss per unit of `ratio` tokens (a word, for example); at most e^20."""
        return math.exp(min(self.loss * ratio, 20.0))  # of nan nan


def windows(total: int, length: int, stride: int) -> Iterator[Window]:
    """The windows over a text of `total` tokens.

    >>> list(windows(total=8, length=4, stride=2))
    [Window(start=0, length=4, counted=4), Window(start=2, length=4, counted=2), Window(start=4, length=3, counted=1)]
    """
    assert 0 < stride <= length, (stride, length)
    targets = total - 1
    if targets < 1:
        return
    end = min(length, targets)  # targets predicted so far
    yield Window(0, end, end)
    while end < targets:
        start = end + stride - length
        new_end = min(end + stride, targets)
        yield Window(start, new_end - start, new_end - end)
        end = new_end


@torch.no_grad()
def score(
    model,
    tokens: np.ndarray,
    *,
    length: int,
    stride: int,
    batch_size: int,
    axis: Axis = ALONE,
    progress: Callable[[int, int], None] = lambda done, total: None,
    part: Optional[np.ndarray] = None,
    prefix: Sequence[int] = (),
) -> Score:
    """Score a text of token ids [n].

    Every rank of `axis` has the whole text and the model, or its part of the model, and returns the same score. `progress`
    receives (predicted so far, total) after every batch of this rank. part: bool [n], tokens that are also scored
    separately, with all tokens as context. prefix: what the tokenizer puts before a prompt: each window begins with it.
    """
    device, room = next(model.parameters()).device, length - len(prefix)
    todo = list(windows(len(tokens), room, min(stride, room)))
    predicted = list(accumulate((window.counted for window in todo), initial=0))  # before each window
    sums = torch.zeros(2, -(-len(todo) // batch_size), dtype=torch.float64)  # for each batch: all tokens, and the part
    for at in range(axis.rank * batch_size, len(todo), axis.size * batch_size):
        some = todo[at : at + batch_size]
        inputs, labels, counted = window_batch(tokens, some, prefix)
        batch = MicroBatch(inputs.to(device), labels.to(device), torch.arange(len(some)))
        losses = token_losses(model, batch)  # [s, b]; None except on the last pipeline stage
        if losses is not None:
            sums[0, at // batch_size] = (losses.double() * counted.to(device)).sum().item()
        if losses is not None and part is not None:
            own = counted * torch.from_numpy(of_windows(part, some, len(counted), len(prefix)))
            sums[1, at // batch_size] = (losses.double() * own.to(device)).sum().item()
        # Assuming equal progress of the other ranks
        reached = min(len(todo), at + (axis.size - axis.rank) * batch_size)
        progress(predicted[reached], predicted[-1])
    sums = summed(sums.to(device), model, axis)  # batches of other ranks are 0 here
    all_of_it, of_part = (math.fsum(row) for row in sums.tolist())
    return Score(
        all_of_it, predicted[-1], Score(of_part, int(part[1:].sum())) if part is not None and part[1:].any() else None
    )


def token_losses(model, batch: MicroBatch) -> Optional[torch.Tensor]:
    """The cross-entropy of each token, [s, b] fp32, on the last pipeline stage; None on others. With --batch-invariant-mode
    each text is a pass of its own, as long as a sample in training.
    """
    whole = sample_length(chunks_of(model)[0])
    if whole is None:
        return model.token_losses(None, batch)
    s, found = len(batch.tokens), []
    for one in range(batch.tokens.shape[1]):
        tokens, labels = (F.pad(x[:, one : one + 1], (0, 0, 0, whole - s)) for x in (batch.tokens, batch.labels))
        found.append(model.token_losses(None, MicroBatch(tokens, labels, batch.samples[:1])))
    return None if found[0] is None else torch.cat(found, 1)[:s]


def of_windows(values: np.ndarray, part: Sequence[Window], s: int, before: int = 0) -> np.ndarray:
    """The values [n] of the tokens that windows predict: float64 [s, b], 0 after their ends and in `before` rows."""
    found = np.zeros((s, len(part)), np.float64)
    for column, (start, length, _) in enumerate(part):
        found[before : before + length, column] = values[start + 1 : start + length + 1]
    return found


def window_batch(
    tokens: np.ndarray, part: Sequence[Window], prefix: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(inputs, labels, weights of predictions) of windows, each [s, b]. prefix: tokens before each of them.

    Shorter windows are padded at the end, which does not affect other tokens under causal attention.
    """
    before = len(prefix)
    s = before + max(window.length for window in part)
    inputs, labels = np.zeros((s, len(part)), np.int64), np.zeros((s, len(part)), np.int64)
    counted = np.zeros((s, len(part)), np.float64)
    for column, (start, length, new) in enumerate(part):
        piece, end = np.concatenate([prefix, tokens[start : start + length + 1]]).astype(np.int64), before + length
        inputs[:end, column], labels[:end, column] = piece[:-1], piece[1:]
        counted[end - new : end, column] = 1
    return torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(counted)
