# SPDX-License-Identifier: Apache-2.0
"""Conversations and tasks exactly at a limit, against plain loops over small numbers, so that borders are frequent."""

import contextlib
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.data.loader import DOCUMENTS, IDS, MASK, named_batch
from megatron.errors import DataError, SettingsError
from megatron.model.bert.settings import GROUP as BERT
from megatron.model.context import ForwardContext
from megatron.model.facts import Facts
from megatron.model.language_model import TOKENS
from megatron.model.sample_arrays import LABELS, LOSS_MASK, SampleArray
from megatron.mpu.mesh import Mesh
from megatron.tasks import backbones, chat, classifier, contaminated, dpo, finetune, finetune_start, metrics, spans
from megatron.tasks import settings as kept_settings
from megatron.tasks.chat_samples import (
    ChatSamples,
    EncodedTexts,
    TextEncoder,
    conversation_samples,
    end_of_turn,
    pack,
    pair_samples,
)
from megatron.tasks.chat_settings import DPO_LOSS
from megatron.tasks.classifier import LENGTHS, OPTIONS
from megatron.tasks.cloze import BertCloze, CausalCloze, T5Cloze
from megatron.tasks.dpo import PairComparison
from megatron.tasks.evaluation import SpanMeasures, TaskMeasures
from megatron.tasks.examples import Examples, TaskExample, place_of
from megatron.tasks.pet import MockPatterns, Pattern, PetMeasures, PetRequests, choices_of, pet_datasets, refuse_unequal
from megatron.tasks.readers import BertReader, CausalReader, T5Reader
from megatron.tasks.samples import MockTaskSamples, TaskSamples, longest_cut, together, wanted, with_options
from megatron.tasks.settings import LM_LOSS, TaskSettings, predictions_folder
from megatron.tasks.soft_labels import with_soft_labels
from megatron.tasks.spans import ENDS, MockSpanSamples
from tests.data.test_stale_caches import Bytes, template_of
from tests.serving.toy import EOD

TEXT = st.lists(st.booleans(), min_size=1, max_size=7)  # which of its tokens are answers


def encoded(texts, stops=None) -> EncodedTexts:
    """Texts whose tokens have numbers of their own."""
    lengths = [len(text) for text in texts]
    return EncodedTexts(
        tokens=np.arange(100, 100 + sum(lengths), dtype=np.int32),
        answers=np.array([one for text in texts for one in text], np.uint8),
        ends=np.cumsum(lengths, dtype=np.int64),
        stops=np.array(stops or [7] * len(texts), np.int32),
        places=np.zeros(len(texts), np.int32),
        lines=np.arange(1, len(texts) + 1, dtype=np.int32),
        notes=np.frombuffer(b"[]", np.uint8),
    )


def learned(text, room: int) -> int:
    """Tokens of answers that something before them predicts, of the first `room`."""
    return sum(text[1:room])


def said(notes, words: str) -> int:
    """How many conversations a note is about."""
    return sum(int(note.split()[0]) for note in notes if words in note)


@given(st.lists(TEXT, min_size=1, max_size=8), st.integers(1, 7), st.booleans())
@example([[0, 1], [0, 0, 1]], 12, False)  # exactly four times the longest one
@example([[0, 1], [0, 0, 1]], 13, False)
@example([[0, 1, 1], [1, 1, 0, 1]], 6, True)  # a text that begins with an answer, after another one
@example([[0, 1], [0, 0, 0, 1]], 5, True)  # they fill a sample
def test_samples_of_conversations(texts, seq_length, packing):
    room, data = seq_length + 1, encoded(texts)
    used = [number for number, text in enumerate(texts) if learned(text, room)]
    if not used:
        with pytest.raises(DataError, match="no conversation with an answer"):
            conversation_samples(data, ["a.jsonl"], seq_length, 0, packing)
        return
    samples, notes = conversation_samples(data, ["a.jsonl"], seq_length, 0, packing)
    assert sorted(number for row in samples.rows for number in row) == used
    assert said(notes, "have no answer, and") == sum(not learned(text, 99) for text in texts)
    assert said(notes, "lose their end") == sum(len(texts[number]) > room for number in used)
    lost = sum(bool(learned(text, 99)) and not learned(text, room) for text in texts)
    assert said(notes, "have no answer within") == lost
    longest = max(min(len(texts[number]), room) for number in used)
    assert any("is padded to" in note for note in notes) == (not packing and seq_length > 4 * longest)
    for row, sample in zip(samples.rows, samples, strict=False):
        assert packing or len(row) == 1
        ids, mask, documents = [], [], []
        for place, number in enumerate(row):
            tokens, text = data.text(number)[0][:room].tolist(), texts[number][:room]
            ids += tokens
            mask += [0.0, *map(float, text[1:])]  # nothing predicts a text's first token
            documents += [place] * len(tokens)
        assert len(ids) <= room
        assert sample[IDS].tolist() == ids + [0] * (room - len(ids))
        assert sample[MASK].tolist() == mask + [0.0] * (room - len(ids))
        if packing:
            assert sample[DOCUMENTS][: len(ids)].tolist() == documents and len(set(sample[DOCUMENTS])) >= len(row)


def plain_pack(lengths, room: int) -> list[list[int]]:
    """The longest first, each into the fullest row where it fits; a row with less than two places is full."""
    rows: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        left = [room - sum(lengths[one] for one in row) for row in rows]
        fits = [(free, place) for place, free in enumerate(left) if free >= max(2, lengths[number])]
        if fits:
            rows[min(fits)[1]].append(number)
        else:
            rows.append([number])
    return rows


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(9, 12))
def test_rows_are_packed_as_a_plain_loop_does(lengths, room):
    found = pack(np.array(lengths), room, list(range(len(lengths))))
    assert found == plain_pack(lengths, room)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), st.integers(3, 9))
@example([([1, 0], [1, 1, 1])], 7)  # the first token of an answer without a prompt is never learned
def test_samples_of_pairs(pairs, seq_length):
    """Each answer has a token that is learned, within the length; otherwise the pair is left out, and said."""
    data, room = encoded([text for pair in pairs for text in pair]), seq_length + 1
    try:
        samples, notes = pair_samples(data, ["a.jsonl"], seq_length, 0)
    except DataError:
        rows, kept = [], None
    else:
        rows, kept = samples.rows, samples.lengths
        for row, sample in zip(rows, samples, strict=False):
            there = sum(int(kept[number]) for number in row)
            assert there <= room and sample[MASK][there:].sum() == 0 and all(kept[number] >= 1 for number in row)
        assert said(notes, "lose the end") == sum(
            any(kept[number] < len(pairs[row[0] // 2][number % 2]) for number in row) for row in rows
        )
    whole = [number for number, pair in enumerate(pairs) if sum(map(len, pair)) <= room]  # none of them is cut
    for number in whole:
        assert ([2 * number, 2 * number + 1] in rows) == all(learned(text, room) for text in pairs[number])


@pytest.mark.parametrize(
    "stops, end", [([5, 5, 6], 5), ([5, 6], None), ([5, 5, 6, 6], None), ([-1, 5, -1], 5), ([-1], None)]
)
def test_more_than_half_of_the_answers_say_what_ends_them(stops, end):
    assert end_of_turn(encoded([[1]] * len(stops), stops)) == end


@pytest.mark.parametrize("weight, counts", [(None, True), (1, True), (0, False)])
def test_a_message_counts_unless_its_weight_is_0(weight, counts):
    answer = dict(role="assistant", content="yes") | ({} if weight is None else dict(weight=weight))
    messages = [dict(role="user", content="so?"), answer]
    ids, counted, _ = TextEncoder(Bytes(), template_of(Bytes()))._encoded("a, line 1", messages, None)
    assert any(counted) == counts and len(ids) == len(counted)


@pytest.mark.parametrize("answer, ends", [("b", 1), ("b\0", 1), ("", 1)])
def test_an_answer_ends_once(answer, ends):
    """Also one that has the end of document already."""
    eod = 0
    tokenizer = SimpleNamespace(
        eod=eod, encode_pair=lambda prompt, text: ([*map(ord, prompt + text)], len(prompt)), parse_special=False
    )
    pair = SimpleNamespace(where="a", prompt="q", chosen=answer, rejected="c", tools=None)
    (ids, counted, stop), _ = TextEncoder(tokenizer, None, pairs=True)._pair(pair)
    assert (ids.count(eod), ids[-1], stop) == (ends, eod, eod) and counted[0] == 0 and all(counted[1:])


# ---- preferences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("margin", [-1.0, 0.0, 2.0])
def test_a_preference_counts_as_learned_if_the_chosen_answer_has_more(margin, smoothing):
    """Not if both have as much. The loss is that of conservative DPO (arXiv:2305.18290, with label smoothing)."""
    sides = torch.tensor([[1.0], [-1.0]])
    model = SimpleNamespace(overlap=False, tp=None, cp=SimpleNamespace(size=1), beta=1.0, smoothing=smoothing)
    model._sides = lambda batch: (sides, torch.ones(1))
    # Log p of the chosen answer is larger by it
    model._token_losses = lambda x, batch: torch.tensor([[-margin], [0.0]])
    model._reference = lambda batch, sides: torch.zeros(2, 1)
    model._summed = lambda values: values.sum(0)
    model.counted = lambda x, batch: (None, None, None)
    slopes = []
    model.cross_entropy = lambda rows, labels, weights: slopes.append(weights) or (torch.zeros(()),)
    found = PairComparison.losses(model, None, None)
    p = 1 / (1 + math.exp(-margin))
    wanted = -(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p)
    assert found[DPO_LOSS].item() == pytest.approx(wanted)
    assert found["rewards/accuracies"].item() == float(margin > 0)
    assert found["rewards/margins"].item() == pytest.approx(margin)
    slope = (1 - smoothing) * (1 - p) - smoothing * p  # of the loss, downwards
    assert slopes[0].tolist() == pytest.approx([slope, -slope])


SIDES = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -1.0], [-1.0, -1.0]])  # [s, b]
GAPS = torch.tensor([[0.5, 9.0], [-1.5, 0.25], [9.0, -0.5], [0.75, 2.0]])  # log r - log p of each token


