# SPDX-License-Identifier: Apache-2.0
"""Token files in an object store: fetched once to each machine, whole, and again when the store has others."""

import hashlib
import os
import time

import numpy as np
import pytest

from megatron.data import remote
from megatron.data.formats import open_tokens
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import IndexedDataset, write_index
from megatron.data.manifest import write_manifest
from megatron.data.remote import nearby
from megatron.errors import DataError, SettingsError, StorageError, exit_code
from megatron.settings.schema import Data
from megatron.storage import urls
from megatron.storage.urls import location

ENDINGS = (".bin", ".idx", ".sums.json")


def corpus(folder, seed=0, sequences=40):
    """The prefix of token files with a manifest."""
    random = np.random.default_rng(seed)
    lengths = random.integers(5, 40, sequences)
    prefix = str(folder / "corpus_text_document")
    random.integers(0, 100, lengths.sum()).astype(np.uint16).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(sequences + 1))
    write_manifest(prefix)
    return prefix


def put(prefix, url, endings=ENDINGS):
    for ending in endings:
        with open(f"{prefix}{ending}", "rb") as file:
            location(url + ending).write_bytes(file.read())


@pytest.fixture
def here(tmp_path):
    return corpus(tmp_path)


@pytest.fixture
def there(here, bucket):
    put(here, f"{bucket}/corpus_text_document")
    return f"{bucket}/corpus_text_document"


def sums(prefix):
    return [hashlib.sha256(open(f"{prefix}{ending}", "rb").read()).hexdigest() for ending in ENDINGS]


@pytest.mark.sampled(5)
def test_what_is_fetched_is_what_lies_there_and_is_fetched_once(here, there, tmp_path):
    told = []
    copy = nearby(there, str(tmp_path / "cache"), told.append)
    assert sums(copy) == sums(here) and copy.startswith(str(tmp_path / "cache")) and len(told) == 2
    assert nearby(f"{there}.bin", str(tmp_path / "cache"), told.append) == copy and len(told) == 2
    assert nearby(here, None) == here and nearby(f"file://{here}", None) == here


def test_what_has_no_checksums_is_named(here, there, tmp_path):
    (location(f"{there}.sums.json")).unlink()
    told = []
    nearby(there, str(tmp_path / "cache"), told.append)
    assert told[-1].endswith("; without .sums.json there, its size alone was compared")


@pytest.mark.sampled(2)
def test_samples_are_those_of_the_local_files(here, there, tmp_path):
    cache = str(tmp_path / "cache")
    sets = [
        build_datasets(
            Data(data_path=["0.3", prefix, "0.7", prefix], split="8,1,1", data_cache_path=cache), 16, (30, 4, 4), 1
        )
        for prefix in (here, there)
    ]
    for a, b in zip(*sets, strict=True):
        assert len(a) == len(b) and all(np.array_equal(a[n], b[n]) for n in range(len(a)))


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_paddlepaddles_files_are_fetched_too(bucket, tmp_path):
    lengths, ids = np.array([3, 4], np.int32), np.arange(7, dtype=np.uint16)
    np.save(tmp_path / "a_ids.npy", ids)
    np.savez(tmp_path / "a_idx.npz", lens=lengths, docs=np.array([0, 1, 2]))
    put(str(tmp_path / "a"), f"{bucket}/a", ("_ids.npy", "_idx.npz"))
    copy = nearby(f"{bucket}/a_idx.npz", str(tmp_path / "cache"))
    assert open_tokens(copy).get(1).tolist() == [3, 4, 5, 6] and copy.startswith(str(tmp_path / "cache"))
    location(f"{bucket}/a_ids.npy").unlink()
    with pytest.raises(DataError, match="a_ids.npy: no such object"):
        nearby(f"{bucket}/a", str(tmp_path / "cache"))


def test_other_content_of_the_same_size_is_fetched_again(here, there, tmp_path):
    cache = str(tmp_path / "cache")
    copy = nearby(there, cache)
    first = IndexedDataset(copy)
    before = first.get(0).copy()
    tokens = np.fromfile(f"{here}.bin", np.uint16)[::-1]
    tokens.tofile(f"{here}.bin")
    write_manifest(here)
    time.sleep(0.01)
    put(here, there)
    assert nearby(there, cache) == copy and sums(copy) == sums(here)
    assert np.array_equal(first.get(0), before)  # whoever has mapped the old copy keeps it
    assert not np.array_equal(IndexedDataset(copy).get(0), before)


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
@pytest.mark.parametrize("harm", ["cut", "gone", "receipt"])
def test_a_copy_that_is_not_whole_is_made_again(harm, here, there, tmp_path):
    cache = str(tmp_path / "cache")
    copy = nearby(there, cache)
    if harm == "cut":
        os.truncate(f"{copy}.bin", 10)
    elif harm == "gone":
        os.unlink(f"{copy}.idx")
    else:
        (tmp_path / "cache/fetched" / os.path.basename(os.path.dirname(copy)) / remote.RECEIPT).write_text("{}")
    assert nearby(there, cache) == copy and sums(copy) == sums(here)


