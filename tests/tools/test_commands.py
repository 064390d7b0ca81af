# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron` lists the commands, and a mistyped one gets the nearest."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import DataError, UsageError
from megatron.tools.__main__ import commands, main

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_command_is_listed_with_what_it_does(capsys):
    main([])
    lines, known = capsys.readouterr().out.splitlines(), commands()
    for path in (ROOT / "megatron" / "tools").glob("*.py"):
        if "main(argv" in path.read_text() and path.stem in known:
            [line] = [line for line in lines if line.split()[:1] == [path.stem]]
            assert len(line.split()) > 4 and len(line) < 130
    assert {"generate", "serve", "plan", "report", "checkpoint"} <= known.keys()
    assert any(line.split()[0] == "pretrain_gpt.py" for line in lines if line)


def test_a_mistyped_command_gets_the_nearest():
    with pytest.raises(UsageError, match="there is no command evalute; did you mean evaluate"):
        main(["evalute"])
    with pytest.raises(
        UsageError, match="there is no command chat; conversations: generate --chat in a terminal, serve"
    ):
        main(["chat"])
    command = [sys.executable, "-m", "megatron.tools.generat", "--load", "x"]
    found = subprocess.run(
        command, env=os.environ | dict(PYTHONPATH=str(ROOT)), capture_output=True, text=True, cwd=ROOT
    )
    assert found.returncode == 2
    assert found.stderr == (
        "error: there is no command generat; did you mean generate?\n  -> python -m megatron lists them\n"
    )
    with pytest.raises(ModuleNotFoundError):
        __import__("megatron.tools.generat")


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ("evaluate", "--load {0} --task LAMBADA --valid-data {0}/valid.jsnl"),
        ("raw_trans_to_json", "--input_path {0}/valid.jsnl --output_path {0}/out"),
        ("lm_eval", "--load {0} --tasks {0}/valid.yml"),
        ("train_tokenizer", "--input {0}/valid.jsnl --vocab-size 300 --output {0}/out"),
    ],
)
def test_a_missing_file_gets_the_name_of_the_one_beside_it(tool, words, tmp_path):
    for name in ("valid.jsonl", "valid.yaml"):
        (tmp_path / name).write_text("{}\n")
    command = importlib.import_module(f"megatron.tools.{tool}")
    with pytest.raises(DataError, match=rf"did you mean \S+valid\.({'yaml' if tool == 'lm_eval' else 'jsonl'})\?"):
        command.main(words.format(tmp_path).split())
