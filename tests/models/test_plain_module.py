# SPDX-License-Identifier: Apache-2.0
"""A plain torch module under the whole suite, against a plain torch loop; and what is said where it cannot be."""

import json
import re

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.data.loader import MicroBatch
from megatron.data.mock import MockDataset
from megatron.entry import start
from megatron.errors import SettingsError
from megatron.inference.load import load_model
from megatron.model.plain import plain_recipe
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Normal, Placement, placements
from megatron.mpu.random import seed_of
from megatron.optimizer.sharded import sharded_init
from megatron.settings.schema import Parallel
from tests.models import plain_module
from tests.ranks import on_ranks

FLAGS = (
    "--seq-length 16 --hidden-size 24 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --adam-eps 1e-4 "
    "--lr-decay-style constant --mock-data --vocab-size 100 --device cpu --num-workers 0 --eval-iters 0 --eod-mask-loss"
)


def batch_of(samples: np.ndarray) -> MicroBatch:
    tokens, labels = (torch.from_numpy(part).T.contiguous() for part in (samples[:, :-1], samples[:, 1:]))
    return MicroBatch(tokens, labels, torch.arange(len(samples)), loss_mask=(tokens != 100).float())


def plain_loop(init="module"):
    """(losses, gradient norms, final weights) by torch alone, from the module's own initial values or from the suite's."""
    data, seen = MockDataset(1 << 20, 16, 101, 100, 1234, 0), []
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        model = plain_module.PlainModule(24, 101)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if init == "suite" else ():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed_of(1234, name, 0)))
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-4)
    for step in range(4):
        batch = batch_of(np.stack([data[place] for place in range(8 * step, 8 * step + 8)]))
        sums = model(None, batch)[1]
        loss = sums["lm loss"] / batch.loss_mask.sum()
        adam.zero_grad()
        loss.backward()
        seen.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        adam.step()
    return seen, {name: parameter.detach() for name, parameter in model.named_parameters()}


def main(rank: int, words: str, init: str = "module") -> None:
    recipe = plain_recipe(plain_module.__name__, plain_module.build, pretrain_gpt.build_datasets, init=init)
    start(words.split(), recipe if init == "suite" else plain_module.recipe())


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "world, flags, init",
    [
        (1, "", "module"),
        (2, "", "suite"),
        (2, "", "module"),
        (2, "--sharding-stage 1", "module"),
        (2, "--sharding-stage 2", "module"),
        (2, "--sharding-stage 3", "module"),
        (2, "--sharding-stage 3", "suite"),
    ],
)
def test_trains_as_a_plain_loop_does(tmp_path, world, flags, init):
    words = f"{FLAGS} {flags} --save {tmp_path}"
    on_ranks(world, main, words, init)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    found = [(record["lm loss"], record["grad_norm"]) for record in records if record["kind"] == "step"]
    wanted, weights = plain_loop(init)
    assert np.array(found) == pytest.approx(np.array(wanted), rel=2e-5)
    with Reader(tmp_path / "iter_0000004") as reader:
        assert {name for name in reader.tensors if not name.startswith("optimizer.")} == set(weights)
        for name, values in weights.items():
            assert (reader.read(name) - values).abs().max() < 2e-5, name
    loaded = load_model(str(tmp_path)).model
    batch = batch_of(np.random.RandomState(0).randint(0, 100, (3, 17)))
    again = plain_module.PlainModule(24, 101)
    again.load_state_dict(weights)
    ours, theirs = loaded(None, batch)[1]["lm loss"].item(), again(None, batch)[1]["lm loss"].item()
    assert ours == pytest.approx(theirs, rel=2e-5)


def test_resumes_bit_for_bit(tmp_path):
    main(0, f"{FLAGS} --save {tmp_path}/whole")
    main(0, f"{FLAGS} --save {tmp_path}/half --exit-interval 2")
    run_ranks(1, main, f"{FLAGS} --save {tmp_path}/half --load {tmp_path}/half")
    with Reader(tmp_path / "whole/iter_0000004") as whole, Reader(tmp_path / "half/iter_0000004") as half:
        assert all(torch.equal(whole.read(name), half.read(name)) for name in whole.tensors)


