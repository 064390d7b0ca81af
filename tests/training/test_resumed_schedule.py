# SPDX-License-Identifier: Apache-2.0
"""A run that is made longer, against the plain loop: whose schedule it follows, and what is said about it."""

import json

import pytest

from megatron.checkpoint.reader import Reader
from megatron.data.launches import read_run
from megatron.errors import SettingsError
from megatron.guard.changes import change_messages
from megatron.guard.run_state import look
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.resumed_schedule import drift, drift_message, lengths_of
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import resolve
from tests.training.plain_loop import Job, decay_of, rate_of, train
from tests.training.test_plain_loop import FLAGS, PLAIN, compare, pretrain

SHORT, LONG = 10, 20
SIZE = "--global-batch-size 8 --eval-iters 0 --adam-eps 1e-4"
CURVES = (
    "--lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-fraction 0.2 --weight-decay-incr-style linear "
    "--start-weight-decay 0.1 --end-weight-decay 0.9"
)


def curves(steps):
    """(learning rate, weight decay) of a run of so many steps, as functions of the samples before a step."""
    rate = rate_of("cosine", 1e-2, 1e-3, warmup=8 * steps / 5, end=8 * steps)
    return rate, decay_of("linear", 0.1, 0.9, total=8 * steps)


def switched(at, before, behind):
    return lambda samples: (before if samples < at else behind)(samples)


