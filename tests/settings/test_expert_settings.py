# SPDX-License-Identifier: Apache-2.0
"""Wrong uses of the flags of experts: each is refused before anything starts, with one message."""

import re

import pytest

import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.errors import Failure
from megatron.inference.load import build_model
from megatron.model.command_line import parse_any
from megatron.mpu.mesh import Mesh
from megatron.settings.network import layer_pattern
from megatron.training.rules import idle, resolve

LINE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 2 --lr 1e-3"
)
MIXED = "--num-experts 8"
SINKHORN = f"{MIXED} --moe-router-load-balancing-type sinkhorn"
WRONG = [  # ranks, flags, words of the message
    (1, "--num-experts -1", "--num-experts -1 must be at least 0"),
    (1, f"{MIXED} --moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
    (1, f"{MIXED} --moe-router-topk 0", "--moe-router-topk 0 must be at least 1"),
    (1, f"{MIXED} --moe-router-topk 1", "the router would not learn; add --moe-router-pre-softmax"),
    (1, f"{MIXED} --moe-layer-freq 0", "--moe-layer-freq 0 for --num-layers 4: no list of 0 and 1"),
    (1, f"{MIXED} --moe-layer-freq [0]*1+[1]*2", "it is for 3 layers; give N for every N-th layer"),
    (1, f"{MIXED} --moe-layer-freq ([0]*1+[1]*2)*9999999999", "it is for 29999999997 layers"),
    (1, f"{MIXED} --moe-layer-freq [0]*4", "no layer has experts then; leave out --num-experts"),
    (1, f"{MIXED} --moe-layer-freq [2]*4", "[2]*4 for --num-layers 4: no list of 0 and 1"),
    (1, f"{MIXED} --moe-ffn-hidden-size 0", "--moe-ffn-hidden-size 0 must be at least 1"),
    (1, f"{MIXED} --moe-shared-expert-gate", "--moe-shared-expert-gate needs --moe-shared-expert-intermediate-size"),
    (1, f"{MIXED} --moe-aux-loss-coeff 1 2", "has 2 numbers for 1 values of --moe-router-load-balancing-type"),
    (1, f"{MIXED} --moe-aux-loss-coeff -1", "--moe-aux-loss-coeff -1 must be 0 or more"),
    (1, f"{MIXED} --moe-z-loss-coeff -1", "--moe-z-loss-coeff -1.0 must be at least 0"),
    (1, f"{MIXED} --moe-router-load-balancing-type best", "'best' is none of aux_loss"),
    (1, f"{MIXED} --moe-router-load-balancing-type aux_loss none", "several are for aux_loss, seq_aux_loss and"),
    (1, f"{MIXED} --moe-router-load-balancing-type aux_loss aux_loss", "several are for aux_loss, seq_aux_loss and"),
    (
        1,
        f"{MIXED} --moe-router-load-balancing-type sinkhorn --moe-router-enable-expert-bias",
        "sinkhorn chooses experts by itself",
    ),
    (1, f"{MIXED} --moe-router-num-groups 2", "--moe-router-num-groups and --moe-router-group-topk belong together"),
    (1, f"{MIXED} --moe-router-group-topk 2", "--moe-router-num-groups and --moe-router-group-topk belong together"),
    (
        1,
        f"{MIXED} --moe-router-num-groups 3 --moe-router-group-topk 1",
        "3 does not divide --num-experts 8; nearest: 2",
    ),
    (1, f"{MIXED} --moe-router-num-groups 2 --moe-router-group-topk 3", "3 is more than --moe-router-num-groups 2"),
    (
        1,
        f"{MIXED} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk 3",
        "--moe-router-topk 3 from --moe-router-group-topk 2 groups of 2 experts: it must be a multiple",
    ),
    (1, f"{MIXED} --moe-router-dtype bf16", "'bf16' is none of fp32, fp64"),
    (1, f"{MIXED} --moe-input-jitter-eps 1", "--moe-input-jitter-eps 1.0 must be at least 0 and below 1"),
    (1, f"{MIXED} --moe-expert-capacity-factor 0", "--moe-expert-capacity-factor 0.0 must be above 0"),
    (1, f"{MIXED} --moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor, such as 1.25"),
    (3, f"{MIXED} --ep 3 --global-batch-size 9", "--num-experts 8 cannot be divided by --ep 3; nearest: 2 or 4 ranks"),
    (16, f"{MIXED} --ep 16 --global-batch-size 16", "--num-experts 8 cannot be divided by --ep 16; nearest: 4 or 8"),
    (1, f"{MIXED} --ep 2", "--ep 2: 2 ranks are needed, and this process is alone; start them: "),
    (1, f"{MIXED} --etp 2", "--etp 2: 2 ranks are needed, and this process is alone"),
    (1, f"{MIXED} --ep 0", "--ep 0 must be at least 1"),
    (2, f"{MIXED} --etp 0", "--etp 0 must be at least 1"),
    (2, f"{MIXED} --ep 4", "--ep 4 x --expert-tensor-parallel-size 1 does not divide the 2 ranks"),
    (
        3,
        f"{MIXED} --etp 3 --global-batch-size 9",
        "--ffn-hidden-size 128 cannot be divided by --etp 3; nearest: 2 or 4",
    ),
    (
        2,
        f"{MIXED} --tp 2 --moe-ffn-hidden-size 33",
        "--moe-ffn-hidden-size 33 cannot be divided by --tp 2; nearest: 1 or 3 ranks",
    ),
    (
        2,
        f"{MIXED} --tp 2 --moe-shared-expert-intermediate-size 33",
        "--moe-shared-expert-intermediate-size 33 cannot be divided by --tp 2",
    ),
    (1, f"{MIXED} --moe-router-topk -1", "--moe-router-topk -1 must be at least 1"),
    (1, f"{MIXED} --moe-expert-capacity-factor -1", "--moe-expert-capacity-factor -1.0 must be above 0"),
    (1, f"{MIXED} --moe-token-drop-policy best", "--moe-token-drop-policy 'best' is none of probs, position"),
    (1, f"{MIXED} --moe-router-score-function tanh", "--moe-router-score-function 'tanh' is none of softmax, sigmoid"),
    (1, f"{MIXED} --moe-router-topk-scaling-factor 0", "--moe-router-topk-scaling-factor 0.0 must be above 0"),
    (
        1,
        f"{MIXED} --moe-router-load-balancing-type sinkhorn --moe-router-num-groups 2 --moe-router-group-topk 1",
        "sinkhorn chooses experts by itself, without --moe-router-num-groups",
    ),
    (
        1,
        f"{MIXED} --moe-use-upcycling",
        "--moe-use-upcycling makes experts from a dense model's weights: add --finetune",
    ),
    (2, "--ep 2", "--model-type GPT has no experts here; leave the flags out"),
    (
        4,
        f"{MIXED} --ep 2 --pp 2 --pipeline-schedule gpipe --overlap-moe-expert-parallel-comm",
        "all backward passes come after all forward passes; 1f1b would work",
    ),
    (1, f"{MIXED} --moe-aux-loss-coef 0.1", "; did you mean --moe-aux-loss-coeff?"),
    (1, f"{MIXED} --recompute-granularity selective --recompute-modules shared_experts", "say mlp, which recomputes"),
]


@pytest.mark.parametrize("world, flags, said", WRONG, ids=[flags for _, flags, _ in WRONG])
def test_a_wrong_use_has_one_message(world, flags, said):
    with pytest.raises(Failure, match=re.escape(said)) as caught:
        resolve(parse_any(f"{LINE} --then {flags}".split(), recipe=pretrain_gpt.recipe()), world)
    assert "settings cannot work" not in str(caught.value) and "problems" not in str(caught.value)
    assert caught.value.code in (2, 3)


def test_generation_checks_the_ranks_that_hold_experts():
    """Experts of a width that tp does not divide are whole on each rank."""
    config = parse_any(f"{LINE} --num-experts 6 --moe-ffn-hidden-size 33".split(), recipe=pretrain_gpt.recipe())

    def build(**sizes):
        return build_model(config, 101, device="meta", precision="fp32", mesh=Mesh(create_groups=False, **sizes))

    assert build(tp=2, ep=2, etp=1).weights.numel() > 0
    for sizes, said in (
        (dict(tp=2), "--moe-ffn-hidden-size 33 cannot be divided by --expert-tensor-parallel-size 2; nearest: 1 or 3"),
        (
            dict(tp=4, ep=4, etp=1),
            "--num-experts 6 cannot be divided by --expert-model-parallel-size 4; nearest: 2 or 3",
        ),
    ):
        with pytest.raises(Failure, match=re.escape(said)):
            build(**sizes)


@pytest.mark.parametrize("recipe", [pretrain_bert, pretrain_t5])
def test_other_models_have_no_experts(recipe):
    more = "--decoder-seq-length 8 --position-embedding-type learned_absolute" if recipe is pretrain_t5 else ""
    with pytest.raises(Failure, match="--num-experts 8: this kind of model has no experts"):
        resolve(parse_any(f"{LINE} {more} {MIXED}".split(), recipe=recipe.recipe()), 1)


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--moe-router-topk 2", "moe_router_topk"),
        (f"{MIXED} --moe-token-drop-policy position", "moe_token_drop_policy"),
        (f"{MIXED} --moe-router-bias-update-rate 0.1", "moe_router_bias_update_rate"),
        (f"{MIXED} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "moe_aux_loss_coeff"),
        (f"{SINKHORN} --moe-router-topk-scaling-factor 2", "moe_router_topk_scaling_factor"),
        (f"{SINKHORN} --moe-router-score-function sigmoid", "moe_router_score_function"),
        (f"{SINKHORN} --moe-router-pre-softmax", "moe_router_pre_softmax"),
        (f"{MIXED} --moe-router-score-function sigmoid --moe-router-pre-softmax", "moe_router_pre_softmax"),
    ],
)
def test_flags_without_effect_are_named(flags, name):
    config = resolve(parse_any(f"{LINE} {flags}".split(), recipe=pretrain_gpt.recipe()), 1)
    assert list(idle(config, 1)) == [name]


