# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's interface, `PUT /api`."""

import json
import urllib.error
import urllib.request

import pytest

from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from tests.serving.toy import EOD, ByteTokenizer, alone, distribution

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


@pytest.mark.parametrize(
    "body, what",
    [
        (dict(), "prompts: is missing"),
        (dict(prompts=["a"], max_len=5), "max_len is no longer used"),
        (dict(prompts=[]), "prompts"),
        (dict(prompts=["a"] * 129), "prompts"),
        (dict(prompts=["a", ""]), "prompts: one of them is empty"),
        (dict(prompts=["a"], tokens_to_generate=0), "tokens_to_generate: 0 only with logprobs"),
        (dict(prompts=["a"], tokens_to_generate=512), "the context has 512"),
        (dict(prompts=["a"], top_k=5, top_p=0.5), "top_k and top_p: give one of them"),
        (dict(prompts=["a"], top_k=1001), "top_k"),
        (dict(prompts=["a"], temperature=0), "temperature"),
        (dict(prompts=["a"], top_p_decay=0.5), "top_p_decay: only with top_p"),
        (dict(prompts=["a"], top_p=0.5, top_p_bound=0.6), "top_p_bound"),
        (dict(prompts=["a"], beam_width=4), "beam_width: beams are not served"),
        (dict(prompts=["a"], prevent_newline_after_colon=True), "prevent_newline_after_colon: not supported"),
        (dict(prompts=["a"], random_seed=-2), "random_seed"),
        (dict(prompts=["a"], top_q=1), "top_q: unknown parameter"),
    ],
)
def test_refusals(toy, body, what):
    with pytest.raises(urllib.error.HTTPError) as error:
        put(toy, **body)
    found = json.loads(error.value.read())
    assert error.value.code == 400 and what in found["message"] and found["error"]["message"] == found["message"]
