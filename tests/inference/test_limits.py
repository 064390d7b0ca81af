# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens against plain loops over few tokens, so that borders are frequent: words that begin in the prompt,
the token at which a minimum ends, equal scores. And settings and lengths exactly at their limits.
"""

import math
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.errors import SettingsError
from megatron.inference.choices import RowState, adjusted, probabilities
from megatron.inference.sampling import Sampling, Search, _draws, cut_off

V = 5
TOKENS, NUMBERS = st.integers(0, V - 1), st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 2.0])
TEXT = st.lists(TOKENS, max_size=4)


def plain_scores(scores, s: Sampling, prompt, new, limit, ends) -> list[float]:
    """The scores after all settings, as docs/generation.md says them."""
    scores, text, seen = list(scores), [*prompt, *new], Counter(new)
    for token in range(V):
        scores[token] += s.biases.get(token, 0.0)
        if token in text and s.repetition_penalty != 1:
            factor = s.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        if token in seen:
            scores[token] -= s.frequency_penalty * seen[token] + s.presence_penalty
        for word in s.bad_words:
            before = list(word[:-1])
            if word[-1] == token and (not before or text[-len(before) :] == before):
                scores[token] = -math.inf
        if token in ends and len(new) < s.min_tokens_to_generate:
            scores[token] = -math.inf
    forced = s.forced_bos_token_id if not new else None
    forced = s.forced_eos_token_id if s.forced_eos_token_id is not None and len(new) == limit - 1 else forced
    return scores if forced is None else [0.0 if token == forced else -math.inf for token in range(V)]


SETTINGS = st.fixed_dictionaries(
    dict(
        repetition_penalty=st.sampled_from([1.0, 2.0]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        presence_penalty=st.sampled_from([0.0, 0.25]),
        logit_bias=st.sampled_from([None, ["1:-inf"], ["0:1", "3:-2"]]),
        bad_words_ids=st.none() | st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=3),
        min_tokens_to_generate=st.integers(0, 4),
        forced_bos_token_id=st.none() | TOKENS,
        forced_eos_token_id=st.none() | TOKENS,
        stop_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=2),
        ignore_eos=st.booleans(),
    )
)


@given(
    st.lists(NUMBERS, min_size=V, max_size=V),
    SETTINGS,
    TEXT,
    TEXT,
    st.integers(1, 5),
    st.sampled_from([None, 2, (2, 4)]),
)
@example([1.0] * V, dict(bad_words_ids=[[1, 2, 3, 4]]), [1, 2], [3], 5, None)  # a bad word that begins in the prompt
@example([1.0] * V, dict(bad_words_ids=[[1, 2]]), [1], [], 5, None)
@example([1.0] * V, dict(bad_words_ids=[[0, 1, 2]]), [1], [], 5, None)  # longer than the text so far
@example([1.0] * V, dict(min_tokens_to_generate=2), [1], [0, 0], 5, 2)  # exactly as many as wanted
def test_scores_are_those_of_a_plain_loop(scores, settings, prompt, new, limit, end):
    sampling = Sampling(**settings)
    ends = [] if end is None or sampling.ignore_eos else [end] if end == 2 else list(end)
    ends += sampling.stop_token_ids or []
    row = RowState(sampling, tuple(prompt), limit=limit, end=end, new=new)
    found = adjusted(torch.tensor([scores], dtype=torch.float64), [row])[0].tolist()
    assert found == pytest.approx(plain_scores(scores, sampling, prompt, new, limit, ends))


def plain_shares(scores, s: Sampling, p: float) -> list[float]:
    """The shares of the tokens that are left, not normalised."""
    top = max(scores)
    shares = [math.exp((score - top) / s.temperature) for score in scores]
    shares = [share / sum(shares) for share in shares]
    if 0 < s.top_k < V:
        least = sorted(scores, reverse=True)[s.top_k - 1]
        shares = [share if score >= least else 0.0 for share, score in zip(shares, scores, strict=True)]
    if 0 < p < 1:
        whole, before, kept = sum(shares), 0.0, []
        for token in sorted(range(V), key=lambda token: -shares[token]):
            if kept and before >= p * whole - 1e-12:
                break
            kept.append(token)
            before += shares[token]
        shares = [share if token in kept else 0.0 for token, share in enumerate(shares)]
    return [share if share >= s.min_p * max(shares) - 1e-12 else 0.0 for share in shares]


@given(
    st.lists(NUMBERS, min_size=V, max_size=V),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, V + 1),
    st.sampled_from([0.0, 0.3, 0.9, 0.995, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.1, 1.0]),
)
@example([10.0, 2.0, 0.0, 0.0, 0.0], 1.0, 0, 0.9999, 0.0)  # a nucleus that leaves something out
@example([1.0, 1.0, 0.5, 0.0, 0.0], 1.0, 0, 0.0, 1.0)  # as likely as the likeliest
@example([1.0, 1.0, 0.5, 0.0, 0.0], 1.0, 1, 0.0, 0.0)  # as likely as the last of top-k
def test_shares_are_those_of_a_plain_loop(scores, temperature, top_k, top_p, min_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = probabilities(torch.tensor([scores], dtype=torch.float64), [RowState(sampling)])[0]
    assert found.tolist() == pytest.approx(plain_shares(scores, sampling, top_p))


@pytest.mark.parametrize("top_p", [0.2, 0.9])
@pytest.mark.parametrize("bound", [0.0, 0.1, 0.5, 1.0])
def test_a_nucleus_becomes_no_larger_and_no_smaller_than_its_bound(top_p, bound):
    sizes = [Sampling(top_p=top_p, top_p_decay=0.7, top_p_bound=bound).top_p_at(new) for new in range(30)]
    assert sizes[0] == top_p and sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == pytest.approx(min(bound, top_p), abs=1e-4)


NEAR = 1e-9
RANGES = {  # the least and the most that is taken
    "tokens_to_generate": (1, None, 1),
    "min_tokens_to_generate": (0, 100, 1),
    "temperature": (0, None, NEAR),
    "top_k": (0, None, 1),
    **{name: (0, 1, NEAR) for name in ("top_p", "top_p_decay", "top_p_bound", "min_p")},
    **{name: (-2, 2, NEAR) for name in ("frequency_penalty", "presence_penalty")},
}


@pytest.mark.parametrize("name", RANGES)
def test_settings_at_their_limits_are_taken_and_beyond_them_are_not(name):
    least, most, step = RANGES[name]
    for limit, beyond in ((least, -step), (most, step)):
        if limit is not None:
            Sampling(**{name: limit}).check()
            Sampling(**{name: limit - beyond}).check()
            with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')}"):
                Sampling(**{name: limit + beyond}).check()


@pytest.mark.parametrize(
    "name, neutral, draws", [("temperature", (0.0, 1.0), 0.5), ("top_k", (0,), 1), ("min_p", (0.0,), 0.1)]
)
def test_a_beam_search_takes_neutral_settings_alone(name, neutral, draws):
    for value in neutral:
        Search(2).check(Sampling(**{name: value}))
    Search(1).check(Sampling(**{name: draws}))
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} {draws} has no place"):
        Search(2).check(Sampling(**{name: draws}))


@pytest.mark.parametrize("room", [9, 10, 11])
@pytest.mark.parametrize("length", [0, 8, 9, 10])
def test_a_text_was_cut_where_it_is_as_long_as_it_may_be(room, length):
    """10 tokens were asked for. With room for fewer, the model's last position was the limit."""
    found, length = cut_off([room, 5], [[0] * min(length, room), [0]], Sampling(10)), min(length, room)
    where = "--tokens-to-generate 10" if length == 10 else "the model's last position" if length == room else None
    assert found == ([f"1 of 2 texts was cut at {where}"] if where else [])


@pytest.mark.parametrize(
    "name, value, neutral", [("temperature", 0.5, 1), ("top_k", 5, 0), ("top_p", 0.5, 1), ("min_p", 0.5, 0)]
)
@pytest.mark.parametrize("how", [dict(greedy=True), dict(temperature=0), dict(top_k=1), dict(beams=2), {}])
def test_settings_of_draws_have_an_effect_if_tokens_are_drawn(name, value, neutral, how):
    plain = dict(greedy=False, temperature=1.0, top_k=0, top_p=0.0, min_p=0.0, beams=1)
    met = lambda **own: _draws(name, 0, neutral).met(SimpleNamespace(**plain | own | how))
    if name not in how:
        assert met(**{name: value}) is (not how) and met(**{name: neutral}) is True
