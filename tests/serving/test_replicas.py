# SPDX-License-Identifier: Apache-2.0
"""Replicas behind a front: connections that are cut at any byte, replicas that end, that hang, and that are full."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request

import pytest

from megatron.errors import PeerLost, SettingsError, UsageError
from megatron.serving import replicas as module
from megatron.serving.front import Front, front_app, merged
from megatron.serving.replicas import Child, Replica, Replicas
from megatron.serving.server import web_server
from megatron.serving.settings import ServeLimits
from megatron.telemetry.web import listen
from megatron.tools import serve
from tests.serving.test_limits import LONG, open_stream, post, text_of, wait_for
from tests.serving.toy import ToyEngine, served

pytestmark = pytest.mark.sampled(2)

pytest.importorskip("aiohttp")


class Cutter:
    """Passes connections on to a server, and cuts some of them after some bytes of the answer."""

    def __init__(self, url: str, share: float, seed: int):
        self.to, self.share, self.chance, self.cut = int(url.rpartition(":")[2]), share, random.Random(seed), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._pass, args=self.listener.accept()[:1], daemon=True).start()

    def _pass(self, client):
        with client, socket.create_connection(("127.0.0.1", self.to)) as server, contextlib.suppress(OSError):
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()
            while part := client.recv(65536):
                server.sendall(part)

    def _back(self, server, client):
        room = self.chance.randrange(12_000) if self.chance.random() < self.share else 1 << 40
        with contextlib.suppress(OSError):
            while part := server.recv(65536):
                client.sendall(part[:room])
                room -= len(part)
                if room <= 0:
                    self.cut += 1
                    # A reset, as of a killed process
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    break
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def fronted(*found: Replica, limits=None):
    """The address of a front of some replicas, when all of them are ready."""
    limits = limits or ServeLimits(stop_timeout=5)
    listener = listen("127.0.0.1", 0)
    server = web_server(front_app(Front(Replicas(found), limits)), limits)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    wait_for(lambda: all(replica.ready for replica in found))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive() and all(replica.requests == 0 for replica in found)


def streamed(url: str, **body) -> str:
    _, answer = open_stream(url, **body)
    assert answer.status == 200
    events = [line[6:] for line in answer.read().split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    found = [json.loads(event) for event in events]
    assert len({event.get("id") for event in found}) == 1, found[-1]
    return "".join(event["choices"][0]["text"] for event in found)


@pytest.mark.sampled(5)
def test_connections_that_are_cut_at_any_byte():
    with served([ToyEngine()]) as one, served([ToyEngine()]) as two:
        cutters = [Cutter(one.url, 0.2, seed=1), Cutter(two.url, 0.2, seed=2)]
        with fronted(*(Replica(str(number), cutter.url) for number, cutter in enumerate(cutters))) as url:

            def ask(seed: int) -> bool:
                body = dict(model="toy", prompt=f"text {seed}", max_tokens=40 + seed, seed=seed)
                text = streamed(url, **body) if seed % 3 else post(url, **body)["choices"][0]["text"]
                return text == text_of(body)

            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                assert all(pool.map(ask, range(80)))
            both = {}  # the texts of a stream of several
            _, answer = open_stream(url, model="toy", prompt=["a", "b"], n=2, seed=5, max_tokens=90)
            for line in answer.read().split(b"\n\n")[:-2]:
                choice = json.loads(line[6:])["choices"][0]
                both[choice["index"]] = both.get(choice["index"], "") + choice["text"]
            alone = post(url, model="toy", prompt=["a", "b"], n=2, seed=5, max_tokens=90)["choices"]
            assert both == {choice["index"]: choice["text"] for choice in alone}
        assert sum(cutter.cut for cutter in cutters) > 1
        for toy in (one, two):  # what was cut was cancelled, too
            wait_for(lambda toy=toy: toy.service.models["toy"].thread.in_flight == 0)


@pytest.mark.sampled(5)
def test_without_a_seed_a_text_goes_on():
    """The front gives one, so that the other replica continues the same text."""
    with served([ToyEngine(pause=0.005)]) as one, served([ToyEngine(pause=0.005)]) as two:
        with fronted(Replica("one", one.url), Replica("two", two.url)) as url:
            body = {name: value for name, value in LONG.items() if name != "seed"}
            _, answer = open_stream(url, **body)
            start = answer.read(3000)
            [busy] = [toy for toy in (one, two) if toy.engines[0].busy]
            busy.engines[0].failing = PeerLost("gone")
            whole = start + answer.read()
            [seed] = {request.sampling.sampling_seed for toy in (one, two) for request in toy.engines[0].added}
            events = [json.loads(line[6:]) for line in whole.split(b"\n\n")[:-2]]
            text = "".join(event["choices"][0]["text"] for event in events)
            assert text == text_of(LONG | dict(seed=seed)) and one.engines[0].added and two.engines[0].added


def test_weights_that_have_changed_do_not_go_on_with_a_text():
    with served([ToyEngine(pause=0.005)]) as one, served([ToyEngine(pause=0.005)]) as two:
        for toy, version in ((one, "iteration 1"), (two, "iteration 2")):
            toy.service.models["toy"].thread.version = version
        with fronted(Replica("one", one.url), Replica("two", two.url)) as url:
            _, answer = open_stream(url, **LONG)
            answer.read(3000)
            [busy] = [toy for toy in (one, two) if toy.engines[0].busy]
            busy.engines[0].failing = PeerLost("gone")
            last = json.loads(answer.read().split(b"\n\n")[-2][6:])
            assert last["error"]["code"] == "weights_changed"


def test_the_least_busy_replica_is_asked_and_a_full_one_is_not():
    limits = ServeLimits(max_batch=1, max_queue=0)
    with served([ToyEngine(1, pause=0.01)], limits) as one, served([ToyEngine(1, pause=0.01)], limits) as two:
        with (
            fronted(Replica("one", one.url), Replica("two", two.url)) as url,
            concurrent.futures.ThreadPoolExecutor() as pool,
        ):
            body = LONG | dict(max_tokens=80, min_tokens=80)
            answers = [pool.submit(post, url, **body | dict(seed=seed)) for seed in (1, 2)]
            wait_for(lambda: one.engines[0].busy and two.engines[0].busy)
            with pytest.raises(urllib.error.HTTPError) as error:
                post(url, **body)
            assert error.value.code == 429 and error.value.headers["retry-after"]
            assert [answer.result()["choices"][0]["text"] for answer in answers] == [
                text_of(body | dict(seed=s)) for s in (1, 2)
            ]


def test_errors_health_metrics_and_page_through_the_front():
    with served(keys=["right"]) as one, served(keys=["right"]) as two:
        with fronted(Replica("one", one.url), Replica("two", two.url)) as url:
            for path, status in (("/v1/models", 401), ("/nothing", 401), ("/", 200), ("/serve.js", 200)):
                try:
                    assert urllib.request.urlopen(url + path).status == status
                except urllib.error.HTTPError as error:
                    assert error.code == status and json.loads(error.read())["error"]["message"]
            health = json.loads(urllib.request.urlopen(url + "/health").read())
            assert health == dict(status="ok", replicas=dict(one="ok", two="ok"))
            asked = urllib.request.Request(url + "/metrics", headers=dict(authorization="Bearer right"))
            text = urllib.request.urlopen(asked).read().decode()
            for name in ("one", "two"):
                assert f'megatron_serve_requests_total{{path="/health",replica="{name}",status="200"}}' in text
            assert text.count("# TYPE megatron_serve_requests_total counter") == 1


@pytest.mark.sampled(10)
def test_a_request_that_ends_every_replica_is_given_up():
    with served([ToyEngine()]) as one:
        cutter = Cutter(one.url, 1.0, seed=1)
        cutter.chance.randrange = lambda most: 300
        with fronted(Replica("one", cutter.url, several=True)) as url:
            _, answer = open_stream(url, **LONG)
            last = (
                json.loads(answer.read().split(b"\n\n")[-2][6:]) if answer.status == 200 else json.loads(answer.read())
            )
            assert last["error"]["code"] == "lost"
            cutter.share = 0.0
            assert streamed(url, **LONG) == text_of(LONG)


def test_no_replica():
    silent = Replica("silent", "http://127.0.0.1:9")
    module_wait = "megatron.serving.front.WAIT"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_wait, 0.3)
        limits = ServeLimits(stop_timeout=1)
        listener = listen("127.0.0.1", 0)
        server = web_server(front_app(Front(Replicas([silent]), limits)), limits)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
        thread.start()
        with pytest.raises(urllib.error.HTTPError) as error:
            post(f"http://127.0.0.1:{listener.getsockname()[1]}", **LONG)
        assert error.value.code == 503 and json.loads(error.value.read())["error"]["code"] == "no_replica"
        server.should_exit = True
        thread.join(20)


CHILD = """import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(os.getpid()).encode())
    def log_message(self, *words): pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"serving x: http://127.0.0.1:{server.server_port}/v1", flush=True)
