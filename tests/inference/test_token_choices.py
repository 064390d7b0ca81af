# SPDX-License-Identifier: Apache-2.0
"""Each setting of a choice is Hugging Face's processor of that name, or a formula; a row depends on no other row."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import SettingsError
from megatron.inference import choices
from megatron.inference.beams import beam_search
from megatron.inference.choices import RowState, adjusted, choose, in_nucleus, probabilities, sample, uniform_draw
from megatron.inference.sampling import Sampling, Search
from megatron.inference.scoring import ALONE

V, END = 40, 7
PROMPT, NEW = [3, 1, 4, 1, 5], [9, 2, 9, 3]


def logits_of(rows: int, seed: int = 0, v: int = V) -> torch.Tensor:
    return 3 * torch.randn(rows, v, generator=torch.Generator().manual_seed(seed))


def their_probabilities(scores: torch.Tensor) -> torch.Tensor:
    return scores.double().softmax(-1)


def ours(logits: torch.Tensor, sampling: Sampling, **more) -> torch.Tensor:
    rows = [RowState(sampling, **dict(prompt=PROMPT, new=NEW, end=END) | more) for _ in logits]
    shares = probabilities(adjusted(logits, rows), rows)
    return shares / shares.sum(-1, keepdim=True)


def process(name: str, *arguments, **more):
    processors = pytest.importorskip("transformers.generation.logits_process")
    return getattr(processors, name)(*arguments, **more)


IDS = torch.tensor([PROMPT + NEW] * 3)
OURS_AND_THEIRS = {
    "temperature": (Sampling(temperature=0.7), [("TemperatureLogitsWarper", 0.7)]),
    "top-k": (Sampling(top_k=5), [("TopKLogitsWarper", 5)]),
    "top-p": (Sampling(top_p=0.8), [("TopPLogitsWarper", 0.8)]),
    "min-p": (Sampling(min_p=0.1), [("MinPLogitsWarper", 0.1)]),
    "repetition": (Sampling(repetition_penalty=1.7), [("RepetitionPenaltyLogitsProcessor", 1.7)]),
    "bias": (
        Sampling(logit_bias=["3:2.5", "11:-inf"]),
        [("SequenceBiasLogitsProcessor", {(3,): 2.5, (11,): -math.inf})],
    ),
    "bad words": (
        Sampling(bad_words_ids=["11", "9,3", "3,12", "2,9,3,20", "9,2,3,21", "5,22"]),
        [("NoBadWordsLogitsProcessor", [[11], [9, 3], [3, 12], [2, 9, 3, 20], [9, 2, 3, 21], [5, 22]])],
    ),
    "minimum": (Sampling(min_tokens_to_generate=5), [("MinNewTokensLengthLogitsProcessor", len(PROMPT), 5, [END])]),
    "stop ids": (
        Sampling(min_tokens_to_generate=5, stop_token_ids=[8, 2]),
        [("MinNewTokensLengthLogitsProcessor", len(PROMPT), 5, [END, 8, 2])],
    ),
    "forced end": (
        Sampling(5, forced_eos_token_id=END, min_tokens_to_generate=5),
        [("ForcedEOSTokenLogitsProcessor", len(PROMPT) + 5, END)],
    ),
    "in their order": (
        Sampling(logit_bias=["3:2.5"], repetition_penalty=1.7, temperature=1.5, top_k=12, top_p=0.9, min_p=0.05),
        [
            ("SequenceBiasLogitsProcessor", {(3,): 2.5}),
            ("RepetitionPenaltyLogitsProcessor", 1.7),
            ("TemperatureLogitsWarper", 1.5),
            ("TopKLogitsWarper", 12),
            ("TopPLogitsWarper", 0.9),
            ("MinPLogitsWarper", 0.05),
        ],
    ),
}


@pytest.mark.parametrize("name", OURS_AND_THEIRS)
def test_probabilities_are_those_of_hugging_faces_processors(name):
    sampling, theirs = OURS_AND_THEIRS[name]
    sampling.check()
    logits = logits_of(3)
    scores = logits.clone()
    for processor, *arguments in theirs:
        if processor == "SequenceBiasLogitsProcessor":
            arguments = [[[list(token), bias] for token, bias in arguments[0].items()]]
        scores = process(processor, *arguments)(IDS, scores)
    wanted, found = their_probabilities(scores), ours(logits, sampling)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-9)
    assert (found == 0).equal(wanted == 0) and not torch.allclose(found, their_probabilities(logits), atol=1e-3)
    greedy = [RowState(replace(sampling, greedy=True), PROMPT, new=NEW, end=END) for _ in logits]
    raw = [one for one in theirs if "Warper" not in one[0]]
    if raw == theirs:
        assert choose(logits, greedy).equal(scores.argmax(-1))


def test_the_first_token_is_forced_as_hugging_face_does():
    """Theirs looks at texts of one token: the first token of an encoder-decoder's target."""
    logits, forced = logits_of(3), Sampling(forced_bos_token_id=6)
    theirs = process("ForcedBOSTokenLogitsProcessor", 6)(torch.tensor([[0]] * 3), logits)
    torch.testing.assert_close(ours(logits, forced, prompt=[0], new=[]), their_probabilities(theirs))
    torch.testing.assert_close(ours(logits, forced), their_probabilities(logits))  # later ones are not


