# SPDX-License-Identifier: Apache-2.0
"""Requests exactly at a limit of the server, and what is left of those that were refused. Without HTTP."""

import asyncio
import itertools
import signal
import threading
from types import SimpleNamespace

import h11
import orjson
import pytest

from megatron.errors import DataError, SettingsError, UsageError
from megatron.inference.requests import Output, Request, TokenScore
from megatron.inference.sampling import Sampling, Search
from megatron.inference.text_stream import RunningText, TextStream
from megatron.serving import answers, engine_thread, front, replicas, served_model, settings
from megatron.serving.connection import Connection
from megatron.serving.engine_thread import EngineThread
from megatron.serving.errors import ApiError
from megatron.serving.megatron_api import MegatronBody, _answer, _encoded
from megatron.serving.openai_api import Completions, OpenAI, _events, _whole, places_in
from megatron.serving.openai_requests import (
    MOST_STOPS,
    MOST_TEXTS,
    MOST_TOP,
    Chat,
    Completion,
    length_of,
    parse,
    target_length_of,
)
from megatron.serving.served_model import ServedModel
from megatron.serving.texts import parts_of
from megatron.serving.tokens_api import TokensApi
from megatron.tokenizer.chat_template import ChatTemplate
from tests.serving.toy import ByteTokenizer

TALK = [dict(role="user", content="a")]


class Recorded:
    """An engine that refuses prompts of more than 3 tokens, and answers nothing by itself."""

    busy = False

    def __init__(self):
        self.texts, self.count = set(), itertools.count()

    def add(self, request):
        if len(request.prompt) > 3:
            raise DataError("too long")
        self.texts.add(number := next(self.count))
        return number

    def cancel(self, number):
        self.texts.remove(number)

    def step(self):
        return []

    def stats(self):
        return None

    def close(self):
        pass


class Heard:
    """The instruments of a model: what they were told."""

    def __init__(self):
        self.tokens = []

    def token(self, seconds, first):
        self.tokens.append((seconds, first))

    def ended(self, finish, seconds):
        pass

    def look(self, stats):
        pass


def with_thread(body, room=8):
    engine = Recorded()

    async def whole():
        thread = EngineThread(engine, room=room, version="one", meter=Heard())
        thread.start()
        try:
            await asyncio.wait_for(body(thread, engine), 60)
        finally:
            await thread.close()

    asyncio.run(whole())


def request(length=1, beams=1) -> Request:
    return Request((5,) * length, Sampling(4), search=Search(num_beams=beams) if beams > 1 else None)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_refused_request_leaves_no_text_in_the_engine_and_no_place_taken(beams):
    """Its first texts were added already."""

    async def body(thread, engine):
        for _ in range(3):
            with pytest.raises(ApiError, match="too long"):
                await thread.add([request(beams=beams), request(), request(4, beams)])
            assert (engine.texts, thread.in_flight, thread._jobs) == (set(), 0, set())

    with_thread(body)


def test_texts_that_end_with_the_server_leave_the_engine():
    """Their clients get the reason."""

    async def body(thread, engine):
        jobs = [await thread.add([request(), request()]), await thread.add([request()])]
        thread.cancel_all(ApiError(503, "it stops"))
        for job in jobs:
            with pytest.raises(ApiError, match="it stops"):
                await anext(job)
        while thread.in_flight:
            await asyncio.sleep(0.001)
        assert engine.texts == set() and thread._jobs == set()

    with_thread(body)


def test_as_many_texts_as_there_is_room_for_and_no_more():
    async def body(thread, engine):
        with pytest.raises(ApiError, match="7 texts in one request; the server takes 6"):
            await thread.add([request(beams=3), request(beams=4)])
        async with await thread.add([request(beams=2), request()]):
            assert thread.in_flight == 3
            with pytest.raises(ApiError) as full:
                await thread.add([request(beams=4)])
            assert full.value.status == 429
            async with await thread.add([request(beams=3)]):
                assert thread.in_flight == 6
        while thread.in_flight:
            await asyncio.sleep(0.001)
        async with await thread.add([request() for _ in range(6)]):
            assert thread.in_flight == 6

    with_thread(body, room=6)


def test_times_are_from_the_request_to_its_first_token_and_from_token_to_token(monkeypatch):
    clock = SimpleNamespace(now=10.0)
    monkeypatch.setattr(engine_thread.time, "monotonic", lambda: clock.now)

    async def body():
        thread = EngineThread(Recorded(), room=8, version="one", meter=Heard())
        thread.loop = asyncio.get_running_loop()
        job = engine_thread.TextJob(thread, [request(), request()])
        for clock.now, place in ((11.0, 0), (13.5, 1), (15.0, 0), (15.5, 1)):
            thread._deliver([(job, place, Output(place, TokenScore(7)))], None)
        return thread.meter.tokens

    assert asyncio.run(body()) == [(1.0, True), (3.5, True), (4.0, False), (2.0, False)]


@pytest.mark.parametrize("took", [0.25, 7.0, 40.0])
def test_the_time_that_a_text_takes_follows_the_last_ones(took, monkeypatch):
    """It is what they take after many, a second at first, and between both meanwhile."""
    clock, found = SimpleNamespace(now=10.0), []
    monkeypatch.setattr(engine_thread.time, "monotonic", lambda: clock.now)

    async def body():
        thread = EngineThread(Recorded(), room=8, version="one", meter=Heard())
        thread.loop = asyncio.get_running_loop()
        for _ in range(200):
            job = engine_thread.TextJob(thread, [request()])
            clock.now += took
            thread._deliver([(job, 0, Output(0, finish="stop"))], None)
            found.append(thread._seconds)

    asyncio.run(body())
    assert found == sorted(found, reverse=took < 1) and found[-1] == pytest.approx(took, rel=0.001)
    assert abs(found[0] - 1.0) < abs(took - 1.0) / 5


def test_an_abandoned_request_does_not_wait_for_other_weights():
    """Its places are free at once; one that is waited for is held until the weights are there."""

    async def body():
        thread = EngineThread(Recorded(), room=8, version="one", meter=Heard())
        thread.loop, thread._replacement = asyncio.get_running_loop(), (None, None)
        left, waits = (engine_thread.TextJob(thread, [request()]) for _ in range(2))
        thread._jobs, thread.in_flight, left.abandoned = {left, waits}, 2, True
        for job in (left, waits):
            thread._add(job)
        await asyncio.sleep(0)
        assert list(thread._held) == [waits] and thread.in_flight == 1 and thread._jobs == {waits}

    asyncio.run(body())


