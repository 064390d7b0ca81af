# SPDX-License-Identifier: Apache-2.0
"""Write a small corpus without a download: the documentation and sources that come with every Python installation.

    python -m megatron.tools.get_sample_data --output sample/train.jsonl --held-out sample/held_out.jsonl
    python -m megatron.tools.get_sample_data --output sample/train.jsonl --held-out sample/held_out.jsonl --input book.txt

writes loose JSON lines {"text": ..., "source": ...} of three kinds: language topics (the pages of `help()`), one page of
documentation per standard-library module (its docstrings), and the modules' sources. The same Python version gives the
same bytes. A module's documentation and source go to the same side of the split, so that held-out text is never
seen in training.

With --input it divides your own text. The text of a document decides its side, so equal documents are on the same side. If
that would hold out fewer than FEWEST documents, as with a single book, the last part of each document is held out instead.

    python -m megatron.tools.get_sample_data --output data/

writes a folder that is ready for training, in the formats of PaddleNLP and Megatron-LM:

    data/sample_ids.npy, sample_idx.npz             `--input_dir data` and a YAML's `input_dir` read these
    data/megatron/sample_text_document.bin, .idx    the same tokens for `--data-path data/megatron/sample_text_document`
    data/vocab.json, merges.txt                     the vocabulary, trained on the text: --vocab-file, --merge-file
    data/sample.jsonl                               the text
"""

import ast
import contextlib
import hashlib
import io
import json
import os
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.data.file_formats import SEPARATOR_HELP
from megatron.data.json_input import STDIN, Source, find_sources, read_texts
from megatron.data.origin import text_hash
from megatron.errors import DataError, SettingsError, run_main
from megatron.settings.parse import parse
from megatron.settings.schema import setting
from megatron.storage.durable import replace_file, whole_file
from megatron.telemetry.figures import size as in_units

KINDS = ("topics", "docs", "sources")
# Tests, generated tables, and packages that differ between distributions.
LEFT_OUT = set(
    """
    site-packages dist-packages test tests idle_test __pycache__ encodings pydoc_data lib2to3 ensurepip this.py
    """.split()
)
SHORTEST = 200  # characters; shorter pages are skipped


@dataclass(frozen=True)
class SampleDataOptions:
    """Options for what to write, and where."""

    output: str = setting("file for the training documents, .jsonl; or a folder for text, vocabulary and token files")
    held_out: Optional[str] = setting("file for documents kept from training, for evaluation", None)
    held_out_percent: float = setting("share of documents that are held out", 5.0)
    input: Optional[list[str]] = setting("divide this text, .txt or JSON lines, and take nothing of Python's", None)
    document_separator: Optional[str] = setting(SEPARATOR_HELP, None)
    kinds: tuple[str, ...] = setting("what to take: topics docs sources", KINDS)
    max_megabytes: float = setting("stop after this much text", 20.0)
    vocab_size: int = setting("tokens of the vocabulary that a folder gets", 8192)


class Document(NamedTuple):
    """A text with its `source`; documents of one `group` (a module) stay on the same side of the split."""

    text: str
    source: str
    group: str


def main(argv: list[str]) -> None:
    settings = parse(
        argv,
        dict(sample=SampleDataOptions),
        prog="python -m megatron.tools.get_sample_data",
        description="Write a small corpus from what comes with Python.",
        common=tuple(SampleDataOptions.__dataclass_fields__),
    )["sample"]
    unknown = set(settings.kinds) - set(KINDS)
    if unknown:
        raise SettingsError(f"--kinds {' '.join(sorted(unknown))}: unknown", do=f"known: {' '.join(KINDS)}")
    folder = Path(settings.output)
    if settings.input:
        if not settings.held_out or settings.input == [STDIN]:
            raise SettingsError("--input needs --held-out, and files: they are read twice", do="--held-out FILE")
        sources = find_sources(settings.input, settings.document_separator)
        return print_counts(hold_out(sources, settings.output, settings.held_out, settings.held_out_percent))
    if folder.is_dir() or settings.output.endswith(os.sep) or not folder.suffix:
        return make_ready(folder, settings)
    print_counts(write_corpus(settings))


