# SPDX-License-Identifier: Apache-2.0
"""What a launch finds out by itself, or is told by files: ranks, data, micro-batch, layout."""

import json
import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pretrain_gpt
from megatron.errors import SettingsError, UsageError
from megatron.guard.command import config_of, value_of
from megatron.planner import device as devices
from megatron.planner import target, tuning
from megatron.planner.choose import automatic, with_margin
from megatron.planner.layout import Layout
from megatron.planner.memory import memory_report
from megatron.planner.replan import PP, TP, _layouts, fewer_ranks
from megatron.planner.speed import step
from megatron.settings import rank_env
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import AUTO
from megatron.tools import plan
from megatron.training.rules import check, resolve

GPT = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --lr 1e-3
    --train-iters 3 --eval-iters 1 --device cpu""".split()
TINY = [*GPT, "--mock-data"]


# The environment ------------------------------------------------------------------------------------------------------


def test_ranks_of_an_environment():
    assert rank_env.ranks({}) == rank_env.Ranks(0, 1, 0, None)
    assert rank_env.ranks(dict(RANK="9", WORLD_SIZE="16", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8")) == (
        rank_env.Ranks(9, 16, 1, 8)
    )
    cluster, _ = target.cluster_of(parse_pretrain(TINY), dict(WORLD_SIZE="16", LOCAL_WORLD_SIZE="4"))
    assert (cluster.world_size, cluster.local_size) == (16, 4)


@pytest.mark.parametrize(
    "flags, world, local", [("", 16, 4), ("--local-world-size 2", 16, 2), ("--world-size 32", 32, 4)]
)
def test_flags_count_before_the_environment(flags, world, local):
    here = dict(WORLD_SIZE="16", LOCAL_WORLD_SIZE="4", DEVICE_MEMORY_GB="7")
    cluster, _ = target.cluster_of(parse_pretrain([*TINY, *flags.split()]), here)
    assert (cluster.world_size, cluster.local_size, cluster.device.memory_gb) == (world, local, 7)
    asked = parse_pretrain([*TINY, "--device-memory-gb", "5"])
    assert target.cluster_of(asked, here)[0].device.memory_gb == 5


@pytest.mark.parametrize("flags, gigabytes", [("", 33.0), ("--device-memory-gb 5", 5.0)])
def test_the_memory_of_the_gpu_that_is_here_is_its_own_unless_it_is_given(flags, gigabytes, monkeypatch):
    here = replace(devices.find("H100"), name="this one", memory_gb=33.0)
    monkeypatch.setattr(target, "installed_gpu", lambda: here)
    words = [word for word in TINY if word not in ("--device", "cpu")]
    cluster, source = target.cluster_of(parse_pretrain([*words, *flags.split()]), {})
    assert (cluster.device.name, cluster.device.memory_gb, source) == ("this one", gigabytes, "the GPU of this machine")


def test_a_layout_is_measured_by_its_fastest_step_after_the_first_and_leaves_nothing(monkeypatch):
    """Its run and its process groups end before the next one begins."""
    ends, clock, took = [], [0.0], iter((1.0, 3.0, 2.0, 4.0))  # the first one may be short, too
    mesh = SimpleNamespace(release=lambda: ends.append("groups"))
    run = SimpleNamespace(
        stages=[], pending=SimpleNamespace(), close=lambda: ends.append("run"), context=SimpleNamespace(mesh=mesh)
    )
    monkeypatch.setattr(tuning, "build_run", lambda config, recipe: run)
    monkeypatch.setattr(tuning, "train_step", lambda run: clock.append(clock[-1] + next(took)))
    monkeypatch.setattr(tuning, "_broadcast", lambda seconds, context: seconds)
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: clock[-1])
    assert tuning._seconds_of_a_step(None, None, 3) == 2.0 and ends == ["run", "groups"]


def test_the_fastest_for_a_sample_is_first_whatever_its_batch(monkeypatch):
    """4 s for 8 samples are less than 3 s for 4; of equal ones the one that was predicted to be faster."""
    layouts = [(Layout(dp=1, micro_batch_size=size), batch) for size, batch in ((1, 4), (2, 8), (4, 16))]
    took = iter((3.0, 4.0, 8.0))
    monkeypatch.setattr(tuning, "in_layout", lambda config, *_: config)
    for name in ("_quiet", "_lasting"):
        monkeypatch.setattr(tuning, name, lambda config: config)
    monkeypatch.setattr(tuning, "resolve", lambda config, world: config)
    monkeypatch.setattr(tuning, "chosen_flags", lambda *_: "")
    monkeypatch.setattr(tuning, "_seconds_of_a_step", lambda *_: next(took))
    config, context = (
        SimpleNamespace(planner=SimpleNamespace(tune_steps=3)),
        SimpleNamespace(mesh=SimpleNamespace(world_size=1)),
    )
    assert tuning._timed(config, None, layouts, context, lambda line: None) == [layouts[1], layouts[2], layouts[0]]


@pytest.mark.parametrize("steps", [2, 5])
@pytest.mark.parametrize("own", [1, 3, 9])
def test_a_training_that_is_measured_lasts_as_long(steps, own):
    """A first step, and those that are timed; a longer one stays as it is."""
    words = [word for word in TINY if word not in ("--train-iters", "3")]
    more = f"--global-batch-size 4 --tune-steps {steps}".split()
    counted = tuning._lasting(parse_pretrain([*words, "--train-iters", str(own), *more])).batch
    assert counted.train_iters == max(own, steps + 1)
    samples = tuning._lasting(parse_pretrain([*words, "--train-samples", str(4 * own), *more])).batch
    assert samples.train_samples == 4 * max(own, steps + 1) and samples.train_iters is None


@pytest.mark.parametrize("most, ranks", [(None, 6), (7, 6), (6, 6), (5, 4), (3, 3), (9, 6)])
def test_a_job_goes_on_with_as_many_ranks_as_there_are_devices_for(most, ranks):
    """The most that divide its batch, below those that it had."""
    job = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *TINY]
    found, words = fewer_ranks([*job, *"--global-batch-size 24 --micro-batch-size 1".split()], 8, 1, most)
    assert found == ranks and any(re.fullmatch(rf"(--nproc-per-node[= ])?{ranks}", word) for word in words)


def test_the_reasons_of_the_largest_number_of_ranks_are_told():
    job = ["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *TINY, "--global-batch-size", "32"]
    with pytest.raises(SettingsError) as refused:
        fewer_ranks([*job, "--micro-batch-size", "1"], 8, 5)
    assert "on 5 to 7 ranks" in refused.value.what and "x data parallel size 7 = 7" in refused.value.why
    assert "data parallel size 5" not in refused.value.why


def test_smaller_layouts_are_tried_from_the_largest_on():
    """More ranks that share the model first, and of as many those of a node; what divides stages goes with their number."""
    words = ["torchrun", "--nproc-per-node", "16", "pretrain_gpt.py", *TINY]
    words += [*"--tp 4 --pp 4 --num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24".split()]
    config, kept = parse_pretrain(words[4:]), "--num-virtual-stages-per-pipeline-rank"
    tried = [(int(value_of(one, TP)), int(value_of(one, PP)), kept in one) for one in _layouts(words, config, 12)]
    assert tried == [
        *((4, 3, False), (3, 4, True)),
        *((3, 2, False), (2, 3, False)),
        *((4, 1, False), (2, 2, False), (1, 4, True)),
        *((3, 1, False), (1, 3, False)),
        *((2, 1, False), (1, 2, False)),
        (1, 1, False),
    ]


@pytest.mark.parametrize(
    "name, value",
    [("RANK", "one"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "8x")],
)
def test_every_reader_refuses_a_number_that_is_none(name, value, monkeypatch):
    from megatron.mpu import initialize
    from megatron.planner.preflight.run import preflight

    config, env = parse_pretrain(TINY), {name: value}
    monkeypatch.setenv(name, value)
    for read in (
        lambda: target.cluster_of(config, env),
        lambda: preflight(config, pretrain_gpt.recipe(), env=env),
        lambda: initialize.join_job(config.parallel, config.kernels),
        lambda: pretrain_gpt.main(TINY),
    ):
        with pytest.raises(SettingsError, match=f"{name}={value} in the environment is not a number") as caught:
            read()
        assert "unset" in str(caught.value)


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, said",
    [
        ("0.5 a x b", "--data-path: 'x' stands where a weight should"),
        ("a 0.5", "--data-path a 0.5: these are neither pairs"),
        ("-1 a", "--data-path: weight -1 of a"),
    ],
)
def test_a_malformed_blend_is_told_with_everything_else(words, said):
    line = [
        *GPT,
        "--data-path",
        *words.split(),
        "--tokenizer-type",
        "NullTokenizer",
        "--hidden-dropout",
        "2",
        "--tokenizer-model",
        "gone.json",
        "--valid-data-path",
        "1e0",
        "gone.bin",
    ]
    with pytest.raises(SettingsError) as caught:
        pretrain_gpt.main([*line, "--dry-run", "--world-size", "1"])
    for part in (said, "--hidden-dropout", "there is no gone.json", "there is no gone.idx and no gone.bin"):
        assert str(caught.value).count(part) == 1, str(caught.value)


# --micro-batch-size auto ----------------------------------------------------------------------------------------------

GPT_1B = """--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --vocab-size 50304 --mock-data
    --lr 1e-4 --bf16 --device-name A100-40GB"""


def by_hand(config, world, sizes):
    """{micro-batch: seconds of a step, None where it does not fit} of settings that say each of them."""
    found = {}
    cluster = with_margin(config, target.cluster_of(config)[0])
    for size in sizes:
        told = replace(config, batch=replace(config.batch, micro_batch_size=size))
        if not check(told, world):
            told = resolve(told, world)
            layout = Layout.of(told, world)
            job, _ = target.job_of(told, cluster, layout.dp)
            fits = all(
                memory_report(job, layout, cluster.device, n).total <= cluster.device.usable_bytes
                for n in range(layout.pp)
            )
            found[size] = step(job, layout, cluster).seconds if fits else None
    return found


@pytest.mark.parametrize(
    "world, words, sizes, chosen",
    [
        (8, "--global-batch-size 96", [1, 2, 3, 4, 6, 12], 2),
        (8, "--global-batch-size 96 --recompute-granularity full --sharding-stage 1", [1, 2, 3, 4, 6, 12], None),
        (
            4,
            "--global-batch-size 48 --pp 4 --decoder-first-pipeline-num-layers 3 --recompute-granularity full "
            "--recompute-method block --recompute-num-layers 2",
            [1, 2, 3, 4, 6, 8, 12, 16, 24, 48],
            None,
        ),
        (2, "--global-batch-size 96 --rampup-batch-size 24 12 1000 --recompute-activations", [1, 2, 3, 6], None),
    ],
)
def test_the_fastest_micro_batch_that_fits_is_chosen(world, words, sizes, chosen):
    length = "--train-samples 10000" if "rampup" in words else "--train-iters 10"
    told = []
    config = parse_pretrain(f"{GPT_1B} {length} {words} --world-size {world} --micro-batch-size auto".split())
    found, plans, outcome = automatic(config, told.append)
    expected = by_hand(config, world, range(1, 97))
    assert list(expected) == sizes
    fast = {size: seconds for size, seconds in expected.items() if seconds}
    assert found == replace(config, batch=replace(config.batch, micro_batch_size=min(fast, key=fast.get)))
    assert chosen in (None, found.batch.micro_batch_size) and resolve(found, world)
    assert {plan.layout.micro_batch_size: plan.step.seconds for plan in plans} == pytest.approx(fast)
    assert {one.layout.micro_batch_size for one in outcome.searched.rejected} == set(expected) - set(fast)
    reasons = " ".join(told)
    assert f"--micro-batch-size auto: {found.batch.micro_batch_size} is expected" in told[0] and len(told) == 3
    assert ("out of memory by" in reasons) == (len(fast) < len(expected)) and "GB" in told[2]


def test_a_schedule_in_a_file_says_how_many_micro_batches_there_are(tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2\n")
    line = (
        f"{' '.join(TINY)} --pp 2 --world-size 2 --pipeline-schedule {own} --micro-batch-size auto --global-batch-size"
    )
    assert automatic(parse_pretrain(f"{line} 12".split()), print)[0].batch.micro_batch_size == 4
    with pytest.raises(SettingsError, match="no size gives 3 micro-batches of 8 samples"):
        automatic(parse_pretrain(f"{line} 8".split()), print)


def test_other_words_for_the_batch():
    line = f"{' '.join(TINY)} --micro-batch-size auto --world-size 2"
    for words in ("--local-batch-size 12 --accumulate-steps 3", "--global-batch-size 24 --accumulate-steps 3"):
        found = automatic(parse_pretrain(f"{line} {words}".split()), print)[0]
        assert (found.batch.micro_batch_size, resolve(found, 2).batch.global_batch_size) == (4, 24)


@pytest.mark.parametrize(
    "words, said",
    [
        ("", ["needs --global-batch-size"]),
        ("--hidden-dropout 2", ["needs --global-batch-size", "--hidden-dropout 2"]),
        ("--global-batch-size 8 --max-global-batch-size 8", ["give one of them"]),
        ("--global-batch-size 8 --gradient-accumulation-steps 3", ["no size gives 3 micro-batches of 8"]),
        ("--global-batch-size 7 --world-size 2", ["--global-batch-size 7 is not a multiple"]),
        ("--max-global-batch-size 3 --world-size 4", ["no size gives 1 micro-batch of 0 samples"]),
        ("--global-batch-size 8 --device-memory-gb 0.1", ["out of memory by"]),
    ],
)
def test_what_keeps_a_micro_batch_from_being_chosen(words, said):
    line = [*TINY, "--micro-batch-size", "auto", *words.split()]
    for more in (["--dry-run"], ["--preflight"], []):
        with pytest.raises(SettingsError) as caught:
            if more:
                pretrain_gpt.main([*line, *more])
            else:
                automatic(parse_pretrain(line), print)
        assert all(part in str(caught.value) for part in said), str(caught.value)


@pytest.mark.sampled(2)
def test_auto_is_no_number_where_nothing_chooses_and_no_search_of_its_own(capsys):
    line = [*TINY, "--micro-batch-size", "auto", "--global-batch-size", "8"]
    with pytest.raises(SettingsError, match="nothing chooses it here; give a number"):
        resolve(parse_pretrain(line), 1)
    for flag in ("--micro-batch-size", "--save-interval"):
        with pytest.raises(UsageError, match=f"{flag} '-1' is no value for it; say auto"):
            parse_pretrain([*TINY, flag, "-1"])
    with pytest.raises(UsageError, match="--micro-batch-size auto and --batch-size 4 contradict"):
        parse_pretrain([*line, "--batch-size", "4"])
    assert fewer_ranks(["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *line], 4, 1)[0] == 2
    plan.main([*line, "--world-size", "1"])  # which searches the micro-batch among all else
    command = capsys.readouterr().out.partition("python pretrain_gpt.py")[2].replace("\\\n", " ")
    assert parse_pretrain(shlex.split(command)).batch.micro_batch_size not in (1, AUTO)


@pytest.mark.sampled(10)
def test_a_micro_batch_is_measured_trained_with_and_kept_in_the_record(tmp_path, capfd, run_ranks):
    line = [*TINY, "--micro-batch-size", "auto", "--global-batch-size", "8", "--tp", "2", "--log-interval", "1"]

    def body(rank):
        pretrain_gpt.main([*line, "--tune-steps", "1", "--save", str(tmp_path), "--save-interval", "3"])
        pretrain_gpt.main([*line, "--load", str(tmp_path), "--train-iters", "4"])
        return True

    assert run_ranks(2, body, timeout=250) == [True, True]
    told = capfd.readouterr().out
    for words in (
        "--micro-batch-size auto: 8 is expected",
        "measuring the best 3",
        "tp2, micro-batch 2,",
        "chosen on 2",
        "iteration        3/       3",
        "iteration        4/       4",
    ):
        assert words in told
    state = json.loads((tmp_path / "iter_0000003" / "state.json").read_text())
    assert state["config"]["batch"]["micro_batch_size"] in (2, 4, 8)


# --parallel-plan ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory):
    """The best of plans with tp 2, two data parallel ranks and a ZeRO stage, for four ranks."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan.main(
        [
            *TINY,
            "--world-size",
            "4",
            "--tp",
            "2",
            "--pp",
            "1",
            "--zero-stage",
            "1",
            "--max-global-batch-size",
            "12",
            "--emit",
            str(path),
        ]
    )
    return path


