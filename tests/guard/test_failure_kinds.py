# SPDX-License-Identifier: Apache-2.0
"""The kind of each failure and what follows it: thirty ends as NCCL, CUDA, gloo, SLURM, Python and the kernel word them."""

import signal

import pytest

from megatron.errors import UsageError
from megatron.guard.beat_files import Beat
from megatron.guard.exits import Action, End, Evidence, first_failure, judge, signals_in_log
from megatron.guard.failure_kinds import FailureKind, kind_of_hang
from megatron.guard.stacks import Frame, Standstill
from megatron.storage.processes import oom_kills
from megatron.tools.supervise import failure_rules

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.1 GiB"
GONE = "another rank is gone or silent"
WAITED = "rank 4 waited 600 s for another rank (--distributed-timeout-minutes 10)"
# code, message of the rank that failed first, output of the job, whether the job made steps before; kind, action
ENDS = {
    "unknown flag": (2, "--tpp: unknown flag", "", False, "command", "stop"),
    "settings": (3, "--tensor-model-parallel-size 3 does not divide 4 heads", "", False, "command", "stop"),
    "package": (3, "the package transformers is missing in /usr/bin/python", "", False, "command", "stop"),
    "folder of another user": (6, "/runs: Permission denied", "", False, "command", "stop"),
    "locked": (10, "runs/a is written to by process 4242 on n3", "", True, "command", "stop"),
    "no such script": (127, "", "bash: torchrunn: command not found", False, "command", "stop"),
    "missing tokens": (4, "data/a_text.bin: no such file", "", False, "data", "stop"),
    "damaged tokens": (4, "data/a_text.bin does not match its checksum", "", True, "data", "stop"),
    "device memory, at once": (1, OOM, "", False, "memory", "stop"),
    "device memory, later": (1, OOM, "", True, "memory", "restart"),
    "NCCL's device memory": (
        7,
        GONE,
        "n1:77:99 [3] NCCL WARN Cuda failure 2 'out of memory'\nn2:9:9 [0] NCCL WARN Call to recv failed: Broken pipe",
        True,
        "memory",
        "restart",
    ),
    "host memory, SLURM": (-9, "", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0", True, "memory", "restart"),
    "data workers' memory": (
        1,
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. insufficient shared memory (shm)",
        "",
        True,
        "memory",
        "restart",
    ),
    "a device that computes wrongly": (
        17,
        "iteration 9: rank 3 on n7 computes other bits than other ranks do of the same samples",
        "[rank0]: RuntimeError: NCCL error: unhandled system error",
        True,
        "silent error",
        "replace",
    ),
    "ECC": (11, "the GPU of rank 3 on n1 failed: CUDA error: uncorrectable ECC error", "", True, "device", "replace"),
    "off the bus": (1, "RuntimeError: CUDA error: GPU is lost, it has fallen off the bus", "", True, "device", "replace"),
    "NCCL's device": (
        7,
        GONE,
        "n1:77:99 [3] NCCL WARN NET/IB : Got completion from peer with error 12\n"
        "n1:77:99 [3] NCCL WARN Cuda failure 214 'uncorrectable ECC error encountered'",
        True,
        "device",
        "replace",
    ),
    "InfiniBand": (
        1,
        "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error",
        "n1:77:99 [3] NCCL WARN NET/IB: Got completion with error 12, opcode 0, len 0, vendor err 129",
        True,
        "network",
        "restart",
    ),
    "queue pair": (1, "RuntimeError: NCCL error: Call to ibv_modify_qp failed with 110 Connection timed out", "", True,
                   "network", "restart"),
    "timeout": (7, WAITED, "", True, "network", "restart"),
    "gloo": (7, GONE, "terminate called\n  what():  Connection reset by peer", True, "network", "restart"),
    "name": (7, GONE, "socket.gaierror: [Errno -2] Name or service not known", False, "network", "restart"),
    "full disk": (6, "runs/a/iter_0000010: No space left on device", "", True, "disk", "restart"),
    "stale handle": (1, "OSError: [Errno 116] Stale file handle", "", True, "disk", "restart"),
    "no readable checkpoint": (5, "runs/a: no complete checkpoint", "", True, "disk", "stop"),
    "page of a mapped file": (-signal.SIGBUS, "", "", True, "disk", "restart"),
    "assert in a kernel": (1, "torch.AcceleratorError: CUDA error: device-side assert", "", True, "code", "restart"),
    "a bug, at once": (1, "TypeError: forward() got an unexpected keyword argument 'mask'", "", False, "code", "stop"),
    "crash": (-signal.SIGSEGV, "", "", True, "code", "restart"),
    "not finite": (8, "iteration 7: loss nan, gradient norm nan: not finite", "", True, "numerics", "stop"),
    "finite when repeated": (
        8,
        "iteration 7: loss nan, gradient norm nan: not finite",
        "error: iteration 7: loss nan\n  the same step, repeated, is finite: its arithmetic is not repeatable",
        True,
        "silent error",
        "stop",
    ),
    "replicas": (8, "iteration 50: ranks that hold the same x hold different bits", "", True, "silent error", "stop"),
    "killed": (-signal.SIGKILL, "", "", True, "host", "restart"),
    "node failure": (-15, "", "srun: error: Node failure on n3\nslurmstepd: error: *** STEP 77.0 CANCELLED ***", True,
                     "host", "restart"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_each_end_has_a_kind_and_a_decision(name):
    code, why, output, has_trained, kind, action = ENDS[name]
    verdict = judge([code], Evidence(why, output, has_trained=has_trained))
    assert (verdict.kind.value, verdict.action.value) == (kind, action)
    other = Action.STOP if action != "stop" else Action.RESTART
    assert judge([code], Evidence(why, output, has_trained=has_trained), {verdict.kind: other}).action is other


def test_a_kill_with_the_kernels_count_of_memory_is_memory():
    assert judge([-9], Evidence(oom_kills=1)).kind is FailureKind.MEMORY
    assert judge([-11], Evidence(oom_kills=1)).kind is FailureKind.CODE


@pytest.mark.parametrize("code", [0, 9, 130])
def test_what_is_no_failure_has_no_kind(code):
    assert judge([code], Evidence(OOM, OOM)).kind is None


@pytest.mark.parametrize(
    "ends, rank, kind",
    [  # (at, code, message) of each rank
        ([(9.0, 7, WAITED), (8.5, 1, "RuntimeError: NCCL error: remote process exited"), (8.9, 1, OOM)], 2, "memory"),
        ([(1.0, 7, GONE), (2.0, 7, WAITED), (0.5, -15, "")], 1, "network"),
        ([(5.0, 3, "--seed: 1 in the checkpoint"), (4.0, 4, "a.bin: no such file")], 1, "data"),
        ([(4.0, 1, "ValueError: 3"), (4.1, 11, "the GPU of rank 1 on n1 failed: x")], 0, "code"),
    ],
)
def test_the_kind_is_that_of_the_rank_that_failed_first_not_of_the_loudest(ends, rank, kind):
    first = first_failure(End(at, number, "n", code, why) for number, (at, code, why) in enumerate(ends))
    assert (first.rank, judge([first.code], Evidence(first.why)).kind.value) == (rank, kind)


def standstill(phase="F", state="S", frame=None):
    beat = Beat(0, "n1", 1, 1, 1, phase, 5, since=1, machine="elsewhere")
    return Standstill(beat, 9.0, state, ((frame,),) if frame else ())


COLLECTIVE = Frame("/x/mpu/collectives.py", 1, "all_reduce")


@pytest.mark.parametrize(
    "ranks, lines, kind",
    [
        ([], [], "host"),
        ([standstill(frame=COLLECTIVE), standstill(state="T")], [], "host"),
        ([standstill(frame=COLLECTIVE), standstill(state="?")], [], "host"),
        ([standstill(frame=COLLECTIVE), standstill("data")], [], "disk"),
        ([standstill("save", "D"), standstill(frame=COLLECTIVE)], [], "disk"),
        ([standstill("F", "D"), standstill(frame=COLLECTIVE)], [], "device"),
        ([standstill(frame=COLLECTIVE), standstill("F", "R")], [], "code"),
        ([standstill(frame=COLLECTIVE)] * 2, ["every rank waits for another: the network between them"], "network"),
        ([standstill(frame=COLLECTIVE)] * 2, ["all_reduce 5: ranks 0-1 wait; their calls differ: ..."], "code"),
        ([standstill(frame=COLLECTIVE)] * 2, ["every rank waits, in different places: they have diverged"], "code"),
    ],
)
def test_the_kind_of_a_hang(ranks, lines, kind):
    assert kind_of_hang(ranks, lines).value == kind
    verdict = judge([0], Evidence(hang=kind_of_hang(ranks, lines)))
    assert (verdict.code, verdict.cause) == (7, "hung")
    assert verdict.action is (Action.REPLACE if kind == "device" else Action.RESTART)


def test_a_rank_that_waits_for_its_device(tmp_path):
    source = tmp_path / "megatron" / "training" / "step.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = loss.item()\n")
    waits = standstill(frame=Frame(str(source), 1, "train_step"))
    assert (
        waits.waits_in == "work on the device" and kind_of_hang([standstill(frame=COLLECTIVE), waits]).value == "device"
    )


def test_the_words_of_on_failure():
    rules = failure_rules(["numerics=restart", "silent-error=replace", "network=stop"])
    assert rules == {
        FailureKind.NUMERICS: Action.RESTART,
        FailureKind.SILENT_ERROR: Action.REPLACE,
        FailureKind.NETWORK: Action.STOP,
    }
    for words, said in (
        ("netwrok=stop", "netwrok is no kind of failure; did you mean network"),
        ("network=stpo", "did you mean stop"),
        ("network", "--on-failure network"),
        ("=stop", "nothing is no kind"),
        ("network=done", "done is no action"),
    ):
        with pytest.raises(UsageError, match=said):
            failure_rules([words])


def test_kills_for_memory_are_counted_where_the_kernel_shows_them(tmp_path):
    def files(**contents):
        for name, text in contents.items():
            path = tmp_path / name.replace("__", "/").replace("_events", ".events")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    assert oom_kills(tmp_path) == 0
    files(proc__vmstat="pgfault 9\noom_kill 3\n")
    assert oom_kills(tmp_path) == 3
    files(proc__self__cgroup="0::/job/7\n")
    assert oom_kills(tmp_path) == 3  # the group has no file
    files(sys__fs__cgroup__job__7__memory_events="low 0\noom 9\noom_kill 5\noom_group_kill 8\n")
    assert oom_kills(tmp_path) == 5


def test_our_launchers_words():
    text = "error: rank 3 was ended by SIGSEGV\n  -> x\n[2] error: rank 4 was ended by SIGBUS\nerror: rank 5 was ended by x"
    assert signals_in_log(text) == {3: -11}
