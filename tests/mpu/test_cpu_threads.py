# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank: its share of what the machine leaves to it; and how libgomp itself says that they wait."""

import ast
import os
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
cpu_threads.busy_cores = lambda: {busy}
cpu_threads.choose_waiting()
ctypes.CDLL(sys.argv[1])
print(cpu_threads.waiting())
"""
LIBGOMPS_OWN = 300_000


@pytest.mark.parametrize(
    "env, busy, before, spins, words",
    [
        ({}, 2.0, "", 0, "waiting threads sleep"),
        ({}, 0.6, "", 0, "waiting threads sleep"),
        ({}, 0.4, "", LIBGOMPS_OWN, "waiting threads spin"),
        (dict(OMP_NUM_THREADS="1"), 2.0, "", LIBGOMPS_OWN, "waiting threads spin"),  # there is none
        (dict(OMP_WAIT_POLICY="active"), 2.0, "", 30_000_000_000, "waiting threads spin"),
        (dict(GOMP_SPINCOUNT="77"), 2.0, "", 77, "GOMP_SPINCOUNT 77"),
        ({}, 2.0, "sys.modules['torch'] = sys", LIBGOMPS_OWN, "waiting threads spin"),  # it is too late then
    ],
)
def test_threads_sleep_while_they_wait_beside_other_programs(env, busy, before, spins, words):
    library = Path(find_spec("torch").submodule_search_locations[0]) / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("this torch brings another library of threads")
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(before=before, busy=busy), str(library)],
        env=inherited | dict(OMP_DISPLAY_ENV="verbose") | env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == words, done.stderr
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr, done.stderr


def test_ranks_that_start_beside_this_one_are_no_other_programs(monkeypatch):
    monkeypatch.setattr(cpu_threads, "cores", lambda: 16)
    for ranks, busy, asleep in [(4, 3.0, False), (4, 4.0, True), (1, 1.0, True), (1, 0.0, False)]:
        env = {}
        cpu_threads.choose_waiting(ranks, env, busy, modules={})
        assert bool(env) == asleep, (ranks, busy)
    env = dict(OMP_NUM_THREADS="4")  # beside which there is room
    cpu_threads.choose_waiting(1, env, 12.0, modules={})
    assert "OMP_WAIT_POLICY" not in env
    cpu_threads.choose_waiting(1, env, 13.0, modules={})
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_busy_cores_are_those_of_this_process_affinity(tmp_path, monkeypatch):
    """Looks at a clockwork of /proc/stat: 10 ticks between two of them; core 1 computes, core 2 waits for a disk."""
    looks = iter(range(10))

    def read(path):
        tick = 10 * next(looks)
        rows = dict(cpu0=(0, 0, 0, tick, 0), cpu1=(tick, 0, 0, 0, 0), cpu2=(0, 0, 0, 0, tick), cpu3=(0, tick, 0, 0, 0))
        return "".join(f"{name} {' '.join(map(str, row))} 0 0 0 0 0\n" for name, row in rows.items())

    monkeypatch.setattr(cpu_threads, "_read", read)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert cpu_threads.busy_cores(seconds=0.0) == 1.0
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert cpu_threads.busy_cores(seconds=0.0) == 2.0
    monkeypatch.setattr(cpu_threads, "_read", lambda path: "")
    assert cpu_threads.busy_cores(seconds=0.0) == 0.0


@pytest.mark.parametrize("name", ["pretrain", "job"])
def test_commands_choose_before_torch_is_loaded(name, root):
    """In the source: the call stands before the first import that brings torch along."""
    tree = ast.parse((root / f"megatron/tools/{name}.py").read_text(encoding="utf-8"))
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
        node.lineno for node in ast.walk(function) if isinstance(node, ast.ImportFrom) and node.module.startswith(heavy)
    ]
    assert imports and calls[0] < min(imports)


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
