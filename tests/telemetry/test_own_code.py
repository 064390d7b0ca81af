# SPDX-License-Identifier: Apache-2.0
"""The code that a run trains with is on record, and what has changed of it is told; no script runs under another's name."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.reader import Reader
from megatron.checkpoint.survey import describe
from megatron.telemetry import own_code, run_record
from tests.models import gpt_variant

TINY = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 6 --vocab-size 20 --lr 1e-2 --mock-data "
    "--micro-batch-size 2 --eval-iters 0 --device cpu --num-workers 0 --lr-decay-iters 9 --log-interval 1"
)


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


@pytest.fixture
def folder(root, tmp_path, monkeypatch):
    """A user's folder: a model, what it imports, and what it does not."""
    text = (root / "tests/models/gpt_variant.py").read_text().replace("tests.models.gpt_variant", "my_variant")
    (tmp_path / "my_variant.py").write_text(text + "\nimport my_helper\nfrom my_package import part\n")
    (tmp_path / "my_helper.py").write_text("def late():\n    import my_late\n    from torch import nn\n")
    (tmp_path / "my_late.py").write_text("import megatron.errors, json, numpy.linalg\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "part.py").write_text("from . import other\nfrom .other import x\n")
    (tmp_path / "my_package" / "other.py").write_text("x = 1\n")
    (tmp_path / "my_package" / "alone.py").write_text("x = 1\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "torch").mkdir()  # a folder of this name, not the library
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_files_are_the_module_and_what_it_imports_beside_it(folder):
    wanted = ["my_helper.py", "my_late.py", "my_package/__init__.py", "my_package/other.py", "my_package/part.py"]
    found = own_code.code_record("my_variant")["files"]
    assert found == {name: sha(folder / name) for name in [*wanted, "my_variant.py"]}
    assert own_code.own_files("no_such_module") == {} == own_code.own_files("no_such.module")


def test_those_of_the_tree(root):
    names = ["pretrain_gpt.py", "tests/models/gpt_variant.py"]
    found = own_code.own_files("tests.models.gpt_variant")
    assert found == {name: root / name for name in names}


def test_uncommitted_changes_have_a_checksum(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    (tmp_path / "megatron" / "telemetry").mkdir(parents=True)
    file = tmp_path / "megatron" / "telemetry" / "own_code.py"
    file.write_text("one\n")
    monkeypatch.setattr(run_record, "__file__", str(file))  # where git is asked
    assert own_code.source_diff() is None  # no checkout
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    assert own_code.source_diff() is None
    (tmp_path / "scratch.py").write_text("nobody tracks me\n")
    assert own_code.source_diff() is None
    found = []
    for text in ("two\n", "three\n", "two\n"):
        file.write_text(text)
        found.append(own_code.source_diff())
    assert found[0] == found[2] != found[1] and re.fullmatch("[0-9a-f]{12}", found[0])
    subprocess.run([*git, "add", "."], check=True)  # staged is not committed
    assert own_code.source_diff() is not None


def test_it_is_in_the_log_and_in_checkpoints_and_a_change_is_told(root, run_ranks, tmp_path, capfd, monkeypatch):
    def train(rank, flags):
        gpt_variant_main(f"{TINY} --global-batch-size 4 --save {tmp_path} --load {tmp_path} {flags}".split())

    def gpt_variant_main(argv):
        gpt_variant.start(argv, gpt_variant.recipe())

    run_ranks(2, train, "--train-iters 1")
    names = ("pretrain_gpt.py", "tests/models/gpt_variant.py")
    files = {name: sha(root / name) for name in names}
    log = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    with Reader(tmp_path / "iter_0000001") as reader:
        assert log[0]["code"]["files"] == reader.state["code"]["files"] == files
        assert log[0]["code"]["diff"] == reader.state["code"]["diff"] == own_code.source_diff()
        assert f"code: pretrain_gpt.py {files[names[0]]}, {names[1]} {files[names[1]]}" in describe(reader)
    capfd.readouterr()
    train(0, "--train-iters 2")
    assert "differs from the checkpoint's" not in capfd.readouterr().out
    record = dict(files=files | {names[1]: "0" * 12})
    monkeypatch.setattr("megatron.training.build.code_record", lambda module: record)
    train(0, "--train-iters 3")
    told = f"note: {names[1]} differs from the checkpoint's ({files[names[1]]} then, 000000000000 now)"
    assert capfd.readouterr().out.count(told) == 1


def test_checkpoints_that_say_nothing_or_nonsense_are_no_changes():
    now = dict(files={"a.py": "1"})
    for saved in (None, "x", {}, {"files": None}, {"files": {"b.py": "2"}}, {"files": {"a.py": "1"}}):
        assert own_code.code_notes(saved, now) == []
    assert own_code.code_notes({"files": {"a.py": "1"}}, {}) == []


def run(folder, *words):
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    path = f"{folder}:{Path(__file__).resolve().parents[2]}"
    command = [sys.executable, *words, *TINY.split(), "--print-config"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment | {"PYTHONPATH": path}
    )


LIGHT = """
from dataclasses import replace

import pretrain_gpt
from megatron.errors import run_main
from megatron.entry import start


def recipe():
    return replace(pretrain_gpt.recipe(), model_type="my_variant")


if __name__ == "__main__":
    run_main(lambda argv: start(argv, recipe()))
"""


@pytest.mark.sampled(2)
def test_a_script_that_goes_by_anothers_name_is_refused(folder):
    (folder / "my_variant.py").write_text(LIGHT)
    shutil.copy(folder / "my_variant.py", folder / "variant_b.py")
    for words, name in ((["variant_b.py"], "variant_b"), (["-m", "variant_b"], "variant_b")):
        done = run(folder, *words)
        assert done.returncode == 2, done.stderr
        assert 'error: variant_b.py sets model_type "my_variant", which is my_variant.py' in done.stderr
        assert f'-> set model_type "{name}"' in done.stderr.replace("\n", " ")
    (folder / "my_variant.py").rename(folder / "moved.py")
    done = run(folder, "variant_b.py")
    assert done.returncode == 2 and 'variant_b.py sets model_type "my_variant", which is no module' in done.stderr
    text = (folder / "variant_b.py").read_text().replace("my_variant", "variant_b")
    (folder / "variant_b.py").write_text(text)
    assert run(folder, "variant_b.py").returncode == 0
    (folder / "variant_b.py").write_text(LIGHT.replace("my_variant", "GPT"))
    assert "which is pretrain_gpt.py" in run(folder, "variant_b.py").stderr


def test_a_launcher_of_another_modules_recipe_is_none(folder):
    (folder / "my_variant.py").write_text(LIGHT)
    (folder / "go.py").write_text("import sys\nfrom my_variant import recipe, start\nstart(sys.argv[1:], recipe())\n")
    assert run(folder, "go.py").returncode == 0