def test_the_last_token_is_forced_where_the_context_ends():
    """The room that the prompt leaves may be less than --tokens-to-generate."""
    row = RowState(Sampling(20, greedy=True, forced_eos_token_id=6), PROMPT, limit=3)
    found = []
    for _ in range(3):
        found.append(choose(logits_of(1), [row]).item())
        row.append(found[-1])
    best = logits_of(1).argmax().item()
    assert found == [best, best, 6]


def test_penalties_as_openai_defines_them():
    """score[j] - count[j] frequency - (count[j] > 0) presence, of the new tokens alone."""
    logits = logits_of(1)
    wanted = logits[0].tolist()
    for token in range(V):
        wanted[token] -= NEW.count(token) * 0.6 + (token in NEW) * -0.4
    found = ours(logits, Sampling(frequency_penalty=0.6, presence_penalty=-0.4))
    torch.testing.assert_close(found, their_probabilities(torch.tensor([wanted])), rtol=1e-5, atol=1e-9)


def test_a_nucleus_may_become_smaller_from_token_to_token():
    logits, sampling = logits_of(1), Sampling(top_p=0.9, top_p_decay=0.5, top_p_bound=0.2)
    for new, top_p in (([], 0.9), ([1], 0.45), ([1, 1], 0.225), ([1, 1, 1], 0.2)):
        assert ours(logits, sampling, new=new).equal(ours(logits, Sampling(top_p=top_p)))


def test_the_order_counts():
    """Top-k before top-p: 0.5 is two thirds of what two tokens leave, so that a nucleus of 0.6 is one token."""
    logits = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    left = lambda **how: (ours(logits, Sampling(**how), prompt=[], new=[], end=None)[0] > 0).tolist()
    assert left(top_k=2) == [True, True, False, False] == left(top_p=0.6)
    assert left(top_p=0.5) == left(top_p=0.01) == left(top_k=2, top_p=0.6) == [True, False, False, False]
    assert left(top_k=9, top_p=1.0) == [True] * 4
    assert left(temperature=0.01, top_p=0.6) == [True, False, False, False]  # temperature before both
    assert left(temperature=1e-30) == [True, False, False, False]


@pytest.mark.parametrize("limit, kept", [(0.5, 1), (0.500001, 2), (0.75, 2), (0.875, 3), (1.0, 4)])
def test_a_nucleus_of_exactly_its_share_has_no_further_token(limit, kept):
    shares = torch.tensor([[0.125, 0.5, 0.125, 0.25]], dtype=torch.float64)
    found = in_nucleus(shares, torch.tensor([limit], dtype=torch.float64))[0]
    order = [1, 3, 0, 2]  # of equal ones the first
    assert found.nonzero().flatten().tolist() == sorted(order[:kept])


@pytest.mark.parametrize("how", [dict(top_k=1), dict(temperature=0.0), dict(greedy=True)])
def test_the_first_of_equal_scores_is_greedy(how):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]])
    for index in range(20):
        assert choose(logits, [RowState(Sampling(**how), index=index)]).tolist() == [1]


