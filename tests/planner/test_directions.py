# SPDX-License-Identifier: Apache-2.0
"""Which one the planner takes, or tells first: slowest rank, fullest moment, smallest batch, nearest device.

The parts that are compared are played, so that each choice is between numbers that are written here.
"""

import math
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from megatron.errors import SettingsError
from megatron.planner import (
    choose,
    dry_run,
    memory,
    picture,
    problems,
    search,
    speed,
    step_communication,
    target,
    text,
    tuning,
)
from megatron.planner.activations import SavedBytes
from megatron.planner.layout import Layout
from megatron.planner.memory import MemoryReport
from megatron.planner.parity import Trace, compare
from megatron.planner.plans import Shortlist
from megatron.planner.preflight.machines import check_clocks
from megatron.planner.schedule_time import ShardingTimes
from megatron.planner.speed import Pass, StepTime
from megatron.planner.step_communication import StepCommunication
from megatron.settings.schema import Recompute


def anything(**more) -> SimpleNamespace:
    """What is handed on and not looked at."""
    own = dict(pp=3, dp=1, lags=False, chunks=1, micro_batch_size=1, recompute=None, schedule="1f1b")
    own |= dict(num_microbatches=lambda job: 4, rank_setup=lambda job: None, pipeline=lambda layers: None)
    return SimpleNamespace(**own | more)


def test_the_slowest_rank_sets_the_pace(monkeypatch):
    took = {"first": Pass(2.0, 4.0), "middle": Pass(3.0, 6.5), "last": Pass(5.0, 1.0)}
    monkeypatch.setattr(speed, "_stage", lambda job, share, name, cluster: took[name])
    monkeypatch.setattr(speed, "_stages", lambda *_: frozenset({(("first",),), (("middle",),), (("last",),)}))
    job = SimpleNamespace(facts=SimpleNamespace(num_layers=3))
    assert speed._slowest(job, anything(), None) == took["middle"]
    monkeypatch.setattr(speed, "_stages", lambda *_: frozenset({(("first",), ("last",)), (("middle",), ("middle",))}))
    assert speed._slowest(job, anything(chunks=2), None) == took["middle"]


@pytest.mark.parametrize("last", [0.5, 9.0])
def test_of_both_ends_of_a_pipeline_the_one_that_sends_longer_counts(last, monkeypatch):
    first = StepCommunication(ShardingTimes(2, gather=0.5, reduce=0.25), 1.0)  # 1 + .5 + 4 x .25
    other = StepCommunication(ShardingTimes(2, gather=0.5, reduce=0.25), last)
    monkeypatch.setattr(step_communication, "_once", lambda job, layout, cluster, rank: other if rank else first)
    assert step_communication.step_communication(None, anything(), None) is (other if last > 1 else first)


def test_memory_is_that_of_the_fullest_moment(monkeypatch):
    """Of three moments the second keeps most; with products that wait, the third."""
    pipeline = SimpleNamespace(stages=[0], stages_of=lambda rank: [0], layers={0: ()})
    job = SimpleNamespace(facts=SimpleNamespace(num_layers=1, loss_deferred=lambda share: 0), compared=())
    monkeypatch.setattr(memory.activations, "stage_saved", lambda *_: SavedBytes(Counter(norms=10, mlp=30), 40))
    monkeypatch.setattr(memory.activations, "deferred", lambda *_: 50)
    moments = lambda waiting: lambda *_: [((1,), (0,)), ((3,), (0,)), ((2,), (waiting,))]
    layout = anything(schedule="zb-h1", order="zb-h1", pipeline=lambda layers: pipeline)
    monkeypatch.setattr(memory, "most_held", moments(0))
    assert memory._kept(job, layout, 0) == {"norms": 30, "mlp": 90, "products that wait": 0}
    monkeypatch.setattr(memory, "most_held", moments(1))
    assert memory._kept(job, layout, 0) == {"norms": 20, "mlp": 60, "products that wait": 50}


def test_a_plan_needs_what_its_fullest_rank_needs(monkeypatch):
    reports = [MemoryReport(rank, dict(weights=size)) for rank, size in enumerate((5, 9, 7))]
    monkeypatch.setattr(dry_run, "memory_report", lambda job, layout, device, rank: reports[rank])
    monkeypatch.setattr(dry_run, "step", lambda *_: None)
    plan, needed = dry_run._plan(None, anything(), SimpleNamespace(device=None))
    assert (plan.bytes, plan.rank, needed) == (9, 1, reports)


def test_the_rank_that_lacks_most_is_named(monkeypatch):
    monkeypatch.setattr(memory, "peaks", lambda *_: [5e9, 9e9, 3e9, 7e9])
    monkeypatch.setattr(problems, "remedies", lambda *_: "help")
    monkeypatch.setattr(problems, "_unscaled", lambda *_: ())
    cluster = SimpleNamespace(device=SimpleNamespace(usable_bytes=4e9))
    [told] = problems.memory_problems(None, None, cluster)
    assert (
        told == "out of memory by 5.00 GB on pipeline rank 1 (and on 2 more): 9.0 of 4.0 GB that a layout may use; help"
    )
    cluster.device.usable_bytes = 9e9  # what is exactly full fits
    assert problems.memory_problems(None, None, cluster) == []


