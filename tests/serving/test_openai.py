# SPDX-License-Identifier: Apache-2.0
"""OpenAI's own client with every endpoint. Texts are compared with the toy engine's arithmetic, without a server."""

import concurrent.futures
import json
import math
import random
import time
import urllib.error
import urllib.request

import pytest

from megatron import __version__
from megatron.inference.generation_config import ends_beside
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.serving.models import recommended
from tests.serving.toy import EOD, ByteTokenizer, ToyEngine, alone, distribution, served

openai = pytest.importorskip("openai", reason="openai is not installed: pip install openai")
decode = ByteTokenizer().decode


@pytest.fixture(scope="module")
def client(toy):
    return openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)


def expected(prompt: str, index: int = 0, length: int = 16, seed: int = 5, end=EOD, **sampling) -> str:
    settings = Sampling(tokens_to_generate=length, sampling_seed=seed, **sampling)
    return decode(alone(Request(tuple(prompt.encode()), settings, index=index, end=end)))


def until_stop(text: str, stop: list[str]) -> tuple[str, bool]:
    """(a text up to the stop string that is complete first, whether there is one), letter by letter."""
    for end in range(len(text) + 1):
        for word in stop:
            if text[:end].endswith(word):
                return text[: end - len(word)], True
    return text, False


def test_a_completion(client):
    found = client.completions.create(model="toy", prompt="the rain", seed=5)
    assert [choice.text for choice in found.choices] == [expected("the rain")]
    assert found.object == "text_completion" and found.model == "toy" and found.system_fingerprint == "iteration 7"
    new = len(alone(Request(tuple(b"the rain"), Sampling(tokens_to_generate=16, sampling_seed=5), end=EOD)))
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (8, new, 8 + new)
    assert found.choices[0].finish_reason == ("length" if new == 16 else "stop") and found.choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_texts(client, stream):
    asked = dict(model="toy", prompt=["one", "two two"], n=3, seed=9, max_tokens=40)
    texts = [""] * 6
    if stream:
        for chunk in client.completions.create(**asked, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        for choice in client.completions.create(**asked).choices:
            texts[choice.index] = choice.text
    # A text depends neither on the other prompts nor on how many texts there are
    assert texts == [expected(prompt, index, 40, 9) for prompt in ("one", "two two") for index in range(3)]
    assert len(set(texts)) == 6


def test_token_ids_are_prompts(client):
    ids = list(b"the rain")
    for prompt in (ids, [ids]):
        assert client.completions.create(model="toy", prompt=prompt, seed=5).choices[0].text == expected("the rain")
    two = client.completions.create(model="toy", prompt=[ids, [111, 110]], seed=5, echo=True)
    assert [choice.text for choice in two.choices] == ["the rain" + expected("the rain"), "on" + expected("on")]


def test_a_continuation_has_the_space_before_its_first_word(client, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "decode", lambda self, ids: " ".join(map(str, ids)))
    asked = dict(model="toy", prompt="on", seed=5, max_tokens=4)
    new = alone(Request(tuple(b"on"), Sampling(tokens_to_generate=4, sampling_seed=5), end=EOD))
    assert client.completions.create(**asked).choices[0].text == "".join(f" {token}" for token in new)


def test_settings_reach_the_engine(client, toy):
    words = dict(temperature=0.5, top_p=0.9, presence_penalty=0.25, frequency_penalty=-0.5, logit_bias={"101": -100})
    more = dict(top_k=7, min_p=0.1, repetition_penalty=1.5, min_tokens=3, stop_token_ids=[3, 4], ignore_eos=True)
    client.completions.create(model="toy", prompt="x", seed=2, max_tokens=9, **words, extra_body=more)
    found = toy.engines[0].added[-1].sampling
    assert found == Sampling(
        tokens_to_generate=9,
        min_tokens_to_generate=3,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=-0.5,
        presence_penalty=0.25,
        logit_bias=["101:-100.0"],
        stop_token_ids=[3, 4],
        ignore_eos=True,
        sampling_seed=2,
    )
    client.completions.create(model="toy", prompt="x")
    client.completions.create(model="toy", prompt="x")
    seeds = [request.sampling.sampling_seed for request in toy.engines[0].added[-2:]]
    assert seeds[0] != seeds[1]  # without a seed, each answer is another one


def test_a_model_has_defaults_of_its_own(tmp_path):
    """Those of its generation_config.json; a request may change them."""
    own = dict(temperature=0.25, top_p=0.5, eos_token_id=[65, 66], do_sample=True, guidance_scale=2)
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    with served(defaults=recommended(str(tmp_path)), ends=ends_beside(tmp_path)) as toy:
        client = openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)
        client.completions.create(model="toy", prompt="x")
        client.completions.create(model="toy", prompt="x", temperature=2, extra_body=dict(stop_token_ids=[7]))
        client.completions.create(model="toy", prompt="x", top_p=1, extra_body=dict(ignore_eos=True))
        added = toy.engines[0].added
        first, second, third = [request.sampling for request in added]
        assert (first.temperature, first.top_p) == (0.25, 0.5)
        assert (second.temperature, second.top_p) == (2, 0.5)
        assert (third.temperature, third.top_p) == (0.25, 0)
        ends = [request.sampling.ends(request.end) for request in added]
        assert ends == [{65, 66}, {7, 65, 66}, set()]  # the end of document is none of them, as in transformers
    (tmp_path / "generation_config.json").write_text(json.dumps(dict(do_sample=False)))
    assert recommended(str(tmp_path)) == dict(temperature=0.0)


