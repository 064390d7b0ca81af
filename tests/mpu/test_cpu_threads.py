# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank: its share of what the machine leaves to it; and how libgomp itself says that they wait."""

import ast
import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron.mpu import cpu_threads
from megatron.mpu.cpu_threads import choose_threads, cores, quota, share, waiting


def test_without_a_quota_cores_are_divided_between_ranks():
    for count, ranks in [(1, 1), (2, 1), (2, 2), (2, 8), (64, 6), (64, 8)]:
        assert share(count, None, ranks).count == max(1, count // ranks)
    assert choose_threads(1, env={}).count == share(len(os.sched_getaffinity(0)), quota(), 1).count


def test_a_container_may_use_less_than_there_is():
    assert [share(64, limit, 1).count for limit in (0.5, 1.0, 7.9, 64.0, 200.0)] == [1, 1, 7, 64, 64]
    assert share(64, 8.0, 4).count == 2 and "a quota of 8" in share(64, 8.0, 4).why
    assert "quota" not in share(64, 64.0, 4).why


def test_a_process_counts_the_cores_of_its_affinity():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from megatron.mpu.cpu_threads import *; "
    )
    done = subprocess.run([sys.executable, "-c", code + "print(cores())"], capture_output=True, text=True)
    assert done.stdout == "1\n" and cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    "member, files, expected",
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("", {}, None),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000", "a/b/cpu.max": "max 100000"}, 2.0),
        ("0::/a/b\n", {"a/cpu.max": "800000 100000", "a/b/cpu.max": "50000 100000"}, 0.5),
        ("0::/of/the/host\n", {"cpu.max": "300000 100000"}, 3.0),  # a container sees its group as the root
        ("3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "cpu,cpuacct/a/cpu.cfs_period_us": "1"}, None),
        ("9:memory:/m\n3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "250000", "cpu/a/cpu.cfs_period_us": "100000"}, 2.5),
        ("3:cpuset:/a\n", {"cpuset/a/cpu.cfs_quota_us": "1", "cpuset/a/cpu.cfs_period_us": "1"}, None),
    ],
)
def test_quotas_of_control_groups(member, files, expected, tmp_path):
    (tmp_path / "member").write_text(member)
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert quota(tmp_path / "member", tmp_path / "groups") == expected


def test_the_users_own_number_counts():
    assert choose_threads(8, env=dict(OMP_NUM_THREADS="3"))[:2] == (3, "OMP_NUM_THREADS")
    assert choose_threads(8, env=dict(OMP_NUM_THREADS="5,2")).count == 5
    assert not choose_threads(1, env=dict(OMP_NUM_THREADS="")).given
    done = subprocess.run(
        [sys.executable, "-m", "megatron.mpu.cpu_threads", "2"],
        env=os.environ | dict(OMP_NUM_THREADS="7"),
        capture_output=True,
        text=True,
    )
    assert done.stdout == "7\n", done.stderr


# The library of threads that torch brings along says with OMP_DISPLAY_ENV what it has read of the environment.
LOAD = """
import ctypes, sys
{before}
from megatron.mpu import cpu_threads
cpu_threads.cores = lambda: 2
cpu_threads.load = lambda: {busy}
cpu_threads.pressure = lambda: {pressure}
cpu_threads.runnable = lambda: {runnable}
cpu_threads.choose_waiting()
ctypes.CDLL(sys.argv[1])
print(cpu_threads.waiting())
"""
LIBGOMPS_OWN = 300_000


@pytest.mark.parametrize(
    "env, busy, pressure, runnable, before, spins, words",
    [
        ({}, 2.0, 0, 3, "", 0, "waiting threads sleep"),
        ({}, 2.0, 0, 2, "", 0, "waiting threads sleep"),
        ({}, 2.0, 30, 1, "", LIBGOMPS_OWN, "waiting threads spin"),  # those programs have ended, this one runs
        ({}, 2.0, 0, "float('inf')", "", 0, "waiting threads sleep"),  # the kernel does not report it
        ({}, 0.6, 0, 3, "", 0, "waiting threads sleep"),
        ({}, 0.4, 0, 3, "", LIBGOMPS_OWN, "waiting threads spin"),
        ({}, 0.0, 30, 3, "", 0, "waiting threads sleep"),  # programs that came a moment ago
        (dict(OMP_NUM_THREADS="1"), 2.0, 90, 3, "", LIBGOMPS_OWN, "waiting threads spin"),  # there is none
        (dict(OMP_WAIT_POLICY="active"), 2.0, 90, 3, "", 30_000_000_000, "waiting threads spin"),
        (dict(GOMP_SPINCOUNT="77"), 2.0, 90, 3, "", 77, "GOMP_SPINCOUNT 77"),
        ({}, 2.0, 90, 3, "sys.modules['torch'] = sys", LIBGOMPS_OWN, "waiting threads spin"),  # it is too late then
    ],
)
def test_threads_sleep_while_they_wait_beside_other_programs(env, busy, pressure, runnable, before, spins, words):
    library = Path(find_spec("torch").submodule_search_locations[0]) / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("this torch brings another library of threads")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LOAD.format(before=before, busy=busy, pressure=pressure, runnable=runnable),
            str(library),
        ],
        env=inherited | dict(OMP_DISPLAY_ENV="verbose") | env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == words, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr, done.stderr


def test_programs_that_leave_too_few_cores(monkeypatch):
    monkeypatch.setattr(cpu_threads, "cores", lambda: 16)
    monkeypatch.setattr(cpu_threads, "pressure", lambda: 0.0)
    for wanted, load, own, crowded in [
        (16, 0.4, 0, False),
        (16, 1.0, 0, True),
        (4, 12.4, 0, False),  # beside which there is room
        (4, 13.0, 0, True),
        (16, 16.3, 16, False),  # which is this job itself
        (16, 18.0, 16, True),
    ]:
        monkeypatch.setattr(cpu_threads, "load", lambda load=load: load)
        assert cpu_threads.crowded(wanted, own) == crowded, (wanted, load, own)


