# SPDX-License-Identifier: Apache-2.0
"""--rerun-mode in whole runs on forked ranks: verdicts, ranks that are named, and weights as without it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError, node_name
from megatron.guard import rerun as pure
from megatron.mpu import collectives
from megatron.mpu.axis_sizes import expert_sizes
from megatron.mpu.bits_sum import words_sum
from megatron.mpu.forked import RankFailed
from megatron.mpu.mesh import Mesh, ranks_along
from megatron.settings.parse import parse_pretrain
from megatron.telemetry.events import read_events
from megatron.training import loop
from megatron.training.drill import drill_at, flip_bit
from megatron.training.rerun import Rerun, build_rerun
from tests.guard.test_guarded_runs import NAN, SPIKY, TINY, _poisoned, _pretrain, _records, _spike, _tensors

VALIDATE = "--rerun-mode validate_results"
LAYOUTS = {
    "dp2": (2, "--micro-batch-size 1"),
    "zero1": (2, "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2"),
    "zero3": (2, "--sharding-stage 3"),
    "tp2": (2, "--tp 2 --sequence-parallel"),
    "pp2": (2, "--pp 2"),
    "interleaved": (2, "--pp 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1"),
    "zb": (2, "--pp 2 --pipeline-schedule zb-h1"),
    "ep2": (2, "--num-experts 4 --expert-model-parallel-size 2"),
    "dp2_ep2": (4, "--num-experts 4 --expert-model-parallel-size 2 --micro-batch-size 1"),
    "buffers": (
        2,
        "--num-experts 4 --moe-router-enable-expert-bias --moe-router-score-function sigmoid --log-interval 2",
    ),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2_pp2_dp2": (8, "--tp 2 --pp 2 --micro-batch-size 1"),
    "fp16": (2, "--fp16 --initial-loss-scale 256"),
    "dropout": (2, "--hidden-dropout 0.1 --attention-dropout 0.1"),
    "invariant": (2, "--tp 2 --batch-invariant-mode"),
}


def trained(run_ranks, folder, world, flags):
    """The tensors of the last checkpoint of a run, and its events of reruns."""
    run_ranks(world, _pretrain, f"--train-iters 4 --save {folder} {flags}", world)
    return _tensors(folder / "iter_0000004"), [one for one in read_events(folder) if one["event"] == "rerun"]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_transient_error_is_named_and_leaves_no_trace(run_ranks, tmp_path, layout):
    world, flags = LAYOUTS[layout]
    plain, _ = trained(run_ranks, tmp_path / "plain", world, flags)
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type transient_error"
    found, events = trained(run_ranks, tmp_path / "drill", world, f"{flags} {drill}")
    assert [(one["iteration"], one["verdict"], one["rank"]) for one in events] == [
        (step, "transient", drill_at(step, 1, "", 1234, world).rank) for step in range(1, 5)
    ], events
    assert same(plain, found)
    loads = [[one["loads"] for one in _records(tmp_path / name, "experts")] for name in ("plain", "drill")]
    assert loads[0] == loads[1] and bool(loads[0]) == (
        "--log-interval" in flags
    )  # of a step, and not of its computations


def ended(run_ranks, world, flags, recipe=None):
    """The message of a run that a device's error ends."""
    with pytest.raises(RankFailed, match="SilentError") as failed:
        run_ranks(world, _pretrain, flags, world, recipe)
    return str(failed.value)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "world, flags, named",
    [
        (4, "--micro-batch-size 1", ["rank 3"]),
        (4, "--tp 2", ["rank 1", "rank 3"]),  # two data parallel ranks: one of them
        (8, "--pp 2 --sharding-stage 1 --micro-batch-size 1", ["rank 7"]),
        (4, "--num-experts 2 --expert-model-parallel-size 2 --micro-batch-size 1", ["rank 1", "rank 3"]),
        (4, "--sharding-stage 3 --micro-batch-size 1", ["rank 3"]),
    ],
)
def test_a_persistent_error_ends_the_run_with_its_rank(run_ranks, tmp_path, world, flags, named):
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type persistent_error --seed 12"
    rank = drill_at(1, 1, "", 12, world).rank
    text = ended(run_ranks, world, f"--train-iters 4 --save {tmp_path} {flags} {drill}")
    said = (
        "computes other bits than other ranks do" if len(named) == 1 else "compute different bits of the same samples"
    )
    assert said in text and f"rank {rank}" in named and all(f"{one} on" in text for one in named), (rank, text)
    [event] = [one for one in read_events(tmp_path) if one["event"] == "rerun"]
    assert (event["level"], event["verdict"], event["iteration"]) == ("error", "this device", 1)
    assert not list(tmp_path.glob("iter_*"))


