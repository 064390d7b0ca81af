# SPDX-License-Identifier: Apache-2.0
"""Epochs and the order of samples: the samples of `--train-epochs`, and the lengths of training that share an order.

Epochs are shuffled together, except for a partly read last one (`index_maps.make_epoch_plan`). So the order of all samples
changes if one more sample needs another epoch of a file, or more of its last one.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from typing import Optional

import numpy as np

from megatron.data.blend import parse_blend, share_sizes
from megatron.data.document_dataset import document_lengths
from megatron.data.gpt_dataset import sources_of
from megatron.data.index_maps import make_epoch_plan, sequences_of
from megatron.data.remote import open_files
from megatron.errors import SettingsError
from megatron.settings import schema
from megatron.settings.schema import Data


def in_samples(
    config: schema.Config, own_data: bool, epoch_samples: Optional[Callable[[schema.Config], int]] = None, log=print
) -> schema.Config:
    """Convert `--train-epochs` to `--train-samples`.

    own_data: the recipe makes its own samples; epoch_samples: returns the number of samples of such an epoch
    Raises SettingsError if the number of samples of an epoch is undefined, DataError for missing or damaged files.
    """
    epochs, batch = config.batch.train_epochs, config.batch
    if epochs is None or batch.train_iters is not None:  # `check` reports the latter
        return config
    if epochs < 1:
        raise SettingsError(f"--train-epochs {epochs} must be at least 1")
    if batch.train_samples is not None:
        raise SettingsError(f"--train-samples {batch.train_samples} and --train-epochs {epochs}: give one of them")
    if epoch_samples is not None and not config.data.mock_data:
        return config.derive(f"--train-epochs {epochs}", train_samples=epochs * epoch_samples(config))
    if own_data or config.data.mock_data:
        what = "this model's samples are its own" if own_data else "--mock-data makes as many samples as are asked for"
        raise SettingsError(f"--train-epochs {epochs}: {what}", do="give --train-samples N or --train-iters N")
    samples = samples_of_epochs(config.data, config.model.seq_length, epochs, log)
    return config.derive(f"--train-epochs {epochs}", train_samples=samples)


def samples_of_epochs(data: schema.Data, seq_length: int, epochs: int, log=print) -> int:
    """Number of training samples in `epochs` epochs; a sample may span two epochs.

    With --dataset-type webtext an epoch has one sample per document.
    """
    (blend, *_), (share, *_) = sources_of(data)
    if blend is None or share is None:
        raise SettingsError("there is no training data", f"--split {data.split}", "give training a share")
    several = len(blend.prefixes) > 1
    if several and (blend.weights is not None or epochs > 1):
        why = (
            "prefixes with weights end at different times" if blend.weights else "without weights, once is all there is"
        )
        raise SettingsError(
            f"--train-epochs {epochs}: a blend of {len(blend.prefixes)} prefixes has no such number of samples",
            why,
            "give --train-samples N, or merge the files (merge_datasets.py)",
        )
    return sum(_samples_of(prefix, share, data, seq_length, epochs, log) for prefix in blend.prefixes)


def _samples_of(prefix: str, share, data: schema.Data, seq_length: int, epochs: int, log) -> int:
    tokens = open_files(prefix, data, log)
    if data.dataset_type == "webtext":
        lengths = document_lengths(tokens)
        documents = sequences_of(share, len(lengths))
        return epochs * int(np.count_nonzero(lengths[documents.start : documents.stop]))
    lengths, sequences = tokens.sequence_lengths, sequences_of(share, len(tokens))
    if not np.any(lengths[sequences.start : sequences.stop]):
        return 0  # building the dataset reports it
    plan = replace(make_epoch_plan(sequences, lengths, seq_length, seed=0), epochs=epochs)
    if plan.num_samples < 1:
        raise SettingsError(
            f"--train-epochs {epochs} of {plan.tokens:,} tokens are less than one sample of --seq-length {seq_length}",
            do="go through them more often, or shorten --seq-length",
        )
    return plan.num_samples


LONGEST = 1 << 60  # samples that nobody trains on


def same_order(dataset, data: Data, samples: int) -> Optional[range]:
    """The numbers of training samples with the same order as `samples`; None for datasets without an epoch plan.

    dataset: training dataset, built from these settings for any number of samples
    """
    files, words = getattr(dataset, "datasets", [dataset]), data.data_path or data.train_data_path
    if words is None or not all(hasattr(one, "plan") for one in files):
        return None
    weights = parse_blend(words, "--data-path").weights
    if len(files) == 1 and not data.data_path:  # the only file, whatever its weight
        weights = None
    if weights is None and len(files) > 1:  # one epoch of each file
        return None

    def epochs(count: int) -> list[tuple[int, bool]]:
        counts = [count] if weights is None else share_sizes(weights, count)[1]
        tokens = [(np.array([one.plan.tokens]), one.plan.seq_length) for one in files]
        plans = [make_epoch_plan(range(1), *of_file, 0, own) for of_file, own in zip(tokens, counts, strict=True)]
        return [(plan.epochs, plan.separate_last) for plan in plans]

    wanted = epochs(samples)
    first = _first(1, samples, lambda count: epochs(count) == wanted)
    return range(first, _first(samples, LONGEST, lambda count: epochs(count) != wanted))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest number in [low, high] for which `holds` is True, by bisection."""
    return low + bisect_left(range(low, high), True, key=holds)
