# SPDX-License-Identifier: Apache-2.0
"""Supervise a training job: watch its ranks, report why it hangs, restart it from its last checkpoint.

    python -m megatron.tools.supervise --max-restarts 20 -- torchrun --nproc-per-node 8 pretrain_gpt.py --save ckpt ...

The kind of a failure decides what follows (`guard.failure_kinds`, --on-failure): errors in settings, data or checkpoints
stop it (they would repeat), lost processes and storage are retried, a preempted job is left to be resumed. A lost GPU, or
a job that no longer starts, is a node's fault: nodes are checked, and the job goes on without those that fail, on spare
ones, on fewer, or in the queue. It
resumes from its --save: --load is set to that as soon as it holds a checkpoint. With --min-world-size a job that
repeatedly loses a rank continues with fewer, at the same global batch. At the end an account of the time is logged.
Exit code 0: the job has finished; else that of the job.

Under SLURM it replaces the batch script, and srun is part of the command (docs/survival.md):

    exec python -m megatron.tools.supervise --on-preempt requeue --heartbeat-dir SHARED/beats -- \\
        srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 ... pretrain_gpt.py --save ckpt ...
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Optional

from megatron.errors import (
    DeviceLost,
    Interrupted,
    PeerLost,
    Preempted,
    SettingsError,
    SilentError,
    StorageError,
    UsageError,
    did_you_mean,
    node_name,
    run_main,
)
from megatron.guard import command as commands
from megatron.guard.attempt_watch import AttemptWatch, WatchLimits, log
from megatron.guard.beat_files import in_memory, machine, remove_if_left
from megatron.guard.exits import Action, JobVerdict, to_shell
from megatron.guard.failure_kinds import FailureKind
from megatron.guard.goodput import Attempt, account, in_words
from megatron.guard.node_agreement import NodeAgreement, own_address
from megatron.guard.nodes import Nodes
from megatron.guard.rerun import MEMORY, named_ranks
from megatron.guard.resume_command import COMMAND, has_snapshots, module_command, resumed
from megatron.guard.supervisor_mark import NAME, REFRESH, SUPERVISOR, Mark, lost_supervisor
from megatron.planner.replan import QUEUED, JobPlacement
from megatron.settings.declare import dashed
from megatron.settings.parse import parse
from megatron.settings.schema import Logging, setting
from megatron.storage.processes import adopt_orphans, process_start_ticks, shared_memory
from megatron.storage.urls import local_folder, location
from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import read_events
from megatron.telemetry.figures import duration
from megatron.telemetry.history import History, read_end
from megatron.telemetry.metrics import metrics_path
from megatron.telemetry.notify import open_events
from megatron.telemetry.run_folder import newest_checkpoint

FRESH_START = 600.0  # seconds of an attempt after which the back-off is reset
COMMAND_ERRORS = (UsageError.code, SettingsError.code)  # that cannot be, where the same command has trained
EXCLUDING = 60.0  # seconds for --exclude-command


@dataclass(frozen=True)
class SuperviseOptions:
    """Limits and options of the supervisor."""

    max_restarts: int = setting("restarts before giving up", 10)
    hang_timeout: float = setting(
        "seconds of silence of a rank that make a hang (or 5 x the usual length of its phase, if that is longer)", 300.0
    )
    start_timeout: float = setting("the same until a rank has made its first step", 1800.0)
    min_world_size: Optional[int] = setting(
        "continue with fewer ranks, at least this many, after a rank is lost twice in a row", None
    )
    min_nodes: Optional[int] = setting(
        "continue on fewer nodes, at least this many, after one has failed and no spare is left", None
    )
    spare_nodes: int = setting(
        "nodes that the job leaves idle; one takes the place of a node that fails. With srun: of the SLURM allocation; "
        "without it, their supervisors wait, with --node-rank from --nnodes on",
        0,
    )
    node_timeout: float = setting(
        "seconds without a sign of a node's supervisor after which its node is lost (--spare-nodes, --min-nodes, without "
        "srun)",
        60.0,
    )
    node_check: Optional[str] = setting(
        "shell command that fails on a node which cannot train; it runs on each node, before the first attempt too "
        "(default: megatron.tools.doctor --node, after a device was lost)",
        None,
    )
    bad_nodes: Optional[str] = setting(
        "file with the names of nodes that failed, which a requeued job does not get (default: bad_nodes under --save)",
        None,
    )
    same_step_limit: int = setting("crashes at one step after which the job is stopped: it would crash again", 3)
    backoff: float = setting("seconds before the first restart; twice as long before each next one, at most 60", 1.0)
    grace: float = setting("seconds that the job has to save after SIGTERM or SIGUSR1", 120.0)
    on_preempt: Literal["stop", "requeue"] = setting(
        "when the job was preempted: stop, or put it back in SLURM's queue", "stop"
    )
    on_failure: Optional[list[str]] = setting(
        "what follows a kind of failure, as KIND=ACTION: kinds are command, data, memory, device, network, disk, code, "
        "numerics, silent-error, host, actions are restart, replace (check the nodes, and restart) and stop",
        None,
    )
    exclude_command: Optional[str] = setting(
        "shell command that runs when nodes are excluded, with NODES and WHY in its environment", None
    )
    heartbeat_dir: Optional[str] = setting(
        "folder of the ranks' heartbeats; with ranks on other machines one that all "
        "of them see (default: a temporary one in memory)",
        None,
    )
    log_dir: Optional[str] = setting(
        "folder for the job's output, an attempt a file, and the account (default: supervise under the job's --save)",
        None,
    )
    poll: float = setting("seconds between two looks at the job", 0.5)


def main(argv: list[str]) -> None:
    """Parse, run the job to its end, report."""
    if "--" not in argv:
        # Ends at --help
        parse(argv, {"supervise": SuperviseOptions}, prog=PROG, description=DESCRIPTION, common=COMMON)
        raise UsageError("the command to supervise is missing", do="supervise ... -- torchrun ... pretrain_gpt.py ...")
    split = argv.index("--")
    settings = parse(argv[:split], {"supervise": SuperviseOptions}, prog=PROG, description=DESCRIPTION, common=COMMON)
    if not argv[split + 1 :]:
        raise UsageError("there is no command after --")
    os.environ.setdefault(COMMAND, module_command(argv, "megatron.tools.supervise"))
    code = Supervisor(settings["supervise"], argv[split + 1 :]).run()
    if code:
        sys.exit(code)


PROG = "python -m megatron.tools.supervise"
DESCRIPTION = "Keep a training job going: watch, explain, restart, account. The job's command comes after --."
COMMON = tuple(SuperviseOptions.__dataclass_fields__)


class Supervisor:
    """A job over all its attempts."""

    def __init__(self, settings: SuperviseOptions, command: list[str]):
        check(settings, command)
        self.settings, self.rules = settings, failure_rules(settings.on_failure or [])
        self.began = time.monotonic()
        config = commands.config_of(command)
        self.save = config.checkpoint.save if config else commands.value_of(command, "--save")
        self.others = (config.checkpoint.save_mirror, config.checkpoint.save_copy) if config else ()
        self.logging = config.logging if config else logging_of(command)
        self.metrics = metrics_path(self.logging, self.save)
        self.events = open_events(self.logging, self.save, log=log, source="supervisor")
        self.beats = Path(settings.heartbeat_dir) if settings.heartbeat_dir else heartbeat_folder()
        self.logs = log_folder(settings.log_dir, self.save)
        for folder in (self.beats, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        given = config.guard.flight_recorder_dump_path if config else None
        self.traces = Path(given or self.logs.absolute() / "flight_recorder")
        self.limits = WatchLimits(settings.hang_timeout, settings.start_timeout, settings.grace, settings.poll)
        kept = settings.bad_nodes or (local_folder(self.save) / "bad_nodes" if self.save else None)
        self.place = JobPlacement(
            command,
            Nodes(settings.node_check, kept and Path(kept)),
            settings.min_world_size,
            settings.min_nodes,
            settings.spare_nodes,
            settings.on_preempt == "requeue",
            log,
        )
        self.agreement = self.agreement_of(command) if self.place.is_one_of_several else None
        self.attempts: list[Attempt] = []
        self.watch: Optional[AttemptWatch] = None  # of the present attempt
        self.asked_to_stop: Optional[int] = None
        self.delay, self.change = settings.backoff, ""  # what the next attempt does otherwise
        self.mark, self.mark_path, self.refreshed = Mark.own(), self.logs / NAME, time.monotonic()
        self.old_events = size_of(self.events.path)

    # ---- the whole job ---------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run attempts until the job is done or another one is pointless. Returns the exit code."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        log(f"watching {self.beats}, logs in {self.logs}")
        self.leave_mark()
        if self.save is None:
            log("the command has no --save, as far as can be seen from here: each attempt begins as the first one does")
        try:
            if self.settings.node_check and (bad := self.place.failing()):
                if outcome := self.go_on_without(bad):
                    return self.report(outcome, JobVerdict(Action.STOP, outcome, DeviceLost.code))
            while True:
                if self.agreement and (ended := self.meet()):
                    return self.report(*ended)
                verdict = self.attempt()
                if self.asked_to_stop and verdict.action is Action.RESTART:  # for example, it had nothing to save yet
                    code = Interrupted.code if self.asked_to_stop == signal.SIGINT else Preempted.code
                    verdict = JobVerdict(Action.PREEMPTED, verdict.cause, code)
                outcome = self.end_of_job(verdict)
                if outcome:
                    return self.report(outcome, verdict)
                self.wait_before_restart()
                if self.asked_to_stop:
                    return self.report("stopped between two attempts", JobVerdict(Action.PREEMPTED, "", 9))
        finally:
            self.events.close()
            if self.settings.heartbeat_dir is None:
                shutil.rmtree(self.beats, ignore_errors=True)

    def agreement_of(self, command: list[str]) -> NodeAgreement:
        """This supervisor among those of the other nodes. Raises SettingsError if they cannot see each other's files."""
        settings = self.settings
        if settings.heartbeat_dir is None or in_memory(self.beats):
            raise SettingsError(
                "--spare-nodes and --min-nodes without srun need a folder that all nodes see"
                + f": {self.beats} lies in this node's memory" * (settings.heartbeat_dir is not None),
                do="--heartbeat-dir FOLDER, the same on all nodes, of a file system that they share",
            )
        master = commands.value_of(command, *commands.MASTER)
        return NodeAgreement(
            self.beats / "agreement",
            int(commands.value_of(command, *commands.NODE_RANK)),
            commands.shape_of(command)[0],
            self.place.usable_nodes,
            settings.node_timeout,
            settings.start_timeout,
            log,
            address=lambda: own_address(master),
        )

    def meet(self) -> Optional[tuple[str, JobVerdict]]:
        """Agree with the other supervisors on the next attempt, and take a place in it. Returns how the job has ended."""
        agreement, began = self.agreement, time.monotonic()
        agreement.excluded = tuple(self.place.nodes.excluded)
        try:
            place = agreement.meet(lambda: self.asked_to_stop)
        except PeerLost as lost:
            why = str(lost).splitlines()[0]
            return f"given up: {why}", JobVerdict(Action.STOP, why, PeerLost.code, FailureKind.HOST)
        if self.attempts:
            self.attempts[-1].waited += time.monotonic() - began
        if place is None:
            outcome, code = agreement.outcome
            if not outcome:
                code = Interrupted.code if self.asked_to_stop == signal.SIGINT else Preempted.code
                return "stopped while it waited for other nodes", JobVerdict(Action.PREEMPTED, "", code)
            return f"ended with {outcome}", JobVerdict(Action.STOP if code else Action.DONE, outcome, code)
        self.place.take(place.rank, place.nodes, None if place.is_first else place.address)
        names = " ".join(name for _, name, _, _ in agreement.agreed.nodes)
        log(f"node {place.rank} of {place.nodes}: {names}")
        if place.change and place.rank == 0:
            fewer = place.nodes < agreement.wanted
            action = "fewer" if fewer else "spare"
            message, gone, ranks = f"the job goes on {place.change}", list(place.gone), self.place.ranks
            self.events.record("node_excluded", message, nodes=gone, why=place.change, action=action, ranks=ranks)
        return None

    def leave_mark(self, ended: Optional[str] = None) -> None:
        """Write the mark of this supervisor, by which others see that it lives, or how it ended."""
        if ended is None and (before := lost_supervisor(self.mark_path)):
            said = [event for event in self.past_events(before.began) if event["event"] == "supervisor_lost"]
            if not said:
                message = f"the supervisor before this one ({before}) was killed"
                self.events.record("supervisor_lost", message, supervisor=str(before))
        with contextlib.suppress(OSError):  # a full disk: the job does not need it
            replace(self.mark, ended=ended).write(self.mark_path)
            os.environ[SUPERVISOR] = str(self.mark_path.resolve())

    def past_events(self, since: float) -> list[dict]:
        """The events of this job since a time (Unix seconds)."""
        return [event for event in read_events(self.events.path) if event["time"] >= since] if self.events.path else []

    def end_of_job(self, verdict: JobVerdict) -> Optional[str]:
        """The reason for no further attempt; None if there is one."""
        settings, attempt = self.settings, self.attempts[-1]
        if verdict.action is Action.DONE:
            return "finished"
        if verdict.action is Action.PREEMPTED:
            if verdict.code == Interrupted.code:
                return "interrupted by Ctrl-C"
            requeued = settings.on_preempt == "requeue" and self.place.requeue()
            return "preempted" + (f", {QUEUED}" if requeued else "")
        no_longer_starts = self.no_longer_starts(attempt)
        if verdict.action is Action.STOP and not (no_longer_starts and verdict.code in COMMAND_ERRORS):
            return f"stopped: {in_words(attempt.failure, verdict.cause, '')}"
        if len(self.attempts) > settings.max_restarts:
            return f"given up after {settings.max_restarts} restarts (--max-restarts)"
        if verdict.action is Action.REPLACE or no_longer_starts:
            if bad := self.failed_nodes(attempt, verdict):
                return self.go_on_without(bad)
        crashes = 0
        for earlier in reversed(self.attempts):
            same = (earlier.code, earlier.excluded, earlier.ranks) == (attempt.code, attempt.excluded, attempt.ranks)
            if not same or abs(earlier.last_step - attempt.last_step) > 1:  # ranks may be a step apart
                break
            crashes += 1
        if crashes >= 2 and settings.min_world_size and self.place.shrink(settings.min_world_size):
            return None
        if crashes >= settings.same_step_limit:
            return f"stopped: {crashes} times the same end after step {attempt.last_step} (--same-step-limit)"
        return None

    def has_trained(self) -> bool:
        """Whether the job has made steps: then its command works, and what no longer starts has broken since."""
        return any(attempt.made_a_step for attempt in self.attempts) or newest_checkpoint(self.save) is not None

    def no_longer_starts(self, attempt: Attempt) -> bool:
        """Whether an attempt of a job that has trained made no step, and not for a node with a supervisor of its own."""
        elsewhere = attempt.code == PeerLost.code and not commands.is_srun(self.place.command)
        return not attempt.made_a_step and self.has_trained() and not elsewhere

    def failed_nodes(self, attempt: Attempt, verdict: JobVerdict) -> dict[str, str]:
        """Node -> reason, for each whose rank computes wrongly, that fails the check, or whose ranks fail there again."""
        wrong = wrong_nodes(verdict.code, attempt.why)
        if len(wrong) == 1 and MEMORY not in attempt.why:
            return self.of_this_supervisor(wrong)
        log("checking the nodes")
        bad = self.place.failing(self.place.gpus_of_a_node() if verdict.code == DeviceLost.code else None)
        if not bad and verdict.action is Action.REPLACE:
            at_start = not attempt.made_a_step and self.has_trained()
            hosts = list(wrong) or ([attempt.host] if attempt.host else [])
            bad = self.place.nodes.suspected(hosts, at_start and not wrong)
        return self.of_this_supervisor({node: wrong.get(node, why) for node, why in bad.items()})

    def of_this_supervisor(self, bad: dict[str, str]) -> dict[str, str]:
        """Those of these nodes that this supervisor looks after. Others have one of their own; it remembers their names."""
        own = bad if commands.is_srun(self.place.command) else {name: bad[name] for name in bad if name == node_name()}
        if others := {name: why for name, why in bad.items() if name not in own}:
            self.place.nodes.exclude(others)
        return own

    def go_on_without(self, bad: dict[str, str]) -> Optional[str]:
        """Exclude nodes, and choose what the job runs on now. Returns the reason if there is nothing left."""
        names, why = " ".join(bad), next(iter(bad.values()))
        left = self.place.without(bad)
        self.change = left.change
        self.events.record(
            "node_excluded",
            f"{names} failed ({why}): {left.outcome or left.change}",
            nodes=list(bad),
            why=why,
            action=left.action,
            ranks=self.place.ranks,
        )
        if self.settings.exclude_command:
            self.run_exclude_command(names, why)
        return left.outcome

    def run_exclude_command(self, names: str, why: str) -> None:
        """Run `--exclude-command`, so that the cluster leaves out the nodes, too."""
        try:
            done = subprocess.run(
                ["bash", "-c", self.settings.exclude_command],
                env={**os.environ, "NODES": names, "WHY": why},
                stdin=subprocess.DEVNULL,
                timeout=EXCLUDING,
            )
            if done.returncode:
                log(f"--exclude-command ended with exit code {done.returncode}")
        except (OSError, subprocess.TimeoutExpired) as error:
            log(f"--exclude-command failed: {error}")

    def wait_before_restart(self) -> None:
        """Wait before the next attempt, twice as long each time, to spare a broken machine or file system."""
        attempt = self.attempts[-1]
        if attempt.wall > FRESH_START or attempt.last_step > attempt.first_step > 0:
            self.delay = self.settings.backoff
        start = time.monotonic()
        log(f"restart {len(self.attempts)} of {self.settings.max_restarts} in {self.delay:.0f} s")
        self.record_restart(attempt)
        while time.monotonic() - start < self.delay and not self.asked_to_stop:
            time.sleep(min(0.1, self.delay))
        attempt.waited = time.monotonic() - start
        self.delay = min(60.0, 2 * self.delay)

    def record_restart(self, attempt: Attempt) -> None:
        """Record a restart, and whether there were too many of them within an hour."""
        number, code, change = len(self.attempts), attempt.code, f" {self.change}" * bool(self.change)
        self.change = ""
        self.events.record(
            "restart",
            f"restart {number} of {self.settings.max_restarts}{change} after step {attempt.last_step}: "
            f"{attempt.ending_in_words}",
            iteration=attempt.last_step or None,
            rank=attempt.rank,
            rank_host=attempt.host,
            cause=attempt.cause,
            failure=attempt.failure or None,
            why=attempt.why,
            code=code,
            restarts=number,
            after=self.delay,
        )
        rule = rule_of(self.events.rules, "restart_storm")
        past, here = self.past_events(time.time() - 3600.0), socket.gethostname()
        # The supervisors of other hosts record the same restarts.
        recent = [one for one in past if one["event"] == "restart" and one.get("host", here) == here]
        known = any(one["event"] == "restart_storm" for one in past)
        if len(recent) > rule.threshold and not known and not rule.off:  # once: the next ones say nothing new
            self.events.record(
                "restart_storm",
                f"{len(recent)} restarts within an hour; the last one: {attempt.ending_in_words}",
                iteration=attempt.last_step or None,
                restarts=len(recent),
                limit=rule.threshold,
            )

    def saved(self) -> int:
        """The number of checkpoints that the job has written under this supervisor."""
        kinds = [event["event"] for event in read_events(self.events.path, self.old_events)] if self.events.path else []
        if not self.save or "save" in kinds or "start" in kinds and not rule_of(self.events.rules, "save").off:
            return kinds.count("save")
        with contextlib.suppress(StorageError):  # an unreachable store: still report the time
            return len(list(location(self.save).glob("iter_*")))
        return 0

    def report(self, outcome: str, verdict: JobVerdict) -> int:
        """Log the account and write it to goodput.json; returns the exit code."""
        if outcome.startswith(QUEUED):
            verdict = JobVerdict(Action.PREEMPTED, verdict.cause, Preempted.code)
        code = to_shell(verdict.code)
        saved = self.saved()
        summary = account(self.attempts, outcome, code, time.monotonic() - self.began, saved)
        path = self.logs / "goodput.json"
        try:
            path.write_text(json.dumps(summary.record(), indent=1) + "\n", encoding="utf-8")
            where = f"account: {path}"
        except OSError as error:  # report the job's own end
            where = f"the account could not be written: {error}"
        if code not in (0, Preempted.code, Interrupted.code) and has_snapshots(self.save):
            where += f"\n  snapshots in memory stay for the next launch ({shared_memory()}/megatron-snapshots-*)"
        log(f"{summary.text()}\n  {where}")
        self.leave_mark(outcome)
        if self.agreement:
            self.agreement.leave(outcome, code, alone=node_name() in self.place.nodes.excluded)
        why, last = outcome, self.attempts[-1] if self.attempts else Attempt(0, self.place.ranks)
        if verdict.action in (Action.STOP, Action.RESTART, Action.REPLACE) and self.attempts:
            said = last.ending_in_words
            said = said.partition(last.cause)[2].lstrip(":, ") if last.cause in outcome else said
            why += f": {said}" * bool(said)
        self.events.record(
            "end",
            f"the supervised job {why}, after {duration(summary.wall)}: {summary.steps} steps, {summary.restarts} "
            f"restarts, goodput {summary.goodput:.0%}",
            level="info" if code in (0, Preempted.code, Interrupted.code) else "error",
            iteration=max((attempt.last_step for attempt in self.attempts), default=0) or None,
            rank=last.rank if code else None,
            rank_host=last.host if code else None,
            code=code,
            failure=verdict.kind and verdict.kind.value,
            why=why,
            account=summary.brief(),
        )
        return code

    # ---- one attempt -----------------------------------------------------------------------------------------------

    def attempt(self) -> JobVerdict:
        """Start the job, watch it to its end, end all its processes, and judge and log the end."""
        number, place, launches = len(self.attempts), self.place, self.launches()
        words = place.words(resumed(place.command, self.save, self.others))
        words = commands.with_flag(words, "--heartbeat-dir", str(self.beats))
        words = commands.with_flag(words, "--exit-signal-handler")
        words = commands.with_flag(words, "--flight-recorder-dump-path", str(self.traces))
        launched = time.monotonic() - self.began
        self.attempts.append(Attempt(number, place.ranks, launched=launched, excluded=len(place.nodes.excluded)))
        at = newest_checkpoint(self.save)
        said = f", from iteration {at}" if at is not None else ""
        if has_snapshots(self.save):
            said += " or a newer snapshot in memory" if said else ", from a snapshot in memory, if one is whole"
        log(f"attempt {number} on {place.ranks} ranks{said}")
        known = {beat.process for beat in self.watch.beats} | self.watch.earlier if self.watch else ()
        self.watch = AttemptWatch(self.limits, self.beats, self.traces, self.events, self.refresh_mark, known)
        self.watch.lost = self.agreement.lost if self.agreement else self.watch.lost
        self.watch.run(words, unused(self.logs, number), lambda: self.asked_to_stop)
        return self.close(self.attempts[-1], self.watch, launches)

    def launches(self) -> int:
        """The number of launches that the job's metrics have recorded."""
        return read_end(self.metrics).launches if self.metrics else 0

    def refresh_mark(self) -> None:
        """Show others that this supervisor lives."""
        if time.monotonic() - self.refreshed > REFRESH:
            self.refreshed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.mark_path)

    def close(self, attempt: Attempt, watch: AttemptWatch, launches: int = 0) -> JobVerdict:
        """Judge and log the end of an attempt. launches: number of launches in the metrics before it"""
        verdict, first, why = watch.verdict(self.has_trained(), self.rules)
        attempt.ended = time.monotonic() - self.began
        attempt.ending = time.monotonic() - (watch.ending_since or time.monotonic())
        attempt.silent = watch.silent
        attempt.cause, attempt.code, attempt.why = verdict.cause, verdict.code, why
        attempt.failure = verdict.kind.value if verdict.kind else ""
        if beats := watch.beats:
            done = 0 if verdict.code in (0, Preempted.code) else 1
            attempt.first_step, attempt.last_step = beats[0].since, max(0, min(beat.step for beat in beats) - done)
            attempt.phases, attempt.first_step_seconds = dict(beats[0].seconds), beats[0].first_step
        self.count_steps(attempt, launches)
        if verdict.kind and not watch.hang and first and first.code == verdict.code:
            attempt.rank, attempt.host = first.rank, first.host
        if verdict.code == SilentError.code and (named := named_ranks(why)):  # all ranks end for the one that is named
            attempt.rank, attempt.host = named[0]
        log(f"attempt {attempt.number} ended: {attempt.ending_in_words}")
        return verdict

    def count_steps(self, attempt: Attempt, launches: int) -> None:
        """Take the steps of an attempt from its metrics, where they are here: status and report count the same."""
        found = read_end(self.metrics) if self.metrics else History()
        if found.launches > launches:
            first = int(found.run.get("iteration", 0)) + 1
            last = found.iteration if found.steps.rows else first - 1
            attempt.first_step, attempt.last_step = first if found.steps.rows else attempt.first_step, last

    def _stop(self, number: int, frame) -> None:
        if self.watch and number == self.asked_to_stop == signal.SIGINT:
            self.watch.stop_now = True
        self.asked_to_stop = number


