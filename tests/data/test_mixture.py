# SPDX-License-Identifier: Apache-2.0
"""Mixtures of tasks: exact ratios at every place, in every layout, and labelled texts beside masked words."""

import itertools
import json
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import bert_dataset, t5_dataset
from megatron.data.labelled import Labelled, read_labelled
from megatron.data.masked_settings import MASKED_RULES, MaskedSettings, whole_weights
from megatron.data.mixture import LabelledDataset, MixtureOrder, MixtureTask, spread, tasks_of
from megatron.data.sampler import micro_batch_samples
from megatron.errors import DataError, SettingsError
from megatron.model.bert.settings import BertSettings
from megatron.settings.general_rules import violations
from megatron.settings.parse import parse_pretrain
from megatron.tokenizer import build_tokenizer
from tests.data import masked_corpus as corpus

FLAGS = """--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 48 --train-iters 1 --micro-batch-size 1
    --lr 1e-3 --tokenizer-type BertWordPieceCase --vocab-extra-ids 40 --split 80,20,0""".split()
ROWS = [(f"w{i % 90 + 6} w7 w{i % 50 + 8}", "w10 w11" if i % 2 else "w13", f"w{14 + 2 * (-i % 3)}") for i in range(60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("mixture")
    corpus.write_sentences(place / "corpus")
    corpus.write_sentences(place / "more")
    (place / "vocab.txt").write_text("\n".join(name.removeprefix("##") for name in corpus.TOKENS) + "\n")
    lines = [json.dumps(dict(sentence1=a, sentence2=b, label=c)) for a, b, c in ROWS]
    (place / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    (place / "texts.tsv").write_text(
        "id\ttext\tlabel\n" + "".join(f'{i}\tw{i % 20 + 6} "x\t{i % 2}\n' for i in range(31))
    )
    return place


def config_of(folder, *tasks, flags=()):
    words = [*FLAGS, "--vocab-file", f"{folder}/vocab.txt", "--data-path", f"{folder}/corpus", *flags]
    return parse_pretrain([*words, "--task-mixture", *tasks], {"masked": MaskedSettings})


def build(folder, *tasks, kind=bert_dataset, sizes=(200, 40, 0), flags=(), log=lambda line: None, **more):
    config = config_of(folder, *tasks, flags=flags)
    tokenizer = build_tokenizer(config.tokenizer)
    more = more or (dict(heads=True) if kind is bert_dataset else {})
    return kind.build_datasets(config, tokenizer, tokenizer.vocab_size, sizes, log, **more)


WEIGHTS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 500))
def test_each_task_has_its_share_after_any_number_of_samples(weights, count):
    order, total = MixtureOrder(weights), sum(weights)
    places = [order.place(index) for index in range(count)]
    taken = Counter(task for task, _ in places)
    for task, weight in enumerate(weights):
        assert abs(taken[task] * total - count * weight) < total  # by less than one sample
        assert [number for mine, number in places if mine == task] == list(range(taken[task]))
    assert order.counts(count) == [taken[task] for task in range(len(weights))]


def test_steps_have_the_exact_ratio_in_every_layout():
    order, batch = MixtureOrder([8, 4, 4]), 32
    for consumed in range(0, 320, batch):  # of a run that goes on from any of them, too
        for dp, micro in ((1, 32), (2, 4), (4, 2), (8, 1)):
            places = [
                place
                for rank in range(dp)
                for step in range(batch // dp // micro)
                for place in micro_batch_samples(consumed, micro, rank, dp, step)
            ]
            assert Counter(order.place(place)[0] for place in places) == {0: 16, 1: 8, 2: 8}


def test_tasks_are_spread():
    assert spread([2, 1, 1]).tolist() == [0, 1, 2, 0] and spread([2, 1]).tolist() == [0, 1, 0]
    assert spread([1, 1]).tolist() == [0, 1]
    assert sum(np.diff(np.flatnonzero(spread([7, 1]) == 0)) > 2) == 0
    assert whole_weights([Fraction("0.5"), Fraction("1.25")]) == [2, 5]


def test_samples_are_those_of_the_tasks(folder):
    tasks = "masked=2", f"more=1:{folder}/more", f"pairs=1:{folder}/pairs.jsonl"
    train, valid, test = build(folder, *tasks)
    assert len(train) == 200 and len(valid) == 40 and test is None
    numbers = [int(train[place]["task"]) for place in range(200)]
    assert Counter(numbers) == {0: 100, 1: 50, 2: 50}
    alone = bert_dataset.build_datasets(
        config := config_of(folder, "masked=1"), build_tokenizer(config.tokenizer), 400, (100, 0, 0)
    )[0]
    own = [place for place in range(200) if numbers[place] == 0]
    for k in (0, 1, 57, 99):
        one, two = train[own[k]], alone[k]
        assert all(np.array_equal(one[name], two[name]) for name in ("text", "labels", "types", "is_random"))
        assert one["class_label"] == 0 and one.keys() == train[numbers.index(2)].keys()


def test_labelled_texts_are_read_in_epochs_and_whole(folder):
    tasks = "masked=1", f"pairs=1:{folder}/pairs.jsonl"
    train, valid, _ = build(folder, *tasks, sizes=(192, 60, 0))
    labels = sorted({label for _, _, label in ROWS})

    def row_of(sample):
        real = sample["text"][sample["padding_mask"] > 0].tolist()
        end = real.index(3)
        assert [real[0], real[-1]] == [2, 3] and sample["loss_mask"].sum() == 0
        assert sample["types"][: len(real)].tolist() == [0] * (end + 1) + [1] * (len(real) - end - 1)
        words = lambda ids: " ".join(f"w{id}" for id in ids)
        return words(real[1:end]), words(real[end + 1 : -1]), labels[int(sample["class_label"])]

    rows = [row_of(train[place]) for place in range(192) if train[place]["task"] == 1]
    assert sorted(rows[:48]) == sorted(rows[48:]) == sorted(ROWS[:48]) and rows[:48] != rows[48:]
    assert [row_of(valid[place]) for place in range(60) if valid[place]["task"] == 1] == (ROWS[48:] * 3)[:30]


def test_all_tokens_of_a_pair_are_of_the_one_kind_that_there_is(folder):
    flags = "--bert-no-binary-head --num-tokentypes"
    tasks = ["--task-mixture", "masked=1", f"pairs=1:{folder}/pairs.jsonl"]
    for kinds in (1, 2):
        line = [
            *FLAGS,
            "--vocab-file",
            f"{folder}/vocab.txt",
            "--data-path",
            f"{folder}/corpus",
            *flags.split(),
            f"{kinds}",
        ]
        config = parse_pretrain([*line, *tasks], {"masked": MaskedSettings, "BERT": BertSettings})
        tokenizer = build_tokenizer(config.tokenizer)
        train = bert_dataset.build_datasets(config, tokenizer, tokenizer.vocab_size, (8, 0, 0), heads=True)[0]
        assert {int(sample["types"].max()) for sample in train if sample["task"] == 1} == {kinds - 1}


def test_orders_of_tasks_epochs_and_seeds_are_not_each_others(folder):
    """Of two tasks with equally many texts, too. Each stream of random numbers is its own, and the same again."""
    rows = [Labelled(f"w{number}", None, "a") for number in range(40)]
    tasks = [MixtureTask(name, 1, "x", ("a",)) for name in ("one", "two")]
    orders = {}
    for task, seed in itertools.product(tasks, (1, 2)):
        data = LabelledDataset(task, rows, lambda row, label: row.first, seed, shuffled=True)
        for epoch in range(3):
            found = [data[40 * epoch + place] for place in range(40)]
            assert sorted(found) == sorted(row.first for row in rows)
            orders[task.name, seed, epoch] = tuple(found)
    assert len(set(orders.values())) == len(orders) == 12
    again = LabelledDataset(tasks[0], rows, lambda row, label: row.first, 1, shuffled=True)
    assert tuple(again[40 + place] for place in range(40)) == orders["one", 1, 1]


def test_encoder_decoders_write_labels(folder):
    tasks = "masked=1", f"pairs=3:{folder}/pairs.jsonl"
    train, _, _ = build(folder, *tasks, kind=t5_dataset, sizes=(64, 0, 0), decoder_seq_length=32)
    bos = corpus.WORDS
    for place in range(64):
        sample = train[place]
        if sample["task"] == 0:
            assert sample["text_dec"][1] >= corpus.WORDS + 2
            continue
        read = " ".join(f"w{id}" for id in sample["text_enc"][sample["enc_mask"] > 0]).replace(f"w{bos + 1}", "[EOS]")
        label = int(sample["text_dec"][1])
        assert (read, f"w{label}") in {(f"{a} [EOS] {b} [EOS]", c) for a, b, c in ROWS}  # as fine-tuning reads a pair
        assert sample["text_dec"][:2].tolist() == [bos, label] and sample["labels"][:2].tolist() == [label, bos + 1]
        assert sample["loss_mask"].sum() == 2


def test_encoders_read_labelled_texts_up_to_their_length(folder):
    """The longer text of a pair gives way, and its end mark stays; what was cut off is told."""
    config = config_of(folder, "masked=1")
    samples = t5_dataset.t5_samples(
        config, tokenizer := build_tokenizer(config.tokenizer), tokenizer.vocab_size, 9, print
    )
    end, label = samples[0].eos, np.array([9])
    for first, second, wanted, cut in (
        (47, None, [*range(47), end], 0),
        (48, None, [*range(47), end], 1),
        (40, 6, [*range(40), end, *range(6), end], 0),
        (60, 6, [*range(40), end, *range(6), end], 1),
        (3, 0, [0, 1, 2, end, end], 0),
    ):
        sample = samples[0].labelled(np.arange(first), None if second is None else np.arange(second), label)
        assert sample["text_enc"][sample["enc_mask"] > 0].tolist() == wanted and sample["truncated"] == cut


def test_long_texts_lose_their_ends():
    first, second = np.arange(10), np.arange(100, 106)
    assert [len(piece) for piece in bert_dataset.fitted(first, second, 20)] == [10, 6]
    assert [len(piece) for piece in bert_dataset.fitted(first, second, 13)] == [7, 6]
    assert [len(piece) for piece in bert_dataset.fitted(first, second, 9)] == [5, 4]  # as in fine-tuning
    assert [piece.tolist() for piece in bert_dataset.fitted(first, None, 4)] == [[0, 1, 2, 3], []]
    for most in range(1, 17):
        one, two = bert_dataset.fitted(second, first, most)
        assert len(one) + len(two) == most and one.tolist() == second[: len(one)].tolist()


def test_a_sample_is_a_function_of_its_place(folder):
    train = build(folder, "masked=2", f"texts=1:{folder}/texts.tsv")[0]
    again = build(folder, "masked=2", f"texts=1:{folder}/texts.tsv")[0]
    for place in (120, 121, 122):
        assert all(np.array_equal(train[place][name], again[place][name]) for name in train[place])


def test_files_of_labelled_texts(folder, tmp_path):
    assert read_labelled(f"{folder}/pairs.jsonl").rows[1] == Labelled(*ROWS[1])
    assert read_labelled(f"{folder}/texts.tsv").rows[30] == Labelled('w16 "x', None, "0")  # a quote is text in GLUE
    (tmp_path / "a.csv").write_text('label,text\n1,"a, b"\n0,c\n')
    assert read_labelled(str(tmp_path / "a.csv")).rows == (Labelled("a, b", None, "1"), Labelled("c", None, "0"))
    for name, text, words in (
        ("none.jsonl", "", "has no rows"),
        ("one.jsonl", '{"text": "a", "label": 1}\n' * 3, "all 3 rows have the label '1'"),
        ("json.jsonl", '{"text": "a", "label": 1}\n{oops\n', "line 2: not JSON"),
        ("label.jsonl", '{"text": "a"}\n', "line 1 lacks a label"),
        ("text.tsv", "content\tlabel\na\t1\n", "line 2 lacks a text"),
        ("kind.jsonl", '{"text": "a", "label": [1]}\n', r"line 1: \[1\] stands where a label is wanted"),
        ("text.jsonl", '{"text": ["a"], "label": 1}\n', "line 1, text: .* stands where a text is wanted"),
        (
            "second.jsonl",
            '{"text": "a", "sentence2": ["b"], "label": 1}\n',
            "line 1, sentence2: .* stands where a text is wanted",
        ),
        (
            "qnli.tsv",
            "index\tquestion\tsentence\tlabel\n0\tWhen?\tIn 1990.\t1\n",
            "line 2 has sentence and question, and one of them would not be read",
        ),
        ("list.jsonl", "[1, 2]\n", "item 1: int, no object"),
        ("empty.tsv", "text\tlabel\na\t \nb\t0\n", "line 2: the label is empty"),
        ("more.csv", "text,label\n" + "A fine, film.,good\n" * 9, "line 2: 3 columns, where the header names 2"),
        ("break.csv", "text,label\na\rb,1\nc,0\n", "break.csv, line 2: a carriage return without a line feed"),
        ("twice.tsv", "text\tlabel\tlabel\na\t1\t2\nb\t2\t1\n", "twice.tsv, line 1: the header names 'label' twice"),
        ("twice.csv", "text,text,label\na,b,1\nc,d,2\n", "twice.csv, line 1: the header names 'text' twice"),
        ("twice.jsonl", '{"text": "a", "label": 1, "label": 2}\n', "line 1: an object has 'label' twice"),
        (
            "deep.jsonl",
            '{"text": ' + "[" * 100_000 + "}\n",
            "deep.jsonl, line 1: lists or objects stand inside of each",
        ),
        ("half.jsonl", '{"text": "a \\ud83d", "label": 1}\n', r"line 1, text: '.ud83d' is half of a surrogate pair"),
        ("half.jsonl", '{"text": "a", "label": "\\ud83d"}\n', r"line 1: '.ud83d' is half of a surrogate pair"),
        ("half.jsonl", '{"text": "a", "label": 1, "\\ud83d": 2}\n', "half of a surrogate pair"),
        ("quote.csv", 'text,label\na,1\n"b,1\n' + "c,0\n" * 300, "quote.csv, line 3: unexpected end of data"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(DataError, match=words):
            read_labelled(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("bom.TSV", "\ufefftext\tlabel\na\t1\nb\t 0 \n", [("a", "1"), ("b", "0")]),
        (
            "bom.jsonl",
            '\ufeff{"text": "a", "label": true}\n{"text": "b", "label": " false "}\n',
            [("a", "true"), ("b", "false")],
        ),
        ("long.tsv", f"text\tlabel\n{'a' * 140_000}\t1\nb\t0\n", [("a" * 140_000, "1"), ("b", "0")]),
        ("cr.tsv", "text\tlabel\r\na\rb\t1\r\nb\t0\r\n", [("a\rb", "1"), ("b", "0")]),
        ("cr.csv", 'text,label\r\n"a\rb",1\r\nb,0\r\n', [("a\rb", "1"), ("b", "0")]),
        ("long.csv", f"text,label\n{'a' * 140_000},1\nb,0\n", [("a" * 140_000, "1"), ("b", "0")]),
    ],
)
def test_labelled_texts_are_read_as_those_of_a_task(name, text, rows, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    assert read_labelled(str(tmp_path / name)).rows == tuple(Labelled(first, None, label) for first, label in rows)
    assert tasks_of(["masked=1", f"a=1:{tmp_path / name}"])[1].labels == tuple(sorted(label for _, label in rows))


def test_what_labelled_texts_lose_is_told(folder, tmp_path):
    rows = [f"w6 w7\t{number // 20}" for number in range(60)]  # sorted by their label
    (tmp_path / "sorted.tsv").write_text("\n".join(["text\tlabel", "w8\tw9\t1", *rows]) + "\n")
    lines = []
    build(folder, "masked=1", f"mood=1:{tmp_path / 'sorted.tsv'}", flags=("--split", "60,40,0"), log=lines.append)
    notes = [line.removeprefix(f"note: {tmp_path / 'sorted.tsv'}: ") for line in lines if line.startswith("note: ")]
    assert [note.partition(";")[0] for note in notes] == [
        "1 lines with another number of columns than the header are left out (first: line 2)",
        "of 3 labels 1 are in the part for training alone: 0",
        "of 3 labels 1 are in the part for validation alone: 2",
    ]


def test_columns_that_are_not_read_are_told(tmp_path):
    rows = [dict(id=1, text="a", label="1", keywords=None), dict(text="b", text_pair="c", label="0", level="easy")]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_labelled(f"{tmp_path}/own.jsonl")
    assert found.rows == (Labelled("a", None, "1"), Labelled("b", "c", "0"))
    assert found.notes == (f"{tmp_path}/own.jsonl: not read: id, level",)


def test_tasks_with_known_names_are_read_as_those(folder, tmp_path):
    """CMNLI's rows without a label teach nothing, and classes are the task's, not the file's."""
    labels = ["neutral", "-", "entailment"] * 20
    lines = [json.dumps(dict(sentence1=f"w{6 + i}", sentence2="w7", label=label)) for i, label in enumerate(labels)]
    (tmp_path / "train.json").write_text("\n".join(lines) + "\n")
    told = []
    train = build(folder, "masked=1", f"cmnli=1:{tmp_path}/train.json", sizes=(64, 4, 0), log=told.append)[0]
    assert " > cmnli: 40 labelled texts, 3 classes" in told
    assert f"note: {tmp_path}/train.json: 20 of 60 rows are left out, whose label is -" in told
    seen = {(int(s["text"][1]) - 6) % 3: int(s["class_label"]) for s in train if s["task"] == 1}
    assert seen == {0: 2, 2: 1}  # contradiction, entailment, neutral: as all of CMNLI's files are numbered
    for text, words in (
        (
            lines[0] + '\n{"sentence1": "a", "sentence2": "b", "label": "no"}',
            "line 2: the label 'no' is none of CMNLI's",
        ),
        ('{"text": "a", "label": "neutral"}', "(?s)has no column 'sentence1'.*needs another name for its task"),
    ):
        (tmp_path / "wrong.json").write_text(text + "\n")
        with pytest.raises(DataError, match=words):
            tasks_of(["masked=1", f"CLUE-CMNLI=1:{tmp_path}/wrong.json"])
    assert tasks_of(["masked=1", "cmnli=1:cmnli_text_sentence"])[1].labels == ()  # token files


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ("masked=0", "the weight '0' of 'masked' is no number above 0"),
        ("masked=-1", "the weight '-1' of 'masked' is no number above 0"),
        ("masked=many", "the weight 'many' of 'masked'"),
        ("masked=1 a.b=1:x", "'a.b=1:x' is no task"),
        ("masked=1e9", "the weight '1e9' of 'masked'"),
        ("masked=1 a=1/0:x", "the weight '1/0' of 'a'"),
        ("masked", "'masked' is no task"),
        ("masked=1 maskd=2", "task 'maskd' has no path"),
        ("masked=1 masked=2", "names 'masked' twice"),
        ("masked=1:x", "it has no path"),
        ("a=1:x.tsv", "has no task 'masked'"),
        ("masked=1 a=0.333333333:b", "come round after"),
        ("masked=1 a=1:none.tsv", "none.tsv: no such file"),
    ],
)
def test_mixtures_that_cannot_be(tasks, words):
    with pytest.raises((SettingsError, DataError), match=words):
        tasks_of(tasks.split())
    if ".tsv" not in tasks or "x.tsv" in tasks:  # what needs no look at files is told with all other settings
        assert any(words in line for line in violations(config_of("", *tasks.split()), 1, MASKED_RULES)[0])


def test_mixtures_that_do_not_fit_the_run(folder):
    with pytest.raises(SettingsError, match=r"no heads for labelled texts \(texts\)"):
        build(folder, "masked=1", f"texts=1:{folder}/texts.tsv", heads=False)
    (folder / "two.tsv").write_text("text\tlabel\nw6\t0\nw7\t1\n")
    with pytest.raises(DataError, match="(?s)leaves nothing of two for valid.*--split 90,5,5"):
        build(folder, "masked=1", f"two=1:{folder}/two.tsv")
    told = []
    flags = ("--split", "60,35,5")
    test = build(folder, "masked=1", f"two=1:{folder}/two.tsv", flags=flags, sizes=(9, 9, 9), log=told.append)[2]
    assert test is None and any("no evaluation on test data" in line for line in told)
    for flag in ("--full-validation", "--dataloader-type cyclic"):
        config = config_of(folder, "masked=1", flags=flag.split())
        assert any("--task-mixture" in line for line in violations(config, 1, MASKED_RULES)[0])
