# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a job on this machine, with torchrun's flags and torch's elastic agent, and report how they end.

    python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py --num-layers 4 ...
    python -m megatron.tools.launch --gpus 2,3 pretrain_gpt.py ...
    python -m megatron.tools.launch --nnodes 2 --node-rank 0 --master-addr node0 --nproc-per-node 8 pretrain_gpt.py ...

torchrun ends with its own traceback, a table of all ranks and exit code 1. This ends with the message of the rank that is
most informative about the cause, once, in at most 12 lines and after all other output. The exit code is that rank's
(`megatron.errors`), or 128 + N if signal N ended it. Longer text, such as tracebacks, is kept in a file.

Ctrl-C is forwarded to the ranks, which save and stop, without a time limit. A second Ctrl-C ends them immediately.
SIGTERM, SIGHUP and SIGQUIT are forwarded too, and ranks that do not end are killed after --shutdown-timeout.
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
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn, Optional

from megatron.errors import (
    LAUNCHER,
    Failure,
    Interrupted,
    Locked,
    PeerLost,
    SettingsError,
    UsageError,
    did_you_mean,
    explain,
    run_main,
)
from megatron.guard import processes
from megatron.guard.command import config_of, file_of, trains, value_of
from megatron.guard.exits import FOR_ANOTHER, judge, to_shell
from megatron.guard.node_rendezvous import NodeRendezvous
from megatron.guard.resume_command import COMMAND, last_checkpoint, module_command
from megatron.guard.stacks import spans
from megatron.guard.supervisor_mark import SUPERVISOR
from megatron.settings.messages import replaced
from megatron.settings.schema import Config
from megatron.telemetry.events import QUIET, read_events

MODULE = "megatron.tools.launch"
SECOND_CTRL_C = 2.0  # seconds that ranks have to end after the second Ctrl-C
LINGER = 2.0  # seconds that the agent has to notice that all ranks have ended
SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # for versions of torch without --signals-to-handle
LOUD = ("LOGLEVEL", "TORCHELASTIC_LOG_LEVEL", "TORCH_LOGS")  # if one is set, the agent's log is shown


class Ending(NamedTuple):
    """The end of a rank that did not finish."""

    rank: int
    code: int  # negative: by a signal
    message: str  # the part to print; "": the rank left none
    printed: bool = False  # the rank has printed it itself
    killed: bool = False  # by this launcher, so it is not the cause


def main(argv: list[str]) -> None:
    """Parse, start the ranks, wait for their end; exits with 0, or the code of the failed rank that names the cause."""
    from torch.distributed import run as torchrun

    if not any(os.environ.get(name) for name in LOUD):
        quiet()
    args = parse(torchrun.get_args_parser(), argv)
    os.environ.setdefault(COMMAND, module_command(argv, MODULE))  # a supervisor's comes first
    args.training_script_args = saving_at_sigterm(args.training_script, args.training_script_args, args.module)
    with files_of(args) as kept:
        job = Launch(args)
        try:
            endings = job.run()
        except BaseException:  # a signal during the start
            job.kill()
            raise
        text, code, rank = job.last_words(endings) if endings else ("", 0, 0)
        job.end_logs(endings, text, rank)
        record_cause(args, job.began, text, code, rank)
        kept.add(f"rank_{rank}.txt")
    for stream, words in ((sys.stdout, ""), (sys.stderr, text)):
        with contextlib.suppress(OSError, AttributeError):  # closed, or None
            stream.write(words)
            stream.flush()
    os._exit(code)  # the agent's thread may still run, and torch's teardown is slow


def quiet() -> None:
    """Hide the log of torch's launcher: the signals that it sends, the exit codes that it sees."""
    logger = logging.getLogger("torch.distributed")
    logger.handlers[:] = [logging.NullHandler()]
    logger.propagate = False