def test_a_correct_result_is_told_from_an_error(run_ranks, tmp_path):
    drill = f"{VALIDATE} --error-injection-rate 1 --error-injection-type correct_result"
    _, events = trained(run_ranks, tmp_path, 2, drill)
    assert not events


# ---- faults of other kinds --------------------------------------------------------------------------------------------


def before_steps(act):
    """Let act(run, step) run before each step of this process."""
    train_step = loop.train_step

    def acting(run):
        act(run, run.state.iteration + 1)
        return train_step(run)

    loop.train_step = acting


def with_outputs(change):
    """The recipe with other outputs of an MLP in training: change(output) -> output"""

    def build_model(*args, **keys):
        model = pretrain_gpt.build_model(*args, **keys)
        found = dict(model.named_modules()).get("blocks.0.mlp")
        if found is not None:
            found.register_forward_hook(lambda module, given, output: change(output) if module.training else None)
        return model

    return dataclasses.replace(pretrain_gpt.recipe(), build_model=build_model)


def run_of(run_ranks, folder, world, flags, body):
    """The events of reruns of a run of 6 steps, and its error. body(rank): what happens on each rank, returns the recipe"""

    def train(rank):
        _pretrain(rank, f"--train-iters 6 --save {folder} {flags}", world, body(rank))

    text = ""
    try:
        run_ranks(world, train)
    except RankFailed as failed:
        text = str(failed)
    return [one for one in read_events(folder) if one["event"] == "rerun"], text


@pytest.mark.sampled(2)
def test_every_nth_step_finds_a_device_that_computes_otherwise(run_ranks, tmp_path):
    def body(rank):
        return with_outputs((lambda output: output * 1.0001) if rank == 1 else lambda output: output)

    [event], text = run_of(run_ranks, tmp_path, 3, f"{VALIDATE} --rerun-interval 4 --global-batch-size 6", body)
    assert "iteration 4: rank 1 on" in text and "SilentError" in text
    assert (event["rank"], event["iteration"], event["others"]) == (1, 4, [])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["weight", "moment", "copy"])
def test_memory_that_changes_between_two_updates_is_named(run_ranks, tmp_path, what):
    def body(rank):
        runs, done = [], []
        before_steps(lambda run, step: runs.append((run, step)))

        def flip(output):
            run, step = runs[-1]
            if rank == 1 and step == 5 and not done:
                done.append(step)
                state = run.optimizer.states[0]
                unit = run.optimizer.units[0].slots[0].parameter.data.view(-1)
                flip_bit(dict(weight=state.main, moment=state.moments["exp_avg"], copy=unit)[what], 3, 1)
            return output

        return with_outputs(flip)

    flags = f"{VALIDATE} --rerun-interval 1 --use-distributed-optimizer"
    [event], text = run_of(run_ranks, tmp_path, 2, flags, body)
    assert (event["rank"], event["iteration"], event["verdict"]) == (1, 5, "memory"), text
    assert dict(weight="(main weights)", moment="(exp_avg)", copy="weight")[what] in event["where"]
    assert "changed while nothing wrote to it" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", ["--micro-batch-size 1", "--tp 2", "--pp 2", "--sharding-stage 2"])
