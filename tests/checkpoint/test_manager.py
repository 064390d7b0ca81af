# SPDX-License-Identifier: Apache-2.0
"""Saving in the background, after failures, to a mirror, and as often as pays."""

import errno
import itertools
import math
import os
import random
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.checkpoint import folder as state
from megatron.checkpoint import manager as module
from megatron.checkpoint import store
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.checkpoint.folder import TRACKER
from megatron.checkpoint.interval import best_interval, goodput
from megatron.checkpoint.manager import CheckpointManager, Snapshot, store_all_gather_object
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError, PeerLost, StorageError
from megatron.settings import schema
from megatron.settings.parse import parse_pretrain
from megatron.storage.processes import state as state_of
from megatron.training.rules import check


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER", 0.001)


def settings(folder, **more):
    return schema.Checkpoint(save=str(folder), **more)


def pieces_of(value, ranks=1, rank=0):
    rows = 4 // ranks
    box = Box((rank * rows, 0), (rows, 3))
    return [Piece("weight", (4, 3), box, torch.full((rows, 3), float(value)))]


def fail(monkeypatch, times, only=lambda folder: True):
    """The next writes of shards fail as on a full disk. Returns the list of what was tried."""
    tried = []

    def full(folder, *args, **more):
        tried.append(folder)
        if only(folder) and len(tried) <= times:
            raise StorageError("disk full", "12 bytes needed")
        return store.write_shard(folder, *args, **more)

    monkeypatch.setattr(state, "write_shard", full)
    return tried


def value_of(folder, iteration):
    with Reader(folder / f"iter_{iteration:07d}") as reader:
        assert not reader.verify()
        return set(reader.read("weight").flatten().tolist())


# ---------------------------------------------------------------------------------------------------- background


def test_training_may_change_its_weights_while_they_are_written(tmp_path, monkeypatch):
    """The save has not begun to write when training goes on, and still holds what was asked for."""
    go, said = threading.Event(), []
    write = store.write_shard
    monkeypatch.setattr(state, "write_shard", lambda *args, **live: (go.wait(200), write(*args, **live))[1])
    manager = CheckpointManager(settings(tmp_path, async_save=True), log=said.append)
    pieces = pieces_of(1)
    stall = manager.save(1, pieces, {})
    assert not checkpoints(tmp_path) and "requested checkpoint at iteration" in said[0] and stall < 100
    pieces[0].tensor.fill_(9)
    go.set()
    manager.wait()
    assert value_of(tmp_path, 1) == {1.0}
    assert re.search(r"successfully saved checkpoint at iteration +1 .*durable after", said[1])
    manager.save(2, pieces, {})
    manager.close()
    assert value_of(tmp_path, 2) == {9.0} and (tmp_path / TRACKER).read_text() == "2"


def test_the_next_save_waits_for_the_last(tmp_path, monkeypatch):
    order, write = [], store.write_shard

    def slow(*args, **live):
        order.append("begin")
        time.sleep(0.05)
        size = write(*args, **live)
        order.append("end")
        return size

    monkeypatch.setattr(state, "write_shard", slow)
    manager = CheckpointManager(settings(tmp_path, async_save=True), log=lambda text: None)
    for iteration in (1, 2, 3):
        manager.save(iteration, pieces_of(iteration), {})
    manager.close()
    assert order == ["begin", "end"] * 3 and list(checkpoints(tmp_path)) == [1, 2, 3]


def test_an_error_of_the_writer_reaches_training(tmp_path):
    manager = CheckpointManager(settings(tmp_path, async_save=True), log=lambda text: None)
    manager.save(1, [piece._replace(shape=(5, 3)) for piece in pieces_of(1)], {})  # a hole of three elements
    with pytest.raises(CheckpointError, match="do not form the tensor"):
        manager.save(2, pieces_of(2), {})
    manager.save(3, pieces_of(3), {})
    manager.close()
    assert list(checkpoints(tmp_path)) == [3]


def test_without_memory_training_waits_for_the_save(tmp_path, monkeypatch):
    def none(self, pieces):
        raise RuntimeError("can't allocate memory: you tried to allocate 1 TB\nmore")

    monkeypatch.setattr(Snapshot, "take", none)
    said = []
    manager = CheckpointManager(settings(tmp_path, async_save=True), log=said.append)
    manager.save(1, pieces_of(1), {})
    assert value_of(tmp_path, 1) == {1.0} and "no memory to save in the background" in said[0]
    manager.close()


