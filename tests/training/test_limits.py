# SPDX-License-Identifier: Apache-2.0
"""The last step of each ramp, and values that are exactly at a threshold of training."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from megatron.checkpoint import manager
from megatron.checkpoint.interval import best_interval
from megatron.errors import NumericsError, StorageError
from megatron.guard import replicas, run_state, stopping
from megatron.guard.spikes import Recent
from megatron.guard.watch import StepVerdict, Watch
from megatron.mpu import cpu_threads
from megatron.optimizer.lr_schedule import Lengths, learning_rate, problems, weight_decay
from megatron.optimizer.scaler import LossScaler
from megatron.planner.memory import _first_units
from megatron.planner.preflight.machines import compared
from megatron.settings.batch import batch_size, total_iterations
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import GROUPS, Batch, Guard, Optimizer
from megatron.settings.spelling import settings_of
from megatron.telemetry.event_rules import RecordRules
from megatron.telemetry.history import History
from megatron.telemetry.metrics import Metrics
from megatron.telemetry.profiler import Profiler
from megatron.training.measures import Collected, early_end_reason
from megatron.training.outcome import clip_coefficient
from megatron.training.pace import Pace
from megatron.training.rules import check

STEPS = Batch(global_batch_size=1, train_iters=100)


@dataclass(frozen=True)
class OwnOptimizer(Optimizer):
    """With curves of a recipe: `half` is at one half all the time, `ends at 0` and `ends below 0` say where."""

    own_schedules: ClassVar = {
        "half": lambda done: 0.5,
        "ends at 0": lambda done: 1.0 - done,
        "ends below 0": lambda done: 0.9 - done,
    }


# ---- ramps -----------------------------------------------------------------------------------------------------------


def rates(at, **changes) -> list[float]:
    chosen = OwnOptimizer(**dict(lr=1.0, min_lr=0.1, lr_warmup_iters=20) | changes)
    lengths = Lengths.of(chosen, STEPS)
    return [round(learning_rate(chosen, lengths, samples), 9) for samples in at]


def test_the_last_step_of_the_warm_up():
    """It has the whole rate also where the curve is already below it, as Megatron-LM's `<=`."""
    assert rates((19, 20, 21)) == [0.95, 1.0, 0.98875]
    early = dict(lr_decay_style="WSD", lr_wsd_decay_iters=90, lr_wsd_decay_style="linear")  # it anneals from 10 on
    assert rates((19, 20, 21), **early) == [0.95, 1.0, 0.89]
    assert rates((19, 20, 21), lr_decay_style="half") == [0.95, 1.0, 0.55]
    assert rates((0, 1), lr_warmup_iters=0) == [1.0, 0.991]


def test_the_last_step_of_the_decay():
    """At its end the curve still says the rate; after it, --min-lr, whatever the curve ended at."""
    assert rates((99, 100, 101), lr_decay_style="half") == [0.55, 0.55, 0.1]
    assert rates((99, 100, 101)) == [0.11125, 0.1, 0.1]
    assert rates((99, 100, 101), lr_decay_style="constant") == [1.0, 1.0, 1.0]
    wsd = dict(lr_decay_style="WSD", lr_wsd_decay_iters=40)
    assert rates((59, 60, 61), **wsd, lr_wsd_decay_style="half") == [
        1.0,
        1.0,
        0.55,
        # Of the steps before the annealing, 60 is the last.
    ]
    assert rates((59, 60, 61), **wsd, lr_wsd_decay_style="linear") == [1.0, 1.0, 0.9775]


def test_the_last_step_of_the_weight_decays_increment():
    chosen = Optimizer(lr=1.0, weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.5)
    lengths = Lengths.of(chosen, STEPS)
    assert [weight_decay(chosen, lengths, at) for at in (0, 50, 99, 100, 101)] == pytest.approx(
        [0.0, 0.25, 0.495, 0.5, 0.5]
    )


