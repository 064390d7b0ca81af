# SPDX-License-Identifier: Apache-2.0
"""Decisions about slow ranks, data, stages and networks: made-up times of ranks, and rules stated in plain loops."""

import random
from statistics import median

import numpy as np
import pytest

from megatron.telemetry import events, stragglers
from megatron.telemetry.rank_times import COLUMNS, OWN
from megatron.telemetry.stragglers import StragglerDetector, median_of_others

STEPS = 5
USUAL = dict(data=0.001, forward=0.03, backward=0.06, update=0.005, other=0.004, stopped=0.0)


def rows(*changes: dict, ranks: int = 0, on_cpu: bool = True) -> np.ndarray:
    """The times of a window, as those of a run: each rank's own, with changes in seconds of a step; who is fast waits.

    A rank computes in all its time but data and `stalled`; `queue` is time in the queue for a core.
    """
    changes = [*changes, *({} for _ in range(ranks - len(changes)))]
    own = [sum(USUAL.values()) + sum(change.get(part, 0.0) for part in OWN) for change in changes]
    result = []
    for change, mine in zip(changes, own, strict=True):
        row = {part: USUAL[part] + change.get(part, 0.0) for part in OWN}
        row["waiting"] = 0.01 + max(own) - mine + change.get("waiting", 0.0)
        row["queue"] = change.get("queue", 0.0)
        row["cpu"] = mine - row["data"] - row["queue"] - change.get("stalled", 0.0) if on_cpu else 0.0
        result.append([row[column] for column in COLUMNS])
    return STEPS * np.array(result)


def told(detector: StragglerDetector, windows) -> list[tuple]:
    """(number of the window, kind, rank) of all findings."""
    return [
        (number, finding.kind, finding.rank)
        for number, window in enumerate(windows)
        for finding in checked(detector.observe(window, STEPS))
    ]


def checked(findings):
    """Findings whose fields are those of their kind of event."""
    for finding in findings:
        known = events.KINDS[finding.kind].fields if finding.kind != "unequal_stages" else {}
        assert finding.fields.keys() <= known.keys(), finding
    return findings


# ---- one rank ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["forward", "backward", "update", "other", "stopped", "data"])
@pytest.mark.parametrize("ranks, slow", [(2, 1), (2, 0), (5, 3)])
def test_a_slow_rank_is_named_with_its_part(part, ranks, slow):
    detector = StragglerDetector([0] * ranks)
    quiet, loud = rows(ranks=ranks), rows(*({part: 0.1} if rank == slow else {} for rank in range(ranks)))
    assert not told(detector, [quiet] * 10)
    [found] = [finding for _ in range(4) for finding in checked(detector.observe(loud, STEPS))]
    assert found.rank == slow and found.kind == ("slow_data" if part == "data" else "slow_rank")
    assert f"rank {slow} " in found.message and found.fields["seconds"] > USUAL[part] + 0.04
    if part != "data":
        assert found.fields["phase"] == part and found.fields["median"] == pytest.approx(USUAL[part])
    assert told(detector, [loud] * 30) == []  # said once
    assert told(detector, [quiet] * 10) == [(stragglers.CALM - 1, "recovered", slow)]


def test_within_twenty_steps():
    """From the first slow step on, wherever in a window that is; the last step is that of the gather."""
    for first in range(STEPS):
        detector, quiet, loud = StragglerDetector([0, 0]), rows(ranks=2), rows({}, {"backward": 0.1})
        told(detector, [quiet] * 10)
        share = (STEPS - first) / STEPS
        [(window, kind, rank)] = told(detector, [share * loud + (1 - share) * quiet, *[loud] * 5])
        assert (kind, rank) == ("slow_rank", 1) and STEPS - first + STEPS * window + 1 <= 20


@pytest.mark.parametrize(
    "change, words",
    [
        ({"forward": 0.1, "stalled": 0.1}, "its process does not run for 100.0 ms a step"),
        ({"forward": 0.1}, "it computes, but slower"),
        ({"stopped": 0.1, "stalled": 0.1}, "its process does not run for 100.0 ms a step"),
    ],
)
def test_the_cause_is_what_the_processor_tells(change, words):
    detector = StragglerDetector([0, 0, 0], ["rank 0 (a)", "rank 1 (b)", "rank 2 (c)"])
    [found] = [one for _ in range(5) for one in detector.observe(rows({}, change, {}), STEPS)]
    assert words in found.message and found.message.startswith("rank 1 (b) is slow")
    assert "this costs 48% of each step (last 10 steps)" in found.message  # 0.1 of 0.21 seconds
    detector = StragglerDetector([0, 0, 0], device="cuda")
    [found] = [one for _ in range(5) for one in detector.observe(rows({}, change, {}, on_cpu=False), STEPS)]
    assert found.message.endswith("steps)") and found.rank == 1  # a device has no CPU time


