# SPDX-License-Identifier: Apache-2.0
"""--layer-settings against plain torch in every layout, generation, and the files that become such settings."""

import json
import shlex
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.entry import start
from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.model.gpt.facts import GPTFacts
from megatron.model.layer_rules import refuse
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.planner.layout import Layout
from megatron.settings.schema import Model
from megatron.tools import generate
from megatron.training.rules import check
from tests.models.plain_clip import ALPHA, Heads
from tests.models.plain_state import LINE, compare
from tests.planner.test_activations import measured, predicted

TP = "--tensor-model-parallel-size 2"
SP = f"{TP} --sequence-parallel"
PP = "--pipeline-model-parallel-size 2"
CP = "--context-parallel-size 2"
AGAIN = "--recompute-granularity selective --recompute-modules"
WORDS = (
    "0: window_size=3,0, ffn_hidden_size=20; 1-2: num_query_groups=2; 1: --ffn-hidden-size=64; 2: no_op=mlp; "
    "3: no_op=attention"
)
MODEL = Heads(
    0.2,
    f"--reset-attention-mask --layer-settings '{WORDS}'",
    apart=True,
    own={
        0: dict(window=3, ffn=20),
        1: dict(groups=2, ffn=64),
        2: dict(groups=2, lacks="mlp"),
        3: dict(lacks="attention"),
    },
)
CLIP = f"--qk-clip --qk-clip-alpha {ALPHA} --qk-clip-threshold {MODEL.threshold}"
LAYOUTS = {
    "one process": (1, ""),
    "flash attention, layers again": (1, "--attention-backend sdpa --recompute-granularity full"),
    "attention again": (1, "--recompute-granularity full_attn"),
    "parts again": (1, f"{AGAIN} core_attn layernorm mlp_act"),
    "tp2": (2, TP),
    "tp2 with sequence parallelism": (2, f"{SP} {AGAIN} mlp"),
    "pp2": (2, f"{PP} --pipeline-stage-layers 1,3"),
    "pp2, zb-v": (2, f"{PP} --pipeline-schedule zb-v --micro-batch-size 1"),
    "pp2, zb-h1": (2, f"{PP} --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "dp2": (2, ""),
    "zero1": (2, "--sharding-stage 1 --overlap-param-gather --overlap-grad-reduce"),
    "zero3": (2, "--sharding-stage 3 --overlap-param-gather"),
    "cp2 in a ring": (2, CP),
    "cp2, gathered": (2, f"{CP} --cp-comm-type allgather"),
    "cp2, heads for rows": (2, f"{CP} --cp-comm-type a2a"),
}


def pretrain(rank: int, words: str) -> None:
    start(shlex.split(f"{LINE} {words}"), pretrain_gpt.recipe())


@cache
def trained():
    return MODEL.train()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    """--layer-settings, with --qk-clip"""
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{MODEL.flags} {CLIP} {words} --save {tmp_path} --check-replicas-interval 2")
    compare(tmp_path, *trained())


def test_texts_are_those_of_the_plain_network(tmp_path, capsys):
    """Tokens one by one, from caches of several sizes; a checkpoint brings the settings of its layers."""
    pretrain(0, f"{MODEL.flags} {CLIP} --save {tmp_path}")
    _, weights = trained()
    tokens = [5, 17, 60]
    for _ in range(6):
        logits = MODEL.network(weights, torch.tensor([tokens]))
        tokens.append(int(logits[0, -1].argmax()))
    capsys.readouterr()
    generate.main(shlex.split(f"--load {tmp_path} --prompt '5 17 60' --max-new-tokens 6 --device cpu --temperature 0"))
    assert " ".join(map(str, tokens)) in capsys.readouterr().out


def test_a_run_goes_on_with_the_same_layers(tmp_path):
    pretrain(0, f"{MODEL.flags} --train-iters 1 --save {tmp_path}")
    with pytest.raises(SettingsError, match="layer.settings"):
        pretrain(0, f"--train-iters 2 --load {tmp_path} --reset-attention-mask")


# ---- facts -----------------------------------------------------------------------------------------------------------

SHAPE = dict(
    num_layers=3, hidden_size=32, num_attention_heads=4, seq_length=48, hidden_dropout=0.0, attention_dropout=0.0
)
SIZES = "0: num_query_groups=2 ffn_hidden_size=24; 1: num_query_groups=1 window_size=7,0; 2: no_op=attention"


@pytest.mark.parametrize("rope", [False, True])
def test_what_autograd_saves_is_predicted(rope):
    """Also of grouped queries, which are a part of what a layer keeps."""
    own = dict(position_embedding_type="rope", normalization="RMSNorm", swiglu=True) if rope else {}
    model, layout = Model(**SHAPE, **own, layer_settings=SIZES), Layout(micro_batch_size=2)
    assert predicted(model, layout) == pytest.approx(measured(model, layout, Mesh()), rel=0.01)


def test_facts_count_each_layer():
    facts = GPTFacts(Model(**SHAPE, disable_bias_linear=True, layer_settings=SIZES), 50)
    h, norm = 32, 2 * 32
    layers = (
        8 * (4 + 2 * 2) * h + h * h + 2 * h * 24 + 2 * norm,
        8 * 6 * h + h * h + 8 * h * h + 2 * norm,
        8 * h * h + norm,
    )
    assert facts.parameters == sum(layers) + (50 + 48) * h + norm
    assert [facts.cached_numbers([n], 1) for n in range(3)] == [2 * 2 * 8, 2 * 1 * 8, 0] and not facts.caches_heads
    assert {size for name, size in facts.divisible_by_tp().items() if "key" in name} == {1, 2}
    windows = Model(**SHAPE, window_size="9,0", window_attn_skip_freq=3, layer_settings="2: window_size=7,0")
    assert [GPTFacts(windows, 50).layer_kind(n).settings(windows).window for n in range(3)] == [9, 9, 7]
    small = facts.shrunk(3, 2)
    assert (
        GPTFacts(small, 50).layer_kind(2).branches == facts.layer_kind(2).branches
        and "num_query" in small.layer_settings
    )


# ---- words and files -------------------------------------------------------------------------------------------------

WRONG = {
    "1 ffn=2": "has no colon between layers and settings",
    "1: ffn_hidden=3": "ffn_hidden is no setting; did you mean ffn_hidden_size",
    "9: ffn_hidden_size=3": "there is no layer 9; layers are 0 to 3",
    "1: no_op=experts": "no_op=experts of layer 1 is neither attention nor mlp",
    "1: hidden_size=8": "hidden_size is one for all layers; those of single layers are",
    "1: num_query_groups=3": "layer 1: --num-attention-heads 4 cannot be shared by --num-query-groups 3",
    "0-1: num_query_groups=1": "layers 0-1: --num-query-groups 1 cannot be divided by --tensor-model-parallel-size 2",
    "3: no_op=attention num_query_groups=2": "layer 3, of mlp, has no num_query_groups",
    "1: moe_ffn_hidden_size=8": "layer 1, of attention and mlp, has no moe_ffn_hidden_size",
    "1: ffn_hidden_size=2.5": "ffn_hidden_size=2.5 of layer 1 is no whole number",
    "2-1: ffn_hidden_size=8": "'2-1' is no layer, and no range of layers",
    "1: ffn_hidden_size=8; 0-1: ffn_hidden_size=6": "layer 1 has ffn_hidden_size 8 and 6",
    "2: ffn_hidden_size=0": "layer 2: --ffn-hidden-size 0 must be at least 1",
    "0-99999999999: ffn_hidden_size=8": "'0-99999999999' is beyond the layers of any model",
    "0: window_size=3": "layer 0: --window-size 3 must be the keys before and after",
}


@pytest.mark.parametrize("words", WRONG)
def test_one_message_for_what_cannot_be(words):
    said = check(parse_any([*LINE.split(), *TP.split(), "--layer-settings", words]), 2)
    assert [one for one in said if one.startswith("--layer-settings") and WRONG[words] in one], said


@pytest.mark.parametrize("kind", ["T5", "BERT"])
def test_other_models_have_layers_of_one_size(kind):
    line = f"--model-type {kind} {LINE} --decoder-seq-length 12 --layer-settings".replace(
        "--decoder-seq-length 12 ", "--decoder-seq-length 12 " * (kind == "T5")
    )
    said = check(parse_any([*line.split(), "0: ffn_hidden_size=8"]), 1)
    assert [one for one in said if "all layers of this model have the same sizes" in one]


def test_what_knows_layers_of_one_size_refuses_them():
    with pytest.raises(SettingsError, match="pruning knows layers of one size, and this model has --layer-settings"):
        refuse(Model(**SHAPE, layer_settings=SIZES), "pruning")


BLOCKS = [
    dict(
        attention=dict(n_heads_in_group=2, no_op=False, replace_with_linear=False),
        ffn=dict(ffn_mult=2.625, no_op=False),
    ),
    dict(attention=dict(n_heads_in_group=None, no_op=True), ffn=dict(ffn_mult=5.25, no_op=False, sparsify=None)),
    dict(attention=dict(num_query_groups=4), mlp=dict(ffn_hidden_size=96)),
    dict(attention=dict(n_heads_in_group=4, window_length=None), ffn=dict(no_op=True, ffn_mult=None)),
]
LIKE = f"{LINE} --swiglu --ffn-hidden-size 96".replace("--hidden-size 24", "--hidden-size 128")


def parsed(content, *words: str) -> Model:
    return parse_any([*LIKE.split(), *words, json.dumps(content)]).model


def test_files_of_blocks_become_settings_of_layers(tmp_path):
    """--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json: widths are Megatron-LM's, int(2 / 3 x
    mult x hidden) up to a multiple of 256.
    """
    content = dict(block_configs=BLOCKS, hidden_act="silu", num_hidden_layers=4, hidden_size=128, rope_theta=5e5)
    wanted = (
        "0: ffn_hidden_size=256 num_query_groups=2; 1: ffn_hidden_size=512 no_op=attention; 3: no_op=mlp "
        "num_query_groups=1"
    )
    assert parsed(content, "--heterogeneous-layers-config-encoded-json").layer_settings == wanted
    (tmp_path / "config.json").write_text(json.dumps(content))
    words = ["--heterogeneous-layers-config-path", str(tmp_path / "config.json")]
    config = parse_any([*LIKE.split(), *words])
    assert config.model.layer_settings == wanted and not check(config, 1)
    assert config.model.heterogeneous_layers_config_path is None  # a checkpoint does not look for the file


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(attention=dict(replace_with_linear=True)), "block 0: replace_with_linear of attention is not supported"),
        (dict(attention=dict(window_length=8)), "block 0: window_length 8 of attention is not supported"),
        (dict(attention=dict(heads=8)), "block 0: heads of attention is not supported"),
        (dict(attention=dict(no_op=True), ffn=dict(no_op=True)), "block 0 has neither attention nor an MLP"),
        (dict(attention=dict(n_heads_in_group=3)), "block 0: n_heads_in_group 3 does not divide 4 heads"),
        (dict(parallel_blocks=[1]), "block 0: parallel_blocks is not supported"),
    ],
)
def test_blocks_that_are_refused(change, said):
    with pytest.raises(SettingsError, match=said):
        parsed(dict(block_configs=[BLOCKS[0] | change, *BLOCKS[1:]]), "--heterogeneous-layers-config-encoded-json")


