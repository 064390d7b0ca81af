# SPDX-License-Identifier: Apache-2.0
"""Linear layers that make their products in another way (`--linear`): a mask, a pair of small matrices, an emulated cast
to fp8, each a file of its own. Whole trainings are compared with the same network in plain torch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch

import pretrain_gpt
import pretrain_t5
from megatron.checkpoint.reader import Reader
from megatron.convert.huggingface import to_hf
from megatron.entry import start
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.linear_kinds import chosen
from megatron.model.lora import with_adapters
from megatron.mpu.linear_product import LinearProduct, attach_products
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import Draws, seed_of
from megatron.optimizer.units import flat_units_of
from megatron.pipeline.stages import Pipeline
from megatron.planner.layout import Job as PlannedJob
from megatron.planner.layout import Layout
from megatron.planner.parameters import rank_units
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.settings.own_choices import model_group
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import TokenizerSettings
from megatron.training.rules import check, idle, resolve
from tests.models import alibi, own_fp8, own_mask, own_pair
from tests.ranks import on_ranks
from tests.training.plain_loop import EOD, HEADS, HIDDEN, LAYERS, LENGTH, Job, logits, plain_linear, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, records

pytestmark = pytest.mark.sampled(10)

LINE = f"{FLAGS} {SIX} {ADAM}"
TOKENS = 8 * LENGTH  # of a step: what is minimised is divided by them before its gradient goes through the layers
TP3, PP2 = "--tensor-model-parallel-size 3 --sequence-parallel", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "tp3 with sequence parallelism": (3, "--tensor-model-parallel-size 3 --sequence-parallel"),
    "tp3, recomputation, fusion": (
        3,
        "--tensor-model-parallel-size 3 --recompute-granularity full_attn --gradient-accumulation-fusion",
    ),
    "pp2 zb-h1, parameters gathered": (
        2,
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --sharding-stage 3",
    ),
    "zero3, recomputation, fusion": (
        2,
        "--sharding-stage 3 --recompute-granularity full --recompute-method uniform --gradient-accumulation-fusion",
    ),
    "dp2": (2, ""),
    "zero1, overlap": (2, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2 --overlap-grad-reduce"),
    "pp2": (2, PP2),
    "pp2 dp2 zb-h1, zero2, fusion": (
        4,
        f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 2 --gradient-accumulation-fusion",
    ),
    "cp2": (2, "--context-parallel-size 2"),
    "tp3 pp2, zero2": (6, f"{TP3} {PP2} --sharding-stage 2"),
}


# ---- the layers in plain torch ---------------------------------------------------------------------------------------


def masked(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """Two of each four weights along the inputs, those with the larger of drawn scores."""
    weight = weights[f"{name}.weight"]
    if ".mlp." in name:
        generator = torch.Generator().manual_seed(seed_of(7, name))
        scores = torch.rand((*weight.shape[:-1], weight.shape[-1] // 4, 4), generator=generator)
        keep = torch.zeros_like(scores).scatter(-1, scores.topk(2, -1).indices, 1.0)
        weights = {**weights, f"{name}.weight": weight * keep.flatten(-2)}
    return plain_linear(weights, name, x)


def with_pair(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """y + 2 x (x A^T) B^T."""
    y = plain_linear(weights, name, x)
    if ".attention.qkv" in name or ".mlp.down" in name:
        a, b = weights[f"{name}.pair_a"], weights[f"{name}.pair_b"]
        y = y + 2.0 * (x @ a.T) @ b.reshape(-1, b.shape[-1]).T
    return y


def pairs(seed: int) -> dict[str, torch.Tensor]:
    found = {}
    for n in range(LAYERS):
        for name, rows, inputs in (
            ("attention.qkv", (HEADS, 3, HIDDEN // HEADS), HIDDEN),
            ("mlp.down", (HIDDEN,), 4 * HIDDEN),
        ):
            full = f"blocks.{n}.{name}.pair_a"
            generator = torch.Generator().manual_seed(seed_of(seed, full, 0))
            found[full] = torch.empty(4, inputs).normal_(0.0, 0.02, generator=generator).double()
            found[f"blocks.{n}.{name}.pair_b"] = torch.zeros((*rows, 4), dtype=torch.float64)
    return found


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To fp8 and back, eight neighbours at a time, by the power of two that brings the largest of them into range."""
    tiles = x.reshape(-1, 8)
    top = tiles.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
    scale = 2.0 ** (top / torch.finfo(dtype).max).log2().ceil()
    return ((tiles / scale).float().to(dtype).to(x.dtype) * scale).reshape(x.shape)


class InFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        x, weight = (rounded(one, torch.float8_e4m3fn) for one in (x, weight))
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        (x, weight), gradient = ctx.saved_tensors, TOKENS * rounded(gradient / TOKENS, torch.float8_e5m2)
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


def in_fp8(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
    if name.startswith("blocks.1."):
        return plain_linear(weights, name, x)
    return InFp8.apply(x, weight.reshape(-1, weight.shape[-1])) + bias.reshape(-1)


class Kind(NamedTuple):
    recipe: Callable
    flags: str
    job: dict
    near: dict = {}


KINDS = {
    "mask": Kind(own_mask.recipe, "--linear mlp.*=mask", dict(linear=masked)),
    "pair": Kind(own_pair.recipe, "--linear attention.qkv=pair,mlp.down=pair", dict(linear=with_pair, more=pairs)),
    "pair over a frozen base": Kind(
        own_pair.recipe,
        "--linear attention.qkv=pair,mlp.down=pair --train-only *.pair_*",
        dict(linear=with_pair, more=pairs, trains=lambda name: ".pair_" in name),
    ),
    "fp8": Kind(own_fp8.recipe, "--linear *=fp8,blocks.1.*=plain", dict(linear=in_fp8), dict(rel=1e-5, step=1e-4)),
}


@cache
def plain(kind: str):
    return train(Job(**PLAIN, **KINDS[kind].job))


def pretrain(rank: int, kind: str, flags: str) -> None:
    start(f"{LINE} {KINDS[kind].flags} {flags}".split(), KINDS[kind].recipe())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_layout_is_the_plain_loop(kind, layout, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{words} --save {tmp_path}"
    on_ranks(world, pretrain, kind, line)
    compare(tmp_path, plain(kind), **KINDS[kind].near)


# ---- which layers, and what else a run does with them ----------------------------------------------------------------


def settings(kind: str, flags: str = "", world: int = 1):
    recipe = KINDS[kind].recipe()
    defaults = {"model_type": recipe.model_type}
    config = parse_pretrain(f"{LINE} {KINDS[kind].flags} {flags}".split(), recipe.setting_groups, defaults=defaults)
    return recipe, config


@pytest.mark.sampled(1)
def test_what_a_pattern_picks():
    names = ["attention.qkv", "mlp.up", "mlp.down"]
    assert chosen("*=a", 3, names) == tuple((name, "a") for name in names)
    assert chosen("up=a blocks.[0-2].mlp.*=b", 3, names) == (("mlp.up", "a"),)
    assert chosen("up=a blocks.[0-2].mlp.*=b", 2, names) == (("mlp.up", "b"), ("mlp.down", "b"))
    assert chosen("blocks.3.mlp.down=a,*=plain", 3, names) == chosen(None, 3, names) == ()
    assert chosen("mlp=a,p=a,locks.3.*=a", 3, names) == ()


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            "--linear mlp.*=maks",
            "'maks' is no kind of linear layer; did you mean mask?; --model-type tests.models.own_mask",
        ),
        ("--linear mlp.*", "'mlp.*' is not PATTERN=KIND"),
        ("--linear =mask", "'=mask' is not PATTERN=KIND"),
        ("--linear mlp.*=mask,gate=mask", "'gate' is no linear layer of this model; each block has attention.qkv, "),
        ("--linear output=mask,embedding.word=mask", "'embedding.word' is no linear layer of this model"),
        ("--no-fuse-attn-qkv", "leave one of the two out"),
    ],
)
def test_what_cannot_be_is_said(flags, said):
    [problem] = check(settings("mask", flags)[1], 1)
    assert said in problem


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "flags, said",
    [
        ("--lora-rank 2 --lora-target q_proj,v_proj,mlp.down", "say --lora-target attention.qkv,mlp.down --lora-split"),
        ("--lora-rank 2 --lora-target mlp.c_fc", "; say --lora-target mlp.up"),
        ("--linear q_proj=plain,fc2=lora --lora-rank 2", "; say --linear attention.qkv=plain,mlp.down=lora"),
    ],
)
def test_one_message_has_all_names_of_another_library_and_the_flag_with_ours(flags, said):
    [problem] = check(with_adapters(parse_any(f"{LINE} {flags}".split())), 1)
    assert said in problem and problem.count("each block has") == 1


