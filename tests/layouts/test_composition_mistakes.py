# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other suites made where two ways of splitting a model meet, planted here one at a time.

Each trained wrongly without an error. A row of `MISTAKES` has settings and a layout that train as one process does, and
cannot with the mistake. Those of experts are in `tests/models/test_expert_mistakes.py`. Sources: issue 7452 of
NVIDIA/Megatron-LM and those that the rows name.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from megatron.model.kinds.cross.module import CrossAttention
from megatron.model.kinds.mla.module import LatentAttention
from megatron.model.language_model import LanguageModel
from megatron.mpu import collectives, cross_entropy, layers, mappings, random
from megatron.mpu.placement import Placement
from megatron.optimizer import units
from megatron.optimizer.zero import DistributedOptimizer
from megatron.planner.parity import compare
from tests.models.in_layouts import one_process, trained

Plant = Callable[[pytest.MonkeyPatch], None]

COMMON = """--mock-data --vocab-size 90 --make-vocab-size-divisible-by 8 --global-batch-size 4 --train-iters 2
    --eval-iters 0 --lr 1e-2 --adam-eps 1e-4 --device cpu --precision fp32 --hidden-dropout 0
    --attention-dropout 0 --init-method-std .2"""
SIZES = f"{COMMON} --hidden-size 32 --num-attention-heads 4 --seq-length 16"
GPT = f"{SIZES} --num-layers 2"
LLAMA = f"""{GPT} --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights"""
LATENT = f"""{LLAMA} --multi-latent-attention --qk-layernorm --q-lora-rank 12 --kv-lora-rank 8 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8"""
DELTA = f"""{LLAMA} --experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2
    --linear-num-value-heads 4 --linear-key-head-dim 8 --linear-value-head-dim 8"""
T5 = f"""{COMMON} --model-type T5 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --decoder-seq-length 8
    --encoder-num-layers 2 --decoder-num-layers 2"""


# ---- gradients of weights that every rank has --------------------------------------------------------------------------


def unsummed(part: str) -> Plant:
    """Gradients of weights with `part` in their names stay those of one rank."""
    real = DistributedOptimizer._sum_partial

    def sum_partial(self, name):
        every = self.owned_slots
        self.owned_slots = lambda: (pair for pair in every() if part not in pair[0].name)
        real(self, name)
        del self.owned_slots

    return lambda patch: patch.setattr(DistributedOptimizer, "_sum_partial", sum_partial)


def rotary_key_summed_twice(patch):
    real = LatentAttention.rotated_key
    again = mappings.conjugate(lambda x, axis: x, lambda x, axis: collectives.all_reduce(x.clone(), axis))
    patch.setattr(LatentAttention, "rotated_key", lambda self, key, angles: real(self, again(key, self.tp), angles))


def rotary_key_of_one_rank(patch):
    """Its gradient is that of the rank's own heads."""
    real = LatentAttention.latents

    def latents(self, x):
        self.shared_by_heads = lambda shared, tp: shared
        return real(self, x)

    patch.setattr(LatentAttention, "latents", latents)


def memory_of_one_rank(patch):
    """The encoder's gradient through cross attention is that of the rank's own heads."""
    real = CrossAttention.keys_and_values

    def keys_and_values(self, memory, context):
        self.kv.forward = lambda x: layers.linear(x, self.kv.weight, self.kv.bias)
        return real(self, memory, context)

    patch.setattr(CrossAttention, "keys_and_values", keys_and_values)


# ---- norm --------------------------------------------------------------------------------------------------------------


def counted(change: Callable) -> Plant:
    real = Placement.is_primary
    primary = lambda self, place: change(self, place, real(self, place))
    return lambda patch: patch.setattr(Placement, "is_primary", primary)


# ---- sums over ranks ---------------------------------------------------------------------------------------------------


def bias_before_the_sum(patch):
    real = layers.RowParallelLinear.forward

    def forward(self, x):
        if self.bias is None or self.tp.size == 1:
            return real(self, x)
        return self.reduce_output(layers.linear(x, self.weight, self.bias, layers.ALONE), self.tp)

    patch.setattr(layers.RowParallelLinear, "forward", forward)


def with_part(change: Callable) -> Plant:
    """A change of a rank's part of the vocabulary."""
    real = cross_entropy._part

    def part(weight, vocab_size, tp, *rest, **more):
        return change(real(weight, vocab_size, tp, *rest, **more), tp, vocab_size)

    return lambda patch: patch.setattr(cross_entropy, "_part", part)


