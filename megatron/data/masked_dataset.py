# SPDX-License-Identifier: Apache-2.0
"""Datasets that BERT and T5 share: samples of sentences in Megatron-LM's order, special tokens, splits.

The files have a sequence for each sentence (`preprocess_data.py --split-sentences`). sentence_samples.py selects the
sentences of a sample, masking.py masks tokens, bert_dataset.py and t5_dataset.py build the arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import numpy as np

from megatron.data.document_dataset import document_lengths
from megatron.data.gpt_dataset import GPTDatasetConfig, build_splits, note_repeats
from megatron.data.indexed import Origin, SamplePart, TokenFiles, refuse_unknown_tokens
from megatron.data.masked_settings import GROUP, MaskedSettings
from megatron.data.masking import Masking
from megatron.data.sentence_samples import build_sentence_samples, kept_documents
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Config, Data

SENTINELS = 100  # in messages and in mock vocabularies: enough for samples of 512 tokens
SPLIT_FIRST = "preprocess the text with preprocess_data.py --split-sentences"


@dataclass(frozen=True)
class MaskedSamples:
    """Makes the samples of one kind of model; a subclass for each kind.

    longest: most tokens of a sample's sentences; least: fewest sentences of a sample
    """

    settings: MaskedSettings
    masking: Masking
    longest: int
    least: int

    def make(self, sentences: list[np.ndarray], target: int, state: np.random.RandomState) -> dict[str, np.ndarray]:
        """Make a sample from sentences, as arrays by name. state: generator of its random numbers."""
        raise NotImplementedError

    def labelled(self, first: np.ndarray, second: Optional[np.ndarray], label: np.ndarray) -> dict[str, np.ndarray]:
        """Make a sample from a labelled text or pair, with nothing masked (mixture.py). All arguments are int64 ids."""
        raise NotImplementedError

    def check_labels(self, path: str, labels: Mapping[str, np.ndarray]) -> None:
        """Raise DataError if samples could not distinguish the labels of a file, each given with its ids."""


class MaskedDataset:
    """Samples of one split of one token file, made by `samples`."""

    def __init__(
        self,
        tokens: TokenFiles,
        documents: range,
        num_samples: Optional[int],
        split: str,
        config: GPTDatasetConfig,
        samples: MaskedSamples,
    ):
        self.tokens, self.samples, self.seed, self.vocab_size = tokens, samples, config.seed, config.vocab_size
        name = f"{Path(tokens.prefix).name}-{split}"
        bounds = np.array(tokens.document_indices[documents.start : documents.stop + 1])
        kept = self._check(bounds, name, config.log)
        plan = dict(
            longest=samples.longest,
            least=samples.least,
            short_seq_prob=samples.settings.short_seq_prob,
            seed=config.seed,
        )

        def build():
            config.log(f"building the sample index of {name}: {kept:,} documents")
            return dict(samples=build_sentence_samples(bounds, tokens.sequence_lengths, num_samples, **plan))

        hashed = dict(sentences=[bounds, tokens.sequence_lengths[bounds[0] : bounds[-1]]])
        key = dict(kind="sentences", num_samples=num_samples, **plan)
        self.sample_index = config.cached(tokens.prefix, name, key, build, ("samples",), hashed)["samples"]
        first = self.sample_index[:, 0]
        note_repeats(name, split, int(np.count_nonzero(first == first.min())), config.log)  # once in each pass

    def __len__(self) -> int:
        return len(self.sample_index)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """The sample as arrays by name. Raises DataError for a token outside of the vocabulary."""
        first, last, target = self.sample_index[index].tolist()
        sentences = self.tokens.get_parts((sentence, 0, None) for sentence in range(first, last))
        refuse_unknown_tokens(np.concatenate(sentences), index, self)
        return self.samples.make(sentences, target, np.random.RandomState((self.seed + index) % 2**32))

    def origin(self, index: int) -> Origin:
        """Token file and sentences of a sample, without reading its tokens."""
        first, last, _ = self.sample_index[index].tolist()
        lengths = self.tokens.sequence_lengths[first:last].tolist()
        return Origin(self.tokens.prefix, index, [SamplePart(first + i, 0, n) for i, n in enumerate(lengths)])

    def _check(self, bounds: np.ndarray, name: str, log: Callable[[str], None]) -> int:
        """Number of documents that give samples; logs the others. Raises DataError if there are none."""
        lengths, least = self.tokens.sequence_lengths, self.samples.least
        kept, dropped = kept_documents(bounds, lengths, least)
        total, losses = len(kept), dropped.describe(len(kept), least)
        counts = np.diff(bounds)
        if not kept.any():
            whole = counts.max() <= 1 and not dropped.long_sentence and dropped.few_sentences
            why = "each document is one sequence: the file was not split into sentences" if whole else losses
            raise DataError(
                f"{self.tokens.prefix}: none of the {total:,} documents of {name} gives a sample",
                why,
                f"{SPLIT_FIRST}; next-sentence prediction needs two sentences, --bert-no-binary-head does without"
                if dropped.few_sentences
                else SPLIT_FIRST,
            )
        if losses:
            log(f" > {name}: {losses}")
        single = bounds[:-1][kept & (counts == 1)]
        over = np.maximum(lengths[single].astype(np.int64) - self.samples.longest, 0).sum()
        if over:
            share = over / lengths[bounds[0] : bounds[-1]].sum(dtype=np.int64)
            split = f" ({SPLIT_FIRST})" if counts.max() <= 1 else ""
            log(
                f"note: {share:.1%} of the text of {name} is cut off: it is in documents of one sequence each, of more "
                f"than {self.samples.longest} tokens{split}"
            )
        return int(kept.sum())


@dataclass(frozen=True)
class FromFiles:
    """Makes datasets from token files (`GPTDatasetConfig.samples`)."""

    samples: MaskedSamples

    def __call__(self, tokens: TokenFiles, documents: range, num_samples: Optional[int], split: str, config):
        return MaskedDataset(tokens, documents, num_samples, split, config, self.samples)

    def lengths(self, tokens: TokenFiles) -> np.ndarray:
        """Tokens of each document, 0 for documents without samples. If none gives a sample, lengths stay as they are, and
        the dataset reports the reason.
        """
        lengths = document_lengths(tokens)
        kept, _ = kept_documents(tokens.document_indices, tokens.sequence_lengths, self.samples.least)
        return np.where(kept, lengths, 0) if kept.any() else lengths


class MockSentences:
    """Samples of random tokens, the same for the same seed, split and index."""

    def __init__(self, size: int, seed: int, split: int, ids: int, samples: MaskedSamples):
        """ids: tokens are drawn from 0 to ids - 1."""
        self.size, self.seed, self.split, self.ids, self.samples = size, seed, split, ids, samples

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        state = np.random.RandomState([self.seed % 2**32, self.split, index])
        length = self.samples.longest
        cuts = np.sort(state.choice(np.arange(1, length), min(3, length - 1), replace=False))
        # Half of all tokens come from a small set, so that there is something to learn.
        common = state.random_sample(length) < 0.5
        tokens = np.where(common, state.randint(0, min(16, self.ids), length), state.randint(0, self.ids, length))
        return self.samples.make(np.split(tokens, cuts), length, state)


def build_masked_datasets(
    config: Config,
    vocab_size: int,
    sizes: Sequence[int],
    log: Callable[[str], None],
    samples: MaskedSamples,
    text: int,
    data: Optional[Data] = None,
) -> tuple:
    """(train, valid, test) with at least `sizes` samples each, as `gpt_dataset.build_datasets`.

    text: --mock-data makes samples of ids below this one. data: replaces the run's files
    """
    seed, data = config.logging.seed, data or config.data
    if data.mock_data:
        mocks = [MockSentences(size, seed, split, text, samples) for split, size in enumerate(sizes)]
        return tuple(mock if len(mock) else None for mock in mocks)
    return build_splits(data, config.model.seq_length, sizes, seed, vocab_size, log, samples=FromFiles(samples))


def masked_settings(config: Config) -> MaskedSettings:
    """The masking settings of a run; the defaults if its recipe has none."""
    return config.extra.get(GROUP, MaskedSettings())


def model_setting(config: Config, name: str, default):
    """A setting from the groups of a recipe; the default if none has it, or if it is None."""
    values = (getattr(group, name) for group in config.extra.values() if hasattr(group, name))
    value = next(values, None)
    return default if value is None else value


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of special tokens by name, of sentinels, and a mask of tokens inside words (bool [vocab])."""

    ids: dict[str, int]
    sentinels: list[int]
    inner: np.ndarray


