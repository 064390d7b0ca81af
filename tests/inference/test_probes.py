# SPDX-License-Identifier: Apache-2.0
"""A model that is harmed in one place: where, how much, and that it is whole again, also after a failure."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.inference import probes
from megatron.inference.load import load_model
from megatron.inference.prune import Importance
from megatron.model.pruning import PruningOptions, TargetSizes, target_sizes
from megatron.model.quantization import QuantizeOptions
from megatron.settings.schema import Model

TOKENS = torch.arange(12).unsqueeze(1)


class Failed(Exception):
    pass


@pytest.fixture(scope="module")
def loaded(checkpoint):
    return load_model(str(checkpoint), precision="fp32")


@pytest.mark.parametrize("kind", ["layer", "masked", "quantized"])
@torch.no_grad()
def test_the_model_is_whole_again(kind, loaded):
    """Also if what is measured fails."""
    each = dict(
        layer=lambda: probes.without_layers(loaded),
        masked=lambda: probes.masked(loaded, Model(1, 8, 1, sparsity="0.5")),
        quantized=lambda: probes.quantized(loaded, QuantizeOptions(quantize="int8")),
    )[kind]
    before, count = loaded.model.logits(TOKENS), 0
    for _, harm in each():
        with pytest.raises(Failed):
            with harm:
                assert not torch.equal(loaded.model.logits(TOKENS), before)
                raise Failed
        assert torch.equal(loaded.model.logits(TOKENS), before)
        count += 1
    assert count >= loaded.facts.num_layers


@pytest.mark.parametrize("rank", [0, 1])  # of a model that has other heads on the ranks before
@pytest.mark.parametrize("ratio", [0.1, 0.25, 0.3, 0.5, 0.75])
@pytest.mark.parametrize("heads", [2, 3, 5, 6, 9])
def test_as_many_heads_are_closed_as_pruning_takes_away(heads, ratio, rank):
    """The least important ones; half of an odd number is rounded as `tools.prune` does."""
    first = rank * (heads // 2)
    model, generator = nn.Linear(2 * (heads - first), 3, bias=False), torch.Generator().manual_seed(heads)
    whole, values = model.weight.detach().clone(), torch.randperm(heads, generator=generator).double()
    box = SimpleNamespace(box=lambda shape, place: ((0, 2 * first), shape))
    network = SimpleNamespace(
        readers=lambda kind: dict(own=("weight", SimpleNamespace(dim=1, block=2))) if kind == "heads" else {},
        table=dict(weight=box),
        place_of=lambda own: "blocks.0",
    )
    importance = Importance({("heads", "own"): values}, torch.zeros(1))
    taken = round(heads * ratio)
    [(name, harm)] = probes.pruned(SimpleNamespace(model=model), network, importance, ratio, {})
    assert name == "blocks.0.heads"
    with harm:
        closed = (model.weight == 0).all(0).view(-1, 2).all(1)
        assert closed.tolist() == [value < taken for value in values.tolist()][first:]
        assert torch.equal(model.weight[:, ~closed.repeat_interleave(2)], whole[:, ~closed.repeat_interleave(2)])
    assert torch.equal(model.weight, whole)
    small = Model(2, 8 * heads, heads, ffn_hidden_size=64)
    if 0 < taken < heads:
        assert target_sizes(small, PruningOptions(prune_ratio=ratio), TargetSizes()).heads == heads - taken


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_close_their_own_part_of_what_all_close(rank, dim):
    """Of 6 heads of 2 columns on 3 ranks, which are cut along the columns, or along the rows."""
    whole, values = torch.rand(9, 12) + 1.0, torch.tensor([5.0, 0.0, 4.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    shape = (3, 12) if dim == 0 else (9, 4)
    offset = [0, 0]
    offset[dim] = rank * shape[dim]
    mine = tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))
    model = nn.Linear(*shape[::-1], bias=False)
    model.weight.data.copy_(whole[mine])
    box = SimpleNamespace(box=lambda local, place: (tuple(offset), local) if place == dict(tp=rank) else None)
    network = SimpleNamespace(
        readers=lambda kind: dict(own=("weight", SimpleNamespace(dim=1, block=2))) if kind == "heads" else {},
        table=dict(weight=box),
        place_of=lambda own: "blocks.0",
    )
    importance = Importance({("heads", "own"): values}, torch.zeros(1))
    [(_, harm)] = probes.pruned(SimpleNamespace(model=model), network, importance, 0.5, dict(tp=rank))
    open_heads = (values >= 3).repeat_interleave(2)
    with harm:
        assert torch.equal(model.weight, (whole * open_heads)[mine])
    assert torch.equal(model.weight, whole[mine])


def test_as_many_weights_are_masked_on_all_ranks_together_as_in_one_process(monkeypatch):
    """Without groups the smallest of a whole weight go: its size is that of all ranks' parts."""
    asked, layer = [], nn.Linear(6, 4, bias=False)
    layer.placements = dict(weight=SimpleNamespace(shape=(12, 6)))  # this rank has a third
    monkeypatch.setattr(probes, "_linear_layers", lambda loaded: {"blocks.0.up": layer})
    monkeypatch.setattr(probes, "chosen_layers", lambda facts, how: ["blocks.0.up", "blocks.1.up"])
    monkeypatch.setattr(probes, "divided_over", lambda layer: "ranks")
    monkeypatch.setattr(
        probes, "mask_of", lambda weight, how, total, axis: asked.append((how, total, axis)) or weight > 0
    )
    names = [name for name, _ in probes.masked(SimpleNamespace(facts=None), Model(1, 8, 1, sparsity="0.25"))]
    assert names == ["blocks.0.up", "blocks.1.up"] and asked == [(0.25, 72, "ranks")]
