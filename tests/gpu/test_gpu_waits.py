# SPDX-License-Identifier: Apache-2.0
"""On a GPU: torch, asked to refuse every call for which the host waits, refuses none of a step; and reading a step's
numbers late decides as reading them at once does.
"""

import pytest
import torch

import pretrain_gpt
from megatron.model.kinds.experts.grouped import lacking_grouped
from megatron.settings.parse import parse_pretrain
from megatron.training import step as training_step
from megatron.training.build import build_run
from megatron.training.rules import resolve

pytestmark = pytest.mark.gpu
FLAGS = """--num-layers 2 --hidden-size 128 --num-attention-heads 2 --seq-length 64 --mock-data --vocab-size 500 --lr 1e-3
    --micro-batch-size 4 --global-batch-size 8 --train-iters 12 --eval-iters 0 --num-workers 0"""
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 64 --swiglu --disable-bias-linear"
CASES = {
    "adam, bf16": "--bf16",
    "documents": "--bf16 --reset-attention-mask --reset-position-ids --hidden-dropout 0 --attention-dropout 0",
    "adam, fp16 with overflows": "--fp16 --initial-loss-scale 16777216 --hysteresis 1 --loss-scale-window 2",
    "sgd, spikes": "--bf16 --optimizer sgd --on-spike skip",
    "lion": "--bf16 --optimizer lion",
    "muon": "--bf16 --optimizer muon",
    "experts": f"--bf16 {EXPERTS}",
    "experts, padded": f"--bf16 {EXPERTS} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity",
}


def steps(flags: str, device: str, late: bool, monkeypatch) -> list[tuple]:
    """(iteration, skipped, loss scale, norm, loss) of each step."""
    recorded = []
    monkeypatch.setattr(training_step, "record_step", lambda run, step: recorded.append(step) if step else None)
    run = build_run(resolve(parse_pretrain(f"{FLAGS} {flags} --device {device}".split()), 1), pretrain_gpt.recipe())
    assert run.pending.defers_host_sync or device == "cpu"
    run.pending.defers_host_sync = late
    for number in range(1, 13):
        strict = late and 3 < number < 12  # kernels are compiled and memory is found in the first steps
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            recorded += filter(None, [training_step.train_step(run)])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    run.close()
    return [(s.iteration, s.skipped, s.loss_scale, s.grad_norm, *s.losses.values()) for s in recorded]


@pytest.mark.parametrize("case", CASES)
def test_no_step_waits_and_all_decide_alike(case, device, monkeypatch):
    if case == "experts" and (lacking := lacking_grouped("cuda", torch.bfloat16)):
        pytest.skip(lacking)  # it reads the numbers of rows
    late, at_once = (steps(CASES[case], device, late, monkeypatch) for late in (True, False))
    assert [step[:3] for step in late] == [step[:3] for step in at_once]
    assert [step[0] for step in late] == list(range(1, 13))
    for found, wanted in zip(late, at_once, strict=True):
        assert found[3:] == pytest.approx(wanted[3:], rel=1e-2, nan_ok=True)
    if "overflows" in case:
        assert 0 < sum(step[1] for step in late) < 12
