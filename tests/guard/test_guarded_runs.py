# SPDX-License-Identifier: Apache-2.0
"""Guards in whole runs on forked ranks: ledger, stop requests, causes of NaN, spikes, resuming with other settings."""

import dataclasses
import json
import os
import re
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.data.gpt_dataset import build_datasets
from megatron.data.indexed import write_index
from megatron.errors import CheckpointError, Interrupted, NumericsError, Preempted, SettingsError
from megatron.guard import run_state
from megatron.guard.beat_files import machine, read_beats
from megatron.guard.heartbeat import Heartbeat
from megatron.mpu.forked import RankFailed
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Data
from megatron.telemetry.events import read_events
from megatron.telemetry.history import read_history
from megatron.training.loop import pretrain
from megatron.training.rules import resolve

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
    "--micro-batch-size 2 --global-batch-size 8 --eval-interval 1000 --eval-iters 0 --device cpu --num-workers 0 "
)


def _pretrain(rank, flags, world=1, recipe=None):
    pretrain(resolve(parse_pretrain(f"{TINY} {flags}".split()), world), recipe or pretrain_gpt.recipe())


def _records(folder, kind="step"):
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def _ledger(folder):
    return [(step["iteration"], step["ledger"]) for step in _records(folder)]


def _tensors(path):
    with Reader(path) as reader:
        return {name: reader.read(name) for name in reader.tensors}


# ---- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
def test_the_ledger_does_not_depend_on_the_layout_nor_on_resuming(run_ranks, tmp_path):
    flags = "--train-iters 6 --num-layers 2 --save-interval 3"
    for name, world, more in (
        ("one", 1, ""),
        ("dp2", 2, "--micro-batch-size 1"),
        ("tp2", 2, "--tp 2 --micro-batch-size 4"),
        ("pp2", 2, "--pp 2"),
    ):
        run_ranks(world, _pretrain, f"{flags} {more} --save {tmp_path / name}", world)
    expected = _ledger(tmp_path / "one")
    assert len({hash for _, hash in expected}) == 6
    assert [_ledger(tmp_path / name) for name in ("dp2", "tp2", "pp2")] == [expected] * 3
    run_ranks(2, _pretrain, f"{flags} --save {tmp_path / 'on'} --load {tmp_path / 'one'} --ckpt-step 3", 2)
    assert _ledger(tmp_path / "on") == expected[3:]


def test_resuming_says_where_and_refuses_another_run(tmp_path, capsys):
    _pretrain(0, f"--train-iters 4 --save {tmp_path}")
    with pytest.raises(SettingsError, match="--seed: 1234 in the checkpoint, 5 now"):
        _pretrain(0, f"--train-iters 6 --load {tmp_path} --seed 5")
    _pretrain(0, f"--train-iters 6 --load {tmp_path} --lr 2e-2")
    said = capsys.readouterr().out
    parts = ("imports", "rendezvous", "model", "checkpoint", "data", "first step")
    assert re.findall(r"the first step was done [\d.]+ s after the start: (.*)", said)[-1].count(", ") == len(parts) - 1
    [start] = _records(tmp_path, "start")
    assert tuple(start["parts"]) == parts and start["seconds"] == pytest.approx(sum(start["parts"].values()), abs=0.01)
    assert [end["code"] for end in _records(tmp_path, "end")] == [0]
    assert "resuming at iteration 4, 32 samples consumed, learning rate" in said
    assert "layout tp 1 pp 1 cp 1 dp 1 then and now" in said
    assert "note: --lr was 0.01 in the checkpoint, is 0.02 now" in said
    with pytest.raises(SettingsError, match="samples of this run's past steps differ"):
        _pretrain(0, f"--train-iters 6 --load {tmp_path} --seed 5 --override seed")
    _pretrain(0, f"--train-iters 6 --load {tmp_path} --seed 5 --override seed,data-order")
    assert "(--override)" in capsys.readouterr().out


