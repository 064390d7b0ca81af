# SPDX-License-Identifier: Apache-2.0
"""A small engine without a model, and servers of it: next tokens are drawn from a distribution made by a hash."""

import contextlib
import hashlib
import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace

from megatron.errors import DataError
from megatron.inference.requests import FoundText, Output, Request, TokenScore
from megatron.serving.engine_thread import EngineThread
from megatron.serving.metrics import ServeMetrics
from megatron.serving.served_model import ServedModel
from megatron.serving.server import Service, app
from megatron.serving.settings import ServeLimits
from megatron.telemetry.web import listen
from megatron.tokenizer.base import Tokenizer

EOD, LONGEST = 256, 512
LETTERS = [*b"etaoin shrdlu\n.", 0xC3, 0xA9, 0xA4, 0xF0, 0x9F, 0x98, 0x80]  # with bytes of longer characters


def decoded(ids) -> str:
    return b"".join(b"<end>" if id == EOD else bytes([id]) for id in ids).decode("utf-8", "replace")


class ByteTokenizer(Tokenizer):
    """A token for each byte."""

    def __init__(self):
        engines = dict(bytes=lambda: lambda text: list(text.encode()))
        super().__init__("bytes", 257, EOD, "bytes", engines, decoded, special_tokens={})


def number(*words) -> float:
    """A number in [0, 1) that depends on words alone."""
    return int.from_bytes(hashlib.sha256(repr(words).encode()).digest()[:6], "big") / (1 << 48)


def distribution(text: tuple[int, ...]) -> dict[int, float]:
    """Token -> log-probability after a text, best first."""
    weights = {token: 0.05 + number(text[-3:], token) ** 4 for token in LETTERS}
    weights[EOD] = 0.02 if len(text) % 7 else 0.3
    whole = sum(weights.values())
    order = sorted(weights, key=lambda token: (-weights[token], token))
    return {token: math.log(weights[token] / whole) for token in order}


def chosen(request: Request, new: tuple[int, ...]) -> int:
    text = request.prompt + new
    scores = distribution(text)
    if len(new) < request.sampling.min_tokens_to_generate:
        scores.pop(EOD)
    if request.sampling.is_greedy:
        return next(iter(scores))
    draw, whole = number("draw", request.sampling.sampling_seed, request.index, len(new)), 0.0
    total = sum(map(math.exp, scores.values()))
    for token, score in scores.items():
        whole += math.exp(score) / total
        if draw < whole:
            return token
    return token


def beams(request: Request) -> tuple[FoundText, ...]:
    """What the toy finds for a beam search: greedy texts of falling lengths."""
    text = alone(replace(request, sampling=replace(request.sampling, greedy=True, stop_token_ids=None), end=None))
    return tuple(FoundText(-1.5 - one, tuple(text[: len(text) - one]), "stop") for one in range(request.texts))


def alone(request: Request) -> list[int]:
    """The answer to a request, computed without an engine."""
    new: tuple[int, ...] = ()
    limit = min(request.sampling.tokens_to_generate, LONGEST - len(request.prompt))
    ends = request.sampling.ends(request.end)
    while len(new) < limit:
        token = chosen(request, new)
        if token in ends:
            break
        new += (token,)
    return list(new)


@dataclass
class Stats:
    running: int
    waiting: int
    tokens_generated: int


class ToyEngine:
    """Has the interface of `inference.engine.Engine`. pause: seconds that a step takes."""

    def __init__(self, max_batch=16, pause=0.0, mixes=False):
        self.max_batch, self.pause, self.mixes = max_batch, pause, mixes
        self.waiting, self.running, self.new = deque(), {}, {}
        self.made, self.numbers, self.closed, self.added = 0, 0, False, []
        self.failing = None
        self.thread = None

    def add(self, request):
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread, "an engine belongs to one thread"
        if len(request.prompt) >= LONGEST:
            raise DataError("the prompt is too long", do="give a shorter one")
        self.numbers += 1
        self.added.append(request)
        self.waiting.append((self.numbers, request))
        return self.numbers

    def cancel(self, at):
        self.waiting = deque(one for one in self.waiting if one[0] != at)
        self.running.pop(at, None)

    @property
    def busy(self):
        return bool(self.waiting or self.running)

    def step(self):
        self.thread = self.thread or threading.get_ident()
        assert threading.get_ident() == self.thread and not self.closed
        time.sleep(self.pause)
        if self.failing:
            raise self.failing
        outputs = []
        while self.waiting and len(self.running) < self.max_batch:
            at, request = self.waiting.popleft()
            self.running[at], self.new[at] = request, ()
        for at, request in list(self.running.items()):
            if request.search:
                outputs.append(Output(at, finish="stop", found=beams(request)))
                del self.running[at]
                continue
            first = not self.new[at]
            token, scores = chosen(request, self.new[at]), distribution(request.prompt + self.new[at])
            prompt = ()
            if first and request.prompt_logprobs:
                prompt = tuple(self.score(request, request.prompt[:n], token) for n, token in enumerate(request.prompt))
            if token in request.sampling.ends(request.end):
                outputs.append(Output(at, finish="stop", prompt=prompt))
                del self.running[at]
                continue
            new = TokenScore(token)
            if request.logprobs is not None:
                new = TokenScore(token, scores[token], tuple(scores.items())[: request.logprobs])
            self.new[at] += (token,)
            self.made += 1
            limit = min(request.sampling.tokens_to_generate, LONGEST - len(request.prompt))
            finish = "length" if len(self.new[at]) == limit else None
            if finish:
                del self.running[at]
            outputs.append(Output(at, new, finish, prompt))
        return outputs

    @staticmethod
    def score(request, before, token):
        if not before:
            return TokenScore(token)
        scores = distribution(before)
        return TokenScore(token, scores.get(token, -20.0), tuple(scores.items())[: request.logprobs or 0])

    def stats(self):
        return Stats(len(self.running), len(self.waiting), self.made)

    def close(self):
        self.closed = True


@dataclass
class Served:
    url: str
    service: Service
    engines: list
    server: object


@contextlib.contextmanager
def served(engines=None, limits=None, keys=(), names=("toy",), **more):
    """A server on a free port of this machine, in a thread."""
    import uvicorn

    from megatron.serving.connection import Connection

    engines = engines or [ToyEngine() for _ in names]
    metrics, limits = ServeMetrics(), limits or ServeLimits()
    models = {
        name: ServedModel(
            name,
            ByteTokenizer(),
            LONGEST,
            EngineThread(engine, room=limits.room, version="iteration 7", meter=metrics.of(name)),
            **more,
        )
        for name, engine in zip(names, engines, strict=True)
    }
    service = Service(models, metrics, limits, keys)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app(service), http=Connection, ws="none", lifespan="on", log_level="error", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", service, engines, server)
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()
