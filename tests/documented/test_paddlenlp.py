# SPDX-License-Identifier: Apache-2.0
"""System A's training command, word for word as it is printed."""

import itertools

import pytest

from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.settings.parse import parse_pretrain
from megatron.tools import generate
from megatron.training.rules import check, resolve


def test_the_whole_training_command_is_read(calls, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_CACHE", "/nowhere")
    [words] = calls("A_train.sh", task_name="gpt3")
    own = words[words.index("run_pretrain_static.py") + 1 :]
    assert {"4--mp_degree", "0.01--warmup_rate", "1--eval_freq"} <= set(own)  # lines end in a backslash without a blank
    [said] = check(parse_pretrain(own), 8)  # they know the vocabulary by the name gpt2-en
    assert said.startswith("no vocabulary is given; --vocab-file vocab.json --merge-file merges.txt")
    assert said.endswith("or put vocab.json and merges.txt into /nowhere/gpt2-en")
    capsys.readouterr()
    config = parse_pretrain([*own, "--vocab-file", "vocab.json", "--merge-file", "merges.txt"])
    p, b, o, k = config.parallel, config.batch, config.optimizer, config.checkpoint
    assert (p.sharding_degree, p.tensor_model_parallel_size, p.dp_degree, p.sharding_stage) == (4, 2, 1, 1)
    assert (b.micro_batch_size, b.global_batch_size, b.train_iters, b.eval_interval) == (8, 32, 500000, 10000)
    assert (o.lr, o.min_lr, o.lr_decay_iters, o.weight_decay, o.lr_warmup_fraction) == (15e-5, 1e-5, 320000, 0.01, 0.01)
    assert (o.clip_grad, config.logging.log_interval) == (1.0, 1)
    assert (k.save, k.save_interval, config.data.data_path) == ("output/gpt3", 100000, ["./data"])
    assert (config.model.num_layers, config.model.seq_length, config.model.model_type) == (12, 1024, "GPT")
    assert (config.precision.precision, config.precision.amp_level) == ("fp16", "O1")
    assert config.precision.initial_loss_scale == 32768
    assert config.recompute.recompute_granularity == "full"
    assert config.kernels.device == "cuda" and check(config, 8) == []
    assert resolve(config, 8).parallel.data_parallel_size == 4
    told = capsys.readouterr().err
    for first, second in (("4", "--mp_degree"), ("0.01", "--warmup_rate"), ("1", "--eval_freq")):
        assert "note: --decay-steps without --lr-decay-style: linear, as in Megatron-LM; PaddleNLP's is cosine" in told
        assert f"note: '{first}{second}' is read as {first} and {second}: the line before lacks a space" in told


TINY = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
# switch -> (what it sets, off, on)
SWITCHES = {
    "use_amp": (lambda c: (c.precision.precision, c.precision.amp_level), ("fp32", "O2"), ("fp16", "O1")),
    "use_recompute": (lambda c: c.recompute.recompute_granularity, None, "full"),
    "use_sharding": (lambda c: c.parallel.sharding_stage, 0, 1),
    "check_accuracy": (lambda c: (c.model.hidden_dropout, c.model.attention_dropout), (0.1, 0.1), (0, 0)),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_in_every_order(name):
    """Of the words for a switch the last one counts, whatever stands before it or between them."""
    seen, off, on = SWITCHES[name]
    words = {"": True, "true": True, "True": True, "1": True, "false": False, "False": False, "no": False, "0": False}
    assert seen(parse_pretrain(TINY)) == off
    others = [f"--{other}" for other in SWITCHES if other != name]
    for first, last in itertools.product(words, words):
        for between in ([], others, [f"{others[0]}=false"]):
            given = [*TINY, f"--{name}", *first.split(), *between, f"--{name.replace('_', '-')}", *last.split()]
            assert seen(parse_pretrain(given)) == (on if words[last] else off), given


# a switch that is off, and a neighbour that would say otherwise
OFF = [
    ("use_amp", "--fp16"),
    ("use_amp", "--precision bf16"),
    ("use_recompute", "--recompute_granularity core_attn"),
    ("use_sharding", "--sharding_stage 2"),
]


@pytest.mark.parametrize("name, neighbour", OFF)
def test_a_switch_that_is_off_decides_in_every_order(name, neighbour, capsys, tmp_path):
    seen, off, _ = SWITCHES[name]
    for words in itertools.permutations([f"--{name} false", neighbour]):
        assert seen(parse_pretrain([*TINY, *" ".join(words).split()])) == off, words
        shown = neighbour.replace("_", "-", 1)
        assert f"{shown} has no effect: overridden by --{name.replace('_', '-')} false" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_text(f"{name}: false\n")
    over_a_file = parse_pretrain([*TINY, "-c", str(tmp_path / "run.yaml"), *neighbour.split()])
    assert seen(over_a_file) != off  # another source counts


def test_the_neighbour_of_a_switch_that_is_on_counts():
    for words in itertools.permutations(["--use_sharding false", "--use_sharding true", "--sharding_stage 2"]):
        on = words.index("--use_sharding true") > words.index("--use_sharding false")
        assert parse_pretrain([*TINY, *" ".join(words).split()]).parallel.sharding_stage == (2 if on else 0), words


PROFILED = [
    ("batch_range=[1,2]", (1, 2, None, False), None),
    ("batch_range=[50, 60]; profile_path=model.profile", (50, 60, "model.profile", False), None),
    ("batch_range=[1,2];tracer_option=OpDetail;exit_on_finished=true;state=GPU", (1, 2, None, True), 2),
    ("profile_path=x", (10, 20, "x", False), None),
]


@pytest.mark.parametrize("flag", ("-p", "--profiler_options"))
@pytest.mark.parametrize("options, seen, ends", PROFILED)
def test_options_of_the_profiler(flag, options, seen, ends, capsys):
    config = parse_pretrain([*TINY, flag, options])
    p = config.profiling
    assert p.profile and (p.profile_step_start, p.profile_step_end, p.profile_dir, p.profile_detailed) == seen
    assert config.batch.exit_interval == ends
    assert config.statements["profile"].origin == flag.replace("_", "-") and config.given("profile")
    assert ("state=GPU has no effect" in capsys.readouterr().err) == ("state" in options)


@pytest.mark.parametrize(
    "options, words",
    [
        ("batch_rang=[1,2]", "'batch_rang' is no option of the profiler"),
        ("tracer_option=Some", "tracer_option=Some: there is Default, OpDetail, AllOpDetail"),
        ("batch_range=[1]", "batch_range=[1]: the first step and the one to end before"),
        ("batch_range=often", "batch_range=often: the first step"),
    ],
)
def test_options_that_the_profiler_does_not_know(options, words):
    with pytest.raises(UsageError) as refused:
        parse_pretrain([*TINY, "--profiler_options", options])
    assert f"--profiler-options {words}" in str(refused.value)


LAUNCH, TRAIN = "python -m paddle.distributed.launch", "run_pretrain.py --max_lr 1e-4"


@pytest.mark.parametrize(
    "words, start, told",
    [
        (f"{LAUNCH} --gpus 2,3 --devices 0,1 {TRAIN}", "torchrun --nproc-per-node 2 pre", "--devices 0,1 overrides it"),
        (f"{LAUNCH} --gpus 2,3 --devices 4,5 {TRAIN}", "CUDA_VISIBLE_DEVICES=4,5 torchrun --nproc-per-node 2 pre", ""),
        (f"{LAUNCH} --gpus 2,3 --nproc_per_node 4 {TRAIN}", "torchrun --nproc-per-node 4", "these are 2 devices"),
        (f"python {TRAIN} --sharding_stage 2 --use_sharding false", "python pre", "--use_sharding false says another"),
        ("python run_eval.py --model_name gpt2-en", "", "python -m megatron.tools.evaluate --load DIR"),
        ("python run_generation.py --top_k 3", "", "python -m megatron.tools.generate --load DIR"),
    ],
)
def test_what_translate_makes_of_devices_switches_and_other_commands(words, start, told, capsys):
    from megatron.tools import translate

    translate.main(["--from", "paddlenlp", words])
    out = capsys.readouterr().out
    assert told in out and f"\n{start}" in f"\n{out}"
    assert "use_sharding" not in words or "--sharding-stage 0" in out


@pytest.mark.parametrize(
    "flag, instead",
    [
        ("init_checkpoint_path", "load"),
        ("max_length", "tokens-to-generate"),
        ("early_stopping", "num-beams"),
        ("model_name", "model-name-or-path"),
    ],
)
def test_words_of_the_other_commands_have_a_hint(flag, instead):
    from megatron.inference.sampling import Sampling, Search
    from megatron.settings.parse import parse
    from megatron.tools.generate import GenerateOptions

    with pytest.raises(UsageError, match=f"(did you mean|say) --{instead}"):
        parse([f"--{flag}", "x"], dict(generate=GenerateOptions, sampling=Sampling, search=Search))


@pytest.mark.parametrize("flag", ["to_static", "continue_training"])
def test_what_is_not_there_may_be_switched_off(flag, capsys):
    shape = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
    for no in ("false", "0"):
        parse_pretrain([*shape, f"--{flag}", no])
        assert f"--{flag.replace('_', '-')} has no effect: it asks for nothing" in capsys.readouterr().err
    with pytest.raises(UsageError, match="is not supported"):
        parse_pretrain([*shape, f"--{flag}", "true"])


@pytest.mark.parametrize("words, name, value", [
    ("--mp_degree 2", "tensor_model_parallel_size", 2),
    ("--max_seq_len 12", "seq_length", 12),
    ("--micro-batch-size 4", "micro_batch_size", 4),
    ("--fp16 --bf16 false", "precision", "fp16"),
])  # fmt: skip
def test_a_setting_of_another_command_has_all_of_its_spellings(words, name, value):
    from megatron.settings.parse import parse
    from megatron.tools.evaluate import EvaluateOptions

    made = parse(["--load", "x", *words.split()], dict(evaluate=EvaluateOptions))
    assert getattr(made["evaluate"], name) == value


def test_an_evaluation_without_its_task_names_the_file():
    from megatron.tools import evaluate

    with pytest.raises(UsageError, match="--eval-path x needs --task: WIKITEXT103"):
        evaluate.main(["--load", "y", "--eval_path", "x"])


SAME_SOURCE = [
    (
        "--check_accuracy true --hidden_dropout_prob 0.3",
        (0.3, 0),
        "--check-accuracy true is no dropout, and gives way to --hidden-dropout-prob 0.3",
    ),
    (
        "--attention_dropout 0.2 --check_accuracy true",
        (0, 0.2),
        "--check-accuracy true is no dropout, and gives way to --attention-dropout 0.2",
    ),
    ("--check_accuracy false --hidden_dropout_prob 0.3", (0.3, 0.1), ""),
    ("--use_amp true --bf16", (0.1, 0.1), "--use-amp true is fp16, and gives way to --bf16"),
    ("--bf16 --use_amp true", (0.1, 0.1), "--use-amp true is fp16, and gives way to --bf16"),
    ("--use_amp true --amp_level O2", (0.1, 0.1), ""),
    (
        "--max_lr 1 --lr_decay_style none --warmup_rate 0.1 --decay_steps 9",
        (0.1, 0.1),
        "--warmup-rate with --lr-decay-style none warms up",
    ),
    ("--lr_decay_style cosine --warmup_rate 0.1 --decay_steps 9", (0.1, 0.1), ""),
    ("--model_type gpt-cn", (0.1, 0.1), "the vocabulary of gpt-cn is --tokenizer-type GPTChineseTokenizer"),
    ("--model_type gpt-cn --tokenizer_model x", (0.1, 0.1), ""),
]


@pytest.mark.parametrize("line, dropouts, told", SAME_SOURCE)
def test_words_that_decide_about_others_say_so(line, dropouts, told, capsys):
    config = parse_pretrain([*TINY, *line.split()])
    assert (config.model.hidden_dropout, config.model.attention_dropout) == dropouts
    err = capsys.readouterr().err
    assert told in err and (told or not err)
    assert "bf16" not in line or (config.precision.precision, config.precision.amp_level) == ("bf16", "O1")


def test_one_number_of_ranks_for_all_that_need_some():
    """World = mp x pp x sharding x dp, as PaddleNLP has it."""
    words = "--mp_degree 2 --sharding_degree 4 --use_sharding true --dp_degree 1 --global_batch_size 32"
    [said] = [one for one in check(parse_pretrain([*TINY, *words.split()]), 1) if "rank" in one]
    assert said.startswith("--mp-degree 2 x --sharding-degree 4: 8 ranks are needed") and "--nproc-per-node 8" in said


def test_messages_have_the_words_that_were_given():
    said = check(parse_pretrain([*TINY, "--save_steps", "5"]), 1)
    assert "--save-steps needs --save: there is no folder to save into" in said
    config = parse_pretrain([*TINY, "--micro-batch-size", "2", "-o", "Global.local_batch_size=3"])
    [said] = [one for one in check(config, 1) if "multiple" in one]
    assert said.startswith(
        "--local-batch-size 3 (-o Global.local_batch_size) is not a multiple of --micro-batch-size 2;"
    )


def test_an_empty_file_is_named(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("\n")
    parse_pretrain([*TINY, "-c", str(tmp_path / "run.yaml")])
    assert f"note: {tmp_path}/run.yaml is empty: it sets nothing" in capsys.readouterr().err


def generated(words: str):
    from tests.documented.test_fleetx_words import Read

    return Read("generate", words.split())


@pytest.mark.parametrize("strategy, greedy", [("greedy_search", True), ("sampling", False)])
def test_generation_takes_paddlenlps_words(strategy, greedy):
    """Those of its run_generation.py."""
    fused = "--fuse_transformer --fuse_mt true --fuse_qkv --fuse_attention_qkv true"
    found = generated(f"--model_name_or_path DIR --decode_strategy {strategy} {fused}")
    assert found.problems == [] and (found.values["load"], found.values["greedy"]) == ("DIR", greedy)
    assert [word for word in found.told if "fuse" in word] == fused.replace("_", "-").replace(" true", "").split()


def test_a_search_by_beams(capsys):
    found = generated("--model_dir DIR --decode_strategy beam_search --num_beams 4")
    assert found.problems == [] and (found.values["greedy"], found.values["num_beams"]) == (False, 4)
    for words in ("", "--num_beams 1", "--greedy --num_beams 1 --then"):
        with pytest.raises(SettingsError, match="--decode-strategy beam_search: over how many beams"):
            generate.main(f"--load DIR --prompt x {words} --decode_strategy beam_search".split())
    for more, told in (("", True), ("--length_penalty 0.5", False)):
        with pytest.raises(CheckpointError):
            generate.main(f"--load /nowhere --prompt x --decode_strategy beam_search --num_beams 2 {more}".split())
        assert ("note: --length-penalty is 1: scores are means" in capsys.readouterr().err) == told
    assert "none of true, false, greedy_search, sampling" in generated("--decode_strategy diverse").problems[0]
    assert generated("--model_dir DIR --mp_degree 2").values["tensor_model_parallel_size"] == 2