def test_logprobs_are_those_of_the_distribution(client):
    found = client.completions.create(model="toy", prompt="then a", seed=1, logprobs=3, echo=True, max_tokens=30)
    [choice] = found.choices
    ids = [*b"then a", *alone(Request(tuple(b"then a"), Sampling(tokens_to_generate=30, sampling_seed=1), end=EOD))]
    names = [chr(id) if id < 128 else f"token_id:{id}" for id in ids]
    assert choice.logprobs.tokens == names and choice.text == decode(ids)
    finished = [decode(ids[:at]).rstrip("\ufffd") for at in range(len(ids))]  # without half a character
    assert choice.logprobs.text_offset == list(map(len, finished))
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    for at in range(1, len(ids)):
        scores = distribution(tuple(ids[:at]))
        assert choice.logprobs.token_logprobs[at] == pytest.approx(scores.get(ids[at], -20.0))
        likely = dict(list(scores.items())[:3]) | {ids[at]: scores.get(ids[at], -20.0)}
        assert choice.logprobs.top_logprobs[at] == pytest.approx(
            {chr(id) if id < 128 else "<end>" if id == EOD else f"token_id:{id}": value for id, value in likely.items()}
        )


def test_only_the_prompt_is_scored(client):
    """As evaluation harnesses ask for it."""
    found = client.completions.create(model="toy", prompt="then a", logprobs=0, echo=True, max_tokens=0)
    assert found.choices[0].text == "then a" and found.usage.completion_tokens == 0
    assert found.choices[0].logprobs.tokens == list("then a") and found.choices[0].finish_reason == "length"
    assert client.completions.create(model="toy", prompt="a", max_tokens=0).choices[0].text == ""


def test_a_stream_is_the_whole(client):
    asked = dict(model="toy", prompt="a stream of words", seed=3, max_tokens=60, logprobs=1, echo=True)
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options=dict(include_usage=True)))
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert all(chunk.usage is None for chunk in chunks[:-1]) and len(parts) > 20
    assert "".join(part.text for part in parts) == whole.choices[0].text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part.logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.choices[0].finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client, stream):
    for seed in range(12):
        whole = expected("stop here", length=200, seed=seed, temperature=1.0)
        stop = ["t h", "ee", "n ", whole[5:9] or "zz"]
        found = client.completions.create(
            model="toy", prompt="stop here", seed=seed, max_tokens=200, stop=stop, stream=stream, logprobs=0
        )
        choices = [chunk.choices[0] for chunk in found] if stream else found.choices
        assert "".join(choice.text for choice in choices) == until_stop(whole, stop)[0]
        assert choices[-1].finish_reason == "stop"
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        assert "".join(tokens).isascii() and not until_stop("".join(tokens), stop)[1]  # none of the stop string alone


def test_a_stop_string_ends_one_text_of_two(toy, client):
    """The engine does not go on with it."""
    whole = expected("stop", length=300, seed=1)
    before, asked = toy.engines[0].made, dict(seed=1, max_tokens=300)
    found = client.completions.create(
        model="toy", prompt=["stop", "other"], stop=whole[2:5], **asked | dict(extra_body=dict(ignore_eos=True))
    )
    assert found.choices[0].text == whole[:2]
    assert toy.engines[0].made - before < 300 + 20


def test_no_half_characters_in_a_stream(client):
    for seed in range(10):
        whole = expected("bytes", length=150, seed=seed)
        parts = [
            chunk.choices[0].text
            for chunk in client.completions.create(model="toy", prompt="bytes", seed=seed, max_tokens=150, stream=True)
        ]
        assert "".join(parts) == whole


def test_best_of(client):
    found = client.completions.create(model="toy", prompt="best", seed=4, n=2, best_of=6, max_tokens=100)
    means = {}
    for index in range(6):
        request = Request(tuple(b"best"), Sampling(tokens_to_generate=100, sampling_seed=4), index=index, end=EOD)
        new = alone(request)
        scores = [distribution(request.prompt + tuple(new[:at]))[token] for at, token in enumerate(new)]
        means[decode(new)] = sum(scores) / max(1, len(scores))
    assert [choice.text for choice in found.choices] == sorted(means, key=means.get, reverse=True)[:2]
    assert found.choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="best_of"):
        client.completions.create(model="toy", prompt="best", n=1, best_of=2, stream=True)


def test_models(client, toy):
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("toy", "model", "megatron") and model.max_model_len == 512
    assert client.models.retrieve("toy") == model
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("a/b")
    assert error.value.code == "model_not_found"


