# SPDX-License-Identifier: Apache-2.0
"""Snapshots in memory: a run goes on from them to the bits of one that was not disturbed, lost nodes are replaced by
copies, and nothing that is damaged is used, or tried again and again.
"""

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import pretrain_gpt
from megatron.checkpoint import memory_snapshots, replication
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.compare import differences
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.memory_parts import MemoryPart, parts_in, saves_in
from megatron.checkpoint.memory_snapshots import STARTS, MemorySnapshots, read_record, verified
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.replication import replica_ranks
from megatron.checkpoint.store import Piece
from megatron.errors import SettingsError, StorageError
from megatron.guard.beat_files import read_beats
from megatron.guard.resume_command import resumed
from megatron.mpu import collectives
from megatron.mpu.forked import RankFailed
from megatron.mpu.mesh import Axis
from megatron.settings.schema import Checkpoint
from megatron.storage.durable import Damaged
from megatron.telemetry.events import EventLog, read_events
from megatron.telemetry.run_folder import SNAPSHOT_FOLDER, SNAPSHOTS
from megatron.training import loop

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --precision fp32 "
    "--use-distributed-optimizer --train-iters 8 --log-interval 1 --distributed-timeout-minutes 0.2 "
)


# ---- where copies are ------------------------------------------------------------------------------------------------


def test_where_copies_are():
    """--replication-factor: other nodes, as many different ones as there can be; equal nodes hold the same number."""
    dice = random.Random(3)
    for _ in range(200):
        sizes = [dice.randint(1, 4) for _ in range(dice.randint(1, 5))]
        if dice.random() < 0.7:
            sizes = sizes[:1] * len(sizes)
        nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
        dice.shuffle(nodes)
        factor = dice.randint(2, 4)
        found = replica_ranks(nodes, factor)
        for rank, others in enumerate(found):
            elsewhere = {nodes[other] for other in others} - {nodes[rank]}
            if len(sizes) > 1:
                assert len(elsewhere) == len(others) == min(factor, len(sizes)) - 1
            else:
                assert len(set(others)) == len(others) == min(factor, len(nodes)) - 1 and rank not in others
        held = [sum(rank in others for others in found) for rank in range(len(nodes))]
        assert len(set(sizes)) > 1 or len(set(held)) == 1


