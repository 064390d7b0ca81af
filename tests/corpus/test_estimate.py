# SPDX-License-Identifier: Apache-2.0
"""The estimate of a recipe on machines that are not there: its plan, its rates and its clock."""

import json
import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.corpus import near_duplicates
from megatron.corpus.agenda import Agenda
from megatron.corpus.commit import read_receipt
from megatron.corpus.duplicates.pairs import save_pairs
from megatron.corpus.estimate import (
    CorpusNodes,
    Growth,
    PhaseSample,
    TaskCost,
    estimate,
    fictitious_plan,
    fitted,
    input_mb,
    rates_of,
    simulate,
)
from megatron.corpus.plan import TASKS, CorpusPlan, CorpusTask, PlannedStage, make_plan
from megatron.corpus.recipe import parse_recipe
from megatron.errors import DataError, SettingsError, UsageError
from megatron.tools import corpus

FREE = CorpusNodes(bandwidth=1e30, opens=1e30, open_seconds=0.0, hand_out_seconds=0.0, link=1e30, stream=1e30)
RECIPE = """input: [{input}]
shard-mb: {shard}
stages:
  - filter: [gate]
  - exact-duplicates
  - near-duplicates: {{preset: fineweb}}
  - shuffle: {{seed: 7}}
"""


# ---------------------------------------------------------------------------------------------------- the clock


def made_plan(rng: random.Random, tasks: int) -> CorpusPlan:
    """Tasks of random phases, each behind some earlier ones; some behind a list of them."""
    made: dict[str, CorpusTask] = {}
    lists = {}
    for number in range(tasks):
        earlier = [*made]
        needs = rng.sample(earlier, min(len(earlier), rng.choice([0, 0, 1, 2])))
        if earlier and rng.random() < 0.3:
            name = f"@{number}"
            lists[name] = tuple(f"{folder}/file" for folder in rng.sample(earlier, min(len(earlier), 3)))
            needs.append(name)
        folder = f"{rng.choice(['00-a', '01-b'])}/{number:04x}"
        made[folder] = CorpusTask(folder, "", (), tuple(needs), {})
    phases = {name: [folder for folder in made if folder.startswith(name)] for name in ("00-a", "01-b")}
    return CorpusPlan(made, [PlannedStage("all", phases, [], [])], [], 0, lists)


def step_by_step(plan: CorpusPlan, seconds: dict[str, int], workers: int) -> int:
    """When the last task of a plan ends, by looking at every whole second what has ended and what can begin."""
    makers = {
        folder: {"/".join(path.split("/")[:2]) for need in task.needs for path in plan.lists.get(need, (need,))}
        for folder, task in plan.tasks.items()
    }
    done: set[str] = set()
    running: dict[str, int] = {}
    begun: set[str] = set()
    now = 0
    while len(done) < len(plan.tasks):
        done |= {folder for folder, end in running.items() if end <= now}
        running = {folder: end for folder, end in running.items() if end > now}
        for folder in plan.tasks:
            if len(running) < workers and folder not in begun and makers[folder] <= done:
                running[folder] = now + seconds[folder]
                begun.add(folder)
        now += 1
    return now - 1


@pytest.mark.parametrize("seed", range(12))
def test_the_clock_is_that_of_a_plain_list_schedule(seed, tmp_path):
    rng = random.Random(seed)
    plan = made_plan(rng, 40)
    same = rng.choice([1, 3])  # of equal tasks it does not matter which begins first where several can
    seconds = dict.fromkeys(plan.tasks, same)
    for workers in (1, 2, 40):
        took, _ = simulate(Agenda(plan, tmp_path), lambda task: TaskCost(seconds[task.folder]), FREE, workers)
        if workers in (1, 40):  # no choice: any order gives the same
            assert took == step_by_step(plan, seconds, workers)
        else:
            assert took <= 2 * step_by_step(plan, seconds, workers)  # Graham: no list schedule is twice the best
            assert took >= max(len(seconds) * same / workers, step_by_step(plan, seconds, 40))
    seconds = {folder: rng.randrange(1, 9) for folder in plan.tasks}
    took, times = simulate(Agenda(plan, tmp_path), lambda task: TaskCost(seconds[task.folder]), FREE, 40)
    assert took == step_by_step(plan, seconds, 40) == max(one.last for one in times.values())
    assert sum(one.busy for one in times.values()) == sum(seconds.values())
    assert max(one.longest for one in times.values()) == max(seconds.values())


