# SPDX-License-Identifier: Apache-2.0
"""Generation and scoring with --batch-invariant-mode: log-probabilities have the bits that training computes, in batches of
any texts, token by token or all at once, and over other tensor and pipeline parallel ranks.

| what                              | in training            | here                                                      |
|-----------------------------------|------------------------|-----------------------------------------------------------|
| products, norms, activations      | s rows, of one sample  | a multiple of 16 rows, of any texts: a row does not       |
|                                   |                        | depend on their number (`refuse_other_bits` tries it)     |
| sums that tensor parallelism cuts | blocks, and their tree | the same (`model/ordered.py`)                             |
| attention                         | a block of queries     | its products, with fewer rows (`of_sample` of             |
|                                   |                        | fused_kernels/explicit_attention.py)                      |
| log sum exp over the vocabulary   | blocks                 | the same (`cross_entropy.ordered_log_sum`)                |

s is --seq-length of the training run: texts that are longer have no counterpart there.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.fused_kernels import EXPLICIT_KEYS, choose_kernel, cpu_ops, explicit_attention
from megatron.fused_kernels.explicit_attention import SAME_ROWS
from megatron.model.ordered import OrderedProduct, attach_ordered
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.cross_entropy import ordered_logits
from megatron.mpu.layers import matmul
from megatron.optimizer.ordered_rules import forward_problems
from megatron.settings import schema

FLAG = "--batch-invariant-mode"
INSTEAD = f"leave out {FLAG} (docs/generation.md#the-log-probabilities-of-training)"


def sample_length(chunk: nn.Module) -> Optional[int]:
    """Tokens of a sample whose bits a model of the mode computes; None: it is not in the mode."""
    return chunk.facts.settings.seq_length if getattr(chunk, "ordered", False) else None


def refuse_uncovered(config: schema.Config, quantize: QuantizeOptions, device: str, world: int) -> None:
    """Raise SettingsError for what the mode does not cover. config: of the model, with the layout of generation"""
    found = [f"--quantize {quantize.quantize}"] if quantize.quantize else []
    found += [f"--device {device}"] if torch.device(device).type != "cpu" else []
    found += [f"--precision {config.precision.precision}"] if config.precision.precision == "fp16" else []
    found += forward_problems(config, world)
    if found:
        raise SettingsError(f"{FLAG} does not cover {'; '.join(found)}", do=INSTEAD)


def make_invariant(chunks: Iterable[nn.Module], config: schema.Config) -> None:
    """Give the modules of a rank's chunks the sums of training. Raises SettingsError if they cannot have its bits here."""
    chunks = list(chunks)
    attach_ordered(chunks, config.model)
    for chunk in chunks:
        refuse_other_bits(chunk)


@torch.inference_mode()
def refuse_other_bits(chunk: nn.Module) -> None:
    """Raise SettingsError if a product or attention of random numbers has other bits with the rows of a pass than with
    those of a sample: kernels choose the order of sums by sizes, and may do so by the number of rows.
    """
    s, tried, draws = sample_length(chunk), set(), torch.Generator().manual_seed(1)
    random = lambda *shape: torch.randn(shape, generator=draws).to(chunk.dtype)
    for name, key, attempt in _attempts(chunk, s, random):
        if key not in tried and not attempt():
            raise SettingsError(
                f"{FLAG}: on this CPU, {name} has other bits for a few tokens than for a sample of {s}",
                f"torch {torch.__version__}, {torch.get_num_threads()} threads",
                INSTEAD,
            )
        tried.add(key)


def _attempts(chunk: nn.Module, s: int, random: Callable) -> Iterator[tuple[str, tuple, Callable[[], bool]]]:
    """(what is tried, the same for equal ones, function that tries it) of a stage."""
    for name, module in chunk.named_modules():
        if isinstance(getattr(module, "product", None), OrderedProduct):
            shape, product = module.weight.flatten(0, -2).shape, module.product
            run = lambda x, weight, product=product: product.forward(matmul(x), (x,), (weight,), None)
            key = shape, product.inputs, product.outputs
            own = (lambda *shape: random(*shape).float()) if hasattr(module, "routes_rows") else random
            yield f"the product of {name}", key, partial(_rows, run, partial(_packed, product), shape, s, own)
        elif hasattr(module, "sums_over_ranks"):  # of experts
            shape, run = module.weight.flatten(1, -2).shape[1:], lambda x, weight: matmul(x)(x, weight, None)
            yield f"the product of {name}", (shape,), partial(_rows, run, run, shape, s, random)
        elif hasattr(module, "decode_kernel"):
            yield f"{name}", ("attention", module.window), partial(_attention, module, s, random)
    if chunk.last:
        run = lambda x, weight: ordered_logits(x, weight, chunk.tp)
        packed = lambda x, weight: ordered_logits(x, weight, chunk.tp, cpu_ops.packed(weight))
        yield "the output layer", ("output",), partial(_rows, run, packed, chunk.output_weight.shape, s, random)


def _rows(run: Callable, packed: Callable, shape: tuple[int, int], s: int, random: Callable) -> bool:
    """Whether run(x, weight) has the same rows for all of x [s, k] as for some of them, and as packed(x, weight)."""
    x, weight = random(s, shape[1]), random(*shape)
    whole, packs = run(x, weight), cpu_ops.packs(weight)
    for count in (SAME_ROWS, 3 * SAME_ROWS, 8 * SAME_ROWS):
        taken = torch.arange(count).mul_(7).remainder_(s)
        for one in (run, packed) if packs else (run,):
            if not one(x[taken], weight).equal(whole[taken]):
                return False
    return True


def _packed(product: OrderedProduct, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of x and a weight as generation keeps it."""
    product.pack(weight)
    try:
        return product.forward_packed(x, None)
    finally:
        product.packed = None


def _attention(layer: nn.Module, s: int, random: Callable) -> bool:
    """Whether queries of a text that grows get the same result as all of a sample."""
    g, q, d, v = layer.groups, layer.queries, layer.head_dim, layer.value_dim
    query, key, value = random(s, 1, g, q, d), random(s, 1, g, d), random(s, 1, g, v)
    kernel = choose_kernel("attention", layer.case(query, s, s), layer.backend)
    if kernel.run is not explicit_attention.in_blocks:
        raise SettingsError(
            f"{FLAG}: training computes attention over {s} tokens by the kernel {kernel.name!r}, which has no counterpart "
            "for texts that grow",
            f"block-causal has one: up to {EXPLICIT_KEYS} tokens, without --attention-backend, --no-masked-softmax-fusion",
            INSTEAD,
        )
    more = dict(scale=layer.scale, softcap=layer.softcap, window=layer.window)
    more |= dict(sinks=layer.sinks(g)) if layer.has_sinks else {}
    whole = explicit_attention.in_blocks(query, key, value, causal=True, **more)
    for first, stop in ((0, s - 1), (s - 1, s), (s // 2, s // 2 + 1), (s // 3, s // 2)):
        own = explicit_attention.of_sample(query[first:stop], key[:stop], value[:stop], first=first, s=s, **more)
        if not own.equal(whole[first:stop]):
            return False
    return True
