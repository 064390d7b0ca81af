# SPDX-License-Identifier: Apache-2.0
"""GPTQ (arXiv:2210.17323): round a layer's weights so that its outputs change little on the inputs of a calibration text.

The columns of a weight are rounded in order. The error of each one is corrected by the columns after it, as far as inputs
are correlated: H = X^T X of the layer's inputs X [tokens, i] says how. Layers are quantized block by block, on the inputs
that the quantized blocks before give.

With tensor parallel ranks, H is of the whole inputs. A row-parallel layer, whose ranks have parts of the inputs, is
quantized whole on each of them: results are those of one process.

Legend: n tokens, i inputs, o outputs of this rank, g groups of i, s sequence, b windows side by side, h hidden.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.inference.calibration import calibration_windows
from megatron.inference.quantize import Codes, Rounded, attach, free_weights
from megatron.model.facts import Facts
from megatron.model.fake_quantize import has_part
from megatron.model.quantization import QuantizeOptions
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis
from megatron.telemetry.progress import followed

DAMPING = 0.01  # of the mean of H's diagonal, added to it: H of few tokens has no inverse
COLUMNS = 128  # whose corrections of later columns are one product
LONGEST = 2048  # tokens of a window
BATCH = 4  # windows side by side

Grid = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # [o, k] -> (scale [o, 1], zero [o, 1])


def gptq(
    weight: torch.Tensor, hessian: torch.Tensor, grid: Grid, least: int, largest: int, group_size: Optional[int]
) -> Codes:
    """Round a weight [o, i] to whole numbers from `least` to `largest`. hessian: X^T X of its inputs, [i, i].

    Zeros, such as those of a mask, stay zeros, and other weights correct the outputs for it (arXiv:2301.00774).
    group_size: inputs that share a scale, which follows from their weights as corrected so far; None: one for all
    """
    left, columns, stays = weight.float().clone(), weight.shape[1], weight != 0
    corrections = _corrections(hessian).float()
    size = group_size or columns
    step = size * max(1, COLUMNS // size) if group_size else COLUMNS
    values, scales, zeros = torch.empty_like(left), [], []
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        errors = left.new_empty(len(left), stop - start)
        for column in range(start, stop):
            if column % size == 0:
                own = slice(column, column + size)
                scale, zero = grid((left[:, own] * stays[:, own]).to(weight.dtype))
                scales.append(scale)
                zeros.append(zero)
            now = left[:, column : column + 1]
            code = (now * stays[:, column : column + 1] / scale.float() + zero).round_().clamp_(least, largest)
            error = (now - (code - zero) * scale.float()) / corrections[column, column]
            values[:, column : column + 1] = code
            errors[:, column - start : column - start + 1] = error
            left[:, column:stop] -= error * corrections[column, column:stop]
        left[:, stop:] -= errors @ corrections[start:stop, stop:]
    return Codes(values, torch.cat(scales, 1), torch.cat(zeros, 1))


def _corrections(hessian: torch.Tensor) -> torch.Tensor:
    """The upper Cholesky factor of H's inverse, in fp64. Inputs that are always 0 correct nothing."""
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


# ---- a model ---------------------------------------------------------------------------------------------------------


