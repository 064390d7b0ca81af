# SPDX-License-Identifier: Apache-2.0
"""Beam searches in the engine: the texts of the search by itself, whatever runs beside it."""

import itertools
import random

import pytest
import torch

from megatron.errors import DataError
from megatron.inference.beams import BeamGroup
from megatron.inference.generation import generate
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.inference.searches import SearchingEngine
from tests.inference.engine_mixes import LONGEST, alone, requests_of, sizes_of


@pytest.mark.sampled(10)
@pytest.mark.parametrize("mixes", [12, pytest.param(300, marks=pytest.mark.full)])
def test_a_search_does_not_depend_on_its_neighbours(small_gpt, mixes):
    """Searches and texts in random mixes with small caches, against `generate`, which has no engine for beams."""
    model, draw = small_gpt(scale=4.0), random.Random(1)
    texts = requests_of(3, 6, model.vocab_size)
    wanted: list = [alone(model, request) for request in texts]
    for number, (beams, penalty) in enumerate(itertools.product((2, 3, 5, 6), (0.0, 1.0))):
        prompt = tuple(draw.randrange(model.vocab_size) for _ in range(draw.choice((1, 9, 17, 27))))
        groups = dict(num_beam_groups=3, diversity_penalty=penalty + 0.5) if beams == 6 else {}
        sampling, search = Sampling(draw.choice((1, 4, 9))), Search(beams, penalty if beams > 2 else 1.0, **groups)
        [plain] = generate(model, [prompt], Sampling(4, greedy=True), longest=LONGEST)
        end = plain[number % 3]  # so that some texts end early
        texts.append(Request(prompt, sampling, end=end, search=search))
        wanted.append(generate(model, [prompt], sampling, search, longest=LONGEST, end=end, best=beams))
    cancelled = preempted = searches = 0
    for seed in range(mixes):
        draw, engine = random.Random(seed), SearchingEngine(model, longest=LONGEST, **sizes_of(seed))
        to_come, running, found = draw.choices(range(len(texts)), k=8), {}, {}
        while to_come or engine.busy:
            if to_come and draw.random() < 0.4:
                place = to_come.pop()
                running[engine.add(texts[place])] = place
                found.setdefault(place, [])
            if running and draw.random() < 0.03:
                number = draw.choice(list(running))
                engine.cancel(number)
                cancelled += 1
            for output in engine.step():
                place = running[output.request]
                if output.finish:
                    del running[output.request]
                if output.found:
                    searches += 1
                    assert [list(one.tokens) for one in output.found] == wanted[place][: len(output.found)]
                    scores = [one.score for one in output.found]
                    assert scores == sorted(scores, reverse=True)
                elif texts[place].texts == 1 and output.finish in ("stop", "length"):
                    assert wanted[place].finish == output.finish
        assert not running and engine.pool.free == engine.pool.blocks and not engine._beams and not engine._searches
        preempted += engine.stats().preemptions
        engine.close()
    assert searches > 2 * mixes and cancelled and preempted


@pytest.mark.sampled(10)
def test_scores_are_those_of_the_definition(small_gpt):
    """Of all texts of up to three tokens the best, without those that have a bad word, each scored by itself."""
    v, end, steps, penalty = 6, 1, 3, 0.5
    model, prompt, bad = small_gpt(vocab_size=v, scale=3.0), (3, 1, 4), [(4, 2), (5,), (0, 3, 0)]
    scores = {}
    for tokens in itertools.product(range(v), repeat=steps):
        length = tokens.index(end) + 1 if end in tokens else steps
        total, text = 0.0, [*prompt]
        for token in tokens[:length]:
            logits = model.logits(torch.tensor(text).unsqueeze(1))[-1, 0].double()
            for word in bad:
                if tuple(text[len(text) - len(word) + 1 :]) == word[:-1]:
                    logits[word[-1]] = float("-inf")
            total += logits.log_softmax(-1)[token].item()
            text.append(token)
        scores[tokens[: length - (end in tokens)]] = total / length**penalty
    best = sorted(scores.items(), key=lambda one: -one[1])[:5]
    words = [",".join(map(str, word)) for word in bad]
    engine, sampling = SearchingEngine(model, longest=LONGEST), Sampling(steps, bad_words_ids=words)
    engine.add(Request(prompt, sampling, end=end, search=Search(v * v, penalty)))
    outputs = [output for _ in range(steps) for output in engine.step()]
    [output] = outputs
    assert [one.tokens for one in output.found[:5]] == [text for text, _ in best]
    assert [one.score for one in output.found[:5]] == pytest.approx([score for _, score in best], abs=1e-5)
    assert {one.finish for one in output.found} == {"stop", "length"}
    assert not engine.busy