# ---- stopping --------------------------------------------------------------------------------------------------------


def _with_event(event, at_sample):
    """The recipe, and something that happens when a sample is read."""

    class Eventful:
        def __init__(self, dataset):
            self.dataset, self.done = dataset, False

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, index):
            if index == at_sample and not self.done:
                self.done = True
                event()
            return self.dataset[index]

    def build_datasets(*args):
        train, *rest = pretrain_gpt.build_datasets(*args)
        return (Eventful(train), *rest)

    return dataclasses.replace(pretrain_gpt.recipe(), build_datasets=build_datasets)


def _signalled(rank, flags, world):
    """The second rank hears SIGTERM, twice, in its third step: samples 16 to 23."""

    def event():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        _pretrain(rank, flags, world, _with_event(event, at_sample=18))
    except Preempted as stopped:
        return str(stopped)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("more", ["", "--async-save"])
def test_a_signal_to_one_rank_saves_once_on_all_at_the_same_step(more, run_ranks, tmp_path):
    flags = f"--train-iters 9 --save {tmp_path / 'a'} {more}"
    answers = run_ranks(2, _signalled, f"{flags} --exit-signal-handler", 2)
    assert all("stopped at iteration 3: signal caught" in answer for answer in answers), answers
    assert sorted(path.name for path in (tmp_path / "a").glob("iter_*")) == ["iter_0000003"]
    assert Preempted.code == 9
    assert all(f"the last checkpoint: {tmp_path / 'a' / 'iter_0000003'}\n" in answer for answer in answers)
    run_ranks(2, _pretrain, f"{flags} --load {tmp_path / 'a'}", 2)
    run_ranks(2, _pretrain, f"--train-iters 9 --save {tmp_path / 'b'}", 2)
    expected, found = _tensors(tmp_path / "b" / "iter_0000009"), _tensors(tmp_path / "a" / "iter_0000009")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert _ledger(tmp_path / "a") == _ledger(tmp_path / "b")


def _interrupted(rank, flags, world, times=1, at_sample=18):
    """What is said when the rank that reads this sample, of step 3, hears Ctrl-C so often."""

    def event():
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(Interrupted) as stopped:
        _pretrain(rank, flags, world, _with_event(event, at_sample))
    assert stopped.value.code == 130 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return stopped.value.what, stopped.value.why, stopped.value.do


