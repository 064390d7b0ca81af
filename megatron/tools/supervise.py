# SPDX-License-Identifier: Apache-2.0
"""Supervise a training job: watch its ranks, report why it hangs, restart it from its last checkpoint.

    python -m megatron.tools.supervise --max-restarts 20 -- torchrun --nproc-per-node 8 pretrain_gpt.py --save ckpt ...

The job's exit code decides what follows: errors in settings, data or checkpoints stop it (they would repeat), lost
processes and storage are retried, a preempted job is left to be resumed. A lost GPU, or a job that no longer starts, is a
node's fault: nodes are checked, and the job goes on without those that fail, on spare ones, on fewer, or in the queue. It
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
    Failure,
    Interrupted,
    PeerLost,
    Preempted,
    SettingsError,
    StorageError,
    UsageError,
    run_main,
)
from megatron.guard import command as commands
from megatron.guard import processes, slurm
from megatron.guard.beat_files import (
    STOP,
    Beat,
    BeatReader,
    ask,
    clear,
    machine,
    read_beats,
    remove_if_left,
    shared_memory,
)
from megatron.guard.evidence import request_traces, standstills
from megatron.guard.exits import (
    Action,
    End,
    JobVerdict,
    codes_in_log,
    first_failure,
    from_shell,
    judge,
    reason_in_log,
    to_shell,
)
from megatron.guard.flight_recorder import explain_dumps
from megatron.guard.goodput import Attempt, account
from megatron.guard.nodes import Nodes
from megatron.guard.resume_command import COMMAND, module_command, resumed
from megatron.guard.stacks import explain
from megatron.guard.supervisor_mark import NAME, REFRESH, SUPERVISOR, Mark, lost_supervisor
from megatron.planner.replan import fewer_ranks
from megatron.settings.declare import dashed
from megatron.settings.parse import parse
from megatron.settings.schema import Logging, setting
from megatron.storage.processes import adopt_orphans, process_start_ticks
from megatron.storage.urls import local_folder, location
from megatron.telemetry.event_rules import rule_of
from megatron.telemetry.events import read_events
from megatron.telemetry.figures import duration
from megatron.telemetry.history import History, read_end
from megatron.telemetry.metrics import metrics_path
from megatron.telemetry.notify import open_events
from megatron.telemetry.run_folder import newest_checkpoint

FRESH_START = 600.0  # seconds of an attempt after which the back-off is reset
LINGER = 10.0  # seconds that a launcher has to notice that a rank is gone, and to report how
COMMAND_ERRORS = (UsageError.code, SettingsError.code)  # that cannot be, where the same command has trained
QUEUED = "back in the queue"  # of SLURM: the outcome of a job that it starts again
SHARE = 0.005  # of a core that looking at the ranks may cost
LATE = 0.5  # seconds beyond --poll between two checks that still count as silence


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
        "continue on fewer nodes, at least this many, after one has failed and no spare is left (srun)", None
    )
    spare_nodes: int = setting(
        "nodes of the SLURM allocation that the job leaves idle; one takes the place of a node that fails (srun)", 0
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
    on_numerics: Literal["stop", "retry"] = setting("when loss or gradient were not finite: stop, or try again", "stop")
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
        parse(
            argv, {"supervise": SuperviseOptions}, prog=PROG, description=DESCRIPTION, common=COMMON
        )  # ends at --help
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
        self.settings, self.command = settings, command
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
        self.ranks = commands.ranks_of(command)
        self.attempts: list[Attempt] = []
        self.asked_to_stop: Optional[int] = None
        self.stop_now = False  # after a second Ctrl-C
        self.delay, self.log_at = settings.backoff, 0
        self.killed: dict[int, int] = {}  # ranks of this attempt that were killed -> the signal; 0: unknown
        self.mark, self.mark_path, self.refreshed = Mark.own(), self.logs / NAME, time.monotonic()
        self.old_events = size_of(self.events.path)
        self.ending_since: Optional[float] = None  # the first sign of the end of this attempt
        kept = settings.bad_nodes or (local_folder(self.save) / "bad_nodes" if self.save else None)
        self.nodes = Nodes(settings.node_check, kept and Path(kept))
        self.change = ""  # what the next attempt does otherwise
        self.hang = ""  # why this attempt was ended
        if settings.min_world_size and settings.min_world_size > self.ranks:
            raise SettingsError(f"--min-world-size {settings.min_world_size} is more than the job's {self.ranks} ranks")
        if settings.spare_nodes:
            self.leave_spares(settings.spare_nodes)

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
            if self.settings.node_check and (bad := self.nodes.failing(self.command)):
                if outcome := self.go_on_without(bad):
                    return self.report(outcome, JobVerdict(Action.STOP, outcome, DeviceLost.code))
            while True:
                verdict = self.attempt()
                if self.asked_to_stop and verdict.action is Action.RETRY:  # for example, it had nothing to save yet
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
            requeued = settings.on_preempt == "requeue" and self.requeue()
            return "preempted" + (f", {QUEUED}" if requeued else "")
        no_longer_starts = self.no_longer_starts(attempt)
        if verdict.action is Action.STOP and not (no_longer_starts and verdict.code in COMMAND_ERRORS):
            return f"stopped: {verdict.cause}"
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
        if crashes >= 2 and settings.min_world_size and self.shrink(settings.min_world_size):
            return None
        if crashes >= settings.same_step_limit:
            return f"stopped: {crashes} times the same end after step {attempt.last_step} (--same-step-limit)"
        return None

    def has_trained(self) -> bool:
        """Whether the job has made steps: then its command works, and what no longer starts has broken since."""
        return any(attempt.made_a_step for attempt in self.attempts) or newest_checkpoint(self.save) is not None

    def no_longer_starts(self, attempt: Attempt) -> bool:
        """Whether an attempt of a job that has trained made no step, and not for a node with a supervisor of its own."""
        elsewhere = attempt.code == PeerLost.code and not commands.is_srun(self.command)
        return not attempt.made_a_step and self.has_trained() and not elsewhere

    def failed_nodes(self, attempt: Attempt, verdict: JobVerdict) -> dict[str, str]:
        """Node -> reason, for each that fails the check, or whose ranks have lost their device again."""
        log("checking the nodes")
        gpus = commands.shape_of(self.command)[1] if verdict.code == DeviceLost.code else None
        bad = self.nodes.failing(self.command, gpus)
        if not bad and verdict.action is Action.REPLACE:
            at_start = not attempt.made_a_step and self.has_trained()
            bad = self.nodes.suspected([attempt.host] if attempt.host else [], at_start)
        return bad

    def go_on_without(self, bad: dict[str, str]) -> Optional[str]:
        """Exclude nodes, and choose what the job runs on now. Returns the reason if there is nothing left."""
        names, why = " ".join(bad), next(iter(bad.values()))
        log(f"nodes that fail the check: {names} ({why})")
        self.nodes.exclude(bad)
        settings, left = self.settings, self.nodes.left(self.command)
        each = commands.shape_of(self.command)[1]
        least = settings.min_world_size or (settings.min_nodes or 0) * each
        on_srun, action, outcome = commands.is_srun(self.command), "none", None
        if on_srun and self.nodes.suffice(self.command):
            action, self.change = "spare", f"without {names}, on a spare node"
        elif least and self.shrink(least, len(left) * each if on_srun else None):
            action, self.change = "fewer", f"without {names}, on {self.ranks} ranks"
        elif settings.on_preempt == "requeue" and self.requeue(self.nodes.all_excluded()):
            action, outcome = "queue", f"{QUEUED}, without {names} ({why})"
        else:
            do = "--spare-nodes, --min-nodes, --on-preempt requeue" if on_srun else "--min-world-size"
            outcome = f"given up: {names} failed ({why}), and nothing is left to run on ({do})"
        self.events.record(
            "node_excluded",
            f"{names} failed ({why}): {outcome or self.change}",
            nodes=list(bad),
            why=why,
            action=action,
            ranks=self.ranks,
        )
        return outcome

    def leave_spares(self, spares: int) -> None:
        """Use fewer nodes than the allocation has. Raises SettingsError without srun, or where none would be left."""
        allocated, (nodes, each) = len(slurm.nodes()), commands.shape_of(self.command)
        if not commands.is_srun(self.command) or not slurm.job():
            raise SettingsError(
                "--spare-nodes leaves nodes of a SLURM allocation idle, and this is no command of srun in a job",
                do="supervise ... --spare-nodes N -- srun ... in a batch script (docs/survival.md)",
            )
        if not 0 < spares < allocated:
            raise SettingsError(f"--spare-nodes {spares}: the allocation has {allocated} nodes")
        if nodes > allocated - spares:
            self.ranks = (allocated - spares) * each
            self.command = commands.with_ranks(self.command, self.ranks)

    def requeue(self, excluded: Sequence[str] = ()) -> bool:
        number = slurm.job()
        if number is None:
            log("--on-preempt requeue: this is no SLURM job")
        return number is not None and slurm.requeue(number, excluded)

    def shrink(self, least: int, most: Optional[int] = None) -> bool:
        """Change the layout to fewer ranks; False if that is impossible."""
        try:
            fewer, command = fewer_ranks(self.command, self.ranks, least, most)
        except Failure as failure:
            log(f"no fewer ranks: {failure}")
            return False
        then = commands.config_of(command).parallel
        log(
            f"continuing with {fewer} ranks instead of {self.ranks}, at the same global batch: tp "
            f"{then.tensor_model_parallel_size} pp {then.pipeline_model_parallel_size}"
        )
        self.command = command
        self.ranks = fewer
        return True

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
        log(f"{summary.text()}\n  {where}")
        self.leave_mark(outcome)
        why, last = outcome, self.attempts[-1] if self.attempts else Attempt(0, self.ranks)
        if verdict.action in (Action.STOP, Action.RETRY, Action.REPLACE) and self.attempts:
            said = last.ending_in_words
            said = said.removeprefix(last.cause).lstrip(":, ") if last.cause in outcome else said
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
            why=why,
            account=summary.brief(),
        )
        return code

    # ---- one attempt -----------------------------------------------------------------------------------------------

    def attempt(self) -> JobVerdict:
        """Start the job, watch it to its end, and end all its processes."""
        clear(self.beats)
        self.killed, self.ending_since, launches = {}, None, self.launches()
        self.hang = ""
        words = self.nodes.placed(resumed(self.command, self.save, self.others))
        words = commands.with_flag(words, "--heartbeat-dir", str(self.beats))
        words = commands.with_flag(words, "--exit-signal-handler")
        words = commands.with_flag(words, "--flight-recorder-dump-path", str(self.traces))
        number = len(self.attempts)
        attempt = Attempt(number, self.ranks, launched=time.monotonic() - self.began, excluded=len(self.nodes.excluded))
        self.attempts.append(attempt)
        self.log, self.log_at = unused(self.logs, number), 0
        at = newest_checkpoint(self.save)
        log(f"attempt {number} on {self.ranks} ranks" + (f", from iteration {at}" if at is not None else ""))
        with self.log.open("wb") as output:
            job = processes.start_job(words, output)
        hung = self.watch(job, attempt)
        self.ending_since = self.ending_since or time.monotonic()
        beats, spared = read_beats(self.beats), self.events.processes
        if (
            hung
            or job.poll() is None
            or processes.descendants(os.getpid(), spared)
            or any(map(processes.alive_here, beats))
        ):
            self.end(job, beats)
        self.copy_log()
        return self.close(attempt, job.returncode, beats, hung, launches)

    def launches(self) -> int:
        """The number of launches that the job's metrics have recorded."""
        return read_end(self.metrics).launches if self.metrics else 0

    def watch(self, job: subprocess.Popen, attempt: Attempt) -> bool:
        """Watch until the job ends, hangs (True), or has not ended in time after it was asked to."""
        seen: dict[int, tuple[int, float]] = {}  # rank -> (count of its last beat, time of its arrival)
        asked: Optional[float] = None
        gone: Optional[float] = None
        clock, reader, watching = Clock(self.settings.poll + LATE), BeatReader(self.beats), Effort(SHARE)
        while job.poll() is None:
            time.sleep(self.settings.poll)
            self.copy_log()
            self.refresh_mark()
            now = clock.look()
            if not watching.may_begin() and not (self.asked_to_stop and asked is None) and not self.stop_now:
                continue
            beats = reader.read()
            note(beats, now, seen)
            if self.asked_to_stop and asked is None:
                asked = now
                self.pass_on(job, beats)
            if asked is not None:
                if self.stop_now:
                    log("SIGINT again: the job is ended immediately")
                    return False
                if now - asked > self.settings.grace:
                    log(f"the job has not ended {self.settings.grace:.0f} s after it was asked to (--grace)")
                    return False
                continue
            if any(beat.ended or (beat.ended is None and processes.is_gone(beat)) for beat in beats):
                if gone is None:
                    gone, self.ending_since = now, time.monotonic()
                    self.note_killed(beats)
                    self.log_lost(beats, {beat.rank: now - seen[beat.rank][1] for beat in beats})
                if now - gone > LINGER:
                    return False
                continue
            silent = {beat.rank: now - seen[beat.rank][1] for beat in beats if beat.ended is None}
            over = [beat for beat in beats if beat.ended is None and silent[beat.rank] > self.limit(beat)]
            if over or (len(beats) < 1 and now > self.settings.start_timeout):
                attempt.silent = max(silent.values(), default=now)
                self.log_hang(beats, silent, over)
                return True
        return False

    def note_killed(self, beats: list[Beat]) -> None:
        """Remember which ranks were killed, before the launcher ends the others, or is ended before it can report.

        Where a rank has failed by itself, the launcher may have ended the others already: then only a signal counts that
        the kernel still knows.
        """
        failed = any(beat.ended not in (None, 0, PeerLost.code) for beat in beats)
        for beat in beats:
            if beat.ended is None and processes.is_gone(beat):
                number = processes.signal_of_zombie(beat.pid)
                if number or not failed:
                    self.killed[beat.rank] = number
                    by = f" by {signal.Signals(number).name}" if number else ""
                    log(f"rank {beat.rank} on {beat.host}, pid {beat.pid}, was killed{by} in step {beat.step}")

    def refresh_mark(self) -> None:
        """Show others that this supervisor lives."""
        if time.monotonic() - self.refreshed > REFRESH:
            self.refreshed = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.mark_path)

    def limit(self, beat: Beat) -> float:
        """Seconds that a rank may be silent in its current phase."""
        settings = self.settings
        if beat.step <= beat.since:  # up to the end of its first step: loading, compiling
            return max(settings.hang_timeout, settings.start_timeout)
        if beat.phase == "save":  # the time of a first save, or of a save that it waits for, is unknown
            return 5 * max(settings.hang_timeout, beat.usual)
        return max(settings.hang_timeout, 5 * beat.usual)

    def log_hang(self, beats: list[Beat], silent: dict[int, float], over: list[Beat]) -> None:
        """Log what each rank does, culprits first."""
        if not beats:
            self.hang = "no rank has come to life (--start-timeout)"
            log(self.hang)
            self.events.record("hang", "no rank has come to life (--start-timeout)", ranks=[], seconds=None)
            return
        ranks, seconds = [beat.rank for beat in over], max(silent[beat.rank] for beat in over)
        what = f"the job hangs: no word from rank {', '.join(map(str, ranks))} for {seconds:.0f} s"
        log(what)
        lines = explain(standstills(beats, self.beats, silent))
        traced = explain_dumps(request_traces(beats, self.beats, self.traces))
        for line in [*lines, *traced]:
            log(f"  {line}")
        step = min(beat.step for beat in beats)
        message = "; ".join([what, *lines[:1], *traced[:1]])
        self.hang = message.removeprefix("the job hangs: ")
        self.events.record("hang", message, iteration=max(0, step - 1), ranks=ranks, seconds=round(seconds, 1))

    def log_lost(self, beats: list[Beat], silent: dict[int, float]) -> None:
        """Log the longest silent rank after another has given up waiting for it, earlier than --hang-timeout."""
        left = [beat for beat in beats if processes.alive_here(beat)]
        if not (left and any(beat.ended == PeerLost.code for beat in beats)):
            return
        oldest = max(left, key=lambda beat: silent[beat.rank])
        gave_up = ", ".join(str(beat.rank) for beat in beats if beat.ended == PeerLost.code)
        log(
            f"rank {gave_up} gave up waiting; "
            f"the oldest word is that of rank {oldest.rank}, {silent[oldest.rank]:.0f} s ago"
        )
        for line in explain(standstills(left, self.beats, silent)):
            log(f"  {line}")

    def pass_on(self, job: subprocess.Popen, beats: list[Beat]) -> None:
        """Forward the signal to the ranks, which save and stop: a launcher would give them little time."""
        name = signal.Signals(self.asked_to_stop).name
        near = [beat for beat in beats if processes.alive_here(beat)]
        if any(beat.step and beat.ended is None for beat in beats):
            log(f"{name}: the job is asked to save and stop")
            number = signal.SIGINT if self.asked_to_stop == signal.SIGINT else signal.SIGTERM
            for beat in near:  # one is enough: ranks agree
                processes.send(beat.pid, number)
            if not near:
                ask(self.beats, STOP)
        else:
            log(f"{name}: the job had not begun to train")
            processes.send(job.pid, signal.SIGTERM)

    def end(self, job: subprocess.Popen, beats: list[Beat]) -> None:
        """End every process of the job, including stopped ones and those on other machines."""
        start = time.monotonic()
        for step in sorted({beat.slurm_step for beat in beats if beat.slurm_step and beat.ended is None}):
            if not slurm.kill_step(step):
                log(f"SLURM does not end the step {step}")
        if job.poll() is None:
            processes.send(job.pid, signal.SIGTERM)
        left = processes.end_descendants(os.getpid(), job.pid, self.events.processes)
        job.poll()
        for beat in beats:  # ranks that a daemon started are no descendants
            if processes.alive_here(beat) and processes.send(beat.pid, signal.SIGKILL):
                time.sleep(0.05)
                left += [beat.pid] * processes.alive_here(beat)
        log(
            f"the job's processes were ended in {time.monotonic() - start:.1f} s"
            + (f"; these would not go: {left}" if left else "")
        )

    def close(
        self, attempt: Attempt, returned: Optional[int], beats: list[Beat], hung: bool, launches: int = 0
    ) -> JobVerdict:
        """Judge and log the end of an attempt. launches: number of launches in the metrics before it"""
        output = self.log.read_text(encoding="utf-8", errors="replace")[-100_000:] if self.log.exists() else ""
        codes = [beat.ended for beat in beats if beat.ended is not None] + codes_in_log(output)
        if not any(code < 0 for code in codes):  # the launcher did not report them
            codes += [-(number or signal.SIGKILL) for number in self.killed.values()]
        if returned == 0 and not (codes and all(codes)):  # a script may hide a failure: torchrun ... | tee log
            codes = [0]
        elif returned and returned > 1:  # our launcher returns the code of a rank, torchrun always 1
            codes.append(from_shell(returned))
        ends = [End(beat.at, beat.rank, beat.host, beat.ended, beat.why) for beat in beats if beat.ended is not None]
        ends += [End(beat.at, beat.rank, beat.host, self.signal_of(beat)) for beat in beats if beat.rank in self.killed]
        first = first_failure(ends)
        if hung:
            verdict = JobVerdict(Action.RETRY, "hung", 7)
        else:
            retry = self.settings.on_numerics == "retry"
            verdict = judge(codes or [returned or 1], retry)
            # Another code is that of a rank without a heartbeat.
            if first and verdict.code and verdict.code in {end.code for end in ends}:
                verdict = judge([first.code], retry)
        attempt.ended = time.monotonic() - self.began
        attempt.ending = time.monotonic() - (self.ending_since or time.monotonic())
        attempt.cause, attempt.code = verdict.cause, verdict.code
        if beats:
            done = 0 if verdict.code in (0, 9) else 1
            attempt.first_step, attempt.last_step = beats[0].since, max(0, min(beat.step for beat in beats) - done)
            attempt.phases, attempt.first_step_seconds = dict(beats[0].seconds), beats[0].first_step
        self.count_steps(attempt, launches)
        if hung:
            attempt.why = self.hang
        elif verdict.code:
            unheard = [beat for beat in beats if beat.ended is None and processes.is_gone(beat)]
            if verdict.code < 0 and not self.killed and len(unheard) == 1:  # only its launcher knows the signal
                first = End(unheard[0].at, unheard[0].rank, unheard[0].host, verdict.code)
            self.note_reason(attempt, first, output)
        log(f"attempt {attempt.number} ended: {attempt.ending_in_words}")
        return verdict

    def signal_of(self, beat: Beat) -> int:
        """The exit code of a rank that was killed."""
        return -(self.killed[beat.rank] or signal.SIGKILL)

    def note_reason(self, attempt: Attempt, first: Optional[End], output: str) -> None:
        """Take the reason of an attempt's end: what the rank said that failed first, or else the job's output."""
        if first and first.code == attempt.code and first.code not in (Preempted.code, Interrupted.code):
            attempt.rank, attempt.host = first.rank, first.host
        attempt.why = first.why if first and first.code == attempt.code else ""
        attempt.why = attempt.why or reason_in_log(output, attempt.code)

    def count_steps(self, attempt: Attempt, launches: int) -> None:
        """Take the steps of an attempt from its metrics, where they are here: status and report count the same."""
        found = read_end(self.metrics) if self.metrics else History()
        if found.launches > launches:
            first = int(found.run.get("iteration", 0)) + 1
            last = found.iteration if found.steps.rows else first - 1
            attempt.first_step, attempt.last_step = first if found.steps.rows else attempt.first_step, last

    def copy_log(self) -> None:
        """Copy new output of the job to our own output."""
        with self.log.open("rb") as output:
            output.seek(self.log_at)
            new = output.read()
        self.log_at += len(new)
        if new:
            put_out(new)

    def _stop(self, number: int, frame) -> None:
        self.stop_now = number == self.asked_to_stop == signal.SIGINT
        self.asked_to_stop = number


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
        if name in ("hang_timeout", "start_timeout", "poll") and not value > 0:
            raise SettingsError(f"{flag} must be above 0")
    commands.script_at(command)
    commands.is_foreign(command)
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]}: there is no such command", do="supervise ... -- torchrun ... pretrain_gpt.py ..."
        )