def test_pressure_is_the_kernels_of_the_last_ten_seconds(tmp_path):
    path = tmp_path / "cpu"
    assert cpu_threads.pressure(path) == 0.0  # a kernel without it
    path.write_text(
        "some avg10=85.96 avg60=7.06 avg300=5.14 total=1326555937\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    )
    assert cpu_threads.pressure(path) == 85.96


def test_runnable_threads_are_those_of_this_moment(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpu_threads, "cores", lambda: 4)
    path = tmp_path / "loadavg"
    assert cpu_threads.runnable(path) == math.inf  # not a Linux kernel
    path.write_text("12.54 1.72 2.58 6/77 1404\n")
    assert cpu_threads.runnable(path) == 3.0


def test_the_load_is_that_of_these_cores(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (12.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpu_threads, "cores", lambda: 2)
    assert cpu_threads.load() == 3.0


# What threads of this process have used of the cores, in regions that end with a wait of some milliseconds.
WAITING = """
import time, torch
from megatron.mpu import cpu_threads
torch.set_num_threads(2)
x = torch.linspace(-1, 1, 1 << 20)

def used():
    begun = time.process_time()
    for _ in range(40):
        total = (x * x).sum()
        time.sleep(0.004)
    return time.process_time() - begun, total.item()

used()
spinning, before = used()
assert cpu_threads.sleep_from_now_on(2)
sleeping, after = used()
print(spinning, sleeping, before == after, torch.get_num_threads())
"""


@pytest.mark.sampled(5)
def test_waiting_threads_can_be_told_to_sleep_while_they_run():
    """By the time that they use the cores for: a thread that spins uses one while the other waits."""
    if not (Path(find_spec("torch").submodule_search_locations[0]) / "lib" / "libgomp.so.1").exists():
        pytest.skip("this torch brings another library of threads")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run([sys.executable, "-c", WAITING], env=inherited, capture_output=True, text=True, timeout=120)
    spinning, sleeping, same, threads = done.stdout.split()
    assert float(sleeping) < float(spinning) / 3, done.stdout
    assert (same, threads) == ("True", "2")


@pytest.mark.parametrize("name", ["entry", "guard/job"])
def test_commands_choose_before_torch_is_loaded(name, root):
    """In the source: the call stands before the first import that brings torch along."""
    tree = ast.parse((root / f"megatron/{name}.py").read_text(encoding="utf-8"))
    heavy = (
        "megatron.inference.",
        "megatron.mpu.initialize",
        "megatron.training.loop",
        "megatron.planner.tuning",
        "megatron.planner.preflight",
    )
    calls = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and "choose_waiting" in ast.unparse(node)
    ]
    function = next(f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.lineno < calls[0] <= f.end_lineno)
    imports = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith(heavy) and node.lineno > function.lineno
    ]
    assert imports and calls[0] < min(imports)


def test_tasks_whose_modules_load_torch_are_found_afterwards(root):
    """finetune.py --task chat, in a process of its own."""
    code = """
import sys
from megatron import entry
entry.choose_waiting = lambda ranks: sys.exit("torch" in sys.modules)
import finetune
finetune.main(["--task", "chat"])
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


def test_words_of_the_environment():
    assert waiting({}) == "waiting threads spin" and waiting(dict(OMP_WAIT_POLICY="Passive")) == "waiting threads sleep"


def test_entry_scripts_import_the_package_before_torch(root):
    scripts = [path for path in root.glob("*.py") if path.name != "setup.py"]
    assert len(scripts) >= 3
    for path in scripts:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in tree.body
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        ours = next(name for name in names if name.partition(".")[0] not in sys.stdlib_module_names)
        assert ours.partition(".")[0] == "megatron", f"{path.name} imports {ours} first"


def test_busy_cores_are_those_of_this_process_that_others_use(tmp_path, monkeypatch):
    """By the kernel's ticks of two moments: core 0 half busy, core 1 idle (a disk makes it wait), core 2 of others."""
    path = tmp_path / "stat"
    fields = "cpu{} {} 0 0 {} {} 0 0 0 0 0\n"
    path.write_text("cpu 1 2 3\n" + "".join(fields.format(core, 100, 500, 7) for core in range(3)))
    later = [(150, 550, 7), (100, 580, 27), (200, 500, 7)]
    monkeypatch.setattr(cpu_threads, "affinity", lambda: {0, 1})
    monkeypatch.setattr(
        cpu_threads.time,
        "sleep",
        lambda seconds: path.write_text("".join(fields.format(core, *ticks) for core, ticks in enumerate(later))),
    )
    assert cpu_threads.busy_cores(0.5, path) == 0.5
    assert cpu_threads.busy_cores(0.5, tmp_path / "none") == 0.0


def test_a_quota_limits_the_usable_cores(monkeypatch):
    monkeypatch.setattr(cpu_threads, "affinity", lambda: set(range(16)))
    for limit, usable in [(None, 16), (2.5, 2), (0.5, 1), (99.0, 16)]:
        monkeypatch.setattr(cpu_threads, "quota", lambda limit=limit: limit)
        assert cores() == usable


def test_one_module_counts_the_cores(root):
    """Each worker pool and thread count follows the affinity mask and the quota of a container."""
    asks = re.compile(r"\bcpu_count\(|\bsched_getaffinity\(")
    files = [path for path in (root / "megatron").rglob("*.py") if asks.search(path.read_text(encoding="utf-8"))]
    assert [path.name for path in files] == ["cpu_threads.py"]
