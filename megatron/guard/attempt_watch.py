# SPDX-License-Identifier: Apache-2.0
"""One attempt of a supervised job: start it, watch its ranks, say why it hangs, end it, and judge how it ended.

    limits = WatchLimits(hang_timeout=300, start_timeout=1800, grace=120, poll=0.5)
    watch = AttemptWatch(limits, beats=Path("/dev/shm/beats"), traces=Path("runs/a/traces"), events=events)
    watch.run(words, Path("attempt_000.log"), stop_signal=lambda: asked)
    verdict = watch.verdict(has_trained=True, rules={})

Ranks are watched by their heartbeats (`beat_files`), those of other machines too. Linux; needs no torch.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import PeerLost
from megatron.guard import processes, slurm
from megatron.guard.beat_files import LOOK, STOP, UNWELL, Beat, BeatReader, ask, clear, read_beats
from megatron.guard.evidence import request_traces, standstills
from megatron.guard.exits import (
    Action,
    End,
    Evidence,
    JobVerdict,
    codes_in_log,
    first_failure,
    from_shell,
    judge,
    reason_in_log,
    signals_in_log,
)
from megatron.guard.failure_kinds import NO_WORD, FailureKind, kind_of_hang
from megatron.guard.flight_recorder import explain_dumps
from megatron.guard.stacks import explain, spans
from megatron.storage.processes import oom_kills
from megatron.telemetry.events import EventLog

LINGER = 10.0  # seconds that a launcher has to notice that a rank is gone, and to report how
SHARE = 0.005  # of a core that looking at the ranks may cost
LATE = 0.5  # seconds beyond `poll` between two checks that still count as silence
ENDED = (0, signal.SIGTERM)  # how a launcher ends the ranks that are left; 0: unknown
OUTPUT = 100_000  # characters of a job's output, its last ones, that are searched for reasons


@dataclass(frozen=True)
class WatchLimits:
    """Seconds of silence, and between looks: `SuperviseOptions` says what they are."""

    hang_timeout: float
    start_timeout: float
    grace: float
    poll: float

    def of(self, beat: Beat) -> float:
        """Seconds that a rank may be silent in its current phase."""
        if beat.step <= beat.since:  # up to the end of its first step: loading, compiling
            return max(self.hang_timeout, self.start_timeout)
        if beat.phase == "save":  # the time of a first save, or of a save that it waits for, is unknown
            return 5 * max(self.hang_timeout, beat.usual)
        return max(self.hang_timeout, 5 * beat.usual)


class AttemptWatch:
    """Watches one launch of a job.

    beats:     folder of the ranks' heartbeats
    traces:    folder for the dumps of the flight recorder
    refreshed: called at each look, for work of the supervisor that does not wait
    earlier:   processes (`Beat.process`) that are known from attempts before: other nodes may still have their messages
    """

    def __init__(
        self,
        limits: WatchLimits,
        beats: Path,
        traces: Path,
        events: EventLog,
        refreshed: Callable[[], None] = lambda: None,
        earlier: Collection[tuple] = (),
    ):
        self.limits, self.folder, self.traces, self.events, self.refreshed = limits, beats, traces, events, refreshed
        self.output: Optional[Path] = None  # file with all that the job prints
        self.copied = 0  # bytes of it that have been copied to our own output
        self.killed: dict[int, int] = {}  # ranks that were killed -> the signal; 0: unknown
        self.ending_since: Optional[float] = None  # the first sign of the end
        self.silent = 0.0  # seconds without progress before the job was ended
        self.hang: Optional[FailureKind] = None
        self.why_hung = ""
        self.lost_node = False
        self.earlier, self.reader = set(earlier), BeatReader(beats)
        self.beats: list[Beat] = []  # the last ones
        self.silent_nodes: list[tuple[list[Beat], float]] = []  # ranks of a node without a word, and for how long
        self.returned: Optional[int] = None  # by the job's first process
        self.lost: Callable[[], str] = lambda: ""  # why the attempt cannot go on, by what other supervisors say
        self.stop_now = False  # after a second Ctrl-C
        self.oom_kills = 0

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def run(self, words: list[str], output: Path, stop_signal: Callable[[], Optional[int]] = lambda: None) -> None:
        """Start the job, watch it to its end, and end all its processes. stop_signal: the signal that asked us to stop"""
        clear(self.folder)
        # Ranks of this attempt make no step before those of this node have come.
        self.earlier |= {beat.process for beat in read_beats(self.folder) if beat.step or beat.ended is not None}
        self.reader = BeatReader(self.folder, self.earlier)
        self.output, before = output, oom_kills()
        with output.open("wb") as file:
            job = processes.start_job(words, file)
        self._watch(job, stop_signal)
        self.ending_since = self.ending_since or time.monotonic()
        self.beats, spared = self.reader.read(), self.events.processes
        if not self.hang and job.poll() != 0 and stop_signal() is None:
            self._listen_for_nodes()
        left = job.poll() is None or processes.descendants(os.getpid(), spared)
        if self.hang or left or any(map(processes.alive_here, self.beats)):
            self._end(job)
        self.copy_output()
        self.returned, self.oom_kills = job.returncode, oom_kills() - before

    def _watch(self, job: subprocess.Popen, stop_signal: Callable[[], Optional[int]]) -> None:
        """Watch until the job ends, hangs, or has not ended in time after it was asked to."""
        seen: dict[int, tuple[int, float]] = {}  # rank -> (count of its last beat, time of its arrival)
        asked: Optional[float] = None
        gone: Optional[float] = None
        clock, watching = Clock(self.limits.poll + LATE), Effort(SHARE)
        while job.poll() is None:
            time.sleep(self.limits.poll)
            self.copy_output()
            self.refreshed()
            now, number = clock.look(), stop_signal()
            if not watching.may_begin() and not (number and asked is None) and not self.stop_now:
                continue
            beats = self.reader.read()
            note(beats, now, seen)
            if number and asked is None:
                asked = now
                self._pass_on(job, beats, number)
            if asked is not None:
                if self.stop_now:
                    log("SIGINT again: the job is ended immediately")
                    return
                if now - asked > self.limits.grace:
                    log(f"the job has not ended {self.limits.grace:.0f} s after it was asked to (--grace)")
                    return
                continue
            if any(beat.ended or (beat.ended is None and processes.is_gone(beat)) for beat in beats):
                if gone is None:
                    gone, self.ending_since = now, time.monotonic()
                    self.note_killed(beats)
                    self.log_lost(beats, {beat.rank: now - seen[beat.rank][1] for beat in beats})
                if now - gone > LINGER:
                    return
                continue
            silent = {beat.rank: now - seen[beat.rank][1] for beat in beats if beat.ended is None}
            if why := self.lost():
                log(f"the attempt is ended: {why}")
                self.lost_node, self.hang, self.why_hung = True, FailureKind.HOST, why
                self.silent = max(silent.values(), default=now)
                return
            over = [beat for beat in beats if beat.ended is None and silent[beat.rank] > self.limits.of(beat)]
            if over or (not beats and now > self.limits.start_timeout):
                self.silent = max(silent.values(), default=now)
                self._explain_hang(beats, silent, over)
                return

    def _listen_for_nodes(self) -> None:
        """Note the nodes that are gone or cut off: their ranks lived, and they sent no messages before others noticed.

        Listens for a moment to a node that is late, where ranks have lost another one and none has failed by itself: what
        ended without a word was then ended by its launcher.
        """
        by_itself = any(number not in ENDED for number in self.killed.values())
        if by_itself or any(beat.ended not in (None, 0, PeerLost.code) for beat in self.beats):
            return
        while late := self.reader.silent_nodes(self.ending_since - 1.5 * LOOK):
            if min(seconds for _, seconds in late) > UNWELL * LOOK:
                break
            time.sleep(0.1)
            self.reader.read()
        if late:
            self.silent_nodes, self.killed = late, {}
        for beats, seconds in late:
            log(f"{NO_WORD} {beats[0].host} for {seconds:.0f} s: rank {spans([beat.rank for beat in beats])}")

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

    def _explain_hang(self, beats: list[Beat], silent: dict[int, float], over: list[Beat]) -> None:
        """Log what each rank does, culprits first."""
        if not beats:
            self.hang, self.why_hung = kind_of_hang([]), "no rank has come to life (--start-timeout)"
            log(self.why_hung)
            self.events.record("hang", self.why_hung, ranks=[], seconds=None)
            return
        ranks, seconds = [beat.rank for beat in over], max(silent[beat.rank] for beat in over)
        what = f"the job hangs: no word from rank {', '.join(map(str, ranks))} for {seconds:.0f} s"
        log(what)
        stills = standstills(beats, self.folder, silent)
        lines, traced = explain(stills), explain_dumps(request_traces(beats, self.folder, self.traces))
        for line in [*lines, *traced]:
            log(f"  {line}")
        step = min(beat.step for beat in beats)
        message = "; ".join([what, *lines[:1], *traced[:1]])
        self.hang = kind_of_hang(stills, [*lines, *traced])
        self.why_hung = message.removeprefix("the job hangs: ")
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
        for line in explain(standstills(left, self.folder, silent)):
            log(f"  {line}")

    def _pass_on(self, job: subprocess.Popen, beats: list[Beat], asked: int) -> None:
        """Forward the signal to the ranks, which save and stop: a launcher would give them little time."""
        name = signal.Signals(asked).name
        near = [beat for beat in beats if processes.alive_here(beat)]
        if any(beat.step and beat.ended is None for beat in beats):
            log(f"{name}: the job is asked to save and stop")
            number = signal.SIGINT if asked == signal.SIGINT else signal.SIGTERM
            for beat in near:  # one is enough: ranks agree
                processes.send(beat.pid, number)
            if not near:
                ask(self.folder, STOP)
        else:
            log(f"{name}: the job had not begun to train")
            processes.send(job.pid, signal.SIGTERM)

    def _end(self, job: subprocess.Popen) -> None:
        """End every process of the job, including stopped ones and those on other machines."""
        start = time.monotonic()
        for step in sorted({beat.slurm_step for beat in self.beats if beat.slurm_step and beat.ended is None}):
            if not slurm.kill_step(step):
                log(f"SLURM does not end the step {step}")
        if job.poll() is None:
            processes.send(job.pid, signal.SIGTERM)
        left = processes.end_descendants(os.getpid(), job.pid, self.events.processes)
        job.poll()
        for beat in self.beats:  # ranks that a daemon started are no descendants
            if processes.alive_here(beat) and processes.send(beat.pid, signal.SIGKILL):
                time.sleep(0.05)
                left += [beat.pid] * processes.alive_here(beat)
        log(
            f"the job's processes were ended in {time.monotonic() - start:.1f} s"
            + (f"; these would not go: {left}" if left else "")
        )

    def copy_output(self) -> None:
        """Copy new output of the job to our own output."""
        with self.output.open("rb") as output:
            output.seek(self.copied)
            new = output.read()
        self.copied += len(new)
        if new:
            put_out(new)

    # ---- how it ended ----------------------------------------------------------------------------------------------

    def verdict(
        self, has_trained: bool = True, rules: Mapping[FailureKind, Action] = {}
    ) -> tuple[JobVerdict, Optional[End], str]:
        """(verdict, the rank that failed first, why). has_trained: whether the job made steps in earlier attempts"""
        text = self.output.read_text(encoding="utf-8", errors="replace") if self.output.exists() else ""
        output = text[-OUTPUT:]
        reported = codes_in_log(output)
        codes = [beat.ended for beat in self.beats if beat.ended is not None] + list(reported.values())
        if not any(code < 0 for code in codes):  # the launcher did not report them
            codes += [-(number or signal.SIGKILL) for number in self.killed.values()]
        if self.returned == 0 and not (codes and all(codes)):  # a script may hide a failure: torchrun ... | tee log
            codes = [0]
        elif self.returned and self.returned > 1:  # our launcher returns the code of a rank, torchrun always 1
            codes.append(from_shell(self.returned))
        codes = codes or [self.returned or 1]
        ends = self.ends(output, reported)
        first = first_failure(ends)
        evidence = Evidence(
            output=output,
            oom_kills=self.oom_kills,
            has_trained=has_trained or any(beat.step > beat.since > 0 for beat in self.beats),
            hang=self.hang,
            lost_node=self.lost_node,
        )
        code = judge(codes, evidence).code
        if first and code and code in {end.code for end in ends}:
            code = first.code  # else the code is that of a rank without a heartbeat
        why = self.why_hung or (first.why if first and first.code == code else "")
        if code and not self.hang:
            why = why or reason_in_log(output, code)
        return judge([code], evidence._replace(why=why), rules), first, why if code or self.hang else ""

    def ends(self, output: str = "", reported: Mapping[int, int] = {}) -> list[End]:
        """The ends of the ranks: what they said, or what their launcher or the kernel says of them."""
        by_signal, ends = signals_in_log(output), []
        for beat in self.beats:
            code, number = beat.ended, self.killed.get(beat.rank)
            if code is None and number:
                code = -number
            if code is None and processes.is_gone(beat):  # only its launcher knows the signal
                code = reported.get(beat.pid, by_signal.get(beat.rank))
            if code is None and number is not None:
                code = -signal.SIGKILL
            if code is not None:
                ends.append(End(beat.at, beat.rank, beat.host, code, beat.why))
        for beats, seconds in self.silent_nodes:
            first = min(beats, key=lambda beat: beat.rank)
            why = f"{NO_WORD} {first.host} for {seconds:.0f} s: it is gone, or cut off"
            ends.append(End(first.at, first.rank, first.host, PeerLost.code, why))
        return ends


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