def test_a_plan_of_a_file_is_the_layout_that_its_flags_ask_for(plan_file, capsys):
    config = parse_pretrain([*TINY, "--parallel-plan", str(plan_file), "--seed", "7"])
    best = json.loads(plan_file.read_text())["plans"][0]
    said = parse_pretrain([*TINY, "--seed", "7", *best["flags"], "--global-batch-size", str(best["global_batch"])])
    assert resolve(config, 4) == replace(resolve(said, 4), planner=config.planner)
    p = config.parallel
    assert (p.tensor_model_parallel_size, p.sharding_stage, p.data_parallel_size) == (2, 1, 2)
    script = [*TINY, "--tp", "4", "--use-recompute", "--then", "--parallel-plan", str(plan_file), "--seed", "7"]
    assert parse_pretrain(script) == config
    pretrain_gpt.main([*TINY, "--parallel-plan", str(plan_file), "--dry-run", "--world-size", "4", "--tp", "2"])
    assert (
        best["layout"].startswith("tp2") and "pipeline 1 x data 2 (shared by 2) x tensor 2" in capsys.readouterr().out
    )
    job = ["torchrun", "--nproc-per-node", "4", "pretrain_gpt.py", *TINY, "--parallel-plan", str(plan_file)]
    ranks, words = fewer_ranks(job, 4, 1)  # the plan is for all of them: its flags say what is left of it
    assert ranks == 2 and "--parallel-plan" not in words and resolve(config_of(words), ranks)


