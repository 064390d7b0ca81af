# SPDX-License-Identifier: Apache-2.0
"""Metrics of the server for Prometheus (/metrics)."""

from dataclasses import fields, is_dataclass

PREFIX = "megatron_serve_"
TOKEN_TIMES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
REQUEST_TIMES = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600)


class ServeMetrics:
    """The instruments of a server. `of(model)` returns those of one model."""

    def __init__(self):
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = CollectorRegistry()
        make = dict(registry=self.registry)
        model = ["model"]
        histograms = {
            "time_to_first_token_seconds": ("Time from a request to its first token", TOKEN_TIMES),
            "time_between_tokens_seconds": ("Time between two tokens of a text", TOKEN_TIMES),
            "text_seconds": ("Time from a request to the end of a text", REQUEST_TIMES),
        }
        self.histograms = {
            name: Histogram(PREFIX + name, words, model, buckets=buckets, **make)
            for name, (words, buckets) in histograms.items()
        }
        self.requests = Counter(PREFIX + "requests", "HTTP requests, by path and status", ["path", "status"], **make)
        self.left = Counter(PREFIX + "clients_left", "Clients that left before the end of their answer", **make)
        self.texts = Counter(PREFIX + "texts", "Texts that have ended, by reason", [*model, "finish"], **make)
        self.prompt_tokens = Counter(PREFIX + "prompt_tokens", "Tokens of prompts", model, **make)
        self.cached_tokens = Counter(
            PREFIX + "cached_prompt_tokens", "Tokens of prompts that were found in the cache", model, **make
        )
        self.new_tokens = Counter(PREFIX + "generated_tokens", "Generated tokens", model, **make)
        self.iterations = Gauge(PREFIX + "iteration", "Training iteration of the weights", model, **make)
        self.engine = Gauge(
            PREFIX + "engine",
            "State of the engine: texts running and waiting, blocks of its cache",
            [*model, "what"],
            **make,
        )

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)

    def of(self, model: str) -> "Meter":
        return Meter(self, model)


class Meter:
    """The instruments of one model."""

    def __init__(self, metrics: ServeMetrics, model: str):
        self.metrics, self.model = metrics, model
        named = {name: histogram.labels(model) for name, histogram in metrics.histograms.items()}
        self._first, self._between, self._text = named.values()
        self._new = metrics.new_tokens.labels(model)
        self._prompt, self._cached = metrics.prompt_tokens.labels(model), metrics.cached_tokens.labels(model)

    def token(self, seconds: float, first: bool) -> None:
        """A new token, some seconds after the request or after the token before."""
        (self._first if first else self._between).observe(seconds)
        self._new.inc()

    def ended(self, finish: str, seconds: float) -> None:
        self.metrics.texts.labels(self.model, finish).inc()
        self._text.observe(seconds)

    def prompts(self, tokens: int, cached: int) -> None:
        self._prompt.inc(tokens)
        self._cached.inc(cached)

    def iteration(self, number: int) -> None:
        self.metrics.iterations.labels(self.model).set(number)

    def look(self, stats) -> None:
        """Take the engine's state (`EngineStats`)."""
        if not is_dataclass(stats):
            return
        for field in fields(stats):
            value = getattr(stats, field.name)
            if isinstance(value, (int, float)):
                self.metrics.engine.labels(self.model, field.name).set(value)
