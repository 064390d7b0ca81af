# SPDX-License-Identifier: Apache-2.0
"""Do something on all ranks of a job, so that a failure on one is known to all and no rank waits for it.

The ranks coordinate through one function, `all_gather_object(value) -> [value of rank 0, value of rank 1, ...]`
(for example `torch.distributed.all_gather_object`). Needs no torch.
"""

from collections.abc import Callable
from typing import Any, Optional

from megatron.errors import Failure, StorageError
from megatron.storage.durable import Damaged

AllGatherObject = Callable[[Any], list]


def alone(value: Any) -> list:
    """The all_gather_object of a job with one rank."""
    return [value]


def attempt_on_all_ranks(
    action: Callable[[], Any],
    all_gather_object: AllGatherObject,
    errors: tuple[type[Exception], ...] = (Failure, OSError),
) -> tuple[list, list[tuple[int, Failure]], Optional[Exception]]:
    """Run `action` on all ranks: the result of each (None after a failure), (rank, failure) of all, and this rank's error.

    errors: what is a failure, here and for the other ranks; those that are no Failure become StorageErrors
    """
    result, own, sent = None, None, (None,)
    try:
        result = action()
    except errors as error:
        failure = error if isinstance(error, Failure) else StorageError(str(error) or type(error).__name__)
        own, sent = error, (type(failure), failure.what, failure.why, failure.do)
    answers = all_gather_object((result, sent))
    failures = [(rank, kind(*words)) for rank, (_, (kind, *words)) in enumerate(answers) if kind]
    return [value for value, _ in answers], failures, own


def on_all_ranks(action: Callable[[], Any], all_gather_object: AllGatherObject) -> list:
    """Run `action` on all ranks and gather the results. If it fails on any rank, raise on all.

    Other failures take precedence over Damaged, after which an older checkpoint can be tried.
    """
    results, failures, own = attempt_on_all_ranks(action, all_gather_object)
    if not failures:
        return results
    rank, first = min(failures, key=lambda item: isinstance(item[1], Damaged))
    raise type(first)(first.what if len(results) == 1 else f"{first.what} (rank {rank})", first.why, first.do) from own
