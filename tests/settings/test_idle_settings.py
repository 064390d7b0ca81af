# SPDX-License-Identifier: Apache-2.0
"""Settings of other suites that are read and do nothing: each is named in one line, with its reason."""

import pytest

from megatron.errors import UsageError
from megatron.settings.dialects import megatron_lm
from megatron.settings.dialects.colossalai import COLOSSALAI
from megatron.settings.parse import parse_pretrain

SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()
FILE = """
Engine: {max_steps: 10, eval_freq: 5, eval_iters: 4, test_iters: %s}
Model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}
Data: {Train: {dataset: {input_dir: ./data}, sampler: {drop_last: False}}%s}
"""


@pytest.fixture
def read(tmp_path, capsys):
    """`read(test_iters, more of Data, words)`: the settings of a file of PaddleFleetX, and what was told."""

    def read(tests: str = "", data: str = "", words: str = ""):
        (tmp_path / "run.yaml").write_text(FILE % (tests, data))
        return parse_pretrain(["-c", str(tmp_path / "run.yaml"), *words.split()]), capsys.readouterr().err

    return read


@pytest.mark.parametrize(
    "tests, words, wanted",
    [
        ("", "", 40),  # Engine.test_iters: `eval_iters * 10 if ... is None` in ppfleetx/utils/config.py
        ("~", "-o Engine.eval_iters=3", 30),
        ("7", "-o Engine.eval_iters=3", 7),
        ("7", "-o Engine.test_iters=", 40),
        ("", "-o Engine.test_iters=2", 2),
        ("", "--test-iters 2", 2),
        ("", "--eval-iters 3", 40),
        ("-1", "", 0),
        ("", "-o Engine.eval_freq=-1", None),
    ],
)
def test_a_test_has_ten_times_the_batches_of_a_validation(read, tests, words, wanted):
    config, _ = read(tests, words=words)
    assert config.batch.test_iters == wanted


def test_ten_times_where_the_key_is_missing(tmp_path):
    (tmp_path / "run.yaml").write_text((FILE % ("", "")).replace(", test_iters: ", ""))
    assert parse_pretrain(["-c", str(tmp_path / "run.yaml")]).batch.test_iters == 40


EVAL, TEST = ", Eval: {dataset: {input_dir: %s}, sampler: {drop_last: False}}", ", Test: {dataset: {input_dir: %s, %s}}"


@pytest.mark.parametrize(
    "data, paths, told, untold",
    [
        ("", None, ["drop_last has no effect: every batch is full"], ["a test is"]),
        (EVAL % "held", ("held", None), ["validation is of its own files, all"], ["Data.Train's files by its split"]),
        (EVAL % "./data", None, ["validation is of Data.Train's files by its split"], ["its own files"]),
        (TEST % ("kept", "split: [1]"), None, ["a test is of Data.Train's files by its split"], ["parts of the files"]),
        (EVAL % "held" + TEST % ("kept", "split: [1]"), ("held", "kept"), ["a test is of its own files"], ["Train's"]),
        (EVAL % "held" + TEST % ("./data", ""), ("held", None), ["a test needs Data.Test.dataset.input_dir"], []),
    ],
)
def test_what_is_told_of_data_is_true(read, data, paths, told, untold):
    config, err = read(data=data)
    found = config.data.data_path, config.data.train_data_path, config.data.valid_data_path, config.data.test_data_path
    lists = [None, ["./data"], *([one] if one else None for one in paths)] if paths else [["./data"], None, None, None]
    assert list(found) == lists
    lines = [line for line in err.splitlines() if "Data." in line]
    assert all(any(one in line for line in lines) for one in told), err
    assert not any(one in line for line in lines for one in untold), err


@pytest.mark.sampled(2)
@pytest.mark.parametrize("flag", [one for one in megatron_lm.known_flags() if not megatron_lm.answer(one).refused])
def test_each_idle_flag_is_named(flag, capsys):
    """With a value that asks for something: in one line that gives the reason of the table."""
    value = megatron_lm.VALUES.get(flag, ("7",))[-1]
    parse_pretrain([*SHAPE, flag, value])
    [line] = [line for line in capsys.readouterr().err.splitlines() if flag in line]
    assert line == f"note: {flag} has no effect: {megatron_lm.answer(flag, [value]).sentence}"


def test_values_of_idle_flags_are_checked():
    with pytest.raises(UsageError, match="--shard-strategy is not supported: there is tensor and bucket"):
        parse_pretrain([*SHAPE, "--shard-strategy", "rows"])


KEYS = [key for text in COLOSSALAI.idle.values() for key in text.split()]
ROWS = [row for row, meaning in COLOSSALAI.table.items() if meaning == "-" and "=" in row]


def python_file(key: str, value: str) -> str:
    """A file of Colossal-AI in which a dotted key has a value."""
    first, *names = key.replace("*", "x").split(".")
    for name in reversed(names):
        value = f"dict({name}={value})"
    return f"model = dict(type=gpt2_small)\n{first} = {value}\n"


@pytest.mark.parametrize("row", [*(f"{key}=7" for key in [*KEYS, *COLOSSALAI.kept]), *ROWS])
def test_each_idle_key_of_colossalai_is_named(row, tmp_path, capsys):
    key, _, value = row.partition("=")
    (tmp_path / "c.py").write_text(python_file(key, value if value in ("7", "True") else repr(value)))
    parse_pretrain(["-c", str(tmp_path / "c.py")])
    told = capsys.readouterr().err
    assert key.replace("*", "x") in told
