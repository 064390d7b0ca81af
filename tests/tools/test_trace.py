# SPDX-License-Identifier: Apache-2.0
"""trace, against what the ranks of real runs were given: every token says which document it is of."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import preprocess_data
import pretrain_gpt
from megatron.data import loader
from megatron.data.launches import RunHistory, consumed_bounds
from megatron.errors import DataError, Failure
from megatron.settings.schema import Batch, Data
from megatron.telemetry.history import read_history
from megatron.tools import trace

EACH, DOCUMENTS, LENGTH = 30, 12, 16  # ids of a document, documents of a file, tokens of a sample
EOD = 2 * DOCUMENTS * EACH
MODEL = (
    f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length {LENGTH} --tokenizer-type NullTokenizer "
    f"--vocab-size {EOD} --lr 1e-3 --device cpu --num-workers 0 --micro-batch-size 2 --seed 5 --eval-iters 1"
)


def make_files(folder: Path) -> list[str]:
    """Two token files whose ids tell file and document: EACH ids belong to a document, in order, again and again."""
    prefixes = []
    for file in range(2):
        random, rows = np.random.default_rng(file), []
        for document in range(DOCUMENTS):
            first = (file * DOCUMENTS + document) * EACH
            ids = first + np.arange(int(random.integers(0, 70))) % EACH
            rows.append(json.dumps(dict(text=" ".join(map(str, ids.tolist())))))
        (folder / f"source{file}.jsonl").write_text("\n".join(rows) + "\n")
        flags = f"--input {folder}/source{file}.jsonl --output-prefix {folder}/file{file} --workers 1"
        preprocess_data.main(f"{flags} --tokenizer-type NullTokenizer --vocab-size {EOD}".split())
        prefixes.append(f"{folder}/file{file}_text_document")
    return prefixes


def train(rank: int, flags: str, seen: str) -> None:
    """A launch that writes down what this rank was given: (samples consumed before the step, place, ids)."""
    step, rows = loader.MicroBatchLoader.step, []

    def spy(self, consumed, num_microbatches):
        batches = step(self, consumed, num_microbatches)
        if self.next_step.__name__ == "ramped":  # of training
            for batch in batches:
                ids = np.concatenate([batch.tokens.numpy(), batch.labels.numpy()[-1:]]).T
                mask = batch.loss_mask
                real = (
                    np.ones_like(ids, bool)
                    if mask is None
                    else np.pad(mask.numpy().T > 0, ((0, 0), (1, 0)), constant_values=True)
                )
                rows.extend(
                    (consumed, place, sorted({int(id) // EACH for id, ok in zip(one, kept, strict=True) if ok}))
                    for place, one, kept in zip(batch.samples.tolist(), ids, real, strict=True)
                )
        return batches

    loader.MicroBatchLoader.step = spy
    try:
        pretrain_gpt.main(f"{MODEL} {flags}".split())
    finally:
        loader.MicroBatchLoader.step = step
    Path(f"{seen}.{rank}").write_text(json.dumps(rows))


def given(seen: list[str], ranks: int) -> dict[int, dict[int, list[int]]]:
    """consumed -> place -> numbers of documents; of several launches the later one counts."""
    found = {}
    for name in seen:
        launch = {}
        for rank in range(ranks):
            path = Path(f"{name}.{rank}")
            for consumed, place, documents in json.loads(path.read_text()) if path.exists() else ():
                launch.setdefault(consumed, {})[place] = documents
        found.update(launch)
    return found


def asked(capsys, *words) -> list[dict]:
    capsys.readouterr()
    trace.main([*map(str, words), "--json"])
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def number_of(row: dict, document: int) -> int:
    return int(row["file"][-len("0_text_document")]) * DOCUMENTS + document


def check_steps(capsys, run, told: dict[int, dict[int, list[int]]]) -> dict[int, set[int]]:
    """Each step of the run's history is the one that its ranks were given. Returns the steps of each document."""
    steps = {step["iteration"]: step for step in read_history(Path(run) / "metrics.jsonl").steps}
    rows = asked(capsys, "--load", run, "--show", "0", "--iter", *steps)
    seen, iteration, samples = {}, 0, {}
    for row in rows:
        if row["kind"] == "step":
            iteration, record = row["iteration"], steps[row["iteration"]]
            assert row["first_sample"] + row["samples"] == record["consumed_samples"] and row["done"]
            assert row["skipped"] == record["skipped"]
            samples[iteration] = told[row["first_sample"]] if not row["skipped"] else None
            assert row["ledger"] == ("agrees" if record.get("ledger") else "")
            continue
        documents = {number_of(row, one["document"]) for one in row["documents"]}
        for document in documents:
            seen.setdefault(document, set()).add(iteration)
        if samples[iteration] is not None:
            assert sorted(documents) == samples[iteration].pop(row["sample"])
    assert not any(samples.values()) and len(samples) == len(steps)
    return seen


