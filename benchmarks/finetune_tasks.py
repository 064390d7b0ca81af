# SPDX-License-Identifier: Apache-2.0
"""What small models learn of real text: pretrained for minutes, then fine-tuned on four corpora beside tf-idf.

    python benchmarks/finetune_tasks.py --english english.jsonl.zst --chinese chinese.jsonl.zst
    python benchmarks/finetune_tasks.py --quick                          (a few minutes: does it work?)
    python benchmarks/finetune_tasks.py --tasks thucnews --models BERT --tune      (to try settings)

1. A BERT and a T5 of each language are pretrained on the training texts of the tasks without their labels, on further
   texts out of packages (labelled_corpora.py), and on --english and --chinese; each for --core-seconds of a core, which is
   what counts on a machine with others on it: 600 are five minutes of two cores. Their loss on texts that were held out
   stands beside that of untrained weights, and that of a unigram: the frequency of each token among what is to be found.
   The English BERT spends a quarter of its time on a task of its own, whether passages of other reviews of films are
   favourable, and is fine-tuned on Rotten Tomatoes from there.
2. Each is fine-tuned on each task of its language. Settings were chosen with --tune, which trains on seven eighths of the
   training texts and measures on the others; without it all training texts are trained on, as tf-idf is, which chooses its
   own settings by cross-validation on them. With --second a BERT that was pretrained on titles, the newspaper and the
   dictionary alone, and has a vocabulary of its own, is fine-tuned on THUCNews, too, and both are asked together.
3. The Chinese BERT is fine-tuned on --few titles a class: with a head; with three patterns (PET); and, as PET does, with a
   head that learns what those three predict of all titles (--soft-labels), beside others that learn what three heads do, or
   all six.

The tables are printed, and results.json is written, in --output. Without network this ends with a message.
"""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from statistics import mean
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from labelled_corpora import (  # noqa: E402
    CHOICES,
    CORPORA,
    USUAL,
    Rows,
    first_of_each,
    further_texts,
    majority,
    ratings,
    rows_of,
    split,
    texts_of_lines,
    tf_idf,
)

from megatron.errors import DataError, UsageError, did_you_mean, run_main  # noqa: E402
from megatron.settings.parse import parse  # noqa: E402
from megatron.settings.schema import setting  # noqa: E402

LENGTH = 64  # tokens of a sample of pretraining
VOCABULARY = 16_000  # tokens of each language
ENGLISH_WORDS = "--kind word-piece"
CHINESE_WORDS = "--kind unigram --max-piece-length 4 --spaces-apart"  # pieces that are words, as n-grams are
HELD_OUT = 400  # texts of each source that pretraining does not read
BATCH = 32  # samples of a step of pretraining
PROBED = (10, 60)  # steps of two short runs, which tell what a step costs
CLASS_WORDS = {  # what stands for each class of THUCNews in Chinese
    "finance": "\u8d22\u7ecf",
    "realty": "\u697c\u5e02",
    "stocks": "\u80a1\u7968",
    "education": "\u6559\u80b2",
    "science": "\u79d1\u6280",
    "society": "\u793e\u4f1a",
    "politics": "\u653f\u6cbb",
    "sports": "\u4f53\u80b2",
    "game": "\u6e38\u620f",
    "entertainment": "\u5a31\u4e50",
}
RATINGS = {"0": "rotten", "1": "fresh"}  # what the rotten corpus calls those of the Internet Movie Database
RATED = 0.25  # share of the English BERT's time that goes to them
LEARN_RATINGS = "--pooling mean --seq-length 64 --lr 5e-4 --word-dropout 0.1 --hidden-dropout 0.1"
PATTERNS = (
    "{label}\u65b0\u95fb\uff1a{text}",  # LABEL news: TITLE
    "{text}\u3002\u8fd9\u662f{label}\u65b0\u95fb",  # TITLE. This is LABEL news
    "{label}\uff1a{text}",  # LABEL: TITLE
)


