# SPDX-License-Identifier: Apache-2.0
"""Dispatch by a library (--moe-flex-dispatcher-backend): DeepEP (github.com/deepseek-ai/DeepEP) or HybridEP, its branch
hybrid-ep, sends tokens to the ranks of their experts, over NVLink and InfiniBand at once.

    deepep    tokens [n, h] -> one hop of the library over ep -> rows of this rank's experts, by a `Dispatcher` of one rank
    hybridep  tokens [n, h] -> rows of this rank's experts, in the order of experts

Both send a token once to each node, and there once to each rank, with the weights of its experts, and add up what comes
back. The backward pass of a dispatch is a combine, and that of a combine is a dispatch with the routing of the first: its
`handle`.

Legend: n tokens, h hidden, k experts of a token, E experts, m rows.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.errors import SettingsError
from megatron.model.kinds.experts.dispatch import Counts, Dispatcher
from megatron.model.kinds.experts.grouped import Rows
from megatron.mpu import collectives, mappings
from megatron.mpu.expert_libraries import FORMATS, LEAVE_OUT, LIBRARIES
from megatron.mpu.mesh import Axis, Mesh
from megatron.mpu.transfer import to_device

Tensors = tuple[torch.Tensor, ...]


def library_refusal(chosen: Optional[tuple[str, Optional[int]]], device: torch.device) -> Optional[SettingsError]:
    """Why a run on this device cannot use a library; None: it can, or needs none. chosen: as `Mesh.ep_library`"""
    if chosen is None:
        return None
    backend, _ = chosen
    library, flag = LIBRARIES[backend], f"--moe-flex-dispatcher-backend {backend}"
    if device.type != "cuda":
        return SettingsError(f"{flag} needs GPUs, and this run is on a {device.type}", do=LEAVE_OUT)
    try:
        found = hasattr(_package(), library.buffer)
        why = f"the installed package deep_ep has no {library.buffer}"
    except (ImportError, OSError, AssertionError) as error:  # its own checks of NCCL are assertions
        found, why = False, f"the package deep_ep cannot be imported: {error}"
    return None if found else SettingsError(flag, why, f"install {library.source}; or {LEAVE_OUT}")


def library_dispatcher(mesh: Mesh, otherwise: Callable) -> Callable:
    """What makes the dispatchers of a layer by the library of `mesh.ep_library`, from the arguments of `Dispatcher`.

    otherwise: the same without a library, for tensors without values
    """
    backend, sms = mesh.ep_library
    kind = dict(deepep=DeepEPDispatcher, hybridep=HybridEPDispatcher)[backend]

    def make(experts: torch.Tensor, number: int, ep: Axis, drops: bool, counts=None):
        if experts.is_meta:
            return otherwise(experts, number, ep, drops, counts)
        return kind(experts, number, ep, mesh.ep_buffers, sms)

    return make


class DeepEPDispatcher:
    """Sends each token once to each rank with some of its experts, by DeepEP.

    experts, number, ep: as of `Dispatcher`. buffers: those of the rank's libraries so far. sms: multiprocessors for it
    """

    counts = None  # recomputation asks the library again

    def __init__(self, experts: torch.Tensor, number: int, ep: Axis, buffers: dict, sms: Optional[int]):
        self.ep, self.number, self.buffers, self.sms = ep, number, buffers, sms
        chosen = experts.masked_fill(experts >= number, -1)
        self.experts = chosen.to(getattr(_package(), "topk_idx_t", torch.int64)).contiguous()

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Dispatcher.dispatch`."""
        _check_format(x, "DeepEP")
        self.buffer = _deepep_buffer(self.buffers, self.ep, x.shape[1], self.sms)
        sent, own = _DeepEPDispatch(self.buffer, self.experts, self.number), self.number // self.ep.size
        x, weights = mappings.exchanged(sent, x, weights.float())
        self.handle = sent.handle
        experts = sent.experts.long()
        experts = experts.masked_fill(experts < 0, own)
        numbers = collectives.count_kinds(experts.flatten(), own)
        counts = Counts(sum(sent.lengths), [], [], numbers, Rows(numbers, sum(sent.lengths), sent.lengths))
        self._local = Dispatcher(experts, own, self.ep.alone, True, counts)
        rows = self._local.dispatch(x, weights)
        self.rows = self._local.rows
        return rows

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """See `Dispatcher.combine`."""
        return mappings.exchanged(_DeepEPCombine(self.buffer, self.handle), self._local.combine(y))[0]


