# SPDX-License-Identifier: Apache-2.0
"""GPTs whose layers a pattern lists, in all kinds of layouts, against the same layers in plain torch, in one process, in
fp64; what their cuts mean; and each wrong use.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import pretrain_hybrid
from megatron.errors import Failure
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of, named_recipe
from megatron.pipeline.stages import Pipeline
from megatron.planner.choose import search_layouts
from megatron.planner.shrink import shrunk_job_of
from megatron.settings.schema import Model
from megatron.training.rules import check, remarks
from tests.models import plain_layers
from tests.models.plain_gpt import linear
from tests.models.plain_layers import ATTENTION, MLP, Plain, letters
from tests.ranks import on_ranks, trains
from tests.training.plain_loop import HIDDEN
from tests.training.test_plain_loop import ADAM, FLAGS

STEPS, EXPERTS, WIDTH, CHOSEN = 3, 4, 16, 2
LETTERS = "-*E**-E*"
LINE = FLAGS.replace("--num-layers 2", "") + (
    f" --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 {ADAM} --eod-mask-loss --log-interval 1 "
    f"--lr-decay-style constant --num-experts {EXPERTS} --moe-router-topk {CHOSEN} --moe-ffn-hidden-size {WIDTH}"
)
PP, TP, EP = "--pipeline-model-parallel-size", "--tensor-model-parallel-size", "--expert-model-parallel-size"
MODULES = "--recompute-granularity selective --recompute-modules"
LAYOUTS = {
    "one process": (1, LETTERS, ""),
    "recomputed parts": (1, LETTERS, f"{MODULES} core_attn layernorm mlp_act"),
    "recomputed mixers": (1, LETTERS, f"{MODULES} mlp"),
    "tp3 with sequence parallelism": (3, LETTERS, f"{TP} 3 --sequence-parallel --expert-tensor-parallel-size 1"),
    "cp2": (2, LETTERS, "--context-parallel-size 2 --micro-batch-size 1"),
    "ep2": (2, LETTERS, f"{EP} 2"),
    "zero1": (2, LETTERS, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2, attention recomputed": (2, LETTERS, "--sharding-stage 2 --recompute-granularity full_attn"),
    "zero3, all recomputed": (2, LETTERS, "--sharding-stage 3 --recompute-granularity full"),
    "pp2": (2, "-*|E**-E*", f"{PP} 2"),
    "pp2, even": (2, LETTERS, f"{PP} 2 --pipeline-schedule gpipe"),
    "pp2, interleaved, an empty stage": (2, "-||*E|**-E*", f"{PP} 2 --micro-batch-size 1"),
    "pp2, zb-h1": (2, "-*E*|*-E*", f"{PP} 2 --pipeline-schedule zb-h1 --micro-batch-size 1"),
    "pp2 in a V, no layer at the ends": (
        2,
        "|-*E|**-E*|",
        f"{PP} 2 --pipeline-schedule zb-v --micro-batch-size 1 --recompute-granularity full",
    ),
    "pp2 ep2, interleaved, zero3": (4, "-*|E*|*-|E*", f"{PP} 2 {EP} 2 --sharding-stage 3 --micro-batch-size 1"),
    "pp2 cp2, zb-h1": (
        4,
        "-*E|**-E*",
        f"{PP} 2 --context-parallel-size 2 --pipeline-schedule zb-h1 --micro-batch-size 1",
    ),
}
LONG = {"pp2 ep2, interleaved, zero3", "pp2 cp2, zb-h1", "recomputed mixers", "zero1", "pp2, even"}


# ---- the same in plain torch -----------------------------------------------------------------------------------------


def choose(weights, own: str, u: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Experts of [b, s, h]."""
    logits, y = linear(weights, own + "router", u), torch.zeros_like(u)
    least = logits.topk(CHOSEN).values[..., -1:]
    parts = logits.masked_fill(logits < least, -torch.inf).softmax(-1)
    of_expert = lambda name, x, e: (
        x @ weights[f"{own}experts.{name}.weight"][e].T + weights[f"{own}experts.{name}.bias"][e]
    )
    for e in range(EXPERTS):
        wide = F.gelu(of_expert("up", u, e), approximate="tanh")
        y = y + parts[..., e : e + 1] * of_expert("down", wide, e)
    return y


