# SPDX-License-Identifier: Apache-2.0
"""--batch-invariant-mode in plans: memory of gradients and of passes against runs, and layouts of a search."""

import contextlib
import os

import pytest

from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.ordered import attach_ordered
from megatron.model.recipe import facts_of, recipe_of
from megatron.mpu.mesh import Mesh
from megatron.planner import memory
from megatron.planner.activations import stage_saved_bytes
from megatron.planner.choose import search_layouts, search_micro_batch
from megatron.planner.layout import Job, Layout
from megatron.planner.parity import laid_out, parse_layout
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model
from megatron.training.rules import resolve
from tests.planner.test_activations import GPT_SHAPE, LLAMA, VOCABULARY, bytes_kept

MODE = """--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 16 --mock-data --vocab-size 96 --lr 1e-3
    --global-batch-size 16 --train-iters 10 --eval-iters 1 --micro-batch-size 2 --batch-invariant-mode --device cpu"""


def most_gradients(settings):
    """(pipeline rank, the most bytes of gradients at a time in a step, the most of passes that are not complete), of this
    rank.
    """
    from megatron.training.build import build_run
    from megatron.training.step import train_step

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run = build_run(settings, recipe_of(settings))
        gradients, seen = run.optimizer.gradients, []

        def followed(function):
            def call(*arguments, **more):
                result = function(*arguments, **more)
                unfinished = sum(use.buffer.nbytes for uses in gradients.open.values() for use in uses)
                seen.append((gradients.nbytes, unfinished))
                return result

            return call

        for name in ("_view", "start", "_wait"):
            setattr(gradients, name, followed(getattr(gradients, name)))
        train_step(run)
        run.close()
    return run.context.mesh.pp.rank, *map(max, zip(*seen, strict=True))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("words", ["one", "dp2 --bf16", "dp2-zero1", "dp2-zero3", "pp2", "pp2-zbh1", "pp2-zbv"])
def test_gradients_take_at_most_what_is_planned_and_at_least_three_quarters(run_ranks, words):
    place, _, more = words.partition(" ")
    layout = parse_layout("" if place == "one" else place)
    settings = resolve(laid_out(parse_pretrain(f"{MODE} {more}".split()), layout), layout.world_size)
    sized = Layout.of(settings, layout.world_size)
    job = Job.of(settings, facts_of(settings, 97), dp=sized.dp, device="cpu")
    for rank, measured, unfinished in run_ranks(layout.world_size, lambda _: most_gradients(settings)):
        held, _ = memory.static_memory(job, sized, rank)
        planned = held["gradients"] + held["gradient buffers"] + held["sums of earlier passes"]
        assert measured <= planned <= measured / 0.75, (rank, measured, planned)
        assert unfinished <= held["gradient buffers"], (rank, unfinished)  # with pass W several passes


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [GPT_SHAPE, {**GPT_SHAPE, **LLAMA}])
def test_a_pass_keeps_as_much_as_is_planned(shape):
    model = Model(**shape)
    stage = GPT(GPTFacts(model, VOCABULARY), Mesh(), layers=range(model.num_layers), device="cpu")
    attach_ordered([stage], model)
    job = Job(GPTFacts(model, VOCABULARY), 1, "fp32", "cpu", ordered=True)
    planned = sum(stage_saved_bytes(job, Layout(), tuple(range(model.num_layers)), True, True).values())
    assert abs(bytes_kept(stage, Layout()) / planned - 1) < 0.05


def test_all_logits_of_a_sample_exist_at_a_time():
    """Sums over the vocabulary are those of blocks of it, of all tokens; a plain loss has blocks of tokens."""
    model = Model(**GPT_SHAPE)
    rows, logits = 512 << 10, []
    for ordered in (False, True):
        share = Job(GPTFacts(model, rows), 1, "fp32", "cpu", ordered=ordered).rank_setup()
        logits.append(GPTFacts(model, rows).loss_deferred(share))
    assert logits == [0, 4 * model.seq_length * (rows + model.hidden_size)]


def test_a_search_plans_what_the_mode_covers():
    flags = MODE.replace("--micro-batch-size 2", "").replace("--global-batch-size 16", "--global-batch-size 48")
    config = parse_pretrain(f"{flags} --world-size 12 --local-world-size 12 --auto-parallel".split())
    found = search_layouts(config).searched
    layouts = [plan.layout for plan in found.plans]
    assert {layout.dp for layout in layouts} <= {1, 2, 4, 8} and {layout.tp for layout in layouts} <= {1, 2, 4}
    assert {layout.micro_batch_size for layout in layouts} == {1} and len(layouts) > 5
    assert "dp12: --batch-invariant-mode does not cover 12 data parallel ranks" in found.impossible
    for layout in layouts:
        resolve(layout.applied(config, 48), 12)  # what a run would refuse is an error


def test_a_search_divides_experts_as_the_mode_does():
    flags = MODE.replace("--micro-batch-size 2", "").replace("--seq-length 16", "--seq-length 128")
    flags = f"{flags} --num-experts 8 --disable-bias-linear --world-size 4 --local-world-size 4 --auto-parallel"
    impossible = search_layouts(parse_pretrain(flags.split())).searched.impossible
    refused = {one.partition(": ")[0] for one in impossible if "experts without" in one}
    assert refused == set("tp2-dp2 tp2-etp1-dp2 tp2-pp2 tp2-etp1-pp2 tp4 tp4-etp1 tp4-ep2-etp1".split())
    assert len(impossible) == len(refused), impossible  # tp2-ep2-etp1-dp2, tp4-ep4-etp1, ... are possible


def test_micro_batches_of_any_size_are_one_sample():
    config = parse_pretrain(f"{MODE} --micro-batch-size auto".split())
    assert [plan.layout.micro_batch_size for plan in search_micro_batch(config).searched.plans] == [1]


def test_memory_of_a_mode_grows_with_the_passes():
    """Sums of 1, 2, 4, ... passes wait for as many others: of 16 passes at most four, with 15 done."""
    waiting = {}
    for passes in (1, 2, 3, 7, 8, 16, 1023):
        settings = resolve(parse_pretrain(f"{MODE} --global-batch-size {passes} --micro-batch-size 1".split()), 1)
        job = Job.of(settings, facts_of(settings, 97), dp=1, device="cpu")
        held, _ = memory.static_memory(job, Layout.of(settings, 1), 0)
        table = 4 * 512 * 64  # the table has two
        waiting[passes] = held["sums of earlier passes"] / (held["gradients"] + table)
    assert waiting == {1: 1, 2: 1, 3: 2, 7: 3, 8: 3, 16: 4, 1023: 10}
