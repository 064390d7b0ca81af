# SPDX-License-Identifier: Apache-2.0
"""Scores of classes, or a number, for each sample: of a head on a language model's trunk, from a pooled token; or of the
model's own output layer, from what it says of the tokens of each label in a pattern (pet.py).

Legend: s sequence, b micro-batch, h hidden, c classes or outputs of the head, o options of a sample, w tokens of a label, v
vocabulary, tp ranks that divide each matrix.
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
from megatron.tasks.cloze import CHOICES, GAP
from megatron.tasks.samples import ABOVE, BELOW, OF_SAMPLES, OPTIONS, SHARES
from megatron.tasks.texts import HIDDEN, LENGTHS

LOSS, TOKENS = "loss", "tokens"  # what the sums of the last stage are called
NEVER = -1e9  # the score of an option that is not there
MASKS = ("padding_mask", "enc_mask")  # arrays of samples that are 1 at the tokens of a text; others have its length


class Head(nn.Module):
    """[b, h] -> [b, c] fp32, without bias, as transformers has it for decoders; whole on every rank."""

    def __init__(self, weights, *, dtype, device):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float())


def pooled(x: torch.Tensor, rows: torch.Tensor, tp: Axis, cut: bool) -> torch.Tensor:
    """[s, b, h], and of each sample a row [b] -> [b, h], or several [w, b] -> [w, b, h]: the same on all ranks of tp, whose
    gradients are the same too.

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
    for name in MASKS:
        if name in batch.arrays:
            return batch.arrays[name].float()
    places = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1)
    return (places < batch.arrays[LENGTHS]).float()


def _last_rows(batch) -> torch.Tensor:
    """Of each text the row of its last token [b]."""
    return text_mask(batch).sum(0).long() - 1


def with_hidden_words(batch, dropout: Dropout):
    """The micro-batch whose words are hidden as `dropout` says: its first array has the ids that HIDDEN has there."""
    if dropout.idle:
        return batch
    (name, ids), *others = batch.arrays.items()
    seen = dropout.keep(ids.shape, batch.samples, ids.device).mask()
    arrays = {name: torch.where(seen, ids, batch.arrays[HIDDEN]), **dict(others)}
    return named_batch(arrays, batch.samples, batch.hash)


def with_options_apart(batch, options: int):
    """The micro-batch [s, b o] in which each option of a sample is one: arrays of texts hold those of a sample one behind
    the other, [o s, b], and numbers of texts [o, b].
    """
    if options == 1:
        return batch
    arrays = {
        name: array if name in OF_SAMPLES else _apart(array, options, number=name == LENGTHS)
        for name, array in batch.arrays.items()
    }
    samples = (batch.samples.unsqueeze(-1) * options + torch.arange(options)).flatten()
    return named_batch(arrays, samples, batch.hash)


def _apart(array: torch.Tensor, options: int, number: bool) -> torch.Tensor:
    """[o s, b] -> [s, b o]; or of a number for each option [o, b] -> [b o]."""
    apart = array.view(options, -1, array.shape[-1]).permute(1, 2, 0).flatten(1)
    return apart[0] if number else apart.contiguous()


@cache
def scoring(trunk: type) -> type:
    """The class of a trunk's models that give each sample scores of classes, or a number. A subclass says `scores`."""

    class Scoring(trunk):
        """See `scoring`."""

        def forward(self, x, batch):
            """As `LanguageModel.forward`; the last stage returns (None, {"loss": sum over samples, "tokens": those of known
            label}).
            """
            read = self.read(batch)
            with self.region():
                x, sums = self.trunk(x, read)
                if not self.last:
                    return (x, sums) if sums else x
                scores = self.scores(x, read)
            if self.collect is not None and not self.training:
                self.collect(batch, scores)
            losses = losses_of(scores, batch)
            return None, {LOSS: (losses * batch.loss_mask).sum(), TOKENS: batch.num_tokens, **sums}

        def read(self, batch):
            """What the trunk reads of a micro-batch."""
            return batch

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            """[b, c] fp32 of the last stage's states [s, b, h], or [s/tp, b, h]. batch: what the trunk has read."""
            raise NotImplementedError

        @property
        def cut(self) -> bool:
            """Whether a rank has a part of the sequence (`pooled`)."""
            return self.sequence_parallel and self.tp.size > 1

    return Scoring


