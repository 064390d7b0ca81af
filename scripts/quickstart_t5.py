# SPDX-License-Identifier: Apache-2.0
"""What quickstart_t5.sh makes out of its corpus, and what it compares with: `python scripts/quickstart_t5.py STEP RUN`.

unigram: cross-entropy of a guess that looks at no text, into unigram.txt; loss: the model's beside it
gaps: sentences with a word left out, into gaps.txt; filled: what the model wrote there, beside the words that stood there
label: passages of eight packages with the package as their label; right: the model's share beside that of naive Bayes
"""

import hashlib
import json
import random
import re
import sys
from collections import Counter, defaultdict
from math import exp, log
from pathlib import Path

PACKAGES = "asyncio email http importlib tkinter turtle unittest xml".split()
GAP = "<extra_id_0>"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def unigram(run: Path) -> None:
    """Each token of a target as likely as it was among the targets of training."""
    train, held_out = (
        [token for sample in rows(run / f"{part}_samples.jsonl") for token in sample["labels"]]
        for part in ("train", "held_out")
    )
    counts = Counter(train)
    share = lambda token: (counts[token] + 0.5) / (counts.total() + 0.5 * 1200)
    (run / "unigram.txt").write_text(f"{sum(-log(share(token)) for token in held_out) / len(held_out)}\n")


def loss(run: Path) -> None:
    found = [record["lm loss"] for record in rows(run / "metrics.jsonl") if record["kind"] == "eval"]
    guess = float((run / "unigram.txt").read_text())
    print(f"  on held-out text: loss {found[-1]:.2f}, as unsure as among {exp(found[-1]):.0f} tokens")
    print(f"  who only knows how often each token comes: {guess:.2f}, {exp(guess):.0f} tokens")


def gaps(run: Path) -> None:
    draw, found = random.Random(1), []
    for page in rows(run / "held_out.jsonl"):
        for text in re.split(r"\n\n+", page["text"]):
            text = " ".join(text.split())
            words = [word for word in re.finditer(r"(?<= )[a-z]+(?= )", text) if word.start() > 15]
            if 60 < len(text) < 120 and re.match(r"[A-Z].*\.$", text) and words:
                word = draw.choice(words)
                found.append((text[: word.start() - 1] + GAP + text[word.end() :], word.group()))
    found = draw.sample(found, min(200, len(found)))
    (run / "gaps.txt").write_text("".join(f"{text}\n" for text, _ in found))
    (run / "gaps_words.txt").write_text("".join(f"{word}\n" for _, word in found))


def filled(run: Path) -> None:
    words, told = (run / "gaps_words.txt").read_text().split(), rows(run / "filled.jsonl")
    own = [one["text"].partition(GAP)[2].partition("<extra_id_")[0].strip() for one in told]
    right, wrong = [], []
    for one, wrote, word in zip(told, own, words):
        line = f"| {one['prompt'].replace(GAP, ' ____')} -> {wrote}"
        right.append(line) if wrote == word else wrong.append(f"{line} (there stood: {word})")
    print(*right[:4], *wrong[:4], sep="\n")
    [(common, count)] = Counter(words).most_common(1)
    shares = f"{len(right) / len(words):.0%} of {len(words)} gaps; {common!r} everywhere: {count / len(words):.0%}"
    print(f"the very word in {shares}")
    if len(right) <= count:
        print("so it has not learned yet to look at what stands around a gap: that takes more steps than these")


def label(run: Path) -> None:
    """Which of the two files a passage is in depends on its text alone, so none is in both."""
    parts = {"train": [], "valid": []}
    for page in rows(run / "train.jsonl") + rows(run / "held_out.jsonl"):
        package = page["source"].removeprefix("docs/").partition(".")[0]
        if package in PACKAGES:
            for passage in page["text"].split("\n\n"):
                text = " ".join(passage.replace(package, "").split())
                held_out = hashlib.sha256(text.encode()).digest()[0] < 40
                if len(text) > 80:
                    parts["valid" if held_out else "train"].append(dict(text=text, label=package))
    for part, kept in parts.items():
        (run / f"task_{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        print(f"{len(kept):,} passages in {run / f'task_{part}.jsonl'}")


def right(run: Path) -> None:
    train, valid = rows(run / "task_train.jsonl"), rows(run / "task_valid.jsonl")
    labels = Counter(row["label"] for row in valid)
    told = rows(run / "tuned" / "metrics.jsonl")
    best = [record for record in told if record["kind"] == "eval" and record["final"] and "accuracy" in record][-1]
    one = max(labels.values()) / labels.total()
    print(f"  right: {best['accuracy']:.1%} of {labels.total()} passages; {one:.1%} are of one package")
    counted = naive_bayes(train, valid)
    print(f"  who counts the words of each package (naive Bayes): {counted:.1%}; names tell most of it")


def naive_bayes(train: list[dict], valid: list[dict]) -> float:
    """The share it gets right, of passages as sums of their words' logarithms."""
    words_of, passages = defaultdict(Counter), Counter()
    for row in train:
        words_of[row["label"]].update(re.findall(r"\w+", row["text"].lower()))
        passages[row["label"]] += 1
    size = len(set().union(*words_of.values()))

    def score(label: str, text: str) -> float:
        counts, total = words_of[label], words_of[label].total()
        words = re.findall(r"\w+", text.lower())
        return log(passages[label]) + sum(log((counts[word] + 0.5) / (total + 0.5 * size)) for word in words)

    guessed = (max(passages, key=lambda label: score(label, row["text"])) for row in valid)
    return sum(guess == row["label"] for guess, row in zip(guessed, valid)) / len(valid)


if __name__ == "__main__":
    {step.__name__: step for step in (unigram, loss, gaps, filled, label, right)}[sys.argv[1]](Path(sys.argv[2]))