def test_flags_without_an_effect_of_their_own_are_taken(capsys):
    """Those of Megatron-LM that choose another way to the same result."""
    flags = "--moe-grouped-gemm --moe-token-dispatcher-type allgather --moe-permute-fusion --moe-per-layer-logging"
    config = resolve(parse_any(f"{LINE} {MIXED} {flags}".split(), recipe=pretrain_gpt.recipe()), 1)
    assert config.model.expert_layers == (0, 1, 2, 3) and not idle(config, 1)
    for number in (0, 1):
        config = resolve(parse_any(f"{LINE} --num-experts {number}".split(), recipe=pretrain_gpt.recipe()), 1)
        assert config.model.expert_layers == () and not config.model.mixture


@pytest.mark.parametrize("frequency", ["1", "2", "3", "[0]*1+[1]*3", "[1]*3+[0]*1", "[1,0]*2"])
def test_depths_of_multi_token_prediction_are_like_the_last_layer(frequency):
    """As in Megatron-Core, whichever the first ones are."""
    pattern = layer_pattern(frequency, 4)
    model = parse_any(f"{LINE} {MIXED} --moe-layer-freq {frequency} --mtp-num-layers 2".split()).model
    assert [model.has_experts(n) for n in range(6)] == [*map(bool, pattern), *[bool(pattern[-1])] * 2]


def test_patterns_of_layers():
    """Megatron-LM's: a number, whose first layer has experts, or an expression of lists."""
    for text, layers in {
        "2": (0, 2, 4),
        "5": (0,),
        "[0]*1+[1]*4": (1, 2, 3, 4),
        "([0]*3+[1]*2)": (3, 4),
        "'[1,0]*2+[1]'": (0, 2, 4),
        "[0, 1, 1, 0, 1]": (1, 2, 4),
    }.items():
        assert tuple(n for n, has in enumerate(layer_pattern(text, 5)) if has) == layers, text
