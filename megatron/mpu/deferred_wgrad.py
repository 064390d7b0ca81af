# SPDX-License-Identifier: Apache-2.0
"""Deferred weight gradients (W of zero-bubble schedules): the backward pass makes gradients of inputs at once.

The previous pipeline stage needs the gradient of a layer's input (dgrad) at once; no rank waits for that of its weight
(wgrad). While a pass `collect`s, linear layers leave the product that makes the weight's gradient here;
`run_deferred_wgrads` does these products later:

    waiting = attach_weight_grad_store(stages)
    with waiting.collect() as products:
        torch.autograd.backward(y, gradient)  # pass I
    ...
    run_deferred_wgrads(products)  # pass W

Under sequence parallelism such a product gathers its input again: while the product before it is made.

The output layer leaves its product here, too (`mpu/cross_entropy.py`). Gradients of norms, biases and embeddings are cheap
and stay in pass I, and so do those of a layer whose input needs no gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Optional

import torch

# A weight and what gives its gradient; or several weights, and what gives a gradient for each.
Product = tuple[torch.Tensor | Sequence[torch.Tensor], Callable[[], torch.Tensor | Sequence[torch.Tensor]]]


class WeightGradStore:
    """Where the linear layers of a rank leave the products of pass W. Not collecting, it changes nothing."""

    def __init__(self):
        self._products: Optional[list[Product]] = None

    @property
    def collecting(self) -> bool:
        """Whether products wait; otherwise they are made at once."""
        return self._products is not None

    @contextmanager
    def collect(self) -> Iterator[list[Product]]:
        """Products of the backward passes inside are kept in the list that this gives."""
        self._products = products = []
        try:
            yield products
        finally:
            self._products = None

    def defer(self, weight: torch.Tensor | Sequence[torch.Tensor], product: Callable) -> None:
        """For the backward pass of a layer: the product that is its weight's gradient, for later or for now."""
        if self._products is None:
            run_deferred_wgrads([(weight, product)])
        else:
            self._products.append((weight, product))


def attach_weight_grad_store(modules: Iterable[torch.nn.Module]) -> WeightGradStore:
    """One `WeightGradStore` for all linear layers in `modules`."""
    shared = WeightGradStore()
    for module in modules:
        for layer in module.modules():
            if hasattr(layer, "weight_grad_store"):
                layer.weight_grad_store = shared
    return shared


def wgrad_defer_function(
    deferred: Optional[WeightGradStore], x: torch.Tensor, weight: torch.Tensor
) -> Optional[Callable]:
    """What takes the product for the gradient of a weight that x is multiplied with; None: autograd does.

    Else autograd must not see the weight: where a gradient is missing it would call the weight's hooks without one.
    """
    if deferred is None or not (x.requires_grad and weight.requires_grad):
        return None
    return partial(deferred.defer, weight)


def run_deferred_wgrads(products: list[Product]) -> None:
    """Do the products, in the order in which they came, and accumulate them as a backward pass would: hooks included."""
    while products:
        weight, product = products.pop(0)
        for ready in (product, *(behind for _, behind in products[:1])):
            getattr(ready, "start", _nothing)()  # what it gathers is on its way while the one before is made
        with torch.no_grad():
            gradients = product()
        weights, gradients = ([weight], [gradients]) if isinstance(weight, torch.Tensor) else (weight, gradients)
        shaped = [one.view(own.shape).to(own.dtype) for own, one in zip(weights, gradients)]
        torch.autograd.backward(weights, shaped)


def _nothing() -> None:
    pass
