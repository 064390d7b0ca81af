# SPDX-License-Identifier: Apache-2.0
"""A kernel of Triton is used where its probe passes, and nowhere else; whoever asks is told why."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.fused_kernels import (
    TABLE,
    TRITON,
    Case,
    choose_kernel,
    describe_kernels,
    explicit_attention,
    reference,
    run_probes,
)
from megatron.fused_kernels.autocast import Autocast
from megatron.fused_kernels.gpu import probe
from megatron.model.recompute import recompute

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("op", [*probe.MODULES, *probe.OF_PACKAGES])
def test_a_probe_lets_rounding_pass_and_a_factor_not(op):
    """The small cases, on the CPU: the reference in bf16 passes for itself; 5 % more is seen."""
    right = getattr(reference, op)

    def wrong(*args, **kwargs):
        found = right(*args, **kwargs)
        return tuple(x.float() * 1.05 for x in found) if isinstance(found, tuple) else found * 1.05

    assert probe.compare(op, right, "cpu", BF16) == ""
    assert probe.compare(op, wrong, "cpu", FP32).startswith("relative errors")


def test_a_gradient_of_the_loss_that_is_wrong_is_seen():
    def wrong(logits, labels, part, join, scale, out):
        found = reference.cross_entropy(logits, labels, part, join, scale, out)
        out[:, part.real :] = 0.1  # padding
        return found

    assert probe.compare("cross_entropy", wrong, "cpu", FP32)


def present(monkeypatch, **more):
    """Rows of Triton as on a machine with a GPU."""
    for op, entries in TABLE.items():
        if entries[0].name == TRITON:
            monkeypatch.setitem(TABLE, op, [replace(entries[0], lacking="", **more), *entries[1:]])


def test_what_fails_is_left_to_torch_and_said(monkeypatch):
    """Here the device is missing: whatever a probe raises is an answer."""
    monkeypatch.setattr(probe, "_probe", probe._probe.__wrapped__)
    present(monkeypatch)
    assert choose_kernel("swiglu", Case("cuda", BF16)).name == ("torch" if not torch.cuda.is_available() else TRITON)
    monkeypatch.setattr(probe, "compare", lambda *args: "relative errors ['3.0e-01']")
    assert choose_kernel("swiglu", Case("cuda", BF16)).name == "torch"
    [line] = describe_kernels("cuda", BF16)
    assert line.startswith("kernels: ") and "swiglu" in line and "because the probe found relative errors" in line


def test_what_passes_is_taken_on_cuda_alone(monkeypatch):
    present(monkeypatch, probe=lambda: "")
    for op in probe.MODULES:
        assert choose_kernel(op, Case("cuda", BF16)).name == TRITON
        assert choose_kernel(op, Case("cuda", BF16, unfused=True)).name != TRITON
        assert choose_kernel(op, Case("cuda", torch.float64)).name != TRITON
        assert choose_kernel(op, Case("cpu", BF16)).name != TRITON
    [line] = describe_kernels("cuda", BF16, "blockwise")
    line, products = line.split("; fp8_blockwise")
    assert products.startswith(", fp8_blockwise_square, fp8_grouped by torch, because ")
    assert "fp8" not in describe_kernels("cuda", BF16)[0]
    assert set(line.removeprefix("kernels: ").removesuffix(" in Triton").split(", ")) == set(probe.MODULES)
    assert describe_kernels("cpu", BF16) == []
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose_kernel("rms_norm", Case("cuda", BF16)).name == "torch"  # the compiler makes its own


def test_tensors_without_values_are_no_evidence(monkeypatch):
    """Nothing is run on fake tensors, and nothing remembered of them."""
    present(monkeypatch)
    monkeypatch.setattr(probe, "_probe", lambda op: pytest.fail("was run"))
    with FakeTensorMode():
        assert choose_kernel("rotate", Case("cuda", BF16)).name == "torch"
        assert probe.NO_VALUES in describe_kernels("cuda", BF16)[0]


def test_what_is_compiled_is_told_what_was_found_before(monkeypatch):
    """The kernel of documents alone is chosen in compiled layers; a probe cannot run in them."""
    there = [replace(entry, lacking="") for entry in TABLE["attention"] if not entry.name.startswith("flash-attn")]
    monkeypatch.setitem(TABLE, "attention", there)
    monkeypatch.setattr(probe, "RESULTS", {})
    monkeypatch.setattr(probe, "_probe", lambda op: "" if op == "attention" else "not asked")
    case = Case("cuda", BF16, 64, 64, causal=True, documents=True)

    def chosen() -> str:
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            return choose_kernel("attention", case, "sdpa").name

    assert chosen() == "sdpa (CUDA)"
    run_probes("attention")
    assert chosen() == "varlen (CUDA)"


def test_a_probe_inside_a_layer_that_is_recomputed_and_cast_disturbs_neither(monkeypatch):
    """It runs in the first pass alone. Gradients are those without recomputation; the reference stays in fp32."""
    compare, seen = probe.compare, []
    on_cpu = lambda op, run, *args: (
        seen.append(compare(op, explicit_attention.in_blocks, "cpu", FP32, 1e-5)) or seen[-1]
    )
    monkeypatch.setattr(probe, "compare", on_cpu)

    def layer(x):
        with Autocast(BF16):
            assert seen or probe._probe.__wrapped__("attention") == ""
        return (x.sin() * x).cos()

    x = torch.linspace(-1, 1, 6, requires_grad=True)
    again = torch.autograd.grad(recompute(layer, x).sum(), x)[0]
    assert again.equal(torch.autograd.grad((x.sin() * x).cos().sum(), x)[0])
    assert seen == [""]
