# SPDX-License-Identifier: Apache-2.0
"""docs/python.md is true: its run is made, its Python runs as it stands, its table names the fields that records have."""

import json
import os
import re
import runpy
import shlex

import pytest

import pretrain_gpt

WITH_SPIKES = {"spike", "rewind", "throughput", "note"}  # of runs that go back, and with a flag of its own


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(page, tmp_path_factory):
    """A folder in which the page's run was made."""
    [command] = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["python", "pretrain_gpt.py"]
    made, before = tmp_path_factory.mktemp("python_page"), os.getcwd()
    os.chdir(made)
    try:
        pretrain_gpt.main(words[2:])
    finally:
        os.chdir(before)
    return made


def run_blocks(page, folder, monkeypatch, wanted) -> None:
    blocks = [block for block in re.findall(r"^```python\n(.*?)^```", page, re.S | re.M) if wanted(block)]
    assert blocks
    (folder / "page.py").write_text("\n".join(blocks))
    monkeypatch.chdir(folder)
    runpy.run_path(str(folder / "page.py"), run_name="page")


def test_its_python_runs(page, folder, monkeypatch, capsys):
    run_blocks(page, folder, monkeypatch, lambda block: "pandas" not in block)
    assert capsys.readouterr().out.splitlines() == [
        "logits [16, 3, 101] of iteration 10",
        "hidden states {'0': [16, 3, 32], '1': [16, 3, 32]}",
        "losses True",
        "[3, 1, 4]",
        "texts [3, 3]",
        "samples 2",
        f"steps {list(range(1, 11))} evaluations [True]",
    ]


def test_its_line_of_pandas_runs(page, folder, monkeypatch, capsys):
    pytest.importorskip("pandas")
    run_blocks(page, folder, monkeypatch, lambda block: "pandas" in block)
    assert capsys.readouterr().out == "frame (10, 3)\n"


def test_its_table_names_the_fields_that_there_are(page, folder):
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (.*) \|$", page, re.M)
    told = {kind: set(re.findall(r"`([\w ]+)`", re.sub(r"\([^)]*\)|: .*", "", fields))) for kind, fields in rows}
    told["start"].add("parts")
    records = [json.loads(line) for line in (folder / "runs/python/metrics.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} == set(told) - WITH_SPIKES
    for record in records:
        common = {"kind", "iteration"} | ({"time"} if record["kind"] != "step" else set())
        assert told[record["kind"]] | common <= set(record), record["kind"]
    for kind in ("run", "step", "end", "save", "memory", "start", "timers"):  # and no others
        found = {name for record in records if record["kind"] == kind for name in record}
        assert found - {"kind", "iteration", "time"} <= told[kind], kind
