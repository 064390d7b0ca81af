# SPDX-License-Identifier: Apache-2.0
"""How models become a service: newer checkpoints, bytes of the cache, replicas on a cluster. Without models and HTTP."""

import asyncio
from types import SimpleNamespace

import pytest

from megatron.errors import Failure, SettingsError
from megatron.serving import models, ray_replicas, weights
from megatron.serving.settings import ServeLimits, ServeOptions, ServeSettings
from megatron.serving.texts import TokenTexts
from megatron.serving.weights import Weights, follow


class Enough(Exception):
    """The end of a task that has none."""


def loaded(path, iteration, **more):
    return SimpleNamespace(
        **dict(path=path, iteration=iteration, record=dict(vocabulary="v"), vocab_size=9, longest=8) | more
    )


CHECKPOINTS = {
    "old": loaded("old", 1),
    "new": loaded("new", 2),
    "newer": loaded("newer", 3),
    "other": loaded("other", 4, vocab_size=10),  # of another model
}


def followed(looks: list, monkeypatch, world=None) -> tuple[list, list, list]:
    """(checkpoints that were loaded, iterations of the engines that answered, what the log said) for the newest ones."""
    tried, answers, told, counted = [], [], [], []

    def load(name):
        tried.append(name)
        if name == "broken":
            raise Failure("it is broken")
        return CHECKPOINTS[name]

    async def sleep(seconds):
        if not looks:
            raise Enough

    async def replaced(make):
        engine, version, result = make()
        answers.append((engine, version))
        return result

    monkeypatch.setattr(weights.asyncio, "sleep", sleep)
    monkeypatch.setattr(weights, "_newest", lambda folder: looks.pop(0))
    monkeypatch.setattr(weights.log, "warning", lambda words, *more: told.append(words % more))
    monkeypatch.setattr("megatron.mpu.collectives.broadcast_object", lambda what, axis: what)
    own = Weights(load, lambda loaded: f"engine {loaded.iteration}", CHECKPOINTS["old"], world)
    meter = SimpleNamespace(iteration=counted.append)
    served = SimpleNamespace(name="a", thread=SimpleNamespace(replaced=replaced, meter=meter))
    with pytest.raises(Enough):
        asyncio.run(follow("folder", served, own)())
    assert all(version == f"iteration {engine.split()[1]}" for engine, version in answers)
    assert counted == sorted({int(engine.split()[1]) for engine, _ in answers})
    return tried, [engine for engine, _ in answers], told


@pytest.mark.parametrize("world", [None, "two ranks"])
def test_each_newer_checkpoint_is_tried_once(world, monkeypatch):
    """Also one that cannot be taken; then the old weights answer, until there is another."""
    looks = ["old", None, "new", "new", "broken", "broken", None, "broken", "newer", "other", "other", "newer"]
    looks = [(one, set()) for one in looks]
    tried, engines, told = followed(looks, monkeypatch, world)
    assert tried == ["new", "broken", "newer", "other"]
    # Ranks that share the model load in its place, and go on with the old weights; one process does so beside it.
    assert engines == (["engine 2", "engine 3"] if world is None else [f"engine {number}" for number in (2, 2, 3, 3)])
    assert len(told) == 2 and "broken is not taken: it is broken" in told[0]
    assert told[1].startswith("other is not taken: other has another vocabulary of another size than newer")


def test_a_damaged_newer_checkpoint_is_named_once(monkeypatch):
    """While the one before it, which is served, stays the newest good one."""
    looks = [("old", set()), ("old", {"new is cut off"}), ("old", {"new is cut off"}), ("old", set())]
    assert followed(looks, monkeypatch) == ([], [], ["not taken: new is cut off"])


