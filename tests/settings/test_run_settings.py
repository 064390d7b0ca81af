# SPDX-License-Identifier: Apache-2.0
"""The settings around training: checkpoints, guards, what is said and where, the profiler."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.errors import CheckpointError, run_main
from megatron.guard.spikes import Recent
from megatron.guard.watch import StepVerdict
from megatron.model.command_line import parse_any
from megatron.training import loop
from megatron.training import step as training_step

SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4"


def model_of(tensors):
    """The weights alone, without the optimizer's state."""
    return {name: value for name, value in tensors.items() if not name.startswith("optimizer.")}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_come_at_their_interval_and_at_the_end(train):
    assert train(f"{SMALL} --train-iters 5 --save-interval 2").saved == [2, 4, 5]
    assert train(f"{SMALL} --train-iters 5", "end").saved == [5]
    assert train(f"{SMALL} --train-iters 5 --save-interval 1 --keep-last 2", "few").saved == [4, 5]
    assert train(f"{SMALL} --train-iters 5 --save-interval 1 --save-retain-interval 3", "some").saved == [3, 5]


def test_auto_interval_follows_the_time_to_interruption(train, capsys):
    """Young's and Daly's interval: the square root of 2 x what a save stalls x the time between failures."""
    found = []
    for hours in (100, 1600):
        train(f"{SMALL} --train-iters 8 --save-interval auto --mean-time-to-interruption {hours}", str(hours))
        said = capsys.readouterr().out
        [line] = re.findall(r"= (\d+) s: a save stalls ([\d.]+) s, an interruption is expected every (\d+) h", said)
        seconds, stall, told = map(float, line)
        assert told == hours and abs(seconds**2 / (2 * hours * 3600) - stall) < 0.15 * stall + 0.001
        found.append(seconds)


def test_async_save_goes_on_before_it_is_written(train, capsys):
    late = train(f"{SMALL} --train-iters 4 --save-interval 2 --async-save", "late")
    assert "requested checkpoint at iteration       2 (training stalled" in capsys.readouterr().out
    now = train(f"{SMALL} --train-iters 4 --save-interval 2", "now")
    for step in (2, 4):
        one, other = late.tensors(step), now.tensors(step)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def base(train):
    return train("--train-iters 3 --save-interval 1 --lr-decay-style constant", "base")


def test_load_goes_on_from_the_newest_or_from_the_step_that_is_asked_for(base, train):
    flags = f"--lr-decay-style constant --load {base.folder} --train-iters"
    assert [step["iteration"] for step in train(f"{flags} 4", "newest").steps] == [4]
    again = train(f"{flags} 3 --ckpt-step 1", "again")
    assert [step["iteration"] for step in again.steps] == [2, 3] and again.losses == base.losses[1:]


def test_a_run_begins_with_a_pretrained_model_and_goes_on(base, train, command, tmp_path):
    """Its losses are those of --finetune, and the same command resumes. The shape is the model's, too."""
    length = "--train-iters 4 --lr-decay-style constant"
    whole = train(f"--load {base.folder} --finetune {length}", "whole")
    cut = f"--pretrained-checkpoint {base.folder} --load {tmp_path / 'cut'} {length}"
    first = train(f"{cut} --exit-interval 2", "cut")
    assert (first.losses, first.saved) == (whole.losses[:2], [2])
    second = train(cut, "cut")
    assert (second.losses, second.saved[-1]) == (whole.losses, 4)
    bare = f"--pretrained-checkpoint {base.folder} --mock-data --lr 1e-3 --train-iters 9 --load".split()
    for folder, load, finetune in ((tmp_path / "new", base.folder, True), (tmp_path / "cut", tmp_path / "cut", False)):
        config = parse_any([*bare, str(folder), "--save", str(folder)])
        assert (config.checkpoint.load, config.checkpoint.finetune) == (str(load), finetune)
        assert config.model.num_layers == parse_any(command()).model.num_layers


