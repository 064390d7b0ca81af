# SPDX-License-Identifier: Apache-2.0
"""LoRA (`--lora-rank`): whole trainings against plain torch in every layout, what the products cost, dropout, and
checkpoints of adapters alone.
"""

import math
import re
import shutil
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import finetune
import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.convert.merged import magnitude, with_norms
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model import weights
from megatron.model.command_line import parse_any
from megatron.model.lora import own_weights
from megatron.model.lora_product import DoRAProduct, LoRAProduct
from megatron.mpu.deferred_wgrad import WeightGradStore, run_deferred_wgrads
from megatron.mpu.layers import ColumnParallelLinear
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import Draws, random_words, seed_of
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from megatron.training.rules import check, idle
from tests.models.in_layouts import check_layout
from tests.ranks import on_ranks, trains
from tests.tasks.classification import SIZE, Toy
from tests.training.plain_loop import HEADS, HIDDEN, LAYERS, Job, plain_linear, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare, records

pytestmark = pytest.mark.sampled(10)

LINE = f"{FLAGS} {SIX} {ADAM}"
TP3, PP2 = "--tensor-model-parallel-size 3", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "tp3": (3, TP3),
    "tp3 with sequence parallelism, fusion": (3, f"{TP3} --sequence-parallel --gradient-accumulation-fusion"),
    "tp3, recomputed attention": (3, f"{TP3} --recompute-granularity full_attn"),
    "cp2": (2, "--context-parallel-size 2"),
    "zero1": (2, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2"),
    "zero3, recomputation": (2, "--sharding-stage 3 --recompute-granularity full --recompute-method uniform"),
    "pp2": (2, PP2),
    "pp2 zb-h1, zero3": (2, f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 3"),
    "pp2 dp2 zb-h1, zero2, fusion": (
        4,
        f"{PP2} --pipeline-schedule zb-h1 --sharding-stage 2 --gradient-accumulation-fusion",
    ),
    "tp3 pp2, zero1": (6, f"{TP3} --sequence-parallel {PP2} --sharding-stage 1"),
}
PAIRS = "--lora-rank 4 --lora-alpha 6 --lora-target attention.qkv,mlp.*"
SHAPES = {
    "attention.qkv": ((HEADS, 3, HIDDEN // HEADS), HIDDEN),
    "mlp.up": ((4 * HIDDEN,), HIDDEN),
    "mlp.down": ((HIDDEN,), 4 * HIDDEN),
}


# ---- whole trainings -------------------------------------------------------------------------------------------------


def first_pairs(seed: int, parts: int = 1) -> dict[str, torch.Tensor]:
    """A with the variance of the original code, 1 / (3 inputs); B is 0. parts: of queries, keys and values."""
    found = {}
    for n in range(LAYERS):
        for layer, (rows, inputs) in SHAPES.items():
            name, count = f"blocks.{n}.{layer}.lora_a", parts if layer == "attention.qkv" else 1
            generator = torch.Generator().manual_seed(seed_of(seed, name, 0))
            found[name] = (
                torch.empty(4 * count, inputs).normal_(0.0, (3 * inputs) ** -0.5, generator=generator).double()
            )
            found[f"blocks.{n}.{layer}.lora_b"] = torch.zeros((*rows, 4), dtype=torch.float64)
    return found


def with_pairs(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """y + 6 / 4 x (x A^T) B^T; with three times as many rows in A, for queries, keys and values apart."""
    y = plain_linear(weights, name, x)
    if f"{name}.lora_a" not in weights:
        return y
    a, b = weights[f"{name}.lora_a"], weights[f"{name}.lora_b"]
    if len(a) == 4:
        return y + 1.5 * (x @ a.T) @ b.reshape(-1, 4).T
    parts = [torch.einsum("bsr,gdr->bsgd", x @ own.T, b[:, n]) for n, own in enumerate(a.chunk(3))]
    return y + 1.5 * torch.stack(parts, 3).flatten(2)


@cache
def plain(parts: int = 1):
    only = dict(trains=lambda name: ".lora_" in name)
    return train(Job(**PLAIN, linear=with_pairs, more=lambda seed: first_pairs(seed, parts), **only))


def with_directions(weights, name: str, x: torch.Tensor) -> torch.Tensor:
    """DoRA: the rows of W + 6 / 4 B A with norms |W| + M; PEFT differentiates the present norms neither."""
    if f"{name}.lora_a" not in weights:
        return plain_linear(weights, name, x)
    weight = weights[f"{name}.weight"]
    moved = weight + 1.5 * weights[f"{name}.lora_b"] @ weights[f"{name}.lora_a"]
    norms = weight.norm(dim=-1, keepdim=True) + weights[f"{name}.lora_magnitude"]
    rows = norms * moved / moved.detach().norm(dim=-1, keepdim=True)
    return plain_linear({**weights, f"{name}.weight": rows}, name, x)


def first_magnitudes(seed: int) -> dict[str, torch.Tensor]:
    pairs = first_pairs(seed)
    zeros = {name: torch.zeros_like(b[..., :1]) for name, b in pairs.items() if name.endswith("lora_b")}
    return pairs | {name.replace("lora_b", "lora_magnitude"): b for name, b in zeros.items()}


@cache
def plain_directions():
    only = dict(trains=lambda name: ".lora_" in name)
    return train(Job(**PLAIN, linear=with_directions, more=first_magnitudes, **only))


pretrain = trains(pretrain_gpt, LINE)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{PAIRS} {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_directions_and_norms_are_those_of_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{PAIRS} --use-dora {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain_directions())


@pytest.mark.parametrize("layout", ["one process", pytest.param("tp3", marks=pytest.mark.full)])
def test_pairs_of_queries_keys_and_values_apart(layout, tmp_path):
    world, words = LAYOUTS[layout]
    line = f"{PAIRS} --lora-split-fused {words} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain(3))


DROPPED = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100
    --micro-batch-size 2 --global-batch-size 8 --lr 3e-2 --eval-iters 0 --device cpu --precision fp32 --train-iters 2
    --swiglu --group-query-attention --num-query-groups 2 --lora-rank 4 --lora-dropout 0.3 --lora-split-fused"""


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", ["tp2", "tp2sp", "cp2", "dp2-zero3", "pp2-zbh1", "tp2sp-pp2"])
@pytest.mark.parametrize("again", ["", "--recompute-granularity selective --recompute-modules mlp layernorm"])
def test_dropout_is_the_same_in_each_layout(layout, again):
    check_layout(layout, f"{DROPPED} {again}")


def test_adapters_of_other_models(tmp_path):
    """A T5, whose decoder also has cross-attention, and a BERT, in two layouts each; their first loss is the base's."""
    common = "--lr 3e-2 --train-iters 2 --lora-rank 2 --lora-dropout 0.2 --hidden-size 16 --num-attention-heads 2"
    common += " --mock-data --vocab-size 40 --micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --device cpu"
    t5 = "--model-type T5 --encoder-num-layers 2 --decoder-num-layers 2 --seq-length 12 --decoder-seq-length 8"
    check_layout("tp2sp", f"{common} {t5} --position-embedding-type relative")
    check_layout("pp2", f"{common} --model-type BERT --num-layers 2 --seq-length 12")


# ---- the products ----------------------------------------------------------------------------------------------------

ROWS, INPUTS, S, B = (3, 4, 2), 10, 6, 2  # of queries, keys and values: 2 + 1 + 1
SETTINGS = Model(num_layers=1, hidden_size=INPUTS, num_attention_heads=2, lora_rank=3, lora_alpha=5.0)


def made(split: bool, dropout: float = 0.0, dora: bool = False):
    settings = Model(**{**vars(SETTINGS), "lora_split_fused": split, "lora_dropout": dropout, "use_dora": dora})
    table = weights.column(INPUTS, ROWS, 1.0, matrices=(1, (2, 1, 1)))
    table |= own_weights(settings, table["weight"])
    layer = ColumnParallelLinear(table, Mesh().tp, dtype=torch.float64)
    layer.product = (DoRAProduct if dora else LoRAProduct)(layer, "blocks.7.mlp.up", settings)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.normal_(generator=torch.Generator().manual_seed(seed))
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    if dropout:
        layer.product.draws = Draws(11, Mesh().cp)
        layer.product.draws.samples = torch.tensor([4, 9])
    return layer


def expected(layer, x: torch.Tensor, split: bool, keep: torch.Tensor | float = 1.0) -> torch.Tensor:
    bias = layer.bias.flatten()
    if "lora_magnitude" not in layer.placements:
        return without_bias(layer, x, split, keep) + bias
    moved = without_bias(layer, torch.eye(INPUTS, dtype=torch.float64).unsqueeze(1), split).squeeze(1).detach()
    norms = layer.weight.flatten(0, -2).norm(dim=1) + layer.lora_magnitude.flatten()
    return norms / moved.norm(dim=0) * without_bias(layer, x, split, keep) + bias


def without_bias(layer, x: torch.Tensor, split: bool, keep: torch.Tensor | float = 1.0) -> torch.Tensor:
    a, b = layer.lora_a, layer.lora_b
    parts = [x * keep @ own.T for own in a.chunk(3)] if split else [x * keep @ a.T] * 3
    each = [torch.einsum("sbr,gqdr->sbgqd", xa, part) for xa, part in zip(parts, b.split((2, 1, 1), 1), strict=True)]
    return F.linear(x, layer.weight.flatten(0, -2)) + 5 / 3 * torch.cat(each, 3).flatten(2)


@pytest.mark.parametrize("way", ["autograd", "deferred"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("dora", [False, True])
def test_products_against_autograd(way, split, dropout, dora):
    layer = made(split, dropout, dora)
    pairs = [one for one in ("lora_a", "lora_b", "lora_magnitude") if one in layer.placements]
    x = torch.randn(S, B, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    keep = 1.0
    if dropout:  # by sample, layer and position alone
        words = random_words(
            (S, INPUTS), [seed_of(11, -1, "lora blocks.7.mlp.up", n) for n in (4, 9)], torch.device("cpu")
        )
        keep = 2.0 * (words.movedim(0, 1) >= 0)
    wanted = torch.autograd.grad(expected(layer, x, split, keep).sin().sum(), [x, *map(layer.get_parameter, pairs)])
    layer.weight_grad_store = store = WeightGradStore() if way == "deferred" else None
    y = layer(x)
    torch.testing.assert_close(y, expected(layer, x, split, keep))
    if store:
        with store.collect() as products:
            y.sin().sum().backward()
        assert layer.lora_a.grad is None and len(products) == 1
        own = {name: getattr(layer, name).data.clone() for name in (*pairs, "weight") if dora or name != "weight"}
        for name in own:
            getattr(layer, name).data.fill_(math.nan)  # gone with ZeRO 3
        run_deferred_wgrads(products)
    else:
        y.sin().sum().backward()
    for found, one in zip((x.grad, *(layer.get_parameter(name).grad for name in pairs)), wanted, strict=True):
        torch.testing.assert_close(found, one)
    layer.eval()
    own = made(split, dropout, dora)
    torch.testing.assert_close(
        layer.requires_grad_(False)(x) if way == "autograd" else own.eval()(x), expected(own, x, split)
    )


@pytest.mark.sampled(1)
def test_a_row_of_zeros_merges_as_it_computes():
    layer = made(split=False, dora=True).requires_grad_(False).eval()
    for one in (layer.weight, layer.lora_b):
        one.flatten(0, -2)[2] = 0
    eye, row = torch.eye(INPUTS, dtype=torch.float64).unsqueeze(1), layer.weight.flatten(0, -2)
    moved = without_bias(layer, eye, split=False).squeeze(1).T
    found = with_norms(moved, magnitude(row, layer.lora_magnitude.flatten(0, -2)))
    torch.testing.assert_close(found, (layer(eye) - layer.bias.flatten()).squeeze(1).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target, pairs", [("*", 4), ("attention.qkv", 1)])
def test_the_gradient_of_a_frozen_weight_is_never_computed(target, pairs):
    """Products of a step: one each in the two passes for a frozen weight, and those of a pair beside them."""
    flags = """--num-layers 1 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 --mock-data
        --vocab-size 64 --train-iters 1 --lr 1 --device cpu --precision fp32 --attention-dropout 0 --hidden-dropout 0"""

    def flops(words: str) -> int:
        config = parse_any(f"{flags} {words}".split())
        # By torch's own products
        model = pretrain_gpt.build_model(config, Mesh(), 64, dtype=torch.bfloat16, device="cpu")
        only = config.optimizer.train_only
        for name, parameter in model.named_parameters():
            parameter.data.normal_(0, 0.02)
            parameter.requires_grad_(not only or ".lora_" in name)
        x = torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        batch = SimpleNamespace(samples=torch.arange(2), document_ids=None, position_ids=None, tokens=x[..., 0])
        context = model.context(batch)
        with FlopCounterMode(display=False) as counter:
            model.blocks["0"](x, context).sum().backward()
        return counter.get_total_flops()

    n, h, r = 64, 64, 4
    sizes = {"attention.qkv": (h, 3 * h), "attention.output": (h, h), "mlp.up": (h, 4 * h), "mlp.down": (4 * h, h)}
    wide = sum(i * o for i, o in sizes.values())
    picked = [size for name, size in sizes.items() if target in ("*", name)]
    assert len(picked) == pairs
    # Forward x A, then B; backward dy B, then A; of the pair's gradients dy B and x A again, and two products.
    narrow = 4 * sum(i + o for i, o in picked) * r
    saved = flops("") - flops(f"--lora-rank {r} --lora-target {target}")
    assert saved == 2 * n * (wide - narrow)


# ---- checkpoints of adapters alone -----------------------------------------------------------------------------------


def tensors(folder: Path, step: int | None = None) -> dict[str, torch.Tensor]:
    paths = sorted(folder.glob("iter_*"))
    with Reader(paths[-1] if step is None else folder / f"iter_{step:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    pretrain(0, f"--train-iters 2 --save {folder}")
    return folder


@pytest.mark.sampled(10)
def test_adapters_alone_are_saved_and_go_on_in_any_layout(base, run_ranks, tmp_path):
    """Saved by the stages of a pipeline, and gone on with by ranks of tp."""
    start = f"{PAIRS} --finetune --load {base}"
    pretrain(0, f"{start} --save {tmp_path / 'one'}")
    run_ranks(2, pretrain, f"{start} --save {tmp_path / 'two'} {PP2} --pipeline-schedule zb-h1 --exit-interval 3")
    run_ranks(3, pretrain, f"{PAIRS} --load {tmp_path / 'two'} --save {tmp_path / 'two'} {TP3}")
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert one.keys() == two.keys() and all(re.search(r"\.lora_[ab]$", name) for name in one)
    assert len(one) == 3 * 2 * len(SHAPES) * LAYERS
    assert all((one[name] - two[name]).abs().max() < 1e-5 for name in one)
    first = records(tmp_path / "one", "step")[0]["lm loss"]
    pretrain(0, f"--train-iters 3 --finetune --load {base} --save {tmp_path / 'full'}")
    assert first == records(tmp_path / "full", "step")[0]["lm loss"]
    # A run of ranks that goes on from the other's half repeats it to the bit.
    again = f"{PAIRS} --load {tmp_path / 'two'} --ckpt-step 3 --save {tmp_path / 'three'} {TP3}"
    run_ranks(3, pretrain, again)
    three = tensors(tmp_path / "three")
    assert all(torch.equal(three[name], values) for name, values in two.items())


def adapted(base: Path, folder: Path, words: str = "") -> Path:
    pretrain(0, f"{PAIRS} --train-iters 2 --finetune --load {base} --save {folder} {words}")
    return folder


def test_the_base_may_move_and_be_resharded_and_no_other_is_taken(base, tmp_path, capsys):
    here = tmp_path / "here"
    shutil.copytree(base, here / "base")
    ours = adapted(here / "base", here / "adapters")
    here.rename(tmp_path / "there")
    ours = tmp_path / "there" / "adapters"
    before = load_model(str(ours)).model.state_dict()  # both moved together
    tool.main(["inspect", str(ours)])
    assert "trained on " in capsys.readouterr().out
    moved = tmp_path / "elsewhere"
    tool.main(["reshard", str(tmp_path / "there" / "base"), str(moved), "--tp", "3"])
    shutil.rmtree(tmp_path / "there" / "base")
    with pytest.raises(CheckpointError, match="and that checkpoint is not there") as refusal:
        load_model(str(ours))
    assert "--base" in refusal.value.do
    tool.main(["reshard", str(ours), str(tmp_path / "new"), "--writers", "2", "--base", str(moved)])
    after = load_model(str(tmp_path / "new")).model.state_dict()
    assert all(torch.equal(after[name], values) for name, values in before.items())
    pretrain(0, f"--train-iters 1 --finetune --load {base} --save {tmp_path / 'other'}")
    with pytest.raises(CheckpointError, match="is not the base of .*: it holds other weights"):
        tool.main(["reshard", str(ours), str(tmp_path / "no"), "--writers", "1", "--base", str(tmp_path / "other")])
    shutil.rmtree(moved)
    shutil.copytree(tmp_path / "other", moved)
    (moved / "iter_0000001").rename(moved / "iter_0000002")
    with pytest.raises(CheckpointError, match="is not the base of .*: it holds other weights"):
        pretrain(0, f"{PAIRS} --load {tmp_path / 'new'} --train-iters 3 --override train_iters")


def test_adapters_begin_with_adapters_and_are_not_dropped(base, tmp_path, capsys):
    ours = adapted(base, tmp_path / "ours")
    told = capsys.readouterr().out
    assert "new: 6 pairs of LoRA weights\n" in told and "not out of the checkpoint" not in told
    with pytest.raises(SettingsError, match=r"has adapters \(--lora-rank 4\), which this run would drop"):
        pretrain(0, f"--finetune --load {ours} --save {tmp_path / 'no'}")
    capsys.readouterr()
    found = parse_any(f"--finetune --load {ours} --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data".split())
    assert (found.model.lora_rank, found.model.lora_alpha) == (4, 6.0)
    assert (
        "its adapters (--lora-rank 4), which this run continues to train, and its tokenizer" in capsys.readouterr().err
    )
    with pytest.raises(SettingsError, match="--lora-alpha: 6.0 in the checkpoint, 7.0 now"):
        pretrain(0, f"{PAIRS.replace('6', '7')} --load {ours} --save {tmp_path / 'no'}")
    with pytest.raises(SettingsError, match="were trained without --use-dora, this run is with it"):
        pretrain(0, f"{PAIRS} --use-dora --finetune --load {ours} --save {tmp_path / 'no'}")
    pretrain(0, f"{PAIRS.replace('6', '3')} --finetune --load {ours} --save {tmp_path / 'half'} --train-iters 1")
    assert (
        "products of adapters are multiplied by 0.75 (--lora-alpha), in the checkpoint by 1.5"
        in capsys.readouterr().out
    )
    pretrain(0, f"{PAIRS} --finetune --load {ours} --save {tmp_path / 'more'} --train-iters 1")
    with Reader(tmp_path / "more/iter_0000001") as reader:
        assert reader.state["base"]["path"] == str(base / "iter_0000002")
    assert records(tmp_path / "more", "step")[0]["lm loss"] < records(ours, "step")[0]["lm loss"]


def logits_of(rank: int, folder: Path, tp: int, out: Path) -> None:
    from megatron.mpu.initialize import join_job
    from megatron.settings.schema import Kernels, Parallel

    context = join_job(Parallel(tensor_model_parallel_size=tp), Kernels(device="cpu"))
    model = load_model(str(folder), mesh=context.mesh).model
    tokens = torch.arange(24).view(12, 2)
    found = model.logits(tokens)
    if rank == 0:
        torch.save(found, out)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("more", ["", "--use-dora"])
def test_merged_weights_give_the_same_logits(more, run_ranks, tmp_path):
    """At tp 1, 2 and 4, of adapters whose products count."""
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100"
    shape += " --device cpu --micro-batch-size 4 --eval-iters 0 --swiglu --lr 3e-2"
    pretrain_gpt.main(f"{shape} --train-iters 2 --save {tmp_path / 'base'}".split())
    more += " --lora-rank 4 --lora-alpha 16 --use-rslora --lora-split-fused --lora-dropout 0.1"
    pretrain_gpt.main(
        f"{shape} {more} --finetune --load {tmp_path / 'base'} --save {tmp_path / 'a'} --train-iters 6".split()
    )
    tool.main(["merge-lora", str(tmp_path / "a"), str(tmp_path / "merged"), "--writers", "2"])
    found = {}
    for name in ("base", "a", "merged"):
        for tp in (1, 2, 4) if name != "base" else (1,):
            out = tmp_path / f"{name}{tp}.pt"
            run_ranks(tp, logits_of, tmp_path / name, tp, out)
            found[name, tp] = torch.load(out)
    assert (found["a", 1] - found["base", 1]).abs().max() > 0.01
    for values in found.values():
        assert values is found["base", 1] or (values - found["a", 1]).abs().max() <= 1e-5
    record = load_model(str(tmp_path / "merged")).config
    assert record.model.linear is record.model.lora_rank is record.optimizer.train_only is None
    with pytest.raises(SettingsError, match="has no LoRA adapters"):
        tool.main(["merge-lora", str(tmp_path / "merged"), str(tmp_path / "again")])


def test_a_task_trains_pairs_and_its_new_head(tmp_path):
    pretrain_gpt.main(
        f"{SIZE} --mock-data --train-iters 2 --lr 1e-2 --eval-iters 0 --save {tmp_path / 'trunk'}".split()
    )
    toy = Toy(tmp_path / "toy")
    line = f"--task {toy.yaml} --data-path {toy.folder} --load {tmp_path / 'trunk'} --save {tmp_path / 'run'} --lora-rank 2"
    line += " --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --train-epochs 1 --log-interval 1 --device cpu"
    finetune.main(line.split())
    own = [name for name in tensors(tmp_path / "run") if not name.startswith("optimizer.")]
    assert "optimizer.exp_avg.head.weight" in tensors(tmp_path / "run")  # and not frozen with its first values
    assert "head.weight" in own and {name.rpartition(".")[2] for name in own} == {"lora_a", "lora_b", "weight"}
    finetune.main(f"{line} --load {tmp_path / 'run'} --skip-train --predictions {tmp_path / 'said'}".split())
    model = load_model(str(tmp_path / "run")).model.state_dict()
    trunk = load_model(str(tmp_path / "trunk")).model.state_dict()
    assert all(torch.equal(values, model[name]) for name, values in trunk.items() if name in model)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--lora-alpha 3", "--lora-alpha: there are no adapters without --lora-rank"),
        ("--linear mlp.*=lora", "--linear mlp.*=lora: there are no adapters without --lora-rank"),
        ("--use-dora", "--use-dora: there are no adapters without --lora-rank"),
        ("--lora-rank 0", "--lora-rank 0 must be at least 1"),
        ("--lora-rank 2 --lora-dropout 1", "--lora-dropout 1.0 must be at least 0 and below 1"),
        ("--lora-rank 2 --lora-alpha 0", "--lora-alpha 0.0 must be above 0"),
        ("--lora-rank 2 --lora-target gate", "--lora-target gate: 'gate' is no linear layer of this model; each"),
        ("--lora-rank 2 --linear mlp.*=loar", "'loar' is no kind of linear layer"),
    ],
)
def test_what_cannot_be_is_said(flags, said):
    found = check(parse_any(f"{LINE} {flags}".split()), 1)
    assert len(found) == 1 and said in found[0], found


@pytest.mark.sampled(1)
def test_a_trained_weight_has_no_direction_of_its_own():
    with pytest.raises(SettingsError, match="--use-dora: the weight of blocks.0.mlp.down is trained, too"):
        pretrain(0, "--lora-rank 2 --use-dora --train-only *mlp.down.weight")


@pytest.mark.sampled(1)
def test_what_the_flags_stand_for():
    config = parse_any(f"{LINE} --lora-rank 2".split())
    assert (config.model.linear, config.optimizer.train_only) == ("*=lora", ["*.lora_a", "*.lora_b"])
    config = parse_any(f"{LINE} --lora-rank 2 --linear mlp.*=lora --train-only *norm*".split())
    assert (config.model.linear, config.optimizer.train_only) == ("mlp.*=lora", ["*norm*", "*.lora_a", "*.lora_b"])
    assert idle(config, 1) == {}
