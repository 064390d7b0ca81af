# SPDX-License-Identifier: Apache-2.0
"""Load micro-batches for the forward pass, prefetched by threads. s: sequence, b: micro-batch.

batches = MicroBatchLoader(train, config.data, micro_batch_size=4, eod=eod, dp_rank=dp.rank, dp_size=dp.size,
                  next_step=lambda consumed: batch_size(config.batch, dp.size, consumed))
for micro_batch in batches.step(consumed, num_microbatches=8): ...
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple, Optional

import numpy as np
import torch

from megatron.data import batch_arrays
from megatron.data.indexed import UnknownToken
from megatron.data.sampler import batch_hash, cyclic_position, micro_batch_samples, sample_hash
from megatron.errors import DataError, SettingsError
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.mpu.chunks import row_numbers
from megatron.settings.declare import dashed
from megatron.settings.schema import Data
from megatron.telemetry.own_code import import_callable


@dataclass(frozen=True)
class MicroBatch:
    """One rank's samples of one micro-step. With context parallelism it has s/cp rows of each sample, those of
    `mpu.chunks.row_numbers`.

    tokens, labels  [s, b] int64; labels are the tokens one position later
    samples         [b] int64: position in the order of training, for dropout and for the ledger; always on the CPU
    loss_mask       [s, b] float32, or None if every position counts
    position_ids    [s, b] int64, or None for 0, 1, ..., s - 1
    document_ids    [s, b] int32, or None; attention is allowed only between equal ids, which are contiguous. Always of
                    all rows, because keys come from other ranks
    document_starts [b, s] int32: position of the first token of each token's document, of all rows; always in host
                    memory, because kernel launches need it there. None: computed from `document_ids`
    whole_tokens    if the rank has some of the rows: number of tokens of all rows that count, fp32 scalar
    ahead           for multi-token prediction: tokens, labels and weights of their losses (`batch_arrays.ahead`), each
                    [depths, s, b]; or None
    hash            of samples and tokens, for the ledger (data/sampler.py)
    arrays          for recipes with named arrays (`Recipe.arrays`): name -> [length, b], or [b]. Tokens are the first of
                    them then; labels and loss mask have their names
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    samples: torch.Tensor
    loss_mask: Optional[torch.Tensor] = None
    position_ids: Optional[torch.Tensor] = None
    document_ids: Optional[torch.Tensor] = None
    document_starts: Optional[np.ndarray] = None
    whole_tokens: Optional[torch.Tensor] = None
    ahead: Optional[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = None
    hash: tuple[int, int] = (0, 0)
    arrays: Optional[Mapping[str, torch.Tensor]] = None

    @property
    def num_tokens(self) -> torch.Tensor:
        """Tokens that count, an fp32 scalar on the device."""
        if self.loss_mask is not None:
            return self.loss_mask.sum()
        return torch.full((), self.labels.numel(), dtype=torch.float32, device=self.labels.device)

    @property
    def num_sample_tokens(self) -> torch.Tensor:
        """Tokens of these samples that count, on all context-parallel ranks: an fp32 scalar on the device."""
        return self.num_tokens if self.whole_tokens is None else self.whole_tokens

    def to(self, device) -> "MicroBatch":
        """Copy to `device`; to CUDA from pinned memory, asynchronously."""
        device = torch.device(device)
        if device.type == "cuda":
            return self.pinned()._map(lambda tensor: tensor.to(device, non_blocking=True))
        return self._map(lambda tensor: tensor.to(device))

    def pinned(self) -> "MicroBatch":
        """Copy to page-locked memory, from which copies to CUDA overlap with computation."""
        return self._map(lambda tensor: tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory())

    def _map(self, function) -> "MicroBatch":
        """Apply `function` to all tensors except those read on the CPU, which would need a device synchronization."""
        if self.arrays is not None:
            arrays = {name: function(tensor) for name, tensor in self.arrays.items()}
            return named_batch(arrays, self.samples, self.hash)
        others = ("samples", "document_starts", "ahead", "hash", "arrays")
        names = [field.name for field in fields(self) if field.name not in others]
        tensors = {name: getattr(self, name) for name in names}
        mapped = {name: tensor if tensor is None else function(tensor) for name, tensor in tensors.items()}
        return replace(self, ahead=self.ahead and tuple(map(function, self.ahead)), **mapped)


def named_batch(
    arrays: Mapping[str, torch.Tensor], samples: torch.Tensor, hashes: tuple[int, int] = (0, 0)
) -> MicroBatch:
    """A micro-batch of named arrays, [length, b] or [b] each."""
    tokens = next(iter(arrays.values()))
    return MicroBatch(tokens, arrays[LABELS], samples, arrays[LOSS_MASK], hash=hashes, arrays=arrays)


class MicroBatchLoader:
    """Loads the micro-batches of one data-parallel rank, as a pure function of the samples consumed before a step.

    `next_step(consumed) -> (global batch size, micro-batches per rank)` predicts the next step, so that it is prefetched
    during this one, also when the batch size ramps up; a wrong prediction only costs time. Without it every step is
    expected to be like the last. `--num-workers 0` disables prefetching.
    """

    def __init__(
        self,
        dataset,
        data: Data,
        *,
        micro_batch_size: int,
        eod: Optional[int] = None,
        dp_rank: int = 0,
        dp_size: int = 1,
        cp_rank: int = 0,
        cp_size: int = 1,
        next_step: Optional[Callable[[int], tuple[int, int]]] = None,
        seq_length: Optional[int] = None,
        vocab_size: Optional[int] = None,
        pin_memory: bool = False,
        whole: bool = False,
        collate: Optional[Callable[[list], Sequence]] = None,
        arrays: Optional[Mapping[str, SampleArray]] = None,
        refuse: batch_arrays.Refuse = lambda ids, where: None,
        depths: int = 0,
    ):
        """seq_length, vocab_size: every sample is checked against these. cp_rank, cp_size: select the rank's rows of its
        samples.

        whole: one pass over the dataset in its own order. The last step is padded with copies of the last sample, masked by
        `loss_mask`.
        collate: items of the dataset -> as many samples, as `sample` returns them (`Recipe.collate`); --collate-fn
        overrides it
        arrays: the arrays of samples that are dicts (`Recipe.arrays`)
        depths: of multi-token prediction (`MicroBatch.ahead`)
        refuse: (ids, their sample) -> raises DataError, in the words of the tokenizer, if one is out of the vocabulary
        """
        wanting = [
            name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(data, name)
        ]
        if wanting and eod is None:
            flags = ", ".join(dashed(name) for name in wanting)
            raise SettingsError(f"{flags}: the tokenizer has no end-of-document token")
        self.dataset, self.data, self.eod = dataset, data, eod
        self.micro_batch_size, self.dp_rank, self.dp_size = micro_batch_size, dp_rank, dp_size
        self.cp_rank, self.cp_size = cp_rank, cp_size
        self.next_step, self.pin_memory = next_step, pin_memory
        self.seq_length, self.vocab_size, self.whole, self.collate = seq_length, vocab_size, whole, collate
        if data.collate_fn:
            self.collate = import_callable(
                "--collate-fn", data.collate_fn, "a function that makes samples of what it is given"
            )
        self.arrays, self.refuse, self.depths = arrays, refuse, depths
        self.pool = ThreadPoolExecutor(data.num_workers, "batches") if data.num_workers > 0 else None
        self.ahead: dict[tuple[int, int], Future] = {}  # (consumed, micro) -> prefetched micro-batch

    def step(self, consumed: int, num_microbatches: int) -> list[MicroBatch]:
        """The micro-batches of the step after `consumed` samples, in the order of micro-steps.

        Raises DataError at the end of the data, and exceptions of the prefetching threads.
        """
        end = consumed + num_microbatches * self.micro_batch_size * self.dp_size
        if not self._holds(consumed, end):
            raise DataError(
                f"samples {consumed:,} to {end:,} are asked for, and the dataset has {len(self.dataset):,}",
                do="build it for more samples (--train-iters, --train-samples), or --dataloader-type cyclic",
            )
        keys = [(consumed, micro) for micro in range(num_microbatches)]
        if self.pool is None:
            return [self.micro_batch(*key) for key in keys]
        futures = [self.ahead.pop(key, None) or self.pool.submit(self.micro_batch, *key) for key in keys]
        self._prepare(end, num_microbatches)
        return [future.result() for future in futures]

    def of_rank(self, dp_rank: int, consumed: int, num_microbatches: int) -> list[MicroBatch]:
        """The micro-batches that another data parallel rank has in the step after `consumed` samples."""
        return [self.micro_batch(consumed, micro, dp_rank) for micro in range(num_microbatches)]

    def micro_batch(self, consumed: int, micro: int, dp_rank: Optional[int] = None) -> MicroBatch:
        """The micro-batch at micro-step `micro` of the step after `consumed` samples. dp_rank: another one."""
        rank = self.dp_rank if dp_rank is None else dp_rank
        positions = micro_batch_samples(consumed, self.micro_batch_size, rank, self.dp_size, micro)
        samples = self.samples(positions)
        if self.arrays is not None:
            return self._of_arrays(positions, samples)
        rows = np.stack([sample.ids for sample in samples])  # [b, s + 1]
        tokens = rows[:, :-1]
        own = row_numbers(tokens.shape[1], self.cp_rank, self.cp_size) if self.cp_size > 1 else slice(None)
        loss_mask = self._loss_mask(tokens, [sample.mask for sample in samples])
        documents, restart, apart = self._documents(tokens, [sample.documents for sample in samples])

        def column_major(array):
            return torch.from_numpy(np.ascontiguousarray(array.swapaxes(-1, -2)))  # [..., b, s] -> [..., s, b]

        if self.whole and positions.stop > len(self.dataset):
            loss_mask = np.ones(tokens.shape, np.float32) if loss_mask is None else loss_mask
            loss_mask[np.asarray(positions) >= len(self.dataset)] = 0.0
        ahead = batch_arrays.ahead(rows, self.depths, loss_mask, documents) if self.depths else None
        whole_tokens = None
        if self.cp_size > 1:
            whole_tokens = torch.full((), float(tokens.size if loss_mask is None else loss_mask.sum()))
        batch = MicroBatch(
            tokens=column_major(tokens[:, own]),
            labels=column_major(rows[:, 1:][:, own]),
            samples=torch.arange(positions.start, positions.stop),
            hash=batch_hash(positions, [hashed(sample) for sample in samples]),
            loss_mask=None if loss_mask is None else column_major(loss_mask[:, own]),
            position_ids=column_major(batch_arrays.position_ids(documents)[:, own]) if restart else None,
            document_ids=column_major(documents) if apart else None,
            document_starts=batch_arrays.document_starts(documents) if apart else None,
            whole_tokens=whole_tokens,
            ahead=ahead and tuple(column_major(array[:, :, own]) for array in ahead),
        )
        return batch.pinned() if self.pin_memory else batch

    def _of_arrays(self, positions: range, samples: list[dict[str, np.ndarray]]) -> MicroBatch:
        """The micro-batch of these samples, dicts of arrays."""
        rows = {name: np.stack([sample[name] for sample in samples]) for name in self.arrays}
        hashes = batch_hash(positions, map(batch_arrays.hashed, samples))
        if self.whole and positions.stop > len(self.dataset):
            rows[LOSS_MASK][np.asarray(positions) >= len(self.dataset)] = 0.0
        arrays = {name: torch.from_numpy(np.ascontiguousarray(row.T)) for name, row in rows.items()}
        batch = named_batch(arrays, torch.arange(positions.start, positions.stop), hashes)
        return batch.pinned() if self.pin_memory else batch

    def _loss_mask(self, tokens: np.ndarray, own: list[Optional[np.ndarray]]) -> Optional[np.ndarray]:
        """[b, s] float32: weight of each token's loss, from the samples' masks and --eod-mask-loss; None: all are 1.

        own: for each sample its mask [s + 1], or None
        """
        mask = batch_arrays.loss_mask(tokens, self.eod) if self.data.eod_mask_loss else None
        if all(each is None for each in own):
            return mask
        ones = np.ones(tokens.shape[1], np.float32)
        given = np.stack([ones if each is None else each[1:] for each in own])  # the mask is aligned with labels
        return given if mask is None else given * mask

    def _documents(
        self, tokens: np.ndarray, own: list[Optional[np.ndarray]]
    ) -> tuple[Optional[np.ndarray], bool, bool]:
        """([b, s] int32: the document of each token; whether positions restart in it; whether it sees itself alone).

        Documents that samples name (own: [s + 1] each) have both. Others end with the end-of-document token, and the
        flags decide.
        """
        restart, apart = self.data.reset_position_ids, self.data.reset_attention_mask
        if all(each is None for each in own):
            return batch_arrays.document_ids(tokens, self.eod) if restart or apart else None, restart, apart
        one = np.zeros(tokens.shape[1], np.int32)
        return np.stack([one if each is None else each[:-1] for each in own]), True, True

    def sample_hash(self, place: int) -> tuple[int, int]:
        """The ledger's hash of the sample at a position in the order of training."""
        sample = self.sample(place)
        return sample_hash(place, hashed(sample) if self.arrays is None else batch_arrays.hashed(sample))

    def sample(self, place: int) -> "Sample":
        """The sample at a position in the order of training; a dict of arrays if the recipe names some.

        Raises DataError for an invalid sample: without the check, an id outside of the vocabulary would silently train a
        padding row of the embedding.
        """
        return self.samples([place])[0]

    def samples(self, places: Sequence[int]) -> list["Sample"]:
        """The samples at these positions, collated by the recipe's function if it has one."""
        given = [self._given(place) for place in places]
        if self.collate is not None:
            given = list(self.collate(given))
            if len(given) != len(places):
                raise DataError(
                    f"the recipe's collate made {len(given)} samples of {len(places)}",
                    do="return one for each that it is given (docs/extending.md#a-collate-function)",
                )
        return [self._checked(one, place) for one, place in zip(given, places, strict=True)]

    def _given(self, place: int):
        """The dataset's item for a position in the order of training."""
        number = self.number(place)
        try:
            return self.dataset[number]
        except Exception as error:
            if isinstance(error, UnknownToken):
                self.refuse([error.token], error.where)
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"in sample {number} of {type(self.dataset).__name__}")
            raise

    def _checked(self, given, place: int):
        where = f"{type(self.dataset).__name__}[{self.number(place)}]"
        if self.arrays is not None:
            return batch_arrays.checked(given, self.arrays, where, self.refuse)
        ids, mask, documents = parts_of(given, where)
        length = self.seq_length + 1 if self.seq_length else ids.size
        if ids.shape != (length,) or ids.dtype.kind not in "iu":
            raise DataError(
                f"{where} is no sample: {ids.dtype} of shape {list(ids.shape)}",
                f"a dataset gives --seq-length + 1 = {length} whole numbers by index{MASKED}",
                "mend the dataset (docs/extending.md#a-dataset)",
            )
        if self.vocab_size is not None and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            self.refuse(ids, where)
            at = int(np.argmax((ids < 0) | (ids >= self.vocab_size)))
            raise DataError(
                f"{where} holds token {ids[at]} at position {at}, outside of the vocabulary of {self.vocab_size}",
                f"it is sample {place} in the order of training",
                "give a --vocab-size above its largest id, or mend the dataset",
            )
        if mask is not None:
            good = mask.shape == ids.shape and mask.dtype.kind in "biuf" and np.isfinite(mask).all() and mask.min() >= 0
            if not good:
                raise DataError(
                    f"{where} has a loss mask that is none: {mask.dtype} of shape {list(mask.shape)}",
                    f"it has a number from 0 for each of the {length} ids: what the loss of predicting this one counts",
                    "mend the dataset (docs/extending.md#a-dataset)",
                )
            mask = mask.astype(np.float32, copy=False)
        if documents is not None:
            good = documents.shape == ids.shape and documents.dtype.kind in "iu" and (np.diff(documents) >= 0).all()
            if not good:
                raise DataError(
                    f"{where} has documents that are none: {documents.dtype} of shape {list(documents.shape)}",
                    f"{DOCUMENTS} has for each of the {length} ids the number of its document, which never falls",
                    "mend the dataset (docs/extending.md#a-dataset)",
                )
            documents = documents.astype(np.int32, copy=False)
        return Sample(ids.astype(np.int64, copy=False), mask, documents)

    def describe(self, place: int) -> str:
        """Describe the origin of the sample at a position in the order of training."""
        sample = self.number(place)
        if not hasattr(self.dataset, "origin"):
            return f"sample {place}"
        origin = self.dataset.origin(sample)
        documents = ", ".join(str(part.document) for part in origin.parts[:6]) + ", ..." * (len(origin.parts) > 6)
        word = "document" if len(origin.parts) == 1 else "documents"
        return f"sample {place}: {origin.prefix}, {word} {documents} (from token {origin.parts[0].offset})"

    def close(self) -> None:
        """Stop the threads and discard prefetched micro-batches."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        self.ahead.clear()

    def __enter__(self) -> "MicroBatchLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _prepare(self, consumed: int, num_microbatches: int) -> None:
        """Prefetch the step after `consumed` samples, and drop wrongly predicted micro-batches."""
        if self.next_step is not None and self._holds(consumed, consumed + 1):
            num_microbatches = self.next_step(consumed)[1]
        end = consumed + num_microbatches * self.micro_batch_size * self.dp_size
        keys = [(consumed, micro) for micro in range(num_microbatches)] if self._holds(consumed, end) else []
        for key in set(self.ahead) - set(keys):
            self.ahead.pop(key).cancel()
        for key in keys:
            if key not in self.ahead:
                self.ahead[key] = self.pool.submit(self.micro_batch, *key)

    def _holds(self, start: int, end: int) -> bool:
        if self.whole:
            return start < len(self.dataset)
        return self.data.dataloader_type == "cyclic" or end <= len(self.dataset)

    def number(self, position: int) -> int:
        """The dataset's index of the sample at a position in the order of training."""
        if self.whole:
            return min(position, len(self.dataset) - 1)
        if self.data.dataloader_type == "single":
            return position
        epoch, index = cyclic_position(position, len(self.dataset))
        return int(cyclic_order(epoch, len(self.dataset))[index])


