# SPDX-License-Identifier: Apache-2.0
"""Models that score each sample: with a head on a language model's trunk, or with the model's output layer and a pattern
(pet.py).

Legend: s sequence, b micro-batch, h hidden, c classes or outputs of the head, o options of a sample, w tokens of a label, v
vocabulary, tp tensor parallel ranks.
"""

from dataclasses import replace
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
from megatron.tasks.readers import HIDDEN, LENGTHS
from megatron.tasks.samples import ABOVE, BELOW, OF_SAMPLES, OPTIONS, SHARES
from megatron.tasks.spans import ENDS

LOSS, TOKENS = "loss", "tokens"  # names of the last stage's sums
NEVER = -1e9  # the score of a missing option
MASKS = ("padding_mask", "enc_mask")  # masks of the tokens of a text; models without one have its length


class Head(nn.Module):
    """A linear head [..., h] -> [..., c] fp32 without bias, as in transformers for decoders; replicated on all ranks."""

    def __init__(self, weights, *, dtype, device):
        super().__init__()
        create_parameters(self, weights, None, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float())


def pooled(x: torch.Tensor, rows: torch.Tensor, tp: Axis, cut: bool) -> torch.Tensor:
    """Select rows of x [s, b, h]: one per sample, [b] -> [b, h], or several, [w, b] -> [w, b, h].

    The result and its gradient are the same on all ranks of tp. cut: x is a rank's [s/tp, b, h] (sequence parallelism); the
    rank with the row contributes it, the others add zero.
    """
    places = torch.arange(x.shape[1], device=x.device)
    if not cut:
        return x[rows, places]
    rows = rows - tp.rank * len(x)
    own = ((rows >= 0) & (rows < len(x))).unsqueeze(-1)
    picked = x[rows.clamp(0, len(x) - 1), places]
    return mappings.reduce_from_tensor_model_parallel_region(torch.where(own, picked, 0.0), tp)


def averaged(x: torch.Tensor, mask: torch.Tensor, tp: Axis, cut: bool) -> torch.Tensor:
    """The mean of the states x [s, b, h] over the tokens in `mask` [s, b]: [b, h]. Otherwise as `pooled`."""
    counts = mask.sum(0).unsqueeze(-1)  # [b, 1]; a sample has at least one token
    own = mask.chunk(tp.size)[tp.rank] if cut else mask
    total = (x.float() * own.unsqueeze(-1)).sum(0)
    if cut:
        total = mappings.reduce_from_tensor_model_parallel_region(total, tp)
    return total / counts


def text_mask(batch) -> torch.Tensor:
    """[s, b] fp32: 1 at the tokens of each text, special ones included, and 0 at padding. Of a pattern whose label comes
    after all texts, up to the token that predicts it.
    """
    for name in MASKS:
        if name in batch.arrays:
            return batch.arrays[name].float()
    places = torch.arange(len(batch.tokens), device=batch.tokens.device).unsqueeze(1)
    return (places < batch.arrays[LENGTHS] if LENGTHS in batch.arrays else places <= batch.arrays[GAP]).float()


def token_weights(batch) -> torch.Tensor:
    """What each token counts in the sums of layers, [s, b]: with the tokens of a sample together as much as its label.

    So a loss that balances experts is a mean over samples of means over their tokens. Padding and missing options count 0.
    """
    mask = text_mask(batch)
    options = mask.shape[1] // len(batch.loss_mask)
    present = batch.loss_mask.unsqueeze(-1).expand(-1, options)  # [b, o]
    if options > 1:
        present = present * (torch.arange(options, device=mask.device) < batch.arrays[OPTIONS].unsqueeze(-1))
        present = present / batch.arrays[OPTIONS].unsqueeze(-1)
    return mask / mask.sum(0) * present.flatten()


def _last_rows(batch) -> torch.Tensor:
    """The row of each text's last token [b]."""
    return text_mask(batch).sum(0).long() - 1


def with_hidden_words(batch, dropout: Dropout):
    """The micro-batch with word dropout: ids of its first array are replaced by those of HIDDEN where `dropout` drops."""
    if dropout.idle:
        return batch
    (name, ids), *others = batch.arrays.items()
    seen = dropout.keep(ids.shape, batch.samples, ids.device).mask()
    arrays = {name: torch.where(seen, ids, batch.arrays[HIDDEN]), **dict(others)}
    return named_batch(arrays, batch.samples, batch.hash)


def with_options_apart(batch, options: int):
    """Make each option of a sample a sample of its own: [o s, b] -> [s, b o] for texts, [o, b] -> [b o] for numbers."""
    if options == 1:
        return batch
    arrays = {
        name: array if name in OF_SAMPLES else _apart(array, options, number=name == LENGTHS)
        for name, array in batch.arrays.items()
    }
    samples = (batch.samples.unsqueeze(-1) * options + torch.arange(options)).flatten()
    return named_batch(arrays, samples, batch.hash)


def _apart(array: torch.Tensor, options: int, number: bool) -> torch.Tensor:
    """[o s, b] -> [s, b o]; or for one number per option, [o, b] -> [b o]."""
    apart = array.view(options, -1, array.shape[-1]).permute(1, 2, 0).flatten(1)
    return apart[0] if number else apart.contiguous()


