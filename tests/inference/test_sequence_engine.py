# SPDX-License-Identifier: Apache-2.0
"""The engine of encoder-decoders: a target is what it is alone, whatever its neighbours are, over any ranks."""

import random
from dataclasses import replace

import pytest
import torch

from megatron.errors import DataError, SettingsError
from megatron.inference.generation import generate_targets
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.inference.sequence_engine import SequenceEngine, bytes_of_a_target
from megatron.mpu.mesh import Axis
from tests.models.test_t5_oracle import CASES, SOURCE, TARGET, V, ours_of

LONGEST, START, END = (SOURCE, TARGET), 0, 1


@pytest.fixture(scope="module")
def model():
    found, _ = ours_of(CASES["T5 1.0"][1])
    with torch.no_grad():
        for number, parameter in enumerate(found.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn * 0.2 + (parameter.dim() == 1))
    return found.eval()


def requests_of(seed: int, count: int, end: int, vocabulary: int = V, longest: int = SOURCE) -> list[Request]:
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        source = tuple(draw.randrange(vocabulary) for _ in range(draw.choice((1, 3, 12, longest))))
        sampling = draw.choice([Sampling(greedy=True), Sampling(temperature=1.4, top_k=30), Sampling(top_p=0.9)])
        sampling = replace(sampling, tokens_to_generate=draw.choice((1, 4, 9)), sampling_seed=draw.randrange(3))
        more = dict(index=draw.randrange(4), start=START, end=end, logprobs=draw.choice((None, 0, 2)))
        if draw.random() < 0.25:
            more |= dict(search=Search(draw.choice((1, 2, 4))), logprobs=None)
            sampling = Sampling(sampling.tokens_to_generate)
        found.append(Request(source, sampling, **more))
    return found


def alone(model, request: Request) -> list[list[int]]:
    """The targets of one request, by a batch of its own."""
    more = dict(longest=(model.facts.source, model.facts.target), start=START, end=request.end)
    if request.search and request.search.num_beams > 1:
        return generate_targets(model, [request.prompt], request.sampling, request.search, best=request.texts, **more)
    sampling = replace(request.sampling, greedy=True) if request.search else request.sampling
    return generate_targets(model, [request.prompt], sampling, draws=[(sampling, request.index)], **more)


def check_mix(engine: SequenceEngine, requests, wanted, seed: int) -> dict[str, int]:
    """Random comings, leavings and cancellations. Returns counts."""
    draw, sums = random.Random(seed), dict(cancelled=0, texts=0, searches=0, most=0)
    to_come, running, found = draw.choices(range(len(requests)), k=9), {}, {}
    while to_come or engine.busy:
        while to_come and draw.random() < 0.4:
            place = to_come.pop()
            running[engine.add(requests[place])] = place, []
        if running and draw.random() < 0.1:
            engine.cancel(draw.choice(list(running)))
            sums["cancelled"] += 1
        for output in engine.step():
            place, outputs = running[output.request]
            outputs.append(output)
            if output.finish:
                found[output.request] = running.pop(output.request)
        sums["most"] = max(sums["most"], engine.stats().running)
    assert not running and engine.stats().waiting == engine.stats().running == 0 and engine.step() == []
    for place, outputs in found.values():
        request, last = requests[place], outputs[-1]
        tokens = [output.new.token for output in outputs if output.new]
        if last.finish == "cancelled":
            assert request.search or tokens == wanted[place][0][: len(tokens)]
        elif request.search:
            made = [list(one.tokens) for one in last.found]
            assert made == wanted[place][: len(made)]
            sums["searches"] += 1
        else:
            assert tokens == wanted[place][0]
            cut = len(tokens) == min(request.sampling.tokens_to_generate, engine.facts.target)
            assert last.finish == ("length" if cut else "stop")
            sums["texts"] += 1
    return sums


@pytest.mark.parametrize("mixes", [8, pytest.param(400, marks=pytest.mark.full)])
def test_a_target_does_not_depend_on_its_neighbours(model, mixes):
    [common] = generate_targets(model, [[5, 6, 7]], Sampling(3, greedy=True), longest=LONGEST)
    requests = requests_of(1, 10, end=common[1])
    wanted, whole = [alone(model, request) for request in requests], {}
    for seed in range(mixes):
        sums = check_mix(SequenceEngine(model, max_batch=1 + seed % 6), requests, wanted, seed)
        whole = {name: whole.get(name, 0) + count for name, count in sums.items()}
    assert min(whole.values()) > 2, whole


def test_scores_are_those_of_the_whole_target(model):
    """Natural log-probabilities of the model, whatever its neighbours ask for."""
    engine, sampling, source = SequenceEngine(model), Sampling(5, temperature=2.0, sampling_seed=2), tuple(range(9, 30))
    numbers = [
        engine.add(Request(source, sampling, start=START, logprobs=count, index=index))
        for index, count in enumerate((0, None, 3))
    ]
    found = {number: [] for number in numbers}
    while engine.busy:
        for output in engine.step():
            found[output.request].append(output.new)
    for number, count in zip(numbers, (0, None, 3), strict=True):
        tokens = [score.token for score in found[number]]
        target = torch.tensor([START, *tokens[:-1]]).unsqueeze(1)
        with torch.no_grad():
            chances = model.logits(torch.tensor(source).unsqueeze(1), target)[:, 0].double().log_softmax(-1)
        for score, row in zip(found[number], chances, strict=True):
            if count is None:
                assert score.logprob is None and score.top == ()
                continue
            assert score.logprob == pytest.approx(row[score.token].item(), abs=1e-5)
            best = row.topk(count) if count else ([], [])
            assert [token for token, _ in score.top] == list(map(int, best[1]))
            assert [logprob for _, logprob in score.top] == pytest.approx(list(map(float, best[0])), abs=1e-5)