def test_wide_nuclei_and_equal_scores(monkeypatch):
    """Against a sort of all tokens, where candidates reach and where they do not."""
    monkeypatch.setattr(choices, "CANDIDATES", 8)
    wider = 0
    for seed, top_p in itertools.product(range(20), (0.05, 0.5, 0.9, 0.999)):
        shares = (logits_of(5, seed).mul(0.7).round() if seed % 2 else logits_of(5, seed)).double().softmax(-1)
        found = in_nucleus(shares, torch.full((5,), top_p, dtype=torch.float64))
        for row, own in zip(shares, found, strict=True):
            order = sorted(range(V), key=lambda token: (-row[token].item(), token))
            kept, total = set(), 0.0
            for token in order:
                if total < top_p * row.cumsum(0)[-1].item():
                    kept.add(token)
                total += row[token].item()
            assert set(own.nonzero().flatten().tolist()) == kept
            assert own[sorted(kept)].equal(row[sorted(kept)])
            wider += len(kept) > 8
    assert 50 < wider < 350


def any_sampling(draw: random.Random) -> Sampling:
    maybe = lambda value, other: value if draw.random() < 0.4 else other
    return Sampling(
        20,
        maybe(draw.randrange(6), 0),
        greedy=draw.random() < 0.3,
        temperature=draw.choice((0.0, 0.5, 1.0, 2.0)),
        top_k=maybe(draw.randrange(1, V + 5), 0),
        top_p=maybe(draw.random(), 0.0),
        min_p=maybe(draw.random() / 3, 0.0),
        repetition_penalty=maybe(0.5 + draw.random(), 1.0),
        frequency_penalty=maybe(draw.random(), 0.0),
        presence_penalty=maybe(-draw.random(), 0.0),
        logit_bias=maybe([f"{draw.randrange(V)}:{draw.uniform(-5, 5)}"], None),
        bad_words_ids=maybe([f"{draw.randrange(V)}", f"{draw.randrange(V)},{draw.randrange(V)}"], None),
        forced_bos_token_id=maybe(draw.randrange(V), None),
        forced_eos_token_id=maybe(draw.randrange(V), None),
        stop_token_ids=maybe([1, 2], None),
        sampling_seed=draw.randrange(5),
    )


def test_a_row_depends_on_no_other():
    draw = random.Random(5)
    for seed in range(40):
        n = draw.choice((2, 5, 17))
        logits = logits_of(n, seed, v=draw.choice((V, 600)))
        rows = [
            RowState(
                any_sampling(draw),
                draw.choices(range(V), k=draw.randrange(1, 9)),
                limit=draw.choice((5, 20)),
                end=draw.choice((None, END)),
                index=draw.randrange(3),
                new=draw.choices(range(V), k=draw.choice((0, 1, 4))),
            )
            for _ in range(n)
        ]
        alone = [choose(logits[place : place + 1], [row]).item() for place, row in enumerate(rows)]
        before = logits.clone()
        assert choose(logits, rows).tolist() == alone and logits.equal(before)
        order = draw.sample(range(n), n)
        assert choose(logits[order], [rows[place] for place in order]).tolist() == [alone[place] for place in order]


def test_plain_greedy_rows_are_one_argmax(monkeypatch):
    for name in ("adjusted", "probabilities", "sample"):
        function = getattr(choices, name)
        monkeypatch.setattr(choices, name, lambda *a, f=function, **m: called.append(f.__name__) or f(*a, **m))
    called, logits = [], logits_of(3)
    rows = [RowState(Sampling(greedy=True), PROMPT, end=END) for _ in range(3)]
    assert adjusted(logits, rows) is logits
    assert choose(logits, rows).equal(logits.argmax(-1)) and called == ["adjusted"]


def test_draws_depend_on_seed_text_and_place_alone():
    numbers = [
        uniform_draw(seed, index, step)
        for seed, index, step in itertools.product((0, 1, -3, 2**63 - 1, 2**32, 2**32 + 1, 2**62), range(50), range(50))
    ]
    assert len(set(numbers)) == len(numbers) and 0 <= min(numbers) and max(numbers) < 1
    assert torch.tensor(numbers).mean().item() == pytest.approx(0.5, abs=0.01)
    counts = torch.tensor(numbers).mul(10).long().bincount(minlength=10) / len(numbers)
    assert counts.tolist() == pytest.approx([0.1] * 10, abs=0.012)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-20, 20) | st.just(-math.inf), min_size=2, max_size=30), st.floats(0, 1, exclude_max=True))
def test_sample_never_takes_the_impossible(values, draw):
    if all(value == -math.inf for value in values):
        values[0] = 0.0
    shares = torch.tensor([values], dtype=torch.float64).softmax(-1)
    chosen = sample(shares, torch.tensor([draw], dtype=torch.float64)).item()
    assert values[chosen] > -math.inf


