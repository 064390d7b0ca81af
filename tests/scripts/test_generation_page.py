# SPDX-License-Identifier: Apache-2.0
"""docs/generation.md is true: its flags exist, its commands are parsed, and its Python runs."""

import re
import shlex

import pytest

from megatron.inference.sampling import Sampling, Search
from megatron.model.quantization import QuantizeOptions
from megatron.settings.parse import parse
from megatron.settings.schema import TokenizerSettings
from megatron.settings.spelling import spellings_of
from megatron.tools.benchmark_inference import BenchmarkOptions
from megatron.tools.generate import GenerateOptions

GENERATE = dict(generate=GenerateOptions, sampling=Sampling, search=Search, tokenizer=TokenizerSettings)


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "generation.md").read_text(encoding="utf-8")


def test_its_tables_have_the_flags_and_their_spellings(page):
    known = spellings_of(GENERATE)
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `--")]
    named = {flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row[0])}
    assert named <= set(known) and len(named) > 25
    settings = {field for group in (Sampling, Search) for field in group.__dataclass_fields__}
    mentioned = {known[flag].setting.name for flag in re.findall(r"(--[\w-]+)", page) if flag in known}
    assert settings - mentioned <= {"decoder_start_id", "decoder_end_id"}  # of encoder-decoders: a page of their own
    for row in rows:
        own = {known[flag].setting.name for flag in re.findall(r"`(--[\w-]+)", row[0])}
        for alias in re.findall(r"`(--[\w-]+)", row[-1]) if len(row) == 3 else ():
            assert known[alias].setting.name in own, alias


def test_its_commands_are_parsed(page):
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    lines = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    seen = set()
    for words in lines:
        words = words[max(place for place, word in enumerate(words) if word == "-m") + 1 :]
        kinds = GENERATE if words[0].endswith("generate") else dict(benchmark=BenchmarkOptions)
        assert parse(words[1:], kinds)
        seen.add(words[0])
    assert seen == {"megatron.tools.generate", "megatron.tools.benchmark_inference"} and len(lines) == 6
    known = {**spellings_of(GENERATE), **spellings_of(dict(b=BenchmarkOptions, q=QuantizeOptions)), "--mp-degree": None}
    others = re.findall(r"`(--[\w-]+)", page[page.index("## Other suites' settings") :])
    assert len(others) > 10 and {flag.replace("_", "-") for flag in others} <= set(known)


def test_its_python_runs(page, capsys, tmp_path, monkeypatch):
    import pretrain_gpt
    from megatron.inference.load import load_model

    monkeypatch.chdir(tmp_path)
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 100"
    steps = "--micro-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0 --device cpu --save run"
    pretrain_gpt.main(f"{shape} {steps}".split())
    capsys.readouterr()
    [block] = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    exec(block.replace("The module", "3 1 4"), dict(loaded=load_model("run")))  # noqa: S102
    assert len(capsys.readouterr().out.split()) == 20
