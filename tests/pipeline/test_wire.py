# SPDX-License-Identifier: Apache-2.0
"""What a rank sends outlives its sending, and nobody waits for that: against a neighbour that takes its time."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron.mpu.mesh import Axis
from megatron.pipeline import wire
from megatron.pipeline.wire import P2PCommunicator
from megatron.telemetry.lanes import Recording


class Work:
    """A message that the neighbour has not taken yet."""

    def __init__(self):
        self.done = self.waited_for = False

    def is_completed(self):
        return self.done

    def wait(self):
        self.waited_for = True


@pytest.fixture
def sent(monkeypatch):
    """What was sent, in order."""
    works = []

    def isend(x, *args, **kwargs):
        works.append(Work())
        return works[-1]

    monkeypatch.setattr(wire, "dist", SimpleNamespace(isend=isend))
    return works


def _wire(device):
    """Of rank 0 of two. The device is a name: messages are on the CPU."""
    return P2PCommunicator(Axis("pp", (0, 1)), (2, 4), torch.float32, torch.device(device))


def _send(on, micro):
    x = torch.ones(2, 4)
    on.send(x, 1, "F", micro, 1)
    return weakref.ref(x)


def test_memory_is_kept_until_a_message_is_known_to_have_left(sent):
    on = _wire("cuda")
    first, second = _send(on, 0), _send(on, 1)
    assert first() is not None and second() is not None
    sent[0].done = True
    third = _send(on, 2)  # a look at the others
    assert first() is None and second() is not None and third() is not None
    assert not any(work.waited_for for work in sent)


def test_an_answer_orders_what_is_freed_behind_the_sending(sent):
    """The device has to wait, which is over: memory that is given to others is written by what it is told later."""
    on = _wire("cuda")
    first, second = _send(on, 0), _send(on, 1)
    on.arrived("F", 0, 1)
    assert first() is None and sent[0].waited_for
    assert second() is not None and not sent[1].waited_for


def test_at_the_end_of_a_step_a_device_waits_for_nothing_and_keeps_what_is_under_way(sent):
    on = _wire("cuda")
    first, second = _send(on, 0), _send(on, 1)
    sent[0].done = True
    on.finish()
    assert first() is None and second() is not None
    assert not any(work.waited_for for work in sent)


def test_at_the_end_of_a_step_a_host_waits_for_its_sends(sent):
    on = _wire("cpu")
    first, second = _send(on, 0), _send(on, 1)
    on.finish()
    assert first() is None and second() is None
    assert all(work.waited_for for work in sent)


def test_only_while_steps_are_recorded_a_message_is_noted(sent):
    on = _wire("cpu")
    _send(on, 0)
    with Recording.of(Recording("cpu")):
        _send(on, 1)
    first, second = (work for work, _ in on._sent.values())
    assert first is sent[0] and second is not sent[1]
