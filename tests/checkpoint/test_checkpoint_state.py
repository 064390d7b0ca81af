# SPDX-License-Identifier: Apache-2.0
"""Choosing, restoring, saving, pruning and locking a folder of checkpoints, on one rank and on several."""

import errno
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from megatron.checkpoint import choose as module
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints, choose, read_tracker
from megatron.checkpoint.first_launch import may_begin
from megatron.checkpoint.folder import TRACKER, Saver, prune, restore
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError, Locked, StorageError
from megatron.inference.load import load_model
from megatron.planner import problems
from megatron.settings.schema import Checkpoint
from megatron.storage.durable import Damaged
from megatron.storage.processes import state
from megatron.tools import checkpoint as tool


def pieces_of(value, names=("weight", "moment")):
    return [Piece(name, (3, 4), Box.whole((3, 4)), torch.full((3, 4), float(value))) for name in names]


@pytest.fixture
def folder(tmp_path):
    """Iterations 1, 2 and 3, whose tensors are full of their number."""
    with Saver(tmp_path) as saver:
        for iteration in (1, 2, 3):
            saver.save(iteration, pieces_of(iteration), {"consumed_samples": iteration * 10})
    return tmp_path


def restored(folder, **options):
    """(iteration, value that arrived, notices and warnings)"""
    wanted = pieces_of(-1)
    found = restore(folder, wanted, **options)
    values = {float(value) for piece in wanted for value in piece.tensor.flatten()}
    assert len(values) == 1, "a mix of two checkpoints"
    return found.state["iteration"], values.pop(), (*found.notices, *found.warnings)


def path_of(folder, iteration, file="shard_00000.safetensors"):
    return folder / f"iter_{iteration:07d}" / file


def flip(path, at=-1):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 16
    path.write_bytes(raw)


# ---------------------------------------------------------------------------------------------------- choosing


def test_the_newest_is_taken_without_a_word(folder):
    assert restored(folder) == (3, 3.0, ())
    assert (folder / TRACKER).read_bytes() == b"3"


def test_a_step_can_be_asked_for(folder):
    assert restored(folder, step=2) == (2, 2.0, ())
    with pytest.raises(CheckpointError, match="no checkpoint of iteration 9") as caught:
        restored(folder, step=9)
    assert "1, 2, 3" in str(caught.value)


def test_a_checkpoint_directory_itself_can_be_named(folder):
    assert restored(folder / "iter_0000002") == (2, 2.0, ())


@pytest.mark.parametrize("content", [None, b"", b"12x", b"\xff\xfe", b"99", b"-3", b"3\x00", "\u0663".encode()])
def test_a_missing_or_torn_tracker_means_the_newest_and_a_notice(folder, content):
    if content is None:
        (folder / TRACKER).unlink()
    else:
        (folder / TRACKER).write_bytes(content)
    iteration, _, notices = restored(folder)
    assert iteration == 3 and len(notices) == 1 and TRACKER in notices[0]


def test_a_tracker_set_back_is_followed_and_said(folder):
    (folder / TRACKER).write_text("2\n")
    iteration, _, notices = restored(folder)
    assert iteration == 2 and "but there are newer ones: [3]" in notices[0]


def test_every_bit_of_the_tracker_may_flip(folder):
    for bit in range(8):
        (folder / TRACKER).write_bytes(bytes([ord("3") ^ 1 << bit]))
        iteration, value, notices = restored(folder)
        assert iteration == value and notices


