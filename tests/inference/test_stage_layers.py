# SPDX-License-Identifier: Apache-2.0
"""The layers of stages that generate text: of all divisions none is faster, by FLOPs that are counted by hand."""

from itertools import combinations, pairwise

import pytest

from megatron.inference.stage_layers import decoder_layers
from megatron.model.gpt.facts import GPTFacts
from megatron.settings.schema import Model

H = 64


@pytest.mark.parametrize("vocab_size", [128, 1500, 6000])
@pytest.mark.parametrize("layers", [5, 7, 12])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_no_division_has_a_faster_slowest_stage(stages, layers, vocab_size):
    """Whether or not stages divide the layers. The last stage has the output layer besides."""
    model = Model(layers, H, 4, seq_length=32, make_vocab_size_divisible_by=1)
    found = decoder_layers(GPTFacts(model, vocab_size), stages)
    layer = 2 * 12 * H * H + 2 * 2 * 32 * H  # matrices: 12 h^2 weights; attention: scores and sums over the sequence
    output = 2 * H * vocab_size

    def slowest(counts) -> float:
        return max(layer * count + output * (stage == stages - 1) for stage, count in enumerate(counts))

    cuts = combinations(range(1, layers), stages - 1)
    every = [[stop - start for start, stop in pairwise((0, *cut, layers))] for cut in cuts]
    assert sum(found) == layers and slowest(found) == min(map(slowest, every))
