# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM's log has besides: throughput in its place, norm of the parameters, zeros of the gradient, sizes."""

import json
import re

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.reader import Reader
from megatron.optimizer.zero import DistributedOptimizer

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 299 --lr 1e-2 "
    "--micro-batch-size 1 --global-batch-size 2 --device cpu --num-workers 0 --eval-iters 0 --train-iters 4 "
    "--make-vocab-size-divisible-by 16 --hidden-dropout 0 --attention-dropout 0 --log-interval 2 "
).split()
UNTIED = "--untie-embeddings-and-output-weights"
KEYS = 2 * 16  # biases of keys, whose gradient is 0 but for rounding
ASKED = ["--log-params-norm", "--log-num-zeros-in-grad"]


def _figures(text):
    """(num zeros, params norm) of each line of the log, in Megatron-LM's words and order."""
    found = re.findall(r"\| grad norm: \S+ \| num zeros: (\d+) \| params norm: (\S+) \| number of skipped", text)
    return [(int(zeros), float(norm)) for zeros, norm in found]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("more", ["", UNTIED], ids=["tied", "untied"])
def test_figures_of_all_ranks_do_not_depend_on_the_layout(more, run_ranks, tmp_path, monkeypatch):
    """Against one rank's gradient element by element, and the norm of what the checkpoint holds."""
    counted = []
    step = DistributedOptimizer.step

    def counting(self, *args):
        for own in self.owned:
            for slot, where in own.slots():
                gradient = self.reduced[where].view(slot.parameter.shape)
                counted[-1] += int((gradient[: slot.placement.shape[0]] == 0).sum())  # rows behind are padding
        counted.append(0)
        step(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedOptimizer, "step", counting)
        counted.append(0)
        pretrain_gpt.main([*FLAGS, *more.split(), "--save", str(tmp_path / "one"), *ASKED])
    expected = [counted[1], counted[3]]
    assert expected[0] > (100 * 16 if more else -1)  # words that were not seen have no gradient in the embedding
    with Reader(tmp_path / "one" / "iter_0000004") as reader:
        weights = [reader.read(name) for name in reader.tensors if not name.startswith("optimizer.")]
    norm = torch.cat([weight.double().flatten() for weight in weights]).norm().item()
    found = _figures((tmp_path / "one" / "train.log").read_text())
    assert [zeros for zeros, _ in found] == expected and found[-1][1] == pytest.approx(norm, abs=6e-4)
    records = map(json.loads, (tmp_path / "one" / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if record["kind"] == "step"]
    assert [step.get("num_zeros") for step in steps] == [None, expected[0], None, expected[1]]
    assert steps[3]["params_norm"] == pytest.approx(norm, rel=1e-5) and "params_norm" not in steps[2]
    layouts = ["", "--tp 2 --sequence-parallel", "--sharding-stage 3"] if more else ["--pp 2", "--tp 2"]
    for number, layout in enumerate(layouts):
        words = [*FLAGS, *more.split(), "--save", str(tmp_path / str(number)), *layout.split(), *ASKED]
        run_ranks(2, lambda rank, words=words: pretrain_gpt.main(words))
        other = _figures((tmp_path / str(number) / "train.log").read_text())
        assert [zeros for zeros, _ in other] == pytest.approx(expected, abs=KEYS), layout
        assert [norm for _, norm in other] == pytest.approx([norm for _, norm in found], abs=2e-3), layout


def test_throughput_stands_where_megatron_has_it(tmp_path):
    pretrain_gpt.main([*FLAGS, "--save", str(tmp_path / "a"), "--log-throughput"])
    pretrain_gpt.main([*FLAGS, "--save", str(tmp_path / "b")])
    pattern = (
        r"\| elapsed time per iteration \(ms\): [\d.]+ \| throughput per GPU \(TFLOP/s/GPU\): [\d.]+ \| learning rate:"
    )
    lines, plain = ((tmp_path / name / "train.log").read_text() for name in "ab")
    assert len(re.findall(pattern, lines)) == 2 and lines.count("throughput per") == 2
    assert "(ms): " in plain and not re.search(pattern, plain) and "params norm" not in plain + lines


@pytest.mark.sampled(10)
def test_sizes_of_model_parallel_ranks_and_the_line_of_a_load(run_ranks, tmp_path):
    """In Megatron-LM's words; its counts are those of a rank's own tensors, padding and copies included."""
    flags = [*FLAGS, "--tp", "2", "--pp", "2", "--save", str(tmp_path)]
    run_ranks(4, lambda rank: pretrain_gpt.main(flags))
    run_ranks(4, lambda rank: pretrain_gpt.main([*flags, "--load", str(tmp_path), "--train-iters", "5"]))
    said = (tmp_path / "train.log").read_text()
    found = re.findall(r" > number of parameters on \(tensor, pipeline\) model parallel rank \((.*)\): (\d+)", said)
    h, rows = 16, 160  # of the table that a rank has of 300 words
    layer = (
        3 * h * h + 3 * h + h * h + 4 * h * h + 4 * h + 4 * h * h
    ) // 2 + 6 * h  # biases of outputs, and norms: whole
    first, last = rows * h + 16 * h + layer, rows * h + layer + 2 * h
    assert found[:4] == [("0, 0", str(first)), ("1, 0", str(first)), ("0, 1", str(last)), ("1, 1", str(last))]
    assert f"  successfully loaded checkpoint from {tmp_path} [ t 1/2, p 1/2 ] at iteration 4\n" in said