def warnings(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("choice", [None, "command", "checkpoint"])
def test_a_longer_run_follows_the_schedule_that_it_is_told_to(choice, tmp_path, capsys):
    """Trained for 10 steps, then --train-iters 20. The second launch of the longer run finds its own schedule again."""
    flags = f"{SIZE} {CURVES} --save {tmp_path} --load {tmp_path}"
    more = f"--resume-schedule {choice}" if choice else ""
    pretrain(0, f"{flags} --train-iters {SHORT}")
    assert warnings(capsys) == []
    pretrain(0, f"{flags} --train-iters {LONG} --exit-interval 15 {more}")
    said = warnings(capsys)
    pretrain(0, f"{flags} --train-iters {LONG} {more}")
    again = warnings(capsys)
    short, long = curves(SHORT), curves(LONG)
    pairs = [short, short] if choice == "checkpoint" else [short, long]
    rate, decay = (switched(8 * SHORT, one, other) for one, other in zip(*pairs, strict=True))
    compare(tmp_path, train(Job(**PLAIN | dict(batches=[8] * LONG, rate=rate, decay=decay))))
    assert again == []
    assert len(said) == (choice is None)
    runs = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second, _ = (record.get("resumed") for record in runs if record["kind"] == "run")
    assert first is None and "--train-iters was 10 in the checkpoint, is 20 now" in second["settings"]
    assert bool(second["schedule"]) == (choice != "checkpoint") and bool(second["followed"]) == (choice == "checkpoint")
    assert second["followed"].get("lr_decay_iters", SHORT) == SHORT
    if said:
        assert "the learning rate falls over 20 steps, 10 in the checkpoint" in said[0]
        assert "To continue as before: --lr-decay-iters 10, or --resume-schedule checkpoint" in said[0]
        assert "the weight decay grows over 20 steps, 10 in the checkpoint" in said[0]
        assert "(if that is intended: --resume-schedule command)" in said[0]


def test_the_flag_of_the_warning_goes_on_as_before(tmp_path, capsys):
    flags = f"{SIZE} --lr 1e-2 --save {tmp_path} --load {tmp_path}"
    pretrain(0, f"{flags} --train-iters {SHORT} --exit-interval 5")
    pretrain(0, f"{flags} --train-iters {LONG} --lr-decay-iters 10 --exit-interval 12")
    assert warnings(capsys) == []
    rate = rate_of("linear", 1e-2, end=80)
    compare(tmp_path, train(Job(**PLAIN | dict(batches=[8] * 12, rate=rate))))


@pytest.mark.sampled(2)
def test_a_run_that_gave_its_length_is_the_run_of_twice_the_steps(tmp_path, capsys):
    """The README's command: to the bit, and without a word."""
    flags = f"{SIZE} --lr 1e-2 --lr-decay-iters 30"
    two = f"{flags} --save {tmp_path / 'two'} --load {tmp_path / 'two'}"
    pretrain(0, f"{two} --train-iters {SHORT}")
    pretrain(0, f"{two} --train-iters {LONG}")
    assert warnings(capsys) == []
    pretrain(0, f"{flags} --save {tmp_path / 'one'} --train-iters {LONG}")
    found = []
    for name in ("one", "two"):
        with Reader(tmp_path / name / f"iter_{LONG:07d}") as reader:
            found.append({tensor: reader.read(tensor) for tensor in reader.tensors})
    assert found[0].keys() == found[1].keys()
    assert all((found[0][name] == found[1][name]).all() for name in found[0])


def test_the_checkpoints_rates_win_over_flags_that_were_given(tmp_path, capsys):
    """As Megatron-LM's --use-checkpoint-opt_param-scheduler: also where the command says another value."""
    flags = f"{SIZE} --save {tmp_path} --load {tmp_path} --train-iters 6 --weight-decay"
    pretrain(0, f"{flags} 0.3 --lr 1e-2 --exit-interval 3")
    pretrain(0, f"{flags} 0.9 --lr 5e-2 --lr-decay-style cosine --use-checkpoint-opt_param-scheduler")
    said = capsys.readouterr().out
    assert "note: --lr was 0.01 in the checkpoint, is 0.05 now: the checkpoint's is followed" in said
    rates = dict(rate=rate_of("linear", 1e-2, end=48), decay=decay_of("constant", 0, 0.3, total=1))
    compare(tmp_path, train(Job(**PLAIN | rates)))


def config(flags, world=1):
    return resolve(parse_pretrain(f"{FLAGS} {flags}".split()), world)


def record(flags, world=1, lengths=True):
    """What a checkpoint of such a run keeps."""
    import dataclasses

    ran = config(flags, world)
    made = Lengths.of(ran.optimizer, ran.batch, world)
    found = dict(config=dataclasses.asdict(ran)) | (dict(lengths=dataclasses.asdict(made)) if lengths else {})
    return json.loads(json.dumps(found))


BASE = "--global-batch-size 8 --lr 1e-2"
CASES = [  # then, now, what is said to have changed by itself
    ("--train-iters 10", "--train-iters 10", []),
    ("--train-iters 10", "--train-iters 20", ["falls over 20 steps, 10 in the checkpoint (--lr-decay-iters 10)"]),
    ("--train-iters 10 --lr-decay-style constant", "--train-iters 20 --lr-decay-style constant", []),
    ("--train-iters 10 --lr-decay-iters 7", "--train-iters 20 --lr-decay-iters 7", []),
    ("--train-iters 10 --lr-decay-iters 7", "--train-iters 10", ["falls over 10 steps, 7 in"]),
    ("--train-iters 10", "--train-iters 10 --lr-decay-iters 7", []),  # asked for: logged as a changed flag
    ("--train-samples 80", "--train-samples 160", ["160 samples, 80 in the checkpoint (--lr-decay-samples 80)"]),
    (
        "--train-iters 10 --lr-decay-style constant --lr-warmup-fraction 0.5",
        "--train-iters 20 --lr-decay-style constant --lr-warmup-fraction 0.5",
        ["the warm-up is a share of 20 steps, 10 in the checkpoint (--lr-decay-iters 10)"],
    ),
    (
        "--train-iters 10 --lr-decay-style WSD --lr-wsd-decay-iters 4",
        "--train-iters 20 --lr-decay-style WSD --lr-wsd-decay-iters 4",
        ["falls over 20 steps"],
    ),
    (
        "--train-iters 10 --lr-decay-iters 30 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "--train-iters 20 --lr-decay-iters 30 --weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        ["the weight decay grows over 20 steps, 10 in the checkpoint"],
    ),
    # A larger batch, which somebody gave: the curves are functions of samples.
    (
        "--train-iters 100 --lr-decay-iters 90 --lr-warmup-iters 10",
        "--train-iters 100 --lr-decay-iters 90 --lr-warmup-iters 10 --global-batch-size 16",
        ["falls over 90 steps, 45 in the checkpoint (--lr-decay-iters 45)", "warms up over 10 steps, 5 in the"],
    ),
]


@pytest.mark.parametrize("lengths", [True, False])  # checkpoints of earlier versions have none
@pytest.mark.parametrize("then, now, said", CASES)
def test_what_changed_by_itself(then, now, said, lengths):
    found = [str(one) for one in drift(config(f"{BASE} {now}"), record(f"{BASE} {then}", lengths=lengths), 1)]
    assert len(found) == len(said) and all(words in one for one, words in zip(found, said, strict=True)), found


def test_a_batch_that_follows_the_ranks_is_said_and_the_lengths_in_steps_are_not():
    flags = "--lr 1e-2 --train-iters 10"
    [found] = drift(config(flags, 1), record(flags, 4), 1)
    assert str(found) == "a step has 2 samples, 8 in the checkpoint (--global-batch-size 8)"
    assert "--resume-schedule" not in drift_message([found], None)
    assert drift(config(f"{flags} --global-batch-size 2"), record(flags, 4), 1)[0].of_schedule  # asked for


def test_a_batch_of_each_rank_makes_another_one_on_more_ranks():
    """Given in both runs, and the same: nothing else would say that a step is twice as large."""
    flags = "--lr 1e-2 --train-iters 10 --local-batch-size 2 --lr-decay-style constant"
    [found] = drift(config(flags, 4), record(flags, 2), 4)
    assert str(found) == "a step has 8 samples, 4 in the checkpoint (--global-batch-size 4)"
    assert drift(config(flags, 4), record(flags, 4), 4) == []


def test_what_is_said_as_a_warning_is_not_told_twice():
    then, now = record(f"{BASE} --train-iters 10"), config(f"{BASE} --train-iters 20 --min-lr 1e-5")
    assert [words.split(" was")[0] for words in change_messages(now, then["config"])] == ["--train-iters", "--min-lr"]


def test_lengths_of_a_record():
    assert lengths_of(record(f"{BASE} --train-iters 10", lengths=False)) == Lengths(0, 80, None, 80)
    none = dict(warmup=0, decay="x", anneal=None, total=80)
    odd = [dict(lengths=7), dict(lengths={"x": 1}), dict(config=dict(batch=3)), dict(lengths=none)]
    for damaged in ({}, dict(config=[]), *odd):
        assert lengths_of(damaged) is None
        assert drift(config(f"{BASE} --train-iters 10"), damaged, 1) == []


def test_a_checkpoint_without_a_schedule_cannot_be_followed():
    from megatron.optimizer.resumed_schedule import follow

    with pytest.raises(SettingsError, match="has no schedule"):
        follow(config(f"{BASE} --train-iters 10 --load x --resume-schedule checkpoint"), {}, 1)
    for name, value in (("lr", "high"), ("lr", None), ("lr_decay_style", "cosin"), ("weight_decay", float("nan"))):
        damaged = record(f"{BASE} --train-iters 10")
        damaged["config"]["optimizer"][name] = value
        with pytest.raises(SettingsError, match="has no schedule"):
            follow(config(f"{BASE} --train-iters 10 --load x --resume-schedule checkpoint"), damaged, 1)


@pytest.mark.parametrize(
    "flag, choice",
    [
        ("--override-opt_param-scheduler", "command"),
        ("--override-lr-scheduler", "command"),
        ("--use-checkpoint-opt_param-scheduler", "checkpoint"),
        ("--use-checkpoint-lr-scheduler", "checkpoint"),
    ],
)
def test_megatrons_words_for_it(flag, choice):
    assert config(f"{BASE} --train-iters 1 --load x {flag}").checkpoint.resume_schedule == choice


def test_both_of_them_contradict_each_other():
    from megatron.errors import UsageError

    with pytest.raises(UsageError, match="contradict each other"):
        config("--train-iters 1 --override-opt_param-scheduler --use-checkpoint-opt_param-scheduler")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("size, steps", [(4, 20), (16, 5)])
def test_other_batches_train_on_the_samples_that_are_left(size, steps, tmp_path, capsys):
    """--train-samples 160: ten steps of 8 samples, then batches of another size, as many as the other 80 samples make. The
    learning rate follows the samples: over the whole run it is one curve.
    """
    flags = f"--eval-iters 0 --adam-eps 1e-4 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --save {tmp_path}"
    flags += f" --load {tmp_path} --train-samples 160"
    pretrain(0, f"{flags} --global-batch-size 8 --exit-interval 10")
    pretrain(0, f"{flags} --global-batch-size {size}")
    assert f"iterations 10 to {10 + steps}" in capsys.readouterr().out
    rate = rate_of("cosine", 1e-2, 1e-3, warmup=0, end=160)
    compare(tmp_path, train(Job(**PLAIN | dict(batches=[8] * 10 + [size] * steps, rate=rate))))
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    last = [record for record in found if record["kind"] == "step"][-1]
    assert (last["iteration"], last["consumed_samples"]) == (10 + steps, 160)
    assert read_run(str(tmp_path)).last == 10 + steps
    assert look(tmp_path).iterations == 10 + steps
    pretrain(0, f"{flags} --global-batch-size {size}")
    assert f"training ends at iteration {10 + steps}: nothing is left to train" in capsys.readouterr().out
