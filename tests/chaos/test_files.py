# SPDX-License-Identifier: Apache-2.0
"""The short tier of the chaos tool, as far as files go; and that it turns red when the product is broken."""

import contextlib
import io
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.checkpoint import backends, index, store
from megatron.checkpoint import folder as state
from megatron.checkpoint.folder import TRACKER, Saver
from megatron.convert import megatron_pickle
from megatron.data import index_cache, manifest, preprocess_output
from megatron.storage import durable
from tests.chaos import crashes, damage, forgeries, pickles, rivals, shortages
from tests.chaos.conduct import conduct
from tests.chaos.disk import Change, watched
from tests.chaos.powerloss import KILL, NAMES, SYNCED, TORN, Disk, lay_out, record

pytestmark = pytest.mark.sampled(5)

CASES = {
    case.id: case for module in (crashes, damage, shortages, pickles, forgeries, rivals) for case in module.cases()
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.short])
def test_short_tier(name, tmp_path):
    line = conduct(CASES[name], 0, tmp_path / "case")
    assert line["got"] == line["expected"]
    assert line["faults"] > 0


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def got(name, tmp_path):
    """What a case that must fail comes to."""
    line = conduct(CASES[name], 0, tmp_path / "case")
    assert not line["good"], line
    return line["got"]


class WithoutSync:
    """The module `os` as it is at the moment, but for fsync."""

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, handle):
        pass


def test_a_save_without_fsync_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(durable, "os", WithoutSync())
    monkeypatch.setattr(backends, "os", WithoutSync())
    assert "iter_0000003 has its final name and" in got("crash/save/several-files", tmp_path)


def test_one_forgotten_fsync_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "os", WithoutSync())  # of the shards alone
    assert "shard_00000.safetensors" in got("crash/save/new", tmp_path)


def test_a_folder_that_is_not_synced_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "sync_folder", lambda folder: None)
    assert "iter_0000003" in got("crash/save/new", tmp_path)


def test_token_files_without_fsync_turn_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(preprocess_output, "os", WithoutSync())
    assert "has its final name and is not whole" in got("crash/preprocess/fresh", tmp_path)


def test_a_tracker_that_is_written_first_turns_it_red(monkeypatch, tmp_path):
    finish = Saver._finish

    def tracker_first(self, temporary, final, writers, iteration, *more):
        backends.replace_file(self.folder / TRACKER, str(iteration).encode())
        return finish(self, temporary, final, writers, iteration, *more)

    monkeypatch.setattr(Saver, "_finish", tracker_first)
    assert "the tracker names iteration 3, there are [1, 2]" in got("crash/save/new", tmp_path)


