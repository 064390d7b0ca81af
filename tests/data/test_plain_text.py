# SPDX-License-Identifier: Apache-2.0
"""Plain text is input wherever JSON lines are: the same tokens, vocabulary and corpus as of JSON lines made by hand."""

import bz2
import contextlib
import gzip
import io
import json
import lzma
import random
import re
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import zstandard

import preprocess_data
from megatron.corpus.documents import read_documents
from megatron.corpus.driver import FINAL, run
from megatron.corpus.explain import explain
from megatron.corpus.plan import make_plan
from megatron.corpus.recipe import parse_recipe
from megatron.corpus.runners.local import run_local
from megatron.corpus.shards import InputPiece, lines_of
from megatron.data import file_formats
from megatron.data.evaluation_sets import read_items
from megatron.data.indexed import IndexedDataset
from megatron.data.json_input import find_sources
from megatron.data.origin import lines_at, open_origins, text_hash
from megatron.errors import DataError
from megatron.tools import train_tokenizer
from tests.data.test_archives import archive

pytestmark = pytest.mark.sampled(5)

PACK = dict(gz=gzip.compress, bz2=bz2.compress, xz=lzma.compress, zst=zstandard.ZstdCompressor().compress)
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 1000 --append-eod --workers".split()
POEMS = [f"{n} {n + 1}\n{n + 2} {n}" for n in range(300)]
BETWEEN = {"blank-line": "\n\n", "---": "\n---\n", r"\n***\n": "\n***\n"}  # separator -> what stands between documents


@pytest.fixture(autouse=True)
def notes_are_said_again():
    file_formats.note.cache_clear()


def read(text: str, separator: str | None) -> list[str]:
    stream, out = file_formats.PlainText(io.BytesIO(text.encode()), "x.txt", separator), b""
    while data := stream.read(1):
        out += data
    return [json.loads(line)["text"] for line in out.splitlines()]


def split(text: str, separator: str | None) -> list[str]:
    """The documents of a text, of which all is in memory."""
    if separator is None:
        return [text] if text.strip() else []
    pieces = re.split(r"\n(?:[^\S\n]*\n)+", text) if separator == "blank-line" else text.split(separator)
    pieces = [re.sub(r"^(?:[^\S\n]*\n)+", "", piece).rstrip() for piece in pieces]
    return [piece for piece in pieces if piece]


def test_documents_are_those_of_a_split_wherever_a_read_ends(monkeypatch):
    draw = random.Random(3)
    for _ in range(5000):
        monkeypatch.setattr(file_formats, "BLOCK", draw.randint(1, 5))
        text = "".join(draw.choices(["a", "b", "\n", "\n", " ", "\t", "\r\n", "==", "=", "\u00fc", '"', "\\"], k=12))
        separator = draw.choice([None, "blank-line", "==", "ab", "\n", "=a="])
        if wanted := split(text, separator):
            assert read(text, separator) == wanted, (text, separator)
        else:
            with pytest.raises(DataError, match="there is no text"):
                read(text, separator)


def preprocess(source, prefix, *more, workers: str = "2") -> list[bytes]:
    preprocess_data.main(["--input", str(source), "--output-prefix", str(prefix), *more, *NUMBERS, workers])
    return [Path(f"{prefix}_text_document{ending}").read_bytes() for ending in (".bin", ".idx")]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> list[bytes]:
    """Token files of the poems as JSON lines."""
    folder = tmp_path_factory.mktemp("lines")
    (folder / "poems.jsonl").write_text("".join(json.dumps(dict(text=poem)) + "\n" for poem in POEMS))
    return preprocess(folder / "poems.jsonl", folder / "out")


