# SPDX-License-Identifier: Apache-2.0
"""Index maps are hashed and built once for a job, whatever folders its ranks have: builds and hashes are counted, and the
samples are those of one process that builds for itself."""

import errno
import hashlib
import importlib
import os
import runpy
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.data import gpt_dataset, index_cache
from megatron.data.gpt_dataset import build_datasets
from megatron.errors import DataError, PeerLost
from megatron.mpu.initialize import join_job
from megatron.settings.schema import Data, Kernels, Parallel
from megatron.training import shared_maps
from megatron.training.shared_maps import build_once
from tests.inference.test_evaluate import write_tokens

ROOT = Path(__file__).resolve().parents[2]
SIZES, SEED = (300, 40, 20), 5


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    dice = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("tokens")
    for name in ("a", "b"):
        write_tokens(folder / f"{name}_document", [dice.integers(0, 90, n) for n in dice.integers(5, 40, 120)])
    return folder


def data_of(text, cache):
    paths = ["0.3", str(text / "a_document"), "0.7", str(text / "b_document")]
    return Data(data_path=paths, data_cache_path=cache and str(cache), split="8,1,1")


def samples_of(datasets):
    return [[np.asarray(dataset[i]).tolist() for i in range(len(dataset))] for dataset in datasets]


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    return samples_of(build_datasets(data_of(text, tmp_path_factory.mktemp("cache")), 16, SIZES, SEED))


def on_ranks(rank, text, caches, hosts):
    """What each rank has built and hashed, and its samples. caches: the folder of each rank"""
    context, counts = join_job(Parallel(), Kernels(device="cpu")), dict(builds=0, hashes=0)

    def counted(name, module, attribute):
        real = getattr(module, attribute)

        def call(*args, **more):
            counts[name] += 1
            return real(*args, **more)

        setattr(module, attribute, call)

    counted("builds", gpt_dataset, "build_index_maps")
    counted("builds", gpt_dataset, "interleave")
    counted("hashes", gpt_dataset.hashlib, "sha256")
    shared_maps.node_name = lambda: hosts[rank]
    index_cache.hashlib = SimpleNamespace(sha256=REAL)  # names of entries are no hashes of data
    data = data_of(text, caches[rank])
    build = lambda: build_datasets(data, 16, SIZES, SEED)
    said, keep = [], shared_maps._keep

    def slowly(*args):  # the other ranks of the node do not look before it is there
        time.sleep(0.1)
        keep(*args)

    shared_maps._keep = slowly
    datasets = build_once(context, build, data.data_cache_path, said.append, 60)
    counts["sent"] = [int(line.split("sent to ")[1].split()[0]) for line in said if "sent to" in line]
    return counts, samples_of(datasets), sorted(os.listdir(caches[rank])) if caches[rank] else None


REAL = hashlib.sha256
BUILDS = 3 + 6  # blends of the three splits, and two files of each


@pytest.mark.parametrize("folders", ["shared", "of nodes", "of ranks"])
def test_maps_are_built_and_hashed_once(folders, text, alone, tmp_path, run_ranks):
    """Four ranks on two nodes. Whoever has a folder of its own gets the entries into it."""
    hosts = ["n1", "n1", "n2", "n2"]
    caches = [
        tmp_path / {"shared": "all", "of nodes": host, "of ranks": f"r{n}"}[folders] for n, host in enumerate(hosts)
    ]
    if folders == "of ranks":
        hosts = ["n1"] * 4
    results = run_ranks(4, on_ranks, text, caches, hosts)
    counts = [result[0] for result in results]
    sent = {"shared": [], "of nodes": [1] * BUILDS, "of ranks": [1] * BUILDS + [2] * BUILDS}[folders]
    assert [own.pop("sent") for own in counts] == [sent] * 4
    assert counts[0] == dict(builds=BUILDS, hashes=6) and counts[1:] == [dict(builds=0, hashes=0)] * 3
    assert all(result[1] == alone for result in results)
    assert all(len([name for name in result[2] if "lock" not in name]) == BUILDS for result in results)
    again = run_ranks(4, on_ranks, text, caches, hosts)
    assert all(result[0].pop("sent") == [] for result in again)
    assert [result[0] for result in again] == [dict(builds=0, hashes=6)] + [dict(builds=0, hashes=0)] * 3
    assert all(result[1] == alone for result in again)