def check_documents(capsys, run, prefixes, seen: dict[int, set[int]], done: int) -> None:
    """What is told of each document is what the steps had."""
    for file, prefix in enumerate(prefixes):
        for document in range(DOCUMENTS):
            [row] = asked(capsys, "--load", run, "--doc", f"{prefix}:{document}")
            iterations = {one["iteration"] for one in row["seen"] if one["done"]}
            assert iterations == seen.get(file * DOCUMENTS + document, set())
            assert all(one["done"] == (one["iteration"] <= done) for one in row["seen"])
            line = Path(row["source"]["file"]).read_bytes()[row["source"]["offset"] :].split(b"\n")[0]
            assert json.loads(line)["text"].startswith(row["text"]) and row["tokens"] == len(
                json.loads(line)["text"].split()
            )


@pytest.mark.sampled(2)
def test_launches_with_other_batches_and_ranks(tmp_path, run_ranks, capsys):
    """A ramp-up on two ranks, another batch on one, four steps taken back, steps left out, a shorter end."""
    prefixes, run = make_files(tmp_path), tmp_path / "run"
    data = (
        f"--data-path 0.4 {prefixes[0]} 0.6 {prefixes[1]} --split 90,10,0 --eval-interval 3 --save {run} --load {run}"
    )
    common, seen = f"{data} --train-samples 100 --save-interval 3 --lr-decay-samples 90", []

    def launch(world: int, flags: str) -> None:
        seen.append(str(tmp_path / f"seen{len(seen)}"))
        run_ranks(world, train, f"{common} {flags}", seen[-1])

    launch(2, "--global-batch-size 8 --rampup-batch-size 4 4 20 --exit-interval 4")
    launch(1, "--global-batch-size 6 --exit-interval 9")
    launch(1, "--global-batch-size 6 --exit-interval 7 --ckpt-step 6 --iterations-to-skip 7 10")
    launch(2, "--global-batch-size 4 --exit-interval 11 --iterations-to-skip 7 10")
    told = given(seen, 2)
    documents = check_steps(capsys, run, told)
    check_documents(capsys, run, prefixes, documents, 11)
    history = read_history(run / "metrics.jsonl")
    skipped = [step["iteration"] for step in history.steps if step["skipped"]]
    assert skipped == [7, 10] and history.starts == [0, 4, 6, 7]
    coming = asked(capsys, "--load", run, "--iter", "12", "13", "--show", "0")
    assert [row["done"] for row in coming if row["kind"] == "step"] == [False, False]
    seen.append(str(tmp_path / "more"))
    run_ranks(1, train, f"{common} --global-batch-size 4 --exit-interval 13", seen[-1])
    later = given(seen[-1:], 1)
    for row in coming:  # what was foretold is what came
        if row["kind"] == "sample":
            [own] = [step[row["sample"]] for step in later.values() if row["sample"] in step]
            assert sorted(number_of(row, one["document"]) for one in row["documents"]) == own
    [step, *samples] = asked(capsys, "--load", run, "--iter", "3", "--of", "valid", "--show", "0")
    record = history.evals[0]
    assert (step["first_sample"], step["samples"]) == (record["first_sample"], record["samples"]) and len(
        samples
    ) == step["samples"]
    # A checkpoint alone does not lead to its samples here: what it cannot know it does not tell.
    shutil.copytree(run / "iter_0000013", tmp_path / "alone" / "iter_0000013")
    capsys.readouterr()
    with pytest.raises(DataError, match="no iteration 5"):
        trace.main(["--load", str(tmp_path / "alone"), "--iter", "5"])
    assert "do not give its" in capsys.readouterr().err