@pytest.mark.parametrize("workers", ["1", "3"])
def test_a_file_is_a_document(tmp_path, tokens, workers):
    folder = tmp_path / "poems"
    for number, poem in enumerate(POEMS):
        path = folder / f"{number // 100}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xef\xbb\xbf" * (number == 5) + poem.encode())
    assert preprocess(folder, tmp_path / "folder", workers=workers) == tokens
    assert preprocess(f"{folder}/*/*.txt", tmp_path / "glob", workers=workers) == tokens
    packed = archive({f"{number:03}.txt": poem.encode() for number, poem in enumerate(POEMS)})
    (tmp_path / "poems.tar.gz").write_bytes(gzip.compress(packed))
    assert preprocess(tmp_path / "poems.tar.gz", tmp_path / "archive", workers=workers) == tokens


@pytest.mark.parametrize("pack", ["", *PACK])
@pytest.mark.parametrize("separator", BETWEEN)
def test_a_separator_parts_documents(tmp_path, tokens, monkeypatch, pack, separator):
    monkeypatch.setattr(file_formats, "BLOCK", 97)
    whole = BETWEEN[separator].join(POEMS).encode()
    path = tmp_path / ("poems.txt" + f".{pack}" * bool(pack))
    path.write_bytes(PACK[pack](whole) if pack else whole)
    assert preprocess(path, tmp_path / "out", f"--document-separator={separator}") == tokens
    origins = open_origins(str(tmp_path / "out_text_document"), len(POEMS), verify=True)
    for number in (0, 7, 299):
        origin = origins[number]
        line = lines_at(origin.file, [origin.offset], origin.separator)[origin.offset]
        assert json.loads(line)["text"] == POEMS[number] and f"{text_hash(POEMS[number]):016x}" == origin.hash


def test_a_text_without_a_separator_is_one_document(tmp_path):
    (tmp_path / "poems.txt").write_text("\n\n".join(POEMS))
    preprocess(tmp_path / "poems.txt", tmp_path / "out")
    made = IndexedDataset(str(tmp_path / "out_text_document"))
    assert made.num_documents == 1 and made.num_tokens == 4 * len(POEMS) + 1


def test_the_same_vocabulary(tmp_path):
    words = [f"{a}{b}{c} " * 3 for a in "abcd" for b in "efgh" for c in "ijkl"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=word)) + "\n" for word in words))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("\n\n".join(words).encode()))
    made = []
    for name in ("a.jsonl", "a.txt.gz"):
        flags = f"--vocab-size 300 --document-separator blank-line --output {tmp_path / name}.d"
        train_tokenizer.main(["--input", str(tmp_path / name), *flags.split()])
        made.append([(tmp_path / f"{name}.d" / file).read_bytes() for file in ("vocab.json", "merges.txt")])
    assert made[0] != [b"", b""] and len(json.loads(made[0][0])) > 260
    parted = [line.rstrip() for line in words]  # white space at the end goes with a separator
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(dict(text=word)) + "\n" for word in parted))
    train_tokenizer.main(["--input", str(tmp_path / "b.jsonl"), "--vocab-size", "300", "--output", str(tmp_path / "b")])
    assert made[1] == [(tmp_path / "b" / file).read_bytes() for file in ("vocab.json", "merges.txt")]


def go(folder: Path, recipe: str):
    """The texts of a corpus, and its plan."""
    plan = make_plan(parse_recipe(recipe + "stages: [{filter: [ftfy]}]\n"), folder)
    run(plan, folder, partial(run_local, workers=1))
    shards = sorted((folder / FINAL).glob("*.jsonl.zst"))
    return [document["text"] for shard in shards for document in read_documents(shard)], plan