@dataclass(frozen=True)
class BenchmarkOptions:
    """What is compared, and how much is spent on it."""

    tasks: Optional[list[str]] = setting("of thucnews, reviews, rotten and bbc (default: all)", None)
    models: Optional[list[str]] = setting("of BERT, T5 and PET (default: all)", None)
    output: str = setting("folder for packages, files and runs", "runs/finetune_tasks")
    english: Optional[list[str]] = setting("further English texts for pretraining, JSON lines", None)
    chinese: Optional[list[str]] = setting("further Chinese texts for pretraining, JSON lines", None)
    megabytes: float = setting("of --english and --chinese each, at most", 6.0)
    core_seconds: Optional[float] = setting("of each pretraining (default: 600, five minutes of two cores)", None)
    second: bool = setting("a second BERT for thucnews, pretrained on its titles and packages alone", False)
    seeds: int = setting("fine-tunings of each BERT and T5: the mean of them, and all together", 1)
    few: int = setting("examples a class for the pattern (PET), and for a head beside it", 32)
    tune: bool = setting("measure on a part of the training texts, not on the test set: to try settings", False)
    quick: bool = setting("one task of each language, 20 core-seconds of each pretraining, one epoch", False)
    seed: int = setting("of split and training", 1234)


@dataclass(frozen=True)
class SmallModel:
    """A kind of model, and its flags: of its shape, of what it is pretrained with and of what it is fine-tuned with."""

    script: str
    shape: str
    pretraining: str
    tuning: str
    dump: str


SMALL = {
    "BERT": SmallModel(
        "pretrain_bert.py",
        "--num-layers 2 --bert-no-binary-head --num-tokentypes 0 --position-embedding-type rope",
        "--mask-prob 0.4 --mask-max-ngram 1 --short-seq-prob 0",
        "--pooling mean",
        "--model-type BERT --bert-no-binary-head",
    ),
    "T5": SmallModel(
        "pretrain_t5.py",
        "--encoder-num-layers 2 --decoder-num-layers 1 --decoder-seq-length 32 --position-embedding-type relative "
        "--normalization RMSNorm --disable-bias-linear",
        "--vocab-extra-ids 20 --mask-prob 0.2 --short-seq-prob 0",
        "--pooling mean",
        "--model-type T5 --decoder-seq-length 32 --vocab-extra-ids 20",
    ),
}
WIDTH = "--hidden-size 256 --num-attention-heads 4"
PRETRAINING = (
    "--lr 1.5e-3 --min-lr 1e-5 --lr-decay-style linear --lr-warmup-fraction 0.05 --weight-decay 0.05 --adam-beta2 0.98 "
    "--hidden-dropout 0.05 --attention-dropout 0 --eval-iters 30 --log-interval 50 "
    f"--micro-batch-size {BATCH}"
)
TUNING = (
    "--lr-decay-style linear --min-lr 0 --lr-warmup-fraction 0.1 --weight-decay 0.05 --adam-eps 1e-6 --adam-beta2 0.98 "
    "--micro-batch-size 32 --hidden-dropout 0.3 --attention-dropout 0 --word-dropout 0.2 --log-interval 100"
)
OF_TASK = {  # tokens of an example, rate and epochs
    "thucnews": "--seq-length 32 --lr 5e-4 --train-epochs 5",
    "reviews": "--seq-length 128 --lr 5e-4 --train-epochs 3",
    "rotten": "--seq-length 64 --lr 8e-4 --train-epochs 3 --word-dropout 0.3",
    "bbc": "--seq-length 512 --lr 1.5e-3 --train-epochs 6 --word-dropout 0.3",
}
FEW_HEAD = "--pooling mean --lr 1e-3 --train-epochs 20 --word-dropout 0"  # on few titles
FEW_PATTERN = "--lr 5e-4 --train-epochs 40 --word-dropout 0"
MANY_SOFT = "--pooling mean --lr 5e-4 --train-epochs 5"  # on all of them, with soft labels


