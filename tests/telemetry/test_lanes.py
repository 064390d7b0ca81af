# SPDX-License-Identifier: Apache-2.0
"""The lanes of a profile: what is noted and when, what the picture shows, what the trace has."""

import gzip
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import pretrain_gpt
from megatron.mpu import collectives
from megatron.mpu.mesh import Mesh
from megatron.telemetry import lanes
from megatron.telemetry.lanes import COMPUTE, GATHER, RECEIVE, SEND, Bar, Recording, exposed, exposed_line
from megatron.telemetry.lanes_drawing import (
    LEFT,
    RIGHT,
    WIDTH,
    RankLanes,
    draw_profiled,
    picture,
    read_lanes,
    with_lanes,
)
from megatron.telemetry.phases import phase

BARS = [
    Bar(COMPUTE, "F0", 0.0, 0.4, 0.4),
    Bar(GATHER, "all-gather, dp group 0", 0.1, 0.3, 0.4),
    Bar(SEND, "F0 to rank 1", 0.4, 0.5, 0.5),
    Bar(COMPUTE, "B0", 0.5, 1.0, 1.0),
    Bar(RECEIVE, "B0 from rank 1", 0.2, 0.4, 0.5),
    Bar(GATHER, "all-gather, dp group 0", 0.5, 0.6, 0.65),
]


# ---- recording -----------------------------------------------------------------------------------------------------------


def _recorded(rank):
    mesh, recording = Mesh(rank, tp=2), Recording("cpu")
    with Recording.of(recording):
        with phase("F", "F3"):
            whole, piece = torch.empty(8), torch.ones(4)
            work = collectives.start_all_gather(whole, piece, mesh.tp)
            with phase("norm"):  # a part of a part is no bar
                pass
            work.wait()
            collectives.all_reduce(piece, mesh.world)
        left = collectives.start_reduce_scatter(piece, whole, mesh.tp)
        bars = recording.bars()
    left.wait()
    return bars, whole


def test_messages_note_when_they_are_launched_and_waited_for(run_ranks):
    for bars, whole in run_ranks(2, _recorded):
        assert torch.equal(whole, torch.ones(8))
        assert [bar.name for bar in bars] == [
            "F3",
            "all-gather, tp group 0",
            "all-reduce, all ranks",
            "reduce-scatter, tp group 0",
        ]
        forward, gather, reduction, left = bars
        assert (
            forward.start <= gather.start <= gather.wait <= gather.end <= reduction.start <= forward.end <= left.start
        )
        assert forward.exposed == left.exposed == 0.0  # a pass; what nobody has waited for
        assert reduction.wait == reduction.start  # waited for at once


def test_without_a_recording_nothing_is_wrapped_and_no_clock_is_read(monkeypatch, run_ranks):
    def body(rank):
        def read():
            raise AssertionError("a clock was read")

        monkeypatch.setattr(lanes, "time", SimpleNamespace(perf_counter=read, time_ns=read))
        mesh, x = Mesh(rank, tp=2), torch.ones(4)
        works = [
            collectives.start_all_reduce(x, mesh.tp),
            collectives.start_all_gather(torch.empty(8), x, mesh.tp),
            collectives.start_reduce_scatter(torch.empty(2), x, mesh.tp),
        ]
        with phase("F", "F0"):
            collectives.all_reduce(x, mesh.world)
        for work in works:
            work.wait()
        return [type(work).__module__ for work in works]

    for modules in run_ranks(2, body):
        assert "megatron.telemetry.lanes" not in modules


class Event:
    """An event of a device whose time goes on by a millisecond with each of them."""

    time, log = 0.0, []

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.time += 1.0
        self.at = Event.time
        self.log.append("record")

    def elapsed_time(self, other):
        self.log.append("read")
        return other.at - self.at


def test_on_a_device_events_are_recorded_and_read_when_all_is_over(monkeypatch):
    log = Event.log
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("synchronize"))
    recording = Recording("cuda")
    with Recording.of(recording):
        begun = len(log)
        with phase("F", "F0"):  # 2 and 5 on the device's clock
            work = lanes.note(GATHER, "all-gather", SimpleNamespace(wait=lambda: log.append("wait")))  # 3
            work.wait()  # 4 and 5
    assert log[:begun] == ["synchronize", "record"]
    assert log[begun:] == ["record", "record", "record", "wait", "record", "record"]  # nothing is read, nobody waits
    forward, gather = recording.bars()
    assert log[-8:] == ["record", "synchronize", *["read"] * 6]
    assert forward[2:] == (0.001, 0.005, 0.005) and gather[2:] == (0.002, 0.003, 0.004)


def test_waits_add_up_by_kind():
    assert exposed(BARS) == pytest.approx({GATHER: 0.15, RECEIVE: 0.1, SEND: 0.0})
    assert exposed_line(BARS) == (
        "Exposed communication (time in waits): 250.0 ms of 1000.0 ms: gathers 150.0 ms, receives 100.0 ms, sends 0.0 ms"
    )
    assert exposed_line([]) == "Exposed communication (time in waits): 0.0 ms of 0.0 ms"


# ---- pictures and traces -------------------------------------------------------------------------------------------------


