# SPDX-License-Identifier: Apache-2.0
"""What somebody says of a layout is kept by a search of layouts, also where it is a default, and is in what it prints."""

import re
import shlex

import pytest

from megatron.errors import SettingsError, UsageError
from megatron.model.command_line import parse_any
from megatron.planner import choose
from megatron.planner.choose import automatic, search_layouts
from megatron.planner.command import command_line
from megatron.planner.layout import Layout
from megatron.planner.target import cluster_of
from megatron.settings.plan_file import LAYOUT
from megatron.tools import plan as plan_tool
from megatron.tools import pretrain as searched_pretrain
from megatron.training.rules import filled

pytestmark = pytest.mark.sampled(10)

MODEL = """--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 512 --mock-data --bf16
    --train-iters 2 --lr 1e-4 --hidden-dropout 0 --attention-dropout 0""".split()
EIGHT = "--world-size 8 --local-world-size 8 --device-name A100-80GB --global-batch-size 16".split()
WORDS = """
--tensor-model-parallel-size 1
--tp 4
--pipeline-model-parallel-size 1
--pp 2
--context-parallel-size 1
--data-parallel-size 2
--data-parallel-size 8
--dp_degree 2
--dp_degree 1 --sharding-stage 1
--sharding-stage 0
--sharding-stage 2
--sharding-stage 1 --sharding-degree 2
--use_sharding false
--use-distributed-optimizer
--micro-batch-size 1
--micro-batch-size 4
--sequence-parallel --tp 2
--sequence-parallel false --tp 2
--pipeline-schedule 1f1b
--pipeline-schedule zb-h1 --pp 2
--pipeline-schedule interleaved --num-virtual-stages-per-pipeline-rank 2 --pp 2
--num-layers-per-virtual-pipeline-stage 2 --pp 2
--pipeline-stage-layers 3,5
--recompute-activations
--recompute-activations false
--recompute-granularity full
--recompute-granularity full --recompute-method block --recompute-num-layers 1
--use-recompute --use-recompute false
--recompute-granularity full --no-recompute-layers 0,1
--recompute-granularity selective --recompute-modules layernorm mlp
--optimizer-cpu-offload
--optimizer-cpu-offload false
--optimizer-cpu-offload --optimizer-offload-fraction 0.5
--param-cpu-offload --sharding-stage 3
--overlap-grad-reduce
--no-overlap-grad-reduce
--overlap-grad-reduce --overlap-param-gather false --sharding-stage 1
""".strip().splitlines()


SEARCHED = "tp pp dp cp micro_batch_size chunks schedule zero shard sp recompute stage_layers offload disk".split()


@pytest.fixture
def searched_once(monkeypatch):
    """A search of the same space for the same job is made once: it takes most of the time."""
    found = {}

    def search(*space, real=choose.search):
        if (key := repr(space)) not in found:
            found[key] = real(*space)
        return found[key]

    monkeypatch.setattr(choose, "search", search)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("words", WORDS)
def test_a_search_keeps_what_is_given(words, searched_once):
    config = parse_any([*MODEL, *EIGHT, "--auto-parallel", *words.split()])
    said = {name: one.value for name in LAYOUT if (one := config.given(name)) is not None}
    outcome = search_layouts(config)
    assert outcome.searched.plans
    for plan in outcome.searched.plans:
        chosen = plan.layout.applied(config, plan.job.global_batch)
        for name, value in said.items():
            group = next(group for group in chosen.groups.values() if hasattr(group, name))
            assert getattr(group, name) == value, (name, plan.layout.short())
        read = Layout.of(filled(chosen, 8), 8)  # what was searched is what these settings mean
        for name in SEARCHED:
            assert getattr(read, name) == getattr(plan.layout, name), (name, plan.layout.short(), read.short())
    printed = command_line(config, outcome.searched.plans[0], outcome.cluster)
    command = shlex.split(printed.replace("\\\n", " "))
    again = parse_any(command[command.index("pretrain_gpt.py") + 1 :])
    assert {name: again.given(name).value for name in said if said[name] is not None} == {
        name: value for name, value in said.items() if value is not None
    }
    logged = []
    automatic(config, logged.append)
    text = " ".join(" ".join(logged).split())
    flags = [word for word in words.split() if word.startswith("--")]
    assert "kept as given: " in text and all(flag.replace("_", "-") in text for flag in flags[-1:])