def main(argv: list[str]) -> None:
    options = parse(argv, dict(benchmark=BenchmarkOptions), description=__doc__.splitlines()[0])["benchmark"]
    if options.quick:
        options = replace(options, tasks=options.tasks or ["thucnews", "rotten"], megabytes=1.0)
    if options.core_seconds is None:
        options = replace(options, core_seconds=20.0 if options.quick else 600.0)
    models = _chosen("--models", options.models, ("BERT", "T5", "PET"))
    bench = Bench(options, Path(options.output))
    tasks = {name: rows_of(CORPORA[name], bench.packages) for name in _chosen("--tasks", options.tasks, CORPORA)}
    for name, rows in tasks.items():
        bench.write_task(name, rows)
    for name in tasks:
        bench.baselines(name)
    for chinese in sorted({CORPORA[name].chinese for name in tasks}):
        names = [name for name in tasks if CORPORA[name].chinese == chinese]
        folder, given = bench.folder / _language(chinese), options.chinese if chinese else options.english
        bench.write_texts(folder, names, given)
        for model in SMALL:
            few = model == "BERT" and "PET" in models and "thucnews" in names
            if not (model in models or few):
                continue
            rated = model == "BERT" and "rotten" in names
            pretrained = bench.pretrain(model, folder, (1 - RATED if rated else 1) * options.core_seconds)
            begins = {"rotten": bench.learn_ratings(pretrained, RATED * options.core_seconds)} if rated else {}
            for name in names if model in models else ():
                bench.tune(name, model, begins.get(name, pretrained))
            if few:
                bench.few(pretrained)
        if options.second and "BERT" in models and "thucnews" in names:
            bench.second("thucnews")
    print(tables(bench.found, options))


def _chosen(flag: str, given: Optional[list[str]], known: Sequence[str]) -> list[str]:
    for name in given or ():
        if name not in known:
            raise UsageError(f"{flag} {name}: there is {', '.join(known)}{did_you_mean(name, known)}")
    return list(given or known)


