# SPDX-License-Identifier: Apache-2.0
"""What is not kept and computed again gives the gradients of what is kept, whoever reads it, and is freed at once."""

import gc
import weakref

import pytest
import torch

from megatron.model.recompute import recompute_output
from megatron.mpu.discarded import Discarded


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear_twice(y):
    return (y @ numbers(4, 3)).sum() + (y[1:] * y[:-1].detach()).sum()


def changed_in_place(y):
    return y.mul(2).sin_().sum() + y.view(-1).exp().sum()


def outside_its_graph(y):
    """The product with a detached y comes first in the backward pass or last: its node does not know y's."""
    w = numbers(6, 4, seed=2).requires_grad_()
    return (y * y.detach()).sum() + (w * y.detach()).sum()


def unread(y):
    return y.sum()


@pytest.mark.parametrize("reader", [linear_twice, changed_in_place, outside_its_graph, unread])
def test_gradients_are_those_of_what_is_kept(reader):
    def gradients(again):
        x = numbers(6, 4).requires_grad_()
        function = lambda x: torch.tanh(x * x).square()
        if again:
            y, reading = recompute_output(function, x)
            with reading:
                loss = reader(y)
        else:
            loss = reader(function(x))
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        return loss, first, torch.autograd.grad(loss, x)[0]

    for got, want in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(got, want)


def test_a_reader_may_be_late():
    """A graph that holds a detached y runs when the one of y is over."""
    x, w = numbers(6, 4).requires_grad_(), numbers(6, 4, seed=1).requires_grad_()
    y, reading = recompute_output(torch.sin, x)
    with reading:
        first, late = y.sum(), (w * y.detach()).sum()
    first.backward()
    late.backward()
    assert torch.equal(w.grad, x.detach().sin())


@pytest.mark.sampled(2)
def test_it_is_freed_without_a_garbage_collection_and_computed_once():
    runs, held = [], []

    def function(x):
        runs.append(1)
        made = x.sin()
        held.append(weakref.ref(made.untyped_storage()))
        return made

    x = numbers(6, 4).requires_grad_()
    gc.collect()
    gc.disable()
    try:
        before = x * 2
        y, reading = recompute_output(function, before)
        held_too = weakref.ref(before.untyped_storage())
        with reading:
            loss = (y * y).sum() + y.exp().sum()
        del y, reading, before
        assert held[0]() is None  # nothing keeps it for the backward pass
        loss.backward()
        del loss
        assert len(runs) == 2 and held[1]() is None and held_too() is None
    finally:
        gc.enable()


def test_a_tensor_that_changed_is_saved_as_usual():
    x = numbers(5).requires_grad_()
    y = x * 1.0
    with Discarded(y, lambda: pytest.fail("it was not discarded")):
        y.add_(1)
        loss = (y * y).sum()
    loss.backward()
    assert torch.equal(x.grad, 2 * (x.detach() + 1))


def test_nothing_is_discarded_without_a_gradient():
    x = numbers(4)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            y, reading = recompute_output(torch.sin, x)
            with reading:
                assert torch.equal(y, x.sin()) and not y.requires_grad