class _DeepEPExchange:
    """What `mappings.Exchange` says, by DeepEP. Its kernels run on its own stream, and leave an event."""

    def __init__(self, buffer: Any, handle: Any = None):
        self.buffer, self.handle, self.flying = buffer, handle, None

    def wait(self) -> Tensors:
        (arrived, event), self.flying = self.flying, None
        event.current_stream_wait()
        return arrived


class _DeepEPDispatch(_DeepEPExchange):
    """Tokens [n, h] and weights [n, k] -> those that arrive; then `experts`, counted from this rank's first, -1 for those
    of other ranks, `lengths`, the rows of each of this rank's experts, and `handle`.
    """

    def __init__(self, buffer: Any, experts: torch.Tensor, number: int):
        super().__init__(buffer)
        self.sent = experts
        to_ranks, to_nodes, to_experts, reached, _ = buffer.get_dispatch_layout(experts, number)
        self.layout = dict(
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            num_tokens_per_expert=to_experts,
            is_token_in_rank=reached,
        )

    def start(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        x, weights = (one.contiguous() for one in tensors)
        found = self.buffer.dispatch(x, topk_idx=self.sent, topk_weights=weights, async_finish=True, **self.layout)
        x, self.experts, weights, self.lengths, self.handle, event = found  # the host has waited for the lengths
        self.sent = self.layout = None
        self.flying = (x, weights), event
        return x, weights

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        x, weights = (one.contiguous() for one in gradients)
        x, weights, event = self.buffer.combine(x, self.handle, topk_weights=weights.float(), async_finish=True)
        self.flying = (x, weights), event


class _DeepEPCombine(_DeepEPExchange):
    """The sums of each rank, in the order in which tokens arrived -> the sums of these for tokens [n, h]."""

    def start(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        y, _, event = self.buffer.combine(tensors[0].contiguous(), self.handle, async_finish=True)
        self.flying = (y,), event
        return (y,)

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        y, *_, event = self.buffer.dispatch(gradients[0].contiguous(), handle=self.handle, async_finish=True)
        self.flying = (y,), event


class HybridEPDispatcher:
    """Sends each token once to each rank with some of its experts, and orders its rows there, by HybridEP. Arguments as of
    `DeepEPDispatcher`. All ranks of ep have equally many tokens, and in all steps.
    """

    counts = None

    def __init__(self, experts: torch.Tensor, number: int, ep: Axis, buffers: dict, sms: Optional[int]):
        self.experts, self.number, self.ep, self.buffers, self.sms = experts, number, ep, buffers, sms

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Dispatcher.dispatch`."""
        _check_format(x, "HybridEP")
        own = self.number // self.ep.size
        self.buffer = _hybridep_buffer(self.buffers, self.ep, x.shape, own, self.sms)
        # [n, E + 1]: pairs without an expert are last
        empty = weights.new_zeros(len(x), self.number + 1, dtype=torch.float32)
        weights = empty.scatter(1, self.experts, weights.float())[:, :-1]
        chosen = empty.to(torch.bool).scatter(1, self.experts, True)[:, :-1]
        sent = _HybridEPDispatch(self.buffer, chosen.contiguous(), own)
        rows, factors = mappings.exchanged(sent, x, weights)
        self.handle, self.lengths = sent.handle, sent.lengths
        self.rows = Rows(to_device(self.lengths, torch.int64, x.device), len(rows), self.lengths)
        return rows, factors.unsqueeze(1)

    def combine(self, y: torch.Tensor) -> torch.Tensor:
        """See `Dispatcher.combine`."""
        return mappings.exchanged(_HybridEPCombine(self.buffer, self.handle, sum(self.lengths)), y)[0]


class _HybridEPExchange:
    """What `mappings.Exchange` says, by HybridEP, whose kernels run on the current stream."""

    arrived: Tensors = ()

    def wait(self) -> Tensors:
        arrived, self.arrived = self.arrived, ()
        return arrived


class _HybridEPDispatch(_HybridEPExchange):
    """Tokens [n, h] and weights [n, E] -> rows [m, h] and weights [m]; then `lengths` and `handle`, as of DeepEP.

    chosen: [n, E] bool, the experts of each token. own: experts of this rank
    """

    def __init__(self, buffer: Any, chosen: torch.Tensor, own: int):
        self.buffer, self.chosen, self.own = buffer, chosen, own

    def start(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        x, weights = (one.contiguous() for one in tensors)
        asked = dict(routing_map=self.chosen, num_of_experts_per_rank=self.own)
        x, weights, _, lengths, self.handle = self.buffer.dispatch_with_permute(hidden=x, probs=weights, **asked)
        self.lengths, self.chosen = lengths.tolist(), None
        self.arrived = x, weights
        return self.arrived

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        x, weights = (one.contiguous() for one in gradients)
        self.arrived = self.buffer.combine_with_unpermute(hidden=x, probs=weights.float(), handle=self.handle)


class _HybridEPCombine(_HybridEPExchange):
    """What this rank's experts made of rows, [m, h] -> the sums for tokens, [n, h]."""

    def __init__(self, buffer: Any, handle: Any, m: int):
        self.buffer, self.handle, self.m = buffer, handle, m

    def start(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        y, _ = self.buffer.combine_with_unpermute(hidden=tensors[0].contiguous(), handle=self.handle)
        self.arrived = (y,)
        return self.arrived

    def start_back(self, gradients: Sequence[torch.Tensor]) -> None:
        asked = dict(handle=self.handle, num_permuted_tokens=self.m)
        y, *_ = self.buffer.dispatch_with_permute(hidden=gradients[0].contiguous(), **asked)
        self.arrived = (y,)


# ---- the memory that a library sends from and receives in: one for all layers of a rank


def _deepep_buffer(buffers: dict, ep: Axis, h: int, sms: Optional[int]) -> Any:
    """The buffer of this rank, which the ranks of ep make together at the first call."""
    if h not in buffers:
        kind = _package().Buffer
        if sms is not None:
            kind.set_num_sms(sms)
        configs = kind.get_dispatch_config(ep.size), kind.get_combine_config(ep.size)
        near, far = (
            max(getattr(config, size)(2 * h, ep.size) for config in configs)  # 2 bytes a number
            for size in ("get_nvl_buffer_size_hint", "get_rdma_buffer_size_hint")
        )
        buffers[h] = kind(ep.group, near, far)
    return buffers[h]


def _hybridep_buffer(buffers: dict, ep: Axis, shape: Sequence[int], own: int, sms: Optional[int]) -> Any:
    """The same of HybridEP, for tokens of a shape [n, h]. Raises SettingsError if ranks or steps differ in n."""
    n, h = shape
    if h not in buffers:
        several = sorted(set(collectives.all_gather_object(n, ep)))
        more = {} if sms is None else dict(num_sms_dispatch_api=sms, num_sms_combine_api=sms)
        sizes = dict(hidden_dim=h, max_num_of_tokens_per_rank=n, num_local_experts=own)
        made = _package().HybridEPBuffer(group=ep.group, **sizes, **more) if len(several) == 1 else None
        buffers[h] = several, made
    several, made = buffers[h]
    if several != [n]:
        numbers = " and ".join(map(str, sorted({*several, n})))
        raise SettingsError(
            "--moe-flex-dispatcher-backend hybridep needs equally many tokens on all ranks of ep, and in all steps",
            f"there are {numbers}",
            f"use deepep; or {LEAVE_OUT}",
        )
    return made


def _package() -> Any:
    return importlib.import_module("deep_ep")


def _check_format(x: torch.Tensor, library: str) -> None:
    """Raise SettingsError for tokens in a format that the libraries do not send."""
    name = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}.get(x.dtype, str(x.dtype))
    if name not in FORMATS:
        raise SettingsError(
            f"{library} sends tokens in {' or '.join(FORMATS)}, and those of this run are {name}",
            do=f"--bf16; or {LEAVE_OUT}",
        )
