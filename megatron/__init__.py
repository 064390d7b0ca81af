# SPDX-License-Identifier: Apache-2.0
"""Pretraining of language models: the same code on a laptop's CPU (gloo) and on many GPUs (NCCL).

config says what, training tells the story, mpu is ranks, model is math, pipeline is order,
optimizer is state, checkpoint is boxes, data is numbers, planner looks ahead, guard watches.
"""

import sys

__version__ = "0.1.0"

if sys.version_info < (3, 10):  # noqa: UP036 (told before anything is imported that an older Python cannot read)
    sys.exit(
        "error: Python {}.{} is too old: 3.10 to 3.13 are needed\n"
        "  -> source .venv/bin/activate (scripts/quickstart.sh makes it)".format(*sys.version_info[:2])
    )
