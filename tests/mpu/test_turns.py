# SPDX-License-Identifier: Apache-2.0
"""Two passes that take turns: their order, their state, errors, and messages under way while the other one computes."""

import signal
import threading

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from megatron.mpu import collectives, mappings
from megatron.mpu.mesh import Mesh
from megatron.mpu.two_passes import TwoPasses, pass_turn, swap_attribute
from megatron.telemetry import rank_times


def passes(events, name, turns, after=lambda place: None):
    """A function that notes its parts and passes its turn between them."""

    def work():
        for place in range(turns):
            events.append(f"{name}{place}")
            after(place)
            pass_turn()
        events.append(f"{name} ends")

    return work


def test_the_order_is_that_of_the_turns():
    events = []
    with TwoPasses() as turns:
        turns.run(passes(events, "f", 3), passes(events, "b", 1))
        turns.run(passes(events, "F", 0), passes(events, "B", 2))
        turns.run(passes(events, "x", 1), passes(events, "y", 3))
    assert " ".join(events) == ("f0 b0 f1 b ends f2 f ends F ends B0 B1 B ends x0 y0 x ends y1 y2 y ends")
    pass_turn()  # without turns it does nothing
    assert TwoPasses.active is None and "second pass" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("place", [0, 1])
def test_an_error_of_one_pass_stops_the_other(first, place):
    """It is raised as it was, and the turns can be used again."""
    events = []

    def fail(now):
        if now == place:
            raise KeyError("lost")

    failing, other = passes(events, "x", 3, fail), passes(events, "y", 3)
    with TwoPasses() as turns:
        with pytest.raises(KeyError, match="lost"):
            turns.run(*(failing, other) if first else (other, failing))
        assert "x ends" not in events and "y ends" not in events
        assert events.count("y0") == (not first or place > 0)  # a pass that has not begun does not begin
        turns.run(passes(events, "f", 1), passes(events, "b", 1))
    assert events[-4:] == ["f0", "b0", "f ends", "b ends"]


def test_an_interrupt_during_the_turn_of_the_other():
    """The main thread waits then: the other pass goes on until it passes the turn, and both end."""
    events = []

    def interrupt(place):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not turns._errors[0]:  # the main thread has noticed
            pass

    with TwoPasses() as turns:
        with pytest.raises(KeyboardInterrupt):
            turns.run(passes(events, "f", 2), passes(events, "b", 2, interrupt))
    assert events == ["f0", "b0"]


class Holder:
    value = 0


def test_values_of_a_pass_are_for_this_pass_only():
    seen, holder = {"f": [], "b": []}, Holder()

    def work(name, own):
        with swap_attribute(holder, "value", own):
            for _ in range(3):
                seen[name].append(holder.value)
                holder.value += 1
                with swap_attribute(holder, "value", -own):
                    pass_turn()
                    seen[name].append(holder.value)
        seen[name].append(holder.value)

    with TwoPasses() as turns:
        turns.run(lambda: work("f", 10), lambda: work("b", 50))
    assert seen["f"] == [10, -10, 11, -10, 12, -10, 0] and seen["b"] == [50, -50, 51, -50, 52, -50, 0]


def test_random_numbers_and_grad_mode_of_a_pass():
    """Those of the pass without the other one."""

    def work(seed, mode):
        drawn = []
        torch.manual_seed(seed)
        with mode():
            for _ in range(3):
                drawn.append(torch.rand(2))
                pass_turn()
            drawn.append(torch.is_grad_enabled())
        return drawn

    alone = work(1, torch.no_grad), work(2, torch.enable_grad)
    found = {}
    with TwoPasses() as turns:
        turns.run(lambda: found.update(f=work(1, torch.no_grad)), lambda: found.update(b=work(2, torch.enable_grad)))
    for own, wanted in zip(found.values(), alone, strict=True):
        assert own[-1] == wanted[-1] and all(map(torch.equal, own[:-1], wanted[:-1]))


class Counting(TorchFunctionMode):
    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **kwargs or {})


def test_modes_around_a_step_hold_in_both_passes():
    x = torch.ones(2)

    def work():
        torch.add(x, 1)
        pass_turn()

    with Counting() as functions, FlopCounterMode(display=False) as products, TwoPasses() as turns:
        before = functions.count
        turns.run(work, lambda: (work(), torch.mm(torch.ones(2, 3), torch.ones(3, 4))))
        assert functions.count - before >= 5 and products.get_total_flops() == 2 * 2 * 3 * 4