@contextlib.contextmanager
def files_of(args: Namespace) -> Iterator[set[str]]:
    """Create the folder for the ranks' files, `--log-dir`; yields a set for names of files to keep.

    A temporary folder is removed, unless it has one of these.
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
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()


def parse(parser: ArgumentParser, argv: list[str]) -> Namespace:
    """Parse torchrun's command line. Raises UsageError instead of argparse's 40 lines of usage."""

    def refuse(problem: str) -> NoReturn:
        unknown = re.match(r"(?:unrecognized arguments|ambiguous option): (--?[\w-]+)", problem)
        if unknown and (here := instead_of(unknown[1], argv)):
            raise UsageError(f"{unknown[1]} is no word of this launcher", do=here)
        problem += did_you_mean(unknown[1], parser._option_string_actions) if unknown else ""
        raise UsageError(problem, do="flags of the launcher stand before the script, and --help lists them")

    heard: list[tuple[str, str]] = []  # (flag, its words) of each option, as often as it is given
    values_of = parser._get_values

    def hear(action: Action, words: list[str]) -> object:
        if action.option_strings:
            flag = max(action.option_strings, key=len).replace("_", "-")
            heard.append((flag, " ".join([flag, *words])))
        return values_of(action, words)

    parser._get_values = hear
    parser.add_argument("--gpus", "--devices", help="GPUs for the ranks, one each: 2,3 (PaddlePaddle's flag)")
    parser.prog, parser.description, parser.error = f"python -m {MODULE}", "Start the ranks of a job.", refuse
    args = parser.parse_args(argv)
    last = dict(heard)
    for note in replaced([(words, last[flag]) for flag, words in heard if words != last[flag]]):
        print(f"note: {note}", file=sys.stderr)
    # As in PaddlePaddle: each rank's output in a file, and the first rank's here too
    args.worker_logs = args.log_dir is not None and (args.redirects, args.tee, args.logs_specs) == ("0", "0", None)
    if args.worker_logs:
        args.redirects, args.tee = "3", "0:3"
    if place := re.fullmatch(r"([^:]+):(\d+)", args.master_addr):
        raise UsageError(
            f"--master-addr {place[0]}: an address without a port is wanted",
            do=f"say --master-addr {place[1]} --master-port {place[2]}",
        )
    if args.gpus is not None:
        use_gpus(args, "--nproc-per-node" in last)
    if re.fullmatch(r"0+|-\d+", str(args.nproc_per_node)):
        raise UsageError(
            f"--nproc-per-node {args.nproc_per_node}: give the number of ranks on this machine, or gpu, cpu, auto"
        )
    if args.no_python and shutil.which(args.training_script) is None:
        raise UsageError(f"{args.training_script}: no such program")
    if not (args.module or args.no_python):
        args.training_script = script_of(args.training_script)
    return args


def script_of(script: str) -> str:
    """The path of a script: here, or of an entry script that is installed (finetune.py in any folder)."""
    if Path(script).is_file():
        return script
    if trains(script):
        return str(file_of(script))
    from megatron.settings.dialects.commands import here_for

    scripts = [str(path) for path in Path(script).parent.glob("*.py")]
    ours = here_for(Path(script).name)
    near = f"; here it is {ours}" if ours else did_you_mean(script, scripts)
    raise UsageError(f"{script}: no such script{near}")


def saving_at_sigterm(script: str, words: list[str], is_module: bool = False) -> list[str]:
    """The flags of a training of this suite with --exit-signal-handler, unless they say something about it.

    So SIGTERM to the launcher saves, as Ctrl-C does: it comes from `kill`, systemd, docker stop and schedulers. A training
    is a script or module that imports `megatron.entry`: those of the suite, and a user's own.
    """
    said = any("exit-signal-handler" in word.replace("_", "-") for word in words)
    return [*words, "--exit-signal-handler"] if trains(script, is_module) and not said else words


def instead_of(flag: str, argv: list[str]) -> str:
    """The equivalent of a flag of another suite's launcher; "" for an unknown flag."""
    from megatron.settings.dialects.launchers import LAUNCHERS, meeting
    from megatron.settings.dialects.shell import flags_of_words
    from megatron.settings.dialects.translate import translate

    words = [one._replace(words=one.words[:1]) for one in flags_of_words([(word, "", "") for word in argv])]
    given = next(one for one in words if one.key == flag)
    machines = [one for one in words if one.key.replace("_", "-") in ("--nnodes", "--node-rank", "--rank")]
    for launcher in LAUNCHERS:
        if translate(launcher, [given]).start:
            start = translate(launcher, [*machines, given] if given not in machines else [given]).start
            lines, missing = meeting(start)
            words = " ".join(word for line in lines for word in (line.flag, *line.words))
            several = "--rdzv-endpoint" in words
            return "; ".join([f"say {words}{', the same on each machine' if several else ''}", *missing])
    return ""


