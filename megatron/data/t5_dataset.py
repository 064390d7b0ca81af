# SPDX-License-Identifier: Apache-2.0
"""Samples for T5: the encoder reads a text with masked spans, the decoder writes the spans.

    text            a b c d e f g h
    masked          c d, f
    encoder reads   a b <0> e <1> g h
    decoder reads   [BOS] <0> c d <1> f
    decoder writes  <0> c d <1> f [EOS]

    train, valid, test = build_datasets(config, tokenizer, vocab_size, sizes, log)

Samples equal Megatron-LM's, element for element, except that `labels` of padding are 0, not -1. If a sample has more spans
than there are sentinels, or than fit into the decoder, its last spans stay unmasked (Megatron-LM ends with an error).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from megatron.data.bert_dataset import fitted, padded
from megatron.data.masked_dataset import (
    MaskedSamples,
    build_masked_datasets,
    masked_settings,
    model_setting,
    special_tokens,
)
from megatron.data.masking import Masking, Span
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Config

MAX_NGRAM = 10
DECODER = 128  # default length of the decoder's sequence
SPECIAL_POSITIONS = 2  # Megatron-LM leaves room for [BOS] and [EOS]


def build_datasets(
    config: Config,
    tokenizer: Any,
    vocab_size: int,
    sizes: Sequence[int],
    log: Callable[[str], None] = lambda text: None,
    *,
    decoder_seq_length: Optional[int] = None,
) -> tuple:
    """(train, valid, test), each None or with at least `sizes` samples. The encoder's length is --seq-length.

    decoder_seq_length: default: the recipe's setting of that name, else 128 or --seq-length if that is less
    Raises SettingsError for a vocabulary without [BOS], [EOS] or sentinels, or a decoder that is too short, DataError for
    missing or insufficient data.
    """
    if decoder_seq_length is None:
        decoder_seq_length = model_setting(config, "decoder_seq_length", min(DECODER, config.model.seq_length))
    samples, text = t5_samples(config, tokenizer, vocab_size, decoder_seq_length, log)
    if masked_settings(config).task_mixture:
        from megatron.data.mixture import build_mixture

        return build_mixture(config, tokenizer, vocab_size, sizes, log, samples, text, True)
    return build_masked_datasets(config, vocab_size, sizes, log, samples, text)


def t5_samples(config: Config, tokenizer, vocab_size: int, decoder_seq_length: int, log) -> tuple["T5Samples", int]:
    """(factory of the samples, number of ids that text uses)."""
    settings, mock, length = masked_settings(config), config.data.mock_data, config.model.seq_length
    special = special_tokens(tokenizer, vocab_size, ("bos", "eos"), True, mock)
    spans = settings.mask_spans or "geometric"
    names = ("cls", "sep") if tokenizer is not None else ()
    apart = tuple(id for name in names if (id := tokenizer.special(name)) is not None)
    masking = Masking(settings.mask_prob, spans, settings.mask_max_ngram or MAX_NGRAM, special.inner, apart)
    longest = length - SPECIAL_POSITIONS
    most, sentinels = masking.most(longest), special.sentinels
    _check_room(spans, most, len(sentinels), decoder_seq_length, longest, log)
    bos, eos = special.ids["bos"], special.ids["eos"]
    samples = T5Samples(settings, masking, longest, 1, length, decoder_seq_length, bos, eos, tuple(sentinels))
    return samples, min(*special.ids.values(), *sentinels)


def _check_room(spans: str, most: int, sentinels: int, decoder: int, longest: int, log) -> None:
    """Raise SettingsError if single words cannot all be masked; log a note if other spans might not fit."""
    single = 2 * most + 1  # [BOS], and a sentinel and a token for each span
    if decoder < 3:
        raise SettingsError(f"--decoder-seq-length {decoder} has no room for a masked token", do="give 128")
    if spans == "words" and (sentinels < most or decoder < single):
        raise SettingsError(
            f"--mask-spans words masks up to {most} words of a sample of {longest} tokens: that takes {most} sentinels and "
            f"a decoder of {single} tokens",
            f"there are {sentinels}, and --decoder-seq-length {decoder}",
            f"--vocab-extra-ids {most} --decoder-seq-length {single}, or a shorter --seq-length",
        )
    if sentinels < most or decoder < most + 1 + most // 3:
        log(
            f"note: up to {most} tokens of a sample are masked; spans that find none of the {sentinels} sentinels left, or "
            f"no room in a decoder of {decoder} tokens, stay unmasked"
        )


@dataclass(frozen=True)
class T5Samples(MaskedSamples):
    """Makes the samples of T5, as `MaskedSamples` defines. encoder, decoder: lengths with special tokens and padding."""

    encoder: int
    decoder: int
    bos: int
    eos: int
    sentinels: tuple[int, ...]

    def make(self, sentences: list[np.ndarray], target: int, state: np.random.RandomState) -> dict[str, np.ndarray]:
        """Arrays of one sample, padded at the end; s: length of the encoder's input, t: of the decoder's.

        text_enc   int64 [s]: the text, with a sentinel for each masked span
        text_dec   int64 [t]: [BOS], then each sentinel and its span
        labels     int64 [t]: the same without [BOS], then [EOS]
        loss_mask  float32 [t]: 0 for padding, else 1
        enc_mask   int64 [s], dec_mask int64 [t]: 0 for padding, else 1
        truncated  int64: 1 if tokens were cut off at the end
        """
        tokens = np.concatenate(sentences).astype(np.int64)
        truncated = len(tokens) > target
        tokens = tokens[:target]
        spans = self.fitting(self.masking.choose(tokens, target, state)[0])
        return self._arrays(*self.with_sentinels(tokens.tolist(), spans), truncated)

    def labelled(self, first: np.ndarray, second: Optional[np.ndarray], label: np.ndarray) -> dict[str, np.ndarray]:
        """The sample of a labelled text: the encoder reads the text or pair, the decoder writes the label as text."""
        pair = second is not None
        of_first, of_second = fitted(first, second, self.encoder - 1 - pair)
        cut = len(of_first) + len(of_second) < len(first) + (len(second) if pair else 0)
        read = with_ends(of_first.tolist(), of_second.tolist() if pair else None, self.eos)
        return self._arrays(read, label[: self.decoder - 1].tolist(), cut)

    def check_labels(self, path: str, labels: Mapping[str, np.ndarray]) -> None:
        room, seen = self.decoder - 1, {}
        for label, ids in labels.items():
            if len(ids) > room:
                raise DataError(
                    f"{path}: the label {label[:60]!r} has {len(ids)} tokens",
                    f"the decoder has room for {room} and [EOS]",
                    f"--decoder-seq-length {max(map(len, labels.values())) + 1}, or shorter labels",
                )
            if (other := seen.setdefault(tuple(ids.tolist()), label)) != label:
                raise DataError(
                    f"{path}: the labels {other[:60]!r} and {label[:60]!r} are the same tokens {ids[:20].tolist()}",
                    do="take words for labels that the vocabulary has",
                )

    def _arrays(self, read: list[int], written: list[int], truncated: bool) -> dict[str, np.ndarray]:
        """The arrays of a sample from the tokens that the encoder reads and the decoder writes."""
        text_enc = np.array(read, np.int64)
        text_dec, labels = np.array([self.bos, *written], np.int64), np.array([*written, self.eos], np.int64)
        return dict(
            text_enc=padded(text_enc, self.encoder),
            text_dec=padded(text_dec, self.decoder),
            labels=padded(labels, self.decoder),
            loss_mask=padded(np.ones(len(labels), np.float32), self.decoder),
            enc_mask=padded(np.ones_like(text_enc), self.encoder),
            dec_mask=padded(np.ones_like(text_dec), self.decoder),
            truncated=np.array(int(truncated)),
        )

    def fitting(self, spans: list[Span]) -> list[Span]:
        """The first spans, as many as there are sentinels and room in the decoder after [BOS]."""
        sizes = np.cumsum([1 + len(span.tokens) for span in spans])
        room = int(np.searchsorted(sizes, self.decoder - 1, side="right"))
        return spans[: min(room, len(self.sentinels))]

    def with_sentinels(self, tokens: list[int], spans: list[Span]) -> tuple[list[int], list[int]]:
        """(the text with a sentinel for each span, each sentinel followed by its span)."""
        read, written, start = [], [], 0
        for sentinel, span in zip(self.sentinels, spans):
            read += [*tokens[start : span.positions[0]], sentinel]
            written += [sentinel, *span.tokens]
            start = span.positions[-1] + 1
        return read + tokens[start:], written


def with_ends(text: Sequence[int], pair: Optional[Sequence[int]], eos: int) -> list[int]:
    """The encoder's input for a text or a pair: each followed by `eos`.

    >>> with_ends([7, 8], None, 1), with_ends([7, 8], [9], 1)
    ([7, 8, 1], [7, 8, 1, 9, 1])
    """
    return [*text, eos] if pair is None else [*text, eos, *pair, eos]
