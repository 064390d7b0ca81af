# SPDX-License-Identifier: Apache-2.0
"""Compare a shrunk job with one process: the same loss, gradient norm and weights, after a few steps on this CPU.

In fp32, which separates mistakes from rounding; and in the training's own format, for code that only it runs.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

from megatron.model.recipe import Recipe
from megatron.mpu.forked import RankFailed
from megatron.planner.parity import TOLERANCE, compare, laid_out, layout_of, one_process, rounding_of, trace
from megatron.planner.preflight.verdict import Check
from megatron.planner.shrink import ShrunkJob, shrunk_jobs_of
from megatron.settings import schema

DO = "find the cause: python -m megatron.tools.verify_layout --shrink with parts of the layout (--layouts tp2,pp2,dp2)"


def check_shrunk_job(config: schema.Config, world_size: int, recipe: Recipe, steps: int) -> Iterator[Check]:
    """A check for each number format, and for each shrunk job if one cannot have all axes."""
    shrunk_jobs = shrunk_jobs_of(config, world_size, steps)
    for precision in dict.fromkeys(("fp32", config.precision.precision)):
        for shrunk in shrunk_jobs:
            settings = replace(shrunk.config, precision=replace(shrunk.config.precision, precision=precision))
            yield compared(replace(shrunk, config=settings), recipe, steps)


def compared(shrunk: ShrunkJob, recipe: Recipe, steps: int) -> Check:
    """Compare a shrunk job with one process."""
    started, precision = time.perf_counter(), rounding_of(shrunk.config.precision)
    layout, limits = layout_of(shrunk.config, shrunk.world_size), TOLERANCE[precision]
    try:
        reference = trace(one_process(shrunk.config), recipe, 1, steps)
        difference = compare(
            reference,
            trace(laid_out(shrunk.config, layout), recipe, shrunk.world_size, steps, replayed=reference.choices),
        )
    except RankFailed as failed:
        why = failed.failure.what if failed.failure else failed.brief
        return Check(f"shrunk {precision}", "", f"the shrunk job does not train: {why}", DO)
    summary = (
        f"{layout.text} on {layout.world_size} rank(s) against one process, {steps} steps: largest relative "
        f"difference in loss {difference.loss:.1e}, gradient norm {difference.norm:.1e}, weights {difference.weight:.1e} "
        f"(limits {limits['loss']:g}, {limits['norm']:g}, {limits['weight']:g})"
    )
    if reference.choices:
        summary += f", {difference.choices:.2%} of tokens would choose other experts (limit {limits['choices']:.0%})"
    fault = "" if difference.passes(precision) else f"{summary}; worst: {difference.worst}"
    lost = "".join(f"; not covered: {words}" for words in shrunk.lost)
    return Check(f"shrunk {precision}", f"{summary}, {time.perf_counter() - started:.1f} s{lost}", fault, DO)