def test_a_message_that_arrives_otherwise_is_no_ranks_fault(run_ranks, tmp_path, flags):
    def body(rank):
        steps = []
        before_steps(lambda run, step: steps.append(step))
        arriving, done = collectives.Traffic.report.__func__, []

        def report(cls, way, message, x, axis):
            if rank == 1 and way == pure.RECEIVED and steps[-1:] == [3] and not done and axis.name != "world":
                done.append(flip_bit(x.data.view(-1), 3, 12))
            arriving(cls, way, message, x, axis)

        collectives.Traffic.report = classmethod(report)
        return None

    [event], text = run_of(run_ranks, tmp_path, 2, f"{VALIDATE} --rerun-interval 1 {flags}", body)
    assert (event["rank"], event["iteration"], event["verdict"]) == (1, 3, "transient"), text
    assert event["message"].startswith("iteration 3: a message to rank 1 on") and "from other" in event["where"]
    assert not text


def test_what_is_never_the_same_is_not_repeatable(run_ranks, tmp_path):
    def body(rank):
        noise = torch.Generator()
        noise.seed()
        other = lambda output: output + 1e-3 * torch.rand((), generator=noise)
        return with_outputs(other if rank == 1 else lambda output: output)

    [event], text = run_of(run_ranks, tmp_path, 2, f"{VALIDATE} --rerun-interval 2", body)
    assert event["verdict"] == "not repeatable" and "three results, first different on rank 1 on" in text


