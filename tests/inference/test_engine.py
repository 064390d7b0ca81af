# SPDX-License-Identifier: Apache-2.0
"""The generation engine: a text is what it is alone, whatever its neighbours are, and all memory comes back."""

import pytest

from tests.inference.engine_mixes import alone, check_mix, requests_of

MIXES = 100
LLAMA = dict(
    position_embedding_type="rope",
    swiglu=True,
    normalization="RMSNorm",
    num_query_groups=2,
    group_query_attention=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)
WINDOWED = dict(LLAMA, window_size="5,0", attn_logit_softcapping=20.0)


@pytest.mark.parametrize("layout", [{}, LLAMA, WINDOWED], ids=["gpt2", "llama", "windowed"])
def test_a_text_does_not_depend_on_its_neighbours(small_gpt, layout):
    """Random mixes with small caches, cancellations and common beginnings, against each request alone without a cache."""
    model = small_gpt(**layout)
    requests = requests_of(1, 40, model.vocab_size)
    wanted, sums = [alone(model, request) for request in requests], {}
    assert len({tuple(one.tokens) for one in wanted}) > 30
    for seed in range(MIXES if not layout else MIXES // 4):
        found = check_mix(model, requests, wanted, seed)
        sums = {name: sums.get(name, 0) + number for name, number in found.items()}
    assert min(sums.values()) > 5, sums  # everything has happened


@pytest.mark.full
def test_many_mixes(small_gpt):
    model = small_gpt()
    requests = requests_of(2, 400, model.vocab_size)
    wanted = [alone(model, request) for request in requests]
    for seed in range(10_000):
        check_mix(model, requests, wanted, 1000 + seed)