@pytest.mark.parametrize(
    "changes, good",
    [
        (dict(lr_warmup_iters=99), True),
        (dict(lr_warmup_iters=100), False),
        (dict(min_lr=1.0), True),
        (dict(min_lr=0.0), True),
        (dict(lr_warmup_init=1.0), True),
        (dict(min_lr=math.nextafter(1.0, 2)), False),
        (dict(lr_warmup_init=-5e-324), False),
        (dict(weight_decay_incr_style="linear", start_weight_decay=0.1, end_weight_decay=0.1), True),
        (dict(weight_decay_incr_style="linear", start_weight_decay=0.0, end_weight_decay=0.0), True),
        (dict(weight_decay_incr_style="linear", start_weight_decay=0.11, end_weight_decay=0.1), False),
        (dict(lr_decay_style="ends at 0"), True),
        (dict(lr_decay_style="ends below 0"), False),
    ],
)
def test_rates_at_the_ends_of_their_ranges(changes, good):
    assert (problems(OwnOptimizer(**dict(lr=1.0, min_lr=0.1) | changes), STEPS) == []) == good


def test_a_run_without_steps_needs_no_decay():
    assert problems(Optimizer(lr=1.0), replace(STEPS, train_iters=0)) == []


RAMP = Batch(micro_batch_size=1, global_batch_size=12, rampup_batch_size=[1, 1, 100], train_samples=10**6)


def test_the_last_step_of_the_ramp_of_batches():
    """Megatron-core's calculator is at `int(consumed / (samples / increments))` up to and with the last sample: here the
    division falls short of 11.
    """
    assert [batch_size(RAMP, 1, consumed)[0] for consumed in (90, 91, 99, 100, 101)] == [10, 11, 11, 11, 12]
    even = replace(RAMP, rampup_batch_size=[4, 4, 100])
    assert [batch_size(even, 1, consumed)[0] for consumed in (49, 50, 99, 100, 101)] == [4, 8, 8, 12, 12]


def test_a_ramp_is_walked_as_long_as_no_more_than_the_samples_are_consumed():
    """Megatron-LM's `while consumed <= ramp and consumed <= train_samples`, and whole batches after it."""
    for samples in range(1, 140):
        steps = consumed = 0
        while consumed <= 100 and consumed <= samples:
            consumed += 1 + int(consumed / (100 / 11))
            steps += 1
        steps += max(0, samples - consumed) // 12
        assert total_iterations(replace(RAMP, train_samples=samples), 1) == steps


def test_the_scale_grows_with_the_last_step_of_its_window_and_falls_with_the_last_overflow():
    scaler = LossScaler(scale=8.0, window=3, hysteresis=2, min_scale=2.0)
    scales = []
    for found_inf in (False, False, False, True, True, True, True, True):
        scaler = scaler.update(found_inf)
        scales.append(scaler.scale)
    assert scales == [8, 8, 16, 16, 8, 4, 2, 2]
    restored = replace(scaler, overflows=0).restored(dict(scale=1.0, good_steps=3, overflows=1))
    assert (restored.scale, restored.good_steps, restored.update(True).scale) == (2.0, 2, 2.0)


# ---- guards ----------------------------------------------------------------------------------------------------------

# Median 4, deviation 1.4826 x 0 and at least 1 % of 4, which is .04: a threshold of 25 is at 5.
FLAT = Recent((4.0,) * 32, (4.0,) * 32)
AT, ABOVE = 5.0, 5.0000001


def test_a_value_at_the_threshold_is_no_spike():
    assert FLAT.spike(AT, AT, 25.0) is None
    assert FLAT.spike(ABOVE, AT, 25.0).what == "loss" and FLAT.spike(AT, ABOVE, 25.0).what == "gradient norm"
    short = Recent(FLAT.losses[1:], FLAT.norms)  # 31 steps are too few to judge by
    assert short.spike(99.0, AT, 25.0) is None and short.spike(99.0, ABOVE, 25.0).what == "gradient norm"
    assert short.measures() == [(0.0, math.inf), (4.0, 0.04)]


@pytest.mark.parametrize("loss, norm, refused", [(AT, AT, False), (ABOVE, AT, True), (AT, ABOVE, True)])
def test_the_device_refuses_what_the_host_does(loss, norm, refused):
    watch = Watch(Guard(on_spike="skip", spike_threshold=25.0))
    assert bool(watch.refuses(FLAT, torch.tensor([loss, norm], dtype=torch.float64))) == refused
    verdict = watch.judge(1, FLAT, loss, norm, lambda: "", scaling=False)
    assert verdict == (StepVerdict.SKIP if refused else StepVerdict.UPDATE)