def compared(rank: int, ranks: int) -> dict[str, float]:
    """The sums of two pairs of which a rank has some rows."""
    model = SimpleNamespace(overlap=False, tp=None, cp=Mesh(rank, cp=ranks).cp, beta=0.5, smoothing=0.1)
    own = lambda x: x.chunk(ranks)[rank]
    model._summed = lambda values: PairComparison._summed(model, values)
    model._sides = lambda batch: (own(SIDES), torch.ones(2))
    model._token_losses = lambda x, batch: own(GAPS)
    model._reference = lambda batch, sides: torch.zeros_like(sides)
    model.counted = lambda x, batch: (None, None, None)
    model.cross_entropy = lambda rows, labels, weights: ((own(GAPS).flatten() * weights).sum(),)
    return {name: value.item() for name, value in PairComparison.losses(model, None, None).items()}


def test_ranks_with_rows_of_the_same_pairs_add_up_to_one(run_ranks):
    """Each pair is counted once, and its loss and rewards are those of all its rows, by hand."""
    both, alone = run_ranks(2, compared, 2), compared(0, 1)
    rewards = [[-0.5 * (GAPS * (SIDES == side))[:, pair].sum().item() for side in (1, -1)] for pair in range(2)]
    margins = [chosen - rejected for chosen, rejected in rewards]
    loss = sum(0.9 * math.log1p(math.exp(-one)) + 0.1 * math.log1p(math.exp(one)) for one in margins)
    assert alone == pytest.approx({name: sum(one[name] for one in both) for name in alone})
    assert (alone[DPO_LOSS], alone[TOKENS]) == (pytest.approx(loss), 2)
    assert alone["rewards/margins"] == pytest.approx(sum(margins))


# ---- metrics, labels, patterns ------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9))
@example([(0, 1)])
@example([(2, 0), (0, 0)])  # a class that is predicted alone
def test_metrics_of_classes_are_those_of_counting(rows):
    predicted, gold = zip(*rows, strict=True)
    each = []
    for one in set(predicted) | set(gold):
        hits = sum(p == g == one for p, g in rows)
        each.append(2 * hits / (predicted.count(one) + gold.count(one)))
    assert metrics.macro_f1(predicted, gold, 4) == pytest.approx(sum(each) / len(each))
    assert metrics.accuracy(predicted, gold, 4) == pytest.approx(sum(p == g for p, g in rows) / len(rows))


@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2)), min_size=1, max_size=6))
@example([(1, 2)])
@example([(1, 2), (2, 1)])
@example([(1, 1), (1, 2), (2, 2), (2, 2)])  # equal values share a rank
def test_correlations_are_those_of_pairs_of_values(rows):
    """By definition: of deviations from the mean, and of ranks, which count smaller and equal values."""

    def plain(x, y):
        x, y = ([one - sum(values) / len(values) for one in values] for values in (x, y))
        spread = math.sqrt(sum(one * one for one in x) * sum(one * one for one in y))
        return sum(a * b for a, b in zip(x, y, strict=True)) / spread if spread > 1e-12 else 0.0

    def ranks(values):
        return [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]

    x, y = zip(*rows, strict=True)
    assert metrics.pearson(x, y) == pytest.approx(plain(x, y), abs=1e-9)
    assert metrics.spearman(x, y) == pytest.approx(plain(ranks(x), ranks(y)), abs=1e-9)


def soft(tmp_path, name: str, labels: str, *rows) -> str:
    lines = ["\t".join(("index", *labels)), *("\t".join(map(str, (number, *row))) for number, row in enumerate(rows))]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return str(tmp_path / name)


def test_soft_labels_are_the_mean_of_files_in_the_order_of_the_tasks_labels(tmp_path):
    """Probabilities may be 0 and 1."""
    task = SimpleNamespace(regression=False, name="t", labels=("a", "b", "c"))
    rows = tuple(TaskExample("x", None, 0, str(number)) for number in range(2))
    one = soft(tmp_path, "one.tsv", "cab", (0.5, 0.25, 0.25), (0, 1, 0))
    other = soft(tmp_path, "other.tsv", "bca", (0.5, 0.25, 0.25), (0.5, 0.5, 0))
    found = with_soft_labels(Examples(rows, {"": range(2)}), [one, other], task)
    assert [row.shares for row in found.rows] == [(0.25, 0.375, 0.375), (0.5, 0.25, 0.25)]
    for wrong in ((1.001, -0.001, 0), (0.5, 0.4, 0.0001)):
        with pytest.raises(DataError, match="probabilities"):
            with_soft_labels(Examples(rows[:1], {"": range(1)}), [soft(tmp_path, "wrong.tsv", "abc", wrong)], task)


@pytest.mark.parametrize(
    "row, good", [("0.34 0.34 0.34 0 0", True), ("0.35 0.34 0.34 0 0", False), ("0.4 0.4 0.3 0 0", True)]
)
def test_probabilities_may_miss_1_by_what_their_decimals_round(row, good, tmp_path):
    """Five numbers, each off by half of its last decimal at most: 0.025 together, and 0.25 with one decimal."""
    task = SimpleNamespace(regression=False, name="t", labels=tuple("abcde"))
    examples = Examples((TaskExample("x", None, 0, "0"),), {"": range(1)})
    path = soft(tmp_path, "one.tsv", "abcde", row.split())
    if good:
        [found] = with_soft_labels(examples, [path], task).rows
        whole = sum(map(float, row.split()))
        assert found.shares == pytest.approx([float(word) / whole for word in row.split()])
    else:
        with pytest.raises(DataError, match="line 2: the probabilities add up to 1.03"):
            with_soft_labels(examples, [path], task)


@pytest.mark.parametrize("words, good", [(3, True), (4, True), (5, False)])
def test_words_of_a_label_that_just_fit_a_decoder(words, good):
    cloze = T5Cloze(9, bos=0, sentinel=1, target=5)
    if good:
        cloze.check(words)
    else:
        with pytest.raises(DataError, match="--decoder-seq-length 6"):
            cloze.check(words)


