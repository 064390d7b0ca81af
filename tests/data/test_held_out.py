# SPDX-License-Identifier: Apache-2.0
"""Text of one's own in two files: nothing is lost, nothing is in both, and the share is about what was asked for."""

import json

import pytest

from megatron.errors import DataError, SettingsError
from megatron.tools import get_sample_data
from megatron.tools.get_sample_data import cut


def divide(folder, *flags: str) -> list[list[str]]:
    """The texts of both files."""
    paths = [folder / "made" / name for name in ("train.jsonl", "held_out.jsonl")]
    get_sample_data.main(["--output", str(paths[0]), "--held-out", str(paths[1]), *flags])
    return [[json.loads(line)["text"] for line in path.read_text().splitlines()] for path in paths]


def test_documents(tmp_path):
    texts = [f"text {number % 400}" for number in range(1000)]  # some of them twice or thrice
    (tmp_path / "a.txt").write_text("\n==\n".join(texts[:500]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts[500:]))
    flags = ["--input", str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl"), "--document-separator==="]
    train, held_out = divide(tmp_path, *flags)
    assert sorted(train + held_out) == sorted(texts) and not set(train) & set(held_out)
    assert 45 <= len(held_out) <= 55
    assert divide(tmp_path, *flags) == [train, held_out]
    assert 180 <= len(divide(tmp_path, *flags, "--held-out-percent", "20")[1]) <= 220


def test_one_book(tmp_path, capsys):
    book = "".join(f"This is line {number}.\n" for number in range(2000))
    (tmp_path / "book.txt").write_text(book)
    [train], [held_out] = divide(tmp_path, "--input", str(tmp_path / "book.txt"))
    assert train + held_out == book and train.endswith("\n") and held_out.startswith("This is line 19")
    assert 0.05 <= len(held_out) / len(book) < 0.051
    assert f"1 documents, {len(held_out) / 1e3:.1f} kB of text" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a" * 1000, "\n" + "a" * 999, "word " * 200, "\u4f60" * 1000, "\u4f60\n" * 500])
def test_a_cut_is_near_its_place(text):
    train, held_out = cut(text, 5)
    assert train + held_out == text and 0.05 <= len(held_out) / len(text) <= 0.1
    assert not text[1:].strip("a").strip("\u4f60") or train[-1].isspace()


def test_mistakes(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match="too little text to hold out a part"):
        divide(tmp_path, "--input", str(tmp_path / "x.txt"))
    assert list((tmp_path / "made").iterdir()) == []
    with pytest.raises(SettingsError, match="--input needs --held-out"):
        get_sample_data.main(["--output", str(tmp_path / "o.jsonl"), "--input", str(tmp_path / "x.txt")])