def test_tasks_without_needs_begin_in_their_order(tmp_path):
    lengths = [5, 1, 4, 2, 3, 6, 1, 1]
    tasks = {f"00-a/{n:02x}": CorpusTask(f"00-a/{n:02x}", "", (), (), {}) for n in range(len(lengths))}
    plan = CorpusPlan(tasks, [PlannedStage("a", {"00-a": [*tasks]}, [], [])], [])
    cost = dict(zip(tasks, lengths, strict=True))
    took, _ = simulate(Agenda(plan, tmp_path), lambda task: TaskCost(cost[task.folder]), FREE, 3)
    free = [0, 0, 0]
    for length in lengths:
        first = free.index(min(free))
        free[first] += length
    assert took == max(free) == step_by_step(plan, cost, 3)


def test_a_shared_file_system_is_never_faster_than_it_is(tmp_path):
    plan = made_plan(random.Random(5), 30)
    cost = lambda task: TaskCost(0.0, opened=100, moved=2e9)
    slow = replace(FREE, bandwidth=1e9)
    assert simulate(Agenda(plan, tmp_path), cost, slow, 40)[0] == pytest.approx(30 * 2)
    names = replace(FREE, opens=50.0)
    assert simulate(Agenda(plan, tmp_path), cost, names, 40)[0] == pytest.approx(30 * 2)
    driver = replace(FREE, hand_out_seconds=0.5)
    assert simulate(Agenda(plan, tmp_path), cost, driver, 40)[0] == pytest.approx(30 * 0.5)
    late = replace(FREE, open_seconds=0.25)
    assert simulate(Agenda(plan, tmp_path), cost, late, 1)[0] == pytest.approx(30 * 100 * 0.25)
    link = replace(FREE, nodes=2, link=1e9)
    assert simulate(Agenda(plan, tmp_path), cost, link, 40)[0] == pytest.approx(30 * 1)
    stream = replace(FREE, stream=1e8)
    assert simulate(Agenda(plan, tmp_path), cost, stream, 1)[0] == pytest.approx(30 * 20)


# ---------------------------------------------------------------------------------------------------- rates


def sample(text: float, paths: float, seconds: float) -> PhaseSample:
    return PhaseSample(text, paths, seconds, 0, 0, 0, 0)


def test_factors_are_found_again_and_never_negative():
    truth = Growth(0.5, 0.02, 0.003)
    rows = [sample(t, p, truth.at(t, p)) for t, p in [(64, 16), (2, 128), (64, 500), (7, 1)]]
    found = fitted(rows, "seconds", ("", "text", "paths"))
    assert [found.fixed, found.by_text, found.by_path] == pytest.approx([0.5, 0.02, 0.003])
    assert fitted([sample(64, 16, 3.2)], "seconds", ("text",)) == Growth(by_text=pytest.approx(0.05))
    assert fitted([sample(64, 16, 0.0)], "seconds", ("text",)) == Growth()
    down = [sample(1, 1, 9.0), sample(1, 100, 3.0)]  # less with more paths: noise
    assert fitted(down, "seconds", ("text", "paths")).by_path == 0


def test_factors_are_the_best_without_a_negative_one():
    """By the conditions of Karush, Kuhn and Tucker: where a factor is above 0 the slope is 0, elsewhere it goes up."""
    rng = np.random.default_rng(3)
    zeros = 0
    for _ in range(20):
        rows = [sample(*rng.uniform(0.1, 50, 2), rng.uniform(0.1, 9)) for _ in range(4)]
        matrix = np.array([[1.0, one.text, one.paths] for one in rows]) / np.array([[one.seconds] for one in rows])
        found = fitted(rows, "seconds", ("", "text", "paths"))
        factors = np.array([found.fixed, found.by_text, found.by_path])
        slope = matrix.T @ (matrix @ factors - 1)
        assert (factors >= 0).all() and (slope > -1e-9).all() and np.abs(slope[factors > 0]).max() < 1e-9
        zeros += int((factors == 0).sum())
    assert 10 < zeros < 50


# ---------------------------------------------------------------------------------------------------- plan and run