class Anything(str):
    """Equal to every checksum."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = str.__hash__


@pytest.mark.parametrize(
    "module, case, words",
    [
        (index, "damage/checkpoint/shard_00001.safetensors/0", "flipped bit: iteration 2 has the values"),
        (index_cache, "damage/index-cache/sample.npy/0", ": other samples"),
    ],
)
def test_a_checksum_that_is_not_looked_at_turns_it_red(monkeypatch, tmp_path, module, case, words):
    monkeypatch.setattr(module, "checksum", lambda data: Anything())
    assert words in got(case, tmp_path)


def test_token_files_whose_checksums_are_not_looked_at_turn_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(manifest, "checksum", lambda data: "same")
    assert "a.bin, flipped bit: other tokens, found good" in got("damage/token-files/a.bin/0", tmp_path)


def test_an_older_checkpoint_without_a_word_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(damage, "restore", lambda *args, **keys: quiet(state.restore(*args, **keys)))
    monkeypatch.setattr(damage.Checkpoint, "found_good", lambda self: None)
    assert "iteration 1 is taken without a word" in got("damage/checkpoint/index.json/0", tmp_path)


def quiet(restored):
    return replace(restored, notices=(), damaged=())


def test_a_full_disk_that_nobody_hears_of_turns_it_red(monkeypatch, tmp_path):
    for module in (backends, store):
        monkeypatch.setattr(module, "storage_errors", lambda path, needed=None: contextlib.suppress(OSError))
    assert " of 41 faults: " in got("full/save/new", tmp_path)


def test_an_error_of_fsync_that_is_swallowed_turns_it_red(monkeypatch, tmp_path):
    fsync = durable.sync_folder

    def swallow(folder):
        try:
            fsync(folder)
        except OSError:
            pass

    for module in (durable, backends):
        monkeypatch.setattr(module, "sync_folder", swallow)
    assert "something of it is not on the disk" in got("io-error/save/new", tmp_path)


def test_a_careless_reader_of_pickles_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(megatron_pickle, "load", lambda source: torch.load(source, weights_only=False))
    assert got("pickles/from-megatron", tmp_path).startswith("executed: ")


def test_an_index_that_is_believed_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(index, "_file_entry", lambda name, entry: (entry["bytes"], entry["header"]))
    assert "surprises: 0" not in got("forged/index.json/0", tmp_path)


@pytest.mark.sampled(10)
def test_a_lock_that_does_not_hold_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(durable.fcntl, "lockf", lambda *args: None)
    assert re.search(r"round \d: [2-8] writers, ", got("rivals/save", tmp_path))  # who fails early has not written


@pytest.mark.parametrize("number", range(15))
def test_the_pickles_are_alive(tmp_path, number):
    """A careless reader runs them: without this, zero executions would mean nothing."""
    name, payload = list(pickles.payloads(tmp_path / "ran").items())[number]
    child = os.fork()
    if child == 0:
        try:
            if name.startswith("torch"):
                torch.load(io.BytesIO(payload), weights_only=False)
            elif name.startswith("numpy"):
                loaded = np.load(io.BytesIO(payload), allow_pickle=True)
                [loaded[key] for key in getattr(loaded, "files", ())]
            else:
                pickle.loads(payload)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "ran").exists(), name


# ---- the model of a disk ---------------------------------------------------------------------------------------------


def test_every_way_of_changing_files_is_seen(tmp_path):
    """What is noted, played on the model, gives what is really there."""
    place = tmp_path / "place"
    place.mkdir()
    (place / "old").write_text("old content")

    def work():
        (place / "sub").mkdir()
        (place / "sub" / "text").write_text("hello\n" * 3000)
        with open(place / "sub" / "array.npy", "wb") as file:
            np.save(file, np.arange(5000), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        with open(place / "old", "r+b", buffering=0) as file:
            file.seek(4)
            file.write(b"CONTENT")
            file.truncate(9)
        with open(place / "log", "a+") as file:
            file.write("one")
        with open(place / "log", "a") as file:
            file.write("two")
        handle = os.open(place / "raw", os.O_CREAT | os.O_RDWR)
        os.pwrite(handle, b"xyz", 5)
        os.write(handle, b"ab")
        os.ftruncate(handle, 7)
        with open(place / "log", "rb") as source:
            os.copy_file_range(source.fileno(), handle, 3, 0, 7)
        os.close(handle)
        os.rename(place / "raw", place / "sub" / "moved")
        (place / "gone").touch()
        (place / "gone").unlink()
        os.makedirs(place / "a" / "b")
        (place / "a" / "b" / "c").write_bytes(b"c")
        import shutil

        shutil.rmtree(place / "a")
        child = os.fork()
        if child == 0:
            (place / "child").write_text("from a forked process")
            os._exit(0)
        os.waitpid(child, 0)

    disk = Disk(place)
    changes = record(place, work, tmp_path / "changes")
    for change in changes:
        disk.apply(change)
    lay_out(disk.after(KILL), tmp_path / "model")
    same = subprocess.run(["diff", "-r", place, tmp_path / "model"], capture_output=True, text=True)
    assert same.returncode == 0, same.stdout
    assert {change.kind for change in changes} == set("create write truncate fsync mkdir rename unlink rmdir".split())


def test_what_a_power_failure_leaves(tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "a").write_bytes(b"old")
    disk = Disk(place)
    for change in (Change("create", "b"), Change("write", "b", data=b"new"), Change("rename", "b", "a")):
        disk.apply(change)
    assert disk.after(KILL) == {"": None, "a": b"new"}
    assert disk.after(SYNCED) == {"": None, "a": b"old"}
    assert disk.after(NAMES) == {"": None, "a": b""}
    found = {tuple(sorted((k, v) for k, v in disk.after(TORN, seed).items() if k)) for seed in range(200)}
    assert {(("a", b"old"),), (("a", b"new"),), (("a", b""),)} <= found
    disk.apply(Change("fsync", "a"))
    assert disk.after(SYNCED) == {"": None, "a": b"old"} and disk.after(NAMES) == {"": None, "a": b"new"}
    disk.apply(Change("fsync", "."))
    assert all(disk.after(kind) == {"": None, "a": b"new"} for kind in (KILL, SYNCED, NAMES, TORN))


def test_a_refused_change_is_not_made(tmp_path):
    def refuse(change):
        raise OSError(28, "No space left on device")

    with watched(tmp_path, refuse):
        for attempt in (lambda: (tmp_path / "a").write_text("a"), lambda: os.mkdir(tmp_path / "b")):
            with pytest.raises(OSError, match="No space"):
                attempt()
    assert list(tmp_path.iterdir()) == [] and sys.modules["os"].mkdir is os.mkdir


def test_a_disk_that_is_almost_full_takes_what_fits(tmp_path):
    with watched(tmp_path, shortages.TakesBytes(64 + 10)), pytest.raises(OSError, match="No space"):
        (tmp_path / "a").write_bytes(b"x" * 100)
    assert (tmp_path / "a").read_bytes() == b"x" * 10