@pytest.mark.parametrize(
    "flags, listed", [("--ckpt-step 1", "(iterations 2, 3): it starts at iteration 1"), ("", None)]
)
def test_a_run_names_the_checkpoints_of_another_line_of_training_that_it_replaces(flags, listed, base, train, capsys):
    capsys.readouterr()
    train(f"--lr-decay-style constant --load {base.folder} --train-iters 4 {flags}", "base")
    later = [line for line in capsys.readouterr().out.splitlines() if "holds later checkpoints" in line]
    assert [listed in line and line.startswith(f"warning: --save {base.folder} ") for line in later] == [True] * bool(
        listed
    )


def state_of(run):
    """(iteration, steps of the optimizer, whether its moments are all zero)."""
    moments = [piece.tensor for piece in run.optimizer.pieces() if re.search(r"exp_avg|moment", piece.name)]
    assert moments
    return run.state.iteration, run.optimizer.step_count, not any(moment.any() for moment in moments)


@pytest.mark.parametrize(
    "flags, expected", [("", (3, 3, False)), ("--no-load-optim", (3, 0, True)), ("--finetune", (0, 0, True))]
)
def test_what_of_a_checkpoint_is_loaded(flags, expected, base, build):
    run = build(f"--train-iters 5 --lr-decay-style constant --load {base.folder} {flags}")
    saved, found = base.tensors(3), dict(run.stages[0].named_parameters())
    for name, parameter in found.items():
        logical = saved[name]
        assert torch.equal(parameter[tuple(map(slice, logical.shape))], logical), name
    assert state_of(run) == expected


def test_no_save_optim_leaves_weights_alone(base, train, build):
    run = train("--train-iters 3 --no-save-optim --lr-decay-style constant", "bare")
    tensors, whole = run.tensors(3), base.tensors(3)
    names = dict(build().stages[0].named_parameters())
    assert set(tensors) == set(names) < set(whole)
    assert all(torch.equal(tensors[name], whole[name]) for name in names)
    with pytest.raises(CheckpointError, match="--no-load-optim"):
        build(f"--load {run.folder} --train-iters 4")


def test_auto_resume_allows_for_an_empty_folder(build, tmp_path):
    assert build(f"--load {tmp_path} --auto-resume").state.iteration == 0
    with pytest.raises(CheckpointError):
        build(f"--load {tmp_path}")


# ---- guards ----------------------------------------------------------------------------------------------------------


def test_replicas_are_compared_at_their_interval(train, monkeypatch):
    steps = []
    monkeypatch.setattr(loop, "check_replicas", lambda optimizer, iteration: steps.append(iteration))
    train(f"{SMALL} --train-iters 7 --check-replicas-interval 3")
    assert steps == [3, 6]


@pytest.mark.parametrize("threshold", [4.0, 20.0])
def test_spike_threshold_is_in_deviations_above_the_median(threshold, build):
    """Losses 2 to 4 in 41 even steps: median 3, and half of them within 0.5, so a deviation is 1.4826 x 0.5."""
    recent = Recent(tuple(2 + 0.05 * n for n in range(41)), (1.0,) * 41)
    watch = build(f"{SMALL} --on-spike skip --spike-threshold {threshold}").watch
    for loss, verdict in (
        (3 + (threshold - 0.1) * 0.7413, StepVerdict.UPDATE),
        (3 + (threshold + 0.1) * 0.7413, StepVerdict.SKIP),
    ):
        assert watch.judge(42, recent, loss, 1.0, lambda: "", scaling=False) is verdict


def test_spike_window_is_how_many_steps_are_remembered(train):
    run = train(f"{SMALL} --train-iters 40 --spike-window 33")
    recent = run.state(40)["state"]["recent"]
    assert recent["losses"] == pytest.approx(run.losses[-33:]) and len(recent["norms"]) == 33


