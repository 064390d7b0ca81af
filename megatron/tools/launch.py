# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a job on this machine: torchrun's flags and torch's elastic agent, and an end that can be read.

    python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py --num-layers 4 ...
    python -m megatron.tools.launch --gpus 2,3 pretrain_gpt.py ...
    python -m megatron.tools.launch --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 pretrain_gpt.py ...

Where torchrun ends with a traceback of its own, a table of all ranks and exit code 1, this ends with the message of the
rank that says most about the cause, once, in at most 12 lines and behind everything else; its exit code is that rank's
(`megatron.errors`), or 128 + N for one that signal N has ended. What is longer, as tracebacks are, is kept in a file.

Ctrl-C is handed on to the ranks, which save and stop; they have all the time that they need. The second one ends them at
once. SIGTERM, SIGHUP and SIGQUIT are handed on as well, and ranks that do not end are killed after --shutdown-timeout.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, Optional

from megatron.errors import (
    LAUNCHER,
    Failure,
    Interrupted,
    PeerLost,
    SettingsError,
    UsageError,
    did_you_mean,
    explain,
    run_main,
)
from megatron.guard import processes
from megatron.guard.command import config_of
from megatron.guard.exits import FOR_ANOTHER, judge
from megatron.guard.resume_command import COMMAND, last_checkpoint, module_command
from megatron.guard.stacks import spans

MODULE = "megatron.tools.launch"
AT_ONCE = 2.0  # seconds that ranks have to end after the second Ctrl-C
LINGER = 2.0  # seconds that the agent has to notice that all ranks have ended
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # for a torch whose launcher has no --signals-to-handle
LOUD = ("LOGLEVEL", "TORCHELASTIC_LOG_LEVEL", "TORCH_LOGS")  # who sets one wants to hear the agent


class Ending(NamedTuple):
    """How a rank has ended that did not finish."""

    rank: int
    code: int  # negative: by a signal
    said: str  # its message, as far as it should be printed; "": it left none
    told: bool = False  # it has printed it itself
    killed: bool = False  # by this launcher: its end is no cause of anything


def main(argv: list[str]) -> None:
    """Parse, start the ranks, wait for their end; exits with 0, or the code of the rank that says most when one fails."""
    from torch.distributed import run as torchrun

    if not any(os.environ.get(name) for name in LOUD):
        quiet()
    args = parse(torchrun.get_args_parser(), argv)
    os.environ.setdefault(COMMAND, module_command(argv, MODULE))  # a supervisor's comes first
    with files_of(args) as kept:
        job = Launch(args)
        try:
            endings = job.run()
        except BaseException:  # a signal while they are being started
            job.kill()
            raise
        text, code, rank = job.last_words(endings) if endings else ("", 0, 0)
        kept.add(f"rank_{rank}.txt")
    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        with contextlib.suppress(OSError, AttributeError):  # nobody reads it; there is none
            stream.write(words)
            stream.flush()
    os._exit(code)  # the agent's thread may still be at work, and torch takes its time to be taken down


def quiet() -> None:
    """Nothing of what torch's launcher logs is shown: the signals that it sends, the codes that it sees."""
    logger = logging.getLogger("torch.distributed")
    logger.handlers[:] = [logging.NullHandler()]
    logger.propagate = False