@pytest.fixture(scope="module")
def run_on_a_sample(tmp_path_factory):
    """(folder of inputs, output) of a finished run over six files of the same size."""
    pytest.importorskip("rensa")
    folder = tmp_path_factory.mktemp("sample")
    rng = random.Random(1)
    (folder / "in").mkdir()
    for number in range(6):
        texts = [" ".join(f"word{rng.randrange(300)}" for _ in range(120)) for _ in range(40)]
        texts += texts[:4]
        lines = "".join(json.dumps(dict(text=text)) + "\n" for text in texts)
        (folder / "in" / f"{number}.jsonl").write_text(lines[:36_000].rpartition("\n")[0].ljust(36_000 - 1) + "\n")
    (folder / "recipe.yaml").write_text(RECIPE.format(input=folder / "in", shard=0.0121))
    corpus.main(["run", str(folder / "recipe.yaml"), "--output", str(folder / "out"), "--workers", "1"])
    return folder, folder / "out"


def shape(plan: CorpusPlan) -> dict[str, list[int]]:
    return {
        phase: sorted(len(plan.inputs_of(plan.tasks[folder])) for folder in folders)
        for phase, folders in plan.phases.items()
    }


@pytest.mark.sampled(5)
def test_a_made_up_plan_is_that_of_real_files_of_these_sizes(run_on_a_sample):
    folder, output = run_on_a_sample
    recipe = parse_recipe((folder / "recipe.yaml").read_text())
    real = make_plan(recipe, output)
    made_up = fictitious_plan(recipe, 6 * 36_000, 36_000)
    assert shape(made_up) == shape(real) and len(made_up.stages[0].makes) == len(real.stages[0].makes) == 18
    assert input_mb(real) == pytest.approx(0.216)


def test_a_plan_grows_with_the_shards_and_not_with_their_square():
    pytest.importorskip("rensa")
    recipe = parse_recipe(RECIPE.format(input="x", shard=64) + "  - exact-substrings\n")
    small, large = (fictitious_plan(recipe, shards * 64e6, 64e6) for shards in (60, 240))
    held = lambda plan: sum(len(task.inputs) + len(task.needs) for task in plan.tasks.values())
    paths = lambda plan: sum(map(sum, shape(plan).values()))
    assert held(large) < 5 * held(small)
    assert paths(large) > 10 * paths(small)  # what its tasks read
    assert CorpusPlan.from_json(large.to_json()).lists == large.lists


@pytest.mark.sampled(2)
def test_files_bytes_and_opens_are_those_of_the_receipts(run_on_a_sample):
    folder, output = run_on_a_sample
    recipe = parse_recipe((folder / "recipe.yaml").read_text())
    rates = rates_of([output])
    rows, facts = estimate(recipe, rates, CorpusNodes(nodes=1, cores=2), 216_000, 36_000)
    assert facts.shards == 18 and facts.documents == pytest.approx(
        sum(len((path).read_text().split("\n")) - 1 for path in (folder / "in").glob("*")), rel=0.05
    )
    receipts = {}
    for row in rows:
        paths = sorted((output / TASKS / row.name).iterdir())
        receipts[row.name] = [read_receipt(path) for path in paths]
        files = [file for path in paths for file in path.rglob("*") if file.is_file()]
        assert row.tasks == len(paths) and row.files == len(files), row.name
        size = sum(file.stat().st_size for file in files if file.name != "receipt.json")
        assert row.written == pytest.approx(size), row.name
        core = sum(receipt["attempt"]["core_seconds"] for receipt in receipts[row.name])
        assert row.core_seconds == pytest.approx(core), row.name
    assert facts.tasks == sum(map(len, receipts.values()))
    by_name = {row.name: row for row in rows}
    signed, gathered = by_name["03-near-duplicates.sign"], by_name["04-shuffle.gather"]
    assert by_name["03-near-duplicates.pair"].shuffled == signed.written and signed.shuffled == 0
    assert gathered.shuffled == gathered.read == by_name["04-shuffle.scatter"].written
    assert gathered.paths == 18 and by_name["03-near-duplicates.pair"].paths == 1 + 18
    indices = (output / TASKS / "04-shuffle.scatter").glob("*/index.bin")
    pieces = sum(path.stat().st_size for path in indices) // 40
    least = 18 * 18 + pieces  # each task opens an index of each shard, and the file of each piece
    assert least < gathered.opened < least + 10 * 18  # and a few of its own
    assert facts.seconds == max(row.last for row in rows)
    assert facts.seconds >= sum(row.core_seconds for row in rows) / 2


