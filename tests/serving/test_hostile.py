# SPDX-License-Identifier: Apache-2.0
"""Requests that are wrong in some 250 ways get an error of the documented form, and change nothing for others."""

import contextlib
import json
import logging
import random
import socket
import time

import orjson
import pytest

from megatron.serving import connection
from megatron.serving.settings import ServeLimits
from tests.serving.toy import ToyEngine, served

GOOD = dict(model="toy", prompt="a good one", max_tokens=8, seed=1)
TALK = dict(model="toy", messages=[dict(role="user", content="x")])
ODD = [
    "",
    " ",
    "\x00",
    "\ud7ff\ue000",
    "\U0010ffff",
    "\u202e\u0000\uffff",
    "a" * 100_000,
    -1,
    1e308,
    10**30,
    True,
    None,
    [],
    {},
    [[]],
    {"a": {}},
]


@pytest.fixture(scope="module")
def toy():
    before, connection.SLOW = connection.SLOW, 0.5
    limits = ServeLimits(max_body_bytes=200_000, body_timeout=0.5, max_batch=4, max_queue=4)
    with served([ToyEngine(max_batch=4)], limits, keys=["right", "other"]) as found:
        yield found
    connection.SLOW = before


def exchange(url: str, raw: bytes, pieces=(), wait: float = 10.0) -> bytes:
    """What a server answers to bytes, until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait) as connected:
        with contextlib.suppress(ConnectionError):
            connected.sendall(raw)
            for pause, piece in pieces:
                time.sleep(pause)
                connected.sendall(piece)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := connected.recv(65536):
                answer += part
        return answer


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    own = {
        "host": "localhost",
        "authorization": "Bearer right",
        "content-type": "application/json",
        "connection": "close",
    }
    own |= {"content-length": str(len(body))} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in own.items() if value is not None)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def parsed(answer: bytes) -> tuple[int, dict, bytes]:
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), headers, body


def bodies() -> list[tuple[str, bytes]]:
    """(path, body): JSON whose values are wrong, and what is no JSON."""
    found = []
    fields = """prompt max_tokens temperature top_p n stop seed stream stream_options logprobs echo best_of logit_bias
        presence_penalty frequency_penalty model user""".split()
    for at, field in enumerate(fields):
        for odd in (
            ODD[at % len(ODD)],
            ODD[(3 * at + 1) % len(ODD)],
            ODD[(5 * at + 2) % len(ODD)],
            {"x": [1, {}]},
            "NaN",
        ):
            found.append(("/v1/completions", json.dumps(GOOD | {field: odd}).encode()))
    for field in (
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "chat_template_kwargs",
        "tools",
        "response_format",
    ):
        for odd in ODD[:12:2]:
            found.append(("/v1/chat/completions", json.dumps(TALK | {field: odd}).encode()))
    good = dict(prompts=["a"], tokens_to_generate=4)
    for field in (
        "prompts",
        "tokens_to_generate",
        "logprobs",
        "temperature",
        "top_k",
        "top_p",
        "beam_width",
        "random_seed",
    ):
        for odd in ({"x": 1}, "1", -5, ["", 3]):
            found.append(("/api", json.dumps(good | {field: odd}).encode()))
    deep = b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    for raw in (
        b"", b"{", b"null", b"[]", b'"text"', b"1", b"\xff\xfe", b"\x00", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}',
        deep,
        b'{"prompt": "a", "temperature": Infinity}', b"{'prompt': 'a'}", b'{"prompt": "a"} {"prompt": "b"}',
        b"\xef\xbb\xbf{}",
        b'{"prompt": "\xc3\x28"}', b'{"prompt": "a", "max_tokens": 1e999}', b'{"prompt": "a", "max_tokens": 2.5}',
    ):  # fmt: skip
        found += [(path, raw) for path in ("/v1/completions", "/v1/chat/completions", "/api")]
    return found


def requests() -> list[bytes]:
    found = [request("PUT" if path == "/api" else "POST", path, body) for path, body in bodies()]
    good = json.dumps(GOOD).encode()
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW", "HEAD"):
        found.append(request(method, "/v1/completions", good))
        found.append(request(method.lower(), "/v1/chat/completions"))
    for method in ("POST", "GET", "DELETE"):
        found.append(request(method, "/api", b'{"prompts": ["a"]}'))
    for path in (
        "/v2", "/v1", "/v1/completions/", "//v1/completions", "/v1/models/none", "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/%00", "/serve.js/..", "/index.html%00.js", "/" + "a" * 5000, "/v1/models/%ff%fe", "/page/serve.js",
        "/%f0%9f%98%80",
    ):  # fmt: skip
        found.append(request("GET", path))
    for key in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic right",
        "right",
        "Bearer right2",
        "Bearer righ",
        "Bearer \xff",
    ):
        found.append(request("POST", "/v1/completions", good, authorization=key))
        found.append(request("GET", "/metrics", authorization=key))
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/jsonp"):
        found.append(request("POST", "/v1/completions", good, content_type=kind))
    for host in ("evil.example", "127.0.0.1.evil.example"):
        found.append(request("GET", "/v1/models", host=host))
    found.append(request("POST", "/v1/completions", json.dumps(GOOD | dict(prompt="b" * 300_000)).encode()))
    found.append(request("POST", "/v1/completions", good, content_length="9" * 15))
    return found


def test_250_wrong_requests(toy, caplog):
    chance, wrong = random.Random(7), requests()
    assert len(wrong) > 250
    chance.shuffle(wrong)
    with caplog.at_level(logging.WARNING):
        for raw in wrong:
            status, headers, body = parsed(exchange(toy.url, raw))
            shown = (raw[:300], status, body[:300])
            if status == 200:  # some values turn out to be right, as an empty stop
                assert b'"choices"' in body or b'"text"' in body, shown
                continue
            assert 400 <= status < 500, shown
            if raw.startswith(b"HEAD"):
                continue
            error = orjson.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10, shown
            assert error["type"] in ("invalid_request_error", "authentication_error", "rate_limit_error"), shown
            assert "Traceback" not in error["message"] and len(error["message"]) < 800, shown
            assert ("www-authenticate" in headers) == (status == 401), shown
    assert [record.getMessage() for record in caplog.records if record.name != "uvicorn.error"] == []
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    still_fine(toy)


def still_fine(toy) -> None:
    status, _, body = parsed(exchange(toy.url, request("POST", "/v1/completions", json.dumps(GOOD).encode())))
    assert status == 200 and orjson.loads(body)["usage"]["completion_tokens"] > 0
    for _ in range(200):
        if toy.service.models["toy"].thread.in_flight == 0:
            return
        time.sleep(0.01)
    raise AssertionError("texts are left")


@pytest.mark.parametrize(
    "raw", [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"A" * 200_000, b"POST /v1 HTTP/1.1\r\n: x\r\n\r\n"]
)
def test_what_is_no_http(toy, raw):
    status, _, body = parsed(exchange(toy.url, raw + b"\r\n\r\n"))
    assert status == 400 and orjson.loads(body)["error"]["code"] == "invalid_http"
    still_fine(toy)


def test_slow_clients(toy):
    good = json.dumps(GOOD).encode()
    whole = request("POST", "/v1/completions", good)
    status, _, body = parsed(exchange(toy.url, whole[:-10]))  # a body that never ends
    assert status == 408 and orjson.loads(body)["error"]["code"] == "timeout"
    assert exchange(toy.url, b"POST /v1/completions HTTP/1.1\r\nhost: loc") == b""  # a head that never ends: closed
    assert exchange(toy.url, b"") == b""  # nothing at all
    slow = [(0.05, whole[at : at + 60]) for at in range(0, len(whole), 60)]
    assert parsed(exchange(toy.url, b"", slow))[0] == 200  # slow, but in time
    chunked = request("POST", "/v1/completions", b"", content_length=None, transfer_encoding="chunked")
    bad = chunked + b'5\r\n{"pro\r\nzz\r\n'
    assert exchange(toy.url, bad) == b"" or parsed(exchange(toy.url, bad))[0] == 400
    long = chunked + b"".join(b"10000\r\n" + b"x" * 65536 + b"\r\n" for _ in range(6))
    assert parsed(exchange(toy.url, long))[0] == 413
    still_fine(toy)


def test_a_second_head_that_never_ends(toy):
    """After a good request on the same connection."""
    first = request("GET", "/health", connection="keep-alive")
    assert exchange(toy.url, first, [(0.3, b"GET /hea")], wait=3.0).startswith(b"HTTP/1.1 200")
    still_fine(toy)


def test_healthy_answers_are_not_logged(toy, caplog):
    with caplog.at_level(logging.INFO, logger="megatron.serving"):
        for path in ("/health", "/v1/models"):
            exchange(toy.url, request("GET", path))
        until = time.monotonic() + 20  # a line comes after its answer
        while not (said := [one.getMessage() for one in caplog.records if one.name == "megatron.serving"]):
            assert time.monotonic() < until
            time.sleep(0.01)
    assert len(said) == 1 and said[0].startswith('GET "/v1/models" 200 ')


def test_health_and_page_need_no_key(toy):
    for path in ("/health", "/"):
        status, headers, _ = parsed(exchange(toy.url, request("GET", path, authorization=None)))
        assert status == 200 and "default-src 'self'" in headers["content-security-policy"]
    status, _, body = parsed(exchange(toy.url, request("GET", "/v1/models", authorization="Bearer other")))
    assert status == 200 and orjson.loads(body)["data"][0]["id"] == "toy"
