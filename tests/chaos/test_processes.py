# SPDX-License-Identifier: Apache-2.0
"""The short tier of the chaos tool, as far as processes go; and that the tool turns red when the product is broken."""

import pytest

from megatron.errors import DataError, UsageError
from megatron.guard.watch import StepVerdict, Watch
from megatron.training.state import State
from tests.chaos import __main__ as chaos
from tests.chaos import numbers, processes, resuming, supervised
from tests.chaos.case import Case, Got, all_cases, chosen
from tests.chaos.conduct import campaign, conduct
from tests.chaos.report import read_lines, summary, table

pytestmark = pytest.mark.sampled(5)

CASES = {case.id: case for module in (processes, numbers, supervised, resuming) for case in module.cases()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the cases have in common: token files, clean runs."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.short])
def test_short_tier(name, folder):
    line = conduct(CASES[name], 0, folder / name.replace("/", "-"))
    assert line["got"] == line["expected"]
    assert not (folder / name.replace("/", "-")).exists()


# ---- planted bugs ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(5)
def test_a_ledger_that_is_off_by_one_turns_it_red(monkeypatch, tmp_path):
    restored = State.restored

    def off_by_one(self, record):
        return restored(self, {**record, "consumed_samples": record["consumed_samples"] + 1})

    monkeypatch.setattr(State, "restored", off_by_one)
    line = conduct(CASES["kill/dp2/retention/rank1"], 0, tmp_path / "case")
    assert not line["good"] and "had other samples" in line["got"], line


def test_a_nan_that_is_swallowed_turns_it_red(monkeypatch, tmp_path):
    monkeypatch.setattr(Watch, "judge", lambda *args, **keys: StepVerdict.UPDATE)
    line = conduct(CASES["nan/dp2/mlp/rank1"], 0, tmp_path / "case")
    assert not line["good"] and "ranks ended with" in line["got"], line


# ---- the frame -------------------------------------------------------------------------------------------------------


def _case(name, run, **more):
    return Case(name, "some group", "well", run, **more)


def test_what_a_case_does_stays_in_it_and_is_never_taken_for_success(tmp_path):
    import os
    import signal
    import time

    def killed(folder, seed):
        os.kill(os.getpid(), signal.SIGKILL)

    def leaves_a_child(folder, seed):
        if os.fork() == 0:
            time.sleep(600)
        (folder / "pid").write_text("there")
        return Got("well", exit=3, faults=7)

    cases = [
        _case("good", leaves_a_child),
        _case("wrong", lambda folder, seed: Got(f"ill {seed}")),
        _case("raises", lambda folder, seed: 1 / 0),
        _case("killed", killed),
        _case("hangs", lambda folder, seed: time.sleep(600), limit=0.3),
    ]
    started, said = time.monotonic(), []
    output = tmp_path / "lines.jsonl"
    lines = campaign(
        cases, tmp_path / "work", seed=5, repeat=2, output=output, stamp=dict(commit="c", date="d"), say=said.append
    )
    assert time.monotonic() - started < 200  # nobody waits for those who sleep
    assert [line["got"] for line in lines[:5]] == [
        "well",
        "ill 5",
        "ZeroDivisionError: division by zero",
        "the case itself ended with -9",
        "no answer within 0 s",
    ]
    assert [line["good"] for line in lines] == [True, False, False, False, False] * 2
    assert {(line["exit"], line["faults"]) for line in lines if line["id"] == "good"} == {(3, 7)}
    assert {line["seed"] for line in lines} == {5, 6} and lines == read_lines([output])
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == [f"{n:05d}" for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    assert "FAILED" in said[1] and "expected: well" in said[1] and "ill 5" in summary(lines)
    rows = table(lines).splitlines()
    assert rows[2].startswith("| some group | 10 | 22 | 2 of 10 | ") and rows[2].endswith(" | c, d |")
    assert "- `raises`, seed 6: ZeroDivisionError: division by zero" in rows


def test_cases_are_chosen_by_pattern_and_tier():
    cases = all_cases()
    assert len({case.id for case in cases}) == len(cases)
    kills = chosen(cases, "kill/tp2/*,flip/dp2/rank?")
    assert {case.id.split("/")[0] for case in kills} == {"kill", "flip"}
    assert 0 < len(chosen(kills, None, short=True)) < len(kills)
    assert all(case.expected and case.group for case in cases)


def test_a_file_that_is_no_report_is_told(tmp_path):
    (tmp_path / "x").write_text("no json")
    for name in ("x", "missing"):
        with pytest.raises(DataError, match=name):
            read_lines([tmp_path / name])


@pytest.mark.parametrize("flags", ["--repeat 0", "--random --minutes 0", "--random --minutes -1"])
def test_nothing_tried_is_no_success(flags, tmp_path):
    with pytest.raises(UsageError, match="nothing would be tried"):
        chaos.main([*flags.split(), "--output", str(tmp_path / "lines.jsonl")])