@pytest.mark.parametrize("length", range(6, 12))
def test_a_pattern_keeps_the_words_around_and_a_token_of_each_text_at_least(length):
    """Each letter is a token. The words are two, and two are reserved for the label."""
    pattern = Pattern.of("{text},{pair}:{label}", True)
    example, encode = TaskExample("abcdefgh", "klmnopqr", None, ""), lambda text: [*map(ord, text)]
    if length < 2 + 2 + 2:
        with pytest.raises(DataError):
            pattern.parts(example, "Z", encode, length, 2)
        return
    pieces = dict(pattern.parts(example, "Z", encode, length, 2))
    room = length - 2 - 2  # the label counts as two tokens, though it has one
    assert (len(pieces["text"]), len(pieces["pair"])) == (room - room // 2, room // 2) and pieces["label"] == [ord("Z")]
    with pytest.raises(DataError, match="a sample has room for 5"):
        pattern.parts(example, "Z", encode, 5, 2)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_labels_of_as_many_tokens_as_a_model_predicts(most):
    pattern, labels = Pattern.of("{text}{label}", False), dict(yes=[1, 2], no=[3, 4])
    cloze = SimpleNamespace(gap=True, label_tokens=most)
    if most >= 2:
        refuse_unequal(pattern, labels, cloze)
    else:
        with pytest.raises(DataError, match="predicts at most 1"):
            refuse_unequal(pattern, labels, cloze)
    with pytest.raises(DataError, match="2 and 1 tokens"):
        refuse_unequal(pattern, dict(yes=[1, 2], no=[3]), SimpleNamespace(gap=True, label_tokens=9))


@pytest.mark.parametrize(
    "labels, counts", [((0, 1), True), ((0, None), False), ((None, None), False), ((None, 1), False)]
)
def test_a_set_is_judged_if_all_its_labels_are_known(labels, counts):
    rows = tuple(TaskExample("x", None, label, "") for label in labels)
    task = SimpleNamespace(metrics=("accuracy",), regression=False, labels=("a", "b"), options=None, outputs=2)
    measures = SimpleNamespace(task=task, classes=2, folder=None)
    found = TaskMeasures.judged(measures, np.eye(2), Examples(rows, {"": range(2)}), "test", False, 0)
    assert found == ({"accuracy": 1.0} if counts else {})


@pytest.mark.parametrize("kind", ["task", "spans", "pattern"])
def test_made_up_samples_of_each_seed_split_and_number_are_their_own(kind):
    task, reader = (
        SimpleNamespace(options=None, outputs=3, regression=False, labels="abc"),
        BertReader(40, cls=1, sep=2),
    )

    def text(seed: int, split: int, index: int) -> tuple:
        if kind == "pattern":
            made = MockPatterns(9, BertCloze(40, cls=1, sep=2, mask=3), 1000, seed, split, task)
        elif kind == "spans":
            made = MockSpanSamples(9, reader, 1000, seed, split)
        else:
            made = MockTaskSamples(9, task, reader, 1000, seed, split)
        return tuple(made[index]["text"].tolist())

    places = list(itertools.product((1, 2), (0, 1, 2), (0, 1)))
    assert len({text(*place) for place in places}) == len(places) and text(*places[3]) == text(*places[3])


@pytest.mark.parametrize("loss, soft", [("labels", False), ("labels", True), ("words", False)])
def test_samples_of_patterns_are_those_of_their_loss(loss, soft, tmp_path):
    """By letters: a gap and the words of all labels, or in training the words of the right one, else of each label."""
    (tmp_path / "task.yaml").write_text("train: t.tsv\ntext: a\nlabel: b\nlabels: [x, y]\n")
    (tmp_path / "words.json").write_text(json.dumps(dict(x="p", y="q")))
    own = TaskSettings(task=str(tmp_path / "task.yaml"), pet_pattern="{text}{label}", pet_loss=loss)
    own = replace(own, pet_verbalizer=str(tmp_path / "words.json"), soft_labels=["a.tsv"] if soft else None)
    letters = SimpleNamespace(encode=lambda text: [*map(ord, text)], decode=lambda ids: "".join(map(chr, ids)))
    rows = tuple(TaskExample(text, None, label, "", shares=(0.25, 0.75)) for text, label in (("ab", 1), ("c", 0)))
    examples, told = Examples(rows, {"": range(2)}), []
    given = dict(train=examples, valid=examples, test=None)
    train, valid, test = pet_datasets(own, given, letters, CausalCloze(6, 0), told.append)
    assert test is None and told == [" > the first example as text: 'abp'"]
    assert (getattr(train, "whole", False), valid.whole) == (False, True)
    read = lambda sample: (ends := np.flatnonzero(sample[LOSS_MASK]), letters.decode(sample[LABELS][ends]))[1]
    if loss == "words":
        assert [read(one) for one in (train[0], train[1])] == ["q", "p"] and len(train) == 2
        assert [read(valid[n]) for n in range(len(valid))] == ["p", "q", "p", "q"]
        return
    for samples in (train, valid):
        assert [(one[classifier.GAP], one[LABELS]) for one in (samples[0], samples[1])] == [(2, 1), (1, 0)]
        assert samples[0][classifier.CHOICES].tolist() == [ord("p") + 1, ord("q") + 1]
        assert ("shares" in samples[0]) == soft and (not soft or samples[0]["shares"].tolist() == [0.25, 0.75])


def test_words_of_labels_are_judged_by_their_sums():
    """The loss is over the tokens of the right labels' words, of examples with a label."""
    rows = tuple(TaskExample("x", None, label, "") for label in (1, None, 0))
    samples = PetRequests(Examples(rows, {"": range(3)}), None, ["a", "b"], None, None)
    measures = PetMeasures.__new__(PetMeasures)
    measures.task = SimpleNamespace(metrics=("accuracy",), regression=False, labels=("a", "b"), options=None)
    measures.folder = None
    log_p = [[-3.0, -1.0], [-1.0, -2.0], [-5.0, -4.0]]  # of each example with each label
    values = np.array([[[one, 2 + label] for label, one in enumerate(row)] for row in log_p]).reshape(6, 2)
    found = measures.figures(values, samples, "validation", False, 0)
    assert found == {LM_LOSS: (1.0 + 5.0) / (3 + 2)}  # not all labels are known, so accuracy is not
    known = replace(samples, examples=Examples(rows[::2], {"": range(2)}))
    found = measures.figures(values[[0, 1, 4, 5]], known, "validation", False, 0)
    assert found == {LM_LOSS: (1.0 + 5.0) / (3 + 2), "accuracy": 0.5}
    batch = SimpleNamespace(loss_mask=torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    of_words = measures.values(batch, torch.tensor([[0.5, 9.0], [0.25, 2.0]]))
    assert of_words.tolist() == [[-0.75, 2.0], [-2.0, 1.0]]


@pytest.mark.parametrize("soft", [False, True])
def test_made_up_patterns_have_the_arrays_of_a_choice(soft):
    """With as many numbers, below their limits; without a task those of a loss over words."""
    config = SimpleNamespace(model=SimpleNamespace(seq_length=12))
    task = SimpleNamespace(options=None, outputs=3, regression=False, labels="abc")
    for own, arrays in (
        (task, CausalCloze.choice_arrays(config, 50, task, soft)),
        (None, CausalCloze.arrays(config, 50)),
    ):
        for sample in (MockPatterns(20, CausalCloze(12), 50, 1, 0, own, soft)[n] for n in range(20)):
            assert set(sample) == set(arrays)
            for name, array in arrays.items():
                values = np.asarray(sample[name])
                assert values.shape == ((array.length,) if array.length else ())
                assert array.below is None or 0 <= values.min() <= values.max() < array.below
            assert own is None or not soft or sample["shares"].tolist() == np.eye(3)[sample[LABELS]].tolist()


READERS = {
    "GPT": CausalReader(9, end=0),
    "GPT with a begin": CausalReader(9, end=0, prefix=(7, 8)),
    "BERT": BertReader(9, cls=1, sep=2),
    "T5": T5Reader(9, bos=1, eos=2),
}


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("kind", READERS)
def test_texts_that_have_just_room_fill_a_sample(kind, pair):
    """With what is around them. A second text begins where it is said."""
    reader, first = READERS[kind], [3, 4]
    second = [5] * (reader.room(pair) - 2) if pair else None
    text = first if pair else [3, 4, *[5] * (reader.room(False) - 2)]
    arrays = reader.read(text, second)
    ids = next(iter(arrays.values())).tolist()
    ends = {"GPT": [0], "BERT": [2], "T5": [2]}[kind.split()[0]]
    begin = {"GPT": [], "GPT with a begin": [7, 8], "BERT": [1], "T5": []}[kind]
    assert ids == [*begin, *first, *ends * pair, *[5] * (reader.room(pair) - 2), *ends * (kind in ("BERT", "T5"))]
    assert len(ids) == 9 and (
        kind == "T5" or not pair or ids[reader.pair_place(2)] == 5 != ids[reader.pair_place(2) - 1]
    )


@pytest.mark.parametrize("words", [[6], [6, 7]])
def test_words_in_a_gap_are_read_and_written_as_each_model_does(words):
    parts = [("text", [3, 4]), ("label", words), ("", [5])]
    padded = lambda *ids, size=8: [*ids, *[0] * (size - len(ids))]
    n = len(words)
    of_bert = BertCloze(8, cls=1, sep=2, mask=9)._named(parts)
    assert {name: array.tolist() for name, array in of_bert.items()} == {
        "text": padded(1, 3, 4, *[9] * n, 5, 2),
        "types": padded(),
        "labels": padded(0, 0, 0, *words),
        "loss_mask": padded(0, 0, 0, *[1] * n),
        "padding_mask": padded(*[1] * (5 + n)),
    }
    of_t5 = T5Cloze(8, bos=1, sentinel=9, target=4)._named(parts)
    assert {name: array.tolist() for name, array in of_t5.items()} == {
        "text_enc": padded(3, 4, 9, 5),
        "text_dec": padded(*[1, 9, *words[:-1]], size=4),  # each predicts the next one
        "labels": padded(9, *words, size=4),
        "loss_mask": padded(0, *[1] * n, size=4),  # the sentinel is known
        "enc_mask": padded(1, 1, 1, 1),
        "dec_mask": padded(*[1] * (1 + n), size=4),
    }


def test_the_limit_of_lengths_is_that_of_a_full_sample():
    config = SimpleNamespace(model=SimpleNamespace(seq_length=7))
    assert CausalReader.arrays(config, 9)[LENGTHS].below == 1 + CausalReader(7).read([1] * 7, None)[LENGTHS]


@pytest.mark.parametrize("label", [None, 0, 2])
@pytest.mark.parametrize("shares", [None, (0.25, 0.5, 0.25)])
@pytest.mark.parametrize("kind", ["classes", "soft", "number"])
def test_the_target_of_a_sample_is_its_label_if_it_has_one(kind, shares, label):
    """A number has a positive and a negative part. Without a label a sample does not count."""
    task = SimpleNamespace(regression=kind == "number", outputs=1 if kind == "number" else 3)
    label = label if label is None or kind != "number" else label - 1.5
    found = wanted(task, label, shares, kind == "soft")
    assert found[LOSS_MASK] == float(label is not None or shares is not None)
    if kind == "number":
        assert (found[LABELS], found["above"] - found["below"]) == (0, label or 0)
        assert min(found["above"], found["below"]) == 0 <= max(found["above"], found["below"])
    else:
        assert found[LABELS] == (label or 0)
    if kind == "soft":
        assert found["shares"].tolist() == list(shares or np.eye(3)[label or 0])


@pytest.mark.parametrize("task", ["chat", "dpo"])
def test_the_log_counts_what_is_learned(task, monkeypatch):
    """Conversations and the samples they fill, or pairs. What ends answers is said of the training texts alone."""
    own = lambda split, config, *_: encoded([[1]] * 4, dict(train=[7] * 4, valid=[8] * 4)[split])
    rows = dict(train=[[0, 1], [2, 3]], valid=[[0, 1]])

    def samples(config, tokenizer, split, log):
        if split == "test":
            return None, []
        return ChatSamples(own(split, config), ["a.jsonl"], rows[split], None, 4, 0, True), [f"of {split}"]

    template = SimpleNamespace(missing=["<a>", "<b>"], special={"<end>": 7}, tokenizer=None)
    monkeypatch.setattr(chat, "samples_of", samples)
    monkeypatch.setattr(chat, "template_of", lambda config, tokenizer: template)
    config, told = SimpleNamespace(extra={chat.GROUP: SimpleNamespace(task=task)}), []
    made = chat.build_datasets(config, object(), 9, (2, 1, 0), told.append)
    what = dict(chat=("4 conversations in 2 samples", "2 conversations in 1 samples"), dpo=("2 pairs", "1 pairs"))[task]
    lines = [f" > {split}: {words} (a.jsonl)" for split, words in zip(rows, what, strict=True)]
    missing = "note: the chat template writes <a>, <b>, no special tokens of the vocabulary: they are ordinary text"
    assert told == [missing, lines[0], "note: of train", lines[1], "note: of valid"]
    assert made[2] is None and [one.rows for one in made[:2]] == list(rows.values())
    monkeypatch.setattr(chat, "build_tokenizer", lambda settings, log: settings)
    assert chat.epoch_samples(SimpleNamespace(tokenizer=9, extra=config.extra)) == 2  # of training


@pytest.mark.parametrize("pair", [None, "xy"])
def test_texts_are_cut_that_are_longer_than_a_sample_with_their_longest_option(pair):
    letters, reader = SimpleNamespace(encode=lambda text: [*map(ord, text)]), BertReader(9, cls=1, sep=2)
    lengths = [[1, 2], [2, 9], [9, 2], [4, 4], [5, 1], [1, 5], [1, 6], [3, 1]]
    examples = [TaskExample("_", pair, 0, "", options=("a" * one, "b" * other)) for one, other in lengths]
    room = 9 - 2 if pair is None else 9 - 3 - 2
    wanted = [max(each) > room for each in lengths]
    for most in (3, 8):
        samples = TaskSamples(Examples(tuple(examples), {"": range(8)}), None, letters, reader)
        assert longest_cut(samples, most) == sum(wanted[:most])


@pytest.mark.parametrize("kind", ["classes", "spans"])
@pytest.mark.parametrize("final, rank, folder", list(itertools.product((True, False), (0, 1), (True, False))))
def test_the_first_rank_writes_predictions_at_the_end(kind, final, rank, folder, tmp_path):
    rows = tuple(TaskExample("q", "t", 0, str(number), gold=("a",)) for number in range(2))
    task = SimpleNamespace(
        name="t", metrics=("accuracy",), regression=False, labels=("a", "b"), options=None, outputs=2, one_answer=False
    )
    of = SpanMeasures if kind == "spans" else TaskMeasures
    measures = of.__new__(of)
    task.answers, measures.task, measures.folder = {}, task, str(tmp_path / "out") if folder else None
    dataset = SimpleNamespace(examples=Examples(rows, {"": range(2)}), answers=lambda values: ["a", "x"])
    measures.figures(np.eye(2), dataset, "test", final, rank)
    assert (tmp_path / "out" / "t.tsv").exists() == (final and rank == 0 and folder)


@pytest.mark.parametrize("golds, counts", [(("a", "b"), True), (("a", None), False), ((None, "b"), False)])
def test_answers_are_judged_if_all_of_a_set_are_known(golds, counts):
    rows = tuple(TaskExample("q", "t", None, "", gold=(gold,) if gold else ()) for gold in golds)
    dataset = SimpleNamespace(examples=Examples(rows, {"": range(2)}), answers=lambda values: ["a", "x"])
    found = SpanMeasures.figures(SimpleNamespace(folder=None), None, dataset, "test", False, 0)
    assert found == ({"f1": 0.5, "em": 0.5, "f1 and em": 0.5} if counts else {})


@pytest.mark.parametrize(
    "task, anew, wanted", [("dpo", False, "first"), ("dpo", True, "here"), ("chat", False, "here")]
)
def test_the_reference_of_a_run_is_what_it_begins_or_has_begun_with(task, anew, wanted, monkeypatch):
    """--finetune begins another run with the weights of one that has ended."""
    extra = {chat.GROUP: dict(task=task, reference_load="first")}
    record = dict(config=dict(model=dict(model_type=chat.MODEL_TYPE), extra=extra))
    monkeypatch.setattr(chat, "saved_record", lambda load, step: (load, record))
    assert chat._reference(record, dict(finetune=anew), "here") == wanted


@pytest.mark.parametrize("published", [False, True])
def test_the_right_option_is_named_by_its_place_or_in_a_file_of_ones_own_by_itself(published):
    task = SimpleNamespace(labels=("A", "B", "C"), split=published or None)
    place = lambda label, *options, strict=True: place_of(task, label, options, "here", strict)
    assert place("B", "x", "y") == "B" and place("y", "x", "y", strict=False) == ("" if published else "B")
    for wrong in ("C", "z", *["y"] * published):  # the third place is not there
        with pytest.raises(DataError, match="none of 2 options"):
            place(wrong, "x", "y")
        assert place(wrong, "x", "y", strict=False) == ""
    if not published:  # an option that is the name of another place
        with pytest.raises(DataError, match="the option in another place"):
            place("A", "x", "A")
    assert place("A", "A", "x") == "A"


@pytest.mark.parametrize(
    "text, filled", [("", "{}"), ("who?", "who? {}"), ("a _ b", "a {} b"), ("a ___", "a {}"), ("_ and _", "{} and {}")]
)
def test_an_option_stands_in_the_gaps_or_after_the_text(text, filled):
    found = with_options(TaskExample(text, "pair", 0, "", options=("x", "y z")))
    assert [one.text for one in found] == [filled.replace("{}", "x"), filled.replace("{}", "y z")]
    assert with_options(TaskExample(text, None, 0, ""))[0].text == text


# ---- scores of samples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [1, 2, 3])
def test_each_option_becomes_a_sample_with_a_dropout_of_its_own(options):
    """Its number is that of no other option of any sample. Texts and lengths are those of the options one by one."""
    s, samples = 5, [0, 1, 2, 7]
    texts = torch.arange(s * options * 4).view(options * s, 4)
    lengths = torch.arange(options * 4).view(options, 4) if options > 1 else torch.arange(4)
    arrays = {"tokens": texts, LENGTHS: lengths, LABELS: torch.arange(4), LOSS_MASK: torch.ones(4)}
    found = classifier.with_options_apart(named_batch(arrays, torch.tensor(samples)), options)
    assert len(set(found.samples.tolist())) == 4 * options and torch.equal(found.labels, torch.arange(4))
    for column, (sample, option) in enumerate(itertools.product(range(4), range(options))):
        assert torch.equal(found.arrays["tokens"][:, column], texts[option * s : (option + 1) * s, sample])
        assert found.arrays[LENGTHS][column] == lengths.view(options, 4)[option, sample]
        assert found.samples[column] == samples[sample] * options + option


@settings(max_examples=20)
@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4))
def test_states_and_weights_of_texts_are_those_of_a_plain_loop(samples):
    """Texts of these lengths, some as long as a row; samples have one to three options each."""
    s, most, texts = 5, max(map(len, samples)), []
    for sample in samples:
        texts += sample + [1] * (most - len(sample))  # a missing option has a token, and counts nothing
    arrays = {LENGTHS: torch.tensor(texts), OPTIONS: torch.tensor([len(sample) for sample in samples])}
    tokens = torch.zeros(s, len(texts), dtype=torch.long)
    batch = SimpleNamespace(arrays=arrays, tokens=tokens, loss_mask=torch.ones(len(samples)))
    x = torch.arange(s * len(texts) * 2.0).view(s, len(texts), 2).square()
    mean = classifier.averaged(x, classifier.text_mask(batch), Mesh().tp, cut=False)
    last = classifier.pooled(x, arrays[LENGTHS] - 1, Mesh().tp, cut=False)
    weights = classifier.token_weights(batch)
    for n, length in enumerate(texts):
        torch.testing.assert_close(mean[n], x[:length, n].mean(0))
        assert torch.equal(last[n], x[length - 1, n])
        options = len(samples[n // most])
        wanted = 1 / length / options if n % most < options else 0.0
        assert weights[:, n].tolist() == pytest.approx([wanted] * length + [0.0] * (s - length))


# ---- lengths and folders of runs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, size", list(itertools.product(range(1, 10), range(1, 5))))
def test_lengths_become_the_next_multiple(number, size):
    assert backbones.multiple_above(number, size) == next(n for n in range(number, 99) if n % size == 0)


@pytest.mark.parametrize("b, h, c, element", [(1, 8, 2, 4), (3, 5, 7, 2)])
def test_bytes_of_the_loss_of_scores(b, h, c, element):
    """States and scores are fp32 in the loss; a stage sends states in the format of the run."""
    facts = backbones._scoring(Facts)
    own = SimpleNamespace(settings=SimpleNamespace(hidden_size=h), num_outputs=c, label_tokens=3)
    own.state_bytes = lambda share: facts.state_bytes(own, share)
    states, scores = torch.zeros(b, h), torch.zeros(b, c)
    share = SimpleNamespace(micro_batch_size=b, element=element, sp=False)
    assert facts.loss_saved_bytes(own, share) == states.nbytes + scores.nbytes
    assert facts.loss_workspace(own, share) == 2 * scores.nbytes
    assert own.state_bytes(share) == b * h * element
    sums = backbones._choosing(Facts).score_sums
    sizes = 3 * b * h * element, 3 * scores.nbytes  # of each token of a label
    assert sums(own, share) == sizes
    assert sums(own, SimpleNamespace(**vars(share) | dict(sp=True))) == (*sizes, sizes[0])


@pytest.mark.parametrize("given", [None, 2])
def test_a_task_may_say_how_often_it_is_evaluated(given, tmp_path):
    words = "" if given is None else f"settings: {{eval_epoch: {given}}}\n"
    (tmp_path / "own.yaml").write_text(f"train: t.tsv\ntext: a\nlabel: b\n{words}")
    said = dict(task=str(tmp_path / "own.yaml"), num_layers=1)
    found = finetune_start.defaults({name: SimpleNamespace(value=value, words="") for name, value in said.items()})
    assert found["eval_epoch"] == given or (given is None and found["eval_epoch"] == 1)


@pytest.mark.parametrize("count, names", [(1, [""]), (2, ["matched", "mismatched"]), (3, ["a", "b", "c"])])
def test_as_many_files_as_a_task_has_sets_are_these_sets(count, names, tmp_path):
    """Other ones have the names of their files, and a single one has none."""
    files = [str(tmp_path / f"{name}.tsv") for name in "abc"[:count]]
    for file in files:
        Path(file).touch()
    task = SimpleNamespace(valid=dict(matched=("m",), mismatched=("n",)), train={}, test={}, home=None)
    found = kept_settings._files(task, TaskSettings(task="t", valid_data=files), "valid")
    assert found == tuple(zip(names, map(Path, files), strict=True))


def test_labels_that_are_numbers_are_in_the_order_of_their_values(tmp_path):
    """Ahead of words, which are in theirs."""
    words = ["10", "b", "9", "-1.5", "a", "2", "10", ""]
    (tmp_path / "t.tsv").write_text("\n".join(["text\tlabel", *(f"x\t{word}" for word in words)]))
    (tmp_path / "own.yaml").write_text("train: t.tsv\ntext: text\nlabel: label\n")
    own = TaskSettings(task=str(tmp_path / "own.yaml"), task_data=str(tmp_path))
    assert kept_settings.open_task(own).task.labels == ("-1.5", "2", "9", "10", "a", "b")


@pytest.mark.parametrize("there", list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("given", [None, ["own.jsonl"]])
def test_conversations_in_a_folder(given, there, tmp_path):
    """Its files, if none are given for a split; without a training file its other files, or an error."""
    train, valid = there
    for name, so in (("train", train), ("valid", valid)):
        if so:
            (tmp_path / f"{name}.jsonl").touch()
    settings = SimpleNamespace(train_data=given, valid_data=None, test_data=None)
    wanted = dict(valid_data=[str(tmp_path / "valid.jsonl")]) if valid else {}
    if train or given:
        wanted |= {} if given else dict(train_data=[str(tmp_path / "train.jsonl")])
        assert chat._files_of([str(tmp_path)], settings) == wanted
    else:
        with pytest.raises(DataError, match="has no train.jsonl"):
            chat._files_of([str(tmp_path)], settings)
    (tmp_path / "a.parquet").touch()
    found = chat._files_of([str(tmp_path)], settings)
    assert found == wanted | ({} if train or given else dict(train_data=[str(tmp_path)]))


@pytest.mark.parametrize("positions", ["learned_absolute", "rope"])
@pytest.mark.parametrize("asked", [None, 63, 64, 65])
def test_samples_are_no_longer_than_a_table_of_positions(asked, positions):
    model = dict(max_position_embeddings=64, position_embedding_type=positions)
    found = finetune_start._from_checkpoint(dict(config=dict(model=model), vocab_size=9), {}.get, asked)
    longest = asked and (min(asked, 64) if positions == "learned_absolute" else asked)
    assert found.get("seq_length") == longest and found["backbone"] == "GPT"


@pytest.mark.parametrize(
    "given, save, folder",
    [
        ("p", "s", "p"),
        (None, "s", "s/predictions"),
        (None, "s3://b/s", None),
        ("p", "s3://b/s", "p"),
        (None, None, None),
    ],
)
def test_predictions_are_where_the_user_says_or_below_a_folder_of_this_machine(given, save, folder):
    assert predictions_folder(given, save) == folder


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
def test_the_score_of_a_label_is_the_sum_over_its_tokens(cap, bias):
    """Each token at its own place from the gap on, also up to the last row; a label of one token has one logit."""
    draw = torch.Generator().manual_seed(1)
    x, weight = torch.randn(6, 3, 4, generator=draw), torch.randn(9, 4, generator=draw)
    labels, gaps = [[3, 8], [0], [5, 5]], [0, 2, 4]
    choices = torch.from_numpy(choices_of(labels, 2)).unsqueeze(1).expand(-1, 3)
    label_chooser = classifier.label_chooser_of(torch.nn.Module, 2)
    model = SimpleNamespace(tp=Mesh().tp, cut=False, word_states=lambda x: x, output_weight=weight, softcap=cap)
    model.output_bias = torch.arange(9.0) if bias else None
    model._logits = lambda *given: label_chooser._logits(model, *given)
    arrays = {classifier.CHOICES: choices, classifier.GAP: torch.tensor(gaps)}
    found = label_chooser.scores(model, x, SimpleNamespace(arrays=arrays))
    for sample, gap in enumerate(gaps):
        for label, ids in enumerate(labels):
            logits = [x[gap + place, sample] @ weight[id] + id * bias for place, id in enumerate(ids)]
            wanted = sum(one if cap is None else cap * torch.tanh(one / cap) for one in logits)
            torch.testing.assert_close(found[sample, label], wanted)


def test_the_loss_of_a_sample_is_that_of_its_kind_of_target():
    """Cross-entropy with a class, or with probabilities; of a number the square; of a piece the mean over both ends."""
    scores = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    log_p = (scores.exp() / scores.exp().sum(1, keepdim=True)).log()
    batch = SimpleNamespace(arrays={}, labels=torch.tensor([1, 0]))
    assert classifier.losses_of(scores, batch).tolist() == pytest.approx([-log_p[0, 1].item(), -log_p[1, 0].item()])
    shares = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.125, 0.875]])
    batch.arrays = {"shares": shares.T}
    assert classifier.losses_of(scores, batch).tolist() == pytest.approx((-(shares * log_p).sum(1)).tolist())
    numbers = SimpleNamespace(arrays=dict(above=torch.tensor([2.5, 0.0]), below=torch.tensor([0.0, 1.5])))
    assert classifier.losses_of(torch.tensor([[1.0], [1.0]]), numbers).tolist() == [2.25, 6.25]
    ends = SimpleNamespace(arrays={ENDS: torch.tensor([2, 2])}, labels=torch.tensor([1, 0]))
    both = torch.cat((scores, scores.flip(0)), 1)
    wanted = [-(log_p[0, 1] + log_p[1, 2]).item() / 2, -(log_p[1, 0] + log_p[0, 2]).item() / 2]
    found = classifier.span_finder_of(torch.nn.Module).losses(None, both, ends)
    assert found.tolist() == pytest.approx(wanted)