GIVEN = {
    "--tensor-model-parallel-size 1": dict(tp=1),
    "--context-parallel-size 1": dict(cp=1),
    "--pipeline-model-parallel-size 1": dict(pp=1),
    "--sharding-stage 0": dict(zero=0),
    "--micro-batch-size 1": dict(micro_batch_size=1),
    "--pipeline-schedule 1f1b": dict(schedule="1f1b"),
    "--no-sequence-parallel": dict(sp=False),
    "--expert-model-parallel-size 2": dict(ep=2),
    "--expert-tensor-parallel-size 4": dict(etp=4),
    "--data-parallel-size 8": dict(dp=8),
    "--dp-degree 2": dict(replicas=2),
    "--sharding-degree 4": dict(shard=4),
    "--num-virtual-stages-per-pipeline-rank 3": dict(chunks=3),
    "--num-layers-per-virtual-pipeline-stage 5": dict(chunk_layers=5),
    "--overlap-grad-reduce": dict(overlap=True),
    "--overlap-param-gather": dict(overlap=True),
    "--no-overlap-grad-reduce": dict(overlap=False),
    "--no-overlap-param-gather --overlap-grad-reduce": dict(overlap=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", ["", *GIVEN])
def test_an_axis_is_fixed_if_its_flag_is_given_also_at_its_default(words):
    config = parse_any([*MODEL, *EIGHT, "--auto-parallel", *words.split()])
    space = choose.space_of(config, cluster_of(config, {})[0])
    axes = ("tp", "cp", "pp", "zero", "micro_batch_size", "schedule", "sp", "ep", "etp", "dp", "shard", "chunks")
    axes += ("replicas", "chunk_layers", "stage_layers", "recompute", "cp_comm", "cp_levels", "overlap")
    found = {name: value for name in axes if (value := getattr(space, name)) is not None}
    assert found == GIVEN.get(words, {})


def test_nothing_given_is_free():
    config = parse_any([*MODEL, *EIGHT, "--auto-parallel"])
    layouts = {plan.layout.short() for plan in search_layouts(config).searched.plans}
    assert len(layouts) > 20


@pytest.mark.sampled(10)
@pytest.mark.parametrize("words", WORDS)
def test_the_command_of_llmacc_keeps_it(words, capsys):
    """`-m megatron.pretrain --task-type` outside of a job prints the layouts, as the planner's command does."""
    cluster = [word if word != "--global-batch-size" else "--max-global-batch-size" for word in EIGHT]
    default = ["--seed", "1234"]
    searched_pretrain.main(["--task-type", "GPT", *MODEL, *cluster, *default, *words.split()], env={})
    printed = capsys.readouterr().out
    command = shlex.split(printed[printed.rindex("torchrun ") :].replace("\\\n", " "))
    assert command[command.index("--seed") + 1] == "1234"
    config, again = parse_any([*MODEL, *words.split()]), parse_any(command[command.index("pretrain_gpt.py") + 1 :])
    said = {name: one.value for name in LAYOUT if (one := config.given(name)) is not None and one.value is not None}
    assert {name: again.given(name).value for name in said} == said


@pytest.mark.parametrize(
    "words, reason",
    [
        ("--account-for-loss-in-pipeline-split", "a search of layouts does not support it"),
        ("--decoder-first-pipeline-num-layers 3 --pp 2", "a search of layouts does not support it"),
        ("--data-parallel-size 3", "no layout of 8 ranks is possible with --data-parallel-size 3"),
        ("--tp 3", "no layout of 8 ranks is possible with --tp 3"),
        ("--pp 2 --tp 8", "no layout of 8 ranks is possible with --pp 2, --tp 8"),
        (
            "--pipeline-stage-layers 3,4",
            "--pipeline-stage-layers 3,4 is 7 layers, and --num-layers is 8; 4,4 would work",
        ),
        ("--pipeline-stage-layers 3;5", "--pipeline-stage-layers 3;5 must be numbers with commas"),
    ],
)
def test_what_cannot_be_kept_is_refused(words, reason):
    with pytest.raises((SettingsError, UsageError), match=re.escape(reason)):
        plan_tool.main([*MODEL, *EIGHT, *words.split()])


def test_what_does_not_fit_names_what_was_kept():
    big = "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200".split()
    with pytest.raises(SettingsError) as error:
        plan_tool.main([*big, *EIGHT, "--sharding-stage", "0", "--tp", "1"])
    assert "with --sharding-stage 0, --tp 1 fits 8 x" in str(error.value)


def test_a_distributed_optimizer_on_one_rank_is_no_dead_end():
    one = "--world-size 1 --device-name A100-80GB --max-global-batch-size 4 --use-distributed-optimizer".split()
    found = search_layouts(parse_any([*MODEL, *one])).searched
    assert found.plans and all(plan.layout.zero == 1 for plan in found.plans)
