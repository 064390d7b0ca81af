# SPDX-License-Identifier: Apache-2.0
"""The other runners give the bytes of the local one, through kills: SLURM by a stand-in and for real, Ray for real."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.corpus.driver import check, run
from megatron.corpus.plan import save_plan
from megatron.corpus.runners.slurm_array import part_of, run_slurm, work_on
from megatron.errors import DataError, Failure, SettingsError
from tests.corpus.conftest import SmallCorpus, final_digest

FILTER = "stages:\n  - filter: [{'tests.corpus.toy_stages:TooShort': {least: 12}}]\n"

# Runs the tasks of an array one after the other, at once, and loses those that the file `lost` names.
SBATCH = """#!/bin/bash
echo "$@" >>{folder}/calls
number=$(wc -l <{folder}/calls)
while [[ $1 == --* ]]; do
    case $1 in
    --array=*) last=${{1##*-}} ;;
    --job-name=*) name=${{1#*=}} ;;
    esac
    shift
done
for ((task = 0; task <= last; task++)); do
    if grep -qx "$name.$task" {folder}/lost; then
        sed -i "/^$name.$task$/d" {folder}/lost
        continue
    fi
    SLURM_ARRAY_TASK_ID=$task SLURM_CPUS_PER_TASK=1 bash "$@" >>{folder}/log 2>&1
done
echo "$number"
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def stand_in(tmp_path, monkeypatch, root):
    """A SLURM that runs everything at once; the folder with what it was asked."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    program(folder / "bin" / "sbatch", SBATCH.format(folder=folder))
    program(folder / "bin" / "squeue", "#!/bin/bash\nexit 0\n")
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.chdir(root)
    (folder / "lost").touch()
    return folder


def test_arrays_give_the_same_bytes_and_what_was_lost_is_submitted_again(stand_in, tmp_path):
    corpus = SmallCorpus(tmp_path, 60)
    corpus.run(tmp_path / "calm", stages=FILTER)
    output = tmp_path / "out"
    plan = corpus.plan(output, stages=FILTER)
    save_plan(plan, output)
    (stand_in / "lost").write_text("corpus-01-filter.0\n")
    run(plan, output, partial(run_slurm, arrays=1))
    calls = (stand_in / "calls").read_text().splitlines()
    assert final_digest(output) == final_digest(tmp_path / "calm"), (stand_in / "log").read_text()
    assert ["01-filter" in call for call in calls] == [False, True, True]
    assert "afterok:1" in calls[1] and "dependency" not in calls[0] + calls[2]


def test_a_poison_document_is_named_by_an_array_too(tmp_path, root):
    """Each part notes on the disk what it gives up, and ends well."""
    corpus, output = SmallCorpus(tmp_path, 60), tmp_path / "out"
    more = "  - filter: [{'tests.corpus.toy_stages:Poison': {word: 'text 53 '}}]\n"
    plan = corpus.plan(output, stages=FILTER + more)
    for phase in plan.phases:
        for part in range(3):
            work_on(plan, output, phase, part, 3, workers=1)
    [(folder, reason)] = check(plan, output).quarantined.items()
    assert folder.startswith("01-filter") and "text 53" in reason and check(plan, output).missing == [folder]
    with pytest.raises(SettingsError, match="--phase nothing"):
        work_on(plan, output, "nothing", 0, 1, workers=1)
    with pytest.raises(DataError, match="text 53"):
        run(plan, output, lambda agenda, output: agenda.quarantined.update({folder: reason}) or agenda.ready.clear())


def test_each_task_belongs_to_one_part():
    rng = random.Random(1)
    ids = [f"{rng.getrandbits(80):020x}" for _ in range(1000)]
    sizes = [sum(part_of(one, 7) == part for one in ids) for part in range(7)]
    assert sum(sizes) == 1000 and min(sizes) > 90


def test_without_waiting_nothing_is_said_to_be_done(stand_in, tmp_path):
    corpus, output = SmallCorpus(tmp_path, 10), tmp_path / "out"
    plan = corpus.plan(output, stages=FILTER)
    program(stand_in / "bin" / "sbatch", "#!/bin/bash\necho 7\n")
    with pytest.raises(Failure, match="2 arrays are submitted, and not waited for"):
        run(plan, output, partial(run_slurm, arrays=2, wait=False))
    program(stand_in / "bin" / "sbatch", "#!/bin/bash\necho no such partition >&2\nexit 1\n")
    with pytest.raises(Failure, match="sbatch ended with code 1") as caught:
        run(plan, output, partial(run_slurm, arrays=2))
    assert caught.value.why == "no such partition"


PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed here: no {', '.join(MISSING)}")
def test_a_real_array_through_kills(tmp_path, root, monkeypatch):
    """Tasks of the array are killed with SIGKILL while they work; the bytes are those of the local runner."""
    local = root / "scripts" / "slurm" / "local_cluster.sh"
    monkeypatch.setenv("SLURM_CONF", f"{tmp_path}/cluster/slurm.conf")
    monkeypatch.setenv("PYTHON", sys.executable)
    corpus = SmallCorpus(tmp_path, 600)
    corpus.run(tmp_path / "calm")
    output = tmp_path / "out"
    plan = corpus.plan(output)
    save_plan(plan, output)
    (tmp_path / "cluster").mkdir()
    subprocess.run(["bash", local, "start", tmp_path / "cluster", "2"], check=True, cwd=root)
    try:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            run(plan, output, partial(run_slurm, arrays=2, flags=["--mem=100", "--cpus-per-task=1"]))
            os._exit(0)
        kills, rng = 0, random.Random(3)
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            found = subprocess.run(["pgrep", "-f", f"corpus work --output {output}"], capture_output=True, text=True)
            victims = found.stdout.split()
            if victims and kills < 5 and rng.random() < 0.3:
                os.kill(int(rng.choice(victims)), signal.SIGKILL)
                kills += 1
            time.sleep(0.2)
        assert kills > 0
        run(plan, output, partial(run_slurm, arrays=2, flags=["--mem=100", "--cpus-per-task=1"]))
    finally:
        subprocess.run(["bash", local, "stop", tmp_path / "cluster"], cwd=root)
    assert final_digest(output) == final_digest(tmp_path / "calm") and check(plan, output).damaged == []


# ---------------------------------------------------------------------------------------------------- Ray


def in_ray(corpus: SmallCorpus, output: Path, env: dict, root: Path, poison: str = "") -> subprocess.Popen:
    """A driver in a process of its own."""
    recipe = output.with_suffix(".yaml")
    more = f", {{'tests.corpus.toy_stages:Poison': {{word: '{poison}', kill: true}}}}" if poison else ""
    recipe.write_text(
        f"input: {corpus.input}\nshard-mb: {corpus.shard_mb}\ntask-memory-gb: 0.1\nstages:\n"
        + f"  - filter: [{{'tests.corpus.toy_stages:TooShort': {{least: 12}}}}, 'tests.corpus.toy_stages:Upper'{more}]\n"
        + "  - tests.corpus.toy_stages:phases: {parts: 2}\n"
    )
    words = [sys.executable, "-m", "megatron.tools.corpus", "run", str(recipe), "--output", str(output)]
    words += ["--runner", "ray", *([] if "RAY_ADDRESS" in env else ["--workers", "2"])]
    return subprocess.Popen(
        words, cwd=root, env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ray_gives_the_same_bytes_and_names_a_poison_document(tmp_path, root):
    pytest.importorskip("ray")
    corpus = SmallCorpus(tmp_path, 100)
    corpus.run(tmp_path / "calm")
    job = in_ray(corpus, tmp_path / "out", {}, root)
    assert "done in" in job.communicate(timeout=200)[0] and job.returncode == 0
    assert final_digest(tmp_path / "out") == final_digest(tmp_path / "calm")
    job = in_ray(corpus, tmp_path / "poison", {}, root, poison="text 53 ")
    said = job.communicate(timeout=250)[0]
    assert job.returncode == 4 and "its worker died 4 times" in said and "filter, shard" in said


@pytest.mark.full
@pytest.mark.timeout(900)
def test_ray_on_two_nodes_one_of_which_is_killed(tmp_path, root):
    """Two raylets on this machine; the second is killed in the middle, then the driver; the bytes are the same."""
    pytest.importorskip("ray")
    corpus = SmallCorpus(tmp_path, 1500)
    corpus.run(tmp_path / "calm")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = dict(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_TMPDIR=f"/tmp/ray-{os.getpid()}")
    common = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--object-store-memory=100000000"]
    head = [*common, "--head", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    other = [*common, f"--address=127.0.0.1:{port}", "--num-cpus=1"]
    started = []
    try:
        for words in (head, other):
            nodes = dict(os.environ, **env)
            started.append(
                subprocess.Popen(
                    words, env=nodes, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
                )
            )
            time.sleep(12)
        env["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        job = in_ray(corpus, tmp_path / "out", env, root)
        wait_for_tasks(tmp_path / "out", 10)
        os.killpg(started[1].pid, signal.SIGKILL)
        wait_for_tasks(tmp_path / "out", 20)
        job.kill()
        job.wait()
        job = in_ray(corpus, tmp_path / "out", env, root)
        assert "done in" in job.communicate(timeout=250)[0]
    finally:
        for process in started:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
        shutil.rmtree(env["RAY_TMPDIR"], ignore_errors=True)
    assert final_digest(tmp_path / "out") == final_digest(tmp_path / "calm")
    assert check(corpus.plan(tmp_path / "out"), tmp_path / "out").damaged == []


def wait_for_tasks(output: Path, number: int) -> None:
    until = time.monotonic() + 200
    while len([*output.glob("tasks/*/*/receipt.json")]) < number:
        assert time.monotonic() < until, "the tasks do not come"
        time.sleep(0.05)