def test_scores_of_the_ends_of_a_piece_are_never_padding():
    x = torch.arange(4 * 2 * 2.0).view(4, 2, 2)
    lengths = [3, 4]
    batch = SimpleNamespace(arrays={LENGTHS: torch.tensor(lengths)}, tokens=torch.zeros(4, 2))
    found = classifier.span_finder_of(torch.nn.Module).scores(SimpleNamespace(head=lambda x: x, cut=False), x, batch)
    for text, length in enumerate(lengths):
        for end in range(2):
            wanted = [x[place, text, end].item() if place < length else classifier.NEVER for place in range(4)]
            assert found[text, 4 * end : 4 * end + 4].tolist() == wanted


@pytest.mark.parametrize("named", [None, "own"])
@pytest.mark.parametrize("moved", [False, True])
def test_pictures_of_a_run_are_where_it_wrote_them_or_where_it_is_now(named, moved, tmp_path):
    """In the order of their names; a run that was moved has them below its folder."""
    place, first = tmp_path / "now", tmp_path / "before" / (named or "save/predictions")
    folder = place / "predictions" if moved else first
    for path in (folder, place / "predictions"):
        path.mkdir(parents=True, exist_ok=True)
    for name in ("b", "c", "a"):
        (folder / f"confusion-{name}.png").touch()
    (place / "predictions" / "confusion-z.png").touch()
    config = dict(extra={kept_settings.GROUP: dict(predictions=named)}, checkpoint=dict(save="save"))
    found = kept_settings.confusion_pictures(dict(config=config, folder=str(tmp_path / "before")), place)
    assert [path.parent for path in found] == [folder] * len(found)
    assert [path.stem[-1] for path in found] == (["a", "b", "c", "z"] if moved else ["a", "b", "c"])
    assert kept_settings.confusion_pictures(dict(config={}), place) == []


