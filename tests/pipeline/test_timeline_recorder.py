# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from megatron.errors import StorageError
from megatron.mpu.initialize import RankContext
from megatron.mpu.mesh import Mesh
from megatron.optimizer.scaler import LossScaler
from megatron.pipeline.execute import P2PCommunicator, execute
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.timeline import read_timeline
from megatron.pipeline.timeline_recorder import STEP, Recorder
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Parallel
from megatron.training.instruments import recorder_of
from megatron.training.state import State


class Stage(torch.nn.Module):
    """Rows times a weight; the last stage sums them."""

    def __init__(self, first: bool, last: bool):
        super().__init__()
        self.first, self.last = first, last
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x, batch):
        y = (batch if self.first else x) * self.weight
        return (None, {"lm loss": y.sum()}) if self.last else y


def _train(rank, path, name, steps):
    mesh = Mesh(rank, pp=2)
    pipeline = Pipeline.of(Parallel(pipeline_model_parallel_size=2, pipeline_schedule=name), 4, 3)
    stages = [Stage(stage == 0, stage == len(pipeline.stages) - 1) for stage in pipeline.stages_of(rank)]
    wire = P2PCommunicator(mesh.pp, (2, 4), torch.float32, torch.device("cpu"), stages=pipeline.stages)
    recorder = Recorder(path, pipeline, mesh)
    for _ in range(steps):
        record = recorder.record()
        execute(
            pipeline.ops(rank, 3),
            stages,
            [torch.ones(2, 4)] * 3,
            wire,
            lambda sums, _: sums["lm loss"],
            timeline=record,
        )
        recorder.write(record)
    return [[str(op) for op in pipeline.ops(rank, 3)]]


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_one_step_of_all_ranks_is_recorded(name, tmp_path, run_ranks):
    path = tmp_path / "step.json"
    plans = run_ranks(2, _train, str(path), name, STEP + 2)
    found = read_timeline(str(path))
    assert found.schedule == name and [[[str(op) for op in ops]] for ops in found.plan] == plans
    times = found.times
    assert min(start for start, _ in times.values()) == 0.0
    for rank, op in times:  # an op begins after what it needs has ended
        if op.kind == "F" and (rank, op.chunk) == found.stages[1]:
            before = found.stages[0]
            assert times[before[0], op._replace(chunk=before[1])][0] < times[rank, op][0]


def test_too_few_steps_record_nothing(tmp_path, run_ranks):
    path = tmp_path / "step.json"
    run_ranks(2, _train, str(path), "1f1b", STEP - 1)
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    pipeline = Pipeline.of(Parallel(), 4)
    recorder = Recorder(str(tmp_path / "no" / "step.json"), pipeline, Mesh())
    records = [recorder.record() for _ in range(STEP)]
    assert records == [None] * (STEP - 1) + [[]]
    with pytest.raises(StorageError, match="cannot write --pipeline-timeline"):
        recorder.write([(pipeline.ops(0, 1)[0], recorder.begun, recorder.begun + 1)])


def test_what_will_not_be_written_is_told_at_the_start(tmp_path):
    def started(path, done):
        line = f"--num-layers 4 --hidden-size 8 --num-attention-heads 1 --train-iters 4 --pipeline-timeline {path}"
        config, said = parse_pretrain([*line.split(), "--micro-batch-size", "1"]), []
        context, state = RankContext(Mesh(), torch.device("cpu")), State(LossScaler(), done, done)
        assert recorder_of(config, context, Pipeline.of(Parallel(), 4), state, said.append)
        return said

    assert started(tmp_path / "step.json", done=1) == []
    assert "step.json will not be written" in started(tmp_path / "step.json", done=2)[0]
    with pytest.raises(StorageError, match="no such folder"):
        started(tmp_path / "no" / "step.json", done=0)
