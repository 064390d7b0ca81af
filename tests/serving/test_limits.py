# SPDX-License-Identifier: Apache-2.0
"""A full queue, clients that leave, answers that take too long, an engine that fails, and a server that is told to stop."""

import asyncio
import concurrent.futures
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest

from megatron.errors import PeerLost
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.serving.engine_thread import EngineThread
from megatron.serving.errors import ApiError
from megatron.serving.metrics import ServeMetrics
from megatron.serving.openai_api import _usage
from megatron.serving.served_model import ServedModel
from megatron.serving.server import serve
from megatron.serving.settings import ServeLimits
from megatron.telemetry.web import listen
from tests.serving.toy import EOD, LONGEST, ByteTokenizer, ToyEngine, alone, served

LONG = dict(model="toy", prompt="a long one", max_tokens=400, seed=2, ignore_eos=True, min_tokens=400)


def post(url: str, path: str = "/v1/completions", **body):
    raw = json.dumps(body).encode()
    asked = urllib.request.Request(url + path, raw, {"content-type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())


def refused(url: str, **body) -> tuple[int, dict, dict]:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(url, **body)
    return error.value.code, json.loads(error.value.read())["error"], dict(error.value.headers)


def wait_for(holds) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def text_of(body: dict) -> str:
    words = dict(tokens_to_generate=body["max_tokens"], sampling_seed=body["seed"])
    words |= dict(min_tokens_to_generate=body.get("min_tokens", 0), ignore_eos=body.get("ignore_eos", False))
    return ByteTokenizer().decode(alone(Request(tuple(body["prompt"].encode()), Sampling(**words), end=EOD)))


def open_stream(url: str, **body):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    raw = json.dumps(body | dict(stream=True))
    connection.request("POST", "/v1/completions", raw, {"content-type": "application/json"})
    return connection, connection.getresponse()


def test_a_full_queue():
    with served([ToyEngine(max_batch=2, pause=0.01)], ServeLimits(max_batch=2, max_queue=3)) as toy:
        thread = toy.service.models["toy"].thread
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [
                pool.submit(post, toy.url, **LONG | dict(seed=seed, max_tokens=40, min_tokens=40)) for seed in range(5)
            ]
            wait_for(lambda: thread.in_flight == 5)
            status, error, headers = refused(toy.url, **LONG)
            assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "queue_full")
            assert int(headers["retry-after"]) >= 1
            assert refused(toy.url, **LONG | dict(n=6))[0] == 400  # it would never fit
            for seed, answer in enumerate(answers):
                body = LONG | dict(seed=seed, max_tokens=40, min_tokens=40)
                assert answer.result()["choices"][0]["text"] == text_of(body)
        assert thread.in_flight == 0 and post(toy.url, **body)["usage"]["completion_tokens"] == 40


@pytest.mark.parametrize("seconds, wait", [(0.2, 1), (7.3, 8), (60.0, 60), (900.0, 60)])
def test_a_client_of_a_busy_server_waits_for_a_text_but_not_for_long(seconds, wait):
    thread = EngineThread(ToyEngine(), room=1, version="", meter=ServeMetrics().of("toy"))
    thread.in_flight, thread._seconds = 1, seconds
    with pytest.raises(ApiError) as refused:
        asyncio.run(thread.add([Request((1,), Sampling(1))]))
    assert refused.value.headers == {"retry-after": str(wait)}


def test_tokens_of_prompts_and_those_that_were_found_are_counted_apart():
    metrics = ServeMetrics()
    metrics.of("toy").prompts(10, 3)
    said = metrics.text().decode().splitlines()
    assert 'megatron_serve_prompt_tokens_total{model="toy"} 10.0' in said
    assert 'megatron_serve_cached_prompt_tokens_total{model="toy"} 3.0' in said


def test_times_of_first_tokens_and_between_tokens_are_apart():
    metrics = ServeMetrics()
    for seconds, first in ((2.0, True), (0.25, False), (0.25, False)):
        metrics.of("toy").token(seconds, first)
    said = metrics.text().decode().splitlines()
    assert 'megatron_serve_time_to_first_token_seconds_sum{model="toy"} 2.0' in said
    assert 'megatron_serve_time_between_tokens_seconds_sum{model="toy"} 0.5' in said


def test_the_ends_of_answers_are_those_of_the_nearest_source():
    """generation_config.json, the template's eos_token, the end of document."""
    template = SimpleNamespace(end_of_turn=5)
    ends = lambda **own: ServedModel("toy", SimpleNamespace(eod=1), 8, None, **own).end_of_turn
    assert ends(template=template, ends=(7, 5)) == (7, 5) and ends(template=template) == 5
    assert ends(template=SimpleNamespace(end_of_turn=None)) == 1 and ends(template=SimpleNamespace(end_of_turn=0)) == 0


def test_what_was_found_of_a_prompt_counts_once_for_all_its_answers():
    counted = []
    model = SimpleNamespace(thread=SimpleNamespace(meter=SimpleNamespace(prompts=lambda *own: counted.append(own))))
    work = SimpleNamespace(model=model, prompts=[(1, 2, 3), (4, 5)], each=2)
    texts = [SimpleNamespace(cached=cached, tokens=[0] * 4) for cached in (2, 2, 1, 1)]
    usage = dict(prompt_tokens=5, completion_tokens=16, total_tokens=21, prompt_tokens_details=dict(cached_tokens=3))
    assert _usage(work, texts) == usage and counted == [(5, 3)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(stream):
    with served([ToyEngine(pause=0.01)]) as toy:
        connection, engine = http.client.HTTPConnection(toy.url.removeprefix("http://")), toy.engines[0]
        connection.request(
            "POST", "/v1/completions", json.dumps(LONG | dict(stream=stream)), {"content-type": "application/json"}
        )
        wait_for(lambda: engine.made > 3)
        connection.sock.shutdown(2)
        connection.close()
        wait_for(lambda: not engine.busy)
        assert engine.made < 200
        wait_for(lambda: toy.service.models["toy"].thread.in_flight == 0)
        wait_for(lambda: b"clients_left_total 1.0" in toy.service.metrics.text())
        assert b'texts_total{finish="cancelled",model="toy"} 1.0' in toy.service.metrics.text()


def test_an_answer_that_takes_too_long():
    with served([ToyEngine(pause=0.02)], ServeLimits(request_timeout=0.3)) as toy:
        status, error, _ = refused(toy.url, **LONG)
        assert (status, error["type"], error["code"]) == (504, "timeout_error", "timeout")
        _, answer = open_stream(toy.url, **LONG)
        events = [json.loads(line[6:]) for line in answer.read().split(b"\n\n") if line]
        assert answer.status == 200 and events[-1]["error"]["code"] == "timeout" and len(events) > 2
        text = "".join(event["choices"][0]["text"] for event in events[:-1])
        assert text and text_of(LONG).startswith(text)
        wait_for(lambda: not toy.engines[0].busy)


def test_an_engine_that_fails():
    engine = ToyEngine(pause=0.01)
    with served([engine]) as toy:
        _, answer = open_stream(toy.url, **LONG)
        answer.read(200)
        engine.failing = PeerLost("another rank is gone")
        last = json.loads(answer.read().strip().split(b"\n\n")[-1][6:])
        assert last["error"]["type"] == "server_error" and last["error"]["code"] == "engine_failed"
        wait_for(lambda: toy.service.failure)
        assert refused(toy.url, **LONG)[:2][0] == 500
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(toy.url + "/health")
        assert error.value.code == 503
        assert isinstance(toy.service.failure, PeerLost)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("limit, whole", [(20.0, True), (0.3, False)])
def test_a_server_that_is_told_to_stop(limit, whole):
    """Running answers end, within the limit; nothing new is taken. As SIGTERM does it (`Server.handle_exit`)."""
    engine, found = ToyEngine(pause=0.005), {}
    service = fresh_service(ServeLimits(stop_timeout=limit), engine)
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=lambda: found.setdefault("end", serve(service, listener)))
    thread.start()
    _, answer = open_stream(url, **LONG)
    answer.read(100)
    service.stop()
    wait_for(lambda: service.stopping)
    with pytest.raises(OSError):
        wait_for(lambda: post(url, **LONG | dict(max_tokens=1, min_tokens=1)) is None)
    rest = answer.read()
    thread.join(30)
    assert not thread.is_alive() and "end" in found and engine.closed
    assert rest.endswith(b"data: [DONE]\n\n") == whole
    if not whole:
        assert json.loads(rest.strip().split(b"\n\n")[-1][6:])["error"]["code"] == "stopping"


def fresh_service(limits: ServeLimits, engine: ToyEngine):
    from megatron.serving.engine_thread import EngineThread
    from megatron.serving.metrics import ServeMetrics
    from megatron.serving.served_model import ServedModel
    from megatron.serving.server import Service

    metrics = ServeMetrics()
    thread = EngineThread(engine, room=limits.room, version="iteration 7", meter=metrics.of("toy"))
    return Service({"toy": ServedModel("toy", ByteTokenizer(), LONGEST, thread)}, metrics, limits)