@pytest.mark.parametrize("windows, cut", [(2, 0), (3, 0), (3, 1)])
def test_the_log_says_what_questions_lose_and_that_a_text_has_several_windows(windows, cut, monkeypatch):
    class Samples(list):
        def __init__(self, examples, tokenizer, reader, whole):
            super().__init__(range(windows if whole else 2))
            self.examples, self.longest_question, self.whole = examples, 7, whole
            self.questions_cut = lambda most: cut

    monkeypatch.setattr(spans, "SpanSamples", Samples)
    examples, told = SimpleNamespace(rows=[0, 0]), []
    reader = SimpleNamespace(length=9)
    made = finetune.span_datasets(dict(train=examples, valid=examples, test=None), None, reader, told.append)
    assert [one and one.whole for one in made] == [False, True, None]
    lines = [
        f" > {split}: {cut} of 2 questions are longer than 7 tokens and lose their end" for split in ("train", "valid")
    ]
    wanted = lines * bool(cut)
    assert told == wanted + [f" > 2 questions of validation have {windows} windows of 9 tokens"] * (windows > 2)


@pytest.mark.parametrize("kinds", [0, 1, 2, 3])
def test_types_of_tokens_are_those_that_a_bert_has(kinds):
    """The second text's tokens have type 1, if there are two types."""
    found = BertReader(9, cls=1, sep=2, kinds=kinds).read([3, 4], [5])
    assert found["types"].tolist() == [0, 0, 0, 0, *[int(kinds > 1)] * 2, 0, 0, 0]
    config = SimpleNamespace(model=SimpleNamespace(seq_length=9), extra={BERT: SimpleNamespace(num_tokentypes=kinds)})
    assert BertReader.arrays(config, 50)["types"].below == BertCloze.arrays(config, 50)["types"].below == max(2, kinds)


