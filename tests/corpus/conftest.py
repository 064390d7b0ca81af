# SPDX-License-Identifier: Apache-2.0
"""A small corpus with a recipe, and what a plain loop over its lines makes of it."""

import hashlib
import json
from functools import partial
from pathlib import Path

import pytest

from megatron.corpus.documents import read_documents
from megatron.corpus.driver import FINAL, run
from megatron.corpus.plan import make_plan
from megatron.corpus.recipe import parse_recipe
from megatron.corpus.runners.local import run_local

STAGES = """
stages:
  - filter: [{{"tests.corpus.toy_stages:TooShort": {{least: 12}}}}, "tests.corpus.toy_stages:Upper"{more}]
  - tests.corpus.toy_stages:phases: {{parts: 2}}
"""


def texts(count: int) -> list[str]:
    """Short ones, long ones, such that a filter changes, and duplicates."""
    rows = []
    for number in range(count):
        if number % 7 == 0:
            rows.append(f"change me, number {number}")
        elif number % 5 == 0:
            rows.append(f"said again and again {number % 3}")
        else:
            rows.append(f"text {number} " * (number % 6))
    return rows


class SmallCorpus:
    """Input and recipe in a folder; `final(output)` are the documents and the digest of what a run has made."""

    def __init__(self, folder: Path, count: int = 120, shard_mb: float = 0.002):
        self.folder, self.texts = folder, texts(count)
        self.input = folder / "in.jsonl"
        self.shard_mb = shard_mb
        with open(self.input, "w") as file:
            for number, text in enumerate(self.texts):
                file.write(json.dumps(dict(text=text, url=f"https://www.site{number % 4}.org/{number}")) + "\n")
                if number % 40 == 3:
                    file.write('{"text": broken\n\n')

    def recipe(self, more: str = "", head: str = "", stages: str = ""):
        stages = stages or STAGES.format(more=more)
        return parse_recipe(f"input: {self.input}\nshard-mb: {self.shard_mb}\n{head}{stages}", "recipe.yaml")

    def plan(self, output: Path, **more):
        return make_plan(self.recipe(**more), output)

    def run(self, output: Path, workers: int = 1, **more):
        plan = self.plan(output, **more)
        run(plan, output, partial(run_local, workers=workers))
        return plan

    def expected(self, least: int = 12) -> list[str]:
        """What a plain loop makes of the texts."""
        kept = []
        for text in self.texts:
            text = text.upper() if text.startswith("change") else text
            if len(text) >= least and text not in kept:
                kept.append(text)
        return kept


def final_texts(output: Path) -> list[str]:
    return [d["text"] for path in sorted((output / FINAL).glob("*.zst")) for d in read_documents(path)]


def final_digest(output: Path) -> str:
    """Of all final files with their names, by another hash than the receipts'."""
    state = hashlib.sha256()
    for path in sorted((output / FINAL).iterdir()):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()


@pytest.fixture
def small_corpus(tmp_path) -> SmallCorpus:
    return SmallCorpus(tmp_path)