class Spoiling:
    """A file system whose files are spoilt while they are read, so many times."""

    def __init__(self, files, spoil, times):
        self.files, self.spoil, self.times = files, spoil, times

    def __getattr__(self, request):
        return getattr(self.files, request)

    def open(self, name, mode, **options):
        file = self.files.open(name, mode, **options)
        if mode != "rb" or not name.endswith(".bin") or self.times == 0:
            return file
        self.times -= 1
        return Spoilt(file, self.spoil)


class Spoilt:
    def __init__(self, file, spoil):
        self.data, self.size, self.at = spoil(file.read()), file.size, 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, count):
        part, self.at = self.data[self.at : self.at + count], self.at + count
        return part


SPOILT = {"short": lambda data: data[:-7], "a wrong byte": lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:]}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_what_is_spoilt_on_its_way_is_fetched_again_or_refused(spoil, here, there, tmp_path, monkeypatch):
    real = urls.filesystem("memory", os.getpid())
    spoiling = Spoiling(real, SPOILT[spoil], 1)
    monkeypatch.setattr(urls, "filesystem", lambda protocol, process: spoiling)
    copy = nearby(there, str(tmp_path / "cache"))
    assert sums(copy) == sums(here) and spoiling.times == 0
    spoiling.times = -1
    with pytest.raises((DataError, StorageError)) as caught:
        nearby(there, str(tmp_path / "other"))
    assert exit_code(caught.value) == (6 if spoil == "short" else 4) and there in str(caught.value)
    assert not list((tmp_path / "other").glob("fetched/*/*.bin"))


def _fetch(rank, url, cache):
    told = []
    nearby(url, cache, told.append)
    return sum(text.startswith("fetching") for text in told)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_of_the_ranks_of_a_machine_one_fetches(there, tmp_path, run_ranks, monkeypatch):
    download = urls.UrlPath.download
    monkeypatch.setattr(urls.UrlPath, "download", lambda *names: (time.sleep(0.5), download(*names)))
    assert sorted(run_ranks(4, _fetch, there, str(tmp_path / "cache"))) == [0, 0, 0, 1]


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_what_is_missing_is_told(there, bucket, tmp_path):
    with pytest.raises(SettingsError, match="--data-cache-path"):
        nearby(there, None)
    with pytest.raises(DataError, match="no such object") as caught:
        nearby(f"{bucket}/nothing", str(tmp_path))
    assert exit_code(caught.value) == 4 and f"{bucket}/nothing.idx" in str(caught.value)
    with pytest.raises(DataError, match="not on this machine"):
        IndexedDataset(there)


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_fetch_that_was_killed_is_no_copy(here, there, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(remote, "replace_file", killed)  # the receipt
        with pytest.raises(KeyboardInterrupt):
            nearby(there, str(tmp_path / "cache"))
    told = []
    copy = nearby(there, str(tmp_path / "cache"), told.append)
    assert sums(copy) == sums(here) and told[0].startswith("fetching")
    assert not list((tmp_path / "cache").glob("fetched/*/.fetching"))


@pytest.mark.parametrize("bucket", ["memory"], indirect=True)
def test_a_kill_while_new_files_appear_leaves_no_copy_of_old_ones(here, there, tmp_path, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    copy = nearby(there, str(tmp_path / "cache"))
    np.fromfile(f"{here}.bin", np.uint16)[::-1].tofile(f"{here}.bin")
    write_manifest(here)
    put(here, there)
    with monkeypatch.context() as patch:
        real, done = os.replace, []
        patch.setattr(os, "replace", lambda *names: killed() if done else (done.append(1), real(*names)))
        with pytest.raises(KeyboardInterrupt):
            nearby(there, str(tmp_path / "cache"))
    assert nearby(there, str(tmp_path / "cache")) == copy and sums(copy) == sums(here)
