# SPDX-License-Identifier: Apache-2.0
"""Rules for combinations of pipeline settings (`settings.rules`); `stages.problems` checks the stages themselves."""

from megatron.pipeline.custom_schedule import is_file
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