def test_a_recipe(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("\n--\n".join(POEMS[:200]))
    (tmp_path / "in/b.txt.zst").write_bytes(PACK["zst"]("\n--\n".join(POEMS[200:299]).encode()))
    (tmp_path / "in/c.txt").write_text(POEMS[299])
    (tmp_path / "in/d.txt").write_bytes(b"good\n\nbad \xff\n")
    head = f"input: {tmp_path / 'in'}\nshard-mb: 0.001\n"
    texts, plan = go(tmp_path / "out", f"{head}document-separator: '--'\n")
    assert texts == POEMS and len(plan.final) > 3
    [history] = explain(plan, tmp_path / "out", "a.txt:7")
    assert history.document["text"] == POEMS[6]
    texts, plan = go(tmp_path / "whole", head)
    assert texts[0] == "\n--\n".join(POEMS[:200]) and len(texts) == 3
    recipe = parse_recipe(f"{head}on-damaged: stop\nstages: [{{filter: [ftfy]}}]\n")
    with pytest.raises(DataError, match=r"d.txt, line 3: not UTF-8"):
        run(make_plan(recipe, tmp_path / "stop"), tmp_path / "stop", partial(run_local, workers=1))


def test_a_long_document_is_not_held_whole(tmp_path):
    path = tmp_path / "long.txt"
    path.write_bytes(b"0123456789abcde\n" * (1 << 20))
    tracemalloc.start()
    [line] = lines_of(InputPiece(str(path), None, path.stat().st_size), 100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert line.too_long and line.size > path.stat().st_size and peak < 8 << 20


WRONG = {
    "empty.txt": (b"", "empty.txt: the file is empty"),
    "blank.txt": (b" \n\n", "blank.txt: there is no text in it"),
    "latin.txt": ("eins\nzw\u00f6lf\n".encode("latin-1"), "latin.txt, line 2: not UTF-8"),
    "cut.txt.gz": (gzip.compress("eins\n\nzw\u00f6"[:-1].encode() + b"\xc3"), "cut.txt.gz, line 3: not UTF-8"),
    "late.txt": (b"word\n" * 100_000 + b"\xe9", "late.txt, line 100001: not UTF-8"),
    "program.txt": (b"\x7fELF\n\n\0\0", "program.txt, line 3: binary data"),
    "utf16.txt": ("text".encode("utf-16-le"), "utf16.txt, line 1: binary data"),
    "zip.txt": (b"PK\x03\x04", "zip.txt holds a zip archive"),
    "packed.txt": (gzip.compress(b"1 2"), "its name says plain text, its bytes are gzip"),
    "both.tar": (archive({"a.txt": b"1 2", "b.jsonl": b'{"text": "1"}'}), "b.jsonl comes after plain text"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_read(tmp_path, name):
    data, said = WRONG[name]
    (tmp_path / name).write_bytes(data)
    for command in (preprocess, lambda path, out: train_tokenizer.main(["--input", str(path), "--output", str(out)])):
        with pytest.raises(DataError) as error:
            command(tmp_path / name, tmp_path / "out")
        assert said in str(error.value) and error.value.do and error.value.code == 4
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_notes(tmp_path, capsys):
    """Each is said once, though some documents are looked at before the work begins."""
    (tmp_path / "a.txt").write_text("1 2\n3 4")
    (tmp_path / "b.jsonl").write_text('{"text": "1 2"}')
    (tmp_path / "b.txt").write_text('{"text": "1 2"}')
    said = {
        "a.txt": "the separator '##' does not occur in it: the file is one document",
        "b.jsonl": "the document separator has no effect: no file of the input is plain text",
        "b.txt": "begins as JSON lines do, and is read as plain text",
    }
    for name, words in said.items():
        with contextlib.suppress(DataError):  # a brace is no number
            preprocess(tmp_path / name, tmp_path / "out", "--document-separator", "##")
        assert capsys.readouterr().err.count(words) == 1


def test_text_beside_json_lines_says_something_of_them(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "1"}')
    (tmp_path / "README.txt").write_text("read me")
    assert [Path(source.path).name for source in find_sources([str(tmp_path)])] == ["a.jsonl"]
    assert "1 files of plain text next to the JSON lines are left out" in capsys.readouterr().err


def test_an_evaluation_set_has_an_item_a_line(tmp_path):
    (tmp_path / "set.txt").write_text("first item\nsecond item\n")
    assert list(read_items(str(tmp_path / "set.txt"))) == [["first item"], ["second item"]]