def with_a_folder_that_cannot_be_written(rank, text, cache):
    context = join_job(Parallel(), Kernels(device="cpu"))
    said = []
    if rank:
        index_cache._store = refuse
    data = data_of(text, cache)
    build = lambda: gpt_dataset.build_splits(data, 16, SIZES, SEED, None, said.append)
    real, built = gpt_dataset.build_index_maps, []
    gpt_dataset.build_index_maps = lambda *args: built.append(1) or real(*args)
    return samples_of(build_once(context, build, None, said.append, 60)), len(built)


def refuse(*_):
    raise OSError(errno.EROFS, "Read-only file system")


def test_a_rank_that_can_write_no_cache_gets_the_arrays_into_memory(text, alone, tmp_path, run_ranks):
    """The folder beside the data, of a file system that is read-only for rank 1, and is not shared."""
    copies = tmp_path / "r"
    for name in ("0", "1"):
        shutil.copytree(text, copies / name, ignore=shutil.ignore_patterns("index_cache"))
    results = run_ranks(2, on_read_only, copies)
    assert [built for _, built in results] == [6, 0] and all(samples == alone for samples, _ in results)


def on_read_only(rank, copies):
    os.chdir(copies / str(rank))
    return with_a_folder_that_cannot_be_written(rank, Path(), None)


def a_first_rank_that_fails(rank, text):
    context = join_job(Parallel(), Kernels(device="cpu"))
    data = Data(data_path=[str(text / "none_document")])
    began = []

    def build():
        began.append(1)
        return build_datasets(data, 16, SIZES, SEED)

    try:
        build_once(context, build, None, print, 60)
    except DataError as error:
        return str(error).splitlines()[0], len(began)


def test_what_the_first_rank_cannot_read_ends_all(text, run_ranks):
    said = run_ranks(2, a_first_rank_that_fails, text)
    assert "none_document" in said[0][0] and said[0][0] == said[1][0]
    assert [built for _, built in said] == [1, 0]


def other_files(rank, text, caches):
    """The file of rank 1 has the documents of rank 0's in another order: as many tokens, and other maps."""
    context = join_job(Parallel(), Kernels(device="cpu"))
    dice, folder = np.random.default_rng(3), caches / f"text{rank}"
    folder.mkdir()
    documents = [dice.integers(0, 90, n) for n in dice.integers(5, 40, 120)]
    os.chdir(folder)
    write_tokens(Path("a_document"), documents[::-1] if rank else documents)
    data = Data(data_path=["a_document"], data_cache_path=str(caches / f"r{rank}"), split="1")
    build = lambda: build_datasets(data, 16, (300, 0, 0), SEED)
    return samples_of(build_once(context, build, data.data_cache_path, print, 60)[:1]), samples_of(build()[:1])


def test_a_rank_whose_file_is_another_one_builds_for_itself(text, tmp_path, run_ranks):
    for told, own in run_ranks(2, other_files, text, tmp_path):
        assert told == own


class SlowStore:
    """A store in which the first rank gives signs until it is lost."""

    def __init__(self, signs, built):
        self.signs, self.built, self.asked = signs, built, 0

    def check(self, keys):
        self.asked += keys == ["built"]
        return keys == ["signs"] or self.asked > self.built

    def get(self, key):
        return str(min(self.asked, self.signs))


def test_waiting_ends_with_the_signs_of_the_first_rank(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(shared_maps.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(shared_maps.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    shared_maps._wait(SlowStore(signs=10_000, built=2_000), 60)
    assert clock[0] > 3_000  # far longer than a collective may take
    with pytest.raises(PeerLost, match="rank 0 was to build index maps, and gave no sign for 60 s"):
        shared_maps._wait(SlowStore(signs=500, built=2_000), 60)


@pytest.mark.parametrize("script", ["pretrain_gpt", "pretrain_t5", "pretrain_bert"])
def test_scripts_build_once(script):
    """Also as the script that was started, whose functions are of `__main__`."""
    started = SimpleNamespace(**runpy.run_path(str(ROOT / f"{script}.py"), run_name="started"))
    for module in (importlib.import_module(script), started):
        assert shared_maps.is_of_suite(module.recipe().build_datasets)


def test_a_users_function_is_called_on_all_ranks_together(tmp_path):
    """It may wait for other ranks, also if its file has the name of a script."""
    for folder in (tmp_path, tmp_path / "megatron"):
        folder.mkdir(exist_ok=True)
        (folder / "pretrain_gpt.py").write_text("def build_datasets(*_):\n    pass\n")
        assert not shared_maps.is_of_suite(runpy.run_path(str(folder / "pretrain_gpt.py"))["build_datasets"])
    assert not shared_maps.is_of_suite(print)
