# SPDX-License-Identifier: Apache-2.0
"""The last lines of a run, and runs that leave nothing."""

import gzip
import json

import pytest

from megatron.corpus.counts import summary
from megatron.corpus.driver import FINAL
from megatron.errors import DataError
from megatron.tools import corpus
from tests.corpus.conftest import final_texts


def at_least(characters: int) -> str:
    return f"filter: [{{'tests.corpus.toy_stages:TooShort': {{least: {characters}}}}}]"


def test_rules_beyond_the_eight_largest_are_shown_as_others():
    dropped = {f"rule{n}": dict(documents=n, bytes=1) for n in range(1, 13)}
    lines = summary({"00-shards": dict(documents=100, bytes=5e6), "01-filter": dict(documents=22, dropped=dropped)})
    assert lines[1:9] == [f"01-filter: rule{n} dropped {n}" for n in range(12, 4, -1)]
    assert lines[9:] == [f"01-filter: 4 others dropped {1 + 2 + 3 + 4}", "final: 22 documents"]


def test_cut_texts_are_told_and_an_empty_rule_is_not():
    cut = dict(documents=9, dropped=dict(a=dict(documents=0, bytes=0)), cut=3, passages=4, bytes_cut=12345)
    read = dict(documents=9, bytes=0)
    assert summary({"s": read, "x": cut})[1] == "x: cut 4 passages (12,345 bytes) out of 3 documents"
    assert summary({"s": read, "x": cut | dict(pieces=5)})[1].endswith("out of 3 documents, which became 5")
    assert summary({"s": read, "x": cut | dict(cut=0, passages=0)})[1] == "x: a dropped 0"


def written(folder, stages: str, *files) -> list[str]:
    """The command that runs a recipe."""
    text = f"input: [{', '.join(map(str, files))}]\nstages:\n  - {stages}\n"
    (folder / "recipe.yaml").write_text(text)
    return ["run", str(folder / "recipe.yaml"), "--output", str(folder / "out"), "--workers", "1"]


@pytest.mark.parametrize("then", ["", "  - tokenize: {tokenizer-type: NullTokenizer, vocab-size: 9}\n", "  - shuffle"])
def test_a_run_that_leaves_no_document_fails(tmp_path, then):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=f"text {n}")) + "\n" for n in range(5)))
    command = written(tmp_path, f"{at_least(1000)}\n{then}", tmp_path / "a.jsonl")
    for _ in range(2):  # and so does one that finds everything done
        with pytest.raises(DataError, match="no document is left") as error:
            corpus.main(command)
        assert "read: 5 documents" in error.value.why and "too_short dropped 5" in error.value.why
        assert not (tmp_path / "out" / FINAL).exists()
    assert json.loads((tmp_path / "out" / "status.json").read_text())["state"] == "failed"
    corpus.main(written(tmp_path, at_least(2), tmp_path / "a.jsonl"))
    assert len(final_texts(tmp_path / "out")) == 5
    with pytest.raises(DataError, match="no document is left"):
        corpus.main(written(tmp_path, at_least(999), tmp_path / "a.jsonl"))
    assert len(final_texts(tmp_path / "out")) == 5  # the corpus of before


def test_a_run_whose_inputs_are_all_damaged_fails(tmp_path):
    packed = gzip.compress(b"".join(json.dumps(dict(text=f"text {n}" * 99)).encode() + b"\n" for n in range(999)))
    for name in "ab":
        (tmp_path / f"{name}.jsonl.gz").write_bytes(packed[:-40])
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    with pytest.raises(DataError, match="no document is left") as error:
        corpus.main(written(tmp_path, "shuffle", *files))
    assert all(f"{path}: the compressed data is damaged" in error.value.why for path in files)
    files[0].write_bytes(packed)  # one of them is enough
    corpus.main(written(tmp_path, "shuffle", *files))
    assert len(final_texts(tmp_path / "out")) == 999


def test_a_run_whose_lines_are_all_set_aside_fails(tmp_path):
    (tmp_path / "a.jsonl").write_text("no json\n" * 7)
    with pytest.raises(DataError, match="no document is left") as error:
        corpus.main(written(tmp_path, "shuffle", tmp_path / "a.jsonl"))
    assert "lines set aside: 7 (not JSON 7)" in error.value.why
