# SPDX-License-Identifier: Apache-2.0
"""`--log-ranks`: which ranks' lines stdout gets. The files of a run are the same as without."""

import re

import pytest

import pretrain_gpt
from megatron.errors import SettingsError

FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 99 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 2 --device cpu --num-workers 0 --eval-iters 1 --train-iters 2 "
    "--log-interval 1 --console megatron "
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("flags, speaking", [("", None), ("--log-ranks 0 1", {0, 1}), ("--log-ranks 1", {1})])
def test_ranks_that_speak(flags, speaking, run_ranks, tmp_path, capfd):
    run_ranks(2, lambda rank: pretrain_gpt.main(f"{FLAGS} {flags} --save {tmp_path}".split()))
    lines = capfd.readouterr().out.splitlines()
    for rank in speaking or {None}:
        prefix = "" if rank is None else rf"\[rank {rank}\] "
        own = [line for line in lines if re.match(rf"{prefix} \[\S+ \S+\] iteration +\d/ ", line)]
        assert [re.search(r"iteration +(\d)/", line)[1] for line in own] == ["1", "2"]
        assert len({re.search(r"lm loss: (\S+)", line)[1] for line in own}) == 2
        assert sum(bool(re.match(rf"{prefix} validation loss at", line)) for line in lines) == 2  # and the test's
    if speaking:
        ranks = [re.match(r"\[rank (\d)\] ", line) for line in lines]
        assert all(ranks) and {int(rank[1]) for rank in ranks} == speaking
    said = (tmp_path / "train.log").read_text()
    assert len(re.findall(r"^ \[\S+ \S+\] iteration", said, re.M)) == 2 and "[rank " not in said
    metrics = (tmp_path / "metrics.jsonl").read_text()
    assert (metrics.count('"kind": "step"') or metrics.count('"kind":"step"')) == 2


def test_ranks_that_are_not_there():
    with pytest.raises(SettingsError, match="--log-ranks 0 4: this job has rank 0 alone"):
        pretrain_gpt.main(f"{FLAGS} --log-ranks 0 4".split())