def test_files_that_belong_to_another_model():
    flag = "--heterogeneous-layers-config-encoded-json"
    for content, said in (
        (dict(block_configs=BLOCKS[:3]), "has 3 blocks, and --num-layers is 4"),
        (dict(block_configs=BLOCKS, hidden_size=256), "has hidden_size 256, and --hidden-size is 128"),
        (dict(block_configs=BLOCKS, hidden_act="gelu"), "has hidden_act gelu"),
        ([], "has no list block_configs"),
        (dict(block_configs=[None] * 4), "block 0: None is no object"),
        (dict(block_configs=[dict(attention=3)] * 4), "block 0: attention 3 is no object"),
        (
            dict(block_configs=[dict(attention=dict(n_heads_in_group=0))] * 4),
            "n_heads_in_group 0 is no number above zero",
        ),
        (dict(block_configs=[dict(ffn=dict(ffn_mult="big"))] * 4), "ffn_mult 'big' is no number above zero"),
        (dict(block_configs=[dict(ffn=dict(ffn_hidden_size="x"))] * 4), "ffn_hidden_size 'x' is no number above zero"),
    ):
        with pytest.raises(SettingsError, match=said):
            parsed(content, flag)
    with pytest.raises(SettingsError, match="both have the settings of layers"):
        parsed(dict(block_configs=BLOCKS), "--layer-settings", "0: ffn_hidden_size=8", flag)
