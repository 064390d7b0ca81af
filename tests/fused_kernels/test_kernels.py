# SPDX-License-Identifier: Apache-2.0
"""The table picks well, and never what does not cover a case. What the kernels compute: the other files here."""

import itertools

import pytest
import torch

from megatron.fused_kernels import EVERYTHING, TABLE, Case, choose_kernel, describe_document_kernel, reference


@pytest.mark.parametrize(
    "case, backend, name",
    [
        (Case("cpu", torch.bfloat16, 256, 256, causal=True), "auto", "block-causal"),
        (Case("cpu", torch.bfloat16, 256, 256, causal=True), "sdpa", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 9000, 9000, causal=True), "auto", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 256, 256, causal=True, dropout=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 9000, 9000, causal=True, dropout=True, masked=True), "sdpa", "block-causal"),
        (Case("cpu", torch.float32, 256, 256, causal=True, masked=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 256, 256, causal=True, masked=True), "sdpa", "sdpa (CPU)"),
        (Case("cpu", torch.float16, 256, 256, causal=True, scaled_softmax=True), "flash", "reference"),
        (Case("cpu", torch.float16, 256, 256, causal=True, scaled_softmax=True, dropout=True), "auto", "reference"),
        (Case("cpu", torch.float32, 128, 256, causal=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 4500, 9000, causal=True), "auto", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 1, 256, causal=True), "auto", "reference"),
        (Case("cpu", torch.float32, 256, 256), "auto", "block-full"),
        (Case("cpu", torch.float32, 256, 256, masked=True, grouped=True), "auto", "block-full"),
        (Case("cpu", torch.float32, 256, 256), "explicit", "block-full"),
        (Case("cpu", torch.float32, 256, 256, dropout=True), "auto", "block-full"),
        (Case("cpu", torch.float32, 128, 256), "auto", "block-full"),
        (Case("cpu", torch.float32, 300, 40, masked=True, dropout=True), "sdpa", "block-full"),
        (Case("cpu", torch.float32, 256, 256, causal=True, documents=True), "auto", "block-causal"),
        (Case("cpu", torch.float32, 256, 256, causal=True, documents=True), "sdpa", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 9000, 9000, causal=True, documents=True), "auto", "sdpa (CPU)"),
        (Case("cpu", torch.float32, 9000, 9000, causal=True, documents=True, dropout=True), "auto", "block-causal"),
    ],
)
def test_choice(case, backend, name):
    assert choose_kernel("attention", case, backend).name == name


def test_documents_on_cuda(monkeypatch):
    """The kernels of documents, where there are some and the case is theirs; none of them without."""
    for entry in TABLE["attention"]:
        monkeypatch.setitem(entry.__dict__, "lacking", "")
        monkeypatch.setitem(entry.__dict__, "probe", lambda: "")
    packed = dict(device="cuda", dtype=torch.bfloat16, queries=64, keys=256, causal=True, documents=True, head_dim=128)

    def chosen(backend="auto", **more):
        return choose_kernel("attention", Case(**packed | more), backend).name

    assert [chosen(backend) for backend in ("auto", "flash", "sdpa")] == ["flash-attn varlen"] * 2 + ["varlen (CUDA)"]
    assert chosen("sdpa", head_dim=264) == chosen("sdpa", dtype=torch.float32) == "sdpa (CUDA)"
    assert chosen(dropout=True) == "block-causal"
    assert chosen(documents=False) not in ("flash-attn varlen", "varlen (CUDA)")
    told = lambda **more: describe_document_kernel(Case(**packed | more), "auto")
    assert told() == ["kernels: attention of documents by flash-attn varlen"] and told(device="cpu") == []
    [line] = told(dropout=True, softcap=True)
    assert line.endswith("by block-causal, not by varlen (CUDA): it has no dropout, softcap")
    [line] = told(dropout=True, unfused=True)
    assert "by reference, with a mask of all pairs, not by" in line
    assert told(head_dim=264)[0].endswith(
        "by sdpa (CUDA), not by varlen (CUDA): not for torch.bfloat16 with 264 channels a head"
    )
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen() == "varlen (CUDA)"


@torch.no_grad()
def test_choice_in_generation():
    chosen = lambda dtype=torch.float32, queries=1, **more: (
        choose_kernel("attention", Case("cpu", dtype, queries, 256, causal=True, **more)).name
    )
    assert chosen() == chosen(grouped=True) == chosen(window=7) == "one query"
    assert chosen(dtype=torch.bfloat16) == chosen(softcap=True) == chosen(unfused=True) == "reference"
    assert chosen(queries=2) == "block-causal"


def cannot(name: str, case: Case) -> bool:
    """What would be wrong, from how each kernel works: blocks end at the last key that one of
    their queries sees; the packages take no mask of ours."""
    ordered = case.causal and case.queries == case.keys
    if case.sinks and not name.startswith("flash with sinks") and name not in ("block-causal", "reference"):
        return True
    return {
        "flash-attn": case.masked
        or case.documents
        or case.dropout
        or case.scaled_softmax
        or not ordered
        and case.causal,
        "flash-attn varlen": not case.documents or case.masked or case.dropout or case.scaled_softmax,
        "varlen (CUDA)": not case.documents or case.masked or case.dropout or case.dtype == torch.float32,
        "sdpa (CUDA)": case.dropout,
        "block-causal": not case.causal or case.scaled_softmax,
        "block-full": case.causal or case.documents or case.scaled_softmax,
        "sdpa (CPU)": case.dropout or case.scaled_softmax,
        "flash with sinks (CPU)": not case.sinks or case.masked or case.dropout or case.scaled_softmax,
        "flash with sinks (CUDA)": not case.sinks or case.masked or case.dropout or case.dtype == torch.float32,
        "one query": case.queries > 1
        or not case.causal
        or case.masked
        or case.documents
        or case.dropout
        or case.softcap,
        "reference": False,
    }[name]


@torch.no_grad()  # in generation, too
def test_nothing_is_chosen_that_cannot(monkeypatch):
    """Over all cases, with every package and device there."""
    for entries in TABLE.values():
        for entry in entries:
            monkeypatch.setitem(entry.__dict__, "lacking", "")
            monkeypatch.setitem(entry.__dict__, "probe", lambda: "")
    met, flags = set(), [False, True]
    for device, dtype, sizes in itertools.product(
        ("cpu", "cuda"),
        (torch.float32, torch.bfloat16, torch.float16),
        ((1, 1), (256, 256), (9000, 9000), (1, 256), (128, 256), (300, 40)),
    ):
        for causal, masked, dropout, grouped, scaled, packed, sinks in itertools.product(*[flags] * 7):
            if causal and sizes[0] > sizes[1] or (packed or sinks) and (masked or not causal):
                continue
            case = Case(device, dtype, *sizes, causal, masked, dropout, grouped, scaled, documents=packed, sinks=sinks)
            for backend in ("auto", "explicit", "sdpa", "flash"):
                name = choose_kernel("attention", case, backend).name
                assert not cannot(name, case), (name, case, backend)
                met.add(name)
    assert met == {entry.name for entry in TABLE["attention"]}


def test_every_op_ends_with_a_reference_that_covers_all():
    for op, entries in TABLE.items():
        assert entries[-1].run is getattr(reference, op)
        assert entries[-1].covers == EVERYTHING
        assert entries[-1].fits(Case("anything", torch.float64))


def test_memory_is_kept_where_the_c_library_can():
    import ctypes
    import sys

    from megatron.mpu.cpu_memory import keep_memory

    assert keep_memory() == (sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "mallopt"))