@pytest.mark.parametrize("more", ["", "--async-save"])
def test_ctrl_c_on_one_rank_saves_that_step_and_says_how_to_go_on(more, run_ranks, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_COMMAND", f"launch pretrain_gpt.py --lr 1 --save {tmp_path} --ckpt-step 9")
    answers = run_ranks(2, _interrupted, f"--train-iters 9 --save {tmp_path} {more}", 2)
    go_on = f"to resume: launch pretrain_gpt.py --lr 1 --save {tmp_path} --load {tmp_path}"
    last = f"the last checkpoint: {tmp_path}/iter_0000003"
    assert answers == [("stopped at iteration 3: interrupted by Ctrl-C", last, go_on)] * 2
    assert [path.name for path in tmp_path.glob("iter_*")] == ["iter_0000003"]
    shown = run_state.look(tmp_path)
    assert (shown.state, shown.iteration, shown.checkpoint) == ("interrupted", 3, 3)


def test_a_script_around_the_training_says_what_to_type(tmp_path, monkeypatch):
    monkeypatch.setenv("RESUME_COMMAND", "bash scripts/quickstart.sh --train-iters 9 ")
    answer = _interrupted(0, f"--train-iters 9 --save {tmp_path}", 1)
    assert answer[-1] == "to resume: bash scripts/quickstart.sh --train-iters 9"


def test_ctrl_c_says_that_nothing_is_saved(tmp_path, capfd):
    answer = _interrupted(0, f"--train-iters 9 --metrics-file {tmp_path}/metrics.jsonl", 1)
    assert answer == ("stopped at iteration 3: interrupted by Ctrl-C", "nothing is saved: there is no --save", None)
    assert "Ctrl-C: stopping after this step, nothing is saved, because there is no --save" in capfd.readouterr().err
    assert run_state.look(tmp_path).state == "interrupted"


def test_ctrl_c_that_has_ended_the_reader_of_the_log_saves_all_the_same(tmp_path, monkeypatch):
    """As in `pretrain_gpt.py ... | tee log`."""
    read, write = os.pipe()

    def event():
        os.close(read)
        signal.raise_signal(signal.SIGINT)

    with os.fdopen(write, "w") as output:
        monkeypatch.setattr("sys.stdout", output)
        with pytest.raises(Interrupted):
            _pretrain(0, f"--train-iters 9 --log-interval 1 --save {tmp_path}", 1, _with_event(event, 18))
    assert (tmp_path / "iter_0000003" / "index.json").exists()


def test_a_second_ctrl_c_ends_at_once(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("MEGATRON_COMMAND", f"python pretrain_gpt.py --save {tmp_path} --load {tmp_path} --auto-resume")
    flags = f"--train-iters 9 --save {tmp_path} --load {tmp_path} --auto-resume --save-interval 2"
    what, why, do = _interrupted(0, flags, 1, times=2)
    assert what == "interrupted after iteration 2 of 9" and why.endswith("iter_0000002")
    assert do == f"to resume: {os.environ['MEGATRON_COMMAND']}"  # as it is: it loads what it saves
    assert capfd.readouterr().err.count(f"saving in {tmp_path}; press it again to end immediately") == 1
    assert run_state.look(tmp_path).state == "interrupted"


def test_ctrl_c_after_the_last_step_ends_the_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron.training.loop.evaluate", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    flags = f"--train-iters 3 --save {tmp_path} --eval-iters 1"
    what, why, _ = _interrupted(0, flags, 1, times=0)
    assert what == "interrupted after iteration 3 of 3" and why.endswith("iter_0000003")


def test_a_sigint_that_is_ignored_or_taken_stays_so(tmp_path, monkeypatch):
    """In the background of a shell, and in a program that this is a part of."""
    heard = []
    for handler in (signal.SIG_IGN, lambda *_: heard.append(1)):
        before = signal.signal(signal.SIGINT, handler)
        try:
            _pretrain(0, "--train-iters 4", 1, _with_event(lambda: signal.raise_signal(signal.SIGINT), 18))
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)
    assert heard == [1]


def test_the_kill_switch_stops_with_a_checkpoint_and_then_keeps_others_from_starting(tmp_path, capsys):
    switch = tmp_path / "stop"
    flags = f"--train-iters 50 --save {tmp_path / 'a'} --kill-switch-file {switch}"
    _pretrain(0, flags, recipe=_with_event(lambda: switch.touch(), at_sample=0))
    assert (tmp_path / "a" / "iter_0000001").exists()
    assert "stopping at iteration 1: --kill-switch-file" in capsys.readouterr().out
    [end] = _records(tmp_path / "a", "end")
    assert (end["iteration"], end["code"]) == (1, 0) and end["why"].startswith("--kill-switch-file")
    with pytest.raises(SettingsError, match="exists already"):
        _pretrain(0, flags)


# ---- values that are not finite --------------------------------------------------------------------------------------


class _Poison(torch.autograd.Function):
    """Multiplies by `factor` on the way forward or back, where `hit` of [b] is true."""

    @staticmethod
    def forward(ctx, x, hit, forward, backward):
        ctx.hit, ctx.backward_factor = hit, backward
        return torch.where(hit[:, None], x * forward, x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.where(ctx.hit[:, None], gradient * ctx.backward_factor, gradient), None, None, None


def _poisoned(module, samples, forward=1.0, backward=1.0, times=None):
    """The recipe with a fault in a module of the model, for some samples, at most `times` times."""
    left = [times]

    def build_model(*args, **keys):
        model = pretrain_gpt.build_model(*args, **keys)
        found = dict(model.named_modules()).get(module)
        if found is not None:
            model.register_forward_pre_hook(lambda _, inputs: setattr(found, "now", inputs[1].samples))

            def spoil(_, inputs, output):
                hit = torch.isin(found.now, torch.tensor(samples))
                if not hit.any() or left[0] == 0:
                    return output
                left[0] = left[0] and left[0] - 1
                return _Poison.apply(output, hit, forward, backward)

            found.register_forward_hook(spoil)
        return model

    return dataclasses.replace(pretrain_gpt.recipe(), build_model=build_model)


NAN = float("nan")


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "layout, fault, where",
    [
        (
            "",
            dict(module="blocks.1.mlp", samples=[22], forward=NAN),
            "rank 1, micro-batch 1: first in the forward pass of blocks.1.mlp\n    sample 22",
        ),
        (
            "",
            dict(module="blocks.0.attention_norm", samples=[17], backward=NAN),
            "rank 0, micro-batch 0: first in the backward pass of blocks.0.attention_norm",
        ),
        (
            "--pp 2",
            dict(module="blocks.1.attention", samples=[20], forward=NAN),
            "rank 1, micro-batch 2: first in the forward pass of blocks.1.attention\n    sample 20",
        ),
        (
            "--tp 2",
            dict(module="blocks.0.mlp", samples=[19], forward=float("inf")),
            "micro-batch 1: first in the forward pass of blocks.0.mlp",
        ),
        (
            "--use-distributed-optimizer",
            dict(module="final_norm", samples=[16], forward=NAN),
            "rank 0, micro-batch 0: first in the forward pass of final_norm\n    sample 16",
        ),
    ],
)
def test_a_value_that_is_not_finite_is_traced_to_rank_micro_batch_module_and_sample(
    layout, fault, where, run_ranks, tmp_path
):
    """Samples 16 to 23 are those of step 3; with two data parallel ranks rank 1 has 18, 19, 22, 23."""
    flags = f"--train-iters 5 --save {tmp_path} --save-interval 1 {layout}"
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, _pretrain, flags, 2, _poisoned(**fault))
    text = str(failed.value)
    assert "iteration 3: loss" in text and "not finite" in text and where in text, text
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000001", "iter_0000002"]


