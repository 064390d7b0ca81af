# SPDX-License-Identifier: Apache-2.0
"""Initial weights and dropout masks, from seeds that depend only on position, not on earlier draws.

A weight is drawn from generators seeded by (seed, parameter name, block of rows) over the *logical* tensor and then
split, so every layout starts from the same weights. A dropout mask is seeded by (seed, sample, layer, site), where
`sample` is the index of the sample in the training order: a resumed run, a recomputed layer and another layout draw the
same mask on the same kind of device, and no generator state is saved. Draws of a user's module from torch's own
generators depend on the seed, the micro-batch's samples and the stage, and so on the layout: `seed_torch`.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

import torch

from megatron.fused_kernels import TABLE, Case, choose_kernel
from megatron.fused_kernels.dropout import DropoutMask, drop
from megatron.mpu.collectives import all_to_all
from megatron.mpu.context_parallel import own_rows
from megatron.mpu.cpu_threads import affinity, quota, share
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Constant, Init, InverseSoftplus, LogOf, LogUniform, Normal, Placement, Uniform
from megatron.settings import rank_env

BLOCK = 1 << 20  # number of elements of a logical tensor to draw at a time
DRAWN_AT_ONCE = 1 << 28  # elements of the blocks that threads draw at one time: 1 GiB


def seed_of(*position) -> int:
    """A 63-bit seed from any printable position, equal on every machine and Python version.

    >>> seed_of(1234, "blocks.0.mlp.up.weight", 0) == seed_of(1234, "blocks.0.mlp.up.weight", 0)
    True
    """
    digest = hashlib.blake2b(repr(position).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_torch(device: torch.device, *position) -> None:
    """Seed torch's own CPU and CUDA generators from a position, for modules that draw from them.

    Takes a few microseconds; `torch.manual_seed` is slower without CUDA, because it saves a stack for a later CUDA init.
    """
    seed = seed_of(*position)
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)


def init_parameter(name: str, parameter: torch.Tensor, placement: Placement, place: dict[str, int], seed: int) -> None:
    """Fill the local piece of a logical tensor with its initial values, and its padding with 0."""
    init_rows(name, parameter, 0, tuple(parameter.shape), placement, place, seed)


@torch.no_grad()
def init_rows(
    name: str,
    rows: torch.Tensor,
    first_row: int,
    shape: tuple[int, ...],
    placement: Placement,
    place: dict[str, int],
    seed: int,
    axis_of: Optional[Callable[[str], Axis]] = None,
) -> None:
    """Fill rows of the local piece of a logical tensor: those from `first_row` on. shape: of the whole local piece

    The tensor is drawn in blocks of whole rows on the CPU in fp32, which bounds memory and gives the same values on GPUs.
    Each block has its own generator, so threads draw several at a time.
    axis_of: name -> mesh axis. Ranks along one that cuts rows then call this together, and draw a part of the blocks each
    """
    rows.zero_()
    cut = [(dim, axes) for dim, axes in placement.cut_dims if dim > 0]
    if axis_of and len(cut) == len(cut[0][1] if cut else ()) == 1 and not isinstance(placement.init, Constant):
        if (axis := axis_of(cut[0][1][0])).size > 1:
            _init_shared(name, rows, first_row, shape, placement, place, seed, axis, cut[0])
            return
    offset, extent = placement.box(shape, place)
    if shape:
        count = max(0, min(len(rows), extent[0] - first_row))
        offset, extent = (offset[0] + first_row, *offset[1:]), (count, *extent[1:])
    if 0 in extent:
        return
    own = rows[tuple(slice(n) for n in extent)]
    if isinstance(placement.init, Constant):
        own.fill_(placement.init.value)
        return
    row_shape = placement.shape[1:]
    rows_at_a_time = max(1, BLOCK // math.prod(row_shape))
    first = offset[0] // rows_at_a_time
    last = -(-(offset[0] + extent[0]) // rows_at_a_time)
    inner = tuple(slice(at, at + n) for at, n in zip(offset[1:], extent[1:]))

    def draw(block: int) -> None:
        low, values = _block(name, block, placement, seed, offset[0], offset[0] + extent[0])
        own[low - offset[0] : low - offset[0] + len(values)] = values[(slice(None), *inner)]

    _in_threads(draw, range(first, last), rows_at_a_time * math.prod(row_shape))


def _block(name: str, block: int, placement: Placement, seed: int, first: int, last: int) -> tuple[int, torch.Tensor]:
    """(first row, values) of the rows of a block that are in [first, last) of the logical tensor."""
    row_shape = placement.shape[1:]
    rows_at_a_time = max(1, BLOCK // math.prod(row_shape))
    start = block * rows_at_a_time
    number = min(rows_at_a_time, placement.shape[0] - start)
    generator = torch.Generator().manual_seed(seed_of(seed, name, block))
    values = _drawn(placement.init, (number, *row_shape), generator)
    low, high = max(start, first), min(start + number, last)
    return low, values[low - start : high - start]


def _in_threads(draw: Callable[[int], Any], blocks: Sequence[int], size: int) -> list:
    """What `draw` returns for each block, of so many elements."""
    threads = min(len(blocks), drawing_threads(size)) if len(blocks) > 1 else 1
    draw = torch.no_grad()(draw)  # which each thread has for itself
    if threads < 2:
        return [draw(block) for block in blocks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(draw, blocks))


def _init_shared(
    name: str,
    rows: torch.Tensor,
    first_row: int,
    shape: tuple[int, ...],
    placement: Placement,
    place: dict[str, int],
    seed: int,
    axis: Axis,
    cut: tuple[int, tuple[str, ...]],
) -> None:
    """`init_rows` for a tensor whose rows an axis cuts: its ranks take turns at the blocks, and send each other the parts.

    Rounds bound the memory, by numbers that all ranks have alike.
    """
    dim, [axis_name] = cut
    boxes = [placement.box(shape, place | {axis_name: rank}) for rank in range(axis.size)]
    first = boxes[0][0][0] + first_row
    last = first + max(0, min(len(rows), boxes[0][1][0] - first_row))
    if last == first:
        return
    inner = [tuple(slice(at, at + n) for at, n in zip(offset[1:], extent[1:])) for offset, extent in boxes]
    widths = [math.prod(extent[1:]) for _, extent in boxes]
    rows_at_a_time = max(1, BLOCK // math.prod(placement.shape[1:]))
    size = rows_at_a_time * math.prod(placement.shape[1:])
    begin, end = first // rows_at_a_time, -(-last // rows_at_a_time)
    owner = lambda block: (block + seed_of(name)) % axis.size  # tensors of one block are not all for the first rank
    count = lambda block: min((block + 1) * rows_at_a_time, last) - max(block * rows_at_a_time, first)
    round_of = axis.size * max(1, min(16, DRAWN_AT_ONCE // size))
    own = rows[tuple(slice(n) for n in (last - first, *boxes[axis.rank][1][1:]))]
    for start in range(begin, end, round_of):
        blocks = range(start, min(start + round_of, end))
        mine = [block for block in blocks if owner(block) == axis.rank]
        drawn = [
            values for _, values in _in_threads(lambda n: _block(name, n, placement, seed, first, last), mine, size)
        ]
        parts = [values[(slice(None), *inner[rank])].flatten() for rank in range(axis.size) for values in drawn]
        rows_of = [sum(count(block) for block in blocks if owner(block) == rank) for rank in range(axis.size)]
        sent = [rows_of[axis.rank] * width for width in widths]
        received = [number * widths[axis.rank] for number in rows_of]
        whole = torch.cat(parts) if parts else torch.empty(0)
        arrived = all_to_all(whole.to(rows.device), axis, sent, received)
        at = 0
        for block in sorted(blocks, key=lambda block: (owner(block), block)):
            low, number = max(block * rows_at_a_time, first) - first, count(block)
            values = arrived[at : at + number * widths[axis.rank]]
            own[low : low + number] = values.view(number, *own.shape[1:])
            at += len(values)


def drawing_threads(block: int) -> int:
    """The threads that draw blocks of so many elements: the rank's share of the cores, as far as memory allows.

    OMP_NUM_THREADS does not count, which torchrun sets to 1: values do not depend on the number of threads.
    """
    here = rank_env.ranks().local_world_size or 1
    return min(share(len(affinity()), quota(), here).count, max(1, DRAWN_AT_ONCE // block))


def _drawn(init: Init, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Initial values of a block, fp32 on the CPU. Functions of draws are taken of the whole block: vector instructions and
    the rest after them may round differently, so pieces would not be equal in each bit.
    """
    values = torch.empty(shape)
    match init:
        case Normal(std):
            return values.normal_(0.0, std, generator=generator)
        case Uniform(low, high):
            return values.uniform_(low, high, generator=generator)
        case LogUniform(low, high, least):
            return values.uniform_(math.log(low), math.log(high), generator=generator).exp_().clamp_(min=least)
        case LogOf(of):
            return _drawn(of, shape, generator).log_()
        case InverseSoftplus(of):
            values = _drawn(of, shape, generator)
            return values + torch.log(-torch.expm1(-values))  # log(exp(y) - 1), which overflows for large y
    raise TypeError(f"{init} are no initial values that are drawn")