@dataclass
class Bench:
    """The folder of a benchmark, and what was found out: [{"what": ..., figures}]."""

    options: BenchmarkOptions
    folder: Path

    def __post_init__(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.found: list[dict[str, Any]] = []
        self.rows: dict[str, tuple[Rows, Rows]] = {}  # of a task: what is trained on, what is measured

    def tell(self, what: str, **figures) -> None:
        self.found.append(dict(what=what, **figures))
        print(f"{what}: " + ", ".join(f"{name} {_word(value)}" for name, value in figures.items()), flush=True)
        (self.folder / "results.json").write_text(json.dumps(self.found, indent=1) + "\n")

    @property
    def packages(self) -> Path:
        return self.folder / "packages"

    @cached_property
    def rated(self) -> Rows:
        """Passages and their ratings, which the English BERT learns before those of the rotten corpus."""
        return ratings(self.packages, self.options.seed)

    # ---- tasks ---------------------------------------------------------------------------------------------------

    def write_task(self, name: str, rows: Rows) -> None:
        """Its files: train, and test, which with --tune is a part of the training texts."""
        train, valid, test = split(rows, self.options.seed)
        train, test = (train, valid) if self.options.tune else (train + valid, test)
        self.rows[name] = train, test
        write_rows_of_task(self.folder / name, train=train, test=test)

    def baselines(self, name: str) -> None:
        train, test = self.rows[name]
        started = time.process_time()
        figures = {"tf-idf": self.tf_idf(name, train), "majority": majority(train, test)}
        seconds = time.process_time() - started
        self.tell(name, train=len(train), test=len(test), **figures, **{"core-seconds": seconds})
        if name == "rotten":  # whether the ratings that the English BERT learns before would have helped this, too
            rated = [(text, RATINGS[rating]) for text, rating in self.rated]
            self.tell(f"{name}, tf-idf of the rated passages too", accuracy=self.tf_idf(name, train + rated))

    def tf_idf(self, name: str, train: Rows, choices: dict = CHOICES) -> float:
        choices = USUAL if self.options.quick else choices
        return tf_idf(train, self.rows[name][1], CORPORA[name].chinese, choices)

    def tune(self, name: str, model: str, pretrained: Path) -> None:
        """Fine-tune for a given number of epochs, and measure once, behind the last one. Of several seeds the mean of their
        accuracies, and the accuracy of the mean of their probabilities.
        """
        flags = f"{OF_TASK[name]} {SMALL[model.split()[-1]].tuning}"
        outs = self.outs(name, model)
        runs = [self.finetune(name, pretrained, flags, out, seed) for seed, out in zip(self.seeds, outs, strict=True)]
        accuracies, used, wall = zip(*runs, strict=True)
        figures = dict(accuracy=mean(accuracies))
        if len(outs) > 1:
            figures |= dict(least=min(accuracies), most=max(accuracies), together=self.together(name, outs))
        self.tell(f"{name}, {model}", **figures, **{"core-seconds": mean(used), "seconds": mean(wall)})

    def second(self, name: str) -> None:
        """Pretrain a BERT on the texts of one task and of packages alone, fine-tune it, and ask both BERTs together: one
        fine-tuning of each, and all.
        """
        folder = self.folder / f"{_language(CORPORA[name].chinese)}-second"
        self.write_texts(folder, [name], None)
        self.tune(name, "second BERT", self.pretrain("BERT", folder, self.options.core_seconds))
        both = [self.outs(name, model) for model in ("BERT", "second BERT")]
        pairs = [self.together(name, pair) for pair in zip(*both, strict=True)]
        figures = dict(accuracy=mean(pairs), least=min(pairs), most=max(pairs), all=self.together(name, sum(both, [])))
        self.tell(f"{name}, one of each BERT", **figures)

    def outs(self, name: str, model: str) -> list[Path]:
        return [self.folder / name / f"{model.replace(' ', '-')}-{seed}" for seed in self.seeds]

    def together(self, name: str, outs: Sequence[Path]) -> float:
        """The share that fine-tunings have right together."""
        shares = [out / "predictions" / "validation-task.probabilities.tsv" for out in outs]
        return right_together(shares, [label for _, label in self.rows[name][1]])

    def finetune(self, name: str, pretrained: Path, flags: str, out: Path, seed: int) -> tuple[float, float, float]:
        """One fine-tuning: (accuracy, core-seconds, seconds)."""
        shutil.rmtree(out, ignore_errors=True)  # of another call
        words = [*self.finetuning(self.folder / name, pretrained, seed), "--eval-epoch", 1000, "--save", out]
        words += [*flags.split(), *(["--train-epochs", 1] if self.options.quick else [])]
        cost = run("finetune.py", *words, log=out.with_suffix(".log"))
        return evaluations(out)[-1]["accuracy"], *cost

    def finetuning(self, folder: Path, pretrained: Path, seed: int) -> list:
        """The flags that all fine-tunings share. folder: of the task."""
        begin = ["--task", folder / "task.yaml", "--data-path", folder, "--pretrained-checkpoint", pretrained]
        return [*begin, "--no-best-checkpoint", *self.common(seed), *TUNING.split()]

    @property
    def seeds(self) -> range:
        return range(self.options.seed, self.options.seed + self.options.seeds)

    def few(self, pretrained: Path) -> None:
        """What is learned of few titles of each class, of others with each seed: with tf-idf, a head, a pattern; and by a
        head from what three of those predict of all titles (PET's last step).
        """
        folder, train, found = self.folder / "thucnews", self.rows["thucnews"][0], defaultdict(list)
        (folder / "words.json").write_text(json.dumps(CLASS_WORDS, ensure_ascii=False))
        for seed in self.seeds:
            some = first_of_each(random.Random(seed).sample(train, len(train)), self.options.few)
            write_rows(folder / "few.jsonl", some)
            found["tf-idf"].append(self.tf_idf("thucnews", some))
            verbalizer = f"--pet-verbalizer {folder / 'words.json'}"
            patterns = [f"{FEW_PATTERN} --pet-pattern {pattern} {verbalizer}" for pattern in PATTERNS]
            predicted: dict[str, list[Path]] = {}  # of probabilities of all titles
            for kind, ways in {"head": [FEW_HEAD] * len(PATTERNS), "pattern": patterns}.items():
                outs = [folder / f"few-{kind}-{seed}-{number}" for number in range(len(ways))]
                for number, (out, flags) in enumerate(zip(outs, ways, strict=True)):
                    flags += f" --seq-length 32 --train-data few.jsonl --test-data {folder / 'train.jsonl'}"
                    found[f"a {kind}"].append(self.finetune("thucnews", pretrained, flags, out, seed + number)[0])
                predicted[f"{len(ways)} {kind}s"] = [out / "predictions" / "task.probabilities.tsv" for out in outs]
            predicted["all of these"] = sum(predicted.values(), [])
            for teachers, files in predicted.items():
                flags = f"{MANY_SOFT} --seq-length 32 --soft-labels {' '.join(map(str, files))}"
                out = folder / f"few-of-{teachers.replace(' ', '-')}-{seed}"
                accuracy = self.finetune("thucnews", pretrained, flags, out, seed)[0]
                found[f"a head that learns what {teachers} predict of all titles"].append(accuracy)
        for what, accuracies in found.items():
            figures = dict(accuracy=mean(accuracies), least=min(accuracies), most=max(accuracies))
            self.tell(f"{self.options.few} titles a class, {what}", **figures)

    def common(self, seed: int) -> list:
        return ["--device", "cpu", "--num-workers", 0, "--precision", "auto", "--seed", seed]

    # ---- pretraining ---------------------------------------------------------------------------------------------

    def write_texts(self, folder: Path, names: Sequence[str], given: Optional[list[str]]) -> None:
        """Samples of about LENGTH tokens: each text of the tasks a few times, each time beside others; those of packages
        and of the files `given` once. And a vocabulary, and all of it as tokens.
        """
        chinese, draw = CORPORA[names[0]].chinese, random.Random(self.options.seed)
        folder.mkdir(exist_ok=True)
        sources = [(1, passages(further_texts(chinese, self.packages), chinese))]
        if given:
            sources.append((1, passages(texts_of_lines(given, self.options.megabytes), chinese)))
        of_tasks = [[text for text, _ in self.rows[name][0]] for name in names]
        size = max(sum(map(len, texts)) for texts in of_tasks)
        sources += [(2 if 3 * sum(map(len, texts)) > size else 6, texts) for texts in of_tasks]
        train, held_out = [], []
        for times, texts in sources:
            texts = draw.sample(texts, len(texts))
            held_out += packed(texts[:HELD_OUT], chinese, draw)
            train += [sample for _ in range(times) for sample in packed(texts[HELD_OUT:], chinese, draw)]
        once = [text for _, texts in sources for text in texts]  # of which the vocabulary is made
        for name, samples in dict(train=train, held_out=held_out, once=once).items():
            write_lines(folder / f"{name}.jsonl", (dict(text=text) for text in draw.sample(samples, len(samples))))
        self.write_tokens(folder, ["train", "held_out"])

    def write_tokens(self, folder: Path, parts: list[str]) -> None:
        kind = CHINESE_WORDS if folder.name.startswith(_language(True)) else ENGLISH_WORDS
        vocabulary = [*kind.split(), "--vocab-size", VOCABULARY, "--max-megabytes", 64, "--output", folder]
        once = folder / "once.jsonl"
        run("-m", "megatron.tools.train_tokenizer", "--input", once, *vocabulary, log=folder / "vocabulary.log")
        for part in parts:
            for old in folder.glob(f"{part}_text_document*"):
                old.unlink()
            files = ["--input", folder / f"{part}.jsonl", "--output-prefix", folder / part, *words_of(folder)]
            run("preprocess_data.py", *files, log=folder / f"{part}.log")

    def pretrain(self, model: str, folder: Path, seconds: float) -> Path:
        """The folder of a checkpoint of so many core-seconds. folder: of texts, in which it will be."""
        small = SMALL[model]
        data = ["--train-data-path", folder / "train_text_document"]
        data += ["--valid-data-path", folder / "held_out_text_document"]
        words = f"{small.shape} {small.pretraining} {WIDTH} {PRETRAINING} --seq-length {LENGTH}".split()
        command = [small.script, *data, *words_of(folder), *words, *self.common(self.options.seed)]
        done, untrained = folder / model, folder / f"{model}-probe"
        steps, cost = self.run_for(seconds, command, done, untrained)
        losses = dict(untrained=evaluations(untrained)[-1]["lm loss"], trained=evaluations(done)[-1]["lm loss"])
        losses["unigram"] = self.unigram(model, folder, data)
        name = f"{model} of {folder.name}"
        self.tell(name, **losses, steps=steps, tokens=steps * BATCH * LENGTH, **cost)
        return done

    def learn_ratings(self, pretrained: Path, seconds: float) -> Path:
        """The folder of a checkpoint that has learned for so many core-seconds whether passages are favourable."""
        folder, out = self.folder / "ratings", pretrained.parent / f"{pretrained.name}-ratings"
        write_rows_of_task(folder, train=self.rated[:-HELD_OUT], test=self.rated[-HELD_OUT:])
        words = [*self.finetuning(folder, pretrained, self.options.seed), *LEARN_RATINGS.split()]
        steps, cost = self.run_for(seconds, ["finetune.py", *words], out, folder / "probe")
        self.tell("ratings, BERT", accuracy=evaluations(out)[-1]["accuracy"], steps=steps, **cost)
        return out

    def run_for(self, seconds: float, command: list, out: Path, probe: Path) -> tuple[int, dict[str, float]]:
        """(the steps that a core does in so many seconds, what they cost) of a training, which is kept in `out`. What a
        step costs is measured first, by two short runs that leave the weights as they are; the second is in `probe`.
        """
        costs = []
        for steps in PROBED:
            shutil.rmtree(probe, ignore_errors=True)
            still = ["--lr", 1e-12, "--min-lr", 0, "--train-iters", steps, "--save", probe]
            costs.append(run(*command, *still, log=probe.with_suffix(".log"))[0])
        step = (costs[1] - costs[0]) / (PROBED[1] - PROBED[0])
        steps = max(20, int(seconds / step))
        shutil.rmtree(out, ignore_errors=True)
        used, wall = run(*command, "--train-iters", steps, "--save", out, log=out.with_suffix(".log"))
        return steps, {"core-seconds": used, "seconds": wall}

    def unigram(self, model: str, folder: Path, data: list) -> float:
        """Cross-entropy of what is to be found in the texts held out, by the frequency of tokens among what is to be found
        in training; each has been seen once more than it was.
        """
        small, counts = SMALL[model], {}
        shared = ["--seq-length", LENGTH, *words_of(folder), *small.pretraining.split(), *small.dump.split(), *data]
        for part, number in dict(train=8000, valid=960).items():
            sizes = ["--train-samples", 8000, "--valid-samples", 960, "--dataset", part, "--first", number]
            file = folder / f"{model}-{part}-samples.jsonl"
            run("-m", "megatron.tools.dump_samples", *shared, *sizes, log=file)
            counts[part] = Counter()
            for line in file.read_text().splitlines():
                if line.startswith("{"):
                    sample = json.loads(line)
                    counted = sample.get("loss_mask", [1] * len(sample["labels"]))  # all of a T5's targets
                    counts[part].update(id for id, one in zip(sample["labels"], counted) if one)
        total = counts["train"].total() + VOCABULARY
        lost = sum(count * -log((counts["train"][id] + 1) / total) for id, count in counts["valid"].items())
        return lost / counts["valid"].total()


# ---- texts -----------------------------------------------------------------------------------------------------------


def passages(texts: list[str], chinese: bool) -> list[str]:
    """Running text, in pieces of a sample or less, each once; what is mostly not letters (tables, code) is left out."""
    found = []
    for text in texts:
        ends = r"(?<=[\u3002\uff01\uff1f\uff1b\n])" if chinese else r"\n\s*\n"
        for piece in re.split(ends, text):
            piece = " ".join(piece.split())
            letters = re.findall(r"[\u4e00-\u9fff]" if chinese else r"[A-Za-z ]", piece)
            if len(letters) >= (8 if chinese else 80) and len(letters) > (0.5 if chinese else 0.9) * len(piece):
                found.append(piece)
    return list(dict.fromkeys(found))


def packed(texts: list[str], chinese: bool, draw: random.Random) -> list[str]:
    """Texts in a drawn order, as many beside each other as have room in a sample, and long ones in pieces."""
    most = int((1.4 if chinese else 0.72) * LENGTH)  # characters (of 1.55 are tokens, in the mean), or words and signs
    samples: list[str] = []
    kept: list[str] = []
    for text in draw.sample(texts, len(texts)):
        units = list(text) if chinese else re.findall(r"\s*(?:\w+|[^\w\s])", text)
        for start in range(0, len(units), most):
            piece = units[start : start + most]
            if len(kept) + len(piece) + 1 > most and kept:
                samples.append("".join(kept).strip())
                kept = []
            kept += [*([" "] if kept else []), *piece]
    return [*samples, "".join(kept).strip()] if kept else samples


def write_rows_of_task(folder: Path, **parts: Rows) -> None:
    """The files of a task: its parts train and test, and what says so."""
    folder.mkdir(exist_ok=True)
    for part, rows in parts.items():
        write_rows(folder / f"{part}.jsonl", rows)
    text = "name: task\ntrain: train.jsonl\nvalid: test.jsonl\ntext: text\nlabel: label\n"
    (folder / "task.yaml").write_text(text)


def write_rows(path: Path, rows: Rows) -> None:
    write_lines(path, (dict(text=text, label=label) for text, label in rows))


def write_lines(path: Path, records) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))


