# SPDX-License-Identifier: Apache-2.0
import threading

import pytest
import torch

from megatron.mpu import random
from megatron.mpu.mesh import Axis
from megatron.mpu.placement import Constant, InverseSoftplus, LogOf, LogUniform, Normal, Placement, Uniform
from megatron.mpu.random import BLOCK, Dropout, init_parameter, seed_of


def _filled(shape, placement, place=None, name="w", seed=1):
    parameter = torch.full(shape, float("nan"))
    init_parameter(name, parameter, placement, place or {}, seed)
    return parameter


def test_pieces_of_any_layout_are_cut_from_the_same_weights():
    shape = (600, 5000)  # more than one block of rows
    assert shape[0] * shape[1] > 2 * BLOCK
    whole = _filled(shape, Placement(shape, Normal(0.02)))
    for dim, cut in ((0, (150, 5000)), (1, (600, 1250))):
        placement = Placement(shape, Normal(0.02), cut={"tp": dim})
        pieces = [_filled(cut, placement, {"tp": rank}) for rank in range(4)]
        assert torch.equal(torch.cat(pieces, dim), whole)
    assert abs(whole.std().item() - 0.02) < 1e-4 and abs(whole.mean().item()) < 1e-4


def test_threads_draw_blocks_at_one_time_and_the_same_values(monkeypatch):
    shape, calls = (64, 10), []
    together = threading.Barrier(3, timeout=20)
    monkeypatch.setattr(random, "BLOCK", 20)
    for threads, cores in ((1, 1), (3, 3)):
        monkeypatch.setattr(random, "affinity", lambda cores=cores: set(range(cores)))
        drawn = random._drawn

        def draw(*what, drawn=drawn, threads=threads):
            if threads > 1 and len(calls) < 3:
                calls.append(threading.get_ident())
                together.wait()  # breaks unless three threads come here
            return drawn(*what)

        with monkeypatch.context() as patch:
            patch.setattr(random, "_drawn", draw)
            values = _filled(shape, Placement(shape, Normal(0.02)))
        if threads == 1:
            alone = values
    assert torch.equal(values, alone) and len(set(calls)) == 3
    generator = torch.Generator().manual_seed(seed_of(1, "w", 3))  # rows 6 and 7, as everyone may draw them
    assert torch.equal(values[6:8], torch.empty(2, 10).normal_(0.0, 0.02, generator=generator))
    assert random.drawing_threads(random.DRAWN_AT_ONCE) == 1  # blocks so large come one by one


def test_padding_is_zero_and_changes_nothing():
    shape = (10, 4)
    placement = Placement(shape, Normal(1.0), cut={"tp": 0})
    first, second = _filled((8, 4), placement, {"tp": 0}), _filled((8, 4), placement, {"tp": 1})
    assert torch.equal(torch.cat([first, second[:2]]), _filled(shape, Placement(shape, Normal(1.0))))
    assert torch.equal(second[2:], torch.zeros(6, 4))
    beyond = _filled((8, 4), placement, {"tp": 3})
    assert torch.equal(beyond, torch.zeros(8, 4))


def test_weights_depend_on_name_and_seed():
    placement = Placement((4, 4), Normal(1.0))
    base = _filled((4, 4), placement)
    assert not torch.equal(base, _filled((4, 4), placement, name="v"))
    assert not torch.equal(base, _filled((4, 4), placement, seed=2))
    assert torch.equal(_filled((3,), Placement((3,), Constant(1.0))), torch.ones(3))


STARTS = (
    Uniform(-0.5, 0.25),
    LogOf(Uniform(1, 16)),
    LogUniform(1e-3, 0.1),
    InverseSoftplus(LogUniform(1e-3, 0.1, 2e-3)),
)


@pytest.mark.parametrize("init", STARTS, ids=lambda init: type(init).__name__)
def test_other_starts_are_cut_from_the_same_weights_too(init):
    shape = (1000, 7)  # pieces of 250 x 7 and 1000 x 1: other remainders behind a vector instruction
    whole = _filled(shape, Placement(shape, init))
    for dim, cut, ranks in ((0, (250, 7), 4), (1, (1000, 1), 7)):
        pieces = [_filled(cut, Placement(shape, init, cut={"tp": dim}), {"tp": rank}) for rank in range(ranks)]
        assert torch.equal(torch.cat(pieces, dim), whole)
    assert not torch.equal(whole, _filled(shape, Placement(shape, init), name="v"))


