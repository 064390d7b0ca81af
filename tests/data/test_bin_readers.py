# SPDX-License-Identifier: Apache-2.0
"""Token files that are read by `pread` or by ranges of an object: the tokens of the local files, and few requests."""

import errno
import os
import shutil
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron.data import bin_readers
from megatron.data.bin_readers import FileBin
from megatron.data.formats import open_tokens
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.data.remote import local_prefix, open_files
from megatron.errors import DataError, exit_code
from megatron.settings.schema import Data
from megatron.storage.urls import UrlPath, location

BLOCK = 64  # bytes, 32 tokens


@pytest.fixture
def here(tmp_path):
    random = np.random.default_rng(3)
    lengths = random.integers(1, 90, 60)
    prefix = str(tmp_path / "corpus_text_document")
    random.integers(0, 100, lengths.sum()).astype(np.uint16).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(61))
    return prefix


@pytest.fixture
def there(here, bucket, monkeypatch):
    monkeypatch.setattr(bin_readers, "BLOCK", BLOCK)
    url = f"{bucket}/corpus_text_document"
    for ending in (".bin", ".idx"):
        with open(f"{here}{ending}", "rb") as file:
            location(url + ending).write_bytes(file.read())
    return url


@pytest.fixture
def asked(monkeypatch):
    """(first byte, bytes) of each request for a range."""
    ranges, real = [], UrlPath.read_range
    monkeypatch.setattr(UrlPath, "read_range", lambda self, at, size: ranges.append((at, size)) or real(self, at, size))
    return ranges


def opened(url, tmp_path, log=lambda text: None):
    return open_files(url, Data(data_path=[url], object_storage_cache_path=str(tmp_path / "cache")), log)


memory = pytest.mark.parametrize("bucket", ["memory"], indirect=True)


