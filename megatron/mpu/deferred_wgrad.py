# SPDX-License-Identifier: Apache-2.0
"""Deferred weight gradients (W of zero-bubble schedules): the backward pass first computes only gradients of inputs.

The previous pipeline stage needs the gradient of a layer's input (dgrad) immediately; no rank waits for that of its weight
(wgrad). While a pass `collect`s, linear layers store the products for weight gradients here;
`run_deferred_wgrads` computes them later:

    waiting = attach_weight_grad_store(stages)
    with waiting.collect() as products:
        torch.autograd.backward(y, gradient)  # pass I
    ...
    run_deferred_wgrads(products)  # pass W

Under sequence parallelism such a product gathers its input again, overlapped with the previous product.

The output layer also defers its product (`mpu/cross_entropy.py`). Gradients of norms, biases and embeddings are cheap
and stay in pass I, and so do those of a layer if its input needs no gradient.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Optional

import torch

# A weight and a function that returns its gradient; or several weights, and a function that returns one for each.
Product = tuple[torch.Tensor | Sequence[torch.Tensor], Callable[[], torch.Tensor | Sequence[torch.Tensor]]]


class WeightGradStore:
    """Stores the products of pass W of a rank's linear layers. While it does not collect, it runs them immediately."""

    def __init__(self):
        self._products: Optional[list[Product]] = None

    @property
    def collecting(self) -> bool:
        """Whether products are deferred; otherwise they are computed immediately."""
        return self._products is not None

    @contextmanager
    def collect(self) -> Iterator[list[Product]]:
        """A context that yields a list, to which backward passes inside add their products."""
        self._products = products = []
        try:
            yield products
        finally:
            self._products = None

    def defer(self, weight: torch.Tensor | Sequence[torch.Tensor], product: Callable) -> None:
        """Store the product for a weight's gradient, or run it if not collecting. Layers call it in their backward pass."""
        if self._products is None:
            run_deferred_wgrads([(weight, product)])
        else:
            self._products.append((weight, product))


def attach_weight_grad_store(modules: Iterable[torch.nn.Module]) -> WeightGradStore:
    """Attach one new `WeightGradStore` to all linear layers in `modules`, and return it."""
    shared = WeightGradStore()
    for module in modules:
        for layer in module.modules():
            if hasattr(layer, "weight_grad_store"):
                layer.weight_grad_store = shared
    return shared


def wgrad_defer_function(
    deferred: Optional[WeightGradStore], x: torch.Tensor, weight: torch.Tensor
) -> Optional[Callable]:
    """A function that receives the product for the weight's gradient; None: autograd computes it.

    With a function, autograd must not see the weight, whose hooks it would call without a gradient.
    """
    if deferred is None or not (x.requires_grad and weight.requires_grad):
        return None
    return partial(deferred.defer, weight)


def run_deferred_wgrads(products: list[Product]) -> None:
    """Run the products in order, and accumulate the gradients as a backward pass would, with hooks."""
    while products:
        weight, product = products.pop(0)
        for ready in (product, *(following for _, following in products[:1])):
            getattr(ready, "start", _nothing)()  # its input is gathered while the previous product runs
        weights = [weight] if isinstance(weight, torch.Tensor) else weight
        with torch.enable_grad():
            owed = _Owed.apply(product, *weights)
        owed.backward()


class _Owed(torch.autograd.Function):
    """0, whose gradients of `weights` are what `product` returns. So autograd alone holds them, and copies none of them."""

    @staticmethod
    def forward(ctx, product, *weights):
        ctx.product, ctx.like = product, [(weight.shape, weight.dtype) for weight in weights]
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx, _):
        gradients = ctx.product()
        gradients = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        del ctx.product  # and what it has saved
        return None, *(one.view(shape).to(dtype) for one, (shape, dtype) in zip(gradients, ctx.like))


def _nothing() -> None:
    pass