@contextlib.contextmanager
def files_of(args: Namespace) -> Iterator[set[str]]:
    """See to it that there is a folder for the ranks' files, `--log-dir`; yields names of files that are kept.

    A temporary folder is removed, unless one of these is in it.
    """
    temporary = args.log_dir is None
    if temporary:
        args.log_dir = tempfile.mkdtemp(prefix="launch-")
    folder, kept = Path(args.log_dir).absolute(), set()
    os.environ[LAUNCHER] = str(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield kept
    finally:
        for path in folder.iterdir() if temporary else ():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name not in kept:
                path.unlink(missing_ok=True)
        if temporary:
            with contextlib.suppress(OSError):  # something is kept
                folder.rmdir()


def parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """torchrun's command line. Raises UsageError, which argparse would say with 40 lines of usage."""

    def refuse(problem: str) -> NoReturn:
        unknown = re.match(r"(?:unrecognized arguments|ambiguous option): (--?[\w-]+)", problem)
        if unknown and (here := instead_of(unknown[1], argv)):
            raise UsageError(f"{unknown[1]} is no word of this launcher", do=here)
        problem += did_you_mean(unknown[1], parser._option_string_actions) if unknown else ""
        raise UsageError(problem, do="flags of the launcher stand before the script, and --help lists them")

    parser.add_argument("--gpus", "--devices", help="GPUs for the ranks, one each: 2,3 (PaddlePaddle's flag)")
    parser.prog, parser.description, parser.error = f"python -m {MODULE}", "Start the ranks of a job.", refuse
    args = parser.parse_args(argv)
    if args.log_dir is not None and (args.redirects, args.tee) == ("0", "0"):
        args.redirects, args.tee = (
            "3",
            "0:3",
        )  # as PaddlePaddle: the output of each rank in a file, of the first here too
    if place := re.fullmatch(r"([^:]+):(\d+)", args.master_addr):
        raise UsageError(
            f"--master-addr {place[0]}: an address without a port is wanted",
            do=f"say --master-addr {place[1]} --master-port {place[2]}",
        )
    if args.gpus is not None:
        use_gpus(args, parser.get_default("nproc_per_node"))
    if re.fullmatch(r"0+|-\d+", str(args.nproc_per_node)):
        raise UsageError(
            f"--nproc-per-node {args.nproc_per_node}: give the number of ranks on this machine, or gpu, cpu, auto"
        )
    script = args.training_script
    if not (args.module or args.no_python) and not Path(script).is_file():
        from megatron.settings.dialects.commands import here_for

        scripts = [str(path) for path in Path(script).parent.glob("*.py")]
        ours = here_for(Path(script).name)
        near = f"; here it is {ours}" if ours else did_you_mean(script, scripts)
        raise UsageError(f"{script}: no such script{near}")
    if args.no_python and shutil.which(script) is None:
        raise UsageError(f"{script}: no such program")
    return args


def instead_of(flag: str, argv: list[str]) -> str:
    """What there is for a flag of another suite's launcher; "" for a flag that none has."""
    from megatron.settings.dialects.launchers import LAUNCHERS, meeting
    from megatron.settings.sources import flags_of_words
    from megatron.settings.translate import translate

    words = [one._replace(words=one.words[:1]) for one in flags_of_words([(word, "", "") for word in argv])]
    given = next(one for one in words if one.key == flag)
    machines = [one for one in words if one.key.replace("_", "-") in ("--nnodes", "--node-rank", "--rank")]
    for launcher in LAUNCHERS:
        if translate(launcher, [given]).start:
            start = translate(launcher, [*machines, given] if given not in machines else [given]).start
            lines, told = meeting(start)
            words = " ".join(word for line in lines for word in (line.flag, *line.words))
            several = "--rdzv-endpoint" in words
            return "; ".join([f"say {words}{', the same on each machine' if several else ''}", *told])
    return ""


def use_gpus(args: Namespace, unsaid: object) -> None:
    """--gpus 2,3: the ranks see these devices, and are as many. unsaid: --nproc-per-node where nobody gives it."""
    names = [name.strip() for name in args.gpus.split(",")]
    if not args.gpus.strip():
        raise UsageError("--gpus is empty (a shell variable that is not set?)", do="--gpus 0,1,2,3")
    if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
        raise UsageError(f"--gpus {args.gpus}: numbers of different GPUs are wanted", do="--gpus 0,1,2,3")
    if args.nproc_per_node not in (unsaid, str(len(names)), "gpu", "auto"):
        count = f"{len(names)} ranks, one for each"
        raise UsageError(f"--gpus {args.gpus} is {count}, and --nproc-per-node {args.nproc_per_node} another number")
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if visible and (hidden := [name for name in names if name not in visible]):
        raise UsageError(
            f"--gpus {args.gpus}: CUDA_VISIBLE_DEVICES={','.join(visible)} does not have {', '.join(hidden)}",
            do=f"name some of these, as PaddlePaddle counts: --gpus {','.join(visible)}; or leave CUDA_VISIBLE_DEVICES out",
        )
    args.nproc_per_node, os.environ["CUDA_VISIBLE_DEVICES"] = str(len(names)), ",".join(names)


class Launch:
    """The ranks of this machine, from their start to their end.

    torch's agent works in a thread, so that signals are ours: it would raise them wherever it happens to be.
    """

    def __init__(self, args: Namespace):
        self.args, self.began = args, time.time()
        self.failures: Mapping[int, object] = {}  # rank -> torch's ProcessFailure
        self.error: Optional[BaseException] = None  # of the agent itself
        self.signals: list[int] = []  # that were handed on
        self.killed: set[int] = set()  # processes of ranks that did not end when they were told to
        self.signalled: set[int] = set()  # the ranks' processes that heard them

    def run(self) -> list[Ending]:
        """Start the ranks and wait; returns how those ended that failed. Raises Failure where they cannot be started."""
        for name in getattr(self.args, "signals_to_handle", SIGNALS).split(","):
            number = getattr(signal, name.strip(), None)
            if number is None:
                raise UsageError(f"--signals-to-handle {name}: there is no such signal")
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a shell's background jobs
                signal.signal(number, self.hand_on)
        agent = threading.Thread(target=self.work, name="agent", daemon=True)
        agent.start()
        while agent.is_alive():
            agent.join(0.1)
            if self.signals and self.all_signalled_are_gone():
                agent.join(0.0 if self.args.max_restarts else LINGER)
                break
        if agent.is_alive():  # it would start the ranks again (--max-restarts), or waits for other machines
            self.kill()
            return [self.ending_in_files()]
        if self.error is not None:
            raise failure_of(self.error)
        endings = []
        for rank, failure in self.failures.items():
            killed = failure.pid in self.killed and failure.exitcode == -signal.SIGKILL
            endings.append(Ending(rank, failure.exitcode, failure.error_file_data.get("brief", ""), killed=killed))
        return endings

    def work(self) -> None:
        """Of the thread: torch's agent, until all ranks have finished or one has failed."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            with noting_kills(self.killed, self.patience()):
                start(self.args)
        except ChildFailedError as failed:
            self.failures = failed.failures
        except BaseException as error:
            self.error = error

    # ---- signals ---------------------------------------------------------------------------------------------------

    def hand_on(self, number: int, frame) -> None:
        """Tell the ranks, each of which leads a group of its own processes."""
        ranks = processes.children(os.getpid())
        if not ranks:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        again = number == signal.SIGINT and number in self.signals
        self.signals.append(number)
        self.signalled.update(ranks)
        signal_groups(ranks, number)
        if again or number != signal.SIGINT:
            patience = AT_ONCE if again else self.patience()
            timer = threading.Timer(patience, self.kill)
            timer.daemon = True
            timer.start()

    def patience(self) -> float:
        """Seconds that ranks have to end after a signal, as torchrun gives them."""
        given = getattr(self.args, "shutdown_timeout", None)
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30") if given is None else given)

    def kill(self) -> None:
        ranks = processes.children(os.getpid())
        self.killed.update(ranks)
        signal_groups(ranks, signal.SIGKILL)

    def all_signalled_are_gone(self) -> bool:
        return not self.signalled.intersection(processes.children(os.getpid()))

    # ---- the end ---------------------------------------------------------------------------------------------------

    def ending_in_files(self) -> Ending:
        """How the job ended that was told to, where the agent has not said so: as one of the ranks has written."""
        files = sorted(Path(self.args.log_dir).glob("*/attempt_*/*/error.json"), key=os.path.getmtime)
        files = [path for path in files if path.stat().st_mtime >= self.began - 1]  # not of a run before
        with contextlib.suppress(OSError, ValueError, LookupError):
            words = json.loads(files[-1].read_text())
            return Ending(int(files[-1].parent.name), words["code"], words["brief"], words["told"])
        return Ending(0, -self.signals[-1], "")

    def last_words(self, endings: Iterable[Ending]) -> tuple[str, int, int]:
        """(what is printed, the exit code, whose it is): of the rank that says most about the cause.

        Ranks that the launcher has killed itself are named beside it: the others waited for them, as a rule.
        """
        endings = sorted(endings, key=lambda ending: ending.rank)
        killed = [ending.rank for ending in endings if ending.killed]
        left = [ending for ending in endings if not ending.killed] or endings
        code = judge(ending.code for ending in left).code
        rank, _, said, told, _ = min(
            (ending for ending in left if ending.code == code),
            key=lambda ending: (not ending.said, FOR_ANOTHER not in ending.said),
        )
        if signal.SIGINT in self.signals and not said:
            said, code = "interrupted: ended at once, nothing was saved\n", Interrupted.code
        elif killed and left is endings:
            said = f"error: {not_answered(killed, self.patience())}\n"
        elif not told:
            saves = "--exit-signal-handler" in [word.replace("_", "-") for word in self.args.training_script_args]
            said = said or unsaid(rank, code, bool(self.signals), last_checkpoint_of(self.args), saves)
            said = with_reason(said, not_answered(killed, self.patience())) if killed else said
        return "" if told else said, code if code >= 0 else 128 - code, rank


def start(args: Namespace) -> None:
    """What `torchrun` does with its arguments. Raises ChildFailedError where a rank fails."""
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    one_machine = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    unsaid = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (one_machine and unsaid):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    threads = os.environ.get("OMP_NUM_THREADS")
    config, program, words = torchrun.config_from_args(args)
    if threads is None:  # torchrun makes it 1; ranks share the cores themselves (mpu.initialize)
        os.environ.pop("OMP_NUM_THREADS", None)
    elastic_launch(config, program)(*words)


def failure_of(error: BaseException) -> BaseException:
    """An error of the agent in words, as far as the user can have caused it."""
    if explain(error):
        return explain(error)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "Rendezvous" in type(error).__name__ or "Dist" in type(error).__name__:
        return PeerLost(
            "the machines of the job did not find each other", text, "check --rdzv-endpoint or --master-addr"
        )
    if isinstance(error, (ValueError, AssertionError, RuntimeError)):
        return SettingsError(f"the ranks cannot be started: {text}", do=f"python -m {MODULE} --help")
    return error


@contextlib.contextmanager
def noting_kills(killed: set[int], patience: float) -> Iterator[None]:
    """Inside, torch's agent leaves here the processes that it kills because they did not end at SIGTERM.

    patience: seconds that it gives them; its own are 30 where a rank has failed, whatever --shutdown-timeout says
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    close_all, close = SubprocessContext._close, SubprocessHandler.close

    def patient(context, death_sig, timeout=30) -> None:
        close_all(context, death_sig, patience)

    def noted(handler, death_sig=None) -> None:
        if death_sig == signal.SIGKILL:
            killed.add(handler.proc.pid)
        close(handler, death_sig)

    SubprocessContext._close, SubprocessHandler.close = patient, noted
    try:
        yield
    finally:
        SubprocessContext._close, SubprocessHandler.close = close_all, close


def not_answered(ranks: list[int], seconds: float) -> str:
    """
    >>> not_answered([1], 30)
    'rank 1 did not answer SIGTERM within 30 s and was killed by the launcher: it was stopped or hangs'
    """
    one = len(ranks) == 1
    who, were, hang = ("rank", "was", "it was stopped or hangs") if one else ("ranks", "were", "stopped, or they hang")
    return f"{who} {spans(ranks)} did not answer SIGTERM within {seconds:g} s and {were} killed by the launcher: {hang}"


def with_reason(said: str, reason: str) -> str:
    """A message with one more line, before the one that says what to do."""
    lines = said.rstrip("\n").split("\n")
    at = len(lines) - (len(lines) > 1 and lines[-1].startswith("  -> "))
    return "\n".join([*lines[:at], f"  {reason}", *lines[at:]]) + "\n"


def last_checkpoint_of(args: Namespace) -> Optional[str]:
    """Where the job has its newest complete checkpoint, as far as its command line says."""
    words = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
    with contextlib.suppress(Failure, OSError):  # a script that is none of ours
        config = config_of(words)
        return config and last_checkpoint(config.checkpoint)
    return None


CRASH = "a crash in compiled code"
# signal that has ended a rank -> what may have been the cause
CAUSES = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"), f"{CRASH}: PYTHONFAULTHANDLER=1 shows where") | dict(
    SIGKILL="if nobody has sent it, memory has run out: dmesg | grep -i oom",
    SIGABRT=f"{CRASH} (PYTHONFAULTHANDLER=1 shows where), or NCCL's watchdog, which says above that\n"
    "     a rank has waited for another for longer than --distributed-timeout-minutes",
)


def unsaid(rank: int, code: int, asked: bool, saved: Optional[str] = None, saves: bool = False) -> str:
    """What is said of a rank that has left no message. asked: the ranks were told to end; saved: the last checkpoint.

    saves: --exit-signal-handler is given
    """
    if code >= 0:
        return (
            f"error: rank {rank} ended with exit code {code} and left no message\n"
            "  -> see above; a script that runs its main through megatron.errors.run_main is told here\n"
        )
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = CAUSES.get(name)
    if asked and name == "SIGTERM":
        early = "the ranks were still starting: --exit-signal-handler works from the first step on"
        hint = early if saves else "with --exit-signal-handler the ranks save first"
    where = f"  the last checkpoint: {saved}\n" if saved else ""
    return f"error: rank {rank} was ended by {name}\n{where}" + (f"  -> {hint}\n" if hint else "")


def signal_groups(ranks: Iterable[int], number: int) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)


if __name__ == "__main__":
    run_main(main)
