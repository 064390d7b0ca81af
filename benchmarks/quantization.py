# SPDX-License-Identifier: Apache-2.0
"""Losses of quantized models, after training and with quantization aware training, against torchao at the same bits.

    python -m benchmarks.quantization --run runs/quickstart --steps 100

Both sides are the same checkpoint, in fp32: this suite's model, and transformers' GPT-2 with nn.Linear layers for torchao.
Both are trained by the same loop, on the same windows. In training torchao has a scale and a zero for the inputs of each
token. Here a layer has one scale for all, as in PaddleSlim, which 8 steps with a tiny learning rate find before the losses
after training are measured; or tokens have theirs (`--activation-quantize-type token_wise_min_max`). torchao is optional
(pip install torchao).
"""

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatron.convert import huggingface
from megatron.data.formats import open_tokens
from megatron.inference.load import load_model
from megatron.inference.quantize import linear_layers, quantize_layers
from megatron.model.fake_quantize import FakeQuantizeProduct
from megatron.model.quantization import OF_TOKENS, QuantizeOptions
from megatron.model.recipe import facts_of

MOVING = "moving_average_abs_max"


def windows(prefix: str, length: int) -> torch.Tensor:
    """Token ids [windows, length + 1] of a text."""
    tokens = np.asarray(open_tokens(prefix).tokens).astype(np.int64)
    count = (len(tokens) - 1) // length
    return torch.from_numpy(np.stack([tokens[n * length : n * length + length + 1] for n in range(count)]))


class Ours:
    """This suite's model."""

    def __init__(self, checkpoint: str):
        self.loaded = load_model(checkpoint, precision="fp32")
        self.model = self.loaded.model

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.logits(ids.t()).transpose(0, 1)

    def quantized(self, how: QuantizeOptions) -> "Ours":
        other = copy.deepcopy(self)
        quantize_layers([other.model], facts_of(other.loaded.config, other.loaded.vocab_size), how)
        return other

    def aware(self, bits: tuple[int, int], inputs: str) -> "Ours":
        """A copy whose layers round weights and inputs to these bits. inputs: --activation-quantize-type"""
        other, settings = copy.deepcopy(self), self.loaded.config.model
        settings = copy.copy(settings)
        object.__setattr__(settings, "weight_bits", bits[0])
        object.__setattr__(settings, "activation_bits", bits[1])
        object.__setattr__(settings, "activation_quantize_type", inputs)
        for name, layer in linear_layers([other.model]):
            layer.register_buffer("input_absmax", torch.zeros(()))
            layer.register_buffer("input_average", torch.zeros(2))
            layer.product = FakeQuantizeProduct(layer, name, settings)
            layer.train()
        return other

    def after_step(self) -> None:
        for _, layer in linear_layers([self.model]):
            if layer.product is not None:
                layer.product.weights_changed()
                layer.product.update_buffers()

    def freeze(self) -> None:
        self.model.eval()


class Theirs:
    """transformers' GPT-2, whose Conv1D layers became nn.Linear."""

    def __init__(self, checkpoint: str):
        from megatron.checkpoint.choose import choose
        from megatron.storage.urls import location

        transformers = huggingface._transformers()
        with tempfile.TemporaryDirectory() as folder:
            path = choose(location(checkpoint)).paths[0]
            huggingface.to_hf(path, Path(folder) / "hf", torch.float32, {}, check=False)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                Path(folder) / "hf", dtype=torch.float32
            ).eval()
        for parent in list(self.model.modules()):
            for name, child in list(parent.named_children()):
                if type(child).__name__ == "Conv1D":
                    linear = nn.Linear(*child.weight.shape)
                    linear.weight.data, linear.bias.data = child.weight.data.t().contiguous(), child.bias.data
                    setattr(parent, name, linear)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits

    def quantized(self, config) -> "Theirs":
        from torchao.quantization import quantize_

        other = copy.deepcopy(self)
        quantize_(other.model.transformer, config, filter_fn=lambda module, name: isinstance(module, nn.Linear))
        return other

    def aware(self, bits: tuple[int, int], config) -> "Theirs":
        return self.quantized(config)

    def after_step(self) -> None: ...

    def freeze(self) -> None: ...


