# SPDX-License-Identifier: Apache-2.0
"""Small training jobs to hurt, and what a job that was hurt has to come to: the bits and the samples of one that was not.

A job's ranks are forked from this process, which has torch in memory, and otherwise as torchrun starts them: a store that
is nobody's rank, the same variables, the first rank that fails ends the others. So a job of two ranks takes half a second.
"""

import contextlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from pathlib import Path
from typing import Optional

import numpy as np
import torch.distributed as dist

import megatron.training  # noqa: F401  in memory before ranks are forked
import pretrain_gpt
from megatron.checkpoint.choose import read_tracker
from megatron.checkpoint.reader import Reader
from megatron.data.indexed import write_index
from megatron.errors import run_main
from megatron.guard import processes
from megatron.mpu.forked import renew_threads
from megatron.storage.durable import checksum
from megatron.storage.processes import die_with_parent
from tests.chaos.victim import Fault, arm

STEPS, EVERY = 12, 3  # of a job; between two checkpoints
LAYOUTS = dict(  # name -> ranks, flags
    one=(1, ""),
    dp2=(2, ""),
    zero1=(2, "--use-distributed-optimizer"),
    tp2=(2, "--tp 2"),
    pp2=(2, "--pp 2"),
    zero2=(2, "--sharding-stage 2 --overlap-grad-reduce --async-save"),
    zero3=(2, "--sharding-stage 3 --overlap-grad-reduce --bf16"),
    tp2sp=(2, "--tp 2 --sequence-parallel --async-save"),
    pp2vp2=(2, "--pp 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4 --bf16"),
    zbv=(2, "--pp 2 --num-layers 4 --pipeline-schedule zb-v --async-save"),
)
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --tokenizer-type NullTokenizer "
    "--vocab-size 99 --lr 1e-2 --micro-batch-size 2 --global-batch-size 8 --device cpu --peak-tflops 1 "
    f"--train-iters {STEPS} --save-interval {EVERY} --keep-last 2 --eval-interval 5 --eval-iters 2 "
    "--exit-signal-handler --check-replicas-interval 1 --split 8,2,0"
)
RECOVERED = "the bits and samples of a clean run, no checkpoint lost"
PATIENT, HASTY = 60.0, 1.5  # seconds that a launcher leaves the other ranks to end by themselves when one has failed


