# SPDX-License-Identifier: Apache-2.0
"""The sample corpus: real text, the same every time, and nothing held out that is also trained on."""

import json

import pytest

from megatron.errors import SettingsError
from megatron.tools import get_sample_data
from megatron.tools.get_sample_data import documentation, is_held_out


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    get_sample_data.main(["--output", str(folder / "a" / "train.jsonl"), "--held-out", str(folder / "held_out.jsonl")])
    return folder


@pytest.mark.sampled(5)
def test_size_and_kinds(corpus):
    documents = read(corpus / "a" / "train.jsonl")
    assert 2e6 < sum(len(d["text"]) for d in documents) < 20e6
    assert {d["source"].partition("/")[0] for d in documents} >= {"docs", "sources"}
    assert all(len(d["text"]) >= get_sample_data.SHORTEST for d in documents)
    assert len({d["source"] for d in documents}) == len(documents)


@pytest.mark.sampled(10)
def test_the_same_bytes_every_time(corpus, tmp_path):
    get_sample_data.main(["--output", str(tmp_path / "train.jsonl"), "--held-out", str(tmp_path / "held_out.jsonl")])
    assert (tmp_path / "train.jsonl").read_bytes() == (corpus / "a" / "train.jsonl").read_bytes()
    assert (tmp_path / "held_out.jsonl").read_bytes() == (corpus / "held_out.jsonl").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["held_out.jsonl", "train.jsonl"]


def test_a_module_is_on_one_side_only(corpus):
    def modules(path):
        return {d["source"].removeprefix("docs/").removeprefix("sources/") for d in read(path)}

    held_out = modules(corpus / "held_out.jsonl")
    assert held_out and not held_out & modules(corpus / "a" / "train.jsonl")


def test_limits_and_kinds(tmp_path, capsys):
    target = tmp_path / "t.jsonl"
    get_sample_data.main(["--output", str(target), "--kinds", "docs", "--max-megabytes", "0.1"])
    documents = read(target)
    assert all(d["source"].startswith("docs/") for d in documents)
    assert 0.1e6 <= sum(len(d["text"].encode()) for d in documents) < 0.5e6
    assert "0.1 MB of text" in capsys.readouterr().out or len(documents) > 1
    with pytest.raises(SettingsError, match="docz"):
        get_sample_data.main(["--output", str(target), "--kinds", "docz"])


def test_documentation_of_a_module():
    page = documentation(
        "m", '"""Top."""\nclass A:\n  """An A."""\n  def f(self):\n    """Does f."""\n  def g(self): 0'
    )
    assert page == "m: Top.\n\nclass A\n    An A.\n\nA.f(self)\n    Does f.\n"
    assert documentation("m", "x = 1") == ""
    assert documentation("m", "this is not Python") == ""


def test_share_of_held_out_groups():
    share = sum(is_held_out(f"module{n}", 20) for n in range(2000)) / 2000
    assert 0.17 < share < 0.23