ASKED = [  # path, words of a body, (log-probabilities of new tokens, of the prompt's), texts
    ("chat", dict(), (None, False), 1),
    ("chat", dict(logprobs=True), (0, False), 1),
    ("chat", dict(logprobs=True, top_logprobs=3, n=2), (3, False), 2),
    ("completions", dict(), (None, False), 1),
    ("completions", dict(logprobs=0), (0, False), 1),
    ("completions", dict(logprobs=2, echo=True), (2, True), 1),
    ("completions", dict(echo=True), (None, False), 1),
    ("completions", dict(n=2, best_of=3), (0, False), 3),  # they say which are the best
    ("completions", dict(n=2, best_of=2), (None, False), 2),
    ("completions", dict(stop_token_ids=[256], logit_bias={"256": 1}), (None, False), 1),
    ("completions", dict(stop_token_ids=[257]), None, 0),
    ("completions", dict(logit_bias={"257": 1}), None, 0),
    ("completions", dict(min_tokens=17), None, 0),  # 16 tokens without a word about it
    ("completions", dict(min_tokens=17, max_tokens=17), (None, False), 1),
]


@pytest.mark.parametrize("path, words, scores, texts", ASKED)
def test_requests_to_the_engine_ask_for_what_a_body_does(path, words, scores, texts, monkeypatch):
    model = ServedModel("a", ByteTokenizer(), 50, None)

    async def conversation(*_):
        return (1, 2, 3)

    async def answered(self, request, work, form):
        return work.requests

    class Sent:
        headers = {"content-type": "application/json"}

        async def stream(self):
            yield orjson.dumps(dict(messages=TALK) | words if path == "chat" else dict(prompt="abc") | words)

    model.conversation = conversation
    monkeypatch.setattr(OpenAI, "_answer", answered)
    asked = getattr(OpenAI(dict(a=model), settings.ServeLimits()), path)(Sent())
    if scores is None:
        with pytest.raises(ApiError):
            asyncio.run(asked)
        return
    found = asyncio.run(asked)
    assert [request.index for request in found] == list(range(texts)) and {
        len(request.prompt) for request in found
    } == {3}
    assert {(request.logprobs, request.prompt_logprobs) for request in found} == {scores}


