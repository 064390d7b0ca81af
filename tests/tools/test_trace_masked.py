# SPDX-License-Identifier: Apache-2.0
"""trace of BERT's and T5's runs, against what their ranks were given: every token says which document it is of."""

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data import loader
from megatron.data.indexed import write_index
from megatron.entry import start
from megatron.errors import DataError
from megatron.model.recipe import named_recipe
from megatron.tools import trace

EACH, DOCUMENTS = 20, 9  # ids of a document, documents of a file
WORDS = 2 * DOCUMENTS * EACH  # the special tokens lie behind these
COMMON = f"""--hidden-size 8 --num-attention-heads 1 --seq-length 24 --tokenizer-type NullTokenizer --vocab-size {WORDS}
    --vocab-extra-ids 12 --lr 1e-3 --device cpu --num-workers 0 --micro-batch-size 2 --seed 5 --eval-iters 1
    --short-seq-prob 0.3"""
KINDS = {"T5": "--encoder-num-layers 1 --decoder-num-layers 1 --decoder-seq-length 20", "BERT": "--num-layers 1"}


def write_file(prefix: Path, number: int) -> None:
    """Documents of one to seven sentences, of two to nine tokens each; EACH ids belong to a document."""
    random, lengths, bounds, rows = np.random.default_rng(number), [], [0], []
    for document in range(DOCUMENTS):
        for _ in range(int(random.integers(1, 8))):
            lengths.append(int(random.integers(2, 10)))
            rows.append((number * DOCUMENTS + document) * EACH + random.integers(0, EACH, lengths[-1]))
        bounds.append(len(lengths))
    np.concatenate(rows).astype(np.int32).tofile(f"{prefix}.bin")
    write_index(f"{prefix}.idx", np.dtype(np.int32), np.array(lengths), np.array(bounds))


def train(rank: int, kind: str, flags: str, seen: str) -> None:
    """A launch that writes down what this rank was given: (samples consumed before the step, place, documents)."""
    step, rows = loader.MicroBatchLoader.step, []

    def spy(self, consumed, num_microbatches):
        batches = step(self, consumed, num_microbatches)
        if self.next_step.__name__ == "ramped":  # of training
            for batch in batches:
                arrays = {name: array.numpy().T for name, array in batch.arrays.items()}
                for number, place in enumerate(batch.samples.tolist()):
                    one = {name: array[number] for name, array in arrays.items()}
                    if kind == "T5":
                        ids = [*one["text_enc"][one["enc_mask"] > 0], *one["labels"][one["loss_mask"] > 0]]
                    else:  # what was there before it was masked
                        ids = np.where(one["loss_mask"] > 0, one["labels"], one["text"])[one["padding_mask"] > 0]
                    rows.append((consumed, place, sorted({int(id) // EACH for id in ids if id < WORDS})))
        return batches

    loader.MicroBatchLoader.step = spy
    try:
        start(f"{COMMON} {KINDS[kind]} {flags}".split(), named_recipe(kind))
    finally:
        loader.MicroBatchLoader.step = step
    Path(f"{seen}.{rank}").write_text(json.dumps(rows))


def asked(capsys, *words) -> list[dict]:
    capsys.readouterr()
    trace.main([*map(str, words), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["T5", pytest.param("BERT", marks=pytest.mark.full)])
def test_steps_and_documents(kind, tmp_path, run_ranks, capsys):
    """A blend of two files, more than one epoch, two launches with other ranks and batches."""
    prefixes, run, given = [tmp_path / f"file{number}_text_sentence" for number in range(2)], tmp_path / "run", {}
    for number, prefix in enumerate(prefixes):
        write_file(prefix, number)
    data = f"--data-path 0.4 {prefixes[0]} 0.6 {prefixes[1]} --split 1,0,0 --train-samples 60 --save {run} --load {run}"
    for launch, (ranks, more) in enumerate(
        [(2, "--global-batch-size 8 --exit-interval 3"), (1, "--global-batch-size 6")]
    ):
        seen = str(tmp_path / f"seen{launch}")
        run_ranks(ranks, train, kind, f"{data} {more}", seen)
        for rank in range(ranks):
            for consumed, place, documents in json.loads(Path(f"{seen}.{rank}").read_text()):
                given.setdefault(consumed, {})[place] = documents
    assert len(given) == 9 and sum(map(len, given.values())) == 60
    number_of = lambda row, document: prefixes.index(Path(row["file"])) * DOCUMENTS + document
    steps, current = {}, 0
    for row in asked(capsys, "--load", run, "--show", "0", "--iter", *range(1, 10)):
        if row["kind"] == "step":
            current = row["iteration"]
            assert row["ledger"] == "agrees" and row["done"]
            told = given.pop(row["first_sample"])
            continue
        found = [number_of(row, one["document"]) for one in row["documents"]]
        assert found == told.pop(row["sample"])
        for document in found:
            steps.setdefault(document, set()).add(current)
    assert not given and len(steps) > DOCUMENTS
    for file, prefix in enumerate(prefixes):
        for document in range(DOCUMENTS):
            [row] = asked(capsys, "--load", run, "--doc", f"{prefix}:{document}")
            assert {one["iteration"] for one in row["seen"]} == steps.get(file * DOCUMENTS + document, set())
    trace.main(["--load", str(run), "--doc", f"{prefixes[1]}:2"])
    assert "pass" not in capsys.readouterr().out
    ids = np.fromfile(f"{prefixes[0]}.bin", np.int32)
    np.roll(ids, 1).tofile(f"{prefixes[0]}.bin")
    assert "differs" in {row.get("ledger") for row in asked(capsys, "--load", run, "--iter", *range(1, 10))}


def test_mixtures_of_tasks_are_refused(tmp_path, capsys):
    write_file(tmp_path / "text", 0)
    (tmp_path / "mood.tsv").write_text("text\tlabel\n" + "".join(f"{n} {n + 1}\t{n % 2}\n" for n in range(20)))
    flags = (
        f"--data-path {tmp_path}/text --split 1,0,0 --train-iters 1 --task-mixture masked=1 mood=1:{tmp_path}/mood.tsv"
    )
    with pytest.raises(DataError, match="--task-mixture"):
        trace.main(f"--iter 1 --model-type T5 {COMMON} --num-layers 1 --decoder-seq-length 20 {flags}".split())
