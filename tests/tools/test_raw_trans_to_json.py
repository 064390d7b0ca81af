# SPDX-License-Identifier: Apache-2.0
"""Texts with blank lines between documents, against a slow reading of the whole file by Python's own text mode."""

import gzip
import json
import os
from collections import Counter
from pathlib import Path

import pytest

from megatron.errors import DataError, SettingsError, UsageError
from megatron.tools import raw_trans_to_json

TEXT = """The first document has
two lines, and \u4e2d\u6587.

short

   \t
The second one "quotes" \\ and more.
\u3000
END
A third one, behind a wide blank; END is within it.
"""


def slow(path: Path, splitter: str = "", least: int = 10) -> list[str]:
    documents, document = [], ""
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.strip() == splitter:
                documents.append(document)
                document = ""
            else:
                document += line if line.endswith("\n") else line + "\n"
    return [found for found in [*documents, document] if len(found) > least]


def texts(path: Path, key: str = "text") -> list[str]:
    return [json.loads(line)[key] for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.fixture
def raw(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "raw"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT, encoding="utf-8")
    (folder / "sub" / "b").write_bytes(b"A file of another\r\nsystem\r\n\r\nand of\ran older one\r\rwithout an end")
    os.symlink(folder, folder / "sub" / "circle")
    return folder


def test_all_its_flags(raw, capsys):
    line = '--input_path raw --output_path out/corpus --json_key words --doc_spliter "" --min_doc_length 10'
    words = line.replace('""', "").split()
    words.insert(words.index("--min_doc_length"), "")
    raw_trans_to_json.main([*words, "--workers", "2", "--log_interval", "1", "--no-shuffle"])
    assert texts(Path("out/corpus.jsonl"), "words") == slow(raw / "a.txt") + slow(raw / "sub" / "b")
    said = capsys.readouterr().out
    assert "6 documents in out/corpus.jsonl; 1 left out as too short" in said and "2 files, " in said
    assert sorted(os.listdir("out")) == ["corpus.jsonl"] and sorted(os.listdir("raw")) == ["a.txt", "sub"]


def test_it_is_shuffled_unless_asked_and_by_seed(raw):
    (raw / "many").write_text("\n\n".join(f"document number {number}" for number in range(50)))
    run = lambda out, *more: raw_trans_to_json.main(["--input_path", "raw", "--output_path", out, *more])
    run("plain.jsonl", "--no-shuffle")
    run("one.jsonl")
    run("other.jsonl", "--seed", "2", "--workers", "3")
    plain, one, other = (texts(Path(f"{name}.jsonl")) for name in ("plain", "one", "other"))
    assert Counter(plain) == Counter(one) == Counter(other)
    assert plain != one != other != plain


def test_unmerged_files_stand_under_the_names_of_their_inputs(raw):
    raw_trans_to_json.main("--input_path raw --output_path out --no-merge --min_doc_length 0".split())
    assert sorted(str(path) for path in Path("out").rglob("*.jsonl")) == ["out/a.txt.jsonl", "out/sub/b.jsonl"]
    assert texts(Path("out/a.txt.jsonl")) == slow(raw / "a.txt", least=0)


def test_another_splitter(raw):
    raw_trans_to_json.main("--input_path raw/a.txt --output_path out --doc_spliter END --no-shuffle".split())
    assert texts(Path("out.jsonl")) == slow(raw / "a.txt", "END") and len(slow(raw / "a.txt", "END")) == 2


def test_what_is_no_text_is_set_aside(raw, capsys):
    (raw / "a.txt").write_bytes(
        b"\xff\xfe is no text\nat all\n\nbut this is one\n\n"
        + b"too long\n" * 20_000
        + b"\n\nlast one is\n\n"
        + bytes(600_000)
    )
    (raw / "sub" / "b").write_bytes(gzip.compress(b"packed documents count"))
    (raw / "empty").touch()
    raw_trans_to_json.main("--input_path raw --output_path out --no-shuffle --max_doc_mb .1".split())
    assert texts(Path("out.jsonl")) == ["but this is one\n", "last one is\n", "packed documents count\n"]
    assert "1 set aside as not UTF-8; 2 set aside as too long" in capsys.readouterr().out


def test_it_says_what_is_wrong(raw):
    run = lambda line: raw_trans_to_json.main(line.split())
    with pytest.raises(UsageError, match="--output-path"):
        run("--input_path raw")
    with pytest.raises(SettingsError, match="--workers"):
        run("--input_path raw --output_path out --workers 0")
    with pytest.raises(DataError, match="no such file"):
        run("--input_path none --output_path out")
    (raw / "cut.gz").write_bytes(gzip.compress(b"abc" * 1000)[:-9])
    with pytest.raises(DataError, match="cut.gz: the compressed data is damaged or cut short"):
        run("--input_path raw --output_path out")
    assert os.listdir() == ["raw"]