@pytest.mark.parametrize(
    "words, status, param, code",
    [
        (dict(model="other"), 404, "model", "model_not_found"),
        (dict(prompt=""), 400, "prompt", "invalid_value"),
        (dict(prompt=["a", ""]), 400, "prompt[1]", "invalid_value"),
        (dict(prompt=[[1, 2], [257]]), 400, "prompt[1]", "invalid_value"),
        (dict(prompt="a" * 512), 400, "prompt", "context_length_exceeded"),
        (dict(max_tokens=512), 400, "max_tokens", "context_length_exceeded"),
        (dict(max_tokens=5000), 400, "max_tokens", None),
        (dict(temperature=-1), 400, "temperature", "invalid_value"),
        (dict(top_p=0), 400, "top_p", "invalid_value"),
        (dict(logit_bias={"257": 1}), 400, "logit_bias", "invalid_value"),
        (dict(suffix="end"), 400, "suffix", "unsupported_parameter"),
        (dict(extra_body=dict(use_beam_search=True)), 400, "use_beam_search", "unsupported_parameter"),
        (dict(extra_body=dict(temprature=1)), 400, "temprature", "unknown_parameter"),
        (dict(stop=["a", ""]), 400, "stop", "invalid_value"),
        (dict(stream_options=dict(include_usage=True)), 400, "stream_options", None),
        (dict(extra_body=dict(min_tokens=20)), 400, "min_tokens", None),
        (dict(n=100), 400, None, None),
    ],
)
def test_refusals_name_the_parameter(client, words, status, param, code):
    with pytest.raises(openai.APIStatusError) as error:
        client.completions.create(**dict(model="toy", prompt="a") | words)
    found = error.value
    assert (found.status_code, found.param, found.code) == (status, param, code), found
    assert found.type == "invalid_request_error" and len(found.body["message"]) > 15


def test_parameters_that_ask_for_nothing_may_be_there(client):
    more = dict(
        user="somebody", suffix=None, extra_body=dict(service_tier="auto", store=False, tools=[], metadata=None)
    )
    assert client.completions.create(model="toy", prompt="the rain", seed=5, **more).choices[0].text


@pytest.mark.sampled(2)
def test_64_clients_at_a_time_get_their_own_texts():
    """One in four leaves in mid-stream."""
    with served([ToyEngine(max_batch=8, pause=0.001)]) as toy:
        client = openai.OpenAI(base_url=f"{toy.url}/v1", api_key="none", max_retries=0)

        def ask(number: int):
            chance = random.Random(number)
            prompt, length = f"client {number} says", chance.randrange(1, 60)
            asked = dict(model="toy", prompt=prompt, seed=number, max_tokens=length)
            whole = expected(prompt, length=length, seed=number)
            if number % 4 == 0:
                found, leaves = "", chance.randrange(0, 20)
                with client.completions.create(**asked, stream=True) as stream:
                    for at, chunk in enumerate(stream):
                        found += chunk.choices[0].text
                        if at == leaves:
                            break
                return whole.startswith(found)
            if number % 4 == 1:
                return client.completions.create(**asked).choices[0].text == whole
            return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == whole

        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            assert all(pool.map(ask, range(128)))
        thread = toy.service.models["toy"].thread
        for _ in range(200):
            if not thread.in_flight:
                break
            time.sleep(0.02)
        assert thread.in_flight == 0 and not thread._owners and not thread._jobs
        assert not toy.engines[0].busy


def test_greedy(client):
    for temperature in (0, 0.0):
        found = client.completions.create(model="toy", prompt="most likely", temperature=temperature, max_tokens=20)
        assert found.choices[0].text == expected("most likely", length=20, greedy=True)
    assert math.isfinite(found.created)


def test_tokens_of_texts(toy):
    """As vLLM's server has them; a foreign name of a host gets an error of the usual form."""

    def ask(path, body=None, host="localhost"):
        headers = {"content-type": "application/json", "host": host}
        raw = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(toy.url + path, raw, headers), timeout=20) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())["error"]

    assert ask("/tokenize", dict(prompt="ab")) == dict(count=2, max_model_len=512, tokens=[97, 98])
    assert ask("/tokenize", dict(model="toy", prompt=""))["tokens"] == []
    assert ask("/detokenize", dict(tokens=[97, 98]))["prompt"] == "ab"
    assert ask("/version") == dict(version=__version__) and ask("/ping")["status"] == "ok"
    assert ask("/api", dict(prompts=["ab"]))["message"] == "POST is not possible at /api; it takes PUT"
    assert ask("/tokenize", dict())["message"] == "prompt and messages: give one of them"
    assert ask("/tokenize", dict(messages=[dict(role="user", content="x")]))["code"] == "no_chat_template"
    assert ask("/detokenize", dict(tokens=[300]))["message"].startswith("tokens: there is no token 300")
    refused = ask("/v1/models", host="evil.example")
    assert refused["code"] == "invalid_host" and "'evil.example'" in refused["message"]
