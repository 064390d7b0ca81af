# SPDX-License-Identifier: Apache-2.0
"""The post-mortem from torch's flight recorder: dumps of ranks that hang, and of NCCL in the documented format."""

import json
import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from megatron.guard import beat_files, evidence
from megatron.guard.beat_files import read_beats
from megatron.guard.flight_recorder import PREFIX, dump, explain_dumps, read_dump, read_dumps, switch_on
from megatron.guard.heartbeat import Heartbeat
from megatron.mpu.groups import new_group
from megatron.settings.schema import Guard

VARIABLES = ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE"]
VARIABLES += ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_hang_name_the_collective_and_who_has_not_come(run_ranks, tmp_path, monkeypatch):
    """Of three ranks one does not come to a collective of its group; a thread of each rank dumps on request."""
    monkeypatch.setattr(beat_files, "LOOK", 0.1)
    monkeypatch.setattr(evidence, "LOOK", 20.0)

    def hang(rank):
        heartbeat = Heartbeat(str(tmp_path / "beats"), rank)
        heartbeat.record_trace(lambda: dump(str(tmp_path), rank))
        heartbeat.listen()
        group = new_group([0, 1, 2], "dp group 7")
        dist.all_reduce(torch.ones(3), group=group)
        dist.broadcast(torch.ones(2), 0, group=group)
        if rank != 1:
            work = dist.all_reduce(torch.ones(5), group=group, async_op=True)
            (tmp_path / f"waits-{rank}").touch()
            wait_for((tmp_path / "done").exists)
            work.wait()
            heartbeat.close()
            return None
        wait_for(lambda: len(list(tmp_path.glob("waits-*"))) == 2)
        found = evidence.request_traces(read_beats(tmp_path / "beats"), tmp_path / "beats", tmp_path)
        (tmp_path / "done").touch()
        dist.all_reduce(torch.ones(5), group=group)
        heartbeat.close()
        return sorted(found), explain_dumps(found)

    found, lines = run_ranks(3, hang)[1]
    assert found == [0, 1, 2]
    assert lines == [
        "rank 1 waits in no collective",
        "all_reduce 4 of dp group 7: ranks 0, 2 wait, rank 1 has not come (its last one there was broadcast 3)",
    ]
    for path in tmp_path.glob(f"{PREFIX}*"):  # torch's own reader knows them
        assert pickle.loads(path.read_bytes()).keys() >= {"version", "entries", "pg_config"}


def test_the_recorder_remembers_as_many_calls_as_asked(run_ranks, tmp_path, monkeypatch):
    """Processes that are forked later read the variables."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    settings = Guard(flight_recorder_dump_path=str(tmp_path / "new"), flight_recorder_trace_buffer_size=5)
    assert switch_on(settings) and os.environ["TORCH_FR_DUMP_TEMP_FILE"] == str(tmp_path / "new" / PREFIX)

    def call(rank):
        for number in range(9):
            dist.all_reduce(torch.ones(number + 1))
        dump(str(tmp_path / "new"), rank)

    run_ranks(1, call)
    read = read_dumps(tmp_path / "new")[0]
    assert [call.sizes for call in read.calls] == [f"[[{n}]]" for n in range(5, 10)]
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "5" and not switch_on(Guard())
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" not in os.environ  # torch warns of this name


def entry(number, name, group="1", state="completed", **more):
    """An entry as torch documents it for NCCL (version 2.4)."""
    return dict(
        record_id=number, pg_id=1, process_group=(group, "undefined"), collective_seq_id=number, p2p_seq_id=0, op_id=number,
        profiling_name=f"nccl:{name}", input_sizes=[[8]], output_sizes=[[8]], state=state, retired=state == "completed",
        timeout_ms=600000, is_p2p=False, time_created_ns=1, frames=[dict(name="f", filename="a.py", line=3)],
    ) | more  # fmt: skip


def stored(folder, dumps, **groups):
    """Write dumps as NCCL's watchdog does, and read them."""
    config = {name: dict(name=name, desc=desc, ranks=ranks) for name, (desc, ranks) in groups.items()}
    for rank, entries in dumps.items():
        content = dict(version="2.4", pg_config=config, pg_status={}, entries=entries)
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(content))
    return explain_dumps(read_dumps(folder))


@pytest.mark.parametrize(
    "dumps, lines",
    [
        (  # one rank is behind, and computes
            {n: [entry(51, "all_gather"), *[entry(52, "all_reduce", state="started")] * (n != 3)] for n in range(4)},
            [
                "rank 3 waits in no collective",
                "all_reduce 52 of tp group 0: ranks 0-2 wait, rank 3 has not come (its last one there was all_gather 51)",
            ],
        ),
        (  # a rank was killed
            {n: [entry(9, "reduce_scatter", state="scheduled")] for n in (0, 1, 3)},
            ["reduce_scatter 9 of tp group 0: ranks 0-1, 3 wait, rank 2 has not come (it has left no dump)"],
        ),
        (  # all came to the first: the network stands still, and the next ones wait behind it
            {n: [entry(7, "all_reduce", state="started"), entry(8, "broadcast", state="scheduled")] for n in range(4)},
            ["all_reduce 7 of tp group 0: ranks 0-3 wait"],
        ),
        (  # one rank does something else
            {n: [entry(7, "all_gather" if n == 2 else "all_reduce", state="started")] for n in range(4)},
            [
                "all_gather or all_reduce 7 of tp group 0: ranks 0-3 wait; their calls differ: all_reduce [[8]] on ranks "
                "0-1, 3, all_gather [[8]] on rank 2"
            ],
        ),
        (  # a stage waits for its message
            {0: [entry(3, "all_reduce")], 1: [entry(0, "recv 1<-0", "2", "started", is_p2p=True, p2p_seq_id=5)]},
            ["rank 0 waits in no collective", "rank 1 waits in recv 1<-0 of the group of ranks 0-1"],
        ),
        ({0: [entry(3, "all_reduce")], 1: [entry(3, "all_reduce")]}, []),
    ],
    ids=["behind", "killed", "network", "differ", "message", "none"],
)
def test_what_dumps_say(dumps, lines, tmp_path):
    assert stored(tmp_path, dumps, **{"1": ("tp group 0", "[0, 1, 2, 3]"), "2": ("undefined", [0, 1])}) == lines


def test_what_is_no_dump_is_passed_over_and_nothing_is_run(tmp_path):
    class Program:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    (tmp_path / f"{PREFIX}0").write_bytes(pickle.dumps(dict(entries=[Program()])))
    (tmp_path / f"{PREFIX}1").write_bytes(b"\x80\x04torn")
    (tmp_path / f"{PREFIX}2").write_bytes(b"")
    (tmp_path / f"{PREFIX}3").write_text(json.dumps(dict(entries=[dict(process_group=["1", "a"])])))
    assert read_dumps(tmp_path) == {} and not (tmp_path / "run").exists()
    (tmp_path / "json").write_text(json.dumps(dict(entries=[entry(3, "all_reduce")], pg_config={})))
    assert read_dump(tmp_path / "json").calls[0].name == "all_reduce"
