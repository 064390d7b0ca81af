# SPDX-License-Identifier: Apache-2.0
"""Tensors that the forward pass does not keep for the backward pass, which computes them again."""

from collections.abc import Callable

import torch
from torch.autograd.graph import saved_tensors_hooks


class Discarded(saved_tensors_hooks):
    """A context for the ops that read y. Autograd saves no views of y in it.

    again: computes y in the backward pass, where the first of these ops needs it. The memory of y is free when the caller
    drops y, unless kernels have saved copies. An op that changed y in place saves the result as usual.
    """

    def __init__(self, y: torch.Tensor, again: Callable[[], torch.Tensor]):
        super().__init__(self._pack, self._unpack)
        self.y, self.storage, self.version = y, _storage(y), y._version
        self.again, self.value, self.kept, self.read = again, None, 0, 0

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self.y = None  # until here, so that no other tensor gets its storage
        # Methods of this object, which would keep it until a garbage collection
        self.pack_hook = self.unpack_hook = None

    def _pack(self, x: torch.Tensor):
        if _storage(x) != self.storage or x._version != self.version:
            return x
        self.kept += 1
        return tuple(x.shape), x.stride(), x.storage_offset()

    def _unpack(self, kept) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        if self.value is None:
            self.value = self.again()
        self.read += 1
        view = self.value.as_strided(*kept)
        if self.read == self.kept:  # the last view keeps it alive
            self.value, self.read = None, 0
        return view


def _storage(x: torch.Tensor) -> int:
    """An identifier of a tensor's storage, valid on the meta device, too, where all addresses are 0."""
    return x.untyped_storage()._cdata
