# SPDX-License-Identifier: Apache-2.0
"""--recompute-modules in layouts of every kind of model: the bits of a run of the same layout that keeps everything."""

import pytest
import torch

from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.planner.parity import laid_out, parse_layout, trace

SIZES = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 8 --micro-batch-size 1 --train-iters 10 --eval-iters 0 --precision fp32 --hidden-dropout 0.1
    --make-vocab-size-divisible-by 8"""
MODELS = {
    "GPT": "",
    "Llama": """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --num-query-groups 2
        --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0""",
    "T5": "--model-type T5 --decoder-seq-length 8",
    "BERT": "--model-type BERT --post-norm",
    "variant": "--model-type tests.models.gpt_variant",
    "without attention": "--model-type tests.models.mlp_language_model --num-attention-heads 64",
}
CHEAP, WHOLE = "core_attn layernorm mlp_act", "layernorm mlp"
CASES = [("Llama", "pp2-zbh1", CHEAP), ("GPT", "dp2-zero3", WHOLE), ("without attention", "tp2sp", "layernorm mlp_act")]
FULL = [
    ("GPT", "tp2sp", CHEAP),
    ("T5", "tp2sp", WHOLE),
    ("BERT", "dp2-zero2", CHEAP),
    ("variant", "tp2sp", CHEAP),
    ("without attention", "pp2-zbv", "layernorm mlp_act"),
    *((model, "tp2sp-pp2-dp2-zero3-zbh1", modules) for model in ("GPT", "Llama", "T5") for modules in (CHEAP, WHOLE)),
    *(("GPT", layout, modules) for layout in ("tp2", "cp2", "cp2a2a", "pp2-zbv") for modules in (CHEAP, WHOLE)),
    *(("GPT", "tp2sp-dp2-zero1", modules) for modules in ("core_attn", "layernorm", "mlp_act", "mlp")),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "model, layout, modules", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)]
)
def test_the_bits_of_a_run_that_keeps_everything(model, layout, modules):
    words, layout = f"{SIZES} {MODELS[model]}", parse_layout(layout)

    def run(flags):
        config = laid_out(parse_any(f"{words} {flags}".split()), layout)
        return trace(config, recipe_of(config), layout.world_size, steps=2)

    want, found = run(""), run(f"--recompute-granularity selective --recompute-modules {modules}")
    assert found.losses == want.losses and found.norms == want.norms
    assert all(torch.equal(found.weights[name], weight) for name, weight in want.weights.items())
