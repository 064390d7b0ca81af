# SPDX-License-Identifier: Apache-2.0
"""Of several the right one: the newest checkpoint, the failure that counts, the change that matters, the likely samples."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import xxhash

from megatron.checkpoint.all_ranks import on_all_ranks
from megatron.corpus.filtering import KEPT, Step, Tally
from megatron.corpus.report import _bars
from megatron.corpus.stage import Verdict
from megatron.errors import PeerLost, StorageError
from megatron.guard import attempt_watch
from megatron.guard.changes import changes
from megatron.settings.parse import parse_pretrain
from megatron.storage.durable import Damaged
from megatron.telemetry.run_folder import last_state


def test_the_state_of_a_run_is_that_of_its_newest_checkpoint(tmp_path):
    """By number: iteration 10 is after iteration 9. Folders without an index are not complete."""
    for iteration in (9, 10, 2):
        folder = tmp_path / f"iter_{iteration}"
        folder.mkdir()
        (folder / "state.json").write_text(json.dumps(dict(iteration=iteration)))
        (folder / "index.json").touch()
    (tmp_path / "iter_11").mkdir()
    assert last_state(str(tmp_path)) == dict(iteration=10)
    (tmp_path / "iter_10" / "state.json").write_text("{")
    assert last_state(str(tmp_path)) is None  # and not that of an older one


def test_a_failure_that_an_older_checkpoint_does_not_cure_comes_first():
    def fail():
        raise StorageError("the disk is full", None, "free some space")

    damaged = (None, (Damaged, "a byte is wrong", None, None))
    for before, after in (([damaged], []), ([], [damaged]), ([damaged], [damaged])):
        with pytest.raises(StorageError, match="the disk is full"):
            on_all_ranks(fail, lambda own, before=before, after=after: [*before, own, *after])
    with pytest.raises(Damaged):
        on_all_ranks(lambda: 1, lambda own: [own, damaged])


def test_dangerous_changes_are_told_first():
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --mock-data --vocab-size 9 --train-iters 9 --lr 1"
    saved = parse_pretrain(flags.split()).to_record()
    now = parse_pretrain(f"{flags} --lr 2 --num-layers 3 --weight-decay 0.5 --hidden-size 64".split())
    dangerous = [change.dangerous for change in changes(now, saved)]
    assert dangerous.count(True) == 2 and dangerous == sorted(dangerous, reverse=True)
    assert {"lr", "num_layers", "weight_decay", "hidden_size"} <= {change.name for change in changes(now, saved)}


def test_samples_of_a_shard_are_those_with_the_smallest_hashes(tmp_path):
    texts = [f"text {number}" for number in range(40)]
    tally = Tally(3)
    for text in texts:
        document = dict(text=text)
        tally.take(document, len(text), [Step("gate", Verdict(document), False)], document)
    tally.write_samples(tmp_path / "samples")
    written = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    hashes = sorted(xxhash.xxh3_64_intdigest(text.encode()) for text in texts)
    assert [entry["rank"] for entry in written] == hashes[:3]
    assert {entry["rule"] for entry in written} == {KEPT}


def test_bars_of_the_report_begin_with_the_largest(monkeypatch):
    axes = MagicMock()
    monkeypatch.setattr("megatron.corpus.report._picture", lambda draw, **_: draw(axes))
    _bars(dict(b=2, a=2, c=9, d=1), "#000000", "documents")
    _bars({f"{number:02}": number for number in range(30)}, "#000000", "documents")
    assert [call.args[1] for call in axes.barh.call_args_list] == [[9, 2, 2, 1], list(range(29, 9, -1))]


def test_the_rank_that_was_silent_longest_is_told(monkeypatch):
    said = []
    monkeypatch.setattr(attempt_watch, "log", said.append)
    monkeypatch.setattr(attempt_watch, "explain", lambda stills: [])
    monkeypatch.setattr(attempt_watch, "standstills", lambda *_: [])
    monkeypatch.setattr(attempt_watch.processes, "alive_here", lambda beat: beat.ended is None)
    ranks = [SimpleNamespace(rank=rank, ended=PeerLost.code if rank == 0 else None) for rank in range(4)]
    attempt_watch.AttemptWatch.log_lost(SimpleNamespace(folder=None), ranks, {0: 99.0, 1: 3.0, 2: 40.0, 3: 7.0})
    assert said == ["rank 0 gave up waiting; the oldest word is that of rank 2, 40 s ago"]
