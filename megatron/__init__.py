# SPDX-License-Identifier: Apache-2.0
"""Pretraining of language models: the same code on a laptop's CPU (gloo) and on many GPUs (NCCL).

config says what, training tells the story, mpu is ranks, model is math, pipeline is order,
optimizer is state, checkpoint is boxes, data is numbers, planner looks ahead, guard watches.
"""

__version__ = "0.1.0"