def test_other_starts_have_their_distributions():
    """Moments and borders of the numbers behind them, in fp64."""
    even, logs, rates, steps = (_filled((400, 50), Placement((400, 50), init)).double() for init in STARTS)
    assert -0.5 <= even.min() < -0.499 and 0.249 < even.max() < 0.25 and abs(even.mean() + 0.125) < 4e-3
    assert 1 <= logs.exp().min() < 1.01 and 15.99 < logs.exp().max() < 16.001 and abs(logs.exp().mean() - 8.5) < 0.1
    assert abs(rates.log10().mean() + 2) < 0.02 and 1e-3 <= rates.min() < 1.01e-3 and 0.099 < rates.max() <= 0.1
    found = torch.nn.functional.softplus(steps)  # of Mamba: softplus gives the step size back
    assert abs(found.min() - 2e-3) < 1e-8 and 0.099 < found.max() < 0.1001
    above = rates.log10()[rates > 2e-3].mean()
    assert abs(found.log10()[found > 2.001e-3].mean() - above) < 0.02


def test_seeds_are_the_same_for_ever():
    """A changed hash would change the weights and masks of every run that is resumed."""
    assert seed_of(1234, "blocks.0.mlp.up.weight", 0) == 5451775161889001220


def test_share_of_dropped_elements():
    for drop in (0.1, 0.5, 0.9):
        kept = (
            Dropout(drop, "mlp", 0, seed=1)
            .keep((1000, 1, 1000), torch.tensor([7]), torch.device("cpu"))
            .mask()
            .float()
            .mean()
            .item()
        )
        assert abs(kept - (1 - drop)) < 2e-3


def test_dropout_depends_on_the_sample_and_not_on_its_batch():
    dropout = Dropout(0.3, "mlp", 5, seed=1)
    x = torch.ones(16, 4, 8)
    together = dropout(x, torch.tensor([3, 4, 5, 6]))
    alone = [dropout(x[:, :1], torch.tensor([n])) for n in (3, 4, 5, 6)]
    assert torch.equal(together, torch.cat(alone, 1))
    assert not torch.equal(together[:, 0], together[:, 1])
    assert not torch.equal(together, Dropout(0.3, "mlp", 6, seed=1)(x, torch.tensor([3, 4, 5, 6])))
    assert not torch.equal(together, Dropout(0.3, "attention", 5, seed=1)(x, torch.tensor([3, 4, 5, 6])))


def test_dropout_keeps_the_mean_and_is_off_in_evaluation():
    dropout = Dropout(0.25, "mlp", 0, seed=1)
    x = torch.ones(512, 4, 64)
    assert abs(dropout(x, torch.arange(4)).mean().item() - 1) < 5e-3
    assert dropout.eval()(x, torch.arange(4)) is x


def test_ranks_cut_one_mask():
    x = torch.ones(8, 2, 6)
    whole = Dropout(0.5, "mlp", 0, seed=1)(x, torch.tensor([1, 2]))
    pieces = []
    for rank in range(2):
        cut = Dropout(0.5, "mlp", 0, seed=1, cut=0, axis=Axis("tp", (0, 1), rank))
        pieces.append(cut(x[:4], torch.tensor([1, 2])))
    assert torch.equal(torch.cat(pieces), whole)


def test_ranks_cut_heads_of_attention_weights():
    """[b, heads, s, s]: whole heads go to each rank, and every sample has the mask that it has alone."""
    make = lambda axis=None: Dropout(0.5, "attention", 0, seed=1, batch_dim=0, axis=axis)  # noqa: E731
    device, samples = torch.device("cpu"), torch.tensor([5, 2, 9])
    whole = make().keep((3, 6, 5, 5), samples, device).mask()
    parts = [make(Axis("tp", (0, 1, 2), n)).keep((3, 2, 5, 5), samples, device).mask() for n in range(3)]
    assert torch.equal(torch.cat(parts, 1), whole)
    for n, sample in enumerate(samples):
        assert torch.equal(make().keep((1, 6, 5, 5), sample.view(1), device).mask()[0], whole[n])
    assert whole.float().mean().item() == pytest.approx(0.5, abs=0.1)
