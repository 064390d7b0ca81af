# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys

import numpy as np
import pytest

from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import DataError, SettingsError
from megatron.settings.schema import Data
from megatron.tools.dump_samples import main

COMMAND = [sys.executable, "-m", "megatron.tools.dump_samples"]


@pytest.fixture
def prefix(tmp_path):
    lengths = np.arange(5, 45, dtype=np.int32)
    write_index(tmp_path / "a.idx", np.uint16, lengths, np.arange(len(lengths) + 1))
    np.arange(lengths.sum(), dtype=np.uint16).tofile(tmp_path / "a.bin")
    return str(tmp_path / "a")


def dump(capsys, *argv) -> list[dict]:
    main([*argv])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_lines_are_the_samples_of_training(prefix, capsys):
    flags = ["--data-path", prefix, "--seq-length", "16", "--split", "8,1,1", "--train-samples", "90", "--seed", "5"]
    lines = dump(capsys, *flags, "--first", "4", "--start", "2")
    train, valid, _ = build_datasets(Data(data_path=[prefix], split="8,1,1"), 16, (90, 3, 0), 5)
    starts = np.cumsum([0, *range(5, 45)])
    assert [line["sample"] for line in lines] == [2, 3, 4, 5]
    for line in lines:
        assert line["tokens"] == train[line["sample"]].tolist() and line["file"] == prefix
        assert line["tokens"] == [
            starts[document] + offset + k for document, offset, length in line["documents"] for k in range(length)
        ]
    (line,) = dump(capsys, *flags, "--dataset", "valid", "--first", "1")
    assert line["tokens"] == valid[0].tolist()
    cyclic = dump(capsys, *flags, "--dataloader-type", "cyclic", "--first", str(2 * len(train)))
    assert sorted(line["number"] for line in cyclic[: len(train)]) == list(range(len(train)))


def test_mock_data_and_text(prefix, capsys):
    lines = dump(capsys, "--mock-data", "--vocab-size", "50", "--seq-length", "8", "--train-samples", "2")
    assert [len(line["tokens"]) for line in lines] == [9, 9]
    flags = ["--data-path", prefix, "--seq-length", "8", "--split", "1,0,0", "--train-samples", "2", "--first", "1"]
    (line,) = dump(capsys, *flags, "--text", "--tokenizer-type", "NullTokenizer", "--vocab-size", "5000")
    assert line["text"].split() == [str(token) for token in line["tokens"]]


def test_mistakes(prefix):
    flags = ["--data-path", prefix, "--seq-length", "8", "--train-samples", "2"]
    with pytest.raises(SettingsError, match="--text needs a tokenizer"):
        main([*flags, "--text"])
    with pytest.raises(DataError, match="past the end"):
        main([*flags, "--start", "1000000"])
    with pytest.raises(DataError, match="no test data"):
        main([*flags, "--dataset", "test", "--split", "9,1,0"])
    with pytest.raises(SettingsError, match="has to be"):
        main([*flags, "--seq-length", "0"])


def test_help_is_quick_and_a_closed_pipe_quiet(prefix):
    code = "import sys; from megatron.tools.dump_samples import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    heavy = subprocess.run(
        [sys.executable, "-c", code + "print({'torch', 'numpy'} & set(sys.modules))"], capture_output=True
    )
    assert heavy.stdout.decode().splitlines()[-1] == "set()"
    flags = [
        "--data-path",
        prefix,
        "--seq-length",
        "8",
        "--train-samples",
        "90000",
        "--first",
        "90000",
        "--split",
        "1,0,0",
    ]
    with subprocess.Popen(COMMAND + flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["sample"] == 0
        process.stdout.close()
        assert process.wait(200) == 1
        assert b"Traceback" not in process.stderr.read() and b"Error" not in process.stderr.read()
