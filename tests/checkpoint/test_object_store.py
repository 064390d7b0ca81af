# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in an object store: the same bytes, the same guarantees, whatever fails at whichever request.

On fsspec's store in memory, and on an S3 server in a process of its own. What is compared with: local checkpoints, the
safetensors library, and (of faults) what was there before.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load as load_safetensors

import pretrain_gpt
from megatron.checkpoint import manager, survey
from megatron.checkpoint.backends import backend_of
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.choose import checkpoints, read_tracker
from megatron.checkpoint.copies import Copies
from megatron.checkpoint.folder import TRACKER, Saver, prune, restore
from megatron.checkpoint.manager import CheckpointManager
from megatron.checkpoint.reader import Reader
from megatron.checkpoint.store import Piece, write_shard
from megatron.errors import CheckpointError, Failure, Locked, MissingPackage, StorageError, UsageError, exit_code
from megatron.settings.schema import Checkpoint
from megatron.storage import lease, urls
from megatron.storage.lease import Lease
from megatron.storage.urls import Draft, UrlPath, local_folder, location, without_secrets
from megatron.tools import checkpoint as tool

pytestmark = pytest.mark.sampled(5)


def pieces_of(value, names=("weight", "moment"), shape=(3, 4)):
    return [Piece(name, shape, Box.whole(shape), torch.full(shape, float(value))) for name in names]


def save(folder, iteration, value=None, **options):
    with Saver(folder, **options) as saver:
        return saver.save(iteration, pieces_of(iteration if value is None else value), {"consumed_samples": 1})


def restored(folder, **options):
    """(iteration, the one value of all tensors, notices and warnings)"""
    wanted = pieces_of(-1)
    found = restore(folder, wanted, **options)
    values = {float(value) for piece in wanted for value in piece.tensor.flatten()}
    assert len(values) == 1, "a mix of two checkpoints"
    return found.state["iteration"], values.pop(), (*found.notices, *found.warnings)


def names_of(folder):
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------------- the same thing


def test_the_files_hold_the_bytes_of_a_local_checkpoint(bucket, tmp_path):
    torch.manual_seed(1)
    pieces = [
        Piece("a", (70, 90), Box.whole((70, 90)), torch.randn(70, 90)),
        Piece("b", (5,), Box.whole((5,)), torch.arange(5, dtype=torch.int64)),
        Piece("c", (), Box.whole(()), torch.tensor(2.5, dtype=torch.bfloat16)),
    ]
    for folder in (tmp_path, bucket):
        with Saver(folder) as saver:
            path = saver.save(7, pieces, {"note": "text"})
    assert path == location(bucket) / "iter_0000007"
    (shard,) = path.glob("shard_*")
    assert shard.read_bytes() == (tmp_path / "iter_0000007/shard_00000.safetensors").read_bytes()
    loaded = load_safetensors(shard.read_bytes())
    assert all(torch.equal(loaded[piece.name], piece.tensor) for piece in pieces) and len(loaded) == 3
    assert read_tracker(location(bucket)) == 7 and survey.verify(path)[1] == []
    with Reader(path) as there, Reader(tmp_path / "iter_0000007") as here:
        assert there.state == here.state and there.state["note"] == "text"
        assert torch.equal(there.read("a", Box((3, 4), (20, 80))), pieces[0].tensor[3:23, 4:84])


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_downloaded_checkpoint_is_a_local_one(bucket, tmp_path):
    path = save(bucket, 3)
    for found in path.iterdir():
        found.download(tmp_path / found.name)
    assert restored(tmp_path)[:2] == (3, 3.0)


TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 4 --eval-interval 100 --eval-iters 1 --device cpu --num-workers 0 "
    "--precision fp32 --log-interval 2"
)


def _pretrain(rank, folder, flags):
    os.chdir(folder)
    pretrain_gpt.main(f"{TINY} {flags}".split())


def _same(a, b):
    from megatron.checkpoint.compare import differences

    with Reader(a) as one, Reader(b) as two:
        return len(one.tensors) > 20 and not list(differences(one, two))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bucket, more", [("memory", ""), ("s3", "--async-save --zero-stage 1")], indirect=["bucket"])