def quantize_model(model: nn.Module, facts: Facts, how: QuantizeOptions, longest: int) -> str:
    """Quantize the linear layers of a loaded model, and free their weights. Returns a notice on the text.

    Raises SettingsError for a model or a layout that cannot be calibrated, DataError for a text that does not suit it.
    """
    if not (hasattr(model, "logits") and hasattr(model, "blocks")) or hasattr(model, "decode"):
        raise SettingsError(
            f"--quantize-method gptq: models that continue texts are calibrated, and not a {facts.settings.model_type} or "
            "pipeline stages",
            do="--pipeline-model-parallel-size 1; python -m megatron.tools.checkpoint quantize writes a checkpoint that "
            "any layout loads; --quantize-method round is for all models",
        )
    chosen = attach([model], facts, how)
    if trained := [name for name, layer in chosen.items() if hasattr(layer.product, "trained")]:
        raise SettingsError(
            f"--quantize-method gptq: {trained[0]} was trained with --quantization, which has found its own values",
            do="leave --quantize-method out",
        )
    device = next(model.parameters()).device
    length, asked = min(longest, LONGEST), how.calibration_samples
    windows = calibration_windows(how.calibration_data or [], length, asked, facts.vocab_size)
    with torch.no_grad():
        _calibrate(model, chosen, [batch.to(device) for batch in torch.from_numpy(windows.T).split(BATCH, 1)])
    free_weights([model], chosen)
    fewer = f" (--calibration-samples {asked}: there are no more)" * (len(windows) < asked)
    return f"calibrated on {len(windows)} windows of {length} tokens{fewer}"


def _calibrate(model: nn.Module, chosen: Mapping[str, nn.Module], batches: Sequence[torch.Tensor]) -> None:
    """Quantize block by block. Until its layers are quantized, a block multiplies by its own weights."""
    products = {name: layer.product for name, layer in chosen.items()}
    for layer in chosen.values():
        layer.product = None
    passes = [_first_input(model, tokens) for tokens in batches]
    for number, block in followed(model.blocks.items(), "quantizing", len(model.blocks), "layers"):
        own = {name: layer for name, layer in chosen.items() if name.startswith(f"blocks.{number}.")}
        with _observed(own) as hessians:
            for x, rest in passes if own else ():
                _through(model, block, x, rest)
        for name, layer in own.items():
            layer.product = products[name]
            layer.product.hold(layer.product.operand(_quantized(layer, layer.product, hessians.pop(name))))
        passes = [(_through(model, block, x, rest), rest) for x, rest in passes]


def _quantized(layer: nn.Module, product: Rounded, hessian: torch.Tensor) -> Codes:
    """This rank's part of the weight of a layer, rounded."""
    weight, cut = layer.weight.flatten(0, -2), has_part(layer) and layer.tp.size > 1
    if not cut:
        return gptq(weight, hessian, product.grid, product.least, product.largest, product.group_size)
    whole = collectives.all_gather(weight, layer.tp, 1)
    found = gptq(whole, hessian, product.grid, product.least, product.largest, product.group_size)
    part = lambda x: x.chunk(layer.tp.size, 1)[layer.tp.rank] if x.shape[1] > 1 else x
    return Codes(*map(part, found))


@contextmanager
def _observed(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """A context in which X^T X of the inputs of layers is summed, under their names."""
    sums: dict[str, torch.Tensor] = {}

    def observe(name: str, tp: Optional[Axis], x: torch.Tensor) -> None:
        rows = x.detach().flatten(0, -2)  # [n, i]
        rows = (rows if tp is None else collectives.all_gather(rows, tp, 1)).float()
        sums[name] = rows.t() @ rows + sums.get(name, 0.0)

    hooks = []
    for name, layer in layers.items():
        tp = layer.tp if has_part(layer) and layer.tp.size > 1 else None
        hooks.append(layer.register_forward_pre_hook(lambda _, args, name=name, tp=tp: observe(name, tp, args[0])))
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()


class _Reached(Exception):
    """Ends a pass at the first block."""


def _first_input(model: nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    """(x [s, b, h], the other arguments) of the first block."""
    found = []

    def stop(_, args):
        found.extend(args)
        raise _Reached

    hook = next(iter(model.blocks.values())).register_forward_pre_hook(stop)
    try:
        model.logits(tokens)
    except _Reached:
        pass
    finally:
        hook.remove()
    return found[0], tuple(found[1:])


def _through(model: nn.Module, block: nn.Module, x: torch.Tensor, rest: tuple) -> torch.Tensor:
    with model.region():
        y = block(x, *rest)
    return y[0] if isinstance(y, tuple) else y
