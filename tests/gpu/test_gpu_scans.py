# SPDX-License-Identifier: Apache-2.0
"""On a GPU: the delta rule by fla-core is that of plain torch, at the sizes of models."""

import pytest
import torch

from megatron.fused_kernels import Case, choose_kernel
from megatron.fused_kernels.delta_rule import delta_rule
from tests.fused_kernels.interpret_kernels import drawn

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("s", [1, 63, 1000])
def test_the_delta_rule_by_fla(size, s):
    chosen = choose_kernel("delta_rule", Case("cuda", torch.bfloat16, head_dim=size))
    if chosen.name != "fla":
        pytest.skip("fla-core is not installed, or its probe did not pass")
    shapes = (s, 2, 4, size), (s, 2, 4, size), (s, 2, 4, 2, size)
    q, k, v = (drawn(*shape, seed=n).bfloat16().cuda().requires_grad_() for n, shape in enumerate(shapes))
    g, beta = -drawn(s, 2, 4, 2, seed=3).exp().cuda(), drawn(s, 2, 4, 2, seed=4).sigmoid().cuda()
    results = []
    for run in (chosen.run, delta_rule):
        y, state = run(q, k, v, g, beta)
        results.append([y, state, *torch.autograd.grad(y.float().square().sum(), [q, k, v])])
    for (found, wanted), bound in zip(zip(*results, strict=True), (1e-2, 1e-2, 3e-2, 3e-2, 3e-2), strict=True):
        assert ((found.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item() < bound