PRODUCTS = {
    "router": (EXPERTS, HIDDEN),
    "experts.up": (EXPERTS, WIDTH, HIDDEN),
    "experts.down": (EXPERTS, HIDDEN, WIDTH),
}
KINDS = {"*": ATTENTION, "-": MLP, "E": Plain("mlp", PRODUCTS, choose)}


@cache
def plain() -> tuple[list[dict], dict[str, torch.Tensor]]:
    return plain_layers.train(letters(LETTERS), KINDS, False, STEPS)


pretrain = trains(pretrain_hybrid)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [pytest.param(name, marks=[pytest.mark.full] * (name in LONG)) for name in LAYOUTS])
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, pattern, words = LAYOUTS[layout]
    line = f"{LINE} --hybrid-layer-pattern {pattern} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    plain_layers.compare(tmp_path, *plain())


# ---- layers and stages -----------------------------------------------------------------------------------------------

SHAPE = "--hidden-size 24 --num-attention-heads 3 --seq-length 12 --mock-data --vocab-size 100 --micro-batch-size 1"
SHAPE += " --global-batch-size 8 --train-iters 2 --lr 1e-2 --device cpu --hybrid-layer-pattern"


def parsed(words: str):
    return parse_any(f"{SHAPE} {words}".split())


@pytest.mark.parametrize(
    "pattern, pp, layers",
    [  # as Megatron-LM numbers them: the segment of (rank, chunk) is chunk * pp + rank
        ("*-*-|*-", 2, [[range(0, 4)], [range(4, 6)]]),
        ("*-|*|-*|-", 2, [[range(0, 2), range(3, 5)], [range(2, 3), range(5, 6)]]),
        ("||*-|*|-|", 3, [[range(0, 0), range(2, 3)], [range(0, 0), range(3, 4)], [range(0, 2), range(4, 4)]]),
    ],
)
def test_layers_of_the_stages_of_a_pattern(pattern, pp, layers):
    config = parsed(f"{pattern} --pipeline-model-parallel-size {pp}")
    assert not check(config, pp)
    pipeline = Pipeline.of(config.parallel, config.model.num_layers)
    assert [pipeline.layers_of(rank) for rank in range(pp)] == layers
    assert config.model.hybrid_layer_pattern == pattern.replace("|", "")  # cuts are layout


def test_what_a_pattern_without_a_part_means():
    """A cut has no effect on one pipeline rank, and a last / no layers."""
    for words in ("*-|*-", "*-*-/", "*-*-"):
        config = parsed(words)
        assert config.model.hybrid_layer_pattern == "*-*-" and config.model.num_layers == 4
        assert Pipeline.of(config.parallel, 4).layers == (range(4),)
    assert parsed("*-*- --num-layers 2").model.num_layers == 4  # the pattern counts, as in Megatron-LM
    assert parse_any(f"{SHAPE.replace('layer', 'override')} *-*-".split()).model.letters == "*-*-"


def test_ratios_are_the_pattern_that_they_spread():
    shape = SHAPE.replace("--hybrid-layer-pattern", "--num-layers 10 --mamba-num-heads 8 --mamba-head-dim 6")
    config = parse_any(f"{shape} --hybrid-attention-ratio 0.2 --hybrid-mlp-ratio 0.3".split())
    assert config.model.hybrid_layer_pattern == "MM-*M-*MM-" and config.model.hybrid_mlp_ratio == 0
    assert config == named_recipe("GPT").normalize_config(config)