@pytest.mark.parametrize("training", [True, False])
def test_a_sample_without_a_label_has_no_loss_and_scores_are_collected_in_evaluations(training):
    collected, scores = [], torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.0, 0.5]])
    mask = torch.tensor([1.0, 0.0, 1.0])
    batch = SimpleNamespace(loss_mask=mask, num_tokens=mask.sum(), labels=torch.tensor([0, 1, 1]), arrays={})
    model = SimpleNamespace(last=True, training=training, collect=lambda batch, scores: collected.append(scores))
    model.read, model.region = lambda batch: batch, contextlib.nullcontext
    model.trunk, model.scores = lambda x, batch: (x, {"aux": 7.0}), lambda x, batch: scores
    model.losses = lambda scores, batch: classifier.losses_of(scores, batch)
    x, sums = classifier.scoring(torch.nn.Module).forward(model, None, batch)
    log_p = scores.log_softmax(1)
    assert x is None and sums["aux"] == 7.0 and sums["tokens"] == 2.0
    assert sums["loss"].item() == pytest.approx(-(log_p[0, 0] + log_p[2, 1]).item())
    assert [torch.equal(one, scores) for one in collected] == [True] * (not training)
    model.last = False
    assert classifier.scoring(torch.nn.Module).forward(model, "x", batch) == ("x", {"aux": 7.0})


@pytest.mark.parametrize("sizes", [(3, 1), (1, 3), (2, 2)])
def test_what_ends_answers_and_where_they_are_is_kept(sizes):
    """Of each text of each file: its last token, its file and its line."""
    answer = lambda n: [dict(role="user", content="q"), dict(role="assistant", content="a" * n)]
    files = ["x.jsonl", "y.jsonl"]
    texts = [SimpleNamespace(where=f"{file}, line {n + 1}", messages=answer(n), tools=None)
             for file, count in zip(files, sizes, strict=True) for n in range(count)]  # fmt: skip
    made = TextEncoder(Bytes(), template_of(Bytes()))._arrays(texts, files)
    assert made["places"].tolist() == [0] * sizes[0] + [1] * sizes[1]
    assert made["lines"].tolist() == [*range(1, sizes[0] + 1), *range(1, sizes[1] + 1)]
    assert made["stops"].tolist() == [EOD] * len(texts) and len(made["tokens"]) == made["ends"][-1]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), min_size=1, max_size=4))
