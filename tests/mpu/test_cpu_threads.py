# SPDX-License-Identifier: Apache-2.0
"""Threads of a rank: its share of what the machine leaves to it; and how libgomp itself says that they wait."""

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

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
import sys
{before}
import megatron, ctypes
from megatron.mpu.cpu_threads import waiting
ctypes.CDLL(sys.argv[1])
print(waiting())
"""


@pytest.mark.parametrize(
    "env, before, spins, words",
    [
        ({}, "", 0, "waiting threads sleep"),
        (dict(OMP_WAIT_POLICY="active"), "", 30_000_000_000, "waiting threads spin"),
        (dict(GOMP_SPINCOUNT="77"), "", 77, "GOMP_SPINCOUNT 77"),
        ({}, "sys.modules['torch'] = sys", None, "waiting threads spin"),  # it is too late then
    ],
)
def test_threads_sleep_while_they_wait_unless_the_environment_says_otherwise(env, before, spins, words):
    library = Path(find_spec("torch").submodule_search_locations[0]) / "lib" / "libgomp.so.1"
    if not library.exists():
        pytest.skip("this torch brings another library of threads")
    inherited = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(before=before), str(library)],
        env=inherited | dict(OMP_DISPLAY_ENV="verbose") | env,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == words, done.stderr
    if spins is not None:
        assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr, done.stderr


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
