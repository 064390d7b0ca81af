# SPDX-License-Identifier: Apache-2.0
"""Fixtures for all tests: above all `run_ranks`, which runs a function on several ranks in a fraction of a second.

def test_sum(run_ranks):
    def body(rank):
        x = torch.tensor([rank])
        dist.all_reduce(x)
        return x.item()

    assert run_ranks(2, body) == [1, 1]
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Optional

import hypothesis
import pytest

from megatron.guard import processes
from megatron.storage.processes import adopt_orphans
from tests import tree
from tests.huge_pages import HugePages

os.environ["OMP_NUM_THREADS"] = "1"  # before the first import of torch, for this process and its children
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Memory that was freed stays in a process: glibc gives large blocks back, and new pages took a tenth of the tests' time.
KEPT = 1 << 28
for name, option in ("MALLOC_MMAP_THRESHOLD_", -3), ("MALLOC_TRIM_THRESHOLD_", -1):  # numbers of malloc.h
    os.environ.setdefault(name, str(KEPT))  # for processes that start
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(option, KEPT)  # for this one, and those that it forks

# Containers often set this. Tests start thousands of processes: each would compile all of the suite's modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background of a shell: tests send it on purpose
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

# The same examples each time, and no word about how long one took: a busy machine is no finding.
# `pytest --hypothesis-profile default` looks for new ones.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the project."""
    return ROOT


@pytest.fixture
def memory_folder():
    """A folder in memory where there is room for a GiB, else a common one: hundreds of saves are slow on a busy disk."""
    shared = Path("/dev/shm")
    roomy = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1 << 30
    with tempfile.TemporaryDirectory(dir=shared if roomy else None) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def run_ranks():
    """`run_ranks(world_size, function, *args, timeout=120)`: see `megatron.mpu.forked`."""
    from megatron.mpu import forked

    return forked.run_ranks


@pytest.fixture(scope="session")
def most_allocated(tmp_path_factory):
    """`most_allocated(function)`: the most bytes of tensors that existed at a time while it ran, of those that it made.

    Counted by torch's allocator: what the process holds besides, or has held before, has no part in it.
    """
    import torch

    path = tmp_path_factory.mktemp("allocated") / "trace.json"

    def measure(function) -> int:
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            kept = function()  # noqa: F841
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        changes = [event["args"] for event in events if event.get("name") == "[memory]"]
        before = changes[0]["Total Allocated"] - changes[0]["Bytes"]
        return max(change["Total Allocated"] for change in changes) - before

    return measure


# ---- tiers: which tests run, and which first -------------------------------------------------------------------------

LONG = ROOT / "tests" / "long_files.txt"  # "seconds file" a line: what starts first, and what --unit leaves out
LEAST = 4.0  # seconds of a long file
# They import much of transformers, which makes a worker's forks slower: a gigabyte takes 50 ms.
LATER = ("tests/inference/", "tests/tokenizer/")
PART = "TEST_PART"  # environment: the number that chooses the cases of `sampled` tests


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="the tests marked `full`, too, which take long")
    parser.addoption("--unit", action="store_true", help=f"without the files of {LONG.name}, which take long")
    parser.addoption("--note-long-files", action="store_true", help=f"write {LONG.name} from how long this run took")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """A worker asks for the tries of each test in small messages (pytest-rerunfailures): TCP would hold each for 40 ms."""
    if connection := getattr(getattr(config, "failures_db", None), "sock", None):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    os.environ.setdefault(PART, str(number_of_submission()))  # for the workers, too, which start later
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would start with the files of the most tests


