# SPDX-License-Identifier: Apache-2.0
"""Check samples that are dicts of arrays, as a recipe declares them.

>>> arrays = {"text": SampleArray(3, below=10), "loss_mask": SampleArray(3, mask=True)}
>>> checked({"text": [1, 2, 3], "loss_mask": [0, 1, 1]}, arrays, "sample 0")["loss_mask"]
array([0., 1., 1.], dtype=float32)
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from megatron.errors import DataError
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray

Refuse = Callable[[Iterable[int], str], None]
DOCUMENTED = "docs/encoder_decoder.md#samples"


def checked(
    sample, arrays: Mapping[str, SampleArray], where: str, refuse: Refuse = lambda ids, where: None
) -> dict[str, np.ndarray]:
    """The sample with each array as int64, or float32 for masks. Raises DataError for an invalid sample.

    refuse: for ids that are too large, in better words: see `MicroBatchLoader`
    """
    if not isinstance(sample, Mapping):
        raise DataError(
            f"{where} is no sample: {type(sample).__name__}",
            f"this model is given dicts of arrays: {', '.join(arrays)}",
            f"mend the dataset ({DOCUMENTED})",
        )
    if missing := [name for name in arrays if name not in sample]:
        raise DataError(
            f"{where} has no {', '.join(missing)}",
            f"a sample has {', '.join(arrays)}; here are {', '.join(map(str, sample)) or 'none'}",
            f"mend the dataset ({DOCUMENTED})",
        )
    named = {name: f"{where}, {name}" for name in arrays}
    return {name: _checked(np.asarray(sample[name]), array, named[name], refuse) for name, array in arrays.items()}


def _checked(given: np.ndarray, array: SampleArray, where: str, refuse: Refuse) -> np.ndarray:
    kinds = "biuf" if array.mask else "biu"
    if given.shape != array.shape or given.dtype.kind not in kinds:
        raise DataError(
            f"{where} is {given.dtype} of shape {list(given.shape)}",
            f"wanted: {array.words()}",
            f"mend the dataset ({DOCUMENTED})",
        )
    if array.mask:
        if not (np.isfinite(given).all() and given.min(initial=0) >= 0):
            raise DataError(f"{where} is no mask", f"wanted: {array.words()}", f"mend the dataset ({DOCUMENTED})")
        return given.astype(np.float32, copy=False)
    flat = given.reshape(-1)
    if not 0 <= flat.min() <= flat.max() < array.below:
        refuse(flat, where)
        at = int(np.argmax((flat < 0) | (flat >= array.below)))
        raise DataError(
            f"{where} holds {flat[at]} at position {at}",
            f"wanted: {array.words()}",
            "give a --vocab-size above the largest id, or mend the dataset",
        )
    return given.astype(np.int64, copy=False)


def hashed(sample: Mapping[str, np.ndarray]) -> np.ndarray:
    """The part of a sample that the ledger hashes: the numbers of all its arrays, int64."""
    return np.concatenate(
        [
            array.reshape(-1).view(np.int32).astype(np.int64) if array.dtype == np.float32 else array.reshape(-1)
            for array in sample.values()
        ]
    )


def without_negative_labels(sample):
    """Replace negative labels by 0 where the loss mask is 0 (Megatron-LM's samples have -1 there)."""
    if not isinstance(sample, Mapping) or LABELS not in sample or LOSS_MASK not in sample:
        return sample
    labels, counts = np.asarray(sample[LABELS]), np.asarray(sample[LOSS_MASK])
    if labels.shape != counts.shape or labels.dtype.kind != "i":
        return sample
    return {**sample, LABELS: np.where((labels < 0) & (counts == 0), 0, labels)}