def test_draws_have_the_exact_probabilities():
    """A grid of draws instead of random ones: each token has its share of them, to one draw."""
    logits, sampling, number = logits_of(1, v=12), Sampling(top_k=6, temperature=1.3, top_p=0.95, min_p=0.02), 20_000
    shares = ours(logits, sampling)
    grid = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    counts = sample(shares.expand(number, -1), grid).bincount(minlength=12)
    assert (counts - number * shares[0]).abs().max() <= 1 and 2 < (counts > 0).sum() < 7


def test_random_draws_have_the_probabilities():
    logits, number = torch.tensor([0.5, 0.3, 0.2]).log().expand(5_000, 3), 5_000
    rows = [RowState(Sampling(), index=index) for index in range(number)]
    counts = choose(logits, rows).bincount(minlength=3) / number
    assert counts.tolist() == pytest.approx([0.5, 0.3, 0.2], abs=0.021)  # three standard deviations


@pytest.mark.parametrize(
    "how, words",
    [
        (dict(min_p=1.5), "--min-p 1.5: has to be between 0 and 1"),
        (dict(frequency_penalty=3.0), "--frequency-penalty 3.0: has to be between -2 and 2"),
        (dict(presence_penalty=-2.5), "--presence-penalty -2.5: has to be between -2 and 2"),
        (dict(logit_bias=["7"]), "--logit-bias .*: has to be TOKEN:NUMBER"),
        (dict(logit_bias=["7:x"]), "TOKEN:NUMBER"),
        (dict(logit_bias=["7:nan"]), "TOKEN:NUMBER"),
        (dict(logit_bias=["7:inf"]), "TOKEN:NUMBER"),
        (dict(bad_words_ids=["7,x"]), "--bad-words-ids .*: has to be TOKEN,TOKEN"),
        (dict(bad_words_ids=[[]]), "TOKEN,TOKEN"),
        (dict(stop=["a", ""]), "--stop .*: has to be strings that are not empty"),
        (dict(top_p_decay=2.0), "--top-p-decay 2.0: has to be between 0 and 1"),
    ],
)
def test_wrong_settings_are_named(how, words):
    with pytest.raises(SettingsError, match=words):
        Sampling(**how).check()


def test_tokens_have_to_be_there():
    for how, words in (
        (dict(stop_token_ids=[3, 40]), "--stop-token-ids 3 40: there is no token 40"),
        (dict(forced_bos_token_id=-1), "--forced-bos-token-id -1: there is no token -1"),
        (dict(forced_eos_token_id=99), "no token 99"),
        (dict(logit_bias={50: 1.0}), "no token 50"),
        (dict(bad_words_ids=["3,4", "3,41"]), "--bad-words-ids 3,4 3,41: there is no token 41"),
    ):
        with pytest.raises(SettingsError, match=words):
            Sampling(**how).check_tokens(V)
    Sampling(stop_token_ids=[39], forced_bos_token_id=0, logit_bias=["5:-inf"]).check_tokens(V)


# Groups of beams ------------------------------------------------------------------------------------------------------


def table_model(v: int, seed: int):
    """A next_logits that depends on all tokens so far, by a hash."""

    def after(text: tuple[int, ...]) -> torch.Tensor:
        return logits_of(1, seed=hash((seed, text)) % 2**31, v=v)[0]

    return after, lambda tokens: torch.stack([after(tuple(text)) for text in tokens.t().tolist()])


def slow_groups(after, prompt, steps, search, end, v) -> list[tuple[float, list[int]]]:
    """The definition, with lists: every continuation of a group's texts by a token, group after group."""
    w = search.num_beams // search.num_beam_groups
    live = [[(0.0, [])] for _ in range(search.num_beam_groups)]
    done = [[] for _ in live]
    open_groups = set(range(len(live)))
    for step in range(1, steps + 1):
        earlier = []
        for group in range(len(live)):
            if group not in open_groups:
                continue
            every = []
            for score, text in live[group]:
                chances = after((*prompt, *text)).double().log_softmax(-1).tolist()
                for token in range(v):
                    cost = search.diversity_penalty * earlier.count(token)
                    every.append((score + chances[token] - cost, [*text, token]))
            every.sort(key=lambda one: -one[0])
            power = step**search.length_penalty
            done[group] += [(score / power, text[:-1]) for score, text in every[:w] if text[-1] == end]
            done[group] = sorted(done[group], key=lambda one: -one[0])[:w]
            live[group] = [one for one in every[: 2 * w] if one[1][-1] != end][:w]
            earlier += [text[-1] for _, text in live[group]]
            if len(done[group]) == w and live[group][0][0] / power <= done[group][-1][0]:
                open_groups.discard(group)
    for group in open_groups:
        done[group] += [(score / steps**search.length_penalty, text) for score, text in live[group]]
        done[group] = sorted(done[group], key=lambda one: -one[0])[:w]
    return sorted((one for group in done for one in group), key=lambda one: -one[0])


