# SPDX-License-Identifier: Apache-2.0
"""A head on a language model's trunk: scores of classes, or a number, from the pooled token of each sample.

Legend: s sequence, b micro-batch, h hidden, c outputs of the head, tp ranks that divide each matrix.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from megatron.data.loader import named_batch
from megatron.mpu import mappings
from megatron.mpu.layers import create_parameters
from megatron.mpu.mesh import Axis
from megatron.mpu.random import Dropout
from megatron.tasks.backbones import HEAD
from megatron.tasks.samples import ABOVE, BELOW, SHARES
from megatron.tasks.texts import HIDDEN, LENGTHS

LOSS, TOKENS = "loss", "tokens"  # what the sums of the last stage are called


class Head(nn.Module):
    """[b, h] -> [b, c] fp32, without bias, as transformers has it for decoders; whole on every rank."""

    def __init__(self, weights, *, dtype, device):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float())


def pooled(x: torch.Tensor, rows: torch.Tensor, tp: Axis, cut: bool) -> torch.Tensor:
    """[s, b, h], and of each sample a row [b] -> [b, h], the same on all ranks of tp, whose gradients are the same too.

    cut: x is a rank's [s/tp, b, h] (sequence parallelism): the row is taken where it is, and the others add zero.
    """
    places = torch.arange(x.shape[1], device=x.device)
    if not cut:
        return x[rows, places]
    rows = rows - tp.rank * len(x)
    own = ((rows >= 0) & (rows < len(x))).unsqueeze(-1)
    picked = x[rows.clamp(0, len(x) - 1), places]
    return mappings.reduce_from_tensor_model_parallel_region(torch.where(own, picked, 0.0), tp)


def averaged(x: torch.Tensor, mask: torch.Tensor, tp: Axis, cut: bool) -> torch.Tensor:
    """[s, b, h], and 1 at the tokens of each sample [s, b] -> the mean of their states [b, h]. Otherwise as `pooled`."""
    counts = mask.sum(0).unsqueeze(-1)  # [b, 1]; a sample has at least one token
    own = mask.chunk(tp.size)[tp.rank] if cut else mask
    total = (x.float() * own.unsqueeze(-1)).sum(0)
    if cut:
        total = mappings.reduce_from_tensor_model_parallel_region(total, tp)
    return total / counts


def text_mask(batch) -> torch.Tensor:
    """[s, b] fp32: 1 at the tokens of each text, special ones included, and 0 at what fills up."""
    if LENGTHS not in batch.arrays:
        return batch.arrays["padding_mask"].float()
    places = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1)
    return (places < batch.arrays[LENGTHS]).float()


def with_hidden_words(batch, dropout: Dropout):
    """The micro-batch whose words are hidden as `dropout` says: its first array has the ids that HIDDEN has there."""
    if dropout.idle:
        return batch
    (name, ids), *others = batch.arrays.items()
    seen = dropout.keep(ids.shape, batch.samples, ids.device).mask()
    arrays = {name: torch.where(seen, ids, batch.arrays[HIDDEN]), **dict(others)}
    return named_batch(arrays, batch.samples, batch.hash)


@cache
def classifier_of(trunk: type, pooling: str, word_dropout: float = 0.0) -> type:
    """The class of a trunk's models with a head in the place of the output layer. pooling: what the head sees, the state of
    the "first" token, of the "last" one of the text, or the "mean" of all its tokens. word_dropout: share of the words of a
    text that are hidden in training.
    """

    class Classifier(trunk):
        """See `classifier_of`. facts: `backbones.classifier_facts`."""

        def __init__(self, *model, **keywords):
            super().__init__(*model, **keywords)
            self.word_dropout = Dropout(word_dropout, "words", -1, self.seed, cp=self.cp)
            if self.last:
                [weights] = [unit.weights for unit in self.units if unit.name == HEAD]
                self.head = Head(weights, **self.factory_kwargs)

        def forward(self, x, batch):
            """As `LanguageModel.forward`; the last stage returns (None, {"loss": sum over samples, "tokens": those of known
            label}).
            """
            batch = with_hidden_words(batch, self.word_dropout)
            with self.region():
                x, sums = self.trunk(x, batch)
                if not self.last:
                    return (x, sums) if sums else x
                scores = self.head(self._pooled_state(x, batch))  # [b, c]
            if self.collect is not None and not self.training:
                self.collect(batch, scores)
            losses = losses_of(scores, batch, self.facts.num_outputs)
            return None, {LOSS: (losses * batch.loss_mask).sum(), TOKENS: batch.num_tokens, **sums}

        def _pooled_state(self, x: torch.Tensor, batch) -> torch.Tensor:
            """[b, h] of the last stage's [s, b, h]."""
            cut = self.sequence_parallel and self.tp.size > 1
            if pooling == "mean":
                return averaged(x, text_mask(batch), self.tp, cut)
            first = pooling == "first"
            rows = torch.zeros_like(batch.labels) if first else text_mask(batch).sum(0).long() - 1
            return pooled(x, rows, self.tp, cut)

    return Classifier


def losses_of(scores: torch.Tensor, batch, outputs: int) -> torch.Tensor:
    """[b, c] -> [b]: cross-entropy of classes, or with probabilities of them; square error of one number."""
    if outputs == 1:
        return (scores.squeeze(-1) - (batch.arrays[ABOVE] - batch.arrays[BELOW])).square()
    wanted = batch.arrays[SHARES].T if SHARES in batch.arrays else batch.labels
    return F.cross_entropy(scores, wanted, reduction="none")
