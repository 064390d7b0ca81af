# SPDX-License-Identifier: Apache-2.0
"""Two steps of training in a layout, and how far they are from those of one process: loss, gradient norm, every weight."""

from functools import cache

from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.planner.parity import compare, laid_out, parse_layout, trace

STEPS = 2


def trained(layout: str, flags: str):
    config, layout = parse_any(flags.split()), parse_layout(layout)
    return trace(laid_out(config, layout), recipe_of(config), layout.world_size, STEPS)


@cache
def one_process(flags: str):
    return trained("", flags)


def check_layout(layout: str, flags: str) -> None:
    difference = compare(one_process(flags), trained(layout, flags))
    assert difference.passes("fp32"), difference


def check_bf16(flags: str) -> None:
    """Stages round as one process does, to the last bit; and all of it is near fp32."""
    halves = flags.replace("--precision fp32", "--bf16")
    found = trained("pp2", halves)
    same = compare(one_process(halves), found)
    assert same.loss == same.weight == 0.0 and same.norm < 1e-6, same
    rounded = compare(one_process(flags), found)
    assert 0 < rounded.loss < 1e-3 and 0 < rounded.norm < 1e-2 and 0 < rounded.weight < 2e-2, rounded