HARMS = {
    "flip": flip,
    "delete": os.unlink,
    "truncate": lambda path: os.truncate(path, 40),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", ["index.json", "state.json", "shard_00000.safetensors"])
def test_a_damaged_newest_is_named_and_the_one_before_is_used(folder, file, harm):
    HARMS[harm](path_of(folder, 3, file))
    iteration, value, notices = restored(folder)
    assert (iteration, value) == (2, 2.0)
    assert any("iter_0000003" in notice and file in notice for notice in notices)
    with pytest.raises(Damaged, match=file):
        restored(folder, step=3)


def test_those_behind_a_good_one_are_not_looked_at(folder, monkeypatch):
    """The index of a large model takes a second to check, and a folder may hold a hundred."""
    seen, look = [], module._visible_damage
    monkeypatch.setattr(module, "_visible_damage", lambda path: seen.append(path) or look(path))
    assert choose(folder).paths == tuple(reversed(checkpoints(folder).values())) and len(seen) == 1


@pytest.mark.parametrize(
    "number, kind",
    [(errno.ESTALE, StorageError), (errno.ENOTCONN, StorageError), (errno.EMFILE, StorageError), (errno.EIO, Damaged)],
)
def test_a_file_system_that_is_away_is_no_damage(folder, monkeypatch, number, kind):
    """Damage sends a run back to an older checkpoint, or stops it for good; this is tried again."""

    def away(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", away)
    with pytest.raises(kind, match=os.strerror(number)):
        restored(folder, step=max(checkpoints(folder)))


def test_all_damaged_is_an_error_that_names_each(folder):
    for iteration in (1, 2, 3):
        flip(path_of(folder, iteration))
    for allow_empty in (False, True):
        with pytest.raises(CheckpointError) as caught:
            restored(folder, allow_empty=allow_empty)
        assert all(f"iter_000000{iteration}" in str(caught.value) for iteration in (1, 2, 3))


def test_nothing_there_is_an_error_unless_allowed(tmp_path):
    for empty in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="holds no checkpoint") as refused:
            restore(empty, [])
        assert "--auto-resume" in refused.value.do
        with pytest.raises(CheckpointError, match="holds no checkpoint") as refused:  # by a tool
            choose(empty)
        assert refused.value.do == "check the path"
        assert restore(empty, [], allow_empty=True) is None


def test_a_checkpoint_of_another_step_than_the_one_asked_for_is_refused(folder):
    one = (folder / "iter_0000002").rename(folder.parent / "copy")  # its state says the iteration, not its name
    assert restored(one)[0] == restored(one, step=2)[0] == 2
    with pytest.raises(CheckpointError, match="copy is of iteration 2, and --ckpt-step asks for 3"):
        restored(one, step=3)


def test_another_model_is_an_error_at_once_and_not_a_reason_to_go_back(folder):
    with pytest.raises(CheckpointError, match="iter_0000003 does not fit") as caught:
        restore(folder, pieces_of(0, ("weight", "bias")))
    assert not isinstance(caught.value, Damaged)


def test_checkpoints_of_megatron_lm_are_recognised(tmp_path):
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="Megatron-LM's own format"):
        choose(tmp_path)
    (tmp_path / "release").mkdir()
    assert list(checkpoints(tmp_path)) == [5]


@pytest.mark.parametrize("name", ["release/mp_rank_00", "release/mp_rank_00_001", "release/__0_0.distcp", "mp_rank_00"])
@pytest.mark.parametrize("auto_resume", [False, True])
def test_a_release_of_megatron_lm_is_no_folder_that_lost_its_checkpoints(name, auto_resume, tmp_path):
    """Its tracker says `release`: neither a trace of a run of ours, nor a reason for a new run."""
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    settings = Checkpoint(load=str(tmp_path), save=str(tmp_path), auto_resume=auto_resume)
    with pytest.raises(CheckpointError, match=r"convert it with \S+ -m \S+checkpoint\s+from-megatron") as refused:
        restore(tmp_path, [], allow_empty=lambda: may_begin(settings))
    assert "holds no checkpoint" not in str(refused.value)
    which = SimpleNamespace(ckpt_step=None)
    for look in (
        lambda: tool.verify(tmp_path, which, SimpleNamespace(all=True)),
        lambda: tool.inspect(tmp_path, which, SimpleNamespace()),
        lambda: load_model(str(tmp_path)),
    ):
        with pytest.raises(CheckpointError, match="from-megatron"):
            look()
    if "release" in name:
        assert "from-megatron" in problems._folders(settings, None)[0]


# ---------------------------------------------------------------------------------------------------- saving


def test_saving_an_iteration_again_replaces_it(folder):
    with Saver(folder) as saver:
        saver.save(3, pieces_of(33), {})
    assert restored(folder) == (3, 33.0, ())
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith((".tmp", ".old"))) == []


def test_one_that_was_set_aside_is_found_and_put_back(folder):
    (folder / "iter_0000003").rename(folder / ".old-iter_0000003-0a1b2c3d")  # killed between two renames
    assert restored(folder)[:2] == (3, 3.0)
    Saver(folder).close()
    assert (folder / "iter_0000003").is_dir() and restored(folder) == (3, 3.0, ())


def test_leftovers_of_killed_saves_go_at_the_next_start(folder):
    (folder / ".tmp-iter_0000004-ffff").mkdir()
    (folder / ".tmp-iter_0000004-ffff" / "shard_00000.safetensors").write_bytes(b"half")
    (folder / f".tmp-{TRACKER}").write_bytes(b"")
    assert list(checkpoints(folder)) == [1, 2, 3]
    Saver(folder).close()
    assert not list(folder.glob(".tmp*"))


def test_only_the_newest_are_kept_and_only_after_the_new_one_is_there(tmp_path, monkeypatch):
    with Saver(tmp_path, keep_last=2) as saver:
        for iteration in (1, 2, 3, 4):
            saver.save(iteration, pieces_of(iteration), {})
        assert list(checkpoints(tmp_path)) == [3, 4]
        monkeypatch.setattr(
            "megatron.checkpoint.folder.commit", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad"))
        )
        with pytest.raises(StorageError):
            saver.save(5, pieces_of(5), {})
    assert list(checkpoints(tmp_path)) == [3, 4] and not list(tmp_path.glob(".tmp*"))