class Wire:
    """A client's end of a connection."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True


def test_a_connection_that_is_lost_is_not_waited_for(monkeypatch):
    """The timer of its slow head ends with it."""
    cancelled = []
    monkeypatch.setattr("megatron.serving.connection.H11Protocol.connection_lost", lambda self, error: None)
    for slow in (None, SimpleNamespace(cancel=lambda: cancelled.append("slow"))):
        connection = object.__new__(Connection)
        connection._slow = slow
        connection.connection_lost(None)
    assert cancelled == ["slow"]


@pytest.mark.parametrize("state", ["before a request", "before its answer", "within its answer"])
def test_what_is_no_http_is_answered_unless_an_answer_has_begun(state):
    """Within one it would be taken for a part of it."""
    conn, wire = h11.Connection(h11.SERVER), Wire()
    if state != "before a request":
        conn.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert type(conn.next_event()) is h11.Request
    if state == "within its answer":
        conn.send(h11.Response(status_code=200, headers=[(b"content-length", b"9")]))
    Connection.send_400_response(SimpleNamespace(conn=conn, transport=wire), "broken")
    head, _, body = wire.written.partition(b"\r\n\r\n")
    assert wire.closed and bool(head) == (state != "within its answer")
    if head:
        assert head.startswith(b"HTTP/1.1 400 ") and f"content-length: {len(body)}".encode() in head.lower()
        assert b"connection: close" in head.lower() and orjson.loads(body)["error"]["code"] == "invalid_http"


# ---- bodies -------------------------------------------------------------------------------------------------------------

TAKEN = [  # kind, words with a number in them, the least and the most that is taken
    (Completion, lambda n: dict(prompt="a", stop=["x"] * n), 0, MOST_STOPS),
    (Completion, lambda n: dict(prompt="a", n=n), 1, MOST_TEXTS),
    (Completion, lambda n: dict(prompt="a", n=3, best_of=n), 3, MOST_TEXTS),
    (Completion, lambda n: dict(prompt="a", n=3, best_of=n, stream=True), 3, 3),
    (Completion, lambda n: dict(prompt="a", logprobs=n), 0, MOST_TOP),
    (Completion, lambda n: dict(prompt="a", max_tokens=n), 0, (1 << 31) - 1),
    (Completion, lambda n: dict(prompt=[n]), 0, (1 << 31) - 1),
    (Chat, lambda n: dict(messages=TALK, max_tokens=n), 1, (1 << 31) - 1),
    (Chat, lambda n: dict(messages=TALK, max_tokens=7, max_completion_tokens=n), 7, 7),
    (Chat, lambda n: dict(messages=TALK, logprobs=True, top_logprobs=n), 0, MOST_TOP),
    (Chat, lambda n: dict(messages=[dict(role="r" * n, content="a")]), 1, 64),
    (Chat, lambda n: dict(messages=TALK * n), 1, None),
    (MegatronBody, lambda n: dict(prompts=["a"] * n), 1, 128),
    (MegatronBody, lambda n: dict(prompts=["a"], top_p=0.5, top_p_decay=0.9, top_p_bound=n / 10), 0, 5),
    (MegatronBody, lambda n: dict(prompts=["a"], top_k=n), 0, 1000),
    (MegatronBody, lambda n: dict(prompts=["a"], beam_width=n), 1, MOST_TEXTS),
    (MegatronBody, lambda n: dict(prompts=["a"] * n, beam_width=2), 1, 1),
    (MegatronBody, lambda n: dict(prompts=["a"], tokens_to_generate=n), 1, (1 << 31) - 1),
    (MegatronBody, lambda n: dict(prompts=["a"], tokens_to_generate=n, logprobs=True), 0, (1 << 31) - 1),
    (MegatronBody, lambda n: dict(prompts=["a"], random_seed=n), -1, (1 << 63) - 1),
    (MegatronBody, lambda n: dict(prompts=["a"], temperature=n / 10), 1, 1000),
]


@pytest.mark.parametrize("number", range(len(TAKEN)))
def test_bodies_at_a_limit_are_taken_and_beyond_it_are_not(number):
    kind, words, least, most = TAKEN[number]
    for value in (least, most):
        if value is not None:
            parse(kind, words(value))
    for beyond in (least - 1, most and most + 1):
        if (
            beyond is not None
            and beyond >= (0 if kind is Chat else least - 1)
            and not (beyond < 0 and "stop" in words(1))
        ):
            with pytest.raises(ApiError):
                parse(kind, words(beyond))


def test_lengths_that_just_fit():
    assert length_of(None, 9, 7, 10, 99) == 3 and length_of(3, 9, 7, 10, 99) == 3 and length_of(5, 9, 1, 10, 5) == 5
    for wrong in ((4, 9, 7, 10, 99), (None, 9, 10, 10, 99), (6, 9, 1, 10, 5)):
        with pytest.raises(ApiError):
            length_of(*wrong)
    assert length_of(1, 9, 9, 10, 99) == 1
    assert [length_of(None, default, 7, 20, most) for default, most in ((4, 99), (16, 99), (16, 5))] == [4, 13, 5]
    assert target_length_of(4, 9, 10, 10, 4, 4) == 4 and target_length_of(None, 9, 10, 10, 4, 99) == 4
    for wrong in ((5, 9, 1, 10, 4, 99), (4, 9, 11, 10, 4, 99), (4, 9, 1, 10, 9, 3)):
        with pytest.raises(ApiError):
            target_length_of(*wrong)


SAID = [  # words of a body, and what of them the engine gets
    (dict(), dict(temperature=1.0, top_k=0, top_p=0.0, min_p=0.0, repetition_penalty=1.0, stop_token_ids=None)),
    (dict(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1), dict(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1)),
    (dict(top_k=-1, top_p=1.0), dict(top_k=0, top_p=0.0)),  # all tokens
    (dict(temperature=0, top_k=7, top_p=0.8, min_p=0.1), dict(is_greedy=True, top_k=0, top_p=0.0, min_p=0.0)),
    (dict(presence_penalty=0.5, frequency_penalty=-1.5), dict(presence_penalty=0.5, frequency_penalty=-1.5)),
    (dict(repetition_penalty=1.3, min_tokens=4), dict(repetition_penalty=1.3, min_tokens_to_generate=4)),
    (dict(logit_bias={"7": -100, "8": 2.5}, stop_token_ids=[3]), dict(biases={7: -100, 8: 2.5}, stop_token_ids=[3])),
    (dict(ignore_eos=True, seed=5), dict(ignore_eos=True, sampling_seed=5, tokens_to_generate=9)),
]
RECOMMENDED = dict(temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1)


@pytest.mark.parametrize("words, settings", SAID)
@pytest.mark.parametrize("kind, needed", [(Completion, dict(prompt="a")), (Chat, dict(messages=TALK))])
def test_words_of_a_body_are_settings_of_the_engine(words, settings, kind, needed):
    """Those of the body count before those that the model recommends, which count for what it leaves out."""
    found = parse(kind, needed | words).sampling(9)
    assert {name: getattr(found, name) for name in settings} == settings
    defaults = {name: value for name, value in RECOMMENDED.items() if name not in words}
    found = parse(kind, needed | words).sampling(9, RECOMMENDED)
    if not found.is_greedy:
        assert {name: getattr(found, name) for name in settings | defaults} == settings | defaults
    found.check()


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_body_as_long_as_it_may_be(more, told):
    """With the length in the head, and without."""
    limits = settings.ServeLimits(max_body_bytes=40)
    body = b"x" * (40 + more)

    class Sent:
        headers = {"content-length": str(len(body))} if told else {}

        async def stream(self):
            for at in range(0, len(body), 7):
                yield body[at : at + 7]

    if more > 0:
        with pytest.raises(ApiError, match="more than 40 bytes"):
            asyncio.run(answers.read_body(Sent(), limits))
    else:
        assert asyncio.run(answers.read_body(Sent(), limits)) == body


@pytest.mark.parametrize(
    "kind, taken",
    [
        ("application/json", True),
        ("Application/JSON; charset=utf-8", True),
        (" application/json ;x", True),
        ("application/problem+json", True),
        ("text/json", False),
        ("application/jsonl", False),
        ("text/plain", False),
        ("application/x-www-form-urlencoded", False),
        ("", False),
        (None, False),
    ],
)
def test_a_body_says_that_it_is_json(kind, taken):
    class Sent:
        headers = {} if kind is None else {"content-type": kind}

        async def stream(self):
            yield b"[1]"

    found = answers.read_json(Sent(), settings.ServeLimits())
    if taken:
        assert asyncio.run(found) == [1]
    else:
        with pytest.raises(ApiError) as refused:
            asyncio.run(found)
        assert refused.value.status == 415


# ---- answers ------------------------------------------------------------------------------------------------------------


class Job:
    """The outputs of texts, one after the other."""

    def __init__(self, outputs):
        self.outputs = iter(outputs)

    def __aiter__(self):
        return self

    async def __anext__(self):
        try:
            return next(self.outputs)
        except StopIteration:
            raise StopAsyncIteration from None

    def cancel(self, place=None):
        pass


def answer(n, each, scores, cached):
    """The whole answer for two prompts with `each` texts: scores[text]: log-probabilities of its tokens."""
    requests = []
    for text, own in enumerate(scores):
        for at, logprob in enumerate(own):
            last, new = at == len(own) - 1, TokenScore(ord("a") + text, logprob)
            requests.append((text, Output(text, new, "length" if last else None, cached=cached[text] * (at == 0))))
    counted = []
    meter = SimpleNamespace(prompts=lambda prompt, hit: counted.append((prompt, hit)))
    form = SimpleNamespace(
        frame=lambda kind: {}, whole="", choice=lambda place, part, prompt, whole: (part.text, prompt)
    )
    work = SimpleNamespace(body=SimpleNamespace(n=n), each=each, prompts=[(1,) * 10, (1,) * 20])
    work.model = SimpleNamespace(thread=SimpleNamespace(meter=meter))
    texts = [RunningText(TextStream(ByteTokenizer())) for _ in scores]
    found = asyncio.run(_whole(Job(requests), work, texts, form))
    return found["choices"], found["usage"], counted


def test_the_best_have_the_greatest_mean_log_probability_best_first():
    """Of lengths that differ: the sum would choose others. Cached tokens of a prompt are those of its first text."""
    scores = [[-3.0], [-1.0] * 5, [-2.0, -2.0], [-0.5] * 9, [-4.0], [-0.1] * 2]
    choices, usage, counted = answer(2, 3, scores, cached=[4, 9, 9, 8, 16, 16])
    assert choices == [("bbbbb", 0), ("cc", 0), ("ff", 1), ("ddddddddd", 1)]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 12 and counted == [(30, 12)]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (30, 20, 50)
    choices, *_ = answer(3, 3, scores, cached=[0] * 6)  # all of them, as they come
    assert [text[0] for text, _ in choices] == list("abcdef")


def test_parts_of_a_stream_are_of_their_own_prompt():
    """Of two prompts with three texts each; usage is there with each event, and known at the end."""
    seen, counted = [], []
    outputs = [(place, Output(place, TokenScore(ord("a") + place), "length")) for place in (4, 0, 5, 2, 1, 3)]
    choice = lambda place, part, prompt: seen.append((place, part.text, prompt)) or place
    form = SimpleNamespace(frame=lambda kind: {}, chunk="", start=lambda place: [f"start {place}"], choice=choice)
    body = SimpleNamespace(n=3, stream_options=SimpleNamespace(include_usage=True))
    model = SimpleNamespace(thread=SimpleNamespace(meter=SimpleNamespace(prompts=lambda *own: counted.append(own))))
    work = SimpleNamespace(body=body, each=3, prompts=[(1,) * 10, (1,) * 20], model=model)

    class Held(Job):
        async def __aenter__(self):
            return self

        async def __aexit__(self, *error):
            pass

    async def events():
        texts = [RunningText(TextStream(ByteTokenizer())) for _ in range(6)]
        return [event async for event in _events(Held(outputs), work, texts, form)]

    *found, usage, done = asyncio.run(events())
    assert sorted(seen) == [(place, "abcdef"[place], place // 3) for place in range(6)]
    assert [event["choices"][0] for event in found[:6]] == [f"start {place}" for place in range(6)]
    assert all(event["usage"] is None for event in found) and done == b"[DONE]"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 36 and counted == [(30, 0)]


@pytest.mark.parametrize("text, decoded, first", [("a b", "a b", 3), ("a b", " a b", 3), ("a  b", "a b", 4)])
def test_offsets_of_new_tokens_are_in_the_text_that_is_sent(text, decoded, first):
    """Though the tokenizer writes the prompt otherwise: with a space before it, or without one within it."""
    words = {1: decoded[:-2], 2: decoded[-2:], 3: "xy", 4: "z"}
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(words[id] for id in ids), prefix=(), pieces={})
    model = SimpleNamespace(tokenizer=tokenizer, name="a", token_texts=SimpleNamespace(of=str))
    body = SimpleNamespace(echo=True, logprobs=0)
    form = Completions(SimpleNamespace(model=model, body=body, prompts=[(1, 2)]), [text])
    part = SimpleNamespace(
        text="xy", scores=[TokenScore(3, -1.0)], prompt=[TokenScore(1), TokenScore(2, -1.0)], finish=None
    )
    assert form.choice(0, part, 0)["logprobs"]["text_offset"][2:] == [first]
    more = SimpleNamespace(text="z", scores=[TokenScore(4, -1.0)], prompt=[], finish="stop")
    assert form.choice(0, more, 0)["logprobs"]["text_offset"] == [first + 2]
    frame = form.frame("x")
    assert type(frame["created"]) is int and frame["id"].startswith("cmpl-") and frame["model"] == "a"


@pytest.mark.parametrize(
    "words, param",
    [
        (dict(prompt="a", top_p=2, temperature=-1), ("top_p", "temperature")),
        (dict(prompt="a", n="x", stop=["", "b"]), ("n", "stop")),
        (dict(prompt=["a", 3], temperature=-1), ("prompt", "temperature")),
        (dict(temperature=-1), ("temperature", "prompt")),
    ],
)
def test_one_wrong_parameter_is_named(words, param):
    with pytest.raises(ApiError) as refused:
        parse(Completion, words)
    assert refused.value.param.partition("[")[0] in param and refused.value.message.startswith(refused.value.param)


@pytest.mark.parametrize("stop, text, tokens", [("bc", "xa", 2), ("xabc", "", 0), ("c", "xab", 3)])
def test_scores_are_of_the_tokens_whose_text_is_sent(stop, text, tokens):
    running, parts = RunningText(TextStream(ByteTokenizer(), [stop])), []
    for letter in "xabc":
        parts.append(running.take(Output(0, TokenScore(ord(letter), -1.0))))
    assert running.ended and parts[-1].finish == "stop" and "".join(part.text for part in parts) == text
    assert [score.token for part in parts for score in part.scores][:tokens] == list(text.encode())
    assert len(running.tokens) == 4


@pytest.mark.parametrize(
    "text, special, eod, ids",
    [
        ("ab", 9, 0, (9, 1, 2)),
        ("xab", 9, 0, (9, 1, 2)),  # the tokenizer puts it before prompts itself
        ("axb", 9, 0, (9, 1, 9, 2)),
        ("", 9, 0, (9,)),
        ("ab", None, 7, (7, 1, 2)),
        ("ab", None, 0, (0, 1, 2)),
        ("ab", None, None, None),
    ],
)
def test_a_beginning_is_put_before_a_prompt_once(text, special, eod, ids):
    """The bos, or else the end of document, whatever its number."""

    async def encode(text, param):
        return tuple({"a": 1, "b": 2, "x": 9}[letter] for letter in text)

    tokenizer = SimpleNamespace(special=lambda name: special, eod=eod)
    found = _encoded(SimpleNamespace(tokenizer=tokenizer, encode=encode), text, True)
    if ids is None:
        with pytest.raises(ApiError, match="neither a bos nor an end of document"):
            asyncio.run(found)
    else:
        assert asyncio.run(found) == ids


@pytest.mark.parametrize("answer, limit, told", [(50, 40, 40), (50, 60, 50), (50, 50, 50)])
def test_the_longest_answer_is_that_of_the_model_or_of_the_server(answer, limit, told):
    model = SimpleNamespace(name="a", longest=100, longest_answer=answer, template=None, targets=None, created=7)
    model.thread = SimpleNamespace(version="iteration 3")
    about = OpenAI({}, settings.ServeLimits(max_answer_tokens=limit))._about(model)
    assert (about["max_model_len"], about["max_answer_len"], about["root"]) == (100, told, "iteration 3")
    assert (about["id"], about["created"], about["chat"], about["encoder_decoder"]) == ("a", 7, False, False)


@pytest.mark.parametrize(
    "said, tools, beside", [(9, 9, False), (served_model.SHORT, 0, True), (9, served_model.SHORT, True)]
)
def test_long_conversations_are_written_beside_the_loop(said, tools, beside):
    """Also those whose tools are long."""

    async def body():
        template = SimpleNamespace(has_tools=True, calls_as_json=True, encode=lambda *_: [threading.get_ident()])
        model = ServedModel("a", None, 9, None, template)
        [where] = await model.conversation([dict(role="user", content="x" * said)], tools=["x" * tools])
        return where != threading.get_ident()

    assert asyncio.run(body()) is beside


def test_an_answer_ends_with_its_last_stop_string():
    """Whatever the engine still does: what comes after it is not waited for."""

    class Endless(Job):
        async def __anext__(self):
            found = next(self.outputs, None)
            if found is None:
                await asyncio.sleep(60)
            return found

    async def body():
        texts = [RunningText(TextStream(ByteTokenizer(), ["b"])) for _ in range(2)]
        outputs = [
            (0, Output(0, TokenScore(ord("b")))),
            (1, Output(1, TokenScore(ord("a")))),
            (1, Output(1, TokenScore(ord("b")))),
        ]
        return [(place, part.text, part.finish) async for place, part in parts_of(Endless(outputs), texts)]

    found = asyncio.run(asyncio.wait_for(body(), 10))
    assert found == [(0, "", "stop"), (1, "a", None), (1, "", "stop")]


@pytest.mark.parametrize("words, count", [(dict(prompt="abc"), 3), (dict(prompt=""), 0)])
def test_tokens_are_counted_beside_the_length_of_a_prompt(words, count):
    """Which an encoder-decoder has beside that of its answers."""
    model = ServedModel("a", ByteTokenizer(), 50, None, targets=served_model.Targets(7, 0, 1))

    class Sent:
        headers = {"content-type": "application/json"}

        async def stream(self):
            yield orjson.dumps(words)

    found = asyncio.run(TokensApi(dict(a=model), settings.ServeLimits()).tokenize(Sent()))
    assert orjson.loads(found.body) == dict(count=count, max_model_len=50, tokens=list(words["prompt"].encode()))


@pytest.mark.parametrize("targets, end, start, answer", [(None, 256, 0, 50), (served_model.Targets(7, 3, 1), 1, 3, 7)])
def test_limits_and_ends_of_a_model_are_those_of_its_kind(targets, end, start, answer):
    """An encoder-decoder has targets of their own length, which begin and end with their own tokens."""
    model = ServedModel("a", ByteTokenizer(), 50, None, targets=targets)
    assert (model.end, model.start, model.longest_answer, model.longest) == (end, start, answer, 50)
    assert model.answer_length(None, 99, 10, 99) == (40 if targets is None else 7)
    assert ServedModel("a", ByteTokenizer(), 50, None, ends=(5, 6)).end == (5, 6)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_child_that_does_not_end_when_it_is_asked_is_killed(hangs, monkeypatch):
    told, ended = [], asyncio.Event()
    monkeypatch.setattr(replicas, "ANSWER", 0.01)

    async def wait():
        await ended.wait()
        told.append("ended")

    def signalled(number):
        told.append(number)
        if not hangs:
            ended.set()

    def kill():
        told.append("killed")
        ended.set()

    child = replicas.Child([], "a", {})
    child.process = SimpleNamespace(returncode=None, send_signal=signalled, wait=wait, kill=kill)
    asyncio.run(child.close())
    assert told == [signal.SIGTERM, *(["killed"] if hangs else []), "ended"]
    child.process.returncode = 0
    asyncio.run(child.close())
    assert told[-1] == "ended" and len(told) == 2 + hangs


@pytest.mark.parametrize("size, beside", [(served_model.SHORT - 1, False), (served_model.SHORT, True)])
def test_long_texts_are_encoded_beside_the_loop(size, beside):
    async def body():
        model = ServedModel("a", None, 9, None)
        return await model.in_turn(threading.get_ident, size=size) != threading.get_ident()

    assert asyncio.run(body()) is beside


# ---- replicas and settings ----------------------------------------------------------------------------------------------


def test_a_request_may_lose_as_many_replicas_as_it_may():
    asked, replica = front.Forwarded(None, b""), replicas.Replica("a")
    for _ in range(front.MOST_LOST):
        asked.lost(replica, OSError())
    with pytest.raises(ApiError, match=f"{front.MOST_LOST + 1} replicas"):
        asked.lost(replica, OSError())


@pytest.mark.parametrize("path, name", front.SEEDED.items())
def test_requests_get_a_seed_if_they_have_none(path, name):
    for body in ({}, {name: None}, {name: -1}):
        found, raw = front._seeded(path, orjson.dumps(body))
        assert found == orjson.loads(raw) and found[name] >= 0
    for seed in (0, 1, 7):
        raw = orjson.dumps({name: seed})
        assert front._seeded(path, raw) == ({name: seed}, raw)


def test_a_replica_is_given_up_after_as_many_checks_as_it_may_fail():
    async def body():
        replica, good = replicas.Replica("a"), [True]

        async def healthy(session):
            return good[0]

        replica._healthy = healthy
        states = []
        for good[0] in [True, *[False] * (replicas.PATIENCE - 1), True, *[False] * replicas.PATIENCE, True]:
            await replica._look(None)
            states.append(replica.ready)
        return states

    patient = [True] * (2 * replicas.PATIENCE)
    assert asyncio.run(body()) == [*patient, False, True]


def test_the_least_busy_replica_is_asked_before_the_one_whose_turn_it_is():
    some = [replicas.Replica(name) for name in "abc"]
    group = replicas.Replicas(some)
    for replica, requests, turn in zip(some, (1, 0, 0), (0, 9, 5), strict=True):
        replica.ready, replica.requests, replica.turn = True, requests, turn
    assert group.best() is some[2]
    assert group.best(without=[some[1], some[2]]) is some[0]


@pytest.mark.parametrize("world, least", [(1, 1e-6), (2, 2)])
def test_settings_at_their_least_are_taken(world, least, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    for name, value, beyond in (
        ("max_model_len", 2, 1),
        ("distributed_timeout_minutes", least, least * 0.99),
        ("tensor_model_parallel_size", world, 0),
    ):
        more = dict(tensor_model_parallel_size=world, load=["a"])
        check = lambda value, name=name, more=more: settings.check(
            settings.ServeOptions(**more | {name: value}), settings.ServeLimits(), {}
        )
        check(value)
        with pytest.raises(SettingsError, match=name.replace("_", "-")):
            check(beyond)
    for name, least in dict(max_batch=1, max_queue=0, stop_timeout=0, max_answer_tokens=1, body_timeout=0.001).items():
        of = lambda value, name=name: settings.check(
            settings.ServeOptions(load=["a"], tensor_model_parallel_size=world),
            settings.ServeLimits(**{name: value}),
            {},
        )
        of(least)
        with pytest.raises(SettingsError, match=name.replace("_", "-")):
            of(least - 0.001 if "timeout" in name else least - 1)


@pytest.mark.parametrize(
    "words, addresses",
    [
        (None, []),
        (["3"], []),
        (["http://a:1"], ["http://a:1"]),
        (["http://a:1/", "https://b//"], ["http://a:1", "https://b"]),
        (["3", "4"], ["3", "4"]),  # refused: neither is an address
    ],
)
def test_replicas_are_a_number_or_addresses(words, addresses):
    assert settings.addresses_of(settings.ServeOptions(replicas=words)) == addresses


def test_a_folder_that_is_followed_is_one_model():
    """Also beside --load of the same; the same model twice is a mistake."""
    assert settings.ServeOptions(load=["a", "b"], load_exported=["c"], follow="b").folders == ["a", "b", "c"]
    assert settings.ServeOptions(load=["a"], follow="d").folders == ["a", "d"]
    for options in (dict(load=["a", "b", "a"]), dict(load=["a"], load_exported=["a"])):
        with pytest.raises(UsageError, match="two models have the same name or folder: a"):
            settings.check(settings.ServeOptions(**options), settings.ServeLimits(), {})
    with pytest.raises(UsageError, match="same name or folder: x"):
        settings.check(settings.ServeOptions(load=["a", "b"], served_model_name=["x", "x"]), settings.ServeLimits(), {})


@pytest.mark.parametrize(
    "world, words, error",
    [
        (1, ["0"], "at least 1"),
        (1, ["1"], None),
        (1, ["3"], None),
        (2, ["1"], None),  # as without it
        (2, ["2"], "in a job of 2 ranks"),
        (2, ["http://a:1"], "in a job of 2 ranks"),
        (2, None, None),
    ],
)
def test_replicas_of_one_process_each(world, words, error, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    load = None if words and words[0].startswith("http") else ["a"]
    if error is None:
        settings.check_replicas(settings.ServeOptions(load=load, replicas=words))
    else:
        with pytest.raises(SettingsError, match=error):
            settings.check_replicas(settings.ServeOptions(load=load, replicas=words))


def test_only_what_has_the_models_vocabulary_and_context_is_taken():
    from megatron.serving.weights import refuse_another_model

    def loaded(**more):
        return SimpleNamespace(**dict(record=dict(vocabulary="a"), vocab_size=9, longest=8, path="p") | more)

    refuse_another_model(loaded(), loaded(path="q"))
    for more in (dict(record=dict(vocabulary="b")), dict(vocab_size=10), dict(longest=9)):
        with pytest.raises(SettingsError, match="has another"):
            refuse_another_model(loaded(), loaded(**more))


@pytest.mark.parametrize("asked, found", [(None, 8), (7, 7), (8, 8), (9, None)])
def test_texts_may_be_as_long_as_the_context(asked, found):
    from megatron.serving.models import longest_of

    loaded, options = SimpleNamespace(longest=8, path="p", model=None), SimpleNamespace(max_model_len=asked)
    if found:
        assert longest_of(loaded, options) == found
    else:
        with pytest.raises(SettingsError, match="has 8 tokens"):
            longest_of(loaded, options)


@pytest.mark.parametrize("ends", [None, (5, 6)])  # of generation_config.json
@pytest.mark.parametrize("tokens", [None, {}, dict(eos_token="<other>"), dict(eos_token="<end>")])  # of the template
@pytest.mark.parametrize("targets", [None, 8])
def test_what_ends_an_answer_is_that_of_the_nearest_source(ends, tokens, targets):
    template = tokens if tokens is None else SimpleNamespace(special={"<end>": 0}, tokens=tokens)
    if template:
        template.end_of_turn = ChatTemplate.end_of_turn.fget(template)
    more = dict(tokenizer=SimpleNamespace(eod=9), targets=targets and SimpleNamespace(end=targets))
    model = SimpleNamespace(ends=ends, template=template, **more)
    end = ServedModel.end.fget(model)
    assert end == (targets or ends or 9)
    model.end = end
    wanted = 0 if tokens and tokens["eos_token"] == "<end>" else targets or 9
    assert ServedModel.end_of_turn.fget(model) == (ends or wanted)


class Stream:
    """The answer of a replica: a status, and events up to where it breaks."""

    def __init__(self, status, events=(), whole=True):
        self.status, self.content = status, self
        self.raw = [b"data: " + orjson.dumps(event) + b"\n\n" for event in events] + [b"data: [DONE]\n\n"] * whole

    async def iter_any(self):
        for part in self.raw:
            yield part

    def close(self):
        pass


def in_front(answers_given) -> tuple[front.Front, list]:
    """A front whose replicas give these answers in turn."""
    group = [replicas.Replica(str(number)) for number in range(len(answers_given))]
    for replica in group:
        replica.ready = True
    it, left, asked = front.Front(replicas.Replicas(group), None), list(answers_given), []

    async def send(request, raw, replica):
        asked.append(replica.name)
        return left.pop(0)

    it._send = send
    return it, asked


@pytest.mark.parametrize("status", [200, 400, 401, 404, 413, 422, 429, 500, 501, 503])
def test_another_replica_is_asked_after_an_answer_that_it_may_not_give(status):
    it, asked = in_front([Stream(status), Stream(200)])

    async def take(found):
        return found.answer.status

    elsewhere = status in (429, 500, 503)  # a full queue, a failure, not ready
    found = asyncio.run(asyncio.wait_for(it._first(front.Forwarded(None, b""), take), 30))
    assert found == (200 if elsewhere else status) and len(asked) == 1 + elsewhere


@pytest.mark.parametrize("statuses", [(429, 503), (503, 429), (500, 503, 429)])
def test_where_no_replica_answers_the_last_refusal_counts(statuses):
    it, asked = in_front([Stream(status) for status in statuses])

    async def take(found):
        return found.answer.status

    assert asyncio.run(asyncio.wait_for(it._first(front.Forwarded(None, b""), take), 30)) == statuses[-1]
    assert sorted(asked) == [str(number) for number in range(len(statuses))]


@pytest.mark.parametrize("query", ["", "a=1&b=%2F"])
def test_a_request_is_passed_on_with_its_path_and_query(query):
    """As it came: nothing is decoded on the way."""
    asked = []

    async def ask(method, url, **more):
        asked.append((method, str(url), more["data"], more["headers"], more["allow_redirects"]))

    sent = SimpleNamespace(method="PUT", scope=dict(raw_path=b"/v1/models/a%2Fb"), url=SimpleNamespace(query=query))
    sent.headers = {"authorization": "Bearer k", "content-type": "application/json", "cookie": "c", "host": "h"}
    it = front.Front(replicas.Replicas([]), None)
    it.session = SimpleNamespace(request=ask)
    asyncio.run(it._send(sent, b"body", replicas.Replica("a", "http://there:1")))
    url = "http://there:1/v1/models/a%2Fb" + ("?a=1&b=%2F" if query else "")
    kept = {"authorization": "Bearer k", "content-type": "application/json"}
    assert asked == [("PUT", url, b"body", kept, False)]


def test_headers_of_an_answer_that_pass_through_a_front():
    """What says how to read it, when to come again, what is allowed; nothing of the connection to the replica."""
    kept = {
        "content-type": "a/b",
        "retry-after": "7",
        "allow": "GET",
        "www-authenticate": "Bearer",
        "cache-control": "no",
    }
    kept |= {"content-security-policy": "default-src", "x-content-type-options": "nosniff"}
    others = {"connection": "close", "transfer-encoding": "chunked", "server": "x", "set-cookie": "c"}
    found = front._response(SimpleNamespace(status=429, headers=kept | others), b"body")
    own = dict(found.headers)
    assert own.pop("content-length") == "4" and own == kept and (found.status_code, found.body) == (429, b"body")


def test_a_replica_that_breaks_a_request_is_not_asked_before_its_next_check():
    it, asked = in_front([Stream(200), Stream(200)])
    send, broken = it._send, []

    async def breaks(request, raw, replica):
        if not broken:
            broken.append(replica)
            raise ConnectionResetError
        return await send(request, raw, replica)

    async def take(found):
        return found.answer.status

    it._send = breaks
    assert asyncio.run(asyncio.wait_for(it._first(front.Forwarded(None, b""), take), 30)) == 200
    [replica] = broken
    assert not replica.ready and replica.requests == 0 and asked != [replica.name]
    assert [one.ready for one in it.replicas.replicas if one is not replica] == [True]


@pytest.mark.parametrize("targets", [None, served_model.Targets(7, 0, 1)])
def test_megatrons_answers_begin_with_the_prompt_unless_they_answer_a_source(targets):
    thread = SimpleNamespace(meter=SimpleNamespace(prompts=lambda *_: None))
    model = ServedModel("a", ByteTokenizer(), 50, thread, targets=targets)
    body, prompt = parse(MegatronBody, dict(prompts=["ab"], logprobs=True)), tuple(b"ab")
    scores = () if targets else (TokenScore(prompt[0]), TokenScore(prompt[1], -2.0))
    outputs = [
        (0, Output(0, TokenScore(ord("x"), -1.0), prompt=scores)),
        (0, Output(0, TokenScore(ord("y"), -3.0), "length")),
    ]
    found = asyncio.run(_answer(model, Job(outputs), body, [prompt]))
    text = "xy" if targets else "abxy"
    assert (found["text"], found["segments"]) == ([text], [list(text)])
    assert found["logprobs"] == [[-1.0, -3.0] if targets else [-2.0, -1.0, -3.0]]


@pytest.mark.parametrize("asked, fits", [(None, True), (16, True), (15, False), (17, False)])
def test_a_source_is_as_long_as_the_encoder_can_look(asked, fits):
    from megatron.serving.models import longest_of

    model = SimpleNamespace(decode=None, facts=SimpleNamespace(source=16))
    loaded, options = SimpleNamespace(longest=99, path="p", model=model), SimpleNamespace(max_model_len=asked)
    if fits:
        assert longest_of(loaded, options) == 16
    else:
        with pytest.raises(SettingsError, match=f"--max-model-len {asked}: an encoder-decoder has 16 tokens"):
            longest_of(loaded, options)


@pytest.mark.parametrize("ready, status", [((True, True), 200), ((True, False), 200), ((False, False), 503)])
def test_a_front_is_healthy_while_one_replica_is(ready, status):
    it, _ = in_front([None, None])
    for replica, own in zip(it.replicas.replicas, ready, strict=True):
        replica.ready = own
    found = asyncio.run(it.health(None))
    states = {str(number): "ok" if own else "not ready" for number, own in enumerate(ready)}
    assert found.status_code == status
    assert orjson.loads(found.body) == dict(status="ok" if status == 200 else "starting", replicas=states)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_replica_that_stands_for_several_is_asked_again_but_not_for_ever(status, several, monkeypatch):
    """A full queue is a full queue; of others an answer is the last one's."""
    monkeypatch.setattr(front, "PAUSE", 0.0)
    it, asked = in_front([Stream(status)] * (front.AGAIN + 5))
    [replica] = it.replicas.replicas = it.replicas.replicas[:1]
    replica.several = several

    async def take(found):
        return found.answer.status

    found = asyncio.run(asyncio.wait_for(it._first(front.Forwarded(None, b""), take), 30))
    assert found == status and len(asked) == 1 + front.AGAIN * (several and status != 429)
    assert replica.requests == 0