@pytest.mark.parametrize("columns", [1, "k"])
@pytest.mark.parametrize("beams, groups, penalty", [(4, 2, 0.7), (6, 3, 2.0), (3, 3, 50.0), (4, 1, 0.0)])
def test_groups_of_beams_are_those_of_the_definition(columns, beams, groups, penalty):
    v, end, prompt = 9, 2, [3, 1]
    early = 0
    for seed in range(4):
        after, next_logits = table_model(v, seed)
        search = Search(beams, num_beam_groups=groups, diversity_penalty=penalty)
        search.check(Sampling())
        first = torch.tensor(prompt).unsqueeze(1).expand(-1, beams if columns == "k" else 1)
        found = beam_search(next_logits, first, search, Sampling(7), 7, vocab_size=v, cache=None, end=end, pp=ALONE)
        assert found == [text for _, text in slow_groups(after, prompt, 7, search, end, v)]
        early += len(found[0]) < 7
        if penalty > 10:
            firsts = [text[0] for text in found if text]
            assert len(set(firsts)) == len(firsts)  # nothing is worth so much
    assert early


def test_a_group_of_one_beam_is_hugging_faces_processor_and_greedy():
    """HammingDiversityLogitsProcessor's formula: log-probability - penalty x how often earlier groups have the token."""
    v, search = 9, Search(3, num_beam_groups=3, diversity_penalty=1.5)
    after, next_logits = table_model(v, seed=11)
    texts = [[], [], []]
    for _ in range(6):
        taken = []
        for text in texts:
            scores = after((4, *text)).double().log_softmax(-1)
            scores -= 1.5 * torch.tensor([taken.count(token) for token in range(v)])
            taken.append(scores.argmax().item())
        texts = [[*text, token] for text, token in zip(texts, taken, strict=True)]
    found = beam_search(
        next_logits, torch.tensor([[4]]), search, Sampling(6), 6, vocab_size=v, cache=None, end=None, pp=ALONE
    )
    assert sorted(found) == sorted(texts)


def test_beams_heed_the_other_settings():
    v = 9
    after, next_logits = table_model(v, seed=1)
    best = lambda sampling: beam_search(
        next_logits, torch.tensor([[4]]), Search(3), sampling, 6, vocab_size=v, cache=None, end=None, pp=ALONE
    )[0]
    plain = best(Sampling(6))
    assert best(Sampling(6, forced_bos_token_id=0))[0] == 0 and best(Sampling(6, forced_eos_token_id=1))[-1] == 1
    assert plain[0] not in best(Sampling(6, logit_bias=[f"{plain[0]}:-inf"]))
    stopped = best(Sampling(6, stop_token_ids=[plain[2]]))
    assert plain[2] not in stopped
    assert len(set(best(Sampling(6, frequency_penalty=2.0, presence_penalty=2.0)))) >= len(set(plain))


@pytest.mark.parametrize(
    "how, words",
    [
        (
            dict(num_beams=4, num_beam_groups=3, diversity_penalty=1.0),
            "--num-beam-groups 3 does not divide --num-beams 4",
        ),
        (dict(num_beams=4, num_beam_groups=2), "--num-beam-groups 2: without a penalty all groups find the same"),
        (dict(num_beams=4, diversity_penalty=1.0), "--diversity-penalty 1 is between groups of beams"),
        (dict(num_beams=4, num_beam_groups=2, diversity_penalty=-1.0), "--diversity-penalty -1: has to be 0 or more"),
    ],
)
def test_groups_that_cannot_be(how, words):
    with pytest.raises(SettingsError, match=words):
        Search(**how).check(Sampling())