def print_counts(counts: dict[str, tuple[int, int]]) -> None:
    """Print the counts of each file that was written."""
    for path, (documents, size) in counts.items():
        print(f"{path}: {documents} documents, {in_units(size)} of text")


def make_ready(folder: Path, settings: SampleDataOptions) -> None:
    """Write text, vocabulary and token files of both formats to a folder, with the commands for any text."""
    from megatron.data.merge import merge
    from megatron.tools import create_pretraining_data, train_tokenizer

    text, prefix = str(folder / "sample.jsonl"), str(folder / "sample")
    print_counts(write_corpus(replace(settings, output=text)))
    with contextlib.redirect_stdout(io.StringIO()):
        train_tokenizer.main(["--input", text, "--vocab-size", str(settings.vocab_size), "--output", str(folder)])
        words = ["--model_name", str(folder), "--tokenizer_name", "GPTTokenizer", "--append_eos"]
        create_pretraining_data.main(
            ["--input_path", text, "--output_prefix", prefix, "--log_interval", "1000000", *words]
        )
    made = merge([prefix], str(folder / "megatron" / "sample_text_document"))
    print(f"{prefix}_ids.npy and _idx.npz: {made.documents} documents, {made.tokens} tokens")
    print(f"{folder / 'megatron' / 'sample_text_document'}.bin and .idx: the same")
    print(f"train with: --input_dir {folder} --vocab-file {folder / 'vocab.json'} --merge-file {folder / 'merges.txt'}")


def write_corpus(settings: SampleDataOptions) -> dict[str, tuple[int, int]]:
    """Write the files. Returns path -> (documents, bytes of text). Raises DataError if there is no text."""
    share = settings.held_out_percent if settings.held_out else 0.0
    sides: dict[str, list[Document]] = {settings.output: []}
    if settings.held_out:
        sides[settings.held_out] = []
    room = settings.max_megabytes * 1e6
    for document in documents(settings.kinds):
        if room <= 0:
            break
        room -= len(document.text.encode())
        sides[settings.held_out if is_held_out(document.group, share) else settings.output].append(document)
    if not sides[settings.output]:
        raise DataError(
            f"no text was found for --kinds {' '.join(settings.kinds)}",
            f"looked in {sysconfig.get_path('stdlib')}",
            "install Python's standard library in full",
        )
    for path, chosen in sides.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps(dict(text=one.text, source=one.source), ensure_ascii=False) + "\n" for one in chosen)
        replace_file(Path(path), "".join(lines).encode())
    return {path: (len(chosen), sum(len(d.text.encode()) for d in chosen)) for path, chosen in sides.items()}


def is_held_out(group: str, percent: float) -> bool:
    """Whether a group of documents is held out. Depends only on its name.

    >>> is_held_out("json", 0.0), is_held_out("json", 100.0)
    (False, True)
    """
    return int(hashlib.sha256(group.encode()).hexdigest()[:8], 16) / 2**32 * 100 < percent


def documents(kinds=KINDS) -> Iterator[Document]:
    """All documents of these kinds, prose first, in an order that depends only on the Python version."""
    if "topics" in kinds:
        yield from topics()
    modules = list(read_modules()) if {"docs", "sources"} & set(kinds) else []
    for kind, text_of in (("docs", documentation), ("sources", lambda name, source: source)):
        for name, source in modules if kind in kinds else ():
            if len(text := text_of(name, source)) >= SHORTEST:
                yield Document(text, f"{kind}/{name}", name)