def test_documents_behind_a_value_that_is_not_finite_are_named(tmp_path):
    """Every document is a sample and a half long: 25 tokens for samples of 17 that overlap by one."""
    tokens = np.random.default_rng(0).integers(0, 100, 64 * 25).astype(np.uint16)
    tokens.tofile(tmp_path / "d.bin")
    write_index(tmp_path / "d.idx", np.uint16, np.full(64, 25), np.arange(65))
    flags = (
        f"--train-iters 5 --data-path {tmp_path / 'd'} --split 1,0,0 --tokenizer-type NullTokenizer --vocab-size 100 "
        f"--data-cache-path {tmp_path}"
    )
    with pytest.raises(NumericsError) as failed:
        pretrain(
            resolve(parse_pretrain(f"{TINY.replace('--mock-data --vocab-size 100', '')} {flags}".split()), 1),
            _poisoned("blocks.1.mlp", [20], forward=NAN),
        )
    [text] = re.findall(r"sample 20: .*/d, documents? ([\d, ]+) \(from token (\d+)\)", str(failed.value))
    numbers, offset = [int(number) for number in text[0].split(",")], int(text[1])
    train = training_samples(tmp_path)
    found = np.concatenate(
        [tokens.reshape(64, 25)[numbers[0]][offset:], *(tokens.reshape(64, 25)[n] for n in numbers[1:])]
    )
    assert found[:17].tolist() == np.asarray(train[20]).tolist()


def training_samples(folder):
    """The training samples of the run above, in its order."""
    data = Data(data_path=[str(folder / "d")], split="1,0,0", data_cache_path=str(folder))
    return build_datasets(data, 16, (40, 0, 0), 1234, vocab_size=101)[0]


