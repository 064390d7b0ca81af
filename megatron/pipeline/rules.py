# SPDX-License-Identifier: Apache-2.0
"""Which settings of the pipeline work together (`settings.rules`); `stages.problems` says what is wrong with stages."""

from megatron.pipeline.own_schedule import is_file
from megatron.settings.rules import Rule

RULES = (
    Rule(
        lambda s: is_file(s.pipeline_schedule) and s.rampup_batch_size,
        lambda s: (
            f"--pipeline-schedule {s.pipeline_schedule} is for one number of micro-batches, and "
            "--rampup-batch-size changes it; drop one of them"
        ),
    ),
)
