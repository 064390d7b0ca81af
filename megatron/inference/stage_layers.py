# SPDX-License-Identifier: Apache-2.0
"""The layers of each stage of a model that continues texts: for the engine, and for the planner. Needs no torch."""

from megatron.model.facts import Facts
from megatron.model.t5.facts import even


def decoder_layers(facts: Facts, stages: int) -> list[int]:
    """The number of layers of each stage. The slowest one sets the pace, and the last one also has the output layer, so it
    gets fewer.

    >>> from megatron.model.gpt.facts import GPTFacts
    >>> from megatron.settings.schema import Model
    >>> small = GPTFacts(Model(num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=1024), 50257)
    >>> decoder_layers(small, 2)
    [8, 4]
    """
    layers, others = facts.num_layers, stages - 1
    if not others:
        return [layers]
    layer = sum(map(facts.layer_flops, range(layers))) / layers / facts.seq_length  # of one token
    output = facts.output_flops / layer  # in layers
    slowest = lambda last: max(-(-(layers - last) // others), last + output)
    last = min(range(even(layers, stages)[-1], 0, -1), key=slowest)
    return [*even(layers - last, others), last]