def test_the_tenth_step_that_is_skipped_in_a_row_ends_the_run():
    watch = Watch(Guard(on_nan="skip"))
    judged = lambda loss: watch.judge(1, FLAT, loss, 1.0, lambda: "here", scaling=False)
    for loss in [math.nan] * 9 + [4.0] + [math.nan] * 9:
        judged(loss)
    with pytest.raises(NumericsError, match="10 steps in a row"):
        judged(math.nan)


def test_as_many_rollbacks_as_are_allowed():
    watch = Watch(Guard(on_spike="rollback", spike_threshold=25.0, max_rollbacks=2))
    judged = lambda done: watch.judge(1, FLAT, 99.0, 1.0, lambda: "", scaling=False, rollbacks=done)
    assert judged(1) == StepVerdict.ROLLBACK
    with pytest.raises(NumericsError, match="2 rollbacks"):
        judged(2)


def test_the_time_of_a_run_is_over_after_it(monkeypatch):
    requests = stopping.StopRequests(signals=False, kill_switch=None, minutes=2.0, started=1000.0)
    for now, over in ((1120.0, 0.0), (1120.001, 1.0)):
        monkeypatch.setattr(stopping.time, "time", lambda now=now: now)
        assert requests.votes() == [0.0, 0.0, over]
    # One of many ranks is enough, and Ctrl-C on one weighs more than a signal on each of the others.
    assert requests.agreed([0.0, 0.0, 1.0]).why == "--exit-duration-in-mins 2"
    assert not requests.agreed([2.0**32 - 1, 0.0, 0.0]).interrupted and requests.agreed([2.0**32, 0.0, 0.0]).interrupted


def test_a_save_that_takes_two_interruptions_is_made_once_between_them():
    """Daly 2006, equation 37, at its limit of twice the mean time, where it is no longer valid."""
    assert best_interval(200.0, 100.0) == 100.0
    below = best_interval(math.nextafter(200.0, 0), 100.0)
    assert below == pytest.approx(200 * (1 + 1 / 3 + 1 / 9) - 200)


def test_a_norm_at_the_limit_is_clipped_by_the_least():
    """Megatron's limit / (norm + 1e-6), where it is below 1."""
    norms = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    want = torch.tensor([1.0, 1 / (1 + 1e-6), 1 / (2 + 1e-6)], dtype=torch.float64)
    torch.testing.assert_close(clip_coefficient(norms, 1.0), want, rtol=1e-12, atol=0)
    assert clip_coefficient(norms, 0.0).tolist() == [1.0, 1.0, 1.0]


# ---- ends, notes and profiles ----------------------------------------------------------------------------------------


def run_of(measures=None, wanted=None, **state):
    plain = dict(valid_loss=None, best=None, best_iteration=3, evaluations_since_best=0, iteration=9)
    measures = measures and SimpleNamespace(**dict(best_by="accuracy", patience=None) | measures)
    return SimpleNamespace(
        losses=SimpleNamespace(measures=measures),
        state=SimpleNamespace(**plain | state),
        config=SimpleNamespace(batch=SimpleNamespace(stop_at_loss=wanted)),
    )


def test_training_stops_at_its_loss_and_at_the_last_evaluation_of_its_patience():
    assert early_end_reason(run_of(wanted=2.0, valid_loss=2.0)).startswith(
        "--stop-at-loss 2: the last evaluation had 2"
    )
    assert early_end_reason(run_of(wanted=2.0, valid_loss=math.nextafter(2.0, 3))) is None
    assert early_end_reason(run_of(wanted=2.0)) is None
    patient = lambda count: early_end_reason(run_of(dict(patience=3), best=0.5, evaluations_since_best=count))
    assert patient(2) is None and patient(3).startswith("--patience 3: no evaluation after iteration 3 was better")


