# SPDX-License-Identifier: Apache-2.0
"""Plan, commit and the local runner: the same bytes through kills at every step, nothing lost, nothing doubled."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron.corpus import commit, driver
from megatron.corpus.agenda import Agenda, execute
from megatron.corpus.commit import Digests
from megatron.corpus.counts import summed
from megatron.corpus.driver import check, clean, counts_by_phase, run
from megatron.corpus.plan import TASKS, CorpusPlan, make_plan, save_lists
from megatron.corpus.runners.local import run_local, workers_for
from megatron.errors import DataError, SettingsError, StorageError
from megatron.storage.processes import process_start_ticks
from tests.chaos.disk import watched
from tests.corpus.conftest import SmallCorpus, final_digest, final_texts


def leftovers(output: Path) -> list[Path]:
    return [*output.glob("tasks/*/.*"), *output.glob(".final-*")]


def test_one_worker_and_three_make_what_a_plain_loop_makes(small_corpus, tmp_path):
    one, three = tmp_path / "one", tmp_path / "three"
    plan = small_corpus.run(one)
    assert small_corpus.run(three, workers=3).id == plan.id
    assert final_texts(one) == small_corpus.expected()
    assert final_digest(one) == final_digest(three)
    assert len(plan.phases["00-shards"]) > 3 and leftovers(one) == leftovers(three) == []
    found = check(plan, three)
    assert found.missing == found.damaged == [] and found.quarantined == {}


def test_counts_of_receipts_add_up(small_corpus, tmp_path):
    plan = small_corpus.run(tmp_path / "out")
    shards, filtered, scattered, found, kept = counts_by_phase(plan, tmp_path / "out").values()
    lines = small_corpus.input.read_text().split("\n")[:-1]
    assert shards["lines"] == len(lines) and shards["blank"] == lines.count("")
    assert shards["documents"] == len(small_corpus.texts) == filtered["documents_in"]
    assert shards["documents"] + sum(shards["rejected"].values()) + shards["blank"] == shards["lines"]
    assert shards["rejected"] == {"not JSON": 3}
    assert shards["bytes"] == filtered["bytes_in"] == sum(len(text) for text in small_corpus.texts)
    [short] = filtered["dropped"].values()
    assert short["documents"] == sum(len(text) < 12 for text in small_corpus.texts)
    assert filtered["documents"] + short["documents"] == filtered["documents_in"]
    assert filtered["bytes"] + short["bytes"] == filtered["bytes_in"]
    changed = sum(text.startswith("change") for text in small_corpus.texts)
    assert filtered["changed"] == {"tests.corpus.toy_stages:Upper.upper": changed}
    assert sum(filtered["domains"].values()) == filtered["documents"] == scattered["rows"]
    assert kept["documents"] + found["removed"] == scattered["rows"]
    [figure] = filtered["figures"].values()
    assert sum(figure["kept"].values()) == filtered["documents"]
    assert sum(figure["dropped"].values()) == short["documents"]


def in_child(body) -> int:
    """The exit status of a forked process that runs it."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def dying_after(steps: int, die):
    """In place of `commit.on_step`: dies at the step of this number."""
    left = [steps]

    def on_step(step: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            die(step)

    return on_step


def kill(step: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sampled(5)
def test_a_driver_killed_at_every_step_of_a_commit_goes_on(tmp_path):
    corpus = SmallCorpus(tmp_path, 100)
    corpus.run(tmp_path / "calm")
    output = tmp_path / "killed"
    plan = corpus.plan(output)

    def body(steps):
        commit.on_step = dying_after(steps, kill)
        run(plan, output, partial(run_local, workers=1))

    kills = 0
    while in_child(partial(body, kills % 7)) == signal.SIGKILL:  # a commit has six steps
        kills += 1
        assert kills < 500
    assert kills > 21 and final_digest(output) == final_digest(tmp_path / "calm") and leftovers(output) == []
    assert check(plan, output).damaged == []


def test_a_worker_killed_in_the_middle_is_replaced(small_corpus, tmp_path):
    small_corpus.run(tmp_path / "calm")
    plan = small_corpus.plan(tmp_path / "killed")
    agenda_kills = []

    def runner(agenda, output):
        def die_once_a_process(step):  # in the workers, which inherit it
            if step in ("fill", "receipt", "rename", "end"):
                marker = tmp_path / f"killed-{step}"
                if not marker.exists():
                    marker.touch()
                    kill(step)

        commit.on_step, before = die_once_a_process, commit.on_step
        try:
            run_local(agenda, output, workers=2)
        finally:
            commit.on_step = before
        agenda_kills.extend(reason for reasons in agenda.failures.values() for reason in reasons)

    run(plan, tmp_path / "killed", runner)
    assert len(agenda_kills) == 4 and all("SIGKILL" in reason for reason in agenda_kills)
    assert final_digest(tmp_path / "killed") == final_digest(tmp_path / "calm") and leftovers(tmp_path / "killed") == []


@pytest.mark.parametrize("kill_itself, workers", [(False, 1), (False, 2), (True, 2)])
def test_a_poison_document_is_set_aside_and_named(small_corpus, tmp_path, kill_itself, workers):
    """Its shard fails four times; the other shards are filtered; what needs all shards is left undone."""
    more = f', {{"tests.corpus.toy_stages:Poison": {{word: "text 53 ", kill: {str(kill_itself).lower()}}}}}'
    plan, output = small_corpus.plan(tmp_path / "out", more=more), tmp_path / "out"
    with pytest.raises(DataError) as caught:
        run(plan, output, partial(run_local, workers=workers))
    words = str(caught.value)
    assert caught.value.code == 4 and "1 of " in words and "filter, shard" in words
    assert ("SIGKILL" if kill_itself else "text 53  in the text") in words
    found = check(plan, output)
    [(folder, reason)] = found.quarantined.items()
    assert folder.startswith("01-filter/") and plan.tasks[folder].about in words
    if not kill_itself:
        assert "site1.org/53" in reason
    told = json.loads(next((output / "quarantine").iterdir()).read_text())
    assert len(told["reasons"]) == 4
    done = [name for name in plan.tasks if name not in found.missing]
    assert {f for f in plan.tasks if plan.tasks[f].phase in ("00-shards", "01-filter")} - {folder} <= set(done)
    scattered = [name for name in done if "scatter" in name]
    assert len(scattered) == len(plan.phases["01-filter"]) - 1
    assert not (output / "final").exists()


def test_a_full_disk_ends_the_run_and_the_same_command_goes_on(tmp_path):
    corpus = SmallCorpus(tmp_path, 30)
    corpus.run(tmp_path / "calm")
    output = tmp_path / "full"
    output.mkdir()
    plan = corpus.plan(output)
    room, failures = 0, 0
    while True:
        left = [room]

        def before(change, left=left):
            if change.kind in ("write", "create", "mkdir"):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        try:
            with watched(output, before):
                run(plan, output, partial(run_local, workers=1))
            break
        except StorageError as error:
            failures += 1
            assert error.code == 6 and "No space left" in str(error)
        room += 7
    assert failures > 5 and final_digest(output) == final_digest(tmp_path / "calm") and leftovers(output) == []


def test_a_second_attempt_drops_its_own_and_a_different_one_is_an_error(tmp_path):
    folder = tmp_path / "01-x" / "abc"

    def fill(text):
        return lambda work: (work / "a").write_text(text) and dict(documents=1)

    def fill_while_another_does(text, other):
        def body(work):
            commit.commit(folder, fill(other), {})
            return fill(text)(work)

        return body

    commit.commit(folder, fill_while_another_does("same", "same"), {})
    assert commit.read_receipt(folder, whole=True)["counts"] == dict(documents=1)
    shutil.rmtree(folder)
    with pytest.raises(DataError, match=r"two attempts wrote different bytes \(a\)"):
        commit.commit(folder, fill_while_another_does("one", "other"), {})
    assert (folder / "a").read_text() == "other" and [path.name for path in folder.parent.iterdir()] == ["abc"]


def test_only_dead_attempts_are_removed(tmp_path):
    host = os.uname().nodename
    mine = f"{os.getpid()}-{process_start_ticks(os.getpid())}"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    names = {f".tmp-a.{mine}.x.{host}": True, f".tmp-b.{child}-1.x.{host}": False, ".tmp-c.7-7.x.elsewhere": True}
    names |= {f".tmp-d.{os.getpid()}-1.x.{host}": False, ".dead-e": False, "f": True}
    for name in names:
        (tmp_path / name).mkdir()
    old = tmp_path / ".tmp-g.7-7.x.elsewhere"
    old.mkdir()
    os.utime(old, (time.time() - 1e6,) * 2)
    commit.remove_dead_attempts(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {name for name, stays in names.items() if stays}


def test_damage_is_found_and_made_good(small_corpus, tmp_path):
    output = tmp_path / "out"
    plan = small_corpus.run(output)
    before = final_digest(output)
    folder = next(f for f in plan.tasks if f.startswith("01-filter"))
    path = output / TASKS / folder / "documents.jsonl.zst"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert check(plan, output, whole=False).damaged == [] and check(plan, output).damaged == [folder]
    run(plan, output, partial(run_local, workers=1), whole=True)
    assert check(plan, output).damaged == []
    assert final_digest(output) == before
    last = output / TASKS / plan.final[1]
    last.write_bytes(last.read_bytes()[:-1] + b"?")
    assert final_digest(output) != before  # it is the same file under another name
    run(plan, output, partial(run_local, workers=1), whole=True)
    assert final_digest(output) == before
    path.write_bytes(b"")
    shutil.rmtree(output / TASKS / plan.phases["00-shards"][0])
    run(plan, output, partial(run_local, workers=1))
    assert check(plan, output).damaged == [] and final_digest(output) == before


# ---------------------------------------------------------------------------------------------------- the plan


def test_a_plan_depends_on_content_and_options_alone(small_corpus, tmp_path):
    first = small_corpus.plan(tmp_path / "a")
    moved = SmallCorpus(tmp_path, 120)
    moved.input = tmp_path / "moved.jsonl"
    shutil.copyfile(small_corpus.input, moved.input)
    assert moved.plan(tmp_path / "b").id == first.id
    assert CorpusPlan.from_json(first.to_json()).id == first.id
    longer = small_corpus.recipe()
    [short, *rest] = longer.stages
    other = make_plan(replace(longer, stages=[replace(short, options={"least": 13}), *rest]), tmp_path / "c")
    assert set(other.phases["00-shards"]) == set(first.phases["00-shards"])
    assert not set(other.phases["01-filter"]) & set(first.phases["01-filter"])
    with open(moved.input, "r+b") as file:
        file.write(b'{"text": "!')
    changed = moved.plan(tmp_path / "b")
    assert not set(changed.tasks) & set(first.tasks)


def test_a_further_input_leaves_what_is_done(small_corpus, tmp_path):
    output = tmp_path / "out"
    first = small_corpus.run(output)
    extra = tmp_path / "a-extra.jsonl"
    extra.write_text('{"text": "one more document of its own"}\n' * 300)
    recipe = replace(small_corpus.recipe(), input=[str(extra), str(small_corpus.input)])
    plan = make_plan(recipe, output)
    assert set(first.phases["00-shards"]) <= set(plan.phases["00-shards"])
    assert set(first.phases["01-filter"]) <= set(plan.phases["01-filter"])
    done: list[str] = []

    def runner(agenda, output):
        while task := agenda.take():
            done.append(task.folder)
            agenda.finish(execute(task, output))

    run(plan, output, runner)
    assert len(plan.tasks) > len(done) and not set(done) & set(first.tasks)
    assert final_texts(output) == ["one more document of its own", *small_corpus.expected()]
    gone, size = clean(plan, output)
    assert gone == len(set(first.tasks) - set(plan.tasks)) and size > 0
    assert check(plan, output).missing == []


def test_the_same_input_twice_is_one_task_that_counts_twice(small_corpus, tmp_path):
    recipe = replace(
        small_corpus.recipe(), input=[str(small_corpus.input)] * 2, stages=small_corpus.recipe().stages[:1]
    )
    recipe = replace(recipe, stages=[replace(recipe.stages[0], options={"least": 0})])
    plan = make_plan(recipe, tmp_path / "out")
    run(plan, tmp_path / "out", partial(run_local, workers=1))
    assert final_texts(tmp_path / "out") == small_corpus.texts * 2
    assert counts_by_phase(plan, tmp_path / "out")["00-shards"]["documents"] == 2 * len(small_corpus.texts)
    assert 2 * len({*plan.phases["00-shards"]}) == len(plan.phases["00-shards"])


def test_options_that_name_files_count_with_their_bytes(small_corpus, tmp_path):
    words = tmp_path / "words.txt"
    stages = f"stages:\n  - filter: [{{'tests.corpus.toy_stages:TooShort': {{path: {words}}}}}]\n"
    words.write_text("one")
    first = small_corpus.plan(tmp_path / "out", stages=stages).id
    assert small_corpus.plan(tmp_path / "out", stages=stages).id == first
    words.write_text("two")
    assert small_corpus.plan(tmp_path / "out", stages=stages).id != first


def test_a_digest_of_a_file_that_has_just_changed_is_not_kept(tmp_path):
    """Its time may not show the next change."""
    path = tmp_path / "words.txt"
    path.write_text("one")
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    with Digests(tmp_path) as digests:
        first = digests.of(str(path))
    with open(path, "r+") as file:
        file.write("two")
    os.utime(path, ns=times)
    with Digests(tmp_path) as digests:
        assert digests.of(str(path)) != first
    os.utime(path, ns=(0, 10**18))
    with Digests(tmp_path) as digests:
        kept = digests.of(str(path))
    assert json.loads((tmp_path / "digests.json").read_text())[str(path)][3] == kept


def test_workers_fit_into_the_memory():
    assert workers_for(8, 4.0, 1.0) == 4 and workers_for(2, 100.0, 1.0) == 2 and workers_for(3, None, 9.0) == 3
    with pytest.raises(SettingsError, match="--memory-gb 0.5"):
        workers_for(2, 0.5, 1.0)


def test_sums():
    rows = [dict(a=1, b=dict(c=2), d=[1], e="x"), dict(a=2.5, b=dict(c=1, f=1), d=[2], e="y")]
    assert summed(rows) == dict(a=3.5, b=dict(c=3, f=1), d=[1, 2], e="x")


def test_an_agenda_gives_nothing_out_whose_needs_are_not_there(small_corpus, tmp_path):
    plan = small_corpus.plan(tmp_path / "out")
    save_lists(plan, tmp_path / "out")
    agenda = Agenda(plan, tmp_path / "out")
    done: set[str] = set()
    while task := agenda.take():
        makers = {"/".join(path.split("/")[:2]) for path in plan.inputs_of(task) if not path.startswith("/")}
        assert makers <= done
        agenda.finish(execute(task, tmp_path / "out"))
        done.add(task.folder)
    assert done == set(plan.tasks) and agenda.over and agenda.left == 0


@pytest.mark.full
def test_a_task_that_takes_too_much_memory_is_ended_and_named(small_corpus, tmp_path):
    plan = small_corpus.plan(tmp_path / "out", more=', {"tests.corpus.toy_stages:Hog": {megabytes: 400}}')
    with pytest.raises(DataError, match=r"it held 0\.\d+ GB when all tasks held 0\.\d+ of --memory-gb 0\.3"):
        run(plan, tmp_path / "out", partial(run_local, workers=2, memory=300_000_000))
    [folder] = check(plan, tmp_path / "out").quarantined
    assert folder.startswith("01-filter")
    run(plan, tmp_path / "out", partial(run_local, workers=2, memory=2_000_000_000))


@pytest.mark.full
def test_a_hundred_random_kills(tmp_path, root):
    """Of the driver or of a worker, at random moments of a run with two workers."""
    corpus = SmallCorpus(tmp_path, 1500)
    corpus.run(tmp_path / "calm")
    (tmp_path / "recipe.yaml").write_text(
        f"input: {corpus.input}\nshard-mb: {corpus.shard_mb}\n"
        + "stages:\n  - filter: [{'tests.corpus.toy_stages:TooShort': {least: 12}}, 'tests.corpus.toy_stages:Upper']\n"
        + "  - tests.corpus.toy_stages:phases: {parts: 2}\n"
    )
    output, rng, kills = tmp_path / "killed", random.Random(7), 0
    words = [sys.executable, "-m", "megatron.tools.corpus", "run", str(tmp_path / "recipe.yaml")]
    words += ["--output", str(output), "--workers", "2"]
    while kills < 100:
        if kills % 10 == 0:
            shutil.rmtree(output, ignore_errors=True)
        process = subprocess.Popen(words, cwd=root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and kills < 100:
            time.sleep(rng.uniform(0, 0.4))
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            victims = children.read_text().split() if children.exists() else []
            victim = int(rng.choice(victims)) if victims and rng.random() < 0.6 else process.pid
            try:
                os.kill(victim, signal.SIGKILL)
                kills += 1
            except ProcessLookupError:
                pass
        process.wait()
    assert subprocess.run(words, cwd=root).returncode == 0
    assert final_digest(output) == final_digest(tmp_path / "calm") and leftovers(output) == []
    assert driver.check(corpus.plan(output), output).damaged == []


def test_a_task_is_another_when_anything_in_a_list_that_it_reads_is(small_corpus, tmp_path):
    """`match` is called with a list alone: its id follows bytes of every input, and no path."""
    first = small_corpus.input.read_text()
    size = len(first) // 3
    stages = "stages:\n  - exact-duplicates\n"

    def ids(folder: str, text: str) -> dict[str, list[str]]:
        (tmp_path / folder).mkdir()
        for number in range(4):
            (tmp_path / folder / f"{number}.jsonl").write_text(text[size * number : size * (number + 1)] or "{}\n")
        recipe = replace(small_corpus.recipe(stages=stages), input=[str(tmp_path / folder)])
        plan = make_plan(recipe, tmp_path / "out")
        [match] = plan.phases["01-exact-duplicates.match"]
        assert len(plan.tasks[match].inputs) == 1 < len(plan.inputs_of(plan.tasks[match]))
        return plan.phases

    one, same, other = ids("a", first), ids("b", first), ids("c", first[:-3] + "x" + first[-2:])
    assert one == same
    changed = [phase for phase in one if one[phase] != other[phase]]
    assert "01-exact-duplicates.match" in changed and "01-exact-duplicates.number" in changed
    assert 0 < len(set(one["00-shards"]) & set(other["00-shards"])) < len(one["00-shards"])


def test_clean_leaves_the_lists_of_the_plan_and_no_others(small_corpus, tmp_path):
    output = tmp_path / "out"
    plan = small_corpus.run(output)
    kept = {path.name for path in (output / "lists").iterdir()}
    assert len(kept) == len(plan.lists) > 0
    (output / "lists" / "0123.json").write_text("[]")
    clean(plan, output)
    assert {path.name for path in (output / "lists").iterdir()} == kept