def test_one_pause_is_no_slow_rank_and_pauses_are():
    quiet, pause = rows(ranks=2), rows({}, {"forward": 0.5, "stalled": 0.5})  # 2.5 seconds in a window
    assert told(StragglerDetector([0, 0]), [*[quiet] * 10, pause, *[quiet] * 10]) == []
    for pattern, window in (([pause, quiet, quiet], 13), ([pause, *[quiet] * 6], 17), ([pause, *[quiet] * 9], None)):
        found = told(StragglerDetector([0, 0]), [quiet] * 10 + pattern * 5)
        assert found[:1] == ([(window, "slow_rank", 1)] if window else []), pattern


def test_ranks_that_are_slow_in_turns_are_not_named():
    turns = [rows({"forward": 0.08}, {}), rows({}, {"forward": 0.08})]
    assert told(StragglerDetector([0, 0]), turns * 30) == []
    # Ten steps each are long
    assert told(StragglerDetector([0, 0]), [turns[0], turns[0], turns[1], turns[1]] * 10) != []


def test_what_is_small_is_not_named():
    slow = dict(forward=0.02)  # a fifth of the time of the others
    assert told(StragglerDetector([0, 0]), [rows({}, slow)] * 40) == []
    tiny = [0.01 * rows({}, {"forward": 0.1})] * 40  # a millisecond of two
    assert told(StragglerDetector([0, 0]), tiny) == []
    waits = rows({"waiting": 1.0}, {"waiting": 1.0, "forward": 0.06})  # the step is long for another reason
    assert told(StragglerDetector([0, 0]), [waits] * 40) == []


def test_thresholds_can_be_set():
    twice, late = rows({}, {"forward": 0.11}), rows(*[{"data": 0.06}] * 2)  # 0.21 seconds instead of 0.1; 0.06 of 0.17
    for share, data_share, found in ((1.05, 0.3, [1]), (1.15, 0.3, []), (0.25, 0.5, [1])):
        detector = StragglerDetector([0, 0], share=share, data_share=data_share)
        assert [one[2] for one in told(detector, [twice] * 8)] == found
        detector = StragglerDetector([0, 0], share=share, data_share=data_share)
        assert bool(told(detector, [late] * 8)) == (data_share < 0.35)


def test_a_queue_for_cores_has_to_last_and_to_stay_on_one_rank():
    """The queue makes steps of 0.2 seconds, windows of 1: long windows have three of them, and 16 must be slow."""
    busy = [rows({"forward": 0.1, "queue": 0.1}, {}), rows({}, {"forward": 0.1, "queue": 0.1})]
    assert told(StragglerDetector([0, 0]), [busy[0]] * 47) == []
    detector = StragglerDetector([0, 0])
    assert told(detector, [busy[0]] * 60) == [(16 * 3 - 1, "slow_rank", 0)]
    assert told(StragglerDetector([0, 0]), ([busy[0]] * 3 + [busy[1]] * 3) * 40) == []
    detector = StragglerDetector([0, 0])
    messages = [one.message for _ in range(60) for one in detector.observe(busy[1], STEPS)]
    assert messages[0].endswith("it waits 100.0 ms a step for a core: other programs use its machine")


def test_who_is_slow_again_and_again_recovers_later_each_time():
    quiet, loud = rows(ranks=2), rows({}, {"forward": 0.1})
    detector, calm = StragglerDetector([0, 0]), []
    for _ in range(6):
        assert told(detector, [loud] * 8)[0][1:] == ("slow_rank", 1)
        [(window, kind, rank)] = told(detector, [quiet] * 80)
        assert (kind, rank) == ("recovered", 1)
        calm.append(window + 1)
    assert calm == [4, 8, 16, 32, 64, 64]


def test_two_slow_ranks_are_both_named():
    loud = rows({}, {"forward": 0.3}, {}, {"backward": 0.1}, {}, {})
    assert {one[1:] for one in told(StragglerDetector([0] * 6), [loud] * 5)} == {("slow_rank", 1), ("slow_rank", 3)}


