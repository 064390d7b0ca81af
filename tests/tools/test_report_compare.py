# SPDX-License-Identifier: Apache-2.0
"""Several runs side by side: figures against sums by hand, samples against runs that are known to have had the same."""

import json
import re

import pytest

from megatron.errors import DataError, UsageError
from megatron.telemetry.history import read_history
from megatron.telemetry.report_compare import figures
from megatron.telemetry.run_record import JsonLines
from megatron.tools import report
from tests.tools.test_report import Wellformed, curves, kept
from tests.training.test_plain_loop import SIZE, pretrain

MODEL = dict(seq_length=16)


def write_run(folder, shift=0.0, steps=30, own="", commit="c0ffee", seed=1, samples=(0, 80), **optimizer):
    """Metrics of a run whose loss at step n is 5 - n / 10 + shift, with validations each 10 steps and at the end."""
    folder.mkdir(parents=True)
    lines = JsonLines(folder / "metrics.jsonl")
    config = dict(model=MODEL, optimizer=optimizer, logging=dict(seed=seed), checkpoint=dict(save=str(folder)))
    config |= dict(extra=dict(mine=dict(gate=0.5)), given=dict(lr=f"--lr {shift}"), data=dict(data_path=["corpus"]))
    lines.write(
        dict(kind="run", iteration=0, commit=commit, versions=dict(torch="2.13.0"), config=config, mesh=dict(tp=1))
    )
    for n in range(1, steps + 1):
        loss = {"lm loss": 5 - n / 10 + shift} | ({own: 0.5 / n} if own else {})
        more = dict(learning_rate=1e-3, grad_norm=1.0 / n, seconds=0.5 + shift, ledger=f"{n + seed:016x}")
        lines.write(dict(kind="step", iteration=n, consumed_samples=8 * n, batch_size=8) | loss | more)
        for final in [False] * (n % 10 == 0) + [True] * (n == steps):
            loss = {"lm loss": 4 - n / 10 + shift + final}
            places = dict(final=final, first_sample=samples[0], samples=samples[1])
            lines.write(dict(kind="eval", split="validation", iteration=n, **places) | loss)
    lines.close()
    return folder


def test_losses_are_compared_where_all_runs_have_been(tmp_path):
    """The training loss is the mean of the 16 steps up to the last that both have: 5 - 22.5 / 10."""
    runs = dict(
        a=read_history(write_run(tmp_path / "a") / "metrics.jsonl"),
        b=read_history(write_run(tmp_path / "b", shift=0.25, steps=45, own="router loss") / "metrics.jsonl"),
    )
    found = figures(runs)
    losses = {name: list(values.values()) for name, values in found["losses"].items()}
    assert losses.pop("router loss, mean of 16 steps to 30") == [
        None,
        pytest.approx(sum(0.5 / n for n in range(15, 31)) / 16),
    ]
    assert losses.pop("router loss, step 1") == [None, 0.5]
    expected = {
        "lm loss, step 1": [4.9, 5.15],
        "lm loss, mean of 16 steps to 30": [2.75, 3.0],
        "lm loss, validation at step 30": [1.0, 1.25],
        "lm loss, final validation": [2.0, 0.75],
    }
    assert losses == {name: pytest.approx(values) for name, values in expected.items()}
    assert (found["runs"]["b"]["tokens"], found["runs"]["b"]["seconds"]) == (45 * 8 * 16, 45 * 0.75)


def test_settings_that_differ(tmp_path):
    """Commit and seed always; what is equal, and what was typed to set it, never."""
    runs = dict(
        a=read_history(write_run(tmp_path / "a", lr=1e-3, betas=[0.9, 0.95]) / "metrics.jsonl"),
        b=read_history(write_run(tmp_path / "b", lr=2e-3, betas=[0.9, 0.95], shift=1.0, clip=0.5) / "metrics.jsonl"),
    )
    found = {name: list(values.values()) for name, values in figures(runs)["settings"].items()}
    save = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert list(found) == ["code commit", "--seed", "--lr", "--clip", "--save"]
    assert list(found.values()) == [["c0ffee", "c0ffee"], ["1", "1"], ["0.001", "0.002"], ["-", "0.5"], save]


def test_checksums_of_code_that_differ(tmp_path):
    runs = {name: read_history(write_run(tmp_path / name) / "metrics.jsonl") for name in "ab"}
    runs["a"].run["code"] = dict(files={"mine.py": "11", "data.py": "22"}, diff=None)
    runs["b"].run["code"] = dict(files={"mine.py": "12", "data.py": "22"}, diff="33")
    found = {name: list(values.values()) for name, values in figures(runs)["settings"].items()}
    assert (found["checksum of mine.py"], found["uncommitted changes"]) == (["11", "12"], ["-", "33"])
    assert "checksum of data.py" not in found


