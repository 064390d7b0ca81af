# SPDX-License-Identifier: Apache-2.0
"""Runs whose ranks share sequences: what the matrix of layouts does not reach."""

import pytest
import torch

import pretrain_gpt
from megatron.errors import NumericsError
from megatron.guard.replicas import check_replicas
from megatron.model.plain import plain_recipe
from megatron.planner.parity import compare, laid_out, parse_layout, trace
from megatron.settings.parse import parse_pretrain
from megatron.training import rules
from megatron.training.build import build_run
from megatron.training.step import train_step

TINY = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data --vocab-size 20 --lr 1e-3
    --global-batch-size 4 --micro-batch-size 2 --train-iters 10 --eval-iters 1 --precision fp32"""
MASKED = "--tokenizer-type NullTokenizer --eod-mask-loss --loss-averaging micro-batch"


def resolved(flags, layout):
    return laid_out(parse_pretrain(f"{TINY} {flags}".split()), parse_layout(layout))


def test_a_micro_batch_is_averaged_over_the_tokens_of_all_its_ranks():
    """Of which one rank has fewer that count than another."""
    reference = trace(resolved(MASKED, ""), pretrain_gpt.recipe(), 1, 3)
    found = compare(reference, trace(resolved(MASKED, "cp2"), pretrain_gpt.recipe(), 2, 3))
    assert found.passes("fp32"), found


@pytest.mark.parametrize("layout", ["cp2", "cp2-zero1"])
def test_ranks_of_a_sequence_hold_the_same_bits(layout, run_ranks):
    """And a bit that differs is found."""

    def body(rank):
        run = build_run(resolved("", layout), pretrain_gpt.recipe())
        for stage in run.stages:
            stage.train()
        train_step(run)
        check_replicas(run.optimizer, 1)
        if rank == 1:
            with torch.no_grad():
                next(run.stages[0].blocks["1"].parameters()).view(-1)[0] += 1e-3
        try:
            check_replicas(run.optimizer, 2)
        except NumericsError as error:
            return str(error)

    for said in run_ranks(2, body):
        assert "blocks.1.attention_norm.weight differs on ranks 0, 1" in said


def test_other_models_are_refused(monkeypatch):
    recipe = plain_recipe("GPT", lambda config, size: None, lambda *args: None)
    monkeypatch.setattr(rules, "recipe_of", lambda config: recipe)
    [said] = rules.check(parse_pretrain(f"{TINY} --context-parallel-size 2".split()), 2)
    assert said.startswith("--context-parallel-size 2: --model-type GPT needs whole sequences on each rank")
