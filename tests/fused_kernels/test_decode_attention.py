# SPDX-License-Identifier: Apache-2.0
"""Attention of texts' newest tokens on a CPU, against softmax in fp64 over copies of their keys; texts do not mix."""

import numpy as np
import pytest
import torch

from megatron.fused_kernels import decode_attention
from megatron.fused_kernels.decode_attention import Places

TEXTS = [(slice(8, 20),), (slice(40, 60), slice(0, 8), slice(20, 21)), (slice(24, 28), slice(32, 33)), (slice(36, 37),)]


def formula(query, keys, values, places, softcap, window, sinks=None) -> np.ndarray:
    """[g q d] of one text, query by query."""
    own = np.concatenate([np.arange(one.start, one.stop) for one in places])
    own = own if window is None else own[-window - 1 :]
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys[own], values[own]))
    found = []
    for group in range(query.shape[0]):
        for number, row in enumerate(query[group]):
            scores = keys[:, group] @ row * 0.3
            scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(float(sinks[group, number]) - scores.max())
            found.append(weights / (weights.sum() + sink) @ values[:, group])
    return np.concatenate(found)


@torch.inference_mode()
@pytest.mark.parametrize("softcap, window", [(None, None), (0.4, None), (None, 0), (None, 9), (0.4, 2)])
@pytest.mark.parametrize("groups, queries", [(4, 1), (2, 2), (1, decode_attention.FEW + 1)])
@pytest.mark.parametrize("sunk", [False, True], ids=["", "sinks"])
def test_on_cpu(groups, queries, softcap, window, sunk):
    generator = torch.Generator().manual_seed(1)
    keys, values = torch.full((2, 60, groups, 8), float("nan"))
    for slices in TEXTS:
        for one in slices:
            keys[one], values[one] = torch.randn(2, one.stop - one.start, groups, 8, generator=generator)
    query = torch.randn(len(TEXTS), groups, queries, 8, generator=generator)
    sinks = torch.linspace(-1, 2, groups * queries).view(groups, queries) if sunk else None
    more = dict(scale=0.3, softcap=softcap, window=window, sinks=sinks)
    run = lambda rows, texts: decode_attention.on_cpu(rows, keys, values, Places(texts, 4, torch.device("cpu")), **more)
    found = run(query, TEXTS)
    for number, slices in enumerate(TEXTS):
        wanted = formula(query[number], keys, values, slices, softcap, window, sinks)
        np.testing.assert_allclose(found[number], wanted, rtol=1e-5, atol=1e-6)
        assert torch.equal(run(query[number : number + 1], [slices])[0], found[number])  # alone, to the bit