def test_iterations_to_skip_are_passed_over(train, monkeypatch):
    """Their samples are not trained on: the others' are those of a plain run."""
    seen, passes = [], training_step.forward_backward
    monkeypatch.setattr(
        training_step,
        "forward_backward",
        lambda run, batches, *rest: (
            seen.append([n for batch in batches for n in batch.samples.tolist()]) or passes(run, batches, *rest)
        ),
    )
    run = train(f"{SMALL} --train-iters 5 --iterations-to-skip 2 4")
    assert seen == [[0, 1, 2, 3], [8, 9, 10, 11], [16, 17, 18, 19]]
    assert run.state(5)["state"]["consumed_samples"] == 20


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_log_lines_come_at_their_interval(train, capsys):
    """And of the last step, also where a run stops early; a line is the mean of the steps since the one before."""
    cases = {"": [3, 6, 7], "--exit-interval 5": [3, 5], "--exit-interval 6": [3, 6]}
    for number, (more, expected) in enumerate(cases.items()):
        run = train(f"{SMALL} --train-iters 7 --log-interval 3 {more}", f"run{number}")
        lines = re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", capsys.readouterr().out)
        assert [int(at) for at, _ in lines] == expected
        for start, (at, loss) in zip([0, *expected], lines, strict=False):
            mean = sum(run.losses[start : int(at)]) / (int(at) - start)
            assert float(loss) == pytest.approx(mean, rel=1e-6)


def test_timers_are_told_with_the_last_line_too(run_ranks, command, capfd):
    """Two ranks, which collect them together."""
    flags = "--train-iters 5 --log-interval 3 --timing-log-level 1 --num-workers 0"
    for more, expected in (("", ["3", "5"]), ("--exit-interval 4", ["3", "4"])):
        run_ranks(2, lambda rank, words: pretrain_gpt.main(words), command(f"{SMALL} {flags} {more}"))
        out = capfd.readouterr().out
        assert re.findall(r" iteration +(\d+)/", out) == expected and out.count("forward-backward") == len(expected)


def test_metrics_file(train, tmp_path):
    run = train(f"{SMALL} --metrics-file {tmp_path / 'm.jsonl'}")
    assert not run.steps and not (run.folder / "metrics.jsonl").exists()
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["iteration"] for record in records if record["kind"] == "step"] == [1, 2]


def test_mfu_is_a_share_of_the_peak(train):
    """TFLOP/s of a rank over those of its device; FLOPs of a token by hand, two a multiplication, three times as many."""
    h, s, vocabulary = 8, 4, 101
    flops = 3 * 2 * (12 * h * h + vocabulary * h + 2 * s * h)
    for step in train(f"{SMALL} --peak-tflops 1e-3").steps:
        assert step["tflops_per_rank"] == pytest.approx(step["tokens_per_second"] * flops / 1e12, rel=1e-3)
        assert step["mfu"] == pytest.approx(step["tflops_per_rank"] / 1e-3, rel=1e-3)


def test_a_cpu_has_no_mfu_of_its_own(train, capsys):
    """What it reaches at the start is another figure with each start, and shares of it compare nothing."""
    run = train(SMALL)
    assert all("mfu" not in step and step["tflops_per_rank"] > 0 for step in run.steps)
    assert run.kinds["run"][0]["peak"] == dict(flops=None, of="unknown")
    assert "throughput per rank" in capsys.readouterr().out and "MFU" not in (run.folder / "train.log").read_text()


@pytest.mark.parametrize(
    "level, parts", [(0, set()), (1, {"forward-backward"}), (2, {"forward-backward", "forward-compute"})]
)
def test_timers_are_those_of_their_level(level, parts, train, capsys):
    run = train(f"{SMALL} --train-iters 3 --log-interval 3 --timing-log-level {level} --timing-log-option max")
    told = [set(record["seconds"]) for record in run.kinds.get("timers", []) if record["steps"] == 3]
    assert len(told) == (level > 0)
    for names in told:
        assert parts == names & {"forward-backward", "forward-compute"}
    assert ("\nmax time across ranks (ms):" in capsys.readouterr().out) is (level > 0)


@pytest.mark.parametrize("flags, waits", [("", True), ("--no-barrier-with-level-1-timing", False)])
def test_timers_let_ranks_begin_together(flags, waits, command, run_ranks, monkeypatch):
    def body(rank):
        from megatron.mpu import collectives

        calls, barrier = [], collectives.barrier
        collectives.barrier = lambda axis: calls.append(axis.name) or barrier(axis)
        words = f"{SMALL} --timing-log-level 1 --train-iters 2 --micro-batch-size 1 --global-batch-size 2 {flags}"
        pretrain_gpt.main(command(words))
        return len(calls)

    for calls in run_ranks(2, body):
        assert (calls > 2 * 3) is waits, calls