def test_a_document_is_a_sample(tmp_path, run_ranks, capsys):
    """--dataset-type webtext; and the same answers from a checkpoint alone, and from the flags of a run that is to come."""
    prefixes, run = make_files(tmp_path), tmp_path / "run"
    flags = (
        f"--dataset-type webtext --train-iters 8 --data-path {prefixes[0]} --split 1,0,0 --eval-iters 0 --save {run}"
    )
    flags += " --global-batch-size 4"
    run_ranks(2, train, flags, str(tmp_path / "seen"))
    documents = check_steps(capsys, run, given([str(tmp_path / "seen")], 2))
    check_documents(capsys, run, prefixes[:1], documents, 8)
    rows = asked(capsys, "--load", run, "--iter", "3", "--show", "0")
    (run / "metrics.jsonl").unlink()
    alone = asked(capsys, "--load", run, "--iter", "3", "--show", "0")
    planned = asked(capsys, *MODEL.split(), *flags.split(), "--world-size", "2", "--iter", "3", "--show", "0")
    for found in (alone, planned):
        assert [row for row in found if row["kind"] == "sample"] == [row for row in rows if row["kind"] == "sample"]
    assert alone[0]["done"] and not planned[0]["done"]


@pytest.mark.sampled(2)
def test_time_round_after_time_round(tmp_path, run_ranks, capsys):
    """--dataloader-type cyclic, with more samples than the data was made for: smaller batches and more steps on resume."""
    prefixes, run, seen = make_files(tmp_path), tmp_path / "run", []
    flags = f"--dataloader-type cyclic --lr-decay-iters 5 --data-path {prefixes[0]} --split 1,0,0"
    flags += f" --eval-iters 0 --save {run} --load {run}"
    for more in ("--global-batch-size 12 --train-iters 5 --exit-interval 4", "--global-batch-size 4 --train-iters 15"):
        seen.append(str(tmp_path / f"seen{len(seen)}"))
        run_ranks(2, train, f"{flags} {more}", seen[-1])
    documents = check_steps(capsys, run, given(seen, 2))
    check_documents(capsys, run, prefixes[:1], documents, 15)
    consumed = read_history(run / "metrics.jsonl").steps[-1]["consumed_samples"]
    rows = asked(capsys, "--load", run, "--sample", *range(consumed), "--show", "0")
    numbers = [row["number"] for row in rows if "number" in row]
    assert len(numbers) == consumed > len(set(numbers))  # some a second time


