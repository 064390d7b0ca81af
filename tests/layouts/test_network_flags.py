# SPDX-License-Identifier: Apache-2.0
"""Windows, caps, sinks, squared ReLU, scaled positions and z-losses train the same in every layout; and what a run hears
that goes on with other values of them.
"""

from dataclasses import asdict, replace
from functools import cache

import pytest

import pretrain_gpt
from megatron.errors import SettingsError
from megatron.guard.changes import change_messages, refuse_another_run
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.settings.parse import parse_pretrain

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --seq-length 16 --mock-data
    --vocab-size 90 --lr 1e-3 --global-batch-size 4 --micro-batch-size 1 --train-iters 10 --eval-iters 1 --precision fp32
    --squared-relu --softmax-type learnable --attention-output-gate
    --window-size 5,0 --window-attn-skip-freq 2 --attn-logit-softcapping 1 --final-logit-softcapping 5
    --z-loss-coeff 0.02 --position-embedding-type rope --rope-type yarn --rotary-scaling-factor 4 --rotary-base 100
    --no-rope-freq 2
    --yarn-original-max-position-embeddings 16 --yarn-beta-fast 2 --yarn-beta-slow 0.1 --untie-embeddings-and-output-weights
    """


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout, more",
    [
        ("tp2sp", "--recompute-granularity selective"),
        ("tp2-pp2", "--recompute-granularity full"),
        ("pp2-zbh1", "--cross-entropy-chunk 7"),
        ("dp2-zero3", ""),
    ],
)
def test_layouts(layout, more):
    layout, found = parse_layout(layout), parse_pretrain(f"{FLAGS} {more}".split())
    difference = compare(
        one_process(), trace(laid_out(found, layout), pretrain_gpt.recipe(), layout.world_size, steps=3)
    )
    assert difference.passes("fp32"), difference


@cache
def one_process():
    return trace(laid_out(parse_pretrain(FLAGS.split()), parse_layout("")), pretrain_gpt.recipe(), 1, steps=3)


CHANGED = dict(
    squared_relu=False,
    softmax_type="off-by-one",
    window_size="6,0",
    window_attn_skip_freq=3,
    no_rope_freq="4",
    layer_settings="1: ffn_hidden_size=24",
    attn_logit_softcapping=None,
    final_logit_softcapping=4.0,
    rope_type="rope",
    use_rope_scaling=True,
    rope_scaling_factor=4.0,
    rope_scaling_low_freq_factor=2.0,
    rope_scaling_high_freq_factor=5.0,
    rope_scaling_original_max_position_embeddings=4096,
    rotary_seq_len_interpolation_factor=2.0,
    rotary_scaling_factor=2.0,
    yarn_original_max_position_embeddings=8,
    yarn_beta_fast=3.0,
    yarn_beta_slow=0.2,
    yarn_correction_range_round_to_int=False,
    mscale=0.5,
    mscale_all_dim=0.5,
)


@pytest.mark.parametrize("name", CHANGED)
def test_a_run_does_not_go_on_as_another_model(name):
    config = parse_pretrain(FLAGS.split())
    saved = asdict(config)
    now = replace(config, model=replace(config.model, **{name: CHANGED[name]}))
    flag = name.replace("_", "-")
    with pytest.raises(SettingsError, match=f"--{flag}: "):
        refuse_another_run(now, saved)
    allowed = replace(now, guard=replace(now.guard, override=flag))
    refuse_another_run(allowed, saved)
    assert [words for words in change_messages(allowed, saved) if words.startswith(f"--{flag} was ")]


def test_another_weight_of_the_z_loss_is_told():
    config = parse_pretrain(FLAGS.split())
    now = replace(config, model=replace(config.model, z_loss_coeff=0.0))
    refuse_another_run(now, asdict(config))
    assert change_messages(now, asdict(config)) == ["--z-loss-coeff was 0.02 in the checkpoint, is 0.0 now"]