def test_a_command_line_that_is_read_for_a_launcher_prints_no_notes(capsys):
    """The job prints them: a launcher that says them again would say everything twice."""
    words = [*TINY, "--lr-decay-style", "cosine", "--lr-decay-style", "linear"]
    parse_pretrain(words)
    assert "note: " in capsys.readouterr().err
    assert (
        config_of(["torchrun", "--nproc-per-node", "2", "pretrain_gpt.py", *words]).optimizer.lr_decay_style == "linear"
    )
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "words, said",
    [
        ("--tp 1", "--tp 1 contradicts --parallel-plan FILE, where tensor_model_parallel_size is 2"),
        (
            "--use-recompute",
            "--use-recompute contradicts --parallel-plan FILE, where recompute_granularity is not given",
        ),
        (
            "--micro-batch-size auto",
            "--micro-batch-size auto contradicts --parallel-plan FILE, where micro_batch_size is",
        ),
        ("--auto-parallel", "--auto-parallel searches a layout, and --parallel-plan FILE gives one"),
        ("--num-layers 8", "--parallel-plan FILE is for another model: num_layers is 4 there, 8 here"),
        ("--num-attention-heads 0", "num_attention_heads is 4 there, 0 here"),
        ("--ffn-hidden-size 64", "--parallel-plan FILE is for another model: ffn_hidden_size is 128 there, 64 here"),
        ("--world-size 6", "--parallel-plan FILE is for 4 ranks (tensor 2 x pipeline 1 x data 2), and here are 6"),
        ("--world-size 3", "--parallel-plan FILE is for 4 ranks (tensor 2 x pipeline 1 x data 2), and here are 3"),
    ],
)
def test_a_plan_that_is_not_for_this_training(plan_file, words, said):
    line = [*TINY, "--world-size", "4", "--parallel-plan", str(plan_file), "--dry-run", *words.split()]
    with pytest.raises((SettingsError, UsageError)) as caught:
        pretrain_gpt.main(line)
    assert said.replace("FILE", str(plan_file)) in str(caught.value)


