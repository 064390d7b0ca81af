# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of pipeline settings (`settings.rules`); `stages.problems` checks the stages themselves."""

from megatron.pipeline.custom_schedule import is_file
from megatron.pipeline.stages import chunks_of
from megatron.settings.rules import Rule, said
from megatron.settings.stage_layout import LAYOUT, PARTS, StageLayout, read_layout
from megatron.telemetry.figures import several

RULES = (
    Rule(
        lambda s: is_file(s.pipeline_schedule) and s.settings.batch.size_flag,
        lambda s: (
            f"--pipeline-schedule {s.pipeline_schedule} is for one number of micro-batches, and "
            f"{s.settings.batch.size_flag} changes it; drop one of them"
        ),
    ),
    Rule(
        lambda s: s.overlap_moe_expert_parallel_comm and s.pipeline_schedule == "gpipe",
        lambda s: (
            "--overlap-moe-expert-parallel-comm lets a forward and a backward pass take turns, and with "
            "--pipeline-schedule gpipe all backward passes come after all forward passes; 1f1b would work"
        ),
    ),
    Rule(
        lambda s: _layout(s).depths not in (0, s.settings.model.depths),
        lambda s: (
            f"{said(s, 'pipeline_stage_layers')} has {several(_layout(s).depths, 'depth')} of multi-token prediction (m), "
            f"and --mtp-num-layers is {s.settings.model.depths}; give as many m as depths"
        ),
    ),
)

REMARKS = (
    Rule(
        lambda s: s.pp == 1 and s.pipeline_schedule in SEVERAL_STAGES and _given(s),
        lambda s: (
            f"--pipeline-schedule {s.pipeline_schedule} is for --pipeline-model-parallel-size above 1: one stage has no "
            "bubble that it could fill"
        ),
    ),
    Rule(
        lambda s: s.pp > 1 and s.pipeline_schedule == "1f1b" and _given(s) and _chunks(s) > 1,
        lambda s: (
            f"--pipeline-schedule 1f1b with {_chunks(s)} model chunks a rank is the interleaved schedule "
            "(--pipeline-schedule interleaved)"
        ),
    ),
    Rule(
        lambda s: s.pp > 1 and _depths_before_the_loss(s),
        lambda s: (
            f"{LAYOUT} has m in a stage before the last: here depths of multi-token prediction are on the last stage, "
            "with the loss"
        ),
    ),
    Rule(
        lambda s: s.pp > 1 and s.settings.model.depths and _layout(s).counts and not _layout(s).depths,
        lambda s: (
            f"{LAYOUT} has no m: {several(s.settings.model.depths, 'depth')} of multi-token prediction (--mtp-num-layers) "
            f"{'is' if s.settings.model.depths == 1 else 'are'} on the last stage, with the loss"
        ),
    ),
    Rule(
        lambda s: s.recompute_granularity == "full" and (s.recompute_num_layers or 0) > s.num_layers,
        lambda s: (
            f"--recompute-num-layers {s.recompute_num_layers}: the model has {several(s.num_layers, 'layer')}, and all "
            "layers of a stage are recomputed"
            + (" together, from one saved input" if s.recompute_method != "block" else "")
        ),
    ),
)

SEVERAL_STAGES = ("gpipe", "zb-h1", "zb-v", "v-half")  # `interleaved` is refused on one stage


def _layout(s) -> StageLayout:
    """What a given --pipeline-model-parallel-layout lists; without one, nothing."""
    given = s.settings.given("pipeline_stage_layers")
    return read_layout(str(given.value)) if given and PARTS & set(str(given.value)) else StageLayout(())


def _depths_before_the_loss(s) -> bool:
    layout = _layout(s)
    return layout.ahead not in (None, len(layout.counts) - 1)


def _given(s) -> bool:
    given = s.settings.given("pipeline_schedule")
    return given is not None and given.is_request


def _chunks(s) -> int:
    return chunks_of(s.settings.parallel, s.num_layers)