def test_a_fault_that_does_not_repeat_is_told_as_one():
    with pytest.raises(NumericsError, match="the same step, repeated, is finite"):
        _pretrain(0, "--train-iters 5", recipe=_poisoned("blocks.1.mlp", [20], forward=NAN, times=1))


@pytest.mark.sampled(2)
def test_steps_that_are_not_finite_can_be_skipped_and_are_counted(tmp_path, capsys):
    """A skipped step leaves no trace: the run goes on as one that has left the step out."""
    bad = _poisoned("blocks.1.mlp", [20, 33], forward=NAN)
    _pretrain(0, f"--train-iters 8 --save {tmp_path / 'a'} --on-nan skip", recipe=bad)
    assert [step["iteration"] for step in _records(tmp_path / "a") if step["skipped"]] == [3, 5]
    assert "iteration 3 is skipped: loss nan" in capsys.readouterr().out
    _pretrain(0, f"--train-iters 8 --save {tmp_path / 'b'} --iterations-to-skip 3 5")
    expected, found = _tensors(tmp_path / "b" / "iter_0000008"), _tensors(tmp_path / "a" / "iter_0000008")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    with pytest.raises(NumericsError, match="10 steps in a row"):
        _pretrain(
            0,
            "--train-iters 30 --no-check-for-nan-in-loss-and-grad",
            recipe=_poisoned("blocks.1.mlp", list(range(24, 400)), forward=NAN),
        )


# ---- spikes ----------------------------------------------------------------------------------------------------------

SPIKY = "--hidden-dropout 0 --attention-dropout 0 --train-iters 44 --lr 1e-3 --save-interval 10 --spike-threshold 8"


def _spike():
    return _poisoned("final_norm", [8 * 39 + 3], forward=3000.0)  # in step 40