@pytest.mark.sampled(2)
def test_runs_say_whether_they_had_the_same_samples(tmp_path):
    """Runs as they are trained: with another rate, another seed, further validations, without a common one."""
    flags = f"{SIZE} --train-iters 4 --eval-interval 2 --eval-iters 1"
    kinds = dict(
        one="--lr 1e-3",
        rate="--lr 2e-3",
        seed="--lr 1e-3 --seed 5",
        often="--lr 1e-3 --eval-interval 1",
        never="--lr 1e-3 --eval-iters 0",
    )
    for name, more in kinds.items():
        pretrain(0, f"{flags} {more} --save {tmp_path / name}")
    runs = {name: read_history(tmp_path / name / "metrics.jsonl") for name in kinds}
    found = figures(runs)["same_samples"]
    words = {name: [told["training"], told["validation"]] for name, told in found.items()}
    assert words == dict(
        rate=["yes: the ledgers of 4 steps are equal", "yes: the same places of the same data in 3 validations"],
        seed=["no: other samples in 4 of 4 steps, first in step 1", "no: their data, sequence length or seed differ"],
        often=["yes: the ledgers of 4 steps are equal", "no: other places of the validation set, first at step 2"],
        never=["yes: the ledgers of 4 steps are equal", "unknown: no validation at a step that both have"],
    )
    lines = (tmp_path / "rate" / "metrics.jsonl").read_text()
    (tmp_path / "rate" / "metrics.jsonl").write_text(re.sub('"(ledger|first_sample)"', '"other"', lines))
    found = figures(dict(one=runs["one"], old=read_history(tmp_path / "rate" / "metrics.jsonl")))["same_samples"]["old"]
    assert all(told.startswith("unknown: ") for told in found.values())


def test_the_page_has_every_run_in_every_chart(tmp_path, capsys):
    for name, more in dict(a={}, b=dict(shift=0.25, own="router loss"), c=dict(shift=0.5, seed=2)).items():
        write_run(tmp_path / name, **more)
    report.main([str(tmp_path / name) for name in "abc"])
    assert capsys.readouterr().out == f"report: {tmp_path / 'compare.html'}\n"
    page = (tmp_path / "compare.html").read_text()
    assert all(source.startswith("data:") for source in Wellformed(page).sources)
    text = re.sub(r"<[^>]+>", "|", page)
    assert "||lm loss, mean of 16 steps to 30||2.7500||3.0000 (+0.25)||3.2500 (+0.5)||" in text
    assert "|a and b, training||yes: the ledgers of 30 steps are equal|" in text
    assert "|a and c, training||no: other samples in 30 of 30 steps, first in step 1|" in text
    data = kept(page)
    assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
    drawn = {chart["title"]: [(one["run"], one["kind"]) for one in chart["curves"]] for chart in data["charts"]}
    both = [(run, kind) for run in "012" for kind in ("steps", "validation")]
    steps = [(run, "steps") for run in "012"]
    names = ["Gradient norm before clipping", "Learning rate", "Time of a step"]
    assert drawn == {"Loss": both} | dict.fromkeys(names, steps) | {"router loss": [("1", "steps")]}
    assert [data["axes"]["1"][axis][2] for axis in ("samples", "tokens", "time")] == [24, 24 * 16, 3 * 0.75]


def test_figures_alone_and_names_of_runs(tmp_path, capsys):
    for name in ("one/run", "two/run"):
        write_run(tmp_path / name)
    report.main(["--json", str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run" / "metrics.jsonl")])
    found = json.loads(capsys.readouterr().out)
    assert list(found["runs"]) == ["one/run", "two/run"] and found["runs"]["one/run"]["iteration"] == 30
    report.main([str(tmp_path / "one" / "run"), "--json"])
    assert list(json.loads(capsys.readouterr().out)["runs"]) == ["run"]
    with pytest.raises(UsageError, match="named twice"):
        report.main([str(tmp_path / "one" / "run"), str(tmp_path / "one" / "run" / "metrics.jsonl")])
    with pytest.raises(DataError, match="no such file"):
        report.main([str(tmp_path / "one" / "run"), str(tmp_path / "three")])


def test_one_run_shows_its_own_sums(tmp_path):
    page = report.build(write_run(tmp_path / "a", own="router loss"))
    assert "router loss" in curves(page)
    text = re.sub(r"<[^>]+>", "|", page)
    assert "|mine|" in text and "|--gate||0.5|" in text and "|given|" not in text