def use_gpus(args: Namespace, counted: bool) -> None:
    """Apply --gpus 2,3: one rank for each of these devices. counted: --nproc-per-node is given, too."""
    names = [name.strip() for name in args.gpus.split(",")]
    if not args.gpus.strip():
        raise UsageError("--gpus is empty (a shell variable that is not set?)", do="--gpus 0,1,2,3")
    if not all(name.isdecimal() for name in names) or len(set(names)) < len(names):
        raise UsageError(f"--gpus {args.gpus}: numbers of different GPUs are wanted", do="--gpus 0,1,2,3")
    if counted and args.nproc_per_node not in (str(len(names)), "gpu", "auto"):
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

    torch's agent runs in a thread, so that this handles signals: the agent would raise them at any point.
    """

    def __init__(self, args: Namespace):
        self.args, self.began = args, time.time()
        self.failures: Mapping[int, object] = {}  # rank -> torch's ProcessFailure
        self.error: Optional[BaseException] = None  # of the agent itself
        self.logs = None  # `guard.worker_logs.WorkerLogs`, with --log-dir alone
        self.signals: list[int] = []  # that were forwarded
        self.killed: set[int] = set()  # rank processes that did not end at a signal
        self.signalled: set[int] = set()  # rank processes that got a signal

    def run(self) -> list[Ending]:
        """Start the ranks and wait; returns the endings of failed ranks. Raises Failure if they cannot be started."""
        for name in getattr(self.args, "signals_to_handle", SIGNALS).split(","):
            number = getattr(signal, name.strip(), None)
            if number is None:
                raise UsageError(f"--signals-to-handle {name}: there is no such signal")
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, a shell's background jobs
                signal.signal(number, self.forward)
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
        """The thread's body: run torch's agent until all ranks have finished or one has failed."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            with recording_kills(self.killed, self.patience()):
                start(self)
        except ChildFailedError as failed:
            self.failures = failed.failures
        except BaseException as error:
            self.error = error

    # ---- signals ---------------------------------------------------------------------------------------------------

    def forward(self, number: int, frame) -> None:
        """Send the signal to the ranks' process groups."""
        ranks = processes.children(os.getpid())
        if not ranks:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        again = number == signal.SIGINT and number in self.signals
        self.signals.append(number)
        self.signalled.update(ranks)
        processes.signal_groups(ranks, number)
        if again or number != signal.SIGINT:
            patience = SECOND_CTRL_C if again else self.patience()
            timer = threading.Timer(patience, self.kill)
            timer.daemon = True
            timer.start()

    def patience(self) -> float:
        """Seconds that ranks have to end after a signal, as in torchrun."""
        given = getattr(self.args, "shutdown_timeout", None)
        return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30") if given is None else given)

    def kill(self) -> None:
        ranks = processes.children(os.getpid())
        self.killed.update(ranks)
        processes.signal_groups(ranks, signal.SIGKILL)

    def all_signalled_are_gone(self) -> bool:
        return not self.signalled.intersection(processes.children(os.getpid()))

    # ---- the end ---------------------------------------------------------------------------------------------------

    def ending_in_files(self) -> Ending:
        """How a job that got a signal has ended, from the error file of a rank: the agent has not reported it."""
        files = sorted(Path(self.args.log_dir).glob("*/attempt_*/*/error.json"), key=os.path.getmtime)
        files = [path for path in files if path.stat().st_mtime >= self.began - 1]  # not of an earlier run
        with contextlib.suppress(OSError, ValueError, LookupError):
            words = json.loads(files[-1].read_text())
            return Ending(int(files[-1].parent.name), words["code"], words["brief"], words["told"])
        return Ending(0, -self.signals[-1], "")

    def end_logs(self, endings: Iterable[Ending], text: str, rank: int) -> None:
        """Write the messages of failed ranks, of which `rank`'s is printed here as `text`, to their own files, too."""
        if self.logs is None:
            return
        for one in endings:
            own = text if one.rank == rank else one.message
            self.logs.add(one.rank, "" if one.printed else own)
        shutil.rmtree(self.logs.folder, ignore_errors=True)

    def last_words(self, endings: Iterable[Ending]) -> tuple[str, int, int]:
        """(text to print, exit code, rank) of the rank that is most informative about the cause.

        Ranks that the launcher itself has killed are named too: usually, the others waited for them.
        """
        endings = sorted(endings, key=lambda ending: ending.rank)
        killed = [ending.rank for ending in endings if ending.killed]
        left = [ending for ending in endings if not ending.killed] or endings
        code = judge(ending.code for ending in left).code
        rank, _, message, printed, _ = min(
            (ending for ending in left if ending.code == code),
            key=lambda ending: (not ending.message, FOR_ANOTHER not in ending.message),
        )
        if signal.SIGINT in self.signals and not message:
            message, code = "interrupted: ended immediately, nothing was saved\n", Interrupted.code
        elif killed and left is endings:
            message = f"error: {not_answered(killed, self.patience())}\n"
        elif not printed:
            saves = "--exit-signal-handler" in [word.replace("_", "-") for word in self.args.training_script_args]
            checkpoint = last_checkpoint_of(self.args)
            message = message or default_message(rank, code, bool(self.signals), checkpoint, saves)
            message = with_reason(message, not_answered(killed, self.patience())) if killed else message
        return "" if printed else message, to_shell(code), rank


