# SPDX-License-Identifier: Apache-2.0
"""Parquet and Arrow files and datasets folders as input, against the JSON lines of the same rows."""

import json
import sys

import pytest

import preprocess_data
from megatron.data.json_input import find_sources, read_blocks
from megatron.data.origin import lines_at
from megatron.errors import DataError, MissingPackage

ROWS = [dict(id=n, body=f"row {n} \u4e2d\r\n" * (n % 5), parts=[f"one {n}.", "Two."], raw=b"\xff") for n in range(2500)]
VOCABULARY = "--tokenizer-type NullTokenizer --vocab-size 500".split()


def write(path, kind, rows=ROWS):
    """A file of several batches, as pandas, Spark or `datasets` write it."""
    pyarrow = pytest.importorskip("pyarrow", reason="reads and writes Parquet")
    parquet, ipc = (pytest.importorskip(f"pyarrow.{name}") for name in ("parquet", "ipc"))

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    if kind == "parquet":
        parquet.write_table(table, path, row_group_size=700)
        return path
    with (ipc.new_stream if kind == "stream" else ipc.new_file)(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=700)
    return path


def lines(path, columns=None):
    return [
        line
        for block, _ in read_blocks(find_sources([str(path)], None, columns)[0], 1 << 12)
        for line in block.splitlines()
    ]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_rows_are_json_lines(tmp_path, kind):
    path = write(tmp_path / "any.name", kind)  # the bytes tell, not the name
    assert [json.loads(line) for line in lines(path, ["body", "id"])] == [
        dict(body=r["body"], id=r["id"]) for r in ROWS
    ]
    assert [*json.loads(lines(path)[7])] == ["id", "body", "parts"]  # bytes are no text
    whole = b"".join(line + b"\n" for line in lines(path, ["body"]))
    at = whole.index(lines(path, ["body"])[1999])
    assert json.loads(lines_at(str(path), [at], None, ["body"])[at]) == dict(body=ROWS[1999]["body"])
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(DataError, match="damaged or cut short"):
        lines(path)


@pytest.mark.parametrize("workers", ["1", "3"])
def test_tokens_are_those_of_the_same_json_lines(tmp_path, workers, capsys):
    numbers = [dict(text=" ".join(str(n % 97) for n in range(row % 30)), n=row) for row in range(3000)]
    for part in range(2):
        write(
            tmp_path / "hub" / f"train-0000{part}-of-00002.parquet",
            "parquet",
            numbers[1500 * part : 1500 * part + 1500],
        )
    write(tmp_path / "hub" / "test-00000-of-00001.parquet", "parquet", numbers[:9])
    (tmp_path / "plain.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbers))
    for name in ("hub", "plain.jsonl"):
        flags = ["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / name[:3]), *VOCABULARY]
        preprocess_data.main([*flags, "--workers", workers])
    for ending in ("bin", "idx"):
        name = f"_text_document.{ending}"
        assert (tmp_path / f"hub{name}").read_bytes() == (tmp_path / f"pla{name}").read_bytes()
    assert "only train is taken (test: name the files" in capsys.readouterr().err


def test_a_saved_datasets_folder(tmp_path):
    """As `DatasetDict.save_to_disk` writes it: files in the order of state.json, and a cache beside them."""
    for split, count in (("train", 2), ("validation", 1)):
        folder = tmp_path / "saved" / split
        files = [f"data-{part:05}-of-{count:05}.arrow" for part in range(count)][::-1]
        for part, name in enumerate(files):
            write(folder / name, "stream", [dict(text=f"{split} {part}")])
        write(folder / "cache-0123.arrow", "stream", [dict(text="of a map")])
        (folder / "state.json").write_text(json.dumps(dict(_data_files=[dict(filename=name) for name in files])))
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    found = find_sources([str(tmp_path / "saved")])
    assert [lines(source.path) for source in found] == [[b'{"text": "train 0"}'], [b'{"text": "train 1"}']]
    assert len(find_sources([str(tmp_path / "saved" / "validation")])) == 1  # named by itself
    state = tmp_path / "saved" / "train" / "state.json"
    state.write_text(json.dumps(dict(_data_files=[], _indices_data_files=[dict(filename="indices.arrow")])))
    with pytest.raises(DataError, match="a choice of rows"):
        find_sources([str(tmp_path / "saved")])


def test_mistakes_are_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", "parquet")
    with pytest.raises(DataError, match="no column 'bodi'; did you mean body") as error:
        lines(path, ["bodi"])
    assert "id, body, parts, raw" in str(error.value) and "--json-keys" in str(error.value)
    (tmp_path / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="not what its name says"):
        find_sources([str(tmp_path / "pointer.parquet")])


def test_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(600))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match="needs the package pyarrow") as error:
        lines(tmp_path / "a.parquet")
    assert "pip install pyarrow" in str(error.value)