def smoothing_over_own_part(part, tp, vocab_size):
    return part._replace(everywhere=part.everywhere * tp.size)


# ---- context parallelism -----------------------------------------------------------------------------------------------


def rolled_locally(patch):
    """Tokens further ahead are those of the rank's own rows."""
    real = LanguageModel.depth_sums

    def depth_sums(self, x, batch):
        if batch.ahead is not None:
            depths = range(len(batch.ahead[0]))
            tokens, labels = (
                torch.stack([one.roll(-1 - n, 0) for n in depths]) for one in (batch.tokens, batch.labels)
            )
            batch = replace(batch, ahead=(tokens, labels, batch.ahead[2]))
        return real(self, x, batch)

    patch.setattr(LanguageModel, "depth_sums", depth_sums)


# ---- random numbers ----------------------------------------------------------------------------------------------------


def chunks_are_drawn_alike(patch):
    """Each chunk of a rank begins with the same state of the generator."""
    real = units.init_rows
    renamed = lambda name: re.sub(r"blocks\.(\d+)", lambda match: f"blocks.{int(match[1]) % 2}", name)
    patch.setattr(units, "init_rows", lambda name, *words: real(renamed(name), *words))


def masks_of_the_first_rank(patch):
    real = random.Dropout.keep

    def keep(self, shape, samples, device):
        axis, self.axis = self.axis, None
        try:
            return real(self, shape, samples, device)
        finally:
            self.axis = axis

    patch.setattr(random.Dropout, "keep", keep)


class Mistake(NamedTuple):
    plant: Plant
    layout: str
    flags: str


MISTAKES = {
    "norms of layers without experts are not summed, tp x ep": Mistake(
        unsummed("blocks.0.mlp_norm"),
        "tp2sp-ep2",
        f"{LLAMA} --num-experts 4 --moe-ffn-hidden-size 16 --moe-layer-freq [0,1]",
    ),
    "norms of queries and keys are not summed over tp": Mistake(unsummed("q_norm"), "tp2", f"{LLAMA} --qk-layernorm"),
    "the norm of a gated delta net is not summed over tp": Mistake(unsummed("norm_weight"), "tp2", DELTA),
    "biases after the sum over tp are not summed with sequence parallelism": Mistake(
        unsummed("output.bias"), "tp2sp", GPT
    ),
    "the rotary key that heads share is summed twice (6839)": Mistake(rotary_key_summed_twice, "tp2", LATENT),
    "the rotary key that heads share is not summed (1699)": Mistake(rotary_key_of_one_rank, "tp2", LATENT),
    "the encoder has the gradient of one rank's cross attention": Mistake(memory_of_one_rank, "tp2", T5),
    "sinks of one tp rank count in the norm (7530)": Mistake(
        counted(lambda placed, place, primary: primary and not (placed.cut and not placed.decay and place["tp"])),
        "tp2",
        f"{LLAMA} --softmax-type learnable",
    ),
    "tied embeddings count twice in the norm": Mistake(
        counted(lambda placed, place, primary: primary or "tied" in placed.partial), "pp2", GPT
    ),
    "a bias is added before the sum over tp": Mistake(bias_before_the_sum, "tp2", GPT),
    "labels are those of whole logits, the logits those of a rank": Mistake(
        with_part(lambda part, tp, vocab_size: part._replace(first=0)), "tp2", GPT
    ),
    "label smoothing counts the tokens of one rank's vocabulary": Mistake(
        with_part(smoothing_over_own_part), "tp2", f"{GPT} --label-smoothing .1"
    ),
    "tokens further ahead are those of the rank, cp": Mistake(rolled_locally, "cp2", f"{LLAMA} --mtp-num-layers 1"),
    "chunks of a rank are drawn alike": Mistake(chunks_are_drawn_alike, "pp2vp2", GPT.replace("layers 2", "layers 4")),
    "tp ranks drop the same places of other tokens": Mistake(
        masks_of_the_first_rank, "tp2sp", GPT.replace("--hidden-dropout 0", "--hidden-dropout .2")
    ),
}


def check(layout: str, flags: str) -> None:
    """The norm is nearer to one process than `verify_layout` asks: sinks are a small part of it."""
    difference = compare(one_process(flags), trained(layout, flags))
    assert difference.passes("fp32") and difference.norm < 3e-6, difference


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_trains_another_model(mistake, monkeypatch):
    plant, layout, flags = MISTAKES[mistake]
    one_process(flags)  # kept for both
    check(layout, flags)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        check(layout, flags)