# ---- suspicious steps -------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [[1], [1, 0]], ids=["once", "once on each rank"])
def test_a_value_that_is_not_finite_once_is_computed_again_and_trained_on(run_ranks, tmp_path, ranks):
    """Sample 11 is one of step 2, of rank 1: rank 0 has it when it computes that one's samples."""
    clean, _ = trained(run_ranks, tmp_path / "clean", 2, "")
    recipe = lambda rank: _poisoned("blocks.1.mlp", [11] if rank in ranks else [], forward=NAN, times=1)
    events, text = run_of(run_ranks, tmp_path / "a", 2, f"{VALIDATE} --train-iters 4", recipe)
    assert not text and [(one["iteration"], one["verdict"], one["rank"]) for one in events] == [
        (2, "transient", rank) for rank in ranks
    ]
    assert same(clean, _tensors(tmp_path / "a" / "iter_0000004"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flags", ["--micro-batch-size 1", "--tp 2"])
def test_a_value_that_is_never_finite_is_not_the_hardwares_fault(run_ranks, tmp_path, flags):
    recipe = lambda rank: _poisoned("blocks.1.mlp", [11], forward=NAN)
    [event], text = run_of(run_ranks, tmp_path / "stop", 2, f"{VALIDATE} {flags}", recipe)
    other = "tp" not in flags
    assert (event["verdict"], event["level"]) == (
        ("software or data", "info") if other else ("not transient", "warning")
    )
    if other:
        assert "NumericsError: iteration 2: loss nan" in text and "first in the forward pass of blocks.1.mlp" in text
        assert "here and on other ranks, it has the same bits" in text
    else:
        assert "ResumeToDisambiguate: iteration 2: loss nan" in text
    ends = []
    for name, mode in (("with", VALIDATE), ("without", "")):
        run_ranks(2, _pretrain, f"--train-iters 4 --on-nan skip {mode} {flags} --save {tmp_path / name}", 2, recipe(0))
        ends.append(_tensors(tmp_path / name / "iter_0000004"))
    assert same(*ends)


@pytest.mark.sampled(5)
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "fault, then, now, verdict, said",
    [
        (NAN, "--tp 2", "--tp 2 --log-interval 1", "not transient", "NumericsError: iteration 3: loss nan"),
        (NAN, "--tp 2", "--tp 2", "software or data", "NumericsError: iteration 3: loss nan"),
        (None, "--tp 2", "--tp 2", "earlier devices", ""),
        (NAN, "--tp 2", "--pp 2", "not transient", "bits are others"),
        (None, "--tp 2 --batch-invariant-mode", "--pp 2 --batch-invariant-mode", "earlier devices", ""),
        (
            NAN,
            "--tp 2 --batch-invariant-mode",
            "--pp 2 --batch-invariant-mode",
            "software or data",
            "iteration 3: loss",
        ),
    ],
    ids=["same nodes", "data", "device", "other layout", "device, other layout", "data, other layout"],
)
def test_the_next_launch_on_other_nodes_judges(run_ranks, tmp_path, monkeypatch, fault, then, now, verdict, said):
    """Sample 18 is one of step 3. fault: that of the second launch, on other nodes, or on the same ones."""
    flags = f"{VALIDATE} --save-interval 1 --load {tmp_path}"
    spoiled = lambda rank: _poisoned("blocks.1.mlp", [18], forward=NAN)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    [event], text = run_of(run_ranks, tmp_path, 2, f"{flags} {then}", spoiled)
    assert "ResumeToDisambiguate: iteration 3" in text and event["verdict"] == "not transient"
    if "log" not in now:
        monkeypatch.setenv("SLURMD_NODENAME", "n2")
    events, text = run_of(run_ranks, tmp_path, 2, f"{flags} {now}", lambda rank: spoiled(rank) if fault else None)
    assert (events[-1]["verdict"], events[-1]["iteration"]) == (verdict, 3), text
    assert events[-1]["rank_host"] == ("n1" if verdict == "earlier devices" else "")
    assert said in text and bool(text) == bool(said) and not (tmp_path / "rerun.json").exists()


@pytest.mark.sampled(5)
def test_a_spike_in_the_data_stays_a_spike(run_ranks, tmp_path):
    ends = []
    for name, mode in (("with", VALIDATE), ("without", "")):
        flags = f"{SPIKY} --on-spike skip --save {tmp_path / name} {mode}"
        run_ranks(2, _pretrain, flags, 2, _spike())
        ends.append(_tensors(tmp_path / name / "iter_0000044"))
    [event] = [one for one in read_events(tmp_path / "with") if one["event"] == "rerun"]
    assert (event["iteration"], event["verdict"]) == (40, "software or data") and "deviations above" in event["message"]
    assert same(*ends)


def test_overflows_of_fp16_are_no_suspicion(tmp_path):
    _pretrain(0, f"--train-iters 4 --fp16 --initial-loss-scale 1e30 {VALIDATE} --save {tmp_path}")
    assert not [one for one in read_events(tmp_path) if one["event"] == "rerun"]


# ---- report_stats -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", ["report_stats", "report_determinism_stats"])
def test_each_step_is_computed_twice_and_differences_are_counted(run_ranks, tmp_path, mode):
    noise = torch.Generator()
    other = lambda output: output + 1e-3 * torch.rand((), generator=noise)

    def body(rank):
        noise.manual_seed(rank)
        return with_outputs(other if rank == 1 else lambda output: output)

    flags = f"--log-interval 3 --rerun-mode {mode}"
    _, text = run_of(run_ranks, tmp_path / "noise", 2, flags, body)
    notes = _records(tmp_path / "noise", "rerun")
    assert not text and [note["steps"] for note in notes] == [3, 6]
    assert notes[-1]["differing"] == {"0": 6, "1": 6} and 0 < notes[-1]["largest"]["loss"] < 1e-2
    clean, _ = trained(run_ranks, tmp_path / "clean", 2, "")
    found, _ = trained(run_ranks, tmp_path / "twice", 2, flags)
    assert same(clean, found)
    [*_, note] = _records(tmp_path / "twice", "rerun")
    assert note["differing"] == {"0": 0, "1": 0} and note["largest"] == {"loss": 0.0, "gradient norm": 0.0}


# ---- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, words", [("cpu", ""), ("cuda:1", " cuda:1")])
def test_a_disputed_step_names_machine_and_device(device, words):
    mesh = SimpleNamespace(logged_sizes=dict(tp=1), ordered=False)
    context = SimpleNamespace(device=torch.device(device), all_gather_object=lambda one: [one], mesh=mesh)
    step = Rerun._disputed_now(None, SimpleNamespace(context=context), 4, ["nan"])
    assert step.places == [node_name() + words] and (step.iteration, step.layout) == (4, dict(tp=1))


def test_a_gpu_has_to_repeat_to_the_bit():
    config = lambda flags: parse_pretrain(f"{TINY} {flags}".split())
    with pytest.raises(SettingsError, match="--deterministic-mode"):
        build_rerun(config(VALIDATE), Mesh(), torch.device("cuda"))
    assert build_rerun(config(f"{VALIDATE} --deterministic-mode"), Mesh(), torch.device("cuda"))
    assert build_rerun(config("--rerun-mode report_stats"), Mesh(), torch.device("cuda")).reports
    assert build_rerun(config(""), Mesh(), torch.device("cuda")) is None


@pytest.mark.parametrize(
    "dp, tp, cp, ep, etp", [(2, 1, 1, 1, 1), (4, 2, 1, 4, 1), (4, 1, 2, 2, 2), (6, 2, 1, 3, 2), (4, 2, 2, 2, 1)]
)
def test_samples_move_with_whole_groups_of_ranks(dp, tp, cp, ep, etp):
    """The shift against all of them: it is the smallest that maps groups to groups, and no rank's samples to its group."""
    sizes = dict(pp=1, replicate=dp, shard=1, cp=cp, tp=tp)
    moved = lambda rank, places: (rank + places * cp * tp) % (dp * cp * tp)
    groups = [*ranks_along(sizes, ["tp", "cp"]), *ranks_along(expert_sizes(sizes, ep, etp), ["ep", "etp"])]
    known = {tuple(group) for group in groups}
    good = [
        places
        for places in range(1, dp)
        if all(tuple(moved(rank, places) for rank in group) in known - {group} for group in known)
    ]
    assert pure.shift_of(dp, tp * cp, ep * etp) == (good[0] if good else None)


def test_any_bit_of_a_tensor_changes_its_checksum():
    for dtype, size in ((torch.float32, 7), (torch.bfloat16, 5), (torch.int64, 3), (torch.uint8, 11)):
        x = torch.arange(size).to(dtype)
        for at in range(8 * x.nbytes):
            other = x.clone()
            other.view(torch.uint8)[at // 8] ^= 1 << at % 8
            assert words_sum(other) != words_sum(x), (dtype, at)
    nan = torch.tensor([float("nan")])
    assert words_sum(nan) == words_sum(nan.clone()) and words_sum(torch.empty(0)) == 0


def test_records_of_different_work_differ_where_one_ends():
    entry = pure.TrafficEntry(pure.COMPUTED, "x", "")
    short, long = pure.StepRecord([entry], [1]), pure.StepRecord([entry, entry], [1, 1])
    assert pure.first_difference(short, long).at == pure.first_difference(long, short).at == 1
    other = pure.StepRecord([pure.TrafficEntry(pure.SENT, "x", "tp")], [1])
    assert not pure.first_difference(short, other).alike


def test_what_other_samples_change_is_no_part_of_a_ranks_own_record():
    tp, dp = "tp", "dp_cp"
    rows = [
        (pure.COMPUTED, "samples", "alone"),
        (pure.SENT, "all-reduce", tp),
        (pure.RECEIVED, "all-gather", dp),
        (pure.COMPUTED, pure.LOSSES, "alone"),
        (pure.SENT, "all-reduce", tp),
        (pure.COMPUTED, "gradients", "alone"),
    ]
    record = pure.StepRecord([pure.TrafficEntry(*row) for row in rows], range(6)).local()
    assert list(record.sums) == [0, 1, 3, 5]