def test_sources_that_come_together_are_one_pass(model, monkeypatch):
    """And later ones wait until a quarter of the places is free, so that they are several, too."""
    calls = []
    decode = type(model).decode

    def watched(self, tokens, *more):
        calls.append(tokens.shape[1])
        return decode(self, tokens, *more)

    monkeypatch.setattr(type(model), "decode", watched)
    engine, request = SequenceEngine(model, max_batch=8), Request((5, 6, 7), Sampling(4, greedy=True))
    for _ in range(8):
        engine.add(request)
    engine.step()
    assert calls == [8]
    for _ in range(3):
        engine.add(request)
    engine.step()
    assert calls == [8, 8] and engine.stats().waiting == 3
    while engine.busy:
        engine.step()
    assert calls == [8] * 4 + [3] * 4


@pytest.mark.parametrize("running, begun", [(5, 8), (6, 8), (7, 7)])
def test_sources_begin_when_a_quarter_of_the_places_is_free(model, running, begun):
    """Of 8 exactly two, or more; of three that wait as many as fit."""
    engine, request = SequenceEngine(model, max_batch=8), Request((5, 6, 7), Sampling(4, greedy=True))
    for count in (running, 3):
        for _ in range(count):
            engine.add(request)
        engine.step()
    assert engine.stats().running == begun and engine.stats().waiting == running + 3 - begun


def test_a_search_with_more_beams_than_places_is_alone(model):
    """It would never begin otherwise; a second one, and a text, wait for its end."""
    engine, search = SequenceEngine(model, max_batch=2), Request((5, 6), Sampling(3), start=START, search=Search(4))
    for request in (search, search, Request((5, 6), Sampling(3, greedy=True), start=START)):
        engine.add(request)
    states = []
    while engine.busy:
        engine.step()
        states.append((engine.stats().running, engine.stats().waiting))
    assert states[0] == (4, 2) and (4, 1) in states and (1, 0) in states and max(one for one, _ in states) == 4


@pytest.mark.parametrize("longest", [1, 3])
def test_targets_are_no_longer_than_asked_for(model, longest):
    how = dict(longest=(SOURCE, longest), start=START)
    for search in (Search(), Search(2)):
        [found] = generate_targets(model, [[5, 6, 7]], Sampling(9), search, **how)
        assert len(found) == longest


def test_refusals_and_memory(model):
    engine = SequenceEngine(model)
    for request, error, why in (
        (Request((1,) * (SOURCE + 1), Sampling(2)), DataError, f"the encoder can look at {SOURCE}"),
        (Request((), Sampling(2)), DataError, "not empty"),
        (Request((V,), Sampling(2)), DataError, f"no token {V}"),
        (Request((1,), Sampling(2), prompt_logprobs=True), SettingsError, "a source has no log-probabilities"),
        (Request((1,), Sampling(2, top_k=4), search=Search(2)), SettingsError, "--top-k 4 has no place"),
        (Request((1,), Sampling(2), logprobs=V + 1), SettingsError, f"log-probabilities of {V + 1} tokens"),
        (Request((1,), Sampling(2), logprobs=-1), SettingsError, "log-probabilities of -1 tokens"),
        (Request((1,), Sampling(2), start=V), DataError, f"no token {V}"),
    ):
        with pytest.raises(error, match=why):
            engine.add(request)
    assert not engine.busy
    engine.add(Request((V - 1,) * SOURCE, Sampling(2), logprobs=V))  # as many as there are
    one = bytes_of_a_target(model)
    assert SequenceEngine(model, memory=3 * one).max_batch == 3
    with pytest.raises(SettingsError, match="MiB of cache"):
        SequenceEngine(model, memory=one - 1)


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_memory_of_a_target_is_that_of_the_stage_with_the_most_layers(model, stages, monkeypatch):
    """Stages need not divide the layers of the decoder."""
    each = 2 * model.facts.settings.num_attention_heads * model.facts.settings.head_dim * 4  # keys and values in fp32
    monkeypatch.setattr(model, "pp", Axis("pp", tuple(range(stages))), raising=False)
    layers = model.facts.num_layers - model.facts.encoder_layers
    most = max(len(range(rank, layers, stages)) for rank in range(stages))
    assert bytes_of_a_target(model) == most * (SOURCE + TARGET) * each


def test_a_cancelled_target_is_silent(model):
    """Its neighbours in the cohort go on, and end as before; the cohort ends with the last of them."""
    engine, request = SequenceEngine(model), Request((5, 6, 7), Sampling(6, sampling_seed=1), start=START, logprobs=0)
    first, second = engine.add(request), engine.add(replace(request, index=1))
    engine.step()
    engine.cancel(first)
    engine.cancel(first)  # once more has no effect
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.request for output in outputs] == [first, *[second] * 3] and outputs[0].finish == "cancelled"
    assert engine.stats().running == 2
    engine.cancel(second)
    assert engine.stats().running == 0  # its places are free at once
    assert [output.finish for output in engine.step()] == ["cancelled"] and not engine.busy
    engine.cancel(99)
    assert not engine.busy