@example([("a", "b"), ("b", "c")])  # the rejected answer of one is the chosen one of the next
def test_pairs_of_equal_answers_are_left_out(pairs):
    texts = [text for pair in pairs for text in pair]
    data = encoded([[0, 1]] * len(texts))
    tokens = np.array([[9, ord(text)] for text in texts], np.int32).flatten()
    data, used = replace(data, tokens=tokens), [n for n, (one, other) in enumerate(pairs) if one != other]
    if not used:
        with pytest.raises(DataError, match="no pair of answers"):
            pair_samples(data, ["a.jsonl"], 8, 0)
        return
    samples, notes = pair_samples(data, ["a.jsonl"], 8, 0)
    assert samples.rows == [[2 * n, 2 * n + 1] for n in used]
    assert said(notes, "have two equal answers") == len(pairs) - len(used)


@pytest.mark.parametrize("target, words", [(1, 1), (2, 1), (3, 2), (9, 2)])
def test_made_up_labels_have_room_in_a_decoder(target, words):
    for seed in range(20):
        arrays = T5Cloze(9, bos=1, sentinel=2, target=max(2, target)).made_up(np.random.default_rng(seed), 50)
        assert arrays[LOSS_MASK].sum() == words and arrays["enc_mask"].sum() >= 2


@pytest.mark.parametrize("given", [1, 2, 3, 4])
def test_missing_options_are_copies_of_the_first_one(given):
    parts = [{"ids": np.array([10 * n, 10 * n + 1]), "end": np.int64(n)} for n in range(given)]
    found = together(parts, SimpleNamespace(options=True, outputs=4))
    order = [*range(given), *[0] * (4 - given)]
    assert found["ids"].tolist() == [10 * n + at for n in order for at in (0, 1)]
    assert (found["end"].tolist(), found[OPTIONS]) == (order, given)


def test_tokens_of_a_pair_count_together_as_much_as_the_pair(monkeypatch):
    """In losses that balance experts: of both answers, not of the prompt; a pair that does not count has 0."""
    monkeypatch.setattr(dpo.GPT, "context", lambda model, batch: ForwardContext())
    documents = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1], [1, 2, 2]])
    mask = torch.tensor([[0.0, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]])
    batch = SimpleNamespace(document_ids=documents, labels=documents, loss_mask=mask)
    model = PairComparison.__new__(PairComparison)
    torch.nn.Module.__init__(model)
    model.cp = Mesh().cp
    for mixture in (True, False):
        model.facts = SimpleNamespace(settings=SimpleNamespace(mixture=mixture))
        found = PairComparison.context(model, batch).weights
        assert found.tolist() == (mask / mask.sum(0).clamp_min(1)).tolist() if mixture else found is None
    sides, counts = model._sides(batch)
    assert sides.T.tolist() == [[0, 1, -1, -1], [1, -1, 0, 0], [0, 0, 0, 0]] and counts.tolist() == [1, 1, 0]
    batch = SimpleNamespace(document_ids=None, labels=torch.zeros(5, 1), loss_mask=None)  # the halves of a text
    assert model._sides(batch)[0].flatten().tolist() == [1, 1, 1, -1, -1]


@pytest.mark.parametrize("pair", [None, [5, 6]])
@pytest.mark.parametrize("kind", READERS)
def test_hidden_words_are_replaced_and_what_is_around_them_is_not(kind, pair):
    reader, words = READERS[kind], {3, 4, 5, 6}
    arrays = reader.read_hidden([3, 4], pair, 77)
    ids = next(iter(reader.read([3, 4], pair).values())).tolist()
    assert arrays["hidden"].tolist() == [77 if id in words else id for id in ids]
    assert "hidden" not in reader.read_hidden([3, 4], pair, None)


HIDING = [(8, [9], 1, (8, 9, 1)), (None, [], 1, (1, 1, 1)), (None, [], None, (0, 0, 0))]


@pytest.mark.parametrize("mask, sentinels, eod, words", HIDING)
def test_the_token_that_hides_words(mask, sentinels, eod, words):
    """That of pretraining, else the end of document, else 0, as for made-up samples."""
    tokenizer = SimpleNamespace(special=dict(mask=mask).get, sentinels=sentinels, eod=eod)
    kinds = BertReader, T5Reader, CausalReader
    assert tuple(kind.hidden_word(tokenizer) for kind in kinds) == words
    assert [kind.hidden_word(None) for kind in kinds] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["classes", "options", "numbers"])
def test_files_beside_predictions(kind, tmp_path):
    """Probabilities of classes and options, a picture of classes whose labels are all known."""
    task = SimpleNamespace(name="t", metrics=(), labels=("a", "b"), outputs=2, one_answer=False, answers={})
    task.regression, task.options = kind == "numbers", "o" if kind == "options" else None
    measures = TaskMeasures.__new__(TaskMeasures)
    measures.task, measures.folder = task, str(tmp_path)
    scores = np.array([[0.5], [1.5]]) if kind == "numbers" else np.log([[0.25, 0.75], [0.5, 0.5]])
    rows = [TaskExample("q", None, label, str(n)) for n, label in enumerate((1, 0))]
    predicted = scores[:, 0] if kind == "numbers" else scores.argmax(1)
    measures._write(rows, scores, predicted, "test", "")
    words = ["0.5", "1.5"] if kind == "numbers" else ["b", "a"]
    assert (tmp_path / "t.tsv").read_text() == "index\tprediction\n" + "".join(
        f"{n}\t{w}\n" for n, w in enumerate(words)
    )
    shares = tmp_path / "t.probabilities.tsv"
    assert shares.exists() == (kind != "numbers")
    if kind != "numbers":
        assert shares.read_text().splitlines()[1] == "0\t0.250000\t0.750000"
    assert (tmp_path / "confusion-test.png").exists() <= (kind == "classes")


def test_rows_without_a_class_are_counted_in_a_note(tmp_path):
    (tmp_path / "t.tsv").write_text("text\tlabel\na\tx\nb\t-\nc\ty\nd\t-\n")
    (tmp_path / "own.yaml").write_text('train: t.tsv\ntext: text\nlabel: label\nlabels: [x, y]\nskip: ["-"]\n')
    examples = kept_settings.examples_of(TaskSettings(str(tmp_path / "own.yaml"), str(tmp_path)), "train")
    assert [row.text for row in examples.rows] == ["a", "c"] and [row.id for row in examples.rows] == ["0", "2"]
    assert any("2 of 4" in note for note in examples.notes), examples.notes


def test_files_of_conversations_that_are_named_twice_are_refused(tmp_path):
    """--data-path with files is --train-data; with several, too."""
    settings = SimpleNamespace(train_data=None, valid_data=None, test_data=None)
    for files in (["a.jsonl"], ["a.jsonl", str(tmp_path)]):
        assert chat._files_of(files, settings) == dict(train_data=files)
        with pytest.raises(SettingsError, match="--data-path a.jsonl and --train-data b both name what is learned"):
            chat._files_of(files, SimpleNamespace(**vars(settings) | dict(train_data=["b"])))


@pytest.mark.parametrize("pooling", [None, "first", "mean"])
@pytest.mark.parametrize("kind", ["GPT", "BERT", "T5"])
def test_settings_of_a_decoder_have_an_effect_where_there_is_one(kind, pooling):
    """In a T5 whose head does not see the mean of its encoder."""
    idle = backbones.trunk_idle(lambda s: s.kind, lambda s: s.pooling)
    for name in ("decoder_num_layers", "decoder_seq_length"):
        assert idle[name].met(SimpleNamespace(kind=kind, pooling=pooling)) == (kind == "T5" and pooling != "mean")
    assert "--backbone T5" in idle["decoder_seq_length"].words and "--pooling" in idle["decoder_seq_length"].words