IDS, MASK, DOCUMENTS = "input_ids", "loss_mask", "document_ids"  # of a sample that is a dict
MASKED = f", alone or with a loss mask: (ids, mask), or a dict with {IDS} and {MASK}, perhaps {DOCUMENTS}"


class Sample(NamedTuple):
    """A sample of token ids.

    ids        [seq_length + 1] int64
    mask       [seq_length + 1] float32: the weight in the loss of predicting each id; None: 1
    documents  [seq_length + 1] int32: the document of each id, for samples of several that do not see each other; their
               positions restart. None: --reset-attention-mask and --reset-position-ids decide
    """

    ids: np.ndarray
    mask: Optional[np.ndarray] = None
    documents: Optional[np.ndarray] = None


def parts_of(sample, where: str) -> Sample:
    """The parts of a dataset's item. Raises DataError for a dict with other keys.

    >>> parts_of({"input_ids": [5, 6], "loss_mask": [0, 1]}, "")
    Sample(ids=array([5, 6]), mask=array([0, 1]), documents=None)
    """
    mask = documents = None
    if isinstance(sample, dict):
        if IDS not in sample or sample.keys() - {IDS, MASK, DOCUMENTS}:
            raise DataError(
                f"{where} is a dict with {', '.join(map(repr, sample))}",
                f"a sample is whole numbers{MASKED}",
                "name its parts so, and leave others out (docs/extending.md#a-dataset)",
            )
        sample, mask, documents = sample[IDS], sample.get(MASK), sample.get(DOCUMENTS)
    elif isinstance(sample, tuple) and len(sample) == 2 and np.ndim(sample[0]):
        sample, mask = sample
    return Sample(*(None if part is None else np.asarray(part) for part in (sample, mask, documents)))


def hashed(sample: Sample) -> np.ndarray:
    """The part of a sample that the ledger hashes: its input, its loss mask and its documents if it has them."""
    parts = [sample.ids[:-1]]
    if sample.mask is not None:
        parts.append(sample.mask[1:].view(np.int32).astype(np.int64))
    if sample.documents is not None:
        parts.append(sample.documents[:-1].astype(np.int64))
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


@lru_cache(maxsize=2)  # prefetching may reach into the next epoch
def cyclic_order(epoch: int, length: int) -> np.ndarray:
    """The order of an epoch with `--dataloader-type cyclic`: a permutation that depends only on the epoch."""
    return torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).numpy()
