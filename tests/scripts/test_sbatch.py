# SPDX-License-Identifier: Apache-2.0
"""The job scripts of scripts/slurm without a SLURM: which interpreter they take, and what they hand to srun."""

import os
import shutil
import stat
import subprocess

import pytest

JOBS = {
    "evaluate": dict(words=["--load", "x"], says="-m megatron.tools.launch"),
    "merge": dict(words=[], says="merge_datasets.py --input corpus.shards"),
    "preprocess_array": dict(words=["shard.jsonl"], says="preprocess_data.py --input shard.jsonl"),
    "pretrain": dict(words=["scripts/pretrain_gpt_345M.sh", "--lr", "1"], says="-m megatron.tools.supervise"),
}
SLURM = dict(
    SLURM_JOB_ID="7",
    SLURM_JOB_NODELIST="n1",
    SLURM_NNODES="1",
    SLURM_CPUS_ON_NODE="4",
    SLURM_ARRAY_TASK_ID="0",
    SLURM_ARRAY_TASK_COUNT="1",
    CHECKPOINTS="runs/x",
    OUT="corpus",
)


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def site(root, tmp_path):
    """`site(job, **env)`: what a job script says where there is a python3 and no python, in a copy of the scripts."""
    shutil.copytree(root / "scripts", tmp_path / "scripts")
    for name in ("bash", "sh", "date", "mkdir", "cat", "touch", "dirname"):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    program(tmp_path / "bin" / "srun", "exit 0")
    program(tmp_path / "bin" / "python3", 'echo "python3: $*"')

    def run(job, **more):
        words = ["bash", f"scripts/slurm/{job}.sbatch", *JOBS[job]["words"]]
        env = SLURM | dict(PATH=str(tmp_path / "bin")) | more
        done = subprocess.run(
            [shutil.which("bash"), *words[1:]], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == more.get("code", 0), done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("job", JOBS)
def test_a_job_finds_its_python_without_an_active_environment(job, site, tmp_path):
    assert f"python3: {JOBS[job]['says']}" in site(job)
    program(tmp_path / ".venv" / "bin" / "python", 'echo "of the project: $*"')
    for done in tmp_path.glob("corpus.shards/*"):
        done.unlink()
    assert f"of the project: {JOBS[job]['says']}" in site(job)
    for done in tmp_path.glob("corpus.shards/*"):
        done.unlink()
    program(tmp_path / "chosen", 'echo "chosen: $*"')
    assert f"chosen: {JOBS[job]['says']}" in site(job, PYTHON=str(tmp_path / "chosen"))


def test_flags_of_srun_reach_the_training(site):
    flags = "--container-image=image.sqsh --mpi=none"
    said = site("pretrain", SRUN_FLAGS=flags)
    assert f" --label {flags} bash scripts/pretrain_gpt_345M.sh --lr 1\n" in said
    assert " --label bash scripts/pretrain_gpt_345M.sh --lr 1\n" in site("pretrain")
    assert os.environ.get("SRUN_FLAGS") is None