def test_three_steps_of_more_than_three_times_the_median_crawl(monkeypatch):
    monkeypatch.setattr(cpu_threads, "may_spin", lambda threads: True)
    monkeypatch.setattr(cpu_threads, "sleep_from_now_on", lambda threads: True)
    looks = []
    monkeypatch.setattr(cpu_threads, "crowded", lambda wanted, own: looks.append(wanted) or bool(looks[1:]))

    def notes(steps, now=0.0):
        pace, said = Pace(2), []
        looks.clear()
        for seconds in steps:
            now += seconds
            said.append(bool(pace.after(seconds, now)))
        return said, len(looks)

    assert notes([1.0] * 8 + [3.0] * 9) == ([False] * 17, 1)  # the one look 5 s after the first step
    assert notes([1.0] * 8 + [3.0001] * 3) == ([False] * 10 + [True], 2)
    assert notes([1.0] * 8 + [3.0001] * 2) == ([False] * 10, 1)
    assert notes([1.0] * 7 + [3.0001] * 3) == ([False] * 10, 1)  # of 7 steps there is no median
    assert notes([1.0] * 5)[1] == 0 and notes([1.0] * 6)[1] == 1  # the sixth ends 5 s after the first


def test_ten_losses_above_a_guess_after_the_warm_up():
    above, guess = math.log(64) + 1e-9, math.log(64)

    def said(losses, samples=21):
        kinds = []
        rules = RecordRules({}, lambda kind, *_, **__: kinds.append(kind), guess=guess, warmup=20)
        for loss in losses:
            rules({"kind": "step", "iteration": 1, "consumed_samples": samples, "lm loss": loss})
        return kinds

    assert said([above] * 9) == [] and said([above] * 10) == said([above] * 20) == ["loss_above_guess"]
    assert not said([above] * 9 + [guess]) and not said([above] * 10, samples=20)


def test_the_last_step_to_profile():
    profiler = object.__new__(Profiler)
    profiler.running, profiler.settings = object(), SimpleNamespace(profile_step_end=12)
    assert [profiler.ends(iteration) for iteration in (10, 11, 12)] == [False, True, True]


def test_the_first_steps_that_the_mean_of_throughput_leaves_out():
    counted = []
    metrics = object.__new__(Metrics)
    metrics._started, metrics.settings = 0, SimpleNamespace(throughput_ignore_steps=2)
    metrics._mean = SimpleNamespace(add=lambda step, losses, seconds: counted.append(seconds))
    for seconds in range(1, 5):
        metrics._count_for_mean(SimpleNamespace(losses=dict(loss=1.0)), seconds)
    assert counted == [3, 4]


# ---- ranges of settings ----------------------------------------------------------------------------------------------

ENDS = {  # what a message says -> the least and the most that it allows, and the next values, which it does not
    "at least 1": ((1,), (0, math.nextafter(1.0, 0))),
    "at least 2 and at most 8": ((2, 8), (1, 9)),
    "at least 32": ((32,), (31,)),
    "at least 0": ((0, 0.0), (-1, -5e-324)),
    "above 0": ((5e-324,), (0, 0.0)),
    "at least 0 and below 1": ((0.0, math.nextafter(1.0, 0)), (-5e-324, 1.0)),
    "above 0 and below 1": ((5e-324, math.nextafter(1.0, 0)), (0.0, 1.0)),
    "at least 0 and at most 1": ((0.0, 1.0), (-5e-324, math.nextafter(1.0, 2))),
    "above 0 and at most 1": ((5e-324, 1.0), (0.0, math.nextafter(1.0, 2))),
}


def test_ranges_of_settings_are_what_their_messages_say():
    ranges = {one.range for one in settings_of(GROUPS) if one.range}
    assert ENDS.keys() == {one.words for one in ranges}
    for words, holds in ranges:
        inside, outside = ENDS[words]
        assert all(map(holds, inside)) and not any(map(holds, outside)), words


# ---- replicas, machines, states of runs and shares -------------------------------------------------------------------


@pytest.mark.parametrize(
    "sums, told",
    [
        ([7, 7, 7], []),
        ([7, 8, 7], ["w differs on rank 5 of 4, 5, 6 (dp)"]),
        ([7, 7, 8, 8], ["w differs on ranks 4, 5, 6, 7 of 4, 5, 6, 7 (dp)"]),  # half of them is no majority
        ([7, 8], ["w differs on ranks 4, 5 of 4, 5 (dp)"]),
        ([7, 7, 7, 8, 9], ["w differs on ranks 7, 8 of 4, 5, 6, 7, 8 (dp)"]),
    ],
)
def test_a_replica_is_wrong_where_most_agree(sums, told, monkeypatch):
    axis = SimpleNamespace(size=len(sums), ranks=tuple(range(4, 4 + len(sums))))
    monkeypatch.setattr(replicas.collectives, "all_gather", lambda own, axis: torch.tensor(sums).unsqueeze(1))
    assert replicas._compare(SimpleNamespace(dp=axis), "dp", [("w", torch.tensor(sums[0]))]) == told