def test_the_two_cheapest_remedies_that_fit_are_named():
    """In the order of what they cost; what is exactly full fits."""

    def needed(layout):
        if layout.recompute.recompute_granularity == "core_attn":
            return 12e9
        return 10e9 if layout.micro_batch_size == 1 else 9e9 if layout.zero == 1 else 5e9

    job, layout = SimpleNamespace(matrix_moments=None), Layout(micro_batch_size=4, dp=4)
    told = problems.remedies(job, layout, needed, 10e9, ("less",))
    assert told == "--micro-batch-size 1 (10.0 GB) or --use-distributed-optimizer (9.0 GB) or less would fit"
    assert problems.remedies(job, layout, needed, 4e9).startswith("more ranks for --pipeline-model-parallel-size")


def test_the_smallest_micro_batch_is_named_where_none_fits(monkeypatch):
    rejected = [SimpleNamespace(layout=anything(micro_batch_size=size)) for size in (4, 2, 8)]
    outcome = SimpleNamespace(searched=SimpleNamespace(plans=[], rejected=rejected), cluster=None, job=None)
    monkeypatch.setattr(choose, "search_micro_batch", lambda config: outcome)
    monkeypatch.setattr(choose, "replace", lambda job, **_: job)
    monkeypatch.setattr(choose, "memory_problems", lambda job, layout, cluster: ["too large"])
    with pytest.raises(SettingsError, match="even 2 is too large"):
        choose._micro_batch(None, print)


def test_plans_come_best_first_and_rejected_ones_closest_first(monkeypatch):
    rows = {"a": (3.0, 0), "b": (1.0, 0), "c": (2.0, 0), "d": (0, 7e9), "e": (0, 1e9), "f": (0, 4e9)}

    def evaluate(job, layout, cluster):
        order, over = rows[layout.name]
        plan = SimpleNamespace(name=layout.name, order=(order,)) if order else None
        return plan, None if order else SimpleNamespace(name=layout.name, over=over)

    monkeypatch.setattr(search, "evaluate", evaluate)
    monkeypatch.setattr(search, "replace", lambda job, **_: job)
    space = SimpleNamespace(only=[anything(name=name) for name in rows], global_batch=8, max_global_batch=None)
    found = search._of(None, None, space)
    assert [[one.name for one in row] for row in (found.plans, found.rejected)] == [["b", "c", "a"], ["e", "f", "d"]]


def test_a_shortlist_keeps_the_cheapest():
    short = Shortlist(3)
    for cost in (5.0, 1.0, 4.0, 2.0, 3.0):
        short.offer(cost, f"cost {cost:g}")
    assert short.entries() == [("cost 1",), ("cost 2",), ("cost 3",)] and short.limit == 3.0


def test_the_layout_that_is_the_fastest_for_a_sample_is_chosen(monkeypatch):
    """A larger batch may take longer for a step, and less for a sample."""
    took = {"a": 3.0, "b": 4.0, "c": 2.5}
    monkeypatch.setattr(tuning, "in_layout", lambda config, layout, batch: layout)
    monkeypatch.setattr(tuning, "_quiet", lambda config: config)
    monkeypatch.setattr(tuning, "_lasting", lambda config: config)
    monkeypatch.setattr(tuning, "resolve", lambda config, world: config)
    monkeypatch.setattr(tuning, "_seconds_of_a_step", lambda layout, recipe, steps: took[layout.short()])
    monkeypatch.setattr(tuning, "chosen_flags", lambda config, layout, batch: layout.short())
    again = Recompute()
    layouts = [(anything(short=lambda n=n: n, recompute=again), batch) for n, batch in (("a", 2), ("b", 4), ("c", 2))]
    context, said = SimpleNamespace(mesh=SimpleNamespace(world_size=1)), []
    config = SimpleNamespace(planner=SimpleNamespace(tune_steps=3))
    found = tuning._timed(config, None, layouts, context, said.append)
    assert [layout.short() for layout, _ in found] == ["b", "c", "a"] and said[-1] == "chosen on 1 ranks: b"


def test_parts_of_a_step_are_told_from_the_longest_on(monkeypatch):
    monkeypatch.setattr(text, "basis", lambda cluster: "played")
    told = text.parts(StepTime(10.0, {"a": 1.0, "b": 6.0, "c": 0.005, "d": 3.0, "e": 0.00499}, 0.0, 0.0), None)
    assert [line.split()[0] for line in told.splitlines()[1:]] == ["b", "d", "a", "c"]


