# SPDX-License-Identifier: Apache-2.0
"""What stands before the endpoints: names of hosts, keys, the log and its metrics, signals. Without HTTP."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

from megatron.serving import server
from megatron.serving.metrics import ServeMetrics
from megatron.serving.server import CLIENT_LEFT, Hosts, Keys, Log, Service, web_server
from megatron.serving.settings import ServeLimits
from megatron.telemetry.web import local_names


def answered(middleware, path="/v1/models", kind="http", **headers) -> int:
    """The status that a request gets: 200 if it passes."""
    sent = []

    async def send(message):
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = dict(type=kind, method="GET", path=path, headers=raw)
    asyncio.run(middleware(scope, None, send))
    return sent[0]["status"]


async def passed(scope, receive, send):
    await send(dict(type="http.response.start", status=200, headers=[]))


@pytest.mark.parametrize(
    "host, local, everywhere",
    [
        ("localhost", 200, 200),
        ("localhost:8000", 200, 200),
        ("LOCALHOST:8000", 200, 200),
        ("127.0.0.1:1", 200, 200),
        ("evil.example", 400, 200),
        ("localhost.evil.example", 400, 200),
        ("evil.example:localhost", 400, 200),
        ("", 400, 200),
        (None, 400, 200),  # none at all
    ],
)
def test_a_local_server_answers_to_names_of_this_machine_alone(host, local, everywhere):
    headers = {} if host is None else dict(host=host)
    assert answered(Hosts(passed, local_names(True)), **headers) == local
    assert answered(Hosts(passed, local_names(False)), **headers) == everywhere


@pytest.mark.parametrize(
    "sent, status",
    [
        ("Bearer one", 200),
        ("bearer two", 200),
        ("BEARER   two  ", 200),
        ("Basic one", 401),
        ("Bearer three", 401),
        ("Bearer on", 401),
        ("Bearer onetwo", 401),
        ("Bearer", 401),
        ("one", 401),
        ("", 401),
        (None, 401),
    ],
)
def test_one_of_the_keys_is_needed(sent, status):
    headers = {} if sent is None else dict(authorization=sent)
    keys = Keys(passed, ["one", "two"])
    assert answered(keys, **headers) == status and answered(Keys(passed, []), **headers) == 200
    assert [answered(keys, path, **headers) for path in ("/", "/health", "/ping", "/serve.js")] == [200] * 4
    assert answered(keys, "/metrics", **headers) == answered(keys, "/health/", **headers) == status


@pytest.mark.parametrize("path, counted", [("/v1/models", "/v1/models"), ("/a", "other"), ("/v1/models/x", "other")])
@pytest.mark.parametrize("status", [200, 404, "left", "raised"])
def test_each_request_is_counted_by_a_known_path_and_its_status(path, counted, status, caplog):
    """Paths that clients make up would be a series of metrics each; of clients that left, their leaving counts."""

    async def endpoint(scope, receive, send):
        if status == "raised":
            raise OSError
        scope["left"], scope["label"] = status == "left", "me"
        await send(dict(type="http.response.start", status=200 if status == "left" else status, headers=[]))

    metrics, caplog.handler.level = ServeMetrics(), logging.INFO
    logger = logging.getLogger("megatron.serving")
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.INFO, "megatron.serving"):
            if status == "raised":
                with pytest.raises(OSError):
                    answered(Log(endpoint, metrics, ["/v1/models"]), path)
            else:
                answered(Log(endpoint, metrics, ["/v1/models"]), path)
    finally:
        logger.removeHandler(caplog.handler)
    wanted = {"left": CLIENT_LEFT, "raised": 500}.get(status, status)
    found = {
        tuple(sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "megatron_serve_requests_total"
    }
    assert found == {(counted, str(wanted)): 1.0}
    assert metrics.registry.get_sample_value("megatron_serve_clients_left_total") == (status == "left")
    [line] = {record.getMessage() for record in caplog.records}
    assert line.startswith(f"GET {json.dumps(path)} {wanted} ") and line.endswith(' user="me"') == (status != "raised")


@pytest.mark.parametrize("path, status, lines", [("/health", 200, 0), ("/health", 503, 1), ("/ping", 200, 1)])
def test_healthy_answers_alone_are_not_logged(path, status, lines, monkeypatch):
    async def endpoint(scope, receive, send):
        await send(dict(type="http.response.start", status=status, headers=[]))

    said = []
    monkeypatch.setattr(server.log, "info", lambda *words: said.append(words))
    answered(Log(endpoint, ServeMetrics(), []), path)
    assert len(said) == lines


def test_the_second_signal_ends_the_server_at_once():
    """The first one lets answers end, for as long as --stop-timeout and a little more."""
    one = web_server(passed, ServeLimits(stop_timeout=7.5))
    assert one.config.timeout_graceful_shutdown == 12 and not one.should_exit
    one.handle_exit(15, None)
    assert one.should_exit and not one.force_exit
    one.handle_exit(15, None)
    assert one.force_exit


@pytest.mark.parametrize(
    "stopping, failure, state", [(False, None, "ok"), (True, None, "stopping"), (True, OSError(), "failed")]
)
def test_whoever_divides_requests_sends_none_to_a_server_that_ends(stopping, failure, state):
    models = dict(a=SimpleNamespace(thread=SimpleNamespace(in_flight=3)))
    service = Service(models, None, ServeLimits(), stopping=stopping, failure=failure)
    found = server._health(service)
    assert found.status_code == (200 if state == "ok" else 503)
    assert json.loads(found.body) == dict(status=state, texts=dict(a=3))