server.serve_forever()"""


def test_children_that_end_or_hang_are_started_again(monkeypatch):
    for name, value in dict(LOOK=0.05, ANSWER=0.3, PAUSES=(0.05, 1.0)).items():
        monkeypatch.setattr(module, name, value)

    async def body():
        import aiohttp

        child = Child([sys.executable, "-c", CHILD], "0", dict(A="1"))

        async def ready():
            for _ in range(2000):
                if child.ready:
                    return child.process.pid
                await asyncio.sleep(0.01)
            raise AssertionError("it does not start")

        async with aiohttp.ClientSession() as session, Replicas([child]).watched(session):
            pids = [await ready()]
            for number in (signal.SIGKILL, signal.SIGSTOP):
                os.kill(pids[-1], number)
                for _ in range(2000):
                    if not child.ready:
                        break
                    await asyncio.sleep(0.01)
                pids.append(await ready())
            assert len(set(pids)) == 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    asyncio.run(body())


@pytest.mark.sampled(1)
def test_turns():
    one, two, three = found = [Replica(name, "") for name in ("one", "two", "three")]
    replicas = Replicas(found)
    assert replicas.best() is None
    one.ready = two.ready = three.ready = True
    assert [replicas.best().name for _ in range(6)] == ["one", "two", "three"] * 2
    one.requests, two.requests = 2, 1
    assert replicas.best() is three and replicas.best([three]) is two and replicas.best([two, three]) is one
    assert replicas.best(found) is None


@pytest.mark.sampled(1)
def test_metrics_of_several_as_one():
    text = '# HELP a_total x\n# TYPE a_total counter\na_total{model="m"} 2.0\n'
    found = merged({"0": text, "1": text.replace("2.0", "5.0")}).decode()
    assert 'a_total{model="m",replica="0"} 2.0' in found and 'a_total{model="m",replica="1"} 5.0' in found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "words, error, why",
    [
        ("--load a --replicas two", UsageError, "neither a number nor an address"),
        ("--load a --replicas 0", SettingsError, "at least 1"),
        ("--load a --replicas http://x:1", UsageError, "have their own"),
        ("--replicas http://x:1 y", UsageError, "--replicas y"),
        ("--replicas 2", UsageError, "which model"),
    ],
)
def test_wrong_replicas(words, error, why):
    with pytest.raises(error, match=why):
        serve.main(words.split())
