# SPDX-License-Identifier: Apache-2.0
"""Events reach a real server and a real command; one that is gone costs neither time nor the run."""

import json
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron.errors import SettingsError
from megatron.settings.schema import Logging
from megatron.telemetry import notify
from megatron.telemetry.events import EventLog, read_events
from megatron.telemetry.notify import EventCommand, Outbox, Undeliverable, open_events, post, webhook_url


class Server:
    """A web server that answers each request with the next of `codes`, the last one forever; 0: it does not answer."""

    def __init__(self, *codes):
        self.codes, self.bodies, self.times, outer = list(codes), [], [], self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.times.append(time.monotonic())
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                code = outer.codes.pop(0) if len(outer.codes) > 1 else outer.codes[0]
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def recorded(outbox, *kinds):
    log = EventLog(listeners=[outbox])
    for kind in kinds:
        log.record(kind, f"about {kind}", iteration=7)


def test_a_webhook_gets_the_event_and_a_line_for_chats():
    with Server(200) as server:
        outbox = Outbox("--webhook", partial(post, server.url), run="runs/a")
        recorded(outbox, "start", "spike", "save", "no_step", "end", "messages_lost")
        outbox.close()
    assert [body["event"] for body in server.bodies] == ["spike", "no_step", "end"]  # warnings, errors, and the end
    spike = server.bodies[0]
    assert spike["text"] == "WARNING runs/a: about spike" and spike["run"] == "runs/a" and spike["iteration"] == 7


def test_every_level_can_be_asked_for():
    sent = []
    outbox = Outbox("--webhook", sent.append, run="runs/a", level="info")
    recorded(outbox, "start", "save", "end")
    outbox.close()
    assert [event["event"] for event in sent] == ["start", "save", "end"]


def test_a_server_that_fails_is_tried_again_with_pauses():
    lost = []
    with Server(500, 429, 200) as server:
        outbox = Outbox(
            "--webhook", partial(post, server.url), run="a", lost=lambda *facts: lost.append(facts), pauses=(0.1, 0.2)
        )
        recorded(outbox, "spike")
        while len(server.bodies) < 3:
            time.sleep(0.01)
        outbox.close()
    assert len(server.bodies) == 3 and not lost
    assert server.times[1] - server.times[0] > 0.09 and server.times[2] - server.times[1] > 0.19


def test_what_the_server_refuses_is_lost_at_once():
    lost = []
    with Server(404) as server:
        outbox = Outbox("--webhook", partial(post, server.url), run="a", lost=lambda *facts: lost.append(facts))
        recorded(outbox, "spike", "no_step")
        outbox.close()
    assert len(server.bodies) == 2 and lost == [(1, "HTTP 404 Not Found")] * 2


def test_a_lost_webhook_is_an_event_and_costs_the_run_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(notify, "PAUSES", (0.01, 0.01))
    lines = []
    log = open_events(Logging(webhook="http://127.0.0.1:9/"), str(tmp_path), log=lines.append)
    log.record("spike", "a spike")
    log.record("end", "the end", code=0)
    log.close()
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert sorted(kinds) == ["end", "messages_lost", "messages_lost", "spike"]
    assert any("1 event was not sent to --webhook: " in line and "refused" in line for line in lines)


def test_neither_a_slow_server_nor_a_full_queue_makes_anybody_wait(monkeypatch):
    monkeypatch.setattr(notify, "ROOM", 4)
    lost, release = [], threading.Event()
    outbox = Outbox("--webhook", lambda event: release.wait(), run="a", lost=lambda *facts: lost.append(facts))
    outbox.queue.maxsize = 4
    start = time.thread_time()
    recorded(outbox, *["spike"] * 20)
    assert time.thread_time() - start < 0.1 and outbox.dropped >= 15
    outbox.close(timeout=0.2)  # nothing is sent
    assert sum(count for count, _ in lost) >= 4 and "did not answer" in lost[-1][1]
    release.set()


def test_a_command_gets_the_event(tmp_path):
    command = EventCommand(
        f'cat > {tmp_path}/stdin; echo "$EVENT $EVENT_LEVEL $EVENT_ITERATION $EVENT_RANK." > {tmp_path}/env'
    )
    outbox = Outbox("--on-event", command, run="a")
    recorded(outbox, "spike")
    outbox.close()
    assert json.loads((tmp_path / "stdin").read_text())["message"] == "about spike"
    assert (tmp_path / "env").read_text() == "spike warning 7 .\n"


@pytest.mark.parametrize(
    "words, why", [("echo oh no >&2; exit 3", "exit code 3: oh no"), ("sleep 9 & wait", "it did not end within 0.2 s")]
)
def test_a_command_that_fails_is_told(words, why, monkeypatch):
    monkeypatch.setattr(notify, "PATIENCE", 0.2)
    with pytest.raises(Undeliverable, match=why):
        EventCommand(words)(dict.fromkeys(("event", "level", "message", "iteration", "rank", "run"), "x"))


def test_the_url_may_be_in_a_file(tmp_path):
    (tmp_path / "url").write_text("https://example.org/secret\n")
    assert webhook_url(f"@{tmp_path / 'url'}") == "https://example.org/secret"
    with pytest.raises(SettingsError, match="must begin with http"):
        webhook_url("example.org")
    with pytest.raises(SettingsError, match="cannot be read"):
        webhook_url("@/nowhere/url")