def test_a_jump_is_megatrons_and_reaches_another_node():
    """--replication-jump J: n, n+J, ...; the pairs of 32 ranks with J 8 are (0, 8), (1, 9), ..., one way round."""
    nodes = [rank // 8 for rank in range(32)]
    assert replica_ranks(nodes, 2, 8) == [[(rank + 8) % 32] for rank in range(32)]
    assert replica_ranks(nodes, 3, 8)[25] == [1, 9]
    with pytest.raises(SettingsError, match="--replication-jump 4 puts the copy of rank 0 on its own node"):
        replica_ranks(nodes, 2, 4)
    with pytest.raises(SettingsError, match="on its own node"):
        replica_ranks(nodes, 2, 32)
    assert replica_ranks([0] * 4, 2, 2) == [[2], [3], [0], [1]]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def train(rank, flags, die_at=None, memory=None, dying=1):
    """die_at: the step in which a rank is lost. memory: folder with a node of its own for each rank"""
    step = loop.train_step

    def train_step(run):
        if run.state.iteration + 1 == die_at and rank == dying:
            os._exit(9)
        return step(run)

    loop.train_step = train_step
    own = f"--non-persistent-local-ckpt-dir {memory}/{rank}" if memory else ""
    pretrain_gpt.main(f"{TINY} {flags} {own}".split())


def ledger(folder):
    records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return [(record["iteration"], record["ledger"]) for record in records if record["kind"] == "step"]


def assert_same(one, other, iteration=8):
    name = f"iter_{iteration:07d}"
    with Reader(one / name) as a, Reader(other / name) as b:
        assert len(a.tensors) > 20 and not list(differences(a, b))


@pytest.fixture(scope="module")
def undisturbed(run_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, train, f"--save {folder}")
    return folder


@pytest.mark.sampled(2)
def test_a_run_goes_on_from_memory(run_ranks, tmp_path, undisturbed):
    """Killed in step 6, with a checkpoint of step 3 and a snapshot of step 5: no sample is lost or seen twice."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    flags = f"--save {home} --load {home} --save-interval 3 --non-persistent-save-interval 1"
    flags += f" --non-persistent-local-ckpt-dir {memory}"
    with pytest.raises(RankFailed):
        run_ranks(2, train, flags, 6)
    assert list(checkpoints(home)) == [3]
    [folder] = memory.iterdir()
    assert [save.iteration for save in saves_in(folder)] == [5]
    run_ranks(2, train, flags)
    events = read_events(home)
    assert [event["iteration"] for event in events if event["event"] == "snapshot_loaded"] == [5]
    assert ledger(home) == ledger(undisturbed)
    assert_same(home, undisturbed)
    assert not list(memory.iterdir()) and not (home / SNAPSHOTS).exists()


@pytest.mark.sampled(2)
def test_a_lost_node_is_replaced_from_copies(run_ranks, tmp_path, undisturbed):
    """Two nodes of a rank each; the memory of one is gone, and there is no checkpoint on the disk yet."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    memory.mkdir()
    flags = f"--save {home} --load {home} --non-persistent-save-interval 2 --replication"
    with pytest.raises(RankFailed):
        run_ranks(2, train, flags, 6, memory)
    shutil.rmtree(memory / "1")
    run_ranks(2, train, flags, None, memory)
    [loaded] = [event for event in read_events(home) if event["event"] == "snapshot_loaded"]
    assert loaded["iteration"] == 4 and ledger(home) == ledger(undisturbed)[:5] + ledger(undisturbed)[4:]
    assert_same(home, undisturbed)


@pytest.mark.full
def test_a_killed_rank_of_four_under_the_supervisor(root, run_ranks, tmp_path):
    """It starts again from memory by itself: no step is lost beyond the snapshot's, no sample lost or seen twice."""
    home, flags = tmp_path / "home", f"{TINY} --train-iters 40 --save-interval 30".replace("--train-iters 8", "")
    run_ranks(4, lambda rank: pretrain_gpt.main(f"{flags} --save {tmp_path / 'clean'}".split()))
    job = f"-m megatron.tools.launch --nproc-per-node 4 {root / 'pretrain_gpt.py'} {flags} --save {home}"
    job += " --non-persistent-save-interval 4 --replication"
    words = f"-m megatron.tools.supervise --heartbeat-dir {tmp_path / 'beats'} --backoff 0 -- {sys.executable} {job}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *words.split()],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(root)},
            cwd=tmp_path,
        )
    while process.poll() is None and not any(beat.step == 11 for beat in read_beats(tmp_path / "beats")):
        time.sleep(0.005)
    os.kill(read_beats(tmp_path / "beats")[2].pid, signal.SIGKILL)
    assert process.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    assert "attempt 1 on 4 ranks, from a snapshot in memory, if one is whole" in (tmp_path / "log").read_text()
    [loaded] = [event for event in read_events(home) if event["event"] == "snapshot_loaded"]
    found, clean = ledger(home), ledger(tmp_path / "clean")
    [at] = [place for place, ((one, _), (two, _)) in enumerate(pairwise(found)) if two <= one]
    assert loaded["iteration"] == found[at + 1][0] - 1 and found[at][0] - loaded["iteration"] <= 4 + 1
    assert found[: at + 1] == clean[: found[at][0]] and found[at + 1 :] == clean[loaded["iteration"] :]
    assert_same(home, tmp_path / "clean", 40)


