# SPDX-License-Identifier: Apache-2.0
"""Buffers of a user's modules: constants are moved to where the model is; what training changes becomes one value of all
ranks' once a step, and is saved, in any layout, against a loop in plain torch.
"""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.data.mock import MockDataset
from megatron.entry import start
from megatron.errors import NumericsError, SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.plain import plain_recipe
from megatron.model.recipe import facts_of
from megatron.model.recompute import recompute
from megatron.mpu.forked import run_ranks
from megatron.mpu.layers import register_buffer
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Buffer, placed_buffers
from megatron.optimizer.sharded import sharded_init
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.settings.schema import Parallel
from megatron.tools import checkpoint as tool
from megatron.training import build
from megatron.training.hooks import Hook
from megatron.training.rules import resolve
from tests.models import mlp_language_model as mlp
from tests.models import observed, plain_module
from tests.models.plain_state import LINE, STEPS, compare, initial_buffers, initial_weights, read_all, train
from tests.models.test_mlp_language_model import FLAGS, HIDDEN, PP, ZERO3, tensors_of
from tests.models.test_plain_module import FLAGS as PLAIN
from tests.models.test_plain_module import batch_of
from tests.planner.test_truth import counted_step
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

DATA = pretrain_gpt.build_datasets
GAIN = torch.linspace(0.5, 1.5, HIDDEN)


def scaled(gain_of, prepare=lambda block: None):
    """The recipe of the MLP, of which each layer's output is multiplied by gain_of(block)."""

    def build_model(*args, **kwargs):
        model = mlp.build_model(*args, **kwargs)
        for block in model.blocks.values():
            prepare(block)
            block.register_forward_hook(lambda block, args, output: (output[0] * gain_of(block), output[1]))
        return model

    return replace(mlp.recipe(), build_model=build_model)


def with_buffer(**how):
    return scaled(
        lambda block: block.gain, lambda block: block.register_buffer("gain", GAIN.to(how.pop("device", "cpu")), **how)
    )


@pytest.mark.parametrize("flags, world", [("", 1), (ZERO3, 2)])
def test_a_constant_of_a_layer(tmp_path, monkeypatch, flags, world):
    """As a buffer, against a tensor that the module knows nothing of; trained, and loaded again."""

    def train(rank, name, recipe):
        start(f"{FLAGS} {flags} --train-iters 2 --save {tmp_path / name}".split(), recipe)

    recipes = {"buffer": with_buffer(persistent=False), "constant": scaled(lambda block: GAIN)}
    for name, recipe in recipes.items():
        run_ranks(world, train, name, recipe)
    ours, theirs = (tensors_of(tmp_path / name, 2) for name in recipes)
    assert all(torch.equal(x, theirs[name]) for name, x in ours.items()) and ours.keys() == theirs.keys()
    monkeypatch.setattr(mlp, "recipe", lambda: recipes["buffer"])
    model = load_model(str(tmp_path / "buffer")).model
    assert torch.equal(model.blocks["3"].gain, GAIN)


def test_a_buffer_on_the_meta_device_is_told_by_name():
    recipe = scaled(
        lambda block: block.gain,
        lambda block: block.register_buffer(
            "gain", torch.ones(HIDDEN, device=block.up.weight.device), persistent=False
        ),
    )
    with pytest.raises(SettingsError, match="no values: blocks.0.gain, blocks.1.gain") as found:
        start(FLAGS.split(), recipe)
    assert found.value.code == 3 and 'device="cpu"' in found.value.do


@pytest.mark.parametrize("init", ["module", "suite"])
def test_a_plain_module(init, tmp_path):
    """A constant that the module computes for itself is kept where values are."""

    def recipe(part, **how):
        def build(config, vocab_size):
            module = plain_module.build(config, vocab_size)
            module.blocks.insert(0, part(**how))
            return module

        return plain_recipe("tests.models.plain_module", build, pretrain_gpt.build_datasets, init=init)

    class Gain(torch.nn.Module):
        def __init__(self, device=None, dtype=torch.float32):
            super().__init__()
            self.register_buffer("gain", torch.linspace(0.5, 1.5, HIDDEN, device=device, dtype=dtype), persistent=False)

        def forward(self, x):
            assert self.gain.is_cpu and self.gain[0] == 0.5
            return x * self.gain

    start(f"{PLAIN} --train-iters 1".split(), recipe(Gain, device="cpu"))
    if init == "module":
        return start(f"{PLAIN} --train-iters 1".split(), recipe(Gain))
    with pytest.raises(SettingsError, match="no values: blocks.0.gain"):
        start(PLAIN.split(), recipe(Gain, device="meta"))


