# SPDX-License-Identifier: Apache-2.0
"""What a launch finds out or is told: its ranks, its data."""

import pytest

import pretrain_gpt
from megatron import launched
from megatron.errors import SettingsError
from megatron.flags import parse_pretrain
from megatron.planner import target

GPT = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --lr 1e-3
    --train-iters 3 --eval-iters 1 --device cpu""".split()
TINY = [*GPT, "--mock-data"]


# The environment ------------------------------------------------------------------------------------------------------


def test_ranks_of_an_environment():
    assert launched.ranks({}) == launched.Ranks(0, 1, 0, None)
    assert launched.ranks(dict(RANK="9", WORLD_SIZE="16", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8")) == (
        launched.Ranks(9, 16, 1, 8)
    )
    cluster, _ = target.cluster_of(parse_pretrain(TINY), dict(WORLD_SIZE="16", LOCAL_WORLD_SIZE="4"))
    assert (cluster.world_size, cluster.local_size) == (16, 4)


@pytest.mark.parametrize(
    "name, value",
    [("RANK", "one"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "0"), ("LOCAL_RANK", "-1"), ("LOCAL_WORLD_SIZE", "8x")],
)
def test_every_reader_refuses_a_number_that_is_none(name, value, monkeypatch):
    from megatron.mpu import context
    from megatron.preflight.run import preflight

    config, env = parse_pretrain(TINY), {name: value}
    monkeypatch.setenv(name, value)
    for read in (
        lambda: target.cluster_of(config, env),
        lambda: preflight(config, pretrain_gpt.recipe, env=env),
        lambda: context.join(config.parallel, config.kernels),
        lambda: pretrain_gpt.main(TINY),
    ):
        with pytest.raises(SettingsError, match=f"{name}={value} in the environment is no number") as caught:
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
    line = [*GPT, "--data-path", *words.split(), "--tokenizer-type", "NullTokenizer", "--hidden-dropout", "2",
            "--tokenizer-model", "gone.json", "--valid-data-path", "1e0", "gone.bin"]  # fmt: skip
    with pytest.raises(SettingsError) as caught:
        pretrain_gpt.main([*line, "--dry-run", "--world-size", "1"])
    for part in (said, "--hidden-dropout", "there is no gone.json", "there is no gone.idx and no gone.bin"):
        assert str(caught.value).count(part) == 1, str(caught.value)