def loss(model, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.logits(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def held_out(model, ids: torch.Tensor) -> float:
    model.freeze()
    return float(
        np.average([loss(model, part).item() for part in ids.split(8)], weights=[len(p) for p in ids.split(8)])
    )


def trained(model, ids: torch.Tensor, steps: int, rate: float, batch: int = 8):
    """The model after `steps` of AdamW with a rate that falls to 0."""
    optimizer = torch.optim.AdamW([p for p in model.model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / steps)
        optimizer.zero_grad()
        take = order[torch.arange(step * batch, (step + 1) * batch) % len(order)]
        loss(model, ids[take]).backward()
        nn.utils.clip_grad_norm_(model.model.parameters(), 1.0)
        optimizer.step()
        model.after_step()
    return model


def peers() -> dict:
    """(name of a format -> torchao's config), for after training and for training; empty without torchao."""
    try:
        from torchao.quantization import (
            Int8DynamicActivationInt8WeightConfig,
            Int8WeightOnlyConfig,
            IntxWeightOnlyConfig,
            MappingType,
            PerGroup,
        )
        from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    except ImportError:
        return {}
    four = lambda group, kind: IntxWeightOnlyConfig(torch.int4, PerGroup(group), kind)
    aware = lambda weight, inputs: QATConfig(
        activation_config=IntxFakeQuantizeConfig(inputs, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(weight, "per_channel", is_symmetric=True),
    )
    return {
        "int8": Int8WeightOnlyConfig(),
        "int8-dynamic": Int8DynamicActivationInt8WeightConfig(),
        "int4, groups of 128": four(128, MappingType.ASYMMETRIC),
        "int4, groups of 32": four(32, MappingType.ASYMMETRIC),
        "int4, groups of 128, symmetric": four(128, MappingType.SYMMETRIC),
        (8, 8): aware(torch.int8, torch.int8),
        (6, 6): aware(torch.int6, torch.int6),
        (4, 8): aware(torch.int4, torch.int8),
        (4, 4): aware(torch.int4, torch.int4),
    }


AFTER = {
    "int8": QuantizeOptions("int8"),
    "int8-dynamic": QuantizeOptions("int8-dynamic"),
    "int4, groups of 128": QuantizeOptions("int4", 128),
    "int4, groups of 32": QuantizeOptions("int4", 32),
    "int4, groups of 128, symmetric": QuantizeOptions("int4", 128, quantize_symmetric=True),
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="runs/quickstart", help="of scripts/quickstart.sh")
    parser.add_argument("--steps", type=int, default=100, help="of quantization aware training; 0: none")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--bits", nargs="*", default=["8,8", "6,6", "4,8", "4,4"], help="of weights and inputs")
    parser.add_argument("--after", action=argparse.BooleanOptionalAction, default=True, help="formats after training")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    ours = Ours(f"{args.run}/checkpoints")
    length, configs = ours.loaded.longest, peers()
    test, text = (windows(f"{args.run}/{part}_text_document", length) for part in ("held_out", "train"))
    theirs = Theirs(f"{args.run}/checkpoints") if configs else None

    def show(name: str, *losses: float) -> None:
        if args.json:
            print(json.dumps([name, *losses]), flush=True)
        else:
            print(f"{name:50} " + " ".join(f"{one:12.4f}" for one in losses), flush=True)

    if not args.json:
        print(f"{'':50} {'here':>12} {'torchao':>12}")
    show("fp32", *(held_out(side, test) for side in (ours, theirs) if side))
    for name, how in AFTER.items() if args.after else ():
        both = [(ours, how), (theirs, configs.get(name))]
        show(name, *(held_out(side.quantized(how), test) for side, how in both if side))
    if not args.steps:
        return
    plain = {side: trained(copy.deepcopy(side), text, args.steps, args.lr) for side in (ours, theirs) if side}
    show("trained without rounding", *(held_out(side, test) for side in plain.values()))
    if not args.json:
        print(f"{'':50} {'here':>12} {'here, tokens':>12} {'torchao':>12}")
    for bits in (tuple(map(int, word.split(","))) for word in args.bits):
        named = f"{bits[0]}-bit weights, {bits[1]}-bit inputs"
        kinds = [(ours, MOVING), (ours, OF_TOKENS)] + [(theirs, configs.get(bits))] * bool(theirs)
        found = []
        for side, how in kinds:
            calibrated = trained(plain[side].aware(bits, how), text, 8 if how == MOVING else 0, 1e-12)
            found.append(held_out(calibrated, test))
        show(f"{named}, after training", *found)
        learned = [held_out(trained(side.aware(bits, how), text, args.steps, args.lr), test) for side, how in kinds]
        show(f"{named}, trained", *learned)


if __name__ == "__main__":
    main(sys.argv[1:])