@pytest.mark.sampled(5)
def test_a_spike_is_told_or_skipped(tmp_path, capsys):
    _pretrain(0, f"{SPIKY} --save {tmp_path / 'told'}", recipe=_spike())
    [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: iteration")]
    assert told.startswith("warning: iteration 40: loss")
    kinds = [event["event"] for event in read_events(tmp_path / "told") if event["iteration"] == 40]
    assert {"spike", "high_grad_norm"} <= set(kinds)  # both are recorded
    assert [step["iteration"] for step in _records(tmp_path / "told") if "spike" in step][0] == 40
    _pretrain(0, f"{SPIKY} --save {tmp_path / 'skipped'} --on-spike skip", recipe=_spike())
    assert [step["iteration"] for step in _records(tmp_path / "skipped") if step["skipped"]] == [40]


@pytest.mark.sampled(5)
def test_a_spike_rolls_back_and_leaves_out_what_led_to_it(run_ranks, tmp_path):
    """The end is that of a run which was told from the start to leave those steps out."""
    flags = f"{SPIKY} --on-spike rollback --spike-skip-steps 4"
    run_ranks(2, _pretrain, f"{flags} --save {tmp_path / 'a'} --log-interval 10", 2, _spike())
    assert [record["iteration"] for record in _records(tmp_path / "a", "rewind")] == [30]
    run_ranks(2, _pretrain, f"{SPIKY} --save {tmp_path / 'b'} --iterations-to-skip 37 38 39 40", 2)
    expected, found = _tensors(tmp_path / "b" / "iter_0000044"), _tensors(tmp_path / "a" / "iter_0000044")
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    with Reader(tmp_path / "a" / "iter_0000044") as reader:
        state = reader.state["state"]
    assert state["left_out"] == [37, 38, 39, 40] and state["rollbacks"] == 1 and state["consumed_samples"] == 44 * 8
    history = read_history(tmp_path / "a" / "metrics.jsonl")  # what the report tells of it
    told = [(event["kind"], event["iteration"]) for event in history.events if event["kind"] != "save"]
    assert told == [("run", 0), ("spike", 40), ("rewind", 30), ("end", 44)]
    on_disk = {int(path.name[5:]) for path in (tmp_path / "a").glob("iter_*")}
    assert on_disk <= {event["iteration"] for event in history.events if event["kind"] == "save"}
    used = [record["bytes"] for record in history.memory]
    assert used and resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 >= max(used) > 5e7


@pytest.mark.sampled(2)
def test_rollbacks_are_limited(tmp_path):
    with pytest.raises(NumericsError, match="0 rollbacks have not helped"):
        _pretrain(0, f"{SPIKY} --save {tmp_path} --on-spike rollback --max-rollbacks 0", recipe=_spike())


# ---- heartbeats ------------------------------------------------------------------------------------------------------


def test_a_heartbeat_says_what_a_rank_does_and_how_it_ended(tmp_path):
    beats = []
    event = _with_event(lambda: beats.extend(read_beats(tmp_path / "beats")), at_sample=18)
    _pretrain(0, f"--train-iters 4 --heartbeat-dir {tmp_path / 'beats'}", recipe=event)
    assert [(beat.step, beat.phase, beat.place) for beat in beats] == [(3, "data", "dp 0 pp 0 cp 0 tp 0")]
    [last] = read_beats(tmp_path / "beats")
    assert (last.step, last.since, last.ended, last.why) == (4, 1, 0, "")
    assert {"F", "B", "data", "reduce", "update", "load", "index"} <= set(last.seconds)
    with pytest.raises(CheckpointError):
        _pretrain(0, f"--train-iters 4 --heartbeat-dir {tmp_path / 'beats'} --load {tmp_path}")
    assert [(beat.step, beat.phase, beat.ended) for beat in read_beats(tmp_path / "beats")] == [(0, "load", 5)]
    with pytest.raises(NumericsError):
        _pretrain(
            0, f"--train-iters 4 --heartbeat-dir {tmp_path / 'beats'}", recipe=_poisoned("final_norm", [9], forward=NAN)
        )
    [last] = read_beats(tmp_path / "beats")
    assert (last.step, last.ended) == (2, 8) and last.why.startswith("iteration 2: loss nan")


def test_a_heartbeat_names_the_group_that_a_rank_waits_in(run_ranks, tmp_path):
    """The first rank of a pipeline looks at what it waits in while its second one is late."""

    def late(rank):
        def event():  # where stage 1 comes to its first sample, stage 0 has sent it or is about to
            if rank == 1:
                deadline = time.monotonic() + 60
                while time.monotonic() < deadline and not seen():
                    time.sleep(0.002)

        def seen():
            groups.extend(beat.group for beat in read_beats(tmp_path) if beat.op == "B0" and "from" in beat.group)
            return groups

        groups = []
        _pretrain(
            rank, f"--train-iters 1 --pp 2 --micro-batch-size 8 --heartbeat-dir {tmp_path}", 2, _with_event(event, 0)
        )
        return groups[:1]

    assert run_ranks(2, late)[1] == ["pp group 0 from rank 1"]
    assert [beat.machine for beat in read_beats(tmp_path)] == [machine()] * 2


def test_reading_beats_while_they_change_never_fails(tmp_path):
    heartbeat = Heartbeat(str(tmp_path), 3)
    reader = os.fork()
    if reader == 0:
        seen = [beat.count for _ in range(3000) for beat in read_beats(tmp_path)]
        os._exit(0 if len(seen) == 3000 and seen == sorted(seen) else 1)
    while os.waitpid(reader, os.WNOHANG)[0] == 0:
        for number in range(500):
            heartbeat.beat("F", step=number, op=f"F{number % 7}")
    heartbeat.close()
    (tmp_path / "rank_00004.beat").write_text("no beat")
    assert [beat.rank for beat in read_beats(tmp_path)] == [3]
    assert np.isfinite(read_beats(tmp_path)[0].usual)
