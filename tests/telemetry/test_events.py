# SPDX-License-Identifier: Apache-2.0
import json
import re
import subprocess
import sys

import pytest

import pretrain_gpt
from megatron.errors import SettingsError, UsageError
from megatron.guard.run_state import look
from megatron.telemetry.events import COMMON, KINDS, LEVELS, EventLog, read_events
from megatron.telemetry.run_folder import find_events


def test_an_event_has_the_common_fields_then_its_own(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.record("spike", "loss 5 is far above 3", iteration=40, what="loss", value=5.0, median=float("nan"))
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert list(event) == [*COMMON, "what", "value", "median"]
    assert (event["event"], event["level"], event["iteration"], event["rank"]) == ("spike", "warning", 40, None)
    assert event["median"] is None  # JSON has no NaN
    assert read_events(tmp_path) == [event]


def test_warnings_and_errors_are_logged_once(tmp_path):
    lines = []
    log = EventLog(log=lines.append)
    log.record("spike", "a spike")
    log.record("not_finite", "a NaN")
    log.record("save", "a save")
    log.record("skipped_step", "the scale adjusts itself", level="info")
    log.record("end", "the launcher has reported it", level="error", code=1)
    assert lines == ["warning: a spike", "ERROR: a NaN"]


def test_torn_and_foreign_lines_are_skipped(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.record("start", "one")
    with path.open("a") as file:
        file.write(
            '[1]\nnull\n{"time": 1, "event": "newer kind", "level": "info", "message": "kept"}\n{"time": 17, "ev'
        )
    assert [event["message"] for event in read_events(tmp_path)] == ["one", "kept"]  # in the order of writing
    log.record("end", "two")  # not on the torn line
    assert [event["message"] for event in read_events(path)] == ["one", "kept", "two"]
    assert read_events(tmp_path / "elsewhere") == []


def test_the_file_stands_next_to_the_metrics(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "run" / "metrics_file.txt").write_text("../a.jsonl\n")
    assert find_events(tmp_path / "run") == tmp_path / "a.events.jsonl"
    assert find_events(tmp_path / "a.jsonl") == tmp_path / "a.events.jsonl"
    assert find_events(tmp_path / "b") == tmp_path / "b" / "events.jsonl"


def test_a_full_disk_costs_the_file_and_not_the_run(tmp_path):
    lines, heard = [], []
    log = EventLog(tmp_path / "file" / "events.jsonl", log=lines.append, listeners=[heard.append])
    (tmp_path / "file").touch()  # not a folder
    log.record("start", "one")
    log.record("start", "two")
    assert len(lines) == 1 and "no longer written" in lines[0]
    assert [event["message"] for event in heard] == ["one", "two"]


def test_other_ranks_record_nothing(tmp_path):
    EventLog(tmp_path / "events.jsonl", active=False).record("start", "one")
    assert read_events(tmp_path) == []


def test_only_fields_of_the_table():
    assert all(kind.level in LEVELS and kind.meaning and not kind.fields.keys() & {*COMMON} for kind in KINDS.values())
    with pytest.raises(AssertionError, match="no fields"):
        EventLog().record("start", "one", colour="red")


def test_the_page_has_every_kind_and_field(root):
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| .* \| (.*?) \|$", (root / "docs" / "events.md").read_text(), re.M)
    told = {kind: {*re.findall(r"`(\w+)`", fields)} for kind, _, fields in rows if kind in KINDS}
    assert told == {kind: {*known.fields} for kind, known in KINDS.items()}
    assert all(KINDS[kind].level in level for kind, level, _ in rows if kind in KINDS)


def test_settings_that_are_refused_are_the_newest_end_of_the_run(tmp_path, monkeypatch):
    """After an earlier launch: status has the reason of the launch that was refused, not the one before."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    EventLog(tmp_path / "events.jsonl").record("end", "ended", level="error", code=1, why="of the launch before")
    record = dict(kind="end", iteration=2, code=1, why="of the launch before")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (dict(kind="run"), record)))
    flags = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 9 --lr 1 "
    flags += f"--micro-batch-size 1 --train-iters 2 --tensor-model-parallel-size 2 --save {tmp_path}"
    with pytest.raises(SettingsError) as refused:
        pretrain_gpt.main(flags.split())
    event = read_events(tmp_path)[-1]
    assert (event["event"], event["code"], event["level"]) == ("end", 3, "error")
    assert (
        refused.value.what.startswith(event["why"])
        and event["why"].startswith("--tensor-mod")
        and look(tmp_path).why == event["why"]
    )


def test_words_that_are_not_understood_are_the_newest_end_of_the_run(tmp_path, monkeypatch):
    """Unless another job writes there, or nothing would be started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(dict(kind="run")) + "\n")
    flags = f"--num-layers 2 --hiden-size 8 --num-attention-heads 2 --lr x --save {tmp_path}".split()

    def ends(*more):
        with pytest.raises(UsageError):
            pretrain_gpt.main([*flags, *more])
        return read_events(tmp_path)

    [event] = ends()
    assert (event["event"], event["code"], event["level"]) == ("end", 2, "error")
    assert "--hiden-size" in event["why"] and look(tmp_path).why == event["why"]
    assert len(ends("--dry-run")) == 1 and len(ends()) == 2
    holds = "import sys; from megatron.storage.durable import WriterLock as L; from pathlib import Path; "
    holds += f"lock = L(Path({str(tmp_path)!r})); print('held', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout.readline() == b"held\n"
        assert len(ends()) == 2
        flags[flags.index("--hiden-size")], flags[flags.index("x")] = "--hidden-size", "1"
        more = "--seq-length 8 --mock-data --vocab-size 9 --micro-batch-size 1 --train-iters 2 --tp 2".split()
        with pytest.raises(SettingsError):
            pretrain_gpt.main([*flags, *more])
        assert len(read_events(tmp_path)) == 2
        job.stdin.close()


@pytest.mark.parametrize(
    "past, more, recorded",
    [
        (["start"], "--load {}", True),
        (["start"], "", False),
        (["start"], "--load {}/other", False),
        (["start", "end 0 "], "--load {}", False),
        (["end 0 "], "", False),
        (["start", "end 0 --exit-interval"], "--load {}", True),
        (["start", "end 9 stopped"], "--load {}", True),
        (["start", "end 0 ", "start"], "--load {}", True),
        (["start", "end 1 lost"], "", False),
    ],
)
@pytest.mark.parametrize("words, error", [("--num-layers 2 --lr x", UsageError), ("{} --tp 2", SettingsError)])
def test_a_refused_command_leaves_other_runs_alone(tmp_path, monkeypatch, past, more, recorded, words, error):
    """A finished run, and one that the command does not resume."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(dict(kind="run")) + "\n")
    for kind, code, why in ((f"{one}  ".split(" ", 2)) for one in past):
        EventLog(tmp_path / "events.jsonl").record(
            kind, kind, **({"code": int(code), "why": why.strip()} if code else {})
        )
    small = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 9 --lr 1 "
    small += "--micro-batch-size 1 --train-iters 2"
    flags = f"{words.format(small)} --save {tmp_path} {more.format(tmp_path)}".split()

    def ends():
        with pytest.raises(error):
            pretrain_gpt.main(flags)
        return len(read_events(tmp_path)) - len(past)

    assert ends() == recorded
    monkeypatch.setenv("MEGATRON_SUPERVISOR", str(tmp_path / "supervisor.json"))
    assert ends() == recorded + (past[-1] != "end 0 ")
