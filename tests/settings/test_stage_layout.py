# SPDX-License-Identifier: Apache-2.0
"""--pipeline-model-parallel-layout of Megatron-LM: the layers of each stage, model chunks, and what is wrong."""

import re

import pytest

from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.pipeline.stages import Pipeline
from megatron.settings.stage_layout import StageLayout, read_layout
from megatron.training.rules import check, remarks

FLAGS = """--hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 20 --micro-batch-size 1
    --global-batch-size 8 --train-iters 1 --lr 1e-3 --position-embedding-type rope"""
# Layouts as Megatron-LM and its recipes write them -> layers of each stage, stage and number of the depths
READ = {
    "Et*3|(tt|)*29m|L": ((3, *[2] * 29, 0, 0), 30, 1),
    "Et|(tt|)*30L": ((1, *[2] * 30, 0), None),
    "E|t*3|(t|)*4,mL": ((0, 3, 1, 1, 1, 1, 0), 6, 1),
    "Ett|tt|ttL": ((2, 2, 2), None),
    "Et*2 | t*2m*2L": ((2, 2), 1, 2),
    "E(t|t)*2L": ((1, 2, 1), None),
}


@pytest.mark.parametrize("text", READ)
def test_layouts_are_read(text):
    assert read_layout(text) == StageLayout(*READ[text])


def config(words: str):
    return parse_any(f"{FLAGS} {words}".split())


def test_stages_and_model_chunks_follow():
    made = config("--num-layers 8 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|tt|ttt|ttL")
    assert made.parallel.pipeline_stage_layers == "1,2,3,2" and made.parallel.num_virtual_stages_per_pipeline_rank == 2
    assert check(made, 2) == []
    pipeline = Pipeline.of(made.parallel, 8)
    assert [list(layers) for layers in pipeline.layers] == [[0], [1, 2], [3, 4, 5], [6, 7]]
    assert list(pipeline.stages_of(0)) == [0, 2]
    alone = config("--num-layers 8 --pipeline-model-parallel-layout Et|tt|ttt|ttL")  # one rank has all
    assert alone.parallel.pipeline_stage_layers is None and check(alone, 1) == []


def test_a_search_keeps_the_stages():
    """As it keeps --pipeline-stage-layers."""
    words = "--num-layers 4 --auto-parallel --world-size 4"
    made = config(f"{words} --pipeline-model-parallel-layout Et|tttL")
    assert (
        made.parallel.pipeline_stage_layers
        == config(f"{words} --pipeline-stage-layers 1,3").parallel.pipeline_stage_layers
    )


def test_depths_before_the_last_stage_are_named():
    words = "--num-layers 4 --mtp-num-layers 1 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout"
    [said] = [one for one in remarks(config(f"{words} Ett|t|tm|L"), 4) if "layout" in one]
    assert "depths of multi-token prediction are on the last stage" in said
    assert not [one for one in remarks(config(f"{words} Ett|t|t|mL"), 4) if "layout" in one]


WRONG = {
    "Ett|xx|L": "x is no part of a stage",
    "tt|ttL": "the first stage begins with the embedding (E)",
    "Ett|tt": "the last ends with the loss (L)",
    "Ett|EttL": "the first stage begins with the embedding (E)",
    "EtL|tt": "the last ends with the loss (L)",
    "Et*999999|L": "has too many parts",
    "Ett|tt|ttL": "has 3 stages, and --pipeline-model-parallel-size is 2",
    "Ett|ttmL": "Ett|ttmL has 1 depth of multi-token prediction (m), and --mtp-num-layers is 0; give as many",
    "Ett|ttmmL --mtp-num-layers 1": "Ett|ttmmL has 2 depths of multi-token prediction (m), and --mtp-num-layers is 1",
    "Ett|ttL --num-layers-per-virtual-pipeline-stage 1": "--pipeline-model-parallel-layout Ett|ttL sets the number of",
    "Ett|tL": "is 3 layers, and --num-layers is 4",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_layout_has_one_message(text):
    words = f"--num-layers 4 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {text}"
    try:
        [said] = check(config(words), 2)
    except SettingsError as error:
        said = str(error)
    assert re.search(re.escape(WRONG[text]), said)