@pytest.mark.parametrize("gigabytes, memory", [(None, None), (2.0, 2 * 10**9), (0.5, 5 * 10**8)])
@pytest.mark.parametrize("pairs", [False, True])
def test_an_engine_has_the_memory_and_the_texts_that_are_given(gigabytes, memory, pairs, monkeypatch):
    """Of 1e9 bytes; an encoder-decoder has an engine of its own kind. --ckpt-step is of --load alone."""
    model, asked = SimpleNamespace(facts=SimpleNamespace(source=16, target=4)), []
    if pairs:
        model.decode = None
    whole = loaded("a", 5, model=model, continues_texts=not pairs, check_words=lambda: None, longest=32)
    monkeypatch.setattr(
        models, "load_one_model", lambda *folders, **how: asked.append((*folders, how["step"])) or whole
    )
    for kind in ("searches.SearchingEngine", "sequence_engine.SequenceEngine"):
        monkeypatch.setattr(f"megatron.inference.{kind}", lambda model, kind=kind, **how: (kind, model, how))
    context = SimpleNamespace(device="cpu", mesh=SimpleNamespace(world_size=1, world=None))
    options = ServeOptions(load=["a"], follow="b", load_exported=["c"], cache_gigabytes=gigabytes, ckpt_step=7)
    settings = ServeSettings(options, ServeLimits(max_batch=5), None, {})
    for folder in "abc":
        made = models.weights_of(settings, folder, context).engine()
        if pairs:
            assert made == ("sequence_engine.SequenceEngine", model, dict(max_batch=5, memory=memory))
        else:
            assert made == ("searches.SearchingEngine", model, dict(longest=32, max_batch=5, memory=memory))
    assert asked == [("a", None, 7), ("b", None, None), (None, "c", None)]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("gpus, each", [(0, 0), (4, 1)])
def test_replicas_on_a_cluster_have_the_servers_limits(fails, gpus, each, monkeypatch):
    """The proxy waits for longer than the application, and lets more requests in; at the end all is shut down."""
    given, ended = {}, []

    def run(replica, **more):
        if fails:
            raise RuntimeError("first\nthe last line")

    serve = SimpleNamespace(
        status=lambda: SimpleNamespace(applications={}),
        start=lambda http_options: given.update(http_options),
        deployment=lambda **options: given.update(options) or (lambda kind: SimpleNamespace(bind=lambda: kind)),
        ingress=lambda application: lambda kind: application,
        run=run,
        shutdown=lambda: ended.append("serve"),
    )
    ray = SimpleNamespace(cluster_resources=lambda: dict(GPU=gpus), shutdown=lambda: ended.append("ray"))
    monkeypatch.setattr(ray_replicas, "_import", lambda: (ray, serve))
    monkeypatch.setattr(ray_replicas, "connect", lambda ray: None)
    limits = ServeLimits(max_batch=3, max_queue=4, request_timeout=70.0, stop_timeout=9.0)
    if fails:
        with pytest.raises(Failure, match="the last line"), ray_replicas.on_ray(lambda: None, 5, limits):
            raise AssertionError("it has not begun")
    else:
        with ray_replicas.on_ray(lambda: None, 5, limits) as replica:
            assert replica.several and replica.url == f"http://127.0.0.1:{given['port']}" and not ended
    assert ended == ["serve", "ray"] and given["request_timeout_s"] == 80.0 and given["num_replicas"] == 5
    assert given["max_ongoing_requests"] == 14 and given["graceful_shutdown_timeout_s"] == 9.0
    assert given["ray_actor_options"] == dict(num_cpus=1, num_gpus=each)


def test_a_cluster_with_other_applications_is_left_alone(monkeypatch):
    serve = SimpleNamespace(status=lambda: SimpleNamespace(applications={"x": 1}), shutdown=lambda: None)
    ray = SimpleNamespace(shutdown=lambda: None)
    monkeypatch.setattr(ray_replicas, "_import", lambda: (ray, serve))
    monkeypatch.setattr(ray_replicas, "connect", lambda ray: None)
    with pytest.raises(SettingsError, match="other applications"), ray_replicas.on_ray(None, 1, ServeLimits()):
        pass


class Merging:
    """A vocabulary whose tokens are written otherwise beside others: 5 after "a" is one letter with it."""

    def encode(self, text):
        return [1]

    def decode(self, ids):
        words = {1: "a", 2: " b", 3: "c\ufffd", 5: "\u0308"}
        return "".join(words[id] for id in ids).replace("a\u0308", "\xe4")


def test_a_tokens_text_is_what_it_adds_to_a_text():
    """Or its own, where it changes what is before it; half a character has a number."""
    texts = TokenTexts(Merging())
    assert [texts.of(token) for token in (1, 2, 3, 5)] == ["a", " b", "token_id:3", "\u0308"]