def test_a_run_that_saves_loads_and_goes_on_is_the_local_one_to_the_bit(more, bucket, run_ranks, tmp_path, monkeypatch):
    here = tmp_path / "here"
    monkeypatch.chdir(tmp_path)
    world = 1 + bucket.startswith("s3")
    if world == 1:  # in this process, whose memory it is
        run_ranks = lambda _, function, *args: function(0, *args)
    run_ranks(world, _pretrain, tmp_path, f"--train-iters 4 --save-interval 2 --save {here} {more}")
    run_ranks(world, _pretrain, tmp_path, f"--train-iters 4 --save-interval 2 --exit-interval 2 --save {bucket} {more}")
    assert list(checkpoints(location(bucket))) == [2]
    run_ranks(world, _pretrain, tmp_path, f"--train-iters 4 --save {bucket} --load {bucket} {more}")
    assert all(_same(location(bucket) / f"iter_000000{n}", here / f"iter_000000{n}") for n in (2, 4))
    records = [json.loads(line) for line in (tmp_path / local_folder(bucket) / "metrics.jsonl").open()]
    steps = [record["iteration"] for record in records if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4] and not (tmp_path / bucket.partition(":")[0]).exists()


# ---------------------------------------------------------------------------------------------------- faults


class Killed(BaseException):
    """The process ends here."""


WRITES = ("pipe_file", "rm", "rm_file", "open", "write", "close")


class Faulty:
    """A file system that asks `fault(request, name)` before each request. What that raises is what the request raises.

    after: a request whose number this is takes place, and then the fault comes. done: the requests so far.
    """

    def __init__(self, files, fault, only=WRITES):
        self.files, self.fault, self.only, self.done = files, fault, only, []

    def hit(self, request, name):
        self.done.append((request, str(name)))
        return self.fault(len(self.done), request, str(name))

    def __getattr__(self, request):
        function = getattr(self.files, request)
        if request not in (*self.only, "open"):
            return function

        def asked(name, *args, **options):
            if request == "open" and (args[:1] != ("wb",) or "open" not in self.only):
                return function(name, *args, **options)
            after = self.hit(request, name)
            result = function(name, *args, **options)
            if after:
                raise after
            return FaultyFile(self, result, name) if request == "open" else result

        return asked


class FaultyFile:
    """An upload, with a fault before each write and before its end."""

    def __init__(self, owner, file, name):
        self.owner, self.file, self.name = owner, file, name

    def write(self, data):
        after = self.owner.hit("write", self.name)
        count = self.file.write(data)
        if after:
            raise after
        return count

    def close(self):
        after = self.owner.hit("close", self.name)
        self.file.close()
        if after:
            raise after

    def discard(self):
        urls._abort(self.file)


def lay(monkeypatch, fault, only=WRITES):
    """Put a fault into the file system; returns what counts its requests."""
    proxies = {}
    real = urls.filesystem

    def filesystem(protocol, process):
        return proxies.setdefault(protocol, Faulty(real(protocol, process), fault, only))

    monkeypatch.setattr(urls, "filesystem", filesystem)
    return proxies


SAVES = {  # iteration, value, keep_last; what a new run may then start from; what retention may have taken
    "new": (3, 3, None, {(2, 2.0), (3, 3.0)}, set()),
    "over the newest": (2, 22, None, {(2, 2.0), (2, 22.0)}, set()),
    "with retention": (3, 3, 1, {(2, 2.0), (3, 3.0)}, {1, 2}),
}


def check_survivors(folder, allowed, gone, ended=False):
    place = location(folder)
    there = checkpoints(place)
    for path in there.values():
        _, problems = survey.verify(path)
        assert not [problem for problem in problems if "does not belong" not in problem], problems
    assert not {1, 2} - set(there) - gone
    assert read_tracker(place) in there
    found = restored(folder)[:2]
    assert found in allowed and (not ended or found == max(allowed))
    return found


def end_of(saver, monkeypatch):
    """What the end of its process does to a lease: it is not renewed any more, and its process is gone."""
    saver._lock._end.set()
    monkeypatch.setattr(lease, "_has_ended", lambda found: True)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", SAVES)