def test_what_counts_is_said():
    said = remarks(parsed("*-|*- --num-layers 2"), 1)
    assert "--num-layers 2: --hybrid-layer-pattern lists 4 layers, and counts" in said
    assert any("| cuts pipeline stages, and --pipeline-model-parallel-size is 1" in one for one in said)
    said = remarks(parsed("*-|*- --pipeline-model-parallel-size 2"), 2)
    assert not any("hybrid" in one for one in said)


def test_branches_and_parameters_are_those_of_the_letters():
    facts = facts_of(parsed("*E*-- --num-experts 4"), 101)
    names = [[mixer.name for branch in facts.branches(n) for mixer in branch.mixers] for n in range(5)]
    assert names == [["attention"], ["experts"], ["attention"], ["mlp"], ["mlp"]]
    h, ffn, vocabulary = 24, 96, 101
    attention, mlp, norm = 4 * h * h + 4 * h, 2 * h * ffn + ffn + h, 2 * h
    experts = 4 * mlp + 4 * h + 4  # with the router
    wanted = vocabulary * h + 12 * h + 2 * attention + 2 * mlp + experts + 6 * norm
    assert facts.parameters == wanted and facts.settings.expert_layers == (1,)
    assert facts.active_parameters == wanted - 2 * mlp  # two of four experts


@pytest.mark.parametrize("given, stages", [("", {2, 4}), ("--pipeline-model-parallel-size 4", {4})])
def test_a_search_keeps_the_cuts(given, stages):
    """And tries the numbers of ranks that divide the parts."""
    config = parsed(f"*-*-|*-|*-|*-*-* {given} --auto-parallel --world-size 8 --device-name A100-80GB")
    found = search_layouts(config)
    assert {plan.layout.pp for plan in found.searched.plans} == stages
    for plan in found.searched.plans:
        assert plan.layout.stage_layers == "4,2,2,5" and plan.layout.pp * plan.layout.chunks == 4
    free = search_layouts(parsed("*-*-*-*-*-* --auto-parallel --world-size 4 --device-name A100-80GB"))
    assert {1, 2, 4} <= {plan.layout.pp for plan in free.searched.plans}


def test_a_shrunk_job_has_every_kind():
    words = "*--*--*--*--*--*--*--*--*E|*--*--*--*--*--*--*--*--*- --num-experts 4 --pipeline-model-parallel-size 2"
    small = shrunk_job_of(parsed(words), 2).config
    letters = small.model.hybrid_layer_pattern
    assert set(letters) == set("*-E") and len(letters) == small.model.num_layers <= 6
    assert not check(small, 2)
    pairs = Model(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8)
    assert pairs.residual_sums == 4 and small.model.residual_sums == len(letters)