@dataclass(frozen=True)
class Job:
    """A training job in a folder.

    common: where its data lies, and the results of clean runs
    more:   further flags
    cache:  where its index maps lie; None: where those of all jobs do
    ranks:  if it is not started on as many as its layout has
    claimed: the number of ranks that they are told, if it is not theirs
    grace:  seconds that the other ranks have to end by themselves when one has failed
    """

    layout: str
    folder: Path
    common: Path
    more: str = ""
    cache: Optional[Path] = None
    ranks: Optional[int] = None
    claimed: Optional[int] = None
    grace: float = PATIENT

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def world(self) -> int:
        return self.ranks or LAYOUTS[self.layout][0]

    def flags(self) -> list[str]:
        """Those of the first start and of every restart alike."""
        places = dict(
            data_path=corpus(self.common),
            data_cache_path=self.cache or self.common / "cache",
            save=self.save,
            load=self.save,
        )
        where = [word for name, path in places.items() for word in ("--" + name.replace("_", "-"), str(path))]
        return [*TINY.split(), *LAYOUTS[self.layout][1].split(), *where, "--auto-resume", *self.more.split()]

    def start(self, fault: Optional[Fault] = None, kill: Optional[tuple[float, int]] = None) -> "Attempt":
        """Run the job once, to its end or to that of its ranks. kill: (seconds, rank that is killed then)."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(self.folder.glob("attempt-*.log")))
        log = self.folder / f"attempt-{number}.log"
        codes = launch(self.world, self.flags(), log, fault, kill, claimed=self.claimed, grace=self.grace)
        return Attempt(codes, log.read_text(errors="replace"), read_tracker(self.save))


@dataclass(frozen=True)
class Attempt:
    """What became of one start of a job."""

    codes: list[int]  # of the ranks; negative: by a signal; None: had to be ended
    said: str
    tracker: Optional[int]  # which checkpoint the folder names afterwards

    @property
    def told(self) -> int:
        """The newest iteration that the job has said to be saved."""
        return max(map(int, re.findall(r"successfully saved checkpoint at iteration +(\d+)", self.said)), default=0)

    @property
    def saved(self) -> int:
        """The same, or what the tracker names."""
        return max(self.told, self.tracker or 0)

    @property
    def resumed(self) -> Optional[int]:
        """The iteration that it went on from; None when it did not come to say so."""
        found = re.search(r"resuming at iteration (\d+)|starting from iteration (0)", self.said)
        return found and int(found[1] or found[2])


def corpus(common: Path) -> Path:
    """Token files for every job of a run of the tool."""
    prefix = common / "corpus"
    if not Path(f"{prefix}.idx").exists():
        dice = np.random.RandomState(5)
        lengths = dice.randint(3, 60, 200).astype(np.int32)
        dice.randint(0, 99, lengths.sum()).astype(np.uint16).tofile(f"{prefix}.bin")
        write_index(f"{prefix}.idx", np.uint16, lengths, np.arange(len(lengths) + 1))
    return prefix


# ---- starting ---------------------------------------------------------------------------------------------------------


def launch(
    world: int,
    flags: list[str],
    log: Path,
    fault: Optional[Fault] = None,
    kill: Optional[tuple[float, int]] = None,
    patience: float = 90.0,
    claimed: Optional[int] = None,
    grace: float = PATIENT,
) -> list:
    """Start the ranks of a job, wait for their end and return their exit codes; the output goes to `log`.

    When a rank fails the others have `grace` seconds to end by themselves; then, and after `patience` seconds, they are
    killed and their code is None.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with _store(claimed or world) as port:
        ranks = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _rank(rank, claimed or world, port, flags, log, fault)
            ranks[pid] = rank
        return _wait(ranks, patience, grace, kill)


def _wait(ranks: dict[int, int], patience: float, grace: float, kill: Optional[tuple[float, int]]) -> list:
    """Exit codes of processes {pid: rank}, in the order of ranks."""
    codes: dict[int, Optional[int]] = {}
    started = time.monotonic()
    deadline, failed = started + patience, False
    while len(codes) < len(ranks):
        if kill and time.monotonic() - started > kill[0]:
            [pid] = [pid for pid, rank in ranks.items() if rank == kill[1]]
            kill = processes.send(pid, signal.SIGKILL) and None
        for pid, rank in ranks.items():
            if rank in codes:
                continue
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                processes.send(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = None
        if not failed and any(codes.values()):
            failed, deadline = True, min(deadline, time.monotonic() + grace)
        time.sleep(0.005)
    return [codes[rank] for rank in range(len(ranks))]


@contextlib.contextmanager
def _store(world: int):
    """The port of a store in which ranks meet, served by a process that is none of them, as torchrun's agent does it."""
    told, tell = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(signal.SIGKILL)
            store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
            tell.send(store.port)
            signal.pause()
        finally:
            os._exit(1)
    tell.close()
    try:
        yield told.recv()
    finally:
        told.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rank(rank: int, world: int, port: int, flags: list[str], log: Path, fault: Optional[Fault]) -> None:
    """Body of a forked rank: pretrain_gpt.py as a command, and its exit code."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        GLOO_SOCKET_IFNAME="lo",
    )
    if world == 1:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]
    renew_threads()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which is ignored below nohup
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = 0
    try:
        arm(fault, rank)
        run_main(pretrain_gpt.main, flags)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError):  # somebody may have closed what it writes to
            stream.flush()
    os._exit(code)


# ---- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """What a finished job has trained: every tensor of its last checkpoint, and the ledger of its samples."""

    tensors: dict[str, str]  # name -> checksum of the bits, moments too
    state: dict  # counts and scaler
    ledger: dict[str, str]  # iteration -> hash of its samples
    repeats: tuple[int, ...] = ()  # iterations whose ledger is not the same each time that they were trained


def record(save: Path) -> Record:
    """Read a finished job's folder."""
    ledger: dict[str, str] = {}
    repeats = []
    for text in (save / "metrics.jsonl").read_text().splitlines():
        with contextlib.suppress(ValueError):  # a line that a kill has cut
            line = json.loads(text)
            if line["kind"] == "step" and ledger.setdefault(str(line["iteration"]), line["ledger"]) != line["ledger"]:
                repeats.append(line["iteration"])
    with Reader(save / f"iter_{read_tracker(save):07d}") as reader:
        tensors = {name: checksum(reader.read(name).contiguous().numpy().tobytes()) for name in sorted(reader.tensors)}
        return Record(tensors, {**reader.state["state"], "recent": None}, ledger, tuple(repeats))


def clean_run(layout: str, common: Path, more: str = "") -> Record:
    """The record of a job that nothing happens to; trained once in a run of the tool."""
    name = re.sub(r"[^\w]+", "-", f"clean-{layout} {more}").strip("-")
    path = common / f"{name}.json"
    if not path.exists():
        job = Job(layout, common / f"{name}-{os.getpid()}", common, more)
        attempt = job.start()
        assert not any(attempt.codes), f"a clean run ended with {attempt.codes}:\n{attempt.said[-2000:]}"
        found = record(job.save)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps([found.tensors, found.state, found.ledger]))
        aside.rename(path)
    return Record(*json.loads(path.read_text()))


