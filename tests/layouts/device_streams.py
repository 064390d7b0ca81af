# SPDX-License-Identifier: Apache-2.0
"""When a GPU would wait: what a rank's host launches and waits for, played on the streams of a device.

The rules are NCCL's and CUDA's, not this suite's. Products run on one stream, one after the other. Each process group
has a stream of its own, which works in the order of the launches; a message begins there once the stream of the products
has done what it was given before the launch. `wait()` holds up the stream of the products until the message is done, and
nobody else. A product takes 1, a message `message`, all else no time. The rank runs on a CPU with real neighbours; its
clock is made up.
"""

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import torch

from megatron.fused_kernels import partial_attention, reference
from megatron.model.kinds.experts import grouped
from megatron.mpu import collectives, cross_entropy, layers


@dataclass
class Message:
    """One of a group: for how long the stream of the products stood still for it, and what was launched when."""

    kind: str
    group: str
    launched: int  # how many products were launched before
    end: float
    waited_behind: int = -1  # how many products were launched before the wait
    exposed: float = 0.0

    @property
    def at_once(self) -> bool:
        """Whether nothing was launched between launch and wait."""
        return self.launched == self.waited_behind


@dataclass
class Device:
    """The streams of one rank's device. Inside `with device.watched():` what the rank does is played on it. Products are
    those of linear layers, experts and the output layer, and the pieces of attention in a ring; other attention is not
    counted.
    """

    message: float
    now: float = 0.0  # of the stream of the products
    free: dict[str, float] = field(default_factory=dict)  # group -> when its stream has nothing to do
    products: int = 0
    messages: list[Message] = field(default_factory=list)

    def counted(self, product):
        def done(*args, **kwargs):
            self.products += 1
            self.now += 1
            return product(*args, **kwargs)

        return done

    def launch(self, kind: str, axis) -> Message:
        start = max(self.free.get(axis.label, 0.0), self.now)
        self.free[axis.label] = start + self.message
        self.messages.append(Message(kind, axis.label, self.products, start + self.message))
        return self.messages[-1]

    def wait(self, message: Message) -> None:
        message.waited_behind = self.products
        message.exposed = max(0.0, message.end - self.now)
        self.now = max(self.now, message.end)

    def forget(self) -> None:
        """What was so far is not looked at: the streams go on."""
        self.messages.clear()

    @contextlib.contextmanager
    def watched(self):
        with contextlib.ExitStack() as stack:
            for kind in ("all_reduce", "all_gather", "reduce_scatter"):
                for name in (f"start_{kind}", kind):
                    wrap = self._started if name.startswith("start") else self._done
                    stack.enter_context(mock.patch.object(collectives, name, wrap(kind, getattr(collectives, name))))
            exchange = self._exchanged(collectives.start_all_to_all)
            stack.enter_context(mock.patch.object(collectives, "start_all_to_all", exchange))
            stack.enter_context(mock.patch.object(collectives, "start_shift", self._shifted(collectives.start_shift)))
            for name in ("forward", "backward"):
                piece = staticmethod(self.counted(getattr(partial_attention.FlashOnCPU, name)))
                stack.enter_context(mock.patch.object(partial_attention.FlashOnCPU, name, piece))
            for name in ("times", "outer"):  # of experts
                stack.enter_context(mock.patch.object(grouped, name, self.counted(getattr(grouped, name))))
            product = self.counted(reference.matmul)
            for module in (layers, cross_entropy):
                stack.enter_context(mock.patch.object(module, "matmul", lambda x: product))
            stack.enter_context(mock.patch.object(torch, "addmm", self.counted(torch.addmm)))
            yield self

    def _started(self, kind, start):
        def started(*args):
            work, axis = start(*args), args[-1]
            return work if axis.size == 1 else _Work(self, self.launch(kind, axis), work)

        return started

    def _exchanged(self, start):
        def started(arrived, x, axis, *parts):
            work = start(arrived, x, axis, *parts)
            return _Work(self, self.launch("all_to_all", axis), work)

        return started

    def _shifted(self, start):
        def started(x, axis, *places):
            arrived, work = start(x, axis, *places)
            return arrived, _Work(self, self.launch("shift", axis), work)

        return started

    def _done(self, kind, function):
        def done(x, axis, *args):
            result = function(x, axis, *args)
            if axis.size > 1:
                self.wait(self.launch(kind, axis))
            return result

        return done


class _Work:
    def __init__(self, device: Device, message: Message, work):
        self.device, self.message, self.work = device, message, work

    def wait(self) -> None:
        self.work.wait()
        self.device.wait(self.message)
