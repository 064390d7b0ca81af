# SPDX-License-Identifier: Apache-2.0
"""A real SLURM of three nodes on this machine runs the job scripts of scripts/slurm. Skipped where none is installed:
scripts/slurm/local_cluster.sh says how it is; nothing is installed here.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.guard.beat_files import read_beats

SLURM = Path(__file__).resolve().parents[2] / "scripts" / "slurm"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
MISSING = [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed here: no {', '.join(MISSING)}")

FLAGS = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 500 --mock-data
    --tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 2 --global-batch-size 16 --lr 1e-3
    --eval-iters 0 --log-interval 1 --device cpu"""
RANKS, STEPS = 4, 36


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, root):
    """`cluster(*words, **env)` runs a command that finds the cluster, in the project's folder; returns what it said."""
    folder = tmp_path_factory.mktemp("slurm")
    outer = ("RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH")) and k not in outer}
    inherited |= dict(SLURM_CONF=f"{folder}/slurm.conf", PYTHON=sys.executable, OMP_NUM_THREADS="1", NODE_GPUS="2")

    def run(*words, **env) -> str:
        done = subprocess.run(
            list(map(str, words)), env=inherited | env, cwd=root, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert "idle n[1-3]" in run("bash", SLURM / "local_cluster.sh", "start", folder, "3")
        yield run
    finally:
        run("bash", SLURM / "local_cluster.sh", "stop", folder)


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    """A script as those of scripts/, of a model that trains in seconds."""
    path = tmp_path_factory.mktemp("script") / "pretrain_tiny.sh"
    path.write_text(
        f"source {shlex.quote(str(SLURM.parent / '_launch.sh'))}\nlaunch {RANKS} A100-80GB "
        + " ".join(FLAGS.split())
        + ' "$@"\n'
    )
    return path


class Log:
    """What a job has said so far."""

    def __init__(self, path: Path):
        self.path = path

    def text(self) -> str:
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def behind(self, place: str) -> str:
        """What was said behind the last place where this stands; nothing where it does not."""
        text = self.text()
        return text if not place else text.rpartition(place)[2] if place in text else ""

    def wait_for(self, pattern: str, behind: str = "", seconds: float = 120) -> str:
        """The text, as soon as it matches behind the last place where `behind` stands."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.behind(behind)):
            assert time.monotonic() < deadline, f"no {pattern} in\n{self.text()[-6000:]}"
            time.sleep(0.2)
        return self.text()


def iteration(least: int) -> str:
    """Of a log line whose iteration is at least this."""
    return rf"iteration +({'|'.join(map(str, range(least, STEPS + 1)))})/"


def losses(path: Path, tolerance: float = 0.0) -> dict[int, float]:
    """Iteration -> loss; a step that was made twice must have had the same loss both times."""
    found: dict[int, float] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        if "lm loss" in record:
            step, loss = record["iteration"], record["lm loss"]
            assert abs(found.setdefault(step, loss) - loss) <= tolerance * loss, (
                f"step {step}: {found[step]} and {loss}"
            )
    return found


@pytest.mark.sampled(2)
def test_a_job_survives_bad_nodes_lost_ranks_and_preemption(cluster, script, tmp_path, run_ranks):
    """tp 2 x dp 2 on two nodes: moved off a node that fails the check, restarted after a kill -9, sent back into the
    queue by a signal, and in the end every loss is, to the bit, that of a run that nobody disturbed.
    """
    saved, log = tmp_path / "saved", Log(tmp_path / "job.log")
    words = ["--train-iters", STEPS, "--save-interval", 5]
    number = cluster(
        "sbatch",
        "--parsable",
        "--nodes=2",
        "--gpus-per-node=2",
        "--mem=1000",
        f"--output={log.path}",
        SLURM / "pretrain.sbatch",
        script,
        *words,
        CHECKPOINTS=str(saved),
        SUPERVISE="--backoff 0.2 --poll 0.2",
        NODE_CHECK='[ "$SLURMD_NODENAME" != n1 ]',
    ).strip()
    log.wait_for(r"nodes that fail the check: n1")
    log.wait_for(rf"job {number} on n\[2-3\], start 2")
    log.wait_for(iteration(8))
    beats = read_beats(saved / f"logs-{number}" / "heartbeats")
    assert len(beats) == RANKS and len({beat.rank for beat in beats}) == RANKS
    os.kill(beats[3].pid, signal.SIGKILL)
    log.wait_for(iteration(16), behind="attempt 1 on")
    cluster("scancel", "--signal=USR1", "--batch", number)
    log.wait_for("preempted, back in the queue")
    text = log.wait_for("finished after", behind="start 3")
    assert f"job {number} on n[2-3], start 3" in text and (saved / "bad_nodes").read_text() == "n1\n"
    assert "layout tp 2 pp 1 cp 1 dp 2 then and now" in text
    assert "nodes that fail the check" not in text.partition("start 2")[2]
    ranks = [path for path in (saved / f"logs-{number}").glob("ranks-of-node-*/workerlog.*")]
    assert {path.parts[-2] for path in ranks} == {"ranks-of-node-0", "ranks-of-node-1"} and len(ranks) == 3 * RANKS

    found = losses(saved / "metrics.jsonl")
    assert sorted(found) == list(range(1, STEPS + 1))
    assert found == losses(undisturbed(tmp_path / "metrics.jsonl", words[:2], run_ranks))


def undisturbed(path: Path, words: list, run_ranks) -> Path:
    """Metrics of the same training on forked ranks."""
    from megatron.settings.parse import parse_pretrain
    from megatron.training.loop import pretrain
    from megatron.training.rules import resolve
    from pretrain_gpt import recipe

    config = resolve(parse_pretrain([*FLAGS.split(), *map(str, words), "--metrics-file", str(path)]), RANKS)
    run_ranks(RANKS, lambda rank: pretrain(config, recipe()))
    return path


def test_every_way_to_start_ranks(cluster, script, tmp_path):
    """A task of srun for each rank; and no srun at all: in an allocation of two nodes the launcher calls it."""
    words = f"bash {shlex.quote(str(script))} --train-iters 2"
    jobs = {}
    for name, command in (("each", f"srun --ntasks=4 {words}"), ("none", words)):
        jobs[name] = Log(tmp_path / f"{name}.log")
        cluster(
            "sbatch",
            "--nodes=2",
            "--ntasks-per-node=2" if name == "each" else "--ntasks-per-node=1",
            "--gpus-per-node=2",
            "--mem=1000",
            f"--output={jobs[name].path}",
            f"--wrap={command}",
        )
    for log in jobs.values():
        log.wait_for("iteration        2/       2")
        assert "data-parallel size: 2, tensor-model-parallel size: 2" in log.text()


def test_an_array_preprocesses_and_a_dependent_job_merges(cluster, tmp_path, root):
    sentences = [
        json.dumps(dict(text=" ".join(str(n * n % 97) for n in range(start, start + 9)))) for start in range(50)
    ]
    shards = [tmp_path / f"shard {n}.jsonl" for n in range(3)]
    for number, shard in enumerate(shards):
        shard.write_text("\n".join(sentences[number * 16 : (number + 1) * 16]) + "\n")
    env = dict(OUT=str(tmp_path / "corpus"), FLAGS="--tokenizer-type NullTokenizer --vocab-size 100 --append-eod")
    small = ("--cpus-per-task=1", f"--output={tmp_path}/%x-%A-%a.log", "--parsable")
    array = cluster("sbatch", *small, "--array=0-1", SLURM / "preprocess_array.sbatch", *shards, **env).strip()
    cluster("sbatch", *small, f"--dependency=afterok:{array}", "--wait", SLURM / "merge.sbatch", **env)

    whole = tmp_path / "whole.jsonl"
    whole.write_text("".join(shard.read_text() for shard in shards))
    cluster(
        sys.executable,
        "preprocess_data.py",
        "--input",
        whole,
        "--output-prefix",
        tmp_path / "whole",
        *env["FLAGS"].split(),
        "--workers",
        "1",
    )
    for ending in ("bin", "idx"):
        merged, direct = (tmp_path / f"{name}_text_document.{ending}" for name in ("corpus", "whole"))
        assert merged.read_bytes() == direct.read_bytes()


def test_jobs_that_cannot_start_say_why(cluster, script, tmp_path):
    log = Log(tmp_path / "job.log")
    common = ("--nodes=1", "--gpus-per-node=1", "--mem=100", "--open-mode=truncate", f"--output={log.path}")
    for words, env, said in (
        ([script], {}, "CHECKPOINTS is not set"),
        (["nowhere.sh"], dict(CHECKPOINTS=str(tmp_path)), "which script?"),
        ([script, "--hidden-size", "33"], dict(CHECKPOINTS=str(tmp_path), NODE_CHECK="true"), "--hidden-size 33"),
    ):
        cluster("sbatch", *common, SLURM / "pretrain.sbatch", *words, **env)
        log.wait_for(re.escape(said))


def test_a_node_that_no_longer_starts_is_replaced_and_then_left_out(cluster, script, tmp_path, run_ranks):
    """tp 2 x dp 2 on two of three nodes: a spare takes the place of a broken one, then one node trains alone."""
    saved, log, broken = tmp_path / "saved", Log(tmp_path / "job.log"), tmp_path / "broken"
    broken.mkdir()
    own = tmp_path / "pretrain_own.sh"
    own.write_text(f'[ -n "${{PRINT:-}}" ] || [ ! -e {broken}/$SLURMD_NODENAME ] || exit 11\n{script.read_text()}')
    (tmp_path / "_launch.sh").symlink_to(SLURM.parent / "_launch.sh")
    words = ["--train-iters", STEPS, "--save-interval", 5, "--save", saved]
    number = cluster(
        "sbatch",
        "--parsable",
        "--nodes=3",
        "--gpus-per-node=2",
        "--mem=1000",
        f"--output={log.path}",
        SLURM / "pretrain.sbatch",
        own,
        *words,
        CHECKPOINTS=str(saved),
        SUPERVISE="--backoff 0.2 --poll 0.2 --spare-nodes 1 --min-nodes 1",
        SRUN_FLAGS="--nodes=2 --ntasks=2",
        NODE_CHECK=f"[ ! -e {broken}/$SLURMD_NODENAME ]",
    ).strip()
    for attempt, step in ((0, 8), (2, 16)):
        log.wait_for(iteration(step), behind=f"attempt {attempt} on")
        beat = read_beats(saved / f"logs-{number}" / "heartbeats")[-1]
        (broken / beat.host).touch()
        os.kill(beat.pid, signal.SIGKILL)
    text = log.wait_for("finished after")
    first, second = re.findall(r"nodes that fail the check: (\w+)", text)
    assert (saved / "bad_nodes").read_text().split() == sorted([first, second])
    events = [json.loads(line) for line in (saved / "events.jsonl").read_text().splitlines()]
    actions = [(event["action"], event["ranks"]) for event in events if event["event"] == "node_excluded"]
    assert actions == [("spare", 4), ("fewer", 2)] and text.count("restart ") == 4
    found, undisturbed_ = losses(saved / "metrics.jsonl", 1e-4), undisturbed(tmp_path / "m.jsonl", words[:2], run_ranks)
    assert found == pytest.approx(losses(undisturbed_), rel=1e-4) and sorted(found) == list(range(1, STEPS + 1))
