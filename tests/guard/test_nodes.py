# SPDX-License-Identifier: Apache-2.0
"""The nodes of a supervised SLURM job: which are left out, and what it runs on then. SLURM's programs are scripts here."""

import shlex
import sys

import pytest

from megatron.errors import DeviceLost, SettingsError, exit_code, explain, node_name
from megatron.guard import slurm
from megatron.guard.endings import peer_lost
from megatron.guard.exits import Action, End, JobVerdict, first_failure
from megatron.guard.goodput import Attempt
from megatron.guard.nodes import Nodes, failure_here
from megatron.guard.supervisor_mark import SUPERVISOR
from megatron.telemetry.events import EventLog, read_events
from megatron.tools import supervise

FLAGS = """--num-layers 2 --hidden-size 8 --num-attention-heads 2 --mock-data --vocab-size 9 --micro-batch-size 1 --lr 1
    --global-batch-size 24 --train-iters 3"""
# Runs the check for each node of the list; a node that is down is silent.
SRUN = """#!/bin/bash
echo "$@" >> FOLDER/calls
for word in "$@"; do case $word in --nodelist=*) names=${word#*=};; esac; done
while [ "$1" != bash ]; do shift; done
for name in ${names//,/ }; do
    ! grep -q "^$name$" FOLDER/down || continue
    SLURMD_NODENAME=$name "$@"
done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> FOLDER/calls
[ "$2" != hostnames ] || printf 'n%s\\n' 1 2 3 4 5
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A job on five nodes: `cluster(words, **settings)` is its supervisor."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text.replace("FOLDER", str(tmp_path)))
        (programs / name).chmod(0o755)
    for name in ("calls", "broken", "down"):
        (tmp_path / name).touch()
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-5]")
    monkeypatch.setenv("SLURM_NNODES", "5")
    monkeypatch.setenv(SUPERVISOR, "")
    monkeypatch.setattr(slurm.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    check = f'! grep -q "^$SLURMD_NODENAME$" {tmp_path}/broken || (echo GPU 3: gone; exit 1)'

    def start(words, **settings):
        given = dict(log_dir=str(tmp_path / "logs"), heartbeat_dir=str(tmp_path / "beats"), node_check=check) | settings
        command = [*words.split(), *FLAGS.split(), "--save", str(tmp_path / "save")]
        made = supervise.Supervisor(supervise.SuperviseOptions(**given), command)
        made.attempts = [Attempt(0, made.place.ranks, first_step=1, last_step=9)]
        return made

    return start


def lose(supervisor, code=11, host="", last_step=9, why=""):
    """The reason for no further attempt after one that ended so."""
    action = {11: Action.REPLACE, 17: Action.REPLACE, 3: Action.STOP, 1: Action.RESTART}[code]
    supervisor.attempts.append(
        Attempt(1, supervisor.place.ranks, code=code, cause="lost", host=host, first_step=10, last_step=last_step, why=why,
                excluded=len(supervisor.place.nodes.excluded))
    )  # fmt: skip
    return supervisor.end_of_job(JobVerdict(action, "lost", code))


TORCHRUN = "srun torchrun --nnodes 4 --nproc-per-node 2 --rdzv-endpoint n2:29500 pretrain_gpt.py"


def launched(supervisor):
    """The launcher's part of the next attempt's command."""
    words = supervisor.place.words(supervisor.place.command)
    return " ".join(words[: words.index("pretrain_gpt.py")])


def test_a_spare_node_takes_the_place_of_a_broken_one(cluster, tmp_path):
    """Also that at which the ranks meet; then there is none left, and the job says so."""
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    assert supervisor.place.ranks == 8
    (tmp_path / "broken").write_text("n2\n")
    assert lose(supervisor) is None
    assert launched(supervisor) == (
        "srun --nodes=4 --exclude=n2 torchrun --nnodes 4 --nproc-per-node 2 --rdzv-endpoint n1:29500"
    )
    assert (tmp_path / "save" / "bad_nodes").read_text() == "n2\n"
    (tmp_path / "down").write_text("n4\n")
    outcome = lose(supervisor)
    assert outcome.startswith("given up: n4 failed (does not answer), and nothing is left to run on (--spare-nodes")


def test_the_check_asks_every_node_that_is_left_once(cluster, tmp_path):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    (tmp_path / "broken").write_text("n2\nn3\n")
    assert supervisor.place.failing() == dict(n2="GPU 3: gone", n3="GPU 3: gone")
    supervisor.place.nodes.exclude(dict(n2="x"))
    (tmp_path / "calls").write_text("")
    assert supervisor.place.failing() == dict(n3="GPU 3: gone")
    [call] = [line for line in (tmp_path / "calls").read_text().splitlines() if "--nodelist" in line]
    assert call.startswith("--nodes=4 --ntasks=4 --ntasks-per-node=1 --nodelist=n1,n3,n4,n5 --kill-on-bad-exit=0 bash")


def test_fewer_nodes_make_the_same_batch(cluster, tmp_path):
    """5 nodes of 2 ranks; 24 samples are shared by 8 or 6 ranks, not by 10: `--min-nodes 3` allows both."""
    supervisor = cluster(TORCHRUN.replace("--nnodes 4", "--nnodes 4"), min_nodes=3)
    (tmp_path / "broken").write_text("n1\nn2\n")
    assert lose(supervisor) is None and supervisor.place.ranks == 6
    assert launched(supervisor) == (
        "srun --nodes=3 --exclude=n1,n2 torchrun --nnodes=3 --nproc-per-node=2 --rdzv-endpoint n3:29500"
    ).replace("srun --nodes=3 --exclude=n1,n2", launched(supervisor).partition(" torchrun")[0])
    assert "--exclude=n1,n2" in launched(supervisor) and "--nodes=3" in launched(supervisor)
    assert supervise.commands.value_of(supervisor.place.command, "--global-batch-size") == "24"
    (tmp_path / "broken").write_text("n3\n")
    assert "nothing is left to run on" in lose(supervisor)


def test_without_nodes_the_job_waits_in_the_queue_for_others(cluster, tmp_path):
    supervisor = cluster(TORCHRUN.replace("4", "5", 1), on_preempt="requeue")
    (tmp_path / "logs").mkdir(exist_ok=True)
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "bad_nodes").write_text("n9\n")
    (tmp_path / "broken").write_text("n5\n")
    outcome = lose(supervisor)
    assert outcome == "back in the queue, without n5 (GPU 3: gone)"
    assert supervisor.report(outcome, JobVerdict(Action.REPLACE, "lost", 11)) == 9
    assert read_events(tmp_path / "save")[-1]["level"] == "info"
    calls = [
        line
        for line in (tmp_path / "calls").read_text().splitlines()
        if line.split()[0] in ("requeuehold", "update", "release")
    ]
    assert calls == ["requeuehold 77", "update JobId=77 ExcNodeList=n5,n9", "release 77"]


@pytest.mark.parametrize("code, last_step, checked", [(11, 12, True), (3, 9, True), (1, 9, True), (1, 12, False)])
def test_nodes_are_checked_if_a_device_is_lost_or_a_job_no_longer_starts(code, last_step, checked, cluster, tmp_path):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    (tmp_path / "broken").write_text("n2\n")
    assert lose(supervisor, code, last_step=last_step) is None
    assert list(supervisor.place.nodes.excluded) == ["n2"] * checked


def test_a_command_that_never_worked_is_not_the_nodes_fault(cluster, tmp_path):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    supervisor.attempts = []
    assert lose(supervisor, 3) == "stopped: lost" and not supervisor.place.nodes.excluded


def test_a_node_that_passes_its_check_is_left_out_when_its_ranks_lose_a_device_again(cluster):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    assert lose(supervisor, host="n3", last_step=12) is None and not supervisor.place.nodes.excluded
    assert lose(supervisor, host="n1", last_step=15) is None and not supervisor.place.nodes.excluded
    assert lose(supervisor, host="n3", last_step=20) is None and list(supervisor.place.nodes.excluded) == ["n3"]


def test_a_node_whose_rank_computes_wrongly_is_left_out_at_once(cluster):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    why = "iteration 12: rank 3 on n2 computes other bits than other ranks do of the same samples"
    assert lose(supervisor, 17, host="n2", last_step=12, why=why) is None
    assert supervisor.place.nodes.excluded == {"n2": "its rank 3 computes wrongly"}
    events = read_events(supervisor.events.path)
    assert [event["nodes"] for event in events if event["event"] == "node_excluded"] == [["n2"]]


def test_a_supervisor_of_another_node_goes_on_without_the_one_that_computes_wrongly(cluster, tmp_path, monkeypatch):
    (tmp_path / "bin" / "torchrun").symlink_to("/bin/true")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    alone = "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --rdzv-endpoint n1:29500 pretrain_gpt.py"
    for host, outcome in (("n2", None), ("n1", "given up: n1 failed (its rank 3 computes wrongly)")):
        supervisor = cluster(alone)
        why = f"iteration 12: rank 3 on {host} computes other bits than other ranks do of the same samples"
        said = lose(supervisor, 17, host=host, last_step=12, why=why)
        assert list(supervisor.place.nodes.excluded) == [host]
        assert said is outcome or said.startswith(outcome)


def test_a_node_that_may_compute_wrongly_or_forget_is_left_out_the_second_time(cluster):
    supervisor = cluster(TORCHRUN, spare_nodes=1)
    pair = "iteration 9: rank 0 on n1 and rank 4 on n3 compute different bits of the same samples: one of them is wrong"
    memory = "iteration 14: the memory of rank 5 on n3 changed while nothing wrote to it"
    assert lose(supervisor, 17, host="n1", last_step=12, why=pair) is None and not supervisor.place.nodes.excluded
    assert lose(supervisor, 17, host="n3", last_step=14, why=memory) is None
    assert supervisor.place.nodes.excluded == {"n3": "its rank 5 computes wrongly"}


def test_spares_need_an_allocation(cluster, monkeypatch):
    for words, spares, said in (
        (TORCHRUN, 5, "--spare-nodes 5: the allocation has 5 nodes"),
        (TORCHRUN.removeprefix("srun "), 1, "the command has no --node-rank"),
    ):
        with pytest.raises(SettingsError, match=said):
            cluster(f"{sys.executable} {words}" if "srun" not in words else words, spare_nodes=spares)


def test_the_check_of_this_node():
    assert failure_here("true") is None and failure_here("echo a; echo GPU 0: off; exit 1") == "GPU 0: off"
    assert failure_here("exit 3") == "exit code 3"
    assert Nodes("false").failing(shlex.split("torchrun pretrain_gpt.py")).keys() == {Nodes().left(["torchrun"])[0]}


@pytest.mark.parametrize(
    "ends, first",
    [
        ([(5.0, 7, ""), (4.0, 1, ""), (4.5, 3, "")], 1),  # the first in time, though 3 is the more specific code
        ([(1.0, 7, ""), (3.0, -9, "")], 1),  # one that lost a peer is no cause
        ([(2.0, 7, "rank 0 waited 5 s for another rank"), (1.0, 7, "connection closed")], 0),
        ([(1.0, -15, ""), (2.0, 11, "")], 1),  # ended by its launcher
        ([(1.0, 0, ""), (2.0, 0, "")], None),
        ([(0.0, 1, ""), (0.0, 11, "")], 1),  # at one moment the device is the reason
    ],
)
def test_the_rank_that_failed_first(ends, first):
    found = first_failure(End(at, rank, "n", code, why) for rank, (at, code, why) in enumerate(ends))
    assert (found and found.rank) == first


@pytest.mark.parametrize(
    "text, code",
    [
        ("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...", 11),
        ("CUDA error: unknown error", 11),
        ("No CUDA GPUs are available", 11),
        ("NCCL error: unhandled cuda error\nLast error: Cuda failure 'GPU is lost'", 11),
        ("CUDA error: an illegal memory access was encountered", 1),  # a kernel's bug, most often
        ("CUDA error: device-side assert triggered", 1),
        ("NCCL communicator was aborted: connection closed by peer", 7),
    ],
)
def test_errors_that_only_hardware_causes_lose_the_device(text, code):
    error = RuntimeError(text)
    reported = peer_lost(error) or error
    assert exit_code(reported) == code
    if code == 11:
        said = next(line for line in text.splitlines() if "CUDA" in line or "Cuda" in line)
        assert f"the GPU of rank 0 on {node_name()} failed: {said}" in str(explain(error)) + str(reported)


def test_a_driver_that_does_not_answer_is_no_reason_for_the_cpu(tmp_path, monkeypatch):
    import torch

    from megatron.mpu.initialize import has_silent_gpus, pick_device

    (tmp_path / "driver").touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert has_silent_gpus(str(tmp_path / "driver")) and not has_silent_gpus(str(tmp_path / "none"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_silent_gpus(str(tmp_path / "driver"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(DeviceLost, match=f"local rank 3 has no CUDA device of its own: there are 3 on {node_name()}"):
        pick_device("auto", 3)


def test_a_supervised_run_leaves_its_end_to_the_supervisor(tmp_path):
    sent, log = [], []
    events = EventLog(tmp_path / "events.jsonl", log=log.append)
    events.outboxes = [lambda event: sent.append(event["event"])]
    events.listeners += events.outboxes
    for supervised in (False, True):
        events.supervised = lambda supervised=supervised: supervised
        events.record("no_step", "no step has ended for 99 s", iteration=3)
        events.record("end", "ended with exit code 1", level="error", iteration=3, code=1, why="x")
        events.record("spike", "loss 5", iteration=3)
    assert sent == ["no_step", "end", "spike", "spike"] and log.count("ERROR: no step has ended for 99 s") == 2
    assert [event["level"] for event in read_events(tmp_path)] == [
        "error",
        "error",
        "warning",
        "info",
        "info",
        "warning",
    ]
