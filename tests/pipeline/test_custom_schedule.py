# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from megatron.errors import SettingsError
from megatron.pipeline.custom_schedule import is_file, read_schedule
from megatron.pipeline.schedule import v_shaped
from megatron.pipeline.simulate import make_rank_schedules
from megatron.pipeline.stages import Pipeline, problems
from megatron.settings.schema import Parallel


def _file(tmp_path, text):
    path = tmp_path / "own.txt"
    path.write_text(text)
    return str(path)


def test_a_file_is_a_plan(tmp_path):
    own = read_schedule(_file(tmp_path, "# mine\nF0 F1 B0 F2 B1 B2\n\nF0 B0 F1 B1 F2 B2  # the last stage\n"))
    assert (
        own.plan == make_rank_schedules("1f1b", 2, 3)
        and own.num_microbatches == 3
        and own.chunks == 1
        and not own.split
    )


def test_a_file_may_say_v(tmp_path):
    lines = [" ".join(map(str, ops)) for ops in make_rank_schedules("zb-v", 2, 3)]
    own = read_schedule(_file(tmp_path, "stages: v\n" + "\n".join(lines)))
    assert own.stages == v_shaped(2) and own.split and own.plan == make_rank_schedules("zb-v", 2, 3)


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0 B0\nF0 X0", "own.txt, line 2: 'X0' is no op"),
        ("F0 B0\nF0 B\u0663", "line 2: 'B.' is no op"),  # a digit of another script
        ("F0 F1213141516 B0 B1", "line 1: F1213141516 is not possible: .* the line has 4 ops"),
        ("F0 F0.99999999 B0 B0.1", "line 1: F0.99999999 is not possible"),
        ("F0 F1 B0 B1\n\nF0 B0 F1", "own.txt, line 3: this schedule cannot run\n  rank 1 never does B1"),
        ("F0 F1 B0 B1\nF0 B0 F1 B1 B1", "line 2: .*\n.*rank 1 repeats B1"),
        ("F0 B0 F1 B1\nF0 F1 B0 B1", "line 1: .*\n.*deadlock: rank 0 is stuck on B0, waiting for B0 of rank 1"),
        ("F0 F1 B1 B0\nF1 B1 F0 B0", "line 1: .*\n.*channel F from rank 0 to 1: message 0 is sent as F0, read as F1"),
        ("F0 F1\nF0 F1", "never trains"),
        ("F0 I0\nF0 I0", "passes of kinds"),
        ("# nothing", "holds no schedule"),
        ("stages: zigzag\nF0 B0", "line 1: 'stages: zigzag' is not known"),
        ("stages: v\nF0 B0", "V need two model chunks"),
        ("F0 F0.2 B0.2 B0", "rank 0 never does B0.1"),
        ("F0 & B0 F1 B1", "line 1: .*\n.*F0 & B0: the second waits for the first"),
        ("F0 F1 & B0 B1\nF0 F1 & B0 B1", "deadlock"),
    ],
)
def test_a_broken_file_is_named_with_line_and_op(text, words, tmp_path):
    with pytest.raises(SettingsError, match=words):
        read_schedule(_file(tmp_path, text))


def test_a_file_that_is_not_there():
    assert is_file("plans/mine") and is_file("mine.txt") and not is_file("zb-v")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_schedule("nowhere.txt")


def test_a_file_says_which_passes_take_turns(tmp_path):
    own, apart = _file(tmp_path, "F0 F1 & B0 F2 & B1 B2"), tmp_path / "apart.txt"
    asked = Parallel(pipeline_schedule=own, overlap_moe_expert_parallel_comm=True, expert_model_parallel_size=2)
    pipeline = Pipeline.of(asked, 4, 3)
    assert pipeline.turns and pipeline.ops(0, 3) == make_rank_schedules("1f1b &", 1, 3)[0]
    apart.write_text("F0 B0 F1 B1")
    with pytest.raises(SettingsError, match="says which passes take turns, by & between the two"):
        Pipeline.of(replace(asked, pipeline_schedule=str(apart)), 4, 2)


def test_a_file_has_to_fit_the_run(tmp_path):
    path = _file(tmp_path, "F0 F1 B0 B1\nF0 B0 F1 B1")
    fits = Parallel(pipeline_model_parallel_size=2, pipeline_schedule=path)
    assert Pipeline.of(fits, 4, 2).ops(1, 2) == make_rank_schedules("1f1b", 2, 2)[1]
    assert problems(fits, 4) == []
    with pytest.raises(SettingsError, match="it is for 2 micro-batches, and a step has 4"):
        Pipeline.of(fits, 4, 4)
    with pytest.raises(SettingsError, match="it has 2 lines of ops, and --pipeline-model-parallel-size is 4"):
        Pipeline.of(Parallel(pipeline_model_parallel_size=4, pipeline_schedule=path), 4, 2)
    with pytest.raises(SettingsError, match="--num-layers 5 cannot be cut into 2 even stages"):
        Pipeline.of(fits, 5, 2)
    chunked = Parallel(pipeline_model_parallel_size=2, pipeline_schedule=path, num_virtual_stages_per_pipeline_rank=2)
    assert "itself sets the number of model chunks" in problems(chunked, 4)[0]