@cache
def scoring(trunk: type) -> type:
    """Derive the class of models with this trunk that score samples. A subclass implements `scores`."""

    class Scoring(trunk):
        """A trunk that scores samples. See `scoring`."""

        def forward(self, x, batch):
            """As `LanguageModel.forward`; the last stage returns (None, {"loss": sum over samples, "tokens": number of
            samples with a label}).
            """
            read = self.read(batch)
            with self.region():
                x, sums = self.trunk(x, read)
                if not self.last:
                    return (x, sums) if sums else x
                scores = self.scores(x, read)
            if self.collect is not None and not self.training:
                self.collect(batch, scores)
            losses = self.losses(scores, batch)
            return None, {LOSS: (losses * batch.loss_mask).sum(), TOKENS: batch.num_tokens, **sums}

        def read(self, batch):
            """The input of the trunk for a micro-batch."""
            return batch

        def context(self, batch):
            context = super().context(batch)
            return replace(context, weights=token_weights(batch)) if self.facts.settings.mixture else context

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            """Scores [b, c] fp32 from the last stage's states [s, b, h] or [s/tp, b, h]. batch: the trunk's input."""
            raise NotImplementedError

        def losses(self, scores: torch.Tensor, batch) -> torch.Tensor:
            """The loss of each sample [b], from `scores`. batch: as `forward` received it."""
            return losses_of(scores, batch)

        @property
        def cut(self) -> bool:
            """Whether each rank has a part of the sequence (`pooled`)."""
            return self.sequence_parallel and self.tp.size > 1

    return Scoring


@cache
def classifier_of(trunk: type, pooling: str, word_dropout: float = 0.0) -> type:
    """Derive the class of models with this trunk and a head in place of the output layer.

    pooling: the head's input: state of the "first" token, of the "last" token of the text, or the "mean" over its tokens
    word_dropout: share of the tokens of a text that are hidden in training
    """

    class Classifier(scoring(trunk)):
        """A trunk with a head. See `classifier_of`. facts: `backbones.classifier_facts`."""

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
            """The head's input for each sequence [b, h]."""
            if pooling == "mean":
                return averaged(x, text_mask(batch), self.tp, self.cut)
            first = pooling == "first"
            rows = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device) if first else _last_rows(batch)
            return pooled(x, rows, self.tp, self.cut)

    return Classifier


@cache
def span_finder_of(trunk: type) -> type:
    """Derive the class of models with this trunk that find the first and the last token of an answer in a text."""

    class SpanFinder(scoring(trunk)):
        """A trunk with a head of two outputs at each token. See `span_finder_of`. facts: `backbones.classifier_facts`."""

        def __init__(self, *model, **keywords):
            super().__init__(*model, **keywords)
            if self.last:
                [weights] = [unit.weights for unit in self.units if unit.name == HEAD]
                self.head = Head(weights, **self.factory_kwargs)

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            """[b, 2 s]: of the first token of an answer, then of the last one; NEVER for padding."""
            found = self.head(mappings.join_rows(x, self.tp) if self.cut else x)  # [s, b, 2]
            padding = text_mask(batch).unsqueeze(-1) == 0
            return found.masked_fill(padding, NEVER).permute(1, 2, 0).flatten(1)

        def losses(self, scores: torch.Tensor, batch) -> torch.Tensor:
            first, last = scores.view(len(scores), 2, -1).unbind(1)
            wanted = zip((first, last), (batch.labels, batch.arrays[ENDS]))
            return sum(F.cross_entropy(one, rows, reduction="none") for one, rows in wanted) / 2

    return SpanFinder


@cache
def label_chooser_of(trunk: type, tokens: int) -> type:
    """Derive the class of models with this trunk that score a label by the sum of its tokens' logits, each at its position.

    All labels have the same number of tokens, so softmax over the scores equals softmax over log-probabilities.
    tokens: most tokens of a label
    """

    class LabelChooser(scoring(trunk)):
        """A trunk that chooses a label. See `label_chooser_of`. facts: `backbones.chooser_facts`."""

        def scores(self, x: torch.Tensor, batch) -> torch.Tensor:
            chosen = batch.arrays[CHOICES][:, 0].view(-1, tokens) - 1  # [c, w], the same for all samples; -1: no token
            last = len(x) * (self.tp.size if self.cut else 1) - 1
            places = torch.arange(tokens, device=x.device).unsqueeze(1) + batch.arrays[GAP]  # [w, b]
            states = pooled(self.word_states(x), places.clamp(max=last), self.tp, self.cut)  # [w, b, h]
            logits = self._logits(states, chosen)  # [b, c, w]
            if self.softcap is not None:
                logits = (logits / self.softcap).tanh() * self.softcap
            return logits.sum(-1)

        def _logits(self, states: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
            """Logits of tokens [c, w] from states [w, b, h]: [b, c, w], 0 for -1. Ranks sum over their vocabulary parts."""
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
    """Loss of each sample, [b, c] -> [b]: cross-entropy with classes or probabilities; squared error for one number."""
    if scores.shape[1] == 1:
        return (scores.squeeze(-1) - (batch.arrays[ABOVE] - batch.arrays[BELOW])).square()
    wanted = batch.arrays[SHARES].T if SHARES in batch.arrays else batch.labels
    return F.cross_entropy(scores, wanted, reduction="none")