def words_of(folder: Path) -> list:
    """The flags of a language's vocabulary."""
    if folder.name.startswith(_language(True)):
        return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", folder / "tokenizer.model"]
    return ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", folder / "vocab.txt"]


def _language(chinese: bool) -> str:
    return "Chinese" if chinese else "English"


# ---- runs ------------------------------------------------------------------------------------------------------------


def run(*command: object, log: Path) -> tuple[float, float]:
    """A command of the suite with one thread: (core-seconds, seconds). Raises DataError with its last words."""
    before, started = os.times(), time.perf_counter()
    with open(log, "w") as file:
        words = [sys.executable, *map(str, command)]
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        failed = subprocess.run(words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=env).returncode
    if failed:
        raise DataError(f"{' '.join(words[1:4])} failed", "\n  ".join(log.read_text().splitlines()[-6:]))
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return used, time.perf_counter() - started


def right_together(files: list[Path], gold: list[str]) -> float:
    """The share that is right of what several models hold for likeliest, whose probabilities are in files."""
    tables = [[line.split("\t") for line in file.read_text().splitlines()] for file in files]
    labels, right = tables[0][0][1:], 0
    for rows, label in zip(zip(*(table[1:] for table in tables), strict=True), gold, strict=True):
        sums = [sum(map(float, column)) for column in zip(*(row[1:] for row in rows))]
        right += labels[sums.index(max(sums))] == label
    return right / len(gold)