@pytest.mark.parametrize(
    "flag",
    [
        "--recompute-granularity full",
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--amp-level O1 --bf16",
        "--z-loss-coeff 0.1",
    ],
)
def test_what_a_plain_module_cannot_is_told_once(flag, capfd):
    world = 2 if "size" in flag else 1
    words = flag.removesuffix(" --bf16")
    layers = "--num-layers 2 --num-attention-heads 2" * (world == 2)

    def body(rank):
        with pytest.raises(SettingsError) as told:
            plain_module.main(f"{FLAGS} {layers} {flag}".split())
        return str(told.value)

    for said in run_ranks(world, body):
        assert said.startswith(f"{words}: this model is a plain torch.nn.Module") and "docs/extending.md" in said


@pytest.mark.parametrize("flag", ["--dry-run --world-size 2", "--preflight --world-size 2"])
def test_what_is_not_known_of_it_is_told(flag):
    with pytest.raises(SettingsError, match="memory, time and messages of its layers are unknown"):
        plain_module.main(f"{FLAGS} {flag}".split())


def test_a_parameter_without_placement_is_told():
    with pytest.raises(SettingsError) as told:
        placements(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert re.search(r"0\.bias, 0\.weight.*Linear lists nothing.*model\.plain", str(told.value), re.S)
    module = torch.nn.Linear(2, 2, bias=False)
    module.placements = dict(weight=Placement((2, 2), Normal(1.0)), other=Placement((2,), Normal(1.0)))
    with pytest.raises(SettingsError, match="do not match: other"):
        placements(module)


def test_a_loss_without_a_gradient_is_no_frozen_stage():
    class Detached(plain_module.PlainModule):
        def forward(self, x, batch):
            _, sums = super().forward(x, batch)
            return None, sums | {"lm loss": sums["lm loss"].detach()}

    build = lambda config, vocab_size: Detached(24, vocab_size)
    with pytest.raises(RuntimeError, match="does not require grad"):
        start(FLAGS.split(), plain_recipe("tests.models.plain_module", build, pretrain_gpt.build_datasets))


# ---- initial values --------------------------------------------------------------------------------------------------


class Odd(torch.nn.Module):
    """Initial values that no rule of the suite would give, made in ways that the meta device cannot follow."""

    def __init__(self):
        super().__init__()
        self.zero, self.seven = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.tensor([7.0]))
        self.eye = torch.nn.Parameter(torch.eye(5))
        self.rates = torch.nn.ParameterList(torch.tensor([x.item()]) for x in torch.linspace(0, 1, 3))
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)])
        self.blocks[1].weight = self.blocks[0].weight
        torch.nn.init.orthogonal_(self.blocks[0].weight)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "stage, dtype", [(0, torch.float32), (0, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16)]
)
def test_a_module_keeps_its_own_initial_values(stage, dtype):
    """In fp32 in the optimizer, whatever the format of the model, and on all ranks alike."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        wanted = dict(Odd().named_parameters())

    def body(rank):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        mesh = Mesh(rank, **{"shard" if stage else "replicate": 2})
        model, optimizer = sharded_init(
            Odd, mesh, parallel=Parallel(sharding_stage=stage), dtype=dtype, seed=5, init="module"
        )
        assert torch.equal(before, torch.get_rng_state())
        with optimizer.gathered_parameters():
            used = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        kept = [(piece.name, tuple(piece.box), piece.tensor.clone()) for piece in optimizer.pieces(moments=False)]
        return used, kept

    for used, kept in run_ranks(2, body):
        assert used.keys() == wanted.keys() and all(torch.equal(x, wanted[name].to(dtype)) for name, x in used.items())
        for name, (offset, extent), values in kept:
            box = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
            assert torch.equal(values, wanted[name][box])


def test_another_word_for_whose_initial_values_is_refused():
    with pytest.raises(SettingsError, match="init='torch'.*'module' and 'suite'"):
        plain_recipe("mine", plain_module.build, pretrain_gpt.build_datasets, init="torch")