@pytest.mark.sampled(1)
def test_kinds_belong_to_a_recipe():
    [problem] = check(parse_any(f"{LINE} --linear mlp.*=mask".split()), 1)
    assert "'mask' is no kind of linear layer" in problem and "has plain, lora, fake_quantize, sparse (" in problem
    for name, kind in (("plain", own_mask.Mask), ("a b", own_mask.Mask), ("mask", 3)):
        with pytest.raises(SettingsError, match=r"Recipe.linears"):
            model_group({name: kind})
    with pytest.raises(SettingsError, match="plain torch.nn.Module"):
        resolve(parse_any([*f"{LINE} --linear *=plain".split(), "--model-type", "tests.models.plain_module"]), 1)


class Gate(torch.nn.Module):
    """What has a weight of a linear layer, and is none of the suite's."""


@pytest.mark.sampled(1)
def test_a_layer_that_is_none_of_the_suites_is_said():
    block = torch.nn.ModuleDict({"gate": Gate()})
    config = settings("mask")[1].model
    with pytest.raises(SettingsError, match="blocks.1.gate is a Gate, whose product is its own"):
        attach_products({"1": block}, config, {"mask": own_mask.Mask}, lambda layer: (("gate", "mask"),), Draws)


@pytest.mark.sampled(1)
def test_a_setting_of_a_kind_that_nothing_chooses_is_said():
    _, config = settings("mask", "--mask-seed 3")
    assert idle(config, 1) == {}
    _, config = settings("mask", "--mask-seed 3 --linear *=plain")
    assert idle(config, 1) == {"mask_seed": "--mask-seed 3 has no effect without --linear PATTERN=mask"}


@pytest.mark.sampled(1)
def test_settings_of_two_recipes_are_the_same():
    one, other = (settings("pair")[1].model for _ in range(2))
    assert one == other and hash(one) == hash(other) and type(one) is not type(other)
    assert one != settings("pair", "--pair-rank 3")[1].model


@pytest.mark.parametrize("layout", ["tp3sp", "pp2", "dp2-zero3"])
def test_weights_that_kinds_bring_are_counted(layout):
    """Facts, planner and preflight's units against the parameters of the modules themselves."""
    recipe, config = settings("pair", "--linear attention.*=pair,blocks.1.attention.output=plain")
    layout = parse_layout(layout)
    config = laid_out(config, layout)
    facts = recipe.facts(config, 101)
    one = torch.nn.ModuleList([recipe.build_model(config, Mesh(), 101, dtype=torch.float32, device="meta")])
    pairs_of = 2 * 4 * (24 + 72) + 4 * (24 + 24)  # of two layers' q, k and v, and one output
    assert facts.parameters == 17208 + pairs_of
    # Padding
    assert sum(one.get_parameter(f"0.{name}").numel() for name in facts.weights) == facts.parameters + 24 * 27
    base = settings("pair", "--linear *=plain")[1]
    assert facts.flops() == recipe.facts(laid_out(base, layout), 101).flops()
    job = PlannedJob.of(config, facts, dp=layout.dp, device="cpu")
    plan = Layout(tp=layout.tp, pp=layout.pp, dp=layout.dp, zero=layout.zero, sp=layout.sp)
    for rank in range(layout.pp):
        mesh = Mesh(rank * layout.tp, pp=layout.pp, tp=layout.tp)
        layers = Pipeline.of(config.parallel, LAYERS, 4).layers[rank]
        ends = dict(layers=layers, first=rank == 0, last=rank == layout.pp - 1)
        stage = recipe.build_model(config, mesh, 101, **ends, dtype=torch.float32, device="meta")
        assert rank_units(job, plan, rank).padded(plan.data_sizes) == sum(
            unit.size for unit in flat_units_of(stage, lambda name: Mesh().shard)
        )


class Same(LinearProduct):
    """Says nothing otherwise."""