def evaluations(folder: Path) -> list[dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "eval"]


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(found: list[dict], options: BenchmarkOptions) -> str:
    """What was found, as Markdown."""
    of = {record["what"]: record for record in found}
    lines = [
        "",
        "| pretrained | untrained | unigram | trained | tokens read | core-seconds |",
        "|---|---|---|---|---|---|",
    ]
    for record in found:
        if "trained" in record:
            figures = [f"{record[name]:.2f}" if name in record else "" for name in ("untrained", "unigram", "trained")]
            tokens = f"{record['tokens'] / 1e6:.1f} M"
            lines.append(f"| {record['what']} | {' | '.join(figures)} | {tokens} | {record['core-seconds']:.0f} |")
    where = "of training held out" if options.tune else "of the test set"
    lines += [
        "",
        f"| task (share {where} right) | trained on | majority | tf-idf | BERT | BERTs together | T5 | T5s together |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in CORPORA:
        if name in of:
            ours = (of.get(f"{name}, {model}", {}) for model in ("BERT", "T5"))
            figures = [of[name]["majority"], of[name]["tf-idf"]]
            figures += [own.get(key) for own in ours for key in ("accuracy", "together")]
            lines.append(f"| {name} | {of[name]['train']:,} | {' | '.join(map(_share, figures))} |")
    in_table = {f"{name}, {model}" for name in CORPORA for model in ("BERT", "T5")}
    lines += [""] + [
        f"- {record['what']}: {_share(record['accuracy'])} ({_share(record['least'])} to {_share(record['most'])})"
        for record in found
        if "least" in record and record["what"] not in in_table
    ]
    return "\n".join(lines)


def _share(value: Optional[float]) -> str:
    return "" if value is None else f"{value:.3f}".removeprefix("0")


def _word(value) -> str:
    return f"{value:.3f}" if isinstance(value, float) and value < 10 else f"{value:,.0f}"


if __name__ == "__main__":
    run_main(main)
