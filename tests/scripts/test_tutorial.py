# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md is true: its commands run as written, one after another, and train what the page says they train."""

import re

import pytest

from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check


def blocks(page: str, kind: str) -> list[str]:
    return [text for found, text in re.findall(r"^```(\w*)\n(.*?)^```$", page, re.S | re.M) if found == kind]


def losses(text: str) -> dict[str, float]:
    """Validation losses by iteration, the last of each."""
    found = re.findall(r"at iteration (\d+)(?: on validation set)? \|.* loss value: (\S+)", text)
    pretraining = re.findall(r"at iteration (\d+)(?: on validation set)? \| lm loss", text)
    assert len(set(pretraining)) == len(pretraining), "one validation of a step"
    return {step: float(loss) for step, loss in found}


@pytest.mark.full
@pytest.mark.timeout(900)
def test_its_commands_run_and_come_to_its_figures(copy, bash, root):
    page = (root / "docs" / "tutorial.md").read_text(encoding="utf-8")
    commands = blocks(page, "bash")
    shown = "".join(blocks(page, ""))
    activate = "source .venv/bin/activate\n"
    assert commands[0].startswith(activate)  # the other blocks run in the same shell
    out = "".join(bash("-euc", activate + block).stdout for block in commands)
    assert all("resuming at iteration 200, 3,200 samples consumed" in text for text in (shown, out))
    for step in ("200", "400"):  # the task's steps differ between versions of Python
        assert losses(out)[step] == pytest.approx(losses(shown)[step], abs=0.02), step
    [accuracy] = re.findall(r"accuracy value: (\S+)", shown)[-1:]
    assert float(re.findall(r"accuracy value: (\S+)", out)[-1]) == pytest.approx(float(accuracy), abs=0.05)
    perplexity = r"validation results on \S+ \| avg loss: \S+ \| ppl: (\S+)"
    assert float(re.search(perplexity, out)[1]) == pytest.approx(float(re.search(perplexity, shown)[1]), rel=0.1)
    for name in ("gpt/report.html", "tuned/best", "tuned/predictions"):
        assert (copy / "runs" / "tutorial" / name).exists(), name


def test_its_settings_are_possible(root, tmp_path, monkeypatch):
    """Without training: the page's YAML on one rank, and on the two of the resumed run."""
    page = (root / "docs" / "tutorial.md").read_text(encoding="utf-8")
    name, text = re.search(r"cat > (\S+gpt\.yaml) <<'END'\n(.*?)^END\n", page, re.S | re.M).groups()
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    for line in re.findall(rf"pretrain_gpt\.py (--config {name}.*)", page):
        assert check(parse_pretrain(line.split()), 1) == check(parse_pretrain(line.split()), 2) == []