@pytest.mark.parametrize("model", ["gpt", "t5"])
def test_a_kind_that_says_nothing_changes_no_bit(model, tmp_path):
    """In every linear layer, those that look at another sequence with them."""
    base = dict(gpt=pretrain_gpt, t5=pretrain_t5)[model].recipe()
    more = "" if model == "gpt" else "--decoder-seq-length 12 --vocab-extra-ids 20"
    for name, flags in (("plain", ""), ("same", "--linear *=same")):
        line = f"{LINE} {more} {flags} --train-iters 2 --save {tmp_path / name}"
        start(line.split(), replace(base, linears={"same": Same}))
    found = []
    for name in ("plain", "same"):
        with Reader(tmp_path / name / "iter_0000002") as reader:
            found.append({name: reader.read(name) for name in reader.tensors})
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []


def test_pairs_are_put_on_a_model_that_has_none(tmp_path, capsys):
    """--finetune takes the weights of a GPT; pairs are reinitialized, so that the first loss is the GPT's."""
    pretrain_gpt.main(f"{LINE} --train-iters 2 --save {tmp_path / 'base'}".split())
    pretrain_gpt.main(
        f"{LINE} --train-iters 1 --finetune --load {tmp_path / 'base'} --save {tmp_path / 'more'}".split()
    )
    capsys.readouterr()
    own = f"--train-iters 1 --finetune --load {tmp_path / 'base'} --save {tmp_path / 'own'}"
    pretrain(0, "pair", own)
    assert "new, and not out of the checkpoint: blocks.0.attention.qkv.pair_a" in capsys.readouterr().out
    losses = [records(tmp_path / name, "step")[0]["lm loss"] for name in ("more", "own")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.sampled(10)
def test_a_run_goes_on_in_another_layout(run_ranks, tmp_path):
    line = f"--save {tmp_path}"
    run_ranks(2, pretrain, "pair", f"--pipeline-model-parallel-size 2 {line} --exit-interval 3")
    run_ranks(3, pretrain, "pair", f"--tensor-model-parallel-size 3 {line} --load {tmp_path}")
    compare(tmp_path, plain("pair"))
    with pytest.raises(
        SettingsError, match=r"--linear: attention.qkv=pair,mlp.down=pair in the checkpoint, \*=pair now"
    ):
        pretrain(0, "pair", f"--load {tmp_path} --linear *=pair")


def test_logits_are_those_of_the_transformed_weights(tmp_path):
    pretrain(0, "mask", f"--save {tmp_path}")
    model = load_model(str(tmp_path)).model
    tokens = torch.randint(EOD, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    job = Job(**PLAIN, **KINDS["mask"].job)
    wanted = logits(plain("mask").tensors, tokens, job)
    assert (model.logits(tokens.T).transpose(0, 1).double() - wanted).abs().max() < 1e-3
    with pytest.raises(SettingsError, match=r"was trained with --linear mlp.\*=mask, which Hugging Face does not have"):
        to_hf(tmp_path / "iter_0000006", tmp_path / "hf", torch.float32, TokenizerSettings(), check=False)


@pytest.mark.parametrize("flags", ["--bf16", "--bf16 --amp-level O1", "--bf16 --gradient-accumulation-fusion"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_is_near_to_it(kind, flags, tmp_path):
    pretrain(0, kind, f"{flags} --save {tmp_path}")
    for found, wanted in zip(records(tmp_path, "step"), plain(kind).steps, strict=True):
        assert found["lm loss"] == pytest.approx(wanted["lm loss"], rel=5e-3)
        assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=3e-2)


@pytest.mark.parametrize(
    "recipe, flags",
    [(kind.recipe, kind.flags) for kind in KINDS.values()] + [(alibi.recipe, "")],
    ids=[*KINDS, "a buffer of attention"],
)
def test_shapes_are_checked_without_memory(recipe, flags):
    """Passes of a preflight, in which buffers have no memory either."""
    recipe = recipe()
    defaults = {"model_type": recipe.model_type, **recipe.defaults}
    line = f"{LINE} {flags} --tensor-model-parallel-size 3 --sequence-parallel"
    config = resolve(parse_pretrain(line.split(), recipe.setting_groups, defaults=defaults), 3)
    [shapes] = [
        check
        for check in check_ranks(Design(config, 3, recipe.facts(config, 101), recipe.build_model))
        if check.name == "shapes"
    ]
    assert shapes.fault == ""
