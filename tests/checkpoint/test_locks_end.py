# SPDX-License-Identifier: Apache-2.0
"""Whatever locks a folder gives it back when it is closed, after a failure, too: while the process goes on, another one
may write there.
"""

import multiprocessing
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import copies as copies_module
from megatron.checkpoint import manager as manager_module
from megatron.checkpoint.backends import backend_of
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.copies import Copies
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.store import Piece
from megatron.errors import Failure, StorageError
from megatron.settings import schema
from megatron.storage import urls
from megatron.storage.urls import location

fork = multiprocessing.get_context("fork")


def pieces():
    return [Piece("weight", (4, 3), Box.whole((4, 3)), torch.ones(4, 3))]


def quiet(text):
    pass


def fails(*_, **__):
    raise StorageError("the disk is full")


def closed_saver(home, other, patch):
    with Saver(location(other)) as saver:
        saver.save(1, pieces(), {})
    return saver


def failed_saver(home, other, patch):
    patch.setattr("megatron.checkpoint.folder.write_shard", fails)
    with pytest.raises(Failure), Saver(location(other)) as saver:
        saver.save(1, pieces(), {})
    return saver


def closed_copies(home, other, patch):
    copies = Copies(str(other), log=quiet)
    copies.add(home)
    copies.close()
    assert list(checkpoints(location(other))) == [1]
    return copies


def failed_copies(home, other, patch):
    patch.setattr(copies_module, "copy_checkpoint", fails)
    copies = Copies(str(other), log=quiet)
    copies.add(home)
    copies.close()
    return copies


def manager_of(home, save, **more):
    return CheckpointManager(schema.Checkpoint(save=str(save), save_retries=0, max_failed_saves=9, **more), log=quiet)


def closed_manager(home, other, patch):
    manager = manager_of(home, other)
    manager.save(1, pieces(), {})
    manager.close()
    return manager


def mirror(home, other, patch):
    """The save fails, and the mirror takes it."""
    manager = manager_of(home, home.parent / "again", save_mirror=str(other))
    patch.setattr(manager._saver, "save", fails)
    manager.save(1, pieces(), {})
    assert list(checkpoints(location(other))) == [1]
    manager.close()
    return manager


def failed_mirror(home, other, patch):
    manager = manager_of(home, home.parent / "again", save_mirror=str(other))
    patch.setattr(Saver, "save", fails)
    manager.save(1, pieces(), {})
    with pytest.raises(Failure):
        manager.close()
    return manager


def claimed(folder, found) -> None:
    try:
        backend_of(location(folder)).claim(location(folder), quiet).release()
        found.put("free")
    except Failure as failure:
        found.put(str(failure))


HOLDERS = [closed_saver, failed_saver, closed_copies, failed_copies, closed_manager, mirror, failed_mirror]


@pytest.mark.parametrize("holder", HOLDERS, ids=lambda holder: holder.__name__)
@pytest.mark.parametrize("store", ["disk", "objects"])
def test_a_lock_is_given_back(holder, store, tmp_path, monkeypatch):
    other = tmp_path / "other"
    if store == "objects":
        urls.filesystem.cache_clear()
        other = f"memory://bucket/{tmp_path.name}"
    with Saver(tmp_path / "home") as saver:
        home = saver.save(1, pieces(), {})
    with monkeypatch.context() as patch:
        patch.setattr(manager_module, "_NICE", 0)
        kept = holder(Path(home), other, patch)
    if store == "objects":  # of this process: another one has its own memory
        assert not (location(other) / ".lock").exists()
        return
    found = fork.Queue()
    asked = fork.Process(target=claimed, args=(other, found))
    asked.start()
    assert found.get(timeout=60) == "free"
    asked.join(60)
    assert kept is not None  # it lives until here, with what it holds