def start(job: Launch) -> None:
    """Run what `torchrun` runs for its arguments. Raises ChildFailedError if a rank fails."""
    from torch.distributed import run as torchrun
    from torch.distributed.launcher.api import elastic_launch

    from megatron.guard.worker_logs import WorkerLogs, one_file_for_both

    args = job.args
    one_machine = torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1
    default = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (one_machine and default):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = 29500
    threads = os.environ.get("OMP_NUM_THREADS")
    config, program, words = torchrun.config_from_args(args)
    if threads is None:  # torchrun sets it to 1; ranks divide the cores themselves (mpu.initialize)
        os.environ.pop("OMP_NUM_THREADS", None)
    store = None  # of node 0, for all
    if args.rdzv_backend == "static" and config.max_nodes > 1 and not args.rdzv_endpoint:
        place, patience = (args.master_addr, args.master_port, args.node_rank), patience_of(args.training_script_args)
        note = lambda text: print(f"note: {text}", file=sys.stderr, flush=True)
        store = NodeRendezvous(*place, config.max_nodes, patience, note).join()
    if args.worker_logs:
        job.logs = config.logs_specs = WorkerLogs(args.log_dir, config.logs_specs)
    with one_file_for_both() if args.worker_logs else contextlib.nullcontext():
        elastic_launch(config, program)(*words)
    del store


def patience_of(words: list[str], default: float = 600.0) -> float:
    """Seconds that nodes wait for each other: what the ranks do, --distributed-timeout-minutes.

    >>> patience_of(["--lr", "1", "--distributed_timeout_minutes=0.5"]), patience_of([])
    (30.0, 600.0)
    """
    given = value_of(words, "--distributed-timeout-minutes")
    try:
        return default if given is None else 60 * float(given)
    except ValueError:  # the ranks say so
        return default


def failure_of(error: BaseException) -> BaseException:
    """Convert an error of the agent to a message, if the user may have caused it."""
    if explain(error):
        return explain(error)
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "EADDRINUSE" in text:
        port = re.search(r"port: (\d+)", text)
        words = f"--master-port {port[1]}" if port else "--master-port"
        return PeerLost(  # a supervisor tries again: a job that ends may still hold it
            f"{words}: another process uses this port", None, "give a free one; a job on one machine needs none"
        )
    if "Rendezvous" in type(error).__name__ or "Dist" in type(error).__name__:
        return PeerLost(
            "the machines of the job did not find each other", text, "check --rdzv-endpoint or --master-addr"
        )
    if isinstance(error, (ValueError, AssertionError, RuntimeError)):
        return SettingsError(f"the ranks cannot be started: {text}", do=f"python -m {MODULE} --help")
    return error


