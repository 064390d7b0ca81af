# SPDX-License-Identifier: Apache-2.0
"""Check, before paying for a job, that its layout computes the same training as one process.

    python -m megatron.tools.verify_layout --layouts tp2,pp2,tp2sp-pp2-dp2-zero1 --shrink <flags of the training>

Each layout trains a few steps on CPU processes of this machine, from the same weights and data as one process, and is
compared with it in loss, gradient norm and every parameter. Exit code 0: all agree; 1: one does not.
"""

import math
import sys
from dataclasses import dataclass
from typing import Optional

from megatron.config import Config, setting
from megatron.errors import SettingsError, UsageError, run_main
from megatron.flags import parse_pretrain


@dataclass(frozen=True)
class Verify:
    """What to compare."""

    layouts: Optional[str] = setting(
        "layouts to check, such as tp2,pp2vp2,tp2sp-dp2-zero1 (default: that of the flags)", None
    )
    steps: int = setting("optimizer steps to train", 10)
    shrink: bool = setting("compare in a small twin of the training that has all its features", False)


def main(argv: list[str]) -> None:
    """Print a line per layout; exit with 1 if one differs by more than rounding."""
    config = parse_pretrain(argv, {"verify": Verify}, description=__doc__.splitlines()[0])
    asked: Verify = config.extra["verify"]

    from megatron.parity import TOLERANCE, compare, laid_out, one_process, trace
    from pretrain_gpt import recipe

    config, layouts = wanted(config, asked)
    precision = config.precision.precision
    if precision == "auto":
        raise SettingsError("--precision auto is not a number format to compare in", do="say fp32 or bf16")
    one = one_process(config)
    settings = [(layout, laid_out(config, layout)) for layout in layouts]  # all impossible ones are told at once
    steps = min(asked.steps, config.batch.train_iters or asked.steps)
    model = config.model
    print(f"{steps} steps of {model.num_layers} layers x {model.hidden_size} hidden in {precision}, against one process; "
          "largest relative difference in")  # fmt: skip
    print(f"{'layout':<24} ranks {'loss':>9} {'grad norm':>9} {'weights':>9}  result (worst parameter)")
    reference = trace(one, recipe(), 1, steps)
    verdicts = []
    for layout, resolved in settings:
        found = compare(reference, trace(resolved, recipe(), layout.world_size, steps))
        verdicts.append(found.passes(precision))
        print(f"{layout.text:<24} {layout.world_size:5} {found.loss:9.1e} {found.norm:9.1e} {found.weight:9.1e}  "
              f"{'PASS' if verdicts[-1] else 'FAIL'} ({found.worst})", flush=True)  # fmt: skip
    limits = TOLERANCE[precision]
    print(f"limits for {precision}: loss {limits['loss']:g}, gradient norm {limits['norm']:g}, weights "
          f"{limits['weight']:g}: {sum(verdicts)} of {len(verdicts)} pass")  # fmt: skip
    if not all(verdicts):
        sys.exit(1)


def wanted(config: Config, asked: Verify) -> tuple[Config, list]:
    """The settings to compare in, and the layouts that the command line names, or the one that its flags describe."""
    from megatron.parity import layout_of, parse_layout
    from megatron.planner.twin import asked_ranks, narrowed, original, twin_of

    if not asked.layouts and asked.shrink:
        twin = twin_of(*original(config, print), asked.steps)
        for words in twin.lost:
            print(f"note: not part of the twin: {words}")
        return twin.config, [layout_of(twin.config, twin.world_size)]
    if not asked.layouts:
        return config, [layout_of(config, asked_ranks(config))]
    try:
        layouts = [parse_layout(text) for text in asked.layouts.replace(",", " ").split()]
    except ValueError as error:
        raise UsageError(str(error), do="--layouts tp2,pp2,tp2sp-pp2-dp2-zero1") from None
    return (narrowed(config, common_sizes(layouts), steps=asked.steps) if asked.shrink else config), layouts


def common_sizes(layouts: list):
    """What a small model must be divisible by so that each of the layouts can be compared in it."""
    from megatron.planner.twin import Sizes

    tp, pp, dp, stages = (
        math.lcm(*(getattr(layout, name) for layout in layouts)) for name in ("tp", "pp", "dp", "stages")
    )
    return Sizes(tp, pp, dp, stages, layers=max(1, math.ceil(2 / stages)))


if __name__ == "__main__":
    run_main(main)