# ---- what training changes -------------------------------------------------------------------------------------------

TP, AGAIN = "--tensor-model-parallel-size 2", "--recompute-granularity full"
LAYOUTS = {
    "one process": (1, ""),
    "recomputed": (1, f"{AGAIN} --recompute-num-layers 2"),
    "dp2": (2, ""),
    "tp2": (2, TP),
    "tp2 with sequence parallelism": (2, f"{TP} --sequence-parallel --recompute-granularity full_attn"),
    "pp2": (2, PP),
    "pp2 with zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
    "zero1": (2, "--sharding-stage 1"),
    "zero3": (2, f"{ZERO3} {AGAIN}"),
    "tp2 dp2": (4, f"{TP} --sequence-parallel --sharding-stage 2 {AGAIN}"),
}


def observe(rank: int, words: str) -> None:
    start(f"{LINE} {words}".split(), observed.recipe())


@cache
def plain():
    return train(initial_weights(), lambda name: True, initial_buffers())


def check(folder) -> None:
    """Against the plain loop: every step, and all weights and buffers at the end."""
    tensors = compare(folder, *plain())
    assert {tensors[f"blocks.{n}.watch.seen"].item() for n in range(4)} == {STEPS * 8 * 12}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_is_the_plain_loop(layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, observe, f"{words} --save {tmp_path} --check-replicas-interval 1")
    check(tmp_path)


@pytest.mark.parametrize(
    "then, now", [((2, TP), (2, ZERO3)), ((1, ""), (2, f"{PP} --pipeline-schedule zb-h1")), ((2, PP), (1, ""))]
)
def test_a_run_goes_on_in_another_layout(then, now, tmp_path):
    run_ranks(then[0], observe, f"{then[1]} --save {tmp_path} --exit-interval 2")
    run_ranks(now[0], observe, f"{now[1]} --save {tmp_path} --load {tmp_path}")
    check(tmp_path)


def test_nothing_but_steps_changes_them(tmp_path, monkeypatch):
    """To the bit: a stop, evaluations of a module that does not ask whether it is trained, recomputation."""
    ways = {"once": "", "stopped": "", "evaluated": "--eval-interval 1 --eval-iters 1", "again": AGAIN}
    for name, words in ways.items():
        flags = f"--save {tmp_path / name} {words}"
        if name == "stopped":
            observe(0, f"{flags} --exit-interval 2")
            flags += f" --load {tmp_path / name}"
        if name == "evaluated":
            monkeypatch.setattr(observed.ObservedGPT, "eval", lambda self: self)
        observe(0, flags.replace("--eval-iters 0", ""))
        monkeypatch.undo()
    first, *others = (read_all(tmp_path / name) for name in ways)
    assert all(torch.equal(other[name], values) for other in others for name, values in first.items())


def test_a_step_that_is_skipped_leaves_them(tmp_path):
    """fp16 with a loss scale that overflows at first, on the host and as a device decides it."""
    flags = "--fp16 --initial-loss-scale 1048576 --hysteresis 1"
    for name, late in {"now": False, "late": True}.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "defers_host_sync", lambda *args, late=late: late)
            observe(0, f"{flags} --save {tmp_path / name}")
        skipped = sum(step["skipped"] for step in records(tmp_path / name, "step"))
        found = read_all(tmp_path / name)
        assert 0 < skipped < STEPS and found["blocks.0.watch.seen"] == (STEPS - skipped) * 8 * 12
    one, other = (read_all(tmp_path / name) for name in ("now", "late"))
    assert all(torch.equal(other[name], values) for name, values in one.items())