def test_micro_batches_are_told_from_the_smallest_on(monkeypatch):
    monkeypatch.setattr(text, "speeds_note", lambda cluster, layout: "")
    step = SimpleNamespace(seconds=1.0, tokens_per_second=lambda job: 1.0)
    plans = [SimpleNamespace(layout=anything(micro_batch_size=n), bytes=n, step=step, job=None) for n in (4, 1, 2)]
    rejected = [SimpleNamespace(layout=anything(micro_batch_size=n), why=lambda n=n: f"lacks {n}") for n in (16, 8)]
    told = text.sizes(SimpleNamespace(plans=plans, rejected=rejected), None).splitlines()
    assert [line.split()[0] for line in told] == ["1:", "2:", "4:", "8"] and told[-1].strip() == "8 and more: lacks 8"


def test_bars_are_stacked_from_the_largest_kind_on():
    drawn = []
    axes = MagicMock()
    axes.barh.side_effect = lambda names, widths, label, **_: drawn.append(label)
    first, second, third = list(picture.COLOURS)[:3]
    picture._bars(
        MagicMock(), axes, [{first: 3.0, second: 5.0, third: 1.0}, {first: 6.0, second: 1.0, third: 1.0}], ["x", "y"]
    )
    picture._bars(MagicMock(), axes, [{first: 1.0, second: 2.0, third: 3.0}], ["x"])
    assert drawn == [first, second, third, "other", third, second, first, "other"]


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
def test_kinds_of_less_than_a_fiftieth_of_the_longest_bar_are_one(unit):
    """In any unit: what is small in each bar is "other", and bars are as long as before."""
    drawn, axes = {}, MagicMock()
    axes.barh.side_effect = lambda names, widths, left, label, **_: drawn.update({label: (left, widths)})
    first, second, third = list(picture.COLOURS)[:3]
    rows = [{first: 97.9, second: 1.9, third: 0.2}, {first: 40.0, second: 1.0, third: 2.1}]
    picture._bars(MagicMock(), axes, [{kind: unit * value for kind, value in row.items()} for row in rows], ["x", "y"])
    widths = {label: [round(value / unit, 9) for value in widths] for label, (_, widths) in drawn.items()}
    assert widths == {first: [97.9, 40.0], third: [0.2, 2.1], "other": [1.9, 1.0]}
    assert [start + width for start, width in zip(*drawn["other"], strict=True)] == pytest.approx(
        [100 * unit, 43.1 * unit]
    )


def test_the_weight_with_the_largest_error_is_named():
    weights = {name: torch.ones(4) for name in "abc"}
    trace = lambda errors: Trace(
        [2.0, 1.0], [1.0, 1.0], {name: weights[name] * (1 + e) for name, e in errors.items()}, 0.0
    )
    reference = trace(dict(a=0.0, b=0.0, c=0.0))
    found = compare(reference, trace(dict(a=0.1, b=-0.5, c=0.2)))
    assert (found.worst, found.weight, found.loss) == ("b", pytest.approx(0.5), 0.0)
    assert compare(reference, trace(dict(a=0.1, b=-0.5, c=math.nan))).worst == "c"
    # Within the tolerance up to it; a number that is none is beyond any.
    limit = found.__class__(1e-5, 1e-3, 1e-4, "a")
    assert limit.passes("fp32") and not found.passes("fp32")
    for name in ("loss", "norm", "weight"):
        for value in (math.nextafter(getattr(limit, name), 1), math.nan):
            own = dict(loss=1e-5, norm=1e-3, weight=1e-4) | {name: value}
            assert not found.__class__(**own, worst="a").passes("fp32")


@pytest.mark.parametrize(
    "line, row",
    [
        ("NVIDIA A100-SXM4-40GB, 40960", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB, 81920", "A100-80GB"),
        ("Tesla V100-SXM2-16GB, 16160", "V100-16GB"),
        ("Tesla V100-SXM2-32GB, 32510", "V100-32GB"),
    ],
)
def test_the_installed_gpu_is_the_nearest_of_its_name(line, row, monkeypatch):
    """The driver tells MiB, and less than the name says."""
    monkeypatch.setattr(target.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(target.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=f"{line}\n"))
    asked, find = [], target.devices.find
    monkeypatch.setattr(target.devices, "find", lambda name: asked.append(name) or find(name))
    found = target.installed_gpu()
    name, _, mebibytes = line.partition(", ")
    assert asked == [row] and found.name == name
    assert found.memory_gb == pytest.approx(int(mebibytes) * 2**20 / 1e9)


def test_the_clock_that_is_furthest_off_is_told():
    nodes = [(f"n{rank}", f"n{rank}") for rank in range(5)]
    assert check_clocks([0.0, 2.0, -5.0, 1.0, 0.0], nodes).fault.endswith(" is 5.0 s behind the others")
    assert check_clocks([0.0, 6.0, -5.0, 0.0, 0.0], nodes).fault.endswith(" is 6.0 s ahead of the others")
    assert check_clocks([0.0, 1.0, -1.0, 0.0, 0.0], nodes).fault == ""  # a second is not too much