@pytest.mark.sampled(5)
def test_without_copies_a_lost_node_means_the_disk(run_ranks, tmp_path, undisturbed):
    """And another layout goes on from memory, too."""
    home, memory = tmp_path / "home", tmp_path / "memory"
    memory.mkdir()
    flags = f"--save {home} --load {home} --save-interval 3 --non-persistent-save-interval 1"
    with pytest.raises(RankFailed):
        run_ranks(2, train, flags, 6, memory)
    shutil.rmtree(memory / "1")
    with pytest.raises(RankFailed):
        run_ranks(2, train, flags, 6, memory)
    events = read_events(home)
    assert not [event for event in events if event["event"] == "snapshot_loaded"]
    [passed] = [event for event in events if event["event"] == "damaged_checkpoint"]
    assert passed["loaded"] == 3 and "parts [1] of 2 are missing or damaged" in passed["why"]
    run_ranks(1, train, f"{flags} --tensor-model-parallel-size 1", None, memory)  # one rank: it cannot reach part 1
    assert ledger(home) == [*ledger(undisturbed)[:5], *ledger(undisturbed)[3:5], *ledger(undisturbed)[3:]]


# ---- snapshots without a training ------------------------------------------------------------------------------------


def pieces_of(rank, world, value):
    """A tensor of `world` rows, one on each rank, and one that rank 0 has alone, all of a value."""
    rows = [Piece("rows", (world, 5), Box((rank, 0), (1, 5)), torch.full((1, 5), float(value)))]
    return rows + [Piece("one", (7,), Box.whole((7,)), torch.full((7,), value))] * (rank == 0)


class Threads:
    """Ranks that are threads of one process: hundreds of launches in seconds. sick: the rank whose messages are damaged"""

    def __init__(self, world):
        self.world, self.barrier, self.slots = world, threading.Barrier(world, timeout=60), [None] * world
        self.sick = None

    def run(self, body, *args):
        """body(rank, these threads, *args) of each rank."""
        with ThreadPoolExecutor(self.world) as pool:
            started = [pool.submit(self._ended, body, rank, *args) for rank in range(self.world)]
            return [one.result() for one in started]

    def _ended(self, body, rank, *args):
        try:
            return body(rank, self, *args)
        except BaseException:
            self.barrier.abort()
            raise

    def all_gather_object(self, rank, value):
        self.slots[rank] = pickle.dumps(value)
        self.barrier.wait()
        values = [pickle.loads(value) for value in self.slots]
        self.barrier.wait()
        return values

    def exchange_files(self, outgoing, incoming, axis, device):
        sent = self.all_gather_object(axis.rank, list(outgoing))
        for source in {source for source, *_ in incoming}:
            there = [(path, size) for to, path, size in sent[source] if to == axis.rank]
            here = [(path, size) for by, path, size in incoming if by == source]
            assert [size for _, size in there] == [size for _, size in here]
            for (original, _), (copy, _) in zip(there, here, strict=True):
                shutil.copyfile(original, copy)
                if self.sick == axis.rank:
                    _flip(copy, random.Random(str(copy)))
        self.barrier.wait()
        return []


def opened(folder, rank, world, nodes=None, gather=None, **more):
    node = rank if nodes is None else nodes[rank]
    axis = Axis("world", tuple(range(world)), rank)
    settings = Checkpoint(
        save=str(folder / "save"),
        non_persistent_save_interval=1,
        non_persistent_local_ckpt_dir=str(folder / f"node{node}"),
        replication=True,
    )
    return MemorySnapshots(
        settings,
        world=axis,
        device=torch.device("cpu"),
        all_gather_object=gather or (lambda value: collectives.all_gather_object(value, axis)),
        log=lambda text: None,
        **more,
    )


def loaded(found, rank, world):
    """The values that a rank reads, after `begin`; every element is the same."""
    mine = pieces_of((rank + 1) % world, world, -1)  # what another rank wrote
    found.begin(mine)
    with Reader(found.path) as reader:
        reader.load(mine)
        iteration = reader.state["iteration"]
    values = {value for piece in mine for value in piece.tensor.unique().tolist()}
    return iteration, values


