# SPDX-License-Identifier: Apache-2.0
"""Parity files: what they hold, by plain XOR; lost and damaged files come back to the bit, or nothing is used."""

import os
import random
import shutil

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import choose as choose_module
from megatron.checkpoint import index as index_module
from megatron.checkpoint import parity as module
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.compare import differences
from megatron.checkpoint.folder import restore
from megatron.checkpoint.index import read_index
from megatron.checkpoint.parity import entries_of, repair, write_range
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, commit, file_name, write_shard
from megatron.checkpoint.survey import verify
from megatron.errors import CheckpointError, SettingsError
from megatron.settings.parse import parse_pretrain
from megatron.storage.durable import Damaged, read_sealed, seal
from megatron.telemetry.events import read_events
from megatron.tools import checkpoint as tool
from megatron.training.rules import resolve

BLOCK = 256
SIZES = (300, 40, 700, 333, 1)  # numbers in the files of five ranks: more than a block, and less


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for where in (module, index_module):
        monkeypatch.setattr(where, "BLOCK", BLOCK)


def pieces_of(step):
    values = [torch.arange(size, dtype=torch.float32) * (rank + 1) + step for rank, size in enumerate(SIZES)]
    return [Piece(f"t{rank}", tuple(x.shape), Box.whole(x.shape), x) for rank, x in enumerate(values)]


def saved(folder, step, number):
    """A checkpoint of five ranks, written as `Saver` does; returns its path."""
    final, draft = folder / f"iter_{step:07d}", folder / ".tmp-draft"
    draft.mkdir(parents=True)
    sizes = [write_shard(draft, rank, [piece], block=64).size for rank, piece in enumerate(pieces_of(step))]
    files = [(file_name(rank), size) for rank, size in enumerate(sizes)]
    ranges = [write_range(draft, files, rank, number) for rank in reversed(range(len(files)))]
    state = dict(iteration=step, config={})
    commit(draft, final, len(files), state, parity=entries_of(ranges, files, number))
    (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
    return final


def loaded(folder):
    """(step, whether every value is that of the step) of what a run would load."""
    mine = [piece._replace(tensor=torch.full_like(piece.tensor, -1)) for piece in pieces_of(0)]
    restored = restore(folder, mine)
    step = restored.state["iteration"]
    return step, all(torch.equal(a.tensor, b.tensor) for a, b in zip(mine, pieces_of(step), strict=True)), restored


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_parity_is_the_xor_of_its_files(number, tmp_path):
    path = saved(tmp_path, 1, number)
    index = read_index(path)
    assert [parity.of for parity in index.parity.values()] == [
        [file_name(rank) for rank in range(5)[start : start + number]] for start in range(0, 5, number)
    ]
    for name, parity in index.parity.items():
        raw = [np.frombuffer((path / one).read_bytes(), np.uint8) for one in parity.of]
        expected = np.zeros(max(map(len, raw)), np.uint8)
        for one in raw:
            expected[: len(one)] ^= one
        assert (path / name).read_bytes() == expected.tobytes()
    assert verify(path)[1] == []


def test_a_range_is_of_equal_blocks_for_all_ranks(tmp_path):
    saved(tmp_path, 1, 5)
    files = [(file_name(rank), (tmp_path / "iter_0000001" / file_name(rank)).stat().st_size) for rank in range(5)]
    each = [len(write_range(tmp_path / "iter_0000001", files, rank, 5).checksums) for rank in range(5)]
    assert max(each) <= -(-sum(each) // 5) and sum(each) == -(-max(size for _, size in files) // BLOCK)


def _flip(path, dice):
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


DAMAGES = dict(
    flip=_flip,
    cut=lambda path, dice: os.truncate(path, dice.randrange(path.stat().st_size)),
    zero=lambda path, dice: path.write_bytes(bytes(path.stat().st_size)),
    extend=lambda path, dice: path.write_bytes(path.read_bytes() + b"x"),
    delete=lambda path, dice: path.unlink(),
)
CASES, PARTS = 400, 10


@pytest.mark.sampled(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_damaged_files_come_back_or_are_not_used(part, memory_folder):
    """Up to four files of a checkpoint are damaged. If each group, and each pair of a small file and its copy, has lost at
    most one, all bytes are as they were; else the checkpoint before is loaded.
    """
    for case in range(part, CASES, PARTS):
        dice, folder = random.Random(case), memory_folder / str(case)
        number = dice.choice((2, 3, 5))
        saved(folder, 1, number)
        path = saved(folder, 2, number)
        before, parity = content(path), read_index(path).parity
        chosen = dice.sample(sorted(before), dice.choice((1, 1, 2, 2, 3, 4)))
        for name in chosen:
            DAMAGES[dice.choice(sorted(DAMAGES))](path / name, dice)
        groups = [{name, *entry.of} for name, entry in parity.items()]
        pairs = [{name, f"copy_of_{name}"} for name in ("index.json", "state.json")]
        lost = [len(group & set(chosen)) for group in groups + pairs]
        step, equal, restored = loaded(folder)
        assert equal, case
        if max(lost) < 2:
            assert step == 2, (case, chosen)
            repair(path)
            assert content(path) == before, (case, chosen)
        # what is needed was not damaged: only parity and copies were
        needed = [name for name in chosen if not name.startswith(("parity", "copy_of"))]
        assert step == 2 or needed, (case, chosen)
        assert bool(restored.repaired) or step == 1 or not needed
        again, equal, _ = loaded(folder)
        assert again == step and equal
        shutil.rmtree(folder)


def test_two_lost_files_of_a_group_are_not_guessed(tmp_path):
    path = saved(tmp_path, 1, 3)
    for rank in (0, 2):
        (path / file_name(rank)).unlink()
    before = content(path)
    with pytest.raises(Damaged, match="shard_00002.safetensors of the same parity file is lost, too"):
        repair(path)
    assert content(path) == before


def test_a_lost_file_and_its_parity_file(tmp_path):
    path = saved(tmp_path, 1, 5)
    (path / file_name(1)).unlink()
    _flip(path / "parity_00000.bin", random.Random(2))
    with pytest.raises(Damaged, match="shard_00001.safetensors cannot be rebuilt: .*parity_00000.bin: block . differs"):
        repair(path)
    (path / "parity_00000.bin").unlink()
    with pytest.raises(Damaged, match="shard_00001.safetensors cannot be rebuilt: .*parity_00000.bin: No such file"):
        repair(path)


def test_a_wrong_parity_file_rebuilds_nothing(tmp_path):
    """One whose own checksums are right, as if a file had changed before it was written."""
    path = saved(tmp_path, 1, 5)
    _, index = read_sealed(path / "index.json")
    (path / file_name(1)).unlink()
    (path / "copy_of_index.json").unlink()
    data = bytearray((path / "parity_00000.bin").read_bytes())
    data[9] ^= 1
    (path / "parity_00000.bin").write_bytes(data)
    index["parity"]["parity_00000.bin"]["checksums"][0] = module.checksum(bytes(data[:BLOCK]))
    (path / "index.json").write_bytes(seal(index)[1])
    with pytest.raises(Damaged, match="cannot be rebuilt"):
        repair(path)
    assert not (path / file_name(1)).exists() and not list(path.glob(".*"))


@pytest.mark.parametrize(
    "change",
    [
        lambda parity: parity.update({"../parity_00000.bin": parity.pop("parity_00000.bin")}),
        lambda parity: parity["parity_00000.bin"].update(bytes=1 << 50),
        lambda parity: parity["parity_00000.bin"].update(of=["/etc/passwd"]),
        lambda parity: parity["parity_00000.bin"].update(of=[]),
        lambda parity: parity["parity_00000.bin"].update(checksums=["0"]),
    ],
)
def test_a_forged_entry_is_refused(change, tmp_path):
    path = saved(tmp_path, 1, 5)
    _, index = read_sealed(path / "index.json")
    change(index["parity"])
    (path / "index.json").write_bytes(seal(index)[1])
    with pytest.raises(Damaged, match="not a valid index"):
        read_index(path)


def test_a_disk_that_damages_what_is_rebuilt_is_not_repaired_again_and_again(tmp_path, monkeypatch):
    for step in (1, 2):
        path = saved(tmp_path, step, 5)
    _flip(path / file_name(2), random.Random(4))
    tries = []
    monkeypatch.setattr(choose_module, "repair", lambda path: [tries.append(path) or "shard"][:1])
    step, equal, restored = loaded(tmp_path)
    assert step == 1 and equal and tries == [path] and [one for one, _ in restored.damaged] == [path]


def test_the_command_repairs_a_folder(tmp_path, capsys):
    for step in (1, 2):
        path = saved(tmp_path, step, 5)
    (path / file_name(3)).unlink()
    tool.main(["repair", str(tmp_path)])
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path / 'iter_0000001'}: nothing rebuilt",
        f"{path}: shard_00003.safetensors rebuilt",
    ]
    for rank in (0, 1):
        (path / file_name(rank)).unlink()
    with pytest.raises(CheckpointError, match="1 of 1 checkpoints of .* were not repaired"):
        tool.main(["repair", str(path)])
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        tool.main(["repair", str(tmp_path / "nowhere")])


# ---- whole runs ------------------------------------------------------------------------------------------------------

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --precision fp32 "
)


