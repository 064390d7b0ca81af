# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's interface, `PUT /api`."""

import json
import urllib.error
import urllib.request

import pytest

from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from tests.serving.toy import EOD, ByteTokenizer, alone, beams, distribution

decode = ByteTokenizer().decode


def put(toy, **body) -> dict:
    raw = json.dumps(body).encode()
    request = urllib.request.Request(toy.url + "/api", raw, {"content-type": "application/json"}, method="PUT")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def new_tokens(prompt: str, index: int = 0, length: int = 64, seed: int = 3, **more) -> list[int]:
    sampling = Sampling(tokens_to_generate=length, sampling_seed=seed, **more)
    return alone(Request(tuple(prompt.encode()), sampling, index=index, end=EOD))


def test_texts_segments_and_logprobs(toy):
    """Of prompt and continuation together; equal prompts are continued differently."""
    found = put(toy, prompts=["ab", "ab", "xyz"], tokens_to_generate=20, random_seed=3, logprobs=True)
    for index, prompt in enumerate(("ab", "ab", "xyz")):
        ids = [*prompt.encode(), *new_tokens(prompt, index, 20)]
        assert found["text"][index] == decode(ids)
        assert found["segments"][index] == [decode([id]) for id in ids]
        scores = [distribution(tuple(ids[:at])).get(ids[at], -20.0) for at in range(1, len(ids))]
        assert found["logprobs"][index] == pytest.approx(scores)
    assert found["text"][0] != found["text"][1]
    assert put(toy, prompts=["ab"], random_seed=3)["text"] == ["ab" + decode(new_tokens("ab"))]
    assert put(toy, prompts=["ab"])["logprobs"] is None


def test_scores_of_a_prompt(toy):
    found = put(toy, prompts=["abc"], tokens_to_generate=0, logprobs=True)
    assert found["text"] == ["abc"] and len(found["logprobs"][0]) == 2


def test_its_words_reach_the_engine(toy):
    words = dict(temperature=0.5, top_p=0.9, top_p_decay=0.75, top_p_bound=0.25)
    put(toy, prompts=["ab"], tokens_to_generate=5, random_seed=9, stop_token=65, no_log=True, add_BOS=True, **words)
    request = toy.engines[0].added[-1]
    assert request.sampling == Sampling(tokens_to_generate=5, sampling_seed=9, **words)
    assert request.end == 65 and request.prompt == (EOD, *b"ab")


def test_it_stops_after_a_line(toy):
    """The line's end belongs to the text, as with Megatron-LM."""
    for seed in range(40):
        whole = decode(new_tokens("one", length=200, seed=seed))
        if "\n" in whole[:-1]:
            break
    found = put(toy, prompts=["one"], tokens_to_generate=200, random_seed=seed, stop_on_eol=True)
    assert found["text"] == ["one" + whole[: whole.index("\n") + 1]]
    found = put(toy, prompts=["one"], tokens_to_generate=200, random_seed=seed, stop_on_double_eol=True)
    assert found["text"] == ["one" + (whole[: whole.index("\n\n") + 2] if "\n\n" in whole else whole)]


def test_beams(toy):
    """All of them, best first, with their scores; a seed of the client, or of a front, has no effect."""
    found = put(
        toy, prompts=["ab"], tokens_to_generate=6, beam_width=3, length_penalty=0.5, stop_token=65, random_seed=4
    )
    request = toy.engines[0].added[-1]
    assert (request.search, request.sampling.tokens_to_generate, request.end) == (Search(3, 0.5), 6, 65)
    texts = beams(request)
    assert found["text"] == ["ab" + decode(text.tokens) for text in texts]
    assert found["segments"][0] == ["a", "b", *(decode([token]) for token in texts[0].tokens)]
    assert found["scores"] == [text.score for text in texts] and set(found) == {"text", "segments", "scores"}
    put(toy, prompts=["ab"], beam_width=1)
    assert toy.engines[0].added[-1].search == Search(1) and toy.service.models["toy"].thread.in_flight == 0


def test_no_newline_after_a_colon(toy):
    put(toy, prompts=["ab"], tokens_to_generate=5, prevent_newline_after_colon=True)
    assert toy.engines[0].added[-1].sampling.bad_words_ids == ["58,10"]  # of ":" and "\n" among bytes


def test_an_empty_prompt_is_a_beginning(toy):
    put(toy, prompts=[""], tokens_to_generate=5, add_BOS=True)
    assert toy.engines[0].added[-1].prompt == (EOD,)


@pytest.mark.parametrize(
    "body, what",
    [
        (dict(), "prompts: is missing"),
        (dict(prompts=["a"], max_len=5), "max_len is no longer used"),
        (dict(prompts=[]), "prompts"),
        (dict(prompts=["a"] * 129), "prompts"),
        (dict(prompts=["a", ""]), "prompts: one of them is empty; that needs add_BOS"),
        (dict(prompts=["a"], tokens_to_generate=0), "tokens_to_generate: 0 only with logprobs"),
        (dict(prompts=["a"], tokens_to_generate=512), "the context has 512"),
        (dict(prompts=["a"], top_k=5, top_p=0.5), "top_k and top_p: give one of them"),
        (dict(prompts=["a"], top_k=1001), "top_k"),
        (dict(prompts=["a"], temperature=0), "temperature"),
        (dict(prompts=["a"], top_p_decay=0.5), "top_p_decay: only with top_p"),
        (dict(prompts=["a"], top_p=0.5, top_p_bound=0.6), "top_p_bound"),
        (dict(prompts=["a", "b"], beam_width=4), "beam_width: a request has one prompt then"),
        (dict(prompts=["a"], beam_width=0), "beam_width"),
        (dict(prompts=["a"], beam_width=4, top_k=5), "top_k: has no place in a search with beam_width"),
        (dict(prompts=["a"], beam_width=4, temperature=0.5), "temperature: has no place"),
        (dict(prompts=["a"], beam_width=4, logprobs=True), "logprobs: has no place"),
        (dict(prompts=["a"], beam_width=4, stop_on_eol=True), "stop_on_eol: has no place"),
        (dict(prompts=["a"], beam_width=81), "81 texts in one request; the server takes 80"),
        (dict(prompts=["a"], length_penalty=0.5), "length_penalty: only with beam_width"),
        (dict(prompts=["a"], stop_token=257), "stop_token: there is no token 257"),
        (dict(prompts=["a"], model="other"), "there is no model 'other'; served: toy"),
        (dict(prompts=["a"], random_seed=-2), "random_seed"),
        (dict(prompts=["a"], top_q=1), "top_q: unknown parameter"),
    ],
)
def test_refusals(toy, body, what):
    with pytest.raises(urllib.error.HTTPError) as error:
        put(toy, **body)
    found = json.loads(error.value.read())
    assert error.value.code == (404 if "model" in body else 400)
    assert what in found["message"] and found["error"]["message"] == found["message"]