def random_words(shape: tuple[int, ...], seeds: list[int], device: torch.device) -> torch.Tensor:
    """Uniform random int16, [len(seeds), *shape]; each entry along the first dim depends only on its seed.

    GPUs and CPUs draw different words: a generator that is fast on one is slow on the other.
    """
    count = math.prod(shape)
    if device.type == "cuda" and not TABLE["dropout_add"][0].lacking:  # triton is there
        from megatron.fused_kernels.gpu.dropout import words

        return words(count, seeds, device).view(-1, *shape)
    words = torch.empty((len(seeds), -(-count // 4)), dtype=torch.int64, device=device)
    generator = torch.Generator(device=device)
    for row, seed in zip(words, seeds):
        row.random_(-(2**63), None, generator=generator.manual_seed(seed))
    return words.view(torch.int16)[:, :count].view(-1, *shape)


class Dropout(torch.nn.Module):
    """Dropout with a mask that depends only on (seed, sample, layer, site), and probability `p` in steps of 1/65536.

    x is [s, b, ...] with the batch at `batch_dim`. If `axis` splits dim `cut` of the per-sample tensor (the sequence
    under sequence parallelism, the heads in attention), every rank draws the whole mask and takes its piece.
    unfused: dropout and the following addition use torch's ops (--no-bias-dropout-fusion).
    cp: the context parallel axis, whose ranks have rows of dim 0, which `axis` may split further.
    """

    fusion, unfused = "bias_dropout_fusion", False

    def __init__(
        self,
        p: float,
        site: str,
        layer: int,
        seed: int,
        *,
        batch_dim: int = 1,
        cut: int = 0,
        axis: Axis = None,
        cp: Axis = None,
    ):
        super().__init__()
        self.p, self.key, self.batch_dim = p, (seed, layer, site), batch_dim
        self.cut, self.axis, self.cp = cut, axis, cp
        self.threshold = round(p * 65536) - 32768
        self.factor = 1.0 / (1.0 - round(p * 65536) / 65536)  # scale of kept elements

    def forward(self, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """`samples`: [b] numbers of the samples in training order, on the CPU. Identity in evaluation or at p = 0."""
        if self.idle:
            return x
        return drop(x, self.keep(x.shape, samples, x.device))

    def add(self, residual: torch.Tensor, x: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """residual + x after dropout, both [s, b, h]."""
        if self.idle:
            return residual + x
        run = choose_kernel("dropout_add", Case(x.device.type, x.dtype, unfused=self.unfused)).run
        return run(x, self.keep(x.shape, samples, x.device), residual)

    @property
    def idle(self) -> bool:
        """Whether nothing is dropped: in evaluation, or at p = 0."""
        return not self.training or self.p == 0.0

    def keep(self, shape: tuple[int, ...], samples: torch.Tensor, device: torch.device) -> DropoutMask:
        """The mask for a tensor of this local shape, with the batch at `batch_dim`."""
        shape = list(shape)
        del shape[self.batch_dim]
        pieces, rank = (self.axis.size, self.axis.rank) if self.axis else (1, 0)
        shape[self.cut] *= pieces
        shape[0] *= self.cp.size if self.cp else 1
        words = random_words(shape, [seed_of(*self.key, n) for n in samples.tolist()], device)
        if self.cp:
            words = own_rows(words, self.cp, 1)
        if pieces > 1:
            words = words.chunk(pieces, self.cut + 1)[rank]
        return DropoutMask(words.movedim(0, self.batch_dim), self.threshold, self.factor)


class Draws:
    """What random numbers inside a block's products depend on: the seed, the cp axis, and the samples of the present pass.

    A pass of the block sets `samples`. Recomputation of a part of it sets those of its first run again
    (`model/recompute.py`), by the attribute `draws` of its modules.
    """

    def __init__(self, seed: int, cp: Axis):
        self.seed, self.cp = seed, cp
        self.samples: torch.Tensor | None = None  # [b], on the CPU

    def follow(self, block: torch.nn.Module) -> None:
        """Take the samples from the last argument of each pass of this block: its context, or the decoder's in it."""
        for module in block.modules():
            module.draws = self

        def begin(_, inputs: tuple) -> None:
            context = getattr(inputs[-1], "decoder", inputs[-1])
            self.samples = context.samples

        block.register_forward_pre_hook(begin)