def special_tokens(tokenizer: Any, vocab_size: int, names: Sequence[str], sentinels: bool, mock: bool) -> SpecialTokens:
    """The special tokens of a kind of sample.

    names: keys of `tokenizer.base.SPECIAL`; sentinels: whether samples need them; mock: without a tokenizer, place special
    tokens at the end of the vocabulary
    Raises SettingsError if the vocabulary lacks any of them.
    """
    if tokenizer is None:
        if not mock:
            raise SettingsError(
                "masked samples need a tokenizer: it knows which tokens are special", do=_remedy(sentinels)
            )
        return _made_up(vocab_size, names, sentinels)
    ids = {name: tokenizer.special(name) for name in names}
    if ids.get("bos", 0) is None:  # T5's own vocabularies have none: its decoder begins with the padding
        ids["bos"] = tokenizer.special("pad")
    lacking = [f"[{name.upper()}]" for name, id in ids.items() if id is None]
    known = tokenizer.sentinels
    if sentinels and not known:
        lacking.append("sentinels <extra_id_0> ...")
    if lacking:
        raise SettingsError(f"the vocabulary of {tokenizer.name} has no {', no '.join(lacking)}", do=_remedy(sentinels))
    inner = np.zeros(max(vocab_size, tokenizer.vocab_size), bool)
    inner[: tokenizer.vocab_size] = tokenizer.inner()
    return SpecialTokens(ids, known, inner)


def _remedy(sentinels: bool) -> str:
    added = f"--vocab-extra-ids {SENTINELS}, which adds what is lacking"
    word_piece = "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
    return f"{added} to any tokenizer" if sentinels else f"{word_piece}; or {added}"


def _made_up(vocab_size: int, names: Sequence[str], sentinels: bool) -> SpecialTokens:
    """Special tokens at the end of a mock vocabulary: the last ids are sentinels."""
    count = min(SENTINELS, vocab_size // 4) if sentinels else 0
    first = vocab_size - count - len(names)
    if first < 2:
        raise SettingsError(
            f"--vocab-size {vocab_size} is too small for special tokens and text", do="--vocab-size 512"
        )
    ids = {name: first + i for i, name in enumerate(names)}
    return SpecialTokens(ids, list(range(vocab_size - count, vocab_size)), np.zeros(vocab_size, bool))
