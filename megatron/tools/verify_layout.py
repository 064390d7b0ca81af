# SPDX-License-Identifier: Apache-2.0
"""Check, before paying for a job, that its layout computes the same training as one process.

    python -m megatron.tools.verify_layout --layouts tp2,pp2,tp2sp-pp2-dp2-zero1 --shrink <flags of the training>

Each layout trains a few steps on CPU processes of this machine, from the same weights and data as one process, and is
compared with it in loss, gradient norm and every parameter. Exit code 0: all agree; 1: one does not.
"""

import math
import os
import sys
from dataclasses import dataclass, replace
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
    shrink: bool = setting("shrink the model to a few narrow layers, and the batch, with all its features", False)


def main(argv: list[str]) -> None:
    """Print a line per layout; exit with 1 if one differs by more than rounding."""
    config = parse_pretrain(argv, {"verify": Verify}, description=__doc__.splitlines()[0])
    asked: Verify = config.extra["verify"]

    os.environ["OMP_NUM_THREADS"] = "1"
    from megatron.parity import TOLERANCE, compare, laid_out, trace
    from pretrain_gpt import recipe

    layouts = wanted(config, asked)
    if asked.shrink:
        config = shrunk(config, layouts)
    precision = config.precision.precision
    if precision == "auto":
        raise SettingsError("--precision auto is not a number format to compare in", do="say fp32 or bf16")
    one = laid_out(
        config, replace(layouts[0], text="", tp=1, pp=1, vp=1, dp=1, zero=0, sp=False, schedule="", own=False)
    )
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


def wanted(config: Config, asked: Verify) -> list:
    """The layouts that the command line names, or the one that its flags describe."""
    from megatron.parity import layout_of, parse_layout

    if asked.layouts:
        try:
            return [parse_layout(text) for text in asked.layouts.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError(str(error), do="--layouts tp2,pp2,tp2sp-pp2-dp2-zero1") from None
    p = config.parallel
    least = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * (2 if p.sharding_stage else 1)
    return [layout_of(config, config.planner.world_size or least)]


def shrunk(config: Config, layouts: list) -> Config:
    """The same kind of model and batch, as small as every layout allows: features stay, widths go."""
    model, dp = config.model, math.lcm(*(layout.dp for layout in layouts))
    tp, stages = math.lcm(*(layout.tp for layout in layouts)), math.lcm(*(layout.stages for layout in layouts))
    heads = 2 * max(2, tp)
    groups = None if model.query_groups == model.num_attention_heads else max(2, tp)
    pp = math.lcm(*(layout.pp for layout in layouts))
    chunks = [layout.vp for layout in layouts if layout.own and layout.vp > 1]
    return replace(
        config,
        parallel=replace(
            config.parallel,
            num_layers_per_virtual_pipeline_stage=None,
            num_virtual_stages_per_pipeline_rank=chunks[0] if chunks else None,
        ),
        model=replace(
            model,
            num_layers=stages * max(1, math.ceil(2 / stages)),
            hidden_size=8 * heads,
            num_attention_heads=heads,
            num_query_groups=groups,
            group_query_attention=groups is not None,
            kv_channels=None,
            ffn_hidden_size=16 * heads if model.ffn_hidden_size or model.swiglu else None,
            seq_length=8 * tp,
            max_position_embeddings=8 * tp if model.position_embedding_type == "learned_absolute" else None,
        ),
        batch=replace(config.batch, micro_batch_size=1, global_batch_size=dp * max(2, pp), rampup_batch_size=None),
    )


if __name__ == "__main__":
    run_main(main)
