# SPDX-License-Identifier: Apache-2.0
"""The delta rule by fla-core: what its function is given. In its place is the recurrence that its documentation states,
token by token in fp64, on a CPU: layouts, grouped heads, norms, scale, states, and documents in one row.
"""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron.fused_kernels import TABLE, Case, choose_kernel, fla
from megatron.fused_kernels.delta_rule import delta_rule
from megatron.fused_kernels.documents import Documents
from tests.fused_kernels.interpret_kernels import drawn


def recurrence(
    q,
    k,
    v,
    g,
    beta,
    *,
    initial_state,
    output_final_state,
    use_qk_l2norm_in_kernel,
    cu_seqlens=None,
    cu_seqlens_cpu=None,
):
    """[B, T, H, K] and [B, T, HV, V] -> [B, T, HV, V]; states [N, HV, K, V]."""
    assert use_qk_l2norm_in_kernel and all(x.is_contiguous() for x in (q, k, v, g, beta))
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // q.shape[2], 2) for x in (q, k))
    edges = [0, v.shape[1]]
    if cu_seqlens is not None:
        assert len(v) == 1 and cu_seqlens.tolist() == cu_seqlens_cpu.tolist() and cu_seqlens.dtype == torch.int64
        edges = cu_seqlens.tolist()
    states, rows = [], []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        state = v.new_zeros(len(v), v.shape[2], k.shape[3], v.shape[3])
        state = state if initial_state is None else initial_state.double()
        for t in range(begin, end):
            state = state * g[:, t].exp()[..., None, None]
            told = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - told))
            rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * k.shape[3] ** -0.5)
        states.append(state)
    return torch.stack(rows, 1).float(), torch.cat(states).float() if output_final_state else None


@pytest.fixture(autouse=True)
def there(monkeypatch):
    package = ModuleType("fla.ops.gated_delta_rule")
    package.chunk_gated_delta_rule = recurrence
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, package)


def inputs(s=19, b=2, groups=3, r=2, K=8, V=5):
    q, k, v = drawn(s, b, groups, K), drawn(s, b, groups, K, seed=1), drawn(s, b, groups, r, V, seed=2)
    return q, k, v, -drawn(s, b, groups, r, seed=3).exp(), drawn(s, b, groups, r, seed=4).sigmoid()


@pytest.mark.parametrize("of", ["whole", "documents", "continued"])
def test_the_package_gets_what_the_rule_says(of):
    documents = Documents.of(np.array([[0] * 7 + [7] * 12, [0] * 18 + [18]], np.int32), "cpu")
    more = dict(whole={}, documents=dict(documents=documents), continued=dict(state=drawn(2, 3, 2, 8, 5, seed=9)))[of]
    found, wanted = fla.delta_rule(*inputs(), **more), delta_rule(*inputs(), **more)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-6)
    if of == "documents":
        assert found[1] is None
    else:
        torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-6)


def test_it_is_for_keys_and_formats_that_it_was_made_for(monkeypatch):
    row, *rest = TABLE["delta_rule"]
    monkeypatch.setitem(TABLE, "delta_rule", [replace(row, lacking="", probe=lambda: ""), *rest])
    chosen = lambda device, dtype, size: choose_kernel("delta_rule", Case(device, dtype, head_dim=size)).name
    assert chosen("cuda", torch.bfloat16, 128) == "fla"
    for other in (("cpu", torch.bfloat16, 128), ("cuda", torch.float32, 128), ("cuda", torch.bfloat16, 96)):
        assert chosen(*other) == "torch"