@contextlib.contextmanager
def recording_kills(killed: set[int], patience: float) -> Iterator[None]:
    """Record the processes that torch's agent kills because they did not end at SIGTERM.

    patience: seconds before it kills them; torch's own 30 after a failed rank ignore --shutdown-timeout
    """
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    close_all, close = SubprocessContext._close, SubprocessHandler.close

    def patient(context, death_sig, timeout=30) -> None:
        close_all(context, death_sig, patience)

    def recorded(handler, death_sig=None) -> None:
        if death_sig == signal.SIGKILL:
            killed.add(handler.proc.pid)
        close(handler, death_sig)

    SubprocessContext._close, SubprocessHandler.close = patient, recorded
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


def with_reason(message: str, reason: str) -> str:
    """Add a line to a message, before the one that says what to do."""
    lines = message.rstrip("\n").split("\n")
    at = len(lines) - (len(lines) > 1 and lines[-1].startswith("  -> "))
    return "\n".join([*lines[:at], f"  {reason}", *lines[at:]]) + "\n"


def config_of_job(args: Namespace) -> Optional[Config]:
    """The job's settings, according to its command line; None for a script that is not of this suite."""
    words = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
    with contextlib.suppress(Failure, OSError):
        return config_of(words)
    return None


def last_checkpoint_of(args: Namespace) -> Optional[str]:
    """The path of the job's newest complete checkpoint, according to its command line."""
    with contextlib.suppress(Failure, OSError):
        config = config_of_job(args)
        return config and last_checkpoint(config.checkpoint)
    return None


def record_cause(args: Namespace, began: float, text: str, code: int, rank: int) -> None:
    """Record the end of a failed rank as the run's end, if the first rank has recorded none, or only that another is gone.

    So `tools.status` and events.jsonl say what this launcher prints. A supervisor records it itself.
    began: when the ranks were started; text: the message of the rank
    """
    if not text or code in (*QUIET, PeerLost.code, Locked.code) or SUPERVISOR in os.environ:
        return
    from megatron.telemetry.metrics import metrics_path
    from megatron.telemetry.notify import open_events
    from megatron.telemetry.run_folder import events_path

    with contextlib.suppress(Failure, OSError):
        config = config_of_job(args)
        path = config and events_path(metrics_path(config.logging, config.checkpoint.save))
        own = [event for event in read_events(path) if event["time"] >= began] if path else []
        ends = [event for event in own if event["event"] in ("start", "end")]
        if not ends or ends[-1].get("code", PeerLost.code) != PeerLost.code:  # of another launch; or it knows the cause
            return
        why = text.splitlines()[0].removeprefix("error: ")
        events = open_events(config.logging, config.checkpoint.save, source="launcher")
        more = dict(iteration=ends[-1]["iteration"], rank=rank, level="error")
        events.record("end", f"ended with exit code {code}: {why}", code=code, why=why, **more)
        events.close()


CRASH = "a crash in compiled code"
# signal that has ended a rank -> possible cause
CAUSES = dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE"), f"{CRASH}: PYTHONFAULTHANDLER=1 shows where") | dict(
    SIGKILL="if nobody has sent it, memory has run out: dmesg | grep -i oom",
    SIGABRT=f"{CRASH} (PYTHONFAULTHANDLER=1 shows where), or NCCL's watchdog, which says above that\n"
    "     a rank has waited for another for longer than --distributed-timeout-minutes",
)


def default_message(rank: int, code: int, asked: bool, saved: Optional[str] = None, saves: bool = False) -> str:
    """The message for a rank that left none.

    asked: a signal asked the ranks to end; saved: the last checkpoint; saves: --exit-signal-handler is given
    """
    if code >= 0:
        return (
            f"error: rank {rank} ended with exit code {code} and left no message\n"
            "  -> see above; a script that runs its main through megatron.errors.run_main is reported here\n"
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


if __name__ == "__main__":
    run_main(main)