def topics() -> Iterator[Document]:
    """The pages of `help("if")`, `help("operators")` and so on."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError:  # a separate package in some distributions
        return
    for name in sorted(pages):
        if len(pages[name]) >= SHORTEST:
            yield Document(pages[name].strip() + "\n", f"topics/{name}", f"topics/{name}")


def read_modules() -> Iterator[tuple[str, str]]:
    """(dotted name, source text) of the standard library's modules, sorted by path; unreadable ones are skipped."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).parts
        if LEFT_OUT & set(parts) or any(part.startswith("config-") for part in parts):
            continue
        try:
            with tokenize.open(path) as file:  # as Python itself decodes it
                source = file.read()
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        yield name.removesuffix(".__init__"), source


def documentation(name: str, source: str) -> str:
    """Join a module's docstrings into a page: the module, then its classes and functions in the order of the source.

    >>> print(documentation("m", "'''Adds.'''\\ndef add(a, b=1):\\n    '''Sum of two.'''"), end="")
    m: Adds.
    <BLANKLINE>
    add(a, b=1)
        Sum of two.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in string literals
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return ""
    head = ast.get_docstring(tree)
    entries = [f"{name}: {head.strip()}" if head else name]
    entries += _entries(tree, "")
    return "\n\n".join(entries) + "\n" if head or len(entries) > 1 else ""


def _entries(node: ast.AST, prefix: str) -> list[str]:
    """The signature and indented docstring of each documented class and function in `node`."""
    entries = []
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        text = ast.get_docstring(child)
        title = f"{prefix}{child.name}"
        if text and text.strip():
            shown = f"class {title}" if isinstance(child, ast.ClassDef) else f"{title}({ast.unparse(child.args)})"
            entries.append(shown + "\n" + "\n".join(f"    {line}".rstrip() for line in text.strip().splitlines()))
        if isinstance(child, ast.ClassDef):
            entries += _entries(child, f"{title}.")
    return entries


FEWEST = 5  # documents; with fewer, a single odd one would dominate the evaluation


def hold_out(sources: list[Source], train: str, held_out: str, percent: float) -> dict[str, tuple[int, int]]:
    """Write both files atomically as JSON lines. Returns path -> (documents, bytes of text).

    The sources are read twice, a document at a time. Raises DataError for input without text.
    """
    hashes = sorted(text_hash(text) for text in read_texts(sources))
    count = round(len(hashes) * percent / 100)
    last = hashes[count - 1] if count >= FEWEST else None  # the largest hash that is held out
    counts = {train: (0, 0), held_out: (0, 0)}
    for path in counts:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    with whole_file(train) as train_file, whole_file(held_out) as held_out_file:
        files = {train: train_file, held_out: held_out_file}
        for text in read_texts(sources):
            if last is not None:
                parts = [(held_out if text_hash(text) <= last else train, text)]
            else:
                parts = zip((train, held_out), cut(text, percent), strict=True)
            for path, part in parts:
                if part.strip():
                    files[path].write(json.dumps(dict(text=part), ensure_ascii=False).encode() + b"\n")
                    documents, size = counts[path]
                    counts[path] = documents + 1, size + len(part.encode())
        if not counts[train][0] or not counts[held_out][0]:
            what = " ".join(source.path for source in sources)
            why = f"{counts[train][0]} documents to train on, {counts[held_out][0]} held out"
            raise DataError(f"{what}: too little text to hold out a part of it", why, "give more text")
    return counts


def cut(text: str, percent: float) -> Iterator[str]:
    """Split a text; the second part has about `percent` of it. Cuts at the end of a line if one is near, else at a space.

    >>> list(cut("one two\\nthree\\nfour five six", 40))
    ['one two\\nthree\\n', 'four five six']
    """
    place = round(len(text) * (1 - percent / 100))
    nearest = max(0, 2 * place - len(text))  # as much again, at most
    ends = (text.rfind(mark, nearest, place) + 1 for mark in "\n ")
    place = next(filter(None, ends), place)
    yield text[:place]
    yield text[place:]


if __name__ == "__main__":
    run_main(main)