def test_the_second_thread_counts_as_the_main_one(monkeypatch):
    """Its time on a core is the rank's own time, which finds slow ranks."""
    main, read = threading.main_thread(), {"main": 0.0, "second": 100.0}

    def usage(self):
        name = "main" if threading.current_thread() is main else "second"
        read[name] += 3.0
        return read[name], 0.5 * read[name]

    monkeypatch.setattr(rank_times.ThreadUsage, "read", usage)
    times = rank_times.HostTimes(waits=False)
    with rank_times.RankTimes.measuring(times), TwoPasses() as turns:
        before = times.take()
        turns.run(lambda: pass_turn(), lambda: pass_turn())
        taken = times.take()
    assert before["cpu"] == 3.0 and taken["cpu"] == 3.0 + 3.0 and taken["queue"] == 1.5 + 1.5


# ---- messages ------------------------------------------------------------------------------------------------------------


class Late:
    """A message that arrives when it is waited for: until then there is nothing in the rows."""

    under_way, launches = 0, 0

    def __init__(self, start, arrived, x, *how):
        self.arrived, self.rows = arrived, torch.empty_like(arrived)
        self.work = start(self.rows, x, *how)
        arrived.fill_(torch.nan)
        Late.under_way += 1
        Late.launches += 1

    def wait(self):
        self.work.wait()
        self.arrived.copy_(self.rows)
        Late.under_way -= 1


class Product(torch.autograd.Function):
    """x w; notes what the pass is, how many messages are under way, and who else computes."""

    @staticmethod
    def forward(ctx, x, w, noted):
        ctx.save_for_backward(x, w)
        ctx.noted = noted
        noted.append(("F", Late.under_way))
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        ctx.noted.append(("B", Late.under_way))
        return gradient @ w.t(), x.t() @ gradient, None


def layers_of_experts(rank, x, weights, axis, noted):
    sent = [[2, 1], [3, 2]][rank]
    for w in weights:
        x = Product.apply(x, w, noted)
        rows = mappings.all_to_all(x, axis, sent, [2, 3] if rank == 0 else [1, 2])
        rows = Product.apply(rows.tanh(), w, noted)
        x = x + mappings.all_to_all(rows, axis, [2, 3] if rank == 0 else [1, 2], sent)
    return x


def trained(rank, in_turns):
    """The gradients of two micro-batches, F0 F1 & B0 B1."""
    axis, noted, generator = Mesh(rank, ep=2, shard=2).ep, [], torch.Generator().manual_seed(rank)
    weights = [torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(3)]
    xs = [torch.randn(3 + 2 * rank, 4, generator=generator).requires_grad_() for _ in range(2)]
    start, ys = collectives.start_all_to_all, {}
    collectives.start_all_to_all = lambda *args: Late(start, *args)
    forward = lambda n: ys.update({n: layers_of_experts(rank, xs[n], weights, axis, noted)})
    backward = lambda n: (ys[n] * ys[n].detach()).sum().backward()
    forward(0)
    if in_turns:
        with TwoPasses() as turns:
            turns.run(lambda: forward(1), lambda: backward(0))
    else:
        forward(1)
        backward(0)
    backward(1)
    return [x.grad for x in (*weights, *xs)], noted, Late.launches


def test_messages_are_under_way_while_the_other_pass_computes(run_ranks):
    """Gradients to the bit. Each product of a pair runs while a message of the other pass is under way, but for the first
    of the forward pass and the last of the backward pass.
    """
    wanted, found = (run_ranks(2, trained, in_turns) for in_turns in (False, True))
    for (gradients, apart, launches), (own, noted, others) in zip(wanted, found, strict=True):
        assert launches == others == 2 * 2 * 2 * 3  # passes, micro-batches, exchanges of a layer, layers
        assert all(map(torch.equal, gradients, own)) and not any(under_way for _, under_way in apart)
        pair = noted[6:-6]
        assert "".join(kind for kind, _ in pair) == "F" + "FB" * 5 + "B"  # B begins with an exchange
        assert [under_way for _, under_way in pair] == [0] + [1] * 10 + [0]