def wrong_nodes(code: int, why: str) -> dict[str, str]:
    """Node -> reason, of the ranks that --rerun-mode blames: one, or those of which one computes wrongly.

    >>> wrong_nodes(17, "iteration 8: rank 3 on n7 computes other bits than other ranks do of the same samples")
    {'n7': 'its rank 3 computes wrongly'}
    >>> wrong_nodes(8, "iteration 8: loss nan")
    {}
    """
    named = named_ranks(why) if code == SilentError.code else []
    return {host: f"its rank {rank} computes wrongly" for rank, host in named}


def logging_of(command: list[str]) -> Logging:
    """The settings of events in a command whose other settings cannot be read here."""
    flags = {name: commands.value_of(command, dashed(name)) for name in LOGGING}
    return Logging(**{name: value for name, value in flags.items() if value is not None})


LOGGING = ("on_event", "webhook", "event_level", "event_rules", "metrics_file")


LEAST = dict(max_restarts=0, backoff=0, grace=0, spare_nodes=0, same_step_limit=1, min_world_size=1, min_nodes=1)


def check(settings: SuperviseOptions, command: list[str]) -> None:
    """Raise SettingsError for timeouts and limits out of range, UsageError for a command that cannot be started."""
    for name, value in vars(settings).items():
        least = LEAST.get(name)
        flag = f"{dashed(name)} {value}"
        if least is not None and value is not None and value < least:
            raise SettingsError(f"{flag} must be at least {least}")
        if name in ("hang_timeout", "start_timeout", "poll", "node_timeout") and not value > 0:
            raise SettingsError(f"{flag} must be above 0")
    commands.refuse_unknown(command, "supervise")
    commands.is_foreign(command)