def size_of(path: Optional[Path]) -> int:
    """Bytes of a file; 0 without it."""
    return path.stat().st_size if path and path.exists() else 0


class Clock:
    """A clock for silence that counts at most `most` seconds between two readings.

    A machine that is suspended, or too busy for the supervisor, is so for the ranks too: that time is not their silence.
    """

    def __init__(self, most: float):
        self.most, self.seconds, self.last = most, 0.0, time.monotonic()

    def look(self) -> float:
        now = time.monotonic()
        self.seconds, self.last = self.seconds + min(now - self.last, self.most), now
        return self.seconds


def note(beats: list[Beat], now: float, seen: dict[int, tuple[int, float]]) -> None:
    """Note when each rank gave its last sign of life. seen: rank -> (count of its last beat, time of its arrival)"""
    for beat in beats:
        if seen.get(beat.rank, (None,))[0] != beat.count:
            seen[beat.rank] = beat.count, now


class Effort:
    """Keeps work that is done again and again at a share of one core: it begins later if it took longer before."""

    def __init__(self, share: float):
        self.share, self.began, self.next = share, None, 0.0

    def may_begin(self) -> bool:
        """Whether the work may begin now; what the thread did since it last began is taken as its cost."""
        spent, now = time.thread_time(), time.monotonic()
        if self.began is not None:
            self.next, self.began = now + (spent - self.began) / self.share, None
        if now < self.next:
            return False
        self.began = spent
        return True


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


def log(text: str) -> None:
    """Log a line among those of the job."""
    put_out(f"[supervise {time.strftime('%H:%M:%S')}] {text}\n".encode(errors="replace"))


def put_out(text: bytes) -> None:
    """Write to our own output, if it exists: a closed terminal or pipe does not end the job."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run_main(main)