def test_a_child_that_ends_again_and_again_is_started_later_each_time(monkeypatch):
    """Twice as late, at most half a minute; at once after it has lived for longer than that."""
    clock, pauses, lives = SimpleNamespace(now=0.0), [], iter([1.0] * 9 + [29.0, 31.0, 1.0])

    class Enough(Exception):
        pass

    async def sleep(seconds):
        pauses.append(seconds)
        clock.now += seconds
        if len(pauses) == 12:
            raise Enough

    async def wait():
        clock.now += next(lives)

    async def start(child):
        assert (child.ready, child.url, child._failed) == (False, "", 0)  # nothing is left of the one before
        child.process, child.ready, child._failed = SimpleNamespace(wait=wait, returncode=1), True, 9

    monkeypatch.setattr(replicas.Child, "_start", start)
    monkeypatch.setattr(replicas.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(replicas.asyncio, "sleep", sleep)
    with pytest.raises(Enough):
        asyncio.run(replicas.Child([], "a", {}).watch(None))
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, *[30.0] * 5, 0.5, 1.0]


@pytest.mark.parametrize("breaks", [[0], [1], [2], [3], [5], [3, 1], [2, 4]])
def test_each_event_of_a_stream_is_sent_once_wherever_replicas_break(breaks):
    """Two texts, whose events come in turn."""
    events = [
        dict(id="a", created=1, system_fingerprint="w", choices=[dict(index=n % 2, text=str(n))]) for n in range(6)
    ]
    streams = [Stream(200, events[:at], whole=False) for at in breaks] + [Stream(200, events)]
    it, asked = in_front(streams[1:])
    forwarded = front.Forwarded(None, b"", front.Open(it.replicas.replicas[0]))
    forwarded.open.answer = streams[0]

    async def body():
        return [event async for event in it._events(forwarded)]

    assert asyncio.run(asyncio.wait_for(body(), 30)) == [*events, b"[DONE]"]
    assert len(asked) == len(breaks)