def test_a_file_that_is_no_plan(plan_file, tmp_path):
    record = json.loads(plan_file.read_text())
    other = tmp_path / "other.json"

    def with_settings(**settings):
        return json.dumps(record | dict(plans=[dict(settings=settings)]))

    for text, said in (
        (None, "No such file"),
        ("tp: 2", "not JSON"),
        ("[]", "it contains no plan"),
        ('{"plans": []}', "it contains no plan"),
        (with_settings(lr=1), "lr is no setting of a layout"),
        (with_settings(micro_batch_size="x"), "micro_batch_size 'x' is not a whole number"),
    ):
        if text:
            other.write_text(text)
        with pytest.raises(UsageError, match=said):
            parse_pretrain([*TINY, "--parallel-plan", str(other)])


@pytest.mark.sampled(2)
def test_a_file_of_settings_gives_way_to_a_plan_and_ranks_train_in_it(plan_file, tmp_path, capfd, run_ranks):
    (tmp_path / "run.yaml").write_text("tensor_model_parallel_size: 4\nlr: 2e-3\n")
    line = [*TINY[:-1], "--mock-data", "--config", str(tmp_path / "run.yaml"), "--parallel-plan", str(plan_file)]

    def body(rank):
        pretrain_gpt.main(line)
        return True

    assert parse_pretrain(line).parallel.tensor_model_parallel_size == 2
    assert run_ranks(4, body, timeout=120) == [True] * 4
    assert "data-parallel size: 2, tensor-model-parallel size: 2" in capfd.readouterr().out


def test_a_dry_run_compares_the_settings_with_those_of_the_checkpoint(tmp_path):
    """A real resume would refuse them, after the ranks have been paid for."""
    command = (
        "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 31 --lr 1e-3 --device cpu"
    )
    pretrain_gpt.main(f"--num-layers 1 {command} --train-iters 1 --save {tmp_path} --eval-iters 0".split())
    again = f"{command} --train-iters 2 --load {tmp_path} --dry-run"
    pretrain_gpt.main(f"--num-layers 1 {again}".split())
    with pytest.raises(SettingsError, match="--num-layers: 1 in the checkpoint, 2 now"):
        pretrain_gpt.main(f"--num-layers 2 {again}".split())