def _rectangles(svg, kind):
    """(x, y, width) of the rectangles of a class or colour, in the drawing, without those of the legend."""
    found = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        if kind in (element.get("class"), element.get("fill")) and float(element.get("y")) > 50:
            found.append(tuple(float(element.get(name)) for name in ("x", "y", "width")))
    return found


def test_bars_are_drawn_to_scale_and_waits_are_thick():
    late = [bar._replace(start=bar.start + 1, wait=bar.wait + 1, end=bar.end + 1) for bar in BARS]
    # Rank 1 began its recording a second earlier: on one clock both ranks did the same at the same time.
    svg = picture([RankLanes(0, (3, 3), 5_000_000_000, BARS), RankLanes(1, (3, 3), 4_000_000_000, late)])
    second = WIDTH - LEFT - RIGHT
    for kind, want in [
        ("#4c78a8", [(0.0, 0.4)]),
        ("#54a24b", [(0.5, 0.5)]),
        ("wait", [(0.3, 0.1), (0.6, 0.05), (0.4, 0.1)]),  # gathers, then receives
        ("way", [(0.1, 0.2), (0.5, 0.1), (0.2, 0.2), (0.4, 2 / second)]),  # and a tick for what was sent
    ]:
        found = _rectangles(svg, kind)
        assert len(found) == 2 * len(want)
        for rank in (0, 1):
            for (x, _, width), (start, length) in zip(found[rank * len(want) :], want, strict=False):
                assert (x - LEFT) / second == pytest.approx(start, abs=1e-4)
                assert width / second == pytest.approx(length, abs=1e-4)
    rows = _rectangles(svg, "row")
    assert len(rows) == 2 * 4  # passes, gathers, receives, sends
    assert svg.count("waits 150.0 ms") == svg.count("waits 100.0 ms") == svg.count("waits 0.0 ms") == 2


def test_files_hold_what_was_noted_and_the_picture_all_chosen_ranks(tmp_path):
    own = [RankLanes(rank, (3, 4), 7 + rank, BARS) for rank in (0, 1, 2)]
    own[2] = RankLanes(2, (1, 2), 9, BARS)  # of another profile
    for lane in own:
        lane.write(tmp_path / f"rank_{lane.rank}.lanes.json")
    assert read_lanes(tmp_path / "rank_1.lanes.json") == own[1]
    svg = draw_profiled(tmp_path, own[0], [0, 1, 2, 3]).read_text()
    assert re.findall(r"rank \d(?=</text>)", svg) == ["rank 0", "rank 1"]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json"] * 3 + [".svg"]  # no half files


def test_a_trace_gets_the_lanes_at_its_own_time():
    trace = (
        '{"baseTimeNanoseconds": 1000000000,\n "traceEvents": [\n {"ph": "X", "name": "aten::mm", "ts": 1, "dur": 2}]}'
    )
    events = json.loads(with_lanes(trace, RankLanes(2, (3, 3), 3_000_000_000, BARS)))["traceEvents"]
    assert events[-1]["name"] == "aten::mm"
    ours = [event for event in events if event.get("pid") == "lanes of rank 2"]
    forward = next(event for event in ours if event["name"] == "F0")
    assert (forward["tid"], forward["ts"], forward["dur"]) == (COMPUTE, 2e6, pytest.approx(4e5))
    begun = [event for event in ours if event["ph"] == "b"]
    assert len(begun) == len([event for event in ours if event["ph"] == "e"]) == 4
    waits = {event["tid"]: event["dur"] for event in ours if event["name"] == "waits for B0 from rank 1"}
    assert waits == {RECEIVE: pytest.approx(1e5)}
    assert with_lanes('{"other": []}', RankLanes(0, (3, 3), 0, BARS)) == '{"other": []}'


@pytest.mark.sampled(5)
def test_a_profiled_run_has_all_of_it(tmp_path, run_ranks):
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
        "--micro-batch-size 2 --global-batch-size 4 --eval-iters 0 --device cpu --num-workers 0 --train-iters 3 "
        "--profile --profile-step-start 2 --profile-step-end 3 --profile-ranks 0 1 --pipeline-model-parallel-size 2"
    )
    run_ranks(2, lambda rank: pretrain_gpt.main([*flags.split(), "--profile-dir", str(tmp_path)]))
    passes = [["F0", "F1", "B0", "B1"], ["F0", "B0", "F1", "B1"]]
    for rank in (0, 1):
        found = read_lanes(tmp_path / f"rank_{rank}.lanes.json")
        assert [bar.name for bar in found.bars if bar.name[0] in "FB" and bar.lane == COMPUTE] == passes[rank]
        other, kind = 1 - rank, "BF"[rank]
        assert [bar.name for bar in found.bars if bar.lane == RECEIVE] == [
            f"{kind}{n} from rank {other}" for n in (0, 1)
        ]
        assert exposed_line(found.bars) in (tmp_path / f"rank_{rank}.txt").read_text()
        with gzip.open(tmp_path / f"rank_{rank}.trace.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        lane = next(event for event in events if event["name"] == "F0" and event.get("tid") == COMPUTE)
        torchs = next(event for event in events if event["name"] == "forward" and event.get("ph") == "X")
        assert abs(lane["ts"] - torchs["ts"]) < 1e6  # of one moment, in microseconds
    assert re.findall(r"rank \d(?=</text>)", (tmp_path / "timeline.svg").read_text()) == ["rank 0", "rank 1"]