@pytest.mark.parametrize("dropped, added", [(d, a) for d in range(8) for a in range(8) if 0 < d + a])
@pytest.mark.parametrize("at", [0, 1, 6])
def test_places_in_a_prompt_that_is_decoded_otherwise(dropped, added, at):
    """Characters that the tokenizer drops are skipped, those that it adds begin where it adds them. What differs in eight
    characters or more is not looked for, and places never go backwards or beyond the text.
    """
    before, after = "abcdefgh"[:at], "ijklmnop"
    text, decoded = before + "#" * dropped + after, before + "*" * added + after
    places = places_in(text, decoded)
    assert len(places) == len(decoded) + 1 and places == sorted(places) and places[-1] <= len(text)
    if dropped + added < 8:
        rest = range(at + dropped, len(text) + 1)
        assert places == [*range(at), *[at] * added, *rest]
    assert places_in(text, text) == list(range(len(text) + 1))


@pytest.mark.parametrize("status", [200, 401])
def test_metrics_of_a_front_are_those_of_the_replicas_that_answer(status):
    """Each with its name; where a key is asked for, the front asks for it, too."""
    text = b"# HELP a_tokens tokens\n# TYPE a_tokens counter\na_tokens_total %d.0\n"
    it, asked = in_front([None] * 5)
    it.replicas.replicas[1].ready = False
    gone = {"2": ConnectionResetError(), "3": asyncio.TimeoutError()}

    async def send(request, raw, replica):
        async def read():
            return text % (10 + int(replica.name)) if status == 200 else b"no key"

        asked.append((replica.name, raw))
        if replica.name in gone:
            raise gone[replica.name]
        return SimpleNamespace(status=status, read=read, headers={"www-authenticate": "Bearer"})

    it._send = send
    found = asyncio.run(it.metrics(None))
    if status == 401:
        assert (found.status_code, found.body, found.headers["www-authenticate"]) == (401, b"no key", "Bearer")
        assert asked == [("0", b"")]
        return
    assert asked == [(name, b"") for name in "0234"]
    assert found.headers["content-type"].startswith("text/plain; version=0.0.4")  # what Prometheus reads it by
    lines = [line for line in found.body.decode().splitlines() if not line.startswith("#")]
    assert sorted(lines) == ['a_tokens_total{replica="0"} 10.0', 'a_tokens_total{replica="4"} 14.0']