@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_kill_at_any_write_of_a_save_leaves_what_was_there(kind, after, bucket, monkeypatch):
    iteration, value, keep_last, allowed, gone = SAVES[kind]
    monkeypatch.setattr(lease, "PAUSE", 0.0)
    seen, at, count = set(), 0, 1
    while at < count:
        at += 1
        folder = f"{bucket}/{at}"
        save(folder, 1)
        save(folder, 2)

        def fault(number, request, name, at=at):
            if number == at:
                if after:
                    return Killed()
                raise Killed

        saver = Saver(folder, keep_last=keep_last)
        with monkeypatch.context() as patch:
            proxies = lay(patch, fault)
            try:
                saver.save(iteration, pieces_of(value), {})
                died = False
            except Killed:
                died = True
            done = proxies["memory"].done
        count = max(count, len(done) + (at == 1 and died))
        if died:
            count = max(count, at + 1)
        with monkeypatch.context() as patch:
            end_of(saver, patch)
            seen.add(check_survivors(folder, allowed, gone, ended=not died))
            save(folder, 9)  # the next run claims the folder, cleans it, and saves
        assert restored(folder)[:2] == (9, 9.0)
        for path in checkpoints(location(folder)).values():
            assert survey.verify(path)[1] == [], "something was left behind"
        if not died:
            break
    assert seen == allowed and at > 8


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "bucket, kind", [*(("memory", kind) for kind in SAVES), ("s3", "with retention")], indirect=["bucket"]
)
def test_a_failure_from_any_write_on_leaves_what_was_there(kind, bucket, monkeypatch):
    iteration, value, keep_last, allowed, gone = SAVES[kind]
    monkeypatch.setattr(urls, "TRIES", 1)
    outcomes = []
    for at in range(1, 40, 1 if bucket.startswith("memory") else 9):
        folder = f"{bucket}/{at}"
        save(folder, 1)
        save(folder, 2)
        with Saver(folder, keep_last=keep_last) as saver, monkeypatch.context() as patch:

            def fault(number, request, name, at=at):
                if number >= at and ".lock" not in name:
                    raise OSError(5, "Input/output error")

            lay(patch, fault)
            try:
                saver.save(iteration, pieces_of(value), {})
                outcomes.append("saved")
            except StorageError as error:
                assert exit_code(error) == 6 and folder in str(error)
                outcomes.append("failed")
        check_survivors(folder, allowed, gone, ended=outcomes[-1] == "saved")
        if outcomes[-1] == "saved":
            break
    assert outcomes[-1] == "saved" and len(outcomes) > (6 if bucket.startswith("memory") else 1)


@pytest.mark.parametrize(
    "bucket, error",
    [
        ("memory", TimeoutError("read timed out")),
        ("memory", ConnectionResetError(104, "Connection reset by peer")),
        ("s3", OSError(16, "Please reduce your request rate. SlowDown")),
    ],
    indirect=["bucket"],
)
def test_a_request_that_fails_once_is_made_again(error, bucket, monkeypatch):
    failed = set()

    def fault(number, request, name):
        key = (request, name.rpartition("/")[2].partition("-")[0])
        if request not in ("write", "close") and key not in failed:
            failed.add(key)
            raise error

    lay(monkeypatch, fault, only=("pipe_file", "rm", "rm_file", "open", "info", "ls", "cat_file"))
    save(bucket, 1)
    save(bucket, 2, keep_last=1)
    assert restored(bucket)[:2] == (2, 2.0) and list(checkpoints(location(bucket))) == [2]
    assert {"pipe_file", "rm", "open", "info", "ls", "cat_file"} <= {request for request, _ in failed}


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_store_that_stays_away_is_told_with_its_url_and_without_credentials(bucket, monkeypatch):
    save(bucket, 1)
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)

    def fault(number, request, name):
        raise OSError(16, f"503 of http://x/?X-Amz-Signature=abcdef12 for AKIAIOSFODNN7EXAMPLE with {secret}")

    proxies = lay(monkeypatch, fault, only=("info", "ls", "cat_file", "pipe_file", "open"))
    for action in (lambda: restored(bucket), lambda: save(bucket, 2), lambda: checkpoints(location(bucket))):
        with pytest.raises(StorageError) as caught:
            action()
        told = str(caught.value)
        assert exit_code(caught.value) == 6 and bucket in told and f"tried {urls.TRIES} times" in told
        assert secret not in told and "abcdef12" not in told and "AKIAIOSF" not in told
    assert len(proxies[bucket.partition(":")[0]].done) == 3 * urls.TRIES


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_wrong_credentials_and_a_missing_bucket_are_told(bucket, monkeypatch):
    with pytest.raises(StorageError, match="s3://no-such-bucket/run.*no such bucket"):
        save("s3://no-such-bucket/run", 1)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    urls.filesystem.cache_clear()
    with pytest.raises(StorageError, match="credentials") as caught:
        save(bucket, 1)
    assert "AWS_ACCESS_KEY_ID" in str(caught.value)