@pytest.mark.sampled(1)
def test_samples_by_ranges_are_those_of_the_local_files(here, there, tmp_path, asked):
    cache = dict(object_storage_cache_path=str(tmp_path / "cache"))
    sets = [
        build_datasets(Data(data_path=["0.3", prefix, "0.7", prefix], split="8,1,1", **more), 40, (30, 4, 4), 1)
        for prefix, more in ((here, {}), (there, cache))
    ]
    assert not asked  # opening and building read no tokens
    for a, b in zip(*sets, strict=True):
        assert len(a) == len(b) and all(np.array_equal(a[n], b[n]) for n in range(len(a)))
    blocks = [block for at, size in asked for block in range(at // BLOCK, -(-(at + size) // BLOCK))]
    assert len(blocks) == len(set(blocks)) and all(at % BLOCK == 0 for at, _ in asked)  # no block comes twice
    assert sum(size for _, size in asked) <= os.path.getsize(f"{here}.bin")


@memory
def test_any_range_is_that_of_the_file_and_comes_once(here, there, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(bin_readers, "MOST", 3 * BLOCK)
    whole, random = np.fromfile(f"{here}.bin", np.uint16), np.random.default_rng(0)
    tokens = opened(there, tmp_path).tokens
    assert len(tokens) == len(whole) and tokens.nbytes == whole.nbytes
    for _ in range(200):
        start, stop = sorted(random.integers(0, len(whole) + 1, 2).tolist())
        assert np.array_equal(tokens[start:stop], whole[start:stop])
    assert np.array_equal(tokens[:], whole) and max(size for _, size in asked) <= 3 * BLOCK
    assert sum(size for _, size in asked) == whole.nbytes
    again = opened(there, tmp_path).tokens  # a second process, or the next start
    assert np.array_equal(again[:], whole) and sum(size for _, size in asked) == whole.nbytes


@memory
@pytest.mark.parametrize("harm", ["data", "mark"])
def test_a_block_that_is_not_whole_comes_again(harm, here, there, tmp_path, asked):
    whole = np.fromfile(f"{here}.bin", np.uint16)
    tokens = opened(there, tmp_path)
    assert np.array_equal(tokens.tokens[:], whole)
    asked.clear()
    with open(tokens.tokens_path + (bin_readers.MARKS if harm == "mark" else ""), "r+b") as file:
        file.seek(5 * (4 if harm == "mark" else BLOCK))
        file.write(b"\0\0\0\0" if harm == "mark" else bytes([99, 0]))
    assert np.array_equal(opened(there, tmp_path).tokens[:], whole) and asked == [(5 * BLOCK, BLOCK)]


@memory
def test_lost_marks_are_a_copy_that_is_not_whole(here, there, tmp_path):
    tokens = opened(there, tmp_path)
    os.unlink(tokens.tokens_path + bin_readers.MARKS)
    assert np.array_equal(opened(there, tmp_path).tokens[:], np.fromfile(f"{here}.bin", np.uint16))


@memory
def test_a_rank_killed_while_it_writes_a_block_leaves_no_wrong_one(here, there, tmp_path, asked, monkeypatch):
    whole, written = np.fromfile(f"{here}.bin", np.uint16), os.pwrite
    local_prefix(there, Data(object_storage_cache_path=str(tmp_path / "cache")))
    if (child := os.fork()) == 0:  # whose memory has the objects, too

        def killed(file, part, at):
            if at >= 9 * BLOCK:
                written(file, part[:7], at)
                os._exit(9)
            return written(file, part, at)

        os.pwrite = killed
        for start in range(0, len(whole), BLOCK // 2):
            opened(there, tmp_path).tokens[start : start + BLOCK // 2]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert np.array_equal(opened(there, tmp_path).tokens[:], whole)
    assert asked == [(9 * BLOCK, whole.nbytes - 9 * BLOCK)]  # what was there before is not requested again


@memory
def test_threads_that_need_one_block_request_it_once(here, there, tmp_path, asked, monkeypatch):
    real, entered = UrlPath.read_range, threading.Barrier(8)
    monkeypatch.setattr(UrlPath, "read_range", lambda *request: (time.sleep(0.05), real(*request))[1])
    tokens = opened(there, tmp_path).tokens

    def read(_):
        entered.wait()
        return tokens[10:50]

    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(read, range(8)))
    assert all(np.array_equal(part, np.fromfile(f"{here}.bin", np.uint16)[10:50]) for part in parts)
    assert asked == [(0, 2 * BLOCK)]


@memory
def test_the_parts_of_a_sample_come_together(here, there, tmp_path, monkeypatch):
    real, at_once = UrlPath.read_range, threading.Barrier(4, timeout=20)
    monkeypatch.setattr(UrlPath, "read_range", lambda *request: (at_once.wait(), real(*request))[1])
    tokens, local = opened(there, tmp_path), open_tokens(here)
    far = [0, 15, 30, 45]
    parts = tokens.get_parts((sequence, 0, 1) for sequence in far)  # breaks the barrier if they come one by one
    assert [part.tolist() for part in parts] == [local.get(sequence, 0, 1).tolist() for sequence in far]


def _ranges(rank, url, cache):
    requests, real = [], UrlPath.read_range

    def slow(self, at, size):
        requests.append(at)
        time.sleep(0.3)
        return real(self, at, size)

    UrlPath.read_range = slow
    data = Data(data_path=[url], object_storage_cache_path=cache)
    return len(requests), open_files(url, data).tokens[100:900].tolist(), len(requests)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_of_the_ranks_of_a_machine_one_requests_a_block(here, there, tmp_path, run_ranks):
    found = run_ranks(3, _ranges, there, str(tmp_path / "cache"))
    assert all(tokens == np.fromfile(f"{here}.bin", np.uint16)[100:900].tolist() for _, tokens, _ in found)
    assert sum(after for *_, after in found) == 1


@memory
@pytest.mark.parametrize("why", ["little space", "no space"])
def test_a_full_disk_is_told_once_and_samples_come_without_it(why, here, there, tmp_path, asked, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = []
    tokens = opened(there, tmp_path, told.append)
    told.clear()
    if why == "no space":
        monkeypatch.setattr(bin_readers.os, "pwrite", full)
    else:
        usage = namedtuple("usage", "total used free")(1, 1, bin_readers.KEPT_FREE + BLOCK - 1)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    whole = np.fromfile(f"{here}.bin", np.uint16)
    for _ in range(2):
        assert np.array_equal(tokens.tokens[40:70], whole[40:70])
    assert len(asked) == 2 and len(told) == 1 and "No space left" in told[0] and "not kept" in told[0]


@memory
def test_an_object_that_is_replaced_ends_the_run(here, there, tmp_path, monkeypatch):
    monkeypatch.setattr(bin_readers, "CHECKED_EVERY", -1.0)
    tokens = opened(there, tmp_path).tokens
    tokens[:10]
    time.sleep(0.01)
    whole = np.fromfile(f"{here}.bin", np.uint16)
    location(f"{there}.bin").write_bytes(whole[::-1].tobytes())
    with pytest.raises(DataError, match="was replaced while it was read") as caught:
        tokens[200:210]
    assert exit_code(caught.value) == 4
    assert np.array_equal(opened(there, tmp_path).tokens[:], whole[::-1])  # the next start has the new one, whole


@memory
def test_files_of_another_format_are_not_read_by_ranges(bucket, tmp_path):
    for ending in ("_ids.npy", "_idx.npz"):
        location(f"{bucket}/a{ending}").write_bytes(b"x")
    with pytest.raises(DataError, match="only .bin/.idx are read by ranges"):
        opened(f"{bucket}/a", tmp_path)


@pytest.mark.parametrize("form", ["megatron", "paddle"])
def test_reading_by_pread_gives_the_same_tokens(form, here, tmp_path):
    if form == "paddle":
        ids, here = np.fromfile(f"{here}.bin", np.uint16), str(tmp_path / "p")
        np.save(f"{here}_ids.npy", ids)
        np.savez(f"{here}_idx.npz", lens=np.array([7, len(ids) - 7], np.int32), docs=np.array([0, 1, 2]))
    mapped, read = open_tokens(here), open_files(here, Data(data_path=[here], mmap_bin_files=False))
    assert type(read.tokens) is FileBin and read.num_tokens == mapped.num_tokens and read.dtype == mapped.dtype
    assert all(np.array_equal(mapped.get(n), read.get(n)) for n in range(len(mapped)))
    parts = [(1, 2, 3), (0, 1, None), (1, 4, 0)]
    assert [a.tolist() for a in mapped.get_parts(parts)] == [b.tolist() for b in read.get_parts(parts)]
    os.truncate(read.tokens_path, 130)
    with pytest.raises(DataError, match="cut short while it was read"):
        read.get(len(read) - 1)