def test_after_going_back_newer_ones_stay_and_the_new_one_is_not_pruned(folder):
    (folder / TRACKER).write_text("1")
    with Saver(folder, keep_last=1) as saver:
        saver.save(2, pieces_of(22), {})
    assert list(checkpoints(folder)) == [2, 3] and read_tracker(folder) == 2
    assert restored(folder)[:2] == (2, 22.0)
    assert prune(folder, 0) == []


def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        Saver(tmp_path / "file" / "save")


# ---------------------------------------------------------------------------------------------------- several ranks


def as_team(size, work):
    """Run work(rank, all_gather_object) on `size` threads as the ranks of a job; results or exceptions by rank."""
    barrier, board, results = threading.Barrier(size, timeout=100), [None] * size, [None] * size

    def exchange_of(rank):
        def all_gather_object(value):
            board[rank] = value
            barrier.wait()
            answer = list(board)
            barrier.wait()
            return answer

        return all_gather_object

    def member(rank):
        try:
            results[rank] = work(rank, exchange_of(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def slab(rank, size, value):
    """Rank's rows of a [12, 2] tensor."""
    rows = 12 // size
    return [Piece("x", (12, 2), Box((rank * rows, 0), (rows, 2)), torch.full((rows, 2), float(value)))]


def save_as_team(folder, size, iteration, pieces=slab):
    def work(rank, all_gather_object):
        with Saver(folder, rank=rank, all_gather_object=all_gather_object) as saver:
            return saver.save(iteration, pieces(rank, size, iteration), {"by": size} if rank == 0 else {})

    return as_team(size, work)


@pytest.mark.parametrize("saved, loaded", [(1, 3), (4, 1), (3, 4), (2, 2)])
def test_ranks_save_and_restore_together(tmp_path, saved, loaded):
    assert save_as_team(tmp_path, saved, 7) == [tmp_path / "iter_0000007"] * saved

    def work(rank, all_gather_object):
        wanted = slab(rank, loaded, 0)
        found = restore(tmp_path, wanted, rank=rank, all_gather_object=all_gather_object)
        assert (wanted[0].tensor == 7).all()
        return found.state

    assert as_team(loaded, work) == [{"by": saved, "iteration": 7}] * loaded


def test_damage_that_one_rank_sees_sends_all_ranks_back(tmp_path):
    save_as_team(tmp_path, 4, 1)
    save_as_team(tmp_path, 4, 2)
    flip(path_of(tmp_path, 2, "shard_00003.safetensors"))

    def work(rank, all_gather_object):
        wanted = slab(rank, 4, 0)
        found = restore(tmp_path, wanted, rank=rank, all_gather_object=all_gather_object)
        return wanted[0].tensor.unique().item(), found.state["iteration"], tuple(found.warnings)

    results = as_team(4, work)
    assert len(set(results)) == 1 and results[0][:2] == (1.0, 1)
    assert "shard_00003.safetensors" in results[0][2][0] and "rank 3" in results[0][2][0]


def test_a_failure_of_one_rank_is_raised_on_all_and_leaves_nothing(tmp_path):
    save_as_team(tmp_path, 3, 1)

    def broken(rank, size, value):
        def pieces():
            if rank == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            yield from slab(rank, size, value)

        return pieces()

    results = save_as_team(tmp_path, 3, 2, broken)
    assert all(isinstance(error, StorageError) and "rank 2" in str(error) for error in results)
    assert list(checkpoints(tmp_path)) == [1] and not list(tmp_path.glob(".tmp*"))


def test_pieces_that_do_not_make_a_tensor_are_refused_on_all_ranks(tmp_path):
    results = save_as_team(tmp_path, 2, 1, lambda rank, size, value: slab(0, 2, value))
    assert all(isinstance(error, CheckpointError) and "overlap" in str(error) for error in results)
    assert not checkpoints(tmp_path)


# ---------------------------------------------------------------------------------------------------- one writer


def in_child(work):
    """Fork a process that does `work` and exits with its result, or with the code of its failure; returns its id."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(work() or 0)
        except Locked as error:
            os._exit(error.code)
        except BaseException:
            os._exit(99)
    return child


def exit_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_second_job_is_told_who_writes(tmp_path):
    with Saver(tmp_path):
        assert exit_of(in_child(lambda: Saver(tmp_path).close())) == 10
    assert exit_of(in_child(lambda: Saver(tmp_path).close())) == 0


def test_a_killed_writer_leaves_no_lock_even_when_its_children_live_on(tmp_path):
    def hold():
        Saver(tmp_path)
        orphan = os.fork()
        if orphan:
            (tmp_path / "orphan").write_text(str(orphan))
        time.sleep(600)

    holder = in_child(hold)
    while not (tmp_path / "orphan").exists() or not (tmp_path / "orphan").read_text():
        assert state(holder) != "Z"
        time.sleep(0.01)
    try:
        with pytest.raises(Locked, match="another job") as caught:
            Saver(tmp_path)
        assert f"process {holder} on" in str(caught.value)
        os.kill(holder, signal.SIGKILL)
        exit_of(holder)
        Saver(tmp_path).close()
    finally:
        os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)