def test_texts_are_found(tmp_path, run_ranks, capsys):
    prefixes, run = make_files(tmp_path), tmp_path / "run"
    flags = f"--data-path 1 {prefixes[0]} 1 {prefixes[1]} --split 1,0,0 --eval-iters 0 --train-iters 4 --save {run}"
    run_ranks(1, train, flags, str(tmp_path / "seen"))
    texts = [json.loads(line)["text"] for file in range(2) for line in (tmp_path / f"source{file}.jsonl").open()]
    for number, text in enumerate(texts):
        words = text.split()
        if len(words) < 12:
            continue
        for query in (text, " ".join(words[2:11]), " ".join(words[-9:]), words[5]):
            head, *rows = asked(capsys, "--load", run, "--text", query)
            expected = [at for at, one in enumerate(texts) if f" {query} " in f" {one} "]
            assert [number_of(row, row["document"]) for row in rows if row["exact"]] == expected and head[
                "documents"
            ] == len(expected)
            assert number in expected
    words = " ".join(texts[1].split()[2:14])
    for query, flags, expected in ((words.replace(" ", " ,  "), ["--words"], [1]), (words + " 99999", ["--words"], [])):
        _, *rows = asked(capsys, "--load", run, "--text", query, *flags)
        assert [number_of(row, row["document"]) for row in rows if row["exact"]] == expected
    half = " ".join(texts[1].split()[:12] + texts[2].split()[:4])
    rows = asked(capsys, "--load", run, "--text", half)
    assert rows[0]["documents"] == 0 and [row["document"] for row in rows[1:]] == [1] and 0.5 <= rows[1]["share"] < 1


def test_other_tokens_than_those_trained_on_are_told(tmp_path, run_ranks, capsys):
    prefixes, run = make_files(tmp_path), tmp_path / "run"
    run_ranks(
        1,
        train,
        f"--data-path {prefixes[0]} --split 1,0,0 --eval-iters 0 --train-iters 2 --save {run}",
        str(tmp_path / "s"),
    )
    assert asked(capsys, "--load", run, "--iter", "1")[0]["ledger"] == "agrees"
    ids = np.memmap(prefixes[0] + ".bin", np.uint16, "r+")
    ids[:] = ids[::-1].copy()
    ids.flush()
    assert asked(capsys, "--load", run, "--iter", "1")[0]["ledger"] == "differs"


@pytest.mark.parametrize(
    "words, message",
    [
        ("", "what is asked"),
        ("--iter 1", "which run"),
        ("--load gone --iter 1", "there is no run here"),
        ("--load run --iter 0", "--iter starts at 1"),
        ("--load run --iter 3", "there is no iteration 3: the run has 1 to 2"),
        ("--load run --doc x", "N or PREFIX:N"),
        ("--load run --doc other:3", "of which token file"),
        ("--load run --doc 99", "documents 0 to 11, and no 99"),
        ("--load run --sample 1000000", "past the end"),
        ("--load run --iter 1 --of test", "no evaluation on test data"),
        ("--load run --iter 1 --split 1,1,1", "--split: set by the run itself"),
        ("--load run --text=", "--text is empty"),
        ("--load run --doc 1 --words", "--words needs --text"),
    ],
)
def test_mistakes(short_run, monkeypatch, words, message):
    monkeypatch.chdir(short_run)
    with pytest.raises(Failure) as error:
        trace.main(words.split())
    assert message in str(error.value)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory, run_ranks):
    folder = tmp_path_factory.mktemp("short")
    [prefix, _] = make_files(folder)
    flags = f"--data-path {prefix} --split 1,0,0 --eval-iters 0 --train-iters 2 --save {folder}/run"
    run_ranks(1, train, flags, str(folder / "seen"))
    return folder


def test_words_for_people(short_run, capsys):
    trace.main(["--load", str(short_run / "run"), "--iter", "1", "--doc", "1", "--sample", "1", "--first", "1"])
    said = capsys.readouterr().out
    assert "iteration 1: samples 0 to 1, 2 at a time on 1 data ranks; the ledger agrees" in said
    assert "source0.jsonl at byte" in said and "the first 1 of 2 samples" in said and "sample 1: iteration 1" in said


@pytest.mark.parametrize(
    "name, separator, place",
    [
        ("a.jsonl", None, "at byte 1,200"),
        ("a.jsonl", "\\n", "at byte 1,200"),
        ("a.jsonl.gz", None, "at byte 1,200 of its unpacked lines"),
        ("a.tar", None, "at byte 1,200 of its unpacked lines"),
        ("a.txt", "\\n", "at byte 1,200 of the JSON lines it is converted to"),
        ("a.txt.zst", None, "at byte 1,200 of the JSON lines it is converted to"),
    ],
)
def test_the_stream_of_a_byte_position_is_named(name, separator, place):
    source = dict(file=name, offset=1200, piece=2, hash="", separator=separator)
    assert trace.Answers._words_of_source(source) == f", from {name} {place}, piece 2 of what was left of it"