# ---- the rule for ranks, in plain loops ----------------------------------------------------------------------------------


def plainly_slow(history: list[np.ndarray], windows: int) -> set[int]:
    """The rule of one stage without a queue: ranks that are slow in the last windows."""
    last, slow = history[-windows:], set()
    for rank in range(len(history[0])):
        over, excess, usual, steps = 0, 0.0, 0.0, 0.0
        for window in last:
            own = [sum(row[: len(OWN)]) / STEPS for row in window]
            others = median(own[:rank] + own[rank + 1 :])
            over += own[rank] - others > max(0.25 * others, 0.002)
            excess, usual = excess + own[rank] - others, usual + others
            steps += median(sum(row[: len(OWN) + 1]) / STEPS for row in window)
        if len(last) >= 2 and over >= 2 and excess >= 0.25 * usual and excess >= 0.1 * steps:
            slow.add(rank)
    return slow


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_rule_is_that_of_plain_loops(ranks):
    draw, named, quiet = random.Random(ranks), 0, 0
    for _ in range(40):
        scale, noise = draw.choice([0.02, 0.06, 0.2]), draw.choice([0.0, 0.01, 0.03])
        slow, history, detector = draw.randrange(ranks), [], StragglerDetector([0] * ranks)
        found = set()
        for _ in range(12):
            changes = [
                dict(forward=abs(draw.gauss(0, noise)), backward=abs(draw.gauss(0, noise))) for _ in range(ranks)
            ]
            if draw.random() < 0.5:
                changes[slow]["forward"] += scale
            history.append(rows(*changes))
            names = {one.rank for one in detector.observe(history[-1], STEPS) if one.kind == "slow_rank"}
            expected = plainly_slow(history, 4) | plainly_slow(history, 8)
            assert names <= expected and (not names or names - found == names)
            assert expected - found == set() or names  # what is slow is said at once, the slowest first
            found |= names
            if found:
                break
        named, quiet = named + bool(found), quiet + (not found)
    assert named >= 5 and quiet >= 5


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_the_median_of_the_others(count):
    draw = random.Random(count)
    for _ in range(50):
        values = [float(draw.randrange(6)) for _ in range(count)]
        expected = [median(values[:n] + values[n + 1 :]) if count > 1 else values[n] for n in range(count)]
        assert median_of_others(np.array(values)).tolist() == expected


# ---- data of all ranks, stages, network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_data_that_come_late_everywhere(ranks):
    quiet, late = rows(ranks=ranks), rows(*[{"data": 0.06}] * ranks)
    detector = StragglerDetector([0] * ranks)
    assert told(detector, [quiet] * 5 + [late] * 30 + [quiet] * 10) == [(7, "slow_data", None), (38, "recovered", None)]
    detector = StragglerDetector([0] * ranks)
    messages = [one.message for _ in range(5) for one in detector.observe(late, STEPS)]
    who = "all ranks wait" if ranks > 1 else "steps wait"
    assert messages == [
        f"{who} for data, 61.0 ms of 170.0 ms a step (last 15 steps): raise --num-workers, or use a faster disk"
    ]
    assert told(StragglerDetector([0] * ranks), [rows(*[{"data": 0.02}] * ranks)] * 30) == []
    assert told(StragglerDetector([0] * ranks), [0.05 * late] * 30) == []  # of tiny steps, three milliseconds


PIPELINE = [0, 1, 0, 1]  # stages of ranks


def test_stages_are_not_compared_with_each_other_but_noted():
    unequal = rows({}, {"backward": 0.15}, {}, {"backward": 0.15})
    detector = StragglerDetector(PIPELINE)
    found = [(n, one) for n in range(40) for one in checked(detector.observe(unequal, STEPS))]
    [(window, note)] = found
    assert note.kind == "unequal_stages" and note.rank is None and window == stragglers.ENOUGH
    assert "stage 1 of the pipeline computes for 250.0 ms a step, 2.5 times as long" in note.message
    slow = rows({}, {"backward": 0.15}, {"forward": 0.2}, {"backward": 0.15})
    [(window, kind, rank)] = told(detector, [slow] * 5)
    assert (kind, rank) == ("slow_rank", 2)  # slower than its peer, though not than the other stage