def size_of(path: Optional[Path]) -> int:
    """Bytes of a file; 0 without it."""
    return path.stat().st_size if path and path.exists() else 0


def failure_rules(words: Sequence[str]) -> dict[FailureKind, Action]:
    """The actions of `--on-failure`. Raises UsageError for unknown words.

    >>> failure_rules(["network=stop"])
    {<FailureKind.NETWORK: 'network'>: <Action.STOP: 'stop'>}
    """
    kinds = {kind.value.replace(" ", "-"): kind for kind in FailureKind}
    actions = {action.value: action for action in (Action.RESTART, Action.REPLACE, Action.STOP)}
    rules = {}
    for word in words:
        kind, equals, action = word.partition("=")
        for name, known, where in ((kind, kinds, "kind of failure"), (action, actions, "action")):
            if name not in known or not equals:
                raise UsageError(
                    f"--on-failure {word}: {name or 'nothing'} is no {where}{did_you_mean(name, known)}",
                    do=f"KIND=ACTION: {', '.join(kinds)}; {', '.join(actions)}",
                )
        rules[kinds[kind]] = actions[action]
    return rules


def log_folder(asked: Optional[str], save: Optional[str]) -> Path:
    """The folder of the job's output and account: `--log-dir`, or in the `local_folder` of --save, or a temporary one."""
    if asked or save:
        return Path(asked or local_folder(save) / "supervise")
    return Path(tempfile.mkdtemp(prefix="supervise-"))


def unused(folder: Path, number: int) -> Path:
    """A new log file for an attempt; before a requeue, another supervisor of the job has used the first numbers."""
    while (folder / f"attempt_{number:03d}.log").exists():
        number += 1
    return folder / f"attempt_{number:03d}.log"


def heartbeat_folder() -> Path:
    """Create a folder in memory, if possible; folders of killed supervisors are removed."""
    where, own = shared_memory(), os.getpid()
    prefix = f"heartbeats-{machine().replace('/', '-')}"
    for path in where.glob(f"{prefix}.*"):
        remove_if_left(path, path.name.removeprefix(prefix).split(".")[1:3])
    return Path(tempfile.mkdtemp(prefix=f"{prefix}.{own}.{process_start_ticks(own)}.", dir=where))


if __name__ == "__main__":
    run_main(main)