def test_steps_that_a_rollback_has_taken_back(short_run, tmp_path, capsys):
    """As a spike of step 2 leaves it: back to step 1, and step 2 is left out when it comes again."""
    lines = (short_run / "run" / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] in ("run", "step")]
    again = {**json.loads(kept[-1]), "skipped": True}
    del again["ledger"]
    records = [*kept, json.dumps(dict(kind="rewind", iteration=1)), json.dumps(again)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records) + "\n")
    before = asked(capsys, "--load", short_run / "run", "--iter", "2", "--show", "0")
    head, *samples = asked(capsys, "--load", tmp_path, "--iter", "2", "--show", "0")
    assert head["skipped"] and head["ledger"] == "" and samples == before[1:] and not before[0]["skipped"]
    document = samples[0]["documents"][0]["document"]
    [row] = asked(capsys, "--load", tmp_path, "--doc", document)
    assert {one["iteration"] for one in row["seen"] if one["skipped"]} == {2}
    assert row["times_done"] == sum(one["iteration"] == 1 for one in row["seen"])


def test_a_run_that_does_not_train(short_run, run_ranks, tmp_path, capsys):
    shutil.copytree(short_run / "run", tmp_path / "run")
    prefix = short_run / "file0_text_document"
    flags = f"--data-path {prefix} --split 80,20,0 --train-iters 9 --skip-train --eval-iters 2 --override split"
    folders = f"--load {tmp_path}/run --save {tmp_path}/run"
    run_ranks(1, train, f"{flags} {folders} --override data-order,split", str(tmp_path / "seen"))
    [evaluation] = [record for record in read_history(tmp_path / "run" / "metrics.jsonl").evals]
    head, *samples = asked(
        capsys, "--load", tmp_path / "run", "--iter", evaluation["iteration"], "--of", "valid", "--show", "0"
    )
    assert head["samples"] == len(samples) == evaluation["samples"] == 4
    with pytest.raises(DataError, match="the run has 1 to 2"):
        trace.main(["--load", str(tmp_path / "run"), "--iter", "3"])


@pytest.mark.parametrize(
    "sizes",
    [
        dict(rampup_batch_size=None),
        dict(rampup_batch_size=[4, 4, 50]),
        dict(rampup_batch_size=[8, 8, 16]),
        dict(step_batch_size_schedule="0:4 48samples:24 100samples:16"),
    ],
)
def test_bounds_are_those_of_one_step_after_another(sizes):
    from megatron.settings.batch import batch_size

    batch = Batch(micro_batch_size=2, global_batch_size=16, train_samples=1000, **sizes)
    for start in (0, 7, 48, 51, 400):
        bounds = [start]
        for _ in range(20):
            bounds.append(bounds[-1] + batch_size(batch, 2, bounds[-1])[0])
        for steps in (0, 1, 3, 20):
            assert consumed_bounds(batch, 2, start, steps).tolist() == bounds[: steps + 1]


@pytest.mark.parametrize("interval, at", [(0, [5]), (2, [2, 4, 5]), (7, [5])])
def test_validations_to_come_are_those_of_training(interval, at):
    """At each interval and at the end; 0: at the end alone."""
    batch = Batch(micro_batch_size=1, global_batch_size=2, train_iters=5, eval_interval=interval, eval_iters=3)
    launch = SimpleNamespace(config=SimpleNamespace(batch=batch, data=Data()), last=5)
    found = [(one.iteration, one.first, one.size) for one in RunHistory([launch]).passes("valid")]
    assert found == [(iteration, 6 * place, 6) for place, iteration in enumerate(at)]