WRONG = {
    "": "--hybrid-layer-pattern",
    "*K": "K is Kimi's delta attention",
    "*-*-/*-/-*": "the parts after / differ: *-, -*",
    "*E": "add --num-experts",
    "*- --num-experts 4": "--num-experts 4: --hybrid-layer-pattern *- lists no layer of experts (E)",
    "*-/*E": "--hybrid-layer-pattern *-/*E has experts (E) in depths of multi-token prediction alone",
    "*-/*E --num-experts 4": "--hybrid-layer-pattern *-/*E has experts (E) in depths of multi-token prediction alone",
    "*-/+-": "* and + are two kinds of attention",
    "P-/+- --mamba-num-groups 1": "lists attention and multi-latent attention (+)",
    "*-/G- --linear-num-key-heads 3": "--linear-num-value-heads 32 is not a multiple of --linear-num-key-heads 3",
    "*-/*- --multi-latent-attention": "--hybrid-layer-pattern *-/*- lists no layer of mla (+); add one, or leave out --m",
    "*E --num-experts 4 --moe-layer-freq 2": "--moe-layer-freq 2: --hybrid-layer-pattern lists the layers with experts",
    "*-|*-|*- --pipeline-model-parallel-size 2": "3 stages, and --pipeline-model-parallel-size is 2",
    "*-|*- --pipeline-model-parallel-size 2 --pipeline-stage-layers 2,2": "and --pipeline-stage-layers 2,2 both cut",
    "*-|*- --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1": (
        "--num-virtual-stages-per-pipeline-rank 1 both cut"
    ),
    "*-|*- --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1": (
        "--num-layers-per-virtual-pipeline-stage 1 both cut"
    ),
    "*-|*- --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1": (
        "--decoder-first-pipeline-num-layers 1 both cut"
    ),
    "*-|*- --pipeline-model-parallel-size 2 --account-for-loss-in-pipeline-split": "split both cut",
    "*-|*|-|* --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1": "zb-h1",
    "*- --hybrid-mlp-ratio 0.5": "--hybrid-layer-pattern *- and --hybrid-mlp-ratio 0.5 both say what the layers are",
    "*-- --pipeline-model-parallel-size 2": "cannot be cut into 2 even stages",
    "*-*- --no-recompute-layers 4 --recompute-granularity full": "must be numbers of layers from 0 to 3",
    "*-*- --model-type T5 --encoder-num-layers 2": "--hybrid-layer-pattern: ",
    "*-*- --model-type BERT --num-layers 2": "--hybrid-layer-pattern: ",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_use_has_one_clear_message(words):
    with pytest.raises((Failure, AssertionError)) as error:
        config = parsed(words)
        pp = config.parallel.pipeline_model_parallel_size
        problems = check(config, pp)
        assert not problems, "\n".join(problems)
    assert WRONG[words] in str(error.value)


@pytest.mark.parametrize("words", ["*E", "*-/*E", "*- --layer-settings 0:ffn=2", "*- --layer-settings 0:window_size=3"])
def test_a_dry_run_says_the_same(words):
    with pytest.raises(Failure) as error:
        pretrain_hybrid.main(f"{SHAPE} {words} --dry-run".split())
    assert str(error.value) == "\n".join(check(parsed(words), 1))


def test_depths_alone_may_rotate():
    own = "--position-embedding-type rope --qk-pos-emb-head-dim 6 --mamba-num-groups 1"
    made = parsed(f"M-/+- {own}")
    assert made.model.multi_latent_attention and facts_of(made, 100).rotated == 6


@pytest.mark.parametrize("number, said", [(0, True), (1, True), (2, False)])
def test_depths_are_those_of_the_pattern(number, said):
    found = remarks(parsed(f"*-/*-/*- --position-embedding-type rope --mtp-num-layers {number}"), 1)
    words = f"--mtp-num-layers {number}: the parts after / in --hybrid-layer-pattern are 2, and count"
    assert (words in found) == said


@pytest.mark.parametrize("freq, said", [("2", True), ("[1,0,0,0]", False), ("[0,1,1,0]", False), ("[0,0,0,1]", True)])
def test_rotation_is_of_attention(freq, said):
    found = remarks(parsed(f"*-*- --position-embedding-type rope --no-rope-freq {freq}"), 1)
    assert any(f"--no-rope-freq {freq} has no effect: it counts the characters" in one for one in found) == said


def test_the_script_takes_ratios(capsys):
    line = SHAPE.replace("--hybrid-layer-pattern", "--num-layers 4 --mamba-head-dim 8 --mamba-num-groups 1 --dry-run")
    pretrain_hybrid.main(f"{line} --hybrid-attention-ratio 0.25 --hybrid-mlp-ratio 0.25".split())
    assert "no problems found" in capsys.readouterr().out
    with pytest.raises(Failure, match="--hybrid-attention-ratio 1.5 must be at least 0 and at most 1"):
        pretrain_hybrid.main(f"{line} --hybrid-attention-ratio 1.5".split())


def test_the_script_needs_a_pattern(capsys):
    with pytest.raises(Failure, match="--hybrid-layer-pattern is missing: the kind of each layer"):
        pretrain_hybrid.main(f"{SHAPE.replace('--hybrid-layer-pattern', '--num-layers 2')}".split())