@pytest.mark.parametrize("echo, prefix", list(itertools.product((False, True), ((), (1,)))))
def test_offsets_of_tokens_are_where_they_begin_in_what_is_sent(echo, prefix):
    """Of the answer alone, or after the prompt; what the tokenizer puts before a prompt begins with it, at 0."""
    words = {1: "<s>", 2: "ab", 3: "c", 4: "def", 5: "g"}
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(words[id] for id in ids), prefix=prefix, pieces={})
    model = SimpleNamespace(tokenizer=tokenizer, name="a", token_texts=SimpleNamespace(of=words.get))
    prompt = (*prefix, 2, 3)
    form = Completions(
        SimpleNamespace(model=model, body=SimpleNamespace(echo=echo, logprobs=1), prompts=[prompt, prompt]),
        ["abc", "abc"],
    )
    for place in (0, 1):
        scores = [TokenScore(prompt[0]), *(TokenScore(id, -0.5) for id in prompt[1:])]
        part = SimpleNamespace(text="def", scores=[TokenScore(4, -1.0, ((5, -0.25),))], prompt=scores, finish=None)
        found = form.choice(place, part, place)
        own = dict(tokens=["def"], token_logprobs=[-1.0], top_logprobs=[{"g": -0.25, "def": -1.0}], text_offset=[0])
        if echo:
            names, n = [words[id] for id in prompt], len(prompt)
            own = dict(
                tokens=[*names, "def"],
                token_logprobs=[None, *[-0.5] * (n - 1), -1.0],
                top_logprobs=[None, *({name: -0.5} for name in names[1:]), own["top_logprobs"][0]],
                text_offset=[*[0] * len(prefix), 0, 2, 3],
            )
        assert found == dict(index=place, text="abcdef" if echo else "def", logprobs=own, finish_reason=None)
        part = SimpleNamespace(text="g", scores=[TokenScore(5, -float("inf"))], prompt=[], finish="stop")
        found = form.choice(place, part, place)
        assert found["text"] == "g" and found["finish_reason"] == "stop"
        assert found["logprobs"]["text_offset"] == [6 if echo else 3]
        assert -1e30 < found["logprobs"]["token_logprobs"][0] < -1e3  # JSON has no infinity
