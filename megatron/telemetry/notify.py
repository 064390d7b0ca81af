# SPDX-License-Identifier: Apache-2.0
"""Send events to a command (`--on-event`) or to a URL that accepts JSON (`--webhook`).

    log = open_events(config.logging, config.checkpoint.save)
    log.record("spike", ...)
    log.close()

Each outbox has a thread and a bounded queue, so neither training nor another outbox ever waits for it. A webhook gets the
event as in events.jsonl, with two more fields: `run` (the --save folder) and `text`, a line for chat programs.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Optional

from megatron.errors import SettingsError
from megatron.settings.schema import Logging
from megatron.telemetry.event_rules import read_rules
from megatron.telemetry.events import LEVELS, EventLog
from megatron.telemetry.metrics import metrics_path
from megatron.telemetry.run_folder import events_path

ROOM = 256  # maximal number of queued events
PAUSES = (1.0, 3.0, 9.0, 27.0)  # seconds before each further try
TIMEOUT = 10.0  # seconds for a try of the webhook
PATIENCE = 60.0  # seconds for a command
LAST = 8.0  # seconds that the end of a run waits for events that are not sent yet: less than a supervisor's patience


class Undeliverable(Exception):
    """An event could not be sent. again: whether another try may help."""

    def __init__(self, why: str, again: bool = True):
        super().__init__(why)
        self.again = again


class Outbox:
    """Sends events in a thread of its own.

    send:   sends an event, or raises Undeliverable
    level:  lowest level of the events to send; the end of a run is always sent
    lost:   called with (number of events, reason) after some could not be sent
    """

    def __init__(
        self,
        name: str,
        send: Callable[[dict], None],
        *,
        run: str,
        level: str = "warning",
        lost: Callable[[int, str], None] = lambda count, why: None,
        pauses: Optional[tuple[float, ...]] = None,
    ):
        self.name, self.send, self.run, self.lost = name, send, run, lost
        self.pauses = PAUSES if pauses is None else pauses
        self.levels = LEVELS[LEVELS.index(level) :]
        self.queue: queue.Queue[Optional[dict]] = queue.Queue(ROOM)
        self.dropped = 0  # events for which the queue had no room, not reported yet
        self.hurry = threading.Event()  # the run has ended: no more pauses
        self.thread: Optional[threading.Thread] = None

    def __call__(self, event: dict) -> None:
        """Queue an event. Returns immediately."""
        if event["event"] == "messages_lost" or not (event["level"] in self.levels or event["event"] == "end"):
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name=f"events to {self.name}", daemon=True)
            self.thread.start()
        text = f"{event['level'].upper()} {self.run}: {event['message']}"
        try:
            self.queue.put_nowait({"text": text, "run": self.run} | event)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout: float = LAST) -> None:
        """Send the queued events for at most `timeout` seconds; the rest are lost."""
        if self.thread is None:
            return
        deadline = time.monotonic() + timeout
        self.hurry.set()
        try:
            self.queue.put(None, timeout=timeout)
        except queue.Full:
            pass
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self._report(self.queue.qsize() or 1, f"the run ended, and {self.name} did not answer for {timeout:g} s")
        self.thread = None

    def processes(self) -> set[int]:
        """The processes that send an event at the moment."""
        if not isinstance(self.send, EventCommand):
            return set()
        with self.send.lock:
            return set(self.send.running)

    def _work(self) -> None:
        while (event := self.queue.get()) is not None:
            why = self._deliver(event)
            if self.thread is None:  # closed, and the loss was reported
                return
            dropped, self.dropped = self.dropped, 0
            if why or dropped:
                self._report(dropped + bool(why), why or f"more than {ROOM} events were waiting")

    def _deliver(self, event: dict) -> str:
        """Send an event, with several tries. Returns the reason if all failed."""
        for pause in (*self.pauses, None):
            hurried = self.hurry.is_set()
            try:
                self.send(event)
                return ""
            except Undeliverable as error:
                why, again = str(error), error.again
            except Exception as error:  # such as an invalid URL: the thread goes on
                why, again = f"{type(error).__name__}: {error}", False
            if not again or hurried or pause is None:  # after the end of the run there is one more try
                break
            self.hurry.wait(pause)
        return why

    def _report(self, count: int, why: str) -> None:
        try:
            self.lost(count, why)
        except (OSError, ValueError):  # the log is closed already
            pass


def post(url: str, event: dict) -> None:
    """Send an event to a URL, as JSON. Raises Undeliverable."""
    body = json.dumps(event, ensure_ascii=False).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "megatron-events"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        raise Undeliverable(
            f"HTTP {error.code} {error.reason}", again=error.code in (408, 429) or error.code >= 500
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise Undeliverable(str(reason) or type(error).__name__, again=isinstance(error, OSError)) from None


class EventCommand:
    """Runs a shell command for an event: its JSON is on stdin, its first fields in the environment."""

    def __init__(self, words: str):
        self.words, self.lock = words, threading.Lock()
        self.running: set[int] = set()  # the process of the present command

    def __call__(self, event: dict) -> None:
        """Run the command to its end. Raises Undeliverable."""
        names = ("level", "message", "iteration", "rank", "run")
        more = {f"EVENT_{name.upper()}": "" if event[name] is None else str(event[name]) for name in names}
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        environment = {**os.environ, "EVENT": event["event"], **more}
        with self.lock:  # so that `processes` cannot miss the process
            process = subprocess.Popen(self.words, shell=True, env=environment, start_new_session=True, **pipes)
            self.running.add(process.pid)
        with process:
            try:
                _, errors = process.communicate(f"{json.dumps(event, ensure_ascii=False)}\n".encode(), PATIENCE)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise Undeliverable(f"it did not end within {PATIENCE:g} s", again=False) from None
            finally:
                self.running.discard(process.pid)
        if process.returncode:
            last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1][:200]
            raise Undeliverable(f"exit code {process.returncode}{': ' * bool(last)}{last}", again=False)


def webhook_url(given: str) -> str:
    """The URL of --webhook, or with @FILE the first line of the file. Raises SettingsError if it is no http(s) URL."""
    url = given
    if given.startswith("@"):
        try:
            url = Path(given[1:]).read_text(encoding="utf-8").strip().split("\n")[0].strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"--webhook {given}: cannot be read: {error}") from None
    if not url.startswith(("http://", "https://")):
        what = f"--webhook {given}" if url == given else f"--webhook {given}: its first line"
        raise SettingsError(f"{what}: it must begin with http:// or https://", do="or @FILE, a file with the URL")
    return url


def outboxes(logging: Logging, run: str, lost: Callable[[str, int, str], None]) -> list[Outbox]:
    """The outboxes of a run. lost: called with (flag, number of events, reason)"""
    senders = {}
    if logging.on_event:
        senders["--on-event"] = EventCommand(logging.on_event)
    if logging.webhook:
        senders["--webhook"] = partial(post, webhook_url(logging.webhook))
    return [
        Outbox(flag, send, run=run, level=logging.event_level, lost=partial(lost, flag))
        for flag, send in senders.items()
    ]


def open_events(
    logging: Logging,
    save: Optional[str],
    *,
    log: Callable[[str], None] = lambda text: None,
    source: str = "run",
    active: bool = True,
) -> EventLog:
    """The events of a run: their file, rules and outboxes. Raises SettingsError for rules and URLs that cannot work."""
    events = EventLog(events_path(metrics_path(logging, save)), log=log, source=source, active=active)
    events.rules = read_rules(logging.event_rules)

    def lost(flag: str, count: int, why: str) -> None:
        message = f"{count} event{'s were' if count > 1 else ' was'} not sent to {flag}: {why}"
        events.record("messages_lost", message, to=flag, lost=count, why=why)

    if active:
        events.outboxes = outboxes(logging, save or logging.metrics_file or "a run without --save", lost)
        events.listeners += events.outboxes
    return events


def event_problem(logging: Logging) -> Optional[SettingsError]:
    """The error in --event-rules or --webhook; None without one."""
    try:
        read_rules(logging.event_rules)
        if logging.webhook:
            webhook_url(logging.webhook)
    except SettingsError as error:
        return error
    return None
