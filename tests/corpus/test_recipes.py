# SPDX-License-Identifier: Apache-2.0
"""Recipes: what is understood, what is refused in one clear message, and the commands around them."""

import json
from pathlib import Path

import pytest

from megatron.corpus import registry
from megatron.corpus.plan import make_plan
from megatron.corpus.recipe import parse_recipe
from megatron.errors import DataError, Failure, UsageError
from megatron.tools import corpus
from tests.corpus.conftest import SmallCorpus, final_texts

SHORT = "tests.corpus.toy_stages:TooShort"
MISTAKES = {
    "": "a recipe is",
    "- a": "a recipe is",
    "input: [": "r.yaml:1: not YAML",
    "input: a.jsonl": "stages is missing",
    "stages: [shuffle]": "input is missing",
    "input: a\nstages: []": "stages is missing",
    "input: a\ninput: b\nstages: [shuffle]": "r.yaml:2: input is given twice",
    "input: [7]\nstages: [shuffle]": "r.yaml:1: input is a list",
    "input: a\nshards-mb: 7\nstages: [shuffle]": "r.yaml:2: unknown key shards-mb; did you mean shard-mb?",
    "input: a\nshard-mb: big\nstages: [shuffle]": "r.yaml:2: shard-mb 'big' is no number",
    "input: a\nshard-mb: 0\nstages: [shuffle]": "shard-mb 0.0: more than 0",
    "input: a\nsamples: true\nstages: [shuffle]": "samples True is no whole number",
    "input: a\non-damaged: skip\nstages: [shuffle]": "on-damaged is stop or set-aside, not skip",
    "input: a\nstages: shuffle": "stages is a list",
    "input: a\nstages: [shufle]": "unknown stage shufle; did you mean shuffle?",
    "input: a\nstages:\n - shuffle\n - {a: {}, b: {}}": "r.yaml:4: a stage has one name (a, b)",
    "input: a\nstages: [{filter: gopher}]": "filter takes a list",
    "input: a\nstages: [filter]": "filter takes a list",
    "input: a\nstages: [{filter: [shuffle]}]": "shuffle is no filter",
    "input: a\nstages: [{filter: [gofer]}]": "unknown filter gofer",
    "input: a\nstages: [{shuffle: 7}]": "options are a mapping",
    "input: a\nstages: [{filter: ['nowhere.at:All']}]": "there is no module nowhere.at",
    "input: a\nstages: [{filter: ['tests.corpus.toy_stages:Al']}]": "has no Al",
    f"input: a\nstages: [{{filter: [{{'{SHORT}': {{leest: 3}}}}]}}]": "unknown option leest; did you mean least?",
    f"input: a\nstages: [{{filter: [{{'{SHORT}': {{least: x}}}}]}}]": "least 'x': a whole number is wanted",
    f"input: a\nstages: [{{filter: [{{'{SHORT}': {{least: 1.5}}}}]}}]": "least 1.5: a whole number is wanted",
    f"input: a\nstages: [{{filter: [{{'{SHORT}': {{words: x}}}}]}}]": "words 'x': a list of a text or null is wanted",
    f"input: a\nstages: [{{filter: [{{'{SHORT}': {{least: 1, least: 2}}}}]}}]": "least is given twice",
    "input: a\nstages: [{tokenize: {vocab-fil: x}}]": "unknown option vocab-fil; did you mean vocab-file?",
    "input: a\nstages: &a [{filter: *a}]": "r.yaml",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes_are_told_with_their_line(text, tmp_path):
    with pytest.raises(UsageError) as caught:
        make_plan(parse_recipe(text, "r.yaml"), tmp_path)
    assert MISTAKES[text] in str(caught.value) and "r.yaml" in str(caught.value)


def test_plain_words_are_texts():
    text = "input: a\nstages: [{x: {a: [no, 'yes', on], b: 1e-3, c: 7, d: true, e: null, f: '7', g: 1.5, h: 1.2.3}}]"
    [stage] = parse_recipe(text).stages
    assert stage.options == dict(a=["no", "yes", "on"], b=0.001, c=7, d=True, e=None, f="7", g=1.5, h="1.2.3")


def test_filters_that_follow_one_another_are_one_task(small_corpus, tmp_path):
    upper = "  - filter: ['tests.corpus.toy_stages:Upper']\n"
    plan = small_corpus.plan(tmp_path, stages="stages:\n" + upper * 3)
    assert [*plan.phases] == ["00-shards", "01-filter"]
    task = plan.tasks[plan.phases["01-filter"][0]]
    names = [name.rpartition(":")[2] for name, *_ in task.options["filters"]]
    assert names == ["Upper", "Upper-2", "Upper-3"]


@pytest.mark.parametrize(
    "wanted, told",
    [
        ("{url: {blacklist: [gone.txt]}}", "recipe.yaml:5: url: gone.txt: .*cannot be read"),
        ("perplexity", "recipe.yaml:5: perplexity: .*needs a model"),
        ("{language: {detector: fasttext, model: gone.bin}}", "recipe.yaml:5: language: .*gone.bin"),
        ("{language: {keep: [english]}}", "recipe.yaml:5: language: .*no language 'english'\\n.*, de, el, en, es, "),
        ("'needs_more:Filter'", "recipe.yaml:5: needs_more:Filter: ValueError: nothing works"),
    ],
)
def test_what_a_filter_cannot_do_without_is_told_before_anything_runs(
    small_corpus, tmp_path, monkeypatch, wanted, told
):
    (tmp_path / "needs_more.py").write_text("class Filter:\n def __init__(self): raise ValueError('nothing works')\n")
    monkeypatch.syspath_prepend(tmp_path)
    stages = f"stages:\n  - filter:\n    - {wanted}\n"
    with pytest.raises(Failure, match=told):
        small_corpus.plan(tmp_path / "out", stages=stages)


def test_what_stands_behind_tokens_is_refused(small_corpus, tmp_path):
    tokens = "  - tokenize: {tokenizer-type: NullTokenizer, vocab-size: 9}\n"
    with pytest.raises(UsageError, match=r"recipe.yaml:5: tokenize comes after tokenize, which makes tokens"):
        small_corpus.plan(tmp_path, stages="stages:\n" + tokens * 2)


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "needs_nothing_there.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Failure, match="needs the package no_such_package") as caught:
        registry.load("needs_nothing_there:X", "r.yaml:1")
    assert "'.[corpus]'" in caught.value.do


@pytest.fixture
def recipe(tmp_path) -> Path:
    """Of a small corpus, in a file."""
    made = SmallCorpus(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"input: {made.input}\nshard-mb: {made.shard_mb}\n"
        + f"stages:\n  - filter: [{{'{SHORT}': {{least: 12}}}}, 'tests.corpus.toy_stages:Upper']\n"
        + "  - tests.corpus.toy_stages:phases: {parts: 2}\n"
    )
    return path


def test_the_commands(recipe, tmp_path, capsys):
    output = str(tmp_path / "out")

    def said(*words: str) -> str:
        corpus.main([*words, "--output", output])
        return capsys.readouterr().out

    with pytest.raises(DataError, match="no run was started there"):
        said("status")
    assert "  01-filter: " in said("plan", str(recipe))
    assert not (tmp_path / "out" / "tasks").exists()
    told = said("run", str(recipe), "--workers", "1")
    assert "read: 120 documents" in told and "lines set aside: 3 (not JSON 3)" in told
    assert f"TooShort.too_short dropped {sum(len(t) < 12 for t in SmallCorpus(tmp_path).texts)}" in told
    assert final_texts(tmp_path / "out") == SmallCorpus(tmp_path).expected()
    assert "every file matches its receipt" in said("check")
    assert "done" in said("status")
    path = tmp_path / "out" / "status.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told | dict(state="running")))
    assert "running, 0 s ago" in said("status").replace("1 s ago", "0 s ago")
    path.write_text(json.dumps(told | dict(state="running", driver=["1-77", told["driver"][1]])))
    assert "killed: the same command resumes it" in said("status")
    phases = json.loads(said("status", "--json"))["phases"]
    assert phases and all(done == total for done, total in phases.values())
    assert "0 folders" in said("clean")
    victim = next((tmp_path / "out").glob("tasks/01-filter/*/documents.jsonl.zst"))
    victim.write_bytes(victim.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="1 of .* tasks are missing or damaged") as caught:
        said("check")
    assert "--verify" in caught.value.do
    assert "damaged: 01-filter/" in capsys.readouterr().out
    said("check", "--quick")
    said("resume", str(recipe), "--verify", "--workers", "1")
    said("check")


@pytest.mark.parametrize(
    "words, problem",
    [
        ([], "which command"),
        (["rnu"], "did you mean run"),
        (["run", "--output", "x"], "one recipe is wanted, got none"),
        (["run", "a", "b", "--output", "x"], "got 2: a b"),
        (["run", "no.yaml", "--output", "x"], "no.yaml: No such file"),
        (["run", "no.yaml"], "output"),
        (["run", "no.yaml", "--output", "x", "--runner", "spark"], "--runner"),
        (["run", "no.yaml", "--output", "x", "--workers", "0"], "--workers 0"),
    ],
)
def test_mistakes_on_the_command_line(words, problem):
    with pytest.raises(Failure, match=problem):
        corpus.main(words)


def test_the_output_may_not_be_a_file(recipe, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises((Failure, OSError), match="file"):
        corpus.main(["run", str(recipe), "--output", str(tmp_path / "file")])