# Each damage is done to the copies of some parts of a save: (name, function of a copy and another file)
def _flip(path, dice):
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


def _cut(path, dice):
    os.truncate(path, dice.randrange(path.stat().st_size))


def _extend(path, dice):
    with path.open("ab") as file:
        file.write(bytes(dice.randint(1, 9)))


def _zero(path, dice):
    path.write_bytes(bytes(path.stat().st_size))


def _delete(path, dice):
    path.unlink()


DAMAGES = (_flip, _flip, _flip, _cut, _extend, _zero, _delete)


def damage(part, others, dice):
    """Damage a copy in one way; `others` are copies of other parts or saves, whose bytes may take its place."""
    own = dice.choice((part.file, part.record_file))
    if others and dice.random() < 0.25:
        other = dice.choice(others)
        content = (other.record_file if own == part.record_file else other.file).read_bytes()
        if content != own.read_bytes():
            own.write_bytes(content)
            return
    dice.choice(DAMAGES)(own, dice)


def one_case(rank, threads, nodes, folder, number):
    """Two snapshots, damage of some copies and messages, and launches until nothing is left: what each started from."""
    world, dice, first_of_node = threads.world, random.Random(number), nodes.index(nodes[rank]) == rank
    launch = partial(opened, folder, rank, world, nodes, partial(threads.all_gather_object, rank))
    snapshots = launch()
    assert snapshots.save(1, pieces_of(rank, world, 1), {})
    kept = folder / f"kept{nodes[rank]}"
    if first_of_node:
        shutil.copytree(snapshots.memory, kept)
    threads.barrier.wait()
    threads.sick = sick = dice.randrange(world) if dice.random() < 0.3 else None
    saved = snapshots.save(2, pieces_of(rank, world, 2), {})
    assert saved == (not any(sick in holders for holders in snapshots.holders))
    threads.barrier.wait()
    threads.sick = None
    if saved and first_of_node:  # as if it had been killed before it removed the first
        shutil.copytree(kept, snapshots.memory, dirs_exist_ok=True)
    threads.barrier.wait()
    expected = do_damage(folder, nodes, snapshots.memory.name, dice) if rank == 0 else None
    threads.barrier.wait()
    starts = []
    while found := launch().find():
        starts.append((found.iteration, *loaded(found, rank, world)))
        assert len(starts) <= 2 * STARTS, "a circle"
    threads.barrier.wait()
    if rank == 0:  # nothing that is damaged is left to be tried again
        again = [part for node in set(nodes) for part in parts_in(folder / f"node{node}" / snapshots.memory.name)]
        assert [part for part in again if verified([part])[1]] == []
    return starts, expected


def do_damage(folder, nodes, name, dice):
    """Damage a few copies; returns the iteration of the newest snapshot of which each part has a copy that is whole."""
    copies = [part for node in sorted(set(nodes)) for part in parts_in(folder / f"node{node}" / name)]
    copies.sort(key=lambda part: (part.save.iteration, part.writer, part.holder))
    chosen = dice.sample(copies, min(len(copies), dice.choice((1, 1, 2, 3, 4, 6))))
    whole = [part for part in copies if part not in chosen]
    for part in chosen:
        damage(part, [other for other in whole if (other.save, other.writer) != (part.save, part.writer)], dice)
    writers = {i: {part.writer for part in whole if part.save.iteration == i} for i in (1, 2)}
    return max((i for i, found in writers.items() if found == set(range(len(nodes)))), default=None)


CASES, PARTS = 1000, 20