def number_of_submission() -> int:
    """How many commits or merges the branch has; where git does not know, the number of the day."""
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True).stdout.strip()
    try:
        whole = (ROOT / ".git").exists() and git("rev-parse", "--is-shallow-repository") == "false"
        counted = git("rev-list", "--count", "--first-parent", "HEAD") if whole else ""
    except OSError:  # no git
        counted = ""
    return int(counted) if counted.isdecimal() else int(time.time() // 86400)


def long_files() -> dict[str, float]:
    return {name: float(seconds) for seconds, name in map(str.split, LONG.read_text().splitlines())}


def pytest_ignore_collect(collection_path, config):
    left_out = config.getoption("--unit") and collection_path.suffix == ".py"
    return True if left_out and collection_path.relative_to(ROOT).as_posix() in long_files() else None


def pytest_collection_modifyitems(config, items):
    """The longest files come first, so that no worker is alone with one at the end; those of `LATER` come last.

    Tests marked `full` are skipped without --full, and of those marked `sampled(n)` all but one of n cases, unless tests
    are chosen by name (`-k`, `FILE::TEST`); those marked `gpu` where torch sees no GPU. A run of all tests deselects
    instead: to skip ten thousand tests takes half a minute of a core.
    """
    long = long_files()
    items.sort(key=lambda item: (item.nodeid.startswith(LATER), -long.get(item.nodeid.partition("::")[0], 0.0)))
    if not config.getoption("--full"):
        named = config.option.keyword or any("::" in argument for argument in config.args)
        left = [item for item in items if item.get_closest_marker("full")]
        left += [] if named else left_out(items, int(os.environ[PART]))
        if not named and [Path(argument).resolve() for argument in config.args] == [ROOT / "tests"]:
            gone = set(left)
            items[:] = [item for item in items if item not in gone]
            config.hook.pytest_deselected(items=left)
        else:
            for item in left:
                item.add_marker(pytest.mark.skip(reason="takes long: make test-full"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


def left_out(items, part: int) -> list:
    """The cases of `sampled(n)` tests that do not run in this part: each runs in one part of n that follow each other.

    Ordered by a hash of their names, so that all parameters are met in each part. Functions of a file take their turns
    one after the other: its long tests do not all run in the same part.
    """
    cases, functions = defaultdict(list), defaultdict(int)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("full"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left = []
    for function, found in cases.items():
        [each] = found[0].get_closest_marker("sampled").args
        assert each in (1, 2, 5, 10), f"{found[0].nodeid}: each case is to run in every tenth submission, at least"
        found.sort(key=lambda item: zlib.crc32(item.name.encode()))
        file = function.partition("::")[0]
        turn = part + zlib.crc32(file.encode()) + functions[file]
        functions[file] += 1
        left += [item for number, item in enumerate(found) if number % each != turn % each]
    return left


def pytest_terminal_summary(terminalreporter, config):
    if not config.getoption("--full"):
        terminalreporter.write_line(f"sampled cases of this run: {PART}={os.environ[PART]}")
    for line in config.stash.get(LEFT, []):
        terminalreporter.write_line(f"FAILED: tests have changed the working tree (git status): {line}", red=True)
    if config.getoption("--note-long-files"):
        seconds = defaultdict(float)
        for report in (one for reports in terminalreporter.stats.values() for one in reports):
            if hasattr(report, "duration"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
        rows = sorted(((value, name) for name, value in seconds.items() if value >= LEAST), reverse=True)
        LONG.write_text("".join(f"{value:.0f} {name}\n" for value, name in rows))


# ---- processes of a test that failed ---------------------------------------------------------------------------------

CHILDREN = Path(f"/proc/self/task/{os.getpid()}/children")  # of the thread that runs tests; to read it costs nothing


def _children() -> set[int]:
    return set(map(int, CHILDREN.read_text().split())) if CHILDREN.exists() else set()


# What ranks that train load.
LOADED_BY_RANKS = """encodings.ascii numpy.ma megatron.planner.memory_check megatron.tokenizer.null megatron.training.loop
    megatron.settings.dialects.fleetx""".split()


def pytest_collection_finish():
    """What ranks need is loaded here once, not by each of some thousand after its fork.

    Collections of garbage then ignore what exists before the first test: modules, and the objects of all tests.
    """
    if "torch" in sys.modules:
        from megatron.telemetry import run_record

        for name in LOADED_BY_RANKS:
            importlib.import_module(name)
        run_record.source_commit()
        run_record.library_versions()
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        huge_pages.move()


def pytest_runtest_setup():
    huge_pages.move_again()


huge_pages = HugePages()
TREE = pytest.StashKey[Optional[set[str]]]()


def pytest_sessionstart(session):
    """Whatever a test starts stays below this process, also when what it was started by is killed."""
    adopt_orphans()
    if not hasattr(session.config, "workerinput"):
        session.config.stash[TREE] = tree.state(ROOT)


def pytest_sessionfinish(session):
    """Fail if tests have left something in the working tree, or changed what is there."""
    config = session.config
    if TREE in config.stash and (left := tree.changes(config.stash[TREE], tree.state(ROOT))):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        config.stash[LEFT] = left


LEFT = pytest.StashKey[list[str]]()  # what they have left


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """A test that fails, or runs out of time, leaves no process that holds a port or takes the time of the others."""
    before = _children()
    try:
        return (yield)
    except BaseException:
        for child in _children() - before:
            for process in [child, *processes.descendants(child)]:
                for number in (signal.SIGCONT, signal.SIGKILL):
                    processes.send(process, number)
        raise


# ---- an object store -------------------------------------------------------------------------------------------------

S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until whoever started it is gone, however that came
"""


@pytest.fixture(scope="session")
def s3_server():
    """The environment of a job that talks to an S3 server of this machine, in a process of its own; a bucket `bucket`."""
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    server = subprocess.Popen(
        [sys.executable, "-c", S3_SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        environment = dict(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{int(server.stdout.readline())}",
            AWS_ACCESS_KEY_ID="AKIAABCDEFGHIJKLMNOP",
            AWS_SECRET_ACCESS_KEY="very/secret/key",
            AWS_DEFAULT_REGION="us-east-1",
        )
        s3fs.S3FileSystem(
            endpoint_url=environment["AWS_ENDPOINT_URL"],
            key=environment["AWS_ACCESS_KEY_ID"],
            secret=environment["AWS_SECRET_ACCESS_KEY"],
            skip_instance_cache=True,
        ).mkdir("bucket")
        yield environment
    finally:
        server.stdin.close()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(params=["memory", "s3"])
def bucket(request, monkeypatch):
    """The URL of an empty prefix of an object store: of this process's memory, and of an S3 server."""
    from megatron.storage import urls

    if request.param == "s3":
        for name, value in request.getfixturevalue("s3_server").items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(urls, "PAUSE", 0.001)
    forget = urls.filesystem.cache_clear
    forget()
    yield f"{request.param}://bucket/{uuid.uuid4().hex[:8]}"
    forget()