def test_a_stage_that_becomes_slow():
    quiet = rows(ranks=4)
    slow = rows({}, {"forward": 0.1}, {}, {"backward": 0.1})
    assert told(StragglerDetector(PIPELINE), [quiet] * 12 + [slow] * 8 + [quiet] * 9) == [
        (14, "slow_stage", None),
        (23, "recovered", None),
    ]
    lasting = told(StragglerDetector(PIPELINE), [quiet] * 12 + [slow] * 200)
    assert [kind for _, kind, _ in lasting] == ["slow_stage"]  # what is slow does not become usual
    everyone = rows(*[{"forward": 0.1}] * 4)  # a larger batch, a faster clock: no stage is to blame
    assert told(StragglerDetector(PIPELINE), [quiet] * 12 + [everyone] * 30) == []


def test_a_rank_alone_on_its_stage():
    """It is compared by its data and pauses, and with its own past."""
    unequal = rows({}, {"backward": 0.04})
    assert told(StragglerDetector([0, 1]), [unequal] * 40) == []
    stopped = rows({}, {"backward": 0.14, "stalled": 0.1})
    assert told(StragglerDetector([0, 1]), [stopped] * 4) == [(1, "slow_rank", 1)]
    for part in ("forward", "other"):
        changed = rows({}, {part: 0.2, "stalled": 0.2})
        detector = StragglerDetector([0, 1])
        [found] = [one for _ in range(4) for one in detector.observe(changed, STEPS)]
        assert found.fields["phase"] == part and found.fields["median"] is None  # its longest part
    both = rows({}, {"data": 0.02, "backward": 0.14, "stalled": 0.1})  # a stop hits its data, too
    assert told(StragglerDetector([0, 1]), [both] * 4) == [(1, "slow_rank", 1)]
    late = rows({"data": 0.1}, {})
    assert told(StragglerDetector([0, 1]), [late] * 4) == [(1, "slow_data", 0)]
    slower = rows({}, {"backward": 0.2})
    detector = StragglerDetector([0, 1])
    told(detector, [unequal] * 12)
    [found] = [one for _ in range(5) for one in checked(detector.observe(slower, STEPS))]
    assert (found.kind, found.rank) == ("slow_rank", 1)
    assert (
        "alone on stage 1 of the pipeline, has become slow: it takes 260.0 ms of own time a step, 140.0 ms before"
        in (found.message)
    )
    assert told(detector, [unequal] * 9) == [(3, "recovered", 1)]


def test_a_network_that_becomes_slow():
    quiet, slow = rows(ranks=4), rows(*[{"waiting": 0.1}] * 4)
    assert told(StragglerDetector([0] * 4), [quiet] * 12 + [slow] * 6 + [quiet] * 9) == [
        (14, "slow_network", None),
        (21, "recovered", None),
    ]
    assert told(StragglerDetector([0] * 4), [slow] * 40) == []  # as it was from the beginning
    crowded = rows(*[{"waiting": 0.1, "forward": 0.009, "queue": 0.02}] * 4)  # threads of messages wait for cores, too
    assert told(StragglerDetector([0] * 4), [quiet] * 12 + [crowded] * 20) == []
    larger = rows(*[{"waiting": 0.1, "forward": 0.05}] * 4)  # a larger batch
    assert told(StragglerDetector([0] * 4), [quiet] * 12 + [larger] * 20) == []
    one_slow = rows({"forward": 0.1}, {}, {}, {})  # all others wait longer
    assert {one[1] for one in told(StragglerDetector([0] * 4), [quiet] * 12 + [one_slow] * 20)} == {"slow_rank"}


def test_time_in_the_queue_is_not_taken_off_twice():
    """A thread that waits for messages also waits for cores: its queue may be longer than its own time explains."""
    computes = rows({"queue": 0.3}, {})
    computes[0, COLUMNS.index("cpu")] = computes[1, COLUMNS.index("cpu")]
    assert told(StragglerDetector([0, 0]), [computes] * 30) == []


def test_random_noise_of_a_busy_machine_names_nobody():
    """A window of two ranks whose times vary by a half, from queues and without: 2,000 steps, often."""
    for seed in range(5):
        draw = random.Random(seed)
        detector = StragglerDetector([0, 0])
        found = []
        for _ in range(400):
            queues = [draw.expovariate(1 / 0.05) for _ in range(2)]
            changes = [dict(forward=queue + draw.uniform(0, 0.015), queue=queue) for queue in queues]
            found += detector.observe(rows(*changes), STEPS)
        assert found == []