@pytest.mark.sampled(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_thousand_damages(part, memory_folder, monkeypatch):
    """Three ranks, on one, two or three nodes. A launch starts from the newest snapshot with a whole copy of each part, at
    most twice; no value is another than the one that was saved.
    """
    for number in range(part, CASES, PARTS):
        threads, nodes = Threads(3), ([0, 0, 0], [0, 0, 1], [0, 1, 2])[number % 3]
        monkeypatch.setattr(memory_snapshots, "exchange_files", threads.exchange_files)
        folder = memory_folder / str(number)
        answers = threads.run(one_case, nodes, folder, number)
        shutil.rmtree(folder)
        expected = answers[0][1]
        for starts, _ in answers:
            assert all(values == {iteration} and iteration == of for of, iteration, values in starts), number
            order = [iteration for iteration, *_ in starts]
            assert order[:1] == ([expected] if expected else []), (number, order, expected)
            assert order == sorted(order, reverse=True) and {order.count(one) for one in order} <= {STARTS}, number


@pytest.mark.parametrize("kind", ["flipped", "lost", "of another", "not written"])
def test_a_message_that_arrives_otherwise(kind, run_ranks, tmp_path):
    """The copy is not kept, nor the snapshot: the one before is still whole on all ranks."""
    events = tmp_path / "events.jsonl"

    def body(rank):
        snapshots = opened(tmp_path, rank, 2, events=EventLog(events, active=rank == 0, log=lambda text: None))
        assert snapshots.save(1, pieces_of(rank, 2, 1), {})
        write = replication._File.write

        def damaged(self, number, chunk):
            if kind == "flipped" and rank == 1 and self.path.suffix == ".safetensors":
                chunk[-3] ^= 4
            if kind == "lost" and rank == 1:
                chunk.zero_()
            if kind == "of another" and self.path.suffix == ".safetensors":
                own = MemoryPart(snapshots.memory, saves_in(snapshots.memory)[-1], rank, rank).file.read_bytes()
                chunk = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            if kind == "not written" and rank == 0:
                raise OSError(28, "No space left on device")
            write(self, number, chunk)

        replication._File.write = damaged
        kept = snapshots.save(2, pieces_of(rank, 2, 2), {})
        replication._File.write = write
        dist.barrier()
        found = opened(tmp_path, rank, 2).find()
        return kept, [save.iteration for save in saves_in(snapshots.memory)], loaded(found, rank, 2)

    assert run_ranks(2, body) == [(False, [1], (1, {1}))] * 2
    [failed] = read_events(events)
    assert failed["event"] == "snapshot_failed" and failed["iteration"] == 2 and "rank" in failed["why"]


def test_checksums_are_of_the_live_state(run_ranks, tmp_path, monkeypatch):
    """A part whose bytes were changed between the state and the file does not become a snapshot: its record would know."""
    write = MemoryPart.write

    def body(rank):
        def late(self, pieces, *args, **more):
            write(self, pieces, *args, **more)
            data = bytearray(self.file.read_bytes())
            data[-1] ^= 1
            self.file.write_bytes(data)

        monkeypatch.setattr(MemoryPart, "write", late)
        return opened(tmp_path, rank, 2).save(1, pieces_of(rank, 2, 1), {})

    assert run_ranks(2, body) == [False, False]


def test_a_new_run_in_the_folder_finds_no_snapshot_of_an_old_one(tmp_path):
    """The folder of checkpoints is gone, or the user starts anew; what is left in memory is removed."""
    alone = lambda **more: opened(tmp_path, 0, 1, **more)
    alone().save(1, pieces_of(0, 1, 1), {})
    assert alone().find().iteration == 1
    fresh = alone(resumes=False)
    assert fresh.find() is None and [path.name for path in (tmp_path / "node0").iterdir()] == [fresh.memory.name]
    fresh.save(2, pieces_of(0, 1, 2), {})
    shutil.rmtree(tmp_path / "save")
    third = alone()
    assert third.find() is None and [path.name for path in (tmp_path / "node0").iterdir()] == [third.memory.name]
    assert third.memory.name == SNAPSHOT_FOLDER + read_record(tmp_path / "save")[0]


def test_parts_of_two_saves_of_one_step_are_not_one_snapshot(run_ranks, tmp_path):
    """Two launches that came to one step and were killed while they wrote: each has left one rank's part."""

    def body(rank):
        kept = tmp_path / f"kept{rank}"
        for launch in (0, 1):
            snapshots = opened(tmp_path, rank, 2)
            snapshots.holders = [[], []]
            snapshots.save(7, pieces_of(rank, 2, launch), {})
            [save] = saves_in(snapshots.memory)
            if rank == launch:
                shutil.copytree(save.folder(snapshots.memory), save.folder(kept))
            dist.barrier()
        shutil.rmtree(save.folder(snapshots.memory))
        shutil.copytree(kept, snapshots.memory, dirs_exist_ok=True)
        dist.barrier()
        [part] = parts_in(snapshots.memory)
        return part.save.number, opened(tmp_path, rank, 2).find()

    (one, found), (other, too) = run_ranks(2, body)
    assert one != other and found is None and too is None


@pytest.mark.parametrize("what", [b"", b"{}", b"[1", b'{"checksum": "0"}'])
def test_a_damaged_record_of_snapshots_means_the_disk(what, tmp_path):
    opened(tmp_path, 0, 1).save(1, pieces_of(0, 1, 1), {})
    (tmp_path / "save" / SNAPSHOTS).write_bytes(what)
    again = opened(tmp_path, 0, 1)
    assert again.find() is None and not again.starts


def test_memory_and_disk_in_the_order_of_their_steps(tmp_path):
    """A snapshot comes before checkpoints that are not newer; a damaged newer checkpoint leads to it."""
    save = tmp_path / "save"

    def load():
        mine = pieces_of(0, 1, -1)
        snapshots = opened(tmp_path, 0, 1)
        found = snapshots.find()
        restored = restore(save, mine, snapshot=found)
        return restored.state["iteration"], {value for piece in mine for value in piece.tensor.unique().tolist()}

    with Saver(save) as saver:
        saver.save(1, pieces_of(0, 1, 1), {})
        opened(tmp_path, 0, 1).save(2, pieces_of(0, 1, 2), {})
        assert load() == (2, {2})
        path = saver.save(3, pieces_of(0, 1, 3), {})
    assert load() == (3, {3})
    os.truncate(path / "shard_00000.safetensors", 100)
    assert load() == (2, {2})
    assert load() == (1, {1})  # it has started the run twice


def test_a_snapshot_that_is_damaged_while_it_is_read(tmp_path):
    """The run ends in a way after which it is started again, and then without it."""
    snapshots = opened(tmp_path, 0, 1)
    snapshots.save(2, pieces_of(0, 1, 2), {})
    found = opened(tmp_path, 0, 1).find()
    _flip(found.path / "shard_00000.safetensors", random.Random(5))
    with pytest.raises(StorageError, match="was damaged while it was read"):
        restore(tmp_path / "save", pieces_of(0, 1, -1), snapshot=found)
    assert opened(tmp_path, 0, 1).find() is None
    with Saver(tmp_path / "save") as saver:
        saver.save(1, pieces_of(0, 1, 1), {})
    snapshots.save(2, pieces_of(0, 1, 2), {})
    found = opened(tmp_path, 0, 1).find()
    found.snapshots.fetch = lambda *_: (_ for _ in ()).throw(Damaged("a file did not come"))
    restored = restore(tmp_path / "save", pieces_of(0, 1, -1), snapshot=found)
    assert restored.state["iteration"] == 1 and "a file did not come" in restored.damaged[0][1]


def test_a_job_without_a_checkpoint_begins_from_memory(tmp_path):
    words = f"torchrun --nproc-per-node 2 pretrain_gpt.py {TINY} --save {tmp_path}".split()
    assert resumed(words, str(tmp_path)) == words
    (tmp_path / SNAPSHOTS).write_text("{}")
    assert resumed(words, str(tmp_path)) == [*words, "--load", str(tmp_path)]
    others = [*words, "--load", "base", "--finetune"]
    assert resumed(others, str(tmp_path)) == others