def test_a_machine_is_slow_from_more_than_a_fifth_on():
    fault = lambda *seconds: compared("speed", seconds, lambda odd: f"rank {odd}", "a product", "").fault
    assert fault(1.0, 1.0, 1.2) == "" and fault(1.0, 1.0, 1.3).startswith("rank [2]: a product: 30% slower")
    assert fault(2.0, 2.0, 2.4, 2.4000001).startswith("rank [3]")


def test_a_run_is_stalled_after_a_minute_or_ten_steps_without_a_word(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    written, steps = metrics.stat().st_mtime, History()
    steps.add([b'{"kind": "step", "iteration": 1}'])
    state = lambda age, history, usual: run_state.alive(metrics, history, usual, written + age)[0]
    for age, usual, history, found in (
        (60, 1.0, steps, "running"),
        (61, 1.0, steps, "stalled"),
        (90, 9.0, steps, "running"),
        (91, 9.0, steps, "stalled"),
        (1800, 1.0, History(), "starting"),
        (1801, 1.0, History(), "stalled"),
    ):
        assert state(age, history, usual) == found, (age, usual)


def test_whole_units_are_moved_until_their_share_is_reached():
    class Units(list):
        def owned(self, sizes):
            return sum(unit.owned(sizes) for unit in self)

    units = Units([SimpleNamespace(owned=lambda sizes: 100 // sizes["shard"])] * 4)
    moved = [_first_units(units, dict(shard=2), fraction) for fraction in (0, 0.25, 0.2501, 0.5, 0.75, 0.9, 1, 1.5)]
    assert moved == [0, 50, 100, 100, 150, 200, 200, 200]


def test_a_run_is_done_with_its_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "last_state", lambda folder: dict(config={}))
    monkeypatch.setattr(run_state, "from_record", lambda record: object())
    monkeypatch.setattr(run_state, "_total", lambda *_: 10)
    for iteration, state in ((9, "unknown"), (10, "done"), (11, "done")):
        monkeypatch.setattr(run_state, "_checkpoint", lambda folder, at, n=iteration: (n, 1.0))
        assert run_state.look_at_checkpoint(tmp_path, 2.0).state == state


def test_a_save_that_failed_the_last_time_is_not_waited_for(monkeypatch):
    """Two tries more, after 2 and 4 seconds."""
    waited = []
    monkeypatch.setattr(manager.time, "sleep", waited.append)

    def save(*_):
        raise StorageError("the disk is full")

    own = SimpleNamespace(
        settings=SimpleNamespace(save_retries=2, save_mirror=None),
        _saver=SimpleNamespace(save=save),
        log=lambda line: None,
    )
    path, failure = manager.CheckpointManager._try(own, 7, [], {}, {})
    assert path is None and isinstance(failure, StorageError) and waited == [2.0, 4.0]


def test_samples_that_fill_up_the_last_batch_of_an_evaluation_do_not_count():
    context = SimpleNamespace(
        mesh=SimpleNamespace(tp=SimpleNamespace(rank=0), cp=SimpleNamespace(size=1)),
        all_gather_object=lambda own: [own],
    )
    collected = Collected()
    collected.take(torch.tensor([2, 0, 1, 3]), torch.tensor([[3.0], [1.0], [2.0], [9.0]]))
    assert collected.whole(context, 3).tolist() == [[1.0], [2.0], [3.0]]


def test_a_loss_scale_may_begin_at_its_least():
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 9 --train-iters 1 --lr 1"
    said = lambda least: check(
        parse_pretrain(f"{flags} --fp16 --initial-loss-scale 64 --min-loss-scale {least}".split()), 1
    )
    assert not [line for line in said(64) if "loss-scale" in line]
    assert [line for line in said(64.1) if "--min-loss-scale" in line]
