# SPDX-License-Identifier: Apache-2.0
"""GPT datasets: training, validation and test samples of seq_length + 1 tokens from token files.

    train, valid, test = build_datasets(config.data, seq_length=1024, sizes=(16000, 800, 80), seed=1234)
    train[0]  # int64 [1025]: [:-1] is the input, [1:] the labels

Samples equal Megatron-LM's, element for element (see index_maps.py). Where Megatron-LM hangs or fails later (an empty
split, too little data), an error says what would work.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Optional

import numpy as np

from megatron.data.blend import Blend, BlendedDataset, Repeated, interleave, normalized, parse_blend, share_sizes
from megatron.data.document_dataset import DocumentDataset, describe_documents, document_lengths
from megatron.data.file_formats import CACHE
from megatron.data.formats import open_tokens
from megatron.data.index_cache import cached_arrays
from megatron.data.index_maps import (
    EpochPlan,
    IndexMaps,
    SplitRange,
    build_index_maps,
    make_epoch_plan,
    parse_split,
    sequences_of,
    suggest_split,
)
from megatron.data.indexed import Origin, SamplePart, TokenFiles, refuse_unknown_tokens
from megatron.data.mock import MockDataset
from megatron.data.remote import open_files
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Data
from megatron.storage.durable import checksum

SPLITS = ("train", "valid", "test")
TRAIN, VALID, TEST = range(3)
# Passes up to which repeated text teaches nearly as much as new one (Muennighoff et al. 2023, figure 5)
MANY_EPOCHS = 4
VERSION = 2  # of the index maps; caches of other versions are ignored
MORE = "take more documents (a .txt is one; preprocess_data.py --document-separator parts it into several)"


class SampleCounts(tuple):
    """(train, valid, test): the numbers of samples that a run needs.

    valid_order: number of validation samples that defines their order; None: the number that is needed. A resumed run
                 keeps that of its first launch. If it needs more samples than this order has, they repeat.
    """

    def __new__(cls, counts: Sequence[int], valid_order: Optional[int] = None):
        self = super().__new__(cls, counts)
        self.valid_order = valid_order
        return self


def build_datasets(
    data: Data,
    seq_length: int,
    sizes: Sequence[int],
    seed: int,
    *,
    eod: Optional[int] = None,
    vocab_size: Optional[int] = None,
    log: Callable[[str], None] = lambda text: None,
) -> tuple:
    """(train, valid, test) with at least `sizes` samples each; None for a split of weight or size 0, or without a path.

    Every dataset has `len(d)`, `d[i]` -> int64 [seq_length + 1] and, except mock data, `d.origin(i)`. Every rank calls
    this; the first one builds the index maps. `log` receives a line before a build or a wait.
    Each split uses as many epochs as it needs, shuffled together, as in Megatron-LM. So the order depends on the number of
    samples; for validation see `SampleCounts`. With --full-validation, validation is one epoch of all its files, whatever
    its size.

    Raises DataError for missing, damaged or insufficient data, and, when a sample is read, for unknown tokens.
    """
    if data.mock_data:
        if vocab_size is None:
            raise SettingsError("--mock-data needs the size of a vocabulary", do="--vocab-size N")
        mocks = [MockDataset(size, seq_length, vocab_size, eod, seed, split) for split, size in enumerate(sizes)]
        return tuple(mock if len(mock) else None for mock in mocks)
    kind = dict(documents=data.dataset_type == "webtext", pad=eod)
    return build_splits(data, seq_length, sizes, seed, vocab_size, log, **kind)


def build_splits(data: Data, seq_length: int, sizes: Sequence[int], seed: int, vocab_size: Optional[int], log, **kind):
    """(train, valid, test) from the files of `data`; kind: fields of `GPTDatasetConfig` that define a sample."""
    blends, shares = sources_of(data)
    wanted = [size if blend and share else 0 for size, blend, share in zip(sizes, blends, shares)]
    whole, needed = data.full_validation, wanted[VALID]
    if needed:
        wanted[VALID] = getattr(sizes, "valid_order", None) or needed
    config = GPTDatasetConfig(
        seq_length,
        seed,
        vocab_size,
        data.data_cache_path or (data.object_storage_cache_path if data.in_a_store else None),
        shares,
        wanted,
        log,
        whole,
        open_files=partial(open_files, data=data, log=log),
        **kind,
    )
    built = [_build_split(blends[split], split, config) if wanted[split] else None for split in (TRAIN, VALID, TEST)]
    if built[VALID] is not None and not whole and len(built[VALID]) < needed:
        built[VALID] = Repeated(built[VALID], needed)
    return tuple(built)


@dataclass(frozen=True)
class GPTDatasetConfig:
    """The settings that the datasets of a run share. Lists are over train, valid, test."""

    seq_length: int
    seed: int
    vocab_size: Optional[int]
    cache: Optional[str]
    shares: list[Optional[SplitRange]]
    sizes: list[int]
    log: Callable[[str], None]
    full_validation: bool = False
    documents: bool = False  # each document is a sample (document_dataset.py)
    pad: Optional[int] = None  # the token that pads such samples
    # Samples of another kind (masked_dataset.py): `samples(token file, range of documents, number or None for one epoch,
    # name of the split, this)` -> dataset, and `samples.lengths(token file)`, 0 for documents without samples.
    samples: Optional[Callable] = None
    open_files: Callable[[str], TokenFiles] = open_tokens
    files: dict[str, TokenFiles] = field(default_factory=dict)  # opened so far

    def open(self, prefix: str) -> TokenFiles:
        if prefix not in self.files:
            self.files[prefix] = self.open_files(prefix)
        return self.files[prefix]

    def lengths(self, tokens: TokenFiles) -> np.ndarray:
        """Tokens of each unit that --split divides: sequences, or documents if each is a sample."""
        if self.samples is not None:
            return self.samples.lengths(tokens)
        return document_lengths(tokens) if self.documents else tokens.sequence_lengths

    @property
    def of_documents(self) -> bool:
        """Whether --split divides documents, not sequences."""
        return self.documents or self.samples is not None

    def cached(
        self,
        prefix: str,
        name: str,
        key: dict,
        build,
        names: tuple[str, ...],
        hashed: Optional[dict[str, Sequence[np.ndarray]]] = None,
    ) -> dict[str, np.ndarray]:
        """Index maps of these names from the cache: `--data-cache-path`, or a folder next to the data.

        hashed: entries of the key that are the hashes of these arrays, which the first rank of a job takes for all
        """
        folder, hashed = Path(self.cache) if self.cache else Path(prefix).parent / CACHE, hashed or {}
        key = dict(key, version=VERSION)
        digest = lambda array: hashlib.sha256(np.ascontiguousarray(array)).hexdigest()
        return cached_arrays(
            folder,
            name,
            key,
            build,
            log=self.log,
            required=bool(self.cache),
            names=names,
            hashed=lambda: {entry: "".join(map(digest, arrays)) for entry, arrays in hashed.items()},
            sample=[prefix, *(_sampled(array) for arrays in hashed.values() for array in arrays)],
        )


def _sampled(array: np.ndarray, count: int = 4096) -> list:
    """The size of an array, and the checksum of a few thousand of its values."""
    return [len(array), checksum(np.ascontiguousarray(array[:: max(1, len(array) // count)]).view(np.uint8))]


class GPTDataset:
    """Samples of one split of one token file, in the order of `plan`."""

    def __init__(self, tokens: TokenFiles, plan: EpochPlan, split: str, config: GPTDatasetConfig):
        self.tokens, self.plan, self.vocab_size = tokens, plan, config.vocab_size
        lengths = tokens.sequence_lengths
        own = lengths[plan.first : plan.last]
        name = f"{Path(tokens.prefix).name}-{split}"

        if plan.tokens < plan.seq_length:
            config.log(
                f"note: a sample of {plan.seq_length:,} tokens is longer than all of {name}, {plan.tokens:,} tokens"
            )

        note_repeats(name, split, plan.epochs, config.log)

        def build():
            config.log(f"building index maps of {name}: {len(own):,} sequences x {plan.epochs:,} epochs")
            return build_index_maps(plan, lengths)._asdict()

        key = dict(kind="gpt", **asdict(plan))
        maps = config.cached(tokens.prefix, name, key, build, IndexMaps._fields, dict(lengths=[own]))
        self.document_index, self.sample_index, self.shuffle_index = maps["document"], maps["sample"], maps["shuffle"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> np.ndarray:
        """Token ids [seq_length + 1], int64. Raises DataError for a token outside of the vocabulary."""
        sample = np.empty(self.plan.seq_length + 1, np.int64)
        at = 0
        for part in self.tokens.get_parts(self._parts(int(self.shuffle_index[index]))):
            sample[at : at + len(part)] = part
            at += len(part)
        refuse_unknown_tokens(sample, index, self)
        return sample

    def origin(self, index: int) -> Origin:
        """Token file and documents of a sample, without reading its tokens."""
        number = int(self.shuffle_index[index])
        return Origin(self.tokens.prefix, number, [SamplePart(*part) for part in self._parts(number) if part[2]])

    def _parts(self, number: int) -> list[tuple[int, int, int]]:
        """(document, offset, length) of each piece of sample `number` of the unshuffled order."""
        (first, offset), (last, end) = self.sample_index[number : number + 2].tolist()
        if first == last:
            return [(int(self.document_index[first]), offset, end + 1 - offset)]
        documents = self.document_index[first : last + 1]
        lengths = self.tokens.sequence_lengths[documents].tolist()
        lengths[-1] = end + 1  # the label of the last position is the next sample's first token
        lengths[0] -= offset
        return list(zip(documents.tolist(), [offset] + [0] * (last - first), lengths))


def sources_of(data: Data) -> tuple[list[Optional[Blend]], list[Optional[SplitRange]]]:
    """([blend of each split], [its share of the sequences])."""
    per_split = [data.train_data_path, data.valid_data_path, data.test_data_path]
    if data.data_path and any(per_split):
        raise SettingsError(
            "--data-path and --train-data-path, --valid-data-path, --test-data-path exclude each other",
            do="give either one blend that --split divides, or one blend for each split",
        )
    if data.data_path:
        return [parse_blend(data.data_path, "--data-path")] * 3, parse_split(data.split)
    if not any(per_split):
        raise SettingsError("no data is given", do="--data-path PREFIX, or --mock-data for synthetic samples")
    blends = []
    for split, words in zip(SPLITS, per_split):
        blend = parse_blend(words, f"--{split}-data-path") if words else None
        # Here a single weighted prefix is just the prefix; under --data-path it is a blend of one (Megatron-LM).
        blends.append(blend._replace(weights=None) if blend and len(blend.prefixes) == 1 else blend)
    return blends, [(0.0, 1.0) if blend else None for blend in blends]


def _build_split(blend: Blend, split: int, config: GPTDatasetConfig):
    """The dataset of one split, with at least `config.sizes[split]` samples."""
    size = config.sizes[split]
    if split == VALID and config.full_validation:
        return _build_whole(list(dict.fromkeys(blend.prefixes)), split, config)
    if blend.weights is not None:
        planned, built = share_sizes(blend.weights, size)
        datasets = [_build_file(prefix, count, split, config) for prefix, count in zip(blend.prefixes, built)]
        return _build_blend(datasets, blend.prefixes, blend.weights, sum(planned), split, config)
    if split == TEST:
        notes = {prefix: _no_test(config.open(prefix), config) for prefix in blend.prefixes}
        for note in filter(None, notes.values()):
            config.log(note)
        blend = blend._replace(prefixes=[prefix for prefix in blend.prefixes if not notes[prefix]])
        if not blend.prefixes:
            return None
    if len(blend.prefixes) == 1:
        return _build_file(blend.prefixes[0], size, split, config)
    datasets = [_build_file(prefix, None, split, config) for prefix in blend.prefixes]
    lengths = [len(dataset) for dataset in datasets]
    total = sum(lengths)
    if size > total and split != VALID:
        weighted = " ".join(f"{count} {prefix}" for count, prefix in zip(lengths, blend.prefixes))
        raise DataError(
            f"{SPLITS[split]} needs {size:,} samples, one epoch of all prefixes has {total:,}",
            "prefixes without weights are gone through once, each in proportion to its size",
            f"for several epochs give weights, here: {weighted}",
        )
    blended = _build_blend(datasets, blend.prefixes, lengths, min(size, total), split, config)
    return blended if size <= total else Repeated(blended, size)


def _build_whole(prefixes: list[str], split: int, config: GPTDatasetConfig):
    """One epoch of each file, without regard to weights."""
    datasets = [_build_file(prefix, None, split, config) for prefix in prefixes]
    lengths = [len(dataset) for dataset in datasets]
    return datasets[0] if len(datasets) == 1 else _build_blend(datasets, prefixes, lengths, sum(lengths), split, config)


def _build_file(prefix: str, num_samples: Optional[int], split: int, config: GPTDatasetConfig):
    """Samples of one token file: at least `num_samples`, or one epoch of them (None)."""
    tokens = config.open(prefix)
    lengths = config.lengths(tokens)
    sequences = sequences_of(config.shares[split], len(lengths))
    if not lengths[sequences.start : sequences.stop].any():
        raise _empty_split(tokens, split, config)
    if config.documents:
        return _build_documents(tokens, sequences, lengths, num_samples, split, config)
    if config.samples:
        dataset = config.samples(tokens, sequences, num_samples, SPLITS[split], config)
        return Repeated(dataset, num_samples) if num_samples and len(dataset) < num_samples else dataset

    plan = make_epoch_plan(sequences, lengths, config.seq_length, config.seed, num_samples)
    if plan.num_samples == 0:
        raise DataError(
            f"{prefix}: {SPLITS[split]} has {plan.tokens} tokens, less than one sample",
            f"--seq-length {plan.seq_length} needs {plan.seq_length + 1}",
            "leave this dataset out, give weights (--data-path WEIGHT PREFIX ...), or shorten --seq-length",
        )
    return GPTDataset(tokens, plan, SPLITS[split], config)


def note_repeats(name: str, split: str, epochs: int, log: Callable[[str], None]) -> None:
    """Log that training reads a dataset many times. epochs: the passes that it begins"""
    if split == SPLITS[TRAIN] and epochs > MANY_EPOCHS:
        log(
            f"note: training reads {name} more than {epochs - 1} times: beyond {MANY_EPOCHS} passes repeated text teaches "
            "less and less (arXiv:2305.16264); use more text, or fewer steps"
        )


def _build_documents(
    tokens: TokenFiles, documents: range, lengths: np.ndarray, num_samples: Optional[int], split: int, config
):
    """`_build_file` with one document per sample. lengths: of all documents."""
    name, own = f"{Path(tokens.prefix).name}-{SPLITS[split]}", lengths[documents.start : documents.stop]
    note_repeats(name, SPLITS[split], -(-(num_samples or 1) // np.count_nonzero(own)), config.log)
    config.log(f" > {describe_documents(tokens.prefix, SPLITS[split], own, config.seq_length)}")
    dataset = DocumentDataset(
        tokens,
        documents.start + np.flatnonzero(own),
        None if split == VALID else num_samples,
        seq_length=config.seq_length,
        seed=config.seed,
        pad=config.pad,
        vocab_size=config.vocab_size,
        cached=lambda key, build, names: config.cached(tokens.prefix, name, key, build, names),
    )
    return Repeated(dataset, num_samples) if num_samples and len(dataset) < num_samples else dataset


def _build_blend(
    datasets: list, prefixes: list[str], weights: Sequence[float], size: int, split: int, config: GPTDatasetConfig
):
    """A blend of `size` samples from several datasets."""
    weights, limits, names = normalized(weights), [len(dataset) for dataset in datasets], ("dataset", "sample")

    def build():
        config.log(f"mixing {size:,} {SPLITS[split]} samples from {len(datasets)} dataset{'s' * (len(datasets) > 1)}")
        return dict(zip(names, interleave(weights, size, limits)))

    key = dict(kind="blend", weights=[weight.hex() for weight in weights], size=size, limits=limits)
    maps = config.cached(prefixes[0], f"blend-{SPLITS[split]}", key, build, names)
    return BlendedDataset(datasets, maps["dataset"], maps["sample"])


def _no_test(tokens: TokenFiles, config: GPTDatasetConfig) -> str:
    """A note if --split leaves nothing for the test split, else "". Megatron-LM continues without test data, too."""
    lengths = config.lengths(tokens)
    mine = sequences_of(config.shares[TEST], len(lengths))
    if not lengths.any() or lengths[mine.start : mine.stop].any():
        return ""
    refusal = _empty_split(tokens, TEST, config)
    return f"note: {refusal.what} ({refusal.do}): there is no evaluation on test data"


def _empty_split(tokens: TokenFiles, split: int, config: GPTDatasetConfig) -> DataError:
    """The error for a split without tokens; it suggests the nearest --split that works."""
    lengths = config.lengths(tokens)
    if not lengths.any():
        return DataError(f"{tokens.prefix}: has no tokens", do="preprocess text that is not empty")
    total, unit = len(lengths), "documents" if config.of_documents else "sequences"
    what = "sample" if config.samples else "token"
    mine = sequences_of(config.shares[split], total)
    ends = [sequences_of(share, total).stop if share else None for share in config.shares[:2]]
    ends = (ends[0] or 0, ends[0] or 0 if ends[1] is None else ends[1])
    counts = suggest_split(lengths, ends, [size > 0 for size in config.sizes])
    do = f"--split {','.join(map(str, counts))} gives each its part" if counts else MORE
    return DataError(
        f"{tokens.prefix}: --split leaves nothing for {SPLITS[split]}",
        f"it has {total:,} {unit}; {SPLITS[split]} gets {len(mine)} of them, without a {what}",
        do if split == TRAIN else f"{do}; or --eval-iters 0 for no evaluation",
    )