@cache
def classifier_of(trunk: type, pooling: str, word_dropout: float = 0.0) -> type:
    """The class of a trunk's models with a head in the place of the output layer. pooling: what the head sees, the state of
    the "first" token, of the "last" one of the text, or the "mean" of all its tokens. word_dropout: share of the words of a
    text that are hidden in training.
    """

    class Classifier(scoring(trunk)):
        """See `classifier_of`. facts: `backbones.classifier_facts`."""

        def __init__(self, *model, **keywords):
            super().__init__(*model, **keywords)
            self.word_dropout = Dropout(word_dropout, "words", -1, self.seed, cp=self.cp)
            if self.last:
                [weights] = [unit.weights for unit in self.units if unit.name == HEAD]
                self.head = Head(weights, **self.factory_kwargs)

        def read(self, batch):
            return with_hidden_words(with_options_apart(batch, self.facts.sequences), self.word_dropout)

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            scores, options = self.head(self._pooled(x, batch)), self.facts.sequences
            if options == 1:
                return scores
            places = torch.arange(options, device=x.device)
            missing = places >= batch.arrays[OPTIONS].unsqueeze(-1)  # [b, o]
            return scores.view(-1, options).masked_fill(missing, NEVER)

        def _pooled(self, x: torch.Tensor, batch) -> torch.Tensor:
            """What the head sees of each sequence [b, h]."""
            if pooling == "mean":
                return averaged(x, text_mask(batch), self.tp, self.cut)
            first = pooling == "first"
            rows = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device) if first else _last_rows(batch)
            return pooled(x, rows, self.tp, self.cut)

    return Classifier


@cache
def label_chooser_of(trunk: type, tokens: int) -> type:
    """The class of a trunk's models that score a label by the sum of its tokens' logits, each in its place. As all labels
    have as many tokens, softmax of the scores is that of their log-probabilities. tokens: the most that a label may have.
    """

    class LabelChooser(scoring(trunk)):
        """See `label_chooser_of`. facts: `backbones.chooser_facts`."""

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            chosen = batch.arrays[CHOICES][:, 0].view(-1, tokens) - 1  # [c, w], the same of all samples; -1: no token
            last = len(x) * (self.tp.size if self.cut else 1) - 1
            places = torch.arange(tokens, device=x.device).unsqueeze(1) + batch.arrays[GAP]  # [w, b]
            states = pooled(self.word_states(x), places.clamp(max=last), self.tp, self.cut)  # [w, b, h]
            logits = self._logits(states, chosen)  # [b, c, w]
            if self.softcap is not None:
                logits = (logits / self.softcap).tanh() * self.softcap
            return logits.sum(-1)

        def _logits(self, states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            """[w, b, h], and tokens [c, w] -> [b, c, w], 0 for -1. A rank has those of its part of the vocabulary."""
            size = len(self.output_weight)
            rows = chosen - self.tp.rank * size
            own, rows = (rows >= 0) & (rows < size), rows.clamp(0, size - 1)
            states = mappings.copy_to_tensor_model_parallel_region(states, self.tp)
            logits = torch.einsum("wbh,cwh->bcw", states.float(), self.output_weight[rows].float())
            if self.output_bias is not None:
                logits = logits + self.output_bias[rows].float()
            return mappings.reduce_from_tensor_model_parallel_region(logits.masked_fill(~own, 0.0), self.tp)

    return LabelChooser


def losses_of(scores: torch.Tensor, batch) -> torch.Tensor:
    """[b, c] -> [b]: cross-entropy of classes, or with probabilities of them; square error of one number."""
    if scores.shape[1] == 1:
        return (scores.squeeze(-1) - (batch.arrays[ABOVE] - batch.arrays[BELOW])).square()
    wanted = batch.arrays[SHARES].T if SHARES in batch.arrays else batch.labels
    return F.cross_entropy(scores, wanted, reduction="none")