def test_a_rank_without_memory_exchanges_what_the_others_do_in_their_order(tmp_path, monkeypatch):
    """Else the first rank would take its stall for the folder that the others are to write into."""

    def kinds(name):
        seen = []
        manager = CheckpointManager(
            settings(tmp_path / name, async_save=True, save_interval=schema.AUTO),
            log=lambda text: None,
            all_gather_object=lambda value: seen.append(type(value[0])) or [value],
        )
        for iteration in (1, 2):
            manager.due(iteration)
            manager.save(iteration, pieces_of(iteration), {})
        manager.close()
        return seen

    usual = kinds("usual")

    def none(self, pieces):
        raise MemoryError("none left")

    monkeypatch.setattr(Snapshot, "take", none)
    assert kinds("without") == usual and usual.count(float) == 2


def test_a_snapshot_has_memory_of_its_own_and_uses_it_again():
    snapshot, source = Snapshot(), torch.arange(12.0).view(3, 4)
    pieces = [
        Piece("a", (3, 4), Box.whole((3, 4)), source),
        Piece("b", (3, 2), Box.whole((3, 2)), source[:, 1:3]),
        Piece("c", (), Box.whole(()), torch.tensor(7, dtype=torch.int64)),
        Piece("d", (0,), Box.whole((0,)), torch.empty(0)),
    ]
    first = snapshot.take(pieces)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(first, pieces, strict=True))
    source.zero_()
    assert first[1].tensor.tolist() == [[1, 2], [5, 6], [9, 10]]
    assert [p.tensor.data_ptr() for p in snapshot.take(pieces)] == [p.tensor.data_ptr() for p in first]


# ---------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_is_tried_again(tmp_path, monkeypatch, background):
    tried, said = fail(monkeypatch, 2), []
    manager = CheckpointManager(settings(tmp_path, async_save=background, save_retries=2), log=said.append)
    manager.save(1, pieces_of(1), {})
    manager.close()
    assert len(tried) == 3 and value_of(tmp_path, 1) == {1.0}
    assert [line for line in said if "try 1 of 3" in line] and [line for line in said if "try 2 of 3" in line]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize("background", [False, True])
def test_training_ends_at_max_failed_saves_in_a_row(tmp_path, monkeypatch, background):
    fail(monkeypatch, 5)
    said = []
    manager = CheckpointManager(
        settings(tmp_path, async_save=background, save_retries=0, max_failed_saves=3), log=said.append
    )

    def saved(iteration):
        manager.save(iteration, pieces_of(iteration), {})
        manager.wait()

    saved(1)
    saved(2)
    assert any("CHECKPOINT AT ITERATION 2 IS LOST: save 2 in a row" in line for line in said)
    with pytest.raises(StorageError, match="3 saves in a row failed, the last: disk full"):
        saved(3)
    saved(4)  # one may go on
    saved(5)
    saved(6)  # the disk is back
    manager.close()
    assert list(checkpoints(tmp_path)) == [6]


@pytest.mark.parametrize("background", [False, True])
def test_a_run_whose_last_save_failed_does_not_end_well(tmp_path, monkeypatch, background):
    fail(monkeypatch, 9)
    manager = CheckpointManager(settings(tmp_path, async_save=background, save_retries=1), log=lambda text: None)
    manager.save(1, pieces_of(1), {})
    with pytest.raises(StorageError, match="disk full"):
        manager.close()
    CheckpointManager(settings(tmp_path), log=lambda text: None).close()  # the lock is free


def test_a_failing_run_is_not_stopped_again(tmp_path, monkeypatch):
    fail(monkeypatch, 9)
    said = []
    manager = CheckpointManager(settings(tmp_path, async_save=True, save_retries=0), log=said.append)
    manager.save(1, pieces_of(1), {})
    manager.close(timeout=200)
    assert any("IS LOST" in line for line in said)


def test_a_writer_that_waits_for_a_lost_rank_is_given_up(tmp_path, monkeypatch):
    hold, said = threading.Event(), []
    monkeypatch.setattr(state, "write_shard", lambda *args, **live: hold.wait(200))
    manager = CheckpointManager(settings(tmp_path, async_save=True, save_retries=0), log=said.append)
    manager.save(1, pieces_of(1), {})
    manager.close(timeout=0.05)
    hold.set()
    assert any("was not finished" in line for line in said)


