# SPDX-License-Identifier: Apache-2.0
"""Every number of pretraining's settings, given as 0 and as -1: refused in the words that were typed, or documented."""

import pytest

import preprocess_data
import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.errors import Failure, SettingsError, UsageError
from megatron.settings.parse import parse, parse_pretrain
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import spellings_of
from megatron.tools.benchmark_inference import BenchmarkOptions
from megatron.training.rules import check, resolve

BASE = dict(num_layers=4, hidden_size=64, num_attention_heads=8, seq_length=32, vocab_size=100, train_iters=10, lr=1e-3)
MODELS = dict(gpt=pretrain_gpt, t5=pretrain_t5, bert=pretrain_bert)
ANY = {"stop_at_loss", "glu_linear_offset"}  # their help says that they may be any number


def found(model, flag, value):
    """(everything that is said against `flag value`, its setting)."""
    recipe = MODELS[model].recipe()
    spelling = spellings_of(GROUPS | dict(recipe.setting_groups))[flag]
    words = [f"--{name.replace('_', '-')}={n}" for name, n in BASE.items() if name != spelling.setting.name]
    words += "--mock-data --save x --load x".split()
    try:
        defaults = {"model_type": recipe.model_type, **recipe.defaults}
        config = parse_pretrain([*words, flag, value], recipe.setting_groups, "", defaults)
        return check(recipe.normalize_config(config), 1), spelling.setting
    except Failure as error:
        return [str(error)], spelling.setting


def numbers(model):
    recipe = MODELS[model].recipe()
    own = set(recipe.setting_groups)
    return [
        flag
        for flag, spelling in spellings_of(GROUPS | dict(recipe.setting_groups)).items()
        if spelling.setting.kind in (int, float) and spelling.implies is None and not spelling.setting.many
        if model == "gpt" or spelling.setting.group in own
    ]


@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize("model", MODELS)
def test_a_number_is_refused_as_it_was_typed_or_has_a_documented_meaning(model, value):
    flags = numbers(model)
    assert len(flags) > (100 if model == "gpt" else 1)
    for flag in flags:
        said, setting = found(model, flag, value)
        if said:
            assert len(said) == 1 and f"{flag} " in f"{said[0]} ", (flag, value, said)
        elif setting.name not in ANY:
            means = setting.default == 0 or "0" in setting.help.replace("100", "").replace("0.1 x", "")
            assert value == "0" and means, (flag, value, setting.help)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--max_seq_len 0", "--max-seq-len 0 must be at least 1"),
        ("--init-method-std 0", "--init-method-std 0.0 must be above 0"),
        ("--max_steps 0", "--max-steps 0 trains nothing: give at least 1, or --skip-train, which evaluates alone"),
        ("--profile --profile-step-start 0", "--profile-step-start 0 must be at least 1"),
        ("--tp 0 --data-parallel-size 3 --num-query-groups 5", "--tp 0 must be at least 1"),
        ("--iterations-to-skip 3 0", "--iterations-to-skip 3 0: iterations are counted from 1"),
    ],
)
def test_one_mistake_is_one_sentence(line, words):
    settings = {name: n for name, n in BASE.items() if name not in ("seq_length", "train_iters")}
    flags = [f"--{name.replace('_', '-')}={n}" for name, n in settings.items()]
    flags += [] if "max_seq" in line else ["--seq-length=32", "--max-position-embeddings=32"]
    flags += [] if "max_steps" in line else ["--train-iters=10"]
    config = parse_pretrain([*flags, "--mock-data", *line.split()])
    assert check(config, 1) == [words]


def test_no_steps_where_nothing_is_trained():
    words = [f"--{name.replace('_', '-')}={n}" for name, n in BASE.items()]
    words += "--mock-data --train-iters 0 --skip-train".split()
    assert resolve(parse_pretrain(words), 1).batch.train_iters == 0


@pytest.mark.parametrize("words", ["0,0,0", "0"])
def test_a_split_of_nothing(words):
    flags = [f"--{name.replace('_', '-')}={n}" for name, n in BASE.items()]
    flags += f"--tokenizer-type NullTokenizer --data-path d --split {words}".split()
    assert check(parse_pretrain(flags), 1) == [f"--split {words} leaves nothing to train on; raise its first number"]


@pytest.mark.parametrize("name", ["chunk_size", "partitions", "make_vocab_size_divisible_by"])
def test_numbers_of_preprocessing(name):
    with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} 0: at least 1 is needed"):
        preprocess_data.check(preprocess_data.PreprocessOptions(["i"], "o", **{name: 0}))


def test_each_number_of_a_list_is_in_the_range(capsys):
    options, words = dict(benchmark=BenchmarkOptions), ["--load", "x", "--print-config"]
    with pytest.raises(SystemExit) as done:
        parse(words, options)
    assert not done.value.code and "prompt_length: [128]" in capsys.readouterr().out
    with pytest.raises(UsageError, match="--prompt-length 4 0 must be at least 1"):
        parse([*words, "--prompt-length", "4", "0"], options)