def test_parity_is_of_a_file_system(tmp_path):
    with pytest.raises(SettingsError, match="--save-parity 2: --save s3://b/a is an object store"):
        resolve(parse_pretrain(f"{TINY} --train-iters 2 --save s3://b/a --save-parity 2".split()), 1)


@pytest.mark.parametrize("background", ["", pytest.param("--async-save", marks=pytest.mark.sampled(5))])
def test_a_run_rebuilds_a_lost_file(background, run_ranks, tmp_path):
    home, flags = tmp_path / "home", f"{TINY} --use-distributed-optimizer --save-interval 2 {background}"

    def body(rank, more):
        pretrain_gpt.main(f"{flags} --save {home} --save-parity 2 {more}".split())

    run_ranks(2, body, "--train-iters 4 --exit-interval 2")
    path = home / "iter_0000002"
    before = content(path)
    assert {"parity_00000.bin", "copy_of_index.json", "copy_of_state.json"} < before.keys()
    _flip(path / file_name(1), random.Random(1))
    run_ranks(2, body, f"--train-iters 4 --load {home}")
    assert content(path) == before and list(checkpoints(home)) == [2, 4]
    [event] = [event for event in read_events(home) if event["event"] == "repaired_checkpoint"]
    assert event["files"] == file_name(1) and event["checkpoint"] == str(path) and event["iteration"] == 2
    run_ranks(2, lambda rank: pretrain_gpt.main(f"{flags} --train-iters 4 --save {tmp_path / 'other'}".split()))
    with Reader(home / "iter_0000004") as one, Reader(tmp_path / "other" / "iter_0000004") as two:
        assert not list(differences(one, two))
