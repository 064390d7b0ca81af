# SPDX-License-Identifier: Apache-2.0
"""A tiny run as the command line asks for it: built and looked at, or trained and read back."""

import json
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.settings.parse import parse_pretrain
from megatron.training.build import build_run
from megatron.training.rules import resolve

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--eval-iters 0 --device cpu --num-workers 0 --hidden-dropout 0 --attention-dropout 0 "
)
UNLESS_GIVEN = {  # where a flag says something of the batch or of the length, all of it is said there
    ("-batch-size", "accumulation"): "--micro-batch-size 2 --global-batch-size 4",
    ("--train-",): "--train-iters 2",
}


def _read(folder) -> SimpleNamespace:
    """What a run left: `steps`, `evals` and `starts` of its metrics; `tensors(iteration)` and `state(iteration)`."""
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    kinds = {}
    for record in map(json.loads, lines):
        kinds.setdefault(record["kind"], []).append(record)

    def opened(iteration, read):
        with Reader(folder / f"iter_{iteration:07d}") as reader:
            return read(reader)

    return SimpleNamespace(
        steps=kinds.get("step", []),
        evals=kinds.get("eval", []),
        kinds=kinds,
        folder=folder,
        losses=[step.get("lm loss") for step in kinds.get("step", [])],
        saved=sorted(int(path.name[5:]) for path in folder.glob("iter_*")),
        tensors=lambda iteration: opened(iteration, lambda r: {name: r.read(name) for name in r.tensors}),
        state=lambda iteration: opened(iteration, lambda r: r.state),
    )


@pytest.fixture(scope="session")
def command():
    """`command(flags)`: the words of the tiny run with these flags behind them, of which the last ones count."""

    def words(flags=""):
        more = [default for given, default in UNLESS_GIVEN.items() if not any(word in flags for word in given)]
        return f"{TINY} {' '.join(more)} {flags}".split()

    return words


@pytest.fixture
def train(command, tmp_path):
    """`train(flags, name)`: train, saving into tmp_path / name; returns what the run left there (see `_read`)."""

    def run(flags="", name="run"):
        torch.set_num_threads(1)
        pretrain_gpt.main(command(f"--save {tmp_path / name} {flags}"))
        return _read(tmp_path / name)

    return run


@pytest.fixture(scope="session")
def read():
    """`read(folder)`: what a run left in its --save folder."""
    return _read


@pytest.fixture
def build(command):
    """`build(flags)`: a run that is ready for its first step, closed at the end of the test."""
    built = []

    def make(flags="", world=1):
        torch.set_num_threads(1)
        built.append(build_run(resolve(parse_pretrain(command(flags)), world), pretrain_gpt.recipe()))
        return built[-1]

    yield make
    for run in built:
        run.close()