def test_the_mirror_takes_what_the_folder_does_not(tmp_path, monkeypatch):
    home, mirror = tmp_path / "home", tmp_path / "mirror"
    fail(monkeypatch, 99, only=lambda folder: home in folder.parents)
    said = []
    manager = CheckpointManager(
        settings(home, save_mirror=str(mirror), save_retries=1, max_failed_saves=1), log=said.append
    )
    manager.save(1, pieces_of(1), {})
    manager.save(2, pieces_of(2), {})
    manager.close()
    assert not checkpoints(home) and list(checkpoints(mirror)) == [1, 2] and value_of(mirror, 2) == {2.0}
    assert any(f"to {mirror}" in line for line in said)


def test_when_the_mirror_fails_too_the_save_failed(tmp_path, monkeypatch):
    fail(monkeypatch, 99)
    manager = CheckpointManager(
        settings(tmp_path / "a", save_mirror=str(tmp_path / "b"), save_retries=0, max_failed_saves=1),
        log=lambda text: None,
    )
    with pytest.raises(StorageError, match="disk full"):
        manager.save(1, pieces_of(1), {})


# ---------------------------------------------------------------------------------------------------- retention


def test_old_ones_go_only_after_the_new_one_was_read_back(tmp_path, monkeypatch):
    manager = CheckpointManager(
        settings(tmp_path, keep_last=1, save_retries=0, max_failed_saves=1), log=lambda text: None
    )
    manager.save(1, pieces_of(1), {})
    write = store.write_shard

    def rotten(folder, writer, pieces, **live):
        size = write(folder, writer, pieces, **live)
        with open(folder / "shard_00000.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
        return size

    monkeypatch.setattr(state, "write_shard", rotten)
    with pytest.raises(StorageError, match="reads back differently"):
        manager.save(2, pieces_of(2), {})
    assert list(checkpoints(tmp_path)) == [1, 2] and value_of(tmp_path, 1) == {1.0}
    monkeypatch.setattr(state, "write_shard", write)
    manager.save(3, pieces_of(3), {})
    manager.close()
    assert list(checkpoints(tmp_path)) == [3]


@pytest.mark.parametrize(
    "keep_last, every, left",
    [
        (2, None, [6, 7]),
        (1, 3, [3, 6, 7]),
        (None, 3, [3, 6, 7]),
        (2, 5, [5, 6, 7]),
        (None, None, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_what_is_kept(tmp_path, keep_last, every, left):
    manager = CheckpointManager(
        settings(tmp_path, keep_last=keep_last, save_retain_interval=every), log=lambda text: None
    )
    for iteration in range(1, 8):
        manager.save(iteration, pieces_of(iteration), {})
    manager.close()
    assert list(checkpoints(tmp_path)) == left


# ---------------------------------------------------------------------------------------------------- several ranks


def exchange_of(rank, size, timeout=100.0):
    store = dist.PrefixStore("checkpoints", dist.distributed_c10d._get_default_store())
    return store_all_gather_object(store, rank, size, timeout)


def test_ranks_exchange_beside_collectives(run_ranks):
    def body(rank):
        all_gather_object, answers = exchange_of(rank, 3), []
        thread = threading.Thread(target=lambda: answers.extend(all_gather_object((rank, n)) for n in range(20)))
        thread.start()
        for _ in range(20):
            dist.all_reduce(torch.ones(3))
        thread.join()
        return answers == [[(other, n) for other in range(3)] for n in range(20)]

    assert run_ranks(3, body) == [True] * 3


def test_a_rank_that_does_not_answer_is_named(run_ranks):
    def body(rank):
        all_gather_object = exchange_of(rank, 2, timeout=0.1)
        if rank == 0:
            with pytest.raises(PeerLost, match="rank 1 did not answer"):
                all_gather_object(1)
        return True

    assert run_ranks(2, body) == [True, True]


def test_ranks_save_in_the_background_and_agree_on_failures(run_ranks, tmp_path):
    """Rank 1's disk is full for two saves: both ranks count them, and stop at the same step."""

    def body(rank):
        module.RETRY_AFTER, write, calls = 0.001, store.write_shard, []

        def full(*args, **live):
            calls.append(args)
            if rank == 1 and 1 < len(calls) <= 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(*args, **live)

        state.write_shard = full
        said = []
        manager = CheckpointManager(
            settings(tmp_path, async_save=True, save_retries=0, max_failed_saves=2),
            rank=rank,
            all_gather_object=exchange_of(rank, 2),
            log=said.append,
        )
        stopped = None
        for iteration in range(1, 6):
            try:
                manager.save(iteration, pieces_of(iteration, 2, rank), {})
            except StorageError:
                stopped = iteration
            dist.all_reduce(torch.ones(1))
        manager.close()
        return stopped, sorted(path.name for path in tmp_path.glob("iter_*"))

    (one, names), (two, _) = run_ranks(2, body)
    assert one == two == 4  # where the failure of saves 2 and 3 was heard of
    assert names == ["iter_0000001", "iter_0000005"] and value_of(tmp_path, 5) == {5.0}


# ---------------------------------------------------------------------------------------------------- how often


def test_dalys_interval_loses_the_least_time():
    for stall, mean in ((0.1, 3600.0), (5.0, 3600.0), (60.0, 86400.0)):
        best = best_interval(stall, mean)
        assert best == pytest.approx(math.sqrt(2 * stall * mean), rel=0.1)
        costs = [1 - goodput(best * factor, stall, mean) for factor in (0.5, 1.0, 2.0)]
        assert min(costs) == costs[1]
    assert best_interval(100.0, 10.0) == 10.0  # hopeless: no more often than the job lives


@pytest.mark.parametrize("background", [False, True])
def test_auto_saves_after_a_few_steps_and_then_as_often_as_pays(tmp_path, background, monkeypatch):
    clock, said = itertools.count(0, 0.001), []  # a step takes no longer than to look at the clock
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=clock.__next__))
    manager = CheckpointManager(settings(tmp_path, save_interval=schema.AUTO, async_save=background), log=said.append)
    steps = [step for step in range(3, 60) if manager.due(step) and manager.save(step, pieces_of(step), {}) is not None]
    manager.close()
    assert steps == [3 + module.FIRST_AUTO]
    [plan] = [line for line in said if "next checkpoint in" in line]
    assert re.search(r"in \d+ steps = \d+ s: a save stalls [\d.]+ s, .* every 24 h.* cost \d", plan)


def test_a_fixed_interval(tmp_path):
    manager = CheckpointManager(settings(tmp_path, save_interval=4))
    assert [step for step in range(1, 13) if manager.due(step)] == [4, 8, 12]
    manager.close()
    manager = CheckpointManager(settings(tmp_path))
    assert not any(manager.due(step) for step in range(1, 5))
    manager.close()


# ---------------------------------------------------------------------------------------------------- settings, kills


BASE = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 9 --train-iters 1 --lr 1"


@pytest.mark.parametrize(
    "line, words",
    [
        ("--save s --save-interval -3", "--save-interval -3 must be at least 1, or auto"),
        ("--save s --save-interval 0", "must be at least 1, or auto"),
        ("--save s --save-mirror s", "is --save itself"),
        ("--save s --save-mirror ./s", "--save-mirror ./s is --save itself"),
        ("--save s --save-copy m/../s", "--save-copy m/../s is --save itself"),
        ("--save s --save-copy m --save-mirror m/", "--save-copy m is --save-mirror itself"),
        ("--save-mirror m", "--save-mirror needs --save"),
        ("--async-save", "--async-save needs --save"),
        ("--save s --save-retain-interval 0", "--save-retain-interval 0 must be at least 1"),
        ("--save s --max-failed-saves 0", "--max-failed-saves 0 must be at least 1"),
        ("--save s --save-retries -1", "--save-retries -1 must be at least 0"),
        ("--save s --mean-time-to-interruption 0", "must be above 0"),
    ],
)
def test_settings_that_cannot_work(line, words):
    violations = check(parse_pretrain(f"{BASE} {line}".split()), 1)
    assert len(violations) == 1 and words in violations[0]


def test_megatrons_spellings():
    made = parse_pretrain(f"{BASE} --save s --save-interval auto --dist-ckpt-strictness log_all".split()).checkpoint
    assert made.save_interval == schema.AUTO and made.load_strictness == "warn-all"


def test_kill_9_while_the_thread_writes(memory_folder):
    """Whatever moment it hits, the newest checkpoint that is there is whole."""
    chance = random.Random(3)
    for number in range(15):
        folder = memory_folder / str(number)
        child = os.fork()
        if child == 0:
            try:
                manager = CheckpointManager(settings(folder, async_save=True, keep_last=2), log=lambda text: None)
                for iteration in itertools.count(1):
                    manager.save(iteration, pieces_of(iteration), {})
            finally:
                os._exit(1)
        while not (folder / TRACKER).exists():
            assert state_of(child) != "Z"
            time.sleep(0.001)
        time.sleep(chance.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        wanted = pieces_of(-1)
        found = state.restore(folder, wanted)
        assert found.state["iteration"] >= (read_tracker(folder) or 0)
        assert set(wanted[0].tensor.flatten().tolist()) == {float(found.state["iteration"])}