def test_memory_of_the_task_that_groups_grows_as_the_stage_says(tmp_path):
    """Of all that a phase says it takes, with numbers of documents that tracemalloc can weigh."""
    peaks = []
    for documents in (1 << 19, 1 << 21):
        folder = tmp_path / str(documents)
        inputs = [folder / name for name in ("number", "compare", "decide")]
        for one in inputs:
            one.mkdir(parents=True)
        np.save(inputs[0] / near_duplicates.COUNTS, np.array([[documents, documents]]))
        pairs = np.stack([np.arange(1000), np.arange(1000) + 5000], 1)
        for one in inputs[1:]:
            save_pairs(one / "accepted.npy", pairs)
            np.save(one / "histogram.npy", np.zeros(20, np.int64))
            (one / "examples.json").write_text("[]")
        (folder / "out").mkdir()
        tracemalloc.start()
        options = dict(shards=1, ranges=1, memory=1 << 30)
        found = near_duplicates.group(inputs, folder / "out", options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert found["to_remove"] == 1000
    # The shard that is looked at has all the documents here: 8 + 8 + 4 bytes and less for each of its own.
    more = (peaks[1] - peaks[0]) / ((1 << 21) - (1 << 19))
    assert near_duplicates.GROUP_BYTES <= more <= near_duplicates.GROUP_BYTES + 41


# ---------------------------------------------------------------------------------------------------- the command


def told(argv: list[str], capsys) -> str:
    corpus.main(["estimate", *argv])
    return capsys.readouterr().out


@pytest.mark.sampled(2)
def test_the_command(run_on_a_sample, capsys):
    folder, output = run_on_a_sample
    flags = [str(folder / "recipe.yaml"), "--rates", str(output), "--input-tb", "1e-6", "--file-gb", "1e-4"]
    text = told([*flags, "--nodes", "2"], capsys)
    assert "02-exact-duplicates.match" in text and "what breaks next" in text and "what is read" not in text
    found = json.loads(told([*flags, "--json"], capsys))
    faster = json.loads(told([*flags, "--json", "--nodes", "1", "--cores-per-node", "1"], capsys))
    assert found["facts"]["seconds"] < faster["facts"]["seconds"]
    assert [row["name"] for row in found["phases"]] == [*rates_of([output]).phases]
    assert not (folder / "made-up").exists() and not Path("/made-up").exists()


@pytest.mark.parametrize(
    "flags, error, words",
    [
        (["--rates", "nowhere"], DataError, "contains no run"),
        (["--nodes", "0"], SettingsError, "--nodes 0: more than 0"),
        (["--input-tb", "-1"], SettingsError, "more than 0"),
        (["--node-memory-gb", "0.5"], SettingsError, "task-memory-gb"),
        (["--nodes", "two"], Exception, "nodes"),
        (["--noodles", "2"], UsageError, "noodles"),
    ],
)
def test_wrong_flags(run_on_a_sample, flags, error, words):
    folder, output = run_on_a_sample
    rates = [] if "--rates" in flags else ["--rates", str(output)]
    with pytest.raises(error, match=words):
        corpus.main(["estimate", str(folder / "recipe.yaml"), *rates, *flags])


def test_rates_of_another_recipe_and_of_a_run_that_is_not_done(run_on_a_sample, tmp_path, capsys):
    folder, output = run_on_a_sample
    other = tmp_path / "other.yaml"
    other.write_text((folder / "recipe.yaml").read_text().replace("  - exact-duplicates\n", ""))
    with pytest.raises(DataError, match="another recipe"):
        corpus.main(["estimate", str(other), "--rates", str(output)])
    with pytest.raises(SettingsError, match="826,446,281 shards"):
        corpus.main(["estimate", str(folder / "recipe.yaml"), "--rates", str(output)])
    with pytest.raises(UsageError, match="one recipe is wanted"):
        corpus.main(["estimate", "--rates", str(output)])
    half = tmp_path / "half"
    half.mkdir()
    (half / "plan.json").write_bytes((output / "plan.json").read_bytes())
    with pytest.raises(DataError, match="tasks are not done"):
        corpus.main(["estimate", str(folder / "recipe.yaml"), "--rates", str(half)])