class Bad:
    """A file system whose reads of some objects are spoilt: so many of them, after `spared` good ones."""

    def __init__(self, files, spoil, names, times, spared=0):
        self.files, self.spoil, self.names, self.times, self.spared = files, spoil, names, times, spared

    def __getattr__(self, request):
        function = getattr(self.files, request)
        if request != "cat_file":
            return function

        def read(name, *args, **options):
            data = function(name, *args, **options)
            if all(word in name for word in self.names) and options.get("end", 65) > 64 and self.times > 0:
                self.spared -= 1
                if self.spared < 0:
                    self.times -= 1
                    return self.spoil(data)
            return data

        return read


def _flipped(data):
    return data[:-1] + bytes([data[-1] ^ 16])


SPOILT = {"truncated": lambda data: data[: len(data) // 2], "wrong byte": _flipped}


@pytest.mark.parametrize("file", ["shard", "index", "state"])
@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_spoilt_read_is_made_again_and_one_that_stays_spoilt_is_damage(spoil, file, bucket, monkeypatch):
    save(bucket, 1)
    save(bucket, 2)
    real = urls.filesystem
    tries = [(1, spared, (2, 2.0)) for spared in range(3)]  # of a shard: its header, and both tensors
    for times, spared, found in (*tries, (10**6, 0, (1, 1.0))):
        bad = Bad(real(bucket.partition(":")[0], os.getpid()), SPOILT[spoil], ("iter_0000002", file), times, spared)
        monkeypatch.setattr(urls, "filesystem", lambda protocol, process, bad=bad: bad)
        iteration, value, notices = restored(bucket)
        assert (iteration, value) == found and bool(notices) == (found[0] == 1)
    assert f"iter_0000002/{file}" in notices[0]
    with pytest.raises(CheckpointError) as caught:
        restored(bucket, step=2)
    assert exit_code(caught.value) == 5


class Losing:
    """A store that keeps less than it was given, so many times, and says nothing."""

    def __init__(self, files, times):
        self.files, self.times = files, times

    def __getattr__(self, request):
        function = getattr(self.files, request)
        if request != "open":
            return function

        def opened(name, mode, **options):
            file = function(name, mode, **options)
            if mode == "wb" and self.times > 0:
                self.times -= 1
                write = file.write
                file = type(
                    "Short",
                    (),
                    dict(
                        write=lambda _, data: write(data[:-1]) + 1, close=lambda _: file_close(), discard=lambda _: None
                    ),
                )()
                file_close = write.__self__.close
            return file

        return opened


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_file_that_arrives_shorter_is_noticed_before_the_checkpoint_appears(bucket, monkeypatch, capsys):
    save(bucket, 1)
    real = urls.filesystem(bucket.partition(":")[0], os.getpid())
    monkeypatch.setattr(urls, "filesystem", lambda protocol, process: Losing(real, 1))
    with pytest.raises(StorageError, match="has files of wrong sizes") as caught:
        save(bucket, 2)
    assert "bytes instead of" in str(caught.value) and list(checkpoints(location(bucket))) == [1]
    losing = Losing(real, 1)
    monkeypatch.setattr(urls, "filesystem", lambda protocol, process: losing)
    monkeypatch.setattr(manager, "RETRY_AFTER", 0.001)
    own = CheckpointManager(Checkpoint(save=bucket, save_retries=1))
    own.save(2, pieces_of(2), {})
    own.close()
    assert restored(bucket)[:2] == (2, 2.0) and "try 1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_byte_that_the_store_changed_keeps_older_checkpoints_from_retention(bucket, monkeypatch):
    save(bucket, 1)
    real = urls.filesystem(bucket.partition(":")[0], os.getpid())
    bad = Bad(real, _flipped, ("iter_0000002", "shard"), 10**6)
    monkeypatch.setattr(urls, "filesystem", lambda protocol, process: bad)
    with pytest.raises(StorageError, match="reads back differently"):
        save(bucket, 2, keep_last=1)
    assert 1 in checkpoints(location(bucket))


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_save_to_a_store_that_is_away_goes_to_the_mirror(tmp_path, bucket, monkeypatch, capsys):
    monkeypatch.setattr(manager, "RETRY_AFTER", 0.001)
    monkeypatch.setattr(urls, "TRIES", 1)
    own = CheckpointManager(Checkpoint(save=bucket, save_mirror=str(tmp_path), save_retries=1))

    def fault(number, request, name):
        if "shard" in name:
            raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        lay(patch, fault)
        own.save(1, pieces_of(1), {})
    own.close()
    assert list(checkpoints(location(bucket))) == [] and restored(tmp_path)[:2] == (1, 1.0)
    assert names_of(location(bucket)) == [] if location(bucket).is_dir() else True


# ---------------------------------------------------------------------------------------------------- one writer


@pytest.fixture
def hasty(monkeypatch):
    """Leases of half a second."""
    for name, value in dict(LASTS=0.6, RENEWED=0.1, LOOKED=0.03, PAUSE=0.05).items():
        monkeypatch.setattr(lease, name, value)


def test_a_second_job_is_refused_while_the_first_one_lives(bucket, hasty):
    with Saver(bucket):
        with pytest.raises(Locked, match="being written by another job") as caught:
            Saver(bucket)
        assert exit_code(caught.value) == 10 and f"process {os.getpid()}" in str(caught.value)
    with Saver(bucket):
        pass
    assert not (location(bucket) / lease.NAME).exists()


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_the_lease_of_a_killed_process_of_this_machine_is_taken_over_at_once(bucket, tmp_path):
    code = (
        f"from megatron.storage.lease import Lease; from megatron.storage.urls import location; import time;"
        f"own = Lease(location({bucket!r})); print('held', flush=True); time.sleep(100)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        os.kill(holder.pid, signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait()
    started = time.monotonic()
    with Saver(bucket) as saver:
        assert time.monotonic() - started < lease.LASTS / 2
        saver.save(1, pieces_of(1), {})
    assert restored(bucket)[:2] == (1, 1.0)


@pytest.mark.sampled(10)
def test_the_lease_of_another_machine_lapses_and_its_holder_cannot_commit(bucket, hasty, monkeypatch):
    first = Saver(bucket)
    first.save(1, pieces_of(1), {})
    first._lock._end.set()  # it is cut off: it renews nothing
    first._lock._thread.join()
    path = location(bucket) / lease.NAME
    path.write_bytes(json.dumps({**json.loads(path.read_bytes()), "machine": "another one"}).encode())
    told, started = [], time.monotonic()
    second = Saver(bucket, log=told.append)
    assert time.monotonic() - started > lease.LASTS and "waiting up to" in told[0]
    with pytest.raises(Locked, match="taken over") as caught:
        first.save(2, pieces_of(-2), {})
    assert exit_code(caught.value) == 10
    second.save(2, pieces_of(2), {})
    with pytest.raises(Locked):
        first.save(3, pieces_of(-3), {})
    first.close()  # leaves the other's lease alone
    assert path.exists() and restored(bucket)[:2] == (2, 2.0) and list(checkpoints(location(bucket))) == [1, 2]
    second.close()


def _contend(rank, folder):
    for name, value in dict(LASTS=30.0, RENEWED=0.2, LOOKED=0.05).items():
        setattr(lease, name, value)
    try:
        own = Lease(location(folder))  # which is kept until all others have looked
    except Locked:
        own = None
    torch.distributed.barrier()
    return "held" if own else "refused"


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_of_jobs_that_begin_together_one_gets_the_lease(bucket, run_ranks):
    assert sorted(run_ranks(4, _contend, bucket)) == ["held", "refused", "refused", "refused"]


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_writer_taken_for_dead_cannot_harm_what_was_saved_after_it(bucket):
    """It wakes up, ends its upload, and has other names than those that count."""
    final = location(bucket) / "iter_0000005"
    late = Draft(final.url)
    save(bucket, 5)
    write_shard(late, 0, pieces_of(-5))
    assert restored(bucket)[:2] == (5, 5.0)
    save(bucket, 6)  # whoever claims the folder next removes what belongs to nothing
    assert survey.verify(final)[1] == [] and len(names_of(final)) == 3


# ---------------------------------------------------------------------------------------------------- going


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_kill_at_any_request_of_a_deletion_leaves_whole_checkpoints_or_none(bucket, monkeypatch):
    for at in range(1, 10):
        folder = location(f"{bucket}/{at}")
        for iteration in (1, 2, 3):
            save(folder, iteration)

        def fault(number, request, name, at=at):
            if number == at:
                raise Killed

        with monkeypatch.context() as patch:
            # One object a request, as a store without bulk deletion does it.
            patch.setattr(urls, "remove_all", lambda paths: [path.unlink() for path in paths])
            patch.setattr("megatron.checkpoint.backends.remove_all", lambda paths: [path.unlink() for path in paths])
            proxies = lay(patch, fault)
            try:
                prune(folder, keep_last=1)
                ended = True
            except Killed:
                ended = False
            first = proxies["memory"].done[0]
        assert first[0] == "rm_file" and first[1].endswith("iter_0000001/index.json")
        for path in checkpoints(folder).values():
            assert survey.verify(path)[1] == []
        assert 3 in checkpoints(folder)
        if ended:
            break
    assert ended and at > 6 and list(checkpoints(folder)) == [3]
    assert names_of(folder) == ["iter_0000003", TRACKER]


# ---------------------------------------------------------------------------------------------------- tools, copies


def run_tool(command, capsys):
    tool.main(command.split())
    return capsys.readouterr().out


@pytest.mark.sampled(5)
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_the_tools_take_urls(bucket, tmp_path, capsys):
    for iteration in (1, 2, 3):
        save(bucket, iteration)
        save(tmp_path / "here", iteration)
    assert "iteration 3" in run_tool(f"inspect {bucket}", capsys)
    assert json.loads(run_tool(f"inspect {bucket} --json", capsys))["path"] == f"{bucket}/iter_0000003"
    assert run_tool(f"verify {bucket}", capsys).count("good") == 3
    assert "equal to the bit" in run_tool(f"diff {bucket} {tmp_path / 'here'}", capsys)
    run_tool(f"reshard {bucket} {bucket}/other --writers 2", capsys)
    run_tool(f"reshard {bucket}/other {tmp_path / 'back'} --writers 1", capsys)
    run_tool(f"reshard {tmp_path / 'back'} {bucket}/again --writers 3", capsys)
    assert len((location(bucket) / "again/iter_0000003").glob("shard_*")) == 3
    assert "equal to the bit" in run_tool(f"diff {bucket}/again {tmp_path / 'here'}", capsys)
    assert "iter_0000001, iter_0000002 would go" in run_tool(f"prune {bucket} --keep-last 1 --dry-run", capsys)
    assert "1 of 3 kept" in run_tool(f"prune {bucket} --keep-last 1", capsys)
    assert list(checkpoints(location(bucket))) == [3]
    shard = next(path for path in (location(bucket) / "iter_0000003").iterdir() if path.name.startswith("shard"))
    shard.write_bytes(_flipped(shard.read_bytes()))
    with pytest.raises(CheckpointError, match="1 problem in 1 checkpoint"):
        tool.main(["verify", bucket])
    assert f"{shard} is damaged" in capsys.readouterr().out
    with pytest.raises(UsageError, match="must be a folder"):
        tool.main(["to-hf", bucket, f"{bucket}/hf"])
    with pytest.raises(CheckpointError, match="no checkpoint"):
        tool.main(["inspect", f"{bucket}/nothing"])


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_prune_is_refused_while_a_job_writes(bucket, hasty):
    save(bucket, 1)
    with Saver(bucket), pytest.raises(Locked):
        tool.main(["prune", bucket, "--keep-last", "1"])


def wait_until(condition, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it has not happened"
        time.sleep(0.01)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "bucket, source, target",
    [("memory", "here", "there"), ("memory", "there", "here"), ("s3", "there", "there")],
    indirect=["bucket"],
)
def test_copies_go_from_and_to_a_store(source, target, bucket, tmp_path):
    places = dict(here=[str(tmp_path / "a"), str(tmp_path / "b")], there=[f"{bucket}/a", f"{bucket}/b"])
    start, end = places[source][0], places[target][1]
    told = []
    copies = Copies(end, keep_last=1, log=told.append)
    for iteration in (1, 2):
        copies.add(save(start, iteration))
    wait_until(lambda: len(told) == 2)  # a checkpoint that is replaced while it is copied is told as one that differs
    copies.add(save(start, 2, value=22))
    copies.close()
    assert [text.startswith("  copied") for text in told] == [True] * 3, told
    assert (
        list(checkpoints(location(end))) == [2] and restored(end)[:2] == (2, 22.0) and read_tracker(location(end)) == 2
    )
    assert survey.verify(location(end) / "iter_0000002")[1] == []


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_copy_in_which_a_byte_differs_does_not_appear(bucket, tmp_path, monkeypatch):
    path, told = save(tmp_path, 1), []
    real = urls.filesystem(bucket.partition(":")[0], os.getpid())
    bad = Bad(real, _flipped, ("iter_0000001", "shard"), 10**6)
    monkeypatch.setattr(urls, "filesystem", lambda protocol, process: bad)
    copies = Copies(bucket, log=told.append)
    copies.add(path)
    copies.close()
    assert "differs from the original" in told[0] and not checkpoints(location(bucket))


# ---------------------------------------------------------------------------------------------------- names


def test_what_a_location_is(tmp_path, monkeypatch):
    assert location(str(tmp_path)) == tmp_path == location(f"file://{tmp_path}")
    path = location("s3://bucket//run/a/")
    assert str(path / "iter_0000001") == "s3://bucket/run/a/iter_0000001" and path.parent == UrlPath("s3://bucket/run")
    assert location("S3://bucket/a") == UrlPath("s3://bucket/a") and path.with_name("b").name == "b"
    assert location("rclone copy {} s3://bucket").name == "bucket"  # a command, not a URL
    for text, word in (("s3://", "names no bucket"), ("ftp://host/a", "is not a supported storage")):
        with pytest.raises(UsageError, match=word):
            location(text)
    with pytest.raises(UsageError) as caught:
        location("s3://key:hunter22@bucket/a")
    assert "hunter22" not in str(caught.value) and exit_code(caught.value) == 2
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackage, match="s3fs") as caught:
        location("s3://bucket/a")
    assert "'.[storage]'" in str(caught.value)


def test_messages_hold_no_secrets(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "IQoJb3JpZ2luX2VjE")
    told = without_secrets("https://me:pw@host/?X-Amz-Credential=AKIA1&x=1 IQoJb3JpZ2luX2VjE ASIAQWERTYUIOPASDFGH")
    assert not any(word in told for word in ("pw@", "AKIA1", "IQoJ", "ASIAQ")) and "x=1" in told


def test_plain_paths_never_meet_fsspec(tmp_path):
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] not in ("fsspec", "s3fs"), name
sys.meta_path.insert(0, Refuse())
import torch
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.copies import Copies
from megatron.checkpoint.folder import Saver, restore
from megatron.checkpoint.store import Piece
piece = Piece("a", (2,), Box.whole((2,)), torch.ones(2))
for folder in ({str(tmp_path)!r}, "file://" + {str(tmp_path)!r}):
    with Saver(folder, keep_last=1) as saver:
        path = saver.save(1, [piece], {{}})
    restore(folder, [piece])
assert path.is_dir() and "fsspec" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_threads_share_one_connection_and_forked_children_have_their_own(bucket, run_ranks):
    save(bucket, 1)
    protocol = bucket.partition(":")[0]
    found = []
    threads = [threading.Thread(target=lambda: found.append(urls.filesystem(protocol, os.getpid()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(files) for files in found}) == 1
    assert run_ranks(2, lambda rank: restored(bucket)[0]) == [1, 1]


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_failure_is_never_an_absent_checkpoint(bucket, monkeypatch):
    """`--auto-resume` on a store that is away must not start a new run."""
    save(bucket, 1)
    monkeypatch.setattr(urls, "TRIES", 1)

    def fault(number, request, name):
        raise PermissionError(13, "Access Denied")

    lay(monkeypatch, fault, only=("info", "ls", "cat_file"))
    with pytest.raises(Failure) as caught:
        restore(bucket, pieces_of(-1), allow_empty=True)
    assert exit_code(caught.value) == 6 and "access is denied" in str(caught.value)
    assert backend_of(location(bucket)) is not backend_of(location("runs/a"))


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
@pytest.mark.parametrize("size", [100, 60 << 20])  # one PUT; an upload in parts
def test_an_upload_that_breaks_off_leaves_no_object(size, bucket):
    path = location(bucket) / "object"
    with pytest.raises(Killed), path.writer(size) as file:
        file.write(memoryview(bytes(size - 1)))
        raise Killed
    assert not path.exists()
    with path.writer(3) as file:
        file.write(b"abc")
    assert path.read_bytes() == b"abc" and path.stat().st_size == 3
