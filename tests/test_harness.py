# SPDX-License-Identifier: Apache-2.0
"""The rank harness itself: right answers, honest failures, nothing left behind."""

import os
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.forked import RankFailed
from tests import huge_pages, tree

ROOT = Path(__file__).resolve().parents[1]
WRITTEN = {"", ".py", ".sh", ".md", ".txt", ".sbatch", ".css", ".js", ".html", ".yaml", ".toml", ".cpp"}
DRAWN = {".png", ".svg", ".html"}  # in docs/
OTHERS = {
    "docs/grafana.json",
    "megatron/planner/published_runs.csv",
    "megatron/telemetry/dashboard/page/uPlot.LICENSE",
    "megatron/telemetry/web_page/icon.svg",
}


def test_ranks_reduce_and_answer_in_rank_order(run_ranks):
    def body(rank, factor):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x)
        return rank * factor, x

    answers = run_ranks(3, body, 10)
    assert [a for a, _ in answers] == [0, 10, 20]
    assert all(x.item() == 3.0 for _, x in answers)


def test_the_first_failing_rank_is_the_one_reported(run_ranks):
    def body(rank):
        if rank == 1:
            raise ValueError("seven is not eight")
        dist.all_reduce(torch.ones(1))  # hangs or breaks because rank 1 is gone

    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 failed first(.|\n)*seven is not eight"):
        run_ranks(2, body, timeout=250)
    assert time.monotonic() - start < 200  # long before anybody runs out of patience


@pytest.mark.sampled(5)
def test_a_stopped_rank_is_noticed_and_killed(run_ranks, tmp_path):
    def body(rank, folder):
        (folder / str(rank)).write_text(str(os.getpid()))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return rank

    with pytest.raises(RankFailed, match=r"ranks \[1\] of 2 did not answer"):
        run_ranks(2, body, tmp_path, timeout=10)  # for which the other one has to answer
    for name in ("0", "1"):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / name).read_text()), 0)


def test_a_killed_rank_is_reported(run_ranks):
    def body(rank):
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return rank

    with pytest.raises(RankFailed, match="rank 0 of 2 failed first(.|\n)*died without a message"):
        run_ranks(2, body)


def test_no_rank_outlives_a_caller_that_was_killed(run_ranks):
    """Such a rank would keep the caller's output open, and whoever reads that to its end would wait."""

    def body(rank):
        os.write(output, b".")
        time.sleep(120)

    reader, output = os.pipe()
    caller = os.fork()
    if caller == 0:
        try:
            run_ranks(2, body)
        finally:
            os._exit(1)
    os.close(output)
    assert os.read(reader, 1) + os.read(reader, 1) == b".."  # both run
    os.kill(caller, signal.SIGKILL)
    os.waitpid(caller, 0)
    readable, _, _ = select.select([reader], [], [], 60)
    assert readable and os.read(reader, 1) == b""  # the end: no process has it open
    os.close(reader)


def test_two_ranks_are_quick(run_ranks):
    run_ranks(2, lambda rank: rank)
    took = []
    for _ in range(5):
        start = time.monotonic()
        run_ranks(2, lambda rank: dist.barrier())
        took.append(time.monotonic() - start)
    assert min(took) < 5  # about 0.2 s when the machine is quiet; it may be busy meanwhile


def test_what_tests_leave_in_the_tree_is_named(tmp_path):
    """New, changed, deleted and ignored files, but for the caches of tools."""
    git = lambda *words: subprocess.run(["git", "-C", str(tmp_path), *words], check=True, capture_output=True)
    assert tree.state(tmp_path) is None and tree.changes(None, set()) == []
    git("init", "-q")
    for name in ("kept", "changed", "gone"):
        (tmp_path / name).write_text("1")
    (tmp_path / ".gitignore").write_text("runs/\n__pycache__/\n")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all")
    (tmp_path / "earlier").touch()
    before = tree.state(tmp_path)
    assert before == {"?? earlier"} and tree.changes(before, tree.state(tmp_path)) == []
    (tmp_path / "changed").write_text("2")
    for name in ("gone", "earlier"):
        (tmp_path / name).unlink()
    for name in ("runs", "__pycache__", "inference_model_pp1mp1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    assert tree.changes(before, tree.state(tmp_path)) == [
        " D gone",
        " M changed",
        "!! runs/",
        "?? earlier: no longer",
        "?? inference_model_pp1mp1/",
    ]


def test_no_built_output_is_tracked():
    """Only kinds of files that people write, pictures of the documentation, and what tests compare with."""
    files = tree.tracked(ROOT)
    if files is None:
        pytest.skip("git does not know this tree")
    own = {"tests": WRITTEN | {".json", ".jsonl", ".xz"}, "docs": WRITTEN | DRAWN}
    others = {name for name in files if Path(name).suffix not in own.get(name.partition("/")[0], WRITTEN)}
    assert others - OTHERS == set()
    assert tree.tracked(ROOT, "--cached", "--ignored", "--exclude-standard") == []


def test_memory_in_huge_pages_keeps_its_content_and_is_moved_when_it_has_grown(monkeypatch):
    pages, kept, grown = huge_pages.HugePages(), torch.arange(3 << 20), huge_pages.GROWN
    for moves, bytes_now, moved_at in (("move_again", 1, 0), ("move", 1, 1)):  # not before it was asked for
        monkeypatch.setattr(huge_pages, "memory", lambda bytes_now=bytes_now: bytes_now)
        getattr(pages, moves)()
        assert pages.held == moved_at
    for bytes_now, moved_at in ((1 + grown, 1), (2 + grown, 2 + grown), (3 + grown, 2 + grown)):
        monkeypatch.setattr(huge_pages, "memory", lambda bytes_now=bytes_now: bytes_now)
        pages.move_again()
        assert pages.held == moved_at
    assert torch.equal(kept, torch.arange(3 << 20))
