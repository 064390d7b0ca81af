# SPDX-License-Identifier: Apache-2.0
"""merge_datasets.py: equal to preprocessing the concatenated text, whatever the folders look like."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

import merge_datasets
import preprocess_data
from megatron.data import merge as merge_module
from megatron.data.indexed import IndexedDataset, write_index
from megatron.data.workspace import Workspace
from megatron.errors import DataError, Locked
from megatron.tools import verify_data

pytestmark = pytest.mark.sampled(5)

TEXTS = ["1 2 3", "", "4", "5 6 7 8 9", "", "10 11", "12", "13 14 15", ""]


def preprocess(folder, name, texts, vocab_size=100, *more):
    """A dataset of texts that are numbers; returns its prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocab_size), "--append-eod"]
    preprocess_data.main(["--input", str(path), "--output-prefix", str(folder / name), *tokenizer, *more])
    return str(folder / f"{name}_text_document")


def contents(prefix):
    return [open(f"{prefix}{suffix}", "rb").read() for suffix in (".bin", ".idx", ".stats.json")]


@pytest.fixture
def parts(tmp_path):
    """Three datasets in folders whose sorted order is the order of TEXTS, and one of TEXTS as a whole."""
    preprocess(tmp_path / "parts" / "a" / "deep", "p", TEXTS[:4])
    preprocess(tmp_path / "parts", "p_10", TEXTS[4:7])
    preprocess(tmp_path / "parts", "p_9", TEXTS[7:])
    return tmp_path / "parts", preprocess(tmp_path / "whole", "whole", TEXTS)


def test_equals_preprocessing_the_whole(parts, tmp_path):
    folder, whole = parts
    merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    assert contents(tmp_path / "merged") == contents(whole)


def test_files_that_are_replaced_are_named(parts, tmp_path, capsys):
    words = ["--input", str(parts[0]), "--output-prefix", str(tmp_path / "merged")]
    merge_datasets.main(words)
    assert "replaces" not in capsys.readouterr().out
    merge_datasets.main(words)
    assert f"note: replaces {tmp_path}/merged (21 tokens)\n" in capsys.readouterr().out


def test_prefixes_instead_of_folders(parts, tmp_path, monkeypatch):
    folder, whole = parts
    monkeypatch.chdir(tmp_path)  # a bare prefix has no folder
    given = [str(folder / "p_9_text_document.idx"), str(folder / "a"), str(folder / "p_10_text_document")]
    merge_datasets.main(["--input", *given, "--output-prefix", "merged"])
    assert contents("merged") == contents(whole)


@pytest.mark.parametrize("names, is_named", [("p_10 p_9", False), ("p_9 p_10", True), ("p_10 p_10", True)])
def test_another_order_than_the_one_that_was_given_is_named(names, is_named, parts, tmp_path, capsys):
    given = [str(parts[0] / f"{name}_text_document") for name in names.split()]
    merge_datasets.main(["--input", *given, "--output-prefix", str(tmp_path / "merged")])
    note = "note: datasets are joined in the order of their names, each of them once\n"
    assert (note in capsys.readouterr().out) == is_named


def test_output_inside_of_the_input_is_not_its_own_input(parts):
    folder, whole = parts
    for _ in range(2):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(folder / "merged")])
        assert contents(folder / "merged") == contents(whole)


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_damage_is_not_given_new_checksums(parts, tmp_path, ending, capsys):
    folder, _ = parts
    (folder / "p_10_text_document.sums.json").unlink()  # files of others have none
    path = folder / f"p_9_text_document{ending}"
    data = bytearray(path.read_bytes())
    data[0 if ending == ".bin" else -8] ^= 1  # another token; another document
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"p_9_text_document{ending} is damaged between bytes 0 and") as error:
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    assert error.value.code == 4 and "copy or preprocess it again" in error.value.do
    assert not list(tmp_path.glob("merged*"))
    if ending == ".bin":  # its numbers agree: it may have been changed on purpose
        verify_data.main([str(folder / "p_9_text_document"), "--write"])
        capsys.readouterr()
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
        [note] = [line for line in capsys.readouterr().out.splitlines() if "are taken as they are" in line]
        assert note.endswith(f": {folder / 'p_10_text_document'}")


def test_small_pieces_change_nothing(parts, tmp_path, monkeypatch):
    folder, whole = parts
    monkeypatch.setattr(merge_module, "PIECE", 2)
    merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    assert contents(tmp_path / "merged") == contents(whole)


def test_copies_where_the_kernel_cannot(parts, tmp_path, monkeypatch):
    import os

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    merge_datasets.main(["--input", str(parts[0]), "--output-prefix", str(tmp_path / "merged")])
    assert contents(tmp_path / "merged") == contents(parts[1])


def test_other_dtypes_and_vocabularies_are_refused(parts, tmp_path):
    folder, _ = parts
    preprocess(folder / "other", "big", ["1 2"], 70000)
    with pytest.raises(DataError, match="different vocabularies(.|\n)*with one version: earlier ones gave"):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    for path in folder.rglob("*.stats.json"):
        path.unlink()  # as of files that Megatron-LM made
    with pytest.raises(DataError, match="different types"):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    assert not list(tmp_path.glob("merged*"))


def test_files_without_stats_are_merged(tmp_path):
    np.arange(3, dtype=np.int32).tofile(tmp_path / "a.bin")
    write_index(tmp_path / "a.idx", np.int32, np.array([1, 2]), np.array([0, 0, 2]))
    (tmp_path / "in").mkdir()
    for name in "xy":
        for suffix in (".bin", ".idx"):
            (tmp_path / "in" / (name + suffix)).write_bytes((tmp_path / ("a" + suffix)).read_bytes())
    merge_datasets.main(["--input", str(tmp_path / "in"), "--output-prefix", str(tmp_path / "merged")])
    merged = IndexedDataset(tmp_path / "merged")
    assert merged.document_indices.tolist() == [0, 0, 2, 2, 4]
    assert [merged.get(i).tolist() for i in range(4)] == [[0], [1, 2], [0], [1, 2]]


def test_half_a_pair_and_nothing_at_all(parts, tmp_path):
    folder, _ = parts
    (folder / "a" / "deep" / "p_text_document.bin").unlink()
    with pytest.raises(DataError, match="p_text_document.idx has no p_text_document.bin"):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="nothing to merge"):
        merge_datasets.main(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "merged")])
    with pytest.raises(DataError, match="no such file"):
        merge_datasets.main(["--input", str(tmp_path / "nowhere"), "--output-prefix", str(tmp_path / "merged")])


def test_damaged_index_and_lock(parts, tmp_path):
    folder, _ = parts
    with Workspace(str(tmp_path / "merged")), pytest.raises(Locked):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    index = folder / "p_9_text_document.idx"
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(DataError, match="p_9_text_document.idx"):
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])


def test_exit_code_and_message(tmp_path, root):
    command = [sys.executable, str(root / "merge_datasets.py"), "--input", "nowhere", "--output-prefix", "out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 4 and "nowhere.idx: no such file" in done.stderr and "Traceback" not in done.stderr


def test_documents_and_sentences_together_are_told(parts, tmp_path, capsys):
    folder, whole = parts
    for ending in ("bin", "idx"):
        shutil.copy(f"{whole}.{ending}", folder / f"s_text_sentence.{ending}")
    merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "merged")])
    told = "note: files of whole documents (..._document) and of sentences (..._sentence) become one dataset"
    assert told in capsys.readouterr().out
