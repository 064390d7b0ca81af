# SPDX-License-Identifier: Apache-2.0
"""The filters of documents beside what Megatron-LM's cleanup_dataset does, on the same documents, alternating in one run.

    python benchmarks/cleaning.py                                   # documents made of Python's own library
    python benchmarks/cleaning.py --english raw.jsonl --chinese zh.jsonl --vocab-file vocab.json --merge-file merges.txt

Part one tells languages of short texts that are cut out of the given ones, by eldc and by langdetect. Part two cleans: the
peer is the original's flow written anew (ftfy.fix_text, langdetect, tokens of texts with fewer than 1,024 characters) in
one process; beside it the filters gate, language, ftfy and megatron, and then all sets of rules too. Both read lines and
give lines. Times are CPU seconds of one process, medians of the repeats; the ratio is that of the pairs. Decisions and
texts are compared document by document.
"""

import argparse
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.corpus.filters import build_filter  # noqa: E402
from megatron.corpus.line_files import LineBlock, LineCleaner  # noqa: E402
from megatron.data.json_input import find_sources, read_blocks  # noqa: E402

RULES = ("gopher_repetition", "gopher", "c4", "fineweb")


def main() -> None:
    arguments = parse_arguments()
    english = list(islice(texts_of(arguments.english), 20_000))
    chinese = list(islice(texts_of(arguments.chinese), 5_000)) if arguments.chinese else []
    prose = list(texts_of(arguments.prose)) if arguments.prose else english
    languages(prose, chinese, arguments.texts, arguments.repeats)
    documents = sample(english, arguments.megabytes)
    cleaning(documents, arguments)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--english", help="JSON lines (default: Python's library)")
    parser.add_argument("--chinese", help="JSON lines; without them, short texts are English alone")
    parser.add_argument("--prose", help="JSON lines that short English texts are cut out of (default: --english)")
    parser.add_argument("--vocab-file", help="default: pieces are counted for tokens, on both sides")
    parser.add_argument("--merge-file")
    parser.add_argument("--texts", type=int, default=1000, help="short texts of each kind")
    parser.add_argument("--megabytes", type=float, default=2.0, help="of documents to clean")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def texts_of(path: str | None) -> Iterator[str]:
    """Texts of documents; of Python's library where no file is given: sources are English enough for a try."""
    if path is None:
        for file in sorted(Path(json.__file__).parent.parent.glob("*.py")):
            yield file.read_text(encoding="utf-8", errors="replace")
        return
    for source in find_sources([path]):
        for data, _ in read_blocks(source, 1 << 20):
            for line in data.split(b"\n"):
                if line:
                    yield json.loads(line)["text"]


# ---------------------------------------------------------------------------------------------------- languages


def languages(english: list[str], chinese: list[str], count: int, repeats: int) -> None:
    """Texts a second and accuracy of both detectors on each set."""
    sets = {
        f"{n} English words": ("en", cut(english, rf"(?:[A-Za-z]+,? ){{{n - 1}}}[A-Za-z]+", count)) for n in (6, 15)
    }
    if chinese:
        for n in (6, 20):
            sets[f"{n} Chinese characters"] = ("zh", cut(chinese, f"[\u4e00-\u9fff]{{{n}}}", count))
    detectors = {
        name: build_filter("language", detector=name, keep=["en", "zh"]).detect for name in ("eldc", "langdetect")
    }
    print(f"{'language of short texts':26} {'texts':>6} {'eldc':>22} {'langdetect':>22}   speed of eldc over it")
    for name, (language, texts) in sets.items():
        times = {detector: [] for detector in detectors}
        right = {}
        for detect in detectors.values():
            detect("This is a text to load the model with.")
        for _ in range(repeats):
            for detector, detect in detectors.items():
                start = time.process_time()
                found = [detect(text)[0] for text in texts]
                times[detector].append(time.process_time() - start)
                right[detector] = sum(told.startswith(language) for told in found) / len(texts)
        cells = [f"{right[d]:6.3f} {len(texts) / statistics.median(times[d]):11,.0f}/s" for d in detectors]
        ratio = statistics.median(b / a for a, b in zip(*times.values()))
        print(f"{name:26} {len(texts):6} {cells[0]:>22} {cells[1]:>22}   {ratio:.0f} x")


def cut(texts: list[str], pattern: str, count: int) -> list[str]:
    """Pieces of texts that match, one a text at most, by chance but the same each time."""
    chance, found = random.Random(1234), []
    for text in chance.sample(texts, len(texts)):
        start = chance.randrange(max(1, len(text) - 500))
        pieces = re.findall(pattern, text[start : start + 500])
        if pieces:
            found.append(chance.choice(pieces))
        if len(found) == count:
            break
    return found


# ---------------------------------------------------------------------------------------------------- cleaning


def sample(texts: list[str], megabytes: float) -> list[str]:
    """Documents by chance, but the same each time."""
    chance, chosen, size = random.Random(1234), [], 0
    for text in chance.sample(texts, len(texts)):
        chosen.append(text)
        size += len(text)
        if size >= megabytes * 1e6:
            break
    return chosen


def original(count: Callable[[str], int]) -> Callable[[str], tuple[str, str]]:
    """line -> (what becomes of its document, its text), as the original's flow decides."""
    import ftfy
    import langdetect

    langdetect.DetectorFactory.seed = 0

    def flow(line: str) -> tuple[str, str]:
        record = json.loads(line)
        text = record["text"] = ftfy.fix_text(record["text"])
        try:
            if langdetect.detect(text) != "en":
                return "language", ""
        except langdetect.LangDetectException:
            return "language", ""
        if len(text) < 8 * 128 and count(text) < 128:
            return "length", ""
        json.dumps(record, ensure_ascii=False).encode()
        return "kept", text

    return flow


def cleaning(documents: list[str], arguments: argparse.Namespace) -> None:
    vocabulary = dict(vocab_file=arguments.vocab_file, merge_file=arguments.merge_file)
    length = build_filter("megatron", **vocabulary)
    theirs = original(length.count)
    basic = [(name, build_filter(name)) for name in ("gate", "language", "ftfy")] + [("length", length)]
    ours = {"gate, language, ftfy, length": basic, "... and without the gate": basic[1:]}
    ours["... and all rules"] = basic + [(name, build_filter(name)) for name in RULES]
    lines = [json.dumps(dict(text=text), ensure_ascii=False).encode() + b"\n" for text in documents]
    size = sum(map(len, lines)) / 1e6
    for filters in ours.values():
        LineCleaner(filters)(LineBlock(0, 0, b"".join(lines[:20])))  # loads what is loaded once
    theirs(lines[0].decode())
    times = {name: [] for name in ["the original's flow", *ours]}
    for _ in range(arguments.repeats):
        start = time.process_time()
        decisions = [theirs(line.decode()) for line in lines]
        times["the original's flow"].append(time.process_time() - start)
        for name, filters in ours.items():
            start = time.process_time()
            LineCleaner(filters)(LineBlock(0, 0, b"".join(lines)))
            times[name].append(time.process_time() - start)
    print(f"\ncleaning {len(documents)} documents, {size:.1f} MB, one process, medians of {arguments.repeats}")
    print(f"{'':30} {'seconds':>8} {'MB/s':>7}   speed over the original's flow")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        ratio = statistics.median(other / own for other, own in zip(times["the original's flow"], seconds))
        print(f"{name:30} {median:8.2f} {size / median:7.2f}   {ratio:.1f} x")
    compare(documents, basic, decisions)


def compare(documents: list[str], filters: list, decisions: list[tuple[str, str]]) -> None:
    """Count what both sides said of each document, and where they kept other texts."""
    table, other_texts = Counter(), 0
    for text, (theirs, kept) in zip(documents, decisions):
        document = dict(text=text)
        ours = "kept"
        for name, keep in filters:
            document = keep(document).document
            if document is None:
                ours = name
                break
        table[theirs, ours] += 1
        other_texts += ours == theirs == "kept" and document["text"] != kept
    agree = sum(count for (theirs, ours), count in table.items() if (theirs == "kept") == (ours == "kept"))
    print(f"\nkept or dropped alike: {agree} of {len(documents)}; texts that both keep and that differ: {other_texts}")
    for (theirs, ours), count in sorted(table.items(), key=lambda item: -item[1]):
        print(f"  original: {theirs:9} here: {ours:9} {count:6}")


if __name__ == "__main__":
    main()