@pytest.mark.parametrize("given", [None, ["0.5", "a", "b"]])
def test_training_data_that_cannot_be_asked_is_said_where_it_was_named(given):
    data = SimpleNamespace(data_path=["0.5", "a", "b"], train_data_path=None)
    found, notices = contaminated.training_contents(data, given)
    assert found is None and len(notices) == (given is not None)
    assert all("of evaluation sets is not known" in notice and "--train-data" in notice for notice in notices)
    assert contaminated.training_contents(SimpleNamespace(data_path=None, train_data_path=None), None) == (None, [])


@pytest.mark.parametrize(
    "files, names",
    [
        (("/a/x.tsv", "/a/y.tsv"), ["x", "y"]),
        (("/a/x.tsv", "/b/x.tsv"), ["a-x", "b-x"]),
        (("/a/x.tsv", "/b/x.tsv", "/b/y.tsv"), ["a-x", "b-x", "b-y"]),
        (("/x.tsv", "/b/x.tsv"), ["x", "b-x"]),
        (
            ("/a/x.tsv", "/c/a/x.tsv", "/b/c/a/x.tsv"),
            ["a-x", "c-a-x", "b-c-a-x"],
        ),  # up to the whole of the longest path
    ],
)
def test_sets_are_named_by_as_much_of_their_path_as_tells_them_apart(files, names):
    """Names become those of files: none has a slash."""
    for order in itertools.permutations(range(len(files))):
        assert kept_settings._names([Path(files[n]) for n in order], "valid") == [names[n] for n in order]
    with pytest.raises(SettingsError, match="--valid-data names one file twice, or .* ending alone"):
        kept_settings._names([Path(files[0]), Path(files[0]).with_suffix(".jsonl")], "valid")


@pytest.mark.parametrize("labels", ["ab", "abc"])
def test_files_of_probabilities_have_all_examples_of_the_training_data(labels, tmp_path):
    """In their order, and at least one: what differs is said with its line."""
    task, share = SimpleNamespace(regression=False, name="t", labels=tuple(labels)), 1 / len(labels)
    rows = tuple(TaskExample("x", None, 0, str(number)) for number in range(3))
    for count in (0, 1, 2, 4):
        path = soft(tmp_path, "few.tsv", labels, *[[share] * len(labels)] * count)
        with pytest.raises(DataError, match=f"few.tsv has {count} examples, and the training file 3"):
            with_soft_labels(Examples(rows, {"": range(3)}), [path], task)
    path = soft(tmp_path, "all.tsv", labels, *[[share] * len(labels)] * 3)
    with pytest.raises(DataError, match="all.tsv, line 3: example 1, where training has 2"):
        with_soft_labels(Examples((rows[0], rows[2], rows[1]), {"": range(3)}), [path], task)


# ---- samples of each kind of model ---------------------------------------------------------------------------------------


def test_arrays_of_readers_and_patterns_are_as_long_and_as_large_as_said():
    """Ids are of the vocabulary, masks 0 or 1, choices one more than ids, because 0 is padding."""
    config = SimpleNamespace(model=SimpleNamespace(seq_length=9), extra={BERT: SimpleNamespace(num_tokentypes=3)})
    ids, mask, flag, types = SampleArray(9, 50), SampleArray(9, mask=True), SampleArray(9, 2), SampleArray(9, 3)
    bert = {"text": ids, "types": types, "padding_mask": flag}
    assert CausalReader.arrays(config, 50) == {"tokens": ids, LENGTHS: SampleArray(0, 10)}
    assert BertReader.arrays(config, 50) == bert
    causal = {"tokens": ids, LABELS: ids, LOSS_MASK: mask}
    assert CausalCloze.arrays(config, 50) == causal
    assert BertCloze.arrays(config, 50) == bert | {LABELS: ids, LOSS_MASK: mask}
    task = SimpleNamespace(options=None, outputs=3, regression=False, labels="abc")
    of_sample = {LABELS: SampleArray(0, 3), LOSS_MASK: SampleArray(0, mask=True), "gap": SampleArray(0, 9)}
    for kind, text, tokens in ((CausalCloze, {"tokens": ids}, 1), (BertCloze, bert, 8)):
        wanted = text | of_sample | {"choices": SampleArray(3 * tokens, 51)}
        assert kind.choice_arrays(config, 50, task, False) == wanted
        assert kind.choice_arrays(config, 50, task, True) == wanted | {"shares": SampleArray(3, mask=True)}


@pytest.mark.parametrize("eod, begin, prefix", [(4, 5, (5,)), (4, 4, ()), (None, None, ())])
def test_readers_and_patterns_take_the_special_tokens_of_a_tokenizer(eod, begin, prefix):
    special = dict(cls=1, sep=2, mask=3).get
    tokenizer = SimpleNamespace(
        eod=eod,
        begin=begin,
        prefix=prefix,
        special=special,
        sentinels=(7, 8),
        vocab_size=50,
        inner=lambda: np.ones(50, bool),
    )
    config = SimpleNamespace(model=SimpleNamespace(seq_length=9), extra={BERT: SimpleNamespace(num_tokentypes=1)})
    assert CausalReader.of(config, tokenizer, 50) == CausalReader(9, eod or 0, prefix)
    assert CausalCloze.of(config, tokenizer, 50) == CausalCloze(9, begin)
    assert BertReader.of(config, tokenizer, 50) == BertReader(9, 1, 2, kinds=1)
    assert BertCloze.of(config, tokenizer, 50) == BertCloze(9, 1, 2, 3)
    assert CausalReader.of(config, None, 50) == CausalReader(9) and CausalCloze.of(config, None, 50) == CausalCloze(9)
    assert CausalReader.hidden_word(tokenizer) == (eod or 0) and BertReader.hidden_word(tokenizer) == 3
    assert T5Reader.hidden_word(tokenizer) == 7 and CausalReader.hidden_word(None) == BertReader.hidden_word(None) == 0


@pytest.mark.parametrize("end", [None, 7])
def test_a_pattern_fills_the_sample_of_its_model(end):
    """The text loses its end, so that with the words around it and the special tokens just all places are taken."""
    letters, pattern = lambda text: [*map(ord, text)], Pattern.of("{text}: {label}", pairs=False)
    of = lambda text: TaskExample(text, None, 0, "")
    long, label = "abcdefghijklm", [*map(ord, " Z")]
    causal = CausalCloze(9, end).read(pattern, of(long), "Z", letters, 2)
    begin = [] if end is None else [end]
    ids = [*begin, *letters(long[: 10 - len(begin) - 3]), ord(":"), *label]
    assert causal["tokens"].tolist() == ids[:-1] and causal[LABELS].tolist() == ids[1:]
    assert causal[LOSS_MASK].tolist() == [0.0] * 7 + [1.0] * 2
    bert = BertCloze(9, cls=1, sep=2, mask=3).read(pattern, of(long), "Z", letters, 2)
    assert bert["text"].tolist() == [1, *letters(long[:4]), ord(":"), 3, 3, 2] and bert["padding_mask"].all()
    t5 = T5Cloze(9, bos=1, sentinel=2, target=4).read(pattern, of(long), "Z", letters, 2)
    assert t5["text_enc"].tolist() == [*letters(long[:6]), ord(":"), 2, 0]  # one place is the label's second token
    short = CausalCloze(9, end).read(pattern, of("a"), "Z", letters, 2)
    ids = [*begin, *letters("a:"), *label]
    assert short["tokens"].tolist() == (ids + [end or 0] * 9)[:9]  # padded with what texts end with
    assert short[LABELS].tolist() == (ids + [end or 0] * 9)[1:10]


def test_made_up_sentences_have_a_label_of_any_length_at_their_end():
    counts, lasts = set(), set()
    for seed in range(60):
        sample = CausalCloze(4).made_up(np.random.default_rng(seed), 5)
        mask, ids = sample[LOSS_MASK].tolist(), sample["tokens"].tolist()
        counts.add(sum(mask))
        lasts.add(int(sample[LABELS][-1]))
        assert mask == sorted(mask) and ids[1:] == sample[LABELS].tolist()[:-1] and max(ids) < 5
    assert counts == {1, 2, 3, 4} and lasts == set(range(5))


@pytest.mark.parametrize("classes", [2, 3])
def test_figures_of_no_examples_are_0_and_those_of_right_ones_1(classes):
    for figure in (metrics.accuracy, metrics.f1, metrics.macro_f1, metrics.matthews):
        assert figure([], [], classes) == 0.0
        assert figure([*range(classes)] * 2, [*range(classes)] * 2, classes) == pytest.approx(1.0)
