# SPDX-License-Identifier: Apache-2.0
"""`--dump-graph`: what is written is the graph, which computes what the layer does, and training is the same with it."""

import json

import pytest
import torch

import pretrain_gpt
from megatron.model.graph_dump import dumping_backend

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 99 --lr 1e-2 "
    "--micro-batch-size 1 --device cpu --num-workers 0 --eval-iters 0 --train-iters 2 --hidden-dropout 0 "
    "--attention-dropout 0 --torch-compile --pp 2 --global-batch-size 2"
)


@pytest.mark.full
def test_each_graph_is_a_file_of_code(tmp_path):
    (tmp_path / "rank_3").mkdir()
    (tmp_path / "rank_3" / "graph_007.py").write_text("of an earlier run")
    layer = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    compiled = torch.compile(
        layer, backend=dumping_backend(str(tmp_path), 3, lambda graph, inputs: graph.forward), dynamic=False
    )
    inputs = [torch.randn(rows, 3) for rows in (2, 2, 5)]
    for x in inputs:
        torch.testing.assert_close(compiled(x), layer(x))
    files = sorted(path.name for path in (tmp_path / "rank_3").iterdir())
    assert files == ["graph_000.py", "graph_001.py"]  # one for each shape
    for name, rows in zip(files, (2, 5), strict=True):
        code = (tmp_path / "rank_3" / name).read_text()
        assert "class GraphModule" in code and "torch._C._nn.linear" in code and f'"f32[{rows}, 4]' in code
        compile(code, name, "exec")


@pytest.mark.full
def test_a_run_writes_the_graphs_of_each_rank(run_ranks, tmp_path):
    """--dump-graph changes nothing else."""

    def losses(name, flags=""):
        words = f"{FLAGS} --save {tmp_path / name} {flags}".split()
        run_ranks(2, lambda rank: pretrain_gpt.main(words), timeout=240)
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [line["lm loss"] for line in lines if line["kind"] == "step"]

    assert losses("with", f"--dump-graph {tmp_path / 'graphs'}") == losses("without")
    for rank in (0, 1):
        files = sorted((tmp_path / "graphs" / f"rank_{rank}").iterdir())
        code = "".join(path.read_text() for path in files)
        assert files and "attention_norm_parameters_weight" in code and "mlp_modules_down_parameters_weight" in code