def test_tokens_that_end_a_search_may_be_the_likeliest(small_gpt):
    """At any of its steps: of the model, or of the request."""
    model, prompt = small_gpt(), (3, 1, 4)
    [plain] = generate(model, [prompt], Sampling(4, greedy=True), longest=LONGEST)
    for token in plain:
        for end, own in ((token, None), (None, [token]), (7, [token])):
            sampling, search = Sampling(4, stop_token_ids=own), Search(2)
            wanted = generate(model, [prompt], sampling, search, longest=LONGEST, end=end, best=2)
            engine = SearchingEngine(model, longest=LONGEST)
            engine.add(Request(prompt, sampling, end=end, search=search))
            [output] = [output for _ in range(9) for output in engine.step()]
            assert [list(one.tokens) for one in output.found] == wanted[: len(output.found)] and not engine.busy


# Of those that go on, beside one of -1 that has ended
@pytest.mark.parametrize("best, done", [(-0.9, False), (-1.0, True), (-1.1, True), (None, True)])
def test_a_search_ends_when_nothing_that_goes_on_is_better(best, done):
    group, end = BeamGroup(1, 0, 0.0), 7
    found = [(-1.0, 0, end), *([] if best is None else [(best, 0, 5)])]
    group.advance(sorted(found, reverse=True), 1, frozenset([end]), [(3,)])
    if best == -0.9:  # the first of one beam is all that counts: nothing has ended
        assert not group.finished and not group.done
    else:
        assert group.finished == [(-1.0, (3,))] and group.done is done


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_search_that_is_cancelled_is_reported_once(small_gpt, steps):
    """Not each of its beams; texts beside it go on."""
    engine = SearchingEngine(small_gpt(), longest=LONGEST)
    text = engine.add(Request((2, 7), Sampling(9, greedy=True)))
    number = engine.add(Request((3, 1, 4), Sampling(9), search=Search(3)))
    before = [output for _ in range(steps) for output in engine.step()]
    engine.cancel(number)
    engine.cancel(number)
    after = [output for _ in range(12) for output in engine.step()]
    assert {output.request for output in before} <= {text} and not engine.busy
    assert [output.finish for output in after if output.request == number] == ["cancelled"]
    assert sum(output.new is not None for output in (*before, *after)) == 9 and engine.pool.free == engine.pool.blocks


def test_later_texts_do_not_overtake_a_search(small_gpt):
    """A search of six steps, and a queue of which each text takes two passes: it does not wait for the queue each time."""
    engine = SearchingEngine(small_gpt(), longest=LONGEST, max_batch=3)
    first = engine.add(Request((3, 1, 4), Sampling(6), search=Search(3)))
    for number in range(40):
        engine.add(Request((2, 7, number), Sampling(2, greedy=True)))
    ended = []
    while engine.busy:
        ended += [output.request for output in engine.step() if output.finish]
    assert ended.index(first) < 12, ended


def test_the_prompt_of_a_search_is_found_as_that_of_a_text(small_gpt):
    """Whole blocks of the prompt that others have computed; what its own steps find is not part of it."""
    engine, prompt = SearchingEngine(small_gpt(), longest=LONGEST, block_size=4), tuple(range(7, 18))
    cached = []
    for request in (
        Request(prompt, Sampling(9), search=Search(3)),
        Request(prompt, Sampling(9), search=Search(2)),
        Request(prompt, Sampling(1)),
        Request((*prompt[:6], 1, 2, 3), Sampling(9), search=Search(3)),
        Request((1, *prompt), Sampling(9), search=Search(3)),
    ):
        engine.add(request)
        outputs = []
        while engine.busy:
            outputs += engine.step()
        cached.append(outputs[0].cached)
    assert cached == [0, 8, 8, 4, 0]


def test_refusals(small_gpt):
    engine = SearchingEngine(small_gpt(), longest=LONGEST)
    with pytest.raises(DataError, match="the model can look at 32"):
        engine.add(Request((1,) * 32, Sampling(2), search=Search(4)))
    assert not engine.busy
