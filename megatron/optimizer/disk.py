# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in a file, as in ZeRO-Infinity (arXiv:2104.07857), streamed through memory once a step.

    read ahead   | part 2 |
    update       | part 1 |      on the CPU; gradients are copied there, new weights directly to the model
    write back   | part 0 |

Two threads read and write while the CPU updates. All of the state passes through three buffers (`scratch.SLOTS`,
`scratch.PART`), so memory does not grow with the model. Results are bitwise equal to those with state in memory.

The file holds main weights if the model's weights are in half precision, or if ranks shard the state of weights that they
all keep. Otherwise the model's fp32 weights serve as main weights, and only moments are in the file.

A save in the background needs no copy in memory: the file then has two copies of the state. The next step reads the copy
that is being saved and writes the other one.
"""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Optional

import torch

from megatron.optimizer.scratch import SLOTS, Scratch, buffer_bytes, file_bytes, part_size
from megatron.optimizer.state import OwnedState, Ranges, Targets, update
from megatron.optimizer.units import OwnedRange
from megatron.optimizer.update import Rates, UpdateRule


class DiskState(OwnedState):
    """Moments of consecutive owned ranges in a file, and their main weights unless these are in `memory`.

    reduced:  gradients of the rank's whole shard
    memory:   fp32 main weights, if the model holds them already
    copies:   copies of the state in the file: 2 for pieces that remain valid during later steps (`keep`)
    Raises StorageError when the file cannot be created in the folder.
    """

    def __init__(
        self,
        owned: Sequence[OwnedRange],
        rule: UpdateRule,
        reduced: torch.Tensor,
        folder: str,
        *,
        memory: Optional[torch.Tensor] = None,
        copies: int = 1,
    ):
        super().__init__(owned, rule)
        self.memory, self.offload, self.direct = memory, memory is None, memory is None
        self.names = rule.state if memory is not None else ("main", *rule.state)
        self.away = reduced.device.type != "cpu"  # the model's gradients and weights are on a device
        self._dtypes = [torch.float32 if name == "main" else rule.dtype_of(name) for name in self.names]
        widths = [dtype.itemsize for dtype in self._dtypes]
        self.on_disk = file_bytes(self.size, widths * copies)
        self._scratch = Scratch(folder, widths * copies, self.size)
        self._copies, self._current, self._next = copies, 0, 0
        self._width = part_size(self.size)
        planes = [torch.float32, *map(rule.dtype_of, rule.state)] if self.away else self._dtypes
        self._memory = _page_aligned(buffer_bytes(self.size, [dtype.itemsize for dtype in planes]), self.away)
        self._buffers = [self._planes(slot, planes) for slot in self._memory.chunk(SLOTS)]
        self._arriving = None
        if self.away:
            self._arriving = torch.zeros(self._width, dtype=reduced.dtype, pin_memory=True)
        starts = range(0, self.size, self._width)
        self._parts = [slice(start, min(start + self._width, self.size)) for start in starts]

    def _planes(self, slot: torch.Tensor, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
        """Divide the bytes of a slot into a part of each plane."""
        pieces = slot.split([self._width * dtype.itemsize for dtype in dtypes])
        return [piece.view(dtype) for piece, dtype in zip(pieces, dtypes)]

    @property
    def nbytes(self) -> int:
        """Bytes in memory: buffers, and main weights that the model holds."""
        tensors = (self._memory, self._arriving, self.memory)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    @property
    def main(self) -> torch.Tensor:
        """The main weights, mapped from the file if they are in it. For use between two steps."""
        return self._mapped(0) if self.memory is None else self.memory

    @property
    def moments(self) -> dict[str, torch.Tensor]:
        """The moments, mapped from the file. For use between two steps."""
        return {name: self._mapped(self.names.index(name)) for name in self.rule.state}

    def _mapped(self, plane: int) -> torch.Tensor:
        memory = self._scratch.map(self._current * len(self.names) + plane)
        return torch.frombuffer(memory, dtype=self._dtypes[plane], count=self.size)

    def keep(self) -> None:
        """Preserve the present content of the file: the next step writes to the other copy."""
        assert self._copies == 2, "this state was built with one copy"
        self._next = 1 - self._current

    def is_stable(self, flat: torch.Tensor) -> bool:
        """Whether a tensor of the state is in the file, where `keep` preserves it."""
        return flat is not self.memory

    @torch.no_grad()
    def step(self, reduced: torch.Tensor, step_count: int, rates: Rates, targets: Targets = ()) -> None:
        """One update from the shard's gradients, as `MemoryState.step`, which also copies new main weights to `targets`.

        Raises StorageError when the disk fails.
        """
        gradients, targets, leaving = reduced[self.span], list(targets), []
        with ThreadPoolExecutor(2, "optimizer-state") as disk:
            coming = disk.submit(self._read, 0)
            for number, part in enumerate(self._parts):
                coming.result()
                if number + 1 < len(self._parts):
                    if number + 1 >= SLOTS:
                        leaving[number + 1 - SLOTS].result()  # from the slot that is filled next
                    coming = disk.submit(self._read, number + 1)
                main, gradient, *moments = self._flats(number, part, gradients)
                named = dict(zip(self.rule.state, moments, strict=True))
                update(
                    self.rule, (main, gradient), named, within(self.ranges, part), step_count, rates, self._fill(part)
                )
                self._deliver(main, part, targets)
                leaving.append(disk.submit(self._write, number))
            for write in leaving:
                write.result()
        self._current = self._next

    def _fill(self, part: slice) -> Callable[[slice, torch.Tensor], bool]:
        """`fill` for ranges that are counted from the start of a part."""
        return lambda where, words: self.fill(slice(where.start + part.start, where.stop + part.start), words)

    def _flats(self, number: int, part: slice, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Main weights, gradients and moments of a part, in host memory."""
        size = part.stop - part.start
        buffers = [buffer[:size] for buffer in self._buffers[number % SLOTS]]
        moments = len(buffers) - len(self.rule.state)
        main, states = buffers[:moments], buffers[moments:]
        gradient = self._arriving[:size].copy_(gradients[part]) if self.away else gradients[part]
        if self.memory is not None:
            main = [main[0].copy_(self.memory[part]) if main else self.memory[part]]
        return [*main, gradient, *states]

    def _deliver(self, main: torch.Tensor, part: slice, targets: list[tuple[slice, torch.Tensor]]) -> None:
        if self.memory is not None:
            targets = [(slice(0, self.size), self.memory)] if self.away else []
        for where, target in targets:
            start, stop = max(where.start, part.start), min(where.stop, part.stop)
            if start < stop:
                target[start - where.start : stop - where.start].copy_(main[start - part.start : stop - part.start])

    def _read(self, number: int) -> None:
        self._move(self._scratch.read, number, self._current)

    def _write(self, number: int) -> None:
        self._move(self._scratch.write, number, self._next)

    def _move(self, move, number: int, copy: int) -> None:
        """Read or write a part, plane by plane, in whole pages (the last may extend past the state)."""
        count = len(self.names)
        size = part_size(self._parts[number].stop - self._parts[number].start)
        for plane, buffer in enumerate(self._buffers[number % SLOTS][-count:]):
            data = memoryview(buffer[:size].view(torch.uint8).numpy())
            move(copy * count + plane, buffer.element_size() * self._parts[number].start, data)


def within(ranges: Ranges, part: slice) -> Ranges:
    """Ranges cut to a part of the state and counted from the part's start."""
    cut = {}
    for group, stretches in ranges.items():
        edges = [(max(where.start, part.start), min(where.stop, part.stop)) for where in stretches]
        cut[group] = [slice(start - part.start, stop - part.start) for start, stop in edges if start < stop]
    return cut


def _page_aligned(size: int, pinned: bool) -> torch.Tensor:
    """Allocate memory for direct reads and writes, in bytes."""
    if pinned:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