def test_timers_in_tensorboard(train, tmp_path):
    pytest.importorskip("tensorboard")
    flags = f"{SMALL} --log-interval 1 --timing-log-level 1 --tensorboard-dir"
    train(f"{flags} {tmp_path / 'without'}", "a")
    train(f"{flags} {tmp_path / 'with'} --log-timers-to-tensorboard", "b")
    events = {name: b"".join(path.read_bytes() for path in (tmp_path / name).iterdir()) for name in ("with", "without")}
    assert b"forward-backward-time" in events["with"] and b"forward-backward-time" not in events["without"]
    assert all(b"lm loss" in found for found in events.values())


@pytest.mark.parametrize(
    "words, full",
    [
        ("", False),
        ("--debug", True),
        ("--debug=true", True),
        ("--debug true", True),
        ("--debug false", False),
        ("--config FILE", True),
    ],
)
def test_debug_shows_tracebacks(words, full, command, capsys, tmp_path):
    (tmp_path / "debug.yaml").write_text("debug: true\n")
    words = words.replace("FILE", str(tmp_path / "debug.yaml"))
    with pytest.raises(SystemExit) as ended:
        run_main(pretrain_gpt.main, command(f"--hidden-size 33 {words}"))
    said = capsys.readouterr().err
    assert ended.value.code == 3 and "--hidden-size 33 is not a multiple" in said
    assert ("Traceback (most recent call last)" in said) is full


def test_every_tool_shows_tracebacks(capsys):
    from megatron.tools import generate

    for words, full in (("", False), ("--debug", True), ("--debug false", False)):
        with pytest.raises(SystemExit):
            run_main(generate.main, f"--load gone --prompt a {words}".split())
        said = capsys.readouterr().err
        assert "gone holds no checkpoint" in said and ("Traceback" in said) is full


def test_memory_is_told_beside_what_was_planned(train, command, capsys):
    """Megatron-LM's line, with what /proc says of this process and what the dry run says of it."""
    train(f"{SMALL} --train-iters 4 --log-memory-interval 2")
    lines = re.findall(
        r"\[Rank 0\] \(after (\d) iterations\) memory \(MB\) \| resident: (\S+) \| max resident: (\S+) \| planned: (\S+)\n",
        capsys.readouterr().out,
    )
    assert [line[0] for line in lines] == ["2", "4"]
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    now, most, planned = map(float, lines[-1][1:])
    assert most == pytest.approx(int(status["VmHWM"].split()[0]) / 1024, rel=0.05) and 0.5 * most < now <= most + 1
    pretrain_gpt.main(command(f"{SMALL} --dry-run"))
    gigabytes = float(re.search(r"memory: ([\d.]+) of", capsys.readouterr().out)[1])
    assert planned * 2**20 / 1e9 == pytest.approx(gigabytes, abs=0.06)


# ---- profiler --------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
def test_profile_of_some_steps_with_shapes_or_without(train, tmp_path):
    flags = f"{SMALL} --train-iters 5 --profile --profile-step-start 2 --profile-step-end 5 --profile-dir"
    for name, more in (("plain", ""), ("detailed", "--profile-detailed")):
        train(f"{flags} {tmp_path / name} {more}", f"run-{name}")
        trace = gzip.decompress((tmp_path / name / "rank_0.trace.json.gz").read_bytes())
        assert (
            sum(
                event.get("name") == "update weights" and event.get("ph") == "X"
                for event in json.loads(trace)["traceEvents"]
            )
            == 3
        )
        assert (b"Input Dims" in trace) is (name == "detailed")
        assert (tmp_path / name / "rank_0.txt").read_text().startswith("iterations 2 to 4 of rank 0")
    assert not list(tmp_path.glob("run-*/profile")) and math.isfinite(train(SMALL, "x").losses[0])