def compare(clean: Record, found: Record, attempts: Sequence[Attempt] = ()) -> str:
    """`RECOVERED`, or what is not as it should be."""
    wrong = going_back(attempts)
    if found.repeats:
        wrong.append(f"iterations {list(found.repeats)} had other samples the second time")
    other = [n for n in sorted({*clean.ledger, *found.ledger}, key=int) if clean.ledger.get(n) != found.ledger.get(n)]
    if other:
        wrong.append(f"iterations {', '.join(other[:5])} had other samples than those of the clean run")
    if clean.state != json.loads(json.dumps(found.state)):
        wrong.append(f"counts are {found.state} instead of {clean.state}")
    bits = [
        name for name in sorted({*clean.tensors, *found.tensors}) if clean.tensors.get(name) != found.tensors.get(name)
    ]
    if bits:
        wrong.append(f"{len(bits)} of {len(clean.tensors)} tensors have other bits ({bits[0]})")
    return "; ".join(wrong) or RECOVERED


def attempts_in(said: str) -> list[Attempt]:
    """The starts of a supervised job, read off what was said in all of them."""
    return [
        Attempt([], text, None) for text in re.split(r"^\[supervise [\d:]+\] attempt \d+ on ", said, flags=re.M)[1:]
    ]


def going_back(attempts: Sequence[Attempt]) -> list[str]:
    """Starts that went on from an older checkpoint than one that was said to be saved."""
    saved, found = 0, []
    for attempt in attempts:
        if attempt.resumed is not None and attempt.resumed < saved:
            found.append(f"iteration {saved} was saved and a later start went on from {attempt.resumed}")
            saved = attempt.resumed
        saved = max(saved, attempt.saved)
    return found


def restarted(job: Job, first: Attempt, limit: int = 3) -> str:
    """Start the job again as a user would until it is done, and compare."""
    attempts = [first]
    while attempts[-1].codes != [0] * job.world or len(attempts) == 1:
        if len(attempts) > limit:
            return f"ended with {attempts[-1].codes} when started again: {attempts[-1].said[-300:]}"
        attempts.append(job.start())
    return compare(clean_run(job.layout, job.common, job.more), record(job.save), attempts)