class Rules(torch.nn.Module):
    """A buffer of each rule, to each of which a rank adds its own number."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))
        for rule in ("same", "max", "min", "sum", "mean"):
            register_buffer(self, rule, torch.tensor([10.0, -3.0], dtype=torch.float64), rule)
        register_buffer(self, "count", torch.tensor(1 << 60), "sum")
        register_buffer(self, "hit", torch.zeros(3, dtype=torch.bool), "max")


@pytest.mark.parametrize("stage", [0, 3])
def test_rules(stage):
    """By hand, two steps: a sum is of what each rank has added in a step, and whole numbers lose nothing."""

    def steps(rank):
        mesh = Mesh(rank, shard=2) if stage else Mesh(rank, replicate=2)
        model, optimizer = sharded_init(Rules, mesh, parallel=Parallel(sharding_stage=stage), init="module")
        for _ in range(2):
            for rule in ("max", "min", "sum", "mean"):
                getattr(model, rule).add_(torch.tensor([1.0 + rank, -1.0 - rank]))
            model.same += 1
            model.count += 1 + rank
            model.hit[rank] = True
            optimizer.step(0.0, 0.0, 1.0)
        model.max += 100
        optimizer.buffers.rollback()
        return {name: held.tensor.tolist() for name, held in placed_buffers(model).items()}

    one, other = run_ranks(2, steps)
    assert (
        one
        == other
        == dict(
            same=[12.0, -1.0],
            max=[14.0, -5.0],
            min=[12.0, -7.0],
            sum=[16.0, -9.0],
            mean=[13.0, -6.0],
            count=(1 << 60) + 6,
            hit=[True, True, False],
        )
    )


class Norm(torch.nn.BatchNorm1d):
    def forward(self, x):  # [s, b, h]
        return super().forward(x.flatten(0, 1)).view_as(x)


def normed(config, vocab_size):
    module = plain_module.PlainModule(HIDDEN, vocab_size)
    module.blocks.insert(0, Norm(HIDDEN))
    return module


def statistics(ranks: int, steps: int) -> list[torch.Tensor]:
    """(mean, variance, batches) of a plain loop whose batches are those of each rank."""
    found, data = [], MockDataset(1 << 20, 16, 101, 100, 1234, 0)
    for rank in range(ranks):
        with torch.random.fork_rng():
            torch.manual_seed(1234)
            module = normed(None, 101)
        adam = torch.optim.AdamW(module.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.0)
        for step in range(steps):
            places = range(4 * (ranks * step + rank), 4 * (ranks * step + rank) + 4)
            batch = batch_of(np.stack([data[place] for place in places]))
            adam.zero_grad()
            (module(None, batch)[1]["lm loss"] / batch.loss_mask.sum()).backward()
            adam.step()
        found.append([x.double() for x in module.blocks[0].buffers()])
    return [torch.stack(each).mean(0) for each in zip(*found, strict=True)]


@pytest.mark.parametrize("ranks, steps", [(1, 3), (2, 1)])
def test_statistics_of_a_norm(ranks, steps, tmp_path):
    """BatchNorm in a plain module: as torch has it; over two ranks, the mean of what each has found."""

    def train(rank):
        sizes = (
            f"--micro-batch-size 4 --global-batch-size {4 * ranks} --train-iters {steps} --weight-decay 0 --clip-grad 0"
        )
        start(f"{PLAIN} {sizes} --save {tmp_path}".split(), plain_recipe("tests.models.plain_module", normed, DATA))

    run_ranks(ranks, train)
    found = read_all(tmp_path, steps)
    for name, wanted in zip(
        ("running_mean", "running_var", "num_batches_tracked"), statistics(ranks, steps), strict=True
    ):
        assert (found[f"blocks.0.{name}"].double() - wanted).abs().max() < 1e-6, name


# ---- what is found out -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, said", [("--check-replicas-interval 1", "hold different bits"), ("", "values of a buffer")]
)
def test_values_that_differ_are_found(more, said, tmp_path):
    """A buffer that says "same" and is not: by --check-replicas-interval, and by a save."""

    def train(rank):
        recipe = scaled(
            lambda block: block.noise.add_(rank), lambda block: block.register_buffer("noise", torch.ones(1))
        )
        with pytest.raises(NumericsError, match=f"(?s){said}.*blocks.0.noise differs on ranks 0, 1"):
            start(f"{FLAGS} --train-iters 1 --save {tmp_path} {more}".split(), recipe)
        return True

    assert run_ranks(2, train) == [True, True]


@pytest.mark.parametrize(
    "rule, dtype, said", [("most", "float32", "no rule of a buffer"), ("max", "float23", "mean float32?")]
)
def test_what_is_no_rule(rule, dtype, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        Buffer(rule, dtype)


@pytest.mark.sampled(10)
def test_a_model_out_of_a_checkpoint_has_them(tmp_path, capsys):
    run_ranks(2, observe, f"{TP} --save {tmp_path}")
    model, found = load_model(str(tmp_path)).model, read_all(tmp_path)
    held = {name: buffer.tensor for name, buffer in placed_buffers(model).items()}
    assert len(held) == 4 * 5 and all(torch.equal(values, found[name]) for name, values in held.items())
    tool.main(["inspect", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"parameters, 20 buffers, optimizer state", said)
    assert re.search(r"blocks.3.attention.heads.largest +float32 +\[4\] 2 +buffer, max\n", said)
    tool.main(["reshard", str(tmp_path), str(tmp_path / "new"), "--tp", "2"])
    observe(0, f"--load {tmp_path / 'new'} --train-iters {STEPS + 1}")


@pytest.mark.parametrize("flags", ["", TP, PP, ZERO3])
def test_the_planner_counts_them(flags):
    config = resolve(
        parse_any(f"{LINE} --model-type tests.models.observed --global-batch-size 4 {flags}".split()), 1 + bool(flags)
    )
    world = 1 + bool(flags)
    layout, job = Layout.of(config, world), Job.of(config, facts_of(config, 101), dp=1, device="cpu")
    for place, memory, *_ in run_ranks(world, lambda rank: counted_step()(config)):
        held, _ = state(job, layout, place["pp"], place)
        assert held["buffers that training changes"] == memory["buffers"] > 0
        assert held["weights"] + held["gradients"] == memory["parameters"] + memory["shards"] + memory["gradients"]


class Prunes(Hook):
    """Takes a channel out of every mask at each step."""

    def before_update(self, run, update):
        assert all(buffer.dtype == torch.float32 for buffer in update.buffers.values())
        for mask in update.buffers.values():
            mask[update.iteration] = 0


@pytest.mark.parametrize("world, flags", [(1, ""), (2, ZERO3), (2, PP)])
def test_a_hook_changes_a_mask(world, flags, tmp_path, monkeypatch):
    """The mask of step n is what the hook left of it at step n - 1; a run that goes on has it."""
    seen = []

    def gain(block):
        seen.append(block.mask.clone())
        return block.mask

    def train(rank, more):
        prepare = lambda block: register_buffer(block, "mask", torch.ones(HIDDEN))
        start(
            f"{FLAGS} --train-iters 3 --save {tmp_path} {flags} {more}".split(),
            replace(scaled(gain, prepare), hooks=(Prunes,)),
        )
        return torch.stack(seen).sum(1).unique().tolist()

    assert run_ranks(world, train, "--exit-interval 2")[0] == [HIDDEN - 1.0, float(HIDDEN)]
    assert run_ranks(world, train, f"--load {tmp_path}")[0] == [HIDDEN - 2.0]
    assert (read_all(tmp_path, 3)["blocks.2.mask"] == 0).nonzero().flatten().tolist() == [1, 2, 3]


class Reads(torch.nn.Module):
    """Reads what it changes: in place, or as another tensor."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.in_place = in_place
        register_buffer(self, "scale", torch.ones(3), "max")

    def forward(self, x):
        y = (x * self.scale.clone()).tanh()
        if self.in_place:
            self.scale += 1
        else:
            self.scale = self.scale + 1
        return y


@pytest.mark.parametrize("in_place", [True, False])
def test_a_second_run_has_the_values_of_the_first(in_place):
    x, found = torch.linspace(-1, 1, 3).requires_grad_(), []
    for again in (False, True):
        module = Reads(in_place)
        passes = [recompute(module, x, of=[module]) if again else module(x) for _ in range(3)]
        found.append([torch.autograd.grad(y.sum(), x)[0] for y in reversed(passes)])
        assert module.scale.tolist() == [4.0] * 3
    assert all(map(torch.equal, *found))
