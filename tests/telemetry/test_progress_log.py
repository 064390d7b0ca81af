# SPDX-License-Identifier: Apache-2.0
"""--log-progress: Megatron-LM's progress.txt."""

import re

import pretrain_gpt

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 99 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 4 --device cpu --num-workers 0 --eval-iters 0 --save-interval 2 "
    "--make-vocab-size-divisible-by 4 --log-progress "
).split()
SAVED = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\tJob ID: 77\t# GPUs: 1\t(Saved|Saving async) checkpoint\tIteration: (\d+)\t"
    r"Job throughput: [\d.]+ TFLOP/s/GPU\tCumulative throughput: [\d.]+ TFLOP/s/GPU\t"
    r"Floating-point operations: (\S+)\tTokens \(in billions\): 0.00"
)


def test_progress_of_a_run_that_is_taken_up_again(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    save = ["--save", str(tmp_path)]
    pretrain_gpt.main([*FLAGS, *save, "--train-iters", "4"])
    pretrain_gpt.main([*FLAGS, *save, "--load", str(tmp_path), "--train-iters", "6", "--async-save"])
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines] == [
        "Starting job",
        *["Saved checkpoint"] * 2,
        "Starting job",
        "Saving async checkpoint",
    ]
    found = [SAVED.fullmatch(line) for line in lines if "checkpoint" in line]
    assert [int(match[2]) for match in found] == [2, 4, 6]
    # 6 N of the matrices for each token (12 h^2 a layer, h V of the output), and attention's two products of 16 keys.
    token = 6 * (2 * 12 * 16**2 + 16 * 100) + 2 * 12 * 16 * 16
    assert [match[3] for match in found] == [f"{iteration * 4 * 16 * token:.2e}" for iteration in (2, 4, 6)]


def test_without_it_there_is_none(tmp_path):
    pretrain_gpt.main([*FLAGS[:-1], "--train-iters", "1", "--save", str(tmp_path)])
    assert not (tmp_path / "progress.txt").exists()
