# SPDX-License-Identifier: Apache-2.0
"""Adapters and masks that are merged into weights: each number by a loop over rows, and what the record then says."""

import math
from dataclasses import asdict

import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.convert.merged import apply_masks, merge, merged_first
from megatron.errors import SettingsError, StorageError
from megatron.model.recipe import facts_of
from megatron.settings import schema

SIZES = dict(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=8, ffn_hidden_size=12, swiglu=True)
LORA = dict(linear="*=lora", lora_rank=3, lora_alpha=5.0, lora_target="*", lora_dropout=0.25)
WAYS = {
    "pairs": {},
    "pairs of parts, sqrt": dict(lora_split_fused=True, use_rslora=True),
    "pairs of groups of queries": dict(lora_split_fused=True, group_query_attention=True, num_query_groups=1),
    "directions": dict(use_dora=True),
}
MASKS = dict(
    linear="mlp.*=sparse", sparsity="2:4", sparsity_layers="mlp.*", sparsity_begin_step=3, sparsity_frequency=2
)
OPTIMIZER = dict(lr=0.1, train_only=["*norm*", "*.lora_a", "*.lora_b", "*.lora_magnitude"])


def written(folder, own, dtype=torch.float32):
    """A checkpoint of random numbers, with a tensor of an optimizer: (its path, name -> values)."""
    config = schema.from_record(dict(model=SIZES | own, optimizer=OPTIMIZER))
    draw, values = torch.Generator().manual_seed(len(own)), {}
    for name, placed in facts_of(config, 20).weights.items():
        x = torch.randn(placed.shape, generator=draw)
        kind = getattr(torch, placed.buffer.dtype) if placed.buffer else dtype
        values[name] = (x > 0).to(kind) if name.endswith("mask") else x.to(kind)
    values["optimizer.exp_avg.embedding.word.weight"] = torch.randn(20, 8, generator=draw)
    pieces = [Piece(name, tuple(x.shape), Box.whole(x.shape), x) for name, x in values.items()]
    record = dict(config=asdict(config), vocab_size=20, optimizer_steps=9, untrained=dict(frozen=["a"], other=1))
    with Saver(folder) as saver:
        return saver.write(7, [pieces], record), values


def read(path) -> tuple[dict, dict]:
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}, reader.state


def by_rows(w, a, b, m, own) -> torch.Tensor:
    """The merged weight of a layer, row by row. own: settings"""
    rank = LORA["lora_rank"]
    scale = LORA["lora_alpha"] / (math.sqrt(rank) if own.get("use_rslora") else rank)
    flat, rows, found = w.float().reshape(-1, w.shape[-1]), b.float().reshape(-1, rank), []
    parts = len(a) // rank
    for number, (row, factors) in enumerate(zip(flat, rows, strict=True)):
        part = number // w.shape[1] if parts == 2 else 0  # of a gated MLP [2, f, h]
        if parts == 3:  # of groups [g, q + 2, d, h]
            part = max(0, number // w.shape[2] % w.shape[1] - (w.shape[1] - 2) + 1)
        pair = a[part * rank : (part + 1) * rank].float()
        moved = row + scale * sum(factors[n] * pair[n] for n in range(rank))
        if m is not None:
            moved = moved * (row.norm() + m.float().reshape(-1)[number]) / moved.norm()
        found.append(moved)
    return torch.stack(found).reshape(w.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_merged_row_by_row(way, dtype, tmp_path):
    own, said, moved_most = WAYS[way], [], 0.0
    path, before = written(tmp_path / "own", LORA | own, dtype)
    after, record = read(merge(path, tmp_path / "merged", writers=2, log=said.append))
    assert set(after) == {name for name in before if "lora" not in name and not name.startswith("optimizer.")}
    for name, found in after.items():
        front = name.removesuffix("weight")
        assert found.dtype == before[name].dtype
        if f"{front}lora_a" not in before:
            assert torch.equal(found, before[name]), name
            continue
        a, b, m = (before.get(f"{front}lora_{one}") for one in ("a", "b", "magnitude"))
        wanted = by_rows(before[name], a, b, m, own)
        torch.testing.assert_close(found.float(), wanted, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert not torch.allclose(found.float(), before[name].float(), atol=0.05)
        moved_most = max(moved_most, (found.float() - wanted).abs().max().item())
    if dtype == torch.bfloat16:
        [note] = said
        assert "bfloat16" in note and float(note.split()[-1]) == pytest.approx(moved_most, rel=0.02)
    else:
        assert said == []
    plain, model = schema.Model(num_layers=1, hidden_size=1, num_attention_heads=1), record["config"]["model"]
    names = [name for name in vars(plain) if name.startswith("lora") or name in ("linear", "use_rslora", "use_dora")]
    assert {name: model[name] for name in names} == {name: getattr(plain, name) for name in names}
    assert record["config"]["optimizer"]["train_only"] == ["*norm*"] and record["config"]["optimizer"]["lr"] == 0.1
    assert (record["optimizer_steps"], record["untrained"], record["iteration"]) == (None, dict(frozen=[], other=1), 7)


def test_masks_become_zeros(tmp_path):
    path, before = written(tmp_path / "own", MASKS)
    after, record = read(apply_masks(path, tmp_path / "zeros"))
    own = ("sparsity_mask", "sparsity_step")
    assert set(after) == {name for name in before if not name.endswith(own) and not name.startswith("optimizer.")}
    masked = {name for name in after if f"{name.removesuffix('weight')}sparsity_mask" in before}
    assert len(masked) == 4
    for name, found in after.items():
        mask = before[f"{name.removesuffix('weight')}sparsity_mask"] if name in masked else 1
        assert torch.equal(found, before[name] * mask), name
    plain, model = schema.Model(num_layers=1, hidden_size=1, num_attention_heads=1), record["config"]["model"]
    names = [name for name in vars(plain) if "sparsity" in name] + ["linear"]
    assert {name: model[name] for name in names} == {name: getattr(plain, name) for name in names}


def test_an_export_merges_what_there_is(tmp_path):
    """In a folder beside the output, which is removed; an ordinary model is taken as it is."""
    for number, (own, word) in enumerate(((LORA, "lora"), (MASKS, "sparsity"), ({}, None))):
        path, _ = written(tmp_path / f"own{number}", own)
        with merged_first(path, tmp_path / "new" / "out") as found:
            assert (found == path) == (word is None) and not any(word and word in name for name in read(found)[0])
            assert word is None or found.parent.parent == tmp_path / "new"
        assert not word or not list((tmp_path / "new").iterdir())


BOTH = LORA | dict(linear="*=lora,mlp.up=sparse", sparsity="2:4")


def test_a_merge_that_fails_leaves_no_folder(tmp_path, monkeypatch):
    path, _ = written(tmp_path / "own", LORA)

    def full(*_, **__):
        raise StorageError("No space left on device")

    monkeypatch.setattr(Saver, "write", full)
    with pytest.raises(StorageError):
        merge(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("own, lacks", [({}, "no LoRA"), (BOTH, "than LoRA's: --linear")])
def test_other_models_are_refused(own, lacks, tmp_path):
    path, _ = written(tmp_path / "own", own)
    with pytest.raises(SettingsError, match=lacks):
        merge(path, tmp_path / "out")
    with pytest.raises(SettingsError, match="no masks of --sparsity, or other"):
        apply_masks(path, tmp_path / "out")
    with merged_first(path, tmp_path / "out") as found:
        assert found == path
