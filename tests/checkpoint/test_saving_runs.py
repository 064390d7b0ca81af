# SPDX-License-Identifier: Apache-2.0
"""Whole runs of pretrain_gpt.py that save in the background, to a mirror, and load with a loose hand."""

import json
import re

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import folder as state
from megatron.checkpoint import manager, store
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.compare import differences
from megatron.checkpoint.reader import Reader
from megatron.errors import CheckpointError, StorageError
from megatron.tools import checkpoint as tool

pytestmark = pytest.mark.sampled(5)

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-interval 100 --eval-iters 1 --device cpu --num-workers 0 --fp32 "
).replace("--fp32", "--precision fp32")


def _pretrain(rank, flags):
    pretrain_gpt.main(f"{TINY} {flags}".split())


def same(a, b, iteration):
    with Reader(a / f"iter_{iteration:07d}") as one, Reader(b / f"iter_{iteration:07d}") as two:
        return len(one.tensors) > 20 and not list(differences(one, two))


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_saves_in_the_background_saves_the_same(world, run_ranks, tmp_path):
    now, later = tmp_path / "now", tmp_path / "later"
    run_ranks(world, _pretrain, f"--train-iters 6 --save-interval 2 --save {now}")
    run_ranks(world, _pretrain, f"--train-iters 6 --save-interval 2 --save {later} --async-save --exit-interval 4")
    assert list(checkpoints(later)) == [2, 4]
    run_ranks(world, _pretrain, f"--train-iters 6 --save-interval 2 --save {later} --async-save --load {later}")
    assert all(same(now, later, iteration) for iteration in (2, 4, 6))


def test_a_run_outlives_failed_saves_and_goes_on_from_the_mirror(tmp_path, monkeypatch, capsys):
    home, mirror = tmp_path / "home", tmp_path / "mirror"
    monkeypatch.setattr(manager, "RETRY_AFTER", 0.001)
    write = store.write_shard

    def full(folder, *args, **live):
        if home in folder.parents and "0000002" not in folder.name:
            raise StorageError("No space left on device")
        return write(folder, *args, **live)

    monkeypatch.setattr(state, "write_shard", full)
    flags = f"--save-interval 2 --save {home} --save-mirror {mirror} --load {home} --auto-resume"
    _pretrain(0, f"--train-iters 6 --exit-interval 4 {flags}")
    assert list(checkpoints(home)) == [2] and list(checkpoints(mirror)) == [4]
    _pretrain(0, f"--train-iters 6 {flags} --async-save")
    said = capsys.readouterr().out
    assert f"loaded checkpoint {mirror}/iter_0000004" in said and list(checkpoints(mirror)) == [4, 6]
    _pretrain(0, f"--train-iters 6 --save {tmp_path / 'whole'}")
    with Reader(mirror / "iter_0000006") as one, Reader(tmp_path / "whole" / "iter_0000006") as two:
        assert not list(differences(one, two))
    with pytest.raises(StorageError, match="2 saves in a row failed"):
        _pretrain(0, f"--train-iters 20 --save-interval 3 --save {home / 'b'} --save-retries 0 --max-failed-saves 2")


def test_the_other_ranks_do_not_wait_for_the_last_copy(run_ranks, tmp_path):
    """They would give the first rank up after --distributed-timeout-minutes, and with it the copy."""
    done = tmp_path / "done"

    def body(rank):
        pretrain_gpt.main(
            [
                *TINY.split(),
                "--train-iters",
                "1",
                "--save",
                str(tmp_path / "home"),
                "--save-copy",
                f"until [ -e {done} ]; do sleep 0.02; done; cp -r {{}} {tmp_path}/copy",
                "--distributed-timeout-minutes",
                "2",
            ]
        )
        if rank == 1:
            done.touch()

    run_ranks(2, body)
    assert (tmp_path / "copy" / "index.json").exists()


def test_auto_interval_in_a_run(run_ranks, tmp_path):
    run_ranks(2, _pretrain, f"--train-iters 14 --save-interval auto --async-save --save {tmp_path}")
    assert list(checkpoints(tmp_path)) == [1 + manager.FIRST_AUTO, 14]


def test_load_strictness(tmp_path, capsys):
    """The same model with an output layer of its own: two names too many or too few."""
    _pretrain(0, f"--train-iters 2 --save {tmp_path / 'tied'}")
    path = tmp_path / "tied" / "iter_0000002"
    with Reader(path) as reader:
        some = [name for name in reader.tensors if "mlp_norm" not in name]
        pieces = [
            store.Piece(name, tuple(x.shape), store.Box.whole(x.shape), x)
            for name, x in [*((n, reader.read(n)) for n in some), ("stranger", torch.ones(2))]
        ]
        record = reader.state
    with state.Saver(tmp_path / "odd") as saver:
        saver.write(2, [pieces], record)
    flags = f"--train-iters 3 --load {tmp_path / 'odd'}"
    with pytest.raises(CheckpointError, match="12 are missing, 1 are unknown"):
        _pretrain(0, flags)
    with pytest.raises(CheckpointError, match="12 are missing, 0 are unknown"):
        _pretrain(0, f"{flags} --dist-ckpt-strictness assume_ok_unexpected")
    with pytest.raises(CheckpointError, match="0 are missing, 1 are unknown"):
        _pretrain(0, f"{flags} --load-strictness warn-missing")
    capsys.readouterr()
    _pretrain(0, f"{flags} --load-strictness warn-all")
    said = capsys.readouterr().out
    assert re.search(r"note: .*12 tensors keep their initial values: .*mlp_norm", said)
    assert "1 tensors are not loaded: stranger: not in this run" in said


def test_resharded_and_exported_checkpoints_go_on(tmp_path):
    """The same bits from other files; and a model that went through transformers starts where it was."""
    _pretrain(0, f"--train-iters 4 --save-interval 2 --save {tmp_path / 'a'}")
    tool.main(["reshard", str(tmp_path / "a"), str(tmp_path / "b"), "--tp", "2", "--ckpt-step", "2"])
    _pretrain(0, f"--train-iters 4 --load {tmp_path / 'b'} --save {tmp_path / 'b'}")
    assert same(tmp_path / "a", tmp_path / "b", 4)
    tool.main(["to-hf", str(tmp_path / "a"), str(tmp_path / "hf"), "--unchecked"])
    tool.main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "c"), "--unchecked"])
    _pretrain(
        0, f"--train-iters 1 --load {tmp_path / 'c'} --finetune --save {tmp_path / 'd'} --tokenizer-type NullTokenizer"
    )
    records = [json.loads(line) for line in (tmp_path / "d" / "metrics.jsonl").read_text().splitlines()]
    [step] = [record for record in records if record["kind"] == "step"]
    assert step["lm loss"] < 4.55  # ln 101 is where an untrained model starts
